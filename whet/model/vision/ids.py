"""Ids of images: each placeholder token of an image in a prompt names the image and its own place in it.

So a prompt's ids alone say what it is: prompts of two images are never equal, and nothing that carries ids needs
another field for images. `whet.model.vision.store` knows which image a key stands for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

IMAGE = 1 << 62
"""An id from here on is a token of an image: above all vocabularies, and still a positive int64."""
KEY_BITS, PLACE_BITS = 46, 16
MAX_TOKENS = 1 << PLACE_BITS
"""Placeholder tokens of one image, at most."""


def digest_of(data: bytes) -> bytes:
    """Return the SHA-256 of an image file's bytes."""
    return hashlib.sha256(data).digest()


def key_of_digest(digest: bytes) -> int:
    """Return an image's key: the first 46 bits of its file's SHA-256."""
    return int.from_bytes(digest[:8], "big") >> (64 - KEY_BITS)


def image_ids(key: int, count: int) -> tuple[int, ...]:
    """Return the ids of an image's placeholder tokens, first to last.

    Args:
        key: Its key.
        count: Number of them.
    """
    if not 0 < count <= MAX_TOKENS:
        raise ValueError(f"an image of {count:,} placeholder tokens: expected 1 to {MAX_TOKENS:,}")
    first = IMAGE | key << PLACE_BITS
    return tuple(range(first, first + count))


def is_image(token: int) -> bool:
    """Say whether an id is a token of an image."""
    return IMAGE <= token < 2 * IMAGE


def key_of(token: int) -> int:
    """Return the key of the image that a token is of."""
    return (token - IMAGE) >> PLACE_BITS


def place_of(token: int) -> int:
    """Return a token's place in its image."""
    return token & (MAX_TOKENS - 1)


def keys_in(tokens: Iterable[int]) -> tuple[int, ...]:
    """Return the keys of the images among tokens, each once, in order."""
    return tuple(dict.fromkeys(key_of(token) for token in tokens if is_image(token)))


def with_placeholder(tokens: Sequence[int], token_id: int) -> list[int]:
    """Return ids with each image's replaced by the placeholder token, as a tokenizer decodes them."""
    return [token_id if is_image(token) else token for token in tokens]
