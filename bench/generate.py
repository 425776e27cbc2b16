"""Time generation of whet, of transformers' generate and of vLLM's CPU build, alternately in one run.

python bench/generate.py [--quick] [--models abc] [--repeats 5] [--against hf vllm] [--json FILE]
python bench/generate.py --models d --batches 8 64 --kernels auto triton --static        (on a GPU)

Same weights, prompts of 32 tokens, 64 new tokens each (model d: 256), nothing ends early, sampled at temperature 1
without filters. All run with their best of float32 and bfloat16, model a in float32 alone; on a GPU models c and d in
bfloat16 alone. transformers (sdpa, dynamic cache; with --static also its static cache, whose steps it compiles on a
GPU) in bfloat16 only where the device has products for it; vLLM (model c) in both. The floor is what must be computed,
at the matmul peak, or read, at the memory's speed in the same run. With several sets of kernels each has a row.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import sides
import torch

from whet import processes
from whet.generate.engine import Request
from whet.generate.sampling import SamplingParams, sequence_seed

BATCHES = (1, 8, 64, 128)
PROMPT, NEW, NEW_LARGE = 32, 64, 256
TARGET = {"hf": 3.0, "vllm": 1.1}
VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")
"""Python of an environment with vLLM's CPU build, which needs another PyTorch."""


def new_tokens(model: str) -> int:
    """Return the tokens of a completion."""
    return NEW_LARGE if model == "d" else NEW


def precisions(model: str) -> list[str]:
    """Return the dtypes that are tried."""
    if model == "a":
        return ["float32"]
    return ["bfloat16"] if sides.on_gpu() and model in "cd" else ["float32", "bfloat16"]


def whet_side(home: Path, dtype: torch.dtype, prompts: list[tuple[int, ...]], kernels: str) -> Any:
    """Return a function that generates with whet."""
    engine = sides.load_whet(home, dtype=dtype, max_rows=len(prompts)).engine()
    seeds = [sequence_seed("bench", place) for place in range(len(prompts))]
    requests = [Request(prompt_ids=ids, seeds=(seed,)) for ids, seed in zip(prompts, seeds, strict=True)]
    params = SamplingParams(max_new_tokens=new_tokens(home.name))

    def run() -> int:
        with sides.kernels(kernels):
            return sum(len(row[0].ids) for row in engine.generate(requests, params))

    return run


def hf_side(home: Path, dtype: torch.dtype, prompts: list[tuple[int, ...]], *, is_static: bool) -> Any:
    """Return a function that generates with transformers."""
    model, _ = sides.load_peer(home, dtype=dtype)
    model.eval()
    ids = torch.tensor(prompts, device=sides.device())
    options = {"max_new_tokens": new_tokens(home.name), "do_sample": True, "top_k": 0, "top_p": 1.0}
    options |= {"temperature": 1.0} | ({"cache_implementation": "static"} if is_static else {})

    def run() -> int:
        # The graphs of compiled steps write into tensors that inference mode would lock.
        with torch.no_grad() if is_static else torch.inference_mode():
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
        self.process = processes.start(
            [VLLM_PYTHON, "-c", self.CODE, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            tree=True,
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


def floor_seconds(model: str, batch: int, dtype: torch.dtype, peak: float, speed: float) -> float:
    """Return the larger of arithmetic and reading, summed over prefill and steps."""
    shape, new = sides.SHAPES[model], new_tokens(model)
    weights = sides.linear_weights(shape) + shape.vocab_size * shape.hidden_size
    width = torch.empty(0, dtype=dtype).element_size()
    cached = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * width * (PROMPT + new / 2) * batch
    step = max(2 * weights * batch / peak, (weights * width + cached) / speed)
    return new * step + 2 * sides.linear_weights(shape) * batch * PROMPT / peak


def run_point(
    model: str,
    batch: int,
    folder: Path,
    repeats: int,
    against: list[str],
    kernels: list[str],
    is_static: bool,
) -> list[dict[str, Any]]:
    """Time all sides at one batch size; return a row for each set of kernels."""
    home = sides.save_shape(model, folder)
    names, new = precisions(model), new_tokens(model)
    prompts = sides.draw_prompts(batch, PROMPT, PROMPT, sides.SHAPES[model].vocab_size)
    runs = {f"whet-{k} {d}": whet_side(home, getattr(torch, d), prompts, k) for k in kernels for d in names}
    if "hf" in against:
        theirs = names if sides.has_bfloat16() else ["float32"]
        caches = {"": False} | ({" static": True} if is_static else {})
        runs |= {
            f"hf {d}{cache}": hf_side(home, getattr(torch, d), prompts, is_static=static)
            for d in theirs
            for cache, static in caches.items()
        }
    is_asked = "vllm" in against and model == "c" and VLLM_PYTHON
    vllm = {f"vllm {dtype}": VLLM(home, dtype, prompts) for dtype in names} if is_asked else {}
    runs |= vllm
    counts = {name: run() for name, run in runs.items()}
    assert set(counts.values()) == {batch * new}, counts
    times = sides.alternate(runs, repeats, warmup=0)
    for server in vllm.values():
        server.stop()

    def best(side: str) -> str:
        return min((n for n in times if n.startswith(f"{side} ")), key=lambda n: times[n].median)

    rows = []
    for name in kernels:
        mine = times[best(f"whet-{name}")]
        precision = best(f"whet-{name}").removeprefix(f"whet-{name} ")
        row: dict[str, Any] = {"model": model, "batch": batch, "new_tokens": new, "precision": precision}
        if len(kernels) > 1:
            row |= {"case": f"{model} {name}", "kernels": name}
        row["whet_tokens_per_second"] = batch * new / mine.median
        for peer in ("hf", "vllm"):
            if any(other.startswith(f"{peer} ") for other in times):
                pair = sides.paired(times[best(peer)].seconds, mine.seconds)
                row |= {f"{peer}_{key}": value for key, value in pair.items()}
                row[f"{peer}_best"] = best(peer).removeprefix(f"{peer} ")
        # Without bfloat16 products the kernels multiply at float32's speed.
        dtype = getattr(torch, precision)
        peak = sides.matmul_peak(dtype if sides.has_bfloat16() else torch.float32)
        speed = sides.read_speed()
        row |= {"peak_flops": peak, "read_bytes_per_second": speed}
        row["share_of_floor"] = floor_seconds(model, batch, dtype, peak, speed) / mine.median
        row["seconds"] = {side: timing.seconds for side, timing in times.items()}
        rows.append(row)
    return rows


def line(row: dict[str, Any], repeats: int) -> str:
    """Say a row in one line."""
    work = f"{row.get('case') or row['model']} batch {row['batch']:>3}, {row['precision']}"
    parts = [f"generate {work}: {row['whet_tokens_per_second']:,.0f} tokens/s,"]
    for name, title in (("hf", "HF"), ("vllm", "vLLM")):
        if f"{name}_ratio" in row:
            ratio = sides.times(row, f"{name}_ratio", f"{name}_range")
            parts.append(f"{title} ({row[f'{name}_best']}) {ratio} (target {TARGET[name]:g}x)")
    return " ".join(
        [*parts, f"{row['share_of_floor']:.0%} of the floor, medians of {repeats} alternating runs"]
    )


def main() -> None:
    """Print a line per model, batch size and set of kernels."""
    parser = sides.parser(__doc__, has_kernels=True)
    parser.add_argument("--against", nargs="*", default=["hf", "vllm"], choices=["hf", "vllm"])
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--static", action="store_true", help="transformers with its static cache, too")
    arguments = parser.parse_args()
    sides.start(arguments)
    if "vllm" in arguments.against and not VLLM_PYTHON:
        print(
            "vLLM left out: VLLM_PYTHON names no Python of an environment that has its CPU build",
            file=sys.stderr,
        )
    rows = []
    models = arguments.models or ("a" if arguments.quick else "abc")
    with sides.weights_folder(arguments) as folder:
        for model in models:
            for batch in (8,) if arguments.quick else arguments.batches:
                repeats = arguments.repeats or (3 if model in "cd" or arguments.quick else 5)
                options = arguments.against, arguments.kernels, arguments.static
                for row in run_point(model, batch, folder, repeats, *options):
                    rows.append(row)
                    print(line(row, repeats), flush=True)
                sides.forget()
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
