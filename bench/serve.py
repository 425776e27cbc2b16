"""Print the throughput of 64 concurrent streams against one stream at a time, on the same server in one run.

python bench/serve.py [--streams N] [--tokens N] [--rounds N] [--slowdown X] [--json FILE]

Each round times both on one `whet serve` in a process of its own, with one thread for the model: every stream draws the
same number of tokens from random weights. What is claimed is the ratio of the medians (docs/serve.md); exit status 1
when it is below 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch

from whet import processes
from whet.generate.policy import Policy
from whet.model.config import ModelConfig
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.schema import SCHEMAS

SERVE = (
    "import sys; from whet.serve.serve import *; "
    "main(ServeConfig(policy=PolicyConfig(init=sys.argv[1], max_rows=int(sys.argv[2]), num_threads=1), port=0, "
    "slowdown=float(sys.argv[3])))"
)


def save_model(folder: Path) -> int:
    """Save a model of a few million weights that never ends early; return its number of weights."""
    tokenizer = Tokenizer.bytes()
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        max_positions=512,
        tie_embeddings=False,
    )
    model = build_model(shape)
    init_weights(model, 0)
    with torch.no_grad():
        model.head_weight[tokenizer.eos_id] = 0.0  # greedy decoding does not draw it
    Policy(model, tokenizer, SCHEMAS["think_answer"], system_prompt=False).save(folder)
    return sum(parameter.numel() for parameter in model.parameters())


async def stream(client: httpx.AsyncClient, index: int, num_tokens: int) -> int:
    """Take one stream to its end and return its number of tokens."""
    body = {
        "model": "bench",
        "prompt": f"Question {index}: what is {index} + {index}?",
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    drawn = 0
    async with client.stream("POST", "/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage")
                drawn = usage["completion_tokens"] if usage else drawn
    return drawn


async def measure(url: str, num_streams: int, num_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return tokens per second of each round, together and one at a time."""
    rates: dict[str, list[float]] = {"together": [], "alone": []}
    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await stream(client, 0, num_tokens)
        for _ in range(rounds):
            began = time.perf_counter()
            drawn = sum(await asyncio.gather(*(stream(client, n, num_tokens) for n in range(num_streams))))
            rates["together"].append(drawn / (time.perf_counter() - began))
            began = time.perf_counter()
            drawn = 0
            for index in range(max(2, num_streams // 16)):  # a rate: a few streams tell it
                drawn += await stream(client, index, num_tokens)
            rates["alone"].append(drawn / (time.perf_counter() - began))
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="times that both are measured")
    parser.add_argument(
        "--slowdown", type=float, default=0, help="the server's: 0 lets all streams run together"
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        num_weights = save_model(Path(folder) / "bench")
        command = [sys.executable, "-c", SERVE, str(Path(folder) / "bench"), str(options.streams)]
        command.append(str(options.slowdown))
        with processes.start(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split(" at ")[1].split(" ")[0]
            try:
                rates = asyncio.run(measure(url, options.streams, options.tokens, options.rounds))
            finally:
                process.terminate()
    together, alone = (statistics.median(rates[name]) for name in ("together", "alone"))
    print(f"{num_weights / 1e6:.1f} M weights, float32, {os.cpu_count()} cores, {options.rounds} rounds")
    print(f"\n| {options.tokens} tokens a stream | tokens/s, median | lowest | highest |\n|---|--:|--:|--:|")
    for name, row in (
        (f"{options.streams} streams together", rates["together"]),
        ("one at a time", rates["alone"]),
    ):
        print(f"| {name} | {statistics.median(row):.0f} | {min(row):.0f} | {max(row):.0f} |")
    print(f"\nratio of medians: {together / alone:.1f}")
    if options.json:
        options.json.write_text(json.dumps({"rates": rates, "ratio": together / alone}, indent=1))
    return 0 if together > alone else 1


if __name__ == "__main__":
    sys.exit(main())
