"""Activations written by hand as they circulate, right and wrong, each with the lines of its report that fail."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F


def saving(name, value, slope):
    """A Function that saves its input."""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return value(x)

    def backward(ctx, g):
        return g * slope(ctx.saved_tensors[0])

    return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


# --- relu ------------------------------------------------------------------------------------------


class MaskBelow(Function):
    """The popular one: masked where `x < 0`, so that the gradient at 0 is 1."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g = g.clone()
        g[x < 0] = 0
        return g


class LegacyRelu(Function):
    """Instance methods, and right."""

    def forward(self, x):
        self.save_for_backward(x)
        return x.clamp(min=0)

    def backward(self, g):
        (x,) = self.saved_tensors
        g = g.clone()
        g[x <= 0] = 0
        return g


class BuiltinRelu(Function):
    """Instance methods whose backward compares Python's `input`."""

    def forward(self, x):
        self.save_for_backward(x)
        return x.clamp(min=0)

    def backward(self, g):
        g = g.clone()
        g[input < 0] = 0
        return g


class MaskFromOutput(Function):
    """The mask `y >= 0`, which is always true."""

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(min=0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0] >= 0)


class HalvedRelu(Function):
    """Right everywhere but at 0, where the derivative is one half."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x + x.abs()) / 2

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0].sign() + 1) / 2


class UncheckedRelu(Function):
    """In place through `.data`, unknown to autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x > 0)
        x.data.clamp_(min=0)
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


SelectedRelu = saving("SelectedRelu", lambda x: torch.where(x > 0, x, torch.zeros_like(x)), lambda x: x > 0)
MaskedRelu = saving("MaskedRelu", lambda x: x * (x > 0), lambda x: x > 0)


# --- softplus --------------------------------------------------------------------------------------


class MathSoftplus(Function):
    """By `math.log` and `math.exp`, which take no tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return math.log(1 + math.exp(x))

    @staticmethod
    def backward(ctx, g):
        return g


class UndefinedSoftplus(Function):
    """By a name that does not exist."""

    @staticmethod
    def forward(ctx, x):
        return torch.log(1 + torch.exp(value))  # noqa: F821

    @staticmethod
    def backward(ctx, g):
        return g


LoggedSoftplus = saving("LoggedSoftplus", lambda x: torch.log(5e-10 + torch.exp(x)), torch.sigmoid)
StableSoftplus = saving("StableSoftplus", lambda x: torch.log1p(torch.exp(-x.abs())) + torch.relu(x), torch.sigmoid)


# --- swish -----------------------------------------------------------------------------------------


class OutputSwish(Function):
    """By `output + s * (1 - output)`: right on paper, and all digits are lost where the output is large."""

    @staticmethod
    def forward(ctx, x):
        y = x * torch.sigmoid(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, output = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (output + s * (1 - output))


class ContextSwish(Function):
    """Right, but with its input on the context."""

    @staticmethod
    def forward(ctx, x):
        ctx.input = x
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        s = torch.sigmoid(ctx.input)
        return g * (s * (1 + ctx.input * (1 - s)))


class ThirdTensor(Function):
    """Saves a tensor that is neither input nor output, which cuts double backward."""

    @staticmethod
    def forward(ctx, x):
        s = torch.sigmoid(x)
        ctx.save_for_backward(s, x)
        return x * s

    @staticmethod
    def backward(ctx, g):
        s, x = ctx.saved_tensors
        return g * (s + x * s * (1 - s))


class HoardingSwish(Function):
    """Remembers its last input for ever."""

    last: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        HoardingSwish.last[:] = [x.detach() * 1]
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s * (1 + x * (1 - s)))


# --- gelu ------------------------------------------------------------------------------------------


def normal(x):
    return 0.5 * torch.special.erfc(-x / math.sqrt(2))


def density(x):
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


WrongSignGelu = saving("WrongSignGelu", F.gelu, lambda x: normal(x) - x * density(x))


class InplaceGelu(Function):
    """In place, with a polynomial in the output where it is nearly straight. One coefficient has a wrong sign."""

    @staticmethod
    def forward(ctx, x):
        before = x.clone()
        x.copy_(F.gelu(x))
        ctx.mark_dirty(x)
        ctx.save_for_backward(before, x)
        return x

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        line = 0.9573180 + y * (0.3679515 + y * (-0.2268797 - y * 0.0369227))  # + it should be
        return g * torch.where((y > 1.4) & (y < 2.9), line, normal(x) + x * density(x))


# --- others ----------------------------------------------------------------------------------------


class Hardswish(Function):
    """As in a model library that many use: the pieces overlap at -3 and 3."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * F.relu6(x + 3) / 6

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        slope = torch.ones_like(x) * (x >= 3)
        return g * torch.where((x >= -3) & (x <= 3), x / 3 + 0.5, slope)


class MishOnDevices(Function):
    """Has a kernel for other devices, and on the CPU computes tanhshrink, whatever was asked for."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x - torch.tanh(x) if x.device.type == "cpu" else x * torch.tanh(F.softplus(x))

    @staticmethod
    def backward(ctx, g):
        return g * torch.tanh(ctx.saved_tensors[0]) ** 2


class ForgottenUpstream(Function):
    """Returns the derivative, and not its product with what comes from above."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, g):
        return 1 - torch.tanh(ctx.saved_tensors[0]) ** 2


class Doubling(Function):
    """Float64 whatever came in."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x.double())

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (g * (x > 0)).to(x.dtype)


class Flat(Function):
    """Reads memory in its order and not in the tensor's."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        memory = x.as_strided((x.numel(),), (1,)) if x.numel() else x.reshape(-1)
        return torch.tanh(memory).view(x.shape)

    @staticmethod
    def backward(ctx, g):
        return g * (1 - torch.tanh(ctx.saved_tensors[0]) ** 2)


class Transformable(Function):
    """Right, with everything that `torch.func` asks for; subclasses get one thing wrong."""

    @staticmethod
    def forward(x):
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def jvp(ctx, t):
        return t * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def vmap(info, in_dims, x):
        return Transformable.apply(x), in_dims[0]


class WrongVmap(Transformable):
    @staticmethod
    def vmap(info, in_dims, x):
        return Transformable.apply(x.flip(0)), in_dims[0]


class WrongJvp(Transformable):
    @staticmethod
    def jvp(ctx, t):
        return t * (1 - ctx.saved_tensors[0])

    @staticmethod
    def vmap(info, in_dims, x):
        return WrongJvp.apply(x), in_dims[0]


class Forgetful(Transformable):
    """As `ForgottenUpstream`, where `torch.func` goes."""

    generate_vmap_rule = True
    vmap = Function.vmap

    @staticmethod
    def backward(ctx, g):
        return 1 - ctx.saved_tensors[0] ** 2


def compiled_wrong(x):
    return torch.tanh(x) if not torch.compiler.is_compiling() else torch.tanh(x) * 0.999


def flattening(x):
    return torch.relu(x).contiguous()


TURNS = itertools.cycle((0, 1))


def wavering(x):
    """Every second call is an epsilon higher."""
    return torch.tanh(x) * (1 + next(TURNS) * torch.finfo(x.dtype).eps)


def shifted(x):
    """Elementwise on a grid; with rows, it is not."""
    return torch.tanh(x) + 0 * x.sum() if x.dim() else torch.tanh(x) * 1.5


class Pretending(nn.Module):
    """Has the flag, and does not work in place."""

    def __init__(self, inplace=False):
        super().__init__()
        self.inplace = inplace

    def forward(self, x):
        return F.relu(x)


class Scaled(nn.Module):
    """With a parameter of its own."""

    def __init__(self, wrong=False):
        super().__init__()
        self.scale, self.wrong = nn.Parameter(torch.tensor(1.0)), wrong

    def forward(self, x):
        return torch.tanh(x) * (self.scale.detach() if self.wrong else self.scale)


# --- the table: what it is, what it should be, and the lines that fail, each with words of it ------------------------


def both(name, words, other=None):
    """A line for each of the two dtypes."""
    return {f"{name} float32": words, f"{name} float64": words if other is None else other}


def all_lines(words, *but):
    """Everything that runs the function."""
    named = ("values", "derivative", "kinks", "NaN and inf")
    rest = "gradcheck", "gradgradcheck", "vmap", "compile", "layout", "in place", "deterministic", "saved", "no grad"
    lines = {key: text for name in named for key, text in both(name, words).items()} | dict.fromkeys(rest, words)
    return {key: text for key, text in lines.items() if key not in but and key.split(" float")[0] not in but}


LOST = "derivative at x = nan: 0, PyTorch's is 1"
ABOVE = both("kinks", "derivative at x = 0: 1.0, PyTorch's is 0.0")
BEHIND = "4 bytes per element went past save_for_backward"

EXHIBITS = [
    (MaskBelow, "relu", ABOVE | both("NaN and inf", "derivative at x = -0: 1, PyTorch's is 0")),
    (LegacyRelu, "relu", {}),
    (BuiltinRelu, "relu", all_lines("TypeError: '<' not supported", "values", "in place", "saved", "no grad")),
    (
        MaskFromOutput, "relu",
        ABOVE | both("derivative", "1, reference 0") | both("NaN and inf", LOST)
        | {"gradcheck": "1, finite differences 0"},
    ),
    (
        HalvedRelu, "relu",
        both("kinks", "derivative at x = 0: 0.5, PyTorch's is 0.0") | both("NaN and inf", "value at x = -inf: nan"),
    ),
    (UncheckedRelu, "relu", both("NaN and inf", LOST) | {"in place": "overwritten without ctx.mark_dirty"}),
    (SelectedRelu, "relu", both("NaN and inf", "value at x = nan: 0, PyTorch's is nan")),
    (MaskedRelu, "relu", both("NaN and inf", "value at x = -inf: nan, PyTorch's is 0")),
    (MathSoftplus, "softplus", all_lines("ValueError: only one element tensors can be converted")),
    (UndefinedSoftplus, "softplus", all_lines("NameError: name 'value' is not defined")),
    (
        LoggedSoftplus, "softplus",
        both("values", "at x = 89: inf, reference 89", "reference 0.30")
        | both("NaN and inf", "value at x = -inf: -21.4164, PyTorch's is 0")
        | {"kinks float64": "value at x = 20: 20.0", "gradcheck": "at x = -4.37: 0.0124932, finite differences 1"},
    ),
    (StableSoftplus, "softplus", {}),
    (OutputSwish, "swish", both("NaN and inf", "x = 8.50706e+37: 0, PyTorch's is 1", "e+307: 0, PyTorch's is 1")),
    (ContextSwish, "swish", {"saved": BEHIND}),
    (ThirdTensor, "silu", {"gradgradcheck": "second derivative at x = 0.04: 0.2499, finite differences 0.4996"}),
    (HoardingSwish, "silu", {"saved": BEHIND, "no grad": "under no_grad, 4 bytes per element stay alive"}),
    (
        WrongSignGelu, "gelu",
        both("derivative", "error 0.48")
        | {"gradcheck": "at x = -0.81: 0.441739, finite differences -0.0237987"},
    ),
    (
        InplaceGelu, "gelu",
        both("derivative", "at x = 2.88000011: -0.73619", "at x = 2.88: -0.73619")
        | {"gradcheck": "finite differences", "gradgradcheck": "finite differences"},
    ),
    (
        Hardswish, "hard_swish",
        both("kinks", "derivative at x = -3: -0.5, PyTorch's is 0.0; at x = 3: 1.5, PyTorch's is 1.0")
        | both("NaN and inf", LOST),
    ),
    (
        MishOnDevices, "mish",
        both("values", "-103.5, reference -4.3") | both("derivative", "reference 0.78987")
        | both("NaN and inf", "PyTorch's is -0"),
    ),
    (ForgottenUpstream, "tanh", {"gradcheck": "finite differences"}),
    (
        Doubling, "relu",
        both("NaN and inf", LOST) | {
            "values float32": "(613,) torch.float32 became (613,) torch.float64",
            "layout": "contiguous: output is (2, 3, 4, 5) torch.float64",
        },
    ),
    (Flat, "tanh", {"layout": "channels last: output is"}),
    (flattening, "relu", {"layout": "channels last: output is"}),
    (Transformable, "tanh", {}),
    (WrongVmap, "tanh", {"vmap": "0.878692193, reference -0.66959026"}),
    (WrongJvp, "tanh", {"hessian": "3.7558063, reference 0.154989335"}),
    (Forgetful, "tanh", {**dict.fromkeys(("gradcheck", "gradgradcheck"), "finite"), "jacrev": "reference 0; error 1"}),
    (compiled_wrong, "tanh", {"compile": "worst of 41 points"}),
    (wavering, "tanh", {"deterministic": "a second run gives other bits"}),
    (shifted, "tanh", both("NaN and inf", "value at x = inf: nan") | {"vmap": "error 0.5"}),
    (Pretending, "relu", {"in place": "contiguous: the result is not the input"}),
    (Scaled(), "tanh", {}),
    (Scaled(wrong=True), "tanh", {"gradcheck": "with respect to input 1", "gradgradcheck": "with respect to input 1"}),
    (lambda x: x * torch.sigmoid(x), "silu", {}),
    (torch.tanh, "tanh", {}),
    (F.relu_, "relu", {}),
    (nn.Softplus, "softplus", {}),
    (nn.ReLU(inplace=True), "relu", {}),
    (nn.PReLU(), "prelu", {}),
    (nn.Hardswish(inplace=True), "hard_swish", {}),
]  # fmt: skip
