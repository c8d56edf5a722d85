"""An activation's values and derivative against its reference: on a grid, at kinks and at the special numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actswap import autograd
from actswap.activation import Activation
from actswap.comparing import Comparison, compare, every, grid, reference, run, step
from actswap.report import Line
from actswap.subjects import SURROGATE, Subject

SIDES = (-2, 0, 2)
"""Steps from a kink: below it, the kink itself, above it. Two, so that rounding `beta * x` does not cross it."""


def points(it: Subject, dtype: torch.dtype, device: Any, exhaustive: bool = False, count: int = 401) -> Tensor:
    """Where values and derivative are compared; the kinks themselves are not among them."""
    kinks = it.truth.kinks(it.params) if it.truth is not None else ()
    if not exhaustive:
        return grid(kinks, dtype, device, count)
    found = every(dtype)
    for kink in kinks:
        found = found[found != kink]
    return found.to(device)


def apart(it: Subject, x: Tensor) -> Tensor:
    """Without the points so near a kink that a saved output cannot tell its side, where that is what is saved."""
    state = it.state
    if state is None or state.bound == 0.0:
        return x
    truth, params = it.known()
    near = [(x.double() - kink).abs() <= 1e-7 * max(1.0, abs(kink)) for kink in truth.kinks(params)]
    return x[~torch.stack(near).any(0)] if near else x


def pytorch(truth: Activation, params: Mapping[str, Any], x: Tensor, inplace: bool = False) -> tuple[Tensor, Tensor]:
    """What PyTorch's own operations and autograd give, in the dtype of `x`."""
    values = {name: v.to(x) if isinstance(v, Tensor) else v for name, v in params.items()}
    return run(lambda point: autograd.plain(truth, point, values, inplace), x)


def natives(truth: Activation, params: Mapping[str, Any], x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Where PyTorch has the op, what it gives, in its in-place form too where that saves something else."""
    if not truth.native:
        return []
    found = [pytorch(truth, params, x)]
    if truth.save_ is not None and autograd.state_for(truth, params, inplace=True) == truth.save_:
        found.append(pytorch(truth, params, x, inplace=True))
    return found


def compare_values(it: Subject, x: Tensor, y: Tensor) -> Comparison:
    """The values `y` at `x` against the reference's."""
    truth, params = it.known()
    want, slope, _ = reference(truth, x, params)
    return compare(x, y, want, *[value for value, _ in natives(truth, params, x)], slope=slope)


def compare_derivative(it: Subject, x: Tensor, slope: Tensor) -> Comparison:
    """The derivative `slope` at `x` against the reference's."""
    truth, params = it.known()
    _, want, bend = reference(truth, x, params)
    return compare(x, slope, want, *[there for _, there in natives(truth, params, x)], slope=bend)


def values(it: Subject, name: str, dtype: torch.dtype, device: Any, exhaustive: bool) -> Line:
    """The values on a grid."""
    x = points(it, dtype, device, exhaustive)
    with torch.no_grad():
        y = it.call(x.clone())
    if not isinstance(y, Tensor):
        return Line(name, "fail", f"it returned {type(y).__name__}, and no tensor")
    if y.dtype != dtype or y.shape != x.shape:
        return Line(name, "fail", f"{tuple(x.shape)} {dtype} became {tuple(y.shape)} {y.dtype}")
    if it.truth is None:
        return Line(name, "note", "nothing to compare with: say what it should be with like=")
    return compare_values(it, x, y).line(name)


def derivative(it: Subject, name: str, dtype: torch.dtype, device: Any, exhaustive: bool) -> Line:
    """The derivative on a grid."""
    if it.surrogate:
        return Line(name, "note", SURROGATE)
    x = apart(it, points(it, dtype, device, exhaustive))
    return compare_derivative(it, x, run(it.call, x)[1]).line(name)


def kinks(it: Subject, name: str, dtype: torch.dtype, device: Any) -> Line:
    """PyTorch's value and derivative where the derivative jumps, and beside it; a saved output may be on either side.

    Beside a kink the reference's are right as well: PyTorch's softplus is a straight line from its threshold on.
    """
    truth, params = it.known()
    found = [kink for kink in truth.kinks(params) if math.isfinite(kink)]
    if not found or it.surrogate:
        return Line(name, "note", SURROGATE if it.surrogate else "none")
    at = torch.tensor(found, dtype=dtype)
    x = torch.stack([step(at, count) if count else at for count in SIDES]).to(device)
    (y, slope), (want, right), ideal = run(it.call, x), pytorch(truth, params, x), reference(truth, x, params)
    unsure = it.state is not None and it.state.bound != 0.0
    for row in (1, 0, 2):  # the kink first: it is what people get wrong
        for what, got, theirs, best in (("value", y, want, ideal[0]), ("derivative", slope, right, ideal[1])):
            allowed = [theirs[row], *([best[row]] if row != 1 else [])]
            allowed += list(right) if unsure and what == "derivative" else []
            wrong = [worst for i in range(len(found)) if not (worst := _nearest(x, got, allowed, row, i)).passed]
            if wrong:
                each = [f"at x = {w.x:.9g}: {w.got!r}, PyTorch's is {w.want!r}" for w in wrong]
                data = max(wrong, key=_excess).line(name).data
                return Line(name, "fail", f"{what} {'; '.join(each)}; bound {wrong[0].bound:.2g}", data)
    columns = zip(found, slope.T.tolist(), strict=True)
    sides = ", ".join(f"{kink:g} ({' | '.join(f'{s:.4g}' for s in around)})" for kink, around in columns)
    return Line(name, "pass", f"derivative below | at | above as PyTorch's: {sides}")


def _nearest(x: Tensor, got: Tensor, allowed: list[Tensor], row: int, i: int) -> Comparison:
    """The number at one place compared with the nearest of those allowed there."""
    place = slice(i, i + 1)
    return min((compare(x[row, place], got[row, place], each[place]) for each in allowed), key=_excess)


def _excess(worst: Comparison) -> float:
    return worst.error / worst.bound


def specials(it: Subject, name: str, dtype: torch.dtype, device: Any) -> Line:
    """At NaN, infinities, great and tiny numbers and -0.0: PyTorch's numbers; NaN stays NaN."""
    truth, params = it.known()
    info = torch.finfo(dtype)
    great = info.max / 4  # a formula may multiply by a small constant
    numbers = [math.nan, math.inf, -math.inf, -0.0, great, -great, info.tiny, -info.tiny]
    x = torch.tensor(numbers, dtype=dtype, device=device)
    (y, slope), (want, right), ideal = run(it.call, x), pytorch(truth, params, x), reference(truth, x, params)
    for what, got, expected, best in (("value", y, want, ideal[0]), ("derivative", slope, right, ideal[1])):
        if what == "derivative" and it.surrogate:
            continue
        for point, a, b, c in zip(x.tolist(), got.tolist(), expected.tolist(), best.tolist(), strict=True):
            close = a == b or min(abs(a - b), abs(a - c)) <= 4 * info.eps * max(1.0, abs(b))
            lost = math.isnan(point) and math.isnan(b) and not math.isnan(a)
            if lost or not (close or math.isnan(b)):
                data = {"x": str(point), "got": str(a), "want": str(b)}
                return Line(name, "fail", f"{what} at x = {point:g}: {a:g}, PyTorch's is {b:g}", data)
    return Line(name, "pass", f"as PyTorch, also at -0.0, {great:.2g} and {info.tiny:.2g}; NaN stays NaN")
