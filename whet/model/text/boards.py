"""A tokenizer for lines of chess: one token a square of a board, a square of a move, or a number."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from itertools import combinations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from whet.model.text.template import PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer

EMPTY = "_"
"""An empty square. Numbers of them stand in a FEN; here each square is a token, so that all boards have 64."""
MAX_SPACES, MAX_COUNT = 64, 300
_BOARD_AFTER = r"(?=[pnbrqkPNBRQK1-8/_]*\ [wb]\ )"
"""What follows a digit of a board: the rest of the board, and the side to move."""


def boards(tags: Sequence[str] = ()) -> Tokenizer:
    """Create the tokenizer: <pad> 0, <eos> 1, <unk> 2, then the tags, then 700 pieces of text.

    Castling rights and counters have their space in them, evaluations are a whole number, a dot and two digits; other
    printable ASCII is spelt letter by letter. What it reads comes back unchanged from its ids, but for underscores.
    """
    rights = ["".join(some) for count in range(1, 5) for some in combinations("KQkq", count)]
    pieces = [
        *("P: ", "A: ", "M:", "E:", "B:", "0.001", "-1.0+", "1.0+", "0.5+"),
        *(f"{file}{rank}" for rank in range(1, 9) for file in "abcdefgh"),
        *(f" {right}" for right in (*rights, "-", "w", "b")),
        *(f" {number}" for number in range(MAX_COUNT + 1)),
        *(f"{number}" for number in range(MAX_COUNT + 1) if number > 9),
        *(f"0{digit}" for digit in range(10)),
        *(" " * count for count in range(1, MAX_SPACES + 1)),
    ]
    letters = [letter for letter in string.printable if letter not in "\t\x0b\x0c\r" and letter not in pieces]
    texts = list(dict.fromkeys(["<pad>", "<eos>", "<unk>", *tags, *pieces, *letters]))
    pattern = "|".join(
        [
            *map(re.escape, tags),
            r"P: |A: |M:|E:|B:",
            r" [wb](?= )",
            r" (?:KQ?k?q?|Qk?q?|kq?|q|-)(?= )",
            r"[a-h][1-8]",
            r"0\.001(?=\+)|(?:-?1\.0|0\.5)\+",
            r" (?:[0-9]|[1-9][0-9]|[12][0-9]{2}|300)(?![0-9.])",
            r"(?:0[0-9]|[1-9][0-9]|[12][0-9]{2}|300)(?![0-9])",
            f" {{1,{MAX_SPACES}}}",
            r"[\s\S]",
        ]
    )
    backend = tokenizers.Tokenizer(
        models.WordLevel(vocab={text: index for index, text in enumerate(texts)}, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(tokenizers.Regex(f"{digit}{_BOARD_AFTER}"), EMPTY * digit)
            for digit in range(1, 9)
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Fuse(), *(decoders.Replace(EMPTY * digit, str(digit)) for digit in range(8, 0, -1))]
    )
    special = [AddedToken(text, special=True, normalized=False) for text in texts[: 3 + len(tags)]]
    backend.add_special_tokens(special)
    return Tokenizer(
        backend,
        roles={"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"},
        chat_template=PLAIN_TEMPLATE,
    )
