"""`whet chess RUN`: play against a model, in the terminal, on a page, or through any chess program (UCI)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from whet import __version__
from whet.cli import Program, escape
from whet.eval.chess.games import MAX_TRIES, Player, Reply
from whet.generate.policy import PolicyConfig, load_policy
from whet.serve.chat import NO_MODEL, require_model
from whet.serve.chess.page import Table, serve_page
from whet.serve.chess.reply import played
from whet.tasks.chess.board import find_move, library, read_board
from whet.tasks.chess.formats import Layout, read_policy
from whet.telemetry.display import escape_controls
from whet.types import UserError

if TYPE_CHECKING:
    import chess

HELP = "a move (e4, Nf3, e2e4), /undo, /new, /side, /fen, /quit"


@dataclass(frozen=True, kw_only=True)
class ChessConfig:
    """A game against a model."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(init=NO_MODEL, max_rows=1))
    """The model."""
    uci: bool = False
    """Speak UCI on standard input and output, for chess programs and lichess-bot."""
    page: bool = False
    """Play on a page in the browser."""
    side: Literal["white", "black"] = "white"
    """Your side."""
    fen: str = ""
    """Where the game begins; empty for the usual beginning."""
    temperature: float = 0.0
    """0 plays the likeliest line; above, lines are drawn."""
    max_new_tokens: int = 144
    """Longest completion, in tokens."""
    tries: int = 4
    """How often it is asked for a move where nothing that it wrote is legal; then any legal move is played for it."""
    layout: Layout = "padded"
    """How the policy's prompt is padded, as the model was trained: padded, short or diagnostic."""
    host: str = "127.0.0.1"
    """Address that the page is served at: this machine's own."""
    port: int = 8001
    """Port of the page; 0 picks a free one."""
    seed: int = 0
    """Seed of drawn lines, and of moves that replace illegal ones."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters."""

    def __post_init__(self) -> None:
        require_model(self.policy)
        if self.uci and self.page:
            raise ValueError("uci and page: choose one")
        if not 0 <= self.temperature < 10:
            raise ValueError(f"temperature = {self.temperature}: expected 0 to 10")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}: expected 1 or more")
        if not 1 <= self.tries <= MAX_TRIES:
            raise ValueError(f"tries = {self.tries}: expected 1 to {MAX_TRIES}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port = {self.port}: expected 0 (any free one) to 65535")


class Terminal:
    """A game in the terminal.

    Args:
        player: The model.
        config: Side, start and seed.
        write: Shows a line.
    """

    def __init__(self, player: Player, config: ChessConfig, write: Callable[[str], None] = print) -> None:
        self._player, self._config, self._write = player, config, write
        self._start = read_board(config.fen).fen() if config.fen else library().STARTING_FEN
        self.is_white = config.side == "white"
        self.board = library().Board(self._start)

    def run(self, lines: Iterable[str]) -> None:
        """Play until the lines end, or /quit."""
        self._answer()
        for line in lines:
            word = line.strip()
            if word == "/quit":
                return
            self.handle(word)

    def handle(self, word: str) -> None:
        """Do what the user typed."""
        if word == "/new":
            self.board = library().Board(self._start)
        elif word == "/side":
            self.is_white = not self.is_white
        elif word == "/undo":
            for _ in range(min(2, len(self.board.move_stack))):
                self.board.pop()
        elif word == "/fen":
            self._write(self.board.fen())
            return
        elif not word:
            return
        else:
            move = self._read(word)
            if move is None:
                self._write(f"{escape(word[:20])!r} is no legal move here; type {HELP}")
                return
            self.board.push(move)
        self._answer()

    def _read(self, word: str) -> chess.Move | None:
        move = find_move(self.board, word.lower())
        if move is not None:
            return move
        try:
            return self.board.parse_san(word)
        except ValueError:
            return None

    def _answer(self) -> None:
        """Let the model move if it is its turn, and show the board."""
        if self.board.outcome() is None and self.board.turn != self.is_white:
            (reply,) = self._player.ask([self.board])
            move, note = played(self.board, reply, self._config.seed)
            self._write(f"it thinks: {escape_controls(' '.join(reply.text.split()))}")
            if note:
                self._write(escape_controls(note))
            self._write(f"it plays {self.board.san(self.board.parse_uci(move))}")
            self.board.push_uci(move)
        self._write(str(self.board if self.is_white else self.board.transform(_turn_around)))
        outcome = self.board.outcome()
        if outcome is not None:
            self._write(f"{outcome.termination.name.lower().replace('_', ' ')}: {outcome.result()}")


def _turn_around(squares: int) -> int:
    """Turn a set of squares by half a turn."""
    chess = library()
    return chess.flip_vertical(chess.flip_horizontal(squares))


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
        self._board = library().Board()

    def run(self, lines: Iterable[str]) -> None:
        """Answer until the lines end, or quit; what it does not know is ignored, as the protocol asks."""
        for line in lines:
            words = line.split()
            if not words:
                continue
            if words[0] == "quit":
                return
            if words[0] == "uci":
                self._write(f"id name {self._name}\nid author whet {__version__}\nuciok")
            elif words[0] == "isready":
                self._write("readyok")
            elif words[0] == "ucinewgame":
                self._board = library().Board()
            elif words[0] == "position":
                self._place(words[1:])
            elif words[0] == "go":
                self._go()

    def _place(self, words: list[str]) -> None:
        """Set up a position: startpos or fen, then moves; a malformed one is told and leaves the board as it is."""
        place = words.index("moves") if "moves" in words else len(words)
        try:
            if words[:1] == ["startpos"]:
                board = library().Board()
            elif words[:1] == ["fen"]:
                board = library().Board(" ".join(words[1:place]))
            else:
                raise ValueError("expected startpos or fen")
            for move in words[place + 1 :]:
                board.push_uci(move)
        except ValueError as error:
            self._write(f"info string position: {escape(str(error)[:200])}")
            return
        self._board = board

    def _go(self) -> None:
        board = self._board
        if not any(board.legal_moves):
            self._write("bestmove (none)")
            return
        try:
            (reply,) = self._player.ask([board])
        except UserError as error:
            self._write(f"info string {escape(str(error)[:200])}")
            reply = Reply("", "")
        move, note = played(board, reply, self._seed)
        said = read_policy(reply.text)
        pairs = [
            (number, one)
            for one, number in zip(said.moves, said.evals, strict=False)
            if math.isfinite(number) and find_move(board, one)
        ]
        for rank, (number, one) in enumerate(sorted(pairs, key=lambda pair: (pair[1] != move, -pair[0])), 1):
            self._write(f"info depth 1 multipv {rank} score cp {round(100 * number)} pv {one}")
        if note:
            self._write(f"info string {escape(note)}")
        self._write(f"bestmove {move}")


def main(config: ChessConfig) -> None:
    """Play.

    Raises:
        UserError: If the model cannot be loaded, or python-chess is missing.
    """
    library()
    with redirect_stdout(sys.stderr):  # in UCI every line on standard output is read by a program
        policy = load_policy(config.policy, seed=0, dtype=getattr(torch, config.precision), steers=True)
    player = Player(
        policy,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed,
        layout=config.layout,
        tries=config.tries,
    )
    name = Path(config.policy.init).expanduser().resolve().name
    if config.uci:
        Uci(player, f"whet {name}", config.seed, lambda text: print(text, flush=True)).run(sys.stdin)
    elif config.page:
        start = read_board(config.fen).fen() if config.fen else library().STARTING_FEN
        table = Table(player, start, config.seed)
        serve_page(table, name, side=config.side, host=config.host, port=config.port)
    else:
        print(HELP)
        Terminal(player, config).run(sys.stdin)


PROGRAM: Any = Program(config_class=ChessConfig, main=main, positional="policy.init")
