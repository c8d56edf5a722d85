"""The methods that a class runs, the helper functions they come to, and the activation calls in all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from actswap import opaque
from actswap.activation import Activation
from actswap.callees import Callee, activations
from actswap.calls import RawCall, Reference
from actswap.classes import unwrapped
from actswap.finder import Finder
from actswap.mentions import applies, code_of, helpers, live, mentions, methods, names_in, unbound
from actswap.objects import Code, is_followed, leaves, spelled
from actswap.patterns import IDIOMS, MISSING, Pattern
from actswap.recognize import Tables
from actswap.source import Unverified, codes, verify


class _ClassScan:
    """The methods of one class, the helper functions they come to, and the activation calls in all of them."""

    def __init__(self, cls: type, tables: Tables) -> None:
        self.cls, self.tables = cls, tables
        self.live = live(cls)
        self.relevant = tables.relevant
        self.calls: list[RawCall] = []
        self.references: list[Reference] = []
        self.inside: dict[FunctionType, list[RawCall]] = {}
        self.seen: dict[int, Any] = {}

    def run(self) -> list[RawCall]:
        """The calls in methods, then those in helpers."""
        found = list(methods(self.cls))
        bodies: dict[int, list[RawCall]] = {}
        for made in (True, False):  # what a forward comes to first: a helper is looked at once
            for index, (base, name, attribute) in enumerate(found):
                if (name in self.live) is made:
                    bodies[index] = self._method(base, name, attribute, made)
        self.calls = [call for index in range(len(found)) for call in bodies[index]]
        for helper, calls in self.inside.items():
            via = self._via(helper)
            reasons = [reference.blocked for reference in via if reference.blocked]
            made = any(reference.name in self.live for reference in via if reference.cls is not None)
            for call in calls:
                if call.makes and not made:
                    continue
                call = replace(call, via=via)
                self.calls.append(blocked(call, f"{helper.__qualname__}: {reasons[0]}") if reasons else call)
        return list(_once(self.calls))

    def _method(self, base: type, name: str, attribute: Any, made: bool) -> list[RawCall]:
        """The calls in one method."""
        fixed = isinstance(attribute, (staticmethod, classmethod))
        function = unwrapped(unbound(attribute))
        if function is None or not self._is_relevant(function, made):
            return []
        bound = self.cls if isinstance(attribute, classmethod) else None
        calls, references = self._body(base, name, function, not fixed, made, bound)
        calls = [call for call in calls if made or not call.makes]
        if fixed:
            reason = f"{name} is a {type(attribute).__name__}: it has no instance"
            calls = [blocked(call, reason) for call in calls]
            references = [replace(reference, blocked=reason) for reference in references]
        self._follow(references, made)
        return calls

    def stored(self, name: str, function: FunctionType, bound: type | None = None) -> list[RawCall]:
        """The calls in a function that is kept in an attribute, and in the helpers it comes to."""
        if bound is None and not self._is_relevant(function, True):
            return []
        calls, references = self._body(self.cls, name, function, False, True, bound)
        self._follow(references, True)
        reason = f"it stands in the function kept in the attribute {name}"
        return [blocked(call, reason) for call in [*calls, *(c for inside in self.inside.values() for c in inside)]]

    def _is_relevant(self, function: FunctionType, made: bool) -> bool:
        """Whether a function, or a helper it comes to, mentions an activation; from the code objects alone."""
        if (function, made) not in self.relevant:
            waiting, seen, found = [function], {function}, False
            while waiting and not found:
                inner = waiting.pop()
                known = self.relevant.get((inner, made))
                found = mentions(inner, self.tables, made) if known is None else known
                if known is None:
                    new = {f for f in map(unwrapped, helpers(inner)) if f is not None} - seen
                    seen |= new
                    waiting += new
            self.relevant[function, made] = found
        return self.relevant[function, made]

    def _body(
        self, cls: type, name: str, function: FunctionType, is_method: bool, made: bool, bound: type | None = None
    ) -> tuple[list[RawCall], list[Reference]]:
        """The calls in a function, and the helpers it names.

        Args:
            made: whether a forward comes to it: then what it makes, and the objects it names, count too.
            bound: the class that a class method is bound to.
        """
        try:
            method = verify(function)
        except Unverified as problem:
            return _without_source(cls, name, function, self.tables, str(problem)), []
        finder = Finder(cls, name, method, self.tables, is_method, bound).run()
        found = finder.found
        for node, value in finder.objects if made else ():
            found += self._in_object(finder, node, value)
        for node, cls in finder.made if made else ():
            found += self._in_made(finder, node, cls)
        return [replace(call, in_method=is_method) for call in found], finder.references

    def _in_object(self, finder: Finder, node: ast.expr, value: Any) -> Iterator[RawCall]:
        """The activations in an object that code names: each is blocked, and each object looked at once."""
        for keys, leaf in leaves(value, self.tables.is_callable, seen=self.seen):
            reason = f"it is inside {ast.unparse(node)}{spelled(keys)}, an object that is no part of the model"
            yield from self._outside(finder, node, self._once_inside(leaf, names_in(finder.method.function)), reason)

    def _in_made(self, finder: Finder, node: ast.expr, made: type) -> Iterator[RawCall]:
        """The activations in the code of a class that the code makes an instance of."""
        if id(made) not in self.seen and applies(made, self.tables):
            self.seen[id(made)] = made
            names = names_in(finder.method.function) | {"__init__", "__post_init__"}
            reason = f"it is inside the {made.__name__} that {ast.unparse(node)} makes, which is no part of the model"
            yield from self._outside(finder, node, self._once_inside(made, names), reason)

    @staticmethod
    def _outside(finder: Finder, node: ast.expr, found: Iterable[Activation], reason: str) -> Iterator[RawCall]:
        for activation in found:
            yield replace(finder.raw(node, None, blocked=reason), patterns=(Pattern(activation, "", ()),))

    def _once_inside(self, leaf: Any, names: set[str]) -> list[Activation]:
        """The activations that an object without a place in the model is, holds, or applies in its code.

        Each is looked for once for all classes; what is asked on the way to itself is none.

        Args:
            names: what the code that names the object mentions: of the object's methods, those count.
        """
        known, key = self.tables.inside, (id(leaf), frozenset[str]())
        cls = leaf if isinstance(leaf, type) else leaf.cls if isinstance(leaf, Code) else None
        functions = code_of(cls, names) if cls is not None else []
        if cls is not None:
            key = id(cls), frozenset(name for name, _ in functions)
        if key not in known:
            known[key] = leaf, []
            found = self._inside(leaf) if cls is None else self._inside_class(cls, functions)
            known[key] = leaf, list(dict.fromkeys(found))
        return known[key][1]

    def _inside_class(self, cls: type, functions: Iterable[tuple[str, FunctionType]]) -> Iterator[Activation]:
        for part in (part for base in filter(is_followed, cls.__mro__) for part in vars(base).values()):
            if not isinstance(part, type):
                yield from activations(part, self.tables)
        for name, function in functions:
            yield from self._inside_function(cls, name, function)

    def _inside_function(
        self, cls: type, name: str, function: FunctionType, bound: type | None = None
    ) -> Iterator[Activation]:
        for call in in_attribute(cls, name, function, self.tables, bound):
            if not call.idiom:  # nobody knows what it is for there: it would not be swapped in a module either
                yield from call.candidates

    def _inside(self, leaf: Any) -> Iterator[Activation]:
        bound = None
        if isinstance(leaf, MethodType):
            bound = leaf.__self__ if isinstance(leaf.__self__, type) else None
            leaf = leaf.__self__ if isinstance(leaf.__self__, nn.Module) else leaf.__func__
        if isinstance(leaf, nn.Module):
            for module in leaf.modules():
                if (found := self.tables.module(module)) is not None:
                    yield found.activation
                else:
                    yield from (a for call in in_class(type(module), self.tables) for a in call.candidates)
        elif isinstance(leaf, FunctionType) and not self.tables.call(leaf):
            yield from self._inside_function(self.cls, "", leaf, bound)
        elif inside := opaque.function(leaf, self.tables):
            yield from inside[1]
        else:
            yield from activations(leaf, self.tables)

    def _follow(self, references: Iterable[Reference], made: bool) -> None:
        for reference in references:
            inner = unwrapped(reference.helper)
            if inner is None or not self._is_relevant(inner, made):
                continue
            self.references.append(reference)
            if reference.helper not in self.inside:
                self.inside[reference.helper] = []
                calls, further = self._body(self.cls, reference.name, inner, False, made)
                self.inside[reference.helper] = calls
                self._follow(further, made)

    def _via(self, helper: FunctionType) -> tuple[Reference, ...]:
        """Every reference on a way from a method to the helper."""
        found: dict[Reference, None] = {}
        targets = [helper]
        for target in targets:  # grows while it runs
            for reference in self.references:
                if reference.helper is target and reference not in found:
                    found[reference] = None
                    if reference.cls is None:
                        targets += [h for h in self.inside if unwrapped(h) is reference.holder.function]
        return tuple(found)


def of_attribute(cls: type, name: str, value: Any, tables: Tables) -> list[RawCall]:
    """The calls `self.<name>(...)` of a stored function, where one of them passes more than the tensor.

    A module in the attribute's place would be given those arguments too, so the calls are what must change.
    """
    found: list[RawCall] = []
    for base, method_name, attribute in methods(cls):
        function = unwrapped(attribute)
        if function is None or not any(name in code.co_names for code in codes(function.__code__)):
            continue
        try:
            finder = Finder(base, method_name, verify(function), tables, is_method=True)
        except Unverified:
            continue  # what it passes is not known; most pass the tensor alone
        finder.run()
        calls = [node for called, node in finder.attribute_calls if called == name]
        finder.found.clear()
        for node in calls:
            finder.add(node, Callee(value), tables.call(value))
        found += finder.found
    extra = [
        call for call in found if isinstance(call.node, ast.Call) and len(call.node.args) + len(call.node.keywords) > 1
    ]
    return found if extra else []


def in_attribute(
    cls: type, name: str, function: FunctionType, tables: Tables, bound: type | None = None
) -> list[RawCall]:
    """The activation calls in a function that an instance keeps in an attribute, where they cannot be rewritten.

    Args:
        bound: the class that a class method is bound to.
    """
    return _ClassScan(cls, tables).stored(name, function, bound)


def in_class(cls: type, tables: Tables) -> list[RawCall]:
    """Every activation call in the code that instances of a class run, each in the class whose body it stands in."""
    return _ClassScan(cls, tables).run()


def _once(calls: Iterable[RawCall]) -> Iterator[RawCall]:
    """The calls, without those that a helper reference comes to in a static method, where they are refused already."""
    refused: set[tuple[CodeType, ast.expr | None]] = set()
    for call in calls:
        key = call.function.__code__, call.node
        if not call.via or key not in refused:
            yield call
        if call.blocked is not None and not call.via:
            refused.add(key)


def blocked(call: RawCall, reason: str) -> RawCall:
    """The call with a reason why it cannot be rewritten; the first reason stays."""
    return replace(call, blocked=reason if call.blocked is None else call.blocked)


def _without_source(cls: type, name: str, function: FunctionType, tables: Tables, reason: str) -> list[RawCall]:
    """The activations that code without trustworthy source names, each once."""
    found: dict[str, list[Pattern]] = {}
    names = {n for code in codes(function.__code__) for n in code.co_names}
    values = {n: function.__globals__.get(n, MISSING) for n in names}
    modules = [value for value in values.values() if isinstance(value, ModuleType)]
    for n in sorted(names - IDIOMS):
        patterns = tables.call(values[n]) or tables.methods.get(n, [])
        for module in modules:
            patterns = patterns or tables.call(getattr(module, n, MISSING))
        if patterns:
            found[n] = patterns
    return [RawCall(cls, name, None, function, None, tables, tuple(p), blocked=reason) for p in found.values()]
