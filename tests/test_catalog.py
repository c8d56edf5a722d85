"""The definitions against the oracle, against each other, and against the tables of timm and transformers."""

from __future__ import annotations

import ast
import importlib
import math
import warnings

import oracle
import pytest
import torch
from torch import nn

from actswap import autograd, registry
from actswap.activation import HALF, Activation, Domain, own
from actswap.catalog import CATALOG
from actswap.comparing import grid, reference, ulp
from actswap.errors import ParameterError

EVERY = [pytest.param(a, id=a.name) for a in CATALOG.values()]
SMOOTH_BACKWARD = [pytest.param(a, id=a.name) for a in CATALOG.values() if not a.surrogate]
POINTS = [-37.5, -11.25, -6.1, -4.4, -2.9, -2.1, -1.3, -0.77, -0.41, -0.1, -1e-3, 1e-3, 0.13, 0.44, 0.81, 1.7, 2.6, 3.9,
          5.8, 9.4, 18.9, 41.0]  # fmt: skip


def settings(activation: Activation) -> list[dict]:
    return [activation.bind(p) for p in [{}, *oracle.AWKWARD.get(activation.name, [])]]


def drawless(activation: Activation) -> list[dict]:
    """Parameter settings without a random draw."""
    return [p for p in settings(activation) if not p.get("training")]


def apart(activation: Activation, params: dict, points: list[float]) -> torch.Tensor:
    kinks = activation.kinks(params)
    return torch.tensor([x for x in points if all(abs(x - k) > 1e-6 for k in kinks)], dtype=torch.float64)


def positional(activation: Activation, params: dict) -> list:
    return [params[name] for name in activation.names]


def close(got: torch.Tensor, want: torch.Tensor, x: torch.Tensor, params: dict, order: int = 0) -> None:
    """4 ulp, or what rounding the input and a product with a parameter costs; a soft threshold costs exp(-it)."""
    gain = max([1.0, *(abs(value) for name, value in params.items() if name != "threshold")]) ** (order + 1)
    slack = math.exp(-params["threshold"]) if "beta" in params and "threshold" in params else 0.0
    eps = torch.finfo(got.dtype).eps * 4 ** (order + 1)
    scale = torch.maximum(4 * ulp(want, got.dtype), eps * gain * x.abs().clamp(min=1)) + slack
    error = (got.double() - want).abs()
    worst = int((error / scale).argmax())
    assert error[worst] <= scale[worst], f"at {x[worst]}: {got[worst]} is not {want[worst]}"


def test_the_oracle_knows_every_activation_and_every_op_of_pytorch():
    assert set(oracle.TRUTH) == set(CATALOG)
    assert set(oracle.NATIVE) == {a.name for a in CATALOG.values() if a.native}
    assert set(oracle.AWKWARD) == {a.name for a in CATALOG.values() if a.parameters}


@pytest.mark.parametrize("activation", EVERY)
def test_values_are_the_mathematics(activation):
    for params in drawless(activation):
        x = apart(activation, params, POINTS)
        want = oracle.truth(activation.name, x, params)
        values = positional(activation, params)
        assert activation.reference is not None
        close(activation.forward(x, *values), want, x, params)
        close(activation.reference(x, *values), want, x, params)


@pytest.mark.parametrize("activation", SMOOTH_BACKWARD)
def test_derivatives_are_the_mathematics_from_every_state(activation):
    for params in drawless(activation):
        x = apart(activation, params, POINTS)
        values = positional(activation, params)
        first, second = (oracle.truth(activation.name, x, params, order) for order in (1, 2))
        close(reference(activation, x, params)[1], first, x, params, 1)
        for key, state in activation.states.items():
            if state.forward is not None or (state.allowed is not None and not state.allowed(params)):
                continue
            saved = activation.forward(x, *values) if key == "output" else x
            close(state.derivative(saved, *values), first, x, params, 1)
            # the second derivative is taken with respect to what is saved: chain rule back to x
            outer = first if key == "output" else torch.ones_like(x)
            torch.testing.assert_close(state.second(saved, *values) * outer, second, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("activation", [pytest.param(a, id=a.name) for a in CATALOG.values() if a.learnable])
def test_gradients_of_trained_parameters_are_the_mathematics(activation):
    for params in drawless(activation):
        x, values = apart(activation, params, POINTS[3:-3]), positional(activation, params)
        for parameter in activation.learnable:
            exact = oracle.gradient(activation.name, parameter.name, x, params)
            got = activation.gradients[parameter.name](x, *values)
            torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("activation", SMOOTH_BACKWARD)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_fused_kernel_is_the_derivative(activation, dtype):
    """A state's formula and ATen's kernel are written apart; they must agree, at kinks and NaN too."""
    for params in drawless(activation):
        values = positional(activation, params)
        kinks = [kink for kink in activation.kinks(params) if torch.tensor(kink, dtype=dtype).item() == kink]
        x = torch.cat([grid(activation.kinks(params), dtype, count=101), torch.tensor([*kinks, math.nan]).to(dtype)])
        for key, state in activation.states.items():
            allowed = state.allowed is None or state.allowed(params)
            if state.kernel is None or state.forward is not None or not allowed or activation.learnable:
                continue
            saved = activation.forward(x, *values) if key == "output" else x
            got = state.kernel(torch.ones_like(x), saved, *values).double()
            want = state.derivative(saved.double(), *values)
            eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-8  # celu and hardsigmoid: float32 constants
            torch.testing.assert_close(got, want, rtol=4 * eps, atol=8 * eps, equal_nan=True)


@pytest.mark.parametrize("activation", [pytest.param(a, id=a.name) for a in CATALOG.values() if not a.native])
@pytest.mark.parametrize("dtype", sorted(HALF, key=str), ids=str)
def test_our_own_formulas_are_within_one_ulp_in_half_precision(activation, dtype):
    params = activation.bind({})
    x = grid(activation.kinks(params), dtype)
    values, slopes, _ = reference(activation, x, params)
    got = autograd.apply(activation, x, params)
    checks = [(got, values)]
    if not activation.surrogate:
        leaf = x.clone().requires_grad_()
        checks.append((torch.autograd.grad(autograd.apply(activation, leaf, params).sum(), leaf)[0], slopes))
    for result, want in checks:
        limit = torch.finfo(dtype).max
        inside = want.abs() <= limit
        spacing = ulp(want, dtype).clamp(min=2.0**-120)  # float32's own underflow, which bfloat16 shares
        error = ((result.double() - want).abs() / spacing)[inside]
        assert error.max() <= 1.0, f"{error.max()} ulp at {x[inside][error.argmax()]}"


@pytest.mark.parametrize("activation", EVERY)
def test_range_and_monotonicity_are_as_stated(activation):
    for params in drawless(activation):
        x = torch.linspace(-300, 300, 60001, dtype=torch.float64)
        y = activation.forward(x, *positional(activation, params))
        low, high = activation.low(params), activation.high(params)
        assert y.min() >= low - 1e-9
        assert y.max() <= high + 1e-9
        assert math.isinf(low) or y.min() < low + 2e-2 * max(1, abs(low)), "a tighter lower bound is true"
        assert math.isinf(high) or y.max() > high - 2e-2 * max(1, abs(high)), "a tighter upper bound is true"
    defaults = activation.forward(x, *positional(activation, activation.bind({})))
    assert activation.monotonic == bool((defaults.diff() >= -1e-15).all())


@pytest.mark.parametrize("activation", SMOOTH_BACKWARD)
def test_kinks_are_where_the_derivative_jumps_and_nowhere_else(activation):
    params = activation.bind({})
    for kink in activation.kinks(params):
        sides = reference(activation, torch.tensor([kink - 1e-7, kink + 1e-7], dtype=torch.float64), params)[1]
        assert sides[0] != sides[1]
    x = torch.linspace(-21, 21, 420_001, dtype=torch.float64)
    slopes = reference(activation, x, params)[1]
    jumps = x[1:][(slopes.diff().abs() > 1e-2)]
    assert all(any(abs(jump - kink) < 1e-3 for kink in activation.kinks(params)) for jump in jumps.tolist())


@pytest.mark.parametrize("activation", EVERY)
def test_definitions_are_complete(activation):
    assert activation.formula
    assert activation.source
    assert activation.reference is not None
    assert activation.name.isidentifier()
    assert activation.name == activation.name.lower()
    assert not activation.states or activation.save in activation.states
    assert set(activation.gradients) == {p.name for p in activation.learnable}
    for parameter in activation.parameters:
        assert parameter.default in parameter.domain


def test_names_and_aliases_are_taken_once():
    names = [name for a in CATALOG.values() for name in (a.name, *a.aliases)]
    assert len(names) == len(set(names))


def test_class_names_are_those_of_torch():
    torch_names = {name.lower(): name for name in dir(nn) if isinstance(getattr(nn, name), type)}
    shared = [a for a in CATALOG.values() if a.name.replace("_", "") in torch_names]
    assert len(shared) == 24
    for activation in shared:
        assert activation.class_name == torch_names[activation.name.replace("_", "")]


def test_every_name_of_timm_is_the_same_function():
    create_act = pytest.importorskip("timm.layers.create_act")
    x = torch.linspace(-6, 6, 101)
    names = {name for table in create_act._ACT_LAYERS for name in table}
    assert len(names) >= 19
    for name in sorted(names):
        layer = create_act.get_act_layer(name)()
        activation = registry.get(name)
        assert torch.allclose(activation.forward(x, *activation.defaults.values()), layer(x.clone()), atol=1e-6), name
    for name in {name for table in create_act._ACT_FNS for name in table}:
        function, activation = create_act.get_act_fn(name), registry.get(name)
        assert torch.allclose(activation.forward(x, *activation.defaults.values()), function(x.clone()), atol=1e-6)


def test_every_name_of_transformers_is_the_same_function():
    transformers = pytest.importorskip("transformers.activations")
    x = torch.linspace(-6, 6, 101)
    assert len(transformers.ACT2CLS) >= 24
    for name in transformers.ACT2CLS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = transformers.ACT2FN[name].float()
        activation = registry.get(name)
        if name == "xielu":  # its parameters are made in bfloat16
            params = {p.name: getattr(module, p.name).item() for p in activation.parameters}
        else:
            params = activation.defaults
        assert torch.allclose(activation.forward(x, *params.values()), module(x.clone()), atol=2e-6), name


TARGETS = [(a, text) for a in CATALOG.values() for text in (*a.modules, *a.calls)]


def test_targets_are_signatures_of_things_that_exist():
    assert len(TARGETS) > 200
    for library in ("timm.layers.activations", "timm.layers.activations_me", "timm.models.metaformer",
                    "transformers.activations"):  # fmt: skip
        pytest.importorskip(library)
    for _, text in TARGETS:
        path, _, signature = text.partition("(")
        parsed = ast.parse(f"def _({signature}: ...").body[0].args
        found = importlib.import_module(path.partition(".")[0])
        for part in path.split(".")[1:]:
            found = getattr(found, part)
        assert callable(found), text
        for argument in (*parsed.args, *parsed.kwonlyargs):
            if argument.annotation is not None:
                ast.literal_eval(argument.annotation)
    assert len({text for _, text in TARGETS}) == len(TARGETS), "a target of two activations"


def test_parameters_of_targets_are_parameters_of_the_definition():
    other = {"inplace", "approximate", "generator", "scale", "input_scale", "min", "max", "min_val", "max_val", "alpha"}
    for activation, text in TARGETS:
        parsed = ast.parse(f"def _({text.partition('(')[2]}: ...").body[0].args
        arguments = [*parsed.args, *parsed.kwonlyargs]
        for argument in arguments if text in activation.modules else arguments[1:]:
            fixed = argument.annotation is not None
            assert argument.arg in activation.names or argument.arg == "inplace" or (fixed and argument.arg in other), (
                text
            )


def test_modules_have_the_attributes_that_their_targets_read():
    for activation, text in TARGETS:
        path, _, signature = text.partition("(")
        if not path.startswith("torch.nn.") or text not in activation.modules:
            continue
        extra = {"Threshold": (0.1, 20.0)}.get(path.rpartition(".")[2], ())
        module = getattr(nn, path.rpartition(".")[2])(*extra)
        for argument in ast.parse(f"def _({signature}: ...").body[0].args.args:
            assert hasattr(module, argument.arg), text


def test_bind_refuses_what_the_definition_does_not_have():
    softplus = CATALOG["softplus"]
    with pytest.raises(
        ParameterError, match=r"softplus has no parameter 'alpha'\n.*alpha=1\n.*beta=1.0, threshold=20.0"
    ):
        softplus.bind({"alpha": 1})
    for bad in (0, -1.0, math.nan, "high", None):
        with pytest.raises(ParameterError, match=r"softplus: beta must be > 0\n.*given: beta="):
            softplus.bind({"beta": bad})
    with pytest.raises(ParameterError, match=r"min_val must not be greater than max_val\n.*min_val=2, max_val=1"):
        CATALOG["hardtanh"].bind({"min_val": 2, "max_val": 1})
    with pytest.raises(ParameterError, match="any number but 0"):
        CATALOG["celu"].bind({"alpha": 0})
    assert softplus.bind({"beta": torch.tensor([2.0])}) == {"beta": 2.0, "threshold": 20.0}
    assert list(softplus.bind({"threshold": 3})) == ["beta", "threshold"]


def test_domain_words():
    assert repr(Domain(0.0)) == ">= 0"
    assert repr(Domain(high=0.0)) == "<= 0"
    assert repr(Domain()) == "any number"
    assert repr(Domain(0.0, 1.0, open=True)) == "0 < value < 1"
    assert 0.5 in Domain(0.0, 1.0)
    assert 1.0 in Domain(0.0, 1.0)
    assert 1.0 not in Domain(0.0, 1.0, open=True)
    assert math.inf not in Domain(0.0, open=True)
    assert True in Domain()


def test_own_keeps_the_dtype_and_refuses_integers():
    formula = own(lambda x, scale: x * scale)
    assert formula(torch.ones(2, dtype=torch.float16), scale=torch.ones(2)).dtype == torch.float16
    assert formula(torch.ones(2), torch.ones(2, dtype=torch.float64)).dtype == torch.float32
    with pytest.raises(NotImplementedError, match="int64"):
        formula(torch.ones(2, dtype=torch.int64), 2.0)
