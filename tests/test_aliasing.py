"""What is saved for backward at a site is chosen so that no operation in place, before or after, makes it fail."""

import operator

import interception
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import actswap
from actswap.aliasing import input_is_overwritten, result_is_overwritten
from actswap.dataflow import DataFlow


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(6, 6), nn.ReLU6(), nn.Linear(6, 6)
        self.drop, self.inner = nn.Dropout(0.0, inplace=True), Inner()


class Inner(nn.Module):
    def forward(self, x, flag=None):
        return F.dropout(x, 0.0, True, True)


def outputs_and_gradients(model, x):
    return interception.outputs_and_gradients(model, x, training=True)


# Forwards in which something happens to the result of `act`, and whether it is written to.
AFTER = {
    "straight": (False, lambda m, x: m.last(m.act(m.first(x)))),
    "added": (False, lambda m, x: m.last(m.act(m.first(x)) + 1)),
    "viewed": (False, lambda m, x: m.last(m.act(m.first(x)).flatten(1).view(-1, 6))),
    "augmented": (True, lambda m, x: m.last(operator.iadd(m.act(m.first(x)), 1))),
    "method": (True, lambda m, x: m.last(m.act(m.first(x)).mul_(2))),
    "view written": (True, lambda m, x: m.last(m.act(m.first(x)).view(-1).add_(1).view(-1, 6))),
    "function": (True, lambda m, x: m.last(torch.sigmoid_(m.act(m.first(x))))),
    "flag by name": (True, lambda m, x: m.last(F.leaky_relu(m.act(m.first(x)), inplace=True))),
    "flag by place": (True, lambda m, x: m.last(F.leaky_relu(m.act(m.first(x)), 0.1, True))),
    "flag off": (False, lambda m, x: m.last(F.leaky_relu(m.act(m.first(x)), 0.1, False))),
    "child": (True, lambda m, x: m.last(m.drop(m.act(m.first(x))))),
    "inside a child": (True, lambda m, x: m.last(m.inner(m.act(m.first(x))))),
    "inside a child by name": (True, lambda m, x: m.last(m.inner(x=m.act(m.first(x))))),
    "returned": (True, lambda m, x: m.act(m.first(x))),
    "item": (True, lambda m, x: m.last(with_item(m.act(m.first(x))))),
    "out": (True, lambda m, x: m.last(torch.add(y := m.act(m.first(x)), 1, out=y))),
}


def with_item(y):
    y[0] = 1
    return y


def made(forward):
    class Model(Base):
        pass

    def method(self, x):
        return forward(self, x)

    Model.forward = method
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("name", AFTER)
def test_writes_into_a_result_are_found(name):
    expected, forward = AFTER[name]
    model = made(forward)
    flow = DataFlow(model)
    assert result_is_overwritten(flow, model, flow.child_nodes(model, "act")) is expected


@pytest.mark.parametrize("name", [name for name in AFTER if name not in ("out", "returned")])
def test_saving_the_output_never_fails(name):
    expected, forward = AFTER[name]
    model = made(forward)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    before = outputs_and_gradients(model, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Dropout, "__repr__", object.__repr__)
        actswap.replace(model, "relu6", "relu6", example_inputs=x)
    assert ("save='output'" in repr(model.act)) is not expected
    after = outputs_and_gradients(model, x)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# The same for what `act` reads.
BEFORE = {
    "added later": (True, lambda m, x: m.last(relu_then(m, a := m.first(x)) + operator.iadd(a, 1))),
    "view added later": (True, lambda m, x: m.last(relu_then(m, (a := m.first(x)).view(-1, 6)) + operator.iadd(a, 1))),
    "added before": (False, lambda m, x: m.last(relu_then(m, operator.iadd(m.first(x), 1)))),
    "item later": (True, lambda m, x: m.last(relu_then(m, a := m.first(x)) + with_item(a))),
    "read later": (False, lambda m, x: m.last(relu_then(m, a := m.first(x)) + a)),
}


def relu_then(m, x):
    return m.act(x)


@pytest.mark.parametrize("name", BEFORE)
def test_an_input_that_is_overwritten_is_copied(name):
    expected, forward = BEFORE[name]
    model = made(forward)
    model.act = nn.ReLU()
    flow = DataFlow(model)
    assert input_is_overwritten(flow, model, flow.child_nodes(model, "act")) is expected
    x = torch.randn(4, 6)
    outputs_and_gradients(model, x)  # relu does not mind
    for new in ("silu", nn.SiLU, "softplus", torch.sin):
        with actswap.swapped(model, "relu", new):
            got = outputs_and_gradients(model, x)
            assert (type(model.act).__name__ == "Cloning") is (expected and new != "softplus")
            assert all(torch.isfinite(t).all() for t in got)


def test_a_call_in_code_is_served_too():
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            a = self.first(x)
            y = F.relu(a)
            a += 1
            return self.last(y) + a

    model = actswap.replace(Called(), "relu", "gelu", example_inputs=torch.randn(2, 6))
    assert type(model.relu).__name__ == "Cloning"
    outputs_and_gradients(model, torch.randn(2, 6))
    again = actswap.recipe(model).apply(Called())
    assert repr(again) == repr(model)


@pytest.mark.parametrize(
    ("make", "old", "most"),
    [
        (lambda: timm.create_model("mobilenetv2_100"), "relu6", 0.695),
        (lambda: timm.create_model("efficientnet_lite0"), "relu6", 0.695),
        (lambda: torchvision.models.mobilenet_v2(), "relu6", 0.695),
    ],
)
def test_the_same_function_for_fewer_bytes(make, old, most):
    model, x = make().train(), torch.randn(2, 3, 64, 64)
    plain = actswap.memory(model, x)["total"].data["bytes"]
    actswap.replace(model, old, old, validate=False)
    assert actswap.memory(model, x)["total"].data["bytes"] <= most * plain


@pytest.mark.parametrize(
    "name", ["mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5", "googlenet", "squeezenet1_0"]
)
@pytest.mark.parametrize("new", ["same", "silu", "softplus"])
def test_no_model_that_worked_fails_in_training(name, new):
    torch.manual_seed(0)
    options = {"init_weights": False} if name == "googlenet" else {}
    model, x = torchvision.models.get_model(name, **options).train(), torch.randn(2, 3, 64, 64)
    for old in {site.activation.name for site in actswap.find(model) if site.role == "hidden"}:
        actswap.replace(model, old, old if new == "same" else new, where=lambda s: s.role == "hidden", validate=False)
    outputs = model(x)
    loss = sum(t.sum() for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor))
    loss.backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
