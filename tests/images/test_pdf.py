"""Pages of PDFs: sizes, pixels, turns, forms, and what cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchspec.images import pdf
from batchspec.images.decode import decode
from batchspec.images.header import MOST_PIXELS, BadImage
from batchspec.images.pdf import DPI, BadPdf, header_of, identity_of, render, sizes_of
from batchspec.images.pdf_page import PdfPage
from batchspec.images.prepared_images import PreparedImages
from batchspec.images.processor import Fit
from tests.helpers.pdfs import A4, Page, make_pdf
from tests.images.test_prepared_images import piece, taken

RED, BLUE = (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)


def written(folder: Path, *pages: Page, **more: bool | int | None) -> Path:
    path = folder / "x.pdf"
    path.write_bytes(make_pdf(pages, **more))  # type: ignore[arg-type]
    return path


def page_of(path: Path, number: int = 1, size: tuple[float, float] = A4) -> PdfPage:
    facts = path.stat()
    return PdfPage(
        path=str(path), page=number, width=size[0], height=size[1], digest=bytes(32), size_bytes=facts.st_size,
        changed_ns=facts.st_mtime_ns,
    )


def test_sizes_are_those_of_pages_as_they_are_displayed(tmp_path: Path) -> None:
    path = written(tmp_path, Page(), Page(size=(300, 200)), Page(size=(300, 200), turn=90))
    assert sizes_of(str(path)).tolist() == [[595, 842], [300, 200], [200, 300]]


def test_a_page_that_is_missing_has_no_size_and_is_refused_alone(tmp_path: Path) -> None:
    path = written(tmp_path, Page(colour=RED), Page(), Page(colour=BLUE), without_page=1)
    assert sizes_of(str(path)).tolist() == [[595, 842], [0, 0], [595, 842]]
    with pytest.raises(BadImage, match="page 2 of the PDF cannot be read"):
        header_of(page_of(path, 2, (0.0, 0.0)))
    with pytest.raises(BadImage, match="page 2 of the PDF cannot be read"):
        render(page_of(path, 2), 20, 20)
    assert render(page_of(path, 3), 20, 20)[10, 10].tolist() == [0, 0, 255]


def test_a_page_is_rendered_in_rgb_at_exactly_the_size_that_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, Page(colour=RED), Page(lines=("dark words",)))
    red = decode(page_of(path), Fit(64, 31))
    assert red.shape == (64, 31, 3)
    assert red.dtype == np.uint8
    assert np.unique(red.reshape(-1, 3), axis=0).tolist() == [[255, 0, 0]]
    text = render(page_of(path, 2), 842, 595)
    rows, cols = np.nonzero(text.min(2) < 128)
    assert rows.max() < 100  # of the top line alone, on white
    assert (cols.min() > 35, cols.max() < 200, text[-1, -1].tolist()) == (True, True, [255, 255, 255])


def test_turns_and_filled_forms_are_rendered(tmp_path: Path) -> None:
    path = written(tmp_path, Page(lines=("a line",), turn=180), Page(form="its value"))
    rows, _ = np.nonzero(render(page_of(path), 842, 595).min(2) < 128)
    assert rows.min() > 742
    form = render(page_of(path, 2), 842, 595)
    assert (form[45, 200].tolist(), form[400, 200].tolist()) == ([255, 0, 0], [255, 255, 255])


def test_the_size_of_a_page_is_at_200_dpi_and_never_above_the_limit_on_pixels(tmp_path: Path) -> None:
    path = written(tmp_path, Page())
    header = header_of(page_of(path))
    assert (header.format, header.height, header.width) == ("PDF", int(842 * DPI / 72), int(595 * DPI / 72))
    for size in ((14400.0, 14400.0), (1e-3, 1e-3), (14400.0, 100.0)):
        found = header_of(page_of(path, 1, size))
        assert 1 <= found.height * found.width <= MOST_PIXELS, size
    for bad in (float("nan"), float("inf"), -1.0, 0.0):
        with pytest.raises(BadImage, match="page 1 of the PDF cannot be read"):
            header_of(page_of(path, 1, (bad, 100.0)))


def test_a_pdf_of_which_some_pages_cannot_be_read_has_its_others(tmp_path: Path) -> None:
    for count, given in ((8, 1), (20, 10)):  # few of them, or no more than half
        (tmp_path / "x.pdf").write_bytes(make_pdf([Page()] * given, count=count))
        assert sizes_of(str(tmp_path / "x.pdf")).tolist() == [[595, 842]] * given + [[0, 0]] * (count - given)


def test_what_is_no_pdf_is_refused_with_the_reason(tmp_path: Path) -> None:
    most = "pages 2 to 1,001 of its 90,000 pages cannot be read; repair it"
    for data, said in (
        (make_pdf([Page()], count=90_000), most), (make_pdf([Page()] * 9, count=20), "11 of its 20 pages cannot be read"),
        (make_pdf([Page()], count=900_000), "it has 900,000 pages, and at most 100,000 are read"),
        (b"", "damaged, or no PDF"), (b"nonsense", "damaged, or no PDF"), (make_pdf([Page()], locked=True), "needs a password"),
        (make_pdf([]), "it has no pages"), (make_pdf([Page()])[:200], "damaged, or no PDF"),
    ):
        (tmp_path / "x.pdf").write_bytes(data)
        with pytest.raises(BadPdf, match=said):
            sizes_of(str(tmp_path / "x.pdf"))
    os.mkfifo(tmp_path / "pipe.pdf")
    for name, said in (("pipe.pdf", "a pipe"), ("none.pdf", "No such file")):
        with pytest.raises(BadPdf, match=said):
            sizes_of(str(tmp_path / name))


def test_a_file_that_changed_since_it_was_listed_is_not_rendered(tmp_path: Path) -> None:
    path = written(tmp_path, Page(colour=RED))
    before = page_of(path)
    os.utime(path, ns=(before.changed_ns, before.changed_ns + 1))
    with pytest.raises(BadImage, match="changed while the job runs") as caught:
        render(before, 20, 20)
    assert caught.value.retryable
    path.unlink()  # or its disk has gone
    with pytest.raises(BadPdf, match="cannot be opened") as caught:
        render(before, 20, 20)
    assert caught.value.retryable


@pytest.mark.second
def test_processes_render_pages_and_say_whether_another_attempt_may_succeed(tmp_path: Path) -> None:
    page = page_of(written(tmp_path, Page(colour=RED), Page(colour=BLUE)), 2)
    prepared = PreparedImages(num=1)
    for row, source in enumerate((page, replace(page, changed_ns=0), replace(page, page=9))):
        one = replace(piece(row, data=b""), source=source)
        prepared.ask(row, (one,))
        if not row:
            (made,) = taken(prepared, row)
            assert np.unique(made.reshape(-1, 3), axis=0).tolist() == [[0, 0, 255]]
            assert made.shape == (one.height, one.width, 3)
            continue
        with pytest.raises(BadImage) as caught:
            taken(prepared, row)
        assert (caught.value.code, caught.value.retryable) == ("bad_image", row == 1)


def test_pages_differ_by_file_and_number(tmp_path: Path) -> None:
    path = written(tmp_path, Page())
    assert len({identity_of(page_of(path, number)) for number in (1, 2, 258)}) == 3
    with pytest.raises(BadImage, match="it is a PDF; name the file in"):
        decode(path.read_bytes(), Fit(20, 20))


def test_a_document_stays_open_while_its_pages_are_rendered_and_its_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file of the same name, size and time is opened anew, and so is a document after MOST_RENDERED pages."""
    red, blue = Page(colour=RED), Page(colour=BLUE)
    opened, load = list[str](), pdf._load

    def loaded(path: str, *more: Any) -> Any:
        opened.append(path)
        return load(path, *more)

    monkeypatch.setattr(pdf, "_load", loaded)
    monkeypatch.setattr(pdf, "MOST_RENDERED", 4)
    path = written(tmp_path, red, blue)
    colours = [render(page_of(path, number), 4, 4)[0, 0].tolist() for number in (1, 2, 1)]
    assert colours == [[255, 0, 0], [0, 0, 255], [255, 0, 0]]
    assert len(opened) == 1
    before = path.stat()
    path.unlink()
    other = written(tmp_path, blue, red)
    os.utime(other, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert (other, other.stat().st_size) == (path, before.st_size)
    assert render(page_of(path), 4, 4)[0, 0].tolist() == [0, 0, 255]
    assert len(opened) == 2
    for _ in range(4):
        render(page_of(path), 4, 4)
    assert len(opened) == 3
    with pytest.raises(BadImage):
        render(page_of(path, 9), 4, 4)
    render(page_of(path), 4, 4)
    assert len(opened) == 4, "an error closes it"


def test_a_program_that_has_rendered_a_page_ends_in_silence(tmp_path: Path) -> None:
    path = written(tmp_path, Page(colour=RED))
    code = f"from batchspec.images.pdf import *\nrender(PdfPage(**{asdict(page_of(path))!r}), 4, 4)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
