"""Times the C++ kernels against PyTorch on this machine for a model's widths; `dispatch` uses those at least as fast.

A compiler, an instruction set or a virtual machine can make them slow: on one machine they were 30 times slower,
silently. Timing takes about half a second; results are stored with the built library, per width and processor.

Other load on the machine can only add to a time. So both sides alternate in many short rounds, each operation's spread
over the whole time, and the best time of each side counts. What would refuse a kernel, or is too good to be true, is
measured for longer, since a product that is as fast as PyTorch's but was seen at 0.9 would cost the whole decoding step
(three times as fast); what is refused all the same is measured again by the next two processes, and the median counts.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from whet.kernels.dispatch import OPERATIONS, TIE, Choice, Operation, plausible
from whet.kernels.mode import mode
from whet.model.attention import Packed
from whet.model.config import PLAIN_BLOCK, ModelConfig
from whet.model.transformer import LanguageModel
from whet.model.weights import build_model
from whet.ranks.collectives import on_main

WIDEST, MOST_HEADS = 1024, 16
"""Wider models are measured at these widths: beyond them the winner does not change, and time is short."""
ROWS = (128, 256)
"""Rows of a training batch, few enough for several rounds; a decoding step has fewer, and is timed as a whole."""
SEQUENCES, LENGTH = 4, 96
PROMPT, NEW_TOKENS, SAMPLES = 16, 4, 8
BUDGET_S, TURN_S, FIRST = 0.5, 0.01, 0.6
"""Time limit; an operation's time before it is the next one's turn; share of the limit after which only what is in
doubt is measured on."""
LEAST_ROUNDS = 2
FILE = "speed.json"
TRIES = 3
"""A ratio below `TIE` is in doubt until it was measured this often."""
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
    rows = [] if folder is None else _rows(_read(folder / FILE), small(shape), dtype)
    return Choice.of(_median(rows)).used if rows else frozenset(OPERATIONS)


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
    if not _measurable(shape):
        return {}
    kept = _read(folder / FILE)
    rows = _rows(kept, shape, dtype)
    if not rows or (len(rows) < TRIES and any(ratio < TIE for ratio in _median(rows).values())):
        new = measure(shape, dtype)
        if plausible(new) != new:  # not stored: the next process measures again
            return _median(rows) or new
        rows.append(new)
        _write(folder / FILE, {**kept, _name(shape, dtype): rows})
    return _median(rows)


def _measurable(shape: ModelConfig) -> tuple[Operation, ...]:
    """Return the operations that the kernels support for a shape."""
    if shape.hidden_size % cpu.QUANTUM or shape.intermediate_size % cpu.QUANTUM:
        return ()
    return OPERATIONS if shape.head_dim in cpu.CHANNELS else ("product",)


def _rows(kept: Mapping[str, object], shape: ModelConfig, dtype: torch.dtype) -> list[dict[Operation, float]]:
    """Return the stored measurements of a shape; one that is not whole and plausible counts for nothing."""
    found = kept.get(_name(shape, dtype))
    rows = map(plausible, found if isinstance(found, list) else [])
    return [row for row in rows if row and row.keys() == set(_measurable(shape))]


def _median(rows: Sequence[Mapping[Operation, float]]) -> dict[Operation, float]:
    """Return each operation's median ratio; the lower one of two, since one alone was in doubt."""
    common: list[Operation] = [name for name in OPERATIONS if all(name in row for row in rows)]
    return {name: median_low([row[name] for row in rows]) for name in common} if rows else {}


def _name(shape: ModelConfig, dtype: torch.dtype) -> str:
    sizes = shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads, shape.head_dim
    name = f"{shape.family} {'x'.join(map(str, sizes))} {dtype} {torch.get_num_threads()} threads"
    return f"{name} torch {torch.__version__} {build.processor_name()}"


def _read(file: Path) -> dict[str, object]:
    """Return what is stored by name; nothing where the file cannot be read."""
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _write(file: Path, kept: Mapping[str, object]) -> None:
    with (
        suppress(OSError),
        tempfile.TemporaryDirectory(dir=file.parent) as work,
    ):  # else measured again next time
        new = Path(work) / FILE
        new.write_text(json.dumps(kept, indent=1))
        os.replace(new, file)


def measure(shape: ModelConfig, dtype: torch.dtype, *, budget_s: float = BUDGET_S) -> dict[Operation, float]:
    """Time the kernels and PyTorch alternately.

    Args:
        shape: A small model with the widths to measure.
        dtype: Dtype of parameters and products.
        budget_s: Approximate time limit in seconds.

    Returns:
        Speed ratio over PyTorch of each operation that the kernels support for this shape, by the best time of each
        side: other load on the machine can only add to a time. It may still not be `plausible`.
    """
    began = time.perf_counter()
    races: dict[Operation, _Race] = {
        operation: _Race(work) for operation, work in _work(shape, dtype).items()
    }
    for _ in range(LEAST_ROUNDS):
        for race in races.values():
            race.run()
    while races and time.perf_counter() < began + FIRST * budget_s:
        for race in races.values():
            race.run()
    while doubtful := [race for name, race in races.items() if _is_doubtful({name: race.ratio})]:
        for race in doubtful:
            race.run()
        if time.perf_counter() >= began + budget_s:
            break
    return {name: round(race.ratio, 3) for name, race in races.items()}


def _is_doubtful(ratios: Mapping[Operation, float]) -> bool:
    """Say whether ratios would refuse a kernel, or cannot be true."""
    return plausible(ratios) != ratios or any(ratio < TIE for ratio in ratios.values())


class _Race:
    """The best times of both sides for an operation."""

    def __init__(self, work: Sequence[Callable[[], object]]) -> None:
        self._work = work
        self._best = {True: [math.inf] * len(work), False: [math.inf] * len(work)}

    def run(self) -> None:
        """Let both sides run alternately: once, and again for a while if they are fast."""
        end = time.perf_counter() + TURN_S
        while True:
            for is_ours, best in self._best.items():
                with dispatch.taken(Choice() if is_ours else NONE):
                    for place, run in enumerate(self._work):
                        best[place] = min(best[place], _seconds(run))
            if time.perf_counter() >= end:
                return

    @property
    def ratio(self) -> float:
        """Speed over PyTorch's, the geometric mean over what is timed."""
        logs = [
            math.log(theirs / ours) for ours, theirs in zip(self._best[True], self._best[False], strict=True)
        ]
        return math.exp(sum(logs) / len(logs))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _work(shape: ModelConfig, dtype: torch.dtype) -> dict[Operation, Sequence[Callable[[], object]]]:
    """Return the timed functions of each operation; the current choice decides which side they run on."""
    width, feed = shape.hidden_size, shape.intermediate_size
    if not (measurable := _measurable(shape)):
        return {}
    weight = torch.full((feed, width), 0.01, dtype=dtype)
    inputs = [torch.full((rows, width), 0.5, dtype=dtype) for rows in ROWS]
    work: dict[Operation, Sequence[Callable[[], object]]] = {
        "product": [lambda x=x: _product(x, weight) for x in inputs]
    }
    if "attention" not in measurable:
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
    return dispatch.run(eager.linear, x, weight)


def _decode(model: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    request = Request(prompt_ids=(1,) * PROMPT, seeds=tuple(range(SAMPLES)))
    Engine(model, stop_ids=()).generate([request], params)
