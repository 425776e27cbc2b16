"""The tokenizer of boards: nothing is lost, a token is a piece on its square, and random embeddings share parts."""

from __future__ import annotations

import pytest
import torch

from whet.model.text.boards import EMPTY, FILES, boards, compose_embeddings

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
MIDDLE = "r1bq1rk1/pp3ppp/2n1pn2/2pp4/1bPP4/2N1PN2/PP1B1PPP/R2QKB1R b KQ e3 12 107"
LINES = (
    f"A: {START}+e2e4+e2e4+rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1+0.001+0+0",
    f"A: {MIDDLE}+a7a8q+g1f3 a7a8q+",
    f"P: {MIDDLE:90}M: e2e4 d2d4 a7a8q              E: 0.31 -0.05 999.99 -1.0 45.2            B: e2e4",
    "no board: 8/8 w, nor this: 9/x/8 b - - 0 1",
)


@pytest.mark.parametrize("text", LINES)
def test_what_it_reads_comes_back(text: str) -> None:
    tokenizer = boards()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def placed(fen: str) -> dict[str, str]:
    """Square -> piece of a FEN, by its definition."""
    found: dict[str, str] = {}
    for rank, row in zip("87654321", fen.split()[0].split("/"), strict=True):
        file = 0
        for letter in row:
            for _ in range(int(letter) if letter.isdigit() else 1):
                found[FILES[file] + rank] = EMPTY if letter.isdigit() else letter
                file += 1
    return found


def test_a_token_is_a_piece_on_its_square_wherever_the_board_begins() -> None:
    tokenizer = boards()
    first, second = tokenizer.encode(f"P: {START} M:"), tokenizer.encode(f"A: {MIDDLE}+a1a2+a1a2+{START}+")
    at = len(second) - len(tokenizer.encode(f"A: {START}+")) + 1
    assert second[at : at + 64] == first[1:65]
    by_token: dict[int, tuple[str, str, str]] = {}
    for fen in (START, MIDDLE):
        ids = tokenizer.encode(f"P: {fen} M:")[1:65]
        for token, (square, piece) in zip(ids, placed(fen).items(), strict=True):
            named = (square, piece, "" if piece == EMPTY else fen.split()[1])
            assert by_token.setdefault(token, named) == named
    assert len(set(by_token.values())) == len(by_token)
    # A square where a move starts is a token with its space; an evaluation is a whole number, and its decimals.
    moves = tokenizer.encode(" e2e4 d2d4 -0.35 999.98")
    assert len(moves) == 8
    assert moves[1] == tokenizer.encode("e4")[0]


def test_random_embeddings_share_the_parts_of_what_their_tokens_share() -> None:
    tokenizer = boards()
    torch.manual_seed(0)
    table = torch.randn(tokenizer.vocab_size, 4096)
    before = table.clone()
    compose_embeddings(table, tokenizer, seed=3)
    ids = tokenizer.encode(f"P: {START} M: a8")
    rook_a8, knight_b8, rook_h8, pawn_a7, start_a8 = (table[ids[n]] for n in (1, 2, 8, 9, -1))

    def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
        return float(torch.cosine_similarity(one, other, 0))

    # Half of the square of a length is the kind's (of which a third each its type's, and whether its side may move); of
    # the other half a third each the square's, its file's, its rank's.
    assert cosine(rook_a8, rook_h8) == pytest.approx(1 / 2 + 1 / 6, abs=0.05)
    assert cosine(rook_a8, knight_b8) == pytest.approx(1 / 6 + 1 / 6, abs=0.05)
    assert cosine(rook_a8, pawn_a7) == pytest.approx(1 / 6 + 1 / 6, abs=0.05)
    assert cosine(rook_a8, start_a8) == pytest.approx(1 / 2, abs=0.05)
    assert cosine(pawn_a7, knight_b8) == pytest.approx(1 / 6, abs=0.05)
    assert float(rook_a8.norm()) == pytest.approx(4096**0.5, rel=0.05)
    other = tokenizer.encode("M:")[0]
    assert torch.equal(table[other], before[other])
    # A piece that is named, as in a line of moves, is the kind of the one on a square.
    named = tokenizer.encode("e2e4P")[-1]
    assert cosine(table[named], pawn_a7) == pytest.approx(12**-0.5, abs=0.05)  # of the other side
    assert cosine(table[tokenizer.encode("e7e5p")[-1]], pawn_a7) == pytest.approx(3**-0.5, abs=0.05)
    # Whose turn it is changes every piece, and no empty square; pieces of the side to move have that in common.
    turned = tokenizer.encode(f"P: {START.replace(' w ', ' b ')} M:")
    black_rook, black_pawn, white_pawn = (table[turned[n]] for n in (1, 9, 49))
    assert cosine(black_rook, rook_a8) == pytest.approx(1 - 1 / 6, abs=0.05)
    assert cosine(black_rook, table[ids[49]]) == pytest.approx(
        1 / 6 + 1 / 6, abs=0.05
    )  # a pawn of White's on a2
    assert cosine(black_pawn, white_pawn) == pytest.approx(1 / 6 + 1 / 6, abs=0.05)  # type and file
    assert turned[17:49] == ids[17:49]
    # Counters share their digits.
    many = [table[tokenizer.encode(f" {count}")[0]] for count in (41, 42, 52, 53)]
    assert cosine(many[0], many[1]) == pytest.approx(1 / 3, abs=0.05)
    assert cosine(many[1], many[2]) == pytest.approx(1 / 3, abs=0.05)
    assert cosine(many[0], many[2]) == pytest.approx(0, abs=0.05)
    again = before.clone()
    compose_embeddings(again, tokenizer, seed=3)
    assert torch.equal(again, table)
