"""Activations made of exponentials and sines. Formulas only; `catalog` makes the table."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from actswap.activation import Activation, Domain, Parameter, State, own
from actswap.piecewise import aten, where
from actswap.stable import decay, hyperbolic, logistic, phase, remainder, rise, tails

PHI = 1 / math.sqrt(2 * math.pi)
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
POSITIVE = Domain(0.0, open=True)


def logistic_density(x: Tensor) -> Tensor:
    """sigmoid(x) (1 - sigmoid(x)), with every digit in both tails."""
    return torch.sigmoid(x) * torch.sigmoid(-x)


def single(value: float) -> float:
    """`value` rounded to float32 in plain arithmetic (Veltkamp), as ATen rounds celu's alpha in its backward."""
    scaled = value * (2**29 + 1)
    return scaled - (scaled - value)


def tanh_bend(t: Tensor) -> Tensor:
    """The second derivative of x - tanh(x), 2 t (1 - t^2), from the value of the tanh."""
    bend: Tensor = aten.tanh_backward.default(2 * t, t)
    return bend


sigmoid = Activation(
    name="sigmoid", formula="1 / (1 + exp(-x))",
    slope="sigmoid(x) (1 - sigmoid(x))", source="ATen, sigmoid_backward", native=True,
    forward=torch.sigmoid, forward_=torch.sigmoid_,
    states={
        "output": State(
            derivative=lambda y: y * (1 - y),
            second=lambda y: 1 - 2 * y,
            kernel=lambda g, y: aten.sigmoid_backward.default(g, y),
            twice=True,
        ),
        "input": State(
            derivative=lambda x: logistic_density(x),
            second=lambda x: logistic_density(x) * (1 - 2 * torch.sigmoid(x)),
            kernel=lambda g, x: aten.sigmoid_backward.default(g, torch.sigmoid(x)),
        ),
    }, save="output", low=lambda p: 0.0, high=lambda p: 1.0,
    reference=logistic,
)  # fmt: skip

tanh = Activation(
    name="tanh", formula="tanh(x)", slope="1 - tanh(x)^2", source="ATen, tanh_backward", native=True,
    forward=torch.tanh, forward_=torch.tanh_,
    states={
        "output": State(
            derivative=lambda y: 1 - y * y,
            second=lambda y: -2 * y,
            kernel=lambda g, y: aten.tanh_backward.default(g, y),
            twice=True,
        ),
        "input": State(
            derivative=lambda x: 1 - torch.tanh(x) ** 2,
            second=lambda x: -tanh_bend(torch.tanh(x)),
            kernel=lambda g, x: aten.tanh_backward.default(g, torch.tanh(x)),
        ),
    }, save="output", low=lambda p: -1.0, high=lambda p: 1.0,
    reference=hyperbolic,
)  # fmt: skip

softsign = Activation(
    name="softsign", formula="x / (1 + |x|)",
    slope="1 / (1 + |x|)^2", source="torch/nn/functional.py, softsign: a composite", native=True,
    forward=lambda x: x / (x.abs() + 1),
    states={
        "input": State(
            derivative=lambda x: 1 / (x.abs() + 1) ** 2,
            second=lambda x: -2 * torch.sign(x) / (x.abs() + 1) ** 3,
            kernel=lambda g, x: softsign_backward(g, x),
            batched=False,
        ),
    }, low=lambda p: -1.0, high=lambda p: 1.0,
    reference=lambda x: torch.where(x.abs() < 1, x / (1 + x.abs()), torch.sign(x) * (1 - 1 / (1 + x.abs()))),
)  # fmt: skip


def softsign_backward(g: Tensor, x: Tensor) -> Tensor:
    """The operations of PyTorch's autograd of the composite, so that every bit is the same, with fewer temporaries."""
    below = x.abs().add_(1)
    return (g / below).add_((x / below).div_(below).mul_(g).neg_().mul_(torch.sgn(x)))


tanhshrink = Activation(
    name="tanhshrink", formula="x - tanh(x)",
    slope="tanh(x)^2", source="torch/nn/functional.py, tanhshrink: a composite", native=True,
    forward=lambda x: x - x.tanh(),
    states={
        "input": State.joint(
            lambda x: (lambda t: (t * t, tanh_bend(t)))(torch.tanh(x)),
            kernel=lambda g, x: g + aten.tanh_backward.default(-g, torch.tanh(x)),
        ),
    },
    reference=remainder,
)  # fmt: skip

softplus = Activation(
    name="softplus", formula="x if beta x > threshold else log(1 + exp(beta x)) / beta",
    slope="1 if beta x > threshold else sigmoid(beta x)", native=True,
    source="ATen, softplus_backward; Dugas et al. 2001",
    parameters=(Parameter("beta", 1.0, POSITIVE), Parameter("threshold", 20.0)),
    forward=lambda x, beta, threshold: F.softplus(x, beta, threshold),
    states={
        "input": State(
            derivative=lambda x, beta, threshold: where(x * beta > threshold, 1.0, torch.sigmoid(x * beta), x),
            second=lambda x, beta, threshold: logistic_density(linear_cut(x, beta, threshold)) * beta,
            kernel=lambda g, x, beta, threshold: aten.softplus_backward.default(g, x, beta, threshold),
        ),
        "output": State(
            derivative=lambda y, beta, threshold: where(y * beta > threshold, 1.0, -torch.expm1(y * -beta), y),
            second=lambda y, beta, threshold: torch.exp(linear_cut(y, beta, threshold)) * beta,
            kernel=lambda g, y, beta, threshold: softplus_from_output(g, y, beta, threshold),
            batched=False,
            # 0.5 for a beta that is a power of two and in half precision; else the roundings of x beta and of / beta
            # are in y itself. From the input, ATen's derivative is within 0.78
            allowed=lambda p: p["threshold"] >= 17, needs="threshold >= 17", bound=0.85,
        ),
    },
    kinks=lambda p: (p["threshold"] / p["beta"],), low=lambda p: 0.0,
    # a high threshold is an approximation, whose error is PyTorch's; a low one makes another function
    reference=lambda x, beta, threshold: torch.where(
        (x * beta > threshold) & (threshold < 15), x, torch.logaddexp(x * beta, torch.zeros_like(x)) / beta
    ),
)  # fmt: skip


def linear_cut(x: Tensor, beta: float, threshold: float) -> Tensor:
    """-beta x, and -inf from the threshold on, where softplus is linear: its exp and its sigmoid are 0."""
    return F.threshold(x * -beta, -threshold, -math.inf)


def softplus_from_output(g: Tensor, y: Tensor, beta: float, threshold: float) -> Tensor:
    """Gradient g f'(x) = -g expm1(-beta y), without 1 - exp(), which loses every digit for small y.

    Above `threshold` PyTorch's derivative is 1. In float32 and below, expm1(-18) already rounds to -1, so only float64
    (and thresholds under 18) must be told. There, y within exp(-threshold) above the threshold may come from an x
    just below it; it is taken as linear, since the pieces overlap and y cannot tell.
    """
    if y.dtype.itemsize == 2:
        return softplus_from_output(g.float(), y.float(), beta, threshold).to(y.dtype)
    slope = F.elu_(y * -beta, -1.0)  # -expm1 of what is negative, in one pass
    if threshold < 18 or y.dtype == torch.float64:
        slope.masked_fill_(y * beta > threshold, 1.0)
    return slope.mul_(g)


logsigmoid = Activation(
    name="logsigmoid", aliases=("log_sigmoid",), formula="-log(1 + exp(-x))", slope="sigmoid(-x)", native=True,
    source="ATen, log_sigmoid_backward",
    forward=F.logsigmoid,
    states={
        "input": State.joint(
            lambda x: (lambda s: (s, (s - 1) * s))(torch.sigmoid(-x)),
            # PyTorch saves exp(-|x|) as well; its forward kernel makes it again with the same bits
            kernel=lambda g, x: aten.log_sigmoid_backward.default(g, x, aten.log_sigmoid_forward.default(x)[1]),
        ),
        "output": State(derivative=lambda y: -torch.expm1(y), second=lambda y: -torch.exp(y), bound=0.6),
    },
    high=lambda p: 0.0,
    reference=lambda x: -torch.logaddexp(torch.zeros_like(x), -x),
)  # fmt: skip

elu = Activation(
    name="elu", formula="x if x > 0 else alpha (exp(x) - 1)", slope="1 if x > 0 else alpha exp(x)", native=True,
    source="ATen, elu_backward; Clevert et al. 2015, arXiv:1511.07289",
    parameters=(Parameter("alpha", 1.0),),
    forward=lambda x, alpha: F.elu(x, alpha), forward_=lambda x, alpha: F.elu(x, alpha, inplace=True),
    states={
        "input": State(
            derivative=lambda x, alpha: torch.where(x <= 0, alpha * decay(x), 1.0),
            second=lambda x, alpha: torch.where(x <= 0, alpha * decay(x), 0.0),
            kernel=lambda g, x, alpha: aten.elu_backward.default(g, alpha, 1, 1, False, x),
            twice=True,
        ),
        "output": State(
            derivative=lambda y, alpha: torch.where(y <= 0, y + alpha, 1.0),
            second=lambda y, alpha: (y <= 0).to(y.dtype),
            kernel=lambda g, y, alpha: aten.elu_backward.default(g, alpha, 1, 1, True, y),
            twice=True,
            allowed=lambda p: p["alpha"] >= 0, needs="alpha >= 0", bound=0.6,
        ),
    }, save_="output",
    kinks=lambda p: (0.0,), low=lambda p: -max(p["alpha"], 0.0),
    reference=lambda x, alpha: torch.where(x <= 0, alpha * rise(torch.where(x <= 0, x, 0.0)), x),
)  # fmt: skip

celu = Activation(
    name="celu", formula="x if x > 0 else alpha (exp(x / alpha) - 1)",
    slope="1 if x > 0 else exp(x / alpha)", native=True,
    source="ATen, celu and elu_backward; Barron 2017, arXiv:1704.07483",
    parameters=(Parameter("alpha", 1.0, Domain(nonzero=True)),),
    forward=lambda x, alpha: F.celu(x, alpha), forward_=lambda x, alpha: F.celu(x, alpha, inplace=True),
    states={
        "input": State(
            derivative=lambda x, alpha: torch.where(x <= 0, torch.exp(torch.where(x <= 0, x, 0.0) / alpha), 1.0),
            second=lambda x, alpha: torch.where(x <= 0, torch.exp(torch.where(x <= 0, x, 0.0) / alpha) / alpha, 0.0),
            kernel=lambda g, x, alpha: aten.elu_backward.default(g, alpha, 1, 1.0 / single(alpha), False, x),
        ),
        "output": State(
            derivative=lambda y, alpha: torch.where(y <= 0, y / alpha + 1, 1.0),
            second=lambda y, alpha: torch.where(y <= 0, torch.full_like(y, 1 / alpha), 0.0),
            kernel=lambda g, y, alpha: aten.elu_backward.default(g, alpha, 1, 1.0 / single(alpha), True, y),
            allowed=lambda p: p["alpha"] > 0, needs="alpha > 0",
            # 0.5 for an alpha that is a power of two and in half precision; else y itself is off by up to 0.8, and this
            # is what PyTorch's in-place op computes
            bound=1.0,
        ),
    }, save_="output",
    kinks=lambda p: (0.0,), low=lambda p: -max(p["alpha"], 0.0),
    reference=lambda x, alpha: torch.where(x <= 0, alpha * rise(torch.where(x <= 0, x, 0.0) / alpha), x),
)  # fmt: skip

selu = Activation(
    name="selu",
    formula="scale x if x > 0 else scale alpha (exp(x) - 1); scale = 1.0507009873554805, alpha = 1.6732632423543772",
    slope="scale if x > 0 else scale alpha exp(x)", native=True,
    source="ATen, selu and elu_backward; Klambauer et al. 2017, arXiv:1706.02515",
    forward=F.selu, forward_=lambda x: F.selu(x, inplace=True),
    states={
        "input": State(
            derivative=lambda x: torch.where(x <= 0, SELU_SCALE * SELU_ALPHA * decay(x), SELU_SCALE),
            second=lambda x: torch.where(x <= 0, SELU_SCALE * SELU_ALPHA * decay(x), 0.0),
            kernel=lambda g, x: aten.elu_backward.default(g, SELU_ALPHA, SELU_SCALE, 1, False, x),
            twice=True,
        ),
        "output": State(
            derivative=lambda y: torch.where(y <= 0, y + SELU_SCALE * SELU_ALPHA, SELU_SCALE),
            second=lambda y: (y <= 0).to(y.dtype),
            kernel=lambda g, y: aten.elu_backward.default(g, SELU_ALPHA, SELU_SCALE, 1, True, y),
            twice=True,
            bound=0.65,  # PyTorch's in-place op too
        ),
    }, save_="output",
    kinks=lambda p: (0.0,), low=lambda p: -SELU_SCALE * SELU_ALPHA,
    reference=lambda x: SELU_SCALE * torch.where(x <= 0, SELU_ALPHA * rise(torch.where(x <= 0, x, 0.0)), x),
)  # fmt: skip

sine = Activation(
    name="sine", formula="sin(omega x)", slope="omega cos(omega x)", source="Sitzmann et al. 2020, arXiv:2006.09661",
    parameters=(Parameter("omega", 1.0),),
    forward=own(lambda x, omega: torch.sin(phase(x, omega))),
    states={
        "input": State(
            derivative=lambda x, omega: omega * torch.cos(phase(x, omega)),
            second=lambda x, omega: -(omega * omega) * torch.sin(omega * x),
        ),
    }, low=lambda p: -1.0, high=lambda p: 1.0, monotonic=False,
    reference=lambda x, omega: 2 * torch.sin(omega * x / 2) * torch.cos(omega * x / 2),
)  # fmt: skip

laplace = Activation(
    name="laplace", formula="(1 + erf((x - mu) / (sigma sqrt(2)))) / 2",
    slope="exp(-((x - mu) / sigma)^2 / 2) / (sigma sqrt(2 pi))", source="Ma et al. 2022, arXiv:2209.10655",
    parameters=(Parameter("mu", 0.707107), Parameter("sigma", 0.282095, POSITIVE)),
    forward=own(lambda x, mu, sigma: 0.5 * torch.special.erfc((mu - x) / (sigma * math.sqrt(2)))),
    states={
        "input": State.joint(lambda x, mu, sigma: laplace_slopes(tails((x - mu) / sigma), sigma)),
    }, low=lambda p: 0.0, high=lambda p: 1.0,
    reference=lambda x, mu, sigma: torch.exp(torch.special.log_ndtr(tails((x - mu) / sigma))),
)  # fmt: skip


def laplace_slopes(z: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """The density of a normal distribution, `z` deviations `sigma` from its mean, and the derivative of it."""
    density = torch.exp(z * z * -0.5) * (PHI / sigma)
    return density, density * z * (-1 / sigma)


sqrtsoftplus = Activation(
    name="sqrtsoftplus", aliases=("sqrt_softplus",), formula="sqrt(log(1 + exp(x)))",
    slope="sigmoid(x) / (2 sqrt(log(1 + exp(x))))",
    source="transformers/activations.py",
    # softplus up to 40, since its default threshold of 20 shows in float64; under -40 its root directly
    forward=own(
        lambda x: torch.where(x < -40, torch.exp(x / 2), F.softplus(x.clamp(min=-41), threshold=40.0).sqrt())
    ),
    states={
        "input": State.joint(lambda x: root_slopes(x)),
    }, low=lambda p: 0.0,
    reference=lambda x: torch.where(
        x < -50, decay(x, 0.5), torch.sqrt(torch.logaddexp(x.clamp(min=-51), torch.zeros_like(x)))
    ),
)  # fmt: skip


def root_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivative of sqrt(softplus), from s = sigmoid and p = softplus; below -40 it is exp(x / 2)."""
    s, p, low = torch.sigmoid(x), F.softplus(x.clamp(min=-41), threshold=40.0), x < -40
    slope, tail = s / (2 * p.sqrt()), torch.exp(x.clamp(max=-40) / 2) / 2
    return torch.where(low, tail, slope), torch.where(low, tail / 2, slope * ((1 - s) - s / (2 * p)))


SMOOTH = (
    sigmoid, tanh, softsign, tanhshrink, softplus, logsigmoid, elu, celu, selu, sine, laplace, sqrtsoftplus,
)  # fmt: skip
