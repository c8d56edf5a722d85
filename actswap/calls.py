"""The activation calls in a class's own code, found in the verified syntax trees of its methods.

A callee is resolved to an object and never compared by spelling. What names an activation and cannot be rewritten is
found too, with the reason: nothing is passed over in silence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from actswap.patterns import IDIOMS, MISSING, MODE, Match, Pattern, Undetermined, match
from actswap.recognize import Tables
from actswap.scope import Chain, Scope, bindings, chain_of, followed, read, stores
from actswap.source import Method, Position, self_name


@dataclass(frozen=True)
class Reference:
    """Where a method, or a helper function, names a helper function.

    Args:
        cls, name: the method; `cls` is None where `holder` is itself a helper.
        holder: the function that holds the reference.
        node: the name or attribute.
        helper: what it stands for.
        blocked: why it cannot be rewritten.
    """

    cls: type | None
    name: str
    holder: Method
    node: ast.expr
    helper: FunctionType
    blocked: str | None = None


@dataclass(frozen=True)
class RawCall:
    """One call of an activation in a class's code, before it is known which instance runs it.

    Args:
        cls: the class in whose body the method stands.
        name: the method's name there.
        method: the verified method; None where the source is not to be had.
        function: the function that holds the call.
        node: the call; None where there is no source.
        patterns: what it may be.
        callee: the function that is called.
        receiver: whether the tensor is the object whose method is called.
        blocked: why it cannot be rewritten.
        in_method: whether the function's first argument is the owner.
        via: for a call in a helper function, the references through which methods come to it.
    """

    cls: type
    name: str
    method: Method | None
    function: FunctionType
    node: ast.expr | None
    patterns: tuple[Pattern, ...]
    receiver: bool = False
    blocked: str | None = None
    callee: Any = None
    in_method: bool = True
    via: tuple[Reference, ...] = ()

    @property
    def line(self) -> int:
        """The line of the call, or of its function."""
        return self.function.__code__.co_firstlineno if self.node is None else self.node.lineno

    @property
    def idiom(self) -> bool:
        """Whether the callee has other uses than activating."""
        return all(pattern.name in IDIOMS for pattern in self.patterns)

    @property
    def _owner_name(self) -> str | None:
        return self_name(self.method.node) if self.in_method and self.method is not None else None

    def bound(self, owner: nn.Module) -> tuple[Match[ast.expr], int | str, dict[str, Chain]] | None:
        """What the call is for this owner, which argument carries the tensor, and the parameters read from the owner.

        Returns None when it is no activation with these arguments.

        Raises:
            Undetermined: that is known only at run time.
        """
        node = self.node
        assert isinstance(node, ast.Call) and self.method is not None
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise Undetermined("its arguments are unpacked with * or **")
        args = list(node.args)
        if self.receiver:
            assert isinstance(node.func, ast.Attribute)
            chain = chain_of(node.func.value, self._owner_name)
            if chain is not None and not isinstance(read(owner, chain), Tensor):
                return None
            args.insert(0, node.func.value)
        keywords = {k.arg: k.value for k in node.keywords if k.arg is not None}
        chains: dict[int, Chain] = {}

        def evaluate(expression: ast.expr) -> Any:
            return self._value(expression, owner, chains)

        found = match(self.patterns, args, keywords, evaluate, self.callee)
        if found is None:
            return None
        by_value = {id(value): names for value, names in _named(found.params)}
        taken = {by_value[key]: chain for key, chain in chains.items() if key in by_value}
        return found, self._argument(found.tensor, args, keywords), taken

    def _argument(self, tensor: ast.expr | None, args: list[ast.expr], keywords: dict[str, ast.expr]) -> int | str:
        for name, value in keywords.items():
            if value is tensor:
                return name
        index = next(i for i, value in enumerate(args) if value is tensor)
        return index - 1 if self.receiver else index

    def _value(self, expression: ast.expr, owner: nn.Module, chains: dict[int, Chain]) -> Any:
        try:
            return ast.literal_eval(expression)
        except ValueError:
            pass
        assert self.method is not None
        chain = chain_of(expression, self._owner_name)
        if chain == Chain(("training",)):
            return MODE
        value = read(owner, chain) if chain is not None else Scope(self.method).resolve(expression)
        if isinstance(value, Tensor) and chain is not None:
            chains[id(value)] = chain
            return value
        if type(value) in (int, float, bool, str, type(None)):
            return value
        raise Undetermined(f"its argument {ast.unparse(expression)} is known only at run time")


def _named(params: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    for name, value in params.items():
        if isinstance(value, Tensor):
            yield value, name


class Finder(ast.NodeVisitor):
    """Collects the activation calls of one method, and the references to activations that are no calls."""

    def __init__(self, cls: type, name: str, method: Method, tables: Tables, is_method: bool) -> None:
        self.cls, self.name, self.method, self.tables, self.is_method = cls, name, method, tables, is_method
        self.scope = Scope(method)
        self.owner = self_name(method.node) if is_method else None
        self.rebound = self.owner is not None and stores(method.node, self.owner)
        self.found: list[RawCall] = []
        self.references: list[Reference] = []
        self.attribute_calls: list[tuple[str, ast.Call]] = []

    def run(self) -> Finder:
        """Visit the function's body and its default arguments."""
        node = self.method.node
        self._defaults(node.args)
        for child in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(child)
        self.found.sort(key=lambda call: Position.of(call.node) if call.node else Position(0, 0, 0, 0))
        return self

    def _defaults(self, spec: ast.arguments) -> None:
        """An activation as a default argument is called under the argument's name, which is known only at run time."""
        function = self.method.function
        given = zip(spec.defaults, function.__defaults__ or (), strict=True)
        named = {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        by_name = [(named[name], value) for name, value in (function.__kwdefaults__ or {}).items()]
        for node, value in [*given, *by_name]:
            if patterns := self.tables.call(value):
                self.add(node, patterns, None, blocked=f"{ast.unparse(node)} is a default argument")

    def _owner_problem(self) -> str | None:
        """Why the owner cannot be named where the visit stands."""
        if self.rebound:
            return f"{self.owner} is assigned in {self.method.function.__qualname__}"
        if any(self.owner in frame for frame in self.scope.frames[1:]):
            return f"{self.owner} means something else where the call stands"
        return None

    def add(
        self, node: ast.expr, patterns: list[Pattern], callee: Any, receiver: bool = False, blocked: str | None = None
    ) -> None:
        blocked = blocked or self._owner_problem()
        function = self.method.function
        self.found.append(
            RawCall(self.cls, self.name, self.method, function, node, tuple(patterns), receiver, blocked, callee)
        )

    def visit_Call(self, node: ast.Call) -> None:
        target = self.scope.resolve(node.func)
        chain = chain_of(node.func, self.owner)
        if chain is not None and len(chain.names) == 1:
            self.attribute_calls.append((chain.names[0], node))
        if patterns := self.tables.call(target):
            self.add(node, patterns, target)
        elif target is MISSING and isinstance(node.func, ast.Attribute):
            if patterns := self.tables.methods.get(node.func.attr, []):
                self.add(node, patterns, getattr(Tensor, node.func.attr), receiver=True)
            self.visit(node.func.value)
        else:
            self.visit(node.func)
        for child in [*node.args, *node.keywords]:
            self.visit(child)

    def visit_Compare(self, node: ast.Compare) -> None:
        # `if self.act is F.relu` compares an activation and does not apply it.
        for part in [node.left, *node.comparators]:
            if not self.tables.call(self.scope.resolve(part)):
                self.visit(part)

    def _reference(self, node: ast.Name | ast.Attribute) -> None:
        value = self.scope.resolve(node) if isinstance(node.ctx, ast.Load) else MISSING
        if followed(value) and not self.tables.call(value):
            cls = self.cls if self.is_method else None
            reference = Reference(cls, self.name, self.method, node, value, self._owner_problem())
            self.references.append(reference)
        patterns = self.tables.call(value)
        patterns = [pattern for pattern in patterns if pattern.name not in IDIOMS]
        if patterns:
            self.add(node, patterns, None, blocked=f"{ast.unparse(node)} is passed on as a value and not called here")

    def visit_Name(self, node: ast.Name) -> None:
        self._reference(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._reference(node)
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        # A name bound once to an activation is followed to its calls; the binding itself is no use.
        single = len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        if single and self.tables.call(self.scope.resolve(node.targets[0])):
            return
        self.generic_visit(node)

    def _nested(self, node: ast.AST) -> None:
        self.scope.frames.append(bindings(node))
        self.generic_visit(node)
        self.scope.frames.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _nested
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _nested
