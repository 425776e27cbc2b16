"""Attack programs: they try to escape, to take too many resources, or to pass tests without being right.

Each prints `BREACH` if it got what it must not have; `battery.py` also checks from outside what it can. `@NAME@` in a
program is a placeholder for a part of the scene: a canary file, a sentinel process, a port.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Programs that try to pass tests of a function `f` with `f(n) == n * n` without computing it.

_SQUARE = ("assert f(3) == 9", "assert f(4) == 16", "assert f(12345) == 152399025")

_SEND = """
import json, os, struct
def send(text, nonce=b"0" * 16):
    data = nonce + text.encode()
    os.write(5, struct.pack("=I", len(data)) + data)
"""

REWARD_ATTACKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "equal to everything": ("class A:\n def __eq__(s, o): return True\ndef f(n): return A()", _SQUARE),
    "int subclass": ("class A(int):\n def __eq__(s, o): return True\n __hash__ = None\ndef f(n): return A(1)", _SQUARE),
    "str subclass": (
        "class A(str):\n def __eq__(s, o): return True\n def __hash__(s): return 1\ndef f(n): return A('x')",
        ("assert f(1) == 'one'",),
    ),
    "list of liars": (
        "class A:\n def __eq__(s, o): return True\ndef f(n): return [A(), A()]",
        ("assert f(1) == [1, 2]",),
    ),
    "reflected comparison": (
        "class A:\n __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda s, o: True\ndef f(n): return A()",
        ("assert 1 < f(1) < 3",),
    ),
    "lying metaclass": (
        "class M(type):\n def __eq__(s, o): return True\n __hash__ = type.__hash__\n"
        "class A(metaclass=M): pass\ndef f(n): return A",
        _SQUARE,
    ),
    "not a number": ("def f(n): return float('nan')", ("assert abs(f(1) - 1) < 1e-6", "assert f(1) == 1")),
    "true for one": ("def f(n): return [True]", ("assert type(f(1)[0]) is int and f(1) == [1]",)),
    "sys.exit(0)": ("import sys\ndef f(n): sys.exit(0)", _SQUARE),
    "os._exit(0)": ("import os\ndef f(n): os._exit(0)", _SQUARE),
    "exit while loading": ("import os\nos._exit(0)", _SQUARE),
    "SystemExit while loading": ("raise SystemExit(0)", _SQUARE),
    "KeyboardInterrupt": ("def f(n): raise KeyboardInterrupt", _SQUARE),
    "own BaseException": ("class E(BaseException): pass\ndef f(n): raise E", _SQUARE),
    "prints passed": ("def f(n):\n print('ok', 'passed', '{\"status\": \"ok\"}')", _SQUARE),
    "raises what tests expect": (
        "def f(n): raise AssertionError('passed')",
        ("try:\n    f(1)\nexcept ValueError:\n    pass",),
    ),
    "patches builtins": (
        "import builtins, json, operator\nbuiltins.AssertionError = Warning\nbuiltins.isinstance = lambda *a: True\n"
        "json.loads = lambda *a, **k: 9\noperator.eq = lambda *a: True\ndef f(n): return 0",
        _SQUARE,
    ),
    "shadows builtins of the tests": (
        "all = any = abs = len = sorted = isinstance = lambda *a, **k: True\ndef f(n): return 0",
        ("assert all([f(3) == 9])", "assert isinstance(f(3), str)"),
    ),
    "false module": (
        "from unittest import mock as math\ndef f(n): return 0",
        ("import math\nassert math.isclose(f(3), 9)",),
    ),
    "patches the encoder": (
        "import sys, gc\nfor o in gc.get_objects():\n"
        " if isinstance(o, dict) and 'encode' in o and 'decode' in o:\n"
        "  try: o['encode'] = lambda *a: '[\"value\",true]'\n  except Exception: pass\ndef f(n): return 0",
        _SQUARE,
    ),
    "frames": (
        "import sys\ndef f(n):\n frame = sys._getframe()\n while frame:\n"
        "  for v in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
        "   if isinstance(v, (str, bytes)) and 'assert' in str(v) and 'def f' not in str(v): return n * n\n"
        "  frame = frame.f_back",
        _SQUARE,
    ),
    "objects": (
        "import gc\ndef f(n):\n for o in gc.get_objects():\n"
        "  if isinstance(o, dict) and any(v == 'assert f(3) == 9' for v in o.values() if type(v) is str): return n * n",
        _SQUARE,
    ),
    "raw memory": (
        "import ctypes, re\ndef f(n):\n want = b'== 152' + b'399025'\n here = id(object()) & ~0xFFFFF\n"
        " try: text = ctypes.string_at(here, 1 << 20)\n except Exception: return 0\n"
        " return n * n if want in text else 0",
        _SQUARE,
    ),
    "answers in advance": (
        _SEND + "send('[\"value\",\"9\"]'); send('[\"value\",\"16\"]')\ndef f(n): return 0",
        _SQUARE,
    ),
    "answers with another nonce": (
        _SEND + "def f(n):\n send('[\"value\",\"9\"]'); return 0",
        ("assert f(3) == 9",),
    ),
    "answers twice": (
        _SEND + "import sys\ndef f(n):\n frame = sys._getframe()\n"
        " while 'frame' not in frame.f_locals or type(frame.f_locals['frame']) is not bytes: frame = frame.f_back\n"
        " nonce = frame.f_locals['frame'][:16]\n send('[\"value\",\"9\"]', nonce); send('[\"value\",\"16\"]', nonce)\n"
        " return 0",
        ("assert f(3) == 9 and f(4) == 16",),
    ),
    "replays the first answer": (
        "first = []\ndef f(n):\n first.append(n * n if not first else 0)\n return first[0]",
        ("assert f(3) == 9 and f(4) == 16",),
    ),
    "pretends to define the tests' names": (
        _SEND + "send('', b'{\"f\": \"object\", \"check\": \"object\"}')\ndef f(n): return 0",
        _SQUARE,
    ),
    "deep JSON": (
        _SEND + "import sys\ndef f(n):\n frame = sys._getframe()\n"
        " while 'frame' not in frame.f_locals or type(frame.f_locals['frame']) is not bytes: frame = frame.f_back\n"
        " send('[' * 100000, frame.f_locals['frame'][:16])",
        _SQUARE,
    ),
    "endless message": (
        "import os\ndef f(n):\n os.write(5, b'\\xff\\xff\\xff\\x7f')\n while True: os.write(5, b'x' * 65536)",
        _SQUARE,
    ),
    "huge integer": ("def f(n): return 9 ** 100000", _SQUARE),
    "value that contains itself": ("def f(n):\n x = []; x.append(x); return x", _SQUARE),
    "duplicate keys": ("class D(dict):\n def items(s): return [(1, 1), (1, 9)]\ndef f(n): return D(a=1)", _SQUARE),
    "length and loop that differ": (
        "class A:\n def __len__(s): return 5\n def __iter__(s): return iter([])\ndef f(n): return A()",
        ("r = f(1)\nassert len(r) == 5 and all(0 <= x < 10 for x in r)",),
    ),
    "second loop without items": (
        "class A:\n n = 0\n def __iter__(s):\n  s.n += 1\n  return iter([99] * 5 if s.n == 1 else [])\n"
        "def f(n): return A()",
        ("r = f(1)\nassert len(list(r)) == 5 and all(0 <= x < 10 for x in r)",),
    ),
    "every member": ("class A:\n def __contains__(s, o): return True\ndef f(n): return A()", ("assert 9 in f(3)",)),
    "sorted by index only": (
        "class A:\n def __len__(s): return 3\n def __getitem__(s, i): return i\n"
        " def __iter__(s): return iter([3, 1, 2])\ndef f(n): return A()",
        ("r = f([3, 1, 2])\nassert sorted(r) == [1, 2, 3] and all(r[i] < r[i + 1] for i in range(2))",),
    ),
    "method that says yes": (
        "class A:\n def startswith(s, o): return True\ndef f(n): return A()",
        ("assert f(1).startswith('one')",),
    ),
    "exception in the place of a function": (
        "class f(Exception): pass\ndef g(x): return 'abc'",
        ("assert g(f('abc')) == 'abc'",),
    ),
    "module in the place of a function": (
        "import types\nf = types.ModuleType('f')\ndef g(x): return 'abc'",
        ("assert g(f('abc')) == 'abc'",),
    ),
    "result too deep to give back": (
        "def f(n):\n r = n\n for _ in range(99): r = [r]\n return r\ndef g(x): return 'abc'",
        ("assert g([[f('abc')]]) == 'abc'",),
    ),
    "result too large to give back": (
        "def f(n): return 'x' * 7_000_000\ndef g(x): return 'abc'",
        ("r = f('abc')\nassert g([r, r]) == 'abc'",),
    ),
    "length that lies": (
        "class A:\n def __len__(s): return 9\n def __iter__(s): return iter([])\ndef f(n): return A()",
        ("assert list(f(3)) == [9]",),
    ),
    "endless iterator": ("import itertools\ndef f(n): return itertools.count()", ("assert sum(f(3)) == 9",)),
    "changes the argument": (
        "def f(x): x.clear(); return []",
        ("x = [3, 1]\nassert f(x) == sorted(x)",),
    ),
    "never answers": ("import os\ndef f(n): os.close(5)", _SQUARE),
    "busy in the call": ("def f(n):\n while True: pass", _SQUARE),
    "exec of the test": ("def f(n): exec('raise SystemExit')", _SQUARE),
    "__del__": ("class A:\n def __del__(s):\n  import os; os._exit(0)\ndef f(n): A()", _SQUARE),
    "trace function": ("import sys\nsys.settrace(lambda *a: None)\ndef f(n): return 0", _SQUARE),
    "overwrites modules": (
        "import sys\nfor k in list(sys.modules): sys.modules[k] = sys\ndef f(n): return 0",
        _SQUARE,
    ),
    "hard-codes what it saw": ("def f(n): return {3: 9, 4: 16}.get(n)", _SQUARE),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack program and its permitted outcomes.

    Attributes:
        name: Unique.
        group: What it attacks.
        code: The program.
        statuses: Verdicts that mean it was contained.
        tests: For attacks on rewards: tests that it must not pass; () for a program that is only run.
        stdin_bytes: How much to offer on stdin.
    """

    name: str
    group: str
    code: str
    statuses: tuple[str, ...]
    tests: tuple[str, ...] = ()
    stdin_bytes: int = 0


_HEAD = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def syscall(x86, arm, *arguments):
    number = x86 if os.uname().machine == "x86_64" else arm
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return result if result >= 0 else -ctypes.get_errno()
def attempt(what, function, *arguments):
    try:
        result = function(*arguments)
    except (OSError, ValueError) as error:
        print("denied:", what, type(error).__name__)
        return None
    print("BREACH:", what, str(result)[:100], flush=True)
    return result
"""

_BUFFER = "ctypes.create_string_buffer(4096)"

# name: number on x86_64, number on aarch64, arguments. Each must return an error.
_SYSTEM_CALLS: dict[str, tuple[int, int, str]] = {
    "unshare user namespace": (272, 97, "0x10000000"),
    "clone user namespace": (56, 220, "0x10000011, 0, 0, 0, 0"),
    "clone a process": (56, 220, "17, 0, 0, 0, 0"),
    "clone3": (435, 435, f"{_BUFFER}, 88"),
    "execve": (59, 221, "b'/bin/sh', 0, 0"),
    "execveat by fd": (322, 281, "6, b'', 0, 0, 0x1000"),
    "ptrace attach": (101, 117, "16, @SENTINEL@, 0, 0"),
    "ptrace traceme": (101, 117, "0, 0, 0, 0"),
    "process_vm_readv": (310, 270, "@SENTINEL@, 0, 0, 0, 0, 0"),
    "bpf": (321, 280, f"5, {_BUFFER}, 128"),
    "keyctl": (250, 219, "0, -3, 1"),
    "add_key": (248, 217, "b'user', b'k', b'v', 1, -3"),
    "io_uring_setup": (425, 425, f"8, {_BUFFER}"),
    "userfaultfd": (323, 282, "1"),
    "perf_event_open": (298, 241, f"{_BUFFER}, 0, -1, -1, 0"),
    "name_to_handle_at": (303, 264, f"-100, b'/', {_BUFFER}, {_BUFFER}, 0"),
    "open_by_handle_at": (304, 265, f"0, {_BUFFER}, 0"),
    "mount": (165, 40, "b'none', b'/', b'tmpfs', 0, 0"),
    "umount": (166, 39, "b'/', 2"),
    "move_mount": (429, 429, "0, b'', 0, b'', 0"),
    "pivot_root": (155, 41, "b'/', b'/'"),
    "chroot": (161, 51, "b'/'"),
    "setns": (308, 268, "0, 0"),
    "setuid": (105, 146, "0"),
    "setgid": (106, 144, "0"),
    "setgroups": (116, 159, "0, 0"),
    "capset": (126, 91, f"{_BUFFER}, 0"),
    "mknod": (259, 33, "-100, b'/tmp/d', 0o20666, 259"),
    "mkfifo": (259, 33, "-100, b'/tmp/f', 0o10666, 0"),
    "mkdir": (258, 34, "-100, b'/tmp/d', 511"),
    "symlink": (266, 36, "b'/etc/passwd', -100, b'/tmp/l'"),
    "link": (265, 37, "-100, b'/etc/passwd', -100, b'/tmp/h', 0"),
    "unlink": (263, 35, "-100, b'@CANARY@', 0"),
    "rename": (316, 276, "-100, b'@CANARY@', -100, b'@CANARY@.x', 0"),
    "truncate": (76, 45, "b'@CANARY@', 0"),
    "chmod": (268, 53, "-100, b'@CANARY@', 0o777"),
    "clock_settime": (227, 112, f"0, {_BUFFER}"),
    "sethostname": (170, 161, "b'x', 1"),
    "reboot": (169, 142, "0, 0, 0, 0"),
    "init_module": (175, 105, f"{_BUFFER}, 8, b''"),
    "kexec_load": (246, 104, "0, 0, 0, 0"),
    "swapoff": (168, 225, "b'/swap'"),
    "kernel log": (103, 116, f"3, {_BUFFER}, 4096"),
    "memfd_create": (319, 279, "b'x', 0"),
    "memfd_secret": (447, 447, "0"),
    "shared memory": (29, 194, "0, 4096, 0o1666"),
    "message queue": (68, 186, "0, 0o1666"),
    "posix message queue": (240, 180, "b'q', 0o102, 0o666, 0"),
    "semaphores": (64, 190, "0, 1, 0o1666"),
    "inotify": (294, 26, "0"),
    "fanotify": (300, 262, "0, 0"),
    "pidfd_open": (434, 434, "@SENTINEL@, 0"),
    "pidfd_getfd": (438, 438, "0, 0, 0"),
    "rt_sigqueueinfo": (129, 138, f"@SENTINEL@, 9, {_BUFFER}"),
    "tkill": (200, 130, "@SENTINEL@, 9"),
    "tgkill another": (234, 131, "@SENTINEL@, @SENTINEL@, 9"),
    "prlimit of another": (302, 261, f"@SENTINEL@, 7, 0, {_BUFFER}"),
    "prlimit raise": (302, 261, f"0, 9, {_BUFFER}, 0"),
    "real-time scheduling": (144, 119, f"0, 1, {_BUFFER}"),
    "setpriority": (141, 140, "0, 0, -5"),
    "personality": (135, 92, "0x0040000"),
    "seccomp again": (317, 277, f"1, 0, {_BUFFER}"),
    "prctl dumpable": (157, 167, "4, 1, 0, 0, 0"),
    "prctl subreaper": (157, 167, "36, 1, 0, 0, 0"),
    "prctl forget parent": (157, 167, "1, 0, 0, 0, 0"),
    "kcmp": (312, 272, "@SENTINEL@, @SENTINEL@, 0, 0, 0"),
    "quotactl": (179, 60, "0, 0, 0, 0"),
    "timer_create": (222, 107, f"0, 0, {_BUFFER}"),
    "setsid": (112, 157, ""),
    "fcntl owner": (72, 25, "1, 8, @SENTINEL@"),
    "terminal injection": (16, 29, "0, 0x5412, b'x'"),
    "netlink socket": (41, 198, "16, 3, 0"),
    "packet socket": (41, 198, "17, 3, 0"),
    "crypto socket": (41, 198, "38, 5, 0"),
    "vsock": (41, 198, "40, 1, 0"),
    "unix datagram pair": (53, 199, f"1, 2, 0, {_BUFFER}"),
}

# name: group, statuses, program (after _HEAD).
_PROGRAMS: dict[str, tuple[str, str, str]] = {
    "fork bomb": ("resources", "ok", "while attempt('fork', os.fork) is not None: pass"),
    "x32 system call": ("escape", "killed", "print('BREACH', syscall(0x40000000 + 39, 172 ^ 511))\nraise MemoryError"),
    "subprocess": ("escape", "ok", "import subprocess\nattempt('run', subprocess.run, ['/bin/true'])"),
    "os.system": ("escape", "ok", "r = os.system('echo BREACH')\nprint('system', r)"),
    "multiprocessing": (
        "escape",
        "ok rte",
        "import multiprocessing as m\np = m.Process(target=print, args=('BREACH',))\nattempt('start', p.start)",
    ),
    "thread bomb": (
        "resources",
        "killed mle rte tle",
        "import threading, time\nthreading.stack_size(1 << 15)\n"
        "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    ),
    "memory bomb": ("resources", "mle", "x = []\nwhile True: x.append(bytearray(1 << 20))"),
    "memory at once": ("resources", "mle", "x = b'x' * (1 << 40)"),
    "memory by mmap": ("resources", "rte", "import mmap\nx = [mmap.mmap(-1, 1 << 28) for _ in range(64)]"),
    "memory, caught": (
        "resources",
        "ok mle tle",
        "x = []\nfor _ in range(10**5):\n try: x.append(bytearray(1 << 20))\n except MemoryError: break\nprint(len(x))",
    ),
    "memory in threads": (
        "resources",
        "mle rte killed ok tle",
        "import threading\ndef f():\n x = []\n while True: x.append(bytearray(1 << 20))\n"
        "for _ in range(8): threading.Thread(target=f).start()",
    ),
    "big integer": ("resources", "tle mle", "x = 10 ** 10 ** 8; print(x % 7)\nx = 7 ** 10 ** 9"),
    "regex backtracking": ("resources", "tle", "import re; re.match('(a+)+$', 'a' * 40 + 'b')"),
    "sleep": ("resources", "tle", "import time; time.sleep(600)"),
    "busy loop": ("resources", "tle", "while True: pass"),
    "busy threads": (
        "resources",
        "tle",
        "import threading\ndef f():\n while True: pass\nfor _ in range(20): threading.Thread(target=f).start()",
    ),
    "endless recursion": (
        "resources",
        "killed mle rte tle",
        "sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    ),
    "nested repr": (
        "resources",
        "killed mle rte tle",
        "sys.setrecursionlimit(10**8)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    ),
    "deep compile": ("resources", "rte mle killed", "compile('-' * 10**5 + '1', 'x', 'eval')"),
    "segfault": ("resources", "killed", "ctypes.string_at(0)"),
    "abort": ("resources", "killed", "os.abort()"),
    "stop itself": ("resources", "tle", "import signal; os.kill(os.getpid(), signal.SIGSTOP)"),
    "ignore signals": (
        "resources",
        "tle",
        "import signal\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nwhile True: pass",
    ),
    "close everything, spin": ("resources", "tle", "os.closerange(0, 99)\nwhile True: pass"),
    "many descriptors": ("resources", "ok", "x = []\ntry:\n while len(x) < 9999: x += os.pipe()\nexcept OSError: pass\n"
                         "print('BREACH' if len(x) > 200 else len(x))"),
    "pipe blocked": ("resources", "tle", "r, w = os.pipe(); os.read(r, 1)"),
    "huge stdin unread": ("resources", "ok", "print('done')"),
    "huge stdin read": ("resources", "ok", "print(len(sys.stdin.read()))"),
    "write files": (
        "files",
        "ok",
        "for p in ('/x', '/usr/x', '/etc/x', '/tmp/x', '/dev/shm/x', '/proc/sys/x', '@FOLDER@/x', '@CANARY@', 'x'):\n"
        " for m in ('w', 'a', 'x', 'r+'): attempt(p, open, p, m)\n"
        " attempt('mkdir', os.mkdir, p + '-'); attempt('tmp', os.open, os.path.dirname(p) or '.', 0o20200002)",
    ),
    "write to the library": ("files", "ok", "import json\nattempt('w', open, json.__file__, 'w')\n"
                             "attempt('w', os.open, '/this.py', 2)"),
    "write through a memory file": ("files", "ok", "attempt('w', os.write, 0, b'x')\nattempt('t', os.truncate, 0, 9)"),
    "temporary file": ("files", "ok", "import tempfile\nattempt('tmp', tempfile.TemporaryFile)"),
    "read answers": ("files", "ok", "attempt('canary', lambda: open('@CANARY@').read())"),
    "read the machine": (
        "files",
        "ok",
        "for p in ('/etc/passwd', '/etc/shadow', '/etc/hostname', '/proc/self/environ', '/proc/1/environ', "
        "'/proc/1/cmdline', '/proc/1/root/etc/passwd', '/proc/self/maps', '/proc/self/mem', '/proc/kcore', "
        "'/proc/sysrq-trigger', '/proc/@PARENT@/environ', '/proc/@PARENT@/mem', '/dev/mem', '/dev/kmsg', "
        "'/dev/tty', '/sys/kernel/notes', '/root/.bashrc', '../../../../etc/passwd'): attempt(p, open, p, 'rb')",
    ),
    "read installed packages": (
        "files",
        "ok",
        "import glob\nfor top in ('/', os.path.dirname(os.__file__)):\n"
        " for p in glob.glob(top + '/site-packages/**/*.py', recursive=True)[:20]: attempt(p, open, p)",
    ),
    "list the machine": (
        "files",
        "ok",
        "for p in ('/etc', '/proc', '/home', '/tmp', '/root', '@FOLDER@', '/proc/self/fd', '/proc/self/task', '/dev'):"
        "\n attempt(p, os.listdir, p)",
    ),
    "stat the machine": (
        "files",
        "ok",
        "print('seen:', [p for p in ('/etc/passwd', '@CANARY@', '/proc/@PARENT@') if os.path.exists(p)])",
    ),
    "leave the root": (
        "files",
        "ok",
        "for p in ('..', '/', '/..'):\n try: os.chdir(p)\n except OSError: pass\n"
        "attempt('up', open, '../' * 20 + 'etc/passwd')",
    ),
    "oom score": ("files", "ok", "attempt('oom', open, '/proc/self/oom_score_adj', 'w')"),
    "environment": ("secrets", "ok", "print(sorted(os.environ))\nif '@SECRET@' in str(os.environ): print('BREACH')"),
    "environment in memory": (
        "secrets",
        "ok",
        "p = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')\ni = 0\n"
        "while p and p[i]:\n print(p[i])\n i += 1",
    ),
    "environment on the stack": (
        "secrets",
        "ok killed",
        "top = ctypes.c_void_p.in_dll(ctypes.CDLL(None), '__libc_stack_end').value & ~4095\n"
        "for i in range(64):\n if b'@SECRET@' in ctypes.string_at(top + 4096 * i, 4096): print('BREACH', flush=True)",
    ),
    "inherited descriptors": (
        "secrets",
        "ok",
        "for fd in range(4096):\n try: s = os.fstat(fd)\n except OSError: continue\n"
        " if fd > 3 and fd != 6: print('BREACH: fd', fd, s)",
    ),
    "objects of others": (
        "secrets",
        "ok",
        "import gc\nwords = [o for o in gc.get_objects() if isinstance(o, dict) and 'memory_mib' in o]\n"
        "if words: print('BREACH', str(words)[:200])\n"
        "f = sys._getframe()\nwhile f:\n if 'tests' in f.f_locals: print('BREACH')\n f = f.f_back",
    ),
    "kill": (
        "processes",
        "ok",
        "for p in (os.getppid(), @SENTINEL@, @PARENT@, 1, -1, 0, -os.getpid()): attempt(p, os.kill, p, 9)",
    ),
    "kill every process": (
        "processes",
        "ok",
        "me = os.getpid()\nfor p in range(1, 33000):\n if p != me:\n  try: os.kill(p, 9)\n  except OSError: continue\n"
        "  print('BREACH: signalled', p)",
    ),
    "TCP": (
        "network",
        "ok",
        "import socket\nfor a in (('127.0.0.1', @PORT@), ('169.254.169.254', 80), ('8.8.8.8', 53)):\n"
        " attempt(a, socket.create_connection, a, 1)",
    ),
    "UDP": ("network", "ok", "import socket\nattempt('udp', socket.socket, socket.AF_INET, socket.SOCK_DGRAM)"),
    "DNS": ("network", "ok", "import socket\nattempt('dns', socket.getaddrinfo, 'example.com', 80)"),
    "http": ("network", "ok", "import urllib.request as u\nattempt('http', u.urlopen, 'http://127.0.0.1:@PORT@')"),
    "abstract unix socket": (
        "network",
        "ok",
        "import socket\na, b = socket.socketpair()\nattempt('connect', a.connect, '\\0@SOCKET@')\n"
        "attempt('bind', a.bind, '\\0x')\nattempt('new', socket.socket, socket.AF_UNIX)\n"
        "attempt('sendto', lambda: a.sendto(b'x', '\\0@SOCKET@'))",
    ),
    "daemon": ("lifecycle", "ok", "attempt('fork', os.fork)\nattempt('setsid', os.setsid)\n"
               "attempt('spawn', os.posix_spawn, "
               "'/bin/sleep', ['sleep', '99'], {})"),
    "daemon threads": (
        "lifecycle",
        "ok",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    ),
    "thread that stays": ("lifecycle", "tle", "import threading, time\n"
                          "threading.Thread(target=time.sleep, args=(60,)).start()"),
    "atexit hangs": ("lifecycle", "tle", "import atexit, time\natexit.register(time.sleep, 60)"),
    "__del__ hangs": ("lifecycle", "tle", "import time\nclass A:\n def __del__(self): time.sleep(60)\na = A()"),
    "early _exit": ("lifecycle", "ok", "os._exit(0)"),
    "raises BaseException": ("lifecycle", "rte", "class E(BaseException): pass\nraise E"),
    "exception that hangs": ("lifecycle", "tle", "class E(Exception):\n def __str__(self):\n  while True: pass\n"
                             "raise E"),
    "infinite stdout": ("channel", "ole", "while True: print('x' * 1000)"),
    "infinite stderr": ("channel", "ole", "while True: print('x' * 1000, file=sys.stderr)"),
    "raw stdout": ("channel", "ole", "while True: os.write(1, b'x' * 65536)"),
    "status forged": (
        "channel",
        "ok ole",
        "for _ in range(100): os.write(3, b'RCDXinfra_error' * 100)",
    ),
    "status pipe flooded": ("channel", "ole", "while True: os.write(3, b'C' * 65536)"),
    "signal without a name": ("lifecycle", "killed", "os.kill(os.getpid(), 40)\nwhile True: pass"),
    "main thread leaves, others stay": ("lifecycle", "tle", "import threading\ndef f():\n while True: pass\n"
                                        "threading.Thread(target=f).start()\nsyscall(60, 93, 0)"),
    "flags for the next program": ("channel", "ok", "import fcntl\nflags = fcntl.fcntl(6, fcntl.F_GETFL)\n"
                                   "if flags & (os.O_APPEND | os.O_NONBLOCK): print('BREACH', flags)\n"
                                   "fcntl.fcntl(6, fcntl.F_SETFL, flags | os.O_APPEND | os.O_NONBLOCK)"),
    "flags of the last program": ("channel", "ok", "import fcntl\nflags = fcntl.fcntl(6, fcntl.F_GETFL)\n"
                                  "if flags & (os.O_APPEND | os.O_NONBLOCK): print('BREACH', flags)"),
    "fork by int 0x80": ("system calls", "killed", "import mmap\nif os.uname().machine != 'x86_64': os.abort()\n"
                          "page = mmap.mmap(-1, 4096, prot=7); page.write(bytes.fromhex('b802000000cd80c3'))\n"
                          "at = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
                          "print('BREACH', ctypes.CFUNCTYPE(ctypes.c_int)(at)())"),
    "status of a failed start forged": ("channel", "rte", "os.write(3, b'X')\nos._exit(1)"),
    "invalid UTF-8": ("channel", "ok", "sys.stdout.buffer.write(bytes(range(256)))"),
    "lone surrogate": ("channel", "rte", "print('\\ud800')"),
    "NUL and escapes": ("channel", "ok", "print('\\0\\x1b]0;title\\x07\\x1b[2J\\r\\b')"),
    "one long line": ("channel", "ole", "print('x' * 10_000_000)"),
    "pickle": ("channel", "ok", "import pickle\nclass A:\n def __reduce__(self): return (print, ('BREACH' * 0,))\n"
               "sys.stdout.buffer.write(pickle.dumps(A()))"),
    "null byte in source": ("channel", "rte", "\0"),
    "trace function": ("channel", "ok", "sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)\nprint(1)"),
    "site modules": ("channel", "ok", "for n in ('usercustomize', 'conftest', 'whet', 'pip'):\n"
                     " try: __import__(n); print('BREACH', n)\n except ImportError: pass"),
}  # fmt: skip


def all_attacks() -> Iterator[Attack]:
    """Yield all attacks."""
    for name, (group, statuses, code) in _PROGRAMS.items():
        size = 50_000_000 if "stdin" in name else 0
        yield Attack(name, group, _HEAD + code, tuple(statuses.split()), stdin_bytes=size)
    for name, (x86, arm, arguments) in _SYSTEM_CALLS.items():
        code = f"r = syscall({x86}, {arm}, {arguments})\nprint('BREACH' if r >= 0 else errno.errorcode.get(-r, r))"
        yield Attack(name, "system calls", _HEAD + code, ("ok",))
    for name, (code, tests) in REWARD_ATTACKS.items():
        statuses = ("wrong", "rte", "tle", "mle", "ole", "killed")
        yield Attack(name, "rewards", code, statuses, tests=tests)
