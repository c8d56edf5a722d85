"""Results: what a model computes after a swap, against what it computed before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actswap import running
from actswap.comparing import grid
from actswap.nn import ActivationModule
from actswap.replacement import Slot
from actswap.report import Line, Outcome
from actswap.running import Inputs
from actswap.sites import Site
from actswap.values import RUNS, Values, differing, relative, run, same_bits


def of_swap(
    model: nn.Module,
    example_inputs: Inputs,
    before: Mapping[str, Values],
    noise: Mapping[str, dict[str, float]],
    slots: Sequence[Slot],
) -> list[Line]:
    """What the model computes now: finite, and the original's where old and new are the same function.

    The same function may round otherwise: PyTorch's kernel in place of a formula that a library writes out. The
    result then differs by what rounding errors grow to, and must be within the square root of the machine epsilon.
    """
    same = all(_is_same(slot) for slot in slots)
    alike = same and all(_rounds_alike(slot) for slot in slots)
    drift = _Drift(slots)
    lines = []
    for name, training, gradients in RUNS:
        expected = before[name]
        if expected.problem and expected.problem.startswith("the original raises"):
            continue
        with drift.measured() if training is None else contextlib.nullcontext():
            got = run(model, example_inputs, training, gradients)
        if got.problem and not expected.problem:
            lines.append(Line(f"result ({name})", "fail", got.problem))
            continue
        finite = [t for t, x in got.named().items() if x.is_floating_point() and not x.isfinite().all()]
        infinite = [t for t in finite if t not in expected.named() or expected.named()[t].isfinite().all()]
        if infinite:
            lines.append(Line(f"result ({name})", "fail", f"not finite, and were before: {', '.join(infinite[:6])}"))
        elif alike and (differences := differing(expected, got, noise[name])):
            lines.append(Line(f"result ({name})", "fail", "\n".join(differences[:6]), {"differences": differences}))
        elif alike:
            lines.append(Line(f"result ({name})", "pass", "the same function: bit for bit the original's"))
        elif same:
            lines.append(_of_other_roundings(f"result ({name})", expected, got))
        else:
            moved = max((relative(a, b) for a, b in zip(expected.outputs, got.outputs, strict=True)), default=0.0)
            detail = f"finite; the output moved by {moved:.3g} of its norm"
            lines.append(Line(f"result ({name})", "pass", detail, {"drift": moved}))
    return lines if same else [*lines, drift.line()]


def _of_other_roundings(title: str, expected: Values, got: Values) -> Line:
    """How far the same function moved the result by rounding otherwise.

    Gradients count together, and so do outputs: some, as those of a bias before a softmax, are nothing but rounding.
    """
    common = [name for name in expected.gradients if name in got.gradients]
    sides = {
        "outputs": zip(expected.outputs, got.outputs, strict=True),
        "gradients": ((expected.gradients[name], got.gradients[name]) for name in common),
    }
    moved, bounds = {}, {}
    for what, side in sides.items():
        pairs = [(x, y) for x, y in side if x.is_floating_point()]
        norm = sum(float(x.double().square().sum()) for x, _ in pairs) ** 0.5
        distance = sum(float((x.double() - y.double()).square().sum()) for x, y in pairs) ** 0.5
        moved[what] = distance / norm if norm else distance
        bounds[what] = max((torch.finfo(x.dtype).eps for x, _ in pairs), default=0.0) ** 0.5
    outcome: Outcome = "pass" if all(moved[what] <= bounds[what] for what in moved) else "fail"
    parts = ", ".join(f"{what} moved by {moved[what]:.2g} of their norm, bound {bounds[what]:.2g}" for what in moved)
    return Line(title, outcome, f"the same function in other roundings: {parts}", {"drift": moved})


def _rounds_alike(slot: Slot) -> bool:
    """Whether old and new give the same bits, values and gradients, at every point of a grid."""
    site = slot.sites[0]
    channels = max((p.numel() for p in slot.module.parameters()), default=1)
    points = grid(site.activation.kinks(site.activation.bind(_numbers(site))), site.dtype or torch.float32, site.device)
    x = points[:, None].expand(-1, channels)
    try:
        old, new = (_values_and_gradient(f, x) for f in (slot.old, slot.module.forward))
    except Exception:  # it takes no tensor of this shape; the same function is then compared within rounding
        return False
    return all(same_bits(a, b) for a, b in zip(old, new, strict=True))


def _numbers(site: Site) -> dict[str, Any]:
    return {name: value for name, value in site.params.items() if not isinstance(value, Tensor)}


def _values_and_gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad(), torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(0)
        y = f(leaf.clone())
        (gradient,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    return y.detach(), gradient


def constants(module: ActivationModule) -> dict[str, Any]:
    """The parameters that are numbers and belong to the activation, not to the mode the module is in."""
    modes = {p.name for p in module.activation.parameters if p.mode}
    return {n: v for n, v in module.params.items() if n not in modes and not isinstance(v, Tensor)}


def _is_same(slot: Slot) -> bool:
    module = slot.module
    if not isinstance(module, ActivationModule):
        return False
    mine = module.activation
    own = constants(module)
    return all(
        site.activation is mine
        and not site.idiom
        and {**mine.defaults, **site.params, **own} == {**mine.defaults, **site.params}
        for site in slot.sites
    )


class _Drift:
    """How far each new activation is from the old one on the inputs that it gets."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.sums: dict[str, tuple[float, float]] = {}

    def measured(self) -> Any:
        return running.forwards({slot.module: self._both(slot) for slot in self.slots})

    def _both(self, slot: Slot) -> Callable[[Tensor], Tensor]:
        forward = slot.module.forward

        def both(x: Tensor) -> Tensor:
            with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
                old = slot.old(x.clone())
            new: Tensor = forward(x)
            distance, norm = self.sums.get(slot.path, (0.0, 0.0))
            added = float((new.double() - old.double()).square().sum()), float(old.double().square().sum())
            self.sums[slot.path] = distance + added[0], norm + added[1]
            return new

        return both

    def line(self) -> Line:
        """The sites at which old and new differ most."""
        drift = {path: (d / n if n else d) ** 0.5 for path, (d, n) in self.sums.items()}
        worst = sorted(drift, key=lambda path: -drift[path])[:3]
        detail = "new against old, relative to its norm: " + ", ".join(f"{path} {drift[path]:.3g}" for path in worst)
        return Line("drift per site", "note", detail + (", ..." if len(drift) > 3 else ""), {"drift": drift})
