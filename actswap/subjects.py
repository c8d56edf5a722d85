"""What can be checked, in one form: names, definitions, modules, functions and autograd Functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call
from torch.jit import ScriptFunction, ScriptModule

from actswap import autograd
from actswap.activation import Activation, State
from actswap.catalog import CATALOG
from actswap.errors import TargetError, UnknownActivationError

SURROGATE = "a surrogate: its backward is deliberately not its derivative"
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
    copies: Copies | None = None
    """Of a module of someone else's."""
    overwrites: bool = False
    """It is a function that works in place and has no other form; `call` gives it a copy."""

    @property
    def state(self) -> State | None:
        """The state that it saves, where it goes through `autograd.apply`."""
        return self.truth.states[self.saves] if self.truth is not None and self.saves is not None else None

    @property
    def saves(self) -> str | None:
        """The name of that state."""
        if not self.own or self.truth is None or not self.truth.states:
            return None
        return autograd.state_for(self.truth, self.params, save=self.save)

    @property
    def surrogate(self) -> bool:
        """Whether its backward is deliberately not its derivative."""
        return self.truth is not None and self.truth.surrogate

    def known(self) -> tuple[Activation, dict[str, Any]]:
        """The definition to compare with, and its parameters."""
        assert self.truth is not None
        return self.truth, dict(self.params)

    def like(self, model: Subject) -> Subject:
        """This subject, to be compared with what another one is."""
        own = self.own and self.truth is model.truth
        return replace(self, truth=model.truth, params=self.params if own else model.params, own=own)

    def ready(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """The call for tensors like `x`, without anything that is not its own work."""
        if self.overwrites and self.inplace is not None:
            return self.inplace
        return self.copies.like(x) if self.copies is not None else self.call

    def settled(self, device: Any) -> Subject:
        """This subject after a trial: of a function that overwrites its input, the other form works on a copy.

        Raises:
            TargetError: a module with one parameter value per channel, which takes no tensor without channels; or a
                random function that should be like a known one.
        """
        x = torch.linspace(-2, 2, 5, dtype=torch.float32, device=device)
        before, call = x.clone(), self.call
        try:
            with torch.no_grad():
                first, again, other = (_seeded(call, before.clone(), seed) for seed in (0, 0, 1))
                call(x)
        except Exception as error:  # what it is will be seen in the lines
            several = [name for name, value in self.values(x).items() if value.numel() > 1]
            if several and isinstance(error, RuntimeError):
                given = f"{self.name} with several values of {', '.join(several)}: {error}"
                hint = "one value of each parameter, for all channels"
                raise TargetError("what is checked takes tensors of any shape", given, hint) from error
            return self
        if self.truth is not None and _same(first, again) and not _same(first, other):
            raise TargetError("a random function has no values to compare", self.name, "a module in eval mode")
        if self.inplace is not None or torch.equal(x, before):
            return self
        return replace(self, call=lambda x: call(x.clone()), inplace=call, overwrites=True)

    def values(self, x: Tensor) -> dict[str, Tensor]:
        """The trained parameters of a module, for tensors like `x`."""
        if self.copies is not None:
            return self.copies.trained(x)
        return {name: value for name, value in self.params.items() if isinstance(value, Tensor)}


@dataclass
class Copies:
    """Copies of a user's module, one for each dtype, device and in-place flag, so that the module stays as it is."""

    module: nn.Module
    made: dict[tuple[torch.dtype, torch.device, bool], nn.Module] = field(default_factory=dict)

    def like(self, x: Tensor, inplace: bool = False) -> nn.Module:
        """The copy for tensors like `x`."""
        key = x.dtype, x.device, inplace
        if key not in self.made:
            made = copy.deepcopy(self.module).to(x.device, x.dtype)
            if hasattr(made, "inplace"):
                vars(made)["inplace"] = inplace
            self.made[key] = made
        return self.made[key]

    def call(self, x: Tensor, inplace: bool = False) -> Tensor:
        """The module's result in the input's dtype."""
        y: Tensor = self.like(x, inplace)(x)
        return y

    def trained(self, x: Tensor) -> dict[str, Tensor]:
        """Its trained parameters by name, for tensors like `x`; a scripted module takes no others."""
        if isinstance(self.module, ScriptModule):
            return {}
        return {name: p.detach().clone() for name, p in self.like(x).named_parameters() if p.requires_grad}

    def call_with(self, names: tuple[str, ...], x: Tensor, *values: Tensor) -> Tensor:
        """The module's result with other values of these parameters."""
        y: Tensor = functional_call(self.like(x), dict(zip(names, values, strict=True)), (x,))
        return y


def subject(what: Any) -> Subject:
    """What a user may hand to `check`, in one form.

    Raises:
        TargetError: it is no activation in any form.
        UnknownActivationError: an unknown name.
    """
    if isinstance(what, str):
        return subject(_named(what))
    if isinstance(what, Activation):
        return _ours(what, what.bind({}), "auto")
    if isinstance(what, Function) and not isinstance(what, type):
        if vars(what):
            given = f"{type(what).__qualname__} with {', '.join(vars(what))}"
            raise TargetError("a Function's instance has state that its static methods do not see", given, _APPLY)
        return subject(type(what))
    if isinstance(what, type):
        return _class(what)
    if isinstance(what, nn.Module):
        activation, params = getattr(what, "activation", None), getattr(what, "params", None)
        if isinstance(activation, Activation) and isinstance(params, dict):  # a module of actswap.nn, which is above
            return _ours(activation, params, str(what.save))
        copies = Copies(what)
        if isinstance(what, ScriptModule):  # its flag is compiled in
            return Subject(what.original_name, copies.call, copies=copies)
        inplace = partial(copies.call, inplace=True) if hasattr(what, "inplace") else None
        return Subject(type(what).__name__, copies.call, inplace, copies=copies)
    if callable(what):
        named = "name" if isinstance(what, ScriptFunction) else "__name__"
        return Subject(getattr(what, named, type(what).__name__), what)
    raise TargetError("check takes a name, a module, a function or an autograd.Function class", repr(what))


def _seeded(call: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> Any:
    torch.manual_seed(seed)
    return call(x)


def _same(one: Any, other: Any) -> bool:
    return not isinstance(one, Tensor) or torch.equal(one, other)


_APPLY = "pass the class, and give forward its values as arguments"


def _class(what: type) -> Subject:
    if issubclass(what, Function):
        return Subject(what.__name__, autograd.adapt(what).apply)
    if not issubclass(what, nn.Module):
        raise TargetError("a class to check is an nn.Module or an autograd.Function", repr(what), "pass an instance")
    try:
        return subject(what())
    except TypeError as error:
        hint = f"pass an instance: check({what.__name__}(...))"
        raise TargetError(f"a module class is made without arguments: {error}", repr(what), hint) from error


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
