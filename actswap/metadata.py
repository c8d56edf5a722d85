"""What a state dict says of swaps: noted in its metadata when it is made, compared when it is loaded.

No key of the state dict changes.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from actswap import portable
from actswap.errors import WeightsWarning

KEY = "actswap"


def attach(owner: nn.Module) -> None:
    """Have the state dicts of an owner note its swaps, and compare them when one is loaded."""
    owner._register_state_dict_hook(_note)
    owner._register_load_state_dict_pre_hook(_compare, with_module=True)


def detach(owner: nn.Module) -> None:
    """Undo `attach`."""
    for table in (owner._state_dict_hooks, owner._load_state_dict_pre_hooks):
        for number in [number for number, hook in table.items() if is_own(hook)]:
            del table[number]


def is_own(hook: Any) -> bool:
    """Whether a hook is one of these, and not the user's."""
    return getattr(hook, "hook", hook) in (_note, _compare)


def _note(owner: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    if found := list(portable.pieces(owner)):
        local_metadata[KEY] = found


def _compare(owner: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
    if "version" not in local_metadata:  # the metadata was lost: nobody can tell
        return
    now, then = ({p["key"]: p for p in pieces} for pieces in (portable.pieces(owner), local_metadata.get(KEY, ())))
    changed = [key for key in {**then, **now} if _function(now.get(key)) != _function(then.get(key))]
    if changed:
        trained = _named(then, now, changed)
        computed = _named(now, then, changed)
        warnings.warn(
            f"weights trained with {trained} are loaded into a {type(owner).__name__} that computes {computed}: "
            f"{', '.join(changed)}\n"
            "  try:   load them before the swap; actswap.recipe(state_dict) has the swaps they were trained with",
            WeightsWarning,
            stacklevel=4,
        )


def _function(piece: dict[str, Any] | None) -> Any:
    """What is computed at a place: all but what is saved for backward, and how the swap was asked for."""
    if piece is None or piece["new"] is None:
        return piece and "new"
    return {name: value for name, value in piece["new"].items() if name != "save"}


def _named(pieces: dict[str, Any], others: dict[str, Any], keys: list[str]) -> str:
    """The activations at these places by name; where there was no swap, what the other side's swap put out of place."""
    names = []
    for key in keys:
        new = pieces[key]["new"] or {} if key in pieces else {"name": others[key]["activation"]}
        params = ", ".join(f"{name}={value}" for name, value in new.get("params", {}).items())
        name = new.get("name") or new.get("import") or new.get("per_site") or "another activation"
        names.append(f"{name}({params})" if params else name)
    return ", ".join(dict.fromkeys(names))
