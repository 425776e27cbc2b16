"""Times the C++ kernels against PyTorch on this machine for a model's widths; `dispatch` uses those at least as fast.

A compiler, an instruction set or a virtual machine can make them slow: on one machine they were 30 times slower,
silently. Timing takes at most half a second; results are stored with the built library, per width. On a busy machine a
product that is as fast as PyTorch's was seen at 0.9, which would cost the whole decoding step (three times as fast)
for good: what is refused so narrowly is measured again by the next two processes, and the median counts.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low

import torch

from whet.generate.engine import Engine
from whet.generate.rows import Request
from whet.generate.sampling import SamplingParams
from whet.kernels import dispatch, eager
from whet.kernels.cpu import build
from whet.kernels.cpu import ops as cpu
from whet.kernels.dispatch import OPERATIONS, TIE, Choice, Operation
from whet.kernels.mode import mode
from whet.model.attention import Packed
from whet.model.config import PLAIN_BLOCK, ModelConfig
from whet.model.transformer import LanguageModel
from whet.model.weights import build_model
from whet.ranks.collectives import on_main

WIDEST, MOST_HEADS = 1024, 16
"""Wider models are measured at these widths: beyond them the winner does not change, and time is short."""
ROWS = (128, 1024)
"""Rows of a training batch; a decoding step has few rows, and is timed as a whole."""
SEQUENCES, LENGTH = 4, 96
PROMPT, NEW_TOKENS, SAMPLES = 16, 12, 8
BUDGET_S = 0.5
FILE = "speed.json"
NARROW, TRIES = 0.75, 3
"""A ratio from here up to `TIE` is in doubt, until it was measured this often."""
NONE = Choice(frozenset())


def choose_kernels(shape: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Set which kernels this process uses, unless already set.

    Args:
        shape: The first model of the process; later ones follow its choice.
        dtype: Its parameters' dtype.
        device: Its device; there is only a choice on a CPU.
    """
    if dispatch.current() is not None or device.type != "cpu" or dtype not in cpu.DTYPES:
        return
    if mode() not in ("auto", "triton") or build.library() is None:
        return
    ratios = on_main(lambda: dict(_known(small(shape), dtype)))
    dispatch.take(Choice.of(ratios))


def expected_kernels(shape: ModelConfig, dtype: torch.dtype) -> frozenset[Operation]:
    """Return the operations that would run on the C++ kernels for a model on this CPU, without measuring anything.

    Args:
        shape: The first model of a process.
        dtype: Its parameters' dtype.

    Returns:
        This process's choice, or that of an earlier process for the same widths, or all.
    """
    if (choice := dispatch.current()) is not None:
        return choice.used
    folder = build.folder() if build.library() is not None and mode() in ("auto", "triton") else None
    kept = None if folder is None else _read(folder / FILE).get(_name(small(shape), dtype))
    return frozenset(OPERATIONS) if kept is None else Choice.of(_median(kept)).used


def small(shape: ModelConfig) -> ModelConfig:
    """Return a one-layer shape with a model's widths, capped to what can be measured quickly."""
    heads = min(shape.num_heads, MOST_HEADS)
    kv_heads = max(1, min(shape.num_kv_heads, heads * shape.num_kv_heads // shape.num_heads))
    return replace(
        shape,
        num_layers=1,
        vocab_size=1024,
        hidden_size=min(shape.hidden_size, WIDEST),
        intermediate_size=min(shape.intermediate_size, 2 * WIDEST),
        num_heads=heads // kv_heads * kv_heads,
        num_kv_heads=kv_heads,
        max_positions=min(shape.max_positions, 1024),
        tie_embeddings=True,
        block=PLAIN_BLOCK,  # the kernels compute plain attention and products
    )


def _known(shape: ModelConfig, dtype: torch.dtype) -> Mapping[Operation, float]:
    """Return the ratios for a shape, stored or newly measured."""
    folder = build.folder()
    assert folder is not None
    name, kept = _name(shape, dtype), _read(folder / FILE)
    rows = kept.setdefault(name, [])
    if not rows or (len(rows) < TRIES and any(NARROW <= ratio < TIE for ratio in _median(rows).values())):
        rows.append(measure(shape, dtype))
        _write(folder / FILE, kept)
    return _median(rows)


def _median(rows: Sequence[Mapping[Operation, float]]) -> dict[Operation, float]:
    """Return each operation's median ratio; the lower one of two, since one alone was in doubt."""
    common: list[Operation] = [name for name in OPERATIONS if all(name in row for row in rows)]
    return {name: median_low([row[name] for row in rows]) for name in common}


def _name(shape: ModelConfig, dtype: torch.dtype) -> str:
    sizes = shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads, shape.head_dim
    name = f"{shape.family} {'x'.join(map(str, sizes))} {dtype} {torch.get_num_threads()} threads"
    return f"{name} torch {torch.__version__}"


def _read(file: Path) -> dict[str, list[dict[Operation, float]]]:
    """Return every measurement by name; nothing where the file cannot be read."""
    try:
        return {
            str(name): [
                {o: float(row[o]) for o in OPERATIONS if o in row and math.isfinite(row[o])}
                for row in (rows if isinstance(rows, list) else [rows])  # earlier versions kept one
            ]
            for name, rows in json.loads(file.read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(file: Path, rows: Mapping[str, Sequence[Mapping[Operation, float]]]) -> None:
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            json.dump(rows, temporary, indent=1)
        os.replace(temporary.name, file)
    except OSError:
        pass  # measured again next time


def measure(shape: ModelConfig, dtype: torch.dtype, *, budget_s: float = BUDGET_S) -> dict[Operation, float]:
    """Time the kernels and PyTorch alternately.

    Args:
        shape: A small model with the widths to measure.
        dtype: Dtype of parameters and products.
        budget_s: Approximate time limit in seconds.

    Returns:
        Speed ratio over PyTorch of each operation that the kernels support for this shape, by the best time of each
        side: other load on the machine can only add to a time.
    """
    ratios: dict[Operation, float] = {}
    for operation, work in _work(shape, dtype).items():
        sides: dict[bool, list[float]] = {True: [math.inf] * len(work), False: [math.inf] * len(work)}
        end = time.perf_counter() + budget_s / 3
        rounds = 0
        while rounds < 2 or (time.perf_counter() < end and rounds < 20):
            for is_ours, best in sides.items():
                with dispatch.taken(Choice() if is_ours else NONE):
                    for place, run in enumerate(work):
                        best[place] = min(best[place], _seconds(run))
            rounds += 1
        logs = [math.log(theirs / ours) for ours, theirs in zip(sides[True], sides[False], strict=True)]
        ratios[operation] = round(math.exp(sum(logs) / len(logs)), 3)
    return ratios


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _work(shape: ModelConfig, dtype: torch.dtype) -> dict[Operation, Sequence[Callable[[], object]]]:
    """Return the timed functions of each operation; the current choice decides which side they run on."""
    width, feed = shape.hidden_size, shape.intermediate_size
    if width % cpu.QUANTUM or feed % cpu.QUANTUM:
        return {}
    weight = torch.full((feed, width), 0.01, dtype=dtype)
    inputs = [torch.full((rows, width), 0.5, dtype=dtype) for rows in ROWS]
    work: dict[Operation, Sequence[Callable[[], object]]] = {
        "product": [lambda x=x: _product(x, weight) for x in inputs]
    }
    if shape.head_dim not in cpu.CHANNELS:
        return work
    rows = SEQUENCES * LENGTH
    q = torch.full((rows, shape.num_heads, shape.head_dim), 0.1, dtype=dtype).requires_grad_()
    k = torch.full((rows, shape.num_kv_heads, shape.head_dim), 0.1, dtype=dtype).requires_grad_()
    packed = Packed([LENGTH] * SEQUENCES, torch.device("cpu"), "exact")

    def attend() -> None:
        packed.attend(0, q, k, k).sum().backward()

    model = build_model(shape).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    work["attention"], work["decode"] = [attend], [lambda: _decode(model)]
    return work


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (dispatch.kernel_for(eager.linear, x, weight) or torch.nn.functional.linear)(x, weight)


def _decode(model: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    request = Request(prompt_ids=(1,) * PROMPT, seeds=tuple(range(SAMPLES)))
    Engine(model, stop_ids=()).generate([request], params)
