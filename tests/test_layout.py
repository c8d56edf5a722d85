"""Imports go one way, each part keeps to its job, and importing the package stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "actswap"

# Each line may import those above it.
LEVELS = [
    {"errors", "report"},
    {"activation"},
    {"piecewise", "stable", "targets"},
    {"smooth"},
    {"gated"},
    {"learnable"},
    {"catalog"},
    {"functions"},
    {"autograd"},
    {"comparing", "subjects", "storages", "progress"},
    {"accuracy"},
    {"transforms", "manners"},
    {"checking"},
    {"registry"},
    {"functional", "adapters", "plot"},
    {"nn"},
    {"patterns"},
    {"recognize"},
    {"source"},
    {"rewriting", "scope", "dataflow"},
    {"classes", "callees", "graph", "aliasing", "objects", "opaque"},
    {"attributes", "calls", "mentions"},
    {"finder"},
    {"methods", "sites"},
    {"scan", "running"},
    {"audit", "kept"},
    {"finding", "portable"},
    {"metadata"},
    {"edits"},
    {"replacement", "selection", "structure", "values"},
    {"plan", "results"},
    {"validation", "equivalence"},
    {"swap"},
    {"recipes", "ejection", "memory"},
    {"finetune", "testing"},
    {"cli"},
    {"__init__", "__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}

# Who may import what besides torch and the standard library.
FOREIGN = {
    "progress": {"rich"}, "plot": {"matplotlib"}, "cli": {"typer", "rich", "timm", "torchvision", "matplotlib"},
    "testing": {"pytest"},
}  # fmt: skip

LONGEST = 360

FILES = sorted(PACKAGE.rglob("*.py"))


def part(file: Path) -> str:
    """The name in LEVELS that a file belongs to: its stem, or its folder's name."""
    inside = file.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, wherever in it; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def identify(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@pytest.mark.parametrize("file", FILES, ids=identify)
def test_imports_go_one_way(file):
    own = part(file)
    assert own in LEVEL, f"{own}: give it a place in LEVELS"
    for line, name in imports(file):
        top, *rest = name.split(".")
        if top != "actswap":
            continue
        imported = rest[0] if rest and rest[0] in LEVEL else "__init__"
        if own == imported != "__init__":
            continue  # within a folder
        assert LEVEL[imported] < LEVEL[own], f"{file}:{line}: {own} may not import {imported}"


@pytest.mark.parametrize("file", FILES, ids=identify)
def test_torch_is_the_only_foreign_import(file):
    allowed = {"actswap", "torch", *sys.stdlib_module_names, *FOREIGN.get(part(file), set())}
    foreign = [(line, name) for line, name in imports(file) if name.split(".")[0] not in allowed]
    assert not foreign


@pytest.mark.parametrize("name", ["errors", "report"])
def test_errors_and_reports_know_no_torch(name):
    assert not [found for _, found in imports(PACKAGE / f"{name}.py") if found.split(".")[0] == "torch"]


@pytest.mark.parametrize("file", FILES, ids=identify)
def test_only_what_reads_graphs_touches_fx(file):
    if part(file) not in ("graph", "dataflow", "aliasing"):
        assert not [(line, name) for line, name in imports(file) if name.startswith("torch.fx")]


@pytest.mark.parametrize("file", FILES, ids=identify)
def test_only_the_command_line_prints(file):
    calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    printing = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert part(file) in ("cli", "__main__") or not printing


@pytest.mark.parametrize("file", FILES, ids=identify)
def test_a_file_is_short_enough_to_read(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_importing_the_package_loads_no_optional_package():
    optional = "timm", "torchvision", "transformers", "rich", "typer", "matplotlib", "sklearn", "pytest"
    script = f"import sys, actswap; print(*[name for name in {optional!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
