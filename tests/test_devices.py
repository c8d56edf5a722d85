"""Device placement: new state goes where the site's input is. FakeTensorMode offers CUDA devices on any build."""

import pytest
import torch
from models import Functional, Plain, Split
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import actswap

pytestmark = pytest.mark.filterwarnings("ignore::actswap.RoleWarning")
DEVICES = ["cpu", "cuda:0", "cuda:1"]


@pytest.fixture
def fake():
    with FakeTensorMode() as mode:
        yield mode


def test_learnable_targets_stand_where_their_inputs_are(fake):
    model = Split(DEVICES)
    x = torch.randn(4, 6)
    assert model(x).device == torch.device("cuda:1")
    actswap.replace(model, "relu", "prelu", where="acts.*", example_inputs=x)
    assert [str(act.weight.device) for act in model.acts] == DEVICES
    assert model(x).device == torch.device("cuda:1")
    actswap.restore(model)
    assert all(type(act) is nn.ReLU for act in model.acts)


def test_plain_targets_have_no_place_to_be_wrong(fake):
    model, x = Split(DEVICES), torch.randn(4, 6)
    actswap.replace(model, "relu", "softplus", example_inputs=x)
    report = actswap.history(model)[-1].report
    assert report["surgery, op stream"].outcome == "pass" and report["surgery, op stream"].data["sites"] == 4
    assert model(x).device == torch.device("cuda:1")
    sites = actswap.find(model, "softplus", where="acts.*", example_inputs=x)
    assert [str(site.device) for site in sites] == DEVICES


def test_without_inputs_the_layer_that_feeds_the_site_decides(fake):
    model = nn.Sequential(
        nn.Linear(6, 6, device="cuda:0"), nn.ReLU(), nn.Linear(6, 6, device="cuda:1"), nn.Dropout(), nn.ReLU()
    )
    actswap.replace(model, "relu", "swish_beta")
    assert str(model[1].beta.device) == "cuda:0" and str(model[4].beta.device) == "cuda:1"


def test_an_ambiguous_place_is_refused(fake):
    model = Split(DEVICES)
    with pytest.raises(actswap.BlockedSiteError, match=r"ambiguous(.|\n)*example_inputs"):
        actswap.replace(model, "relu", "prelu", where="relu")
    with pytest.raises(actswap.BlockedSiteError, match=r"ambiguous(.|\n)*example_inputs"):
        actswap.replace(model, "relu", "prelu", where="acts.*")


def test_an_instance_shared_across_devices(fake):
    shared = nn.ReLU()
    layers = [nn.Linear(6, 6, device="cuda:0"), shared, nn.Linear(6, 6, device="cuda:1"), shared]
    model = nn.Sequential(*layers)
    assert model[1] is model[3]
    with pytest.raises(actswap.BlockedSiteError, match=r"several devices(.|\n)*share=False"):
        actswap.replace(model, "relu", "prelu")
    assert model[1] is shared
    actswap.replace(model, "relu", "prelu", share=False)
    assert str(model[1].weight.device) == "cuda:0" and str(model[3].weight.device) == "cuda:1"
    actswap.restore(model)
    actswap.replace(model, "relu", "softplus")
    assert model[1] is model[3] and model[1] is not shared


def test_dtype_follows_the_layer():
    model = Plain().to(torch.bfloat16)
    actswap.replace(model, "relu", "prelu")
    assert model.relu.weight.dtype == torch.bfloat16
    model = Plain().double()
    actswap.replace(model, "relu", "snake", example_inputs=torch.ones(1, 6, dtype=torch.float64))
    assert model.relu.alpha.dtype == torch.float64


@pytest.mark.parametrize("cls", [Plain, Functional])
def test_meta_models_stay_on_meta(cls):
    with torch.device("meta"):
        model = cls()
    x = torch.empty(4, 6, device="meta")
    actswap.replace(model, "relu", "prelu", example_inputs=x)
    assert all(p.is_meta for p in model.parameters())
    assert [p.device.type for p in actswap.parameters(model)] == ["meta"] * len(actswap.find(model, "prelu"))
    assert model(x).is_meta
    assert actswap.history(model)[-1].report["surgery, op stream"].outcome == "pass"
    actswap.restore(model)
    model.to_empty(device="cpu")
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_real_gpu():
    model, x = Split(["cpu", "cuda", "cuda"]), torch.randn(4, 6)
    actswap.replace(model, "relu", "prelu", where="acts.*", example_inputs=x)
    assert [act.weight.device.type for act in model.acts] == ["cpu", "cuda", "cuda"]
    actswap.restore(model)
    actswap.replace(model, "relu", "relu", example_inputs=x)
    assert "bit for bit" in actswap.history(model)[-1].report["result (train)"].detail
