"""replace, restore, swapped, history, diff, on small awkward models, against an independent oracle."""

import copy
import functools
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from interception import Answering, outputs_and_gradients
from models import MODELS, Aliased, Clamp, Custom, Functional, Head, Helped, MyReLU, Plain, Stored, example, helper
from snapshots import assert_same, equal, snapshot
from torch import nn

import actswap
from actswap import edits

# Many of these tiny models end in an activation, where another range is worth a warning; two tests look at those.
pytestmark = pytest.mark.filterwarnings("ignore::actswap.RoleWarning")
each_model = pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)


@each_model
def test_find_lists_every_use_and_changes_nothing(cls):
    model = cls()
    before = snapshot(model)
    sites = actswap.find(model, "relu", example_inputs=example())
    assert tuple(s.path for s in sites if not s.idiom or s.role == "hidden") == cls.SITES
    str(sites)
    assert_same(before, snapshot(model))


@each_model
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_swapped_model_equals_the_oracle(cls, training):
    model, x = cls(), example()
    with Answering(F.softplus) as oracle:
        expected = outputs_and_gradients(model, x, training)
    assert oracle.count
    swapped = actswap.replace(copy.deepcopy(model), "relu", "softplus", save="input", example_inputs=x)
    assert equal(expected, outputs_and_gradients(swapped, x, training))
    again = actswap.replace(copy.deepcopy(model), "relu", "softplus")
    for a, b in zip(expected, outputs_and_gradients(again, x, training), strict=True):
        torch.testing.assert_close(a, b)


@each_model
def test_the_same_activation_gives_the_same_bits(cls):
    model, x = cls(), example()
    expected = [outputs_and_gradients(model, x, training) for training in (True, False)]
    where = None if cls is not Clamp else "nothing"
    if where is None:
        actswap.replace(model, "relu", "relu", example_inputs=x)
        assert all(equal(e, outputs_and_gradients(model, x, t)) for e, t in zip(expected, (True, False), strict=True))
        assert actswap.history(model)[-1].report["result (train)"].detail.startswith("the same function")


@each_model
def test_restore_brings_back_the_original_objects(cls):
    model, x = cls(), example()
    before, expected = snapshot(model), outputs_and_gradients(model, x, True)
    before = snapshot(model)
    actswap.replace(model, "relu", "softplus")
    assert type(model).__name__ == cls.__name__ and isinstance(model, cls)
    assert list(model.state_dict()) == list(cls().state_dict())
    assert not [s for s in actswap.find(model, "relu") if not s.idiom]
    actswap.replace(model, "softplus", "silu")
    assert [swap.number for swap in actswap.history(model)] == [1, 2]
    actswap.restore(model, last=True)
    assert {s.activation.name for s in actswap.find(model, "softplus")} == {"softplus"}
    actswap.restore(model)
    assert type(model) is cls and actswap.history(model) == []
    assert_same(before, snapshot(model))
    assert equal(expected, outputs_and_gradients(model, x, True))


@each_model
def test_an_error_at_any_edit_leaves_the_model_as_it_was(cls, monkeypatch):
    model = cls()
    before = snapshot(model)
    count = len(edits.edits_of(actswap.replace(copy.deepcopy(model), "relu", "softplus")))
    assert count
    put = {kind: kind._put for kind in (edits.Entry, edits.Rewrite, edits.NodeEdit)}
    for fail_at in range(count):
        done = iter(range(count))

        def failing(self, put, done=done, fail_at=fail_at):
            if next(done) == fail_at:
                raise RuntimeError("injected")
            put(self)

        for kind, original in put.items():
            monkeypatch.setattr(kind, "_put", functools.partialmethod(failing, original))
        with pytest.raises(RuntimeError, match="injected"):
            actswap.replace(model, "relu", "softplus")
        assert_same(before, snapshot(model))
        assert type(model) is cls
    monkeypatch.undo()
    actswap.replace(model, "relu", "softplus")


@each_model
def test_copies_and_pickles_keep_the_swap(cls):
    model, x = actswap.replace(cls(), "relu", "softplus"), example()
    expected = outputs_and_gradients(model, x, True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(expected, outputs_and_gradients(twin, x, True))
        assert not {id(m) for m in twin.modules()} & {id(m) for m in model.modules()}
        assert len(actswap.history(twin)) == 1
        actswap.restore(twin)
        assert type(twin) is cls and not actswap.find(twin, "softplus")
        assert len(actswap.find(twin, "relu")) == len(actswap.find(cls(), "relu"))
    assert equal(expected, outputs_and_gradients(model, x, True))


def test_a_second_instance_of_the_class_is_untouched():
    one, two = Functional(), Functional()
    actswap.replace(one, "relu", "softplus")
    assert type(two) is Functional and not actswap.find(two, "softplus")
    three = actswap.replace(Functional(), "relu", "silu")
    assert type(three) is type(one)


def test_where_and_exclude():
    def model():
        return nn.Sequential(Plain(), Plain(), Functional())

    assert [s.path for s in actswap.find(model(), where="0.*")] == ["0.relu"]
    assert [s.path for s in actswap.find(model(), where=["1.*", re.compile(r"^2\.relu$")])] == ["1.relu", "2.relu"]
    assert [s.path for s in actswap.find(model(), where=lambda s: s.kind == "call")] == ["2.relu", "2.relu_1"]
    swapped = actswap.replace(model(), "relu", "silu", where="*relu", exclude="0*")
    assert [s.path for s in actswap.find(swapped, "silu")] == ["1.relu", "2.relu"]
    assert [s.path for s in actswap.history(swapped)[0].skipped] == ["0.relu", "2.relu_1"]


def test_sharing():
    model = actswap.replace(Aliased(), "relu", "softplus")
    assert model.act1 is model.act2
    model = actswap.replace(Aliased(), "relu", "softplus", share=False)
    assert model.act1 is not model.act2
    model = actswap.replace(Aliased(), "relu", "softplus", where="act2")
    assert type(model.act1) is nn.ReLU and isinstance(model.act2, actswap.nn.Softplus)


def test_every_form_of_new():
    x = example()

    class Legacy(torch.autograd.Function):
        def forward(self, x):
            self.save_for_backward(x)
            return x * 2

        def backward(self, g):
            return g * 2

    forms = {
        "swish": F.silu,
        nn.SiLU: F.silu,
        nn.LeakyReLU(0.3): lambda x: F.leaky_relu(x, 0.3),
        MyReLU: F.relu,
        Legacy: lambda x: x * 2,
        (lambda: nn.Tanh()): torch.tanh,
        F.mish: F.mish,
        actswap.nn.Softplus: F.softplus,
        actswap.per_site(lambda site: nn.ELU()): F.elu,
    }
    for new, function in forms.items():
        for cls in (Plain, Functional):
            model = cls()
            with Answering(function):
                expected = outputs_and_gradients(model, x, True)
            actswap.replace(model, "relu", new, example_inputs=x)
            for a, b in zip(expected, outputs_and_gradients(model, x, True), strict=True):
                torch.testing.assert_close(a, b)


def test_every_form_of_old():
    assert [s.path for s in actswap.find(Plain(), nn.ReLU)] == ["relu"]
    assert [s.path for s in actswap.find(Functional(), F.relu)] == ["relu", "relu_1"]
    assert not actswap.find(Functional(), nn.ReLU) and not actswap.find(Functional(), torch.relu)
    assert [s.activation.name for s in actswap.find(Custom(), MyReLU)] == ["MyReLU"]
    model = actswap.replace(Custom(), MyReLU, "softplus", example_inputs=example())
    assert isinstance(model.MyReLU, actswap.nn.Softplus)
    gelus = nn.Sequential(nn.GELU(), nn.GELU(approximate="tanh"), nn.Hardtanh(0, 6), nn.ReLU6())
    assert [s.path for s in actswap.find(gelus, "gelu*")] == ["0", "1"]
    assert [s.activation.name for s in actswap.find(gelus)] == ["gelu", "gelu_tanh", "relu6", "relu6"]
    assert [s.path for s in actswap.find(Stored(), ["relu", "leaky_relu"])] == ["act", "leaky"]
    assert actswap.find(Stored(), "leaky_relu")[0].params == {"negative_slope": 0.2}


def test_an_entry_of_old_without_a_match_warns():
    with pytest.warns(actswap.NoSiteWarning, match="gelu"):
        actswap.replace(Plain(), ["relu", "gelu"], "silu")


def test_the_root_itself():
    model = nn.ReLU()
    x = example()
    assert actswap.replace(model, "relu", "softplus", example_inputs=x) is model
    assert torch.equal(model(x), F.softplus(x)) and isinstance(model, nn.ReLU)
    actswap.restore(model)
    assert type(model) is nn.ReLU and torch.equal(model(x), F.relu(x))


def test_swapped_restores_also_after_an_error():
    model = Head()
    seen = []

    def use():
        with actswap.swapped(model, "relu", "guided_relu") as guided:
            seen.append(guided is model and type(model) is not Head)
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert seen == [True]
    assert type(model) is Head and not actswap.history(model)


def test_copy_leaves_the_model_alone():
    model = Plain()
    twin = actswap.replace(model, "relu", "silu", copy=True)
    assert type(model.relu) is nn.ReLU and isinstance(twin.relu, actswap.nn.SiLU)


def test_diff_reads_like_a_patch():
    text = actswap.diff(actswap.replace(Functional(), "relu", "softplus"))
    assert "-        return self.second(F.relu(self.first(F.relu(x))))\n" in text
    assert "+        return self.second(self.relu(self.first(self.relu_1(x))))\n" in text
    assert text.count("\n@@") == 1


def test_hooks_move_and_their_handles_go_on_working():
    model, seen = Plain(), []
    handle = model.relu.register_forward_hook(lambda m, a, o: seen.append(type(m).__name__))
    old = model.relu
    actswap.replace(model, "relu", "softplus")
    model(example())
    handle.remove()
    model(example())
    assert seen == ["Softplus"]
    assert not model.relu._forward_hooks and model.relu._forward_hooks is old._forward_hooks


def test_restore_refuses_a_model_changed_by_hand():
    model = Plain()
    actswap.replace(model, "relu", "softplus")
    mine = model.relu = nn.Tanh()
    with pytest.raises(actswap.RestoreError, match=r"relu is a Tanh, and was a Softplus"):
        actswap.restore(model)
    assert model.relu is mine and len(actswap.history(model)) == 1


def test_restored_modules_follow_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.PReLU(), nn.RReLU())
    weight = model[1].weight
    actswap.replace(model, ["prelu", "rrelu"], "softplus")
    model.double().eval()
    actswap.restore(model)
    assert model[1].weight is weight and weight.dtype == torch.float64
    assert not model[1].training and not model[2].training


def test_learnable_targets():
    model = Plain()
    actswap.replace(model, "relu", "prelu", num_parameters=6)
    (weight,) = actswap.parameters(model)
    assert weight is model.relu.weight and weight.shape == (6,)
    assert set(model.state_dict()) - set(Plain().state_dict()) == {"relu.weight"}
    model(example()).sum().backward()
    assert weight.grad is not None
    model = nn.Sequential(nn.Linear(6, 6), nn.PReLU(6))
    old = model[1].weight
    actswap.replace(model, "prelu", "prelu", example_inputs=example())
    assert model[1].weight is old and list(actswap.parameters(model)) == []


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (actswap.UnknownActivationError, "did you mean 'softplus'", lambda m: actswap.replace(m, "relu", "softpluss")),
        (actswap.UnknownActivationError, "did you mean 'relu", lambda m: actswap.replace(m, "rellu", "softplus")),
        (actswap.NoSiteError, r"has no 'gelu' site(.|\n)*relu", lambda m: actswap.replace(m, "gelu", "softplus")),
        (actswap.NoSiteError, "leave no 'relu' site", lambda m: actswap.replace(m, "relu", "softplus", where="x*")),
        (actswap.ParameterError, "has no parameter 'betta'", lambda m: actswap.replace(m, "relu", "softplus", betta=2)),
        (actswap.ParameterError, "beta must be > 0", lambda m: actswap.replace(m, "relu", "softplus", beta=0)),
        (actswap.ParameterError, "beta must be > 0", lambda m: actswap.replace(m, "relu", "softplus", beta=-1.0)),
        (actswap.ParameterError, "slope", lambda m: actswap.replace(m, "relu", nn.LeakyReLU, slope=1)),
        (actswap.TargetError, "3", lambda m: actswap.replace(m, "relu", 3)),
        (actswap.TargetError, "not an instance", lambda m: actswap.replace(m, nn.ReLU(), "softplus")),
        (actswap.ParameterError, "names what to swap", lambda m: actswap.replace(m, None, "softplus")),
        (
            RuntimeError,
            "shapes cannot be multiplied",
            lambda m: actswap.replace(m, "relu", "silu", example_inputs=torch.ones(2, 3)),
        ),
    ],
)
def test_bad_input_is_a_clear_error_and_the_model_untouched(error, match, call):
    model = nn.Sequential(Plain(), Functional())
    before = snapshot(model)
    with pytest.raises(error, match=match):
        call(model)
    assert_same(before, snapshot(model))


def test_torchscript_and_wrapped_models_are_refused():
    with pytest.warns(FutureWarning):
        script = torch.jit.script(nn.Sequential(nn.ReLU()))
    with pytest.raises(actswap.UnsupportedModelError, match="TorchScript"):
        actswap.replace(script, "relu", "silu")
    nested = nn.Sequential(nn.Linear(2, 2), script)
    with pytest.raises(actswap.BlockedSiteError, match="TorchScript"):
        actswap.replace(nested, "relu", "silu")

    class DistributedDataParallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Plain()

    with pytest.raises(actswap.UnsupportedModelError, match="swap before wrapping"):
        actswap.replace(DistributedDataParallel(), "relu", "silu")


def test_integers_are_refused_as_pytorch_refuses_them():
    model = actswap.replace(nn.Sequential(nn.ReLU()), "relu", "softplus")
    with pytest.raises(NotImplementedError):
        F.softplus(torch.arange(3))
    with pytest.raises(NotImplementedError):
        model(torch.arange(3))


def test_a_helper_function_becomes_a_method_of_the_swapped_owner_alone():
    one, two, x = Helped(), Helped(), example()
    expected = two(x)
    actswap.replace(one, "relu", "silu", example_inputs=x)
    assert torch.equal(one(x), F.silu(one.first(x)))
    assert torch.equal(two(x), expected)
    assert torch.equal(helper(x), F.relu(x))
    text = actswap.diff(one)
    assert "+        return self.helper(self.first(x))\n" in text
    assert "+def helper(actswap_owner, x):\n" in text
    assert "+    return actswap_owner.relu(x)\n" in text


def test_a_wrong_rewrite_fails_its_validation_and_is_undone(monkeypatch):
    """If a slot were put in the wrong place, the model must come back."""
    from actswap import classes, rewriting

    right = rewriting.tensor
    monkeypatch.setattr(rewriting, "tensor", lambda call, argument: rewriting.ast.Name("x", rewriting.ast.Load()))
    model = Functional()
    before = snapshot(model)
    with pytest.raises(actswap.EquivalenceError, match="was undone"):
        actswap.replace(model, "relu", "softplus", example_inputs=example())
    assert_same(before, snapshot(model))
    monkeypatch.setattr(rewriting, "tensor", right)
    classes._CACHE.clear()


def test_fused_transformer_layers_take_the_new_activation():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    x = torch.randn(2, 3, 8)
    expected = layer(x)
    actswap.replace(layer, "relu", "softplus", example_inputs=x)
    with torch.no_grad():
        assert not torch.allclose(layer(x), expected)
        torch.testing.assert_close(layer(x), layer.train()(x))
    actswap.restore(layer)
    assert layer.activation is F.relu and layer.activation_relu_or_gelu == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_with_a_padding_mask_makes_no_nested_tensors():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 8)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    before = snapshot(encoder)
    with Answering(F.softplus):
        expected = encoder(x, src_key_padding_mask=mask)
    actswap.replace(encoder, "relu", "softplus", example_inputs={"src": x, "src_key_padding_mask": mask})
    with torch.no_grad():
        assert torch.equal(encoder(x, src_key_padding_mask=mask), expected)
    actswap.restore(encoder)
    assert_same(before, snapshot(encoder))
    with torch.no_grad():
        assert not encoder(x, src_key_padding_mask=mask)[1, 3:].any()  # the fused kernel leaves padding at zero


@pytest.mark.parametrize("activation", [F.relu, nn.ReLU(), "relu"])
def test_decoders_and_whole_transformers(activation):
    x = torch.randn(2, 3, 8)
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True, dropout=0.0, activation=activation).eval()
    before, expected = snapshot(model), model(x, x)
    with Answering(F.softplus):
        wanted = model(x, x)
    actswap.replace(model, "relu", "relu", example_inputs=(x, x))
    actswap.replace(model, "relu", "softplus", example_inputs=(x, x))
    assert not torch.allclose(wanted, expected)
    for gradients in (True, False):  # attention has kernels of its own, with other rounding
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(model(x, x), wanted)
    actswap.restore(model)
    assert_same(before, snapshot(model))
    assert torch.equal(model(x, x), expected)


def test_graph_modules_are_rewritten_on_their_graph():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act = nn.Linear(6, 6), nn.ReLU()

        def forward(self, x):
            y = self.act(self.first(x))
            F.relu_(y)
            return torch.relu(y - 0.5).clamp(min=0)

    x = example()
    model = torch.fx.symbolic_trace(Net())
    code, graph = model.code, model.graph
    with Answering(F.softplus, clamps=False):
        expected = Net.forward(model, x)
    actswap.replace(model, "relu", "softplus", exclude="relu_2", example_inputs=x)
    assert torch.equal(model(x), expected)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), expected)
    actswap.restore(model)
    assert model.code == code and model.graph is graph
    exported = torch.export.export(Net(), (x,)).module()
    assert {s.activation.name for s in actswap.find(exported)} == {"relu"}
    actswap.replace(exported, "relu", "softplus", where="*")
    assert not any("relu" in str(n.target) and n.op == "call_function" for n in exported.graph.nodes)


def test_the_reports_are_readable():
    model = Functional()
    actswap.replace(model, "relu", "softplus", example_inputs=example())
    report = actswap.history(model)[-1].report
    assert report.to_dict()["passed"] and "surgery, static" in str(report)
    assert report["surgery, op stream"].data["sites"] == 2
    assert "bit for bit" in report["surgery, values (train)"].detail
    assert report.to_json().startswith("{")


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate, self.second = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.act = nn.Sigmoid()

    def forward(self, x):
        return torch.sigmoid(self.second(self.act(self.first(x)) * torch.tanh(self.gate(x))))


def test_roles_and_their_warnings():
    sites = {s.path: s.role for s in actswap.find(Gated())}
    assert sites == {"act": "gate", "sigmoid": "output", "tanh": "gate"}
    with pytest.warns(actswap.RoleWarning, match="as gates: act, tanh"):
        actswap.replace(Gated(), ["sigmoid", "tanh"], "hardsigmoid")
    with pytest.warns(actswap.RoleWarning, match=r"from 0 to inf, and stands at the model's output: sigmoid"):
        actswap.replace(Gated(), "sigmoid", "softplus", where=lambda s: s.role == "output")
    with pytest.raises(actswap.NoSiteError, match="leave no 'sigmoid' site"):
        actswap.replace(Gated(), "sigmoid", "silu", where=lambda s: s.role == "hidden")
    actswap.replace(Gated(), ["sigmoid", "tanh"], "sigmoid", where="sigmoid")


def test_clamps_count_where_the_data_flow_says_so():
    sites = actswap.find(Clamp(), "relu")
    assert [(s.path, s.idiom, s.role) for s in sites] == [("relu", True, "hidden")]

    class Projection(nn.Module):
        def forward(self, x):
            return (x - x.mean()).clamp(min=0)

    (site,) = actswap.find(Projection(), "relu")
    assert (site.idiom, site.role) == (True, "output")
    with pytest.raises(actswap.NoSiteError, match="name them with `where`"):
        actswap.replace(Projection(), "relu", "silu")
    actswap.replace(Projection(), "relu", "relu6", where="relu")


def test_channels_last_networks_are_compared_too():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1)).to(
        memory_format=torch.channels_last
    )
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    actswap.replace(model, "relu", "softplus", example_inputs=x)
    assert actswap.history(model)[-1].report.passed
    assert model(x).is_contiguous(memory_format=torch.channels_last)


class Counting(nn.Module):
    """Writes into its buffers, parameters and other tensors on the way, as normalisation and weight clipping do."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("u", torch.zeros(3))
        self.other = torch.zeros(2, 2)

    def forward(self, x):
        self.count.add_(1)
        self.count += 1
        self.u[0] = 4.0
        self.u.view(3)[1:].mul_(2).fill_(7)
        torch.add(self.u, 1, out=self.u)
        self.other.data.copy_(torch.ones(2, 2))
        self.norm.weight.data.clamp_(-0.01, 0.01)
        fresh = torch.zeros(2)
        fresh[0] = 1
        if fresh.sum() != 1:
            return x
        return self.last(F.relu(self.norm(x)))


def test_finding_writes_into_no_tensor():
    model = Counting().train()
    before = snapshot(model)
    kept = {name: (b, b.clone(), b._version) for name, b in [*model.named_buffers(), ("other", model.other)]}
    sites = actswap.find(model, "relu")
    assert [site.role for site in sites] == ["hidden"]
    assert_same(before, snapshot(model))
    for b, value, version in kept.values():
        assert torch.equal(b, value) and b._version == version
