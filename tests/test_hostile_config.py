"""YAML that the fuzzer found: refused in one line, whatever it does to PyYAML or to Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from whet.config import load_yaml
from whet.types import UserError


@dataclass(frozen=True, kw_only=True)
class Config:
    """Two fields."""

    seed: int = 0
    names: tuple[str, ...] = ()


BOMB = "names:\n" + "".join(f"- &x{i} [{', '.join([f'*x{i - 1}'] * 9) if i else 'x'}]\n" for i in range(12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, r"alias \*x0"),
        ("seed: !!timestamp 2001", "malformed YAML"),
        ("seed: !!bool maybe", "malformed YAML"),
        (f"seed: 0x{'f' * 5000}", "thousands of digits"),
        (f"names: [0x{'f' * 5000}]", "thousands of digits"),
    ],
)
def test_hostile_yaml_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_yaml(tmp_path / "config.yaml", Config)
    assert "\n" not in str(caught.value)
