"""Activations that multiply the input by a gate. Formulas only; `catalog` makes the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actswap.activation import HALF, Activation, Parameter, State, own
from actswap.piecewise import aten, unless
from actswap.smooth import PHI
from actswap.stable import expit, logistic, tails

SILU_LOW, GELU_LOW = -0.27846454276107380, -0.16997120747990369


erfc: Callable[[Tensor], Tensor] = torch.special.erfc


def swish_slope(x: Tensor, beta: Any) -> Tensor:
    """The derivative of x sigmoid(beta x)."""
    z = (beta * x).clamp(-800, 800)  # it is 0 or 1 beyond, and infinity times 0 is neither
    slope: Tensor = expit(z) * (1 + z * torch.sigmoid(-z))
    return slope


def swish_bend(x: Tensor, beta: Any) -> Tensor:
    """The second derivative of x sigmoid(beta x), which is silu(beta x) / beta."""
    bend: Tensor = silu_bend(beta * x) * beta
    return bend


def silu_bend(x: Tensor) -> Tensor:
    """The second derivative of silu, s c (2 + x (c - s)) with s = sigmoid(x), c = 1 - s; 0 beyond ±1000."""
    x = x.clamp(-1000, 1000)
    s, c = torch.sigmoid(x), torch.sigmoid(-x)
    return s * c * (x * (c - s) + 2)


silu = Activation(
    name="silu", aliases=("swish",), formula="x sigmoid(x)", slope="s + x s (1 - s); s = sigmoid(x)", native=True,
    source="ATen, silu_backward; Elfwing et al. 2017, arXiv:1702.03118",
    forward=F.silu, forward_=lambda x: F.silu(x, inplace=True),
    states={
        "input": State(
            derivative=lambda x: swish_slope(x, 1.0),
            second=lambda x: silu_bend(x),
            kernel=lambda g, x: aten.silu_backward.default(g, x),
        ),
    }, low=lambda p: SILU_LOW, monotonic=False,
    reference=lambda x: x * logistic(x),
)  # fmt: skip

quick_gelu = Activation(
    name="quick_gelu", formula="x sigmoid(1.702 x)",
    slope="s + 1.702 x s (1 - s); s = sigmoid(1.702 x)", source="Hendrycks and Gimpel 2016, arXiv:1606.08415",
    forward=own(lambda x: x * torch.sigmoid(1.702 * x), half=lambda x: x * expit(1.702 * x)),
    states={
        "input": State(
            derivative=lambda x: swish_slope(x, 1.702),
            second=lambda x: swish_bend(x, 1.702),
            kernel=lambda g, x: quick_gelu_backward(g, x),
        ),
    },
    low=lambda p: SILU_LOW / 1.702, monotonic=False,
    reference=lambda x: x * logistic(1.702 * x),
)  # fmt: skip


def quick_gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    """As x sigmoid(c x) is silu(c x) / c, its derivative is silu'(c x), for which ATen has one kernel."""
    if x.dtype in HALF:
        return (g.float() * swish_slope(x.float(), 1.702)).to(x.dtype)  # bfloat16 reaches where ATen's sigmoid is 0
    result: Tensor = aten.silu_backward.default(g, (1.702 * x).clamp(-800, 800))  # at infinity it gives NaN
    return result


mish = Activation(
    name="mish", formula="x tanh(log(1 + exp(x)))",
    slope="t + x (1 - t^2) sigmoid(x); t = tanh(log(1 + exp(x)))", native=True,
    source="ATen, mish_backward; Misra 2019, arXiv:1908.08681",
    forward=F.mish, forward_=lambda x: F.mish(x, inplace=True),
    states={
        "input": State.joint(
            lambda x: mish_slopes(x),
            kernel=lambda g, x: aten.mish_backward.default(g, x),
            batched=False,
        ),
    }, low=lambda p: -0.30884341199490380, monotonic=False,
    reference=lambda x: x * torch.tanh(torch.logaddexp(x, torch.zeros_like(x))),
)  # fmt: skip


def mish_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivative of mish, t + x p and p (2 + x (1 - s - 2 t s)), from one exponential e = exp(x).

    t = tanh(softplus(x)) is n / (n + 2) with n = e (e + 2), s = e / (e + 1) is the sigmoid, and p = s (1 - t^2) is
    4 e (e + 1) / (n + 2)^2, without a difference. Above 40, t and s are 1 in float64 too, and n is finite in float32;
    exp(-1000) is 0.
    """
    x = x.clamp(-1000, 40)
    e = torch.exp(x)
    n, c = e * (e + 2), 1 / (e + 1)
    d = 1 / (n + 2)
    t, p = n * d, e * (e + 1) * d * d * 4
    return t + x * p, p * (x * c * (1 - 2 * t * e) + 2)


gelu = Activation(
    name="gelu", aliases=("gelu_python",), formula="x (1 + erf(x / sqrt(2))) / 2",
    slope="(1 + erf(x / sqrt(2))) / 2 + x exp(-x^2 / 2) / sqrt(2 pi)", native=True,
    source="ATen, gelu_backward; Hendrycks and Gimpel 2016, arXiv:1606.08415",
    forward=F.gelu, forward_=lambda x: aten.gelu_.default(x),
    states={
        "input": State(
            derivative=lambda x: gelu_slope(x),
            second=lambda x: gelu_bend(x),
            kernel=lambda g, x: aten.gelu_backward.default(g, x),
        ),
    }, low=lambda p: GELU_LOW, monotonic=False,
    reference=lambda x: 0.5 * x * erfc(-x / math.sqrt(2)),
)  # fmt: skip


def gelu_slope(x: Tensor) -> Tensor:
    """The derivative of gelu: the normal distribution plus x times its density."""
    x = tails(x)
    return 0.5 * erfc(x * -math.sqrt(0.5)) + x * PHI * torch.exp(-0.5 * x**2)


def gelu_bend(x: Tensor) -> Tensor:
    """The second derivative of gelu."""
    square = torch.square(tails(x))
    return torch.exp(square * -0.5) * (2 * PHI - PHI * square)


gelu_tanh = Activation(
    name="gelu_tanh", formula="x (1 + tanh(u)) / 2; u = sqrt(2 / pi) (x + 0.044715 x^3)",
    slope="(1 + t) / 2 + x (1 - t^2) sqrt(2 / pi) (1 + 0.134145 x^2) / 2; t = tanh(u)", native=True,
    aliases=("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
    source="ATen, gelu_backward with approximate='tanh'",
    forward=lambda x: F.gelu(x, approximate="tanh"), forward_=lambda x: aten.gelu_.default(x, approximate="tanh"),
    states={
        "input": State.joint(
            lambda x: gelu_tanh_slopes(x),
            kernel=lambda g, x: aten.gelu_backward.default(g, x, approximate="tanh"),
        ),
    }, low=lambda p: -0.17004075057125412, monotonic=False,
    reference=lambda x: x * logistic(2 * math.sqrt(2 / math.pi) * (tails(x) + 0.044715 * tails(x) ** 3)),
)  # fmt: skip


def gelu_tanh_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivative of gelu_tanh, which is x sigmoid(u(x)), with s = sigmoid(u) and c = 1 - s."""
    x, k, a = tails(x), math.sqrt(8 / math.pi), 0.044715
    square = x * x
    u, u1, u2 = k * x * (1 + a * square), k * (1 + 3 * a * square), 6 * k * a * x
    s, c = torch.sigmoid(u), torch.sigmoid(-u)
    return s + x * s * c * u1, s * c * (2 * u1 + x * (u2 + (c - s) * u1 * u1))


def exact_gelu(x: Tensor) -> Tensor:
    """The gelu by erfc, which keeps the digits of the left tail that ATen's 1 + erf cancels."""
    return 0.5 * x * erfc(x * -math.sqrt(0.5))


def inside(x: Tensor, low: float, high: float) -> Tensor:
    """1 where gelu is between the bounds."""
    return unless((exact_gelu(x) <= low) | (exact_gelu(x) >= high), x)


def gelu_crossings(p: Any) -> tuple[float, ...]:
    """Where gelu meets clipped_gelu's bounds: one point at or above 0, up to two below, found by bisection."""

    def height(x: float) -> float:
        return 0.5 * x * math.erfc(-x / math.sqrt(2))

    bottom, points = -0.7517915246935645, []
    for bound in (p["min"], p["max"]):
        for left, right in ((-40.0, bottom), (bottom, max(40.0, 2 * bound))):
            if not math.isfinite(bound) or (height(left) - bound) * (height(right) - bound) > 0:
                continue
            for _ in range(80):
                middle = (left + right) / 2
                same = (height(middle) - bound) * (height(left) - bound) > 0
                left, right = (middle, right) if same else (left, middle)
            points.append(right)
    return tuple(sorted(points))


clipped_gelu = Activation(
    name="clipped_gelu", aliases=("gelu_10",), formula="min(max(gelu(x), min), max)",
    slope="gelu'(x) if min < gelu(x) < max else 0",
    source="Zafrir et al. 2020, arXiv:2004.09602",
    parameters=(Parameter("min", -10.0), Parameter("max", 10.0)),
    requires=(lambda p: p["min"] <= p["max"], "min must not be greater than max"),
    forward=own(lambda x, min, max: F.hardtanh(exact_gelu(x), min, max)),
    states={
        "input": State(
            derivative=lambda x, min, max: inside(x, min, max) * gelu_slope(x),
            second=lambda x, min, max: inside(x, min, max) * gelu_bend(x),
        ),
    },
    kinks=gelu_crossings, monotonic=False,
    low=lambda p: max(p["min"], GELU_LOW), high=lambda p: p["max"],
    reference=lambda x, min, max: (x * torch.exp(torch.special.log_ndtr(tails(x)))).clamp(min, max),
)  # fmt: skip

GATED = (silu, quick_gelu, mish, gelu, gelu_tanh, clipped_gelu)
