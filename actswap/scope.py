"""What names mean inside a method: objects for globals, closures, built-ins and imports; unknown for locals."""

from __future__ import annotations

import ast
import builtins
import copy
import enum
import sys
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

import torch
from torch import nn

from actswap.patterns import MISSING
from actswap.source import Method, filled

_LOCAL: Any = object()
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

NOT_FOLLOWED = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "actswap"}


def followed(value: Any) -> TypeGuard[FunctionType]:
    """Whether a value is a Python function outside torch, numpy and the standard library."""
    return isinstance(value, FunctionType) and (value.__module__ or "").partition(".")[0] not in NOT_FOLLOWED


@dataclass(frozen=True)
class Chain:
    """`self.a.b`: an attribute of the instance, known once there is one."""

    names: tuple[str, ...]


def chain_of(expression: ast.expr, owner: str | None, within: str = "") -> Chain | None:
    """The chain that an expression is, if it starts at the owner.

    Args:
        within: the name of the class in whose body the expression stands, of which private names take a part.
    """
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        name = expression.attr
        private = name.startswith("__") and not name.endswith("__") and within.strip("_")
        names.insert(0, f"_{within.lstrip('_')}{name}" if private else name)
        expression = expression.value
    if names and isinstance(expression, ast.Name) and expression.id == owner:
        return Chain(tuple(names))
    return None


def read(owner: nn.Module, chain: Chain) -> Any:
    """An attribute of the owner that reading cannot change: properties and other descriptors are not run."""
    value: Any = owner
    for name in chain.names:
        static = MISSING
        for cls in type(value).__mro__:
            if name in cls.__dict__:
                static = cls.__dict__[name]
                break
        if hasattr(type(static), "__get__") and not isinstance(static, FunctionType):
            return MISSING
        value = getattr(value, name, MISSING)
        if value is MISSING:
            return MISSING
    return value


class Scope:
    """What names mean inside a method: objects for globals, closures, built-ins and imports; unknown for locals."""

    def __init__(self, method: Method, owner: str | None = None, within: str = "") -> None:
        self.function, self.owner, self.within = method.function, owner, within
        self.frames: list[dict[str, Any]] = [bindings(method.node)]
        code = method.function.__code__
        cells = zip(code.co_freevars, method.function.__closure__ or (), strict=True)
        self.closure = {name: cell.cell_contents for name, cell in cells if filled(cell)}

    def resolve(self, expression: ast.expr) -> Any:
        """The object an expression stands for, or MISSING."""
        if isinstance(expression, ast.Name):
            return self._name(expression.id)
        if isinstance(expression, ast.Attribute):
            base = self.resolve(expression.value)
            if isinstance(base, (ModuleType, type, torch._ops.OpOverloadPacket)):
                return getattr(base, expression.attr, MISSING)
            if isinstance(base, enum.Enum) and expression.attr == "value":
                return base.value
        return MISSING

    def _name(self, name: str) -> Any:
        for frame in reversed(self.frames):
            if name in frame:
                value = frame[name]
                if isinstance(value, ast.expr):  # bound once, to an expression: follow it
                    frame[name] = _LOCAL  # a name bound to itself ends here
                    resolved = self.resolve(value)
                    frame[name] = value if resolved is MISSING else resolved
                    value = resolved
                return MISSING if value is _LOCAL else value
        if name in self.closure:
            return self.closure[name]
        return self.function.__globals__.get(name, getattr(builtins, name, MISSING))

    def chain(self, expression: ast.expr) -> Chain | None:
        """The attribute of the owner that an expression is, or None."""
        return chain_of(expression, self.owner, self.within)

    def binding(self, name: str) -> ast.expr | None:
        """The expression that a local name is bound to, where that happens once and its value is not known."""
        value = next((frame[name] for frame in reversed(self.frames) if name in frame), None)
        return value if isinstance(value, ast.expr) else None

    def here(self) -> Scope:
        """This scope as it is now; it changes while a visit goes through nested functions."""
        scope = copy.copy(self)
        scope.frames = list(self.frames)
        return scope


def bindings(node: ast.AST) -> dict[str, Any]:
    """The names that a function or comprehension binds itself, with what is known of them."""
    found: dict[str, Any] = {}

    def bind(name: str, value: Any) -> None:
        found[name] = _LOCAL if name in found else value

    def targets(target: ast.AST, value: Any) -> None:
        if isinstance(target, ast.Name):
            bind(target.id, value)
        else:
            for inner in ast.walk(target):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    bind(inner.id, _LOCAL)

    def visit(inner: ast.AST) -> None:
        once = isinstance(inner, ast.AnnAssign) or (isinstance(inner, ast.Assign) and len(inner.targets) == 1)
        if isinstance(inner, (ast.Import, ast.ImportFrom)):
            for alias in inner.names:
                bind(alias.asname or alias.name.partition(".")[0], _imported(inner, alias))
        elif isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, *_SCOPES)):
            if isinstance(inner, ast.stmt):
                bind(inner.name, _LOCAL)
            for deeper in ast.walk(inner):
                if isinstance(deeper, ast.Nonlocal):
                    found.update(dict.fromkeys(deeper.names, _LOCAL))
                elif isinstance(deeper, ast.NamedExpr) and isinstance(inner, _SCOPES):
                    bind(deeper.target.id, _LOCAL)
            return
        elif isinstance(inner, (ast.Global, ast.Nonlocal)):
            outer.update(inner.names)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, (ast.Store, ast.Del)):
            bind(inner.id, _LOCAL)
        elif isinstance(inner, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and inner.name:
            bind(inner.name, _LOCAL)
        elif isinstance(inner, ast.MatchMapping) and inner.rest:
            bind(inner.rest, _LOCAL)
        if once and inner.value is not None:  # type: ignore[attr-defined]
            target = inner.target if isinstance(inner, ast.AnnAssign) else inner.targets[0]  # type: ignore[attr-defined]
            targets(target, inner.value)  # type: ignore[attr-defined]
            visit(inner.value)  # type: ignore[attr-defined]
        elif not once:
            for child in ast.iter_child_nodes(inner):
                visit(child)

    outer: set[str] = set()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        spec = node.args
        optional = [a for a in (spec.vararg, spec.kwarg) if a is not None]
        for argument in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *optional]:
            bind(argument.arg, _LOCAL)
        for statement in node.body if isinstance(node.body, list) else [node.body]:
            visit(statement)
    else:
        for generator in node.generators:  # type: ignore[attr-defined]
            targets(generator.target, _LOCAL)
    return found | dict.fromkeys(outer, _LOCAL)


def _imported(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> Any:
    if isinstance(node, ast.Import):
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        return sys.modules.get(name, MISSING)
    if node.level:
        return _LOCAL
    module = sys.modules.get(node.module or "")
    return sys.modules.get(f"{node.module}.{alias.name}", getattr(module, alias.name, MISSING))


def stores(node: ast.AST, name: str) -> bool:
    """Whether a name is assigned anywhere in a function."""
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(node))
