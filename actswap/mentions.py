"""Mentions: whether code could come to an activation, by the names in its code objects, before anything is parsed."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from actswap import opaque
from actswap.callees import instantiates
from actswap.classes import unwrapped
from actswap.objects import Code, is_followed, leaves
from actswap.patterns import MISSING
from actswap.recognize import Tables, recognised_class
from actswap.scope import NOT_FOLLOWED, followed
from actswap.source import codes, filled

_INITIALISES = re.compile(r"_?(init|reset)_\w*(weights?|param(eter)?s?|buffers?)")
"""Methods that fill a module's parameters: what they call activates nothing."""


_NEVER_APPLY = frozenset(
    f"__{name}__"
    for name in (
        "init", "new", "init_subclass", "class_getitem", "post_init", "del", "repr", "str", "format", "dir", "hash",
        "eq", "ne", "len", "bool", "setattr", "delattr", "getstate", "setstate", "reduce", "reduce_ex", "getnewargs",
        "getnewargs_ex", "copy", "deepcopy", "sizeof", "annotate", "annotations",
    )
)  # fmt: skip
"""Methods that make, copy, show or compare an object."""


def methods(cls: type) -> Iterator[tuple[type, str, Any]]:
    """The class attributes that an instance may run: of an overridden method only what `super()` can reach."""
    seen: set[str] = set()
    through_super: set[str] = set()
    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        for name, attribute in vars(base).items():
            if name in _NEVER_APPLY or _INITIALISES.match(name) or (name in seen and name not in through_super):
                continue
            function = unwrapped(attribute)
            if function is None and not isinstance(attribute, (staticmethod, classmethod)):
                continue
            yield base, name, attribute
            if function is not None and any("super" in code.co_names for code in codes(function.__code__)):
                through_super.update(n for code in codes(function.__code__) for n in code.co_names)
        seen.update(vars(base))


def names_in(function: FunctionType) -> set[str]:
    """The names of globals and attributes in a function and in those nested in it."""
    return {name for code in codes(function.__code__) for name in code.co_names}


def live(cls: type) -> set[str]:
    """The names of the methods that a forward may come to, by the names that the code mentions."""
    mentioned: dict[str, set[str]] = {}
    for _, name, attribute in methods(cls):
        if (function := unwrapped(unbound(attribute))) is not None:
            mentioned.setdefault(name, set()).update(names_in(function))
    return _reached(mentioned, {"forward", *(name for name in mentioned if name.startswith("__"))})


def _reached(mentioned: dict[str, set[str]], found: set[str]) -> set[str]:
    """The methods that these come to, by the names that each mentions."""
    waiting = list(found)
    while waiting:
        new = mentioned.get(waiting.pop(), set()) & mentioned.keys() - found
        found |= new
        waiting += new
    return found


def code_of(cls: type, names: Iterable[str]) -> list[tuple[str, FunctionType]]:
    """The functions in an object's class that code which mentions these names may come to."""
    found: dict[str, FunctionType] = {}
    for base in filter(is_followed, cls.__mro__):
        for name, attribute in vars(base).items():
            if followed(function := unwrapped(unbound(attribute))):
                found.setdefault(name, function)
    mentioned = {name: names_in(function) for name, function in found.items()}
    implied = {name for name in mentioned if name.startswith("__") and name not in _NEVER_APPLY}
    reached = _reached(mentioned, {"forward", *implied, *names})
    return [(name, function) for name, function in found.items() if name in reached]


_RUNS_TEXT = frozenset({"exec", "eval"})
_PICKS = frozenset({"getattr", "vars", "__dict__", "globals", "attrgetter", "methodcaller", "import_module"})
"""Ways to a function of which the code need not have the name."""


def mentions(function: FunctionType, tables: Tables, made: bool) -> bool:
    """Whether the code names anything that could be an activation: the cheap test before any parsing.

    Args:
        made: whether the classes of activation modules count too.
    """
    known = tables.names | tables.class_names if made else tables.names
    for code in codes(function.__code__):
        values = [function.__globals__.get(name, MISSING) for name in code.co_names]
        if not known.isdisjoint(code.co_names) or any(_is_mention(value, tables, made) for value in values):
            return True
        if any(opaque.operator_named(name) for name in code.co_names) and _has_operators(values):
            return True
        if not _RUNS_TEXT.isdisjoint(code.co_names) or (made and not _PICKS.isdisjoint(code.co_names)):
            return True
        if any(isinstance(constant, str) and constant in tables.methods for constant in code.co_consts):
            return True
    held = [cell.cell_contents for cell in function.__closure__ or () if filled(cell)]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return any(_is_mention(value, tables, made) for value in held)


def _is_mention(value: Any, tables: Tables, made: bool) -> bool:
    """Whether an object that code names is an activation, or holds one or code that applies one."""
    if isinstance(value, type) and not isinstance(value, enum.EnumMeta):
        return made and (recognised_class(value, tables) is not None or applies(value, tables))
    if tables.call(value) or instantiates(value):
        return True
    if followed(value) and unwrapped(value) is not None:
        return False  # a helper, followed by itself
    return any(_is_use(leaf, tables) for _, leaf in leaves(value, tables.is_callable))


def _is_use(leaf: Any, tables: Tables) -> bool:
    if isinstance(leaf, Code):
        return applies(leaf.cls, tables)
    if isinstance(leaf, BuiltinFunctionType):
        return bool(tables.call(leaf)) or opaque.function(leaf, tables) is not None
    return True


def _has_operators(values: Iterable[Any]) -> bool:
    """Whether code that names these objects can come to operators outside PyTorch: in torch.ops, or in extensions."""
    modules = [value for value in values if isinstance(value, ModuleType)]
    return any(m is torch or m is torch.ops or m.__name__.partition(".")[0] not in NOT_FOLLOWED for m in modules)


def applies(cls: type, tables: Tables) -> bool:
    """Whether the code of a class outside torch mentions an activation, in its constructor too."""
    if cls not in tables.applies:
        tables.applies[cls] = False  # ends a recursion
        parts = [unbound(part) for base in filter(is_followed, cls.__mro__) for part in vars(base).values()]
        functions = [part for part in parts if isinstance(part, FunctionType)]
        tables.applies[cls] = any(mentions(f, tables, True) for f in functions if not tables.call(f))
    return tables.applies[cls]


def helpers(function: FunctionType) -> Iterator[FunctionType]:
    """The helper functions that a function names."""
    names = names_in(function)
    values = [function.__globals__.get(name) for name in names]
    modules = [v for v in values if isinstance(v, ModuleType) and v.__name__.partition(".")[0] not in NOT_FOLLOWED]
    values += [getattr(module, name, None) for module in modules for name in names]
    values += [unbound(vars(v).get(name)) for v in values if isinstance(v, type) for name in names]
    values += [cell.cell_contents for cell in function.__closure__ or () if filled(cell)]
    return filter(followed, values)


def unbound(attribute: Any) -> Any:
    """The function of a static, class or partial method; any other attribute itself."""
    if isinstance(attribute, functools.partialmethod):
        return attribute.func
    return attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute
