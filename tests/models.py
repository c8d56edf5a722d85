"""Small models, each awkward in one way, and what is true of each.

A model here is a class without arguments. `SITES` lists, for each, the paths of its relu sites; `INPUT` makes an input.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.functional import relu as aliased_relu


def example() -> Tensor:
    """An input for every model here: 4 rows of 6."""
    return torch.linspace(-2, 2, 24).reshape(4, 6).clone()


class Plain(nn.Module):
    """One registered module."""

    SITES = ("relu",)

    def __init__(self):
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.relu(self.first(x)))


class Functional(nn.Module):
    """F.relu in an expression, twice in one line."""

    SITES = ("relu", "relu_1")

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(F.relu(self.first(F.relu(x))))


class DroppedValue(nn.Module):
    """In-place calls as statements, whose value is dropped."""

    SITES = ("relu", "relu_1")

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x)
        F.relu_(y)
        z = self.second(y)
        F.relu(z, inplace=True)
        return z


class DroppedModule(nn.Module):
    """A registered in-place module whose value is dropped."""

    SITES = ("act",)

    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.first(x)
        self.act(y)
        return y * 2


class UsedThrice(nn.Module):
    """One in-place instance, used three times in a forward."""

    SITES = ("relu",)

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = self.relu(layer(x))
        return x


class Aliased(nn.Module):
    """One instance under two names."""

    SITES = ("act1", "act2")

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.act1 = self.act2 = nn.ReLU()

    def forward(self, x):
        return self.act2(self.second(self.act1(self.first(x))))


class Head(nn.Sequential):
    """A Sequential whose own forward applies relu: a registered slot would run twice."""

    SITES = ("relu",)

    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x):
        return F.relu(super().forward(x))


class Spellings(nn.Module):
    """The ways a call is written."""

    SITES = tuple(["relu"] + [f"relu_{i}" for i in range(1, 9)])

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(9))

    def forward(self, x):
        from torch.nn import functional as inner

        a, b, c, d, e, f, g, h, i = self.layers
        x = torch.relu(a(x))
        x = b(x).relu()
        x = c(x).relu_()
        x = aliased_relu(input=d(x))
        x = F.relu(e(x), inplace=True)
        x = inner.relu(f(x), True)
        x = torch.nn.functional.relu(g(x))
        act = torch.relu_
        x = act(h(x))
        return torch.Tensor.relu(i(x))


class Clamp(nn.Module):
    """`clamp(min=0)` between two matrices is relu; the clamp of a denominator is not."""

    SITES = ("relu",)

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5, 2))

    def forward(self, x):
        y = torch.mm(torch.mm(x, self.w1).clamp(min=0), self.w2)
        return y / y.norm(dim=1, keepdim=True).clamp(min=1e-6)


class MyReLU(torch.autograd.Function):
    """A hand-written relu."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x > 0)


class Custom(nn.Module):
    """A user's Function, applied in a method."""

    SITES = ()

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(MyReLU.apply(self.first(x)))


class Stored(nn.Module):
    """A function and a partial in attributes."""

    SITES = ("act",)

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.act = F.relu
        self.leaky = functools.partial(F.leaky_relu, negative_slope=0.2)

    def forward(self, x):
        return self.leaky(self.second(self.act(self.first(x))))


class StoredWithArguments(nn.Module):
    """A stored function that is called with more than the tensor."""

    SITES = ("relu",)

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.act, self.inplace = F.relu, True

    def forward(self, x):
        x = self.first(x)
        self.act(x, inplace=self.inplace)
        return self.second(x)


class Base(nn.Module):
    """The lower half of a super() chain."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x):
        return F.relu(self.first(x))


class Chain(Base):
    """Both classes of a super() chain call relu."""

    SITES = ("relu", "relu_1")

    def forward(self, x):
        return torch.relu(super().forward(x) - 0.5)


class OtherMethod(nn.Module):
    """A method other than forward, and a branch on the mode."""

    SITES = ("relu", "relu_1")

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def features(self, x, again=None):
        x = F.relu(self.first(x))
        return x if again is None else x + again

    def forward(self, x):
        y = self.features(x)
        if self.training:
            y = F.relu(self.second(y)) * 2
        return self.features(x, again=y)


class Containers(nn.Module):
    """Sequential, ModuleList and ModuleDict, one instance in two of them."""

    SITES = ("body.1", "items.0", "named.act")

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.items = nn.ModuleList([nn.ReLU()])
        self.named = nn.ModuleDict({"act": self.items[0], "last": nn.Linear(6, 2)})

    def forward(self, x):
        return self.named["last"](self.named["act"](self.items[0](self.body(x)) - 1))


class Subclass(nn.ReLU):
    """A subclass that keeps relu's forward."""


class Subclassed(nn.Module):
    """A model of such subclasses."""

    SITES = ("act",)

    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(6, 6), Subclass()

    def forward(self, x):
        return self.act(self.first(x))


class Nested(nn.Module):
    """Calls in a lambda, a comprehension, a ternary and a nested function."""

    SITES = ("relu", "relu_1", "relu_2", "relu_3")

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x, twice=True):
        def inner(y):
            return F.relu(y)

        act = lambda y: F.relu(y - 0.1)  # noqa: E731
        parts = [F.relu(p) for p in self.first(x).split(3, dim=1)]
        y = torch.cat(parts, dim=1)
        return inner(act(y)) if not twice else inner(act(F.relu(y - 0.2)))


class Decorated(nn.Module):
    """A decorated method."""

    SITES = ("relu",)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)

    def _logged(method):
        @functools.wraps(method)
        def wrapper(self, *args):
            self.count = getattr(self, "count", 0) + 1
            return method(self, *args)

        return wrapper

    @_logged
    def forward(self, x):
        return F.relu(self.first(x))


def helper(x):
    """A free function with an activation."""
    return F.relu(x)


class Helped(nn.Module):
    """An activation in a free function that the method calls."""

    SITES = ("relu",)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x):
        return helper(self.first(x))


def halves(x, act=None):
    """A helper that hands another on."""
    return torch.cat(list(map(helper, x.split(3, dim=1))), dim=1)


@functools.cache
def no_activation(n):
    """Not followed."""
    return n


def recursive(x, depth):
    """A helper that calls itself, with an activation of its own and one below."""
    return halves(x) if depth == 0 else recursive(torch.relu(x - 0.1), depth - 1)


class DeepHelped(nn.Module):
    """Helpers several deep, one recursive, one passed to map and one to checkpoint."""

    SITES = ("relu", "relu_1")

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = torch.utils.checkpoint.checkpoint(recursive, self.first(x), no_activation(2), use_reentrant=False)
        return halves(self.second(y))


class Explicit(Base):
    """A base class's forward called by its name."""

    SITES = ("relu",)

    def forward(self, x):
        return Base.forward(self, x) * 2


class Split(nn.Module):
    """Layers on several devices, with activations between them."""

    def __init__(self, devices):
        super().__init__()
        self.devices = devices
        self.layers = nn.ModuleList(nn.Linear(6, 6, device=device) for device in devices)
        self.acts = nn.ModuleList(nn.ReLU() for _ in devices)

    def forward(self, x):
        for device, layer, act in zip(self.devices, self.layers, self.acts, strict=True):
            x = F.relu(act(layer(x.to(device))))
        return x


MODELS = [
    cls for cls in list(globals().values()) if isinstance(cls, type) and "SITES" in vars(cls) and cls is not Custom
]
