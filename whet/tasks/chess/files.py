"""Positions from the user's files: rows with `fen`, Lichess's puzzles, suites in EPD, and lists of FENs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.tasks.chess.board import find_move, library, read_board
from whet.tasks.chess.formats import MAX_HISTORY, is_move
from whet.tasks.chess.positions import Position
from whet.tasks.read import ENDINGS, BadRow, Row, is_number, kind_of, read_file, text_fault
from whet.types import UserError

if TYPE_CHECKING:
    import chess

LISTS = (".epd", ".fen")
"""Endings of files with a position a line."""
MAX_RATING = 10_000
MAX_DIGITS = 6
"""Of the points of a move in a suite."""
_SHORT = re.compile(r"(?:[KQRBN]?[a-h]?[1-8]?x?[a-h][1-8](?:=[QRBN])?|O-O(?:-O)?)#?")
"""A move of a history in short notation; no check's plus, which parts the fields of the environment's lines."""


def read_positions(path: str | Path, max_bad_rows: int = 0) -> tuple[list[Position], list[BadRow]]:
    """Read positions.

    Args:
        path: Rows of any kind that `read_file` reads, with `fen` and optional `best` (a move in UCI notation, or
            several), `move` and `history` (for the environment) and `rating`; Lichess's puzzles (FEN, Moves, Rating),
            of which each move of the solver's is a position; EPD with `bm` or with points for moves (`c8` and `c9`); or
            a FEN a line.
        max_bad_rows: Bad rows that are tolerated.

    Returns:
        The positions, and the bad rows.

    Raises:
        UserError: If the file cannot be read, or has more bad rows.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{str(path)!r}: no such file; check --task.path")
    library()
    ending = path.suffix.lower()
    if ending == ".pgn":
        raise UserError(
            f"{path.name}: games in PGN are not read; give their positions, a FEN a line, as .fen"
        )
    if ending in LISTS:
        found, bad = _read_list(path, max_bad_rows)
    else:
        try:
            found, bad = read_file(path, required=(), max_bad_rows=max_bad_rows, check=_row)
        except UserError as error:
            if path.name.lower().endswith(ENDINGS):
                raise
            raise UserError(f"{error}; a list of FENs ends in {' or '.join(LISTS)}") from None
    return [position for _, positions in found for position in positions], bad


def _row(row: Row) -> list[Position] | str:
    """Turn a row into positions, or say what is wrong with it."""
    if "FEN" in row and "Moves" in row:
        return _puzzle(row)
    if fault := text_fault(row, "fen"):
        return fault
    try:
        board = _read_playable(row["fen"])
        best, history = _words(row, "best"), _words(row, "history")
        rating, move = _rating(row.get("rating"), "rating"), _move(board, row.get("move"))
    except UserError as error:
        return str(error)
    for text in best:
        if find_move(board, text) is None:
            return f"'best': {text[:20]!r} is not a legal move there in UCI notation, such as e2e4"
    wrong = next((word for word in history if not (is_move(word) or _SHORT.fullmatch(word))), None)
    if wrong is not None:
        return f"'history': {wrong[:20]!r} is no move such as e2e4 or Nf3 (without + for check)"
    fen, source = board.fen(), str(row.get("source") or "file")[:40]
    # A rating is of the one who finds the move: with both, a row is a puzzle of one move.
    puzzle = fen if rating and best else ""
    return [Position(fen, tuple(history[1 - MAX_HISTORY :]), source, tuple(best), rating, puzzle, move=move)]


def _read_playable(fen: str) -> chess.Board:
    """Read a position in which there is a move to play.

    Raises:
        UserError: If there is none, or the position cannot be read.
    """
    board = read_board(fen)
    if not any(board.legal_moves):
        raise UserError(f"{fen[:100]!r}: the game is over, there is nothing to play")
    return board


def _words(row: Row, name: str) -> Sequence[str]:
    """Return a field's list of texts, or the words of its text; none where it is absent.

    Raises:
        UserError: If it is anything else.
    """
    value = row.get(name)
    if value is None:
        return []
    if isinstance(value, str):
        return value.split()
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return [str(item) for item in value]
    raise UserError(f"{name!r} is {kind_of(value)}, expected a move, or a list of moves")


def _rating(value: Any, name: str) -> int:
    """Return a rating, a number or the text of one; 0 where it is absent.

    Raises:
        UserError: If it is none.
    """
    if value is None or value == "":
        return 0
    try:
        rating = float(value) if isinstance(value, str) or is_number(value) else math.nan
    except (ValueError, OverflowError):
        rating = math.nan
    if not 0 <= rating <= MAX_RATING:
        raise UserError(f"{name!r}: expected a number from 0 to {MAX_RATING:,}, got {str(value)[:40]!r}")
    return int(rating)


def _move(board: chess.Board, value: Any) -> str:
    """Return the move that the environment is asked about, in UCI notation; '' where it is absent.

    One in UCI notation may be illegal: what becomes of that can be asked, too.

    Raises:
        UserError: If it is no move.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"'move' is {kind_of(value)}, expected a move in UCI notation")
    text = value.strip()
    if not text or is_move(text):
        return text
    if move := _from_san(board, text):
        return move
    raise UserError(
        f"'move': {text[:20]!r} is neither a move in UCI notation, such as e2e4, nor legal as Nf3 is"
    )


def _from_san(board: chess.Board, text: str) -> str:
    """Return a legal move in short notation (Nf3) in UCI notation; '' for any other text."""
    try:
        move = board.parse_san(text)
    except ValueError:
        return ""
    return move.uci() if move else ""


def _puzzle(row: Row) -> list[Position] | str:
    """Return a position for each move that the solver of a puzzle has to find: the first move is the opponent's."""
    moves = str(row["Moves"]).split()
    try:
        board = read_board(str(row["FEN"]))
        rating = _rating(row.get("Rating"), "Rating")
    except UserError as error:
        return str(error)
    name = str(row.get("PuzzleId") or row["FEN"])
    found: list[Position] = []
    for number, move in enumerate(moves):
        if find_move(board, move) is None:
            return f"'Moves': {move[:20]!r} is not a legal move after {number} moves"
        if number % 2:
            history = tuple(done.uci() for done in board.move_stack[-9:])
            found.append(Position(board.fen(), history, "puzzle", (move,), rating, name))
        board.push_uci(move)
    return found or "'Moves': expected the opponent's move and at least one answer"


def _read_list(path: Path, max_bad_rows: int) -> tuple[list[tuple[int, list[Position]]], list[BadRow]]:
    """Read lines of EPD or FEN."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); check --task.path") from None
    found: list[tuple[int, list[Position]]] = []
    bad: list[BadRow] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            position = _epd(line)
        except (UserError, ValueError) as error:
            bad.append(BadRow(f"{path.name} line {number}", str(error)[:200], number, line[:2000]))
        else:
            found.append((number, [position]))
    if len(bad) > max_bad_rows:
        raise UserError(
            f"{bad[0].where}: {bad[0].reason}; fix the row or allow it with --task.max-bad-rows {len(bad)}"
        )
    if not found:
        raise UserError(f"{path.name}: no rows; check --task.path")
    return found, bad


def _epd(line: str) -> Position:
    """Read a FEN, or a position with operations.

    Raises:
        UserError: If it is none, or cannot be asked about.
        ValueError: The same, told by python-chess.
    """
    words = line.split(None, 4)
    if len(words) == 5 and words[4].replace(" ", "").isdigit() or len(words) == 4:
        return Position(_read_playable(line).fen(), (), "file")
    board = library().Board()
    operations = board.set_epd(line)
    _read_playable(board.fen())
    best = _best_of(board, operations.get("bm"))
    moves, points = str(operations.get("c9", "")).split(), str(operations.get("c8", "")).split()
    is_paid = len(moves) == len(points) and bool(moves)
    is_paid = is_paid and all(word.isdecimal() and len(word) <= MAX_DIGITS for word in points)
    paid = tuple(zip(moves, map(int, points), strict=True)) if is_paid else ()
    if is_paid and not any(value for _, value in paid):
        raise UserError("'c8': no move is worth a point")
    if "am" in operations and not best and not paid:
        raise UserError("'am': moves to avoid are not read; say with 'bm' which is best")
    name = str(operations.get("id", ""))
    return Position(board.fen(), (), name.partition(".0")[0][:60] or "suite", best, points=paid)


def _best_of(board: chess.Board, value: Any) -> tuple[str, ...]:
    """Return the moves of `bm`, which some suites put between quotes.

    Raises:
        UserError: If one is not legal.
    """
    if isinstance(value, str):
        value = [(word, _from_san(board, word)) for word in value.replace(",", " ").split()]
    else:  # moves that python-chess has read, or a number where none stands
        moves = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        value = [(str(move), str(move)) for move in moves]
    for word, move in value:
        if find_move(board, move) is None:
            raise UserError(f"'bm': {word[:20]!r} is not a legal move there")
    return tuple(move for _, move in value)
