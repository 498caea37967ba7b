"""`python -m batchspec.bench.image_preparation`: pages a second that processes decode and resize, and where the time goes.

Pages are JPEG images of A4 at 200 dpi, 1654 x 2339 pixels, with lines of text, made here. They become 1216 x 1728 pixels, as with
max_pixels=2129920 of Qwen3-VL.
"""

from __future__ import annotations

import argparse
import importlib
import io
import random
import time
from concurrent.futures import FIRST_COMPLETED, wait

from batchspec.console.terminal import show_line
from batchspec.images.decode import decode, opaque
from batchspec.images.header import opened, pillow, read_header
from batchspec.images.prepared_images import PreparedImages, num_processes
from batchspec.images.processor import CLIP_MEAN, CLIP_STD, Fit, ImageProcessor
from batchspec.records import ImagePiece

WIDTH, HEIGHT = 1654, 2339
PROCESSOR = ImageProcessor(
    patch=16, merge=2, frames=2, min_pixels=65_536, max_pixels=2_129_920, mean=CLIP_MEAN, std=CLIP_STD, placeholder=0
)
LETTERS = "abcdefghijklmnopqrstuvwxyz     ,.ABCDEFGHIJ0123456789"


def page(seed: int) -> bytes:
    """A JPEG of a page of random text: 48 lines of 90 characters."""
    rng, image = random.Random(seed), pillow().new("RGB", (WIDTH, HEIGHT), "white")
    draw = importlib.import_module("PIL.ImageDraw").Draw(image)
    font = importlib.import_module("PIL.ImageFont").load_default(30)
    for line in range(48):
        draw.text((120, 150 + 42 * line), "".join(rng.choices(LETTERS, k=90)), fill="black", font=font)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=90)
    return out.getvalue()


def piece_of(data: bytes, number: int) -> ImagePiece:
    """The page as an image of a prompt; number makes its digest its own, so that no page is made once for several."""
    header = read_header(data)
    fit = PROCESSOR.fit(header.height, header.width)
    rows, cols = PROCESSOR.grid(fit)
    return ImagePiece(
        begin=0, length=rows * cols, rows=rows, cols=cols, advance=rows + cols, height=fit.height, width=fit.width,
        encoded_pixels=header.height * header.width, digest=number.to_bytes(16), source=data,
    )


def pages_per_s(pages: list[bytes], num: int, count: int) -> float:
    """Pages a second with so many processes, `count` pages after they have started; the pixels are copied, as the engine does."""
    prepared, pieces = PreparedImages(num=num), [piece_of(pages[i % len(pages)], i) for i in range(count + 4 * num)]
    ahead = min(len(pieces), 4 * num)
    for i in range(ahead):
        prepared.ask(i, (pieces[i],))
    begun_at = 0.0
    for i in range(len(pieces)):
        if i == 4 * num:
            begun_at = time.perf_counter()
        while prepared.take(i) is None:
            wait(prepared.pending(), 0.05, FIRST_COMPLETED)
        if i + ahead < len(pieces):
            prepared.ask(i + ahead, (pieces[i + ahead],))
    return count / (time.perf_counter() - begun_at)


def parts_ms(data: bytes, repeats: int) -> dict[str, float]:
    """Milliseconds of each part of a page in this process, the fastest of several repetitions."""
    found: dict[str, float] = {}

    def note(name: str, begun_at: float) -> None:
        found[name] = min(found.get(name, 1e9), 1e3 * (time.perf_counter() - begun_at))

    fit = PROCESSOR.fit(HEIGHT, WIDTH)
    for _ in range(repeats):
        begun_at = time.perf_counter()
        with opened(data) as image:
            image.load()
            note("decode JPEG", begun_at)
            begun_at = time.perf_counter()
            plain = opaque(image)
            note("convert", begun_at)
            begun_at = time.perf_counter()
            plain.resize((fit.width, fit.height), pillow().Resampling.BICUBIC)
            note("resize", begun_at)
        begun_at = time.perf_counter()
        decode(data, Fit(fit.height, fit.width))
        note("all of it", begun_at)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m batchspec.bench.image_preparation", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[num_processes()], help="numbers of processes to measure")
    parser.add_argument("--pages", type=int, default=200, help="pages of each measurement")
    given = parser.parse_args()
    pages = [page(seed) for seed in range(8)]
    show_line(f"pages of {sum(map(len, pages)) / len(pages) / 1e3:,.0f} kB; to {PROCESSOR.fit(HEIGHT, WIDTH)}")
    for name, spent_ms in parts_ms(pages[0], 10).items():
        show_line(f"{name:12} {spent_ms:6.1f} ms")
    for num in given.processes:
        rate = pages_per_s(pages, num, given.pages)
        show_line(f"{num} processes: {rate:.1f} pages/s, {rate / num:.1f} a process")


if __name__ == "__main__":
    main()
