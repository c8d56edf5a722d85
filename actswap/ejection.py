"""eject: our modules become plain `torch.nn` ones where one computes the same."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from actswap import aliasing, metadata
from actswap.classes import RECORD
from actswap.dataflow import DataFlow
from actswap.edits import Entry, share_hooks
from actswap.errors import EjectWarning
from actswap.finding import unwrap
from actswap.nn import ActivationModule
from actswap.patterns import MISSING, same
from actswap.recognize import Tables
from actswap.scan import named_modules


def eject(model: nn.Module) -> nn.Module:
    """Leave plain `torch.nn` modules where one computes the same, and say where none does.

    The network as it is now becomes the model's own: its history is forgotten, and `restore` undoes nothing. Values
    stay what they are; PyTorch's modules may save another tensor for backward, and gradients are then those of PyTorch.

    Args:
        model: any `nn.Module`; changed in place.

    Returns:
        The model.

    Warns:
        EjectWarning: what stays: modules without a twin in `torch.nn`, and classes that were rewritten, which run
            without actswap but are unpickled with it. `torch.export` and `torch.jit.trace` leave neither behind.

    >>> import torch, actswap
    >>> model = actswap.replace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2)), "relu", "softplus")
    >>> actswap.eject(model)[0]
    Softplus(beta=1.0, threshold=20.0)
    """
    root = unwrap(model)
    tables, flow = Tables.build(), DataFlow(root)
    stays: list[str] = []
    places: dict[nn.Module, list[tuple[nn.Module, dict[str, Any], str, str]]] = {}
    for owner, paths in named_modules(root).items():
        for table, key, module in _ours(owner):
            places.setdefault(module, []).append((owner, table, key, f"{paths[0]}.{key}".lstrip(".")))
    for module, found in places.items():
        private = all(_is_private(flow, owner, key) for owner, _, key, _ in found)
        twin = _twin(module, tables, private)
        for _, table, key, path in found:
            if twin is None:
                stays.append(f"{path}: torch.nn has no {type(module).__name__} like this")
            else:
                table[key] = twin
    for owner, paths in named_modules(root).items():
        for edit in vars(owner).pop(RECORD, ()):
            metadata.detach(owner)
            if isinstance(edit, Entry) and not isinstance(edit.new, nn.Module):
                stays += [f"{paths[0]}.{key}".lstrip(".") + ": it is kept in a container" for key in edit.puts]
        if "__actswap__" in vars(type(owner)):
            stays.append(f"{paths[0] or '(the model itself)'}: its class {type(owner).__qualname__} is rewritten")
    if stays:
        listed = "\n         ".join(stays[:12]) + (f"\n         and {len(stays) - 12} more" if len(stays) > 12 else "")
        warnings.warn(f"{len(stays)} places still need actswap:\n         {listed}", EjectWarning, stacklevel=2)
    return model


def _ours(owner: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Module]]:
    """The modules of this package that an owner holds: the table, the key, and the module."""
    for table in (owner._modules, vars(owner)):
        for key, value in list(table.items()):
            if isinstance(value, nn.Module) and type(value).__module__.partition(".")[0] == __package__:
                yield table, key, value


def _is_private(flow: DataFlow, owner: nn.Module, key: str) -> bool:
    """Whether nobody sees that a module works in place."""
    nodes = flow.child_nodes(owner, key)
    return bool(nodes) and all(aliasing.is_private(owner, node) for node in nodes)


def _twin(module: nn.Module, tables: Tables, private: bool) -> nn.Module | None:
    """The `torch.nn` module that is recognised as the same activation, with the same parameters; None for none.

    Where nobody sees that a module works in place, its twin need not.
    """
    if not isinstance(module, ActivationModule):
        return None
    own = tables.module(module)
    for cls, patterns in tables.classes.items():
        for pattern in patterns:
            if pattern.activation is not module.activation or not pattern.path.startswith("torch.nn."):
                continue
            states = {a.name: getattr(module, a.name, a.default) for a in pattern.arguments if a.required is MISSING}
            states |= {a.name: a.required for a in pattern.arguments if a.required is not MISSING}
            twin = _made(cls, states)
            match = tables.module(twin)
            if match is None or own is None or match.activation is not own.activation:
                continue
            if match.inplace != own.inplace and not private:
                continue
            if match.params.keys() == own.params.keys() and all(
                same(match.params[n], own.params[n]) for n in own.params
            ):
                twin.train(module.training)
                share_hooks(module, twin)
                return twin
    return None


def _made(cls: type[nn.Module], states: dict[str, Any]) -> nn.Module:
    """An instance with these constants and parameters."""
    learned = {name: value for name, value in states.items() if isinstance(value, nn.Parameter)}
    takes = inspect.signature(cls).parameters
    given = {name: value for name, value in states.items() if name in takes}
    if learned and "num_parameters" in takes:
        given["num_parameters"] = next(iter(learned.values())).numel()
    made = cls(**given)
    for name, parameter in learned.items():
        setattr(made, name, parameter)
    return made
