"""A progress bar for what takes longer than a moment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 2.0
"""Seconds before a bar is shown."""


class _Bar:
    """A bar that a timer shows, unless the work is done by then."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done, self.step = title, total, -1, ""
        self.lock, self.over = threading.Lock(), False
        self.shown: Any = None
        self.timer = threading.Timer(PATIENCE, self.show)
        self.timer.daemon = True
        self.timer.start()

    def show(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            return
        with self.lock:
            if not self.over:
                self.shown = Progress(console=Console(stderr=True), transient=True)
                self.shown.add_task("", total=self.total)
                self.update()
                self.shown.start()

    def begin(self, step: str) -> None:
        with self.lock:
            self.done, self.step = self.done + 1, step
            self.update()

    def update(self) -> None:
        if self.shown is not None:
            self.shown.update(0, completed=self.done, description=f"{self.title}: {self.step}")

    def finish(self) -> None:
        self.timer.cancel()
        with self.lock:
            self.over = True
            if self.shown is not None:
                self.shown.stop()


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error for `total` steps; the function it gives is called with the name of each, before it.

    It appears once `PATIENCE` is over, goes when the work is done, and needs a terminal and the package `rich`.

    >>> with progress("work", 2) as begin:
    ...     begin("one")
    ...     begin("two")
    """
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    bar = _Bar(title, total)
    try:
        yield bar.begin
    finally:
        bar.finish()
