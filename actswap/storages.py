"""What stays alive after a computation: every storage that was made, remembered without being held."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

NEITHER = "neither input nor output"


@dataclass(frozen=True)
class Made:
    """A storage that an operation made: its size, the operator, and what `Storages.where` said at that moment."""

    bytes: int
    op: str = ""
    where: str = ""


class Storages(TorchDispatchMode):
    """Remembers, weakly, every storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, tuple[StorageWeakRef, Made]] = {}
        self.where: list[str] = []

    def note(self, tensor: Tensor, op: str = "") -> int:
        """Remember this tensor's storage, unless it is known already; its key."""
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key not in self._seen or self._seen[key][0].expired():  # a freed address may be used again
            made = Made(storage.nbytes(), op, self.where[-1] if self.where else "")
            self._seen[key] = (StorageWeakRef(storage), made)
        return key

    def alive(self) -> dict[int, Made]:
        """The storages that something still holds."""
        return {key: made for key, (ref, made) in self._seen.items() if not ref.expired()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            _key(tensor) for tensor in _tensors((args, kwargs))
        }  # a view of what was there before is not made here
        for tensor in _tensors(out):
            if _key(tensor) not in given:
                self.note(tensor, str(func))
        return out


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Kept:
    """What a forward leaves alive for its backward, in bytes: by kind, and what went past `save_for_backward`."""

    total: int
    kinds: dict[str, int]
    hidden: int


def kept(call: Callable[[Tensor], Tensor], x: Tensor, grad: bool = True) -> Kept:
    """Run `call` and count every storage that only the graph keeps alive, whether saved properly or not.

    Without `grad` the input needs no gradient; the caller sets the grad mode.
    """
    packed: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        packed.add(_key(tensor))
        return tensor.detach()

    leaf = x.detach().clone().requires_grad_(grad)
    inner = leaf * 1
    with Storages() as storages, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(inner)
    kinds = {storages.note(inner): "input", storages.note(y): "output"}  # in place, the input is gone
    node = y.grad_fn
    del inner, y
    alive = storages.alive()
    if alive.keys() - packed:  # perhaps only in a reference cycle; collecting is slow, and seldom needed
        gc.collect()
        alive = storages.alive()
    del node
    by_kind: dict[str, int] = {}
    for key, made in alive.items():
        kind = kinds.get(key, NEITHER)
        by_kind[kind] = by_kind.get(kind, 0) + made.bytes
    hidden = sum(made.bytes for key, made in alive.items() if key not in packed)
    return Kept(sum(by_kind.values()), by_kind, hidden)
