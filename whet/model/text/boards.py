"""A tokenizer for lines of chess: one token a piece on its square, a square of a move, or a number."""

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
PIECES = "pnbrqkPNBRQK" + EMPTY
SQUARE_MARKS = "".join(chr(0xE000 + index) for index in range(64))
"""Say which square a piece stands on, a8 first: one private character each, between normalizer and decoder."""
MAX_SPACES, MAX_COUNT, MAX_PAWNS = 64, 300, 30
_BOARD_AFTER = r"(?=[pnbrqkPNBRQK1-8/_]*\ [wb]\ )"
"""What follows a digit of a board: the rest of the board, and the side to move."""


def boards(tags: Sequence[str] = ()) -> Tokenizer:
    """Create the tokenizer: <pad> 0, <eos> 1, <unk> 2, then the tags, then 1,700 pieces of text.

    A token of a board is a piece on its square, or an empty square, with the slash after it: what stands on a square is
    found by the token, wherever in a line its board begins. A square where a move starts, castling rights and counters
    have their space in them; evaluations are a whole number with its dot, and decimals. Other printable ASCII is spelt
    letter by letter. What it reads comes back unchanged from its ids, but for underscores and `SQUARE_MARKS`.
    """
    rights = ["".join(some) for count in range(1, 5) for some in combinations("KQkq", count)]
    squares = [f"{file}{rank}" for rank in range(1, 9) for file in "abcdefgh"]
    pieces = [
        *("P: ", "A: ", "M:", "E:", "B:", "0.001", "-1.0+", "1.0+", "0.5+"),
        *(
            f"{piece}{mark}{'/' if index % 8 == 7 and index < 56 else ''}"
            for index, mark in enumerate(SQUARE_MARKS)
            for piece in PIECES
        ),
        *squares,
        *(f" {square}" for square in squares),
        *(f" {right}" for right in (*rights, "-", "w", "b")),
        *(f" {sign}{number}." for sign in ("", "-") for number in (*range(MAX_PAWNS + 1), 999)),
        *(f" {number}" for number in range(MAX_COUNT + 1)),
        *(f"{number}" for number in range(MAX_COUNT + 1) if number > 9),
        *(f"0{digit}" for digit in range(10)),
        *(" " * count for count in range(1, MAX_SPACES + 1)),
    ]
    letters = [letter for letter in string.printable if letter not in "\t\x0b\x0c\r" and letter not in pieces]
    texts = list(dict.fromkeys(["<pad>", "<eos>", "<unk>", *tags, *pieces, *letters]))
    marks = f"[{SQUARE_MARKS[0]}-{SQUARE_MARKS[-1]}]"
    pattern = "|".join(
        [
            *map(re.escape, tags),
            rf"[{PIECES}]{marks}/?",
            r"P: |A: |M:|E:|B:",
            r" [wb](?= )",
            r" (?:KQ?k?q?|Qk?q?|kq?|q|-)(?= )",
            r" ?[a-h][1-8]",
            r" -?(?:[12]?[0-9]|30|999)\.(?=[0-9])",
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
            *(
                normalizers.Replace(tokenizers.Regex(f"{digit}{_BOARD_AFTER}"), EMPTY * digit)
                for digit in range(1, 9)
            ),
            *(
                normalizers.Replace(tokenizers.Regex(_square(index)), mark)
                for index, mark in enumerate(SQUARE_MARKS)
            ),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    backend.decoder = decoders.Sequence(
        [
            decoders.Fuse(),
            decoders.Replace(tokenizers.Regex(marks), ""),
            *(decoders.Replace(EMPTY * digit, str(digit)) for digit in range(8, 0, -1)),
        ]
    )
    special = [AddedToken(text, special=True, normalized=False) for text in texts[: 3 + len(tags)]]
    backend.add_special_tokens(special)
    return Tokenizer(
        backend,
        roles={"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"},
        chat_template=PLAIN_TEMPLATE,
    )


def _square(index: int) -> str:
    """Return the pattern of the place after a square's piece: what remains of its rank and of the ranks below."""
    rank, file = divmod(index, 8)
    return rf"(?<=[{PIECES}])(?=[{PIECES}]{{{7 - file}}}(?:/[{PIECES}]{{8}}){{{7 - rank}}}\ [wb]\ )"
