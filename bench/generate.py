"""Time generation of whet, of transformers' generate and of vLLM's CPU build, alternately in one run.

python bench/generate.py [--quick] [--models abc] [--repeats 5] [--against hf vllm] [--json FILE]

Same weights, prompts of 32 tokens, 64 new tokens each, nothing ends early, sampled at temperature 1 without filters.
All run with their best of float32 and bfloat16, model a in float32 alone; transformers (sdpa, dynamic cache) in
bfloat16 only where the CPU has products for it; vLLM (model c) in both. The floor is what must be computed, at the
matmul peak, or read, at the copy speed of the same run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sides
import torch

from whet.generate.engine import Request
from whet.generate.sampling import SamplingParams, sequence_seed

BATCHES = (1, 8, 64, 128)
PROMPT, NEW = 32, 64
TARGET = {"hf": 3.0, "vllm": 1.1}
VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")
"""Python of an environment with vLLM's CPU build, which needs another PyTorch."""


def whet_side(home: Path, dtype: torch.dtype, prompts: list[tuple[int, ...]]) -> Any:
    """Return a function that generates with whet."""
    engine = sides.load_whet(home, dtype=dtype, max_rows=len(prompts)).engine()
    seeds = [sequence_seed("bench", place) for place in range(len(prompts))]
    requests = [Request(prompt_ids=ids, seeds=(seed,)) for ids, seed in zip(prompts, seeds, strict=True)]
    params = SamplingParams(max_new_tokens=NEW)

    def run() -> int:
        return sum(len(row[0].ids) for row in engine.generate(requests, params))

    return run


def hf_side(home: Path, dtype: torch.dtype, prompts: list[tuple[int, ...]]) -> Any:
    """Return a function that generates with transformers."""
    model, _ = sides.load_peer(home, dtype=dtype)
    model.eval()
    ids = torch.tensor(prompts)
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}

    @torch.inference_mode()
    def run() -> int:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0, **options
        )
        return out.numel() - ids.numel()

    return run


class VLLM:
    """vLLM in a process of its own, asked to generate whenever it is its turn."""

    CODE = """
import json, sys
from vllm import LLM, SamplingParams
home, dtype, prompts, new = json.loads(sys.argv[1])
options = {"max_model_len": 256, "skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 256}
llm = LLM(model=home, dtype=dtype, **options)
params = SamplingParams(max_tokens=new, min_tokens=new, temperature=1.0, ignore_eos=True, detokenize=False)
print("ready", flush=True)
for _ in sys.stdin:
    out = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    print("done", sum(len(o.outputs[0].token_ids) for o in out), flush=True)
"""

    def __init__(self, home: Path, dtype: str, prompts: list[tuple[int, ...]]) -> None:
        arguments = json.dumps([str(home), dtype, prompts, NEW])
        environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "2"}
        self.process = subprocess.Popen(
            [VLLM_PYTHON, "-c", self.CODE, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.read("ready")

    def read(self, word: str) -> str:
        """Wait for a line that begins with a word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line
        raise RuntimeError("vLLM ended")

    def __call__(self) -> int:
        """Generate once."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return int(self.read("done").split()[1])

    def stop(self) -> None:
        """End the process and its workers."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def copy_speed() -> float:
    """Return the bytes per second that can be read here and now."""
    source = torch.full((2**27,), 1, dtype=torch.uint8)  # pages that were never written are not read either
    best = 9e9
    for _ in range(5):
        began = time.perf_counter()
        source.view(torch.int64).sum()
        best = min(best, time.perf_counter() - began)
    return source.numel() / best


def floor_seconds(model: str, batch: int, dtype: torch.dtype, peak: float, speed: float) -> float:
    """Return the larger of arithmetic and reading, summed over prefill and steps."""
    shape = sides.SHAPES[model]
    weights = sides.linear_weights(shape) + shape.vocab_size * shape.hidden_size
    width = torch.empty(0, dtype=dtype).element_size()
    cached = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * width * (PROMPT + NEW / 2) * batch
    step = max(2 * weights * batch / peak, (weights * width + cached) / speed)
    return NEW * step + 2 * sides.linear_weights(shape) * batch * PROMPT / peak


def run_point(model: str, batch: int, folder: Path, repeats: int, against: list[str]) -> dict[str, Any]:
    """Time all sides at one batch size."""
    home = sides.save_shape(model, folder)
    names = ["float32"] if model == "a" else ["float32", "bfloat16"]
    prompts = sides.draw_prompts(batch, PROMPT, PROMPT, sides.SHAPES[model].vocab_size)
    runs = {f"whet {d}": whet_side(home, getattr(torch, d), prompts) for d in names}
    if "hf" in against:
        theirs = names if sides.has_bfloat16() else ["float32"]
        runs |= {f"hf {d}": hf_side(home, getattr(torch, d), prompts) for d in theirs}
    is_asked = "vllm" in against and model == "c" and VLLM_PYTHON
    vllm = {f"vllm {dtype}": VLLM(home, dtype, prompts) for dtype in names} if is_asked else {}
    runs |= vllm
    counts = {name: run() for name, run in runs.items()}
    assert set(counts.values()) == {batch * NEW}, counts
    times = sides.alternate(runs, repeats, warmup=0)
    for server in vllm.values():
        server.stop()

    def best(side: str) -> str:
        return min((n for n in times if n.startswith(side)), key=lambda n: times[n].median)

    mine = times[best("whet")]
    dtype = getattr(torch, best("whet").removeprefix("whet "))
    row: dict[str, Any] = {"model": model, "batch": batch, "precision": str(dtype).removeprefix("torch.")}
    row["whet_tokens_per_second"] = batch * NEW / mine.median
    for name in ("hf", "vllm"):
        if any(other.startswith(name) for other in times):
            pair = sides.paired(times[best(name)].seconds, mine.seconds)
            row |= {f"{name}_{key}": value for key, value in pair.items()}
            row[f"{name}_best"] = best(name).removeprefix(f"{name} ")
    mine = mine.median
    # Without bfloat16 products the kernels multiply at float32's speed.
    peak = dtype if sides.has_bfloat16() else torch.float32
    row["share_of_floor"] = floor_seconds(model, batch, dtype, sides.matmul_peak(peak), copy_speed()) / mine
    return row


def main() -> None:
    """Print a line per model and batch size."""
    parser = sides.parser(__doc__)
    parser.add_argument("--against", nargs="*", default=["hf", "vllm"], choices=["hf", "vllm"])
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    arguments = parser.parse_args()
    sides.start(arguments)
    if "vllm" in arguments.against and not VLLM_PYTHON:
        print(
            "vLLM left out: VLLM_PYTHON names no Python of an environment that has its CPU build",
            file=sys.stderr,
        )
    rows = []
    models = arguments.models or ("a" if arguments.quick else "abc")
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for batch in (8,) if arguments.quick else arguments.batches:
                repeats = arguments.repeats or (3 if model == "c" or arguments.quick else 5)
                row = run_point(model, batch, Path(folder), repeats, arguments.against)
                rows.append(row)
                parts = [f"generate {model} batch {batch:>3}, {row['precision']}:"]
                for name, title in (("hf", "HF"), ("vllm", "vLLM")):
                    if f"{name}_ratio" in row:
                        ratio = sides.times(row, f"{name}_ratio", f"{name}_range")
                        parts.append(f"{title} ({row[f'{name}_best']}) {ratio} (target {TARGET[name]:g}x)")
                parts += [f"{row['share_of_floor']:.0%} of the floor, medians of {repeats} alternating runs"]
                print(" ".join(parts), flush=True)
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
