"""Regular expressions in the syntax of Python's `re`, as nodes of `regular.py`. The whole text must match.

Built: literals, classes, `.`, groups, alternatives, repetitions, `^` and `$` at the outer ends, the flags i and s. Each text
matches by Python's `re`; `regex_dialects.py` says which ones are left out. Refused: lookaround, references to groups, word
boundaries, other flags. Lazy repetitions match the same texts as greedy ones.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence

from batchspec.errors import OneLine
from batchspec.structured.regex_dialects import Dialect, python
from batchspec.structured.regex_syntax import At, Group, Item, NotSupported, Repeated, parsed
from batchspec.structured.regular import ANY, Alt, Chars, Node, Repeat, Seq, optional

MAX_REPEATS = 100_000


class BadRegex(OneLine, ValueError):
    """The expression is not valid, or not supported; the message says what."""


def regex_node(
    pattern: str,
    of_char: Callable[[Chars], Node] = lambda chars: chars,
    *,
    anywhere: bool = False,
    dialect: Dialect | None = None,
) -> Node:
    """The texts that match an expression as a whole, or that hold a match if `anywhere`.

    of_char  how a character of the text is written: as it is, or escaped as in JSON
    dialect  the meaning of classes of characters; None: `python`
    Raises BadRegex.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of `[[`, which may mean another class in a later Python
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadRegex(f"{pattern!r} is not a regular expression ({error})") from None
    dialect = dialect or python()
    try:
        more = Repeat(of_char(ANY), 0, None) if anywhere else None
        end = None if dialect.end is None else optional(of_char(dialect.end))
        return _Builder(of_char, more, end).outermost(parsed(pattern, dialect), True, True)
    except NotSupported as error:
        raise BadRegex(f"{pattern!r} holds {error}, which is not supported; write it another way") from None


class _Builder:
    """of_char as in `regex_node`; more: what may come before and after a match; end: what may follow `$`. None: nothing."""

    def __init__(self, of_char: Callable[[Chars], Node], more: Node | None, end: Node | None) -> None:
        self._char, self._more, self._end = of_char, more, end

    def outermost(self, group: Group, begins: bool, ends: bool) -> Node:
        """A group at the begin of the expression, at its end, or both: `^` and `$` may be there."""
        branches = tuple(self._sequence(branch, begins, ends) for branch in group.branches)
        return branches[0] if len(branches) == 1 else Alt(branches)

    def _sequence(self, items: Sequence[Item], begins: bool, ends: bool) -> Node:
        first, last = 0, len(items)
        while begins and first < last and items[first] == At(True):
            first += 1
        while ends and first < last and items[last - 1] == At(False):
            last -= 1
        inner = items[first:last]
        open_begin, open_end = begins and not first, ends and last == len(items)
        in_first = open_begin and bool(inner) and _has_anchor(inner[0], begin=True)
        in_last = open_end and bool(inner) and _has_anchor(inner[-1], begin=False)
        parts = [
            self._item(item, begins=in_first and place == 0, ends=in_last and place == len(inner) - 1)
            for place, item in enumerate(inner)
        ]
        before = [self._more] if self._more is not None and open_begin and not in_first else []
        after = [self._more] if self._more is not None and open_end and not in_last else []
        after += [self._end] if self._end is not None and last < len(items) else []
        return Seq((*before, *parts, *after))

    def _item(self, item: Item, *, begins: bool, ends: bool) -> Node:
        match item:
            case Chars():
                return self._char(item)
            case Group():
                return self.outermost(item, begins, ends)
            case Repeated(part, least, most):
                if max(least, most or 0) > MAX_REPEATS:
                    raise NotSupported(f"a repetition of more than {MAX_REPEATS:,}")
                return Repeat(self._item(part, begins=False, ends=False), least, most)
            case At():
                raise NotSupported("^, $ or \\b inside")


def _has_anchor(item: Item, *, begin: bool) -> bool:
    """Whether it is a group with a branch that begins (or ends) with an anchor; other branches need not."""
    if not isinstance(item, Group):
        return False
    ends = [branch[0 if begin else -1] for branch in item.branches if branch]
    return any(one == At(begin) or _has_anchor(one, begin=begin) for one in ends)
