"""Serves the page of `whet chess RUN --page`."""

from __future__ import annotations

import json
from typing import Any

from whet.install import install_command
from whet.serve.chess.table import Table, board_page
from whet.serve.serve import is_local, listen
from whet.types import UserError

MAX_BODY_BYTES = 64 * 1024


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
        text = board_page(f"whet chess: {name}", side=side, path="/play")
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
