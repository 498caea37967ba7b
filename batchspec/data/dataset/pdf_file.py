"""A PDF as rows, one a page: `doc`, the file's name, `page`, from 1, and `image`, the page, which is rendered when it is due.

A PDF that cannot be read is one bad row (code bad_pdf). A page that cannot be read is one where its size or pixels are needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchspec.data.dataset.files import BATCH_BYTES, Part, check_same, reading
from batchspec.data.dataset.lines import LineNumbers
from batchspec.data.dataset.untyped_columns import PDF_MARK
from batchspec.data.storage.places import LocalPlace, Place
from batchspec.errors import CapacityError, ConfigError, InputError
from batchspec.process.limited_process import OUT_OF_MEMORY, Died, Full, Killed, LimitedProcess, TooLong

BAD_PDF = "bad_pdf"
MEMORY_BYTES, CPU_S = 4 << 30, 60
"""Limits of the process that lists the pages of a PDF."""
PAGE = pa.struct([
    ("path", pa.string()), ("page", pa.int32()), ("width", pa.float32()), ("height", pa.float32()), ("digest", pa.binary()),
    ("size_bytes", pa.int64()), ("changed_ns", pa.int64()),
])
"""The fields of `images.pdf_page.PdfPage`."""
SCHEMA = pa.schema([
    pa.field("doc", pa.string()), pa.field("page", pa.int32()), pa.field("image", PAGE, metadata={PDF_MARK: b""}),
])
ROWS_AT_ONCE = 4096


class ListPages(LimitedProcess):
    """Lists the pages of PDFs, in a process that starts with the first one."""

    module = "batchspec.images.pdf_process"
    does = "lists the pages of PDFs"
    limits: ClassVar[Mapping[int, str]] = {OUT_OF_MEMORY: "listing its pages takes more than {gib:g} GiB of memory"}
    too_long = "listing its pages takes more than {cpu_s} s"

    def __init__(self) -> None:
        super().__init__((None, MEMORY_BYTES, CPU_S))

    def sizes(self, path: Path) -> NDArray[np.float32] | str:
        """float32 [pages, 2] width and height of each page in points, or what PDFium says of bytes it cannot read. A PDF with
        which the process died is given to a new one. What another machine may list otherwise ends the job: CapacityError if the
        machine has too little memory or a limit is reached, StorageError or InputError for a file that cannot be opened."""
        try:
            return self._checked(self.result(str(path)), path)
        except Died:
            try:
                return self._checked(self.result_alone(str(path)), path)
            except (Full, TooLong) as limit:
                raise CapacityError(f"{path}: {limit}; leave it out of input.path, or divide it") from None
            except Killed as killed:
                raise CapacityError(f"{path}: {killed}; free memory and run the same command again") from None
            except Died as died:
                return f"{died}; repair it, or leave it out of input.path"

    @staticmethod
    def _checked(found: Any, path: Path) -> NDArray[np.float32] | str:
        if isinstance(found, OSError):
            with reading(str(path)):
                raise found
        assert isinstance(found, np.ndarray | str)
        return found


class PdfFile:
    """The file is read once for its digest, and its pages are listed."""

    def __init__(self, place: Place, name: str, pages: ListPages) -> None:
        """Raises InputError for a PDF in a store, ConfigError without pypdfium2, which is not imported here."""
        if not isinstance(place, LocalPlace):
            raise InputError(f"{name}: PDFs are read from disks of this machine, and not from stores; copy it to one")
        if importlib.util.find_spec("pypdfium2") is None:
            raise ConfigError("PDFs need pypdfium2, which is not installed; pip install pypdfium2")
        self.place, self.name, self.schema = place, name, SCHEMA
        digest = hashlib.sha256()
        with reading(name):
            self._stamp = place.stamp()
            self.size_bytes = self._stamp.size_bytes
            with place.open() as file:
                while data := file.read(BATCH_BYTES):
                    digest.update(data)
        self._sha, self.digest = digest.digest(), digest.hexdigest()
        self._sizes = pages.sizes(place.path)
        """As `ListPages.sizes`."""
        self.check()
        self.lines = LineNumbers("page")
        self.lines.add(0, 1)
        count = 1 if isinstance(self._sizes, str) else len(self._sizes)
        self.parts: Sequence[Part] = (Part(num_rows=count, size_bytes=self.size_bytes, place=0),)

    def read(self, part: Part, columns: list[str]) -> Iterator[pa.RecordBatch]:
        if isinstance(self._sizes, str):
            marks = {"code": BAD_PDF, "message": f"the PDF cannot be read: {self._sizes}"}
            row = {"doc": self.name, "page": None, "image": None}
            yield pa.RecordBatch.from_pylist([row], SCHEMA.with_metadata(marks)).select(columns)
            return
        common = {
            "path": str(self.place.path), "digest": self._sha, "size_bytes": self.size_bytes,
            "changed_ns": int(self._stamp.mark),
        }
        for first in range(0, len(self._sizes), ROWS_AT_ONCE):
            rows: list[dict[str, Any]] = [
                {"doc": self.name, "page": page, "image": {**common, "page": page, "width": width, "height": height}}
                for page, (width, height) in enumerate(self._sizes[first : first + ROWS_AT_ONCE].tolist(), first + 1)
            ]
            yield pa.RecordBatch.from_pylist(rows, SCHEMA).select(columns)

    def check(self) -> None:
        check_same(self.place, self.name, self._stamp)

    def digest_of(self, digest_bytes: int) -> str:
        return self.digest
