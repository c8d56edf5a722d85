"""One module per activation, made from its definition: `actswap.nn.Softplus(beta=1.0, threshold=20.0)`.

>>> Softplus(beta=2.0)
Softplus(beta=2.0, threshold=20.0)
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from actswap import autograd, registry
from actswap.activation import Activation
from actswap.catalog import CATALOG
from actswap.errors import ParameterError, UnknownActivationError
from actswap.functional import documentation

_made: dict[Activation, type[ActivationModule]] = {}


class ActivationModule(nn.Module):
    """Base of all modules made from definitions.

    `activation` is the definition; constants are plain attributes and trained parameters `nn.Parameter`s, all under
    the definition's names. A parameter that follows the mode (rrelu's `training`) is the module's own flag.
    """

    activation: ClassVar[Activation]
    inplace: bool
    save: str

    def _setup(
        self, values: dict[str, Any], inplace: bool, save: str, num_parameters: int = 1, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        values = self.activation.bind(values)
        autograd.state_for(self.activation, values, inplace=inplace, save=save)
        self.inplace, self.save = inplace, save
        for parameter in self.activation.parameters:
            value = values[parameter.name]
            if parameter.learnable:
                for single in value.flatten().tolist() if isinstance(value, Tensor) and not value.is_meta else ():
                    parameter.check(self.activation.name, single)
                setattr(self, parameter.name, _trained(parameter.name, value, num_parameters, device, dtype))
            elif not parameter.mode:
                setattr(self, parameter.name, value)

    @property
    def params(self) -> dict[str, Any]:
        """Every parameter's current value, in the definition's order."""
        return {name: getattr(self, name) for name in self.activation.names}

    def forward(self, x: Tensor) -> Tensor:
        """The activation of `x`; saves what `save` says."""
        return autograd.apply(self.activation, x, self.params, inplace=self.inplace, save=self.save)

    def extra_repr(self) -> str:
        """The parameters, as `print(model)` shows them."""
        parts = []
        for parameter in self.activation.parameters:
            value = getattr(self, parameter.name)
            if parameter.learnable:
                parts.append(f"num_parameters={value.numel()}")
            elif not parameter.mode:
                parts.append(f"{parameter.name}={value!r}")
        parts = list(dict.fromkeys(parts))
        parts += ["inplace=True"] * self.inplace + [f"save={self.save!r}"] * (self.save != "auto")
        return ", ".join(parts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)
        if cls.activation is not CATALOG.get(cls.activation.name) and registry.is_registered(cls.activation):
            return _empty, (cls.activation.name,), self.__dict__  # such a class is found by its activation's name
        return super().__reduce_ex__(protocol)


def _trained(name: str, value: Any, count: int, device: Any, dtype: torch.dtype | None) -> nn.Parameter:
    """A new parameter of `count` equal values; of a tensor's values; or the very `nn.Parameter` that was given."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor):
        if value.dim() > 1:
            raise ParameterError(f"{name} has one value, or one per channel", f"shape {tuple(value.shape)}")
        return nn.Parameter(value.detach().clone().reshape(-1).to(device=device, dtype=dtype))
    return nn.Parameter(torch.full((count,), float(value), device=device, dtype=dtype))


def _empty(name: str) -> ActivationModule:
    """An instance of a registered activation's module, for unpickling and copying.

    Raises:
        UnknownActivationError: it is not registered here.
    """
    try:
        cls = module_class(registry.get(name))
    except UnknownActivationError as error:
        said = "register it, as where the model was stored, before loading"
        raise UnknownActivationError(
            "the stored model has an activation that is not registered here", repr(name), said
        ) from error
    return cls.__new__(cls)


def module_class(activation: Activation | str) -> type[ActivationModule]:
    """The module class of this activation, made once.

    >>> module_class("swish").__name__
    'SiLU'
    """
    activation = registry.get(activation)
    if activation not in _made:
        _made[activation] = _make(activation)
    return _made[activation]


def _make(activation: Activation) -> type[ActivationModule]:
    constants = [parameter for parameter in activation.parameters if not parameter.mode]
    takes = "".join(f"{p.name}={p.default!r}, " for p in constants)
    given = "{" + ", ".join(f"{p.name!r}: {p.name}" for p in constants) + "}"
    more = ("num_parameters=1, ", ", device=None, dtype=None", ", num_parameters, device, dtype")
    count, placed, passed = more if activation.learnable else ("", "", "")
    source = (
        f"def __init__(self, {takes}{count}inplace=False, save='auto'{placed}):\n"
        f"    self._setup({given}, inplace, save{passed})\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(source, f"<actswap.nn.{activation.class_name}>", "exec"), scope)
    scope["__init__"].__qualname__ = f"{activation.class_name}.__init__"
    scope["__init__"].__module__ = __name__
    autograd.prepare(activation)
    body = {
        "__init__": scope["__init__"],
        "__doc__": documentation(activation, module=True),
        "__module__": __name__,
        "activation": activation,
    }
    return type(activation.class_name, (ActivationModule,), body)


def _publish(activation: Activation) -> None:
    """Make the class importable by name; a built-in class stays when its activation is overridden."""
    if activation.name not in CATALOG or CATALOG[activation.name] is activation:
        setattr(sys.modules[__name__], activation.class_name, module_class(activation))


for _activation in CATALOG.values():
    _publish(_activation)
registry.on_register(_publish)
__all__ = ["ActivationModule", "module_class", *(definition.class_name for definition in CATALOG.values())]
