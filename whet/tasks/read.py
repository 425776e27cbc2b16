"""Reads rows of untrusted data files, and splits problems by content."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import math
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from whet.config import counted
from whet.install import install_command
from whet.types import Problem, UserError

Row = dict[str, Any]
Split = Literal["train", "dev", "test"]
Check = Callable[[Row], Any]
"""Returns what is wrong with a row as text; None keeps the row, anything else is kept in its place."""

MAX_LINE_BYTES = 16 * 2**20
MAX_RAW = 2000
ROOM = 256 * 2**20
"""Bytes that a small compressed file may become; a larger one `MOST_PACKED` times its own."""
MOST_PACKED = 200
ROW_BYTES = 64
"""Of a row in memory, at least."""
FILES_AT_ONCE = 16
"""Rows of a parquet file with a binary column, such as images, that are made into Python's objects together."""
DEV_PERCENT = TEST_PERCENT = 5
FEW_HELD_OUT, HOLDS_MORE = 50, 20.0
"""Fewer rows to test on are said to be few, and the share in percent that is proposed then."""
CSV = (".csv", ".tsv")
SHEETS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")
ENDINGS = (".jsonl", ".jsonl.gz", ".json", *CSV, ".parquet")


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
    path: str | Path,
    *,
    required: Sequence[str],
    max_bad_rows: int | None = 0,
    check: Check | None = None,
    max_rows: int = 0,
) -> tuple[list[tuple[int, Any]], list[BadRow]]:
    """Read a JSON-lines file (.gz too); blank lines are skipped, bad rows are set aside up to a limit.

    Args:
        path: The file.
        required: Fields that must hold text that is not blank.
        max_bad_rows: How many bad rows are tolerated; None: none, and the caller has no option that allows any.
        check: Further conditions; called on rows that have the required fields.
        max_rows: Rows to read, from the front; 0 reads all.

    Returns:
        (1-based line number, row) of the good rows, and the bad rows.

    Raises:
        UserError: If the file cannot be read, has no rows, or too many bad ones (the first is named).
    """
    path = Path(path)
    rows = ((f"{path.name} line {number}", number, _parse(line), line) for number, line in _lines(path))
    return sift(path.name, rows, required, max_bad_rows, check, max_rows)


def read_json_array(
    path: str | Path,
    *,
    required: Sequence[str],
    max_bad_rows: int | None = 0,
    check: Check | None = None,
    max_rows: int = 0,
) -> tuple[list[tuple[int, Any]], list[BadRow]]:
    """Read a file that is one JSON array; otherwise as `read_jsonl`, with row numbers for line numbers."""
    path = Path(path)
    try:
        values = json.loads(b"".join(line for _, line in _lines(path)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path.name}: not JSON ({error})") from error
    if not isinstance(values, list):
        raise UserError(f"{path.name}: expected a JSON array of rows, got {kind_of(values)}")
    numbered = enumerate(values, 1)
    rows = ((f"{path.name} row {number}", number, as_row(value), value) for number, value in numbered)
    return sift(path.name, rows, required, max_bad_rows, check, max_rows)


def read_csv(
    path: str | Path,
    *,
    required: Sequence[str],
    max_bad_rows: int | None = 0,
    check: Check | None = None,
    max_rows: int = 0,
) -> tuple[list[tuple[int, Any]], list[BadRow]]:
    """Read a CSV file with a line of column names; otherwise as `read_jsonl`, with row numbers for line numbers.

    Columns are parted by what the line of names has most of: commas, semicolons (as spreadsheets write where the comma
    is decimal), or tabs; or by what a line `sep=;` before it says. Rows without any text are skipped.
    """
    path = Path(path)

    def rows() -> Iterator[tuple[str, int, Row | str | None, Any]]:
        try:
            for number, row in enumerate(_csv_rows(path), 1):
                if not any("".join(part or ()) for part in row.values()):  # a spreadsheet's last rows: `;;`
                    continue
                whole = None not in row and None not in row.values()
                fault = "not as many fields as columns"
                yield f"{path.name} row {number}", number, row if whole else fault, row
        except UnicodeDecodeError as error:
            raise _no_utf8(path, error) from error
        except csv.Error as error:
            raise UserError(f"{path.name}: not CSV ({error}); save the file as CSV in UTF-8") from error

    return sift(path.name, rows(), required, max_bad_rows, check, max_rows)


_CODE_PAGES = ("cp932", "gbk", "cp949", "cp1251", "cp1253", "cp1252", "cp1250", "cp1254")
"""What Windows writes: Japanese, Chinese, Korean; Cyrillic, Greek; Western, Central European, Turkish."""
_ASIAN, _LATIN = _CODE_PAGES[:3], _CODE_PAGES[5:]
_SUITS = re.compile(
    r"[^\W\d_¹²³\uff61-\uff9f\uffa0-\uffdf]|(?<!\w)[¿¡]|(?<=m)[²³](?!\w)|[«»„“”‘’‚‹›–—…•€£°º№¼½¾×÷·\u00a0\u3000-\u303f\uff00-\uff60]"
)
"""Letters, and marks in their places; Polish read as Western has others inside words: `Pawe³`."""


def _no_utf8(path: Path, error: UnicodeDecodeError) -> UserError:
    """Return the error for another encoding, which is not guessed: any bytes are letters in some code page.

    It shows a word as the likeliest code page has it, and as up to two others have it.
    """
    sample = b"".join(islice((line for _, line in _lines(path) if not line.isascii()), 1000))
    pages = _likely_pages(sample)
    words = re.findall(rb"[^\s;,.:\"]{0,20}[\x80-\xff][^\s;,.:\"]{0,20}", sample)
    read = {page: [word.decode(page, "replace") for word in words] for page in pages}
    longest = sorted(range(len(words)), key=lambda at: -len(words[at]))[:100]
    shown = max(longest, key=lambda at: len({read[page][at] for page in pages}))
    first, *others = pages
    other = ", ".join(f"{page}: {read[page][shown]!r}" for page in others if read[page] != read[first])
    new = path.with_name(f"{path.stem}-utf8{path.suffix}")
    return UserError(
        f"{path.name}: not CSV in UTF-8 ({error}); save the file as UTF-8, or, if {read[first][shown]!r} is right"
        f"{f' ({other})' if other else ''}: "
        f"iconv -f {first} -t utf-8 {shlex.quote(str(path))} > {shlex.quote(str(new))}"
    )


def _likely_pages(sample: bytes) -> list[str]:
    """Return up to three code pages in which most characters beyond ASCII are letters, the likeliest first.

    Accents stand alone in Latin words, and whole words of other scripts are beyond ASCII.
    """
    runs = re.findall(rb"[\x80-\xff]+", sample)
    is_latin = sum(map(len, runs)) < 2.5 * len(runs)

    def share(page: str) -> float:
        try:
            text = sample.decode(page)
        except UnicodeDecodeError:
            return 0.0
        suit = sum(not match.group().isascii() for match in _SUITS.finditer(text))
        return suit / sum(not char.isascii() for char in text)

    found = {page: share(page) for page in (_LATIN if is_latin else _CODE_PAGES[:5])}
    if any(found.get(page, 0) > 0.9 for page in _ASIAN):  # other bytes hardly ever make whole pairs
        found = {page: value for page, value in found.items() if page in _ASIAN}
    return sorted((page for page in found if found[page]), key=lambda page: -round(found[page], 1))[:3] or [
        "cp1252"
    ]


def _csv_rows(path: Path) -> Iterable[dict[str | Any, Any]]:
    csv.field_size_limit(MAX_LINE_BYTES)  # of the whole process; a data URI is longer than the default
    lines = (line.decode("utf-8") for _, line in _lines(path))
    names, delimiter = _header(lines)
    first = next(lines, "")
    num_named, num_fields = (
        len(list(filter(str.strip, next(csv.reader([line], delimiter=mark), []))))
        for line, mark in (
            (names, delimiter),
            (first, _delimiter(first) if delimiter not in names else delimiter),
        )
    )
    if 2 * num_named < num_fields and names.count('"') % 2 == 0:  # else the names go on in the next line
        raise UserError(
            f"{path.name}: line 1 is no line of column names: {counted(num_named, 'name')} for {num_fields} columns; "
            "delete what stands above the names, and quote fields that hold what parts the columns"
        )
    return csv.DictReader(chain([names, first], lines), strict=True, delimiter=delimiter)


def _header(lines: Iterator[str]) -> tuple[str, str]:
    """Return the line of column names, and what parts the columns; a line `sep=;` before it is Excel's."""
    names = next(lines, "")
    if said := re.fullmatch(r"sep=(.)\s*", names):
        return next(lines, ""), said[1]
    return names, _delimiter(names)


def _delimiter(names: str) -> str:
    return max(",;\t", key=names.count)


def has_semicolons(path: Path) -> bool:
    """Say whether a file is CSV whose columns are parted by semicolons."""
    return path.suffix.lower() in CSV and _header(line.decode("utf-8") for _, line in _lines(path))[1] == ";"


def read_parquet(
    path: str | Path,
    *,
    required: Sequence[str],
    max_bad_rows: int | None = 0,
    check: Check | None = None,
    max_rows: int = 0,
) -> tuple[list[tuple[int, Any]], list[BadRow]]:
    """Read a parquet file; otherwise as `read_jsonl`, with row numbers for line numbers.

    Raises:
        UserError: If pyarrow is missing, or for the reasons of `read_jsonl`.
    """
    path = Path(path)
    numbered = enumerate(_parquet_rows(path), 1)
    rows = ((f"{path.name} row {n}", n, row, row if isinstance(row, dict) else b"") for n, row in numbered)
    return sift(path.name, rows, required, max_bad_rows, check, max_rows)


def _parquet_rows(path: Path) -> Iterator[Row | str]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{path.name}: to read parquet files, {install_command('parquet')}") from error
    room = max(ROOM, MOST_PACKED * path.stat().st_size) if path.is_file() else ROOM
    number = num_bytes = 0
    try:
        # Without pre_buffer=False it would read ahead without end. Dictionaries stay such: a file of 20 kB can name one
        # long text a million times.
        options: dict[str, Any] = {"buffer_size": 2**20, "pre_buffer": False}
        with ParquetFile(path, **options) as file:
            dictionaries, most = _check_parquet(path.name, file.metadata, room)
            plain = file.schema_arrow.remove_metadata()
        with ParquetFile(path, read_dictionary=dictionaries, **options) as file:
            convert = shortened(file.schema_arrow)
            holds_files = "binary" in str(file.schema_arrow)
            for batch in file.iter_batches(batch_size=min(FILES_AT_ONCE if holds_files else 1000, most)):
                num_bytes += (now := _num_bytes(batch))
                if now > MAX_LINE_BYTES:
                    sizes = (_num_bytes(batch.slice(i, 1)) for i in range(batch.num_rows))
                    long = next((n for n, size in enumerate(sizes, 1) if size > MAX_LINE_BYTES), None)
                    if long is not None:
                        raise UserError(
                            f"{path.name} row {number + long}: longer than {MAX_LINE_BYTES:,} bytes; split it"
                        )
                if num_bytes > room:
                    raise _bomb(path.name, f"over {room:,} bytes of rows")
                number += batch.num_rows
                # To Python's objects, dictionaries go by one scalar at a time.
                batch = batch.cast(plain) if dictionaries else batch
                try:
                    yield from map(convert, batch.to_pylist())
                except UnicodeDecodeError:
                    rows = (_parquet_row(batch.slice(i, 1)) for i in range(batch.num_rows))
                    yield from (row if isinstance(row, str) else convert(row) for row in rows)
    except (ArrowException, OSError) as error:
        text = str(error).splitlines()[0][:160]
        raise UserError(f"{path.name}: not a parquet file that can be read ({text})") from error


def _bomb(name: str, what: str) -> UserError:
    return UserError(
        f"{name}: holds {what} in a file of so few bytes; write it again without such compression"
    )


def _check_parquet(name: str, metadata: Any, room: int) -> tuple[list[str], int]:
    """Look at what the file says of its size.

    Returns:
        The columns of text that may grow beyond measure, to be read as dictionaries, and the rows to read together.

    Raises:
        UserError: If a column becomes implausibly large.
    """
    if metadata.num_rows * ROW_BYTES > room:
        raise _bomb(name, f"{metadata.num_rows:,} rows")
    dictionaries, most = set(), sys.maxsize
    for group in range(metadata.num_row_groups):
        for place in range(metadata.num_columns):
            chunk, kind = metadata.row_group(group).column(place), metadata.schema.column(place)
            width = kind.length if kind.physical_type == "FIXED_LEN_BYTE_ARRAY" else 8
            if max(chunk.total_uncompressed_size, chunk.num_values * width) > room:
                raise _bomb(name, f"column {kind.path[:60]!r} of over {room:,} bytes")
            # Short enough if each value were the whole column.
            if kind.physical_type != "BYTE_ARRAY" or chunk.num_values * chunk.total_uncompressed_size <= ROOM:
                continue
            if (
                "DELTA_BYTE_ARRAY" in chunk.encodings
            ):  # values share what they begin with: each may be as long
                most = min(most, max(1, ROOM // chunk.total_uncompressed_size))
            else:
                dictionaries.add(kind.path)
    return sorted(dictionaries), most


def _num_bytes(value: Any) -> int:
    """Return the bytes of an Arrow batch or array once its rows stand by themselves."""
    from pyarrow import compute, types

    if not hasattr(value, "type"):
        return sum(map(_num_bytes, value.columns))
    if types.is_dictionary(value.type):
        if not len(value) or not hasattr(value.dictionary, "buffers"):
            return 0
        functions: Any = compute  # they are made as the module is imported
        lengths = functions.binary_length(value.dictionary)
        return (functions.sum(lengths.take(value.indices)).as_py() or 0) + 8 * len(value)
    if types.is_struct(value.type):
        return sum(map(_num_bytes, value.flatten()))
    if types.is_list(value.type) or types.is_large_list(value.type) or types.is_fixed_size_list(value.type):
        return _num_bytes(value.flatten()) + 8 * len(value)
    return value.nbytes


def shortened(schema: Any) -> Callable[[Any], Any]:
    """Return what makes a row of an Arrow schema's single-precision numbers the ones that are meant: 0.1, which is
    stored as 0.10000000149011612, is the shortest text that reads back as the same number."""
    fields = {name: change for name in schema.names if (change := _shortened(schema.field(name).type))}
    if not fields:
        return lambda row: row
    return lambda row: {name: fields[name](value) if name in fields else value for name, value in row.items()}


def _shortened(kind: Any) -> Callable[[Any], Any] | None:
    import numpy as np  # not for files without such columns
    from pyarrow import types

    if types.is_float32(kind) or types.is_float16(kind):
        single = np.float32 if types.is_float32(kind) else np.float16
        return lambda value: None if value is None else float(str(single(value)))
    if types.is_struct(kind):
        fields = {
            name: change
            for n in range(kind.num_fields)
            if (name := kind.field(n).name) and (change := _shortened(kind.field(n).type))
        }
        return (
            (
                lambda row: (
                    None
                    if row is None
                    else {
                        name: fields[name](value) if name in fields else value for name, value in row.items()
                    }
                )
            )
            if fields
            else None
        )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _shortened(kind.value_type)
        return (
            (lambda values: None if values is None else [inner(value) for value in values]) if inner else None
        )
    if types.is_map(kind) and (item := _shortened(kind.item_type)):
        return lambda pairs: None if pairs is None else [(key, item(value)) for key, value in pairs]
    return None


def _parquet_row(batch: Any) -> Row | str:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start})"


def read_file(
    path: Path,
    *,
    required: Sequence[str],
    max_bad_rows: int | None = 0,
    check: Check | None = None,
    max_rows: int = 0,
) -> tuple[list[tuple[int, Any]], list[BadRow]]:
    """Read a file by its ending: .parquet, .csv, .tsv, .json (one array, or lines), else JSON lines."""
    refuse_kind(path)
    suffix = path.suffix.lower()
    read = read_csv if suffix in CSV else read_parquet if suffix == ".parquet" else read_jsonl
    if _is_array(path):
        read = read_json_array
    return read(path, required=required, max_bad_rows=max_bad_rows, check=check, max_rows=max_rows)


def refuse_kind(path: Path) -> None:
    """Refuse a file that holds no rows of a kind that is read here, by its ending.

    Raises:
        UserError: With what to save instead.
    """
    suffix, name = path.suffix.lower(), path.name
    if suffix in SHEETS:
        raise UserError(f"{name}: a spreadsheet, which is not read; save it as CSV in UTF-8")
    if name.lower().endswith(ENDINGS) or not path.is_file():
        return
    begun = next((text for _, line in _lines(path) if (text := line.strip())), b"{")
    if begun[:1] != b"{":
        raise UserError(
            f"{name}: not rows; expected {', '.join(ENDINGS)} (plain text to learn: one JSON object a line, as in "
            '{"text": "..."})'
        )


def first_row(path: Path) -> Row:
    """Return the first object with a name in it of a file that `read_file` reads; {} if there is none."""
    if path.suffix.lower() in CSV:
        try:
            return next(iter(_csv_rows(path)), {})
        except UnicodeDecodeError as error:  # before a column is asked for whose name nobody can read
            raise _no_utf8(path, error) from error
        except csv.Error:  # reading it says what is wrong
            return {}
    if _is_array(path):
        found, _ = read_json_array(path, required=[], max_bad_rows=sys.maxsize)
        return next((row for _, row in found if row), {})
    is_parquet = path.suffix.lower() == ".parquet"
    rows = _parquet_rows(path) if is_parquet else (_parse(line) for _, line in _lines(path))
    return next((row for row in rows if isinstance(row, dict) and row), {})


def _is_array(path: Path) -> bool:
    """Say whether a .json file is one array, and not JSON lines."""
    first = (
        next((text for _, line in _lines(path) if (text := line.lstrip())), b"")
        if path.suffix.lower() == ".json"
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


def select_split(
    problems: Iterable[Problem], split: str, *, dev_percent: float = DEV_PERCENT, test_percent: float = 0
) -> list[Problem]:
    """Keep the problems of a split; equal prompts stay together."""
    check_split(split)
    uids = ((problem, problem.meta.get("prompt_uid", problem.uid)) for problem in problems)
    return [
        problem
        for problem, uid in uids
        if split_of(uid, dev_percent=dev_percent, test_percent=test_percent) == split
    ]


def select_files(
    path: Path,
    split: str,
    load: Callable[[Path], list[Problem]],
    endings: Sequence[str] = ENDINGS,
    *,
    name: str = "",
    percent: float = TEST_PERCENT,
) -> list[Problem]:
    """Return a split of a file or of a folder.

    Args:
        path: File, or folder with a train and a test file; a parquet file may be sharded
            (`train-00000-of-00002.parquet`).
        split: 'train', 'dev' or 'test'.
        load: Returns the problems of a file.
        endings: Endings of the files to look for in a folder, best first.
        name: Name of the data set, with which its files may begin (`math500_test.json`).
        percent: Share of 'dev', and of 'test' where a file is divided; a folder has a test file of its own.

    Raises:
        UserError: If the folder has no such file.
    """
    check_split(split)
    if path.is_file():
        return select_split(load(path), split, dev_percent=percent, test_percent=percent)
    part = "test" if split == "test" else "train"
    names = [f"{begin}{part}{end}" for begin in ("", *([f"{name}_"] * bool(name))) for end in endings]
    files = [path / name for name in names if (path / name).is_file()][:1]
    files = files or sorted(path.glob(f"{part}-*-of-*.parquet"))
    if not files:
        raise UserError(f"{path}: no {part}{endings[0]} there; check --task.path")
    unique = {problem.uid: problem for file in reversed(files) for problem in reversed(load(file))}
    problems = list(reversed(unique.values()))  # of a row that is in two shards, the first is kept
    return problems if split == "test" else select_split(problems, split, dev_percent=percent)


def division(source: str, problems: Sequence[Problem], percent: float) -> str:
    """Return a line about how many rows of one file are kept from training.

    Args:
        source: Name of the file.
        problems: All of its problems.
        percent: Share of 'dev', and of 'test'.
    """
    dev, test = (
        len(select_split(problems, split, dev_percent=percent, test_percent=percent))
        for split in ("dev", "test")
    )
    few = "too few to show a difference; " if test < FEW_HELD_OUT else ""
    more = "" if percent >= HOLDS_MORE else f" ({few}--task.held-out {HOLDS_MORE / 100:g} holds out more)"
    return (
        f"{source}: {len(problems) - dev - test:,} of {len(problems):,} rows are trained on, {dev:,} held out for "
        f"validation, {test:,} for testing{more}"
    )


def check_split(split: str) -> None:
    """Refuse a name that is not a split."""
    if split not in ("train", "dev", "test"):
        raise UserError(f"split {split!r}: expected train, dev or test")


def is_hub_name(path: str) -> bool:
    """Say whether a path is, by its form, the name of a data set on the hub, and no file or folder.

    A name that ends as files of data do is a file that is not there.
    """
    return (
        not Path(path).exists()
        and not path.endswith(ENDINGS)
        and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers and lines in UTF-8, of bounded length, without a byte order mark."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            number = total = 0
            most = max(ROOM, MOST_PACKED * path.stat().st_size)
            # Spreadsheets save "Unicode text" so, and say it with a mark.
            is_wide = file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            text = io.TextIOWrapper(file, "utf-16", newline="\n") if is_wide else None
            while (
                line := text.readline(MAX_LINE_BYTES + 1).encode()
                if text
                else file.readline(MAX_LINE_BYTES + 1)
            ):
                number, total = number + 1, total + len(line) + ROW_BYTES
                if total > most and path.suffix == ".gz":
                    raise _bomb(path.name, f"over {most:,} bytes of lines")
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(
                        f"{path.name} line {number}: longer than {MAX_LINE_BYTES:,} bytes; split it"
                    )
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except UnicodeError as error:
        raise UserError(
            f"{path.name}: not UTF-16, as its mark says ({error}); save the file as UTF-8"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path.name}: not a complete gzip file ({error}); create it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check --task.path") from error


def _parse(line: bytes) -> Row | str | None:
    """Turn a line into a row, a reason why not, or None for a blank one."""
    if not line.strip():
        return None
    try:
        return as_row(json.loads(line.decode("utf-8").rstrip()))
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start})"
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg} at column {error.colno})"
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
        return f"not JSON that can be read ({type(error).__name__})"


def as_row(value: Any) -> Row | str:
    """Return an object as a row, or what it is instead."""
    return dict(value) if isinstance(value, Mapping) else f"expected an object {{...}}, got {kind_of(value)}"


def kind_of(value: Any) -> str:
    """Say in words what a JSON value is."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    names = {"str": "text", "int": "a number", "float": "a number", "list": "a list", "dict": "an object"}
    return names.get(type(value).__name__, type(value).__name__)


def is_number(value: Any) -> bool:
    """Say whether a value is a number that can stand for its text: not a truth value, not NaN."""
    if isinstance(value, float):
        return math.isfinite(value)
    # Also beyond the floats, up to the length that Python still writes out (4,300 digits).
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 14_000


def as_text(value: Any) -> str:
    """Return text, or a number as people write it: 53, not 53.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def text_fault(row: Row, name: str) -> str | None:
    """Return why a field is not clean, non-blank text; None if it is."""
    if name not in row:
        return f"no {name!r}"
    value = row[name]
    if not isinstance(value, str):
        return f"{name!r} is {kind_of(value)}, expected text"
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


def sift(
    source: str,
    rows: Iterable[tuple[str, int, Row | str | None, Any]],
    required: Sequence[str],
    max_bad_rows: int | None,
    check: Check | None,
    max_rows: int = 0,
) -> tuple[list[tuple[int, Any]], list[BadRow]]:
    """Separate good rows from bad ones; all are read before an error, so that it can say how many to allow.

    Args:
        source: Name of the data.
        rows: Where each row stands, its number, the row (or what is wrong with it, or None for a blank line), and its
            raw form.
        required: Fields that must hold text that is not blank.
        max_bad_rows: How many bad rows are tolerated; None: none, and the caller has no option that allows any.
        check: Further conditions.
        max_rows: Rows to read, from the front; 0 reads all.

    Returns:
        The good and the bad rows, as `read_jsonl` does.
    """
    good: list[tuple[int, Any]] = []
    bad: list[BadRow] = []
    allowed = max_bad_rows or 0
    for where, number, row, raw in rows:
        if row is None:
            continue
        reason = row if isinstance(row, str) else _first_fault(row, required)
        if reason is None and check is not None and not isinstance(row, str):
            found = check(row)
            reason, row = (found, row) if isinstance(found, str) else (None, row if found is None else found)
        if reason is not None:
            bad.append(BadRow(where, reason, number, as_raw(raw) if len(bad) < allowed else ""))
        else:
            good.append((number, row))
        if max_rows and len(good) + len(bad) >= max_rows:
            break
    if len(bad) > allowed:
        more = f" (and {len(bad) - 1} more bad row{'s' * (len(bad) != 2)})" if len(bad) > 1 else ""
        what, them = ("rows", "them") if more else ("row", "it")
        remedy = f"fix the {what}"
        if max_bad_rows is not None:
            remedy += f" or allow {them} with --task.max-bad-rows {len(bad)}"
        if more and not good:  # with all of them allowed, nothing would be left
            remedy = "no row is good; check the file's format and columns"
        raise UserError(f"{bad[0].where}: {bad[0].reason}{more}; {remedy}")
    if not good:
        raise UserError(f"{source}: no rows in it")
    return good, bad
