"""`whet chat MODEL`: chat with a policy in the terminal, with folded thinking; or through a pipe, answers only."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from whet.cli import Program
from whet.config import counted, user_path
from whet.generate.policy import Policy, PolicyConfig, load_policy, own_sampling
from whet.generate.rows import Completion, Request
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.model.vision.reading import is_data_uri, is_url, locate, read_picture
from whet.serve.scheduler import Ask, Event, Scheduler
from whet.serve.stream import (
    Piece,
    ResponseText,
    TokenText,
    chat_prompt,
    has_turns,
    silent_ids,
    unread_note,
)
from whet.telemetry.display import escape_controls
from whet.types import UserError

NO_MODEL = "MODEL"
Number = TypeVar("Number", int, float)
SHOWN_THINKING = 8
"""Visible lines of thinking while it is generated."""
LONG_REPLY = 256
"""Tokens after which a reply that is not typed to a terminal tells its limit: a model that loops takes minutes."""


@dataclass(frozen=True, kw_only=True)
class ChatSampling:
    """Sampling settings; what is left out is the model's own (`own_sampling`)."""

    temperature: float | None = None
    """Divides the logits; 0 is greedy."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float | None = None
    """Keep the smallest set of tokens with at least this probability; 1 keeps all."""
    min_p: float | None = None
    """Keep tokens with at least this share of the top probability; 0 keeps all."""
    max_new_tokens: int = 2048
    """Longest reply in tokens, including the stop token."""

    def __post_init__(self) -> None:
        self.over(SamplingParams())

    def over(self, own: SamplingParams) -> SamplingParams:
        """Return the settings; with any of the four given, the model's own count no more."""
        given = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}
        return SamplingParams(**given) if len(given) > 1 else replace(own, **given)


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """A conversation with a model."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(init=NO_MODEL, max_rows=1))
    """The model."""
    prompt: str = ""
    """Ask this one question, print the answer, and exit."""
    images: tuple[str, ...] = ()
    """Images of the first question, for a model that sees: files, data URIs, or http(s) addresses."""
    system: str = ""
    """System message; empty for the policy's own instruction."""
    sampling: ChatSampling = field(default_factory=ChatSampling)
    """Sampling settings; without any the model's own (generation_config.json), else temperature 0.7 and top-p 0.95."""
    context: int = 4096
    """Longest conversation in tokens, within the model's own context."""
    seed: int = 0
    """Seed of the first reply; the n-th reply's is derived from it and n."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters."""

    def __post_init__(self) -> None:
        require_model(self.policy)
        if self.context < 2:
            raise ValueError(f"context = {self.context}: expected 2 or more tokens")


def require_model(policy: PolicyConfig) -> None:
    """Refuse a command line without a model.

    Raises:
        ValueError: If `policy.init` was not given.
    """
    if policy.init == NO_MODEL and not Path(NO_MODEL).exists():
        raise ValueError("no model: name a run folder, a Hugging Face folder or a hub name after the command")


class Question(NamedTuple):
    """What the user asked.

    Attributes:
        text: The text.
        images: Sources of its images, which stand before it.
    """

    text: str
    images: tuple[str, ...] = ()

    @property
    def content(self) -> str | list[dict[str, str]]:
        """Content of a chat message: the text, or parts where there are images."""
        if not self.images:
            return self.text
        parts = [{"type": "image", "image": source} for source in self.images]
        return [*parts, {"type": "text", "text": self.text}]


@dataclass(slots=True)
class Reply:
    """The model's answer.

    Attributes:
        thinking: Its thinking so far.
        answer: The text after it, without the tags.
        num_thinking: Tokens of the thinking.
        end: 'stop', 'length', or 'interrupted'.
    """

    thinking: str = ""
    answer: str = ""
    num_thinking: int = 0
    end: str = "interrupted"


class Chat:
    """A conversation: settings, history, and streamed replies.

    Args:
        policy: The policy.
        scheduler: Generates its tokens.
        config: Initial settings.

    Attributes:
        images: Sources of the next question's images.
    """

    def __init__(self, policy: Policy, scheduler: Scheduler, config: ChatConfig) -> None:
        self._policy, self._scheduler = policy, scheduler
        self.system, self.seed = config.system, config.seed
        self.sampling = config.sampling.over(own_sampling(policy))
        self.remembers = has_turns(policy)
        self.turns: list[tuple[Question, Reply]] = []
        self.images: tuple[str, ...] = ()
        self._num_drawn = 0

    def reset(self, *, seed: int | None = None) -> None:
        """Forget the conversation, or with a seed restart the sampling noise."""
        self._num_drawn = 0
        if seed is None:
            self.turns, self.images = [], ()
        else:
            self.seed = seed

    def show(self, source: str) -> int:
        """Add an image to the next question; return how many it has.

        Raises:
            UserError: If it cannot be read, or the model reads text alone.
        """
        images = self._policy.model.images
        if images is None:
            raise UserError(
                "this model reads text alone: chat with one that sees, such as Qwen/Qwen3-VL-2B-Instruct"
            )
        if not is_data_uri(source):
            source = str(locate(source if is_url(source) else str(user_path(source)), urls="any"))
        picture = read_picture(source)
        images.add(picture)
        images.patches(picture.key)  # a broken file is said here
        self.images += (source,)
        return len(self.images)

    def messages(self, question: Question) -> list[dict[str, Any]]:
        """Return the conversation followed by a question, without earlier thinking."""
        said: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for asked, reply in self.turns if self.remembers else []:
            said += [
                {"role": "user", "content": asked.content},
                {"role": "assistant", "content": reply.answer},
            ]
        return [*said, {"role": "user", "content": question.content}]

    def unread(self, question: str) -> str:
        """Say which characters of a question the model cannot read; '' if it can read all."""
        return unread_note(self._policy.tokenizer, (self.system, question))

    def ask(self, question: str, reply: Reply) -> Generator[Piece]:
        """Ask, and yield the reply's pieces as they arrive, filling in `reply`; complete replies join the history, and
        the images that were shown with them.

        Raises:
            UserError: If the conversation does not fit.
        """
        asked = Question(question, self.images)
        prompt = chat_prompt(self._policy, self.messages(asked))
        self._scheduler.check(prompt, "the conversation (/reset forgets it)")
        seed = self.seed if self._num_drawn == 0 else sequence_seed("chat", self.seed, self._num_drawn)
        self._num_drawn += 1
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = Request(prompt_ids=prompt, seeds=(seed,))
        ticket = self._scheduler.submit(
            [Ask(request=request, params=self.sampling)], lambda _, event: events.put(event)
        )
        silent = silent_ids(self._policy)
        text = TokenText(self._policy.tokenizer, prompt, silent_ids=silent)
        parts = ResponseText(self._policy.schema)
        try:
            while reply.end == "interrupted":
                event = events.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Completion):
                    piece = parts.push(text.flush(), last=True)
                    reply.end = event.finish_reason
                else:
                    reply.num_thinking += parts.is_thinking
                    piece = parts.push(text.push(event.id))
                reply.thinking += piece.thinking
                reply.answer += piece.answer
                yield piece
        finally:
            ticket.cancel()
        self.turns.append((asked, reply))
        self.images = ()


class Terminal:
    """Reads questions and commands, and shows replies; control characters in model output are escaped.

    Args:
        chat: The conversation.
        console: Console for answers.
        notes: Console for notes.
    """

    def __init__(self, chat: Chat, console: Console, notes: Console) -> None:
        self._chat, self._console, self._notes = chat, console, notes
        self._last = Reply()
        self.num_errors = 0
        self._commands: Mapping[str, tuple[Callable[[str], None], str]] = {
            "/think": (self._think, "show the thinking behind the last answer"),
            "/image": (self._image, "FILE or address: show the model an image with the next question"),
            "/system": (
                self._system,
                "TEXT: set the system message and restart; without TEXT the policy's own",
            ),
            "/reset": (self._reset, "forget the conversation"),
            "/temperature": (self._temperature, "T: 0 is greedy"),
            "/seed": (self._seed, "N: set the next reply's seed"),
            "/save": (self._save, "FILE: write the conversation as JSON lines"),
            "/help": (self._help, "this list"),
            "/quit": (self._quit, "leave; so does Ctrl-D"),
        }

    def handle(self, line: str) -> None:
        """Execute a command, or ask a question; an error becomes one line.

        Raises:
            EOFError: On /quit.
        """
        try:
            line = line.strip()
            name, _, rest = line.partition(" ")
            if name in self._commands:
                self._commands[name][0](rest.strip())
            elif name.startswith("/"):
                raise UserError(f"unknown command {name[:40]!r}: {' '.join(self._commands)}")
            elif line:
                self.ask(line)
        except ValueError as error:
            self.num_errors += 1
            self._note(f"error: {error}", style="red")

    def ask(self, question: str) -> None:
        """Ask, and stream the reply; Ctrl-C stops it."""
        self._last = reply = Reply()
        if unread := self._chat.unread(question):
            self._note(f"note: {unread}", style="yellow")
        pieces = self._chat.ask(question, reply)
        try:
            if self._console.is_terminal:
                self._show(pieces, reply)
            else:
                for count, piece in enumerate(pieces):
                    if count == LONG_REPLY:
                        limit = self._chat.sampling.max_new_tokens
                        self._note(f"(still writing, {limit:,} tokens at most: --sampling.max-new-tokens)")
                    self._console.print(_plain(piece.answer), end="", soft_wrap=True)
                    self._console.file.flush()
                self._console.print()
        except KeyboardInterrupt:
            self._note("stopped; this exchange is forgotten")
            return
        finally:
            pieces.close()  # frees the row
        if not reply.answer and reply.thinking:
            is_cut = reply.end == "length"
            told = "the thinking did not end within" if is_cut else "the model stopped while thinking, after"
            self._note(f"no answer: {told} {counted(reply.num_thinking, 'token')} (/think shows it)")
        elif reply.end == "length":
            self._note("cut off: --sampling.max-new-tokens, or the context, was reached")

    def _show(self, pieces: Generator[Piece], reply: Reply) -> None:
        """Show the thinking dim and scrolling, replace it by one line, then show the answer."""
        with Live(console=self._console, transient=True, auto_refresh=False) as live:
            first = ""
            for piece in pieces:
                if piece.answer:
                    first = piece.answer
                    break
                tail = _plain(reply.thinking, "dim").wrap(self._console, self._console.width)
                live.update(Text("\n").join(tail[-SHOWN_THINKING:]), refresh=True)
        if reply.num_thinking:
            self._note(f"thought for {counted(reply.num_thinking, 'token')} (/think shows it)")
        for text in chain((first,), (piece.answer for piece in pieces)):
            self._console.print(_plain(text), end="", soft_wrap=True)
        self._console.print()

    def _note(self, text: str, style: str = "dim") -> None:
        self._notes.print(_plain(text, style), soft_wrap=True)

    def _think(self, _: str) -> None:
        self._note(self._last.thinking or "no thinking yet")

    def _image(self, text: str) -> None:
        if not text:
            raise UserError("/image needs the name of a file, or an http(s) address")
        count = self._chat.show(text)
        self._note(f"image {count} of the next question; /reset takes images back")

    def _system(self, text: str) -> None:
        self._chat.system = text
        self._chat.reset()

    def _reset(self, _: str) -> None:
        self._chat.reset()

    def _temperature(self, text: str) -> None:
        self._chat.sampling = replace(self._chat.sampling, temperature=_read(float, text, "/temperature"))

    def _seed(self, text: str) -> None:
        seed = _read(int, text, "/seed")
        if not 0 <= seed < 2**63:
            raise UserError(f"/seed {text[:40]}: expected 0 to 2**63 - 1")
        self._chat.reset(seed=seed)

    def _save(self, text: str) -> None:
        if not text:
            raise UserError("/save needs the name of a file")
        rows = [{"role": "system", "content": self._chat.system}] if self._chat.system else []
        for question, reply in self._chat.turns:
            answer = {"role": "assistant", "content": reply.answer, "reasoning_content": reply.thinking}
            rows += [{"role": "user", "content": question.content}, answer]
        try:
            with user_path(text).open("x", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except OSError as error:
            raise UserError(
                f"cannot write {text!r}: {error.strerror}; give a new name in a writable folder"
            ) from None
        self._note(f"{len(self._chat.turns)} exchanges written to {text}")

    def _help(self, _: str) -> None:
        for name, row in self._commands.items():
            self._note(f"{name:<14}{row[1]}")

    def _quit(self, _: str) -> None:
        raise EOFError


def _plain(text: str, style: str = "") -> Text:
    """Return text without markup and control codes."""
    return Text(escape_controls(text), style=style)


def _read(kind: type[Number], text: str, name: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{name} needs a number, got {text[:40]!r}") from None


def _lines() -> Iterator[str]:
    """Yield typed or piped lines."""
    if not sys.stdin.isatty():
        try:
            yield from sys.stdin
        except UnicodeDecodeError as error:
            raise UserError(f"the input is not UTF-8 text (byte {error.start} of a block)") from None
        return
    with suppress(ImportError):
        import readline  # noqa: F401  line editing and history in input()
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n/quit or Ctrl-D leaves")
        except EOFError:
            print()
            return


def main(config: ChatConfig) -> None:
    """Chat until /quit or end of input.

    Raises:
        UserError: If the model does not load, or the question in `prompt` cannot be asked.
        SystemExit: With status 1 if a piped line could not be answered.
    """
    policy = load_policy(
        config.policy, seed=0, dtype=getattr(torch, config.precision), plain=True, steers=True
    )
    console = Console(highlight=False)
    notes = console if console.is_terminal else Console(stderr=True, highlight=False)
    with Scheduler(policy, context=config.context, max_waiting=1) as scheduler:
        chat = Chat(policy, scheduler, config)
        terminal = Terminal(chat, console, notes)
        for source in config.images:
            chat.show(source)
        if config.prompt:
            terminal.ask(config.prompt)
            return
        if sys.stdin.isatty():
            alone = "" if chat.remembers else "; each question stands alone: this model's prompt has one turn"
            notes.print(_plain(f"/help lists the commands, Ctrl-C stops an answer{alone}", "dim"))
        with suppress(EOFError):
            for line in _lines():
                terminal.handle(line)
        if terminal.num_errors and not sys.stdin.isatty():
            raise SystemExit(1)


PROGRAM = Program(config_class=ChatConfig, main=main, positional="policy.init")
