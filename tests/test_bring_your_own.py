"""docs/bring_your_own.md from top to bottom, in an empty folder: the page's files, its commands, its Python."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub
import pytest

from whet import __main__
from whet.generate.policy import PolicyConfig, load_policy
from whet.model.config import ModelConfig
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model, save_model

PAGE = Path(__file__).resolve().parent.parent / "docs/bring_your_own.md"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {
    "rl": "--num-steps 2 --num-prompts 2 --group-size 2 --sampling.max-new-tokens 16 --max-dead-steps 9",
    "sft": "--num-steps 2 --batch-size 4 --validation-problems 4",
    "dpo": "--num-steps 2 --batch-size 4",
    "eval": "--num-problems 4 --num-samples 2 --sampling.max-new-tokens 16",
    "compare": "--eval.num-problems 4 --eval.num-samples 2 --eval.sampling.max-new-tokens 16",
}
"""What the commands are made small with."""


def own_shape(tokens: Tokenizer, **more: Any) -> ModelConfig:
    """Return the shape of a tiny model."""
    shape = ModelConfig(
        vocab_size=tokens.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=2048,
    )
    return replace(shape, **more)


def make_model(folder: Path) -> None:
    """Write an instruct-shaped model as others save it: a chat template, no protocol of ours."""
    tokens = Tokenizer.bytes(["<|im_start|>", "<|im_end|>"])
    model = build_model(own_shape(tokens))
    init_weights(model, 0)
    roles = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    tokens = Tokenizer(tokens._backend, roles=roles, chat_template=CHATML)
    tokens.save(folder)
    save_model(model, folder, bos_id=None, eos_ids=tuple(tokens.stop_ids))


def blocks() -> list[tuple[str, str]]:
    """Return the page's fenced blocks: language and text."""
    return re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.install(monkeypatch)
    make_model(tmp_path / "my-model")
    done = []
    for language, text in blocks():
        if named := re.match(r"# ([\w.]+\.(?:py|yaml))\n", text):
            (tmp_path / named[1]).write_text(text)
        elif language == "python":
            subprocess.run([sys.executable, "-c", text], check=True, timeout=200)
        else:
            assert language == "sh", f"a block of {language} without a file's name"
            for line in text.splitlines():
                words = shlex.split(line, comments=True)
                if words[0] == "python":
                    subprocess.run([sys.executable, *words[1:]], check=True, timeout=60)
                    continue
                with monkeypatch.context() as patch:
                    if words[1] in done:  # the curves of one run of each program are enough
                        patch.setattr("whet.report.markdown.draw_figures", lambda series, folder: [])
                    status = __main__.main([*words[1:], *SMALL.get(words[1], "").split()])
                out = capsys.readouterr()
                assert status == 0, f"{line}\n{out.out[-2000:]}{out.err}"
                done.append(words[1])
    assert {"data", "eval", "rl", "sft", "dpo", "compare"} <= set(done)
    # Plain chats leave a plain model: nothing is asked for that it has not learned.
    protocols = list((tmp_path / "runs/own-sft/checkpoints").glob("*/protocol.json"))
    assert protocols
    assert all("schema" not in json.loads(path.read_text()) for path in protocols)
    assert "<think>" not in load_policy(PolicyConfig(init="runs/own-sft"), seed=0, plain=True).chat_text(
        [{"role": "user", "content": "Say 3."}]
    )
