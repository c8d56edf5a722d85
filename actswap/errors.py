"""The errors and warnings of actswap.

Every message states the rule that was broken, what was given, and the next step, one per line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ActswapError(Exception):
    """Base of every error that actswap raises on purpose."""

    # No __init__: Dynamo can show an exception that has none, also with fullgraph=True.

    @property
    def rule(self) -> str:
        """What was broken."""
        return self._part(0)

    @property
    def given(self) -> str:
        """What was given; may be empty."""
        return self._part(1)

    @property
    def hint(self) -> str:
        """What to try; may be empty."""
        return self._part(2)

    def _part(self, index: int) -> str:
        return str(self.args[index]) if index < len(self.args) else ""

    def __str__(self) -> str:
        given = [f"  given: {self.given}"] if self.given else []
        return "\n".join([self.rule, *given, *([f"  try:   {self.hint}"] if self.hint else [])])


class UnknownActivationError(ActswapError, LookupError):
    """A name that is neither a built-in activation, an alias nor registered."""

    @classmethod
    def of(cls, name: str, known: Iterable[str]) -> UnknownActivationError:
        """The error for `name`, naming the nearest of the `known` names."""
        near = difflib.get_close_matches(name, sorted(known), n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "actswap.names() lists every name"
        return cls("no activation has this name", repr(name), hint)


class ParameterError(ActswapError, ValueError, RuntimeError):
    """A parameter that the activation does not have, or a value outside its domain; a `RuntimeError` as in ATen."""


class ShapeError(ActswapError, RuntimeError):
    """Trained parameters whose number does not fit the input's channels."""


class ModeError(ActswapError, NotImplementedError):
    """An activation in a mode of PyTorch that cannot have its backward."""


class RegistrationError(ActswapError, ValueError):
    """A definition that cannot be registered: its name is taken, or its derivative is wrong."""


class TargetError(ActswapError, TypeError):
    """An object that can be neither searched for nor put in."""


class NoSiteError(ActswapError, LookupError):
    """Nothing in the model matches what was asked for."""


class BlockedSiteError(ActswapError):
    """A site that was asked for cannot be rewritten faithfully."""


class UnsupportedModelError(ActswapError, TypeError):
    """A model that cannot be edited: TorchScript, or wrapped for distributed training."""


class EquivalenceError(ActswapError, AssertionError):
    """A check before or after a swap failed; the model is as it was."""


class RestoreError(ActswapError):
    """The model was changed by hand under a swap, so that it cannot be undone safely."""


class RecipeError(ActswapError, ValueError):
    """A recipe that cannot be written as data, is not one, or does not fit the model it is applied to."""


class EjectWarning(UserWarning):
    """Modules that `eject` had to leave, since PyTorch has none that computes the same."""


class WeightsWarning(UserWarning):
    """Weights loaded into a network that computes another activation than the one they were trained with."""


class NoSiteWarning(UserWarning):
    """One entry of `old` matched nothing while others did."""


class RoleWarning(UserWarning):
    """A swap of gates, or of an output whose range the new activation does not keep."""
