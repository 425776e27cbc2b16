"""The task `products`: products of two four-digit numbers, too hard for a small scratch-pad, easy with a calculator."""

from __future__ import annotations

import hashlib
import json
from functools import cache

from whet.rewards.answers.equal import answers_equal
from whet.schema import CALLS
from whet.tasks.read import check_split, split_of
from whet.types import Problem, problem_uid

DEV_PERCENT = 5
TEST_PERCENT = 8
NUM_PROBLEMS = 20_000


class Products:
    """`4837*9265=`, worked as on paper, or by one calculator call if the model has one.

    The scratch-pad writes the partial products from the ones up, then adds them in a running sum. 20,000 of the
    81,000,000 products are drawn by a hash; splits go by the hash of the unordered numbers.
    """

    name = "products"
    alphabet = "0123456789*+=,"

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test' in a fixed order.

        Raises:
            ValueError: If there is no such split.
        """
        check_split(split)
        return [_problem(a, b) for a, b in _drawn() if _split(a, b) == split]

    def is_correct(self, problem: Problem, answer: str | None) -> bool | None:
        """Say whether the answer is the product, written as a number."""
        return answer is not None and answers_equal(answer, problem.answer, plain_number=True)


@cache
def _drawn() -> tuple[tuple[int, int], ...]:
    """Draw the problems, without repetition, in a fixed order."""
    found: dict[tuple[int, int], None] = {}
    index = 0
    while len(found) < NUM_PROBLEMS:
        digest = hashlib.sha256(f"whet products {index}".encode()).digest()
        value = int.from_bytes(digest[:8], "little") % 9000**2
        found[(1000 + value % 9000, 1000 + value // 9000)] = None
        index += 1
    return tuple(found)


def _split(a: int, b: int) -> str:
    unordered = problem_uid(Products.name, "*".join(map(str, sorted((a, b)))))
    return split_of(unordered, dev_percent=DEV_PERCENT, test_percent=TEST_PERCENT)


def _problem(a: int, b: int) -> Problem:
    prompt = f"{a}*{b}="
    parts = [a * int(digit) * 10**place for place, digit in enumerate(reversed(str(b)))]
    total, sums = parts[0], str(parts[0])
    for part in parts[1:]:
        total += part
        sums += f"+{part}={total}"
    return Problem(
        uid=problem_uid(Products.name, prompt),
        task=Products.name,
        prompt=prompt,
        answer=str(a * b),
        solution=f"{','.join(map(str, parts))},{sums}",
        meta={CALLS: json.dumps([[f"{a}*{b}", str(a * b)]])},
    )
