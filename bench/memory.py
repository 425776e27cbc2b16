"""Peak memory of a GRPO step of whet and of TRL, each in a process of its own.

python bench/memory.py [--quick] [--models c] [--repeats 3] [--json FILE]

One prompt of 64 tokens, 8 completions of 512 (--quick: 64), two steps; the optimizer has its state. Counted is the
peak resident memory without what the process held after its imports; on a GPU the peak of what PyTorch allocated there.
Two comparisons:

- fastest: each side as `grpo_step.py` times it. TRL trains on the whole batch at once, nothing is recomputed.
- leanest: whet with `--optim lean`; TRL with a bfloat16 model (so the optimizer's state is bfloat16, too) and
  micro-batches of one completion, with layers recomputed or not, whichever takes less.

The same samples, losses and number of updates; but an update of 1e-5 that is added to a bfloat16 weight is mostly
rounded away, so the share of weights that two steps have changed stands beside (whet: of its float32 weights, which the
optimizer holds as the bfloat16 weight and 16 bits more), and so does TRL with float32 weights, the leanest that learns.
"""

from __future__ import annotations

import json
import re
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpo_step
import sides
import torch
import torch.nn.functional as F

from whet import processes
from whet.train.optim.step import Precision, lean

TARGETS = {"fastest": 0.4, "leanest": 0.6}
STEPS = 2
GROUP = 8
PIECE = 512
FEW_ROWS = 64
WHET: dict[str, dict[str, Any]] = {"whet": {}, "whet, lean": lean()}
TRL: dict[str, dict[str, Any]] = {
    "TRL, float32": {"kind": "float32"},
    "TRL, bfloat16": {"kind": "bfloat16 model"},
    "TRL, bfloat16, 1 at a time": {"kind": "bfloat16 model", "parts": GROUP},
    "TRL, bfloat16, 1 at a time, recomputed": {"kind": "bfloat16 model", "parts": GROUP, "recomputes": True},
    "TRL, float32, 1 at a time, recomputed": {"kind": "float32", "parts": GROUP, "recomputes": True},
}
COMPARISONS = {
    "fastest": ("whet", ("TRL, float32", "TRL, bfloat16")),
    "leanest": ("whet, lean", tuple(name for name in TRL if "bfloat16, 1" in name)),
}

peaks: list[float] = []


def resident() -> float:
    """Return this process's present memory in GiB; on a GPU what it has allocated there."""
    if sides.on_gpu():
        return torch.cuda.memory_allocated() / 2**30
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def note_peak() -> None:
    """Note the most memory that this process has had, in GiB; getrusage would give its parent's, if that is more."""
    if sides.on_gpu():
        peaks.append(torch.cuda.max_memory_allocated() / 2**30)
        return
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    peaks.append(int(found[1]) / 2**20)


def product(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return x W^T [N, O] in bfloat16, computed by float32 pieces of a few MB; what it returns is all it keeps."""
    if x_NI.shape[0] <= FEW_ROWS:
        return F.linear(x_NI, weight_OI)
    out = x_NI.new_empty(x_NI.shape[0], weight_OI.shape[0])
    for first in range(0, out.shape[0], PIECE):
        rows = x_NI[first : first + PIECE].float()
        for start in range(0, out.shape[1], PIECE):
            part = weight_OI[start : start + PIECE].float()
            out[first : first + PIECE, start : start + PIECE] = rows @ part.t()
    return out


class _Product(torch.autograd.Function):
    """x W^T + b as PyTorch computes it, without bfloat16 instructions (AVX2): there its own does 1 to 15 GFLOP/s, and
    the peer's bfloat16 model would take an hour.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        out = product(x.flatten(0, -2), weight)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = upstream[0].flatten(0, -2)
        grad_x = product(grad, weight.t()).view_as(x)
        grad_weight = product(grad.t(), x.flatten(0, -2).t())
        return grad_x, grad_weight, grad.sum(0) if ctx.has_bias else None


def changed(home: Path, weights: dict[str, torch.Tensor]) -> float:
    """Return the share of weights that are not those of a model's file, rounded to their dtype."""
    from safetensors import safe_open

    different = total = 0
    with safe_open(home / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            before, after = file.get_tensor(name).to(weights[name].dtype), weights[name].cpu()
            different += int((before != after).sum())
            total += before.numel()
    return different / total


def run_whet(
    home: Path, case: grpo_step.Case, texts: list[str], fields: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Do the steps of whet; return the seconds of the last, and the weights that the optimizer updates."""
    ours = grpo_step.WhetSide(home, case, texts, **fields)
    seconds = [ours.step() for _ in range(STEPS)]
    note_peak()
    masters = ours.optimizer.tensors()
    named = ours.policy.model.named_parameters()
    return seconds[-1], {name: masters.get(f"{name}/master", weight.detach()) for name, weight in named}


def run_trl(
    home: Path, case: grpo_step.Case, texts: list[str], fields: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Do the steps of TRL; return the seconds of the last, and the weights."""
    sides.default_allocator()  # it takes less then
    if fields["kind"] == "bfloat16 model" and not sides.has_bfloat16():
        torch.nn.Linear.forward = lambda self, x: _Product.apply(x, self.weight, self.bias)  # pyright: ignore[reportAttributeAccessIssue]
    trainer = grpo_step.trl_trainer(home, case, texts, after=lambda: None, steps=STEPS, **fields)
    trainer.train()
    note_peak()
    named = trainer.model.named_parameters()
    return trainer.clock.seconds[-1], {name: weight.detach() for name, weight in named}


def run_side(side: str, model: str, precision: Precision, new_tokens: int, folder: Path) -> dict[str, float]:
    """Do the steps of one side in this process; return its memory after the imports and at its peak, in GiB."""
    import transformers
    import trl

    del transformers, trl  # imported for their memory
    home = sides.save_shape(model, folder)
    case = grpo_step.Case(model, 1, GROUP, new_tokens, 0.0)
    (prompt,) = sides.draw_prompts(1, 64, 64, sides.SHAPES[model].vocab_size)
    texts = [" ".join(map(str, prompt[:-1]))]
    base = resident()
    run, fields = (run_whet, {"precision": precision} | WHET[side]) if side in WHET else (run_trl, TRL[side])
    seconds, weights = run(home, case, texts, fields)
    return {"base": base, "peak": peaks[0], "seconds": seconds, "changed": changed(home, weights)}


def run_model(model: str, new_tokens: int, repeats: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Run every side in processes of its own."""
    results: dict[str, list[dict[str, float]]] = {side: [] for side in (*WHET, *TRL)}
    precision = sides.auto_precision(model)
    sides.save_shape(model, folder)
    for side in list(results) * repeats:
        words = [sys.executable, __file__, "--side", side, "--precision", precision]
        words += ["--models", model, "--weights", str(folder), *extra]
        output = processes.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
        line = next(line for line in output.splitlines() if line.startswith("RESULT "))
        results[side].append(json.loads(line[7:]))
        print(side, results[side][-1], file=sys.stderr, flush=True)

    def median(side: str, name: str) -> float:
        return statistics.median(run[name] for run in results[side])

    above = {
        side: statistics.median(run["peak"] - run["base"] for run in runs) for side, runs in results.items()
    }
    row: dict[str, Any] = {
        "model": model,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "precision": precision,
    }
    for name, (ours, peers) in COMPARISONS.items():
        best = min(peers, key=lambda side: above[side])
        row[name] = {"peer": best, "ratio": above[ours] / above[best], "target": TARGETS[name]}
        row[name]["ratio_with_imports"] = median(ours, "peak") / median(best, "peak")
    row["sides"] = {
        side: {"gib": above[side], "seconds": median(side, "seconds"), "changed": median(side, "changed")}
        for side in results
    }
    return row


def main() -> None:
    """Print a table per model."""
    parser = sides.parser(__doc__)
    parser.add_argument("--side", help="run one side in this process and print its memory")
    parser.add_argument("--precision", default="float32", help="that of whet's fastest setting")
    arguments = parser.parse_args()
    sides.start(arguments)
    new_tokens = 64 if arguments.quick else 512
    if arguments.side:
        where = new_tokens, arguments.weights
        found = run_side(arguments.side, arguments.models, arguments.precision, *where)
        print("RESULT", json.dumps(found))
        return
    extra = ["--quick"] if arguments.quick else []
    extra += ["--threads", str(arguments.threads)] if arguments.threads else []
    repeats = arguments.repeats or (1 if arguments.quick else 3)
    rows = []
    with sides.weights_folder(arguments) as folder:
        for model in arguments.models or ("a" if arguments.quick else "c"):
            row = run_model(model, new_tokens, repeats, folder, extra)
            rows.append(row)
            for name in COMPARISONS:
                found = row[name]
                print(
                    f"memory {model}, {GROUP}x{new_tokens}, {name}: {found['ratio']:.2f} of {found['peer']} "
                    f"(target {found['target']}; with the imports {found['ratio_with_imports']:.2f})"
                )
            print(f"  {'':<40}{'GiB':>6}{'s a step':>10}{'weights changed':>17}")
            for side, values in row["sides"].items():
                share = f"{values['changed']:.1%}"
                print(f"  {side:<40}{values['gib']:>6.2f}{values['seconds']:>10.1f}{share:>17}", flush=True)
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
