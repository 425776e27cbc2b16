"""What the demos share: a stage is measured on held-out problems, and every completion is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from whet.eval.measure import EvalResult, evaluate
from whet.eval.record import describe_weights, write_result
from whet.generate.policy import Policy, PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.tasks.base import TaskConfig
from whet.telemetry.display import advancing, open_display
from whet.types import Problem, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """What a demo measures its stages by.

    Attributes:
        folder: Folder of the evaluations.
        config: The task, as configured.
        task: The task.
        split: Split of its problems.
        num_samples: Samples per problem.
        sampling: How they are drawn.
        seed: Seed of all.
    """

    folder: Path
    config: TaskConfig
    task: Task
    split: str
    num_samples: int
    sampling: SamplingParams
    seed: int

    def measure(
        self,
        policy: Policy,
        source: PolicyConfig,
        stage: str,
        told: str,
        problems: Sequence[Problem],
        **identity: str,
    ) -> EvalResult:
        """Evaluate a stage, and write its evaluation.

        Args:
            policy: The model.
            source: Where it is from.
            stage: Name of the stage, and of its folder.
            told: What it is, for the display.
            problems: The problems.
            identity: What further tells it from the other stages.
        """
        total = len(problems) * (self.num_samples + 1)
        with open_display(f"measure {stage}: {told}", total, (), unit="completion") as display:
            result = evaluate(
                policy,
                self.task,
                problems,
                num_samples=self.num_samples,
                sampling=self.sampling,
                seed=self.seed,
                on_finished=advancing(display),
            )
        target = self.folder / stage
        target.mkdir(parents=True)
        whole: dict[str, object] = {
            "protocol": policy.protocol(),
            "task": asdict(self.config),
            "split": self.split,
            "sampling": asdict(self.sampling),
            "answer_from": "schema",
            "precision": "float32",
            "seed": self.seed,
            "num_samples": self.num_samples,
            **identity,
        }
        write_result(target, result, label=stage, identity=whole, model=describe_weights(source, policy))
        return result


def write_summary(folder: Path, results: Mapping[str, EvalResult], seconds: float, work: float) -> None:
    """Write summary.json: the means of each stage by name, and their intervals; time by the clock and of processors."""
    content: dict[str, object] = {"seconds": round(seconds, 1), "processor_seconds": round(work, 1)}
    for stage, result in results.items():
        means = {name: interval.mean for name, interval in result.metrics.items()}
        intervals = {name: [interval.low, interval.high] for name, interval in result.metrics.items()}
        content[stage] = {**means, "intervals_95": intervals}
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
