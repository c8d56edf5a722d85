"""Every activation against the truth: PyTorch's bits where it has the op, one ulp in half precision where not.

The ordinary run reads every half precision number and samples the wider types. `-m exhaustive` reads 2^20 more numbers
of float32 and float64, and asks mpmath about 10^5 numbers per activation, and 10^4 for parameters other than the
defaults; it takes half an hour on two cores.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import groupby

import measure
import pytest
import torch

from actswap.activation import HALF, Activation, Domain, Parameter, State, own
from actswap.catalog import CATALOG
from actswap.comparing import every, ulp

HALVES = sorted(HALF, key=str)
WIDE = [torch.float32, torch.float64]
OPS = [pytest.param(a, id=a.name) for a in CATALOG.values() if a.native]
OURS = [pytest.param(a, id=a.name) for a in CATALOG.values() if not a.native]
BOUNDED = [pytest.param(a, id=a.name) for a in CATALOG.values() if any(s.bound for s in a.states.values())]
EVERY = [pytest.param(a, id=a.name) for a in CATALOG.values()]
COUNTS = [pytest.param(2**12, id="sample"), pytest.param(2**20, id="all", marks=pytest.mark.exhaustive)]

SPACINGS = {"laplace": 64.0, "snake": 8.0, "quick_gelu": 20.0}
"""What our own formulas reach in float32 and float64, in ulp; 6 where nothing is said.

laplace: around a small x, the rounding of x - mu is one of mu. snake: a sine squared, divided by alpha.
quick_gelu: its backward is ATen's kernel for silu, in which 1 minus a sigmoid near 1 cancels.
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


def alike(activation: Activation, dtype: torch.dtype):
    """Parameters, and the cases that have them: they share a truth."""
    return groupby(measure.cases(activation, dtype), key=lambda case: case.params)


def assert_within(cases: Iterable[measure.Case], x: torch.Tensor, right: measure.Truth, spacings: float) -> None:
    first, *rest = cases
    slacks = measure.moved(first.activation, first.params, x)
    for case in (first, *rest):
        for part, (what, got) in enumerate(zip(("value", "derivative"), case.ours(x), strict=True)):
            if what == "derivative" and (case.activation.surrogate or case.encoded):
                continue  # by its definition no derivative
            errors = measure.errors(got, right, part)
            off = errors.beyond(slacks[part])
            assert off.max() <= spacings, f"{case}, {x.dtype}: {what} {errors.at(off)}"


@pytest.mark.parametrize("activation", OURS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_our_own_formulas_are_within_one_ulp_at_every_half_precision_number(activation, dtype):
    x = finite(measure.patterns(dtype))
    for params, cases in alike(activation, dtype):
        assert_within(cases, x, measure.truth(activation, params, x), 1.0)


@pytest.mark.parametrize("activation", OURS)
@pytest.mark.parametrize("count", COUNTS)
def test_our_own_formulas_in_float32(activation, count):
    for params, cases in alike(activation, torch.float32):
        x = finite(wide_points(activation, params, torch.float32, count))
        assert_within(cases, x, measure.truth(activation, params, x), SPACINGS.get(activation.name, 6.0))


@pytest.mark.parametrize("activation", BOUNDED)
@pytest.mark.parametrize("dtype", [*HALVES, *WIDE], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_a_derivative_from_the_output_is_within_its_bound(activation, dtype, count):
    """At most 0.6 eps in half precision; in wider types too by default, and else the state's own bound.

    The state's own also where PyTorch's op in place saves the output too: the same bits, whatever their error.
    """
    for case in measure.cases(activation, dtype):
        state = activation.states[case.save]
        if not state.bound or case.encoded or (dtype in HALF and count == 2**20):
            continue
        x = finite(measure.patterns(dtype) if dtype in HALF else wide_points(activation, case.params, dtype, count))
        right = measure.truth(activation, case.params, x)
        errors = measure.errors(case.ours(x)[1], right, 1)
        own = measure.errors(replace(case, save=activation.save).theirs(x)[1], right, 1).eps
        usual = dtype in HALF or (case.params == measure.settings(activation, dtype)[0] and not case.same)
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
    for index, params in enumerate(measure.settings(activation, torch.float64)):
        if params.get("training"):
            continue
        around = finite(measure.neighbourhoods(activation, params, torch.float64, 1))
        points = torch.cat([x[:: 10 if index and len(x) > 1000 else 1], around[around.abs() < 1e6]])
        exact = measure.exactly(activation, params, points, mapping)
        slacks = measure.moved(activation, params, points)
        near = torch.stack([torch.zeros_like(points, dtype=torch.bool), *[side[0] for side in exact.sides]]).any(0)
        for want, got, slack in zip(exact.parts, measure.truth(activation, params, points).parts, slacks, strict=True):
            keep = (points == points.float()) & (want.abs() < torch.finfo(torch.float32).max) & ~near & slack.isfinite()
            assert keep.sum() > 30, "most are left out"
            off = (((got - want).abs() - 2 * slack) / ulp(want, torch.float32))[keep]
            assert off.max() <= 0.1, f"{params}: the reference is {off.max()} ulp off at {points[keep][off.argmax()]}"
        if not activation.native:
            cases = [case for case in measure.cases(activation, torch.float64) if case.params == params]
            assert_within(cases, points, exact, SPACINGS.get(activation.name, 6.0))


@pytest.mark.parametrize("activation", EVERY)
def test_the_reference_and_our_float64_are_the_mathematics(activation):
    x = torch.cat([measure.stratified(torch.float32, 240).double(), measure.stratified(torch.float64, 60)])
    assert_truth_is_true(activation, x, map)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activation", EVERY)
def test_the_reference_and_our_float64_are_the_mathematics_at_100_000_numbers(activation, workers):
    """Every upper half of a float32, which are all numbers of bfloat16, and the rest from float64."""
    uppers = every(torch.float32).double()
    x = torch.cat([uppers, measure.stratified(torch.float64, 100_000 - len(uppers))])
    assert_truth_is_true(activation, x, workers)


def test_parameters_are_tried_at_the_ends_of_their_domain():
    tried = {a.name: measure.settings(a, torch.float32) for a in CATALOG.values()}
    assert {"lambd": 0.0} in tried["softshrink"]
    assert {p["eps"] for p in tried["xielu"]} >= {0.0}
    assert {p["training"] for p in tried["rrelu"]} == {True, False}
    assert all(any(p[name] != a.defaults[name] for p in tried[a.name]) for a in CATALOG.values() for name in a.names)


def cubic(slope: float) -> Activation:
    """A definition that is not in the catalog; with a slope of 3 its derivative is right."""
    derivative = State(derivative=lambda x, size: slope * size * x * x, second=lambda x, size: 6 * size * x)
    return Activation(
        name="cubic", parameters=(Parameter("size", 1.0, Domain(0.0)),), forward=own(lambda x, size: size * x * x * x),
        states={"input": derivative}, reference=lambda x, size: size * x**3,
    )  # fmt: skip


def test_a_new_definition_is_covered_and_its_faults_are_seen():
    test = partial(test_our_own_formulas_are_within_one_ulp_at_every_half_precision_number, dtype=torch.float16)
    assert {case.params["size"] for case in measure.cases(cubic(3.0), torch.float16)} == {0.0, 0.5, 1.0}
    test(cubic(3.0))
    test_our_own_formulas_in_float32(cubic(3.0), 2**12)
    with pytest.raises(AssertionError, match=r"cubic\(size=1\) saving input, torch.float16: derivative"):
        test(cubic(3.01))


def test_a_formula_that_underflows_or_overflows_too_early_is_seen():
    test = test_our_own_formulas_are_within_one_ulp_at_every_half_precision_number
    early = replace(CATALOG["quick_gelu"], forward=own(lambda x: x * torch.sigmoid(1.702 * x)))
    test(early, torch.float16)  # whose numbers end before
    with pytest.raises(AssertionError, match="quick_gelu.*value"):
        test(early, torch.bfloat16)
    with pytest.raises(AssertionError, match="star_relu.*value"):
        test(
            replace(CATALOG["star_relu"], forward=own(lambda x, scale, bias: scale * x.relu() ** 2 + bias)),
            torch.bfloat16,
        )


def test_other_bits_than_pytorchs_are_seen():
    other = replace(CATALOG["silu"], forward=lambda x: x * torch.sigmoid(x), forward_=None)
    with pytest.raises(AssertionError, match="silu.*value at .* PyTorch"):
        test_every_half_precision_number_gives_pytorchs_bits(other, torch.bfloat16)
    state = CATALOG["silu"].states["input"]
    slow = replace(CATALOG["silu"], states={"input": replace(state, kernel=None)})
    with pytest.raises(AssertionError, match="silu.*gradient at .* PyTorch"):
        test_wide_numbers_give_pytorchs_bits(slow, torch.float32, 2**12)


def test_a_reference_that_is_not_the_mathematics_is_seen():
    rough = replace(CATALOG["tanh"], reference=lambda x: torch.sinh(x.clamp(-50, 50)) / torch.cosh(x.clamp(-50, 50)))
    with pytest.raises(AssertionError, match="the reference is .* ulp off"):
        test_the_reference_and_our_float64_are_the_mathematics(rough)


FOUND = [
    ("quick_gelu", {}, torch.bfloat16, -53.25, -2.3220e-38),
    ("quick_gelu", {}, torch.float32, -3e38, -0.0),
    ("quick_gelu", {}, torch.float32, 3e38, 3e38),
    ("sine", {"omega": 30.0}, torch.float32, 3e38, None),
    ("star_relu", {"scale": 0.89453125, "bias": 0.0}, torch.bfloat16, 1.8447e19, 3.0441e38),
    ("xielu", {"beta": 0.95}, torch.bfloat16, -2.72491739e38, 8.1984e37),
]


@pytest.mark.parametrize(("name", "params", "dtype", "x", "value"), FOUND)
def test_values_and_gradients_that_were_wrong_once(name, params, dtype, x, value):
    activation = CATALOG[name]
    case = measure.Case(activation, {**activation.defaults, **params}, "input", False)
    y, gradient = case.ours(torch.tensor([x], dtype=dtype))
    assert y.isfinite() and gradient.isfinite()
    assert value is None or y.item() == pytest.approx(value, rel=5e-3)
