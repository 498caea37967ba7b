"""Everything that batchspec prints goes through this module, which escapes control characters, so that no text can control the
terminal.

say    one line on stderr: messages of a run while it works
notice the same, after the name of the program: about a run as a whole
fail   an error on stderr, one line
show   the result of a command on stdout, any number of lines; show_line: one line
table, facts   lines of untrusted values: each value stays on its line

`StatusLine` redraws a line at the bottom of a terminal; messages of `say` appear above it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TextIO

from batchspec.console.text import CELL_CHARS, MESSAGE_CHARS, for_terminal, one_line
from batchspec.errors import BatchspecError, StorageError
from batchspec.process.local_files import told

PREFIX = "batchspec: "
"""Begins notices and errors."""

_lock = threading.RLock()
_status: StatusLine | None = None


def say(line: object, *, stream: TextIO | None = None) -> None:
    """Print one line on stderr; line breaks in it are escaped. Lost where nobody can read it: the run goes on."""
    with suppress(OSError):
        _write(one_line(line, MESSAGE_CHARS), stream or sys.stderr)


def notice(line: object) -> None:
    """Print one line about a run as a whole on stderr, after the name of the program."""
    say(f"{PREFIX}{line}")


def fail(error: object) -> None:
    """Print the error with which a command ends, as one line on stderr."""
    notice(error)


def fail_json(error: BatchspecError) -> None:
    """`fail`, and on stdout one line of JSON for the program that reads it: `status --watch --json` prints lines."""
    show_json({"exit_code": error.exit_code, "error": str(error)})
    fail(error)


def print_traceback(text: str) -> None:
    """Print a traceback on stderr: for unexpected errors, on many lines."""
    with suppress(OSError):
        _write(for_terminal(text).rstrip("\n"), sys.stderr)


def show(text: str) -> None:
    """Print lines on stdout. Raises StorageError, and BrokenPipeError if nobody reads them."""
    with _answering():
        _write(for_terminal(text), sys.stdout)


def flush() -> None:
    """Write what other libraries have printed on stdout. Raises as `show`."""
    with _answering():
        sys.stdout.flush()


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(f"standard output cannot be written: {told(error)}") from error


def show_line(line: object) -> None:
    """Print one line on stdout; line breaks in it are escaped."""
    show(one_line(line, MESSAGE_CHARS))


def show_json(value: Any, *, indent: int | None = None) -> None:
    """Print a value as JSON on stdout, in ASCII, so that it is safe on a terminal without further escapes."""
    show(json.dumps(value, indent=indent).replace("\x7f", "\\u007f"))


def clear_screen() -> None:
    """Clear the terminal and move the cursor to the top."""
    sys.stdout.write("\x1b[H\x1b[2J")


def table(rows: Iterable[Sequence[object]], *, left: int = 1, limit: int = CELL_CHARS) -> list[str]:
    """Indented lines of a table; the first `left` columns are left-aligned, the others, which hold numbers, right-aligned."""
    cells = [[one_line(cell, limit) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        columns = enumerate(zip(row, widths, strict=True))
        aligned = (cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in columns)
        lines.append(f"  {'  '.join(aligned)}".rstrip())
    return lines


def facts(values: Mapping[str, object], *, indent: str = "", limit: int = MESSAGE_CHARS) -> list[str]:
    """One line for each name and value, with the values aligned; a value that is not text is shown as JSON."""
    names = [one_line(name) for name in values]
    width = max(map(len, names), default=0)
    texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str) for value in values.values())
    return [f"{indent}{name:<{width}}  {one_line(text, limit)}" for name, text in zip(names, texts, strict=True)]


def indented(text: str | None) -> str:
    """Untrusted text of many lines, each indented by two spaces, so that none can be mistaken for a line of batchspec."""
    return "\n".join(f"  {line}" for line in for_terminal(text or "").split("\n"))


class StatusLine:
    """A line at the bottom of the terminal during a `with` block; `draw` replaces it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self._line = stream, ""

    def __enter__(self) -> Self:
        global _status
        with _lock:
            _status = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The last line stays on the terminal."""
        global _status
        with _lock:
            _status = None
            if self._line:
                with suppress(OSError):  # the terminal is gone: the block's own error counts
                    _put("\n", self.stream)

    def draw(self, line: str) -> None:
        """`line` must fit the width of the terminal: the first part of a wrapped line could not be erased."""
        with _lock:
            if _status is self:
                self._line = for_terminal(line).replace("\n", " ")
                with suppress(OSError):
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
    """Write and flush; characters that the stream cannot encode are escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    with suppress(ValueError):
        stream.flush()
