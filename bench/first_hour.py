"""What a stranger does in the first hour, with public interfaces only; counts the commands that fail (goal: 0).

python bench/first_hour.py                     # this clone; a folder of its own, a process per command, about 3 minutes
python bench/first_hour.py --clone ../whet     # another clone
python bench/first_hour.py --quick             # in this process, without a server: what CI runs

Their own CSV and JSON lines, a reward in a file and one in the script that trains, a task class, a Qwen3 model in a
folder as transformers saves it, chats, preference pairs; then evaluation, comparison, chat, server. Exit status 1 where
a command fails, or does not do what it said.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet import processes

ROOT = Path(__file__).resolve().parent.parent
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MINE = '''
from whet.types import Problem


def brief(problem, completion):
    """1 for nothing at all, 0 from 400 characters on."""
    return max(0.0, 1 - len(completion) / 400)


class Sums:
    """Sums of two digits, with their working."""

    def problems(self, split):
        rows = [(a, b) for a in range(9) for b in range(9) if (a + b) % 3 == ("train", "dev", "test").index(split)]
        return [
            Problem(uid=f"{a}-{b}", task="sums", prompt=f"{a}+{b}=", answer=str(a + b), solution=f"{a} and {b}")
            for a, b in rows
        ]

    def is_correct(self, problem, answer):
        return answer is not None and answer.strip() == problem.answer
'''
SCRIPT = """
import whet

rows = [{"question": f"What is {a} + {b}?", "answer": a + b} for a in range(1, 9) for b in range(1, 9)]


def brief(problem, completion):
    return max(0.0, 1 - len(completion) / 400)


policy = whet.load("my-model", schema="boxed")
task = whet.Task.from_rows(rows)
options = dict(num_steps=2, num_prompts=2, group_size=2, max_new_tokens=16)
run = whet.rl(policy, task, rewards=["correct", (brief, 0.1)], out="runs/python", **options)
before = whet.evaluate("my-model", task, num_problems=4, max_new_tokens=16)
after = whet.evaluate(run.policy, task, num_problems=4, max_new_tokens=16)
print(whet.compare(before, after))
"""
SHORT = "--sampling.max-new-tokens 16"
RL = f"--num-steps 2 --num-prompts 2 --group-size 2 {SHORT}"
FIT = "--num-steps 2 --batch-size 4"
EVAL = f"--num-problems 4 --num-samples 2 {SHORT}"
COMMANDS = (
    ("my rows, as the model reads them", "data questions.csv --model my-model"),
    ("may they be trained on?", "audit questions.csv --reward mine.py:brief=0.1"),
    ("where the model stands", f"eval own --model my-model --data questions.csv {EVAL}"),
    (
        "what would happen",
        f"rl own --model my-model --data questions.csv --reward mine.py:brief=0.1 {RL} --dry-run",
    ),
    ("chats", f"sft own --model my-model --data chats.jsonl {FIT} --validation-problems 4"),
    (
        "my task class",
        f"sft own --model my-model --task mine.py:Sums {FIT} --validation-problems 4 --out runs/sums-sft",
    ),
    ("my rows and reward", f"rl own --model my-model --data questions.csv --reward mine.py:brief=0.1 {RL}"),
    ("my task class, rewarded", f"rl own --model sums-sft --task mine.py:Sums {RL} --out runs/sums-rl"),
    ("a recipe, my model", f"sft demo --model my-model {FIT} --validation-problems 4 --out runs/mixed"),
    ("pairs", f"dpo own --model my-model --data pairs.jsonl {FIT}"),
    (
        "which is better?",
        f"compare my-model own-rl --data questions.csv --eval.num-problems 4 --eval.num-samples 2 --eval.{SHORT[2:]}",
    ),
    ("a page", "report own-rl"),
    ("all runs", "runs"),
    ("one more look", f"plan own --model my-model --data questions.csv {RL}"),
    ("go on from a run", f"rl own-rl --out runs/again {RL}"),
)
"""What is tried, and the words after `whet`."""


def prepare(folder: Path) -> None:
    """Write what a stranger brings along."""
    rows = [{"question": f"What is {a} + {b}?", "answer": a + b} for a in range(1, 9) for b in range(1, 9)]
    with (folder / "questions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    said = [("system", "Be brief."), ("user", "Say {}."), ("assistant", "{}.")]
    chats = [
        {"messages": [{"role": role, "content": text.format(n)} for role, text in said]} for n in range(40)
    ]
    pairs = [{"prompt": f"Say {n}.", "chosen": f"{n}.", "rejected": f"Well, {n}, I say."} for n in range(40)]
    for name, items in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, items)) + "\n")
    (folder / "mine.py").write_text(MINE)
    (folder / "own.py").write_text(SCRIPT)


def make_model(folder: Path) -> None:
    """Write a tiny Qwen3 with random weights, as transformers saves it: no file of whet's."""
    import tokenizers
    import torch
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {text: place for place, text in enumerate([*alphabet, *special])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    shape = transformers.Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=vocabulary["<|im_end|>"],
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Hour:
    """Runs commands in a folder and counts those that fail.

    Args:
        folder: Where they run.
        clone: The clone whose whet runs.
        quick: Run commands in this process.
    """

    def __init__(self, folder: Path, clone: Path, *, quick: bool) -> None:
        self._folder, self._quick, self.failed = folder, quick, 0
        self._env = os.environ | {"PYTHONPATH": str(clone)}
        self._whet = [sys.executable, "-m", "whet"]

    def try_(self, what: str, command: str, run: Callable[[], tuple[int, str]]) -> None:
        """Run one and tell how it went."""
        began = time.monotonic()
        status, said = run()
        self.failed += status != 0
        print(
            f"{'ok  ' if status == 0 else 'FAIL'} {time.monotonic() - began:5.1f} s  {what}: {command}",
            flush=True,
        )
        if status != 0:
            print("".join(f"     {line}\n" for line in said.splitlines()[-6:]), flush=True)

    def whet(self, what: str, words: str, *, stdin: str = "") -> None:
        """Run a command of whet."""
        self.try_(what, f"whet {words}", lambda: self._run(words.split(), stdin))

    def python(self, what: str, script: str) -> None:
        """Run a script."""
        self.try_(what, f"python {script}", lambda: self._process([sys.executable, script], ""))

    def serve(self, model: str) -> None:
        """Start a server, ask it once, and end it."""
        self.try_("a server, one request", f"whet serve {model}", lambda: self._ask(model))

    def _run(self, words: list[str], stdin: str) -> tuple[int, str]:
        if not self._quick:
            return self._process([*self._whet, *words], stdin)
        from whet.__main__ import main

        before, said = sys.stdin, io.StringIO()
        sys.stdin = io.StringIO(stdin)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                status = main(words)
        except SystemExit as error:
            status = int(error.code or 0)
        finally:
            sys.stdin = before
        return status, said.getvalue()

    def _process(self, words: list[str], stdin: str) -> tuple[int, str]:
        done = processes.run(
            words, input=stdin, capture_output=True, text=True, cwd=self._folder, env=self._env, timeout=600
        )
        return done.returncode, done.stdout + done.stderr

    def _ask(self, model: str) -> tuple[int, str]:
        words = [*self._whet, "serve", model, "--port", "0"]
        log = self._folder / "serve.log"
        with log.open("w") as file:
            server = processes.start(words, stdout=file, stderr=file, cwd=self._folder, env=self._env)
        try:
            address = ""
            for _ in range(6000):
                address = next((w for w in log.read_text().split() if w.startswith("http://")), "").rstrip(
                    ",;."
                )
                if address or server.poll() is not None:
                    break
                time.sleep(0.1)
            message = {"role": "user", "content": "Say 3."}
            body: dict[str, Any] = {"model": model, "messages": [message], "max_tokens": 8}
            url = f"{address.removesuffix('/').removesuffix('/v1')}/v1/chat/completions"
            asked = urllib.request.Request(
                url, json.dumps(body).encode(), headers={"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60) as reply:
                found = json.load(reply)["choices"][0]["message"]["role"]
            return (0 if found == "assistant" else 1), found
        except (OSError, ValueError, LookupError) as error:
            return 1, f"{error}\n{log.read_text()}"
        finally:
            server.terminate()
            server.wait(timeout=30)


def main(argv: list[str] | None = None) -> int:
    """Spend the hour; return 1 where a command failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--clone", type=Path, default=ROOT)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--quick", action="store_true", help="in this process, without scripts and a server")
    config = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        folder = config.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(contextlib.chdir(folder))
        hour = Hour(folder, config.clone.resolve(), quick=config.quick)
        prepare(folder)
        make_model(folder / "my-model")
        for what, words in COMMANDS:
            hour.whet(what, words)
        hour.whet(
            "talk to it", "chat own-rl --sampling.max-new-tokens 8", stdin="What is 1 + 2?\nAnd 2 + 2?\n"
        )
        if not config.quick:
            hour.python("all of it in Python", "own.py")
            hour.serve("own-rl")
    print(f"{hour.failed} commands failed or need a second try; goal 0")
    return 1 if hour.failed else 0


if __name__ == "__main__":
    sys.exit(main())
