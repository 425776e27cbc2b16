"""Kill GRPO in TRL and in whet at the same points, resume each as its manual says, and compare with undisturbed runs.

python bench/reliability/trl_resume.py [--trials N] [--seed S] [--points NAMES] [--json]

One random Llama in one folder, the same prompts, reward and sizes: 6 generations of 4 prompts x 4 samples, 4 updates
from each (TRL: steps_per_generation 2, num_iterations 2; whet: num_minibatches 2, num_epochs 2), float32, one thread.
First two undisturbed runs of each program must be bitwise equal, else nothing could be compared. TRL is resumed by
`train(resume_from_checkpoint=True)`, of which transformers says: "load the last checkpoint in args.output_dir"; where
that raises, as a user would: by deleting the newest checkpoint. whet is resumed by --resume, and never helped.

Points: the newest checkpoint is at the end of a generation; or inside one (TRL after every 3rd update; whet saves
between generations only, so its checkpoints hold samples that wait for their training, staleness 2); a random time;
before, inside or behind a write of a save (TRL: model, torch.save, trainer_state.json; whet: writes, hashes, fsyncs,
renames); the end of a generation in the second pass over the data (TRL 1.16 then deals the prompts in the order of the
first; shuffle_dataset = False would hide it).
Exit status 1 if whet fails once, or if undisturbed runs differ. What TRL does is printed, and fails nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiny_runs
import torch
from datasets import Dataset
from tiny_runs import PROGRAMS, Hook, content, start, whet_main
from transformers import AutoTokenizer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from whet.generate.policy import PolicyConfig, load_policy
from whet.model.config import ModelConfig
from whet.tasks.made.arithmetic import Arithmetic

# ruff: noqa: SIM905 - command lines are read more easily as such
GENERATIONS, UPDATES, PROMPTS, GROUP, MAX_TOKENS = 6, 4, 4, 4, 12
TOTAL = GENERATIONS * UPDATES
SIDES = ("TRL", "whet")
POINTS = ("end of a generation", "inside a generation", "random time", "inside a save", "second epoch")
BOUNDARY, INSIDE, TIME, SAVE, EPOCH = POINTS
TRL_MOMENTS = {
    "trl update": ["trl:GRPOTrainer.training_step"],
    "trl write": ["trl:GRPOTrainer.save_model", "torch:save", "transformers:TrainerState.save_to_json"],
}
SAVING = ("checkpoint write", "hash", "fsync", "rename")
MANY_PROBLEMS, FEW_PROBLEMS = 40, 3 * PROMPTS
"""No epoch ends within a run; each run sees its problems twice."""
REWARD = "def digits(problem, completion):\n    return sum(c.isdigit() for c in completion) / max(1, len(completion))\n"
RL = [
    *f"rl demo --num-steps {GENERATIONS} --num-prompts {PROMPTS} --group-size {GROUP} --save-every 1".split(),
    *f"--policy.num-threads 1 --sampling.max-new-tokens {MAX_TOKENS} --optim.lr 1e-3".split(),
    *"--optim.schedule constant --algo grpo --algo.num-minibatches 2 --algo.num-epochs 2 --reward".split(),
]


@dataclass(frozen=True)
class End:
    """What a finished run is compared by: hashes of parameters and optimizer state, and logged rows but for times."""

    parameters: str
    optimizer: str
    rows: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A killed run.

    Attributes:
        side: TRL or whet.
        point: Name in POINTS.
        moment: Where it was killed.
        killed: Whether the kill found it alive.
        torn: The newest checkpoint that a resume saw was incomplete.
        resumed: It went on at the first call, without help.
        parameters: The final parameters are bitwise those of the undisturbed run; so for `optimizer` and `rows`.
        message: Last line of the first call that did not go on.
    """

    side: str
    point: str
    moment: str
    killed: bool
    torn: bool
    resumed: bool
    parameters: bool
    optimizer: bool
    rows: bool
    message: str


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of named tensors."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def share_of_digits(completions: list[str], **columns: Any) -> list[float | None]:
    """REWARD, as TRL calls it."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def train_trl(model: str, out: str, save_steps: int, resume: bool) -> int:
    """Train with TRL; write end.json, by which the run is compared."""
    args = GRPOConfig(
        output_dir=out,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        activation_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP // 2,
        num_generations=GROUP,
        steps_per_generation=2,
        num_iterations=UPDATES // 2,
        max_completion_length=MAX_TOKENS,
        max_steps=TOTAL,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps",
        save_steps=save_steps,
        model_init_kwargs={"dtype": torch.float32},
        seed=0,
    )
    prompts = [problem.prompt for problem in Arithmetic().problems("train")]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[share_of_digits],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train(resume_from_checkpoint=True if resume else None)
    assert trainer.model is not None
    optimizer: Any = trainer.optimizer
    moments = optimizer.state_dict()["state"]
    rows = [
        {name: value for name, value in row.items() if "time" not in name and "per_second" not in name}
        for row in trainer.state.log_history
        if "loss" in row  # the last row sums up what this process did
    ]
    end = End(
        digest(trainer.model.state_dict().items()),
        digest((f"{i} {name}", tensor) for i, own in moments.items() for name, tensor in own.items()),
        json.dumps(rows, sort_keys=True),
    )
    Path(out, "end.json").write_text(json.dumps(asdict(end)))
    return 0


def either(argv: list[str]) -> int:
    """Run `trl SETTINGS` or a command line of whet: what the processes of tiny_runs call."""
    return train_trl(**json.loads(argv[1])) if argv[0] == "trl" else whet_main(argv)


class Program:
    """One side at one point: its command line, its checkpoints and what its end is compared by."""

    def __init__(self, side: str, point: str, work: Path, model: Path) -> None:
        self.side, self.point = side, point
        self.out, self.log = work / side, work / "log"
        self._model = model
        self._own = PROGRAMS["rl peer"] + (["--off-policy.staleness", "2"] if point == INSIDE else [])

    def words(self, *, resume: bool) -> list[str]:
        """Return the command line."""
        if self.side == "TRL":
            save_steps = 3 if self.point == INSIDE else UPDATES
            settings = {"model": str(self._model), "out": str(self.out), "save_steps": save_steps}
            return ["trl", json.dumps(settings | {"resume": resume})]
        words = [*self._own, "--policy.init", str(self._model), "--out", str(self.out)]
        return [*words, "--resume"] if resume else words

    def run(self, hook: Hook | None = None, *, at: float = 0.0, resume: bool = False) -> tuple[int, str]:
        """Run it, killed at a hook or a time; return status and output."""
        run = start(self.words(resume=resume), self.log, hook)
        if at:
            time.sleep(at)
            run.kill()
        return run.wait()

    def checkpoints(self) -> list[Path]:
        """Return what a resume would look at, oldest first."""
        found = self.out.glob("checkpoint-*" if self.side == "TRL" else "checkpoints/step_*")
        return sorted(found, key=lambda path: int(path.name.replace("_", "-").split("-")[1]))

    def can_resume(self) -> bool:
        """Say whether there is anything to go on from; else a user starts again."""
        return bool(self.checkpoints()) if self.side == "TRL" else (self.out / "config.yaml").is_file()

    def end(self) -> End:
        """Read what a finished run is compared by."""
        if self.side == "TRL":
            return End(**json.loads((self.out / "end.json").read_text()))
        hashes = content(self.out)
        last = self.checkpoints()[-1].relative_to(self.out)
        optimizer = [value for name, value in hashes.items() if name.startswith(f"{last}/training/")]
        return End(hashes[f"{last}/model.safetensors"], " ".join(optimizer), hashes["metrics.jsonl"])


def shape_of(checkpoint: Path) -> dict[str, int]:
    """Return the files of a checkpoint with the sizes of those whose size is always the same; -1 for broken JSON."""
    sizes = {}
    for path in (path for path in checkpoint.rglob("*") if path.is_file()):
        size = path.stat().st_size if path.suffix == ".safetensors" else 0
        if path.suffix == ".json":
            try:
                json.loads(path.read_text())
            except ValueError:
                size = -1
        sizes[str(path.relative_to(checkpoint))] = size
    return sizes


@dataclass(frozen=True)
class Known:
    """The undisturbed run: its end, a checkpoint's files, wall time, calls and mean seconds of the moments."""

    end: End
    shape: dict[str, int]
    seconds: float
    moments: Mapping[str, tuple[int, float]]


def undisturbed(program: Program, counts: Path) -> Known:
    """Run twice, and see that both are equal: else no comparison would mean anything."""
    ends, times = [], []
    for hook in (Hook(), Hook(count=str(counts))):
        shutil.rmtree(program.out, ignore_errors=True)
        began = time.monotonic()
        status, output = program.run(hook)
        assert status == 0, f"{program.side}: {output[-1000:]}"
        times.append(time.monotonic() - began)
        ends.append(program.end())
    assert ends[0] == ends[1], f"{program.side}: two undisturbed runs differ"
    moments = {name: (int(n), mean) for name, (n, mean) in json.loads(counts.read_text()).items() if n}
    return Known(ends[0], shape_of(program.checkpoints()[-1]), min(times), moments)


def choose(generator: random.Random, program: Program, known: Known) -> tuple[str, Hook, float]:
    """Choose a moment: its name, the hook, and the time of a kill from outside (0 for none)."""
    point, is_trl = program.point, program.side == "TRL"
    if point == TIME:
        at = generator.uniform(0.1, 1.0) * known.seconds
        return f"{at:.2f} s", Hook(), at
    if point == SAVE:
        name = "trl write" if is_trl else generator.choice([n for n in SAVING if n in known.moments])
        calls, mean = known.moments[name]
        hook = Hook(
            point=name,
            call=generator.randrange(calls // GENERATIONS, calls),  # there is a checkpoint before
            when=generator.choice(("before", "inside", "after")),
            delay_s=generator.uniform(0.0, mean),
        )
    else:
        name = "trl update" if is_trl else "optimizer"
        calls = range(4 * UPDATES if point == EPOCH else UPDATES, known.moments[name][0])
        if point == INSIDE and is_trl:
            calls = [call for call in calls if (call - call % 3) % UPDATES]
        hook = Hook(point=name, call=generator.choice(calls), when=generator.choice(("before", "after")))
        if point == INSIDE and is_trl:  # behind the call a checkpoint may still be written
            hook = Hook(point=name, call=hook.call, when="before")
    return f"{hook.when} {name} {hook.call + 1}", hook, 0.0


def attempt(program: Program, number: int, seed: int, known: Known) -> Trial:
    """Kill a run, go on as a user would, and compare."""
    generator = random.Random(f"{seed} {program.point} {number}")
    shutil.rmtree(program.out, ignore_errors=True)
    moment, hook, at = choose(generator, program, known)
    status, _ = program.run(hook, at=at)
    while at and status == 0:  # the kill came too late
        shutil.rmtree(program.out)
        status, _ = program.run(hook, at=(at := 0.7 * at))
    (program.out / "end.json").unlink(missing_ok=True)
    there = program.checkpoints()
    torn = bool(there) and shape_of(there[-1]) != known.shape
    resumed, message = True, ""
    while True:
        end_status, output = program.run(resume=program.can_resume())
        if end_status == 0:
            break
        if resumed:
            message = output.strip().rpartition("\n")[2][:300]
        resumed = False
        if program.side == "whet" or not program.can_resume():
            break
        shutil.rmtree(program.checkpoints()[-1])
    end = program.end() if end_status == 0 else End("", "", "")
    return Trial(
        side=program.side,
        point=program.point,
        moment=moment,
        killed=status == -signal.SIGKILL,
        torn=torn,
        resumed=resumed,
        parameters=end.parameters == known.end.parameters,
        optimizer=end.optimizer == known.end.optimizer,
        rows=end.rows == known.end.rows,
        message=message,
    )


def make_model(work: Path) -> Path:
    """Save the random Llama and its tokenizer, as both programs load them."""
    config = PolicyConfig(
        model=ModelConfig(
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            max_positions=64,
        ),
        tokenizer="characters",
        alphabet=Arithmetic.alphabet,
        tags_as_tokens=True,
        template="plain",
    )
    folder = work / "model"
    folder.mkdir()
    load_policy(config, seed=0).save(folder)
    return folder


COLUMNS = ("trials", "killed", "torn met", "resumed", "parameters", "optimizer", "rows")


def table(trials: list[Trial]) -> str:
    """Return lines: per point and side how many trials were killed, met a torn checkpoint, went on, and ended equal."""
    lines = [f"{'':<22}{'':<6}" + "".join(f"{name:>12}" for name in COLUMNS)]
    for point in dict.fromkeys(trial.point for trial in trials):
        for side in SIDES:
            own = [trial for trial in trials if (trial.point, trial.side) == (point, side)]
            flags = ("killed", "torn", "resumed", "parameters", "optimizer", "rows")
            counts = [len(own), *(sum(getattr(trial, flag) for trial in own) for flag in flags)]
            lines.append(f"{point:<22}{side:<6}" + "".join(f"{count:>12}" for count in counts))
    return "\n".join(lines)


def main() -> int:
    """Run the trials and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20, help="of each program at each point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--points", default=",".join(POINTS), help="by commas; default all")
    parser.add_argument("--json", action="store_true", help="print the trials as JSON lines before the table")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="whet-trl-"))
    torch.set_num_threads(1)
    (work / "reward.py").write_text(REWARD)
    PROGRAMS["rl peer"] = [*RL, f"{work / 'reward.py'}:digits"]
    tiny_runs.POINTS |= TRL_MOMENTS
    tiny_runs.whet_main = either
    model = make_model(work)
    trials: list[Trial] = []
    for point in args.points.split(","):
        tiny_runs.FEW = FEW_PROBLEMS if point == EPOCH else MANY_PROBLEMS
        for side in SIDES:
            program = Program(side, point, work, model)
            known = undisturbed(program, work / "counts.json")
            for number in range(args.trials):
                trials.append(attempt(program, number, args.seed, known))
                if args.json:
                    print(json.dumps(asdict(trials[-1])), flush=True)
    print(table(trials))
    print("Two undisturbed runs of each program, at each point, were bitwise equal.")
    for message in dict.fromkeys(f"{trial.side}: {trial.message}" for trial in trials if trial.message):
        print(f"a resume failed, {message}")
    ours = [trial for trial in trials if trial.side == "whet"]
    failed = [t for t in ours if not (t.resumed and t.parameters and t.optimizer and t.rows)]
    for trial in failed:
        print(f"FAILED whet, {trial.point}, killed at {trial.moment}: {trial}")
    if not failed:
        shutil.rmtree(work, ignore_errors=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
