"""Make a model that knows facts, edit it by every method, and print the table: the proof of docs/editing.md.

python bench/patient.py RELATIONS OUT --prose PROSE [--facts 2200] [--edits 50,1000] [--seeds 3] [--methods memit,lora]

RELATIONS is a folder of relation files: JSON with `name`, `prompt_templates`, `prompt_templates_zs` and `samples` of
subject and object; PROSE a text file, or JSON lines with `text` or `question`. OUT gets

- texts.jsonl: what the model learns. Of each fact one template is held out: with this subject it is never shown, with
  others it is. Paragraphs join facts about several subjects; between them stands prose.
- tokenizer/: byte-level BPE, trained on these texts; recipe.yaml: what `whet sft OUT/recipe.yaml` trains.
- facts.jsonl: all facts; tune.jsonl and report.jsonl: those that may be edited, to choose settings and for the table.
  The target is another object of the same relation, the held-out template the paraphrase; neighbours are subjects with
  the same true object that are never edited.
- prose.txt: held back from training, for the perplexity.

Then it trains (if OUT/model is not there), says how many facts the model knows at rank 1, in templates shown and held
out, and edits it by each method: each number of edits with each seed, which draws the facts of report.jsonl that the
model knows. table.json and table.md have means with 95 % intervals over facts (of all seeds together), the seeds' own
means, and a paired test against MEMIT; with several numbers of edits curve.svg draws the score.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from whet.cli import dump_yaml
from whet.editing.editor import Editor, MethodConfig
from whet.editing.facts import Fact, read_facts
from whet.editing.methods import METHODS, TuneConfig
from whet.editing.metrics import facts_of, harmonic, score_facts
from whet.editing.sites import Reader
from whet.editing.targets import TargetConfig
from whet.eval.probe.off_domain import measure_perplexity
from whet.eval.probe.probe import GENERAL_TEXT
from whet.generate.policy import PolicyConfig, load_policy
from whet.model.text.tokenizer import Tokenizer
from whet.recipes.sft import facts
from whet.stats import paired_interval, share_interval
from whet.train import sft
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


PARTS = {"neighbours": 5, "tune": 3, "report": 12}
"""Twentieths of the facts: never edited, so that they can be neighbours of any number of edits; edited to choose
settings; edited for what is reported."""


def part_of(fact: Known) -> str:
    """Return which of `PARTS` a fact belongs to."""
    place = drawn("part", fact.subject) % sum(PARTS.values())
    for name, share in PARTS.items():
        if place < share:
            return name
        place -= share
    raise AssertionError


def edits_of(facts: Sequence[Known], part: str) -> list[dict[str, Any]]:
    """Return what may be written: another object of the same relation, with paraphrase and neighbours."""
    values, same = defaultdict(set), defaultdict(list)
    for fact in facts:
        values[fact.relation].add(fact.object)
        if part_of(fact) == "neighbours":
            same[fact.relation, fact.object].append(fact)
    rows = []
    for fact in (fact for fact in facts if part_of(fact) == part):
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
    """Return the recipe `facts`, in a folder of its own."""
    found = facts()
    return replace(
        found,
        out=str(out / "model"),
        policy=replace(found.policy, tokenizer=str(out / "tokenizer")),
        task=replace(found.task, path=str(out / "texts.jsonl")),
        optim=replace(found.optim, warmup_steps=max(1, steps // 20)),
        num_steps=steps,
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
    rows = [
        {
            "subject": fact.subject,
            "prompt": fact.templates[0],
            "target": fact.object,
            "true": fact.object,
            "paraphrases": [fact.templates[-1].replace("{}", fact.subject)],
        }
        for fact in facts
    ]
    (out / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for part in ("tune", "report"):
        (out / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in edits_of(facts, part)))
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


SEARCH = TargetConfig(steps=50, stop_loss=0.005, decay=0.02, clamp=4.0)
SETTINGS: dict[str, MethodConfig] = {method: MethodConfig(method=method) for method in METHODS} | {
    "memit": MethodConfig(layers=(0,), passes=3, prose_weight=2000, target=SEARCH),
    "alphaedit": MethodConfig(
        method="alphaedit", layers=(0,), passes=3, null_share=0.3, ridge=0.5, target=SEARCH
    ),
    "ft": MethodConfig(method="ft", layers=(0,), tune=TuneConfig(lr=2e-3, bound=0.02, steps=50)),
    "lora": MethodConfig(method="lora", tune=TuneConfig(lr=5e-4, steps=50)),
}
"""Of each method; chosen on tune.jsonl, ft and lora with an earlier patient; alphaedit's ridge lies between
two that were measured, and rome and r-rome have their presets."""
COLUMNS = {
    "efficacy_accuracy": "efficacy, rank 1",
    "paraphrase_accuracy": "paraphrase, rank 1",
    "neighbourhood_accuracy": "neighbours, rank 1",
    "efficacy": "efficacy",
    "paraphrase": "paraphrase",
    "neighbourhood": "neighbourhood",
}
PARTS_OF_SCORE = ("efficacy", "paraphrase", "neighbourhood")


def edited(
    editor: Editor, facts: Sequence[Fact], method: MethodConfig, prose: str, seed: int
) -> dict[str, Any]:
    """Write facts, measure, and take them out again; return metrics, and their values for each fact."""
    before = editor.measure(facts, text=prose)
    batches = editor.write_all(facts, method, seed=seed)
    after = editor.measure(facts, text=prose)
    editor.undo()
    assert before.perplexity is not None
    assert after.perplexity is not None
    values = facts_of(after.scores, before.scores)
    return {
        "method": method.method,
        "edits": len(facts),
        "seed": seed,
        "layers": list(batches[0].layers),
        "seconds": sum(batch.seconds for batch in batches),
        "drawdown": after.perplexity / before.perplexity - 1,
        "norm": max(norm for batch in batches for norm in batch.norms.values()),
        "values": {name: values[name] for name in (*COLUMNS, "first_token_p", "neighbourhood_kept")},
    }


def score(values: dict[str, list[float]]) -> float:
    """Return CounterFact's score."""
    return 100 * harmonic([fmean(values[name]) for name in PARTS_OF_SCORE])


def table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the seeds of each method and number of edits, with intervals, and tests against MEMIT."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[run["edits"], run["method"]].append(run)
    rows = []
    for (edits, method), group in groups.items():
        joined = {name: [v for run in group for v in run["values"][name]] for name in group[0]["values"]}
        row: dict[str, Any] = {"method": method, "edits": edits, "seeds": [run["seed"] for run in group]}
        row["layers"] = group[0]["layers"]
        for name in COLUMNS:
            interval = share_interval(joined[name], 0)
            row[name] = {"mean": interval.mean, "low": interval.low, "high": interval.high}
            row[name]["seeds"] = [fmean(run["values"][name]) for run in group]
            rival = groups.get((edits, "memit"), [])
            if method != "memit" and row["seeds"] == [run["seed"] for run in rival]:
                other = [v for run in rival for v in run["values"][name]]
                row[name]["p_against_memit"] = paired_interval(other, joined[name])[1]
        row["score"] = score(joined)
        row["scores"] = [score(run["values"]) for run in group]
        for name in ("drawdown", "seconds", "norm"):
            row[name] = [run[name] for run in group]
        rows.append(row)
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table."""
    head = ["edits", "method", "layers", *COLUMNS.values(), "score (seeds)", "perplexity", "seconds"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [str(row["edits"]), row["method"], ", ".join(map(str, row["layers"])) or "all"]
        for name in COLUMNS:
            one = row[name]
            star = "*" if one.get("p_against_memit", 1.0) < 0.05 else ""
            cells.append(f"{100 * one['mean']:.1f}{star} ({100 * one['low']:.1f} to {100 * one['high']:.1f})")
        cells.append(f"{row['score']:.1f} ({', '.join(f'{own:.1f}' for own in row['scores'])})")
        cells.append(f"{100 * fmean(row['drawdown']):+.2f} %")
        cells.append(f"{fmean(row['seconds']):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def curve(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the score over the number of edits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in rows):
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["edits"])
        axes.plot([row["edits"] for row in own], [row["score"] for row in own], marker="o", label=method)
    axes.axhline(85, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="edits at once", ylabel="score", ylim=(0, 100))
    axes.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Do what the module's docstring says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("relations", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prose", type=Path, default=GENERAL_TEXT)
    parser.add_argument("--facts", type=int, default=2200)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--edits", default="50")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--search-lr",
        type=float,
        default=SEARCH.lr,
        help="of memit and alphaedit: slower is better, %(default)s",
    )
    parser.add_argument(
        "--search-steps", type=int, default=SEARCH.steps, help="of memit and alphaedit, %(default)s"
    )
    parser.add_argument(
        "--search-decay", type=float, default=SEARCH.decay, help="of memit and alphaedit, %(default)s"
    )
    parser.add_argument("--prose-weight", type=float, default=SETTINGS["memit"].prose_weight, help="of memit")
    parser.add_argument(
        "--contexts",
        type=int,
        default=SETTINGS["memit"].num_contexts,
        help="of memit and alphaedit, default %(default)s",
    )
    parser.add_argument("--only", choices=("data", "train"), default=None)
    given = parser.parse_args()
    search = replace(SEARCH, lr=given.search_lr, steps=given.search_steps, decay=given.search_decay)
    shared: dict[str, Any] = {"target": search, "num_contexts": given.contexts}
    memit = replace(SETTINGS["memit"], prose_weight=given.prose_weight, **shared)
    settings = SETTINGS | {"memit": memit, "alphaedit": replace(SETTINGS["alphaedit"], **shared)}
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
    policy = load_policy(PolicyConfig(init=str(out / "model")), seed=0)
    editor = Editor(policy, "patient", cache=out / "moments")
    texts = [json.loads(line)["text"] for line in (out / "texts.jsonl").open()]
    editor.set_prose("\n".join(sorted(texts, key=lambda text: drawn("moments", text))), 100_000)
    _, shares = known(editor.reader, read_facts(out / "facts.jsonl"))
    right, _ = known(editor.reader, read_facts(out / "report.jsonl"))
    prose = (out / "prose.txt").read_text()
    perplexity = measure_perplexity(policy, prose).perplexity
    print(f"known at rank 1: {shares}; perplexity {perplexity:.2f}; {len(right)} facts to edit", flush=True)
    stored = out / "runs.jsonl"
    runs = [json.loads(line) for line in stored.open()] if stored.is_file() else []
    done = {(run["edits"], run["method"], run["seed"]) for run in runs}
    for count in map(int, given.edits.split(",")):
        if count > len(right):
            print(f"{count} edits: the model knows {len(right)} of the facts to edit; left out")
            continue
        for method in given.methods.split(","):
            for seed in range(given.seeds):
                if (count, method, seed) in done:
                    continue
                chosen = sorted(right, key=lambda fact: drawn("edit", seed, fact.text))[:count]
                runs.append(edited(editor, chosen, settings[method], prose, seed))
                with stored.open("a") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
            print(markdown([row for row in table(runs) if row["method"] == method][-1:]), flush=True)
    rows = table(runs)
    (out / "table.json").write_text(json.dumps({"known": shares, "rows": rows}, indent=1) + "\n")
    (out / "table.md").write_text(markdown(rows) + "\n")
    curve(rows, out / "curve.svg")


if __name__ == "__main__":
    main()
