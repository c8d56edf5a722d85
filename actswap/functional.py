"""One function per activation, made from its definition: `actswap.functional.softplus(x, beta=1.0, threshold=20.0)`.

All take the tensor first, the activation's parameters in PyTorch's order, and by keyword `inplace` and `save`.

>>> import torch
>>> softplus(torch.tensor([-1.0, 0.0, 1.0]))
tensor([0.3133, 0.6931, 1.3133])
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from actswap import autograd, registry
from actswap.activation import Activation
from actswap.catalog import CATALOG

__all__ = ["function", *CATALOG]

_made: dict[Activation, Callable[..., Tensor]] = {}


def function(activation: Activation | str) -> Callable[..., Tensor]:
    """The function of this activation, made once.

    >>> function("swish").__name__
    'silu'
    """
    activation = registry.get(activation)
    if activation not in _made:
        _made[activation] = _make(activation)
    return _made[activation]


def _make(activation: Activation) -> Callable[..., Tensor]:
    names = [parameter.name for parameter in activation.parameters]
    takes = "".join(f"{p.name}={p.default!r}, " for p in activation.parameters)
    given = "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"
    bound = f"bind({given})" if names else "{}"
    source = (  # source text, as namedtuple does: a real signature, and code that Dynamo can read
        f"def {activation.name}(x, {takes}*, inplace=False, save='auto'):\n"
        f"    return apply(activation, x, {bound}, inplace=inplace, save=save)\n"
    )
    scope: dict[str, Any] = {"apply": autograd.apply, "activation": activation, "bind": activation.bind}
    exec(compile(source, f"<actswap.functional.{activation.name}>", "exec"), scope)
    made: Callable[..., Tensor] = scope[activation.name]
    made.__module__ = __name__
    made.__doc__ = documentation(activation)
    made.__annotations__ = {"x": Tensor, "inplace": bool, "save": str, "return": Tensor} | {
        p.name: float | Tensor if p.learnable else bool if p.mode else float for p in activation.parameters
    }
    autograd.prepare(activation)
    return made


def documentation(activation: Activation, module: bool = False) -> str:
    """The docstring of an activation's function or module, from its definition."""
    lines = [f"{activation.formula or activation.name}, elementwise.", "", "Args:"]
    if not module:
        lines.append("    x: any shape, a floating dtype. The result has its shape, dtype and memory format.")
    for p in activation.parameters:
        if p.mode and module:
            continue
        trained = "trained: one value, or one per channel along dimension 1; " if p.learnable else ""
        lines.append(f"    {p.name}: {trained}{p.domain!r}, default {p.default!r}.")
    if module and activation.learnable:
        lines.append("    num_parameters: 1, or the number of channels.")
        lines.append("    device, dtype: of the trained parameters.")
    lines.append(f"    inplace: overwrite {'the input' if module else '`x`'} and return it.")
    states = ", ".join(f'`"{key}"`' for key in ("auto", *activation.states))
    lines.append(f"    save: what is kept for the backward: {states}.")
    kept = f"the {activation.save}" if activation.states else "what PyTorch's autograd keeps"
    lines += ["", f"Saved for backward: {kept}; nothing when no gradient is needed.", "", "Raises:"]
    lines.append("    ParameterError: a value outside its domain, or a state that is not allowed.")
    if activation.surrogate:
        lines += ["", "Its backward is deliberately not the derivative."]
    if activation.source:
        lines += ["", f"Source: {activation.source}."]
    call = f"module_class({activation.name!r})()(" if module else f"function({activation.name!r})("
    lines += ["", ">>> import torch", f">>> {call}torch.zeros(2)).shape", "torch.Size([2])", ""]
    return "\n".join(lines)


def _publish(activation: Activation) -> None:
    setattr(sys.modules[__name__], activation.name, function(activation))


for _activation in CATALOG.values():
    _publish(_activation)
registry.on_register(_publish)
autograd.record_as(function)
