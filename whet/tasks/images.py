"""Images of problems: the same questions with blank or other images, to show whether a model looks."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import replace

from whet.model.vision.reading import read_picture
from whet.types import Problem, UserError

SHOWN = "images"
"""Label in `meta` of a problem whose images were replaced: 'blank', or the uid of the problem that they are from."""


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
