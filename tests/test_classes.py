"""Rewritten classes: the method resolution order, registries, metaclasses, wrappers and copies keep their meaning."""

import abc
import copy
import functools
import io
import typing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import actswap

pytestmark = pytest.mark.filterwarnings("ignore::actswap.RoleWarning")
REGISTRY = []


class Root(nn.Module):
    def __init_subclass__(cls, **kwargs):
        REGISTRY.append(cls)
        super().__init_subclass__(**kwargs)

    def forward(self, x):
        return ("root", F.relu(x))


class Left(Root):
    def forward(self, x):
        return ("left", torch.relu(x), super().forward(x))


class Right(Root):
    def forward(self, x):
        return ("right", super().forward(x))


class Diamond(Left, Right):
    def forward(self, x):
        return ("diamond", super().forward(x), super(Left, self).forward(x))


def flat(tree):
    return [leaf for part in tree for leaf in (flat(part) if isinstance(part, tuple) else [part])]


def test_a_diamond_of_super_calls():
    model, x = Diamond(), torch.linspace(-1, 1, 5)
    expected = model(x)
    count = len(REGISTRY)
    actswap.replace(model, "relu", "silu", example_inputs=x)
    got = model(x)
    names = [part for part in flat(expected) if isinstance(part, str)]
    assert [part for part in flat(got) if isinstance(part, str)] == names
    assert all(torch.equal(t, F.silu(x)) for t in flat(got) if not isinstance(t, str))
    assert len(REGISTRY) == count
    assert [cls.__name__ for cls in type(model).__mro__[:-2]].count("Left") == 2
    assert isinstance(model, Diamond)
    actswap.restore(model)
    assert type(model) is Diamond


def test_unreachable_overridden_methods_are_no_sites():
    class Silent(Left):
        def forward(self, x):
            return x

    assert not actswap.find(Silent(), "relu")


class Meta(type):
    made: typing.ClassVar = []

    def __new__(mcs, name, bases, namespace):
        cls = super().__new__(mcs, name, bases, namespace)
        mcs.made.append(name)
        return cls


class WithMeta(nn.Module, metaclass=Meta):
    def forward(self, x):
        return F.relu(x)


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self, x): ...


class Concrete(Abstract):
    def forward(self, x):
        return F.relu(x)


@pytest.mark.parametrize("cls", [WithMeta, Concrete])
def test_metaclasses_do_not_see_the_class(cls):
    made = list(Meta.made)
    model = actswap.replace(cls(), "relu", "silu")
    assert Meta.made == made
    assert isinstance(model, cls)
    assert type(type(model)) is type(cls)
    assert torch.equal(model(torch.ones(2)), F.silu(torch.ones(2)))


def logged(method):
    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        self.log.append(method.__name__)
        return method(self, *args, **kwargs)

    return wrapper


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = []

    @property
    def always(self):
        return F.relu(torch.ones(1) * 2)

    @torch.no_grad()
    def quiet(self, x):
        return F.relu(x)

    @logged
    @torch.no_grad()
    def both(self, x):
        return F.relu(x)

    @staticmethod
    def fixed(x):
        return F.relu(x)

    def forward(self, x):
        return self.always + self.quiet(x) + self.both(x)


def test_decorators_and_properties():
    model, x = Wrapped(), torch.ones(1, requires_grad=True)
    sites = actswap.find(model, "relu")
    assert [s.blocked is None for s in sites] == [True, True, True, False]
    assert "staticmethod" in sites[3].blocked
    actswap.replace(model, "relu", "silu", exclude=sites[3].path)
    out = model(x)
    assert torch.equal(out, F.silu(torch.tensor([2.0])) + 2 * F.silu(torch.ones(1)))
    assert not out.requires_grad
    assert model.log == ["both"]
    assert Wrapped().quiet(-x).item() == 0.0


class Rebinds(nn.Module):
    def forward(self, x):
        self = self
        return F.relu(x)


class Shadows(nn.Module):
    def forward(self, x):
        return (lambda self: F.relu(self))(x)


@pytest.mark.parametrize("cls", [Rebinds, Shadows])
def test_where_self_is_not_the_owner_the_site_is_blocked(cls):
    (site,) = actswap.find(cls(), "relu")
    assert "self" in site.blocked


class ByReference(nn.Module):
    def forward(self, x):
        pick = [F.relu]
        return functools.reduce(lambda h, f: f(h), pick, x)


def test_an_activation_passed_on_as_a_value_is_blocked():
    (site,) = actswap.find(ByReference(), "relu")
    assert site.blocked == "pick holds it, and what is taken from there is not known"


class ByDefault(nn.Module):
    def forward(self, x, act=F.relu, *, other=torch.relu, third=torch.relu):
        return act(x) + other(x) + sum(map(third, x))


def test_a_default_argument_is_swapped_where_it_is_called_and_compared_first():
    model, x = ByDefault(), torch.linspace(-1, 1, 5)
    sites = actswap.find(model, "relu")
    assert [site.blocked for site in sites] == [None, None, "third is torch.relu by default, and not simply called"]
    actswap.replace(model, "relu", "silu", exclude=sites[2].path, example_inputs=x)
    assert torch.equal(model(x), F.silu(x) + F.silu(x) + F.relu(x).sum())
    assert torch.equal(model(x, act=torch.tanh, other=torch.sin), torch.tanh(x) + torch.sin(x) + F.relu(x).sum())
    assert "(self.relu(x) if act is F.relu else act(x))" in actswap.diff(model)


class Lambdas(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.act = lambda x: F.relu(x) * 2
        self.other = functools.partial(clipped, top=2)

    def forward(self, x):
        return self.act(self.other(self.first(x)))


def clipped(x, top):
    return torch.relu(x).clamp(max=top)


def test_activations_in_stored_functions_are_blocked_sites():
    sites = actswap.find(Lambdas(), "relu")
    assert [site.blocked for site in sites] == [
        "it stands in the function kept in the attribute act",
        "it stands in the function kept in the attribute other.func",
    ]
    with pytest.raises(actswap.BlockedSiteError, match="kept in the attribute act"):
        actswap.replace(Lambdas(), "relu", "silu")


class OnClass(nn.Module):
    act = nn.ReLU()
    other = torch.relu

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x):
        return self.act(self.first(x)) + self.other(x)


def test_class_attributes_are_shadowed_on_the_instance():
    model, x = OnClass(), torch.ones(2, 3)
    assert [s.path for s in actswap.find(model, "relu")] == ["act", "other"]
    actswap.replace(model, "relu", "silu", example_inputs=x)
    assert torch.equal(model(x), F.silu(model.first(x)) + F.silu(x))
    assert type(OnClass.act) is nn.ReLU
    assert type(OnClass().act) is nn.ReLU
    actswap.restore(model)
    assert model.act is OnClass.act


class CountsChildren(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x):
        for child in self.children():
            x = F.relu(child(x))
        return x


def test_an_owner_that_walks_its_children_gets_no_new_child():
    model, x = CountsChildren(), torch.ones(2, 3)
    actswap.replace(model, "relu", "softplus", example_inputs=x)
    assert [name for name, _ in model.named_children()] == ["first"]
    assert torch.equal(model(x), F.softplus(model.first(x)))
    actswap.restore(model)
    with pytest.raises(actswap.BlockedSiteError, match="counts its children"):
        actswap.replace(model, "relu", "prelu")


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return F.relu(self.first(x) * self.weight)


class Double(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("first", ["swap", "parametrize"])
def test_parametrised_owners(first):
    model, x = Owner(), torch.ones(2, 3)
    if first == "swap":
        actswap.replace(model, "relu", "softplus")
    parametrize.register_parametrization(model, "weight", Double())
    if first == "parametrize":
        actswap.replace(model, "relu", "softplus", example_inputs=x)
    assert torch.equal(model(x), F.softplus(model.first(x) * 2))
    actswap.restore(model)
    assert torch.equal(model(x), F.relu(model.first(x) * 2))
    assert parametrize.is_parametrized(model, "weight")


def test_a_whole_model_is_saved_and_loaded():
    model, x = Diamond(), torch.linspace(-1, 1, 5)
    actswap.replace(model, "relu", "silu")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert type(twin) is type(model)
    assert all(
        torch.equal(a, b)
        for a, b in zip(flat(twin(x))[1::2], flat(model(x))[1::2], strict=True)
        if not isinstance(a, str)
    )
    actswap.restore(twin)
    assert type(twin) is Diamond
    assert actswap.history(model)


def test_a_user_reduce_is_respected():
    class Sized(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.size = size

        def __reduce__(self):
            return Sized, (self.size,)

        def forward(self, x):
            return F.relu(x)

    model = actswap.replace(Sized(3), "relu", "silu")
    twin = copy.deepcopy(model)
    assert twin.size == 3
    assert type(twin) is type(model)
    assert twin.relu is not model.relu
    assert torch.equal(twin(torch.ones(2)), F.silu(torch.ones(2)))
    actswap.restore(twin)
    assert type(twin) is Sized
    assert len(actswap.history(model)) == 1


def test_compiled_blocks_share_one_class():
    blocks = nn.Sequential(*(Owner() for _ in range(12)))
    actswap.replace(blocks, "relu", "softplus")
    assert len({type(block) for block in blocks}) == 1


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.LazyLinear(3)

    def forward(self, x):
        return F.relu(self.first(x))


def test_lazy_neighbours_are_not_run_before_the_user_runs_them():
    model, x = Lazy(), torch.ones(2, 5)
    actswap.replace(model, "relu", "softplus", example_inputs=x)
    assert nn.parameter.is_lazy(model.first.weight)
    assert "lazy parameters" in actswap.history(model)[-1].report["values"].detail
    assert torch.equal(model(x), F.softplus(model.first(x)))
    actswap.restore(model)
    assert type(model) is Lazy
    assert torch.equal(model(x), F.relu(model.first(x)))


class Becoming(nn.modules.lazy.LazyModuleMixin, Owner):
    cls_to_become = Owner

    def __init__(self):
        super().__init__()
        self.weight = nn.UninitializedParameter()

    def initialize_parameters(self, x):
        self.weight.materialize((3,))
        nn.init.ones_(self.weight)


def test_a_class_that_changes_at_the_first_forward_is_refused_until_then():
    model, x = Becoming(), torch.ones(2, 3)
    with pytest.raises(actswap.BlockedSiteError, match="run the model once before"):
        actswap.replace(model, "relu", "softplus")
    model(x)
    actswap.replace(model, "relu", "softplus", example_inputs=x)
    assert torch.equal(model(x), F.softplus(model.first(x)))


def test_models_on_meta_are_filled_later():
    with torch.device("meta"):
        model = nn.Sequential(Owner(), nn.ReLU())
    actswap.replace(model, "relu", "prelu")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    inner = F.prelu(model[0].first(x) * 0.25, torch.tensor([0.25]))
    assert torch.equal(model(x), F.prelu(inner, torch.tensor([0.25])))
    actswap.restore(model)
    assert torch.equal(model(x), F.relu(F.relu(model[0].first(x) * 0.25)))


compiled = torch.compile(lambda x: F.relu(x), backend="eager")


class LowLevel(nn.Module):
    def forward(self, x):
        return compiled(torch.ops.aten.relu(x - 0.5) + torch.ops.aten.relu.default(x) - 1)


def test_operators_of_aten_and_a_compiled_helper():
    model, x = LowLevel(), torch.linspace(-1, 2, 7)
    actswap.replace(model, "relu", "silu", example_inputs=x)
    assert actswap.history(model)[-1].report["surgery, op stream"].data["sites"] == 3
    assert torch.equal(model(x), F.silu(F.silu(x - 0.5) + F.silu(x) - 1))
    actswap.restore(model)
    assert torch.equal(model(x), F.relu(F.relu(x - 0.5) + F.relu(x) - 1))
