"""Report: what was checked, line by line, as data and as a table."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "fail", "note"]
"""A line passed, failed, or states a fact that is neither (`note`): what was measured, or could not be checked."""

_MARKS: dict[Outcome, str] = {"pass": "ok", "fail": "FAIL", "note": "--"}


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "site"), counted(2, "site")
    ('1 site', '2 sites')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True)
class Line:
    """One property that was looked at.

    Args:
        name: what was checked, a few words.
        outcome: `"pass"`, `"fail"`, or `"note"` for a measured fact.
        detail: what was seen, in words: the worst input, both values, the error and the bound.
        data: the same as numbers, for `to_dict`; JSON types only.
    """

    name: str
    outcome: Outcome
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The result of a validation, a check or a measurement.

    `bool(report)` is whether nothing failed; `str(report)` is a table.

    >>> report = Report("demo", (Line("values", "pass", "0 of 8 differ"),))
    >>> bool(report)
    True
    >>> print(report)
    demo: passed
      ok    values  0 of 8 differ
    """

    title: str
    lines: tuple[Line, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no line failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Line, ...]:
        """The lines that failed."""
        return tuple(line for line in self.lines if line.outcome == "fail")

    def __bool__(self) -> bool:
        return self.passed

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __getitem__(self, name: str) -> Line:
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(f"{name!r} is not among {[line.name for line in self.lines]}")

    def __contains__(self, name: object) -> bool:
        return any(line.name == name for line in self.lines)

    def extended(self, lines: Iterable[Line]) -> Report:
        """This report with more lines at its end."""
        return Report(self.title, (*self.lines, *lines))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {"title": self.title, "passed": self.passed, "lines": [asdict(line) for line in self.lines]}

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def table(self, width: int | None = None) -> str:
        """The table, its last column wrapped to fit into `width` characters.

        >>> print(Report("demo", (Line("values", "pass", "0 of 8 points differ from PyTorch"),)).table(width=40))
        demo: passed
          ok    values  0 of 8 points differ
                        from PyTorch
        """
        verdict = "passed" if self.passed else f"{len(self.failures)} failed"
        longest = max((len(line.name) for line in self.lines), default=0)
        indent = " " * (longest + 10)
        rows = [f"{self.title}: {verdict}"]
        for line in self.lines:
            pieces = line.detail.split("\n")
            if width is not None:
                room = max(width - len(indent), 24)
                pieces = [part for piece in pieces for part in textwrap.wrap(piece, room) or [""]]
            detail = f"\n{indent}".join(pieces)
            rows.append(f"  {_MARKS[line.outcome]:<4}  {line.name:<{longest}}  {detail}".rstrip())
        return "\n".join(rows)

    def __str__(self) -> str:
        """The table, wrapped where it is printed on a terminal."""
        return self.table(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
