"""Life after a swap: what people do with models goes on working, and the swap can still be undone."""

import copy
import io

import pytest
import timm
import torch
import torch.nn.functional as F
from forms import ByName, ByTable, ListOfModules, OptionalAct
from models import Aliased, Chain, DeepHelped, Functional, Head, Plain, Spellings, Stored, example
from torch import nn

import actswap

pytestmark = pytest.mark.filterwarnings("ignore::actswap.RoleWarning")
SOME = [ListOfModules, ByName, ByTable, OptionalAct, Plain, Functional, Head, Spellings, Stored, Chain, Aliased]
some = pytest.mark.parametrize("cls", SOME, ids=lambda cls: cls.__name__)


def swapped(cls):
    return actswap.replace(cls(), "relu", "softplus")


@some
def test_compiled_in_one_graph(cls):
    torch._dynamo.reset()
    model, x = swapped(cls), example().requires_grad_()
    expected = model(x)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(x)
    (compiled_grad,) = torch.autograd.grad(got.sum(), x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(compiled_grad, grad)
    actswap.restore(compiled)
    assert type(model) is cls
    torch.testing.assert_close(compiled(x), model(x))


def test_equal_blocks_compile_once():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return F.relu(self.linear(x))

    def compilations(model):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        for block in model:
            block.compile(backend=counter, fullgraph=True)
        with torch.no_grad():
            model(example())
        return counter.frame_count

    import torch._dynamo.testing

    before = compilations(nn.Sequential(*(Block() for _ in range(12))))
    after = compilations(actswap.replace(nn.Sequential(*(Block() for _ in range(12))), "relu", "softplus"))
    assert after <= before


@some
def test_exported(cls):
    model, x = swapped(cls).eval(), example()
    expected = model(x.clone())
    exported = torch.export.export(model, (x.clone(),)).module()
    assert torch.equal(exported(x.clone()), expected)


@some
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_traced_saved_and_loaded(cls):
    model, x = swapped(cls).eval(), example()
    traced = torch.jit.trace(model, (x.clone(),))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(x.clone()), model(x.clone()))


@some
def test_functional_call_and_vmap(cls):
    model, x = swapped(cls), example()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row[None],)).square().sum()

    per_sample = torch.vmap(torch.func.grad(loss), (None, 0), randomness="different")(parameters, x)
    rows = [torch.func.grad(loss)(parameters, row) for row in x]
    for name, grads in per_sample.items():
        torch.testing.assert_close(grads, torch.stack([row[name] for row in rows]))


@some
def test_state_dicts_load_both_ways(cls):
    plain, model = cls(), swapped(cls)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())


@some
def test_replicas_of_data_parallel(cls):
    model, x = swapped(cls), example()
    replica = model._replicate_for_data_parallel()
    assert type(replica) is type(model)
    for name, child in model._modules.items():
        replica._modules[name] = child
    replica._parameters = dict(model._parameters)
    torch.testing.assert_close(replica(x.clone()), model(x.clone()))
    wrapped = actswap.replace(nn.DataParallel(cls()), "relu", "softplus")
    assert all(site.path.startswith("module.") for site in actswap.find(wrapped, "softplus"))


def test_dtype_and_mode_moves_between_swaps():
    model, x = Functional(), example()
    actswap.replace(model, "relu", "prelu", where="relu")
    model.double()
    actswap.replace(model, ["relu", "prelu"], "silu")
    model.eval()
    actswap.restore(model, last=True)
    assert model.relu.weight.dtype == torch.float64
    assert not model.relu.training
    assert model(x.double()).dtype == torch.float64
    actswap.restore(model)
    assert type(model) is Functional


def test_averaged_copies_follow():
    model = swapped(Functional)
    ema = timm.utils.ModelEmaV3(model, decay=0.5)
    with torch.no_grad():
        model.first.weight.add_(1)
    ema.update(model)
    assert type(ema.module) is type(model)
    assert isinstance(ema.module.relu, actswap.nn.Softplus)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    torch.testing.assert_close(averaged(example()), model(example()))


def test_timm_methods_and_feature_extraction():
    from torchvision.models.feature_extraction import create_feature_extractor

    model = timm.create_model("resnet10t").eval()
    x = torch.randn(1, 3, 64, 64)
    actswap.replace(model, "relu", "softplus", example_inputs=x)
    features = model.forward_features(x)
    assert torch.equal(model.forward_head(features), model(x))
    assert torch.equal(model.forward_intermediates(x, intermediates_only=True)[-1], features)
    extractor = create_feature_extractor(model, ["layer4"])
    torch.testing.assert_close(extractor(x)["layer4"], features)
    expected = model(x)
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(x), expected)
    model.reset_classifier(5)
    assert model(x).shape == (1, 5)
    actswap.restore(model)
    assert not actswap.find(model, "softplus")


def test_checkpointed_helpers_compute_the_new_activation_again():
    model, x = DeepHelped(), example().requires_grad_()
    actswap.replace(model, "relu", "softplus", example_inputs=x.detach())
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(6))
    (checkpointed,) = torch.autograd.grad(model(x).sum(), x)
    twin = copy.deepcopy(model)
    y = twin.first(x)
    for _ in range(2):
        y = F.softplus(y - 0.1)
    y = F.softplus(twin.second(F.softplus(y)))
    (direct,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(checkpointed, direct)


def test_autocast_and_inference_mode():
    model, x = swapped(Functional), example()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    with torch.inference_mode():
        assert torch.equal(model(x), model(x))


def test_the_graph_shows_our_functions_by_name():
    out = swapped(Functional)(example())
    assert out.grad_fn.next_functions[1][0].name() == "SoftplusBackward"
