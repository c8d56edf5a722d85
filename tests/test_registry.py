"""Names, aliases, and activations that users add."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import actswap.nn
from actswap import autograd, functional, registry
from actswap.activation import Activation, Domain, State
from actswap.catalog import CATALOG
from actswap.checking import check
from actswap.errors import RegistrationError, UnknownActivationError
from actswap.registry import get, names, register, unregister
from actswap.storages import kept

# torch.func loads PyTorch's own decompositions by torch.jit.script, which warns
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _tidy():
    before = set(names())
    yield
    for name in set(names()) - before:
        unregister(name)
    registry._registered.pop("relu", None)


def test_names_and_aliases():
    assert get("swish") is CATALOG["silu"]
    assert get("Hard-Swish") is CATALOG["hardswish"]
    assert get(CATALOG["relu"]) is CATALOG["relu"]
    assert set(names()) >= set(CATALOG)  # the doctests register one more
    assert [a.name for a in registry.definitions()] == names() == sorted(names())


def test_a_typo_gets_the_nearest_names():
    with pytest.raises(UnknownActivationError, match=r"given: 'softpluss'\n.*did you mean 'softplus'"):
        get("softpluss")
    with pytest.raises(UnknownActivationError, match=r"actswap\.names\(\) lists every name"):
        get("qqqq")


def test_registering_a_function_makes_everything():
    activation = register(
        "cubed", lambda x, scale=1.0: scale * x**3, derivative=lambda x, scale: 3 * scale * x**2,
        aliases=("cube3",), domains={"scale": Domain(0.0, open=True)},
    )  # fmt: skip
    assert get("cube3") is activation
    assert activation in registry.definitions()
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    y = functional.cubed(x, scale=2.0)
    assert y.grad_fn.name() == "CubedBackward"
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(second, 12 * x.detach())
    torch.testing.assert_close(third, torch.full_like(x, 12.0))
    torch.testing.assert_close(
        torch.func.hessian(lambda t: functional.cubed(t).sum())(x.detach()).diagonal(), 6 * x.detach()
    )
    module = actswap.nn.Cubed(scale=3.0, inplace=True)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert (again.scale, again.inplace, type(again)) == (3.0, True, actswap.nn.Cubed)
        assert torch.equal(again(x.detach().clone()), 3 * x.detach() ** 3)
    assert check("cubed", dtypes=[torch.float64])
    assert kept(functional.cubed, torch.randn(10)).kinds == {"input": 40}


def test_registering_as_a_decorator_returns_the_function():
    @register("bent", derivative=lambda x: x / torch.sqrt(x * x + 1))
    def bent(x):
        return torch.sqrt(x * x + 1)

    assert bent(torch.zeros(1)).item() == 1.0
    assert check("bent", dtypes=[torch.float32])


def test_without_a_derivative_autograd_finds_it():
    activation = register("plain_cube", lambda x, power=3.0: x**power)
    assert activation.states == {}
    for inplace in (False, True):
        x = torch.tensor([1.0, -2.0], requires_grad=True)
        y = functional.plain_cube(x * 1, inplace=inplace)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.autograd.grad(first.sum(), x)[0].tolist() == [6.0, -12.0]
    assert check("plain_cube", dtypes=[torch.float64])["gradgradcheck"].outcome == "pass"
    torch.testing.assert_close(
        torch.vmap(torch.func.grad(functional.plain_cube))(torch.tensor([2.0])), torch.tensor([12.0])
    )


def test_from_the_output():
    register(
        "my_sigmoid", torch.sigmoid, derivative=lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
        derivative_from_output=lambda y: y * (1 - y), save="output",
    )  # fmt: skip
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    for save in ("auto", "input", "output"):
        torch.autograd.gradgradcheck(lambda t, save=save: functional.my_sigmoid(t, save=save), x)
    assert kept(functional.my_sigmoid, torch.randn(10)).kinds == {"output": 40}


def test_trained_parameters_of_ones_own():
    register(
        "scaled_tanh", lambda x, scale=1.0: torch.tanh(scale * x), learnable=("scale",),
        derivative=lambda x, scale: scale * (1 - torch.tanh(scale * x) ** 2),
        gradients={"scale": lambda x, scale: x * (1 - torch.tanh(scale * x) ** 2)},
    )  # fmt: skip
    module = actswap.nn.ScaledTanh(num_parameters=3)
    assert list(module.state_dict()) == ["scale"]
    module(torch.randn(2, 3, 4)).sum().backward()
    assert module.scale.grad.shape == (3,)
    assert check("scaled_tanh", dtypes=[torch.float32])
    register("free_tanh", lambda x, scale=1.0: torch.tanh(scale * x), learnable=("scale",))
    module = actswap.nn.FreeTanh(num_parameters=3)
    module(torch.randn(2, 3, 4)).sum().backward()
    assert module.scale.grad.shape == (3,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"derivative": lambda x: 3 * x**2 + 0.1}, r"the derivative from the input is wrong\n.*worst at x = "),
        ({"derivative": lambda x: 3 * x**2, "second": lambda x: x}, "the second derivative from the input is wrong"),
        ({"derivative": lambda x: x * float("nan")}, "the derivative from the input is wrong"),
        (
            {"derivative": lambda x: 3 * x**2, "derivative_from_output": lambda y: y},
            "the derivative from the output is wrong",
        ),
    ],
)
def test_a_wrong_derivative_is_refused_with_the_worst_point(options, words):
    with pytest.raises(RegistrationError, match=words):
        register("cubed", lambda x: x**3, **options)
    assert "cubed" not in names()
    assert not hasattr(functional, "cubed") or functional.cubed.__name__ == "cubed"


def test_a_wrong_gradient_of_a_parameter_is_refused():
    with pytest.raises(RegistrationError, match=r"the gradient of scale is wrong\n.*worst at x"):
        register(
            "scaled", lambda x, scale=1.0: scale * x, learnable=("scale",), derivative=lambda x, scale: scale + 0 * x,
            gradients={"scale": lambda x, scale: -x},
        )  # fmt: skip
    with pytest.raises(
        RegistrationError, match=r"learnable parameters need their gradients too\n.*\n.*'scale': lambda"
    ):
        register(
            "scaled", lambda x, scale=1.0: scale * x, learnable=("scale",), derivative=lambda x, scale: scale + 0 * x
        )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x / x.sum(), "not elementwise"),
        (lambda x: x.double(), "changes shape or dtype"),
        (lambda x: x[:1], "changes shape or dtype"),
    ],
)
def test_what_is_no_activation_is_refused(function, words):
    with pytest.raises(RegistrationError, match=words):
        register("strange", function)


def test_names_are_taken_once():
    for taken in ("relu", "swish"):
        with pytest.raises(RegistrationError, match=r"this name is taken\n.*\n.*override=True"):
            register(taken, torch.relu)
    with pytest.raises(RegistrationError, match="lower-case identifier"):
        register("My Act", torch.relu)
    with pytest.raises(RegistrationError, match="is taken"):
        register("mine", torch.relu, aliases=("gelu",))
    with pytest.raises(RegistrationError, match="argument 'power' has no number as default"):
        register("mine", lambda x, power: x**power)
    with pytest.raises(RegistrationError, match="modules use this name themselves"):
        register("mine", lambda x, save=1.0: x * save)
    with pytest.raises(RegistrationError, match="keyword-only"):
        register("mine", lambda x, *, power=2.0: x**power)
    with pytest.raises(RegistrationError, match="no argument 'slope'"):
        register("mine", lambda x: x, domains={"slope": Domain()})
    builtin = functional.relu
    mine = register("relu", torch.nn.functional.relu6, override=True)
    try:
        assert get("relu") is mine
        assert functional.relu(torch.tensor(9.0)).item() == 6.0
        assert actswap.nn.ReLU.activation is CATALOG["relu"]
        again = pickle.loads(pickle.dumps(actswap.nn.module_class(mine)()))
        assert again(torch.tensor(9.0)).item() == 6.0
    finally:
        unregister("relu")
        functional._publish(CATALOG["relu"])
    assert functional.relu is builtin


def test_a_whole_definition_can_be_registered():
    definition = Activation(
        name="halved", forward=lambda x: x / 2, states={"input": State(lambda x: 0.5 + 0 * x, torch.zeros_like)},
    )  # fmt: skip
    assert register(definition) is definition
    assert autograd.apply(definition, torch.ones(1, requires_grad=True), {}).grad_fn.name() == "HalvedBackward"


def test_unpickling_without_the_registration_names_the_activation():
    register("passing", lambda x: x * 1.0)
    data = pickle.dumps(actswap.nn.Passing())
    unregister("passing")
    with pytest.raises(UnknownActivationError, match="passing"):
        pickle.loads(data)
    with pytest.raises(UnknownActivationError, match="relu"):
        unregister("relu")


def test_a_registered_activation_compiles_and_traces():
    torch.compiler.reset()
    register("quartic", lambda x: x**4, derivative=lambda x: 4 * x**3)
    x = torch.tensor([1.5, -1.0], requires_grad=True)
    compiled = torch.compile(lambda t: functional.quartic(t + 1), fullgraph=True, backend="aot_eager")
    (g,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(g, 4 * (x.detach() + 1) ** 3)
    traced = torch.fx.symbolic_trace(lambda t: functional.quartic(t))
    assert functional.quartic in [node.target for node in traced.graph.nodes]
