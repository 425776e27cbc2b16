"""The lines that a chess model reads and writes: `P:` (policy), `A:` (environment), `L:` (moves), and words.

A policy's line is `P: ` + FEN padded to 90, `M: ` + candidate moves padded to 30, `E: ` + their evaluations in pawns
padded to 40, `B: ` + the best move; the prompt ends with `M:`. An environment's line is
`A: FEN+MOVE+HISTORY+FEN+REWARD+TERMINATED+TRUNCATED`; the prompt ends with the third plus. Evaluations are those of the
side to move, candidates stand in any order, the history has up to ten moves, the last of which is the one played.

A line of moves is ours, for learning what may move where: `L: FEN+` and up to twelve legal moves in any order, each
with the piece that stands there afterwards and what it takes (`e2e4P`, `e4d5Pp`, `e7e8qQ`).

Source:
    jorahn/RookWorld, dev/data/rook/generate_eval.py and dev/data/arbiter. Deviation: there the best move of Black is
    the last, and thus the worst, of a list that is sorted for the side to move; here it is the best.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Layout = Literal["padded", "short", "diagnostic"]
FEN_WIDTH, MOVES_WIDTH, EVALS_WIDTH = 90, 30, 40
GAPS: dict[Layout, int | None] = {"padded": None, "short": 1, "diagnostic": 4}
"""Spaces before `M:`: as many as fill 90 characters, one, or four as the seed's diagnostic prints."""
MAX_HISTORY = 10
NUM_CANDIDATES = 5
NUM_LISTED = 12
"""Moves of a line of moves, where so many are legal."""
MAX_CHARACTERS = 1000
"""Longest completion that is read: the longest right one has 90 + 20 characters, or 30 + 40 + 12."""
_MOVE = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
_LISTED = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?[prnbqkPRNBQK]{1,2}")
_EVAL = re.compile(r"[+-]?[0-9]{1,6}(?:\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True)
class Policy:
    """What a policy's completion says.

    Attributes:
        moves: Candidates as written: texts that may be no moves.
        evals: Evaluation of each in pawns; NaN for what is not a number.
        best: The best move as written; '' for none.
        has_sections: Whether `E:` and `B:` are there, in this order.
        is_well_formed: Whether, besides, every move is one in UCI notation, each has an evaluation, and one move is the
            best.
    """

    moves: tuple[str, ...] = ()
    evals: tuple[float, ...] = ()
    best: str = ""
    has_sections: bool = False
    is_well_formed: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment's completion says, each field as written.

    Attributes:
        fen: The next position.
        reward: The reward.
        terminated: Whether the game is over.
        truncated: Whether the move was illegal.
        is_well_formed: Whether there are exactly these four, the reward is a number and the flags are 0 or 1.
    """

    fen: str = ""
    reward: str = ""
    terminated: str = ""
    truncated: str = ""
    is_well_formed: bool = False


@dataclass(frozen=True, slots=True)
class Listed:
    """What a line of moves says.

    Attributes:
        moves: Its entries as written: texts that may be no moves.
        is_well_formed: Whether each is a move with one or two pieces, and there are at most `NUM_LISTED`.
    """

    moves: tuple[str, ...] = ()
    is_well_formed: bool = False


def is_move(text: str) -> bool:
    """Say whether a text has the form of a move in UCI notation: e2e4, e7e8q."""
    return _MOVE.fullmatch(text) is not None


def policy_prompt(fen: str, layout: Layout = "padded") -> str:
    """Write the prompt that asks for candidates, evaluations and the best move."""
    gap = GAPS[layout]
    return f"P: {fen:{FEN_WIDTH}}M:" if gap is None else f"P: {fen}{' ' * gap}M:"


def policy_answer(moves: Sequence[str], pawns: Sequence[float], best: str) -> str:
    """Write a policy's completion.

    Args:
        moves: Candidates in the order in which they are to stand.
        pawns: Evaluation of each in pawns, for the side to move.
        best: The best move.
    """
    evals = " ".join(map(show_pawns, pawns))
    return f" {' '.join(moves):{MOVES_WIDTH}}E: {evals:{EVALS_WIDTH}}B: {best}"


def show_pawns(pawns: float) -> str:
    """Write an evaluation: 0.31, -1.0; at most two decimals."""
    return str(round(pawns, 2) + 0.0)


def environment_prompt(fen: str, move: str, history: Sequence[str]) -> str:
    """Write the prompt that asks what becomes of a position.

    Args:
        fen: The position.
        move: The move played in it.
        history: The moves before it, oldest first; the last nine are written, and the move itself.
    """
    recent = [*history, move][-MAX_HISTORY:]
    return f"A: {fen}+{move}+{' '.join(recent)}+"


def environment_answer(fen: str, reward: str, terminated: bool, truncated: bool) -> str:
    """Write an environment's completion."""
    return f"{fen}+{reward}+{int(terminated)}+{int(truncated)}"


def moves_prompt(fen: str) -> str:
    """Write the prompt that asks what may move where."""
    return f"L: {fen}+"


def moves_answer(moves: Sequence[str]) -> str:
    """Write the completion of a line of moves, of moves as `whet.tasks.chess.board.listed_move` writes them."""
    return f" {' '.join(moves)}"


def read_moves(text: str | None) -> Listed:
    """Parse the completion of a line of moves: any text, in linear time."""
    if not text or len(text) > MAX_CHARACTERS:
        return Listed()
    moves = tuple(text.split())
    is_well_formed = 0 < len(moves) <= NUM_LISTED and all(_LISTED.fullmatch(move) for move in moves)
    return Listed(moves, is_well_formed)


def read_policy(text: str | None) -> Policy:
    """Parse a policy's completion: any text, in linear time; one that is longer than `MAX_CHARACTERS` says nothing."""
    if not text or len(text) > MAX_CHARACTERS:
        return Policy()
    head, has_evals, rest = text.partition("E:")
    middle, has_best, end = rest.partition("B:")
    moves, evals, best = tuple(head.split()), middle.split(), end.split()
    if not has_evals or not has_best:
        return Policy(moves=moves)
    numbers = tuple(float(word) if _EVAL.fullmatch(word) else math.nan for word in evals)
    is_well_formed = (
        0 < len(moves) == len(numbers) <= NUM_CANDIDATES
        and all(_MOVE.fullmatch(move) for move in moves)
        and not any(math.isnan(number) for number in numbers)
        and len(best) == 1
        and _MOVE.fullmatch(best[0]) is not None
    )
    return Policy(moves, numbers, best[0] if len(best) == 1 else "", True, is_well_formed)


def read_step(text: str | None) -> Step:
    """Parse an environment's completion: any text, in linear time; one that is longer than `MAX_CHARACTERS` says
    nothing."""
    if not text or len(text) > MAX_CHARACTERS:
        return Step()
    parts = [part.strip() for part in text.split("+")]
    fen, reward, terminated, truncated = (*parts, "", "", "", "")[:4]
    is_well_formed = (
        len(parts) == 4
        and len(fen.split(" ")) == 6
        and _EVAL.fullmatch(reward) is not None
        and terminated in ("0", "1")
        and truncated in ("0", "1")
    )
    return Step(fen, reward, terminated, truncated, is_well_formed)


def reason_prompt(fen: str, side: str) -> str:
    """Write the question of the reasoning format; the schema's instruction says how to answer."""
    return (
        f"Chess position (FEN): {fen}\n{side} to move. Compare the candidate moves and find the best one; answer with "
        "it in UCI notation, such as e2e4 or e7e8q."
    )


def reason_solution(lines: Sequence[tuple[Sequence[str], float]]) -> str:
    """Write worked thinking from an engine's lines, best first.

    Args:
        lines: Moves of each line in UCI notation, and its evaluation in pawns.
    """
    told = [f"{moves[0]}: {' '.join(moves[:4])}, {show_pawns(pawns)}." for moves, pawns in lines]
    return f"{' '.join(told)} Best is {lines[0][0][0]}." if lines else ""
