"""Site and Sites: places in a model where an activation is applied."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from actswap.activation import Activation
from actswap.classes import MethodEdit
from actswap.dataflow import DataFlow, Node, Role
from actswap.recognize import defaulted
from actswap.rewriting import CallEdit

Kind = Literal["module", "call", "attribute", "node"]


@dataclass(frozen=True)
class ModulePlace:
    """A module registered under `key` of its parent, which is the owner."""

    key: str


@dataclass(frozen=True)
class AttributePlace:
    """A callable or a module kept in a plain attribute of the owner or of its class, or in a container there.

    Args:
        keys: of the containers, from the attribute's value to the callable.
    """

    name: str
    on_class: bool = False
    keys: tuple[Any, ...] = ()

    @property
    def path(self) -> str:
        """Its name under the owner."""
        return ".".join([self.name, *map(str, self.keys)])

    def read(self, owner: nn.Module) -> Any:
        """What is there now."""
        return functools.reduce(operator.getitem, self.keys, getattr(owner, self.name))

    def holding(self, holder: Any, value: Any) -> Any:
        """The attribute's value with another in this place: its containers on the way are copied, not changed."""
        return _with_item(holder, self.keys, value)


def _with_item(container: Any, keys: tuple[Any, ...], value: Any) -> Any:
    if not keys:
        return value
    key, *rest = keys
    item = _with_item(container[key], tuple(rest), value)
    if isinstance(container, tuple):
        items = (*container[:key], item, *container[key + 1 :])
        return type(container)._make(items) if hasattr(container, "_make") else items
    changed = copy.copy(container)
    changed[key] = item
    return changed


@dataclass(frozen=True)
class CallPlace:
    """A call in the code of one of the owner's classes, or of a helper function.

    Args:
        call: where the call stands, the slot it gets, and which argument carries the tensor.
        edits: what must change for it: first the function with the call, then, where that is a helper, the methods and
            helpers that name it.
        reads: parameters that are attributes of the owner, as chains of names.
    """

    call: CallEdit
    edits: tuple[MethodEdit, ...]
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class NodePlace:
    """A node in the graph of the owner, an fx.GraphModule, and the slot it gets."""

    node: str
    slot: str


Place = ModulePlace | AttributePlace | CallPlace | NodePlace | None


class Uncopied:
    """A reference to a module that is not copied or pickled with what holds it."""

    def __init__(self, module: nn.Module | None) -> None:
        self._ref = weakref.ref(module) if module is not None else None

    def __call__(self) -> nn.Module | None:
        return self._ref() if self._ref is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Uncopied, (None,)


@dataclass(frozen=True, eq=False)
class Site:
    """One place in a model where an activation is applied.

    Args:
        path: the dotted name that the activation's module has, or will have once it is swapped.
        kind: `module`; `call` in code; `attribute`, a stored callable; `node` of a GraphModule.
        activation: its definition.
        params: the parameters that the place states.
        inplace: whether it writes into its input.
        source: `file:line` of a call.
        aliases: other paths of the same instance.
        calls, elements: how often, and on how many elements, it ran; None when that was not observed.
        device, dtype: of its input, when observed.
        blocked: why it cannot be swapped, or None.
        idiom: whether the callee has other uses than activating (`clamp(min=0)`).
        place: where exactly, for the edit.
    """

    path: str
    kind: Kind
    activation: Activation
    params: dict[str, Any]
    inplace: bool = False
    source: str | None = None
    aliases: tuple[str, ...] = ()
    calls: int | None = None
    elements: int | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    blocked: str | None = None
    idiom: bool = False
    place: Place = None
    _paths: tuple[str, ...] = ()
    _owner: Uncopied = field(default_factory=lambda: Uncopied(None), repr=False)
    _flow: Any = field(default=None, repr=False)
    _role: Role | None = None
    _original: Callable[..., Any] | None = field(default=None, repr=False)
    _callee: Any = field(default=None, repr=False)

    @property
    def owner(self) -> nn.Module | None:
        """The module whose own code applies the activation; None on a copy of a record."""
        return self._owner()

    @property
    def role(self) -> Role:
        """What the result is for: `hidden`, `gate`, `output`, or `unknown`, from the data flow."""
        if self._role is None:
            object.__setattr__(self, "_role", self._find_role())
        return self._role  # type: ignore[return-value]

    def _find_role(self) -> Role:
        owner = self.owner
        if owner is None or self._flow is None:
            return "unknown"
        flow: DataFlow = self._flow
        return flow.role(owner, self.nodes(flow), self.activation.name)

    def nodes(self, flow: DataFlow) -> list[Node]:
        """The nodes of the owner's data flow at which the site is."""
        owner = self.owner
        assert owner is not None
        match self.place:
            case ModulePlace(key):
                return flow.child_nodes(owner, key)
            case CallPlace(call=call, edits=edits):
                return flow.call_nodes(owner, call.position, edits[0].source.function.__code__.co_filename)
            case NodePlace(node=name):
                return [node for node in flow.graph(owner).nodes if node.name == name]  # type: ignore[union-attr]
        return []

    def record(self) -> Site:
        """This site without the model: what a swap keeps."""
        return dataclasses.replace(self, _flow=None, _role=self._role or "unknown", _original=None, _callee=None)

    def __repr__(self) -> str:
        return f"Site({self.path!r}, {self.activation.name})"


Selector = str | re.Pattern[str] | Callable[[Site], bool] | Sequence[Any]


def selects(selector: Selector | None, site: Site) -> bool:
    """Whether a `where` or `exclude` picks a site: a glob or regular expression on its paths, a predicate, or several.

    >>> from actswap.registry import get
    >>> site = Site("layer1.0.relu", "module", get("relu"), {})
    >>> selects("layer1.*", site), selects("*.1.*", site), selects(["*.1.*", re.compile("relu$")], site)
    (True, False, True)
    """
    if selector is None:
        return False
    paths = site._paths or (site.path,)
    if isinstance(selector, str):
        return any(fnmatchcase(path, selector) for path in paths)
    if isinstance(selector, re.Pattern):
        return any(selector.search(path) is not None for path in paths)
    if callable(selector):
        return bool(selector(site))
    return any(selects(entry, site) for entry in selector)


class Sites(Sequence[Site]):
    """Sites in the order of the model; `print` shows a table."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites = tuple(sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __getitem__(self, index: Any) -> Any:
        return Sites(self._sites[index]) if isinstance(index, slice) else self._sites[index]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __repr__(self) -> str:
        return f"Sites({list(self._sites)!r})"

    def __str__(self) -> str:
        if not self._sites:
            return "no activation sites"
        observed = any(site.calls is not None for site in self)
        head = ["path", "activation", "kind", "role", *(["calls", "elements"] if observed else []), "notes"]
        rows = [head, *(_row(site, observed) for site in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        right = {head.index(name) for name in ("calls", "elements") if name in head}
        lines = [
            "  ".join(
                f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in [*lines, self._summary()])

    def _summary(self) -> str:
        counts: dict[str, int] = {}
        for site in self:
            counts[site.activation.name] = counts.get(site.activation.name, 0) + 1
        blocked = sum(site.blocked is not None for site in self)
        parts = ", ".join(f"{count} {name}" for name, count in counts.items())
        noun = "site" if len(self) == 1 else "sites"
        return f"{len(self)} {noun}: {parts}" + (f"; {blocked} blocked" if blocked else "")


def _row(site: Site, observed: bool) -> list[str]:
    params = ", ".join(f"{name}={value}" for name, value in defaulted(site.activation, site.params).items())
    name = f"{site.activation.name}({params})" if params else site.activation.name
    notes = []
    if site.blocked:
        notes.append(f"blocked: {site.blocked}")
    if site.idiom:
        notes.append("a clamp")
    if site.inplace:
        notes.append("in place")
    if site.aliases:
        notes.append(f"same as {', '.join(site.aliases)}")
    if site.source:
        notes.append(_short(site.source))
    counts = [f"{n:,}" if n is not None else "" for n in (site.calls, site.elements)] if observed else []
    return [site.path or "(the model itself)", name, site.kind, site.role, *counts, "; ".join(notes)]


def _short(source: str) -> str:
    """The last two parts of a source's path and its line."""
    return "/".join(re.split(r"[\\/]", source)[-2:])
