"""Writes bitsandbytes.safetensors: matrices, and what bitsandbytes 0.50.2 (its CPU wheel) makes of them.

Run it with the wheel in reach; the suite does not need it:

    pip install --target /tmp/bnb --no-deps bitsandbytes==0.50.2
    PYTHONPATH=/tmp/bnb python tests/golden/bitsandbytes_vectors.py
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb  # pyright: ignore[reportMissingImports]
import torch
from safetensors.torch import save_file

SHAPES = ((64, 64), (20, 172), (96, 176))
"""A whole number of blocks; rows that end within one; more than 256 blocks, so that absmax has two scales."""


def main() -> None:
    """Write the vectors."""
    found: dict[str, torch.Tensor] = {}
    for number, shape in enumerate(SHAPES):
        weight = (torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.02).bfloat16()
        weight[0, 1] = 0.5  # an outlier
        codes, state = bnb.quantize_4bit(
            weight.float(), quant_type="nf4", compress_statistics=True, blocksize=64
        )
        for name, value in state.as_dict(packed=True).items():
            found[f"{number}.nf4.{name}"] = value
        found[f"{number}.weight"], found[f"{number}.nf4"] = weight, codes
        for dtype in (torch.float32, torch.bfloat16)[number // 2 :]:  # a small file
            state.dtype = dtype
            found[f"{number}.nf4.as_{str(dtype)[6:]}"] = bnb.dequantize_4bit(codes, state)
        if number == 2:
            continue
        rows, absmax, _ = bnb.int8_vectorwise_quant(weight.to(torch.float16))
        found[f"{number}.int8"], found[f"{number}.SCB"] = rows, absmax
        found[f"{number}.int8.as_float32"] = bnb.int8_vectorwise_dequant(rows, absmax)
    save_file(found, Path(__file__).with_suffix("").with_name("bitsandbytes.safetensors"))


if __name__ == "__main__":
    main()
