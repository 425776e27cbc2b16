"""`whet chess RUN`: play against a model, in the terminal, on a page, or through any chess program (UCI)."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from whet.cli import Program, escape
from whet.config import user_path
from whet.eval.chess.games import MAX_TRIES, Player
from whet.generate.policy import PolicyConfig, load_policy
from whet.serve.chat import NO_MODEL, require_model
from whet.serve.chess.page import serve_page
from whet.serve.chess.reply import end_of, played
from whet.serve.chess.table import Table
from whet.serve.chess.uci import Uci, front
from whet.tasks.chess.board import find_move, library, read_board
from whet.tasks.chess.formats import Layout
from whet.telemetry.display import escape_controls

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
            if self.board.outcome() is not None:
                self._write(f"the game is over ({end_of(self.board)}); type /new or /undo")
                return
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
            return self.board.parse_san(word) or None  # it reads moves that pass, which chess does not have
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
        if end := end_of(self.board):
            self._write(end)


def _turn_around(squares: int) -> int:
    """Turn a set of squares by half a turn."""
    chess = library()
    return chess.flip_vertical(chess.flip_horizontal(squares))


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
    name = user_path(config.policy.init).resolve().name
    if config.uci:
        front().begin(f"whet {name}")
        Uci(player, f"whet {name}", config.seed, front().write).run(front())
    elif config.page:
        start = read_board(config.fen).fen() if config.fen else library().STARTING_FEN
        table = Table(player, start, config.seed)
        serve_page(table, name, side=config.side, host=config.host, port=config.port)
    else:
        print(HELP)
        if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no UTF-8 are no move, and no end
            sys.stdin.reconfigure(errors="replace")
        Terminal(player, config).run(sys.stdin)


PROGRAM: Any = Program(config_class=ChessConfig, main=main, positional="policy.init")
