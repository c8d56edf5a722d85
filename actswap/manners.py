"""How an activation treats tensors: their layout, their memory, what it keeps of them, the same result each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actswap import autograd
from actswap.comparing import compare, run
from actswap.report import Line
from actswap.storages import NEITHER, kept
from actswap.subjects import Subject

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda base: base,
    "channels last": lambda base: base.contiguous(memory_format=torch.channels_last),
    "transposed": lambda base: base.transpose(1, 3),
    "every second": lambda base: base[..., ::2],
    "expanded": lambda base: base[:, :1].expand(-1, 3, -1, -1),
    "zero-dimensional": lambda base: base[0, 0, 0, 1],
    "empty": lambda base: base[:0],
}


def _base(device: Any) -> Tensor:
    return torch.linspace(-4, 4, 2 * 3 * 4 * 5, dtype=torch.float32, device=device).reshape(2, 3, 4, 5)


def layout(it: Subject, name: str, device: Any) -> Line:
    """Shape, dtype and strides as PyTorch's own op gives them (a few do not keep strides), and the same numbers.

    Another layout may take another path of the same kernel and round otherwise; a wrong element is off by far more.
    """
    for where, view in LAYOUTS.items():
        leaf = _base(device).requires_grad_()
        x = view(leaf * 1)
        dense, y = x.detach().clone(memory_format=torch.contiguous_format), it.call(x)
        expected = _strides(it, view(_base(device))) if where != "expanded" else y.stride()
        if (y.shape, y.dtype, y.stride()) != (x.shape, x.dtype, expected):
            given, wanted = f"{_described(y)} strides {y.stride()}", f"{_described(x)} strides {expected}"
            return Line(name, "fail", f"{where}: output is {given}, and not {wanted}")
        grown = torch.linspace(0.5, 1.5, x.numel(), device=device).reshape(x.shape)
        for upstream in (grown, torch.ones((), device=device).expand(x.shape)):
            gradient = torch.autograd.grad(y, x, upstream, retain_graph=True)[0]
            if (gradient.shape, gradient.dtype) != (x.shape, x.dtype):
                return Line(name, "fail", f"{where}: gradient is {_described(gradient)}, and not {_described(x)}")
            for what, got, want in zip(
                ("output", "gradient"), (y, gradient), run(it.call, dense, upstream), strict=True
            ):
                coarse = want + torch.finfo(want.dtype).eps ** 0.5 * want.abs().clamp(min=1)
                worst = compare(dense.flatten(), got.detach().flatten(), want.flatten(), coarse.flatten())
                if not worst.passed:
                    return Line(name, "fail", f"{where}: {what} differs from the contiguous tensor's\n{worst.said}")
    return Line(name, "pass", f"{len(LAYOUTS)} layouts keep shape, dtype, strides and numbers")


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _strides(it: Subject, x: Tensor) -> tuple[int, ...]:
    if it.truth is None or not it.truth.native:
        return torch.neg(x).stride()
    truth, params = it.known()
    values = {name: v.to(x) if isinstance(v, Tensor) else v for name, v in params.items()}
    return autograd.plain(truth, x, values).stride()


def in_place(it: Subject, name: str, device: Any) -> Line:
    """The in-place form overwrites its input and gives the same output and gradient; the other leaves it alone."""
    x = _base(device)
    with torch.no_grad():
        it.call(kept := x.clone())
    if not torch.equal(kept, x):
        return Line(name, "fail", "the out-of-place form overwrites its input")
    if it.inplace is None:
        return Line(name, "note", "no in-place form; the input is left alone")
    inner = x.clone().requires_grad_() * 1
    version, y = inner._version, it.inplace(inner)
    if not torch.equal(inner.detach(), x) and (inner._version == version or inner.grad_fn is not y.grad_fn):
        said = "the input is overwritten without ctx.mark_dirty: whoever saved it, or uses it, gets a wrong gradient"
        return Line(name, "fail", said)
    for where, view in LAYOUTS.items():
        if where == "expanded":  # PyTorch writes to no tensor whose elements share memory
            continue
        tensor, before = view(_base(device)), view(x).clone()
        with torch.no_grad():
            returned = it.inplace(tensor)
        if returned.data_ptr() != tensor.data_ptr():
            return Line(name, "fail", f"{where}: the result is not the input")
        expected, slope = run(it.call, before)
        for what, got, want in (("output", tensor, expected), ("gradient", run(it.inplace, before)[1], slope)):
            worst = compare(before.flatten(), got.flatten(), want.flatten())
            if not worst.passed:
                return Line(name, "fail", f"{where}: {what} differs\n{worst.said}")
    if it.overwrites:
        return Line(name, "note", "it overwrites its input, and says so; it has no other form")
    return Line(name, "pass", "equal to out of place; the out-of-place form leaves its input alone")


def deterministic(it: Subject, name: str, device: Any) -> Line:
    """Twice the same bits, and once more on another number of threads, under the same random state."""
    x = torch.linspace(
        -6, 6, 2**16, dtype=torch.float32, device=device
    )  # two threads' worth on a CPU, cut at a multiple of any vector
    devices = [x.device] if x.device.type == "cuda" else []
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=devices):

        def once(seed: int = 0) -> tuple[Tensor, Tensor]:
            torch.manual_seed(seed)
            return run(it.call, x)

        first, again = once(), once()
        if not _same(first, again):
            return Line(name, "fail", _difference("a second run gives other bits", x, first, again))
        try:
            torch.set_num_threads(1 if threads > 1 else 2)
            again = once()
        finally:
            torch.set_num_threads(threads)
        if not _same(first, again):
            return Line(name, "fail", _difference("another number of threads gives other bits", x, first, again))
        drawn = not _same(first, once(seed=1))
    said = "the same bits twice, and with another number of threads"
    return Line(name, "pass", f"random; under one seed {said}" if drawn else said)


def _same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, other, strict=True))


def _difference(said: str, x: Tensor, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> str:
    what, a, b = next(
        (what, a, b) for what, a, b in zip(("output", "gradient"), one, other, strict=True) if not _same((a, a), (b, b))
    )
    differing = a.view(torch.int32) != b.view(torch.int32)
    i = int(differing.nonzero()[0])
    count = int(differing.sum())
    return f"{said} in {count} of {len(x)} {what}s: at x = {x[i]:.9g}, {a[i]:.9g} and {b[i]:.9g}"


def saved(it: Subject, name: str, device: Any) -> Line:
    """What stays alive after a forward, that all of it was saved properly and, for our own, is the stated state."""
    x = torch.linspace(-4, 4, 1000, dtype=torch.float32, device=device)
    call = it.ready(x)
    with torch.enable_grad():
        state = kept(call, x)
    data = {"bytes_per_element": state.total / len(x), **{kind: size / len(x) for kind, size in state.kinds.items()}}
    parts = [
        f"{'a tensor that is ' if kind == NEITHER else 'the '}{kind} {size / len(x):g}"
        for kind, size in state.kinds.items()
    ]
    said = f"bytes per element: {', '.join(parts)}" if parts else "nothing"
    if state.hidden:
        past = f"{state.hidden / len(x):g} bytes per element went past save_for_backward"
        return Line(name, "fail", f"{said}\n{past}: changed in place, they give a wrong gradient and no error", data)
    if it.saves is not None and it.state is not None and it.state.forward is None and {*state.kinds} != {it.saves}:
        return Line(name, "fail", f"{said}; the definition says the {it.saves}", data)
    return Line(name, "note", said, data)


def no_grad(it: Subject, name: str, device: Any) -> Line:
    """Nothing stays alive where no gradient is needed."""
    x = torch.linspace(-4, 4, 1000, dtype=torch.float32, device=device)
    call = it.ready(x)
    situations: list[tuple[str, Any, bool]] = [
        ("under no_grad", torch.no_grad, True),
        ("in inference mode", torch.inference_mode, True),
    ]
    if not it.values(x):  # else its parameters want a gradient
        situations.append(("for an input without requires_grad", torch.enable_grad, False))
    for where, mode, grad in situations:
        with mode():
            state = kept(call, x, grad)
        if state.total:
            return Line(name, "fail", f"{where}, {state.total / len(x):g} bytes per element stay alive")
    return Line(name, "pass", f"nothing saved {' or '.join(where for where, _, _ in situations)}")
