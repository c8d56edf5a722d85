"""What `check` says of activations that are right, and of hand-written ones as they circulate."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import time

import oracle
import pytest
import torch
from handwritten import EXHIBITS, LegacyRelu, LoggedSoftplus, MaskBelow, Scaled, StableSoftplus, ThirdTensor
from torch import nn
from torch.nn import functional as F

import actswap.nn
from actswap import checking, functional, manners, registry
from actswap.catalog import CATALOG
from actswap.checking import check, mathematics
from actswap.comparing import coarse, compare, every, grid, reference, step, ulp
from actswap.errors import TargetError, UnknownActivationError
from actswap.storages import NEITHER, kept
from actswap.subjects import Subject

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


# --- hand-written Functions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "like", "faults"), EXHIBITS, ids=lambda value: getattr(value, "__name__", type(value).__name__)
)
def test_hand_written_functions(what, like, faults):
    report = check(what, like=like)
    assert {line.name for line in report.failures} == set(faults), str(report)
    for name, words in faults.items():
        assert words in report[name].detail
    assert str(report).count("FAIL") == len(faults)


def test_every_property_has_something_that_fails_it():
    shown = {name.removesuffix(" float64").removesuffix(" float32") for _, _, faults in EXHIBITS for name in faults}
    assert shown == {line.name.removesuffix(" float32") for line in check("relu", dtypes=[torch.float32])}


def test_a_line_says_where_and_by_how_much():
    report = check(LoggedSoftplus, like="softplus", dtypes=[torch.float32])
    line = report["values float32"]
    assert {"x", "got", "want", "error", "ulps", "bound"} <= line.data.keys()
    assert all(word in str(report) for word in ("worst of", "at x = ", "reference", "ulp", "bound"))


def test_what_pytorch_refuses_is_noted_of_others_and_a_fault_of_ours(monkeypatch):
    for name in ("vmap", "jacrev", "hessian"):
        line = check(StableSoftplus, like="softplus", dtypes=[])[name]
        assert line.outcome == "note"
        assert "it must override the setup_context staticmethod" in line.detail
    line = check("rrelu", dtypes=[])["vmap"]
    assert line.outcome == "note"
    assert line.detail.endswith("(of PyTorch's own op as well)")

    def refuse(*args):
        raise RuntimeError("not today. Perhaps tomorrow")

    monkeypatch.setattr(actswap.autograd, "_transforming", refuse)
    report = check("silu", dtypes=[])
    assert failed(report) == {"vmap", "jacrev", "hessian"}
    assert report["jacrev"].detail == "refused: not today"


def test_what_is_saved_is_named_and_of_ours_it_is_what_the_definition_says():
    line = check(ThirdTensor, like="silu", dtypes=[])["saved"]
    assert line.detail == "bytes per element: a tensor that is neither input nor output 4, the input 4"
    assert line.data == {"bytes_per_element": 8.0, "neither input nor output": 4.0, "input": 4.0}
    it = Subject("sigmoid", F.silu, truth=CATALOG["sigmoid"], own=True)
    line = manners.saved(it, "saved", "cpu")
    assert line.outcome == "fail"
    assert line.detail == "bytes per element: the input 4; the definition says the output"


def test_parameters_count():
    assert check(nn.Softplus(beta=2.0), like=actswap.nn.Softplus(beta=2.0))
    for what, like in [(nn.Softplus(beta=2.0), "softplus"), (actswap.nn.ReLU6(), "hardtanh")]:
        assert check(what, like=like, dtypes=[torch.float32])["values float32"].outcome == "fail"


def test_without_a_reference_it_says_so():
    report = check(F.gelu)
    assert report
    assert report["values float32"].outcome == "note"
    assert "like=" in report["values float32"].detail


def test_in_place_forms_are_compared():
    assert check("silu", dtypes=[])["in place"].outcome == "pass"
    assert check(nn.ReLU, like="relu", dtypes=[])["in place"].outcome == "pass"
    assert check(F.gelu, like="gelu", dtypes=[])["in place"].detail == "no in-place form; the input is left alone"
    report = check(F.relu_, like="relu", dtypes=[])
    assert report["in place"].detail == "it overwrites its input, and says so; it has no other form"
    assert report["saved"].detail == "bytes per element: the output 4"


def test_a_result_that_is_no_tensor_or_has_no_gradient():
    report = check(lambda x: None, like="identity", dtypes=[torch.float32])
    assert report["values float32"].detail == "it returned NoneType, and no tensor"
    report = check(torch.Tensor.detach, like="identity", dtypes=[torch.float32])
    assert report["values float32"].outcome == "pass"
    assert "does not require grad" in report["derivative float32"].detail


def test_the_report_fits_a_narrow_terminal(monkeypatch):
    report = check(MaskBelow, like="relu", dtypes=[torch.float32])
    wide, narrow = report.table().splitlines(), report.table(width=72).splitlines()
    assert len(wide) == 1 + len(report.lines)
    assert max(map(len, narrow)) <= 72 < max(map(len, wide))
    assert " ".join(report.table().split()) == " ".join(report.table(width=72).split())
    assert str(report) == report.table()

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert str(report) == report.table(width=72)


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
    with pytest.raises(TargetError, match="a class to check is an nn.Module or an autograd.Function"):
        check(dict)
    with pytest.raises(TargetError, match=r"try:   pass an instance: check\(Bilinear"):
        check(nn.Bilinear)
    with pytest.raises(TargetError, match="PReLU with several values of weight"):
        check(nn.PReLU(3), like="prelu")
    with pytest.raises(TargetError, match="prelu with several values of weight"):
        check(actswap.nn.PReLU(num_parameters=3))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_instance_of_a_function_is_its_class_unless_it_has_state():
    report = check(LegacyRelu(), like="relu", dtypes=[torch.float32])
    assert report and report.title == "check LegacyRelu like relu"
    stateful = LegacyRelu()
    stateful.slope = 0.1
    with pytest.raises(TargetError, match="given: LegacyRelu with slope"):
        check(stateful, like="relu")


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_scripted_functions_and_modules():
    def swish(x):
        return x * torch.sigmoid(x)

    report = check(torch.jit.script(swish), like="silu", dtypes=[torch.float32])
    assert report and report.title == "check swish like silu", str(report)
    report = check(torch.jit.script(nn.Hardswish(inplace=False)), like="hardswish", dtypes=[torch.float32])
    assert report and report.title == "check Hardswish like hardswish", str(report)
    assert report["compile"].outcome == "note"


def test_a_check_leaves_no_trace():
    module = nn.PReLU()
    before = torch.get_rng_state(), torch.get_num_threads(), module.weight._version
    report = check(module, like="prelu")
    assert report and check("rrelu"), str(report)
    assert str(check(F.dropout)) == str(check(F.dropout))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_num_threads(), module.weight._version)
    assert module.weight.grad is None


def test_the_caller_may_be_in_any_mode():
    usual = str(check("softplus", dtypes=[torch.float16]))
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            assert str(check("softplus", dtypes=[torch.float16])) == usual
    torch.set_default_dtype(torch.float64)
    try:
        assert str(check("softplus", dtypes=[torch.float16])) == usual
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("variable", "words"),
    [("TORCHDYNAMO_DISABLE", "PyTorch's compiler is switched off"), ("TORCH_COMPILE_DISABLE", "no compiled frames")],
)
def test_a_compiler_that_is_switched_off_proves_nothing(variable, words):
    script = "import actswap; line = actswap.check('relu', dtypes=[])['compile']; print(line.outcome, line.detail)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ, variable: "1"}
    )
    assert done.stdout.startswith("note ") and words in done.stdout


def test_a_random_activation_is_the_same_under_one_seed_and_like_nothing():
    with pytest.raises(TargetError, match="rrelu(.|\n)*eval mode"):
        check(actswap.nn.RReLU())
    with pytest.raises(TargetError, match="RReLU(.|\n)*eval mode"):
        check(nn.RReLU(), like="rrelu")
    for module in (actswap.nn.RReLU(), nn.RReLU()):
        report = check(module.eval(), like="rrelu", dtypes=[torch.float32])
        assert report, str(report)
    line = check(F.dropout, dtypes=[])["deterministic"]
    assert line.outcome == "pass"
    assert line.detail.startswith("random; under one seed")


def test_a_module_is_differentiated_by_its_parameters_too():
    report = check(Scaled(), like="tanh", dtypes=[])
    assert report["gradcheck"].detail == "13 points, float64 and 1 trained parameter"


def test_saved_states_are_checked_through_the_module():
    report = check(actswap.nn.Softplus(save="output"))
    assert report, str(report)
    assert report["saved"].data == {"bytes_per_element": 4.0, "output": 4.0}
    report = check(actswap.nn.PReLU(num_parameters=1))
    assert report, str(report)
    assert "1 trained parameter per channel" in report["gradcheck"].detail


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", EVERY)
def test_every_built_in_passes_at_every_number(activation):
    report = check(activation, exhaustive=True)
    assert report, str(report)


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


def test_the_reference_has_numbers_far_out_in_the_tails():
    for name, x in [("sqrtsoftplus", -2000.0), ("laplace", -1e9), ("clipped_gelu", -1e10)]:
        assert [t.item() for t in reference(CATALOG[name], torch.tensor([x]), CATALOG[name].bind({}))[:2]] == [0, 0]
    assert reference(CATALOG["relu"], torch.tensor([math.nan]), {})[0].isnan()


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
    assert kept(lambda t: t * torch.sigmoid(t), x).kinds == {"input": 400, NEITHER: 400}
    assert kept(lambda t: t + 1, x).total == 0
    assert kept(F.silu, x, grad=False).total == 0
