"""The page of `whet chess RUN --page`: a board to click on, and what the model writes. The server keeps no game."""

from __future__ import annotations

import base64
import json
import threading
from typing import TYPE_CHECKING, Any

from whet.install import install_command
from whet.report.page import render
from whet.serve.chess.reply import end_of, evaluation_of, played
from whet.serve.serve import is_local, listen
from whet.tasks.chess.board import find_move, library
from whet.types import UserError

if TYPE_CHECKING:
    from whet.eval.chess.games import Player

MAX_BODY_BYTES = 64 * 1024
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
        self._lock = threading.Lock()

    def answer(self, asked: Any) -> dict[str, Any]:
        """Play the user's move, if there is one, and the model's if it is its turn.

        Args:
            asked: Untrusted JSON: `moves` so far, in UCI notation, the `side` of the user, and a new `move`.

        Returns:
            The game: `moves`, `names` (in short notation), `board` (a picture), `turn`, `legal` moves, `said` (by the
            model), `note`, `end`; `error` where the request cannot be answered.
        """
        moves = asked.get("moves", []) if isinstance(asked, dict) else None
        if not isinstance(moves, list) or len(moves) > MAX_MOVES:
            return {"error": "expected {moves: [...], side, move}"}
        board = library().Board(self._start)
        new = asked.get("move") or None
        for text in [*moves, *([new] if new else [])]:
            move = find_move(board, text) if isinstance(text, str) else None
            if move is None and isinstance(text, str):
                move = find_move(board, f"{text}q")  # a pawn that is clicked to its end becomes a queen
            if move is None:
                return {"error": f"{str(text)[:10]!r} is not a legal move"}
            if end := end_of(board):
                return {"error": f"the game is over ({end})"}
            board.push(move)
        is_white = asked.get("side") != "black"
        said = note = value = ""
        if not end_of(board) and board.turn != is_white:
            with self._lock:
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


def make_app(table: Table, name: str, side: str, hosts: list[str]) -> Any:
    """Create the app: the page at /, and its questions at /play."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    async def page(_: Request) -> Response:
        data = {"chess": {"side": side}}
        text = render(
            "chess.html",
            title=f"whet chess: {name}",
            data=data,
            scripts=("chess.js",),
            styles=("chess.css",),
            connect=True,
        )
        return HTMLResponse(text, headers={"cache-control": "no-store", "x-content-type-options": "nosniff"})

    async def play(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return JSONResponse(
                {"error": "expected JSON"}, status_code=415
            )  # no other site's form sends that
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"error": "the request is too long"}, status_code=413)
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "not JSON"}, status_code=400)
        try:
            found = await run_in_threadpool(table.answer, asked)
        except UserError as error:
            found = {"error": str(error)}
        return JSONResponse(found, status_code=400 if "error" in found else 200)

    return Starlette(
        routes=[Route("/", page), Route("/play", play, methods=["POST"])],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
    )


def serve_page(table: Table, name: str, *, side: str, host: str, port: int) -> None:
    """Serve the page until Ctrl-C.

    Args:
        table: Answers it.
        name: Name of the model.
        side: The user's side.
        host: Address of this machine's own.
        port: Port; 0 picks a free one.

    Raises:
        UserError: If the extra `web` is not installed, or the address is in use.
    """
    try:
        import uvicorn

        app = make_app(table, name, side, ["localhost", "127.0.0.1", host])
    except ImportError as error:
        raise UserError(f"whet chess --page needs {error.name}: {install_command('web')}") from None
    if not is_local(host):
        raise UserError(f"host = {host!r}: the page has no key, so it is for this machine: 127.0.0.1")
    with listen(host, port) as listener:
        host, port = listener.getsockname()[:2]
        print(f"play {name!r} at http://{host}:{port}/; Ctrl-C ends it", flush=True)
        options = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
        try:
            uvicorn.Server(options).run(sockets=[listener])
        except KeyboardInterrupt:
            print("stopped")
