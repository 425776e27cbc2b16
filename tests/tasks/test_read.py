"""Reading untrusted files: every message, and splits by content."""

from __future__ import annotations

import gzip
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from needs import needs

from whet.tasks import read
from whet.tasks.jsonl import Jsonl
from whet.tasks.read import (
    BadRow,
    first_row,
    has_semicolons,
    read_file,
    read_json_array,
    read_jsonl,
    split_of,
)
from whet.types import UserError

GOOD = b'{"q": "1+1", "a": "2"}'


def write(folder: Path, content: bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_rows_with_their_line_numbers(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + GOOD + b'\r\n\n  \n{"q": "x\xe2\x80\xa8y", "a": "3"}'
    rows, bad = read_jsonl(write(tmp_path, content), required=["q", "a"])
    assert rows == [(1, {"q": "1+1", "a": "2"}), (4, {"q": "x\u2028y", "a": "3"})]
    assert bad == []
    zipped = write(tmp_path, gzip.compress(content), "data.jsonl.gz")
    assert read_jsonl(zipped, required=["q", "a"])[0] == rows


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        (b"\xff{}", "not UTF-8 (byte 0)"),
        (b"[" * 100_000, "not JSON that can be read (RecursionError)"),
        (b'{"q": ' + b"9" * 5000 + b"}", "not JSON that can be read (ValueError)"),
        (b"[1]", "expected an object {...}, got a list"),
        (b'"text"', "expected an object {...}, got text"),
        (b"null", "expected an object {...}, got null"),
        (b'{"q": "x"}', "no 'a'"),
        (b'{"q": "x", "a": 2}', "'a' is a number, expected text"),
        (b'{"q": "x", "a": null}', "'a' is null, expected text"),
        (b'{"q": "x", "a": true}', "'a' is true, expected text"),
        (b'{"q": " \\n", "a": "2"}', "'q' is empty"),
        (b'{"q": "x\\u0000", "a": "2"}', "'q' contains a NUL character"),
        (b'{"q": "x\\ud800", "a": "2"}', "'q' contains a lone surrogate"),
        (b'{"q": "bad", "a": "2"}', "worse"),
    ],
)
def test_bad_row(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path, GOOD + b"\n\n" + line + b"\n" + GOOD + b"\n")
    options: dict[str, Any] = {
        "required": ["q", "a"],
        "check": lambda row: "worse" if row["q"] == "bad" else None,
    }
    with pytest.raises(UserError) as caught:
        read_jsonl(path, **options)
    assert str(caught.value) == (
        f"data.jsonl line 3: {reason}; fix the row or allow it with --task.max-bad-rows 1"
    )
    rows, bad = read_jsonl(path, max_bad_rows=1, **options)
    assert [number for number, _ in rows] == [1, 4]
    raw = line.decode("utf-8", "backslashreplace")[:2000]
    assert bad == [BadRow("data.jsonl line 3", reason, 3, raw)]


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, b"1\n" + GOOD + b"\n2\n3\n")
    with pytest.raises(UserError) as caught:
        read_jsonl(path, required=["q"], max_bad_rows=2)
    assert str(caught.value) == (
        "data.jsonl line 1: expected an object {...}, got a number (and 2 more bad rows); "
        "fix the rows or allow them with --task.max-bad-rows 3"
    )
    assert len(read_jsonl(path, required=["q"], max_bad_rows=3)[1]) == 3


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"data.jsonl: cannot be read \(No such file or directory\)"):
        read_jsonl(tmp_path / "data.jsonl", required=[])
    with pytest.raises(UserError, match="cannot be read"):
        read_jsonl(tmp_path, required=[])
    with pytest.raises(UserError, match="data.jsonl: no rows"):
        read_jsonl(write(tmp_path, b"\n"), required=[])
    for content in (GOOD, gzip.compress(GOOD * 99)[:-9]):
        with pytest.raises(UserError, match="cut.jsonl.gz: not a complete gzip file"):
            read_jsonl(write(tmp_path, content, "cut.jsonl.gz"), required=[])
    monkeypatch.setattr(read, "MAX_LINE_BYTES", 30)
    with pytest.raises(UserError, match="data.jsonl line 2: longer than 30 bytes"):
        read_jsonl(write(tmp_path, GOOD + b"\n" + GOOD * 2), required=[])


def test_json_array(tmp_path: Path) -> None:
    path = write(tmp_path, b'[{"q": "x"},\n 3]', "data.json")
    with pytest.raises(
        UserError, match="^data.json row 2: expected an object {...}, got a number; fix the row"
    ):
        read_json_array(path, required=["q"])
    assert read_json_array(path, required=["q"], max_bad_rows=1)[0] == [(1, {"q": "x"})]
    for content, message in (
        (b'{"q": "x"}', "expected a JSON array of rows, got an object"),
        (b"[", "not JSON"),
    ):
        with pytest.raises(UserError, match=message):
            read_json_array(write(tmp_path, content), required=["q"])


@pytest.mark.parametrize(
    ("name", "mark"), [("data.csv", ";"), ("data.csv", "\t"), ("data.tsv", "\t"), ("data.csv", ",")]
)
def test_columns_are_parted_as_the_first_line_has_it(name: str, mark: str, tmp_path: Path) -> None:
    lines = [["question", "answer"], ['"1,5; or\t2?"', '"1,5"'], ["b", "2"]]
    path = write(tmp_path, "".join(mark.join(line) + "\n" for line in lines).encode(), name)
    rows, bad = read_file(path, required=["question"])
    assert [row for _, row in rows] == [
        {"question": "1,5; or\t2?", "answer": "1,5"},
        {"question": "b", "answer": "2"},
    ]
    assert not bad
    assert first_row(path) == rows[0][1]


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
def test_spreadsheets_unicode_text_is_read_and_half_of_it_refused(order: str, tmp_path: Path) -> None:
    text = '\ufeffFrage\tLösung\r\n2 mal 3?\t6\r\n"in zwei\nZeilen"\t7 \u20ac\r\n'
    (tmp_path / "a.tsv").write_bytes(text.encode(order))
    rows, bad = read_file(tmp_path / "a.tsv", required=("Frage", "Lösung"))
    assert [row for _, row in rows] == [
        {"Frage": "2 mal 3?", "Lösung": "6"},
        {"Frage": "in zwei\nZeilen", "Lösung": "7 \u20ac"},
    ]
    assert not bad
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"a": "ü"}\n{"a": "2"}\n'.encode(order))
    assert [row for _, row in read_jsonl(tmp_path / "a.jsonl", required=("a",))[0]] == [
        {"a": "ü"},
        {"a": "2"},
    ]
    for name in ("a.tsv", "a.jsonl"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-1])
        with pytest.raises(
            UserError, match=f"{name}: not UTF-16, as its mark says .*; save the file as UTF-8"
        ):
            read_file(tmp_path / name, required=())


@needs("iconv")
@pytest.mark.parametrize(
    ("code", "text", "told"),
    [
        ("cp1252", "Änne hat 3 Nüsse, und es gibt 2 Äpfel für 1 €.", "if 'Nüsse' is right: iconv"),
        ("cp1252", "Le père a payé 3 € à Zoë.", "if 'père' is right (cp1250: 'pčre'): iconv"),
        (
            "cp1252",
            "¿Cuántos años tiene el niño? Doña Inés: 3 m³",
            "if '¿Cuántos' is right (cp1250: 'żCuántos'): iconv",
        ),
        ("cp1250", "Paweł ma 9 jabłek i książkę", "if 'książkę' is right (cp1252: 'ksi¹¿kê'"),
        ("cp1250", "Jabłko", "if 'Jabłko' is right: iconv"),
        ("cp1250", "Příklad: kolik je hrušek a třešní?", "if 'Pøíklad' is right (cp1250: 'Příklad'): iconv"),
        ("cp1254", "Ayşe'nin 9 elması var, ağaçta 5 kuş", 'cp1254: "Ayşe\'nin"'),
        ("cp1251", "У Пети 9 яблок, сколько осталось?", "if 'осталось?' is right: iconv"),
        ("cp1253", "Ο Γιάννης έχει 9 μήλα", "cp1253: 'Γιάννης'"),
        ("cp932", "りんごが九個あります。いくつ残りますか", "if 'りんごが九個あります"),
        ("gbk", "小明有九个苹果，还剩多少？", "小明有九个苹果"),
        ("cp949", "철수는 사과가 아홉 개 있다", "cp949: '철수는'"),
    ],
)
def test_a_file_of_a_code_page_is_shown_as_it_would_read(
    code: str, text: str, told: str, tmp_path: Path
) -> None:
    excel = write(tmp_path, f'Frage;Antwort\n"{text}";3\n'.encode(code), "aufgaben.csv")
    with pytest.raises(UserError, match="not CSV in UTF-8") as caught:
        first_row(excel)  # before columns are asked for
    assert told in str(caught.value)
    command = str(caught.value).rpartition(": ")[2]
    if f"-f {code} " in command:  # else the line names it beside the first
        assert subprocess.run(command, shell=True, check=False).returncode == 0
        assert first_row(tmp_path / "aufgaben-utf8.csv")["Frage"] == text


def test_a_code_page_far_down_and_bytes_of_no_text_are_one_line_too(tmp_path: Path) -> None:
    late = write(
        tmp_path, b"question;answer\n" + b"a;1\n" * 3000 + "książka;2\n".encode("cp1250"), "late.csv"
    )
    with pytest.raises(UserError, match="if 'książka' is right"):
        read_file(late, required=())
    noise = write(tmp_path, bytes(range(128, 256)) * 500 + b"\n", "noise.csv")
    with pytest.raises(UserError, match="not CSV in UTF-8") as caught:
        first_row(noise)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("above", ["sep=;\r\n", "\ufeffsep=;\n", ""])
def test_a_spreadsheets_csv_is_read_with_its_first_and_last_lines(above: str, tmp_path: Path) -> None:
    text = f"{above}question;answer;note\r\nHow many?;2,5;\r\n;;\r\n;;\r\n"
    path = write(tmp_path, text.encode(), "excel.csv")
    rows, bad = read_file(path, required=["question"])
    assert (rows, bad) == ([(1, {"question": "How many?", "answer": "2,5", "note": ""})], [])
    assert has_semicolons(path)
    commas = write(tmp_path, b"sep=,\nquestion;x,answer\nq,1\n", "commas.csv")
    assert read_file(commas, required=[])[0] == [(1, {"question;x": "q", "answer": "1"})]
    assert not has_semicolons(commas)


@pytest.mark.parametrize("title", ["Exercices 2026", "Exercices 2026;;", ";;"])
def test_a_title_above_the_column_names_is_no_column(title: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"{title}\nquestion;answer;level\nq, or r?;1,5;2\n".encode(), "titled.csv")
    with pytest.raises(
        UserError, match="titled.csv: line 1 is no line of column names: [01] names? for 3 columns"
    ):
        read_file(path, required=[])
    text = write(tmp_path, b'text\n"Well, yes, no, maybe"\n', "text.csv")  # one column, whose text has commas
    assert len(read_file(text, required=["text"])[0]) == 1


def test_csv(tmp_path: Path) -> None:
    path = write(tmp_path, b'\xef\xbb\xbfq,a\r\n"1,\n1",2\nx\n3,4\n', "data.csv")
    rows, bad = read_file(path, required=["q"], max_bad_rows=1)
    assert rows == [(1, {"q": "1,\n1", "a": "2"}), (3, {"q": "3", "a": "4"})]
    raw = '{"q": "x", "a": null}'
    assert bad == [BadRow("data.csv row 2", "not as many fields as columns", 2, raw)]
    with pytest.raises(UserError, match="data.csv: not CSV in UTF-8"):
        read_file(write(tmp_path, b"q\n\xff\n", "data.csv"), required=["q"])
    path = write(tmp_path, b"q\r,a\n1,2\n", "data.csv")
    assert first_row(path) == {}
    with pytest.raises(UserError, match="data.csv: not CSV"):
        read_file(path, required=["q"])


def test_json_of_either_kind(tmp_path: Path) -> None:
    for content in (b' \n[{"q": "x"}]', b'{"q": "x"}\n'):
        rows, _ = read_file(write(tmp_path, content, "data.json"), required=["q"])
        assert [row for _, row in rows] == [{"q": "x"}]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    bad = pyarrow.array([b"x", b"\xff", None, b"y"]).cast(pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"q": bad, "n": [1, 2, 3, 4]}), path)
    assert first_row(path) == {"q": "x", "n": 1}
    rows, left_out = read_file(path, required=["q"], max_bad_rows=2)
    assert rows == [(1, {"q": "x", "n": 1}), (4, {"q": "y", "n": 4})]
    assert left_out == [
        BadRow("data.parquet row 2", "not UTF-8 (byte 0)", 2, ""),
        BadRow("data.parquet row 3", "'q' is null, expected text", 3, '{"q": null, "n": 3}'),
    ]
    with pytest.raises(UserError, match="^data.parquet row 2: not UTF-8 .* --task.max-bad-rows 2"):
        read_file(path, required=["q"], max_bad_rows=1)
    for content in (b"", b"PAR1" * 9, path.read_bytes()[:-40]):
        with pytest.raises(UserError, match="cut.parquet: not a parquet file that can be read"):
            read_file(write(tmp_path, content, "cut.parquet"), required=["q"])
    with pytest.raises(UserError, match="none.parquet: not a parquet file that can be read"):
        read_file(tmp_path / "none.parquet", required=["q"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"data.parquet: to read parquet files, .*pip install .*\[parquet\]'"):
        read_file(path, required=["q"])


def test_split_shares_and_stability() -> None:
    names = [split_of(f"{index:016x}", dev_percent=5, test_percent=10) for index in range(20_000)]
    # Binomial with n = 20,000: standard deviations are 31 and 42, so four of them.
    assert abs(names.count("dev") - 1000) < 4 * 31
    assert abs(names.count("test") - 2000) < 4 * 42
    assert names[:8] == [split_of(f"{index:016x}", dev_percent=5, test_percent=10) for index in range(8)]
    assert split_of("x", dev_percent=0, test_percent=0) == "train"
    assert split_of("x", dev_percent=100, test_percent=0) == "dev"
    assert split_of("x", dev_percent=0, test_percent=100) == "test"


def test_reading_does_not_import_torch() -> None:
    code = "import sys, whet.tasks.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def parquet(path: Path, table: Any, **options: Any) -> Path:
    pytest.importorskip("pyarrow.parquet").write_table(table, path, **options)
    return path


def test_single_precision_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The shortest text that reads back as the same float32, at every depth; doubles and nulls stay."""
    arrow = pytest.importorskip("pyarrow")
    texts = ["0.1", "72.0", "1e-07", "3.4028235e+38", "16777216.0", "-0.0", "2.7182817"]
    single = [float(text) for text in texts]
    table = arrow.table(
        {
            "answer": arrow.array(single, arrow.float32()),
            "half": arrow.array([0.1] * 7, arrow.float16()),
            "double": arrow.array([0.1 + 0.2] * 7, arrow.float64()),
            "rows": arrow.array(
                [[{"x": 0.1}, {"x": None}, None]] * 7, arrow.list_(arrow.struct([("x", arrow.float32())]))
            ),
            "none": arrow.array([None] * 7, arrow.float32()),
            "map": arrow.array([[("a", 0.3)]] * 7, arrow.map_(arrow.string(), arrow.float32())),
        }
    )
    rows = [row for _, row in read_file(parquet(tmp_path / "r.parquet", table), required=[])[0]]
    assert [str(row["answer"]) for row in rows] == texts
    expected = {"half": 0.1, "double": 0.1 + 0.2, "rows": [{"x": 0.1}, {"x": None}, None], "none": None}
    assert all({name: row[name] for name in expected} == expected for row in rows)
    assert rows[0]["map"] == [("a", 0.3)]
    table = table.append_column("prompt", arrow.array([f"q{n}" for n in range(7)]))
    parquet(tmp_path / "test.parquet", table)
    found = {p.prompt: p.answer for p in Jsonl(tmp_path).problems("test")}
    assert (found["q0"], found["q1"], found["q2"]) == ("0.1", "72", "1e-07")


@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("shape", ["text", "struct", "list", "long", "rows"])
def test_a_parquet_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, shape: str, compression: str
) -> None:
    """One value of 2 MB that a dictionary repeats, a value that is too long, a billion rows of nothing."""
    arrow = pytest.importorskip("pyarrow")
    text = "a" * 2**21
    same = arrow.DictionaryArray.from_arrays(arrow.array([0] * 3000, arrow.int32()), [text])
    if shape == "struct":
        table = arrow.table({"a": arrow.StructArray.from_arrays([same], names=["b"])})
    elif shape == "list":
        table = arrow.table({"a": arrow.ListArray.from_arrays([0, 3000], same)})
    elif shape == "long":
        table = arrow.table({"a": [text * 9]})
    elif shape == "rows":
        table = arrow.table({"a": arrow.nulls(6_000_000, arrow.int8())})
    else:
        table = arrow.table({"a": same})
    path = parquet(tmp_path / "r.parquet", table, compression=compression)
    pool = arrow.proxy_memory_pool(usual := arrow.default_memory_pool())
    arrow.set_memory_pool(pool)
    tracemalloc.start()
    try:
        with pytest.raises(
            UserError, match=r"longer than 16,777,216 bytes; split|write it again without"
        ) as caught:
            read_file(path, required=[])
        assert "\n" not in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < 2**26
        assert pool.max_memory() < 2**26  # of 6 GB
    finally:
        tracemalloc.stop()
        arrow.set_memory_pool(usual)


def test_repeated_values_of_common_lengths_are_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    rows = [
        {"m": [{"c": "You are kind. " * 300, "n": None}, {"c": f"q{n}", "n": b"\x00"}], "s": "x" * 9000}
        for n in range(1200)
    ]
    path = parquet(tmp_path / "r.parquet", arrow.Table.from_pylist(rows), row_group_size=500)
    assert [row for _, row in read_file(path, required=[])[0]] == rows


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "ROOM", 2**20)
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD * 1 + b"\n" * 1000))
    assert len(read_file(path, required=[])[0]) == 1
    path.write_bytes(gzip.compress(b"[]\n" * 40_000))
    with pytest.raises(
        UserError, match=r"r.jsonl.gz: holds over 1,0.* bytes of lines in a file of so few bytes"
    ):
        read_file(path, required=[])
    path.write_bytes(gzip.compress(b"\n" * 40_000))
    with pytest.raises(UserError, match=r"r.jsonl.gz: holds over"):
        read_file(path, required=[])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.xlsx",
            b"PK\x03\x04",
            r"^rows.xlsx: a spreadsheet, which is not read; save it as CSV in UTF-8$",
        ),
        ("rows.ODS", b"PK\x03\x04", r"^rows.ODS: a spreadsheet"),
        (
            "story.txt",
            b"Once upon a time\n",
            r"^story.txt: not rows; expected .jsonl, .*one JSON object a line",
        ),
    ],
)
def test_a_file_without_rows_is_named_as_what_it_is(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_file(tmp_path / name, required=[])


def test_endings_may_be_in_capitals_and_rows_may_have_another(tmp_path: Path) -> None:
    (tmp_path / "ROWS.CSV").write_text("question,answer\na,1\n")
    (tmp_path / "rows.txt").write_text('\n{"question": "a", "answer": "1"}\n')
    for name in ("ROWS.CSV", "rows.txt"):
        assert first_row(tmp_path / name) == {"question": "a", "answer": "1"}
        assert [row for _, row in read_file(tmp_path / name, required=["question"])[0]] == [
            {"question": "a", "answer": "1"}
        ]
