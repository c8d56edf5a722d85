"""What must be true of any model: swapped, no kernel of the old activations is left and as many new calls ran."""

from __future__ import annotations

import warnings
from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import actswap

HIDDEN = ["relu", "relu6", "silu", "gelu", "gelu_tanh", "hardswish", "leaky_relu", "elu", "mish"]
COMPOSED = ["squared_relu"]  # its own module runs a relu kernel inside
KERNELS = {"relu", "hardtanh", "silu", "gelu", "hardswish", "leaky_relu", "elu", "mish"}


class Counting(nn.Module):
    """Stands for any activation: runs none, and counts."""

    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return x.clone()


class Kernels(TorchDispatchMode):
    """Counts every operator by its name, in place or not."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__.rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


def kernels(model, args):
    """How often each activation kernel runs in a forward."""
    with torch.no_grad(), Kernels() as record:
        model(*args)
    return {name: count for name, count in record.counts.items() if name in KERNELS}


def problems(model, args):
    """What is wrong after swapping every hidden activation of a model, and after undoing it; empty when nothing is."""
    before, keys = kernels(model, args), list(model.state_dict())
    names = {site.activation.name for site in actswap.find(model) if not site.idiom}
    # a star_relu is another activation, learnable, and runs one relu kernel
    stay = (
        sum(site.calls for site in actswap.find(model, "star_relu", example_inputs=args)) if "star_relu" in names else 0
    )
    old = [name for name in [*HIDDEN, *COMPOSED] if name in names]
    found = []
    if old:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", actswap.RoleWarning)
            actswap.replace(model, old, Counting, validate=False)
    Counting.calls = 0
    left = kernels(model, args)
    if sum(left.values()) != stay:
        found.append(f"left: {left}")
    if Counting.calls != sum(before.values()) - stay:
        found.append(f"{Counting.calls} new calls for {sum(before.values())} kernels {before}")
    if list(model.state_dict()) != keys:
        found.append("other state-dict keys")
    actswap.restore(model)
    if kernels(model, args) != before:
        found.append(f"restored: {kernels(model, args)} for {before}")
    return found
