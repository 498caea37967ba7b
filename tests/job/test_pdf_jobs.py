"""Whole jobs over PDFs: a page is read as the picture of it, rows keep their order, and a changed PDF is noticed."""

from __future__ import annotations

import io
import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from batchspec import cli, run
from batchspec.images import prepared_images
from batchspec.images.pdf import header_of, render
from batchspec.images.pdf_page import PdfPage
from batchspec.model.vision.registry import load_vision
from tests.helpers.image_models import make_image_model
from tests.helpers.pdfs import Page, make_pdf
from tests.helpers.runs import run_apart, signalled_after_commits

pytestmark = pytest.mark.second

QUESTION = "Read {{ doc }}, page {{ page }}."
PAGES = (
    Page(lines=("first words", "second line"), colour=(1.0, 0.9, 0.8)),
    Page(colour=(0.0, 0.2, 0.9), size=(300.0, 200.0), turn=90),
    Page(form="a value"), Page(lines=("last",), size=(400.0, 400.0)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl", seed=3)


def words(model: Path, folder: Path, path: str, *more: str, out: str = "out") -> list[str]:
    return [
        f"model.path={model}", f"input.path={path}", f"output.dir={folder}/{out}", "model.dtype=float32", "input.chat=true",
        f"input.prompt={QUESTION}", "decode.max_new_tokens=12", "decode.ignore_eos=true", "input.max_error_fraction=1", *more,
    ]


def written(folder: Path, out: str = "out") -> pl.DataFrame:
    return pl.read_parquet(sorted((folder / out / "data").glob("*.parquet")))  # in the order of the files, not sorted here


def picture_of(path: Path, number: int, model: Path) -> bytes:
    """The page at the size that the model reads, as PNG."""
    facts, (width, height) = path.stat(), PAGES[number - 1].size
    if PAGES[number - 1].turn:
        width, height = height, width
    page = PdfPage(
        path=str(path), page=number, width=width, height=height, digest=bytes(32), size_bytes=facts.st_size,
        changed_ns=facts.st_mtime_ns,
    )
    header = header_of(page)
    fit = load_vision(model).processor.fit(header.height, header.width)
    out = io.BytesIO()
    Image.fromarray(render(page, fit.height, fit.width)).save(out, "PNG")
    return out.getvalue()


def test_a_page_is_read_as_its_picture_is_and_rows_come_in_the_order_of_pages(model: Path, tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    for name in ("b", "a"):
        (tmp_path / f"papers/{name}.pdf").write_bytes(make_pdf(PAGES))
    lengths = "input.min_pixels=512"
    more = ("output.shard_rows=3", "packing.max_num_seqs=2", "input.num_workers=2", lengths)
    job = words(model, tmp_path, f"{tmp_path}/papers/*.pdf", *more)
    assert run.main(job) == 0
    found = written(tmp_path)
    order = [(f"{name}.pdf", page) for name in "ab" for page in range(1, 5)]
    assert list(zip(found["doc"], found["page"], strict=True)) == order
    assert found["request_id"].to_list() == [f"{doc}:{page}" for doc, page in order]
    assert "image" not in found.columns
    images = [picture_of(tmp_path / "papers/a.pdf", page, model) for page in range(1, 5)] * 2
    rows = pl.DataFrame({"doc": [doc for doc, _ in order], "page": [page for _, page in order], "image": images})
    rows.write_parquet(tmp_path / "in.parquet")
    same = words(model, tmp_path, f"{tmp_path}/in.parquet", "input.columns={images: image}", lengths, out="pictures")
    assert run.main(same) == 0
    pictures = written(tmp_path, "pictures")
    assert found["token_ids"].to_list() == pictures["token_ids"].to_list()
    assert found["prompt_ids"].to_list() == pictures["prompt_ids"].to_list()
    digests = found["image_digest"].to_list()
    assert (len(set(digests)), digests[:4]) == (4, digests[4:])  # equal files are one to the engine
    assert len({tuple(tokens) for tokens in found["token_ids"][:4].to_list()}) > 1


def test_bad_pdfs_and_pages_are_error_rows_and_verify_reads_the_others_again(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf(PAGES, without_page=1))
    (tmp_path / "b.pdf").write_bytes(make_pdf(PAGES, locked=True))
    (tmp_path / "c.pdf").write_bytes(make_pdf([Page(size=(14400.0, 10.0)), Page(size=(14400.0, 14400.0)), Page(size=(1.0, 1.0))]))
    job = words(model, tmp_path, f"{tmp_path}/*.pdf")
    assert run.main(job) == 0
    found = written(tmp_path)
    codes = found["error"].struct.field("code").to_list()
    assert codes == [None, "bad_image", None, None, "bad_pdf", "bad_image", None, None]
    said = found["error"].struct.field("message").to_list()
    assert said[1] == "a.pdf page 2 (id 'a.pdf:2'): image 1: page 2 of the PDF cannot be read; repair the PDF"
    assert said[4].endswith("the PDF cannot be read: it needs a password; save it without one")
    assert "one side is more than 200 times as long" in said[5]
    capfd.readouterr()
    assert cli.main(["verify", f"{tmp_path}/out"]) == 0
    assert "5 completions decoded again" in capfd.readouterr().out
    assert cli.main(["report", f"{tmp_path}/out"]) == 0
    capfd.readouterr()
    assert cli.main(["plan", "--json", *words(model, tmp_path, f"{tmp_path}/*.pdf", out="other")]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["images"], facts["rows_read"]) == (5, 8)
    assert {code: own["rows"] for code, own in facts["bad_rows"].items()} == {"bad_image": 2, "bad_pdf": 1}


def test_a_killed_job_goes_on_with_the_same_pdf_and_refuses_another(model: Path, tmp_path: Path) -> None:
    paper = tmp_path / "a.pdf"
    paper.write_bytes(make_pdf([Page(lines=(f"page {number}",)) for number in range(16)]))
    job = words(model, tmp_path, str(paper), "output.shard_rows=2", "packing.max_num_seqs=2", "decode.max_new_tokens=32")
    code, said = run_apart(job, tmp_path / "log", partial(signalled_after_commits, 2, signal.SIGKILL))
    assert code == -signal.SIGKILL, said
    assert 0 < len(written(tmp_path)) < 16
    data = paper.read_bytes()
    paper.write_bytes(make_pdf([Page(lines=(f"line {number}",)) for number in range(16)]))
    assert run.main(job) == 2
    paper.write_bytes(data)
    assert run.main(job) == 0
    assert written(tmp_path)["page"].to_list() == list(range(1, 17))
    (tmp_path / "b.pdf").write_bytes(make_pdf(PAGES))
    assert run.main([*job, f"input.path=[{paper},{tmp_path}/b.pdf]", "resume=extend"]) == 0
    assert written(tmp_path)["request_id"].to_list()[14:] == ["a.pdf:15", "a.pdf:16", *(f"b.pdf:{page}" for page in range(1, 5))]


def test_a_page_of_a_pdf_that_changes_meanwhile_is_never_committed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper = tmp_path / "a.pdf"
    paper.write_bytes(data := make_pdf(PAGES))
    ask: Any = prepared_images.PreparedImages.ask

    def change(self: prepared_images.PreparedImages, row: Any, pieces: Any) -> None:
        paper.write_bytes(make_pdf(PAGES[::-1]))
        ask(self, row, pieces)

    monkeypatch.setattr(prepared_images.PreparedImages, "ask", change)
    assert run.main(words(model, tmp_path, str(paper))) == 2
    assert not list((tmp_path / "out").glob("data/*.parquet"))
    monkeypatch.undo()
    paper.write_bytes(data)
    assert run.main(words(model, tmp_path, str(paper))) == 0
    assert written(tmp_path)["status"].to_list() == ["truncated"] * 4


def test_pages_need_a_chat_and_a_model_that_reads_images(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf(PAGES))
    for more, said in (
        (["input.chat=false"], "pages of PDFs: images are read in chats, and"),
        ([f"input.image_root={tmp_path}"], f"input.image_root={tmp_path} is for images that rows name"),
        (["input.prompt=null"], "pages of PDFs have no prompts; set input.prompt=TEXT and input.chat=true"),
    ):
        assert run.main([*words(model, tmp_path, f"{tmp_path}/a.pdf"), *more]) == 2
        assert said in capfd.readouterr().err
