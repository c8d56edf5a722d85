"""The classic two-matrix regression network, trained by hand with relu, then softplus, then swish.

The network's relu is no layer and not even a call of relu: it is the `.clamp(min=0)` between two matrix products. It is
found and swapped where it stands. The data: 100 patients of scikit-learn's diabetes set.

    python examples/regression.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import actswap

ROWS, HIDDEN, RATE = 100, 50, 0.02
ACTIVATIONS = "relu", "softplus", "swish"


class TwoMatrices(nn.Module):
    """Inputs of shape (rows, 10) to outputs of shape (rows, 1), without biases."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(inputs, hidden) / inputs**0.5)
        self.w2 = nn.Parameter(torch.randn(hidden, 1) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The prediction."""
        return torch.mm(torch.mm(x, self.w1).clamp(min=0), self.w2)


def load() -> tuple[Tensor, Tensor]:
    """Inputs and targets, each column with mean 0 and variance 1."""
    data = load_diabetes()
    inputs = torch.tensor(data.data[:ROWS], dtype=torch.float32)
    targets = torch.tensor(data.target[:ROWS], dtype=torch.float32).unsqueeze(1)
    return (inputs - inputs.mean(0)) / inputs.std(0), (targets - targets.mean(0)) / targets.std(0)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, every: int) -> dict[int, float]:
    """Gradient descent without an optimiser; the loss at every `every`-th step."""
    seen = {}
    for step in range(steps + 1):
        loss = (model(x) - y).pow(2).mean()
        if step % every == 0:
            seen[step] = loss.item()
            print(f"  step {step:4d}  loss {seen[step]:.4f}")
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= RATE * gradient
    return seen


def main() -> None:
    """Train from the same start with each activation, and print one table of losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="print the loss at every such step")
    args = parser.parse_args()
    torch.manual_seed(0)
    x, y = load()
    model = TwoMatrices(x.shape[1], HIDDEN)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    print(actswap.find(model))

    losses = {}
    for old, new in zip((None, *ACTIVATIONS), ACTIVATIONS, strict=False):
        if old is not None:
            actswap.replace(model, old, new, example_inputs=x)
        model.load_state_dict(start)
        print(f"\n{new}")
        losses[new] = train(model, x, y, args.steps, args.every)

    print("\nWhat was changed in the source:")
    print(actswap.diff(model))
    print("\n step" + "".join(f"{name:>10}" for name in losses))
    for step in losses["relu"]:
        print(f"{step:5d}" + "".join(f"{seen[step]:10.4f}" for seen in losses.values()))


if __name__ == "__main__":
    main()
