"""Lines of chess: python-chess says what is right; parsers and scores must agree, whatever the text."""

from __future__ import annotations

import time

import pytest

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")

from whet.tasks.chess import board as rules  # noqa: E402
from whet.tasks.chess.formats import (  # noqa: E402
    environment_answer,
    environment_prompt,
    moves_answer,
    policy_answer,
    policy_prompt,
    read_moves,
    read_policy,
    read_step,
)
from whet.tasks.chess.positions import made  # noqa: E402
from whet.tasks.chess.scoring import (  # noqa: E402
    TOTALS,
    Line,
    moves_parts,
    policy_parts,
    step_parts,
    total,
)
from whet.tasks.made.draft import Draw  # noqa: E402
from whet.types import UserError  # noqa: E402

START = chess.STARTING_FEN


def walk(number: int) -> chess.Board:
    """A position that random legal moves reach."""
    draw, board = Draw("walk", number), chess.Board()
    for _ in range(draw.below(120)):
        board.push(draw.one(list(board.legal_moves)))
        if not any(board.legal_moves):
            board.pop()
            break
    return board


def lines_of(board: chess.Board, number: int) -> list[Line]:
    """Candidates with evaluations of no engine's: different, best first."""
    draw = Draw("lines", number)
    moves = draw.shuffled([move.uci() for move in board.legal_moves])[:5]
    values = sorted({draw.between(-900, 900) for _ in range(20)}, reverse=True)
    return [Line((move,), value) for move, value in zip(moves, values, strict=False)]


def gold_policy(lines: list[Line], number: int) -> str:
    shuffled = Draw("order", number).shuffled(lines)
    return policy_answer([line.move for line in shuffled], [line.pawns for line in shuffled], lines[0].move)


def test_published_layout() -> None:
    prompt = policy_prompt(START)
    assert prompt == f"P: {START}{' ' * 34}M:"  # the FEN has 56 characters
    assert (
        policy_prompt(START, "diagnostic") == f"P: {START}    M:"
    )  # the seed's diagnostic prints four spaces
    assert policy_prompt(START, "short") == f"P: {START} M:"
    answer = policy_answer(["e2e4", "d2d4", "g1f3", "c2c4", "b1c3"], [0.3, 0.35, 0.28, 0.32, -1.0], "d2d4")
    # f"M: {moves:30}" f"E: {evals:40}" of jorahn/RookWorld, dev/data/rook/generate_eval.py: 30 - 24 and 40 - 23 spaces
    assert answer == " e2e4 d2d4 g1f3 c2c4 b1c3      E: 0.3 0.35 0.28 0.32 -1.0" + " " * 17 + "B: d2d4"
    said = read_policy(answer)
    assert said.is_well_formed
    assert (said.moves, said.best) == (("e2e4", "d2d4", "g1f3", "c2c4", "b1c3"), "d2d4")
    # jorahn/RookWorld, dev/data/arbiter/make_dataset.py
    history = ["c1f4", "b4a5", "e4f6", "e6e5", "f6d7", "f8g7", "d7e5", "c8b8", "a1a4", "g8e7"]
    fen = "1k1r2nr/1p4b1/2pP3p/q3N1P1/R1PP1B2/3B1N1P/1P3QP1/5RK1 b - - 0 22"
    assert environment_prompt(fen, "g8e7", ["e2e4", *history[:-1]]) == f"A: {fen}+g8e7+{' '.join(history)}+"
    after = rules.play(chess.Board(fen), "g8e7")
    assert environment_answer(after.fen, after.reward, after.terminated, after.truncated) == (
        "1k1r3r/1p2n1b1/2pP3p/q3N1P1/R1PP1B2/3B1N1P/1P3QP1/5RK1 w - - 1 23+0.001+0+0"
    )


@pytest.mark.parametrize(
    ("fen", "move", "paid", "flags"),
    [
        ("6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1", "a1a8", "1.0", "+1+0"),  # mate
        ("r3k3/8/8/8/8/8/5PPP/6K1 b - - 0 1", "a8a1", "1.0", "+1+0"),  # Black mates: the mover wins
        ("7k/8/6K1/8/8/8/8/5Q2 w - - 0 1", "f1f7", "0.5", "+1+0"),  # stalemate
        ("8/8/8/8/8/4k3/4p3/4K3 b - - 0 1", "e2e1", "-1.0", "+0+1"),  # a square that is taken
        (START, "e2e5", "-1.0", "+0+1"),
    ],
)
def test_ends_and_illegal_moves(fen: str, move: str, paid: str, flags: str) -> None:
    after = rules.play(chess.Board(fen), move)
    line = environment_answer(after.fen, after.reward, after.terminated, after.truncated)
    assert line.endswith(f"+{paid}{flags}")
    assert (after.fen == fen) is (paid == "-1.0")


@pytest.mark.ci
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_lines_against_python_chess(count: int) -> None:
    """Gold lines score the maximum under all published weights, and each corrupted field less; no legality is ours."""
    for number in range(count):
        board = walk(number)
        draw = Draw("corrupt", number)
        legal = [move.uci() for move in board.legal_moves]
        lines = lines_of(board, number)
        gold = gold_policy(lines, number)
        best = policy_parts(board, lines, read_policy(gold))
        assert all(best[name] == 1 for name in ("format", "legal", "candidates", "order", "evals", "best"))
        for name in TOTALS:
            assert total(name, "policy", best) == pytest.approx(1.0)
        square = draw.one(chess.SQUARE_NAMES)
        wrong_best = draw.one([*(line.move for line in lines[1:]), f"{square}{square}"])
        head, tail = gold.split("E:")
        corrupted = {
            "best": f"{gold.rpartition('B:')[0]}B: {wrong_best}",
            "no best": gold.rpartition("B:")[0],
            "illegal candidate": gold.replace(lines[-1].move, f"{square}{square}", 1),
            "repeated candidate": gold.replace(lines[-1].move, lines[0].move, 1) if len(lines) > 1 else "",
            "evaluation": head
            + "E:"
            + tail.replace(f" {_first(tail)} ", f" {float(_first(tail)) + 0.4:.2f} ", 1),
            "no evaluations": head + "B:" + tail.partition("B:")[2],
        }
        for what, text in corrupted.items():
            parts = policy_parts(board, lines, read_policy(text))
            touched = {
                "illegal candidate": ("candidates", "legal", "order"),
                "repeated candidate": ("candidates", "legal", "order"),
                "evaluation": ("evals",),
                "no evaluations": ("format", "evals"),
                "no best": ("format", "best"),
                "best": ("best",),
            }
            for name in touched[what] if len(lines) > 1 else ():
                assert parts[name] < 1, (what, name, text)
            legal_now = (find(board, read_policy(text).best)) in legal
            assert (parts["best"] > 0) is legal_now, (what, text)
            assert total("chess", "policy", parts) < 1 - 1e-9, (what, text)
            if what != "evaluation" or len(lines) > 1:
                assert total("rookworld", "policy", parts) < 1 - 1e-9, (what, text)
        move = draw.one([*legal, "a1a1", "e9e4", f"{square}{square}"])
        truth = rules.play(board, move)
        after = board.copy()
        if move in legal:
            after.push_uci(move)
        assert truth.fen == after.fen()
        assert truth.truncated is (move not in legal)
        assert truth.terminated is after.is_game_over()
        line = environment_answer(truth.fen, truth.reward, truth.terminated, truth.truncated)
        parts = step_parts(truth, read_step(line))
        for name in TOTALS:
            assert total(name, "environment", parts) == pytest.approx(1.0)
        fields = line.split("+")
        for place, text in enumerate((fields[0].replace(" ", " x", 1), "0.7", str(1 - int(fields[2])), "2")):
            other = "+".join([*fields[:place], text, *fields[place + 1 :]])
            worse = step_parts(truth, read_step(other))
            for name in TOTALS:
                assert total(name, "environment", worse) < 1 - 1e-9, other


def test_lines_of_moves() -> None:
    """Every legal move is written with the piece that stands there afterwards and what is gone; another letter, an
    illegal, a repeated and a missing move pay less."""
    for number in range(60):
        board = walk(number)
        entries = []
        for move in board.legal_moves:
            after = board.copy()
            after.push(move)
            gone = sorted(map(str, board.piece_map().values()))
            for piece in after.piece_map().values():
                if str(piece) in gone:
                    gone.remove(str(piece))
            taken = [one for one in gone if one.islower() == board.turn]  # not a pawn that became a queen
            entries.append(rules.listed_move(board, move))
            assert entries[-1] == f"{move.uci()}{after.piece_at(move.to_square)}{''.join(taken)}"
        entries = Draw("listed", number).shuffled(entries)[:12]
        gold = moves_answer(entries)
        best = moves_parts(board, read_moves(gold))
        assert total("chess", "moves", best) == pytest.approx(1.0)
        last = entries[-1]
        others = {
            "piece": gold[:-1] + ("n" if last[-1] != "n" else "r"),
            "illegal": gold.replace(last, "a1a1K"),
            "repeated": gold.replace(last, entries[0]) if len(entries) > 1 else "",
            "missing": moves_answer(entries[:-1]),
            "one more": f"{gold} a1a1K",
        }
        for what, text in others.items():
            worse = moves_parts(board, read_moves(text))
            assert total("chess", "moves", worse) < 1 - 1e-9, (what, text)
            assert (worse["legal"] < 1) is (what != "piece"), (what, text)


def _first(tail: str) -> str:
    return tail.split()[0]


def find(board: chess.Board, text: str) -> str:
    found = rules.find_move(board, text)
    return found.uci() if found else ""


def test_mirrored_positions_have_mirrored_scores() -> None:
    for number in range(40):
        board = walk(number)
        lines = lines_of(board, number)
        turned = [Line(tuple(map(rules.mirrored_move, line.moves)), line.cp) for line in lines]
        text = gold_policy(lines, number).replace(lines[-1].move, "a1a1", 1)
        moves, _, rest = text.partition("E:")
        numbers, _, best = rest.partition("B:")
        mirrored = f"{rules.mirrored_move(moves)}E:{numbers}B:{rules.mirrored_move(best)}"
        one = policy_parts(board, lines, read_policy(text))
        assert policy_parts(board.mirror(), turned, read_policy(mirrored)) == one


@pytest.mark.parametrize(
    ("parts", "graduated", "binary"),
    [  # the later version's sum over 10: 4 format, 3 FEN (or half of its similarity), 2 flags, 1 reward
        ((1, 1, 1, 1, 1), 1.0, 1.0),
        ((1, 1, 1, 0, 1), 0.8, 1.0),  # 0.9
        ((1, 0, 0.8, 1, 1), 0.8, 1.0),  # 0.82
        ((1, 0, 0.6, 0, 0), 0.4, 0.0),  # 0.49
        ((1, 0, 0.8, 0, 0), 0.4, 1.0),  # 0.52
        ((0, 0, 0.2, 0, 0), 0.0, 0.0),  # 0.03
        ((0, 1, 1, 0, 0), 0.2, 0.0),  # 0.3
    ],
)
def test_shaped_sums(parts: tuple[float, ...], graduated: float, binary: float) -> None:
    found = dict(zip(("format", "fen", "similarity", "reward", "flags"), map(float, parts), strict=True))
    assert total("rookworld_later_graduated", "environment", found) == graduated
    assert total("rookworld_later_binary", "environment", found) == binary


def test_hostile_text_is_bounded() -> None:
    board = chess.Board()
    lines = lines_of(board, 0)
    truth = rules.play(board, "e2e4")
    long = 128 * 1024
    texts = [
        "",
        " " * long,
        "e2e4 " * long,
        "E:" * long,
        "B:" * long,
        "+" * long,
        "9" * long,
        "\x00",
        "\ud800",
    ]
    texts += [
        " " * 900 + "E:" + " " * 90,
        "a2a3 " * 199,
        "a2a3P " * 160,
        "1" * 999,
        "E:B:",
        " ".join(["0.1"] * 199) + "E: B: e2e4",
    ]
    began = time.perf_counter()
    for text in texts:
        for name in TOTALS:
            assert total(name, "policy", policy_parts(board, lines, read_policy(text))) < 0.5
            assert total(name, "environment", step_parts(truth, read_step(text))) < 0.5
            assert total(name, "moves", moves_parts(board, read_moves(text))) < 0.5
    assert time.perf_counter() - began < 2.0


def test_key_is_one_for_all_reflections() -> None:
    board = chess.Board("8/5k2/8/2Q5/8/1K6/8/8 w - - 3 50")
    keys = {
        rules.position_key(seen) for seen in (board, board.mirror(), board.transform(chess.flip_horizontal))
    }
    assert len(keys) == 1
    castling = chess.Board("r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1")
    assert rules.position_key(castling) == rules.position_key(castling.mirror())
    assert rules.position_key(castling) != rules.position_key(
        chess.Board("r3k2r/8/8/8/8/8/8/R3K2R w Kkq - 0 1")
    )


def test_illegal_causes() -> None:
    board = chess.Board("4k3/P3r3/8/8/8/8/3P4/4K2R w K - 0 1")
    expected = {
        "e2e4": "empty square",
        "e8e7": "other side's piece",
        "e1d2": "own piece in the way",
        "a7a8": "no promotion piece",
        "d2d5": "not how the piece moves",
        "e1g1": "king in check",
        "zz": "no move in UCI notation",
        "e1f1": "",
    }
    found = {move: rules.illegal_cause(board, move) for move in expected}
    assert found == expected | {"e1g1": found["e1g1"]}
    assert found["e1g1"]
    pinned = chess.Board("4r2k/8/8/8/8/8/4N3/4K3 w - - 0 1")
    assert rules.illegal_cause(pinned, "e2c3") == "king in check"


def test_a_position_that_is_none_is_named() -> None:
    with pytest.raises(UserError, match="is not a position"):
        rules.read_board("8/8/8/8/8/8/8/8 w - - 0 1")
    with pytest.raises(UserError, match="is not a position in FEN"):
        rules.read_board("hello")


def test_made_positions_are_balanced_and_the_same_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    positions = made(60, seed=3)
    assert made(60, seed=3) == positions  # from the disk
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path) + "/other")
    assert made(60, seed=3) == positions  # made again
    boards = [chess.Board(position.fen) for position in positions]
    assert all(board.is_valid() and any(board.legal_moves) for board in boards)
    assert abs(sum(board.turn for board in boards) - 30) <= 6
    phases = [rules.phase_of(board) for board in boards]
    assert all(15 <= phases.count(phase) <= 25 for phase in rules.PHASES)
    assert len({rules.position_key(board) for board in boards}) == 60
    for position, board in zip(positions, boards, strict=True):
        if position.source == "mate":
            assert any(_mates(board, move) for move in list(board.legal_moves))


def _mates(board: chess.Board, move: chess.Move) -> bool:
    after = board.copy()
    after.push(move)
    return after.is_checkmate()
