"""Small pictures of the images of the rows that the report shows, as HTML."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from batchspec.console.text import MESSAGE_CHARS
from batchspec.job.report import html


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image, made small."""

    jpeg: bytes
    height: int
    width: int
    """In pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImages:
    """The first images of a row."""

    shown: Sequence[Picture | str]
    """Each as a picture, or the reason why it is not shown."""
    count: int
    """All images of the row."""

    def html(self) -> str:
        parts = [_of_image(one, f"image {number} of {self.count}") for number, one in enumerate(self.shown, 1)]
        if more := self.count - len(self.shown):
            parts.append(f'<span class="note">and {more:,} more</span>')
        return f'<div class="images">{"".join(parts)}</div>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnails:
    """The images of rows that are shown."""

    of_row: Mapping[int, RowImages] = field(default_factory=dict)
    """By row_index; rows without images are left out."""
    note: str = ""
    """Why none is shown; empty: the rows say it."""

    def html(self, row_index: int) -> str:
        return self.of_row[row_index].html() if row_index in self.of_row else ""


def _of_image(one: Picture | str, name: str) -> str:
    if isinstance(one, str):
        return f'<span class="note">{name}: {html.line(one, MESSAGE_CHARS)}</span>'
    source = f"data:image/jpeg;base64,{b64encode(one.jpeg).decode()}"
    return f'<img src="{source}" width="{one.width}" height="{one.height}" alt="{name}">'
