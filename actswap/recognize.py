"""Is this class, module, function or method an activation?

Targets are looked up by identity, never compared by spelling. Their paths are resolved among the modules already
imported, so that naming a class of another library imports nothing.
"""

from __future__ import annotations

import copyreg
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from actswap import functional, registry
from actswap.activation import Activation, Parameter
from actswap.nn import ActivationModule
from actswap.patterns import MISSING, Argument, Match, Pattern, match, same, stated_parameters


def resolve(path: str) -> Any:
    """The object at a dotted path among the modules already imported, or MISSING."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]), MISSING)
        if found is MISSING:
            continue
        for part in parts[count:]:
            found = getattr(found, part, MISSING)
            if found is MISSING:
                return MISSING
        return found
    return MISSING


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Foreign(Activation):
    """A definition that stands for what nobody has described: a Function, module class or function to look for.

    It can be found, counted and replaced; it cannot be put in.
    """

    target: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return foreign, (self.target,)


def foreign(target: Any) -> Foreign:
    """The definition that stands for `target`."""
    call = target.apply if isinstance(target, type) and issubclass(target, torch.autograd.Function) else target
    return Foreign(name=getattr(target, "__name__", repr(target)), forward=call, states={}, target=target)


# A definition is pickled and copied as its name: it is the same definition in every process.
copyreg.pickle(Activation, lambda activation: (registry.get, (activation.name,)))


@dataclass
class Tables:
    """Everything that is recognised, by identity.

    Args:
        calls: functions, tensor methods and ATen overloads.
        methods: tensor methods by name, for calls on a value whose type is not known.
        classes: module classes.
        foreign: the classes and functions a caller asked for that no definition describes.
        applies, relevant, inside: whether the code of a class, and of a function with its helpers, mentions any of
            these, and which are in an object; as far as that was asked.
    """

    calls: dict[Any, list[Pattern]] = field(default_factory=dict)
    methods: dict[str, list[Pattern]] = field(default_factory=dict)
    classes: dict[type, list[Pattern]] = field(default_factory=dict)
    foreign: dict[Any, Activation] = field(default_factory=dict)
    applies: dict[type, bool] = field(default_factory=dict)
    relevant: dict[tuple[Any, bool], bool] = field(default_factory=dict)
    inside: dict[tuple[int, frozenset[str]], tuple[Any, list[Activation]]] = field(default_factory=dict)

    @classmethod
    def build(cls, extra: Sequence[Any] = ()) -> Tables:
        """The tables of every known definition, and of `extra`: classes and functions to look for besides."""
        tables = cls()
        for activation in registry.definitions():
            for text in activation.calls:
                tables._add_call(Pattern.parse(activation, text))
            for text in activation.modules:
                pattern = Pattern.parse(activation, text)
                if isinstance(target := resolve(pattern.path), type):
                    tables.classes.setdefault(target, []).append(pattern)
            own = getattr(functional, activation.name, None)
            if own is not None:
                arguments = [Argument("x"), *(Argument(p.name, p.default) for p in activation.parameters)]
                arguments += [
                    Argument("inplace", False, keyword_only=True),
                    Argument("save", "auto", keyword_only=True),
                ]
                tables.calls.setdefault(own, []).append(
                    Pattern(activation, f"actswap.functional.{activation.name}", tuple(arguments))
                )
        for target in extra:
            tables._add_extra(target)
        for table in (tables.calls, tables.methods, tables.classes):
            for patterns in table.values():  # hardtanh from 0 to 6 is relu6 first
                patterns.sort(key=lambda pattern: -sum(a.required is not MISSING for a in pattern.arguments))
        return tables

    def _add_call(self, pattern: Pattern) -> None:
        target = resolve(pattern.path)
        if target is MISSING:
            return
        self.calls.setdefault(target, []).append(pattern)
        if isinstance(target, torch._ops.OpOverload):
            self.calls.setdefault(target.overloadpacket, []).append(pattern)
        if pattern.path.startswith("torch.Tensor."):
            self.methods.setdefault(pattern.name, []).append(pattern)

    def _add_extra(self, target: Any) -> None:
        if isinstance(target, type) and issubclass(target, nn.Module):
            if target not in self.classes and not issubclass(target, ActivationModule):
                self.foreign[target] = foreign(target)
        elif isinstance(target, type) and issubclass(target, torch.autograd.Function):
            if target.apply not in self.calls:
                self.foreign[target] = activation = foreign(target)
                self.calls[target.apply] = [Pattern(activation, f"{target.__qualname__}.apply", (Argument("input"),))]
        elif target not in self.calls:
            self.foreign[target] = activation = foreign(target)
            arguments = (Argument("input"), Argument("inplace", False))
            self.calls[target] = [Pattern(activation, getattr(target, "__qualname__", ""), arguments)]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Every last name under which a function can be reached: what a code object must mention to be of interest."""
        return frozenset({pattern.name for group in self.calls.values() for pattern in group} | {"apply"})

    @functools.cached_property
    def class_names(self) -> frozenset[str]:
        """Every last name under which a module class can be reached."""
        return frozenset(pattern.name for group in self.classes.values() for pattern in group)

    def call(self, target: Any) -> list[Pattern]:
        """The patterns of a callee; empty when it is none."""
        try:
            return self.calls.get(target, [])
        except TypeError:  # unhashable
            return []

    def is_callable(self, value: Any) -> bool:
        """Whether a value is a function, or a partial of one, that is an activation."""
        return callable(value) and self.callable(value) is not None

    def is_leaf(self, value: Any) -> bool:
        """Whether a value is an activation in itself: a function, a partial of one, or a module class."""
        if isinstance(value, type):
            return recognised_class(value, self) is not None
        return self.is_callable(value)

    def callable(self, value: Any) -> Match[Any] | None:
        """What a stored function or partial is, or None."""
        args: list[Any] = [MISSING]
        kwargs: dict[str, Any] = {}
        while isinstance(value, functools.partial):
            args, kwargs = [*args, *value.args], {**value.keywords, **kwargs}
            if value.args:  # a positional argument of a partial stands where the tensor would
                return None
            value = value.func
        patterns = self.call(value)
        return match(patterns, args, kwargs, callee=value) if patterns else None

    def module(self, module: nn.Module) -> Match[Any] | None:
        """What a module is, by its class: one in the tables, or a subclass that keeps its `forward`."""
        if isinstance(module, ActivationModule):
            mode = {p.name for p in module.activation.parameters if p.mode}
            params = {name: value for name, value in module.params.items() if name not in mode}
            return Match(module.activation, params, module.inplace, callee=type(module))
        if "forward" in vars(module):
            return None
        cls = recognised_class(type(module), self)
        if cls is None:
            return None
        if cls in self.foreign:
            return Match(self.foreign[cls], {}, bool(getattr(module, "inplace", False)), callee=type(module))
        return self._instance(module, self.classes[cls])

    @staticmethod
    def _instance(module: nn.Module, patterns: Sequence[Pattern]) -> Match[Any] | None:
        for pattern in patterns:
            values = {a.name: getattr(module, a.name, a.default) for a in pattern.arguments}
            if all(a.required is MISSING or same(values[a.name], a.required) for a in pattern.arguments):
                inplace = bool(values.get("inplace", False))
                return Match(pattern.activation, stated_parameters(pattern, values), inplace, callee=type(module))
        return None


def recognised_class(cls: type, tables: Tables) -> type | None:
    """The class in the tables whose forward a class keeps, or None."""
    for base in cls.__mro__:
        if base in tables.foreign:
            return base
        if base in tables.classes and getattr(cls, "forward", None) is getattr(base, "forward", MISSING):
            return base
    return None


def stateless(module: nn.Module) -> bool:
    """Whether a module has neither parameters nor buffers nor a behaviour that depends on `training`."""
    if isinstance(module, ActivationModule) and any(p.mode for p in module.activation.parameters):
        return False
    tensors = [*module.parameters(), *module.buffers()]
    return not tensors


def is_lazy(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers that get their shape at the first forward."""
    return any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


def defaulted(activation: Activation, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that differ from the activation's defaults, for printing."""
    by_name: dict[str, Parameter] = {p.name: p for p in activation.parameters}
    shown = {}
    for name, value in params.items():
        if isinstance(value, Tensor):
            shown[name] = f"{tuple(value.shape)} tensor"
        elif isinstance(value, float) and math.isfinite(value) and value == by_name[name].default:
            continue
        elif value != by_name[name].default:
            shown[name] = value
    return shown
