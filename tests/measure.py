"""Errors of every activation against the truth, side by side with PyTorch's own op; for tests and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import oracle
import torch
from torch import Tensor

from actswap import autograd
from actswap.activation import Activation, Parameter
from actswap.comparing import INTEGER, every, reference, run, ulp


def domain(parameter: Parameter) -> list[Any]:
    """Values from a parameter's own domain: the other mode, closed ends, and halfway between end and default."""
    if parameter.mode:
        return [not parameter.default]
    ends = [end for end in (parameter.domain.low, parameter.domain.high) if math.isfinite(end)]
    near = [(end + parameter.default) / 2 for end in ends] or [parameter.default * 1.7 + 0.1]
    return [value for value in (*ends, *near) if value in parameter.domain]


def settings(activation: Activation, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The defaults, the awkward values of the oracle's table, and those of each parameter's domain.

    Constants are the float32 numbers that PyTorch's kernels compute with, except in float64; trained parameters are
    tensors of the input's dtype, and so bfloat16 numbers, which every dtype has.
    """
    tried = [{}, *oracle.AWKWARD.get(activation.name, [])]
    tried += [{p.name: value} for p in activation.parameters for value in domain(p)]
    found: list[dict[str, Any]] = []
    for given in tried:
        whole = {**activation.defaults, **given}
        for p in activation.parameters:
            size = torch.bfloat16 if p.learnable else torch.float64 if dtype == torch.float64 else torch.float32
            whole[p.name] = whole[p.name] if p.mode else torch.tensor(whole[p.name], dtype=size).item()
        if (activation.requires is None or activation.requires[0](whole)) and whole not in found:
            found.append(whole)
    return found


@dataclass(frozen=True)
class Case:
    """One activation with parameters, a saved state, in place or not; and PyTorch's op that saves this state."""

    activation: Activation
    params: dict[str, Any]
    save: str
    inplace: bool

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value:.6g}" for name, value in self.params.items())
        return f"{self.activation.name}({values}) saving {self.save}{', in place' * self.inplace}"

    @property
    def encoded(self) -> bool:
        """Whether it saves neither input nor output: noise or packed bits, whose gradient need be no derivative."""
        state = self.activation.states.get(self.save)
        return state is not None and state.forward is not None

    @property
    def same(self) -> bool:
        """Whether one of PyTorch's two forms of the op saves this state."""
        forms = (autograd.state_for(self.activation, self.params, inplace=inplace) for inplace in (False, True))
        return self.save in forms

    @property
    def exact(self) -> bool:
        """Whether the gradient is PyTorch's bit for bit, by the definition."""
        state = self.activation.states.get(self.save)
        return self.activation.native and (self.same or state is None or state.bound == 0)

    def values(self, x: Tensor) -> dict[str, Any]:
        """The parameters as a user gives them: those that are trained as tensors."""
        trained = {p.name: torch.tensor([self.params[p.name]], dtype=x.dtype) for p in self.activation.learnable}
        return {**self.params, **trained}

    def ours(self, x: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Our output and gradient."""
        save = "auto" if self.save == "none" else self.save
        call = partial(autograd.apply, self.activation, params=self.values(x), inplace=self.inplace, save=save)
        return self._run(call, x, upstream)

    def theirs(self, x: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """PyTorch's: where its two forms save different states, of the one that saves this state."""
        native = oracle.NATIVE[self.activation.name]
        inplace = self.inplace if self.activation.save_ is None else self.save == self.activation.save_
        if inplace:
            try:
                return self._run(partial(native, inplace=True, **self.values(x)), x, upstream)
            except RuntimeError:  # it has no backward in place where a slope is negative
                pass
        return self._run(partial(native, inplace=False, **self.values(x)), x, upstream)

    def missing(self, dtype: torch.dtype) -> bool:
        """Whether PyTorch's own op does not exist for this dtype on this device (rrelu in training, float16, CPU)."""
        try:
            self.theirs(torch.ones(1, dtype=dtype))
        except NotImplementedError:
            return True
        return False

    def _run(self, call: Any, x: Tensor, upstream: Tensor | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)  # for those that draw
        return run(call, x, upstream)


def cases(activation: Activation, dtype: torch.dtype) -> Iterator[Case]:
    """Every parameter setting, state that it permits, and form."""
    for params in settings(activation, dtype):
        permitted = [k for k, s in activation.states.items() if s.allowed is None or s.allowed(params)]
        for save in permitted or ["none"]:
            for inplace in (False, True):
                yield Case(activation, params, save, inplace)


def patterns(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of half precision; for float32 and float64 every upper half of a float32; NaN and inf too."""
    special = torch.tensor([math.inf, -math.inf, math.nan, -math.nan], dtype=dtype)
    if dtype.itemsize > 2:
        return torch.cat([every(dtype), special])
    return torch.arange(-(2**15), 2**15, dtype=torch.int64).to(torch.int16).view(dtype)


def stratified(dtype: torch.dtype, count: int, seed: int = 0) -> Tensor:
    """Finite numbers, one at random from each of `count` equal ranges of bit patterns.

    Half of the ranges cover every magnitude, the other half those from 2^-24 to 2^10, where the curves bend.
    """
    generator = torch.Generator().manual_seed(seed)

    def between(low: float, high: float, ranges: int) -> Tensor:
        first, last = (int(torch.tensor(end, dtype=dtype).view(INTEGER[dtype.itemsize])) for end in (low, high))
        jitter = torch.rand(ranges, dtype=torch.float64, generator=generator)
        width = (last - first) / ranges  # steps of bits: below 2^53, float64 places them exactly enough
        offset = ((torch.arange(ranges, dtype=torch.float64) + jitter) * width).long()
        return (first + offset).clamp(first, last).to(INTEGER[dtype.itemsize]).view(dtype)

    part = max(count // 4, 1)
    halves = [between(0.0, torch.finfo(dtype).max, part), between(2.0**-24, 2.0**10, part)]
    return torch.cat([sign * half for half in halves for sign in (1, -1)])


def neighbourhoods(activation: Activation, params: dict[str, Any], dtype: torch.dtype, width: int = 8) -> Tensor:
    """The numbers around every kink, zero, and where an exponential, square or cube over- or underflows."""
    info = torch.finfo(dtype)
    low, high = math.log(info.tiny * info.eps), math.log(info.max)
    edges = [
        0.0,
        low,
        math.log(info.tiny),
        math.log(info.eps),
        high,
        info.max,
        info.max ** (1 / 2),
        info.max ** (1 / 3),
    ]
    edges += [math.sqrt(-2 * low), math.sqrt(2 * high)]
    sizes = {abs(float(value)) for value in params.values()} - {0.0}
    edges += [edge * scale for edge in edges for size in sizes for scale in (size, 1 / size)]
    centres = torch.tensor([*edges, *activation.kinks(params)], dtype=torch.float64)
    centres = torch.cat([centres, -centres]).clamp(-info.max, info.max).to(dtype)
    bits = centres.view(INTEGER[dtype.itemsize])[:, None] + torch.arange(-width, width + 1)
    around = bits.to(INTEGER[dtype.itemsize]).view(dtype).flatten()
    return around[around.isfinite()].unique()


@dataclass(frozen=True)
class Truth:
    """Value and derivative at `x` in float64, and both sides of each kink: where it is near, and the same there."""

    x: Tensor
    parts: tuple[Tensor, Tensor]
    sides: tuple[tuple[Tensor, Tensor, Tensor], ...]


def truth(activation: Activation, params: dict[str, Any], x: Tensor) -> Truth:
    """The truth from the definition's reference, which `exactly` is held against."""
    point = x.double()
    sides = []
    for kink in filter(math.isfinite, activation.kinks(params)):
        reach = 8 * torch.finfo(x.dtype).eps * max(abs(kink), torch.finfo(x.dtype).tiny)
        ends = torch.tensor([kink - reach, kink + reach], dtype=torch.float64)
        sides.append(((point - kink).abs() <= reach, *reference(activation, ends, params)[:2]))
    return Truth(point, reference(activation, point, params)[:2], tuple(sides))


def exactly(activation: Activation, params: dict[str, Any], x: Tensor, mapping: Callable[..., Any] = map) -> Truth:
    """The truth from mpmath, at some 200 microseconds a point; `mapping` may be that of a pool of processes."""
    numbers = list(mapping(partial(oracle.exact, activation.name, params=params), x.tolist()))
    value, slope = torch.tensor(numbers, dtype=torch.float64).reshape(-1, 2).unbind(1)
    return replace(truth(activation, params, x), parts=(value, slope))


def moved(activation: Activation, params: dict[str, Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """How far value and derivative move when `x` or a parameter does, by what our own formulas compute with.

    That is one eps of float32 for half precision and float32, and of float64 there. A formula that rounds a product of
    `x` and a parameter is no better: from 10^7 on, the sine of 1.8 x has no correct digit in float32. To it comes the
    smallest number times `x`, as a factor of a product may have underflowed; in float32 and float64, which have no
    wider dtype to compute in, the smallest normal number, as exp(-x) overflows before 1 / exp(-x) underflows.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    info, point = torch.finfo(wide), x.double()
    if wide == torch.float64:  # the reference has rounding errors of this size itself, so: to first order
        parts = reference(activation, point, params)
        spans = [(point * by).abs().nan_to_num(nan=0.0, posinf=info.max) * info.eps for by in parts[1:]]
        wild = torch.stack([span > part.abs() * 2**-10 for span, part in zip(spans, parts, strict=False)]).any(0)
        wild |= parts[0].isnan()
        spans = [span.masked_fill(wild, math.inf) for span in spans]
    else:
        shifts = [1 + info.eps * math.sin(k * k) for k in range(16)]  # irregular, or they step over whole periods
        near = [reference(activation, point * shift, params)[:2] for shift in shifts]
        for name in (p.name for p in activation.parameters if not p.mode and not p.learnable):
            ends = (1 - info.eps, 1 + info.eps)
            near += [reference(activation, point, {**params, name: params[name] * end})[:2] for end in ends]
        spans = [2 * (torch.stack(part).amax(0) - torch.stack(part).amin(0)) for part in zip(*near, strict=True)]
    smallest = (info.tiny * info.eps if x.dtype.itemsize == 2 else 4 * info.tiny) * point.abs()
    return spans[0] + smallest, spans[1] + smallest


@dataclass(frozen=True)
class Errors:
    """The errors of one result at every point, in the units of its dtype."""

    dtype: torch.dtype
    x: Tensor
    got: Tensor
    want: Tensor
    error: Tensor

    @property
    def ulps(self) -> Tensor:
        """In spacings of the dtype at the truth."""
        return self.error / ulp(self.want, self.dtype)

    @property
    def eps(self) -> Tensor:
        """In machine epsilons, whatever the size of the truth."""
        return self.error / torch.finfo(self.dtype).eps

    @property
    def scaled(self) -> Tensor:
        """In machine epsilons, of the truth where that is more than 1."""
        return self.eps / self.want.abs().clamp(min=1)

    def beyond(self, slack: Tensor) -> Tensor:
        """In spacings, or in this slack where it is more."""
        return self.error / torch.maximum(ulp(self.want, self.dtype), slack)

    def at(self, errors: Tensor) -> str:
        """Where the worst of these errors is, in words."""
        i = int(errors.argmax())
        return f"{float(errors[i]):.4g} at x = {self.x[i]:.9g}: {self.got[i]:.9g}, truth {self.want[i]:.9g}"


def errors(got: Tensor, right: Truth, part: int) -> Errors:
    """`got` against the value (part 0) or derivative (part 1) of the truth; at a kink, against its nearer side."""
    info, want = torch.finfo(got.dtype), right.parts[part]
    top = info.max * (1 + info.eps / 2)  # the number after the greatest, which rounds to infinity
    result = got.double().clamp(-top, top)

    def distance(true: Tensor) -> Tensor:
        true = torch.where(true.abs() > info.max * (1 + info.eps / 4), torch.sign(true) * top, true)
        off = torch.where((result == true) | (result.isnan() & true.isnan()), 0.0, (result - true).abs())
        return torch.where(off.isnan(), math.inf, off)

    off = distance(want)
    for near, *ends in right.sides:
        for end in ends[part]:
            nearer = near & (distance(end) < off)
            want, off = torch.where(nearer, end, want), torch.where(nearer, distance(end), off)
    return Errors(got.dtype, right.x, got.double(), want, off)


def same(a: Tensor, b: Tensor) -> Tensor:
    """Where two results have the same bits; one NaN is as good as another."""
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())
