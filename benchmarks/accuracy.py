"""Errors of every activation against the truth, side by side with PyTorch's own op. Writes docs/accuracy.md.

python benchmarks/accuracy.py            a few minutes: every half precision number, samples of float32 and float64
python benchmarks/accuracy.py --full     2^20 float32 numbers, 10^5 of mpmath per setting: an hour on two cores
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mpmath
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import measure
from measure import Case, Errors, Truth

from actswap.activation import HALF, Activation
from actswap.catalog import CATALOG

PAGE = Path(__file__).resolve().parent.parent / "docs" / "accuracy.md"
COUNTS = {False: {torch.float32: 2**15, torch.float64: 2000}, True: {torch.float32: 2**20, torch.float64: 100_000}}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHAT = ("value", "derivative")

INTRODUCTION = """# Accuracy

Written by `python benchmarks/accuracy.py{option}` ({versions}).

Every activation against the truth, ours and PyTorch's own op side by side, in and out of place. The truth is mpmath
with at least 50 digits for float64; for the other dtypes it is the definition's reference in float64, which
`tests/test_truth.py` holds within 0.1 ulp of float32 of mpmath. Inputs: all finite numbers of float16 and bfloat16;
in float32 all upper halves of the bits, {singles:,} stratified numbers and the neighbourhoods of kinks, thresholds and
overflows; in float64 {doubles:,} numbers.

- *value*: the greatest error of the output, in ulp: spacings of the dtype at the truth.
- *derivative*: the greatest error of the derivative, first in eps of the dtype (absolutely, but of the truth where
  that is more than 1), then in ulp: relatively. Where a derivative crosses zero or fades, few of its digits are right
  however small its error.
- *bits*: whether values and gradients are those of PyTorch's op at every input, NaN and infinities among them.
  PyTorch's figures are of its op that saves the same, in place or not, if there is one.
- PyTorch has no op for the activations without figures of its own. rrelu in training draws random numbers: same bits,
  no truth. A surrogate's gradient is no derivative by its definition.
- sine and snake multiply their input by a parameter. Where that product has no correct digit in float32 (float64), from
  some 10^7 (10^15) on, the result has none either; these inputs count here.
- Constants are float32 numbers except in float64, and trained parameters bfloat16 numbers, so that an error is one of
  the formula and not of a parameter. Parameters with the same figures share a row.
"""

FAULTS = """## Faults of PyTorch's own kernels

Found by the same run: values and derivatives that are not finite where the truth is, or that have less than half of
their digits although the truth is no subnormal number and does not cross zero there. *From* is the input nearest to
zero with this fault, *worst* the one with the greatest error in ulp. Where PyTorch has the op, ours gives the same
bits, faults included, since a swap must not change a network. Of our own formulas, {exceptions}.
"""


@dataclass(frozen=True)
class Result:
    """The errors of one case in one dtype."""

    case: Case
    ours: tuple[Errors, ...]
    theirs: tuple[Errors, ...]
    bits: str


def parameters(case: Case) -> str:
    """The parameters that are not the defaults."""
    usual = measure.settings(case.activation, torch.float64)[0]
    given = {name: value for name, value in case.params.items() if abs(value - usual[name]) > 1e-2 * abs(usual[name])}
    return ", ".join(f"{name} {value:.3g}" for name, value in given.items())


def points(activation: Activation, params: dict[str, Any], dtype: torch.dtype, count: int) -> Tensor:
    """The inputs of a table, finite ones."""
    if dtype in HALF:
        x = measure.patterns(dtype)
    elif dtype == torch.float32:
        around = measure.neighbourhoods(activation, params, dtype)
        x = torch.cat([measure.patterns(dtype), around, measure.stratified(dtype, count)])
    else:
        x = measure.stratified(dtype, count)
    return x[x.isfinite()]


def bits(cases: list[Case], x: Tensor) -> str:
    """Where our results are PyTorch's: everywhere, in values only, or that there is no op."""
    if not cases[0].activation.native:
        return "no op"
    if cases[0].missing(x.dtype):
        return "no op in this dtype"
    x = torch.cat([x, torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=x.dtype)])
    upstream = torch.randn(len(x), generator=torch.Generator().manual_seed(1)).to(x.dtype)
    differ = torch.zeros(2, dtype=torch.long)
    for case in cases:
        pairs = zip(case.ours(x, upstream), case.theirs(x, upstream), strict=True)
        differ += torch.tensor([int((~measure.same(got, want)).sum()) for got, want in pairs])
    if differ[0]:
        return f"{differ[0]} values differ"
    return f"values; {differ[1] / len(cases) / len(x):.0%} of the gradients differ" if differ[1] else "yes"


def results(dtype: torch.dtype, count: int, mapping: Callable[..., Any]) -> Iterator[Result]:
    """Every activation with every parameter setting and saved state; in place and not are one."""
    for activation in CATALOG.values():
        known: tuple[dict[str, Any], Tensor, Truth] | None = None
        pairs: dict[tuple[str, str], list[Case]] = {}
        for case in measure.cases(activation, dtype):
            pairs.setdefault((str(case.params), case.save), []).append(case)
        for cases in pairs.values():
            case = cases[0]
            if known is None or known[0] != case.params:
                x = points(activation, case.params, dtype, count)
                exact = dtype == torch.float64 and not case.encoded
                right = (partial(measure.exactly, mapping=mapping) if exact else measure.truth)(
                    activation, case.params, x
                )
                known = case.params, x, right
            _, x, right = known
            said = bits(cases, x)
            ours, theirs = [], []
            if not case.encoded:
                parts = range(1 if activation.surrogate else 2)
                ours = [measure.errors(case.ours(x)[part], right, part) for part in parts]
            if not case.encoded and activation.native:
                own = replace(case, save=activation.save) if not case.same else case
                theirs = [measure.errors(own.theirs(x)[part], right, part) for part in parts]
            yield Result(case, tuple(ours), tuple(theirs), said)


def figures(errors: tuple[Errors, ...]) -> list[str]:
    """Value in ulp, derivative in eps and in ulp."""
    found = [errors[0].ulps, errors[1].scaled, errors[1].ulps] if len(errors) > 1 else [e.ulps for e in errors]
    return [*(f"{float(f.max()):.3g}" for f in found), *["–"] * (3 - len(found))]


def table(dtype: torch.dtype, rows: list[tuple[str, ...]]) -> Iterator[str]:
    """The table of one dtype, from rows of activation, parameters, saved state and the rest; like rows are one."""
    measured = ("value, ulp", "derivative, eps", "ulp")
    heads = ["activation", "parameters", "saved", *measured, f"PyTorch: {measured[0]}", *measured[1:], "bits"]
    yield f"## {str(dtype).removeprefix('torch.')}\n"
    yield f"| {' | '.join(heads)} |"
    yield f"|---|---|---|{'--:|' * 6}---|"
    merged: dict[tuple[str, ...], tuple[dict[str, None], dict[str, None]]] = {}
    for name, given, saved, *cells in rows:
        settings, states = merged.setdefault((name, *cells), ({}, {}))
        settings[given or "default"] = states[saved] = None
    for (name, *cells), (settings, states) in merged.items():
        yield f"| {' | '.join([name, '; '.join(settings), ', '.join(states), *cells])} |"
    yield ""


def faulty(errors: Errors, slack: Tensor) -> dict[str, Tensor]:
    """Where a result is not finite and the truth is, and where it has less than half of its digits."""
    info = torch.finfo(errors.dtype)
    size = errors.want.abs()
    lost = (errors.error > info.eps**0.5 * size) & (size >= info.tiny) & (errors.error > 64 * slack)
    return {"not finite": ~errors.got.isfinite() & (size <= info.max), "few digits": lost & errors.got.isfinite()}


def faults(result: Result) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with PyTorch's op, or else with ours: name, quantity and kind of fault, and their line."""
    case, of = result.case, result.theirs or result.ours
    if not of:
        return
    dtype = of[0].dtype
    slacks = measure.moved(case.activation, case.params, of[0].x.to(dtype))
    for what, errors, slack in zip(WHAT, of, slacks, strict=False):
        for kind, where in faulty(errors, slack).items():
            if where.any():
                nearest = int(torch.where(where, errors.x.abs(), torch.inf).argmin())
                worst = int(torch.where(where, errors.ulps.nan_to_num(posinf=1e300), -1.0).argmax())
                op = " ".join([case.activation.name, parameters(case)]).strip()
                cells = [op, case.save, str(dtype).removeprefix("torch."), what, kind]
                for i in (nearest, worst):
                    cells += [f"{errors.x[i]:.5g}", f"{errors.got[i]:.5g}", f"{errors.want[i]:.5g}"]
                line = " | ".join([*cells, f"{errors.ulps[worst]:.3g}"])
                yield (case.activation.name, str(dtype), what, kind), f"| {line} |"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="2^20 float32 numbers and 10^5 float64 numbers")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts = COUNTS[arguments.full]
    tables: list[str] = []
    listed: dict[bool, dict[tuple[str, ...], str]] = {True: {}, False: {}}  # of PyTorch's ops, and of ours
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for dtype in DTYPES:
            rows = []
            for result in results(dtype, counts.get(dtype, 0), partial(pool.map, chunksize=200)):
                case, errors = result.case, (*figures(result.ours), *figures(result.theirs))
                rows.append((case.activation.name, parameters(case), case.save, *errors, result.bits))
                if case.activation.native or not parameters(case):
                    for key, line in faults(result):
                        listed[case.activation.native].setdefault(key, line)
            tables += table(dtype, rows)
    versions = f"torch {torch.__version__}, mpmath {mpmath.__version__}, Python {platform.python_version()}"
    introduction = INTRODUCTION.format(
        option=" --full" * arguments.full, versions=f"{versions}, {platform.machine()}, CPU",
        singles=counts[torch.float32], doubles=counts[torch.float64],
    )  # fmt: skip
    lines = [
        introduction,
        *tables,
        FAULTS.format(exceptions="these have some by default" if listed[False] else "none has any by default"),
        "| op | saved | dtype | of | fault | from x = | got | truth | worst x = | got | truth | ulp |",
        "|---|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
        *listed[True].values(),
        *listed[False].values(),
    ]
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(listed[True])} faults of PyTorch's, {len(listed[False])} of ours; the page is {arguments.out}")


if __name__ == "__main__":
    main()
