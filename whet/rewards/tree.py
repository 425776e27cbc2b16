"""The tree of an expression, as the parser builds it and the calculator walks it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of an expression.

    Attributes:
        op: 'num', 'var', 'add', 'mul', 'neg', 'inv', 'pow', 'root', 'log', 'fn', 'fact', 'binom', 'deg', 'mod' or
            'series' (index, term, first, last; named 'sum' or 'prod').
        args: Operands.
        value: Value of a 'num'.
        name: Name of a 'var' (constants 'π', 'e', 'i' included) or function of an 'fn'; 'frac' and 'mixed'
            tell how a 'mul' and an 'add' were written.
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
