"""Experiment trackers beside a run's own files: TensorBoard, Weights & Biases, MLflow and trackio.

Each is a small class around an optional package, imported on construction. Training uses them through `Tracking`, which
isolates it from their failures.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Protocol

from whet.config import read_yaml
from whet.install import install_command
from whet.telemetry.display import escape_controls
from whet.telemetry.log import as_number
from whet.types import UnreadError, UserError

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Row = Mapping[str, Any]

FINISH_SECONDS = 30
"""Seconds for W&B to start a run, and to finish uploading before the process ends."""

DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
"""Of MLflow's, which it reaches through SQLAlchemy."""
COLUMNS = ("uid", "index", "reward", "rewards", "finish_reason", "prompt", "completion")
READ_BY = {
    "project": ("wandb", "mlflow", "trackio"),
    "name": ("wandb", "mlflow", "trackio"),
    "offline": ("wandb",),
    "uri": ("mlflow",),
    "num_samples": ("tensorboard", "wandb", "mlflow", "trackio"),
}


@dataclass(frozen=True, kw_only=True)
class TrackConfig:
    """Experiment trackers, in addition to the run's own files."""

    to: tuple[TrackerName, ...] = ()
    """Trackers that receive values, config and some completions; each needs the extra of its name."""
    project: str = "whet"
    """Project (for mlflow: experiment) of the run."""
    name: str = ""
    """Name of the run there; empty for the run folder's name."""
    offline: bool = False
    """wandb: only write files below RUN/wandb, which `wandb sync` sends later."""
    uri: str = ""
    """mlflow: a server, sqlite:///FILE or a folder; empty for MLFLOW_TRACKING_URI or mlflow's own default."""
    num_samples: int = 4
    """Completions sent per step, spread over its problems; 0 for none."""

    def __post_init__(self) -> None:
        if len(set(self.to)) != len(self.to):
            raise ValueError(f"to = {' '.join(self.to)}: expected each tracker once")
        if not 0 <= self.num_samples <= 100:
            raise ValueError(f"num_samples = {self.num_samples}: expected 0 to 100")
        for item in fields(self)[1:]:
            readers = READ_BY[item.name]
            if getattr(self, item.name) != item.default and not set(readers) & set(self.to):
                told = f"{item.name} is read with to = {' or '.join(readers)} only; leave it out"
                raise UnreadError(told, item.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A run's location in a tracker.

    Attributes:
        id: The tracker's name of the run.
        url: Its page; empty if there is none.
        path: Where it is on this machine, inside the run folder if relative; empty when on a server.
    """

    id: str
    url: str = ""
    path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker gets when it opens a run.

    Attributes:
        folder: The run folder.
        config: Content of its config.yaml.
        first_step: Step of the first row.
        known: The tracker's earlier link of this run, if the run is resumed.
    """

    folder: Path
    config: Row
    first_step: int
    known: Link | None


class Tracker(Protocol):
    """A copy of a run in another system. All calls of one object come from one thread; any of them may raise."""

    def open(self, run: TrackedRun) -> Link:
        """Start the run, or continue it."""
        ...

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Receive finite values; steps never decrease."""
        ...

    def log_samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Receive some completions: rows of COLUMNS."""
        ...

    def close(self, *, failed: bool) -> None:
        """End the run."""
        ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, config: TrackConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make: Callable[..., Any] = SummaryWriter

    def open(self, run: TrackedRun) -> Link:
        """Start, or continue after the last valid step."""
        folder = run.folder / "tensorboard"
        if run.known is None:
            for path in folder.glob("events.out.tfevents.*"):
                path.unlink()
        self._writer = self._make(
            str(folder), purge_step=None if run.known is None else run.first_step, flush_secs=10
        )
        self._writer.add_text("config", _block(json.dumps(run.config, indent=1)), run.first_step)
        return Link(id=run.folder.resolve().name, path="tensorboard")

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Write one scalar per value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time_s)

    def log_samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Write the completions as text blocks that their content cannot close."""
        parts = [
            "\n".join(_block(f"{column}: {cell}") for column, cell in zip(COLUMNS, row, strict=True))
            for row in table
        ]
        self._writer.add_text("samples", "\n\n---\n\n".join(parts), step)

    def close(self, *, failed: bool) -> None:
        """Flush."""
        self._writer.close()


class WandB:
    """A run at Weights & Biases, or its files below RUN/wandb."""

    def __init__(self, config: TrackConfig) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        self._config = config
        mode = "offline" if config.offline else os.environ.get("WANDB_MODE", "online")
        self._online = mode == "online"
        if self._online and not wandb.login(prompt=False, verify=False):
            raise UserError(
                "track.to = wandb: no API key on this machine; run `wandb login`, set WANDB_API_KEY, or use "
                "--track.offline"
            )

    def open(self, run: TrackedRun) -> Link:
        """Start, or continue under the same id."""
        settings = self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            finish_timeout=FINISH_SECONDS,
            init_timeout=FINISH_SECONDS,
        )
        self._run = self._wandb.init(
            project=self._config.project,
            name=self._config.name or run.folder.resolve().name,
            dir=str(run.folder),
            config=dict(run.config),
            mode="offline" if self._config.offline else None,
            id=run.known.id if run.known else None,
            resume="allow" if run.known and self._online else None,
            reinit="create_new",
            settings=settings,
        )
        url = self._run.url if self._online else None
        path = "" if url else os.path.relpath(self._run.settings.sync_dir, run.folder)
        return Link(id=self._run.id, url=url or "", path=path)

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Hand the values to W&B's own process."""
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Send a table."""
        data = [[str(cell) for cell in row] for row in table]
        self._run.log({"samples": self._wandb.Table(columns=list(COLUMNS), data=data)}, step=step)

    def close(self, *, failed: bool) -> None:
        """Wait for the upload."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run in an MLflow server, database or folder."""

    def __init__(self, config: TrackConfig) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if config.uri and "://" not in config.uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise mlflow rejects a folder
        import mlflow
        from mlflow.entities import Metric, Param

        kind = config.uri.partition("://")[0].partition("+")[0]
        if kind in DATABASES and importlib.util.find_spec("sqlalchemy") is None:
            raise UserError(
                f"track.uri = {config.uri!r}: databases need the whole mlflow, not mlflow-skinny alone: "
                f"{install_command('mlflow')}, or give a folder or a server"
            )

        self._config, self._metric, self._param = config, Metric, Param
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=config.uri or None)
        except Exception as error:
            raise UserError(f"track.uri = {config.uri!r}: mlflow cannot use it: {brief(error)}") from None
        self._uri = str(self._client.tracking_uri)

    def open(self, run: TrackedRun) -> Link:
        """Start, or continue the same run."""
        if run.known:
            self._id = run.known.id
            self._client.update_run(self._id, status="RUNNING")
            return run.known
        found = self._client.get_experiment_by_name(self._config.project)
        experiment = found.experiment_id if found else self._client.create_experiment(self._config.project)
        name = self._config.name or run.folder.resolve().name
        self._id = self._client.create_run(experiment, run_name=name).info.run_id
        params = [self._param(key, text[:6000]) for key, text in _flat(run.config)]
        for start in range(0, len(params), 100):  # its limit per call
            self._client.log_batch(self._id, params=params[start : start + 100])
        self._client.log_dict(self._id, dict(run.config), "config.yaml")
        if self._uri.startswith(("http://", "https://")):
            page = f"{self._uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._id}"
            return Link(id=self._id, url=page)
        return Link(id=self._id, path=self._uri)

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Send the values; characters that MLflow forbids in names (such as @) become _."""
        now = int(1000 * time_s)
        metrics = [
            self._metric(re.sub(r"[^\w.\- /:]", "_", name), value, now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def log_samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Store one file per step, in MLflow's table format."""
        content = {"columns": COLUMNS, "data": table}
        self._client.log_dict(self._id, content, f"samples/step_{step:08d}.json")

    def close(self, *, failed: bool) -> None:
        """Set the run's final status."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Trackio:
    """A run in trackio's local database, or in the Space or server that its environment variables name."""

    def __init__(self, config: TrackConfig) -> None:
        import trackio

        self._trackio: Any = trackio
        self._config = config

    def open(self, run: TrackedRun) -> Link:
        """Start, or continue the run of that name."""
        self._run = self._trackio.init(
            self._config.project,
            name=self._config.name or run.folder.resolve().name,
            config=dict(run.config),
            resume="allow" if run.known else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        url = self._run.url or ""
        return Link(id=self._run.id, url=url, path="" if url else str(self._trackio.utils.TRACKIO_DIR))

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Send a table."""
        data = [list(row) for row in table]
        self._run.log({"samples": self._trackio.Table(columns=list(COLUMNS), data=data)}, step=step)

    def close(self, *, failed: bool) -> None:
        """Wait until it is stored."""
        self._run.finish()


TRACKERS: dict[str, Callable[[TrackConfig], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def load_tracker(name: str, config: TrackConfig) -> Tracker:
    """Create a tracker, without starting a run.

    Raises:
        UserError: If its package is missing or does not work, or the tracker cannot be used like this.
    """
    try:
        return TRACKERS[name](config)
    except ImportError as error:
        raise UserError(
            f"tracker {name} needs a package that does not load ({brief(error)}): {install_command(name)}, or leave it "
            "out"
        ) from None


def brief(error: BaseException) -> str:
    """Describe an error in one short line; its text is untrusted."""
    text = " ".join(escape_controls(str(error)).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def _block(text: str) -> str:
    """Write text as a markdown code block: indented, so that its content cannot end the block."""
    return "\n".join(f"    {line}" for line in escape_controls(text).splitlines())


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and texts of a config's leaves."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, str(value)


# Sends a run to its trackers without ever blocking on them.
# The JSON lines of the run folder are authoritative, a tracker is a copy. Each tracker has its own thread behind a
# bounded queue: one that fails, hangs or is slow loses rows at the tracker, never delays a training step, and `whet
# track RUN --to NAME` sends all of them afterwards.

LINKS = "trackers.json"
MAX_WAITING = 1000
"""Rows queued for a tracker; more are dropped."""

CLOSE_SECONDS = 5.0
"""Seconds that the end of a run waits for all its trackers together."""

MAX_TEXT = 2000


class Tracking:
    """The trackers of one run, as a context manager around it; no method raises because of a tracker.

    A tracker is opened at the first row, so a run that ends before leaves no trace in it. RUN/trackers.json records the
    state of each.

    Attributes:
        began: Time of `time.monotonic()` at which it was made: the beginning of this start of the run.
    """

    def __init__(self, config: TrackConfig, folder: Path, *, enabled: bool = True) -> None:
        """Load the trackers.

        Args:
            config: Which trackers, and how.
            folder: The run folder; it may not exist yet. A tracker recorded there continues the same run.
            enabled: False on all ranks but one: load and send nothing.

        Raises:
            UserError: If one is not installed or cannot be used like this.
        """
        self.began = time.monotonic()
        self._config, self._folder = config, folder
        loaded = [(name, load_tracker(name, config)) for name in config.to] if enabled else []
        self._workers = [_Worker(name, tracker, folder, self._save) for name, tracker in loaded]
        self._lock = threading.Lock()

    def put(self, file: str, rows: Sequence[Row]) -> None:
        """Queue rows that were written to the run's log.

        Args:
            file: metrics.jsonl or samples.jsonl.
            rows: Rows of one step.
        """
        if self._workers and (item := as_item(file, rows, self._config.num_samples)) is not None:
            for worker in self._workers:
                worker.put(item)

    def close(self, *, failed: bool = False) -> None:
        """Wait at most CLOSE_SECONDS for pending rows, then abandon them and report how many are missing."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in self._workers:
            worker.end(failed)
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())
        self._workers = []

    def _save(self, entry: dict[str, Any]) -> None:
        """Put a tracker's entry into trackers.json."""
        with self._lock:
            save_entry(self._folder, entry)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


@dataclass(frozen=True, slots=True)
class Item:
    """Queued rows for a tracker.

    Attributes:
        step: Optimizer steps done.
        time_s: When the values were measured, in seconds since 1970.
        values: Values of a row by name.
        table: Completions, as rows of COLUMNS.
    """

    step: int
    time_s: float
    values: Mapping[str, float]
    table: list[list[Any]]

    def send(self, tracker: Tracker) -> None:
        """Send it to a tracker."""
        if self.values:
            tracker.log(self.step, self.time_s, self.values)
        if self.table:
            tracker.log_samples(self.step, self.table)


def as_item(file: str, rows: Sequence[Row], num_samples: int) -> Item | None:
    """Convert rows of one step for a tracker.

    Args:
        file: metrics.jsonl (then one row) or samples.jsonl.
        rows: The rows.
        num_samples: Completions to keep, evenly over the rows.

    Returns:
        None if there is nothing to send, or the (untrusted) rows have no step.
    """
    step = as_number(rows[0].get("step", 0)) if rows else None
    if step is None or abs(step) >= 2**53:
        return None
    if file == "metrics.jsonl":
        (row,) = rows
        values = {name: value for name, value in row.items() if "/" in name and as_number(value) is not None}
        return Item(int(step), as_number(row.get("time_s")) or 0.0, values, []) if values else None
    if not num_samples:
        return None
    chosen = rows[:: math.ceil(len(rows) / num_samples)]
    return Item(int(step), 0.0, {}, [[_cell(row.get(name)) for name in COLUMNS] for row in chosen])


def open_run(tracker: Tracker, folder: Path, first_step: int, known: Link | None) -> Link:
    """Open a run at a tracker, with the config from its folder."""
    config = dict(read_yaml(folder / "config.yaml"))
    return tracker.open(TrackedRun(folder=folder, config=config, first_step=first_step, known=known))


def read_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a run's trackers.json by name; none if it is missing or damaged."""
    try:
        rows = json.loads((folder / LINKS).read_text(encoding="utf-8"))
        return {str(row["name"]): dict(row) for row in rows}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def save_entry(folder: Path, entry: dict[str, Any]) -> None:
    """Put an entry into trackers.json; a disk error is only reported."""
    entries = read_entries(folder) | {entry["name"]: entry}
    temporary = folder / f".{LINKS}.partial"
    try:
        temporary.write_text(json.dumps(list(entries.values()), indent=1) + "\n", encoding="ascii")
        temporary.replace(folder / LINKS)
    except OSError as error:
        _say(f"{folder / LINKS} could not be written ({error.strerror})")


def entry_of(name: str, link: Link, sent: int, unsent: int, error: str) -> dict[str, Any]:
    """Make an entry of trackers.json."""
    return {"name": name, **asdict(link), "rows_sent": sent, "rows_not_sent": unsent, "error": error}


class _Worker:
    """One tracker, its queue and its thread. Both sides count rows, so that no loss goes unnoticed."""

    def __init__(
        self, name: str, tracker: Tracker, folder: Path, save: Callable[[dict[str, Any]], None]
    ) -> None:
        self._name, self._tracker, self._folder, self._save = name, tracker, folder, save
        self._items: SimpleQueue[Item | bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._link = Link(id="")
        self._offered = self._sent = 0
        self._sent_before = self._unsent_before = 0
        self._error = ""

    def put(self, item: Item) -> None:
        self._offered += 1
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, args=(item.step,), name=f"tracker {self._name}", daemon=True
            )
            self._thread.start()
        if self._thread.is_alive() and self._items.qsize() < MAX_WAITING:
            self._items.put(item)
        elif not self._error:
            self._fail(f"too slow: {MAX_WAITING} rows wait for it" if self._thread.is_alive() else "it ended")

    def end(self, failed: bool) -> None:
        self._items.put(failed)

    def wait(self, seconds: float) -> None:
        if self._thread is None:
            return
        self._thread.join(max(0.0, seconds))
        unsent = self._offered - self._sent
        if self._thread.is_alive() and not self._error:
            self._error = f"not done within {CLOSE_SECONDS:g} s of the end"
        if unsent or self._thread.is_alive():
            _say(
                f"tracker {self._name}: {unsent} of {self._offered} rows were not sent ({self._error}); "
                f"`whet track {self._folder} --to {self._name}` sends them all"
            )
        self._store()

    def _work(self, first_step: int) -> None:
        """Send until the end; any exception of a tracker, even SystemExit, is caught here."""
        try:
            entry = read_entries(self._folder).get(self._name)
            known = None
            if entry is not None and entry["id"]:
                known = Link(id=entry["id"], url=entry["url"], path=entry["path"])
                self._sent_before, self._unsent_before = entry["rows_sent"], entry["rows_not_sent"]
            self._link = open_run(self._tracker, self._folder, first_step, known)
            self._store()
            while not isinstance(item := self._items.get(), bool):
                try:
                    item.send(self._tracker)
                    self._sent += 1
                except Exception as error:
                    self._fail(brief(error))
            self._tracker.close(failed=item)
        except BaseException as error:
            self._fail(brief(error))
        self._store()

    def _fail(self, reason: str) -> None:
        """Report the first failure."""
        if not self._error:
            self._error = reason
            _say(f"tracker {self._name}: {reason}; the run continues, and its own files have everything")

    def _store(self) -> None:
        sent, unsent = self._sent_before + self._sent, self._unsent_before + self._offered - self._sent
        self._save(entry_of(self._name, self._link, sent, unsent, self._error))


def _say(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _cell(value: Any) -> Any:
    """Convert a field of samples.jsonl to a number or a text of bounded length."""
    if isinstance(value, dict):
        value = json.dumps(value)
    return value[:MAX_TEXT] if isinstance(value, str) else value
