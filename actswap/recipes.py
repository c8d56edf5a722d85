"""Recipe: the swaps of a model as versioned JSON data, to make the same network again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from actswap import registry
from actswap.edits import edits_of
from actswap.errors import RecipeError
from actswap.finding import find, unwrap
from actswap.metadata import KEY
from actswap.nn import ActivationModule
from actswap.portable import Data, pieces, referred
from actswap.replacement import PerSite, Replacement, resolve
from actswap.running import Inputs
from actswap.scan import named_modules
from actswap.sites import Site
from actswap.swap import replace, restore

FORMAT, VERSION = "actswap recipe", 1


@dataclass(frozen=True)
class Change:
    """One new activation, and the sites it is put at.

    Args:
        new: its name, parameters and what it saves; or an importable class, function or factory and its parameters.
        sites: the path of each site, and the activation that is there before.
    """

    new: Data = field(hash=False)
    sites: dict[str, str] = field(hash=False)

    @property
    def text(self) -> str:
        """The new activation as a call."""
        name = self.new.get("name") or self.new.get("import") or f"{self.new['per_site']} per site"
        params = [f"{key}={value!r}" for key, value in self.new["params"].items()]
        save = self.new.get("save", "auto")
        return f"{name}({', '.join(params + [f'save={save!r}'] * (save != 'auto'))})"


@dataclass(frozen=True)
class Step:
    """One call of `replace`: its changes, and whether an instance in several places stays one."""

    changes: tuple[Change, ...]
    share: bool = True


@dataclass(frozen=True)
class Recipe:
    """The swaps of a model as data. Printed, a table; `save` writes JSON, `load` reads it, `apply` repeats the swaps.

    Args:
        steps: the swaps in order.

    >>> import torch, actswap
    >>> model = actswap.replace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2)), "relu", "softplus")
    >>> print(actswap.recipe(model))
    swap  path  old   new
    ----  ----  ----  -------------------------------------------------
    1     0     relu  softplus(beta=1.0, threshold=20.0, save='output')
    """

    steps: tuple[Step, ...]

    def data(self) -> Data:
        """The recipe as JSON-like data."""
        steps = [
            {"share": step.share, "changes": [{"new": c.new, "sites": c.sites} for c in step.changes]}
            for step in self.steps
        ]
        return {"format": FORMAT, "version": VERSION, "swaps": steps}

    @classmethod
    def of_data(cls, data: Any) -> Recipe:
        """The recipe that `data()` gave.

        Raises:
            RecipeError: it is no recipe, or one of a later version.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise RecipeError(f'a recipe says "format": "{FORMAT}"', _short(data))
        if data.get("version") != VERSION:
            raise RecipeError(
                f"this actswap reads recipes of version {VERSION}", f"version {data.get('version')!r}",
                "update actswap to read later ones",
            )  # fmt: skip
        try:
            return cls(tuple(_step(step) for step in data["swaps"]))
        except (KeyError, TypeError, ValueError) as error:
            raise RecipeError("a part of the recipe is missing or malformed", repr(error)) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe to a JSON file."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.data(), file, indent=2)
            file.write("\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a recipe from a JSON file. Nothing is imported or run.

        Raises:
            RecipeError: the file is no recipe, or one of a later version.
        """
        with open(path, encoding="utf-8") as file:
            try:
                data = json.load(file)
            except ValueError as error:
                raise RecipeError("a recipe is a JSON file", f"{os.fspath(path)}: {error}") from error
        return cls.of_data(data)

    def apply(self, model: nn.Module, *, example_inputs: Inputs | None = None, validate: bool = True) -> nn.Module:
        """Repeat the swaps on a model that was made like the first one.

        Learned parameters get their initial values: load the state dict afterwards. Objects that the recipe names as
        `module:qualname` are imported, so apply only recipes whose origin you trust.

        Args:
            model: any `nn.Module`; swapped in place.
            example_inputs, validate: as for `replace`.

        Returns:
            The model.

        Raises:
            UnknownActivationError: the recipe names an activation that is not registered here.
            RecipeError: a site is not there, has another activation, or an object cannot be imported. The model is as
                it was, after this and after every other error.

        >>> import torch, actswap
        >>> make = lambda: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2))
        >>> recipe = actswap.recipe(actswap.replace(make(), "relu", "silu"))
        >>> recipe.apply(make())[0]
        SiLU()
        """
        prepared = [_prepared(step) for step in self.steps]  # whatever is unknown is refused before any change
        done = max((edit.record.number for edit in edits_of(unwrap(model))), default=0)
        try:
            for step, (old, target) in zip(self.steps, prepared, strict=True):
                sites = {path: was for change in step.changes for path, was in change.sites.items()}
                _there(model, sites, old)
                replace(
                    model, old, target, where=lambda site, sites=sites: site.path in sites, share=step.share,
                    example_inputs=example_inputs, validate=validate,
                )  # fmt: skip
        except BaseException:
            while any(edit.record.number > done for edit in edits_of(unwrap(model))):
                restore(model, last=True)
            raise
        return model

    def __str__(self) -> str:
        rows = [("swap", "path", "old", "new")]
        for number, step in enumerate(self.steps, 1):
            for change in step.changes:
                rows += [(str(number), path, was, change.text) for path, was in change.sites.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in lines)


def recipe(model: nn.Module | Mapping[str, Any]) -> Recipe:
    """The swaps of a model as data, to make the same network again.

    Args:
        model: a model that was swapped; or a state dict of one, whose metadata has them too.

    Raises:
        RecipeError: a swap put in what no data can name: a lambda, a local class, an instance of another library's
            module.

    >>> import torch, actswap
    >>> model = actswap.replace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2)), "relu", "silu")
    >>> actswap.recipe(model) == actswap.recipe(model.state_dict())
    True
    """
    found: dict[int, dict[str, Any]] = {}
    for path, piece in _pieces(model):
        if piece["new"] is None or piece["activation"] is None:
            raise RecipeError(
                "a recipe holds names, and objects that can be imported as module:qualname", f"the swap at {path}",
                "swap to a registered activation, or to a class or function of an importable module",
            )  # fmt: skip
        step = found.setdefault(piece["swap"], {"share": piece["share"], "changes": {}})
        change = step["changes"].setdefault(
            json.dumps(piece["new"], sort_keys=True), {"new": piece["new"], "sites": {}}
        )
        change["sites"][path] = piece["activation"]
    return Recipe(tuple(_step({**s, "changes": list(s["changes"].values())}) for _, s in sorted(found.items())))


def _pieces(model: nn.Module | Mapping[str, Any]) -> Iterator[tuple[str, Data]]:
    """Each place that a swap changed: its path, and what `portable.pieces` says of it."""
    if isinstance(model, nn.Module):
        noted = {paths[0]: list(pieces(module)) for module, paths in named_modules(unwrap(model)).items()}
    else:
        metadata = getattr(model, "_metadata", None)
        if metadata is None:
            raise RecipeError(
                "the metadata of a state dict has its swaps", "a state dict without metadata",
                "torch.save keeps it; other formats need a recipe file: actswap.recipe(model).save(path)",
            )  # fmt: skip
        noted = {path: facts.get(KEY, []) for path, facts in metadata.items()}
    for path, found in noted.items():
        for piece in found:
            yield f"{path}.{piece['key']}" if path else piece["key"], piece


def _step(data: Any) -> Step:
    changes = tuple(Change(_target(change["new"]), _sites(change["sites"])) for change in data["changes"])
    return Step(changes, bool(data["share"]))


def _target(data: Any) -> Data:
    if not isinstance(data.get("params"), dict) or not {"name", "import", "per_site"} & data.keys():
        raise ValueError(f"{_short(data)} names no activation")
    return dict(data)


def _sites(data: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for pair in data.items() for text in pair):
        raise ValueError(f"{_short(data)} are no sites")
    return dict(data)


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) < 80 else f"{text[:77]}..."


def _prepared(step: Step) -> tuple[list[Any], Replacement]:
    """What a step asks `replace` for.

    Raises:
        UnknownActivationError, ParameterError, RecipeError: a name or an object is not known here.
    """
    by_path: dict[str, Change] = {}
    old: dict[str, Any] = {}
    for change in step.changes:
        _resolved(change.new)
        for path, was in change.sites.items():
            by_path[path] = change
            old[was] = referred(was) if ":" in was else registry.get(was)

    def make(site: Site) -> nn.Module:
        new = by_path[site.path].new
        params = dict(new["params"])
        if site.activation.name == new.get("name"):
            params.pop("num_parameters", None)  # the parameters that are there are carried over
        module = _resolved({**new, "params": params}).make(site)
        if isinstance(module, ActivationModule):
            module.save = new.get("save", "auto")  # as it was, and not as it would be chosen for the site
        return module

    names = dict.fromkeys(change.text.partition("(")[0] for change in step.changes)
    activations = {_resolved(change.new).activation for change in step.changes}
    return list(old.values()), Replacement(
        ", ".join(names), activations.pop() if len(activations) == 1 else None, make,
        step.changes[0].new if len(step.changes) == 1 and "name" not in step.changes[0].new else None,
    )  # fmt: skip


def _resolved(new: Data) -> Replacement:
    if "name" in new:
        return resolve(registry.get(new["name"]), new["params"], new.get("save", "auto"))
    made = PerSite(referred(new["per_site"])) if "per_site" in new else referred(new["import"])
    return resolve(made, new["params"], "auto")


def _there(model: nn.Module, sites: Mapping[str, str], old: Sequence[Any]) -> None:
    """Refuse a model that has not every site of a step, with the same activation.

    Raises:
        RecipeError: naming them.
    """
    found = {site.path for site in find(model, old)}
    missing = [f"{path}: {was}" for path, was in sites.items() if path not in found]
    if missing:
        more = f"\n         and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise RecipeError(
            "the model lacks sites of the recipe", "\n         ".join(missing[:8]) + more,
            "make the model as it was made for the recipe; actswap.find(model) lists its sites",
        )  # fmt: skip
