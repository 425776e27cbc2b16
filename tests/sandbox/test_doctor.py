from __future__ import annotations

import pytest

from whet import cli
from whet.inspect.doctor import doctor
from whet.sandbox.attacks.attacks import Attack


def check(*words: str) -> int:
    parsed = cli.parse("whet doctor", doctor.DoctorConfig, {}, words, resumable=False, positional="check")
    return cli.guard(lambda: doctor.main(parsed.config))


@pytest.mark.ci
def test_contained_attacks_end_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("sandbox", "--only", "network") == 0
    printed = capsys.readouterr().out
    assert "abstract unix socket" in printed
    assert "0 breaches" in printed


@pytest.mark.ci
def test_a_breach_ends_with_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = Attack("one that works", "new", "print('BREACH [red]\\x1b[2J')", ("ok",))
    monkeypatch.setattr("whet.inspect.doctor.doctor.all_attacks", lambda: iter([attack]))
    assert check("sandbox") == 1
    printed = capsys.readouterr().out
    assert "1 breaches" in printed
    assert "BREACH [red]" in printed  # no markup
    assert "\x1b" not in printed


def test_no_wall_ends_with_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert check("sandbox", "--backend", "bwrap") == 2
    assert "not installed" in capsys.readouterr().err


def test_a_name_that_no_attack_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("sandbox", "--only", "nope") == 2
    assert "only = 'nope': no such attack; expected a part of a name, or of " in capsys.readouterr().err
