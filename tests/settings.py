"""Models in awkward settings: control flow, containers as owners, neighbours, checkpoints, compiled and fused parts.

Like those in `forms`: `SITES` are the relu sites that are swapped, `BLOCKED` the reasons of those that are refused.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torchvision
from forms import Form
from torch import nn


class Branches(Form):
    """Optional arguments, `self.training` with dropout, a flag, a loop that depends on the data."""

    SITES = ("relu", "relu_1", "relu_2", "relu_3")

    def __init__(self):
        super().__init__()
        self.flag, self.drop = True, nn.Dropout(0.5)

    def forward(self, x, prev=None):
        x = F.relu(self.first(x))
        if prev is not None:
            x = x + prev
        elif self.training:
            x = self.drop(torch.relu(self.second(x)))
        if self.flag:
            x = F.relu(x - 0.1)
        while x.abs().max() > 1:
            x = F.relu(x * 0.5)
        return self.second(x)


class RunTimeConstants(Form):
    """Parameters that are known only at run time."""

    SITES = ("relu_1",)
    BLOCKED = ("its argument bool(floor) is known only at run time",)

    def forward(self, x, floor=0.0):
        y = F.relu(self.first(x), inplace=bool(floor))
        return F.relu(y)


class Checkpointed(Form):
    """torch.utils.checkpoint of a method, a lambda and a block."""

    SITES = ("relu", "relu_1", "relu_2", "block.1")

    REENTRANT = False

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    def part(self, x):
        """Relu."""
        return F.relu(self.first(x))

    def forward(self, x):
        run = torch.utils.checkpoint.checkpoint
        x = run(self.part, x, use_reentrant=self.REENTRANT)
        x = run(lambda y: F.relu(self.second(y)), x, use_reentrant=False)
        return torch.relu(run(self.block, x, use_reentrant=False))


class EfficientDenseNet(nn.Module):
    """torchvision's memory-efficient DenseNet, which checkpoints a closure."""

    SITES = (
        "net.relu", "net.features.relu0", "net.features.denseblock1.denselayer1.relu1",
        "net.features.denseblock1.denselayer1.relu2", "net.features.transition1.relu",
        "net.features.denseblock2.denselayer1.relu1", "net.features.denseblock2.denselayer1.relu2",
    )  # fmt: skip
    BLOCKED = ()
    PICKLED = True

    def __init__(self):
        super().__init__()
        self.net = torchvision.models.DenseNet(4, (1, 1), 4, num_classes=3, memory_efficient=True)

    def forward(self, x):
        return self.net(x[:2, :1, None, None].expand(2, 3, 32, 32) * torch.ones(32))


class TwiceInSequential(nn.Sequential):
    """One instance twice in a Sequential."""

    SITES = ("1", "3")
    BLOCKED = ()
    PICKLED = True

    def __init__(self):
        act = nn.ReLU()
        super().__init__(nn.Linear(6, 6), act, nn.Linear(6, 6), act)


class ListOwner(nn.ModuleList):
    """A ModuleList that applies an activation between its children."""

    SITES = ("relu",)
    BLOCKED = ()
    PICKLED = True

    def __init__(self):
        super().__init__([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        for layer in self:
            x = F.relu(layer(x)) * len(self)
        return x


class Counting(Form):
    """An owner that iterates over its modules by name."""

    SITES = ("relu",)

    def forward(self, x):
        for name, layer in self.named_children():
            x = F.relu(layer(x) + len(name) / 10)
        return x


class Fixed(Form):
    """Static and class methods, called through the instance."""

    BLOCKED = ("static is a staticmethod", "of_class is a classmethod", "below is a staticmethod")

    @staticmethod
    def static(x):
        """Relu."""
        return F.relu(x)

    @classmethod
    def of_class(cls, x):
        """Relu."""
        return torch.relu(cls.below(x))

    @staticmethod
    def below(x):
        """Relu."""
        return F.relu(x)

    def forward(self, x):
        return self.of_class(self.static(self.first(x)))


class OverOwner(Form):
    """A lambda that closes over its owner."""

    BLOCKED = ("kept in the attribute run", "kept in the attribute act")
    PICKLED = False

    def __init__(self):
        super().__init__()
        self.run = lambda x: F.relu(self.first(x))
        act = nn.ReLU()
        self.act = lambda x: act(x)

    def forward(self, x):
        return self.act(self.run(x))


class Tied(Form):
    """Tied weights, a weight-normed layer, a frozen BatchNorm inside a training model."""

    SITES = ("relu", "relu_1", "norm.1")
    PICKLED = False

    def __init__(self):
        super().__init__()
        self.second.weight = self.first.weight
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.norm = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU())
        self.norm.eval().requires_grad_(False)

    def train(self, mode=True):
        """All but the frozen part."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.last(F.relu(self.second(self.norm(F.relu(self.first(x))))))


class Message(Form):
    """A method called from generated code, as PyG calls `message`."""

    SITES = ("relu",)

    def message(self, x_j):
        """Relu."""
        return self.second(x_j).relu()

    def forward(self, x):
        namespace = {}
        exec("def propagate(self, x):\n    return self.message(x_j=x)\n", namespace)
        return namespace["propagate"](self, self.first(x))


class Generated(Form):
    """Methods without source."""

    BLOCKED = ("no source for forward",)
    PICKLED = False

    exec("def forward(self, x):\n    return F.relu(self.first(x))\n")


class QAT(Form):
    """PyTorch's own Python modules that call F.relu."""

    SITES = ("relu", "linear.relu")

    def __init__(self):
        super().__init__()
        self.linear = torch.ao.nn.intrinsic.qat.LinearReLU(
            6, 6, qconfig=torch.ao.quantization.get_default_qat_qconfig("fbgemm", version=0)
        )

    def forward(self, x):
        return F.relu(self.second(self.linear(x)))


@torch.library.custom_op("forms::fused_relu", mutates_args=())
def fused_relu(x: torch.Tensor) -> torch.Tensor:
    """Relu, as a custom operator."""
    return x.clamp(min=0)


fused_relu.register_fake(torch.empty_like)
fused_relu.register_autograd(lambda ctx, g: g)


class CustomOps(Form):
    """A custom operator, by its function and by its name in torch.ops."""

    BLOCKED = ("which is compiled", "which is compiled")

    def forward(self, x):
        return torch.ops.forms.fused_relu(fused_relu(self.first(x)))


class Ignored(Form):
    """torch.jit.ignore, torch.no_grad and torch.compiler.disable around methods."""

    SITES = ("relu", "relu_1", "relu_2")

    @torch.jit.ignore
    def ignored(self, x):
        """Relu."""
        return F.relu(x)

    @torch.no_grad()
    def quiet(self, x):
        """Relu."""
        return F.relu(x)

    @torch.compiler.disable
    def eager(self, x):
        """Relu."""
        return F.relu(x)

    def forward(self, x):
        return self.ignored(self.first(x)) + self.quiet(x) + self.eager(self.second(x))


class Mapped(Form):
    """Activations handed to map, to a comprehension and to a partial."""

    BLOCKED = ("passed on as a value", "passed on as a value")

    def forward(self, x):
        act = functools.partial(F.relu, inplace=False)
        return act(torch.stack(list(map(F.relu, self.first(x)))))


class Hooks(Form):
    """A lambda as a hook on a layer."""

    BLOCKED = ("attribute _forward_hooks[",)
    PICKLED = False

    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(lambda module, args, out: F.relu(out))

    def forward(self, x):
        return self.first(x)


SETTINGS = [cls for cls in list(globals().values()) if isinstance(cls, type) and cls.__module__ == __name__]
