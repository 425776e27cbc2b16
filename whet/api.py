"""The public Python interface: what `import whet` offers, with the same programs below it as the commands.

```python
policy = whet.load("Qwen/Qwen2.5-0.5B-Instruct")
task = whet.Task.from_rows(rows, prompt="question", answer="answer")
run = whet.rl(policy, task, rewards=[my_reward], algo="dapo", num_steps=100, out="runs/mine", on_step=print)
before, after = whet.evaluate(policy, task), whet.evaluate(run.policy, task)
print(whet.compare(before, after))
```
"""

from __future__ import annotations

import ast
import copy
import hashlib
import html
import inspect
import io
import json
import math
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

import torch

from whet.algo.config import AlgoConfig
from whet.algo.packing import TrainingSequence, pack
from whet.compress import merge as merging
from whet.compress.export import export as exporting
from whet.compress.quantize import quantize as quantizing
from whet.config import (
    cache_folder,
    closest,
    counted,
    counts,
    dump_yaml,
    from_dict,
    groups,
    leaves,
    meant,
    near_file,
    to_dict,
    unwrap,
    user_path,
)
from whet.editing import edit as editing
from whet.editing import inside
from whet.editing import steer as steering
from whet.editing.editor import Editor, MethodConfig
from whet.editing.facts import read_facts
from whet.editing.methods import MethodName
from whet.eval.compare import paired
from whet.eval.evaluate import chosen_split, fitting_problems, take_problems
from whet.eval.measure import EvalResult
from whet.eval.measure import evaluate as measure
from whet.eval.record import as_row, read_lines
from whet.generate.engine import Request
from whet.generate.policy import Policy as LoadedPolicy
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.model.lora.files import find_model, find_models, named_adapters
from whet.model.lora.merge import Method
from whet.model.steering import Steering
from whet.recipes.rl import ALGORITHMS
from whet.recipes.suited import suited, token_limit
from whet.rewards.base import OwnReward, own_name
from whet.sandbox.graders.shipping import ship_function
from whet.sandbox.reentry import refuse_reentry
from whet.schema import SCHEMAS, ResponseSchema
from whet.stats import Interval
from whet.tasks import base as tasks
from whet.tasks.base import TaskConfig, answers_of, check_gold, load_task
from whet.tasks.columns import image_column
from whet.tasks.images import ImageReader, holds_file
from whet.tasks.read import as_text, first_row, is_hub_name, is_number
from whet.telemetry.display import steps_told_elsewhere
from whet.telemetry.log import read_metrics
from whet.telemetry.provenance import resolve_run
from whet.train import dpo as dpo_program
from whet.train import rft as rft_program
from whet.train import rl as rl_program
from whet.train import sft as sft_program
from whet.train.data.pairs import is_on_hub
from whet.train.dpo import DPOConfig
from whet.train.optim.step import PRESETS, OptimConfig
from whet.train.rft import RFTConfig
from whet.train.rl_config import RLConfig
from whet.train.session import OnStep, Stopped, TrainStep, finish
from whet.train.sft import SFTConfig
from whet.types import Group, Problem, UserError

C = TypeVar("C")
Trained = TypeVar("Trained", RLConfig, SFTConfig)
Messages = Sequence[Mapping[str, Any]]
Rows = Iterable[Mapping[str, Any]]


def python_words(text: str) -> str:
    """Return a message with its options as arguments of Python: `max_bad_rows=1` in place of `--task.max-bad-rows 1`,
    `algo={'uninformative': 'refill'}` where the field is one of a group that is given whole, and `whet.load('runs/a')`
    for `--model runs/a`."""

    def argument(match: re.Match[str]) -> str:
        *outer, name = match[1].replace("-", "_").split(".")
        after = match[2] or ""
        if "/" in after:
            return (
                f"whet.load({after.strip()!r})" if name in ("model", "init") else f"{name}={after.strip()!r}"
            )
        is_value = bool(after) and (after.strip()[0].isdigit() or after.strip() in _VALUES)
        value, rest = (after.strip(), "") if is_value else ("...", after)
        value = repr(value) if is_value and not value[0].isdigit() else value
        value = {"resume": "True", "preflight": "'warn'"}.get(name, value)
        alone = not outer or outer[-1] in (*LOOSE, "task", "policy") or name in ("resume", "preflight")
        return (f"{name}={value}" if alone else f"{outer[-1]}={{{name!r}: {value}}}") + rest

    text = text.replace("--preflight warn", "--preflight")
    option, value = (
        r"(?<![\w-])--((?:[a-z][\w-]*\.)*[a-z][\w-]*)",
        r"( [^\s;,()]*/[^\s;,()]*| \d(?:[\d.]*\d)?| [a-z_]+)?",
    )
    return re.sub(option + value, argument, text)


_VALUES = frozenset(
    {*SCHEMAS, "refill", "drop", "keep", "soft", "hard", "true", "false", "all", "warn", "off", "auto"}
)
"""Words that stand after an option in messages as its value."""


@contextmanager
def _python_words(*, file: str | None = None) -> Iterator[None]:
    """Let errors name arguments as Python has them.

    Args:
        file: A file of ours that holds what the caller gave as rows.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
        told = python_words(text.replace(file, "rows") if file else text)
        if told == str(error):
            raise
        raise type(error)(told) from None


class Policy:
    """A model with its tokenizer and the protocol by which it is asked; loaded when it is first used.

    Attributes:
        config: Where it comes from, and how it is asked.
    """

    def __init__(self, config: PolicyConfig, *, seed: int = 0) -> None:
        self.config = config
        self._seed = seed
        self._editor: Editor | None = None

    def __repr__(self) -> str:
        return f"whet.Policy({self.config.init or 'random weights'!r})"

    @cached_property
    def loaded(self) -> LoadedPolicy:
        """The model in memory, float32, in evaluation mode."""
        policy = load_policy(self.config, seed=self._seed, plain=True, several=True, steers=True)
        policy.model.eval()
        return policy

    def _copied(self) -> Policy:
        """Return the same model with weights of its own."""
        found = Policy(self.config, seed=self._seed)
        if "loaded" in self.__dict__:
            loaded = copy.copy(self.loaded)
            loaded.model = copy.deepcopy(self.loaded.model)
            found.__dict__["loaded"] = loaded
        return found

    def release(self) -> None:
        """Give the model's memory back; the next use loads it again.

        Raises:
            UserError: If it was edited in memory, and would be lost.
        """
        if self._editor is not None and self._editor.record.batches:
            raise UserError(
                "the model was edited in memory: write it with Edit.save(folder), and load that folder"
            )
        self.__dict__.pop("loaded", None)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, where several were loaded."""
        several = self.loaded.several
        return () if several is None else several.names

    def prompt_ids(self, messages: str | Messages, **template_values: Any) -> list[int]:
        """Return the tokens that ask something: as the model was trained where it has a protocol or a schema was
        given, else as its chat template alone has it (transformers' `apply_chat_template`).

        Args:
            messages: The user's words, or chat messages with 'role' and 'content' (a system message replaces the
                schema's own).
            template_values: Further values that the chat template reads, such as `enable_thinking=False` or
                `tools=[...]`; and, as in transformers, `add_generation_prompt=False`, `continue_final_message=True`
                and `chat_template`, the name of one of the model's templates.
        """
        return list(self.loaded.chat_ids(_checked(messages), **template_values))

    def prompt_text(self, messages: str | Messages, **template_values: Any) -> str:
        """Return the text of `prompt_ids`, special tokens that the template writes included."""
        return self.loaded.chat_text(_checked(messages), **template_values)

    def sample(
        self,
        prompts: Sequence[str | Messages],
        num_samples: int = 1,
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        adapter: str | Sequence[str] = "",
    ) -> list[list[str]]:
        """Draw completions of prompts.

        Args:
            prompts: What is asked: the user's words, or chat messages.
            num_samples: Completions of each.
            max_new_tokens: Longest completion in tokens.
            temperature: Divides the logits; 0 takes the likeliest token.
            top_p: Keep the smallest set of tokens with at least this probability.
            top_k: Keep the k likeliest tokens; 0 keeps all.
            min_p: Keep tokens with at least this share of the largest probability.
            seed: Names the noise, with the place of prompt and sample.
            adapter: Of several adapters the one that answers, or one for each prompt; '' is the base.

        Returns:
            For each prompt its completions.

        Raises:
            UserError: If a prompt leaves no room in the context, or there is no such adapter.
        """
        if isinstance(prompts, str):
            raise UserError("sample: got one text, expected a list of prompts: put it into [ ]")
        policy = self.loaded
        names = [adapter] * len(prompts) if isinstance(adapter, str) else list(adapter)
        if len(names) != len(prompts):
            raise UserError(
                f"sample: {len(prompts)} prompts and {len(names)} adapters; expected one for each"
            )
        asked_as = [policy.named(name) for name in names]
        given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        params = _made(SamplingParams, given | {"max_new_tokens": max_new_tokens})
        asked = [own.chat_ids(_checked(prompt)) for own, prompt in zip(asked_as, prompts, strict=True)]
        requests = [
            Request(
                prompt_ids=ids,
                seeds=tuple(sequence_seed("sample", seed, place, index) for index in range(num_samples)),
                adapter=name,
            )
            for place, (ids, name) in enumerate(zip(asked, names, strict=True))
        ]
        rows = policy.engine().generate(requests, params)
        return [
            [own.completion_text(ids, done.ids) for done in row]
            for own, ids, row in zip(asked_as, asked, rows, strict=True)
        ]

    def generate(
        self, prompts: Sequence[str | Messages], *, temperature: float = 0.0, **options: Any
    ) -> list[str]:
        """Complete prompts, one completion each, greedily unless told otherwise; options are those of `sample`."""
        known = inspect.signature(self.sample).parameters
        for name in options.keys() - known:
            found = meant(name, [f"sampling.{one}" for one in known]) or closest(name, list(known)) or ""
            near = f"; did you mean {found.rpartition('.')[2]!r}?" if found else ""
            raise UserError(f"generate has no argument {name!r}{near}")
        return [row[0] for row in self.sample(prompts, 1, temperature=temperature, **options)]

    def logprobs(
        self, prompt: str | Messages, completion: str, *, temperature: float = 1.0, adapter: str = ""
    ) -> list[float]:
        """Return the log-probability, in nats, of each token of a completion after a prompt.

        Args:
            prompt: The user's words, or chat messages.
            completion: The text after it.
            temperature: Divides the logits.
            adapter: Of several adapters the one that is asked; '' is the base.

        Raises:
            UserError: If the completion has no token, or both do not fit the context.
        """
        policy = self.loaded.named(adapter)
        ids = policy.chat_ids(_checked(prompt))
        chosen = tuple(policy.tokenizer.encode(completion))
        context = policy.model.config.max_positions
        if not chosen:
            raise UserError("logprobs: the completion is empty; expected at least one token")
        if len(ids) + len(chosen) > context:
            raise UserError(
                f"logprobs: prompt and completion have {len(ids) + len(chosen)} tokens, the context holds {context}"
            )
        sequence = TrainingSequence(prompt_ids=ids, completion_ids=chosen)
        (micro,) = pack([sequence], token_budget=context, device=policy.device).micro_batches
        several = policy.several
        with torch.no_grad(), nullcontext() if several is None else several.all_rows(adapter):
            return policy.score(micro, temperature=temperature)[0].tolist()

    def save(self, folder: str | Path, *, dtype: str = "") -> Path:
        """Write weights, tokenizer and protocol to a new folder, which transformers and `whet.load` read.

        Args:
            folder: The folder.
            dtype: float32, bfloat16, float16, or source for that of the folder that was loaded; default: as in memory.

        Raises:
            UserError: If the folder is there and not empty, or the dtype is not known.
        """
        wanted = self._stored_dtype(dtype)
        path = Path(folder)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path}: is there already; choose another folder")
        path.mkdir(parents=True, exist_ok=True)
        self.loaded.save(path, dtype=wanted)
        return path

    def _stored_dtype(self, name: str) -> Any:
        import torch

        known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if not name:
            return None
        if name == "source":
            source = json.loads(self.loaded.model.config.source or "{}")
            name = source.get("dtype") or source.get("torch_dtype") or "float32"
        if name not in known:
            raise UserError(f"dtype = {name!r}: expected source, {', '.join(known)}")
        return known[name]


def load(
    name: str | Path,
    *,
    adapter: str | Path | Sequence[str | Path] | Mapping[str, str | Path] = "",
    seed: int = 0,
    **options: Any,
) -> Policy:
    """Name a model to work with; it is read into memory when it is first used.

    Args:
        name: Run folder or its short name (`demo-sft`, `latest`), folder of a model, or hub name; an adapter that names
            its base will do.
        adapter: An adapter on top of it; or several, of which `sample` names one for each prompt: a list, called by the
            last parts of their folders, or a dict by name.
        seed: Seed of new vocabulary rows.
        options: Fields of `PolicyConfig` (`template`, `template_values`, `system_prompt`, `device`, ...), and
            `schema`: the name of one, the path of a .yaml file, or a `whet.Schema`.

    Raises:
        UserError: If there is no such model, or an option is unknown.
    """
    name = resolve_run(str(name), of_model=True)
    if isinstance(adapter, (str, Path)):
        adapter = resolve_run(str(adapter), of_model=True)
        find_model(name, adapter)
    else:
        given = adapter.items() if isinstance(adapter, Mapping) else (("", folder) for folder in adapter)
        words = [(key, resolve_run(str(folder), of_model=True)) for key, folder in given]
        if bad := next((text for pair in words for text in pair if "," in text), None):
            raise UserError(f"adapter: {bad!r} has a comma, which stands between several adapters; rename it")
        parts = [f"{key or user_path(word).resolve().name}={word}" for key, word in words]
        adapter = ",".join(parts)
        find_models(name, named_adapters(adapter))
    if isinstance(schema := options.get("schema"), ResponseSchema):
        text = dump_yaml(schema)
        file = f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.yaml"
        options = options | {"schema": str(_cached("schemas", file, text))}
    return Policy(_made(PolicyConfig, {"init": name, "adapter": adapter, **options}), seed=seed)


@dataclass(frozen=True)
class Task:
    """Problems with their answers, and how an answer is judged.

    Attributes:
        config: What it is read from; written into every run that uses it.
    """

    config: TaskConfig = field(default_factory=TaskConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.config, TaskConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(
                "whet.Task of rows, a file or a name: expected whet.Task.from_rows(...), or from_hub('gsm8k')"
            )

    @classmethod
    def from_rows(
        cls,
        rows: Rows | str | Path,
        *,
        prompt: str | None = None,
        answer: str | None = None,
        solution: str | None = None,
        images: str | None = None,
        image_root: str | Path | None = None,
        max_bad_rows: int = 0,
        held_out: float | None = None,
    ) -> Task:
        """Make a task of questions and answers, of chats or of plain text of your own.

        Args:
            rows: Dicts (a list, a `datasets.Dataset`), a `pandas.DataFrame`, or the path of a .jsonl, .jsonl.gz,
                .parquet, .csv or .json file or of a folder with train and test files, a hub name, or the name of a
                task. Numbers are taken as text. Rows in memory are kept as a file in whet's cache, so that a run on
                them can be resumed; nothing removes it (~/.cache/whet/rows).
            prompt: Column of the question or of the chat; recognised where it is called prompt, question, problem,
                instruction, messages or conversations.
            answer: Column of the gold answer, recognised where it is called answer, final_answer, expected_answer,
                ground_truth or reward_model.ground_truth, and taken from the solution or the reply where there is none.
                'none' learns replies as they are.
            solution: Column of the worked solution, or of the reply.
            images: Column of the images that are asked about: paths, data URIs, bytes, Pillow's images or lists of
                them; recognised where it is called image or images; 'none' for none.
            image_root: Folder that paths of images are relative to and may not leave; default: that of the file, of
                rows in memory the current one.
            max_bad_rows: How many malformed rows are left out before it is an error.
            held_out: Share of one file's rows, or of rows in memory, that is kept from training for validation, and as
                much again for testing.

        Raises:
            UserError: If there are no rows, or none of that name.
        """
        columns: dict[str, Any] = {"max_bad_rows": max_bad_rows} if max_bad_rows else {}
        columns |= {} if held_out is None else {"held_out": held_out}
        given = {"prompt": prompt, "answer": answer, "solution": solution, "images": images}
        given["image_root"] = None if image_root is None else str(Path(image_root).resolve())
        columns |= {name: column for name, column in given.items() if column is not None}
        if isinstance(rows, (str, Path)):
            if not Path(rows).exists() and str(rows) in tasks.OPTIONS:
                return cls(_made(TaskConfig, {"name": str(rows), **columns}))
            if is_hub_name(str(rows)):
                return cls(_made(TaskConfig, {"name": "hub", "path": str(rows), **columns}))
            if not Path(rows).exists():
                if Path(rows).suffix:
                    raise UserError(f"{str(rows)!r}: no such file; {near_file(rows) or 'check the path'}")
                near = closest(str(rows), list(tasks.OPTIONS))
                raise UserError(
                    f"{str(rows)!r}: no such file or folder, nor a task; "
                    + (f"did you mean {near!r}?" if near else f"the tasks are {', '.join(tasks.OPTIONS)}")
                )
            path = str(Path(rows).resolve())
        else:
            path = str(_written(rows))
            if image_root is None and image_column(first_row(Path(path)), "the rows", images or ""):
                columns["image_root"] = str(Path.cwd())
        task = cls(_made(TaskConfig, {"name": "jsonl", "path": path, **columns}))
        with _python_words(file=None if isinstance(rows, (str, Path)) else Path(path).name):
            task.problems("train")  # malformed rows are found now
        return task

    @classmethod
    def from_hub(
        cls,
        name: str,
        *,
        config: str | None = None,
        split: str | None = None,
        prompt: str | None = None,
        answer: str | None = None,
        solution: str | None = None,
        images: str | None = None,
        max_rows: int = 0,
        max_bad_rows: int = 0,
    ) -> Task:
        """Make a task of a data set of the hub; it is downloaded when its problems are first needed.

        Args:
            name: Such as 'openai/gsm8k', or one of whet's own names: 'gsm8k', 'dapo_math', ...
            config: Configuration, where it has several.
            split: The one split to use, divided into train, dev and test; default: those called train and test.
            prompt: Column of the question or of the chat; recognised as by `from_rows`.
            answer: Column of the gold answer.
            solution: Column of the worked solution, or of the reply.
            images: Column of the images that are asked about.
            max_rows: Stream only so many rows of each split, without downloading the rest; 0 takes all.
            max_bad_rows: How many malformed rows are left out before it is an error.

        Raises:
            UserError: If it is no such name, or the options do not fit.
        """
        given = {"config": config, "split": split, "prompt": prompt, "answer": answer, "solution": solution}
        given["images"] = images
        options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
        options |= {"max_rows": max_rows} if max_rows else {}
        options |= {"max_bad_rows": max_bad_rows} if max_bad_rows else {}
        place = {"name": name} if name in tasks.OPTIONS else {"name": "hub", "path": name}
        task = cls(_made(TaskConfig, place | options))
        load_task(task.config)
        return task

    def problems(self, split: str = "train") -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test'."""
        return load_task(self.config).problems(split)

    def __repr__(self) -> str:
        return f"whet.Task({(self.config.path or self.config.name)!r})"


@dataclass(frozen=True)
class Run:
    """A training run on disk.

    Attributes:
        folder: The run folder.
        is_complete: Whether it did all its steps; False where it was asked to stop (its last step is saved).
    """

    folder: Path
    is_complete: bool = True

    @property
    def policy(self) -> Policy:
        """The trained policy: the best checkpoint by validation where there is one, else the last."""
        return Policy(PolicyConfig(init=str(self.folder)))

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One row a step, as `pandas.DataFrame` takes them."""
        return read_metrics(self.folder)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Every completion that was sampled, with its rewards; [] for programs that sample nothing."""
        path = self.folder / "samples.jsonl"
        if not path.is_file():
            return []
        return [row for row, _ in read_lines(path) if row is not None]

    @property
    def summary(self) -> dict[str, Any]:
        """The last value of every metric."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def _repr_html_(self) -> str:
        rows = self.metrics
        shown = [name for name in HEADLINE if any(name in row for row in rows)]
        table = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{_first(rows, name):.4g}</td><td>{_last(rows, name):.4g}</td>"
            f"<td>{_curve([row[name] for row in rows if name in row])}</td></tr>"
            for name in shown
        )
        head = "<tr><th></th><th>first</th><th>last</th><th></th></tr>"
        return f"<p><code>{html.escape(str(self.folder))}</code></p><table>{head}{table}</table>"


@dataclass(frozen=True)
class Evaluation:
    """What a model does on held-out problems.

    Attributes:
        label: Which model.
        result: Metrics with their intervals, and every completion behind them.
        protocol: What was asked, and how: two evaluations compare only where it is the same.
        prompts: How the model was asked, and where its answers were read, in words.
    """

    label: str
    result: EvalResult
    protocol: Mapping[str, Any]
    prompts: str = ""

    @property
    def metrics(self) -> dict[str, Interval]:
        """'greedy', 'pass@1', 'pass@k', 'maj@n', 'format' and more, each with its 95 % interval over problems."""
        return self.result.metrics

    @property
    def samples(self) -> list[dict[str, Any]]:
        """One row a completion: uid, prompt, text, answer, correct, and more."""
        return [
            as_row(problem, place, done)
            for problem, greedy, row in zip(
                self.result.problems, self.result.greedy, self.result.samples, strict=True
            )
            for place, done in (("greedy", greedy), *enumerate(row))
        ]

    def __str__(self) -> str:
        lines = [f"{self.label}, {counted(len(self.result.problems), 'problem')}"]
        lines += [f"  {self.prompts}"] if self.prompts else []
        lines += [f"  {name:<18}{_interval(name, interval)}" for name, interval in self.metrics.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<whet.Evaluation: {str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same problems.

    Attributes:
        names: What the two are called.
        rows: Metric by metric: means, difference with its interval, p-value, what would not have been seen.
        note: How the two were asked, where that was not alike; else ''.
    """

    names: tuple[str, str]
    rows: Sequence[paired.Paired]
    note: str = ""

    def __getitem__(self, metric: str) -> paired.Paired:
        for row in self.rows:
            if row.metric == metric:
                return row
        raise KeyError(f"{metric}: expected one of {', '.join(row.metric for row in self.rows)}")

    def __str__(self) -> str:
        a, b = self.names
        lines = [f"{a} -> {b}, {counted(self.rows[0].num_problems, 'problem')}"]
        for row in self.rows:
            low, high = (
                paired.show(row.metric, x, signed=True) for x in (row.difference.low, row.difference.high)
            )
            values = f"{paired.show(row.metric, row.a):>8} -> {paired.show(row.metric, row.b):>7}"
            change = f"{paired.show(row.metric, row.difference.mean, signed=True):>7} ({low} to {high})"
            lines.append(f"  {row.metric:<18}{values}  {change:<26} p {paired.show_p(row.p_holm)}")
        main = next((row for row in self.rows if row.metric in ("greedy", "pass@1")), self.rows[0])
        lines += [f"{main.metric}: {paired.verdict(main, a, b)}"]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def __repr__(self) -> str:
        return f"<whet.Comparison: {str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


LOOSE: dict[str, Any] = {"sampling": SamplingParams, "optim": OptimConfig}
"""Groups whose fields may be given alone: `max_new_tokens=64`, `lr=1e-6`."""
HEADLINE = (
    *("rl/correct", "rl/reward_mean", "rl/loss", "eval/greedy", "sft/loss", "sft/validation_loss"),
    *("dpo/loss", "dpo/accuracy", "rft/loss", "rft/right"),
)


def rl(
    policy: Policy | str | Path,
    task: Task | Rows | str | Path,
    *,
    out: str | Path,
    rewards: Sequence[OwnReward | tuple[OwnReward, float]] | Mapping[str, float] | None = None,
    algo: str | AlgoConfig = "grpo",
    num_steps: int = 100,
    on_step: OnStep | None = None,
    on_samples: Callable[[Sequence[Group]], object] | None = None,
    resume: bool = False,
    verbose: bool = True,
    **options: Any,
) -> Run:
    """Improve a policy by reinforcement learning with verifiable rewards.

    Args:
        policy: The policy, or what `load` takes.
        task: The task, or what `Task.from_rows` takes.
        out: Run folder to make.
        rewards: Functions of your own (`def shorter(problem, text) -> float`), names of built-in rewards, or pairs of
            either with its weight; or weights by name. Default: a right answer 1, the format 0.1.
        algo: Name of an algorithm (grpo, dr_grpo, dapo, gspo, ...), or its arguments.
        num_steps: Rollout batches.
        on_step: Called after each step with its number, metrics and groups.
        on_samples: Called after each step with the groups that it trained on: each has its problem, and samples with
            text, reward and advantage.
        resume: Go on from the newest checkpoint of `out`.
        verbose: Print how far it is; False prints warnings alone.
        options: Other fields of `RLConfig`: `num_prompts=8`, `group_size=8`, `max_new_tokens=256`, `lr=1e-6`, or whole
            groups of fields, `optim={"precision": "bfloat16_master"}`.

    Returns:
        The run.

    Raises:
        UserError: If something does not fit together, is missing, or the run cannot go on.
        SystemExit: After SIGTERM or SIGHUP, when the last whole step is saved.
    """
    config = _rl_config(policy, task, out, rewards, algo, num_steps, options, verbose=verbose)
    tell, show = _heard(on_step, verbose), _heard(on_samples, verbose)
    return _trained(
        config, lambda: _each(rl_program.steps(config, resume=resume), tell, show), on_step, verbose=verbose
    )


def rl_steps(
    policy: Policy | str | Path,
    task: Task | Rows | str | Path,
    *,
    out: str | Path,
    rewards: Sequence[OwnReward | tuple[OwnReward, float]] | Mapping[str, float] | None = None,
    algo: str | AlgoConfig = "grpo",
    num_steps: int = 100,
    resume: bool = False,
    verbose: bool = True,
    **options: Any,
) -> Iterator[TrainStep]:
    """Do what `rl` does, for a loop of your own: yield each step when it is over; leaving the loop ends the run."""
    config = _rl_config(policy, task, out, rewards, algo, num_steps, options, verbose=verbose)
    running = rl_program.steps(config, resume=resume)
    try:
        while True:
            with _python_words(), _printing(verbose):
                step = next(running, None)
            if step is None:
                break
            yield step
    except Stopped as stopped:  # asked to by a signal: the last step is saved
        _go_on_after(stopped)
        return
    finally:
        with _printing(verbose):
            running.close()
    with _printing(verbose):
        finish(config)


def sft(
    policy: Policy | str | Path,
    task: Task | Rows | str | Path,
    *,
    out: str | Path,
    num_steps: int = 100,
    on_step: OnStep | None = None,
    resume: bool = False,
    verbose: bool = True,
    **options: Any,
) -> Run:
    """Fine-tune a policy on worked solutions, chats or texts; options are fields of `SFTConfig`, else as for `rl`."""
    refuse_reentry("a training")
    given = {"out": str(out), "policy": _policy(policy), "task": _task(task), "num_steps": num_steps}
    config = _suited(_made(SFTConfig, given | options), options, verbose=verbose)
    call = _heard(on_step, verbose)
    return _trained(
        config, lambda: sft_program.train(config, resume=resume, on_step=call), on_step, verbose=verbose
    )


def dpo(
    policy: Policy | str | Path,
    pairs: Rows | str | Path | None = None,
    *,
    out: str | Path,
    task: Task | Rows | str | Path | None = None,
    num_steps: int = 100,
    on_step: OnStep | None = None,
    resume: bool = False,
    verbose: bool = True,
    **options: Any,
) -> Run:
    """Train a policy to prefer: on pairs of your own, or on right and wrong completions that it samples of a task.

    Args:
        policy: The policy, or what `load` takes.
        pairs: Rows with prompt, chosen and rejected (texts or chat messages), the path of such a file, a hub name, or
            'ultrafeedback'; for loss = kto also rows with prompt, completion and label.
        out: Run folder to make.
        task: Where there are no pairs: the problems whose completions are paired.
        num_steps: Optimizer steps.
        on_step: Called after each step.
        resume: Go on from the newest checkpoint of `out`.
        verbose: Print how far it is; False prints warnings alone.
        options: Other fields of `DPOConfig`.
    """
    refuse_reentry("a training")
    if (pairs is None) == (task is None):
        raise UserError("dpo: expected either pairs or a task")
    given: dict[str, Any] = {"out": str(out), "policy": _policy(policy), "num_steps": num_steps}
    if pairs is not None:
        is_name = isinstance(pairs, str) and is_on_hub(pairs)
        path = (
            pairs if is_name else Path(pairs).resolve() if isinstance(pairs, (str, Path)) else _written(pairs)
        )
        given["pairs"] = str(path)
    if task is not None:
        given["task"] = _task(task)
    config = _made(DPOConfig, given | options)
    call = _heard(on_step, verbose)
    return _trained(
        config, lambda: dpo_program.train(config, resume=resume, on_step=call), on_step, verbose=verbose
    )


def rft(
    policy: Policy | str | Path,
    task: Task | Rows | str | Path,
    *,
    out: str | Path,
    on_step: OnStep | None = None,
    resume: bool = False,
    verbose: bool = True,
    **options: Any,
) -> Run:
    """Fine-tune a policy on its own right completions, round by round; options are fields of `RFTConfig`."""
    refuse_reentry("a training")
    config = _made(RFTConfig, {"out": str(out), "policy": _policy(policy), "task": _task(task)} | options)
    call = _heard(on_step, verbose)
    return _trained(
        config, lambda: rft_program.train(config, resume=resume, on_step=call), on_step, verbose=verbose
    )


def quantize(
    policy: Policy | str | Path,
    task: Task | Rows | str | Path,
    *,
    out: str | Path,
    budget: str = "4.5bits",
    **options: Any,
) -> dict[str, Any]:
    """Write a copy of a model whose layers are stored in 4, 8 or 16 bits, each as measured on a task.

    Args:
        policy: The model, or what `load` takes.
        task: What it is measured on, or what `Task.from_rows` takes.
        out: Folder to make: a model that `load` reads, with the measurements, plots and a page.
        budget: What the weights may take: bits for each weight of the layers, a share (30%), or bytes (350MB).
        options: Other fields of `QuantizeConfig`: `num_problems=64`, `methods=["rtn"]`.

    Returns:
        What was chosen (`layers`) and measured (`table`, `front`, `pass_at_1`), as in `quantize.json`.

    Raises:
        UserError: If the model is quantised already, the task does not fit it, or the budget is too small.
    """
    given = {"out": str(out), "policy": _policy(policy), "task": _task(task), "budget": budget}
    with _python_words():
        return quantizing.quantize(_made(quantizing.QuantizeConfig, given | options))


def export(
    policy: Policy | str | Path, *, out: str | Path, to: exporting.Kind = "hf", **options: Any
) -> dict[str, Any]:
    """Write a model for other programs, and check it there.

    Args:
        policy: The model, or what `load` takes.
        out: Folder to make.
        to: hf, merged, adapter, gguf, ollama or mlx (docs/export.md).
        options: Other fields of `ExportConfig`: `dtype="q8_0"`, `num_prompts=50`.

    Returns:
        The report: `verdict` (which may be "failed"), `top1_agreement`, `kl`, `greedy_equal` and more.

    Raises:
        UserError: If the model cannot be expressed, or a package is missing; nothing is left.
    """
    given = {"out": str(out), "policy": replace(_policy(policy), device="cpu"), "to": to}
    with _python_words():
        return exporting.export(_made(exporting.ExportConfig, given | options))


def merge(
    adapters: Sequence[str | Path] | Mapping[str | Path, float],
    *,
    out: str | Path,
    method: Method = "cat",
    **options: Any,
) -> Path:
    """Merge several adapters of one base into one.

    Args:
        adapters: Their folders, with weight 1 each, or weights by folder.
        out: Folder to make.
        method: cat, linear, ties, dare_linear or dare_ties (docs/adapters.md).
        options: `density` and `seed`, of the methods that have them.

    Returns:
        The folder.

    Raises:
        UserError: If the adapters cannot be merged, or the folder exists.
    """
    if isinstance(adapters, str):
        raise UserError("merge: got one text, expected a list of adapters: put them into [ ]")
    weights = list(adapters.values()) if isinstance(adapters, Mapping) else []
    folders = [resolve_run(str(adapter), of_model=True) for adapter in adapters]
    given = {"adapters": folders, "weights": weights, "out": str(out), "method": method}
    with _python_words():
        merging.merge(_made(merging.MergeConfig, given | options))
    return Path(out)


@dataclass(eq=False)
class Edit:
    """Facts that were written into a copy of a model.

    Attributes:
        policy: The edited model; the one that was given is as it was.
        metrics: Of all facts that it holds, by name: value before the first edit and now with its 95 % interval, and
            the p-value of a paired test. Fewer than six facts have no bootstrap: then low, high and p_value are None.
        table: Each fact with its batch, probabilities and ranks before and now, its paraphrases and neighbours.
        curve: Where several batches were written, the shares after up to eight of them, over the number of edits.
        by_batch: Of each batch the share of its facts that the model completes with the target, before and now.
    """

    policy: Policy
    metrics: dict[str, Any]
    table: list[dict[str, Any]]
    by_batch: list[dict[str, Any]]
    curve: list[dict[str, Any]]
    _editor: Editor = field(repr=False)
    _asked: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def record(self) -> dict[str, Any]:
        """What was done, as edits.json has it: method, layers, facts, norms and hashes of each batch."""
        record = self._editor.record
        batches = [batch.as_dict() for batch in record.batches]
        return {"model": record.model, "digest": record.digest, "batches": batches}

    def undo(self, *batches: int) -> Policy:
        """Take edits out of `policy`, all or some batches (from 1); the weights are then bitwise what they were.

        `metrics`, `table` and `by_batch` are then those of the facts that are left.

        Raises:
            UserError: If there is no such batch, or the weights were changed since.
        """
        self._editor.undo(batches)
        content = editing.write_and_measure(self._editor, (), MethodConfig(), **self._asked)
        self.metrics, self.table = content["metrics"], content["table"]
        self.by_batch, self.curve = content.get("by_batch", []), []
        return self.policy

    def save(self, folder: str | Path) -> Path:
        """Write the edited model with its record and page to a new folder, as `whet edit` does."""
        path = self.policy.save(folder)
        content = {"metrics": self.metrics, "table": self.table, "by_batch": self.by_batch}
        if self.curve:
            content["curve"] = self.curve
        editing.save(self._editor, path, content)
        return path


def edit(
    policy: Policy | str | Path,
    facts: Rows | str | Path,
    method: MethodName = "memit",
    *,
    keep: Rows | str | Path = (),
    batch_size: int = 0,
    prose: str = "",
    writes: bool = False,
    seed: int = 0,
    **options: Any,
) -> Edit:
    """Write facts into a copy of a model, in memory.

    Args:
        policy: The model, or what `load` takes; one that an `Edit` gave is edited further.
        facts: Dicts with `subject`, `prompt` (with {} in its place) and `target`; further `true`, `paraphrases` and
            `neighbours`, for the metrics; or a file (docs/editing.md).
        method: memit, rome, r-rome, alphaedit, ft or lora.
        keep: Facts that are to stay as they are (memit, alphaedit), laid out like the others but for the target.
        batch_size: Facts that are written together; 0 for all.
        prose: A text whose keys edits leave alone; default: text that the model writes itself.
        writes: Let the model write about each subject, too, for fluency and consistency.
        seed: Seed of everything that is drawn.
        options: Other fields of `MethodConfig`: `layers=(3, 4)`, `prose_weight=500`.

    Returns:
        The edited model, with metrics.

    Raises:
        UserError: If facts contradict or repeat each other, or do not fit the model.
    """
    asked = policy if isinstance(policy, Policy) else load(policy)
    rows: Any = facts if isinstance(facts, (str, Path)) else list(facts)
    wanted = read_facts(rows)
    config = _made(MethodConfig, {"method": method, **options})
    copied = asked._copied()  # pyright: ignore[reportPrivateUsage]
    name = editing.name_of(copied.loaded, asked.config)
    editor = asked._editor  # pyright: ignore[reportPrivateUsage]
    with _python_words():
        if editor is None:
            editor = editing.open_editor(copied.loaded, name)
        else:
            editor = Editor(copied.loaded, name, editor.record.copy())
        staying: Any = keep if isinstance(keep, (str, Path)) else list(keep)
        editor.set_kept(read_facts(staying, needs_target=False) if staying else ())
        editor.check(wanted, config)
        if prose:
            editor.set_prose(prose, editing.PROSE_TOKENS, seed)
        content = editing.write_and_measure(
            editor, wanted, config, batch_size=batch_size, writes=writes, seed=seed
        )
    copied._editor = editor  # pyright: ignore[reportPrivateUsage]
    asked_again = {"writes": writes, "seed": seed}
    return Edit(
        copied,
        content["metrics"],
        content["table"],
        content["by_batch"],
        content.get("curve", []),
        editor,
        asked_again,
    )


def trace(
    policy: Policy | str | Path, prompt: str, subject: str, *, answer: str = "", **options: Any
) -> dict[str, Any]:
    """Look inside a prompt: causal tracing, logit lens, direct logit attribution and attention.

    Args:
        policy: The model, or what `load` takes.
        prompt: The prompt, with {} in the subject's place or with the subject in it.
        subject: What it is about.
        answer: What follows; default: what the model says.
        options: `noise`, `num_samples`, `window`, `seed`, as `whet trace` has them.

    Returns:
        As trace.json has it: `effects` by kind [layers][tokens], `subject_effects` by kind [layers] with all of the
        subject's tokens restored together, `lens`, `attribution`, `attention`.

    Raises:
        UserError: If the subject is not in the prompt.
    """
    asked = policy if isinstance(policy, Policy) else load(policy)
    return inside.look(asked.loaded, prompt, subject, answer, **options)


def steer(
    policy: Policy | str | Path,
    pairs: Rows | str | Path,
    *,
    layers: Sequence[int] = (),
    reading: Literal["last", "mean"] = "last",
) -> Steering:
    """Find the direction between two kinds of texts, to push a model along it or against it.

    Args:
        policy: The model, or what `load` takes.
        pairs: Dicts with `positive` and `negative` (and `prompt`, which both answer), or a file.
        layers: Layers behind which it is added; default: the one that parts held-out pairs best.
        reading: Where texts are read: at the last token, or the mean over all.

    Returns:
        The vectors: `Steering.save(folder)`, then `load(model, steering=("folder=1.5",))`.

    Raises:
        UserError: If there are too few pairs, or no such layer.
    """
    asked = policy if isinstance(policy, Policy) else load(policy)
    found = steering.read_pairs(pairs if isinstance(pairs, (str, Path)) else list(pairs))
    with _python_words():
        return steering.steer(asked.loaded, found, layers, reading)[0]


def evaluate(
    policy: Policy | str | Path,
    task: Task | Rows | str | Path,
    *,
    num_samples: int = 8,
    num_problems: int = 200,
    split: str = "test",
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    answer_from: Literal["schema", "anywhere"] = "schema",
    seed: int = 0,
) -> Evaluation:
    """Measure a policy on held-out problems: greedily, and by samples.

    Args:
        policy: The policy, or what `load` takes.
        task: The task, or what `Task.from_rows` takes.
        num_samples: Completions per problem besides the greedy one.
        num_problems: Problems, the first of the split's hash order; 0 takes all.
        split: Part of the data: train, dev, test (5 % of a file's rows, which training leaves out) or all. 'auto' takes
            all rows of a file, but test where the policy was trained on that file, and of all other data.
        max_new_tokens: Longest completion in tokens; default: by the length of the task's worked solutions, at most
            256, and 256 where it has none.
        temperature: Of the samples.
        answer_from: 'anywhere' also takes boxes, phrases and the last number for an answer.
        seed: Seed of the samples and of the bootstrap.

    Raises:
        UserError: If there is no problem, or none fits the context.
    """
    asked = policy if isinstance(policy, Policy) else load(policy)
    config = _task(task)
    loaded = asked.loaded.for_tasks()  # what the task expects is not what is asked for ever
    judge = load_task(config)
    loaded.expect(*answers_of(judge))
    split = chosen_split(split, config, asked.config)
    wanted = take_problems(judge, split, num_problems)
    if not wanted:
        raise UserError(
            f"task {judge.name} has no problems in split {split!r}; give more rows, or another split"
        )
    check_gold(judge, wanted, "an evaluation compares answers")
    problems = fitting_problems(loaded, wanted, min_new_tokens=1)
    if max_new_tokens is None:
        found = token_limit(asked.config, config, SamplingParams().max_new_tokens)
        max_new_tokens = found[0] if found is not None else SamplingParams().max_new_tokens
    sampling = _made(SamplingParams, {"temperature": temperature, "max_new_tokens": max_new_tokens})
    result = measure(
        loaded,
        judge,
        problems,
        num_samples=num_samples,
        sampling=sampling,
        seed=seed,
        answer_from=answer_from,
    )
    protocol = {
        "task": config,
        "split": split,
        "sampling": sampling,
        "num_samples": num_samples,
        "seed": seed,
    }
    prompts = loaded.describe_prompts(is_read_anywhere=answer_from == "anywhere")
    return Evaluation(
        str(asked.config.init or "random weights"),
        result,
        protocol | {"answer_from": answer_from},
        f"{prompts}; at most {max_new_tokens} tokens",
    )


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """Compare two evaluations problem by problem: paired intervals and exact tests.

    Raises:
        UserError: If they were not asked the same, or have no problem in common.
    """
    for side in (before, after):
        if not isinstance(side, Evaluation):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(
                f"compare: got {side!r:.60}, expected what whet.evaluate returned (by their names, models and runs are "
                "compared on the command line: whet compare)"
            )
    unlike = [name for name, value in before.protocol.items() if after.protocol.get(name) != value]
    if unlike:
        raise UserError(
            f"compare: the two differ in {', '.join(unlike)}; numbers of different protocols do not compare: evaluate "
            "both alike"
        )
    sides = [_by_problem(side) for side in (before, after)]
    uids = [uid for uid in sides[0] if uid in sides[1]]
    if not uids:
        raise UserError("compare: no problem is in both; evaluate both on the same task")
    count = before.protocol["num_samples"]
    scores = [
        paired.score_problems([side[uid][1:] for uid in uids], [side[uid][0] for uid in uids], count)
        for side in sides
    ]
    (table,) = paired.compare_pairs(scores, [(0, 1)])
    names = before.label, after.label if after.label != before.label else f"{after.label} (2)"
    asked = [side.prompts.replace(", the default for it", "") for side in (before, after)]
    note = "" if asked[0] == asked[1] else f"NOT ASKED ALIKE: {names[0]}: {asked[0]}; {names[1]}: {asked[1]}"
    return Comparison(names, list(table.values()), note)


def logprobs(
    policy: Policy, prompt: str | Messages, completion: str, *, temperature: float = 1.0
) -> list[float]:
    """Return the log-probability, in nats, of each token of a completion after a prompt."""
    return policy.logprobs(prompt, completion, temperature=temperature)


def _by_problem(side: Evaluation) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each problem, the greedy one first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in side.samples:
        found.setdefault(str(row["uid"]), []).append(row)
    return found


def _checked(messages: str | Messages) -> list[dict[str, Any]]:
    """Return messages as the engine takes them; images in them, bytes or Pillow's, as data URIs or files."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    for place, message in enumerate(messages):
        is_message = isinstance(message, Mapping) and "role" in message
        if not (is_message and {"content", "tool_calls"} & message.keys()):
            raise UserError(
                f"message {place}: got {message!r:.80}, expected a dict with 'role' and 'content'"
            )
    return [
        {name: _named_images(value) if name == "content" else value for name, value in message.items()}
        for message in messages
    ]


def _written(rows: Any) -> Path:
    """Write rows to a file that is named by their hash, so that a run on them can be resumed.

    Args:
        rows: Dicts, or a `pandas.DataFrame`. Numbers become text, a missing number (NaN) is written as null.
    """
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        rows = rows.to_dict("records")
    lines = []
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"row {place}: got {row!r:.80}, expected a dict of columns")
        try:
            values = {str(name): _plain(_named_images(value)) for name, value in row.items()}
        except UserError as error:
            raise UserError(f"row {place}: {error}") from None
        try:
            lines.append(json.dumps(values, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"row {place}: cannot be written as JSON ({error}); convert its values") from None
    if not lines:
        raise UserError("got no rows, expected at least one")
    text = "\n".join(lines) + "\n"
    return _cached("rows", f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl", text)


def _plain(value: Any) -> Any:
    """Return a number as the text that an answer column holds, and anything else as it is."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # of NumPy
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None
    return as_text(value) if is_number(value) else value


def _named_images(value: Any) -> Any:
    """Return a value with the images in it, bytes or Pillow's, as data URIs or as paths of files in the cache."""
    if holds_file(value):
        return ImageReader(None).image(value).source
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _named_images(inner) for name, inner in value.items()}
    return [_named_images(inner) for inner in value] if isinstance(value, list | tuple) else value


def _policy(policy: Policy | str | Path) -> PolicyConfig:
    if isinstance(policy, Policy):
        policy.release()  # the run loads it in its own precision
        return policy.config
    return load(policy).config


def _task(task: Task | Rows | str | Path) -> TaskConfig:
    return task.config if isinstance(task, Task) else Task.from_rows(task).config


def _rl_config(
    policy: Policy | str | Path,
    task: Task | Rows | str | Path,
    out: str | Path,
    rewards: Sequence[OwnReward | tuple[OwnReward, float]] | Mapping[str, float] | None,
    algo: str | AlgoConfig,
    num_steps: int,
    options: Mapping[str, Any],
    *,
    verbose: bool,
) -> RLConfig:
    refuse_reentry("a training")  # before rewards are sent to workers, whose import may have begun it
    own = options.get("reward")
    if isinstance(own, list | tuple):
        own = next((item for item in own if callable(item)), None)
    for name, value in (("reward", own), ("rewards", rewards)):
        if callable(value):
            raise UserError(
                f"{name} = a function: expected a list, rewards=[{getattr(value, '__name__', '...')}]"
            )
    given: dict[str, Any] = {
        "out": str(out),
        "policy": _policy(policy),
        "task": _task(task),
        "num_steps": num_steps,
    }
    if rewards is not None:
        given["rewards"], given["reward"] = _rewards(rewards)
    if isinstance(algo, str):
        algo = _named("algo", algo, ALGORITHMS)
    return _suited(_made(RLConfig, given | {"algo": algo} | dict(options)), options, verbose=verbose)


def _rewards(
    rewards: Sequence[OwnReward | tuple[OwnReward, float]] | Mapping[str, float],
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return weights of built-in rewards, and rewards of the user's own."""
    if isinstance(rewards, Mapping):
        return dict(rewards), ()
    built: dict[str, float] = {}
    own: list[str] = []
    for item in rewards:
        reward, weight = item if isinstance(item, tuple) else (item, 1.0)
        if isinstance(reward, str) and ":" not in reward:
            built[reward] = float(weight)
        elif isinstance(reward, str):
            own.append(reward if weight == 1.0 else f"{reward}={weight}")
        else:
            spec = _written_reward(reward)
            own.append(spec if weight == 1.0 else f"{spec}={weight}")
    return built, tuple(own)


def _written_reward(function: Callable[..., float | None]) -> str:
    """Write a function, with all that it needs, to a file of its own: a run on it can be resumed and replayed."""
    name = own_name(function)
    parcel = ship_function(function)
    pieces = [text.rstrip("\n") for text, *_ in parcel["pieces"]]
    if parcel["function"] != name:
        pieces.append(f"{name} = {parcel['function']}")
    # Not where it was defined: a notebook's cell is another file in every session.
    head = f'"""{name}, as it was when the run began."""\n\nfrom __future__ import annotations'
    if folders := _own_folders("\n".join(pieces)):
        head += (
            f"\n\nimport sys\n\nsys.path[:0] = [folder for folder in {folders!r} if folder not in sys.path]"
        )
    text = "\n\n\n".join([head, *pieces]) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{_cached('rewards', f'{name}_{digest}.py', text)}:{name}"


def _own_folders(source: str) -> list[str]:
    """Return the folders of the user's own modules that a piece of source imports: another process looks elsewhere."""
    installed = [
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        for top in {name.partition(".")[0] for name in names} - {"whet"}:
            file = getattr(sys.modules.get(top), "__file__", None)
            if file is None:
                continue
            path = Path(file).resolve()
            folder = path.parent.parent if path.stem == "__init__" else path.parent
            if not any(folder.is_relative_to(place) for place in installed):
                found[str(folder)] = None
    return list(found)


def _cached(folder: str, name: str, text: str) -> Path:
    """Write a file that is named by its content to the user's cache, whole or not at all."""
    path = cache_folder() / folder / name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    return path


ARGUMENTS = {"reward": "rewards", "policy.init": "policy", "task.name": "task"}
"""Fields that functions of Python have under another name."""


def _made(cls: type[C], given: Mapping[str, Any]) -> C:
    """Make a config from its fields, as strictly as from a file; fields of some groups may be given alone.

    Raises:
        UserError: If a field is unknown, or its value is not permitted.
    """
    known = leaves(cls) | groups(cls)  # pyright: ignore[reportArgumentType]
    own = {item.name for item in fields(cls)}  # pyright: ignore[reportArgumentType]
    homes = {item.name: group for group, part in LOOSE.items() if group in own for item in fields(part)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        values[name] = to_dict(value) if is_dataclass(value) else value  # pyright: ignore[reportArgumentType]
    if isinstance(values.get("optim"), str):
        values["optim"] = _named("optim", values["optim"], PRESETS)
    for name in [name for name in values if name not in own]:
        if name not in homes:
            found = meant(name, known)  # options of some groups are given alone
            group, _, last = (found or "").rpartition(".")
            near = found and (last if group in LOOSE else f"{group}={{{last!r}: ...}}" if group else last)
            near = ARGUMENTS.get(found or "") or near or closest(name, [*own, *homes])
            unit = f" ({what})" if (what := counts(name, found)) else ""
            raise UserError(
                f"{cls.__name__} has no field {name!r}" + (f"; did you mean {near!r}?{unit}" if near else "")
            )
        group = homes[name]
        if not isinstance(values.get(group, {}), Mapping):
            raise UserError(
                f"{group} = {values[group]!r:.60} and {name}: give {name} within {group}, as a dict"
            )
        values[group] = {**values.get(group, {}), name: values.pop(name)}
    for name, value in values.items():
        part = unwrap(known[name])[0] if name in known else None
        if is_dataclass(part) and value is not None and not isinstance(value, Mapping):
            first = fields(part)[0].name  # pyright: ignore[reportArgumentType]
            raise UserError(
                f"{name} = {value!r:.60}: expected a dict of its fields, as in {name}={{{first!r}: ...}}"
            )
    return from_dict(cls, values, where="whet")  # pyright: ignore[reportArgumentType]


def _suited(config: Trained, options: Mapping[str, Any], *, verbose: bool) -> Trained:
    """Choose what suits the model and the task where the caller left it open, and say so."""
    typed: set[str] = set()
    for name, value in options.items():
        homes = [group for group, part in LOOSE.items() if name in {item.name for item in fields(part)}]
        inner = to_dict(value) if is_dataclass(value) else value  # pyright: ignore[reportArgumentType]
        typed |= {f"{group}.{name}" for group in homes}
        typed |= {f"{name}.{key}" for key in inner} if isinstance(inner, Mapping) else {name} - set(LOOSE)
    with _printing(verbose), _python_words():
        return suited(config, typed, lambda line: print(f"whet: {line.partition('.')[2]}", flush=True))


def _named(group: str, name: str, table: Mapping[str, Callable[[], Any]]) -> Any:
    """Return the value of a group of fields that has a name."""
    if name not in table:
        near = closest(name, list(table))
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(f"{group} = {name!r}: expected one of {', '.join(table)}{hint}")
    return table[name]()


def _each(
    running: Iterator[TrainStep],
    on_step: OnStep | None,
    on_samples: Callable[[Sequence[Group]], object] | None,
) -> None:
    for step in running:
        if on_step is not None:
            on_step(step)
        if on_samples is not None:
            on_samples(step.groups)


def _trained(
    config: RLConfig | SFTConfig | DPOConfig | RFTConfig,
    work: Callable[[], object],
    on_step: OnStep | None,
    *,
    verbose: bool,
) -> Run:
    """Do a training, write its report, and return it; one that was asked to stop is kept as far as it is."""
    with _printing(verbose):
        try:
            with _python_words(), steps_told_elsewhere() if on_step is print else nullcontext():
                work()
        except Stopped as stopped:
            _go_on_after(stopped)
            return Run(Path(config.out), is_complete=False)
        finish(config)
    return Run(Path(config.out))


class _Told(io.TextIOBase):
    """A stream of text that passes on to another what a program prints, warnings in Python's words.

    Args:
        stream: The other.
        verbose: Whether it passes on all lines, or those that warn alone.
    """

    def __init__(self, stream: TextIO, *, verbose: bool) -> None:
        self._stream, self._verbose, self._line = stream, verbose, ""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._verbose and self._stream.isatty()

    def flush(self) -> None:
        self._stream.flush()

    def write(self, text: str) -> int:
        if self._verbose:  # at once: a display draws over its own lines
            self._stream.write("\n".join(map(_told, text.split("\n"))))
            return len(text)
        *lines, self._line = (self._line + text).split("\n")
        warnings = [f"{python_words(line)}\n" for line in lines if WARNING.match(line)]
        self._stream.writelines(warnings)
        return len(text)


WARNING = re.compile(r"(whet: )?warning: ")
_COMMAND = re.compile(r"\b(whet [a-z]+|pip install) ")


def _told(line: str) -> str:
    """Return a line that a program prints in Python's words, but for one with a command to type in a shell."""
    return python_words(line) if WARNING.search(line) or not _COMMAND.search(line) else line


@contextmanager
def _printing(verbose: bool) -> Iterator[None]:
    """Let a program print what it does, or only what it warns of."""
    with (
        redirect_stdout(_Told(sys.stdout, verbose=verbose)),
        redirect_stderr(_Told(sys.stderr, verbose=True)),
    ):
        yield


def _heard(call: Callable[[C], object] | None, verbose: bool) -> Callable[[C], object] | None:
    """Let a function of the caller's print, whatever the program that calls it may print."""
    if call is None or verbose:
        return call
    out = sys.stdout

    def heard(value: C) -> object:
        with redirect_stdout(out):
            return call(value)

    return heard


def _go_on_after(stopped: Stopped) -> None:
    """Let a program go on after Ctrl-C (a notebook's stop button); any other signal meant all of it, and ends it."""
    if stopped.code != 128 + signal.SIGINT:
        raise stopped


def _interval(name: str, interval: Interval) -> str:
    low, high = paired.show(name, interval.low), paired.show(name, interval.high)
    unit = paired.unit(name)
    return f"{paired.show(name, interval.mean):>8} {unit} ({low} to {high})"


def _first(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return next(row[name] for row in rows if name in row)


def _last(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return next(row[name] for row in reversed(rows) if name in row)


def _curve(values: Sequence[float]) -> str:
    """Draw numbers as a small line."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    points = " ".join(
        f"{160 * place / (len(finite) - 1):.1f},{30 - 28 * (value - low) / ((high - low) or 1):.1f}"
        for place, value in enumerate(finite)
    )
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    return f'<svg width="160" height="32" role="img">{line}</svg>'
