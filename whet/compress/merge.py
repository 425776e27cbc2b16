"""`whet merge ADAPTER ADAPTER ... --out DIR`: a weighted merge of several adapters of one base into one."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from whet.cli import Program
from whet.model.lora.files import read_adapter
from whet.model.lora.merge import METHODS, PRUNING, Method, merge_adapters, write_merged
from whet.types import UnreadError, UserError


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """A weighted merge of several LoRA adapters of one base into one."""

    adapters: tuple[str, ...] = ()
    """The adapters: runs that trained them, folders of the peft library, or hub names."""
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
        if len(self.adapters) < 2:
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
    adapters = [read_adapter(name) for name in config.adapters]
    weights = config.weights or (1.0,) * len(adapters)
    settings = {"density": config.density} if config.method in PRUNING else {}
    pairs = merge_adapters(adapters, weights, method=config.method, seed=config.seed, **settings)
    try:
        rank = write_merged(out, pairs, adapters)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
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
    return [*lines, f"next: whet eval TASK --policy.init {out} | whet export {out} --to merged --out FOLDER"]


def _protocol(folder: Path) -> bytes:
    path = folder / "protocol.json"
    return path.read_bytes() if path.is_file() else b""


PROGRAM = Program(config_class=MergeConfig, main=main, positional="adapters")
