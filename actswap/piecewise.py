"""Activations made of straight or quadratic pieces. Formulas only; `catalog` makes the table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actswap.activation import Activation, Domain, Parameter, State, own

aten = torch.ops.aten
leaky_backward = aten.leaky_relu_backward.default
zero = torch.zeros_like


def flat(s: Tensor, *values: Any, **params: Any) -> Tensor:
    """The second derivative of straight pieces: 0."""
    return torch.zeros_like(s)


def where(condition: Tensor, first: Tensor | float, second: Tensor | float, like: Tensor) -> Tensor:
    """`torch.where` whose branches may both be numbers, in the dtype of `like`."""
    return torch.where(condition, torch.full_like(like, first) if isinstance(first, float) else first, second)


def unless(condition: Tensor, like: Tensor) -> Tensor:
    """1 where the condition does not hold, so that NaN, which satisfies none, lets the gradient pass as in ATen."""
    return (~condition).to(like.dtype)


RELU = State(lambda s: unless(s <= 0, s), flat, lambda g, s: aten.threshold_backward.default(g, s, 0), twice=True)

relu = Activation(
    name="relu", formula="max(x, 0)",
    slope="1 if x > 0 else 0", source="aten/src/ATen/native/Activation.cpp, threshold_backward", native=True,
    forward=torch.relu, forward_=torch.relu_,
    states={"output": RELU, "input": RELU}, save="output",
    kinks=lambda p: (0.0,), low=lambda p: 0.0,
    reference=lambda x: where(x <= 0, 0.0, x, x),
)  # fmt: skip


def short(value: float) -> bool:
    """Whether every dtype has this number (bfloat16 has 8 bits), so that an output equal to it shows as equal."""
    return not math.isfinite(value) or math.frexp(value)[0] * 2**8 % 1 == 0


def boxed(s: Tensor, low: float, high: float) -> Tensor:
    """The derivative of clamping, the same from input and output, since clamping keeps both comparisons."""
    return unless((s <= low) | (s >= high), s)


SIX = State(lambda s: boxed(s, 0.0, 6.0), flat, lambda g, s: aten.hardtanh_backward.default(g, s, 0.0, 6.0), twice=True)
BOX = State(
    derivative=lambda s, min_val, max_val: boxed(s, min_val, max_val),
    second=flat,
    kernel=lambda g, s, min_val, max_val: aten.hardtanh_backward.default(g, s, min_val, max_val),
    twice=True,
)

relu6 = Activation(
    name="relu6", formula="min(max(x, 0), 6)",
    slope="1 if 0 < x < 6 else 0", source="torch/nn/functional.py, relu6", native=True,
    forward=F.relu6, forward_=lambda x: F.relu6(x, inplace=True),
    states={"input": SIX, "output": SIX},
    kinks=lambda p: (0.0, 6.0), low=lambda p: 0.0, high=lambda p: 6.0,
    reference=lambda x: where(x <= 0, 0.0, where(x >= 6, 6.0, x, x), x),
)  # fmt: skip

hardtanh = Activation(
    name="hardtanh", formula="min(max(x, min_val), max_val)",
    slope="1 if min_val < x < max_val else 0", source="ATen, hardtanh_backward", native=True,
    parameters=(Parameter("min_val", -1.0), Parameter("max_val", 1.0)),
    requires=(lambda p: p["min_val"] <= p["max_val"], "min_val must not be greater than max_val"),
    forward=lambda x, min_val, max_val: F.hardtanh(x, min_val, max_val),
    forward_=lambda x, min_val, max_val: F.hardtanh(x, min_val, max_val, inplace=True),
    states={
        "input": BOX,
        "output": replace(
            BOX, allowed=lambda p: short(p["min_val"]) and short(p["max_val"]), needs="bounds that bfloat16 has"
        ),
    },
    kinks=lambda p: (p["min_val"], p["max_val"]), low=lambda p: p["min_val"], high=lambda p: p["max_val"],
    reference=lambda x, min_val, max_val: where(
        x <= min_val, float(min_val), where(x >= max_val, float(max_val), x, x), x
    ),
)  # fmt: skip

leaky_relu = Activation(
    name="leaky_relu", formula="x if x > 0 else negative_slope x",
    slope="1 if x > 0 else negative_slope", source="ATen, leaky_relu_backward", native=True,
    parameters=(Parameter("negative_slope", 0.01),),
    forward=lambda x, negative_slope: F.leaky_relu(x, negative_slope),
    forward_=lambda x, negative_slope: F.leaky_relu(x, negative_slope, inplace=True),
    states={
        "input": State(
            derivative=lambda x, negative_slope: where(x > 0, 1.0, negative_slope, x),
            second=flat,
            kernel=lambda g, x, negative_slope: leaky_backward(g, x, negative_slope, False),
            twice=True,
        ),
        "output": State(
            derivative=lambda y, negative_slope: where(y > 0, 1.0, negative_slope, y),
            second=flat,
            kernel=lambda g, y, negative_slope: leaky_backward(g, y, negative_slope, True),
            twice=True,
            allowed=lambda p: p["negative_slope"] > 0, needs="negative_slope > 0",
        ),
    }, save_="output",
    kinks=lambda p: (0.0,), low=lambda p: -math.inf if p["negative_slope"] > 0 else 0.0,
    reference=lambda x, negative_slope: torch.where(x <= 0, negative_slope * x, x),
)  # fmt: skip


def noisy(x: Tensor, lower: float, upper: float, training: bool) -> tuple[Tensor, Tensor]:
    """The output of rrelu and the slopes it drew, from the random stream exactly as `torch.rrelu` takes them."""
    noise = torch.empty_like(x, memory_format=torch.contiguous_format)
    return aten.rrelu_with_noise.default(x, noise, lower, upper, training), noise


rrelu = Activation(
    name="rrelu", formula="x if x > 0 else a x; a = (lower + upper) / 2; in training a is uniform in [lower, upper]",
    slope="1 if x > 0 else a",
    source="ATen, rrelu_with_noise_backward", native=True,
    parameters=(Parameter("lower", 1 / 8), Parameter("upper", 1 / 3), Parameter("training", False, mode=True)),
    requires=(lambda p: p["lower"] <= p["upper"], "lower must not be greater than upper"),
    forward=lambda x, lower, upper, training: torch.rrelu(x, lower, upper, training),
    forward_=lambda x, lower, upper, training: torch.rrelu_(x, lower, upper, training),
    states={
        "noise": State(
            forward=noisy,
            derivative=lambda noise, lower, upper, training: noise.clone(),
            second=flat,
            kernel=lambda g, noise, lower, upper, training: g * noise,
            twice=True,
            allowed=lambda p: bool(p["training"]), needs="training mode",
        ),
        "input": State(
            derivative=lambda x, lower, upper, training: where(x > 0, 1.0, (lower + upper) / 2, x),
            second=flat,
            kernel=lambda g, x, lower, upper, training: leaky_backward(g, x, (lower + upper) / 2, False),
            twice=True,
            allowed=lambda p: not p["training"], needs="evaluation mode",
        ),
        "output": State(
            derivative=lambda y, lower, upper, training: where(y > 0, 1.0, (lower + upper) / 2, y),
            second=flat,
            kernel=lambda g, y, lower, upper, training: leaky_backward(g, y, (lower + upper) / 2, True),
            twice=True,
            allowed=lambda p: not p["training"] and p["lower"] + p["upper"] > 0,
            needs="evaluation mode and a positive mean slope",
        ),
    }, save="noise",
    kinks=lambda p: (0.0,), low=lambda p: -math.inf if p["upper"] > 0 else 0.0,
    reference=lambda x, lower, upper, training: torch.where(x <= 0, (lower + upper) / 2 * x, x),
)  # fmt: skip

threshold = Activation(
    name="threshold", formula="x if x > threshold else value",
    slope="1 if x > threshold else 0", source="ATen, threshold_backward", native=True,
    parameters=(Parameter("threshold", 0.0), Parameter("value", 0.0)),
    forward=lambda x, threshold, value: F.threshold(x, threshold, value),
    forward_=lambda x, threshold, value: F.threshold(x, threshold, value, inplace=True),
    states={
        "input": State(
            derivative=lambda x, threshold, value: unless(x <= threshold, x),
            second=flat,
            kernel=lambda g, x, threshold, value: aten.threshold_backward.default(g, x, threshold),
            twice=True,
        ),
        "output": State(
            derivative=lambda y, threshold, value: unless(y <= threshold, y),
            second=flat,
            kernel=lambda g, y, threshold, value: aten.threshold_backward.default(g, y, threshold),
            twice=True,
            allowed=lambda p: p["value"] <= p["threshold"] and short(p["value"]),
            needs="value <= threshold, and a value that bfloat16 has",
        ),
    },
    kinks=lambda p: (p["threshold"],), low=lambda p: min(p["threshold"], p["value"]),
    reference=lambda x, threshold, value: where(x <= threshold, float(value), x, x),
)  # fmt: skip

hardsigmoid = Activation(
    name="hardsigmoid", aliases=("hard_sigmoid",), formula="min(max(x + 3, 0), 6) / 6",
    slope="1 / 6 if -3 < x < 3 else 0",
    source="ATen, hardsigmoid_backward", native=True,
    forward=F.hardsigmoid, forward_=lambda x: F.hardsigmoid(x, inplace=True),
    states={
        "input": State(
            derivative=lambda x: ((x > -3) & (x < 3)).to(x.dtype) / 6,
            second=flat,
            kernel=lambda g, x: aten.hardsigmoid_backward.default(g, x),
        ),
        # y may round to 1 where x is one step under the kink at 3; there, and only there, the sides differ
        "output": State(derivative=lambda y: ((y > 0) & (y < 1)).to(y.dtype) / 6, second=flat, bound=0.6),
    },
    kinks=lambda p: (-3.0, 3.0), low=lambda p: 0.0, high=lambda p: 1.0,
    reference=lambda x: where(x <= -3, 0.0, where(x >= 3, 1.0, x / 6 + 0.5, x), x),
)  # fmt: skip

hardswish = Activation(
    name="hardswish", aliases=("hard_swish",), formula="x min(max(x + 3, 0), 6) / 6",
    slope="0 if x <= -3 else x / 3 + 1 / 2 if x < 3 else 1",
    source="ATen, hardswish_backward; Howard et al. 2019, arXiv:1905.02244", native=True,
    forward=F.hardswish, forward_=lambda x: F.hardswish(x, inplace=True),
    states={
        "input": State(
            derivative=lambda x: where(x <= -3, 0.0, torch.where(x < 3, x / 3 + 0.5, 1.0), x),
            second=lambda x: unless((x <= -3) | (x >= 3), x) / 3,
            kernel=lambda g, x: aten.hardswish_backward.default(g, x),
            twice=True,
        ),
    },
    kinks=lambda p: (-3.0, 3.0), low=lambda p: -0.375, monotonic=False,
    reference=lambda x: where(x <= -3, 0.0, torch.where(x >= 3, x, x * (x + 3) / 6), x),
)  # fmt: skip

hard_mish = Activation(
    name="hard_mish", formula="x min(max(x + 2, 0), 2) / 2",
    slope="0 if x <= -2 else x + 1 if x <= 0 else 1", source="Misra, github.com/digantamisra98/H-Mish",
    # not clamp, whose derivative at its ends changed with PyTorch 2.14
    forward=own(lambda x: 0.5 * x * F.hardtanh(x + 2, 0.0, 2.0)),
    states={
        "input": State(
            derivative=lambda x: where(x <= -2, 0.0, where(x > 0, 1.0, x + 1, x), x),
            second=lambda x: unless((x <= -2) | (x > 0), x),
        ),
    },
    kinks=lambda p: (-2.0,), low=lambda p: -0.5, monotonic=False,
    reference=lambda x: where(x <= -2, 0.0, torch.where(x > 0, x, x * (x + 2) / 2), x),
)  # fmt: skip

softshrink = Activation(
    name="softshrink", formula="x - lambd if x > lambd else x + lambd if x < -lambd else 0",
    slope="1 if |x| > lambd else 0",
    source="ATen, softshrink_backward", native=True,
    parameters=(Parameter("lambd", 0.5, Domain(0.0)),),
    forward=lambda x, lambd: F.softshrink(x, lambd),
    states={
        "input": State(
            derivative=lambda x, lambd: unless((x >= -lambd) & (x <= lambd), x),
            second=flat,
            kernel=lambda g, x, lambd: aten.softshrink_backward.default(g, x, lambd),
            twice=True,
        ),
        "output": State(
            derivative=lambda y, lambd: unless(y == 0, y),
            second=flat,
            kernel=lambda g, y, lambd: aten.softshrink_backward.default(g, y, 0.0),
            twice=True,
        ),
    },
    kinks=lambda p: (-p["lambd"], p["lambd"]),
    reference=lambda x, lambd: torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0)),
)  # fmt: skip

hardshrink = Activation(
    name="hardshrink", formula="x if |x| > lambd else 0",
    slope="1 if |x| > lambd else 0", source="ATen, hardshrink_backward", native=True,
    parameters=(Parameter("lambd", 0.5),),
    forward=lambda x, lambd: F.hardshrink(x, lambd),
    states={
        state: State(
            derivative=lambda s, lambd: unless((s >= -lambd) & (s <= lambd), s),
            second=flat,
            kernel=lambda g, s, lambd: aten.hardshrink_backward.default(g, s, lambd),
            twice=True,
        )
        for state in ("input", "output")
    },
    kinks=lambda p: (-p["lambd"], p["lambd"]),
    reference=lambda x, lambd: where((x >= -lambd) & (x <= lambd), 0.0, x, x),
)  # fmt: skip

square = Activation(
    name="square", formula="x^2", slope="2 x", source="tools/autograd/derivatives.yaml, pow", native=True,
    forward=torch.square, forward_=torch.square_,
    states={
        "input": State(
            derivative=lambda x: 2 * x,
            second=lambda x: torch.full_like(x, 2.0),
            kernel=lambda g, x: g * (2 * x),
        ),
    },
    low=lambda p: 0.0, monotonic=False,
    reference=lambda x: x * x,
)  # fmt: skip

squared_relu = Activation(
    name="squared_relu", aliases=("relu2", "relu_squared"), formula="max(x, 0)^2", slope="2 max(x, 0)",
    source="So et al. 2021, arXiv:2109.08668",
    forward=own(lambda x: torch.square(torch.relu(x))),
    states={"input": State(derivative=lambda x: 2 * torch.relu(x), second=lambda x: 2 * unless(x <= 0, x))},
    low=lambda p: 0.0,
    reference=lambda x: where(x <= 0, 0.0, x * x, x),
)  # fmt: skip

identity = Activation(
    name="identity", aliases=("linear",), formula="x",
    slope="1", source="torch/nn/modules/linear.py, Identity", native=True,
    forward=lambda x: x, forward_=lambda x: x,
    states={}, save="none",  # PyTorch saves nothing for it, and neither do we
    reference=lambda x: x * 1.0,
)  # fmt: skip


def surrogate(name: str, slope: str, source: str, backward: Any) -> Activation:
    """The forward of relu with another backward, for pictures of what a network looks at."""
    state = State(derivative=RELU.derivative, second=flat, kernel=backward)
    return Activation(
        name=name, formula=relu.formula, slope=slope, source=source, surrogate=True,
        forward=torch.relu, forward_=torch.relu_,
        states={"output": state, "input": state}, save="output",
        kinks=lambda p: (0.0,), low=lambda p: 0.0, reference=relu.reference,
    )  # fmt: skip


guided_relu = surrogate(
    "guided_relu", "max(g, 0) if x > 0 else 0", "Springenberg et al. 2015, arXiv:1412.6806",
    lambda g, s: torch.relu(aten.threshold_backward.default(g, s, 0)),
)  # fmt: skip
deconv_relu = surrogate(
    "deconv_relu", "max(g, 0)", "Zeiler and Fergus 2014, arXiv:1311.2901",
    lambda g, s: torch.relu(g),
)  # fmt: skip

PIECEWISE = (
    relu, relu6, hardtanh, leaky_relu, rrelu, threshold, hardsigmoid, hardswish, hard_mish, softshrink, hardshrink,
    square, squared_relu, identity, guided_relu, deconv_relu,
)  # fmt: skip
