"""The battery, on every wall that this machine has: `whet doctor sandbox` runs the same."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from needs import anybodys_python, require

from whet.sandbox.attacks.attacks import Attack, all_attacks
from whet.sandbox.attacks.battery import run_battery
from whet.sandbox.programs import Sandbox

ATTACKS = list(all_attacks())
ROOT = Path(__file__).parents[2]
PLACES = {
    "": "",
    "an ordinary user": """
os.setgroups([]); os.setresgid(4321, 4321, 4321); os.setresuid(4321, 4321, 4321)
assert not os.access("/root", os.R_OK)
""",
    "root without CAP_SYS_CHROOT": """
assert libc.prctl(24, 18, 0, 0, 0) == 0
head, sets = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
assert libc.capget(head, sets) == 0
left = [bits & ~(1 << 18) if place < 3 else bits for place, bits in enumerate(struct.unpack("=6I", sets.raw))]
assert libc.capset(head, struct.pack("=6I", *left)) == 0
""",
    # landlock_create_ruleset (444) gives ENOSYS, as kernels without landlock do
    "no landlock": """
code = b"".join(struct.pack("=HBBI", *row) for row in
    ((0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)))
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
assert os.geteuid() == 0 or libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(Program(4, code)), 0, 0) == 0
""",
}
"""What a process does before it starts a sandbox, for each kind of place."""
ATTACK = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
{place}
from whet.sandbox.attacks.attacks import all_attacks
from whet.sandbox.attacks.battery import run_battery
from whet.sandbox.programs import Sandbox
with Sandbox(backend={backend!r}) as sandbox:
    findings = run_battery(sandbox, list(all_attacks()), lambda _: None, num_workers=4)
print(len(findings), [finding for finding in findings if finding.breach])
"""


@pytest.mark.some(4, others="slow")
@pytest.mark.parametrize(
    ("backend", "place"),
    [
        *itertools.product(("landlock", "bwrap"), ("", "an ordinary user", "root without CAP_SYS_CHROOT")),
        ("bwrap", "no landlock"),
        ("bwrap", "both"),
    ],
)
@pytest.mark.ci
def test_attacks_are_contained(backend: str, place: str) -> None:
    require(backend, *(["root"] if place else []))
    is_other = place in ("an ordinary user", "both")
    if is_other:
        require("a Python for every user")
    python = anybodys_python() if is_other else sys.executable
    steps = ["an ordinary user", "no landlock"] if place == "both" else [place]
    code = ATTACK.format(place="".join(PLACES[step] for step in steps), backend=backend)
    found = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    environment = os.environ | {"PYTHONPATH": found, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, cwd="/")
    assert (done.stdout, done.stderr) == (f"{len(ATTACKS) + 3} []\n", "")


def test_battery_is_large_and_its_names_are_unique() -> None:
    counts = Counter(attack.name for attack in ATTACKS)
    assert len(counts) >= 62
    # The same idea may be tried on a program and on tests, under one name in two groups.
    assert max(Counter((attack.name, attack.group) for attack in ATTACKS).values()) == 1


@pytest.mark.ci
def test_battery_notices_a_breach() -> None:
    attacks = [
        Attack("says so", "g", "print('BREACH: out')", ("ok",)),
        Attack("other end", "g", "print(1)", ("tle",)),
        Attack("knows", "g", "print('@SECRET@')", ("ok",)),
        Attack("passes", "g", "def f(): return 1", ("wrong",), tests=("assert f() == 1",)),
    ]
    with Sandbox() as sandbox:
        findings = run_battery(sandbox, attacks, lambda _: None, num_workers=1)
    expected = ("BREACH", "ended as ok, expected tle", "a secret was read", "ended as ok, expected wrong")
    for finding, breach in zip(findings, expected, strict=False):
        assert breach in finding.breach
