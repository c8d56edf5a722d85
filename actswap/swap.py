"""replace, restore, swapped, history, diff: find, then plan, then apply, then validate or revert."""

from __future__ import annotations

import contextlib
import copy as copying
import difflib
from collections.abc import Iterator
from typing import Any

from torch import nn

from actswap import edits, registry, validation
from actswap.classes import MethodEdit
from actswap.edits import Edit, Entry, Rewrite
from actswap.errors import EquivalenceError, ParameterError, UnsupportedModelError
from actswap.finding import Old, distributed, extras, observed, queries, unwrap
from actswap.plan import Plan, Swap
from actswap.recognize import Tables
from actswap.replacement import resolve
from actswap.report import counted
from actswap.rewriting import edited_text
from actswap.running import Inputs
from actswap.scan import named_modules
from actswap.selection import select, warn_of_roles
from actswap.sites import Selector, Sites


def replace(
    model: nn.Module,
    old: Old,
    new: Any,
    *,
    where: Selector | None = None,
    exclude: Selector | None = None,
    share: bool = True,
    save: str = "auto",
    example_inputs: Inputs | None = None,
    validate: bool = True,
    copy: bool = False,
    **params: Any,
) -> nn.Module:
    """Swap activations in a model, in place.

    The model's class, parameters, buffers, devices, dtypes, flags, hooks and state-dict keys stay what they are. Either
    every change is made and checked, or none is. Not thread-safe while it runs.

    Args:
        model: any `nn.Module`.
        old: what to swap: a name or alias, a glob, a module class, a function, an `autograd.Function` class whose
            `apply` is called, or a sequence of these.
        new: what to put in: a name or alias; a module class, called with `params`, or instance, copied per site; an
            `autograd.Function` class, also one written with instance methods; a callable without arguments, called per
            site; `actswap.per_site(f)`, called with each `Site`; any other callable, a function of one tensor.
        where, exclude: a glob on the site's path, a compiled regular expression, a predicate on a `Site`, or several.
        share: whether one instance used in several places stays one instance.
        save: what the new activation saves for backward: `"input"`, `"output"`, or `"auto"`: the output where the old
            one saved its output too, or where gradients stay PyTorch's bit for bit and nothing overwrites it; else
            what PyTorch's own op saves.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments. With them, operator streams,
            outputs and gradients are compared before and after.
        validate: whether to check the result; off, nothing runs.
        copy: work on a deep copy.
        params: parameters of the new activation.

    Returns:
        The model, or its copy. `actswap.history(model)[-1]` has the sites and the validation report.

    Raises:
        NoSiteError: nothing matches.
        BlockedSiteError: a site that was asked for cannot be rewritten faithfully.
        UnknownActivationError, ParameterError, TargetError, UnsupportedModelError: an argument makes no sense.
        EquivalenceError: a check failed. The model is as it was, after this and after every other error.

    >>> import torch, actswap
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    >>> actswap.replace(model, "relu", "softplus", beta=5.0)
    Sequential(
      (0): Linear(in_features=4, out_features=4, bias=True)
      (1): Softplus(beta=5.0, threshold=20.0, save='output')
      (2): Linear(in_features=4, out_features=1, bias=True)
    )
    >>> _ = actswap.restore(model)
    """
    if copy:
        model = copying.deepcopy(model)
    root = unwrap(model)
    asked = queries(old, registry.definitions())
    if not asked:
        raise ParameterError("`old` names what to swap", repr(old), "actswap.find(model) lists what is there")
    target = resolve(new, params, save)
    tables = Tables.build(extras(old))
    selection = select(root, tables, asked, where, exclude)
    if example_inputs is not None:
        selection.chosen = observed(root, selection.chosen, example_inputs)
    warn_of_roles(selection.chosen, target.activation)
    number = max((edit.record.number for edit in edits.edits_of(root)), default=0) + 1
    label = ", ".join(query.label for query in asked)
    record = Swap(number, label.replace("'", ""), target.name, Sites([]), Sites([]), target.source, share)
    plan = Plan(root, tables, target, share, record)
    plan.make(selection.chosen)
    record.sites = Sites(site.record() for site in selection.chosen)
    record.skipped = Sites(site.record() for site in selection.skipped)
    baseline = validation.before(root, example_inputs, plan.flags) if validate else None
    edits.apply_all(plan.edits)
    if baseline is not None:
        try:
            title = f"{record.old} -> {record.new}, {counted(len(record.sites), 'site')}"
            record.report = validation.after(root, baseline, plan.edits, plan.slots, selection.skipped, title)
            if not record.report:
                raise EquivalenceError(
                    "the swap failed its validation and was undone", str(record.report),
                    "report this model; validate=False swaps without the checks",
                )  # fmt: skip
        except BaseException:
            for edit in reversed(plan.edits):
                edit.revert()
            raise
    return model


def restore(model: nn.Module, *, last: bool = False) -> nn.Module:
    """Undo the swaps of a model: the original objects come back.

    Args:
        model: a model, or any part of one, that `replace` changed.
        last: undo only the newest swap.

    Returns:
        The model.

    Raises:
        RestoreError: the model was changed by hand under a swap; nothing is undone.
        UnsupportedModelError: it is wrapped for distributed training, and a swap changed its parameters.

    >>> import torch, actswap
    >>> relu = torch.nn.ReLU()
    >>> model = actswap.replace(torch.nn.Sequential(relu, torch.nn.Linear(2, 2)), "relu", "silu")
    >>> actswap.restore(model)[0] is relu
    True
    """
    root = unwrap(model, wrapped=True)
    found = edits.edits_of(root)
    if last and found:
        found = [edit for edit in found if edit.record.number == found[-1].record.number]
    _wrapper_allows(root, found)
    edits.revert_all(found, {module: paths[0] for module, paths in named_modules(root).items()})
    return model


def _wrapper_allows(model: nn.Module, found: list[Edit]) -> None:
    """Refuse to change the parameters of a model whose wrapper for distributed training has taken note of them."""
    wrapper = distributed(model)
    old, new = ({id(p) for e in found for p in _parameters_of(e, side)} for side in ("old", "new"))
    if wrapper is not None and old != new:
        raise UnsupportedModelError(
            "a model wrapped for distributed training keeps its parameters, and this would change them",
            f"a {type(wrapper).__name__} with {len(new)} parameters that swaps brought in, {len(old)} that they took",
            "restore the model before it is wrapped",
        )  # fmt: skip


@contextlib.contextmanager
def swapped(model: nn.Module, old: Old, new: Any, **options: Any) -> Iterator[nn.Module]:
    """Swap on entry and restore on exit, also after an error.

    Args:
        model, old, new, options: as for `replace`.

    >>> import torch, actswap
    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2))
    >>> with actswap.swapped(model, "relu", "guided_relu") as guided:
    ...     print(guided[0])
    GuidedReLU(save='output')
    >>> print(model[0])
    ReLU()
    """
    result = replace(model, old, new, **options)
    number = edits.edits_of(unwrap(result))[-1].record.number
    try:
        yield result
    finally:
        root = unwrap(result)
        own = [edit for edit in edits.edits_of(root) if edit.record.number >= number]
        edits.revert_all(own, {module: paths[0] for module, paths in named_modules(root).items()})


def history(model: nn.Module) -> list[Swap]:
    """The swaps of a model that are in force, oldest first, each with `.sites`, `.skipped` and `.report`.

    >>> import torch, actswap
    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2))
    >>> actswap.history(actswap.replace(model, "relu", "silu"))
    [Swap(1: relu -> silu, 1 site)]
    """
    found = {id(edit.record): edit.record for edit in edits.edits_of(unwrap(model, wrapped=True))}
    return list(found.values())


def parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The learnable parameters that swaps brought in, for the optimiser.

    >>> import torch, actswap
    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2))
    >>> [p.shape for p in actswap.parameters(actswap.replace(model, "relu", "prelu"))]
    [torch.Size([1])]
    """
    seen: set[int] = set()
    old = {id(p) for e in edits.edits_of(unwrap(model, wrapped=True)) for p in _parameters_of(e, "old")}
    for edit in edits.edits_of(unwrap(model, wrapped=True)):
        for parameter in _parameters_of(edit, "new"):
            if id(parameter) not in seen | old:
                seen.add(id(parameter))
                yield parameter


def _parameters_of(edit: Edit, side: str) -> list[nn.Parameter]:
    value = getattr(edit, side, None) if isinstance(edit, Entry) else None
    return list(value.parameters()) if isinstance(value, nn.Module) else []


def diff(model: nn.Module) -> str:
    """A unified diff of every method that swaps rewrote, each once, as a reviewer would read it.

    >>> import torch, actswap
    >>> print(actswap.diff(torch.nn.Sequential(torch.nn.ReLU())) or "nothing was rewritten")
    nothing was rewritten
    """
    methods: dict[tuple[object, str], MethodEdit] = {}
    for edit in edits.edits_of(unwrap(model, wrapped=True)):
        if isinstance(edit, Rewrite):
            methods.update({(m.cls or m.helper, m.name): m for m in edit.new})
    return "".join(_diff_of(method) for method in methods.values())


def _diff_of(edit: MethodEdit) -> str:
    method = edit.source
    filename = method.function.__code__.co_filename
    old = method.text.splitlines(keepends=True)
    new = edited_text(method, edit.edits, edit.helper is not None)
    return "".join(difflib.unified_diff(old, new, filename, f"{filename} (swapped)", n=2))
