"""Pixels are those of transformers' processor on Pillow's images, for every mode, format and turn; hostile bytes are refused."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.ImageFile import ImageFile
from transformers import Qwen2VLImageProcessorPil

from batchspec.images.decode import decode, opaque
from batchspec.images.encode import encode, is_image
from batchspec.images.header import MOST_BYTES, SUBFILE, BadImage, read_header
from batchspec.images.processor import Fit
from batchspec.model.vision.blocks import merge_order
from tests.helpers.image_models import PREPROCESSOR, picture
from tests.images.test_processor import processor

OWN = processor(4)
THEIRS = Qwen2VLImageProcessorPil(**{key: value for key, value in PREPROCESSOR.items() if key != "image_processor_type"})
FORMATS = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"), "JPEG": ("L", "RGB", "CMYK"), "WEBP": ("RGB", "RGBA"), "GIF": ("L", "P", "RGBA"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"),
}


def made(mode: str, format: str, height: int, width: int, seed: int, turn: int = 1) -> bytes:
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 4), dtype=np.uint8), "RGBA")
    exif = Image.Exif()
    exif[0x0112] = turn
    out = io.BytesIO()
    more: dict[str, Any] = {"GIF": {}, "WEBP": {"exif": exif, "lossless": True}}.get(format, {"exif": exif})
    image.convert(mode).save(out, format, **more)
    return out.getvalue()


def theirs(data: bytes) -> Any:
    return THEIRS([ImageOps.exif_transpose(Image.open(io.BytesIO(data)))], return_tensors="pt")["pixel_values"]


def ours(data: bytes) -> torch.Tensor:
    """Patches [N, 3 * 2 * 4 * 4] in the order of merged squares."""
    header = read_header(data)
    fit = OWN.fit(header.height, header.width)
    pixels = decode(data, fit)
    values = OWN.values[np.arange(3), pixels]  # [H, W, 3]
    rows, cols = merge_order((fit.height // 4, fit.width // 4), 2).numpy()
    cells = values.reshape(fit.height // 4, 4, fit.width // 4, 4, 3).transpose(0, 2, 4, 1, 3)[rows, cols]
    return torch.from_numpy(cells[:, :, None].repeat(2, 2).reshape(len(cells), -1))


@settings(max_examples=120)
@given(st.data(), st.integers(1, 90), st.integers(1, 90), st.integers(0, 99), st.integers(1, 8))
def test_pixels_are_those_of_transformers_bit_for_bit(data: Any, height: int, width: int, seed: int, turn: int) -> None:
    format = data.draw(st.sampled_from(sorted(FORMATS)))
    encoded = made(data.draw(st.sampled_from(FORMATS[format])), format, height, width, seed, turn)
    assert torch.equal(ours(encoded), theirs(encoded))


@pytest.mark.parametrize(
    ("format", "coloured"), [("PNG", None), ("TIFF", None), ("JPEG", None), ("PNG", (0, 0)), ("TIFF", (0, 60)), ("PNG", (57, 33))]
)
def test_grey_pixels_in_mode_rgb_are_those_of_transformers_whether_or_not_one_has_a_colour(
    format: str, coloured: tuple[int, int] | None
) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (58, 61, 1), dtype=np.uint8)
    pixels, out = grey.repeat(3, 2), io.BytesIO()
    if coloured is not None:
        pixels[coloured] ^= np.array([0, 0, 128], np.uint8)
    Image.fromarray(pixels, "RGB").save(out, format)
    own, patches = opaque(Image.open(io.BytesIO(out.getvalue()))), ours(out.getvalue())
    assert own.mode == ("L" if coloured is None else "RGB")
    assert torch.equal(patches, theirs(out.getvalue()))


@settings(max_examples=60)
@given(st.data(), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99), st.integers(1, 8))
def test_an_image_of_pillow_has_the_pixels_of_its_file(data: Any, height: int, width: int, seed: int, turn: int) -> None:
    format = data.draw(st.sampled_from(sorted(FORMATS)))
    file = made(data.draw(st.sampled_from(FORMATS[format])), format, height, width, seed, turn)
    image = Image.open(io.BytesIO(file))
    again, header = encode(image), read_header(file)
    assert read_header(again).height == header.height
    fit = Fit(header.height, header.width)
    assert (decode(again, fit) == decode(file, fit)).all()
    assert is_image(image)
    assert not is_image(file)


def test_an_image_of_pillow_with_sixteen_bits_stays_what_it_is_and_one_that_no_file_holds_is_refused() -> None:
    wide = Image.fromarray(np.array([[0, 300, 65535]], np.uint16))
    wide.info["transparency"] = 300
    assert decode(encode(wide), Fit(1, 3))[0, :, 0].tolist() == [0, 255, 255]
    with pytest.raises(BadImage, match="mode F"):
        decode(encode(Image.new("F", (2, 2))), Fit(2, 2))
    with pytest.raises(BadImage, match=r"^an image of mode HSV cannot be encoded \(.*\); convert it to RGB$"):
        encode(Image.new("HSV", (2, 2)))


def test_an_image_of_pillow_that_cannot_be_decoded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(40, 40))
    with Image.open(tmp_path / "a.png") as closed:
        pass
    for image in (closed, Image.open(io.BytesIO(picture(40, 40)[:-200]))):
        with pytest.raises(BadImage, match=r"^an image of mode RGB cannot be decoded \(.+\); give a whole image, and call its "):
            encode(image)


def test_an_image_of_pillow_from_a_tiff_with_jpeg_in_it_is_not_compressed_by_jpeg_again() -> None:
    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 4), np.uint8)
    Image.fromarray(pixels, "CMYK").save(out, "TIFF", compression="jpeg")
    again = encode(Image.open(io.BytesIO(out.getvalue())))
    assert (decode(again, Fit(32, 32)) == decode(out.getvalue(), Fit(32, 32))).all()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_header_has_the_size_after_the_turn_of_exif(format: str, turn: int) -> None:
    data = made("RGB", format, 20, 30, 0, turn)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert read_header(data) == (type(read_header(data)))(format, turned.height, turned.width)
    assert (turned.height < turned.width) == (turn < 5)


def test_a_header_is_read_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [made("RGB", format, 8, 8, 0) for format in ("JPEG", "PNG", "TIFF")]

    def refuse(self: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile, "load", refuse)
    assert [read_header(data).height for data in files] == [8, 8, 8]


def test_grey_of_sixteen_bits_keeps_its_upper_eight() -> None:
    values = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG")
    assert (decode(out.getvalue(), Fit(32, 32)) == (values >> 8).astype(np.uint8)[..., None]).all()


@pytest.mark.parametrize("transparent", [0, 300, 65535])
def test_one_grey_of_sixteen_bits_may_be_transparent(transparent: int) -> None:
    """Others with the same upper 8 bits are not."""
    values = np.array([[0, 1, 256], [300, 301, 511], [65280, 65534, 65535]], np.uint16)
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG", transparency=transparent)
    expected = np.where(values == transparent, 255, values >> 8).astype(np.uint8)
    assert (decode(out.getvalue(), Fit(3, 3)) == expected[..., None]).all()


@pytest.mark.parametrize("colour", [(0, 0, 0), (300, 2, 65535)])
def test_a_transparent_colour_of_sixteen_bits_is_refused_before_it_is_decoded(colour: tuple[int, int, int]) -> None:
    """Pillow has 8 bits of colours, and more of them would be transparent than one, or none."""
    head = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    row = b"\0" + struct.pack(">6H", *colour, 7, 8, 9)
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in (
            (b"IHDR", head), (b"tRNS", struct.pack(">3H", *colour)), (b"IDAT", zlib.compress(row)), (b"IEND", b""),
        )
    )
    for read in (read_header, lambda file: encode(Image.open(io.BytesIO(file)))):
        with pytest.raises(BadImage, match="one colour of 16 bits is transparent") as caught:
            read(data)
        assert caught.value.code == "bad_image"
    plain = data.replace(data[33 : 33 + 18], b"")
    assert read_header(plain).width == 2
    assert decode(plain, Fit(1, 2))[0, 0].tolist() == [value >> 8 for value in colour]


def test_exif_after_the_pixels_of_a_png_does_not_turn_them_silently() -> None:
    data = made("RGB", "PNG", 8, 12, 0, 6)
    begin = data.index(b"eXIf") - 4
    end = begin + 12 + struct.unpack(">I", data[begin : begin + 4])[0]
    moved = data[:begin] + data[end:-12] + data[begin:end] + data[-12:]
    with pytest.raises(BadImage, match="EXIF orientation is stored after the pixels"):
        decode(moved, Fit(8, 12))


def png(width: int, height: int) -> bytes:
    """The header of a PNG of this size, without pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    begin = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body
    return begin + struct.pack(">I", zlib.crc32(body)) + struct.pack(">I", 5) + b"IDAT"


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"", "bad_image", "begins with nothing"), (b"hello world", "bad_image", "begins with 68 65 6c 6c 6f"),
        (picture(9, 9, format="BMP"), "bad_image", "begins with 42 4d"),
        (png(20000, 20000), "large_image", r"^400000000 pixels exceed the limit of 89,478,485 pixels; make the image smaller$"),
        (png(10000, 9000), "large_image", "10000 x 9000 pixels exceed the limit"),
        (bytes(MOST_BYTES + 1), "large_image", "bytes exceed the limit"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_usable_image_are_refused_before_they_are_decoded(data: bytes, code: str, said: str) -> None:
    with pytest.raises(BadImage, match=said) as caught:
        read_header(data)
    assert caught.value.code == code


def tiff(*pages: tuple[int, int]) -> bytes:
    """A TIFF with pages of these sides and values of NewSubfileType."""
    first, *others = [Image.new("RGB", (side, side)) for side, _ in pages]
    for image, (_, kind) in zip([first, *others], pages, strict=True):
        image.encoderinfo = {"tiffinfo": {SUBFILE: kind}}
    out = io.BytesIO()
    first.save(out, "TIFF", save_all=True, append_images=others, tiffinfo={SUBFILE: pages[0][1]})
    return out.getvalue()


def test_a_tiff_of_several_pages_is_refused_and_smaller_copies_and_masks_are_none() -> None:
    assert read_header(tiff((8, 0))).height == 8
    assert read_header(tiff((8, 0), (4, 1), (8, 4), (2, 1))).height == 8
    for pages in ([(8, 0), (8, 0)], [(8, 2), (8, 2)], [(8, 0), (4, 1), (8, 0)], [(8, 0)] + [(4, 1)] * 40):
        with pytest.raises(BadImage, match="a TIFF of several pages") as caught:
            read_header(tiff(*pages))
        assert caught.value.code == "bad_image"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
@pytest.mark.filterwarnings("ignore")
def test_a_cut_image_is_refused_or_decoded_whole(format: str) -> None:
    """Whatever the header says, no pixel of a cut file is made up."""
    data = picture(40, 40, format=format)
    for end in range(len(data) // 8, len(data) * 7 // 8, len(data) // 8):
        with pytest.raises(BadImage) as caught:
            decode(data[:end], Fit(40, 40))
        assert caught.value.code == "bad_image"


def test_numbers_of_32_bits_are_refused() -> None:
    out = io.BytesIO()
    Image.fromarray(np.ones((4, 4), np.float32)).save(out, "TIFF")
    with pytest.raises(BadImage, match="mode F"):
        decode(out.getvalue(), Fit(4, 4))


