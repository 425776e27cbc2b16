"""The task `arithmetic`: generated sums of three two-digit numbers with a scratch-pad, for the demo and the tests."""

from __future__ import annotations

import hashlib
from functools import cache

from whet.rewards.answers.equal import answers_equal
from whet.tasks.read import check_split, split_of
from whet.types import Problem, problem_uid

DEV_PERCENT = 5
TEST_PERCENT = 8
NUM_PROBLEMS = 30_000


class Arithmetic:
    """`47+85+39=`, worked digit by digit as on paper, in running sums.

    The scratch-pad adds the ones, then the carry and the tens: `7+5=12+9=21,2+4=6+8=14+3=17`, so 171. Three numbers,
    because in some runs small models learn to add two directly, so that thinking does not help. 30,000 of the 729,000
    problems are drawn by a hash. Splits go by the hash of the *unordered* numbers, so that no rearrangement of a test
    problem is in the training split.
    """

    name = "arithmetic"
    alphabet = "0123456789+=,"

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test' in a fixed order.

        Raises:
            ValueError: If there is no such split.
        """
        check_split(split)
        return list(_problems(split))

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Say whether the answer is the sum, written as a number."""
        return answer is not None and answers_equal(answer, problem.answer, plain_number=True)


@cache
def _problems(split: str) -> tuple[Problem, ...]:
    """Write a split's problems once: a run asks for each split again and again, and hashing takes a second."""
    return tuple(_problem(numbers) for numbers in _splits()[split])


@cache
def _splits() -> dict[str, list[tuple[int, int, int]]]:
    """Sort what is drawn by the hash of the unordered numbers."""
    found: dict[str, list[tuple[int, int, int]]] = {"train": [], "dev": [], "test": []}
    for numbers in _drawn():
        found[_split(numbers)].append(numbers)
    return found


def _drawn() -> tuple[tuple[int, int, int], ...]:
    """Draw the problems, without repetition, in a fixed order."""
    found: dict[tuple[int, int, int], None] = {}
    index = 0
    while len(found) < NUM_PROBLEMS:
        digest = hashlib.sha256(f"whet arithmetic {index}".encode()).digest()
        value = int.from_bytes(digest[:8], "little") % 90**3
        found[(10 + value % 90, 10 + value // 90 % 90, 10 + value // 8100)] = None
        index += 1
    return tuple(found)


def _split(numbers: tuple[int, int, int]) -> str:
    unordered = problem_uid(Arithmetic.name, "+".join(map(str, sorted(numbers))))
    return split_of(unordered, dev_percent=DEV_PERCENT, test_percent=TEST_PERCENT)


def _problem(numbers: tuple[int, int, int]) -> Problem:
    prompt = "+".join(map(str, numbers)) + "="
    ones, total = _running_sum([number % 10 for number in numbers])
    tens, _ = _running_sum([total // 10, *(number // 10 for number in numbers)])
    uid = problem_uid(Arithmetic.name, prompt)
    return Problem(
        uid=uid, task=Arithmetic.name, prompt=prompt, answer=str(sum(numbers)), solution=f"{ones},{tens}"
    )


def _running_sum(digits: list[int]) -> tuple[str, int]:
    """Write `7+5=12+9=21` for 7, 5, 9; return it and the sum."""
    text, total = str(digits[0]), digits[0]
    for digit in digits[1:]:
        total += digit
        text += f"+{digit}={total}"
    return text, total
