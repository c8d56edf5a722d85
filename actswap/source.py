"""A function's source, verified.

Source is not trusted. The enclosing top-level statement is compiled *unedited* first, and the function's code object
found in it must equal the live one: bytecode, names, constants, free variables, positions. (The module's imports are
compiled with it: CPython chooses instructions by them.) That settles closures, decorators, lambdas and name mangling,
and when the edited statement is compiled in the same way, nothing but the chosen expressions has changed.
"""

from __future__ import annotations
import __future__ as futures

import ast
import functools
import hashlib
import inspect
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import NamedTuple

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUTURE_FLAGS = functools.reduce(
    lambda flags, name: flags | getattr(futures, name).compiler_flag, futures.all_feature_names, 0
)


class Unverified(Exception):
    """A function whose source cannot be had, or is not what runs. The text says which."""


class Position(NamedTuple):
    """Where an expression stands in its file: lines from 1, columns in UTF-8 bytes from 0."""

    line: int
    end_line: int
    column: int
    end_column: int

    @classmethod
    def of(cls, node: ast.AST) -> Position:
        """The position of a node."""
        return cls(node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Method:
    """A function whose source is verified.

    Args:
        function: the live function.
        node: its node in the syntax tree of `statement`.
        statement: the top-level statement that holds it. Shared and cached: never changed.
        route: how to come from the statement's code object to the function's: indices among nested code objects.
        text: the source of the whole file.
    """

    function: FunctionType
    node: FunctionNode
    statement: ast.stmt
    route: tuple[int, ...]
    text: str

    @property
    def digest(self) -> str:
        """A hash of the function's own source text."""
        first = _start(self.node) if isinstance(self.node, ast.stmt) else self.node.lineno
        lines = self.text.splitlines(keepends=True)[first - 1 : self.node.end_lineno]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _start(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return int(min([statement.lineno, *(d.lineno for d in decorators)]))


@functools.lru_cache(maxsize=256)
def _imports(text: str) -> list[ast.stmt]:
    """The imports of a module's own scope. CPython compiles `F.relu(x)` differently where `F` is imported there."""
    found: list[ast.stmt] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__":
            found.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(_parse(text))
    return found


def compile_statement(statement: ast.stmt, text: str, filename: str, flags: int) -> CodeType:
    """A top-level statement of a file as the interpreter compiled it: with the file's imports in scope."""
    module = ast.Module(body=[*_imports(text), statement], type_ignores=[])
    code = compile(module, filename, "exec", flags=flags & _FUTURE_FLAGS, dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def nested_codes(code: CodeType) -> list[CodeType]:
    """The code objects directly inside another."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _walk(code: CodeType, route: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], CodeType]]:
    yield route, code
    for index, inner in enumerate(nested_codes(code)):
        yield from _walk(inner, (*route, index))


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those nested in it."""
    return (inner for _, inner in _walk(code))


def _equal(a: CodeType, b: CodeType) -> bool:
    """Whether two code objects are the same code at the same place; nested ones are compared through the constants."""
    return (
        a == b
        and a.co_freevars == b.co_freevars
        and a.co_cellvars == b.co_cellvars
        and list(a.co_positions()) == list(b.co_positions())
    )


@functools.lru_cache(maxsize=1024)
def _compiled(text: str, start: int, filename: str, flags: int) -> list[tuple[tuple[int, ...], CodeType]]:
    """Every code object of one unedited top-level statement."""
    statement = next(s for s in _parse(text).body if _start(s) == start)
    return list(_walk(compile_statement(statement, text, filename, flags)))


@functools.lru_cache(maxsize=1024)
def _functions(text: str, start: int) -> list[FunctionNode]:
    """Every function in one top-level statement."""
    statement = next(s for s in _parse(text).body if _start(s) == start)
    return [node for node in ast.walk(statement) if isinstance(node, FunctionNode)]


def verify(function: FunctionType) -> Method:
    """The function's syntax tree, once its source is proven to be what runs.

    Raises:
        Unverified: there is no source, or compiling it does not give the live code.
    """
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise Unverified(f"no source for {function.__qualname__} ({code.co_filename})")
    text = "".join(lines)
    try:
        tree = _parse(text)
    except SyntaxError as error:
        raise Unverified(f"source differs: {code.co_filename} does not parse ({error.msg})") from error
    line = code.co_firstlineno
    for statement in tree.body:
        if _start(statement) <= line <= (statement.end_lineno or 0):
            break
    else:
        raise Unverified(f"source differs: {code.co_filename} has nothing at line {line}")
    found = _compiled(text, _start(statement), code.co_filename, code.co_flags & _FUTURE_FLAGS)
    routes = [route for route, candidate in found if _equal(candidate, code)]
    if len(routes) != 1:
        what = "does not compile to what runs" if not routes else "stands there more than once"
        raise Unverified(f"source differs: {function.__qualname__} at {code.co_filename}:{line} {what}")
    nodes = [node for node in _functions(text, _start(statement)) if _is_node_of(node, code)]
    if len(nodes) != 1:
        raise Unverified(f"source differs: {function.__qualname__} at {code.co_filename}:{line} is ambiguous")
    (node,) = nodes
    return Method(function, node, statement, routes[0], text)


def _is_node_of(node: FunctionNode, code: CodeType) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name == code.co_name and _start(node) == code.co_firstlineno
    if code.co_name != "<lambda>" or node.lineno != code.co_firstlineno:
        return False
    # several may start in one line; what one returns stands where its body stands
    return tuple(Position.of(node.body)) in set(code.co_positions())


def self_name(node: FunctionNode) -> str | None:
    """The name of the first argument, which a method's caller fills with the instance."""
    positional = [*node.args.posonlyargs, *node.args.args]
    return positional[0].arg if positional else None


def filled(cell: CellType) -> bool:
    """Whether a closure cell has a value yet."""
    try:
        cell.cell_contents  # noqa: B018  (reading it is the test)
    except ValueError:
        return False
    return True


def location(function: FunctionType, line: int) -> str:
    """`file:line` for printing."""
    return f"{inspect.getsourcefile(function) or function.__code__.co_filename}:{line}"
