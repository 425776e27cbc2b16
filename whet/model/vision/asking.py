"""Images in chat messages: where they stand, and what a prompt's text and ids have in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.types import UserError

KINDS = ("image", "image_url", "input_image")
"""Types of content parts that are images: transformers' and OpenAI's."""
FIELDS = ("image", "image_url", "url", "path", "base64")
"""Fields of such a part that name the image, or hold its file."""


def is_image_part(part: object) -> bool:
    """Say whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in KINDS


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sources of all images of a conversation, in order.

    Args:
        messages: Chat messages, whose content is text or a list of parts.

    Raises:
        UserError: If an image part names no image.
    """
    found = []
    for place, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if is_image_part(part):
                found.append(_source(part, f"message {place}"))
    return found


def _source(part: Mapping[str, Any], where: str) -> str:
    for name in FIELDS:
        value = part.get(name)
        if isinstance(value, Mapping):  # OpenAI: {"image_url": {"url": ...}}
            value = value.get("url")
        if value is not None and not isinstance(value, str):
            raise UserError(
                f"{where}: {name!r} of an image part is {type(value).__name__}; expected a path, a data URI or a URL "
                "(in Python also bytes of a file, or Pillow's image)"
            )
        if value:
            return value if name != "base64" or value.startswith("data:") else f"data:;base64,{value}"
    raise UserError(
        f"{where}: an image part has {', '.join(map(str, part)) or 'nothing'}; expected 'image' with a path, a data "
        "URI or a URL"
    )


def flattened(messages: Sequence[Mapping[str, Any]], placeholder: str) -> list[dict[str, Any]]:
    """Return messages whose content is text, with a placeholder where an image stands.

    Args:
        messages: Chat messages.
        placeholder: Text of the placeholder token.
    """
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [placeholder if is_image_part(part) else str(part.get("text", "")) for part in content]
            message = {**message, "content": "".join(parts)}
        found.append(dict(message))
    return found
