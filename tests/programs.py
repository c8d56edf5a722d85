"""Random models: Hypothesis puts classes together out of the ways in which people write an activation."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import textwrap

from hypothesis import strategies as st

HEAD = """
import functools
import torch
import torch.nn.functional as F
from torch import nn, relu as bare_relu
from torch.nn.functional import relu as aliased
import torch.utils.checkpoint as recomputing

TABLE = {"relu": F.relu, "tanh": torch.tanh}


def helper(y):
    return F.relu(y) * 0.5


def outer(y):
    def inner(z):
        return helper(z) + torch.relu(y)
    return inner(y)


def optional(y, act=F.relu, scale=None):
    return act(y) if scale is None else act(y) * scale


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper


class Base(nn.Module):
    default_act = nn.ReLU()

    def __init__(self):
        super().__init__()
        self.act, self.quick, self.shared = nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU()
        self.again, self.chain = self.shared, nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
        self.stored, self.listed, self.mapped = F.relu, [F.relu, nn.ReLU()], {"a": nn.ReLU()}
        self.modules_listed = nn.ModuleList([nn.ReLU(), nn.Tanh()])
        self.name, self.flag, self.__hidden = "relu", True, nn.ReLU()
        self.lin = nn.Linear(5, 5)

    def extra(self, y):
        return self.lin(F.relu(self.lin(y)))

    @logged
    def decorated(self, y, times=1):
        for _ in range(times):
            y = F.relu(y)
        return y

    @property
    def gain(self):
        return torch.relu(self.lin.weight).mean()

    def tail(self, y):
        return self.__hidden(y) + F.relu(y - 1)
"""

FORMS = """
self.act({x})
self.quick({x} * 1)
self.shared(self.again({x}))
self.default_act({x})
self.chain({x})
self.stored({x})
self.listed[0]({x})
self.listed[1]({x})
self.mapped["a"]({x})
self.modules_listed[0](self.modules_listed[1]({x}))
F.relu({x})
F.relu({x} * 1, inplace=True)
F.relu(input={x})
torch.relu({x})
torch.relu_({x} * 1)
bare_relu({x})
aliased({x})
({x}).relu()
({x} * 1).relu_()
torch.nn.functional.relu({x})
self.lin({x}).relu().neg().relu()
nn.ReLU()({x})
getattr(F, self.name)({x})
TABLE[self.name]({x})
{{"relu": F.relu}}[self.name]({x})
helper({x})
outer({x})
optional({x})
optional({x}, scale=2.0)
self.extra({x})
self.decorated({x}, times=2)
self.tail({x})
{x} * self.gain
torch.stack([F.relu({x} - i) for i in range(2)]).sum(0)
sum(map(F.relu, [{x}, -{x}]))
(F.relu({x}) if self.training else torch.relu({x}) * 2)
(lambda z: F.relu(z) + z)({x})
F.relu(kept := {x}) + kept
recomputing.checkpoint(self.extra, {x}, use_reentrant=False)
recomputing.checkpoint(helper, {x}, use_reentrant=False)
self.lin({x}.clamp(min=0))
torch.tanh({x})
F.gelu({x})
{x} * torch.sigmoid({x})
F.leaky_relu({x}, 0.1)
torch.relu({x}) - F.softplus({x})
""".strip().splitlines()

AROUND = [
    "y = {form}",
    "y = {form} + y",
    "y = y + self.lin({form})",
    "if y.dim() == 2:\n    y = {form}\nelse:\n    y = torch.tanh(y)",
    "for _ in range(2):\n    y = self.lin({form})",
    "z = {form}\ny = z * 0.5 + z",
    "with torch.autograd.set_grad_enabled(torch.is_grad_enabled()):\n    y = {form}",
    "try:\n    y = {form}\nfinally:\n    pass",
    "y, *_ = {form}, 1",
    "F.relu_(y := self.lin(y))\ny = {form}",
]
TENSOR = ["y", "self.lin(y)", "(y - 0.25)"]

statement = st.builds(
    lambda form, around, tensor: around.format(form=form.format(x=tensor)),
    st.sampled_from(FORMS), st.sampled_from(AROUND), st.sampled_from(TENSOR),
)  # fmt: skip
body = st.lists(statement, min_size=1, max_size=4)


@st.composite
def programs(draw):
    """The text of a module whose class `Model` takes and gives 4 rows of 5."""
    parts = [HEAD]
    count = draw(st.integers(1, 3))
    for number in range(count):
        children = draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else []
        parent = "Base" if not number or draw(st.booleans()) else f"Block{draw(st.integers(0, number - 1))}"
        lines = [line for piece in draw(body) for line in piece.splitlines()]
        lines += [f"y = self.child{i}(y)" for i in range(len(children))]
        if parent != "Base" and draw(st.booleans()):
            lines.append("y = super().forward(y)")
        made = [f"self.child{i} = Block{child}()" for i, child in enumerate(children)]
        init = "def __init__(self):\n" + textwrap.indent("\n".join(["super().__init__()", *made]), "    ")
        forward = "def forward(self, y):\n" + textwrap.indent("\n".join([*lines, "return self.lin(y)"]), "    ")
        parts.append(f"class Block{number}({parent}):\n" + textwrap.indent(f"{init}\n\n{forward}", "    "))
    parts.append(f"Model = Block{count - 1}")
    return "\n\n\n".join(parts) + "\n"


_numbers = itertools.count()


def imported(text, folder):
    """The module that a text is, imported from a file."""
    name = f"program_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
