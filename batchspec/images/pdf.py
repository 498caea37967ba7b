"""Pages of PDFs as images, by PDFium (the package pypdfium2): a page is rendered once, at the size that the model reads.

PDFium reads hostile bytes and is not thread-safe: batchspec calls it in processes with limits (`pdf_process.py`,
`decode_process.py`), and only `verify` in its own.
"""

from __future__ import annotations

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
    with _opened(path) as (module, document, _):
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
    with _opened(page.path) as (module, document, facts):
        if (facts.st_size, facts.st_mtime_ns) != (page.size_bytes, page.changed_ns):
            raise BadImage("bad_image", "its PDF changed while the job runs; put the old file back", retryable=True)
        raw = importlib.import_module("pypdfium2.raw")
        document.init_forms()
        try:
            loaded = document[page.page - 1]
        except module.PdfiumError:
            raise BadImage("bad_image", f"page {page.page} of the PDF cannot be read; repair the PDF") from None
        bitmap = module.PdfBitmap.new_native(width, height, raw.FPDFBitmap_BGR)
        bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
        place = (0, 0, width, height, 0, raw.FPDF_ANNOT | raw.FPDF_REVERSE_BYTE_ORDER)
        raw.FPDF_RenderPageBitmap(bitmap, loaded, *place)
        if document.formenv is not None:
            raw.FPDF_FFLDraw(document.formenv, bitmap, loaded, *place)
        return np.array(bitmap.to_numpy())  # a copy: the bitmap's memory ends with it


@contextmanager
def _opened(path: str) -> Iterator[tuple[ModuleType, Any, os.stat_result]]:
    """pypdfium2, the document and the facts about its file. Raises BadPdf for one that cannot be opened, and for what
    PDFium raises within this block."""
    module, raw = importlib.import_module("pypdfium2"), importlib.import_module("pypdfium2.raw")
    with _ONE_AT_A_TIME:
        try:
            with open_regular(path) as file:
                facts = os.fstat(file.fileno())  # over NFS `stat` may be a minute old
            # Not by PdfDocument(path): of a document without pages that tells the error of an earlier one.
            loaded = raw.FPDF_LoadDocument(os.fsencode(path) + b"\0", None)
            if not loaded and raw.FPDF_GetLastError() == raw.FPDF_ERR_PASSWORD:
                raise BadPdf("it needs a password; save it without one")
            if not loaded:
                raise BadPdf("it is damaged, or no PDF; repair it, or leave it out of input.path")
            with closing(module.PdfDocument(loaded)) as document:
                yield module, document, facts
        except BadImage:
            raise
        except OSError as error:
            raise BadPdf(f"it cannot be opened ({error.strerror or error})") from error
        except Exception as error:  # of hostile bytes
            said = " ".join(str(error).split()) or type(error).__name__
            raise BadPdf(f"PDFium cannot read it ({said}); repair it, or leave it out of input.path") from error
