"""The images of a row's prompt: from its cells and the parts of its chat to pieces of the token ids. Bad ones raise BadRow.

missing_image  an image that is null, is no file below input.image_root, or is a URL: nothing is fetched
bad_image      bytes or base64 that are no image that is read; extreme sides
large_image    more bytes or pixels than the limit, found before it is decoded
image_count    images of the row's column and the places for them differ in number; a placeholder in a text
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchspec.console.text import counted, quoted
from batchspec.data.dataset.image_files import MISSING_IMAGE, ImageFiles
from batchspec.data.dataset.messages import IMAGE_MARK, IMAGE_PART, FromColumn, Message
from batchspec.errors import BadRow
from batchspec.images.encode import HEAD
from batchspec.images.header import BEGINNINGS, MOST_BYTES, BadImage, read_header
from batchspec.images.pdf import header_of, identity_of
from batchspec.images.pdf_page import PdfPage
from batchspec.images.processor import ImageProcessor
from batchspec.packing.cells import number_option
from batchspec.records import Ids, ImagePiece

_BASE64 = ";base64,"
_BASE64_HEADS, _LONG = tuple(b64encode(own).decode()[: len(own) * 8 // 6] for own in BEGINNINGS), 200
"""How the base64 of an image begins, six bits a character, and a length that is no path's."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt and its images."""

    ids: Ids
    images: tuple[ImagePiece, ...] = ()


@dataclass(slots=True)
class PromptImages:
    """Reads images by the processor of a model."""

    processor: ImageProcessor
    from_column: bool
    """Whether rows have a column of images, which their chats mark."""
    files: ImageFiles | None
    """The images that are named by a path; None: none is."""
    of_pages: bool = False
    """Whether the column has pages of PDFs."""

    def processor_of(self, row: Mapping[str, Any]) -> ImageProcessor:
        """The processor with the row's own limits on pixels. Raises BadRow for limits that no size fits, and for more pixels than
        the job's limit, for which memory was planned."""
        least, most = (number_option(name, row) for name in ("min_pixels", "max_pixels"))
        if least is None and most is None:
            return self.processor
        try:
            found = self.processor.within(None if least is None else int(least), None if most is None else int(most))
        except ValueError as error:
            raise BadRow("bad_parameter", f"{error}; correct it or leave it null") from None
        if most is not None and most > self.processor.max_pixels:
            limit = f"the job's limit of {self.processor.max_pixels}"
            raise BadRow("bad_parameter", f"max_pixels={int(most)} exceeds {limit}; lower it or raise input.max_pixels")
        return found

    def placed(
        self, turns: Sequence[Message], given: Sequence[Any], cell: Any, *, adds: bool
    ) -> tuple[list[Message], list[bytes | PdfPage]]:
        """The chat with a part for each image, and the encoded images, or pages, in the order of these parts.

        given  what each image part of the chat gives: bytes, a data URL, {bytes}, or `FromColumn`
        cell   the row's column of images
        adds   a chat without marks has all images of the column before the text of its only turn
        """
        column = [] if cell is None else list(cell) if isinstance(cell, list) else [cell]
        turns, given = list(turns), list(given)
        if self.from_column:
            turns, given = _with_marks(turns, given)
            if adds and cell is None:
                raise BadRow(MISSING_IMAGE, "the row's image is null; give one, or drop the row")
            if adds and not given:
                turns[-1] = {**turns[-1], "content": [*(IMAGE_PART for _ in column), *_parts(turns[-1]["content"])]}
                given = [FromColumn()] * len(column)
        marks = sum(isinstance(one, FromColumn) for one in given)
        if marks != len(column):
            named = "" if self.from_column else ", or name the column: input.columns.images=COLUMN"
            raise BadRow(
                "image_count",
                f"the chat has {counted(marks, 'place')} for images ({{type: image}} or {IMAGE_MARK}), and the row's column has "
                f"{counted(len(column), 'image')}; correct the row{named}",
            )
        left = iter(column)
        return turns, [
            self._encoded(next(left) if isinstance(one, FromColumn) else one, number) for number, one in enumerate(given, 1)
        ]

    def _encoded(self, given: Any, number: int) -> bytes | PdfPage:
        """The bytes of an image: of itself, of a struct {bytes, path}, of a data URL, or of a file below `root`; or a page."""
        if self.of_pages and given is not None:
            return PdfPage(**given)
        if isinstance(given, Mapping):
            data = given.get("bytes")
            given = f"{HEAD}{data}" if data and isinstance(data, str) else data or given.get("path")  # text: of a cell of JSON
        if isinstance(given, bytes | bytearray | memoryview):
            return bytes(given)
        if given is None or given == "":
            raise BadRow(MISSING_IMAGE, f"image {number} is null or empty; give its bytes, or take its part out of the chat")
        if not isinstance(given, str):
            raise BadRow("bad_image", f"image {number} must be bytes, {{bytes, path}}, a path or a data URL; correct it")
        if given.startswith("data:"):
            return of_data_url(given, number)
        if len(given) > _LONG and given.startswith(_BASE64_HEADS):
            raise BadRow("bad_image", f"image {number} is base64 without a head; write data:image/png;base64, before it")
        if self.files is not None:
            return self.files.read(given, number, MOST_BYTES + 1)
        said = "the path {}, and input.image_root is not set; set it, or give the image's bytes"
        if "://" in given:
            said = "the URL {}, and URLs are not downloaded; give its bytes, or a path below input.image_root"
        raise BadRow(MISSING_IMAGE, f"image {number} is {said.format(quoted(given[:80]))}")

    def expanded(self, ids: Ids, images: Sequence[bytes | PdfPage], row: Mapping[str, Any]) -> Prompt:
        """The prompt in which each placeholder is as many tokens as its image takes, by the limits on pixels of this row."""
        places = np.flatnonzero(ids == self.processor.placeholder)
        if len(places) != len(images):
            raise BadRow(
                "image_count",
                f"the prompt has {len(places)} placeholders (token {self.processor.placeholder}) for {len(images)} images; a "
                "text must not hold the placeholder, and the chat template must write one for each image; correct the row",
            )
        pieces, processor = list[ImagePiece](), self.processor_of(row)
        parts, shift, after = list[Ids](), 0, 0
        for number, (place, source) in enumerate(zip(places.tolist(), images, strict=True), 1):
            before, behind = (np.array(own, np.int32) for own in processor.around)
            piece = _piece(processor, source, place + shift + len(before), number)
            parts += [ids[after:place], before, processor.tokens(piece.rows, piece.cols), behind]
            pieces.append(piece)
            shift, after = shift + len(before) + piece.length + len(behind) - 1, place + 1
        return Prompt(np.concatenate([*parts, ids[after:]]), tuple(pieces))


def _piece(processor: ImageProcessor, source: bytes | PdfPage, begin: int, number: int) -> ImagePiece:
    try:
        header = header_of(source) if isinstance(source, PdfPage) else read_header(source)
        fit = processor.fit(header.height, header.width)
    except BadImage as error:
        raise BadRow(error.code, f"image {number}: {error}") from None
    data, made = (identity_of(source), fit) if isinstance(source, PdfPage) else (source, header)
    return ImagePiece(
        begin=begin, **processor.of_size(fit), encoded_pixels=made.height * made.width, digest=processor.digest(data, fit),
        source=source,
    )


def _with_marks(turns: Sequence[Message], given: Sequence[Any]) -> tuple[list[Message], list[Any]]:
    """The chat whose users' marks are image parts, and what all image parts give, in their order."""
    found: list[Message] = []
    sources, left = list[Any](), iter(given)
    for turn in turns:
        content = turn.get("content")
        parts = _parts(content)
        if turn["role"] == "user" and any(IMAGE_MARK in part.get("text", "") for part in parts):
            parts = [piece for part in parts for piece in _split(part)]
            turn = {**turn, "content": [IMAGE_PART if part.get("type") == "mark" else part for part in parts]}
        sources += [FromColumn() if part["type"] == "mark" else next(left) for part in parts if part["type"] in ("mark", "image")]
        found.append(turn)
    return found, sources


def _parts(content: Any) -> list[Mapping[str, str]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _split(part: Mapping[str, str]) -> list[Mapping[str, str]]:
    if part["type"] != "text":
        return [part]
    found: list[Mapping[str, str]] = []
    for number, text in enumerate(part["text"].split(IMAGE_MARK)):
        found += [{"type": "mark"}] if number else []
        found += [{"type": "text", "text": text}] if text else []
    return found


def of_data_url(url: str, number: int) -> bytes:
    """The bytes in a data URL. number: of the image in its row, from 1, for messages."""
    head, found, data = url.partition(_BASE64)
    if not found or not head.startswith("data:image/"):
        raise BadRow("bad_image", f"image {number} is a URL that begins with {quoted(url[:40])}; write data:image/png;base64,")
    try:
        return b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow("bad_image", f"image {number}: its base64 is not valid ({error}); correct it") from None
