"""The one dispatcher: from a definition and a tensor to the form of its Function that the situation needs.

No single form of `autograd.Function` does everything, so there are three of each (see `actswap.functions`):

- *eager*: `forward(ctx, ...)`, in place with `mark_dirty`; the cheapest per call;
- *transformed*: `setup_context` with `generate_vmap_rule`, for reverse mode and vmap of `torch.func`;
- *compiled*: as eager, with a backward that is straight kernel calls, for Dynamo.

Everything saved goes through `save_for_backward`, so that changing it in place before the backward is an error.
Where no gradient is needed, and in the modes that plain operations serve best (forward mode, tracing, exporting), the
plain operation runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import get_interpreter_stack
from torch.autograd import Function, forward_ad
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_unary

from actswap.activation import Activation, State
from actswap.errors import ModeError, ParameterError, ShapeError, TargetError
from actswap.functions import make_compiled, make_eager, make_trained, make_transformed, transforming

_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # new in PyTorch 2.7
_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
_recorded: list[Callable[[Activation], Callable[..., Any]]] = []


def record_as(function: Callable[[Activation], Callable[..., Any]]) -> None:
    """Say which public function stands for an activation in traced graphs; `actswap.functional` does."""
    _recorded[:] = [function]


@dataclass(frozen=True)
class Plan:
    """What an eager call needs for one activation, `save` and in-place flag."""

    state: State | None
    eager: Any
    copies: bool
    """In place, the input is overwritten: a copy is saved, as an argument, so that it stays in the graph."""
    conditional: bool
    """Whether the parameters' values decide which state is used, so that it must be chosen per call."""


_plans: dict[tuple[Activation, str, bool], Plan] = {}
_eager: dict[tuple[Activation, str, bool], Plan] = {}
_transformed: dict[tuple[Activation, str], Any] = {}
_compiled: dict[tuple[Activation, str], Any] = {}


def state_for(activation: Activation, params: Mapping[str, Any], *, inplace: bool = False, save: str = "auto") -> str:
    """The name of the state that `save` means here; `"none"` where PyTorch's autograd differentiates the forward.

    Raises:
        ParameterError: the definition has no such state, or these parameter values do not permit it.

    >>> from actswap.catalog import CATALOG
    >>> state_for(CATALOG["leaky_relu"], {"negative_slope": 0.01}, inplace=True)
    'output'
    """
    states = activation.states
    if save == "auto":
        if not states:
            return "none"
        first = activation.save_ if inplace and activation.save_ is not None else activation.save
        for key in (first, "input", *states):
            if key in states and _permits(states[key], params):
                return key
    elif save in states and _permits(states[save], params):
        return save
    elif save in states and any(_permits(states[save], other) for other in _other_modes(activation, params)):
        return state_for(activation, params, inplace=inplace)  # right in the other mode; this one has its own
    allowed = ", ".join(repr(key) for key in ("auto", *states))
    if save in states:
        given = ", ".join(f"{name}={value!r}" for name, value in params.items())
        raise ParameterError(f"{activation.name}: save={save!r} needs {states[save].needs}", given, f"save: {allowed}")
    raise ParameterError(f"{activation.name} cannot save this state", f"save={save!r}", f"save: {allowed}")


def _other_modes(activation: Activation, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**params, p.name: not params[p.name]} for p in activation.parameters if p.mode]


def _permits(state: State, params: Mapping[str, Any]) -> bool:
    return state.allowed is None or state.allowed(params)


def _plan(activation: Activation, values: Sequence[Any], inplace: bool, save: str) -> Plan:
    plan = _plans.get((activation, save, inplace))
    if plan is None or plan.conditional:
        key = state_for(activation, dict(zip(activation.names, values, strict=True)), inplace=inplace, save=save)
        plan = _eager.get((activation, key, inplace))
        if plan is None:
            plan = _eager[activation, key, inplace] = _make_plan(activation, key, inplace)
        _plans[activation, save, inplace] = plan
    return plan


def _make_plan(activation: Activation, key: str, inplace: bool) -> Plan:
    if key == "none":
        return Plan(None, None, False, False)
    make = make_trained if activation.learnable else make_eager
    conditional = any(state.allowed is not None for state in activation.states.values())
    return Plan(activation.states[key], make(activation, key, inplace), key == "input", conditional)


# Dynamo enters transforms while it traces, and guards on those around it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _transforms() -> str:
    """The names of the transforms of `torch.func` that are on; `Jvp` also for forward mode by hand."""
    names = {i.key().name for i in get_interpreter_stack() or ()} if transforming() else set()
    return ", ".join(sorted(names | {"Jvp"} if forward_ad._current_level >= 0 else names))


def _plainly(activation: Activation, x: Tensor, values: Sequence[Any], inplace: bool, mode: str) -> Tensor:
    """Plain operations in a mode that our Functions cannot serve.

    Raises:
        ModeError: a surrogate backward, which plain operations do not have.
    """
    if activation.surrogate:
        raise ModeError(
            f"{activation.name} has a surrogate backward, and this mode runs plain operations, which do not",
            mode,
            "run it eagerly on a dense tensor; trace and export it under torch.no_grad()",
        )
    return _plain(activation, x, values, inplace)


def prepare(activation: Activation) -> None:
    """Make what Dynamo needs ready-made, since it cannot trace the making of a class."""
    for key in activation.states:
        if (activation, key) not in _compiled:
            _compiled[activation, key] = make_compiled(activation, key)


def apply(
    activation: Activation, x: Tensor, params: Mapping[str, Any], *, inplace: bool = False, save: str = "auto"
) -> Tensor:
    """The activation of `x`, with its hand-written backward, in whatever mode of PyTorch it is called.

    Args:
        activation: the definition.
        x: any shape; a floating dtype, or what PyTorch's op takes. The result has its dtype and memory format.
        params: every parameter's value by name; trained ones may be tensors, with one value or one per channel.
        inplace: overwrite `x` and return it.
        save: the state kept for the backward: `"auto"` is what PyTorch's own op keeps.

    Saved for backward: that state, and the trained parameters; nothing when no gradient is needed.

    Raises:
        ParameterError: the definition has no such state, or these parameter values do not permit it.
        ShapeError: trained parameters that do not fit the channels of `x`.
        ModeError: a surrogate backward in a mode that has only plain operations.
        TypeError: `x` is no tensor.

    >>> from actswap.catalog import CATALOG
    >>> x = torch.tensor([0.0], requires_grad=True)
    >>> apply(CATALOG["softplus"], x, {"beta": 1.0, "threshold": 20.0}).grad_fn.name()
    'SoftplusBackward'
    """
    values = [params[name] for name in activation.names]
    if has_torch_function_unary(x) or (activation.learnable and has_torch_function(values)):
        given = {**params, **({"inplace": True} if inplace else {}), **({"save": save} if save != "auto" else {})}
        return cast(Tensor, handle_torch_function(_recorded[0](activation), (x, *values), x, **given))
    if not isinstance(x, Tensor):
        raise TypeError(f"{activation.name}(): argument 'x' must be Tensor, not {type(x).__name__}")
    run = _compiling if torch.compiler.is_compiling() else _dispatch
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        values = [value.to(x.dtype) if isinstance(value, Tensor) else value for value in values]
        with torch.autocast(x.device.type, enabled=False):
            return run(activation, x, values, inplace, save)
    return run(activation, x, values, inplace, save)


def plain(activation: Activation, x: Tensor, params: Mapping[str, Any], inplace: bool = False) -> Tensor:
    """The activation as PyTorch's own operations, differentiated by PyTorch's autograd.

    >>> from actswap.catalog import CATALOG
    >>> plain(CATALOG["relu"], torch.tensor([-1.0, 2.0]), {})
    tensor([0., 2.])
    """
    return _plain(activation, x, [params[name] for name in activation.names], inplace)


def _plain(activation: Activation, x: Tensor, values: Sequence[Any], inplace: bool) -> Tensor:
    if not activation.native:  # PyTorch's own prelu shapes its weight itself, which exporters rely on
        values = _shaped(activation, x, values)
    if not inplace:
        return activation.forward(x, *values)
    if activation.forward_ is not None:
        return activation.forward_(x, *values)
    # a graph may keep the input, which is about to be overwritten; a trace is made in one mode and checked in another
    kept = torch.is_grad_enabled() or _tracing()
    return x.copy_(activation.forward(x.clone() if kept else x, *values))


def _shaped(activation: Activation, x: Tensor, values: Sequence[Any]) -> Sequence[Any]:
    """The trained parameters' values shaped to broadcast: one value, or one per channel along dimension 1."""
    if not activation.learnable:
        return values
    shaped = list(values)
    for index, name in activation.trained:
        if isinstance(values[index], Tensor):
            shaped[index] = _shape(activation, name, x, values[index])
    return shaped


def _shape(activation: Activation, name: str, x: Tensor, value: Tensor) -> Tensor:
    if value.dim() > 1:
        raise ShapeError(
            f"{activation.name}: Expected `{name}` to be a scalar or 1D tensor", f"{name}.shape={tuple(value.shape)}"
        )
    dims = x.dim()
    if dims == 1 and value.dim() == 1 and value.numel() == 1:
        return value
    shape = [1, -1] + [1] * (dims - 2) if dims > 1 else [1] * dims
    if _tracing():  # sizes are tensors there, and comparing them warns
        return value.reshape(shape)
    channels = x.size(1) if dims > 1 else 1
    if value.numel() != 1 and (dims == 0 or value.numel() != channels):
        raise ShapeError(
            f"{activation.name}: Mismatch of parameter numbers and input channel size: {name} has one value, or one "
            "per channel along dimension 1",
            f"{value.numel()} values, input of shape {tuple(x.shape)}",
        )
    return value.reshape(shape)


def _needs_gradient(activation: Activation, x: Tensor, values: Sequence[Any]) -> bool:
    for index, _ in activation.trained:
        if isinstance(values[index], Tensor) and values[index].requires_grad:
            return True
    return x.requires_grad


def _dispatch(activation: Activation, x: Tensor, values: Sequence[Any], inplace: bool, save: str) -> Tensor:
    plan = _plan(activation, values, inplace, save)
    if plan.state is None or not torch.is_grad_enabled():
        return _plain(activation, x, values, inplace)
    if transforming() or forward_ad._current_level >= 0:
        return _transforming(activation, plan.state, x, values, inplace, save)
    if not _needs_gradient(activation, x, values) or not x.is_floating_point():
        return _plain(activation, x, values, inplace)
    if torch._C._is_tracing():
        return _plainly(activation, x, values, inplace, "torch.jit.trace")
    if x.is_nested and x.layout is torch.strided:  # a Function asks for its sizes, which it does not have
        return _plainly(activation, x, values, inplace, "a nested tensor of layout torch.strided")
    if activation.learnable:
        values = _shaped(activation, x, values)
    if not inplace:
        return cast(Tensor, plan.eager.apply(x, *values))
    if x.requires_grad and x.is_leaf:  # Function would say the same, but after overwriting it
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    return cast(Tensor, plan.eager.apply(x, x.clone(), *values) if plan.copies else plan.eager.apply(x, *values))


def _transforming(
    activation: Activation, state: State, x: Tensor, values: Sequence[Any], inplace: bool, save: str
) -> Tensor:
    """Under `torch.func` or forward mode; in place is out of place and a copy, which functorch follows."""
    modes = _transforms()
    if "Jvp" in modes or "Functionalize" in modes:
        return _plainly(activation, x, values, inplace, modes)
    if activation.learnable or state.forward is not None or not x.is_floating_point():
        return _plain(activation, x, values, inplace)
    key = state_for(activation, dict(zip(activation.names, values, strict=True)), inplace=inplace, save=save)
    form = _transformed.get((activation, key))
    if form is None:
        form = _transformed[activation, key] = make_transformed(activation, key)
    return cast(Tensor, x.copy_(form.apply(x.clone(), *values)) if inplace else form.apply(x, *values))


def _compiling(activation: Activation, x: Tensor, values: Sequence[Any], inplace: bool, save: str) -> Tensor:
    """While Dynamo traces; exporters get plain operations, which every runtime knows.

    So does `torch.func`: Dynamo gives its own form of a Function neither a vmap rule nor a forward-mode derivative.
    """
    modes = _transforms()
    if modes and not (activation.surrogate and modes == "Grad"):
        return _plainly(activation, x, values, inplace, f"{modes} while compiling")
    key = state_for(activation, dict(zip(activation.names, values, strict=True)), inplace=inplace, save=save)
    form = _compiled.get((activation, key))
    if not torch.is_grad_enabled() or form is None or activation.states[key].forward is not None:
        return _plain(activation, x, values, inplace)
    if not _needs_gradient(activation, x, values):  # Dynamo then calls a forward of three arguments without its context
        return _plain(activation, x, values, inplace)
    if _exporting():
        return _plainly(activation, x, values, inplace, "torch.export")
    values = _shaped(activation, x, values)
    return cast(Tensor, x.copy_(form.apply(x.clone(), *values)) if inplace else form.apply(x, *values))


def is_legacy(function: type[Function]) -> bool:
    """Whether a Function's `forward` or `backward` is an instance method, as before PyTorch 0.4.

    >>> class Old(Function):
    ...     def forward(self, x):
    ...         return x.clamp(min=0)
    >>> is_legacy(Old)
    True
    """
    return any(not isinstance(inspect.getattr_static(function, name), staticmethod) for name in ("forward", "backward"))


def adapt(function: type[Function]) -> type[Function]:
    """A Function with static methods, from one written the legacy way with instance methods and state on `self`.

    The context takes the place of `self`; a Function that is static already is returned as it is.

    Raises:
        TargetError: it has no backward; or an `__init__`, whose state a context does not have.

    >>> class Old(Function):
    ...     def forward(self, x):
    ...         self.save_for_backward(x)
    ...         return x.clamp(min=0)
    ...     def backward(self, g):
    ...         return g * (self.saved_tensors[0] > 0)
    >>> adapt(Old).apply(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    written = [cls for cls in function.__mro__ if cls not in Function.__mro__]
    legacy = is_legacy(function)
    if legacy and any("__init__" in vars(cls) for cls in written):
        raise TargetError(
            "a legacy Function with an __init__ keeps state that static methods do not have",
            function.__qualname__,
            "give forward the state as arguments, and make forward and backward static methods",
        )
    if all(inspect.getattr_static(function, n) is inspect.getattr_static(Function, n) for n in ("backward", "vjp")):
        raise TargetError("a Function needs a backward", function.__qualname__, "write one, or pass a plain function")
    if not legacy:
        return function
    methods = {
        name: staticmethod(getattr(inspect.getattr_static(function, name), "__func__", getattr(function, name)))
        for name in ("forward", "backward")
    }
    names = {"__module__": function.__module__, "__qualname__": function.__qualname__, "__doc__": function.__doc__}
    make: Any = type(function)
    adapted = make(function.__name__, (function,), {**methods, **names})
    for name, value in [item for cls in reversed(written) for item in vars(cls).items()]:
        # its helpers and constants, read as self.name
        if name not in (*methods, "_backward_cls") and not name.startswith("__"):
            setattr(adapted._backward_cls, name, value)
    return cast("type[Function]", adapted)
