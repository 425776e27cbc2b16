"""Trackers: real packages get the run, and broken ones cost it nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet import cli
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.report import track
from whet.report.track import TrackRunConfig
from whet.telemetry import trackers as tracking
from whet.telemetry.log import RunLog, read_metrics
from whet.telemetry.metrics import FAMILIES, METRICS
from whet.telemetry.trackers import (
    FINISH_SECONDS,
    TRACKERS,
    Link,
    MLflow,
    TrackConfig,
    TrackedRun,
    Tracking,
    WandB,
    read_entries,
)
from whet.train import rl
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.types import Group, Problem, Sample, UserError

HOSTILE = "<script>alert(1)</script>|```\n# x\x1b[31m"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tracker may look for a network, or write outside the test's folder."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CONFIG_DIR": str(tmp_path / "home"),
        "WANDB_CACHE_DIR": str(tmp_path / "home"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(tmp_path / "home"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }.items():
        monkeypatch.setenv(name, value)


class Recorder:
    """A tracker that writes down what it is told; variants below break it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def open(self, run: TrackedRun) -> Link:
        self.calls.append(("open", run.first_step, run.known.id if run.known else None, dict(run.config)))
        return Link(id="r1", url="http://x/r1")

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(values)))

    def log_samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        self.calls.append(("samples", step, [list(row) for row in table]))

    def close(self, *, failed: bool) -> None:
        self.calls.append(("close", failed))


def boom(*arguments: Any, **options: Any) -> Any:
    raise ConnectionError("no \x1b[31m route\nto host")


def hang(*arguments: Any, **options: Any) -> Any:
    threading.Event().wait()


def leave(*arguments: Any, **options: Any) -> Any:
    sys.exit("ends its thread")


def slow(*arguments: Any, **options: Any) -> None:
    time.sleep(0.2)


def broken(method: str, how: Callable[..., Any]) -> Recorder:
    recorder = Recorder()
    setattr(recorder, method, how)
    return recorder


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Recorder], TrackConfig]:
    def install(recorder: Recorder) -> TrackConfig:
        monkeypatch.setitem(TRACKERS, "tensorboard", lambda config: recorder)
        return TrackConfig(to=("tensorboard",))

    return install


def make_group(step: int, index: int) -> Group:
    sample = Sample(
        uid=f"u{index}",
        index=0,
        prompt_ids=(1,),
        completion_ids=(7, 2),
        sampler_logprobs=(-0.123456, 0.0),
        text=HOSTILE + "x" * 5000,
        finish_reason="stop",
        rewards={"correct": 1.0},
        reward=1.0,
        advantage=0.5,
    )
    return Group(problem=Problem(uid=f"u{index}", task="t", prompt=f"{step}?", answer="7"), samples=(sample,))


def write_run(folder: Path, steps: Sequence[int], track: TrackConfig, *, fail: bool = False) -> None:
    """What a training program does with its log and its trackers."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("lr: 0.1\nalgo: {kl: none}\n")
    with (
        Tracking(track, folder) as sent,
        RunLog(folder, resume_step=min(steps) - 1, listener=sent.put) as log,
    ):
        for step in steps:
            log.write_metrics(
                "rl", step, {"rl/loss": step / 10, "rl/kl": float("nan"), "eval/pass@1": 0.5, "rl/turns": 2}
            )
            log.write_samples(step, [make_group(step, index) for index in range(9)])
        if fail:
            raise KeyboardInterrupt


# -- what a tracker is told ------------------------------------------------------------------------------------------


def test_a_tracker_is_told_everything_in_order(use: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    write_run(tmp_path / "run", [1, 2], replace(use(recorder), num_samples=3))
    names = [call[0] for call in recorder.calls]
    assert names == ["open", "log", "samples", "log", "samples", "close"]
    assert recorder.calls[0] == ("open", 1, None, {"lr": 0.1, "algo": {"kl": "none"}})
    assert recorder.calls[1] == ("log", 1, {"rl/loss": 0.1, "eval/pass@1": 0.5, "rl/turns": 2})
    table = recorder.calls[2][2]
    assert [row[0] for row in table] == ["u0", "u3", "u6"]
    assert all(len(str(cell)) <= 2000 for row in table for cell in row)
    assert recorder.calls[-1] == ("close", False)
    (entry,) = json.loads((tmp_path / "run" / "trackers.json").read_text())
    assert entry == {
        "name": "tensorboard", "id": "r1", "url": "http://x/r1", "path": "",
        "rows_sent": 4, "rows_not_sent": 0, "error": "",
    }  # fmt: skip


def test_an_interrupted_run_is_closed_as_failed_and_goes_on_under_its_id(use: Any, tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    with pytest.raises(KeyboardInterrupt):
        write_run(tmp_path / "run", [1, 2, 3], use(first), fail=True)
    assert first.calls[-1] == ("close", True)
    write_run(tmp_path / "run", [3, 4], use(second))
    assert second.calls[0][:3] == ("open", 3, "r1")
    assert read_entries(tmp_path / "run")["tensorboard"]["rows_sent"] == 10


def test_no_row_no_trace(use: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    with Tracking(use(recorder), tmp_path):
        pass
    assert recorder.calls == []
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_load_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "tensorboard", boom)
    with Tracking(TrackConfig(to=("tensorboard",)), tmp_path, enabled=False) as sent:
        sent.put("metrics.jsonl", [{"step": 1, "rl/loss": 0.0}])


# -- broken trackers -------------------------------------------------------------------------------------------------

CASES = {
    "open raises": ("open", boom, "ConnectionError: no"),
    "log raises": ("log", boom, "ConnectionError: no"),
    "samples raise": ("log_samples", boom, "ConnectionError: no"),
    "close raises": ("close", boom, "ConnectionError: no"),
    "open hangs": ("open", hang, "not done within"),
    "log hangs": ("log", hang, "not done within"),
    "close hangs": ("close", hang, "not done within"),
    "log is slow": ("log", slow, "not done within"),
    "log kills its thread": ("log", leave, "SystemExit"),
    "open kills its thread": ("open", leave, "SystemExit"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_tracker_costs_rows_there_and_nothing_here(
    case: str, use: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.3)
    method, how, reason = CASES[case]
    write_run(tmp_path / "plain", range(1, 21), TrackConfig())
    began = time.monotonic()
    write_run(tmp_path / "run", range(1, 21), use(broken(method, how)))
    assert time.monotonic() - began < 5  # 20 rows of 0.2 s would take 4 s more
    for name in ("metrics.jsonl", "samples.jsonl"):
        rows = [(tmp_path / folder / name).read_text().splitlines() for folder in ("plain", "run")]
        without_time = [[{**json.loads(line), "time_s": 0} for line in lines] for lines in rows]
        assert without_time[0] == without_time[1]
    entry = read_entries(tmp_path / "run")["tensorboard"]
    assert entry["error"].startswith(reason)
    assert entry["rows_sent"] + entry["rows_not_sent"] == 40
    assert (entry["rows_not_sent"] > 0) == (method != "close")
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 2  # the failure aloud once, and what was not sent
    assert "whet track" in lines[-1] or method == "close"
    assert "\x1b" not in "".join(lines)


def test_one_failure_loses_one_row(use: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    take = recorder.log
    recorder.log = lambda step, time_s, values: boom() if step == 2 else take(step, time_s, values)
    write_run(tmp_path / "run", [1, 2, 3], replace(use(recorder), num_samples=0))
    assert [call[1] for call in recorder.calls if call[0] == "log"] == [1, 3]
    assert recorder.calls[-1] == ("close", False)
    entry = read_entries(tmp_path / "run")["tensorboard"]
    assert (entry["rows_sent"], entry["rows_not_sent"]) == (2, 1)


def test_a_full_queue_drops_counts_and_says_so_once(
    use: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "MAX_WAITING", 5)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 5.0)
    release = threading.Event()
    recorder = broken("open", lambda run: (release.wait(), Link(id="late"))[1])
    config = use(recorder)
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with Tracking(config, tmp_path) as sent:
        for step in range(30):
            sent.put("metrics.jsonl", [{"step": step, "rl/loss": 0.5}])
        release.set()
    assert [call[1] for call in recorder.calls if call[0] == "log"] == [0, 1, 2, 3, 4]
    entry = read_entries(tmp_path)["tensorboard"]
    assert (entry["id"], entry["rows_sent"], entry["rows_not_sent"]) == ("late", 5, 25)
    err = capsys.readouterr().err.splitlines()
    assert ["too slow" in line for line in err] == [True, True]
    assert "25 of 30 rows were not sent" in err[1]


TIMES = ("_seconds", "_per_second", "time_s", "_gib", "hardware/utilisation/cpu", "hardware/memory_gib/cpu")


def tiny_rl(tiny_policy: PolicyConfig, folder: Path, track: TrackConfig) -> RLConfig:
    return RLConfig(
        out=str(folder),
        policy=tiny_policy,
        sampling=SamplingParams(max_new_tokens=8),
        optim=OptimConfig(lr=1e-3, token_budget=200),
        num_steps=3,
        num_prompts=2,
        group_size=3,
        save_every=3,
        show_samples_every=2,
        preflight="warn",
        max_dead_steps=9,
        track=track,
    )


@pytest.mark.usefixtures("few_problems")
def test_training_with_and_without_a_tracker_is_the_same_to_the_byte(
    use: Any, tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {}
    recorder = Recorder()
    for name, config in {"plain": TrackConfig(), "told": use(recorder)}.items():
        began = time.perf_counter()
        rl.train(tiny_rl(tiny_policy, tmp_path / name, config))
        seconds[name] = time.perf_counter() - began
    printed = capsys.readouterr().out
    assert printed.count("sample, reward") == 2  # step 2 of each run
    folders = [tmp_path / name for name in ("plain", "told")]
    for file in ("model.safetensors", "training/optimizer.safetensors"):
        a, b = ((folder / "checkpoints" / "step_00000003" / file).read_bytes() for folder in folders)
        assert a == b, file
    assert len({(folder / "samples.jsonl").read_bytes() for folder in folders}) == 1
    rows = [
        [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in read_metrics(folder)]
        for folder in folders
    ]
    assert rows[0] == rows[1]
    assert [call[1] for call in recorder.calls if call[0] == "log"] == [1, 2, 3]
    assert seconds["told"] < 5 * seconds["plain"] + 2  # generous: machines are shared


# -- the real packages -----------------------------------------------------------------------------------------------


def read_tensorboard(folder: Path) -> tuple[dict[int, float], list[str]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/text_summary")]
    return {event.step: event.value for event in events.Scalars("rl/loss")}, texts


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run"
    config = TrackConfig(to=("tensorboard",))
    write_run(folder, [1, 2, 3, 4], config)
    write_run(folder, [3], config)  # resumed behind step 2: what was written of 3 and 4 counts no more
    values, texts = read_tensorboard(folder)
    assert values == {step: pytest.approx(step / 10) for step in range(1, 4)}
    assert all(line.startswith("    ") for line in texts[0].splitlines() if line and line != "---")
    assert "\x1b" not in "".join(texts)
    assert read_entries(folder)["tensorboard"]["path"] == "tensorboard"
    assert len(list((folder / "tensorboard").iterdir())) == 2
    track.main(TrackRunConfig(run=str(folder), to=("tensorboard",)))
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert read_tensorboard(folder)[0] == values


def read_wandb(folder: Path) -> list[dict[str, Any]]:
    """History rows of an offline run: LevelDB's log format, protobuf records in blocks of 32 KiB."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("*.wandb")
    data, at, part, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = records.Record.FromString(part)
            part = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


@pytest.mark.ci
def test_wandb_offline_in_a_process_of_its_own(tmp_path: Path) -> None:
    """A process, as wandb leaves a service and hooks behind."""
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    write_run(folder, [1, 2], TrackConfig())
    code = (
        "from whet.report.track import TrackRunConfig, main\n"
        f"main(TrackRunConfig(run={str(folder)!r}, to=('wandb',), offline=True, project='p', name='n'))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    entry = read_entries(folder)["wandb"]
    assert done.stdout == f"wandb: 4 rows, {folder / entry['path']}\n"
    assert entry["path"].startswith("wandb/offline-run")
    rows = read_wandb(folder / entry["path"])
    assert [(row["_step"], row["rl/loss"], row["eval/pass@1"]) for row in rows] == [
        (1, 0.1, 0.5),
        (2, 0.2, 0.5),
    ]
    assert rows[0]["samples/nrows"] == 3
    assert "network" not in done.stderr.lower()


def test_wandb_gives_up_a_silent_server_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own default is 90 seconds, in which the process would not end."""
    wandb = pytest.importorskip("wandb")
    given: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or pytest.fail("stop"))
    with pytest.raises(pytest.fail.Exception):
        WandB(TrackConfig(to=("wandb",), offline=True)).open(
            TrackedRun(folder=tmp_path, config={}, first_step=1, known=None)
        )
    assert given["settings"].init_timeout == given["settings"].finish_timeout == FINISH_SECONDS


def test_mlflow_in_a_folder(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    folder, store = tmp_path / "run", tmp_path / "store"
    config = TrackConfig(to=("mlflow",), uri=str(store), project="p", num_samples=2)
    write_run(folder, [1, 2, 3], config)
    write_run(folder, [3, 4], config)
    entry = read_entries(folder)["mlflow"]
    client = mlflow.MlflowClient(tracking_uri=str(store))
    run = client.get_run(entry["id"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params == {"lr": "0.1", "algo.kl": "none"}
    assert {m.step for m in client.get_metric_history(entry["id"], "rl/loss")} == {1, 2, 3, 4}
    assert client.get_metric_history(entry["id"], "eval/pass_1")[0].value == 0.5
    names = [file.path for file in client.list_artifacts(entry["id"], "samples")]
    assert names == [f"samples/step_{step:08d}.json" for step in range(1, 5)]


def test_a_folder_of_mlflow_takes_every_name(tmp_path: Path) -> None:
    """It keeps a file for each: no name may be the folder of another, also in files of earlier versions."""
    names = [*METRICS, *(f"{family}x" for family in FAMILIES)]
    assert not [(a, b) for a in names for b in names if b.startswith(f"{a}/")]
    mlflow = pytest.importorskip("mlflow")
    folder, store = tmp_path / "run", tmp_path / "store"
    write_run(folder, [1], TrackConfig())
    row = {
        "stage": "rl",
        "step": 2,
        "time_s": 1.0,
        **dict.fromkeys(names, 0.5),
        "rl/prompts_dropped/unscored": 3.0,
    }
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    track.main(TrackRunConfig(run=str(folder), to=("mlflow",), uri=str(store)))
    entry = read_entries(folder)["mlflow"]
    assert (entry["rows_not_sent"], entry["error"]) == (0, "")
    data = mlflow.MlflowClient(tracking_uri=str(store)).get_run(entry["id"]).data.metrics
    assert data["rl/dropped/unscored"] == 3.0
    assert {re.sub(r"[^\w.\- /:]", "_", name) for name in names} <= data.keys()


def test_mlflow_without_databases_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for uri in ("sqlite:///x.db", "postgresql+psycopg2://host/x"):
        with pytest.raises(UserError, match="databases need the whole mlflow, not mlflow-skinny alone: "):
            MLflow(TrackConfig(to=("mlflow",), uri=uri))


@pytest.mark.ci
def test_trackio(tmp_path: Path) -> None:
    """A process, as trackio fixes its folder when it is imported."""
    pytest.importorskip("trackio")
    folder = tmp_path / "run"
    write_run(folder, [1, 2], TrackConfig())
    code = (
        "from whet.report.track import TrackRunConfig, main\n"
        f"main(TrackRunConfig(run={str(folder)!r}, to=('trackio',), project='p'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    entry = read_entries(folder)["trackio"]
    assert (entry["rows_sent"], entry["path"]) == (4, str(tmp_path / "trackio"))
    with closing(sqlite3.connect(tmp_path / "trackio" / "p.db")) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        (config,) = database.execute("select config from configs").fetchone()
    assert {(name, step) for name, step, _ in rows} == {("run", 1), ("run", 2)}
    merged = [json.loads(metrics) for _, step, metrics in rows if step == 1]
    assert {"rl/loss": 0.1, "eval/pass@1": 0.5}.items() <= {
        k: v for row in merged for k, v in row.items() if k != "samples"
    }.items()
    assert any("samples" in row for row in merged)
    assert json.loads(config)["lr"] == 0.1


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"to": ("wandb", "wandb")}, "expected each tracker once"),
        ({"project": "p"}, "project is read with to = wandb or mlflow or trackio only"),
        ({"to": ("tensorboard",), "name": "n"}, "name is read with"),
        ({"to": ("mlflow",), "offline": True}, "offline is read with to = wandb only"),
        ({"to": ("wandb",), "uri": "http://x"}, "uri is read with to = mlflow only"),
        ({"to": ("wandb",), "num_samples": 101}, "expected 0 to 100"),
    ],
)
def test_an_option_that_nobody_reads_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrackConfig(**fields)


def test_an_unknown_tracker_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"got 'wandbb', expected a list of one of 'tensorboard', 'wandb'"):
        cli.parse("whet track", TrackRunConfig, {}, ["--run", "x", "--to", "wandbb"])


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_one_line_that_names_the_extra_before_anything_is_made(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_policy: PolicyConfig
) -> None:
    modules = {"tensorboard": "torch.utils.tensorboard"}
    monkeypatch.setitem(sys.modules, modules.get(name, name), None)  # what a failed import leaves
    config = tiny_rl(tiny_policy, tmp_path / "run", TrackConfig(to=(name,)))
    with pytest.raises(UserError, match=rf"tracker {name} needs .* pip install .*\[{name}\]'") as caught:
        rl.train(config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_wandb_without_a_key_is_found_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "login", lambda **options: False)
    with pytest.raises(UserError, match="no API key on this machine; run `wandb login`"):
        Tracking(TrackConfig(to=("wandb",)), tmp_path)


def bad_run(folder: Path, case: str) -> TrackRunConfig:
    """Make a run folder with something wrong and return the command's config."""
    write_run(folder, [1], TrackConfig())
    if case == "no config":
        (folder / "config.yaml").unlink()
    if case == "config is no config":
        (folder / "config.yaml").write_text("]\x00")
    if case == "config of another version":
        (folder / "config.yaml").write_text("track: {to: [visdom]}\n")
    if case == "no rows":
        (folder / "metrics.jsonl").write_text("")
        (folder / "samples.jsonl").write_text("")
    run = {"no run": "", "missing": str(folder / "none")}.get(case, str(folder))
    to = () if case in ("no tracker", "config of another version") else ("tensorboard",)
    return TrackRunConfig(run=run, to=to, offline=case == "unread")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no run", "which run"),
        ("missing", "no such run or folder"),
        ("no config", "no readable config.yaml"),
        ("config is no config", "no readable config.yaml"),
        ("config of another version", "got 'visdom', expected one of"),
        ("no tracker", "was started without a tracker"),
        ("no rows", "nothing to send"),
        ("unread", "offline is read with"),
        ("tracker fails", "tracker tensorboard: ConnectionError: no .* route to host; 1 rows were sent"),
    ],
)
def test_what_cannot_be_sent_is_one_line(
    case: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = broken("log_samples", boom) if case == "tracker fails" else Recorder()
    monkeypatch.setitem(TRACKERS, "tensorboard", lambda config: tracker)
    with pytest.raises(UserError, match=message) as caught:
        track.main(bad_run(tmp_path / "run", case))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "trackers.json").exists()


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', '[{"id": "x"}]', "\x00"])
def test_a_damaged_links_file_is_written_anew(content: str, use: Any, tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text(content)
    recorder = Recorder()
    write_run(tmp_path, [1], use(recorder))
    assert recorder.calls[0][2] is None
    assert read_entries(tmp_path)["tensorboard"]["id"] == "r1"


def test_a_killed_run_is_sent_as_failed_with_every_row(use: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", [1, 2, 3], TrackConfig())
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "st')
    recorder = Recorder()
    use(recorder)
    with pytest.warns(UserWarning, match="skipped 1 unreadable"):
        track.main(TrackRunConfig(run=str(tmp_path / "run"), to=("tensorboard",)))
    assert [call[:2] for call in recorder.calls[1:-1]] == [
        (kind, step) for step in (1, 2, 3) for kind in ("log", "samples")
    ]
    assert recorder.calls[-1] == ("close", True)
