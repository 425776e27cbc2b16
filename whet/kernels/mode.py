"""The switch that says which kernels may run, read by what builds them and by what chooses them."""

from __future__ import annotations

import os
from typing import Literal

from whet.types import UserError

VARIABLE = "WHET_KERNELS"


def mode() -> Literal["auto", "cpp", "eager", "triton"]:
    """Read the `WHET_KERNELS` switch.

    Raises:
        UserError: If its value is unknown.
    """
    value = os.environ.get(VARIABLE, "auto")
    if value == "auto" or value == "cpp" or value == "eager" or value == "triton":
        return value
    raise UserError(
        f"{VARIABLE} = {value!r}: expected auto, cpp, eager or triton; unset it or set one of them"
    )
