"""Diagnosis of an update: which tensors get gradients, and how the optimizer applies them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from whet.inspect.diagnose.objective import log_ratios, outside_clip, total_norm
from whet.inspect.diagnose.step import Component, Subject, Update, share
from whet.model.config import TOWER
from whet.train.optim.step import PARAMETERS, OptimConfig
from whet.train.rl_config import RLConfig


def gradients(subject: Subject, update: Update) -> Component:
    """Check the gradient of the real step in every tensor."""
    part, model, optim = Component("Gradient flow"), subject.policy.model, subject.run.optim
    # Where adapters are trained, the base has no gradients; nor has a frozen tower.
    named = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad or not (subject.run.lora.rank or name.startswith(TOWER))
    }
    found = update.gradients
    norms = {name: float(found[name].double().norm()) if name in found else 0.0 for name in named}
    reached = [name for name, norm in norms.items() if norm > 0 and named[name].requires_grad]
    total, kept = math.hypot(*norms.values()), min(1.0, optim.max_grad_norm / (update.norm + 1e-6))
    part.headline = f"{len(reached)} of {len(named)} tensors, norm {total:.3f}"
    part.headline += f", clipped to {optim.max_grad_norm:g}" if kept < 1 else ", not clipped"
    part.facts = {
        "tensors with a gradient": len(reached),
        "tensors": len(named),
        "norm before clipping": total,
        "clip": optim.max_grad_norm,
        "taken away by the clip": share(1 - kept),
    }
    # An adapter's B starts at 0: until it has moved, A has no gradient.
    missing = [
        name
        for name in named
        if name not in reached and not (name.endswith(".lora_A") and f"{name[:-1]}B" in reached)
    ]
    text = f"{len(reached)} of {len(named)}" + (f"; none in {', '.join(missing[:3])}" if missing else "")
    part.check(
        "every tensor has a gradient",
        not missing,
        text,
        f"{len(named)} of {len(named)}",
    )
    is_finite = all(bool(g.isfinite().all()) for g in found.values())
    part.check("finite", is_finite, is_finite, True)
    is_same = math.isclose(update.norm, total, rel_tol=1e-3)
    part.check("the optimizer's norm", is_same, f"{update.norm:.6g}", f"{total:.6g}, recomputed")
    is_usual = total < 10 * optim.max_grad_norm
    part.check("clip", is_usual, f"norm {total:.3g}", f"below 10 x {optim.max_grad_norm:g}", otherwise="warn")
    layers = _by_layer(norms)
    part.bars["Gradient norm by layer"] = [(name, norm, f"{norm:.3g}") for name, norm in layers.items()]
    part.tables["Largest gradients first"] = [
        {
            "tensor": name,
            "norm": norms[name],
            "share of the square": share((norms[name] / total) ** 2 if total else 0.0),
            "largest": float(found[name].abs().max()) if name in found else 0.0,
            "elements not 0": share(float((found[name] != 0).double().mean()) if name in found else 0.0),
        }
        for name in sorted(named, key=lambda name: -norms[name])
    ]
    return part


def _by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Add up norms by layer; parameters outside the layers are grouped by module."""
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        key = f"layer {layer[1]}" if layer else name.rpartition(".")[0].rpartition(".")[2]
        squares[key] = squares.get(key, 0.0) + norm * norm
    return {key: math.sqrt(square) for key, square in squares.items()}


def optimizer(subject: Subject, update: Update) -> Component:
    """Compare the change of the weights with AdamW's first step in float64, and with the schedule.

    Call it before the weights are restored: it also measures the change of the log-probabilities.
    """
    part, run, optim = Component("Optimizer"), subject.run, subject.run.optim
    start, given = learning_rate_at(optim, 0, run.num_steps), update.lr
    rows, measured, excess = _changes(subject, update, start)
    by_layer = {key: _by_layer({row["tensor"]: row[key] for row in rows}) for key in ("L2", "norm")}
    length, norm = (math.hypot(*sizes.values()) for sizes in by_layer.values())
    part.headline = f"lr {given:.3g}; weights moved by {length:.3g}, {share(length / norm)} of their norm"
    part.facts = {
        "lr of this step, by the schedule": start,
        "lr given to the optimizer": given,
        "lr that the weights moved by": measured,
        "lr after the warm-up": optim.lr,
        "warm-up, steps": optim.warmup_steps,
        "schedule": optim.schedule,
        "lr of the last step": learning_rate_at(optim, run.num_steps - 1, run.num_steps),
        "weight decay": optim.weight_decay,
        "change of all weights, L2": length,
        "lr x sqrt(number of weights)": start * math.sqrt(sum(g.numel() for g in update.gradients.values())),
        "largest change of a weight": max(row["largest"] for row in rows),
        "change relative to the norm": length / norm,
    }
    is_given = math.isclose(given, start, rel_tol=1e-6)
    part.check("lr given against the schedule", is_given, f"{given:.6g}", f"{start:.6g}")
    if subject.optimizer.adamw_names:  # Muon leaves it none where adapters alone are trained
        is_used = abs(measured / start - 1) < 0.01
        part.check("lr measured in the weights", is_used, f"{measured:.6g}", f"{start:.6g} +- 1 %")
        part.check(
            "change against AdamW in float64", excess < 0.02, f"off by {excess:.2g} lr", "at most 0.02 lr"
        )
    expected = "1 step or more: the first one moves every weight by about lr"
    part.check("warm-up", optim.warmup_steps > 0, f"{optim.warmup_steps} steps", expected, otherwise="warn")
    is_finite = all(bool(weight.isfinite().all()) for weight in update.after.values())
    part.check("weights stay finite", is_finite, is_finite, True)
    far = max((row for row in rows if row["norm"]), key=lambda row: row["relative"])
    text = f"{far['tensor']} by {share(far['relative'])}"
    part.check("no tensor moves far", far["relative"] < 0.1, text, "below 10 % of its norm", otherwise="warn")
    _after_update(part, subject)
    part.tables["Largest relative changes first"] = sorted(rows, key=lambda row: -row["relative"])
    part.bars["Change relative to the norm, by layer"] = [
        (name, by_layer["L2"][name] / long, share(by_layer["L2"][name] / long))
        for name, long in by_layer["norm"].items()
        if long
    ]
    return part


def _changes(subject: Subject, update: Update, lr: float) -> tuple[list[dict[str, Any]], float, float]:
    """Measure the change of each tensor.

    Args:
        subject: The recipe.
        update: The recorded optimizer call.
        lr: Expected learning rate.

    Returns:
        One row per tensor; and of those that AdamW updates the learning rate that fits the change best, and the largest
        deviation of a weight's change from AdamW's first step, in units of `lr`.
    """
    optim = subject.run.optim
    factor = min(1.0, optim.max_grad_norm / (total_norm(update.gradients) + 1e-6))
    rows: list[dict[str, Any]] = []
    dot = square = excess = 0.0
    for name, gradient in update.gradients.items():
        old, g = update.before[name].double(), factor * gradient.double()
        change = update.after[name].double() - old
        row = {"tensor": name, "L2": float(change.norm()), "norm": float(old.norm())}
        relative = row["L2"] / row["norm"] if row["norm"] else math.inf
        rows.append(row | {"largest": float(change.abs().max()), "relative": relative})
        if name not in subject.optimizer.adamw_names:
            continue  # its change is no function of single gradients
        unit = -g / (g.abs() + optim.eps) - (optim.weight_decay * old if old.dim() >= 2 else 0.0)
        dot, square = dot + float((change * unit).sum()), square + float((unit * unit).sum())
        # A float32 weight moves in units of its last bit.
        wrong = ((change - lr * unit).abs() - 2**-23 * old.abs()).max()
        excess = max(excess, float(wrong) / lr)
    return rows, dot / max(square, 1e-300), excess


def _after_update(part: Component, subject: Subject) -> None:
    """Record how far one step moved the policy from the sampling one, and how much of it bfloat16 weights absorbed."""
    scores = subject.scores()
    if isinstance(subject.run, RLConfig):
        rows = log_ratios(subject, scores)
        part.facts |= {
            "ratio after the step, least": math.exp(min(map(min, rows))),
            "ratio after the step, largest": math.exp(max(map(max, rows))),
            "ratios outside the clip after the step": outside_clip(subject.run.algo, rows),
        }
    else:
        part.facts["loss after the step, nats per token"] = -sum(map(math.fsum, scores)) / sum(
            map(len, scores)
        )
    if (kind := subject.run.optim.precision) in PARAMETERS:
        part.facts[f"{kind.removesuffix('_master')} weights that changed"] = share(subject.changed())


def learning_rate_at(optim: OptimConfig, step: int, num_steps: int) -> float:
    """Return the schedule's learning rate by its definition: linear warm-up to lr, then the shape."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(1, num_steps - 1 - optim.warmup_steps)
    left = {
        "constant": 1.0,
        "linear": 1 - min(1.0, done),
        "cosine": (1 + math.cos(math.pi * min(1.0, done))) / 2,
    }
    low = 1.0 if optim.schedule == "constant" else optim.final_lr_share
    return optim.lr * (low + (1 - low) * left[optim.schedule])
