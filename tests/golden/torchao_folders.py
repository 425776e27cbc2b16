"""Writes torchao/: tiny Llama folders whose matrices torchao 0.18.0 quantised, saved by transformers 5.23, and logits.

Run it with the wheel in reach; the suite does not need it:

    pip install --target /tmp/torchao --no-deps torchao==0.18.0
    PYTHONPATH=/tmp/torchao python tests/golden/torchao_folders.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.quantization import (  # pyright: ignore[reportMissingImports]
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
)
from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig

KINDS = {
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=PerGroup(16), mapping_type=MappingType.ASYMMETRIC
    ),
    "float8": Float8WeightOnlyConfig(),
    "dynamic": Int8DynamicActivationInt8WeightConfig(),
}


def main() -> None:
    """Write the folders; `dynamic` rounds its inputs, too, and is for what is refused."""
    home = Path(__file__).with_name("torchao")
    shape = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.2))
    model.save_pretrained(home / "base")
    logits: dict[str, torch.Tensor] = {}
    for name, kind in KINDS.items():
        found = LlamaForCausalLM.from_pretrained(
            home / "base", quantization_config=TorchAoConfig(kind), dtype=torch.float32
        )
        with torch.no_grad():
            logits[name] = found(torch.arange(24)[None]).logits
        found.save_pretrained(home / name)
        (home / name / "generation_config.json").unlink()
        weight = found.model.layers[0].mlp.down_proj.weight
        logits[f"{name}.down_proj"] = weight.dequantize() if name != "dynamic" else torch.zeros(1)
    for file in (home / "base").iterdir():
        file.unlink()
    (home / "base").rmdir()
    save_file(logits, home / "logits.safetensors")
    for config in home.glob("*/config.json"):
        config.write_text(json.dumps(json.loads(config.read_text()), indent=1) + "\n")


if __name__ == "__main__":
    main()
