"""Every command that README and docs/ show runs: on a tiny model, with the smallest sizes and recorded hub rows.

Five minutes of processor time, so `make slow` runs it, `.ci/run` the two READMEs of it, and `make test` only parses the
commands (test_architecture.py).
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import hub
import huggingface_hub
import pytest
import torch
import uvicorn
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from test_architecture import README, ROOT, readme_blocks, readme_commands
from test_bring_your_own import make_model

from whet import __main__
from whet.inspect.memory import room
from whet.recipes import demo
from whet.recipes import rl as rl_recipes
from whet.recipes import sft as sft_recipes
from whet.tasks.made.arithmetic import Arithmetic
from whet.tasks.made.products import Products
from whet.types import Problem

pytestmark = pytest.mark.slow
PAGES = [
    README,
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.name not in ("LOG.md", "bring_your_own.md")
    ),
]
"""The log quotes earlier versions; the other page has a test of its own, from top to bottom."""

RL = (
    "--num-steps 1 --num-prompts 4 --group-size 2 --sampling.max-new-tokens 16 --max-dead-steps 9 "
    "--validation-problems 2 --save-every 1 --preflight warn"
)
FIT = "--num-steps 1 --batch-size 2 --save-every 1"
LEARNS = (
    "--num-steps 60 --batch-size 32 --optim.lr 1e-2 --optim.schedule constant --optim.warmup-steps 2 "
    "--policy.model.hidden-size 32 --policy.model.intermediate-size 64 --policy.model.head-dim 8"
)
"""Makes a model of `sft demo` that half knows `easy_sums`: dpo and rft need completions that are right."""
SMALL = {
    "rl": RL,
    "sft": f"{FIT} --validation-problems 2",
    "dpo": FIT,
    "sft demo": f"{LEARNS} --validation-problems 0",
    "rft": "--rounds 1 --steps-per-round 1 --num-problems 36 --num-samples 4 --batch-size 2 --save-every 1",
    "eval": "--num-problems 2 --num-samples 3 --sampling.max-new-tokens 8 --no-hardware",
    "compare --eval": "--eval.num-problems 2 --eval.num-samples 2 --eval.sampling.max-new-tokens 8",
    "compare --prompts": "--prompt-samples 1 --sampling.max-new-tokens 8",
    "probe": "--num-samples 1 --sampling.max-new-tokens 4",
    "audit": "--num-problems 2",
    "export": "--num-prompts 2 --max-new-tokens 4",
    "quantize": "--num-calibration 4",
}
"""Options that make a command small, where it does not give them itself."""

HAS_RAY = importlib.util.find_spec("ray") is not None

DRY = {
    "explain": "draws its lessons for a minute: tests/inspect/test_explain.py",
    "doctor": "attacks a sandbox, measures kernels: tests/sandbox, tests/kernels",
    "seeds": "a process for each seed: tests/inspect/test_seeds.py",
    "sweep": "a process for each setting: tests/inspect/test_sweep.py",
    "validate": "trains until thresholds are met: tests/inspect/test_validate.py",
    "diagnose": "measures a step for a minute: tests/inspect/test_diagnose.py",
    "profile": "measures a step for a minute: tests/inspect/test_profile_program.py",
    "push": "has a hub of its own: tests/serve/test_push.py",
    "merge": "needs two adapters of one base: tests/model/test_merging.py",
}
"""Commands that are checked by `--dry-run`, and why."""

DRY_LINES = {
    "serve BASE --policy.adapter": "needs two adapters of one base: tests/generate/test_several.py",
    **({} if HAS_RAY else {"rl demo --cluster": "needs Ray, with which make slow runs docs/cluster.md"}),
    "rl demo --rewards judge": "asks a judge's server",
    "rl demo-distill --teacher.init": "asks a teacher's server",
    "rl demo --track tensorboard wandb": "starts wandb's service",
    "rl qwen3-vl-8b-lora": "the tiny model earns nothing, and an adapter of zeros is warned of: tests/train",
    "rl own --model Qwen/Qwen3-VL-2B-Instruct": "the same",
    "rft qwen2.5-0.5b-math": "keeps what is right, and the tiny model knows no mathematics",
    "plan demo --policy.init runs/demo-sft --measure": "measures a step of the recipe's size",
}
"""Further lines, by how they begin, that are checked by `--dry-run`, and why."""

NOT_RUN = {
    "sft chess-boards": "1,400 steps: tests/learning/test_chess_learning.py",
    "sft facts": "reads what bench/patient.py writes: tests/recipes/test_recipe_data.py",
    "sft chess": "Stockfish searches 20,000 positions first: tests/learning/test_chess_learning.py",
    "rl chess": "the same: tests/learning/test_chess_learning.py",
    "eval chess": "needs Stockfish, and a model of chess: tests/eval/test_chess_eval.py",
    "chess": "waits for moves: tests/serve/test_play_chess.py",
    "edit": "needs a model that spells the reader's facts: tests/editing/test_edit_program.py",
    "trace": "the same",
    "infer": "needs runs that see and the reader's own pictures: tests/eval/test_infer.py",
    "rl demo --sampler.kind": "needs a server or vLLM: tests/train/test_samplers.py",
    "serve runs/demo-sft --port 8001 --weight-updates": "waits for a trainer: tests/train/test_samplers.py",
    "track runs/demo-rl --to mlflow": "needs an mlflow server: tests/telemetry/test_trackers.py has one",
    "export runs/demo-rl --to gguf --dtype q4_k_m": "needs xllamacpp: tests/compress/test_export.py",
    "pull me/demo-rl": "needs what `push` sent: tests/serve/test_push.py has a hub that keeps it",
}
"""Lines, by how they begin, that cannot run here, and why; they are parsed (tests/test_architecture.py)."""

MODELS = (
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-3B",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-4B-Base",
    "Qwen/Qwen3-4B",
    "openai-community/gpt2",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "roneneldan/stories260k",
)
"""Models of the hub that the pages and their recipes name: here all are one tiny model."""

SEEING = ("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-8B-Instruct")
"""Models that see: here all are another tiny model."""

EARLIER = (
    *(
        "runs/my-rl",
        "runs/rl",
        "runs/sft",
        "runs/gpt2-sft",
        "runs/stories260k-gsm8k-sft",
        "runs/gpt2-gsm8k-sft",
    ),
    *("runs/qwen2.5-0.5b-math-sft", "runs/qwen2.5-0.5b-math-rl", "runs/qwen2.5-3b-math-sft"),
    *("MODEL", "big-model", "path/to/tokenizer", "models/stories260k"),
)
"""Models that the reader of a page made before, over bytes."""


ALL_PRODUCTS = Products.problems


LEARNED = "runs/demo-sft"
STARTS = (LEARNED, "runs/demo-rl", "runs/rl-one")
"""Runs that the pages start from; the first has learned something, so a page that makes it makes it elsewhere."""


def easy_sums(self: Arithmetic, split: str) -> list[Problem]:
    """A task that a tiny model half knows after sixty steps: some of its completions are right."""
    pairs = [(a, b) for a in range(6) for b in range(6)]
    return [
        Problem(uid=f"{split}/{a}+{b}", task="arithmetic", prompt=f"{a}+{b}=", answer=str(a + b), solution="")
        for a, b in pairs
    ]


@cache
def first_products(split: str) -> tuple[Problem, ...]:
    return tuple(ALL_PRODUCTS(Products(), split)[:40])


def few_products(self: Products, split: str) -> list[Problem]:
    """The first products: all of them take seconds."""
    return list(first_products(split))


def snapshot(folder: Path, name: str) -> Path:
    """Refuse what the hub's client would."""
    if name not in (*MODELS, *SEEING):
        raise RepositoryNotFoundError(f"404 Client Error: {name}", response=None)  # pyright: ignore[reportArgumentType]
    return folder.with_name("bases") / "base-sees" if name in SEEING else folder


def install_models(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the hub's client find the models in a folder."""

    def one(name: str, file: str, **_: Any) -> str:
        path = snapshot(folder, name) / file
        if not path.is_file():
            raise EntryNotFoundError(f"404 Client Error: {file}")
        return str(path)

    patch.setattr(huggingface_hub, "hf_hub_download", one)
    patch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(snapshot(folder, name)))


MINE = """
def steps(problem, text):
    return min(text.count("="), 4) / 4

class MyTask:
    def problems(self, split):
        from whet.types import Problem
        about = {"task": "mine", "solution": ""}
        return [Problem(uid=f"{split}{n}", prompt=f"{n}+1=", answer=str(n + 1), **about) for n in range(9)]

    def is_correct(self, problem, answer):
        return answer == problem.answer
"""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        names = list(rows[0])
        lines = [",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(home: Path) -> None:
    """Write the files that the pages' readers have."""
    asked = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(24)]
    for name in ("rows.jsonl", "rows.csv"):
        write_rows(home / name, asked)
    solved = [row | {"solution": f"{n} and 1"} for n, row in enumerate(asked)]
    for name in ("solved.jsonl", "mine.jsonl"):
        write_rows(home / name, solved)
    write_rows(
        home / "mine.csv",
        [{"ask": row["question"], "reward_model.ground_truth": row["answer"]} for row in asked],
    )
    pairs = [{"prompt": f"Say {n}.", "chosen": f"{n}.", "rejected": f"Well, {n}."} for n in range(24)]
    write_rows(home / "pairs.jsonl", pairs)
    thumbs = [{"prompt": f"Say {n}.", "completion": f"{n}.", "label": n % 2 == 0} for n in range(24)]
    write_rows(home / "thumbs.jsonl", thumbs)
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes."}]
    write_rows(home / "chats.jsonl", [{"messages": chat}] * 24)
    (home / "questions.txt").write_text("2+2?\n")
    (home / "mine.py").write_text(MINE)
    (home / "doubles.py").write_text(MINE.replace("MyTask", "Doubles"))
    (home / "rubric.md").write_text("Is it right?")
    golden = ROOT / "tests/golden"
    for place in ("data/gsm8k", "data/math", "DATA"):
        for name in ("gsm8k", "math"):
            if place in (f"data/{name}", "DATA"):
                shutil.copytree(golden / name, home / place, dirs_exist_ok=True)


def write_adapter(home: Path, base: str) -> None:
    """Write a LoRA adapter for a run's model, as peft does, and the base that it names."""
    shutil.copytree(home / base, home / "BASE")
    weights = next((home / base).glob("checkpoints/*/model.safetensors"))
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    size_out, size_in = load_file(weights)[f"{names[0]}.weight"].shape
    parts = {"lora_A": torch.full((2, size_in), 0.01), "lora_B": torch.full((size_out, 2), 0.01)}
    (home / "ADAPTER").mkdir()
    tensors = {
        f"base_model.model.{name}.{part}.weight": tensor.clone()
        for name in names
        for part, tensor in parts.items()
    }
    save_file(tensors, home / "ADAPTER/adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": base,
    }
    (home / "ADAPTER/adapter_config.json").write_text(json.dumps(about))


def ranks_equal() -> ModuleType:
    """The program of bench/ that makes a tiny model that sees, over bytes."""
    spec = importlib.util.spec_from_file_location("ranks_equal", ROOT / "bench/ranks_equal.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny(recipe: Any, **changes: Any) -> Any:
    return replace(recipe, validation_problems=0, **changes)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of somebody who has run `make demo` and the stages that the pages build on."""
    home = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(Arithmetic, "problems", easy_sums)
        make_model(home / "my-model")
        ranks_equal().make_bases(home / "bases")
        write_data(home)
        start = sft_recipes.demo()
        shape = replace(start.policy.model, hidden_size=32, intermediate_size=64, head_dim=8)
        start = tiny(
            start, policy=replace(start.policy, model=shape, max_rows=64), num_steps=60, batch_size=32
        )
        start = replace(start, optim=replace(start.optim, lr=1e-2, schedule="constant", warmup_steps=2))
        patch.setattr(sft_recipes, "demo", lambda: start)
        after = tiny(rl_recipes.demo(), num_steps=2, num_prompts=4, group_size=2, save_every=1)
        patch.setattr(rl_recipes, "demo", lambda: after)
        demo.main(demo.DemoConfig(out="runs/demo", num_problems=4, num_samples=2, num_threads=1))
        for name, stage in zip(("RUN", *STARTS), ("rl", "sft", "rl", "rl"), strict=True):
            shutil.copytree(f"runs/demo/{stage}", name)
        fit = [*FIT.split(), "--validation-problems", "2", "--out", EARLIER[0]]
        assert __main__.main(["sft", "own", "--model", "my-model", "--data", "solved.jsonl", *fit]) == 0
        for name in EARLIER[1:]:
            shutil.copytree(EARLIER[0], name)
        words = [
            "eval",
            "gsm8k",
            "--model",
            EARLIER[0],
            "--task.path",
            "data/gsm8k",
            "--out",
            "runs/eval-base",
        ]
        assert __main__.main([*words, *SMALL["eval"].split()]) == 0
        shutil.copytree("runs/eval-base", "runs/eval-rl")
        shutil.copytree("my-model", "path/to/tokenizer", dirs_exist_ok=True)
        write_adapter(home, "runs/demo-sft")
    return home


def statements(page: Path) -> list[list[str]]:
    """Return a page's commands, each part of `A && B` for itself, without pipes and redirections."""
    found: list[list[str]] = []
    for program, *words in readme_commands(page):
        if program == "whet":
            line = "\0".join(words)
            parts = re.split(r"\0&&\0whet\0", line)
            found += [re.split(r"\0(?:\||&|>|2>&1)(?:\0|$)", part)[0].split("\0") for part in parts]
    return found


def starts(words: list[str], table: dict[str, str]) -> bool:
    line = " ".join(words)
    return any(line.startswith(start) for start in table)


def smaller(words: list[str]) -> list[str]:
    """Add the smallest sizes, but for what the command gives itself."""
    sizes = next((SMALL[f"{words[0]} {word}"] for word in words if f"{words[0]} {word}" in SMALL), None)
    if {"--policy.init", "--model"} & set(words):  # no random weights, whose shape could be given
        sizes = None if words[0] == "sft" else sizes
    sizes = SMALL.get(words[0], "") if sizes is None else sizes
    options = re.findall(r"(--\S+)((?: (?!--)\S+)*)", sizes)
    return [word for name, value in options if name not in words for word in (name, *value.split())]


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    status = __main__.main(words)
    out = capsys.readouterr()
    assert status == 0, f"whet {' '.join(words)}\n{out.out[-1500:]}{out.err}"
    return out.out


def execute(words: list[str], capsys: pytest.CaptureFixture[str], *, in_order: bool) -> None:
    """Run a command as the page has it.

    Args:
        words: What stands after `whet`.
        capsys: Takes what is printed.
        in_order: Whether the page's commands are run one after the other; else they are alternatives, and a run that
            is in a command's folder makes way.
    """
    if starts(words, NOT_RUN) or words[0].startswith("-") or "--help" in words:
        return
    if words[0] in ("serve", "watch"):
        words = [*words, "--port", "0"]
    # Two of each kind of process show what more would.
    words = [
        "2" if word.isdigit() and before.startswith("--cluster.") else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    if "--resume" in words and words[1].startswith("runs/"):  # the run's own sizes
        run([word if not word.isdigit() else "1" for word in words], capsys)
        return
    resumed, words = "--resume" in words, [*(word for word in words if word != "--resume"), *smaller(words)]
    is_dry = (words[0] in DRY and words[:2] != ["doctor", "cluster"]) or starts(words, DRY_LINES)
    out = out_of(words, capsys)
    if out and not in_order:
        if str(out) == LEARNED:
            words, out = [*words, "--out", f"{out}-2"], Path(f"{out}-2")
        shutil.rmtree(out, ignore_errors=True)
    if not (resumed and in_order):
        run([*words, *["--dry-run"] * is_dry], capsys)
    if resumed:
        run([*words, "--resume"], capsys)


def out_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> Path | None:
    """Return the folder that a command makes, where it is fixed."""
    found = re.search(r"^out: (\S+)$", run([*words, "--print-config"], capsys), re.M)
    return Path(found[1]) if found and found[1] != "''" and words[0] not in ("report", "runs") else None


@pytest.mark.parametrize(
    "page", [page for page in PAGES if statements(page)], ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_the_commands_of_a_page_run(
    page: Path,
    template: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "home"
    shutil.copytree(template, home)
    monkeypatch.chdir(home)
    monkeypatch.setattr(Arithmetic, "problems", easy_sums)
    monkeypatch.setattr(room, "free_memory", lambda: 64 * 2**30)
    monkeypatch.setattr(Products, "problems", few_products)
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **_: Path(path).touch()
    )  # tests/report looks at them
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)  # serves until Ctrl-C
    chats = {
        "default": {"train": [json.loads(line) for line in (home / "chats.jsonl").read_text().splitlines()]}
    }
    named = {
        "main": {"train": [{"question": f"{n}+1=", "gold": n + 1, "solution": "I add."} for n in range(24)]}
    }
    if page == README:  # after `make demo` alone
        for name in STARTS:
            shutil.rmtree(name)
    if page.parent.name == "algorithms":
        shutil.copyfile("pairs.jsonl", "mine.jsonl")
    hub.install(monkeypatch, owner__chats=chats, owner__name=named)
    install_models(monkeypatch, home / "my-model")
    for text in re.findall(r"```python[^\n]*\n(# [\w.]+\.py\n.*?)```", page.read_text(), re.S):
        name, _, body = text[2:].partition("\n")
        with Path(name).open("a") as file:
            file.write(body)
    for words in statements(page):
        monkeypatch.setattr(sys, "stdin", io.StringIO("47+85+39=\n"))
        execute(words, capsys, in_order=page == README)


def test_the_ranks_of_the_cluster_page_start(template: Path, tmp_path: Path) -> None:
    """Its lines for torchrun: programs of their own, which nothing here makes easier."""
    home = tmp_path / "home"
    shutil.copytree(template, home)
    blocks = [block for language, block in readme_blocks(ROOT / "docs/cluster.md") if language == "sh"]
    lines = [shlex.split(line)[1:] for block in blocks for line in block if line.startswith("torchrun ")]
    assert len(lines) >= 2
    for line in lines:
        start = line.index("whet") + 1
        words = [*line[:start], *line[start:], *smaller(line[start:])]
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        done = subprocess.run(
            command,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=280,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
