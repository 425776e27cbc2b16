"""What stands around the steps of every training run: saving, stopping when asked to, and being watched."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, Protocol

import torch

from whet.config import default_data, dump_yaml, read_yaml, to_dict, user_path
from whet.eval.compare.asked import FILES
from whet.generate.policy import Policy, PolicyConfig, load_policy, resolve_device, written_date
from whet.install import as_typed
from whet.kernels import dispatch
from whet.model.changes import CHANGES, changed_weights
from whet.model.config import has_experts
from whet.model.files import read_json
from whet.model.lora.files import find_model
from whet.model.lora.side import LoRAConfig, choose, with_tower
from whet.model.lora.trained import Base, Trained, check_continued
from whet.model.quant import QUANTIZATION, packed_parts
from whet.model.weights import check_weights, load_model, load_shares, stored_shape
from whet.ranks.collectives import all_reduce_max, is_distributed, is_share, on_main, rank
from whet.ranks.fsdp import ParallelConfig, fill, sharding, whole_copies
from whet.report.markdown import write_report
from whet.sandbox.reentry import refuse_reentry
from whet.storage.checkpoint import (
    Loaded,
    LogHashes,
    Resume,
    load_step,
    not_finite,
    save_step,
    saved_steps,
)
from whet.storage.commit import DiskFullError, commit_folder
from whet.storage.folder import (
    LENGTHS,
    beside,
    check_folder,
    displaced,
    lengthen,
    next_line,
    open_run,
    refuse_folder,
    run_of,
)
from whet.tasks.base import TaskConfig, check_gold, tasks_inside, tasks_of, told_of
from whet.tasks.chess.task import KINDS
from whet.tasks.quarantine import write_quarantine
from whet.telemetry import heartbeat
from whet.telemetry.heartbeat import SHOW_CURSOR, Heartbeat
from whet.telemetry.log import replace_file, write_warning
from whet.telemetry.provenance import (
    describe_environment,
    inputs_of,
    known_inputs,
    write_environment,
    write_provenance,
)
from whet.telemetry.trackers import TrackConfig, Tracking
from whet.train.optim.safety import SafetyConfig, set_deterministic
from whet.train.optim.step import (
    OptimConfig,
    dtypes,
    learning_rate,
    parameter_dtype,
    prepare_model,
    release_freed,
    shard_layers,
    warm_up_warning,
)
from whet.train.restarts import heard
from whet.types import Group, Problem, Task, UserError


class RunConfig(Protocol):
    """What every training program's config has (a dataclass)."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def out(self) -> str:
        """Run folder."""
        ...

    @property
    def policy(self) -> PolicyConfig:
        """The model that it starts from."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the run."""
        ...

    @property
    def lora(self) -> LoRAConfig:
        """Adapters that are trained in place of the weights."""
        ...

    @property
    def optim(self) -> OptimConfig:
        """Optimizer, schedule and precision."""
        ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        ...

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        ...

    @property
    def parallel(self) -> ParallelConfig:
        """How several ranks hold the model."""
        ...

    @property
    def track(self) -> TrackConfig:
        """Experiment trackers."""
        ...

    @property
    def safety(self) -> SafetyConfig:
        """Resuming, saving and stopping."""
        ...


@dataclass(frozen=True, slots=True)
class TrainStep:
    """A step that is over.

    Attributes:
        step: Steps done.
        num_steps: Steps of the whole run.
        metrics: What was logged of it.
        groups: What `rl` trained on, with rewards and advantages; () for other programs.
    """

    step: int
    num_steps: int
    metrics: Mapping[str, float]
    groups: Sequence[Group] = ()

    def __str__(self) -> str:
        thinking, whole = (self.metrics.get(f"rl/{part}_tokens") for part in ("thinking", "completion"))
        # Without thinking tags every token counts as thinking.
        names = [
            "rl/completion_tokens" if thinking == whole and "thinking" in name else name for name in TOLD
        ]
        told = [
            f"{name.partition('/')[2].replace('_', ' ')} {self.metrics[name]:.3g}"
            for name in names
            if name in self.metrics
        ]
        return f"step {self.step}/{self.num_steps}: {', '.join(told)}"


OnStep = Callable[[TrainStep], object]
TOLD = (
    *(
        "rl/reward_mean",
        "rl/correct",
        "rl/thinking_tokens",
        "rl/entropy",
        "sft/loss",
        "dpo/loss",
        "dpo/accuracy",
    ),
    *("rft/loss", "eval/greedy", "sft/validation_loss"),
)
"""Metrics that a printed step shows."""
KEPT = ("config.yaml", "metrics.jsonl")
"""Files that are in a run folder from its first step on, unless somebody removed them."""
DOUBLE_S = {False: 0.5, True: 3.0}
"""Seconds in which a second signal is the same one: torchrun sends on what its process group has got already."""


def load_trained(
    config: RunConfig, *, plain: bool = False, is_reward: bool = False, weights: bool = True
) -> Policy:
    """Load the policy that a run trains, in its precision; recomputation and compilation are applied.

    Args:
        config: The run's settings.
        plain: Whether it trains on plain chats or pairs, which a model without a protocol is asked as its template has
            it.
        is_reward: Make it a reward model.
        weights: False for a dry run: shape, tokenizer and prompts, and of local weights that their files are there.

    Raises:
        UserError: If something is missing, malformed or does not fit together.
    """
    kinds, date = dtypes(config.optim.precision), written_date(Path(config.out))
    # What adapters of these kinds start from are whole matrices.
    from_shares = config.parallel.kind == "fsdp" and not config.lora.dora and config.lora.init == "default"
    policy = load_policy(
        config.policy,
        seed=config.seed,
        plain=plain,
        date=date,
        is_reward=is_reward,
        weights=weights,
        merge=not config.lora.rank,
        shard=partial(shard_layers, config=config.parallel) if from_shares else None,
        **kinds,
    )
    if config.optim.router_aux_loss_coef and not has_experts(policy.model.config):
        raise UserError("optim.router_aux_loss_coef: this model has no experts to balance; leave it out")
    _refuse_whole(config, policy)
    if policy.adapter is not None and not config.lora.rank and rank() == 0:
        own = policy.adapter.config.get("r", 16)
        print(f"whet: all weights are trained (--lora.rank {own} trains the adapter on)", flush=True)
    if not weights:
        if config.policy.init and user_path(config.policy.init).exists():
            check_weights(find_model(config.policy.init, config.policy.adapter)[0])
        if config.lora.rank:
            _check_lora(config, policy, is_reward=is_reward)
            if policy.adapter is None:
                choose(policy.model, config.lora)
            else:
                check_continued(policy.adapter, config.lora)
        return policy
    if config.lora.rank:
        _check_lora(config, policy, is_reward=is_reward)
        train_adapters(policy, config)
    prepare_model(policy.model, config.optim)
    return policy


LOW_LR = 2e-5
"""Learning rates below this are warned of where adapters are trained."""


def _check_lora(config: RunConfig, policy: Policy, *, is_reward: bool) -> None:
    """Refuse what an adapter cannot hold, and warn of a learning rate that suits whole weights.

    Raises:
        UserError: With what to change.
    """
    if policy.folder is None:
        raise UserError(
            "lora.rank: adapters stand beside a base that is kept in a folder, this run starts from random weights; "
            "give policy.init, or leave lora out"
        )
    if is_reward or policy.model.config.is_reward:
        raise UserError(
            "lora.rank with loss = reward: a reward model's new head is no adapter; leave lora out"
        )
    stored = stored_shape(policy.folder).vocab_size
    if policy.model.config.vocab_size != stored:
        raise UserError(
            f"lora.rank with policy.tags_as_tokens: the vocabulary grows from {stored} to "
            f"{policy.model.config.vocab_size} rows, which no adapter can hold: leave one of them out"
        )
    if config.optim.lr < LOW_LR and rank() == 0:
        text = f"optim.lr = {config.optim.lr:g} is low for adapters: ten times that of whole weights is usual"
        print(f"whet: warning: {text} (1e-5 to 2e-4)", file=sys.stderr, flush=True)


def train_adapters(policy: Policy, config: RunConfig) -> None:
    """Give a policy the adapters that a run trains, and say which; an adapter that it has is trained on."""
    assert policy.folder is not None
    found = policy.adapter
    init = config.policy.init if found is None or config.policy.adapter else found.base
    # As `load_policy` rounded it: an adapter's own base comes first.
    rounded = "none" if found is None else found.quantize
    rounded = config.policy.quantize if rounded == "none" else rounded
    policy.trained = Trained(
        policy.model,
        with_tower(config.lora) if config.policy.train_vision else config.lora,
        base=Base.of(init, policy.folder, rounded),
        seed=config.seed,
        adapter=found,
    )
    policy.adapter = None
    if rank() == 0:
        given = config.policy.adapter or config.policy.init
        goes_on = [] if found is None else [f"lora: the adapter of {given} goes on"]
        print("".join(f"whet: {line}\n" for line in [*goes_on, *policy.trained.lines()]), end="", flush=True)


def _refuse_whole(config: RunConfig, policy: Policy) -> None:
    """Refuse to train all weights of a quantised model: its matrices have no gradients.

    Raises:
        UserError: If it is one, and no adapter is trained in their place.
    """
    if config.lora.rank:
        return
    init = user_path(config.policy.init)
    if packed_parts(policy.model) or config.policy.quantize != "none" or (init / QUANTIZATION).is_file():
        raise UserError(
            f"policy.init = {config.policy.init}: the model is quantised, and its matrices cannot be trained: train an "
            "adapter on it (--lora.rank 16), or all weights of the model that it was made of"
        )


def begin(config: RunConfig, *, watch: bool = False, resume: Resume = False) -> Tracking:
    """Fix kernels and the order of sums, and load the trackers: a missing package ends the run before it starts.

    Args:
        config: The run's settings.
        watch: Begin a heartbeat, which `watched` ends: models, tasks and data may hang while they are loaded, before
            there is a folder to write to.
        resume: Whether the run goes on: `watch` refuses a folder that cannot, before the user's rewards are called.
    """
    refuse_reentry("a training")  # in a worker that imports the script which trains, it would start itself
    dispatch.restore(Path(config.out))
    sameness = config.safety.sameness(resolve_device(config.policy.device))
    set_deterministic(sameness, compiles=config.optim.compile)
    if watch and rank() == 0:
        refuse_folder(Path(config.out), resume=resume is not False)
    if watch:
        Heartbeat(None, rank(), timeout_s=config.safety.hang_timeout_s, phase="load").__enter__()
    return Tracking(config.track, Path(config.out), enabled=rank() == 0)


@contextmanager
def watched() -> Iterator[None]:
    """Around a whole training: end the heartbeat that `open_folder` began, and note how it ended.

    It begins before the first step, where a run may hang as well (curriculum, judge, samplers), and lasts from one
    session to the next where a program samples in between.
    """
    try:
        yield
    except BaseException as error:
        _end_heartbeat(error)
        raise
    _end_heartbeat(None)


def _end_heartbeat(error: BaseException | None) -> None:
    if (beating := heartbeat.current()) is not None:
        beating.__exit__(None if error is None else type(error), error, None)


def open_folder(config: RunConfig, *, resume: Resume) -> Path:
    """Make the run folder or check that it may go on; return it once all ranks can use it. Begin the heartbeat."""
    folder = Path(config.out)

    def prepare() -> None:
        if resume is not False and (folder / "config.yaml").is_file():
            _more_steps(config, max(saved_steps(folder), default=0))
        open_run(folder, dump_yaml(config), resume=resume is not False)
        facts = write_environment(folder) if resume is False else describe_environment()
        print(f"whet: kernels: {facts['kernels']}", flush=True)

    on_main(prepare)
    if resume is False:
        _beat_in(config)
    return folder


def settle(config: RunConfig) -> None:
    """Write to the folder of a resumed run, now that nothing can refuse it any more, what is new from here on.

    A refusal leaves the folder as it was: how long the run is, where it was started, that it had ended well.
    """
    folder = Path(config.out)

    def write() -> None:
        if told := _more_steps(config, max(saved_steps(folder), default=0)):
            lengthen(folder, dump_yaml(config))
            print(f"whet: {told}", flush=True)
        write_environment(folder)

    on_main(write)
    _beat_in(config)


def _beat_in(config: RunConfig) -> None:
    """Begin the heartbeat in the run folder, in place of that of the loading."""
    _end_heartbeat(None)
    Heartbeat(Path(config.out), rank(), timeout_s=config.safety.hang_timeout_s).__enter__()


def _length_of(config: RunConfig) -> str:
    """Return the field that says how long a run is: in steps, or in rounds of them."""
    return next(name for name in LENGTHS if name in config.__dataclass_fields__)


def _more_steps(config: RunConfig, done: int) -> str:
    """Say what it means that a run is resumed for another number of steps; '' where it is not.

    Args:
        config: Its settings.
        done: Steps that are saved.

    Raises:
        UserError: If it has done more steps than that already.
    """
    steps, name = config.num_steps, _length_of(config)
    stored, now = read_yaml(Path(config.out) / "config.yaml").get(name), getattr(config, name)
    if not isinstance(stored, int) or stored == now:
        return ""
    if steps < done:
        raise UserError(
            f"{name} = {now}: {config.out} has done {done} steps already; give more, or begin another run from it: "
            f"--model {config.out} --out FOLDER"
        )
    before = stored * steps // now
    if config.optim.schedule == "constant":
        return f"{before} steps become {steps}, as if they had been {steps} from the start"
    was, rate = (learning_rate(config.optim, min(done, count - 1), count) for count in (before, steps))
    return (
        f"{before} steps become {steps}: optim.schedule = {config.optim.schedule} is planned anew over all {steps}, so "
        f"the learning rate goes on at {rate:.2g} (before: {was:.2g}); one run of {steps} steps would be another"
    )


def end_check(config: RunConfig, told: Sequence[str], *, resume: Resume) -> None:
    """End a dry run: check the run folder, and say what was found as comments of the printed config.

    Raises:
        UserError: If the folder cannot become a run's.
    """
    if resume is False:
        check_folder(Path(config.out))
    told = [*told, warm_up_warning(config.optim, config.num_steps)]
    print("".join(f"# {line}\n" for text in told for line in text.splitlines()), end="")
    print("# checked: model, data, prompts and folder; the run would start")


def write_origin(
    config: RunConfig,
    policy: Policy,
    problems: Sequence[Problem],
    source: Task | None,
    held_out: Sequence[Problem] = (),
) -> None:
    """Write provenance.json (the run's id, hashes of everything that it depends on) and quarantine.jsonl.

    Args:
        config: The run's settings.
        policy: The policy, whose tools count.
        problems: Those that are trained on.
        source: The task that they come from; None where the rows that were left out are written already.
        held_out: Those that it is validated on.

    Raises:
        UserError: If a resumed run reads something else than when it was started.
    """

    def write() -> None:
        write_provenance(
            Path(config.out),
            base=config.policy.init,
            adapter=config.policy.adapter,
            config_yaml=dump_yaml(config),
            problems=problems,
            inputs=inputs_of(config, problems, held_out=held_out, tools=policy.schema.tools),
            may_differ=config.safety.deterministic in ("warn", "off"),
        )
        if source is not None:
            said = [*told_of(source, len(problems)), write_quarantine(Path(config.out), source)]
            print("".join(f"whet: {text}\n" for text in said if text), end="", flush=True)
            for text in said:
                if text.startswith("warning: "):
                    write_warning(Path(config.out), 0, text.removeprefix("warning: "))

    on_main(write)


def restore_model(config: RunConfig, policy: Policy, resume: Resume) -> Loaded | None:
    """Load the weights of a run's checkpoint into its policy; return the rest of it, None where there is none yet."""
    folder, sameness = Path(config.out), config.safety.sameness(policy.device)
    found: Loaded | None = None

    def choose() -> int:
        nonlocal found
        found = load_step(folder, resume, keep=config.safety.keep, sameness=sameness)
        return 0 if found is None else int(found.state["step"])

    step = on_main(choose)
    if rank() and step:
        found = load_step(folder, step, sameness=sameness)
    if found is not None:
        if policy.trained is not None:
            policy.trained.restore(found.folder)
            return found
        if sharding(policy.model) is not None:
            load_shares(policy.model, found.folder)
            return found
        dtype = parameter_dtype(config.optim.precision)
        model, _ = load_model(found.folder, dtype=dtype, is_reward=policy.model.config.is_reward)
        if any(map(is_share, policy.model.parameters())):  # its layers' matrices are divided
            for name, parameter in policy.model.named_parameters():
                fill(parameter, model.get_parameter(name))
        else:
            policy.model.load_state_dict(model.state_dict())
    return found


def finish(config: RunConfig) -> None:
    """Write the report and say where everything is."""
    folder = Path(config.out)
    if rank() == 0:
        write_report(folder)
        model, report = shlex.quote(config.out), folder / "report.md"
        print(f"done: {folder}  (a model, by this name: --model {model}; report: {report})")
        print(next_steps(config))
        program, name = type(config).__name__.removesuffix("Config").lower(), _length_of(config)
        option = [f"--{name.replace('_', '-')}", str(2 * getattr(config, name))]
        print(f"more steps: {as_typed(program, config.out, '--resume', *option)}")


def write_changes(config: RunConfig) -> dict[str, float]:
    """Note in weights.json how many weights a run has changed, and print it; return the shares.

    Random weights are no start to compare with.
    """
    folder = Path(config.out)
    if not config.policy.init:
        return {}
    try:
        found = changed_weights(config.policy.init, str(folder), adapter=config.policy.adapter)
    except (UserError, OSError) as error:  # the run is done, whatever has become of where it began
        print(f"weights not compared with those before: {error}")
        return {}
    facts = found.facts()
    text = json.dumps({"before": config.policy.init, **facts}, indent=1)
    replace_file(folder / CHANGES, text + "\n")
    print(f"weights: {found}")
    return {f"weights_{name}": facts[name] for name in ("changed", "beyond_bfloat16")}


def next_steps(config: RunConfig) -> str:
    """Say what one does with a run that is done; the commands can be pasted."""
    run, before = shlex.quote(config.out), config.policy.adapter or config.policy.init
    task = None if getattr(config, "pairs", "") else getattr(config, "task", None)
    talk = "chat" if task is None else _talk_of(task)
    compared = _comparison(config, task)
    if getattr(config, "loss", "") == "reward":
        talk = compared = ""
        words = ["whet", "rl", "own", "--reward-model", config.out, "--model", before]
        pairs = getattr(config, "pairs", "")
        own = ["--data", pairs, "--rewards", "model", "1"] if pairs else []
        compared = shlex.join([*words, *own, "--out", beside(config.out, "rl")]) if before else ""
    steps = [f"whet {talk} {run}" if talk else "", f"whet report {run}", compared if before else ""]
    return next_line(*steps)


QUESTION = "question"
"""Name in summary.json of a prompt from data without gold answers, by which such a run is compared."""
MAX_QUESTION, ANY_QUESTION = 120, "Who are you?"


def question_of(task: Task | None, problems: Sequence[Problem]) -> dict[str, str]:
    """Return a short prompt of data by which a run cannot be measured, for summary.json: its answers cannot be judged,
    or no row is left to test on; {} where it can.

    Args:
        task: Their task; None for preference pairs.
        problems: The problems.
    """
    if task is not None:
        try:
            check_gold(task, problems, "")
        except UserError:
            pass
        else:
            if not _is_trained_whole(task):
                return {}
    prompts = (problem.prompt.strip() for problem in problems)
    # As a word of a command: one line, no option, no file.
    fitting = (
        text
        for text in prompts
        if 0 < len(text) <= MAX_QUESTION
        and text.isprintable()
        and text[0] != "-"
        and not text.endswith(FILES)
    )
    return {QUESTION: next(fitting, ANY_QUESTION)}


def _is_trained_whole(task: Task) -> bool:
    """Say whether a task's rows are divided among the splits, and none of so few is left to test on."""
    parts = tasks_inside(task).values()
    return all(getattr(part, "divided", "") and not part.problems("test") for part in parts)


def _comparison(config: RunConfig, task: TaskConfig | None) -> str:
    """Return the command that compares a run with what it began from: on its task, or by a prompt where no answer can
    be judged."""
    before = config.policy.adapter or config.policy.init
    words = ["whet", "compare", before, config.out]
    summary = Path(config.out) / "summary.json"
    question = read_json(summary).get(QUESTION) if summary.is_file() else None
    if task is None or question:
        return shlex.join([*words, "--prompts", str(question or ANY_QUESTION)])
    sampling = getattr(config, "sampling", None)
    limit = [] if sampling is None else ["--eval.sampling.max-new-tokens", str(sampling.max_new_tokens)]
    return shlex.join([*words, *task_words(task), *limit, *_asking_words(config.policy, run_of(before))])


def _asking_words(policy: PolicyConfig, before: Path) -> list[str]:
    """Return the options that ask a model with a protocol of its own as a run from it was told to ask: results of
    different protocols do not compare. A model without one is asked as the run anyway."""
    if not any((before / name).is_file() for name in ("config.yaml", "protocol.json")):
        return []
    given = {"schema": policy.schema, "template": policy.template, "system_prompt": policy.system_prompt}
    usual = default_data(PolicyConfig)
    return [
        word
        for name, value in given.items()
        if value != usual[name]
        for word in (f"--eval.policy.{name.replace('_', '-')}", "none" if value is False else str(value))
    ]


def task_words(task: TaskConfig, group: str = "eval.task") -> list[str]:
    """Return the options that evaluate a model on a task; of a mixture of chess that is chess's own evaluation.

    Args:
        task: The task.
        group: What the program calls its task.
    """
    tasks = tasks_of(task)
    if task.name == "mixture" and tasks <= KINDS.keys() and "chess-policy" in tasks:
        layout = [f"--{group}.layout", task.layout] if task.layout != "padded" else []
        return ["--task", "chess", *layout]
    words = ["--task", task.name, *(["--data", task.path] if task.path else [])]
    usual = default_data(TaskConfig)
    for name, value in to_dict(task).items():
        if name in ("name", "path") or value == usual[name]:
            continue
        words.append(f"--{group}.{name.replace('_', '-')}")
        if isinstance(value, dict):
            words += [
                f"{part:g}" if isinstance(part, float) else part for pair in value.items() for part in pair
            ]
        elif value is not True:
            words.append(str(value))
    return words


def _talk_of(task: TaskConfig) -> str:
    """Return the command that talks with, or plays against, a model of a task; '' where it knows neither."""
    tasks = tasks_of(task)
    if not tasks <= KINDS.keys():
        return "chat"
    return "chess" if tasks & {"chess-policy", "chess-reason", "chess"} else ""


class Stopped(SystemExit):
    """A run that was asked to stop, and is saved; its exit status is that of the signal."""


class Interrupted(BaseException):
    """Ends the part of a step before its update, where a signal asked the run to stop."""


class Writer:
    """Does one job at a time beside the caller; what goes wrong in it is raised by the next call.

    Args:
        background: False to do jobs at once.
    """

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Begin a job, when the one before is done."""
        self.wait()
        if self._background:
            self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint writer")
            self._thread.start()
        else:
            job()

    def check(self) -> None:
        """Raise what went wrong in a job that has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the job that is under way, and raise what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as error:
            self._error = error


class Session:
    """Around the steps of one run; a context manager.

    Signals (`whet.train.restarts.ASKED`) let the step that is under way end on all ranks, save it and stop; on one
    rank a step that still samples is given up, and the one before it is saved. A second signal ends the process at
    once.

    Args:
        program: Name of the command, for messages.
        config: The run's settings.
        policy: The policy that is trained and saved.
    """

    def __init__(self, program: str, config: RunConfig, policy: Policy) -> None:
        self._program, self._folder, self._policy = program, Path(config.out), policy
        self._save_every, self._num_steps = config.save_every, config.num_steps
        self._config = config.safety
        self._writer = Writer(background=self._config.background and not is_distributed())
        self._logs = LogHashes(self._folder)
        self._inputs = known_inputs(self._folder)
        self._signal, self._signalled_at, self._stop = 0, -math.inf, 0
        self._handlers: dict[int, Any] = {}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._saved_at = time.monotonic()

    def __enter__(self) -> Session:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._on_signal) for number in heard()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._writer.wait()
        except UserError as failed:
            if error is None or isinstance(error, Stopped):
                raise
            print(f"whet: warning: {failed}", file=sys.stderr, flush=True)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if name == "SIGHUP":  # what is printed from now on must not fail: the terminal is gone
            for descriptor in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        if self._signal:
            if now - self._signalled_at < DOUBLE_S[is_distributed()]:
                return
            if sys.stdout.isatty():
                os.write(1, SHOW_CURSOR.encode())
            os.write(2, f"\nwhet: {name} again: ended at once, without saving\n".encode())
            os._exit(128 + number)
        self._signal, self._signalled_at = number, now
        os.write(2, f"\nwhet: {name}: stopping, saving the last whole step (once more: at once)\n".encode())

    def beat(self, phase: str, step: int) -> None:
        """Say what is done next, in which step: a sign of life."""
        if (beating := heartbeat.current()) is not None:
            beating.beat(phase, step)

    def is_due(self, step: int) -> bool:
        """Say whether a step is to be saved, the same on all ranks; raise what went wrong in an earlier save.

        Args:
            step: Steps done.
        """
        self._writer.check()
        minutes = (time.monotonic() - self._saved_at) / 60
        is_time = 0 < self._config.save_minutes <= minutes
        # SIGHUP is 1: that it is time to save is less than any signal.
        wish = all_reduce_max(float(self._signal or (0.5 if is_time and rank() == 0 else 0)))
        self._stop = int(wish)  # a signal that comes from now on is the next step's
        return bool(wish) or step % self._save_every == 0 or step == self._num_steps

    def save(
        self,
        step: int,
        *,
        is_best: bool,
        training: tuple[Mapping[str, torch.Tensor], Mapping[str, Any]] | None,
    ) -> None:
        """Save the policy as the best, as a checkpoint, as both or not at all.

        Args:
            step: Steps done.
            is_best: Whether it becomes checkpoints/best.
            training: Tensors and JSON values that training goes on from; None for no checkpoint.

        Raises:
            UserError: If the weights are not finite, the disk is full (and that is to stop the run) or refuses, or the
                run folder was moved or removed.
        """
        if not (is_best or training):
            return
        self.beat("save", step)
        release_freed()
        own = self._policy.own_weights()
        if name := not_finite(own):
            raise UserError(
                f"step {step}: parameter {name} is not finite and was not saved; the checkpoint before it is whole: "
                "start from that with a lower optim.lr"
            )
        tensors, state = training or ({}, {})
        weights = whole_copies(self._copies(own))
        tensors = self._copies(tensors)
        text = json.dumps({**state, "inputs": self._inputs})
        logs = self._logs.describe() if rank() == 0 else {}
        size = sum(tensor.nbytes for tensor in (*weights.values(), *tensors.values()))
        best = self._folder / "checkpoints" / "best"

        def write_best() -> None:
            self._check_place(step, weights)
            self._check_space(size)
            if is_best:
                with commit_folder(best) as temporary:
                    self._policy.save(temporary, weights)

        def write() -> None:
            on_main(write_best)
            if not training:
                return
            try:
                save_step(
                    self._folder,
                    step,
                    write_model=lambda folder: self._policy.save(folder, weights),
                    tensors=tensors,
                    state=json.loads(text),
                    logs=logs,
                    keep=self._config.keep,
                )
            finally:
                if not is_distributed():  # one rank alone must not end
                    self._check_place(step, weights)

        is_last = bool(self._stop) or step == self._num_steps
        self._writer.submit(lambda: self._or_continue(write, is_last=is_last))
        if training:
            self._saved_at = time.monotonic()

    def _copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if is_distributed():  # written at once, by all ranks
            return {name: tensor.detach() for name, tensor in tensors.items()}
        return {
            name: tensor.detach().to("cpu", copy=self._config.background) for name, tensor in tensors.items()
        }

    def _check_place(self, step: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Keep the weights of a run whose folder is gone, and end it."""
        if not (place := displaced(self._folder, KEPT if step else KEPT[:1])):
            return
        rescue = self._folder.with_name(f"{self._folder.name}-rescued")
        with commit_folder(rescue) as temporary:
            self._policy.save(temporary, weights)
        text = f"{self._folder}: {place} while the run was writing to it; the weights of step {step} are in {rescue}"
        raise UserError(
            f"{text}; move it back to go on with --resume" if place.startswith("moved to") else text
        )

    def check_place(self, step: int) -> None:
        """Keep the weights of a run whose folder went after the last save, and end it.

        Raises:
            UserError: If it was moved, removed or emptied.
        """
        self._writer.wait()
        if not is_distributed():
            self._check_place(step, self._policy.own_weights())

    def _check_space(self, size: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < size + (1 << 20):
            raise DiskFullError(
                f"{self._folder}: {free / 1e6:,.0f} MB free, a checkpoint needs {size / 1e6:,.0f} MB; earlier ones are "
                "whole: free space, then --resume"
            )

    def _or_continue(self, write: Callable[[], None], *, is_last: bool) -> None:
        try:
            write()
        except DiskFullError as error:
            if is_last or self._config.disk_full == "stop":
                raise
            print(f"whet: warning: {error}; training goes on unsaved", file=sys.stderr, flush=True)

    def look(self) -> None:
        """Leave a step whose weights have not moved yet, where a signal asked for it.

        With several ranks the step goes on: one that left would let the others wait.

        Raises:
            Interrupted: To the caller of `Run.before_update`.
        """
        if self._signal and not is_distributed():
            self._stop = self._signal
            raise Interrupted

    def stop_if_asked(self, step: int) -> None:
        """End the run after a step that was saved, where a signal asked for it; 0: before the first one was over.

        Raises:
            Stopped: With the signal's exit status.
        """
        if self._stop:
            self._writer.wait()
            if rank() == 0:
                name = signal.Signals(self._stop).name
                where = (
                    f"after step {step} of {self._num_steps}, which is saved"
                    if step
                    else "in its first step: nothing is saved yet"
                )
                line = f"whet: stopped by {name} {where}"
                again = as_typed(self._program, str(self._folder), "--resume")
                print(f"{line}; go on with: {again}", flush=True)
            raise Stopped(128 + self._stop)


class Skipped:
    """Counts the steps in a row that were left out because something in them was not finite.

    Args:
        limit: Steps in a row that may be.

    Attributes:
        count: Steps in a row that were left out just now.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._found = ""
        self.count = 0

    def count_step(self, values: Mapping[str, float]) -> int:
        """Count a step, given by what has to be finite in it; return the steps in a row that were left out."""
        bad = [f"{name} {value}" for name, value in values.items() if not math.isfinite(value)]
        self.count, self._found = (self.count + 1 if bad else 0), ", ".join(bad)
        return self.count

    def tell(self, step: int, remedy: str) -> str:
        """Return a warning about the step that was just counted.

        Raises:
            UserError: If there were too many in a row.
        """
        text = f"step {step}: {self._found}, expected finite: the update was left out"
        if self.count > self._limit:
            raise UserError(f"{text}, {self.count} in a row: {remedy} (safety.max_skipped = {self._limit})")
        return text
