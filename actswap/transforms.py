"""An activation under what PyTorch does with derivatives: finite differences, `torch.func` and `torch.compile`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import functional, gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.utils import _pytree as pytree

from actswap import autograd
from actswap.comparing import Comparison, compare, run
from actswap.report import Line, counted
from actswap.subjects import SURROGATE, Subject

Call = Callable[..., Tensor]
POINTS = (-4.37, -2.71, -1.93, -0.81, -0.27, -0.06, 0.04, 0.31, 0.72, 1.37, 2.63, 4.19, 7.3)


def smooth_points(it: Subject, device: Any) -> Tensor:
    """A few float64 points, none of them within finite differences of a kink."""
    kinks = it.truth.kinks(it.params) if it.truth is not None else (0.0,)
    apart = [p for p in POINTS if all(abs(p - kink) > 1e-3 for kink in kinks)]
    return torch.tensor(apart, dtype=torch.float64, device=device, requires_grad=True)


def trained(it: Subject, device: Any) -> tuple[Call, tuple[Tensor, ...]]:
    """The call as a function of the input and of every trained parameter, and where to differentiate it."""
    x = smooth_points(it, device)
    if it.copies is not None and (starts := it.copies.trained(x)):
        channels = max((p.numel() for p in starts.values() if p.dim() == 1), default=1)
        if 1 < channels <= len(x):  # one value per channel
            x = x.detach()[: len(x) // channels * channels].reshape(-1, channels).requires_grad_()
        return partial(it.copies.call_with, tuple(starts)), (x, *(p.requires_grad_() for p in starts.values()))
    if not it.own or it.truth is None or not it.truth.learnable:
        return it.call, (x,)
    activation, params = it.known()
    names = [parameter.name for parameter in activation.learnable]
    offsets = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    values = [torch.as_tensor(params[name], dtype=torch.float64).cpu().reshape(-1)[:1] + offsets for name in names]

    def call(point: Tensor, *values: Tensor) -> Tensor:
        given = {**params, **dict(zip(names, values, strict=True))}
        return autograd.apply(activation, point, given, save=it.save)

    rows = x.detach()[:12].reshape(4, 3).clone().requires_grad_()
    return call, (rows, *(value.to(x).detach().requires_grad_() for value in values))


def gradients(it: Subject, name: str, device: Any, test: Callable[..., bool]) -> Line:
    """PyTorch's `gradcheck` or `gradgradcheck`."""
    if it.surrogate:
        return Line(name, "note", SURROGATE)
    call, inputs = trained(it, device)
    try:
        test(call, inputs)
    except GradcheckError as error:
        worst = _finite(call, inputs, twice=test is gradgradcheck)
        return Line(name, "fail", worst if worst is not None else _sentence(error))
    more = f" and {counted(len(inputs) - 1, 'trained parameter')}" if len(inputs) > 1 else ""
    more += " per channel" if more and it.own else ""
    return Line(name, "pass", f"{inputs[0].numel()} points, float64{more}")


def _finite(call: Call, inputs: tuple[Tensor, ...], twice: bool) -> str | None:
    """Where the derivative by the input, or the second one, is farthest from finite differences; None: nowhere far."""
    x, *values = (value.detach() for value in inputs)
    upstream, h = torch.linspace(0.5, 1.5, x.numel()).to(x).reshape(x.shape), 1e-6

    def value(point: Tensor) -> Tensor:
        return call(point, *values)

    def slope(point: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = point if point.requires_grad else point.detach().requires_grad_()
            return torch.autograd.grad(value(leaf).sum(), leaf, create_graph=True)[0]

    f, leaf = slope if twice else value, x.clone().requires_grad_()
    got = (torch.autograd.grad(f(leaf), leaf, upstream)[0] / upstream).flatten()
    want = ((f(x + h) - f(x - h)) / (2 * h)).detach().flatten()
    i = int((got - want).abs().nan_to_num(nan=math.inf).argmax())
    if (got[i] - want[i]).abs() <= 1e-5:
        return None
    what = "second derivative" if twice else "derivative"
    return f"{what} at x = {x.flatten()[i]:g}: {got[i]:.6g}, finite differences {want[i]:.6g}"


first = partial(gradients, test=gradcheck)
second = partial(gradients, test=gradgradcheck)


def _truth(it: Subject, call: Call) -> Call:
    """The reference as a function of the input and of every trained parameter; the call itself without one."""
    if it.truth is None or it.surrogate:
        return call
    activation, params = it.known()
    formula = activation.reference if activation.reference is not None else activation.forward
    names = [parameter.name for parameter in activation.learnable]

    def known(x: Tensor, *values: Tensor) -> Tensor:
        given = zip(names, (value.reshape(1, -1) for value in values), strict=False)
        return formula(x, **{**params, **dict(given)})

    return known


def _inputs(it: Subject, device: Any) -> tuple[Call, tuple[Tensor, ...]]:
    """As `trained`, for our own; for what is not ours, the input alone."""
    call, inputs = trained(it, device) if it.own else (it.call, (smooth_points(it, device),))
    return call, tuple(value.detach() for value in inputs)


def _plain(it: Subject) -> Call:
    """PyTorch's own operations, as a function of the input and of every trained parameter."""
    activation, params = it.known()
    names = [parameter.name for parameter in activation.learnable]
    return lambda x, *values: autograd.plain(activation, x, {**params, **dict(zip(names, values, strict=False))})


def _under(it: Subject, name: str, call: Call, transform: Callable[[Call], Any], judge: Callable[[Any], Line]) -> Line:
    """What `judge` says of the transformed call. A refusal is a fault of ours where PyTorch's own op has none.

    A function of someone else's that PyTorch refuses to transform gives an error and no wrong number: it is noted.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what PyTorch's own machinery warns of
            found = transform(call)
    except RuntimeError as error:
        said = f"refused: {_sentence(error)}"
        if it.surrogate and isinstance(error, NotImplementedError):
            return Line(name, "note", SURROGATE)
        if it.own and not _refused(it, transform):
            return Line(name, "fail", said)
        return Line(name, "note", f"{said} (of PyTorch's own op as well)" if it.own else said)
    return judge(found)


def _refused(it: Subject, transform: Callable[[Call], Any]) -> bool:
    try:
        transform(_plain(it))
    except RuntimeError:
        return True
    return False


def _sentence(error: Exception) -> str:
    """The first sentence of an error."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).split(". ")[0].rstrip(".:,")


def _worst(found: list[Comparison]) -> Comparison:
    return max(found, key=lambda each: each.error / each.bound if each.points else 0.0)


def vmap(it: Subject, name: str, device: Any) -> Line:
    """`vmap` and `vmap(grad)` over rows give what the whole tensor gives; so it is elementwise, too."""
    call, (x, *values) = _inputs(it, device)
    rows = x.reshape(-1, 1, x.shape[-1]) if values else x
    fixed = (0, *[None] * len(values))
    want = call(x, *values), run(lambda point: call(point, *values), x)[1]

    def transform(f: Call) -> list[Tensor]:
        slope = torch.func.grad(lambda point, *rest: f(point, *rest).sum())
        return [torch.vmap(each, fixed)(rows, *values) for each in (f, slope)]

    def judge(found: list[Tensor]) -> Line:
        pairs = zip(found, want, strict=True)
        worst = _worst([compare(x.flatten(), got.flatten(), right.detach().flatten()) for got, right in pairs])
        return worst.line(name) if worst.error else Line(name, "pass", f"vmap and vmap(grad), {len(rows)} rows")

    return _under(it, name, call, transform, judge)


def jacrev(it: Subject, name: str, device: Any) -> Line:
    """The whole Jacobian: the derivative on its diagonal, and zeros."""
    call, inputs = _inputs(it, device)
    places = tuple(range(len(inputs)))
    want = _leaves(functional.jacobian(_truth(it, call), inputs))
    return _under(
        it, name, call, lambda f: _leaves(torch.func.jacrev(f, places)(*inputs)),
        lambda found: _matrices(it, name, inputs, found, want, lambda f: functional.jacobian(f, inputs)),
    )  # fmt: skip


def hessian(it: Subject, name: str, device: Any) -> Line:
    """The Hessian of the sum, forward mode over reverse mode: the second derivative on its diagonal, and zeros."""
    if it.surrogate:
        return Line(name, "note", SURROGATE)
    call, inputs = _inputs(it, device)
    places = tuple(range(len(inputs)))

    def total(f: Call) -> Call:
        return lambda *given: f(*given).sum()

    def twice(f: Call) -> Any:
        return functional.hessian(total(f), inputs)

    want = _leaves(twice(_truth(it, call)))
    return _under(
        it, name, call, lambda f: _leaves(torch.func.hessian(total(f), places)(*inputs)),
        lambda found: _matrices(it, name, inputs, found, want, twice),
    )  # fmt: skip


def _leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = pytree.tree_leaves(tree)
    return found


def _matrices(
    it: Subject,
    name: str,
    inputs: tuple[Tensor, ...],
    found: list[Tensor],
    want: list[Tensor],
    of: Callable[[Call], Any],
) -> Line:
    """Derivatives by all inputs, against the reference's; what PyTorch's own op errs is allowed."""
    native = _leaves(of(_plain(it))) if it.truth is not None and it.truth.native and not it.surrogate else None
    worst, x, size = [], inputs[0].flatten(), inputs[0].numel()
    for i, (got, right) in enumerate(zip(found, want, strict=True)):
        others = [native[i].flatten()] if native is not None else []
        if got.numel() >= size:
            at = x.repeat_interleave(got.numel() // size)
        else:  # by trained parameters alone: sums over the rows, which round
            at = torch.zeros_like(right).flatten()
            others.append(right.flatten() + 1e-12 * right.abs().max())
        worst.append(compare(at, got.flatten(), right.flatten(), *others))
    line = _worst(worst).line(name)
    return replace(line, detail=line.detail.replace(" points", " entries"))


def compiled(it: Subject, name: str, device: Any) -> Line:
    """`torch.compile(fullgraph=True)`: output and gradient of one graph, from the backend that needs no compiler."""
    x = torch.linspace(-5, 5, 41, dtype=torch.float32, device=device)
    want = run(it.call, x)

    graphs = []

    def transform(call: Call) -> tuple[Tensor, Tensor]:
        from torch._dynamo import lookup_backend  # loading it takes a second

        def backend(graph: Any, example_inputs: Any) -> Any:
            graphs.append(graph)
            return lookup_backend("aot_eager")(graph, example_inputs)

        def traced(point: Tensor) -> Tensor:
            return call(point)

        traced.__code__ = traced.__code__.replace()  # Dynamo remembers, and limits, what it compiled by code object
        leaf = x.clone().requires_grad_()
        y = torch.compile(traced, backend=backend, fullgraph=True)(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, torch.ones_like(y))[0]

    def judge(found: tuple[Tensor, Tensor]) -> Line:
        if not graphs:
            return Line(name, "note", "PyTorch's compiler is switched off")
        worst = _worst([compare(x, got, right) for got, right in zip(found, want, strict=True)])
        return (
            worst.line(name) if worst.error else Line(name, "pass", "one graph; output and gradient as in eager mode")
        )

    return _under(it, name, it.call if it.overwrites else it.ready(x), transform, judge)
