"""Text that somebody else wrote (ids, column names, file and host names, prompts, messages) made safe for what shows it.

for_terminal   control characters written out, so that nothing steers the terminal; line breaks stay
one_line       the same on one line and cut to a length: for a cell, a fact or a message
for_markdown   one line as a code span, in which neither Markdown nor HTML means anything
"""

from __future__ import annotations

import re

MESSAGE_CHARS = 2000
CELL_CHARS = 120

UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 (but tab and newline), DEL, C1: escape sequences
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # turn the direction of writing: trojansource.codes
    "\u2028\u2029"  # line breaks to some readers
    "\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # take no room: two names look alike
    "\ud800-\udfff"  # halves of a pair, which cannot be encoded
    "]"
)


def for_terminal(text: str) -> str:
    """The text with every character of UNSAFE written as its escape; tabs and newlines stay."""
    return UNSAFE.sub(lambda found: _escape(found[0]), text)


def one_line(text: object, limit: int = CELL_CHARS) -> str:
    r"""Any value on one line of about `limit` characters at most, the rest counted; a line break is shown as \n."""
    said = str(text)
    more = len(said) - limit
    if more > 0:
        said = said[:limit]
    said = for_terminal(said).replace("\n", "\\n").replace("\t", "\\t")
    return f"{said}... ({more:,} more characters)" if more > 0 else said


def for_markdown(text: object, limit: int = CELL_CHARS) -> str:
    """A code span that fits a line of Markdown, a heading too (CommonMark 0.31, 6.1). In a table escape its bars as well."""
    said = one_line(text, limit).strip() or " "
    fence = "`" * (1 + max(map(len, re.findall("`+", said)), default=0))
    pad = " " if said[0] == "`" or said[-1] == "`" else ""
    return f"{fence}{pad}{said}{pad}{fence}"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
