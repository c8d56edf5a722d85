"""Every form of keeping, picking and calling an activation: swapped like the oracle, or refused with its reason."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from forms import FORMS, ByName, KeptMethod, ListOfModules
from interception import Answering, outputs_and_gradients
from models import example
from settings import SETTINGS, Checkpointed
from snapshots import assert_same, equal, snapshot

import actswap

pytestmark = pytest.mark.filterwarnings("ignore::actswap.RoleWarning")
ALL = [*FORMS, *SETTINGS]
SWAPPED = [cls for cls in ALL if not cls.BLOCKED]
REFUSED = [cls for cls in ALL if cls.BLOCKED]


def name_of(cls):
    return cls.__name__


def make(cls):
    torch.manual_seed(0)
    return cls()


def without_blocked(model):
    """The paths of the sites that are refused."""
    return [site.path for site in actswap.find(model, "relu") if site.blocked and not site.idiom]


@pytest.mark.parametrize("cls", ALL, ids=name_of)
def test_every_use_is_found(cls):
    model = make(cls)
    before = snapshot(model)
    sites = [site for site in actswap.find(model, "relu") if not site.idiom]
    assert tuple(site.path for site in sites if not site.blocked) == cls.SITES
    reasons = [site.blocked for site in sites if site.blocked]
    assert len(reasons) == len(cls.BLOCKED), reasons
    for reason, part in zip(reasons, cls.BLOCKED, strict=True):
        assert part in reason
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("cls", SWAPPED, ids=name_of)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_swapped_form_equals_the_oracle(cls, training):
    x = example()
    with Answering(F.softplus) as oracle:
        expected = outputs_and_gradients(make(cls), x, training)
    assert oracle.count
    model = actswap.replace(make(cls), "relu", "softplus", save="input", example_inputs=x)
    with Answering(F.softplus) as left:
        assert equal(expected, outputs_and_gradients(model, x, training))
    assert left.count == 0
    line = actswap.history(model)[-1].report["surgery, op stream"]
    assert line.outcome == "pass" or "does not run on fake tensors" in line.detail


@pytest.mark.parametrize("cls", REFUSED, ids=name_of)
def test_the_refused_form_is_an_error_with_every_reason(cls):
    model, x = make(cls), example()
    before, expected = snapshot(model), outputs_and_gradients(make(cls), x, False)
    with pytest.raises(actswap.BlockedSiteError) as caught:
        actswap.replace(model, "relu", "softplus")
    assert all(part in str(caught.value) for part in cls.BLOCKED)
    assert_same(before, snapshot(model))
    assert equal(expected, outputs_and_gradients(model, x, False))


@pytest.mark.parametrize("cls", [cls for cls in ALL if cls.SITES], ids=name_of)
def test_the_same_bits_for_the_same_activation_and_the_same_objects_after_undoing(cls):
    x = example()
    expected = [outputs_and_gradients(make(cls), x, training) for training in (True, False)]
    for training, values in zip((True, False), expected, strict=True):
        model = make(cls)
        actswap.replace(model, "relu", "relu", exclude=without_blocked(model), example_inputs=x)
        assert equal(values, outputs_and_gradients(model, x, training))
        model = make(cls)
        before = snapshot(model)
        actswap.replace(model, "relu", "softplus", exclude=without_blocked(model))
        assert not [site for site in actswap.find(model, "relu") if not site.blocked and not site.idiom]
        actswap.restore(model)
        assert type(model).__name__ == cls.__name__
        assert_same(before, snapshot(model))
        assert equal(values, outputs_and_gradients(model, x, training))


@pytest.mark.parametrize("cls", [cls for cls in ALL if cls.SITES and cls.PICKLED], ids=name_of)
def test_copies_and_pickles_of_the_form_keep_the_swap(cls):
    model, x = make(cls), example()
    actswap.replace(model, "relu", "softplus", exclude=without_blocked(model))
    expected = outputs_and_gradients(model, x, False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(expected, outputs_and_gradients(twin, x, False))
        actswap.restore(twin)
        assert type(twin) is cls
        assert len(actswap.find(twin, "relu")) == len(actswap.find(make(cls), "relu"))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_computes_the_new_activation_again():
    """It takes `backward` only, which the validation may not call: the report says so."""

    class Reentrant(Checkpointed):
        REENTRANT = True

    gradients = []
    for cls in (Checkpointed, Reentrant):
        model, x = make(cls), example().requires_grad_()
        actswap.replace(model, "relu", "softplus", example_inputs=x.detach())
        model(x).sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    assert equal(*gradients)
    lines = actswap.history(model)[-1].report
    assert "its backward raises" in lines["surgery, values (train)"].detail


def test_what_is_picked_may_change_after_a_swap():
    model, x = make(ByName), example()
    actswap.replace(model, "relu", "softplus", example_inputs=x)
    text = actswap.diff(model)
    assert "(self.relu(self.first(x)) if self.act_name == 'relu' else getattr(F, self.act_name)(self.first(x)))" in text
    model.act_name = "tanh"
    inner = F.softplus(torch.tanh(model.first(x)) - 0.1)
    assert torch.equal(model(x), F.softplus(model.second(inner)))
    (site,) = actswap.find(model, "tanh")
    assert "an earlier swap rewrote this call" in site.blocked
    model.act_name = "relu"
    assert not actswap.find(model, "relu")
    actswap.restore(model)
    assert type(model) is ByName


def test_containers_swapped_twice_partly_and_with_parameters():
    model = make(ListOfModules)
    before = snapshot(model)
    actswap.replace(model, "relu", "softplus", where="acts*")
    actswap.replace(model, ["relu", "softplus"], "silu", where=["acts.1", "table*"])
    kinds = [type(act).__name__ for act in (*model.acts, model.pair[0], model.table["first"])]
    assert kinds == ["Softplus", "SiLU", "function", "SiLU"] or kinds[2] == "builtin_function_or_method"
    actswap.restore(model, last=True)
    assert [type(act).__name__ for act in model.acts] == ["Softplus", "Softplus"]
    with pytest.raises(actswap.BlockedSiteError, match="holds no submodule"):
        actswap.replace(model, "relu", "prelu", where="pair*")
    actswap.restore(model)
    assert_same(before, snapshot(model))


def test_a_kept_method_is_named_with_the_attribute_that_keeps_it():
    model = make(KeptMethod)
    (blocked,) = [site for site in actswap.find(model) if site.blocked]
    assert (
        blocked.blocked == "the attribute run keeps rectify as a bound method, which a rewritten class does not change"
    )
    del model.run
    assert not [site for site in actswap.find(model) if site.blocked]
