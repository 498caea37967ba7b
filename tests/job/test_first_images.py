"""The images of a job's first rows are made while its engine is loaded. The run that follows needs none of them."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchspec import run
from batchspec.engine.features import RowFeatures
from batchspec.engine.loop.engine import Engine
from batchspec.images.prepared_images import PreparedImages
from batchspec.job.load import build, loaded_engine
from batchspec.job.report.start_up import StartUp
from batchspec.packing import survey as survey_module
from batchspec.packing.survey import Survey
from batchspec.records import Request
from tests.helpers.image_models import image_request, image_target, make_image_model, picture
from tests.helpers.processes import wait_for_end
from tests.helpers.runs import put, run_apart
from tests.images.test_prepared_images import pids
from tests.job.test_image_jobs import code_of, user, words, written

PICTURES = [picture(30, 50, seed) for seed in range(6)]
PREPARED_S, ENDS_S = 60.0, 20.0
"""Limits: until pixels are made, and until their processes end, which are killed or whose input has ended."""


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl", seed=3)


def job(vl: Path, folder: Path, *more: str, pictures: list[bytes] = PICTURES) -> list[str]:
    rows = [{"messages": user("<image>Go"), "images": [one]} for one in pictures]
    pq.write_table(pa.Table.from_pylist(rows), folder / "in.parquet")
    return words(vl, folder, "input.columns={images:images}", "output.overwrite=true", *more)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the job asks for and makes, by digest, and the ends of the phases of its start."""
    found = list[str]()
    ask, make, done = PreparedImages.ask, PreparedImages._make, StartUp.done

    def asked(self: PreparedImages, row: Any, pieces: Any) -> None:
        found.extend(f"ask {piece.digest.hex()}" for piece in pieces)
        ask(self, row, pieces)

    def made(self: PreparedImages, image: Any) -> None:
        found.append(f"make {image.piece.digest.hex()}")
        make(self, image)

    def ended(self: StartUp, phase: str, parts: Any = None) -> None:
        found.append(phase)
        done(self, phase, parts)

    monkeypatch.setattr(PreparedImages, "ask", asked)
    monkeypatch.setattr(PreparedImages, "_make", made)
    monkeypatch.setattr(StartUp, "done", ended)
    return found


def prepared_of(engine: Engine) -> PreparedImages:
    assert isinstance(engine.features, RowFeatures)
    assert engine.features.prepared is not None
    return engine.features.prepared


@pytest.mark.second
def test_they_are_begun_before_the_engine_is_loaded_and_made_once(
    vl: Path, tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = job(vl, tmp_path)
    assert run.main(keys) == 0
    found = written(tmp_path)
    loaded = events.index("engine")
    before = Counter(one for one in events[events.index("weights") : loaded] if one.startswith("ask"))
    assert len(before) == len(PICTURES)
    assert set(before.values()) == {1}
    made = Counter(one for one in events if one.startswith("make"))
    assert len(made) == len(PICTURES)
    assert set(made.values()) == {1}
    assert any(one in made for one in events[:loaded])
    events.clear()
    monkeypatch.setattr(Survey, "take_first", lambda self: [])
    assert run.main(keys) == 0
    assert not any(one.startswith("ask") for one in events[: events.index("engine")])
    assert [{**row, "perf": None} for row in written(tmp_path)] == [{**row, "perf": None} for row in found]


@pytest.mark.second
def test_those_of_finished_shards_are_not_begun_again(vl: Path, tmp_path: Path, events: list[str]) -> None:
    keys = job(vl, tmp_path, "output.shard_rows=3")
    keys.remove("output.overwrite=true")
    assert run.main(keys) == 0
    found = written(tmp_path)
    asked = [one for one in events[: events.index("engine")] if one.startswith("ask")]
    assert len(asked) == len(PICTURES)
    (tmp_path / "out/data/part-00001.parquet").unlink()
    events.clear()
    assert run.main(keys) == 0
    assert [one for one in events[: events.index("engine")] if one.startswith("ask")] == asked[3:]
    assert [{**row, "perf": None} for row in written(tmp_path)] == [{**row, "perf": None} for row in found]


@pytest.mark.second
def test_a_damaged_one_fails_its_row_and_no_other(vl: Path, tmp_path: Path) -> None:
    cut = [PICTURES[0], PICTURES[1][: len(PICTURES[1]) // 2], PICTURES[2]]
    assert run.main(job(vl, tmp_path, pictures=cut)) == 0
    assert [code_of(row)[0] for row in written(tmp_path)] == ["", "bad_image", ""]


@pytest.mark.second
def test_an_engine_that_does_not_fit_leaves_no_process_to_the_next_one(
    vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, load = list[list[int]](), build.load_engine

    def full_at_first(*args: Any, **more: Any) -> Engine:
        if left:
            wait_for_end(left[0], ENDS_S)
            return load(*args, **more)
        prepared = prepared_of(load(*args, **more))
        wait(prepared.pending(), PREPARED_S)
        left.append(pids(prepared))
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(loaded_engine, "load_engine", full_at_first)
    assert run.main(job(vl, tmp_path)) == 0
    assert left[0]
    assert [code_of(row)[0] for row in written(tmp_path)] == [""] * len(PICTURES)


def interrupted(number: signal.Signals) -> None:
    """The run gets this signal when the first pixels are made and its engine is not there yet. It writes the processes' ids."""
    load = build.load_engine

    def then_signalled(*args: Any, **more: Any) -> Engine:
        prepared = prepared_of(load(*args, **more))
        wait(prepared.pending(), PREPARED_S)
        print("processes", *pids(prepared), flush=True)
        os.kill(os.getpid(), number)
        time.sleep(PREPARED_S)
        raise AssertionError("the signal did not end it")

    put(loaded_engine, "load_engine", then_signalled)


@pytest.mark.second
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_ends_while_it_loads_leaves_no_process(number: signal.Signals, vl: Path, tmp_path: Path) -> None:
    code, said = run_apart(job(vl, tmp_path), tmp_path / "log", partial(interrupted, number))
    assert code != 0
    found = [int(pid) for line in said.splitlines() if line.startswith("processes ") for pid in line.split()[1:]]
    assert found
    wait_for_end(found, ENDS_S)
    assert run.main(job(vl, tmp_path)) == 0
    assert [code_of(row)[0] for row in written(tmp_path)] == [""] * len(PICTURES)


def test_a_survey_holds_as_many_as_stay_and_gives_them_once(vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two samples of a row the first alone; not a row whose encoded image is large, nor any after it; none of a finished
    shard."""
    spec = image_target(vl).spec
    rows = [image_request(i, spec, (3, one), cap=3) for i, one in enumerate(PICTURES)]
    size = rows[0].images[0].num_bytes

    def held(requests: list[Request], finished: Collection[int] = ()) -> list[int]:
        survey = Survey(finished=finished)
        survey.add(len(requests), requests)
        found = [one.row_index for one in survey.take_first()]
        assert survey.take_first() == []
        return found

    assert held([image_request(9, spec, (3,), cap=3), *rows]) == [0, 1, 2, 3, 4, 5]
    assert held([rows[0], replace(rows[0], sample_index=1), rows[1]]) == [0, 1]
    monkeypatch.setattr(survey_module, "MOST_KEPT", 3 * size)
    assert held(rows) == [0, 1, 2]
    large = replace(rows[1].images[0], source=bytes(2 * size + 1))
    assert held([rows[0], replace(rows[1], images=(large,)), rows[2]]) == [0]
    monkeypatch.setattr(survey_module, "MOST_IMAGES_KEPT", 2)
    assert held(rows) == [0, 1]
    assert held([replace(one, sample_index=i) for one in rows for i in range(3)]) == [0, 1]
    assert held([replace(one, shard=i // 2) for i, one in enumerate(rows)], {0}) == [2, 3]
    assert build.prepared_images(spec, 64) is not None
