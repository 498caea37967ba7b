"""Worker processes admit rows and make tables as the run's own process does, in the same order, also where one of them dies."""

from __future__ import annotations

import errno
import hashlib
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec import run
from batchspec.config.schema import RunConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import InputShard, table_source
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.shard_writer import UnpublishedFile
from batchspec.errors import CapacityError, InputError, Interrupted, StorageError, WorkerLost
from batchspec.job.runner import shard_workers
from batchspec.job.runner.shard_work import ShardWork
from batchspec.job.runner.shard_worker import PART_ROWS, from_bytes, to_bytes
from batchspec.job.runner.shard_workers import ShardWorkers
from batchspec.packing.admit import Admission
from batchspec.packing.work_plan import AdmittedShards
from batchspec.process.out_of_memory import OutOfMemoryGuard
from batchspec.records import Completion, Request, RowStats
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import make_prompts, run_apart, signalled_after_commits
from tests.helpers.stand_ins import small_spec
from tests.job.killing_tokenizer import KillingTokenizer

COLUMNS = {
    "id": pa.string(), "prompt": pa.string(), "n": pa.int32(), "max_new_tokens": pa.int64(), "temperature": pa.float64(),
    "stop": pa.list_(pa.string()), "topic": pa.string(),
}


def make_work(table: pa.Table, tokenizer: Any) -> tuple[ShardWork, Any]:
    source, config = table_source(table), RunConfig()
    config.decode.max_new_tokens, config.output.token_ids, config.output.prompt_ids = 40, True, True
    columns = map_columns(source.schema, {})
    admission = Admission(config, source=source, columns=columns, spec=small_spec(vocab_size=400), tokenizer=tokenizer)
    work = ShardWork(admission=admission, columns=columns, input=config.input, output=config.output, attempt="one")
    return work, source


def facts(entry: Request | Completion) -> dict[str, Any]:
    names = entry.__struct_fields__ if isinstance(entry, Completion) else entry.__slots__
    found = {name: getattr(entry, name) for name in names}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


def everything(shards: AdmittedShards) -> list[tuple[int, int, list[dict[str, Any]]]]:
    return [(one.shard.index, one.shard.first_row, [facts(entry) for entry in one.entries]) for one in shards]


def prompts(*texts: str) -> pa.Table:
    return pa.table({"prompt": list(texts)})


def rows() -> st.SearchStrategy[dict[str, Any]]:
    """Good rows and bad ones: no prompt, none that fits, values out of range, stop strings that are none."""
    return st.fixed_dictionaries(
        {
            "prompt": st.one_of(st.none(), st.text(max_size=12), st.just("word " * 600)),
            "n": st.sampled_from([None, 1, 3]),
            "max_new_tokens": st.sampled_from([None, 0, 7, 5000]),
            "temperature": st.sampled_from([None, -1.0, 0.5]),
            "stop": st.sampled_from([None, ["a", "b"], [""]]),
            "topic": st.sampled_from([None, "x"]),
        }
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_tokenizer(tmp_path_factory.mktemp("model")))


@settings(max_examples=40)
@given(st.lists(rows(), min_size=1, max_size=12))
def test_what_is_sent_between_processes_comes_out_as_it_went_in(tokenizer: Tokenizer, made: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist([{"id": f"q{i}", **row} for i, row in enumerate(made)], pa.schema(COLUMNS))
    work, source = make_work(table, tokenizer)
    copy: ShardWork = from_bytes(to_bytes(work))
    for shard in source.shards(5):
        sent: InputShard = from_bytes(to_bytes(shard))
        assert sent.table.equals(shard.table)
        assert sent.table.num_rows <= 5
        entries = list(work.admission.admit(shard))
        again = from_bytes(to_bytes(list(copy.admission.admit(sent))))
        assert [facts(entry) for entry in again] == [facts(entry) for entry in entries]


def completion_of(request: Request) -> Completion:
    stats = RowStats(
        drafter="lookup", draft_len=2, num_prefills=1, num_rounds=2, num_drafted=4, num_accepted=1, num_discarded=0,
        histogram=(1, 1, 0), drafted_at=(2, 2), accepted_at=(1, 0), prefill_s=0.5, decode_s=1.5, slot=3,
    )
    return Completion(
        request_id=request.request_id, row_index=request.row_index, sample_index=request.sample_index, shard=request.shard,
        status="ok", finish_reason="stop", prompt_ids=request.prompt_ids, token_ids=np.arange(9, 14, dtype=np.int32),
        num_undecoded=4,
        seed=request.seed, predicted_tokens=request.predicted_tokens, stats=stats, logprobs=np.array([0.5, np.nan], np.float32),
    )


@pytest.mark.second
def test_workers_give_the_rows_errors_order_and_tables_of_the_plain_path(tokenizer: Tokenizer) -> None:
    table = pa.table(
        {
            "id": [f"q{i}" for i in range(37)],
            "messages": [None if i == 5 else [{"role": "user", "content": f"Say {i}"}] for i in range(37)],
            "n": [3 if i == 7 else None for i in range(37)],
            "topic": [f"t{i % 3}" for i in range(37)],
        }
    )
    work, source = make_work(table, tokenizer)
    with closing(ShardWorkers(work, 2)) as workers:
        wanted, found = work.admitted(source.shards(4)), workers.admitted(source.shards(4))
        assert everything(found) == everything(wanted)
        for shard in source.shards(10):
            entries = work.admission.admit(shard)
            done = [entry if isinstance(entry, Completion) else completion_of(entry) for entry in entries][::-1]
            made, plain = workers.begin_table(shard, done).make(), work.table(shard, done)
            assert made.schema == plain.schema
            rows = sorted(done, key=lambda done: done.row_index)
            texts = [None if done.num_undecoded is None else tokenizer.decode(range(9, 13)) for done in rows]
            assert made["completion"].to_pylist() == texts, "the text of the stop id, the last token, is left out"
            assert made.drop_columns("perf").to_pylist() == plain.drop_columns("perf").to_pylist()
            assert [row["slot"] for row in made["perf"].to_pylist()] == [row["slot"] for row in plain["perf"].to_pylist()]


@pytest.mark.second
def test_a_shard_of_several_parts_is_predicted_by_the_rows_that_the_run_has_finished(tokenizer: Tokenizer) -> None:
    """Then the run need not make the requests again with another prediction."""
    rows = 2 * PART_ROWS + 3
    work, source = make_work(pa.table({"prompt": [f"Say {i}" for i in range(rows)], "max_new_tokens": [400] * rows}), tokenizer)
    with closing(ShardWorkers(work, 1)) as workers:
        work.admission.predictor.num_rows, work.admission.predictor.num_tokens = 10_000, 1_000_000
        (shard,) = workers.admitted(source.shards(rows))
        entries = [cast(Request, entry) for entry in shard.entries]
    assert [entry.row_index for entry in entries] == [*range(rows)]
    assert {entry.predicted_tokens for entry in entries} == {100}
    entries[0].prompt_ids[0] = 1  # the array is writable


@pytest.mark.second
def test_no_more_is_read_than_was_asked_for_and_a_few_shards_ahead() -> None:
    work, source = make_work(prompts(*"abcdefghijkl"), KillingTokenizer())
    read: list[int] = []

    def noted() -> Iterator[InputShard]:
        for shard in source.shards(1):
            read.append(shard.index)
            yield shard

    with closing(ShardWorkers(work, 1)) as workers:
        shards = workers.admitted(noted())
        assert read == []
        while not shards.is_ready():
            time.sleep(0.01)
        assert next(shards).shard.index == 0
        workers.settle()
        before = list(read)
        assert len(before) <= 1 + shard_workers.AHEAD
        assert before == list(range(len(before)))
        shards.is_ready()
        workers.settle()
        assert next(workers.admitted(source.shards(1))).shard.index == 0, "other shards are read after that"


@pytest.mark.second
def test_what_reading_raises_is_raised_at_the_shard_that_could_not_be_read() -> None:
    work, source = make_work(prompts("a", "b"), KillingTokenizer())

    def damaged() -> Iterator[InputShard]:
        yield from source.shards(1)
        raise InputError("page 3 is damaged")

    with closing(ShardWorkers(work, 1)) as workers:
        shards = workers.admitted(damaged())
        assert [next(shards).shard.index for _ in range(2)] == [0, 1]
        with pytest.raises(InputError, match="page 3 is damaged"):
            next(shards)


@pytest.mark.second
def test_an_exception_of_a_worker_is_raised_in_the_caller() -> None:
    work, source = make_work(prompts("a"), KillingTokenizer())
    (shard,) = source.shards(1)
    with closing(ShardWorkers(work, 1)) as workers, pytest.raises(AttributeError, match="num_undecoded"):
        workers.begin_table(shard, [cast(Completion, "no completion")]).make()


@pytest.mark.second
def test_a_worker_writes_a_verified_file_that_only_the_run_itself_publishes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    work, source = make_work(prompts("a", "b", "c"), tokenizer)
    output = OutputFolder(tmp_path / "out")
    output.create(fingerprint={}, config={}, recorded={}, num_rows=3, shard_rows=3, files=source.files)
    (shard,) = source.shards(3)
    done = [completion_of(cast(Request, entry)) for entry in work.admission.admit(shard)]
    with closing(ShardWorkers(work, 1)) as workers:
        file = workers.begin_file(shard, done, output.unpublished(0))
        first = file.write()
        assert hashlib.sha256(first.path.read_bytes()).hexdigest() == first.sha256
        assert not output.committed(), "a written file is not committed"
        first.path.write_bytes(b"damaged")
        assert output.publish(0, file), "asked again, it writes the file anew"
        assert pl.read_parquet(tmp_path / "out/data")["completion"].to_list() == [tokenizer.decode(range(9, 13))] * 3
        with pytest.raises(ValueError, match="lacks rows"):
            workers.begin_file(shard, done[:1], output.unpublished(0)).write()


@pytest.mark.second
def test_a_file_that_a_worker_could_not_write_says_why(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The cause tells a full disk from a job that was deleted meanwhile (`OutputFolder.publish`)."""
    work, source = make_work(prompts("a"), tokenizer)
    (shard,) = source.shards(1)
    done = [completion_of(cast(Request, entry)) for entry in work.admission.admit(shard)]
    nowhere = UnpublishedFile(path=tmp_path / "gone/file", rows=range(1), metadata={})
    with closing(ShardWorkers(work, 1)) as workers, pytest.raises(StorageError, match="ENOENT") as raised:
        workers.begin_file(shard, done, nowhere).write()
    assert isinstance(raised.value.__cause__, FileNotFoundError)


@pytest.mark.second
def test_a_worker_that_dies_is_named_and_its_shard_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    work, source = make_work(prompts("a", f"{tmp_path}/mark die once", "b"), KillingTokenizer())
    with closing(ShardWorkers(work, 1)) as workers, caplog.at_level(logging.WARNING):
        found = everything(workers.admitted(source.shards(1)))
    assert found == everything(work.admitted(source.shards(1)))
    assert [line for line in caplog.messages if "ended with -9 while it was to admit shard 1: another one does it again" in line]


@pytest.mark.second
def test_a_shard_that_kills_two_workers_ends_the_run_with_one_line() -> None:
    work, source = make_work(prompts("a", "now die", "b"), KillingTokenizer())
    with closing(ShardWorkers(work, 1)) as workers:
        shards = workers.admitted(source.shards(1))
        assert next(shards).shard.index == 0
        with pytest.raises(
            WorkerLost, match=r"ended with -9 while it was to admit shard 1, and so did one before it; .*num_workers=0"
        ):
            next(shards)
        assert next(shards).shard.index == 2


def test_no_shard_is_blamed_for_workers_that_die_while_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_workers, "COMMAND", "import os; os.kill(os.getpid(), 9)")
    work, source = make_work(prompts("a"), KillingTokenizer())
    said = "ended with -9 while it started; look for a lack of memory"
    with closing(ShardWorkers(work, 1)) as workers, pytest.raises(CapacityError, match=said):
        next(workers.admitted(source.shards(1)))


@pytest.mark.second
def test_a_worker_that_cannot_be_replaced_for_lack_of_memory_is_replaced_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run goes on with a smaller batch after such an error."""

    def no_memory(first_message: bytes) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    work, source = make_work(prompts("a", "b"), KillingTokenizer())
    with closing(ShardWorkers(work, 1)) as workers:
        assert everything(workers.admitted(source.shards(1))) == everything(work.admitted(source.shards(1)))
        for _ in range(2):
            workers._all[0].kill()
            with monkeypatch.context() as patch:
                patch.setattr(shard_workers, "_Process", no_memory)
                for _ in range(2):
                    with OutOfMemoryGuard() as guard:
                        next(workers.admitted(source.shards(1)))
                    assert guard.message
                    workers.settle()
            assert everything(workers.admitted(source.shards(1))) == everything(work.admitted(source.shards(1)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64))


def arguments(model: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={folder}/prompts.parquet", f"output.dir={folder}/out",
        "output.shard_rows=3", "decode.max_new_tokens=6", "output.token_ids=true", "packing.max_num_seqs=4", *more,
    ]


def rows_of(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "data").drop("perf", "spec_decode", "usage")


@pytest.mark.second
def test_a_job_with_workers_writes_the_rows_of_one_without_also_after_a_signal(model: Path, tmp_path: Path) -> None:
    for name in ("with", "without"):
        make_prompts((tmp_path / name).with_suffix(".parquet"), 20)
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.parquet").rename(tmp_path / name / "prompts.parquet")
    assert run.main(arguments(model, tmp_path / "without")) == 0
    command = arguments(model, tmp_path / "with", "input.num_workers=1")
    code, said = run_apart(command, tmp_path / "log", partial(signalled_after_commits, 2, signal.SIGTERM))
    assert code == Interrupted.exit_code, said
    assert run.main(command) == 0
    assert rows_of(tmp_path / "with" / "out").equals(rows_of(tmp_path / "without" / "out"))


@pytest.mark.second
def test_after_workers_were_lost_the_shards_in_flight_are_suspects(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_prompts(tmp_path / "prompts.parquet", 9)
    start = "import sys; sys.stdin.buffer.read(8); sys.stdout.buffer.write(bytes(8)); sys.stdout.flush(); sys.exit(9)"
    monkeypatch.setattr(shard_workers, "COMMAND", start)
    assert run.main(arguments(model, tmp_path, "input.num_workers=1")) == WorkerLost.exit_code
    assert "ended with 9 while it was to admit shard 0, and so did one before it" in capsys.readouterr().err
    assert OutputFolder(str(tmp_path / "out")).attempts().suspect_shards() >= {0}
    monkeypatch.undo()
    assert run.main(arguments(model, tmp_path, "input.num_workers=1")) == 0
    assert rows_of(tmp_path / "out")["request_id"].to_list() == [f"q{i}" for i in range(9)]


class Interrupting:
    """A pipe whose reader is interrupted before the answer has come."""

    def read(self, count: int) -> bytes:
        raise MemoryError


@pytest.mark.second
def test_an_answer_that_was_not_read_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    work, source = make_work(prompts("a", "b"), KillingTokenizer())
    with closing(ShardWorkers(work, 1)) as workers:
        first, second = source.shards(1)
        list(next(workers.admitted(iter([first]))).entries)
        with monkeypatch.context() as patch:
            patch.setattr(workers._all[0]._process, "stdout", Interrupting())
            table = workers.begin_table(first, [])
            with pytest.raises(MemoryError):
                table.make()
        admitted = next(workers.admitted(iter([second])))
        assert [entry.row_index for entry in admitted.entries] == [1]
