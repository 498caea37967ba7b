"""Pillow's images, which rows in Python may hold, as bytes of encoded ones with the same pixels."""

from __future__ import annotations

import importlib
import io
import sys
from base64 import b64encode
from typing import Any

from batchspec.images.header import BEGINNINGS, BadImage, check_transparency

HEAD = "data:image/png;base64,"
"""Of a data URL, whose image may have another format."""
_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes that a PNG holds; a TIFF holds most others."""


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow, which whoever made it has imported."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def encode(image: Any) -> bytes:
    """The shown frame without loss, turned as its EXIF says: of an image of a file what reading the file gives, too. Raises
    BadImage for an image that cannot be decoded, and for a mode that no file has."""
    out, advice = io.BytesIO(), "decoded ({}); give a whole image, and call its load() before its file is closed"
    try:
        check_transparency(image)
        image.load()
        advice = "encoded ({}); convert it to RGB"
        upright = importlib.import_module("PIL.ImageOps").exif_transpose(image)
        if upright.mode in _PNG:
            upright.save(out, "PNG", compress_level=1)
        else:
            upright.save(out, "TIFF", compression="raw")  # by default that of its own file, which may be JPEG
    except BadImage as error:
        raise BadImage(error.code, f"an image of mode {image.mode}: {error}") from None
    except Exception as error:  # decoders of hostile bytes raise anything
        said = advice.format(" ".join(str(error).split()) or type(error).__name__)
        raise BadImage("bad_image", f"an image of mode {image.mode} cannot be {said}") from error
    return out.getvalue()


def with_urls(value: Any) -> Any:
    """A cell of a column that is kept as JSON text, which cannot tell bytes from text: the bytes of encoded images, also in a
    list, are replaced by data URLs."""
    if isinstance(value, list | tuple):
        return [with_urls(one) if isinstance(one, bytes | bytearray) else one for one in value]
    if isinstance(value, bytes | bytearray) and value.startswith(BEGINNINGS):
        return data_url(value)
    return value


def data_url(data: bytes | bytearray) -> str:
    return f"{HEAD}{b64encode(data).decode()}"
