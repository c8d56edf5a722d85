"""Check whether one activation's mathematics is right, yours or ours, line by line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from actswap import autograd
from actswap.activation import Activation
from actswap.comparing import Comparison, compare, every, grid, kept, reference, run, step
from actswap.errors import TargetError
from actswap.report import Line, Report
from actswap.subjects import Subject, subject

OURS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
THEIRS = (torch.float32, torch.float64)


def check(
    activation: Any,
    *,
    like: Any = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: str | torch.device = "cpu",
    exhaustive: bool = False,
) -> Report:
    """Check one activation's values, derivatives and manners against an independent reference.

    Args:
        activation: a name, a definition, a module (class or instance), a function of one tensor, or an
            `autograd.Function` class, also one written the legacy way.
        like: what it should be, in the same forms; by default what it is known to be.
        dtypes: by default float32 and float64, and for our own float16 and bfloat16 as well.
        device: where to run.
        exhaustive: every number of half precision, and 2^16 numbers of each wider type, in place of a grid.

    Raises:
        TargetError: something that is none of these.

    An exception in what is checked is a failed line.

    >>> bool(check("softplus"))
    True
    """
    it = subject(activation)
    if like is not None:
        model = subject(like)
        if model.truth is None:
            raise TargetError("`like` is a known activation: a name, a definition or a module of actswap", repr(like))
        own = it.own and it.truth is model.truth
        it = Subject(it.name, it.call, it.inplace, model.truth, it.params if own else model.params, it.save, own)
    lines: list[Line] = []
    for dtype in dtypes if dtypes is not None else OURS if it.own else THEIRS:
        lines += _against_reference(it, dtype, device, exhaustive)
    lines += [
        _line("gradcheck", lambda: _gradients(it, device)),
        _line("gradgradcheck", lambda: _second_gradients(it, device)),
        _line("layout", lambda: _layout(it, device)),
        _line("in place", lambda: _in_place(it, device)),
        _line("saved", lambda: _saved(it, device)),
        _line("no grad", lambda: _no_grad(it, device)),
    ]
    title = f"check {it.name}" + (f" like {it.truth.name}" if like is not None and it.truth is not None else "")
    return Report(title, tuple(lines))


def _line(name: str, make: Callable[[], Line]) -> Line:
    """The line, or a failed one that has the exception."""
    try:
        return make()
    except Exception as error:  # whatever a user's function raises is a finding, and is shown
        return Line(name, "fail", f"raised {type(error).__name__}: {str(error).strip()[:500]}")


def _points(it: Subject, dtype: torch.dtype, device: Any, exhaustive: bool = False, count: int = 401) -> Tensor:
    kinks = it.truth.kinks(it.params) if it.truth is not None else ()
    if not exhaustive:
        return grid(kinks, dtype, device, count)
    points = every(dtype)
    for kink in kinks:
        points = points[points != kink]
    return points.to(device)


def _against_reference(it: Subject, dtype: torch.dtype, device: Any, exhaustive: bool) -> list[Line]:
    """Values, derivative, kinks and specials, in one dtype."""
    short = str(dtype).removeprefix("torch.")
    if it.truth is None:
        return [Line(f"values {short}", "note", "nothing to compare with: say what it should be with like=")]
    truth, params = it.known()
    x = _points(it, dtype, device, exhaustive)

    def derivative() -> Line:
        if truth.surrogate:
            return Line(f"derivative {short}", "note", "a surrogate: its backward is deliberately not its derivative")
        at = _apart(it, x)
        _, right, bend = reference(truth, at, params)
        own = [slope for _, slope in _natives(truth, params, at)]
        return compare(at, run(it.call, at)[1], right, *own, slope=bend).line(f"derivative {short}")

    def values() -> Line:
        with torch.no_grad():
            y = it.call(x.clone())
        if y.dtype != dtype or y.shape != x.shape:
            said = f"{tuple(x.shape)} {dtype} became {tuple(y.shape)} {y.dtype}"
            return Line(f"values {short}", "fail", said)
        want, slope, _ = reference(truth, x, params)
        own = [value for value, _ in _natives(truth, params, x)]
        return compare(x, y, want, *own, slope=slope).line(f"values {short}")

    return [
        _line(f"values {short}", values),
        _line(f"derivative {short}", derivative),
        _line(f"kinks {short}", lambda: _kinks(it, dtype, device)),
        _line(f"NaN and inf {short}", lambda: _specials(it, dtype, device)),
    ]


def _apart(it: Subject, x: Tensor) -> Tensor:
    """Without the points so near a kink that a saved output cannot tell its side, where that is what is saved."""
    state = it.state
    if state is None or state.bound == 0.0:
        return x
    truth, params = it.known()
    near = [(x.double() - kink).abs() <= 1e-7 * max(1.0, abs(kink)) for kink in truth.kinks(params)]
    return x[~torch.stack(near).any(0)] if near else x


def _pytorch(truth: Activation, params: Mapping[str, Any], x: Tensor, inplace: bool = False) -> tuple[Tensor, Tensor]:
    """What PyTorch's own operations and autograd give, in the dtype of `x`."""
    values = {name: v.to(x) if isinstance(v, Tensor) else v for name, v in params.items()}
    return run(lambda point: autograd.plain(truth, point, values, inplace), x)


def _natives(truth: Activation, params: Mapping[str, Any], x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Where PyTorch has the op, what it gives, in its in-place form too where that saves something else."""
    if not truth.native:
        return []
    found = [_pytorch(truth, params, x)]
    if truth.save_ is not None and autograd.state_for(truth, params, inplace=True) == truth.save_:
        found.append(_pytorch(truth, params, x, inplace=True))
    return found


def _kinks(it: Subject, dtype: torch.dtype, device: Any) -> Line:
    """At each point where the derivative jumps, PyTorch's value; a saved output may be on either side of it."""
    truth, params = it.known()
    name = f"kinks {str(dtype).removeprefix('torch.')}"
    kinks = [kink for kink in truth.kinks(params) if math.isfinite(kink)]
    if not kinks or truth.surrogate:
        return Line(name, "note", "a surrogate" if truth.surrogate else "none")
    x = torch.tensor(kinks, dtype=dtype, device=device)
    (y, slope), (want, right) = run(it.call, x), _pytorch(truth, params, x)
    state = it.state
    sides = [_pytorch(truth, params, step(x, n))[1] for n in (-2, 2)] if state is not None and state.bound else []
    for what, got, expected in (("value", y, want), ("derivative", slope, right)):
        worst = min((compare(x, got, e) for e in (expected, *(sides if what == "derivative" else ()))), key=_excess)
        if not worst.passed:
            said = f"{what} at x = {worst.x:g}: {worst.got!r}, PyTorch's is {worst.want!r}; bound {worst.bound:.3g}"
            return Line(name, "fail", said, worst.line(name).data)
    places = ", ".join(f"{k:g} ({s:.4g})" for k, s in zip(kinks, slope.tolist(), strict=True))
    return Line(name, "pass", f"PyTorch's derivative at {places}")


def _excess(worst: Comparison) -> float:
    return worst.error / worst.bound


def _specials(it: Subject, dtype: torch.dtype, device: Any) -> Line:
    """At NaN, infinities and -0.0: what PyTorch gives wherever that is a number; NaN stays NaN."""
    truth, params = it.known()
    name = f"NaN and inf {str(dtype).removeprefix('torch.')}"
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=dtype, device=device)
    (y, slope), (want, right), ideal = run(it.call, x), _pytorch(truth, params, x), reference(truth, x, params)
    for what, got, expected, best in (("value", y, want, ideal[0]), ("derivative", slope, right, ideal[1])):
        if what == "derivative" and truth.surrogate:
            continue
        for point, a, b, c in zip(x.tolist(), got.tolist(), expected.tolist(), best.tolist(), strict=True):
            close = a == b or min(abs(a - b), abs(a - c)) <= 4 * torch.finfo(dtype).eps * max(1.0, abs(b))
            lost = math.isnan(point) and math.isnan(b) and not math.isnan(a)
            if lost or not (close or math.isnan(b)):
                return Line(name, "fail", f"{what} at x = {point}: {a}, PyTorch's is {b}")
    return Line(name, "pass", "as PyTorch; NaN stays NaN")


def _smooth_points(it: Subject, device: Any) -> Tensor:
    """A few float64 points, none of them within finite differences of a kink."""
    kinks = it.truth.kinks(it.params) if it.truth is not None else (0.0,)
    points = [-4.37, -2.71, -1.93, -0.81, -0.27, -0.06, 0.04, 0.31, 0.72, 1.37, 2.63, 4.19, 7.3]
    apart = [p for p in points if all(abs(p - kink) > 1e-3 for kink in kinks)]
    return torch.tensor(apart, dtype=torch.float64, device=device, requires_grad=True)


def _trained(it: Subject, x: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """For our own with trained parameters: the call as a function of these too, one per channel."""
    if not it.own or it.truth is None or not it.truth.learnable:
        return it.call, (x,)
    activation, params = it.known()
    names = [parameter.name for parameter in activation.learnable]
    rows = x.detach()[:12].reshape(4, 3).clone().requires_grad_()
    starts = tuple(
        (torch.as_tensor(params[name], dtype=torch.float64).reshape(-1)[:1] + torch.tensor([0.1, 0.2, 0.3])).to(x)
        for name in names
    )

    def call(point: Tensor, *values: Tensor) -> Tensor:
        return autograd.apply(activation, point, {**params, **dict(zip(names, values, strict=True))})

    return call, (rows, *(start.detach().requires_grad_() for start in starts))


def _gradients(it: Subject, device: Any) -> Line:
    if it.truth is not None and it.truth.surrogate:
        return Line("gradcheck", "note", "a surrogate: its backward is deliberately not its derivative")
    call, inputs = _trained(it, _smooth_points(it, device))
    gradcheck(call, inputs)
    return Line("gradcheck", "pass", f"{len(inputs[0].flatten())} points, float64" + _also(inputs))


def _second_gradients(it: Subject, device: Any) -> Line:
    if it.truth is not None and it.truth.surrogate:
        return Line("gradgradcheck", "note", "a surrogate: its backward is deliberately not its derivative")
    call, inputs = _trained(it, _smooth_points(it, device))
    gradgradcheck(call, inputs)
    return Line("gradgradcheck", "pass", f"{len(inputs[0].flatten())} points, float64" + _also(inputs))


def _also(inputs: tuple[Tensor, ...]) -> str:
    return f" and {len(inputs) - 1} trained parameters per channel" if len(inputs) > 1 else ""


def _layouts(device: Any) -> dict[str, Tensor]:
    base = torch.linspace(-4, 4, 2 * 3 * 4 * 5, device=device).reshape(2, 3, 4, 5)
    return {
        "contiguous": base,
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "transposed": base.transpose(1, 3),
        "every second": base[..., ::2],
        "zero-dimensional": base[0, 0, 0, 1],
        "empty": base[:0],
    }


def _layout(it: Subject, device: Any) -> Line:
    """Shape, dtype and strides of output and gradient, as PyTorch's own op gives them (a few do not keep strides)."""
    native = it.truth is not None and it.truth.native
    for name, x in _layouts(device).items():
        expected = _pytorch(*it.known(), x)[0] if native else torch.neg(x)
        y, gradient = run(it.call, x)
        for what, tensor in (("output", y), ("gradient", gradient)):
            same = (tensor.shape, tensor.dtype, tensor.stride()) == (x.shape, x.dtype, expected.stride())
            if not same and not (what == "gradient" and tensor.shape == x.shape and tensor.dtype == x.dtype):
                given = f"{tuple(tensor.shape)} {tensor.dtype} strides {tensor.stride()}"
                wanted = f"{tuple(x.shape)} {x.dtype} strides {expected.stride()}"
                return Line("layout", "fail", f"{name}: {what} is {given}, and not {wanted}")
    return Line("layout", "pass", f"{len(_layouts(device))} layouts keep shape, dtype and strides")


def _in_place(it: Subject, device: Any) -> Line:
    """The in-place form overwrites its input and gives the same output and gradient."""
    if it.inplace is None:
        return Line("in place", "note", "no in-place form")
    for name, x in _layouts(device).items():
        tensor = x.clone()
        with torch.no_grad():
            returned = it.inplace(tensor)
        if returned.data_ptr() != tensor.data_ptr():
            return Line("in place", "fail", f"{name}: the result is not the input")
        expected, slope = run(it.call, x)
        for what, got, want in (("output", tensor, expected), ("gradient", run(it.inplace, x)[1], slope)):
            worst = compare(x.flatten(), got.flatten(), want.flatten())
            if not worst.passed:
                return Line("in place", "fail", f"{name}: {what} differs\n{worst.line('').detail}")
    return Line("in place", "pass", "equal to out of place")


def _saved(it: Subject, device: Any) -> Line:
    """What stays alive after a forward, and that all of it went through `save_for_backward`."""
    x = torch.linspace(-4, 4, 1000, device=device)
    state = kept(it.call, x)
    per = ", ".join(f"{size / len(x):g} ({kind})" for kind, size in state.kinds.items()) or "0"
    data = {"bytes_per_element": state.total / len(x), **{kind: size / len(x) for kind, size in state.kinds.items()}}
    if state.hidden:
        said = f"{state.hidden / len(x):g} bytes per element went past save_for_backward: "
        return Line("saved", "fail", said + "an in-place change of it would be a wrong gradient, not an error", data)
    return Line("saved", "note", f"{per} bytes per element", data)


def _no_grad(it: Subject, device: Any) -> Line:
    x = torch.linspace(-4, 4, 1000, device=device)
    with torch.no_grad():
        state = kept(it.call, x, grad=False)
    left = state.total
    return Line("no grad", "fail" if left else "pass", f"{left} bytes stay alive" if left else "nothing saved")


@lru_cache(maxsize=4096)
def _mathematics(
    activation: Activation, params: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: str, save: str
) -> Line:
    values = activation.bind(dict(params))
    call = partial(autograd.apply, activation, params=values, save=save)
    it = Subject(activation.name, call, None, activation, values, save, own=True)
    x = _points(it, dtype, device, count=61)
    if activation.reference is None:
        return Line("mathematics", "note", f"{activation.name}: no reference to compare with")
    x = _apart(it, x)
    (y, slope), (want, right, bend) = run(call, x), reference(activation, x, values)
    own = _natives(activation, values, x)
    worst = [compare(x, y, want, *[value for value, _ in own], slope=right)]
    if not activation.surrogate:
        worst.append(compare(x, slope, right, *[there for _, there in own], slope=bend))
    short = str(dtype).removeprefix("torch.")
    for what, found in zip(("value", "derivative"), worst, strict=False):
        if not found.passed:
            line = found.line("mathematics")
            return Line("mathematics", "fail", f"{activation.name}, {short}: {what} is wrong\n{line.detail}", line.data)
    for line in (_specials(it, dtype, device), _kinks(it, dtype, device)):
        if line.outcome == "fail":
            return Line("mathematics", "fail", f"{activation.name}, {short}: {line.detail}", line.data)
    errors = ", ".join(f"{w} within {c.eps:.2g} eps" for w, c in zip(("values", "derivative"), worst, strict=False))
    return Line("mathematics", "pass", f"{activation.name}, {short}: {errors} of the reference at {len(x)} points")


def mathematics(
    activation: Activation,
    params: Mapping[str, Any],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    save: str = "auto",
) -> Line:
    """A quick comparison of our forward and backward with the reference, remembered; for every swap.

    Args:
        activation: the definition.
        params: constants by name; what is missing, and trained parameters, take their defaults.
        dtype: the site's.
        device: the site's.
        save: the site's.

    >>> from actswap.catalog import CATALOG
    >>> mathematics(CATALOG["relu"], {}, torch.float32).outcome
    'pass'
    """
    constants = {name: value for name, value in params.items() if not isinstance(value, Tensor)}
    try:
        return _mathematics(activation, tuple(constants.items()), dtype, str(device), save)
    except (NotImplementedError, RuntimeError) as error:
        return Line("mathematics", "fail", f"{activation.name}, {dtype}: {error}")
