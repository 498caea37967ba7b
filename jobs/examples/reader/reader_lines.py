"""Lines of text for a model that learns to read: what they say, and masks that PIL draws of them. numpy and Pillow alone.

A line is words, numbers and random strings with punctuation between them. What some fonts draw alike (I l |, O 0) is left out of
random strings, so that a reader can know each character: in words and numbers the neighbours tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import batchspec

ROOT = Path(batchspec.__file__).parents[1]
UNSEEN = "Cantarell-Regular"
"""The font that training leaves out unless another one is named."""
MOST = 40
"""Characters of a line at most."""
LETTERS = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
MIXED = LETTERS * 2 + "23456789" * 3 + "1#@%&+=*/-.:"
ENDS = ",.:;!?"
SIZES = (18, 33)
"""Range of font sizes in pixels."""
MARGIN, HEIGHTS, UNIT, WIDEST = 6, (48, 64), 16, 736
"""Pixels left and right of a line; heights of pictures; their widths are multiples of the third, and at most the last."""


@dataclass(frozen=True, slots=True)
class Lines:
    """A batch of lines on canvases of one size."""

    masks: NDArray[np.uint8]
    """[B, height, width] how much of each pixel is ink, 0 to 255; lines are horizontal, in the middle."""
    chars: NDArray[np.uint8]
    """[B, MOST] characters as ASCII, 0 after the end."""
    edges: NDArray[np.int16]
    """[B, MOST + 1] x of the left edge of each character, then of the end of the last one; -1 further."""
    room: NDArray[np.float32]
    """[B] radians by which the line may turn without leaving the canvas."""

    @property
    def texts(self) -> list[str]:
        return [bytes(row[row > 0]).decode() for row in self.chars]


@cache
def known_words() -> tuple[str, ...]:
    """Words of this repository's pages, from `README.md` and `jobs/pages`. Raises FileNotFoundError outside of a clone."""
    pages = [ROOT / "README.md", *sorted((ROOT / "jobs/pages").glob("*.md"))]
    text = " ".join(re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", page.read_text(), flags=re.DOTALL) for page in pages)
    return tuple(sorted({word.lower() for word in re.findall(r"\b[A-Za-z][a-z]{1,11}\b", text)}))


def _token(rng: Random, words: Sequence[str]) -> str:
    kind = rng.random()
    if kind < 0.6:
        word = rng.choice(words)
        case = rng.random()
        return word if case < 0.55 else word.capitalize() if case < 0.85 else word.upper()
    if kind < 0.75:
        number = "".join(rng.choices("0123456789", k=rng.randint(1, 6)))
        return number if rng.random() < 0.7 else f"{number}.{rng.randrange(100)}"
    return "".join(rng.choices(MIXED, k=rng.randint(2, 9)))


def some_text(rng: Random, length: int) -> str:
    """A line of so many characters, or one less where it would end with a space."""
    words, text = known_words(), ""
    while len(text) <= length:
        token, wrap = _token(rng, words), rng.random()
        if wrap < 0.2:
            token += rng.choice(ENDS)
        elif wrap < 0.27:
            token = rng.choice((f"({token})", f'"{token}"', f"'{token}'"))
        text += f" {token}" if text else token
    return text[:length].rstrip()


@cache
def font_at(path: str, size: int) -> tuple[ImageFont.FreeTypeFont, tuple[float, ...], int]:
    """A font, its advances by ASCII code, and the height of its tallest and lowest letters together."""
    font = ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
    advances = tuple(font.getlength(chr(code)) if code >= 32 else 0.0 for code in range(127))
    _, top, _, bottom = font.getbbox("Ág|")
    return font, advances, round(bottom - top)


def find_fonts(folder: Path, unseen: str = UNSEEN) -> tuple[list[str], list[str]]:
    """The fonts for training and the one that it must not see: all .ttf and .otf files of a folder. Raises ValueError for less
    than one of each."""
    paths = sorted(str(path) for path in folder.iterdir() if path.suffix in (".ttf", ".otf"))
    seen = [path for path in paths if Path(path).stem != unseen]
    if not seen or len(seen) == len(paths):
        raise ValueError(f"{folder}: {len(paths)} fonts, of which {unseen} must be one: name another with --unseen")
    return seen, [path for path in paths if path not in seen]


@dataclass(frozen=True, slots=True)
class Planned:
    """A line before it is drawn."""

    text: str
    font: str
    size: int
    width: float
    """Of the text, in pixels."""

    @property
    def canvas_width(self) -> int:
        return int(-(-(self.width + 2 * MARGIN) // UNIT)) * UNIT


def plan_line(rng: Random, fonts: Sequence[str], least: int, most: int) -> Planned:
    """A line of least to most characters in one of these fonts, as small as the widest picture asks for."""
    path, size = rng.choice(fonts), rng.randrange(*SIZES)
    text = some_text(rng, rng.randint(least, most))
    while _width(text, path, size) > WIDEST - 2 * MARGIN:
        size -= 1
    return Planned(text, path, size, _width(text, path, size))


def fitting_line(rng: Random, fonts: Sequence[str], least: int, most: int, width: int) -> Planned:
    """The same, cut to what a canvas of this width holds."""
    line = plan_line(rng, fonts, least, most)
    text, wide = line.text, line.width
    advances = font_at(line.font, line.size)[1]
    while wide > width - 2 * MARGIN and len(text) > 1:
        wide, text = wide - advances[ord(text[-1])], text[:-1]
    text = text.rstrip()
    return Planned(text, line.font, line.size, _width(text, line.font, line.size))


def _width(text: str, path: str, size: int) -> float:
    advances = font_at(path, size)[1]
    return sum(advances[ord(char)] for char in text)


def draw(rng: Random, lines: Sequence[Planned], height: int, width: int) -> Lines:
    """These lines on canvases of one size, each at a random place of the middle."""
    masks = np.zeros((len(lines), height, width), np.uint8)
    chars, edges = np.zeros((len(lines), MOST), np.uint8), np.full((len(lines), MOST + 1), -1, np.int16)
    room = np.zeros(len(lines), np.float32)
    for i, line in enumerate(lines):
        font, advances, tall = font_at(line.font, line.size)
        free_x, free_y = max(width - line.width, 0.0), max(height - tall, 0)
        x = free_x / 2 + rng.uniform(-0.5, 0.5) * max(free_x - 2 * MARGIN, 0.0)
        y = height / 2 + rng.uniform(-0.25, 0.25) * free_y
        canvas = Image.new("L", (width, height))
        ImageDraw.Draw(canvas).text((x, y + tall * 0.28), line.text, fill=255, font=font, anchor="ls")
        masks[i] = np.asarray(canvas)
        code = np.frombuffer(line.text.encode(), np.uint8)
        chars[i, : len(code)] = code
        edges[i, : len(code) + 1] = np.rint(x + np.cumsum([0.0, *(advances[one] for one in code)]))
        room[i] = min(math.atan(0.5 * free_y / max(line.width, 1.0)), 0.055)
    return Lines(masks, chars, edges, room)


def some_lines(rng: Random, fonts: Sequence[str], count: int, least: int, most: int, height: int, width: int) -> Lines:
    """A batch for training: lines of least to most characters, cut to what the canvas holds."""
    return draw(rng, [fitting_line(rng, fonts, least, most, width) for _ in range(count)], height, width)


def lines_to_test(
    rng: Random, fonts: Sequence[str], count: int, least: int = 10, most: int = MOST, batch: int = 64
) -> list[Lines]:
    """Lines that are not cut, in batches of canvases of about their own widths."""
    planned = sorted((plan_line(rng, fonts, least, most) for _ in range(count)), key=lambda line: line.width)
    groups = [planned[i : i + batch] for i in range(0, count, batch)]
    return [draw(rng, group, HEIGHTS[i % 2], group[-1].canvas_width) for i, group in enumerate(groups)]
