"""What `check` says of activations that are right, and of hand-written ones as they circulate."""

from __future__ import annotations

import json
import math
import time

import oracle
import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

import actswap.nn
from actswap import checking, functional, registry
from actswap.catalog import CATALOG
from actswap.checking import check, mathematics
from actswap.comparing import coarse, compare, every, grid, kept, step, ulp
from actswap.errors import TargetError, UnknownActivationError

EVERY = [pytest.param(a, id=a.name) for a in CATALOG.values()]


def failed(report) -> set[str]:
    return {line.name for line in report.failures}


@pytest.mark.parametrize("activation", EVERY)
def test_every_built_in_passes_and_says_what_it_saves(activation):
    report = check(activation)
    assert report, str(report)
    saved = report["saved"].data["bytes_per_element"]
    assert saved == (4 if activation.states else 0)
    surrogate = report["gradcheck"].outcome == "note"
    assert surrogate == activation.surrogate == (report["gradgradcheck"].outcome == "note")
    json.loads(report.to_json())


OTHERS = [
    pytest.param(a, key, params, id=f"{a.name}-{key}-{params}")
    for a in CATALOG.values()
    for params in [{}, *oracle.AWKWARD.get(a.name, [])]
    for key, state in a.states.items()
    if state.forward is None and (state.allowed is None or state.allowed(a.bind(params)))
    if key != a.save or params
]


@pytest.mark.parametrize(("activation", "key", "params"), OTHERS)
def test_every_other_state_and_awkward_parameters_pass(activation, key, params):
    for dtype in checking.OURS:
        line = mathematics(activation, params, dtype, "cpu", key)
        assert line.outcome == "pass", line.detail


# --- a museum of hand-written Functions ----------------------------------------------------------


class MaskBelow(Function):
    """A popular relu: the gradient at 0 is 1."""

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


class MultipliedRelu(Function):
    """A mask by multiplication: NaN's gradient becomes 0, and 0 * inf NaN."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, torch.zeros_like(x))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x > 0)


class LoggedSoftplus(Function):
    """A popular softplus with a small number against log(0)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.log(5e-10 + torch.exp(x))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.sigmoid(x)


class ScalarSoftplus(Function):
    """By `math`, and with a name that does not exist."""

    @staticmethod
    def forward(ctx, x):
        return math.log(1 + math.exp(value))  # noqa: F821

    @staticmethod
    def backward(ctx, g):
        return g


class StableSoftplus(Function):
    """The stable softplus."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.log1p(torch.exp(-x.abs())) + torch.relu(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.sigmoid(x)


class ContextSwish(Function):
    """Right, but with its input on the context."""

    @staticmethod
    def forward(ctx, x):
        ctx.input = x
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        s = torch.sigmoid(ctx.input)
        y = ctx.input * s
        return g * (y + s * (1 - y))


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


class WrongSignGelu(Function):
    """Off by a sign."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return g * (0.5 * torch.special.erfc(-x / math.sqrt(2)) - x * density)


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


def flattening(x):
    return torch.relu(x).contiguous()


def shrinking(x):
    return x - x.exp().div(x.exp() + 1).mul(2).sub(1)


SMALL = {"saved"}
MUSEUM = [
    (MaskBelow, "relu", {"kinks float32", "kinks float64", "NaN and inf float32", "NaN and inf float64"}),
    (LegacyRelu, "relu", set()),
    (MultipliedRelu, "relu", {"NaN and inf float32", "NaN and inf float64"}),
    (StableSoftplus, "softplus", set()),
    (ContextSwish, "silu", {"saved"}),
    (ContextSwish, "swish", {"saved"}),
    (ThirdTensor, "silu", {"gradgradcheck"}),
    (WrongSignGelu, "gelu", {"derivative float32", "derivative float64", "gradcheck"}),
    (flattening, "relu", {"layout"}),
    (lambda x: x * torch.sigmoid(x), "silu", set()),
    (torch.tanh, "tanh", set()),
    (nn.Softplus, "softplus", set()),
    (nn.Softplus(beta=2.0), actswap.nn.Softplus(beta=2.0), set()),
    (nn.ReLU(inplace=True), "relu", set()),
    (nn.Hardswish(inplace=True), "hard_swish", set()),
    (actswap.nn.ReLU6(), "hardtanh", None),
    (nn.Softplus(beta=2.0), "softplus", None),
]


@pytest.mark.parametrize(("what", "like", "faults"), MUSEUM, ids=lambda value: getattr(value, "__name__", str(value)))
def test_hand_written_functions(what, like, faults):
    report = check(what, like=like)
    if faults is None:
        assert any(line.name.startswith("values") for line in report.failures)
    else:
        assert failed(report) == faults, str(report)


def test_the_popular_softplus_is_told_where_and_by_how_much():
    report = check(LoggedSoftplus, like="softplus", dtypes=[torch.float32])
    line = report["values float32"]
    assert line.outcome == "fail"
    assert {"x", "got", "want", "error", "ulps", "bound"} <= line.data.keys()
    assert all(word in str(report) for word in ("worst of", "at x = ", "reference", "ulp", "bound"))
    assert report["NaN and inf float32"].outcome == "fail"  # log(5e-10) where softplus is 0


def test_the_popular_relu_is_told_its_value_at_zero():
    report = check(MaskBelow, like="relu", dtypes=[torch.float32])
    assert "derivative at x = 0: 1.0, PyTorch's is 0.0" in report["kinks float32"].detail


def test_an_exception_is_a_finding():
    report = check(ScalarSoftplus, like="softplus")
    assert "NameError: name 'value' is not defined" in report["values float32"].detail
    report = check(BuiltinRelu, like="relu")
    assert report["values float32"].outcome == "pass"
    assert "TypeError" in report["derivative float32"].detail
    assert "TypeError" in report["gradcheck"].detail


def test_a_change_of_dtype_is_named():
    assert "float32 became" in check(Doubling, like="relu", dtypes=[torch.float32])["values float32"].detail


def test_keeping_a_tensor_past_save_for_backward_is_named():
    line = check(ContextSwish, like="silu")["saved"]
    assert "4 bytes per element went past save_for_backward" in line.detail
    assert "neither input nor output" in check(ThirdTensor, like="silu")["saved"].detail


def test_without_a_reference_it_says_so():
    report = check(F.gelu)
    assert report
    assert report["values float32"].outcome == "note"
    assert "like=" in report["values float32"].detail


def test_in_place_forms_are_compared():
    assert check("silu")["in place"].outcome == "pass"
    assert check(nn.ReLU, like="relu")["in place"].outcome == "pass"
    assert check(F.gelu, like="gelu")["in place"].outcome == "note"

    class Pretending(nn.Module):
        def __init__(self, inplace=False):
            super().__init__()
            self.inplace = inplace

        def forward(self, x):
            return F.relu(x)

    line = check(Pretending, like="relu")["in place"]
    assert line.outcome == "fail"
    assert "the result is not the input" in line.detail


def test_what_it_takes():
    for what in ("swish", CATALOG["silu"], actswap.nn.SiLU, actswap.nn.SiLU(), functional.silu):
        report = check(what, like="silu", dtypes=[torch.float32])
        assert report, str(report)
    with pytest.raises(UnknownActivationError, match="did you mean"):
        check("softpluss")
    with pytest.raises(TargetError, match=r"check takes a name"):
        check(3)
    with pytest.raises(TargetError, match="`like` is a known activation"):
        check("relu", like=F.relu)


def test_saved_states_are_checked_through_the_module():
    report = check(actswap.nn.Softplus(save="output"))
    assert report, str(report)
    assert report["saved"].data == {"bytes_per_element": 4.0, "output": 4.0}
    report = check(actswap.nn.PReLU(num_parameters=1))
    assert report, str(report)
    assert "1 trained parameters per channel" in report["gradcheck"].detail


def test_exhaustive_reads_every_bit_pattern():
    report = check("quick_gelu", dtypes=[torch.float16], exhaustive=True)
    assert report["values float16"].data["points"] == len(every(torch.float16)) == 2 * 31 * 1024
    assert len(every(torch.bfloat16)) == 2 * 255 * 128
    assert len(every(torch.float32)) == len(every(torch.float64)) > 65000


def test_mathematics_is_quick_remembered_and_fails_in_one_line():
    checking._mathematics.cache_clear()
    mathematics(CATALOG["mish"], {}, torch.float32)
    checking._mathematics.cache_clear()
    start = time.perf_counter()
    line = mathematics(CATALOG["mish"], {}, torch.float32)
    assert time.perf_counter() - start < 0.05 * 5  # a busy machine is given five times the limit
    assert line is mathematics(CATALOG["mish"], {}, torch.float32)
    assert line.name == "mathematics"
    assert "mish, float32: values within" in line.detail
    assert mathematics(CATALOG["prelu"], {"weight": torch.ones(3)}, torch.float32).outcome == "pass"
    wrong = registry.Activation(
        name="wrong", forward=torch.tanh, reference=torch.tanh,
        states={"input": registry.State(lambda x: 1 - torch.tanh(x) ** 2 * 1.01, torch.zeros_like)},
    )  # fmt: skip
    line = mathematics(wrong, {}, torch.float32)
    assert line.outcome == "fail"
    assert "wrong, float32: derivative is wrong\nworst of" in line.detail
    assert "Half" in mathematics(CATALOG["rrelu"], {"training": True}, torch.float16).detail


def test_coarse_finds_wrong_derivatives():
    for activation in CATALOG.values():
        assert coarse(activation).outcome == "pass"


# --- the tools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_steps_and_ulps(dtype):
    info = torch.finfo(dtype)
    one = torch.tensor([1.0], dtype=dtype)
    assert step(one, 1).item() == 1 + info.eps
    assert step(one, -1).item() == 1 - info.eps / 2
    zero = torch.tensor([0.0, -0.0], dtype=dtype)
    assert (step(zero, 1) > 0).all()
    assert (step(zero, -1) < 0).all()
    assert step(step(-one, 2), -2).equal(-one)
    assert ulp(torch.tensor([1.0, 1.5, -2.0, 0.75]).double(), dtype).tolist() == [
        info.eps, info.eps, 2 * info.eps, info.eps / 2,
    ]  # fmt: skip


def test_the_grid_avoids_the_kinks_and_stands_close_to_them():
    points = grid((0.0, 3.0), torch.float32)
    assert points.isfinite().all()
    assert len(points.unique()) == len(points)
    assert not ((points == 0) | (points == 3)).any()
    assert (points.sub(3).abs() < 1e-6).sum() == 2


def test_a_comparison_counts_nan_and_infinity():
    x = torch.tensor([1.0, 2.0])
    assert not compare(x, torch.tensor([1.0, math.nan]), x.double()).passed
    assert not compare(x, torch.tensor([1.0, math.inf]), x.double()).passed
    assert compare(x, torch.tensor([math.nan, 2.0]), torch.tensor([math.nan, 2.0])).passed
    assert compare(x.half(), torch.tensor([1.0, math.inf]).half(), torch.tensor([1.0, 1e6])).passed
    worst = compare(x, x + torch.tensor([0.0, 1.0]), x.double())
    assert (worst.x, worst.got, worst.want, worst.error) == (2.0, 3.0, 2.0, 1.0)
    assert compare(x[:0], x[:0], x[:0]).passed


def test_kept_counts_what_only_the_graph_holds():
    x = torch.randn(100)
    assert kept(torch.sigmoid, x).kinds == {"output": 400}
    assert kept(F.silu, x).kinds == {"input": 400}
    assert kept(lambda t: t * torch.sigmoid(t), x).kinds == {"input": 400, "neither input nor output": 400}
    assert kept(lambda t: t + 1, x).total == 0
    assert kept(F.silu, x, grad=False).total == 0
