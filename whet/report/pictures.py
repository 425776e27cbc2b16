"""Images on pages: each once, small, and as a data URI of the page's own making; no page fetches one."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from whet.model.vision.reading import is_data_uri, is_url, read_picture, shown
from whet.report.boards import SCHEME, draw_board
from whet.types import UserError

MAX_SIDE = 640
"""Pixels of the longer side; larger images are scaled down."""
MAX_AS_IT_IS = 64 * 1024
"""Longest data URI that a page repeats unchanged, in characters."""
MAX_PAGE = 32 * 2**20
"""Characters of all images of one page; of further ones the page has the names."""
MAX_IMAGES = 32
"""Images of one sample that are shown."""
MAX_NOTE = 200
_SAFE_URI = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}")
"""What a page takes unchanged: pixels alone; SVG could hold scripts."""

Picture = dict[str, str]
"""`src`, a data URI, or `note`, why there is none; `name`, where the image is from."""


class Pictures:
    """The images of one page.

    Args:
        folder: Run folder that relative paths are in first.
        max_characters: Of all of them.

    Attributes:
        shown: What the page has of each, in the order of their numbers.
    """

    def __init__(self, folder: Path | None = None, max_characters: int = MAX_PAGE) -> None:
        self._folder = folder
        self.shown: list[Picture] = []
        self._left = max_characters
        self._numbers: dict[str, int] = {}

    def numbers(self, sources: Sequence[str]) -> list[int]:
        """Return the numbers of a sample's images; those of equal sources are equal."""
        return [self._number(source) for source in sources[:MAX_IMAGES]]

    def _number(self, source: str) -> int:
        if source not in self._numbers:
            picture = picture_of(source, self._folder)
            self._left -= len(picture.get("src", ""))
            if self._left < 0:
                picture = {"name": picture["name"], "note": "left out: this page has many images already"}
            self._numbers[source] = len(self.shown)
            self.shown.append(picture)
        return self._numbers[source]


@lru_cache(maxsize=128)
def picture_of(source: str, folder: Path | None = None) -> Picture:
    """Return what a page shows of an image: its pixels, or why they cannot be had.

    Args:
        source: Path, data URI or URL (`Problem.images`), as an untrusted row has it. A URL is named, never fetched. A
            file is decoded and encoded again, so that nothing but pixels gets into the page.
        folder: Run folder that a relative path is in, if it is there; else it is in the working directory.
    """
    if source.startswith(SCHEME):
        return draw_board(source)
    name = "" if is_data_uri(source) else source[:MAX_NOTE]
    if len(source) <= MAX_AS_IT_IS and _SAFE_URI.fullmatch(source):
        return {"name": name, "src": source}
    if is_url(source):
        return {"name": name, "note": f"{shown(source)[:MAX_NOTE]} (pages fetch nothing)"}
    try:
        return {"name": name, "src": _small(source if folder is None else _inside(source, folder))}
    except UserError as error:
        return {"name": name, "note": str(error)[:MAX_NOTE]}


def _inside(source: str, folder: Path) -> str:
    """Return the file of the run that a source names; other sources unchanged."""
    if is_data_uri(source) or "\x00" in source:
        return source
    path = (folder / source).resolve()
    return str(path) if path.is_relative_to(folder.resolve()) and path.is_file() else source


def _small(source: str) -> str:
    """Return an image of at most `MAX_SIDE` as a data URI: PNG, or JPEG where PNG is long."""
    pixels = read_picture(source).read()
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    files: dict[str, bytes] = {}
    for kind, options in (("png", {}), ("jpeg", {"quality": 85})):
        file = io.BytesIO()
        image.save(file, format=kind, optimize=True, **options)
        files[kind] = file.getvalue()
        if len(files[kind]) <= MAX_AS_IT_IS // 2:
            break
    kind = min(files, key=lambda name: len(files[name]))
    return f"data:image/{kind};base64,{base64.b64encode(files[kind]).decode()}"
