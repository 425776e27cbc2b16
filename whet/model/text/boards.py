"""A tokenizer for lines of chess: one token a piece on its square, a square of a move, or a number."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterator, Sequence
from itertools import combinations

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from whet.model.text.template import PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer

EMPTY = "_"
"""An empty square. Numbers of them stand in a FEN; here each square is a token, so that all boards have 64."""
PIECES, FILES = "pnbrqkPNBRQK" + EMPTY, "abcdefgh"
SQUARE_MARKS = "".join(chr(0xE000 + index) for index in range(64))
"""Say which square a piece stands on, a8 first: one private character each, between normalizer and decoder."""
BLACK_MARK = "\ue040"
"""Follows the mark of a square where Black is to move: whose pieces may move is then in their tokens."""
MAX_SPACES, MAX_COUNT, MAX_PAWNS = 64, 300, 30
_BOARD_AFTER = r"(?=[pnbrqkPNBRQK1-8/_]*\ [wb]\ )"
"""What follows a digit of a board: the rest of the board, and the side to move."""


def boards(tags: Sequence[str] = ()) -> Tokenizer:
    """Create the tokenizer: <pad> 0, <eos> 1, <unk> 2, then the tags, then 2,500 pieces of text.

    A token of a board is a piece on its square and whether it is its side's turn, or an empty square, with the slash
    after it: what stands on a square, and what may move, is found by the token, wherever in a line its board begins. A
    square where a move starts, castling rights and counters have their space in them; evaluations are a whole number
    with its dot, and decimals. Other printable ASCII is spelt letter by letter. What it reads comes back unchanged from
    its ids, but for underscores, `SQUARE_MARKS` and `BLACK_MARK`.
    """
    rights = ["".join(some) for count in range(1, 5) for some in combinations("KQkq", count)]
    squares = [f"{file}{rank}" for rank in range(1, 9) for file in FILES]
    pieces = [
        *("P: ", "A: ", "L: ", "M:", "E:", "B:", "0.001", "-1.0+", "1.0+", "0.5+"),
        *(token for kind, _, _, token in _on_squares() if kind in PIECES),
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
    all_marks = f"[{SQUARE_MARKS[0]}-{BLACK_MARK}]"
    pattern = "|".join(
        [
            *map(re.escape, tags),
            rf"[{PIECES}]{marks}{BLACK_MARK}?/?",
            r"P: |A: |L: |M:|E:|B:",
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
            normalizers.Replace(tokenizers.Regex(rf"(?<=[{PIECES[:-1]}]{marks})(?=[^ ]*\ b\ )"), BLACK_MARK),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    backend.decoder = decoders.Sequence(
        [
            decoders.Fuse(),
            decoders.Replace(tokenizers.Regex(all_marks), ""),
            *(decoders.Replace(EMPTY * digit, str(digit)) for digit in range(8, 0, -1)),
        ]
    )
    special = [AddedToken(text, special=True, normalized=False) for text in texts[: 3 + len(tags)]]
    backend.add_special_tokens(special)
    return Tokenizer(
        backend,
        roles={"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"},
        chat_template=PLAIN_TEMPLATE,
        tags=tags,
    )


def _square(index: int) -> str:
    """Return the pattern of the place after a square's piece: what remains of its rank and of the ranks below."""
    rank, file = divmod(index, 8)
    return rf"(?<=[{PIECES}])(?=[{PIECES}]{{{7 - file}}}(?:/[{PIECES}]{{8}}){{{7 - rank}}}\ [wb]\ )"


def compose_embeddings(table_VD: torch.Tensor, tokenizer: Tokenizer, seed: int) -> None:
    """Let random embeddings of tokens that share a piece, a square, a file or a rank share a part, too.

    A token's is the sum of a random vector of its kind (the piece, or where a move starts or ends) and one of its
    square, a third each of which is its file's and its rank's, so that it has the length that it had. What stands on
    a square can then be looked up from the first step on; otherwise each of 1,600 rows has to learn where it belongs.
    A third of a piece is its type, a third whether it is its side's turn; digits of counters are shared, too.

    Args:
        table_VD: Embeddings, changed in place.
        tokenizer: Made by `boards`.
        seed: Seed of the vectors.
    """
    generator = torch.Generator().manual_seed(seed)
    std = float(table_VD.detach().std())
    ids: dict[str, int] = json.loads(tokenizer.backend_text())["model"]["vocab"]
    drawn: dict[str, torch.Tensor] = {}

    def vector(name: str) -> torch.Tensor:
        if name not in drawn:
            drawn[name] = torch.empty(table_VD.shape[1]).normal_(0.0, std, generator=generator)
        return drawn[name]

    def shared(*names: str) -> torch.Tensor:
        return sum((vector(name) for name in names), torch.zeros(())) / math.sqrt(len(names))

    with torch.no_grad():
        for kind, to_move, square, token in _on_squares():
            if to_move:
                moves = (to_move == "w") == kind.isupper()
                own = shared(f"piece {kind}", f"type {kind.lower()}", "may move" if moves else "may not move")
            else:
                own = vector(kind)
            table_VD[ids[token]] = (own + shared(square, square[0], square[1])) / math.sqrt(2)
        for piece in PIECES[:-1]:  # named without a square
            table_VD[ids[piece]] = shared(f"piece {piece}", f"type {piece.lower()}")
        for count in range(MAX_COUNT + 1):
            table_VD[ids[f" {count}"]] = shared(f"count {count}", f"tens {count // 10}", f"ones {count % 10}")


def _on_squares() -> Iterator[tuple[str, str, str, str]]:
    """Return kind (a piece, 'start' or 'end'), side to move (of a piece), square and text of each token of a square."""
    for index, mark in enumerate(SQUARE_MARKS):
        rank, file = divmod(index, 8)
        square = f"{FILES[file]}{8 - rank}"
        slash = "/" if file == 7 and rank < 7 else ""
        for piece in PIECES[:-1]:
            yield piece, "w", square, f"{piece}{mark}{slash}"
            yield piece, "b", square, f"{piece}{mark}{BLACK_MARK}{slash}"
        yield EMPTY, "", square, f"{EMPTY}{mark}{slash}"
        yield "end", "", square, square
        yield "start", "", square, f" {square}"
