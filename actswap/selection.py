"""Selection: the sites that a swap takes, and what a caller should be warned of."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from actswap.activation import Activation
from actswap.errors import NoSiteError, NoSiteWarning, RoleWarning
from actswap.finding import Query
from actswap.recognize import Tables
from actswap.scan import scan
from actswap.sites import Site, Sites, selects

_GATES = ("sigmoid", "hardsigmoid", "tanh")


@dataclass
class Selection:
    """The sites that match and are to be swapped, and those that match and are not."""

    chosen: list[Site]
    skipped: list[Site]


def select(model: nn.Module, tables: Tables, asked: Sequence[Query], where: Any, exclude: Any) -> Selection:
    """The sites that are to be swapped.

    Raises:
        NoSiteError: none is.
    """
    everything = list(scan(model, tables))
    wanted = [site for site in everything if any(query.asks_for(site) for query in asked)]
    empty = [query.label for query in asked if not any(query.asks_for(site) for site in wanted)]
    chosen = [s for s in wanted if (where is None or selects(where, s)) and not selects(exclude, s)]
    if where is None:  # an idiom counts only where the data flow says so; naming it says so too
        chosen = [s for s in chosen if not s.idiom or s.role == "hidden"]
    if not chosen:
        label = " or ".join(query.label for query in asked)
        there = str(Sites(s for s in everything if s.activation.name != "identity"))
        rule = f"the model has no {label} site" if not wanted else f"`where` and `exclude` leave no {label} site"
        idioms = [s for s in wanted if s.idiom]
        hint = (
            f"name them with `where` to swap uses of {label} whose role is unknown"
            if idioms and where is None
            else ("actswap.find(model) lists what is there")
        )
        raise NoSiteError(rule, f"a {type(model).__name__} with\n{there}", hint)
    for label in empty:
        warnings.warn(
            f"{label} matches nothing in this {type(model).__name__}, while others do", NoSiteWarning, stacklevel=3
        )
    return Selection(chosen, [site for site in wanted if site not in chosen])


def warn_of_roles(sites: Sequence[Site], new: Activation | None) -> None:
    """Warn of gates that are swapped, and of outputs whose range the new activation does not keep."""
    moved = [site for site in sites if site.activation is not new]
    gates = [site.path for site in moved if site.activation.name in _GATES and site.role == "gate"]
    if gates:
        warnings.warn(
            f"{len(gates)} of the sites multiply another tensor, as gates: {_listed(gates)}\n"
            '  try:   where=lambda site: site.role == "hidden" leaves them out',
            RoleWarning,
            stacklevel=3,
        )
    if new is None:
        return
    outputs = [site.path for site in moved if not _within(new, site) and site.role == "output"]
    if outputs:
        low, high = (bound({**new.defaults}) for bound in (new.low, new.high))
        warnings.warn(
            f"{new.name} takes values from {low:g} to {high:g}, and stands at the model's output: {_listed(outputs)}\n"
            '  try:   where=lambda site: site.role != "output" leaves it out',
            RoleWarning,
            stacklevel=3,
        )


def _within(new: Activation, site: Site) -> bool:
    """Whether the new activation takes no value that the old one does not."""
    old = site.activation
    before = {**old.defaults, **{k: v for k, v in site.params.items() if not isinstance(v, Tensor)}}
    now = new.defaults
    return old.low(before) <= new.low(now) and new.high(now) <= old.high(before)


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
