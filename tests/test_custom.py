"""Activations of a user's own, as an adversary would write them: registered, trained, stored, and put into models."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import actswap
import actswap.nn
from actswap import functional, registry
from actswap.activation import Domain
from actswap.catalog import CATALOG
from actswap.errors import ParameterError, RegistrationError, ShapeError, TargetError, UnknownActivationError
from actswap.registry import get, names, register, unregister

# torch.func loads PyTorch's own decompositions by torch.jit.script, which warns
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _tidy():
    before = dict(registry._registered)
    yield
    for name in set(registry._registered) - set(before):
        unregister(name)
    assert registry._registered == before


class Net(nn.Module):
    """A module site that works in place and a functional site that does."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        y = self.second(self.act(self.first(x)))
        F.relu_(y)
        return self.last(torch.relu(y + 0.1))


def gradients(model, x):
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    return [y, *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]


# Registration


def test_a_decorator_with_and_without_parentheses():
    @register
    def bare(x):
        return x * 2.0

    @register()
    def empty(x):
        return x * 3.0

    @register(derivative=lambda x: 2 * x)
    def unnamed(x):
        return x * x

    @register("named", derivative=lambda x, scale: scale + 0 * x)
    def other(x, scale=2.0):
        return scale * x

    for name, function in {"bare": bare, "empty": empty, "unnamed": unnamed, "named": other}.items():
        assert get(name).forward is function
        assert torch.equal(getattr(functional, name)(torch.ones(2)), function(torch.ones(2)))
    assert [bool(get(name).states) for name in ("bare", "empty", "unnamed", "named")] == [False, False, True, True]
    with pytest.raises(RegistrationError, match=r"lower-case identifier\n.*<lambda>"):
        register(lambda x: x)
    with pytest.raises(RegistrationError, match="this name is taken"):

        @register
        def relu(x):
            return x


WRONG = {
    "far out": (lambda x: x**3, lambda x: torch.where(x.abs() > 20, 0 * x, 3 * x * x), (), "worst at x = -290"),
    "left of a kink": (
        torch.relu, lambda x: torch.where((x > -0.01) & (x < 0), 0.5 + 0 * x, (x > 0).to(x.dtype)), (0.0,), "= -0.004",
    ),
    "right of a kink": (
        lambda x: F.relu(x - 2), lambda x: torch.where((x > 2) & (x < 2.01), 0 * x, (x > 2).to(x.dtype)), (2.0,),
        "= 2.004",
    ),
    "at infinity": (torch.tanh, lambda x: torch.where(x.isinf(), x, 1 - torch.tanh(x) ** 2), (), "x = inf: inf"),
    "a finite value at infinity": (
        torch.sigmoid, lambda x: torch.where(x == -torch.inf, 1.0, torch.sigmoid(x) * torch.sigmoid(-x)), (),
        "= -inf: 1",
    ),
    "hiding NaN": (torch.sin, lambda x: torch.cos(x).nan_to_num(), (), "x = nan"),
    "in bfloat16": (
        lambda x: x**3, lambda x: x if x.dtype == torch.bfloat16 else 3 * x * x, (), "in torch.bfloat16",
    ),
    "overflowing in float32": (
        F.softplus, lambda x: torch.exp(x) / (1 + torch.exp(x)), (), "x = 130 in torch.float32: nan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_derivative_that_is_wrong_in_one_corner_only_is_refused(case):
    forward, derivative, kinks, words = WRONG[case]
    with pytest.raises(RegistrationError, match=rf"the derivative from the input is wrong\n.*{words}"):
        register("mine", forward, derivative=derivative, kinks=lambda params: kinks)
    assert "mine" not in names()


def test_a_derivative_that_autograd_cannot_compare_is_not_refused():
    register("bent", lambda x: torch.sqrt(x * x + 1), derivative=lambda x: x / torch.sqrt(x * x + 1))
    register("stopped", lambda x: torch.from_numpy(x.numpy().copy()) if x.dtype != torch.bfloat16 else x.clone(),
             derivative=torch.ones_like)  # fmt: skip


def test_every_builtin_definition_would_be_admitted():
    for definition in CATALOG.values():
        assert register(definition, override=True) is definition
        unregister(definition.name)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda x: x.mul_(2), r"the forward changes its input\n.*out of place"),
        (lambda x: x * torch.rand_like(x), r"the forward is random\n.*differ"),
        (lambda x: F.dropout(x, 0.5, training=True), "the forward is random"),
        (lambda x: x.flatten(), r"changes shape or dtype\n.*\(1, 1, \d+\) torch.float64 became \(\d+,\)"),
        (
            lambda x: x.float() if x.dtype == torch.bfloat16 else x * 1,
            r"changes shape or dtype\n.*torch.bfloat16 became",
        ),
        (lambda x: x.float(), "changes shape or dtype"),
        (lambda x: x.unsqueeze(0), "changes shape or dtype"),
        (lambda x: None, r"gives no tensor\n.*became NoneType"),
        (lambda x: (x, x), r"gives no tensor\n.*became tuple"),
        (lambda x: x.unheard(), r"the forward fails\n.*AttributeError.*unheard"),
        (lambda x: x - x.mean(dim=1), r"the forward fails\n.*on \(\d+,\) torch.float64: IndexError"),
        (lambda x: x.cumsum(0) if x.dim() else x, "not elementwise"),
    ],
)
def test_a_forward_that_is_no_elementwise_function_is_refused(forward, words):
    before = torch.get_rng_state()
    with pytest.raises(RegistrationError, match=words):
        register("mine", forward)
    assert "mine" not in names()
    assert torch.equal(torch.get_rng_state(), before), "registering draws no numbers"


def test_parameters_are_checked_at_registration_call_and_replace():
    positive = Domain(0.0, open=True)
    with pytest.raises(RegistrationError, match=r"mine: rate must be > 0\n.*default -1"):
        register("mine", lambda x, rate=-1.0: x * rate, domains={"rate": positive})
    with pytest.raises(RegistrationError, match=r"the values of rate are a Domain\n.*\(0, 1\)"):
        register("mine", lambda x, rate=0.5: x * rate, domains={"rate": (0, 1)})
    register("mine", lambda x, rate=1.0: x * rate, domains={"rate": positive})
    register("taught", lambda x, rate=1.0: x * rate, domains={"rate": positive}, learnable=("rate",))
    model, rule = Net(), r"rate must be > 0\n.*rate=-2.0"
    for call in (
        lambda: functional.mine(torch.ones(1), rate=-2.0),
        lambda: actswap.nn.Mine(rate=-2.0),
        lambda: actswap.replace(model, "relu", "mine", rate=-2.0),
        lambda: functional.taught(torch.ones(1), rate=-2.0),
        lambda: actswap.nn.Taught(rate=-2.0),
        lambda: actswap.nn.Taught(rate=torch.tensor([1.0, -2.0])),
        lambda: actswap.replace(model, "relu", "taught", rate=-2.0),
    ):
        with pytest.raises(ParameterError, match=rule):
            call()
    with pytest.raises(ParameterError, match=r"any number but 0\n.*alpha=0.0"):
        actswap.nn.Snake(alpha=torch.tensor([0.0]))
    assert type(model.act) is nn.ReLU and not actswap.history(model)


# Trained parameters


def _registered_taught(derivative: bool):
    written = {
        "derivative": lambda x, low, high: torch.where(x > 0, high + 0 * x, low + 0 * x),
        "gradients": {
            "low": lambda x, low, high: torch.where(x > 0, 0 * x, x),
            "high": lambda x, low, high: torch.where(x > 0, x, 0 * x),
        },
    }
    return register(
        "two_sided", lambda x, low=0.1, high=1.5: torch.where(x > 0, high * x, low * x), learnable=("low", "high"),
        kinks=lambda params: (0.0,), **(written if derivative else {}),
    )  # fmt: skip


SHAPES = [(5, 3), (5, 3, 2), (2, 3, 2, 2), (2, 3, 2, 2, 2), (4,), (), (0, 3), (1, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["prelu", "swish_beta", "snake", "star_relu", "xielu", "two_sided", "two_sided plain"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["one value", "per channel"])
@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
def test_gradients_of_trained_parameters_are_reduced_to_their_shape(name, shape, per_channel, inplace):
    activation = _registered_taught(name == "two_sided") if name.startswith("two_sided") else get(name)
    channels = shape[1] if per_channel and len(shape) > 1 else 1
    spread = torch.linspace(0.7, 1.3, channels, dtype=torch.float64)
    truths = {p.name: (spread * (p.default or 0.3)).requires_grad_() for p in activation.learnable}
    constants = {p.name: p.default for p in activation.parameters if not p.learnable}
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(shape, dtype=torch.float64)
    place = (1, -1) + (1,) * (len(shape) - 2) if len(shape) > 1 else (1,) * len(shape)
    shaped = {key: value.reshape(place) for key, value in truths.items()}
    formula = activation.reference or activation.forward
    y = formula(x, **shaped, **constants)
    want = torch.autograd.grad(y, [x, *truths.values()], upstream)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        leaf = x.detach().to(dtype).requires_grad_()
        values = {key: value.detach().to(dtype).requires_grad_() for key, value in truths.items()}
        module = actswap.nn.module_class(activation)(
            **{key: nn.Parameter(value.detach()) for key, value in values.items()}, inplace=inplace
        )
        result = getattr(functional, activation.name)(leaf * 1, **values, inplace=inplace)
        got = torch.autograd.grad(result, [leaf, *values.values()], upstream.to(dtype))
        trained = torch.autograd.grad(module(leaf * 1), [leaf, *module.parameters()], upstream.to(dtype))
        torch.testing.assert_close(result.double(), y, rtol=bound, atol=bound)
        for one, other, truth in zip(got, trained, want, strict=True):
            assert one.shape == other.shape == truth.shape
            assert one.dtype == dtype
            torch.testing.assert_close(one.double(), truth, rtol=bound, atol=bound)
            assert torch.equal(one, other)


def test_channels_that_do_not_fit_are_an_error():
    _registered_taught(True)
    for shape in ((2, 4), (3,), ()):
        for call in (functional.two_sided, lambda x, low: functional.prelu(x, low)):
            with pytest.raises((ShapeError, RuntimeError), match="channel|weight"):
                call(torch.zeros(shape, requires_grad=True), torch.ones(3))


def test_a_frozen_parameter_and_a_frozen_input_get_no_gradient():
    _registered_taught(True)
    x, low, high = torch.randn(2, 3), torch.ones(3, requires_grad=True), torch.ones(3)
    functional.two_sided(x, low, high).sum().backward()
    assert high.grad is None and low.grad.shape == (3,)
    torch.testing.assert_close(low.grad, x.clamp(max=0).sum(0))


# Names


def test_a_name_is_taken_over_twice_and_given_back():
    one = register("mine", lambda x: x * 1.0)
    for factor in (2.0, 3.0):
        with pytest.raises(RegistrationError, match=r"this name is taken\n.*'mine'\n.*override=True"):
            register("mine", lambda x, factor=factor: x * factor)
        newest = register("mine", lambda x, factor=factor: x * factor, override=True)
        assert get("mine") is newest and functional.mine(torch.ones(1)).item() == factor
    assert names().count("mine") == 1 and not registry.is_registered(one)
    for _ in range(2):
        register("relu", F.relu6, override=True)
        assert functional.relu(torch.tensor(9.0)).item() == 6.0
    unregister("relu")
    assert get("relu") is CATALOG["relu"] and functional.relu(torch.tensor(9.0)).item() == 9.0


def test_the_newest_owner_of_an_alias_has_it():
    register("first", lambda x: x * 1.0, aliases=("other",))
    second = register("second", lambda x: x * 2.0, aliases=("other",), override=True)
    assert get("other") is second
    third = register("third", lambda x: x * 3.0, aliases=("first", "swish"), override=True)
    assert get("first") is third and get("swish") is third and get("silu") is CATALOG["silu"]
    unregister("third")
    assert get("swish") is CATALOG["silu"] and get("first").name == "first"


def test_a_model_swapped_with_a_name_that_is_taken_over_keeps_its_own_and_is_restored():
    register("mine", lambda x: x * 2.0)
    model, x = Net(), torch.randn(5, 3)
    before, act = gradients(model, x), model.act
    actswap.replace(model, "relu", "mine")
    swapped = gradients(model, x)
    register("mine", lambda x: x * 5.0, override=True)
    assert all(map(torch.equal, gradients(model, x), swapped)), "what was put in stays"
    assert all(map(torch.equal, gradients(copy.deepcopy(model), x), swapped))
    with pytest.raises(pickle.PicklingError, match="Mine"):
        pickle.dumps(model)
    actswap.restore(model)
    assert type(model) is Net and model.act is act
    assert all(map(torch.equal, gradients(model, x), before))
    actswap.replace(model, "relu", "mine")
    assert not torch.equal(model(x), swapped[0])


def test_a_swapped_model_is_loaded_where_its_activation_is_registered(tmp_path):
    """In another process; where it is not registered, the error names it and says what to do."""
    (tmp_path / "theirs.py").write_text(
        textwrap.dedent(
            """
            import torch, actswap
            from torch import nn

            def use():
                actswap.register("mine", lambda x, rate=2.0: x * rate, derivative=lambda x, rate: rate + 0 * x)

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first, self.act = nn.Linear(3, 3), nn.ReLU()
                def forward(self, x):
                    return self.first(torch.relu(self.act(self.first(x))))
            """
        )
    )
    store = "theirs.use(); m = theirs.Net(); actswap.replace(m, 'relu', 'mine', rate=3.0); torch.save(m, 'model.pt'); "
    store += "torch.save(m(torch.ones(2, 3)), 'y.pt')"
    load = (
        "m = torch.load('model.pt', weights_only=False); assert torch.equal(m(torch.ones(2, 3)), torch.load('y.pt')); "
    )
    load += "assert m.act.rate == 3.0; assert type(actswap.restore(m)) is theirs.Net and type(m.act) is torch.nn.ReLU"

    paths = {**os.environ, "PYTHONPATH": str(Path(actswap.__file__).parent.parent)}

    def run(script):
        script = f"import torch, actswap, theirs; {script}"
        return subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, env=paths, capture_output=True, text=True, check=False
        )

    for script in (store, f"theirs.use(); {load}"):
        done = run(script)
        assert done.returncode == 0, done.stderr
    done = run(load)
    assert done.returncode == 1
    assert "UnknownActivationError" in done.stderr and "'mine'" in done.stderr and "register" in done.stderr


# Functions of the user's own


class New(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, 0.25 * x)

    @staticmethod
    def backward(ctx, g):
        return torch.where(ctx.saved_tensors[0] > 0, g, 0.25 * g)


class Setup(Function):
    @staticmethod
    def forward(x):
        return torch.where(x > 0, x, 0.25 * x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return torch.where(ctx.saved_tensors[0] > 0, g, 0.25 * g)


class Extra(Function):
    @staticmethod
    def forward(ctx, x, slope=0.25):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return torch.where(x > 0, x, slope * x)

    @staticmethod
    def backward(ctx, g):
        return torch.where(ctx.saved_tensors[0] > 0, g, ctx.slope * g), None


class Once(New):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return torch.where(ctx.saved_tensors[0] > 0, g, 0.25 * g)


class Legacy(Function):
    """State and constants on self."""

    slope = 0.25

    def forward(self, x):
        self.x, self.mask = x, x > 0
        return torch.where(self.mask, x, self.slope * x)

    def backward(self, g):
        assert self.x.shape == g.shape
        return torch.where(self.mask, g, self.slope * g)


class LegacyBase(Function):
    """Helpers that a subclass has, a static one, and a decorated backward."""

    def forward(self, x):
        self.save_for_backward(x)
        return x * self.factor(x)

    @once_differentiable
    def backward(self, g):
        (x,) = self.saved_tensors
        return g * self.factor(x)


class LegacySub(LegacyBase):
    low = 0.25

    def factor(self, x):
        return self.step(x, self.low)

    @staticmethod
    def step(x, low):
        return torch.where(x > 0, 1.0, low)


FUNCTIONS = [New, Setup, Extra, Once, Legacy, LegacySub]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_function_of_the_users_works_at_every_kind_of_site(function):
    model, x = Net(), torch.randn(6, 3)
    expected = copy.deepcopy(model)
    before = gradients(model, x)
    actswap.replace(expected, "relu", "leaky_relu", negative_slope=0.25, save="input")
    actswap.replace(model, "relu", function, example_inputs=x)
    assert [site.kind for site in actswap.history(model)[-1].sites] == ["module", "call", "call"]
    for got, want in zip(gradients(model, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(got, want)
    clone = copy.deepcopy(model)
    assert all(map(torch.equal, gradients(clone, x), gradients(model, x)))
    actswap.restore(model)
    assert all(map(torch.equal, gradients(model, x), before))


def test_two_calls_of_a_legacy_function_keep_their_state_apart():
    model = nn.Sequential(nn.ReLU(), nn.Linear(3, 3), nn.ReLU())
    actswap.replace(model, "relu", Legacy)
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    first, second = model(a), model(b)
    want = torch.autograd.grad(F.leaky_relu(model[1](F.leaky_relu(a, 0.25)), 0.25).sum(), a)[0]
    second.sum().backward()
    first.sum().backward()
    torch.testing.assert_close(a.grad, want)


class NoBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(min=0)


class LegacyNoBackward(Function):
    def forward(self, x):
        return x.clamp(min=0)


class Needs(Function):
    @staticmethod
    def forward(ctx, x, slope):
        return x * slope

    @staticmethod
    def backward(ctx, g):
        return g, None


class SetupNeeds(Setup):
    @staticmethod
    def forward(x, slope):
        return x * slope


class LegacyInit(Function):
    def __init__(self, slope):
        self.slope = slope

    def forward(self, x):
        return x * self.slope

    def backward(self, g):
        return g * self.slope


class LegacyInitBelow(LegacyInit):
    def helper(self):
        return 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (NoBackward, r"a Function needs a backward\n.*NoBackward"),
        (LegacyNoBackward, r"a Function needs a backward\n.*LegacyNoBackward"),
        (Needs, r"applied to one tensor\n.*Needs.forward needs 2 arguments\n.*lambda x: Needs.apply"),
        (SetupNeeds, r"applied to one tensor\n.*SetupNeeds.forward needs 2 arguments"),
        (LegacyInit, r"with an __init__ keeps state"),
        (LegacyInitBelow, r"with an __init__ keeps state"),
    ],
)
def test_a_function_that_cannot_be_put_in_is_refused_before_the_model_is_touched(function, words):
    model = Net()
    with pytest.raises(TargetError, match=words):
        actswap.replace(model, "relu", function)
    assert type(model) is Net and not actswap.history(model)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_instance_of_a_function_is_refused_with_the_way_out():
    model = Net()
    for new in (Legacy(), lambda: Legacy()):
        with pytest.raises(TargetError, match=r"no longer calls instances.*\n.*Legacy\(\)\n.*pass the class: Legacy"):
            actswap.replace(model, "relu", new)
    assert type(model) is Net
    actswap.replace(model, "relu", lambda x: Needs.apply(x, 2.0))
    assert torch.isfinite(model(torch.ones(1, 3))).all()


def test_a_report_says_that_autograd_differentiates_the_forward():
    register("plainly", lambda x: x * torch.sigmoid(x))
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    actswap.replace(model, "relu", "plainly", example_inputs=torch.randn(2, 3))
    assert "autograd" in str(actswap.history(model)[-1].report)
    assert actswap.check("plainly", dtypes=[torch.float32]), "also compiled"
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    with pytest.raises(UnknownActivationError):
        actswap.replace(nn.Sequential(nn.ReLU()), "relu", "plainlyy")
