"""Markup around answers: special tokens, HTML, emphasis of Markdown. All passes are linear."""

from __future__ import annotations

import re

_SPECIAL = re.compile(
    r"<[|｜][^|｜<>\n]{1,40}[|｜]>|</s>|<(?:eos|bos|pad|unk|eot|end|end_of_text|endoftext|end_of_turn|start_of_turn)>"
    r"|\[/?INST\]|\[(?:EOS|END|PAD|SEP)\]",
    re.IGNORECASE,
)
"""Tokens of tokenizers that end up in a text. `<s>` is one at the start of a text only: elsewhere it strikes out."""
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~|<(del|s|strike)>[^<>]{0,200}</\1>", re.IGNORECASE)
_RAISED = re.compile(r"<(sup|sub)>([^<>]{1,40})</\1>", re.IGNORECASE)
_BREAK = re.compile(
    r"</?(?:br|p|div|li|ul|ol|tr|h[1-6]|center|blockquote|section)(?: [^<>\n]{0,80})?/?>", re.IGNORECASE
)
_INLINE = re.compile(
    r"</?(?:b|i|u|em|strong|span|font|mark|code|kbd|tt|small|big|ins|td|th|label|final)(?: [^<>\n]{0,80})?>",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(
    r"(?<![\w*\\)}])(?P<star>\*{1,3})(?=[^\s*])(?P<starred>[^*\n]{1,200})(?<=[^\s*])(?P=star)(?![\w*({])"
    r"|(?<![\w\\)}$])(?P<line>_{1,3})(?=[^\s_])(?P<lined>[^_\n]{1,200})(?<=[^\s_])(?P=line)(?![\w{(])"
    r"|(?<!`)(?P<tick>`{1,2})(?=[^\s`])(?P<code>[^`\n]{1,200})(?P=tick)(?!`)"
)


def without_tokens(text: str) -> str:
    """Remove special tokens (`</s>`, `<|im_end|>`)."""
    return _SPECIAL.sub(" ", text) if "<" in text or "[" in text else text


def without_markup(text: str) -> str:
    """Remove special tokens, HTML tags and emphasis, and what is struck out; `10<sup>3</sup>` becomes `10^{3}`."""
    text = without_tokens(text)
    has_tags = "</" in text or "<br" in text
    if "~~" in text or has_tags:
        text = _STRUCK.sub(" ", text)
    if has_tags:
        text = _RAISED.sub(lambda match: f"{'^' if match[1].lower() == 'sup' else '_'}{{{match[2]}}}", text)
        text = _INLINE.sub("", _BREAK.sub("\n", text))
    if "*" in text or "_" in text or "`" in text:
        for _ in range(2):  # bold inside italics
            text = _EMPHASIS.sub(lambda match: match["starred"] or match["lined"] or match["code"], text)
    return text
