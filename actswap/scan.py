"""The scan: every activation site of a model, found without running any of its code."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from actswap import calls, classes, graph, mentions, methods, opaque, source
from actswap.activation import Activation
from actswap.attributes import Attributes, Kept
from actswap.callees import activations
from actswap.classes import MethodEdit, origin, unwrapped
from actswap.dataflow import DataFlow
from actswap.objects import Code, Name
from actswap.patterns import Match, Undetermined
from actswap.recognize import Tables, is_lazy
from actswap.rewriting import CallEdit, Edit, ReferenceEdit
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
        self.outside: set[nn.Module] = set()
        self.attributes = Attributes(self.paths, tables)

    def run(self) -> Iterator[Site]:
        inside: set[nn.Module] = set()
        for module in self.paths:
            if module in inside:
                continue
            if module is not self.model and self.tables.module(module) is not None:
                inside.update(module.modules())  # what a recognised activation does inside is its own affair
                yield from self._attributes(module, set(), "hooks")
                continue
            yield from self._kernels(module)
            if isinstance(module, torch.jit.ScriptModule):
                inside.update(module.modules())
                continue
            yield from self._owner(module)

    def _owner(self, owner: nn.Module) -> Iterator[Site]:
        yield from self._modules(owner)
        if isinstance(owner, graph.GraphModule):
            yield from self._nodes(owner)
            yield from self._attributes(owner, set(), "hooks")
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

    def _attributes(self, owner: nn.Module, taken: set[str], among: str = "") -> Iterator[Site]:
        for kept in self.attributes.kept[owner]:
            if among not in kept.name:
                continue
            if kept.on_class and kept.name != "forward" and not self._reads(owner, kept.name):
                continue
            leaf = kept.leaf
            if isinstance(leaf, type):
                yield from self._kept_class(owner, kept)
                continue
            if isinstance(leaf, Code):
                for name, function in mentions.code_of(leaf.cls, self._mentioned):
                    part = dataclasses.replace(kept, keys=(*kept.keys, Name(name)), leaf=function)
                    yield from self._kept_code(owner, part, taken)
                continue
            found = self.tables.module(leaf) if isinstance(leaf, nn.Module) else self.tables.callable(leaf)
            if found is not None:
                yield from self._stored(owner, kept, found, taken)
            elif isinstance(leaf, nn.Module):
                yield from self._unregistered(owner, kept)
            elif isinstance(leaf, (FunctionType, MethodType)):
                yield from self._kept_code(owner, kept, taken)
            elif inside := opaque.function(leaf, self.tables):
                yield from self._inside(owner, kept, *inside)

    @functools.cached_property
    def _mentioned(self) -> set[str]:
        """The names that the model's own code mentions, as far as a forward comes to it."""
        found: set[str] = set()
        for cls in {type(module) for module in self.paths}:
            reached = mentions.live(cls)
            for _, name, attribute in mentions.methods(cls):
                if name in reached and (function := unwrapped(mentions.unbound(attribute))) is not None:
                    found |= mentions.names_in(function)
        return found

    def _stored(self, owner: nn.Module, kept: Kept, found: Match[Any], taken: set[str]) -> Iterator[Site]:
        """An activation in an attribute or in a container there."""
        name, leaf = kept.name, kept.leaf
        path = AttributePlace(name, keys=kept.keys).path
        cls, edits = origin(_plain_class(owner))
        simple = not kept.keys and not kept.on_class and not isinstance(leaf, (nn.Module, functools.partial))
        if simple and (raws := methods.of_attribute(cls, name, leaf, self.tables)):
            for raw in _remaining(raws, edits):
                yield from self._call(owner, raw, taken, {})
            return
        blocked = None
        if not kept.keys and kept.on_class and isinstance(leaf, FunctionType):
            blocked = f"{type(owner).__name__}.{name} is a function of the class, bound to the instance when called"
        elif kept.on_class and (reader := self._reads_from_class(owner, kept.name)) is not None:
            blocked = f"{reader} may read {name} from the class, which is shared"
        elif not _in_containers(owner, kept):
            blocked = f"it is kept as {kept.spelled}, in an object that cannot be copied with another in its place"
        aliases = self.paths.get(leaf, ()) if isinstance(leaf, nn.Module) else ()
        place = AttributePlace(name, kept.on_class, kept.keys) if blocked is None else None
        yield self._site(owner, path, found, "attribute", place=place, blocked=blocked, aliases=aliases)

    def _kept_class(self, owner: nn.Module, kept: Kept) -> Iterator[Site]:
        """The class of an activation in an attribute that a forward reads: it is made anew there."""
        if self._reads(owner, kept.name, mentions.live(type(owner))):
            reason = f"it is made anew from the class kept in {kept.spelled}"
            for activation in activations(kept.leaf, self.tables):
                yield self._site(owner, kept.name, Match(activation, {}, False), "attribute", blocked=reason)

    def _inside(self, owner: nn.Module, kept: Kept, reason: str, activations: list[Activation]) -> Iterator[Site]:
        for activation in activations:
            yield self._site(owner, kept.name, Match(activation, {}, False), "attribute", blocked=reason)

    def _unregistered(self, owner: nn.Module, kept: Kept) -> Iterator[Site]:
        """The activations of a module that is kept in an attribute and is no submodule of any."""
        module = kept.leaf
        if module in self.paths or module in self.outside:
            return
        self.outside.add(module)
        inner = _Scan(module, self.tables)
        inner.outside = self.outside
        inner.paths = {m: [*self.paths.get(m, ()), *paths] for m, paths in inner.paths.items()}
        reason = f"{kept.spelled} is no submodule: what is done to the model does not reach it"
        for site in inner.run():
            if site.owner in self.paths or (isinstance(site.place, ModulePlace) and site.owner is None):
                continue
            name = f"{kept.name}.{site.path}" if site.path else kept.name
            found: Match[Any] = Match(site.activation, site.params, site.inplace, idiom=site.idiom, callee=site._callee)
            yield self._site(owner, name, found, site.kind, source=site.source, blocked=site.blocked or reason)

    def _kept_code(self, owner: nn.Module, kept: Kept, taken: set[str]) -> Iterator[Site]:
        """The activations in a function that is kept in an attribute, and in a bound method that is no method here."""
        function = kept.leaf
        if isinstance(function, MethodType):
            holder, function = function.__self__, function.__func__
            if isinstance(holder, nn.Module):
                if (found := self.tables.module(holder)) is not None:
                    reason = f"{kept.spelled} is a bound method of a {type(holder).__name__}"
                    yield self._site(owner, kept.name, found, "attribute", blocked=reason)
                    return
                if holder not in self.paths:
                    yield from self._unregistered(owner, dataclasses.replace(kept, leaf=holder))
                    return
                if not isinstance(function, FunctionType) or any(
                    vars(cls).get(function.__name__) is function for cls in type(holder).__mro__
                ):
                    return  # its calls are found in the class; `Attributes.bound` knows that it is kept
        if isinstance(function, FunctionType):
            for raw in methods.in_attribute(type(owner), kept.spelled, function, self.tables):
                yield from self._call(owner, raw, taken, {})

    def _reads_from_class(self, owner: nn.Module, name: str) -> str | None:
        """The method that reads an attribute and names the class too, by which it can pass by the instance."""
        names = {"type", "__class__", *(cls.__name__ for cls in type(owner).__mro__)}
        for _, _, attribute in mentions.methods(type(owner)):
            function = unwrapped(mentions.unbound(attribute))
            if function is not None and name in (found := mentions.names_in(function)) and names & found:
                return function.__qualname__
        return None

    def _reads(self, owner: nn.Module, name: str, within: set[str] | None = None) -> bool:
        """Whether a method other than `__init__`, or one of these methods, reads an attribute."""
        found = ((n, attribute) for _, n, attribute in mentions.methods(type(owner)))
        functions = (classes.unwrapped(attribute) for n, attribute in found if within is None or n in within)
        return any(name in code.co_names for f in functions if f is not None for code in source.codes(f.__code__))

    def _calls(self, owner: nn.Module, taken: set[str]) -> Iterator[Site]:
        cls, edits = origin(_plain_class(owner))
        if cls not in self.raw:
            self.raw[cls] = methods.in_class(cls, self.tables)
        names = {e.helper: e.name for e in edits if e.helper is not None}
        for raw in _remaining(self.raw[cls], edits):
            runs = [raw.function] if not raw.via else [r.holder.function for r in raw.via if r.cls is not None]
            reason = _why_lazy(owner) or self.attributes.why_bound(owner, runs)
            yield from self._call(owner, raw if reason is None else methods.blocked(raw, reason), taken, names)

    def _call(
        self, owner: nn.Module, raw: calls.RawCall, taken: set[str], names: dict[FunctionType, str]
    ) -> Iterator[Site]:
        found: list[Match[Any]] = []
        blocked, place = raw.blocked, None
        if raw.decidable:
            assert isinstance(raw.node, ast.Call)
            try:
                bound = raw.bound(owner)
            except Undetermined as problem:
                blocked = blocked or str(problem)
                found = [Match(activation, {}, False, idiom=raw.idiom) for activation in problem.among or ()]
            else:
                if bound is None or bound.guard == raw.rewritten is not None:
                    return
                if raw.rewritten is not None:
                    blocked = f"an earlier swap rewrote this call for {raw.rewritten}: restore that first"
                found = [bound.match]
                if blocked is None:
                    slot = _free_name(owner, bound.match.activation.name, taken)
                    edit = CallEdit(Position.of(raw.node), slot, bound.argument, bound.guard)
                    chains = {name: chain.names for name, chain in bound.reads.items()}
                    place = CallPlace(edit, _edits(owner, raw, edit, taken, names), chains)
        for match in found or [Match(activation, {}, False, idiom=raw.idiom) for activation in raw.candidates]:
            name = place.call.slot if place else _free_name(owner, match.activation.name, taken)
            taken.add(name)
            source = location(raw.function, raw.line)
            yield self._site(owner, name, match, "call", source=source, blocked=blocked, place=place)

    def _nodes(self, owner: graph.GraphModule) -> Iterator[Site]:
        taken: set[str] = set()
        for call in graph.in_graph(owner, self.tables):
            slot = _free_name(owner, call.match.activation.name, taken)
            taken.add(slot)
            yield self._site(owner, slot, call.match, "node", place=NodePlace(call.node, slot), blocked=call.blocked)

    def _kernels(self, owner: nn.Module) -> Iterator[Site]:
        """The activations in a module's own kernels, and in a graph that is compiled."""
        if (inside := opaque.module(owner, self.tables)) is None:
            return
        reason, activations = inside
        taken: set[str] = set()
        for activation in activations:
            name = _free_name(owner, activation.name, taken)
            taken.add(name)
            yield self._site(owner, name, Match(activation, {}, False), "node", blocked=reason)


def _why_lazy(owner: nn.Module) -> str | None:
    """Why a class cannot be rewritten that PyTorch exchanges for another at the first forward."""
    if not isinstance(owner, nn.modules.lazy.LazyModuleMixin) or getattr(owner, "cls_to_become", None) is None:
        return None
    return "its lazy class changes at the first forward: run the model once before" if is_lazy(owner) else None


def _in_containers(owner: nn.Module, kept: Kept) -> bool:
    """Whether every step to a leaf goes through a list, tuple or dict, of which a copy can hold another leaf."""
    value: Any = getattr(owner, kept.name, None)
    for key in kept.keys:
        if isinstance(key, Name) or not isinstance(key, (int, str)):
            return False
        if not isinstance(value, dict) and not (isinstance(value, (list, tuple)) and isinstance(key, int)):
            return False
        value = value[key]  # type: ignore[index]
    return value is kept.leaf


def _remaining(raws: list[calls.RawCall], edits: frozenset[MethodEdit]) -> Iterator[calls.RawCall]:
    """The calls that no earlier swap has rewritten, or only for what was picked then."""
    done = {(e.cls, e.helper or e.name, edit.position): edit for e in edits for edit in e.edits}
    for raw in raws:
        key = (None, raw.via[0].helper) if raw.via else (raw.cls, raw.name)
        edit = done.get((*key, Position.of(raw.node))) if raw.node is not None else None
        if edit is None:
            yield raw
        elif isinstance(edit, CallEdit) and edit.guard is not None:
            yield dataclasses.replace(raw, rewritten=edit.guard)


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
            names[helper] = _free_name(owner, re.sub(r"\W", "", helper.__name__).lstrip("_") or "function", taken)
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
