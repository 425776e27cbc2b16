"""Learning rates by size, and token limits by a task's worked solutions, for the command line and Python alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import whet
from whet import api
from whet.generate.policy import PolicyConfig
from whet.model.lora.side import LoRAConfig
from whet.recipes import evaluation as eval_recipes
from whet.recipes import rl as rl_recipes
from whet.recipes import sft as sft_recipes
from whet.recipes.suited import suited, token_limit
from whet.tasks.base import TaskConfig
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig


def model_of(folder: Path, hidden: int) -> str:
    """Write the shape of a Llama with 24 layers; no weights."""
    shape = {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
    }
    heads = {"num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(shape | heads))
    return str(folder)


# 24 layers of 16 hidden² and two tables of 32,000 rows: 6e6, 1.7e8, 4.7e8, 1.7e9 and 6.7e9 weights.
@pytest.mark.parametrize(
    ("hidden", "rl", "sft"),
    [(64, 1e-5, 1e-3), (576, 1e-5, 2e-4), (1024, 5e-6, 2e-5), (2048, 2e-6, 2e-5), (4096, 1e-6, 1e-5)],
)
def test_the_rate_suits_the_size_of_the_model(
    hidden: int, rl: float, sft: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same from the command line and from Python; ten times as much for adapters, 1e-4 to 1e-3."""
    init = model_of(tmp_path, hidden)
    for config, expected in ((rl_recipes.own(), rl), (sft_recipes.own(), sft)):
        own: Any = replace(config, policy=replace(config.policy, init=init), task=TaskConfig())
        capsys.readouterr()
        assert suited(own, frozenset()).optim.lr == expected
        said = f"# optim.lr = {expected:g}, which suits all weights of a model of "
        assert (said in capsys.readouterr().out) == (expected != own.optim.lr)
        assert suited(own, frozenset({"optim.lr"})).optim.lr == own.optim.lr
        adapted = suited(replace(own, lora=LoRAConfig(rank=8)), frozenset()).optim.lr
        assert adapted == pytest.approx(min(max(10 * expected, 1e-4), 1e-3))
    policy = PolicyConfig(init=init)
    for cls, expected in ((RLConfig, rl), (SFTConfig, sft)):
        given: dict[str, Any] = {"out": "x", "policy": policy}
        python: Any = api._made(cls, given)
        capsys.readouterr()
        assert api._suited(python, {"optim": "lean"}, verbose=True).optim.lr == expected
        assert (f"whet: lr = {expected:g}, which" in capsys.readouterr().out) == (expected != python.optim.lr)
        for options in ({"lr": 3e-5}, {"optim": {"lr": 3e-5}}):
            config: Any = api._made(cls, given | options)
            assert api._suited(config, options, verbose=False).optim.lr == 3e-5


def rows_of(folder: Path, lengths: list[int]) -> str:
    """Write a folder of rows whose solutions have so many bytes."""
    folder.mkdir()
    rows = [
        {"question": f"What is {n} + 0?", "solution": "x" * length, "answer": n}
        for n, length in enumerate(lengths)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for part in ("train", "test"):
        (folder / f"{part}.jsonl").write_text(text)
    return str(folder)


def test_the_limit_on_completions_goes_by_the_worked_solutions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice what 95 % of them take, a multiple of 64 from 128 on, and never above the recipe's own."""
    bytes_ = PolicyConfig(tokenizer="bytes")  # one token a byte
    # Under 5 % are very long; the others have 100 to 109 bytes.
    lengths = [100 + n % 10 for n in range(97)] + [5000] * 3
    task = TaskConfig(name="jsonl", path=rows_of(tmp_path / "a", lengths))
    assert token_limit(bytes_, task, 512) == (
        256,
        "95 % of the worked solutions take at most 109 of the model's tokens",
    )
    short = TaskConfig(name="jsonl", path=rows_of(tmp_path / "b", [20] * 50))
    assert token_limit(bytes_, short, 512) is not None
    for recipe, name in ((rl_recipes.own(), "rl"), (eval_recipes.own(), "eval")):
        own: Any = replace(recipe, policy=bytes_, task=short)
        assert suited(own, frozenset()).sampling.max_new_tokens == 128, name
        assert "# sampling.max_new_tokens = 128: 95 %" in capsys.readouterr().out
        for typed in ("sampling.max_new_tokens", "sampling"):
            assert suited(own, {typed}).sampling.max_new_tokens == 512
        long: Any = replace(own, task=TaskConfig(name="jsonl", path=rows_of(tmp_path / name, [400] * 50)))
        assert suited(long, frozenset()).sampling.max_new_tokens == 512
    # Without worked solutions the recipe's own stays.
    answers = tmp_path / "answers.jsonl"
    answers.write_text(
        "".join(json.dumps({"question": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(99))
    )
    assert token_limit(bytes_, TaskConfig(name="jsonl", path=str(answers)), 512) is None
    assert token_limit(bytes_, TaskConfig(name="arithmetic"), 512) is None
    # `whet.evaluate` and `whet.rl` take the same.
    config = api._made(RLConfig, {"out": "x", "policy": bytes_, "task": short})
    assert api._suited(config, {}, verbose=True).sampling.max_new_tokens == 128
    assert "whet: max_new_tokens = 128: 95 %" in capsys.readouterr().out
    policy = api.Policy(bytes_)
    asked: list[int] = []

    def measure(*arguments: Any, sampling: Any, **_: Any) -> Any:
        asked.append(sampling.max_new_tokens)
        return None

    monkeypatch.setattr(api, "measure", measure)
    for limit in (None, 7):
        result = whet.evaluate(policy, api.Task(short), num_problems=2, max_new_tokens=limit)
        assert result.prompts.endswith(f"at most {asked[-1]} tokens")
    assert asked == [128, 7]
