"""Which files are data, judged by their names; and the text of text files, decompressed if the name says so."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO

import pyarrow as pa

from batchspec.data.dataset import files
from batchspec.data.dataset.files import ARROW, JSON_LINES, PARQUET
from batchspec.data.dataset.lines import LongLine, lines_of
from batchspec.data.storage.places import LocalPlace, Place
from batchspec.errors import InputError

CSV, PDF = (".csv",), (".pdf",)
CODECS = {".gz": "gzip", ".zst": "zstd"}
KNOWN = f"{', '.join(PARQUET + ARROW + JSON_LINES + CSV + PDF)}; text may be compressed: .jsonl{', .jsonl'.join(CODECS)}"
"""For messages."""
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff")
"""Ends of names of images, which rows name, but which are no rows."""
_MAGIC = {
    b"\x1f\x8b": "gzip data; let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "zstd data; let its name end in .zst",
    b"PAR1": "Parquet; let its name end in .parquet",
    b"ARROW1": "Arrow IPC data; let its name end in .arrow",
    b"%PDF-": "a PDF; let its name end in .pdf",
    b"\xff\xfe\x00\x00": "UTF-32 text; write it as UTF-8: iconv -f UTF-32 -t UTF-8 FILE > NEW",
    b"\xff\xfe": "UTF-16 text; write it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE > NEW",
    b"\xfe\xff": "UTF-16 text; write it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE > NEW",
}
_WIDE = [[place % width != letter for place in range(8)] for width in (2, 4) for letter in (0, width - 1)]
"""Which of the first bytes are 0 where ASCII text is in UTF-16 or UTF-32 without a mark. Other NULs are those of bad rows."""
UTF8_BOM = b"\xef\xbb\xbf"
SKIPPED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Format:
    kind: str
    """parquet, arrow, jsonl, csv or pdf."""
    codec: str | None
    """gzip, zstd or None."""


def format_of(path: PurePath) -> Format | None:
    """The format of a file with this name; None if it is not data."""
    codec = CODECS.get(path.suffix)
    suffix = path.with_suffix("").suffix if codec else path.suffix
    for kind, suffixes in (("parquet", PARQUET), ("arrow", ARROW), ("jsonl", JSON_LINES), ("csv", CSV)):
        if suffix in suffixes and not (codec and kind in ("parquet", "arrow")):
            return Format(kind, codec)
    return Format("pdf", None) if is_pdf(path) else None


def is_pdf(path: PurePath) -> bool:
    return path.suffix.lower() in PDF


class TextStream:
    """The bytes of a text file from any offset, decompressed. Going back in a compressed file reads it from its start again, so
    one stream serves all reads of a file.
    """

    def __init__(self, place: Place, codec: str | None) -> None:
        self._place, self._codec = place, codec
        self._file: BinaryIO | None = None
        self._start = 0

    @property
    def compressed(self) -> bool:
        return self._codec is not None

    def at(self, offset: int) -> BinaryIO:
        """The file, positioned at this byte of its text. A byte order mark is not part of the text."""
        if self._file is None:
            self._file = self._opened()
            self._start = len(UTF8_BOM) if _peek(self._file).startswith(UTF8_BOM) else 0
        self._file.seek(offset + self._start)
        return self._file

    def block(self, name: str, part: files.Part, *, last: bool) -> bytes:
        """The text of a part of the file `name`. Raises as `files.reading`, and InputError if its digest has changed since the
        file was opened.
        """
        with files.reading(name):
            block = self.at(part.place).read(part.size_bytes)
            if last or not self.compressed:
                self.close()
        if hashlib.sha256(block).digest() != part.digest:
            raise _changed(name, part)
        return block

    def skipped(self, name: str, part: files.Part, *, last: bool) -> LongLine:
        """As `block`, for a part that is one line that is too long."""
        with files.reading(name):
            line = next(lines_of(self.at(part.place)), None)
            if last or not self.compressed:
                self.close()
        if not isinstance(line, LongLine) or line.digest != part.digest:
            raise _changed(name, part)
        return line

    def check(self, name: str, size_bytes: int) -> None:
        """Raise InputError for a file that is another kind of data, by its size and its first bytes."""
        if self.compressed and not size_bytes:
            raise InputError(f"{name} is empty, which compressed data never is: it was cut off; write it again")
        begin = _peek(self.at(0))
        for magic, said in _MAGIC.items():
            if begin.startswith(magic):
                raise InputError(f"{name} holds {said}")
        if [byte == 0 for byte in begin[:8]] in _WIDE:
            raise InputError(f"{name} is not UTF-8 text (it begins with {begin[:8]!r}); write it as UTF-8")

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _opened(self) -> BinaryIO:
        if self._codec is not None:
            return io.BufferedReader(_Decompressed(self._raw, self._codec), files.BATCH_BYTES)
        return self._raw()

    def _raw(self) -> BinaryIO:
        file = self._place.open()
        return file if isinstance(self._place, LocalPlace) else io.BufferedReader(file, files.BATCH_BYTES)  # type: ignore[type-var]


def _changed(name: str, part: files.Part) -> InputError:
    return files.changed(name, f"other text at byte {part.place:,}")


def _peek(file: BinaryIO) -> bytes:
    at = file.tell()
    found = file.read(256)
    file.seek(at)
    return found


class _Decompressed(io.RawIOBase):
    def __init__(self, opened: Callable[[], BinaryIO], codec: str) -> None:
        super().__init__()
        self._open, self._codec = opened, codec
        self._begin()

    def _begin(self) -> None:
        self._source = self._open()
        self._file = pa.CompressedInputStream(pa.PythonFile(self._source, mode="r"), self._codec)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the end of a compressed file is not known")
        target = offset + (self._at if whence == io.SEEK_CUR else 0)
        if target < self._at:
            self._source.close()
            self._begin()
        while self._at < target and (skipped := len(self._file.read(min(SKIPPED_AT_ONCE, target - self._at)))):
            self._at += skipped
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()
