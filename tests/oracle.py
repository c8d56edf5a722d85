"""The slow truth: every activation in mpmath, written without a look at the catalog, and PyTorch's own ops by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import torch
from torch import Tensor
from torch.nn import functional as F

mp.mp.dps = 50


class Dual:
    """A number and its derivative, carried through a formula without a difference quotient; nested for more orders."""

    def __init__(self, value, slope):
        self.value, self.slope = value, slope

    def __add__(self, other):
        value, slope = split(other)
        return Dual(self.value + value, self.slope + slope)

    def __mul__(self, other):
        value, slope = split(other)
        return Dual(self.value * value, self.slope * value + self.value * slope)

    def __truediv__(self, other):
        value, slope = split(other)
        return Dual(self.value / value, (self.slope - self.value / value * slope) / value)

    def __rtruediv__(self, other):
        return Dual(other, mp.mpf(0)) / self

    def __pow__(self, power):
        if power == 0:
            return Dual(mp.mpf(1), mp.mpf(0))
        return Dual(self.value**power, power * self.value ** (power - 1) * self.slope)

    def __neg__(self):
        return Dual(-self.value, -self.slope)

    def __sub__(self, other):
        return self + -other

    def __rsub__(self, other):
        return -self + other

    def __abs__(self):
        return -self if self.value < 0 else self

    def __lt__(self, other):
        return self.value < split(other)[0]

    def __gt__(self, other):
        return self.value > split(other)[0]

    __radd__, __rmul__ = __add__, __mul__


def split(x):
    return (x.value, x.slope) if isinstance(x, Dual) else (x, 0)


def lift(function, derivative):
    """A function of mpmath for Duals too, from its derivative, a function of the input and the value."""

    def lifted(x):
        if not isinstance(x, Dual):
            return function(x)
        value = lifted(x.value)
        return Dual(value, derivative(x.value, value) * x.slope)

    return lifted


def power(x):
    """exp(x), with a limit far outside of every float, since the digits of larger powers take their time."""
    return mp.exp(x) if abs(x) < 1e6 else mp.ldexp(1, 10**7 if x > 0 else -(10**7))


exp = lift(power, lambda x, y: y)
expm1 = lift(mp.expm1, lambda x, y: exp(x))
log1p = lift(mp.log1p, lambda x, y: 1 / (1 + x))
cosh = lift(mp.cosh, lambda x, y: (exp(x) - exp(-x)) / 2)
tanh = lift(mp.tanh, lambda x, y: 1 / cosh(x) ** 2)
cos = lift(mp.cos, lambda x, y: -sin(x))
sin = lift(mp.sin, lambda x, y: cos(x))
erfc = lift(
    lambda x: mp.erfc(x) if abs(x) < 1e6 else mp.mpf(2 * (x < 0)), lambda x, y: -2 / mp.sqrt(mp.pi) * exp(-x * x)
)
sqrt = lift(mp.sqrt, lambda x, y: 1 / (2 * y))


def sigma(x):
    return 1 / (1 + exp(-x))


def normal(x):
    return erfc(-x / mp.sqrt(2)) / 2


def softplus(x, beta=1.0, threshold=mp.inf):
    return x if beta * x > threshold else (max(beta * x, mp.mpf(0)) + log1p(exp(-abs(beta * x)))) / beta


TRUTH: dict[str, Callable[..., Any]] = {
    "relu": lambda x: max(x, mp.mpf(0)),
    "relu6": lambda x: min(max(x, mp.mpf(0)), mp.mpf(6)),
    "hardtanh": lambda x, min_val, max_val: min(max(x, mp.mpf(min_val)), mp.mpf(max_val)),
    "leaky_relu": lambda x, negative_slope: x if x > 0 else negative_slope * x,
    "prelu": lambda x, weight: x if x > 0 else weight * x,
    "rrelu": lambda x, lower, upper, training: x if x > 0 else (mp.mpf(lower) + mp.mpf(upper)) / 2 * x,
    "threshold": lambda x, threshold, value: x if x > threshold else mp.mpf(value),
    "elu": lambda x, alpha: x if x > 0 else alpha * expm1(x),
    "celu": lambda x, alpha: x if x > 0 else alpha * expm1(x / mp.mpf(alpha)),
    "selu": lambda x: (
        mp.mpf("1.0507009873554804934193349852946")
        * (x if x > 0 else mp.mpf("1.6732632423543772848170429916717") * expm1(x))
    ),
    "gelu": lambda x: x * normal(x),
    "gelu_tanh": lambda x: x * sigma(2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf(0.044715) * x**3)),
    "quick_gelu": lambda x: x * sigma(mp.mpf(1.702) * x),
    "clipped_gelu": lambda x, min, max: sorted((mp.mpf(min), x * normal(x), mp.mpf(max)))[1],
    "silu": lambda x: x * sigma(x),
    "swish_beta": lambda x, beta: x * sigma(beta * x),
    "mish": lambda x: x * tanh(softplus(x)),
    "hardswish": lambda x: x * min(max(x + 3, mp.mpf(0)), mp.mpf(6)) / 6,
    "hardsigmoid": lambda x: min(max(x + 3, mp.mpf(0)), mp.mpf(6)) / 6,
    "hard_mish": lambda x: x / 2 * min(max(x + 2, mp.mpf(0)), mp.mpf(2)),
    "sigmoid": sigma,
    "tanh": tanh,
    "softplus": softplus,
    "logsigmoid": lambda x: -softplus(-x),
    "softsign": lambda x: x / (1 + abs(x)),
    "tanhshrink": lambda x: x - tanh(x),
    "softshrink": lambda x, lambd: x - lambd if x > lambd else x + lambd if x < -lambd else mp.mpf(0),
    "hardshrink": lambda x, lambd: x if abs(x) > lambd else mp.mpf(0),
    "square": lambda x: x * x,
    "squared_relu": lambda x: max(x, mp.mpf(0)) ** 2,
    "star_relu": lambda x, scale, bias: scale * max(x, mp.mpf(0)) ** 2 + bias,
    "snake": lambda x, alpha: x + sin(alpha * x) ** 2 / alpha,
    "sine": lambda x, omega: sin(omega * x),
    "identity": lambda x: x,
    "laplace": lambda x, mu, sigma: normal((x - mp.mpf(mu)) / mp.mpf(sigma)),
    "sqrtsoftplus": lambda x: sqrt(softplus(x)),
    "xielu": lambda x, alpha_p, alpha_n, beta, eps: (
        beta * x
        + (softplus(alpha_p) * x * x if x > 0 else (beta + softplus(alpha_n)) * (expm1(min(x, mp.mpf(eps))) - x))
    ),
    "guided_relu": lambda x: max(x, mp.mpf(0)),
    "deconv_relu": lambda x: max(x, mp.mpf(0)),
}


def converged(compute: Callable[[], Any], order: int = 1) -> list[Any]:
    """The numbers that `compute` gives, with digits doubled until 25 of them stay: no cancellation is left.

    A zero may be a cancellation, unless it is the integer, which constants have; it is asked for with every digit.
    """
    before: list[Any] = []
    for digits in (50, 100, 200, 400):
        with mp.workdps(digits):
            numbers = parts(compute(), order)
            pairs = zip(numbers, before, strict=bool(before))
            same = [abs(now - then) <= abs(now) * mp.mpf("1e-25") for now, then in pairs]
            if same and all(same) and all(number or type(number) is int for number in numbers):
                break
            before = numbers
    return numbers


def parts(x: Any, order: int) -> list[Any]:
    """A nested Dual's numbers: the value, the derivative, and so on up to an order."""
    if order == 0:
        return [x]
    value, slope = split(x)
    return [*parts(value, order - 1), parts(slope, order - 1)[-1]]


def exact(name: str, x: float, params: dict[str, Any], order: int = 1) -> list[float]:
    """The activation at one point and its derivatives up to an order, rounded once; the point is not a kink."""
    point: Any = mp.mpf(x)
    for _ in range(order):
        point = Dual(point, mp.mpf(1))
    return [rounded(number) for number in converged(lambda: TRUTH[name](point, **params), order)]


def rounded(number: Any) -> float:
    """A number of mpmath in float64; its exponent may be of any size."""
    number = mp.mpf(number)
    magnitude = mp.mag(number)
    return float(number) if -1100 < magnitude < 1100 else float(mp.sign(number)) * (math.inf if magnitude > 0 else 0.0)


def truth(name: str, points: Tensor, params: dict[str, Any], order: int = 0) -> Tensor:
    """The activation, or its derivative of this order, at float64 points away from its kinks; rounded once."""
    values = [exact(name, x, params, order)[order] for x in points.double().tolist()]
    return torch.tensor(values, dtype=torch.float64)


def gradient(name: str, parameter: str, points: Tensor, params: dict[str, Any]) -> Tensor:
    """The partial derivative with respect to one parameter, at float64 points."""
    values = []
    for x in map(mp.mpf, points.double().tolist()):
        moved = {**params, parameter: Dual(mp.mpf(params[parameter]), mp.mpf(1))}
        numbers = converged(lambda x=x, moved=moved: TRUTH[name](x, **moved))
        values.append(rounded(numbers[1]))
    return torch.tensor(values, dtype=torch.float64)


def _prelu(x, weight):
    return F.prelu(x, weight if isinstance(weight, Tensor) else torch.full((1,), weight, dtype=x.dtype))


# name -> the call a PyTorch user would write; `True` asks for in place
NATIVE: dict[str, Callable[..., Tensor]] = {
    "relu": lambda x, inplace: F.relu(x, inplace=inplace),
    "relu6": lambda x, inplace: F.relu6(x, inplace=inplace),
    "hardtanh": lambda x, inplace, min_val, max_val: F.hardtanh(x, min_val, max_val, inplace=inplace),
    "leaky_relu": lambda x, inplace, negative_slope: F.leaky_relu(x, negative_slope, inplace=inplace),
    "prelu": lambda x, inplace, weight: _prelu(x, weight),
    "rrelu": lambda x, inplace, lower, upper, training: F.rrelu(x, lower, upper, training, inplace=inplace),
    "threshold": lambda x, inplace, threshold, value: F.threshold(x, threshold, value, inplace=inplace),
    "elu": lambda x, inplace, alpha: F.elu(x, alpha, inplace=inplace),
    "celu": lambda x, inplace, alpha: F.celu(x, alpha, inplace=inplace),
    "selu": lambda x, inplace: F.selu(x, inplace=inplace),
    "gelu": lambda x, inplace: torch._C._nn.gelu_(x) if inplace else F.gelu(x),
    "gelu_tanh": lambda x, inplace: (torch._C._nn.gelu_ if inplace else F.gelu)(x, approximate="tanh"),
    "silu": lambda x, inplace: F.silu(x, inplace=inplace),
    "mish": lambda x, inplace: F.mish(x, inplace=inplace),
    "hardswish": lambda x, inplace: F.hardswish(x, inplace=inplace),
    "hardsigmoid": lambda x, inplace: F.hardsigmoid(x, inplace=inplace),
    "sigmoid": lambda x, inplace: x.sigmoid_() if inplace else torch.sigmoid(x),
    "tanh": lambda x, inplace: x.tanh_() if inplace else torch.tanh(x),
    "softplus": lambda x, inplace, beta, threshold: F.softplus(x, beta, threshold),
    "logsigmoid": lambda x, inplace: F.logsigmoid(x),
    "softsign": lambda x, inplace: F.softsign(x),
    "tanhshrink": lambda x, inplace: F.tanhshrink(x),
    "softshrink": lambda x, inplace, lambd: F.softshrink(x, lambd),
    "hardshrink": lambda x, inplace, lambd: F.hardshrink(x, lambd),
    "square": lambda x, inplace: x.square_() if inplace else torch.square(x),
    "identity": lambda x, inplace: x,
}

# parameters that are not the defaults, to be tried as well
AWKWARD: dict[str, list[dict[str, Any]]] = {
    "hardtanh": [{"min_val": -0.3, "max_val": 2.7}, {"min_val": 0.0, "max_val": 6.0}, {"min_val": 1.0, "max_val": 1.0}],
    "leaky_relu": [{"negative_slope": 0.0}, {"negative_slope": 0.3}, {"negative_slope": -0.5}],
    "rrelu": [{"training": True}, {"lower": 0.2, "upper": 0.2, "training": True}, {"lower": -0.3, "upper": 0.1}],
    "threshold": [{"threshold": 0.1, "value": 20.0}, {"threshold": -1.0, "value": -1.0}],
    "elu": [{"alpha": 0.1}, {"alpha": 3.0}, {"alpha": 0.0}],
    "celu": [{"alpha": 0.5}, {"alpha": 0.3}],
    "softplus": [{"beta": 0.1}, {"beta": 10.0}, {"beta": 1.0, "threshold": 0.2}, {"beta": 10.0, "threshold": 0.2}],
    "softshrink": [{"lambd": 0.0}, {"lambd": 0.3}, {"lambd": 2.0}],
    "hardshrink": [{"lambd": 0.0}, {"lambd": 0.3}, {"lambd": 2.0}],
    "prelu": [{"weight": 0.0}, {"weight": -0.5}],
    "swish_beta": [{"beta": 0.1}, {"beta": 4.0}, {"beta": -1.0}],
    "snake": [{"alpha": 0.2}, {"alpha": 5.0}],
    "star_relu": [{"scale": 0.8944, "bias": -0.4472}],
    "sine": [{"omega": 30.0}],
    "laplace": [{"mu": 0.0, "sigma": 2.0}],
    "clipped_gelu": [{"min": -0.1, "max": 1.0}],
    "xielu": [{"alpha_p": 1.0, "alpha_n": -1.0, "beta": 0.1, "eps": -0.5}],
}
