"""Structure: what a swap must leave alone, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from actswap.edits import hooks


@dataclass(frozen=True)
class Structure:
    """What a swap must leave alone. Holds the tensors themselves, so that identity can be compared."""

    tensors: dict[str, tuple[Tensor, dict[str, Any]]]
    modules: dict[str, dict[str, Any]]
    keys: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Structure:
        """The structure of a model now."""
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        tensors = {name: (tensor, _facts(tensor)) for name, tensor in named}
        modules = {path: _module_facts(m) for path, m in model.named_modules(remove_duplicate=False)}
        return cls(tensors, modules, tuple(model.state_dict(keep_vars=True)))

    def differences(self, after: Structure, touched: Iterable[str]) -> list[str]:
        """What changed, outside the modules at the touched paths."""
        prefixes = tuple(touched)

        def outside(name: str) -> bool:
            return not any(name == prefix or name.startswith(prefix + ".") or not prefix for prefix in prefixes)

        found = []
        for name in filter(outside, self.tensors.keys() | after.tensors.keys()):
            (old, facts), (new, new_facts) = self.tensors.get(name, (None, {})), after.tensors.get(name, (None, {}))
            if old is not new:
                found.append(f"{name}: {'gone' if new is None else 'another object'}")
            found += [
                f"{name}: {key} was {facts[key]}, is {new_facts[key]}"
                for key in facts
                if facts[key] != new_facts.get(key)
            ]
        for path in filter(outside, self.modules.keys() | after.modules.keys()):
            a, b = self.modules.get(path), after.modules.get(path)
            if a is None or b is None:
                found.append(f"{path or '(the model itself)'}: {'new' if a is None else 'gone'}")
            else:
                found += [
                    f"{path or '(the model itself)'}: {key} was {a[key]}, is {b[key]}" for key in a if a[key] != b[key]
                ]
        kept, now = [tuple(filter(outside, s.keys)) for s in (self, after)]
        if kept != now:
            found.append(f"state-dict keys: {sorted(set(kept) ^ set(now)) or 'another order'}")
        return sorted(found)


def _facts(tensor: Tensor) -> dict[str, Any]:
    fake = isinstance(tensor, FakeTensor)
    lazy = nn.parameter.is_lazy(tensor)
    return {
        "device": tensor.device,
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
        "memory": None if fake or lazy else tensor.data_ptr(),
        "version": None if lazy or tensor.is_inference() else tensor._version,
        "gradient": id(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None,
    }


def _module_facts(module: nn.Module) -> dict[str, Any]:
    found = {name: list(table) for name, table in hooks(module).items() if table}
    return {"class": type(module).__qualname__, "training": module.training, "hooks": found}
