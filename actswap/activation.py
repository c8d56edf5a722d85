"""Activation: the frozen definition of one elementwise function and its backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from actswap.errors import ParameterError

_SPELLING = {
    **{word: word.upper() for word in ("elu", "celu", "selu", "gelu")},
    "prelu": "PReLU", "rrelu": "RReLU", "relu": "ReLU", "relu6": "ReLU6", "silu": "SiLU", "xielu": "XIELU",
    "logsigmoid": "LogSigmoid", "sqrtsoftplus": "SqrtSoftplus",
}  # fmt: skip

Formula = Callable[..., Tensor]
"""A function of one tensor (the input or a saved state) and the activation's parameters by keyword."""


@dataclass(frozen=True)
class Domain:
    """The values a parameter may take: an interval, each end open or closed.

    >>> Domain(0.0, math.inf, open=True)
    > 0
    """

    low: float = -math.inf
    high: float = math.inf
    open: bool = False
    nonzero: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, (int, float)) or math.isnan(value) or (self.nonzero and value == 0):
            return False
        inside = self.low < value < self.high if self.open else self.low <= value <= self.high
        return inside or (self.low == -math.inf and self.high == math.inf)

    def __repr__(self) -> str:
        sign = "" if self.open else "="
        if self.low == -math.inf and self.high == math.inf:
            return "any number but 0" if self.nonzero else "any number"
        if self.high == math.inf:
            return f">{sign} {self.low:g}"
        if self.low == -math.inf:
            return f"<{sign} {self.high:g}"
        return f"{self.low:g} <{sign} value <{sign} {self.high:g}"


@dataclass(frozen=True)
class Parameter:
    """One parameter of an activation.

    Args:
        name: PyTorch's name for it where PyTorch has the activation.
        default: its value when nothing is said.
        domain: the values it may take.
        learnable: a tensor with a gradient of its own: an `nn.Parameter` of the module (one value, or one per
            channel along dimension 1) and a tensor argument of the function.
        mode: follows the module's `training` flag and is no constructor argument (rrelu's `training`).
    """

    name: str
    default: float | bool
    domain: Domain = Domain()
    learnable: bool = False
    mode: bool = False

    def check(self, activation: str, value: Any) -> Any:
        """`value` if this parameter may take it, a constant as a number.

        Raises:
            ParameterError: the value is outside the domain, or not a number.
        """
        if isinstance(value, Tensor):
            if self.learnable:
                return value
            value = value.item() if value.numel() == 1 else value
        elif hasattr(type(value), "__torch_function__"):  # a symbolic value while a graph is traced
            return value
        if value not in self.domain:
            rule = f"{activation}: {self.name} must be {self.domain!r}"
            raise ParameterError(rule, f"{self.name}={value!r}", f"default: {self.default!r}")
        return value


@dataclass(frozen=True)
class State:
    """How one saved tensor gives the derivative.

    Args:
        derivative: f'(x), written in the saved tensor.
        second: the derivative of `derivative` with respect to the saved tensor, so that double backward saves
            nothing else. Written in differentiable torch operations: third order comes from autograd.
        kernel: `kernel(grad_output, saved, **params)`: ATen's fused `grad_output * f'(x)`, where there is one. With
            learnable parameters it returns a tuple: that product, then one per learnable parameter, all of the
            input's shape, in differentiable operations.
        twice: whether ATen differentiates `kernel` itself and saves no more for that than `saved` and what its double
            backward reads of `grad_output`: then double backward is PyTorch's own, bit for bit.
        batched: whether `kernel` may run under vmap: PyTorch has batching rules for its operations, and it changes
            nothing in place. Otherwise vmap takes the product with the derivative.
        allowed: whether these parameter values (a mapping) permit this state; None when all do.
        needs: the same as words, for the error message.
        bound: the greatest absolute error of the derivative, in machine epsilons (of the largest derivative, where that
            exceeds 1), when this state is not the one that
            PyTorch saves; 0.0 means bit for bit the same gradients.
        forward: `forward(x, **params) -> (y, saved)` where what is saved is neither the input nor the output (noise,
            packed bits); None otherwise.
    """

    derivative: Formula
    second: Formula
    kernel: Callable[..., Any] | None = None
    twice: bool = False
    batched: bool = True
    allowed: Callable[[Mapping[str, Any]], bool] | None = None
    needs: str = ""
    bound: float = 0.0
    forward: Callable[..., tuple[Tensor, Tensor]] | None = None
    slopes: Callable[..., tuple[Tensor, Tensor]] | None = None
    """`derivative` and `second` together, where they share work: double backward takes both from here."""

    @classmethod
    def joint(cls, slopes: Callable[..., tuple[Tensor, Tensor]], **rest: Any) -> State:
        """A state whose two derivatives come from one formula."""
        return cls(
            lambda *args, **params: slopes(*args, **params)[0],
            lambda *args, **params: slopes(*args, **params)[1],
            slopes=slopes,
            **rest,
        )


@dataclass(frozen=True, kw_only=True)
class Activation:
    """The definition of an activation; functions, modules, checks, docs and recognition are derived from it.

    Args:
        name: the canonical name, lower case.
        forward: f(x, **params), out of place, in the operations that PyTorch itself uses for it. Every formula takes
            the parameters by name, and also by position in the order of `parameters`.
        states: the saved states it allows, by name: `"input"`, `"output"`. Empty: there is no hand-written backward
            and PyTorch's autograd differentiates `forward` (identity, and what a user registers without derivative).
        save: the state that PyTorch's own op saves; what `save="auto"` means standalone.
        save_: the state that PyTorch's in-place op saves, where it is another.
        aliases: other names.
        parameters: in the order of PyTorch's signature.
        requires: a rule between parameters and the words for it.
        forward_: ATen's in-place form, where there is one.
        gradients: for each learnable parameter, the partial derivative of f with respect to it as a formula of the
            input, shaped like the input; it is reduced to the parameter's shape by the caller.
        kinks: the points where the derivative jumps, from the parameters.
        low, high: the least and greatest value it takes (`-inf`, `inf` when unbounded), from the parameters.
        monotonic: whether it never decreases, for its default parameters.
        reference: an independent slow implementation for float64, in plain torch operations.
        native: PyTorch has this very op, so values and gradients are PyTorch's bit for bit.
        surrogate: its backward is deliberately not its derivative (guided backpropagation).
        formula: the function as a line of mathematics: `a b` is a product, `^` a power, `a if c else b` a choice; names
            may be explained after a semicolon.
        slope: its derivative, in the same notation and with the same names; of a surrogate its backward, where `g` is
            the gradient that comes from above.
        source: where the formula comes from.
        modules: classes that are this activation; see `actswap.recognize` for the notation.
        calls: functions and methods that are this activation; same notation.
    """

    name: str
    forward: Formula
    states: Mapping[str, State]
    save: str = "input"
    save_: str | None = None
    aliases: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    requires: tuple[Callable[[Mapping[str, Any]], bool], str] | None = None
    forward_: Formula | None = None
    gradients: Mapping[str, Formula] = field(default_factory=lambda: MappingProxyType({}))
    kinks: Callable[[Mapping[str, Any]], tuple[float, ...]] = lambda params: ()
    low: Callable[[Mapping[str, Any]], float] = lambda params: -math.inf
    high: Callable[[Mapping[str, Any]], float] = lambda params: math.inf
    monotonic: bool = True
    reference: Formula | None = None
    native: bool = False
    surrogate: bool = False
    formula: str = ""
    slope: str = ""
    source: str = ""
    modules: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    names: tuple[str, ...] = field(init=False)
    """The parameters' names, in order."""
    learnable: tuple[Parameter, ...] = field(init=False)
    """The parameters that are trained."""
    trained: tuple[tuple[int, str], ...] = field(init=False)
    """Their places and names."""

    def __post_init__(self) -> None:
        # plain attributes: they are read on every call, and Dynamo reads no cached_property
        object.__setattr__(self, "names", tuple(parameter.name for parameter in self.parameters))
        places = tuple((index, p.name) for index, p in enumerate(self.parameters) if p.learnable)
        object.__setattr__(self, "learnable", tuple(self.parameters[index] for index, _ in places))
        object.__setattr__(self, "trained", places)

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"Activation({self.name!r})"

    def __copy__(self) -> Activation:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Activation:
        return self

    @property
    def defaults(self) -> dict[str, Any]:
        """Every parameter's default, in order."""
        return {parameter.name: parameter.default for parameter in self.parameters}

    @property
    def class_name(self) -> str:
        """The name of its module class, spelt as PyTorch does.

        >>> from actswap.catalog import CATALOG
        >>> CATALOG["leaky_relu"].class_name
        'LeakyReLU'
        """
        return "".join(_SPELLING.get(word, word[:1].upper() + word[1:]) for word in self.name.split("_"))

    def bind(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter's value, in order: those given, else the default.

        A constant given as a tensor of one element becomes its number.

        Raises:
            ParameterError: a name the activation does not have, or a value outside its domain.
        """
        bound = {}
        for parameter in self.parameters:
            value, domain = params.get(parameter.name, parameter.default), parameter.domain
            if type(value) is not float or domain.nonzero or not domain.low < value < domain.high:
                value = parameter.check(self.name, value)
            bound[parameter.name] = value
        if not params.keys() <= bound.keys():
            name = next(name for name in params if name not in bound)
            takes = ", ".join(f"{p.name}={p.default!r}" for p in self.parameters) or "none"
            raise ParameterError(
                f"{self.name} has no parameter {name!r}", f"{name}={params[name]!r}", f"it takes: {takes}"
            )
        if self.requires is not None and not self.requires[0](bound):
            given = ", ".join(f"{name}={value!r}" for name, value in bound.items())
            raise ParameterError(f"{self.name}: {self.requires[1]}", given)
        return bound


HALF = frozenset({torch.float16, torch.bfloat16})
"""The dtypes for which our own formulas compute in float32 inside."""


def own(formula: Formula, half: Formula | None = None) -> Formula:
    """`formula` as a forward of our own: half precision computes in float32 inside, and the dtype stays.

    Args:
        formula: the function, in torch operations.
        half: another way to write it for half precision, where digits need more operations than float32 should pay.

    Raises:
        NotImplementedError: the input is an integer, boolean or complex tensor (PyTorch's error class for that).

    >>> own(lambda x, beta: x * torch.sigmoid(beta * x))(torch.ones(1, dtype=torch.bfloat16), 1.0)
    tensor([0.7305], dtype=torch.bfloat16)
    """

    @functools.wraps(formula)
    def forward(x: Tensor, *values: Any, **params: Any) -> Tensor:
        if not x.is_floating_point():
            raise NotImplementedError(f"a formula for real numbers is not implemented for {x.dtype}")
        if x.dtype in HALF:
            named = {name: wide(value) for name, value in params.items()}
            return (half or formula)(x.float(), *(wide(value) for value in values), **named).to(x.dtype)
        y = formula(x, *values, **params)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    return forward


def wide(value: Any) -> Any:
    """A half precision tensor in float32; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value
