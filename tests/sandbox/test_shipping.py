"""A function of the main script in another process: the same answers, and nothing else of the script runs there."""

from __future__ import annotations

import asyncio
import contextlib
import decimal
import functools
import inspect
import json
import linecache
import math
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from whet.sandbox.graders.loading import LoadError, rebuild
from whet.sandbox.graders.shipping import ship_function, ship_name
from whet.types import UserError

TOP = "with open({mark!r}, 'a') as _mark: print('top level', file=_mark)\n"
"""A side effect that must happen once: in the script itself."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[str], tuple[Path, dict[str, Any]]]]:
    """Run a text as a script, as far as it comes; it ends where it says `stop()`, as at a call that trains."""
    before, context = set(sys.modules), decimal.getcontext().copy()

    def stop() -> None:
        raise KeyboardInterrupt

    top = TOP.format(mark=str(tmp_path / "mark"))

    runs: list[str] = []

    def work(text: str) -> tuple[Path, dict[str, Any]]:
        runs.append(text)
        file = tmp_path / "script.py"
        future, _, rest = text.rpartition("annotations\n")  # which has to come first
        file.write_text(f"{future}{'annotations' if future else ''}\n{top}{rest}")
        module = sys.modules["script_under_test"] = ModuleType("script_under_test")
        names = vars(module)
        names |= {"__file__": str(file), "stop": stop}
        with contextlib.suppress(KeyboardInterrupt):
            exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), names)
        return file, names

    yield work
    decimal.setcontext(context)
    for name in set(sys.modules) - before:
        if name.startswith(("whet_grader_", "script_under_test")):
            del sys.modules[name]
    assert set((tmp_path / "mark").read_text().splitlines()) == {"top level"}
    assert len((tmp_path / "mark").read_text().splitlines()) == len(runs)


def travel(parcel: Mapping[str, Any]) -> Callable[..., Any]:
    """Make the function anew as a worker does: from what JSON carries, and from nothing else."""
    return rebuild(json.loads(json.dumps(parcel)))


WORKS = {
    "itself": "def f(x): return x + 1",
    "helpers below, calling each other": """
def f(x): return even(x)
def even(x): return x == 0 or odd(x - 1)
def odd(x): return x != 0 and even(x - 1)
""",
    "a constant as it is now": """
COUNT = 0
for _ in range(3):
    COUNT += 1
TABLE = {"a": (1, 2.5, b"x", None), 7: [{3}, frozenset({4}), "ü"]}
TABLE["b"] = -1j
def f(x): return COUNT, TABLE
""",
    "random draws": """
import random
DRAWN = [random.random() for _ in range(3)]
def f(x): return DRAWN
""",
    "imports": """
import os.path, math as m
from pathlib import Path as P
from fractions import Fraction
from collections import abc
import xml.etree.ElementTree
def f(x):
    name = xml.etree.ElementTree.__name__
    return os.path.join("a", "b"), m.sqrt(4), P("a/b").name, int(Fraction(6, 3)), abc.__name__, name
""",
    "an import that may fail": """
try:
    import no_such_module as maybe
except ImportError:
    maybe = None
def f(x): return maybe is None
""",
    "imports of everything": """
from math import *
def f(x): return floor(x + 0.5)
""",
    "a pattern, which is no plain value": """
import re
DIGIT = re.compile(
    r"\\d"
)
def f(x): return len(DIGIT.findall("1a2"))
""",
    "an object that later statements fill": """
from collections import Counter
COUNTS = Counter()
for letter in "abca":
    COUNTS[letter] += 1
COUNTS.update("c")
COUNTS["d"] = 5
def f(x): return sorted(COUNTS.items())
""",
    "classes": """
from __future__ import annotations
from dataclasses import dataclass
from enum import Enum
class Kind(Enum):
    GOOD = 1
@dataclass
class Base:
    width: int = 2
    other: Base | None = None
class Derived(Base):
    def area(self): return self.width * SCALE
    kind = Kind.GOOD
SCALE = 10
def f(x): return Derived(3).area(), Derived.kind.name
""",
    "decorators": """
import functools
CALLS = []
def counted(function):
    @functools.wraps(function)
    def inner(*args):
        note("called")
        return function(*args)
    return inner
def note(text): CALLS.append(text)
@functools.lru_cache(maxsize=None)
def slow(x): return x * FACTOR
FACTOR = 3
@counted
def f(x):
    return slow(x) + slow(x), len(CALLS)
""",
    "a decorator that hides the name": """
def double(function):
    def inner(x): return 2 * function(x)
    return inner
@double
def f(x): return x + 1
""",
    "what another function made": """
def make(limit, helper):
    text = f"under {limit}"
    def reward(x):
        '''A text that
spans lines.'''
        return helper(x) < limit, text, reward.__doc__
    return reward
def half(x): return x / UNIT
UNIT = 2
f = make(3, half)
""",
    "a name for a lambda": "f = lambda x: x * 7\n",
    "under the guard": """
if __name__ == "script_under_test":
    SIZE = 4
def f(x): return SIZE
""",
    "behind a semicolon": "A = [1]; B = 2; C = object()\ndef g(x): return B if C else 0\ndef f(x): return g(x)\n",
    "defaults and annotations": """
from decimal import Decimal
STEP = Decimal(2)
def f(x: int, y: Decimal = STEP) -> "Nobody": return int(x + y)
""",
    "shadowed names": """
model = iter([])
def f(x):
    model = x
    return [model for model in range(3)], (lambda model: model)(model)
""",
    "coroutines": """
import asyncio
async def later(x):
    await asyncio.sleep(0)
    return x
async def f(x): return await later(x) + 1
""",
    "two of one name": """
def f(x): return "first"
g = f
def f(x): return "second" + h(x)
def h(x): return "!"
""",
}


def answer(function: Callable[..., Any], argument: Any) -> Any:
    value = function(argument)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


@pytest.mark.parametrize("text", WORKS.values(), ids=WORKS)
def test_the_same_answers(run: Callable[[str], tuple[Path, dict[str, Any]]], text: str) -> None:
    file, names = run(text + "\nstop()\nraise RuntimeError('below the call')\n")
    by_name, as_object = travel(ship_name(file, "f", names)), travel(ship_function(names["f"]))
    expected = answer(names["f"], 4)
    assert by_name is not names["f"]
    assert answer(by_name, 4) == expected
    assert answer(as_object, 4) == expected


def test_what_is_not_needed_does_not_travel(run: Callable[[str], tuple[Path, dict[str, Any]]]) -> None:
    file, names = run("import shutil\nfolder = iter([])\nprint(end='')\ndef f(x): return x\nA = f(1)\n")
    parcel = ship_name(file, "f", names)
    assert [piece[0] for piece in parcel["pieces"]] == ["def f(x): return x\n"]


def test_settings_of_what_is_imported(run: Callable[[str], tuple[Path, dict[str, Any]]]) -> None:
    text = "import decimal, json\nfrom decimal import getcontext\ngetcontext().prec = json.loads('5')\n"
    file, names = run(
        f"{text}decimal.whet = 1\njson.whet = 1\ndef f(x): return str(decimal.Decimal(1) / x)\n"
    )
    parcel = ship_name(file, "f", names)
    assert "decimal.whet = 1\n" in [piece[0] for piece in parcel["pieces"]]
    assert "json.whet = 1\n" not in [piece[0] for piece in parcel["pieces"]]
    del sys.modules["decimal"].whet, sys.modules["json"].whet  # type: ignore[attr-defined]
    file, names = run(f"{text}def f(x): return str(decimal.Decimal(1) / x), getcontext\n")
    decimal.getcontext().prec = 28
    assert travel(ship_name(file, "f", names))(3)[0] == "0.33333"


def test_functions_below_the_call_and_files_that_were_never_run(
    run: Callable[[str], tuple[Path, dict[str, Any]]],
) -> None:
    """By name only: there is no object yet. Everything then comes from the statements."""
    text = """
import re
TABLE = {}
TABLE["a"] = 3
stop()
def f(x): return TABLE["a"] + late(x) + len(re.findall("a", "aa"))
def late(x): return x
"""
    file, names = run(text)
    assert travel(ship_name(file, "f", names))(4) == 9
    assert travel(ship_name(file, "f", {}))(4) == 9


def test_the_first_of_two_functions_of_one_name(run: Callable[[str], tuple[Path, dict[str, Any]]]) -> None:
    """A script that trains twice, with another reward of the same name further down."""
    file, names = run("def f(x): return 'first'\nstop()\ndef f(x): return 'second'\n")
    assert travel(ship_name(file, "f", names))(0) == "first"


def test_partial_functions_and_closures_as_objects(run: Callable[[str], tuple[Path, dict[str, Any]]]) -> None:
    _, names = run(
        "import math\ndef pay(limit, x, *, unit): return math.floor(x / unit) < limit\n"
        "def make(n):\n    def inner(x):\n        return 0 if x == 0 else n + inner(x - 1)\n    return inner\n"
    )
    assert travel(ship_function(functools.partial(names["pay"], 3, unit=2.0)))(5) is True
    assert travel(ship_function(functools.partial(names["pay"], 2, unit=2.0)))(5) is False
    assert travel(ship_function(names["make"](10)))(3) == 30
    assert travel(ship_function(functools.partial(names["make"](10), 2)))() == 20


def test_mistakes_are_reported_with_the_lines_of_the_script(
    run: Callable[[str], tuple[Path, dict[str, Any]]],
) -> None:
    text = "\n\ndef make(n):\n    # a comment\n    def f(x):\n\n        return n / x\n    return f\nf = make(1)\n"
    file, names = run(text + "@staticmethod\n\ndef g(x):\n    return 1 / x\n")
    for name in "fg":
        here, there = (
            place_of_division(function) for function in (names[name], travel(ship_name(file, name, names)))
        )
        assert here == there
    assert place_of_division(names["f"]) == place_of_division(travel(ship_function(names["f"])))


def place_of_division(function: Callable[..., Any]) -> tuple[str, int | None]:
    with pytest.raises(ZeroDivisionError) as caught:
        function(0)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    return last.filename, last.lineno


REFUSED = {
    "what no statement binds": (
        "class A: pass\ndef g(): global C; C = A()\ng()\ndef f(x): return C",
        r"grader f runs in a worker process and needs `C` \(an A object\), which cannot be sent there; create it",
    ),
    "no function": ("f = 3", "has no function 'f'; it has no functions"),
    "no such function": ("def g(x): return x\ndef _h(x): return x", "has no function 'f'; it has g$"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_travel(
    run: Callable[[str], tuple[Path, dict[str, Any]]], text: str, message: str
) -> None:
    file, names = run(text)
    with pytest.raises(UserError, match=message) as caught:
        ship_name(file, "f", names)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: x, "needs a lambda, which has no source of its own; give it a name"),
        (Path("x"), "grader PosixPath: got a PosixPath object, expected a function"),
        (functools.partial(math.floor), "grader floor: got a builtin_function_or_method object"),
        (eval("lambda x: x", {}), "its source cannot be found"),
    ],
)
def test_objects_that_are_no_functions_of_a_file(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ship_function(value)


def test_a_statement_that_fails_in_the_worker_is_named(
    run: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "data.txt").write_text("x")
    text = f"import pathlib\nDATA = iter(pathlib.Path({str(tmp_path / 'data.txt')!r}).read_text())\n"
    file, names = run(f"{text}def f(x): return next(DATA)\n")
    (tmp_path / "data.txt").unlink()
    with pytest.raises(LoadError, match=r"grader 'f': .* at `DATA = iter.*FileNotFoundError: "):
        travel(ship_name(file, "f", names))


def test_cells_of_a_notebook() -> None:
    """`linecache` keeps their source; a cell may have run again, and a later one redefines what an earlier one made."""
    names: dict[str, Any] = {"__name__": "script_under_test"}
    cells = {
        "/nowhere/1.py": "import re\nclass Parser:\n    pattern = re.compile('a')\nPARSER = Parser()\n"
        "def help(x): return 'old'\n",
        "/nowhere/2.py": "raise_ = 1\ndef help(x): return len(PARSER.pattern.findall(x)) * SCALE\n",
        "/nowhere/3.py": "SCALE = 2\ndef f(x): return help(x) + 1\n",
    }
    module = sys.modules["script_under_test"] = ModuleType("script_under_test")
    vars(module).update(names)
    try:
        for file, text in cells.items():
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            exec(compile(text, file, "exec", dont_inherit=True), vars(module))
        assert travel(ship_function(vars(module)["f"]))("aab") == 5
        linecache.cache.pop("/nowhere/3.py")
        with pytest.raises(UserError, match="grader f: its source cannot be found .*move the function to"):
            ship_function(vars(module)["f"])
    finally:
        for file in cells:
            linecache.cache.pop(file, None)
        del sys.modules["script_under_test"]


def test_a_notebook_and_its_pool() -> None:
    """In IPython's own shell, as a kernel runs it: `__main__` has no file there."""
    pytest.importorskip("IPython")
    code = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in (
    "import re\\nfrom whet.sandbox.graders.graders import GraderPool",
    "WORD = re.compile('[a-z]+')\\ndef words(text): return WORD.findall(text)",
    "%time COUNTED = 1\\ndef reward(problem, completion): return len(words(completion)) + COUNTED",
    "with GraderPool(reward, num_workers=1) as pool: outcomes = pool.map([('', 'a b 1 c')])",
    "print('value', outcomes[0].value, outcomes[0].message)",
):
    shell.run_cell(cell).raise_error()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "value 4" in done.stdout, done.stdout + done.stderr
