"""Opaque code: kernels and compiled functions that apply an activation and cannot be rewritten.

What they apply is read from the module's settings, the compiled graph, or the operator's name, and listed as blocked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn

from actswap import registry
from actswap.activation import Activation
from actswap.recognize import Tables, resolve

Inside = tuple[str, list[Activation]]
"""Why it cannot be rewritten, and the activations it applies."""

_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_QUANTISED = {
    "torch.ao.nn.quantized": {
        "ReLU6": "relu6", "Hardswish": "hardswish", "ELU": "elu", "LeakyReLU": "leaky_relu", "Sigmoid": "sigmoid",
        "PReLU": "prelu",
    },
    "torch.ao.nn.intrinsic.quantized": dict.fromkeys(
        ["ConvReLU1d", "ConvReLU2d", "ConvReLU3d", "LinearReLU", "BNReLU2d", "BNReLU3d", "ConvAddReLU2d"], "relu"
    ) | {"LinearLeakyReLU": "leaky_relu", "LinearTanh": "tanh"},
    "torch.ao.nn.intrinsic.quantized.dynamic": {"LinearReLU": "relu"},
}  # fmt: skip


def module(owner: nn.Module, tables: Tables) -> Inside | None:
    """The activations that a module's kernels apply, by its class and settings."""
    if isinstance(owner, torch.jit.ScriptModule):
        return "it is compiled into a TorchScript module", _in_script(getattr(owner, "inlined_graph", None), tables)
    if isinstance(owner, _RECURRENT):
        gated = isinstance(owner, (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell))
        names = ["sigmoid", "tanh"] if gated else [str(getattr(owner, "nonlinearity", "tanh"))]
        kernel = f"it is a part of the kernel of nn.{next(c for c in type(owner).__mro__ if _is_torchs(c)).__name__}"
        return kernel, [registry.get(name) for name in names]
    for cls in type(owner).__mro__:
        if cls.__module__.startswith("torch.ao.") and (name := _quantised().get(cls)):
            return f"it is fused into the quantised kernel of {cls.__name__}", [registry.get(name)]
    return None


def _is_torchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.")


def _quantised() -> dict[type, str]:
    """PyTorch's quantised module classes that apply an activation, where they are imported."""
    found = {
        resolve(f"{package}.{name}"): activation
        for package, names in _QUANTISED.items()
        for name, activation in names.items()
    }
    return {cls: name for cls, name in found.items() if isinstance(cls, type)}


def _in_script(compiled: Any, tables: Tables) -> list[Activation]:
    """The activations in a TorchScript graph, each as often as it stands there."""
    found: list[Activation] = []
    for operator, patterns in tables.methods.items() if compiled is not None else ():
        if patterns[0].activation.name == operator.rstrip("_"):
            found += [patterns[0].activation] * len(compiled.findAllNodes(f"aten::{operator}"))
    return found


def function(target: Any, tables: Tables) -> Inside | None:
    """The activations that a compiled function applies: by its graph, or where it has none by its name."""
    if isinstance(target, torch.jit.ScriptFunction):
        found = list(dict.fromkeys(_in_script(target.inlined_graph, tables)))
        return (f"it is compiled into the TorchScript function {target.name}", found) if found else None
    name = _operator(target)
    activation = operator_named(name.rpartition(".")[2]) if name is not None else None
    return (f"it is inside {name}, which is compiled", [activation]) if activation is not None else None


def _operator(target: Any) -> str | None:
    """The name of a custom operator, or of a function of an extension module; None for PyTorch's own and for others."""
    if isinstance(target, torch._library.custom_ops.CustomOpDef):
        target = target._opoverload
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        qualified = str(target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else target.name())
        namespace, _, name = qualified.partition("::")
        return None if namespace in ("aten", "prim", "prims") else f"{namespace}.{name.partition('.')[0]}"
    if isinstance(target, BuiltinFunctionType) and isinstance(package := getattr(target, "__module__", None), str):
        known = package.partition(".")[0] in ("torch", "builtins", "numpy", "math", "operator")
        return None if known else f"{package}.{target.__name__}"
    return None


@functools.lru_cache(maxsize=256)
def operator_named(operator: str) -> Activation | None:
    """The activation whose name is a part of an operator's: the longest, as `relu` in `conv2d_relu`."""
    text = operator.lower().replace("_", "")
    fitting = [name for name in _names() if name.replace("_", "") in text and name != "identity"]
    return registry.get(max(fitting, key=len)) if fitting else None


def _names() -> Iterator[str]:
    return (activation.name for activation in registry.definitions() if activation.calls)
