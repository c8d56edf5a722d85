"""What can be checked, in one form: names, definitions, modules, functions and autograd Functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from actswap import autograd
from actswap.activation import Activation, State
from actswap.catalog import CATALOG
from actswap.errors import TargetError, UnknownActivationError

_look_up: list[Callable[[str], Activation]] = []


def look_up_with(get: Callable[[str], Activation]) -> None:
    """Say how names are found; `actswap.registry` does, which is above this file."""
    _look_up[:] = [get]


@dataclass(frozen=True)
class Subject:
    """What is checked: how to call it, and the definition it is or should be."""

    name: str
    call: Callable[[Tensor], Tensor]
    inplace: Callable[[Tensor], Tensor] | None = None
    truth: Activation | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    save: str = "auto"
    own: bool = False
    """It goes through `autograd.apply`, so that every saved state can be checked."""

    @property
    def state(self) -> State | None:
        """The state that it saves, where it goes through `autograd.apply`."""
        if not self.own or self.truth is None or not self.truth.states:
            return None
        return self.truth.states[autograd.state_for(self.truth, self.params, save=self.save)]

    def known(self) -> tuple[Activation, dict[str, Any]]:
        """The definition to compare with, and its parameters."""
        assert self.truth is not None
        return self.truth, dict(self.params)


def subject(what: Any) -> Subject:
    """What a user may hand to `check`, in one form."""
    if isinstance(what, str):
        return subject(_named(what))
    if isinstance(what, Activation):
        return _ours(what, what.bind({}), "auto")
    if isinstance(what, type) and issubclass(what, nn.Module):
        return subject(what())
    if isinstance(what, nn.Module):
        activation, params = getattr(what, "activation", None), getattr(what, "params", None)
        if isinstance(activation, Activation) and isinstance(params, dict):  # a module of actswap.nn, which is above
            return _ours(activation, params, str(what.save))
        return Subject(type(what).__name__, partial(_module, what, False), _inplace_module(what))
    if isinstance(what, type) and issubclass(what, Function):
        return Subject(what.__name__, autograd.adapt(what).apply)
    if callable(what):
        return Subject(getattr(what, "__name__", repr(what)), what)
    raise TargetError("check takes a name, a module, a function or an autograd.Function class", repr(what))


def _named(name: str) -> Activation:
    if _look_up:
        return _look_up[0](name)
    if name not in CATALOG:
        raise UnknownActivationError.of(name, CATALOG)
    return CATALOG[name]


def _ours(activation: Activation, params: dict[str, Any], save: str) -> Subject:
    def call(x: Tensor, inplace: bool = False) -> Tensor:
        values = {name: v.to(x) if isinstance(v, Tensor) else v for name, v in params.items()}
        return autograd.apply(activation, x, values, inplace=inplace, save=save)

    constants = {name: v.detach() if isinstance(v, Tensor) else v for name, v in params.items()}
    return Subject(activation.name, call, partial(call, inplace=True), activation, constants, save, own=True)


def _module(module: nn.Module, inplace: bool, x: Tensor) -> Tensor:
    """The module's result in the input's dtype, on a copy of itself that does or does not work in place."""
    module = copy.deepcopy(module).to(x.device, x.dtype)
    if hasattr(module, "inplace"):
        vars(module)["inplace"] = inplace
    y: Tensor = module(x)
    return y


def _inplace_module(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    return partial(_module, module, True) if hasattr(module, "inplace") else None
