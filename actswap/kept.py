"""What a training forward keeps alive for its backward."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from actswap.running import Inputs, call, detached, tensors, undisturbed


@dataclass
class Kept:
    """A storage that outlives the forward.

    Args:
        bytes: its size.
        op: the operator that made it.
        where: the path of the module that ran the operator.
    """

    bytes: int
    op: str
    where: str


@dataclass
class _Allocations(TorchDispatchMode):
    stack: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[StorageWeakRef, Kept]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.made or self.made[key][0].expired():
                kept = Kept(storage.nbytes(), str(func), self.stack[-1] if self.stack else "")
                self.made[key] = (StorageWeakRef(storage), kept)
        return out


def kept_for_backward(model: nn.Module, example_inputs: Inputs) -> list[Kept]:
    """Every storage that a training forward leaves alive, the output's graph being held; parameters are not counted.

    It counts what stays alive, so a tensor kept on a `ctx` attribute shows as well as one that was saved properly.
    Buffers that the forward updates in place were there before and are not counted; nor are the example inputs.
    """
    paths = {module: path for path, module in model.named_modules()}
    record = _Allocations()

    def enter(module: nn.Module, args: Any) -> None:
        record.stack.append(paths.get(module, ""))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        record.stack.pop()

    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with undisturbed(model), torch.enable_grad():
            state = detached(model)
            known = {t.untyped_storage()._cdata for t in (*state.values(), *tensors(example_inputs))}
            with record:
                output = call(model, state, example_inputs)
            gc.collect()
            alive = [kept for key, (ref, kept) in record.made.items() if key not in known and not ref.expired()]
            del output
    finally:
        for handle in handles:
            handle.remove()
    return alive
