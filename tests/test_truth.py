"""Every activation against the truth: PyTorch's bits where it has the op, one ulp in half precision where not.

The ordinary run reads every half precision number and samples the wider types; `-m exhaustive` reads 2^20 more numbers
of float32 and float64, and asks mpmath about 10^5 per activation and parameter setting (some 20 minutes on two cores).
"""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from functools import partial

import measure
import pytest
import torch

from actswap.activation import HALF, Activation
from actswap.catalog import CATALOG
from actswap.comparing import every, ulp

HALVES = sorted(HALF, key=str)
WIDE = [torch.float32, torch.float64]
OPS = [pytest.param(a, id=a.name) for a in CATALOG.values() if a.native]
OURS = [pytest.param(a, id=a.name) for a in CATALOG.values() if not a.native]
BOUNDED = [pytest.param(a, id=a.name) for a in CATALOG.values() if any(s.bound for s in a.states.values())]
EVERY = [pytest.param(a, id=a.name) for a in CATALOG.values()]
COUNTS = [pytest.param(2**12, id="sample"), pytest.param(2**20, id="all", marks=pytest.mark.exhaustive)]

SPACINGS = {"laplace": 64.0, "snake": 8.0}
"""What our own formulas reach in float32 and float64, in ulp; 8 where nothing is said.

laplace: around a small x, the rounding of x - mu is one of mu. snake: a sine squared, divided by alpha.
"""


def wide_points(activation: Activation, params: dict, dtype: torch.dtype, count: int) -> torch.Tensor:
    around = measure.neighbourhoods(activation, params, dtype)
    return torch.cat([measure.patterns(dtype), around, measure.stratified(dtype, count)])


def finite(x: torch.Tensor) -> torch.Tensor:
    return x[x.isfinite()]


def assert_pytorchs_bits(case: measure.Case, x: torch.Tensor) -> None:
    if case.missing(x.dtype):
        with pytest.raises(NotImplementedError):
            case.ours(x)
        return
    upstream = torch.randn(len(x), generator=torch.Generator().manual_seed(1)).to(x.dtype)
    pairs = zip(("value", "gradient"), case.ours(x, upstream), case.theirs(x, upstream), strict=True)
    for what, got, want in pairs:
        differ = ~measure.same(got, want)
        if what == "value" or case.exact:
            assert not differ.any(), f"{case}: {what} at {x[differ][0]}: {got[differ][0]}, PyTorch {want[differ][0]}"


@pytest.mark.parametrize("activation", OPS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_precision_number_gives_pytorchs_bits(activation, dtype):
    for case in measure.cases(activation, dtype):
        assert_pytorchs_bits(case, measure.patterns(dtype))


@pytest.mark.parametrize("activation", OPS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_wide_numbers_give_pytorchs_bits(activation, dtype, count):
    for case in measure.cases(activation, dtype):
        assert_pytorchs_bits(case, wide_points(activation, case.params, dtype, count))


def assert_within(case: measure.Case, x: torch.Tensor, right: measure.Truth, spacings: float) -> None:
    slacks = measure.moved(case.activation, case.params, x)
    for part, (what, got) in enumerate(zip(("value", "derivative"), case.ours(x), strict=True)):
        if what == "derivative" and case.activation.surrogate:
            continue  # by its definition no derivative
        errors = measure.errors(got, right, part)
        off = errors.beyond(slacks[part])
        assert off.max() <= spacings, f"{case}, {x.dtype}: {what} {errors.at(off)}"


@pytest.mark.parametrize("activation", OURS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_our_own_formulas_are_within_one_ulp_at_every_half_precision_number(activation, dtype):
    x = finite(measure.patterns(dtype))
    for case in measure.cases(activation, dtype):
        assert_within(case, x, measure.truth(activation, case.params, x), 1.0)


@pytest.mark.parametrize("activation", OURS)
@pytest.mark.parametrize("count", COUNTS)
def test_our_own_formulas_in_float32(activation, count):
    for case in measure.cases(activation, torch.float32):
        if not case.inplace or count < 2**20:
            x = finite(wide_points(activation, case.params, torch.float32, count))
            assert_within(case, x, measure.truth(activation, case.params, x), SPACINGS.get(activation.name, 8.0))


@pytest.mark.parametrize("activation", BOUNDED)
@pytest.mark.parametrize("dtype", [*HALVES, *WIDE], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_a_derivative_from_the_output_is_within_its_bound(activation, dtype, count):
    """At most 0.6 eps in half precision and by default; the state's own bound for other parameters in wider types."""
    for case in measure.cases(activation, dtype):
        state = activation.states[case.save]
        if not state.bound or (dtype in HALF and count == 2**20):
            continue
        x = finite(measure.patterns(dtype) if dtype in HALF else wide_points(activation, case.params, dtype, count))
        right = measure.truth(activation, case.params, x)
        errors = measure.errors(case.ours(x)[1], right, 1)
        own = measure.errors(replace(case, save=activation.save).theirs(x)[1], right, 1).eps
        usual = dtype in HALF or case.params == measure.settings(activation, dtype)[0]
        bound = (min(state.bound, 0.6) if usual else state.bound) * float(right.parts[1].abs().max().clamp(min=1))
        if dtype == torch.float64:  # float32 constants and the step at softplus' threshold are PyTorch's
            bound += float(own.max())
        assert errors.eps.max() <= bound, f"{case}, {dtype}: {errors.at(errors.eps)}"


@pytest.fixture(scope="module")
def workers():
    """A `map` over two processes."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        yield partial(pool.map, chunksize=500)


def assert_truth_is_true(activation: Activation, x: torch.Tensor, mapping) -> None:
    """mpmath against the reference, which is the truth for float32 and below, and against our float64."""
    for params in measure.settings(activation, torch.float64):
        if params.get("training"):
            continue
        around = finite(measure.neighbourhoods(activation, params, torch.float64, 1))
        points = torch.cat([x, around[around.abs() < 1e6]])
        exact = measure.exactly(activation, params, points, mapping)
        slacks = measure.moved(activation, params, points)
        near = torch.stack([torch.zeros_like(points, dtype=torch.bool), *[side[0] for side in exact.sides]]).any(0)
        for want, got, slack in zip(exact.parts, measure.truth(activation, params, points).parts, slacks, strict=True):
            keep = (points == points.float()) & (want.abs() < torch.finfo(torch.float32).max) & ~near & slack.isfinite()
            assert keep.sum() > 30, "most are left out"
            off = (((got - want).abs() - 2 * slack) / ulp(want, torch.float32))[keep]
            assert off.max() <= 0.05, f"{params}: the reference is {off.max()} ulp off at {points[keep][off.argmax()]}"
        for case in measure.cases(activation, torch.float64):
            if case.params == params and not activation.native:
                assert_within(case, points, exact, SPACINGS.get(activation.name, 8.0))


@pytest.mark.parametrize("activation", EVERY)
def test_the_reference_and_our_float64_are_the_mathematics(activation):
    some = every(torch.float32)[torch.randperm(65280, generator=torch.Generator().manual_seed(0))[:60]]
    assert_truth_is_true(activation, torch.cat([measure.stratified(torch.float64, 200), some.double()]), map)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", EVERY)
def test_the_reference_and_our_float64_are_the_mathematics_at_100_000_numbers(activation, workers):
    """Every upper half of a float32, which are all numbers of bfloat16, and the rest from float64."""
    uppers = every(torch.float32).double()
    x = torch.cat([uppers, measure.stratified(torch.float64, 100_000 - len(uppers))])
    assert_truth_is_true(activation, x, workers)
