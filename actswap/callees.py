"""Callees: what a call expression calls, also where that is no plain name.

`nn.ReLU()(x)` calls a module made for the occasion, `getattr(F, self.name)(x)` and `TABLE[self.name](x)` what a key
picks, and `act(x)` what the name `act` is bound to.
"""

from __future__ import annotations

import ast
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from actswap.activation import Activation
from actswap.patterns import MISSING, MODE, Match, Undetermined, match
from actswap.recognize import Tables, recognised_class, stateless
from actswap.scope import Scope

Evaluate = Callable[[ast.expr], Any]


@dataclass(frozen=True)
class Callee:
    """What a call calls, as far as the code alone tells.

    Args:
        value: the object; MISSING where a key picks it.
        key: the expression whose value picks the object.
        among: what it picks from: objects, or callees where a literal spells them.
        default: what is called where the key picks nothing.
        made: the call that makes a module of the class, which is then called.
        passed: whether what the key picks is not called here; without `among` it is a method of an unknown object.
    """

    value: Any = MISSING
    key: ast.expr | None = None
    among: Mapping[Any, Any] | None = None
    default: Callee | None = None
    made: ast.Call | None = None
    passed: bool = False

    @property
    def of_namespace(self) -> bool:
        """Whether a key picks it among all that a module or class has, and so perhaps no activation."""
        return isinstance(self.among, _Attributes)

    def makes(self, tables: Tables) -> bool:
        """Whether calling it makes a module and applies none."""
        if self.made is not None or isinstance(self.among, _Instances):
            return False
        known = [v for value in self._values() if any(activations(v := getattr(value, "value", value), tables))]
        return bool(known) and all(isinstance(value, type) for value in known)

    def _values(self) -> list[Any]:
        """Everything that it can be."""
        values = [self.value] if self.among is None else list(self.among.values())
        return values if self.default is None else [*values, self.default]

    def options(self, tables: Tables) -> dict[Activation, None]:
        """The activations that it can be."""
        found: dict[Activation, None] = {}
        for value in self._values():
            if isinstance(value, Callee):
                found |= value.options(tables)
            else:
                found |= dict.fromkeys(activations(value, tables))
        return found

    def match(
        self, evaluate: Evaluate, tables: Tables, args: list[ast.expr], keywords: dict[str, ast.expr]
    ) -> tuple[Match[ast.expr], str | None] | None:
        """What the call is with these arguments, and the test by which it is that and nothing else.

        Args:
            evaluate: gives the value of an expression that is a constant, or an attribute of the owner.

        Raises:
            Undetermined: that is known only at run time.
        """
        if self.passed:
            self._picked(evaluate, tables)
            return None
        if self.key is not None:
            assert self.among is not None
            text = ast.unparse(self.key)
            unknown = f"{text} picks what is called, and is known only at run time"
            try:
                key = evaluate(self.key)
            except Undetermined as problem:
                raise Undetermined(unknown) from problem
            if key is MODE:
                raise Undetermined(unknown)
            value = self.among.get(key, MISSING if self.default is None else self.default)
            if self.made is not None or not isinstance(value, Callee):
                value = Callee(value, made=self.made)
            picked: tuple[Match[ast.expr], str | None] | None = value.match(evaluate, tables, args, keywords)
            return None if picked is None else (picked[0], f"{text} == {key!r}")
        if self.made is None and not isinstance(self.value, (nn.Module, functools.partial)):
            patterns = tables.call(self.value)
            if not patterns and (among := list(activations(self.value, tables))):
                raise Undetermined(f"it is called as {self.value!r}, which has no place for another", among)
            result = match(patterns, args, keywords, evaluate, self.value) if patterns else None
            return None if result is None else (result, None)
        if self.made is not None:
            found = self._made(evaluate, tables)
        else:
            partial = isinstance(self.value, functools.partial)
            found = tables.callable(self.value) if partial else _instance(self.value, tables)
        if found is None:
            return None
        if len(args) + len(keywords) != 1:
            raise Undetermined(f"this {type(self.value).__name__} is called with more than one argument")
        (tensor,) = (*args, *keywords.values())
        return Match(found.activation, found.params, found.inplace, tensor, False, found.original, found.callee), None

    def _picked(self, evaluate: Evaluate, tables: Tables) -> None:
        """Raise where the key picks an activation; a key that is known only at run time may pick anything."""
        assert self.key is not None
        try:
            key = evaluate(self.key)
        except Undetermined:
            return
        if self.among is None:
            patterns = tables.methods.get(key, []) if isinstance(key, str) else []
            among = [p.activation for p in patterns[:1] if not p.is_idiom]
        else:
            value = self.among.get(key, MISSING if self.default is None else self.default)
            among = list(value.options(tables) if isinstance(value, Callee) else activations(value, tables))
        if among:
            text = f"{ast.unparse(self.key)} picks it by its name, and it is called elsewhere"
            raise Undetermined(text, among)

    def _made(self, evaluate: Evaluate, tables: Tables) -> Match[Any] | None:
        cls, call = self.value, self.made
        assert call is not None
        base = recognised_class(cls, tables) if isinstance(cls, type) else None
        if base is None:
            return None
        made: Callable[..., nn.Module] = cls
        if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
            raise Undetermined(f"{ast.unparse(call)} unpacks its arguments with * or **")
        if base in tables.foreign or _constructor(cls) is not _constructor(base):  # the user's own code makes it
            raise Undetermined(f"{ast.unparse(call)} makes it anew, by a constructor that is not PyTorch's")
        args = [evaluate(argument) for argument in call.args]
        kwargs = {k.arg: evaluate(k.value) for k in call.keywords if k.arg is not None}
        found = _instance(made(*args, **kwargs), tables)
        if found is None:
            return None
        return Match(
            found.activation, found.params, found.inplace, None, False,
            lambda x, training=False, **_: made(*args, **kwargs)(x), cls,
        )  # fmt: skip


def _constructor(cls: type) -> Any:
    return next(vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))


def _instance(module: nn.Module, tables: Tables) -> Match[Any] | None:
    """What a module that is no part of the model is."""
    found = tables.module(module)
    if found is None:
        return None
    if not stateless(module):
        raise Undetermined(f"the parameters of this {type(module).__name__} belong to no module of the model")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise Undetermined(f"this {type(module).__name__} is no part of the model, and has hooks")
    # It does not follow the mode of the model.
    modes = {p.name: module.training for p in found.activation.parameters if p.mode}
    return Match(
        found.activation, {**found.params, **modes}, found.inplace, None, False,
        lambda x, training=False, **_: module(x), type(module),
    )  # fmt: skip


def activations(value: Any, tables: Tables, depth: int = 2) -> Iterator[Activation]:
    """The activations that an object is, makes, or holds if it is a container."""
    if isinstance(value, nn.Module):
        if (found := tables.module(value)) is not None:
            yield found.activation
    elif isinstance(value, type):
        if (base := recognised_class(value, tables)) is not None:
            yield tables.foreign[base] if base in tables.foreign else tables.classes[base][0].activation
    elif isinstance(value, (dict, list, tuple)):
        if depth:
            for item in list(value.values() if isinstance(value, dict) else value)[:256]:
                yield from activations(item, tables, depth - 1)
    elif isinstance(value, functools.partial):
        if (found := tables.callable(value)) is not None:
            yield found.activation
    else:
        caller = isinstance(value, operator.methodcaller)
        patterns = tables.methods.get(_method_name(value), []) if caller else tables.call(value)
        if patterns and patterns[0].activation.name != "identity" and not patterns[0].is_idiom:
            yield patterns[0].activation


def _method_name(caller: operator.methodcaller) -> str:
    """The name of the method that it calls; how it is pickled says so."""
    reduced: Any = caller.__reduce__()
    function, args = reduced
    return str(args[0] if function is operator.methodcaller else function.args[0])


def callee(expression: ast.expr, scope: Scope, tables: Tables, names: frozenset[str] = frozenset()) -> Callee | None:
    """What an expression that is called stands for; None when the code does not say."""
    value = scope.resolve(expression)
    if value is not MISSING:
        return Callee(value)
    if isinstance(expression, ast.Name):
        bound = scope.binding(expression.id)
        if bound is None or expression.id in names:
            return None
        return callee(bound, scope, tables, names | {expression.id})
    if isinstance(expression, ast.Attribute):
        base = callee(expression.value, scope, tables, names)
        if base is None or not isinstance(base.value, (ModuleType, type)) or base.made is not None:
            return None
        return Callee(getattr(base.value, expression.attr, MISSING))
    if isinstance(expression, ast.Subscript):
        among = _table(expression.value, scope, tables, names)
        return _picking(expression.slice, among, None) if among is not None else None
    if not isinstance(expression, ast.Call):
        return None
    if scope.resolve(expression.func) is getattr and len(expression.args) in (2, 3):
        base = scope.resolve(expression.args[0])
        if isinstance(base, (ModuleType, type)):
            default = callee(expression.args[2], scope, tables, names) if len(expression.args) == 3 else None
            return _picking(expression.args[1], _Attributes(base), default)
        return None
    if isinstance(expression.func, ast.Attribute) and expression.func.attr == "get" and expression.args:
        among = _table(expression.func.value, scope, tables, names)
        default = callee(expression.args[1], scope, tables, names) if len(expression.args) == 2 else None
        return _picking(expression.args[0], among, default) if among is not None else None
    if scope.resolve(expression.func) is importlib.import_module and expression.args:
        name = expression.args[0]
        return Callee(sys.modules.get(str(name.value), MISSING)) if isinstance(name, ast.Constant) else None
    maker = callee(expression.func, scope, tables, names)
    if maker is None or maker.made is not None:
        return None
    values = [maker.value] if maker.among is None else list(maker.among.values())
    if not any(isinstance(value, type) and recognised_class(value, tables) for value in values):
        return None
    return Callee(maker.value, maker.key, maker.among, made=expression)


def _picking(key: ast.expr, among: Mapping[Any, Any], default: Callee | None) -> Callee:
    """What a key picks; known at once where the key is a constant."""
    if not isinstance(key, ast.Constant):
        return Callee(key=key, among=among, default=default)
    value = among.get(key.value, MISSING if default is None else default)
    return value if isinstance(value, Callee) else Callee(value)


def _table(expression: ast.expr, scope: Scope, tables: Tables, names: frozenset[str]) -> Mapping[Any, Any] | None:
    """What a subscript picks from, where that holds an activation."""
    value = scope.resolve(expression)
    if isinstance(value, dict):
        return _Instances(value) if instantiates(value) else value
    if isinstance(value, (list, tuple)):
        return {**dict(enumerate(value)), **{i - len(value): item for i, item in enumerate(value)}}
    if isinstance(expression, ast.Attribute) and expression.attr == "__dict__":
        base = scope.resolve(expression.value)
        return vars(base) if isinstance(base, (ModuleType, type)) else None
    if isinstance(expression, ast.Call):
        function = scope.resolve(expression.func)
        if function is globals:
            return scope.function.__globals__
        base = scope.resolve(expression.args[0]) if function is vars and expression.args else None
        return vars(base) if isinstance(base, (ModuleType, type)) else None
    if isinstance(expression, ast.Name) and expression.id not in names:
        bound = scope.binding(expression.id)
        return _table(bound, scope, tables, names | {expression.id}) if bound is not None else None
    items: list[tuple[Any, ast.expr]]
    if isinstance(expression, ast.Dict):
        if not all(isinstance(key, ast.Constant) for key in expression.keys):
            return None
        items = [(key.value, item) for key, item in zip(expression.keys, expression.values, strict=True)]  # type: ignore[union-attr]
    elif isinstance(expression, (ast.List, ast.Tuple)):
        items = list(enumerate(expression.elts))
    else:
        return None
    return {key: callee(item, scope, tables, names) for key, item in items}


_INSTANTIER = "transformers.activations.ClassInstantier"
"""A dict of classes, or of classes and their arguments, whose items come as new instances."""


def instantiates(value: Any) -> bool:
    """Whether a value is such a dict."""
    return f"{type(value).__module__}.{type(value).__qualname__}" == _INSTANTIER


class _Instances(Mapping[str, Any]):
    """What each key of such a dict gives; all that it may give are the classes."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table

    def __getitem__(self, key: str) -> Any:
        content = dict.__getitem__(self.table, key)
        cls, arguments = content if isinstance(content, tuple) else (content, {})
        return cls(**arguments)

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def values(self) -> Any:
        """The classes, none of which is made."""
        return [content[0] if isinstance(content, tuple) else content for content in dict.values(self.table)]


def held(expression: ast.Name | ast.Attribute, scope: Scope, tables: Tables) -> Mapping[Any, Any] | None:
    """The items of a container that a name stands for, where one of them is an activation."""
    among = _table(expression, scope, tables, frozenset())
    return among if among is not None and Callee(among=among).options(tables) else None


class _Attributes(Mapping[str, Any]):
    """The attributes of a module or class, as a mapping."""

    def __init__(self, base: ModuleType | type) -> None:
        self.base = base

    def __getitem__(self, name: str) -> Any:
        value = getattr(self.base, name, MISSING) if isinstance(name, str) else MISSING
        if value is MISSING:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self.base)) if isinstance(self.base, ModuleType) else iter(dir(self.base))

    def __len__(self) -> int:
        return len(vars(self.base))
