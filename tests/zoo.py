"""What must be true of any model: swapped, no kernel of the old activations is left and as many new calls ran."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import actswap

HIDDEN = ["relu", "relu6", "silu", "gelu", "gelu_tanh", "hardswish", "leaky_relu", "elu", "mish"]
COMPOSED = ["squared_relu", "quick_gelu"]  # written out, the first with a relu kernel
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

    def of_activations(self):
        """The counts of the activation kernels."""
        return {name: count for name, count in self.counts.items() if name in KERNELS}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__.rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


def kernels(model, args):
    """How often each activation kernel runs in a forward."""
    with torch.no_grad(), Kernels() as record, written_out(record) as composed:
        model(**args) if isinstance(args, dict) else model(*args)
    return record.of_activations() | ({"written out": composed[0]} if composed[0] else {})


@contextlib.contextmanager
def written_out(record):
    """Counts the activation modules of another library that run no kernel: they write the formula out."""
    count, before = [0], []

    def is_one(module):
        return type(module).__module__ == "transformers.activations"

    def enter(module, args):
        if is_one(module):
            before.append(sum(record.of_activations().values()))

    def leave(module, args, output):
        if is_one(module):
            count[0] += before.pop() == sum(record.of_activations().values())

    hooks = torch.nn.modules.module
    handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


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
