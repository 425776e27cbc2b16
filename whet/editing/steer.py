"""`whet steer MODEL --pairs FILE --out DIR`: a direction of what a model says, from pairs of contrasting texts."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from whet.cli import Program
from whet.config import align, dump_yaml, user_path
from whet.editing.edit import NO_MODEL
from whet.editing.sites import Hook, Read, Reader, hooked, start_ids
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.model.lora.files import find_model
from whet.model.steering import Steering
from whet.storage.folder import check_folder, next_line, open_run
from whet.tasks.read import read_file
from whet.telemetry.provenance import write_environment
from whet.types import UserError

RECORD = "steering.json"
Reading = Literal["last", "mean"]
CHANCE = 0.5
"""Share of pairs that any direction parts."""
FEWEST = 2
"""Pairs: of one alone nobody can say whether the direction holds for others."""


@dataclass(frozen=True, kw_only=True)
class SteerConfig:
    """A steering vector by contrast pairs."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(init=NO_MODEL))
    """The model."""
    pairs: str = ""
    """File of pairs (.jsonl, .json, .csv, .parquet) with `positive` and `negative`, what is wanted and its contrast;
    with `prompt` they are answers to it, asked as the model is asked."""
    out: str = ""
    """New folder: steering.safetensors and steering.json."""
    layers: tuple[int, ...] = ()
    """Layers behind whose output a vector is added, from 0; empty for the one that parts held-out pairs best."""
    reading: Reading = "last"
    """Where a text is read: at its last token, or the mean over its tokens."""

    def __post_init__(self) -> None:
        if self.policy.init == NO_MODEL and not Path(NO_MODEL).exists():
            raise ValueError(
                "no model: name a run folder, a Hugging Face folder or a hub name after the command"
            )
        if not self.pairs:
            raise ValueError("no pairs: give a file with positive and negative, as in --pairs pairs.jsonl")
        if not self.out:
            raise ValueError("out is empty: name a new folder, as in --out calm")
        if any(layer < 0 for layer in self.layers) or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers = {self.layers}: expected different numbers from 0")
        if self.reading not in ("last", "mean"):
            raise ValueError(f"reading = {self.reading!r}: expected last or mean")


class Pair(NamedTuple):
    """What is wanted, and its contrast.

    Attributes:
        positive: What is wanted.
        negative: The contrast.
        prompt: What both answer; '' for texts by themselves.
    """

    positive: str
    negative: str
    prompt: str = ""


class Direction(NamedTuple):
    """What was found behind one layer.

    Attributes:
        vector_D: Mean of the positive texts minus that of the negative ones.
        share: Its length over the mean length of the residual stream there.
        parted: Share of pairs whose positive text lies further along the direction of the other pairs.
        margin: Mean over standard deviation of how much further: which layer is clearest, where all part all pairs.
    """

    vector_D: torch.Tensor
    share: float
    parted: float
    margin: float


def read_pairs(source: str | Path | Sequence[Mapping[str, Any]]) -> list[Pair]:
    """Read pairs from a file or from dicts.

    Raises:
        UserError: If a row has no two different texts, or there are too few.
    """
    if isinstance(source, (str, Path)):
        path = user_path(source)
        if not path.is_file():
            raise UserError(f"{path}: no such file; give one with positive and negative in each row")
        rows, _ = read_file(path, required=[], max_bad_rows=None)
        numbered = [(f"{path.name} row {number}", row) for number, row in rows]
    else:
        numbered = [(f"pair {number}", row) for number, row in enumerate(source, 1)]
    found = []
    for where, row in numbered:
        texts = [row.get(name) if isinstance(row, Mapping) else None for name in ("positive", "negative")]
        prompt = (row.get("prompt") or "") if isinstance(row, Mapping) else ""
        if not all(isinstance(text, str) and text.strip() for text in texts) or not isinstance(prompt, str):
            raise UserError(f"{where}: expected positive and negative, two texts (and prompt, a text)")
        if texts[0] == texts[1]:
            raise UserError(f"{where}: positive and negative are the same, {str(texts[0])[:60]!r}")
        found.append(Pair(str(texts[0]), str(texts[1]), prompt))
    if len(found) < FEWEST:
        raise UserError(f"got {len(found)} pairs, expected {FEWEST} or more")
    return found


def find_directions(policy: Policy, pairs: Sequence[Pair], reading: Reading = "last") -> list[Direction]:
    """Return the direction behind each layer.

    Source:
        arXiv 2308.10248 (activation addition), with the mean over pairs as in arXiv 2312.06681.
    """
    positive_LPD, lengths = _states(policy, [(pair.prompt, pair.positive) for pair in pairs], reading)
    negative_LPD, others = _states(policy, [(pair.prompt, pair.negative) for pair in pairs], reading)
    found = []
    for layer in range(len(positive_LPD)):
        apart_PD = (positive_LPD[layer] - negative_LPD[layer]).double()
        vector_D, count = apart_PD.mean(0), len(pairs)
        # Each pair is judged by the direction that all others have: its own would always part it.
        held_PD = (count * vector_D - apart_PD) / (count - 1)
        held_PD = held_PD / held_PD.norm(dim=1, keepdim=True).clamp(min=1e-30)
        along_P = (apart_PD * held_PD).sum(1)
        spread = float(along_P.std()) + 1e-12
        length = (lengths[layer] + others[layer]) / 2
        found.append(
            Direction(
                vector_D.float(),
                float(vector_D.norm()) / length,
                float((along_P > 0).double().mean()),
                float(along_P.mean()) / spread,
            )
        )
    return found


def _states(
    policy: Policy, texts: Sequence[tuple[str, str]], reading: Reading
) -> tuple[list[torch.Tensor], list[float]]:
    """Return the residual stream [P, D] behind each layer, and its mean length there."""
    reader = Reader(policy)
    rows, starts = [], []
    for prompt, text in texts:
        if prompt:
            head = policy.chat_ids([{"role": "user", "content": prompt}])
            own = policy.tokenizer.encode(text)
        else:
            head, own = tuple(start_ids(policy.tokenizer)), policy.tokenizer.encode(text)
        rows.append((*head, *own))
        starts.append(len(head))
    if reading == "last":
        reads = {str(n): Read(layer) for n, layer in enumerate(policy.model.layers)}
        found = reader.read(rows, [len(row) - 1 for row in rows], reads)
        states = [found[str(n)] for n in range(len(policy.model.layers))]
        return states, [float(state.norm(dim=1).mean()) for state in states]
    means: list[list[torch.Tensor]] = [[] for _ in policy.model.layers]
    lengths = [0.0] * len(means)
    for row, start in zip(rows, starts, strict=True):

        def see(x_ND: torch.Tensor, n: int, end: int = len(row), start: int = start) -> None:
            own_ND = x_ND[start:end].detach()
            means[n].append(own_ND.mean(0))
            lengths[n] += float(own_ND.norm(dim=1).mean()) / len(rows)

        hooks: list[Hook] = [
            (layer, "out", lambda x_ND, n=n, see=see: see(x_ND, n))
            for n, layer in enumerate(policy.model.layers)
        ]
        with torch.no_grad(), hooked(hooks):
            reader.hidden([row])
    return [torch.stack(each) for each in means], lengths


def choose_layers(directions: Sequence[Direction], given: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that were given, or the one that parts held-out pairs best.

    The last layer is not chosen: what is added behind it changes the next word by its own embedding alone.

    Raises:
        UserError: If the model has no such layer.
    """
    if given:
        if max(given) >= len(directions):
            raise UserError(
                f"layers: the model has layers 0 to {len(directions) - 1}, got {max(given)}; name one of those"
            )
        return tuple(sorted(given))
    inner = range(max(1, len(directions) - 1))
    return (max(inner, key=lambda n: (directions[n].parted, directions[n].margin)),)


def steer(
    policy: Policy, pairs: Sequence[Pair], layers: Sequence[int] = (), reading: Reading = "last"
) -> tuple[Steering, dict[str, Any]]:
    """Return steering vectors and what steering.json holds of them."""
    directions = find_directions(policy, pairs, reading)
    chosen = choose_layers(directions, layers)
    if not all(math.isfinite(d.share) and d.share > 0 for d in (directions[n] for n in chosen)):
        raise UserError("the pairs do not differ where they are read: give texts that end differently")
    content = {
        "pairs": len(pairs),
        "reading": reading,
        "layers": list(chosen),
        "directions": [
            {"layer": n, "share_of_stream": d.share, "parted_held_out": d.parted, "margin": d.margin}
            for n, d in enumerate(directions)
        ],
    }
    return Steering({n: directions[n].vector_D.cpu() for n in chosen}), content


def plan(config: SteerConfig) -> str:
    """Describe the work without doing it."""
    layers = ", ".join(map(str, config.layers)) or "the one that parts held-out pairs best"
    return align(
        "work",
        {
            "model": config.policy.init,
            "pairs": len(read_pairs(config.pairs)),
            "layers": layers,
        },
    )


def check(config: SteerConfig, resume: bool) -> None:
    """Find what would stop the work before it begins; loads no weights and creates nothing."""
    find_model(config.policy.init)
    read_pairs(config.pairs)
    check_folder(Path(config.out), resumable=False)
    print("checked: model, pairs and folder; the directions would be found")


def main(config: SteerConfig) -> None:
    """Find the directions, write them, and say how well they part held-out pairs."""
    pairs, folder = read_pairs(config.pairs), Path(config.out)
    check_folder(folder, resumable=False)
    policy = load_policy(config.policy, seed=0, plain=True)
    policy.model.eval()
    found, content = steer(policy, pairs, config.layers, config.reading)
    open_run(folder, dump_yaml(config), resumable=False)
    write_environment(folder)
    found.save(folder)
    content = {"model": config.policy.init, **content}
    (folder / RECORD).write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    print("layer  of the stream's length  held-out pairs parted")
    for row in content["directions"]:
        mark = "  <- added behind it" if row["layer"] in content["layers"] else ""
        print(f"{row['layer']:>5}{row['share_of_stream']:>24.1%}{row['parted_held_out']:>23.1%}{mark}")
    chosen = (row for row in content["directions"] if row["layer"] in content["layers"])
    if weak := [str(row["layer"]) for row in chosen if row["parted_held_out"] <= CHANCE]:
        print(
            f"whet: warning: behind layer {', '.join(weak)} held-out pairs are parted no better than by chance: give "
            "more pairs, or another layer (--layers)"
        )
    option = f"--policy.steering {shlex.quote(config.out)}=1"
    model = shlex.quote(config.policy.init)
    print(f"\ndone: {config.out}")
    print(next_line(f"whet chat {model} {option}", f"whet serve {model} {option}"))


PROGRAM = Program(config_class=SteerConfig, main=main, plan=plan, check=check, positional="policy.init")
