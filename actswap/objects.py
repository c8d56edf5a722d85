"""What a Python object that is no submodule holds: functions, modules and activations in its items and attributes."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from actswap.scope import NOT_FOLLOWED, followed
from actswap.source import filled

Keys = tuple[Any, ...]
"""How a leaf is reached from its object: the keys of containers, and the names of attributes as `Name`."""

PLAIN = frozenset({type(None), bool, int, float, str})
"""The types of most attributes; values of these hold nothing."""
_NOTHING = (
    *PLAIN, complex, bytes, bytearray, range, slice, Tensor, ModuleType, CodeType,
    torch.device, torch.dtype, torch.Size, torch.Generator, torch.memory_format, weakref.ReferenceType,
    *weakref.ProxyTypes,
)  # fmt: skip
_WHOLE = (
    nn.Module, operator.methodcaller, torch.jit.ScriptFunction, BuiltinFunctionType, torch._ops.OpOverloadPacket,
    torch._ops.OpOverload, torch._library.custom_ops.CustomOpDef,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_MANY = 256
"""Of a longer container only so many items are looked at: data, and no choice of activations."""


@dataclass(frozen=True)
class Code:
    """A leaf that stands for the code of an object's class."""

    cls: type


class Name(str):
    """The name of an attribute among the keys that lead to a leaf."""

    __slots__ = ()


def leaves(
    value: Any, whole: Callable[[Any], bool], depth: int = 3, seen: dict[int, Any] | None = None, keys: Keys = ()
) -> Iterator[tuple[Keys, Any]]:
    """The functions, bound methods, modules and operators that an object is or holds; no code of it runs.

    Args:
        whole: whether a value is a leaf though it has parts, as a partial that is an activation.
        depth: how many containers and objects deep to look.
        seen: the objects looked at before, by id; they are not looked at again.
    """
    kind = type(value)
    if issubclass(kind, _NOTHING):
        return
    seen = {} if seen is None else seen
    if id(value) in seen and not issubclass(kind, nn.Module):
        return
    if issubclass(kind, _WHOLE) or whole(value):
        yield keys, value
    elif depth:
        seen[id(value)] = value
        if isinstance(value, FunctionType):
            if followed(value):
                yield keys, value
            yield from _inside_function(value, whole, depth, seen, keys)
        elif isinstance(value, MethodType):
            yield keys, value
            if not isinstance(value.__self__, nn.Module):
                yield from leaves(value.__self__, whole, depth - 1, seen, (*keys, Name("__self__")))
        else:
            for key, part in _parts(value):
                yield from leaves(part, whole, depth - 1, seen, (*keys, key))
            if not issubclass(kind, (*_CONTAINERS, type)) and is_followed(kind):
                yield keys, Code(kind)


def _inside_function(
    function: FunctionType, whole: Callable[[Any], bool], depth: int, seen: dict[int, Any], keys: Keys
) -> Iterator[tuple[Keys, Any]]:
    """What a closure keeps that its code is not followed to: bound methods, tables, what torch.vmap and such wrap."""
    known = (FunctionType, nn.Module) if followed(function) else ()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if filled(cell) and not isinstance(cell.cell_contents, known):
            for path, leaf in leaves(cell.cell_contents, whole, depth - 1, seen, (*keys, Name(name))):
                if isinstance(leaf, (FunctionType, MethodType)) or (not known and whole(leaf)):
                    yield path, leaf
    for name, value in vars(function).items():
        if name == "registry":  # of functools.singledispatch
            yield from leaves(dict(value), whole, depth - 1, seen, (*keys, Name(name)))


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a container, the arguments of a partial, the attributes and the code of a user's object."""
    kind = type(value)
    if issubclass(kind, dict):
        yield from list(itertools.islice(value.items(), _MANY))
    elif issubclass(kind, _CONTAINERS):
        yield from enumerate(list(itertools.islice(value, _MANY)))
    elif issubclass(kind, (functools.partial, functools.partialmethod)):
        yield Name("func"), value.func
        yield from enumerate(value.args)
        yield from value.keywords.items()
    elif issubclass(kind, (staticmethod, classmethod)):
        yield Name("__func__"), value.__func__
    elif issubclass(kind, functools.cached_property):
        yield Name("func"), value.func
    elif issubclass(kind, functools.singledispatchmethod):
        yield from value.dispatcher.registry.items()
    elif issubclass(kind, enum.EnumMeta):
        yield from ((Name(member.name), member.value) for member in value)
    elif issubclass(kind, type):
        return
    elif issubclass(kind, enum.Enum):
        yield Name("value"), value.value
    elif isinstance(inner := getattr(kind, "__wrapped__", None) or _own(value).get("__wrapped__"), FunctionType):
        yield Name("__wrapped__"), inner  # functools.lru_cache
    elif is_followed(kind) or kind.__name__ in ("SimpleNamespace", "Namespace"):
        yield from list((Name(name), part) for name, part in _own(value).items())[:_MANY]


def is_followed(cls: type) -> bool:
    """Whether a class stands outside torch, numpy and the standard library."""
    return (cls.__module__ or "").partition(".")[0] not in NOT_FOLLOWED


def _own(value: Any) -> dict[str, Any]:
    """The attributes that an object itself has, in its dict and its slots."""
    found = dict(getattr(value, "__dict__", None) or {})
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            slot = cls.__dict__.get(name)
            if slot is not None and hasattr(type(slot), "__get__") and name not in ("__dict__", "__weakref__"):
                part = _read_slot(slot, value)
                if part is not None:
                    found[name] = part
    return found


def _read_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # not assigned yet
        return None


def spelled(keys: Keys) -> str:
    """The keys as they are written after the object: `.acts[0]`."""
    return "".join(f".{key}" if isinstance(key, Name) else f"[{key!r}]" for key in keys)
