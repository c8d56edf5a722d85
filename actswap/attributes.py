"""Attributes: what the modules of a model keep besides their submodules, and which bound methods are kept where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from actswap.classes import RECORD, unwrapped
from actswap.objects import PLAIN, Keys, leaves, spelled
from actswap.recognize import Tables

_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", RECORD})
_CONTAINERS = (list, tuple, dict, set, frozenset, FunctionType)


@dataclass(frozen=True)
class Kept:
    """Something that a module keeps in a plain attribute.

    Args:
        name: of the attribute.
        on_class: whether the class has the attribute and the instance does not.
        keys: how it is reached from the attribute's value.
        leaf: a function, bound method, module or operator.
    """

    name: str
    on_class: bool
    keys: Keys
    leaf: Any

    @property
    def spelled(self) -> str:
        """The attribute and the way from there, as in `acts[0]`."""
        return self.name + spelled(self.keys)


@dataclass(frozen=True)
class CodeKey:
    """What a function has in common with its rewritten self: where it stands."""

    filename: str
    line: int
    name: str

    @classmethod
    def of(cls, function: FunctionType) -> CodeKey:
        """The key of a function, or of what it wraps."""
        code = (unwrapped(function) or function).__code__
        return cls(code.co_filename, code.co_firstlineno, code.co_name)


class Attributes:
    """What every module of a model keeps, found without running any of its code."""

    def __init__(self, modules: Iterable[nn.Module], tables: Tables) -> None:
        self.tables = tables
        self.bound: dict[tuple[int, CodeKey], str] = {}
        self._of_class: dict[type, list[Kept]] = {}
        self._objects: dict[int, Any] = {}
        self.kept: dict[nn.Module, list[Kept]] = {module: list(self._find(module)) for module in modules}
        for kept in (kept for found in self.kept.values() for kept in found):
            if isinstance(kept.leaf, MethodType) and isinstance(kept.leaf.__func__, FunctionType):
                key = (id(kept.leaf.__self__), CodeKey.of(kept.leaf.__func__))
                self.bound.setdefault(key, f"the attribute {kept.spelled} keeps {kept.leaf.__name__} as a bound method")

    def _find(self, module: nn.Module) -> Iterator[Kept]:
        own = vars(module)
        for name, value in own.items():
            if type(value) in PLAIN or (isinstance(value, dict) and not value) or name in _REGISTRIES:
                continue
            if not self._seen(value):
                yield from (Kept(name, False, keys, leaf) for keys, leaf in leaves(value, self.tables.is_leaf))
        cls = type(module)
        if cls not in self._of_class:
            self._of_class[cls] = list(self._on_class(cls))
        yield from (kept for kept in self._of_class[cls] if kept.name not in own)

    def _on_class(self, cls: type) -> Iterator[Kept]:
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            if base not in (nn.Module, object):
                found.update((name, value) for name, value in vars(base).items() if not name.startswith("__"))
        for name, value in found.items():
            recognised = self.tables.is_leaf(value)
            if not recognised and isinstance(value, (FunctionType, staticmethod, classmethod, property, type)):
                continue  # methods are scanned as such
            for keys, leaf in leaves(value, self.tables.is_leaf):
                yield Kept(name, True, keys, leaf)

    def _seen(self, value: Any) -> bool:
        """Whether a value is an object that was looked at before, as a configuration that all modules share."""
        if isinstance(value, _CONTAINERS) or callable(value):
            return False
        if id(value) in self._objects:
            return True
        self._objects[id(value)] = value
        return False

    def why_bound(self, owner: nn.Module, functions: Iterable[FunctionType]) -> str | None:
        """Why rewriting the owner's class does not reach one of these methods, or None."""
        for function in functions:
            if (where := self.bound.get((id(owner), CodeKey.of(function)))) is not None:
                return f"{where}, which a rewritten class does not change"
        return None
