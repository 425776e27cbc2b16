"""The same random models, prompts and settings for whet and for its peers, and how two sides are timed alternately.

Models: a = 1.07M parameters (Qwen2, hidden 128), b = 11.4M (hidden 384), c = 124M (hidden 768, vocabulary 50,257),
d = 494M (Qwen2.5-0.5B's shape, for a GPU).
A word of a prompt is a token; nothing ends a completion before its limit, so both sides do the same work.
Both sides compute on the first GPU if there is one, else on the CPU; `--device` or WHET_BENCH_DEVICE chooses.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as `whet` sets it: both sides run in this process
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from whet.__main__ import keep_freed_memory
from whet.generate.policy import Policy
from whet.kernels import dispatch
from whet.kernels.cpu import build
from whet.kernels.mode import VARIABLE, mode
from whet.model.config import ModelConfig
from whet.model.lora.side import LoRAConfig
from whet.model.lora.trained import Base, Trained
from whet.model.text.template import PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model, save_model
from whet.ranks.fsdp import ParallelConfig
from whet.schema import ResponseSchema
from whet.train.optim.precision import ADVANTAGE, measure
from whet.train.optim.precision import has_bfloat16 as computes_bfloat16
from whet.train.optim.step import Precision, shard_layers

SHAPES = {
    "a": ModelConfig(
        family="qwen2", vocab_size=1024, hidden_size=128, intermediate_size=480, num_layers=4, num_heads=4,
        num_kv_heads=2, head_dim=32, max_positions=1024, tie_embeddings=True,
    ),
    "b": ModelConfig(
        family="qwen2", vocab_size=8192, hidden_size=384, intermediate_size=848, num_layers=6, num_heads=6,
        num_kv_heads=2, head_dim=64, max_positions=1024, tie_embeddings=True,
    ),
    "c": ModelConfig(
        family="qwen2", vocab_size=50_257, hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12,
        num_kv_heads=12, head_dim=64, max_positions=1024, tie_embeddings=True,
    ),
    "d": ModelConfig(
        family="qwen2", vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
        num_kv_heads=2, head_dim=64, max_positions=4096, tie_embeddings=True,
    ),
}  # fmt: skip
EOS = "<eos>"
DEVICE_VARIABLE = "WHET_BENCH_DEVICE"
keep_freed_memory()  # as `whet` does: both sides run in this process


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each run of one side."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median in seconds."""
        return statistics.median(self.seconds)


def device() -> torch.device:
    """Return where both sides compute: auto, the default, is the first GPU if there is one, else the CPU."""
    name = os.environ.get(DEVICE_VARIABLE, "auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def on_gpu() -> bool:
    """Say whether both sides compute on a GPU."""
    return device().type == "cuda"


def now() -> float:
    """Return the time in seconds, once the device has done what was launched."""
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def forget() -> None:
    """Free what a side that ended leaves behind, on a GPU for the other side, too."""
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def default_allocator() -> None:
    """Set glibc's thresholds to the largest that it would choose by itself: what a peer's own process has."""
    allocator = getattr(ctypes.CDLL(None), "mallopt", None)
    if allocator is not None:
        allocator(-3, 32 << 20)  # M_MMAP_THRESHOLD
        allocator(-1, 64 << 20)  # M_TRIM_THRESHOLD


def words(vocab: int) -> dict[str, int]:
    """Return the vocabulary: number words."""
    return {str(number): number for number in range(vocab)}


def save_shape(name: str, folder: Path, seed: int = 0) -> Path:
    """Write random weights of a shape and its tokenizer as a Hugging Face folder."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers

    home = folder / name
    if home.exists():
        return home
    shape = SHAPES[name]
    model = build_model(shape)
    init_weights(model, seed)
    part = folder / f"{name}.part"  # one that was interrupted is no model
    part.mkdir(parents=True, exist_ok=True)
    save_model(model, part, bos_id=None, eos_ids=())
    fast = Fast(models.WordLevel(words(shape.vocab_size), unk_token="0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.save(str(part / "tokenizer.json"))
    return part.rename(home)


def load_whet(
    home: Path,
    *,
    dtype: torch.dtype,
    max_rows: int = 256,
    lora: LoRAConfig | None = None,
    parallel: ParallelConfig | None = None,
) -> Policy:
    """Load whet's side: a plain prompt, no stop string and no stop token; with `lora` it trains adapters.

    With `parallel`, each rank reads its share. Its attention is what `policy.attention = auto` chooses.
    """
    from whet.model.weights import load_model

    place = device()
    is_sharded = parallel is not None and parallel.kind == "fsdp"
    shard = partial(shard_layers, config=parallel, device=place) if is_sharded else None
    model, _ = load_model(home, dtype=dtype, device=place, shard=shard)
    tokenizer = Tokenizer.load(str(home))
    if model.images is None:
        tokenizer = tokenizer.with_template(PLAIN_TEMPLATE)
    policy = Policy(
        model,
        tokenizer,
        ResponseSchema(),
        system_prompt=False,
        max_rows=max_rows,
        attention="fast" if on_gpu() else "exact",
    )
    policy.stop_strings, policy.stop_ids = (), ()
    if lora is not None:
        policy.trained = Trained(model, lora, base=Base(str(home), home), seed=0)
    return policy


def load_peer(home: Path, *, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load the same weights with transformers; the tokenizer's end token lies outside the model's vocabulary."""
    from tokenizers import Tokenizer as Fast
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model: Any = AutoModelForCausalLM.from_pretrained(home, dtype=dtype, attn_implementation="sdpa")
    fast = Fast.from_file(str(home / "tokenizer.json"))
    fast.add_special_tokens([EOS])
    return model.to(device()), PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=EOS, pad_token="0")


def draw_prompts(count: int, shortest: int, longest: int, vocab: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Draw prompts of evenly spread lengths."""
    generator = torch.Generator().manual_seed(seed)
    span = max(1, count - 1)
    return [
        tuple(
            torch.randint(
                1, vocab, (shortest + (longest - shortest) * place // span,), generator=generator
            ).tolist()
        )
        for place in range(count)
    ]


def alternate(sides: dict[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, Timing]:
    """Time several sides in turn, so that a noisy neighbour disturbs all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warmup + repeats):
        for name, run in sides.items():
            gc.collect()
            began = now()
            run()
            if number >= warmup:
                seconds[name].append(now() - began)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def has_bfloat16() -> bool:
    """Whether PyTorch multiplies bfloat16 matrices with more than plain loops here, on a GPU in hardware.

    Without AVX-512 a bfloat16 product takes up to 200 times as long as a float32 one, so no peer would be run so.
    """
    if on_gpu():
        return computes_bfloat16(device())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def auto_precision(name: str) -> Precision:
    """Return what `optim.precision = auto` chooses for a shape on this machine."""
    seconds = measure(SHAPES[name], device())
    best = min(seconds, key=lambda precision: seconds[precision])
    return best if seconds["float32"] >= ADVANTAGE * seconds[best] else "float32"


def paired(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Return the ratio of two sides' medians, and the range of the ratios of their runs side by side.

    Args:
        theirs: Seconds of each of the peer's runs.
        ours: Seconds of ours, in the same order, each beside one of theirs.
    """
    pairs = [a / b for a, b in zip(theirs, ours, strict=True)]
    return {
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "range": [round(min(pairs), 2), round(max(pairs), 2)],
    }


def times(row: dict[str, Any], name: str = "ratio", spread: str = "range") -> str:
    """Say a ratio with its range: `4.5x (4.1 to 4.9)`."""
    low, high = row[spread]
    return f"{row[name]:.1f}x ({low:.1f} to {high:.1f})"


def matmul_peak(dtype: torch.dtype, size: int = 0, seconds: float = 1.0) -> float:
    """Return the best FLOP/s of square products here and now; their size is 2,048 on a CPU, 8,192 on a GPU."""
    size = size or (8192 if on_gpu() else 2048)
    left, right = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
    best, end = 9e9, time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = now()
        left @ right
        best = min(best, now() - began)
    return 2 * size**3 / best


def read_speed() -> float:
    """Return the bytes per second that can be read here and now: of 128 MiB, on a GPU of 4 GiB."""
    # Pages that were never written are not read either; a GPU's cache holds tens of MiB.
    source = torch.full((2**32 if on_gpu() else 2**27,), 1, dtype=torch.uint8, device=device())
    best = 9e9
    for _ in range(5):
        began = now()
        source.view(torch.int64).sum()
        best = min(best, now() - began)
    return source.numel() / best


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Use the kernels that this value of WHET_KERNELS stands for, in this context."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def linear_weights(shape: ModelConfig) -> int:
    """Return the parameters that every token is multiplied with, without the head."""
    width, channels = shape.hidden_size, shape.head_dim
    attention = width * channels * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    return shape.num_layers * (attention + 3 * width * shape.intermediate_size)


def quiet() -> None:
    """Silence what peers print."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def parser(
    text: str | None, *, devices: Sequence[str] = ("auto", "cpu", "cuda"), has_kernels: bool = False
) -> argparse.ArgumentParser:
    """Make the command line that all programs share.

    Args:
        text: What the program does; its first line is shown.
        devices: Where it can run; the first is the default.
        has_kernels: Whether it compares sets of whet's kernels.
    """
    result = argparse.ArgumentParser(description=(text or "").split("\n")[0])
    result.add_argument("--quick", action="store_true", help="the smallest model and few repeats")
    result.add_argument("--json", type=Path, help="write the rows there")
    result.add_argument("--repeats", type=int, default=0, help="timed runs of each side")
    result.add_argument("--threads", type=int, default=0, help="intra-op threads; default all cores")
    result.add_argument("--models", default="", help="which of a, b, c, d, such as ab")
    result.add_argument("--device", default=devices[0], choices=devices, help="where both sides compute")
    result.add_argument("--weights", type=Path, help="keep random weights there for the next program")
    if has_kernels:
        modes = ("auto", "cpp", "triton", "eager")
        words = "whet once with each of these values of WHET_KERNELS, beside the same peer"
        result.add_argument("--kernels", nargs="*", default=[mode()], choices=modes, help=words)
    return result


def start(arguments: argparse.Namespace) -> None:
    """Apply what all programs share."""
    quiet()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.device != "auto":
        os.environ[DEVICE_VARIABLE] = arguments.device
    if on_gpu() and not torch.cuda.is_available():
        raise SystemExit("--device cuda: this machine has no usable CUDA device; expected cpu or auto here")
    if not on_gpu() and getattr(arguments, "kernels", [mode()]) != [mode()]:
        raise SystemExit("--kernels: on a CPU a process has one set; set WHET_KERNELS instead")


@contextmanager
def weights_folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """Give the folder for random weights: the one that was asked for, or one that is deleted afterwards."""
    if arguments.weights:
        yield arguments.weights
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def isa() -> str:
    """Name what ratios were measured on, a GPU or an instruction set: they do not carry over to another."""
    if on_gpu():
        return torch.cuda.get_device_name(device())
    return build.instruction_set() or f"eager {torch.backends.cpu.get_cpu_capability().lower()}"


def finish(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the rows where that is asked."""
    if arguments.json:
        facts = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "kernels": f"WHET_KERNELS = {mode()}" if on_gpu() else dispatch.describe(),
            "isa": isa(),
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["python", *sys.argv]),
        }
        arguments.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
