"""Every activation in every mode of PyTorch: what plain operations give there, or PyTorch's own error, or ours."""

from __future__ import annotations

import itertools
import threading
from functools import partial

import oracle
import pytest
import torch
import torch._dynamo.testing
from test_autograd import error_of
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.checkpoint import checkpoint

import actswap
from actswap import autograd, functional
from actswap.activation import Activation
from actswap.errors import ModeError

# torch.func and forward mode load PyTorch's own decompositions by torch.jit.script, which warns
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning",
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:There is a performance drop",  # no batching rule for some operation of the reference
    "ignore:Attempted to insert a get_attr Node",  # torch.func.linearize
)

ACTIVATIONS = [actswap.get(name) for name in actswap.names()]
EVERY = [pytest.param(a, id=a.name) for a in ACTIVATIONS]
NATIVE = [pytest.param(a, id=a.name) for a in ACTIVATIONS if a.native]
SURROGATE = [pytest.param(a, id=a.name) for a in ACTIVATIONS if a.surrogate]
# one of each kind: saves its output, its input, has no kernel, a float32 constant, trained, a surrogate, nothing saved
KINDS = ["relu", "softplus", "silu", "quick_gelu", "elu", "prelu", "swish_beta", "guided_relu", "identity"]
kinds = pytest.mark.parametrize("activation", [pytest.param(actswap.get(name), id=name) for name in KINDS])
slow = pytest.mark.slow
both_places = pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])


def ours(activation: Activation, inplace: bool = False, save: str = "auto"):
    """The activation at its default parameters as a function of one tensor, which it leaves alone."""
    params = activation.bind({})
    return lambda t: autograd.apply(activation, t * 1, params, inplace=inplace, save=save)


def ideal(activation: Activation):
    """The slow reference, differentiated by PyTorch's autograd."""
    return lambda t: activation.reference(t * 1, **activation.bind({}))


def points(*shape: int) -> torch.Tensor:
    """Random float64 points, none near a kink."""
    x = torch.randn(*shape, dtype=torch.float64)
    return torch.where((x * 10 - (x * 10).round()).abs() < 0.01, x + 0.013, x)


def total(f):
    return lambda t: f(t).sum()


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


# --- torch.func ----------------------------------------------------------------------------------

TRANSFORMS = {
    "vmap over the last": lambda f: vmap(f, in_dims=-1, out_dims=-1),
    "vmap over the middle": lambda f: vmap(f, in_dims=1),
    "vmap of one of two": lambda f: lambda x: vmap(lambda s, t: f(t) * s, in_dims=(0, None))(x[:, 0, 0], x),
    "nested vmap": lambda f: vmap(vmap(f, in_dims=1), in_dims=2),
    "nested vmap(grad)": lambda f: vmap(vmap(grad(total(f)))),
    "vmap(grad) over the last": lambda f: vmap(grad(total(f)), in_dims=-1, out_dims=-1),
    "vmap(jacrev)": lambda f: lambda x: vmap(jacrev(f))(x[0]),
    "vmap(jacfwd)": lambda f: lambda x: vmap(jacfwd(f))(x[0]),
    "vmap(hessian)": lambda f: lambda x: vmap(hessian(total(f)))(x[0]),
    "jacrev(jacrev)": lambda f: lambda x: jacrev(jacrev(f))(x[0, 0]),
    "jacfwd(jacrev)": lambda f: lambda x: jacfwd(jacrev(f))(x[0, 0]),
    "jacrev(jacfwd)": lambda f: lambda x: jacrev(jacfwd(f))(x[0, 0]),
    "linearize": lambda f: lambda x: linearize(f, x)[1](x),
    "functionalize": functionalize,
    "functionalize(grad)": lambda f: functionalize(grad(total(f))),
    "grad(functionalize)": lambda f: grad(total(functionalize(f))),
}
CHEAP = ["vmap over the last", "vmap of one of two", "nested vmap(grad)", "vmap(hessian)", "functionalize(grad)"]
NESTED = [pytest.param(actswap.get(name), transform, id=f"{name}-{transform}")
          for name in actswap.names() for transform in TRANSFORMS if name in KINDS or transform in CHEAP
          if not actswap.get(name).surrogate]  # fmt: skip


@both_places
@pytest.mark.parametrize(("activation", "name"), NESTED)
def test_nested_transforms(activation, name, inplace):
    x, transform = points(2, 3, 2), TRANSFORMS[name]
    plain = partial(autograd.plain, activation, params=activation.bind({}), inplace=inplace)
    # PyTorch has no vmap of rrelu, no second forward derivative of hardsigmoid, no functional form of some in-place ops
    failed = error_of(lambda: transform(ours(activation, inplace))(x))
    if failed is not None:
        assert failed is error_of(lambda: transform(lambda t: plain(t * 1))(x))
        return
    close(transform(ours(activation, inplace))(x), transform(ideal(activation))(x))


@both_places
@pytest.mark.parametrize("activation", SURROGATE)
def test_surrogates_keep_their_backward_or_refuse(activation, inplace):
    f, x, g = ours(activation, inplace), points(4, 3), points(4, 3)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(f(leaf), leaf, g)
    close(grad(lambda t: (f(t) * g).sum())(x), want)
    close(vmap(grad(lambda t, s: (f(t) * s).sum()))(x, g), want)
    close(vmap(f)(x), f(x))
    for transform in (lambda: jvp(f, (x,), (g,)), lambda: functionalize(f)(x), lambda: jacfwd(f)(x)):
        with pytest.raises(ModeError, match=f"{activation.name} has a surrogate backward"):
            transform()


# --- torch.compile -------------------------------------------------------------------------------

COMPILED = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "vmap": lambda f: vmap(f, in_dims=1),
    "grad": lambda f: grad(total(f)),
    "vmap(grad)": lambda f: vmap(grad(total(f))),
    "jacrev": lambda f: lambda x: jacrev(f)(x[0]),
    "jacfwd": lambda f: lambda x: jacfwd(f)(x[0]),
    "hessian": lambda f: lambda x: hessian(total(f))(x[0]),
}


def dual(f):
    def tangent(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos())))

    return tangent


COMPILED["forward mode by hand"] = dual


def compiled(f, **options):
    torch.compiler.reset()
    return torch.compile(f, fullgraph=True, backend="aot_eager", **options)


ORDINARY = {("softplus", False): list(COMPILED), ("prelu", True): ["vmap", "forward mode by hand"],
            ("quick_gelu", True): ["jvp", "vmap(grad)"], ("relu", True): ["hessian"]}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "inplace", "transform"),
    [
        pytest.param(name, inplace, transform, marks=() if transform in ORDINARY.get((name, inplace), ()) else slow)
        for name in KINDS
        for inplace in (False, True)
        for transform in COMPILED
        if not actswap.get(name).surrogate
    ],
)
def test_compiled_transforms(name, inplace, transform):
    activation, x = actswap.get(name), points(4, 3)
    module = actswap.nn.module_class(activation)(inplace=inplace).double()
    got = compiled(COMPILED[transform](lambda t: module(t * 1)))(x)
    want = COMPILED[transform](ideal(activation))(x)
    for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
        close(a, b)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@both_places
def test_a_compiled_surrogate_keeps_its_backward_or_refuses(inplace):
    activation, x, g = actswap.get("guided_relu"), points(4, 3), points(4, 3)
    f = ours(activation, inplace)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(f(leaf), leaf, g)
    close(torch.autograd.grad(compiled(f)(leaf), leaf, g)[0], want)
    close(compiled(grad(lambda t: (f(t) * g).sum()))(x), want)
    for call in (COMPILED["jvp"](f), vmap(grad(lambda t: f(t).sum())), dual(f)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="guided_relu has a surrogate backward"):
            compiled(call)(x)
    torch.compiler.reset()
    with pytest.raises(ModeError, match="surrogate(.|\n)*given: Jvp"):
        torch.compile(COMPILED["jvp"](f), backend="eager")(x)


@pytest.mark.parametrize("activation", EVERY)
def test_compiled_with_and_without_a_gradient(activation):
    """Frozen parts, and the first activation of a network, have no gradient while grad mode is on."""
    params = next((p for p in oracle.AWKWARD.get(activation.name, []) if not p.get("training")), {})
    module = actswap.nn.module_class(activation)(**params).eval().requires_grad_(False)
    torch.compiler.reset()
    call = torch.compile(module, fullgraph=True, backend="eager")
    for needed in (False, True):
        x = torch.linspace(-3, 3, 12).reshape(4, 3).requires_grad_(needed)
        y = call(x)
        assert torch.equal(y, module(x)) and y.requires_grad == needed


def compilations_for_sizes(module: nn.Module, sizes: tuple[int, ...], mark: bool, **options) -> int:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(module, fullgraph=True, backend=counter, **options)
    for rows in sizes:
        x = torch.randn(rows, 3, requires_grad=True)
        if mark:
            torch._dynamo.mark_dynamic(x, 0)
        y = call(x)
        torch.testing.assert_close(y, module(x))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(module(x).sum(), x))
    return counter.frame_count


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        (nn.Softplus, "softplus"),
        (nn.PReLU, "prelu"),
        pytest.param(nn.ReLU, "relu", marks=slow),
        pytest.param(nn.SiLU, "quick_gelu", marks=slow),
        pytest.param(nn.PReLU, "swish_beta", marks=slow),
    ],
)
def test_new_sizes_compile_no_more_often_than_pytorch(theirs, mine):
    for options in ({"mark": False, "dynamic": True}, {"mark": True}, {"mark": False}):
        counts = [compilations_for_sizes(module, (2, 5, 9), **options)
                  for module in (theirs(), actswap.nn.module_class(mine)())]  # fmt: skip
        assert counts[1] <= counts[0], options


def compilations(net: nn.Module) -> int:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    call = torch.compile(net, backend=counter, fullgraph=True)
    for training, gradients in itertools.product((True, False, True), (True, False)):
        net.train(training)
        with torch.set_grad_enabled(gradients):
            call(torch.ones(2, 4))
    return counter.frame_count


def test_a_change_of_mode_compiles_no_more_often_than_pytorch():
    def net(act):
        return nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4))

    for theirs, mine in ((nn.Softplus(), "softplus"), (nn.PReLU(), "prelu"), (nn.RReLU(), "rrelu")):
        before = compilations(net(theirs))
        assert compilations(actswap.replace(net(nn.ReLU()), "relu", mine)) <= before


def test_inductor_computes_the_same():
    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(4, 6), actswap.nn.Softplus(save="output"), nn.Linear(6, 6), actswap.nn.SwishBeta())
    x = torch.randn(5, 4, requires_grad=True)
    try:
        y = torch.compile(net, fullgraph=True)(x)
    except torch._inductor.exc.InductorError as error:
        if "compiler" not in str(error):
            raise
        pytest.skip("Inductor needs a C++ compiler")
    torch.testing.assert_close(y, net(x))
    leaves = [x, *net.parameters()]
    for got, want in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(net(x).sum(), leaves), strict=True):
        torch.testing.assert_close(got, want)


def test_a_compiled_function_under_an_eager_transform():
    torch.compiler.reset()
    f = torch.compile(lambda t: functional.softplus(t), backend="eager")
    close(grad(f)(torch.tensor(0.5)), torch.sigmoid(torch.tensor(0.5)))


# --- other kinds of tensor -----------------------------------------------------------------------

TENSORS = {
    "sparse": lambda: torch.tensor([[-1.0, 0.0, 2.0], [0.0, 3.0, -4.0]]).to_sparse(),
    "sparse rows": lambda: torch.tensor([[-1.0, 0.0, 2.0], [0.0, 3.0, -4.0]]).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
    "mkldnn": lambda: torch.randn(2, 3, 4, 4).to_mkldnn(),
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 10, torch.quint8),
    "float8": lambda: torch.randn(4).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "integer": lambda: torch.tensor([-1, 2]),
    "boolean": lambda: torch.tensor([True, False]),
    "no dimension": lambda: torch.tensor(1.5),
    "no element": lambda: torch.randn(0, 3),
    "expanded": lambda: torch.randn(1).expand(4),
    "parameter": lambda: nn.Parameter(torch.randn(3)),
}


def outcome(call, make, gradient: bool):
    """The class of the error, or output and gradient as dense tensors with their layouts."""
    torch.manual_seed(0)
    x = make()
    differentiable = isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
    if gradient and not differentiable:
        return "no gradient"
    x = x.detach().requires_grad_() if gradient else x
    try:
        y = call(x * 1 if gradient else x)
        results = (y, *torch.autograd.grad(abs(y).sum() if y.is_complex() else y, x, None if y.is_complex() else
                                           y.detach())) if gradient else (y,)  # fmt: skip
    except Exception as error:
        return type(error)
    return [(type(t), t.layout, [_dense(part) for part in (t.unbind() if t.is_nested else [t])]) for t in results]


def _dense(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    t = t.dequantize() if t.is_quantized else t if t.layout == torch.strided else t.to_dense()
    return t.resolve_conj().resolve_neg()


@pytest.mark.filterwarnings("ignore:.*prototype", "ignore:.*beta state", "ignore:.*deprecated")
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("activation", NATIVE)
def test_other_tensors_do_what_pytorchs_op_does(activation, kind):
    params = activation.bind({})
    if activation.name == "prelu":
        params = {"weight": torch.full((1,), 0.25)}
    for gradient, inplace in itertools.product((False, True), (False, True)):
        if inplace and activation.forward_ is None:
            continue
        native = partial(oracle.NATIVE[activation.name], inplace=inplace, **params)
        want = outcome(native, TENSORS[kind], gradient)
        got = outcome(partial(autograd.apply, activation, params=params, inplace=inplace), TENSORS[kind], gradient)
        assert type(got) is type(want), f"gradient={gradient} inplace={inplace}: {got} is not {want}"
        if isinstance(want, list):
            for (cls, layout, parts), (cls_, layout_, parts_) in zip(got, want, strict=True):
                assert (cls, layout) == (cls_, layout_)
                torch.testing.assert_close(parts, parts_, rtol=0, atol=0, equal_nan=True)
        else:
            assert got is want, f"gradient={gradient} inplace={inplace}"


def test_a_surrogate_refuses_a_nested_tensor():
    x = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], requires_grad=True)
    with pytest.raises(
        ModeError, match=r"guided_relu has a surrogate(.|\n)*given: a nested tensor of layout torch.strided"
    ):
        functional.guided_relu(x)


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"softplus\(\): argument 'x' must be Tensor, not list"):
        functional.softplus([1.0])


class Loud(torch.Tensor):
    """A subclass that sees every function it is given to."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A tensor around another, as sharded and quantised tensors are made."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
            requires_grad=inner.requires_grad,
        )  # fmt: skip

    def __init__(self, inner):
        self.inner = inner.detach()

    def __repr__(self):
        return f"Wrapper({self.inner})"

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def on(kind, f, tree):
            return torch.utils._pytree.tree_map(lambda t: f(t) if isinstance(t, kind) else t, tree)

        out = func(*on(Wrapper, lambda t: t.inner, args), **on(Wrapper, lambda t: t.inner, kwargs or {}))
        return return_and_correct_aliasing(func, args, kwargs or {}, on(torch.Tensor, Wrapper, out))


@both_places
@pytest.mark.parametrize("activation", EVERY)
def test_subclasses_stay_what_they_are(activation, inplace):
    params, f = activation.bind({}), ours(activation, inplace)
    base = torch.randn(4, 3, requires_grad=True)
    want = f(base)
    (slope,) = torch.autograd.grad(want.sum(), base)
    Loud.seen.clear()
    loud = base.detach().as_subclass(Loud).requires_grad_()
    y = autograd.apply(activation, loud * 1, params, inplace=inplace)
    assert type(y) is Loud and functional.function(activation) in Loud.seen
    (g,) = torch.autograd.grad(y.sum(), loud)
    assert torch.equal(g.as_subclass(torch.Tensor), slope)
    wrapped = Wrapper(base.detach()).requires_grad_()
    y = f(wrapped)
    assert type(y) is Wrapper and torch.equal(y.inner, want)
    (g,) = torch.autograd.grad(y, wrapped, Wrapper(torch.ones(4, 3)))
    assert type(g) is Wrapper and torch.equal(g.inner, slope)


def test_a_wrapper_compiles():
    module = actswap.nn.Softplus(save="output")
    x = Wrapper(torch.randn(3)).requires_grad_()
    y = compiled(module)(x)
    assert type(y) is Wrapper
    (g,) = torch.autograd.grad(y, x, Wrapper(torch.ones(3)))
    torch.testing.assert_close(g.inner, torch.sigmoid(x.inner))


@both_places
@pytest.mark.parametrize("activation", EVERY)
def test_abstract_tensors(activation, inplace):
    f = ours(activation, inplace)
    for shape in ((2, 3), (0, 3), ()):
        x = torch.empty(shape, device="meta", requires_grad=True)
        (g,) = torch.autograd.grad(f(x).sum(), x)
        assert g.is_meta and g.shape == x.shape
        with FakeTensorMode() as mode:
            x = torch.empty(shape, requires_grad=True)
            y = f(x)
            (g,) = torch.autograd.grad(y.sum(), x)
            assert y.device == g.device == x.device and g.shape == x.shape and y.fake_mode is mode


def test_a_dispatch_mode_sees_the_kernels_of_both_passes():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, requires_grad=True)
    with Watch():
        functional.silu(x).backward(torch.ones(3))
    assert seen.count("aten.silu.default") == seen.count("aten.silu_backward.default") == 1
    assert "aten.sigmoid.default" not in seen


# --- autocast, checkpoints, hooks, threads -------------------------------------------------------


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", NATIVE)
def test_autocast_gives_pytorchs_dtype_but_for_prelu(activation, lower):
    """The CPU's autocast lists none of these but prelu, which it computes in the lower type; we keep the input's."""
    params = activation.bind({})
    if activation.name == "prelu":
        params = {"weight": torch.full((1,), 0.25)}
    native = partial(oracle.NATIVE[activation.name], inplace=False, **params)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.linspace(-3, 3, 12, dtype=dtype).reshape(4, 3)
        with torch.autocast("cpu", lower):
            got, want = autograd.apply(activation, x, params), native(x)
        assert got.dtype == dtype
        assert want.dtype == (lower if activation.name == "prelu" else dtype)
        if want.dtype == dtype:
            assert torch.equal(got, want)


@pytest.mark.parametrize("reentrant", [True, False])
@kinds
def test_checkpoints_under_autocast(activation, reentrant):
    linear, module = nn.Linear(4, 4), actswap.nn.module_class(activation)(inplace=True)
    gradients = []
    for run in (lambda f, x: checkpoint(f, x, use_reentrant=reentrant), lambda f, x: f(x)):
        x = torch.linspace(-3, 3, 12).reshape(3, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = run(lambda t: module(linear(t)), x)
        linear.zero_grad(), module.zero_grad()
        y.float().sum().backward()
        gradients.append([x.grad, *(p.grad for p in (*linear.parameters(), *module.parameters()))])
    assert all(torch.equal(got, want) for got, want in zip(*gradients, strict=True))


@both_places
@pytest.mark.parametrize("activation", EVERY)
def test_hooks_on_saved_tensors(activation, inplace):
    f, x = ours(activation, inplace), torch.randn(5, requires_grad=True)
    (want,) = torch.autograd.grad(f(x).sum(), x)
    with torch.autograd.graph.save_on_cpu():
        y = f(x)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, want) and torch.equal(second, want)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = f(x)
    if activation.states:
        assert len(packed) == 1  # the one state, and nothing on the side
        torch.autograd.grad(y.sum(), x)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("activation", EVERY)
def test_inference_tensors_fail_as_pytorchs_do(activation):
    with torch.inference_mode():
        x = torch.randn(4, 3)
        if activation.states:
            with pytest.raises(RuntimeError, match="does not require grad"):
                autograd.apply(activation, x, activation.bind({})).sum().backward()
    if activation.states:
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
            autograd.apply(activation, x, activation.bind({}), inplace=True)
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(autograd.apply(activation, leaf, activation.bind({})).sum(), leaf)
    assert not g.is_inference()
    if activation.learnable:
        module = actswap.nn.module_class(activation)()
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            module(x)


def test_one_graph_from_several_threads():
    """Backward of one graph from several threads, and forwards meanwhile, which make plans and Functions."""
    x = torch.linspace(-3, 3, 101, dtype=torch.float64, requires_grad=True)
    graphs = [(ours(a)(x), a) for a in ACTIVATIONS]
    wanted = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y, _ in graphs]
    failures: list[object] = []

    def work():
        for (y, activation), want in zip(graphs, wanted, strict=True):
            (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            (again,) = torch.autograd.grad(ours(activation, inplace=True)(x).sum(), x)
            if not (torch.equal(g, want) and torch.allclose(again, want)):
                failures.append(activation.name)

    for cache in (autograd._plans, autograd._eager, autograd._transformed):
        cache.clear()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@both_places
@pytest.mark.parametrize("activation", EVERY)
def test_deterministic_algorithms(activation, inplace):
    f, x = ours(activation, inplace), torch.randn(5, 3, requires_grad=True)
    want = f(x)
    torch.use_deterministic_algorithms(True)
    try:
        y = f(x)
        (g,) = torch.autograd.grad(y.sum(), x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(y, want) and torch.equal(g, torch.autograd.grad(want.sum(), x)[0])


# --- traced and exported -------------------------------------------------------------------------


class Each(nn.Module):
    """Every activation of one input, each an output."""

    def __init__(self, names, **options):
        super().__init__()
        self.acts = nn.ModuleDict({name: actswap.nn.module_class(name)(**options) for name in names})

    def forward(self, x):
        return tuple(act(x * 1) for act in self.acts.values())


DRAWN = torch.linspace(-6, 6, 24).reshape(4, 6)


@both_places
def test_exported_for_every_size(inplace):
    net = Each([a.name for a in ACTIVATIONS if not a.surrogate], inplace=inplace).eval()
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(net, (DRAWN,), dynamic_shapes={"x": {0: rows}})
    for x in (DRAWN, torch.randn(7, 6)):
        torch.testing.assert_close(program.module()(x), net(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("activation", SURROGATE)
def test_a_surrogate_is_exported_for_inference_only(activation):
    net = nn.Sequential(nn.Linear(6, 6), actswap.nn.module_class(activation)())
    with pytest.raises(ModeError, match=r"surrogate(.|\n)*given: torch.jit.trace\n  try: .*under torch.no_grad\(\)"):
        torch.jit.trace(net, (DRAWN,))
    with pytest.raises(ModeError, match=r"surrogate(.|\n)*given: torch.export\n  try: .*under torch.no_grad\(\)"):
        torch.export.export(net, (DRAWN,))
    with torch.no_grad():
        for exported in (torch.jit.trace(net, (DRAWN,)), torch.export.export(net, (DRAWN,)).module()):
            assert torch.equal(exported(DRAWN), net(DRAWN))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("inplace", [pytest.param(False, marks=slow), True])
def test_onnx_runs_every_activation(inplace, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"ONNX export needs {package}")
    import onnxruntime

    # PyTorch's exporter has no rrelu
    names = [a.name for a in ACTIVATIONS if not a.surrogate and a.name != "rrelu"]
    net = Each(names, inplace=inplace).eval()
    torch.onnx.export(net, (DRAWN,), dynamo=True, verbose=False).save(tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: DRAWN.numpy()})
    for name, got, want in zip(names, outputs, net(DRAWN), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for module in (nn.RReLU(), actswap.nn.RReLU()):
        with pytest.raises(torch.onnx.OnnxExporterError, match="rrelu"):
            torch.onnx.export(module.eval(), (DRAWN,), dynamo=True, verbose=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@both_places
def test_a_loaded_trace_has_the_gradients(inplace, tmp_path):
    names = [name for name in actswap.names() if not actswap.get(name).surrogate]
    net = Each(names, inplace=inplace).eval()
    torch.jit.save(torch.jit.trace(net, (DRAWN.clone(),)), tmp_path / "net.pt")
    loaded = torch.jit.load(tmp_path / "net.pt")
    x = DRAWN.clone().requires_grad_()
    for name, got, want in zip(names, loaded(x), net(x), strict=True):
        torch.testing.assert_close(got, want, msg=lambda m, n=name: f"{n}: {m}")
        slopes = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (got, want)]
        torch.testing.assert_close(*slopes, msg=lambda m, n=name: f"{n}: {m}")
