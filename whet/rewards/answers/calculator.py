"""Values of expression trees: exact fractions within bounds, else complex doubles with an error scale."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from whet.rewards.answers.expression import Node

MAX_BITS = 8192
"""Bits of numerator and denominator of any exact intermediate value."""
MAX_FACTORIAL = 200
RELATIVE = 1e-9
"""Relative difference within which two computations of one quantity agree (tens of factors lose about 1e-14)."""
CANCELLATION, ABSOLUTE = 1e-13, 1e-10
"""Error of a sum relative to its largest term, and its cap: without it, huge terms that cancel would equal anything."""


class NoValueError(ArithmeticError):
    """Too large, undefined, or not a rational number."""


MAX_TERMS = 4000
"""Most operations in an expanded sum or product: number of terms times the size of one."""
_WHOLE: dict[str, Callable[[Fraction], Fraction | int]] = {"abs": abs, "floor": math.floor, "ceil": math.ceil}
"""Functions whose value at a fraction is a fraction."""


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise NoValueError("too many digits")
    return value


def evaluate_exactly(node: Node) -> Fraction:
    """Compute a rational value.

    Args:
        node: An expression.

    Returns:
        The exact value.

    Raises:
        NoValueError: If it has variables, is irrational, undefined or too large.
    """
    if node.op == "num":
        return _bounded(node.value)
    whole = _WHOLE.get(node.name)
    if node.op in ("var", "fn", "log", "deg", "series") and whole is None and node.name not in _MEMBERS:
        raise NoValueError("not rational")
    values = [evaluate_exactly(arg) for arg in node.args]
    if node.op == "fn":
        return Fraction(whole(values[0])) if whole else _of_members(node.name, values)
    if node.op == "add":
        total = Fraction(0)
        for value in values:
            total = _bounded(total + value)
        return total
    if node.op == "mul":
        product = Fraction(1)
        for value in values:
            product = _bounded(product * value)
        return product
    if node.op == "neg":
        return -values[0]
    if node.op == "inv":
        if values[0] == 0:
            raise NoValueError("division by zero")
        return 1 / values[0]
    if node.op == "pow":
        return _exact_power(values[0], values[1])
    if node.op == "root":
        return _exact_root(values[1], values[0])
    if node.op == "mod":
        if values[1] == 0:
            raise NoValueError("division by zero")
        return values[0] % values[1]
    return Fraction(_count(node.op, values))


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0 or exponent.denominator > 64:
            raise NoValueError("not rational")
        base, exponent = _exact_root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator)
    if base == 0 and exponent <= 0 and exponent != 0:
        raise NoValueError("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > MAX_BITS or (bits > 1 and bits * abs(exponent.numerator) > MAX_BITS):
        if base in (0, 1):
            return base
        raise NoValueError("too many digits")
    return _bounded(base**exponent.numerator)


def _exact_root(value: Fraction, degree: Fraction) -> Fraction:
    if degree.denominator != 1 or not 1 <= degree <= 64:
        raise NoValueError("not rational")
    negative = value < 0
    if negative and degree % 2 == 0:
        raise NoValueError("not real")
    top = _integer_root(abs(value.numerator), degree.numerator)
    bottom = _integer_root(value.denominator, degree.numerator)
    return Fraction(-top if negative else top, bottom)


def _integer_root(value: int, degree: int) -> int:
    """Return the exact integer root by Newton's method, or raise."""
    if value < 2 or degree == 1:
        return value
    root = math.isqrt(value) if degree == 2 else 1 << -(-value.bit_length() // degree)
    while degree > 2:
        smaller = ((degree - 1) * root + value // root ** (degree - 1)) // degree
        if smaller >= root:
            break
        root = smaller
    if root**degree != value:
        raise NoValueError("irrational root")
    return root


def _count(op: str, values: list[Fraction]) -> int:
    """Compute factorials and binomials of small integers."""
    if any(value.denominator != 1 or value < 0 or value > MAX_FACTORIAL for value in values):
        raise NoValueError("too large")
    if op == "fact":
        return math.factorial(values[0].numerator)
    if op == "binom":
        return math.comb(values[0].numerator, values[1].numerator)
    raise NoValueError(op)


_MEMBERS = frozenset({"gcd", "lcm", "max", "min"})


def _of_members(name: str, values: list[Fraction]) -> Fraction:
    """Return the largest, smallest, greatest common divisor or least common multiple (of fractions, too)."""
    if name in ("max", "min"):
        return max(values) if name == "max" else min(values)
    total = abs(values[0])
    for value in values[1:]:
        divisor = Fraction(
            math.gcd(total.numerator * value.denominator, value.numerator * total.denominator),
            total.denominator * value.denominator,
        )
        multiple = abs(total * value) / divisor if divisor else Fraction(0)
        total = _bounded(divisor if name == "gcd" else multiple)
    return total


_FUNCTIONS = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "sec": lambda z: 1 / cmath.cos(z),
    "csc": lambda z: 1 / cmath.sin(z),
    "cot": lambda z: 1 / cmath.tan(z),
    "asin": cmath.asin,
    "acos": cmath.acos,
    "atan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "asinh": cmath.asinh,
    "acosh": cmath.acosh,
    "atanh": cmath.atanh,
    "exp": cmath.exp,
    "ln": cmath.log,
    "log": cmath.log,
    "lg": cmath.log10,
    "abs": lambda z: complex(abs(z)),
    "floor": lambda z: complex(math.floor(z.real + CANCELLATION)),
    "ceil": lambda z: complex(math.ceil(z.real - CANCELLATION)),
}
_CONSTANTS = {"π": complex(math.pi), "e": complex(math.e), "i": 1j}


def evaluate_at(node: Node, point: Mapping[str, float]) -> tuple[complex, float]:
    """Compute a value in double precision.

    Args:
        node: An expression.
        point: Value of every variable.

    Returns:
        (value, scale): scale is the size of the largest term that went into it, for `close`.

    Raises:
        ArithmeticError: If it overflows or is undefined there.
        ValueError: If it is outside a function's domain.
    """
    op = node.op
    if op == "num":
        value = complex(float(node.value))
        return value, abs(value)
    if op == "var":
        value = complex(point[node.name]) if node.name in point else _CONSTANTS[node.name]
        return value, abs(value)
    if op == "series":
        return _series_at(node, point)
    pairs = [evaluate_at(arg, point) for arg in node.args]
    values = [value for value, _ in pairs]
    if op == "add":
        return sum(values), sum(scale for _, scale in pairs)
    if op == "mul":
        return math.prod(values, start=complex(1)), math.prod(scale for _, scale in pairs)
    if op == "neg":
        return -values[0], pairs[0][1]
    if op in ("fact", "binom"):
        value = complex(_count_at(op, node, [value.real for value in values]))
        return value, abs(value)
    if node.name in _MEMBERS:
        value = complex(_of_members_at(node, values))
        return value, abs(value)
    value = _apply(op, node.name, values)
    return value, abs(value) * max([1.0, *(scale / abs(x) for x, scale in pairs if x)])


def _series_at(node: Node, point: Mapping[str, float]) -> tuple[complex, float]:
    """Expand a finite sum or product; symbols with the index in their subscript differ from term to term."""
    index, term, first, last = node.args
    start, stop = (evaluate_at(bound, point)[0] for bound in (first, last))
    if start.imag or stop.imag or start.real % 1 or stop.real % 1 or term.has("series"):
        raise NoValueError("no range of whole numbers")
    steps = range(int(start.real), int(stop.real) + 1)
    if len(steps) * term.size() > MAX_TERMS:
        raise NoValueError("too many terms")
    numbered = [name for name in term.variables() if "_" in name and index.name in name.partition("_")[2]]
    total, scale = complex(node.name == "prod"), 1.0
    for step in steps:
        own = {name: point[name] * (1 + 0.37 * step) for name in numbered}
        value, size = evaluate_at(term, {**point, **own, index.name: float(step)})
        total = total * value if node.name == "prod" else total + value
        scale = scale * size if node.name == "prod" else scale + size
    return total, scale


def _of_members_at(node: Node, values: list[complex]) -> float:
    if node.name in ("max", "min") and not any(value.imag for value in values):
        return (max if node.name == "max" else min)(value.real for value in values)
    if node.variables():
        raise NoValueError("no divisors")
    return float(_of_members(node.name, [evaluate_exactly(arg) for arg in node.args]))


def _count_at(op: str, node: Node, values: list[float]) -> float:
    """Compute factorials and binomials; for a variable, by the gamma function."""
    if not node.variables():
        return float(_count(op, [evaluate_exactly(arg) for arg in node.args]))
    if max(map(abs, values)) > MAX_FACTORIAL / 2:
        raise NoValueError("too large")
    top = math.gamma(values[0] + 1)
    return top if op == "fact" else top / math.gamma(values[1] + 1) / math.gamma(values[0] - values[1] + 1)


def _apply(op: str, name: str, values: list[complex]) -> complex:
    first = values[0]
    if op == "inv":
        return 1 / first
    if op == "pow":
        return _power(first, values[1])
    if op == "deg":
        return first * math.pi / 180
    if op == "mod":
        if first.imag or values[1].imag:
            raise NoValueError("not real")
        return complex(first.real % values[1].real)
    if op == "log":
        return cmath.log(values[1]) / cmath.log(first)
    if op == "root":
        degree, radicand = first.real, values[1]
        if radicand.imag == 0:  # a negative zero imaginary part would choose the other root
            radicand = complex(radicand.real)
        if radicand.imag == 0 and radicand.real < 0 and degree % 2 == 1:
            return -((-radicand) ** (1 / degree))
        return radicand ** (1 / first)
    return _FUNCTIONS[name](first)


def _power(base: complex, exponent: complex) -> complex:
    r"""Raise to a power; thirds and fifths of a negative number are real, as `\sqrt[3]{-8}` is."""
    if base.real < 0 and base.imag == 0 and exponent.imag == 0:
        ratio = Fraction(exponent.real).limit_denominator(9)
        if ratio.denominator in (3, 5, 7, 9) and abs(ratio - Fraction(exponent.real)) < Fraction(1, 10**12):
            return (-1) ** ratio.numerator * complex((-base.real) ** exponent.real)
    return base**exponent


def close(left: tuple[complex, float], right: tuple[complex, float]) -> bool:
    """Say whether two (value, scale) pairs are the same quantity up to rounding."""
    (x, x_scale), (y, y_scale) = left, right
    if not (cmath.isfinite(x) and cmath.isfinite(y)):
        return False
    slack = min(ABSOLUTE, CANCELLATION * max(x_scale, y_scale))
    return abs(x - y) <= RELATIVE * max(abs(x), abs(y)) + slack
