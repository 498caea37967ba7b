"""An encoded image as RGB of the size that the model reads. What transformers does, on its PIL images: turned as EXIF says,
transparency on white, converted to RGB, resized bicubically."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchspec.images.header import BadImage, opened, pillow, read_header
from batchspec.images.pdf import render
from batchspec.images.pdf_page import PdfPage
from batchspec.images.processor import Fit

if TYPE_CHECKING:
    from PIL import Image

Rgb = NDArray[np.uint8]
"""uint8 [height, width, 3]"""
_WIDE = ("I;16", "I;16L", "I;16B", "I;16N")
"""Modes of grey in 16 bits."""


def decode(source: bytes | PdfPage, fit: Fit) -> Rgb:
    """Its first frame, uint8 [fit.height, fit.width, 3]; of a page of a PDF what is rendered at this size. Raises BadImage for
    bytes that cannot be decoded."""
    if isinstance(source, PdfPage):
        return render(source, fit.height, fit.width)
    data, header = source, read_header(source)  # by another Image object: Pillow caches the first EXIF that it finds
    with opened(data) as image:
        importlib.import_module("PIL.ImageOps").exif_transpose(image, in_place=True)
        if (image.height, image.width) != (header.height, header.width):
            raise BadImage("bad_image", "its EXIF orientation is stored after the pixels; rotate the image and save it again")
        resized = opaque(image).resize((fit.width, fit.height), pillow().Resampling.BICUBIC)
        return np.asarray(resized if resized.mode == "RGB" else resized.convert("RGB"))


def opaque(image: Image.Image) -> Image.Image:
    """The image in mode RGB, transparency over white, or in mode L if all its pixels are grey. The numbers are the same. Of a
    page of 1654 x 2339 pixels one band is resized in less than half of the time of three; comparing the bands takes an eighth of
    that time.

    Grey of 16 bits keeps its upper 8, as Pillow reads colours of 16 bits; Pillow's own conversion makes everything above 255
    white. Raises BadImage for modes without a range.
    """
    if image.mode in _WIDE:
        wide = np.asarray(image).astype(np.uint16)
        grey = (wide >> 8).astype(np.uint8)
        if (transparent := image.info.get("transparency")) is not None:  # a number of 16 bits
            grey[wide == transparent] = 255
        image = pillow().fromarray(grey)
    if image.mode in ("I", "F"):
        raise BadImage("bad_image", f"its pixels are numbers of 32 bits (mode {image.mode}), whose range is unknown; save 8 bits")
    if "A" not in image.getbands() and "a" not in image.getbands() and image.info.get("transparency") is None:
        wanted = "L" if image.mode in ("1", "L") else "RGB"
        image = image if image.mode == wanted else image.convert(wanted)
    else:
        image = image.convert("RGBA")
        white = pillow().new("RGBA", image.size, (255, 255, 255, 255))
        image = pillow().alpha_composite(white, image).convert("RGB")
    return _in_one_band(image) if image.mode == "RGB" else image


def _in_one_band(image: Image.Image) -> Image.Image:
    """An image in mode RGB, in mode L if the three numbers of every pixel are equal. A few pixels are compared first: they decide
    for most photos."""
    difference = importlib.import_module("PIL.ImageChops").difference
    for own in (image.resize((16, 16), pillow().Resampling.NEAREST), image):
        red = own.getchannel(0)
        if any(difference(red, own.getchannel(band)).getbbox() for band in (1, 2)):
            return image
    return red
