"""Positions made by us: openings, games, endings and mates in one, balanced by phase and by side.

A position depends on the seed and its number alone, in self-play besides on Stockfish's lines. Half of the positions
are turned around, so that each source has as many with Black to move as with White.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from whet.config import cache_folder
from whet.tasks.chess.board import find_move, library, mirrored_move, phase_of, position_key
from whet.tasks.made.draft import Draw

if TYPE_CHECKING:
    import chess

    from whet.tasks.chess.stockfish import Stockfish

EDITION = 2
"""Counts changes of what is made: positions kept on disk are those of one edition."""
OPENINGS = (
    "e2e4 e7e5 g1f3 b8c6 f1b5 a7a6 b5a4 g8f6 e1g1 f8e7",
    "e2e4 e7e5 g1f3 b8c6 f1c4 f8c5 c2c3 g8f6 d2d3 d7d6",
    "e2e4 e7e5 g1f3 b8c6 d2d4 e5d4 f3d4 g8f6 d4c6 b7c6",
    "e2e4 e7e5 g1f3 g8f6 f3e5 d7d6 e5f3 f6e4 d2d4 d6d5",
    "e2e4 e7e5 b1c3 g8f6 f2f4 d7d5 f4e5 f6e4 g1f3 f8e7",
    "e2e4 c7c5 g1f3 d7d6 d2d4 c5d4 f3d4 g8f6 b1c3 a7a6",
    "e2e4 c7c5 g1f3 b8c6 d2d4 c5d4 f3d4 g7g6 c2c4 f8g7",
    "e2e4 c7c5 g1f3 e7e6 d2d4 c5d4 f3d4 a7a6 f1d3 g8f6",
    "e2e4 c7c5 c2c3 g8f6 e4e5 f6d5 d2d4 c5d4 g1f3 b8c6",
    "e2e4 c7c5 b1c3 b8c6 g2g3 g7g6 f1g2 f8g7 d2d3 d7d6",
    "e2e4 e7e6 d2d4 d7d5 b1c3 g8f6 c1g5 f8e7 e4e5 f6d7",
    "e2e4 e7e6 d2d4 d7d5 e4e5 c7c5 c2c3 b8c6 g1f3 d8b6",
    "e2e4 c7c6 d2d4 d7d5 b1c3 d5e4 c3e4 c8f5 e4g3 f5g6",
    "e2e4 c7c6 d2d4 d7d5 e4e5 c8f5 g1f3 e7e6 f1e2 c6c5",
    "e2e4 d7d5 e4d5 d8d5 b1c3 d5a5 d2d4 g8f6 g1f3 c7c6",
    "e2e4 d7d6 d2d4 g8f6 b1c3 g7g6 g1f3 f8g7 f1e2 e8g8",
    "e2e4 g8f6 e4e5 f6d5 d2d4 d7d6 g1f3 c8g4 f1e2 e7e6",
    "d2d4 d7d5 c2c4 e7e6 b1c3 g8f6 c1g5 f8e7 e2e3 e8g8",
    "d2d4 d7d5 c2c4 c7c6 g1f3 g8f6 b1c3 d5c4 a2a4 c8f5",
    "d2d4 d7d5 c2c4 d5c4 g1f3 g8f6 e2e3 e7e6 f1c4 c7c5",
    "d2d4 g8f6 c2c4 g7g6 b1c3 f8g7 e2e4 d7d6 g1f3 e8g8",
    "d2d4 g8f6 c2c4 g7g6 b1c3 d7d5 c4d5 f6d5 e2e4 d5c3",
    "d2d4 g8f6 c2c4 e7e6 b1c3 f8b4 e2e3 e8g8 f1d3 d7d5",
    "d2d4 g8f6 c2c4 e7e6 g1f3 b7b6 g2g3 c8b7 f1g2 f8e7",
    "d2d4 g8f6 c2c4 c7c5 d4d5 e7e6 b1c3 e6d5 c4d5 d7d6",
    "d2d4 f7f5 g2g3 g8f6 f1g2 e7e6 g1f3 f8e7 e1g1 e8g8",
    "d2d4 d7d5 c1f4 g8f6 e2e3 c7c5 c2c3 b8c6 b1d2 e7e6",
    "c2c4 e7e5 b1c3 g8f6 g1f3 b8c6 g2g3 d7d5 c4d5 f6d5",
    "c2c4 c7c5 b1c3 b8c6 g2g3 g7g6 f1g2 f8g7 g1f3 e7e6",
    "g1f3 d7d5 g2g3 g8f6 f1g2 c7c6 e1g1 c8g4 d2d3 b8d7",
    "b2b3 e7e5 c1b2 b8c6 e2e3 d7d5 f1b5 f8d6 g1f3 d8e7",
    "f2f4 d7d5 g1f3 g7g6 e2e3 f8g7 f1e2 g8f6 e1g1 e8g8",
)
"""The beginnings of usual openings, in UCI notation."""
ENDINGS = (
    "QvR",
    "RvB",
    "RPvR",
    "PPvP",
    "BPvN",
    "QvP",
    "RvN",
    "PvP",
    "QvQ",
    "RRvR",
    "BBv",
    "Rv",
    "Qv",
    "BNvP",
    "PPPvPP",
)
"""Pieces of endings besides the kings: White's v Black's."""
HEAVY = ("QR", "RR", "Q", "R", "QN", "QB", "RB", "QP", "QQ", "RN")
MAX_PLIES = 120
SOURCES = ("opening", "game", "ending", "opening", "game", "mate")
"""The source of each position in turn: as many openings as positions of the middlegame and of the end."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position and where it is from.

    Attributes:
        fen: The position, as python-chess writes it.
        history: The moves before it, oldest first, as far as they are known.
        source: What made it.
        best: Moves that are right, where the data says so.
        rating: Rating of the puzzle that it is from; 0 for none.
        puzzle: Name of that puzzle.
        points: Points of moves, as (move, points), of a suite that pays for several.
        move: The move to play in it, for the environment; '' for one drawn.
    """

    fen: str
    history: tuple[str, ...] = ()
    source: str = ""
    best: tuple[str, ...] = ()
    rating: int = 0
    puzzle: str = ""
    points: tuple[tuple[str, int], ...] = ()
    move: str = ""


def made(count: int, seed: int, engine: Stockfish | None = None) -> list[Position]:
    """Return positions, without repetition (reflected ones count as the same), from the disk if they were made before.

    The first positions of many are those of few.

    Args:
        count: Number of positions.
        seed: Seed.
        engine: Plays the games that half of the openings and of the middlegame are from; None plays at random.
    """
    words = (EDITION, seed, "" if engine is None else f"{engine.version} {engine.nodes}")
    name = hashlib.sha256(repr(words).encode()).hexdigest()[:16]
    path = cache_folder() / "chess" / f"positions-{name}.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if len(rows) >= count:
            return [_kept(row) for row in rows[:count]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # not made yet, or damaged
    found: list[Position] = []
    seen: set[str] = set()
    waiting: dict[str, list[Position]] = {source: [] for source in MAKERS}
    number = draws = games = 0
    playing: Iterator[Position] = iter(())
    while len(found) < count:
        source = SOURCES[number % len(SOURCES)]
        wants_play = engine is not None and source in ("opening", "game") and number % len(SOURCES) < 3
        heap = waiting.setdefault(f"{source} played" if wants_play else source, [])
        while not heap:
            if wants_play:
                assert engine is not None
                for position in playing:
                    waiting.setdefault(f"{_source(position)} played", []).append(position)
                    if heap:
                        break
                else:
                    games += 1
                    playing = self_play(engine, Draw("chess games", seed, games))
            else:
                heap += MAKERS[source](Draw("chess", seed, draws))
                draws += 1
        position = heap.pop()
        board = library().Board(position.fen)
        key = position_key(board)
        if key in seen or not any(board.legal_moves):
            continue
        seen.add(key)
        number += 1
        wants_white = number // len(SOURCES) % 2 == 0
        found.append(position if board.turn == wants_white else _turned(position, board))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{seed}.partial")
        partial.write_text("".join(json.dumps(asdict(position)) + "\n" for position in found))
        partial.replace(path)
    except OSError:
        pass  # they are made again the next time
    return found


def _kept(row: Any) -> Position:
    """Read a position that was made before.

    Raises:
        ValueError: If it is not one that we wrote.
    """
    fen, history, source = row["fen"], tuple(row["history"]), row["source"]
    if not all(isinstance(text, str) for text in (fen, source, *history)):
        raise ValueError("expected texts")
    return Position(fen, history, source)


def _turned(position: Position, board: chess.Board) -> Position:
    """Return the same position seen from the other side."""
    return Position(board.mirror().fen(), tuple(map(mirrored_move, position.history)), position.source)


def _source(position: Position) -> str:
    """Return the source whose place a position of a played game takes."""
    return position.source if position.source in ("opening", "ending") else "game"


def _opening(draw: Draw) -> list[Position]:
    """Play the beginning of an opening, then some moves at random."""
    board = library().Board()
    line = draw.one(OPENINGS).split()
    for text in line[: draw.between(1, len(line))]:
        board.push_uci(text)
    for _ in range(draw.below(5)):
        if not _push_any(board, draw):
            return []
    return [_position(board, "opening")]


def _game(draw: Draw) -> list[Position]:
    """Play a game at random and return positions of its middle, eight plies apart."""
    board = library().Board()
    for text in draw.one(OPENINGS).split()[: draw.below(9)]:
        board.push_uci(text)
    found: list[Position] = []
    first = draw.below(8)
    for ply in range(MAX_PLIES):
        if not _push_any(board, draw):
            break
        if ply % 8 == first and (phase := phase_of(board)) != "opening":
            if phase == "endgame":
                break
            found.append(_position(board, "game"))
    return found


def _push_any(board: chess.Board, draw: Draw) -> bool:
    """Play a move at random; False where the game is over."""
    moves = list(board.legal_moves)
    if not moves:
        return False
    if draw.below(8) == 0:
        moves = [move for move in moves if board.is_capture(move)] or moves
    board.push(draw.one(moves))
    return True


def _placed(draw: Draw, white: str, black: str, *, king_on_edge: bool = False) -> chess.Board | None:
    """Put kings and pieces on random squares, Black's king on the edge if asked; None where that is no position."""
    chess = library()
    board = chess.Board(None)
    squares = draw.shuffled(range(64))
    if king_on_edge:
        squares.append(draw.one([s for s in squares if {s % 8, s // 8} & {0, 7}]))
        squares = [*(s for s in squares[:-1] if s != squares[-1]), squares[-1]]
    for text, is_white in (("K" + black, False), ("K" + white, True)):
        for letter in text:
            piece = chess.Piece.from_symbol(letter if is_white else letter.lower())
            square = squares.pop()
            while letter == "P" and chess.square_rank(square) in (0, 7):
                square = squares.pop()
            board.set_piece_at(square, piece)
    board.turn = True
    board.halfmove_clock, board.fullmove_number = draw.below(20), draw.between(35, 80)
    return board if board.is_valid() else None


def _ending(draw: Draw) -> list[Position]:
    white, _, black = draw.one(ENDINGS).partition("v")
    board = _placed(draw, white, black)
    if board is None or not any(board.legal_moves) or board.is_insufficient_material():
        return []
    return [_position(board, "ending")]


def _mate(draw: Draw) -> list[Position]:
    """Find a position in which one move mates."""
    board = _placed(draw, draw.one(HEAVY), draw.one(("", "P", "PP", "N", "B", "R")), king_on_edge=True)
    return [_position(board, "mate")] if board is not None and mates(board) else []


def mates(board: chess.Board) -> list[str]:
    """Return the moves that mate at once."""
    found: list[str] = []
    for move in list(board.legal_moves):
        if board.gives_check(move):
            board.push(move)
            if board.is_checkmate():
                found.append(move.uci())
            board.pop()
    return found


def checked(position: Position, board: chess.Board) -> Position | None:
    """Return the position after a move that checks and does not mate, the same each time; None where there is none."""
    moves = [move for move in board.legal_moves if board.gives_check(move)]
    for move in Draw("chess checks", position.fen).shuffled(moves):
        after = board.copy(stack=False)
        after.push(move)
        if any(after.legal_moves):
            return Position(after.fen(), (*position.history, move.uci())[-9:], "check")
    return None


def _position(board: chess.Board, source: str) -> Position:
    history = tuple(move.uci() for move in board.move_stack[-9:])
    return Position(board.fen(), history, source)


MAKERS = {"opening": _opening, "game": _game, "ending": _ending, "mate": _mate}


def self_play(engine: Stockfish, draw: Draw, *, num_games: int = 8, every: int = 1) -> Iterator[Position]:
    """Play games side by side, each move one of the engine's best or, one in five, any; yield their positions.

    Args:
        engine: Gives the lines, of all games at a time.
        draw: Chooses.
        num_games: Games.
        every: Plies between positions that are yielded; with 1 nothing is searched that is not asked about later.
    """
    boards = [library().Board() for _ in range(num_games)]
    for board in boards:
        for text in draw.one(OPENINGS).split()[: draw.below(7)]:
            board.push_uci(text)
    for ply in range(MAX_PLIES):
        boards = [board for board in boards if any(board.legal_moves)]
        for board, lines in zip(boards, engine.lines(boards), strict=True):
            if ply % every == 0:
                yield _position(board, phase_of(board))
            near = [line.move for line in lines if line.cp >= lines[0].cp - 100]
            if not near or draw.below(5) == 0:
                _push_any(board, draw)
            else:
                board.push_uci(draw.one(near))


def drawn_move(board: chess.Board, draw: Draw, *, for_training: bool) -> str:
    """Draw the move that the environment is asked about: mostly legal; what is rare in games comes more often.

    One in ten is illegal: another side's, a blocked or a pinned piece's, or any. Where a move mates at once, it is
    drawn one time in three. To train on, one in four and two in three: shown fewer, a small model learns to notice
    none (docs/LOG.md).
    """
    moves = list(board.legal_moves)
    if draw.below(4 if for_training else 10) == 0 or not moves:
        return _illegal_move(board, draw)
    kinds: Sequence[list[chess.Move]] = (
        [move for move in moves if move.promotion],
        [move for move in moves if board.is_castling(move) or board.is_en_passant(move)],
        [move for move in moves if board.is_capture(move)],
    )
    is_rare = draw.below(3) == 0
    if (is_rare or (for_training and draw.below(2) == 0)) and (mating := mates(board)):
        return draw.one(mating)
    if is_rare:
        moves = next((kind for kind in kinds if kind), moves)
    return draw.one(moves).uci()


def _illegal_move(board: chess.Board, draw: Draw) -> str:
    chess = library()
    pseudo = [move.uci() for move in board.pseudo_legal_moves if not board.is_legal(move)]
    if pseudo and draw.below(2):
        return draw.one(pseudo)
    while True:
        start = draw.one(
            [square for square in chess.SQUARES if board.piece_at(square)] or list(chess.SQUARES)
        )
        end = draw.below(64)
        text = chess.square_name(start) + chess.square_name(end)
        if start != end and find_move(board, text) is None:
            return text
