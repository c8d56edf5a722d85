"""Names and aliases to definitions: the built-in ones and those that users add."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from actswap.activation import Activation, Domain, Formula, Parameter, State
from actswap.autograd import prepare
from actswap.catalog import CATALOG
from actswap.comparing import coarse
from actswap.errors import RegistrationError, UnknownActivationError
from actswap.subjects import look_up_with

RESERVED = frozenset({"x", "save", "activation", "params", "num_parameters", "device", "dtype", "forward"})
_F = TypeVar("_F", bound=Callable[..., Tensor])
_registered: dict[str, Activation] = {}
_listeners: list[Callable[[Activation], None]] = []


def get(name: str | Activation) -> Activation:
    """The definition of this name or alias; a definition is returned as it is.

    Raises:
        UnknownActivationError: there is none; the message has the nearest names.

    >>> get("swish").name
    'silu'
    """
    if isinstance(name, Activation):
        return name
    found = _find(name)
    if found is None:
        raise UnknownActivationError.of(name, _all_names())
    return found


def names() -> list[str]:
    """Every activation's name, sorted, without aliases.

    >>> "softplus" in names()
    True
    """
    return sorted({**CATALOG, **_registered})


def definitions() -> list[Activation]:
    """Every definition, built-in and registered, by name.

    >>> definitions()[0]
    Activation('celu')
    """
    return [{**CATALOG, **_registered}[name] for name in names()]


def is_registered(activation: Activation) -> bool:
    """Whether this very definition is a registered one.

    >>> is_registered(get("relu"))
    False
    """
    return _registered.get(activation.name) is activation


def _find(name: str) -> Activation | None:
    for key in (name, name.lower().replace("-", "_")):
        for table in (_registered, CATALOG):
            for definition in reversed(table.values()):  # the newest one that took this name
                if key == definition.name or key in definition.aliases:
                    return definition
    return None


def _all_names() -> set[str]:
    return {name for definition in definitions() for name in (definition.name, *definition.aliases)}


@overload
def register(name: str | Activation, forward: Formula, **options: Any) -> Activation: ...
@overload
def register(name: Activation, **options: Any) -> Activation: ...
@overload
def register(name: str | None = None, **options: Any) -> Callable[[_F], _F]: ...
@overload
def register(name: _F) -> _F: ...
def register(
    name: str | Activation | _F | None = None,
    forward: Formula | None = None,
    *,
    derivative: Formula | None = None,
    second: Formula | None = None,
    derivative_from_output: Formula | None = None,
    second_from_output: Formula | None = None,
    gradients: Mapping[str, Formula] = MappingProxyType({}),
    learnable: Sequence[str] = (),
    domains: Mapping[str, Domain] = MappingProxyType({}),
    aliases: Sequence[str] = (),
    override: bool = False,
    **fields: Any,
) -> Any:
    """Add an activation of your own, so that every function of actswap takes its name.

    Args:
        name: its name, an identifier; or a whole `Activation`.
        forward: f(x, **params), elementwise, in torch operations; parameters are its arguments with a default.
            Without it, `register` is a decorator of such a function, whose own name is used where none is given; it
            may also stand without parentheses.
        derivative: f'(x, **params). Without it, PyTorch's autograd differentiates `forward`.
        second: f''(x, **params). Without it, autograd of `derivative`.
        derivative_from_output: f' written in y = f(x), which permits `save="output"`.
        second_from_output: its derivative with respect to y; without it, autograd.
        gradients: the partial derivative of f for each learnable parameter, needed with `derivative`.
        learnable: the parameters that are trained.
        domains: the values that parameters may take.
        aliases: other names.
        override: take a name that is taken.
        fields: further fields of `Activation` (`kinks`, `low`, `high`, `formula`, `reference`, ...).

    Saved for backward: the input; with `save="output"` the output; without a derivative, whatever autograd saves.

    Raises:
        RegistrationError: the name is taken or no identifier, the function is not elementwise, changes the dtype or
            its input, or is random, or a derivative is wrong; the message has the worst point.

    >>> @register("cube", derivative=lambda x, scale: 3 * scale * x * x, override=True)
    ... def cube(x, scale=1.0):
    ...     return scale * x**3
    >>> get("cube").parameters
    (Parameter(name='scale', default=1.0, domain=any number, learnable=False, mode=False),)
    """
    if isinstance(name, Activation):
        return _add(name, override)
    if callable(name):  # @register without parentheses
        register(name.__name__, name)
        return name
    if forward is None:

        def decorate(function: _F) -> _F:
            register(
                name if name is not None else function.__name__, function,
                derivative=derivative, second=second, gradients=gradients, learnable=learnable,
                derivative_from_output=derivative_from_output, second_from_output=second_from_output,
                domains=domains, aliases=aliases, override=override, **fields,
            )  # fmt: skip
            return function

        return decorate
    if not isinstance(name, str):
        raise RegistrationError("a name is a lower-case identifier", repr(name), "register('name', function)")
    _free((name, *aliases), override)
    written = {"input": (derivative, second), "output": (derivative_from_output, second_from_output)}
    states = {
        key: State(slope, bend if bend is not None else _derived(slope))
        for key, (slope, bend) in written.items()
        if slope is not None
    }
    fields.setdefault("save", next(iter(states), "none"))
    parameters = _parameters(name, forward, learnable, domains)
    missing = [parameter.name for parameter in parameters if parameter.learnable and parameter.name not in gradients]
    if states and missing:
        raise RegistrationError(
            f"{name}: with a derivative of your own, learnable parameters need their gradients too",
            f"learnable={list(learnable)!r}, gradients for {sorted(gradients)!r}",
            f"gradients={{{missing[0]!r}: lambda x, ...: ...}}, or no derivative: then autograd finds both",
        )
    return _add(
        Activation(
            name=name, forward=forward, states=states, parameters=parameters, gradients=gradients,
            aliases=tuple(aliases), **fields,
        ),
        override,
    )  # fmt: skip


def unregister(name: str) -> None:
    """Take a registered activation out again; built-in ones stay.

    Raises:
        UnknownActivationError: no activation of this name was registered.
    """
    if name not in _registered:
        raise UnknownActivationError.of(name, _registered)
    del _registered[name]
    if name in CATALOG:
        _announce(CATALOG[name])


def _derived(slope: Formula) -> Formula:
    """The derivative of an elementwise formula by autograd, in a form that can be differentiated again."""

    def second(saved: Tensor, *values: Any) -> Tensor:
        pull = torch.func.vjp(lambda point: slope(point, *values), saved)[1]
        bend: Tensor = pull(torch.ones_like(saved))[0]
        return bend

    return second


def _parameters(
    name: str, forward: Formula, learnable: Sequence[str], domains: Mapping[str, Domain]
) -> tuple[Parameter, ...]:
    """The parameters of `forward`: its arguments after the first, which must have a number as default.

    `inplace` is none, since actswap does that itself, and `training` follows the mode.
    """
    try:
        _, *rest = inspect.signature(forward).parameters.values()
    except ValueError:  # a built-in of PyTorch says nothing: it is called with the tensor alone
        rest = []
    rest = [p for p in rest if p.name != "inplace" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    rule = f"{name}: parameters are the arguments of forward with a number as default"
    for p in rest:
        if p.name in RESERVED:
            raise RegistrationError(f"{name}: modules use this name themselves", repr(p.name), "another name for it")
        if p.kind is p.KEYWORD_ONLY:
            raise RegistrationError(rule, f"argument {p.name!r} is keyword-only: formulas take them by position too")
        if not isinstance(p.default, (int, float)):
            raise RegistrationError(rule, f"argument {p.name!r} has no number as default")
    unknown = sorted({*learnable, *domains} - {p.name for p in rest})
    if unknown:
        raise RegistrationError(rule, f"there is no argument {unknown[0]!r}")
    for p in rest:
        domain = domains.get(p.name, Domain())
        if not isinstance(domain, Domain):
            raise RegistrationError(f"{name}: the values of {p.name} are a Domain", repr(domain), "Domain(low, high)")
        if p.default not in domain:
            raise RegistrationError(f"{name}: {p.name} must be {domain!r}", f"default {p.default!r}")
    return tuple(
        Parameter(p.name, p.default, domains.get(p.name, Domain()), p.name in learnable, p.name == "training")
        for p in rest
    )


def _free(names: Sequence[str], override: bool) -> None:
    for name in names:
        if not name.isidentifier() or name != name.lower():
            raise RegistrationError("a name is a lower-case identifier", repr(name))
        if not override and _find(name) is not None:
            raise RegistrationError("this name is taken", repr(name), "override=True replaces what it stands for")


def _add(activation: Activation, override: bool) -> Activation:
    _free((activation.name, *activation.aliases), override)
    line = coarse(activation)
    if line.outcome == "fail":
        raise RegistrationError(f"{activation.name}: {line.name}", line.detail)
    _registered.pop(activation.name, None)  # the newest is last
    _registered[activation.name] = activation
    prepare(activation)
    _announce(activation)
    return activation


def _announce(activation: Activation) -> None:
    for listener in _listeners:
        listener(activation)


def on_register(listener: Callable[[Activation], None]) -> None:
    """Call `listener` with every definition that is registered from now on."""
    _listeners.append(listener)


look_up_with(get)
