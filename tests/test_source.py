"""Source is verified before it is trusted, and what does not verify is a blocked site."""

import importlib.util
import inspect
import linecache
import sys
import types

import pytest
import timm
import torch
import torchvision
from torch import nn

import actswap
from actswap.rewriting import CallEdit, rewrite
from actswap.source import Position, Unverified, codes, verify

pytestmark = pytest.mark.filterwarnings("ignore::actswap.RoleWarning")
TEXT = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x):
        return F.relu(self.first(x))
"""


def load(path, text, name):
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def functions_of(package, limit):
    """Methods of the classes in a package's loaded modules."""
    found = []
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(package) or not isinstance(module, types.ModuleType):
            continue
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == name:
                found += [f for f in vars(cls).values() if isinstance(f, types.FunctionType)]
    return found[:: max(1, len(found) // limit)]


@pytest.mark.parametrize("package", ["torch.nn.modules", "torchvision.models", "timm.models", "timm.layers"])
def test_methods_of_real_packages_compile_to_what_runs(package):
    assert timm and torchvision
    checked = failed = 0
    for function in functions_of(package, 60):
        if "<" in function.__code__.co_filename or function.__code__.co_filename.endswith("dataclasses.py"):
            continue  # generated code has no source
        checked += 1
        try:
            method = verify(function)
        except Unverified:
            failed += 1
        else:
            assert method.node.lineno >= function.__code__.co_firstlineno
    assert checked >= 40
    assert failed == 0


def test_a_source_that_changed_since_import_is_blocked(tmp_path):
    path = tmp_path / "changing.py"
    module = load(path, TEXT, "changing")
    model = module.Net()
    assert [s.blocked for s in actswap.find(model, "relu")] == [None]
    path.write_text(TEXT.replace("return F.relu(self.first(x))", "return F.relu(self.first(x)) + 1"))
    linecache.checkcache(str(path))
    (site,) = actswap.find(model, "relu")
    assert "source differs" in site.blocked
    with pytest.raises(actswap.BlockedSiteError, match="source differs"):
        actswap.replace(model, "relu", "silu")
    path.write_text("def broken(:\n" + TEXT)
    linecache.checkcache(str(path))
    assert "does not parse" in actswap.find(model, "relu")[0].blocked


def test_a_shifted_source_is_blocked(tmp_path):
    path = tmp_path / "shifted.py"
    module = load(path, TEXT, "shifted")
    path.write_text("# one line more\n" + TEXT)
    linecache.checkcache(str(path))
    assert "source differs" in actswap.find(module.Net(), "relu")[0].blocked


def test_code_without_source_is_blocked():
    namespace = {}
    exec(TEXT, namespace)
    model = namespace["Net"]()
    (site,) = actswap.find(model, "relu")
    assert "no source" in site.blocked
    assert torch.equal(model(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_line_numbers_stay_in_tracebacks(tmp_path):
    text = TEXT.replace("return F.relu(self.first(x))", "y = F.relu(self.first(x))\n        return y.undefined")
    module = load(tmp_path / "tracing.py", text, "tracing")
    model = actswap.replace(module.Net(), "relu", "silu")
    with pytest.raises(AttributeError) as caught:
        model(torch.ones(1, 3))
    frame = caught.traceback[-1]
    assert frame.path.name == "tracing.py"
    assert str(frame.statement).strip() == "return y.undefined"
    assert inspect.getsourcelines(type(model).forward)[0][0].strip().startswith("def forward")


def test_rewriting_nothing_gives_the_same_code():
    code = nn.Linear.forward.__code__
    assert rewrite(nn.Linear.forward, []).__code__ == code
    assert list(codes(code)) == [code]


def test_a_call_that_is_not_there_is_refused():
    with pytest.raises(Unverified, match="no call at"):
        rewrite(nn.Linear.forward, [CallEdit(Position(1, 1, 0, 1), "relu", 0)])


def test_closures_keep_their_cells(tmp_path):
    text = """
import torch
from torch import nn
def make():
    scale, unused = 3.0, 1.0
    class Net(nn.Module):
        def forward(self, x):
            return torch.relu(x * scale), __class__, (lambda: scale + unused)()
        def set(self, value):
            nonlocal scale
            scale = value
    return Net
"""
    net = load(tmp_path / "closing.py", text, "closing").make()
    model = actswap.replace(net(), "relu", "silu")
    model.set(2.0)
    out, cls, total = model(torch.ones(1))
    assert torch.equal(out, torch.nn.functional.silu(torch.full((1,), 2.0)))
    assert cls is net
    assert total == 3.0
