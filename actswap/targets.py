"""Where the activations are met: PyTorch's, timm's and transformers' classes and functions for each of them.

`MODULES` has class paths with the instance attributes to read; `CALLS` has functions and methods, the tensor first. An
annotation is a value the argument must have, `...` an argument that is ignored; `actswap.patterns` reads them. Naming
another library's class imports nothing.
`torch.square` and `torch.sin` are not here: they compute norms and positions far more often than they activate.
"""

from __future__ import annotations

F, T, ATEN, NN = "torch.nn.functional", "torch.Tensor", "torch.ops.aten", "torch._C._nn"
TIMM, ME, HUGGING = "timm.layers.activations", "timm.layers.activations_me", "transformers.activations"


def _op(name: str, rest: str = "", places: tuple[str, ...] = ("torch", T), inplace: bool = True) -> tuple[str, ...]:
    """One op at several places, with its twin in place, and its ATen overloads as exported graphs have them."""
    rest = f", {rest}" if rest else ""
    twins = (name, f"{name}_") if inplace else (name,)
    calls = tuple(f"{place}.{twin}(input{rest})" for place in places for twin in twins)
    return calls + tuple(f"{ATEN}.{twin}.default(self{rest})" for twin in twins)


def _clamp(high: str) -> tuple[str, ...]:
    """`clamp(min=0)` and its other spellings, with this upper bound."""
    return tuple(
        call.replace(".clip.default", ".clamp.default").replace(".clip_.default", ".clamp_.default")
        for name in ("clamp", "clip")
        for call in _op(name, f"min: 0 = None, max: {high} = None")
    )


SLOPE, ALPHA, BOX, SIX, LAMBD = (
    "negative_slope=0.01", "alpha=1.0", "min_val=-1.0, max_val=1.0", "min_val: 0 = -1.0, max_val: 6 = 1.0", "lambd=0.5",
)  # fmt: skip
PLAIN, TANH = "*, approximate: 'none' = 'none'", "*, approximate: 'tanh' = 'none'"
SELU = "alpha: 1.6732632423543772 = 1, scale: 1.0507009873554805 = 1, input_scale: 1 = 1"
RRELU = "lower=0.125, upper=0.3333333333333333, training=False"

CALLS: dict[str, tuple[str, ...]] = {
    "relu": (
        *_op("relu"), f"{F}.relu(input, inplace=False)", f"{F}.relu_(input)",
        *dict.fromkeys(_clamp("None")), *_op("clamp_min", "min: 0"),
    ),
    "relu6": (
        f"{F}.relu6(input, inplace=False)",
        f"{F}.hardtanh(input, {SIX}, inplace=False)", f"{F}.hardtanh_(input, {SIX})",
        *_op("hardtanh", SIX, (NN,)), *_op("relu6", places=(NN,)), *dict.fromkeys(_clamp("6")),
    ),
    "hardtanh": (
        f"{F}.hardtanh(input, {BOX}, inplace=False)", f"{F}.hardtanh_(input, {BOX})", *_op("hardtanh", BOX, (NN,)),
    ),
    "leaky_relu": (
        f"{F}.leaky_relu(input, {SLOPE}, inplace=False)", f"{F}.leaky_relu_(input, {SLOPE})",
        *_op("leaky_relu", SLOPE, (NN,)),
    ),
    "prelu": (f"{F}.prelu(input, weight)", *_op("prelu", "weight", inplace=False)),
    "rrelu": (
        f"{F}.rrelu(input, {RRELU}, inplace=False)", f"{F}.rrelu_(input, {RRELU})",
        f"torch.rrelu(input, {RRELU})", f"torch.rrelu_(input, {RRELU})",
        f"{ATEN}.rrelu.default(self, {RRELU}, generator: None = None)",
        f"{ATEN}.rrelu_.default(self, {RRELU}, generator: None = None)",
    ),
    "elu": (
        f"{F}.elu(input, {ALPHA}, inplace=False)", f"{F}.elu_(input, {ALPHA})",
        *_op("elu", f"{ALPHA}, scale: 1 = 1, input_scale: 1 = 1", (NN,)),
    ),
    "celu": (
        f"{F}.celu(input, {ALPHA}, inplace=False)", f"{F}.celu_(input, {ALPHA})", *_op("celu", ALPHA, ("torch",)),
    ),
    "selu": (
        f"{F}.selu(input, inplace=False)", f"{F}.selu_(input)", *_op("selu", places=("torch",)),
        f"{ATEN}.elu.default(self, {SELU})", f"{ATEN}.elu_.default(self, {SELU})",
    ),
    "gelu": (f"{F}.gelu(input, {PLAIN})", *_op("gelu", PLAIN, (NN,)), f"{TIMM}.gelu(x, inplace=...)"),
    "gelu_tanh": (
        f"{F}.gelu(input, {TANH})", *_op("gelu", TANH, (NN,)), f"{TIMM}.gelu_tanh(x, inplace=...)",
    ),
    "quick_gelu": (f"{TIMM}.quick_gelu(x, inplace=...)",),
    "silu": (
        f"{F}.silu(input, inplace=False)", *_op("silu", places=(NN,)), f"{TIMM}.swish(x, inplace=False)",
        f"{ME}.swish_me(x, inplace=...)", f"{ME}.SwishAutoFn.apply(x)",
    ),
    "mish": (
        f"{F}.mish(input, inplace=False)", *_op("mish", places=(NN,)), f"{TIMM}.mish(x, inplace=...)",
        f"{ME}.mish_me(x, inplace=...)", f"{ME}.MishAutoFn.apply(x)",
    ),
    "hardswish": (
        f"{F}.hardswish(input, inplace=False)", *_op("hardswish", places=(NN,)), f"{TIMM}.hard_swish(x, inplace=False)",
        f"{ME}.hard_swish_me(x, inplace=...)", f"{ME}.HardSwishAutoFn.apply(x)",
    ),
    "hardsigmoid": (
        f"{F}.hardsigmoid(input, inplace=False)", *_op("hardsigmoid", places=(NN,)),
        f"{TIMM}.hard_sigmoid(x, inplace=False)", f"{ME}.hard_sigmoid_me(x, inplace=...)",
        f"{ME}.HardSigmoidAutoFn.apply(x)",
    ),
    "hard_mish": (
        f"{TIMM}.hard_mish(x, inplace=False)", f"{ME}.hard_mish_me(x, inplace=...)",
        f"{ME}.HardMishAutoFn.apply(x)",
    ),
    "sigmoid": (
        *_op("sigmoid"), f"{F}.sigmoid(input)", "torch.special.expit(input)", f"{TIMM}.sigmoid(x, inplace=False)",
    ),
    "tanh": (*_op("tanh"), f"{F}.tanh(input)", f"{TIMM}.tanh(x, inplace=False)"),
    "softplus": (
        f"{F}.softplus(input, beta=1.0, threshold=20.0)",
        *_op("softplus", "beta=1.0, threshold=20.0", (), inplace=False),
    ),
    "logsigmoid": (f"{F}.logsigmoid(input)", f"{ATEN}.log_sigmoid.default(self)"),
    "softsign": (f"{F}.softsign(input)",),
    "tanhshrink": (f"{F}.tanhshrink(input)",),
    "softshrink": (f"{F}.softshrink(input, {LAMBD})", *_op("softshrink", LAMBD, (), inplace=False)),
    "hardshrink": (f"{F}.hardshrink(input, {LAMBD})", *_op("hardshrink", LAMBD, inplace=False)),
    "threshold": (
        f"{F}.threshold(input, threshold, value, inplace=False)", f"{F}.threshold_(input, threshold, value)",
        *_op("threshold", "threshold, value", ("torch",)),
    ),
}  # fmt: skip

MODULES: dict[str, tuple[str, ...]] = {
    "relu": ("torch.nn.ReLU(inplace)",),
    "relu6": ("torch.nn.ReLU6(inplace)", "torch.nn.Hardtanh(min_val: 0, max_val: 6, inplace)"),
    "hardtanh": ("torch.nn.Hardtanh(min_val, max_val, inplace)",),
    "leaky_relu": ("torch.nn.LeakyReLU(negative_slope, inplace)",),
    "prelu": ("torch.nn.PReLU(weight)", f"{TIMM}.PReLU(weight)"),
    "rrelu": ("torch.nn.RReLU(lower, upper, inplace)",),
    "elu": ("torch.nn.ELU(alpha, inplace)",),
    "celu": ("torch.nn.CELU(alpha, inplace)",),
    "selu": ("torch.nn.SELU(inplace)",),
    "gelu": ("torch.nn.GELU(approximate: 'none')", f"{TIMM}.GELU()", f"{HUGGING}.GELUActivation()"),
    "gelu_tanh": (
        "torch.nn.GELU(approximate: 'tanh')", f"{TIMM}.GELUTanh()", f"{HUGGING}.GELUTanh()",
        f"{HUGGING}.NewGELUActivation()", f"{HUGGING}.FastGELUActivation()", f"{HUGGING}.AccurateGELUActivation()",
    ),
    "quick_gelu": (f"{TIMM}.QuickGELU()", f"{HUGGING}.QuickGELUActivation()"),
    "clipped_gelu": (f"{HUGGING}.ClippedGELUActivation(min, max)",),
    "silu": ("torch.nn.SiLU(inplace)", f"{TIMM}.Swish(inplace)", f"{ME}.SwishMe()", f"{HUGGING}.SiLUActivation()"),
    "mish": ("torch.nn.Mish(inplace)", f"{TIMM}.Mish()", f"{ME}.MishMe()", f"{HUGGING}.MishActivation()"),
    "hardswish": ("torch.nn.Hardswish(inplace)", f"{TIMM}.HardSwish(inplace)", f"{ME}.HardSwishMe()"),
    "hardsigmoid": ("torch.nn.Hardsigmoid(inplace)", f"{TIMM}.HardSigmoid(inplace)", f"{ME}.HardSigmoidMe()"),
    "hard_mish": (f"{TIMM}.HardMish(inplace)", f"{ME}.HardMishMe()"),
    "sigmoid": ("torch.nn.Sigmoid()", f"{TIMM}.Sigmoid(inplace)"),
    "tanh": ("torch.nn.Tanh()", f"{TIMM}.Tanh(inplace)"),
    "softplus": ("torch.nn.Softplus(beta, threshold)",),
    "logsigmoid": ("torch.nn.LogSigmoid()",),
    "softsign": ("torch.nn.Softsign()",),
    "tanhshrink": ("torch.nn.Tanhshrink()",),
    "softshrink": ("torch.nn.Softshrink(lambd)",),
    "hardshrink": ("torch.nn.Hardshrink(lambd)",),
    "threshold": ("torch.nn.Threshold(threshold, value, inplace)",),
    # their inner relu may be in place, but the result is never the input
    "squared_relu": ("timm.models.metaformer.SquaredReLU()", f"{HUGGING}.ReLUSquaredActivation()"),
    "star_relu": ("timm.models.metaformer.StarReLU(scale, bias)",),
    "laplace": (f"{HUGGING}.LaplaceActivation()",),
    "sqrtsoftplus": (f"{HUGGING}.SqrtSoftplusActivation()",),
    "xielu": (f"{HUGGING}.XIELUActivation(alpha_p, alpha_n, beta, eps)",),
    "identity": ("torch.nn.Identity()", f"{HUGGING}.LinearActivation()"),
}  # fmt: skip
