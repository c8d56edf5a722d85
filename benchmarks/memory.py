"""Bytes that a training forward keeps for its backward: relu, PyTorch's softplus, and ours. Prints a Markdown table.

python benchmarks/memory.py
"""

from __future__ import annotations

import platform

import timm
import torch
from torch import nn

import actswap

MODELS = ("resnet50", "regnety_032")
BATCH, SIZE = 4, 224


def kept(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes kept by one forward in training mode."""
    return int(actswap.memory(model, x)["total"].data["bytes"])


def row(name: str) -> str:
    """One line of the table."""
    model, x = timm.create_model(name).train(), torch.randn(BATCH, 3, SIZE, SIZE)
    relu = kept(model, x)
    with actswap.swapped(model, "relu", nn.Softplus, validate=False):
        native = kept(model, x)
    with actswap.swapped(model, "relu", "softplus", validate=False):
        ours = kept(model, x)
    return f"| {name} | {relu / 1e6:,.0f} MB | {native / relu:.3f} | {ours / relu:.3f} |"


def main() -> None:
    """Print the table and what it was measured with."""
    print(f"Batch {BATCH}, {SIZE} px, training mode, float32, CPU; torch {torch.__version__}, timm {timm.__version__},")
    print(f"Python {platform.python_version()}, {platform.machine()}.\n")
    print("| model | relu | nn.Softplus | actswap softplus |")
    print("|---|---|---|---|")
    for name in MODELS:
        print(row(name))


if __name__ == "__main__":
    main()
