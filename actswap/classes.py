"""The class that carries rewritten methods: a subclass of the same name, shared by all owners with the same edits."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

from actswap.errors import ActswapError
from actswap.rewriting import OWNER, CallEdit, Edit, ReferenceEdit, dressed, edited_statement, rewrite, tensor
from actswap.source import Method, Position, filled, verify


@dataclass(frozen=True)
class MethodEdit:
    """The edited expressions of one method, or of one helper function that becomes a method.

    Args:
        cls: the class in whose body the method stands; None for a helper.
        name: its name there; a helper's as a method.
        edits: what changes, in the order of the source.
        digest: of the source text, so that a rebuilt class is known to come from the same text.
        helper: the helper function.
    """

    cls: type | None
    name: str
    edits: tuple[Edit, ...]
    digest: str
    helper: Any = None

    @property
    def attribute(self) -> Any:
        """What is rewritten: the class's attribute, or the helper."""
        return self.cls.__dict__[self.name] if self.cls is not None else self.helper

    @property
    def label(self) -> str:
        """Where it stands, for messages."""
        if self.cls is not None:
            return f"{self.cls.__module__}.{self.cls.__qualname__}.{self.name}"
        assert self.helper is not None
        return f"{self.helper.__module__}.{self.helper.__qualname__}"

    @property
    def source(self) -> Method:
        """The verified source of the function."""
        function = unwrapped(self.attribute)
        assert function is not None
        return verify(function)


def unwrapped(attribute: Any) -> FunctionType | None:
    """The Python function that a class attribute runs: itself, a property's getter, or what `functools.wraps` wraps."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    while isinstance(attribute, FunctionType) and isinstance(inner := vars(attribute).get("__wrapped__"), FunctionType):
        if not any(cell.cell_contents is inner for cell in attribute.__closure__ or () if filled(cell)):
            return None
        attribute = inner
    return attribute if isinstance(attribute, FunctionType) else None


def _rewritten_attribute(attribute: Any, edits: tuple[Edit, ...], helper: bool) -> Any:
    """A class attribute whose underlying function is rewritten, in wrappers like the old ones."""
    if isinstance(attribute, property):
        getter = _rewritten_attribute(attribute.fget, edits, helper)
        return property(getter, attribute.fset, attribute.fdel, attribute.__doc__)
    inner = vars(attribute).get("__wrapped__")
    if inner is None:
        return rewrite(attribute, edits, helper)
    new_inner = _rewritten_attribute(inner, edits, helper)
    closure = tuple(
        CellType(new_inner) if filled(cell) and cell.cell_contents is inner else cell for cell in attribute.__closure__
    )
    new = FunctionType(attribute.__code__, attribute.__globals__, attribute.__name__, attribute.__defaults__, closure)
    new = dressed(new, attribute)
    vars(new)["__wrapped__"] = new_inner
    return new


_CACHE: dict[tuple[type, frozenset[MethodEdit]], type] = {}
_MARK = "__actswap__"
RECORD = "_actswap"
"""The attribute of an owner that holds its edits, oldest first."""


def origin(cls: type) -> tuple[type, frozenset[MethodEdit]]:
    """The class a rewritten class was made from, and its edits; the class itself and none when it is not rewritten."""
    found: tuple[type, frozenset[MethodEdit]] = cls.__dict__.get(_MARK, (cls, frozenset()))
    return found


def merged(edits: Iterable[MethodEdit]) -> frozenset[MethodEdit]:
    """Edits with those of the same method joined."""
    groups: dict[tuple[type | None, str, str, FunctionType | None], list[Edit]] = {}
    for edit in edits:
        groups.setdefault((edit.cls, edit.name, edit.digest, edit.helper), []).extend(edit.edits)
    return frozenset(
        MethodEdit(cls, name, tuple(sorted(set(found), key=lambda e: e.position)), digest, helper)
        for (cls, name, digest, helper), found in groups.items()
    )


def rewritten_class(original: type, edits: frozenset[MethodEdit]) -> type:
    """A subclass with the same name in which the edited methods run; one per (class, edits), shared by all owners.

    For every other class of the MRO with an edited method, a shadow of it stands directly before it, so that `super()`
    keeps its meaning.

    Raises:
        Unverified: a method's source is not what runs.
        ActswapError: a method's source is not the text that the edits were made for.
    """
    if not edits:
        return original
    key = (original, edits)
    if key not in _CACHE:
        own: dict[str, Any] = {}
        shadows = []
        for cls in original.__mro__:
            methods = {e.name: _method(e) for e in sorted(edits, key=lambda e: e.name) if e.cls is cls}
            if cls is original:
                own = methods | {e.name: _method(e) for e in edits if e.helper is not None}
            elif methods:
                shadows.append(_subclass(cls, (cls,), methods))
        own[_MARK] = key
        own["__reduce_ex__"] = _reduce_ex
        own["__setstate__"] = _set_state
        _CACHE[key] = _subclass(original, (original, *shadows), own)
    return _CACHE[key]


def _method(edit: MethodEdit) -> Any:
    if edit.source.digest != edit.digest:
        raise ActswapError(
            "the source of a rewritten method is not the one it was rewritten from",
            edit.label,
            "restore the model with the version of the code that swapped it, or make it anew and swap again",
        )
    return _rewritten_attribute(edit.attribute, edit.edits, edit.helper is not None)


class _Quiet:
    """Stands first while a subclass is made, so that no `__init_subclass__` of the user's classes fires."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def _subclass(like: type, bases: tuple[type, ...], namespace: Mapping[str, Any]) -> type:
    body = {"__module__": like.__module__, "__qualname__": like.__qualname__, "__doc__": like.__doc__, **namespace}
    # type.__new__ and not the metaclass itself: a registering metaclass must not see the class either.
    cls = type.__new__(type(like), like.__name__, (_Quiet, *bases), body)
    cls.__bases__ = bases
    return cls


def is_sharded(cls: type) -> bool:
    """Whether it is a class that `fully_shard` gives a module, or wrapped FullyShardedDataParallel."""
    return any(c.__module__.startswith("torch.distributed.fsdp") for c in cls.__mro__)


@functools.cache
def rebased(cls: type, before: type, after: type) -> type:
    """A class with another base, made once: `fully_shard` gives all modules of a class one class between them."""
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(after if base is before else base for base in cls.__bases__), body)


_SELF = "actswap: the rewritten class"


def _reduce_ex(self: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle and deepcopy as the original class would, with the class itself replaced by how to rebuild it."""
    cls: type = next(c for c in type(self).__mro__ if _MARK in c.__dict__)
    original, edits = cls.__dict__[_MARK]
    reduced: Any = super(cls, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
    make, args, *rest = reduced
    args = tuple(_SELF if arg is type(self) and arg is cls else arg for arg in args)
    state = rest[0] if rest else None
    if not (isinstance(state, dict) and RECORD in state):  # the user's own __reduce__ knows nothing of our slots
        names = {RECORD} | {e.slot for edit in edits for e in edit.edits if isinstance(e, CallEdit)}
        modules = {name: module for name, module in self._modules.items() if name in names}
        state = _State(state, {name: vars(self)[name] for name in names if name in vars(self)}, modules)
    return (_rebuild, (make, args, original, edits), state, *rest[1:])


@dataclass
class _State:
    """What the user's own `__reduce__` gave as state, and what a swap added to the instance."""

    given: Any
    attributes: dict[str, Any]
    modules: dict[str, Any]


def _set_state(self: Any, state: Any) -> None:
    cls: type = next(c for c in type(self).__mro__ if _MARK in c.__dict__)
    given = state.given if isinstance(state, _State) else state
    if given is not None:
        super(cls, self).__setstate__(given)  # type: ignore[arg-type]
    if isinstance(state, _State):
        vars(self).update(state.attributes)
        self._modules.update(state.modules)


def _rebuild(make: Any, args: tuple[Any, ...], original: type, edits: frozenset[MethodEdit]) -> Any:
    cls = rewritten_class(original, edits)
    result = make(*(cls if isinstance(arg, str) and arg == _SELF else arg for arg in args))
    if type(result) is original:
        object.__setattr__(result, "__class__", cls)
    return result


def differs_only_at(edit: MethodEdit) -> bool:
    """Whether the edited syntax tree is the original one but for the chosen expressions.

    A chosen call is a call of its slot, a chosen reference an attribute of the owner; a helper has one more argument.
    """
    method = edit.source
    chosen = {e.position: e for e in edit.edits}

    def same(old: Any, new: Any) -> bool:
        if isinstance(old, list):
            return isinstance(new, list) and len(old) == len(new) and all(map(same, old, new))
        if not isinstance(old, ast.AST):
            return type(old) is type(new) and bool(old == new)
        here = chosen.get(Position.of(old)) if isinstance(old, ast.expr) else None
        if isinstance(old, ast.Call) and isinstance(here, CallEdit):
            if here.guard is not None:
                kept = isinstance(new, ast.IfExp) and ast.unparse(new.test) == here.guard and each(old, new.orelse)
                if not kept:
                    return False
                new = new.body
            slot = isinstance(new, ast.Call) and isinstance(new.func, ast.Attribute) and new.func.attr == here.slot
            return slot and len(new.args) == 1 and same(tensor(old, here.argument), new.args[0])
        if isinstance(old, (ast.Name, ast.Attribute)) and isinstance(here, ReferenceEdit):
            return isinstance(new, ast.Attribute) and new.attr == here.name
        if old is method.node.args and edit.helper is not None:
            first = (new.posonlyargs or new.args).pop(0)
            if first.arg != OWNER:
                return False
        return each(old, new)

    def each(old: ast.AST, new: ast.AST) -> bool:
        fields = (*old._fields, *old._attributes)
        return type(old) is type(new) and all(same(getattr(old, f, None), getattr(new, f, None)) for f in fields)

    return same(method.statement, edited_statement(method, edit.edits, edit.helper is not None))
