"""Real architectures of torchvision and timm: the same bits for the same activation, exact counts, exact undo."""

from collections import Counter

import pytest
import timm
import torch
import torchvision
from torch.utils._python_dispatch import TorchDispatchMode

import actswap
from actswap import kept

TORCHVISION = {
    "resnet18": 64,
    "densenet121": 64,
    "mobilenet_v3_small": 64,
    "googlenet": 64,
    "efficientnet_b0": 64,
    "vit_b_16": 32,
}
TIMM = {  # ten families: the smallest of each, at an input size it takes
    "resnet10t": 64,
    "mobilenetv3_small_050": 64,
    "efficientnet_lite0": 64,
    "regnety_002": 64,
    "vit_tiny_patch16_224": 64,
    "convnext_atto": 64,
    "dla46_c": 64,
    "mobilevit_xxs": 64,
    "levit_128s": 224,
    "poolformer_s12": 64,
}


def make(name, seed=0):
    torch.manual_seed(seed)
    if name in TORCHVISION:
        options = {"aux_logits": True, "init_weights": False} if name == "googlenet" else {}
        options = {"image_size": 32} if name == "vit_b_16" else options
        return torchvision.models.get_model(name, weights=None, **options)
    return timm.create_model(name, **({"img_size": 64} if name.startswith("vit") else {}))


def example(name):
    size = {**TORCHVISION, **TIMM}[name]
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [*TORCHVISION, *TIMM])
def test_the_same_activations_give_the_same_bits(name):
    model, x = make(name), example(name)
    found = {site.activation.name for site in actswap.find(model) if site.blocked is None and not site.idiom}
    assert found
    keys, objects = list(model.state_dict()), {id(p) for p in model.parameters()}
    for activation in sorted(found):
        actswap.replace(model, activation, activation, example_inputs=x)
        report = actswap.history(model)[-1].report
        for mode in ("train", "eval"):
            assert report[f"surgery, values ({mode})"].outcome == "pass"
            assert "the same function: bit for bit" in report[f"result ({mode})"].detail
        assert report["surgery, op stream"].outcome == "pass"
        assert report["audit"].outcome == "pass", str(report)
    swapped = actswap.find(model, sorted(found))
    assert all(s.kind != "call" for s in swapped)
    assert list(model.state_dict()) == keys and {id(p) for p in model.parameters()} == objects
    classes = {path: type(module).__name__ for path, module in make(name).named_modules()}
    actswap.restore(model)
    assert {path: type(module).__name__ for path, module in model.named_modules()} == classes


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counts(model, x):
    with torch.no_grad(), Counting() as counting:
        model(x)
    return counting.counts


def test_densenet121_from_relu_to_softplus_and_back():
    model, x = make("densenet121").eval(), example("densenet121")
    original, objects = model(x), {path: id(m) for path, m in model.named_modules()}
    before = counts(model, x)
    assert before["relu"] + before["relu_"] == 121 and not before["softplus"]
    actswap.replace(model, "relu", "softplus", example_inputs=x)
    after = counts(model, x)
    assert type(model).__name__ == "DenseNet" and isinstance(model, torchvision.models.DenseNet)
    assert after["softplus"] == 121 and not after["relu"] + after["relu_"]
    assert sum(s.calls for s in actswap.history(model)[0].sites) == 121
    actswap.restore(model)
    assert type(model) is torchvision.models.DenseNet
    assert torch.equal(model(x), original) and {path: id(m) for path, m in model.named_modules()} == objects
    assert counts(model, x) == before


def saved_bytes(model, x):
    return actswap.memory(model, x)["total"].data["bytes"]


def test_resnet50_from_relu_to_softplus_saves_no_more_bytes():
    model, x = torchvision.models.resnet50().train(), torch.randn(2, 3, 64, 64)
    relu = saved_bytes(model, x)
    actswap.replace(model, "relu", "softplus")
    ours = saved_bytes(model, x)
    actswap.restore(model)
    actswap.replace(model, "relu", torch.nn.Softplus)
    native = saved_bytes(model, x)
    assert ours <= relu
    assert 1.35 < native / relu < 1.5, f"{native / relu:.3f}"


def test_the_count_of_kept_bytes_sees_what_hooks_do_not():
    """A tensor kept on `ctx` is invisible to saved-tensor hooks."""

    class Hoarder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x * 2
            return x + 1

        @staticmethod
        def backward(ctx, g):
            return g

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            return Hoarder.apply(x * self.weight)

    found = kept.kept_for_backward(Net(), torch.ones(4, 8))
    assert sum(k.bytes for k in found) == 2 * 4 * 8 * 4  # the output and what ctx holds; the product is not kept
