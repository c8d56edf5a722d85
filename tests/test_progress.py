"""The progress bar: late, on a terminal only, gone at the end, and not missed where `rich` is not installed."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest

from actswap import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal_for(monkeypatch, patience=0.0) -> Terminal:
    """In the test itself: pytest sets standard error anew between a fixture and its test."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def waited(until) -> bool:
    end = time.monotonic() + 20
    while not until() and time.monotonic() < end:
        time.sleep(0.01)
    return until()


def test_a_long_run_shows_its_title_and_step_and_clears_them(monkeypatch):
    terminal = terminal_for(monkeypatch)
    with progress.progress("check relu", 2) as begin:
        begin("values")
        assert waited(lambda: "check relu: values" in terminal.getvalue())
        begin("compile")
        assert waited(lambda: "check relu: compile" in terminal.getvalue())
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_short_run_shows_nothing(monkeypatch):
    terminal = terminal_for(monkeypatch, patience=60.0)
    with progress.progress("check relu", 1) as begin:
        begin("values")
    assert terminal.getvalue() == ""


def test_an_error_ends_it(monkeypatch):
    terminal = terminal_for(monkeypatch)

    def work():
        with progress.progress("check relu", 1) as begin:
            begin("values")
            assert waited(lambda: "values" in terminal.getvalue())
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert terminal.getvalue().endswith("\x1b[2K")


def test_without_a_terminal_there_is_no_bar_and_no_thread(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    before = threading.active_count()
    with progress.progress("check relu", 1) as begin:
        begin("values")
        assert threading.active_count() == before
    assert sys.stderr.getvalue() == ""


def test_without_rich_there_is_no_bar(monkeypatch):
    terminal = terminal_for(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress.progress("check relu", 1) as begin:
        begin("values")
        assert waited(lambda: not [t for t in threading.enumerate() if isinstance(t, threading.Timer)])
    assert terminal.getvalue() == ""
