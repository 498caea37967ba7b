"""`batchspec status`: what it reports of a job, from progress files, claims and the names of shards alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch

from batchspec import run
from batchspec.commands import stats as stats_command
from batchspec.commands import status as command
from batchspec.commands.status import render
from batchspec.data.runstate import heartbeat_writer
from batchspec.data.runstate import heartbeats as heartbeats_module
from batchspec.data.runstate.claims import this_process
from batchspec.data.runstate.heartbeat_writer import HeartbeatWriter, mark_requeued, starting
from batchspec.data.runstate.heartbeats import FOLDER, RunHeartbeat
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.engine.rounds.records import RoundResult
from batchspec.engine.rounds.round import Round
from batchspec.errors import ConfigError, Interrupted, OutputError, StorageError
from batchspec.job import run_job as job_module
from batchspec.job.report.status import JobStatus, StatusReader
from tests.helpers.io_samples import built, dataset, new_folder, shards_of
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import put, start_apart

NOW = 1_000_000.0


def attempt(number: int) -> str:
    return f"{number:032x}"


def job(path: Path, *, rows: int = 20, committed: int = 4) -> OutputFolder:
    """Shards of two rows, the first ones committed."""
    folder = new_folder(path, rows, 2)
    shards, columns = shards_of(dataset(rows), 2)
    for shard in shards[:committed]:
        folder.commit(shard.index, built(shard, columns))
    return folder


def say(path: Path, number: int, **facts: Any) -> None:
    """A progress file of another machine's run, a minute and a half old in its run, as of now."""
    known: dict[str, Any] = {
        "host": f"node{number}", "pid": 40 + number, "began_at": NOW - 90, "at": NOW - 4, "expected": 20, "shards": 1, "slots": 8,
        "completions": 2, "tokens": 1000, "accepted": 300, "rounds": 200, "live_rows": 8, "tok_s": 100.0, "mean_output": 100.0,
    }
    file = path / FOLDER / f"{attempt(number)}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"attempt": attempt(number), **known, **facts}))


def claim(path: Path, shard: int, number: int) -> None:
    file = path / f"_batchspec/claims/{shard:05d}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"owner": attempt(number), "counter": 3}))


def look(path: Path) -> JobStatus:
    return StatusReader(OutputFolder(path), clock=lambda: NOW).read()


def test_progress_and_time_left_are_those_of_all_living_runs_together(tmp_path: Path) -> None:
    job(tmp_path)
    for number in (1, 2):
        say(tmp_path, number, open_shards=[[3, 2], [3 + number, 1]], in_flight_tokens=100)
        claim(tmp_path, 3 + number, number)
    say(tmp_path, 3, end="done", tokens=500, accepted=0, rounds=100, open_shards=[[9, 9]], tok_s=70.0)
    got = look(tmp_path)
    assert (got.state, got.shards, got.shards_total, got.rows, got.rows_total) == ("running", 4, 10, 8, 20)
    assert (got.completions, got.completions_total) == (8 + 2, 20)
    assert got.tok_s == 200
    assert got.left_s == (10 * 100 - 200) / 200
    assert got.share == (10 + 200 / 100) / 20, "tokens of unfinished rows count as parts of one"
    assert got.tokens == 2500
    assert got.mean_acceptance_length == 1 + 600 / 500


def test_rows_saved_at_a_signal_count_until_another_run_resumes_them(tmp_path: Path) -> None:
    job(tmp_path, committed=0)
    say(tmp_path, 1, end="interrupted", open_shards=[[0, 1], [1, 1]], in_flight_tokens=100, at=NOW - 50)
    got = look(tmp_path)
    assert (got.state, got.completions, got.share) == ("stopped", 2, (2 + 1) / 20)
    assert "15.0% done, 0 of 10 shards committed (0 of 20 rows)" in render(got)
    say(tmp_path, 2, open_shards=[[0, 2], [1, 1]], in_flight_tokens=50, began_at=NOW - 40)
    claim(tmp_path, 0, 2)
    got = look(tmp_path)
    assert (got.state, got.completions, got.share) == ("running", 3, (3 + 0.5) / 20), "each row once"


def test_a_young_run_speaks_soon_and_then_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    beacon = HeartbeatWriter(SimpleNamespace(write=lambda facts: None, beat_s=10.0))  # type: ignore[arg-type]

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) == 6  # `begin`: there is more to report

    monkeypatch.setattr(beacon, "_over", SimpleNamespace(is_set=lambda: len(waited) == 8))
    monkeypatch.setattr(beacon, "_woken", SimpleNamespace(wait=wait, clear=lambda: None))
    beacon._begun = True
    beacon._beat()
    assert waited == [1, 2, 4, 8, 10, 10, 1, 2]


def test_what_became_of_every_run_is_told(tmp_path: Path) -> None:
    job(tmp_path)
    here = {**this_process(), "restart": 0}
    say(tmp_path, 1)
    say(tmp_path, 2, end="done")
    say(tmp_path, 3, end="interrupted", said="SIGTERM: 4 of 10 shards are committed")
    say(tmp_path, 4, end="crashed", said="RuntimeError: bad \x1b[31m news")
    say(tmp_path, 5, at=NOW - 600)
    say(tmp_path, 6, **here | {"host": socket.gethostname()})
    say(tmp_path, 7, **here | {"host": socket.gethostname(), "started": "boot:1"})
    say(tmp_path, 8, task="78/3/0", job="77_3", restart=1)
    say(tmp_path, 9, task="78/3/0", job="77_3")
    say(tmp_path, 10, quiet_s=200.0)
    say(tmp_path, 11, quiet_s=200.0)
    for shard, number in ((4, 1), (5, 6), (6, 10), (7, 5), (8, 8), (3, 3), (9, 99)):
        claim(tmp_path, shard, number)
    got = look(tmp_path)
    of = {int(each.run.attempt, 16): each for each in got.runs}
    assert {number: of[number].state for number in sorted(of)} == {
        1: "running", 2: "done", 3: "interrupted", 4: "crashed", 5: "silent", 6: "running", 7: "gone", 8: "running", 9: "gone",
        10: "stuck", 11: "waiting",
    }
    assert got.stale_claims == {7: attempt(5)}, "of runs that have ended, on shards that are not committed"
    assert of[1].shards == (4,)
    text = command.render(got)
    for said in (
        "interrupted 4 s ago, 1 shard, 2 completions: SIGTERM: 4 of 10 shards", "RuntimeError: bad \\x1b[31m news",
        "stale claims of runs that have ended, on shards 7: another run will take them over", "job 77_3 start 2",
        "stuck: node10:50 has had no result for 03:20", "node5:45  silent 10:00 ago",
    ):
        assert said in text, said
    assert "\x1b" not in text


def test_a_run_less_than_half_as_fast_as_the_others_is_a_straggler(tmp_path: Path) -> None:
    job(tmp_path)
    for number, speed in enumerate((100.0, 120.0, 45.0, 90.0)):
        say(tmp_path, number, tok_s=speed)
        claim(tmp_path, 5 + number, number)
    say(tmp_path, 8, tok_s=5.0, began_at=NOW - 20)
    claim(tmp_path, 9, 8)
    got = look(tmp_path)
    assert [each.run.tok_s for each in got.runs if each.straggler] == [45.0], "the one that has just begun is none"
    assert got.runs[0].straggler
    assert "stragglers, less than half the speed of the others: node2:42" in command.render(got)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[1]", '{"attempt": 5}', '{"attempt": ""}', '{"attempt": "a", "tokens": "many"}', "\xff\xfe",
        '{"attempt": "a", "tokens": NaN}', '{"attempt": "a", "at": 1e400}', '{"attempt": "a", "pid": -1}', "[" * 100_000,
        '{"attempt": "a", "host": ["x"]}', '{"attempt": "a", "open_shards": [1]}',
        '{"attempt": "a", "slots": true}', '{"attempt": "a", "tokens": ' + "9" * 5000 + "}",
    ],
)
def test_a_torn_or_foreign_file_is_counted_and_passed_over(tmp_path: Path, text: str) -> None:
    job(tmp_path)
    say(tmp_path, 1)
    claim(tmp_path, 4, 1)
    whole = look(tmp_path)
    (tmp_path / FOLDER / f"{attempt(2)}.json").write_bytes(text.encode("latin-1"))
    (tmp_path / FOLDER / f"{attempt(3)}.json").mkdir()
    (tmp_path / FOLDER / "notes.txt").write_text("mine")
    (tmp_path / "_batchspec/claims/notes.txt").write_text("mine")
    got = look(tmp_path)
    assert got.unreadable == 2
    assert (got.runs, got.left_s, got.tokens) == (whole.runs, whole.left_s, whole.tokens)
    assert "2 progress files not readable, ignored" in command.render(got)


def test_fields_that_a_later_version_adds_or_drops_are_no_fault() -> None:
    got = RunHeartbeat.parse(b'{"attempt": "a", "tokens": 5.0, "new": [1]}')
    assert got is not None
    assert (got.tokens, got.slots) == (5, 0)


def test_a_job_that_never_began_one_that_nobody_works_on_and_no_job_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for words in ([str(out)], [str(out), "--json"]):
        with pytest.raises(OutputError, match=r"out: no job there; a run makes its output folder") as refused:
            command.main(words)
        assert refused.value.exit_code == 2
    assert capsys.readouterr().out == ""
    assert not out.exists(), "reading the status changes nothing"
    job(out, committed=1)
    assert command.main([str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: stopped", "  10.0% done, 1 of 10 shards committed (2 of 20 rows)", "  0 tokens",
        "  no run is working on it; run the same command again to continue",
    ]
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(OutputError, match="holds no batchspec job"):
        command.main([str(tmp_path)])
    with pytest.raises(OutputError, match=r"thesis.txt is a file; give the output.dir of a run"):
        command.main([str(tmp_path / "thesis.txt")])


def test_json_output_is_complete_and_watching_ends_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, committed=9)
    say(tmp_path, 1)
    claim(tmp_path, 9, 1)
    shards, columns = shards_of(dataset(20), 2)

    def finish(_: float) -> None:
        OutputFolder(tmp_path).commit(9, built(shards[9], columns))

    monkeypatch.setattr(time, "sleep", finish)
    assert command.main([str(tmp_path), "--watch", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["shards"], second["shards"], second["state"]) == (9, 10, "complete")
    assert first["runs"][0]["run"]["host"] == "node1"
    with pytest.raises(ConfigError, match="--watch 0: must be at least 1 second"):
        command.main([str(tmp_path), "--watch", "0"])


class Files:
    """In place of HeartbeatFiles: a store that answers as `act` does."""

    beat_s = 0.01

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.act, self.written = act, list[dict[str, Any]]()

    def write(self, facts: dict[str, Any]) -> None:
        self.written.append(facts)
        self.act()


@pytest.mark.parametrize(
    ("error", "end", "said"),
    [
        (None, "done", ""),
        (Interrupted("SIGTERM: 1 of 2"), "interrupted", "SIGTERM: 1 of 2"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C"),
        (StorageError("disk full"), "failed", "disk full"),
        (RuntimeError("a\nb"), "crashed", "RuntimeError: a b"),
    ],
)
def test_the_last_status_of_a_run_tells_how_it_ended(error: BaseException | None, end: str, said: str) -> None:
    files: Any = Files()
    with suppress(BaseException), HeartbeatWriter(files) as heartbeat:
        heartbeat.begin(lambda: {"tokens": 7}, slots=4)
        if error is not None:
            raise error
    last = files.written[-1]
    assert (last["end"], last.get("said", ""), last["tokens"], last["slots"]) == (end, said, 7, 4)
    assert all("end" not in facts for facts in files.written[:-1])


def test_a_store_that_fails_or_hangs_keeps_no_run_from_working_or_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise StorageError("down")

    failing: Any = Files(fail)
    with HeartbeatWriter(failing) as heartbeat:
        heartbeat.begin(slots=1)
        while len(failing.written) < 3:
            time.sleep(0.01)
    assert failing.written[-1]["end"] == "done"
    monkeypatch.setattr(heartbeat_writer, "LAST_BEAT_S", 0.1)
    over = threading.Event()

    def hang() -> None:
        over.wait(60)

    hanging: Any = Files(hang)
    began = time.monotonic()
    with HeartbeatWriter(hanging) as heartbeat:
        heartbeat.begin(slots=1)
    over.set()
    assert time.monotonic() - began < 30


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("model")
    model = make_tokenizer(make_checkpoint(folder, "llama", dtype=torch.float64))
    pl.DataFrame({"prompt": [f"say {i}" for i in range(24)]}).write_parquet(folder / "in.parquet")
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={folder}/in.parquet", "decode.max_new_tokens=40",
        "packing.max_num_seqs=3", "output.shard_rows=4", "draft=lookup",
    ]


def slowly() -> None:
    """A patch: 20 rounds a second and a progress file every tenth of one."""
    put(heartbeats_module, "BEAT_S", 0.1)
    step = Round.run

    def slow(self: Round, *rest: Any, **named: Any) -> RoundResult:
        time.sleep(0.05)
        return step(self, *rest, **named)

    Round.run = slow  # type: ignore[method-assign]


def until(reader: StatusReader, process: ForkServerProcess, log: Path, wanted: Callable[[JobStatus], bool]) -> JobStatus:
    while process.exitcode is None:
        if wanted(status := reader.read()):
            return status
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.mark.second
def test_a_job_is_followed_from_before_its_beginning_through_a_signal_and_a_kill_to_its_end(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [*words, f"output.dir={out}"]
    reader = StatusReader(OutputFolder(out))
    assert reader.read().state == "not begun"

    log = tmp_path / "log"
    first = start_apart(words, log, slowly)
    status = until(reader, first, log, lambda status: status.tokens > 0 and status.left_s is not None)
    (mine,) = status.runs
    assert (status.state, mine.state, mine.run.pid, mine.run.slots, mine.lives) == ("running", "running", first.pid, 3, True)
    assert mine.shards
    assert 0 <= status.completions < status.completions_total == 24
    assert first.pid is not None
    os.kill(first.pid, signal.SIGTERM)
    first.join(60)
    assert first.exitcode == 75
    status = reader.read()
    assert (status.state, status.runs[0].state, status.left_s) == ("stopped", "interrupted", None)
    assert status.runs[0].run.said.startswith("SIGTERM: ")
    assert status.stale_claims == {}, "it gave them up itself"

    second = start_apart(words, log, slowly)
    until(reader, second, log, lambda status: any(each.lives and each.run.tokens > 0 for each in status.runs))
    second.kill()
    second.join()
    status = reader.read()
    assert status.state == "stopped"
    assert set(status.stale_claims.values()) == {each.run.attempt for each in status.runs if each.state == "gone"}
    assert sorted(each.state for each in status.runs) == ["gone", "interrupted"]

    assert run.main(words) == 0
    status = reader.read()
    assert (status.state, status.completions, status.left_s, status.stale_claims) == ("complete", 24, None, {})
    assert sorted(each.state for each in status.runs) == ["done", "gone", "interrupted"]
    assert sum(each.run.shards for each in status.runs if each.state != "gone") <= status.shards
    capsys.readouterr()
    assert command.main([str(out)]) == 0
    assert "ended: 1 done, 1 gone, 1 interrupted" in capsys.readouterr().out


@pytest.mark.second
def test_a_run_that_ended_while_it_loaded_is_told_of_too(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [*words, f"output.dir={out}", "decode.max_new_tokens=2"]
    assert run.main(words) == 0
    (out / "data/part-00003.parquet").unlink()
    states = list[str]()

    def interrupted(*_: Any) -> None:
        reader = StatusReader(OutputFolder(out))
        while not (living := [each.state for each in reader.read().runs if each.lives]):
            time.sleep(0.01)
        states.extend(living)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job_module, "EngineWithFallback", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run.main(words)
    assert states == ["loading", "loading"]
    assert run.main(words) == 0
    capsys.readouterr()
    assert command.main([str(out)]) == 0
    assert "ended: 2 done, 2 interrupted\n" in capsys.readouterr().out


def test_a_run_that_starts_on_a_job_says_so_before_its_imports_and_leaves_nothing_if_it_is_refused(tmp_path: Path) -> None:
    job(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with starting(str(tmp_path)):
        got = waited_for(tmp_path, "loading")
        (mine,) = got.runs
        assert (mine.state, mine.run.pid, mine.run.slots) == ("loading", os.getpid(), 0)
        assert re.search(r"\n  loading: \S+, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \(\d s\); it has no batch yet\n", render(got))
    after = [path for path in sorted(tmp_path.rglob("*")) if path.name != "progress"]
    assert (after, StatusReader(OutputFolder(tmp_path)).read().state) == (before, "stopped")


def test_a_run_that_starts_a_job_writes_nothing_before_its_checks_and_says_then_that_it_loads(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with starting(str(out)) as heartbeat:
        time.sleep(0.05)
        assert not out.exists()
        with suppress(KeyError), heartbeat:
            heartbeat.begin()
            got = waited_for(out, "loading")
            assert "\n  loading: " in render(got)
            assert "shards" not in render(got).partition("\n\n")[0]
            raise KeyError("lost")
    got = waited_for(out, "not begun")
    assert [(each.state, each.run.said) for each in got.runs] == [("crashed", "KeyError: 'lost'")]
    text = render(got)
    assert "no run is working on it; run the same command again to continue" in text
    assert "crashed" in text
    assert OutputFolder(out).begins_job(overwrite=False)


def waited_for(path: Path, state: str) -> JobStatus:
    """The status once it is this."""
    until = time.monotonic() + 10
    while (got := StatusReader(OutputFolder(path)).read()).state != state:
        assert time.monotonic() < until, got
        time.sleep(0.01)
    return got


def test_runs_that_died_while_they_loaded_a_new_job_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "_batchspec").mkdir()
    say(tmp_path, 1, slots=0, at=NOW - 60, began_at=NOW - 100)
    assert look(tmp_path).state == "loading"
    say(tmp_path, 1, slots=0, at=NOW - 600)
    say(tmp_path, 2, **{**this_process(), "host": socket.gethostname(), "started": "boot:1", "restart": 0}, slots=0)
    got = look(tmp_path)
    assert (got.state, {each.state for each in got.runs}) == ("not begun", {"silent", "gone"})
    assert command.main([str(tmp_path)]) == 0


def test_a_requeued_task_is_told_apart_from_a_stopped_one_until_it_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path)
    for name, value in {"JOB_ID": "78", "ARRAY_TASK_ID": "3", "PROCID": "0", "RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    say(tmp_path, 1, task="78/3/0", job="77_3", restart=1, end="interrupted", open_shards=[[4, 1]], in_flight_tokens=100)
    say(tmp_path, 2, task="78/4/0", job="77_4", restart=1, end="interrupted")
    reader = StatusReader(OutputFolder(tmp_path), clock=lambda: NOW)
    assert reader.read().state == "stopped"
    mark_requeued(str(tmp_path), requeued=True)
    got = reader.read()
    assert (got.state, {each.run.job: each.state for each in got.runs}) == (
        "requeued", {"77_3": "requeued", "77_4": "interrupted"}
    )
    assert "requeued: job 77_3 start 2, 4 s ago; the batch system starts it again" in render(got)
    assert "run the same command again" not in render(got)
    assert got.share == pytest.approx((8 + 1 + 100 / 100) / 20), "the tokens that it saved count on"
    say(tmp_path, 3, task="78/3/0", job="77_3", restart=2, slots=0)
    got = reader.read()
    assert (got.state, {each.run.restart: each.state for each in got.runs if each.run.job == "77_3"}) == (
        "loading", {1: "interrupted", 2: "loading"}
    )
    mark_requeued(str(tmp_path), requeued=False)
    (tmp_path / FOLDER / f"{attempt(3)}.json").unlink()
    assert reader.read().state == "stopped"


def test_a_loading_run_takes_no_time_left_or_saved_tokens_away(tmp_path: Path) -> None:
    job(tmp_path, committed=0)
    say(tmp_path, 1, end="interrupted", open_shards=[[0, 1]], in_flight_tokens=100, at=NOW - 50)
    say(tmp_path, 2, began_at=NOW - 40, slots=0, tokens=0, tok_s=0, end="interrupted", completions=0, mean_output=0, rounds=0)
    got = look(tmp_path)
    assert (got.completions, got.share) == (1, (1 + 1) / 20), "the tokens that the first one saved are still there"


def test_a_killed_run_takes_no_saved_tokens_away(tmp_path: Path) -> None:
    """It saved none of its own, so the next run resumes the rows from those of the run before."""
    job(tmp_path, committed=0)
    say(tmp_path, 1, end="interrupted", open_shards=[[0, 1]], in_flight_tokens=100, at=NOW - 50)
    say(tmp_path, 2, began_at=NOW - 40, open_shards=[[0, 1]], in_flight_tokens=300, end="crashed")
    got = look(tmp_path)
    assert (got.state, got.completions, got.share) == ("stopped", 1, (1 + 1) / 20)


def test_the_time_left_is_unknown_where_rows_are_longer_than_was_expected(tmp_path: Path) -> None:
    job(tmp_path, committed=9)
    say(tmp_path, 1, in_flight_tokens=300)
    claim(tmp_path, 9, 1)
    got = look(tmp_path)
    assert got.left_s is None
    assert "time left unknown" in render(got)


@pytest.mark.second
def test_a_job_whose_progress_cannot_be_written_runs_all_the_same(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "_batchspec").mkdir()
    (tmp_path / FOLDER).write_text("in the way")
    assert run.main([*words, f"output.dir={tmp_path}", "decode.max_new_tokens=2"]) == 0
    assert len(list((tmp_path / "data").iterdir())) == 6


def test_skipped_rows_are_told_by_the_run_by_status_and_by_stats(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pl.DataFrame({"prompt": ["say 1", "x" * 2000, "y" * 2000, "say 2"]}).write_parquet(tmp_path / "in.parquet")
    keys = [f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out", "decode.max_new_tokens=2"]
    assert run.main([*words, *keys, "input.on_overlong=skip", "output.shard_rows=2"]) == 0
    assert f"{tmp_path}/out: 2 skipped rows, whose prompts are too long (input.on_overlong=skip)\n" in capsys.readouterr().err
    assert command.main([f"{tmp_path}/out"]) == 0
    assert "  2 skipped rows (input.on_overlong=skip)\n" in capsys.readouterr().out
    assert command.main([f"{tmp_path}/out", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["errors"], found["skipped"], str(found["completions"]), str(found["completions_total"])) == (0, 2, "4", "4")
    assert stats_command.main([f"{tmp_path}/out"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^completions +4 \(2 skipped, 2 truncated\)$", said, re.MULTILINE)
    assert re.search(r"^finish reasons +2 length$", said, re.MULTILINE)
    assert re.search(r"^errors +none$", said, re.MULTILINE)
