"""Serves the page of `whet chess RUN --page`."""

from __future__ import annotations

from whet.install import install_command
from whet.serve.chess.table import Table
from whet.serve.serve import GRACE_S, LOCAL, is_local, listen
from whet.types import UserError

MAX_CONNECTIONS = 64


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

        from whet.serve.api import Board, make_board_app
        from whet.serve.headers import server_config
    except ImportError as error:
        raise UserError(f"whet chess --page needs {error.name}: {install_command('web')}") from None
    if not is_local(host):
        raise UserError(f"host = {host!r}: the page has no key, so it is for this machine: 127.0.0.1")
    app = make_board_app(Board(table, title=f"whet chess: {name}", side=side), hosts=LOCAL | {host})
    with listen(host, port) as listener:
        host, port = listener.getsockname()[:2]
        print(f"play {name!r} at http://{host}:{port}/; Ctrl-C ends it", flush=True)
        options = server_config(app, app.refuse, max_connections=MAX_CONNECTIONS, grace_s=GRACE_S)
        try:
            uvicorn.Server(options).run(sockets=[listener])
        except KeyboardInterrupt:
            print("stopped")
