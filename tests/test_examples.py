"""The examples run, and what they print and write says what it should."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(script: str, *args: str, cwd: Path) -> str:
    """What the example prints, run as a user runs it, but a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / script), *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory):
    """Printed text, report and folder of one quick run."""
    folder = tmp_path_factory.mktemp("finetune")
    printed = run("finetune_timm.py", "--quick", "--out", "out", cwd=folder)
    return printed, (folder / "out" / "report.md").read_text(encoding="utf-8"), folder / "out"


def section(report: str, title: str) -> str:
    """The part of a report under a heading that contains `title`."""
    (part,) = [part for part in re.split(r"^## ", report, flags=re.MULTILINE) if title in part.partition("\n")[0]]
    return part


def test_finetune_starts_from_real_weights(finetuned):
    recognised = section(finetuned[1], "The pretrained network recognises")
    assert "chelsea: class 282, tiger cat" in recognised
    assert "coffee: class 967, espresso" in recognised


def test_finetune_shows_every_site_and_the_validation(finetuned):
    printed, report, _ = finetuned
    sites = section(report, "Its activations")
    assert len(re.findall(r"^.*\bbn\d\.act\b.*\brelu6\b.*$", sites, re.MULTILINE)) == 33
    proof = section(report, "The swap, validated")
    assert "passed" in proof
    assert "FAIL" not in proof
    assert proof.split("```text\n")[1].split("\n```")[0] in printed


def test_finetune_trains_both_networks_and_compares_them(finetuned):
    rows = re.findall(r"^\| (\w+) \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+) MB \| (\d+) s \|$", finetuned[1], re.MULTILINE)
    table = {name: [float(figure) for figure in figures] for name, *figures in rows}
    assert list(table) == ["relu6", "softplus"]
    for head, whole, megabytes, _ in table.values():
        assert head > 50
        assert whole > 70
        assert megabytes > 1
    assert table["softplus"][2] <= table["relu6"][2]


def test_finetune_undoes_the_swap(finetuned):
    undone = section(finetuned[1], "The swap undone")
    assert "class EfficientNet: the original\n" in undone
    assert "forward: the original function\n" in undone
    assert "33 of 33 are the original objects" in undone
    assert "equal, bit for bit" in undone


def test_finetune_draws_both_plots(finetuned):
    _, report, folder = finetuned
    for name in re.findall(r"!\[.*?\]\((.*?)\)", report):
        pixels = matplotlib.image.imread(folder / name)
        assert min(pixels.shape[:2]) > 200
        assert pixels[..., :3].std() > 0.03  # something is drawn on it
    assert {file.name for file in folder.iterdir()} == {"report.md", "activations.png", "training.png"}


def test_regression_prints_one_table_of_falling_losses(tmp_path):
    printed = run("regression.py", cwd=tmp_path)
    lines = printed.splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.split() == ["step", "relu", "softplus", "swish"]]
    rows = [[float(cell) for cell in line.split()] for line in lines[head + 1 :]]
    assert [row[0] for row in rows] == list(range(0, 1001, 100))
    for column in range(1, 4):
        losses = [row[column] for row in rows]
        assert all(later < earlier for earlier, later in itertools.pairwise(losses))
        assert losses[-1] < 0.45
    assert len(set(rows[-1][1:])) == 3  # three activations, three networks
    assert re.search(r"^\+.*torch\.mm\(self\.\w+\(torch\.mm\(x, self\.w1\)\), self\.w2\)", printed, re.MULTILINE)
