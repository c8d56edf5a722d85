"""Points to compare at and errors in ulp: the measuring tools of `check`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actswap.activation import Activation, Formula
from actswap.report import Line

INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def grid(kinks: Iterable[float], dtype: torch.dtype, device: Any = "cpu", count: int = 401) -> Tensor:
    """Finite points of `dtype`, without repeats: even, by magnitude, and two steps either side of every kink."""
    even = torch.linspace(-12.0, 12.0, count, dtype=torch.float64)
    sizes = torch.logspace(-6, 2, count // 4, dtype=torch.float64)
    edges = torch.tensor([0.0, 20.0, 88.0, 89.0, 103.0, 104.5], dtype=torch.float64)
    points = torch.cat([even, sizes, -sizes, edges, -edges]).to(dtype)
    around = [step(torch.tensor([kink], dtype=dtype), n) for kink in kinks for n in (-2, 2) if math.isfinite(kink)]
    apart = torch.cat([points, *around])
    for kink in kinks:  # the point itself has a line of its own
        apart = apart[apart != kink]
    unique: Tensor = torch.unique(apart[apart.isfinite()])
    return unique.to(device)


def every(dtype: torch.dtype) -> Tensor:
    """Every finite half precision number; for wider types one for each upper half of the bits."""
    size = dtype.itemsize
    if size == 8:
        return every(torch.float32).double()
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int64) << (8 * (size - 2))
    points = bits.to(INTEGER[size]).view(dtype)
    return points[points.isfinite()].sort().values


def step(x: Tensor, count: int) -> Tensor:
    """The floating point number `count` steps above `x`, or below."""
    toward = torch.full_like(x, math.copysign(math.inf, count))
    for _ in range(abs(count)):
        x = torch.nextafter(x, toward) if x.dtype.itemsize > 2 else _half_step(x, count > 0)
    return x


def _half_step(x: Tensor, up: bool) -> Tensor:
    bits = x.view(torch.int16)
    away = torch.where(x == 0, torch.tensor(1, dtype=torch.int16), bits + torch.where((x > 0) == up, 1, -1).short())
    away = torch.where((x == 0) & (not up), torch.tensor(-(2**15) + 1, dtype=torch.int16), away)
    return away.view(x.dtype)


def ulp(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype`'s numbers at each float64 truth, as float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(truth.abs().clamp(min=info.tiny, max=info.max))
    return torch.ldexp(torch.full_like(truth, info.eps / 2), exponent)


@dataclass(frozen=True)
class Comparison:
    """The worst of a comparison: where, both values, the error and what was allowed."""

    points: int
    x: float = math.nan
    got: float = math.nan
    want: float = math.nan
    error: float = 0.0
    ulps: float = 0.0
    eps: float = 0.0
    bound: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the worst error is within its bound."""
        return self.error <= self.bound

    @property
    def said(self) -> str:
        """The worst in words."""
        if not self.error:
            return f"no error at {self.points} points" if self.points else "no points"
        fine = self.error < 1e-9 * abs(self.want)  # all digits, to see the difference
        x, got, want = (repr(v) if fine else f"{v:.9g}" for v in (self.x, self.got, self.want))
        error = f"error {self.error:.2g} ({self.ulps:.3g} ulp), bound {self.bound:.2g}"
        return f"worst of {self.points} points at x = {x}: {got}, reference {want}; {error}"

    def line(self, name: str) -> Line:
        """This comparison as a line of a report."""
        data = {key: _json(value) for key, value in vars(self).items()}
        return Line(name, "pass" if self.passed else "fail", self.said, data)


def _json(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def compare(x: Tensor, got: Tensor, want: Tensor, *others: Tensor, slope: Tensor | None = None) -> Comparison:
    """`got`, in its own dtype, against the float64 truth `want` at the points `x`.

    Allowed are 4 ulp of the truth, or 2 eps of 1, of `x`, or of what moving `x` by its own size along the truth's
    `slope` makes; and, point by point, the error of `others`, which are PyTorch's own ops. A NaN, or an infinity where
    there is none, is an infinite error.
    """
    dtype = got.dtype
    x, got, want = (tensor.detach().double().cpu() for tensor in (x, got, want))
    if not len(x):
        return Comparison(0)
    info = torch.finfo(dtype)
    want = torch.where(want.abs() > info.max * (1 + info.eps / 4), torch.sign(want) * math.inf, want)
    error, spacing = _error(got, want), ulp(want, dtype)
    scale = x.abs().clamp(min=1)
    if slope is not None:
        scale = torch.maximum(scale, (x * slope).abs().nan_to_num(nan=0.0, posinf=0.0))
    bound = torch.maximum(4 * spacing, 2 * info.eps * scale)
    for other in others:
        bound = torch.maximum(bound, _error(other.detach().double().cpu(), want))
    error = torch.where(bound.isinf(), 0.0, error)  # where PyTorch has no number, none is asked for
    i = int((error / bound).argmax())
    return Comparison(
        len(x), x[i].item(), got[i].item(), want[i].item(), error[i].item(), (error / spacing)[i].item(),
        error[i].item() / info.eps, bound[i].item(),
    )  # fmt: skip


def _error(got: Tensor, want: Tensor) -> Tensor:
    error = torch.where((got == want) | (got.isnan() & want.isnan()), 0.0, (got - want).abs())
    return torch.where(error.isnan(), math.inf, error)


def reference(activation: Activation, x: Tensor, params: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's values, derivative and second derivative at `x`, in float64.

    Without a reference, the forward takes its place; so it does where the reference's derivative has no number although
    the point is one, which is 0 / 0 far out in a tail.
    """
    formula = activation.reference if activation.reference is not None else activation.forward
    y, slope, bend = _derivatives(formula, x, params)
    lost = x.detach().double().cpu().isfinite() & y.isfinite() & (slope.isnan() | bend.isnan())
    if formula is not activation.forward and lost.any():
        _, other, another = _derivatives(activation.forward, x, params)
        slope, bend = torch.where(slope.isnan() & lost, other, slope), torch.where(bend.isnan() & lost, another, bend)
    return y, slope, bend


def _derivatives(formula: Formula, x: Tensor, params: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    values = {
        name: value.detach().double().cpu() if isinstance(value, Tensor) else value for name, value in params.items()
    }
    point = x.detach().double().cpu().requires_grad_()
    with torch.enable_grad():
        y = formula(point, **values)
        (slope,) = torch.autograd.grad(y.sum(), point, create_graph=True)
        bend = torch.autograd.grad(slope.sum(), point)[0] if slope.requires_grad else torch.zeros_like(point)
    return y.detach(), slope.detach(), bend


def run(call: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output of `call` and the gradient of its input, which is given as a non-leaf so that it may work in place."""
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        y = call(leaf.view_as(leaf) * 1)
        (gradient,) = torch.autograd.grad(y, leaf, torch.ones_like(y) if upstream is None else upstream)
    return y.detach(), gradient


def coarse(activation: Activation) -> Line:
    """A definition on a coarse grid: elementwise, dtype kept, derivatives equal to finite differences."""
    params = activation.bind({})
    values = [params[name] for name in activation.names]
    x = torch.tensor([-7.3, -3.7, -2.2, -1.1, -0.63, -0.21, 0.17, 0.58, 1.3, 2.4, 3.1, 6.9], dtype=torch.float64)
    for kink in activation.kinks(params):
        x = x[(x - kink).abs() > 1e-3]

    def forward(point: Tensor) -> Tensor:
        return activation.forward(point, *values)

    with torch.no_grad():
        y = forward(x.clone())
        alone = [forward(point.reshape(1)) for point in x.clone()]
        single = forward(x.float())
        if y.shape != x.shape or y.dtype != x.dtype or single.dtype != torch.float32:
            return Line("the forward changes shape or dtype", "fail", f"{x.shape} {x.dtype} became {y.shape} {y.dtype}")
        if not torch.allclose(torch.cat(alone), y, rtol=1e-9, atol=1e-12, equal_nan=True):
            return Line("it is not elementwise", "fail", "an element's value depends on the other elements")
        if activation.surrogate:
            return Line("coarse", "pass", "surrogate")
        for key, state in activation.states.items():
            if state.forward is None and (state.allowed is None or state.allowed(params)):
                slope = partial(_positional, state.derivative, values)
                saved = forward if key == "output" else torch.clone

                def along(point: Tensor, slope: Any = slope, saved: Any = saved) -> Tensor:
                    return slope(saved(point))  # type: ignore[no-any-return]

                worst = _difference(x, forward, along(x), x)
                if worst is not None:
                    return Line(f"the derivative from the {key} is wrong", "fail", worst)
                inner = along(x) if key == "output" else 1.0
                worst = _difference(x, along, state.second(saved(x), *values) * inner, x)
                if worst is not None:
                    return Line(f"the second derivative from the {key} is wrong", "fail", worst)
        for name, partial_of in activation.gradients.items():
            index = activation.names.index(name)

            def moved(value: Tensor, index: int = index) -> Tensor:
                row = activation.forward(x[None], *values[:index], value, *values[index + 1 :])
                return row[0]  # every point is a channel with a value of its own

            worst = _difference(torch.full_like(x, float(values[index])), moved, partial_of(x, *values), x)
            if worst is not None:
                return Line(f"the gradient of {name} is wrong", "fail", worst)
    return Line("coarse", "pass", f"{len(x)} points")


def _positional(formula: Callable[..., Tensor], values: list[Any], point: Tensor) -> Tensor:
    return formula(point, *values)


def _difference(at: Tensor, function: Callable[[Tensor], Tensor], slope: Tensor, x: Tensor) -> str | None:
    """The worst point where `slope` is not `function`'s central difference, in words."""
    h = 1e-6
    want = (function(at + h) - function(at - h)) / (2 * h)
    error = (slope - want).abs() / (1 + want.abs())
    error = torch.where(error.isnan() & ~want.isnan(), math.inf, error)
    i = int(error.nan_to_num(nan=0.0, posinf=math.inf).argmax())
    if not error[i] > 1e-5:
        return None
    return (
        f"worst at x = {x[i].item():g}: {slope.expand_as(x)[i].item():.9g}, finite difference {want[i].item():.9g}; "
        "bound 1e-05"
    )
