"""What becomes of a model's reply at the board: its move, or one in its place, and what is said of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from whet.eval.chess.games import Reply
from whet.tasks.chess.board import illegal_cause
from whet.tasks.chess.formats import read_policy, show_pawns
from whet.tasks.made.draft import Draw

if TYPE_CHECKING:
    import chess


def any_move(board: chess.Board, seed: int) -> str:
    """Return a legal move, the same in the same position, for a model that named none."""
    return Draw("chess instead", seed, board.fen()).one([move.uci() for move in board.legal_moves])


def played(board: chess.Board, reply: Reply, seed: int) -> tuple[str, str]:
    """Return the move that is played, and what is to be said of it: '' if it is the model's best.

    Args:
        board: The position.
        reply: The model's.
        seed: Chooses where nothing that the model named is legal.
    """
    asked = f"asked {reply.num_asked} times: " if reply.num_asked > 1 else ""
    if reply.move and not reply.is_second:
        return reply.move, f"{asked}nothing that it named before is legal" if asked else ""
    said = read_policy(reply.text).best or reply.text.strip()[:20]
    why = illegal_cause(board, said[:8])
    if reply.move:
        return reply.move, f"{asked}its best move {said[:8]!r} is illegal ({why}); a candidate is played"
    return any_move(board, seed), f"{asked}nothing it named is legal ({why}); any move is played"


def end_of(board: chess.Board) -> str:
    """Say how a game ended, as 'checkmate: 1-0'; '' while it goes on. A fifth repetition and 75 moves without a capture
    or a pawn's move end it, draws that have to be claimed do not."""
    outcome = board.outcome()
    if outcome is None:
        return ""
    return f"{outcome.termination.name.lower().replace('_', ' ')}: {outcome.result()}"


def evaluation_of(text: str) -> str:
    """Return what a policy's completion says of its best move, as '+0.31'; '' where it says nothing."""
    said = read_policy(text)
    found = dict(zip(said.moves, said.evals, strict=False)).get(said.best, math.nan)
    return f"{'+' * (found > 0)}{show_pawns(found)}" if math.isfinite(found) else ""
