"""What a training forward keeps alive for its backward."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from actswap.running import Inputs, call, detached, undisturbed
from actswap.storages import Made, Storages


def kept_for_backward(model: nn.Module, example_inputs: Inputs) -> list[Made]:
    """Every storage that a training forward leaves alive, the output's graph being held; parameters are not counted.

    `where` is the path of the module that made it. What stays alive counts, so a tensor kept on a `ctx` attribute shows
    as well as one that was saved properly. Buffers that the forward updates in place were there before and are not
    counted; nor are the example inputs.
    """
    paths = {module: path for path, module in model.named_modules()}
    record = Storages()

    def enter(module: nn.Module, args: Any) -> None:
        record.where.append(paths.get(module, ""))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        record.where.pop()

    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with undisturbed(model), torch.enable_grad():
            state = detached(model)
            with record:
                output = call(model, state, example_inputs)
            gc.collect()
            alive = list(record.alive().values())
            del output
    finally:
        for handle in handles:
            handle.remove()
    return alive
