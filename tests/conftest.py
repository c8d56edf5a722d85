"""What every test gets: a fixed seed, one thread, and PyTorch's global state as it was."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

# Before PyTorch is loaded: on a busy machine, threads that wait by spinning take the cores from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """One thread: sums round the same everywhere, and the tensors here are too small to gain from more."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def reproducible() -> Iterator[None]:
    """Seed every generator before a test, and fail a test that leaves a global switch of PyTorch turned."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    left = {
        "grad mode": torch.is_grad_enabled(),
        "float32 default dtype": torch.get_default_dtype() is torch.float32,
        "cpu default device": torch.get_default_device().type == "cpu",
        "nondeterministic algorithms allowed": not torch.are_deterministic_algorithms_enabled(),
    }
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    assert all(left.values()), f"the test left PyTorch without: {[name for name, ok in left.items() if not ok]}"
