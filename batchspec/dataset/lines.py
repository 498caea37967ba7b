"""The lines of a text file. Of one that is too long to be read only the size and a digest are kept: it is one bad row."""

from __future__ import annotations

import hashlib
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
