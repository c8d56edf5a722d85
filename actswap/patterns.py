"""Pattern: one way in which an activation is met in code, and what it makes of given arguments.

A definition names its *targets* in Python's signature syntax: a dotted path, then the arguments in order, with
defaults. An annotation is a value the argument must have for the target to be this activation:

    torch.nn.functional.gelu(input, *, approximate: 'tanh' = 'none')

is gelu_tanh. In `calls` the first argument is the tensor, a trailing underscore in the name means in place, and the
default `...` that an argument is taken and ignored. In `modules` the arguments are attributes of the instance.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from actswap.activation import Activation

Value = TypeVar("Value")
MISSING: Any = object()

IDIOMS = frozenset({"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_"})
"""Functions with other uses than activating: the data flow decides."""


class _Mode:
    """Stands for `self.training` as an argument: a value that follows the module."""


MODE: Any = _Mode()


class Undetermined(Exception):
    """A value that decides what a call is, or does, is known only at run time.

    Args:
        text: which.
        among: the activations that the call can still be; None where that is what the code tells.
    """

    def __init__(self, text: str, among: Sequence[Activation] | None = None) -> None:
        super().__init__(text)
        self.among = among


@dataclass(frozen=True)
class Argument:
    """One argument of a target; `required` is the value it must have."""

    name: str
    default: Any = MISSING
    required: Any = MISSING
    keyword_only: bool = False


@dataclass(frozen=True)
class Pattern:
    """One target of one activation, parsed."""

    activation: Activation
    path: str
    arguments: tuple[Argument, ...]

    @classmethod
    def parse(cls, activation: Activation, text: str) -> Pattern:
        """Read `dotted.path(arguments)`."""
        path, _, signature = text.partition("(")
        function = ast.parse(f"def _({signature}: ...").body[0]
        assert isinstance(function, ast.FunctionDef)
        spec = function.args
        positional = [*spec.posonlyargs, *spec.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)

        def argument(arg: ast.arg, default: ast.expr | None, keyword_only: bool) -> Argument:
            return Argument(
                arg.arg,
                MISSING if default is None else ast.literal_eval(default),
                MISSING if arg.annotation is None else ast.literal_eval(arg.annotation),
                keyword_only,
            )

        arguments = [argument(a, d, False) for a, d in zip(positional, defaults, strict=True)]
        arguments += [argument(a, d, True) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
        return cls(activation, path, tuple(arguments))

    @property
    def name(self) -> str:
        """The last part of the path, without the overload of an ATen operator."""
        parts = self.path.split(".")
        return parts[-2] if self.path.startswith("torch.ops.") else parts[-1]

    @property
    def is_idiom(self) -> bool:
        """Whether the callee has other uses than activating."""
        return self.name in IDIOMS

    @property
    def inplace(self) -> bool:
        """Whether the name says that it works in place."""
        return self.name.endswith("_")

    def bind(self, args: Sequence[Value], kwargs: Mapping[str, Value]) -> dict[str, Value] | None:
        """The given arguments by name, or None when the signature does not take them."""
        positional = [a.name for a in self.arguments if not a.keyword_only]
        names = {a.name for a in self.arguments}
        if len(args) > len(positional):
            return None
        bound = dict(zip(positional, args, strict=False))
        if not kwargs.keys() <= names - bound.keys():
            return None
        bound.update(kwargs)
        if any(a.default is MISSING and a.name not in bound for a in self.arguments):
            return None
        return bound


@dataclass(frozen=True)
class Match(Generic[Value]):
    """What a class, function or call was recognised as.

    Args:
        activation: the definition.
        params: the values of its parameters that the site states, in the activation's names.
        inplace: whether the site writes into its input.
        tensor: the argument that carries the input, as it was given.
        idiom: whether the callee has other uses than activating.
        original: computes what the site computes now: a function of the tensor, and by keyword `training` and the
            parameters that are to differ from those found.
        callee: the function or class that was recognised.
    """

    activation: Activation
    params: dict[str, Any]
    inplace: bool
    tensor: Value | None = None
    idiom: bool = False
    original: Callable[..., Any] | None = None
    callee: Any = None


def same(value: Any, required: Any) -> bool:
    """Whether an argument's value is the one that a target asks for.

    >>> same(0, 0.0), same(None, 0), same("tanh", "tanh"), same(True, 1)
    (True, False, True, False)
    """
    if isinstance(value, bool) != isinstance(required, bool):
        return False
    return type(value) in (int, float, bool, str, type(None)) and bool(value == required)


def match(
    patterns: Sequence[Pattern],
    args: Sequence[Value],
    kwargs: Mapping[str, Value],
    evaluate: Callable[[Value], Any] = lambda value: value,
    callee: Callable[..., Any] | None = None,
) -> Match[Value] | None:
    """The first of the patterns that these arguments fit.

    Args:
        callee: the function that is called; given, the match can compute what the call computes.
        evaluate: gives an argument's value; raises `Undetermined` when that is known only at run time.

    Raises:
        Undetermined: whether it fits, or a parameter's value, is known only at run time.
    """
    for pattern in patterns:
        bound = pattern.bind(args, kwargs)
        if bound is None:
            continue
        tensor = bound.pop(pattern.arguments[0].name)
        values: dict[str, Any] = {}
        for argument in sorted(pattern.arguments[1:], key=lambda a: a.required is MISSING):
            value = evaluate(bound[argument.name]) if argument.name in bound else argument.default
            if argument.required is not MISSING and not same(value, argument.required):
                break  # the first that differs decides; the others need not be known
            values[argument.name] = value
        else:
            return _matched(pattern, values, bound.keys(), tensor, callee)
    return None


def _matched(
    pattern: Pattern, values: dict[str, Any], given: Collection[str], tensor: Value, callee: Any
) -> Match[Value]:
    ignored = any(a.default is ... for a in pattern.arguments)  # takes `inplace`, and works out of place
    inplace = pattern.inplace or (not ignored and bool(values.get("inplace", False)))
    stated = {a.name: values[a.name] for a in pattern.arguments[1:] if a.name in given}
    original = _original(pattern, callee, stated) if callee is not None else None
    params = stated_parameters(pattern, values)
    return Match(pattern.activation, params, inplace, tensor, pattern.is_idiom, original, callee)


def _original(pattern: Pattern, callee: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    """What a call computes: the callee itself, with the arguments it was given."""
    ordered = [a.name for a in pattern.arguments[1:] if not a.keyword_only]

    def original(tensor: Tensor, training: bool = False, **changed: Any) -> Any:
        values = {name: training if value is MODE else value for name, value in {**given, **changed}.items()}
        args = []
        for name in ordered:  # some of PyTorch's built-ins take no keywords
            if name not in values:
                break
            args.append(values.pop(name))
        return callee(tensor, *args, **values)

    return original


def stated_parameters(pattern: Pattern, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are parameters of the pattern's activation and were not fixed by its target."""
    wanted = {p.name for p in pattern.activation.parameters}
    return {name: value for name, value in values.items() if name in wanted and value is not MODE}
