"""The task `letters`: how many r are in strawberry?"""

from __future__ import annotations

from typing import Any

from whet.rewards.answers.equal import answers_equal
from whet.tasks.made.draft import Draft, Draw, FromRows, Generated
from whet.tasks.read import Row, text_fault
from whet.types import Problem, Task

NUM_PROBLEMS = 12_000
MAX_CHARACTERS = 60
LENGTHS = ((3, 6), (7, 10), (11, 16))
"""Letters of a word, by level."""
REAL_PERCENT = 20
ABSENT_PERCENT = 10
_WORDS = """
apple banana bread cheese cotton dinner effort engine follow garden happen hidden kettle letter little meadow
middle needle office parrot pepper planet puzzle rabbit ribbon school settle summer tunnel valley winter yellow
address balloon blossom bookshop business calendar carriage cinnamon coconut college common cottage daffodil
different elephant envelope evening factory feather fifteen giraffe grammar harvest illness kangaroo kitchen
lettuce mammal message million mississippi mountain necessary occasion opposite paradise pattern pepperoni
possible raspberry referee sausage sentence sheriff success tattoo terrific tobacco tomorrow umbrella village
volleyball vocabulary weather whisper strawberry blueberry cranberry accidentally accommodation bookkeeping
communication disappointment embarrassment extraordinary independence international knowledgeable lighthousekeeper
millennium misunderstanding onomatopoeia parallelogram perseverance possessiveness questionnaire recommendation
refrigerator rollercoaster subcommittee successfulness temperature transportation unnecessarily wheelbarrow
"""
_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sl sp st t th tr v w z"
_VOWELS = "a a e e i i o o u ai ea ee oo ou"
_CODAS = "n r l s t m ck ll ss tt mp nd rr"
WORDS, ONSETS, VOWELS = _WORDS.split(), _ONSETS.split(), _VOWELS.split()
CODAS = ["", "", "", *_CODAS.split()]


def letters(path: str = "", *, level: int = 0, seed: int = 0, num_problems: int = 0, **options: Any) -> Task:
    """Return the task `letters`: levels 1 to 3 by length of the word; one in five is an English word.

    Args:
        path: Data with columns word, letter and count; '' draws words.
        level: A single level; 0 mixes them.
        seed: Seed of the draws.
        num_problems: Problems in all splits together; 0 means 12,000.
        options: Of `FromRows`, for data: `max_bad_rows`, `held_out`.
    """
    if path:
        return FromRows("letters", path, _from_row, is_right, **options)
    return Generated(
        "letters",
        _make,
        is_right,
        num_levels=len(LENGTHS),
        num_problems=num_problems or NUM_PROBLEMS,
        level=level,
        seed=seed,
    )


def is_right(problem: Problem, answer: str) -> bool:
    """Say whether the answer is the count, written as a number."""
    return answers_equal(answer, problem.answer, plain_number=True)


def _make(draw: Draw, level: int) -> list[Draft]:
    low, high = LENGTHS[level - 1]
    if draw.below(100) < REAL_PERCENT:
        word = draw.one([word for word in WORDS if low <= len(word) <= high])
    else:
        length, word = draw.between(low, high), ""
        while len(word) < length:
            word += draw.one(ONSETS) + draw.one(VOWELS) + draw.one(CODAS)
        word = word[:length]
    letter = draw.one("abcdefghijklmnopqrstuvwxyz" if draw.below(100) < ABSENT_PERCENT else word)
    return [_draft(word, letter)]


def _draft(word: str, letter: str) -> Draft:
    """Spell the word, with the running count after each hit; anagrams share a key."""
    count, spelled = 0, []
    for character in word:
        count += character == letter
        spelled.append(f"{character}({count})" if character == letter else character)
    case = "" if word == word.lower() else " (upper and lower case differ)"
    prompt = f'How many times does the letter "{letter}" occur in "{word}"{case}?'
    return Draft("".join(sorted(word.lower())), prompt, str(count), " ".join(spelled))


def _from_row(row: Row) -> Draft | str:
    fault = text_fault(row, "word") or text_fault(row, "letter")
    if fault:
        return fault
    word, letter, count = row["word"].strip(), row["letter"].strip(), row.get("count")
    if len(letter) != 1 or len(word) > MAX_CHARACTERS:
        return (
            f"expected one letter and a word of at most {MAX_CHARACTERS}, got {letter[:20]!r}, {word[:80]!r}"
        )
    if str(count) != str(word.count(letter)):
        return f"'count' is {count!r}, but {letter!r} occurs {word.count(letter)} times in {word!r}"
    return _draft(word, letter)
