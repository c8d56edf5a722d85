"""What swaps did to a model as plain data: activations by name, and other objects by `module:qualname`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from actswap import registry
from actswap.activation import Activation
from actswap.adapters import Cloning, InPlace
from actswap.classes import RECORD
from actswap.errors import RecipeError
from actswap.nn import ActivationModule
from actswap.recognize import Foreign

Data = dict[str, Any]

_ELSEWHERE = ("torch", "torch.nn.functional")
"""Where PyTorch's built-in functions are found: they do not say."""


def reference(thing: Any) -> str | None:
    """The `module:qualname` by which an object is imported; None when there is none.

    >>> reference(nn.Softplus), reference(lambda x: x)
    ('torch.nn.modules.activation:Softplus', None)
    """
    own = f"{getattr(thing, '__module__', None)}:{getattr(thing, '__qualname__', None)}"
    names = [own, *(f"{module}:{getattr(thing, '__name__', None)}" for module in _ELSEWHERE)]
    return next((n for n in names if not n.startswith(("None:", "__main__:")) and _imported(n) is thing), None)


def _imported(name: str) -> Any:
    module, _, qualified = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def referred(name: str) -> Any:
    """The object that a `module:qualname` names; its module is imported.

    Raises:
        RecipeError: there is none.
    """
    found = _imported(name)
    if found is None:
        raise RecipeError(
            "a recipe names its own objects as importable module:qualname", repr(name),
            "install or import what the recipe was made with",
        )  # fmt: skip
    return found


def _by_name(activation: Activation) -> bool:
    """Whether the name of a definition gives that very definition."""
    return activation.name in registry.names() and registry.get(activation.name) is activation


def activation_data(activation: Activation) -> str | None:
    """A definition's name, or the `module:qualname` of what a foreign one stands for."""
    if isinstance(activation, Foreign):
        return reference(activation.target)
    return activation.name if _by_name(activation) else None


def module_data(module: Any) -> Data | None:
    """What makes a module of ours again; None for others.

    Learned values are left to the state dict, and a parameter that follows the mode to the model.
    """
    if isinstance(module, (InPlace, Cloning)):  # where it is put again, it is wrapped again
        module = module.target
    if not isinstance(module, ActivationModule) or not _by_name(module.activation):
        return None
    params: Data = {}
    for parameter in module.activation.parameters:
        value = getattr(module, parameter.name)
        if parameter.learnable:
            params["num_parameters"] = value.numel()
        elif not parameter.mode:
            params[parameter.name] = value
    return {"name": module.activation.name, "params": params, "save": module.save}


def object_data(thing: Any, params: Mapping[str, Any], kind: str = "import") -> Data | None:
    """What makes the modules of an importable class, function or factory again; None where nothing can."""
    name = reference(thing)
    if name is None or not _is_json(dict(params)):
        return None
    return {kind: name, "params": dict(params)}


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def pieces(owner: nn.Module) -> Iterator[Data]:
    """What swaps did to one module, oldest first: for each place its name, what was there and what is there now.

    `activation` or `new` is None where no data can say it.
    """
    for edit in vars(owner).get(RECORD, ()):
        for key, (activation, module) in edit.puts.items():
            yield {
                "swap": edit.record.number,
                "share": edit.record.share,
                "key": key,
                "activation": activation_data(activation),
                "new": module_data(module) or edit.record.source,
            }
