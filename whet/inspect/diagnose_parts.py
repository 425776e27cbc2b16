"""What a diagnosis is made of: components, each with facts, checks that passed or not, tables and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail"]
ORDER: tuple[Status, ...] = ("pass", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that had to hold.

    Attributes:
        name: What was looked at.
        status: Whether it holds.
        found: What was measured.
        expected: What had to be.
    """

    name: str
    status: Status
    found: str
    expected: str


@dataclass(slots=True)
class Component:
    """One part of the step, looked at.

    Attributes:
        name: Title.
        headline: The numbers to read first.
        facts: Quantity, with its unit -> value.
        checks: What had to hold.
        tables: Title -> rows, all with the same columns.
        bars: Title -> (label, length, text) of each bar.
    """

    name: str
    headline: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    bars: dict[str, list[tuple[str, float, str]]] = field(default_factory=dict)

    def check(self, name: str, holds: bool, found: Any, expected: Any, *, otherwise: Status = "fail") -> None:
        """Add a check, with its status where it does not hold."""
        self.checks.append(Check(name, "pass" if holds else otherwise, show(found), show(expected)))

    @property
    def verdict(self) -> Status:
        """The worst of its checks."""
        return worst([check.status for check in self.checks])

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"verdict": self.verdict, **asdict(self)}


def worst(statuses: Sequence[Status]) -> Status:
    """Return the worst of several statuses."""
    return ORDER[max(map(ORDER.index, statuses), default=0)]


def show(value: Any) -> str:
    """Write a value for a person."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(show, value))
    return "none" if value is None else str(value)


def share(value: float) -> str:
    """Write a share in percent, small ones with two digits."""
    return f"{100 * value:.1f} %" if value >= 0.01 or value <= 0 else f"{100 * value:.2g} %"
