"""Results of an evaluation as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from whet.eval.stats import Interval


def print_result(results: Mapping[str, Mapping[str, Interval]], num_problems: int, num_samples: int) -> None:
    """Print a table of results, metrics by name, one row each, with 95 % intervals over problems."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = ["pass@1", "greedy", f"pass@{num_samples}", f"maj@{num_samples}", "format", "thinking_tokens"]
    names = [name for name in dict.fromkeys(names) if name in next(iter(results.values()))]
    title = f"{num_problems} held-out problems x {num_samples} samples; percent, with 95 % intervals over problems"
    table = Table(title=title, box=SIMPLE_HEAD, leading=1, title_justify="left")
    table.add_column("", style="bold", overflow="fold", min_width=4, max_width=16)
    for name in names:
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for label, metrics in results.items():
        table.add_row(Text(label), *(Text(show_metric(name, metrics[name])) for name in names))
    Console().print(table)


def show_metric(name: str, interval: Interval) -> str:
    """Write a metric and, on a second line, its interval: shares in percent, lengths in tokens."""
    scale = 1.0 if name.endswith("tokens") else 100.0
    mean, low, high = (
        f"{scale * value:.1f}".replace("100.0", "100")
        for value in (interval.mean, interval.low, interval.high)
    )
    return f"{mean}\n{low}-{high}"
