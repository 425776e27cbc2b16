"""The task `sanity`: fifty fixed, easy problems that check whether a checkpoint still has basic arithmetic."""

from __future__ import annotations

import hashlib
from functools import cache

from whet.rewards.answers.equal import answers_equal
from whet.tasks.read import check_split
from whet.types import Problem, problem_uid

NUM_PROBLEMS = 50

# (subject, steps, question, working, answer); a, b and c are the numbers drawn.
FORMS = (
    ("symbols", "one", "What is {a} + {b}?", "{a} + {b} = {sum}", "{sum}"),
    ("symbols", "two", "What is {a} * {b} + {c}?", "{a} * {b} = {product}\n{product} + {c} = {last}", "{last}"),
    ("words", "one", "Lena has {a} shells and finds {b} more. How many shells does Lena have now?",
     "{a} + {b} = {sum}", "{sum}"),
    ("words", "two", "A shop sells {a} bags of {b} rolls each, and {c} single rolls. How many rolls is that in all?",
     "{a} * {b} = {product}\n{product} + {c} = {last}", "{last}"),
    ("symbols", "one", "What is {a} * {b}?", "{a} * {b} = {product}", "{product}"),
    ("symbols", "two", "What is ({a} + {b}) * {c}?", "{a} + {b} = {sum}\n{sum} * {c} = {scaled}", "{scaled}"),
    ("words", "one", "There are {a} tables in a hall and {b} chairs at each table. How many chairs are in the hall?",
     "{a} * {b} = {product}", "{product}"),
    ("words", "two", "A class has {a} girls and {b} boys. Each child brings {c} books. How many books do they bring?",
     "{a} + {b} = {sum}\n{sum} * {c} = {scaled}", "{scaled}"),
    ("symbols", "two", "What is {a} + {b} + {c}?", "{a} + {b} = {sum}\n{sum} + {c} = {total}", "{total}"),
    ("words", "two", "Tom walks {a} km on Monday, {b} km on Tuesday and {c} km on Friday. How many km does he walk?",
     "{a} + {b} = {sum}\n{sum} + {c} = {total}", "{total}"),
)  # fmt: skip


class Sanity:
    """Sums and products of small numbers in one or two steps, in symbols and in words: a smoke test, not a benchmark.

    Five problems of each of ten forms; the numbers, 2 to 20, are drawn by a hash. All are in the test split, so that
    they cannot be trained on by accident.
    """

    name = "sanity"

    def problems(self, split: str) -> list[Problem]:
        """Return the 50 problems of 'test'; 'train' and 'dev' have none.

        Raises:
            ValueError: If there is no such split.
        """
        check_split(split)
        return list(_drawn()) if split == "test" else []

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Say whether the answer is the number, written as a number."""
        return answer is not None and answers_equal(answer, problem.answer, plain_number=True)


@cache
def _drawn() -> tuple[Problem, ...]:
    """Draw the problems, without repetition, in a fixed order."""
    found: dict[str, Problem] = {}
    index = 0
    while len(found) < NUM_PROBLEMS:
        subject, steps, question, working, answer = FORMS[len(found) % len(FORMS)]
        digest = hashlib.sha256(f"whet sanity {index}".encode()).digest()
        a, b, c = (2 + byte % 19 for byte in digest[:3])
        numbers = {"a": a, "b": b, "c": c, "sum": a + b, "product": a * b}
        numbers |= {"last": a * b + c, "scaled": (a + b) * c, "total": a + b + c}
        prompt = question.format_map(numbers)
        found[prompt] = Problem(
            uid=problem_uid(Sanity.name, prompt),
            task=Sanity.name,
            prompt=prompt,
            answer=answer.format_map(numbers),
            solution=working.format_map(numbers),
            meta={"subject": subject, "level": f"{steps} step{'s' if steps == 'two' else ''}"},
        )
        index += 1
    return tuple(found.values())
