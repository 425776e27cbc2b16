"""An edit as a record of its own: low-rank changes, keys and facts by batch, and what takes them back bit by bit.

A folder of `whet edit` is a model folder with edits.json (what was done), edits/batch_N.safetensors (its changes and
keys) and edits/originals.safetensors (the changed matrices as they were before the first batch).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from whet.editing.facts import Fact, comparable, read_fact
from whet.editing.memory import Delta
from whet.editing.sites import memory_of
from whet.editing.statistics import digests_of
from whet.model.transformer import LanguageModel
from whet.storage.commit import save_tensors
from whet.types import UserError

RECORD = "edits.json"
PARTS = "edits"
FORMAT = 1


@dataclass(kw_only=True)
class Batch:
    """Facts that were written together.

    Attributes:
        method: How.
        layers: The layers that were written into; empty where all matrices were trained.
        facts: What was written.
        deltas: Changes by the name of the parameter.
        keys: The facts' keys by layer; empty for methods that have none.
        settings: What decided the result, for the record.
        digest: SHA-256 of the model's weights behind this batch.
        norms: |change| / |weight| by the name of the parameter.
        seconds: How long it took.
        warnings: What was said before it.
        targets: For each fact loss, divergence and steps of its search; empty where nothing was searched.
    """

    method: str
    layers: tuple[int, ...]
    facts: tuple[Fact, ...]
    deltas: dict[str, Delta]
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    norms: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    targets: tuple[dict[str, float], ...] = ()

    def apply(self, model: LanguageModel) -> None:
        """Add the changes to a model's weights, each rounded once."""
        for name, delta in self.deltas.items():
            memory_of(model, name).add(delta.dense())

    def content(self) -> str:
        """Return SHA-256 of the changes alone, which is the same whatever they are added to."""
        found = hashlib.sha256()
        for name, delta in sorted(self.deltas.items()):
            found.update(name.encode())
            for part in (delta.left_DR, delta.right_RF):
                found.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return what edits.json has of it."""
        return {
            "method": self.method,
            "layers": list(self.layers),
            "facts": [fact.as_dict() for fact in self.facts],
            "settings": self.settings,
            "digest": self.digest,
            "norms": self.norms,
            "ranks": {name: delta.left_DR.shape[1] for name, delta in self.deltas.items()},
            "seconds": self.seconds,
            "warnings": list(self.warnings),
            "targets": list(self.targets),
        }


@dataclass(kw_only=True)
class Record:
    """All batches of a model, in the order in which they were written.

    Attributes:
        model: The model before the first, as it was named.
        digest: SHA-256 of its weights and settings (`digest_of`); of its weights alone where an earlier version wrote
            it.
        batches: The batches.
        originals: The changed matrices before the first batch, by name.
    """

    model: str
    digest: str
    batches: list[Batch] = field(default_factory=list)
    originals: dict[str, torch.Tensor] = field(default_factory=dict)

    def copy(self) -> Record:
        """Return a record that may be continued apart from this one."""
        return Record(
            model=self.model,
            digest=self.digest,
            batches=[replace(batch) for batch in self.batches],
            originals=dict(self.originals),
        )

    def keep(self, model: LanguageModel, names: Sequence[str]) -> None:
        """Remember matrices that are about to be changed for the first time."""
        for name in names:
            if name not in self.originals:
                self.originals[name] = model.get_parameter(name).detach().clone()

    def restore(self, model: LanguageModel) -> None:
        """Put all changed matrices back as they were, bit by bit."""
        with torch.no_grad():
            for name, tensor in self.originals.items():
                model.get_parameter(name).copy_(tensor)

    def remove(self, model: LanguageModel, numbers: Sequence[int]) -> None:
        """Take batches out of a model: what is left is applied again to the originals.

        Args:
            model: The edited model, changed in place.
            numbers: Batches from 1; empty for all.

        Raises:
            UserError: If there is no such batch.
        """
        self.check_numbers(numbers)
        gone = set(numbers) or set(range(1, len(self.batches) + 1))
        kept = [batch for n, batch in enumerate(self.batches, 1) if n not in gone]
        self.restore(model)
        is_prefix = kept == self.batches[: len(kept)]
        for batch in kept:
            batch.apply(model)
        found = digests_of(model)
        expected = (kept[-1].digest if kept else self.digest) if is_prefix else found[0]
        if expected not in found:
            raise UserError(
                f"the model without those batches has SHA-256 {found[0][:16]}, expected {expected[:16]}: the folder "
                "was changed, or this machine rounds otherwise; edit the original model again"
            )
        if not is_prefix:
            kept[-1].digest = found[0]
        self.batches = kept
        names = {name for batch in kept for name in batch.deltas}
        self.originals = {name: tensor for name, tensor in self.originals.items() if name in names}

    def check_numbers(self, numbers: Sequence[int]) -> None:
        """Refuse numbers of batches that are not there.

        Raises:
            UserError: At the first.
        """
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int):
                raise UserError(f"batch {number!r}: expected a number from 1 to {len(self.batches)}")
            if not 1 <= number <= len(self.batches):
                raise UserError(f"batch {number}: there are batches 1 to {len(self.batches)}")

    def facts_of_batches(self) -> list[tuple[int, Fact]]:
        """Return all facts, each with the number of its batch."""
        return [(n, fact) for n, batch in enumerate(self.batches, 1) for fact in batch.facts]

    def current_facts(self) -> list[tuple[int, Fact]]:
        """Return what each prompt is to be completed with now, with the number of the batch that wrote it last."""
        found: dict[str, tuple[int, Fact]] = {}
        for n, fact in self.facts_of_batches():
            found[comparable(fact.text)] = n, fact
        return list(found.values())

    def earlier_keys(self, facts: Sequence[Fact] = ()) -> dict[int, torch.Tensor]:
        """Return the keys of all batches by layer, of each fact those of the last one.

        Args:
            facts: Facts that are written now: those written before are left out, for what they had is to go.
        """
        seen = {comparable(fact.text) for fact in facts}
        found: dict[int, list[torch.Tensor]] = {}
        for batch in reversed(self.batches):
            kept = [n for n, fact in enumerate(batch.facts) if comparable(fact.text) not in seen]
            seen |= {comparable(fact.text) for fact in batch.facts}
            for layer, keys in batch.keys.items():
                found.setdefault(layer, []).append(keys[kept])
        return {layer: torch.cat(parts[::-1]) for layer, parts in sorted(found.items())}

    def write(self, folder: Path, more: Mapping[str, Any] | None = None) -> None:
        """Write the record into a model's folder.

        Args:
            folder: The folder.
            more: What edits.json has besides: metrics and the table.
        """
        parts = folder / PARTS
        parts.mkdir(exist_ok=True)
        for n, batch in enumerate(self.batches, 1):
            tensors = {f"keys.{layer}": keys.contiguous() for layer, keys in batch.keys.items()}
            for name, delta in batch.deltas.items():
                tensors[f"left.{name}"] = delta.left_DR.contiguous()
                tensors[f"right.{name}"] = delta.right_RF.contiguous()
            save_tensors(
                {name: tensor.cpu() for name, tensor in tensors.items()}, parts / f"batch_{n}.safetensors"
            )
        originals = {name: tensor.cpu().contiguous() for name, tensor in self.originals.items()}
        save_tensors(originals, parts / "originals.safetensors")
        content = {
            "format": FORMAT,
            "model": self.model,
            "digest": self.digest,
            "batches": [batch.as_dict() for batch in self.batches],
            **(more or {}),
        }
        text = json.dumps(content, indent=1, ensure_ascii=True, default=float)
        (folder / RECORD).write_text(text + "\n", encoding="ascii")

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Read a folder's record.

        Raises:
            UserError: If there is none, or it is malformed.
        """
        path = folder / RECORD
        if not path.is_file():
            raise UserError(f"{folder}: no {RECORD}, so no edits to read; give a folder that whet edit made")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}, expected {FORMAT}")
            record = cls(model=content["model"], digest=content["digest"])
            for n, row in enumerate(content["batches"], 1):
                tensors = load_file(folder / PARTS / f"batch_{n}.safetensors")
                names = [name.removeprefix("left.") for name in tensors if name.startswith("left.")]
                keys = [name for name in tensors if name.startswith("keys.")]
                record.batches.append(
                    Batch(
                        method=row["method"],
                        layers=tuple(row["layers"]),
                        facts=tuple(
                            read_fact(fact, fact.get("where", f"batch {n}")) for fact in row["facts"]
                        ),
                        deltas={
                            name: Delta(tensors[f"left.{name}"], tensors[f"right.{name}"]) for name in names
                        },
                        keys={int(name.partition(".")[2]): tensors[name] for name in keys},
                        settings=row["settings"],
                        digest=row["digest"],
                        norms=row["norms"],
                        seconds=row["seconds"],
                        warnings=tuple(row["warnings"]),
                        targets=tuple(row["targets"]),
                    )
                )
            record.originals = load_file(folder / PARTS / "originals.safetensors")
        except (KeyError, TypeError, ValueError, OSError, SafetensorError, AttributeError) as error:
            raise UserError(
                f"{path}: malformed record of edits ({error}); edit the original model again"
            ) from None
        return record

    def check(self, model: LanguageModel, where: str) -> None:
        """Refuse a model that is not the one that the record ends with, by its weights and settings.

        Raises:
            UserError: If they are others: trained further, or another model.
        """
        expected = self.batches[-1].digest if self.batches else self.digest
        if expected not in digests_of(model):
            raise UserError(
                f"{where}: its weights or its config are not those of its {RECORD}: they were changed since; give the "
                "folder as whet edit wrote it"
            )


def check_together(records: Sequence[tuple[str, Record]]) -> list[str]:
    """Refuse records that cannot be applied to one model together; return what is worth a warning.

    Args:
        records: How each is named, and the record; in the order in which they are applied.

    Raises:
        UserError: If two have the same batch, or complete one prompt differently.
    """
    warnings: list[str] = []
    batches: dict[str, str] = {}
    made: dict[str, tuple[str, Fact]] = {}
    for where, record in records:
        own = {batch.content(): f"batch {n} of {where}" for n, batch in enumerate(record.batches, 1)}
        for content, name in own.items():
            if content in batches:
                raise UserError(
                    f"{name} is the same as {batches[content]}: it would be applied twice; leave one of them out"
                )
        for _, fact in record.current_facts():
            first = made.setdefault(comparable(fact.text), (where, fact))
            if first[1] is fact:
                continue
            if comparable(first[1].target) != comparable(fact.target):
                raise UserError(
                    f"{first[0]} and {where} contradict each other: {fact.text[:60]!r} is to be "
                    f"{first[1].target!r} and {fact.target!r}; leave one out, or take that batch out first (--undo "
                    "--batches)"
                )
            warnings.append(
                f"{where}: {fact.text[:60]!r} is made {fact.target!r} again, after {first[0]}: both changes count"
            )
        batches |= own
    return warnings
