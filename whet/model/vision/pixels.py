"""From a picture to what a tower reads: resized, normalised, cut into patches, as transformers' processors do it.

Pillow resizes (the extra `vision`); the rest is numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from whet.model.config import VisionConfig
from whet.model.vision.tower import Grid
from whet.types import UserError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BICUBIC = 3
MAX_RATIO = 200
"""Largest ratio of an image's sides, as in Qwen2-VL's processor."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How pictures are made into patches."""

    vision: VisionConfig
    """The tower that reads them."""
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
    stored: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The file that it was read from, as it is written again."""

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
        side = self.vision.patch_size * self.vision.merge
        rows, columns = (n // side for n in self._size(height, width))
        return Grid(rows, columns)

    def patches(self, picture_HWC: np.ndarray) -> torch.Tensor:
        """Return a picture's patches, float32.

        Args:
            picture_HWC: uint8 [height, width, 3], RGB.
        """
        if picture_HWC.ndim != 3 or picture_HWC.shape[2] != 3 or picture_HWC.dtype != np.uint8:
            raise ValueError(f"a picture of {picture_HWC.shape}, {picture_HWC.dtype}: expected RGB in uint8")
        size = self._size(*picture_HWC.shape[:2])
        return self._squares(self._normalised(resized(picture_HWC, size, self.resample)))

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that a picture is resized to: the ratio is kept as far as whole squares allow.

        Source: Qwen2-VL's image processor (`smart_resize`).
        """
        factor = self.vision.patch_size * self.vision.merge
        if max(height, width) > MAX_RATIO * min(height, width):
            raise UserError(
                f"an image of {width} x {height} pixels: one side is over {MAX_RATIO} times the other, which this "
                "model cannot read; crop it"
            )
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

    def _normalised(self, picture_HWC: np.ndarray) -> np.ndarray:
        """Return float32 pixels, in the order of operations of transformers' processors."""
        pixels = picture_HWC.astype(np.float64) * self.factor if self.factor else picture_HWC
        mean, std = (np.array(values, dtype=np.float32) for values in (self.mean, self.std))
        return (pixels.astype(np.float32) - mean) / std

    def _squares(self, picture_HWC: np.ndarray) -> torch.Tensor:
        """Cut into patches [I, 3 frames P P], square by square."""
        patch, side = self.vision.patch_size, self.vision.merge
        rows, columns = (n // (patch * side) for n in picture_HWC.shape[:2])
        cut = picture_HWC.reshape(rows, side, patch, columns, side, patch, 3)
        cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
        shape = (*cut.shape[:5], self.vision.frames, patch, patch)
        return torch.from_numpy(np.broadcast_to(cut, shape).reshape(rows * columns * side**2, -1).copy())


def resized(picture_HWC: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    """Resize a picture with Pillow.

    Raises:
        UserError: If Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise UserError("images need Pillow: pip install 'whet[vision]'") from None
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
    sizes = {
        "patch_size": vision.patch_size,
        "merge_size": vision.merge,
        "temporal_patch_size": vision.frames,
    }
    _expect(data, **sizes)
    size = data.get("size") or {}
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    least, most = data.get("min_pixels") or least, data.get("max_pixels") or most
    found = Preprocessing(
        vision=vision,
        min_pixels=int(least or 56 * 56),
        max_pixels=int(most or 28 * 28 * 1280),
        resample=int(data.get("resample", BICUBIC)),
        factor=float(data.get("rescale_factor", 1 / 255)) if data.get("do_rescale", True) else 0.0,
        mean=_channels(data.get("image_mean", CLIP_MEAN), "image_mean"),
        std=_channels(data.get("image_std", CLIP_STD), "image_std"),
        stored=data,
    )
    if not 0 < found.min_pixels <= found.max_pixels:
        raise ValueError(f"pixels from {found.min_pixels} to {found.max_pixels}: expected a range")
    return found


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
