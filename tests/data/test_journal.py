"""The journal: what comes out is what went in, of damaged segments nothing, of several attempts the most."""

from __future__ import annotations

import errno
import json
import logging
import threading
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchspec.data.runstate import journal_rows
from batchspec.data.runstate.journal import FOLDER, Journal, Journaled, saved_rows
from batchspec.data.storage import local_store
from batchspec.data.storage.local_store import LocalStore
from batchspec.errors import StorageError
from batchspec.process.local_files import open_regular
from batchspec.records import Completion, RowError, RowStats, Snapshot

STATS = RowStats(
    drafter="lookup", draft_len=2, num_prefills=1, num_rounds=2, num_drafted=3, num_accepted=1, num_discarded=0,
    histogram=(1, 1, 0), drafted_at=(2, 1), accepted_at=(1, 0), prefill_s=0.25, decode_s=1.5, slot=3,
)
FULL = Completion(
    request_id="q\u00e9", row_index=7, sample_index=1, shard=2, status="ok", finish_reason="stop", stop_reason="END",
    prompt_ids=np.array([1, 2], np.int32), token_ids=np.array([3, 4, 5], np.int32), text="a\nb", seed=-5, predicted_tokens=9,
    logprobs=np.array([-0.1, -0.2, -3.0], np.float32), cached_tokens=16, stats=STATS,
    top_logprobs=(np.array([[3, 1], [4, 0], [5, 2]], np.int32), np.array([[-0.1, -2], [-0.2, -1], [-3, -4]], np.float32)),
)
SCORED = Completion(
    request_id="s", row_index=6, sample_index=0, shard=2, status="ok", finish_reason="length",
    prompt_ids=np.array([7, 8], np.int32), prompt_logprobs=np.array([np.nan, -0.5], np.float32),
    prompt_top_logprobs=(np.array([[-1], [8]], np.int32), np.array([[np.nan], [-0.5]], np.float32)), stats=STATS,
)
BAD = Completion(
    request_id="x", row_index=8, sample_index=0, shard=2, status="error", finish_reason="error",
    error=RowError(code="too_long", stage="admit", message="much", retryable=False),
)
LEFT = Snapshot(
    row_index=9, sample_index=0, shard=2, tokens=(4, 5), num_prefills=1, cached_tokens=0, accepted=(1, 0), drafted=(0, 1),
    prefill_s=0.1, decode_s=0.2,
)


def journal(root: Path, attempt: str = "a") -> Journal:
    store = LocalStore(root, "tmp")
    store.probe()
    return Journal(store, attempt)


def same(one: Completion, other: Completion) -> None:
    for name in journal_rows.DTYPES:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for name in journal_rows.TOPS:
        for mine, theirs in zip(getattr(one, name) or (), getattr(other, name) or (), strict=True):
            np.testing.assert_array_equal(mine, theirs)
            assert mine.dtype == theirs.dtype
    plain: dict[str, Any] = dict.fromkeys((*journal_rows.DTYPES, *journal_rows.TOPS))
    assert [getattr(one.replace(**plain), f) for f in Completion.__struct_fields__] == [
        getattr(other.replace(**plain), f) for f in Completion.__struct_fields__
    ]


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    writer.add(FULL)
    writer.add(BAD)
    writer.add(SCORED)
    assert writer.flush([LEFT]) == 4
    found = journal(tmp_path, "b").read(skip=set())
    same(found.completions[7, 1], FULL)
    same(found.completions[6, 0], SCORED)
    same(found.completions[8, 0], BAD)
    assert found.snapshots == {(9, 0): LEFT}


@pytest.mark.parametrize("code", ["missing_image", "bad_image", "large_image", "image_count", "too_long", "bad_text"])
def test_finished_samples_of_a_row_that_is_refused_now_stay(code: str) -> None:
    """The others are the error. Rows without a finished sample are as admission said."""
    assert BAD.error is not None
    done = FULL.replace(image_digest="ab")
    failed = done.replace(sample_index=3, error=BAD.error)
    saved = Journaled({(7, 1): done, (7, 3): failed}, {(9, 0): LEFT})
    refused = BAD.replace(row_index=7, num_samples=4, error=replace(BAD.error, code=code))
    first, second, third, fourth = saved.with_finished([refused])
    assert second is done
    assert [(one.sample_index, one.num_samples, one.error) for one in (first, third, fourth) if isinstance(one, Completion)] == [
        (0, 1, refused.error), (2, 1, refused.error), (3, 1, refused.error)
    ]
    one_sample = refused.replace(sample_index=1, num_samples=1)
    assert [*saved.with_finished([one_sample])] == [done]
    for other in (BAD, refused.replace(row_index=9), one_sample.replace(sample_index=2), refused.replace(num_samples=1)):
        assert [*saved.with_finished([other])] == [other]
        assert saved.known(other) is other


def test_every_array_of_a_completion_is_stored() -> None:
    arrays = {name for name, hint in get_type_hints(Completion).items() if "ndarray" in str(hint).lower()}
    assert arrays == {*journal_rows.DTYPES, *journal_rows.TOPS}


def test_arrays_of_another_width_are_read_as_the_same_numbers(tmp_path: Path) -> None:
    """A segment says nothing about the width of its numbers."""
    writer = journal(tmp_path)
    wide = FULL.replace(token_ids=np.array([3, 4, 5], np.int64), logprobs=np.array([-0.1, -0.2, -3.0], ">f8"))
    writer.add(wide)
    writer.flush()
    same(journal(tmp_path, "b").read(skip=set()).completions[7, 1], FULL)


def test_arrays_are_read_without_their_annotation() -> None:
    """NumPy 2.5 declares NDArray by a type statement with Python 3.12, which no reader of annotations may know."""
    types = {field.name: field.type for field in msgspec.structs.fields(journal_rows.STORED_COMPLETION)}
    assert list(types) == list(Completion.__struct_fields__)
    assert not [name for name, kind in types.items() if "ndarray" in str(kind).lower()]


def test_numbers_that_json_has_no_name_for_are_read_as_they_were(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    writer.add(FULL.replace(choice_logprobs=(("yes", -0.5), ("no", float("-inf"))), choice_probs=(1.0, 0.0)))
    writer.flush()
    found = journal(tmp_path, "b").read(skip=set()).completions[7, 1]
    assert (found.choice_logprobs, found.choice_probs) == ((("yes", -0.5), ("no", float("-inf"))), (1.0, 0.0))


def test_nothing_is_written_for_nothing(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    assert writer.flush() == 0
    assert not (tmp_path / FOLDER).exists()


def test_committed_shards_are_left_out_on_both_sides(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    writer.add(FULL)
    writer.add(FULL.replace(row_index=1, shard=0))
    writer.forget(0)
    assert writer.flush([LEFT]) == 2
    assert journal(tmp_path).read(skip={2}).completions == {}
    assert journal(tmp_path).read(skip={2}).snapshots == {}


def test_a_segment_is_deleted_once_all_shards_of_its_rows_are_committed(tmp_path: Path) -> None:
    """With the next segment: a store may be far away."""
    writer, numbers = journal(tmp_path), iter(range(20, 30))

    def save(*shards: int) -> list[str]:
        for shard in shards:
            writer.add(FULL.replace(row_index=next(numbers), shard=shard))
        writer.flush_every(0.0)
        writer.settle()
        writer.flush_every(1e9)  # takes the result
        return sorted(path.name[2:8] for path in (tmp_path / FOLDER).iterdir())

    assert save(2, 3) == ["000000"]
    writer.forget(2)
    assert save(3) == ["000000", "000001"]
    writer.forget(3)
    assert save(4) == ["000002"]
    assert [key[0] for key in journal(tmp_path, "b").read(skip=set()).completions] == [23]


def test_saved_tokens_keep_their_segment(tmp_path: Path) -> None:
    writer = journal(tmp_path)
    writer.add(FULL.replace(shard=3))
    writer.flush([LEFT])
    writer.forget(3)
    writer.add(BAD.replace(shard=5))
    writer.flush_every(0.0)
    writer.settle()
    assert journal(tmp_path, "b").read(skip=set()).snapshots == {(9, 0): LEFT}


def test_the_longest_of_several_snapshots_counts_and_a_finished_row_before_any(tmp_path: Path) -> None:
    for attempt, tokens in (("a", (4,)), ("b", (4, 5, 6)), ("c", (4, 5))):
        journal(tmp_path, attempt).flush([replace(LEFT, tokens=tokens), replace(LEFT, row_index=7, sample_index=1)])
    last = journal(tmp_path, "d")
    last.add(FULL)
    last.flush()
    found = journal(tmp_path).read(skip=set())
    assert {key: snapshot.tokens for key, snapshot in found.snapshots.items()} == {(9, 0): (4, 5, 6)}
    assert list(found.completions) == [(7, 1)]


def test_a_refresh_adds_what_other_runs_left_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, other = journal(tmp_path), journal(tmp_path, "b")
    other.flush([LEFT, replace(LEFT, row_index=7, sample_index=1)])
    found = reader.read(skip=set())
    other.add(FULL)
    other.flush()
    read = LocalStore.read
    names: list[str] = []

    def noted(self: LocalStore, name: str) -> bytes:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(LocalStore, "read", noted)
    reader.refresh(found)
    assert (list(found.completions), list(found.snapshots)) == ([(7, 1)], [(9, 0)])
    assert names == [f"{FOLDER}/b-000001.json"]
    listed = LocalStore.list(reader._store, FOLDER)  # type: ignore[arg-type]
    monkeypatch.setattr(LocalStore, "list", lambda self, name: [*listed, "c-000000.json"])
    reader.refresh(found)  # deleted after the folder was listed and before the file is read


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-1], lambda b: b.replace(b"ok", b"no"), lambda b: b"", lambda b: b"{}\n" + b, lambda b: b"[" * 100_000],
)
def test_a_damaged_segment_is_left_out_alone(tmp_path: Path, damage: Any) -> None:
    for attempt, row in (("a", FULL), ("b", BAD)):
        writer = journal(tmp_path, attempt)
        writer.add(row)
        writer.flush()
    (first,) = (tmp_path / FOLDER).glob("a-*")
    first.write_bytes(damage(first.read_bytes()))
    (tmp_path / FOLDER / "notes").mkdir()
    (tmp_path / FOLDER / "c-000000.json").mkdir()
    (tmp_path / FOLDER / "b-000000.json.bak").write_bytes(b"of somebody's editor")
    assert list(journal(tmp_path).read(skip=set()).completions) == [(8, 0)]


def segment(root: Path, lines: list[Any]) -> None:
    """One with a sound frame."""
    body = "\n".join(json.dumps(line) for line in lines).encode()
    header = {"job": "", "rows": len(lines), "crc32": zlib.crc32(body)}
    (root / FOLDER / "a-000000.json").write_bytes(json.dumps(header).encode() + b"\n" + body)


def lines_of(root: Path) -> list[Any]:
    """A finished row and an unfinished one."""
    writer = journal(root)
    writer.add(FULL.replace(row_index=1, shard=0))
    writer.flush([replace(LEFT, row_index=2)])
    return [json.loads(line) for line in (root / FOLDER / "a-000000.json").read_bytes().splitlines()[1:]]


MALFORMED: dict[str, Any] = {
    "no row": lambda done, left: [{}],
    "not an object": lambda done, left: [17],
    "a list": lambda done, left: [{"done": []}],
    "null": lambda done, left: [{"left": None}],
    "a field less": lambda done, left: [done, {"left": {k: v for k, v in left["left"].items() if k != "tokens"}}],
    "a field more": lambda done, left: [{"done": done["done"] | {"colour": 1}}],
    "text for a number": lambda done, left: [{"done": done["done"] | {"row_index": "one"}}],
    "a number for a text": lambda done, left: [{"done": done["done"] | {"text": 5}}],
    "a list for tokens": lambda done, left: [{"done": done["done"] | {"token_ids": [1, 2]}}],
    "torn base64": lambda done, left: [{"done": done["done"] | {"token_ids": "AAA"}}],
    "tokens of odd length": lambda done, left: [{"done": done["done"] | {"token_ids": "AAAA"}}],
    "stats of another kind": lambda done, left: [{"done": done["done"] | {"stats": {"drafter": "x"}}}],
    "stats with text": lambda done, left: [{"done": done["done"] | {"stats": done["done"]["stats"] | {"num_rounds": "2"}}}],
    "fractions for tokens": lambda done, left: [{"left": left["left"] | {"tokens": [1.5]}}],
    "negative tokens": lambda done, left: [{"left": left["left"] | {"tokens": [-1]}}],
    "counts that do not match": lambda done, left: [{"left": left["left"] | {"accepted": [1]}}],
    "a row of no shard": lambda done, left: [{"done": done["done"] | {"row_index": 99}}],
    "a shard that is not": lambda done, left: [{"left": left["left"] | {"shard": -1}}],
    "nested": lambda done, left: [json.loads("[" * 900 + "]" * 900)],
}


@pytest.mark.parametrize("how", [*MALFORMED])
def test_a_segment_with_a_sound_frame_and_no_rows_of_the_job_is_left_out_alone_and_named(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    segment_lines = MALFORMED[how](*lines_of(tmp_path))
    segment(tmp_path, segment_lines)
    other = journal(tmp_path, "b")
    other.add(BAD.replace(row_index=0, shard=0))
    other.flush()
    store = LocalStore(tmp_path, "tmp")
    reader = Journal(store, "c", holds=lambda shard, row: (shard, row) in {(0, 0), (0, 1), (2, 2)})
    with caplog.at_level(logging.WARNING):
        found = reader.read(skip=set())
    assert [*found.completions] == [(0, 0)]
    assert not found.snapshots
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path}/{FOLDER}/a-000000.json is malformed (")
    assert said.endswith("): the rows in it are computed again")


def test_a_segment_that_cannot_be_read_costs_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for attempt, row in (("a", FULL), ("b", BAD)):
        writer = journal(tmp_path, attempt)
        writer.add(row)
        writer.flush()

    def broken(path: Path) -> BinaryIO:
        if path.name.startswith("a-"):
            raise OSError(errno.EIO, "Input/output error")
        return open_regular(path)

    monkeypatch.setattr(local_store, "open_regular", broken)
    with caplog.at_level(logging.WARNING):
        assert list(journal(tmp_path).read(skip=set()).completions) == [(8, 0)]
    assert caplog.messages == [
        f"{tmp_path}/{FOLDER}/a-000000.json cannot be read (Input/output error): the rows in it are computed again"
    ]


def test_a_run_that_ends_counts_what_the_next_one_will_read(tmp_path: Path) -> None:
    """It counts the rows of all segments, of this run and of earlier ones, and each row once."""
    first = journal(tmp_path, "a")
    first.add(FULL)
    first.flush([LEFT, replace(LEFT, row_index=10)])
    earlier = first.read(())
    second = journal(tmp_path, "b")
    second.add(SCORED)
    second.flush()
    second.add(FULL.replace(row_index=10, sample_index=0))  # unfinished before
    second.add(FULL.replace(row_index=20, shard=3))
    more = replace(LEFT, tokens=(4, 5, 6))
    second.flush([more])
    second.forget(3)
    said, read = second.saved(earlier, [more], {3}), second.read({3})
    assert saved_rows(said) == "of the other shards 4 completions are saved (1 of them unfinished, with 3 tokens)"
    assert (said.completions.keys(), said.snapshots) == (read.completions.keys(), read.snapshots)
    assert saved_rows(second.saved(earlier, (), {2})) == "of the other shards no completions are saved"


class GatedStore(LocalStore):
    """A store whose threads wait before they publish: until `opened`, and then fail if `fails`. The caller's thread does not."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "tmp")
        self.probe()
        self.opened, self.fails, self.caller = threading.Event(), False, threading.get_ident()

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if threading.get_ident() != self.caller:
            assert self.opened.wait(60)
            if self.fails:
                raise StorageError("full")
        return super().put_if_absent(name, data)


def test_rounds_do_not_wait_for_the_store_while_rows_are_saved(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    writer = Journal(store, "a")
    for row in range(5):
        writer.add(FULL.replace(row_index=row))
        writer.flush_every(0.0)  # the first begins to write, the others return at once: one segment at a time is written
    assert not journal(tmp_path).read(()).completions
    store.opened.set()
    writer.settle()
    assert journal(tmp_path).read(()).completions.keys() == {(0, 1)}
    writer.flush_every(0.0)
    writer.settle()
    assert journal(tmp_path).read(()).completions.keys() == {(row, 1) for row in range(5)}
    writer.flush_every(0.0)
    writer.settle()
    assert len(list((tmp_path / FOLDER).iterdir())) == 2, "nothing new, no segment"
    assert writer.saved(Journaled(), (), ()).num_rows == 5


def test_rows_are_saved_at_a_signal_although_a_write_hangs_in_the_thread(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    writer = Journal(store, "a")
    writer.add(FULL)
    writer.flush_every(0.0)
    writer.add(BAD)
    assert writer.flush([LEFT]) == 3
    found = journal(tmp_path).read(())
    assert (set(found.completions), set(found.snapshots)) == ({(7, 1), (8, 0)}, {(9, 0)})
    assert writer.saved(Journaled(), [LEFT], ()).num_rows == 3
    store.opened.set()
    writer.settle()
    assert journal(tmp_path).read(()).num_rows == 3
    assert writer.flush() == 0


def test_an_error_of_the_thread_is_raised_by_the_next_call_and_its_rows_are_saved_by_the_next_segment(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    writer = Journal(store, "a")
    store.fails = True
    store.opened.set()
    writer.add(FULL)
    writer.flush_every(0.0)
    writer.settle()
    with pytest.raises(StorageError, match="full"):
        writer.flush_every(0.0)
    assert writer.saved(Journaled(), (), ()).num_rows == 0
    writer.add(BAD)
    assert writer.flush() == 2
    assert journal(tmp_path).read(()).completions.keys() == {(7, 1), (8, 0)}


@pytest.mark.second
@example(steps=["add", "begin", "forget", "open", "begin"])
@given(steps=st.lists(st.sampled_from(["add", "begin", "flush", "forget", "open", "close", "fail", "mend"]), max_size=30))
def test_nothing_that_a_flush_acknowledged_is_lost_whatever_the_thread_does(steps: list[str]) -> None:
    """After each flush the next run reads every row that was added and whose shard is not committed, whether the thread hangs,
    fails or is slow; and what the journal says is saved at any time can be read then."""
    with TemporaryDirectory() as folder:
        store = GatedStore(Path(folder))
        writer, added, shard = Journal(store, "a"), dict[tuple[int, int], int](), 0
        for number, step in enumerate(steps):
            if step == "add":
                writer.add(FULL.replace(row_index=number, shard=shard))
                added[number, 1] = shard
            elif step == "begin":
                with suppress(StorageError):
                    writer.flush_every(0.0)
            elif step == "flush":
                writer.flush()
                assert journal(Path(folder), "b").read(()).completions.keys() >= added.keys()
            elif step == "forget":
                writer.forget(shard)
                added = {key: own for key, own in added.items() if own != shard}
                shard += 1
            elif step == "open":
                store.opened.set()
                writer.settle()
            elif step == "close":
                store.opened.clear()
            else:
                store.fails = step == "fail"
            said = writer.saved(Journaled(), (), ()).completions.keys()
            assert said <= journal(Path(folder), "b").read(()).completions.keys() & added.keys()
        store.opened.set()
        store.fails = False
        writer.settle()
        writer.flush()
        assert journal(Path(folder), "b").read(()).completions.keys() >= added.keys()
