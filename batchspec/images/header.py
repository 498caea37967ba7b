"""The size of an encoded image, read from its header: no pixel is decoded. Pillow is imported at the first image."""

from __future__ import annotations

import importlib
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from batchspec.errors import ConfigError, OneLine

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF")
"""Formats that are read, as Pillow names them. Of a GIF, PNG or WebP with several frames the first is taken."""
BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n\0", b"RIFF", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
"""How the bytes of an image of one of these formats begin."""
MOST_BYTES, MOST_PIXELS = 64 << 20, 89_478_485
"""Limits on an encoded image and on its pixels, before it is decoded. The second is Pillow's own, 256 MB of RGB."""
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)
"""The EXIF tag Orientation, and its values that swap width and height."""
SUBFILE, NO_PAGE, MOST_SMALLER = 254, 0b101, 32
"""The tag NewSubfileType of TIFF, its bits for a smaller copy and for a mask, and the number of these that a page may have."""

WIDE_COLOURS = "RGB;16B"
"""Pillow's name for the pixels of a PNG with colours of 16 bits. It compares their upper 8 bits with the 16 of the one that is
transparent."""


class BadImage(OneLine, ValueError):
    """Why an image cannot be used. code: of the error row; retryable: another attempt may succeed."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code, self.retryable = code, retryable


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of an encoded image says. height, width: in pixels, after the turn that EXIF asks for."""

    format: str
    height: int
    width: int


def read_header(data: bytes) -> Header:
    """The header of an encoded image. Raises BadImage: bad_image for bytes that are none of FORMATS, large_image beyond the
    limits; ConfigError without Pillow."""
    with opened(data) as image:
        width, height = image.size
        # A PNG's own `getexif` decodes it, to look for EXIF after the pixels. Pillow has swapped the size of a TIFF already.
        check_transparency(image)
        turns = image.format != "TIFF" and pillow().Image.getexif(image).get(ORIENTATION) in SIDEWAYS
        if image.format == "TIFF" and _has_second_page(image):
            raise BadImage("bad_image", "a TIFF of several pages, and one is read; make a PDF of it, or an image of each page")
        return Header(str(image.format), *((width, height) if turns else (height, width)))


def check_transparency(image: Any) -> None:
    """Raises BadImage if one colour is transparent and colours have 16 bits. A decoded image no longer says that it had 16 bits a
    colour, unless the transparent colour exceeds 8 bits."""
    found = image.info.get("transparency")
    wide = isinstance(found, tuple) and max(found) > 255
    if found is not None and (wide or any(tile[3] == WIDE_COLOURS for tile in getattr(image, "tile", ()))):
        said = "one colour of 16 bits is transparent, and colours are read with 8 bits; save it with an alpha channel"
        raise BadImage("bad_image", said)


def _has_second_page(image: Any) -> bool:
    """Whether a TIFF has another page, which a job would leave out, rather than smaller copies or a mask of the first."""
    for number in range(1, MOST_SMALLER):
        try:
            image.seek(number)
        except EOFError:
            return False
        if not image.tag_v2.get(SUBFILE, 0) & NO_PAGE:
            return True
    return True


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """The image of these bytes, checked and not decoded. What Pillow raises within this block becomes BadImage."""
    module = pillow()
    if len(data) > MOST_BYTES:
        raise BadImage("large_image", f"{len(data):,} bytes exceed the limit of {MOST_BYTES:,}; make the image smaller")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, and of sizes that are checked below
            with module.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MOST_PIXELS:
                    raise _large(f"{width} x {height} pixels")
                yield image
    except BadImage:
        raise
    except module.DecompressionBombError as error:
        found = re.search(r"\d+ pixels", str(error))  # Pillow also names its own limit, twice that of `_large`
        raise _large(found[0] if found else "its pixels") from None
    except module.UnidentifiedImageError:
        if data.startswith(b"%PDF-"):
            raise BadImage("bad_image", "it is a PDF; name the file in input.path, where each page is a row") from None
        begin = data[:8].hex(" ")
        raise BadImage("bad_image", f"it begins with {begin or 'nothing'}; JPEG, PNG, WebP, GIF and TIFF are read") from None
    except Exception as error:  # decoders of hostile bytes raise anything
        said = " ".join(str(error).split()) or type(error).__name__
        raise BadImage("bad_image", f"Pillow cannot read it ({said}); correct it") from error


def _large(size: str) -> BadImage:
    return BadImage("large_image", f"{size} exceed the limit of {MOST_PIXELS:,} pixels; make the image smaller")


def pillow() -> ModuleType:
    """The module PIL.Image. Raises ConfigError where Pillow is not installed."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise ConfigError("images need Pillow, which is not installed; pip install pillow") from None
