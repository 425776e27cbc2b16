"""Valid inputs that the mutations start from, made by whet itself (nothing is read from the machine)."""

from __future__ import annotations

import io
import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from whet.generate.policy import PolicyConfig, load_policy
from whet.model.config import ModelConfig
from whet.recipes.models import demo_policy

SHAPE = ModelConfig(
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=32,
)
Files = dict[str, bytes]
CHAT = (
    "{%- set ns = namespace(found=false) -%}{{ bos_token }}{%- for message in messages -%}"
    "{%- if message['role'] == 'system' and not ns.found -%}{% set ns.found = true %}{{ message.content | trim }}\n"
    "{%- elif message.role == 'assistant' -%}{% generation %}<|a|>{{ message['content'] }}{% endgeneration %}"
    "{%- else -%}<|{{ message.role }}|>{{ message['content'].split('x')[-1] + '\\n' }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|a|>{%- endif -%}"
)


def read(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@cache
def model_files() -> Files:
    """Return a model folder with tokenizer and protocol, as whet saves it."""
    from dataclasses import replace

    with tempfile.TemporaryDirectory() as name:
        policy = load_policy(replace(demo_policy(), model=SHAPE, max_rows=8), seed=1)
        policy.save(Path(name))
        return read(Path(name))


@cache
def sharded_files() -> Files:
    """Return the same model in two shards with an index."""
    files = dict(model_files())
    header, tensors = split(files.pop("model.safetensors"))
    names = sorted(name for name in header if name != "__metadata__")
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    weight_map: dict[str, str] = {}
    for number, half in enumerate(halves, 1):
        shard = f"model-{number:05d}-of-00002.safetensors"
        part: dict[str, Any] = {}
        data = b""
        for name in half:
            low, high = header[name]["data_offsets"]
            part[name] = {**header[name], "data_offsets": [len(data), len(data) + high - low]}
            data += tensors[low:high]
        files[shard] = join(part, data)
        weight_map |= dict.fromkeys(half, shard)
    index = {"metadata": {"total_size": len(tensors)}, "weight_map": weight_map}
    return files | {"model.safetensors.index.json": json.dumps(index, indent=1).encode()}


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return header and data of a safetensors file."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(header: Any, data: bytes, size: int | None = None) -> bytes:
    """Make a safetensors file of a header (a tree, or bytes) and data, with a true or a claimed header size."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if size is None else size) + text + data


@cache
def adapter_files() -> Files:
    """Return a LoRA adapter of the model's query projection in peft's layout."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": 2,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "target_modules": ["q_proj"],
        "rank_pattern": {},
        "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 4},
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "layers_to_transform": None,
        "inference_mode": True,
    }
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.ones(2, 16), f"{module}.lora_B.weight": torch.ones(16, 2)}
    return {
        "adapter_config.json": json.dumps(config, indent=1).encode(),
        "adapter_model.safetensors": save_tensors(tensors),
    }


ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {
            "question": f"Tom has {n} apples and buys {n}. How many?",
            "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n}",
        }
        for n in range(8)
    ],
    "math": [
        {
            "problem": f"Find ${n}+x$.",
            "solution": f"It is $\\boxed{{{n}}}$.",
            "answer": f"{n}",
            "level": "Level 3",
            "type": "Algebra",
        }
        for n in range(8)
    ],
    "jsonl": [{"prompt": f"What is {n}?", "answer": str(n), "solution": f"It is {n}."} for n in range(8)]
    + [],
    "messages": [
        {
            "messages": [
                {"role": "user", "content": f"Say {n}"},
                {"role": "assistant", "content": f"so\n#### {n}"},
            ]
        }
        for n in range(8)
    ],
    "choice": [
        {
            "question": f"Which is {n}?",
            "choices": ["one", "two", "three", f"x{n}"],
            "answer": "B",
            "subject": "s",
        }
        for n in range(8)
    ],
    "yes_no": [{"question": f"Is {n} odd?", "answer": "yes"} for n in range(8)],
    "countdown": [{"nums": [n + 1, 2, 3], "target": n + 6} for n in range(8)],
    "letters": [
        {"word": "strawberry", "letter": "r", "count": 3},
        {"word": "banana", "letter": "a", "count": 3},
    ],
    "humaneval": [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": f"def f{n}(x):\n",
            "entry_point": f"f{n}",
            "canonical_solution": "    return x\n",
            "test": f"def check(candidate):\n    assert candidate({n}) == {n}\n",
        }
        for n in range(4)
    ],
    "mbpp": [
        {
            "task_id": 11 + 300 * n,
            "text": "Write f.",
            "code": "def f(x):\r\n    return x",
            "test_list": ["assert f(1) == 1"],
            "test_setup_code": "",
            "challenge_test_list": [],
        }
        for n in range(4)
    ],
    "code": [
        {
            "prompt": f"Write f{n}.",
            "tests": [f"assert f{n}(1) == 1"],
            "solution": f"def f{n}(x): return x",
            "names": [f"f{n}"],
        }
        for n in range(4)
    ],
    "pairs": [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "0"} for n in range(1, 6)],
}
"""Rows of every task that reads files; 'messages' is jsonl's second form, 'pairs' what `whet dpo --pairs` reads."""
NAMES = {
    "gsm8k": ("train.jsonl", "test.jsonl", "train.jsonl.gz"),
    "math": ("MATH_train.jsonl", "train.jsonl", "test.json"),
    "humaneval": ("HumanEval.jsonl",),
    "mbpp": ("mbpp.jsonl",),
    "code": ("train.jsonl", "rows.jsonl"),
    "pairs": ("rows.jsonl",),
    "jsonl": ("train.jsonl", "test.jsonl", "rows.jsonl", "rows.jsonl.gz", "rows.parquet", "train.parquet"),
}
ANY_NAME = ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "train.jsonl", "test.json", "train.csv")


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """Write rows as parquet; a column of mixed types is written as text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
    columns: dict[str, Any] = {}
    for name in names or ["x"]:
        values = [row.get(name) if isinstance(row, dict) else None for row in rows]
        try:
            columns[name.encode("utf-8", "replace").decode()] = pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, RecursionError):
            texts = [str(value)[:1000].encode("utf-8", "replace").decode() for value in values]
            columns[name.encode("utf-8", "replace").decode()] = pa.array(texts)
    sink = io.BytesIO()
    try:
        pq.write_table(pa.table(columns), sink)
    except pa.ArrowException:  # a type that parquet has not
        pq.write_table(
            pa.table(
                {
                    name: pa.array([str(row)[:99].encode("utf-8", "replace").decode() for row in rows])
                    for name in ("x",)
                }
            ),
            sink,
        )
    return sink.getvalue()


@cache
def run_files() -> Files:
    """Return a finished run folder of reinforcement learning with a few rows of everything."""
    from whet.config import dump_yaml
    from whet.recipes.rl import RECIPES

    metrics = [
        {
            "stage": "rl",
            "step": step,
            "time_s": 1e9 + step,
            "rl/correct": step / 12,
            "rl/format": 1.0,
            "rl/reward_mean": step / 12,
            "rl/reward/correct": step / 12,
            "rl/grad_norm": 0.3,
            "rl/entropy": 0.5,
            "rl/completion_tokens": 20.0 + step,
            "rl/truncated": 0.0,
            "eval/pass@1": None if step % 3 else 0.5,
        }
        for step in range(1, 9)
    ]
    samples = [
        {
            "step": step,
            "uid": f"u{problem}",
            "index": index,
            "prompt": "1+1=",
            "answer": "2",
            "completion": "1+1=2</think><answer>2</answer>",
            "num_completion_tokens": 9,
            "num_read_tokens": 0,
            "num_turns": 1,
            "completion_ids": [9, 17, 10],
            "finish_reason": "stop",
            "rewards": {"correct": float(index), "format": 1.0},
            "reward": 1.1 * index,
            "advantage": 0.5 - index,
        }
        for step in range(1, 5)
        for problem in range(2)
        for index in range(2)
    ]
    environment = {
        "whet": "0.1.0",
        "git_commit": "741352d8f08d43055df77bed65944e2a187ab63c",
        "python": "3.11.7",
        "torch": "2.13.0",
        "platform": "Linux",
        "num_cpus": 2,
        "argv": ["whet", "rl", "demo"],
        "start_utc": "2026-11-21T18:48:26+00:00",
    }
    provenance = {
        "run_id": "rl-20261121-184826-abcdef",
        "git": {"commit": "741352d8", "dirty": False},
        "data": {"sha256": "0" * 64, "num_rows": 3},
        "base": {"source": "runs/sft", "sha256": "1" * 64, "run_id": "sft-1"},
        "parent": {"folder": "../sft", "run_id": "sft-1"},
        "config_sha256": "2" * 64,
        "finished_utc": "2026-11-21T18:50:00+00:00",
        "peak_memory_gib": 0.4,
    }
    summary = {
        "status": "finished",
        "steps": 8,
        "seconds": 12.5,
        "greedy": 0.5,
        "best": {"step": 8, "pass@1": 0.5},
        "peak_memory_gib": 0.4,
    }
    links = [
        {
            "name": "tensorboard",
            "id": "x",
            "url": "",
            "path": "tensorboard",
            "rows_sent": 8,
            "rows_not_sent": 0,
            "error": "",
        }
    ]
    config = dump_yaml(RECIPES["demo"]() if "demo" in RECIPES else next(iter(RECIPES.values()))())
    evaluation = eval_files(0)
    return {
        "config.yaml": config.encode(),
        "metrics.jsonl": lines(metrics),
        "samples.jsonl": lines(samples),
        "environment.json": json.dumps(environment, indent=1).encode(),
        "provenance.json": json.dumps(provenance, indent=1).encode(),
        "summary.json": json.dumps(summary, indent=1).encode(),
        "eval.json": evaluation["eval.json"],
        "trackers.json": json.dumps(links).encode(),
        "notes.jsonl": lines([{"utc": "2026-11-21", "note": "good"}]),
    }


def eval_files(seed: int) -> Files:
    """Return a finished evaluation of four problems with two samples each."""
    rows = [
        {
            "uid": f"u{problem}",
            "prompt": "1+1=",
            "gold": "2",
            "meta": {"level": "1"},
            "sample": sample,
            "text": "1+1=2</think><answer>2</answer>",
            "answer": "2",
            "answer_from": "schema",
            "correct": (problem + seed) % 2 == 0,
            "format": "perfect",
            "thinking_tokens": 5,
            "completion_tokens": 9,
            "finish_reason": "stop",
        }
        for problem in range(4)
        for sample in ("greedy", 0, 1)
    ]
    protocol = json.loads(model_files()["protocol.json"])
    estimate = {"mean": 0.5, "low": 0.1, "high": 0.9}
    summary = {
        "label": f"m{seed}",
        "remark": "",
        "num_problems": 4,
        "num_samples": 2,
        "metrics": {
            "pass@1": estimate,
            "greedy": estimate,
            "format": estimate,
            "completion_tokens": estimate,
        },
        "pass@1 by": {"level": {"1": estimate}},
        "seconds": 1.5,
        "identity": {
            "protocol": protocol,
            "task": {"name": "arithmetic"},
            "split": "test",
            "sampling": {"temperature": 1.0, "max_new_tokens": 48},
            "weights": "3" * 64,
            "seed": seed,
        },
    }
    return {"eval.json": json.dumps(summary, indent=1).encode(), "eval_samples.jsonl": lines(rows)}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


__all__ = ["PolicyConfig"]
