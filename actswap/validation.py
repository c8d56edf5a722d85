"""Validation: what is checked before and after a swap."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from actswap import audit, checking, registry, results, running
from actswap.audit import Op
from actswap.classes import MethodEdit, differs_only_at
from actswap.edits import Edit, Entry, Rewrite, hooks
from actswap.nn import ActivationModule
from actswap.recognize import is_lazy
from actswap.replacement import Slot
from actswap.report import Line, Report, counted
from actswap.rewriting import CallEdit
from actswap.running import Inputs
from actswap.sites import Site
from actswap.structure import Structure
from actswap.values import RUNS, Values, differing, distance, run


@dataclass
class Baseline:
    """The original model, seen before any edit."""

    structure: Structure
    example_inputs: Inputs | None
    values: dict[str, Values] = field(default_factory=dict)
    noise: dict[str, dict[str, float]] = field(default_factory=dict)
    stream: list[Op] | str = "no example inputs were given"
    why_not_run: str = "give example_inputs to compare outputs and gradients"


def before(model: nn.Module, example_inputs: Inputs | None, flags: Sequence[Entry]) -> Baseline:
    """Look at a model before it is edited.

    Args:
        flags: edits that turn off a fused kernel. They hold while the model runs here: the kernel computes the old
            activation in other operators than the code that a swap changes.

    Raises:
        Exception: whatever the model raises on the example inputs as it is.
    """
    baseline = Baseline(Structure.of(model), example_inputs)
    if example_inputs is None:
        return baseline
    if is_lazy(model):
        lazy = "its lazy parameters get their shape at the first forward, which would change the model"
        return Baseline(baseline.structure, None, why_not_run=lazy)
    with contextlib.ExitStack() as stack:
        for flag in flags:
            stack.enter_context(flag.held())
        if not _is_abstract(model, example_inputs):
            for name, training, gradients in RUNS:
                baseline.values[name], baseline.noise[name] = _controlled(model, example_inputs, training, gradients)
        baseline.stream = _stream(model, example_inputs, {})
    return baseline


def _is_abstract(model: nn.Module, example_inputs: Inputs) -> bool:
    """Whether there are no values to compare: meta or fake tensors."""
    found = (*model.parameters(), *model.buffers(), *running.tensors(example_inputs))
    return any(t.is_meta or isinstance(t, FakeTensor) for t in found)


def _controlled(
    model: nn.Module, example_inputs: Inputs, training: bool | None, gradients: bool
) -> tuple[Values, dict[str, float]]:
    """A run, and how far a second run of the same model is from it."""
    if training is None:
        first, second = (run(model, example_inputs, training, gradients) for _ in range(2))
    else:
        try:
            first, second = (run(model, example_inputs, training, gradients) for _ in range(2))
        except Exception as error:  # it works as it is, but not in this mode: then this mode is not compared
            return Values(problem=f"the original raises: {str(error).splitlines()[0]}"), {}
    a, b = first.named(), second.named()
    return first, {name: distance(a[name], b[name]) for name in a.keys() & b.keys()}


def _stream(model: nn.Module, example_inputs: Inputs, sites: Mapping[nn.Module, str]) -> list[Op] | str:
    paths = {module: path for path, module in model.named_modules()}
    try:
        return audit.stream(model, example_inputs, paths, sites)
    except Exception as error:  # code that depends on values does not run on fake tensors; the report says so
        return f"the model does not run on fake tensors ({type(error).__name__}: {str(error).splitlines()[0][:120]})"


def after(
    model: nn.Module,
    baseline: Baseline,
    edits: Sequence[Edit],
    slots: Sequence[Slot],
    skipped: Sequence[Site],
    title: str,
) -> Report:
    """Check a model after it was edited, against what it was before."""
    lines = [
        _structure(model, baseline, edits, slots),
        *_mathematics(slots),
        _static(edits),
    ]
    if baseline.example_inputs is not None:
        lines += _streams(model, baseline, slots, skipped)
        if baseline.values:
            lines += _surgery_values(model, baseline, slots)
            lines += results.of_swap(model, baseline.example_inputs, baseline.values, baseline.noise, slots)
        else:
            lines.append(Line("values", "note", "not compared: the model holds no values (meta or fake tensors)"))
    else:
        lines.append(Line("values", "note", f"not run: {baseline.why_not_run}"))
    lines.append(_reversal(edits))
    return Report(title, tuple(lines))


def _structure(model: nn.Module, baseline: Baseline, edits: Sequence[Edit], slots: Sequence[Slot]) -> Line:
    touched = {path for slot in slots for site in slot.sites for path in (site.path, *site.aliases)}
    differences = baseline.structure.differences(Structure.of(model), touched)
    old = {id(e.old): e.old for e in edits if isinstance(e, Entry) and e.modules and isinstance(e.old, nn.Module)}
    hooked = sum(any(hooks(module).values()) for module in old.values())
    if differences:
        return Line("structure", "fail", "\n".join(differences[:8]), {"differences": differences})
    count = len(baseline.structure.tensors)
    detail = f"{count} parameters and buffers, modes, hooks and state-dict keys are as they were"
    return Line("structure", "pass", detail + (f"; hooks of {hooked} replaced modules moved" if hooked else ""))


def _mathematics(slots: Sequence[Slot]) -> list[Line]:
    """Each distinct new activation against its reference, at the dtype and device of its sites."""
    seen: dict[tuple[Any, ...], Line] = {}
    for slot in slots:
        module = slot.module
        if not isinstance(module, ActivationModule):
            seen.setdefault((type(module),), Line("mathematics", "note", f"{module}: the user's own, not checked"))
            continue
        site = slot.sites[0]
        placed = next((p for p in module.parameters()), None)
        dtype = site.dtype or (placed.dtype if placed is not None else torch.get_default_dtype())
        device = site.device or (placed.device if placed is not None else torch.device("cpu"))
        if device.type == "meta" or (placed is not None and isinstance(placed, FakeTensor)) or not _exists(device):
            device = torch.device("cpu")
        params = results.constants(module)
        key = (module.activation.name, tuple(params.items()), dtype, str(device), module.save)
        if key not in seen:
            with unset_fake_temporarily():  # the caller may build and swap under a FakeTensorMode
                line = checking.mathematics(module.activation, params, dtype, device, module.save)
            if registry.is_registered(module.activation) and not module.activation.states:
                line = replace(line, detail=f"{line.detail}; its derivative comes from PyTorch's autograd")
            seen[key] = line
    return list(seen.values())


def _exists(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.is_available()


def _static(edits: Sequence[Edit]) -> Line:
    methods: set[MethodEdit] = {m for e in edits if isinstance(e, Rewrite) for m in e.new - e.old}
    changed = [m.label for m in methods if not differs_only_at(m)]
    if changed:
        return Line("surgery, static", "fail", f"more than the chosen calls changed in {', '.join(sorted(changed))}")
    if not methods:
        return Line("surgery, static", "pass", "no method was rewritten")
    calls = sum(isinstance(e, CallEdit) for m in methods for e in m.edits)
    detail = (
        f"{counted(len(methods), 'method')} recompiled from verified source; "
        f"{counted(calls, 'call expression')} changed, nothing else"
    )
    return Line("surgery, static", "pass", detail, {"methods": len(methods), "calls": calls})


@contextlib.contextmanager
def _as_before(slots: Sequence[Slot]) -> Any:
    """Let every new module compute the old activation."""
    with running.forwards({slot.module: slot.old for slot in slots}):
        yield


def _streams(model: nn.Module, baseline: Baseline, slots: Sequence[Slot], skipped: Sequence[Site]) -> list[Line]:
    if isinstance(baseline.stream, str):
        return [Line("surgery, op stream", "note", f"not compared: {baseline.stream}")]
    assert baseline.example_inputs is not None
    marks = {slot.module: slot.path for slot in slots}
    with _as_before(slots):
        old = _stream(model, baseline.example_inputs, marks)
    new = _stream(model, baseline.example_inputs, marks)
    if isinstance(old, str) or isinstance(new, str):
        return [Line("surgery, op stream", "fail", f"the original ran, but now {old if isinstance(old, str) else new}")]
    for what, a, b in (
        ("through the new slots, the old activation", baseline.stream, old),
        (
            "outside the sites, the new activation",
            [o for o in old if o.site is None],
            [o for o in new if o.site is None],
        ),
    ):
        index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x.key != y.key), min(len(a), len(b)))
        if index < max(len(a), len(b)):
            sides = [
                f"{s[index].name}{s[index].given} in {s[index].where}" if index < len(s) else "nothing" for s in (a, b)
            ]
            detail = f"{what} runs other operators: number {index} was {sides[0]}\nand is {sides[1]}"
            return [Line("surgery, op stream", "fail", detail)]
    ran = {op.site for op in new if op.site is not None}
    detail = f"{counted(len(baseline.stream), 'operator')} match one for one but at {counted(len(ran), 'site')}"
    data = {"operators": len(baseline.stream), "sites": len(ran)}
    idle = [slot.path for slot in slots if slot.path not in ran]
    lines = [Line("surgery, op stream", "pass", detail, data)]
    if idle:
        lines.append(Line("idle sites", "note", f"did not run: {', '.join(idle[:8])}", {"sites": idle}))
    return [*lines, _audit(new, slots, skipped)]


def _audit(ops: Sequence[Op], slots: Sequence[Slot], skipped: Sequence[Site]) -> Line:
    """Each kernel of an old activation that still ran, and where."""
    kernels = {_kernel(text): s.activation.name for slot in slots for s in slot.sites for text in s.activation.calls}
    kernels.pop(None, None)
    left = [op for op in ops if op.site is None and op.name in kernels]
    if not left:
        return Line("audit", "pass", "no kernel of a swapped activation runs outside its sites", {"left": 0})
    known = {path for site in skipped for path in (site.path, site.path.rpartition(".")[0])}
    known |= {str(site.source) for site in skipped}
    named: dict[str, int] = {}
    for op in left:
        mark = "left out" if op.where in known or op.source in known else "NOT A KNOWN SITE"
        text = f"{op.name} in {op.where or '(the model itself)'} at {op.source} ({mark})"
        named[text] = named.get(text, 0) + 1
    detail = "\n".join(f"{count} x {text}" for text, count in list(named.items())[:8])
    return Line("audit", "note", detail, {"left": len(left)})


def _kernel(call: str) -> str | None:
    path = call.partition("(")[0]
    return path.removeprefix("torch.ops.") if path.startswith("torch.ops.aten.") else None


def _surgery_values(model: nn.Module, baseline: Baseline, slots: Sequence[Slot]) -> list[Line]:
    assert baseline.example_inputs is not None
    lines = []
    for name, training, gradients in RUNS:
        expected = baseline.values[name]
        title = f"surgery, values ({name})"
        if expected.problem and expected.problem.startswith("the original raises"):
            lines.append(Line(title, "note", f"not compared: {expected.problem}"))
            continue
        with _as_before(slots):
            got = run(model, baseline.example_inputs, training, gradients)
        noise = baseline.noise[name]
        there = {f"gradient of {parameter}" for parameter, _ in model.named_parameters()}
        gone = expected.gradients.keys() - there - {k for k in expected.gradients if k.startswith("gradient of input ")}
        kept = Values(
            expected.outputs, {k: g for k, g in expected.gradients.items() if k not in gone}, expected.problem
        )
        differences = differing(kept, got, noise)
        if differences:
            lines.append(Line(title, "fail", "\n".join(differences[:6]), {"differences": differences}))
            continue
        what = counted(len(got.outputs), "output")
        what += f" and {counted(len(got.gradients), 'gradient')}" if gradients else ""
        noisy = max(noise.values(), default=0.0)
        how = "within the original's own noise" if noisy else "bit for bit the original's"
        remark = f"; {expected.problem}" if expected.problem else ""
        lines.append(Line(title, "pass", f"the old activation through the new slots: {what} {how}{remark}"))
    return lines


def _reversal(edits: Sequence[Edit]) -> Line:
    lost = [edit for edit in edits if edit.problem() is not None]
    if lost:
        return Line("reversal", "fail", f"{len(lost)} edits cannot be undone: {lost[0].problem()}")
    detail = f"{counted(len(edits), 'edit')}, each with what was there before"
    return Line("reversal", "pass", detail, {"edits": len(edits)})
