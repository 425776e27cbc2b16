"""Off-domain probe: judging by tables, shares by hand, perplexity against transformers, and what cannot be measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import SHARED, require

from whet import cli
from whet.eval.probe.off_domain import (
    KINDS,
    PROMPTS,
    ProbePrompt,
    is_numeric,
    is_right,
    measure_perplexity,
    probe_model,
    stated_answer,
)
from whet.eval.probe.probe import GENERAL_TEXT, ProbeConfig, main, plan, summarise
from whet.generate.engine import Completion, Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.schema import ResponseSchema
from whet.types import UserError

STORIES = SHARED / "data/models/stories260k"
SHORT = SamplingParams(temperature=0.7, max_new_tokens=8)
TEXT = GENERAL_TEXT.read_text(encoding="utf-8")[:400]


@pytest.fixture
def spelling(tiny_policy: PolicyConfig) -> PolicyConfig:
    """A tiny model that can spell everything."""
    shape = replace(tiny_policy.model, max_positions=128)
    return replace(tiny_policy, tokenizer="bytes", alphabet="", model=shape)


def saved(config: PolicyConfig, folder: Path, seed: int = 0) -> str:
    load_policy(config, seed=seed).save(folder)
    return str(folder)


def test_the_set() -> None:
    assert len(PROMPTS) == len({prompt.text for prompt in PROMPTS}) >= 18
    assert len(KINDS) == 6
    assert all(sum(prompt.kind == kind for prompt in PROMPTS) >= 3 for kind in KINDS)
    for prompt in PROMPTS:
        for answer in prompt.accepted:
            assert is_right(prompt, answer) is True
            assert is_right(prompt, f"  {answer.upper()}.\nmore") is True
            for rival in prompt.rivals:
                assert is_right(prompt, rival) is False
                assert is_right(prompt, f"{rival} or {answer}") is False  # naming all of them does not pay
        for wrong in ("", "99", "xyz", "-"):
            assert is_right(prompt, wrong) is (False if prompt.accepted else None)
        assert not is_numeric(prompt.text)
    assert len(GENERAL_TEXT.read_bytes()) > 3000


@pytest.mark.parametrize(
    ("index", "answer", "right"),
    [
        (0, "The capital of Portugal is Lisbon.", True),
        (0, "Lisbon", True),
        (0, "Lisbonne", False),  # whole words only
        (0, "It is Madrid. Then there is Lisbon.", False),  # the first sentence counts
        (9, "Yes, they do.", True),
        (9, "No. Yes.", False),
        (9, "yesterday", False),
        (20, "4", True),
        (20, "four", True),
        (20, "Each of them gets 4 biscuits.", True),
        (20, "12 / 3 = 4", True),
        (20, "Each gets 4, or 3", False),
        (20, "14", False),
    ],
)
def test_right_answers(index: int, answer: str, right: bool) -> None:
    assert is_right(PROMPTS[index], answer) is right


@pytest.mark.parametrize(
    ("answer", "numeric"),
    [("19", True), ("-3.5", True), ("24 - 6 = 18", True), ("1,000", True), ("$5", True), ("12 cm", True), ("½", False),
     ("", False), ("Lisbon", False), ("O2", False), ("two", False), ("It has 4 legs", False), ("...", False)],
)  # fmt: skip
def test_numeric_answers(answer: str, numeric: bool) -> None:
    assert is_numeric(answer) is numeric


def test_stated_answers() -> None:
    schema = ResponseSchema()
    found = {
        "a</think><answer> Lisbon </answer>": "Lisbon",
        "I think 3</think>\n\nLisbon it is\nand more": "Lisbon it is",
        "\n Lisbon \nQuestion: next": "Lisbon",
        "<answer>never closed": "<answer>never closed",
        "": "",
    }
    assert {text: stated_answer(text, schema) for text in found} == found


def windowed_by_transformers(folder: Path, ids: list[int], window: int, stride: int) -> float:
    """Sum -log p of every token but the first, each from the window that sees it first, one forward per window."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, scored, start = 0.0, 1, 0
    while scored < len(ids):
        part = torch.tensor([ids[start : start + window]])
        with torch.no_grad():
            logprobs = model(part).logits[0].double().log_softmax(-1)
        for place in range(scored - start, part.shape[1]):
            total -= float(logprobs[place - 1, part[0, place]])
        scored, start = start + part.shape[1], start + stride
    return total


@pytest.mark.parametrize("stride", [0, 1, 50, 127])
def test_perplexity_is_that_of_transformers(spelling: PolicyConfig, tmp_path: Path, stride: int) -> None:
    policy = load_policy(spelling, seed=3)
    policy.save(tmp_path)
    text = TEXT[: 140 if stride == 1 else 400]
    ids = policy.tokenizer.encode(text)
    found = measure_perplexity(policy, text, stride=stride)
    expected = windowed_by_transformers(tmp_path, ids, 128, stride or 64)
    assert found.num_tokens == found.num_bytes == len(text.encode()) - 1  # a token is a byte here
    assert found.nats_per_token == pytest.approx(expected / found.num_tokens, abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(expected / found.num_tokens), rel=1e-4)


def test_uniform_model_has_the_perplexity_of_its_vocabulary(spelling: PolicyConfig) -> None:
    policy = load_policy(spelling, seed=0)
    with torch.no_grad():
        policy.model.head_weight.zero_()
    assert measure_perplexity(policy, TEXT).perplexity == pytest.approx(policy.tokenizer.vocab_size, rel=1e-5)


def test_every_byte_counts_behind_a_bos() -> None:
    require("shared/data/models/stories260k")
    policy = load_policy(PolicyConfig(init=str(STORIES)), seed=0)
    found = measure_perplexity(policy, TEXT)
    assert found.num_bytes == len(TEXT.encode())
    assert found.num_tokens == len(policy.tokenizer.encode(TEXT))
    assert 8 < found.perplexity < 40  # of 512 tokens: it reads English


class Scripted:
    """An engine that answers every prompt with the same texts: one greedy, and the samples."""

    def __init__(self, policy: Policy, greedy: str, samples: Sequence[str]) -> None:
        self.policy, self.texts = policy, {True: [greedy], False: list(samples)}
        self.seeds: list[tuple[int, ...]] = []

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, **_: Any
    ) -> list[list[Completion]]:
        texts = self.texts[params.temperature == 0]
        self.seeds += [request.seeds for request in requests]
        assert all(len(request.seeds) == len(texts) for request in requests)
        ids = [tuple(self.policy.tokenizer.encode(text)) for text in texts]
        return [[Completion(ids=i, logprobs=(), finish_reason="stop") for i in ids] for _ in requests]


def scripted(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, name: str, greedy: str, samples: list[str]
) -> Any:
    engine = Scripted(policy, greedy, samples)
    monkeypatch.setattr(policy, "engine", lambda: engine)
    probe = probe_model(
        policy, name, TEXT, num_samples=len(samples), sampling=SHORT, stride=0, seed=0, on_finished=print
    )
    assert len(set(engine.seeds)) == 2 * len(PROMPTS)
    return probe


def test_shares_by_hand(spelling: PolicyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(spelling, seed=0)
    first = scripted(policy, monkeypatch, "a", "Lisbon", ["</think><answer>Saturn</answer>", "19", "4"])
    other = scripted(policy, monkeypatch, "b", "19", ["19", "20", "21"])
    content = summarise([first, other], ProbeConfig(models=("a", "b")))
    a, b = (model["kinds"] for model in content["models"])
    assert a["knowledge"]["greedy"]["mean"] == 1 / 4
    assert a["knowledge"]["right"]["mean"] == 0
    assert a["science"]["right"]["mean"] == pytest.approx(1 / 4 * 1 / 3)
    assert a["arithmetic"]["right"]["mean"] == pytest.approx(1 / 4 * 1 / 3)
    assert a["all"]["right"]["mean"] == pytest.approx(
        2 / 18 / 3
    )  # of 18 prompts with an answer, 2 in one sample of 3
    assert a["creative"]["right"] is None
    assert a["all"]["numeric"]["mean"] == pytest.approx(2 / 3)
    assert a["arithmetic"]["numeric"] is None
    assert (b["all"]["numeric"]["mean"], b["all"]["right"]["mean"]) == (1, 0)  # collapsed to numbers
    assert 0.8 < b["all"]["numeric"]["low"] < 1  # twenty prompts do not make it certain
    against = content["models"][1]["against_first"]
    assert against["right"]["mean"] == pytest.approx(-2 / 54)
    assert (against["nats_per_byte"], against["perplexity_ratio"]) == (0, 1)
    assert "against_first" not in content["models"][0]


def test_files(spelling: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = (saved(spelling, tmp_path / "x/sft"), saved(spelling, tmp_path / "x/rl", seed=1))
    config = ProbeConfig(models=models, out=str(tmp_path / "out"), sampling=SHORT, num_samples=2)
    assert "24 of 6 kinds" in plan(config)
    main(config)
    content = json.loads((tmp_path / "out/probe.json").read_text())
    assert [model["model"] for model in content["models"]] == list(models)
    assert all(model["remark"] == "" for model in content["models"])
    rows = [json.loads(line) for line in (tmp_path / "out/probe_samples.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * len(PROMPTS) * 3
    assert {row["sample"] for row in rows} == {"greedy", 0, 1}
    page = (tmp_path / "out/probe.md").read_text()
    assert all(prompt.text in page for prompt in PROMPTS)
    assert page.count("    sft, greedy") == page.count("    rl, 1") == len(PROMPTS)
    # Whatever the random models wrote, no line of it can end the block it stands in.
    body = page.partition("## Side by side")[2]
    assert all(line.startswith(("    ", "### ")) or not line for line in body.split("\n"))
    assert "\x1b" not in page
    out = capsys.readouterr().out
    assert "a number where the question asks for none" in out
    with pytest.raises(UserError, match="already exists"):
        main(config)


def test_a_model_of_digits_says_what_it_cannot_spell(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(ProbeConfig(models=(saved(tiny_policy, tmp_path / "m"),), out=str(tmp_path / "out"), sampling=SHORT))
    (model,) = json.loads((tmp_path / "out/probe.json").read_text())["models"]
    assert len(model["skipped"]) == len(PROMPTS)
    assert model["perplexity"] is None
    assert model["kinds"]["all"]["right"] is None
    out = capsys.readouterr().out
    assert f"{len(PROMPTS)} of {len(PROMPTS)} prompts are skipped: the tokenizer cannot spell them" in out
    assert "no perplexity" in out


def test_prompts_longer_than_the_context_are_skipped(spelling: PolicyConfig) -> None:
    policy = load_policy(replace(spelling, model=replace(spelling.model, max_positions=70)), seed=0)
    probe = probe_model(policy, "m", TEXT, num_samples=1, sampling=SHORT, stride=0, seed=0, on_finished=print)
    # A byte each, and the tag that opens the thinking; bare text for a continuation.
    long = [p for p in PROMPTS if len(p.text) + (p.kind != "continuation") >= 70]
    assert 0 < len(long) < len(PROMPTS)
    assert list(probe.skipped) == [prompt.text for prompt in long]
    assert f"{len(long)} of {len(PROMPTS)} prompts are skipped: the context is too short" in probe.remark


def test_transcripts(spelling: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(spelling, tmp_path / "m")
    main(ProbeConfig(models=(model,), transcript="1+1=", out=str(tmp_path / "out"), sampling=SHORT))
    (found,) = json.loads((tmp_path / "out/transcript.json").read_text())
    assert found["counts"]["prompt"] == 5  # four characters and the tag that opens the thinking
    assert found["counts"]["generated"] == len(found["rows"]) - 5
    assert "[  0] id=   49  '1'" in capsys.readouterr().out  # byte 49
    main(ProbeConfig(models=(model,), transcript="1+1=", sampling=SHORT))  # without a folder it is only shown
    assert "GENERATED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "models: got none; name one or more"),
        ("--models {m} {m}", "given twice"),
        ("--models {m} nowhere", "'nowhere': no such run or folder"),
        ("--models {m} --num-samples 0", "num_samples = 0: expected 1 or more"),
        ("--models {m} --stride 999", "stride = 999: expected 0"),
        ("--models {m} --stride -1", "stride = -1"),
        ("--models {m} --text nothing.txt", "nothing.txt: cannot be read (No such file or directory)"),
        ("--models {m} --text {m}", "cannot be read (Is a directory)"),
        ("--models {m} --text {m}/model.safetensors", "is not UTF-8; expected a plain text file"),
        ("--models {m} --text {empty}", "it is empty; expected at least a page"),
        ("--models {m} --text {large}", "expected at most 4,194,304: give an excerpt"),
        ("--models {m} --text {one}", "expected at least 2"),
        ("--models {m} --sampling.temperature 0", "greedy is shown anyway"),
        ("--models {m} --template jinja", "expected"),
        ("--models {m} --device gpu", "expected auto, cpu, cuda"),
        ("--models {digits} --transcript abc", "the tokenizer does not know 'abc'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    words: str,
    message: str,
    spelling: PolicyConfig,
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {name: str(tmp_path / name) for name in ("empty", "large", "one")}
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "one").write_text("x")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(5 << 20)
    names |= {"m": saved(spelling, tmp_path / "m"), "digits": saved(tiny_policy, tmp_path / "d")}
    argv = [*words.format(**names).split(), "--out", str(tmp_path / "out"), "--sampling.max-new-tokens", "4"]
    options: dict[str, Any] = {"resumable": False, "positional": "models"}
    status = cli.guard(lambda: main(cli.parse("whet probe", ProbeConfig, {}, argv, **options).config))
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1
    assert message in error
    assert "nowhere" not in words or not (tmp_path / "out").exists()


def test_kinds_cover_the_prompt_type() -> None:
    assert ProbePrompt("arithmetic", "x").asks_number
    assert not ProbePrompt("knowledge", "x").asks_number
