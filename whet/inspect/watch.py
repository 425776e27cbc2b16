"""`whet watch RUN`: a local web page that follows a run: curves, warnings, and every completion.

The server only reads, only inside the folder that it was given, and answers only who has the token of its address.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from whet.inspect.watch_app import Runs, build_app
from whet.inspect.watch_guard import Guard, is_address
from whet.telemetry.display import escape_controls
from whet.types import UserError

SWITCH_S = 5e-4
"""Longest time that the indexing of samples keeps an answer waiting for its turn; Python's own is ten times that."""

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What to watch, and the address to show it at."""

    run: str = ""
    """A run folder, or a folder with runs below it."""
    host: str = "127.0.0.1"
    """Address to listen at; one that other machines reach needs --expose."""
    port: int = 0
    """Port; 0 takes a free one."""
    expose: bool = False
    """Let other machines in: unencrypted, and whoever has the link reads the run."""
    open: bool = True
    """Open the page in a browser, where there is a screen."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port = {self.port}: expected 0 (takes a free one) to 65535")


def main(config: WatchConfig) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UserError: If there is no run, the address cannot be taken, or the extra 'web' is missing.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(f"{error.name} is missing: pip install 'whet[web]'") from None
    root = _root(config.run)
    is_local = config.host in LOCAL_NAMES or (
        is_address(config.host) and ipaddress.ip_address(config.host).is_loopback
    )
    if not is_local and not config.expose:
        raise UserError(
            f"host = {config.host!r}: other machines could read the run; expected 127.0.0.1 (and `ssh -L` from "
            "elsewhere), or --expose beside it"
        )
    listener = _listen(config.host, config.port)
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    address = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}/?token={token}"
    if not is_local:
        print(
            "warning: other machines can connect, unencrypted; whoever has the link reads the run",
            file=sys.stderr,
        )
    print(f"watching {escape_controls(str(root))}: {address}  (Ctrl-C ends)", flush=True)
    if config.open and _has_screen():
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    sys.setswitchinterval(SWITCH_S)
    runs = Runs(root)
    names = (config.host, *LOCAL_NAMES) if is_local else None
    server = uvicorn.Server(
        uvicorn.Config(
            Guard(build_app(runs), token=token, cookie=f"whet_{port}", hosts=names),
            http="h11",
            ws="none",
            lifespan="off",
            log_level="critical",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
    )
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        print()
    finally:
        runs.close()
        listener.close()


def _root(run: str) -> Path:
    """Return the folder to watch."""
    if not run:
        raise UserError("'whet watch' needs a run folder: whet watch runs/my-run")
    root = Path(run)
    if not root.is_dir():
        what = "this is a file" if root.exists() else "there is no such folder"
        raise UserError(f"{run}: {what}; expected a run folder, or a folder with runs below it")
    try:
        os.listdir(root)
    except OSError as error:
        raise UserError(f"{run}: cannot be read ({error.strerror})") from None
    if not Runs(root).names():
        raise UserError(
            f"{run}: no run in this folder or below it; expected one that `whet` writes or has written"
        )
    return root


def _listen(host: str, port: int) -> socket.socket:
    """Take the address."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"host = {host!r}: not an address of this machine ({error.strerror})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UserError(
            f"{host}:{port} cannot be used ({error.strerror}); expected a free port: leave --port out to get one"
        ) from None
    return listener


def _has_screen() -> bool:
    """Say whether a browser would open in a window here, and not in the terminal or on another machine."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY")
    )
