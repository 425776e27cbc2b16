"""`whet eval` as a program: several tasks, bad inputs, what its folder holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.eval.evaluate import ONE_FILE, EvalConfig, chosen_split, main, plan, task_configs
from whet.eval.measure import Work, join_windows, show_work, total_work
from whet.eval.record import describe_weights, read_eval, unlike
from whet.generate.engine import Completion
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.tasks.base import TaskConfig, load_task, told_of
from whet.tasks.made.arithmetic import Arithmetic
from whet.types import Problem, UserError

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 99)]


@pytest.fixture(autouse=True)
def fewer(few_problems: None) -> None:
    """Cut the arithmetic splits short."""


def make_config(tiny_policy: PolicyConfig, folder: Path, **changes: Any) -> EvalConfig:
    config = EvalConfig(
        out=str(folder),
        policy=tiny_policy,
        num_problems=3,
        num_samples=2,
        sampling=SamplingParams(max_new_tokens=6),
    )
    return replace(config, **changes)


def write_rows(path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def test_several_tasks_in_one_command(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("whet.eval.evaluate.write_report", lambda folder: (folder / "report.md").touch())
    monkeypatch.setattr("whet.eval.evaluate.draw_evaluation", lambda *arguments: [])
    first, second = (write_rows(tmp_path / f"{name}.jsonl") for name in ("first", "second"))
    tasks = ("arithmetic", f"jsonl={first}", f"jsonl={second}")
    config = make_config(tiny_policy, tmp_path / "out", tasks=tasks, split="test", num_problems=2)
    config = replace(config, task=TaskConfig(name="jsonl", path=first, answer="answer"))
    assert "2 of arithmetic/test, jsonl/test, jsonl/test" in plan(config)
    main(config)
    out = tmp_path / "out"
    names = ["arithmetic", "jsonl", "jsonl-second"]
    content = json.loads((out / "eval.json").read_text())
    assert list(content["tasks"]) == names
    shown = capsys.readouterr().out
    for name in names:
        stored = read_eval(out / name)
        assert stored.summary["metrics"]["pass@1"] == content["tasks"][name]["pass@1"]
        assert (out / name / "config.yaml").is_file()
        assert f"{name}:" in shown
    with pytest.raises(
        UserError, match="contains several tasks; give the folder of one of them: .*jsonl-second"
    ):
        read_eval(out)
    # Killed in the third task: the first two are read, not evaluated again.
    (out / "eval.json").unlink()
    shutil.rmtree(out / "jsonl-second")
    before = (out / "jsonl" / "eval.json").stat().st_mtime_ns
    main(config, resume=True)
    assert (out / "jsonl" / "eval.json").stat().st_mtime_ns == before
    again = json.loads((out / "eval.json").read_text())
    assert again == content


@pytest.mark.parametrize("answer_from", ["schema", "anywhere", "fallback"])
def test_a_strict_number_stands_beside_what_is_right_read_anywhere(
    answer_from: Any,
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedily right without tags, one of two samples wrong: strictly 0, read anywhere 100 and 50 %."""
    monkeypatch.setattr("whet.eval.evaluate.write_report", lambda folder: (folder / "report.md").touch())
    monkeypatch.setattr("whet.eval.evaluate.draw_evaluation", lambda *arguments: [])

    def play(policy: Any, engine: Any, problems: list[Problem], seeds: Any, *_: Any, **__: Any) -> Any:
        def done(problem: Problem, index: int) -> Completion:
            ids = (*policy.tokenizer.encode(f"={int(problem.answer) + index}"), policy.tokenizer.eos_id)
            return Completion(ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop")

        return [[done(p, index) for index in range(len(row))] for p, row in zip(problems, seeds, strict=True)]

    monkeypatch.setattr("whet.eval.measure.play", play)
    policy = tiny_policy
    if answer_from == "fallback":
        (tmp_path / "own.yaml").write_text(
            "preset: think_answer\nfallback: anywhere\nopening_in_prompt: false\n"
        )
        policy, answer_from = replace(tiny_policy, schema=str(tmp_path / "own.yaml")), "schema"
    main(make_config(policy, tmp_path / "out", answer_from=answer_from))
    summary, shown = json.loads((tmp_path / "out" / "eval.json").read_text()), capsys.readouterr().out
    means = {name: summary["metrics"][name]["mean"] for name in ("pass@1", "greedy")}
    assert "prompts: the bare question, schema " in shown
    assert "; answers are read between <answer>" in shown
    if answer_from == "anywhere" or policy is not tiny_policy:
        assert means == {"pass@1": 0.5, "greedy": 1.0}
        assert "read_anywhere" not in summary
        assert {name: row["mean"] for name, row in summary["read_strictly"].items()} == {
            "pass@1": 0.0,
            "greedy": 0.0,
        }
        assert "strictly, of answers in the schema's place alone: pass@1 0.0 %" in shown
        return
    assert means == {"pass@1": 0.0, "greedy": 0.0}
    assert {name: row["mean"] for name, row in summary["read_anywhere"].items()} == {
        "pass@1": 0.5,
        "greedy": 1.0,
    }
    line = next(line for line in shown.splitlines() if line.startswith("read anywhere in the completions:"))
    assert "pass@1 50.0 %" in line
    assert "greedy 100.0 %" in line


def test_task_fields_go_to_those_that_read_them(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    shared = TaskConfig(name="countdown", level=2, seed=7, num_problems=40)
    config = make_config(tiny_policy, tmp_path, task=shared, tasks=("countdown", "arithmetic", "letters"))
    found = task_configs(config)
    assert {name: (task.level, task.seed) for name, task in found.items()} == {
        "countdown": (2, 7),
        "arithmetic": (0, 0),
        "letters": (2, 7),
    }
    assert task_configs(replace(config, tasks=())) == {"": shared}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": (3,)}, r"k = 3: pass@3 needs 1 <= k <= num_samples = 2; draw more samples"),
        ({"k": (0,)}, r"k = 0: pass@0 needs"),
        ({"rewards": {"judge": 1.0}}, r"rewards\.judge: evaluations do not use a judge"),
        ({"tasks": ("nonsense",)}, r"tasks: 'nonsense': task\.name = 'nonsense': expected one of"),
        ({"tasks": ("",)}, r"tasks: '': task\.name = ''"),
        ({"tasks": ("choice",)}, r"tasks: 'choice': task choice needs data: .* NAME=FOLDER_OR_FILE"),
        ({"tasks": ("arithmetic", "arithmetic")}, r"tasks: 'arithmetic' is given twice"),
        ({"tasks": ("arithmetic=x",)}, r"task\.path is not read by task arithmetic"),
        (
            {"tasks": ("arithmetic",), "task": TaskConfig(name="letters", level=2)},
            r"task\.level is read by none of tasks = arithmetic",
        ),
    ],
)
def test_bad_configs(
    tiny_policy: PolicyConfig, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_config(tiny_policy, tmp_path, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": {"nonsense": 1.0}}, r"rewards\.nonsense: no such reward"),
        (
            {"rewards": {"format": float("inf")}},
            r"rewards\.format = inf: expected a weight from -1e.09 to 1e.09",
        ),
        ({"rewards": {"episode": 1.0}}, r"rewards\.episode: task arithmetic has no environment that pays"),
        ({"reward": ("mine.py",)}, r"expected path\.py:function"),
        ({"reward": ("nowhere.py:f",)}, r"no file 'nowhere\.py'"),
        ({"split": "nonsense"}, r"split 'nonsense': expected"),
        ({"tasks": ("arithmetic", "jsonl=/nowhere")}, r"/nowhere"),
        ({"out": "/proc/nowhere/x"}, r"cannot be written"),
    ],
)
def test_bad_inputs_leave_no_folder(
    tiny_policy: PolicyConfig, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = make_config(tiny_policy, tmp_path / "out", **changes)
    with pytest.raises(UserError, match=message) as caught:
        main(config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_two_problems_of_one_uid_are_refused(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = [Problem(uid="a", task="arithmetic", prompt=text, answer="2") for text in ("1+1=", "0+2=")]
    monkeypatch.setattr(Arithmetic, "problems", lambda self, split: twice)
    with pytest.raises(UserError, match="two problems have the uid 'a'"):
        main(make_config(tiny_policy, tmp_path / "out"))


def test_what_the_folder_holds(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    main(make_config(tiny_policy, folder, rewards={"format": 1.0, "length_band": 0.5}))
    content = json.loads((folder / "eval.json").read_text())
    rows = [json.loads(line) for line in (folder / "eval_samples.jsonl").read_text().splitlines()]
    assert not (folder / "eval_progress.jsonl").exists()
    for row in rows:
        assert row["reward"] == pytest.approx(row["rewards"]["format"] + 0.5 * row["rewards"]["length_band"])
        assert len(row["completion_ids"]) == len(row["logprobs"]) == row["completion_tokens"]
        assert all(value <= 0 for value in row["logprobs"])
        assert row["mean_logprob"] == pytest.approx(sum(row["logprobs"]) / len(row["logprobs"]), abs=1e-4)
    assert content["tokens"]["completion"] == sum(row["completion_tokens"] for row in rows)
    assert content["requests"] == len(rows) == 9
    hardware = content["hardware"]
    assert hardware["seconds"] == pytest.approx(content["generation_seconds"], abs=1e-3)
    rate = content["tokens"]["completion"] / hardware["seconds"]
    assert hardware["tokens_per_second"] == pytest.approx(rate)
    assert json.loads((folder / "provenance.json").read_text())["num_problems"] == 3
    assert (content["anecdote"], content["minimum_detectable_effect"] > 0) == (False, True)
    report = (folder / "report.md").read_text()
    for name in ("eval_pass_at_k", "eval_lengths"):
        assert f"(plots/{name}.png)" in report
        assert (folder / "plots" / f"{name}.png").stat().st_size > 5000


def test_which_weights(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    policy, other = (load_policy(tiny_policy, seed=seed) for seed in (0, 1))
    random, same, unlike = (describe_weights(tiny_policy, p) for p in (policy, policy, other))
    assert random == same
    assert random["sha256"] != unlike["sha256"]
    assert (random["init"], random["folder"], random["adapter"]) == ("", None, None)
    policy.save(tmp_path / "model")
    stored = PolicyConfig(init=str(tmp_path / "model"))
    first = describe_weights(stored, load_policy(stored, seed=0))
    assert (first["init"], first["folder"]) == (stored.init, str(tmp_path / "model"))
    other.save(tmp_path / "model")
    assert describe_weights(stored, load_policy(stored, seed=0))["sha256"] != first["sha256"]


def window(seconds: float, power: float | None, joules: float | None, name: str = "gpu0") -> dict[str, Any]:
    reading = None if power is None else {"mean": power, "max": power + 1}
    device: dict[str, Any] = {
        "id": name,
        "name": name,
        "kind": "gpu",
        "energy_j": joules,
        "energy_from": "counter",
    }
    device |= dict.fromkeys(("utilisation", "memory_activity", "temperature_c", "memory_gib"))
    return {
        "seconds": seconds,
        "num_samples": 2,
        "devices": [device | {"power_w": reading, "num_samples": 2}],
        "absent": {},
    }


def test_windows_are_joined() -> None:
    whole = join_windows([window(1.0, 100.0, 100.0), window(3.0, 200.0, 600.0)])
    (device,) = whole["devices"]
    assert (whole["seconds"], whole["num_samples"], device["energy_j"]) == (4.0, 4, 700.0)
    assert device["power_w"] == {"mean": 175.0, "max": 201.0}  # (1 x 100 + 3 x 200) / 4
    for gap in (window(3.0, None, None), window(3.0, 1.0, 1.0, "gpu1")):
        (device, *_) = join_windows([window(1.0, 100.0, 100.0), gap])["devices"]
        assert (device["energy_j"], device["power_w"]) == (None, None)


def test_joules_are_those_of_the_whole_work() -> None:
    parts = [
        Work(10, 100, 5, 1.0, window(1.0, 100.0, 100.0)),
        Work(10, 250, 5, 3.0, window(3.0, 200.0, 600.0)),
    ]
    shown = show_work(total_work(parts))
    assert (shown["tokens"], shown["requests"]) == ({"prompt": 20, "completion": 350}, 10)
    assert shown["generation_seconds"] == 4.0
    assert (shown["hardware"]["joules_per_token"], shown["hardware"]["joules_per_request"]) == (2.0, 70.0)
    assert total_work([*parts, Work(1, 1, 1, 1.0)]).hardware is None
    assert show_work(total_work([]))["hardware"] is None


def test_a_file_is_measured_whole_unless_the_model_was_trained_on_it(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"question": f"{n}+0=", "answer": str(n)}) for n in range(40)]
    rows.write_text("\n".join(lines), encoding="utf-8")
    own = TaskConfig(name="jsonl", path=str(rows), held_out=0.2)
    config = make_config(tiny_policy, tmp_path / "out", num_problems=0, num_samples=1)
    config = replace(config, task=own, split="auto")
    for folder, began in (("before", ""), ("first", ""), ("second", str(tmp_path / "first")), ("other", "")):
        path = str(rows) if folder in ("first", "second") else "another.jsonl"
        run = {"optim": {}, "task": {"name": "jsonl", "path": path}, "policy": {"init": began}}
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.yaml").write_text(json.dumps(run), encoding="utf-8")
        asked = PolicyConfig(init=str(tmp_path / folder))
        is_trained = path == str(rows)
        assert chosen_split("auto", own, asked) == ("test" if is_trained else "all")
        assert chosen_split("dev", own, asked) == "dev"
    assert chosen_split("auto", TaskConfig(), config.policy) == "test"
    main(config)
    said = capsys.readouterr().out
    assert "rows.jsonl: all 40 rows are measured (--split test: those alone that training leaves out)" in said
    summary = json.loads((tmp_path / "out/eval.json").read_text())
    assert (summary["num_problems"], summary["identity"]["split"]) == (40, "all")
    # Compared with what a run leaves out, the common problems count.
    assert unlike(summary["identity"], summary["identity"] | {"split": "test"}) == []


OWN: dict[str, Callable[[int], dict[str, Any]]] = {
    "jsonl": lambda n: {"question": f"{n}+0=", "answer": str(n)},
    "choice": lambda n: {"question": f"{n}?", "choices": ["one", "two"], "answer": "A"},
    "yes_no": lambda n: {"question": f"{n}?", "answer": "yes"},
    "code": lambda n: {"prompt": f"Write f{n}.", "tests": [f"assert f{n}() == 1"]},
    "countdown": lambda n: {"numbers": [n + 2, 1, 2], "target": n + 5},
    "letters": lambda n: {"word": "b" * (n // 20 + 1) + "a" * (n % 20), "letter": "a", "count": n % 20},
}


@pytest.mark.parametrize("name", OWN)
def test_the_share_that_is_held_out_is_said_and_can_be_chosen(name: str, tmp_path: Path) -> None:
    """Of each task that reads one file of rows."""
    assert set(OWN) == ONE_FILE
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(OWN[name](n)) for n in range(400)), encoding="utf-8")
    for share, few in (
        (0.05, " (too few to show a difference; --task.held-out 0.2 holds out more)"),
        (0.2, ""),
    ):
        config = TaskConfig(name=name, path=str(rows), held_out=share)
        mixed = TaskConfig(name="mixture", weights={name: 1.0}, paths={name: str(rows)}, held_out=share)
        task, part = load_task(config), load_task(mixed)
        sizes = {split: len(task.problems(split)) for split in ("train", "dev", "test")}
        assert sizes == {split: len(part.problems(split)) for split in sizes}
        assert sum(sizes.values()) == 400
        for split in ("dev", "test"):  # of a binomial, four standard deviations
            assert abs(sizes[split] - 400 * share) < 4 * (400 * share * (1 - share)) ** 0.5
        (said,) = [line for line in told_of(task, 400) if "held out" in line]
        assert said == (
            f"rows.jsonl: {sizes['train']} of 400 rows are trained on, {sizes['dev']} held out for validation, "
            f"{sizes['test']} for testing{few}"
        )


def test_a_share_that_cannot_be_held_out_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with pytest.raises(UserError, match=r"task.held_out = 0.5: expected a share"):
        TaskConfig(name="jsonl", path=str(rows), held_out=0.5)
    with pytest.raises(ValueError, match="held_out is not read by task arithmetic"):
        TaskConfig(held_out=0.2)
    with pytest.raises(ValueError, match="held_out is not read by task countdown"):  # its problems are made
        TaskConfig(name="countdown", held_out=0.2)
