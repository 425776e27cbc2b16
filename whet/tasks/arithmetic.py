"""Two-digit addition with a scratch-pad: data made on the spot, for the demo and the tests."""

from __future__ import annotations

from whet.rewards.equal import answers_equal
from whet.tasks.read import check_split, split_of
from whet.types import Problem, problem_uid

DEV_PERCENT = 5
TEST_PERCENT = 12


class Arithmetic:
    """All ordered pairs of two-digit numbers, `47+85=`, worked digit by digit as on paper.

    The scratch-pad adds the ones, then the carry and the tens: `7+5=12,1+4+8=13`. Splits go by the hash of
    the *unordered* pair, so that no test problem has its mirror image in the training split.
    """

    name = "arithmetic"
    alphabet = "0123456789+=,"

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test' in a fixed order.

        Raises:
            ValueError: If there is no such split.
        """
        check_split(split)
        return [
            self._problem(left, right)
            for left in range(10, 100)
            for right in range(10, 100)
            if self._split(left, right) == split
        ]

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Say whether the answer is the sum."""
        return answer is not None and answers_equal(answer, problem.answer, plain_number=True)

    def _split(self, left: int, right: int) -> str:
        pair = problem_uid(self.name, f"{min(left, right)}+{max(left, right)}")
        return split_of(pair, dev_percent=DEV_PERCENT, test_percent=TEST_PERCENT)

    def _problem(self, left: int, right: int) -> Problem:
        prompt = f"{left}+{right}="
        ones = left % 10 + right % 10
        carry, tens = ones // 10, ones // 10 + left // 10 + right // 10
        work = f"{left % 10}+{right % 10}={ones},{carry}+{left // 10}+{right // 10}={tens}"
        uid = problem_uid(self.name, prompt)
        return Problem(uid=uid, task=self.name, prompt=prompt, answer=str(left + right), solution=work)
