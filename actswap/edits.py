"""The only file that changes a model: an Edit is one change, with `apply` and `revert`.

Edits are stored on the owner they change, so that subtrees, wrappers and deep copies of a model keep theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from actswap import classes, graph, metadata
from actswap.activation import Activation
from actswap.classes import RECORD, MethodEdit
from actswap.errors import RestoreError
from actswap.graph import GraphModule, NodeState


class _Missing:
    """Stands for an entry that is not there; one object, also after a copy or a pickle."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()


@dataclass(frozen=True)
class Placement:
    """Where a tensor lives, and as what."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def near(cls, module: nn.Module) -> Placement | None:
        """That of a module's first floating-point parameter or buffer; None when it has none."""
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                return cls(tensor.device, tensor.dtype)
        return None


@dataclass(eq=False)
class Edit:
    """One change to one owner.

    Args:
        owner: the module that is changed.
        record: the swap it belongs to.
        order: its number among all edits of that swap.
        puts: what it puts in, by the name under the owner: the activation that was there, and the new module. Empty
            for an edit that only makes room for another.
    """

    owner: nn.Module
    record: Any = field(default=None, kw_only=True)
    order: int = field(default=0, kw_only=True)
    puts: dict[str, tuple[Activation, nn.Module]] = field(default_factory=dict, kw_only=True)

    def apply(self) -> None:
        """Make the change and note it on the owner. All or nothing."""
        self._put()
        if RECORD not in vars(self.owner):
            vars(self.owner)[RECORD] = []
            metadata.attach(self.owner)
        vars(self.owner)[RECORD].append(self)

    def revert(self) -> None:
        """Undo the change and forget it."""
        self._take()
        edits = vars(self.owner)[RECORD]
        edits.remove(self)
        if not edits:
            del vars(self.owner)[RECORD]
            metadata.detach(self.owner)

    @property
    def place(self) -> tuple[object, ...]:
        """What it changes, hashable: two edits of one place must be undone newest first."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """What is there now in place of what this edit put there; None when nothing has changed since."""
        raise NotImplementedError

    def _put(self) -> None:
        raise NotImplementedError

    def _take(self) -> None:
        raise NotImplementedError


@dataclass(eq=False)
class Entry(Edit):
    """An entry of the owner's submodules, or of its plain attributes, set to another object or removed.

    Args:
        modules: whether the entry is a registered submodule.
        key: its name.
        old, new: what was and what will be there; MISSING for no entry.
    """

    modules: bool
    key: str
    old: Any
    new: Any
    near: Placement | None = None

    @property
    def _table(self) -> dict[str, Any]:
        return self.owner._modules if self.modules else vars(self.owner)

    @property
    def place(self) -> tuple[object, ...]:
        return (id(self.owner), self.modules, self.key)

    def _set(self, value: Any) -> None:
        if value is MISSING:
            self._table.pop(self.key, None)
        else:
            self._table[self.key] = value

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have the new value there for a while, without the edit being made."""
        self._set(self.new)
        try:
            yield
        finally:
            self._set(self.old)

    def _put(self) -> None:
        if isinstance(self.old, nn.Module) and isinstance(self.new, nn.Module):
            share_hooks(self.old, self.new)
        self.near = Placement.near(self.owner)
        self._set(self.new)

    def _take(self) -> None:
        if isinstance(self.old, nn.Module):
            self._follow(self.old)
        self._set(self.old)

    def _follow(self, module: nn.Module) -> None:
        """Bring a returning module to the device, dtype and mode that its place has now."""
        module.train(self.new.training if isinstance(self.new, nn.Module) else self.owner.training)
        now, then = Placement.near(self.owner), self.near
        if now is None or then is None or now == then:
            return
        for tensor in (*module.parameters(), *module.buffers()):
            dtype = now.dtype if tensor.dtype == then.dtype else tensor.dtype
            with torch.no_grad():
                tensor.data = tensor.data.to(now.device, dtype)

    def problem(self) -> str | None:
        now = self._table.get(self.key, MISSING)
        if _holds(now, self.new):
            return None
        return f"{self.key} is {_named(now)}, and was {_named(self.new)} after the swap"


def _holds(now: Any, then: Any) -> bool:
    """Whether a value is the same object, or a container of the same objects: exporting rebuilds lists and dicts."""
    if now is then:
        return True
    if type(now) is not type(then) or not isinstance(now, (list, tuple, dict)) or len(now) != len(then):
        return False
    if isinstance(now, dict):
        return list(now) == list(then) and all(_holds(now[key], then[key]) for key in then)
    return all(_holds(a, b) for a, b in zip(now, then, strict=True))


def _named(value: Any) -> str:
    return "missing" if value is MISSING else f"a {type(value).__name__}"


@dataclass(eq=False)
class Rewrite(Edit):
    """The owner's class replaced by a rewritten subclass of the same name.

    Args:
        original: the class that nobody rewrote.
        old, new: the method edits of the class before and after.
    """

    original: type
    old: frozenset[MethodEdit]
    new: frozenset[MethodEdit]

    @property
    def place(self) -> tuple[object, ...]:
        return (id(self.owner), "class")

    def _put(self) -> None:
        _set_class(self.owner, self.original, self.old, self.new)

    def _take(self) -> None:
        _set_class(self.owner, self.original, self.new, self.old)

    def problem(self) -> str | None:
        expected = classes.rewritten_class(self.original, self.new)
        over = _is_parametrized(self.owner) or classes.is_sharded(type(self.owner))
        if type(self.owner) is expected or (over and expected in type(self.owner).__bases__):
            return None
        return f"its class is {type(self.owner).__qualname__}, and was the rewritten {expected.__qualname__}"


def _is_parametrized(module: nn.Module) -> bool:
    return type(module) is not nn.Module and nn.utils.parametrize.is_parametrized(module)


def _set_class(owner: nn.Module, original: type, old: frozenset[MethodEdit], new: frozenset[MethodEdit]) -> None:
    """Exchange a rewritten class: the owner's own, or the base of the class that sharding or parametrising gave it."""
    before, after = classes.rewritten_class(original, old), classes.rewritten_class(original, new)
    cls: type = type(owner)
    if cls is before:
        object.__setattr__(owner, "__class__", after)
    elif classes.is_sharded(cls):
        object.__setattr__(owner, "__class__", classes.rebased(cls, before, after))
    else:  # parametrised: a class made for this owner alone
        cls.__bases__ = tuple(after if base is before else base for base in cls.__bases__)


@dataclass(eq=False)
class NodeEdit(Edit):
    """A node of an fx.GraphModule made to do something else."""

    owner: GraphModule
    node: str
    old: NodeState
    new: NodeState

    @property
    def place(self) -> tuple[object, ...]:
        return (id(self.owner), "node", self.node)

    def _put(self) -> None:
        graph.set_node(self.owner, self.node, self.new)

    def _take(self) -> None:
        graph.set_node(self.owner, self.node, self.old)

    def problem(self) -> str | None:
        if not any(node.name == self.node for node in self.owner.graph.nodes):
            return f"its graph has no node {self.node} any more"
        now = graph.node_state(self.owner, self.node)
        return None if now == self.new else f"node {self.node} calls {now.target}, and called {self.new.target}"


_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict))


def hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    """The hooks of a module by attribute, without those that note swaps in its state dict."""
    return {name: {n: h for n, h in vars(module)[name].items() if not metadata.is_own(h)} for name in _HOOKS}


def share_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give `new` the hook dictionaries of `old`: the same objects, so that the handles of its hooks go on working."""
    for name in _HOOKS:
        vars(new)[name] = vars(old)[name]
    vars(new)["_is_full_backward_hook"] = vars(old).get("_is_full_backward_hook")


# --- many edits ----------------------------------------------------------------------------------------------------


def apply_all(edits: Sequence[Edit]) -> None:
    """Apply edits in order; an error in one reverts those before it and goes on up."""
    done: list[Edit] = []
    try:
        for edit in edits:
            edit.apply()
            done.append(edit)
    except BaseException:
        for edit in reversed(done):
            edit.revert()
        raise


def edits_of(model: nn.Module) -> list[Edit]:
    """Every edit in a model, oldest first."""
    found = [edit for module in model.modules() for edit in vars(module).get(RECORD, ())]
    return sorted(found, key=lambda edit: (edit.record.number, edit.order))


def revert_all(edits: Iterable[Edit], paths: dict[nn.Module, str]) -> None:
    """Undo edits, newest first.

    Raises:
        RestoreError: a place no longer holds what was put there; nothing is undone.
    """
    newest: dict[tuple[object, ...], Edit] = {}
    ordered = list(edits)
    for edit in ordered:
        newest[edit.place] = edit
    problems = [(edit, problem) for edit in newest.values() if (problem := edit.problem()) is not None]
    if problems:
        given = "\n         ".join(
            f"{paths.get(edit.owner) or '(the model itself)'}: {text}" for edit, text in problems
        )
        raise RestoreError(
            "the model was changed by hand under a swap, so that it cannot be undone",
            given,
            "undo those changes first; nothing was restored",
        )
    for edit in reversed(ordered):
        edit.revert()
