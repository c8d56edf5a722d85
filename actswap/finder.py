"""The activation calls of one function, found in its verified syntax tree.

A callee is resolved to an object and never compared by spelling. What names an activation and cannot be rewritten is
found too, with the reason: nothing is passed over in silence.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import operator
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor

from actswap import opaque
from actswap.callees import Callee, activations, callee, held
from actswap.calls import RawCall, Reference
from actswap.classes import unwrapped
from actswap.patterns import MISSING, Pattern
from actswap.recognize import Tables
from actswap.scope import NOT_FOLLOWED, Scope, bindings, followed, stores
from actswap.source import Method, Position, self_name

_ASKING = (isinstance, issubclass, len, type)
"""Functions that look at an activation and do not apply it."""


_BY_NAME = (getattr, operator.methodcaller, operator.attrgetter)
"""Functions that pick a method or attribute by its name."""


class Finder(ast.NodeVisitor):
    """Collects the activation calls of one function, and what else it does with activations and helper functions."""

    def __init__(
        self, cls: type, name: str, method: Method, tables: Tables, is_method: bool, bound: type | None = None
    ) -> None:
        self.cls, self.name, self.method, self.tables, self.is_method = cls, name, method, tables, is_method
        self.owner = self_name(method.node) if is_method else None
        self.scope = Scope(method, self.owner, cls.__name__)
        if bound is not None and (first := self_name(method.node)) is not None:
            self.scope.frames[0][first] = bound  # a class method's class
        self.rebound = self.owner is not None and stores(method.node, self.owner)
        self.found: list[RawCall] = []
        self.references: list[Reference] = []
        self.attribute_calls: list[tuple[str, ast.Call]] = []
        self.objects: list[tuple[ast.expr, Any]] = []
        self.made: list[tuple[ast.expr, type]] = []
        self.held: dict[str, tuple[ast.expr, Any]] = dict(self._held(method.node.args))
        self.defaults = {name: held for name, held in self.held.items() if any(activations(held[1], tables))}
        self.quiet = False

    def run(self) -> Finder:
        """Visit the function's body."""
        node = self.method.node
        self.objects += [default for name, default in self.held.items() if name not in self.defaults]
        for child in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(child)
        self.found.sort(key=lambda call: Position.of(call.node) if call.node else Position(0, 0, 0, 0))
        return self

    def _held(self, spec: ast.arguments) -> Iterator[tuple[str, tuple[ast.expr, Any]]]:
        """The arguments with a default: the expression, and its value."""
        function = self.method.function
        positional = [*spec.posonlyargs, *spec.args][len(spec.posonlyargs) + len(spec.args) - len(spec.defaults) :]
        for argument, node, value in zip(positional, spec.defaults, function.__defaults__ or (), strict=True):
            yield argument.arg, (node, value)
        named = {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        for name, value in (function.__kwdefaults__ or {}).items():
            yield name, (named[name], value)

    def _owner_problem(self) -> str | None:
        """Why the owner cannot be named where the visit stands."""
        if self.is_method and self.owner is None:
            return f"{self.method.function.__qualname__} has no name for its instance"
        if self.rebound:
            return f"{self.owner} is assigned in {self.method.function.__qualname__}"
        if any(self.owner in frame for frame in self.scope.frames[1:]):
            return f"{self.owner} means something else where the call stands"
        return None

    def add(self, node: ast.expr, called: Callee | None, patterns: list[Pattern] | None = None, **rest: Any) -> None:
        """Note a call, or why a mention of an activation cannot be rewritten."""
        self.found.append(self.raw(node, called, patterns, **rest))

    def raw(self, node: ast.expr, called: Callee | None, patterns: list[Pattern] | None = None, **rest: Any) -> RawCall:
        """A call in this function."""
        rest["blocked"] = rest.get("blocked") or self._owner_problem()
        return RawCall(
            self.cls, self.name, self.method, self.method.function, node, self.tables, tuple(patterns or ()),
            callee=called, scope=self.scope.here(), **rest,
        )  # fmt: skip

    def visit_Call(self, node: ast.Call) -> None:
        target = self.scope.resolve(node.func)
        chain = self.scope.chain(node.func)
        if chain is not None and len(chain.names) == 1:
            self.attribute_calls.append((chain.names[0], node))
        named = callee(node.func, self.scope, self.tables)
        if patterns := self.tables.call(target):
            self.add(node, Callee(target), patterns)
        elif named is not None and named.options(self.tables):
            if named.makes(self.tables):
                made = dataclasses.replace(named, made=node)
                self._value(node, made, "is made here, and called elsewhere")
            else:
                self.add(node, named)
            with self._quietly():
                self.visit(node.func)
        elif default := self._default(node.func):
            self.add(node, Callee(default[1]), guard=f"{ast.unparse(node.func)} is {ast.unparse(default[0])}")
        elif inside := opaque.function(target, self.tables):
            reason, compiled = inside
            for activation in compiled:
                self.add(node, None, [Pattern(activation, "", ())], blocked=reason)
        elif any(target is picking for picking in _BY_NAME):
            self._by_name(node)
        elif target is exec or target is eval:
            self._in_text(node)
        elif _is_own_class(target):
            self.made.append((node, target))
        elif target is MISSING and (picked := self._bound_method(node)) is not None:
            self.add(node, None, picked, blocked=f"{ast.unparse(node)} calls a bound method of what is not known")
            self.visit(node.func)
        elif target is MISSING and isinstance(node.func, ast.Attribute):
            if patterns := self.tables.methods.get(node.func.attr, []):
                self.add(node, Callee(getattr(Tensor, node.func.attr)), patterns, receiver=True)
            self.visit(node.func.value)
        else:
            self.visit(node.func)
        with self._quietly(any(target is asking for asking in _ASKING)):
            for child in [*node.args, *node.keywords]:
                self.visit(child)

    def _by_name(self, node: ast.Call) -> None:
        """A function, method or attribute that is picked by a name in a string, and not called at once."""
        if self.quiet:
            return
        picked = callee(node, self.scope, self.tables)
        if picked is not None and picked.key is not None:
            self.add(node, dataclasses.replace(picked, passed=True))
        elif picked is not None:
            self._value(node, picked, "is passed on as a value and not called here")
        else:
            for argument in node.args:
                names = argument.value.split(".") if _is_text(argument) else []
                if names and (patterns := self.tables.methods.get(names[-1])) and not patterns[0].is_idiom:
                    why = f"{ast.unparse(node)} picks it by its name, and it is called elsewhere"
                    self.add(node, None, patterns, blocked=why)
                elif self.scope.chain(argument) is not None:
                    self.add(node, Callee(key=argument, passed=True))

    def _bound_method(self, node: ast.Call) -> list[Pattern] | None:
        """A tensor's method that was taken before, `act = x.relu; act()`, or by `x.__getattribute__("relu")`."""
        bound = self.scope.binding(node.func.id) if isinstance(node.func, ast.Name) else None
        name = bound.attr if isinstance(bound, ast.Attribute) and not node.args else ""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "__getattribute__":
            name = next((argument.value for argument in node.args if _is_text(argument)), "")
        patterns = self.tables.methods.get(name, [])
        return patterns if patterns and not patterns[0].is_idiom else None

    def _in_text(self, node: ast.Call) -> None:
        """The activations that a text names which is run as code; a text that is made at run time may name any."""
        for argument in filter(_is_text, node.args[:1]):
            for name in dict.fromkeys(re.findall(r"\w+", argument.value)):
                if (patterns := self.tables.methods.get(name)) and not patterns[0].is_idiom:
                    self.add(node, None, patterns, blocked=f"it stands in a text that {ast.unparse(node.func)} runs")

    def _default(self, expression: ast.expr) -> tuple[ast.expr, Any] | None:
        """The default of the argument that is called, where its name still means the argument and can be compared."""
        if not isinstance(expression, ast.Name) or expression.id not in self.defaults:
            return None
        node, value = self.defaults[expression.id]
        shadowed = stores(self.method.node, expression.id) or any(
            expression.id in frame for frame in self.scope.frames[1:]
        )
        return (node, value) if not shadowed and self.scope.resolve(node) is value else None

    @contextlib.contextmanager
    def _quietly(self, quiet: bool = True) -> Iterator[None]:
        """Visit what is no use of an activation."""
        before, self.quiet = self.quiet, self.quiet or quiet
        yield
        self.quiet = before

    def _value(self, node: ast.expr, what: Callee, why: str) -> None:
        if not self.quiet and what.options(self.tables):
            self.add(node, what, value=True, blocked=f"{ast.unparse(node)} {why}")

    def visit_Compare(self, node: ast.Compare) -> None:
        # `if self.act is F.relu` compares an activation and does not apply it.
        with self._quietly():
            self.generic_visit(node)

    def _reference(self, node: ast.Name | ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            return
        value = self.scope.resolve(node)
        if followed(value) and not self.tables.call(value) and unwrapped(value) is not None:
            cls = self.cls if self.is_method else None
            reference = Reference(cls, self.name, self.method, node, value, self._owner_problem())
            self.references.append(reference)
        elif isinstance(node, ast.Name) and node.id in self.defaults and value is MISSING:
            default, value = self.defaults[node.id]
            self._value(node, Callee(value), f"is {ast.unparse(default)} by default, and not simply called")
        else:
            named = callee(node, self.scope, self.tables)
            if named is not None and named.of_namespace:
                binding = self.scope.binding(node.id) if isinstance(node, ast.Name) else None
                if isinstance(binding, ast.Call) and not self.quiet:  # an owner decides whether it is an activation
                    self.add(binding, dataclasses.replace(named, passed=True))
            elif named is not None and named.options(self.tables):
                self._value(node, named, "is passed on as a value and not called here")
            elif (among := held(node, self.scope, self.tables)) is not None:
                self._value(node, Callee(among=among), "holds it, and what is taken from there is not known")
            elif value is not MISSING and not self.quiet:
                self.objects.append((node, value))

    def visit_Name(self, node: ast.Name) -> None:
        self._reference(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._reference(node)
        self.visit(node.value)

    def _assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        # A name bound once to an activation is followed to its calls; the binding itself is no use.
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        followed_on = len(targets) == 1 and isinstance(targets[0], ast.Name) and self._is_followed(targets[0])
        with self._quietly(followed_on):
            for child in [*targets, *([node.value] if node.value is not None else [])]:
                self.visit(child)

    visit_Assign = visit_AnnAssign = _assignment

    def _is_followed(self, name: ast.Name) -> bool:
        named = callee(name, self.scope, self.tables)
        return (named is not None and bool(named.options(self.tables))) or (
            held(name, self.scope, self.tables) is not None
        )

    def _nested(self, node: ast.AST) -> None:
        self.scope.frames.append(bindings(node))
        before, self.quiet = self.quiet, False
        self.generic_visit(node)
        self.quiet = before
        self.scope.frames.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _nested
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _nested


def _is_own_class(value: Any) -> TypeGuard[type]:
    """Whether a value is a class outside torch, numpy and the standard library; a Function's `apply` is what counts."""
    own = isinstance(value, type) and (value.__module__ or "").partition(".")[0] not in NOT_FOLLOWED
    return own and not issubclass(value, (torch.autograd.Function, enum.Enum))


def _is_text(expression: ast.expr) -> TypeGuard[Any]:
    return isinstance(expression, ast.Constant) and isinstance(expression.value, str)
