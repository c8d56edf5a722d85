"""The `autograd.Function`s of one activation and saved state, made from its formulas.

Each Function has its own second Function as backward when a graph is wanted, so that double backward is exact and
saves only the incoming gradient and the same saved tensor; where the second derivative is 0, not even the gradient.
Third order is autograd of the formula for the second. Where ATen's backward kernel has a derivative of its own that
saves as little, the kernel itself is that second Function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import Function, forward_ad

from actswap.activation import HALF, Activation, Formula, State, wide
from actswap.piecewise import flat

transforming = torch._C._are_functorch_transforms_active


def forward_mode() -> bool:
    """Whether forward-mode differentiation is on, by `torch.func` or by hand.

    It then runs plain operations: a Function's `jvp` runs with forward mode off, so that under two levels of it every
    operation in there would lose the outer tangent without a word.
    """
    if forward_ad._current_level >= 0:
        return True
    return transforming() and any(i.key() == TransformType.Jvp for i in get_interpreter_stack() or ())


def product(g: Tensor, slope: Formula, saved: Tensor, *values: Any) -> Tensor:
    """The product g f'(saved), rounded once: half precision multiplies in float32 too."""
    if saved.dtype in HALF:
        return (g.float() * slope(saved.float(), *map(wide, values))).to(saved.dtype)
    return g * slope(saved, *values)


def _named(cls: type[Function], name: str) -> Any:
    """A subclass with the name that graphs show: `y.grad_fn.name()` is this plus "Backward"."""
    make: Any = type(cls)
    return make(name, (cls,), {"__module__": cls.__module__})


def kernel_of(state: State) -> Callable[..., Tensor]:
    """`kernel(g, saved, *values)`: ATen's, or the product with the derivative."""
    if state.kernel is not None:
        return state.kernel
    slope = state.derivative
    return lambda g, saved, *values: product(g, slope, saved, *values)


def make_backward(activation: Activation, state: State) -> Callable[..., Tensor]:
    """`backward(g, saved, *values)`: g f'(x) as a function that autograd can differentiate again."""
    kernel = kernel_of(state)
    if activation.surrogate:  # not linear in g, so there is no f'; its own operations are differentiable
        return kernel
    slope, second, name = state.derivative, state.second, f"{activation.class_name}Backward"
    slopes, straight, tail = state.slopes, second is flat, (None,) * len(activation.names)

    def bend(gg: Tensor, g: Tensor, saved: Tensor, values: tuple[Any, ...]) -> Tensor:
        if saved.dtype in HALF:
            return (gg.float() * g.float() * second(saved.float(), *values)).to(saved.dtype)
        if torch.is_grad_enabled() or transforming():
            return gg * g * second(saved, *values)
        return (gg * g).mul_(second(saved, *values))  # one tensor fewer

    def both(gg: Tensor, g: Tensor, saved: Tensor, values: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        one, two = slopes(wide(saved), *values)  # type: ignore[misc]
        return (wide(gg) * one).to(saved.dtype), (wide(gg) * wide(g) * two).to(saved.dtype)

    class Eager(Function):
        @staticmethod
        def forward(ctx: Any, g: Tensor, saved: Tensor, *values: Any) -> Tensor:
            ctx.save_for_backward(saved, None if straight else g)
            ctx.values = values
            return kernel(g, saved, *values)

        @staticmethod
        def backward(ctx: Any, gg: Tensor) -> Any:
            saved, g = ctx.saved_tensors
            if slopes is not None and not torch.is_grad_enabled():
                return *both(gg, g, saved, ctx.values), *tail
            first = through = None
            if ctx.needs_input_grad[0]:
                first = (differentiable if torch.is_grad_enabled() else kernel)(gg, saved, *ctx.values)
            if ctx.needs_input_grad[1]:
                through = torch.zeros_like(gg) if straight else bend(gg, g, saved, ctx.values)
            return first, through, *tail

    class Transformed(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(g: Tensor, saved: Tensor, *values: Any) -> Tensor:
            return kernel(g, saved, *values) if state.batched else product(g, slope, saved, *values)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            g, saved, *values = inputs
            ctx.save_for_backward(g, saved)
            ctx.values = tuple(values)

        @staticmethod
        def backward(ctx: Any, gg: Tensor) -> Any:
            g, saved = ctx.saved_tensors
            return differentiable(gg, saved, *ctx.values), bend(gg, g, saved, ctx.values), *[None] * len(ctx.values)

    eager, transformed = _named(Eager, name), _named(Transformed, name)

    def differentiable(g: Tensor, saved: Tensor, *values: Any) -> Tensor:
        if forward_mode():
            return product(g, slope, saved, *values)
        if state.twice:
            return kernel(g, saved, *values)
        form = transformed if transforming() else eager
        y: Tensor = form.apply(g, saved, *values)
        return y

    return differentiable


def make_trained_backward(activation: Activation, state: State) -> Callable[..., tuple[Tensor, ...]]:
    """`backward(g, saved, *values)`: the gradients of the input and of every tensor among `values`.

    Differentiable as it stands, since it consists of torch operations.
    """
    slope, kernel = state.derivative, state.kernel
    partials = tuple((index, activation.gradients[name]) for index, name in activation.trained)

    def backward(g: Tensor, x: Tensor, *values: Any) -> tuple[Tensor, ...]:
        tensors = [(values[index], partial) for index, partial in partials if isinstance(values[index], Tensor)]
        if kernel is not None:
            first, *rest = kernel(g, x, *values)
            return first, *[reduced(full, value) for full, (value, _) in zip(rest, tensors, strict=True)]
        wides, upstream, point = [wide(value) for value in values], wide(g), wide(x)
        first = (upstream * slope(point, *wides)).to(x.dtype)
        return first, *[reduced(upstream * partial(point, *wides), value) for value, partial in tensors]

    return backward


def reduced(full: Tensor, like: Tensor) -> Tensor:
    """The sum of `full` over what was broadcast, in the shape and dtype of the parameter."""
    return (full if full.shape == like.shape else full.sum_to_size(like.shape)).to(like.dtype)


def make_eager(activation: Activation, key: str, inplace: bool) -> Any:
    """The `forward(ctx, x, *values)` form; in place with a saved input, `forward(ctx, x, copy_of_x, *values)`."""
    state = activation.states[key]
    special, from_output, copies = state.forward, key == "output", inplace and key == "input"
    forward, in_place, kernel = activation.forward, activation.forward_, kernel_of(state)
    differentiable = make_backward(activation, state)
    tail = (None,) * (len(activation.names) + copies)

    def run(ctx: Any, x: Tensor, values: tuple[Any, ...]) -> Tensor:
        if not inplace:
            return forward(x, *values)
        ctx.mark_dirty(x)
        return in_place(x, *values) if in_place is not None else x.copy_(forward(x, *values))

    class Eager(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *values: Any) -> Tensor:
            if copies:
                saved, *rest = values
                values = tuple(rest)
                y = run(ctx, x, values)
            elif special is not None:
                y, saved = special(x, *values)
                if inplace:
                    ctx.mark_dirty(x)
                    y = x.copy_(y)
            else:
                y = run(ctx, x, values)
                saved = y if from_output else x
            ctx.save_for_backward(saved)
            ctx.values = values
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (saved,) = ctx.saved_tensors
            if torch.is_grad_enabled():
                return differentiable(g, saved, *ctx.values), *tail
            return kernel(g, saved, *ctx.values), *tail

    return _named(Eager, activation.class_name)


def make_trained(activation: Activation, key: str, inplace: bool) -> Any:
    """The same for activations with trained parameters, which are saved with the state."""
    backward_of = make_trained_backward(activation, activation.states[key])
    forward, in_place = activation.forward, activation.forward_

    class Trained(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *values: Any) -> Tensor:
            saved = x
            if inplace:
                saved, *rest = values
                values = tuple(rest)
                ctx.mark_dirty(x)
                y = in_place(x, *values) if in_place is not None else x.copy_(forward(x, *values))
            else:
                y = forward(x, *values)
            _keep(ctx, saved, values)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, values = _kept(ctx)
            return _spread(backward_of(g, x, *values), values, inplace)

    return _named(Trained, activation.class_name)


def _keep(ctx: Any, saved: Tensor, values: Any) -> None:
    ctx.save_for_backward(saved, *[value for value in values if isinstance(value, Tensor)])
    ctx.values = [None if isinstance(value, Tensor) else value for value in values]


def _kept(ctx: Any) -> tuple[Tensor, list[Any]]:
    saved, *tensors = ctx.saved_tensors
    rest = iter(tensors)
    return saved, [next(rest) if value is None else value for value in ctx.values]


def _spread(gradients: tuple[Tensor, ...], values: list[Any], gap: bool) -> tuple[Tensor | None, ...]:
    """The gradients at the places of their arguments: input, copy of the input if there is one, values."""
    first, *rest = gradients
    others = iter(rest)
    return first, *[None] * gap, *(next(others) if isinstance(value, Tensor) else None for value in values)


def make_transformed(activation: Activation, key: str) -> Any:
    """The `setup_context` form with a vmap rule, for `torch.func`'s reverse mode; out of place, nothing trained."""
    state, forward, from_output = activation.states[key], activation.forward, key == "output"
    differentiable = make_backward(activation, state)

    class Transformed(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor, *values: Any) -> Tensor:
            return forward(x, *values)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            x, *values = inputs
            ctx.save_for_backward(output if from_output else x)
            ctx.values = tuple(values)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (saved,) = ctx.saved_tensors
            return differentiable(g, saved, *ctx.values), *[None] * len(ctx.values)

    return _named(Transformed, activation.class_name)


def make_compiled(activation: Activation, key: str) -> Any:
    """As eager and out of place, with a backward of plain kernel calls, which Dynamo and Inductor read."""
    state, forward, from_output = activation.states[key], activation.forward, key == "output"
    kernel, trained = kernel_of(state), bool(activation.learnable)
    several = make_trained_backward(activation, state) if trained else None

    class Compiled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *values: Any) -> Tensor:
            y = forward(x, *values)
            _keep(ctx, y if from_output else x, values)
            return y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            saved, values = _kept(ctx)
            if several is not None:
                return _spread(several(g, saved, *values), values, False)
            return kernel(g, saved, *values), *[None] * len(values)

    return _named(Compiled, activation.class_name)
