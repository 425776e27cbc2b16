"""Make a model that knows facts, edit it by every method, and print the table: the proof of docs/editing.md.

python bench/patient.py RELATIONS OUT [--facts 2400] [--steps 1500] [--edits 50] [--methods memit,lora] [--only data]

RELATIONS is a folder of relation files: JSON with `name`, `prompt_templates`, `prompt_templates_zs` and `samples` of
subject and object. OUT gets

- texts.jsonl: what the model learns. Of each fact one template is held out: with this subject it is never shown, with
  others it is. Paragraphs join facts about several subjects; between them stands prose.
- tokenizer/: byte-level BPE, trained on these texts; recipe.yaml: what `whet sft OUT/recipe.yaml` trains.
- edits.jsonl: facts to write, drawn by a hash: another object of the same relation, the held-out template as
  paraphrase, prompts about subjects with the same true object as neighbours.
- prose.txt: held back from training, for the perplexity.

Then it trains (if OUT/model is not there), says how many facts the model knows at rank 1, in templates shown and held
out, and edits it by each method.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from whet.cli import dump_yaml
from whet.editing.editor import Editor, MethodConfig, report_of
from whet.editing.facts import Fact, read_facts
from whet.editing.methods import METHODS
from whet.editing.metrics import score_facts
from whet.editing.sites import Reader
from whet.eval.probe.off_domain import measure_perplexity
from whet.eval.probe.probe import GENERAL_TEXT
from whet.generate.policy import PolicyConfig, load_policy
from whet.model.config import ModelConfig
from whet.model.text.tokenizer import Tokenizer
from whet.tasks.base import TaskConfig
from whet.train import sft
from whet.train.optim.step import OptimConfig
from whet.train.sft import SFTConfig

VOCABULARY = 4096
PER_PARAGRAPH = 4
MAX_OBJECT = 24
"""Longest object in characters: what is longer is a sentence more than a name."""
MOST_PROSE = 2000
"""Paragraphs of prose that it learns, at most."""
HELD_BACK = 100
"""Paragraphs that it never sees."""
WORDINGS = {
    "person sport position": ("{} is known as a",),
    "landmark on continent": ("{} lies on the continent of", "The continent of {} is"),
    "person native language": ("The native language of {} is", "{} grew up with"),
    "person occupation": ("The profession of {} is",),
    "landmark in country": ("{} can be found in", "The country of {} is"),
    "company hq": ("{} has its head office in",),
    "person plays instrument": ("{} performs on the",),
    "product by company": ("The company behind {} is", "{} comes from"),
    "star constellation name": ("{} can be seen in", "The constellation of {} is"),
    "person plays pro sport": ("The sport of {} is", "{} is a professional of"),
}
"""More templates of the large relations: what is said in many ways is kept with the subject, not with a wording
(2309.14316)."""


class Known(NamedTuple):
    """One fact with the templates that say it; the last is held out."""

    relation: str
    subject: str
    object: str
    templates: tuple[str, ...]


def drawn(*words: object) -> int:
    """Return a number that depends on some words alone."""
    return int(hashlib.sha256("\x00".join(map(str, words)).encode()).hexdigest()[:12], 16)


def read_relations(folder: Path, count: int) -> list[Known]:
    """Return facts of the largest relations: one object for each subject, several subjects for each object."""
    found: list[Known] = []
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.json"))]
    for content in sorted(files, key=lambda content: (-len(content["samples"]), content["name"])):
        templates = list(
            dict.fromkeys(
                [
                    *content["prompt_templates"],
                    *content.get("prompt_templates_zs", []),
                    *WORDINGS.get(content["name"], ()),
                ]
            )
        )
        objects: dict[str, set[str]] = defaultdict(set)
        for row in content["samples"]:
            objects[row["subject"].strip()].add(row["object"].strip())
        single = {s: next(iter(o)) for s, o in objects.items() if len(o) == 1}
        shared = defaultdict(list)
        for subject, value in single.items():
            if len(value) <= MAX_OBJECT:
                shared[value].append(subject)
        subjects = {s: value for value, group in shared.items() if len(group) >= 3 for s in group}
        if len(templates) < 2 or len(set(subjects.values())) < 3:
            continue
        for subject, value in sorted(subjects.items(), key=lambda pair: drawn("order", *pair)):
            turn = drawn("template", content["name"], subject) % len(templates)
            own = (*templates[turn + 1 :], *templates[: turn + 1])  # the last one is held out
            found.append(Known(content["name"], subject, value, own))
    # A part of each relation, so that no relation is the whole world.
    found = sorted(found, key=lambda fact: drawn("fact", fact.relation, fact.subject))
    return found[:count]


def texts_of(facts: Sequence[Known], prose: Sequence[str], rounds: int) -> list[str]:
    """Return what is learnt: paragraphs of sentences about several subjects, and prose."""
    found = []
    for turn in range(rounds):
        mixed = sorted(facts, key=lambda fact: drawn("mix", turn, fact.relation, fact.subject))
        said = [
            f"{one.templates[turn % (len(one.templates) - 1)].replace('{}', one.subject)} {one.object}."
            for one in mixed
        ]
        found += [" ".join(said[n : n + PER_PARAGRAPH]) for n in range(0, len(said), PER_PARAGRAPH)]
    return [*found, *prose]


def edits_of(facts: Sequence[Known]) -> list[dict[str, Any]]:
    """Return what may be written: another object of the same relation, with paraphrase and neighbours."""
    values, same = defaultdict(set), defaultdict(list)
    for fact in facts:
        values[fact.relation].add(fact.object)
        same[fact.relation, fact.object].append(fact)
    rows = []
    for fact in facts:
        others = sorted(values[fact.relation] - {fact.object})
        around = [one for one in same[fact.relation, fact.object] if one.subject != fact.subject]
        if not others or not around:
            continue
        around = sorted(around, key=lambda one: drawn("near", fact.subject, one.subject))[:5]
        rows.append(
            {
                "subject": fact.subject,
                "prompt": fact.templates[0],
                "target": others[drawn("target", fact.relation, fact.subject) % len(others)],
                "true": fact.object,
                "paraphrases": [fact.templates[-1].replace("{}", fact.subject)],
                "neighbours": [
                    {"prompt": one.templates[0].replace("{}", one.subject), "answer": one.object}
                    for one in around
                ],
            }
        )
    return rows


def make_tokenizer(texts: Sequence[str], folder: Path) -> Tokenizer:
    """Train byte-level BPE on some texts."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = ["<eos>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    found = Tokenizer(backend, roles={"eos_token": "<eos>", "pad_token": "<pad>"})
    found.save(folder)
    return found


def recipe(out: Path, steps: int) -> SFTConfig:
    """Return what is trained: a Llama of about three million parameters, whose memories are wide for its size."""
    shape = ModelConfig(
        hidden_size=128,
        intermediate_size=1024,
        num_layers=5,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        max_positions=256,
        init_std=0.04,
        tie_embeddings=True,
    )
    return SFTConfig(
        out=str(out / "model"),
        policy=PolicyConfig(model=shape, tokenizer=str(out / "tokenizer"), schema="none", template="plain"),
        task=TaskConfig(name="jsonl", path=str(out / "texts.jsonl")),
        optim=OptimConfig(
            lr=3e-3,
            optimizer="muon",
            warmup_steps=max(1, steps // 20),
            final_lr_share=0.02,
            beta2=0.95,
            weight_decay=0.1,
        ),
        num_steps=steps,
        batch_size=32,
        validation_problems=0,
        save_every=max(1, steps // 4),
    )


def read_prose(path: Path) -> list[str]:
    """Return the paragraphs of a text file, or the texts (`text` or `question`) of JSON lines."""
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    rows = [json.loads(line) for line in lines]
    return [" ".join((row.get("text") or row["question"]).split()) for row in rows]


def write_data(relations: Path, prose: Path, out: Path, count: int, steps: int) -> None:
    """Write everything that is there before training."""
    facts = read_relations(relations, count)
    paragraphs = sorted(read_prose(prose), key=lambda text: drawn("prose", text))[: MOST_PROSE + HELD_BACK]
    held = min(HELD_BACK, len(paragraphs) // 5)
    texts = texts_of(facts, paragraphs[held:], rounds=12)
    out.mkdir(parents=True, exist_ok=True)
    (out / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (out / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in edits_of(facts)))
    (out / "prose.txt").write_text("\n".join(paragraphs[:held]))
    make_tokenizer(texts, out / "tokenizer")
    (out / "recipe.yaml").write_text(dump_yaml(recipe(out, steps)))
    print(
        f"{len(facts)} facts of {len({fact.relation for fact in facts})} relations, {len(texts)} texts in {out}"
    )


def known(reader: Reader, facts: Sequence[Fact]) -> tuple[list[Fact], dict[str, float]]:
    """Return the facts that the model completes rightly at rank 1, and the shares, shown and held out."""
    scores = score_facts(reader, facts)
    right = [one.prompt.true is not None and one.prompt.true.is_greedy for one in scores]
    held_out = [a.true is not None and a.true.is_greedy for one in scores for a in one.paraphrases]
    shares = {
        "facts": float(sum(right)),
        "shown": sum(right) / len(right),
        "held out": sum(held_out) / len(held_out),
    }
    return [fact for fact, is_right in zip(facts, right, strict=True) if is_right], shares


def main() -> None:
    """Do what the module's docstring says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("relations", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prose", type=Path, default=GENERAL_TEXT)
    parser.add_argument("--facts", type=int, default=2200)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--edits", type=int, default=50)
    parser.add_argument("--layers", default="")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("data", "train"), default=None)
    given = parser.parse_args()
    out: Path = given.out
    if not (out / "recipe.yaml").is_file():
        write_data(given.relations, given.prose, out, given.facts, given.steps)
    if given.only == "data":
        return
    if not (out / "model/summary.json").is_file():
        began = time.monotonic()
        sft.main(recipe(out, given.steps), resume=(out / "model").exists())
        print(f"trained in {time.monotonic() - began:.0f} s")
    if given.only == "train":
        return
    facts = read_facts(out / "edits.jsonl")
    policy = load_policy(PolicyConfig(init=str(out / "model")), seed=0)
    editor = Editor(policy, "patient")
    editor.set_prose("\n".join(json.loads(line)["text"] for line in (out / "texts.jsonl").open()), 100_000)
    right, shares = known(editor.reader, facts)
    perplexity = measure_perplexity(policy, (out / "prose.txt").read_text()).perplexity
    print(f"known at rank 1: {shares}; perplexity {perplexity:.2f}")
    if len(right) < given.edits:
        print(f"the model knows {len(right)} facts, fewer than {given.edits} edits: others are edited, too")
        right = facts
    chosen = sorted(right, key=lambda fact: drawn("edit", given.seed, fact.text))[: given.edits]
    prose = (out / "prose.txt").read_text()
    layers = tuple(int(n) for n in given.layers.split(",") if n)
    rows = []
    for method in given.methods.split(","):
        own = layers if method in ("memit", "alphaedit") else layers[-1:] if method != "lora" else ()
        before = editor.measure(chosen, text=prose)
        batch = editor.write(chosen, MethodConfig(method=method, layers=own), seed=given.seed)
        found = report_of(chosen, before, editor.measure(chosen, text=prose), given.seed)
        rows.append({"method": method, "seconds": batch.seconds, "layers": batch.layers, **found["metrics"]})
        editor.undo()
        print(line_of(rows[-1]), flush=True)
    (out / f"table_{given.edits}_{given.seed}.json").write_text(json.dumps(rows, indent=1))


def line_of(row: dict[str, Any]) -> str:
    """Return one row of the table."""
    names = (
        "efficacy_accuracy",
        "paraphrase_accuracy",
        "neighbourhood_accuracy",
        "efficacy",
        "paraphrase",
        "neighbourhood",
    )
    parts = [
        f"{row['method']:<10} layers {','.join(map(str, row['layers'])) or 'all':<8} {row['seconds']:>6.1f} s"
    ]
    for name in names:
        if name in row:
            after = row[name]["after"]
            parts.append(f"{name} {after['mean']:.1%} ({after['low']:.1%} to {after['high']:.1%})")
    parts.append(f"score {row['score']['after']:.1f}, drawdown {row['perplexity']['drawdown']:+.2%}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
