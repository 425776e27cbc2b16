"""`whet watch RUN`: a local web page that follows a run: curves, warnings, and every completion.

The server only reads, only inside the given folder, and only answers requests with the token of its address.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import socket
import sys
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from whet.cli import Program
from whet.install import install_command
from whet.model.text.tokenizer import Tokenizer
from whet.report.follow import RunFollower, glance
from whet.report.index import Query, SampleIndex
from whet.report.page import json_for_script, render
from whet.report.pictures import picture_of
from whet.report.samples import FILES, find_samples, find_tags
from whet.storage.folder import run_of
from whet.telemetry.display import escape_controls
from whet.telemetry.provenance import no_run
from whet.types import UserError

# Access control of `whet watch`: a token, the names of this machine, and the headers of every answer.

Asgi = Callable[[Any, Any, Any], Any]
HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"


class Guard:
    """Middleware that only admits requests with the token, addressed to one of this machine's own names."""

    def __init__(self, app: Asgi, *, token: str, cookie: str, hosts: Sequence[str] | None) -> None:
        """Wrap an application.

        Args:
            app: The ASGI application.
            token: Secret of the address; a page opened with it gets it as a cookie.
            cookie: Name of the cookie.
            hosts: Permitted host names of this machine, against DNS rebinding; None also permits numeric addresses, for
                a server that others may reach.
        """
        self._app = app
        self._token = token
        self._cookie = cookie
        self._hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Admit a request, or refuse it."""
        assert scope["type"] == "http"  # the server is started with HTTP only
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        extra = dict(HEADERS)
        if not self._is_named(headers.get("host", "")):
            await self._refuse(send, 421, "this host name is not served by whet watch")
        elif scope["method"] not in ("GET", "HEAD"):
            await self._refuse(send, 405, "only GET and HEAD are supported")
        elif self._fits(given):
            extra["set-cookie"] = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            await self._app(scope, receive, _adding(send, extra))
        elif self._fits(_cookie(headers.get("cookie", ""), self._cookie)):
            await self._app(scope, receive, _adding(send, extra))
        else:
            await self._refuse(send, 403, "open the address that the terminal printed, with its token")

    def _fits(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())

    def _is_named(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]").lower()
        if self._hosts is not None:
            return name in self._hosts
        return name == "localhost" or is_address(name)

    async def _refuse(self, send: Any, status: int, why: str) -> None:
        headers = {
            **HEADERS,
            "content-type": "text/plain; charset=utf-8",
            "content-security-policy": DATA_POLICY,
        }
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": f"whet watch: {why}\n".encode()})


def is_address(text: str) -> bool:
    """Say whether a text is a numeric IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _cookie(header: str, name: str) -> str:
    """Return the value of a cookie, '' without it; cookies of other programs on this machine may be malformed."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def _adding(send: Any, extra: Mapping[str, str]) -> Any:
    """Return a `send` that adds headers to the response."""

    async def add(message: Any) -> None:
        if message["type"] == "http.response.start":
            pairs = [(name.encode(), value.encode()) for name, value in extra.items()]
            message = {**message, "headers": [*message.get("headers", []), *pairs]}
        await send(message)

    return add


# The web application of `whet watch`: the runs of a folder, and requests about them.

if TYPE_CHECKING:
    from starlette.applications import Starlette

LOGS = ("metrics.jsonl", *FILES)
"""A folder with one of these is a run."""

READ = (*LOGS, "config.yaml", "summary.json", "eval.json", "checkpoints")
MAX_DEPTH, MAX_FOLDERS, MAX_RUNS = 4, 5000, 200
MAX_OPEN = 4
"""Runs whose samples are indexed at a time; the least recently used one is closed."""

MAX_CONFIG_CHARACTERS = 200_000
MAX_CUT = 4
"""Most tokens that one letter may be split into."""

SCRIPTS = ("address.js", "uplot.js", "charts.js", "browser.js", "watch.js")
STYLES = ("uplot.css", "charts.css", "browser.css", "watch.css")
PAGE_POLICY = "frame-ancestors 'none'"
"""The part of the policy that a page cannot contain; the rest, with the hashes of its scripts, is in the page."""


class Runs:
    """The runs of one or several folders; each is opened on first access.

    Attributes:
        roots: Each folder by the name that begins those of its runs; '' where there is one folder.
    """

    def __init__(self, root: Path, *further: Path) -> None:
        """Set the root folders.

        Args:
            root: A run folder, or a folder with runs below it.
            further: More of them, to be shown together.
        """
        self.roots = (
            {_short(place, [root, *further]): place for place in (root, *further)} if further else {"": root}
        )
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Run] = OrderedDict()

    def names(self) -> list[str]:
        """Return the runs as paths below the root, '.' for the root itself, which may be a run that is just
        starting; of several roots behind the root's name."""
        return list(self._folders())

    def folder(self, name: str) -> Path:
        """Return the folder of a run that `names` lists."""
        return self._folders()[name][1]

    def _folders(self) -> dict[str, tuple[Path, Path]]:
        """Return the root and the folder of every run by its name."""
        found: dict[str, tuple[Path, Path]] = {}
        for label, root in self.roots.items():
            below = sorted(_find_runs(root)) or (["."] if (root / "config.yaml").is_file() else [])
            for name in below:
                parts = [part for part in (label, name) if part and not (label and part == ".")]
                found["/".join(parts)] = root, root / name
        return found

    def get(self, name: str) -> Run:
        """Return a run, opened.

        Raises:
            UserError: If there is no such run, or one of its files links outside the folder.
        """
        with self._lock:
            if name not in self._open:
                known = self._folders()
                if name not in known:
                    raise UserError("there is no such run in this folder (any more)")
                root, folder = known[name]
                for path in (
                    *(folder / file for file in READ),
                    *folder.glob("checkpoints/*"),
                    *folder.glob("checkpoints/*/*"),
                ):
                    if not _is_inside(path, root):
                        raise UserError(
                            f"{name}/{path.relative_to(folder)} leads outside of the folder, where nothing is read"
                        )
                self._open[name] = Run(folder, root)
            self._open.move_to_end(name)
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            return self._open[name]

    def close(self) -> None:
        """Close all runs."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()


class Run:
    """One run folder, as the page requests it.

    Attributes:
        follower: Its metrics.
        index: Its samples.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        """Open; samples are read in the background.

        Args:
            folder: The run folder.
            root: Folder outside of which nothing is read.
        """
        self._folder = folder
        self._root = root
        self.follower = RunFollower(folder)
        self.index = SampleIndex(find_samples(folder) or folder / "samples.jsonl")
        self._spell: Callable[[Sequence[int]], list[str]] | None = None
        self._tags: dict[str, str] | None = None

    def close(self) -> None:
        """Stop reading."""
        self.index.close()

    def config(self) -> str:
        """Return config.yaml, '' if there is none yet."""
        try:
            with (self._folder / "config.yaml").open(encoding="utf-8", errors="replace") as file:
                return file.read(MAX_CONFIG_CHARACTERS)
        except OSError:
            return ""

    def info(self) -> dict[str, Any]:
        """Return the initial data of the sample browser."""
        self._tags = self._tags or next(filter(None, map(find_tags, self._families())), None)
        return {**self.index.info(), "tags": self._tags}

    def sample(self, place: int) -> dict[str, Any] | None:
        """Return a sample, with the texts of its tokens if there are log-probabilities and a checkpoint."""
        row = self.index.sample(place)
        if row is None:
            return None
        ids = row["completion_ids"]
        self._spell = self._spell or (_speller(self._families()) if ids else None)
        pieces = self._spell(ids) if ids and self._spell else None
        return {
            **row,
            "images": [picture_of(source, self._folder) for source in row["images"]],
            "pieces": pieces,
        }

    def _families(self) -> list[Path]:
        """Return the run folder and, if it is inside the root, that of the run's starting model."""
        found = re.search(r"^  init: ['\"]?(.+?)['\"]?$", self.config(), re.MULTILINE)
        init = run_of(found[1]).absolute() if found else self._folder
        return [self._folder, init] if _is_inside(init, self._root) else [self._folder]


def build_app(runs: Runs) -> Starlette:
    """Create the application: GET routes only. Wrap it in a `Guard`.

    Args:
        runs: The runs to show.
    """
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    def data(value: Any, status: int = 200) -> Response:
        text = json_for_script(value)
        return Response(text, status, {"content-security-policy": DATA_POLICY}, media_type="application/json")

    def route(path: str, ask: Callable[[Run, dict[str, str]], Any]) -> Route:
        def endpoint(request: Request) -> Response:
            options = {name: value for name, value in request.query_params.items() if name != "token"}
            try:
                value = ask(runs.get(options.pop("run", ".")), options)
                if options:
                    raise UserError(f"unknown option {next(iter(options))!r}")
            except (UserError, ValueError) as error:
                return data({"error": str(error)}, 400)
            return data({"error": "it is not there any more"}, 404) if value is None else data(value)

        return Route(path, endpoint, methods=["GET"])

    def page(request: Request) -> Response:
        names = runs.names()
        # Several runs that were named are shown at once, the others beside the first.
        is_clear = len(names) == 1 or len(runs.roots) > 1
        name = request.query_params.get("run", names[0] if names and is_clear else "")
        try:
            text = _page(runs, names, name)
        except UserError as error:
            return Response(f"whet watch: {error}\n", 404, media_type="text/plain")
        return Response(text, headers={"content-security-policy": PAGE_POLICY}, media_type="text/html")

    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/favicon.ico", lambda request: Response(status_code=204), methods=["GET"]),
            route("/api/state", lambda run, options: run.follower.state(options.pop("cursor", ""))),
            route("/api/info", lambda run, options: run.info()),
            route("/api/samples", _find),
            route("/api/sample", lambda run, options: run.sample(_place(options, "id"))),
            route("/api/group", lambda run, options: run.index.group(_place(options, "id"))),
        ]
    )


def read_query(options: dict[str, str]) -> Query:
    """Read the fields of a query from a request's options; texts are plain, other fields JSON.

    Raises:
        ValueError: With the field, its value and what was expected.
    """
    found: dict[str, Any] = {}
    for field in fields(Query):
        if (text := options.pop(field.name, None)) is None:
            continue
        kind = str(field.type).removesuffix(" | None")
        try:
            value = text if kind == "str" else json.loads(text)
            fits = {"str": str, "int": int, "float": (int, float), "bool": bool}[kind]
            if not isinstance(value, fits) or (kind != "bool" and isinstance(value, bool)):
                raise ValueError
        except (ValueError, RecursionError):
            raise ValueError(f"{field.name} = {text[:40]!r}: expected {kind}") from None
        found[field.name] = value
    return Query(**found)


def _find(run: Run, options: dict[str, str]) -> dict[str, Any]:
    after = _place(options, "after") if "after" in options else None
    return run.index.find(read_query(options), after=after)


def _place(options: dict[str, str], name: str) -> int:
    """Read a sample's id from a request's options."""
    text = options.pop(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UserError(f"{name} = {text[:40]!r}: expected the id of a sample")
    return int(text)


def _page(runs: Runs, names: Sequence[str], name: str) -> str:
    """Render the page of a run, or the list of several."""
    run = runs.get(name) if name else None
    place = runs.folder(name) if name else next(iter(runs.roots.values()))
    is_named = len(runs.roots) > 1
    return render(
        "watch.html",
        title=place.resolve().name,
        data={"watch": {"run": name}},
        scripts=SCRIPTS if run else SCRIPTS[:1],
        styles=STYLES,
        connect=True,
        run=name if run else None,
        root=place.resolve().name,
        runs=[
            {"name": other, "ticked": is_named, "status": {} if run else glance(runs.folder(other))}
            for other in names
        ],
        config=run.config() if run else "",
    )


def _short(place: Path, among: Sequence[Path]) -> str:
    """Return as much of the end of a path as tells it from the others."""
    parts, others = place.resolve().parts, [other.resolve() for other in among if other is not place]
    for count in range(1, len(parts)):
        if all(other.parts[-count:] != parts[-count:] for other in others):
            return "/".join(parts[-count:])
    raise UserError(f"RUN '{place}' is given twice: give different runs")


def _is_inside(path: Path, root: Path) -> bool:
    """Say whether a path, with links resolved, is inside the root; never raises."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _find_runs(root: Path) -> Iterator[str]:
    """Find run folders below a folder; links are not followed, and the search is bounded."""
    num_runs = 0
    for place, folders, files in islice(os.walk(root), MAX_FOLDERS):
        below = Path(place).relative_to(root)
        if any(name in files and os.path.isfile(os.path.join(place, name)) for name in LOGS):
            yield below.as_posix()
            num_runs += 1
        if num_runs == MAX_RUNS:
            return
        too_deep = len(below.parts) >= MAX_DEPTH
        folders[:] = (
            []
            if too_deep
            else sorted(n for n in folders if n[0] != "." and n not in ("checkpoints", "plots"))
        )


def _speller(folders: Sequence[Path]) -> Callable[[Sequence[int]], list[str]] | None:
    """Return a function from token ids to texts, from the newest checkpoint in the folders; None without one."""
    for path in (
        path
        for folder in folders
        for path in sorted(folder.glob("checkpoints/*/tokenizer.json"), reverse=True)
    ):
        try:
            tokenizer = Tokenizer.load(path.parent)
        except (UserError, OSError):
            continue
        return lambda ids: _spell(tokenizer, ids)
    return None


def _spell(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; of a letter split into several tokens the last one gets it."""
    pieces: list[str] = []
    held: list[int] = []
    for index in ids:
        held.append(index)
        text = tokenizer.token_text(index) if len(held) == 1 else tokenizer.decode(held)
        is_cut = text.endswith("\ufffd") and len(held) < MAX_CUT
        pieces.append("" if is_cut else text)
        held = held if is_cut else []
    if held:
        pieces[-1] = tokenizer.decode(held)
    return pieces


SWITCH_S = 5e-4
"""Thread switch interval: limits how long sample indexing delays an answer; Python's default is ten times that."""

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """The run to watch, and the address of the page."""

    run: tuple[str, ...] = ()
    """A run folder, or a folder with runs below it; of several the curves are drawn together."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines can reach needs --expose."""
    port: int = 0
    """Port; 0 picks a free one."""
    expose: bool = False
    """Let other machines connect: unencrypted, and anyone with the link can read the run."""
    open: bool = True
    """Open the page in a browser, if there is a screen."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port = {self.port}: expected 0 (takes a free one) to 65535")


def main(config: WatchConfig) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UserError: If there is no run, the address cannot be used, or the extra 'web' is missing.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError(f"whet watch needs {error.name}: {install_command('web')}") from None
    roots = [_root(run) for run in config.run or ("",)]
    runs = Runs(*roots)
    is_local = config.host in LOCAL_NAMES or (
        is_address(config.host) and ipaddress.ip_address(config.host).is_loopback
    )
    if not is_local and not config.expose:
        raise UserError(
            f"host = {config.host!r}: other machines could read the run; expected 127.0.0.1 (and `ssh -L` from "
            "elsewhere), or --expose in addition"
        )
    listener = _listen(config.host, config.port)
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    address = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}/?token={token}"
    if not is_local:
        print(
            "warning: other machines can connect, unencrypted; anyone with the link can read the run",
            file=sys.stderr,
        )
    print(f"watching {escape_controls(' '.join(map(str, roots)))}: {address}  (Ctrl-C ends)", flush=True)
    if config.open and _has_screen():
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    sys.setswitchinterval(SWITCH_S)
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
        if not root.exists():
            raise no_run(run)
        raise UserError(f"{run}: this is a file; expected a run folder, or a folder with runs below it")
    try:
        os.listdir(root)
    except OSError as error:
        raise UserError(f"{run}: cannot be read ({error.strerror})") from None
    if not Runs(root).names():
        raise UserError(f"{run}: no run in this folder or below it; expected one written by `whet`")
    return root


def _listen(host: str, port: int) -> socket.socket:
    """Bind the address."""
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
            f"{host}:{port} cannot be used ({error.strerror}); expected a free port: omit --port to get one"
        ) from None
    return listener


def _has_screen() -> bool:
    """Say whether a browser would open in a window on this machine, not in the terminal."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY")
    )


PROGRAM = Program(config_class=WatchConfig, main=main, positional="run")
