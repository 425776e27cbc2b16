"""Columns of images: every form in which rows hold them, hostile ones, and public sets of questions about images."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import hub
import numpy as np
import PIL.Image
import pytest
from needs import SHARED, needs

import whet
from whet.model.vision.reading import images_folder, pixels_of, read_picture
from whet.tasks.base import TaskConfig, load_task
from whet.tasks.columns import conversation
from whet.tasks.hub import Part, hub_rows
from whet.tasks.images import ImageReader, RowImages, all_images
from whet.tasks.jsonl import Jsonl
from whet.tasks.sets import HUB_SETS
from whet.types import Problem, Task, UserError

PUZZLES = SHARED / "data/vision/puzzlevqa"
RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 128, 0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, where images of rows are written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return images_folder()


def file_of(colour: tuple[int, int, int], size: tuple[int, int] = (12, 8), kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(out, kind)
    return out.getvalue()


def noise(size: tuple[int, int] = (200, 160), seed: int = 0, kind: str = "PNG") -> bytes:
    """A file too large to stay in the problem."""
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(out, kind)
    assert len(out.getvalue()) > 16 * 1024
    return out.getvalue()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def every(task: Task) -> list[Problem]:
    return [problem for split in ("train", "dev", "test") for problem in task.problems(split)]


def one(path: Path, **options: Any) -> Problem:
    (problem,) = every(Jsonl(path, **options))
    return problem


def data_of(source: str) -> bytes:
    """The bytes that a source names, read without the code under test."""
    return (
        base64.b64decode(source.partition(",")[2])
        if source.startswith("data:")
        else Path(source).read_bytes()
    )


def fault(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        every(load_task(TaskConfig(name=options.pop("name", "jsonl"), path=str(path), **options)))
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


@pytest.mark.parametrize(
    "form",
    [
        lambda data, name: name,
        lambda data, name: f"./{name}",
        lambda data, name: [name],
        lambda data, name: json.dumps([name]),
        lambda data, name: {"path": name},
        lambda data, name: {"bytes": None, "path": name},
        lambda data, name: {"bytes": base64.b64encode(data).decode(), "path": "elsewhere.png"},
        lambda data, name: uri(data),
        lambda data, name: [{"url": uri(data)}],
        lambda data, name: {"image_url": {"url": uri(data)}},
        lambda data, name: base64.b64encode(data).decode(),
    ],
)
@pytest.mark.parametrize("data", [file_of(RED), noise()], ids=["small", "large"])
def test_forms_of_json(form: Any, data: bytes, tmp_path: Path) -> None:
    """Whatever names it, the problem's image is the file's very bytes."""
    (tmp_path / "a.png").write_bytes(data)
    problem = one(
        write(tmp_path / "r.jsonl", {"question": "What?", "answer": "red", "image": form(data, "a.png")})
    )
    (source,) = problem.images
    assert data_of(source) == data
    assert read_picture(source).digest == hashlib.sha256(data).digest()
    assert (problem.prompt, problem.answer, problem.messages) == ("What?", "red", ())
    assert len(source) < 25_000  # rows of samples.jsonl hold it


@pytest.mark.ci
def test_parquet_as_the_hub_writes_it(tmp_path: Path) -> None:
    """By the real package: a column of images, a list of them, and none; the files' own bytes come back."""
    datasets: Any = pytest.importorskip("datasets")
    small, large = file_of(RED), noise()
    rows = {
        "question": ["one?", "two?", "none?"],
        "answer": ["1", "2", "0"],
        "images": [[{"bytes": small, "path": "a.png"}], [{"bytes": large, "path": None}] * 2, []],
    }
    features = datasets.Features(
        {
            "question": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
        }
    )
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "lists.parquet")
    found = {p.prompt: p.images for p in every(Jsonl(tmp_path / "lists.parquet"))}
    assert {prompt: [*map(data_of, images)] for prompt, images in found.items()} == {
        "one?": [small],
        "two?": [large, large],
        "none?": [],
    }
    single = {"image": [row[0] if row else None for row in rows.pop("images")], **rows}
    del features["images"]
    features["image"] = datasets.Image()
    datasets.Dataset.from_dict(single, features=features).to_parquet(tmp_path / "single.parquet")
    found = {p.prompt: p.images for p in every(Jsonl(tmp_path / "single.parquet"))}
    assert [*map(data_of, found["two?"])] == [large]
    assert found["none?"] == ()


def test_csv(tmp_path: Path) -> None:
    """Paths, lists of them, and data URIs longer than the csv module reads by default."""
    for name, colour in (("a.png", RED), ("b.png", BLUE)):
        (tmp_path / name).write_bytes(file_of(colour))
    long = uri(noise((300, 200)))
    assert len(long) > 131_072
    lines = [
        "question,answer,image",
        "one?,1,a.png",
        'two?,2,"[""a.png"", ""b.png""]"',
        f'three?,3,"{long}"',
        "no?,0,",
    ]
    (tmp_path / "r.csv").write_text("\n".join(lines) + "\n")
    found = {p.prompt: [*map(data_of, p.images)] for p in every(Jsonl(tmp_path / "r.csv"))}
    assert found == {
        "one?": [file_of(RED)],
        "two?": [file_of(RED), file_of(BLUE)],
        "three?": [noise((300, 200))],
        "no?": [],
    }


def test_paths_stay_in_the_root(tmp_path: Path) -> None:
    """That of the data, or another one that is named; only what the rows say decides whether they leave it."""
    data, elsewhere = tmp_path / "data", tmp_path / "pictures"
    data.mkdir()
    elsewhere.mkdir()
    (elsewhere / "a.png").write_bytes(file_of(RED))
    (data / "link.png").symlink_to(elsewhere / "a.png")
    for bad in ("../pictures/a.png", str(elsewhere / "a.png"), "link.png", "../../../../etc/passwd"):
        path = write(data / "r.jsonl", {"question": "q", "answer": "1", "image": bad})
        text = fault(path, images="image")
        assert text.startswith("r.jsonl line 1: image ")
        assert "is outside of" in text
    path = write(data / "r.jsonl", {"question": "q", "answer": "1", "image": "a.png"})
    assert "cannot be read (No such file or directory)" in fault(path)
    assert data_of(one(path, image_root=str(elsewhere)).images[0]) == file_of(RED)
    path = write(data / "r.jsonl", {"question": "q", "answer": "1", "image": "../data2/a.png"})
    assert "is outside of" in fault(path, image_root=str(elsewhere))


def test_urls_are_fetched_where_allowed_only(tmp_path: Path, cache: Path) -> None:
    url = "https://example.org/a.png"
    path = write(tmp_path / "r.jsonl", {"question": "q", "answer": "1", "image": url})
    assert "URLs are not fetched here; allow it with --task.image-urls public" in fault(path)
    cache.mkdir(parents=True)  # as if it had been fetched: other tests fetch
    (cache / f"url-{hashlib.sha256(url.encode()).hexdigest()}").write_bytes(file_of(RED))
    assert data_of(one(path, image_urls="public").images[0]) == file_of(RED)
    with pytest.raises(UserError, match="'image_urls': got 'yes', expected one of"):
        whet.config.from_dict(
            TaskConfig, {"name": "jsonl", "path": str(path), "image_urls": "yes"}, where="x"
        )


def png(width: int, height: int, body: bytes) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


HOSTILE = {
    "bomb": (png(30_000, 30_000, zlib.compress(bytes(1 << 20), 9)), "far too many pixels"),
    "cut.png": (noise()[:-40], "broken"),
    "half.jpg": (noise(kind="JPEG")[:5000], "broken"),
    "cut.webp": (noise(kind="WEBP")[:-100], "broken"),
    "cut.gif": (noise(kind="GIF")[:9000], "broken"),
    "cut.bmp": (noise(kind="BMP")[:9000], "broken"),
    "cut.tiff": (noise(kind="TIFF")[:9000], "broken"),
    "text.png": (b"hello world", "not an image (starts with b'hello wo')"),
    "page.jpg": (b"<!DOCTYPE html><html>404</html>", "was an error page saved?"),
    "drawing.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    "empty.png": (b"", "empty"),
    "none.png": (png(0, 5, b""), "or it has no pixels"),
}


# In parquet no bytes are no image.
@pytest.mark.parametrize(
    ("form", "name"),
    [(f, n) for f in ("path", "uri", "parquet") for n in HOSTILE if (f, n) != ("parquet", "empty.png")],
)
def test_hostile_images_are_bad_rows(form: str, name: str, tmp_path: Path) -> None:
    """One line that says which row and what is wrong, when the data is read; tolerated, the others are used."""
    data, what = HOSTILE[name]
    (tmp_path / "good.png").write_bytes(file_of(RED))
    (tmp_path / name).write_bytes(data)
    if form == "parquet":
        pa: Any = pytest.importorskip("pyarrow")
        column = [{"bytes": file_of(RED)}, {"bytes": data}]
        table = pa.table({"question": ["a", "b"], "answer": ["1", "2"], "image": column})
        path = tmp_path / "r.parquet"
        importlib.import_module("pyarrow.parquet").write_table(table, path)
    else:
        sources = ("good.png", name) if form == "path" else (uri(file_of(RED)), uri(data))
        rows = [{"question": q, "answer": q, "image": s} for q, s in zip("ab", sources, strict=True)]
        path = write(tmp_path / "r.jsonl", *rows)
    text = fault(path)
    assert text.startswith(("r.jsonl line 2: image ", "r.parquet row 2: image "))
    assert what in text
    assert "allow it with --task.max-bad-rows 1" in text
    task = Jsonl(path, max_bad_rows=1)
    assert [p.prompt for p in every(task)] == ["a"]
    assert [row.number for row in task.bad_rows] == [2]


def test_unusual_images_are_read(tmp_path: Path) -> None:
    """CMYK, EXIF rotation, animations, phones' files of two pictures, trailing bytes and names that lie: as shown."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    turned, frames = io.BytesIO(), [PIL.Image.new("RGB", (6, 4), colour) for colour in (RED, BLUE)]
    PIL.Image.new("RGB", (6, 4), RED).save(turned, "JPEG", exif=exif)
    cmyk, animated, phone = io.BytesIO(), io.BytesIO(), io.BytesIO()
    PIL.Image.new("CMYK", (6, 4), (0, 255, 255, 0)).save(cmyk, "JPEG")
    frames[0].save(animated, "GIF", save_all=True, append_images=frames[1:])
    frames[0].save(phone, "MPO", save_all=True, append_images=frames[1:])
    files = {"turned": turned, "cmyk": cmyk, "animated": animated, "phone": phone}
    files["trailing"] = io.BytesIO(file_of(RED, (6, 4)) + bytes(1000))
    for name, data in files.items():
        (tmp_path / f"{name}.txt").write_bytes(data.getvalue())
    rows = [{"question": name, "answer": "1", "image": f"{name}.txt"} for name in files]
    for problem in every(Jsonl(write(tmp_path / "r.jsonl", *rows), images="image")):
        pixels = read_picture(problem.images[0]).read().astype(int)
        assert pixels.shape == ((6, 4, 3) if problem.prompt == "turned" else (4, 6, 3))
        assert np.abs(pixels - RED).max() <= 4, problem.prompt


def test_a_large_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """Rows with files in them are read a few at a time, and only the paths of what was in them stay."""
    pa: Any = pytest.importorskip("pyarrow")
    files = [noise((400, 400), seed, "BMP") for seed in range(60)]
    table = pa.table(
        {
            "question": [f"{n}?" for n in range(60)],
            "answer": ["1"] * 60,
            "image": [{"bytes": data, "path": f"{n}.bmp"} for n, data in enumerate(files)],
        }
    )
    importlib.import_module("pyarrow.parquet").write_table(
        table, tmp_path / "r.parquet", compression="none", row_group_size=10
    )
    size = sum(map(len, files))
    del table, files
    pool = pa.default_memory_pool()
    pool.release_unused()
    most = 0

    def watched(data: bytes) -> Any:
        nonlocal most
        most = max(most, pool.bytes_allocated())
        return kept(data)

    images = importlib.import_module("whet.tasks.images")
    kept = images._kept
    before = pool.bytes_allocated()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_kept", watched)
        problems = every(Jsonl(tmp_path / "r.parquet"))
    assert len(problems) == 60
    assert sum(len(source) for p in problems for source in p.images) < 60 * 300
    assert most - before < 0.7 * size, (
        most - before,
        size,
    )  # read ahead without end, it is 1.4 times the file


def test_the_column(tmp_path: Path) -> None:
    """It is known by its name and what stands in it; another is named; 'none' leaves images out."""
    (tmp_path / "a.png").write_bytes(file_of(RED))
    row = {"question": "q", "answer": "1", "shot": "a.png", "image": "a drawing of a cat"}
    path = write(tmp_path / "r.jsonl", row)
    assert one(path).images == ()  # text is no image
    task = Jsonl(path, images="shot")
    assert len(every(task)[0].images) == 1
    assert "images = 'shot'" in task.recognised
    assert "images: " in task.recognised
    assert one(write(tmp_path / "r.jsonl", {**row, "image": "a.png"}), images="none").images == ()
    assert "no column 'picture'; name another with --task.images (there are: question" in fault(
        path, images="picture"
    )
    nested = write(tmp_path / "r.jsonl", {"question": "q", "answer": "1", "media": {"file": "a.png"}})
    assert len(one(nested, images="media.file").images) == 1
    for wrong, what in (
        (7, "an image is int"),
        ({"size": 3}, "an image is {size}"),
        ('["a.png"', "not JSON"),
    ):
        bad = write(tmp_path / "r.jsonl", {"question": "q", "answer": "1", "image": wrong})
        assert what in fault(bad, images="image")
    deep: Any = "a.png"
    for _ in range(400):
        deep = {"image": deep}
    bad = write(tmp_path / "r.jsonl", {"question": "q", "answer": "1", "image": deep})
    assert "expected 'bytes', 'path' or 'url'" in fault(bad, images="image")


def test_places_for_images_in_text(tmp_path: Path) -> None:
    """Images stand before the text; marks amid a sentence become words, so that it keeps its sense."""
    for name, colour in (("a.png", RED), ("b.png", BLUE)):
        (tmp_path / name).write_bytes(file_of(colour))
    both = ["a.png", "b.png"]

    def read(question: str, images: list[str]) -> Problem:
        return one(write(tmp_path / "r.jsonl", {"question": question, "answer": "1", "images": images}))

    assert (p := read("<image>\nFind x.", ["a.png"])).prompt == "Find x."
    assert [*map(data_of, p.images)] == [file_of(RED)]
    p = read("Is <image> brighter than <image>?", both)
    assert p.prompt == "Is image 1 brighter than image 2?"
    assert [*map(data_of, p.images)] == [file_of(RED), file_of(BLUE)]
    assert len(read("What are these?", both).images) == 2
    assert read("What does <image> mean in HTML?", []).prompt == "What does <image> mean in HTML?"
    path = write(tmp_path / "r.jsonl", {"question": "<image><image>?", "answer": "1", "images": ["a.png"]})
    assert "more places for images than images" in fault(path)
    # A place without an image is a bad row, unless images are left out on purpose.
    for text in ("<image>\nFind x.", "<image>Which?", "Which?\n <image> \nA or B", "Look: <image>"):
        path = write(tmp_path / "r.jsonl", {"question": text, "answer": "1"})
        assert "r.jsonl line 1: <image> stands for an image, and the row has none" in fault(path)
        assert one(path, images="none").prompt == text
        turns = [{"role": "user", "content": "Hi"}, {"role": "user", "content": text}]
        path = write(tmp_path / "r.jsonl", {"messages": [*turns, {"role": "assistant", "content": "A"}]})
        assert "line 1: <image> stands for an image" in fault(path)
    feed = "What is wrong here?\n<image>\n<url>a.png</url>\n</image>"
    assert read(feed, []).prompt == feed
    said = [{"role": "user", "content": "Which tag?"}, {"role": "assistant", "content": "<image>"}]
    assert one(write(tmp_path / "r.jsonl", {"messages": said})).reply == "<image>"


def test_chats(tmp_path: Path) -> None:
    """Parts of messages name images themselves, or take the row's in order; marks do as in questions."""
    for name, colour in (("a.png", RED), ("b.png", BLUE), ("c.png", GREEN)):
        (tmp_path / name).write_bytes(file_of(colour))
    text = {"type": "text", "text": "What?"}
    parts = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, text]},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, text]},
        {"role": "assistant", "content": "Blue and green."},
    ]
    p = one(write(tmp_path / "r.jsonl", {"messages": parts, "images": ["b.png", "c.png"]}), answer="none")
    assert p.reply == "Blue and green."
    assert [[*map(data_of, m.images)] for m in p.messages] == [
        [file_of(RED)],
        [],
        [file_of(BLUE), file_of(GREEN)],
    ]
    assert [m.content for m in p.messages] == ["What?", "Red.", "What?"]
    shared = [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "Red."},
        {"from": "human", "value": "And <image>?"},
        {"from": "gpt", "value": "Blue."},
    ]
    p = one(
        write(tmp_path / "r.jsonl", {"conversations": shared, "image": ["a.png", "b.png"]}), answer="none"
    )
    assert [m.content for m in p.messages] == ["What?", "Red.", "And image 1?"]
    assert [len(m.images) for m in p.messages] == [1, 0, 1]
    p = one(
        write(
            tmp_path / "r.jsonl",
            {"messages": [{"role": "user", "content": "What?"}, parts[1]], "images": ["a.png"]},
        ),
        answer="none",
    )
    assert len(all_images(p)) == 1
    for role in ("assistant", "gpt"):
        wrong = conversation(
            [{"role": "user", "content": "a"}, {"role": role, "content": [{"type": "image"}]}],
            "messages",
            RowImages(ImageReader(tmp_path), ImageReader(tmp_path).images("a.png")),
        )
        assert wrong == "'messages': a message of the assistant's shows an image; models write text alone"
    assert "more places" in fault(
        write(
            tmp_path / "r.jsonl", {"messages": [{"role": "user", "content": [{"type": "image"}]}, parts[1]]}
        )
    )


def test_problems_are_told_apart_by_their_images(tmp_path: Path) -> None:
    """One question about several images is several problems, with the same uids in another folder."""
    found = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        rows = []
        for n in range(30):
            (tmp_path / folder / f"{n}.png").write_bytes(file_of((8 * n, 0, 0)))
            rows.append({"question": "How many?", "answer": str(n % 3), "image": f"{n}.png"})
            rows.append({"question": "How many?", "answer": str(n % 3), "image": uri(file_of((8 * n, 9, 0)))})
        found.append(Jsonl(write(tmp_path / folder / "r.jsonl", *rows, rows[0])))
    first, second = ({s: [p.uid for p in t.problems(s)] for s in ("train", "dev", "test")} for t in found)
    assert first == second
    assert sum(map(len, first.values())) == len({uid for part in first.values() for uid in part}) == 60
    assert all(first.values())  # the question is the same: images decide the split
    assert found[0].num_duplicates == 1


@pytest.mark.parametrize("name", ["choice", "yes_no"])
def test_choices_about_images(name: str, tmp_path: Path) -> None:
    for file, colour in (("a.png", RED), ("b.png", BLUE)):
        (tmp_path / file).write_bytes(file_of(colour))
    more = {"options": ["red", "blue"], "answer": "red"} if name == "choice" else {"answer": "yes"}
    rows = [{"question": "<image>Which?", "image": file, **more} for file in ("a.png", "b.png", "a.png")]
    path = write(tmp_path / "r.jsonl", *rows)
    task = load_task(TaskConfig(name=name, path=str(path)))
    problems = every(task)
    assert sorted(data_of(p.images[0]) for p in problems) == sorted([file_of(RED), file_of(BLUE)])
    assert all(p.prompt.startswith("Which?") for p in problems)
    assert all(task.is_correct(p, p.answer) for p in problems)
    assert all(p.images == () for p in every(load_task(TaskConfig(name=name, path=str(path), images="none"))))
    bad = write(tmp_path / "r.jsonl", {"question": "Which?", "image": "../a.png", **more})
    assert "r.jsonl line 1: image '../a.png' is outside of" in fault(bad, name=name)


@needs("shared/data/vision/puzzlevqa")
@pytest.mark.parametrize("name", ["color_grid", "grid_number_color"])
def test_puzzlevqa(name: str) -> None:
    """The published rows: each image is there, each answer is one of the choices, and all images differ."""
    path = PUZZLES / f"{name}.json"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    task = load_task(TaskConfig(name="choice", path=str(path)))
    problems = every(task)
    assert len(problems) == len(rows)
    by_line = {int(p.meta["line"]): p for p in problems}
    for number, row in enumerate(rows, 1):
        problem = by_line[number]
        assert problem.images == (str((PUZZLES / row["image"]).resolve()),)
        assert json.loads(problem.meta["choices"]) == row["options"]
        assert row["options"]["ABCD".index(problem.answer)] == row["answer"]
        assert task.is_correct(problem, row["answer"])
    assert len({p.uid for p in problems}) == len(rows)
    assert min(len(task.problems(split)) for split in ("train", "dev", "test")) > 0


def named(patch: pytest.MonkeyPatch, name: str, **options: Any) -> list[Problem]:
    hub.install(patch)
    return sorted(every(load_task(TaskConfig(name=name, **options))), key=lambda p: int(p.meta["line"]))


def test_mathvista(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = named(monkeypatch, "mathvista")
    assert [(p.prompt, p.answer) for p in problems] == [
        ("How much higher is the last bar than the first? (Unit: cm)\nThe answer is a whole number.", "12"),
        ("What is the mean height of the bars?\nRound the answer to 1 decimal place.", "1.5"),
        ("Is the figure a triangle?\nOne of these is the answer: Yes; No", "Yes"),
        ("How many degrees do its angles have together?\nOne of these is the answer: 90; 180; 360", "180"),
        ("Which heights do the bars have?\nThe answer is a list, such as [1, 2, 3].", "[6, 12]"),
        ("How many bars are there?\nThe answer is a whole number.", "5"),
        ("What is their mean?\nRound the answer to 2 decimal places.", "1.25"),
    ]
    stored = hub.recorded()["AI4Math/MathVista"]["default"]["testmini"]
    for problem, row in zip(
        problems, stored, strict=True
    ):  # the file itself, not what Pillow would make of it
        assert data_of(problem.images[0]) == row["decoded_image"]["bytes"]
    for problem, row in zip(named(monkeypatch, "mathvista", max_rows=2), stored, strict=False):  # streamed
        assert data_of(problem.images[0]) == row["decoded_image"]["bytes"]
    numbers = named(monkeypatch, "mathvista_numbers")
    assert [p.answer for p in numbers] == ["12", "1.5", "180", "5", "1.25"]
    task = load_task(TaskConfig(name="mathvista_numbers"))
    assert task.problems("train") == []  # a benchmark is for testing ...
    assert getattr(task, "answer_type", "") == "number"
    divided = load_task(TaskConfig(name="mathvista_numbers", split="testmini"))
    assert len(every(divided)) == 5  # ... unless its split is named
    assert divided.problems("train")


def test_geometry3k(monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task(TaskConfig(name="geometry3k"))
    hub.install(monkeypatch)
    train = sorted([*task.problems("train"), *task.problems("dev")], key=lambda p: int(p.meta["line"]))
    assert [(p.prompt, p.answer, len(p.images)) for p in train] == [
        ("Find x.", "3", 1),
        ("Find x.", "10 \\sqrt { 3 }", 1),
        ("Find the area of the figure.", "30.5", 1),
    ]
    assert [p.answer for p in task.problems("test")] == ["64"]
    assert task.is_correct(train[1], r"10\sqrt{3}")
    assert not task.is_correct(train[1], r"10\sqrt{2}")


def test_clevr_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is streamed, because it is large; all questions are the same, so that images tell the problems apart."""
    problems = named(monkeypatch, "clevr_count")
    assert hub.Stream.num_read == 4
    assert [(p.prompt, p.answer) for p in problems] == [
        ("How many items are there in the image?", answer) for answer in "3534"
    ]
    assert len({p.uid for p in problems}) == 4
    assert [p.answer for p in named(monkeypatch, "clevr_count", max_rows=2)] == ["3", "5"]


def test_the_stand_in_gives_the_rows_of_the_real_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet files with the card's own features, whole and streamed: stored bytes either way, nothing decoded."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(importlib.import_module("datasets.config"), "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    recorded = hub.recorded()
    for name, column in (("mathvista", "decoded_image"), ("geometry3k", "images"), ("clevr_count", "image")):
        part = next(iter(HUB_SETS[name].parts.values()))
        rows = recorded[part.path]["default"][part.split]
        kind = datasets.List(datasets.Image()) if name == "geometry3k" else datasets.Image()
        plain = datasets.Dataset.from_list([{k: v for k, v in row.items() if k != column} for row in rows])
        whole = plain.add_column(column, [row[column] for row in rows], feature=kind)
        folder = tmp_path / name
        folder.mkdir()
        whole.to_parquet(folder / f"{part.split}-00000-of-00001.parquet")
        head = f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: {part.split}\n"
        (folder / "README.md").write_text(f"{head}    path: {part.split}-*\n---\n")
        for max_rows in (0, 2):
            theirs = [*hub_rows(Part(path=str(folder), split=part.split), max_rows=max_rows)]
            with monkeypatch.context() as patch:
                hub.install(patch)
                ours = [*hub_rows(part, max_rows=max_rows)]
            assert [row for _, _, row, _ in theirs] == [row for _, _, row, _ in ours]
        decoded = datasets.load_dataset(str(folder), split=part.split)[0][column]
        first = rows[0][column]
        image, stored = (decoded[0], first[0]) if isinstance(decoded, list) else (decoded, first)
        assert (np.asarray(image.convert("RGB")) == pixels_of(stored["bytes"], "x")).all()
        assert isinstance(hub.Rows(rows)[0][column], list) == isinstance(decoded, list)


def test_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in memory may hold Pillow's images, bytes and paths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(file_of(RED))
    forms = [
        "a.png",
        file_of(RED),
        PIL.Image.new("RGB", (12, 8), RED),
        [PIL.Image.new("RGB", (12, 8), RED)],
        {"bytes": file_of(RED), "path": None},
    ]
    for form in forms:
        task = whet.Task.from_rows([{"question": "What?", "answer": "red", "image": form}])
        (problem,) = [p for split in ("train", "dev", "test") for p in task.problems(split)]
        assert (read_picture(problem.images[0]).read() == RED).all()
    chat = [
        {"role": "user", "content": [{"type": "image", "image": PIL.Image.new("RGB", (12, 8), RED)}]},
        {"role": "assistant", "content": "Red."},
    ]
    chat[0]["content"].append({"type": "text", "text": "What?"})  # pyright: ignore[reportAttributeAccessIssue]
    task = whet.Task.from_rows([{"messages": chat}], answer="none")
    (problem,) = [p for split in ("train", "dev", "test") for p in task.problems(split)]
    assert len(all_images(problem)) == 1
    with pytest.raises(UserError, match=r"row 0: image of 3 bytes: not an image"):
        whet.Task.from_rows([{"question": "What?", "answer": "red", "image": b"abc"}])
    shutil.move(tmp_path / "a.png", tmp_path / "b.png")
    with pytest.raises(UserError, match="cannot be read"):
        whet.Task.from_rows([{"question": "Where?", "answer": "red", "image": "a.png"}])
