"""`whet infer --runs A,B --images DIR --prompt ...`: many images to many runs, each with its adapter and without."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from whet.cli import Program
from whet.config import align, dump_yaml, user_path
from whet.eval.compare.asked import Asked, answer_text, own_problem, read_questions
from whet.eval.compare.compare import CompareConfig, compare, describe, locate, print_comparison, short_names
from whet.eval.compare.page import side_by_side, write_page
from whet.eval.grade import AnswerFrom
from whet.eval.record import describe_weights, write_json
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.lora.files import find_model
from whet.model.vision.reading import (
    FILE,
    Urls,
    check_bytes,
    check_file,
    decoded,
    is_data_uri,
    is_url,
    read_picture,
    shown,
)
from whet.model.vision.reading import locate as locate_image
from whet.storage.folder import check_folder, dated, open_run
from whet.telemetry.log import parse_row
from whet.telemetry.provenance import RUNS, run_folders, write_environment
from whet.types import Problem, UserError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""Files of a folder that are taken for images."""
LISTS = (".txt", ".jsonl")
ALL = "all"
MODEL = "RUN"
OFF = "-without-adapter"
MAX_LIST_BYTES = 64 * 2**20
SUMMARY, PAGE = "infer.json", "infer.html"


@dataclass(frozen=True, kw_only=True)
class InferConfig:
    """Questions about images, or plain ones, put to many runs: transcripts, verdicts, confidence, energy."""

    runs: tuple[str, ...] = ()
    """Runs, model folders, adapters or hub names, with spaces or commas between them; 'all' for every run below runs/
    that has a model."""
    adapters: Literal["both", "on", "off"] = "both"
    """What is asked of a run that trained an adapter: the model with it, the base without it, or both. The base is
    prompted as the adapter is; one that several runs share is asked once."""
    images: tuple[str, ...] = ()
    """Images: files, folders, data URIs, URLs, or lists: .txt with a path per line, .jsonl with `image` (or `images`)
    and, where they differ, `prompt` and `answer`. Every image is shown with every prompt. None: the prompts alone."""
    image_root: str = ""
    """Folder that paths in lists are relative to and may not leave; empty for the list's own."""
    image_urls: Urls = "none"
    """Which URLs are fetched: none, those of the public internet, or any, so also those of the local network."""
    prompt: tuple[str, ...] = ()
    """What is asked: texts, or files with one prompt per line (.jsonl: `prompt`, and `answer` where it is known)."""
    answer: str = ""
    """The right answer to every question that has none of its own; empty for no verdict."""
    answer_from: AnswerFrom = "schema"
    """schema: only the answer block counts; anywhere: boxes, phrases and the last number count, too."""
    out: str = ""
    """Output folder; empty for runs/infer-DATE-TIME."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(init=MODEL, max_rows=32))
    """How the runs are loaded and asked: system_prompt, schema, quantize, device ...; `runs` names them."""
    num_samples: int = 3
    """Sampled completions of each question, besides the greedy one."""
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=1024)
    )
    """How they are drawn."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters."""
    shown_problems: int = 500
    """Questions with transcripts on the page."""
    seed: int = 0
    """Seed of the samples and of the bootstrap."""

    def __post_init__(self) -> None:
        for name, low in {"num_samples": 1, "shown_problems": 1}.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} = {getattr(self, name)}: expected {low} or more")
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0: a greedy completion is generated anyway; expected above 0"
            )
        if self.policy.init != MODEL or self.policy.adapter:
            raise ValueError("policy.init, policy.adapter: name the models with --runs")


def plan(config: InferConfig) -> str:
    """Describe the work without doing it."""
    problems = read_problems(config)
    count = len(problems) * (config.num_samples + 1)
    rows: dict[str, Any] = {
        "models": ", ".join(_places(config)),
        "questions": len(problems),
        "completions of each model": f"{count:,} ({config.num_samples} sampled + 1 greedy per question)",
        "new tokens per completion, at most": config.sampling.max_new_tokens,
    }
    return align("work", rows)


def check(config: InferConfig, resume: bool) -> None:
    """Find what it would stop at before the first completion; loads no weights and creates nothing.

    Raises:
        UserError: As the command would.
    """
    problems = read_problems(config)
    _check_prompts(config, _places(config), problems)
    if config.out and not resume:
        check_folder(Path(config.out), resumable=False)
    print("checked: models, images, prompts and folder; it would start")


def main(config: InferConfig) -> None:
    """Ask every model everything; write NAME.jsonl as completions come, then infer.json and infer.html.

    Raises:
        UserError: If a model, an image or a prompt cannot be used.
        KeyboardInterrupt: After Ctrl-C; what was drawn is in the files, and the page shows it.
    """
    problems = read_problems(config)
    places = _places(config)
    _check_prompts(config, places, problems)
    folder = Path(config.out or dated("infer"))
    open_run(folder, dump_yaml(config), resumable=False)
    write_environment(folder)
    asked: list[Asked] = []
    try:
        _ask_all(config, places, problems, folder, asked)
    except KeyboardInterrupt:
        if _finish(config, folder, asked):
            raise KeyboardInterrupt(f"what was drawn is in {folder}, and on its page") from None
        raise
    _finish(config, folder, asked)


def _ask_all(
    config: InferConfig,
    places: Sequence[str],
    problems: Sequence[Problem],
    folder: Path,
    asked: list[Asked],
) -> None:
    """Ask the models one after the other; each joins `asked` before its first completion."""
    bases: dict[tuple[str, str], str] = {}
    names = short_names(places)
    for place, name in zip(places, names, strict=True):
        own = replace(config.policy, init=place)
        policy = load_policy(own, seed=config.seed, dtype=getattr(torch, config.precision), steers=True)
        weights = describe_weights(own, policy)

        def ask(title: str, weights: Mapping[str, Any], policy: Policy = policy, place: str = place) -> None:
            asked.append(Asked(folder, title, place, weights))
            asked[-1].ask(
                policy,
                problems,
                num_samples=config.num_samples,
                sampling=config.sampling,
                seed=config.seed,
                answer_from=config.answer_from,
            )

        adapter = policy.adapter
        if adapter is not None and config.adapters != "on":
            key = (str(policy.folder), json.dumps(policy.protocol(), sort_keys=True))
            if key not in bases:
                title = Path(adapter.base).name or "base"
                bases[key] = f"{name}{OFF}" if title in (*names, *bases.values()) else title
                with adapter.off(policy.model):
                    ask(bases[key], {**weights, "adapter": None})
        if adapter is None or config.adapters != "off":
            ask(name, weights)
        del ask, policy, adapter  # before the next one is loaded


def _finish(config: InferConfig, folder: Path, asked: Sequence[Asked]) -> bool:
    """Write and print what there is; return False if no question was answered by every model that was asked."""
    sides = [(one.name, one.stored()) for one in asked]
    sides = [(name, side) for name, side in sides if side.greedy]
    uids = [uid for uid in (sides[0][1].greedy if sides else ()) if all(uid in s.greedy for _, s in sides)]
    if not uids:
        return False
    names, stored = [name for name, _ in sides], [side for _, side in sides]
    if len(stored) > 1 and all(stored[0].greedy[uid]["gold"] is not None for uid in uids):
        content = compare(stored, names, CompareConfig(force=True, seed=config.seed))
    else:
        content = describe(stored, names, uids)
    content["weights"] = []
    transcripts = side_by_side(stored, uids[: config.shown_problems], config.num_samples)
    write_json(folder / SUMMARY, content)
    left_out = len(uids) - len(transcripts)
    write_page(folder / PAGE, content, transcripts, left_out)
    print_comparison(content, transcripts)
    print(f"page: {folder / PAGE}; every completion: {', '.join(str(side.folder) for side in stored)}")
    return True


def _places(config: InferConfig) -> list[str]:
    """Return where the models are."""
    words = [part for word in config.runs for part in ([word] if Path(word).exists() else word.split(","))]
    words = [word.strip() for word in words if word.strip()]
    if words == [ALL]:
        words = [str(folder) for folder in run_folders(RUNS) if (folder / "checkpoints").is_dir()]
        if not words:
            raise UserError(f"runs = all: no run with a model below {RUNS}/; name models")
    if not words:
        raise UserError(
            "nothing to ask: name runs, as in `whet infer --runs A,B --images photos --prompt TEXT`"
        )
    places = [locate(word) for word in words]
    if len({Path(place).resolve() for place in places}) < len(places):
        raise UserError(f"runs = {', '.join(words)}: one of them is given twice")
    return places


def _check_prompts(config: InferConfig, places: Sequence[str], problems: Sequence[Problem]) -> None:
    """Render every prompt for every model, before weights are read: the last model's refusal would cost the others'
    work."""
    for place in places:
        find_model(place)
        policy = load_policy(replace(config.policy, init=place), seed=config.seed, weights=False, steers=True)
        context = policy.model.config.max_positions
        for problem in problems:
            length = len(policy.prompt_ids(problem))
            if length >= context:
                raise UserError(
                    f"{place}: the question {problem.prompt[:60]!r} has {length:,} tokens, images included, and the "
                    f"context holds {context:,}: shorten it, or make the images smaller"
                )


def read_problems(config: InferConfig) -> list[Problem]:
    """Return the questions: every image with every prompt, rows of lists with their own.

    Raises:
        UserError: If there is nothing to ask, or an image cannot be read.
    """
    questions = [(prompt, answer or config.answer) for prompt, answer in read_questions(config.prompt)]
    rows = list(_rows(config))
    if not questions and not (rows and all(row.prompt for row in rows)):
        raise UserError(
            "nothing is asked: give --prompt (texts, or files with one per line)"
            + "; the list has images without a prompt" * bool(rows)
        )
    found: list[Problem] = []
    for row in rows:
        names = tuple(read_picture(source).digest.hex() for source in row.images)
        own = [(row.prompt, row.answer or config.answer)] if row.prompt else questions
        found += [own_problem(prompt, row.answer or answer, row.images, names) for prompt, answer in own]
    if not config.images:
        found = [own_problem(prompt, answer) for prompt, answer in questions]
    return list({problem.uid: problem for problem in found}.values())


@dataclass(frozen=True, slots=True)
class _Row:
    """Images that are shown together, and what is asked about them if it is not the common prompt."""

    images: tuple[str, ...]
    prompt: str = ""
    answer: str = ""


def _rows(config: InferConfig) -> Iterator[_Row]:
    """Yield what `images` names, in order."""
    for word in config.images:
        whole = is_data_uri(word) or is_url(word) or Path(word).exists()
        for source in [word] if whole else [part.strip() for part in word.split(",") if part.strip()]:
            named = source.removeprefix(FILE)
            path = user_path(named) if not (is_data_uri(source) or is_url(source)) else None
            if path is not None and path.is_dir():
                inside = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
                if not inside:
                    raise UserError(f"images: no image in {source} ({', '.join(SUFFIXES)})")
                yield from (_Row((_source(config, str(file), None),)) for file in inside)
            elif path is not None and path.suffix in LISTS:
                yield from _listed(config, path)
            else:
                yield _Row((_source(config, source if path is None else str(path), None),))


def _listed(config: InferConfig, path: Path) -> Iterator[_Row]:
    """Yield the rows of a list."""
    if not path.is_file():
        raise UserError(f"images: no such file {str(path)!r}")
    if path.stat().st_size > MAX_LIST_BYTES:
        raise UserError(f"images: {path} is larger than {MAX_LIST_BYTES >> 20} MiB")
    root = Path(config.image_root) if config.image_root else path.parent
    count = 0
    if path.suffix == ".jsonl":
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            row = parse_row(line)
            if row is None:
                raise UserError(f"images: {path}, line {number}: not a JSON object")
            value = row.get("images", row.get("image"))
            sources = [value] if isinstance(value, str) else value
            prompt = row.get("prompt", row.get("question", ""))
            if not isinstance(sources, list) or not all(
                isinstance(source, str) and source for source in sources
            ):
                raise UserError(
                    f"images: {path}, line {number}: expected `image` (a text) or `images` (a list of texts)"
                )
            if not isinstance(prompt, str):
                raise UserError(f"images: {path}, line {number}: `prompt` is not a text")
            count += 1
            yield _Row(
                tuple(_source(config, source, root) for source in sources),
                prompt,
                answer_text(row.get("answer")),
            )
    else:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.strip():
                count += 1
                yield _Row((_source(config, line.strip(), root),))
    if not count:
        raise UserError(f"images: {path} lists none")


def _source(config: InferConfig, source: str, root: Path | None) -> str:
    """Return an image's file, fetched if it is a URL, or its data URI; refuse one that is cut off or broken."""
    if is_data_uri(source):
        check_bytes(decoded(source), shown(source))
        return source
    if is_url(source) and config.image_urls == "none":
        raise UserError(
            f"images: {shown(source)} is a URL, and none is fetched unless asked: --image-urls public"
        )
    try:
        path = locate_image(source, root=root, urls=config.image_urls)
        check_file(path, shown(source))
        return str(path)
    except UserError as error:
        raise UserError(str(error).replace("--task.image", "--image")) from None


PROGRAM = Program(config_class=InferConfig, main=main, plan=plan, check=check, positional="runs")
