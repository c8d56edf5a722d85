"""Two gloo processes on this machine: DDP, FSDP2 and sharded tensors give the gradients of one process.

Both processes are started once and run every body below in turn; an assertion that fails in one ends both.
"""

from __future__ import annotations

import copy
import socket
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Functional, Plain, Subclassed
from oracle import NATIVE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import actswap

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

RANKS = 2
MODELS = [Plain, Functional, Subclassed]
DATA = torch.linspace(-2, 2, 48).reshape(8, 6)


def _start(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", actswap.RoleWarning)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    for name, body in BODIES.items():
        torch.manual_seed(0)
        body(rank)
        dist.barrier()
        (folder / name).touch()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The names of the bodies that both processes finished, and the error that ended them."""
    folder, problem = tmp_path_factory.mktemp("ran"), None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        torch.multiprocessing.spawn(_start, (port, folder), nprocs=RANKS)
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        problem = error
    return {path.name for path in folder.iterdir()}, problem


def share(rank: int) -> torch.Tensor:
    """This process's rows."""
    return DATA.chunk(RANKS)[rank].clone()


def loss(model, x):
    return model(x).square().mean()


def check_training(swapped, wrapped, rank, full=lambda t: t):
    """Two steps of the wrapped model against the same model in one process."""
    single = copy.deepcopy(swapped)
    model = wrapped(swapped)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, single)]
    for _ in range(2):
        for optimizer, m, x in zip(optimizers, (model, single), (share(rank), DATA.clone()), strict=True):
            optimizer.zero_grad()
            loss(m, x).backward()
        for got, want in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(full(got.grad), want.grad)
        for optimizer in optimizers:
            optimizer.step()
    return model, single


def check_restore(model, inner, cls, single, rank):
    """Restore under the wrapper: the gradients are those of the original with the same weights."""
    assert len(actswap.history(model)) == 1
    assert actswap.restore(model) is model
    assert not actswap.history(model) and actswap.diff(model) == ""
    assert all(c.__dict__.get("__actswap__") is None for c in type(inner).__mro__)
    assert isinstance(inner, cls)
    actswap.restore(single)
    assert type(single) is cls
    model.zero_grad(), single.zero_grad()
    loss(model, share(rank)).backward()
    loss(single, DATA.clone()).backward()


def ddp(rank):
    from torch.nn.parallel import DistributedDataParallel

    for cls in MODELS:
        for new in ("softplus", "prelu"):
            model, single = check_training(actswap.replace(cls(), "relu", new), DistributedDataParallel, rank)
            with pytest.raises(actswap.UnsupportedModelError, match="swap before wrapping"):
                actswap.replace(model, new, "silu")
            if new == "prelu":
                with pytest.raises(actswap.UnsupportedModelError, match="keeps its parameters"):
                    actswap.restore(model)
                assert list(actswap.parameters(model))
                continue
            check_restore(model, model.module, cls, single, rank)
            assert type(model.module) is cls
            for got, want in zip(model.parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(got.grad, want.grad)


def fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))

    def sharded(model):
        return fully_shard(model, mesh=mesh)

    for cls in MODELS:
        for new in ("softplus", "prelu"):
            other = sharded(actswap.replace(cls(), "relu", new))
            model, single = check_training(
                actswap.replace(cls(), "relu", new), sharded, rank, full=lambda t: t.full_tensor()
            )
            with pytest.raises(actswap.UnsupportedModelError, match="swap before wrapping"):
                actswap.replace(model, new, "silu")
            if new == "prelu":
                with pytest.raises(actswap.UnsupportedModelError, match="keeps its parameters"):
                    actswap.restore(model)
                continue
            check_restore(model, model, cls, single, rank)
            for got, want in zip(model.parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(got.grad.full_tensor(), want.grad)
            # fully_shard gives all models of a class one class: the other one keeps its swap
            assert len(actswap.history(other)) == 1
            found = [m for m in other.modules() if isinstance(m, actswap.nn.Softplus)]
            assert found
            actswap.restore(other)
            assert type(other) is type(model) or type(other).__bases__ == type(model).__bases__


def by_layer(rank):
    """Every layer sharded by itself, as large models are, the activations between them not."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))

    def sharded(model):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    for cls in MODELS:
        model, single = check_training(
            actswap.replace(cls(), "relu", "softplus"), sharded, rank, full=lambda t: t.full_tensor()
        )
        check_restore(model, model, cls, single, rank)


def _outcome(call, *args):
    try:
        return call(*args)
    except NotImplementedError as error:
        return str(error)


def sharded_tensors(rank):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    upstream = DATA.cos()

    def run(f, place):
        x = distribute_tensor(DATA, mesh, [place]).requires_grad_()
        y = f(x * 1)
        assert isinstance(y, DTensor) and y.placements == (place,)
        (y * distribute_tensor(upstream, mesh, [place])).sum().backward()
        return y.full_tensor(), x.grad.full_tensor()

    for name in actswap.names():
        activation = actswap.get(name)
        for place, inplace in (
            (Shard(0), False),
            (Shard(1), name != "rrelu"),
            (Replicate(), False),
        ):  # it has no rrelu_
            f = partial(actswap.functional.function(name), inplace=inplace)
            got = _outcome(run, f, place)
            if isinstance(got, str):  # DTensor has no rule for some kernels, whoever calls them
                assert "does not have a sharding strategy" in got
                assert got == _outcome(run, partial(NATIVE[name], inplace=False, **activation.bind({})), place)
                continue
            x = DATA.clone().requires_grad_()
            y = f(x * 1)
            (y * upstream).sum().backward()
            torch.testing.assert_close(got, (y, x.grad))
    sharded = distribute_tensor(DATA, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        actswap.nn.SwishBeta(num_parameters=6)(sharded)
    module = actswap.nn.SwishBeta(num_parameters=6)
    dist.broadcast(module.beta.data, 0)
    single = copy.deepcopy(module)
    module.beta = nn.Parameter(distribute_tensor(module.beta.detach(), mesh, [Replicate()]))
    module(sharded).sum().backward()
    single(DATA).sum().backward()
    torch.testing.assert_close(module.beta.grad.full_tensor(), single.beta.grad)


BODIES = {
    "distributed data parallel": ddp,
    "fully sharded": fsdp,
    "fully sharded by layer": by_layer,
    "sharded tensors": sharded_tensors,
}


@pytest.mark.parametrize("name", BODIES)
def test_in_two_processes(ran, name):
    finished, problem = ran
    if name not in finished:
        raise AssertionError(f"{name} did not finish") from problem
