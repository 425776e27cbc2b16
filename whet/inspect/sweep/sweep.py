"""`whet sweep RECIPE`: finds a recipe's fastest settings on this machine by running its steps."""

from __future__ import annotations

import json
import math
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape

from whet.cli import Program, passed_words
from whet.config import dump_yaml, to_dict
from whet.inspect.memory.plan import PlanConfig, read_recipe
from whet.inspect.sweep.page import as_text, write_page
from whet.inspect.sweep.points import (
    FLAGS,
    HEADROOM,
    PRECISIONS,
    Measured,
    Point,
    Run,
    candidates,
    choose,
    grid,
)
from whet.inspect.sweep.worker import Answer, Worker
from whet.report.page import json_for_script
from whet.storage.folder import dated, open_run
from whet.telemetry.display import clock, escape_controls
from whet.train.optim.step import parameter_dtype
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

Mode = Literal["quick", "full", "single", "grpo"]
ROUNDS: dict[Mode, int] = {"quick": 3, "full": 4, "single": 5, "grpo": 3}
MOST: dict[Mode, int] = {"quick": 5, "full": 6, "single": 1, "grpo": 5}
"""Most values per setting."""
NAMES = {
    "token_budget": "micro-batch",
    "max_rows": "decoded together",
    "checkpoint_layers": "checkpointing",
    "num_threads": "threads",
}
ALWAYS = ("token_budget", "max_rows")
AGAINST = "recipe against best"
REFERENCE = {"kl": "k3_loss", "kl_coef": 0.01}


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The fastest settings of a recipe that fit into this machine's memory, by running its steps with each."""

    recipe: str
    """Recipe, .yaml file or run folder, as the program accepts it."""
    of: Literal["rl", "sft"] = "rl"
    """Program of the recipe."""
    set: tuple[str, ...] = ()
    """Fields of the recipe that are overridden; written as its own options are: --policy.init MODEL."""
    mode: Mode = "quick"
    """quick: one setting after the other; full: all combinations; single: the unchanged recipe; grpo: like quick, with
    a frozen reference model in memory."""
    tokens: tuple[int, ...] = ()
    """Tokens of a micro-batch to try; empty: powers of two from the longest sequence to the whole update."""
    rows: tuple[int, ...] = ()
    """Sequences decoded together to try; empty: all of a step's, half of them, a quarter ..."""
    threads: tuple[int, ...] = ()
    """CPU threads to try; empty: powers of two up to all cores."""
    rounds: int = 0
    """Rounds over the points, in alternating order; 0: 3 in quick and grpo, 4 in full, 5 in single."""
    steps: int = 1
    """Timed steps per visit, after one warm-up step."""
    compile: bool = False
    """Also try torch.compile; takes minutes."""
    memory_gib: float = 0.0
    """Memory for the run in GiB; 0 for the free memory."""
    out: str = ""
    """Output folder for sweep.json and sweep.html; empty for runs/sweep-DATE-TIME."""

    def __post_init__(self) -> None:
        PlanConfig(recipe=self.recipe, of=self.of, set=self.set)
        for name, least in (("rounds", 0), ("steps", 1), ("memory_gib", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} = {getattr(self, name)}: expected {least} or more")
        for name in ("tokens", "rows", "threads"):
            if any(value < 1 for value in getattr(self, name)):
                raise ValueError(f"{name}: got {getattr(self, name)}, expected numbers of 1 or more")
        if self.of == "sft" and (self.rows or self.mode == "grpo"):
            raise ValueError(
                "rows and mode = grpo are read with of = rl, where a model samples; leave them out"
            )
        if self.mode == "single" and (self.tokens or self.rows or self.threads or self.compile):
            raise ValueError(
                "mode = single tries the recipe alone: leave out tokens, rows, threads and compile"
            )


def main(config: SweepConfig) -> None:
    """Run the sweep, write sweep.json and sweep.html, and print the table and the recommendation.

    Raises:
        UserError: If the recipe cannot be loaded, or none of the tried settings fits.
    """
    run = read_recipe(PlanConfig(recipe=config.recipe, of=config.of, set=config.set))
    folder, console = Path(config.out or dated("sweep")), Console()
    with console.status("loading") as status:

        def say(text: str) -> None:
            status.update(escape(escape_controls(text)))
            if not console.is_terminal:  # a log file: each point once
                print(escape_controls(text), flush=True)

        with Sweep(config, run, say) as sweep:
            open_run(folder, dump_yaml(config), resumable=False)
            try:
                sweep.run_all()
            finally:
                content = sweep.content()
                text = json.dumps(json.loads(json_for_script(content)), indent=1)
                (folder / "sweep.json").write_text(text + "\n", encoding="ascii")
    write_page(folder / "sweep.html", content)
    print(escape_controls(as_text(content)))
    print(f"\n{folder / 'sweep.html'} shows everything")
    if content["best"] is None:
        raise UserError(
            f"none of the tried settings fits {HEADROOM:.0%} of {content['memory_bytes'] / 2**30:.2f} GiB: use a "
            "smaller model, shorter completions, or --optim.precision bfloat16_master"
        )


def with_reference(run: Run) -> Run:
    """Return an RL recipe with a frozen reference model, its own if it has one."""
    assert isinstance(run, RLConfig)
    if run.algo.kl != "none":
        return run
    try:
        return replace(run, algo=replace(run.algo, **REFERENCE))  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise UserError(f"mode = grpo: this recipe cannot have a reference model: {error}") from None


class Sweep:
    """One sweep: its worker processes and results.

    Args:
        config: The settings to try.
        run: The recipe.
        say: Called with the next action.
        make: Starts a worker process.

    Attributes:
        about: Facts about machine and recipe.
        base: The recipe's own settings.
        best: The settings to recommend; None if nothing fits.
        stages: Measurements by stage; only those of one stage were measured alternately.
    """

    def __init__(
        self,
        config: SweepConfig,
        run: Run,
        say: Callable[[str], None],
        make: Callable[[], Worker] = Worker,
    ) -> None:
        self._config, self._say, self._make = config, say, make
        self._plain, self._run = run, with_reference(run) if config.mode == "grpo" else run
        self._rounds = config.rounds or ROUNDS[config.mode]
        self._workers: dict[tuple[bool, torch.dtype], Worker] = {}
        self._memory: dict[Point, Answer] = {}
        self._is_substituted = False
        self._one_model: dict[str, int] | None = None
        self._memory_bytes = int(config.memory_gib * 2**30)
        self._num_visits = self._num_planned = 0
        self._began = time.monotonic()
        self.stages: dict[str, list[Measured]] = {}
        self.best: Point | None = None
        self.base = Point.of(run, run.policy.num_threads)
        self.about = self._ask(self._run, "about")
        if self.about["status"] != "ok":
            self.close()
            raise UserError(f"{config.of} {config.recipe}: {self.about['why']}")
        self._memory_bytes = self.about["memory_bytes"]
        if not self.about["is_cuda"]:
            self.base = replace(self.base, num_threads=self.about["threads"])

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all worker processes."""
        while self._workers:
            self._workers.popitem()[1].close()

    def run_all(self) -> None:
        """Run the mode's measurements, and choose."""
        config, base = self._config, self.base
        self._num_planned, self._began = self._rounds, time.monotonic()
        if config.mode == "single":
            self.best = choose(self.measure("the recipe", [base]), base, self._memory_bytes)
            return
        chosen = {"token_budget": config.tokens, "max_rows": config.rows, "num_threads": config.threads}
        values = candidates(base, self.about, chosen, most=MOST[config.mode])
        sizes = [len(several) for several in values.values()]
        tried = math.prod(sizes) if config.mode == "full" else sum(sizes)
        # The recipe against the best, the precisions, and torch.compile.
        self._num_planned = self._rounds * (tried + 2 + len(PRECISIONS) + 2 * config.compile)
        if config.mode == "full":
            self._choose("all combinations", grid(base, values), base)
        else:
            for name, several in values.items():
                now = self.best or self._smallest(values)
                points = [replace(now, **{name: value}) for value in several]
                self._choose(NAMES[name], points, now)
        if self.best is None:
            return
        if config.compile:
            flipped = replace(self.best, compile=not self.best.compile)
            self._choose("torch.compile", [self.best, flipped], self.best)
        if self.best != base:
            self._choose(AGAINST, [base, self.best], base)
        others = [replace(self.best, precision=name) for name in PRECISIONS if name != self.best.precision]
        self.measure("precision", [self.best, *others])
        if self._run != self._plain:
            self._one_model = self._ask(self.best.apply(self._plain), "memory").get("peaks")

    def _choose(self, name: str, points: Sequence[Point], base: Point) -> None:
        self.best = choose(self.measure(name, points), base, self._memory_bytes) or self.best

    def _smallest(self, values: Mapping[str, Sequence[Any]]) -> Point:
        """Return the point to continue from if nothing has fitted yet: the smallest tried values."""
        tried = {name: found[0] for name, found in values.items() if NAMES[name] in self.stages}
        return replace(self.base, **tried)

    def measure(self, stage: str, points: Sequence[Point]) -> list[Measured]:
        """Visit points in alternating order.

        Args:
            stage: Name of the stage.
            points: The points, those with least memory first.
        """
        found = self.stages[stage] = [Measured(point) for point in points]
        for number in range(self._rounds):
            for place, item in enumerate(found if number % 2 == 0 else found[::-1], start=1):
                where = f"round {number + 1} of {self._rounds}, point {place} of {len(found)}"
                self._say(f"{stage}: {where}{self._left()}")
                self._num_visits += 1
                if number == 0:
                    self._measure_memory(item)
                if item.status == "ok":
                    answer = self._ask_point(item.point, "time")
                    item.status, item.why = answer["status"], answer.get("why", "")
                    item.steps += [step | {"round": number} for step in answer.get("steps", [])]
                    self._is_substituted |= answer.get("is_substituted", False)
        return found

    def _left(self) -> str:
        """Say how long the rest will take, at the pace so far; points that do not fit take less."""
        if not self._num_visits:
            return f"; {self._num_planned} visits of a point at most"
        pace = (time.monotonic() - self._began) / self._num_visits
        return f"; at most {clock(pace * max(1, self._num_planned - self._num_visits))} left"

    def _measure_memory(self, item: Measured) -> None:
        """Measure a step of longest sequences, unless it is known, or smaller settings already failed."""
        point = replace(item.point, num_threads=0)  # threads need no memory
        if is_new := point not in self._memory:
            full = (other for other, answer in self._memory.items() if answer["status"] == "oom")
            smaller = next((other for other in full if point.needs(other)), None)
            why = "not tried: smaller settings ran out of memory"
            skipped = {"status": "oom", "why": why}
            self._memory[point] = self._ask_point(item.point, "memory") if smaller is None else skipped
        answer = self._memory[point]
        item.status, item.why = answer["status"], answer.get("why", "")
        item.peaks = answer.get("peaks", {})
        item.longest_seconds = answer.get("longest_seconds", 0.0) if is_new else 0.0

    def _ask_point(self, point: Point, what: str) -> Answer:
        try:
            run = point.apply(self._run)
        except ValueError as error:
            return {"status": "failed", "why": f"the recipe refuses it: {error}"}
        return self._ask(run, what)

    def _ask(self, run: Run, what: str) -> Answer:
        """Query a worker; retry a failure in a fresh one if this one holds memory of earlier points."""
        request = {"what": what, "program": self._config.of, "run": to_dict(run), "count": self._config.steps}
        request["memory_bytes"] = self._memory_bytes
        key = (run.optim.compile, parameter_dtype(run.optim.precision))
        while True:
            is_fresh = not self._workers
            if key not in self._workers:
                self._workers[key] = self._make()
            answer = self._workers[key].ask(request)
            if answer["status"] == "ok":
                return answer
            self.close()
            if is_fresh:
                return answer

    def content(self) -> dict[str, Any]:
        """Return all results as JSON values."""
        config = self._config
        against = self.stages.get(AGAINST, [])
        gain = None
        if (
            len(against) == 2
            and against[1].point == self.best
            and all(i.fits(self._memory_bytes) for i in against)
        ):
            gain = against[1].rate("tokens") / against[0].rate("tokens")
        return {
            "program": config.of,
            "recipe": config.recipe,
            "set": list(config.set),
            "mode": config.mode,
            "about": {name: value for name, value in self.about.items() if name != "status"},
            "memory_bytes": self._memory_bytes,
            "rounds": self._rounds,
            "steps": config.steps,
            "is_substituted": self._is_substituted,
            "base": asdict(self.base),
            "best": None if self.best is None else asdict(self.best),
            "gain": gain,
            "one_model_bytes": max(self._one_model.values()) if self._one_model else None,
            "overrides": None if self.best is None else shlex.join(self.best.words(self.base, ALWAYS)),
            "command": None if self.best is None else self._command(self.best),
            "stages": [
                {"name": name, "points": [item.to_json(self._memory_bytes) for item in found]}
                for name, found in self.stages.items()
            ],
        }

    def _command(self, best: Point) -> str:
        words = best.words(self.base, ALWAYS)
        given = {flag for name, flag in FLAGS.items() if getattr(best, name) != getattr(self.base, name)}
        given |= {FLAGS[name] for name in ALWAYS}
        names = {item: f"--{re.split('[= ]', item)[0].replace('_', '-')}" for item in self._config.set}
        kept = passed_words([item for item, name in names.items() if name not in given])
        return shlex.join(["whet", self._config.of, self._config.recipe, *kept, *words])


PROGRAM = Program(
    config_class=SweepConfig, main=main, positional="recipe", passes={"rl": RLConfig, "sft": SFTConfig}
)
