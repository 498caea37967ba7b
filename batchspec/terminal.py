"""The one way to a terminal: everything that batchspec prints goes through here, and nothing printed here can steer a terminal.

say    one line on stderr: what a run tells while it works
fail   an error on stderr, one line
show   the result of a command on stdout, as many lines as it has; show_line: one
table, facts   lines made of values that somebody else wrote: each value stays on its line

`Status` is a line that is drawn again and again at the bottom of a terminal; what `say` prints appears above it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TextIO

from batchspec.text import CELL_CHARS, MESSAGE_CHARS, for_terminal, one_line

_lock = threading.RLock()
_status: Status | None = None


def say(line: object, *, stream: TextIO | None = None) -> None:
    """One line on stderr, whatever is in it."""
    _write(one_line(line, MESSAGE_CHARS), stream or sys.stderr)


def fail(error: object) -> None:
    """The line that a command ends with when it fails."""
    say(f"batchspec: {error}")


def trouble(text: str) -> None:
    """A traceback on stderr: many lines, for whoever mends a defect."""
    _write(for_terminal(text).rstrip("\n"), sys.stderr)


def show(text: str) -> None:
    """Lines on stdout."""
    _write(for_terminal(text), sys.stdout)


def show_line(line: object) -> None:
    """One line on stdout, whatever is in it."""
    show(one_line(line, MESSAGE_CHARS))


def show_json(value: Any, *, indent: int | None = None) -> None:
    """A value as JSON on stdout: ASCII alone, so that a terminal shows what a program reads."""
    _write(json.dumps(value, indent=indent).replace("\x7f", "\\u007f"), sys.stdout)


def clear_screen() -> None:
    """An empty terminal, its cursor at the top."""
    sys.stdout.write("\x1b[H\x1b[2J")


def table(rows: Iterable[Sequence[object]], *, left: int = 1, limit: int = CELL_CHARS, indent: str = "  ") -> list[str]:
    """Lines of columns as wide as their widest cell: the first `left` of them to the left, the others, numbers, to the right."""
    cells = [[one_line(cell, limit) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        places = enumerate(zip(row, widths, strict=True))
        aligned = (cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in places)
        lines.append(f"{indent}{'  '.join(aligned)}".rstrip())
    return lines


def facts(values: Mapping[str, object], *, indent: str = "", limit: int = MESSAGE_CHARS) -> list[str]:
    """A line for each name and value, the values under each other; what is no text is shown as JSON."""
    names = [one_line(name) for name in values]
    width = max(map(len, names), default=0)
    texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str) for value in values.values())
    return [f"{indent}{name:<{width}}  {one_line(text, limit)}" for name, text in zip(names, texts, strict=True)]


def indented(text: str | None) -> str:
    """Text of many lines, each of them two spaces in: no line of it passes for one of ours."""
    return "\n".join(f"  {line}" for line in for_terminal(text or "").split("\n"))


class Status:
    """A line at the bottom of a terminal while the block lasts; `draw` replaces it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self._line = stream, ""

    def __enter__(self) -> Self:
        global _status
        with _lock:
            _status = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The last line stays."""
        global _status
        with _lock:
            _status = None
            if self._line:
                _put("\n", self.stream)

    def draw(self, line: str) -> None:
        """`line` fits the terminal: one that wraps would leave its beginning behind."""
        with _lock:
            if _status is self:
                self._line = for_terminal(line).replace("\n", " ")
                _put(f"\r{self._line}\x1b[K", self.stream)

    def erase(self) -> None:
        _put("\r\x1b[K", self.stream)

    def redraw(self) -> None:
        _put(self._line, self.stream)


def _write(text: str, stream: TextIO) -> None:
    with _lock:
        above = _status if _status is not None and stream.isatty() else None
        if above is not None:
            above.erase()
        _put(f"{text}\n", stream)
        if above is not None:
            above.redraw()


def _put(text: str, stream: TextIO) -> None:
    """Characters that the stream's encoding lacks are written out too."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    with suppress(ValueError):
        stream.flush()
