"""The task `words`: word problems of one or two steps with small numbers, which a model of 135M can learn to solve."""

from __future__ import annotations

from whet.rewards.answers.equal import answers_equal
from whet.tasks.made.draft import Draft, Draw, Generated
from whet.types import Problem, Task

NUM_PROBLEMS = 4_000
NAMES = (
    ["Tom", "Anna", "Ben", "Lucy", "Sam", "Mia", "Jack", "Ella"],
    ["Olga", "Ivan", "Nora", "Hugo", "Rosa", "Karl", "Lena", "Omar"],
)
THINGS = (
    ["apples", "books", "pens", "coins", "cards", "shells"],
    ["eggs", "stamps", "marbles", "tickets", "roses", "pears"],
)
"""Of level 1, and of level 2."""

# (question, working, answer, solution) by level; n and m are names, o things, a, b, c and k numbers that are drawn.
FORMS = (
    (
        ("{n} has {a} {o}. Then {n} gets {b} more. How many {o} does {n} have now?", "{a} + {b} = {sum}", "{sum}",
         "{n} has {a} + {b} = {sum} {o} now."),
        ("{n} had {sum} {o} and gave away {b}. How many {o} are left?", "{sum} - {b} = {a}", "{a}",
         "{sum} - {b} = {a} {o} are left."),
        ("{n} has {a} {o}, buys {b} more and loses {c}. How many {o} does {n} have now?",
         "{a} + {b} = {sum}\n{sum} - {c} = {rest}", "{rest}",
         "{n} has {a} + {b} = {sum} {o}, then {sum} - {c} = {rest} {o}."),
        ("{n} has {k} bags with {b} {o} each. How many {o} are there in all?", "{k} * {b} = {product}", "{product}",
         "There are {k} * {b} = {product} {o} in all."),
    ),
    (
        ("{n} collected {a} {o}. {m} collected {b}. How many {o} did they collect together?",
         "{a} + {b} = {sum}", "{sum}", "Together they collected {a} + {b} = {sum} {o}."),
        ("{n} has {sum} {o} and {m} has {b}. How many more {o} does {n} have than {m}?",
         "{sum} - {b} = {a}", "{a}", "{n} has {sum} - {b} = {a} {o} more."),
        ("A shop had {sum} {o}. It sold {b} in the morning and got {c} new ones later. How many {o} does it have now?",
         "{sum} - {b} = {a}\n{a} + {c} = {grown}", "{grown}",
         "It has {sum} - {b} = {a} {o}, then {a} + {c} = {grown} {o}."),
        ("{n} puts {product} {o} into {k} boxes, the same number in each. How many {o} are in a box?",
         "{product} / {k} = {b}", "{b}", "There are {product} / {k} = {b} {o} in a box."),
    ),
)  # fmt: skip


def words(*, level: int = 0, seed: int = 0, num_problems: int = 0) -> Task:
    """Return the task `words`: level 1 has four kinds of problems; level 2 has four others, of other people and things.

    Splits go by the kind and its numbers, so that no problem of 'test' is one of 'train' with other names.

    Args:
        level: A single level; 0 mixes them.
        seed: Seed of the draws.
        num_problems: Problems in all splits together; 0 means 4,000.
    """
    return Generated(
        "words",
        _make,
        is_right,
        num_levels=len(FORMS),
        num_problems=num_problems or NUM_PROBLEMS,
        level=level,
        seed=seed,
    )


def is_right(problem: Problem, answer: str) -> bool:
    """Say whether the answer is the number."""
    return answers_equal(answer, problem.answer)


def _make(draw: Draw, level: int) -> list[Draft]:
    kind = draw.below(len(FORMS[level - 1]))
    question, working, answer, solution = FORMS[level - 1][kind]
    n, m = draw.shuffled(NAMES[level - 1])[:2]
    a, b, k = draw.between(2, 15), draw.between(2, 15), draw.between(2, 5)
    if "{k}" in question:
        b = draw.between(2, 9)
    c = draw.between(2, min(15, a + b - 1))
    numbers = {"sum": a + b, "rest": a + b - c, "grown": a + c, "product": k * b}
    values = {"n": n, "m": m, "o": draw.one(THINGS[level - 1]), "a": a, "b": b, "c": c, "k": k, **numbers}
    # What a kind does not name makes no difference.
    key = f"{level}.{kind} " + working.format_map(values)
    question, answer, solution = (form.format_map(values) for form in (question, answer, solution))
    return [Draft(key, question, answer, solution)]
