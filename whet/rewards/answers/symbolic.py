r"""Symbolic equality of answers through math-verify (the extra `math`), in workers that can be killed.

For what `answers_equal` cannot decide: sums, integrals, limits, determinants, relations in several variables.
whet's stricter rules come first; math-verify is used only when

- whet's own calculator cannot evaluate one of the answers (where it can, its verdict counts: `5,5` is not `5`);
- both have the same structure: as many members, equation against equation (`x = A` counts as `A`);
- the prediction is one formula: no prose, no `$`, no box, and math-verify parses all of it;
- numbers agree to a relative 1e-6, where math-verify alone would round to six decimals (1e-9 is not 0).

No text reaches `sympify`, `parse_expr` or `eval`: math-verify's LaTeX grammar reads it. Its own time limits are
signals, which do not stop C code and fail in threads; they are off: the pool kills the worker instead.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Sequence
from typing import Any

from whet.install import install_command
from whet.rewards.answers.calculator import evaluate_at
from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.expression import FUNCTIONS, ParseError, parse_expression
from whet.rewards.answers.latex import clean
from whet.rewards.answers.structure import Equation, Leaf, Value, parse_value
from whet.rewards.answers.structure import Sequence as Members
from whet.sandbox.graders.graders import GraderPool
from whet.types import UserError

MAX_CHARACTERS = 1000
"""Longer answers are not compared symbolically."""
RELATIVE = 1e-6
"""Largest relative difference between equal numbers."""
_MEMORY_MIB = 512
_WARMING = {
    "\\sum_{k=1}^{2} k": "3",
    "\\int_0^1 2x dx": "\\lim_{x \\to 0} \\frac{\\sin x}{x}",
    "\\det \\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}": "-\\gcd(2, 4)",
    "(\\lfloor \\pi \\rfloor, e^2)": "(3, e^2)",
}
"""Equal pairs that warm up the tables of math-verify's grammar."""
_COMMAND = re.compile(r"\\(?:begin|end) ?\{[a-z]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}|(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
_NAMES = frozenset(FUNCTIONS) | {"sum", "prod", "lim", "det", "max", "min", "gcd", "lcm", "mod", "sup", "inf"}
_BEYOND = re.compile(r"\\(?:sum|prod|int|lim)(?![a-z])|\\frac ?\{ ?d ?\} ?\{ ?d")
"""What whet's parser reads as a formal symbol at best, and cannot evaluate: series, limits, derivatives."""
_ASSIGNED = re.compile(r"\s*[A-Za-z](?:_\{?[A-Za-z0-9]\}?|\([a-z]\))?\s*=(?![=<>])")
_pools: dict[float, GraderPool] = {}
_lock = threading.Lock()


def answers_equal_symbolically(prediction: str, gold: str, *, deadline_s: float = 2.0) -> bool | None:
    """Judge an extracted answer by `answers_equal`, and by math-verify if that cannot decide.

    Args:
        prediction: Extracted final answer: untrusted text.
        gold: The gold answer.
        deadline_s: Seconds after which the symbolic comparison is killed.

    Returns:
        True when both are the same answer; None if the comparison was killed or failed (count it; do not treat it as
        right).

    Raises:
        UserError: If math-verify is not installed.
    """
    return answers_equal(prediction, gold) or symbolic_equal(prediction, gold, deadline_s=deadline_s)


def symbolic_equal(prediction: str, gold: str, *, deadline_s: float = 2.0) -> bool | None:
    """Compare two answers symbolically; see `symbolic_equal_pairs`."""
    return symbolic_equal_pairs([(prediction, gold)], deadline_s=deadline_s)[0]


def symbolic_equal_pairs(pairs: Sequence[tuple[str, str]], *, deadline_s: float = 2.0) -> list[bool | None]:
    """Compare many pairs in parallel: all that hang together cost one deadline.

    Args:
        pairs: (prediction, gold).
        deadline_s: Limit of one comparison in seconds. One pool is kept per value.

    Returns:
        For each pair True, False, or None if its worker was killed, ran out of memory or failed.

    Raises:
        UserError: If math-verify is not installed.
    """
    asked = [index for index, pair in enumerate(pairs) if needs_symbols(*pair)]
    results: list[bool | None] = [False] * len(pairs)
    if asked:
        outcomes = _pool(deadline_s).map([pairs[index] for index in asked])
        for index, outcome in zip(asked, outcomes, strict=True):
            results[index] = outcome.value if outcome.kind == "ok" else None
    return results


def needs_symbols(prediction: str, gold: str) -> bool:
    """Say whether a symbolic comparison may decide more than `answers_equal`.

    Args:
        prediction: Extracted final answer.
        gold: The gold answer.

    Returns:
        False if whet's rules decide: its calculator evaluates both, or the prediction is not a single formula of the
        gold answer's structure.
    """
    if max(len(prediction), len(gold)) > MAX_CHARACTERS or not (
        _is_formula(prediction) and _is_formula(gold)
    ):
        return False
    left, right = (parse_value(clean(_right_side(text))) for text in (prediction, gold))
    return _shape(left) == _shape(right) and not (_is_decided(left) and _is_decided(right))


def verify_in_worker(prediction: str, gold: str) -> bool:
    """Compare by math-verify, without any bound on time or memory: for a worker of a `GraderPool` only.

    Args:
        prediction: A formula that `needs_symbols` accepted.
        gold: The gold formula.

    Returns:
        True if math-verify finds them equal, and their values agree within whet's tolerance.
    """
    from math_verify import verify  # optional dependency; takes half a second to import

    left, right = _parse(_right_side(prediction)), _parse(_right_side(gold))
    if left is None or right is None or not _magnitudes_agree(left, right):
        return False
    return verify(right, left, timeout_seconds=None)  # type: ignore[arg-type]


def prepare_worker() -> None:
    """Import math-verify and warm up its grammar's tables, once for all workers."""
    import logging

    logging.disable(logging.CRITICAL)  # it warns that its time limits are off, and of every failure
    for prediction, gold in _WARMING.items():
        verify_in_worker(prediction, gold)


def _pool(deadline_s: float) -> GraderPool:
    """Return the pool for this deadline; the first call starts it (about a second)."""
    with _lock:
        if deadline_s not in _pools:
            if importlib.util.find_spec("math_verify") is None:
                raise UserError(f"symbolic equality needs math-verify: {install_command('math')}")
            _pools[deadline_s] = GraderPool(
                f"{__name__}:verify_in_worker",
                deadline_s=deadline_s,
                memory_mib=_MEMORY_MIB,
                prepare=f"{__name__}:prepare_worker",
            )
        return _pools[deadline_s]


def _is_formula(text: str) -> bool:
    """Say whether a text is not empty, and free of prose, boxes and inner dollar signs."""
    inner = text.strip().strip("$")
    if not inner.strip() or "$" in inner or "\\boxed" in inner or "\\fbox" in inner:
        return False
    return all(word in _NAMES for word in _WORD.findall(_COMMAND.sub(" ", inner)))


def _right_side(text: str) -> str:
    """Drop dollar signs, final points, and a leading name (`x =`, `f(x) =`)."""
    text = text.strip().strip("$").rstrip(" .")
    assigned = _ASSIGNED.match(text)
    is_lone = assigned is not None and "=" not in text[assigned.end() :] and "," not in text
    return text[assigned.end() :] if assigned is not None and is_lone else text


def _shape(value: Value) -> Any:
    """Describe a structure by the number of its members, at every depth."""
    if not isinstance(value, Members):
        return type(value).__name__
    kind = "tuple" if value.kind in ("bare", "lines", "matrix") else value.kind
    shapes = [_shape(item) for item in value.items]
    return kind, value.brackets if len(shapes) == 2 else "", tuple(sorted(map(repr, shapes)))


def _is_decided(value: Value) -> bool:
    """Say whether whet's own calculator can evaluate a value."""
    if isinstance(value, Equation):
        return all(_is_decided(Leaf(member)) for member in value.members)
    if isinstance(value, Members):
        return all(_is_decided(item) for item in value.items)
    if not isinstance(value, Leaf) or value.number is not None:
        return True
    if _BEYOND.search(value.text):
        return False
    try:
        tree = parse_expression(value.parts[0])
        evaluate_at(tree, {name: 0.7 + 0.1 * i for i, name in enumerate(sorted(tree.variables()))})
    except (ParseError, ArithmeticError, ValueError):
        return False
    return True


def _parse(text: str) -> Any:
    """Read a whole formula by math-verify's LaTeX grammar; None when it does not parse."""
    from math_verify import LatexExtractionConfig, parse

    found = parse(
        f"${' '.join(text.split())}$",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=-1)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # type: ignore[arg-type]
    )
    return found[0] if len(found) == 1 and not isinstance(found[0], str) else None


def _magnitudes_agree(left: Any, right: Any) -> bool:
    """Say whether two numbers agree within the tolerance; True for anything that is not a number."""
    if not (getattr(left, "is_number", False) and getattr(right, "is_number", False)):
        return True
    a, b = (complex(side.doit().evalf(20)) for side in (left, right))
    return abs(a - b) <= RELATIVE * max(abs(a), abs(b))
