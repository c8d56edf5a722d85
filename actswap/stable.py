"""Functions that keep their digits where the usual way of writing them overflows or cancels; formulas are made of them.

`logistic`, `rise`, `hyperbolic` and `remainder` are for references, whose derivative comes from autograd and must keep
its digits too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def logistic(x: Tensor) -> Tensor:
    """The sigmoid from its logarithm, for references: no cancellation in either tail.

    Under -700 it is exp(x) and over 700 it is 1, since there autograd's second derivative of the logarithm is 0 / 0.
    """
    upper = torch.exp(-torch.logaddexp(torch.zeros_like(x), -x.clamp(-700, 700)))
    return torch.where(x < -700, torch.exp(x.clamp(max=-700)), upper)


def decay(x: Tensor, rate: float = 1.0) -> Tensor:
    """exp(rate x) on the negative side and 1 on the other, so that no unused branch overflows."""
    return torch.exp(rate * x.clamp(max=0))


def expit(z: Tensor) -> Tensor:
    """The sigmoid down to the smallest number: `torch.sigmoid` in float32 is 0 below -88.7, where exp(-z) overflows.

    Below -40, sigmoid(z) is sigmoid(z + 40) exp(-40); above, that is less.
    """
    return torch.maximum(torch.sigmoid(z), torch.sigmoid(z + 40) * math.exp(-40))


def phase(x: Tensor, rate: Any) -> Tensor:
    """The product rate x, for finite x at most the largest number, since the sine of infinity is not a number.

    The derivative is that of the product there too: the terms that carry it are 0.
    """
    limit = torch.finfo(x.dtype).max
    y: Tensor = F.hardtanh(rate * x, -limit, limit).detach() + (x - x.detach()) * rate
    return y + x.detach() * (rate - rate.detach()) if isinstance(rate, Tensor) else y


def rise(x: Tensor) -> Tensor:
    """exp(x) - 1 for references: the autograd of expm1, y + 1, has no digits left where y is near -1."""
    return torch.where(x < -1, torch.exp(x) - 1, torch.expm1(x.clamp(min=-2)))


def hyperbolic(x: Tensor) -> Tensor:
    """The hyperbolic tangent for references: its autograd is a product, and keeps its digits in the tails."""
    mirrored = torch.where(x <= 0, x, -x)
    y = rise(2 * mirrored) / (1 + torch.exp(2 * mirrored))
    return torch.where(x <= 0, y, -y)


def remainder(x: Tensor) -> Tensor:
    """The difference x - tanh(x) for references: around 0 from its series, where the difference cancels."""
    square = torch.where(x.abs() < 0.1, x, 0.0) ** 2
    series = 1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835 - square * (1382 / 155925))))
    return torch.where(x.abs() < 0.1, x * square * series, x - hyperbolic(x))


def tails(x: Tensor) -> Tensor:
    """`x` cut at ±50, where every bell curve is 0 in float64, so that no square of it overflows."""
    return x.clamp(-50, 50)
