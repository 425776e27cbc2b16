"""What an evaluation says of a chess model: play, environment, puzzles, suites."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.stats import Interval, bootstrap_interval, share_interval
from whet.tasks.chess.board import find_move, illegal_cause
from whet.tasks.chess.formats import Policy
from whet.tasks.chess.positions import mates
from whet.tasks.chess.scoring import Kind, Line

if TYPE_CHECKING:
    import chess

    from whet.tasks.chess.stockfish import Stockfish

WORST_CP = 1000
"""Centipawns that a move loses at most in the mean, and that an illegal one loses."""
ELO_PRIOR = 0.5
"""Wins and losses against the mean rating that an estimate begins with, so that it is finite."""
NUM_RESAMPLES = 1000


_MOVES = (
    *("legal", "best_move", "top5", "centipawn_loss", "centipawn_loss_legal", "mate_in_one"),
    *("puzzle_solved", "puzzle_elo", "suite"),
)
METRICS: dict[Kind, tuple[str, ...]] = {
    "policy": (*_MOVES, "best_in_candidates", "candidates_legal", "eval_rank"),
    "environment": ("env_exact", "env_board", "env_reward", "env_flags", "env_similarity"),
    "moves": ("moves_legal", "moves_pieces"),
    "reason": _MOVES,
}
"""Names of the metrics that `measures_of` may return, by kind of line."""


@dataclass(frozen=True, slots=True)
class Said:
    """A greedy completion, parsed.

    Attributes:
        board: The position.
        meta: The problem's labels.
        lines: The engine's lines, best first; none where they are not known.
        good: Moves that are right.
        move: The best move that it names.
        policy: A policy's completion.
        parts: Scores of its parts.
    """

    board: chess.Board
    meta: Mapping[str, str]
    lines: Sequence[Line]
    good: Sequence[str]
    move: str
    policy: Policy
    parts: Mapping[str, float]

    @property
    def is_legal(self) -> bool:
        """Whether the move can be played."""
        return find_move(self.board, self.move) is not None


def measures_of(
    said: Sequence[Said], engine: Stockfish | None = None
) -> tuple[dict[str, Interval], dict[str, Any]]:
    """Measure completions; what cannot be measured on these positions is left out.

    Args:
        said: The completions.
        engine: Says what each move loses; without it that is left out.

    Returns:
        Metrics with 95 % intervals over positions:

        - legal, best_move (of the positions whose best move is known), best_in_candidates (a best move is among the
          candidates), top5 (the move is among the engine's five), candidates_legal;
        - centipawn_loss (at most 1,000 a move; an illegal one loses 1,000), centipawn_loss_legal (of legal ones alone);
        - eval_rank (Kendall's tau of the evaluations of legal candidates and the engine's);
        - mate_in_one (of the positions that have one);
        - env_exact (all four fields), env_board (the first four fields of the FEN), env_similarity, env_reward,
          env_flags;
        - moves_legal and moves_pieces (of lines of moves);
        - puzzle_solved, puzzle_elo; suite (share of the points);

        and details: counts of illegal causes, points, numbers of positions.
    """
    metrics: dict[str, Interval] = {}
    details: dict[str, Any] = {}
    steps = [one for one in said if one.meta["kind"] == "environment"]
    plays = [one for one in said if one.meta["kind"] in ("policy", "reason")]

    def share(name: str, values: Sequence[float]) -> None:
        if values:
            metrics[name] = share_interval(list(values))

    if plays:
        share("legal", [float(one.is_legal) for one in plays])
        known = [one for one in plays if one.good]
        share("best_move", [float(one.is_legal and one.move in one.good) for one in known])
        policies = [one for one in plays if one.meta["kind"] == "policy"]
        asked = [one for one in policies if one.good]
        share("best_in_candidates", [float(bool({*one.policy.moves} & {*one.good})) for one in asked])
        share("candidates_legal", [one.parts["legal"] for one in policies])
        lined = [one for one in plays if one.lines]
        share("top5", [float(one.move in [line.move for line in one.lines]) for one in lined])
        mating = [(one, found) for one in plays if (found := mates(one.board.copy(stack=False)))]
        share("mate_in_one", [float(one.move in found) for one, found in mating])
        causes = Counter(illegal_cause(one.board, one.move) for one in plays if not one.is_legal)
        details["illegal"] = dict(causes.most_common())
        details["num_positions"] = len(plays)
        if engine is not None and lined:
            _losses(lined, engine, metrics)
            _ranks([one for one in lined if one.policy.evals], engine, metrics)
        _puzzles([one for one in plays if "puzzle" in one.meta], metrics, details)
        _suite([one for one in plays if "points" in one.meta], metrics, details)
    if steps:
        exact = [float(all(one.parts[n] == 1 for n in ("format", "fen", "reward", "flags"))) for one in steps]
        share("env_exact", exact)
        for name, part in (("board", "board"), ("reward", "reward"), ("flags", "flags")):
            share(f"env_{name}", [one.parts[part] for one in steps])
        share("env_similarity", [one.parts["similarity"] for one in steps])
        details["num_steps"] = len(steps)
    for name in ("legal", "pieces"):
        share(f"moves_{name}", [one.parts[name] for one in said if one.meta["kind"] == "moves"])
    return metrics, details


def _losses(plays: Sequence[Said], engine: Stockfish, metrics: dict[str, Interval]) -> None:
    """Measure what moves lose against the engine's best."""
    legal = [one for one in plays if one.is_legal]
    values = engine.values([(one.board, one.move) for one in legal])
    lost = {
        id(one): float(min(WORST_CP, max(0, one.lines[0].cp - value)))
        for one, value in zip(legal, values, strict=True)
    }
    metrics["centipawn_loss"] = bootstrap_interval([lost.get(id(one), float(WORST_CP)) for one in plays])
    if lost:
        metrics["centipawn_loss_legal"] = bootstrap_interval(list(lost.values()))


def _ranks(plays: Sequence[Said], engine: Stockfish, metrics: dict[str, Interval]) -> None:
    """Correlate the evaluations of legal candidates with the engine's."""
    rows: list[list[tuple[chess.Board, str, float]]] = []
    for one in plays:
        pairs = dict(zip(one.policy.moves, one.policy.evals, strict=False))
        row = [
            (one.board, move, number)
            for move, number in pairs.items()
            if math.isfinite(number) and find_move(one.board, move) is not None
        ]
        if len(row) > 1:
            rows.append(row)
    flat = engine.values([(board, move) for row in rows for board, move, _ in row])
    values = iter(flat)
    taus = [
        tau
        for row in rows
        if (tau := kendall([number for *_, number in row], [next(values) for _ in row])) is not None
    ]
    if taus:
        metrics["eval_rank"] = bootstrap_interval(taus)


def kendall(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two lists; None where one of them is constant."""
    a, b = (np.sign(np.subtract.outer(values, values)) for values in (one, other))
    scale = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / scale if scale else None


def _puzzles(plays: Sequence[Said], metrics: dict[str, Interval], details: dict[str, Any]) -> None:
    """Count puzzles of which every move was found, and estimate the rating of who solves so many of such puzzles."""
    solved: dict[str, bool] = {}
    ratings: dict[str, float] = {}
    for one in plays:
        name = one.meta["puzzle"]
        solved[name] = solved.get(name, True) and one.is_legal and one.move in one.good
        ratings[name] = float(one.meta.get("rating", 0))
    if not solved:
        return
    metrics["puzzle_solved"] = share_interval([float(value) for value in solved.values()])
    rated = [name for name in solved if ratings[name]]
    if rated:
        metrics["puzzle_elo"] = elo_interval([ratings[n] for n in rated], [solved[n] for n in rated])
    details["num_puzzles"] = len(solved)


def elo(ratings: Sequence[float] | np.ndarray, scores: Sequence[float] | np.ndarray) -> float:
    """Return the rating at which the expected score against opponents equals the score that was reached.

    Args:
        ratings: The opponents' ratings.
        scores: 1 for a win, 0.5 for a draw, 0 for a loss against each.

    Source:
        The logistic curve of Elo's system, by maximum likelihood, with half a win and half a loss against the mean
        rating beside the games, so that only wins or only losses have an estimate, too.
    """
    opponents = np.append(np.asarray(ratings, float), [np.mean(ratings)] * 2)
    total = float(np.sum(scores)) + ELO_PRIOR
    weights = np.append(np.ones(len(opponents) - 2), [ELO_PRIOR, ELO_PRIOR])
    low, high = -4000.0, 8000.0
    for _ in range(60):
        middle = (low + high) / 2
        expected = float(np.sum(weights / (1 + 10 ** ((opponents - middle) / 400))))
        low, high = (middle, high) if expected < total else (low, middle)
    return (low + high) / 2


def elo_interval(ratings: Sequence[float], scores: Sequence[float], seed: int = 0) -> Interval:
    """Return the rating with its 95 % interval over opponents, by the bootstrap's percentiles."""
    opponents, won = np.asarray(ratings, float), np.asarray(scores, float)
    draws = np.random.default_rng(seed).integers(0, len(opponents), (NUM_RESAMPLES, len(opponents)))
    found = [elo(opponents[row], won[row]) for row in draws]
    low, high = np.quantile(found, (0.025, 0.975))
    return Interval(elo(opponents, won), float(low), float(high))


def _suite(plays: Sequence[Said], metrics: dict[str, Interval], details: dict[str, Any]) -> None:
    """Add up the points of a suite that pays for several moves of a position."""
    if not plays:
        return
    tables = [dict(json.loads(one.meta["points"])) for one in plays]
    earned = [table.get(one.move, 0) for one, table in zip(plays, tables, strict=True)]
    most = [max(table.values()) for table in tables]
    metrics["suite"] = share_interval([got / top for got, top in zip(earned, most, strict=True)])
    details["suite_points"], details["suite_maximum"] = sum(earned), sum(most)
