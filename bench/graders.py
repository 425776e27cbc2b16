"""Print accuracy and speed of whet's answer grading beside math-verify's, and what the grader pool costs; exit status
1 when a goal is missed.

python bench/graders.py [--data FOLDER] [--num-peer N] [--no-peer]

FOLDER holds gsm8k/train.jsonl, math/MATH_train.jsonl and math/math500_test.json (default: ../shared/data). Each gold
answer is graded, inside a completion that boxes it, against itself, rewritten (equal), mutated (wrong) and hedged
(the right and a wrong answer together: wrong). whet grades all rows, math-verify every k-th (N of each set).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.extract import extract_answer
from whet.rewards.answers.symbolic import needs_symbols
from whet.sandbox.graders.graders import GraderPool

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
GOALS_US = {"plain": 50.0, "LaTeX": 5000.0}
Judge = Callable[[str, str], bool]


def gold_answers(data: Path) -> dict[str, list[str]]:
    """Read the gold answers of each set."""
    gsm8k = [json.loads(line)["answer"] for line in (data / "gsm8k/train.jsonl").open(encoding="utf-8")]
    train = [json.loads(line)["answer"] for line in (data / "math/MATH_train.jsonl").open(encoding="utf-8")]
    test = json.loads((data / "math/math500_test.json").read_text(encoding="utf-8"))
    return {
        "GSM8K train": [answer.rpartition("####")[2].strip() for answer in gsm8k],
        "MATH train": train,
        "MATH-500": [row["answer"] for row in test],
    }


def rewrite(gold: str) -> str:
    """Spell an answer in another way that every reader takes for the same."""
    if re.fullmatch(r"-?[0-9]+", gold):
        return f"{int(gold):,}" if abs(int(gold)) > 999 else f"{gold}.0"
    other = gold.replace("\\frac", "\\dfrac").replace("\\left", "").replace("\\right", "")
    return other.replace(",", ", ") if re.search(r"[\])}]", other) else f" {other} "


def mutate(gold: str) -> str:
    """Make an answer wrong: its last digit goes up by one; without any, 1 is added."""
    digits = list(re.finditer("[0-9]", gold))
    if not digits:
        return f"{gold}+1"
    at = digits[-1].start()
    return gold[:at] + str((int(gold[at]) + 1) % 10) + gold[at + 1 :]


FORMS: dict[str, tuple[Callable[[str], str], bool]] = {
    "itself": (lambda gold: gold, True),
    "rewritten": (rewrite, True),
    "mutated": (mutate, False),
    "hedged": (lambda gold: f"{gold} \\text{{ or }} {mutate(gold)}", False),
}
"""Form -> (what is boxed, whether it is right)."""


def whet_judge(completion: str, gold: str) -> bool:
    answer = extract_answer(completion)
    return answer is not None and answers_equal(answer, gold)


def peer_judge() -> Judge:
    """Return math-verify as its users call it: parse the completion, parse the gold, verify; own time limits on."""
    import math_verify

    logging.disable(logging.CRITICAL)
    return lambda completion, gold: math_verify.verify(
        math_verify.parse(f"${gold}$"), math_verify.parse(completion)
    )


def grade(judge: Judge, golds: list[str], make: Callable[[str], str]) -> tuple[list[bool], list[float]]:
    """Return the verdicts and the microseconds of each call."""
    verdicts, times_us = [], []
    for gold in golds:
        completion = f"We simplify step by step. The answer is $\\boxed{{{make(gold)}}}$."
        started = time.perf_counter()
        verdicts.append(judge(completion, gold))
        times_us.append((time.perf_counter() - started) * 1e6)
    return verdicts, times_us


def share(hits: list[bool]) -> str:
    return f"{sum(hits):5}/{len(hits):<5} {100 * sum(hits) / max(1, len(hits)):6.2f} %"


def compare(sets: dict[str, list[str]], peer: Judge | None, num_peer: int) -> list[str]:
    """Print the table of accuracy and agreement, and the table of times; return the goals that were missed."""
    missed: list[str] = []
    times: dict[str, tuple[list[float], list[float]]] = {"plain": ([], []), "LaTeX": ([], [])}
    print(
        f"{'set':12} {'form':10} {'whet is right':>21} {'on the sample':>21} {'math-verify is right':>21}  agree"
    )
    for name, golds in sets.items():
        sample = range(0, len(golds), max(1, len(golds) // num_peer))
        for form, (make, is_right) in FORMS.items():
            verdicts, times_us = grade(whet_judge, golds, make)
            right = [verdict == is_right for verdict in verdicts]
            for gold, us in zip(golds, times_us, strict=True):
                times["LaTeX" if "\\" in gold else "plain"][0].append(us)
            line = f"{name:12} {form:10} {share(right):>21}"
            if peer is not None:
                other, peer_us = grade(peer, [golds[i] for i in sample], make)
                for i, us in zip(sample, peer_us, strict=True):
                    times["LaTeX" if "\\" in golds[i] else "plain"][1].append(us)
                agree = [verdicts[i] == verdict for i, verdict in zip(sample, other, strict=True)]
                line += (
                    f" {share([right[i] for i in sample]):>21} {share([v == is_right for v in other]):>21}"
                )
                line += f"  {100 * statistics.mean(agree):.1f} %"
            print(line, flush=True)
            if form == "itself" and sum(right) < (1.0 if name.startswith("GSM8K") else 0.995) * len(right):
                missed.append(f"{name}: only {share(right)} of the gold answers equal themselves")
    print(
        f"\n{'answers':8} {'whet, median':>13} {'p99':>10} {'math-verify, median':>20} {'p99':>10} {'ratio':>7}"
    )
    for kind, columns in times.items():
        cells = [
            f"{statistics.median(us):.0f} us {sorted(us)[len(us) * 99 // 100]:7.0f} us"
            for us in columns
            if us
        ]
        medians = [statistics.median(us) for us in columns if us]
        ratio = f"{medians[1] / medians[0]:6.0f}x" if len(medians) > 1 else ""
        print(f"{kind:8} {'   '.join(f'{cell:>27}' for cell in cells)} {ratio}")
        if medians[0] >= GOALS_US[kind]:
            missed.append(f"{kind} answers: median {medians[0]:.0f} us, goal {GOALS_US[kind]:.0f} us")
    return missed


def pool_costs(golds: list[str]) -> None:
    """Print what a call through the pool costs, a start, and a batch in which some hang."""
    started = time.perf_counter()
    with GraderPool("whet.rewards.answers.equal:answers_equal") as pool:
        ready_s = time.perf_counter() - started
        calls = [(gold, gold) for gold in golds]
        pool.map(calls)  # starts the workers
        started = time.perf_counter()
        pool.map(calls)
        batch_us = (time.perf_counter() - started) / len(calls) * 1e6
        singles: list[float] = []
        for call in calls[:300]:
            started = time.perf_counter()
            pool.map([call])
            singles.append((time.perf_counter() - started) * 1e6)
    started = time.perf_counter()
    for call in calls:
        answers_equal(*call)
    here_us = (time.perf_counter() - started) / len(calls) * 1e6
    print(f"\npool: ready in {ready_s:.2f} s; a call {batch_us:.0f} us in a batch of {len(calls)}, ", end="")
    print(f"{statistics.median(singles):.0f} us alone; {here_us:.0f} us without a pool")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hangs.py"
        path.write_text("def grade(i):\n    while i < 10:\n        pass\n    return i\n", encoding="utf-8")
        with GraderPool(f"{path}:grade", deadline_s=1.0) as pool:
            started = time.perf_counter()
            outcomes = pool.map([(i,) for i in range(64)])
            seconds = time.perf_counter() - started
    num_killed = sum(outcome.kind == "timeout" for outcome in outcomes)
    print(f"pool: 64 calls of which {num_killed} hang, deadline 1 s: {seconds:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--num-peer", type=int, default=400, help="rows of each set that math-verify grades")
    parser.add_argument("--no-peer", action="store_true", help="leave math-verify out")
    args = parser.parse_args()
    peer: Any = None
    if not args.no_peer and importlib.util.find_spec("math_verify") is not None:
        peer = peer_judge()
    sets = gold_answers(args.data)
    missed = compare(sets, peer, args.num_peer)
    asked = sum(needs_symbols(rewrite(gold), gold) for gold in sets["MATH train"])
    wrong = sum(needs_symbols(mutate(gold), gold) for gold in sets["MATH train"])
    print(
        f"\nsymbolic worker asked for {asked} rewritten and {wrong} mutated of {len(sets['MATH train'])} MATH answers"
    )
    pool_costs(sets["MATH-500"])
    print("\n".join(f"MISSED {line}" for line in missed) or "all goals met")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
