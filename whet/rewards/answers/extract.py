"""Find the final answer in a completion: tags, box, phrase, `####`, formula, choice, last number.

The chain is tags, then the last box, then "the answer is", then `####`, then the last number; before that last resort a
number is taken with the formula around it, and a lone option letter or verdict counts. Text in other scripts is folded
first (`whet.rewards.answers.scripts`), so that every step sees ASCII digits and punctuation, and markup is removed.

Which part of a completion holds its answer: what follows its thinking, up to the point where the model asks itself a
new question. Open thinking has no answer. A denied answer ("it is not 72") is none, and of several that are offered
("A or B") none is chosen: they are returned together, and equal nothing.

Completions are untrusted and may be 128 KB of one repeated tag, so every step is one linear pass (`find`,
`rfind`, or a scan whose alternatives cannot overlap); there is no `.*?` anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice, pairwise

from whet.rewards.answers.latex import clean
from whet.rewards.answers.markup import without_markup
from whet.rewards.answers.scripts import (
    ABOUT,
    DENIED_AFTER,
    DENIED_BEFORE,
    FINAL_VERBS,
    FOREIGN,
    FOREIGN_LETTER,
    HEDGED,
    JOINED,
    REJECTED,
    SCALED,
    SCALES,
    UNITS,
    VERDICTS,
    WORD,
    end_of_phrase,
    fold,
    start_of_reason,
)
from whet.rewards.answers.texts import LONGEST_TEXT, Text, read_text

ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"
LONGEST_NUMBER = 2048
"""Longest number (in characters) that the last step reads; a longer run of digits is not an answer."""
LONGEST_TAIL = 64 * 1024
"""Boxes that open further than this from the end of the text are ignored."""

_BOX_TOKEN = re.compile(
    r"\\(?:boxed|fbox)(?:\{(?P<plain>[^{}\\]*)\}|(?![A-Za-z]))|\\.|\{+|\}+",
    re.DOTALL,
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_FENCES = re.compile(r"(?:\s|\$|\\[\])]|\.(?![0-9]))+$")
"""What ends a line behind an open box: delimiters of mathematics, a full stop."""
LONGEST_FORMULA = 2000
"""Longest formula (in characters); a longer text between math delimiters is not one."""

LONGEST_GAP = 60
"""Longest gap (in characters) between two boxes of one list."""
MOST_BOXES = 256
"""How many boxes of a text, from its end, are looked at: more are a model that repeats itself."""
LONGEST_SCALED = 60
"""Longest number with Chinese scale words (in characters)."""
LONGEST_REMARK = 100
"""Longest line (in characters) that counts as an answer without saying so."""

_PHRASE = re.compile(
    r"(?:answer\*{0,3}(?: is(?!n't|n\u2019t)| ?[:=])|(?<![A-Za-z])ans\.?\*{0,3} ?:)[:*]{0,3}", re.IGNORECASE
)
_DOUBTED = re.compile(
    r"(?:(?:not|n't) (?:think|believe|say|suppose|mean|true|likely|possible)|doubt|unlikely|impossible|false)"
    r"(?! but)[^.!?;,\n]{0,20}$",
    re.IGNORECASE,
)
"""Words before "the answer is" that deny it."""
_CORRECTED = re.compile(
    r", (?:no,? wait|wait,? no|wait|sorry|actually|I mean|correction)[,:]? (?:no, )?(?:it is |it's |I mean |"
    r"that's )?(?=\S)"
)
_SURE = re.compile(r"(?:for sure|definitely|clearly|certainly) \(?([A-J])\)?(?=[,.]|$)")
_ASIDE = re.compile(
    r"[,;]? \(?(?:because|since|given that|due to) |[,;] (?:which|so|as|it|obviously|of course|therefore|thus|hence|"
    r"where|"
    r"meaning|making|for|and (?:that|this|so|we|it|he|she|they|you|I|the))(?: |$)| [-–—]{1,2} (?:because|since|as|"
    r"which|so) "
)
_ONLY_BOXES = re.compile(r"[\s$]*(?:\\[(\[]\s*)?\\boxed ?\{[^{}]*\}[\s$]*(?:and|,)[\s$]*\\boxed")
"""A text that starts with boxes. Two may be a change of mind, three are a list."""
_CORRECTION = re.compile(
    r"\b(?:wait|actually|rather|instead|mistaken?|incorrect|wrong|correction|sorry|no[,:;])|不[对對]|[错錯][误誤了]|更正|等等",
    re.IGNORECASE,
)
"""Words between two boxes that take the first one back."""
_VERB = re.compile(r" (?:is|are|equals) ")
MAX_DENIED = 3
"""Phrases that deny an answer, after which no earlier one is looked for."""
MAX_UNIT_WORDS = 4
"""Most words behind a number that are taken for its unit."""
_DENIED_START = re.compile(
    r"(?:(?:certainly|definitely|clearly|surely|therefore|thus|hence|so|simply|just|probably) )?(?:not|neither|"
    r"never)\b(?! only)",
    re.IGNORECASE,
)
_INSTEAD = re.compile(
    r"(?:,? but(?: rather| instead)?|[,;] (?:rather|instead|it is|it's|it must be)|; )(?: (?:it is|it's))? "
)
_REJECTED = re.compile(r"(?<=[0-9)\]}$%A-J]),? (?:and )?(?:not|rather than|instead of|as opposed to) ")
"""What follows is another answer, which is rejected: "72, not 73"."""
_LEAD = re.compile(
    r"(?:(?:therefore|thus|hence|then|so|simply|just|clearly|indeed|exactly|precisely|obviously|of course|definitely|"
    r"certainly|actually|in fact|approximately|about|around|roughly|equal to|given by|found to be|a total of|now|still|"
    r"only|going to be|always)[,:]? )+(?=[-+$\\(\[]|[0-9])",
    re.IGNORECASE,
)
"""Words before a number that do not change it."""
_HEDGE = re.compile(
    r"(?<![A-Za-zÀ-ɏ])(?:or|nor|not|than|either|neither|between|least|most|never|no|cannot|unless|if|fewer|less|almost|"
    r"nearly|"
    r"maybe|perhaps|versus|vs)(?![A-Za-zÀ-ɏ])|n't\b",
    re.IGNORECASE,
)
"""Words beside which a number is not the answer alone."""
_REMARK = re.compile(
    r"\((?:(?!\b(?:or|not|mod)\b)[A-Za-z ,-]){3,60}\)|"
    r"\((?:= ?)?[0-9.]{1,12} ?[-+*/×] ?[0-9.]{1,12}[0-9 .*/+×=-]{0,20}\)"
)
_NOT_A_REMARK = re.compile(
    r"[0-9\\$=+*/^<>|{}\[\]()_&~]|(?<![A-Za-z])(?:mod|to|plus|minus|times|squared?|cubed|pi)(?![A-Za-z])"
)
_END_OF_UNIT = re.compile(
    r"[,;:.!?–—-]| (?:in|on|at|for|from|by|with|when|while|after|before|during|until|once|so|then|therefore|thus|"
    r"hence|that|"
    r"which|who|where|as|because|since|total|left|altogether|overall|each|apiece|long|tall|wide|high|deep|old|away|"
    r"now|today|"
    r"of|and|but|is|are|was|were|will|has|have|had|can|could|would|should|must|he|she|it|they|we|i|you|the|this|all|"
    r"here|there|"
    r"only|again|too|indeed|exactly|remaining|more|per(?= (?:person|child|student|customer)))(?![A-Za-zÀ-ɏ])",
    re.IGNORECASE,
)
"""The first word behind a number that belongs to no unit."""
_WORDS_INSIDE = re.compile(
    r"\\[a-zA-Z]{0,12}(?:text|rm|box|name)[a-z]{0,12} ?\{[^{}]*\}|\\(?:begin|end) ?\{[A-Za-z*]*\}(?:\{[lcr|]*\})?"
)
_JOINT = re.compile(
    r"(?:[\s,;$]|\\[()\[\],; ]|\\q?quad|\\text ?\{ ?(?:[a-z() ]{0,30} )?(?:and|or) ?\}|and(?= ?[$\\])(?<=, and))*"
)
_NOT_PROSE = r"(?:arc)?(?:sin|cos|tan)|sec|csc|cot|log|ln|exp|sqrt|pi|or|and|[A-Z]{2,4}"
_PROSE = re.compile(rf"(?<![\\A-Za-z0-9])(?!(?:{_NOT_PROSE})(?![A-Za-z]))[A-Za-z]{{2,}}")
_PROSE_IN_MATH = re.compile(
    rf"(?<![\\A-Za-z])(?!(?:{_NOT_PROSE})(?![A-Za-z]))[A-Za-z]?[a-z]{{3,}}|[A-Za-z,.;] [a-z]{{2,3}} [A-Za-z0-9]"
    r"|^ ?(?:is|to|for|the|and|has|in|of|each|per) | (?:is|to|for|the|and|has|in|of|each|per) ?$"
)
_EVIDENCE = re.compile(r"[0-9A-Za-z]|\\(?:infty|pi|emptyset|varnothing)|[∞π∅]")
_NAMED = re.compile(r"[A-Za-z](?:_\{?[A-Za-z0-9]\}?|\([a-z]\))?|[^A-Za-z]*")
_LIST = re.compile(
    rf",(?![0-9]{{3}})|;|(?<![A-Za-zÀ-ɏ])(?:or|and)(?![A-Za-zÀ-ɏ])|{JOINED.pattern.replace('?P<any>', '?:')}"
)
_RESULT = re.compile(r"[-+\u2212\\$(]?[^A-Za-z,=<>]*[0-9][^A-Za-z,=<>]*")
_LETTER = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice|[Ll]etter|[Aa]nswer|[Ii]t's|[Ii]t is|[Ii]t must be|[Cc]hoose|[Pp]ick|[Ss]elect|"
    r"go(?:ing)? with)"
    r"(?: is)?:? |[选選](?:[择擇項项])?(?:是|为|為)?:? ?)[(*]{0,3}([A-J])(?![A-Za-z'])"
    r"|(?<![A-Za-z0-9_(])([A-HJ])\)?(?= (?:is|must be|has to be) (?:(?:the|therefore|thus|clearly|definitely) )?"
    r"(?:correct|right|true|best|answer|only))"
    r"|(?<![A-Za-z0-9_])\((?P<bare>[A-J])\)"
)
_BARE_LETTER = re.compile(
    r"(?<![A-Za-z0-9_'(.])([B-HJ]|A(?=[.,;:!?)]|$| (?:and|or|is|are)\b))(?![A-Za-z0-9_'(])"
)
"""An option letter in a short text without digits or formulas."""
_FORMULAIC = re.compile(r"[0-9\\$=+*/^<>|{}\[\]_]")
"""An option letter; in brackets alone (group `bare`) it counts only where no number follows."""
MAX_QUESTIONS = 3
"""Questions in a completion at which it may be cut."""
_ASKS = (
    r"(?:question|problem|exercise|q|frage|pregunta|pergunta|domanda|вопрос|问题|問題|质问|질문|问|題目|题目)"
)
_NEXT_QUESTION = re.compile(
    rf"\n(?!\n)[ \t#>*_]*(?:(?:(?:next|new|another|follow-up) )?{_ASKS}(?: ?[#(]?(?P<number>[2-9]|[1-9][0-9]{{1,2}})\)?"
    rf"| ?[#(]?1\)?)?[*_]{{0,3}} ?[:：.](?=[*_\s]|$|[^\s0-9])"
    r"|(?:#{1,4} )?(?:question|problem|exercise)(?: [0-9]{1,3}[*_]{0,3}[ \t]*(?=\n|$))"
    r"|#{1,4} (?:question|problem|exercise)[ \t]*(?=\n|$)|\[(?:question|problem|user|human)\]"
    r"|(?:here is|here's|now,?|let's (?:try|do|solve)) (?:a|an|the|is)?(?: |(?<= ))(?:new|another|next|different) "
    r"(?:question|problem)"
    r"|(?P<role>(?:user|human|student|### ?(?:instruction|input|user|human|question))[*_]{0,3}:))"
    r"|(?P<token><[|｜](?:user|im_start[|｜]>user|start_header_id[|｜]>user|User)|<start_of_turn>user|\[INST\]"
    r"|<[|｜](?:endoftext|im_end|eot_id|end_of_text|end▁of▁sentence)[|｜]>|<eos>|<end_of_turn>)",
    re.IGNORECASE,
)
"""A line with which the model asks itself a new question, or speaks as the user."""
THOUGHTS = ("think", "thinking", "thought", "reasoning")
"""Tags that thinking is written between."""
_STATED_MARKS = ("\\boxed", "####", "<answer>")
_LABELLED = re.compile(
    r"\(?([A-J])[).:] +(?!(?:is|are|was|were|has|must|would|can|cannot|does|fails|works|holds|seems|"
    r"looks)\b)[A-Za-z0-9$\\(-].*"
)
_DENIAL_BEFORE = re.compile(
    r"(?:(?<![A-Za-zÀ-ɏ])(?:(?:all|anything|everything|any) but|not(?! only)|cannot|never|neither|nor|without|except|"
    r"instead of|rather than|other than)|n't"
    r"|(?:rul|eliminat|exclud|reject|discard)[a-z]{1,4}(?: out)?)"
    r"(?:,? (?:be|been|equal|equals|to|the|an?|answer|option|choice|letter|correct|right|is|it|think|believe|say|"
    r"that|either|"
    r"both|have|choose|pick|select|take|go|with|and|or|nor|really|exactly|at all|\(?[A-J]\)?)){0,7},? ?[(*$]{0,3}$",
    re.IGNORECASE,
)
"""A denial that governs what follows: "does not fit is (C)" denies no letter."""
_DENIAL_AFTER = re.compile(
    r"[)*$\]\\]{0,3}(?:,? (?:and|or|nor) \(?[A-J](?![A-Za-zÀ-ɏ])\)?){0,3},? "
    r"(?:(?:is|are|was|were|seems|looks|must be|would be|can be|has to be) (?:clearly |obviously |also |definitely |"
    r"both |all )?"
    r"(?:not|wrong|incorrect|false|ruled out|eliminated|excluded|impossible|invalid|out(?![A-Za-z])|too )"
    r"|(?:cannot|can't|isn't|aren't|wasn't|doesn't|does not|fails|won't|did not|didn't|couldn't|"
    r"could not)(?![A-Za-zÀ-ɏ]))",
    re.IGNORECASE,
)
_DENIED_NUMBER = re.compile(
    r"[*$\\)\]]{0,4} (?:is|are|was) (?:clearly |obviously |also )?(?:not (?:the |a |an )?(?:right |correct )?"
    r"(?:answer|correct|right|it(?![a-z])|possible|allowed)"
    r"|wrong|incorrect|false|impossible|too (?:big|small|large|high|low|many|few|much))",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(
    r"[;:!?\n]|\. |, (?!(?:and|or|nor|equal|exactly)\b)|(?<![Aa]ll)(?<!thing) but | so | hence | therefore "
)
_REASON = re.compile(r"(?<![A-Za-zÀ-ɏ])(?:because|since|as|for|given that)(?![A-Za-zÀ-ɏ])", re.IGNORECASE)
_OFFERED = (
    r"(?:,? (?:or|and)(?: else)?(?: maybe| perhaps| possibly)?|, (?:maybe|perhaps|possibly)) "
    r"(?:option |choice )?[(*]{0,3}"
)
_OFFERED_AFTER = re.compile(rf"[)*]{{0,3}}(?:{_OFFERED}|/\(?)([A-HJ])(?![A-Za-z'])")
_OFFERED_BEFORE = re.compile(rf"(?<![A-Za-z])([A-HJ])\)?\*{{0,2}}(?:{_OFFERED}|/)$")
_VERDICT = re.compile(rf"\(?[A-Ja-j]\)?|{'|'.join(map(re.escape, VERDICTS))}", re.IGNORECASE)
_STARTING_VERDICT = re.compile(r"(?:^|\n|[.!?] )\W{0,3}(yes|no|true|false)(?=[\s.,;:!*]|$)", re.IGNORECASE)
_OTHER_VERDICT = re.compile(
    r"(?:,? (?:or|and)|[,;])? (yes|no|true|false)[ *_.!?)]*(?:\n|$)",
    re.IGNORECASE,
)
"""What makes a verdict one of two that are offered: the other, and nothing behind it."""
_LEADING_VERDICT = re.compile(r"(?:yes|no|true|false)(?=[,;:—–-]| because| since)", re.IGNORECASE)
_SENTENCE_END = re.compile(rf"\n|[.!?](?=[\s\"*{FOREIGN}]|$)|[。！？؟]")
_COUNTED = re.compile(rf"(?:{ABOUT})? ?([-+\u2212$]?[0-9][0-9.,/]*) ?(%|{WORD})?")
"""A number with a counter or a currency behind it: `42个`, `约 42 元`."""
_SAYS = re.compile(rf"[是为為有得剩需](?:{ABOUT})? ?$")
_MEASURES = frozenset({*UNITS.split(), *SCALES})
_NUMBER = re.compile(
    r"(?<![A-Za-z_0-9.^])"
    r"(?:(?<!\))[-+\u2212])?[$]?"
    r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[1-9][0-9]{0,2}(?:\.[0-9]{3})+,[0-9]{1,2}(?![0-9]|[,.][0-9])"
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}(?![0-9]|[,.][0-9])"
    r"|(?<![0-9,(\[])[0-9]+,[0-9]{1,2}(?![0-9)\]]|,[0-9])|[0-9]+)?(?:(?<![0-9,])\.[0-9]+|(?<=[0-9])(?:\.[0-9]+)?)"
    r"(?:/[0-9]+(?:\.[0-9]+)?)?(?:[ ]?\\?%)?"
)
_LEADING_NUMBER = re.compile(
    rf"(?:{_NUMBER.pattern})(?![0-9A-Za-z^_]|[.,:/][0-9]| ?[-+*/^=<>\\\[{{]| ?\((?![A-Za-z]|"
    rf"(?:= ?)?[0-9.]{{1,12}} ?[-+*/×])|\(| [0-9])"
)
_OFFERED_NUMBER = re.compile(
    r"(?<![-+*/=<>$0-9.,])(?<![-+*/=<>] )([0-9][0-9.,]{0,20})(?: [a-z]{1,12})?,? or (?:else |maybe |perhaps |"
    r"possibly |even )?$"
)
_HALF_OF_DAY = re.compile(r" ?[ap]\.? ?m(?!\w)", re.IGNORECASE)
_LAST_ASIDE = re.compile(r"(?<=[A-Za-z.%]) \((?=[^()]*[a-z]{3})[^()=]{3,80}\)[\s.!]*$")
"""A remark in brackets that ends a text: "72 apples (36 red and 36 green)."."""
_EQUATED = re.compile(r" ?[-+*/=<>^]")
_LABEL_BEFORE = re.compile(
    r"(?:week|day|step|part|chapter|year|case|room|row|question|problem|verse) $", re.IGNORECASE
)
_AROUND = ".,;:!?'\"*$`"
_WHOLE = frozenset({"date", "time", "address", "version", "phone", "code"})
"""Kinds of text that are read whole, where a number in them is the last one."""
_GROUPED = re.compile(
    r"(?<![\w.,:/^'])(?<![0-9] )[1-9][0-9]{0,2}(?:(?P<spaces>(?: [0-9]{3})+)|(?:['\u2019][0-9]{3})+)"
    r"(?P<decimals>,[0-9]{1,2})?(?![\w%']|[,:/^][0-9]| [0-9])"
)
"""A number whose thousands are grouped by spaces or, as in Switzerland, by apostrophes."""
_ENGLISH = re.compile(
    r"\b(?:the|and|there|they|he|she|it|we|you|his|her|has|have|with|from|that|this|each|answer)\b", re.I
)
_NUMBER_CHARACTERS = frozenset("0123456789.,/+-\u2212$%\\ ")
_DIGITS = "0123456789"
_DIGIT = re.compile("[0-9]")


def from_tags(text: str) -> str | None:
    """Return the text of the last closed `<answer>` block; an unclosed one does not count."""
    end = text.rfind(ANSWER_CLOSE)
    start = text.rfind(ANSWER_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(ANSWER_OPEN) : end].strip() or None if start >= 0 else None


def from_box(text: str, *, closed: bool = False) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, braces nested; also `\boxed 5`.

    Of nested boxes the outer one is returned. Escaped braces (`\{`) do not nest. A last box that is not closed ends
    with its line. A Minerva close ("The final answer is $7$. I hope it is correct.") after the last box replaces it.

    Args:
        text: Any text.
        closed: Whether a box must be closed.
    """
    text = _with_backslash(text[-LONGEST_TAIL:])
    if max(text.rfind("\\boxed"), text.rfind("\\fbox")) < 0:
        return None
    contents, bare_at, braced_at, open_at = _boxes(text)
    contents = contents[-MOST_BOXES:]
    outer = _outer(contents)
    hope = text.rfind("I hope it is correct")
    if hope > 0 and "final answer is" in text[max(bare_at, braced_at) : hope].lower():
        return (from_phrase(text[:hope]) or "").strip('\\" ') or None
    if open_at > max(bare_at, braced_at) and not closed:
        line = text[open_at:].partition("\n")[0]
        if content := _FENCES.sub("", line).strip():
            return content
    content = _bare_box(text, bare_at) if bare_at > braced_at else None
    if content or len(outer) < 2:
        return content or _joined(text, contents)
    answer = _joined(text, contents)
    return Boxed(answer, _together(text, outer)) if answer else None


class Boxed(str):
    """The answer of a text with several boxes: the last one, which knows all, for a gold answer of several values.

    Attributes:
        boxes: The contents of all boxes in their order; none if the text takes one back.
    """

    boxes: tuple[str, ...]

    def __new__(cls, answer: str, boxes: Sequence[str]) -> Boxed:
        """Make the answer.

        Args:
            answer: What it is where the gold answer is a single value.
            boxes: The contents of the boxes.
        """
        self = super().__new__(cls, answer)
        self.boxes = tuple(boxes)
        return self


def all_boxes(text: str) -> tuple[str, ...]:
    """Return the contents of all outer boxes that are closed, in their order; none if the text takes one back."""
    text = _with_backslash(text)
    return _together(text, _outer(_boxes(text)[0]))


def _together(text: str, outer: list[tuple[int, int, int]]) -> tuple[str, ...]:
    """Return the contents of boxes that can be the parts of one answer: no box corrects the one before."""
    for left, right in pairwise(outer):
        gap = text[left[2] + 1 : right[0]]
        if _CORRECTION.search(gap) or (len(gap) <= LONGEST_GAP and "then" in gap):
            return ()
    return tuple(text[start:end].strip() for _, start, end in outer)


def boxed_list(text: str) -> str | None:
    r"""Return the contents of several boxes as one list: `\boxed{1} and \boxed{2}` is `1, 2`.

    Args:
        text: A short text.

    Returns:
        The list; None when no boxes are closed, or more than `LONGEST_GAP` characters lie between two, or a "then" or
        a correction does.
    """
    text = _with_backslash(text)
    outer = _outer(_boxes(text)[0])
    if len(outer) < 2 or any(right[0] - left[2] - 1 > LONGEST_GAP for left, right in pairwise(outer)):
        return None
    return ", ".join(_together(text, outer)) or None


def _with_backslash(text: str) -> str:
    r"""Repair `\boxed` written in a Python string that is not raw, and the typo `\beginboxed`."""
    return text.replace("\x08oxed", "\\boxed").replace("\\beginboxed", "\\boxed") if "oxed" in text else text


def _boxes(text: str) -> tuple[list[tuple[int, int, int]], int, int, int]:
    """Find the closed boxes (positions of command, content and closing brace), and the last of other kinds.

    Returns:
        The closed boxes; where the last box without a brace ends, where the last closed one ends, and where the content
        of the last one that is never closed starts; -1 without one.
    """
    first = _BOX.search(text)
    contents: list[tuple[int, int, int]] = []
    opened: list[int] = []  # where each open brace's content starts, negative for braces without a box
    bare_at = braced_at = -1  # where the last box without a brace, and the last closed one, end
    box_ended_at = -1  # end of a box command whose brace has not come yet
    for token in _BOX_TOKEN.finditer(text, first.start() if first else len(text)):
        mark = token.group()
        if token.lastgroup:  # a plain box is one token: loops repeat it by the thousand
            contents.append((token.start(), *token.span("plain")))
            braced_at = token.end() - 1
            box_ended_at = -1
        elif mark[0] == "{":
            is_box = box_ended_at >= 0 and not text[box_ended_at : token.start()].strip()
            opened.append(token.start() + 1 if is_box else -1)
            opened.extend([-1] * (len(mark) - 1))
            box_ended_at = -1
        elif mark[0] == "}":
            for end in range(token.start(), token.start() + min(len(mark), len(opened))):
                start = opened.pop()
                if start >= 0:
                    contents.append((text.rfind("\\", 0, start), start, end))
                    braced_at = end
            box_ended_at = -1
        elif mark in ("\\boxed", "\\fbox"):
            box_ended_at = token.end()
            bare_at = token.end() if text[token.end() : token.end() + 1] != "{" else bare_at
    return contents, bare_at, braced_at, max(opened, default=-1)


def _outer(contents: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Leave out boxes inside of boxes; `contents` is in the order of the closing braces."""
    outer: list[tuple[int, int, int]] = []
    for box in reversed(contents):
        if not outer or box[2] < outer[-1][0]:
            outer.append(box)
    return outer[::-1]


def _joined(text: str, boxes: list[tuple[int, int, int]]) -> str | None:
    r"""Return the last box; boxes in one row (`\boxed{1}, \boxed{2}`) are one answer of several parts."""
    if text.count("\\boxed") > 2 and _ONLY_BOXES.match(text):
        whole = boxed_list(text)
        if whole:
            return whole
    parts: list[str] = []
    left_edge = -1
    for command, start, end in reversed(boxes):
        gap = text[end + 1 : left_edge] if parts else ","
        if parts and (end > left_edge or len(gap) > 60):
            if end > left_edge:
                continue
            break
        if not _JOINT.fullmatch(gap) or not ("," in gap or ";" in gap or "\\text" in gap):
            break
        parts.append(text[start:end].strip())
        left_edge = command
    return ", ".join(part for part in reversed(parts) if part) or None


def _bare_box(text: str, start: int) -> str | None:
    r"""Read the word after a `\boxed` that has no brace."""
    word = text[start : start + 200].lstrip(" ")
    if not word or word[0] in "{}$\n":
        return None
    return re.split(r"[\s$}]", word, maxsplit=1)[0].rstrip(".,;") or None


def from_phrase(text: str) -> str | None:
    """Return what follows the last "answer is" or "answer:" in its sentence, without `$` and bold marks.

    A phrase that denies ("the answer is not 5") counts only if none affirms; then it is returned with its "not".
    """
    phrases = {match.end(): match.start() for match in _PHRASE.finditer(text)}
    starts = sorted({end_of_phrase(text), *phrases} - {-1})
    denied = None
    for start in starts[: -1 - MAX_DENIED : -1]:
        answer = _from_phrase_at(text, start)
        before = phrases.get(start, 0)
        if answer and _DOUBTED.search(text[max(0, before - LONGEST_GAP) : before]):
            answer = f"not {answer}"
        if answer is None or not _DENIED_START.match(answer):
            return answer or denied
        denied = denied or answer
    return denied


def _from_phrase_at(text: str, start: int) -> str | None:
    start += len(text[start : start + 16]) - len(text[start : start + 16].lstrip(" *#:\n\u00a0\u202f"))
    led = _LEAD.match(text, start)
    start = led.end() if led else start
    if text.startswith("$", start):
        fence = "$$" if text.startswith("$$", start) else "$"
        end = text.find(fence, start + len(fence))
        if end >= 0 and "\n" not in text[start:end].strip("$\n"):
            stop = _SENTENCE_END.search(text, end + len(fence))
            tail = text[end + len(fence) : stop.start() if stop else len(text)].strip(" *")
            if "$" not in tail:  # "$5$ or $7$" keeps both, so that a hedge stays visible
                kept = _measured(tail)
                tail = tail if kept is None else kept
                return (text[start + len(fence) : end].strip() + (f" {tail}" if tail else "")) or None
    stop = _SENTENCE_END.search(text, start)
    answer = text[start : stop.start() if stop else len(text)].strip().strip("*").rstrip(". ")
    for verb in FINAL_VERBS:
        answer = answer.removesuffix(verb)
    answer = answer.rstrip(" *")
    if answer.count("$") == 2 and answer[0] == answer[-1] == "$":
        answer = answer[1:-1].strip()
    return _conclusion(answer) or None


def _conclusion(answer: str) -> str:
    """Cut off a reason ("A because ..."), a subject ("the largest n is 34") and prose around a number."""
    instead = _DENIED_START.match(answer) and _INSTEAD.search(answer)
    if instead:
        return _conclusion(answer[instead.end() :].strip())
    corrections = list(_CORRECTED.finditer(answer))
    if corrections:
        return _conclusion(answer[corrections[-1].end() :])
    for pattern in (_ASIDE, _REJECTED, REJECTED):
        aside = pattern.search(answer, 0, LONGEST_FORMULA)
        reasons = [start for start in (aside.start() if aside else -1, start_of_reason(answer)) if start >= 0]
        if reasons:
            answer = answer[: min(reasons)].rstrip(" ,") or answer
    sure = _SURE.match(answer) or _LEADING_VERDICT.match(answer)
    if sure is not None:
        if (verdict := _STARTING_VERDICT.match(answer)) and (both := _both_verdicts(answer, verdict)):
            return both
        return sure.group(sure.lastindex or 0)
    if not answer.isascii() and FOREIGN_LETTER.search(answer):
        return _foreign_conclusion(answer)
    led = _LEAD.match(answer)
    answer = answer[led.end() :] if led else answer
    counted = _LEADING_NUMBER.match(answer)
    if counted is not None and counted.group() != answer:
        kept = _measured(answer[counted.end() :])
        return answer if kept is None else f"{counted.group()} {kept}".strip()
    if not answer[:1].isalpha() or answer.count(" ") < 3 or _HEDGE.search(answer):
        return answer
    verbs = [match.end() for match in _VERB.finditer(answer)]
    if verbs and re.search(r"[0-9\\]", answer[verbs[-1] :]):
        return answer[verbs[-1] :].strip(" *$")
    numbers = [
        match.group() for match in _NUMBER.finditer(answer[:LONGEST_FORMULA]) if match.group().strip("-+$")
    ]
    return numbers[0].strip() if len(numbers) == 1 else answer


def _measured(rest: str) -> str | None:
    """Return the unit in the prose behind a number: "apples" of "apples in total"; None if it is not only prose."""
    rest = _REMARK.sub("", rest).strip(" ,;:!")
    if not rest:
        return ""
    if _NOT_A_REMARK.search(rest) or _HEDGE.search(rest) or not rest[0].isalpha():
        return None
    stop = _END_OF_UNIT.search(f" {rest}")
    unit = f" {rest}"[: stop.start() if stop else None].strip(" ,;:")
    return unit if unit.count(" ") < MAX_UNIT_WORDS else ""


def _foreign_conclusion(answer: str) -> str:
    """Drop a counter ("42个") and what else stands around the only number, unless it negates or bounds it."""
    if HEDGED.search(answer[:LONGEST_FORMULA]):
        return answer
    counted = _COUNTED.fullmatch(answer)
    if counted is not None:
        is_measure = counted[2] is not None and counted[2] in _MEASURES
        is_scaled = is_measure or SCALED.match(answer, counted.start(1)) is not None
        return answer[counted.start(1) :] if is_scaled or counted[2] == "%" else counted[1].rstrip(".,/")
    numbers = [match for match in _NUMBER.finditer(answer[:LONGEST_FORMULA]) if match.group().strip("-+$")]
    if len(numbers) != 1 or "\\" in answer or "=" in answer or SCALED.search(answer[:LONGEST_FORMULA]):
        return answer
    is_said = answer.count(" ") >= 3 or _SAYS.search(answer, 0, numbers[0].start()) is not None
    return numbers[0].group().strip() if is_said else answer


def from_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####` (the format of GSM8K)."""
    start = text.rfind("####")
    if start < 0:
        return None
    end = text.find("\n", start)
    line = text[start + 4 : end if end >= 0 else len(text)].strip(" :\t\r")
    return _conclusion(line) or None if len(line) <= LONGEST_FORMULA else line


def from_formula(text: str) -> str | None:
    r"""Return a text that is only a formula, or the math (`$`, `\(`, `\[`) that contains the last digit.

    Of `x = 5` and `2+3 = 5` only the 5 is returned; an equation in two variables is kept.
    """
    whole = text.strip()
    if len(whole) <= LONGEST_FORMULA and _is_formula(_unfenced(whole)):
        lines = whole.splitlines()
        return _right_side(lines[-1] if "=" in whole and "\\begin" not in whole else whole)
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\[", "\\]"), ("\\(", "\\)")):
        end = text.rfind(closing)
        start = text.rfind(opening, max(0, end - LONGEST_FORMULA), end) if end > 0 else -1
        if start < 0 or _DIGIT.search(text, end):
            continue
        inside = text[start + len(opening) : end].strip()
        if _is_formula(inside, _PROSE_IN_MATH) and not _is_denied(
            text, start, end + len(closing), _DENIED_NUMBER
        ):
            other = _alternative(text[max(0, start - LONGEST_FORMULA) : start].rstrip(), opening, closing)
            return f"{other} or {inside}" if other else _right_side(inside)
    last = max(text.rfind(digit) for digit in _DIGITS)
    before, after = text[max(0, last - 500) : last].split(" "), text[last : last + 500].split()
    word = (before[-1] + after[0]).rstrip(".,;:!?") if after else ""
    is_latex = "\\" in word and "{" in word and word.count("{") == word.count("}") and _is_formula(word)
    return _right_side(word) if is_latex else None


def _alternative(before: str, opening: str, closing: str) -> str | None:
    """Return the formula before an "or": `$2$ or $3$` stay two answers."""
    if not before.endswith(f"{closing} or"):
        return None
    end = len(before) - len(closing) - 3
    start = before.rfind(opening, 0, end)
    return before[start + len(opening) : end].strip() if start >= 0 else None


def _unfenced(formula: str) -> str:
    for fence in ("$$", "$"):
        if len(formula) > 2 * len(fence) and formula.startswith(fence) and formula.endswith(fence):
            return formula[len(fence) : -len(fence)].strip()
    return formula


def _is_formula(text: str, prose: re.Pattern[str] = _PROSE) -> bool:
    text = text.replace("\\$", "")
    return (
        _EVIDENCE.search(text) is not None
        and "$" not in text
        and "#" not in text
        and prose.search(words := _WORDS_INSIDE.sub(" ", text)) is None
        and (words.isascii() or FOREIGN_LETTER.search(JOINED.sub(" ", words)) is None)
    )


def _right_side(formula: str) -> str | None:
    r"""Keep the 5 of `x = 5`, `2 + 3 = 5` and `a = b = 5`."""
    formula = _unfenced(formula.strip())
    sides = formula.split("=")
    result = sides[-1].strip().rstrip(".。 ")
    if _LIST.search(formula):
        return formula.rstrip("。") or None
    is_named = len(sides) > 2 or _NAMED.fullmatch(re.sub(r"\\[A-Za-z]+", "", sides[0].strip())) is not None
    if len(sides) > 1 and is_named and _RESULT.fullmatch(re.sub(r"\\[A-Za-z]+", "", result)):
        return result
    return formula.rstrip("。") or None


def from_choice(text: str) -> str | None:
    """Return the verdict (an option letter, yes or no) that is the last line, or the last letter that is affirmed.

    A completion of one word is that word, and a few words after `</think>` are the answer.
    """
    whole = text.strip()
    tail = whole[-LONGEST_FORMULA:]
    line = tail.rpartition("\n")[2].strip(" *_.。！")
    if _VERDICT.fullmatch(line):
        return line
    _, closed, rest = tail.rpartition("</think>")
    rest = rest.strip()
    if closed and 0 < len(rest) <= LONGEST_REMARK and "\n" not in rest and not _DIGIT.search(rest):
        return rest
    labelled = _LABELLED.fullmatch(line) if len(line) <= LONGEST_REMARK else None
    if (
        labelled
        and not _HEDGE.search(line)
        and all(mention.start() <= 1 for mention in _LETTER.finditer(line))
    ):
        return labelled[1]
    if 0 < len(whole) <= LONGEST_REMARK and whole.rstrip(".!").replace("-", "").isalpha():
        return whole.rstrip(".!")
    bare = len(whole) <= LONGEST_REMARK and not _FORMULAIC.search(whole)
    return _affirmed_letter(tail) or (_affirmed_letter(whole, pattern=_BARE_LETTER) if bare else None)


def from_letter(text: str) -> str | None:
    """Return the last option letter that is affirmed, also where a number follows: "take (B), that is 5"."""
    return _affirmed_letter(text[-LONGEST_FORMULA:], before_number=True)


def from_verdict(text: str) -> str | None:
    """Return the last yes, no, true or false with which a sentence starts; `yes or no` where both are offered."""
    tail, found = text[-LONGEST_FORMULA:], None
    for found in _STARTING_VERDICT.finditer(tail):  # noqa: B007
        pass
    if found is None:
        return None
    return _both_verdicts(tail, found) or found[1]


def _both_verdicts(text: str, found: re.Match[str]) -> str | None:
    """Return what offers a verdict and the contrary (`yes, no`), so that it counts as neither; None for one verdict."""
    other = _OTHER_VERDICT.match(text, found.end())
    is_contrary = (
        other is not None and len({word.lower() in ("yes", "true") for word in (found[1], other[1])}) > 1
    )
    return text[found.start(1) : other.end(1)] if other and is_contrary else None


def _affirmed_letter(
    text: str, *, before_number: bool = False, pattern: re.Pattern[str] = _LETTER
) -> str | None:
    """Return the last option letter that is neither denied nor part of a reason; `A or B` where both are offered."""
    mentions = list(pattern.finditer(text))
    denied: set[str] = set()
    for place in range(len(mentions) - 1, -1, -1):
        mention = mentions[place]
        letter = next(filter(None, mention.groups()))
        if _is_denied(text, mention.start(), mention.end()):
            denied.add(letter)
            continue
        before = mentions[place - 1].end() if place else 0
        sentence = text[max(before, mention.start() - LONGEST_REMARK) : mention.start()]
        if letter in denied or (place and _REASON.search(sentence) and not _SENTENCE_END.search(sentence)):
            continue
        if mention.lastgroup == "bare" and not before_number and _DIGIT.search(text, mention.end()):
            return None
        other = _OFFERED_AFTER.match(text, mention.end())
        if other and not _is_denied(text, other.start(1), other.end()):
            return f"{letter} or {other[1]}"
        other = _OFFERED_BEFORE.search(text[max(0, mention.start() - LONGEST_GAP) : mention.start()])
        if other and other[1] not in denied:
            return f"{other[1]} or {letter}"
        return letter
    return None


def _is_denied(text: str, start: int, end: int, after: re.Pattern[str] = _DENIAL_AFTER) -> bool:
    """Say whether the words before or behind an answer deny it: "cannot be (B)", "(B) is wrong"."""
    before = _CLAUSE_END.split(text[max(0, start - LONGEST_GAP) : start])[-1]
    is_denied = any(pattern.search(before) for pattern in (_DENIAL_BEFORE, DENIED_BEFORE))
    return is_denied or any(pattern.match(text, end) for pattern in (after, DENIED_AFTER))


def from_last_number(text: str) -> str | None:
    """Return the last number: sign, decimals, strict thousands commas, `a/b` and a percent sign belong to it.

    Digits inside a word (`A2B`) are not a number, and the minus of `5-3` is not a sign.
    """
    end = max(text.rfind(digit) for digit in _DIGITS)
    if end < 0:
        return None
    start = end
    floor = max(0, end - LONGEST_NUMBER)
    while start > floor and text[start - 1] in _NUMBER_CHARACTERS:
        start -= 1
    window = text[max(0, start - 1) : end + 4]
    number: re.Match[str] | None = None
    for match in _NUMBER.finditer(window):
        if match.group().strip("-+$\u2212"):
            number = match
    if number is None:  # the last digits belong to a word: look further left
        return _earlier_number(text, start)
    cut = start == floor > 0 and number.start() <= 1
    return None if cut else _with_scale(text, end) or number.group().strip()


def _without_separators(text: str) -> str:
    """Drop the spaces and apostrophes that group the thousands of numbers near the end of a text: `2 800`, `2'800`.

    In English, where `3 500 ml bottles` are three, `3 500` stays two numbers, unless it has a decimal comma.
    Non-breaking spaces are dropped earlier, by `whet.rewards.answers.scripts.fold`.
    """
    start = max(0, len(text) - LONGEST_FORMULA)
    parts, done = [text[:start]], start
    for match in _GROUPED.finditer(text, start):
        around = max(0, match.start() - LONGEST_REMARK), match.end() + LONGEST_REMARK
        if match["spaces"] and not match["decimals"] and _ENGLISH.search(text, *around):
            continue
        parts += [text[done : match.start()], re.sub("[ '\u2019]", "", match.group())]
        done = match.end()
    return "".join([*parts, text[done:]])


def from_last_token(text: str) -> str | None:
    """Return the last number that is not denied, with all of a date, time or address; two that are offered stay two."""
    text = _without_separators(text)
    aside = _LAST_ASIDE.search(text[-LONGEST_REMARK:])
    if aside:
        head = text[: len(text) - len(text[-LONGEST_REMARK:]) + aside.start()]
        text = head if _DIGIT.search(_SENTENCE_END.split(head[-LONGEST_REMARK:])[-1]) else text
    for _ in range(1 + MAX_DENIED):
        number = from_last_number(text)
        if number is None:
            return None
        start = text.rfind(number)
        if start < 0:
            return number
        end = start + len(number)
        left = max(text.rfind(space, 0, start) for space in " \n\t(") + 1
        right = min((at for space in " \n\t)" if (at := text.find(space, end)) >= 0), default=len(text))
        token = text[left:right].strip(_AROUND)
        if half := _HALF_OF_DAY.match(text, right):
            token = f"{token}{half.group()}"
        if token != number and len(token) <= LONGEST_TEXT:
            read = read_text(clean(token))
            is_label = _LABEL_BEFORE.search(text[max(0, left - 10) : left])  # "Week 3:210 pages"
            if (
                read is not None
                and (read.kind in _WHOLE or (read.kind == "pair" and _is_rising(read)))
                and not is_label
            ):
                return token
        if not _is_denied(text, start, end, _DENIED_NUMBER):
            other = _OFFERED_NUMBER.search(text[max(0, start - LONGEST_GAP) : start])
            is_two = other and number.isdecimal() and other[1] != number and not _EQUATED.match(text, end)
            return f"{other[1]} or {number}" if other and is_two else number
        text = text[:start]
    return None


def _is_rising(pair: Text) -> bool:
    """Say whether a pair is a ratio, or a range whose second number is larger: `5-3` is 2."""
    mark, _, low, high = pair.value
    return mark == ":" or low < high  # type: ignore[operator]


def _with_scale(text: str, end: int) -> str | None:
    """Return the number whose last digit, or whose scale word, is at `end`: 3万, 3万5千, 3分之1."""
    before = max(0, end - LONGEST_SCALED)
    for match in SCALED.finditer(text[before : end + 4]):
        if match.start() <= end - before < match.end():
            return match.group().strip()
    return None


def _earlier_number(text: str, end: int) -> str | None:
    """Return the last number within a bounded window before `end`."""
    number: str | None = None
    for match in _NUMBER.finditer(text, max(0, end - LONGEST_NUMBER), end):
        number = match.group().strip() or number
    return number


Step = Callable[[str], "str | None"]

STEPS: dict[str, Step] = {
    "tags": from_tags,
    "box": from_box,
    "phrase": from_phrase,
    "hashes": from_hashes,
    "formula": from_formula,
    "choice": from_choice,
    "last_number": from_last_token,
    "letter": from_letter,
    "verdict": from_verdict,
}
DEFAULT_STEPS: tuple[str, ...] = tuple(STEPS)[:7]
STEPS_OF: dict[str, tuple[str, ...]] = {
    "choice": (*DEFAULT_STEPS[:4], "choice", "letter", "formula", "last_number"),
    "yes_no": (*DEFAULT_STEPS[:4], "choice", "verdict"),
}
"""Type of answer -> the steps that find one, where these are not the default ones."""
_STATED = DEFAULT_STEPS[:4]
"""Steps that find an answer which the text calls one."""


_UNWORKED = re.compile(r"\d\s*[+*×·÷^]\s*\(?\d|\d\s+[-−/]\s+\d")
"""A formula of numbers that somebody has still to work out; not a fraction, a range or a date."""


def repeats_formula(answer: str, prompt: str, golds: Sequence[str]) -> bool:
    """Say whether an answer is a formula that stands in the question, and is no gold answer as it stands.

    Judges take a formula that is equal to the right number for it; where answers are read anywhere, repeating the
    question would be paid.

    Args:
        answer: The answer that was read.
        prompt: The question.
        golds: The gold answers.
    """
    if not _UNWORKED.search(answer):
        return False
    said, asked, *right = ("".join(text.split()) for text in (answer, prompt, *golds))
    said = said.rstrip("=?.!:")
    return said in asked and said not in right


def extract_answer_with_step(
    text: str, steps: Sequence[str] = DEFAULT_STEPS
) -> tuple[str | None, str | None]:
    """Find the final answer; also return which step found it.

    Args:
        text: Any completion.
        steps: Names in `STEPS`, in the order in which to try them.

    Returns:
        (answer, step), or (None, None) when no step found anything.

    Raises:
        ValueError: If a step is unknown.
    """
    unknown = [name for name in steps if name not in STEPS]
    if unknown:
        raise ValueError(f"extraction steps {unknown} are unknown, expected some of {list(STEPS)}")
    text = answer_part(without_markup(own_turn(fold(text))))
    for name in steps:
        answer = STEPS[name](text)
        if answer is not None:
            return answer, name
    return None, None


def answer_part(text: str) -> str:
    """Return what may hold the answer: what follows the thinking, and nothing of thinking that is still open."""
    for name in THOUGHTS:
        opening, closing = f"<{name}>", f"</{name}>"
        opened, closed = text.rfind(opening), text.rfind(closing)
        if opened > closed:
            text = text[: max(0, opened)] if closed < 0 else text[closed + len(closing) : opened]
        elif closed >= 0 and text[closed + len(closing) :].strip():
            text = text[closed:]
    return text


def own_turn(text: str) -> str:
    """Return a completion up to the point where the model, having answered, asks itself a new question.

    A base model does so: "... #### 72", then "Question: ... #### 15". What comes before must hold an answer, and one
    that is stated if the rest states one, too: a solution may repeat its question.
    """
    for match in islice(_NEXT_QUESTION.finditer(text), MAX_QUESTIONS):
        before = text[: match.start()].rstrip()
        if not before or before.endswith("</think>") or before.rfind("<think>") > before.rfind("</think>"):
            continue
        if match["role"] or match["token"] or not text[match.end() :].strip():
            return before
        if any(STEPS[name](before) is not None for name in _STATED):
            return before
        is_stated_later = any(mark in text[match.end() :] for mark in _STATED_MARKS)
        if (match["number"] or not is_stated_later) and any(
            STEPS[name](before) is not None for name in DEFAULT_STEPS[len(_STATED) :]
        ):
            return before
    return text


def extract_answer(text: str) -> str | None:
    """Find the final answer with the default steps; None if there is none."""
    return extract_answer_with_step(text)[0]
