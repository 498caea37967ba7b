"""A page of a PDF, as records and processes name it. It imports nothing of batchspec."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PdfPage:
    """A page of a PDF on this machine, which is rendered when its pixels are needed."""

    path: str
    page: int
    """From 1."""
    width: float
    height: float
    """As it is displayed, in points of 1/72 inch; 0 if the page cannot be read."""
    digest: bytes
    """sha256 of the file, 32 bytes."""
    size_bytes: int
    changed_ns: int
    """Of the file when it was listed: its size and the time of its last change, in nanoseconds."""
