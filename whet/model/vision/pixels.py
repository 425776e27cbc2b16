"""From a picture to what a tower reads: resized, normalised, cut into patches, as transformers' processors do it.

Pillow resizes (the extra `vision`); the rest is numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from whet.install import install_command
from whet.model.config import VisionConfig
from whet.model.vision.tower import Grid
from whet.types import UserError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
MAX_SIDE = 4096
"""Longest side of a picture before it is cut into tiles, as in Idefics3's processor."""
MAX_RATIO = 200
"""Largest ratio of an image's sides, as in Qwen2-VL's processor."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How pictures are made into patches."""

    vision: VisionConfig
    """The tower that reads them."""
    fit: Literal["any", "square", "crop", "tiles"] = "any"
    """Of towers that read squares alone: the whole picture made square, its middle, or tiles of it and the whole."""
    edge: int = 0
    """Pixels of the shorter side before the middle is cut out, or of the longer one before tiles are."""
    is_split: bool = True
    """Whether tiles are cut at all."""
    min_pixels: int = 65536
    """Smaller pictures are enlarged (towers that read any size)."""
    max_pixels: int = 16777216
    """Larger ones are made smaller."""
    resample: int = BICUBIC
    """Filter, by Pillow's number."""
    factor: float = 1 / 255
    """Factor of the pixels before they are normalised; 0 leaves them."""
    mean: tuple[float, ...] = HALF
    """Subtracted from each channel."""
    std: tuple[float, ...] = HALF
    """Each channel is divided by it."""
    max_tokens: int = 0
    """Placeholder tokens that a picture was limited to (`limited`); 0 where the model's own limits hold."""
    stored: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The file that it was read from, as it is written again."""

    def limited(self, max_tokens: int) -> Preprocessing:
        """Return one that makes pictures smaller where they have more placeholder tokens than that.

        Raises:
            UserError: If the tower reads one size alone.
        """
        if self.fit != "any":
            raise UserError(
                f"policy.max_image_tokens = {max_tokens}: this model reads images of one size; leave it out"
            )
        most = min(self.max_pixels, max_tokens * (self.vision.patch_size * self.vision.merge) ** 2)
        return replace(self, max_pixels=most, min_pixels=min(self.min_pixels, most), max_tokens=max_tokens)

    def grid(self, height: int, width: int) -> Grid:
        """Return the layout of a picture's placeholder tokens.

        Args:
            height: Its pixels.
            width: The same of a row.

        Raises:
            UserError: If the tower cannot read such a picture.
        """
        if not min(height, width) > 0:
            raise UserError(f"an image of {width} x {height} pixels has none; leave it out")
        if max(height, width) > MAX_RATIO * min(height, width):
            raise UserError(
                f"an image of {width} x {height} pixels: one side is over {MAX_RATIO} times the other, which this "
                "model cannot read; crop it"
            )
        patch, merge = self.vision.patch_size, self.vision.merge
        if self.fit == "any":
            rows, columns = (n // (patch * merge) for n in self._size(height, width))
            return Grid(rows, columns)
        side = self.vision.image_size // patch // merge
        return Grid(side, side, self._tiles(height, width)[1] if self.fit == "tiles" else (0, 0))

    def patches(self, picture_HWC: np.ndarray) -> torch.Tensor:
        """Return a picture's patches, float32.

        Args:
            picture_HWC: uint8 [height, width, 3], RGB.
        """
        if picture_HWC.ndim != 3 or picture_HWC.shape[2] != 3 or picture_HWC.dtype != np.uint8:
            raise ValueError(f"a picture of {picture_HWC.shape}, {picture_HWC.dtype}: expected RGB in uint8")
        if self.fit == "any":
            size = self._size(*picture_HWC.shape[:2])
            return self._squares(self._normalised(resized(picture_HWC, size, self.resample)))
        views = [self._squares(self._normalised(view)) for view in self._views(picture_HWC)]
        return torch.cat(views)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that a picture is resized to: the ratio is kept as far as whole squares allow.

        Source: Qwen2-VL's image processor (`smart_resize`).
        """
        factor = self.vision.patch_size * self.vision.merge
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            new_height = max(factor, math.floor(height / beta / factor) * factor)
            new_width = max(factor, math.floor(width / beta / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * beta / factor) * factor
            new_width = math.ceil(width * beta / factor) * factor
        return new_height, new_width

    def _views(self, picture_HWC: np.ndarray) -> list[np.ndarray]:
        """Return square views of the tower's size, the whole picture last."""
        side, (height, width) = self.vision.image_size, picture_HWC.shape[:2]
        if self.fit == "square":
            return [resized(picture_HWC, (side, side), self.resample)]
        if self.fit == "crop":
            long = int(self.edge * max(height, width) / min(height, width))
            size = (long, self.edge) if height > width else (self.edge, long)
            return [_middle(resized(picture_HWC, size, self.resample), side)]
        sizes, (rows, columns) = self._tiles(height, width)
        for size in sizes:  # one after the other, as Idefics 3's processor does
            picture_HWC = resized(picture_HWC, size, self.resample)
        if not rows:
            return [picture_HWC]
        tiles = [
            picture_HWC[row : row + side, column : column + side]
            for row in range(0, rows * side, side)
            for column in range(0, columns * side, side)
        ]
        return [*tiles, resized(picture_HWC, (side, side), self.resample)]

    def _tiles(self, height: int, width: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Return the sizes that a picture is resized to, and the rows and columns of tiles; (0, 0) for the whole alone.

        Source: Idefics3's image processor; its odd roundings are kept.
        """
        side, sizes = self.vision.image_size, []
        ratio = width / height
        if self.edge:
            if width >= height:
                width, height = self.edge, int(self.edge / ratio)
                height += height % 2
            else:
                height, width = self.edge, int(self.edge * ratio)
                width += width % 2
            height, width = max(height, 1), max(width, 1)
            ratio = width / height
            if width >= height and width > MAX_SIDE:
                width, height = MAX_SIDE, max(int(MAX_SIDE / ratio), 1)
            elif height > width and height > MAX_SIDE:
                height, width = MAX_SIDE, max(int(MAX_SIDE * ratio), 1)
            sizes.append((height, width))
        if not self.is_split:
            return [*sizes, (side, side)], (0, 0)
        ratio = width / height
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / ratio) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * ratio) / side) * side
        sizes.append((height, width))
        count = height // side, width // side
        return sizes, (0, 0) if count == (1, 1) else count

    def _normalised(self, picture_HWC: np.ndarray) -> np.ndarray:
        """Return float32 pixels, in the order of operations of transformers' processors."""
        pixels = picture_HWC.astype(np.float64) * self.factor if self.factor else picture_HWC
        mean, std = (np.array(values, dtype=np.float32) for values in (self.mean, self.std))
        return (pixels.astype(np.float32) - mean) / std

    def _squares(self, picture_HWC: np.ndarray) -> torch.Tensor:
        """Cut into patches [I, 3 frames P P]: square by square for Qwen's merger, else row by row."""
        patch = self.vision.patch_size
        side = self.vision.merge if self.vision.tower == "qwen" else 1
        rows, columns = (n // (patch * side) for n in picture_HWC.shape[:2])
        whole = picture_HWC[: rows * side * patch, : columns * side * patch]
        cut = whole.reshape(rows, side, patch, columns, side, patch, 3)
        cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
        shape = (*cut.shape[:5], self.vision.frames or 1, patch, patch)
        return torch.from_numpy(np.broadcast_to(cut, shape).reshape(rows * columns * side**2, -1).copy())


def _middle(picture_HWC: np.ndarray, side: int) -> np.ndarray:
    """Cut the square in the middle out of a picture whose sides are at least as long."""
    top, left = ((n - side) // 2 for n in picture_HWC.shape[:2])
    return picture_HWC[top : top + side, left : left + side]


def resized(picture_HWC: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    """Resize a picture with Pillow.

    Raises:
        UserError: If Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise UserError(f"images need Pillow: {install_command('vision')}") from None
    height, width = size
    picture = Image.fromarray(picture_HWC).resize((width, height), resample=Image.Resampling(resample))
    return np.asarray(picture)


# --- preprocessor_config.json ---------------------------------------------------------------------------------------


def read_preprocessing(data: Mapping[str, Any], vision: VisionConfig, where: str) -> Preprocessing:
    """Read a folder's preprocessor_config.json.

    Args:
        data: Its content; {} for the processor's defaults.
        vision: The tower.
        where: File, for errors.

    Raises:
        UserError: If it asks for what is not done here.
    """
    try:
        return _read(dict(data), vision)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise UserError(f"{where}: {error}") from None


def _read(data: dict[str, Any], vision: VisionConfig) -> Preprocessing:
    _expect(data, do_resize=True, do_normalize=True)
    size = data.get("size") or {}
    size = {"shortest_edge": size} if isinstance(size, int) else dict(size)
    mean, std = CLIP_MEAN, CLIP_STD
    own: dict[str, Any] = {}
    if vision.tower == "qwen":
        sizes = {
            "patch_size": vision.patch_size,
            "merge_size": vision.merge,
            "temporal_patch_size": vision.frames,
        }
        _expect(data, **sizes)
        own["min_pixels"] = int(data.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
        own["max_pixels"] = int(data.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
        if not 0 < own["min_pixels"] <= own["max_pixels"]:
            raise ValueError(f"pixels from {own['min_pixels']} to {own['max_pixels']}: expected a range")
    elif vision.projector == "shuffle":
        mean = std = HALF
        side = {"longest_edge": vision.image_size}
        _expect(data, max_image_size=side)
        own = {"fit": "tiles", "edge": int(size.get("longest_edge") or 0), "resample": LANCZOS}
        own["is_split"] = bool(data.get("do_image_splitting", True))
    elif "shortest_edge" in size or data.get("do_center_crop"):
        square = {"height": vision.image_size, "width": vision.image_size}
        crop = data.get("crop_size")
        _expect(
            {"crop_size": {"height": crop, "width": crop} if isinstance(crop, int) else crop},
            crop_size=square,
        )
        _expect(data, do_pad=False, do_center_crop=True)
        own = {"fit": "crop", "edge": int(size.get("shortest_edge") or vision.image_size)}
        if own["edge"] < vision.image_size:
            raise ValueError(f"shortest_edge = {own['edge']}: expected {vision.image_size} or more")
    else:
        if vision.projector == "pool":
            mean = std = HALF
            own["resample"] = BILINEAR
        square = {"height": vision.image_size, "width": vision.image_size}
        _expect({"size": size or None}, size=square)
        _expect(data, do_pad=False, do_center_crop=False, do_pan_and_scan=False)
        own["fit"] = "square"
    if data.get("resample") is not None:
        own["resample"] = int(data["resample"])
    return Preprocessing(
        vision=vision,
        factor=float(data.get("rescale_factor", 1 / 255)) if data.get("do_rescale", True) else 0.0,
        mean=_channels(data.get("image_mean") or mean, "image_mean"),
        std=_channels(data.get("image_std") or std, "image_std"),
        stored=data,
        **own,
    )


def _expect(data: Mapping[str, Any], **expected: Any) -> None:
    for name, value in expected.items():
        if data.get(name) is not None and data[name] != value:
            raise ValueError(f"{name} = {str(data[name])[:40]!r} is not supported; expected {value!r}")


def _channels(values: Any, name: str) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or len(values) != 3 or not all(math.isfinite(v) for v in values):
        raise ValueError(f"{name} = {str(values)[:60]!r}: expected three numbers")
    if name == "image_std" and min(values) <= 0:
        raise ValueError(f"{name} = {values}: expected positive numbers")
    return tuple(float(v) for v in values)
