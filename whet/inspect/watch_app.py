"""The web application of `whet watch`: the runs of a folder, and what is asked about them."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.inspect.watch_guard import DATA_POLICY
from whet.model.tokenizer import Tokenizer
from whet.pages.columns import Query
from whet.pages.follow import RunFollower, glance
from whet.pages.index import SampleIndex
from whet.pages.page import json_for_script, render
from whet.pages.samples import FILES, find_samples, find_tags
from whet.types import UserError

if TYPE_CHECKING:
    from starlette.applications import Starlette

LOGS = ("metrics.jsonl", *FILES)
"""A folder that holds one of these is a run."""

READ = (*LOGS, "config.yaml", "summary.json", "eval.json", "checkpoints")
MAX_DEPTH, MAX_FOLDERS, MAX_RUNS = 4, 5000, 200
MAX_OPEN = 4
"""Runs whose samples are indexed at a time; the one that nobody looked at for longest is closed."""

MAX_CONFIG_CHARACTERS = 200_000
MAX_CUT = 4
"""Tokens that one letter may be cut into."""

SCRIPTS = ("address.js", "uplot.js", "charts.js", "browser.js", "watch.js")
STYLES = ("uplot.css", "charts.css", "browser.css", "watch.css")
PAGE_POLICY = "frame-ancestors 'none'"
"""What a page cannot say in itself; the rest of its policy, with the hashes of its scripts, stands in the page."""


class Runs:
    """The runs of a folder; each is opened when somebody looks at it."""

    def __init__(self, root: Path) -> None:
        """Begin.

        Args:
            root: A run folder, or a folder with runs below it.
        """
        self.root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Run] = OrderedDict()

    def names(self) -> list[str]:
        """Return the runs as paths below the root, '.' for the root itself, which may be a run that only begins."""
        return sorted(_find_runs(self.root)) or (["."] if (self.root / "config.yaml").is_file() else [])

    def get(self, name: str) -> Run:
        """Return a run, opened.

        Raises:
            UserError: If there is no such run, or one of its files leads outside of the folder.
        """
        with self._lock:
            if name not in self._open:
                if name not in self.names():
                    raise UserError("there is no such run in this folder (any more)")
                folder = self.root / name
                for path in (
                    *(folder / file for file in READ),
                    *folder.glob("checkpoints/*"),
                    *folder.glob("checkpoints/*/*"),
                ):
                    if not _is_inside(path, self.root):
                        raise UserError(
                            f"{name}/{path.relative_to(folder)} leads outside of the folder, where nothing is read"
                        )
                self._open[name] = Run(self.root / name, self.root)
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
    """One run folder, as the page asks for it.

    Attributes:
        follower: Its metrics.
        index: Its samples.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        """Open; samples are read in the background.

        Args:
            folder: The run folder.
            root: Folder that nothing outside of is read.
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
        """Return config.yaml, '' where there is none yet."""
        try:
            with (self._folder / "config.yaml").open(encoding="utf-8", errors="replace") as file:
                return file.read(MAX_CONFIG_CHARACTERS)
        except OSError:
            return ""

    def info(self) -> dict[str, Any]:
        """Return what the sample browser begins with."""
        self._tags = self._tags or next(filter(None, map(find_tags, self._families())), None)
        return {**self.index.info(), "tags": self._tags}

    def sample(self, place: int) -> dict[str, Any] | None:
        """Return a sample, with the texts of its tokens where log-probabilities and a checkpoint are there."""
        row = self.index.sample(place)
        if row is None:
            return None
        ids = row["completion_ids"]
        self._spell = self._spell or (_speller(self._families()) if ids else None)
        return {**row, "pieces": self._spell(ids) if ids and self._spell else None}

    def _families(self) -> list[Path]:
        """Return the run folder and, where it lies in the root, too, the one of the model that the run began with."""
        found = re.search(r"^  init: ['\"]?(.+?)['\"]?$", self.config(), re.MULTILINE)
        init = Path(found[1]).absolute() if found else self._folder
        init = init.parent.parent if init.parent.name == "checkpoints" else init
        return [self._folder, init] if _is_inside(init, self._root) else [self._folder]


def build_app(runs: Runs) -> Starlette:
    """Make the application: GET routes alone. It goes behind a `Guard`.

    Args:
        runs: What it shows.
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
        name = request.query_params.get("run", names[0] if len(names) == 1 else "")
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
    """Take the fields of a query out of a request's options, each in JSON or, for texts, as it is.

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
    """Take a sample's id out of a request's options."""
    text = options.pop(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UserError(f"{name} = {text[:40]!r}: expected the id of a sample")
    return int(text)


def _page(runs: Runs, names: Sequence[str], name: str) -> str:
    """Render the page of a run, or of the choice among several."""
    run = runs.get(name) if name else None
    title = (runs.root / name).resolve().name
    return render(
        "watch.html",
        title=title,
        data={"watch": {"run": name}},
        scripts=SCRIPTS if run else SCRIPTS[:1],
        styles=STYLES,
        connect=True,
        run=name if run else None,
        root=runs.root.resolve().name,
        runs=[{"name": other, "status": {} if run else glance(runs.root / other)} for other in names],
        config=run.config() if run else "",
    )


def _is_inside(path: Path, root: Path) -> bool:
    """Say whether a path, its links followed, lies in the root; never an error, whatever the path."""
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
    """Return a function from token ids to their texts, of the newest checkpoint in the folders; None without one."""
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
    """Return the text of each token; of a letter cut into several tokens the last one has it."""
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
