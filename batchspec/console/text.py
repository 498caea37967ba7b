"""Makes untrusted text (ids, column names, file and host names, prompts, messages) safe to print.

for_terminal   escapes control characters, so that the text cannot control the terminal; line breaks stay
one_line       the same on one line and cut to a length: for a table cell or a message
error_line     the message of an error, of at most ERROR_CHARS characters: every exception of batchspec and every error row makes
               its message with it
quoted         a value for such a message, in quotes and cut in its middle; as_json: the same of any value of JSON
for_markdown   one line as a code span, in which neither Markdown nor HTML is interpreted
for_shell      a path as one word of a command that a message tells to type
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

MESSAGE_CHARS = 2000
CELL_CHARS = 120
ERROR_CHARS = 288
"""Maximum length of an error's message; with the name of the program before it, a line has at most 300."""
VALUE_CHARS = 60
_WORD_CHARS = range(160, 39, -4)

UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 (but tab and newline), DEL, C1: escape sequences
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of writing: trojansource.codes
    "\u2028\u2029"  # line breaks to some readers
    "\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible: two different names look the same
    "\ud800-\udfff"  # lone surrogates, which cannot be encoded
    "]"
)


def bytes_text(count: float) -> str:
    """`999 B`, `1.5 kB`, `20 MB`, `1,234.50 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.2f} GB"


def counted(number: int, noun: str) -> str:
    """1 shard, 2 shards, 1,000 shards."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """1.5 s, 12 min, 3.4 h."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def listed(counts: Mapping[str, int]) -> str:
    """1,000 ok, 2 error; empty without any."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def for_terminal(text: str) -> str:
    """The text with every character of UNSAFE written as its escape; tabs and newlines stay."""
    return UNSAFE.sub(lambda found: _escape(found[0]), text)


def one_line(text: object, limit: int = CELL_CHARS) -> str:
    r"""Any value on one line, cut to about `limit` characters with a count of the rest; a line break is shown as \n."""
    shown = str(text)
    num_more = len(shown) - limit
    if num_more > 0:
        shown = shown[:limit]
    shown = for_terminal(shown).replace("\n", "\\n").replace("\t", "\\t")
    return f"{shown}... ({num_more:,} more characters)" if num_more > 0 else shown


def error_line(text: object) -> str:
    """The message of an error on one line, in printable characters, of which there are at most ERROR_CHARS.

    What makes a line too long are values: paths, keys, ids. The longest words are cut in their middle first, and no more than
    needed, so that the sentence stays whole, with the advice at its end; then the line's own middle is left out.
    """
    line = _printable(cut(str(text), 10 * ERROR_CHARS)).strip()
    words = line.split(" ")
    for size in _WORD_CHARS:
        if len(line) <= ERROR_CHARS:
            return line
        line = " ".join(cut(word, size) for word in words)
    return cut(line, ERROR_CHARS)


def quoted(value: object, limit: int = VALUE_CHARS) -> str:
    """A value as text in quotes for a message, cut in its middle to about `limit` printable characters."""
    shown = repr(cut(_or_kind(str, value), limit))
    return shown[0] + cut(shown[1:-1], limit) + shown[0]


def as_json(value: object, limit: int = VALUE_CHARS) -> str:
    """A value as JSON for a message, cut likewise."""
    return cut(_or_kind(json.dumps, value).replace("\x7f", "\\u007f"), limit)


def for_markdown(text: object) -> str:
    """A code span on one line of Markdown, also in a heading (CommonMark 0.31, 6.1). In a table, `|` must be escaped as well."""
    shown = one_line(text, CELL_CHARS).strip() or " "
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if shown[0] == "`" or shown[-1] == "`" else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def for_shell(path: object) -> str:
    """A path as one word of a shell's command, which no program takes for an option."""
    word = str(path)
    return shlex.quote(f"./{word}" if word.startswith("-") else word)


def _or_kind(form: Callable[[Any], str], value: object) -> str:
    """The form of a value; its kind, if it is nested very deeply, has thousands of digits, or keys that are no text."""
    try:
        return form(value)
    except (RecursionError, ValueError, TypeError):
        return f"a {type(value).__name__}"


def _printable(text: str) -> str:
    """The text with an escape in place of each character that is not printable: line breaks, those of UNSAFE, spaces of other
    widths."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escape(one) for one in text)


def cut(text: str, limit: int) -> str:
    """The text, without its middle if it is longer than `limit`: of a path or a name both ends are seen."""
    if len(text) <= limit:
        return text
    kept = limit - len("...")
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
