"""Packs a function of the main script or of a notebook, as the source it needs, to send it to a worker process.

Importing the script there would run its top level again: its prints, its run folders, its training. So only the
statements that the function depends on are sent: its own `def`, those of its helpers and classes, imports, and
constants. A plain constant is sent by its current value, whatever computed it; any other object (a compiled pattern, a
client, a model) is recreated in the worker by the statement that created it here.

Nothing is pickled: a piece is text, and a failing one is reported with its line.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from whet.sandbox.graders.statements import (
    DEFINITIONS,
    Unit,
    bound_names,
    changed_names,
    first_line,
    is_star_import,
    read_names,
    set_names,
)
from whet.types import UserError

LONGEST_LITERAL = 1 << 20
"""Longest constant, in characters, that is sent by value; a longer one is recreated by its statement."""
_OWN_FILE = "move the function to its own file, and name that: path.py:function"
_REMEDY = f"create it inside the function, or {_OWN_FILE}"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (tuple, list, set, frozenset)
_OF_EVERY_MODULE = ("__name__", "__file__", "__package__", "__doc__")


def ship_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Pack a function object, so that `whet.sandbox.graders.loading.rebuild` can recreate it in another process.

    Args:
        function: A function of the main script or of a notebook (also a closure), or a `functools.partial` of one.

    Returns:
        A JSON object.

    Raises:
        UserError: If its source cannot be found, or it needs something that cannot be sent; names it and the remedy.
    """
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    main = vars(sys.modules["__main__"])
    name = _name_in(main, inner)
    source = inspect.unwrap(inner)
    label = name or getattr(source, "__name__", type(inner).__name__)
    if not isinstance(source, FunctionType):
        raise UserError(f"grader {label}: got {_kind(inner)}, expected a function; wrap it in a def")
    packer = _Packer(main if name else source.__globals__, _units_of(source), label)
    return packer.parcel(packer.add_value(function))


def ship_name(file: Path, name: str, live: Mapping[str, Any]) -> dict[str, Any]:
    """Pack a function of a file by its name, without running the file again.

    Args:
        file: The main script, or a file whose import starts a training.
        name: The function's name; the script may not have reached its definition yet.
        live: The file's current globals; {} if it was not run in this process.

    Returns:
        A JSON object, as `ship_function` returns.

    Raises:
        UserError: If there is no such function, or it needs something that cannot be sent.
    """
    packer = _Packer(live, [_read_unit(str(file))], name)
    is_found = callable(live[name]) if name in live else bool(packer.statements_for(name))
    if not is_found:
        body = packer.units[0].statements
        own = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        found = ", ".join([other for other in own if other[0] != "_"][:10]) or "no functions"
        raise UserError(f"grader '{file}:{name}': {file} has no function '{name}'; it has {found}")
    packer.add(name)
    return packer.parcel(name)


@dataclass
class _Packer:
    """Collects the pieces that one function needs, each after its own dependencies.

    Attributes:
        live: The current globals of the function's module.
        units: Its source; for a notebook all cells, in the order of their first run.
        label: The function's name, for messages.
        pieces: Text, file, first line, and flags for `compile`, of each piece.
    """

    live: Mapping[str, Any]
    units: Sequence[Unit]
    label: str
    pieces: list[tuple[str, str, int, int]] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _statements: set[int] = field(default_factory=set)

    def parcel(self, function: str) -> dict[str, Any]:
        """Return everything as a JSON object in which the function has this name."""
        file = self.units[0].file
        stem = "".join(char if char.isalnum() else "_" for char in Path(file).stem)
        return {
            "label": self.label,
            "module": f"whet_grader_{stem}",
            "file": file,
            "package": self.live.get("__package__") or "",
            "function": function,
            "pieces": self.pieces,
        }

    def add(self, name: str) -> None:
        """Add the object that a global name refers to, and its dependencies."""
        if name in self._names or name in _OF_EVERY_MODULE:
            return
        self._names.add(name)
        text = _as_source(name, self.live[name], self.live) if name in self.live else None
        if text is None:
            found = self.statements_for(name)
        elif _is_plain(self.live[name], frozenset()):
            found = []
        else:  # imported: with the attributes that the script sets on it
            found = self._every(lambda node: name in set_names(node))
        if text is not None:
            self.pieces.append((text, "<whet>", 1, 0))
        elif not found and name in self.live:
            self._refuse(f"`{name}` ({_kind(self.live[name])})", f"cannot be sent there; {_REMEDY}")
        elif not found and not hasattr(builtins, name):
            # Otherwise nothing defines it: it then fails as it would here, when it is reached.
            found = self._every(is_star_import)
        for unit, node in found:
            if id(node) not in self._statements:
                self._statements.add(id(node))
                self._add_text(unit.text(node), unit, unit.line(node))

    def add_value(self, value: Any) -> str:
        """Add an object that need not have a global name; return the name that it gets."""
        if name := _name_in(self.live, value):
            self.add(name)
            return name
        made = self._new_name()
        text = _as_source(made, value, self.live)
        if text is None and isinstance(value, functools.partial):
            words = [self.add_value(part) for part in (value.func, *value.args)]
            words += [f"{key}={self.add_value(part)}" for key, part in value.keywords.items()]
            made = self._new_name()
            text = f"from functools import partial as {made}\n{made} = {made}({', '.join(words)})\n"
        if text is None and isinstance(value, FunctionType):
            return self._add_function(value)
        if text is None:
            self._refuse(_kind(value), f"cannot be sent there; {_REMEDY}")
        self.pieces.append((text, "<whet>", 1, 0))
        return made

    def statements_for(self, name: str) -> list[tuple[Unit, ast.stmt]]:
        """Return the statements that bind a name, and those that change its object.

        Of several definitions the one that the name refers to counts, else the last; among notebook cells the newest.
        """
        code = _code_of(self.live.get(name))
        file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
        own = [unit for unit in self.units if unit.file == file]
        for unit in (*own, *reversed(self.units)):
            binding = [node for node in unit.statements if name in bound_names(node)]
            if not binding:
                continue
            defs = [node for node in binding if isinstance(node, DEFINITIONS)]
            exact = [node for node in defs if unit.file == file and first_line(node) == line]
            last = [*binding, *exact][-1]
            if isinstance(last, (*DEFINITIONS, ast.Import, ast.ImportFrom)):
                return [(unit, last)]
            later = [node for node in unit.statements if node.lineno >= binding[0].lineno]
            return [(unit, node) for node in later if name in bound_names(node) | changed_names(node)]
        return []

    def _every(self, condition: Callable[[ast.stmt], bool]) -> list[tuple[Unit, ast.stmt]]:
        return [(unit, node) for unit in self.units for node in unit.statements if condition(node)]

    def _add_text(self, text: str, unit: Unit, line: int) -> None:
        """Add a piece: after what it needs when it runs, before what its functions need when they are called."""
        at_once, later = read_names(text)
        for name in sorted(at_once):
            self.add(name)
        self.pieces.append((text, unit.file, line, unit.flags))
        for name in sorted(later - at_once):
            self.add(name)

    def _add_function(self, function: FunctionType) -> str:
        """Add a function without a global name (a closure), with the variables it captured."""
        node, unit = self._definition(function)
        given: list[str] = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            if value is not function:  # a recursive function is bound by its own `def`
                given.append(f"{name}={self.add_value(value)}")
        made, text = self._new_name(), unit.text(node)
        if node.col_offset:
            # In place of the `if` above it, so that line numbers stay those of the user's file.
            body, indent = text.removeprefix("if True:\n"), " " * node.col_offset
            text = f"def {made}({', '.join(given)}):\n{body}{indent}return {node.name}\n{made} = {made}()\n"
        else:
            text += f"{made} = {node.name}\n"
        self._add_text(text, unit, unit.line(node))
        return made

    def _definition(self, function: FunctionType) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, Unit]:
        """Find the `def` of a function."""
        code = function.__code__
        if code.co_name == "<lambda>":
            self._refuse("a lambda", "has no source of its own; give it a name: def ...")
        for unit in self.units:
            if unit.file != code.co_filename:
                continue
            for node in ast.walk(ast.Module(list(unit.statements), [])):
                is_def = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                if is_def and (node.name, first_line(node)) == (code.co_name, code.co_firstlineno):
                    return node, unit
        return self._refuse(f"{code.co_name}()", f"has no source here ({code.co_filename}); {_OWN_FILE}")

    def _new_name(self) -> str:
        return f"_whet_value_{len(self.pieces)}"

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise UserError(f"grader {self.label} runs in a worker process and needs {what}, which {why}")


def _read_unit(file: str) -> Unit:
    linecache.checkcache(file)
    return Unit.parse(file, linecache.getlines(file))


def _units_of(function: FunctionType) -> list[Unit]:
    """Return the file of a function; for a notebook all cells."""
    file = function.__code__.co_filename
    # Typed text has no modification time: so `linecache` never looks for it on disk. A debugger may have written the
    # cell there nonetheless.
    entries = linecache.cache.items()
    cells = {name: entry[2] for name, entry in entries if len(entry) == 4 and entry[1] is None}
    if file in cells:
        return [Unit.parse(name, cells[name]) for name in cells]
    if not Path(file).is_file():
        raise UserError(f"grader {function.__name__}: its source cannot be found ({file}); {_OWN_FILE}")
    return [_read_unit(file)]


def _name_in(names: Mapping[str, Any], value: Any) -> str:
    """Return a callable's name in these globals, its own if it has several; '' for none."""
    if not callable(value):
        return ""
    own = getattr(value, "__name__", "")
    if own in names and names[own] is value:
        return own
    return next((name for name, other in names.items() if other is value), "")


def _code_of(value: Any) -> Any:
    return getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)


def _as_source(name: str, value: Any, home: Mapping[str, Any]) -> str | None:
    """Write a statement that binds a name without the file's own: an import or a plain value; None for other
    objects."""
    if isinstance(value, ModuleType):
        is_loaded = sys.modules.get(value.__name__) is value and vars(value) is not home
        return f"import {value.__name__} as {name}\n" if is_loaded else None
    origin = getattr(value, "__module__", None)
    module = sys.modules.get(origin) if isinstance(origin, str) else None
    if module is not None and vars(module) is not home and module.__name__ != "__main__":
        first, _, rest = getattr(value, "__qualname__", "").partition(".")
        found = getattr(module, first, None)
        for part in rest.split(".") if rest else ():
            found = getattr(found, part, None)
        if found is not None and found is value:
            more = f"{name} = {name}.{rest}\n" if rest else ""
            return f"from {module.__name__} import {first} as {name}\n{more}"
    if _is_plain(value, frozenset()):
        text = repr(value)
        return f"{name} = {text}\n" if len(text) <= LONGEST_LITERAL else None
    return None


def _is_plain(value: Any, outer: frozenset[int]) -> bool:
    """Say whether `repr` round-trips: no subclass of a plain type, nothing that contains itself."""
    if type(value) in _PLAIN:
        return (
            not isinstance(value, float | complex) or value - value == 0
        )  # `inf` and `nan` are not literals
    if id(value) in outer:
        return False
    inner = outer | {id(value)}
    if type(value) is dict:
        return all(_is_plain(part, inner) for pair in value.items() for part in pair)
    return type(value) in _CONTAINERS and all(_is_plain(part, inner) for part in value)


def _kind(value: Any) -> str:
    kind = type(value).__qualname__
    return f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind} object"
