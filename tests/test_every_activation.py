"""Every activation PyTorch has, natively as a module and in every spelling of a call: found, and the same bits."""

import importlib.util
import inspect
import itertools

import pytest
import torch
from torch import nn

import actswap
from actswap import registry
from actswap.patterns import MISSING, Pattern
from actswap.recognize import resolve

PATTERNS = [Pattern.parse(a, text) for a in registry.definitions() for text in a.calls]
CALLS = [
    p for p in PATTERNS if p.path.startswith(("torch.nn.functional.", "torch.special.", "torch.Tensor.", "torch."))
]
CALLS = [p for p in CALLS if not p.path.startswith(("torch.ops.", "torch._C."))]
MODULES = [Pattern.parse(a, text) for a in registry.definitions() for text in a.modules if text.startswith("torch.nn.")]


def value(pattern, argument):
    """A value for an argument of a target: the one it must have, its default, or the definition's."""
    if argument.required is not MISSING:
        return argument.required
    default = {p.name: p.default for p in pattern.activation.parameters}.get(argument.name, argument.default)
    return argument.default if default is MISSING else default


def expression(pattern):
    """The call as one would write it."""
    if any(p.learnable for p in pattern.activation.parameters):
        rest = [f"{a.name}=self.learned" for a in pattern.arguments[1:]]
    else:
        wanted = [a for a in pattern.arguments[1:] if a.required is not MISSING or a.default is MISSING]
        wanted = [a for a in wanted if value(pattern, a) is not None]
        positional = "_C" in pattern.path or pattern.name in ("celu_", "threshold_", "rrelu_", "threshold")
        rest = [f"{'' if positional else a.name + '='}{value(pattern, a)!r}" for a in wanted]
    if pattern.path.startswith("torch.Tensor."):
        return f"(x * 1).{pattern.name}({', '.join(rest)})"
    return f"{pattern.path}({', '.join(['x * 1', *rest])})"


@pytest.fixture(scope="module")
def spelled(tmp_path_factory):
    """A source file with one model per spelling."""
    lines = ["import torch", "from torch import nn"]
    for index, pattern in enumerate(CALLS):
        lines += [
            f"class Net{index}(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            "        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)",
            "        self.learned = nn.Parameter(torch.full((1,), 0.3))",
            "    def forward(self, x):",
            "        x = self.first(x)",
            f"        x = {expression(pattern)}",
            "        return self.second(x)",
        ]
    path = tmp_path_factory.mktemp("spelled") / "spelled_models.py"
    path.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("spelled_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example():
    return torch.linspace(-6, 6, 48).reshape(8, 6)


@pytest.mark.parametrize("index", range(len(CALLS)), ids=[f"{p.path}-{p.activation.name}" for p in CALLS])
def test_every_spelling_of_a_call(spelled, index):
    pattern = CALLS[index]
    torch.manual_seed(0)
    model, x = getattr(spelled, f"Net{index}")(), example()
    found = actswap.find(model, pattern.activation.name, example_inputs=x)
    assert [(s.kind, s.blocked, s.calls, s.inplace) for s in found] == [("call", None, 1, pattern.inplace)]
    actswap.replace(model, pattern.activation.name, "mish", where="*", example_inputs=x)
    (report,) = (swap.report for swap in actswap.history(model))
    assert "bit for bit" in report["surgery, values (train)"].detail
    actswap.restore(model)
    if pattern.activation.name == "rrelu":  # the call leaves `training` at False, which a module's mode cannot say
        with pytest.raises(actswap.BlockedSiteError, match="fixes training=False"):
            actswap.replace(model, "rrelu", "rrelu")
    elif not found[0].idiom and not pattern.activation.learnable:
        actswap.replace(model, pattern.activation.name, pattern.activation.name, example_inputs=x)
        assert "the same function" in actswap.history(model)[-1].report["result (train)"].detail


def native(pattern, inplace):
    cls = resolve(pattern.path)
    takes = inspect.signature(cls).parameters
    kwargs = {a.name: value(pattern, a) for a in pattern.arguments if a.name in takes and a.name != "inplace"}
    kwargs = {name: v for name, v in kwargs.items() if v is not MISSING}
    return cls(**kwargs, **({"inplace": True} if inplace else {}))


HAVE_INPLACE = [p for p in MODULES if "inplace" in inspect.signature(resolve(p.path)).parameters]
CASES = [*itertools.product(MODULES, [False]), *itertools.product(HAVE_INPLACE, [True])]


@pytest.mark.parametrize(("pattern", "inplace"), CASES, ids=[f"{p.path}-{p.activation.name}-{i}" for p, i in CASES])
def test_every_native_module(pattern, inplace):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), native(pattern, inplace), nn.Linear(6, 6)).train()
    name = pattern.activation.name
    (site,) = actswap.find(model, name)
    assert (site.path, site.inplace) == ("1", inplace)
    actswap.replace(model, name, name, example_inputs=example())
    report = actswap.history(model)[-1].report
    for mode in ("as it is", "train", "eval"):
        assert "the same function: bit for bit" in report[f"result ({mode})"].detail


def test_the_table_is_not_empty():
    assert len(CALLS) > 75
    assert len(MODULES) > 20
