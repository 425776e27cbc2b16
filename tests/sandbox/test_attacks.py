"""The battery, on every wall that this machine has: `whet doctor sandbox` runs the same."""

from __future__ import annotations

from collections import Counter

import pytest

from whet.sandbox.attacks.attacks import Attack, all_attacks
from whet.sandbox.attacks.battery import run_battery
from whet.sandbox.programs import Sandbox
from whet.types import UserError

ATTACKS = list(all_attacks())


@pytest.mark.parametrize("backend", ["landlock", "bwrap"])
@pytest.mark.ci
def test_attacks_are_contained(backend: str) -> None:
    try:
        sandbox = Sandbox(backend=backend)
    except UserError as error:
        pytest.skip(str(error))
    with sandbox:
        findings = run_battery(sandbox, ATTACKS, lambda _: None, num_workers=4)
    assert [finding for finding in findings if finding.breach] == []


def test_battery_is_large_and_its_names_are_unique() -> None:
    counts = Counter(attack.name for attack in ATTACKS)
    assert len(counts) >= 62
    # The same idea may be tried on a program and on tests, under one name in two groups.
    assert max(Counter((attack.name, attack.group) for attack in ATTACKS).values()) == 1


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
