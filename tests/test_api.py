"""The public Python interface: what a stranger's first ten lines do, with his rows, his reward and his loop."""

from __future__ import annotations

import ast
import importlib.util
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from whet import api
from whet.api import _made, _written_reward
from whet.generate.engine import Request
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.kernels.cpu.build import library
from whet.model.config import ModelConfig
from whet.recipes.models import demo_policy
from whet.train.rl_config import RLConfig
from whet.train.session import TrainStep
from whet.types import Group, Problem, UserError

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 14) for b in range(3, 12)]
SHAPE = ModelConfig(
    hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, max_positions=64
)  # fmt: skip
SHORT = {"max_new_tokens": 12, "num_prompts": 2, "group_size": 4, "save_every": 2, "preflight": "warn"}
BONUS = 0.25


def shorter(problem: Any, text: str) -> float:
    """Pay for few characters; reads a constant of this module."""
    return BONUS - len(text) / 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk, as a user has one."""
    home = tmp_path_factory.mktemp("model")
    load_policy(replace(demo_policy(), model=SHAPE, max_rows=64), seed=0).save(home)
    return home


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library()  # from where it is: this test's own place would get one that is compiled for it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "whet"


def test_importing_takes_no_torch_and_little_time() -> None:
    code = (
        "import sys, time\nbegan = time.perf_counter()\nimport whet\n"
        "print(time.perf_counter() - began, 'torch' in sys.modules)\nprint('evaluate' in dir(whet))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, has_torch, is_listed = done.stdout.split()
    assert float(seconds) < 0.3
    assert (has_torch, is_listed) == ("False", "True")
    with pytest.raises(AttributeError, match="it has"):
        whet.nonsense  # noqa: B018


def test_every_public_name_is_there() -> None:
    for name in whet.__all__:
        assert getattr(whet, name) is not None
    assert whet.answers_equal("1/2", "0.5")
    assert whet.extract_answer(r"so \boxed{42}") == "42"
    assert whet.pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert whet.run_python("print(6 * 7)").stdout == "42\n"


def test_the_first_ten_lines(folder: Path, tmp_path: Path) -> None:
    policy = whet.load(folder)
    task = whet.Task.from_rows(ROWS, prompt="question", answer="answer")
    seen: list[TrainStep] = []
    sampled: list[Sequence[Group]] = []
    out = tmp_path / "mine"
    run = whet.rl(
        policy,
        task,
        rewards=["correct", shorter],
        algo="dapo",
        num_steps=3,
        out=out,
        on_step=seen.append,
        on_samples=sampled.append,
        **SHORT,
    )
    assert sampled == [step.groups for step in seen]
    assert [step.step for step in seen] == [1, 2, 3]
    assert str(seen[0]).startswith("step 1/3: reward mean ")
    assert {name for group in seen[0].groups for s in group.samples for name in s.rewards} >= {
        "correct",
        "shorter",
    }
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert {row["rewards"]["shorter"] <= BONUS for row in run.samples} == {True}
    assert run.is_complete
    assert "rl/reward_mean" in run._repr_html_()
    before, after = (whet.evaluate(p, task, num_samples=2, max_new_tokens=12) for p in (folder, run.policy))
    assert set(before.metrics) >= {"greedy", "pass@1"}
    assert len(before.samples) == 3 * len(before.result.problems)
    found = whet.compare(before, after)
    assert found["greedy"].num_problems == len(before.result.problems)
    assert "greedy" in str(found)
    assert whet.compare(before, before)["pass@1"].difference.mean == 0.0
    saved = run.policy.save(tmp_path / "saved")
    assert whet.load(saved).generate(["2+2="], max_new_tokens=8) == run.policy.generate(
        ["2+2="], max_new_tokens=8
    )


@pytest.mark.ci
@pytest.mark.usefixtures("no_figures")
def test_a_run_is_a_recipe_that_can_be_resumed(folder: Path, tmp_path: Path, cache: Path) -> None:
    """What was given as objects is in the folder: rows and reward are files, named by their content."""
    out = tmp_path / "run"
    options = {"out": out, "rewards": [(shorter, 0.5)], "num_steps": 4, **SHORT}
    stopped = whet.rl(
        folder, ROWS, on_step=lambda step: step.step == 2 and os.kill(os.getpid(), signal.SIGINT), **options
    )
    assert not stopped.is_complete
    with pytest.raises(SystemExit) as ended:  # SIGTERM means the program, not the training alone
        whet.rl(
            folder,
            ROWS,
            on_step=lambda _: os.kill(os.getpid(), signal.SIGTERM),
            **(options | {"out": tmp_path / "ended"}),
        )
    assert ended.value.code == 128 + signal.SIGTERM
    assert [row["step"] for row in whet.Run(tmp_path / "ended").metrics] == [1]
    # The step that was sampling is given up; the one before it is saved.
    assert [row["step"] for row in stopped.metrics] == [1, 2]
    run = whet.rl(folder, ROWS, resume=True, **options)
    assert run.is_complete
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    whole = whet.rl(folder, ROWS, **(options | {"out": tmp_path / "whole"}))
    mine, theirs = (whet.load(r.folder).loaded.model.state_dict() for r in (run, whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    (reward,) = (cache / "rewards").glob("*.py")
    assert "BONUS = 0.25" in reward.read_text()
    assert len(list((cache / "rows").iterdir())) == 1


@pytest.mark.usefixtures("no_figures")
def test_a_loop_of_ones_own_may_be_left(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    steps = whet.rl_steps(
        folder, ROWS, out=out, num_steps=5, rewards={"correct": 1.0, "format": 0.5}, **SHORT
    )
    for step in steps:
        assert len(step.groups) <= 2
        if step.step == 3:
            break
    steps.close()
    assert len(whet.Run(out).metrics) == 3
    rest = whet.rl_steps(
        folder, ROWS, out=out, num_steps=5, rewards={"correct": 1.0, "format": 0.5}, resume=True, **SHORT
    )
    assert [step.step for step in rest] == [3, 4, 5]  # from the checkpoint of step 2


def test_rows_may_be_numbers_a_csv_or_a_data_frame(tmp_path: Path) -> None:
    expected = [("1+1?", "2"), ("half?", "0.5"), ("2+2?", "4")]
    rows = [{"question": q, "answer": float(a) if "." in a else int(a), "n": None} for q, a in expected]
    lines = "question,answer\n" + "".join(f"{q},{a}\n" for q, a in expected)
    (tmp_path / "mine.csv").write_text(lines)
    (tmp_path / "mine.json").write_text(json.dumps([{"question": q, "answer": a} for q, a in expected]))
    given = [rows, str(tmp_path / "mine.csv"), tmp_path / "mine.json"]
    pandas = pytest.importorskip("pandas")
    for source in [*given, pandas.DataFrame(rows), pandas.read_csv(tmp_path / "mine.csv")]:
        task = whet.Task.from_rows(source)
        found = [(p.prompt, p.answer) for split in ("train", "dev", "test") for p in task.problems(split)]
        asked = {prompt: float(answer) for prompt, answer in found}
        assert asked == {prompt: float(answer) for prompt, answer in expected}
    with pytest.raises(UserError, match=r"row 2|line 2"):
        whet.Task.from_rows(pandas.DataFrame({"question": ["a", "b"], "answer": [1.0, float("nan")]}))


@pytest.mark.usefixtures("no_figures")
def test_errors_name_arguments_of_python(folder: Path, tmp_path: Path) -> None:
    bad = [*ROWS, {"question": "a", "answer": ""}]
    with pytest.raises(UserError, match=r"allow it with max_bad_rows=1$"):
        whet.Task.from_rows(bad)
    whet.Task.from_rows(bad, max_bad_rows=1)
    with pytest.raises(UserError, match=r"or preflight='warn'\)"):
        whet.rl(
            folder, ROWS, rewards=[shorter], out=tmp_path / "a", num_steps=1, **{**SHORT, "preflight": "stop"}
        )
    whet.sft(folder, ROWS, out=tmp_path / "full", num_steps=1)
    with pytest.raises(UserError, match=r"choose another out=\.\.\., or resume=True"):
        whet.sft(folder, ROWS, out=tmp_path / "full", num_steps=1)


@pytest.mark.usefixtures("no_figures")
def test_sft_and_dpo(folder: Path, tmp_path: Path) -> None:
    rows = [row | {"solution": row["question"] + row["answer"]} for row in ROWS]
    steps: list[int] = []
    run = whet.sft(
        folder, rows, out=tmp_path / "sft", num_steps=2, batch_size=4, on_step=lambda s: steps.append(s.step)
    )
    assert steps == [1, 2]
    assert run.metrics[-1]["sft/loss"] > 0
    pairs = [
        {"prompt": r["question"], "chosen": r["answer"], "rejected": "0"} for r in ROWS if r["answer"] != "0"
    ]
    run = whet.dpo(run.policy, pairs, out=tmp_path / "dpo", num_steps=2, batch_size=4)
    assert [row["step"] for row in run.metrics] == [1, 2]


@pytest.mark.usefixtures("no_figures")
@pytest.mark.ci
def test_adapters_are_trained_merged_and_exported(folder: Path, tmp_path: Path) -> None:
    rows = [row | {"solution": row["question"] + row["answer"]} for row in ROWS]
    for place in range(2):
        out, lora = tmp_path / f"lora{place}", {"rank": 2 + place}
        whet.sft(folder, rows, out=out, num_steps=1, batch_size=4, lora=lora, seed=place)
    halves = {tmp_path / "lora0": 0.5, tmp_path / "lora1": 0.5}
    half = whet.merge(halves, out=tmp_path / "half")
    assert json.loads((half / "adapter_config.json").read_text())["r"] == 5
    merged = [whet.load(model).logprobs("2+3=", "5") for model in (half, folder)]
    assert merged[0] != merged[1]
    report = whet.export(half, out=tmp_path / "merged", to="merged", dtype="f32", num_prompts=2)
    assert (report["verdict"], report["greedy_equal"]) == ("passed", 1.0)
    assert whet.load(tmp_path / "merged").logprobs("2+3=", "5") == pytest.approx(merged[0], abs=1e-5)


def test_logprobs_are_the_samplers(folder: Path) -> None:
    policy = whet.load(folder)
    ids = tuple(policy.prompt_ids("2+3="))
    params = SamplingParams(temperature=0.7, max_new_tokens=9)
    ((done,),) = policy.loaded.engine(stops=False).generate([Request(prompt_ids=ids, seeds=(5,))], params)
    text = policy.loaded.tokenizer.decode_completion(ids, done.ids)
    assert policy.loaded.tokenizer.encode(text) == list(done.ids)
    assert whet.logprobs(policy, "2+3=", text, temperature=0.7) == list(done.logprobs)
    assert policy.sample(["2+3="], 3, max_new_tokens=5, seed=1) == policy.sample(
        ["2+3="], 3, max_new_tokens=5, seed=1
    )
    assert len(policy.sample(["1+1=", "2+2="], 3, max_new_tokens=5)[1]) == 3
    assert policy.prompt_text("2+3=").count("2+3=") == 1


def rewards_length(problem: Problem, completion: str) -> float:
    return float(len(completion))


BAD: dict[str, tuple[Any, str]] = {
    "algorithm": (lambda f, t: whet.rl(f, ROWS, out=t, algo="dapoo"), "did you mean 'dapo'"),
    "field": (lambda f, t: whet.rl(f, ROWS, out=t, num_prompt=3), "did you mean 'num_prompts'"),
    "group field": (
        lambda f, t: whet.rl(f, ROWS, out=t, optim={"lrr": 1}),
        "unknown field 'optim.lrr'",
    ),
    "a model's field": (lambda f, t: whet.load(f, devcie="cpu"), "did you mean 'device'"),
    "a type": (lambda f, t: whet.rl(f, ROWS, out=t, num_prompts="8"), "num_prompts"),
    "no field": (lambda f, t: whet.rl(f, ROWS, out=t, is_filtered=True), "has no field 'is_filtered'"),
    "epochs": (
        lambda f, t: whet.rl(f, ROWS, out=t, num_train_epochs=2),
        r"did you mean 'num_epochs'\?|did you mean 'num_steps'\? \(it counts optimizer steps",
    ),
    "models to compare": (
        lambda f, t: whet.compare(str(f), str(f)),  # pyright: ignore
        "expected what whet.evaluate returned",
    ),
    "another library's limit": (
        lambda f, t: whet.load(f).generate(["a"], max_tokens=5),
        "generate has no argument 'max_tokens'; did you mean 'max_new_tokens'",
    ),
    "preset": (lambda f, t: whet.rl(f, ROWS, out=t, optim="thin"), "expected one of lean"),
    "no rows": (lambda f, t: whet.rl(f, [], out=t), "got no rows"),
    "a row that is no dict": (lambda f, t: whet.rl(f, ["2+2"], out=t), "row 0: got '2\\+2', expected a dict"),
    "a value that is no JSON": (
        lambda f, t: whet.rl(f, [{"prompt": object()}], out=t),
        "cannot be written as JSON",
    ),
    "a column": (
        lambda f, t: whet.Task.from_rows(ROWS, prompt="ask"),
        r"^rows: no column 'ask'; name another with prompt=... \(there are: question, answer\)$",
    ),
    "no question": (
        lambda f, t: whet.rl(f, [{"q": "x", "a": "1"}], out=t),
        r"rows: no column is a question; name it with prompt=..., and that of the answer with answer=... \(there",
    ),
    "two questions": (
        lambda f, t: whet.rl(f, [{"question": "x", "problem": "y"}], out=t),
        "could each be the prompt",
    ),
    "a name": (
        lambda f, t: whet.Task.from_rows("gsm9k"),
        "'gsm9k': no such file or folder, nor a task; did you mean 'gsm8k'?",
    ),
    "no name": (lambda f, t: whet.Task.from_rows("sums"), "nor a task; the tasks are arithmetic, "),
    "a file": (lambda f, t: whet.evaluate(f, "nothing.csv"), "'nothing.csv': no such file; check the path"),
    "a model": (lambda f, t: whet.load(f / "nothing" / "here"), "nothing/here"),
    "a value": (lambda f, t: whet.rl(f, ROWS, out=t, max_new_tokens=0), "max_new_tokens = 0"),
    "a lambda": (
        lambda f, t: whet.rl(f, ROWS, out=t, rewards=[lambda p, x: 1.0]),
        "expected a named function",
    ),
    "one text": (lambda f, t: whet.load(f).generate("2+2="), "expected a list of prompts"),
    "nothing to score": (lambda f, t: whet.load(f).logprobs("2+2=", ""), "completion is empty"),
    "neither": (lambda f, t: whet.dpo(f, out=t), "either pairs or a task"),
    "a budget": (lambda f, t: whet.quantize(f, ROWS, out=t, budget="lots"), "budget"),
    "another library's rate": (
        lambda f, t: whet.rl(f, ROWS, out=t, learning_rate=1e-4),
        r"has no field 'learning_rate'; did you mean 'lr'\?",
    ),
    **{
        f"TRL's {name}": (
            lambda f, t, name=name: whet.rl(f, ROWS, out=t, **{name: [rewards_length]}),
            rf"has no field '{name}'; did you mean '{ours}'\?",
        )
        for name, ours in {
            "reward_funcs": "rewards",
            "reward_function": "rewards",
            "train_dataset": "task",
            "model": "policy",
            "loss_type": "algo",
        }.items()
    },
    "a function for a field": (
        lambda f, t: whet.rl(f, ROWS, out=t, reward=[rewards_length]),
        r"reward = a function: expected a list, rewards=\[rewards_length\]",
    ),
    "a reward's name": (
        lambda f, t: whet.rl(f, ROWS, out=t, rewards=["corect"], max_new_tokens=8),
        r"did you mean 'correct'\?",
    ),
    "rows for a config": (lambda f, t: whet.Task(ROWS), r"expected whet.Task.from_rows\(...\)"),
    "a number for a group": (
        lambda f, t: whet.sft(f, ROWS, out=t, lora=8),
        r"lora = 8: expected a dict of its fields, as in lora={'rank': \.\.\.}",
    ),
    "a temperature": (lambda f, t: whet.load(f).sample(["2+2="], temperature=-1.0), "temperature = -1"),
    "a kind of export": (lambda f, t: whet.export(f, out=t, to="onnx"), "'onnx'"),
    "no adapter": (lambda f, t: whet.export(f, out=t, to="merged"), "no adapter to merge"),
    "one adapter": (lambda f, t: whet.merge([f], out=t), "expected two or more"),
    "one adapter's name": (lambda f, t: whet.merge("runs/a", out=t), "expected a list of adapters"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_told_in_one_line(name: str, folder: Path, tmp_path: Path) -> None:
    act, message = BAD[name]
    with pytest.raises(UserError, match=message) as caught:
        act(folder, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_messages_name_arguments_as_python_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for said, told in {
        "warning: fix or --task.max-bad-rows 1": "warning: fix or max_bad_rows=1",
        "--task.held-out 0.2 takes more": "held_out=0.2 takes more",
        "set --optim.warmup-steps 0": "set warmup_steps=0",
        "--algo.uninformative refill samples others": "algo={'uninformative': 'refill'} samples others",
        "--policy.schema anywhere asks for no format": "schema='anywhere' asks for no format",
        "or --preflight warn)": "or preflight='warn')",
        "raise --sampling.max-new-tokens": "raise max_new_tokens=...",
        "a model, by this name: --model runs/a; report": "a model, by this name: whet.load('runs/a'); report",
        "data stands after --data: --data ./a.csv": "data stands after data=...: data='./a.csv'",
        "safe: --optim.token-budget 512 --policy.max-rows 8": "safe: token_budget=512 max_rows=8",
    }.items():
        assert api.python_words(said) == told
    with api._printing(True):
        print("whet: warning: set --optim.warmup-steps 0")
        print("more steps: whet rl a --resume --num-steps 4")
        print("12 rows for testing (too few; --task.held-out 0.2 holds out more)\nreward: .5")
        print("warning: set --optim.warmup-steps 0", file=sys.stderr)
    out, err = capsys.readouterr()
    assert out == (
        "whet: warning: set warmup_steps=0\nmore steps: whet rl a --resume --num-steps 4\n"
        "12 rows for testing (too few; held_out=0.2 holds out more)\nreward: .5\n"
    )
    assert err == "warning: set warmup_steps=0\n"


def test_an_evaluation_leaves_the_policy_as_it_was(folder: Path) -> None:
    policy = whet.load(folder)
    before = policy.prompt_text("2+3=")
    whet.evaluate(policy, ROWS, num_samples=1, num_problems=2, max_new_tokens=4, split="train")
    assert policy.prompt_text("2+3=") == before


def test_a_reward_is_the_same_file_wherever_it_is_defined(cache: Path) -> None:
    """A notebook's cell is another file in every session; a run on its reward must be one that can be resumed."""
    specs = []
    for name in ("/tmp/ipykernel_1/2.py", "/tmp/ipykernel_3/4.py"):
        source = "def paid(problem, text):\n    return 1.0\n"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": "cell"}
        exec(compile(source, name, "exec"), space)
        specs.append(_written_reward(space["paid"]))
    assert specs[0] == specs[1]


def test_a_reward_finds_its_neighbours_from_another_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`from service import score` works beside the script; `whet rl RUN --resume` is another process, elsewhere."""
    beside = tmp_path / "mine"
    beside.mkdir()
    (beside / "neighbour_service.py").write_text("def score(text):\n    return 0.25\n")
    script = beside / "script.py"
    script.write_text(
        "from neighbour_service import score\n\n\ndef paid(problem, text):\n    return score(text)\n"
    )
    monkeypatch.syspath_prepend(str(beside))
    spec = importlib.util.spec_from_file_location("script_of_mine", script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["script_of_mine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path, _, name = _written_reward(module.paid).rpartition(":")
    code = f"import runpy; print(runpy.run_path({path!r})[{name!r}](None, ''))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "0.25\n", done.stderr


def test_a_folder_called_whet_beside_a_script_is_not_the_package(tmp_path: Path) -> None:
    (tmp_path / "whet").mkdir()  # as the clone is
    (tmp_path / "try.py").write_text("import whet\nprint(whet.Task.__name__)\n")
    command = [sys.executable, tmp_path / "try.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "Task\n", done.stderr[-300:]


@pytest.mark.usefixtures("no_figures")
def test_a_signal_ends_a_loop_of_ones_own(folder: Path, tmp_path: Path) -> None:
    seen = []
    for step in whet.rl_steps(folder, ROWS, out=tmp_path / "run", num_steps=9, **SHORT):
        seen.append(step.step)
        if step.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
    assert seen == [1, 2]  # the third gives up its sampling, and the loop is over
    assert len(whet.Run(tmp_path / "run").metrics) == 2


def test_a_run_is_loaded_by_its_short_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/demo-20261123-010203/sft"
    shutil.copytree(folder, run / "checkpoints/step_00000001")
    for name in ("config.yaml", "environment.json"):
        (run / name).write_text("{}\n")
    mine, theirs = whet.load("demo-sft").loaded.model, whet.load(folder).loaded.model
    assert torch.equal(mine.head_weight, theirs.head_weight)
    with pytest.raises(whet.UserError, match="no such run"):
        whet.load("other-sft")


def test_evaluations_of_different_protocols_do_not_compare(folder: Path) -> None:
    options: dict[str, Any] = {"num_problems": 2, "max_new_tokens": 4, "split": "train"}
    one, other = (whet.evaluate(folder, ROWS, num_samples=n, **options) for n in (1, 2))
    with pytest.raises(whet.UserError, match="num_samples"):
        whet.compare(one, other)
    for shown in (
        whet.Task.from_rows(ROWS),
        one,
        whet.compare(one, one),
    ):  # a page each, as dataclasses are shown
        assert repr(shown).startswith(("whet.Task(", "<whet.Evaluation: ", "<whet.Comparison: "))
        assert "\n" not in repr(shown)
        assert len(repr(shown)) < 200 + len(str(folder))


@pytest.mark.ci
@pytest.mark.usefixtures("no_figures")
def test_what_a_training_prints(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step once, by the caller or by the program; without `verbose` only what it warns of."""
    options: dict[str, Any] = {"num_steps": 2, "batch_size": 2}

    def lines() -> list[str]:
        return capsys.readouterr().out.splitlines()

    whet.sft(folder, ROWS, out=tmp_path / "a", on_step=print, **options)
    assert [line.split(":")[0] for line in lines() if line.startswith("step ")] == ["step 1/2", "step 2/2"]
    own = {"on_step": lambda step: print(f"mine {step.step}"), "verbose": False}
    whet.sft(folder, ROWS, out=tmp_path / "b", **own, **options)
    told = lines()
    assert [line for line in told if not line.startswith("warning: ")] == ["mine 1", "mine 2"]
    assert any("warmup_steps" in line for line in told)
    for step in whet.rl_steps(folder, ROWS, out=tmp_path / "c", num_steps=1, verbose=False, **SHORT):
        print(f"mine {step.step}")
    told = lines()
    assert [line for line in told if not re.match(r"(whet: )?warning: ", line)] == ["mine 1"]


def test_fields_of_a_group_may_be_given_alone() -> None:
    given = {"out": "x", "policy": PolicyConfig(init="y"), "lr": 3e-4, "max_new_tokens": 7}
    config = _made(RLConfig, given | {"optim": {"beta1": 0.8}})
    assert (config.optim.lr, config.optim.beta1, config.sampling.max_new_tokens) == (3e-4, 0.8, 7)
    lean = _made(RLConfig, given | {"optim": "lean"})
    assert (lean.optim.adam_bits, lean.optim.lr) == (8, 3e-4)


def test_a_schema_of_ones_own_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = PolicyConfig(tokenizer="bytes", template="base", model=replace(ModelConfig(), max_positions=64))
    load_policy(made, seed=1).save(tmp_path / "a")
    schema = whet.Schema(think_open="", think_close="", answer_place="boxed", instruction="Box it.")
    policy = whet.load(tmp_path / "a", schema=schema)
    assert policy.prompt_text("1+1?") == "Box it.\n\nQuestion: 1+1?\nAnswer:\n"
    assert load_policy(policy.config, seed=0).schema == schema
    policy.save(tmp_path / "b")
    assert whet.load(tmp_path / "b").prompt_ids("1+1?") == policy.prompt_ids("1+1?")


@pytest.mark.ci  # starts Python three times
def test_what_libraries_read_is_set_before_they_are_imported_unless_the_user_chose() -> None:
    names = ("GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    code = f"import os, whet; whet.load; print([os.environ.get(name) for name in {names}])"
    clean = {name: value for name, value in os.environ.items() if name not in names}
    found = [
        ast.literal_eval(
            subprocess.run(
                [sys.executable, "-c", code], env=clean | own, capture_output=True, text=True, check=True
            ).stdout
        )
        for own in ({}, {"LRU_CACHE_CAPACITY": "7"})
    ]
    assert [own[1:] for own in found] == [["128", "128"], ["128", "7"]]
    assert {own[0] for own in found} <= {"0", "20000"}


@pytest.mark.parametrize(
    ("running", "spins"),
    [
        ((1, 1, 1, 1, 1), "20000"),
        ((9, 9, 1, 1, 1), "20000"),
        ((3, 2, 3, 4, 3), "0"),
        ((2, 2, 2, 2, 2), "20000"),
    ],
)
def test_waiting_threads_sleep_beside_other_programs(
    running: tuple[int, ...], spins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(running)
    monkeypatch.setattr(whet, "_num_running", lambda: next(looks))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.delenv("GOMP_SPINCOUNT")
    whet.calm_libraries()
    assert os.environ["GOMP_SPINCOUNT"] == spins


def test_a_busy_core_is_seen() -> None:
    assert whet._num_running() >= 1  # this process


def test_a_function_that_stands_alone_is_told_where_it_belongs(tmp_path: Path) -> None:
    def short(problem: Any, completion: str) -> float:
        return -0.01 * len(completion)

    for name in ("reward", "rewards"):
        with pytest.raises(UserError, match=rf"^{name} = a function: expected a list, rewards=\[short\]$"):
            whet.rl("model", "rows.csv", out=tmp_path / "run", **{name: short})  # type: ignore[arg-type]
