"""The demo: its files always, its promise (reinforcement lifts accuracy) with --slow."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from needs import SHARED, needs

from whet import __main__
from whet.eval.evaluate import evaluate, take_problems
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.lora.side import LoRAConfig
from whet.model.quant import packed_parts
from whet.recipes import demo, real, rl, sft
from whet.recipes.models import seeing_model
from whet.tasks.base import load_task
from whet.tasks.images import blanked, swapped
from whet.tasks.made.arithmetic import Arithmetic
from whet.tasks.made.drawing import COLOURS
from whet.train.rl import train as train_rl
from whet.train.sft import train as train_sft
from whet.types import Problem, UserError

STORIES = SHARED / "data/models/stories260k"
needs_data = needs("shared/data/models/stories260k", "gguf")
METRICS = {"pass@1", "greedy", "pass@16", "maj@16", "format", "thinking_tokens"}


def read_summary(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    for stage in ("sft", "rl"):
        num_samples = json.loads((folder / "eval" / stage / "eval.json").read_text())["num_samples"]
        metrics = {name.replace("@16", f"@{num_samples}") for name in METRICS}
        assert set(summary[stage]) >= metrics
        for name in metrics:
            low, high = summary[stage]["intervals_95"][name]
            assert low <= summary[stage][name] <= high
        for name in metrics - {"thinking_tokens"}:
            assert 0 <= summary[stage][name] <= 1
        assert summary[stage]["pass@1"] <= summary[stage][f"pass@{num_samples}"]
    return summary


@pytest.mark.ci
@pytest.mark.usefixtures("few_problems")
def test_structure(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few_sft = replace(sft.demo(), policy=tiny_policy, num_steps=4, batch_size=4, validation_problems=4)
    sampling = replace(rl.demo().sampling, max_new_tokens=12)
    few_rl = replace(rl.demo(), sampling=sampling, num_steps=2, num_prompts=2, group_size=2)
    monkeypatch.setattr(sft, "demo", lambda: few_sft)
    monkeypatch.setattr(rl, "demo", lambda: few_rl)
    folder = tmp_path / "demo"
    demo.main(demo.DemoConfig(out=str(folder), num_problems=5, num_threads=1))
    summary = read_summary(folder)
    assert set(summary) >= {"base", "sft", "rl", "seconds"}
    for stage in ("base", "sft", "rl"):
        content = json.loads((folder / "eval" / stage / "eval.json").read_text())
        assert (content["num_problems"], content["num_samples"]) == (5, 16)
        assert content["metrics"]["pass@1"]["mean"] == summary[stage]["pass@1"]
        rows = (folder / "eval" / stage / "eval_samples.jsonl").read_text().splitlines()
        assert len(rows) == 5 * 17
    for part in ("", "sft", "rl"):
        assert (folder / part / "report.md").is_file()
    assert "pass@1" in capsys.readouterr().out
    with pytest.raises(UserError, match="already exists"):
        demo.main(demo.DemoConfig(out=str(folder)))


@pytest.mark.ci
@pytest.mark.usefixtures("no_figures")
@needs_data
@pytest.mark.parametrize("lora", [False, True])
def test_structure_of_the_demo_with_a_real_model(
    lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every chapter, with a tiny pretrained model in place of the real one: `make slow` takes that."""
    tiny = PolicyConfig(init=str(STORIES), schema="anywhere", template="base")
    few_sft = replace(sft.smollm2_words(), policy=tiny, num_steps=2, batch_size=2)
    recipe = rl.smollm2_words()
    few = replace(
        recipe,
        sampling=replace(recipe.sampling, max_new_tokens=12),
        num_steps=2,
        num_prompts=2,
        group_size=2,
        preflight="warn",
    )
    monkeypatch.setattr(sft, "smollm2_words", lambda: few_sft)
    monkeypatch.setattr(rl, "smollm2_words", lambda: few)
    monkeypatch.setattr(real, "NUM_FACTS", 2)
    monkeypatch.setattr(real, "EXAM_TOKENS", 12)
    monkeypatch.setattr("whet.editing.editor.OWN_TOKENS", 1_000)
    folder = tmp_path / "demo"
    demo.main(
        demo.DemoConfig(out=str(folder), real=True, lora=lora, num_problems=4, num_samples=2, num_threads=1)
    )
    chapters = json.loads((folder / "chapters.json").read_text())
    assert [chapter["title"] for chapter in chapters] == [
        "A chat, before and after",
        "Reasoning, or brevity?",
        "What carries over",
        "What it forgot",
        "One number of 260,032",
        "The same answers in llama.cpp",
        "2 facts, rewritten",
    ]
    told, page, written = (
        capsys.readouterr().out,
        (folder / "report.html").read_text(),
        (folder / "report.md").read_text(),
    )
    for chapter in chapters:
        for text in (told, page, written):
            assert chapter["title"] in text
        assert all(len(row) == len(chapter["head"]) for row in chapter["rows"])
    assert "thinks first" not in page  # it was not asked to
    chat, _, compare = told.partition("next: ")[2].splitlines()[:3]  # the second writes a report
    assert "--eval.task.level 1" in compare
    small = f"--eval.num-problems 2 --eval.num-samples 1 --out {tmp_path / 'c'}"
    for line in (f"{chat} --prompt Hello --sampling.max-new-tokens 4", f"{compare} {small}"):
        assert __main__.main(shlex.split(line)[1:]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert set(real.STAGES) < set(summary)
    assert "Of other kinds the base gets" in page or summary["base"]["pass@1"] == summary["rl"]["pass@1"]
    assert load_policy(PolicyConfig(init=str(folder / "rl")), seed=0).model.config.num_layers == 5


def test_equations_are_counted_and_checked() -> None:
    text = "He had 14 + 9 = 23. 3 x 4 = 11. 10 - 2 + 3 = 11; 19 - 6 = 9 books. 12 ÷ 4 = $3. 7/2 = 3, 2,000 + 1 = 3"
    assert real.equations(text) == (5, 3)  # a rounded quotient and half a number are left out
    assert real.equations("23 apples, so x = 5 and 1.5 + 2 = 3") == (0, 0)


@pytest.mark.ci
def test_structure_of_the_demo_that_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed (extra vision)")
    few = {"num_steps": 2, "batch_size": 4, "validation_problems": 4}
    first, last, recipe = sft.demo_vision(), sft.demo_vision_habit(), rl.demo_vision()
    short = replace(recipe.sampling, max_new_tokens=6)
    monkeypatch.setattr(sft, "demo_vision", lambda: replace(first, num_problems=40, **few))
    monkeypatch.setattr(sft, "demo_vision_habit", lambda: replace(last, num_problems=40, **few))
    monkeypatch.setattr(
        rl, "demo_vision", lambda: replace(recipe, sampling=short, num_steps=2, num_prompts=2, group_size=2)
    )
    monkeypatch.setattr(
        "whet.report.markdown.draw_figures", lambda series, folder: []
    )  # the other demo's are drawn
    folder = tmp_path / "demo"
    demo.main(demo.DemoConfig(out=str(folder), vision=True, num_problems=5, num_samples=2, num_threads=1))
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == {"seconds", "processor_seconds", "base", "sft", "rl", "rl_blank", "rl_swapped"}
    assert 0 < summary["processor_seconds"] < 600
    asked: dict[str, list[dict[str, Any]]] = {}
    for stage in ("base", "sft", "rl", "rl_blank", "rl_swapped"):
        rows = (folder / "eval" / stage / "eval_samples.jsonl").read_text().splitlines()
        asked[stage] = [json.loads(row) for row in rows]
        assert len(rows) == 5 * 3
        assert all(row["images"][0].startswith("data:image/png;base64,") for row in asked[stage])
    for stage in ("rl_blank", "rl_swapped"):
        for own, other in zip(asked["rl"], asked[stage], strict=True):
            assert (own["uid"], own["gold"]) == (other["uid"], other["gold"])
            assert own["images"] != other["images"]
    assert len({row["images"][0] for row in asked["rl_blank"]}) == 1
    page = (folder / "report.html").read_text()
    assert "white images" in page
    assert "another problem" in page
    assert load_policy(PolicyConfig(init=str(folder / "rl")), seed=0).model.images is not None
    assert "its tower too" in capsys.readouterr().out


@pytest.mark.slow
def test_fine_tuning_teaches_a_model_to_look(tmp_path: Path) -> None:
    """The first half minute of `whet demo --vision`: it names the colours of its image, and no other's."""
    pytest.importorskip("PIL", reason="Pillow is not installed (extra vision)")
    seeing_model(0).save(tmp_path / "base")
    recipe = sft.demo_vision()
    train_sft(
        replace(
            recipe,
            out=str(tmp_path / "sft"),
            policy=replace(recipe.policy, init=str(tmp_path / "base")),
            num_steps=150,
            save_every=150,
            validation_problems=0,
        )
    )
    policy = load_policy(PolicyConfig(init=str(tmp_path / "sft")), seed=0)
    task = load_task(recipe.task)
    problems = take_problems(task, "test", 64)

    def named(asked: Sequence[Problem]) -> float:
        greedy = SamplingParams(max_new_tokens=24, temperature=0.0)
        rows = evaluate(policy, task, asked, num_samples=1, sampling=greedy, seed=0).samples
        right = total = 0
        for problem, (judged,) in zip(problems, rows, strict=True):
            shown = problem.meta["shows"].replace("/", "").split()
            said = [word for word in re.findall("[a-z]+", judged.text) if word in COLOURS]
            right += sum(a == b for a, b in zip(said, shown, strict=False))
            total += len(shown)
        return right / total

    assert named(problems) >= 0.95
    assert (
        named([blanked(problem) for problem in problems]) <= 0.6
    )  # of three colours that the question names
    assert named(swapped(problems)) <= 0.6


def test_stages_are_measured_on_problems_that_no_training_sees() -> None:
    task = Arithmetic()
    measured = {problem.uid for problem in task.problems(demo.DemoConfig().split)}
    assert len(measured) >= demo.DemoConfig().num_problems
    assert not measured & {problem.uid for name in ("train", "dev") for problem in task.problems(name)}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_reinforcement_of_adapters_beside_four_bits(tmp_path: Path) -> None:
    """From the demo's fine-tuned model: docs/results/lora.md. The notebook of adapters does less of it in CI."""
    train_sft(replace(sft.demo(), out=str(tmp_path / "sft")))
    recipe = rl.demo()
    config = replace(
        recipe,
        out=str(tmp_path / "rl"),
        policy=replace(recipe.policy, init=str(tmp_path / "sft"), quantize="nf4"),
        lora=LoRAConfig(rank=16),
        optim=replace(recipe.optim, lr=1e-3),
    )
    policy = train_rl(config)
    assert packed_parts(policy.model), "the base stays in 4 bits"
    assert not (tmp_path / "rl/checkpoints/step_00000060/model.safetensors").exists()
    rows = [json.loads(row) for row in (tmp_path / "rl/metrics.jsonl").read_text().splitlines()]
    assert {row["rl/ratio_drift"] for row in rows} == {0.0}
    task = Arithmetic()
    problems = take_problems(task, "test", 128)
    result = evaluate(policy, task, problems, num_samples=4, sampling=config.sampling, seed=0)
    assert result.metrics["pass@1"].mean >= 0.93  # 97.5 % of 512 x 16; this sample's standard error is 1 %


@pytest.mark.ci
@pytest.mark.timeout(1200)
def test_reinforcement_lifts_accuracy(tmp_path: Path) -> None:
    folder = Path(os.environ.get("WHET_DEMO_RUN", tmp_path / "demo"))  # .ci/run has one of the bare machine
    if not folder.exists():
        process = subprocess.run(
            [sys.executable, "-m", "whet", "demo", "--out", str(folder)],
            capture_output=True,
            text=True,
            timeout=800,
            env=os.environ | {"TERM": "dumb"},
        )
        assert process.returncode == 0, process.stderr
    summary = read_summary(folder)
    assert summary["rl"]["pass@1"] >= 0.9
    assert summary["rl"]["pass@1"] - summary["sft"]["pass@1"] >= 0.25
    assert summary["base"]["pass@1"] <= 0.05
    assert summary["rl"]["format"] >= 0.95
    # It learned to use its scratch-pad, rather than to guess.
    assert summary["rl"]["thinking_tokens"] > summary["sft"]["thinking_tokens"] + 2
    rows = (folder / "rl" / "metrics.jsonl").read_text().splitlines()
    drift = [json.loads(row)["rl/ratio_drift"] for row in rows]
    assert set(drift) == {0.0}
    # A trained model curves more than a random one: the diagnosis has to pass there, too.
    command = ["diagnose", "demo", "--policy.init", str(folder / "rl"), "--rounds", "0", "--repeats", "1"]
    found = subprocess.run(
        [sys.executable, "-m", "whet", *command, "--out", str(tmp_path / "diagnose")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"TERM": "dumb"},
    )
    assert found.returncode == 0, found.stdout + found.stderr
