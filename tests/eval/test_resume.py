"""An evaluation that was killed goes on: nothing is drawn twice, and the numbers are those of a whole run."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.config import dump_yaml
from whet.eval import measure
from whet.eval.evaluate import EvalConfig, main
from whet.eval.record import PROGRESS, SAMPLES, SUMMARY, differences, read_eval, write_summary
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.types import UserError

ROOT = Path(__file__).resolve().parents[2]
TIMES = ("seconds", "generation_seconds", "hardware")
PROGRAM = """
import sys, torch
from pathlib import Path
from whet.config import load_yaml
from whet.eval import measure
from whet.eval.evaluate import EvalConfig, main
from whet.tasks.made import arithmetic
from whet.tasks.made.arithmetic import Arithmetic
torch.set_num_threads(1)
measure.CHUNK_ROUNDS = 1
arithmetic.NUM_PROBLEMS = 6000
original = Arithmetic.problems
Arithmetic.problems = lambda self, split: original(self, split)[:200]
main(load_yaml(Path(sys.argv[1]), EvalConfig), resume="--resume" in sys.argv)
"""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, few_problems: None) -> None:
    monkeypatch.setattr(measure, "CHUNK_ROUNDS", 1)
    monkeypatch.setattr("whet.eval.evaluate.write_report", lambda folder: (folder / "report.md").touch())
    monkeypatch.setattr("whet.eval.evaluate.draw_evaluation", lambda *arguments: [])

    def keep_notes(folder: Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        shutil.copy(folder / PROGRESS, folder.parent / f"{folder.name}.notes")
        return write_summary(folder, *arguments, **options)

    monkeypatch.setattr("whet.eval.evaluate.write_summary", keep_notes)


def make_config(tiny_policy: PolicyConfig, folder: Path, **changes: Any) -> EvalConfig:
    config = EvalConfig(
        out=str(folder),
        policy=replace(tiny_policy, max_rows=8),  # chunks of 4 problems at most
        num_problems=9,
        num_samples=2,
        rewards={"format": 1.0},
        sampling=SamplingParams(max_new_tokens=6),
        hardware=False,
    )
    return replace(config, **changes)


def numbers(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / SUMMARY).read_text())
    return {name: value for name, value in content.items() if name not in TIMES}


def interrupt(whole: Path, folder: Path, size: int, num_chunks: int, torn: bytes = b"") -> None:
    """Make a folder as a killed evaluation leaves it: `size` bytes of its completions, and the notes of some chunks."""
    shutil.copytree(whole, folder)
    for name in (SUMMARY, "report.md", "metrics.jsonl"):
        (folder / name).unlink()
    rows = (folder / SAMPLES).read_bytes()
    notes = (whole.parent / f"{whole.name}.notes").read_bytes().splitlines(keepends=True)
    (folder / PROGRESS).write_bytes(b"".join(notes[: 1 + num_chunks]) + torn)
    (folder / SAMPLES).write_bytes(rows[:size])
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace(str(whole), str(folder)))
    (
        folder / "provenance.json"
    ).unlink()  # it holds the hash of the config, in which the name of the folder stands


@pytest.mark.ci
def test_every_kind_of_cut_is_mended(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = tmp_path / "whole"
    main(make_config(tiny_policy, whole))
    rows = (whole / SAMPLES).read_bytes()
    ends = [place + 1 for place, byte in enumerate(rows) if byte == 10]
    assert len(ends) == 27
    cuts = [  # bytes left, notes of chunks of three problems, half a note, problems that are whole
        (0, 0, b"", 0),
        (5, 0, b"", 0),
        (ends[0], 0, b"", 0),
        (ends[8] - 1, 0, b"", 0),
        (ends[8], 0, b"", 0),  # killed between a chunk and its note
        (ends[8], 0, b'{"work": {"prompt_to', 0),
        (ends[8], 1, b"", 3),
        (ends[8] + 7, 1, b"", 3),
        (ends[17], 1, b"{", 3),
        (ends[17], 2, b"", 6),
        (ends[25] + 9, 2, b"", 6),
        (ends[26], 3, b"", 9),
    ]
    chunks: list[int] = []
    folder = whole
    original = measure.play
    monkeypatch.setattr(measure, "play", lambda *a, **k: (chunks.append(len(a[2])), original(*a, **k))[1])
    for number, (size, num_chunks, torn, num_whole) in enumerate(cuts):
        folder = tmp_path / str(number)
        interrupt(whole, folder, size, num_chunks, torn)
        chunks.clear()
        main(make_config(tiny_policy, folder), resume=True)
        assert sum(chunks) == 2 * (9 - num_whole), size  # sampled and greedy; only what was missing
        assert (folder / SAMPLES).read_bytes() == rows, size
        assert numbers(folder) == numbers(whole), size
        assert not (folder / PROGRESS).exists()
    assert "damaged" not in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    main(make_config(tiny_policy, folder), resume=True)
    assert "this evaluation is finished; nothing was changed" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_its_seconds_are_those_of_all_starts(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "broken"
    main(make_config(tiny_policy, whole))
    rows = (whole / SAMPLES).read_bytes()
    interrupt(whole, folder, len(rows), 3)
    main(make_config(tiny_policy, folder), resume=True)  # only the result was missing
    found = json.loads((folder / "eval.json").read_text())
    assert found["seconds"] >= round(found["generation_seconds"], 2) > 0  # it is written with two digits


def test_a_damaged_chunk_is_found_and_sampled_again(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    main(make_config(tiny_policy, whole))
    rows = (whole / SAMPLES).read_bytes()
    for name, file, old, new in (
        ("row", SAMPLES, b'"thinking_tokens": ', b'"thinking_tokens": 1'),
        ("answer", SAMPLES, b'"correct": false', b'"correct": true'),
        ("tokens", PROGRESS, b'"prompt_tokens": ', b'"prompt_tokens": 9'),
        ("size", PROGRESS, b'"size": ', b'"size": 9'),
        ("cut", SAMPLES, rows[-300:], b""),
    ):
        folder = tmp_path / name
        interrupt(whole, folder, len(rows), 3)
        data = (folder / file).read_bytes()
        place = data.rindex(old)
        changed = data[:place] + new + data[place + len(old) :]
        (folder / file).write_bytes(changed)
        main(make_config(tiny_policy, folder), resume=True)
        said = capsys.readouterr().out
        assert "chunk 3 of 3 is damaged; as found: .corrupt-eval_samples.jsonl" in said, name
        assert (folder / f".corrupt-{file}").read_bytes() == changed, name
        assert (folder / SAMPLES).read_bytes() == rows, name
        assert numbers(folder) == numbers(whole), name
    interrupt(whole, tmp_path / "old", len(rows), 0)  # notes of an earlier version had no hash
    with (tmp_path / "old" / PROGRESS).open("a") as file:
        file.write('{"prompt_tokens": 1, "completion_tokens": 2, "requests": 3, "seconds": 4.0}\n')
    main(make_config(tiny_policy, tmp_path / "old"), resume=True)
    assert "chunk 1 of 1 is damaged" in capsys.readouterr().out
    assert numbers(tmp_path / "old") == numbers(whole)


@pytest.mark.ci
def test_killed_by_the_system(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    big = {"num_problems": 60}
    main(make_config(tiny_policy, whole, **big))
    config = make_config(tiny_policy, killed, **big)
    (tmp_path / "given.yaml").write_text(dump_yaml(config))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "given.yaml")]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (killed / PROGRESS).exists() and (killed / PROGRESS).read_bytes().count(b"\n") > 3:
            process.kill()
        time.sleep(0.005)
    assert process.wait() == -9
    assert not (killed / SUMMARY).exists()
    done = (killed / SAMPLES).read_bytes().count(b"\n")
    assert 0 < done < 180
    with pytest.raises(UserError, match="is not finished; continue with --resume"):
        read_eval(killed)
    with pytest.raises(UserError, match="already exists .* or --resume"):
        main(config)
    main(config, resume=True)
    rows = [json.loads(line) for line in (killed / SAMPLES).read_text().splitlines()]
    assert set(Counter((row["uid"], row["sample"]) for row in rows).values()) == {1}
    assert (killed / SAMPLES).read_bytes() == (whole / SAMPLES).read_bytes()
    assert numbers(killed) == numbers(whole)


def test_results_do_not_depend_on_the_chunks(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    texts = []
    for max_rows in (1, 3, 64):
        folder = tmp_path / str(max_rows)
        main(make_config(tiny_policy, folder, policy=replace(tiny_policy, max_rows=max_rows)))
        texts.append((folder / SAMPLES).read_text())
    assert texts[0] == texts[1] == texts[2]


def write_chunk(folder: Path, lines: Sequence[bytes]) -> None:
    """Write a chunk of other rows as whet would have, had it sampled them."""
    (folder / SAMPLES).write_bytes(b"".join(lines))
    work = {"prompt_tokens": 1, "completion_tokens": 2, "requests": 3, "seconds": 4.0, "hardware": None}
    size, hashed = sum(map(len, lines)), hashlib.sha256(b"".join(lines)).hexdigest()
    sealed = hashlib.sha256(json.dumps([work, size, hashed]).encode()).hexdigest()
    with (folder / PROGRESS).open("a") as file:
        file.write(json.dumps({"work": work, "size": size, "sha256": sealed}) + "\n")


def test_what_cannot_go_on_is_refused(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    config = make_config(tiny_policy, whole)
    main(config)
    lines = (whole / SAMPLES).read_bytes().splitlines(keepends=True)

    def attempt(name: str, message: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=message):
            main(replace(config, out=str(tmp_path / name), **changes), resume=True)

    attempt("none", "nothing to resume")
    interrupt(whole, tmp_path / "other", len(lines[0]), 0)
    attempt("other", "--resume needs the configuration that the run was started with", seed=1)
    for name, change in (("model", '"sha256": "'), ("data", '"problems_sha256": "')):
        interrupt(whole, tmp_path / name, sum(map(len, lines[:9])), 1)
        notes = (tmp_path / name / PROGRESS).read_text()
        (tmp_path / name / PROGRESS).write_text(notes.replace(change, change + "f"))
        attempt(name, rf"cannot resume: since its first start these have changed: .*{change[1:-4]}")
    interrupt(whole, tmp_path / "order", 0, 0)
    write_chunk(tmp_path / "order", lines[3:12])
    attempt("order", "completion 1 does not belong to the task's current problem")
    interrupt(whole, tmp_path / "lost", len(lines[0]), 0)
    (tmp_path / "lost" / PROGRESS).unlink()
    attempt("lost", "has completions, but eval_progress.jsonl is lost")
    interrupt(whole, tmp_path / "row", 0, 0)
    row = json.loads(lines[0])
    del row["hedges"]
    write_chunk(tmp_path / "row", [json.dumps(row).encode() + b"\n", *lines[1:9]])
    attempt("row", "a completion has no 'hedges'")


def test_reading_back_and_what_differs(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    main(make_config(tiny_policy, tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    a = read_eval(tmp_path / "a")
    assert (a.label, len(a.samples), len(a.greedy)) == ("random weights", 9, 9)
    assert all([row["sample"] for row in rows] == [0, 1] for rows in a.samples.values())
    assert differences(a, a) == []
    summary = json.loads((tmp_path / "a" / SUMMARY).read_text())
    assert (
        summary.pop("samples_sha256") == hashlib.sha256((tmp_path / "a" / SAMPLES).read_bytes()).hexdigest()
    )

    def changed(**identity: Any) -> list[str]:
        content = summary | {"identity": summary["identity"] | identity}
        (tmp_path / "b" / SUMMARY).write_text(json.dumps(content))
        return differences(a, read_eval(tmp_path / "b"))

    assert changed(seed=5, num_samples=99, left_out=3) == []  # the same question, asked more often
    assert changed(task=summary["identity"]["task"] | {"path": "/elsewhere"}) == []
    assert changed(split="dev", precision="bfloat16") == [
        'split ("test", "dev")',
        'precision ("float32", "bfloat16")',
    ]
    sampling = summary["identity"]["sampling"] | {"temperature": 0.7}
    assert changed(sampling=sampling) == ["sampling.temperature (1.0, 0.7)"]
    protocol = summary["identity"]["protocol"] | {"template": "x" * 100, "system_prompt": True}
    assert changed(protocol=protocol) == ["protocol.system_prompt (false, true)", "protocol.template"]
    assert changed(answer_from="anywhere") == ['answer_from ("schema", "anywhere")']
    lines = (tmp_path / "b" / SAMPLES).read_text()
    (tmp_path / "b" / SAMPLES).write_text(lines.replace('"gold": "', '"gold": "1'))
    assert changed() == ["gold answers of the same problems"]
    (tmp_path / "b" / SAMPLES).write_text(lines.replace('"uid": "', '"uid": "f'))
    assert changed() == ["problems (none in common)"]


def test_what_cannot_be_read_back(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    main(make_config(tiny_policy, folder))
    rows, summary = (folder / SAMPLES).read_text(), (folder / SUMMARY).read_text()
    for text, message in (
        (rows[:-20], "line 27 is damaged"),
        (rows + '{"uid": 1}\n', "line 28 is damaged"),
        (rows[: rows.rindex("\n", 0, -1) + 1], "completions are missing"),
        (rows.replace('"sample": 1', '"sample": 0', 1), "completions are missing"),
    ):
        (folder / SAMPLES).write_text(text)
        with pytest.raises(UserError, match=message):
            read_eval(folder)
    for name, value in (("answer", 5), ("hedges", "x"), ("correct", None), ("answer_logprob", math.inf)):
        row = json.loads(rows.partition("\n")[0]) | {name: value}
        (folder / SAMPLES).write_text(json.dumps(row) + "\n" + rows.partition("\n")[2])
        with pytest.raises(UserError, match="line 1 is damaged"):
            read_eval(folder)
    for old, new in (('"gold": "', '"gold": "1'), ('"correct": false', '"correct": true')):
        assert old in rows
        (folder / SAMPLES).write_text(rows.replace(old, new, 1))
        with pytest.raises(UserError, match="changed since the evaluation wrote it"):
            read_eval(folder)
    (folder / SAMPLES).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        read_eval(folder)
    (folder / SAMPLES).write_text(rows)
    for most in (2**62, -1, 0, 3):  # not so many numbers are made
        (folder / SUMMARY).write_text(json.dumps(json.loads(summary) | {"num_samples": most}))
        with pytest.raises(UserError, match="completions are missing"):
            read_eval(folder)
    broken = json.dumps(json.loads(summary) | {"num_samples": "2"})
    for text, message in ((text, "damaged") for text in ("{", "{}", summary[:50], broken)):
        (folder / SUMMARY).write_text(text)
        with pytest.raises(UserError, match=message):
            read_eval(folder)
    with pytest.raises(UserError, match=r"no eval\.json in it"):
        read_eval(tmp_path / "nowhere")
