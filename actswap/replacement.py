"""Replacement: what can be put in. `new`, whatever its form, made into one module per site."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actswap import aliasing, registry
from actswap.activation import Activation
from actswap.adapters import Cloning, Elementwise, InPlace
from actswap.autograd import adapt, state_for
from actswap.errors import BlockedSiteError, ParameterError, TargetError
from actswap.nn import ActivationModule, module_class
from actswap.portable import Data, object_data
from actswap.recognize import Tables
from actswap.sites import Site


class PerSite:
    """A factory that is called with each site; made by `per_site`."""

    def __init__(self, factory: Callable[[Site], nn.Module]) -> None:
        self.factory = factory


def per_site(factory: Callable[[Site], nn.Module]) -> PerSite:
    """Make a factory that is called with each `Site` a `new` for `replace`.

    Args:
        factory: gives the module for a site.

    >>> import torch, actswap
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> betas = {"1": 1.0, "3": 5.0}
    >>> by_depth = actswap.per_site(lambda site: actswap.nn.Softplus(beta=betas[site.path]))
    >>> actswap.replace(model, "relu", by_depth)[3].beta
    5.0
    """
    return PerSite(factory)


@dataclass(frozen=True)
class Replacement:
    """A resolved `new`.

    Args:
        name: for messages and records.
        activation: its definition; None for what only the user knows.
        make: gives the module for a site, before it is placed on a device.
        source: `new` as data, where it is importable.
    """

    name: str
    activation: Activation | None
    make: Callable[[Site], nn.Module]
    source: Data | None = None


@dataclass(frozen=True)
class Slot:
    """One new module: the sites it serves, and what computes the old activation in its place."""

    module: nn.Module
    sites: tuple[Site, ...]
    old: Callable[[Tensor], Tensor]

    @property
    def path(self) -> str:
        """The path of its first site."""
        return self.sites[0].path


def resolve(new: Any, params: Mapping[str, Any], save: str) -> Replacement:
    """The replacement that `replace` was given as `new`.

    Raises:
        UnknownActivationError, ParameterError, TargetError: it is no activation, or not with these parameters.
    """
    if isinstance(new, Replacement):
        return new
    if isinstance(new, type) and issubclass(new, ActivationModule):
        new = new.activation
    if isinstance(new, (str, Activation)):
        return _of_activation(registry.get(new), params, save)
    if isinstance(new, type) and issubclass(new, nn.Module):
        _constructor_takes(new, params)
        return Replacement(new.__name__, None, lambda site: new(**params), object_data(new, params))
    if params:
        raise ParameterError(
            "parameters go to a name or a class, which is called with them", f"{new!r} with {dict(params)}",
            "put the parameters into the object itself",
        )  # fmt: skip
    if isinstance(new, torch.autograd.Function):
        raise _instance(new)
    if isinstance(new, nn.Module):
        return Replacement(type(new).__name__, None, lambda site: copy.deepcopy(new))
    if isinstance(new, type) and issubclass(new, torch.autograd.Function):
        function = _takes_one(adapt(new), new)
        return Replacement(
            new.__name__, None, lambda site: Elementwise(function.apply, new.__name__), object_data(new, {})
        )
    if isinstance(new, PerSite):
        data = object_data(new.factory, {}, "per_site")
        return Replacement(_name(new.factory), None, lambda site: _module(new.factory(site), new.factory), data)
    if not callable(new):
        raise TargetError(
            "`new` is a name, a module class or instance, an autograd.Function class, or a callable", repr(new),
            "actswap.names() lists the names",
        )  # fmt: skip
    if _required(new) == 0:
        return Replacement(_name(new), None, lambda site: _module(new(), new), object_data(new, {}))
    return Replacement(_name(new), None, lambda site: Elementwise(new, _name(new)), object_data(new, {}))


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _required(function: Callable[..., Any]) -> int:
    """How many arguments a callable must be given; 1 for built-ins that do not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in kinds for p in parameters)


def _constructor_takes(cls: type[nn.Module], params: Mapping[str, Any]) -> None:
    try:
        inspect.signature(cls).bind(**params)
    except TypeError as error:
        raise ParameterError(
            f"{cls.__name__}'s constructor does not take these parameters", f"{dict(params)} ({error})",
            f"its signature is {inspect.signature(cls)}",
        ) from error  # fmt: skip


def _takes_one(function: type[torch.autograd.Function], new: type) -> type[torch.autograd.Function]:
    """A Function whose forward needs the context and the tensor only, or, with `setup_context`, the tensor."""
    context = inspect.getattr_static(function, "setup_context") is inspect.getattr_static(
        torch.autograd.Function, "setup_context"
    )
    if (needed := _required(function.forward)) > 1 + context:
        raise TargetError(
            "a Function to put in is applied to one tensor",
            f"{new.__name__}.forward needs {needed - context} arguments",
            f"lambda x: {new.__name__}.apply(x, ...), or defaults",
        )  # fmt: skip
    return function


def _instance(made: torch.autograd.Function) -> TargetError:
    name = type(made).__name__
    return TargetError("PyTorch no longer calls instances of a Function", f"{name}()", f"pass the class: {name}")


def _module(made: Any, factory: Callable[..., Any]) -> nn.Module:
    if isinstance(made, nn.Module):
        return made
    if isinstance(made, torch.autograd.Function):
        raise _instance(made)
    if callable(made):
        return Elementwise(made, _name(made))
    raise TargetError("a factory must give a module or a function of one tensor", f"{_name(factory)} gave {made!r}")


def _of_activation(activation: Activation, params: Mapping[str, Any], save: str) -> Replacement:
    options = {name: params[name] for name in ("num_parameters",) if name in params and activation.learnable}
    own = {name: value for name, value in params.items() if name not in options}
    activation.bind(own)
    cls = module_class(activation)
    cls(**own, **options, save=save)  # whatever the constructor refuses is refused before any model is touched

    def make(site: Site) -> nn.Module:
        carried = dict(site.params) if site.activation is activation else {}
        if fixed := [p.name for p in activation.parameters if p.mode and p.name in carried]:
            raise BlockedSiteError(
                f"the call fixes {fixed[0]}={carried[fixed[0]]}, and the new module would follow the model's mode",
                site.path, f"pass {fixed[0]}=self.{fixed[0]} in the call, or exclude the site",
            )  # fmt: skip
        learned = {name: carried.pop(name) for name in list(carried) if isinstance(carried[name], nn.Parameter)}
        values = {**carried, **own}
        module = cls(**values, **options, inplace=site.inplace, save=_save(site, activation, save, values))
        for name, parameter in learned.items():
            if name not in own and not options:
                setattr(module, name, parameter)
        return module

    return Replacement(activation.name, activation, make)


def _save(site: Site, new: Activation, save: str, params: Mapping[str, Any]) -> str:
    """What `auto` means at a site: the output where that is safe, else PyTorch's own choice.

    The next layer that keeps the output makes it free. Where the old op's backward needed its output, no later op can
    have changed that output in place; where it did not, the data flow must show that none does, and gradients must
    stay PyTorch's bit for bit.
    """
    if save != "auto":
        return save
    state = new.states.get("output")
    if state is None or (state.allowed is not None and not state.allowed(new.bind(params))):
        return "auto"
    if keeps_output(site):
        return "output"
    owner = site.owner
    exact = state.bound == 0 and owner is not None and site._flow is not None
    if exact and not aliasing.result_is_overwritten(site._flow, owner, site.nodes(site._flow)):  # type: ignore[arg-type]
        return "output"
    return "auto"


def keeps_output(site: Site) -> bool:
    """Whether what is there now saves its output for backward."""
    return site.activation.save == "output" and not site.idiom  # a clamp saves its input


def keep_input(module: nn.Module, site: Site) -> nn.Module:
    """The module for a site whose input is overwritten after it ran: one that saves its input gets a copy.

    The old activation did not mind where it saved its output.
    """
    owner = site.owner
    if owner is None or site.inplace or not keeps_output(site) or _saves_output(module):
        return module
    overwritten = aliasing.input_is_overwritten(site._flow, owner, site.nodes(site._flow))
    return Cloning(module) if overwritten else module


def _saves_output(module: nn.Module) -> bool:
    if not isinstance(module, ActivationModule):
        return False
    return state_for(module.activation, module.params, inplace=module.inplace, save=module.save) == "output"


def make_in_place(module: nn.Module, site: Site, tables: Tables) -> nn.Module:
    """The module for an in-place site: in place itself where it can be, else wrapped."""
    if not site.inplace or (isinstance(module, ActivationModule) and module.inplace):
        return module
    if hasattr(module, "inplace") and tables.module(module) is not None:
        vars(module)["inplace"] = True
        return module
    return InPlace(module)
