"""Check whether one activation's mathematics is right, yours or ours, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from actswap import accuracy, autograd, manners, transforms
from actswap.activation import Activation
from actswap.comparing import run
from actswap.errors import TargetError
from actswap.progress import progress
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

    One line per property: for each dtype, values and derivative on a grid, at kinks and at special numbers; then
    gradcheck and gradgradcheck; vmap, jacrev and hessian; one compiled graph; layouts; the in-place form; determinism;
    what is saved. A line that compares has the worst input, both values, the error (in ulp too) and its bound. What
    PyTorch refuses to do with a function of yours is noted, with its reason; a wrong number fails.

    Args:
        activation: a name, a definition, a module (class or instance), a function of one tensor, or an
            `autograd.Function` (class or instance), also one written the legacy way.
        like: what it should be: a name, a definition or a module of actswap; these know it of themselves.
        dtypes: by default float32 and float64, and for our own float16 and bfloat16 as well.
        device: where to run.
        exhaustive: every number of half precision, and 2^16 numbers of each wider type, in place of a grid.

    Raises:
        TargetError: something that is none of these; a module with a parameter value per channel, since grids have no
            channels; a random function, which has no values to compare (put the module in eval mode).

    An exception in what is checked is a failed line. A run of more than two seconds (the first one in a process loads
    PyTorch's compiler) shows a progress bar on a terminal, if `rich` is installed.

    >>> bool(check("softplus"))
    True
    """
    it = subject(activation)
    if like is not None:
        model = subject(like)
        if model.truth is None:
            raise TargetError("`like` is a known activation: a name, a definition or a module of actswap", repr(like))
        it = it.like(model)
    title = f"check {it.name}" + (f" like {it.truth.name}" if like is not None and it.truth is not None else "")
    with _usual(torch.device(device)):
        it = it.settled(device)
        properties = _properties(it, dtypes if dtypes is not None else OURS if it.own else THEIRS, device, exhaustive)
        with progress(title, len(properties)) as begin:
            return Report(title, tuple(_line(name, look, begin) for name, look in properties.items()))


@contextmanager
def _usual(device: torch.device) -> Iterator[None]:
    """Gradients on and autocast off, whatever the caller is in; and the caller's random state as it was."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
    ):
        yield


def _properties(
    it: Subject, dtypes: Sequence[torch.dtype], device: Any, exhaustive: bool
) -> dict[str, Callable[[str], Line]]:
    """What is looked at, in the order of the report: each makes the line of the name it is given."""
    found: dict[str, Callable[[str], Line]] = {}
    for dtype in dtypes:
        short = str(dtype).removeprefix("torch.")
        for what, look in {"values": accuracy.values, "derivative": accuracy.derivative}.items():
            if it.truth is not None or what == "values":
                found[f"{what} {short}"] = partial(look, it, dtype=dtype, device=device, exhaustive=exhaustive)
        for what, there in {"kinks": accuracy.kinks, "NaN and inf": accuracy.specials}.items():
            if it.truth is not None:
                found[f"{what} {short}"] = partial(there, it, dtype=dtype, device=device)
    others: dict[str, Callable[..., Line]] = {
        "gradcheck": transforms.first,
        "gradgradcheck": transforms.second,
        "vmap": transforms.vmap,
        "jacrev": transforms.jacrev,
        "hessian": transforms.hessian,
        "compile": transforms.compiled,
        "layout": manners.layout,
        "in place": manners.in_place,
        "deterministic": manners.deterministic,
        "saved": manners.saved,
        "no grad": manners.no_grad,
    }
    return {**found, **{name: partial(look, it, device=device) for name, look in others.items()}}


def _line(name: str, look: Callable[[str], Line], begin: Callable[[str], None]) -> Line:
    """The line, or a failed one that has the exception."""
    begin(name)
    torch.manual_seed(0)
    try:
        return look(name)
    except Exception as error:  # whatever a user's function raises is a finding, and is shown
        return Line(name, "fail", f"raised {type(error).__name__}: {str(error).strip()[:500]}")


@lru_cache(maxsize=4096)
def _mathematics(
    activation: Activation, params: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: str, save: str
) -> Line:
    values = activation.bind(dict(params))
    call = partial(autograd.apply, activation, params=values, save=save)
    it = Subject(activation.name, call, None, activation, values, save, own=True)
    x = accuracy.points(it, dtype, device, count=61)
    if activation.reference is None:
        return Line("mathematics", "note", f"{activation.name}: no reference to compare with")
    x = accuracy.apart(it, x)
    y, slope = run(call, x)
    worst = [accuracy.compare_values(it, x, y)]
    if not activation.surrogate:
        worst.append(accuracy.compare_derivative(it, x, slope))
    short = str(dtype).removeprefix("torch.")
    for what, found in zip(("value", "derivative"), worst, strict=False):
        if not found.passed:
            said = f"{activation.name}, {short}: {what} is wrong\n{found.said}"
            return Line("mathematics", "fail", said, found.line("mathematics").data)
    for look in (accuracy.specials, accuracy.kinks):
        line = look(it, "mathematics", dtype, device)
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
