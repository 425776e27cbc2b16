"""Reads rows of untrusted data files, and splits problems by content."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from whet.types import Problem, UserError

Row = dict[str, Any]
Split = Literal["train", "dev", "test"]
Check = Callable[[Row], "str | None"]
"""Returns what is wrong with a row, or None."""

MAX_LINE_BYTES = 16 * 2**20
MAX_RAW = 2000
DEV_PERCENT = TEST_PERCENT = 5
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
HUB_CONFIGS = {"openai/gsm8k": "main"}  # data sets that need the name of a configuration


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was skipped.

    Attributes:
        where: File name and 1-based position, such as 'train.jsonl line 812'.
        reason: What is wrong with it.
        number: The position alone.
        raw: The first 2,000 characters of the line as it is in the file, or of the row as JSON.
    """

    where: str
    reason: str
    number: int = 0
    raw: str = ""


def read_jsonl(
    path: str | Path, *, required: Sequence[str], max_bad_rows: int = 0, check: Check | None = None
) -> tuple[list[tuple[int, Row]], list[BadRow]]:
    """Read a JSON-lines file (.gz too); blank lines are skipped, bad rows are set aside up to a limit.

    Args:
        path: The file.
        required: Fields that must hold text that is not blank.
        max_bad_rows: How many bad rows are tolerated.
        check: Further conditions; called on rows that have the required fields.

    Returns:
        (1-based line number, row) of the good rows, and the bad rows.

    Raises:
        UserError: If the file cannot be read, has no rows, or too many bad ones (the first is named).
    """
    path = Path(path)
    rows = ((f"{path.name} line {number}", number, _parse(line), line) for number, line in _lines(path))
    return _sift(path.name, rows, required, max_bad_rows, check)


def read_json_array(
    path: str | Path, *, required: Sequence[str], max_bad_rows: int = 0, check: Check | None = None
) -> tuple[list[tuple[int, Row]], list[BadRow]]:
    """Read a file that is one JSON array; otherwise as `read_jsonl`, with row numbers for line numbers."""
    path = Path(path)
    try:
        values = json.loads(b"".join(line for _, line in _lines(path)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path.name}: not JSON ({error})") from error
    if not isinstance(values, list):
        raise UserError(f"{path.name}: expected a JSON array of rows, got {_kind(values)}")
    numbered = enumerate(values, 1)
    rows = ((f"{path.name} row {number}", number, _object(value), value) for number, value in numbered)
    return _sift(path.name, rows, required, max_bad_rows, check)


def read_csv(
    path: str | Path, *, required: Sequence[str], max_bad_rows: int = 0, check: Check | None = None
) -> tuple[list[tuple[int, Row]], list[BadRow]]:
    """Read a CSV file with a line of column names; otherwise as `read_jsonl`, with row numbers for line numbers."""
    path = Path(path)

    def rows() -> Iterator[tuple[str, int, Row | str | None, Any]]:
        try:
            lines = (line.decode("utf-8") for _, line in _lines(path))
            for number, row in enumerate(csv.DictReader(lines, strict=True), 1):
                whole = None not in row and None not in row.values()
                fault = "not as many fields as columns"
                yield f"{path.name} row {number}", number, row if whole else fault, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path.name}: not CSV in UTF-8 ({error})") from error

    return _sift(path.name, rows(), required, max_bad_rows, check)


def read_parquet(
    path: str | Path, *, required: Sequence[str], max_bad_rows: int = 0, check: Check | None = None
) -> tuple[list[tuple[int, Row]], list[BadRow]]:
    """Read a parquet file; otherwise as `read_jsonl`, with row numbers for line numbers.

    Raises:
        UserError: If pyarrow is missing, or for the reasons of `read_jsonl`.
    """
    path = Path(path)
    numbered = enumerate(_parquet_rows(path), 1)
    rows = ((f"{path.name} row {n}", n, row, row if isinstance(row, dict) else b"") for n, row in numbered)
    return _sift(path.name, rows, required, max_bad_rows, check)


def _parquet_rows(path: Path) -> Iterator[Row | str]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{path.name}: to read parquet files, pip install 'whet[parquet]'") from error
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                try:
                    yield from batch.to_pylist()
                except UnicodeDecodeError:
                    yield from map(_parquet_row, (batch.slice(i, 1) for i in range(batch.num_rows)))
    except (ArrowException, OSError) as error:
        text = str(error).splitlines()[0][:160]
        raise UserError(f"{path.name}: not a parquet file that can be read ({text})") from error


def _parquet_row(batch: Any) -> Row | str:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start})"


def read_file(
    path: Path, *, required: Sequence[str], max_bad_rows: int = 0, check: Check | None = None
) -> tuple[list[tuple[int, Row]], list[BadRow]]:
    """Read a file by its ending: .parquet, .csv, .json (one array, or lines), else JSON lines."""
    read = {".parquet": read_parquet, ".csv": read_csv}.get(path.suffix, read_jsonl)
    if _is_array(path):
        read = read_json_array
    return read(path, required=required, max_bad_rows=max_bad_rows, check=check)


def read_hub(
    name: str, split: str, *, required: Sequence[str], max_bad_rows: int = 0, check: Check | None = None
) -> tuple[list[tuple[int, Row]], list[BadRow]]:
    """Read a split of a hub data set with the `datasets` package; otherwise as `read_jsonl`.

    Raises:
        UserError: If the package is missing or the data set cannot be loaded.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        message = f"data set {name!r}: no such folder; to read it from the hub, pip install 'whet[hf]'"
        raise UserError(message) from error
    try:
        values: Iterable[Any] = datasets.load_dataset(name, HUB_CONFIGS.get(name), split=split)
    except Exception as error:  # network errors of many libraries
        text = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise UserError(
            f"data set {name!r}, split {split!r}: could not be loaded from the hub ({text})"
        ) from error
    rows = (
        (f"{name} {split} row {number}", number, _object(value), value)
        for number, value in enumerate(values, 1)
    )
    return _sift(f"{name} {split}", rows, required, max_bad_rows, check)


def first_row(path: Path) -> Row:
    """Return the first object of a file that `read_file` reads; {} if there is none."""
    if path.suffix == ".csv":
        lines = (line.decode("utf-8", errors="replace") for _, line in _lines(path))
        return next(iter(csv.DictReader(lines)), {})
    if _is_array(path):
        return next((row for _, row in read_json_array(path, required=[], max_bad_rows=sys.maxsize)[0]), {})
    rows = _parquet_rows(path) if path.suffix == ".parquet" else (_parse(line) for _, line in _lines(path))
    return next((row for row in rows if isinstance(row, dict)), {})


def _is_array(path: Path) -> bool:
    """Say whether a .json file is one array, and not JSON lines."""
    first = (
        next((text for _, line in _lines(path) if (text := line.lstrip())), b"")
        if path.suffix == ".json"
        else b""
    )
    return first[:1] == b"["


def split_of(uid: str, *, dev_percent: float, test_percent: float) -> Split:
    """Assign a problem to a split by hash, so that it does not depend on the other rows.

    Args:
        uid: Uid of the problem.
        dev_percent: Share of 'dev', 0 to 100.
        test_percent: Share of 'test', 0 to 100.

    Returns:
        The split.
    """
    place = int(hashlib.sha256(f"split\x00{uid}".encode()).hexdigest()[:8], 16) / 2**32 * 100
    if place < test_percent:
        return "test"
    return "dev" if place < test_percent + dev_percent else "train"


def select_split(problems: Iterable[Problem], split: str, *, test_percent: float = 0) -> list[Problem]:
    """Keep the problems of a split; `DEV_PERCENT` of all are 'dev'; equal prompts stay together."""
    check_split(split)
    uids = ((problem, problem.meta.get("prompt_uid", problem.uid)) for problem in problems)
    return [
        problem
        for problem, uid in uids
        if split_of(uid, dev_percent=DEV_PERCENT, test_percent=test_percent) == split
    ]


def select_files(
    path: Path, split: str, load: Callable[[Path], list[Problem]], endings: Sequence[str] = ENDINGS
) -> list[Problem]:
    """Return a split of a file (5 % 'dev', 5 % 'test') or of a folder ('dev' is 5 % of its train file).

    Args:
        path: File, or folder with a train and a test file; a parquet file may be sharded
            (`train-00000-of-00002.parquet`).
        split: 'train', 'dev' or 'test'.
        load: Returns the problems of a file.
        endings: Endings of the files to look for in a folder, best first.

    Raises:
        UserError: If the folder has no such file.
    """
    check_split(split)
    if path.is_file():
        return select_split(load(path), split, test_percent=TEST_PERCENT)
    part = "test" if split == "test" else "train"
    files = [file for end in endings if (file := path / f"{part}{end}").is_file()][:1]
    files = files or sorted(path.glob(f"{part}-*-of-*.parquet"))
    if not files:
        raise UserError(f"{path}: no {part}{endings[0]} there; check --task.path")
    unique = {problem.uid: problem for file in reversed(files) for problem in reversed(load(file))}
    problems = list(reversed(unique.values()))  # of a row that is in two shards, the first is kept
    return problems if split == "test" else select_split(problems, split)


def check_split(split: str) -> None:
    """Refuse a name that is not a split."""
    if split not in ("train", "dev", "test"):
        raise UserError(f"split {split!r}: expected train, dev or test")


def check_path(path: str, example: str) -> None:
    """Refuse a path that is neither a folder nor, by its form, a hub name."""
    if not Path(path).is_dir() and not _is_hub_name(path):
        raise UserError(
            f"{path!r}: no such folder, and not a hub name such as {example!r}; check --task.path"
        )


def read_part(
    path: str,
    part: str,
    *,
    names: Sequence[str],
    required: Sequence[str],
    max_bad_rows: int = 0,
    check: Check | None = None,
) -> tuple[str, list[tuple[int, Row]], list[BadRow]]:
    """Read 'train' or 'test' of a data set in a folder or on the hub; otherwise as `read_jsonl`.

    Args:
        path: Folder or hub name.
        part: 'train' or 'test'.
        names: File names to look for in a folder, best first; .json is read as one array.
        required: Fields that must hold text that is not blank.
        max_bad_rows: How many bad rows are tolerated.
        check: Further conditions.

    Returns:
        Name of the source, then the good and the bad rows.
    """
    if _is_hub_name(path):
        rows, bad = read_hub(path, part, required=required, max_bad_rows=max_bad_rows, check=check)
        return path, rows, bad
    files = [Path(path) / f"{name}{end}" for name in names for end in ("", ".gz")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise UserError(f"{path}: no {' or '.join(names)} there; check --task.path")
    read = read_json_array if ".json" in file.suffixes else read_jsonl
    return file.name, *read(file, required=required, max_bad_rows=max_bad_rows, check=check)


def _is_hub_name(path: str) -> bool:
    return (
        not Path(path).exists() and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers and lines, of bounded length, without a byte order mark."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(
                        f"{path.name} line {number}: longer than {MAX_LINE_BYTES:,} bytes; split it"
                    )
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path.name}: not a complete gzip file ({error}); create it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check --task.path") from error


def _parse(line: bytes) -> Row | str | None:
    """Turn a line into a row, a reason why not, or None for a blank one."""
    if not line.strip():
        return None
    try:
        return _object(json.loads(line.decode("utf-8").rstrip()))
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start})"
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg} at column {error.colno})"
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
        return f"not JSON that can be read ({type(error).__name__})"


def _object(value: Any) -> Row | str:
    return dict(value) if isinstance(value, Mapping) else f"expected an object {{...}}, got {_kind(value)}"


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {"str": "text", "int": "a number", "float": "a number", "list": "a list", "dict": "an object"}
    return names.get(type(value).__name__, type(value).__name__)


def text_fault(row: Row, name: str) -> str | None:
    """Return why a field is not clean, non-blank text; None if it is."""
    if name not in row:
        return f"no {name!r}"
    value = row[name]
    if not isinstance(value, str):
        return f"{name!r} is {_kind(value)}, expected text"
    if not value.strip():
        return f"{name!r} is empty"
    if "\x00" in value:
        return f"{name!r} contains a NUL character"
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        return f"{name!r} contains a lone surrogate"
    return None


def _first_fault(row: Row, required: Sequence[str]) -> str | None:
    faults = (text_fault(row, name) for name in required)
    return next((fault for fault in faults if fault), None)


def as_raw(value: Any) -> str:
    """Write a bad row as in the file, or as JSON, truncated to a readable length."""
    if isinstance(value, bytes):
        return value[: 4 * MAX_RAW].decode("utf-8", "backslashreplace").rstrip("\r\n")[:MAX_RAW]
    try:
        return json.dumps(value, default=str, skipkeys=True)[:MAX_RAW]
    except (ValueError, RecursionError):
        return ""


def _sift(
    source: str,
    rows: Iterable[tuple[str, int, Row | str | None, Any]],
    required: Sequence[str],
    max_bad_rows: int,
    check: Check | None,
) -> tuple[list[tuple[int, Row]], list[BadRow]]:
    """Separate good rows from bad ones; all are read before an error, so that it can say how many to allow."""
    good: list[tuple[int, Row]] = []
    bad: list[BadRow] = []
    for where, number, row, raw in rows:
        if row is None:
            continue
        reason = row if isinstance(row, str) else _first_fault(row, required)
        if reason is None and check is not None and not isinstance(row, str):
            reason = check(row)
        if reason is not None:
            bad.append(BadRow(where, reason, number, as_raw(raw) if len(bad) < max_bad_rows else ""))
        elif not isinstance(row, str):
            good.append((number, row))
    if len(bad) > max_bad_rows:
        more = f" (and {len(bad) - 1} more bad rows)" if len(bad) > 1 else ""
        remedy = "fix the rows or allow them" if more else "fix the row or allow it"
        raise UserError(
            f"{bad[0].where}: {bad[0].reason}{more}; {remedy} with --task.max-bad-rows {len(bad)}"
        )
    if not good:
        raise UserError(f"{source}: no rows; check --task.path")
    return good, bad
