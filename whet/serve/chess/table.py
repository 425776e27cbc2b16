"""What answers the board in the browser: a game as its moves, in and out. The server keeps no game."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from whet.serve.chess.reply import end_of, evaluation_of, played
from whet.tasks.chess.board import find_move, library
from whet.types import UserError

if TYPE_CHECKING:
    from whet.eval.chess.games import Player

MAX_MOVES = 600


class Table:
    """Answers what the page asks: a game as its moves, in and out.

    Args:
        player: The model.
        start: Where games begin.
        seed: Seed of moves that replace illegal ones.
    """

    def __init__(self, player: Player, start: str, seed: int = 0) -> None:
        self._player, self._start, self._seed = player, start, seed

    def answer(self, asked: Any) -> dict[str, Any]:
        """Play the user's move, if there is one, and the model's if it is its turn.

        Args:
            asked: Untrusted JSON: `moves` so far, in UCI notation, the `side` of the user, and a new `move`.

        Returns:
            The game: `moves`, `names` (in short notation), `board` (a picture), `turn`, `legal` moves, `said` (by the
            model), `note`, `end`.

        Raises:
            UserError: If the request is none, or the game is over.
        """
        moves = asked.get("moves", []) if isinstance(asked, dict) else None
        if not isinstance(moves, list) or len(moves) > MAX_MOVES:
            raise UserError("expected {moves: [...], side, move}")
        board = library().Board(self._start)
        new = asked.get("move") or None
        for text in [*moves, *([new] if new else [])]:
            move = find_move(board, text) if isinstance(text, str) else None
            if move is None and isinstance(text, str):
                move = find_move(board, f"{text}q")  # a pawn that is clicked to its end becomes a queen
            if move is None:
                raise UserError(f"{str(text)[:10]!r} is not a legal move")
            if end := end_of(board):
                raise UserError(f"the game is over ({end})")
            board.push(move)
        is_white = asked.get("side") != "black"
        said = note = value = ""
        if not end_of(board) and board.turn != is_white:
            (reply,) = self._player.ask([board])
            chosen, note = played(board, reply, self._seed)
            said, value = reply.text, evaluation_of(reply.text)
            board.push_uci(chosen)
        end = end_of(board)
        chess = library()
        names = chess.Board(self._start).variation_san(board.move_stack) if board.move_stack else ""
        drawn = chess.svg.board(
            board,
            orientation=is_white,
            lastmove=board.peek() if board.move_stack else None,
            coordinates=False,
            size=480,
        )
        return {
            "moves": [move.uci() for move in board.move_stack],
            "names": names,
            "board": f"data:image/svg+xml;base64,{base64.b64encode(drawn.encode()).decode()}",
            "fen": board.fen(),
            "legal": [] if end else [move.uci() for move in board.legal_moves],
            "said": said[:2000],
            "value": value,
            "note": note,
            "end": end,
        }
