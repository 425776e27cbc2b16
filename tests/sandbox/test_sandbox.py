"""Ordinary programs run as they would outside, and end as they should; tests of functions judge what they must."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from needs import require

from whet.sandbox.attacks.battery import descendants, is_alive
from whet.sandbox.launch import BACKENDS
from whet.sandbox.programs import Sandbox, TestsVerdict, Verdict, run_python, run_tests
from whet.types import UserError


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


def run(code: str, stdin: str | bytes = "", timeout_s: float = 20.0, memory_mib: int = 256) -> Verdict:
    return run_python(code, stdin=stdin, timeout_s=timeout_s, memory_mib=memory_mib)


ORDINARY = {
    "f = open('/dev/stdout', 'w'); f.write('hi'); f.close()": "hi",
    "\ufeffprint(1)": "1\n",
    "import locale; print(locale.setlocale(locale.LC_ALL, '') > '')": "True\n",
    "help(len)": "Help on built-in function len in module builtins:\n\nlen(obj, /)\n"
    "    Return the number of items in a container.\n\n",
    "try: 1 / 0\nexcept ZeroDivisionError:\n    import sys; sys.stderr.close(); print('x')": "x\n",
    "import json; print(json.dumps({'a': [1, 2.5, None]}))": '{"a": [1, 2.5, null]}\n',
    "import re; print(re.sub(r'(\\w+) (\\w+)', r'\\2 \\1', 'hello world'))": "world hello\n",
    "import math, cmath; print(math.comb(50, 25), cmath.sqrt(-4))": "126410606437752 2j\n",
    "from collections import *; print(Counter('abca').most_common(1), deque([1, 2, 3], 2))": (
        "[('a', 2)] deque([2, 3], maxlen=2)\n"
    ),
    "import itertools as i; print(list(i.accumulate(range(5))))": "[0, 1, 3, 6, 10]\n",
    "import functools\n@functools.cache\ndef f(n): return n if n < 2 else f(n-1) + f(n-2)\nprint(f(90))": (
        "2880067194370816120\n"
    ),
    "import heapq, bisect; print(heapq.nsmallest(2, [3, 1, 2]), bisect.bisect([1, 3], 2))": "[1, 2] 1\n",
    "import datetime as d; print(d.date(2024, 2, 28) + d.timedelta(2))": "2024-03-01\n",
    "from decimal import *; getcontext().prec = 30; print(Decimal(1) / 7)": (
        "0.142857142857142857142857142857\n"
    ),
    "from fractions import Fraction as F; print(F(1, 3) + F(1, 6))": "1/2\n",
    "import random; random.seed(1); print(random.randint(1, 100), len({random.random() for _ in range(9)}))": "18 9\n",
    "import statistics; print(statistics.stdev([1, 2, 3, 4]))": "1.2909944487358056\n",
    "import string, textwrap; print(string.digits, textwrap.fill('a b', 1))": "0123456789 a\nb\n",
    "from typing import *; from dataclasses import *\n@dataclass\nclass P:\n x: int\n"
    " y: list = field(default_factory=list)\nprint(P(1), get_type_hints(P)['x'])": "P(x=1, y=[]) <class 'int'>\n",
    "import threading, queue\nq = queue.Queue()\nts = [threading.Thread(target=q.put, args=(i,)) for i in range(20)]\n"
    "[t.start() for t in ts]; [t.join() for t in ts]; print(q.qsize())": "20\n",
    "import asyncio\nasync def f(n):\n await asyncio.sleep(0.001 * n); return n\n"
    "async def g(): return await asyncio.gather(*map(f, range(5)))\nprint(asyncio.run(g()))": "[0, 1, 2, 3, 4]\n",
    "from concurrent.futures import ThreadPoolExecutor as T\n"
    "with T() as t: print(sum(t.map(abs, range(-9, 0))))": "45\n",
    "import sys; print(sum(int(x) for x in sys.stdin.read().split()), sys.argv, __name__)": (
        "6 ['program.py'] __main__\n"
    ),
    "a = int(input('? ')); print(a, input())": "? 1 2 3\n",
    "import sys; sys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(50_000))": "50000\n",
    "import os; f = open(os.devnull, 'w'); print('x', file=f); print(os.path.join('a', 'b'))": "a/b\n",
    "import hashlib, zlib, base64, struct, uuid, secrets; print(hashlib.sha256(b'').hexdigest()[:8])": "e3b0c442\n",
    "import time; t = time.perf_counter(); time.sleep(0.01); print(time.perf_counter() - t > 0.009)": "True\n",
    "import pickle, copy, enum\nclass C(enum.Enum):\n A = 1\nprint(pickle.loads(pickle.dumps(C.A)))": "C.A\n",
    "import sqlite3; print(sqlite3.connect(':memory:').execute('select 6 * 7').fetchone())": "(42,)\n",
    "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as s: print(1)\nprint(repr(s.getvalue()))": (
        "'1\\n'\n"
    ),
    "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('rang')); signal.alarm(1); signal.pause()": "rang\n",
    "import unittest, doctest, ast, inspect\ndef f():\n return 1\nprint(inspect.getsource(f))": (
        "def f():\n return 1\n\n"
    ),
    "import atexit\natexit.register(print, 'bye')\nprint('hi')": "hi\nbye\n",
    "class A:\n def __del__(self): print('gone')\na = A()\nprint('end')": "end\ngone\n",
    "print('é', '漢', '\\U0001f600')": "é 漢 \U0001f600\n",
    "import colorsys, email.message, plistlib; print(colorsys.rgb_to_hsv(1, 0, 0))": "(0.0, 1.0, 1)\n",
    "exit()": "",
    "raise SystemExit": "",
}  # fmt: skip


@pytest.mark.parametrize("code", ORDINARY)
def test_ordinary_programs(code: str) -> None:
    verdict = run(code, stdin="1 2 3" if "stdin" in code else "1\n2 3\n")
    assert (verdict.status, verdict.stdout, verdict.stderr) == ("ok", ORDINARY[code], "")
    assert (verdict.exit_code, verdict.stage) == (0, "done")


@pytest.mark.parametrize(
    ("code", "status", "stage", "text"),
    [
        ("print(1", "rte", "syntax", "SyntaxError"),
        ("import nothing_like_it", "rte", "import", "ModuleNotFoundError"),
        ("import numpy", "rte", "import", "numpy"),
        ("1 / 0", "rte", "run", "ZeroDivisionError"),
        ("assert False, 'why'", "rte", "run", "AssertionError: why"),
        ("exit(3)", "rte", "done", "exit code 3"),
        ("exit('bad')", "rte", "done", "exit code 1"),
        ("while True: pass", "tle", "run", "out of time"),
        ("x = bytearray(1 << 40)", "mle", "run", "256 MiB"),
        ("while True: print('x' * 1000)", "ole", "run", "exceeded its output limit"),
        ("import os; os.abort()", "killed", "run", "SIGABRT"),
        ("import os; os.kill(os.getpid(), 40)", "killed", "run", "signal 40"),
        ("import sys; print(1); sys.stderr.close(); 1 / 0", "rte", "run", "ZeroDivisionError"),
        (r"raise ValueError('\x1b[2J\n\u202e')", "rte", "run", r"ValueError: \x1b[2J\n\u202e"),
        (
            "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
            "ok",
            "done",
            "",
        ),
    ],
)
def test_ends(code: str, status: str, stage: str, text: str) -> None:
    verdict = run(code, timeout_s=1.0 if status == "tle" else 20.0)
    assert (verdict.status, verdict.stage) == (status, stage)
    assert text in verdict.message


def test_traceback_shows_the_program_and_nothing_of_ours() -> None:
    verdict = run("def f():\n    return 1 / 0\nf()\n")
    assert 'File "program.py", line 2, in f\n    return 1 / 0' in verdict.stderr
    assert "whet" not in verdict.stderr
    assert verdict.stderr.startswith("Traceback")


def test_time_limit_holds_and_includes_teardown() -> None:
    start = time.monotonic()
    verdict = run("import time\nprint('before', flush=True)\ntime.sleep(60)", timeout_s=0.3)
    assert (verdict.status, verdict.stdout, verdict.exit_code) == ("tle", "before\n", -signal.SIGKILL)
    assert 0.3 <= verdict.seconds <= time.monotonic() - start < 30


def test_memory_limit_is_beyond_the_interpreters_own() -> None:
    assert run("x = bytearray(40 << 20)", memory_mib=64).status == "ok"
    assert run("x = bytearray(80 << 20)", memory_mib=64).status == "mle"
    assert run("print(1)", memory_mib=8).stdout == "1\n"


def test_a_program_that_kills_itself_is_not_out_of_memory() -> None:
    verdict = run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (verdict.status, verdict.exit_code) == ("killed", -signal.SIGKILL)


def test_random_numbers_differ_between_programs_and_hashes_do_not() -> None:
    code = "import random, uuid; print(random.random(), uuid.uuid4(), hash('a'))"
    first, second = (run(code).stdout.split() for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]


def test_number_of_threads_is_bounded() -> None:
    code = (
        "import threading, time\nfor _ in range({}): threading.Thread(target=time.sleep, args=(1,)).start()"
    )
    assert run(code.format(60), memory_mib=2048).status == "ok"
    verdict = run(code.format(400), memory_mib=2048)
    assert (verdict.status, verdict.message) == ("killed", "had more than 128 threads")


def test_environment_is_the_same_everywhere() -> None:
    expected = "{'PATH': '/usr/bin:/bin', 'LANG': 'C.UTF-8', 'LC_ALL': 'C.UTF-8', 'TZ': 'UTC'}\n"
    assert run("import os; print(dict(os.environ))").stdout == expected


def test_programs_do_not_see_each_other() -> None:
    run("import builtins, json; builtins.left = 1; json.left = 1")
    assert (
        run("import builtins, json; print(hasattr(builtins, 'left'), hasattr(json, 'left'))").stdout
        == "False False\n"
    )


def test_stdin_may_be_bytes_and_unread() -> None:
    assert run("import sys; print(sys.stdin.buffer.read())", stdin=b"\0\xff").stdout == "b'\\x00\\xff'\n"
    assert run("print(1)", stdin="x" * 10_000_000).stdout == "1\n"


def test_many_threads_share_one_supervisor(sandbox: Sandbox) -> None:
    sandbox.run("")
    before = descendants(os.getpid())
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda i: sandbox.run(f"print({i})"), range(200)))
    assert [v.stdout for v in verdicts] == [f"{i}\n" for i in range(200)]
    assert descendants(os.getpid()) == before  # none left, and none had to be started anew


def test_lost_supervisor_is_replaced_and_the_job_repeated(sandbox: Sandbox) -> None:
    sandbox.run("")
    others = descendants(os.getpid())
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sandbox.run, "import time; time.sleep(0.5); print(1)")
        while not (new := descendants(os.getpid()) - others):
            time.sleep(0.01)
        psutil.Process(psutil.Process(new.pop()).ppid()).kill()
        assert future.result().stdout == "1\n"


def test_machinery_that_keeps_failing_is_no_verdict_on_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox() as sandbox:
        monkeypatch.setattr("whet.sandbox.jobs.SETUP_S", -1.0)
        verdict = sandbox.run("print(1)")
        tests = sandbox.run_tests("def f(): return 1", ["assert f() == 1"])
    assert (verdict.status, verdict.exit_code, tests.status) == ("infra_error", None, "infra_error")
    assert "did not start" in verdict.message


def test_sandbox_ends_with_its_process() -> None:
    code = (
        "import os, sys, time, threading; from whet.sandbox.programs import run_python\n"
        "threading.Thread(target=run_python, args=('import time; time.sleep(600)',),"
        " kwargs={'timeout_s': 600}).start()\n"
        "time.sleep(1); print(1, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = descendants(process.pid)
        assert len(started) >= 2
        process.kill()
    deadline = time.monotonic() + 20
    while any(map(is_alive, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, started))


def test_forked_process_starts_its_own(sandbox: Sandbox) -> None:
    code = (
        "import os; from whet.sandbox.programs import run_python\n"
        "from whet.sandbox.attacks.battery import descendants\n"
        "assert run_python('print(1)').status == 'ok'\n"
        "pid = os.fork()\nout = run_python('print(2)').stdout\nif pid: assert os.waitpid(pid, 0)[1] == 0\n"
        "assert descendants(os.getpid())\nprint(out, end='', flush=True)\nif not pid: os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("2\n2\n", "")


def test_short_lived_threads_may_start_it() -> None:
    with Sandbox() as sandbox:
        sandbox.run("")
        thread = threading.Thread(target=sandbox._discard, args=(sandbox._supervisor,))
        thread.start()
        thread.join()
        thread = threading.Thread(target=sandbox.run, args=("",))
        thread.start()
        thread.join()
        kept = sandbox._supervisor
        assert sandbox.run("print(1)").stdout == "1\n"
        assert sandbox._supervisor is kept


@pytest.mark.parametrize("limits", [{"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"memory_mib": 1}])
def test_limits_out_of_range(limits: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(limits))):
        run("", **limits)


def test_closed_or_unknown() -> None:
    with Sandbox() as sandbox:
        pass
    with pytest.raises(UserError, match="closed"):
        sandbox.run("")
    with pytest.raises(UserError, match="docker"):
        Sandbox(backend="docker")


def test_no_wall_is_refused_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("whet.sandbox.programs._PROBE", "print(False)")
    with pytest.raises(UserError, match=r"bwrap: .*not installed.*landlock: .*not contained"):
        Sandbox()


def try_tests(code: str, *tests: str, **options: Any) -> TestsVerdict:
    return run_tests(code, tests, **({"timeout_s": 20.0, "memory_mib": 256} | options))


def statuses(verdict: TestsVerdict) -> list[str]:
    return [result.status for result in verdict.results]


def test_each_test_has_its_result() -> None:
    code = "def f(n):\n if n == 9: raise ValueError('nine')\n return n + 1"
    verdict = try_tests(code, "assert f(1) == 2", "assert f(1) == 3", "f(9)", "assert f(5) == 6")
    assert statuses(verdict) == ["ok", "wrong", "rte", "ok"]
    assert verdict.results[2].message == "ValueError: nine"
    assert verdict.status == "wrong"
    assert verdict.scores == {"syntax": 1.0, "imports": 1.0, "runs": 1.0, "tests": 0.5}
    assert [result.num_calls for result in verdict.results] == [1, 1, 1, 1]


def test_exceptions_that_tests_expect() -> None:
    code = "class Bad(Exception): pass\ndef f(n):\n raise [ValueError, Bad][n]('x')"
    expects = "try:\n    f({})\nexcept {} as error:\n    assert str(error) == 'x'\nelse:\n    assert False"
    verdict = try_tests(
        code, expects.format(0, "ValueError"), expects.format(1, "Bad"), expects.format(1, "ValueError")
    )
    assert statuses(verdict) == ["ok", "ok", "rte"]


def test_state_stays_from_test_to_test_and_a_timeout_starts_anew() -> None:
    code = "n = []\ndef f(x):\n n.append(x)\n while x == 0: pass\n return len(n)"
    verdict = try_tests(
        code, "assert f(1) == 1", "assert f(1) == 2", "f(0)", "assert f(1) == 1", timeout_s=1.0
    )
    assert statuses(verdict) == ["ok", "ok", "tle", "ok"]


def test_a_program_that_dies_often_is_not_started_for_ever() -> None:
    verdict = try_tests("import os\ndef f(n): os._exit(0)", *["f(1)"] * 5)
    assert statuses(verdict) == ["rte"] * 5
    assert "not run" in verdict.results[4].message


def test_program_that_does_not_load() -> None:
    verdict = try_tests("def f(:", "assert True")
    assert (verdict.program.stage, statuses(verdict)) == ("syntax", ["rte"])
    assert verdict.scores == {"syntax": 0.0, "imports": 0.0, "runs": 0.0, "tests": 0.0}
    assert try_tests("import nothing_like_it", "1").scores["imports"] == 0.0
    assert try_tests("while True: pass", "1", timeout_s=0.5).program.status == "tle"


def test_classes_of_the_program() -> None:
    code = (
        "class Pair:\n def __init__(self, a, b): self.a, self.b = a, b\n def total(self): return self.a + self.b\n"
        "def chain(pairs): return sum(p.a < p.b for p in pairs)\ndef count(): yield from range(9)\nlimit = [7]"
    )
    verdict = try_tests(
        code,
        "assert chain([Pair(1, 2), Pair(2, 1)]) == 1",
        "p = Pair(1, 2); p.a = 5; assert p.total() == 7 and p.a == 5",
        "assert list(count()) == list(range(9)) and limit == [7]",
        "assert Pair(1, 2) == Pair(1, 2)",
        has_objects=True,
    )
    assert statuses(verdict) == ["ok", "ok", "ok", "wrong"]


LIAR = (
    "class Liar:\n def __init__(s): s.n = 0\n def __len__(s): return 5\n def __bool__(s): return True\n"
    " def __contains__(s, x): return True\n def __getitem__(s, i): return i\n"
    " def startswith(s, x): return True\n"
    " def __iter__(s):\n  s.n += 1\n  return iter(range(5) if s.n == 1 else [])\n"
)
LIES = [
    "r = f(); assert len(r) == 5 and not any(True for _ in r)",  # five items for len, none for a loop
    "r = f(); assert len(list(r)) == 5 and all(x > 7 for x in r)",  # none for the second loop
    "r = f(); assert 1 in r and 77 in r",  # it says yes whatever it is asked for
    "r = f(); assert list(r) == [0, 1, 2, 3, 4] and r[7] == 7",
    "assert f().startswith('one')",  # a method that the right answer, a text, would have
    "r = f(); r.n = 1; assert len(r) == 5",
    "r = f(); r[0] = 9; assert len(r) == 5",
]


@pytest.mark.parametrize("lie", LIES)
def test_an_object_that_lies_earns_nothing_unless_tests_ask_for_objects(lie: str) -> None:
    code = LIAR + " def __setitem__(s, i, x): pass\n"
    code = code.replace("range(5) if s.n == 1 else []", "[]") if "any(" in lie else code
    code += "def f(): return Liar()\n"
    assert try_tests(code, lie).status == "wrong"
    assert try_tests(code, lie, has_objects=True).status == "ok"


def test_an_object_is_one_list_of_items_unless_tests_ask_for_objects() -> None:
    code = (
        "import itertools\ndef squares(n): return map(lambda x: x * x, range(n))\n"
        "def count(): return itertools.count()\ndef keys(): return {'a': 1, 'b': 2}.keys()\n"
        "class Point: pass\ndef point(): return Point()\ndef norm(p): return isinstance(p, Point)\n"
        "def adder(n): return lambda m: n + m\n"
    )
    verdict = try_tests(
        code,
        "r = squares(4); assert list(r) == [0, 1, 4, 9] and len(r) == 4 and (r[-1], r[1:3]) == (9, [1, 4])",
        "r = count(); assert next(r) == 0 and next(r) == 1 and next(r) == 2",
        "assert 3 in count() and [a for a, _ in zip(count(), range(3))] == [0, 1, 2]",
        "assert set(keys()) == {'a', 'b'} and 'a' in keys() and 'c' not in keys()",
        "assert not squares(0) and squares(1) and point()",
        "assert norm(point()) and adder(2)(3) == 5",
        "try:\n    iter(point())\nexcept TypeError:\n    pass\nelse:\n    assert False",
    )
    assert [(result.status, result.message) for result in verdict.results] == [("ok", "")] * 7


IN_PLACE = """
from collections import deque
def sort(x): x.sort()
def put(d, key, value=0): d[key] = value
def both(x):
    x.reverse()
    return x
def unique(x):
    x[:] = sorted(set(x))
    return len(x)
def turn(m):
    for row in m: row.reverse()
    m.append([])
def grow(s, q, b):
    s.add(9)
    q.appendleft(0)
    b += b"!"
def inside(pair): pair[0].append(1)
def empty(x):
    x.clear()
    return []
def size(x):
    x.clear()
    return 0
class Solution:
    def unique(self, x): return unique(x)
class Box: pass
def fill(boxes): boxes.append(Box())
"""


@pytest.mark.parametrize(
    ("test", "status"),
    [
        ("x = [3, 1, 2]; y = x; sort(x); assert x == y == [1, 2, 3]", "ok"),
        ("x = [3, 1, 2]; assert sort(x) is None and x == [1, 2, 3]", "ok"),
        ("x = [3, 1, 2]; goal = sorted(x); sort(x); assert x == goal", "ok"),
        ("d = {1: [2]}; put(d, 3); put(d, key=1, value=5); assert d == {1: 5, 3: 0}", "ok"),
        (
            "d = defaultdict(int); put(d, 'a', 1); assert d['a'] == 1 and d['b'] == 0",
            "ok",
        ),
        ("x = [1, 2]; both(x); assert x == [2, 1]", "ok"),
        ("x = [1, 2]; assert both(x) == [2, 1] and x == [2, 1]", "ok"),
        ("x = [2, 1, 2]; n = unique(x); assert n == 2 and x[:n] == [1, 2]", "ok"),
        ("x = [2, 1, 2]; s = Solution(); n = s.unique(x); assert (n, x) == (2, [1, 2])", "ok"),
        ("m = [[1, 2], [3]]; row = m[0]; turn(m); assert m == [[2, 1], [3], []] and row == [2, 1]", "ok"),
        (
            "s, q, b = {1}, deque([1]), bytearray(b'a'); grow(s, q, b); assert (s, [*q], b) == ({1, 9}, [0, 1], b'a!')",
            "ok",
        ),
        ("x = []; inside((x, 1)); assert x == [1]", "ok"),
        ("x = []; fill(x); assert len(x) == 1 and x != [1]", "ok"),
        ("x = [3, 1, 2]; sort(x); assert x == [3, 1, 2]", "wrong"),
        ("x = [3, 1]; sort(x[:]); assert x == [3, 1]", "ok"),
        # What it returns is never set against what it made of its argument.
        ("x = [3, 1]; assert empty(x) == sorted(x)", "wrong"),
        ("x = [3, 1]; r = empty(x); assert r == sorted(x)", "wrong"),
        ("x = [3, 1]; r = empty(x); goal = [v for v in x]; assert not set(goal) ^ set(r)", "wrong"),
        ("x = [3, 1]; assert size(x) == len(x)", "wrong"),
        ("def check(f):\n    x = [3, 1]\n    r = f(x)\n    assert r == sorted(x)\ncheck(empty)", "wrong"),
        ("for x in [[3, 1], [2]]:\n    r = empty(x)\n    assert len(r) == len(x)", "wrong"),
        ("x = [3, 1]; assert all(a == b for a, b in zip(empty(x), x)) and len(x) == 0", "wrong"),
    ],
)
def test_arguments_that_change_in_place(test: str, status: str) -> None:
    setup = "from collections import defaultdict, deque"
    verdict = try_tests(IN_PLACE, test, setup=setup, has_objects="Solution" in test)
    assert statuses(verdict) == [status], verdict.results[0].message


def test_names_win_over_setup_and_nothing_else_does() -> None:
    code = "def f(x): return helper(x)\ndef helper(x): return 5\ndef sum(x): return 5"
    setup = "def f(x): pass\ndef helper(x): return 1"
    verdict = try_tests(
        code, "assert f(1) == 5", "assert helper(1) == 1", "assert sum([1]) == 1", setup=setup, names=["f"]
    )
    assert statuses(verdict) == ["ok", "ok", "ok"]


def test_what_cannot_be_passed_is_no_fault_of_the_program() -> None:
    assert try_tests("def f(g): return g(1)", "assert f(lambda x: x + 1) == 2").status == "infra_error"


UNSENDABLE = [
    ("class encode(Exception): pass\ndef decode(x): return 'abc'", "assert decode(encode('abc')) == 'abc'"),
    (
        "import statistics as encode, sys\nencode.__name__ = 'encode'\ndef decode(x): return 'abc'",
        "assert decode(encode) == 'abc'",
    ),
    (
        "def encode(x):\n r = x\n for _ in range(99): r = [r]\n return r\ndef decode(x): return 'abc'",
        "assert decode([[encode('abc')]]) == 'abc'",
    ),
    (
        "def encode(x): return 'x' * 7_000_000\ndef decode(x): return 'abc'",
        "r = encode('abc'); assert decode([r, r]) == 'abc'",
    ),
    (
        "def encode(x): return []\ndef decode(x): return 'abc'",
        "assert decode(encode(1) or (lambda: 1)) == 'abc'",
    ),
    ("def decode(x): return 'abc'", "try:\n    encode\nexcept NameError:\n    decode(lambda: 1)"),
]


@pytest.mark.parametrize(("code", "test"), UNSENDABLE)
def test_a_program_cannot_make_itself_unjudgeable(code: str, test: str) -> None:
    assert try_tests(code, test).status == "wrong"


def test_a_program_cannot_make_itself_unjudgeable_through_the_setup() -> None:
    code = "class Pair(Exception): pass\ndef f(p): return 3"
    assert try_tests(code, "assert f(pair) == 3", setup="pair = Pair(1, 2)").results[0].status == "wrong"


def test_a_test_that_asks_nothing_counts_for_nobody() -> None:
    def share(code: str, *tests: str) -> float:
        return try_tests(code, *tests).scores["tests"]

    assert share("def f(n): raise ValueError", "assert True", "assert f(1) == 2", "x = 3") == 0.0
    assert share("def f(n): return n + 1", "assert True", "assert f(1) == 2", "assert f(1) == 3") == 0.5
    assert share("def f(n): return n + 1", "assert True", "assert f(1) == 2") == 1.0
    assert share("def f(n): return n + 1", "assert True") == 0.0
    assert share("class Bad(ValueError): pass", "assert issubclass(Bad, Exception)") == 1.0


def test_expected_values_never_enter_the_programs_process() -> None:
    code = (
        "import gc\ndef f(n):\n seen = [o for o in gc.get_objects() if type(o) in (list, tuple, dict)]\n"
        " return any(str(n + 1) in repr(o)[:5000] for o in seen)"
    )
    assert try_tests(code, "assert f(24680) in (False, 24681)").status == "ok"


def test_output_before_a_failing_hook_is_kept() -> None:
    verdict = run("import sys\ndef hook(*_): raise KeyError\nsys.excepthook = hook\nprint('x')\n1 / 0")
    assert (verdict.status, verdict.stdout) == ("rte", "x\n")


def test_stdin_with_a_lone_surrogate_is_no_crash() -> None:
    assert run("print(ascii(input()))", stdin="a\ud800\udcff").status == "ok"


def test_no_file_descriptors_left_is_no_verdict_and_nothing_leaks() -> None:
    with Sandbox() as sandbox:
        before = len(os.listdir("/proc/self/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 6, hard))  # a program needs 12
        try:
            assert sandbox.run("print(1)").status == "infra_error"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert sandbox.run("print(1)").stdout == "1\n"
        assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_starves_while_others_loop() -> None:
    with Sandbox(num_workers=1) as sandbox:
        is_done = threading.Event()
        num_others = [0]

        def loop() -> None:
            while not is_done.is_set() and num_others[0] < 500:
                sandbox.run("1")
                num_others[0] += 1

        threads = [threading.Thread(target=loop) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        start = num_others[0]
        sandbox.run("1")
        waited = num_others[0] - start
        is_done.set()
        for thread in threads:
            thread.join()
        assert waited <= 20  # in turn it is 2 or 3; with an unfair semaphore hundreds


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stopped_supervisor_is_killed_with_all_below(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require(backend)
    sandbox = Sandbox(backend=backend)
    assert sandbox._supervisor is not None
    process = sandbox._supervisor.process
    below = {process.pid, *descendants(process.pid)}
    for pid in below:
        os.kill(pid, signal.SIGSTOP)
    wait = process.wait
    monkeypatch.setattr(process, "wait", lambda timeout=None: wait(timeout and 0.1))
    sandbox.close()
    deadline = time.monotonic() + 20
    while (left := {pid for pid in below if is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def test_a_test_that_does_not_compile_is_no_fault_of_the_program() -> None:
    verdict = run_tests("def f(n): return n", ["assert f(1) ==", "assert f(1) == 1"])
    assert [result.status for result in verdict.results] == ["infra_error", "ok"]
