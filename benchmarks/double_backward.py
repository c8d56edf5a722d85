"""What second derivatives cost: bytes kept under `create_graph=True`, and time against PyTorch's own ops.

python benchmarks/double_backward.py
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import actswap

NAMES = ("SiLU", "Mish", "Softplus", "GELU", "Hardswish", "LogSigmoid")
SIZES = (10**5, 3 * 10**5)
ROUNDS = 31


def kept(layer: nn.Module, count: int = 1000) -> int:
    """Input-sized tensors that a forward and its backward under `create_graph=True` keep."""
    leaf, storages = torch.randn(count, requires_grad=True), {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(leaf * 1)
        torch.autograd.grad(y, leaf, torch.ones(count, requires_grad=True), create_graph=True)
    storages.pop(leaf.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values()) // (4 * count)


def hvp(layer: nn.Module, size: int) -> Callable[[], object]:
    """A Hessian-vector product of the layer alone, with respect to its input: nothing else takes time."""
    x, v = torch.randn(size, requires_grad=True), torch.randn(size)

    def step() -> object:
        (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g, x, v)

    return step


def mlp(layer: nn.Module, width: int) -> nn.Sequential:
    """Two hidden layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), layer, nn.Linear(width, width), layer, nn.Linear(width, 1))


def penalty(layer: nn.Module, size: int) -> Callable[[], object]:
    """A WGAN gradient penalty on an MLP; each activation sees `size` elements."""
    net, x = mlp(layer, 100), torch.randn(size // 100, 2, requires_grad=True)

    def step() -> object:
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return torch.autograd.grad((g.norm(dim=1) - 1).square().mean(), [*net.parameters()][:-1])

    return step


def physics(layer: nn.Module, size: int) -> Callable[[], object]:
    """The loss of Poisson's equation on an MLP: two second derivatives, and the weights' gradients of that."""
    net, x = mlp(layer, 100), torch.randn(size // 100, 2, requires_grad=True)

    def step() -> object:
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        rows = [torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        return torch.autograd.grad((sum(rows) - x.sin().sum(1)).square().mean(), [*net.parameters()][:-1])

    return step


TASKS = {"HVP": hvp, "gradient penalty": penalty, "PINN": physics}


def ratio(ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    """Median over rounds of our CPU time divided by theirs, one after the other in changing order."""
    for step in (ours, theirs, ours, theirs):
        step()
    found = []
    for turn in range(ROUNDS):
        order, spent = (ours, theirs) if turn % 2 else (theirs, ours), {}
        for step in order:
            before = time.process_time()
            step()
            spent[step] = time.process_time() - before
        found.append(spent[ours] / spent[theirs])
    return statistics.median(found)


def main() -> None:
    """Print the table and what it was measured with."""
    torch.set_num_threads(1)
    F.gelu(torch.zeros(8), approximate="tanh")  # the first call sets up a vector library, which changes later timings
    print(f"Float32, CPU, one thread; medians of {ROUNDS} interleaved pairs, process time.")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}.\n")
    heads = [f"{task}, {size:.0e}".replace("e+0", "e") for task in TASKS for size in SIZES]
    print("| activation | tensors kept: PyTorch | actswap | " + " | ".join(f"time, {head}" for head in heads) + " |")
    print("|---|" + "---|" * (2 + len(heads)))
    for name in NAMES:
        theirs, ours = getattr(nn, name)(), getattr(actswap.nn, name)()
        times = [ratio(task(ours, size), task(theirs, size)) for task in TASKS.values() for size in SIZES]
        cells = [str(kept(theirs)), str(kept(ours)), *(f"{value:.2f}" for value in times)]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
