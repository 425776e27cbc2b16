"""Remote calls between two children: one serves a program's functions, the other runs tests against them.

A message is a length, a nonce that the client drew for this call, and JSON. The program may control the serving side:
on the tests' side its answers can only become plain values or handles.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import operator
import os
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from whet.sandbox.inside.codec import MAX_BYTES, decode, encode

LENGTH = struct.Struct("=I")
NONCE_BYTES = 16

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "self": lambda value: value,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "contains": operator.contains,
}


_CHANGEABLE = (list, dict, set, deque, bytearray, tuple)
"""Plain values that a program can change in place, or that may hold such."""
_HANDLE = '["handle"'
MAX_ANALYSED = 20_000
"""Characters of a test up to which `compares_apart` reads it."""


def read_frame(fd: int) -> bytes:
    """Read one message from a blocking descriptor.

    Raises:
        EOFError: If the other side has gone.
    """
    (length,) = LENGTH.unpack(_read(fd, LENGTH.size))
    return _read(fd, length)


def _read(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def write_frame(fd: int, data: bytes) -> None:
    """Write one message to a blocking descriptor."""
    rest = memoryview(LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(fd, rest) :]


class _Handles:
    """The objects of a program that its tests hold by number."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names
        self.objects: list[Any] = []

    def add(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def answer(self, request: bytes) -> str:
        """Execute a request; return the encoded result, or the exception's name and text."""
        operation, target, args, kwargs = json.loads(request)
        try:
            value = self.names[target] if isinstance(target, str) else self.objects[target]
            positional = [decode(arg, self.objects.__getitem__) for arg in args]
            named = {name: decode(arg, self.objects.__getitem__) for name, arg in kwargs.items()}
            given = list(zip((*args, *kwargs.values()), (*positional, *named.values()), strict=True))
            before = [encode(value, id) if _HANDLE in text else text for text, value in given]
            result = _OPERATIONS[operation](value, *positional, **named)
            answer = [encode(result, self.add)]
            pairs = zip(before, (value for _, value in given), strict=True)
            if any(isinstance(value, _CHANGEABLE) and encode(value, id) != old for old, value in pairs):
                now = [encode(value, self.add) for _, value in given]
                answer += now if sum(map(len, (*answer, *now))) <= MAX_BYTES else []
            return json.dumps(["value", *answer])
        except MemoryError:
            raise
        except BaseException as error:
            try:
                text = str(error)[:500]
            except BaseException:
                text = "?"
            return json.dumps(["raised", type(error).__name__, text])


def serve(fd: int, names: Mapping[str, Any]) -> None:
    """Answer calls to what a program defined, until the other side has gone.

    Args:
        fd: The channel.
        names: The program's globals.
    """
    kinds = {name: _kind(name, value) for name, value in names.items() if not name.startswith("__")}
    write_frame(fd, json.dumps(kinds).encode())
    handles = _Handles(names)
    while True:
        try:
            frame = read_frame(fd)
        except EOFError:
            return
        write_frame(fd, frame[:NONCE_BYTES] + handles.answer(frame[NONCE_BYTES:]).encode())


def _kind(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return "module" if value.__name__ == name else "value"
    if isinstance(value, type) and issubclass(value, Exception):
        return "exception"
    return "object" if callable(value) else "value"


class ProgramError(Exception):
    """An exception of the program whose type the tests do not know."""


class _UntestableError(Exception):
    """A test passes an object that cannot be sent to the program."""


class _Connection:
    """The tests' side of the channel, and what happened on it during a test."""

    def __init__(self, fd: int, has_objects: bool) -> None:
        self.fd = fd
        self.has_objects = has_objects
        self.num_calls = 0
        self.is_influenced = False
        self.errors: dict[str, type[Exception]] = {}
        self.raised: list[BaseException] = []
        self.untestable = ""
        self.code = ""
        self.program: set[str] = set()
        self.are_arguments_trusted: bool | None = None

    def ask(self, operation: str, target: str | int, *args: Any, **kwargs: Any) -> Any:
        """Execute an operation in the program's process and return its result."""
        packed = [encode(arg, self._give) for arg in args]
        named = {name: encode(arg, self._give) for name, arg in kwargs.items()}
        self.num_calls += 1
        write_frame(self.fd, b"c" + json.dumps([operation, target, packed, named]).encode())
        frame = read_frame(self.fd)
        try:
            kind, *content = json.loads(frame)
            if kind == "value" and content and all(isinstance(part, str) for part in content):
                result = decode(content[0], self._take)
                if len(content) == 1:
                    return result
                given = (*args, *kwargs.values())
                if len(content) == 1 + len(given):
                    if result is None or self._trusts_arguments():
                        for own, text in zip(given, content[1:], strict=True):
                            _update(own, decode(text, self._take))
                    return result
            if kind == "raised" and len(content) == 2 and all(isinstance(part, str) for part in content):
                raise self._error(*content)
        except (ValueError, TypeError, RecursionError) as error:
            if self.raised and error is self.raised[-1]:
                raise
        error = ProgramError("the program's answer is not a plain value")
        self.raised.append(error)
        raise error

    def _trusts_arguments(self) -> bool:
        """Say whether a function that returns something may change the arguments of this test, too."""
        if self.are_arguments_trusted is None:
            self.are_arguments_trusted = compares_apart(self.code, self.program)
        return self.are_arguments_trusted

    def _error(self, name: str, text: str) -> BaseException:
        known = self.errors.get(name) or getattr(builtins, name, None)
        if not (isinstance(known, type) and issubclass(known, Exception)):
            known = self.errors[name] = type(name, (ProgramError,), {})
        try:
            error = known(text)
        except TypeError:  # UnicodeDecodeError and the like need more than a message
            error = ProgramError(f"{name}: {text}")
        self.raised.append(error)
        return error

    def _give(self, value: Any) -> int:
        number = _number_of(value)
        if number is None:
            self.untestable = f"the test passes an object of type {type(value).__name__} to the program"
            self.is_influenced = self.is_influenced or self.num_calls > 0
            raise _UntestableError(self.untestable)
        return number

    def _take(self, number: int) -> Remote:
        return Remote(self, number)


def _update(own: Any, now: Any) -> bool:
    """Make a test's own value what the program made of its copy, as far as it can be changed in place.

    Returns:
        Whether it is the same value now; values inside it stay the same objects where they can.
    """
    if not _are_alike(own, now):
        return False
    if isinstance(own, dict):
        items = [(key, own[key] if key in own and _update(own[key], now[key]) else now[key]) for key in now]
        own.clear()
        own.update(items)
    elif isinstance(own, set | bytearray):
        own.clear()
        own.update(now) if isinstance(own, set) else own.extend(now)
    else:
        items = [mine if _update(mine, theirs) else theirs for mine, theirs in zip(own, now, strict=False)]
        if isinstance(own, tuple):
            return False
        items += list(now)[len(own) :]
        own.clear()
        own.extend(items)
    return True


def _are_alike(own: Any, now: Any) -> bool:
    return any(isinstance(own, base) and isinstance(now, base) for base in _CHANGEABLE)


def compares_apart(code: str, program: Collection[str]) -> bool:
    """Say whether a test never sets what comes from the program against what the program may have changed.

    In `assert f(x) == sorted(x)` a function that empties x and returns [] would set the goal itself. In
    `n = f(x); assert n == 2 and x[:n] == [1, 2]` the goals are the test's.

    Args:
        code: The test; a long one counts as if it did.
        program: The names that may be the program's.
    """
    if len(code) > MAX_ANALYSED:
        return False
    nodes = list(ast.walk(ast.parse(code)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    touched = set(program) - {name.id for name in names if isinstance(name.ctx, ast.Store)}
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    functions |= {id(node.value) for node in nodes if isinstance(node, ast.Assign)}
    if any(name.id in touched and id(name) not in functions for name in names):
        return False  # it goes where this does not look, as in `check(f)`
    size = -1
    while size != len(touched):  # until no further name depends on them
        size = len(touched)
        for node in nodes:
            if isinstance(node, ast.Call) and _depends(node.func, touched):
                parts = (*node.args, *(word.value for word in node.keywords))
                touched |= {name for part in parts for name in _names_in(part)}
            elif isinstance(node, _BINDS):
                source = node.iter if isinstance(node, ast.For | ast.comprehension) else node.value
                if source is not None and _depends(source, touched):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    touched |= {name for target in targets for name in _names_in(target)}
    return not any(_is_circular(node, touched) for node in nodes)


_BINDS = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For | ast.comprehension


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _depends(node: ast.AST, names: Collection[str]) -> bool:
    return not _names_in(node).isdisjoint(names)


def _is_circular(node: ast.AST, touched: Collection[str]) -> bool:
    """Say whether an expression brings together two parts that depend on the program; a call of it alone does not."""
    if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
        return True  # its names are its own
    if not isinstance(node, ast.expr | ast.comprehension) or isinstance(
        node, ast.BoolOp | ast.Tuple | ast.List
    ):
        return False
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return False
    if isinstance(node, ast.Call) and _depends(node.func, touched):
        return False
    return sum(_depends(child, touched) for child in ast.iter_child_nodes(node)) > 1


_REFUSED = "the program gave an object, whose attributes tests read and set only if the problem has objects"


class Remote:
    """A handle to an object of the program; it equals nothing.

    Tests can call it, pass it back and loop over it. Unless they ask for objects, it is asked for its items once, and
    loops, `len`, `in`, `[]` and `bool` read that one copy: otherwise an object could have five items for `len`, none
    for a loop, and every member it is asked about.
    """

    __slots__ = ("_connection", "_items", "_num_taken", "_source", "_target")

    def __init__(self, connection: _Connection, target: str | int) -> None:
        for name, value in (
            ("_connection", connection),
            ("_target", target),
            ("_items", []),
            ("_num_taken", 0),
            ("_source", None),
        ):
            object.__setattr__(self, name, value)

    def _ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self._connection.ask(operation, self._target, *args, **kwargs)

    def _item(self, position: int) -> Any:
        """Return an item of the copy; StopIteration where it ends."""
        if self._source is None:
            object.__setattr__(self, "_source", self._ask("iter"))
        while position >= len(self._items):
            source = self._source
            try:
                self._items.append(source._ask("next") if type(source) is Remote else next(source))
            except StopIteration:
                object.__setattr__(self, "_source", iter(()))  # an end is an end
                raise
        return self._items[position]

    def _copied(self) -> Iterator[Any]:
        position = self._num_taken
        while True:
            try:
                item = self._item(position)
            except StopIteration:
                return
            yield item
            position += 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._ask("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._connection.has_objects:
            raise AttributeError(f"{name}: {_REFUSED}")
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._connection.has_objects:
            raise AttributeError(f"{name}: {_REFUSED}")
        self._ask("set", name, value)

    def __iter__(self) -> Any:
        if self._connection.has_objects:
            return self._ask("iter")
        if self._source is None:
            object.__setattr__(self, "_source", self._ask("iter"))  # here, for a TypeError in its place
        return self._copied()

    def __next__(self) -> Any:
        if self._connection.has_objects:
            return self._ask("next")
        item = self._item(self._num_taken)
        object.__setattr__(self, "_num_taken", self._num_taken + 1)
        return item

    def __len__(self) -> int:
        return self._ask("len") if self._connection.has_objects else sum(1 for _ in self)

    def __bool__(self) -> bool:
        if self._connection.has_objects:
            return self._ask("bool") is True
        try:
            items = iter(self)
        except TypeError:
            return True
        return any(True for _ in items)

    def __getitem__(self, key: Any) -> Any:
        if self._connection.has_objects:
            return self._ask("item", key)
        return list(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self._connection.has_objects:
            raise TypeError(_REFUSED)
        self._ask("set_item", key, value)

    def __contains__(self, item: Any) -> bool:
        if self._connection.has_objects:
            return self._ask("contains", item) is True
        return any(item is own or item == own for own in self)

    def __str__(self) -> str:
        return self._ask("str")

    def __repr__(self) -> str:
        return self._ask("repr")

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def _number_of(value: Any) -> int | None:
    """Return the number of a handle; for a global of the program, fetch it first."""
    if type(value) is not Remote:
        return None
    target = object.__getattribute__(value, "_target")
    if isinstance(target, str):
        value = value._ask("self")
        return _number_of(value)
    return target


class _Names(dict[str, Any]):
    """Globals of a test: a name that neither the test nor Python defines is looked up in the program."""

    def __init__(self, connection: _Connection, kinds: Mapping[str, str], entries: Sequence[str]) -> None:
        super().__init__(__name__="__main__")
        self.connection, self.kinds, self.entries = connection, kinds, entries

    def __missing__(self, name: str) -> Any:
        kind = self.kinds.get(name)
        is_entry = name in self.entries
        if kind is None or (not is_entry and hasattr(builtins, name)):
            self.connection.is_influenced = True
            raise KeyError(name)
        if kind == "module":  # the real module, loaded here: tests may rely on an import of the program
            self.connection.is_influenced = True
            return importlib.import_module(name)
        if self.entries and not is_entry:
            raise KeyError(name)
        if kind == "exception":
            self.connection.num_calls += 1
            error = type(name, (ProgramError,), {})
            return self.connection.errors.setdefault(name, error)
        return Remote(self.connection, name) if kind == "object" else self.connection.ask("self", name)


def judge(fd: int, setup: str, entries: Sequence[str], has_objects: bool) -> None:
    """Run tests against a program that another process serves, until the other side has gone.

    Args:
        fd: The channel.
        setup: Code that runs before the first test; all tests see what it defines.
        entries: The names that the program must define; () for any that the tests use.
        has_objects: Whether the tests may use the program's objects as their own.
    """
    connection = _Connection(fd, has_objects)
    kinds = _read_kinds(read_frame(fd))
    base = _Names(connection, kinds, entries)
    outcome, names = _attempt(connection, setup, base), {}
    if outcome[0] == "ok":
        names = {name: value for name, value in base.items() if name not in entries}
    write_frame(fd, b"s" + json.dumps(outcome).encode())
    is_setup_influenced = connection.is_influenced or connection.num_calls > 0
    while True:
        try:
            code = read_frame(fd).decode("utf-8", "surrogatepass")
        except EOFError:
            return
        scope = _Names(connection, kinds, entries)
        scope.update(names)
        connection.is_influenced = is_setup_influenced
        write_frame(fd, b"r" + json.dumps(_attempt(connection, code, scope)).encode())


def _read_kinds(data: bytes) -> dict[str, str]:
    """Read a program's claim of what it defines; empty if that is not a plain table."""
    try:
        kinds = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return kinds if isinstance(kinds, dict) else {}


def _attempt(connection: _Connection, code: str, scope: _Names) -> tuple[str, str, int]:
    """Run a piece of test code; return its status, the error, and how often it called the program."""
    connection.num_calls, connection.untestable = 0, ""
    connection.are_arguments_trusted = None
    connection.raised.clear()
    status, message = "ok", ""
    try:
        compiled = compile(code, "test.py", "exec", dont_inherit=True)
    except MemoryError as error:  # an earlier test may have filled it with what the program sent
        return "wrong", f"the test does not compile: {error}", 0
    except Exception as error:  # not the program's fault
        return "infra_error", f"the test does not compile: {error}"[:500], 0
    connection.code, connection.program = code, {*scope.kinds, *scope.entries}
    try:
        exec(compiled, scope)
    except BaseException as error:
        status = "rte" if any(error is raised for raised in connection.raised) else "wrong"
        try:
            message = f"{type(error).__name__}: {error}"[:500]
        except BaseException:
            message = type(error).__name__
    if connection.untestable:
        # Only a test that got here without any word of the program is at fault itself. All else the program could
        # choose, and one that can make itself unjudgeable is never wrong.
        status = "wrong" if connection.is_influenced else "infra_error"
        message = connection.untestable
    return status, message, connection.num_calls
