"""Values: the outputs and gradients of a run, and how two runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actswap import running
from actswap.running import Inputs

RUNS: tuple[tuple[str, bool | None, bool], ...] = (
    ("as it is", None, False),
    ("train", True, True),
    ("eval", False, True),
)
"""Name, training flag (None: each module's own), and whether gradients are taken."""


@dataclass
class Values:
    """The outputs of a run, and the gradients where they were taken; `problem` says why there are none."""

    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    problem: str | None = None

    def named(self) -> dict[str, Tensor]:
        """Every tensor by what it is."""
        return {**{f"output {i}": t for i, t in enumerate(self.outputs)}, **self.gradients}


def run(model: nn.Module, example_inputs: Inputs, training: bool | None, gradients: bool) -> Values:
    """Run a model without a trace, always under the same random state.

    Raises:
        Exception: whatever the model's forward raises.
    """
    with running.undisturbed(model), torch.set_grad_enabled(gradients):
        running.set_training(model, training)
        torch.manual_seed(0)
        state = running.detached(model)
        leaves = {f"gradient of {name}": tensor for name, tensor in state.items() if tensor.requires_grad}
        given = pytree.tree_map(lambda v: _leaf(v, gradients, leaves), example_inputs)
        with running.substituted(model, state):
            args, kwargs = running.arguments(given)
            outputs = running.tensors(model(*args, **kwargs))
            values = Values([output.detach().clone() for output in outputs])
            if gradients:
                _differentiate(outputs, leaves, values)
    return values


def _leaf(value: Any, gradients: bool, leaves: dict[str, Tensor]) -> Any:
    """A copy of an input that the model may overwrite; its gradient is wanted where it can have one."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    if not gradients or not copy.is_floating_point():
        return copy
    leaf = copy.requires_grad_()
    leaves[f"gradient of input {sum(name.startswith('gradient of input') for name in leaves)}"] = leaf
    return leaf.clone()


def _differentiate(outputs: list[Tensor], leaves: dict[str, Tensor], values: Values) -> None:
    roots = [output for output in outputs if output.requires_grad]
    if not roots or not leaves:
        values.problem = "nothing requires a gradient"
        return
    upstream = [torch.cos(torch.arange(r.numel(), device=r.device).reshape(r.shape)).to(r.dtype) for r in roots]
    try:
        found = torch.autograd.grad(roots, list(leaves.values()), upstream, allow_unused=True)
    except RuntimeError as error:
        values.problem = f"its backward raises: {str(error).splitlines()[0]}"
        return
    values.gradients = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


def differing(a: Values, b: Values, noise: Mapping[str, float] | None = None) -> list[str]:
    """The tensors of two runs that are not the same bits; with noise, not within four times of it."""
    if (a.problem is None) != (b.problem is None):
        return [f"{a.problem or 'it ran'}; then {b.problem or 'it ran'}"]
    left, right = a.named(), b.named()
    found = [f"{name}: only on one side" for name in left.keys() ^ right.keys()]
    for name in left.keys() & right.keys():
        x, y = left[name], right[name]
        if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
            found.append(f"{name}: {_kind(x)} became {_kind(y)}")
        elif not same_bits(x, y) and distance(x, y) > 4 * (noise or {}).get(name, 0.0):
            found.append(f"{name}: {_mismatch(x, y)}")
    return sorted(found)


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same bits, any NaN being as good as another."""
    if not x.is_floating_point():
        return torch.equal(x, y)
    # A copy in the default layout: some layouts that count as contiguous have strides that `view` does not take.
    a, b = (t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (x, y))
    return torch.equal(a, b) or bool(((x == y) & (x.signbit() == y.signbit()) | (x.isnan() & y.isnan())).all())


def distance(x: Tensor, y: Tensor) -> float:
    """The largest absolute difference; NaN agrees with NaN, and is infinitely far from a number."""
    if not x.numel():
        return 0.0
    difference = (x.double() - y.double()).abs()
    agree = (x == y) | (x.isnan() & y.isnan())
    return float(torch.where(agree, torch.zeros_like(difference), difference).nan_to_num(nan=float("inf")).max())


def _mismatch(x: Tensor, y: Tensor) -> str:
    unequal = ~((x == y) | (x.isnan() & y.isnan()))
    return f"{int(unequal.sum())} of {x.numel()} elements differ, at most by {distance(x, y):.3g}"


def relative(a: Tensor, b: Tensor) -> float:
    """The norm of the difference, relative to the first norm."""
    if not a.is_floating_point() or not a.numel():
        return 0.0
    norm = float(a.double().norm())
    distance = float((a.double() - b.double()).norm())
    return distance / norm if norm else distance
