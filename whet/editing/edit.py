"""`whet edit MODEL --facts FILE --out DIR`: writes facts into a model, takes them out again, lists, composes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.cli import Program
from whet.config import align, dump_yaml, user_path
from whet.editing import page
from whet.editing.editor import (
    OWN_TOKENS,
    PROSE_TOKENS,
    Editor,
    KnownTask,
    Measured,
    MethodConfig,
    Told,
    check_kept,
    known_problems,
    report_of,
    untold,
)
from whet.editing.facts import Fact, check_facts, comparable, read_facts
from whet.editing.metrics import curve_places, curve_point
from whet.editing.record import RECORD, Record, check_together
from whet.editing.sites import chosen_memories, find_memories, tokenisation_traps
from whet.editing.statistics import digest_of, digests_of, windows_of
from whet.eval.probe.probe import read_text
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.model.lora.files import find_model
from whet.storage.folder import beside, check_folder, next_line, open_run
from whet.telemetry.display import advancing, clock, open_display
from whet.telemetry.provenance import write_environment
from whet.types import UserError

NO_MODEL = "MODEL"


@dataclass(frozen=True, kw_only=True)
class EditConfig:
    """Facts that are written into a model, or taken out of it again."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(init=NO_MODEL))
    """The model: a dense one; with --undo and --list a folder that whet edit made."""
    facts: str = ""
    """File of facts (.jsonl, .json, .csv, .parquet) with subject, prompt (with {} in the subject's place) and target;
    CounterFact's layouts are read, too."""
    keep: str = ""
    """memit, alphaedit: file of facts, laid out like the others, that are to stay as they are; they need no target."""
    out: str = ""
    """New folder: a model folder, with edits.json, the changes by themselves, and edit.html."""
    edit: MethodConfig = field(default_factory=MethodConfig)
    """How facts are written."""
    batch_size: int = 0
    """Facts that are written together; the next batch is written into the model that has the last one. 0 writes all at
    once."""
    num_facts: int = 0
    """Facts that are read, the first of the file; 0 for all."""
    prose: str = ""
    """Text file whose keys edits leave alone; empty for text that the model writes itself."""
    prose_tokens: int = PROSE_TOKENS
    """Tokens of the file, at most; the model itself writes 20,000."""
    text: str = ""
    """Text file for the perplexity before and after; empty for the bundled page of English prose."""
    task: str = ""
    """Task that the model can do, by name, file or hub name: its greedy pass@1 before and after, on problems of the
    test split; empty for none."""
    num_problems: int = 100
    """Problems of the task; 0 for all."""
    task_tokens: int = 256
    """Longest completion of a problem, in tokens."""
    writes: bool = True
    """Let the model write about each subject, before and after, for fluency and consistency."""
    curve: bool = True
    """With several batches: measure after up to eight of them how edits, paraphrases and neighbours fare as there are
    more."""
    undo: bool = False
    """Take edits out of the folder instead: all of them, or --batches."""
    list: bool = False
    """Print the folder's edits instead."""
    batches: tuple[int, ...] = ()
    """With --undo: the batches that are taken out, from 1."""
    records: tuple[str, ...] = ()
    """Folders of earlier edits of the same model, whose batches are applied first, in this order."""
    seed: int = 0
    """Seed of contexts, noise and samples."""

    def __post_init__(self) -> None:
        if self.policy.init == NO_MODEL and not Path(NO_MODEL).exists():
            raise ValueError(
                "no model: name a run folder, a Hugging Face folder or a hub name after the command"
            )
        if self.policy.quantize != "none":
            raise ValueError("policy.quantize: weights in few bits cannot be edited; leave it out")
        if self.undo and self.list:
            raise ValueError("undo, list: give one of them")
        if (self.undo or self.list) and (self.facts or self.keep or self.records):
            raise ValueError(
                f"facts, keep, records: --{'undo' if self.undo else 'list'} reads no facts; leave them out"
            )
        if self.keep and not self.facts:
            raise ValueError("keep: read beside facts that are written; give --facts, or leave it out")
        if not (self.undo or self.list or self.facts or self.records):
            raise ValueError("no facts: give a file, as in --facts facts.jsonl")
        if not self.out and not self.list:
            raise ValueError("out is empty: name a new folder, as in --out edited")
        if self.batches and not self.undo:
            raise ValueError("batches: read with --undo only; leave it out")
        if self.task_tokens < 1:
            raise ValueError(f"task_tokens = {self.task_tokens}: expected 1 or more")
        for name in ("batch_size", "num_facts", "num_problems"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more")
        if self.prose_tokens < 2:
            raise ValueError(f"prose_tokens = {self.prose_tokens}: expected 2 or more")


def plan(config: EditConfig) -> str:
    """Describe the work without doing it."""
    facts = _facts(config) if config.facts else []
    return align(
        "work",
        {
            "model": config.policy.init,
            "facts": len(facts),
            "facts that stay": len(_kept(config)),
            "method": config.edit.method,
            "layers": ", ".join(map(str, config.edit.layers)) or "found by causal tracing",
            "prose": config.prose or f"{OWN_TOKENS:,} tokens that the model writes",
        },
    )


def check(config: EditConfig, resume: bool) -> None:
    """Find what would stop the work before it begins, and time a small part of it; creates nothing.

    Raises:
        UserError: As the work would.
    """
    if config.undo or config.list:
        record = Record.read(find_model(config.policy.init)[0])
        record.check_numbers(config.batches)
        if config.out:
            check_folder(Path(config.out), resumable=False)
        print("checked: record and folder; it would start")
        return
    facts = _facts(config) if config.facts else []
    warnings = check_facts(facts)
    check_kept(_kept(config), facts, config.edit.method)
    prose = _prose(config.prose) if config.prose else ""
    text = read_text(config.text)
    if config.task:
        known_problems(config.task, config.num_problems)
    if config.out:
        check_folder(Path(config.out), resumable=False)
    folders = [Path(folder) for folder in config.records]
    for folder in folders:
        Record.read(folder)
    policy = load_policy(
        config.policy, seed=config.seed, merge=True, plain=True, weights=bool(facts or folders)
    )
    find_memories(policy.model)
    if config.edit.layers and config.edit.method != "lora":
        chosen_memories(policy.model, config.edit.layers)
    windows = windows_of(policy, prose, config.prose_tokens) if prose else []
    for fact in facts:
        warnings += tokenisation_traps(policy.tokenizer, fact)
    editor = open_editor(policy, name_of(policy, config.policy)) if facts or folders else None
    if folders and editor is not None:
        _, told = together(editor, folders)
        warnings += told
    for warning in warnings:
        print(f"warning: {warning}")
    said = ""
    if facts and editor is not None:
        if windows:
            editor.set_prose(prose, config.prose_tokens, config.seed)
        said = f", and take {_expected(editor, facts, config, _spelt(policy, text))}"
    print(f"checked: model, layers, facts, records, texts, task and folder; the edit would start{said}")


def _expected(editor: Editor, facts: Sequence[Fact], config: EditConfig, text: str) -> str:
    """Say how long an edit will take."""
    own = {"text": text, "writes": config.writes, "seed": config.seed}
    seconds = editor.expected_seconds(facts, config.edit, **own)
    plus = ", not counting the task," if config.task else ""
    return f"at most about {clock(seconds)}{plus} (a few steps of a few facts, extrapolated)"


def _facts(config: EditConfig) -> list[Fact]:
    facts = read_facts(config.facts)
    return facts[: config.num_facts] if config.num_facts else facts


def _kept(config: EditConfig) -> list[Fact]:
    return read_facts(config.keep, needs_target=False) if config.keep else []


def main(config: EditConfig) -> None:
    """Edit, undo or list, and say what was done."""
    if config.list:
        print(list_text(Record.read(Path(config.policy.init))))
        return
    if config.undo:
        print("\n".join(undo(config)))
        return
    content = edit(config)
    print(f"\n{page.as_text(content)}\n\ndone: {config.out}  (page: {Path(config.out) / 'edit.html'})")
    # A chat template would ask something else than the prompts that facts are written into.
    chat = ["whet", "chat", config.out, "--policy.template", "plain", "--sampling.temperature", "0"]
    facts = _facts(config)[:1] if config.facts else []
    look = [["whet", "trace", config.out, "--prompt", fact.text, "--subject", fact.subject] for fact in facts]
    undo_it = ["whet", "edit", config.out, "--undo", "--out", beside(config.out, "undone")]
    print(next_line(chat, *look, undo_it))


def edit(config: EditConfig) -> dict[str, Any]:
    """Write facts into a model and the result into a folder; return what its edits.json holds.

    Raises:
        UserError: If facts contradict each other, or do not fit the model; nothing is written then.
    """
    facts = _facts(config) if config.facts else []
    check_facts(facts)
    kept = _kept(config)
    check_kept(kept, facts, config.edit.method)
    prose = _prose(config.prose) if config.prose else ""
    text = read_text(config.text)
    check_folder(Path(config.out), resumable=False)
    policy = load_policy(config.policy, seed=config.seed, merge=True, plain=True)
    editor = open_editor(policy, name_of(policy, config.policy))
    warnings = compose(editor, [Path(folder) for folder in config.records])
    editor.set_kept(kept)
    warnings += editor.check(facts, config.edit)
    text = _spelt(policy, text)
    known = (
        KnownTask.load(policy, config.task, config.num_problems, config.task_tokens) if config.task else None
    )
    folder = Path(config.out)
    open_run(folder, dump_yaml(config), resumable=False)
    write_environment(folder)
    with open_display(f"edit {config.policy.init}", max(1, len(facts)), (), unit="fact") as display:
        for warning in warnings:
            display.note(warning, warning=True)
        if prose:
            editor.set_prose(prose, config.prose_tokens, config.seed)
        content = write_and_measure(
            editor,
            facts,
            config.edit,
            batch_size=config.batch_size,
            text=text,
            writes=config.writes,
            known=known,
            curve=config.curve,
            seed=config.seed,
            tell=display.begin,
            advance=advancing(display),
        )
    save(editor, folder, content)
    return json.loads((folder / RECORD).read_text())


def open_editor(policy: Policy, name: str) -> Editor:
    """Return an editor of a model; of a folder of whet edit with its earlier edits.

    Raises:
        UserError: If it cannot be edited, or was changed since its last edit.
    """
    folder = policy.folder
    if folder is None or not (folder / RECORD).is_file():
        return Editor(policy, name)
    record = Record.read(folder)
    record.check(policy.model, str(folder))
    return Editor(policy, name, record)


def name_of(policy: Policy, config: PolicyConfig) -> str:
    """Return how a record names the model that it begins with: with the adapter that was merged into it, if any."""
    if policy.adapter is None:
        return config.init or "random weights"
    base, adapter = (config.init, config.adapter) if config.adapter else (str(policy.folder), config.init)
    return f"{base} with the adapter {adapter} merged"


def together(editor: Editor, folders: Sequence[Path]) -> tuple[list[Record], list[str]]:
    """Read the records of other folders, and check that a model can take them all; changes nothing.

    Returns:
        The records, and what is worth a warning.

    Raises:
        UserError: If one is of another model, has a batch that is there already, or contradicts another.
    """
    if not folders:
        return [], []
    with editor.without_edits():
        known = digests_of(editor.policy.model)
    records = [Record.read(folder) for folder in folders]
    for folder, record in zip(folders, records, strict=True):
        if record.digest not in known:
            raise UserError(
                f"{folder}: its edits belong to a model of SHA-256 {record.digest[:16]} ({record.model}), this one has "
                f"{known[0][:16]}; give the model that they were made for"
            )
    named = [(str(folder), record) for folder, record in zip(folders, records, strict=True)]
    return records, check_together([(str(editor.policy.folder), editor.record), *named])


def compose(editor: Editor, folders: Sequence[Path]) -> list[str]:
    """Apply the batches of other folders' records on top of a model's own; return what is worth a warning.

    Raises:
        UserError: As `together`, before anything is changed.
    """
    records, warnings = together(editor, folders)
    for batch in (batch for record in records for batch in record.batches):
        editor.record.keep(editor.policy.model, list(batch.deltas))
        batch.apply(editor.policy.model)
        batch.digest = digest_of(editor.policy.model)
        editor.record.batches.append(batch)
    return warnings


def write_and_measure(
    editor: Editor,
    facts: Sequence[Fact],
    method: MethodConfig,
    *,
    batch_size: int = 0,
    text: str = "",
    writes: bool = False,
    known: KnownTask | None = None,
    curve: bool = True,
    seed: int = 0,
    tell: Told = untold,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Write facts in batches; return metrics and table, of these and of all earlier facts together.

    What is said of before is that of the model before its first edit.

    Args:
        editor: The model.
        facts: The facts; none to measure the earlier ones.
        method: How.
        batch_size: Facts of a batch; 0 for all.
        text: Prose for the perplexity; '' for none.
        writes: Let the model write about each subject.
        known: A task that the model can do; None for none.
        curve: Measure after some of the batches, too, where there are several.
        seed: Seed of everything that is drawn.
        tell: Called with the name of each phase.
        advance: Called with the number of facts that are done.
    """
    found = {comparable(fact.text): fact for _, fact in editor.record.current_facts()}
    asked = list((found | {comparable(fact.text): fact for fact in facts}).values())
    if not asked:
        return {"metrics": {}, "table": []}
    tell("before")
    with editor.without_edits():
        before = editor.measure(asked, text=text, writes=writes, known=known, seed=seed)
    size = batch_size or max(1, len(facts))
    starts = range(0, len(facts), size)
    places = curve_places(len(starts)) if curve and len(starts) > 1 else set[int]()
    points: list[dict[str, Any]] = []
    for n, start in enumerate(starts, 1):
        editor.write_all(facts[start : start + size], method, seed=seed, tell=tell, advance=advance)
        if n in places and n < len(starts):
            tell("curve")
            points.append(_point(editor, asked, before, text))
    tell("after")
    after = editor.measure(asked, text=text, writes=writes, known=known, seed=seed)
    content = report_of(asked, before, after, seed, [n for n, _ in editor.record.current_facts()])
    if places:
        content["curve"] = [*points, _drawn_down(curve_point(before.scores, after.scores), before, after)]
    return content


def _point(editor: Editor, asked: Sequence[Fact], before: Measured, text: str) -> dict[str, Any]:
    """Measure the facts that were written so far; those that a later batch changes are not among them."""
    written = {id(fact) for _, fact in editor.record.current_facts()}
    pairs = [pair for pair in zip(asked, before.scores, strict=True) if id(pair[0]) in written]
    now = editor.measure([fact for fact, _ in pairs], text=text)
    return _drawn_down(curve_point([old for _, old in pairs], now.scores), before, now)


def _drawn_down(point: dict[str, Any], before: Measured, now: Measured) -> dict[str, Any]:
    if before.perplexity is None or now.perplexity is None:
        return point
    return point | {"drawdown": now.perplexity / before.perplexity - 1}


def save(editor: Editor, folder: Path, content: dict[str, Any]) -> None:
    """Write the edited model, its record and its page; of a model whose edits were all taken back nothing but it."""
    editor.policy.save(folder)
    if not editor.record.batches:
        return
    editor.record.write(folder, content)
    page.write_page(folder, json.loads((folder / RECORD).read_text()))


def undo(config: EditConfig) -> list[str]:
    """Write a model without its edits, or without some of them, into a new folder; return what to say of it.

    Raises:
        UserError: If the folder has no record, was changed since, or has no such batch.
    """
    out = Path(config.out)
    check_folder(out, resumable=False)
    policy = load_policy(config.policy, seed=config.seed, plain=True)
    if policy.folder is None:
        raise UserError(f"{config.policy.init}: no folder of whet edit")
    record = Record.read(policy.folder)
    record.check(policy.model, str(policy.folder))
    count = len(record.batches)
    record.check_numbers(config.batches)
    text = read_text(config.text)
    known = (
        KnownTask.load(policy, config.task, config.num_problems, config.task_tokens) if config.task else None
    )
    record.remove(policy.model, config.batches)
    out.mkdir(parents=True, exist_ok=True)
    if not record.batches:
        policy.save(out)
        return [f"{out}: the weights are bit by bit those of {record.model} (SHA-256 {record.digest[:16]})"]
    editor = Editor(policy, record.model, record)
    with open_display(f"edit {config.policy.init} --undo", 1, (), unit="step") as display:
        content = write_and_measure(
            editor,
            (),
            config.edit,
            text=_spelt(policy, text),
            writes=config.writes,
            known=known,
            seed=config.seed,
            tell=display.begin,
        )
    save(editor, out, content)
    return [
        page.as_text(json.loads((out / RECORD).read_text())),
        "",
        f"{out}: {count - len(record.batches)} of {count} batches taken out; {len(record.batches)} remain",
    ]


def list_text(record: Record) -> str:
    """Return a folder's edits as text."""
    num_facts = len({comparable(fact.text) for _, fact in record.facts_of_batches()})
    lines = [f"{record.model}: {_num(len(record.batches), 'batch', 'es')}, {_num(num_facts, 'fact')}"]
    for n, batch in enumerate(record.batches, 1):
        layers = f" in layers {', '.join(map(str, batch.layers))}" if batch.layers else ""
        lines.append(
            f"batch {n}: {batch.method}{layers}, {_num(len(batch.facts), 'fact')}, SHA-256 {batch.digest[:16]}"
        )
        lines += [f"  {fact.text} -> {fact.target}" for fact in batch.facts]
    return "\n".join(lines)


def _num(count: int, name: str, ending: str = "s") -> str:
    return f"{count:,} {name}{ending * (count != 1)}"


def _prose(path: str) -> str:
    try:
        text = user_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prose = {path!r}: cannot be read ({error}); give a text file in UTF-8") from None
    if not text.strip():
        raise UserError(f"prose = {path!r}: it is empty; give a text of some thousand words, or leave it out")
    return text


def _spelt(policy: Policy, text: str) -> str:
    """Return a text that the tokenizer can spell; '' where it cannot: no perplexity then."""
    unknown = policy.tokenizer.unk_id
    return "" if unknown is not None and unknown in policy.tokenizer.encode(text) else text


PROGRAM = Program(config_class=EditConfig, main=main, plan=plan, check=check, positional="policy.init")
