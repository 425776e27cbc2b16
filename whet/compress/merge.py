"""`whet merge ADAPTER ADAPTER ... --out DIR`: a weighted merge of several adapters of one base into one.

With `--base MODEL` whole models are merged, by what training added to the base's weights: task vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from whet.cli import Program
from whet.generate.policy import PolicyConfig, load_policy
from whet.model.lora.files import read_adapter
from whet.model.lora.merge import METHODS, PRUNING, Method, merge_adapters, write_merged
from whet.model.quant import packed_parts
from whet.model.vectors import combine, parse_scales
from whet.storage.commit import new_folder
from whet.storage.folder import beside, next_line
from whet.types import UnreadError, UserError


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """A weighted merge of several LoRA adapters of one base into one, or of whole models."""

    adapters: tuple[str, ...] = ()
    """The adapters: runs that trained them, folders of the peft library, or hub names. With --base models, of which one
    is enough."""
    base: str = ""
    """Model that the others were trained from: their differences from it are merged and added to it (task vectors).
    Empty for adapters."""
    layer_scales: tuple[str, ...] = ()
    """With --base: factors of what is added, by layer, such as 0-5=1 6-11=0.5 outside=0; 1 where none is named."""
    out: str = ""
    """New folder."""
    weights: tuple[float, ...] = ()
    """Weight of each adapter, such as 0.7 0.3; empty for 1 each; a negative one takes an adapter away."""
    method: Method = "cat"
    """cat: the weighted sum of the changes, exactly, its rank the sum of the ranks. linear: As and Bs are added, a
    rough approximation of the same rank. ties: of the largest numbers those with the prevailing sign. dare_linear,
    dare_ties: random numbers, scaled up."""
    density: float = 0.5
    """Share of the numbers that ties and dare keep."""
    seed: int = 0
    """Seed of what dare keeps."""

    def __post_init__(self) -> None:
        if len(self.adapters) < (1 if self.base else 2):
            raise ValueError(f"adapters: got {len(self.adapters)}, expected two or more to merge")
        if not self.out:
            raise ValueError("out is empty: name a new folder, as in --out merged")
        if self.weights and len(self.weights) != len(self.adapters):
            raise ValueError(
                f"weights: got {len(self.weights)} for {len(self.adapters)} adapters; expected one for each"
            )
        if any(not math.isfinite(weight) or not weight for weight in self.weights):
            raise ValueError(f"weights = {self.weights}: expected finite numbers other than 0")
        if self.method not in METHODS:
            raise ValueError(f"method = {self.method!r}: expected {', '.join(METHODS)}")
        parse_scales(self.layer_scales)
        if self.layer_scales and not self.base:
            raise UnreadError("layer_scales is read with --base only; leave it out", "layer_scales")
        if not 0 < self.density <= 1:
            raise ValueError(f"density = {self.density}: expected a share above 0, up to 1")
        default = type(self).__dataclass_fields__["density"].default
        if self.density != default and self.method not in PRUNING:
            raise UnreadError(
                f"density is read with --method {', '.join(PRUNING)} only; leave it out", "density"
            )
        if self.seed and not self.method.startswith("dare"):
            raise UnreadError("seed is read with --method dare_linear, dare_ties only; leave it out", "seed")


def main(config: MergeConfig) -> None:
    """Write the merged adapter and say what it is."""
    print("\n".join(merge(config)))


def merge(config: MergeConfig) -> list[str]:
    """Write the merged adapter; return what to say of it.

    Raises:
        UserError: If the adapters cannot be merged, or the folder exists.
    """
    out = Path(config.out)
    if out.exists():
        raise UserError(f"{out}: exists already; name another folder with --out")
    if config.base:
        return _merge_models(config, out)
    adapters = [read_adapter(name) for name in config.adapters]
    weights = config.weights or (1.0,) * len(adapters)
    settings = {"density": config.density} if config.method in PRUNING else {}
    pairs = merge_adapters(adapters, weights, method=config.method, seed=config.seed, **settings)
    with new_folder(out) as folder:
        rank = write_merged(folder, pairs, adapters)
    parts = " + ".join(
        f"{weight:g} x {adapter.folder}" for weight, adapter in zip(weights, adapters, strict=True)
    )
    lines = [
        f"{config.method}: {parts}",
        f"{out}: rank {rank} beside {len(pairs)} matrices of {adapters[0].base}",
    ]
    protocols = {_protocol(adapter.folder) for adapter in adapters}
    if len(protocols) > 1:
        lines.append(f"note: their prompts differ; {out} asks as {adapters[0].folder} does")
    whole = ["whet", "export", config.out, "--to", "merged", "--out", beside(config.out, "merged")]
    return [*lines, next_line(["whet", "chat", config.out], whole)]


def _merge_models(config: MergeConfig, out: Path) -> list[str]:
    """Add the merged task vectors of whole models to their base."""
    # Plain: a model without a protocol stays one.
    base = load_policy(PolicyConfig(init=config.base, device="cpu"), seed=0, merge=True, plain=True)
    tuned = []
    for name in config.adapters:
        loaded = load_policy(PolicyConfig(init=name, device="cpu"), seed=0, merge=True, plain=True)
        if packed_parts(loaded.model) or packed_parts(base.model):
            raise UserError(
                f"{name}: weights in few bits cannot be merged; give the models that they were made of"
            )
        if loaded.tokenizer.fingerprint != base.tokenizer.fingerprint:
            raise UserError(
                f"{name}: its tokenizer is not that of {config.base}; expected models trained from it"
            )
        tuned.append(dict(loaded.model.named_parameters()))
    weights = config.weights or (1.0,) * len(tuned)
    with torch.no_grad():
        merged = combine(
            dict(base.model.named_parameters()),
            tuned,
            weights,
            method=config.method,
            density=config.density if config.method in PRUNING else 1.0,
            seed=config.seed,
            scales=parse_scales(config.layer_scales),
        )
    with new_folder(out) as folder:
        base.save(folder, weights=merged)
    parts = " + ".join(
        f"{weight:g} x ({name} - {config.base})"
        for weight, name in zip(weights, config.adapters, strict=True)
    )
    return [f"{config.method}: {config.base} + {parts}", next_line(["whet", "chat", config.out])]


def _protocol(folder: Path) -> bytes:
    path = folder / "protocol.json"
    return path.read_bytes() if path.is_file() else b""


PROGRAM = Program(config_class=MergeConfig, main=main, positional="adapters")
