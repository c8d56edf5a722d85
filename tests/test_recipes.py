"""Recipes make the same network again, refuse what does not fit, and ride in state dicts; eject needs no actswap."""

import copy
import io
import json
import subprocess
import sys
import textwrap
import warnings

import pytest
import timm
import torch
import torch.nn.functional as F
from models import Aliased, Chain, DeepHelped, Functional, Head, Plain, Spellings, Stored, example
from torch import nn

import actswap
from actswap import Recipe

pytestmark = pytest.mark.filterwarnings("ignore::actswap.RoleWarning")
SOME = [Plain, Functional, Head, Spellings, Stored, Chain, Aliased, DeepHelped]
some = pytest.mark.parametrize("cls", SOME, ids=lambda cls: cls.__name__)


def again(recipe, tmp_path):
    recipe.save(tmp_path / "swap.json")
    loaded = Recipe.load(tmp_path / "swap.json")
    assert loaded == recipe
    return loaded


def shown(model):
    return [(path, repr(m)) for path, m in model.named_modules(remove_duplicate=False) if not list(m.children())]


@some
def test_the_same_network_again(cls, tmp_path):
    torch.manual_seed(0)
    first = actswap.replace(cls(), "relu", "softplus", beta=2.0)
    recipe = again(actswap.recipe(first), tmp_path)
    second = recipe.apply(cls())
    assert actswap.recipe(second) == recipe
    assert shown(second) == shown(first)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second.eval()(example()), first.eval()(example()), rtol=0, atol=0)
    actswap.restore(second)
    assert type(second) is cls and actswap.history(second) == []


def test_several_swaps_in_order(tmp_path):
    def make():
        return timm.create_model("mobilenetv3_small_050", num_classes=3).eval()

    first = make()
    actswap.replace(first, "hardswish", "silu", where="blocks.*")
    actswap.replace(first, "relu", "softplus", exclude="*.se.*", beta=3.0)
    actswap.replace(first, ["silu", "hardswish"], "mish", where="*.0.*")
    second = again(actswap.recipe(first), tmp_path).apply(make())
    assert shown(second) == shown(first)
    kept = [[(s.new, len(s.sites)) for s in actswap.history(model)] for model in (first, second)]
    assert kept[0] == kept[1] and len(kept[0]) == 3
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(second(x), first(x), rtol=0, atol=0)


def test_learned_parameters_keep_their_number_and_shared_ones_stay_shared(tmp_path):
    def make():
        act = nn.ReLU()
        return nn.Sequential(nn.Linear(3, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 2))

    first = actswap.replace(make(), "relu", "prelu", num_parameters=4)
    second = again(actswap.recipe(first), tmp_path).apply(make())
    assert second[1] is second[3] and second[1].weight.shape == (4,)
    apart = actswap.replace(make(), "relu", "prelu", share=False)
    second = again(actswap.recipe(apart), tmp_path).apply(make())
    assert second[1] is not second[3] and second[1].weight.shape == (1,)


def test_parameters_that_are_there_are_carried_over(tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2))
        nn.init.uniform_(model[1].weight)
        return model

    model = make()
    kept = model[1].weight
    first = actswap.replace(model, "prelu", "prelu")
    assert first[1].weight is kept
    fresh = make()
    slope = fresh[1].weight
    second = again(actswap.recipe(first), tmp_path).apply(fresh)
    assert second[1].weight is slope


def test_what_a_factory_gave_is_named_site_by_site(tmp_path):
    def make():
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))

    betas = {"1": 1.0, "3": 5.0}
    first = actswap.replace(make(), "relu", actswap.per_site(lambda s: actswap.nn.Softplus(beta=betas[s.path])))
    recipe = again(actswap.recipe(first), tmp_path)
    second = recipe.apply(make())
    assert (second[1].beta, second[3].beta) == (1.0, 5.0)
    assert second[3].inplace and shown(second) == shown(first)


def test_what_changed_after_the_swap_counts():
    model = actswap.replace(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), "relu", "softplus")
    model[0].beta = 7.0
    assert actswap.recipe(model).steps[0].changes[0].new["params"]["beta"] == 7.0


@pytest.mark.parametrize("new", [F.softsign, torch.tanh, nn.Softsign, nn.Softplus], ids=lambda new: new.__name__)
def test_importable_objects(new, tmp_path):
    params = {"beta": 2.0} if new is nn.Softplus else {}
    first = actswap.replace(Functional(), "relu", new, **params)
    second = again(actswap.recipe(first), tmp_path).apply(Functional())
    assert shown(second) == shown(first) and actswap.recipe(second) == actswap.recipe(first)


def test_local_objects_are_refused():
    for new in (lambda x: x, nn.Softplus(beta=2.0), type("Mine", (nn.ReLU,), {})):
        model = actswap.replace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "relu", new)
        with pytest.raises(actswap.RecipeError, match="imported as module:qualname") as error:
            actswap.recipe(model)
        assert "the swap at 1" in str(error.value)


def test_nothing_swapped_is_an_empty_recipe(tmp_path):
    model = Plain()
    recipe = again(actswap.recipe(model), tmp_path)
    assert recipe.steps == () and recipe.apply(model) is model and actswap.history(model) == []


# --- refusals --------------------------------------------------------------------------------------------------------


def recipe_of(**changes):
    data = actswap.recipe(actswap.replace(Plain(), "relu", "softplus")).data()
    return {**data, **changes}


def test_what_is_no_recipe_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for text, message in [
        ("{", "JSON"), ("[]", "format"), ('{"format": "other"}', "format"),
        (json.dumps(recipe_of(version=2)), "version 2"), (json.dumps(recipe_of(swaps=[{}])), "malformed"),
        (json.dumps(recipe_of(swaps=[{"share": True, "changes": [{"new": {}, "sites": {}}]}])), "malformed"),
    ]:  # fmt: skip
        path.write_text(text)
        with pytest.raises(actswap.RecipeError, match=message):
            Recipe.load(path)


def test_names_and_objects_that_are_unknown_are_refused_before_any_change():
    data = recipe_of()
    for change, error in [
        ({"name": "sofplus", "params": {}, "save": "auto"}, actswap.UnknownActivationError),
        ({"name": "softplus", "params": {"gamma": 1}, "save": "auto"}, actswap.ParameterError),
        ({"import": "torch.nn:Softpluss", "params": {}}, actswap.RecipeError),
        ({"import": "no_such_package:thing", "params": {}}, actswap.RecipeError),
    ]:
        broken = copy.deepcopy(data)
        broken["swaps"].append({"share": True, "changes": [{"new": change, "sites": {"act": "softplus"}}]})
        model = Plain()
        before = shown(model)
        with pytest.raises(error):
            Recipe.of_data(broken).apply(model)
        assert shown(model) == before and actswap.history(model) == []


def test_sites_that_are_not_there_are_refused_and_earlier_steps_undone():
    model = Plain()
    recipe = actswap.recipe(actswap.replace(actswap.replace(model, "relu", "softplus"), "softplus", "silu"))
    data = recipe.data()
    data["swaps"][1]["changes"][0]["sites"]["nowhere.act"] = "softplus"
    other = Plain()
    before = shown(other)
    with pytest.raises(actswap.RecipeError, match="lacks sites") as error:
        Recipe.of_data(data).apply(other)
    assert "nowhere.act: softplus" in str(error.value)
    assert shown(other) == before and actswap.history(other) == []
    with pytest.raises(actswap.RecipeError, match="lacks sites"):
        recipe.apply(nn.Sequential(nn.Linear(2, 2), nn.GELU()))


def test_a_swap_before_stays_when_a_recipe_fails():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.GELU())
    actswap.replace(model, "gelu", "mish")
    recipe = actswap.recipe(actswap.replace(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), "relu", "silu"))
    with pytest.raises(actswap.RecipeError):
        recipe.apply(model)
    assert [swap.new for swap in actswap.history(model)] == ["mish"]


# --- state dicts -----------------------------------------------------------------------------------------------------


def saved(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@some
def test_the_recipe_rides_in_the_state_dict(cls):
    model = cls()
    keys = list(model.state_dict())
    actswap.replace(model, "relu", "softplus")
    weights = saved(model)
    assert list(weights) == keys
    assert actswap.recipe(weights) == actswap.recipe(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actswap.recipe(weights).apply(cls()).load_state_dict(weights)


def test_weights_trained_with_another_activation_warn():
    relu, soft, mish = Plain(), actswap.replace(Plain(), "relu", "softplus"), actswap.replace(Plain(), "relu", "mish")
    with pytest.warns(
        actswap.WeightsWarning, match=r"trained with relu are loaded into a \w+ that computes softplus\("
    ):
        soft.load_state_dict(saved(relu))
    with pytest.warns(actswap.WeightsWarning, match=r"trained with softplus\(.*that computes mish"):
        mish.load_state_dict(saved(soft))
    assert actswap.recipe(saved(soft)).steps and not actswap.recipe(saved(relu)).steps


def test_no_warning_where_nothing_is_known_or_only_the_saved_state_differs():
    soft = actswap.replace(Plain(), "relu", "softplus")
    other = actswap.replace(Plain(), "relu", "softplus", save="input")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        soft.load_state_dict(dict(Plain().state_dict()))  # metadata lost, as after safetensors
        other.load_state_dict(saved(soft))
        actswap.restore(soft).load_state_dict(saved(Plain()))


def test_a_state_dict_without_metadata_has_no_recipe():
    with pytest.raises(actswap.RecipeError, match="without metadata"):
        actswap.recipe(dict(Plain().state_dict()))


@some
def test_no_hook_is_left_behind(cls):
    model = cls()
    actswap.replace(actswap.replace(model, "relu", "softplus"), "softplus", "silu")
    copied = copy.deepcopy(model)
    for swapped in (model, copied):
        actswap.restore(swapped)
        assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks for m in swapped.modules())


def test_a_part_of_a_model_has_its_own_part():
    model = nn.ModuleDict({"a": Plain(), "b": Plain()})
    actswap.replace(model, "relu", "silu", where="b.*")
    assert actswap.recipe(model["a"]).steps == ()
    assert actswap.recipe(actswap.recipe(model["b"]).apply(Plain())) == actswap.recipe(model["b"])


# --- eject -----------------------------------------------------------------------------------------------------------


def test_eject_leaves_plain_modules_that_another_process_loads_without_actswap(tmp_path):
    model = timm.create_model("resnet10t", num_classes=3).eval()
    actswap.replace(model, "relu", "softplus")
    x = torch.randn(1, 3, 32, 32)
    expected = model(x)
    hooked = []
    model.layer1[0].act1.register_forward_hook(lambda *a: hooked.append(1))
    assert actswap.eject(model) is model
    assert {type(m) for m in model.modules() if "softplus" in type(m).__name__.lower()} == {nn.Softplus}
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert hooked == [1] and actswap.history(model) == []
    model.layer1[0].act1._forward_hooks.clear()
    torch.save((model, x, expected), tmp_path / "model.pt")
    code = f"""
        import sys, torch
        model, x, expected = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
        assert torch.equal(model(x), expected)
        assert not any(name.startswith("actswap") for name in sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


NATIVE = [name for name in actswap.names() if actswap.get(name).native and name != "identity"]


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("inplace", [False, True])
def test_ejected_modules_compute_the_same(name, inplace):
    module = getattr(actswap.nn, actswap.get(name).class_name)(inplace=inplace).eval()
    model = nn.Sequential(nn.Identity(), module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actswap.eject(model)
    x = torch.linspace(-8, 8, 101)
    torch.testing.assert_close(model[1](x.clone()), module(x.clone()), rtol=0, atol=0)
    if caught:
        assert model[1] is module and "torch.nn has no" in str(caught[0].message)
    else:
        assert type(model[1]).__module__.startswith("torch.nn.") and getattr(model[1], "inplace", False) == inplace
        if any(parameter.learnable for parameter in actswap.get(name).parameters):
            assert all(a is b for a, b in zip(model[1].parameters(), module.parameters(), strict=True))


def test_eject_says_what_stays():
    model = nn.Sequential(Functional(), nn.ReLU(), nn.Linear(3, 6))
    actswap.replace(model, "relu", "snake", where="1")
    actswap.replace(model, "relu", "softplus", where="0.*")
    x = example()
    expected = model(x)
    with pytest.warns(actswap.EjectWarning) as caught:
        actswap.eject(model)
    text = str(caught[0].message)
    assert "1: torch.nn has no Snake like this" in text and "0: its class Functional is rewritten" in text
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert {type(m) for m in model[0].modules() if m is not model[0] and "Soft" in type(m).__name__} == {nn.Softplus}
    actswap.replace(model, "softplus", "silu")
    actswap.restore(model)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_eject_keeps_in_place_what_others_see():
    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act, self.last = nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)

        def forward(self, x):
            y = self.linear(x)
            z = self.act(y)
            return self.last(z) + y

    model = actswap.replace(Seen(), "relu", "softplus")
    x = example()
    expected = model(x)
    with pytest.warns(actswap.EjectWarning, match="act: torch.nn has no Softplus like this"):
        actswap.eject(model)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_containers_are_named_by_path_in_recipes_and_stay_in_eject():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.acts = nn.Linear(6, 6), {"a": [nn.ReLU(), F.relu]}

        def forward(self, x):
            for act in self.acts["a"]:
                x = self.linear(act(x))
            return x

    model = actswap.replace(Listed(), "relu", "softplus")
    recipe = actswap.recipe(model)
    assert recipe.steps[0].changes[0].sites == {"acts.a.0": "relu", "acts.a.1": "relu"}
    assert actswap.recipe(recipe.apply(Listed())) == recipe
    with pytest.warns(actswap.EjectWarning, match=r"acts\.a\.0: it is kept in a container"):
        actswap.eject(model)
