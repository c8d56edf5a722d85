"""Plan: the edits that a swap needs. Every refusal happens here, before anything changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from actswap import classes, edits, graph, mentions, source
from actswap.classes import MethodEdit
from actswap.edits import MISSING, Edit, Entry, NodeEdit, Placement, Rewrite
from actswap.errors import BlockedSiteError
from actswap.recognize import Tables, stateless
from actswap.replacement import Replacement, Slot, keep_input, make_in_place
from actswap.report import Report, counted
from actswap.sites import AttributePlace, CallPlace, ModulePlace, NodePlace, Site, Sites


@dataclass(eq=False)
class Swap:
    """The record of one `replace` call.

    Args:
        number: 1 for a model's first swap.
        old, new: what was asked for and what was put in, as text.
        sites: what was swapped.
        skipped: sites of the same activations that were left alone.
        source: what was put in, as data, where it is importable; None where only the modules can say.
        share: whether one instance in several places stayed one.
        report: the validation; None when it was turned off.
    """

    number: int
    old: str
    new: str
    sites: Sites
    skipped: Sites
    source: dict[str, Any] | None = None
    share: bool = True
    report: Report | None = None

    def __repr__(self) -> str:
        return f"Swap({self.number}: {self.old} -> {self.new}, {counted(len(self.sites), 'site')})"


@dataclass
class Plan:
    """Edits to apply and the new modules they bring in. Making it changes nothing."""

    model: nn.Module
    tables: Tables
    target: Replacement
    share: bool
    record: Swap
    edits: list[Edit] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    flags: list[Entry] = field(default_factory=list)
    _holders: dict[tuple[nn.Module, str], Entry] = field(default_factory=dict)

    def make(self, sites: Sequence[Site]) -> None:
        """Plan every site; every refusal happens here."""
        blocked = [site for site in sites if site.blocked is not None]
        if blocked:
            given = "\n         ".join(f"{s.path} ({s.source or s.kind}): {s.blocked}" for s in blocked)
            raise BlockedSiteError(
                "a site that was asked for cannot be rewritten faithfully", given,
                f"exclude={[s.path for s in blocked]!r} leaves it as it is",
            )  # fmt: skip
        rewrites: dict[nn.Module, list[Site]] = {}
        for group in self._groups(sites):
            self._group(group, rewrites)
        self._unnest()
        for owner, called in rewrites.items():
            self.edits.append(self._rewrite(owner, called))
        for order, edit in enumerate(self.edits):
            edit.record, edit.order = self.record, order

    def _groups(self, sites: Sequence[Site]) -> list[list[Site]]:
        """Sites that get one module together: registrations of one instance, when instances stay shared."""
        groups: dict[object, list[Site]] = {}
        for number, site in enumerate(sites):
            shared = self.share and isinstance(_current(site), nn.Module)
            groups.setdefault(id(_current(site)) if shared else ("own", number), []).append(site)
        return list(groups.values())

    def _group(self, group: list[Site], rewrites: dict[nn.Module, list[Site]]) -> None:
        old = _current(group[0])
        module = make_in_place(self.target.make(group[0]), group[0], self.tables)
        module = keep_input(module, group[0])
        if isinstance(old, nn.Module):
            module.train(old.training)
            if any(edits.hooks(old).values()) and any(edits.hooks(module).values()):
                raise BlockedSiteError(
                    "the old module and the new one both have hooks, which cannot be merged", group[0].path,
                    "register the hooks after the swap",
                )  # fmt: skip
        else:
            module.train(_owner(group[0]).training)
        _place(module, group)
        registered = any(isinstance(site.place, ModulePlace) for site in group)
        for site in group:
            self._site(site, module, rewrites, registered)
        self.slots.append(Slot(module, tuple(group), _old_forward(group[0], module, old)))

    def _site(self, site: Site, module: nn.Module, rewrites: dict[nn.Module, list[Site]], registered: bool) -> None:
        owner = _owner(site)
        match site.place:
            case ModulePlace(key):
                self._put(site, Entry(owner, True, key, owner._modules[key], module))
                self._flag(owner, key)
            case AttributePlace(name) as place:
                self._attribute(site, owner, place, module, registered)
                self._flag(owner, name)
            case CallPlace(call=call):
                self._put(site, Entry(owner, self._registers(site, owner, module), call.slot, MISSING, module))
                rewrites.setdefault(owner, []).append(site)
            case NodePlace(node=node, slot=slot):
                assert isinstance(owner, graph.GraphModule)
                self._put(site, Entry(owner, True, slot, MISSING, module))
                old = graph.node_state(owner, node)
                self.edits.append(NodeEdit(owner, node, old, graph.slot_state(owner, node, slot)))

    def _attribute(
        self, site: Site, owner: nn.Module, place: AttributePlace, module: nn.Module, registered: bool
    ) -> None:
        """A stored callable: a submodule of the same name where that can be, else the attribute itself.

        Args:
            registered: whether the new module becomes a submodule elsewhere.
        """
        name, old = place.name, vars(owner).get(place.name, MISSING)
        # A class attribute is found before a submodule, so only an attribute of the instance can stand before it.
        hidden = place.on_class or place.keys or hasattr(type(owner), name) or isinstance(old, nn.Module)
        hidden = hidden or name in owner._modules  # the attribute stands before the submodule, which never runs
        if hidden or not self._registers(site, owner, module):
            if not stateless(module) and not registered:
                raise BlockedSiteError(
                    f"a {type(module).__name__} has parameters or a mode, and this place holds no submodule", site.path,
                    "choose a target without parameters, or exclude the site",
                )  # fmt: skip
            edit = self._holders.get((owner, name))  # several in one container are one edit
            if edit is None:
                edit = self._holders[owner, name] = Entry(owner, False, name, old, getattr(owner, name))
                self.edits.append(edit)
            edit.new = place.holding(edit.new, module)
            edit.puts[place.path] = (site.activation, module)
        else:
            self.edits.append(Entry(owner, False, name, old, MISSING))
            self._put(site, Entry(owner, True, name, MISSING, module))

    def _put(self, site: Site, edit: Entry) -> None:
        """Add the edit that puts a new module at a site, under the site's name."""
        edit.puts[edit.key] = (site.activation, edit.new)
        self.edits.append(edit)

    def _registers(self, site: Site, owner: nn.Module, module: nn.Module) -> bool:
        """Whether the owner can take one more submodule without noticing."""
        if not _counts_children(owner):
            return True
        if not stateless(module):
            raise BlockedSiteError(
                f"{type(owner).__name__} runs or counts its children, so its slot cannot be a submodule, "
                f"and a {type(module).__name__} has parameters or a mode", site.path,
                "choose a target without parameters, or exclude the site",
            )  # fmt: skip
        return False

    def _flag(self, owner: nn.Module, name: str) -> None:
        """nn.TransformerEncoderLayer notes which activation it has, and chooses a fused kernel by that."""
        if name == "activation" and "activation_relu_or_gelu" in vars(owner):
            old = vars(owner)["activation_relu_or_gelu"]
            if old != 0:
                self.flags.append(Entry(owner, False, "activation_relu_or_gelu", old, 0))
                self.edits.append(self.flags[-1])

    def _unnest(self) -> None:
        """nn.TransformerEncoder makes nested tensors for that kernel, on which few activations are implemented."""
        unfused = {edit.owner for edit in self.flags}
        for module in self.model.modules():
            if isinstance(module, nn.TransformerEncoder) and unfused.intersection(module.layers):
                old = vars(module).get("use_nested_tensor", False)
                if old:
                    self.flags.append(Entry(module, False, "use_nested_tensor", old, False))
                    self.edits.append(self.flags[-1])

    def _rewrite(self, owner: nn.Module, sites: Sequence[Site]) -> Edit:
        cls = next((c for c in type(owner).__mro__ if "__actswap__" in c.__dict__), type(owner))
        original, before = classes.origin(cls)
        methods: list[MethodEdit] = []
        for site in sites:
            place = site.place
            assert isinstance(place, CallPlace)
            methods += place.edits
        after = classes.merged([*before, *methods])
        classes.rewritten_class(original, after)  # whatever cannot be compiled is refused here
        return Rewrite(owner, original, before, after)


def _owner(site: Site) -> nn.Module:
    owner = site.owner
    assert owner is not None, "a site of a live scan has its owner"
    return owner


def _current(site: Site) -> Any:
    """What is at the site now: a module, a function, or None for a call."""
    match site.place:
        case ModulePlace(key):
            return _owner(site)._modules[key]
        case AttributePlace() as place:
            return place.read(_owner(site))
    return None


def _counts_children(owner: nn.Module) -> bool:
    """Whether an owner would notice a new submodule: a container, or code that walks its children."""
    if isinstance(owner, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return True
    words = {"children", "modules", "named_children", "named_modules", "_modules", "__iter__", "__len__"}
    own = [function for _, _, a in mentions.methods(type(owner)) if (function := classes.unwrapped(a)) is not None]
    return any(words & set(code.co_names) for f in own for code in source.codes(f.__code__)) or any(
        name in vars(cls) for cls in type(owner).__mro__ if cls is not nn.Module for name in ("__iter__", "__len__")
    )


def _place(module: nn.Module, group: Sequence[Site]) -> None:
    """Bring new state to the device and dtype of its site.

    Raises:
        BlockedSiteError: they are ambiguous, or a shared instance runs on several devices.
    """
    borrowed = {id(p) for site in group for p in site.params.values()}
    own = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in borrowed]
    if not own:
        return
    places = {place for site in group for place in _placements(site)}
    if len({place.device for place in places}) > 1:
        shared = len(group) > 1
        raise BlockedSiteError(
            "a shared instance with parameters cannot run on several devices" if shared
            else "it is ambiguous on which device new parameters belong",
            f"{', '.join(s.path for s in group)}: {', '.join(sorted(str(p.device) for p in places))}",
            "share=False gives each place its own" if shared else "pass example_inputs, which show the site's input",
        )  # fmt: skip
    if len(places) > 1:
        raise BlockedSiteError(
            "it is ambiguous of which dtype new parameters should be",
            f"{', '.join(s.path for s in group)}: {', '.join(sorted(str(p.dtype) for p in places))}",
            "pass example_inputs, which show the site's input",
        )  # fmt: skip
    if places:
        _move(module, {id(t) for t in own}, places.pop())


def _move(module: nn.Module, own: set[int], place: Placement) -> None:
    """Move tensors by replacing them: the module is new, and `Module.to` cannot move some kinds of tensor."""
    moved: dict[int, Tensor] = {}
    for inner in module.modules():
        for table in (inner._parameters, inner._buffers):
            for name, tensor in table.items():
                if tensor is None or id(tensor) not in own:
                    continue
                if id(tensor) not in moved:
                    dtype = place.dtype if tensor.is_floating_point() else tensor.dtype
                    there = tensor.detach().to(place.device, dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
                cast(dict[str, Any], table)[name] = moved[id(tensor)]


def _placements(site: Site) -> set[Placement]:
    """Where a site's input lives: as observed, else where what feeds it lives, else where its owner lives."""
    if site.device is not None and site.dtype is not None:
        return {Placement(site.device, site.dtype)}
    owner = _owner(site)
    flow = site._flow
    feeding = flow.feeding(owner, site.nodes(flow))
    if feeding:
        return {Placement(t.device, t.dtype) for t in feeding if t.is_floating_point()}
    near = [t for t in (*owner.parameters(), *owner.buffers()) if t.is_floating_point()]
    near = near or [t for t in flow.root.parameters() if t.is_floating_point()]
    return {Placement(t.device, t.dtype) for t in near}


def _old_forward(site: Site, module: nn.Module, old: Any) -> Callable[[Tensor], Tensor]:
    """What computes the old activation where the new module stands."""
    if isinstance(old, nn.Module):
        taken_over = [
            name for name, p in old._parameters.items() if p is not None and module._parameters.get(name) is p
        ]

        def run_module(x: Tensor) -> Any:
            old.train(module.training)
            kept = dict(old._parameters)
            # While a model runs on other tensors, those of the new module are the ones to use.
            current: Any = {name: module._parameters[name] for name in taken_over}
            old._parameters.update(current)
            try:
                return old.forward(x)
            finally:
                old._parameters.update(kept)

        return run_module
    if old is not None:
        return old  # type: ignore[no-any-return]
    original = site._original
    assert original is not None
    reads = site.place.reads if isinstance(site.place, CallPlace) else {}
    reference = site._owner

    def run_call(x: Tensor) -> Any:
        values = {name: functools.reduce(getattr, chain, reference()) for name, chain in reads.items()}
        return original(x, training=module.training, **values)

    return run_call
