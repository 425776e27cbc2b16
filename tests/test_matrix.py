"""Every command with every kind of model: it works, or one line refuses it before anything is computed.

The commands run in this process, on models of some thousand random parameters. `make test` walks the cheap rows of the
table, `.ci/run` all but the dearest.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from seeing import png, save_adapter, uri
from seeing import save_model as save_seeing
from torch.nn.modules.module import register_module_forward_pre_hook

from whet import __main__
from whet.compress.export.gguf import write_gguf
from whet.compress.export.vocabulary import express
from whet.generate.engine import Engine
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.model.config import ModelConfig
from whet.model.quant import packed_parts, quantize
from whet.model.text.template import PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model, save_model
from whet.schema import SCHEMAS
from whet.tasks.base import TaskConfig, load_task

SHAPE = ModelConfig(
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_positions=1024,
    init_std=0.2,
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("text", "seeing", "adapter", "seeing_adapter", "quantised", "chat", "base", "chat.gguf")
SEEING = ("seeing", "seeing_adapter")
BLIND = tuple(kind for kind in KINDS if kind not in SEEING)


def make_text(where: Path, tokenizer: Tokenizer, *, in_bits: bool = False) -> None:
    """A text model as whet saves it: with a schema."""
    model = build_model(replace(SHAPE, vocab_size=tokenizer.vocab_size))
    init_weights(model, 0)
    if in_bits:
        quantize(model, "nf4")
    Policy(model, tokenizer, SCHEMAS["think_answer"]).save(where)


def make_foreign(where: Path, roles: list[str], template: str | None) -> None:
    """A model as others save it: no protocol.json, with or without a chat template."""
    tokens = Tokenizer.bytes(roles)
    tokens = Tokenizer(
        tokens._backend, roles={"eos_token": roles[-1], "pad_token": "<pad>"}, chat_template=template
    )
    model = build_model(replace(SHAPE, vocab_size=tokens.vocab_size))
    init_weights(model, 0)
    tokens.save(where)
    save_model(model, where, bos_id=None, eos_ids=tuple(tokens.stop_ids))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model of each kind, and what commands read."""
    torch.set_num_threads(1)
    where = tmp_path_factory.mktemp("matrix")
    tags = SCHEMAS["think_answer"].tags
    tokenizer = Tokenizer.bytes(tags).with_template(PLAIN_TEMPLATE)
    make_text(where / "text", tokenizer)
    make_text(where / "quantised", tokenizer, in_bits=True)
    with_images = Tokenizer.bytes([*tags, "<image>"]).with_template(PLAIN_TEMPLATE)
    save_seeing(where / "seeing", tokenizer=with_images, max_positions=1024)
    save_adapter(where / "text", where / "adapter")
    save_adapter(where / "seeing", where / "seeing_adapter")
    make_foreign(where / "chat", ["<|im_start|>", "<|im_end|>"], CHATML)
    make_foreign(where / "base", ["<|endoftext|>"], None)
    chat = load_policy(PolicyConfig(init=str(where / "chat")), seed=0)
    vocabulary = express(chat.tokenizer, chat.tokenizer.vocab_size, chat.stop_ids).with_template(CHATML)
    write_gguf(chat.model, vocabulary, where / "chat.gguf", "f32")
    images = [uri(9), uri(30, 200), uri(1, 9, 70)]
    (where / "images").mkdir()
    (where / "images/one.png").write_bytes(png(images[1]))
    rows = [
        {
            "question": f"{'abcdefghij'[n % 10]}{'abcdefghij'[n // 10]}=",
            "answer": str(n % 7),
            "solution": str(n % 3),
        }
        for n in range(100)
    ]
    write_rows(where / "rows.jsonl", rows)
    write_rows(where / "seen.jsonl", [row | {"image": images[n % 3]} for n, row in enumerate(rows)])
    write_rows(
        where / "pairs.jsonl",
        [{"prompt": f"say {n}", "chosen": f"{n}", "rejected": f"{n}{n}"} for n in range(40)],
    )
    write_rows(
        where / "contrast.jsonl", [{"positive": f"good {n}", "negative": f"bad {n}"} for n in range(4)]
    )
    write_rows(where / "facts.jsonl", [{"subject": "Bob", "prompt": "{} is in", "target": "Rome"}])
    return where


@dataclass
class Outcome:
    """What a command did.

    Attributes:
        out: Its output folder.
        printed: Its standard output.
        passes: Forward passes of a language model.
    """

    kind: str
    home: Path
    out: Path
    printed: str
    err: str
    passes: int

    @property
    def model(self) -> Path:
        """Folder of the model that it was given."""
        return self.home / self.kind

    def json(self, name: str) -> Any:
        """Read a file of the output."""
        return json.loads((self.out / name).read_text())


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the forward passes of language models, and the admissions of engines, whose kernels run no module."""
    found, admit = [0], Engine.admit

    def forward(module: torch.nn.Module, inputs: Any) -> None:
        found[0] += isinstance(module, LanguageModel)

    def admitted(*args: Any) -> None:
        found[0] += 1
        admit(*args)

    handle = register_module_forward_pre_hook(forward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "admit", admitted)
        try:
            yield found
        finally:
            handle.remove()


def policy_of(folder: Path) -> Policy:
    return load_policy(
        PolicyConfig(init=str(folder)), seed=0, merge=(folder / "adapter_config.json").is_file()
    )


def greedy(folder: Path, count: int = 6) -> list[int]:
    """Return the likeliest tokens after a text, by whole rows of logits: the engine has no part in it."""
    policy = policy_of(folder)
    ids = list(policy.tokenizer.encode("ab="))
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(policy.model.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy_of(folder).model.named_parameters()}


def difference(before: Path, after: Path) -> dict[str, float]:
    """Return the size of the change of every matrix that changed."""
    old, new = weights_of(before), weights_of(after)
    assert old.keys() == new.keys()
    return {name: size for name in old if (size := float((old[name] - new[name]).norm()))}


# What is true of a command that worked.


def trained(found: Outcome) -> None:
    """The decoder's weights moved, a tower stayed, and the run loads."""
    moved = difference(found.model, found.out)
    assert any("layers" in name for name in moved)
    assert not any(name.startswith("visual.") for name in moved)


def trained_adapter(found: Outcome) -> None:
    """An adapter on the model, which moves it where it is merged."""
    assert (next((found.out / "checkpoints").glob("*/adapter_config.json"))).is_file()


def evaluated(found: Outcome) -> None:
    content = found.json("eval.json")
    rows = (found.out / "eval_samples.jsonl").read_text().splitlines()
    assert (content["num_problems"], len(rows)) == (2, 2 * (2 + 1))
    assert math.isfinite(content["metrics"]["pass@1"]["mean"])
    assert bool(json.loads(rows[0]).get("images")) == (found.kind in SEEING)


def compared(found: Outcome) -> None:
    """A model and its copy are right and wrong about the same."""
    content = found.json("compare.json")
    (verdicts,) = content["verdicts"]
    assert verdicts["both right"] + verdicts["both wrong"] == len(content["uids"]) > 0
    assert "no difference could be shown" in content["verdict"]


def asked(found: Outcome) -> None:
    """Greedy and one sample of each model: an adapter is asked on and off."""
    names = [row["name"] for row in found.json("infer.json")["models"]]
    assert len(names) == 1 + found.kind.endswith("adapter")
    assert all(len((found.out / f"{name}.jsonl").read_text().splitlines()) == 2 for name in names)


def probed(found: Outcome) -> None:
    assert len((found.out / "probe_samples.jsonl").read_text().splitlines()) > 0
    assert (found.out / "probe.json").is_file()


def steered(found: Outcome) -> None:
    vectors = load_file(found.out / "steering.safetensors")
    assert vectors
    assert all(v.isfinite().all() and v.norm() > 0 for v in vectors.values())


def traced(found: Outcome) -> None:
    assert "would say" in found.printed
    assert (found.out / "trace.html").is_file()


def edited(found: Outcome) -> None:
    """Matrices of the feed-forward parts alone changed."""
    moved = difference(found.model, found.out)
    assert moved
    assert all(".mlp.down_proj" in name for name in moved)


def said_something(found: Outcome) -> None:
    assert found.passes > 0, found


def exported(found: Outcome) -> None:
    """The other runtime agrees, and what was written says the same."""
    report = found.json("export_report.json")
    assert report["verdict"] in ("passed", "not checked"), report
    assert greedy(found.out) == greedy(found.model)


def quantised(found: Outcome) -> None:
    """Matrices in few bits, close to what they were; the tower as it was."""
    policy = policy_of(found.out)
    assert packed_parts(policy.model)
    assert 0 < found.json("quantization.json")["kl"] < 5
    before, after = weights_of(found.model), dict(policy.model.named_parameters())
    tower = [name for name in after if name.startswith("visual.")]
    assert bool(tower) == (found.kind in SEEING)
    assert all(torch.equal(before[name], after[name]) for name in tower)


def same_words(found: Outcome) -> None:
    """The merge of one model with its base is the model."""
    assert greedy(found.out) == greedy(found.model)


def planned(found: Outcome) -> None:
    assert "GiB" in found.printed
    assert found.passes == 0


def rehearsed(found: Outcome) -> None:
    assert found.passes == 0
    assert not found.out.exists()


def looked_at(found: Outcome) -> None:
    """Rows are shown as they are learnt."""
    assert found.json("report.json")["rendered"]
    assert found.passes == 0


def diagnosed(found: Outcome) -> None:
    """Nothing fails but what depends on the machine."""
    parts = found.json("diagnose.json")["components"]
    failed = [
        check["name"] for part in parts.values() for check in part["checks"] if check["status"] == "fail"
    ]
    assert failed == []


FULL_TRAINING = {"quantised": "quantised, and its matrices cannot be trained: train an adapter"}
IN_BITS = {"quantised": "quantised"}
BLIND_TO_IMAGES = dict.fromkeys(BLIND, "model reads text alone")
RL = (
    "--num-steps 1 --num-prompts 2 --group-size 2 --sampling.max-new-tokens 4 --max-dead-steps 9 "
    "--validation-problems 0 --preflight warn --algo.uninformative keep --rewards repetition 1"
)
FIT = "--num-steps 1 --batch-size 2 --optim.lr 1e-2 --optim.warmup-steps 0"
SHORT = "--num-problems 2 --num-samples 2 --sampling.max-new-tokens 3"


@dataclass(frozen=True)
class Row:
    """One command.

    Attributes:
        line: Its words; MODEL, DATA and OUT stand for those of a cell, BASE for the base of an adapter.
        check: Asserts what is true where it worked.
        refused: The kinds that it refuses, and the words that say why.
        cheap: Whether `make test` walks it.
        status: Exit status where it works.
    """

    line: str
    check: Callable[[Outcome], None]
    refused: dict[str, str] = field(default_factory=dict)
    cheap: bool = False
    status: tuple[int, ...] = (0,)


ROWS = {
    "sft": Row(
        f"sft own --model MODEL --data DATA {FIT} --validation-problems 0 --out OUT", trained, FULL_TRAINING
    ),
    "sft, adapter": Row(
        f"sft own --model MODEL --data DATA {FIT} --validation-problems 0 --lora.rank 4 --out OUT",
        trained_adapter,
    ),
    "rl": Row(f"rl own --model MODEL --data DATA {RL} --out OUT", said_something, FULL_TRAINING),
    "rl, adapter": Row(f"rl own --model MODEL --data DATA {RL} --lora.rank 4 --out OUT", trained_adapter),
    "dpo": Row(f"dpo own --model MODEL --data pairs.jsonl {FIT} --out OUT", trained, FULL_TRAINING),
    "rft": Row(
        "rft demo --task jsonl --task.path DATA --model MODEL --out OUT --dry-run", rehearsed, FULL_TRAINING
    ),
    "edit": Row(
        "edit MODEL --facts facts.jsonl --edit.target.steps 2 --edit.num-contexts 1 --layers 0 --num-problems 0 "
        "--out OUT",
        edited,
        IN_BITS,
    ),
    "eval": Row(f"eval own --model MODEL --data DATA {SHORT} --no-hardware --out OUT", evaluated),
    "compare": Row(
        "compare MODEL TWIN --eval own --data DATA --eval.num-problems 2 --eval.num-samples 2 "
        "--eval.sampling.max-new-tokens 3 --out OUT",
        compared,
    ),
    "infer": Row(
        "infer MODEL --prompt ab= --sampling.max-new-tokens 3 --num-samples 1 --out OUT", asked, cheap=True
    ),
    "infer, images": Row(
        "infer MODEL --images images --prompt ab= --sampling.max-new-tokens 3 --num-samples 1 --out OUT",
        asked,
        BLIND_TO_IMAGES,
        cheap=True,
    ),
    "probe": Row("probe MODEL --num-samples 1 --sampling.max-new-tokens 2 --out OUT", probed),
    "trace": Row("trace MODEL --prompt Bob~is~in --subject Bob --out OUT", traced),
    "steer": Row("steer MODEL --pairs contrast.jsonl --out OUT", steered, cheap=True),
    "chat": Row("chat MODEL --prompt ab= --sampling.max-new-tokens 3", said_something, cheap=True),
    "chat, images": Row(
        "chat MODEL --prompt ab= --images images/one.png --sampling.max-new-tokens 3",
        said_something,
        BLIND_TO_IMAGES,
        cheap=True,
    ),
    "serve": Row("serve MODEL --dry-run", rehearsed, cheap=True),
    "export": Row("export MODEL --to hf --dtype f32 --num-prompts 2 --max-new-tokens 3 --out OUT", exported),
    "push": Row(
        "push MODEL me/x --dry-run",
        rehearsed,
        {"chat.gguf": "is a file, expected a run or a folder"},
        cheap=True,
    ),
    "quantize": Row(
        "quantize MODEL --task jsonl --task.path DATA --num-calibration 2 --num-held-out 2 --num-problems 0 "
        "--methods rtn --sampling.max-new-tokens 3 --random-seeds 0 --out OUT",
        quantised,
        {"quantised": "quantised already"},
    ),
    "quantize, solutions": Row(
        "quantize MODEL --task jsonl --task.path DATA --num-calibration 2 --num-held-out 2 --num-problems 0 "
        "--methods rtn --completions data --random-seeds 0 --out OUT",
        quantised,
        {"quantised": "quantised already"},
    ),
    "merge": Row("merge MODEL --base BASE --out OUT", same_words, IN_BITS, cheap=True),
    "plan": Row("plan own --model MODEL --data DATA", planned),
    "diagnose": Row(
        "diagnose own --of sft --model MODEL --data DATA --batch-size 2 --repeats 1 --rounds 0 --out OUT",
        diagnosed,
        FULL_TRAINING,
        status=(0, 1),
    ),
    "profile": Row(
        "profile own --of sft --model MODEL --data DATA --out OUT --dry-run", rehearsed, FULL_TRAINING
    ),
    "sweep": Row(
        "sweep own --of sft --model MODEL --data DATA --out OUT --dry-run", rehearsed, FULL_TRAINING
    ),
    "seeds": Row(
        "seeds own --model MODEL --data DATA --seeds 0 1 --out OUT --dry-run", rehearsed, FULL_TRAINING
    ),
    "data": Row("data jsonl --task.path DATA --tokenizer MODEL --out OUT", looked_at),
}
"""The commands that read a model, or are asked by its tokenizer."""
LEFT_OUT = {
    "demo": "makes its own model; with images: tests/learning",
    "validate": "runs recipes with models of their own: tests/inspect/test_validate.py",
    "explain": "reads nothing",
    "doctor": "looks at the machine",
    "runs": "reads folders, whatever made them: tests/report/test_registry.py",
    "report": "reads a run's files: tests/report",
    "watch": "the same",
    "track": "the same: tests/telemetry/test_trackers.py",
    "pull": "downloads: tests/serve/test_push.py",
    "audit": "reads a task; its images: tests/eval/test_audit.py",
    "chess": "to be removed",
    "replay": "to be removed",
}
"""Commands that no cell is of, and why."""


def test_every_command_is_in_the_table_or_has_a_reason() -> None:
    named = {row.line.partition(" ")[0] for row in ROWS.values()}
    assert not named & LEFT_OUT.keys()
    assert named | LEFT_OUT.keys() == set(__main__.COMMANDS)


DEAR = ("export", "diagnose", "plan", "quantize")
"""Commands that take seconds each: `.ci/run` has three kinds of model, `make slow` all."""


def cells() -> Iterator[Any]:
    for name, row in ROWS.items():
        for kind in KINDS:
            is_dear = name.split(",")[0] in DEAR and kind not in ("text", "seeing", "quantised")
            marks = [] if row.cheap else [pytest.mark.slow if is_dear else pytest.mark.ci]
            yield pytest.param(row, kind, id=f"{name}-{kind}", marks=marks)


# Random weights may earn equal rewards in a step, which then changes nothing.
@pytest.mark.filterwarnings("ignore:.*changes are all zero")
@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(("row", "kind"), list(cells()))
def test_it_works_or_is_refused_before_anything_is_computed(
    row: Row,
    kind: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("whet.model.gguf.cache_folder", lambda: home / "cache")
    out = tmp_path / "out"
    if "TWIN" in row.line:
        copy = shutil.copytree if (home / kind).is_dir() else shutil.copyfile
        copy(home / kind, tmp_path / f"twin{Path(kind).suffix}")
    base = kind.removesuffix("_adapter") if kind != "adapter" else "text"
    filled = {
        "MODEL": kind,
        "TWIN": str(tmp_path / f"twin{Path(kind).suffix}"),
        "BASE": base,
        "OUT": str(out),
        "DATA": "seen.jsonl" if kind in SEEING else "rows.jsonl",
    }
    words = [filled.get(word, word).replace("~", " ") for word in row.line.split()]
    with counted() as passes:
        status = __main__.main(words)
    told = capsys.readouterr()
    if kind not in row.refused:
        assert status in row.status, told.err[-2000:] + told.out[-2000:]
        row.check(Outcome(kind, home, out, told.out, told.err, passes[0]))
        return
    assert status == 2, told.out[-2000:]
    error = told.err.strip().splitlines()
    assert [line for line in error if line.startswith("whet: error: ")] == error[-1:], error
    assert row.refused[kind] in error[-1]
    assert passes == [0]
    assert not out.exists()


def test_a_dry_run_counts_the_tokens_of_images_as_the_run_does(home: Path) -> None:
    """Without weights, too, the folder says how images are cut."""
    row = json.loads((home / "seen.jsonl").read_text().splitlines()[1])
    config = PolicyConfig(init=str(home / "seeing"))
    task = load_task(TaskConfig(name="jsonl", path=str(home / "seen.jsonl")))
    problem = next(p for p in task.problems("train") if p.prompt == row["question"])
    planned, real = (len(load_policy(config, seed=0, weights=w).prompt_ids(problem)) for w in (False, True))
    assert planned == real


READERS = {
    "eval": f"eval own --model MODEL --data rows.jsonl {SHORT} --out OUT",
    "compare": "compare MODEL text --eval own --data rows.jsonl --out OUT",
    "infer": "infer MODEL --prompt ab= --out OUT",
    "probe": "probe MODEL --out OUT",
    "chat": "chat MODEL --prompt ab=",
    "serve": "serve MODEL --port 0",
    "rl": f"rl own --model MODEL --data rows.jsonl {RL} --out OUT",
}


@pytest.mark.parametrize("name", READERS)
def test_weights_that_are_no_numbers_are_refused_before_sampling(
    name: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in home.iterdir():
        (tmp_path / path.name).symlink_to(path)
    make_text(
        tmp_path / "damaged", Tokenizer.bytes(SCHEMAS["think_answer"].tags).with_template(PLAIN_TEMPLATE)
    )
    tensors = load_file(tmp_path / "damaged/model.safetensors")
    last = sorted(tensors)[-1]
    tensors[last].view(-1)[-1] = math.nan
    save_file(tensors, tmp_path / "damaged/model.safetensors", metadata={"format": "pt"})
    filled = {"MODEL": "damaged", "OUT": "out"}
    with counted() as passes:
        status = __main__.main([filled.get(word, word) for word in READERS[name].split()])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert (status, passes) == (2, [0]), error
    assert error.startswith("whet: error: ")
    assert last in error
    assert "contains NaN or infinity" in error


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "cuda:one"])
@pytest.mark.parametrize(
    "words", [READERS["eval"], READERS["rl"], f"{READERS['rl']} --dry-run", READERS["serve"]]
)
def test_devices_that_cannot_be_used_are_refused(
    words: str,
    device: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(home)
    filled = {"MODEL": "text", "OUT": str(tmp_path / "out")}
    given = [filled.get(word, word) for word in words.split()]
    assert __main__.main([*given, "--policy.device", device]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"whet: error: .*policy\.device = '\S+': expected auto, cpu, cuda or cuda:N\n", error)
    assert not (tmp_path / "out").exists()
