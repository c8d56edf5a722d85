"""What a swap must leave alone, by identity, and how two of these, or two runs, are compared."""

from __future__ import annotations

import torch

from actswap import edits


def snapshot(model):
    """Everything a swap must leave alone, by identity."""
    return {
        path: (
            type(module),
            {k: v for k, v in vars(module).items() if not k.startswith("_")},
            dict(module._modules),
            dict(module._parameters),
            dict(module._buffers),
            {name: (id(vars(module)[name]), dict(vars(module)[name])) for name in edits.hooks(module)},
            module.training,
        )
        for path, module in model.named_modules(remove_duplicate=False)
    } | {"bits": [t.clone() for t in model.state_dict().values()], "versions": [p._version for p in model.parameters()]}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        if key == "bits":
            assert all(torch.equal(x, y) for x, y in zip(a[key], b[key], strict=True))
        else:
            assert a[key] == b[key], key


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
