"""A pool of Stockfish processes with a fixed number of nodes per position, and a cache of its lines on disk.

Nodes, not seconds: the same position has the same lines on every machine, under any load. A position is always analysed
with White to move, so that mirrored positions have mirrored lines, to the centipawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.config import cache_folder
from whet.tasks.chess.board import find_move, library, mirrored_move
from whet.tasks.chess.formats import NUM_CANDIDATES, is_move
from whet.tasks.chess.scoring import MATE_CP, Line
from whet.types import UserError

if TYPE_CHECKING:
    import chess

NODES = 2000
"""Nodes per position: some milliseconds for five lines."""
MAX_NODES = 10_000_000
DEADLINE_S = 60.0
"""Seconds after which a process that has not answered is killed and replaced."""
NUM_TRIES = 3
PLACES = ("/usr/games/stockfish", "/usr/local/bin/stockfish", "/opt/homebrew/bin/stockfish")
"""Where the program is looked for besides the PATH."""
INSTALL = (
    "install it: apt-get install stockfish (macOS: brew install stockfish), or name it in WHET_STOCKFISH"
)
_HASH_MIB = 1
"""A new game clears the table, and a small one is cleared sooner: 2,000 nodes fill none of it."""
_KEPT_MOVES = 8


class EngineError(UserError):
    """Stockfish is not there, or does not answer."""


def find_stockfish() -> str:
    """Return the path of the program; '' if there is none."""
    named = os.environ.get("WHET_STOCKFISH", "")
    if named:
        return named
    found = shutil.which("stockfish")
    return found or next((place for place in PLACES if Path(place).is_file()), "")


def require_stockfish(path: str = "") -> str:
    """Return the path of the program, or of the one that is named.

    Raises:
        EngineError: If there is no such program.
    """
    path = path or find_stockfish()
    if not path or not (Path(path).is_file() or shutil.which(path)):
        named = f"{path!r} is not there" if path else "Stockfish is not installed"
        raise EngineError(f"{named}; {INSTALL}")
    return path


class Stockfish:
    """Lines of positions, from the cache or from processes that work beside each other.

    Args:
        nodes: Nodes per position.
        num_lines: Lines per position, best first (MultiPV).
        num_processes: Processes; 0 for one per processor, at most 8. They start when the first position is asked for.
        path: The program; '' looks for it.
        cache_path: File of the cache; None for the user's, '' for none.
        deadline_s: Seconds for one position.

    Attributes:
        num_cached: Positions whose lines were in the cache.
        num_searched: Positions that were searched.
        num_restarts: Processes that were replaced.

    Raises:
        EngineError: If there is no such program.
    """

    def __init__(
        self,
        nodes: int = NODES,
        *,
        num_lines: int = NUM_CANDIDATES,
        num_processes: int = 0,
        path: str = "",
        cache_path: str | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        library()
        self.path = require_stockfish(path)
        self.nodes, self.num_lines, self._deadline_s = nodes, num_lines, deadline_s
        self._size = num_processes or min(8, os.cpu_count() or 1)
        self.num_cached = self.num_searched = self.num_restarts = 0
        if cache_path is None:
            cache_path = str(cache_folder() / "chess" / "stockfish.sqlite")
        self._cache = _Cache(Path(cache_path)) if cache_path else None
        self._version = ""
        self._running: dict[str, Future[list[Line]]] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        # A daemon: it must not keep a program alive that ends without `close`; Stockfish ends with its input.
        threading.Thread(target=self._loop.run_forever, name="whet-stockfish", daemon=True).start()
        self._idle: asyncio.Queue[Any] = asyncio.Queue()
        for _ in range(self._size):
            self._idle.put_nowait(None)

    @property
    def version(self) -> str:
        """Name and version as the program tells them, such as Stockfish 15.1."""
        if not self._version:
            asyncio.run_coroutine_threadsafe(self._try(), self._loop).result()
        return self._version

    def lines(self, boards: Sequence[chess.Board], moves: Sequence[str] = ()) -> list[list[Line]]:
        """Return the lines of positions, best first; fewer than `num_lines` where there are fewer moves.

        Args:
            boards: The positions.
            moves: The only move to search of each, which has one line then; none for all moves.

        Raises:
            EngineError: If the program fails.
        """
        pairs = zip(boards, moves or [""] * len(boards), strict=True)
        return [future.result() for future in [self.submit(board, move) for board, move in pairs]]

    def submit(self, board: chess.Board, move: str = "") -> Future[list[Line]]:
        """Begin to search a position (or one move of it), beside whatever else is done; return what its lines will
        be."""
        is_mirrored = not board.turn
        seen = board.mirror() if is_mirrored else board.copy(stack=False)
        move = mirrored_move(move) if is_mirrored else move
        key = f"{seen.epd()} {seen.halfmove_clock}{f' {move}' if move else ''}"
        with self._lock:
            future = self._running.get(key)
        known = self._known(key, seen, move) if future is None else None
        if future is not None:
            self.num_cached += 1
        elif known is not None:
            self.num_cached += 1
            future = Future()
            future.set_result(known)
        else:
            future = asyncio.run_coroutine_threadsafe(self._search(key, seen, move), self._loop)
            with self._lock:
                self._running[key] = future
            future.add_done_callback(lambda _: self._running.pop(key, None))
        return _mirrored(future) if is_mirrored else future

    def values(self, items: Sequence[tuple[chess.Board, str]]) -> list[int]:
        """Return the centipawns of legal moves for the side that plays them: minus those of the position after each,
        or what its end is worth."""
        found: list[int | None] = []
        asked: list[chess.Board] = []
        for board, move in items:
            after = board.copy(stack=False)
            after.push_uci(move)
            outcome = after.outcome()
            if outcome is None:
                found.append(None)
                asked.append(after)
            else:
                found.append(0 if outcome.winner is None else MATE_CP - 1)
        rest = iter(self.lines(asked))
        return [-_further(next(rest)[0].cp) if value is None else value for value in found]

    def close(self) -> None:
        """End the processes."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            while not self._idle.empty():
                if (engine := self._idle.get_nowait()) is not None:
                    await end_process(engine)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        while self._loop.is_running():
            time.sleep(0.01)
        self._loop.close()
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Stockfish:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known(self, key: str, board: chess.Board, move: str) -> list[Line] | None:
        """Return the lines that the cache has; what we would not have written does not count."""
        found = None if self._cache is None else self._cache.get(self._name(key))
        if found is None:
            return None
        try:
            lines = [_kept(moves, cp) for moves, cp in json.loads(found)]
        except (ValueError, TypeError, RecursionError):
            return None
        return None if _fault(board, lines, move) else lines

    def _name(self, key: str) -> str:
        return f"{self.version}|{self.nodes}|{self.num_lines}|{key}"

    async def _try(self) -> None:
        """Start one process, so that its version is known."""
        engine = await self._idle.get()
        try:
            engine = engine or await self._start()
        finally:
            self._idle.put_nowait(engine)

    async def _search(self, key: str, board: chess.Board, move: str) -> list[Line]:
        """Search a position with White to move; a process that hangs or dies is replaced, and the search repeated."""
        chess = library()
        reason = ""
        for _ in range(NUM_TRIES):
            engine = await self._idle.get()
            try:
                engine = engine or await self._start()
                command = _search_command(board.fen(), self.nodes, self.num_lines, move)
                lines = await asyncio.wait_for(engine.communicate(command), self._deadline_s)
            except (TimeoutError, chess.engine.EngineError) as error:
                reason = str(error)[:200] or f"no answer in {self._deadline_s:g} s"
                if engine is not None:
                    await end_process(engine)
                engine = None
                self.num_restarts += 1
                continue
            finally:
                self._idle.put_nowait(engine)
            if fault := _fault(board, lines, move):
                raise EngineError(
                    f"{self.path} is no chess engine to rely on: in {board.fen()!r} it names {fault}; {INSTALL}"
                )
            self.num_searched += 1
            if self._cache is not None:
                self._cache.put(self._name(key), json.dumps([[line.moves, line.cp] for line in lines]))
            return lines
        raise EngineError(
            f"{self.path} failed {NUM_TRIES} times at {board.fen()!r} ({reason}); {INSTALL}, or give it more time"
        )

    async def _start(self) -> Any:
        chess = library()
        try:
            _, engine = await asyncio.wait_for(chess.engine.popen_uci(self.path), self._deadline_s)
            await engine.configure({"Threads": 1, "Hash": _HASH_MIB})
        except (TimeoutError, OSError, chess.engine.EngineError) as error:
            raise EngineError(
                f"{self.path} does not start as a chess engine ({str(error)[:200] or 'no answer'}); {INSTALL}"
            ) from None
        self._version = str(engine.id.get("name", "engine"))
        return engine


def _search_command(fen: str, nodes: int, num_lines: int, move: str) -> Callable[[Any], Any]:
    """Return what makes the command of one search for an engine of python-chess.

    `engine.analyse` reads the moves of every line of every depth, which takes as long as a search of 2,000 nodes; here
    the last line of each rank is read, once.
    """

    class Search(library().engine.BaseCommand):
        def __init__(self, engine: Any) -> None:
            super().__init__(engine)
            self.engine, self.told = engine, dict[str, str]()

        def start(self) -> None:
            self.engine.send_line(f"setoption name MultiPV value {num_lines}")
            self.engine.send_line("ucinewgame")  # no position may change another's lines
            self.engine.send_line(f"position fen {fen}")
            self.engine.send_line(f"go nodes {nodes}{f' searchmoves {move}' if move else ''}")

        def line_received(self, line: str) -> None:
            if line.startswith("info ") and " pv " in line and " score " in line:
                self.told[line.partition(" multipv ")[2].partition(" ")[0]] = line
            elif line.startswith("bestmove"):
                if not self.result.done():
                    self.result.set_result(_read_lines(list(self.told.values())))
                self.set_finished()

        def cancel(self) -> None:
            self.engine.send_line("stop")

    return Search


def _read_lines(told: Sequence[str]) -> list[Line]:
    """Read lines as an engine tells them (`info ... score cp 13 ... pv e2e4 e7e5`); return them best first.

    Raises:
        EngineError: Of python-chess, where one cannot be read.
    """
    found: list[Line] = []
    for text in told:
        head, _, moves = text.partition(" pv ")
        kind, number = (head.partition(" score ")[2].split() + ["", ""])[:2]
        try:
            value = int(number)
        except ValueError:
            raise library().engine.EngineError(f"no score in {text[:100]!r}") from None
        if kind == "mate":
            value = MATE_CP - value if value > 0 else -MATE_CP - value
        found.append(Line(tuple(moves.split()[:_KEPT_MOVES]), value))
    return sorted(found, key=lambda line: -line.cp)


def _kept(moves: Any, cp: Any) -> Line:
    """Read a line of the cache.

    Raises:
        ValueError: If it is not what we write.
    """
    if not isinstance(moves, list) or not all(isinstance(move, str) for move in moves):
        raise ValueError("expected a list of moves")
    if not isinstance(cp, int) or abs(cp) > MATE_CP:
        raise ValueError("expected centipawns")
    return Line(tuple(moves), cp)


def _fault(board: chess.Board, lines: Sequence[Line], only: str) -> str:
    """Say what cannot be in an engine's lines of a position: no line, an empty one, an illegal move, one named twice.

    Args:
        board: The position.
        lines: The lines. Of the moves after the first only their form is looked at: to play each took a quarter of a
            search.
        only: The only move that was asked about; '' for all.

    Returns:
        What is wrong; '' for nothing.
    """
    if not lines and any(board.legal_moves):
        return "no move, and there are legal ones"
    seen: set[str] = set()
    for line in lines:
        if not line.moves:
            return "a line without moves"
        if line.move in seen:
            return f"{line.move[:20]!r} twice"
        if only and line.move != only:
            return f"{line.move[:20]!r}, asked about {only!r} alone"
        seen.add(line.move)
        if find_move(board, line.move) is None:
            return f"{line.move[:20]!r}, which is illegal"
        for text in line.moves[1:]:
            if not is_move(text):
                return f"{text[:20]!r}, which is no move"
    return ""


@cache
def shared(nodes: int) -> Stockfish:
    """Return this process's pool for a number of nodes.

    Raises:
        EngineError: If there is no Stockfish.
    """
    return Stockfish(nodes)


def _further(cp: int) -> int:
    """Return an evaluation seen one move earlier: a mate is then one move further away."""
    if abs(cp) < MATE_CP // 2:
        return cp
    return cp + 1 if cp < 0 else cp


def _mirrored(future: Future[list[Line]]) -> Future[list[Line]]:
    """Return the lines of the mirrored position, once those of a position are there."""
    turned: Future[list[Line]] = Future()

    def turn(done: Future[list[Line]]) -> None:
        if (error := done.exception()) is not None:
            turned.set_exception(error)
        else:
            turned.set_result(
                [Line(tuple(map(mirrored_move, line.moves)), line.cp) for line in done.result()]
            )

    future.add_done_callback(turn)
    return turned


async def end_process(engine: Any) -> None:
    """End a process, also one that does not answer."""
    with contextlib.suppress(Exception):
        engine.transport.kill()
        await asyncio.wait_for(engine.returncode, 5)
    with contextlib.suppress(Exception):
        engine.transport.close()


class _Cache:
    """A table of texts on disk that several processes may use at once; without a place to write, in memory.

    Args:
        path: Its file.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open(str(path))
        except (OSError, sqlite3.Error):
            self._file = self._open(":memory:")

    @staticmethod
    def _open(name: str) -> sqlite3.Connection:
        file = sqlite3.connect(name, timeout=30, check_same_thread=False, isolation_level=None)
        file.execute("PRAGMA journal_mode=WAL")
        # With a log, a power cut loses the last lines at most, which are searched again, and damages nothing.
        file.execute("PRAGMA synchronous=NORMAL")
        file.execute("CREATE TABLE IF NOT EXISTS lines (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        return file

    def get(self, name: str) -> str | None:
        """Return a text; None where there is none, or it cannot be read: then the rest is kept in memory."""
        with self._lock:
            try:
                row = self._file.execute("SELECT value FROM lines WHERE name = ?", (name,)).fetchone()
            except sqlite3.Error:
                self._file.close()
                self._file = self._open(":memory:")
                return None
        return row[0] if row is not None and isinstance(row[0], str) else None

    def put(self, name: str, value: str) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._file.execute("INSERT OR REPLACE INTO lines VALUES (?, ?)", (name, value))

    def close(self) -> None:
        with self._lock:
            self._file.close()
