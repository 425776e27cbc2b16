"""`whet chat`: answers through a pipe, folded thinking in a terminal, commands, and nothing hostile obeyed."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from seeing import png, save_model, uri

from whet.generate.engine import Engine, Request
from whet.generate.policy import Policy, PolicyConfig, load_policy, own_sampling
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.model.config import ModelConfig
from whet.model.text.template import BASE_TEMPLATE, PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.weights import build_model
from whet.schema import SCHEMAS
from whet.serve import chat
from whet.serve.chat import Chat, ChatConfig, ChatSampling, Reply, Terminal
from whet.serve.openai import parse_text
from whet.serve.scheduler import Scheduler
from whet.types import Problem, UserError

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HOSTILE = "[red]hm[/red]\x1b[2J</think><answer>[bold]4[/bold]\x1b]0;pwned\x07</answer>"
PROMPTS: list[str] = []


def make_policy(says: str = "", template: str = CHATML) -> Policy:
    """A model that writes one text, whatever it is asked: position p of the reply is a fact about its prefix's length.

    It is a table, not a network: hidden state = one-hot of the next byte, by how many tokens follow '<think>'.
    """
    schema = SCHEMAS["think_answer"]
    tokenizer = Tokenizer.bytes(schema.tags).with_template(template)
    size = -(-tokenizer.vocab_size // 8) * 8
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=size,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_positions=1024,
    )
    model = build_model(shape)
    with torch.no_grad():
        model.head_weight.copy_(torch.eye(tokenizer.vocab_size, size) * 100)
    script = tokenizer.encode(says)
    opening = tokenizer.encode(schema.think_open)[0]
    starts: dict[int, int] = {}

    def forward(tokens: torch.Tensor, positions: torch.Tensor, context: Any) -> torch.Tensor:
        hidden = torch.zeros(len(tokens), size)
        for row, (token, position) in enumerate(zip(tokens.tolist(), positions.tolist(), strict=True)):
            if token == opening:
                starts[0] = position
                PROMPTS.append(tokenizer.decode(tokens.tolist()))
            place = position - starts.get(0, position)
            hidden[row, script[place % len(script)]] = 1.0
        return hidden

    if says:
        model.forward = forward
    return Policy(model.eval(), tokenizer, schema, max_rows=1, system_prompt=False)


class Seat:
    """A terminal with its chat, and what was written to it."""

    def __init__(self, policy: Policy, scheduler: Scheduler, *, is_terminal: bool, **options: Any) -> None:
        config = ChatConfig(policy=PolicyConfig(init="x"), **options)
        self.out, self.err = io.StringIO(), io.StringIO()
        console = Console(file=self.out, force_terminal=is_terminal, width=80, highlight=False)
        notes = console if is_terminal else Console(file=self.err, width=80, highlight=False)
        self.scheduler = scheduler
        self.chat = Chat(policy, scheduler, config)
        self.terminal = Terminal(self.chat, console, notes)

    def say(self, *lines: str) -> tuple[str, str]:
        for line in lines:
            self.terminal.handle(line)
        shown = self.out.getvalue(), self.err.getvalue()
        for stream in (self.out, self.err):
            stream.seek(0)
            stream.truncate()
        return shown


Make = Callable[..., Seat]


@pytest.fixture
def make() -> Iterator[Make]:
    schedulers = []
    PROMPTS.clear()

    def seat(says: str = "1+1</think><answer>2</answer>", *, template: str = CHATML, **options: Any) -> Seat:
        policy = make_policy(says, template)
        schedulers.append(Scheduler(policy, context=512, max_waiting=1))
        return Seat(policy, schedulers[-1], **({"is_terminal": False} | options))

    yield seat
    for scheduler in schedulers:
        scheduler.close()


def test_a_pipe_gets_answers_alone(make: Make) -> None:
    seat = make()
    assert seat.say("1+1=", "", "again") == ("2\n2\n", "")
    assert seat.say("/think") == ("", "1+1\n")


def test_a_terminal_folds_the_thinking(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal wipes nothing
    seat = make(is_terminal=True)
    shown, _ = seat.say("1+1=")
    assert "thought for 4 tokens (/think shows it)" in shown  # 1 + 1 </think>
    before, _, after = shown.partition("thought for")
    assert "1+1" in before
    assert "\x1b[1A\x1b[2K" in before.rpartition("1+1")[2]  # what was seen of the thinking is wiped
    assert "1+1" not in after
    assert after.rstrip().endswith("2")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_hostile_text_is_inert(make: Make, is_terminal: bool) -> None:
    seat = make(HOSTILE, is_terminal=is_terminal)
    shown = "".join(seat.say("hi", "/think"))
    assert "[bold]4[/bold]\\x1b]0;pwned\\x07" in shown
    assert "[red]hm[/red]\\x1b[2J" in shown
    assert "\x07" not in shown
    assert "\x1b]0" not in shown
    assert "\x1b[2J" not in shown


def test_history_goes_through_the_template(make: Make) -> None:
    seat = make()
    seat.say("one", "two", "/reset", "/system Be brief.", "three")
    first = "<|user|>one\n<|assistant|>"
    assert [
        f"{first}<think>",
        f"{first}2\n<|user|>two\n<|assistant|><think>",  # the answer without its thinking
        "<|system|>Be brief.\n<|user|>three\n<|assistant|><think>",
    ] == PROMPTS


def test_questions_stand_alone_where_the_prompt_has_one_turn(make: Make) -> None:
    seat = make(template=PLAIN_TEMPLATE)
    assert not seat.chat.remembers
    seat.say("one", "two")
    assert PROMPTS == ["one<think>", "two<think>"]
    _, err = seat.say("/system x", "three")
    assert err == "error: this model's prompt is the bare question: send one user message and no other\n"


def test_an_answer_that_never_comes(make: Make) -> None:
    seat = make("hm ", sampling=ChatSampling(max_new_tokens=9))
    assert seat.say("x") == ("\n", "no answer: the thinking did not end within 9 tokens (/think shows it)\n")
    cut = make("</think>" + "long " * 3, sampling=ChatSampling(max_new_tokens=9))
    assert cut.say("x") == ("long lon\n", "cut off: --sampling.max-new-tokens, or the context, was reached\n")


def test_a_long_piped_reply_says_when_it_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.serve.chat.LONG_REPLY", 12)
    told = "(still writing, 40 tokens at most: --sampling.max-new-tokens)\n"
    for limit, is_told in ((10, False), (40, True)):
        _, err = make("</think>again and again", sampling=ChatSampling(max_new_tokens=limit)).say("x")
        assert (told in err) == is_told


def test_a_piped_reply_is_written_as_it_comes(make: Make) -> None:
    seat = make("</think>" + "one two three " * 9, sampling=ChatSampling(max_new_tokens=60))
    parts: list[str] = []
    write = seat.out.write
    seat.out.write = lambda text: (parts.append(text), write(text))[1]  # type: ignore[method-assign]
    out, _ = seat.say("x")
    assert out.startswith("one two three one")
    assert len([part for part in parts if part]) > 20


def test_seeds_and_temperature_draw_what_the_engine_draws(make: Make) -> None:
    model_of = make_policy()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in model_of.model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)
    params = SamplingParams(temperature=0.7, max_new_tokens=12)
    prompt = tuple(model_of.tokenizer.encode("<|user|>hi\n<|assistant|><think>"))
    seeds = (5, sequence_seed("chat", 5, 1))
    engine = Engine(model_of.model, stop_ids=model_of.stop_ids)
    (row,) = engine.generate([Request(prompt_ids=prompt, seeds=seeds)], params)
    with Scheduler(model_of, context=512, max_waiting=0) as scheduler:
        seat = Seat(model_of, scheduler, is_terminal=False, sampling=ChatSampling(max_new_tokens=12))
        seat.say("/seed 5", "/temperature 0.7")
        for done in row:
            reply = Reply()
            list(seat.chat.ask("hi", reply))
            text = model_of.completion_text(prompt, done.ids)
            assert reply.thinking == text.partition("</think>")[0]
            seat.chat.turns.clear()
    assert row[0] != row[1]


def test_ctrl_c_stops_the_answer_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seat = make("thinking ", sampling=ChatSampling(max_new_tokens=400))
    original = chat.ResponseText.push
    calls = []

    def interrupted(self: Any, text: str, *, last: bool = False) -> Any:
        calls.append(text)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(self, text, last=last)

    monkeypatch.setattr(chat.ResponseText, "push", interrupted)
    assert seat.say("x") == ("", "stopped; this exchange is forgotten\n")
    assert seat.chat.turns == []
    monkeypatch.undo()
    assert seat.say("/think")[1] == "thin\n"
    assert "no answer" in seat.say("y")[1]
    assert seat.scheduler._engine.stats.new_tokens < 700  # two whole replies would be 800


def test_save_writes_json_lines(make: Make, tmp_path: Path) -> None:
    seat = make()
    seat.say("/system S", "1+1=")
    path = tmp_path / "chat.jsonl"
    assert seat.say(f"/save {path}")[1].startswith("1 exchanges written to")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2", "reasoning_content": "1+1"},
    ]
    assert "File exists; give a new name" in seat.say(f"/save {path}")[1].replace("\n", " ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/bogus", "unknown command '/bogus': /think"),
        ("/temperature hot", "/temperature needs a number, got 'hot'"),
        ("/temperature -1", "temperature = -1.0: expected 0 (greedy) to 10"),
        ("/temperature", "/temperature needs a number, got ''"),
        ("/seed 1.5", "/seed needs a number, got '1.5'"),
        ("/seed 9223372036854775808", "expected 0 to 2**63 - 1"),
        ("/save", "/save needs the name of a file"),
        ("/save /nowhere/x", "cannot write '/nowhere/x': No such file or directory"),
        ("x" * 600, "the conversation (/reset forgets it) has 6"),
        ("\udc80", "text contains a lone surrogate at character"),
    ],
)
def test_mistakes_are_one_line(make: Make, line: str, message: str) -> None:
    seat = make()
    out, err = seat.say(line)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert message in err
    assert seat.terminal.num_errors == 1
    assert seat.say("still there?") == ("2\n", "")


def run_main(policy: Policy, monkeypatch: pytest.MonkeyPatch, typed: str, **options: Any) -> None:
    monkeypatch.setattr(chat, "load_policy", lambda *_, **__: policy)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    chat.main(ChatConfig(policy=PolicyConfig(init="x"), **options))


def test_the_program_reads_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = make_policy("1+1</think><answer>2</answer>")
    run_main(policy, monkeypatch, "a\nb\n/quit\nnever asked\n")
    assert capsys.readouterr().out == "2\n2\n"
    run_main(policy, monkeypatch, "not read", prompt="one question")
    assert capsys.readouterr().out == "2\n"
    with pytest.raises(SystemExit) as caught:  # scripts notice
        run_main(policy, monkeypatch, "/bogus\nc\n")
    assert caught.value.code == 1
    assert capsys.readouterr().out == "2\n"
    with pytest.raises(UserError, match="has 5.. tokens"):
        run_main(policy, monkeypatch, "", prompt="x" * 500, context=300)


def test_a_model_must_be_named() -> None:
    with pytest.raises(ValueError, match="no model: name a run folder"):
        ChatConfig()
    with pytest.raises(ValueError, match="context = 1: expected 2 or more"):
        ChatConfig(policy=PolicyConfig(init="x"), context=1)


def test_characters_that_the_model_cannot_read_are_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seat = make()
    tokenizer = seat.chat._policy.tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: [] if text in ("x", "é") else encode(text))
    answer, note = seat.say("1+1= xé")
    assert (answer, " ".join(note.split())) == (
        "2\n",
        "note: this model's tokenizer has no token for 'xé': the model cannot read these characters",
    )
    assert seat.say("1+1=") == ("2\n", "")


def test_images_are_shown_with_the_next_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = load_policy(
        PolicyConfig(init=str(save_model(tmp_path / "model")), system_prompt=False, max_rows=1), seed=0
    )
    for place, name in enumerate(("a.png", "b.png")):
        (tmp_path / name).write_bytes(png(uri(1, 200 + place)))
    (tmp_path / "broken.png").write_bytes(png(uri(1))[:60])
    prompts: list[tuple[int, ...]] = []

    def checked(scheduler: Scheduler, prompt: tuple[int, ...], name: str) -> None:
        prompts.append(prompt)
        original(scheduler, prompt, name)

    original = Scheduler.check
    monkeypatch.setattr(Scheduler, "check", checked)

    def ids(text: str, *images: str) -> tuple[int, ...]:
        sources = tuple(str(tmp_path / name) for name in images)
        return policy.prompt_ids(Problem(uid="x", task="x", prompt=text, answer="", images=sources))

    with Scheduler(policy, context=128, max_waiting=0) as scheduler:
        seat = Seat(policy, scheduler, is_terminal=False, sampling=ChatSampling(max_new_tokens=4))
        _, notes = seat.say(f"/image {tmp_path / 'a.png'}", f"/image {tmp_path / 'b.png'}")
        assert notes.splitlines()[1] == "image 2 of the next question; /reset takes images back"
        seat.say("ab=", "ab=")
        assert prompts == [ids("ab=", "a.png", "b.png"), ids("ab=")]
        seat.say(f"/save {tmp_path / 'out.jsonl'}")
        row = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
        assert row["content"][1:] == [
            {"type": "image", "image": str(tmp_path / "b.png")},
            {"type": "text", "text": "ab="},
        ]
        for line, message in {
            f"/image {tmp_path / 'broken.png'}": "broken",
            f"/image {tmp_path / 'none.png'}": "cannot be read",
            "/image": "needs the name of a file",
        }.items():
            _, error = seat.say(line)
            assert (message in error, error.count("\n")) == (True, 1), error
        seat.say(f"/image {tmp_path / 'a.png'}", "/reset", "ab=")
        assert prompts[-1] == ids("ab=")
    run_main(policy, monkeypatch, "", prompt="ab=", images=(str(tmp_path / "a.png"),), context=128)
    capsys.readouterr()
    assert prompts[-1] == ids("ab=", "a.png")
    assert len(set(prompts)) == 3


def test_a_model_that_reads_text_alone_refuses_images(make: Make, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(uri(1)))
    out, error = make().say(f"/image {tmp_path / 'a.png'}")
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("error: this model reads text alone")


@pytest.mark.parametrize(
    ("stored", "template", "chat", "text"),
    [
        ({}, BASE_TEMPLATE, (1.0, 1.0), (1.0, 1.0)),
        ({}, "{{ messages[0].content }}", (0.7, 0.95), (1.0, 1.0)),
        ({"temperature": 0.6, "top_k": 20}, "{{ messages[0].content }}", (0.6, 1.0), (0.6, 1.0)),
        ({"do_sample": False, "temperature": 0.6}, BASE_TEMPLATE, (0.0, 1.0), (0.0, 1.0)),
        ({"temperature": "hot"}, "{{ messages[0].content }}", (0.7, 0.95), (1.0, 1.0)),
    ],
)
def test_a_model_is_sampled_as_its_makers_say(
    stored: dict[str, Any], template: str, chat: tuple[float, float], text: tuple[float, float]
) -> None:
    policy = make_policy(template=template)
    policy.model.sampling_defaults = stored
    for is_chat, expected in ((True, chat), (False, text)):
        own = own_sampling(policy, is_chat=is_chat)
        assert (own.temperature, own.top_p) == expected
    own = own_sampling(policy)
    assert own.top_k == stored.get("top_k", 0)
    assert ChatSampling(max_new_tokens=9).over(own) == replace(own, max_new_tokens=9)
    assert ChatSampling(temperature=1.0).over(own) == SamplingParams(max_new_tokens=2048)
    asked = parse_text({"prompt": "x"}, own).params
    assert asked == replace(own, max_new_tokens=asked.max_new_tokens)
    assert parse_text({"prompt": "x", "top_p": 0.5}, own).params == replace(
        SamplingParams(), top_p=0.5, max_new_tokens=asked.max_new_tokens
    )
    assert parse_text({"prompt": "x", "return_token_ids": True}, own).params.temperature == 1.0
