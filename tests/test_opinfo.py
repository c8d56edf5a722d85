"""The definitions on PyTorch's own test data: OpInfo's and ModuleInfo's samples, reference inputs and error inputs.

Both databases are private to PyTorch; this is the only file that imports them. Which of their entries are activations
is what `Tables` recognises, never a list.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import actswap.nn
from actswap import functional
from actswap.patterns import Match, match
from actswap.recognize import Tables, resolve
from actswap.values import same_bits

TABLES = Tables.build()
# Some entries wrap their function in a lambda that sets the seed; their name tells which function that is.
CALLEES = {op.full_name: resolve(f"torch.{op.name}") for op in op_db}
OPS = [op for op in op_db if TABLES.call(CALLEES[op.full_name])]
MODULES = [info for info in module_db if info.module_cls in TABLES.classes]


def typed(entries: list[Any]) -> list[Any]:
    """Every entry with every dtype that PyTorch has it for."""
    return [
        pytest.param(entry, dtype, id=f"{getattr(entry, 'full_name', entry.name)}-{str(dtype)[6:]}")
        for entry in entries for dtype in sorted(entry.dtypes, key=str)
    ]  # fmt: skip


def arguments(sample: SampleInput) -> tuple[list[Any], dict[str, Any]]:
    return [sample.input, *sample.args], sample.kwargs


def recognised(op: OpInfo, sample: SampleInput) -> Match[Any] | None:
    """What the call on this sample is; only idioms (`clamp`) have samples that are no activation."""
    patterns = TABLES.call(CALLEES[op.full_name])
    found = match(patterns, *arguments(sample))
    assert found is not None or all(pattern.is_idiom for pattern in patterns), sample
    return found


def differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def fresh(given: Any, wanted: bool) -> Any:
    """The arguments with every tensor copied, storage and strides too, as a leaf."""
    return pytree.tree_map(
        lambda v: (
            copy.deepcopy(v.detach()).requires_grad_(wanted and differentiable(v)) if isinstance(v, Tensor) else v
        ),
        given,
    )


def outcome(call: Callable[..., Tensor], given: Any, order: int) -> list[Tensor]:
    """The value, and the gradients of this order by every tensor among the arguments; 0 where there is no graph."""
    args, kwargs = fresh(given, order > 0)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if differentiable(leaf)]
    torch.manual_seed(3)
    value = root = call(*args, **kwargs)
    found: list[Tensor] = []
    for level in range(order):
        if not root.requires_grad:
            return [value, *map(torch.zeros_like, leaves)]
        upstream = torch.cos(torch.arange(root.numel()).reshape(root.shape)).to(root.dtype)
        graph = level + 1 < order
        found = list(torch.autograd.grad(root, leaves, upstream, create_graph=graph, materialize_grads=True))
        root = found[0]
    return [value, *found]


def bits(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def agree(got: list[Tensor], want: list[Tensor], order: int, rtol: float = 1e-12) -> None:
    """The same shapes, dtypes, strides of the value, and bits; second derivatives within rounding."""
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert index or one.stride() == other.stride()
        if index and order == 2:
            # at infinities the graph that PyTorch makes for a composite has 0 * inf; a limit is as good
            known = ~other.isnan()
            torch.testing.assert_close(one[known], other[known], rtol=rtol, atol=1e-12)
        else:
            assert same_bits(bits(one.detach()), bits(other.detach()))


def pairs(op: OpInfo, samples: Iterator[SampleInput]) -> Iterator[tuple[Match[Any], SampleInput]]:
    for sample in samples:
        found = recognised(op, sample)
        if found is not None:
            yield found, sample


def ours(found: Match[Any]) -> Callable[..., Tensor]:
    """Our function at the recognised parameters; the trained ones are arguments."""
    function = functional.function(found.activation)
    constant = {name: value for name, value in found.params.items() if not isinstance(value, Tensor)}
    return lambda x, *trained: function(x, *trained, **constant)


def compare(op: OpInfo, dtype: torch.dtype, samples: Iterator[SampleInput]) -> int:
    """How many samples agreed."""
    count = 0
    backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    orders = range(backward + (dtype == torch.float64 and op.supports_gradgrad) + 1)
    for found, sample in pairs(op, samples):
        trained = [value for value in found.params.values() if isinstance(value, Tensor)]
        rounded = (
            found.activation.name == "celu"
        )  # ATen rounds its alpha to float32 in the backward; our second derivative does not
        for order in orders:
            want = outcome(CALLEES[op.full_name], arguments(sample), order)
            agree(outcome(ours(found), ((sample.input, *trained), {}), order), want, order, 2e-7 if rounded else 1e-12)
        count += 1
    return count


@pytest.mark.parametrize(("op", "dtype"), typed(OPS))
def test_samples(op, dtype):
    count = compare(op, dtype, op.sample_inputs("cpu", dtype))
    again = compare(op, dtype, (sample.noncontiguous() for sample in op.sample_inputs("cpu", dtype)))
    assert count == again


REFERENCE = [op for op in OPS if op.reference_inputs_func]


@pytest.mark.parametrize("op", [pytest.param(op, id=op.full_name) for op in REFERENCE if torch.float32 in op.dtypes])
def test_some_reference_inputs(op):
    compare(op, torch.float32, itertools.islice(op.reference_inputs("cpu", torch.float32), 0, None, 7))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("op", "dtype"), typed(REFERENCE))
def test_reference_inputs(op, dtype):
    compare(op, dtype, op.reference_inputs("cpu", dtype))
    compare(op, dtype, (sample.noncontiguous() for sample in op.reference_inputs("cpu", dtype)))


def refused() -> list[Any]:
    """The error inputs that are calls of an activation: what it is, the call, and the class of its error."""
    return [
        pytest.param(found, CALLEES[op.full_name], error, id=f"{found.activation.name}-{index}")
        for op in OPS if op.error_inputs_func
        for index, error in enumerate(op.error_inputs("cpu"))
        for found in [match(TABLES.call(CALLEES[op.full_name]), *arguments(error.sample_input))] if found is not None
    ]  # fmt: skip


REFUSED = refused()


@pytest.mark.parametrize(("found", "callee", "error"), REFUSED)
def test_error_inputs(found, callee, error):
    """What PyTorch refuses is refused, with the same class of error."""
    args, kwargs = arguments(error.sample_input)
    with pytest.raises(error.error_type):
        callee(*args, **kwargs)
    with pytest.raises(error.error_type):
        ours(found)(args[0], *[value for value in found.params.values() if isinstance(value, Tensor)])


@pytest.mark.parametrize(("info", "dtype"), typed(MODULES))
def test_modules(info, dtype):
    """The module that `Tables` recognises in PyTorch's, on ModuleInfo's samples: values, gradients, weights."""
    for training in (True, False):
        count = 0
        for sample in info.module_inputs_func(info, "cpu", dtype, requires_grad=False, training=training):
            built = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            built = built.to(dtype).train(training)
            found = TABLES.module(built)
            assert found is not None, built
            made = actswap.nn.module_class(found.activation)(**found.params, inplace=found.inplace).train(training)
            weights = list(built.parameters())
            assert all(one is other for one, other in zip(made.parameters(), weights, strict=True))
            given = ((sample.forward_input.args[0], *weights), sample.forward_input.kwargs)
            for order in (0, 1):
                got, want = (outcome(functional_module(module), given, order) for module in (made, built))
                agree(got, want, order)
            count += 1
        assert count


def functional_module(module: nn.Module) -> Callable[..., Tensor]:
    """The module as a function of its input and its parameters."""
    names = [name for name, _ in module.named_parameters()]
    return lambda x, *weights: functional_call(module, dict(zip(names, weights, strict=True)), (x,))


def test_the_databases_are_covered():
    """A rename in PyTorch would leave tests without samples."""
    counts = {}
    for op in OPS:
        floating = next(dtype for dtype in (torch.float32, torch.complex64) if dtype in op.dtypes)
        for found, _ in pairs(op, op.sample_inputs("cpu", floating)):
            counts[found.activation.name] = counts.get(found.activation.name, 0) + 1
    assert len(counts) >= 24, counts
    assert len(MODULES) >= 21
    assert len(REFUSED) >= 6
