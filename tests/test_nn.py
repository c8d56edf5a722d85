"""The modules and functions made from the definitions."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import actswap.nn
from actswap import functional
from actswap.catalog import CATALOG
from actswap.errors import ParameterError

EVERY = [pytest.param(a, id=a.name) for a in CATALOG.values()]


def made(activation, **options):
    return getattr(actswap.nn, activation.class_name)(**options)


@pytest.mark.parametrize("activation", EVERY)
def test_signatures_are_the_definitions(activation):
    function = getattr(functional, activation.name)
    parameters = inspect.signature(function).parameters
    assert list(parameters) == ["x", *activation.names, "inplace", "save"]
    assert {name: parameters[name].default for name in activation.names} == activation.defaults
    assert parameters["save"].kind is inspect.Parameter.KEYWORD_ONLY
    taken = [p.name for p in activation.parameters if not p.mode]
    extra = (["num_parameters"], ["device", "dtype"]) if activation.learnable else ([], [])
    module = getattr(actswap.nn, activation.class_name)
    assert list(inspect.signature(module).parameters) == [*taken, *extra[0], "inplace", "save", *extra[1]]
    assert module is actswap.nn.module_class(activation) is actswap.nn.module_class(activation.name)
    assert function is functional.function(activation)
    for made_object in (function, module):
        assert made_object.__module__ == ("actswap.nn" if made_object is module else "actswap.functional")
        assert all(
            word in made_object.__doc__ for word in ("Args:", "Saved for backward:", "Raises:", activation.formula)
        )
    assert activation.class_name in actswap.nn.__all__
    assert activation.name in functional.__all__


@pytest.mark.parametrize("activation", EVERY)
def test_modules_and_functions_agree(activation):
    x = torch.randn(2, 3, 4)
    module = made(activation).eval()
    assert torch.equal(module(x), getattr(functional, activation.name)(x))
    assert list(module.params) == list(activation.names)


@pytest.mark.parametrize(
    "activation", [pytest.param(a, id=a.name) for a in CATALOG.values() if hasattr(nn, a.class_name)]
)
def test_modules_are_torchs_modules(activation):
    """Same output in both modes, same state dict, and the same constants."""
    extra = {"threshold": (0.1, 20.0)}.get(activation.name, ())
    theirs = getattr(nn, activation.class_name)(*extra)
    ours = getattr(actswap.nn, activation.class_name)(*extra)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 4)
    for mode in (True, False):
        torch.manual_seed(0)
        want = theirs.train(mode)(x)
        torch.manual_seed(0)
        assert torch.equal(ours.train(mode)(x), want)


@pytest.mark.parametrize("activation", EVERY)
def test_copies_pickles_and_saves(activation):
    module = made(activation, inplace=True)
    module.eval()
    module.register_forward_hook(_hook)
    x = torch.randn(2, 3)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(module),
        copy.copy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ]
    for again in copies:
        assert type(again) is type(module)
        assert again.training is False
        assert again.inplace is True
        assert repr(again) == repr(module)
        assert torch.equal(again(x.clone()), module(x.clone()))
    loaded = made(activation)
    loaded.load_state_dict(module.state_dict())


def _hook(module, inputs, output):
    return output


def test_repr():
    assert repr(actswap.nn.ReLU()) == "ReLU()"
    assert repr(actswap.nn.ReLU(inplace=True)) == "ReLU(inplace=True)"
    assert repr(actswap.nn.Softplus(2.0, save="output")) == "Softplus(beta=2.0, threshold=20.0, save='output')"
    assert repr(actswap.nn.PReLU(num_parameters=3)) == "PReLU(num_parameters=3)"
    assert repr(actswap.nn.RReLU(0.1, 0.2)) == "RReLU(lower=0.1, upper=0.2)"
    assert repr(actswap.nn.XIELU()) == "XIELU(num_parameters=1, beta=0.5, eps=-1e-06)"


def test_bad_parameters_are_refused_at_construction():
    with pytest.raises(ParameterError, match="beta must be > 0"):
        actswap.nn.Softplus(beta=0.0)
    with pytest.raises(ParameterError, match="cannot save this state"):
        actswap.nn.GELU(save="output")
    with pytest.raises(ParameterError, match="needs threshold >= 17"):
        actswap.nn.Softplus(threshold=3.0, save="output")
    with pytest.raises(ParameterError, match="min_val must not be greater"):
        actswap.nn.Hardtanh(1.0, 0.0)
    with pytest.raises(ParameterError, match="one value, or one per channel"):
        actswap.nn.PReLU(torch.ones(2, 2))
    with pytest.raises(TypeError):
        actswap.nn.Softplus(slope=1.0)
    with pytest.raises(ParameterError, match="beta must be > 0"):
        functional.softplus(torch.ones(1), beta=-1.0)
    assert actswap.nn.RReLU(save="noise").eval()(torch.ones(1)).item() == 1.0


@pytest.mark.parametrize("activation", [pytest.param(a, id=a.name) for a in CATALOG.values() if a.learnable])
def test_trained_parameters(activation):
    module = made(activation, num_parameters=5, dtype=torch.float64)
    for parameter in activation.learnable:
        value = getattr(module, parameter.name)
        assert isinstance(value, nn.Parameter)
        assert value.shape == (5,)
        assert value.dtype == torch.float64
        assert (value == parameter.default).all()
    assert set(dict(module.named_parameters())) == {p.name for p in activation.learnable}
    assert made(activation, device="meta").to_empty(device="cpu")
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    module(x).square().sum().backward()
    assert all(p.grad.shape == (5,) for p in module.parameters())


def test_given_parameters_are_kept_or_copied():
    weight = nn.Parameter(torch.tensor([0.1, 0.2]))
    assert actswap.nn.PReLU(weight).weight is weight
    values = torch.tensor([0.1, 0.2])
    module = actswap.nn.PReLU(values)
    values.zero_()
    assert module.weight.tolist() == pytest.approx([0.1, 0.2])


def test_the_mode_follows_the_module():
    module = actswap.nn.RReLU()
    x = torch.full((64,), -1.0)
    assert len(module(x).unique()) > 1
    assert len(module.eval()(x).unique()) == 1


def test_changing_an_attribute_changes_the_function():
    module = actswap.nn.Softplus()
    module.beta = 2.0
    assert torch.equal(module(torch.ones(1)), nn.functional.softplus(torch.ones(1), 2.0))
