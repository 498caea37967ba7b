"""The report of a job with images shows those of its samples as small pictures, or says of each why it does not."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
from PIL import Image

from batchspec import run
from batchspec.commands.report import main
from batchspec.config.schema import RunConfig
from batchspec.config.typed import from_dict
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import ConfigError
from batchspec.images.decode import decode
from batchspec.images.processor import Fit
from batchspec.job import thumbnails
from batchspec.job.report.stats import job_stats
from batchspec.job.report.texts import Shown
from batchspec.job.report.thumbnails import Picture, RowImages, Thumbnails
from batchspec.process import limited_process
from batchspec.records import ImagePiece
from tests.helpers.image_models import make_image_model, picture
from tests.helpers.pdfs import Page, make_pdf
from tests.job.browser import running_browser
from tests.job.test_image_jobs import A, B, C, url, user
from tests.job.test_report import HOSTILE, Tags

pytestmark = pytest.mark.usefixtures("draws")
WIDE = picture(100, 400, 7)
PICTURE = re.compile(r'<img src="data:image/jpeg;base64,([A-Za-z0-9+/=]+)" width="(\d+)" height="(\d+)" alt="([^"]+)">')


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl", seed=3)


def words(model: Path, folder: Path, path: str, *more: str) -> list[str]:
    return [
        f"model.path={model}", f"input.path={path}", f"output.dir={folder}/out", "model.dtype=float32",
        "decode.max_new_tokens=4", "decode.ignore_eos=true", *more,
    ]


def job(model: Path, folder: Path, rows: list[dict[str, Any]], *more: str) -> None:
    (folder / "images").mkdir(exist_ok=True)
    for name, data in (("a.png", A), ("b.png", B), ("c.png", C)):
        (folder / "images" / name).write_bytes(data)
    pl.DataFrame(rows).write_parquet(folder / "in.parquet")
    keys = ("input.columns={images:images}", f"input.image_root={folder}/images", *more)
    assert run.main(words(model, folder, f"{folder}/in.parquet", *keys)) == 0


def page_of(folder: Path, *, again: bool = True) -> str:
    if again:
        assert main([str(folder / "out")]) == 0
    return (folder / "out/report.html").read_text(encoding="utf-8")


def pictures(text: str) -> list[tuple[Any, str]]:
    """(uint8 [height, width, 3], name) of each picture of a page, in order."""
    found = []
    for data, width, height, name in PICTURE.findall(text):
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert (image.format, image.size) == ("JPEG", (int(width), int(height)))
            found.append((np.asarray(image.convert("RGB")), name))
    assert text.count("<img") == len(found)
    return found


def shown_by(pixels: Any) -> str:
    """The name of the image that a picture is nearest to."""
    known = {"A": A, "B": B, "C": C, "wide": WIDE}
    return min(known, key=lambda name: abs(decode(known[name], Fit(*pixels.shape[:2])).astype(int) - pixels).mean())


@pytest.mark.second
def test_samples_show_their_images_and_what_is_gone_has_a_line(vl: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": HOSTILE, "messages": user("<image>What?"), "images": ["a.png"]},
        {"id": "changed", "messages": user("<image>and<image>"), "images": ["b.png", url(C)]},
        {"id": "missing", "messages": user("<image>What?"), "images": ["c.png"]},
        {"id": "text", "messages": user("hi"), "images": None},
        {"id": "many", "messages": user("<image>" * 5), "images": [url(one) for one in (A, B, C, A, B)]},
        {"id": "wide", "messages": user("<image>"), "images": [url(WIDE)]},
    ]
    job(vl, tmp_path, rows)
    text = page_of(tmp_path, again=False)  # the job wrote it
    Tags(re.sub(PICTURE, "", text))
    found = pictures(text)
    assert [shown_by(pixels) for pixels, _ in found] == ["A", "B", "C", "C", "A", "B", "C", "A", "wide"]
    assert [name for _, name in found[:4]] == ["image 1 of 1", "image 1 of 2", "image 2 of 2", "image 1 of 1"]
    assert text.count("and 1 more") == 1
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert "<script" not in text
    assert pictures(page_of(tmp_path))[0][1] == "image 1 of 1"
    assert page_of(tmp_path).count("<img") == 9

    (tmp_path / "images/b.png").write_bytes(A)
    (tmp_path / "images/c.png").unlink()
    text = page_of(tmp_path)
    Tags(re.sub(PICTURE, "", text))
    assert [shown_by(pixels) for pixels, _ in pictures(text)] == ["A", "C", "A", "B", "C", "A", "wide"]
    assert "image 1 of 2: it has changed since the row was computed" in text
    assert re.search(r"image 1 of 1: missing_image: .*image 1 is the file &#x27;c.png&#x27;", text)


@pytest.mark.second
def test_rows_beside_lines_that_cannot_be_read_show_their_images(vl: Path, tmp_path: Path) -> None:
    body = {"messages": user([{"type": "image_url", "image_url": {"url": url(A)}}])}
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": own})
        for name, own in (("first", body), ("bad", {"messages": 3}), ("last", body))
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert run.main(words(vl, tmp_path, f"{tmp_path}/in.jsonl", "model.vision=true", "output=openai")) == 0
    assert [shown_by(pixels) for pixels, _ in pictures(page_of(tmp_path, again=False))] == ["A", "A"]
    assert len((tmp_path / "out/answers.jsonl").read_text().splitlines()) == 3


@pytest.mark.second
def test_a_job_that_cannot_be_opened_any_more_has_its_page_and_one_line(
    vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(vl, tmp_path, [{"messages": user("<image>"), "images": ["a.png"]}] * 3, "decode=sampled", "decode.n=2")
    assert len(pictures(page_of(tmp_path))) == 6, "one for each sample"

    def without() -> None:
        raise ConfigError("images need Pillow, which is not installed")

    with monkeypatch.context() as patch:
        patch.setattr(thumbnails, "pillow", without)
        text = page_of(tmp_path)
    assert text.count("Their images are not shown: images need Pillow, which is not installed") == 1
    assert "<img" not in text
    pl.read_parquet(tmp_path / "in.parquet").head(1).write_parquet(tmp_path / "in.parquet")
    text = page_of(tmp_path)
    assert text.count("the input does not have its row any more") == 4
    assert len(pictures(text)) == 2
    (tmp_path / "in.parquet").unlink()
    text = page_of(tmp_path)
    assert text.count("Their images are not shown: input.path ") == 1
    assert "<h3>Random samples</h3>" in text


@pytest.mark.second
@pytest.mark.parametrize("values", [[7, 8], ["ab" * 16, "x"]])
def test_a_column_of_the_input_named_as_that_of_digests_shows_nothing(values: list[Any], vl: Path, tmp_path: Path) -> None:
    """A job over the answers of a job with images has such a column."""
    pl.DataFrame({"prompt": ["hi", "ho"], "image_digest": values}).write_parquet(tmp_path / "in.parquet")
    assert run.main(words(vl, tmp_path, f"{tmp_path}/in.parquet")) == 0
    assert pl.read_parquet(tmp_path / "out/data")["image_digest"].to_list() == values
    text = page_of(tmp_path, again=False)
    assert "<h3>Random samples</h3>" in text
    assert "image 1" not in text
    assert "<img" not in text


@pytest.mark.second
def test_images_in_a_store_are_not_read(vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(vl, tmp_path, [{"messages": user("<image>"), "images": ["a.png"]}])
    folder = OutputFolder(tmp_path / "out")
    shown = job_stats(folder.path).quality.samples
    monkeypatch.setattr(thumbnails, "from_dict", lambda values: _with_root(values, "s3://bucket/images"))
    found = thumbnails.thumbnails_of(folder, shown)
    assert found.note == "Their images are not shown: s3://bucket/images is in a store, which a report does not read."


def _with_root(values: Any, root: str) -> Any:
    config = from_dict(values)
    config.input.image_root = root
    return config


@pytest.mark.second
def test_a_page_of_a_pdf_is_shown_until_its_file_changes(vl: Path, tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2", reason="the extra `pdf` is not installed")
    pages = [Page(colour=(0.0, 0.2, 0.9)), Page(colour=(1.0, 0.0, 0.0), size=(300.0, 200.0))]
    (tmp_path / "a.pdf").write_bytes(make_pdf(pages))
    keys = ("input.chat=true", "input.prompt=Read page {{ page }}.", "input.min_pixels=512")
    assert run.main(words(vl, tmp_path, f"{tmp_path}/a.pdf", *keys)) == 0
    (blue, _), (red, _) = pictures(page_of(tmp_path, again=False))
    assert np.abs(blue.reshape(-1, 3).mean(0) - [0, 51, 230]).max() < 12
    assert np.abs(red.reshape(-1, 3).mean(0) - [255, 0, 0]).max() < 12
    assert len(pictures(page_of(tmp_path))) == 2
    (tmp_path / "a.pdf").write_bytes(make_pdf(pages[::-1]))
    text = page_of(tmp_path)
    assert text.count("it has changed since the row was computed") == 2
    assert "<img" not in text


def piece(data: bytes, digest: int, size: tuple[int, int] = (64, 96)) -> ImagePiece:
    return ImagePiece(
        begin=0, length=6, rows=2, cols=3, advance=3, height=size[0], width=size[1], encoded_pixels=1,
        digest=bytes([digest] * 16), source=data,
    )


def shown(small: Any, one: ImagePiece) -> Picture | str:
    asked = small.ask(one)
    assert isinstance(asked, ImagePiece)
    found = small.take(asked)
    assert isinstance(found, Picture | str)
    return found


@pytest.mark.second
def test_time_and_bytes_of_a_page_are_bounded_and_bad_images_have_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    small = thumbnails._Small()
    assert isinstance(shown(small, piece(A, 1)), Picture)
    assert isinstance(shown(small, piece(A, 1)), Picture), "twice"
    large = shown(small, piece(A, 5, (400, 100)))
    assert isinstance(large, Picture)
    assert (large.height, large.width) == (thumbnails.SIDE, thumbnails.SIDE // 4)
    assert re.match(r"Pillow cannot read it \(image file is truncated", str(shown(small, piece(A[:-200], 2))))
    monkeypatch.setattr(thumbnails, "MOST_BYTES", 1 << 10)
    assert str(shown(small, piece(C, 3))) == "left out, because the pictures of this page reached 1 KiB"
    monkeypatch.setattr(thumbnails, "MOST_S", 0.0)
    assert "took 0 s" in str(shown(thumbnails._Small(), piece(A, 4)))


def test_a_machine_that_starts_no_process_has_its_page_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a job: all rows are committed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(limited_process, "start_module", refuse)
    monkeypatch.setattr(thumbnails, "_made", lambda *_: shown(thumbnails._Small(), piece(A, 1)))
    row = Shown(
        request_id="a", row_index=0, sample_index=0, status="ok", finish_reason="stop", prompt_tokens=1, tokens=1,
        mean_length=None, prompt=None, completion="", image_digest="00" * 16,
    )
    found = thumbnails.thumbnails_of(cast(Any, None), [row], cast(Any, SimpleNamespace(config=RunConfig())))
    assert found.note == "Their images are not shown: [Errno 11] Resource temporarily unavailable"


def test_reasons_are_escaped_and_other_rows_have_nothing() -> None:
    found = Thumbnails(of_row={3: RowImages(shown=[HOSTILE], count=2)})
    assert found.html(4) == ""
    assert "<script" not in found.html(3)
    assert found.html(3).count("&lt;script&gt;") == 1
    assert "and 1 more" in found.html(3)


@pytest.mark.second
def test_a_browser_shows_the_pictures_at_their_sizes(vl: Path, tmp_path: Path) -> None:
    job(vl, tmp_path, [{"messages": user("<image>" * 4), "images": [url(one) for one in (A, B, C, WIDE)]}])
    with running_browser(tmp_path / "profile") as browser:
        for width in (380, 1400):
            browser.open(tmp_path / "out/report.html", width=width)
            sizes = "[...document.images].map(e => [e.naturalWidth, e.naturalHeight, e.complete])"
            drawn = pictures(page_of(tmp_path, again=False))
            assert browser.value(sizes) == [[*pixels.shape[1::-1], True] for pixels, _ in drawn]
            assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.complaints == []
