"""Rewriting: a function compiled again with chosen expressions changed, and the same change as text."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType

from actswap.source import (
    FunctionNode,
    Method,
    Position,
    Unverified,
    compile_statement,
    nested_codes,
    self_name,
    verify,
)


@dataclass(frozen=True)
class CallEdit:
    """One call expression that becomes `self.<slot>(<argument>)`.

    Args:
        position: where the call stands.
        slot: the attribute to call instead.
        argument: which part of the call carries the tensor: a positional index, a keyword, or -1 for the object whose
            method is called.
        guard: where what is called is picked at run time, the test by which it is the activation; the call then
            becomes `self.<slot>(<argument>) if <guard> else <call>`.
    """

    position: Position
    slot: str
    argument: int | str
    guard: str | None = None


@dataclass(frozen=True)
class ReferenceEdit:
    """One reference to a helper function that becomes `self.<name>`, the helper as a method.

    Args:
        position: where the name or attribute stands.
        name: the method's name.
    """

    position: Position
    name: str


Edit = CallEdit | ReferenceEdit
OWNER = "actswap_owner"
"""The first argument of a helper function that became a method."""


class _Rewriter(ast.NodeTransformer):
    """Replaces expressions by position. What it does not replace is the same node as in the original tree."""

    def __init__(self, edits: Iterable[Edit], owner: str) -> None:
        self.edits = {edit.position: edit for edit in edits}
        self.owner = owner
        self.done: set[Position] = set()

    def _attribute(self, edit: Edit, name: str, node: ast.expr) -> ast.Attribute:
        self.done.add(edit.position)
        value = ast.copy_location(ast.Name(self.owner, ast.Load()), node)
        return ast.copy_location(ast.Attribute(value, name, ast.Load()), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        edit = self.edits.get(Position.of(node))
        self.generic_visit(node)
        if not isinstance(edit, CallEdit):
            return node
        slot = self._attribute(edit, edit.slot, node)
        call = ast.copy_location(ast.Call(slot, [tensor(node, edit.argument)], []), node)
        if edit.guard is None:
            return call
        test = ast.parse(edit.guard, mode="eval").body
        for part in ast.walk(test):
            ast.copy_location(part, node)
        return ast.copy_location(ast.IfExp(test, call, copy.deepcopy(node)), node)

    def _reference(self, node: ast.expr) -> ast.AST:
        edit = self.edits.get(Position.of(node))
        if isinstance(edit, ReferenceEdit):
            return self._attribute(edit, edit.name, node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._reference(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._reference(node)


def tensor(call: ast.Call, argument: int | str) -> ast.expr:
    """The expression of a call that carries the tensor, by `CallEdit.argument`."""
    if argument == -1:
        assert isinstance(call.func, ast.Attribute)
        return call.func.value
    if isinstance(argument, int):
        return call.args[argument]
    return next(keyword.value for keyword in call.keywords if keyword.arg == argument)


def edited_statement(method: Method, edits: Iterable[Edit], helper: bool = False) -> ast.stmt:
    """A copy of the method's top-level statement with the expressions replaced.

    Args:
        helper: the function is no method yet: it gets the owner as one more first argument.
    """
    owner = OWNER if helper else self_name(method.node)
    assert owner is not None
    statement = copy.deepcopy(method.statement)
    if helper:
        nodes = zip(ast.walk(method.statement), ast.walk(statement), strict=True)
        node = next(new for old, new in nodes if old is method.node)
        assert isinstance(node, FunctionNode)
        spec = node.args
        (spec.posonlyargs or spec.args).insert(0, ast.copy_location(ast.arg(OWNER), node))
    rewriter = _Rewriter(edits, owner)
    result = rewriter.visit(statement)
    missing = rewriter.edits.keys() - rewriter.done
    if missing:
        raise Unverified(f"source differs: no call at {sorted(missing)} of {method.function.__qualname__}")
    assert isinstance(result, ast.stmt)
    return result


def rewrite(function: FunctionType, edits: Iterable[Edit], helper: bool = False) -> FunctionType:
    """The function compiled with expressions replaced; its globals, defaults, closure cells and attributes are the old.

    Raises:
        Unverified: its source is not what runs, or has no such expression at one of the positions.
    """
    method = verify(function)
    old = function.__code__
    code = compile_statement(edited_statement(method, edits, helper), method.text, old.co_filename, old.co_flags)
    for index in method.route:
        code = nested_codes(code)[index]
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    new = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, tuple(cells[n] for n in code.co_freevars)
    )
    return dressed(new, function)


def dressed(new: FunctionType, old: FunctionType) -> FunctionType:
    """The new function with the old one's names, annotations and attributes."""
    new.__kwdefaults__ = old.__kwdefaults__
    new.__annotations__ = old.__annotations__
    new.__qualname__, new.__module__, new.__doc__ = old.__qualname__, old.__module__, old.__doc__
    new.__dict__.update(old.__dict__)
    return new


def edited_text(method: Method, edits: Iterable[Edit], helper: bool = False) -> list[str]:
    """The file's lines with the expressions replaced in the text, for a diff that a person reads.

    Only the text around the tensor's own expression changes, so that its spelling stays.
    """
    lines = [line.encode() for line in method.text.splitlines(keepends=True)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text = b"".join(lines)
    owner = OWNER if helper else self_name(method.node)
    nodes = {Position.of(node): node for node in ast.walk(method.node) if isinstance(node, ast.Call)}

    def span(p: Position) -> tuple[int, int]:
        return starts[p.line - 1] + p.column, starts[p.end_line - 1] + p.end_column

    def render(start: int, end: int, inside: list[Edit]) -> bytes:
        result, at = b"", start
        for edit in inside:
            first, last = span(edit.position)
            if first < at or last > end:
                continue
            if isinstance(edit, CallEdit):
                kept = span(Position.of(tensor(nodes[edit.position], edit.argument)))
                within = [e for e in inside if kept[0] <= span(e.position)[0] and span(e.position)[1] <= kept[1]]
                new = f"{owner}.{edit.slot}(".encode() + render(*kept, within) + b")"
                if edit.guard is not None:
                    others = [e for e in inside if e is not edit and first <= span(e.position)[0] < last]
                    new = b"(" + new + f" if {edit.guard} else ".encode() + render(first, last, others) + b")"
            else:
                new = f"{owner}.{edit.name}".encode()
            result += text[at:first] + new
            at = last
        return result + text[at:end]

    ordered = sorted(edits, key=lambda e: (span(e.position)[0], -span(e.position)[1]))
    arguments = [*method.node.args.posonlyargs, *method.node.args.args]
    if helper and arguments:
        at = span(Position.of(arguments[0]))[0]
        new = render(0, at, ordered) + f"{OWNER}, ".encode() + render(at, len(text), ordered)
    else:
        new = render(0, len(text), ordered)
    return new.decode().splitlines(keepends=True)
