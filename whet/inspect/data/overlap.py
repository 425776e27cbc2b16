"""Finds equal and near-duplicate prompts, by hashes of folded texts and of their word n-grams, in linear memory."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from whet.tasks.images import all_images
from whet.types import Problem

View = Literal["text", "template"]
"""'text': as written; 'template': with every number replaced, because templated maths differs only in numbers."""

VIEWS: tuple[View, ...] = ("text", "template")
NUMBER = "#"
NUMBER_HASH = np.uint64(0x517CC1B727220A95)  # arbitrary value, unlikely to be a word's hash
# A number (with its commas and points), a letter of a script without spaces, a word, or a sign that maths needs. A
# hyphen between letters is punctuation.
TOKEN = re.compile(
    r"\d+(?:[.,]\d+)*|[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_]+|[+*/^=<>%|(){}\[\]]|(?<![^\W\d_])-|-(?![^\W\d_])"
)
# Odd, so that multiplying loses no bits modulo 2^64.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def fold(text: str) -> list[str]:
    """Cut a text into words, numbers and maths signs; drop case, white space and other punctuation."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return [match.replace(",", "") for match in TOKEN.findall(folded)]


@dataclass(frozen=True, slots=True)
class Texts:
    """The folded prompts of a split.

    Attributes:
        keys: By view, the hash of each whole text (maths signs count).
        words_N: By view, the hash of each word of all texts (maths signs do not count), uint64.
        owner_N: Index of the text that each word is from, ascending, int64.
        num_words: Words of each text, int64.
    """

    keys: dict[View, list[bytes]]
    words_N: dict[View, np.ndarray]
    owner_N: np.ndarray
    num_words: np.ndarray


def fold_prompts(problems: Sequence[Problem]) -> Texts:
    """Fold the prompts of problems, whole conversations where they are some; words about different images are different
    words.

    System messages tell prompts apart, but their words are not compared: all rows of a data set may have the same ones.
    """
    keys: dict[View, list[bytes]] = {view: [] for view in VIEWS}
    words: dict[View, list[int]] = {view: [] for view in VIEWS}
    num_words = np.zeros(len(problems), dtype=np.int64)
    known: dict[str, int] = {NUMBER: int(NUMBER_HASH)}
    for index, problem in enumerate(problems):
        said = [m.content for m in problem.messages if m.role != "system"] or [problem.prompt]
        tokens = fold("\n".join(said))
        system = [" ".join(fold(m.content)) for m in problem.messages if m.role == "system"]
        images = all_images(problem)
        mark = _number_of("\x00".join(images)) if images else 0
        masked = [NUMBER if token[0].isdigit() else token for token in tokens]
        for view, shown in zip(VIEWS, (tokens, masked), strict=True):
            whole = "\x00".join((" ".join(shown), *images, *system))
            keys[view].append(hashlib.blake2b(whole.encode(), digest_size=16).digest())
            kept = [token for token in shown if token[0].isalnum() or token == NUMBER]
            for token in kept:
                if token not in known:
                    known[token] = _number_of(token)
            # Numbers stay as they are, because they are counted; n-grams of more numbers than words are left out.
            words[view] += [known[token] if token == NUMBER else known[token] ^ mark for token in kept]
            num_words[index] = len(kept)
    arrays: dict[View, np.ndarray] = {
        view: np.array(values, dtype=np.uint64) for view, values in words.items()
    }
    return Texts(keys, arrays, np.repeat(np.arange(len(problems)), num_words), num_words)


def _number_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def ngrams(texts: Texts, view: View, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hash every run of `n` words within a text, except those with more than half replaced numbers.

    Returns:
        Hash of each n-gram, uint64, and the index of its text.
    """
    words_N, owner_N = texts.words_N[view], texts.owner_N
    count = max(len(words_N) - n + 1, 0)
    hashes, num_numbers = np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.int64)
    for offset in range(n):
        words = words_N[offset : offset + count]
        hashes = hashes * MULTIPLIER + words
        num_numbers += words == NUMBER_HASH
    kept = (owner_N[:count] == owner_N[n - 1 :][:count]) & (2 * num_numbers <= n)
    return hashes[kept], owner_N[:count][kept]


def shared_ngrams(held_out: Texts, train: Texts, view: View, n: int) -> np.ndarray:
    """Return for each held-out text the share of its n-grams that occur anywhere in `train`; NaN if it has none."""
    hashes, owner = ngrams(held_out, view, n)
    found = np.isin(hashes, np.unique(ngrams(train, view, n)[0]))
    total = np.bincount(owner, minlength=len(held_out.num_words))
    hits = np.bincount(owner, weights=found, minlength=len(held_out.num_words))
    return np.divide(hits, total, out=np.full(len(total), np.nan), where=total > 0)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of a held-out split with the training split, in one view.

    Attributes:
        score: For each held-out text the share of n-grams that occur in train; 1 if the whole text does; NaN if it is
            too short.
        is_equal: Whether the whole folded text occurs in train.
        pairs: (held-out index, train index) of the texts with the highest scores, worst first.
    """

    score: np.ndarray
    is_equal: np.ndarray
    pairs: list[tuple[int, int]]


def compare(
    held_out: Texts, train: Texts, view: View, *, ngram: int, short_ngram: int, num_pairs: int
) -> Overlap:
    """Compare a held-out split with the training split.

    Args:
        held_out: Texts of the held-out split.
        train: Texts of the training split.
        view: As written, or with numbers replaced.
        ngram: Words per n-gram of texts with at least twice as many words.
        short_ngram: Words per n-gram of shorter texts; those with fewer words are only compared as a whole.
        num_pairs: Worst pairs to find.

    Returns:
        The overlap.
    """
    # Reversed, so that of equal training texts the first one stays.
    first_index = {key: index for index, key in reversed(list(enumerate(train.keys[view])))}
    is_equal = np.array([key in first_index for key in held_out.keys[view]], dtype=bool)

    is_long = held_out.num_words >= 2 * ngram
    share_long = shared_ngrams(held_out, train, view, ngram)
    share_short = shared_ngrams(held_out, train, view, short_ngram)
    score = np.where(is_equal, 1.0, np.where(is_long, share_long, share_short))

    # The worst texts, each with its equal training text, or else the nearest one.
    ranked = np.argsort(-np.nan_to_num(score, nan=-1.0), kind="stable")[:num_pairs]
    worst = [int(index) for index in ranked if score[index] > 0]
    twins = {index: first_index.get(held_out.keys[view][index]) for index in worst}
    unmatched = [index for index in worst if twins[index] is None]
    twins |= _nearest(held_out, train, view, ngram, [index for index in unmatched if is_long[index]])
    twins |= _nearest(
        held_out, train, view, short_ngram, [index for index in unmatched if not is_long[index]]
    )
    pairs = [(index, twin) for index in worst if (twin := twins[index]) is not None]
    return Overlap(score, is_equal, pairs)


def _nearest(
    held_out: Texts, train: Texts, view: View, n: int, wanted: Sequence[int]
) -> dict[int, int | None]:
    """Return for each given held-out text the training text that shares most of its n-grams."""
    if not wanted:
        return {}
    hashes, owner = ngrams(held_out, view, n)
    train_hashes, train_owner = ngrams(train, view, n)
    found: dict[int, int | None] = {}
    for index in wanted:
        hits = np.isin(train_hashes, hashes[owner == index])
        found[index] = int(np.bincount(train_owner[hits]).argmax())
    return found
