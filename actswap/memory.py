"""memory: the bytes that a training forward keeps for its backward."""

from __future__ import annotations

from torch import nn

from actswap import kept, running
from actswap.report import Line, Report


def memory(model: nn.Module, example_inputs: running.Inputs) -> Report:
    """Count the bytes that a forward keeps alive for its backward.

    Every storage that the forward made and that outlives it is counted once: what went through `save_for_backward`,
    what a `ctx` attribute holds, and the output itself. Parameters, buffers and the example inputs are not counted.

    Args:
        model: runs once as it is (put it in training mode for the figure of a training step), without a trace.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments.

    Returns:
        A line `total`, then one per direct child, each with `.data["bytes"]`.

    Raises:
        Exception: whatever the model raises on the example inputs.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    >>> memory(model, torch.ones(4, 8))["total"].data["bytes"]
    256
    """
    found = kept.kept_for_backward(model, example_inputs)
    by_child: dict[str, int] = {}
    for entry in found:
        child = entry.where.partition(".")[0] or "(the model itself)"
        by_child[child] = by_child.get(child, 0) + entry.bytes
    total = sum(entry.bytes for entry in found)
    lines = [Line("total", "note", f"{total:,} bytes in {len(found)} tensors", {"bytes": total, "tensors": len(found)})]
    lines += [Line(name, "note", f"{count:,} bytes", {"bytes": count}) for name, count in by_child.items()]
    return Report(f"kept for backward by {type(model).__name__}", tuple(lines))
