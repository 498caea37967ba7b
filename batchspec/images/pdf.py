"""Pages of PDFs as images, by PDFium (the package pypdfium2): a page is rendered once, at the size that the model reads.

PDFium reads hostile bytes and is not thread-safe: batchspec calls it in processes with limits (`pdf_process.py`,
`decode_process.py`), and only `verify` in its own.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchspec.images.header import MOST_PIXELS, BadImage, Header
from batchspec.images.pdf_page import PdfPage
from batchspec.process.local_files import open_regular

DPI = 200
"""Pixels per inch of a page before it is fitted to the limits of the model or the job (input.max_pixels, min_pixels)."""
MOST_PAGES = 100_000
FEW_PAGES, MOST_IN_A_ROW = 8, 1000
"""A PDF is damaged if more than FEW_PAGES of its pages cannot be read and these are over half, or so many in a row. A damaged or
hostile file of a few bytes may count any number of pages."""
MOST_RENDERED = 64
"""Pages for which a document stays open: PDFium keeps what they have in common, such as fonts, and nothing says how much."""
_POINTS = 72
_ONE_AT_A_TIME = threading.Lock()


class BadPdf(BadImage):
    """Why no page of a PDF can be read. Of one that was listed before another attempt may succeed: its disk may have failed."""

    def __init__(self, message: str) -> None:
        super().__init__("bad_pdf", message, retryable=True)


def header_of(page: PdfPage) -> Header:
    """The size in pixels of a page at DPI, or fewer per inch where it would exceed MOST_PIXELS. Raises BadImage for a page that
    cannot be read."""
    area = page.width * page.height
    if not (math.isfinite(area) and area > 0):
        raise BadImage("bad_image", f"page {page.page} of the PDF cannot be read; repair the PDF")
    scale = min(DPI / _POINTS, math.sqrt(MOST_PIXELS / page.width) / math.sqrt(page.height))
    return Header("PDF", *(max(1, math.floor(side * scale)) for side in (page.height, page.width)))


def identity_of(page: PdfPage) -> bytes:
    """What decides its pixels at a size."""
    return page.digest + page.page.to_bytes(4, "little")


def sizes_of(path: str) -> NDArray[np.float32]:
    """float32 [pages, 2] width and height of each page in points, 0 of a page that cannot be read. Raises BadPdf, also if most
    pages cannot be read."""
    with _pdfium() as (module, raw), _unkept(path, module, raw) as document:
        count = len(document)
        if not count:
            raise BadPdf("it has no pages; repair it, or leave it out of input.path")
        if count > MOST_PAGES:
            raise BadPdf(f"it has {count:,} pages, and at most {MOST_PAGES:,} are read; divide it")
        sizes, read, last = np.zeros((count, 2), np.float32), 0, -1
        for number in range(count):
            with suppress(module.PdfiumError):
                sizes[number] = document.get_page_size(number)
            if sizes[number].min() > 0:
                read, last = read + 1, number
            elif number - last >= MOST_IN_A_ROW:
                raise _unreadable(f"pages {last + 2:,} to {number + 1:,}", count)
        if (bad := count - read) > max(FEW_PAGES, count // 2):
            raise _unreadable(f"{bad:,}", count)
        return sizes


def _unreadable(which: str, count: int) -> BadPdf:
    return BadPdf(f"{which} of its {count:,} pages cannot be read; repair it, or leave it out of input.path")


def render(page: PdfPage, height: int, width: int) -> NDArray[np.uint8]:
    """The page on white, uint8 [height, width, 3], with annotations and filled forms. Raises BadImage if it cannot be rendered,
    or the file changed since it was listed."""
    with _pdfium() as (module, raw):
        facts = _facts(page.path)
        if (facts.st_size, facts.st_mtime_ns) != (page.size_bytes, page.changed_ns):
            raise BadImage("bad_image", "its PDF changed while the job runs; put the old file back", retryable=True)
        with _LAST.of(page.path, facts, module, raw) as document:
            try:
                opened = document[page.page - 1]
            except module.PdfiumError:
                raise BadImage("bad_image", f"page {page.page} of the PDF cannot be read; repair the PDF") from None
            with closing(opened) as loaded, closing(module.PdfBitmap.new_native(width, height, raw.FPDFBitmap_BGR)) as bitmap:
                bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
                place = (0, 0, width, height, 0, raw.FPDF_ANNOT | raw.FPDF_REVERSE_BYTE_ORDER)
                raw.FPDF_RenderPageBitmap(bitmap, loaded, *place)
                if document.formenv is not None:
                    raw.FPDF_FFLDraw(document.formenv, bitmap, loaded, *place)
                return np.array(bitmap.to_numpy())  # a copy: the bitmap's memory ends with it


class _LastDocument:
    """The document of the page that was rendered last, open with its forms: pages of a PDF mostly come one after another."""

    def __init__(self) -> None:
        self._document: Any = None
        self._key: tuple[str | int, ...] | None = None
        self._num_pages = 0

    @contextmanager
    def of(self, path: str, facts: os.stat_result, module: ModuleType, raw: ModuleType) -> Iterator[Any]:
        """The document of a file with these facts. It is opened again if the file is another one or has changed, after an error,
        and after MOST_RENDERED pages."""
        key = (path, facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if key != self._key or self._num_pages == MOST_RENDERED:
            self._close()
            self._document = _load(path, module, raw)
            atexit.unregister(self._close)
            atexit.register(self._close)  # before what pypdfium2 registers, which complains of open documents
            self._document.init_forms()
            self._key = key
        self._num_pages += 1
        try:
            yield self._document
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        document, self._document, self._key, self._num_pages = self._document, None, None, 0
        if document is not None:
            document.close()


_LAST = _LastDocument()
"""Of this process; `_pdfium` lets one thread at a time use it."""


@contextmanager
def _unkept(path: str, module: ModuleType, raw: ModuleType) -> Iterator[Any]:
    """The document of a file, closed at the end of this block."""
    _facts(path)  # it is a regular file
    with closing(_load(path, module, raw)) as document:
        yield document


def _facts(path: str) -> os.stat_result:
    """Of a file, if it can be opened. Raises BadPdf."""
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno())  # over NFS `stat` may be a minute old
    except OSError as error:
        raise BadPdf(f"it cannot be opened ({error.strerror or error})") from error


def _load(path: str, module: ModuleType, raw: ModuleType) -> Any:
    # Not by PdfDocument(path): of a document without pages that tells the error of an earlier one.
    loaded = raw.FPDF_LoadDocument(os.fsencode(path) + b"\0", None)
    if not loaded and raw.FPDF_GetLastError() == raw.FPDF_ERR_PASSWORD:
        raise BadPdf("it needs a password; save it without one")
    if not loaded:
        raise BadPdf("it is damaged, or no PDF; repair it, or leave it out of input.path")
    return module.PdfDocument(loaded)


@contextmanager
def _pdfium() -> Iterator[tuple[ModuleType, ModuleType]]:
    """pypdfium2 and its raw functions, for one thread at a time. Raises BadPdf for what they raise within this block."""
    module, raw = importlib.import_module("pypdfium2"), importlib.import_module("pypdfium2.raw")
    with _ONE_AT_A_TIME:
        try:
            yield module, raw
        except BadImage:
            raise
        except Exception as error:  # of hostile bytes
            said = " ".join(str(error).split()) or type(error).__name__
            raise BadPdf(f"PDFium cannot read it ({said}); repair it, or leave it out of input.path") from error
