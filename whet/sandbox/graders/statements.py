"""Analysis of Python source: which names each top-level statement binds, changes and reads."""

from __future__ import annotations
import __future__

import ast
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_AT_ONCE = ("lambda", "listcomp", "setcomp", "dictcomp", "genexpr")
"""Scopes (by their `symtable` names) that may run as part of the enclosing statement."""


@dataclass(frozen=True)
class Unit:
    """A source file, or a cell of a notebook.

    Attributes:
        file: Name under which it was compiled.
        lines: Its lines with line endings.
        statements: Its top-level statements, including the body of `if __name__ == "__main__":`.
        flags: Of its `from __future__` imports, for `compile`.
    """

    file: str
    lines: Sequence[str]
    statements: Sequence[ast.stmt]
    flags: int

    @classmethod
    def parse(cls, file: str, lines: Sequence[str]) -> Unit:
        """Parse it; source that does not parse (edited meanwhile) has no statements."""
        try:
            body = ast.parse("".join(lines), file).body
        except (SyntaxError, ValueError):
            body = []
        flags = 0
        for node in body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                for alias in node.names:
                    flags |= getattr(__future__, alias.name).compiler_flag
        return cls(file, lines, [part for node in body for part in _unguarded(node)], flags)

    def text(self, node: ast.stmt) -> str:
        """Return the source of a statement with its decorators, in a form that compiles on its own."""
        lines = list(self.lines[first_line(node) - 1 : node.end_lineno])
        lines[-1] = lines[-1].encode()[: node.end_col_offset].decode()
        before = lines[0].encode()[: node.col_offset].decode()
        if before.strip():  # after a semicolon or a colon
            return ast.unparse(node) + "\n"
        # Keep the indentation, under an `if`: multi-line strings must not lose their own blanks.
        return ("if True:\n" if before else "") + "".join(lines) + "\n"

    def line(self, node: ast.stmt) -> int:
        """Return the line that `text` starts at; a leading `if` takes the place of the line above."""
        return max(1, first_line(node) - (node.col_offset > 0))


def first_line(node: ast.stmt) -> int:
    """Return a statement's first line; for a definition that of its first decorator."""
    return min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", ()))])


def is_star_import(node: ast.stmt) -> bool:
    """Say whether a statement is `from module import *`."""
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    names: set[str] = set()
    for part in _own_nodes(node):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            names.add(part.id)
        elif isinstance(part, DEFINITIONS):
            names.add(part.name)
        elif isinstance(part, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in part.names}
    return names


def changed_names(node: ast.stmt) -> set[str]:
    """Return the names whose objects a statement may change: `name[key] = 1`, `name.field = 1`, `name.update()`."""
    names: set[str] = set()
    for part in _own_nodes(node):
        root: Any = None
        if isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
            root = part
        elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            root = part.value.func
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name):
            names.add(root.id)
    return names


def set_names(node: ast.stmt) -> set[str]:
    """Return the names on whose objects an assignment sets an attribute or item: `module.field = 1`, `context().field =
    1`."""
    return changed_names(node) if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else set()


def read_names(text: str) -> tuple[set[str], set[str]]:
    """Return the global names that a text reads when it runs, and those that its functions read when called."""
    at_once: set[str] = set()
    later: set[str] = set()

    def visit(table: symtable.SymbolTable, names: set[str], *, is_top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (is_top or symbol.is_global()):
                names.add(symbol.get_name())
        for child in table.get_children():
            is_later = child.get_type() == "function" and child.get_name() not in _AT_ONCE
            visit(child, later if is_later else names, is_top=False)

    visit(symtable.symtable(text, "<whet>", "exec"), at_once, is_top=True)
    return at_once, later


def _unguarded(node: ast.stmt) -> list[ast.stmt]:
    """Return the body of `if __name__ == "__main__":`; any other statement itself."""
    if isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == "__name__ == '__main__'":
        return [part for inner in node.body for part in _unguarded(inner)]
    return [node]


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a statement without the bodies of its functions and classes."""
    yield node
    if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)
