"""Image files, read within limits."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np

from whet.install import install_command
from whet.model.vision.store import Picture
from whet.types import UserError


def read_picture(source: str) -> Picture:
    """Read an image.

    Args:
        source: Path, or a data URI with the file itself (base64).

    Raises:
        UserError: If it cannot be read.
    """
    try:
        from PIL import Image
    except ImportError:
        raise UserError(f"images need Pillow: {install_command('vision')}") from None
    data = base64.b64decode(source.partition(",")[2]) if source.startswith("data:") else Path(source).read_bytes()
    with Image.open(io.BytesIO(data)) as image:
        return Picture.of(data, np.asarray(image.convert("RGB")))
