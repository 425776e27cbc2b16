"""Every field of every program is consumed or refused: each is flipped in a tiny run, and an effect or an error seen.

An effect is a difference in what a run computes (all modules' calls with their shapes, parameters, metrics, samples),
writes, shows or sets (threads, compilation, determinism), never an echo of the config. A field that the base run
refuses, or where it cannot show, is flipped in a mode that reads it. What can show in none stands in `UNSEEN`.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import hub
import pytest
import torch
from safetensors.torch import save_file

import whet
from whet.__main__ import COMMANDS
from whet.config import from_dict, leaves, to_dict, unwrap
from whet.generate.policy import load_policy
from whet.recipes.models import demo_policy
from whet.rewards import base
from whet.tasks.made.arithmetic import Arithmetic
from whet.telemetry import display
from whet.types import UserError

Data = dict[str, Any]

NOISE = re.compile(r"second|memory|energy|power|hardware|time|start_utc|temperature|utilisation|host|pid")
ECHO = frozenset({"identity", "config", "label", "out", "task", "sampling", "session"})
"""Keys of JSON files below which the config is only repeated."""
UNCOMPARED = frozenset(
    {
        "environment.json",
        "provenance.json",
        "manifest.json",
        "logs.json",
        "run.json",
        "config.json",
        "generation_config.json",
    }
)

SHAPE: Data = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
SHAPE |= {"head_dim": 4, "max_positions": 48, "rope_theta": 30.0, "init_std": 0.3}
POLICY: Data = {**to_dict(demo_policy()), "model": SHAPE, "max_rows": 64, "num_threads": 1}
OPTIM: Data = {"lr": 1e-2, "warmup_steps": 1, "token_budget": 4096, "schedule": "cosine"}
SAMPLING: Data = {"max_new_tokens": 6}
RUN: Data = {"policy": POLICY, "optim": OPTIM, "save_every": 2}
BASES: dict[str, Data] = {
    "sft": RUN | {"num_steps": 5, "batch_size": 4, "validation_problems": 4, "validate_every": 2},
    "rft": RUN
    | {"sampling": SAMPLING, "num_problems": 4, "num_samples": 3, "max_per_problem": 1, "rounds": 1}
    | {"steps_per_round": 4, "batch_size": 2, "validation_problems": 2},
    "dpo": RUN
    | {"sampling": SAMPLING, "num_problems": 8, "num_samples": 4, "max_pairs_per_problem": 2, "num_steps": 4}
    | {"batch_size": 2, "validation_share": 0.3, "validate_every": 2},
    "rl": RUN
    | {"sampling": SAMPLING, "num_steps": 3, "num_prompts": 2, "group_size": 3, "validation_problems": 2}
    | {"validate_every": 2, "ratio_tolerance": 1.0},
    "eval": {"policy": POLICY, "sampling": SAMPLING, "num_problems": 3, "num_samples": 4, "hardware": False},
}
"""What is flipped, by program; the rest is the config's default."""

HOMES: dict[str, str] = {
    "policy.max_rows": "eval",
    "policy.attention": "rl",
    "policy.quantize": "eval",
    "policy.": "sft",
    "optim.": "sft",
    "lora.": "sft",
    "track.": "sft",
    "track.num_samples": "rl",
    "safety.": "sft",
    "task.": "sft",
    "task.path": "eval",
    "task.paths": "sft",
}
"""Groups that programs share are flipped in one of them; in the others each of their fields must be read, or refused,
as it is there: the longest beginning counts."""

TEXT: Data = {"policy.tokenizer": "bytes", "policy.alphabet": "", "policy.model.max_positions": 128}
JSONL: Data = TEXT | {"task": {"name": "jsonl", "path": "{work}/data.jsonl"}}
HUB: Data = TEXT | {"task": {"name": "hub", "path": "owner/few"}}
MIXTURE: Data = TEXT | {
    "task": {
        "name": "mixture",
        "weights": {"arithmetic": 1.0, "jsonl": 1.0},
        "paths": {"jsonl": "{work}/data.jsonl"},
    }
}
CHATS: Data = TEXT | {"policy.template": "base", "task": {"name": "{work}/chats.py:Chats"}}
ROPE: Data = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 16}
SCALED: Data = {"policy.model.rope_scaling": ROPE}
RATES: Data = {"curriculum.difficulty_file": "{work}/all_rates.jsonl"}
TWICE: Data = {"algo.num_epochs": 2, "optim.lr": 0.3}
KL: Data = {"algo.kl": "k2_loss", "algo.kl_coef": 0.1}
OLD: Data = {"off_policy.proximal": "recomputed", "off_policy.correction": "token_truncate"}
OLD |= {"off_policy.staleness": 1, "optim.lr": 0.3}
CRITIC: Data = {
    "algo.baseline": "value",
    "algo.scale": "none",
    "algo.uninformative": "keep",
    "algo.num_epochs": 2,
}
PLAIN: Data = {"algo.scale": "none", "algo.uninformative": "keep"}
PAIRS: Data = {"pairs": "{work}/pairs.jsonl", "num_problems": 0, "num_samples": 8, "max_pairs_per_problem": 4}
PAIRS |= {"sampling": {}} | TEXT

ADAPTED: Data = {"policy": {"init": "{work}/a"}, "lora.rank": 2}
TAUGHT: Data = {"teacher.init": "{work}/a", "algo.uninformative": "keep"}

MODES: dict[str, tuple[Data, list[Any]]] = {
    "desirable_weight": ({"loss": "kto"}, [2.0]),
    "undesirable_weight": ({"loss": "kto"}, [2.0]),
    "center_coef": ({"loss": "reward"}, [0.5]),
    "teacher.init": (TAUGHT, ["{work}/b"]),
    "teacher.kind": (TAUGHT, ["full"]),
    "teacher.coef": (TAUGHT, [0.5]),
    "reward_model": ({"preflight": "warn", "reward_model": "{work}/scorer"}, ["{work}/other_scorer"]),
    "algo.kl_stop": (KL | TWICE, [1e-9]),
    "policy.init": ({"policy": {"init": "{work}/a"}}, ["{work}/b"]),
    "policy.quantize": ({"policy": {"init": "{work}/a"}}, ["nf4"]),
    "policy.adapter": ({"policy": {"init": "{work}/a"}}, ["{work}/adapter"]),
    **{f"policy.model.rope_scaling.{name}": (SCALED, [2 * value]) for name, value in ROPE.items()},
    "policy.tags_as_tokens": (
        {"policy.alphabet": Arithmetic.alphabet + "<>/abcdefghijklmnopqrstuvwxyz_"},
        [False],
    ),
    "policy.template": (TEXT | {"policy.model.max_positions": 512}, ["base"]),
    "policy.system_prompt": (TEXT | {"policy.model.max_positions": 512, "policy.template": "base"}, [False]),
    "policy.rope_factors": ({"policy": {"init": "{work}/stretched"}}, ["long"]),
    "policy.template_values": ({"policy": {"init": "{work}/chat"}}, [{"twice": True}]),
    "task.name": (TEXT, ["sanity"]),
    "task.path": (JSONL, ["{work}/more.jsonl"]),
    "task.max_bad_rows": (JSONL | {"task.path": "{work}/bad.jsonl", "task.max_bad_rows": 1}, [0]),
    "task.prompt": (JSONL, ["question"]),
    "task.answer": (JSONL, ["gold"]),
    "task.solution": (JSONL, ["worked"]),
    "task.max_rows": (JSONL, [40]),
    "task.config": (HUB, ["other"]),
    "task.split": (HUB, ["test"]),
    "task.keep_calculator": (TEXT | {"task": {"name": "gsm8k", "path": "{work}/gsm8k"}}, [True]),
    "task.num_problems": (TEXT | {"task": {"name": "letters", "num_problems": 40}}, [30]),
    "task.level": (TEXT | {"task": {"name": "letters", "num_problems": 40}}, [1]),
    "task.seed": (TEXT | {"task": {"name": "letters", "num_problems": 40}}, [1]),
    "task.weights": (MIXTURE, [{"arithmetic": 1.0, "jsonl": 9.0}]),
    "task.paths": (MIXTURE, [{"jsonl": "{work}/more.jsonl"}]),
    "turns": (CHATS, ["last"]),
    "too_long": (CHATS, ["cut"]),
    "lora.rank": ({"policy": {"init": "{work}/a"}}, [2]),
    "lora.alpha": (ADAPTED, [7.0]),
    "lora.rslora": (ADAPTED, [True]),
    "lora.dora": (ADAPTED, [True]),
    "lora.lr_ratio": (ADAPTED, [9.0]),
    "lora.init": (ADAPTED, ["pissa"]),
    "lora.targets": (ADAPTED, [["q_proj"]]),
    "lora.layers": (ADAPTED, ["1"]),
    "lora.modules_to_save": (ADAPTED, [["norm"]]),
    "optim.weight_decay": ({}, [0.5]),
    "optim.muon_lr": ({"optim.optimizer": "muon"}, [0.5]),
    "optim.muon_momentum": ({"optim.optimizer": "muon"}, [0.5]),
    "optim.muon_scale": ({"optim.optimizer": "muon"}, ["spectral"]),
    "track.project": ({"track.to": ["wandb"]}, ["other"]),
    "track.name": ({"track.to": ["wandb"]}, ["other"]),
    "track.offline": ({"track.to": ["wandb"]}, [True]),
    "track.uri": ({"track.to": ["mlflow"]}, ["http://localhost:5000"]),
    "track.num_samples": ({"track.to": ["wandb"]}, [1]),
    "safety.keep": ({"save_every": 1}, [3]),
    "pairs": (PAIRS, ["{work}/more_pairs.jsonl"]),
    "pairs_split": (PAIRS | {"pairs": "owner/pairs", "pairs_split": "train"}, ["test"]),
    "max_bad_rows": (PAIRS | {"pairs": "{work}/bad_pairs.jsonl", "max_bad_rows": 1}, [0]),
    "curriculum.min_pass_rate": (RATES, [0.3]),
    "curriculum.max_pass_rate": (RATES, [0.6]),
    "curriculum.max_problems": ({"curriculum.num_samples": 4}, [6]),
    "curriculum.unmeasured": (
        {"curriculum.difficulty_file": "{work}/difficulty.jsonl", "curriculum.unmeasured": "keep"},
        ["drop", "error"],
    ),
    "preflight": ({"preflight": "warn", "reward": ["{work}/own.py:score"]}, ["stop"]),
    "rl:reward": ({"preflight": "warn"}, [["{work}/own.py:score"]]),
    "rl:reward_timeout_s": ({"preflight": "warn", "reward": ["{work}/own.py:slow"]}, [0.05]),
    "eval:reward_timeout_s": ({"reward": ["{work}/own.py:slow"]}, [0.05]),
    "max_dead_steps": ({"rewards": {"correct": 1.0}}, [1]),
    "algo.baseline": (PLAIN, ["leave_one_out", "none", "value"]),
    "algo.ratio": (TWICE, ["sequence"]),
    "algo.surrogate": (PLAIN | {"algo.ratio": "sequence"} | TWICE, ["geometric"]),
    "algo.clip_low": (TWICE, [0.01]),
    "algo.clip_high": (TWICE, [0.01]),
    "algo.dual_clip": (TWICE | {"optim.lr": 3.0}, [1.21]),
    "algo.tau_positive": ({"algo.surrogate": "sigmoid"}, [0.5]),
    "algo.tau_negative": ({"algo.surrogate": "sigmoid"}, [0.5]),
    "algo.kl": (KL | TWICE, ["k1_reward", "k3_loss", "k3_unbiased"]),
    "algo.kl_coef": (KL | TWICE, [0.5]),
    "algo.kl_target": (KL | TWICE, [1e-4]),
    "algo.ref_refresh_every": (KL | TWICE, [2]),
    "algo.ref_ema": (KL | TWICE, [0.5]),
    "algo.max_refills": ({"algo.uninformative": "refill", "rewards": {"correct": 1.0}}, [1]),
    "algo.overlong_cache": ({"algo.overlong": "soft"}, [3]),
    "off_policy.correction": (
        OLD,
        ["token_mask", "sequence_truncate", "sequence_mask", "geometric_mask", "k3_mask"],
    ),
    "off_policy.low": (OLD, [0.99]),
    "off_policy.high": (OLD, [1.0]),
    "overlap.mode": ({"off_policy.staleness": 1}, ["async"]),
    "value.lr": (CRITIC, [0.1]),
    "value.gamma": (CRITIC, [0.5]),
    "value.lam": (CRITIC, [0.5]),
    "value.clip": (CRITIC | {"value.lr": 0.5}, [1e-3]),
    "value.warmup_steps": (CRITIC, [1]),
}
"""Field -> the mode in which it shows, and other values."""

VALUES: dict[str, list[Any]] = {
    "policy.model.family": ["qwen2", "qwen3"],
    "policy.model.max_positions": [40],
    "policy.model.head_dim": [6],
    "policy.alphabet": [Arithmetic.alphabet + "z"],
    "policy.padded_vocab_size": [32],
    "policy.schema": [
        "reasoning_answer",
        "working_out_solution",
    ],  # inherit is think_answer for random weights
    "policy.tools": [["calculator"]],
    "policy.max_rows": [2],
    "policy.attention": ["fast"],  # auto is exact on a CPU
    "policy.tokenizer": [{"policy.tokenizer": "bytes", "policy.alphabet": ""}],
    "optim.token_budget": [40],
    "optim.optimizer": ["muon"],
    "sampling.top_k": [3],
    "std_ddof": [0],
    "track.to": [["tensorboard"]],
    "safety.rehearse": ["on"],  # auto is off on a CPU
    "safety.save_minutes": [1e-9],
    "validation_share": [0.8],
    "loss": ["ipo", "hinge", "apo_zero", "apo_down", "orpo", "kto", "reward"],  # robust needs a share
    "label_smoothing": [0.2],
    "curriculum.num_samples": [4],
    "curriculum.difficulty_file": ["{work}/all_rates.jsonl"],
    "rewards": [{"format": 1.0, "correct": 2.0}],
    "reward": [["{work}/own.py:score"]],
    "split": ["dev"],
    "k": [[3]],
    "tasks": [["arithmetic"]],
    "optim.precision": ["bfloat16_autocast", "bfloat16_master", "float16_autocast", "float16_master"],
    "precision": ["bfloat16"],
    "algo.surrogate": ["weight", "sigmoid", "logprob"],
    "algo.baseline": ["leave_one_out"],
}
"""Other values of fields by their last words, where the plain rule (one more, half, the opposite) gives none."""

UNSEEN: dict[str, str] = {
    "task.nodes": "needs Stockfish: tests/tasks/chess/test_stockfish.py",
    "task.layout": "a task of chess: tests/tasks/chess/test_chess_task.py",
    "self_play.": "needs Stockfish: tests/train/test_self_play.py",
    "games.": "needs a task of chess: tests/eval/test_chess_eval.py",
    "require": "is the exit status: tests/eval/test_chess_eval.py",
    "policy.model.vocab_size": "set from the tokenizer, as its text says",
    "policy.train_vision": "a model that sees: tests/train/test_images.py",
    "task.images": "rows with images, which a model that sees reads: tests/tasks/test_image_columns.py",
    "task.image_root": "rows with images, which a model that sees reads: tests/tasks/test_image_columns.py",
    "task.image_urls": "rows with images, which a model that sees reads: tests/tasks/test_image_columns.py",
    "policy.max_image_tokens": "a model that sees: tests/train/test_image_runs.py",
    "task.cell": "drawn images, which a model that sees reads: tests/tasks/test_drawn.py",
    "policy.device": "a machine without a GPU refuses any other",
    "task.symbolic": "math-verify is asked about formulas that ours cannot decide: tests/tasks/test_symbolic_task.py",
    "ratio_tolerance": "sampler and trainer agree bitwise here: tests/train/test_rl.py breaks them",
    "hardware": "readings of sensors are no outcome: tests/eval/test_eval_program.py",
    "policy.model.is_reward": "set by --loss reward, as its text says",
    "teacher.url": "another model over the network: tests/train/test_teacher.py",
    "teacher.model": "another model over the network: tests/train/test_teacher.py",
    "teacher.concurrency": "another model over the network: tests/train/test_teacher.py",
    "teacher.timeout_s": "another model over the network: tests/train/test_teacher.py",
    "teacher.api_key_env": "another model over the network: tests/train/test_teacher.py",
    "sampler.": "another sampler, or refused without one: tests/train/test_samplers.py",
    "judge.": "another model over the network: tests/rewards/test_judge.py, tests/train/test_judging.py",
    "kept_gib": "the same numbers, with less work: tests/generate/test_activations.py",
    "optim.checkpoint_kind": "asks for checkpoint_layers: tests/train/test_optimizer.py, tests/inspect/test_memory.py",
    "optim.offload_inputs": "a machine without a GPU refuses it: tests/train/test_optimizer.py",
    "optim.offload_state": "a machine without a GPU refuses it: tests/train/test_optimizer.py",
    "optim.compile_mode": "asks for compile, which computes the same: tests/train/test_schedules.py",
    "optim.compile_backend": "asks for compile, which computes the same: tests/train/test_schedules.py",
    "optim.compile_dynamic": "asks for compile, which computes the same: tests/train/test_schedules.py",
    "optim.compile_fullgraph": "asks for compile, which computes the same: tests/train/test_schedules.py",
    "optim.adam_bits": "tensors of this size stay float32: tests/train/test_optimizer.py",
    "allowed_coef": "a task without rules refuses it: tests/train/test_sft.py",
    "policy.steering": "a program that trains refuses it: tests/editing/test_steering.py",
    "optim.router_aux_loss_coef": "a model without experts refuses it: tests/train/test_experts.py",
    "off_policy.router_replay": "a model without experts refuses it: tests/train/test_experts.py",
    "cluster.": "other processes that compute the same: tests/train/test_workers.py, tests/ranks/test_ray.py",
    "overlap.": "refused with some of these settings: tests/train/test_overlap.py",
    "parallel.": "how several ranks hold the model: tests/train/test_shards.py",
    "safety.max_skipped": "read when a loss is not finite: tests/train/test_session.py, test_sft.py, test_rl.py",
    "safety.deterministic": "the order of sums is fixed here in any mode: tests/train/test_session.py",
    "safety.hang_timeout_s": "a limit that no run here meets: tests/train/test_session.py",
    "safety.disk_full": "read when the disk is full: tests/train/test_session.py",
}
"""Fields whose flip shows nothing here, each with its reason; they must be read all the same."""


@dataclass
class Seen:
    """What a run did, part by part, and which fields of which config classes its code read."""

    parts: Data = field(default_factory=dict)
    reads: set[tuple[str, str]] = field(default_factory=set)

    def differs(self, other: Seen) -> list[str]:
        """Name the parts that differ."""
        return [name for name in self.parts | other.parts if self.parts.get(name) != other.parts.get(name)]


class Stub(str):
    """Stands for a tracker's package: every call of it or of what it returned is told to `told`."""

    told: list[str]

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(f"{self}.{name}", self.told)

    def __call__(self, *arguments: Any, **named: Any) -> Stub:
        self.told.append(f"{self}{arguments}{sorted(named.items(), key=lambda item: item[0])}")
        return stub(f"{self}()", self.told)


def stub(name: str, told: list[str]) -> Stub:
    found = Stub(name)
    found.told = told
    return found


def quiet(value: Any) -> Any:
    """Leave out of a JSON value what depends on the clock or the machine, or repeats the config."""
    if isinstance(value, dict):
        return {k: quiet(v) for k, v in value.items() if not NOISE.search(k) and k not in ECHO}
    return [quiet(item) for item in value] if isinstance(value, list) else value


def run(program: str, config: Any, *, reads: bool = False) -> Seen:
    """Run a program here, and return what it did."""
    seen, out = Seen(), Path(config.out) if getattr(config, "out", "") else None
    if out:
        shutil.rmtree(out, ignore_errors=True)
    calls: list[str] = []
    asides: list[str] = []  # in an order that threads may change
    printed = io.StringIO()
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, _: calls.append(
            f"{type(module).__name__} {[tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)]}"
        )
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        watch(patch, calls, asides, str(out))
        if reads:
            record_reads(patch, config, seen.reads)
        try:
            COMMANDS[program].load().main(config)
        except SystemExit as ending:
            calls.append(f"exit {ending.code}")
        finally:
            handle.remove()
            torch.set_deterministic_debug_mode("default")
            if "torch._inductor" in sys.modules:  # else it would take two seconds to load it
                torch.use_deterministic_algorithms(False)
            torch.set_num_threads(1)
    seen.parts |= {"calls": calls, "asides": sorted(asides)}
    text = re.sub(r"[\d.,]+ ?(s|ms|min|GiB|MiB|MB|W|tokens/s)\b|\d+:\d+(:\d+)?", "", printed.getvalue())
    if not is_training(program):
        seen.parts["printed"] = text.replace(str(out), "OUT")
    for path in sorted(out.rglob("*")) if out else []:
        name = str(path.relative_to(out)) if out else ""
        if path.is_file() and not name.startswith(("heartbeats", "tensorboard/")):
            seen.parts[name] = content(path)
    return seen


def is_training(program: str) -> bool:
    return "optim" in BASES[program]


def content(path: Path) -> Any:
    """Return what two runs' files are compared by; that there is such a file is a difference, too."""
    if path.suffix == ".jsonl":
        return [quiet(json.loads(row)) for row in path.read_text().splitlines()]
    if path.suffix == ".json" and path.name not in UNCOMPARED:
        return quiet(json.loads(path.read_bytes()))
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix in (".safetensors", ".jinja") else ""


def watch(patch: pytest.MonkeyPatch, calls: list[str], asides: list[str], out: str) -> None:
    """Note what is done to the process, to files and to trackers' packages."""

    def note(owner: Any, name: str, into: list[str]) -> None:
        original = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            shown = [str(a).replace(out, "") for a in arguments if isinstance(a, str | int | Path)]
            shown = [re.sub(r"\.?tmp\w*|[.-]?[0-9a-f]{8,}|\d+\.partial", "", a) for a in shown]
            if not any("heartbeat" in a for a in shown):
                into.append(f"{name} {shown} {named if name == 'use_deterministic_algorithms' else ''}")
            return original(*arguments, **named)

        patch.setattr(owner, name, noted)

    note(torch, "set_num_threads", calls)
    note(torch, "use_deterministic_algorithms", calls)
    note(os, "replace", asides)
    note(os, "rename", asides)
    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        asides.append(f"thread {re.sub('[0-9]+', '', self.name)}")
        start(self)

    patch.setattr(threading.Thread, "start", started)
    patch.setattr(os, "fsync", lambda number: None)
    patch.setattr(torch, "compile", lambda function=None, **_: calls.append("compile") or function)
    patch.setattr(torch.nn.Module, "compile", lambda self, **_: calls.append("compile"))
    patch.setattr(display.PlainDisplay, "note", lambda self, text, **_: calls.append(text))
    for name in ("wandb", "mlflow", "mlflow.entities", "trackio"):
        patch.setitem(sys.modules, name, stub(name, asides))


def record_reads(patch: pytest.MonkeyPatch, config: Any, found: set[tuple[str, str]]) -> None:
    """Note every read of a field by code that uses it: not by checks of the config, nor by what copies or writes it."""
    classes = {type(config)}
    for cls in list(classes):
        classes |= {unwrap(hint)[0] for hint in groups_of(cls)}
    for cls in classes:
        names = {item.name for item in fields(cls)}

        def read(self: Any, name: str, names: set[str] = names, cls: type[Any] = cls) -> Any:
            if name in names:
                frame = sys._getframe(1)
                uses = frame.f_globals.get("__name__") not in (
                    "whet.config",
                    "whet.cli",
                    "dataclasses",
                    "copy",
                )
                depth = 0
                while uses and frame is not None and depth < 6:
                    uses = not frame.f_code.co_name.startswith("__post_init__")
                    frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
                if uses:
                    found.add((cls.__name__, name))
            return object.__getattribute__(self, name)

        patch.setattr(cls, "__getattribute__", read, raising=False)


def groups_of(cls: type[Any]) -> list[Any]:
    from whet.config import groups

    return list(groups(cls).values())


def owner_of(cls: type[Any], name: str) -> str:
    """Return the name of the class that a dotted field belongs to."""
    from whet.config import groups

    head = name.rpartition(".")[0]
    return unwrap(groups(cls)[head])[0].__name__ if head else cls.__name__


def flips(name: str, hint: Any, value: Any) -> list[Any]:
    """Return other values of a field."""
    inner, _ = unwrap(hint)
    for length in range(name.count(".") + 2, 0, -1):
        own = VALUES.get(".".join(name.split(".")[-length:]))
        if own is not None:
            choices = get_args(inner) if get_origin(inner) is Literal else None
            return [v for v in own if choices is None or v in choices]
    if get_origin(inner) is Literal:
        return [choice for choice in get_args(inner) if choice != value]
    if inner is bool:
        return [not value]
    if inner is int:
        return [(value or 0) + 1]
    if inner is float:
        return [0.5 * value if value else 0.5]
    return ["other"] if inner is str else [["other"]] if get_origin(inner) is tuple else [{"other": 1.0}]


def with_leaves(data: Mapping[str, Any], values: Mapping[str, Any]) -> Data:
    """Return nested plain data with some fields, or whole groups, replaced."""
    found: Data = dict(data)
    for name, value in values.items():
        head, _, tail = name.partition(".")
        found[head] = with_leaves(found.get(head) or {}, {tail: value}) if tail else value
    return found


def placed(value: Any, work: Path) -> Any:
    """Put the work folder into the texts of plain data."""
    if isinstance(value, dict):
        return {key: placed(item, work) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [placed(item, work) for item in value]
    return value.replace("{work}", str(work)) if isinstance(value, str) else value


@dataclass
class Bench:
    """Flips fields of one program, and remembers the runs that they are compared with."""

    program: str
    work: Path
    config_class: type[Any] | None = None
    known: dict[str, Seen] = field(default_factory=dict)

    @property
    def cls(self) -> type[Any]:
        return self.config_class or COMMANDS[self.program].load().config_class

    def config(self, values: Mapping[str, Any]) -> Any:
        out = {"out": str(self.work / "run")} if "out" in leaves(self.cls) else {}
        data = with_leaves(BASES[self.program] | out, values)
        return from_dict(self.cls, placed(data, self.work), where="flip")

    def base(self, mode: Data) -> Seen:
        key = json.dumps(mode, sort_keys=True)
        if key not in self.known:
            self.known[key] = run(self.program, self.config(mode), reads=not mode)
        return self.known[key]

    def flip(self, name: str, value: Any, mode: Data) -> str:
        """Say what became of a flip: refused (by the config), effect, or silent."""
        try:
            first = self.base(mode)
        except UserError as error:
            return f"silent: its mode is refused: {error}"
        also = value if isinstance(value, dict) and name in value else {name: value}
        try:
            config = self.config({**mode, **also})
        except UserError:
            return "refused"
        try:
            return "effect" if first.differs(run(self.program, config)) else "silent"
        except UserError as error:
            return "effect" if mode else f"refused in the run: {error}"

    def fault(self, name: str, hint: Any) -> str | None:
        """Say what is wrong with a field; None for nothing."""
        cls, plain = self.cls, to_dict(self.config({}))
        reason = next(
            (UNSEEN[key] for key in UNSEEN if name == key or key[-1] == "." and name.startswith(key)), None
        )
        if reason is not None:
            is_read = (owner_of(cls, name), name.rpartition(".")[2]) in self.base({}).reads
            return None if is_read or name.rpartition(".")[2] in attributes_read() else "nobody reads it"
        value: Any = plain
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        mode, values = MODES.get(f"{self.program}:{name}") or MODES.get(name, ({}, []))
        if not mode:
            values = values or flips(name, hint, value)
        else:
            found = (
                {self.flip(name, v, {}) for v in flips(name, hint, value)[:1]}
                if name not in VALUES
                else set()
            )
            if "silent" in found and name not in SHOWN_LATE:
                return "silent in the base run"
        found = {str(v): self.flip(name, v, mode) for v in values}
        if name in VALUES and mode and f"{self.program}:{name}" not in MODES:
            found |= {str(v): self.flip(name, v, {}) for v in VALUES[name]}
        wrong = {v: what for v, what in found.items() if what != "effect"}
        return f"no effect of {wrong}" if wrong else None


SHOWN_LATE = frozenset(
    {
        "optim.weight_decay",
        "policy.system_prompt",
        "policy.template",
        "preflight",
        "max_dead_steps",
        "safety.keep",
        "algo.ratio",
        "algo.clip_low",
        "algo.clip_high",
    }
)
"""Fields that are read in the base run without showing there: a clip that nothing reaches, a limit that is not met."""


@cache
def attributes_read() -> set[str]:
    """Return every attribute that a module of the package reads, outside the checks of configs."""
    found: set[str] = set()
    for path in Path(str(whet.__file__)).parent.rglob("*.py"):
        stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
        while stack:
            node = stack.pop()
            if isinstance(node, ast.FunctionDef) and node.name.startswith(("__post_init__", "_check")):
                continue
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            stack.extend(ast.iter_child_nodes(node))
    return found


def home_of(program: str, name: str) -> str:
    """Return the program in which a field is flipped."""
    group = max((key for key in HOMES if name.startswith(key)), key=len, default="")
    return HOMES.get(group, program)


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    """A folder with the files that fields name; few problems, and rewards that differ whatever a model writes."""
    memory = Path("/dev/shm")  # thousands of files are made and removed
    place = str(memory) if memory.is_dir() else None
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        torch.set_num_threads(1)
        few = {split: Arithmetic().problems(split)[:24] for split in ("train", "dev", "test")}
        patch.setattr(Arithmetic, "problems", lambda self, split: few[split])
        for module, function in (
            ("whet.train.session", "write_report"),
            ("whet.train.rl", "write_report"),
            ("whet.eval.evaluate", "write_report"),
            ("whet.eval.evaluate", "draw_evaluation"),
        ):
            patch.setattr(importlib.import_module(module), function, lambda *_: [], raising=False)
        # A tenth of such a run is spent on YAML, and JSON is YAML, too; another tenth on the check of known rewards.
        for module in ("whet.train.session", "whet.eval.evaluate"):
            patch.setattr(
                importlib.import_module(module), "dump_yaml", lambda config: json.dumps(to_dict(config))
            )
        patch.setattr("whet.eval.audit.audit.NUM_PREFLIGHT", 3)  # as users have it: own.py passes the first
        setup = importlib.import_module("whet.train.setup")
        real = setup.preflight

        def check_own(task: Any, rewards: Any, *rest: Any, **options: Any) -> Any:
            known = all(reward.name in base.REWARDS for reward in rewards)
            return [] if known else real(task, rewards, *rest, **options)

        patch.setattr(setup, "preflight", check_own)
        rollout = importlib.import_module("whet.train.rollout.rollout")
        grade = rollout.grade

        def lenient(policy: Any, task: Any, pairs: Any) -> Any:
            return [
                replace(g, is_correct=len(pair[1]) % 2 == 0, verdict="perfect")
                for g, pair in zip(grade(policy, task, pairs), pairs, strict=True)
            ]

        def make(schema: Any, task: Any) -> Any:
            return lambda problem, text: 1.0 if schema.format_reward(text) == 1.0 else (len(text) % 7) / 10

        for module in ("whet.train.rollout.rollout", "whet.train.rollout.curriculum"):
            patch.setattr(importlib.import_module(module), "grade", lenient)
        patch.setitem(base.REWARDS, "format", base.Preset(make, best=1.0, worst=0.0))
        write_files(folder, few["train"])
        rows = [{"question": f"say {n}?", "answer": str(n)} for n in range(60)]
        configs = {"default": {"train": rows, "test": rows[::-1]}, "other": {"train": rows[:30]}}
        pairs = [{"prompt": f"say {n}?", "chosen": f"it is {n}", "rejected": f"no {n}"} for n in range(30)]
        hub.install(patch, owner__few=configs, owner__pairs={"default": {"train": pairs, "test": pairs[:20]}})
        yield folder


CHAT_TASK = """
from whet.types import Message, Problem

class Chats:
    name = "chats"

    def problems(self, split):
        said = (("user", "hi"), ("assistant", "yes"), ("user", "go"))
        asked = [Message(role=role, content=content) for role, content in said]
        replies = [str(n) for n in range(8)] + ["too long to fit" * 9] * 4
        return [
            Problem(uid=f"{split}{n}", task="chats", prompt="go", answer="", messages=tuple(asked), reply=reply)
            for n, reply in enumerate(replies)
        ]

    def is_correct(self, problem, answer):
        return None
"""


OWN = """
import time

def score(problem, completion):
    return len(completion) % 3

def slow(problem, completion):
    time.sleep(0.2)
    return len(completion) % 3
"""


def write_files(folder: Path, problems: Any) -> None:
    def write(name: str, rows: list[Any]) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))

    def row(number: int, word: str) -> Data:
        found = {"prompt": f"{word} {number}?", "question": f"what is {number}?", "answer": str(number)}
        return found | {
            "gold": str(number + 1),
            "solution": f"it is {number}",
            "worked": f"it must be {number}",
        }

    def pair(number: int, word: str) -> Data:
        return {"prompt": f"{word} {number}?", "chosen": f"it is {number}", "rejected": f"no {number}"}

    write("data.jsonl", [row(n, "say") for n in range(60)])
    write("more.jsonl", [row(n, "name") for n in range(60)])
    write("bad.jsonl", [*(row(n, "say") for n in range(60)), "{"])
    write("pairs.jsonl", [pair(n, "say") for n in range(30)])
    write("more_pairs.jsonl", [pair(n, "name") for n in range(30)])
    write("bad_pairs.jsonl", [*(pair(n, "say") for n in range(30)), "{"])
    rows = [
        {"question": f"{n} halves?", "answer": f"so <<{n}/2={n / 2}>>{n / 2}\n#### {n}"} for n in range(40)
    ]
    for name in ("train", "test"):
        write(f"gsm8k/{name}.jsonl", rows)
    rates = [{"uid": p.uid, "num_right": n % 5, "num_samples": 5} for n, p in enumerate(problems)]
    write("difficulty.jsonl", rates[:-3])
    write("all_rates.jsonl", rates)
    (folder / "own.py").write_text(OWN)
    (folder / "chats.py").write_text(CHAT_TASK)
    for name, seed in (("a", 1), ("b", 2)):
        config = from_dict(type(demo_policy()), POLICY, where="policy")
        load_policy(config, seed=seed).save(folder / name)
    for name, fill in (("scorer", 1.0), ("other_scorer", -3.0)):
        scorer = load_policy(config, seed=1, is_reward=True)
        with torch.no_grad():
            scorer.model.get_parameter("score.weight").copy_(torch.arange(8.0) * fill)
        scorer.save(folder / name)
    shutil.copytree(folder / "a", folder / "chat")  # a model of others: with a template and no protocol
    (folder / "chat" / "protocol.json").unlink()
    words = "{% for m in messages if m.role == 'user' %}{{ m.content }}{{ m.content if twice }}{% endfor %}"
    (folder / "chat" / "chat_template.jinja").write_text(words)
    shutil.copytree(folder / "a", folder / "stretched")  # its rope changes with length
    shape = json.loads((folder / "stretched" / "config.json").read_text())
    shape["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (folder / "stretched" / "config.json").write_text(json.dumps(shape))
    (folder / "adapter").mkdir()
    lora = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ["o_proj"],
        "base_model_name_or_path": "",
    }
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(lora))
    prefix = "base_model.model.model.layers.0.self_attn.o_proj.lora_"
    tensors = {f"{prefix}A.weight": torch.ones(2, 8), f"{prefix}B.weight": torch.ones(8, 2)}
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")


# Those of training take a tiny run for each of some 200 fields: over a minute.
LONG = {"rl": [pytest.mark.ci], "rft": [pytest.mark.ci], "sft": [pytest.mark.slow], "dpo": [pytest.mark.slow]}


@pytest.mark.ci
@pytest.mark.parametrize("program", [pytest.param(name, marks=LONG.get(name, [])) for name in BASES])
def test_every_field_has_an_effect_or_is_refused(program: str, work: Path) -> None:
    bench = Bench(program, work)
    assert bench.base({}).differs(run(program, bench.config({}))) == []  # or every flip would have an effect
    wrong = faults(bench, work)
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


def faults(bench: Bench, work: Path) -> dict[str, str]:
    """Return what is wrong, by field."""
    found: dict[str, str | None] = {}
    for name, hint in leaves(bench.cls).items():
        home = home_of(bench.program, name)
        if name == "out":
            continue
        if home == bench.program:
            found[name] = bench.fault(name, hint)
        else:
            last = name.rpartition(".")[2]
            owner = owner_of(bench.cls, name)
            if (owner, last) in reads_at(home, work) and (owner, last) not in bench.base({}).reads:
                found[name] = f"read by whet {home}, not by this program"
    return {name: what for name, what in found.items() if what}


READS: dict[str, set[tuple[str, str]]] = {}


def reads_at(program: str, work: Path) -> set[tuple[str, str]]:
    """Return what the base run of a program reads."""
    if program not in READS:
        READS[program] = Bench(program, work).base({}).reads
    return READS[program]


def test_a_field_that_nobody_reads_is_found(work: Path) -> None:
    """The proof that the test above can fail: one field more, of every kind, that nothing reads."""
    own = COMMANDS["sft"].load().config_class
    kinds: list[tuple[str, Any, Any]] = [("dummy_number", int, 3), ("dummy_flag", bool, False)]
    more = make_dataclass("More", kinds, bases=(own,), frozen=True, kw_only=True)
    bench = Bench("sft", work, more)
    hints = leaves(more)
    wrong = {name: bench.fault(name, hints[name]) for name in ("dummy_number", "dummy_flag", "batch_size")}
    assert wrong["batch_size"] is None
    assert "silent" in str(wrong["dummy_number"])
    assert "silent" in str(wrong["dummy_flag"])


def test_the_tables_name_fields_that_exist() -> None:
    known = [name for program in BASES for name in leaves(COMMANDS[program].load().config_class)]
    for name in (*(name.rpartition(":")[2] for name in MODES), *UNSEEN, *SHOWN_LATE, *HOMES):
        assert any(field == name or name[-1] == "." and field.startswith(name) for field in known), name


def test_what_is_not_seen_here_is_tested_where_its_reason_says() -> None:
    """A file must have the field's own name, or its reason the test's."""
    for name, reason in UNSEEN.items():
        word = name.rstrip(".").rpartition(".")[2]
        for file, test in re.findall(r"\b(tests/\S+\.py)(?:::(\w+))?", reason):
            path = Path(__file__).parents[1] / file
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            wanted = rf"def {test}\(" if test else rf"\b{word}\b"
            assert re.search(wanted, text), f"{name}: {file} has no {test or word}"
