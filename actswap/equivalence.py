"""validate: whether two models compute the same."""

from __future__ import annotations

import torch
from torch import nn

from actswap.report import Line, Report
from actswap.running import Inputs
from actswap.values import RUNS, Values, distance, run


def validate(
    before: nn.Module,
    after: nn.Module,
    example_inputs: Inputs,
    *,
    backward: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> Report:
    """Compare two models: outputs, and the gradients of parameters and inputs, as they are and in both modes.

    Args:
        before, after: the models; neither is changed.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        backward: whether gradients are compared.
        rtol, atol: tolerances; by default those of `torch.testing.assert_close` for the dtype.

    Returns:
        One line per mode; `bool(report)` is whether all agree.

    Raises:
        Exception: whatever a model raises on the example inputs as it is.

    >>> import copy, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    >>> bool(validate(model, copy.deepcopy(model), torch.ones(2, 3)))
    True
    """
    lines = []
    for name, training, gradients in RUNS:
        problems = []
        a, b = (_attempt(model, example_inputs, training, gradients and backward) for model in (before, after))
        if a.problem != b.problem:
            problems.append(f"before: {a.problem or 'it ran'}; after: {b.problem or 'it ran'}")
        left, right = a.named(), b.named()
        problems += [f"{key}: only on one side" for key in sorted(left.keys() ^ right.keys())]
        for key in sorted(left.keys() & right.keys()):
            try:
                torch.testing.assert_close(right[key], left[key], rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError as error:
                problems.append(f"{key}: {error}")
        worst = max(
            (distance(left[k], right[k]) for k in left.keys() & right.keys() if left[k].shape == right[k].shape),
            default=0.0,
        )
        detail = "\n".join(problems[:4]) if problems else f"{len(left)} tensors agree, at most {worst:.3g} apart"
        lines.append(Line(name, "fail" if problems else "pass", detail, {"largest difference": worst}))
    return Report("two models", tuple(lines))


def _attempt(model: nn.Module, example_inputs: Inputs, training: bool | None, gradients: bool) -> Values:
    if training is None:
        return run(model, example_inputs, training, gradients)
    try:
        return run(model, example_inputs, training, gradients)
    except Exception as error:  # a model that does not run in a mode is a fact about it; the two must agree on it
        return Values(problem=f"raises {str(error).splitlines()[0]}")
