"""Second derivatives by hand: what they save, that they are right in every use, and what compiling says."""

from __future__ import annotations

import math
from functools import partial

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

import actswap.nn
from actswap import autograd
from actswap.activation import Activation
from actswap.catalog import CATALOG
from actswap.comparing import reference
from actswap.piecewise import PIECEWISE

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")

KEPT = {"silu": 6, "mish": 8, "softplus": 2, "logsigmoid": 3, "softsign": 8}
"""Input-sized tensors that PyTorch 2.14 keeps for the graph of a gradient, measured."""
WORST = {
    "sigmoid": 0.7, "tanh": 1.1, "softsign": 1.7, "tanhshrink": 1.1, "softplus": 0.4, "logsigmoid": 0.75, "elu": 0.35,
    "celu": 0.35, "selu": 0.7, "sine": 0.4, "laplace": 2.0, "sqrtsoftplus": 0.35, "silu": 0.75, "quick_gelu": 1.0,
    "mish": 1.25, "gelu": 0.7, "gelu_tanh": 1.4, "clipped_gelu": 0.7,
}  # fmt: skip
"""The error of the second derivative in float32: eps of the greatest one or of 1. Measured, plus about 0.1."""
HAND = [a for a in CATALOG.values() if a.states and not a.surrogate]
EVERY = [pytest.param(a, id=a.name) for a in HAND]
FIXED = [pytest.param(a, id=a.name) for a in HAND if not a.learnable]
NATIVE = [pytest.param(a, id=a.name) for a in HAND if a.native and not a.learnable and a.name != "hardsigmoid"]


def cases(activation: Activation) -> list[tuple[dict, str]]:
    """Every parameter setting without a random draw, with every state it allows."""
    settings = [activation.bind(p) for p in [{}, *oracle.AWKWARD.get(activation.name, [])]]
    return [
        (p, key) for p in settings if not p.get("training")
        for key, state in activation.states.items() if state.allowed is None or state.allowed(p)
    ]  # fmt: skip


def saved_by(call, count: int = 1000) -> int:
    """Bytes that a forward and its backward under `create_graph=True` save, each storage once, the input apart."""
    leaf, storages = torch.linspace(-4, 4, count, requires_grad=True), {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x, upstream = leaf * 1, torch.ones(count, requires_grad=True)
        y = call(x)
        (gradient,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    storages.pop(leaf.untyped_storage().data_ptr(), None)
    assert gradient.shape == leaf.shape
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


@pytest.mark.parametrize("activation", NATIVE)
def test_a_graph_of_the_gradient_saves_no_more_than_pytorch(activation):
    params = activation.bind({})
    theirs = saved_by(lambda x: oracle.NATIVE[activation.name](x, False, **params))
    for key in activation.states:
        if (params, key) in cases(activation):
            assert saved_by(lambda x, key=key: autograd.apply(activation, x, params, save=key)) <= theirs, key


@pytest.mark.parametrize(("name", "tensors"), KEPT.items())
def test_one_tensor_per_site_besides_the_state(name, tensors):
    activation = CATALOG[name]
    params = activation.bind({})
    assert saved_by(lambda x: autograd.apply(activation, x, params)) == 2 * 4000  # the state and grad_output
    theirs = saved_by(lambda x: oracle.NATIVE[name](x, False, **params))
    assert theirs == tensors * 4000 or (theirs >= 2 * 4000 and not torch.__version__.startswith("2.14"))


def test_hardsigmoid_has_a_double_backward_where_pytorch_has_none():
    x = torch.linspace(-4, 4, 9, dtype=torch.float64, requires_grad=True)
    for call, works in ((torch.nn.functional.hardsigmoid, False), (actswap.functional.hardsigmoid, True)):
        (g,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        if not works:
            with pytest.raises(RuntimeError, match="derivative for aten::hardsigmoid_backward is not implemented"):
                g.sum().backward()
            continue
        (second,) = torch.autograd.grad(g.sum(), x)
        torch.testing.assert_close(second, torch.where(x.abs() < 3, 2 / 36, 0.0).double(), rtol=1e-7, atol=1e-9)
    hardsigmoid = CATALOG["hardsigmoid"]
    assert saved_by(lambda t: autograd.apply(hardsigmoid, t, {})) == 4000  # its second derivative is 0


@pytest.mark.parametrize("activation", EVERY)
def test_gradgradcheck_in_every_state(activation):
    for params, key in cases(activation):
        kinks = activation.kinks(params)
        points = [
            x for x in (-4.1, -2.4, -1.3, -0.62, 0.02, 0.48, 1.6, 2.31, 4.4) if all(abs(x - k) > 1e-3 for k in kinks)
        ]
        x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
        call = partial(autograd.apply, activation, params=params, save=key)
        assert torch.autograd.gradgradcheck(call, x, atol=1e-6)


@pytest.mark.parametrize("activation", FIXED)
def test_second_derivatives_in_float32_are_the_mathematics(activation):
    """Within the measured error, 0 or a rounding for straight and quadratic pieces, and never NaN at an end."""
    params = activation.bind({})
    x = torch.cat([torch.linspace(-12, 12, 301) + 0.0113, torch.logspace(-6, 1, 31), -torch.logspace(-6, 1, 31)])
    for kink in activation.kinks(params):
        x = x[(x - kink).abs() > 1e-4]
    truth = reference(activation, x, params)[2]
    for state in (key for p, key in cases(activation) if p == params):
        call = partial(autograd.apply, activation, params=params, save=state)
        error = (second(call, x).double() - truth).abs()
        bound = WORST.get(activation.name, 0.1) * torch.finfo(torch.float32).eps * truth.abs().max().clamp(min=1)
        assert error.max() <= bound, (state, x[error.argmax()], error.max() / bound)
        if activation.name in ("sine", "square"):
            continue  # no limit
        ends = second(call, torch.tensor([math.inf, -math.inf, 3e38, -3e38]))
        limit = second(call, torch.tensor([1e4, -1e4, 1e4, -1e4]))
        torch.testing.assert_close(ends, limit, rtol=0, atol=1e-6)  # sqrtsoftplus gets there as x^(-3/2)
        if activation.name not in {*(a.name for a in PIECEWISE), "elu", "celu", "selu"}:
            assert second(call, torch.tensor([math.nan])).isnan().all()


def test_gradients_of_huge_inputs():
    """A product inside the formula may overflow; the derivative is 1 or 0 there, under transforms too."""
    huge = torch.tensor([3e38, -3e38, 1e30, -1e30])
    for name in ("quick_gelu", "swish_beta", "silu", "gelu", "mish"):
        activation = CATALOG[name]
        params = activation.bind({})
        (state,) = activation.states.values()
        leaf = huge.clone().requires_grad_()
        (slope,) = torch.autograd.grad(autograd.apply(activation, leaf, params).sum(), leaf)
        assert slope.tolist() == [1, 0, 1, 0], name
        for points in (huge, torch.tensor([math.inf, -math.inf, 1e4, -1e4])):
            assert state.derivative(points, *params.values()).tolist() == [1, 0, 1, 0], name
        under = jvp(partial(autograd.apply, activation, params=params), (huge,), (torch.ones(4),))[1]
        assert under.tolist() == [1, 0, 1, 0], name
    beta = torch.tensor([1.0], requires_grad=True)
    (slope,) = torch.autograd.grad(actswap.functional.swish_beta(huge, beta).sum(), beta)
    assert slope.item() == 0


def test_references_have_second_derivatives_far_out():
    """Where |x| is large, x^3 overflows and exp underflows; the references give the limits all the same."""
    far = torch.tensor([20.0, -20.0, 40.0, -40.0, 700.0, -700.0, 1e60, -1e60, 1e160, -1e160], dtype=torch.float64)
    for name in ("silu", "quick_gelu", "gelu", "gelu_tanh", "swish_beta"):
        x, activation = far.clone().requires_grad_(), CATALOG[name]
        value = activation.reference(x, *activation.defaults.values())
        (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(value.detach(), far.clamp(min=0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(first.detach(), (far > 0).double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(bend, torch.zeros_like(far), rtol=0, atol=1e-6)


def second(call, x: Tensor) -> Tensor:
    """The second derivative by double backward; 0 where the first has no graph."""
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(leaf).sum(), leaf, create_graph=True)
    return torch.autograd.grad(first.sum(), leaf)[0] if first.requires_grad else torch.zeros_like(x)


@pytest.mark.parametrize("name", ["silu", "mish", "softplus", "gelu", "gelu_tanh", "tanh", "sigmoid", "logsigmoid"])
def test_orders_four_and_five_at_zero_too(name):
    """A second derivative written with |x| would be right at 0 and its own second derivative wrong there."""
    activation = CATALOG[name]
    points = torch.tensor([-1.3, 0.0, 0.7], dtype=torch.float64)
    leaf = points.clone().requires_grad_()
    value = autograd.apply(activation, leaf, activation.bind({}))
    for order in range(1, 6):
        (value,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
        want = oracle.truth(name, points, activation.bind({}), order)
        torch.testing.assert_close(value.detach(), want, rtol=1e-9, atol=1e-10)


def network(layer) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), layer(), nn.Linear(8, 8), layer(), nn.Linear(8, 1)).double()


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return (g.norm(dim=1) - 1).square().sum()


def physics(net: nn.Module, x: Tensor) -> Tensor:
    """The residual of Poisson's equation, and of its derivative along the first input."""
    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    rows = [torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0] for i in range(2)]
    (third,) = torch.autograd.grad(rows[0][:, 0].sum(), x, create_graph=True)
    return (rows[0][:, 0] + rows[1][:, 1] - x.sin().sum(1)).square().sum() + third.square().sum()


def hvp(net: nn.Module, x: Tensor) -> Tensor:
    """A Hessian-vector product over the parameters, twice: by double backward and forward over reverse."""
    params = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    vector = {name: torch.cos(p.detach() + 1) for name, p in params.items()}

    def loss(p):
        return functional_call(net, p, (x,)).square().sum()

    first = torch.autograd.grad(loss(params), list(params.values()), create_graph=True)
    twice = torch.autograd.grad(first, list(params.values()), list(vector.values()))
    _, forward = jvp(grad(loss), ({k: p.detach() for k, p in params.items()},), (vector,))
    for one, other in zip(twice, forward.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    return torch.cat([t.flatten() for t in twice])


@pytest.mark.parametrize("name", ["SiLU", "Mish", "Softplus", "Tanh", "GELU", "Sigmoid", "LogSigmoid", "ELU"])
def test_networks_agree_with_pytorchs_ops(name):
    data = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(6, 2)
    results = []
    for layer in (getattr(nn, name), getattr(actswap.nn, name)):
        net = network(layer)
        found = [hvp(net, data)]
        for loss in (penalty, physics):
            x = data.clone().requires_grad_()
            value = loss(net, x)
            found += [value.detach(), *torch.autograd.grad(value, [x, *list(net.parameters())[:-1]])]
        results.append(found)
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_compiled_double_backward_is_pytorchs_clear_error():
    torch.compiler.reset()
    net = torch.compile(network(actswap.nn.SiLU), backend="aot_eager")
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(
        RuntimeError, match="torch.compile with aot_autograd does not currently support double backward"
    ):
        penalty(net, x).backward()
