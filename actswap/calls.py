"""The calls of activations in a class's code, before and after it is known which instance runs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from actswap.activation import Activation
from actswap.callees import Callee
from actswap.patterns import MODE, Match, Pattern, Undetermined, match
from actswap.recognize import Tables
from actswap.scope import Chain, Scope, read
from actswap.source import Method


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
class Bound:
    """What a call is for one owner.

    Args:
        match: the activation and its parameters.
        argument: which part of the call carries the tensor, as `CallEdit.argument` has it.
        reads: parameters that are tensors of the owner, by name.
        guard: the test by which the call is this activation, where it can be another at run time.
    """

    match: Match[ast.expr]
    argument: int | str
    reads: dict[str, Chain]
    guard: str | None


@dataclass(frozen=True)
class RawCall:
    """One call of an activation in a class's code, before it is known which instance runs it.

    Args:
        cls: the class in whose body the method stands.
        name: the method's name there.
        method: the verified method; None where the source is not to be had.
        function: the function that holds the call.
        node: the call; None where there is no source.
        tables: what is recognised.
        patterns: what it may be, where the name of the function says so.
        receiver: whether the tensor is the object whose method is called.
        blocked: why it cannot be rewritten.
        callee: what is called.
        guard: the test by which it is that.
        scope: what names mean where the call stands.
        in_method: whether the function's first argument is the owner.
        via: for a call in a helper function, the references through which methods come to it.
        value: whether the activation is made or named here to be called elsewhere.
        rewritten: the test under which an earlier swap has rewritten it.
    """

    cls: type
    name: str
    method: Method | None
    function: FunctionType
    node: ast.expr | None
    tables: Tables
    patterns: tuple[Pattern, ...] = ()
    receiver: bool = False
    blocked: str | None = None
    callee: Callee | None = None
    guard: str | None = None
    scope: Scope | None = None
    in_method: bool = True
    via: tuple[Reference, ...] = ()
    value: bool = False
    rewritten: str | None = None

    @property
    def line(self) -> int:
        """The line of the call, or of its function."""
        return self.function.__code__.co_firstlineno if self.node is None else self.node.lineno

    @property
    def idiom(self) -> bool:
        """Whether the callee has other uses than activating."""
        return bool(self.patterns) and all(pattern.is_idiom for pattern in self.patterns)

    @property
    def candidates(self) -> list[Activation]:
        """What it may be, where its arguments do not decide."""
        if self.patterns or self.callee is None:
            return [self.patterns[0].activation]
        return list(self.callee.options(self.tables))

    @property
    def decidable(self) -> bool:
        """Whether its arguments say for an owner whether it is an activation."""
        return isinstance(self.node, ast.Call) and not self.value and (self.receiver or self.callee is not None)

    @property
    def makes(self) -> bool:
        """Whether it only makes a module, or names its class: no use unless a forward comes to it."""
        if not self.value or self.callee is None:
            return False
        return self.callee.made is not None or self.callee.makes(self.tables)

    def bound(self, owner: nn.Module) -> Bound | None:
        """What the call is for this owner; None when it is no activation with these arguments.

        Raises:
            Undetermined: that is known only at run time.
        """
        node = self.node
        assert isinstance(node, ast.Call) and self.method is not None
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise Undetermined("its arguments are unpacked with * or **")
        args = list(node.args)
        keywords = {k.arg: k.value for k in node.keywords if k.arg is not None}
        chains: dict[int, Chain] = {}

        def evaluate(expression: ast.expr) -> Any:
            return self._value(expression, owner, chains)

        guard = self.guard
        if self.receiver:
            assert isinstance(node.func, ast.Attribute)
            assert self.scope is not None
            chain = self.scope.chain(node.func.value)
            value = read(owner, chain) if chain is not None else None
            if isinstance(value, ModuleType) and self.tables.call(getattr(value, node.func.attr, None)):
                raise Undetermined(f"{ast.unparse(node.func.value)} is a module of functions kept in an attribute")
            if chain is not None and not isinstance(value, Tensor):
                return None
            args.insert(0, node.func.value)
            found = match(self.patterns, args, keywords, evaluate, getattr(Tensor, node.func.attr))
        else:
            assert self.callee is not None
            result = self.callee.match(evaluate, self.tables, args, keywords)
            found, picked = result if result is not None else (None, None)
            guard = guard or picked
        if found is None:
            return None
        by_value = {id(value): names for value, names in _named(found.params)}
        taken = {by_value[key]: chain for key, chain in chains.items() if key in by_value}
        return Bound(found, self._argument(found.tensor, args, keywords), taken, guard)

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
        assert self.scope is not None
        chain = self.scope.chain(expression)
        if chain == Chain(("training",)):
            return MODE
        value = read(owner, chain) if chain is not None else self.scope.resolve(expression)
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
