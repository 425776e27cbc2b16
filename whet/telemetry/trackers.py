"""Experiment trackers beside a run's own files: TensorBoard, Weights & Biases, MLflow and trackio.

Each is a small class around a package that is an extra, imported when it is made. Training talks to them through
`whet.telemetry.tracking`, which protects it from them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

from whet.telemetry.display import escape_controls
from whet.types import UserError

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Row = Mapping[str, Any]

FINISH_SECONDS = 30
"""How long W&B may take to begin a run, and then go on uploading before the process ends."""

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
    """Trackers that show a run besides its own files."""

    to: tuple[TrackerName, ...] = ()
    """Trackers that values, config and some completions are sent to; each is an extra: pip install 'whet[wandb]'."""
    project: str = "whet"
    """Project (for mlflow: experiment) that the run belongs to."""
    name: str = ""
    """Name of the run there; empty for the run folder's name."""
    offline: bool = False
    """wandb: only write files below RUN/wandb, which `wandb sync` sends when you like."""
    uri: str = ""
    """mlflow: a server, sqlite:///FILE or a folder; empty for MLFLOW_TRACKING_URI or mlflow's own default."""
    num_samples: int = 4
    """Completions that are sent per step, spread over its problems; 0 for none."""

    def __post_init__(self) -> None:
        if len(set(self.to)) != len(self.to):
            raise ValueError(f"to = {' '.join(self.to)}: expected each tracker once")
        if not 0 <= self.num_samples <= 100:
            raise ValueError(f"num_samples = {self.num_samples}: expected 0 to 100")
        for item in fields(self)[1:]:
            readers = READ_BY[item.name]
            if getattr(self, item.name) != item.default and not set(readers) & set(self.to):
                raise ValueError(f"{item.name} is read with to = {' or '.join(readers)} only; leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Where a tracker keeps a run.

    Attributes:
        id: The tracker's name of the run.
        url: Its page; empty where there is none.
        path: Where it is on this machine, inside the run folder if relative; empty when on a server.
    """

    id: str
    url: str = ""
    path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run when it opens.

    Attributes:
        folder: The run folder.
        config: Content of its config.yaml.
        first_step: Step of the first row that will come.
        known: What the tracker said of this run before, when it is to go on.
    """

    folder: Path
    config: Row
    first_step: int
    known: Link | None


class Tracker(Protocol):
    """A copy of a run somewhere else. All calls of one object come from one thread; any of them may raise."""

    def open(self, run: TrackedRun) -> Link:
        """Begin the run, or go on with it."""
        ...

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take finite values in; steps never fall."""
        ...

    def log_samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Take some completions in: rows of COLUMNS."""
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
        """Begin, or go on behind the last step that counts."""
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
        """Write the completions as text blocks that nothing in them can close."""
        parts = [
            "\n".join(_block(f"{column}: {cell}") for column, cell in zip(COLUMNS, row, strict=True))
            for row in table
        ]
        self._writer.add_text("samples", "\n\n---\n\n".join(parts), step)

    def close(self, *, failed: bool) -> None:
        """Write what waits."""
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
        """Begin, or go on under the same id."""
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
            os.environ.setdefault(
                "MLFLOW_ALLOW_FILE_STORE", "true"
            )  # a folder is an error to mlflow otherwise
        import mlflow
        from mlflow.entities import Metric, Param

        self._config, self._metric, self._param = config, Metric, Param
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=config.uri or None)
        except Exception as error:
            raise UserError(f"track.uri = {config.uri!r}: mlflow cannot use it: {brief(error)}") from None
        self._uri = str(self._client.tracking_uri)

    def open(self, run: TrackedRun) -> Link:
        """Begin, or go on with the same run."""
        if run.known:
            self._id = run.known.id
            self._client.update_run(self._id, status="RUNNING")
            return run.known
        found = self._client.get_experiment_by_name(self._config.project)
        experiment = found.experiment_id if found else self._client.create_experiment(self._config.project)
        name = self._config.name or run.folder.resolve().name
        self._id = self._client.create_run(experiment, run_name=name).info.run_id
        params = [self._param(key, text[:6000]) for key, text in _flat(run.config)]
        for start in range(0, len(params), 100):  # the most that it takes at once
            self._client.log_batch(self._id, params=params[start : start + 100])
        self._client.log_dict(self._id, dict(run.config), "config.yaml")
        if self._uri.startswith(("http://", "https://")):
            page = f"{self._uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._id}"
            return Link(id=self._id, url=page)
        return Link(id=self._id, path=self._uri)

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Send the values; what MLflow forbids in a name (as @) becomes _."""
        now = int(1000 * time_s)
        metrics = [
            self._metric(re.sub(r"[^\w.\- /:]", "_", name), value, now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def log_samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Keep one file per step, in MLflow's form of a table."""
        content = {"columns": COLUMNS, "data": table}
        self._client.log_dict(self._id, content, f"samples/step_{step:08d}.json")

    def close(self, *, failed: bool) -> None:
        """Say how it ended."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Trackio:
    """A run in trackio's local database, or in the Space or server that its environment variables name."""

    def __init__(self, config: TrackConfig) -> None:
        import trackio

        self._trackio: Any = trackio
        self._config = config

    def open(self, run: TrackedRun) -> Link:
        """Begin, or go on with the run of that name."""
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
    """Make a tracker, without beginning a run.

    Raises:
        UserError: If its package is missing or does not work, or the tracker cannot be used like this.
    """
    try:
        return TRACKERS[name](config)
    except ImportError as error:
        raise UserError(
            f"tracker {name} needs a package that does not load ({brief(error)}): pip install 'whet[{name}]', or leave "
            "it out"
        ) from None


def brief(error: BaseException) -> str:
    """Say in one short line what an error is; its text may come from anywhere."""
    text = " ".join(escape_controls(str(error)).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def _block(text: str) -> str:
    """Write text as a block of code in markdown: indented, so that nothing in it can end the block."""
    return "\n".join(f"    {line}" for line in escape_controls(text).splitlines())


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and texts of a config's leaves."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, str(value)
