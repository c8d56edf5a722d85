"""The methods that a class runs, the helper functions they come to, and the activation calls in all of them."""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from actswap import opaque
from actswap.activation import Activation
from actswap.callees import Callee, activations
from actswap.calls import RawCall, Reference
from actswap.classes import unwrapped
from actswap.finder import Finder
from actswap.objects import leaves, spelled
from actswap.patterns import IDIOMS, MISSING, Pattern
from actswap.recognize import Tables, recognised_class
from actswap.scope import NOT_FOLLOWED, followed
from actswap.source import Unverified, codes, filled, verify

_INITIALISES = re.compile(r"_?(init|reset)_\w*(weights?|param(eter)?s?|buffers?)")
"""Methods that fill a module's parameters: what they call activates nothing."""


def methods(cls: type) -> Iterator[tuple[type, str, Any]]:
    """The class attributes that an instance may run: of an overridden method only what `super()` can reach."""
    seen: set[str] = set()
    through_super: set[str] = set()
    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        for name, attribute in vars(base).items():
            dunder = name.startswith("__") and name.endswith("__") and name != "__call__"
            if dunder or _INITIALISES.match(name) or (name in seen and name not in through_super):
                continue
            function = unwrapped(attribute)
            if function is None and not isinstance(attribute, (staticmethod, classmethod)):
                continue
            yield base, name, attribute
            if function is not None and any("super" in code.co_names for code in codes(function.__code__)):
                through_super.update(n for code in codes(function.__code__) for n in code.co_names)
        seen.update(vars(base))


def live(cls: type) -> set[str]:
    """The names of the methods that a forward may come to, by the names that the code mentions."""
    mentioned: dict[str, set[str]] = {}
    for _, name, attribute in methods(cls):
        function = unwrapped(getattr(attribute, "__func__", attribute))
        if function is not None:
            names = {n for code in codes(function.__code__) for n in code.co_names}
            mentioned.setdefault(name, set()).update(names)
    found = {"forward", "__call__"}
    waiting = list(found)
    while waiting:
        new = mentioned.get(waiting.pop(), set()) & mentioned.keys() - found
        found |= new
        waiting += new
    return found


def mentions(function: FunctionType, tables: Tables, made: bool) -> bool:
    """Whether the code names anything that could be an activation: the cheap test before any parsing.

    Args:
        made: whether the classes of activation modules count too.
    """
    known = tables.names | tables.class_names if made else tables.names
    for code in codes(function.__code__):
        values = [function.__globals__.get(name, MISSING) for name in code.co_names]
        if not known.isdisjoint(code.co_names) or any(_is_mention(value, tables, made) for value in values):
            return True
        if any(opaque.operator_named(name) for name in code.co_names) and _has_operators(values):
            return True
        if any(isinstance(constant, str) and constant in tables.methods for constant in code.co_consts):
            return True
    held = [cell.cell_contents for cell in function.__closure__ or () if filled(cell)]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return any(_is_mention(value, tables, made) for value in held)


def _is_mention(value: Any, tables: Tables, made: bool) -> bool:
    """Whether an object that code names is an activation, or holds one or code that applies one."""
    if isinstance(value, type) and not isinstance(value, enum.EnumMeta):
        return made and (recognised_class(value, tables) is not None or applies(value, tables))
    if tables.call(value):
        return True
    if isinstance(value, FunctionType) and unwrapped(value) is not None:
        return False  # a helper, followed by itself
    held = (leaf for _, leaf in leaves(value, tables.is_callable))
    return any(not isinstance(v, BuiltinFunctionType) or tables.call(v) or opaque.function(v, tables) for v in held)


def _has_operators(values: Iterable[Any]) -> bool:
    """Whether code that names these objects can come to operators outside PyTorch: in torch.ops, or in extensions."""
    modules = [value for value in values if isinstance(value, ModuleType)]
    return any(m is torch or m is torch.ops or m.__name__.partition(".")[0] not in NOT_FOLLOWED for m in modules)


def applies(cls: type, tables: Tables) -> bool:
    """Whether the code of a class outside torch mentions an activation, in its constructor too."""
    if cls not in tables.applies:
        tables.applies[cls] = False  # ends a recursion
        own = [base for base in cls.__mro__ if (base.__module__ or "").partition(".")[0] not in NOT_FOLLOWED]
        functions = [f for base in own for a in vars(base).values() if isinstance(f := _unbound(a), FunctionType)]
        tables.applies[cls] = any(mentions(f, tables, True) for f in functions if not tables.call(f))
    return tables.applies[cls]


def helpers(function: FunctionType) -> Iterator[FunctionType]:
    """The helper functions that a function names."""
    names = {name for code in codes(function.__code__) for name in code.co_names}
    values = [function.__globals__.get(name) for name in names]
    modules = [v for v in values if isinstance(v, ModuleType) and v.__name__.partition(".")[0] not in NOT_FOLLOWED]
    values += [getattr(module, name, None) for module in modules for name in names]
    values += [_unbound(vars(v).get(name)) for v in values if isinstance(v, type) for name in names]
    values += [cell.cell_contents for cell in function.__closure__ or () if filled(cell)]
    return filter(followed, values)


def _unbound(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute


class _ClassScan:
    """The methods of one class, the helper functions they come to, and the activation calls in all of them."""

    def __init__(self, cls: type, tables: Tables) -> None:
        self.cls, self.tables = cls, tables
        self.live = live(cls)
        self.relevant: dict[tuple[FunctionType, bool], bool] = {}
        self.calls: list[RawCall] = []
        self.references: list[Reference] = []
        self.inside: dict[FunctionType, list[RawCall]] = {}
        self.seen: dict[int, Any] = {}

    def run(self) -> list[RawCall]:
        """The calls in methods, then those in helpers."""
        for base, name, attribute in methods(self.cls):
            fixed = isinstance(attribute, (staticmethod, classmethod))
            function = unwrapped(_unbound(attribute))
            made = name in self.live
            if function is None or not self._is_relevant(function, made):
                continue
            bound = self.cls if isinstance(attribute, classmethod) else None
            calls, references = self._body(base, name, function, not fixed, bound)
            calls = [call for call in calls if made or not call.makes]
            if fixed:
                reason = f"{name} is a {type(attribute).__name__}: it has no instance"
                calls = [blocked(call, reason) for call in calls]
                references = [replace(reference, blocked=reason) for reference in references]
            self.calls += calls
            self._follow(references)
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

    def stored(self, name: str, function: FunctionType, bound: type | None = None) -> list[RawCall]:
        """The calls in a function that is kept in an attribute, and in the helpers it comes to."""
        if bound is None and not self._is_relevant(function, True):
            return []
        calls, references = self._body(self.cls, name, function, is_method=False, bound=bound)
        self._follow(references)
        reason = f"it stands in the function kept in the attribute {name}"
        return [blocked(call, reason) for call in [*calls, *(c for inside in self.inside.values() for c in inside)]]

    def _is_relevant(self, function: FunctionType, made: bool) -> bool:
        """Whether a function, or a helper it comes to, mentions an activation; from the code objects alone."""
        key = function, made
        if key not in self.relevant:
            self.relevant[key] = False  # ends a recursion
            self.relevant[key] = mentions(function, self.tables, made) or any(
                self._is_relevant(inner, made) for inner in map(unwrapped, helpers(function)) if inner is not None
            )
        return self.relevant[key]

    def _body(
        self, cls: type, name: str, function: FunctionType, is_method: bool, bound: type | None = None
    ) -> tuple[list[RawCall], list[Reference]]:
        try:
            method = verify(function)
        except Unverified as problem:
            return _without_source(cls, name, function, self.tables, str(problem)), []
        finder = Finder(cls, name, method, self.tables, is_method, bound).run()
        found = finder.found + [call for node, value in finder.objects for call in self._in_object(finder, node, value)]
        if name in self.live or not is_method:
            found += [call for node, made in finder.made for call in self._in_made(finder, node, made)]
        return [replace(call, in_method=is_method) for call in found], finder.references

    def _in_object(self, finder: Finder, node: ast.expr, value: Any) -> Iterator[RawCall]:
        """The activations in an object that code names: each is blocked, and each object looked at once."""
        for keys, leaf in leaves(value, self.tables.is_callable, seen=self.seen):
            what = ast.unparse(node) + spelled(keys)
            for activation in dict.fromkeys(self._inside(leaf)):
                patterns = (Pattern(activation, "", ()),)
                reason = f"it is inside {what}, an object that is no part of the model"
                yield replace(finder.raw(node, None, blocked=reason), patterns=patterns)

    def _in_made(self, finder: Finder, node: ast.expr, made: type) -> Iterator[RawCall]:
        """The activations in the code of a class that the code makes an instance of."""
        if id(made) in self.seen or not applies(made, self.tables):
            return
        self.seen[id(made)] = made
        parts = [_unbound(part) for base in made.__mro__ for part in vars(base).values()]
        inside = (call for part in filter(followed, parts) for call in in_attribute(made, "", part, self.tables))
        kept = [a for part in parts if not isinstance(part, type) for a in activations(part, self.tables)]
        for activation in dict.fromkeys([*kept, *(a for call in inside for a in call.candidates)]):
            reason = f"it is inside the {made.__name__} that {ast.unparse(node)} makes, which is no part of the model"
            yield replace(finder.raw(node, None, blocked=reason), patterns=(Pattern(activation, "", ()),))

    def _inside(self, leaf: Any) -> Iterator[Activation]:
        """The activations that an object without a place in the model is, holds, or applies in its code."""
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
            yield from (a for call in in_attribute(self.cls, "", leaf, self.tables, bound) for a in call.candidates)
        elif inside := opaque.function(leaf, self.tables):
            yield from inside[1]
        else:
            yield from activations(leaf, self.tables)

    def _follow(self, references: Iterable[Reference]) -> None:
        for reference in references:
            inner = unwrapped(reference.helper)
            if inner is None or not self._is_relevant(inner, True):
                continue
            self.references.append(reference)
            if reference.helper not in self.inside:
                self.inside[reference.helper] = []
                calls, further = self._body(self.cls, reference.name, inner, is_method=False)
                self.inside[reference.helper] = calls
                self._follow(further)

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
