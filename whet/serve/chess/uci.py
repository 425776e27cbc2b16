"""The engine's side of UCI, for chess programs and lichess-bot. No import of torch: `uci` is answered at once."""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from whet import __version__
from whet.cli import escape
from whet.tasks.chess.board import find_move, library
from whet.tasks.chess.formats import NUM_CANDIDATES, read_policy
from whet.types import UserError

if TYPE_CHECKING:
    import chess

    from whet.eval.chess.games import Player, Reply

OPTIONS = {
    "Hash": "type spin default 16 min 1 max 33554432",
    "Threads": "type spin default 1 min 1 max 1024",
    "Move Overhead": "type spin default 10 min 0 max 5000",
    "MultiPV": f"type spin default 1 min 1 max {NUM_CANDIDATES}",
    "Ponder": "type check default false",
}
"""Options as they are declared. Chess programs set all of them; MultiPV alone changes what is said here."""
LIMITS = frozenset(
    (
        *("ponder", "wtime", "btime", "winc", "binc", "movestogo", "depth", "nodes", "mate", "movetime"),
        *("infinite", "perft", "searchmoves"),
    )
)
"""Words of `go` that end a list of moves."""


def greeting(name: str) -> str:
    """Return the answer to `uci`."""
    options = [f"option name {option} {kind}" for option, kind in OPTIONS.items()]
    return "\n".join([f"id name {name}", f"id author whet {__version__}", *options, "uciok"])


class Front:
    """Standard input as lines, of which `uci` is answered as soon as it comes: programs wait ten seconds for that, and
    torch and the weights may take longer to load.

    A thread reads the file itself: one that waits inside `sys.stdin` would hold its lock when the process ends. Bytes
    that are no UTF-8 are replaced.

    Args:
        read: Returns the next bytes; none at the end.
        write: Writes a line.
    """

    def __init__(self, read: Callable[[], bytes], write: Callable[[str], None]) -> None:
        self._read, self.write = read, write
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, name: str) -> None:
        """Begin to read, as an engine of this name; the first name counts."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._take, args=(name,), name="whet-uci-input", daemon=True
            )
            self._thread.start()

    def _take(self, name: str) -> None:
        rest = b""
        while data := self._read():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._sort(name, line)
        self._sort(name, rest)
        self._lines.put(None)

    def _sort(self, name: str, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace")
        if text.split()[:1] == ["uci"]:
            self.write(greeting(name))
        else:
            self._lines.put(text)

    def __iter__(self) -> Iterator[str]:
        """Yield the other lines, until the input ends."""
        while (line := self._lines.get()) is not None:
            yield line


@cache
def front() -> Front:
    """Return this process's standard input and output."""
    out = sys.stdout  # where it is now: what loads a model may print elsewhere meanwhile

    def read() -> bytes:
        try:
            return os.read(0, 65536)
        except OSError:  # it was closed
            return b""

    return Front(read, lambda text: print(text, file=out, flush=True))


@contextmanager
def answering(words: Sequence[str]) -> Iterator[None]:
    """Answer `uci` while a model is loaded, and say on the program's side, too, what that stops at.

    Args:
        words: The words after `whet chess`.
    """
    named = words[words.index("--policy.init") + 1 :] if "--policy.init" in words else words
    init = named[0] if named and not named[0].startswith("-") else "chess"
    front().begin(f"whet {Path(init).name}")
    try:
        yield
    except Exception as error:
        front().write(f"info string {escape(str(error)[:500])}")
        raise


class Uci:
    """The engine's side of UCI.

    Args:
        player: The model.
        name: What it is called.
        seed: Seed of moves that replace illegal ones.
        write: Writes a line.
    """

    def __init__(self, player: Player, name: str, seed: int, write: Callable[[str], None]) -> None:
        self._player, self._name, self._seed, self._write = player, name, seed, write
        self._board: chess.Board | None = library().Board()  # None after a position that cannot be played on
        self._held = ""  # the answer to `go infinite` and `go ponder`, until it is asked for
        self._num_lines = 1  # programs take the last line that they read for that of the move

    def run(self, lines: Iterable[str]) -> None:
        """Answer until the lines end, or quit; what it does not know is ignored, as the protocol asks."""
        for line in lines:
            words = line.split()
            if not words:
                continue
            if words[0] == "quit":
                return
            if words[0] == "uci":
                self._write(greeting(self._name))
            elif words[0] == "isready":
                self._write("readyok")
            elif words[0] in ("stop", "ponderhit"):
                self._release()
            elif words[0] == "setoption":
                self._set(line)
            elif words[0] == "ucinewgame":
                self._board = library().Board()
            elif words[0] == "position":
                self._place(words[1:])
            elif words[0] == "go":
                self._release()
                self._go(words[1:])

    def _release(self) -> None:
        if self._held:
            self._write(self._held)
        self._held = ""

    def _set(self, line: str) -> None:
        """Set an option; one that it does not have is told and ignored."""
        name, _, value = line.partition(" name ")[2].partition(" value ")
        name, value = name.strip(), value.strip()
        known = next((option for option in OPTIONS if option.lower() == name.lower()), "")
        if not known:
            self._write(f"info string there is no option {escape(name[:40])!r}")
        elif known == "MultiPV":
            if not value.isdecimal() or not 1 <= int(value[:9]) <= NUM_CANDIDATES:
                self._write(
                    f"info string MultiPV: expected 1 to {NUM_CANDIDATES}, got {escape(value[:20])!r}"
                )
            else:
                self._num_lines = int(value)

    def _place(self, words: list[str]) -> None:
        """Set up a position: startpos or fen, then moves; one that cannot be played on is told, and has no move."""
        place = words.index("moves") if "moves" in words else len(words)
        self._board = None
        try:
            if words[:1] == ["startpos"]:
                board = library().Board()
            elif words[:1] == ["fen"]:
                board = library().Board(" ".join(words[1:place]))
            else:
                raise ValueError("expected startpos or fen")
            if not board.is_valid():
                raise ValueError(f"cannot be played on ({board.status()!r})")
            for text in words[place + 1 :]:
                move = board.parse_uci(text)
                if not move:
                    raise ValueError(f"{text!r} is no move")
                board.push(move)
        except ValueError as error:
            self._write(f"info string position: {escape(str(error)[:200])}")
            return
        self._board = board

    def _go(self, words: list[str]) -> None:
        """Say the model's move: at once, or where it is to think until it is stopped, then."""
        answer = "bestmove 0000" if self._board is None else f"bestmove {self._move(self._board, words)}"
        if {"infinite", "ponder"} & {*words}:
            self._held = answer
        else:
            self._write(answer)

    def _move(self, board: chess.Board, words: list[str]) -> str:
        """Return the move to play, and write what the model says of it and of others."""
        from whet.eval.chess.games import Reply

        if not any(board.legal_moves):
            return "(none)"
        try:
            (reply,) = self._player.ask([board])
        except UserError as error:
            self._write(f"info string {escape(str(error)[:200])}")
            reply = Reply("", "")
        allowed = self._allowed(board, words)
        move, note = self._chosen(board, reply, allowed)
        said = read_policy(reply.text)
        values: dict[str, float] = {}
        for one, number in zip(said.moves, said.evals, strict=False):
            is_allowed = not allowed or one in allowed
            if math.isfinite(number) and is_allowed and find_move(board, one):
                values.setdefault(one, number)
        others = sorted((one for one in values if one != move), key=lambda one: -values[one])
        for rank, one in enumerate([move, *others][: self._num_lines], 1):
            score = f" score cp {round(100 * values[one])}" if one in values else ""
            self._write(f"info depth 1 multipv {rank}{score} pv {one}")
        if note:
            self._write(f"info string {escape(note)}")
        return move

    def _allowed(self, board: chess.Board, words: list[str]) -> list[str]:
        """Return the moves of `searchmoves`; none for all."""
        if "searchmoves" not in words:
            return []
        named: list[str] = []
        for word in words[words.index("searchmoves") + 1 :]:
            if word in LIMITS:
                break
            named.append(word)
        legal = [move for move in named if find_move(board, move)]
        if not legal:
            self._write("info string searchmoves: none of them is legal; any move may be played")
        return legal

    def _chosen(self, board: chess.Board, reply: Reply, allowed: Sequence[str]) -> tuple[str, str]:
        """Return the move that is played, and what is to be said of it."""
        from whet.serve.chess.reply import played

        if not allowed or reply.move in allowed:
            return played(board, reply, self._seed)
        move = next((move for move in read_policy(reply.text).moves if move in allowed), "")
        if move:
            return move, "its best move is not among searchmoves; a candidate is played"
        return allowed[0], "nothing it named is among searchmoves; the first of them is played"
