"""Columns of a row: which one asks, which holds the answer, and what a row says: a question, a chat, or plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from whet.model.vision.asking import is_image_part
from whet.rewards.answers.extract import extract_answer, extract_answer_with_step
from whet.schema import ResponseSchema
from whet.tasks.images import COLUMNS as IMAGES
from whet.tasks.images import ImageReader, RowImages, is_image
from whet.tasks.read import Row, as_text, is_number, text_fault
from whet.types import Message, UserError

PROMPTS = ("prompt", "question", "problem", "instruction")
CHATS = ("messages", "conversations")
ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth", "reward_model.ground_truth")
ANSWER_LISTS = ("answers.text", "answers")
"""Columns of accepted answers (SQuAD's and others' names), where no column holds the one answer."""
SOLUTIONS = ("solution",)
REPLIES = ("response", "output", "completion")
TEXT = "text"
NONE = "none"
"""Given as the answer's column: no answer is looked for, replies are learned as they are."""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Role of a message by what data sets call it: OpenAI's words and ShareGPT's."""
READER = ResponseSchema(opening_in_prompt=False)
LEARNT = ("weight", "train", "training", "trainable", "loss", "loss_weight", "loss_mask")
"""Fields by which published data sets say whether a turn is learnt: 1 or true where it is."""
MASKED = ("masked",)
"""The same, the other way round."""
SWITCHES = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
SAID = ("tags", "box", "phrase", "hashes")
"""Steps of extraction that a reply asks for by its own words; the last number of a chat is no answer."""
MAX_SHOWN = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Where the parts of a row are; '' where there is none. A dot leads into a nested column.

    Attributes:
        kind: A question (with an answer, a solution, or neither), a chat, or plain text.
        prompt: The question: text, or chat messages.
        answer: The gold answer.
        solution: The worked solution, or the reply.
        is_reply: Whether `solution` is a reply, not a worked solution: only what it calls its answer is one.
        is_verbatim: Whether replies are learned as they are, and no answer is looked for.
        context: Text that belongs below the question (`input` beside `instruction`).
        system: The system message.
        tools: Definitions of the tools that may be called.
        images: Images that are asked about.
        ignores_images: Whether images are left out on purpose, so that their marks in texts stay text.
    """

    kind: Literal["question", "chat", "text"]
    prompt: str
    answer: str = ""
    solution: str = ""
    is_reply: bool = False
    is_verbatim: bool = False
    context: str = ""
    system: str = ""
    tools: str = ""
    images: str = ""
    ignores_images: bool = False

    def __str__(self) -> str:
        names = ("prompt", "images", "context", "answer", "solution", "system", "tools")
        parts = {("reply" if n == "solution" and self.is_reply else n): getattr(self, n) for n in names}
        if self.kind != "question":
            parts = {self.kind: self.prompt} | {n: v for n, v in parts.items() if n != "prompt"}
        return ", ".join(f"{name} = {value!r}" for name, value in parts.items() if value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a row says.

    Attributes:
        prompt: The question: the last text of the user's.
        answer: The gold answer; '' where none was found.
        solution: The worked solution.
        messages: All messages that ask, where they are more than one of the user's.
        reply: The response as it is written, where it was read from one.
        thinking: Reasoning that the row keeps apart from the reply.
        tools: JSON list of tool definitions.
        calls: JSON list of the calls that the reply makes.
        other_answers: Further gold answers: any of them is right.
        images: Sources of the question's images, where it is one message; those of `messages` are there.
        image_names: Names of all images, the same on every machine.
    """

    prompt: str
    answer: str = ""
    solution: str = ""
    messages: tuple[Message, ...] = ()
    reply: str = ""
    thinking: str = ""
    tools: str = ""
    calls: str = ""
    other_answers: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    image_names: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What is asked, whole but for its images: equal questions about equal images stay in one split."""
        if not self.messages:
            return self.prompt or self.reply
        messages = (replace(message, images=()) for message in self.messages)
        return "\x00".join((self.prompt, *(json.dumps(m.as_dict(), sort_keys=True) for m in messages)))

    def verbatim(self) -> Content:
        """Return it with the reply to learn as it is, and without an answer."""
        return replace(self, answer="", other_answers=(), solution=self.thinking)

    def parsed(self) -> Content:
        """Return it with its answer, and without the reply that the answer was read from."""
        return replace(self, reply="") if self.answer else self


def recognise(
    present: Mapping[str, Any],
    source: str,
    *,
    prompt: str = "",
    answer: str = "",
    solution: str = "",
    images: str = "",
) -> Columns:
    """Determine the columns of a data set from its first row.

    A text column (prompt, question, problem, instruction) asks where there is something to compare or to learn beside
    it (an answer, a solution, a response), else a chat does (messages, conversations). Upper and lower case are the
    same. 'prompt' and 'answer' are preferred where several would do; otherwise several are an error.

    Args:
        present: The first row.
        source: Name of the data, for errors.
        prompt: Column of the question, if given.
        answer: Column of the answer, if given; 'none' for no answer.
        solution: Column of the worked solution, if given.
        images: Column of the images, if given; 'none' for none. Otherwise it is recognised by its name and first value.

    Raises:
        UserError: If a given column is not there, none asks, or several could.
    """
    there = _there(present)
    for option, name in (("prompt", prompt), ("answer", answer), ("solution", solution)):
        if name and not (option == "answer" and name == NONE) and not _has(present, name):
            raise UserError(f"{source}: no column {name!r}; name another with --task.{option} ({there})")
    ignores_images = images == NONE
    images = image_column(present, source, images)
    gold = "" if answer == NONE else answer or _one(present, ANSWERS, "answer", source, there)
    if not (gold or answer or solution or _found(present, (*SOLUTIONS, *REPLIES))):
        lists = (name for name in _found(present, ANSWER_LISTS) if isinstance(_value(present, name), list))
        gold = next(lists, "")
    worked = solution or _one(present, SOLUTIONS, "solution", source, there)
    reply = "" if gold or worked else _one(present, REPLIES, "solution", source, there)
    chats = _found(present, CHATS)
    if not prompt and chats and not (gold or worked or reply):
        prompt = _one(present, CHATS, "prompt", source, there)
    prompt = prompt or _one(present, PROMPTS, "prompt", source, there)
    prompt = prompt or _one(present, CHATS, "prompt", source, there)
    texts = _found(present, (TEXT,))
    if not prompt and texts and not (gold or worked or reply):
        return Columns(kind="text", prompt=texts[0])
    if not prompt:
        is_alone = bool(gold or worked or reply) or len(present) < 2
        too = "" if is_alone else ", and that of the answer with --task.answer"
        raise UserError(f"{source}: no column is a question; name it with --task.prompt{too} ({there})")
    is_chat = isinstance(_asked_in(present, prompt), list) and not (gold or worked or reply)
    pairs = {"context": ("input",) if prompt.lower() == "instruction" else (), "system": ("system",)}
    more = {name: next(iter(_found(present, wanted)), "") for name, wanted in pairs.items()}
    return Columns(
        kind="chat" if is_chat else "question",
        prompt=prompt,
        answer=gold,
        solution=worked or reply,
        is_reply=bool(reply),
        is_verbatim=answer == NONE,
        tools=next(iter(_found(present, ("tools",))), ""),
        images=images,
        ignores_images=ignores_images,
        **more,
    )


def image_column(present: Mapping[str, Any], source: str, given: str = "") -> str:
    """Return the column of a data set's images: one that is called as they are, and holds one in the first row.

    Args:
        present: The first row.
        source: Name of the data, for errors.
        given: The column, if given; 'none' for none.

    Raises:
        UserError: If a given column is not there.
    """
    if given and given != NONE and not _has(present, given):
        raise UserError(f"{source}: no column {given!r}; name another with --task.images ({_there(present)})")
    shown = (name for name in _found(present, IMAGES) if is_image(_value(present, name)))
    return "" if given == NONE else given or next(shown, "")


def _there(present: Mapping[str, Any]) -> str:
    return f"there are: {', '.join(map(str, present))[:MAX_SHOWN]}"


def images_of(row: Row, column: str, reader: ImageReader) -> RowImages:
    """Return the images of a row's column, if there is one.

    Raises:
        UserError: If one cannot be read.
    """
    return RowImages(reader, reader.images(_value(row, column)) if column else ())


def read_row(row: Row, columns: Columns, reader: ImageReader | None = None) -> Content | str:
    """Return what a row says, or what is wrong with it.

    Args:
        row: The row.
        columns: Where its parts are.
        reader: Reads its images; None: those of the hub, which hold the file itself.
    """
    if columns.kind == "text":
        return text_fault(row, columns.prompt) or Content(prompt="", reply=row[columns.prompt])
    reader = ImageReader(None) if reader is None else reader
    try:
        found = reader.images(_value(row, columns.images)) if columns.images else ()
        return _read(row, columns, RowImages(reader, found, needs_all=not columns.ignores_images))
    except UserError as error:  # of an image
        return str(error)


def _read(row: Row, columns: Columns, images: RowImages) -> Content | str:
    asked = _asked(row, columns, images)
    if isinstance(asked, str):
        return asked
    tools = _tools(_value(row, columns.tools)) if columns.tools else ""
    if tools is None:
        return f"{columns.tools!r} is not a list of tool definitions"
    messages, last = asked
    users = [message.content for message in messages if message.role == "user"]
    content = Content(
        prompt=users[-1],
        messages=messages if len(messages) > 1 else (),
        tools=tools,
        images=messages[0].images if len(messages) == 1 else (),
        image_names=tuple(images.names),
    )
    if last is not None and not columns.solution:
        content = replace(content, reply=last.content, thinking=last.thinking, calls=last.tool_calls)
    if columns.answer:
        return _with_gold(row, columns, content)
    if columns.solution:
        fault = _fault(row, columns.solution)
        return fault or _worked(replace(content, reply=str(_value(row, columns.solution))), columns)
    return _worked(content, columns) if last is not None else content


def conversation(value: Any, column: str, images: RowImages | None = None) -> tuple[Message, ...] | str:
    """Read chat messages (role and content, or ShareGPT's from and value), or say what is wrong with them.

    Args:
        value: The messages.
        column: Their column, for errors.
        images: The row's images, for messages that show some.

    Raises:
        UserError: If an image cannot be read.
    """
    images = RowImages(ImageReader(None)) if images is None else images
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        return f"{column!r} is not a list of objects"
    messages: list[Message] = []
    for item in value:
        word = item.get("role", item.get("from"))
        role = ROLES.get(str(word).lower())
        if role is None:
            return f"{column!r} has a message of role {word!r:.40}, expected system, user, assistant or tool"
        content = item.get("content", item.get("value"))
        calls, thinking = item.get("tool_calls"), item.get("reasoning_content") or item.get("thinking")
        calls = calls or item.get("function_call")  # OpenAI's first form, of one call
        if word == "function_call":  # ShareGPT: the value is the call
            calls, content = content, ""
        sources: tuple[str, ...] = ()
        if isinstance(content, list):  # parts, as OpenAI's interface has them
            seen = [part for part in content if is_image_part(part)]
            texts = [part for part in content if not is_image_part(part)]
            if any(not isinstance(p, Mapping) or not isinstance(p.get("text"), str) for p in texts):
                return f"{column!r}, {role}: content holds more than text and images"
            sources = tuple(map(images.of_part, seen))
            content = "".join(part["text"] for part in texts)
        elif isinstance(content, str) and (role != "assistant" or images.are_waiting):
            content, sources = images.of_text(content)
        if sources and role == "assistant":
            return f"{column!r}: a message of the assistant's shows an image; models write text alone"
        found = _calls(calls, f"{column!r}, {role}") if calls else ""
        if found is None:
            return f"{column!r}, {role}: 'tool_calls' is not a list of calls"
        if content is None and (found or thinking):
            content = ""
        is_call = bool(found) and content == ""
        if not isinstance(content, str) or not is_call:
            fault = text_fault({"content": content}, "content")
            if fault or not isinstance(content, str):
                return f"{column!r}, {role}: {fault}"
        messages.append(
            Message(
                role=role,
                content=content,
                thinking=thinking if isinstance(thinking, str) else "",
                tool_calls=found,
                tool_call_id=_text(item, "tool_call_id"),
                name=_text(item, "name"),
                images=sources,
                is_learnt=_is_learnt(item, role, column),
            )
        )
    return _with_rest(messages, images)


def _with_rest(messages: Sequence[Message], images: RowImages) -> tuple[Message, ...]:
    """Give the images that no message asked for to the first message of the user's."""
    rest = images.rest()
    place = next((place for place, message in enumerate(messages) if message.role == "user"), None)
    if not rest or place is None:
        return tuple(messages)
    first = replace(messages[place], images=(*messages[place].images, *rest))
    return (*messages[:place], first, *messages[place + 1 :])


def split_thinking(text: str) -> tuple[str, str]:
    """Split off the reasoning of a response in R1's style; without its tags all of it is the rest."""
    head, closed, rest = text.partition(READER.think_close)
    if not closed:
        return "", text
    return head.partition(READER.think_open)[2].strip() if READER.think_open in head else head.strip(), rest


def _asked(row: Row, columns: Columns, images: RowImages) -> tuple[tuple[Message, ...], Message | None] | str:
    """Return the messages that ask, and the assistant's message that answers them, if there is one."""
    value = _asked_in(row, columns.prompt)
    system: tuple[Message, ...] = ()
    if columns.system and isinstance(said := _value(row, columns.system), str) and said.strip():
        system = (Message(role="system", content=said),)
    if not isinstance(value, list):
        if fault := _fault(row, columns.prompt):
            return fault
        context = _value(row, columns.context) if columns.context else None
        below = f"\n\n{context}" if isinstance(context, str) and context.strip() else ""
        text, sources = images.of_text(as_text(value))
        sources += images.rest()
        return (*system, Message(role="user", content=f"{text}{below}", images=sources)), None
    found = conversation(value, columns.prompt, images)
    if isinstance(found, str):
        return found
    if system and found[0].role != "system":
        found = (*system, *found)
    places = [place for place, message in enumerate(found) if message.role == "assistant"]
    last = None
    if any(not found[place].is_learnt for place in places):
        # No turn that is learnt has what follows the last of them as its context.
        places = [place for place in places if found[place].is_learnt]
        if columns.kind == "chat" and not places:
            return f"{columns.prompt!r}: no message of the assistant's is to be learnt (all have weight 0)"
        if columns.kind != "chat" and found[-1].role == "assistant" and not found[-1].is_learnt:
            found, places = found[:-1], []
    # Beside an answer the chat may end with the question. A chat alone is there for what the assistant says last.
    if places and (columns.kind == "chat" or found[-1].role == "assistant"):
        found, last = found[: places[-1]], found[places[-1]]
    elif columns.kind == "chat" and columns.prompt.lower() in CHATS:
        return f"{columns.prompt!r} has no assistant message"
    if not any(message.role == "user" for message in found):
        return f"{columns.prompt!r} has no user message" + (" before its last answer" if last else "")
    if found[-1].role not in ("user", "tool"):
        return f"{columns.prompt!r}: its last answer follows a message of the {found[-1].role}"
    return found, last


def _with_gold(row: Row, columns: Columns, content: Content) -> Content | str:
    """Add the answer of its own column, or the answers, and the worked solution."""
    value = _value(row, columns.answer)
    if isinstance(value, Sequence) and not isinstance(value, str):
        golds = _accepted(value, columns.answer)
        if isinstance(golds, str):
            return golds
        found = _with_gold({**row, columns.answer: golds[0]}, columns, content)
        return found if isinstance(found, str) else _with_others(found, golds[1:])
    if fault := _fault(row, columns.answer):
        inner = [f"{columns.answer}.{name}" for name in value] if isinstance(value, Mapping) else []
        there = ", ".join(inner)[:MAX_SHOWN]
        return f"{fault}; name one of its own with --task.answer: {there}" if inner else fault
    gold = as_text(value)
    if not columns.solution and "####" in gold:  # GSM8K: the answer ends the worked text
        return _worked(replace(content, reply=gold), columns)
    solution = _value(row, columns.solution) if columns.solution else content.thinking or content.reply
    if solution in (None, ""):
        return replace(content, answer=gold.strip(), reply="")
    if columns.solution and (fault := _fault(row, columns.solution)):
        return fault
    thinking, rest = split_thinking(str(solution))
    return replace(content, answer=gold.strip(), solution=(thinking or rest).strip(), reply="")


def accepted_in(content: Content) -> Content | None:
    """Return a row's accepted answers, where its answer is the JSON text of a list of texts; else None."""
    if not (content.answer.startswith("[") and content.answer.endswith("]")):
        return None
    try:
        values = json.loads(content.answer)
    except (ValueError, RecursionError):
        return None
    if not values or not all(isinstance(value, str) and not text_fault({"": value}, "") for value in values):
        return None  # [1, 2] is an answer, not two
    return _with_others(replace(content, answer=values[0].strip()), values[1:])


def _with_others(content: Content, answers: Sequence[str]) -> Content:
    """Add further accepted answers, each once."""
    others = dict.fromkeys(answer.strip() for answer in answers)
    return replace(content, other_answers=tuple(other for other in others if other != content.answer))


def _accepted(values: Sequence[Any], column: str) -> list[str] | str:
    """Return the answers of a list, or what is wrong with one of them."""
    if not values:
        return f"{column!r} is an empty list"
    faults = (None if is_number(value) else text_fault({column: value}, column) for value in values)
    fault = next((fault for fault in faults if fault), None)
    return f"a list of answers, of which one is wrong: {fault}" if fault else list(map(as_text, values))


def _worked(content: Content, columns: Columns) -> Content:
    """Look for the final answer in a reply or a worked solution: its blocks, '####', else what it says itself."""
    text = content.reply
    if columns.is_verbatim:
        return content
    parsed = READER.parse(text)
    if parsed.answer:
        return replace(content, answer=parsed.answer, solution=(parsed.thinking or content.thinking).strip())
    solution, mark, last = text.rpartition("####")
    if mark and last.strip():
        return replace(content, answer=last.strip(), solution=content.thinking or solution.strip())
    thinking, rest = split_thinking(text)
    is_solution = columns.kind == "question" and not columns.is_reply
    answer = extract_answer(rest) if is_solution else extract_answer_with_step(rest, SAID)[0]
    if not answer:
        return content
    return replace(content, answer=answer, solution=content.thinking or thinking or text)


def _asked_in(row: Mapping[str, Any], column: str) -> Any:
    """Return what a column asks: text, or a list of messages, which files without lists hold as JSON text."""
    value = _value(row, column)
    if isinstance(value, str) and column.lower() in CHATS:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = [value]  # not messages: the error says so
    return (
        value if isinstance(value, str | list) or is_number(value) else [value] if value is not None else None
    )


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Return a column's value; a dot leads into a nested one."""
    if column in row:
        return row[column]
    head, dot, tail = column.partition(".")
    inner = row.get(head)
    return _value(inner, tail) if dot and isinstance(inner, Mapping) else None


def _has(row: Mapping[str, Any], column: str) -> bool:
    head, dot, tail = column.partition(".")
    inner = row.get(head)
    return column in row or bool(dot) and isinstance(inner, Mapping) and _has(inner, tail)


def _fault(row: Row, column: str) -> str | None:
    """Return why a column holds no text; a number is text."""
    if column not in row and not _has(row, column):
        return f"no {column!r}"
    value = _value(row, column)
    return None if is_number(value) else text_fault({column: value}, column)


def _found(present: Mapping[str, Any], wanted: Sequence[str]) -> list[str]:
    """Return the row's own names of the wanted columns, in the wanted order."""
    names = {str(name).lower(): str(name) for name in present}
    return [
        name for want in wanted if (name := names.get(want, want if _has(present, want) else "")) and name
    ]


def _one(present: Mapping[str, Any], wanted: Sequence[str], option: str, source: str, there: str) -> str:
    """Return the only one of the wanted columns that is there, or the preferred one; '' for none."""
    found = _found(present, wanted)
    if len(found) > 1 and found[0].lower() != option:
        raise UserError(
            f"{source}: {' and '.join(map(repr, found))} could each be the {option}; name the column with "
            f"--task.{option} ({there})"
        )
    return found[0] if found else ""


def _text(item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    return value if isinstance(value, str) else ""


def _is_learnt(item: Mapping[str, Any], role: str, column: str) -> bool:
    """Read whether a message is to be learnt; the assistant's are, unless one of `LEARNT` or `MASKED` says otherwise.

    Raises:
        UserError: If a weight is neither 0 nor 1, or another role's message is to be learnt.
    """
    answers = []
    for name in (*LEARNT, *MASKED):
        if (value := item.get(name)) is not None:
            switch = SWITCHES.get(str(value).lower())
            if switch is None:
                raise UserError(
                    f"{column!r}, {role}: {name!r} is {value!r:.40}, expected 0 or 1 (a turn is learnt or is context)"
                )
            answers.append(switch != (name in MASKED))
    if role != "assistant" and any(answers):
        raise UserError(
            f"{column!r}, {role}: marked as to be learnt; only the assistant's messages are learnt, remove the mark"
        )
    return all(answers)


def _without_padding(value: Any) -> Any:
    """Drop empty fields of nested objects: Arrow gives every object of a column the fields of all of them."""
    if isinstance(value, Mapping):
        return {name: _without_padding(inner) for name, inner in value.items() if inner is not None}
    return [_without_padding(inner) for inner in value] if isinstance(value, list) else value


def _parsed(value: Any) -> Any:
    """Return a value without padding, or the value of its JSON text, whose nulls were written on purpose.

    Raises:
        ValueError: If text is not JSON.
        RecursionError: If it is nested too deeply.
    """
    if not isinstance(value, str):
        return _without_padding(value)
    return json.loads(value) if value.strip() else None


def _objects(value: Any) -> list[dict[str, Any]] | None:
    """Return a list of objects, or the JSON text of one; one object is a list of one; None for anything else."""
    try:
        value = _parsed(value)
        value = [value] if isinstance(value, Mapping) else value or []
        found = [_parsed(item) for item in value if item is not None] if isinstance(value, list) else [None]
        json.dumps(found)
    except (TypeError, ValueError, RecursionError):
        return None
    objects = [dict(item) for item in found if isinstance(item, Mapping)]
    return objects if len(objects) == len(found) else None


def _as_json(values: Sequence[Any]) -> str:
    return json.dumps(values, ensure_ascii=False) if values else ""


def _tools(value: Any) -> str | None:
    """Return tool definitions as a JSON list; '' for none, None for anything else."""
    found = _objects(value)
    if found is None:
        return None
    for tool in found:
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        if isinstance(
            text := function.get("parameters"), str
        ):  # as columns of one type for all tools have it
            parameters = _objects(text)
            if not parameters or len(parameters) != 1:
                return None
            function["parameters"] = parameters[0]
    return _as_json(found)


def _calls(value: Any, where: str) -> str | None:
    """Return calls of tools as a JSON list in the form that chat templates take; '' for none, None for anything else.

    Args:
        value: A call, a list of calls, or the JSON text of either.
        where: Where they stand, for errors.

    Raises:
        UserError: If the arguments of a call are not an object.
    """
    found = _objects(value)
    if found is None:
        return None
    calls = []
    for call in found:
        if "function" not in call and isinstance(call.get("name"), str):
            call = {"type": "function", "function": call}
        function = call.get("function")
        if not isinstance(function, dict):
            return None
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = _parsed(arguments)
            arguments = {} if arguments is None else arguments
        if arguments is not None and not isinstance(arguments, dict):
            raise UserError(
                f"{where}: the arguments of call {function.get('name')!r:.40} are {arguments!r:.60}, expected a JSON "
                "object"
            )
        calls.append({**call, "function": {**function, "arguments": arguments or {}}})
    return _as_json(calls)
