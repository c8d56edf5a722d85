"""Adapters: a function made a module, a module made to work in place, or to leave its input to others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Elementwise(nn.Module):
    """A function of one tensor as a module: a user's callable, or the `apply` of a `torch.autograd.Function`."""

    def __init__(self, function: Callable[[Tensor], Tensor], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, x: Tensor) -> Tensor:
        """f(x)."""
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


class InPlace(nn.Module):
    """Another module, its result written back into its input, for callers that drop the returned value."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.target = target

    def forward(self, x: Tensor) -> Tensor:
        """`x`, overwritten with `target(x)`."""
        # The target may save its input for backward, and that tensor must not change under it.
        needs_copy = torch.is_grad_enabled() and x.requires_grad
        return x.copy_(self.target(x.clone() if needs_copy else x))


class Cloning(nn.Module):
    """Another module on a copy of its input, for callers that overwrite the input before the backward has read it."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.target = target

    def forward(self, x: Tensor) -> Tensor:
        """`target(x)`; the copy is saved in place of `x`."""
        y: Tensor = self.target(x.clone() if torch.is_grad_enabled() and x.requires_grad else x)
        return y
