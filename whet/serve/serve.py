"""`whet serve MODEL`: serves a policy through OpenAI's API, for its clients and for evaluation harnesses."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from whet.cli import Program
from whet.config import user_path
from whet.eval.chess.games import Player
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.install import install_command
from whet.model.vision.reading import Urls
from whet.serve.chat import NO_MODEL, require_model
from whet.serve.chess.table import Table
from whet.serve.scheduler import SLOWDOWN, Scheduler
from whet.tasks.chess.board import library
from whet.types import UserError

ORIGIN = re.compile(r"\*|https?://[^/\s]+")
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
GRACE_S = 3
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that both sides do not race to close."""
SPARE_CONNECTIONS = 512
"""Above this uvicorn itself answers 503 in plain text; below it our own error is sent."""
BACKLOG = 128
"""Connections waiting to be accepted. A client that connects and leaves 1,500 times a second keeps the queue full of
connections that are gone; with uvicorn's 2,048 places, everyone else waits a second behind them."""
SWITCH_S = 0.0001
"""Seconds that a thread keeps Python's lock while another waits for it. The thread that draws tokens releases it for
each of PyTorch's longer operations, several times a step, and waits for it as often beside threads that are busy with
requests: 5 ms each time with Python's own setting."""
KEY_VARIABLE = "WHET_API_KEY"
TRIES = 4
"""How often the model is asked for a move of chess where nothing that it wrote is legal."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """A server for OpenAI's chat and completion APIs."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(init=NO_MODEL, max_rows=64))
    """The model; `policy.max_rows` completions are generated together. Several adapters are served beside it, each as a
    model of its own: --policy.adapter math=runs/a,code=runs/b."""
    name: str = ""
    """Model name for clients; empty for the last part of the model's path."""
    host: str = "127.0.0.1"
    """Address to listen on; any except this machine's own needs a key."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    api_key: str = ""
    """Key that clients must send; empty for the environment variable WHET_API_KEY, or none."""
    context: int = 4096
    """Longest prompt and completion together, in tokens, within the model's own context."""
    max_waiting: int = 256
    """Completions that may wait for a row; more are refused with status 503."""
    slowdown: float = SLOWDOWN
    """While somebody reads a stream, only so many other completions run that it takes at most this many times longer
    for a token than alone; more wait. 0 runs as many as there are rows: more tokens per second together on CPUs."""
    split_thinking: bool = True
    """Return a chat's thinking as `reasoning_content`, and only the answer as `content`."""
    board: bool = False
    """Serve a chess board at /chess, to play against a model of chess (as `whet chess MODEL --page`)."""
    weight_updates: bool = False
    """Let clients replace the weights by those of a folder of this machine (POST /update_weights_from_disk, as SGLang
    has it): for `whet rl --sampler.kind openai`, which samples here while it trains elsewhere."""
    image_root: str = ""
    """Folder whose image files clients may name by path; empty for none: they send data URIs."""
    image_urls: Urls = "none"
    """Which URLs of images are fetched for clients: none, those of the public internet, or any, so also those of the
    local network."""
    allow_origins: tuple[str, ...] = ()
    """Web pages whose scripts may use this server (CORS), such as http://localhost:3000; * for any."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters."""

    def __post_init__(self) -> None:
        require_model(self.policy)
        if not 0 <= self.port < 65536:
            raise ValueError(f"port = {self.port}: expected 0 (any free one) to 65535")
        if self.context < 2:
            raise ValueError(f"context = {self.context}: expected 2 or more tokens")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting = {self.max_waiting}: expected 0 or more")
        if self.slowdown and not 2 <= self.slowdown <= 1000:
            raise ValueError(f"slowdown = {self.slowdown}: expected 2 to 1000 times, or 0 for no limit")
        if self.image_root and not Path(self.image_root).is_dir():
            raise ValueError(f"image_root = {self.image_root!r}: no such folder")
        if self.weight_updates and ("," in self.policy.adapter or "=" in self.policy.adapter):
            raise ValueError(
                "weight_updates with several adapters: updates would leave them behind; leave one out"
            )
        if bad := next((origin for origin in self.allow_origins if not ORIGIN.fullmatch(origin)), None):
            raise ValueError(
                f"allow_origins: got {bad!r}, expected http(s)://HOST or http(s)://HOST:PORT without a path, or *"
            )
        if not key_of(self) and not is_local(self.host):
            raise ValueError(
                f"host = {self.host!r} can be reached from other machines: give --api-key KEY, "
                "or listen at 127.0.0.1"
            )


def key_of(config: ServeConfig) -> str:
    """Return the key that clients must send; empty for none."""
    return config.api_key or os.environ.get(KEY_VARIABLE, "")


def is_local(host: str) -> bool:
    """Say whether an address is this machine's own alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket.

    Raises:
        UserError: If the address is not this machine's, or is in use.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # listen before the address is printed: early clients wait in the backlog
    except OSError as error:
        if listener is not None:
            listener.close()
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "try another --port" if is_port else "expected an address of this machine as --host"
        raise UserError(f"cannot listen at {host} port {port}: {error.strerror or error}; {remedy}") from None
    return listener


def make_table(policy: Policy, scheduler: Scheduler) -> Table:
    """Return what plays chess with the model, drawing its lines beside the other completions.

    Args:
        policy: The policy.
        scheduler: What draws its tokens.
    """
    player = Player(policy, tries=TRIES, generate=scheduler.generate)
    return Table(player, library().STARTING_FEN)


def main(config: ServeConfig) -> None:
    """Serve until Ctrl-C.

    Raises:
        UserError: If the model or the address is unavailable, memory is too small, or the extra `web` is not installed.
    """
    try:
        import uvicorn

        from whet.serve.api import CHESS, Api, Board, make_app
        from whet.serve.headers import server_config
    except ImportError as error:
        raise UserError(f"whet serve needs {error.name}: {install_command('web')}") from None
    if config.board:
        library()  # before the model is loaded: python-chess may be missing
    key = key_of(config)
    sys.setswitchinterval(SWITCH_S)
    with listen(config.host, config.port) as listener:
        policy = load_policy(
            config.policy,
            seed=0,
            dtype=getattr(torch, config.precision),
            plain=True,
            several=True,
            steers=True,
        )
        name = config.name or user_path(config.policy.init).resolve().name
        with Scheduler(
            policy, context=config.context, max_waiting=config.max_waiting, slowdown=config.slowdown
        ) as scheduler:
            api = Api(
                policy,
                scheduler,
                name=name,
                split_thinking=config.split_thinking,
                updates=config.weight_updates,
                image_root=config.image_root,
                image_urls=config.image_urls,
            )
            board = None
            if config.board:
                board = Board(make_table(policy, scheduler), title="whet serve: chess", path=CHESS)
            hosts = frozenset() if key else LOCAL | {config.host}
            app = make_app(api, api_key=key, hosts=hosts, board=board, origins=config.allow_origins)
            options = server_config(
                app,
                app.refuse,
                max_connections=scheduler.max_completions + SPARE_CONNECTIONS,
                grace_s=GRACE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=BACKLOG,
            )
            host, port = listener.getsockname()[:2]
            pages = f"a chat page at /{', a chess board at /chess' if config.board else ''}"
            print(
                f"serving {name!r} at http://{f'[{host}]' if ':' in host else host}:{port}/v1 "
                f"({policy.max_rows} rows of {scheduler.context:,} tokens), {pages}; Ctrl-C ends it",
                flush=True,
            )
            if policy.several is not None:
                print(f"adapters, each a model of its own: {', '.join(policy.several.names)}", flush=True)
            if policy.schema.tools:
                print(
                    "note: the server does not call tools; a completion ends where the model calls one",
                    flush=True,
                )
            server = uvicorn.Server(options)
            leave = server.handle_exit

            def handle_exit(sig: int, frame: FrameType | None) -> None:
                ending = threading.Timer(GRACE_S / 2, scheduler.close)  # open streams end with our own error
                ending.daemon = True
                ending.start()
                leave(sig, frame)

            server.handle_exit = handle_exit
            try:
                server.run(sockets=[listener])
            except KeyboardInterrupt:
                print("stopped")


PROGRAM = Program(config_class=ServeConfig, main=main, positional="policy.init")
