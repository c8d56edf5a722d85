"""The dispatcher and its Functions against PyTorch's own ops, in every mode of autograd."""

from __future__ import annotations

import copy
import math
import threading
from functools import partial

import oracle
import pytest
import torch
from torch import nn
from torch.autograd import Function, forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import actswap.nn
from actswap import autograd, functional
from actswap.activation import Activation
from actswap.catalog import CATALOG
from actswap.comparing import reference
from actswap.errors import ParameterError, ShapeError, TargetError
from actswap.storages import kept

# torch.func and forward mode load PyTorch's own decompositions by torch.jit.script, which warns
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")

EVERY = [pytest.param(a, id=a.name) for a in CATALOG.values()]
NATIVE = [pytest.param(a, id=a.name) for a in CATALOG.values() if a.native]
DIFFERENTIABLE = [pytest.param(a, id=a.name) for a in CATALOG.values() if not a.surrogate]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INF, NAN = math.inf, math.nan


def settings(activation: Activation, random: bool = True) -> list[dict]:
    every = [activation.bind(p) for p in [{}, *oracle.AWKWARD.get(activation.name, [])]]
    return [p for p in every if random or not p.get("training")]


def states(activation: Activation, params: dict) -> list[str]:
    return [k for k, s in activation.states.items() if s.allowed is None or s.allowed(params)]


def awkward_inputs(activation: Activation, params: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    special = [
        NAN,
        INF,
        -INF,
        -0.0,
        0.0,
        1e-30,
        -1e-30,
        6e4,
        -6e4,
        88.8,
        -104.0,
        20.0,
        20.0001,
        *activation.kinks(params),
    ]
    values = torch.cat([torch.tensor(special), torch.linspace(-7, 7, 4 * 3 * 4 * 5 - len(special))])
    base = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))].to(dtype).reshape(4, 3, 4, 5)
    return {
        "contiguous": base,
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "transposed": base.transpose(1, 3).contiguous().transpose(1, 3),
        "strided": base.repeat_interleave(2, -1)[..., ::2],
        "one dimension": base.flatten(),
        "zero dimensions": base[0, 0, 0, 0].clone(),
        "NaN alone": torch.tensor(NAN, dtype=dtype),
        "empty": base[:0],
    }


def upstream(like: torch.Tensor) -> torch.Tensor:
    g = torch.linspace(-2, 3, like.numel()).to(like.dtype)
    g[::7], g[3::11], g[5::13] = INF, -INF, NAN
    return g.reshape(like.shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with one NaN for all NaNs."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return torch.where(tensor.isnan(), torch.full_like(tensor, NAN), tensor).contiguous().view(integer)


def same(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    different = bits(got) != bits(want)
    assert not different.any(), (
        f"{what}: {int(different.sum())} differ: {got[different][:3]} is not {want[different][:3]}"
    )


def outcome(call, x: torch.Tensor, params: dict, inplace: bool, seed: int = 0):
    """Output, input after the call, its gradient, and the gradients of tensors among the parameters."""
    leaf = x.detach().clone().requires_grad_()
    tensors = {k: v.detach().clone().requires_grad_() for k, v in params.items() if isinstance(v, torch.Tensor)}
    torch.manual_seed(seed)
    inner = leaf * 1
    y = call(inner, {**params, **tensors}, inplace)
    assert (y is inner) == inplace or y.numel() == 0 or not inplace
    g = upstream(y)
    gradients = torch.autograd.grad(y, [leaf, *tensors.values()], g, allow_unused=True)
    return [y.detach(), inner.detach(), *gradients, torch.rand(1)]


# --- bit for bit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_for_bit_pytorchs_own_op(activation, dtype):
    native = oracle.NATIVE[activation.name]
    for params in settings(activation):
        if activation.name == "prelu":
            params = {"weight": torch.tensor([params["weight"]], dtype=dtype)}
        if error_of(lambda params=params: native(torch.ones(2, dtype=dtype), False, **params)):
            continue  # rrelu has no float16 on the CPU
        for inplace in (False, True):
            for layout, x in awkward_inputs(activation, params, dtype).items():
                what = f"{params} {layout} inplace={inplace}"
                if inplace and (activation.forward_ is None or params.get("negative_slope", 1) < 0
                                or params.get("lower", 1) < 0):  # fmt: skip
                    continue  # PyTorch has no such form, or refuses its backward
                want = outcome(lambda t, p, i: native(t, i, **p), x, params, inplace)
                got = outcome(lambda t, p, i: autograd.apply(activation, t, p, inplace=i), x, params, inplace)
                for a, b in zip(got, want, strict=True):
                    same(a, b, what)
                assert (got[0].stride(), got[2].stride()) == (want[0].stride(), want[2].stride()), what


@pytest.mark.parametrize("activation", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_states_are_bit_for_bit_where_they_say_so(activation, dtype):
    for params in settings(activation, random=False):
        for key in states(activation, params):
            if activation.states[key].bound or key == activation.save or activation.learnable:
                continue
            for inplace in (False, True):
                for layout, x in awkward_inputs(activation, params, dtype).items():
                    if activation.name == "leaky_relu" and params["negative_slope"] < 0 and inplace:
                        continue
                    want = outcome(lambda t, p, i: autograd.apply(activation, t, p), x, params, False)
                    got = outcome(
                        lambda t, p, i, key=key: autograd.apply(activation, t, p, inplace=i, save=key),
                        x,
                        params,
                        inplace,
                    )
                    same(got[2], want[2], f"{params} {layout} save={key} inplace={inplace}")
                    same(got[0], want[0])


BOUNDED = [
    pytest.param(a, key, id=f"{a.name}-{key}")
    for a in CATALOG.values()
    for key, state in a.states.items()
    if state.bound
]


def test_states_with_a_bound_are_those_of_the_design():
    named = {p.values[0].name for p in BOUNDED}
    assert named == {"softplus", "logsigmoid", "elu", "celu", "selu", "hardsigmoid"}


@pytest.mark.parametrize(("activation", "key"), BOUNDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_stated_bound_holds(activation, key, dtype):
    """|f'(from saved) - f'(x)| in eps, against float64, except where the output cannot tell the side of a kink."""
    for params in settings(activation):
        params = {
            name: torch.tensor(value).item() for name, value in params.items()
        }  # the float32 numbers that ATen uses
        if key not in states(activation, params) or params.get("alpha", 1) > 1 or params.get("beta", 1) > 1:
            continue  # the bound is for derivatives up to 1
        x = torch.cat([torch.linspace(-30, 30, 20001), torch.logspace(-9, 1, 999), -torch.logspace(-9, 2, 999)]).to(
            dtype
        )
        for kink in activation.kinks(params):
            x = x[(x.double() - kink).abs() > 1e-6 * max(1, abs(kink))]
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(autograd.apply(activation, leaf, params, save=key).sum(), leaf)
        (own,) = torch.autograd.grad(autograd.apply(activation, leaf, params).sum(), leaf)
        want = reference(activation, x, params)[1]
        allowed = activation.states[key].bound * torch.finfo(dtype).eps * want.abs().max().clamp(min=1)
        error = (slope.double() - want).abs()
        limit = torch.maximum(allowed, (own.double() - want).abs())  # softplus' threshold and celu's float32 alpha
        assert (error <= limit).all(), f"{params}: {(error / torch.finfo(dtype).eps).max():.3f} eps"


def test_softplus_in_float64_is_exactly_linear_above_its_threshold():
    x = torch.linspace(20.1, 45, 997, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(functional.softplus(x, save="output").sum(), x)
    assert (slope == 1).all()
    x = torch.tensor([-700.0, -40.0, -20.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(functional.softplus(x, save="output").sum(), x)
    torch.testing.assert_close(slope, torch.sigmoid(x.detach()), rtol=1e-14, atol=0)


def test_prelu_per_channel_is_bit_for_bit_with_double_backward():
    for shape in [(2, 3), (2, 3, 4), (2, 3, 4, 5), (3,)]:
        for count in {1, shape[1] if len(shape) > 1 else 1}:
            results = []
            for call in (F.prelu, functional.prelu):
                torch.manual_seed(0)
                x = torch.randn(shape, requires_grad=True)
                weight = torch.randn(count, requires_grad=True)
                y = call(x, weight)
                first = torch.autograd.grad(y, [x, weight], torch.randn_like(y), create_graph=True)
                second = torch.autograd.grad(sum((f**2).sum() for f in first), [x, weight])
                results.append([y.detach(), *(f.detach() for f in first), *second])
            for got, want in zip(*reversed(results), strict=True):
                same(got, want, shape)


def test_rrelu_takes_the_random_stream_as_pytorch_does():
    x = torch.randn(4, 5, 6, 7).contiguous(memory_format=torch.channels_last)
    torch.manual_seed(3)
    want, after = F.rrelu(x, training=True), torch.rand(2)
    torch.manual_seed(3)
    leaf = x.clone().requires_grad_()
    got = functional.rrelu(leaf, training=True)
    assert torch.equal(got, want)
    assert torch.equal(torch.rand(2), after)
    (slope,) = torch.autograd.grad(got.sum(), leaf)
    assert torch.equal(torch.where(x > 0, 1.0, want / x), slope) or torch.allclose(
        torch.where(x > 0, 1.0, want / x), slope
    )
    saved = kept(lambda t: functional.rrelu(t, training=True), x)
    assert saved.total == 4 * x.numel()
    assert "neither input nor output" in saved.kinds


# --- higher derivatives --------------------------------------------------------------------------


def smooth_points(activation: Activation, params: dict) -> torch.Tensor:
    points = [-4.1, -2.4, -1.3, -0.62, -0.2, 0.15, 0.48, 0.9, 1.6, 2.3, 4.4]
    apart = [x for x in points if all(abs(x - k) > 1e-3 for k in activation.kinks(params))]
    return torch.tensor(apart, dtype=torch.float64)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("activation", DIFFERENTIABLE)
def test_first_to_third_order_from_every_state(activation, inplace):
    for params in settings(activation, random=False):
        x = smooth_points(activation, params)
        wanted = [oracle.truth(activation.name, x, params, order) for order in (1, 2, 3)]
        for key in states(activation, params) or ["auto"]:
            leaf = x.clone().requires_grad_()
            derivative = autograd.apply(activation, leaf * 1, params, inplace=inplace, save=key)
            for want in wanted:
                if not derivative.requires_grad:
                    assert (want.abs() < 1e-12).all()
                    break
                (derivative,) = torch.autograd.grad(derivative.sum(), leaf, create_graph=True)
                # celu's and hardsigmoid's backward kernels have float32 constants in float64 too
                torch.testing.assert_close(derivative.detach(), want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("activation", DIFFERENTIABLE)
def test_double_backward_in_a_network(activation):
    """A gradient penalty through two layers, where the saved output's own history matters."""
    params = activation.bind({})
    for key in states(activation, params) or ["auto"]:
        for inplace in (False, True):
            ours = partial(autograd.apply, activation, params=params, inplace=inplace, save=key)
            results = []
            for call in (partial(activation.reference, **params), ours):
                torch.manual_seed(0)
                net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
                x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
                y = call(net[1](call(net[0](x))))
                (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
                ((g * g).sum() + y.sum()).backward()
                results.append([p.grad for p in net.parameters()] + [x.grad])
            for got, want in zip(results[1], results[0], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("activation", [pytest.param(a, id=a.name) for a in CATALOG.values() if a.surrogate])
def test_surrogates_are_deliberate(activation):
    x = torch.tensor([-1.0, 2.0, 3.0, NAN, -2.0], requires_grad=True)
    g = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    y = autograd.apply(activation, x, {})
    assert torch.equal(y[:3], torch.relu(x)[:3])
    wanted = {"guided_relu": [0, 0, 1, 1, 0], "deconv_relu": [1, 0, 1, 1, 0]}[activation.name]
    assert torch.autograd.grad(y, x, g)[0].tolist() == wanted
    with pytest.raises(NotImplementedError, match="surrogate"):
        jvp(lambda t: autograd.apply(activation, t, {}), (x.detach(),), (g,))


# --- what is saved -------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", EVERY)
def test_what_stays_alive_is_the_one_state(activation):
    params, x = activation.bind({}), torch.linspace(-4, 4, 1000)
    for key in states(activation, params):
        state = kept(lambda t, key=key: autograd.apply(activation, t, params, save=key), x)
        assert state.kinds == {key: 4000}
        assert state.hidden == 0
    with torch.no_grad():
        assert kept(lambda t: autograd.apply(activation, t, params), x, grad=False).total == 0
    assert autograd.apply(activation, x, params).grad_fn is None


@pytest.mark.parametrize("activation", [pytest.param(a, id=a.name) for a in CATALOG.values() if a.states])
def test_changing_what_was_saved_is_an_error(activation):
    params = activation.bind({})
    for key in states(activation, params):
        leaf = torch.randn(5, requires_grad=True)
        x = leaf * 1
        y = autograd.apply(activation, x, params, save=key)
        total = y.sum()
        (y if key == "output" else x).detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


@pytest.mark.parametrize("activation", EVERY)
def test_the_graph_names_the_activation(activation):
    y = autograd.apply(activation, torch.ones(2, requires_grad=True), activation.bind({}))
    assert not activation.states or y.grad_fn.name() == f"{activation.class_name}Backward"


def test_states_that_are_not_allowed_are_named():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ParameterError, match=r"gelu cannot save this state\n.*save='output'\n.*save: 'auto', 'input'"):
        functional.gelu(x, save="output")
    with pytest.raises(ParameterError, match=r"needs threshold >= 17\n.*threshold=5"):
        functional.softplus(x, 1.0, 5.0, save="output")
    with pytest.raises(ParameterError, match="save='1bit'"):
        functional.relu(x, save="1bit")
    with torch.no_grad(), pytest.raises(ParameterError):
        functional.gelu(x, save="output")
    assert functional.rrelu(x, save="noise").grad_fn.name() == "RReLUBackward"  # eval mode: noise is training's state


# --- in place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", EVERY)
def test_in_place_on_leaves_and_views(activation):
    params = activation.bind({})
    leaf = torch.randn(4, 3, requires_grad=True)
    before = leaf.detach().clone()
    if activation.states:  # identity changes nothing, and so is allowed everything
        with pytest.raises(
            RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"
        ):
            autograd.apply(activation, leaf, params, inplace=True)
        assert torch.equal(leaf, before)
    for view in (lambda t: t[1:3], lambda t: t.t(), lambda t: t[:, 0]):
        outcomes = []
        for inplace in (True, False):
            x = leaf * 1
            if inplace:
                autograd.apply(activation, view(x), params, inplace=True)
            else:
                y = autograd.apply(activation, view(x), params)
                x = x.clone()
                view(x).copy_(y)
            (g,) = torch.autograd.grad(x.sum(), leaf, create_graph=True)
            second = torch.autograd.grad(g.sum(), leaf)[0] if g.requires_grad else torch.zeros(1)
            outcomes.append((x.detach(), g.detach(), second))
        for got, want in zip(*outcomes, strict=True):
            torch.testing.assert_close(got, want)


def test_in_place_without_gradients_overwrites():
    for activation in CATALOG.values():
        x = torch.randn(7)
        want = autograd.apply(activation, x.clone(), activation.bind({}))
        assert autograd.apply(activation, x, activation.bind({}), inplace=True) is x
        assert torch.equal(x, want)


# --- torch.func ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("activation", DIFFERENTIABLE)
def test_function_transforms(activation, inplace):
    params = activation.bind({})
    x = smooth_points(activation, params)
    ideal = partial(autograd.plain, activation, params=params)
    if error_of(lambda: vmap(ideal)(x)):
        pytest.skip("PyTorch has no vmap for this op")  # rrelu
    forward_over_reverse = error_of(lambda: hessian(lambda t: ideal(t).sum())(x)) is None  # not so for hardsigmoid
    first, second = (oracle.truth(activation.name, x, params, order) for order in (1, 2))
    third = oracle.truth(activation.name, x, params, 3)
    for key in states(activation, params) or ["auto"]:

        def f(t, key=key):
            return autograd.apply(activation, t * 1, params, inplace=inplace, save=key)

        def close(got, want):
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)

        def total(t):
            return f(t).sum()

        close(vmap(f)(x), f(x))
        close(vmap(grad(f))(x), first)
        close(vmap(grad(grad(f)))(x), second)
        close(vmap(grad(grad(grad(f))))(x), third)
        close(grad(lambda t: vmap(f)(t).sum())(x), first)
        close(jacrev(f)(x).diagonal(), first)
        close(jacfwd(f)(x).diagonal(), first)
        if not forward_over_reverse:
            continue
        close(hessian(total)(x).diagonal(), second)
        close(jacrev(jacfwd(total))(x).diagonal(), second)
        if not inplace:  # PyTorch's own in-place ops fail there too: "ZeroTensors are immutable"
            close(jacfwd(jacfwd(total))(x).diagonal(), second)
            close(jacfwd(jacfwd(grad(total)))(x).diagonal(dim1=0, dim2=1).diagonal(), third)
        close(jvp(f, (x,), (torch.full_like(x, 2.0),))[1], 2 * first)
        close(vjp(f, x)[1](torch.full_like(x, 2.0))[0], 2 * first)
        batched = torch.stack([x, x + 0.01])
        for dimension in (0, 1, -1):
            close(vmap(f, in_dims=dimension, out_dims=dimension)(batched), f(batched))


def test_vmap_outside_a_regular_graph():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = vmap(lambda t: functional.softplus(t, save="output"))(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(g, torch.sigmoid(x.detach()))


@pytest.mark.parametrize("activation", [pytest.param(a, id=a.name) for a in CATALOG.values() if a.learnable])
def test_trained_parameters_in_every_mode(activation):
    names = activation.names
    torch.manual_seed(1)
    x = torch.randn(5, 3, 2, dtype=torch.float64) + 0.01
    starts = {p.name: torch.full((3,), float(p.default), dtype=torch.float64) + torch.rand(3).double() / 5
              for p in activation.learnable}  # fmt: skip
    constants = {name: value for name, value in activation.defaults.items() if name not in starts}

    def f(x, trained):
        return autograd.apply(activation, x * 1, {**constants, **trained})

    def truth(x, trained):
        shaped = {name: value.reshape(3, 1) for name, value in trained.items()}
        merged = {**constants, **shaped}
        return activation.reference(x, *[merged[name] for name in names])

    loss, ideal = (lambda t, p, g=g: (g(t, p) ** 2).sum() for g in (f, truth))
    for argument in (0, 1):
        for transform in (lambda h, a: grad(h, argnums=a), lambda h, a: jacfwd(h, argnums=a)):
            torch.testing.assert_close(transform(loss, argument)(x, starts), transform(ideal, argument)(x, starts))
    torch.testing.assert_close(hessian(loss, argnums=1)(x, starts), hessian(ideal, argnums=1)(x, starts))
    per_sample = vmap(grad(loss, argnums=1), in_dims=(0, None))(x[:, None], starts)
    torch.testing.assert_close(per_sample, vmap(grad(ideal, argnums=1), in_dims=(0, None))(x[:, None], starts))
    leaves = {name: value.clone().requires_grad_() for name, value in starts.items()}
    for y in (f(x, leaves), autograd.apply(activation, x.clone(), {**constants, **leaves}, inplace=True)):
        first = torch.autograd.grad((y**2).sum(), list(leaves.values()), create_graph=True)
        want = grad(ideal, argnums=1)(x, starts)
        torch.testing.assert_close(dict(zip(leaves, first, strict=True)), want)
    module = actswap.nn.module_class(activation)(num_parameters=3, dtype=torch.float64)
    assert functional_call(module, starts, (x,)).equal(f(x, starts))


def test_trained_parameters_must_fit_the_channels():
    x = torch.randn(2, 3, 4)
    for weight, words in ((torch.ones(4), "Mismatch of parameter numbers"), (torch.ones(1, 3), "scalar or 1D tensor")):
        with pytest.raises(ShapeError, match=words):
            functional.swish_beta(x, weight)
        with pytest.raises(RuntimeError, match=words):
            functional.prelu(x.requires_grad_(), weight)
        with pytest.raises(RuntimeError, match=words):
            F.prelu(x, weight)
    with pytest.raises(ShapeError, match="Mismatch"):
        functional.swish_beta(torch.tensor(1.0), torch.ones(2))


# --- forward mode, tracing, compiling, exporting -------------------------------------------------


@pytest.mark.parametrize("activation", DIFFERENTIABLE)
def test_forward_mode(activation):
    params = activation.bind({})
    x = smooth_points(activation, params)
    want = oracle.truth(activation.name, x, params, 1)
    for leaf in (x, x.clone().requires_grad_()):
        for inplace in (False, True):
            if activation.name == "rrelu" and inplace:
                continue  # PyTorch has no forward mode for rrelu_
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(leaf * 1, torch.ones_like(x))
                tangent = forward_ad.unpack_dual(autograd.apply(activation, dual, params, inplace=inplace)).tangent
            torch.testing.assert_close(tangent, want, rtol=1e-8, atol=1e-8)


def test_forward_over_reverse_outside_torch_func():
    x = torch.tensor([0.3, -1.2], dtype=torch.float64)
    for activation in (CATALOG["silu"], CATALOG["softplus"], CATALOG["tanh"]):
        params = activation.bind({})
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
            y = autograd.apply(activation, dual, params)
            (g,) = torch.autograd.grad(y.sum(), dual, create_graph=True)
            tangent = forward_ad.unpack_dual(g).tangent
        torch.testing.assert_close(tangent, oracle.truth(activation.name, x, params, 2))


COMPILED = [
    "relu",
    "softplus",
    "elu",
    "prelu",
    "swish_beta",
    "quick_gelu",
    "guided_relu",
    "rrelu",
    "identity",
    "hard_mish",
]


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_without_a_break(name, inplace):
    torch.compiler.reset()
    torch.manual_seed(0)
    activation = CATALOG[name]
    net = nn.Sequential(nn.Linear(4, 6), actswap.nn.module_class(activation)(inplace=inplace), nn.Linear(6, 2)).eval()
    compiled = torch.compile(copy.deepcopy(net), fullgraph=True, backend="aot_eager")
    results = []
    for network in (net, compiled):
        x = torch.linspace(-3, 3, 12).reshape(3, 4).requires_grad_()
        y = network(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in network.parameters())])
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want)


def test_a_compiled_saved_output_is_what_is_saved():
    """relu, silu -> the partitioner keeps what our backward reads: softplus' output, not its input."""
    torch.compiler.reset()
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import default_partition

    seen = []

    def keep(graph, _):
        seen.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=default_partition)
    call = torch.compile(lambda t: functional.softplus(t * 2, save="output"), backend=backend, fullgraph=True)
    call(torch.randn(8, requires_grad=True)).sum().backward()
    targets = {str(node.target) for node in seen[1].graph.nodes}
    assert "aten.softplus.default" not in targets
    assert {"aten.expm1.default", "aten.elu.default"} & targets
    assert sum(node.op == "placeholder" for node in seen[1].graph.nodes) == 2  # the output, and its gradient


@pytest.mark.parametrize("activation", EVERY)
def test_exports_as_plain_operations(activation):
    net = nn.Sequential(nn.Linear(3, 4), actswap.nn.module_class(activation)()).eval()
    x = torch.randn(2, 3)
    for strict in (False, True):
        with torch.set_grad_enabled(not activation.surrogate):
            program = torch.export.export(net, (x,), strict=strict)
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert all(target.startswith("aten.") for target in targets), targets
        torch.testing.assert_close(program.module()(x), net(x))


@pytest.mark.parametrize("activation", EVERY)
def test_jit_trace_saves_and_loads(activation, tmp_path):
    net = nn.Sequential(nn.Linear(3, 4), actswap.nn.module_class(activation)()).eval()
    x = torch.randn(2, 3)
    with torch.set_grad_enabled(not activation.surrogate):
        traced = torch.jit.trace(net, x)
    torch.jit.save(traced, tmp_path / "net.pt")
    loaded = torch.jit.load(tmp_path / "net.pt")
    torch.testing.assert_close(loaded(x), net(x))
    assert "PythonOp" not in str(traced.inlined_graph)
    assert "^" not in str(traced.inlined_graph)


@pytest.mark.parametrize("activation", EVERY)
def test_symbolic_trace_records_one_importable_function(activation):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = actswap.nn.module_class(activation)()

        def forward(self, x):
            return self.act(x + 1)

    net = Net().eval()
    traced = torch.fx.symbolic_trace(net)
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert calls[1].target is getattr(functional, activation.name)
    assert len(calls) == 2
    x = torch.randn(3, 2, requires_grad=True)
    assert torch.equal(copy.deepcopy(traced)(x), net(x))
    assert f"actswap_functional_{activation.name}(" in traced.code


def test_symbolic_trace_keeps_in_place_and_save():
    traced = torch.fx.symbolic_trace(lambda x: functional.softplus(x, 2.0, inplace=True, save="output"))
    node = next(node for node in traced.graph.nodes if node.op == "call_function")
    assert node.kwargs == {"beta": 2.0, "threshold": 20.0, "inplace": True, "save": "output"}


def test_a_torch_function_mode_sees_the_public_function():
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        functional.silu(torch.ones(2))
    assert functional.silu in seen


class Tagged(torch.Tensor):
    """A subclass with PyTorch's default behaviour."""


def test_tensor_subclasses_stay_what_they_are():
    x = torch.randn(3, requires_grad=True).as_subclass(Tagged)
    y = functional.softplus(x)
    assert type(y) is Tagged
    (g,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(g.as_subclass(torch.Tensor), torch.sigmoid(x.detach()).as_subclass(torch.Tensor))


def test_fake_and_meta_tensors():
    from torch._subclasses import FakeTensorMode

    for activation in CATALOG.values():
        params = activation.bind({})
        x = torch.empty(2, 3, device="meta", requires_grad=True)
        y = autograd.apply(activation, x, params)
        assert y.device.type == "meta"
        assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
        with FakeTensorMode():
            x = torch.empty(2, 3, device="cuda:1", requires_grad=True)
            y = autograd.apply(activation, x, params)
            assert y.device == torch.device("cuda:1")
            assert y.requires_grad


# --- dtypes, autocast, modes ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", EVERY)
def test_autocast_keeps_the_dtype(activation, dtype):
    module = actswap.nn.module_class(activation)()
    if activation.name == "rrelu" and dtype == torch.float16:
        module.eval()  # PyTorch draws no float16 noise on the CPU
    x = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = module(x)
        assert y.dtype == dtype
        assert module(x.float()).dtype == torch.float32
        with torch.no_grad():
            assert torch.equal(module.eval()(x), module(x))
        y.float().sum().backward()
    assert x.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


def test_autocast_keeps_the_dtype_when_compiled():
    torch.compiler.reset()
    for module in (actswap.nn.Softplus(save="output"), actswap.nn.PReLU(), actswap.nn.Mish(inplace=True)):
        compiled = torch.compile(lambda t, module=module: module(t * 1), fullgraph=True, backend="aot_eager")
        x = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = compiled(x), module(x * 1)
        assert got.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0])


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("activation", NATIVE)
def test_other_dtypes_do_what_pytorchs_op_does(activation):
    params = activation.bind({})
    native = oracle.NATIVE[activation.name]
    for x in (torch.tensor([-2, 0, 3]), torch.tensor([True, False]), torch.tensor([1 + 2j, -0.5j])):
        for inplace in (False, True):
            if inplace and activation.forward_ is None:
                continue
            ours = error_of(partial(autograd.apply, activation, x.clone(), params, inplace=inplace))
            theirs = error_of(partial(native, x.clone(), inplace, **params))
            if activation.name != "prelu":  # its weight would be of that dtype
                assert ours is theirs, f"{x.dtype} {ours} {theirs}"
    z = torch.tensor([1 + 2j, -0.5j], requires_grad=True)
    if error_of(lambda: native(z, False, **params)) is None and activation.name != "prelu":
        want = torch.autograd.grad(native(z, False, **params).abs().sum(), z)[0]
        assert torch.equal(torch.autograd.grad(autograd.apply(activation, z, params).abs().sum(), z)[0], want)


@pytest.mark.parametrize("activation", [pytest.param(a, id=a.name) for a in CATALOG.values() if not a.native])
def test_our_own_formulas_refuse_integers(activation):
    if activation.forward is not torch.relu:
        with pytest.raises(NotImplementedError, match="int64"):
            autograd.apply(activation, torch.tensor([1, 2]), activation.bind({}))


@pytest.mark.parametrize("activation", EVERY)
def test_inference_mode_and_inference_tensors(activation):
    params = activation.bind({})
    with torch.inference_mode():
        x = torch.randn(4)
        y = autograd.apply(activation, x, params)
    assert y.is_inference()
    assert torch.equal(autograd.apply(activation, x, params), y)


def test_backward_from_several_threads():
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)
    failures = []

    def work():
        for activation in CATALOG.values():
            if activation.surrogate:
                continue
            leaf, params = x.clone().requires_grad_(), activation.bind({})
            (g,) = torch.autograd.grad(autograd.apply(activation, leaf, params).sum(), leaf)
            (want,) = torch.autograd.grad(autograd.plain(activation, leaf, params).sum(), leaf)
            if not torch.allclose(g, want, atol=1e-8, equal_nan=True):
                failures.append(activation.name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_checkpoints_recompute():
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(4, requires_grad=True)
    for reentrant in (False, True):
        y = checkpoint(lambda t: functional.silu(functional.relu(t * 2, inplace=True)), x, use_reentrant=reentrant)
        (g,) = torch.autograd.grad(y.sum(), x) if not reentrant else (_backward(y, x),)
        (want,) = torch.autograd.grad(F.silu(F.relu(x * 2)).sum(), x)
        torch.testing.assert_close(g, want)


def _backward(y, x):
    x.grad = None
    y.sum().backward()
    return x.grad


# --- legacy Functions ----------------------------------------------------------------------------


class LegacySquare(Function):
    def forward(self, x, power=2):
        self.power = power
        self.save_for_backward(x)
        return x**power

    def slope(self, x):
        return self.power * x ** (self.power - 1)

    def backward(self, g):
        (x,) = self.saved_tensors
        return g * self.slope(x), None


class LegacyInPlace(Function):
    def forward(self, x):
        self.mark_dirty(x)
        return x.clamp_(min=0)

    def backward(self, g):
        return g


class WithState(Function):
    def __init__(self, slope):
        self.slope = slope

    def forward(self, x):
        return x * self.slope


def test_legacy_functions_are_adapted():
    adapted = autograd.adapt(LegacySquare)
    assert autograd.is_legacy(LegacySquare)
    assert not autograd.is_legacy(adapted)
    assert adapted.__name__ == "LegacySquare"
    assert adapted.__module__ == __name__
    assert issubclass(adapted, LegacySquare)
    x = torch.tensor([2.0, -3.0], requires_grad=True)
    y, z = adapted.apply(x), adapted.apply(x, 3)
    assert y.grad_fn.name() == "LegacySquareBackward"
    assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].tolist() == [4.0, -6.0]
    assert torch.autograd.grad(z.sum(), x)[0].tolist() == [12.0, 27.0]
    assert autograd.adapt(adapted) is adapted
    t = torch.tensor([-1.0, 1.0])
    assert autograd.adapt(LegacyInPlace).apply(t) is t
    assert t.tolist() == [0.0, 1.0]
    with pytest.raises(TargetError, match="with an __init__"):
        autograd.adapt(WithState)
