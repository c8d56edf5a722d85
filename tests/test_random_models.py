"""Random models against the oracle: forward and gradients, before, during and after a swap."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from interception import Answering, outputs_and_gradients
from programs import imported, programs

import actswap

EXAMPLES = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
pytestmark = pytest.mark.filterwarnings("ignore::actswap.RoleWarning")


def check(text, folder):
    model = imported(text, folder).Model().double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        x = torch.randn(4, 5, dtype=torch.float64)
    before = {mode: outputs_and_gradients(model, x, mode) for mode in (True, False)}
    wanted = {}
    for mode in (True, False):
        with Answering(F.softplus):
            wanted[mode] = outputs_and_gradients(model, x, mode)
    classes = {path: type(module) for path, module in model.named_modules()}
    sites = actswap.find(model, "relu")
    if not len(sites):
        for mode in (True, False):
            assert all(torch.equal(a, b) for a, b in zip(before[mode], wanted[mode], strict=True)), text
        return
    if refused := [site for site in sites if site.blocked]:
        with pytest.raises(actswap.BlockedSiteError, match="is passed on as a value"):
            actswap.replace(model, "relu", "softplus", where="*", example_inputs=x)
        assert all("map(F.relu" in text and "passed on as a value" in site.blocked for site in refused)
        return
    actswap.replace(model, "relu", "softplus", where="*", example_inputs=x)
    for mode in (True, False):
        for got, expected in zip(outputs_and_gradients(model, x, mode), wanted[mode], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"{m}\n{text}")
    actswap.restore(model)
    assert {path: type(module) for path, module in model.named_modules()} == classes
    for mode in (True, False):
        again = outputs_and_gradients(model, x, mode)
        assert all(torch.equal(a, b) for a, b in zip(before[mode], again, strict=True)), text


@settings(max_examples=100, **EXAMPLES)
@given(text=programs())
def test_a_hundred_random_models(text, tmp_path_factory):
    check(text, tmp_path_factory.mktemp("programs"))


@pytest.mark.slow
@settings(max_examples=2000, **EXAMPLES)
@given(text=programs())
def test_two_thousand_random_models(text, tmp_path_factory):
    check(text, tmp_path_factory.mktemp("programs"))
