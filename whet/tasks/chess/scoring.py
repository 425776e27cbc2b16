"""Scores of chess completions, part by part, and the published weights that add them up.

Moves are compared as sets, evaluations as a map from move to number, so that the order in which shuffled candidates
stand does not matter, and a repeated candidate earns nothing. Every part is 1 for the gold line and at most 1 for any
other; only the published penalties are below 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from whet.tasks.chess.board import Transition, find_move, listed_move
from whet.tasks.chess.formats import NUM_LISTED, Listed, Policy, Step

if TYPE_CHECKING:
    import chess

RANKS = (1.0, 0.8, 0.6, 0.4, 0.2)
"""Score of a best move by its place among the engine's five; another legal move scores `OTHER_LEGAL`."""
OTHER_LEGAL = 0.1
NOT_NAMED = 0.5
"""Share of that score which a legal move has where the data names the moves that are right, and not this one."""
MATE_CP = 100_000
"""Centipawns of a mate; a mate in n is worth n less, as published (999.99 pawns for mate in one)."""
Kind = Literal["policy", "environment", "moves", "reason"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an engine.

    Attributes:
        moves: Its moves in UCI notation, the first is the candidate.
        cp: Evaluation in centipawns for the side to move.
    """

    moves: tuple[str, ...]
    cp: int

    @property
    def move(self) -> str:
        """The candidate."""
        return self.moves[0]

    @property
    def pawns(self) -> float:
        """The evaluation in pawns, as lines write it."""
        return round(self.cp / 100, 2)


def best_moves(lines: Sequence[Line]) -> list[str]:
    """Return the candidates that no other is better than: usually one."""
    return [line.move for line in lines if line.cp == lines[0].cp]


def policy_parts(
    board: chess.Board, lines: Sequence[Line], said: Policy, good: Sequence[str] = ()
) -> dict[str, float]:
    """Score a policy's completion.

    Args:
        board: The position.
        lines: The engine's lines, best first; with fewer legal moves than five, all of them.
        said: What the completion says.
        good: The moves that are right, where the data names them; none where the engine decides.

    Returns:
        sections (0 or 1); format (1 well formed, else 0); legal (share of candidates and best move that are legal, a
        repeated or missing candidate is not); candidates (Jaccard index of the candidates and the engine's); order
        (share of pairs of the engine's candidates that are both there with evaluations in the right order); evals
        (closeness of the evaluations, move by move); best (by rank); illegal (number of illegal candidates);
        best_illegal and best_missing (0 or 1).
    """
    values = {line.move: line.pawns for line in lines}
    listed: dict[str, float] = {}
    legal = repeated = 0
    for move, number in zip(said.moves, (*said.evals, *[math.nan] * len(said.moves)), strict=False):
        if move in listed:
            repeated += 1
            continue
        listed[move] = number
        legal += find_move(board, move) is not None
    slots = max(len(said.moves), len(values))
    best_is_legal = find_move(board, said.best) is not None
    shared = values.keys() & listed.keys()
    union = len(values) + len(said.moves) - len(shared)
    pairs = list(combinations(values, 2))
    close = sum(_closeness(values[move], listed[move]) for move in shared)
    return {
        "sections": float(said.has_sections),
        "format": float(said.is_well_formed),
        "legal": (legal + best_is_legal) / (slots + 1),
        "candidates": len(shared) / max(union, 1),
        "order": _ordered(pairs, values, listed) if pairs else float(len(shared) == len(values)),
        "evals": close / max(slots, 1),
        "best": best_score(lines, said.best, good) if best_is_legal else 0.0,
        "illegal": float(len(listed) - legal),
        "best_illegal": float(bool(said.best) and not best_is_legal),
        "best_missing": float(not said.best),
        "mean_error": _mean_error(values, listed),
        "sign_errors": sum(values[move] * listed[move] < 0 for move in shared) / max(len(values), 1),
    }


def best_score(lines: Sequence[Line], move: str, good: Sequence[str] = ()) -> float:
    """Score a legal move by its rank; moves of equal evaluation have the rank of the first of them.

    Where the data names the moves that are right, they alone score 1, and others half of their rank's score.
    """
    if move in good:
        return 1.0
    found = next((line for line in lines if line.move == move), None)
    value = OTHER_LEGAL
    if found is not None:
        rank = sum(line.cp > found.cp for line in lines)
        value = RANKS[min(rank, len(RANKS) - 1)]
    return value * NOT_NAMED if good else value


def _ordered(
    pairs: Sequence[tuple[str, str]], values: Mapping[str, float], listed: Mapping[str, float]
) -> float:
    """Return the share of pairs whose evaluations stand in the right order."""

    def sign(numbers: Mapping[str, float], one: str, other: str) -> float:
        difference = numbers[one] - numbers[other]
        return math.copysign(1, difference) if difference else 0.0

    right = 0
    for one, other in pairs:
        if one in listed and other in listed and not math.isnan(listed[one] + listed[other]):
            right += sign(values, one, other) == sign(listed, one, other)
    return right / len(pairs)


def _squashed(pawns: float) -> float:
    """Return an evaluation on a scale where a pawn counts less the more there are."""
    return math.copysign(math.log1p(abs(pawns)), pawns)


def _closeness(value: float, said: float) -> float:
    """Return 1 for the right evaluation, less for others, 0 from about a pawn and a half (or worse) away."""
    return 0.0 if math.isnan(said) else max(0.0, 1.0 - abs(_squashed(value) - _squashed(said)))


def _mean_error(values: Mapping[str, float], listed: Mapping[str, float]) -> float:
    """Return the mean absolute error in pawns over the engine's candidates, at most 1 each; a missing one counts 1."""
    errors = [
        min(1.0, abs(number - listed[move])) if move in listed and not math.isnan(listed[move]) else 1.0
        for move, number in values.items()
    ]
    return sum(errors) / max(len(errors), 1)


def step_parts(truth: Transition, said: Step) -> dict[str, float]:
    """Score an environment's completion.

    Returns:
        format (0 or 1); fen (1 if all six fields are right to the letter); board (1 if the first four are); similarity
        (of the FEN's characters, 0 to 1); reward (1 if the number is right); flags (share of the two that are right).
    """
    similarity = 1.0
    if said.fen != truth.fen:
        similarity = (
            SequenceMatcher(None, said.fen[:100], truth.fen, autojunk=False).ratio() if said.fen else 0.0
        )
    try:
        is_paid = float(said.reward) == float(truth.reward)
    except ValueError:
        is_paid = False
    flags = (said.terminated == str(int(truth.terminated))) + (said.truncated == str(int(truth.truncated)))
    return {
        "format": float(said.is_well_formed),
        "fen": float(said.fen == truth.fen),
        "board": float(said.fen.split()[:4] == truth.fen.split()[:4]),
        "similarity": similarity,
        "reward": float(is_paid),
        "flags": flags / 2,
    }


def moves_parts(board: chess.Board, said: Listed) -> dict[str, float]:
    """Score the completion of a line of moves.

    Returns:
        format (1 if well formed, with as many moves as are asked for); legal (share of entries whose move is legal; a
        repeated or missing one is not); pieces (share that is right to the letter).
    """
    right = {listed_move(board, move): move.uci() for move in board.legal_moves}
    asked = min(NUM_LISTED, len(right))
    slots = max(asked, len(said.moves), 1)
    legal = {right.get(text) or _legal_start(board, text) for text in said.moves} - {""}
    return {
        "format": float(said.is_well_formed and len(said.moves) == asked),
        "legal": len(legal) / slots,
        "pieces": len(right.keys() & {*said.moves}) / slots,
    }


def _legal_start(board: chess.Board, text: str) -> str:
    """Return the legal move that an entry begins with; '' for none."""
    return next((text[:n] for n in (4, 5) if find_move(board, text[:n]) is not None), "")


def reason_parts(
    board: chess.Board, lines: Sequence[Line], move: str, good: Sequence[str] = ()
) -> dict[str, float]:
    """Score the answer of the reasoning format: legal (0 or 1) and best (by rank, or as `good` says)."""
    is_legal = find_move(board, move) is not None
    best = best_score(lines, move, good) if is_legal else 0.0
    return {"format": 1.0, "legal": float(is_legal), "best": best}


def _chess(kind: Kind, parts: Mapping[str, float]) -> float:
    """Add up with our own weights: legality first, since nothing else counts without it."""
    if kind == "reason":
        return 0.3 * parts["legal"] + 0.7 * parts["best"]
    if kind == "moves":
        return 0.1 * parts["format"] + 0.5 * parts["legal"] + 0.4 * parts["pieces"]
    if kind == "environment":
        exact = 0.5 * parts["fen"] + 0.2 * parts["similarity"]
        return 0.1 * parts["format"] + exact + 0.1 * parts["reward"] + 0.1 * parts["flags"]
    shape = 0.1 * parts["format"] + 0.3 * parts["legal"]
    return shape + 0.1 * (parts["candidates"] + parts["order"] + parts["evals"]) + 0.3 * parts["best"]


def _rookworld(kind: Kind, parts: Mapping[str, float]) -> float:
    """Add up with the weights at the seed's commit, over their sum."""
    if kind == "reason":
        return parts["best"]
    if kind == "environment":
        if not parts["format"]:
            return -1.0 / 1.5
        near = 0.5 * parts["similarity"] if not parts["fen"] and parts["similarity"] >= 0.5 else 0.0
        paid = parts["fen"] + near + 0.3 * parts["reward"] + 0.1 * parts["flags"]
        return (0.1 + paid) / 1.5
    if not parts["format"]:
        return -1.0 / 2.0
    return (
        0.2 * parts["sections"] + 0.1 + 0.5 * parts["candidates"] + 0.2 * parts["evals"] + parts["best"]
    ) / 2.0


def _rookworld_later(kind: Kind, parts: Mapping[str, float]) -> float:
    """Add up with the weights of the later version, over their sum: graduated shaping."""
    if kind == "reason":
        return parts["best"]
    if kind == "environment":
        return (4 * parts["format"] + 3 * _near(parts) + 2 * parts["flags"] + parts["reward"]) / 10
    return (4 * parts["best"] + 2 * parts["format"] + 1.5 * parts["candidates"] + parts["evals"]) / 8.5


def _near(parts: Mapping[str, float]) -> float:
    return parts["fen"] or 0.5 * parts["similarity"]


def _rookworld_trl(kind: Kind, parts: Mapping[str, float]) -> float:
    """Add up as rookworld-trl does: best move by rank, Jaccard index and order less illegal ones, mean error and signs.

    Its bonus for the order has no published weight: a fifth of the candidates' here. The environment's line, which it
    trains by supervision, has the weights at the seed's commit.
    """
    if kind != "policy":
        return _rookworld(kind, parts)
    best = -0.5 if parts["best_missing"] else -1.0 if parts["best_illegal"] else parts["best"]
    candidates = 0.8 * parts["candidates"] + 0.2 * parts["order"] - 0.3 * parts["illegal"]
    evals = 1 - parts["mean_error"] - 0.4 * parts["sign_errors"]
    return 0.5 * best + 0.3 * max(-1.0, candidates) + 0.2 * evals


TOTALS = {
    "chess": _chess,
    "rookworld": _rookworld,
    "rookworld_later": _rookworld_later,
    "rookworld_trl": _rookworld_trl,
}
"""Name of a reward -> the sum of the parts: 1 for the gold line, less for any other."""
STEPS = ((0.95, 1.0), (0.8, 0.8), (0.6, 0.6), (0.4, 0.4), (0.2, 0.2))
"""What `rookworld_later_graduated` pays from a sum on."""


def _graduated(kind: Kind, parts: Mapping[str, float]) -> float:
    """Round the later version's sum down to a fifth; 0.95 is whole, a line of the right format has at least a fifth.

    Source:
        jorahn/rookworld-rlvr, src/mini/reward_scorer.py. Deviation: 0 where it pays its least reward.
    """
    value = _rookworld_later(kind, parts)
    return next((paid for least, paid in STEPS if value >= least - 1e-9), 0.2 * parts["format"])


def _binary(kind: Kind, parts: Mapping[str, float]) -> float:
    """Pay 1 for more than half of the later version's sum, else 0."""
    return float(_rookworld_later(kind, parts) > 0.5)


SHAPED = {"rookworld_later_graduated": _graduated, "rookworld_later_binary": _binary}
"""Rewards that pay near misses as much as the gold line; the published `linear` and `continuous` are the sum itself."""
PARTS: dict[Kind, tuple[str, ...]] = {
    "policy": ("format", "legal", "candidates", "order", "evals", "best"),
    "environment": ("format", "fen", "similarity", "reward", "flags"),
    "moves": ("format", "legal", "pieces"),
    "reason": ("legal", "best"),
}
"""Parts by kind of line, each from 0 to 1."""


def total(name: str, kind: Kind, parts: Mapping[str, float]) -> float:
    """Return the sum of the parts by the weights of a name in `TOTALS` or `SHAPED`; of lines of moves by our own."""
    return (TOTALS | SHAPED)["chess" if kind == "moves" else name](kind, parts)
