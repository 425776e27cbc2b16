"""Images of problems: how rows of data name them, and questions with blank or other images, to show who looks."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from whet.model.vision.asking import FIELDS
from whet.model.vision.reading import (
    Urls,
    check_bytes,
    check_file,
    decoded,
    images_folder,
    is_data_uri,
    is_url,
    locate,
    read_picture,
    shown,
    stored,
)
from whet.types import Problem, UserError

SHOWN = "images"
"""Label in `meta` of a problem whose images were replaced: 'blank', or the uid of the problem that they are from."""


COLUMNS = (
    *("images", "decoded_image", "image", "image_path", "image_paths", "img", "img_path", "image_url"),
    *("image_bytes", "picture", "pictures"),
)
"""Columns that are taken for images, best first, where their values are some."""
MARK = "<image>"
"""What stands in a question, or a message, where the next of its row's images belongs."""
PLACE = re.compile(rf"\A\s*{MARK}|^[ \t]*{MARK}[ \t]*$|{MARK}\s*\Z", re.MULTILINE)
"""A mark that is no part of a sentence: it begins or ends the text, or has a line of its own."""
INLINE_BYTES = 16 * 1024
"""Files up to this size stay in the problem as a data URI; larger ones of rows are written to the cache."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_BASE64 = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")
"""How JPEG, PNG, GIF and WebP files begin in base64, which some data sets hold without a data URI's head."""


class Image(NamedTuple):
    """An image of a row.

    Attributes:
        source: Where it is read from: a data URI, or the path of a file, which is known to be one.
        name: The same on every machine: its file's digest, its path as the data has it, or its URL.
    """

    source: str
    name: str


class ImageReader:
    """Reads the images of rows of data.

    Args:
        root: Folder that paths are relative to, and may not leave; None: data of the hub, which has no folder.
        urls: Which URLs are fetched.
    """

    def __init__(self, root: Path | None, urls: Urls = "none") -> None:
        self._root = root
        self._urls: Urls = urls

    def images(self, value: Any) -> list[Image]:
        """Return the images of a column: one, a list, or none.

        Args:
            value: A path, data URI, URL or base64 text; bytes of a file; Pillow's image; an object with 'bytes' or
                'path' as `datasets` has it, or 'url'; a list of these, also as JSON text; None or '' for none.

        Raises:
            UserError: If one cannot be read.
        """
        if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise UserError(
                    f"image {shown(value)}: not JSON; expected a path, or a list of paths"
                ) from None
        if isinstance(value, list | tuple):
            return [self.image(item) for item in value]
        return [] if value is None or value == "" or value == b"" else [self.image(value)]

    def image(self, value: Any) -> Image:
        """Return an image; see `images`."""
        if isinstance(value, Mapping):
            found = (value.get(name) for name in ("bytes", "path", "url", "image", "image_url"))
            inner = next((one for one in found if one), None)
            inner = inner.get("url") if isinstance(inner, Mapping) else inner  # {"image_url": {"url": ...}}
            if inner is None or isinstance(inner, Mapping):
                raise UserError(
                    f"an image is {{{', '.join(map(str, value))[:80]}}}; expected 'bytes', 'path' or 'url'"
                )
            return self.image(inner)
        if hasattr(value, "getexif"):
            value = _as_png(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return _kept(bytes(value))
        if not isinstance(value, str):
            raise UserError(
                f"an image is {type(value).__name__}; expected a path, a data URI, bytes or a list of them"
            )
        if value.startswith(_BASE64) and len(value) > 80 and "." not in value:
            value = f"data:;base64,{value}"
        if is_data_uri(value):
            return _kept_uri(value)
        return self._file(value)

    def part(self, part: Mapping[str, Any]) -> Image | None:
        """Return the image of a part of a message; None where the part only says that there is one."""
        found = next((value for name in FIELDS if (value := part.get(name))), None)
        return None if found is None else self.image(found)

    def _file(self, source: str) -> Image:
        if is_url(source):
            path = locate(source, urls=self._urls)
            return Image(str(path), source)
        if Path(source).parent == images_folder():  # written there from a row
            path, name = locate(source, root=images_folder()), Path(source).name
        elif self._root is None:
            raise UserError(
                f"image {shown(source)} is a path, and data of the hub has no folder; name the folder of its images "
                "with --task.image-root"
            )
        else:
            path = locate(source, root=self._root)
            name = path.relative_to(self._root.resolve()).as_posix()
        check_file(path, shown(source))
        return Image(str(path), name)


def holds_file(value: Any) -> bool:
    """Say whether a value is an image itself, not the name of one: bytes of a file, or Pillow's image."""
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes)
    return isinstance(value, bytes) or hasattr(value, "getexif")


def is_image(value: Any) -> bool:
    """Say whether the value of a column is an image, or a list of them, by its form."""
    if isinstance(value, list | tuple):
        return all(map(is_image, value))
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("["):
            return all(part.strip(" []\"'").lower().endswith(SUFFIXES) for part in text.split(","))
        return (
            not text
            or is_data_uri(text)
            or is_url(text)
            or text.lower().endswith(SUFFIXES)
            or text.startswith(_BASE64)
        )
    is_object = isinstance(value, Mapping) and bool({"bytes", "path", "url", "image_url"} & value.keys())
    return value is None or is_object or isinstance(value, bytes) or hasattr(value, "getexif")


def _kept(data: bytes) -> Image:
    """Return an image that is given as the bytes of its file."""
    digest = hashlib.sha256(data).hexdigest()
    check_bytes(data, f"of {len(data):,} bytes")
    if len(data) <= INLINE_BYTES:
        return Image(f"data:;base64,{base64.b64encode(data).decode()}", digest)
    return Image(str(stored(data)), digest)


def _kept_uri(source: str) -> Image:
    """Return an image that is given as a data URI, which stays as it is where it is short."""
    data = decoded(source)
    kept = _kept(data)
    return Image(source, kept.name) if is_data_uri(kept.source) else kept


def _as_png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


class RowImages:
    """The images of one row, handed out to its messages in order.

    Args:
        reader: Reads images that parts of messages name.
        images: Those of the row's column.
        needs_all: Refuse a text that has a place for an image, but no image (`PLACE`).
    """

    def __init__(self, reader: ImageReader, images: Sequence[Image] = (), *, needs_all: bool = False) -> None:
        self._reader, self._waiting, self._needs_all = reader, list(images), needs_all
        self.names: list[str] = []
        """Of the images that were handed out, in order."""

    @property
    def are_waiting(self) -> bool:
        """Whether some were not handed out yet."""
        return bool(self._waiting)

    def take(self) -> str:
        """Return the source of the row's next image."""
        if not self._waiting:
            raise UserError("more places for images than images")
        return self._given(self._waiting.pop(0))

    def rest(self) -> tuple[str, ...]:
        """Return the sources of those that no message asked for."""
        return tuple(self.take() for _ in range(len(self._waiting)))

    def of_part(self, part: Mapping[str, Any]) -> str:
        """Return the source of an image part's image: its own, or the row's next one."""
        own = self._reader.part(part)
        return self.take() if own is None else self._given(own)

    def of_text(self, text: str) -> tuple[str, tuple[str, ...]]:
        """Take the marks for images out of a text; return it, and the images' sources.

        Images stand before the text: a mark amid it becomes "image 2", so that the sentence keeps its sense.
        """
        if MARK not in text:
            return text, ()
        if not self._waiting:
            if self._needs_all and PLACE.search(text) and f"</{MARK[1:]}" not in text:
                more = "no more" if self.names else "none"
                raise UserError(
                    f"{MARK} stands for an image, and the row has {more}; name their column: --task.images"
                )
            return text, ()
        sources = []
        parts = text.split(MARK)
        joined = parts[0]
        for number, part in enumerate(parts[1:], 1):
            sources.append(self.take())
            is_amid = bool(joined.strip()) and bool(part.strip())
            joined += f"image {number}{part}" if is_amid else part
        return joined.strip(), tuple(sources)

    def _given(self, image: Image) -> str:
        self.names.append(image.name)
        return image.source


def all_images(problem: Problem) -> tuple[str, ...]:
    """Return the sources of all images that a problem shows, in order."""
    return tuple(source for message in problem.asked for source in message.images)


def blanked(problem: Problem) -> Problem:
    """Return a problem with white images of the same sizes in place of its own.

    It has the same uid, question and answer: whoever answers it better than by chance does not need the image.

    Raises:
        UserError: If it has no image, or one cannot be read.
    """
    if not all_images(problem):
        raise UserError(f"problem {problem.uid} has no image to blank: {problem.prompt[:60]!r}")
    return _replaced(problem, _white, "blank")


def swapped(problems: Sequence[Problem]) -> list[Problem]:
    """Return each problem with the images of another one of them, whose answer is another.

    The images are of the same number and sizes, so that prompts keep their lengths. Uids, questions and answers stay.

    Args:
        problems: At least two.

    Raises:
        UserError: If no other problem has images of the same sizes and another answer.
    """
    sizes = [tuple(map(_size, all_images(problem))) for problem in problems]
    found = []
    for place, problem in enumerate(problems):
        others = ((place + step) % len(problems) for step in range(1, len(problems)))
        fits = (
            other for other in others if sizes[other] == sizes[place] and _differ(problem, problems[other])
        )
        other = next(fits, None)
        if other is None or not sizes[place]:
            raise UserError(
                f"problem {problem.uid}: none of the other {len(problems) - 1} has other images of the same sizes, and "
                "another answer; give more problems"
            )
        images = iter(all_images(problems[other]))
        found.append(_replaced(problem, lambda _, images=images: next(images), problems[other].uid))
    return found


def _differ(problem: Problem, other: Problem) -> bool:
    return problem.answer != other.answer and all_images(problem) != all_images(other)


def _replaced(problem: Problem, change: Callable[[str], str], what: str) -> Problem:
    """Return a problem with every image changed, in order."""
    messages = tuple(
        replace(message, images=tuple(map(change, message.images))) for message in problem.messages
    )
    images = problem.images if messages else tuple(map(change, problem.images))
    return replace(problem, images=images, messages=messages, meta={**problem.meta, SHOWN: what})


def _size(source: str) -> tuple[int, int]:
    picture = read_picture(source)
    return picture.height, picture.width


def _white(source: str) -> str:
    from PIL import Image

    height, width = _size(source)
    file = io.BytesIO()
    Image.new("1", (width, height), 1).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
