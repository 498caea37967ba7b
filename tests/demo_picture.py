"""README's block of the demo and its report.png, both of one run: `python -m tests.demo_picture` runs the demo and writes them.

The picture holds the block as its PNG text LINES, by which `test_pages.py` compares the two. Chromium must be installed.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.job.browser import running_browser

REPOSITORY = Path(__file__).parents[1]
README, PICTURE = REPOSITORY / "README.md", REPOSITORY / "jobs/pages/report.png"
LINES = "lines of the run"
DESK, PHONE, HEIGHT = 1140, 380, 2440
"""Pixels of the two pictures beside each other."""
SHOWN = (
    r"\d+ rows at a time, .*", r"\d+/\d+ completions \((?!100).*", r"[\d,]+ completion tokens in .*", r"out/demo: done, .*",
    r"out/demo: \d+ error rows .*",
)
"""What README shows of the lines that the demo prints: the last line of each form."""
_BLOCK = re.compile(r"(?<=```\n)\d+ rows at a time, .*?(?=```)", re.DOTALL)


def block_of_readme() -> str:
    """The lines that README shows."""
    found = _BLOCK.findall(README.read_text(encoding="utf-8"))
    assert len(found) == 1, "README shows one run of the demo"
    return str(found[0])


def lines_of_picture() -> str:
    """The lines of the run that the picture shows."""
    with Image.open(PICTURE) as image:
        return str(image.info.get(LINES, ""))


def picked(said: Sequence[str]) -> str:
    """README's lines of all that a run has printed."""
    return "".join(f"{[line for line in said if re.fullmatch(form, line)][-1]}\n" for form in SHOWN)


def main() -> None:
    """Run the demo; write both files."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        done = subprocess.run(
            [sys.executable, "-m", "batchspec.run", "+job=demo"], cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stderr=subprocess.PIPE, text=True, check=True,
        )
        lines = picked(done.stderr.splitlines())
        _save(folder, folder / "out/demo/report.html", lines)
    README.write_text(_BLOCK.sub(lambda _: lines, README.read_text(encoding="utf-8")), encoding="utf-8")


def _save(folder: Path, page: Path, lines: str) -> None:
    """The top of the page for a desk in light colours, and beside it for a phone in dark ones."""
    whole = Image.new("RGB", (DESK + PHONE, HEIGHT))
    with running_browser(folder / "profile") as browser:
        for left, width, dark in ((0, DESK, False), (DESK, PHONE, True)):
            browser.open(page, width=width, dark=dark)
            browser.picture(folder / "part.png", width=width, height=HEIGHT)
            whole.paste(Image.open(io.BytesIO((folder / "part.png").read_bytes())), (left, 0))
    text = PngInfo()
    text.add_text(LINES, lines)
    whole.quantize(256).save(PICTURE, pnginfo=text, optimize=True)


if __name__ == "__main__":
    main()
