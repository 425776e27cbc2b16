"""The rules of chess, by the `python-chess` library (extra `chess`): never our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whet.install import install_command
from whet.types import UserError

if TYPE_CHECKING:
    import chess

LEGAL, WIN, DRAW, ILLEGAL = "0.001", "1.0", "0.5", "-1.0"
"""What the environment pays for a move, as its lines write it."""
PHASES = ("opening", "middlegame", "endgame")
_OPENING_MOVES, _FULL = 10, 10
"""Moves that an opening lasts, and the weight of pieces (queen 9, rook 5, minor 3) per side that an endgame stays
below."""


def library() -> Any:
    """Import python-chess with its engines, games and pictures.

    Raises:
        UserError: If the package is missing.
    """
    try:
        import chess
        import chess.engine
        import chess.pgn
        import chess.svg
    except ImportError as error:
        raise UserError(f"chess needs python-chess: {install_command('chess')} ({error})") from error
    return chess


def read_board(fen: str) -> chess.Board:
    """Return the position of a FEN (four fields at least).

    Raises:
        UserError: If it is not a position of chess that can be played on.
    """
    try:
        board = library().Board(" ".join(fen.split()))
    except ValueError as error:
        raise UserError(f"{fen[:100]!r} is not a position in FEN ({str(error)[:100]})") from None
    if not board.is_valid():
        raise UserError(f"{fen[:100]!r} is not a position that can be played on ({board.status()!r})")
    return board


def find_move(board: chess.Board, text: str) -> chess.Move | None:
    """Return a move in UCI notation (e2e4, e7e8q) if it is legal, else None; any text is accepted."""
    if not 4 <= len(text) <= 5 or not text.isascii():
        return None
    try:
        move = library().Move.from_uci(text)
    except ValueError:
        return None
    return move if move and board.is_legal(move) else None


def listed_move(board: chess.Board, move: chess.Move) -> str:
    """Write a legal move with the piece that stands there afterwards and what it takes: e2e4P, e4d5Pp, e7e8qQ."""
    chess = library()
    start, taken = board.piece_at(move.from_square), board.piece_at(move.to_square)
    assert start is not None
    piece = chess.Piece(move.promotion or start.piece_type, start.color)
    if board.is_en_passant(move):
        taken = chess.Piece(chess.PAWN, not start.color)
    return f"{move.uci()}{piece.symbol()}{taken.symbol() if taken else ''}"


def mirrored_move(move: str) -> str:
    """Return a move in UCI notation as the other side's, on the board with its ranks turned around."""
    ranks = str.maketrans("12345678", "87654321")
    return move.translate(ranks)


def position_key(board: chess.Board) -> str:
    """Name a position so that it has one name whichever side it is seen from, and however it is reflected.

    The side to move is White's; where neither side may castle, the board is reflected left to right if that comes
    first. Counters do not matter.
    """
    seen = board if board.turn else board.mirror()
    names = [seen.epd()]
    if not seen.castling_rights:
        chess = library()
        turned = seen.transform(chess.flip_horizontal)
        names.append(turned.epd())
    return min(names)


def phase_of(board: chess.Board) -> str:
    """Say whether a position is of the opening, the middlegame or the endgame."""
    worth = {5: 9, 4: 5, 3: 3, 2: 3}
    sides = [0, 0]
    for piece in board.piece_map().values():
        sides[piece.color] += worth.get(piece.piece_type, 0)
    if min(sides) <= _FULL and sum(sides) <= 2 * _FULL + 4:
        return "endgame"
    return "opening" if board.fullmove_number <= _OPENING_MOVES else "middlegame"


def illegal_cause(board: chess.Board, text: str) -> str:
    """Say why a move cannot be played; '' if it can."""
    if find_move(board, text) is not None:
        return ""
    try:
        move = library().Move.from_uci(text[:8])
    except ValueError:
        return "no move in UCI notation"
    if not move:
        return "null move"
    piece = board.piece_at(move.from_square)
    if piece is None:
        return "empty square"
    if piece.color != board.turn:
        return "other side's piece"
    taken = board.piece_at(move.to_square)
    if taken is not None and taken.color == board.turn:
        return "own piece in the way"
    if board.is_pseudo_legal(move):
        return "king in check"
    if (
        piece.piece_type == library().PAWN
        and not move.promotion
        and board.is_pseudo_legal(library().Move(move.from_square, move.to_square, promotion=library().QUEEN))
    ):
        return "no promotion piece"
    return "not how the piece moves"


@dataclass(frozen=True, slots=True)
class Transition:
    """What the environment answers to a move.

    Attributes:
        fen: The next position; the same one after an illegal move.
        reward: What is paid, as text.
        terminated: Whether the game is over.
        truncated: Whether the move was illegal.
    """

    fen: str
    reward: str
    terminated: bool
    truncated: bool


def play(board: chess.Board, move: str) -> Transition:
    """Return what becomes of a position when a move is played; the board stays as it is.

    Draws that a player would have to claim, and repetitions, which a FEN does not show, do not end a game.
    """
    found = find_move(board, move)
    after = board.copy(stack=False)
    if found is None:
        return Transition(after.fen(), ILLEGAL, after.is_game_over(), True)
    after.push(found)
    outcome = after.outcome()
    if outcome is None:
        return Transition(after.fen(), LEGAL, False, False)
    return Transition(after.fen(), DRAW if outcome.winner is None else WIN, True, False)


def picture(fen: str, *, arrows: list[tuple[str, str]] | None = None, size: int = 240) -> str:
    """Draw a position as SVG.

    Args:
        fen: The position.
        arrows: Moves in UCI notation with the colours that python-chess knows (green, red, yellow, blue).
        size: Pixels of a side.

    Raises:
        UserError: If the position cannot be read, or python-chess is missing.
    """
    chess = library()
    board = read_board(fen)
    drawn = []
    for text, colour in arrows or []:
        try:
            move = chess.Move.from_uci(text[:5])
        except ValueError:
            continue
        if move:
            drawn.append(chess.svg.Arrow(move.from_square, move.to_square, color=colour))
    return chess.svg.board(board, arrows=drawn, size=size, orientation=board.turn)
