"""The README's commands are the ones that CI runs, its Python runs, and the package says what it needs."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

import actswap

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


def commands(name: str) -> list[str]:
    """The lines of the README's code block with this marker."""
    block = re.search(rf"^<!-- command: {name} -->\n```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert block, f"README.md has no block marked {name!r}"
    return block[1].splitlines()


def test_ci_runs_the_readmes_test_command_word_for_word():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (extraction,) = re.findall(r"^command=.*$", script, re.MULTILINE)
    taken = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'{extraction}\nprintf "%s" "$command"'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [taken.stdout] == commands("test")
    assert 'bash -euo pipefail -c "$command"' in script


@pytest.mark.parametrize(
    ("name", "extra", "runs"), [("main job", "examples", "finetune_timm.py"), ("test", "test", "pytest")]
)
def test_each_command_is_one_line_that_does_all_set_up(name, extra, runs):
    (command,) = commands(name)
    make, install, run = command.split(" && ")
    assert make == "python3 -m venv .venv"
    assert install == f'.venv/bin/pip install -e ".[{extra}]"'
    assert run.endswith(runs)
    assert extra in EXTRAS


def test_ci_runs_what_pre_commit_runs():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    hooks = re.findall(r"entry: \.venv/bin/(.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    checks = re.search(r"^for check in (.*); do$", script, re.MULTILINE)
    assert checks
    assert re.findall(r'"(.*?)"', checks[1]) == hooks == ["ruff check", "ruff format --check", "mypy"]


def test_contributing_has_three_commands():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert block
    lines = [line.partition("#")[0].strip() for line in block[1].splitlines()]
    assert lines == ['python3 -m venv .venv && .venv/bin/pip install -e ".[dev]"', ".venv/bin/pytest", ".ci/run"]


def test_torch_is_the_one_hard_dependency():
    assert PROJECT["project"]["dependencies"] == ["torch>=2.6"]
    assert {"vision", "cli", "plot", "examples", "test", "dev"} <= set(EXTRAS)


def test_the_package_is_typed_and_versioned():
    assert (ROOT / "actswap" / "py.typed").exists()
    assert re.fullmatch(r"\d+\.\d+\.\d+", actswap.__version__)


def test_every_public_name_exists_once():
    assert len(actswap.__all__) == len(set(actswap.__all__))
    assert all(hasattr(actswap, name) for name in actswap.__all__)


def test_the_readmes_python_runs(tmp_path, capsys, monkeypatch):
    """Every block in turn, as one file with the README's line numbers; the first, which downloads, is only parsed."""
    lines, blocks, inside = [], 0, False
    for line in README.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            blocks += inside
            lines.append("")
        else:
            lines.append(line if inside and blocks > 1 else "")
    (first,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[:1]
    compile(first, "README.md", "exec")
    file = tmp_path / "readme.py"
    file.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(file), run_name="readme")
    assert blocks >= 6
    assert "softplus" in capsys.readouterr().out
