"""find: the sites of a model, selected, with what was observed of them. Pure: never changes the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from actswap import audit, registry, running
from actswap.activation import Activation
from actswap.classes import is_sharded
from actswap.errors import TargetError, UnknownActivationError, UnsupportedModelError
from actswap.recognize import Tables, is_lazy
from actswap.scan import scan
from actswap.sites import Selector, Site, Sites, selects

Old = Any
"""A name or glob, a module class, a function, an `autograd.Function` class, or a sequence of these."""


@dataclasses.dataclass(frozen=True)
class Query:
    """One entry of `old`: how it is called in messages, and whether it asks for a site."""

    label: str
    asks_for: Callable[[Site], bool]


def unwrap(model: nn.Module, *, wrapped: bool = False) -> nn.Module:
    """The module inside a `torch.compile` wrapper.

    Args:
        wrapped: whether the model may be wrapped for distributed training: it is only read, or restored.

    Raises:
        UnsupportedModelError: TorchScript, or a model wrapped for distributed training.
    """
    if isinstance(model, torch._dynamo.OptimizedModule):
        return unwrap(model._orig_mod, wrapped=wrapped)
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            "a TorchScript model is compiled: its activations cannot be swapped", f"a {type(model).__name__}",
            "swap in the Python model, then script or trace it",
        )  # fmt: skip
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError("actswap works on torch.nn.Module objects", f"a {type(model).__name__}")
    if not wrapped and (wrapper := distributed(model)) is not None:
        raise UnsupportedModelError(
            "a model wrapped for distributed training cannot be edited", f"a {type(wrapper).__name__}",
            "swap before wrapping: actswap.replace(model, ...), then wrap the result",
        )  # fmt: skip
    return model


def distributed(model: nn.Module) -> nn.Module | None:
    """The first module in a model that DistributedDataParallel or FSDP wraps or is; None when there is none."""
    names = ("DistributedDataParallel", "FullyShardedDataParallel")
    return next((m for m in model.modules() if type(m).__name__ in names or is_sharded(type(m))), None)


def entries(old: Old) -> list[Any]:
    """The entries of `old`, one by one; None asks for everything."""
    if old is None:
        return []
    return list(old) if isinstance(old, (list, tuple, set, frozenset)) else [old]


def queries(old: Old, known: Sequence[Activation]) -> list[Query]:
    """What `old` asks for.

    Raises:
        UnknownActivationError: a name, or a glob that fits no name.
        TargetError: an object that nothing can be recognised by.
    """
    return [_query(entry, known) for entry in entries(old)]


def _query(entry: Any, known: Sequence[Activation]) -> Query:
    if isinstance(entry, str) and any(c in entry for c in "*?["):
        names = {a.name for a in known if fnmatchcase(a.name, entry)}
        if not names:
            raise UnknownActivationError.of(entry, registry.names())
        return Query(repr(entry), lambda site: site.activation.name in names)
    if isinstance(entry, (str, Activation)):
        activation = registry.get(entry)
        return Query(repr(activation.name), lambda site: site.activation is activation)
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        return Query(entry.__name__, lambda site: isinstance(site._callee, type) and issubclass(site._callee, entry))
    if isinstance(entry, type) and issubclass(entry, torch.autograd.Function):
        return Query(f"{entry.__name__}.apply", lambda site: site._callee == entry.apply)
    if isinstance(entry, nn.Module):
        raise TargetError(
            "`old` takes a module class, not an instance",
            repr(entry),
            f"old={type(entry).__name__}, or its path as `where`",
        )
    if callable(entry) and not isinstance(entry, type):
        return Query(getattr(entry, "__name__", repr(entry)), lambda site: site._callee is entry)
    raise TargetError("`old` is a name, a module class, a function or an autograd.Function class", repr(entry))


def extras(old: Old) -> list[Any]:
    """The classes and functions in `old`, for which the scan looks even if no definition describes them."""
    return [entry for entry in entries(old) if not isinstance(entry, (str, Activation)) and callable(entry)]


def find(
    model: nn.Module,
    old: Old = None,
    *,
    where: Selector | None = None,
    exclude: Selector | None = None,
    example_inputs: running.Inputs | None = None,
) -> Sites:
    """List the places in a model where an activation is applied.

    Args:
        model: any `nn.Module`; it is read and not changed.
        old: which activations: a name or alias, a glob (`"gelu*"`), a module class, a function, an
            `autograd.Function` class, or a sequence of these. None lists all but identities.
        where: only these sites: a glob on the path, a compiled regular expression, a predicate on a `Site`, or several.
        exclude: not these.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments. With them the model runs once,
            without a trace, and each site states how often and on how many elements it ran, its device and its dtype.

    Returns:
        The sites in the order of the model; printed, a table.

    Raises:
        UnknownActivationError: `old` names none.
        UnsupportedModelError: TorchScript, or wrapped for distributed training.

    >>> import torch
    >>> print(find(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))))
    path  activation  kind    role    notes
    ----  ----------  ------  ------  -----
    1     relu        module  hidden
    1 site: 1 relu
    """
    model = unwrap(model)
    asked = queries(old, registry.definitions())
    sites = [
        site
        for site in scan(model, Tables.build(extras(old)))
        if (any(query.asks_for(site) for query in asked) if asked else site.activation.name != "identity")
        and (where is None or selects(where, site))
        and not selects(exclude, site)
    ]
    if example_inputs is not None:
        sites = observed(model, sites, example_inputs)
    return Sites(sites)


def observed(model: nn.Module, sites: Sequence[Site], example_inputs: running.Inputs) -> list[Site]:
    """The sites with what they did in one forward, run without gradients and without a trace.

    A model with lazy parameters is not run: its first forward changes it.
    """
    if is_lazy(model):
        return list(sites)
    with running.undisturbed(model), torch.no_grad(), audit.observing(sites) as seen:
        running.call(model, running.detached(model), example_inputs)
    result = []
    for site in sites:
        if site in seen:
            o = seen[site]
            site = dataclasses.replace(site, calls=o.calls, elements=o.elements, device=o.device, dtype=o.dtype)
        result.append(site)
    return result
