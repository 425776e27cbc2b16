"""`whet eval`: evaluates a model on held-out problems, with intervals over problems."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from whet.config import align, closest, counted, dump_yaml, read_yaml, user_path
from whet.eval.chess.games import GamesConfig, Player, check_opponents, measure_games, metric_names
from whet.eval.grade import AnswerFrom, right_anywhere, right_in_place
from whet.eval.measure import Chunk, EvalResult, evaluate, total_work
from whet.eval.metrics import headline_names
from whet.eval.progress import read_finished, save_chunk, start_progress
from whet.eval.record import PROGRESS, SUMMARY, describe_weights, write_json, write_summary
from whet.eval.show import describe, draw_evaluation, intervals, print_result
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.kernels import dispatch
from whet.model.lora.files import find_model
from whet.model.weights import check_weights
from whet.report.markdown import write_report
from whet.rewards.base import EPISODE, JUDGE, MODEL, TIMEOUT_S, WeightedReward, build_rewards, check_timeout
from whet.stats import Interval, share_interval
from whet.storage.folder import check_folder, next_line, open_run, run_of
from whet.tasks.base import MOST_HELD_OUT, OPTIONS, TaskConfig, answers_of, check_gold, load_task
from whet.tasks.chess.stockfish import EngineError
from whet.tasks.quarantine import write_quarantine
from whet.tasks.tools import environment_for
from whet.telemetry.display import advancing, open_display
from whet.telemetry.hardware import HardwareMonitor, peak_memory_gib
from whet.telemetry.heartbeat import alive
from whet.telemetry.log import RunLog
from whet.telemetry.provenance import data_hash, write_environment, write_provenance
from whet.types import Problem, Task, UnreadError, UserError

AUTO, ALL = "auto", "all"
"""Values of `split` that no task has."""
ONE_FILE = frozenset({"jsonl", "choice", "yes_no", "code", "countdown", "letters"})
"""Tasks that divide a file into splits themselves."""
MISSED, ENVIRONMENT_MISSED, ENGINE_FAILED = 1, 2, 3
"""Exit status where a required metric is missed, one of chess's environment is, or Stockfish fails."""


@runtime_checkable
class Measured(Protocol):
    """A task with measures of its own besides right and wrong."""

    def measures(
        self, items: Sequence[tuple[Problem, str]]
    ) -> tuple[Mapping[str, Interval], Mapping[str, Any]]:
        """Return metrics of greedy answers with intervals, and what they are made of as JSON values."""
        ...


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of one model on one task."""

    out: str
    """Output folder."""
    policy: PolicyConfig
    """The model."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The problems."""
    tasks: tuple[str, ...] = ()
    """Several tasks, each a name or name=FOLDER_OR_FILE, in place of task.name and task.path; the other fields of task
    go to those that read them. Each gets its own sub-folder."""
    split: str = AUTO
    """Part of the data: train, dev, test, or all. auto takes all rows of a file, but the part that training leaves out
    (test) where the model was trained on that file, and of all other data."""
    num_problems: int = 200
    """Problems taken from the front of the split's hash order; 0 takes all."""
    num_samples: int = 16
    """Completions per problem (n); pass@k is reported for every k up to this."""
    k: tuple[int, ...] = ()
    """Further k for which pass@k is shown; each at most num_samples. eval.json has all of them."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling settings (greedy decoding is always measured, too)."""
    answer_from: AnswerFrom = "schema"
    """schema: only the answer block counts; anywhere: boxes, phrases and the last number count, too."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Weight of built-in rewards by name, as in `whet rl`: every completion is scored, and best@n is the accuracy of
    the sample with the highest reward. Empty: no best@n."""
    reward: tuple[str, ...] = ()
    """Additional rewards of your own: path.py:function, weight 1, or path.py:function=0.5."""
    reward_timeout_s: float = TIMEOUT_S
    """Seconds that one call of a reward of your own may take; a longer one gives no score. Calls run in parallel."""
    precision: str = "float32"
    """Dtype of the parameters: float32 or bfloat16."""
    seed: int = 0
    """Seed of the samples and of the bootstrap."""
    games: GamesConfig = field(default_factory=GamesConfig)
    """Games that are played after an evaluation of chess."""
    require: dict[str, float] = field(default_factory=dict)
    """Least value of metrics, by name; one that is missed ends with exit status 1, one of chess's environment (env_...)
    with 2."""
    hardware: bool = True
    """Record power, energy, load and memory of the devices during sampling."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples = {self.num_samples}: expected 1 or more")
        if self.num_problems < 0:
            raise ValueError(f"num_problems = {self.num_problems}: expected 0 (all) or more")
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0: greedy is measured anyway; expected above 0 for the samples"
            )
        check_timeout(self.reward, self.reward_timeout_s)
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision = {self.precision!r}: expected float32 or bfloat16")
        wrong = next((k for k in self.k if not 1 <= k <= self.num_samples), None)
        if wrong is not None:
            raise ValueError(
                f"k = {wrong}: pass@{wrong} needs 1 <= k <= num_samples = {self.num_samples}; draw more samples, or "
                "use a smaller k"
            )
        if self.games != GamesConfig() and (self.tasks or not self.task.name.startswith("chess")):
            raise UnreadError("games is read with one task of chess alone; leave it out", "games")
        for name in {JUDGE, MODEL} & self.rewards.keys():
            raise ValueError(f"rewards.{name}: evaluations do not use a {name}; leave it out")
        task_configs(self)


def take_problems(task: Task, split: str, count: int) -> list[Problem]:
    """Return the first `count` problems of a split by uid (0: all): a fixed random sample. Of all splits those to test
    on come first, so that a model that was trained on the others can be compared."""
    parts = ("test", "dev", "train") if split == ALL else (split,)
    problems = [p for part in parts for p in sorted(task.problems(part), key=lambda problem: problem.uid)]
    return problems[:count] if count else problems


def chosen_split(split: str, own: TaskConfig, policy: PolicyConfig) -> str:
    """Return the split that an evaluation measures.

    Args:
        split: As configured.
        own: The task.
        policy: The model: none is measured on the rows that it was trained on, unless asked.
    """
    if split != AUTO:
        return split
    is_one = own.name in ONE_FILE and bool(own.path) and user_path(own.path).is_file()
    return ALL if is_one and not _was_trained_on(policy, user_path(own.path)) else "test"


def _was_trained_on(policy: PolicyConfig, data: Path) -> bool:
    """Say whether a run that led to a model, by its own words, read a file."""
    places = [policy.init, policy.adapter]
    for place in places:  # grows by what each run began from
        folder = run_of(place)
        if not place or len(places) > 99 or not (folder / "config.yaml").is_file():
            continue
        fields = read_yaml(folder / "config.yaml")
        task, began = fields.get("task"), fields.get("policy")
        paths = [fields.get("pairs"), task.get("path") if isinstance(task, Mapping) else ""]
        paths += (task.get("paths") or {}).values() if isinstance(task, Mapping) else ()
        if "optim" in fields and any(
            isinstance(path, str) and path and user_path(path).resolve() == data.resolve() for path in paths
        ):
            return True
        if isinstance(began, Mapping):
            places += [str(began.get(name) or "") for name in ("init", "adapter")]
    return False


def split_note(config: EvalConfig, own: TaskConfig, task: Task, split: str, option: str = "--split") -> str:
    """Report which rows of a file are measured if no split was given, and the option; '' for other data."""
    if config.split != AUTO or own.name not in ONE_FILE or not own.path or not user_path(own.path).is_file():
        return ""
    name, count = Path(own.path).name, len(take_problems(task, ALL, 0))
    if split == ALL:
        some = f"{config.num_problems:,} of all" if 0 < config.num_problems < count else "all"
        return f"{name}: {some} {count:,} rows are measured ({option} test: those alone that training leaves out)"
    held_out = len(task.problems("test"))
    more = min(MOST_HELD_OUT, max(0.2, 2 * own.held_out))
    more = f"; more: train with --task.held-out {more:g}" if more > own.held_out else ""
    measured = f"{held_out:,} of {counted(count, 'row')} are measured"
    return f"{name}: {measured}, which were not trained on (all: {option} all{more})"


def fitting_problems(policy: Policy, problems: Sequence[Problem], *, min_new_tokens: int) -> list[Problem]:
    """Return the problems whose prompt leaves enough room in the model's context.

    Args:
        policy: Provides tokenizer and context length.
        problems: Candidates.
        min_new_tokens: Required room. Training requires the longest completion, so that the context truncates none; an
            evaluation requires one token and counts truncated ones, so that hard problems do not drop out.

    Raises:
        UserError: If none fits, or the tokenizer cannot spell them.
    """
    policy.check_alphabet(problems)
    context = policy.model.config.max_positions
    lengths: list[int] = []
    for problem in problems:  # a million of them take minutes
        alive()
        lengths.append(len(policy.prompt_ids(problem)))
    kept = [
        problem
        for problem, length in zip(problems, lengths, strict=True)
        if length + min_new_tokens <= context
    ]
    if problems and not kept:
        raise UserError(
            f"no prompt fits: the context holds {context} tokens, the shortest prompt has {min(lengths)}, completions "
            f"need {min_new_tokens}; lower sampling.max_new_tokens or use a model with a longer context"
        )
    return kept


def task_configs(config: EvalConfig) -> dict[str, TaskConfig]:
    """Return the tasks of an evaluation by the name of their sub-folder; '' for the one task without `tasks`.

    Raises:
        UserError: If an entry names no task, two have the same folder, or no task reads a field of `task`.
    """
    if not config.tasks:
        return {"": config.task}
    given = {
        item.name: value
        for item in fields(TaskConfig)
        if item.name not in ("name", "path")
        and (value := getattr(config.task, item.name)) not in (item.default, {})
    }
    found: dict[str, TaskConfig] = {}
    read: set[str] = set()
    for entry in config.tasks:
        name, _, path = entry.partition("=")
        options: dict[str, Any] = {key: given[key] for key in given.keys() & OPTIONS.get(name, frozenset())}
        try:
            if name == config.task.name and not path:
                path = config.task.path
            task = TaskConfig(name=name, path=path, **options)
        except ValueError as error:
            raise UserError(f"tasks: {entry!r}: {error} (written NAME or NAME=FOLDER_OR_FILE)") from None
        folder = Path(name.partition(":")[0]).stem if ":" in name else name
        if folder in found and path:
            folder = f"{folder}-{Path(path).stem}"
        if folder in found:
            raise UserError(f"tasks: {entry!r} is given twice; leave one out")
        found[folder] = task
        read |= options.keys()
    unread = sorted(given.keys() - read)
    if unread:
        raise UserError(
            f"task.{unread[0]} is read by none of tasks = {', '.join(config.tasks)}; leave it out"
        )
    return found


def plan(config: EvalConfig) -> str:
    """Describe the work without doing it."""
    tasks = task_configs(config).values()
    names = ", ".join(f"{task.name}/{chosen_split(config.split, task, config.policy)}" for task in tasks)
    return align(
        "work",
        {
            "problems": f"{config.num_problems or 'all'} of {names}",
            "completions per problem": f"{config.num_samples} sampled + 1 greedy",
            "new tokens per completion, at most": config.sampling.max_new_tokens,
        },
    )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One task of an evaluation, ready to run."""

    name: str
    config: EvalConfig
    task: Task
    problems: list[Problem]
    num_left_out: int
    rewards: list[WeightedReward]


def main(config: EvalConfig, *, resume: bool = False) -> None:
    """Run the evaluation, write its folder, and say what to do next."""
    try:
        is_new = run(config, resume=resume)
    except EngineError as error:
        print(f"whet: error: {error}", file=sys.stderr)
        raise SystemExit(ENGINE_FAILED) from None
    if is_new:
        print(next_line(["whet", "report", config.out]))
    if status := check_required(config):
        raise SystemExit(status)


def check_required(config: EvalConfig) -> int:
    """Compare the metrics of a finished evaluation with those that are required, and print what is missed.

    Returns:
        0; `MISSED`; or `ENVIRONMENT_MISSED` where a metric of chess's environment is.

    Raises:
        UserError: If there is no such metric.
    """
    status = 0
    for name in task_configs(config) if config.require else ():
        metrics = json.loads((Path(config.out) / name / SUMMARY).read_bytes())["metrics"]
        for metric, least in config.require.items():
            if metric not in metrics:
                raise UserError(
                    f"require.{metric}: this evaluation has no such metric; it has {', '.join(metrics)}"
                )
            if metrics[metric]["mean"] < least:
                print(f"missed: {metric} = {metrics[metric]['mean']:.4g}, required {least:g}")
                status = max(status, ENVIRONMENT_MISSED if metric.startswith("env_") else MISSED)
    return status


def run(config: EvalConfig, *, resume: bool = False, date: str = "") -> bool:
    """Run the evaluation and write its folder; return False where it was finished before.

    Args:
        config: Its settings.
        resume: Go on with an unfinished one.
        date: Today for the chat template, as in `load_policy`.
    """
    folder = Path(config.out)
    if resume and _is_finished(folder):
        open_run(folder, dump_yaml(config), resume=True)
        print(f"{folder}: this evaluation is finished; nothing was changed")
        return False
    tasks = {name: (own, load_task(own)) for name, own in task_configs(config).items()}
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    policy = load_policy(config.policy, seed=config.seed, dtype=dtype, date=date, steers=True)
    for own, task in tasks.values():
        if note := split_note(config, own, task, chosen_split(config.split, own, config.policy)):
            print(f"whet: {note}", flush=True)
    jobs = [_prepare(config, policy, name, own, task) for name, (own, task) in tasks.items()]
    model = describe_weights(config.policy, policy)
    open_run(folder, dump_yaml(config), resume=resume)
    _write_origin(config, [problem for job in jobs for problem in job.problems])
    print(f"whet: kernels: {dispatch.describe()}", flush=True)
    summaries = {job.name: _run(policy, job, model) for job in jobs}
    shown = {
        f"{name} x {summary['num_problems']}"
        if name
        else Path(config.policy.init).name or "random": intervals(summary)
        for name, summary in summaries.items()
    }
    count = sum(s["num_problems"] for s in summaries.values())
    are_held_out = all(job.config.split == "test" for job in jobs)
    print_result(shown, count, config.num_samples, are_held_out=are_held_out)
    for name, summary in summaries.items():
        print("\n".join([f"{name}:"] * bool(name) + describe(summary)))
    if config.tasks:
        content = {
            "label": _label(config),
            "tasks": {n: _overview(s) for n, s in summaries.items()},
            "model": model,
        }
        write_json(folder / SUMMARY, content)
        write_report(folder)
    print(f"report: {folder / 'report.md'}")
    return True


def check(config: EvalConfig, resume: bool) -> None:
    """Find what an evaluation would stop at before its first completion; loads no weights and creates nothing.

    Raises:
        UserError: As the evaluation would.
    """
    told = inspect(config)
    if not resume:
        check_folder(Path(config.out))
    print("".join(f"# {line}\n" for line in told), end="")
    print("# checked: model, data, prompts and folder; the evaluation would start")


def inspect(config: EvalConfig) -> list[str]:
    """Find what an evaluation would stop at in its model, data and prompts; return a line about each task.

    Raises:
        UserError: As the evaluation would.
    """
    policy = load_policy(config.policy, seed=config.seed, weights=False, steers=True)
    if config.policy.init and user_path(config.policy.init).exists():
        check_weights(find_model(config.policy.init, config.policy.adapter)[0])
    told: list[str] = []
    for name, own in task_configs(config).items():
        job = _prepare(config, policy, name, own, task := load_task(own))
        told += filter(None, [split_note(config, own, task, job.config.split)])
        told.append(
            f"{counted(len(job.problems), 'problem')} of task {own.name}; {job.num_left_out} do not fit the context"
        )
        told.append(_prompts_of(job, policy))
    return told


def _write_origin(config: EvalConfig, problems: Sequence[Problem]) -> None:
    """Write environment.json, and provenance.json for the registry of runs."""
    write_environment(Path(config.out))
    write_provenance(
        Path(config.out),
        base=config.policy.init,
        adapter=config.policy.adapter,
        config_yaml=dump_yaml(config),
        problems=problems,
    )


def _prepare(config: EvalConfig, policy: Policy, name: str, own: TaskConfig, task: Task) -> _Job:
    """Take the problems and create the rewards; anything missing is found before the folder is created."""
    policy.expect(*answers_of(task))
    config = replace(config, split=chosen_split(config.split, own, config.policy))
    environment_for(policy.schema, task)  # fails now if a tool is missing
    rewards: list[WeightedReward] = []
    if config.rewards or config.reward:
        rewards = build_rewards(
            config.rewards, policy.schema, task, config.reward, timeout_s=config.reward_timeout_s
        )
    if EPISODE in config.rewards and getattr(task, "environment", None) is None:
        raise UserError(f"rewards.episode: task {task.name} has no environment that pays; leave it out")
    wanted = take_problems(task, config.split, config.num_problems)
    twice = next((left.uid for left, right in pairwise(wanted) if left.uid == right.uid), None)
    if twice is not None:
        raise UserError(
            f"task {task.name}: two problems have the uid {twice!r}; give every problem a unique one"
        )
    check_gold(
        task,
        wanted,
        "an evaluation compares answers",
        instead="compare what models write: whet compare MODEL OTHER --prompts 'A QUESTION'",
    )
    _check_metrics(config, task)
    check_opponents(config.games)
    problems = fitting_problems(policy, wanted, min_new_tokens=1)
    if not problems:
        raise UserError(
            f"nothing to evaluate: task {task.name} has no problems in split {config.split!r}; give more rows, or "
            "another split"
        )
    if name:
        config = replace(config, tasks=(), task=own, out=str(Path(config.out) / name))
    return _Job(
        name=name,
        config=config,
        task=task,
        problems=problems,
        num_left_out=len(wanted) - len(problems),
        rewards=rewards,
    )


def _check_metrics(config: EvalConfig, task: Task) -> None:
    """Refuse requirements of what is not measured; of a task of the user's own one sees it at the end.

    Raises:
        UserError: If there is no such metric.
    """
    own = getattr(task, "metric_names", None) if isinstance(task, Measured) else ()
    if own is None:
        return
    known = (*headline_names(config.num_samples, config.k), *own, *metric_names(config.games))
    for metric in config.require:
        if metric not in known:
            near = closest(metric, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise UserError(
                f"require.{metric}: task {task.name} has no such metric; it has {', '.join(known)}{hint}"
            )


def _prompts_of(job: _Job, policy: Policy) -> str:
    """Say how a task's problems are asked, and where their answers are read."""
    told = policy.describe_prompts(is_read_anywhere=job.config.answer_from == "anywhere")
    return f"{job.name}: {told}" if job.name else told


def _run(policy: Policy, job: _Job, model: dict[str, Any]) -> dict[str, Any]:
    """Evaluate one task, or resume it; return the content of eval.json."""
    config, folder = job.config, Path(job.config.out)
    if _is_finished(folder):
        return json.loads((folder / SUMMARY).read_bytes())
    if job.name:
        open_run(folder, dump_yaml(config), resume=(folder / "config.yaml").is_file())
        _write_origin(config, job.problems)
    policy.expect(*answers_of(job.task))
    print(f"whet: {_prompts_of(job, policy)}", flush=True)
    identity = _identity(policy, job)
    notes = start_progress(folder, {"identity": identity, "model": model})
    known, parts = read_finished(folder, notes, job.problems, config.num_samples)
    earlier_s = total_work(parts).seconds  # of sampling: how long their grading took was not kept
    count = config.num_samples + 1
    title = f"eval {job.task.name}/{config.split}"
    with (
        HardwareMonitor() if config.hardware else nullcontext() as monitor,
        open_display(title, len(job.problems) * count, (), unit="completion") as display,
    ):
        if job.num_left_out:
            num_wanted = job.num_left_out + len(job.problems)
            display.note(f"{job.num_left_out} of {num_wanted} problems do not fit the context; skipped")
        if said := write_quarantine(folder, job.task):
            display.note(said)
        advance = advancing(display, len(known) * count)
        if known:
            display.note(f"{len(known)} of {len(job.problems)} problems were already finished; continuing")

        def keep(chunk: Chunk) -> None:
            window = None if monitor is None else monitor.window(chunk.start_s, chunk.end_s)
            parts.append(replace(chunk.work, hardware=window))
            save_chunk(folder, chunk, parts[-1])

        result = evaluate(
            policy,
            job.task,
            job.problems,
            num_samples=config.num_samples,
            sampling=config.sampling,
            seed=config.seed,
            answer_from=config.answer_from,
            rewards=job.rewards,
            ks=config.k,
            known=known,
            on_finished=advance,
            on_chunk=keep,
        )
    work = total_work(parts)
    if work.hardware is not None:  # the devices' readings are of the whole machine
        work = replace(work, hardware=work.hardware | {"peak_memory_gib": peak_memory_gib(policy.device)})
    result = replace(result, work=work, seconds=earlier_s + result.seconds)
    own, details = _own_measures(policy, job, result, folder)
    result = replace(result, metrics={**result.metrics, **own})
    summary = write_summary(
        folder,
        result,
        label=_label(config),
        identity=identity,
        model=model,
        measures=own,
        details=details,
        beside=_read_otherwise(policy, job, result),
    )
    _report(folder, summary, result)
    (folder / PROGRESS).unlink()
    return summary


def _read_otherwise(policy: Policy, job: _Job, result: EvalResult) -> dict[str, dict[str, Interval]]:
    """Return what is right by the other way to read answers: in the schema's place alone (`read_strictly`) where they
    count elsewhere, too, and wherever they stand (`read_anywhere`) where they do not; {} without such a place."""
    if policy.schema.answer_place in ("anywhere", "whole"):
        return {}
    rows = [*result.samples, *([done] for done in result.greedy)]
    if job.config.answer_from == "schema" and policy.schema.fallback == "none":
        name = "read_anywhere"
        right = right_anywhere(policy, job.task, [*result.problems, *result.problems], rows)
    else:
        name, right = "read_strictly", right_in_place(policy, rows)
    shares = [sum(row) / len(row) for row in right]
    count = len(result.samples)
    return {name: {"pass@1": share_interval(shares[:count]), "greedy": share_interval(shares[count:])}}


def _own_measures(
    policy: Policy, job: _Job, result: EvalResult, folder: Path
) -> tuple[dict[str, Interval], dict[str, Any]]:
    """Return what the task measures itself, and what games say."""
    if not isinstance(job.task, Measured):
        return {}, {}
    items = [
        (problem, done.grade.answer or "")
        for problem, done in zip(result.problems, result.greedy, strict=True)
    ]
    metrics, details = job.task.measures(items)
    metrics, details = dict(metrics), dict(details)
    games = job.config.games
    if games.num_games:
        player = Player(
            policy,
            max_new_tokens=job.config.sampling.max_new_tokens,
            seed=job.config.seed,
            layout=job.config.task.layout,
            tries=games.tries,
        )
        scores, told = measure_games(player, games, folder, name=_label(job.config), seed=job.config.seed)
        metrics |= scores
        details["games"] = told
    return metrics, details


def _identity(policy: Policy, job: _Job) -> dict[str, Any]:
    """Return the evaluation's identity: results are comparable only if it is equal (`whet.eval.record.differences`)."""
    config = job.config
    return {
        **_essentials(policy, config),
        "seed": config.seed,
        "num_samples": config.num_samples,
        "left_out": job.num_left_out,
        "problems_sha256": data_hash(job.problems)[0],
    }


def _essentials(policy: Policy, config: EvalConfig) -> dict[str, Any]:
    """Return the parts of the identity in which comparable evaluations agree (`whet.eval.record.IDENTITY`)."""
    return {
        "protocol": policy.protocol(),
        "task": asdict(config.task),
        "split": config.split,
        "sampling": asdict(config.sampling),
        "answer_from": config.answer_from,
        "precision": config.precision,
    }


def protocol_of(config: EvalConfig, date: str = "") -> dict[str, Any]:
    """Return what an evaluation of one task will have in its identity that decides whether it can be compared; loads
    no weights.

    Raises:
        UserError: If the model's files, or the task's, are missing or malformed.
    """
    policy = load_policy(config.policy, seed=config.seed, weights=False, date=date, steers=True)
    policy.expect(*answers_of(load_task(config.task)))
    config = replace(config, split=chosen_split(config.split, config.task, config.policy))
    return json.loads(json.dumps(_essentials(policy, config)))


def _report(folder: Path, summary: dict[str, Any], result: EvalResult) -> None:
    """Log the metrics and write report.md with its plots; repeated on resume if it was interrupted."""
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    with RunLog(folder) as log:
        log.write_metrics("eval", 0, {f"eval/{name}": row.mean for name, row in result.metrics.items()})
    write_report(folder)
    drawn = draw_evaluation(summary, result.samples, folder / "plots")
    with (folder / "report.md").open("a", encoding="utf-8") as file:
        file.write("\n## Samples in plots\n\n")
        file.writelines(f"![{name.replace('_', ' ')}](plots/{name}.png)\n\n" for name in drawn)


def _overview(summary: dict[str, Any]) -> dict[str, Any]:
    """Return one task's entry in the table of several tasks."""
    metrics = summary["metrics"]
    return {
        "num_problems": summary["num_problems"],
        **{name: metrics[name] for name in ("pass@1", "greedy", f"pass@{summary['num_samples']}", "format")},
    }


def _label(config: EvalConfig) -> str:
    return config.policy.init or "random weights"


def _is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).is_file() and not (folder / PROGRESS).is_file()
