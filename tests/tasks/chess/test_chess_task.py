"""The tasks of chess, their files and what they measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needs import needs

chess = pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")

from whet.cli import parse  # noqa: E402
from whet.eval.audit.audit import audit_task  # noqa: E402
from whet.recipes.rl import RECIPES  # noqa: E402
from whet.rewards.base import build_rewards  # noqa: E402
from whet.rewards.presets import CHESS_SUMS  # noqa: E402
from whet.schema import SCHEMAS  # noqa: E402
from whet.tasks.base import TaskConfig, load_task, tasks_inside  # noqa: E402
from whet.tasks.chess import stockfish, task  # noqa: E402
from whet.tasks.chess.board import listed_move, position_key, read_board  # noqa: E402
from whet.tasks.chess.files import read_positions  # noqa: E402
from whet.tasks.chess.formats import policy_prompt  # noqa: E402
from whet.tasks.chess.measures import elo, elo_interval, kendall  # noqa: E402
from whet.tasks.chess.positions import Position, made  # noqa: E402
from whet.tasks.chess.scoring import SHAPED, TOTALS  # noqa: E402
from whet.tasks.chess.stockfish import EngineError  # noqa: E402
from whet.train.rl_config import RLConfig  # noqa: E402
from whet.types import RuledTask, UnreadError, UserError  # noqa: E402

needs_engine = needs("stockfish")
SPLITS = ("train", "dev", "test")
MATE = "6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(nodes: int) -> None:
        raise EngineError("Stockfish is not installed; install it: apt-get install stockfish")

    monkeypatch.setattr(task, "shared", missing)


@pytest.mark.parametrize(
    "name",
    [
        "chess-env",
        "chess-moves",
        *(pytest.param(name, marks=needs_engine) for name in ("chess-policy", "chess-reason")),
    ],
)
def test_gold_pays_most_and_hostile_answers_nothing(name: str) -> None:
    options = {} if name in ("chess-env", "chess-moves") else {"nodes": 100}
    loaded = load_task(TaskConfig(name=name, num_problems=36, **options))
    schema = SCHEMAS["think_answer" if name == "chess-reason" else "none"]
    problems = [problem for split in SPLITS for problem in loaded.problems(split)]
    assert len(problems) == 36
    for reward in TOTALS:  # `SHAPED` pays near misses as much, by its nature
        found = audit_task(loaded, build_rewards({reward: 1.0}, schema, loaded), schema, problems[:12])
        assert (found.best, found.maximum) == pytest.approx((1.0, 1.0))
        assert [check.failures for check in found.checks if check.is_refuted] == []
    assert CHESS_SUMS.keys() == TOTALS.keys() | SHAPED.keys()


@pytest.mark.parametrize(
    "name",
    [
        "chess-env",
        "chess-moves",
        *(pytest.param(name, marks=needs_engine) for name in ("chess-policy", "chess-reason")),
    ],
)
def test_what_the_rules_allow_where_an_answer_names_a_move(name: str) -> None:
    options = {"nodes": 100} if name in ("chess-policy", "chess-reason") else {}
    loaded = load_task(TaskConfig(name="mixture", weights={name: 1.0}, num_problems=24, **options))
    problems = [problem for split in SPLITS for problem in loaded.problems(split)]
    assert isinstance(loaded, RuledTask)
    for problem in problems:
        places, answer = loaded.allowed(problem), problem.answer
        board = chess.Board(problem.meta["fen"])
        legal = {listed_move(board, m) if name == "chess-moves" else m.uci() for m in board.legal_moves}
        if name == "chess-env":
            assert not places
            continue
        head, _, best = answer.partition("B:")
        listed = head.partition("E:")[0].split()
        expected = [(move, legal - set(listed[:turn])) for turn, move in enumerate(listed)]
        expected += [(best.strip(), legal)] if best else []
        assert len(places) == len(expected)
        for place, (move, texts) in zip(places, expected, strict=True):
            assert set(place.texts) == texts
            assert answer[place.start :].split()[0] == move


def test_lines_of_moves_are_measured() -> None:
    loaded = load_task(TaskConfig(name="chess-moves", num_problems=30))
    problems = loaded.problems("train")
    metrics, _ = loaded.measures([(problem, problem.answer) for problem in problems])  # type: ignore[attr-defined]
    assert (metrics["moves_legal"].mean, metrics["moves_pieces"].mean) == (1.0, 1.0)
    assert metrics.keys() == {*loaded.metric_names}  # type: ignore[attr-defined]
    metrics, _ = loaded.measures([(problem, loaded.wrong_answer(problem)) for problem in problems])  # type: ignore[attr-defined]
    assert metrics["moves_legal"].mean == 1.0
    assert metrics["moves_pieces"].mean < 1.0


@pytest.mark.slow
def test_more_moves_are_illegal_or_mate_where_a_model_trains() -> None:
    loaded = load_task(TaskConfig(name="chess-env", num_problems=4000))
    illegal, ends = (
        {
            split: sum(problem.answer.endswith(flags) for problem in loaded.problems(split))
            / len(loaded.problems(split))
            for split in SPLITS
        }
        for flags in ("+1", "+1+0")
    )
    assert 0.22 < illegal["train"] < 0.28  # a quarter, and four standard deviations of 3,480 draws
    assert max(illegal["dev"], illegal["test"]) < 0.2
    # A sixth of positions, three quarters of them with a legal move, of which two in three mate.
    assert 0.07 < ends["train"] < 0.11
    assert max(ends["dev"], ends["test"]) < 0.07


def test_positions_on_disk_that_are_damaged_are_made_again(tmp_path: Path) -> None:
    first = made(3, 5)
    (path,) = tmp_path.glob("cache/**/positions-*.jsonl")
    good = path.read_text()
    row = json.loads(good.splitlines()[0])
    for line in (
        "[1]",
        "[" * 100_000,
        "5",
        "{}",
        json.dumps(row | {"fen": 5}),
        json.dumps(row | {"history": 5}),
        "\0",
    ):
        path.write_text(f"{line}\n" * 3)
        assert made(3, 5) == first, line[:80]
        assert path.read_text() == good


@pytest.mark.slow
def test_checks_to_answer_where_a_model_trains() -> None:
    """Some positions to train on are put one check further; what is evaluated stays as it was made, and no position
    of one split is of another."""
    loaded = load_task(TaskConfig(name="chess-env", num_problems=2000))
    boards = {
        split: [read_board(problem.meta["fen"]) for problem in loaded.problems(split)] for split in SPLITS
    }
    share = {split: sum(board.is_check() for board in found) / len(found) for split, found in boards.items()}
    assert 0.13 < share["train"] < 0.21
    assert max(share["dev"], share["test"]) < 0.13
    keys = {split: {position_key(board) for board in found} for split, found in boards.items()}
    assert not keys["train"] & (keys["dev"] | keys["test"])
    made_as_is = {position.fen for position in made(2000, 0)}
    assert {board.fen() for split in ("dev", "test") for board in boards[split]} <= made_as_is
    answered = [problem for problem in loaded.problems("train") if problem.meta["source"] == "check"]
    for problem in answered[:50]:
        assert read_board(problem.meta["fen"]).is_check()
        assert any(read_board(problem.meta["fen"]).legal_moves)


@needs_engine
def test_the_environment_is_asked_about_positions_of_played_games_too() -> None:
    at_random, played, policy = (
        {problem.meta["fen"] for problem in loaded.problems("train")}
        for loaded in (
            load_task(TaskConfig(name="chess-env", num_problems=60)),
            load_task(TaskConfig(name="chess-env", num_problems=60, nodes=50)),
            load_task(TaskConfig(name="chess-policy", num_problems=60, nodes=50)),
        )
    )
    assert at_random != played == policy
    with pytest.raises(UnreadError, match="nodes is not read by task chess-env where it reads data"):
        TaskConfig(name="chess-env", path="positions.jsonl", nodes=50)


def test_a_mixture_hands_each_part_what_it_reads_with_the_users_data(tmp_path: Path) -> None:
    """The recipes set nodes, which lines of the environment from a file do not need; where no part reads what the
    user typed, it is refused."""
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"fen": position.fen}) + "\n" for position in made(40, 0)))
    words = ["chess", "--task.paths", "chess-env", str(path)]
    config = parse("whet rl", RLConfig, RECIPES, words).config
    assert config.task.nodes == 1000
    parts = tasks_inside(load_task(config.task))
    assert len([p for split in SPLITS for p in parts["chess-env"].problems(split)]) == 40
    only = [*words, "--task.weights", "chess-env", "1"]
    assert parse("whet rl", RLConfig, RECIPES, only).config.task.nodes == 0
    with pytest.raises(UserError, match="task.nodes is not read by task mixture where its parts read data"):
        parse("whet rl", RLConfig, RECIPES, [*only, "--task.nodes", "50"])


@pytest.mark.ci
def test_splits_go_by_position_whichever_side_it_is_seen_from() -> None:
    loaded = load_task(TaskConfig(name="chess-env", num_problems=300))
    keys = {
        split: {position_key(chess.Board(problem.meta["fen"])) for problem in loaded.problems(split)}
        for split in SPLITS
    }
    assert all(keys.values())
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["dev"]
    assert sum(map(len, keys.values())) == 300


def test_rows_of_a_file_without_stockfish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation does without: any legal move counts where the best is not known; training says what is missing."""
    no_engine(monkeypatch)
    path = tmp_path / "rows.jsonl"
    rows = [{"fen": chess.STARTING_FEN}, {"fen": MATE, "best": "a1a8"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_task(TaskConfig(name="chess", path=str(path)))
    assert (loaded.problems("train"), len(loaded.problems("test"))) == ([], 4)
    first, second = (problem for problem in loaded.problems("test") if problem.meta["kind"] == "policy")
    short = load_task(TaskConfig(name="chess", path=str(path), layout="short")).problems("test")
    assert first.prompt == policy_prompt(chess.STARTING_FEN)
    assert policy_prompt(chess.STARTING_FEN, "short") in [problem.prompt for problem in short]
    assert loaded.is_correct(first, "e2e4 E: 0.1 B: e2e4") is True
    assert loaded.is_correct(first, "e2e4 E: 0.1 B: e2e5") is False
    assert loaded.is_correct(second, "a1a8 E: 1 B: a1a8") is True
    assert loaded.is_correct(second, "e1e2 E: 1 B: e1e2") is False
    answers = {first.uid: "e2e4 E: 0.1 B: e2e4", second.uid: "E: B: a1a7x"}
    items = [(problem, answers.get(problem.uid, problem.answer)) for problem in loaded.problems("test")]
    metrics, details = loaded.measures(items)  # type: ignore[attr-defined]
    assert (metrics["legal"].mean, metrics["best_move"].mean, metrics["env_exact"].mean) == (0.5, 0.0, 1.0)
    assert details["illegal"] == {"no move in UCI notation": 1}
    assert "centipawn_loss" not in metrics
    with pytest.raises(UserError, match="apt-get install stockfish"):
        load_task(TaskConfig(name="chess-policy", path=str(path))).problems("train")


@needs_engine
def test_measures_of_gold_lines(tmp_path: Path) -> None:
    puzzle = "r5k1/pp3p1p/2b2qp1/3pr3/8/4P2P/R1PN1PP1/Q3K2R w K - 0 19"
    moves = "a2a7 e5e3 f2e3 f6a1 a7a1 a8a1"
    path = tmp_path / "puzzles.csv"
    path.write_text(f"PuzzleId,FEN,Moves,Rating\ntewjc,{puzzle},{moves},1493\n")
    loaded = load_task(TaskConfig(name="chess", path=str(path), nodes=500))
    items = [(problem, problem.answer) for problem in loaded.problems("test")]
    metrics, details = loaded.measures(items)  # type: ignore[attr-defined]
    for name in ("legal", "best_move", "candidates_legal", "env_exact", "env_similarity", "puzzle_solved"):
        assert metrics[name].mean == 1, name
    assert metrics["centipawn_loss"].mean < 300
    assert metrics["eval_rank"].mean > 0.3
    assert metrics["puzzle_elo"].mean > 1493
    assert metrics.keys() <= {*loaded.metric_names}  # type: ignore[attr-defined]
    assert details["num_positions"] == 3  # the solver's three moves


def test_files(tmp_path: Path) -> None:
    suite = tmp_path / "suite.epd"
    suite.write_text(
        '1kr5/3n4/q3p2p/p2n2p1/PppB1P2/5BP1/1P2Q2P/3R2K1 w - - bm f5; id "STS(v1.0) Undermine.001"; '
        'c8 "100 46"; c9 "f4f5 d4f2";\n'
    )
    (position,), _ = read_positions(suite)
    assert (position.best, position.points) == (("f4f5",), (("f4f5", 100), ("d4f2", 46)))
    listed = tmp_path / "some.fen"
    listed.write_text(f"{chess.STARTING_FEN}\n\n{MATE}\n")
    assert [position.fen for position in read_positions(listed)[0]] == [chess.STARTING_FEN, MATE]
    rows = tmp_path / "rows.jsonl"
    for row, told in (
        ({"fen": "nothing"}, "is not a position in FEN"),
        ({"fen": MATE, "best": "a1b9"}, "is not a legal move"),
        ({"fen": "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1"}, "the game is over"),
        ({"best": "e2e4"}, "no 'fen'"),
        ({"fen": MATE, "rating": "high"}, "'rating': expected a number from 0 to 10,000"),
        ({"fen": MATE, "rating": 10**400}, "expected a number"),
        ({"fen": MATE, "rating": True}, "expected a number"),
        ({"fen": MATE, "best": {"move": "a1a8"}}, "'best' is an object"),
        ({"fen": MATE, "best": [["a1a8"]]}, "'best' is a list"),
        ({"fen": MATE, "move": "best"}, "'move': 'best' is neither"),
        ({"fen": MATE, "move": "Nf3"}, "'move': 'Nf3' is neither"),
        ({"fen": MATE, "move": "0000"}, "'move': '0000' is neither"),
        ({"fen": MATE, "move": 5}, "'move' is a number"),
        ({"fen": MATE, "history": "e1e2 Ra8+"}, "'history': 'Ra8[+]' is no move"),
        ({"fen": MATE, "history": ["e1e2\x1b"]}, "'history': 'e1e2.*' is no move"),
        ({"fen": MATE, "history": ["e1e2 e7e8"]}, "'history': 'e1e2 e7e8' is no move"),
        ({"fen": MATE, "history": 7}, "'history' is a number"),
    ):
        rows.write_text(json.dumps(row) + "\n")
        with pytest.raises(UserError, match=told):
            read_positions(rows)


def test_fields_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def read(**fields: object) -> Position:
        path.write_text(json.dumps({"fen": MATE, **fields}) + "\n")
        ((position,), _) = read_positions(path)
        return position

    assert read(move="Ra8#").move == read(move="Ra8").move == read(move="a1a8").move == "a1a8"
    assert read(move="a1b8").move == "a1b8"  # illegal: it is asked about, too
    assert (
        read(move=None, history=None, best=None, rating=None) == read(move="", best="", rating="") == read()
    )
    played = ["e2e4", "Nf3", "O-O", "exd5", "e8=Q", "e7e8q", "Nbd2", "R1a3", "Qa1b2", "Bxf7", "Kd1", "Ra8#"]
    assert read(history=" ".join(played)).history == tuple(played[-9:])
    assert (read(best="a1a8", rating=1500).rating, read(best="a1a8", rating="1500").rating) == (1500, 1500)
    rated = tmp_path / "rows.csv"
    rated.write_text(f"fen,best,rating\n{MATE},a1a8,\n{chess.STARTING_FEN},e2e4,1493.0\n")
    assert [position.rating for position in read_positions(rated)[0]] == [0, 1493]


def test_rated_rows_with_a_best_move_are_puzzles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_engine(monkeypatch)
    path = tmp_path / "rows.jsonl"
    rows = [{"fen": MATE, "best": "a1a8", "rating": 1500}, {"fen": chess.STARTING_FEN, "rating": 9}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_task(TaskConfig(name="chess", path=str(path)))
    items = [(problem, "a1a8 E: 1.0 B: a1a8") for problem in loaded.problems("test")]
    metrics, details = loaded.measures(items)  # type: ignore[attr-defined]
    assert (metrics["puzzle_solved"].mean, details["num_puzzles"]) == (1.0, 1)
    assert metrics["puzzle_elo"].mean > 1500


@pytest.mark.parametrize("name", ["some.fen", "some.FEN", "some.epd"])
def test_a_fault_in_a_list_is_told_with_file_and_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + f"{MATE}\n".encode())  # a byte-order mark
    assert [position.fen for position in read_positions(path)[0]] == [MATE]
    start = chess.Board().epd()
    for line, told in (
        ("7k/5Q2/6K1/8/8/8/8/8 b - - 0 1", "the game is over"),
        ("7k/5Q2/6K1/8/8/8/8/8 b - -", "the game is over"),
        ('7k/5Q2/6K1/8/8/8/8/8 b - - id "x";', "the game is over"),
        (f'{start} c8 "0 0"; c9 "e2e4 d2d4";', "'c8': no move is worth a point"),
        (f"{start} am e4;", "'am': moves to avoid"),
        (f'{start} bm "e5";', "'bm': 'e5' is not a legal move"),
        (f"{start} bm e5;", "e5"),
        (f"{start} bm Z0;", "'bm': '0000' is not a legal move"),
        (f"{start} bm 5;", "'bm': '5' is not a legal move"),
    ):
        path.write_text(f"{MATE}\n{line}\n")
        with pytest.raises(UserError, match=told) as caught:
            read_positions(path)
        assert str(caught.value).startswith(f"{name} line 2: ")
        (kept, bad) = read_positions(path, max_bad_rows=1)
        assert (len(kept), len(bad), bad[0].number) == (1, 1, 2)
    path.write_text(f'{start} bm "e4 Nf3"; am f3;\n')
    assert read_positions(path)[0][0].best == ("e2e4", "g1f3")


def test_files_that_are_no_positions(tmp_path: Path) -> None:
    games = tmp_path / "games.pgn"
    games.write_text('[Event "x"]\n\n1. e4 e5 *\n')
    with pytest.raises(UserError, match=r"games.pgn: games in PGN are not read"):
        read_positions(games)
    listed = tmp_path / "some.txt"
    listed.write_text(f"{MATE}\n")
    with pytest.raises(UserError, match=r"some.txt: not rows; .*; a list of FENs ends in .epd or .fen"):
        read_positions(listed)
    puzzles = tmp_path / "puzzles.csv"
    for rating in ("inf", "1e400", "nan", "-5", "high"):
        puzzles.write_text(f"PuzzleId,FEN,Moves,Rating\nx,{MATE},a1a8 g8h8,{rating}\n")
        with pytest.raises(UserError, match="puzzles.csv row 1: 'Rating': expected a number"):
            read_positions(puzzles)


@pytest.mark.ci
def test_elo_by_its_curve() -> None:
    # Half of the points against one rating: that rating. 10 of 11 with the half win and loss: log10 of the odds.
    assert elo([1500] * 10, [1, 0] * 5) == pytest.approx(1500, abs=0.01)
    assert elo([1000] * 10, [1] * 10) == pytest.approx(1000 + 400 * 1.3222193, abs=0.01)  # log10(10.5 / 0.5)
    found = elo_interval([1200.0, 1500.0, 1800.0] * 20, [1.0, 0.5, 0.0] * 20)
    assert found.low < 1500 < found.high
    assert found.mean == pytest.approx(1500, abs=0.01)


@pytest.mark.ci
def test_kendall_against_scipy() -> None:
    scipy = pytest.importorskip("scipy.stats")
    for one, other in (([1, 2, 3, 4], [1, 3, 2, 4]), ([1, 1, 2, 3], [4, 2, 2, 1]), ([3, 2, 1], [1, 2, 3])):
        assert kendall(one, other) == pytest.approx(scipy.kendalltau(one, other).statistic)
    assert kendall([1, 1], [1, 2]) is None


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "chess", None)
    with pytest.raises(UserError, match=r"chess needs python-chess: .*pip install.*chess"):
        load_task(TaskConfig(name="chess-env", num_problems=10)).problems("train")


def test_rewards_refuse_other_tasks() -> None:
    for name in ("chess", "chess_best"):
        with pytest.raises(UserError, match=f"rewards.{name}: task arithmetic has no"):
            build_rewards({name: 1.0}, SCHEMAS["none"], load_task(TaskConfig(name="arithmetic")))
    assert stockfish.NODES == 2000


@needs_engine
@pytest.mark.parametrize("name", ["chess-policy", "chess-reason"])
def test_the_best_move_of_a_row_is_what_every_reward_pays(name: str, tmp_path: Path) -> None:
    """Whatever Stockfish thinks of it: the row's move is a candidate of the gold line, and no other move pays more."""
    path = tmp_path / "rows.jsonl"
    rows = [
        {"fen": chess.STARTING_FEN, "best": "a2a4"},  # none of Stockfish's five
        {"fen": chess.Board(MATE).mirror().fen(), "best": "e8e7"},  # Black, who could mate
        {
            "fen": "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R b KQkq - 3 3",
            "best": ["g8f6", "f8c5"],
        },
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_task(TaskConfig(name=name, path=str(path), nodes=500))
    assert isinstance(loaded, task.Chess)
    problems = [problem for split in SPLITS for problem in loaded.problems(split)]
    assert len(problems) == 3
    for problem in problems:
        best = problem.meta["best"].split()
        lines = task.lines_of(problem.meta["lines"])
        assert best[0] in [line.move for line in lines]
        assert [line.cp for line in lines] == sorted((line.cp for line in lines), reverse=True)
        assert len({line.move for line in lines}) == len(lines) == 5
        gold = loaded.part_scores(problem, problem.answer)
        assert loaded.is_correct(problem, problem.answer)
        assert [gold[n] for n in (*TOTALS, *SHAPED)] == pytest.approx([1.0] * 6)
        for move in (move.uci() for move in chess.Board(problem.meta["fen"]).legal_moves):
            text = move if name == "chess-reason" else f"{problem.answer.rpartition('B:')[0]}B: {move}"
            parts = loaded.part_scores(problem, text)
            is_right = move in best or move in task.accepted(problem)
            assert loaded.is_correct(problem, text) is is_right
            assert (parts["best"] == 1) is is_right
            if not is_right:
                assert parts["best"] <= 0.5
                assert all(parts[sum_name] < gold[sum_name] for sum_name in TOTALS)
        if name == "chess-reason":
            assert problem.solution.endswith(f"Best is {best[0]}.")
