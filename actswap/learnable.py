"""Activations with trained parameters. Formulas only; `catalog` makes the table.

Parameters come shaped to broadcast against the input; gradients come shaped like the input and are reduced by the
caller.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actswap.activation import Activation, Domain, Parameter, State, own
from actswap.gated import SILU_LOW, swish_bend, swish_slope
from actswap.piecewise import aten, unless, where
from actswap.stable import expit, logistic, phase, rise


def prelu_forward(x: Tensor, weight: Any) -> Tensor:
    """`F.prelu`; its kernel where the slope is shaped to broadcast already; a number is a leaky slope."""
    if not isinstance(weight, Tensor):
        return F.leaky_relu(x, weight)
    return F.prelu(x, weight) if weight.dim() <= 1 else aten._prelu_kernel.default(x, weight)


def prelu_backward(g: Tensor, x: Tensor, weight: Any) -> tuple[Tensor, ...]:
    """ATen's kernel for both gradients, of the input's shape each."""
    if not isinstance(weight, Tensor):
        return (aten.leaky_relu_backward.default(g, x, weight, False),)
    return tuple(aten._prelu_kernel_backward.default(g, x, weight))


prelu = Activation(
    name="prelu", formula="x if x > 0 else weight x", slope="1 if x > 0 else weight", native=True,
    source="ATen, _prelu_kernel_backward; He et al. 2015, arXiv:1502.01852",
    parameters=(Parameter("weight", 0.25, learnable=True),),
    forward=prelu_forward,
    states={
        "input": State(
            derivative=lambda x, weight: torch.where(x > 0, torch.ones_like(x), weight),
            second=lambda x, weight: torch.zeros_like(x),
            kernel=prelu_backward,
        ),
    },
    gradients={"weight": lambda x, weight: where(x > 0, 0.0, x, x)},
    kinks=lambda p: (0.0,),
    reference=lambda x, weight: torch.where(x <= 0, weight * x, x),
)  # fmt: skip

swish_beta = Activation(
    name="swish_beta", formula="x sigmoid(beta x)",
    slope="s + beta x s (1 - s); s = sigmoid(beta x)", source="Ramachandran et al. 2017, arXiv:1710.05941",
    parameters=(Parameter("beta", 1.0, learnable=True),),
    forward=own(lambda x, beta: x * torch.sigmoid(beta * x), half=lambda x, beta: x * expit(beta * x)),
    states={"input": State(derivative=swish_slope, second=swish_bend)},
    # x^2 may overflow where a sigmoid is 0
    gradients={"beta": lambda x, beta: (x * torch.sigmoid(beta * x)) * (x * torch.sigmoid(-beta * x))},
    monotonic=False,
    low=lambda p: SILU_LOW / p["beta"] if not isinstance(p["beta"], Tensor) and p["beta"] > 0 else -math.inf,
    reference=lambda x, beta: x * logistic(beta * x),
)  # fmt: skip

star_relu = Activation(
    name="star_relu", formula="scale max(x, 0)^2 + bias",
    slope="2 scale max(x, 0)", source="Yu et al. 2022, arXiv:2210.13452",
    parameters=(Parameter("scale", 1.0, learnable=True), Parameter("bias", 0.0, learnable=True)),
    forward=own(lambda x, scale, bias: scale * torch.relu(x) * torch.relu(x) + bias),
    states={
        "input": State(
            derivative=lambda x, scale, bias: scale * 2 * torch.relu(x),
            second=lambda x, scale, bias: scale * 2 * unless(x <= 0, x),
        ),
    },
    gradients={"scale": lambda x, scale, bias: torch.relu(x) ** 2, "bias": lambda x, scale, bias: torch.ones_like(x)},
    reference=lambda x, scale, bias: scale * where(x <= 0, 0.0, x * x, x) + bias,
)  # fmt: skip

snake = Activation(
    name="snake", formula="x + sin(alpha x)^2 / alpha",
    slope="1 + sin(2 alpha x)", source="Liu et al. 2020, arXiv:2006.08195",
    parameters=(Parameter("alpha", 1.0, Domain(nonzero=True), learnable=True),),
    forward=own(lambda x, alpha: x + torch.sin(phase(x, alpha)) ** 2 / alpha),
    states={
        "input": State(
            # 1 + sin(2 alpha x), without the cancellation where it is 0
            derivative=lambda x, alpha: (torch.sin(phase(x, alpha)) + torch.cos(phase(x, alpha))) ** 2,
            second=lambda x, alpha: 2 * alpha * torch.cos(2 * alpha * x),
        ),
    },
    gradients={
        "alpha": lambda x, alpha: (x * torch.sin(2 * alpha * x) - torch.sin(alpha * x) ** 2 / alpha) / alpha,
    },
    reference=lambda x, alpha: x + (1 - torch.cos(2 * alpha * x)) / (2 * alpha),
)  # fmt: skip


def positive(value: Any) -> Any:
    """The softplus of a number or a tensor: xielu's parameters are trained before it."""
    return F.softplus(value) if isinstance(value, Tensor) else math.log1p(math.exp(value))


def gate(value: Any) -> Any:
    """The derivative of `positive`."""
    return torch.sigmoid(value) if isinstance(value, Tensor) else 1 / (1 + math.exp(-value))


def rest(x: Tensor, eps: float) -> Tensor:
    """expm1(min(x, eps)), which the negative side of xielu levels off to."""
    return torch.expm1(where(x > eps, float(eps), x, x))


def dip(x: Tensor, eps: float) -> Tensor:
    """The factor of xielu's alpha_n."""
    return rest(x, eps) - x


xielu = Activation(
    name="xielu", source="Huang and Schlag 2024, arXiv:2411.13010; transformers/activations.py",
    formula="p x^2 + beta x if x > 0 else n (exp(min(x, eps)) - 1 - x) + beta x; "
    "p = softplus(alpha_p), n = beta + softplus(alpha_n)",
    slope="2 p x + beta if x > 0 else beta - n if x > eps else n (exp(x) - 1) + beta",
    parameters=(
        Parameter("alpha_p", math.log(math.expm1(0.8)), learnable=True),
        Parameter("alpha_n", math.log(math.expm1(0.3)), learnable=True),
        Parameter("beta", 0.5), Parameter("eps", -1e-6, Domain(high=0.0)),
    ),
    forward=own(lambda x, alpha_p, alpha_n, beta, eps: torch.where(
        x > 0, positive(alpha_p) * x * x + beta * x,
        (beta + positive(alpha_n)) * rest(x, eps) - positive(alpha_n) * x)),
    states={
        "input": State(
            derivative=lambda x, alpha_p, alpha_n, beta, eps: torch.where(
                x > 0, 2 * positive(alpha_p) * x,
                (torch.where(x > eps, torch.zeros_like(x), torch.exp(x.clamp(max=0))) - 1)
                * (beta + positive(alpha_n))) + beta,
            second=lambda x, alpha_p, alpha_n, beta, eps: torch.where(
                x > 0, 2 * positive(alpha_p) * torch.ones_like(x),
                torch.where(x > eps, torch.zeros_like(x), torch.exp(x.clamp(max=0))) * (beta + positive(alpha_n))),
        ),
    },
    gradients={
        "alpha_p": lambda x, alpha_p, alpha_n, beta, eps: gate(alpha_p) * where(x > 0, x * x, torch.zeros_like(x), x),
        "alpha_n": lambda x, alpha_p, alpha_n, beta, eps: gate(alpha_n) * where(x > 0, 0.0, dip(x, eps), x),
    },
    kinks=lambda p: (p["eps"], 0.0), monotonic=False,
    reference=lambda x, alpha_p, alpha_n, beta, eps: beta * x + torch.where(
        x > 0, positive(alpha_p) * x**2, (beta + positive(alpha_n)) * (rise(x.clamp(max=eps)) - x)),
)  # fmt: skip

LEARNABLE = (prelu, swish_beta, star_relu, snake, xielu)
