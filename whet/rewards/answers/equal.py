r"""`answers_equal`: is the predicted answer the gold answer, whatever its spelling?

Policy, where public graders differ:

- *Percent*: `50%` equals `50` and `0.5`; two percentages, or two plain numbers, are compared as written.
- *Tolerance*: rationals compare exactly. A correctly rounded decimal of four or more significant digits may stand for a
  fraction or an irrational number (`3.142` is `\pi`, `3.14` and `3.143` are not), also inside an expression; from six
  digits on the last one may be truncated. To stand for a longer decimal it needs five digits, four of them after the
  point: cents are exact.
- *Text*: a gold answer that is a date, time, range, score, address, code or word is never computed
  (`whet.rewards.answers.texts`).
- *Units*: one side may omit its unit; two different ones conflict, powers and currencies included (`m/s` is not
  `m/s^2`, `$5` is 500 cents, `5 PLN` is 5 zł; `$` may be any dollar or peso). Of unknown
  ones, the words of one must be among the other's: 12 red apples are 12 apples.
- *Order*: matters between tuples, vectors and lines; not for sets, `or`, `±`, nor between two bare comma
  lists (lists of roots), unless the caller says `ordered`. Plain braces `{1,2}` are such a list. A set, or a list of
  tuples, may repeat a member.
- *Unfinished arithmetic* counts as done: `2+3`, `\gcd(12,18)`, `\sum_{k=1}^{9} k`, sums and products of matrices,
  unless the caller asks for a `plain_number`.
- *Brackets*: `(1,2)` and `[1,2]` differ (intervals); from three members on they are vectors, and are equal.
- *Equations*: `x = 5` is 5, and so is `x = 2+3 = 5`; `2+4 = 5` equals nothing. Relations in one variable are
  intervals; others are compared up to a factor. `2/3 ≈ 0.67` counts as 2/3, and as 0.67 if correctly rounded.
- *Scripts*: digits and punctuation of any script count as ASCII ones; Chinese numerals are numbers, yes and no of other
  languages are yes and no (`whet.rewards.answers.scripts`). `1.234,56` and `1.234.567` are European; `1,5` is 1.5 if
  the other side is a decimal that is not an integer, or the data's gold answers have decimal commas, and `1,00` and
  `1,05` always; `1.234` is 1234 among those alone, and `1,234` always.
- *Words*: case, articles and punctuation do not count; number words ("twelve") are numbers, `(B) the cube` and `B) 12`
  are B.
- *Hedging pays nothing*: several answers never equal one, and text around an answer is not searched; only its boxes,
  one pair of answer tags, or a leading "the answer is" are removed. Several boxes are a list of several answers: where
  the gold answer is a set, a list or a tuple, exactly as many boxes as it has members may hold one each.
"""

from __future__ import annotations

import re

from whet.rewards.answers.expression import Node
from whet.rewards.answers.extract import LONGEST_TAIL, Boxed, all_boxes, boxed_list, from_box
from whet.rewards.answers.identity import constant_rounds_to, decimal_tolerance, expressions_equal, same_curve
from whet.rewards.answers.latex import WORD_CLOSE, WORD_OPEN, clean
from whet.rewards.answers.markup import without_markup
from whet.rewards.answers.numbers import (
    Number,
    both_with_points,
    decimal_comma,
    numbers_equal,
    parse_decimal_comma,
    parse_number,
    spelled_number,
    with_points,
)
from whet.rewards.answers.scripts import ANSWER_IS, VERDICTS, fold, numeral_in_digits
from whet.rewards.answers.structure import (
    NAME,
    UNORDERED_KINDS,
    Equation,
    Leaf,
    Rounded,
    Sequence,
    Value,
    parse_value,
)
from whet.rewards.answers.texts import (
    LONGEST_TEXT,
    Column,
    formulas_equal,
    is_word,
    read_text,
    texts_equal,
    words_equal,
)
from whet.rewards.answers.units import money_in_words, money_ratio, units_conflict

MAX_CHARACTERS = 4000
"""Longer answers are compared as text only."""
MAX_UNORDERED = 40
"""Members of an unordered list that are matched in any order; longer ones must come in the same order."""
# Two boxes side by side would be a product, and 0 times anything is 0.
_BOX_AFTER_BOX = re.compile(r"\}\s*\\f?box(?:ed)?\{")
_PLAIN = re.compile(r"[-+]?[0-9.,]{1,40}(?:[eE][-+]?[0-9]{1,3})?(?:/[0-9.]{1,40})?")
_SINGLE = re.compile(r"\{([A-Za-z0-9])\}|(?<=_)\{([A-Za-z0-9]+)\}")
_IDLE_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice) |[选選][项項]? ?)?\(?([A-Ja-j])[).:]?")
_LABELLED = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice) )?(?:\(([A-J])\) +|([A-J])[).:] +)(?=[^\s,;.])"
    r"(?!(?:or|and)\b|.*(?:\b(?:or|and) \(?[A-J]\b|\([A-J]\)|\b[A-J][).:] )).+"
)
"""An option with its wording: `(D) the cube`."""
_LABEL = re.compile(
    r"\W{0,4}(?:the )?(?:final |correct )?ans(?:wer)?\*{0,2}(?: is:?|[:=])\*{0,2} ?(?=\S)", re.IGNORECASE
)
_FOREIGN_LABEL = re.compile(rf"\W{{0,4}}(?:{ANSWER_IS}) ?(?=\S)")
_SENTENCE = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z][A-Za-z\s,.'!?:-]*")
_NO_MARKS = str.maketrans("", "", WORD_OPEN + WORD_CLOSE)
_NO_CENTS = re.compile(r"(?<=[0-9]),[-\u2013\u2014]{1,2}(?= |$)")
"""`€ 10,-`, as the Dutch and Germans write ten euros."""
_ENGLISH_VERDICTS = frozenset({"yes", "no", "true", "false"})
_FUNCTION = re.compile(r"[A-Za-z] ?\( ?[a-z] ?\)")
_RESIDUE = re.compile(r"((?:(?!mod).)+?) ?mod ?((?:(?!mod).)+)")
_SET_SIGNS = frozenset({"union", "∩", "∖"})
_REALS = frozenset({"ℝ", "(-∞,∞)", "(-∞,+∞)", "allrealnumbers", "allreals", "allrealx"})


def answers_equal(
    prediction: str, gold: str, *, ordered: bool = False, plain_number: bool = False, column: Column = ""
) -> bool:
    """Judge an extracted answer by the rules in the module's docstring.

    Args:
        prediction: Extracted final answer: untrusted text of any length.
        gold: The gold answer.
        ordered: True when bare comma lists are vectors, whose order matters.
        plain_number: True when the prediction must be a written number, not an expression: in arithmetic, copying the
            question ("17*24") must not pay.
        column: What most gold answers of the data are (`whet.rewards.answers.texts.column_of`).

    Returns:
        True when both are the same answer. Never raises; bounded in time.
    """
    if _NO_CENTS.search(prediction) or _NO_CENTS.search(gold):
        prediction, gold = _NO_CENTS.sub("", prediction), _NO_CENTS.sub("", gold)
    if column == "comma":
        prediction, gold = both_with_points(prediction, gold)
    elif (
        not column
        and ("," in prediction) != ("," in gold)
        and max(len(prediction), len(gold)) <= LONGEST_TEXT
    ):
        # `11,00` is 11, and 11.0: no list has a member 00.
        prediction, gold = (with_points(text) if decimal_comma(text) else text for text in (prediction, gold))
    left, right = prediction.strip(), gold.strip()
    if not left or not right:
        return False
    boxes = _boxes_of(prediction) if len(left) <= LONGEST_TAIL else ()
    if boxes and not plain_number and _boxes_equal(boxes, right, ordered):
        return True
    if (
        column != "text" and _PLAIN.fullmatch(left) and _PLAIN.fullmatch(right)
    ):  # fast path, for most answers of most tasks
        first, second = parse_number(left), parse_number(right)
        if first is not None and second is not None:
            return numbers_equal(first, second)
    left, right = fold(left), fold(right)
    if plain_number and not is_plain_number(left):
        return False
    if left == right:
        return True
    if max(len(left), len(right)) > MAX_CHARACTERS:
        return False
    left, right = without_markup(_stated(left)), without_markup(_stated(right))
    if any(map(_BOX_AFTER_BOX.search, (left, right))):
        return False
    left, right = (clean(money_in_words(side)) for side in (left, right))
    if not left or not right:
        return False
    read = read_text(right)
    if column == "text" or (column == "words" and is_word(right) and right.lower() not in VERDICTS):
        return texts_equal(left, right, read)
    if formulas_equal(left, right) or (read is not None and texts_equal(left, right, read)):
        return True
    if read is not None and read.kind == "date" and "=" not in left:  # its comma makes no list
        return False
    left, right = _as_digits(left), _as_digits(right)
    if _squeeze(left) == _squeeze(right):
        return True
    if _SENTENCE.fullmatch(left) and _SENTENCE.fullmatch(right) and words_equal(left, right):
        return True
    return _values_equal(parse_value(left), parse_value(right), ordered)


def _boxes_of(prediction: str) -> tuple[str, ...]:
    """Return the contents of a prediction's boxes if it has several."""
    if isinstance(prediction, Boxed):
        return prediction.boxes
    return all_boxes(prediction) if prediction.count("oxed") > 1 else ()


def _boxes_equal(boxes: tuple[str, ...], gold: str, ordered: bool) -> bool:
    """Say whether boxes are the members of a gold answer of several, one each and none more."""
    if not 2 <= len(boxes) <= MAX_UNORDERED or max(map(len, (gold, *boxes))) > MAX_CHARACTERS:
        return False
    right = parse_value(clean(_stated(fold(gold))))
    if not isinstance(right, Sequence) or right.kind not in ("bare", "set", "any", "tuple"):
        return False
    if len(right.items) != len(boxes) or right.brackets not in ("", "()"):
        return False
    items = tuple(parse_value(_as_digits(clean(fold(box)))) for box in boxes)
    return _sequences_equal(Sequence("bare", items), right, ordered)


def is_plain_number(text: str) -> bool:
    """Say whether an answer is one written number (literal, fraction, mixed), with or without a unit."""
    if len(text) > MAX_CHARACTERS:
        return False
    leaf = parse_value(clean(money_in_words(text)))
    if not isinstance(leaf, Leaf):
        return False
    return parse_number(leaf.parts[0]) is not None or (leaf.tree is not None and _is_fraction(leaf.tree))


def _is_fraction(node: Node) -> bool:
    if node.op == "neg":
        return _is_fraction(node.args[0])
    if node.name == "mixed":
        return _is_fraction(node.args[1])
    return node.name == "frac" and all(part.op == "num" for part in (node.args[0], node.args[1].args[0]))


def _stated(text: str) -> str:
    """Strip tags, boxes (several are a list), or a leading "the answer is" from an answer."""
    if "oxed" in text:
        return (boxed_list(text) if text.count("oxed") > 1 else from_box(text)) or text
    if text.startswith("<answer>") and text.endswith("</answer>") and text.count("<answer>") == 1:
        return text[8:-9]
    label = _LABEL.match(text) or _FOREIGN_LABEL.match(text)
    return text[label.end() :] if label else text


def _as_digits(text: str) -> str:
    """Write a number word ("twelve", 十二) in digits; leave anything else."""
    words = text.strip(WORD_OPEN + WORD_CLOSE + " ")
    if not words.isascii():
        return numeral_in_digits(words) or text
    return (spelled_number(words) or text) if words[:1].isalpha() else text


def _squeeze(text: str) -> str:
    """Drop what is invisible to a reader: spaces, word marks and the braces of one symbol."""
    text = _IDLE_SPACE.sub("", text.translate(_NO_MARKS))
    text = _SINGLE.sub(r"\1\2", text) if "{" in text else text
    return "ℝ" if text in _REALS or text.lower() in _REALS else text


def _values_equal(left: Value, right: Value, ordered: bool) -> bool:
    if isinstance(left, Rounded):
        return _values_equal(left.exact, right, ordered) or _values_equal(left.decimal, right, ordered)
    if isinstance(right, Rounded):
        return _values_equal(left, right.exact, ordered) or _values_equal(left, right.decimal, ordered)
    if isinstance(left, Equation) or isinstance(right, Equation):
        return _equations_equal(left, right, ordered)
    if isinstance(left, Leaf) and isinstance(right, Leaf):
        return _leaves_equal(left, right)
    if isinstance(left, Leaf):
        return _leaf_equals_sequence(left, right, ordered)
    if isinstance(right, Leaf):
        return _leaf_equals_sequence(right, left, ordered)
    return _sequences_equal(left, right, ordered)


def _leaf_equals_sequence(leaf: Leaf, sequence: Value, ordered: bool) -> bool:
    """Compare a leaf with a list: as a list itself, or as the only member of a set."""
    assert isinstance(sequence, Sequence)
    if len(sequence.items) == 1:
        return _values_equal(leaf, sequence.items[0], ordered)
    if len(sequence.items) == 2 and _decimal_comma(leaf, sequence):
        return True
    own = leaf.as_sequence()
    return own is not None and _sequences_equal(own, sequence, ordered)


def _decimal_comma(leaf: Leaf, sequence: Sequence) -> bool:
    """Read a bare `1,22` as 1.22 if the other side is a decimal that is not an integer."""
    first, second = sequence.items
    if sequence.kind != "bare" or not isinstance(first, Leaf) or not isinstance(second, Leaf):
        return False
    number = parse_decimal_comma(f"{first.text},{second.parts[0]}")
    gold = leaf.number
    return (
        number is not None
        and gold is not None
        and gold.num_digits > 0
        and gold.value.denominator > 1
        and number.value == gold.value
        and not units_conflict(leaf.parts[1], second.parts[1])
    )


def _sequences_equal(left: Sequence, right: Sequence, ordered: bool) -> bool:
    kinds = {left.kind, right.kind}
    if kinds <= {"set", "bare"} and max(len(left.items), len(right.items)) <= MAX_UNORDERED:
        left, right = _without_repeats(left, ordered), _without_repeats(right, ordered)
    if len(left.items) != len(right.items):
        return False
    free = UNORDERED_KINDS | (set() if ordered else {"bare"})
    if kinds <= free and len(left.items) <= MAX_UNORDERED:
        if kinds & _SET_SIGNS and len(kinds) > 1 and kinds != {"union", "any"}:
            return False
        return _match_any_order(left.items, right.items, ordered)
    if kinds & UNORDERED_KINDS and not kinds <= free:
        return False
    if left.brackets and right.brackets and left.brackets != right.brackets and len(left.items) == 2:
        return False
    return all(_values_equal(a, b, ordered) for a, b in zip(left.items, right.items, strict=True))


def _without_repeats(sequence: Sequence, ordered: bool) -> Sequence:
    """Remove repeated members of a set, or of a list of tuples; `5, 5` and `\\{5, 5\\}` stay two answers."""
    if sequence.kind != "set" and not all(isinstance(item, Sequence) for item in sequence.items):
        return sequence
    distinct: list[Value] = []
    for item in sequence.items:
        if not any(_values_equal(item, other, ordered) for other in distinct):
            distinct.append(item)
    return Sequence(sequence.kind, tuple(distinct)) if len(distinct) > 1 else sequence


def _match_any_order(left: tuple[Value, ...], right: tuple[Value, ...], ordered: bool) -> bool:
    """Pair every member with one of the other side; greedy is enough, because equality is transitive here."""
    remaining = list(right)
    for item in left:
        found = next(
            (index for index, other in enumerate(remaining) if _values_equal(item, other, ordered)), None
        )
        if found is None:
            return False
        del remaining[found]
    return True


def _equations_equal(left: Value, right: Value, ordered: bool) -> bool:
    r"""Compare `x = 5` with `5`, and `y = 2x + 1` with `2x - y + 1 = 0`."""
    if isinstance(left, Equation) and isinstance(right, Equation):
        return _both_equations_equal(_ends(left), _ends(right), ordered)
    equation, other = (left, right) if isinstance(left, Equation) else (right, left)
    assert isinstance(equation, Equation)
    if equation.sign != "=":
        return False
    members = _ends(equation).members
    if NAME.fullmatch(members[-1]) and not NAME.fullmatch(members[0]):
        members = members[::-1]
    values = [parse_value(member, 1) for member in members]
    if any(isinstance(value, Equation) for value in values) or not _values_equal(values[-1], other, ordered):
        return False
    return all(
        _is_name(member, value) or _values_equal(value, other, ordered)
        for member, value in zip(members[:-1], values[:-1], strict=True)
    )


def _ends(equation: Equation) -> Equation:
    """Keep `x` and `7` of `x = 3 + 4 = 7`."""
    first, last = equation.members[0], equation.members[-1]
    if len(equation.members) < 3 or not _is_name(first, parse_value(first, 1)) or NAME.fullmatch(last):
        return equation
    return Equation((first, last))


def _is_name(member: str, value: Value) -> bool:
    r"""Say whether the left side of `... = 5` names or describes what is 5 (`\angle ABC`, a determinant)."""
    if isinstance(value, Leaf) and value.number is not None:
        return False
    return NAME.fullmatch(member) is not None or (isinstance(value, Leaf) and value.tree is None)


def _both_equations_equal(left: Equation, right: Equation, ordered: bool) -> bool:
    if len(left.members) != 2 or len(right.members) != 2 or left.sign != right.sign:
        return False
    (a, b), (c, d) = ([parse_value(member, 1) for member in side.members] for side in (left, right))
    if _values_equal(b, d, ordered):
        names = left.members[0].strip(), right.members[0].strip()
        if _values_equal(a, c, ordered) or ("y" in names and any(map(_FUNCTION.fullmatch, names))):
            return True
    if left.sign in "=≠" and _values_equal(a, d, ordered) and _values_equal(b, c, ordered):
        return True
    return same_curve(left.members, right.members, left.sign in "=≠")


def _leaves_equal(left: Leaf, right: Leaf) -> bool:
    if not left.text or not right.text:
        return False
    if _squeeze(left.text) == _squeeze(right.text):
        return True
    texts = [" ".join(side.text.translate(_NO_MARKS).split()) for side in (left, right)]
    verdicts = [VERDICTS.get(text.lower()) for text in texts]
    if all(verdicts) or _ENGLISH_VERDICTS.intersection(text.lower() for text in texts):
        return verdicts[0] == verdicts[1]
    if _choices_equal(*texts):
        return True
    read = read_text(right.text)
    if read is not None:
        return texts_equal(left.text, right.text, read)
    other = read_text(left.text)
    if other is not None and other.kind not in ("pair", "words"):
        return False  # a date is not 2018, whatever its figures amount to
    residues = _RESIDUE.fullmatch(texts[0]), _RESIDUE.fullmatch(texts[1])
    if residues[0] and residues[1]:
        return all(_leaves_equal(Leaf(residues[0][i]), Leaf(residues[1][i])) for i in (1, 2))
    first, second = left.number, right.number
    (_, first_unit, first_percent), (_, second_unit, second_percent) = left.parts, right.parts
    if first is not None and second is not None:
        if units_conflict(first_unit, second_unit):
            return _same_money(first, first_unit, second, second_unit)
        if first_percent == second_percent:
            return numbers_equal(first, second)
        if first_unit or second_unit:
            return False
        percent, plain = (first, second) if first_percent else (second, first)
        return numbers_equal(percent, plain) or percent.value == plain.value * 100
    trees = left.tree, right.tree
    if first_percent != second_percent or units_conflict(first_unit, second_unit) or None in trees:
        return words_equal(left.text, right.text)
    assert left.tree is not None
    assert right.tree is not None
    if expressions_equal(left.tree, right.tree, decimal_tolerance(left.parts[0], right.parts[0])):
        return True
    sides = ((first, right.tree), (second, left.tree))
    return any(number is not None and constant_rounds_to(tree, number) for number, tree in sides)


def _same_money(first: Number, first_unit: str, second: Number, second_unit: str) -> bool:
    """Compare dollars or euros with cents."""
    if ratio := money_ratio(first_unit, second_unit):
        return first.value * ratio == second.value
    return first.value == second.value * money_ratio(second_unit, first_unit) != 0


def _choices_equal(left: str, right: str) -> bool:
    """Compare the letters of `(B)`, `B.`, `b`, where one side may include the option's text."""
    first, second = _CHOICE.fullmatch(left), _CHOICE.fullmatch(right)
    if first is not None and second is not None:
        return first[1].lower() == second[1].lower()
    letter, worded = (first, _LABELLED.fullmatch(right)) if first else (second, _LABELLED.fullmatch(left))
    if letter is None and worded is not None and (other := _LABELLED.fullmatch(right)) is not None:
        texts = [
            text[label.end(label.lastindex or 1) :].lstrip(").: ")
            for text, label in ((left, worded), (right, other))
        ]
        return worded[worded.lastindex or 1] == other[other.lastindex or 1] and _squeeze(
            texts[0]
        ) == _squeeze(texts[1])
    return letter is not None and worded is not None and letter[1].upper() in worded.groups()[:2]
