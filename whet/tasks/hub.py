"""Reads data sets of the hub with the `datasets` package: whole or streamed, with errors that say what to choose."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from whet.install import install_command
from whet.tasks.read import (
    BadRow,
    Check,
    Row,
    as_row,
    is_hub_name,
    read_json_array,
    read_jsonl,
    shortened,
    sift,
)
from whet.types import UserError

MAX_SHOWN = 300
IMAGES_AT_ONCE = 16
"""Rows with images that are in memory together."""
TRAIN, TEST = "train", "test"
_CHOICES = re.compile(r"\[[^\[\]]*\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows of the hub that make up a split of ours.

    Attributes:
        path: Name of the data set, or a folder that `datasets` can load.
        split: Split, as the data set calls it.
        configs: Configurations, one after the other; () where the data set has one only.
    """

    path: str
    split: str
    configs: tuple[str, ...] = ()

    def __str__(self) -> str:
        configs = f" {self.configs[0]}" if len(self.configs) == 1 else ""
        return f"{self.path}{configs} {self.split}"


def find_parts(path: str, config: str = "", split: str = "") -> dict[str, Part]:
    """Return the parts of a data set by our splits 'train' and 'test'.

    Without 'test' the part 'train' is split by hash, and so is a split that is named.

    Args:
        path: Name of the data set, or a folder.
        config: Configuration; '' for the only one.
        split: The one split to use; '' for those called train and test, or the only one.

    Raises:
        UserError: If there is no such data set or configuration, or the splits have other names.
    """
    configs = (config,) if config else ()
    if split:
        return {TRAIN: Part(path=path, split=split, configs=configs)}
    datasets = _datasets(path)
    names = list(_called(path, config, "", lambda: datasets.get_dataset_split_names(path, config or None)))
    found = names if len(names) == 1 else [name for name in (TRAIN, TEST) if name in names]
    if TRAIN not in found and len(names) > 1:
        raise UserError(f"data set {path!r} has the splits {', '.join(names)}: choose one with --task.split")
    ours = {TEST: TEST} if found == [TEST] else {TRAIN: found[0], **{name: name for name in found[1:]}}
    return {our: Part(path=path, split=their, configs=configs) for our, their in ours.items()}


def hub_rows(part: Part, *, max_rows: int = 0) -> Iterator[tuple[str, int, Row | str, Any]]:
    """Yield where a row stands, its number, the row, and its raw form; as `whet.tasks.read.sift` takes them.

    Args:
        part: What to read.
        max_rows: Read only so many rows, which are streamed: nothing else is downloaded. 0 downloads all.

    Raises:
        UserError: If the package is missing, or the data set cannot be loaded.
    """
    datasets = _datasets(part.path)
    count = 0
    for config in part.configs or ("",):
        left = max_rows - count if max_rows else None

        def load(config: str = config) -> Iterable[Any]:
            return _as_stored(
                datasets.load_dataset(part.path, config or None, split=part.split, streaming=bool(max_rows))
            )

        values = iter(_called(part.path, config, part.split, load))
        name = f"{part.path} {config} {part.split}" if config else f"{part.path} {part.split}"
        for number, value in enumerate(islice(_guarded(values, part, config), left), 1):
            count += 1
            yield f"{name} row {number}", number, as_row(value), value
        if max_rows and count >= max_rows:
            return


def _as_stored(rows: Any) -> Iterable[Any]:
    """Return rows whose images are the files that the data set holds, as {'bytes', 'path'}.

    `datasets` would decode each, without a limit; and an image that is encoded again has other bytes on every machine.
    """
    features = getattr(rows, "features", None)
    if not _has_images(features):
        schema = getattr(features, "arrow_schema", None)
        return rows if schema is None else map(shortened(schema), rows)
    if hasattr(rows, "decode"):  # a stream
        return rows.decode(False)
    return (
        row
        for table in rows.with_format("arrow").iter(batch_size=IMAGES_AT_ONCE)
        for row in table.to_pylist()
    )


def _has_images(feature: Any) -> bool:
    """Say whether a type of `datasets`, or one inside it, is that of images."""
    if isinstance(feature, Mapping):
        return any(map(_has_images, feature.values()))
    if isinstance(feature, list):
        return any(map(_has_images, feature))
    return type(feature).__name__ == "Image" or _has_images(getattr(feature, "feature", []))


def read_hub(
    part: Part,
    *,
    required: Sequence[str],
    max_bad_rows: int = 0,
    check: Check | None = None,
    max_rows: int = 0,
) -> tuple[list[tuple[int, Any]], list[BadRow]]:
    """Read a part of a hub data set; otherwise as `read_jsonl`."""
    rows = hub_rows(part, max_rows=max_rows)
    return sift(str(part), rows, required, max_bad_rows, check)


def check_path(path: str, example: str) -> None:
    """Refuse a path that is neither a folder nor, by its form, a hub name."""
    if Path(path).is_file():
        raise UserError(
            f"{path}: a file, where a folder or a hub name such as {example!r} is read; your rows: --data {path}"
        )
    if not Path(path).is_dir() and not is_hub_name(path):
        raise UserError(
            f"{path!r}: no such folder, and not a hub name such as {example!r}; check --task.path"
        )


def read_part(
    path: str,
    part: Part | None,
    *,
    names: Sequence[str],
    required: Sequence[str],
    max_bad_rows: int = 0,
    check: Check | None = None,
) -> tuple[str, list[tuple[int, Row]], list[BadRow]]:
    """Read a part of a data set from a folder or from the hub; otherwise as `read_jsonl`.

    Args:
        path: Folder, where there is no part.
        part: What to read on the hub.
        names: File names to look for in the folder, best first; .json is read as one array.
        required: Fields that must hold text that is not blank.
        max_bad_rows: How many bad rows are tolerated.
        check: Further conditions.

    Returns:
        Name of the source, then the good and the bad rows.
    """
    if part is not None:
        return part.path, *read_hub(part, required=required, max_bad_rows=max_bad_rows, check=check)
    files = [Path(path) / f"{name}{end}" for name in names for end in ("", ".gz")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise UserError(f"{path}: no {' or '.join(names)} there; check --task.path")
    read = read_json_array if ".json" in file.suffixes else read_jsonl
    return file.name, *read(file, required=required, max_bad_rows=max_bad_rows, check=check)


def _datasets(path: str) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        message = f"data set {path!r}: no such folder; to read it from the hub, {install_command('hf')}"
        raise UserError(message) from error
    # Two lines for each try to reach the hub, beside the one that says in the end that it could not be reached.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    return datasets


def _called(path: str, config: str, split: str, call: Callable[[], Iterable[Any]]) -> Iterable[Any]:
    from whet.telemetry.heartbeat import downloading  # it loads torch: rows of files are read without

    try:
        with downloading():
            return call()
    except Exception as error:  # network errors of many libraries
        raise _fault(path, config, split, error) from error


def _guarded(values: Iterator[Any], part: Part, config: str) -> Iterator[Any]:
    """Yield values; the network may also fail while they are streamed."""
    while True:
        try:
            value = next(values)
        except StopIteration:
            return
        except Exception as error:
            raise _fault(part.path, config, part.split, error) from error
        yield value


def _fault(path: str, config: str, split: str, error: Exception) -> UserError:
    """Say what was not found, what there is, and how to choose it."""
    text = " ".join(str(error).split()) or type(error).__name__
    choices = _CHOICES.search(text)
    names = ", ".join(map(str, _literal(choices[0]))) if choices else ""
    if names and ("Config name is missing" in text or "BuilderConfig" in text):
        what = f"has no configuration {config!r}" if config else "has several configurations"
        return UserError(f"data set {path!r} {what}: choose one of {names} with --task.config"[:MAX_SHOWN])
    if names and ("Unknown split" in text or "Bad split" in text):
        return UserError(
            f"data set {path!r} has no split {split!r}: choose one of {names} with --task.split"[:MAX_SHOWN]
        )
    where = (
        f"{path!r}" + (f", configuration {config!r}" if config else "") + (f", split {split!r}" * bool(split))
    )
    return UserError(f"data set {where}: could not be loaded from the hub ({text[:MAX_SHOWN]})")


def _literal(text: str) -> list[Any]:
    try:
        return list(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return [text.strip("[]")]
