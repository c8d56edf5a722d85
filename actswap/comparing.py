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


NEAR = (-7.3, -3.7, -2.2, -1.1, -0.63, -0.21, 0.17, 0.58, 1.3, 2.4, 3.1, 6.9)
FAR = (9.5, 14.0, 22.0, 47.0, 75.0, 130.0, 290.0)
SIDES = (-0.05, -0.004, 0.004, 0.05)


def coarse(activation: Activation) -> Line:
    """A definition on a coarse grid: elementwise, dtype kept, derivatives equal to finite differences.

    The grid has points far out and on both sides of every kink. The derivative is then computed in float32 and bfloat16
    too, where a formula may overflow, and at infinities and NaN, where autograd says what is expected.
    """
    params = activation.bind({})
    values = [params[name] for name in activation.names]
    kinks = [kink for kink in activation.kinks(params) if math.isfinite(kink)]
    points = [*NEAR, *FAR, *(-far for far in FAR), *(kink + side for kink in kinks for side in SIDES)]
    x = torch.tensor(sorted(points), dtype=torch.float64)
    for kink in kinks:
        x = x[(x - kink).abs() > 1e-3]

    def forward(point: Tensor) -> Tensor:
        return activation.forward(point, *values)

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        line = _tried(forward, x)
        if line is not None:
            return line
        if activation.surrogate:
            return Line("coarse", "pass", "surrogate")
        for key, state in activation.states.items():
            if state.forward is None and (state.allowed is None or state.allowed(params)):
                slope = partial(_positional, state.derivative, values)
                saved = forward if key == "output" else torch.clone

                def along(point: Tensor, slope: Any = slope, saved: Any = saved) -> Tensor:
                    return slope(saved(point))  # type: ignore[no-any-return]

                worst = _difference(x, forward, along(x), x)
                worst = worst or _narrow(along, x, torch.float32, 1e-3)
                worst = worst or _narrow(along, x[x.abs() < 9], torch.bfloat16, 0.1)
                worst = worst or _special(forward, along)
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


def _tried(forward: Callable[[Tensor], Tensor], x: Tensor) -> Line | None:
    """What is wrong with a forward as an elementwise function that leaves its input alone; None if nothing is."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for shape in ((-1,), (1, 1, -1), (-1, 1), ()):
            given = x.to(dtype).reshape(shape) if shape else x.to(dtype)[0]
            before, said = given.clone(), f"{tuple(given.shape)} {dtype}"
            try:
                y = forward(given)
            except NotImplementedError:
                if dtype.itemsize == 2:
                    break  # PyTorch has no kernel for it
                raise
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
                return Line("the forward fails", "fail", f"on {said}: {type(error).__name__}: {error}")
            if not isinstance(y, Tensor):
                return Line("the forward gives no tensor", "fail", f"{said} became {type(y).__name__}")
            if y.shape != before.shape or y.dtype != dtype:
                return Line("the forward changes shape or dtype", "fail", f"{said} became {tuple(y.shape)} {y.dtype}")
            if not torch.equal(given, before):
                said += ": write it out of place; inplace=True of the function and the module does the rest"
                return Line("the forward changes its input", "fail", said)
            if not torch.allclose(forward(before), y, rtol=0, atol=0, equal_nan=True):
                return Line("the forward is random", "fail", f"two calls with the same {said} differ")
            if given.dim() == 1 and dtype == torch.float64:
                alone = torch.cat([forward(point.reshape(1)) for point in before])
                if not torch.allclose(alone, y, rtol=1e-9, atol=1e-12, equal_nan=True):
                    return Line("it is not elementwise", "fail", "an element's value depends on the other elements")
    return None


def _narrow(slope: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype, bound: float) -> str | None:
    """The worst point where a derivative in this dtype is another than in float64, in words."""
    x = x.to(dtype)
    got, want = slope(x).double(), slope(x.double())
    error = torch.where(want.abs() < torch.finfo(dtype).max / 4, (got - want).abs(), 0.0)
    error = error.nan_to_num(nan=math.inf) / ((1 + want.abs()) * x.double().abs().clamp(min=1))
    i = int(error.argmax())
    if not error[i] > bound:
        return None
    return f"worst at x = {x[i].item():g} in {dtype}: {got[i].item():.9g}, in float64 {want[i].item():.9g}"


def _special(forward: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> str | None:
    """Where a derivative makes a number of NaN, or another one at an infinity than autograd of the forward, in words.

    NaN at an infinity passes: `c + 0 * x` gives it, and it hides nothing.
    """
    x = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        try:
            y = forward(leaf)
        except RuntimeError:  # code outside of PyTorch, which takes no tensor with a gradient
            return None
        if not y.requires_grad:
            return None
        (want,) = torch.autograd.grad(y.sum(), leaf)
    for point, got, expected in zip(x.tolist(), slope(x).tolist(), want.tolist(), strict=True):
        other = math.isinf(point) and math.isfinite(expected) and abs(got - expected) > 1e-5 * (1 + abs(expected))
        hidden = math.isnan(point) and math.isnan(expected) and not math.isnan(got)
        if other or hidden:
            return f"worst at x = {point:g}: {got:g}, autograd of the forward {expected:g}"
    return None


def _positional(formula: Callable[..., Tensor], values: list[Any], point: Tensor) -> Tensor:
    return formula(point, *values)


def _difference(at: Tensor, function: Callable[[Tensor], Tensor], slope: Tensor, x: Tensor) -> str | None:
    """The worst point where `slope` is not `function`'s central difference, in words."""
    h = 1e-6 * at.abs().clamp(min=1).sqrt()
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
