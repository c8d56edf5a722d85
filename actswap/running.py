"""Running a model without a trace: on detached parameters and copied buffers, its modes and attributes put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from actswap.dataflow import attributes_kept

Inputs = Tensor | tuple[Any, ...] | list[Any] | dict[str, Any]
State = dict[str, Tensor]


def arguments(example_inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments."""
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def detached(model: nn.Module) -> State:
    """The model's parameters on new leaves that share their memory, and copies of its buffers."""
    state = {name: p.detach().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    return {**state, **{name: b.detach().clone() for name, b in model.named_buffers()}}


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back, on exit, the random state, every training flag and every plain attribute of the model.

    Parts that are compiled run as they are written: a trace of them would not see what observes the run.
    """
    modules = list(model.modules())
    devices = {t.device for t in model.parameters() if t.device.type == "cuda" and not isinstance(t, FakeTensor)}
    eager = torch.compiler.set_stance("force_eager")
    with attributes_kept(modules), torch.random.fork_rng(devices=sorted(devices, key=str)), eager:
        yield


@contextlib.contextmanager
def substituted(model: nn.Module, state: State) -> Iterator[None]:
    """Have other parameters and buffers in a model for a while.

    A backward that computes parts of the forward again, as a checkpoint does, belongs inside: outside it would run on
    the model's own buffers, and update them.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    others = {id(tensor): state[name] for name, tensor in named if name in state}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        before += [(t, key, own) for t in tables for key, own in t.items() if own is not None and id(own) in others]
    try:
        for table, key, own in before:
            table[key] = others[id(own)]
        yield
    finally:
        for table, key, own in before:
            table[key] = own


def call(model: nn.Module, state: State, example_inputs: Inputs) -> Any:
    """Run a model with other parameters and buffers."""
    args, kwargs = arguments(example_inputs)
    with substituted(model, state):
        return model(*args, **kwargs)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of an output, whatever its structure."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def set_training(model: nn.Module, training: bool | None) -> None:
    """Set every flag; None leaves each module's own."""
    if training is not None:
        for module in model.modules():
            module.training = training


@contextlib.contextmanager
def marked(sites: Mapping[nn.Module, str], around: Callable[[str], Any]) -> Iterator[None]:
    """Run the forward of each of these modules inside `around(path)`."""

    def wrapped(forward: Callable[..., Any], path: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with around(path):
                return forward(*args, **kwargs)

        return run

    with forwards({module: wrapped(module.forward, path) for module, path in sites.items()}):
        yield


@contextlib.contextmanager
def forwards(replacements: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Run other functions in place of the forward of these modules, hooks and all."""
    before = {module: vars(module).get("forward") for module in replacements}
    try:
        for module, forward in replacements.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module, original in before.items():
            if original is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = original
