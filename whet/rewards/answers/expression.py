r"""A small, safe parser: plain or LaTeX algebra -> expression tree, which `calculator` evaluates.

No Python is evaluated. Length, depth, digits and exponents are bounded, so that `9^{9^{9^9}}` costs microseconds: an
expression beyond a bound has no value, and two expressions without a value are equal only as text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# The tree of an expression, as the parser builds it and the calculator walks it.


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of an expression.

    Attributes:
        op: 'num', 'var', 'add', 'mul', 'neg', 'inv', 'pow', 'root', 'log', 'fn', 'fact', 'binom', 'deg', 'mod' or
            'series' (index, term, first, last; named 'sum' or 'prod').
        args: Operands.
        value: Value of a 'num'.
        name: Name of a 'var' (constants 'π', 'e', 'i' included) or function of an 'fn'; 'frac' and 'mixed' record how a
            'mul' and an 'add' were written.
    """

    op: str
    args: tuple[Node, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""

    def variables(self) -> frozenset[str]:
        """Return the names of all variables, constants excluded."""
        if self.op == "var":
            return frozenset() if self.name in ("π", "e", "i") else frozenset({self.name})
        if self.op == "series":
            index, term, first, last = self.args
            return term.variables() - {index.name} | first.variables() | last.variables()
        return frozenset().union(*(arg.variables() for arg in self.args))

    def size(self) -> int:
        """Return the number of operations and operands."""
        return 1 + sum(arg.size() for arg in self.args)

    def has(self, *names: str) -> bool:
        """Say whether any of the named functions or operations occurs."""
        return self.name in names or self.op in names or any(arg.has(*names) for arg in self.args)


MAX_LENGTH = 1000
MAX_DEPTH = 40
MAX_POSTFIXES = 4
MAX_MEMBERS = 20

_FUNCTION_NAMES = """sin cos tan sec csc cot sinh cosh tanh exp ln lg log abs asin acos atan asinh acosh atanh
arcsin=asin arccos=acos arctan=atan arcsinh=asinh arccosh=acosh arctanh=atanh arsinh=asinh arcosh=acosh artanh=atanh
tg=tan cosec=csc"""
FUNCTIONS: dict[str, str] = {
    name: meaning or name for name, _, meaning in (entry.partition("=") for entry in _FUNCTION_NAMES.split())
}
OF_MEMBERS = frozenset({"gcd", "lcm", "max", "min", "floor", "ceil"})
"""Functions of one or more arguments in brackets, separated by commas."""
INVERSES = {name: f"a{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")}
_GREEK_NAMES = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau
upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell"""
GREEK = frozenset(_GREEK_NAMES.split())
_NAMES = sorted([*FUNCTIONS, "sqrt", "pi", "frac", "theta", "alpha", "beta", "lambda"], key=len, reverse=True)
_NAME = re.compile("|".join(_NAMES))
_NUMERAL = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9.]))?")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_DIGIT_OR_POINT = frozenset("0123456789.")
_LETTERS = re.compile(r"[A-Za-z]+")
_SUBSCRIPT = re.compile(r" ?_ ?(?:\{([A-Za-z0-9,+*^\\ -]{1,24})\}|([A-Za-z0-9]|\\[a-z]{2,8}))")
_MEMBERS = re.compile(r"(?:gcd|lcm|max|min|floor|ceil)(?= ?[({⦃\[])")
_MODULO = re.compile(r" ?\\?b?mod(?![a-z]) ?")
_FROM, _TO = r" ?_ ?\{ ?([A-Za-z]) ?= ?([^{}=]{1,40})\}", r" ?\^ ?(\{[^{}]{1,40}\}|[A-Za-z0-9])"
_RANGE, _RANGE_REVERSED = re.compile(_FROM + _TO), re.compile(_TO + _FROM)
_DIFFERENTIAL = re.compile(r" ?d ?(\\?[A-Za-z]{1,8})(?![A-Za-z])")
_BOUNDS = re.compile(r"(?: ?_ ?(?:\{[^{}]{1,40}\}|[A-Za-z0-9])| ?\^ ?(?:\{[^{}]{1,40}\}|[A-Za-z0-9∞])){0,2}")
SERIES = frozenset({"sum", "prod", "int"})
"""Without finite bounds they become a formal factor named by the bounds, so that two such sums can be compared."""
_REPEATING = re.compile(r"\\overline ?\{([0-9]{1,40})\}")
_OPENERS = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉", "⦃": "⦄"}
_ROUNDING = {"⌋": "floor", "⌉": "ceil"}
LONGEST_PRODUCT = 4
"""Longest run of letters that is read as a product of variables; a longer one is a word."""


class ParseError(ValueError):
    """The text is not an expression of this grammar."""


def parse_expression(text: str) -> Node:
    """Parse cleaned text (see `whet.rewards.answers.latex`).

    Args:
        text: The expression, at most `MAX_LENGTH` characters.

    Returns:
        Its tree.

    Raises:
        ParseError: If it is not an expression, too long or too deep.
    """
    if len(text) > MAX_LENGTH:
        raise ParseError("too long")
    parser = _Parser(text)
    node = parser.sum()
    if parser.peek():
        raise ParseError(f"unexpected {parser.peek()!r}")
    return node


class _Parser:
    """Recursive descent over the characters (`\\frac12` splits a numeral: there is no separate tokenizer)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.bars = 0

    def peek(self) -> str:
        """Skip spaces and return the next character ('' at the end)."""
        while self.text[self.position : self.position + 1] in (" ", "\n"):
            self.position += 1
        return self.text[self.position : self.position + 1]

    def take(self, character: str) -> None:
        if self.peek() != character:
            raise ParseError(f"expected {character!r}")
        self.position += 1

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.position)
        if found:
            self.position = found.end()
        return found

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("too deep")
        terms = [self.product()]
        while self.peek() in ("+", "-") and self.peek():
            sign = self.peek()
            self.position += 1
            term = self.product()
            terms.append(Node("neg", (term,)) if sign == "-" else term)
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def product(self) -> Node:
        factors = [self.signed()]
        while True:
            character = self.peek()
            if self.match(_MODULO):
                dividend = factors[0] if len(factors) == 1 else Node("mul", tuple(factors))
                factors = [Node("mod", (dividend, self.signed()))]
            elif character in ("*", "/") and character:
                self.position += 1
                factor = self.signed()
                factors.append(Node("inv", (factor,)) if character == "/" else factor)
            elif self.starts_atom(character):
                start = self.position
                factor = self.power()
                both_powers = factors[-1].op == factor.op == "pow"
                if start > 0 and self.text[start] in _DIGIT_OR_POINT and not both_powers:
                    raise ParseError("two numerals in a row")
                factors[-1:] = _mixed_number(factors[-1], factor, self.text[start : start + 5])
            else:
                return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))

    def starts_atom(self, character: str) -> bool:
        if not character:
            return False
        return (
            (character.isascii() and (character.isalnum() or character in "([{\\."))
            or character in "π⌊⌈⦃"
            or (character == "|" and not self.bars)
        )

    def signed(self) -> Node:
        negative = False
        for _ in range(MAX_POSTFIXES + 1):
            if self.peek() not in ("+", "-") or not self.peek():
                node = self.power()
                return Node("neg", (node,)) if negative else node
            negative ^= self.peek() == "-"
            self.position += 1
        raise ParseError("too many signs")

    def power(self) -> Node:
        node = self.postfix(self.atom())
        if self.peek() != "^":
            return node
        self.position += 1
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("too deep")
        exponent = self.signed()
        self.depth -= 1
        late = self.subscript() if node.op == "var" and "_" not in node.name else ""
        return Node("pow", (Node("var", name=node.name + late) if late else node, exponent))

    def postfix(self, node: Node) -> Node:
        for _ in range(MAX_POSTFIXES):
            character = self.peek()
            if character == "!":
                node = Node("fact", (node,))
            elif character == "°":
                node = Node("deg", (node,))
            elif character == "%":
                node = Node("mul", (node, Node("num", value=Fraction(1, 100))))
            else:
                break
            self.position += 1
        return node

    def atom(self) -> Node:
        character = self.peek()
        if character in _OPENERS:
            return self.group()
        if character == "|":
            self.position += 1
            self.bars += 1
            node = self.sum()
            self.take("|")
            self.bars -= 1
            return Node("fn", (node,), name="abs")
        if character == "π":
            self.position += 1
            return Node("var", name="π")
        numeral = self.match(_NUMERAL)
        if numeral:
            return self.numeral(numeral.group())
        command = self.match(_COMMAND)
        if command:
            return self.command(command[1])
        return self.letters()

    def group(self) -> Node:
        closing = _OPENERS.get(self.peek())
        if closing is None:
            raise ParseError("expected a bracket")
        self.position += 1
        bars, self.bars = self.bars, 0
        node = self.sum()
        self.take(closing)
        self.bars = bars
        return Node("fn", (node,), name=_ROUNDING[closing]) if closing in _ROUNDING else node

    def numeral(self, digits: str) -> Node:
        is_exponent = self.text[: self.position - len(digits)].endswith("^")
        value = Fraction(digits + "0" if digits.endswith(".") else digits)
        cycle = self.match(_REPEATING) if "." in digits else None
        if cycle:
            fixed = len(digits) - digits.index(".") - 1
            value += Fraction(int(cycle[1]), (10 ** len(cycle[1]) - 1) * 10**fixed)
        if self.peek() == "_" and not is_exponent:
            raise ParseError("a numeral in another base")
        return Node("num", value=value)

    def argument(self, single_digit: bool) -> Node:
        r"""Read what follows `\frac` or `\sqrt`: a group, a numeral (one digit of it) or one symbol."""
        character = self.peek()
        if character == "{":
            return self.group()
        if single_digit and character.isascii() and character.isdigit():
            self.position += 1
            return Node("num", value=Fraction(int(character)))
        return self.atom()

    def command(self, name: str) -> Node:
        if name == "frac":
            top = self.argument(single_digit=True)
            return Node("mul", (top, Node("inv", (self.argument(single_digit=True),))), name="frac")
        if name == "sqrt":
            return self.root()
        if name in SERIES:
            return self.series(name)
        if name in OF_MEMBERS:
            return self.of_members(name)
        if name in ("overline", "bar"):
            inner = self.argument(single_digit=False)
            if inner.op != "var":
                raise ParseError("a bar over something that is not a symbol")
            return Node("var", name=f"bar {inner.name}{self.subscript()}")
        if name == "binom":
            return Node("binom", (self.argument(single_digit=True), self.argument(single_digit=True)))
        if name in FUNCTIONS:
            return self.function(FUNCTIONS[name])
        if name in GREEK:
            return Node("var", name=name + self.subscript())
        raise ParseError(f"unknown command {name}")

    def series(self, name: str) -> Node:
        r"""Read `\sum_{k=1}^{n} term`, or a formal factor if the range is not finite."""
        start = self.position
        finite = self.match(_RANGE) or self.match(_RANGE_REVERSED) if name != "int" else None
        if finite and "∞" not in finite.group():
            index, first, last = finite.groups() if finite.re is _RANGE else (*finite.groups()[1:], finite[1])
            term = self.operand()
            ends = parse_expression(first), parse_expression(last)
            return Node("series", (Node("var", name=index), term, *ends), name=name)
        bounds = _BOUNDS.match(self.text, start)
        self.position = bounds.end() if bounds else start
        limits = re.findall(r"[_^] ?(?:\{[^{}]*\}|[^{}])", bounds.group()) if bounds else []
        spelled = (re.sub(r"[ {}]", "", limit) for limit in limits)
        operator = Node("var", name=name + "".join(sorted(limit for limit in spelled if len(limit) > 1)))
        differential = _DIFFERENTIAL.search(self.text, self.position) if name == "int" else None
        if differential is None or differential.start() == self.position:
            return operator
        integrand = parse_expression(self.text[self.position : differential.start()])
        self.position = differential.end()
        return Node("mul", (operator, integrand, Node("var", name=f"d {differential[1]}")))

    def of_members(self, name: str) -> Node:
        r"""Read `\gcd(12, 18)` or `\max\{a, b\}`."""
        closing = _OPENERS.get(self.peek())
        if closing is None:
            raise ParseError("expected a bracket")
        self.position += 1
        bars, self.bars = self.bars, 0
        members = [self.sum()]
        while self.peek() == "," and len(members) < MAX_MEMBERS:
            self.position += 1
            members.append(self.sum())
        self.take(closing)
        self.bars = bars
        if name in ("floor", "ceil") and len(members) > 1:
            raise ParseError("too many arguments")
        return Node("fn", tuple(members), name=name)

    def root(self) -> Node:
        degree = Node("num", value=Fraction(2))
        if self.peek() == "[":
            degree = self.group()
        return Node("root", (degree, self.argument(single_digit=False)))

    def subscript(self) -> str:
        found = self.match(_SUBSCRIPT)
        return "_" + re.sub(r"[ \\]", "", found[1] or found[2]) if found else ""

    def letters(self) -> Node:
        known = self.match(_MEMBERS) or self.match(_NAME)
        if known is None:
            run = _LETTERS.match(self.text, self.position)
            if run is None or len(run.group()) > LONGEST_PRODUCT and not _NAME.search(run.group()):
                raise ParseError("a word")
            self.position += 1
            name = run.group()[0] + self.subscript()
            return Node("var", name="i" if name == "I" else name)
        name = known.group()
        if name == "sqrt":
            return self.root()
        if name == "pi":
            return Node("var", name="π")
        return self.command(name)

    def function(self, name: str) -> Node:
        base = None
        if name == "log" and self.peek() == "_":
            self.position += 1
            base = self.argument(single_digit=True)
        exponent = None
        if self.peek() == "^":
            self.position += 1
            exponent = self.argument(single_digit=True) if self.peek() != "-" else self.signed()
        if exponent is not None and exponent.op in ("neg", "num") and name in INVERSES:
            power = exponent.args[0].value * -1 if exponent.args else exponent.value
            if power == -1:
                name, exponent = INVERSES[name], None
        operand = self.operand()
        node = Node("fn", (operand,), name=name) if base is None else Node("log", (base, operand))
        return node if exponent is None else Node("pow", (node, exponent))

    def operand(self) -> Node:
        r"""Read an operand: a group, or a product without `*`, `/` and other functions (`\sin 2x \cos x`)."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("too deep")
        if self.peek() in _OPENERS:
            node = self.postfix(self.group())
        elif self.peek() in ("+", "-"):
            node = self.signed()
        else:
            factors = [self.power()]
            while self.starts_atom(self.peek()) and not self.at_function():
                factors.append(self.power())
            node = factors[0] if len(factors) == 1 else Node("mul", tuple(factors))
        self.depth -= 1
        return node

    def at_function(self) -> bool:
        if self.peek() in _OPENERS:
            return True
        found = _COMMAND.match(self.text, self.position) or _NAME.match(self.text, self.position)
        return found is not None and found.group().lstrip("\\") in FUNCTIONS


def _mixed_number(left: Node, right: Node, spelling: str) -> list[Node]:
    r"""Read `1\frac{1}{2}` as 1 + 1/2, and any other neighbours as a product."""
    negative = left.op == "neg"
    whole = left.args[0] if negative else left
    if spelling != "\\frac" or right.name != "frac" or whole.op != "num":
        return [left, right]
    top, bottom = right.args[0], right.args[1].args[0]
    if top.op != "num" or bottom.op != "num" or whole.value.denominator != 1:
        return [left, right]
    total = Node("add", (whole, right), name="mixed")
    return [Node("neg", (total,)) if negative else total]
