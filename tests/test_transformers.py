"""Models of the transformers library from tiny random configurations: every use found, values right, exact undo."""

import pytest
import torch
from torch.utils import _pytree as pytree

pytest.importorskip("transformers", reason="the transformers library is not installed: pip install transformers")
from architectures import KINDS, tiny
from transformers.activations import ACT2FN
from zoo import problems

import actswap

SAMPLE = [
    "bert",
    "gpt2",
    "t5",
    "vit",
    "whisper",
    "clip",
    "llama",
    "segformer",
    "wav2vec2",
    "opt",
    "bloom",
    "distilbert",
    "mamba",
    "deberta-v2",
]
pytestmark = pytest.mark.filterwarnings("ignore::actswap.RoleWarning", "ignore::FutureWarning", "ignore::UserWarning")


def tensors(output):
    return [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def run(model, inputs):
    """Every tensor of the output, and the gradients of every parameter that it depends on."""
    torch.manual_seed(0)
    out = [t for t in tensors(tuple(model(**inputs).values())) if t.requires_grad]
    used = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad([t.square().mean() for t in out], used, allow_unused=True)
    return [*out, *(g for g in grads if g is not None)]


# What cannot be swapped, and why: never left in silence.
REFUSED = {"mamba": "activation picks what is called, and is known only at run time"}


def check_counts(name):
    model, inputs = tiny(name)
    if name in REFUSED:
        with pytest.raises(actswap.BlockedSiteError, match=REFUSED[name]):
            actswap.replace(model, "silu", "relu")
    else:
        assert problems(model, inputs) == []


def test_an_activation_picked_by_its_name_from_the_library_s_table():
    class Picking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.name = torch.nn.Linear(4, 4), "gelu_new"

        def forward(self, x):
            return self.linear(ACT2FN[self.name](self.linear(x)))

    model, x = Picking(), torch.randn(3, 4)
    before = model(x)
    actswap.replace(model, "gelu_tanh", "softplus", example_inputs=x)
    expected = model.linear(torch.nn.functional.softplus(model.linear(x)))
    torch.testing.assert_close(model(x), expected)
    model.name = "relu"
    torch.testing.assert_close(model(x), model.linear(model.linear(x).relu()), rtol=0, atol=0)
    model.name = "gelu_new"
    actswap.restore(model)
    assert torch.equal(model(x), before)


def check_values(name):
    model, inputs = tiny(name)
    before = run(model, inputs)
    for activation in sorted({s.activation.name for s in actswap.find(model) if not s.blocked and not s.idiom}):
        with actswap.swapped(model, activation, activation, exclude=lambda s: s.blocked, example_inputs=inputs):
            after = run(model, inputs)
            report = actswap.history(model)[-1].report
            if all("bit for bit" in line.detail for line in report.lines if line.name.startswith("result (")):
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            moved = sum(float((a - b).square().sum()) for a, b in zip(before, after, strict=True))
            assert moved <= 1e-6 * sum(float(a.square().sum()) for a in before)
    again = run(model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_counts(name):
    check_counts(name)


@pytest.mark.parametrize("name", SAMPLE[:6])
def test_a_sample_of_the_values(name):
    check_values(name)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in KINDS if name not in SAMPLE])
def test_every_count(name):
    check_counts(name)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in KINDS if name not in SAMPLE[:6]])
def test_every_value(name):
    check_values(name)
