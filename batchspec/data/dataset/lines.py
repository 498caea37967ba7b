"""The lines of a text file, and on which of them each row begins. Of a line that is too long to be read only the size and a
digest are kept: it is one bad row."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_LINE_BYTES = 1 << 28
PIECE_BYTES = 1 << 20
START_BYTES = 80


@dataclass(frozen=True, slots=True)
class LongLine:
    """A line of more than MAX_LINE_BYTES."""

    start: bytes
    size_bytes: int
    digest: bytes

    @property
    def problem(self) -> str:
        return f"the line has {self.size_bytes:,} bytes, and at most {MAX_LINE_BYTES:,} are read"


class LineNumbers:
    """The line, counted from 1, on which each row of a file begins. Only a row that does not begin on the line after the
    beginning of the row before takes memory.

    unit  what the numbers count, for messages: lines of a text file, or rows of a file from which only some rows are read
    """

    def __init__(self, unit: str = "line") -> None:
        self.unit = unit
        self._rows, self._lines = array("q"), array("q")

    def add(self, row: int, line: int) -> None:
        """Rows are added in order, counted from 0."""
        if not self._rows or line - self._lines[-1] != row - self._rows[-1]:
            self._rows.append(row)
            self._lines.append(line)

    def __getitem__(self, row: int) -> int:
        place = bisect_right(self._rows, row) - 1
        return self._lines[place] + row - self._rows[place]


def lines_of(file: BinaryIO) -> Iterator[bytes | LongLine]:
    """The lines from the file's position on, each with its line break."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n") else _skipped(file, line)


def _skipped(file: BinaryIO, line: bytes) -> LongLine:
    """The line that begins with these bytes; the file's position is then at its end."""
    start, size, digest = line[:START_BYTES], len(line), hashlib.sha256(line)
    del line
    while piece := file.readline(PIECE_BYTES):
        digest.update(piece)
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return LongLine(start, size, digest.digest())
