"""report.html: what it is made of, and that it is one page which needs nothing else and says nothing but what it was told."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchspec import run
from batchspec.commands.report import main
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import ConfigError, OutputError
from batchspec.job.report import error_rows, page
from batchspec.job.report.error_rows import first_errors
from batchspec.job.report.stats import job_stats
from batchspec.job.report.texts import cut
from batchspec.job.report.thumbnails import Thumbnails
from batchspec.job.runner import conclude
from batchspec.records import Completion, RowError
from tests.helpers.io_samples import built, completion, dataset, failed, new_folder, shards_of, stats
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.job.browser import running_browser

HOSTILE = '<script>alert("x")</script> & $a$ \u202e\x1b[31m'
VOID = {"meta", "link", "br", "hr", "img", "input"}


def job(
    path: Path, rows: list[Completion], *, shard_rows: int = 2, decode: dict[str, Any] | None = None, **output: Any
) -> OutputFolder:
    """A finished job with a completion for each row."""
    shards, columns = shards_of(dataset(len(rows)), shard_rows)
    config = {"model": {"path": "tiny"}, "decode": decode or {}, "output": {"messages": "full", **output}}
    folder = new_folder(path, len(rows), shard_rows, config=config)
    for shard in shards:
        mine = [row for row in rows if row.row_index in folder.rows_of(shard.index)]
        folder.commit(shard.index, built(shard, columns, mine, **output))
    return folder


def mixed() -> list[Completion]:
    """Row i wrote i + 1 tokens in rounds that accepted i % 4 of 3; row 5 is an error, row 6 hostile."""
    rows = [
        completion(i, token_ids=np.zeros(i + 1, np.int32), prompt_ids=np.zeros(10 * i + 1, np.int32), stats=stats([i % 4]))
        for i in range(12)
    ]
    rows[5] = failed(5)
    rows[6] = completion(6, request_id=HOSTILE, text=HOSTILE, token_ids=np.zeros(99, np.int32), stats=stats([3]))
    return rows


@pytest.mark.parametrize(("kept", "prompt"), [("prompt", "user: say 1"), ("none", None)])
def test_the_prompt_shown_is_what_the_output_holds_of_it(tmp_path: Path, kept: str, prompt: str | None) -> None:
    job(tmp_path, [completion(0), completion(1)], messages=kept)
    assert [row.prompt for row in job_stats(tmp_path).quality.samples] == [prompt and "user: say 0", prompt]


def test_long_text_is_cut_where_it_matters_least() -> None:
    text = "a" * 500 + "b" * 500
    assert cut(text) == "a" * 500 + "b" * 100 + "... (400 more characters)"
    assert cut(text, from_end=True) == "(400 more characters) ..." + "a" * 100 + "b" * 500
    assert cut("short") == "short"


class Tags(HTMLParser):
    """Checks that tags are balanced; collects ids, links and what an attribute or a tag would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and tag != "clippath":  # equal pictures share equal frames
                self.ids.append(value or "")
            if name == "href":
                self.links.append(value or "")
            if name in ("src", "xlink:href", "data", "srcset", "action") or name.startswith("on"):
                self.loads.append(f"{tag} {name}={value}")
        if tag in ("script", "iframe", "object", "link", "base"):
            self.loads.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report(out: Path) -> str:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    assert main([str(out)]) == 0
    return (out / "report.html").read_text(encoding="utf-8")


def record(folder: OutputFolder) -> None:
    """A run of 40 seconds, as Timeline and RunSummary leave it."""
    samples = [[t, 90 * t, 0, 3 * t, t / 2, t / 2, 0] for t in range(41)]
    folder.log_timeline("\n".join(json.dumps(line) for line in [{"started_at": 5.0, "slots": 4}, *samples]))
    folder.log_run({"seconds": 40.0, "tokens": 3600, "tok_s": 90.0, "start_up_s": 1.0, "mean_live_rows": 3.0})


@pytest.mark.second
def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    folder = job(tmp_path, mixed())
    record(folder)
    text = report(tmp_path)
    tags = Tags(text)
    assert tags.loads == []
    assert len(set(tags.ids)) == len(tags.ids)
    assert tags.links == []
    assert text.count("<svg") == 4
    assert set(re.findall(r"font-size: ([\d.]+)px", text)) == {"11"}, "all labels have one size"
    assert not re.search(r"#01010[1-6]", text), "a stand-in colour was left"
    assert "url(http" not in text
    assert "default-src 'none'" in text


@pytest.mark.second
def test_the_page_reports_the_rows_and_tokens_of_the_job(tmp_path: Path) -> None:
    folder = job(tmp_path, mixed())
    record(folder)
    text = report(tmp_path)
    for said in (
        "tiny: 12 completions", "6 of 6 shards", "<b>90.0</b><span>completion tokens a second", "decoding 75%",
        '<b><span class="error">1 <small>8.3%</small></span></b>',
        "in prefill 0%", "waiting for a refill or for pages 12%", "no row left 12%",
        "<h3>Tokens a second</h3>", "<h3>Use of the slots</h3>", 'var(--second)"></i>waiting',
    ):
        assert said in text, said


@pytest.mark.second
def test_the_page_answers_first_whether_the_data_is_good_then_how_fast_it_was_then_how_drafts_fared(tmp_path: Path) -> None:
    record(job(tmp_path, mixed()))
    text = report(tmp_path)
    order = (
        "<h2>Is the data good?</h2>", "<b>11 <small>91.7%</small></b><span>ok</span>", "truncated",
        "error rows", "empty answers", "answers that end in a loop", "<h3>Prompt lengths</h3>", "Median 41, 90 % up to 101",
        '<h3 id="errors">Error rows</h3>', "<h3>Random samples</h3>", "<h2>Speed</h2>", "tokens a second",
        "Drafts (lookup): a round of the model gave a row 2.64 tokens instead of 1; 54.5% of the draft tokens were accepted.",
        "<code>batchspec stats OUT</code> has these numbers as text",
    )
    places = [text.index(said) for said in order]
    assert places == sorted(places)
    samples = text.split("<h3>Random samples</h3>")[1].split("<h2>")[0]
    assert samples.count("<article") == 6
    assert report(tmp_path).split("<h3>Random samples</h3>")[1].split("<h2>")[0] == samples, "the seed is fixed"


def test_error_rows_are_listed_by_code_with_their_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(row: int, code: str) -> Completion:
        return failed(row).replace(error=RowError(code=code, stage="admit", message=f"row {row}:\n{HOSTILE}", retryable=False))

    rows = [bad(i, "overlong" if i < 9 else "template") if i % 2 else completion(i) for i in range(16)]
    monkeypatch.setattr(error_rows, "READ_ROWS", 3)
    monkeypatch.setattr(error_rows, "NUM_SHOWN", 3)
    folder = job(tmp_path, rows)
    errors = first_errors(folder)
    assert {code: [row.row_index for row in found] for code, found in errors.items()} == {
        "overlong": [1, 3, 5], "template": [9, 11, 13],
    }
    text = report(tmp_path)
    Tags(text)
    assert "<h4>overlong: 4 rows (the first 3)</h4>" in text
    assert "<td>q-1</td><td>1</td><td>row 1:\\n&lt;script&gt;" in text


def test_an_output_without_error_rows_is_not_read_again_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[OutputFolder]()

    def noted(folder: OutputFolder) -> dict[str, tuple[error_rows.Failed, ...]]:
        read.append(folder)
        return first_errors(folder)

    monkeypatch.setattr(page, "first_errors", noted)
    for name, rows, times in (("good", [completion(0), completion(1)], 0), ("bad", [completion(0), failed(1)], 1)):
        page.write_report(job(tmp_path / name, rows), lambda _: Thumbnails())
        assert len(read) == times


@pytest.mark.second
def test_the_head_of_the_page_names_model_sampling_date_and_duration(tmp_path: Path) -> None:
    folder = job(tmp_path, mixed(), decode={"temperature": 0.5, "seed": 3})
    record(folder)
    folder.heartbeats().write({"host": "a", "pid": 7, "began_at": 1_000_000.0, "at": 1_000_100.0, "end": "done"})
    head = report(tmp_path).split("<header>")[1].split("</header>")[0]
    for fact in (
        "<dt>Model</dt><dd>tiny</dd>", "<dt>Sampling</dt><dd>temperature 0.5, seed 3</dd>", "<dt>Wall time</dt><dd>40.0 s</dd>",
        "<dt>Began</dt><dd>1970-01-12 13:46:40 UTC</dd>", "<dt>Ended</dt><dd>1970-01-12 13:48:20 UTC</dd>",
    ):
        assert fact in head, fact


@pytest.mark.second
def test_runs_side_by_side_share_the_slots_of_both(tmp_path: Path) -> None:
    folder = job(tmp_path, mixed())
    record(folder)
    record(OutputFolder(tmp_path))
    text = report(tmp_path)
    assert "2 runs" in text
    assert "decoding 75%" in text
    assert "no row left 12%" in text


def test_what_users_and_models_wrote_stays_text(tmp_path: Path) -> None:
    job(tmp_path, [completion(i, request_id=HOSTILE, text=HOSTILE) for i in range(3)])
    text = report(tmp_path)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; $a$ \\u202e\\x1b[31m" in text


SEEN = """
(() => {
  const width = document.documentElement.clientWidth, pictures = [...document.querySelectorAll('figure > svg')];
  const outside = [...document.querySelectorAll('body *')]
    .filter(e => !e.closest('svg') && e.getBoundingClientRect().right > width + 1);
  const cut = pictures.filter(svg => [...svg.querySelectorAll('text')].some(text => {
    const [a, b] = [text.getBoundingClientRect(), svg.getBoundingClientRect()];
    return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
  }));
  const bar = [...pictures[0].querySelectorAll('path')].find(path => (path.getAttribute('style') || '').includes('--first'));
  return {
    scroll: document.documentElement.scrollWidth, outside: outside.map(e => e.outerHTML.slice(0, 80)),
    scroll_shadow: [...document.querySelectorAll('pre')].every(e => getComputedStyle(e).backgroundImage.includes('gradient')),
    scale: [...new Set(pictures.map(svg => Math.round(100 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)))],
    sizes: pictures.map(svg => [svg.clientWidth, svg.clientHeight]), cut: cut.map(svg => svg.getAttribute('aria-label')),
    ink: getComputedStyle(document.body).color, page: getComputedStyle(document.body).backgroundColor,
    fill: getComputedStyle(bar).fill,
  };
})()
"""
"""What a browser made of the page: what reaches beyond the right edge, sizes of pictures, those with words cut off, colours."""


def brightness(colour: str) -> int:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])


@pytest.mark.second
def test_a_browser_shows_all_of_it_on_a_phone_and_on_a_desk_light_and_dark(tmp_path: Path) -> None:
    rows = mixed()
    rows[7] = completion(7, request_id="a-very-long-id-without-a-space-" * 6, token_ids=np.zeros(70, np.int32), stats=stats([3]))
    folder = job(tmp_path / "out", rows)
    record(folder)
    report(tmp_path / "out")
    colours = {}
    with running_browser(tmp_path / "profile") as browser:
        for width, dark in ((380, False), (380, True), (1400, False), (1400, True)):
            browser.open(tmp_path / "out/report.html", width=width, dark=dark)
            seen = browser.value(SEEN)
            assert seen["scroll"] <= width
            assert seen["outside"] == []
            assert seen["cut"] == []
            assert len(seen["sizes"]) == 4
            assert seen["scroll_shadow"]
            assert max(seen["scale"]) - min(seen["scale"]) <= 3, "labels of all pictures are as large"
            assert all(wide > 250 and high > 120 for wide, high in seen["sizes"]), seen["sizes"]
            colours[dark] = seen
        assert browser.complaints == []
    assert brightness(colours[False]["page"]) > 700 > 100 > brightness(colours[False]["ink"])
    assert brightness(colours[True]["page"]) < 100 < 650 < brightness(colours[True]["ink"])
    assert colours[False]["fill"] != colours[True]["fill"]


def test_a_job_without_drafts_or_a_record_of_its_course_has_a_page_too(tmp_path: Path) -> None:
    rows = [completion(i, stats=stats([0, 0], [0, 0], k=0, drafter="none")) for i in range(4)]
    rows[2] = rows[2].replace(status="truncated", finish_reason="repetition")
    job(tmp_path, rows)
    text = report(tmp_path)
    Tags(text)
    assert "Drafts (" not in text
    assert "<b>1 <small>25.0%</small></b><span>truncated, 1 at a repetition</span>" in text
    assert "No run recorded a timeline." in text
    assert text.count("<svg") == 2


def test_a_job_of_error_rows_alone_has_a_page_too(tmp_path: Path) -> None:
    job(tmp_path, [failed(0), failed(1)])
    text = report(tmp_path)
    Tags(text)
    assert "Drafts (" not in text


def test_nothing_to_show_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_folder(tmp_path, 4, 2)
    monkeypatch.setattr(page, "can_draw", lambda: True)
    with pytest.raises(OutputError, match="no committed shard yet"):
        main([str(tmp_path)])
    monkeypatch.setattr(page, "can_draw", lambda: False)
    with pytest.raises(ConfigError, match=r"needs matplotlib: pip install 'matplotlib>=3.9', then batchspec report"):
        main([str(tmp_path)])


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    import polars as pl

    folder = tmp_path_factory.mktemp("model")
    model = make_tokenizer(make_checkpoint(folder, "llama"))
    pl.DataFrame({"prompt": [f"say {i}" for i in range(6)]}).write_parquet(folder / "in.parquet")
    return [f"model.path={model}", f"input.path={folder}/in.parquet", "decode.max_new_tokens=8", "packing.max_num_seqs=2"]


@pytest.mark.second
@pytest.mark.usefixtures("draws")
def test_a_job_ends_with_its_page(tmp_path: Path, command: list[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    assert run.main([*command, f"output.dir={tmp_path}/out"]) == 0
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    Tags(text)
    assert "<h3>Use of the slots</h3><svg" in text
    before = (tmp_path / "out/report.html").stat()
    assert run.main([*command, f"output.dir={tmp_path}/out"]) == 0
    assert (tmp_path / "out/report.html").stat() == before


def test_without_the_extra_a_job_prints_once_how_to_get_its_page(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conclude, "can_draw", lambda: False)
    assert run.main([*command, f"output.dir={tmp_path}/out"]) == 0
    assert capsys.readouterr().err.count("report.html needs matplotlib") == 1
    assert not (tmp_path / "out/report.html").exists()
    assert len(list(OutputFolder(tmp_path / "out").logs(".timeline.jsonl"))) == 1
