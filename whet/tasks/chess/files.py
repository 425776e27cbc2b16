"""Positions from the user's files: rows with `fen`, Lichess's puzzles, suites in EPD, and lists of FENs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet.tasks.chess.board import find_move, library, read_board
from whet.tasks.chess.positions import Position
from whet.tasks.read import BadRow, Row, is_number, read_file, text_fault
from whet.types import UserError

LISTS = (".epd", ".fen")


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
    if path.suffix in LISTS:
        found, bad = _read_list(path, max_bad_rows)
    else:
        library()
        found, bad = read_file(path, required=(), max_bad_rows=max_bad_rows, check=_row)
    return [position for _, positions in found for position in positions], bad


def _row(row: Row) -> list[Position] | str:
    """Turn a row into positions, or say what is wrong with it."""
    if "FEN" in row and "Moves" in row:
        return _puzzle(row)
    if fault := text_fault(row, "fen"):
        return fault
    try:
        board = read_board(row["fen"])
    except UserError as error:
        return str(error)
    if not any(board.legal_moves):
        return f"{row['fen'][:100]!r}: the game is over, there is nothing to play"
    best = _words(row.get("best"))
    for move in best:
        if find_move(board, move) is None:
            return f"'best': {move[:20]!r} is not a legal move there in UCI notation, such as e2e4"
    rating = row.get("rating", 0)
    if not is_number(rating):
        return f"'rating': expected a number, got {str(rating)[:40]!r}"
    move = row.get("move", "")
    if not isinstance(move, str) or "+" in move:
        return "'move': expected a move in UCI notation"
    history = _words(row.get("history"))
    source = str(row.get("source") or "file")[:40]
    return [
        Position(board.fen(), tuple(history), source, tuple(best), int(float(rating)), move=move.strip()[:10])
    ]


def _words(value: Any) -> Sequence[str]:
    """Return a list of texts, or the words of a text."""
    if isinstance(value, str):
        return value.split()
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def _puzzle(row: Row) -> list[Position] | str:
    """Return a position for each move that the solver of a puzzle has to find: the first move is the opponent's."""
    moves = str(row["Moves"]).split()
    try:
        board = read_board(str(row["FEN"]))
    except UserError as error:
        return str(error)
    name = str(row.get("PuzzleId") or row["FEN"])
    try:
        rating = int(float(str(row.get("Rating") or 0)))
    except ValueError:
        return f"'Rating': expected a number, got {str(row.get('Rating'))[:40]!r}"
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
        lines = path.read_text(encoding="utf-8").splitlines()
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
    words = line.split(None, 4)
    if len(words) == 5 and words[4].replace(" ", "").isdigit() or len(words) == 4:
        return Position(read_board(line).fen(), (), "file")
    board = library().Board()
    operations = board.set_epd(line)
    if not board.is_valid():
        raise ValueError(f"not a position that can be played on ({board.status()!r})")
    best = tuple(move.uci() for move in operations.get("bm", ()))
    moves, points = str(operations.get("c9", "")).split(), str(operations.get("c8", "")).split()
    is_paid = len(moves) == len(points) and bool(moves) and all(word.isdigit() for word in points)
    paid = tuple(zip(moves, map(int, points), strict=True)) if is_paid else ()
    name = str(operations.get("id", ""))
    return Position(board.fen(), (), name.partition(".0")[0][:60] or "suite", best, points=paid)
