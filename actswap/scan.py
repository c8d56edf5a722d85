"""The scan: every activation site of a model, found without running any of its code."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from actswap import calls, classes, graph, methods, source
from actswap.classes import MethodEdit, origin, unwrapped
from actswap.dataflow import DataFlow
from actswap.patterns import Match, Undetermined
from actswap.recognize import Tables
from actswap.rewriting import CallEdit, Edit, ReferenceEdit
from actswap.scope import followed
from actswap.sites import AttributePlace, CallPlace, Kind, ModulePlace, NodePlace, Site, Sites, Uncopied
from actswap.source import Method, Position, location


def named_modules(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module with all its paths, in the order of the model; unlike `nn.Module.named_modules`, aliases count."""
    found: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, path: str, above: frozenset[int]) -> None:
        found.setdefault(module, []).append(path)
        if id(module) in above:  # a cycle
            return
        for key, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{key}" if path else key, above | {id(module)})

    visit(model, "", frozenset())
    return found


class _Scan:
    """One pass over a model."""

    def __init__(self, model: nn.Module, tables: Tables) -> None:
        self.model, self.tables = model, tables
        self.flow = DataFlow(model)
        self.paths = named_modules(model)
        self.raw: dict[type, list[calls.RawCall]] = {}

    def run(self) -> Iterator[Site]:
        inside: set[nn.Module] = set()
        for module in self.paths:
            if module in inside:
                continue
            if module is not self.model and self.tables.module(module) is not None:
                inside.update(module.modules())  # what a recognised activation does inside is its own affair
                continue
            if isinstance(module, torch.jit.ScriptModule):
                inside.update(module.modules())
                yield from self._script(module)
                continue
            yield from self._owner(module)

    def _owner(self, owner: nn.Module) -> Iterator[Site]:
        yield from self._modules(owner)
        if isinstance(owner, graph.GraphModule):
            yield from self._nodes(owner)
        else:
            taken: set[str] = set()
            yield from self._attributes(owner, taken)
            yield from self._calls(owner, taken)

    def _site(self, owner: nn.Module, name: str, found: Match[Any], kind: Kind, **rest: Any) -> Site:
        paths = tuple(f"{path}.{name}" if path else name for path in self.paths[owner])
        aliases = tuple(dict.fromkeys([*rest.pop("aliases", ()), *paths[1:]]))
        return Site(
            paths[0], kind, found.activation, found.params, found.inplace, aliases=aliases, idiom=found.idiom,
            _paths=paths, _owner=Uncopied(owner), _flow=self.flow, _original=found.original, _callee=found.callee,
            **rest,
        )  # fmt: skip

    def _modules(self, owner: nn.Module) -> Iterator[Site]:
        for key, child in owner._modules.items():
            if child is None or (found := self.tables.module(child)) is None:
                continue
            own = {f"{path}.{key}" if path else key for path in self.paths[owner]}
            aliases = [path for path in self.paths[child] if path not in own]
            yield self._site(owner, key, found, "module", aliases=aliases, place=ModulePlace(key))

    def _attributes(self, owner: nn.Module, taken: set[str]) -> Iterator[Site]:
        names = dict.fromkeys(vars(owner))
        for cls in reversed(type(owner).__mro__):
            if cls not in (nn.Module, object):
                names.update(dict.fromkeys(n for n in vars(cls) if not n.startswith("__")))
        for name in names:
            on_class = name not in vars(owner)
            value = vars(owner).get(name) if not on_class else getattr(type(owner), name, None)
            if not callable(value) or isinstance(value, type) or name == "forward":
                continue
            found = self.tables.module(value) if isinstance(value, nn.Module) else self.tables.callable(value)
            if found is None and not on_class and followed(function := getattr(value, "func", value)):
                for raw in methods.in_attribute(type(owner), name, function, self.tables):
                    yield from self._call(owner, raw, taken, {})
            if found is None or (on_class and not self._reads(owner, name)):
                continue
            blocked = None
            stored = not on_class and not isinstance(value, (nn.Module, functools.partial))
            cls, edits = origin(_plain_class(owner))
            if stored and (raws := methods.of_attribute(cls, name, value, self.tables)):
                for raw in _remaining(raws, edits):
                    yield from self._call(owner, raw, taken, {})
                continue
            if on_class and isinstance(value, FunctionType):
                blocked = f"{type(owner).__name__}.{name} is a function of the class, bound to the instance when called"
            yield self._site(owner, name, found, "attribute", place=AttributePlace(name, on_class), blocked=blocked)

    def _reads(self, owner: nn.Module, name: str) -> bool:
        """Whether a method other than `__init__` reads an attribute."""
        functions = (classes.unwrapped(attribute) for _, _, attribute in methods.methods(type(owner)))
        return any(name in code.co_names for f in functions if f is not None for code in source.codes(f.__code__))

    def _calls(self, owner: nn.Module, taken: set[str]) -> Iterator[Site]:
        cls, edits = origin(_plain_class(owner))
        if cls not in self.raw:
            self.raw[cls] = methods.in_class(cls, self.tables)
        names = {e.helper: e.name for e in edits if e.helper is not None}
        for raw in _remaining(self.raw[cls], edits):
            yield from self._call(owner, raw, taken, names)

    def _call(
        self, owner: nn.Module, raw: calls.RawCall, taken: set[str], names: dict[FunctionType, str]
    ) -> Iterator[Site]:
        source = location(raw.function, raw.line)
        found: Match[Any] = Match(raw.patterns[0].activation, {}, False, idiom=raw.idiom)
        blocked, place = raw.blocked, None
        if raw.node is not None and isinstance(raw.node, ast.Call) and raw.method is not None:
            try:
                bound = raw.bound(owner)
            except Undetermined as problem:
                blocked = blocked or str(problem)
            else:
                if bound is None:
                    return
                found, argument, reads = bound
                slot = _free_name(owner, found.activation.name, taken)
                edit = CallEdit(Position.of(raw.node), slot, argument)
                chains = {name: chain.names for name, chain in reads.items()}
                if blocked is None:
                    place = CallPlace(edit, _edits(owner, raw, edit, taken, names), chains)
        name = place.call.slot if place else _free_name(owner, found.activation.name, taken)
        taken.add(name)
        yield self._site(owner, name, found, "call", source=source, blocked=blocked, place=place)

    def _nodes(self, owner: graph.GraphModule) -> Iterator[Site]:
        taken: set[str] = set()
        for call in graph.in_graph(owner, self.tables):
            slot = _free_name(owner, call.match.activation.name, taken)
            taken.add(slot)
            yield self._site(owner, slot, call.match, "node", place=NodePlace(call.node, slot), blocked=call.blocked)

    def _script(self, owner: torch.jit.ScriptModule) -> Iterator[Site]:
        """The activations in a TorchScript module's graph, which is compiled and cannot be rewritten."""
        taken: set[str] = set()
        compiled: Any = getattr(owner, "inlined_graph", None)
        for operator, patterns in self.tables.methods.items() if compiled is not None else ():
            if patterns[0].activation.name != operator.rstrip("_"):
                continue
            for _ in compiled.findAllNodes(f"aten::{operator}"):
                name = _free_name(owner, patterns[0].activation.name, taken)
                taken.add(name)
                found: Match[Any] = Match(patterns[0].activation, {}, operator.endswith("_"))
                yield self._site(owner, name, found, "node", blocked="it is compiled into a TorchScript module")


def _remaining(raws: list[calls.RawCall], edits: frozenset[MethodEdit]) -> Iterator[calls.RawCall]:
    """The calls that no earlier swap has rewritten."""
    done = {(e.cls, e.helper or e.name, edit.position) for e in edits for edit in e.edits}
    for raw in raws:
        key = (None, raw.via[0].helper) if raw.via else (raw.cls, raw.name)
        if raw.node is None or (*key, Position.of(raw.node)) not in done:
            yield raw


def _plain_class(owner: nn.Module) -> type:
    """The owner's class; where the user has parametrised a rewritten owner since, the rewritten class below that."""
    return next((c for c in type(owner).__mro__ if "__actswap__" in c.__dict__), type(owner))


def _edits(
    owner: nn.Module, raw: calls.RawCall, call: CallEdit, taken: set[str], names: dict[FunctionType, str]
) -> tuple[MethodEdit, ...]:
    """What must change for a call: its function and, for one in a helper, all that name the helper on the way to it."""
    assert raw.method is not None
    if not raw.via:
        return (MethodEdit(raw.cls, raw.name, (call,), raw.method.digest),)
    for helper in dict.fromkeys(reference.helper for reference in raw.via):
        if helper not in names:
            names[helper] = _free_name(owner, re.sub(r"\W", "", helper.__name__) or "function", taken)
            taken.add(names[helper])
    holders = {unwrapped(helper): helper for helper in names}
    found = [_helper_edit(raw.via[0].helper, names, raw.method, call)]
    for reference in raw.via:
        edit = ReferenceEdit(Position.of(reference.node), names[reference.helper])
        if reference.cls is not None:
            found.append(MethodEdit(reference.cls, reference.name, (edit,), reference.holder.digest))
        else:
            found.append(_helper_edit(holders[reference.holder.function], names, reference.holder, edit))
    return tuple(found)


def _helper_edit(helper: FunctionType, names: dict[FunctionType, str], method: Method, edit: Edit) -> MethodEdit:
    return MethodEdit(None, names[helper], (edit,), method.digest, helper)


def _free_name(owner: nn.Module, stem: str, taken: set[str]) -> str:
    """The next of `stem`, `stem_1`, ... that neither the instance nor its class has."""
    name, count = stem, 0
    while name in taken or hasattr(owner, name):
        count += 1
        name = f"{stem}_{count}"
    return name


def scan(model: nn.Module, tables: Tables) -> Sites:
    """Every activation site of a model. Runs no code of the model and changes nothing."""
    return Sites(_Scan(model, tables).run())
