"""Life after a swap: what people do with models goes on working, and the swap can still be undone."""

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("new", ["softplus", "prelu"])
@pytest.mark.parametrize("training", [False, True])
def test_equal_blocks_compile_once(new, training):
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
        with torch.set_grad_enabled(training):
            x = example()
            for block in model.train(training):
                x = block(x).detach().requires_grad_(training)
        return counter.frame_count

    import torch._dynamo.testing

    before = compilations(nn.Sequential(*(Block() for _ in range(12))))
    after = compilations(actswap.replace(nn.Sequential(*(Block() for _ in range(12))), "relu", new))
    assert 1 <= after <= before


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
    with pytest.warns(actswap.WeightsWarning, match="weights trained with relu"):
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


# --- and back ------------------------------------------------------------------------------------


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(example()).square().sum().backward()
    optimizer.step()
    return model


def state_loaded(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), strict=True, assign=True)
    return model


def compiled(model):
    torch.compiler.reset()
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    call(example().requires_grad_()).sum().backward()
    return call


def exported(model):
    torch.export.export(model, (example(),))
    return model


def traced(model):
    torch.jit.trace(model, (example(),), check_trace=False)
    return model


def transformed(model):
    parameters = dict(model.named_parameters())
    torch.vmap(torch.func.functional_call, (None, None, 0))(model, parameters, (example()[:, None],))
    return model


def replicated(model):
    model._replicate_for_data_parallel()
    return nn.DataParallel(model)


def autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        model(example()).float().sum().backward()
    return model


def cast(model):
    model.double()(example().double())
    return model.float()


def on_meta(model):
    state = copy.deepcopy(model.state_dict())
    assert model.to("meta")(example().to("meta")).is_meta
    model.to_empty(device="cpu").load_state_dict(state)
    return model


def averaged(model):
    ema = timm.utils.ModelEmaV3(model, decay=0.0)
    ema.update(model)
    return ema.module


def evaluated(model):
    model.eval()
    with torch.inference_mode():
        model(example())
    return model.train()


LONG = pytest.param(compiled, marks=pytest.mark.slow)
EVENTS = [copy.deepcopy, pickled, saved, trained, state_loaded, LONG, exported, traced, transformed, replicated,
          autocast, cast, on_meta, averaged, evaluated]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
# a Sequential with a forward of its own, and a list in an attribute, have no place for parameters
@pytest.mark.parametrize(
    ("cls", "new"),
    [
        *((cls, "softplus") for cls in SOME),
        *((cls, "prelu") for cls in SOME if cls not in (Head, ListOfModules)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_restored_after(cls, new, event):
    check_restored_after(cls, new, event)


@pytest.mark.parametrize("new", ["softplus", "prelu"])
def test_restored_after_compiling(new):
    check_restored_after(Functional, new, compiled)


def check_restored_after(cls, new, event):
    model = event(actswap.replace(cls(), "relu", new))
    inner = getattr(model, "_orig_mod", getattr(model, "module", model))
    state = {name: value for name, value in inner.state_dict().items() if name in cls().state_dict()}
    fresh = cls()
    fresh.load_state_dict(state)
    assert len(actswap.history(model)) == 1
    after = actswap.replace(copy.deepcopy(fresh), "relu", new)
    after.load_state_dict(inner.state_dict())
    torch.testing.assert_close(model(example()), after(example()))
    assert actswap.restore(model) is model
    assert type(inner) is cls and not actswap.history(model)
    assert list(inner.state_dict()) == list(fresh.state_dict())
    assert {path: type(m) for path, m in inner.named_modules()} == {path: type(m) for path, m in fresh.named_modules()}
    torch.testing.assert_close(model(example()), fresh(example()), rtol=0, atol=0)


LOADER = """
import sys, pickle, torch, actswap
for path in sys.argv[1:]:
    model = torch.load(path, weights_only=False)
    x, y, name = torch.load(path + ".expected")
    assert torch.equal(model(x), y), name
    assert [swap.new for swap in actswap.history(model)] == ["softplus"], name
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).sum().backward()
    assert type(pickle.loads(pickle.dumps(model))) is type(model), name
    actswap.restore(model)
    assert type(model).__module__ in ("models", "forms") and "__actswap__" not in vars(type(model)), name
"""


def test_whole_models_load_in_another_process(tmp_path):
    paths = []
    for cls in SOME:
        model, x = swapped(cls), example()
        paths.append(str(tmp_path / f"{cls.__name__}.pt"))
        torch.save(model, paths[-1])
        torch.save((x, model(x.clone()).detach(), cls.__name__), paths[-1] + ".expected")
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *paths], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("cls", [Functional, pytest.param(Chain, marks=pytest.mark.slow)], ids=lambda cls: cls.__name__)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnx_of_a_swapped_model(cls, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"ONNX export needs {package}")
    import onnxruntime

    model, x = swapped(cls).eval(), example()
    torch.onnx.export(model, (x,), dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(x), rtol=1e-5, atol=1e-5)
    actswap.restore(model)
    assert type(model) is cls


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "convnext_atto", pytest.param("mobilenetv3_small_050", marks=pytest.mark.slow)]
)
def test_timm_methods_in_other_families(name):
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    options = {"img_size": 64} if name.startswith("vit") else {}
    model, x = timm.create_model(name, **options).eval(), torch.randn(1, 3, 64, 64)
    (old, *_) = sorted({site.activation.name for site in actswap.find(model) if site.blocked is None})
    nodes = get_graph_node_names(model, suppress_diff_warning=True)[1]
    actswap.replace(model, old, "mish", example_inputs=x)
    features = model.forward_features(x)
    expected = model(x)
    assert torch.equal(model.forward_head(features), expected)
    final, intermediates = model.forward_intermediates(x)
    assert torch.equal(final, features) and intermediates
    assert get_graph_node_names(model, suppress_diff_warning=True)[1][-1] == nodes[-1]
    torch.testing.assert_close(create_feature_extractor(model, [nodes[-1]])(x)[nodes[-1]], expected)
    model.set_grad_checkpointing()
    model.train()
    model(x.repeat(2, 1, 1, 1)).sum().backward()
    model.reset_classifier(7)
    assert model(x.repeat(2, 1, 1, 1)).shape == (2, 7)
    actswap.restore(model)
    assert not actswap.find(model, "mish") and actswap.find(model, old)


def test_the_graph_shows_our_functions_by_name():
    out = swapped(Functional)(example())
    assert out.grad_fn.next_functions[1][0].name() == "SoftplusBackward"
