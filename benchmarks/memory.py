"""Bytes that a training forward keeps for its backward: PyTorch's ops and ours. Prints a Markdown table.

python benchmarks/memory.py
"""

from __future__ import annotations

import platform

import timm
import torch
from torch import nn

import actswap

SWAPS = (
    ("resnet50", "relu", "softplus", nn.Softplus),
    ("regnety_032", "relu", "softplus", nn.Softplus),
    ("mobilenetv2_100", "relu6", "relu6", nn.ReLU6),
    ("efficientnet_lite0", "relu6", "relu6", nn.ReLU6),
)
BATCH, SIZE = 4, 224


def kept(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes kept by one forward in training mode."""
    return int(actswap.memory(model, x)["total"].data["bytes"])


def row(name: str, old: str, new: str, native: type[nn.Module]) -> str:
    """One line of the table."""
    model, x = timm.create_model(name).train(), torch.randn(BATCH, 3, SIZE, SIZE)
    before = kept(model, x)
    with actswap.swapped(model, old, native, validate=False):
        pytorch = kept(model, x)
    with actswap.swapped(model, old, new, validate=False):
        ours = kept(model, x)
    return f"| {name} | {old} to {new} | {before / 1e6:,.0f} MB | {pytorch / before:.3f} | {ours / before:.3f} |"


def main() -> None:
    """Print the table and what it was measured with."""
    print(f"Batch {BATCH}, {SIZE} px, training mode, float32, CPU; torch {torch.__version__}, timm {timm.__version__},")
    print(f"Python {platform.python_version()}, {platform.machine()}.\n")
    print("| model | swap | before | PyTorch's op | actswap |")
    print("|---|---|---|---|---|")
    for swap in SWAPS:
        print(row(*swap))


if __name__ == "__main__":
    main()
