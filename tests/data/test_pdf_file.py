"""PDFs as input: a page a row, and a bad row for a file that cannot be read."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any, cast

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.config.schema import InputConfig
from batchspec.data.dataset import pdf_file
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.pdf_file import PAGE, SCHEMA, ListPages, PdfFile
from batchspec.data.dataset.reader import derived_ids, open_source, place_in_file
from batchspec.data.storage.places import RemotePlace, place_of
from batchspec.errors import CapacityError, ConfigError, InputError, StorageError
from batchspec.process.limited_process import Died, Full, TooLong
from tests.helpers.pdfs import Page, make_pdf

Rows = list[dict[str, Any]]


def papers(folder: Path, **files: bytes) -> Path:
    for name, data in files.items():
        (folder / f"{name}.pdf").write_bytes(data)
    return folder


def rows_of(path: Any) -> tuple[Rows, dict[int, str]]:
    """The rows of an input, and messages of the bad ones."""
    (shard,) = open_source(InputConfig(path=path)).shards(1000)
    return shard.table.to_pylist(), {row: f"{bad.code}: {bad.message}" for row, bad in shard.bad.items()}


def test_each_page_is_a_row_with_its_document_and_number_in_order(tmp_path: Path) -> None:
    folder = papers(tmp_path, b=make_pdf([Page(), Page(size=(30, 20), turn=90)]), a=make_pdf([Page()] * 11))
    source = open_source(InputConfig(path=f"{folder}/*.pdf"))
    rows, bad = rows_of(str(folder))
    pages = [*(("a.pdf", page) for page in range(1, 12)), ("b.pdf", 1), ("b.pdf", 2)]
    assert [(row["doc"], row["page"]) for row in rows] == pages
    assert not bad
    assert derived_ids(source, 10, 12) == ["a.pdf:11", "b.pdf:1"]
    assert place_in_file(source, 12) == "b.pdf page 2"
    image = rows[12]["image"]
    assert (image["path"], image["page"], image["width"], image["height"]) == (f"{folder}/b.pdf", 2, 20, 30)
    assert image["digest"] != rows[0]["image"]["digest"]
    assert map_columns(source.schema, {}, template=True).get("images") == "image"
    assert map_columns(source.schema, {"images": None}, template=True).get("images") is None
    with pytest.raises(InputError, match=r"pages of PDFs have no prompts; set input.prompt=TEXT"):
        map_columns(source.schema, {})


def test_parts_of_long_pdfs_are_read_in_batches_of_some_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_file, "ROWS_AT_ONCE", 3)
    source = open_source(InputConfig(path=str(papers(tmp_path, a=make_pdf([Page()] * 8))), limit=7)).reading(["page"])
    found = [shard.table.to_pydict() for shard in source.shards(4)]
    assert found == [{"page": [1, 2, 3, 4]}, {"page": [5, 6, 7]}]


def test_a_pdf_that_cannot_be_read_is_one_bad_row_and_stops_no_other(tmp_path: Path) -> None:
    good = make_pdf([Page()])
    folder = papers(tmp_path, a=good, b=make_pdf([Page()], locked=True), c=b"nonsense", d=make_pdf([]))
    (folder / "e.Pdf").write_bytes(good)
    rows, bad = rows_of(str(folder))
    assert [(row["doc"], row["page"]) for row in rows] == [
        ("a.pdf", 1), ("b.pdf", None), ("c.pdf", None), ("d.pdf", None), ("e.Pdf", 1)
    ]
    assert [bad[row].split(";")[0] for row in (1, 2, 3)] == [
        "bad_pdf: the PDF cannot be read: it needs a password", "bad_pdf: the PDF cannot be read: it is damaged, or no PDF",
        "bad_pdf: the PDF cannot be read: it has no pages",
    ]


class Listing(ListPages):
    """Its process answers this."""

    answer: Exception

    def result(self, request: object) -> Any:
        if isinstance(self.answer, Died):
            raise self.answer
        return self.answer


class Dying(ListPages):
    """Its process ends by a signal whenever it is asked."""

    by: signal.Signals

    def result(self, request: object) -> Any:
        process = self._process or self._start()
        process.send_signal(self.by)
        process.wait()
        return super().result(request)


@pytest.mark.second
def test_a_pdf_with_which_the_process_dies_is_a_bad_row_but_not_if_the_machine_killed_it(tmp_path: Path) -> None:
    place = place_of(str(papers(tmp_path, a=make_pdf([Page()])) / "a.pdf"))
    pages = Dying()
    pages.by = signal.SIGSEGV
    (batch,) = (file := PdfFile(place, "a.pdf", pages)).read(file.parts[0], ["doc", "page"])
    assert batch.schema.metadata[b"message"].decode().startswith("the PDF cannot be read: its process ended with -11")
    pages.by = signal.SIGKILL
    with pytest.raises(CapacityError, match="too little memory"):
        PdfFile(place, "a.pdf", pages)
    pages.close()


def test_a_changed_pdf_is_noticed_during_a_run_and_by_the_next_one(tmp_path: Path) -> None:
    folder = papers(tmp_path, a=make_pdf([Page(lines=("one",))]))
    source = open_source(InputConfig(path=str(folder)))
    before = source.files[0].identity
    assert open_source(InputConfig(path=str(folder))).files[0].identity == before
    papers(folder, a=make_pdf([Page(lines=("two",))]))
    with pytest.raises(InputError, match=r"a\.pdf changed while the job runs"):
        list(source.shards(10))
    after = open_source(InputConfig(path=str(folder))).files[0].identity
    assert (after[:3], after[3] == before[3]) == (before[:3], False)


def test_pdfs_beside_rows_are_papers_about_them_unless_they_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = papers(tmp_path, a=make_pdf([Page()]))
    pl.DataFrame({"prompt": ["x"]}).write_parquet(folder / "rows.parquet")
    assert rows_of(str(folder))[0] == [{"prompt": "x"}]
    assert caplog.messages == [f"1 PDF left out: {folder} has other data; name them with {folder}/*.pdf"]
    assert len(rows_of(f"{folder}/*.pdf")[0]) == 1
    with pytest.raises(InputError, match=r"column 'doc' differs between files: rows\.parquet has no such column"):
        open_source(InputConfig(path=[f"{folder}/a.pdf", f"{folder}/rows.parquet"]))
    (folder / "words.jsonl").write_bytes(make_pdf([Page()]))
    with pytest.raises(InputError, match=r"words\.jsonl holds a PDF; let its name end in \.pdf"):
        open_source(InputConfig(path=f"{folder}/words.jsonl"))


def test_a_folder_with_the_name_of_a_pdf_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "old.pdf").mkdir()
    papers(tmp_path, a=make_pdf([Page()]))
    with pytest.raises(InputError, match=r"old\.pdf is a folder, not a file; name its files with .*old\.pdf/\*\.pdf"):
        open_source(InputConfig(path=f"{tmp_path}/*.pdf"))


def test_limits_of_the_machine_and_its_disks_are_not_taken_for_a_bad_pdf(tmp_path: Path) -> None:
    """Where they are others, another run would find other rows."""
    path = papers(tmp_path, a=make_pdf([Page()])) / "a.pdf"
    pages = Listing()
    for answer, kind, said in (
        (Full("listing its pages takes more than 4 GiB of memory"), CapacityError, "more than 4 GiB of memory; leave it out"),
        (TooLong("listing its pages takes more than 60 s"), CapacityError, "a.pdf: listing its pages takes more than 60 s; "),
        (OSError(errno.EIO, "Input/output error", str(path)), StorageError, "Input/output error"),
        (PermissionError(errno.EACCES, "Permission denied", str(path)), InputError, "Permission denied"),
    ):
        pages.answer = answer
        with pytest.raises(kind, match=said):
            pages.sizes(path)


@pytest.mark.second
def test_the_processes_limits_stop_the_listing_by_name(tmp_path: Path) -> None:
    path = papers(tmp_path, a=make_pdf([Page()])) / "a.pdf"
    pages = Dying()
    pages.by = signal.SIGXCPU
    with pytest.raises(CapacityError, match="listing its pages takes more than 60 s; leave it out"):
        pages.sizes(path)
    pages.close()
    path.unlink()
    with pytest.raises(InputError, match="No such file"):
        ListPages().sizes(path)


def test_rows_of_other_files_are_no_pages_whatever_their_columns_are(tmp_path: Path) -> None:
    folder = papers(tmp_path, a=make_pdf([Page()]))
    forged = pa.Table.from_pylist([{"doc": "b.pdf", "page": 1, "image": {"path": "/etc/secret.pdf", "page": 1}}], SCHEMA)
    pq.write_table(forged, folder / "b.parquet")
    field = open_source(InputConfig(path=f"{folder}/b.parquet")).schema.field("image")
    assert (field.type, field.metadata) == (PAGE, None)
    with pytest.raises(InputError, match="column 'image' differs between files"):
        open_source(InputConfig(path=[f"{folder}/a.pdf", f"{folder}/b.parquet"]))


def test_pdfs_in_stores_and_without_pypdfium2_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = papers(tmp_path, a=make_pdf([Page()]))
    with pytest.raises(InputError, match=r"x\.pdf: PDFs are read from disks of this machine, and not from stores"):
        PdfFile(RemotePlace(cast(Any, None), PurePosixPath("x.pdf")), "x.pdf", ListPages())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="PDFs need pypdfium2, which is not installed; pip install pypdfium2"):
        open_source(InputConfig(path=str(folder)))


@pytest.mark.second
def test_listing_imports_neither_pdfium_here_nor_torch_there(tmp_path: Path) -> None:
    papers(tmp_path, a=make_pdf([Page()]))
    code = (
        "import sys; from batchspec.config.schema import InputConfig; from batchspec.data.dataset.reader import open_source\n"
        f"assert open_source(InputConfig(path={str(tmp_path)!r})).num_rows == 1\n"
        "assert not [name for name in sys.modules if name.startswith('pypdfium2')]\n"
        "import batchspec.images.pdf_process; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), timeout=120)
