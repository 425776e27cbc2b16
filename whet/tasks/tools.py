"""Tools that a model may call while it thinks: a calculator, Python in the sandbox, the user's own functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Context, Decimal
from fractions import Fraction
from functools import cache
from typing import Any

from whet.rewards.answers.calculator import NoValueError, evaluate_exactly
from whet.rewards.answers.expression import ParseError, parse_expression
from whet.rewards.answers.latex import clean
from whet.sandbox.graders.graders import GraderPool, Outcome, num_cores
from whet.sandbox.programs import run_python
from whet.schema import ResponseSchema
from whet.types import Environment, Problem, Task, Turn, UserError

MAX_RESULT_CHARACTERS = 1000
"""Longer results are truncated, with a note."""
MAX_EXPRESSION_CHARACTERS = 1000
PYTHON_TIMEOUT_S = 5.0
PYTHON_MEMORY_MIB = 512
OWN_DEADLINE_S = 10.0
DIGITS = 12
"""Significant digits of a non-terminating decimal."""

Tool = Callable[[Sequence[str]], list[str]]
"""Answers a batch of calls. A failure is an answer, too: the model reads 'error: ...'."""


class ToolBox:
    """An environment of tools: a tool answers a turn that ends in a call; any other turn ends the episode.

    Args:
        schema: Defines the tags and the names of the tools.
        inner: The task's own environment, used when a turn is not a call.
    """

    def __init__(self, schema: ResponseSchema, inner: Environment | None = None) -> None:
        self._schema = schema
        self._inner = inner
        names = [tool_name(spec) for spec in schema.tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"tool '{twice}' is given twice; give the function another name")
        self._tools = {tool_name(spec): find_tool(spec) for spec in schema.tools}

    def reset(self, problem: Problem) -> Any:
        """Begin an episode; only the inner environment has a state."""
        return None if self._inner is None else self._inner.reset(problem)

    def step(self, states: Sequence[Any], texts: Sequence[str]) -> list[Turn]:
        """Answer calls, batched by tool; pass the other turns on."""
        turns = [Turn() for _ in texts]
        calls: dict[str, list[tuple[int, str]]] = {}
        others: list[int] = []
        for place, text in enumerate(texts):
            call = self._schema.find_call(text)
            if call is None:
                others.append(place)
            else:
                name, argument = self._split(call)
                calls.setdefault(name, []).append((place, argument))
        for name, members in calls.items():
            answers = self._answer(name, [argument for _, argument in members])
            for (place, _), answer in zip(members, answers, strict=True):
                turns[place] = Turn(observation=_cut(answer), inline=True)
        if self._inner is not None and others:
            passed = self._inner.step([states[place] for place in others], [texts[place] for place in others])
            for place, turn in zip(others, passed, strict=True):
                turns[place] = turn
        return turns

    def _split(self, call: str) -> tuple[str, str]:
        """Read `name: input`; the name is optional with a single tool."""
        name, colon, argument = call.partition(":")
        if colon and name.strip() in self._tools:
            return name.strip(), argument.strip()
        return (next(iter(self._tools)), call) if len(self._tools) == 1 else ("", call)

    def _answer(self, name: str, arguments: Sequence[str]) -> list[str]:
        tool = self._tools.get(name)
        if tool is None:
            return [f"error: expected one of {', '.join(self._tools)}, then ':' and the input"] * len(
                arguments
            )
        return tool(arguments)


def environment_for(schema: ResponseSchema, task: Task) -> Environment | None:
    """Return the environment of the policy's turns: its tools, the task's own environment, both, or None.

    Args:
        schema: Names the tools.
        task: May have an attribute `environment`.
    """
    own: Environment | None = getattr(task, "environment", None)
    return _toolbox(schema, own) if schema.tools else own


@cache
def _toolbox(schema: ResponseSchema, own: Environment | None) -> ToolBox:
    """Cache one box per set of tools: its worker processes start once."""
    return ToolBox(schema, own)


def tool_name(spec: str) -> str:
    """Return the name by which a model calls a tool: for a user's function, the function's name."""
    return spec.rpartition(":")[2]


def find_tool(spec: str) -> Tool:
    """Make a tool.

    Args:
        spec: 'calculator', 'python', or 'path.py:function' of a function from text to text.

    Raises:
        UserError: If there is no such tool.
    """
    if spec in TOOLS:
        return TOOLS[spec]()
    if ":" not in spec:
        raise UserError(f"tool {spec!r}: expected {', '.join(TOOLS)} or path.py:function")
    pool = GraderPool(spec, deadline_s=OWN_DEADLINE_S, memory_mib=PYTHON_MEMORY_MIB)

    def call(arguments: Sequence[str]) -> list[str]:
        outcomes = pool.map([(argument,) for argument in arguments])
        return [_own_answer(outcome) for outcome in outcomes]

    return call


def _own_answer(outcome: Outcome) -> str:
    """Return the result of a user's tool; a failure, or no result, is an answer, too."""
    if outcome.kind != "ok":
        return f"error: {outcome.message or outcome.kind}"
    if outcome.value is None:
        return "error: the tool returned nothing"
    return str(outcome.value).encode("utf-8", "replace").decode()


def calculate(text: str) -> str:
    """Evaluate an arithmetic expression: exactly, or to 12 digits if its decimals do not terminate.

    Args:
        text: Such as `17*24`, `3/8 + 0.5` or `\\frac{1}{3}`.

    Returns:
        The value, or 'error: ...' with the reason.
    """
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        return f"error: longer than {MAX_EXPRESSION_CHARACTERS} characters"
    try:
        value = evaluate_exactly(parse_expression(clean(text)))
    except NoValueError as error:
        return f"error: {error}"
    except (ParseError, RecursionError):
        return "error: not an arithmetic expression"
    return _write(value)


def _write(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    quotient = Context(prec=DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{quotient.normalize():f}"


def _cut(text: str) -> str:
    if len(text) <= MAX_RESULT_CHARACTERS:
        return text
    return f"{text[:MAX_RESULT_CHARACTERS]}... ({len(text)} characters, cut)"


def _calculator() -> Tool:
    return lambda arguments: [calculate(argument) for argument in arguments]


def _python() -> Tool:
    def run(code: str) -> str:
        verdict = run_python(code, timeout_s=PYTHON_TIMEOUT_S, memory_mib=PYTHON_MEMORY_MIB)
        return (
            verdict.stdout.strip()
            if verdict.status == "ok"
            else f"error: {verdict.message or verdict.status}"
        )

    def call(arguments: Sequence[str]) -> list[str]:
        with ThreadPoolExecutor(num_cores()) as threads:
            return list(threads.map(run, arguments))

    return call


TOOLS: dict[str, Callable[[], Tool]] = {"calculator": _calculator, "python": _python}
"""Name -> factory of the tool."""
