"""Draws the images of generated tasks: flat colours in square cells, as small PNG files in data URIs."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Sequence
from typing import Any

from whet.install import install_command
from whet.types import UserError

CELL = 32
"""Pixels of a cell's side: with patches of 16 and squares of 2 x 2 patches merged, as Qwen3-VL has them, a cell is
one token."""
MIN_CELL, MAX_CELL = 8, 128
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 39, 40),
    "yellow": (245, 210, 40),
    "green": (44, 150, 60),
    "blue": (31, 90, 200),
    "orange": (250, 140, 20),
    "purple": (140, 60, 190),
    "black": (20, 20, 20),
    "grey": (150, 150, 150),
}
"""Names of colours that are told apart at a glance, and as numbers."""
SHAPES = ("circle", "square", "triangle")
WHITE, LINE = 0, 1
INK = {name: place for place, name in enumerate(COLOURS, 2)}
"""Numbers of the colours in the palette."""
PALETTE = [255, 255, 255, 205, 205, 205, *(part for colour in COLOURS.values() for part in colour)]


def pillow() -> tuple[Any, Any, Any]:
    """Return Pillow's Image, ImageDraw and ImageFont; UserError without it."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise UserError(f"to draw images: {install_command('vision')} (Pillow)") from None
    return Image, ImageDraw, ImageFont


def check_cell(cell: int) -> int:
    """Return the side of a cell in pixels, 0 being the default; refuse one too small to see or too large."""
    if cell and not MIN_CELL <= cell <= MAX_CELL:
        raise UserError(f"task.cell = {cell}: expected {MIN_CELL} to {MAX_CELL} pixels, or 0 for {CELL}")
    return cell or CELL


def sheet(width: int, height: int) -> Any:
    """Return a white image of the palette."""
    image_module, _, _ = pillow()
    image = image_module.new("P", (width, height), WHITE)
    image.putpalette(PALETTE)
    return image


def as_uri(image: Any) -> str:
    """Return an image of the palette as a PNG file in a data URI."""
    file = io.BytesIO()
    image.save(file, format="PNG", bits=4)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def draw_cells(rows: Sequence[Sequence[str]], cell: int, *, titles: tuple[tuple[int, str], ...] = ()) -> str:
    """Draw cells filled with colours, with a thin white line between two of them.

    Args:
        rows: Names of colours; '' leaves a cell white.
        cell: Pixels of a cell's side.
        titles: Text above a column, by its number, in a row of its own; what does not fit is moved to the left.
    """
    image_module, draw_module, _ = pillow()
    small = sheet(len(rows[0]), len(rows))
    small.putdata([INK.get(name, WHITE) for row in rows for name in row])
    image = small.resize((cell * small.width, cell * small.height), image_module.Resampling.NEAREST)
    draw = draw_module.Draw(image)
    for x in range(cell, image.width + 1, cell):
        draw.line((x - 1, 0, x - 1, image.height), fill=WHITE)
    for y in range(cell, image.height + 1, cell):
        draw.line((0, y - 1, image.width, y - 1), fill=WHITE)
    if not titles:
        return as_uri(image)
    whole = sheet(image.width, image.height + cell)
    whole.paste(_titles(image.width, cell, titles), (0, 0))
    whole.paste(image, (0, cell))
    return as_uri(whole)


@functools.lru_cache(maxsize=16)
def _titles(width: int, cell: int, titles: tuple[tuple[int, str], ...]) -> Any:
    """Draw a row of titles; text takes longer than all cells."""
    _, draw_module, font_module = pillow()
    image = sheet(width, cell)
    draw = draw_module.Draw(image)
    draw.fontmode = "1"  # no shades: the palette has none
    font = font_module.load_default()
    for column, text in titles:
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        place = max(0, min(column * cell, width - int(right - left) - 1))
        draw.text((place - left, (cell - (bottom - top)) // 2 - top), text, fill=INK["black"], font=font)
    return image


def draw_shapes(rows: Sequence[Sequence[tuple[str, str] | None]], cell: int) -> str:
    """Draw at most one shape in each cell.

    Args:
        rows: Colour and shape (`SHAPES`) of each cell; None for an empty one.
        cell: Pixels of a cell's side.
    """
    _, draw_module, _ = pillow()
    image = sheet(len(rows[0]) * cell, len(rows) * cell)
    draw = draw_module.Draw(image)
    gap = cell // 8
    for y, row in enumerate(rows):
        for x, item in enumerate(row):
            if item is None:
                continue
            colour, shape = INK[item[0]], item[1]
            left, top = x * cell + gap, y * cell + gap
            right, bottom = (x + 1) * cell - gap - 1, (y + 1) * cell - gap - 1
            if shape == "circle":
                draw.ellipse((left, top, right, bottom), fill=colour)
            elif shape == "square":
                draw.rectangle((left, top, right, bottom), fill=colour)
            else:
                draw.polygon(((left, bottom), (right, bottom), ((left + right) // 2, top)), fill=colour)
    return as_uri(image)


def draw_bars(bars: Sequence[tuple[str, int]], most: int, cell: int) -> str:
    """Draw a bar chart: a bar in every second column of cells, over lines that are half a cell apart.

    Args:
        bars: Colour and height of each, in lines.
        most: Lines of the chart.
        cell: Pixels of a cell's side.
    """
    _, draw_module, _ = pillow()
    step = cell // 2
    height = -(-(most + 1) * step // cell) * cell
    image = sheet((2 * len(bars) + 1) * cell, height)
    draw = draw_module.Draw(image)
    floor = height - 1
    for line in range(most + 1):
        draw.line((0, floor - line * step, image.width, floor - line * step), fill=LINE)
    draw.line((0, floor, image.width, floor), fill=INK["black"])
    for place, (colour, value) in enumerate(bars):
        left = (2 * place + 1) * cell
        draw.rectangle((left, floor - value * step, left + cell - 1, floor - 1), fill=INK[colour])
    return as_uri(image)
