"""draft=trained: a job trains a head on its own first answers. Tokens are those of a job without, whatever happens."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec import cli, run
from batchspec.config.compose import compose
from batchspec.data.runstate import claims
from batchspec.data.runstate.claims import this_process
from batchspec.data.runstate.heartbeats import HeartbeatFiles
from batchspec.data.runstate.journal import Journaled
from batchspec.data.storage.open_store import open_store
from batchspec.engine.rounds.round import Round
from batchspec.errors import BatchspecError, CapacityError, CheckpointError, ConfigError, Interrupted, StorageError
from batchspec.job.load.build import load_engine
from batchspec.job.prepare import open_job, survey_first
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.report.stats import job_stats
from batchspec.job.report.trained_head import Phase
from batchspec.job.runner.head import abandoned, forecast, lost_time, own_head, planned, process, store
from batchspec.job.runner.head.lost_time import LostTime, accepted_of
from batchspec.job.runner.head.own_head import OwnHead
from batchspec.job.runner.head.process import TrainingFailed, TrainingStopped, settings, words_of
from batchspec.job.runner.head.store import HeadRecord, StoredHead, stored_head
from batchspec.job.runner.oom_fallback import EngineWithFallback
from batchspec.job.supervise.deadline import Deadline
from tests.helpers.models import make_checkpoint
from tests.helpers.runs import drawing, put, start_apart
from tests.helpers.stand_ins import H200

pytestmark = pytest.mark.second

ROWS, TOKENS = 120, 1000
PATH = "spec_decode"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fp64 model, prompts, and what a job without drafts made of them."""
    folder = tmp_path_factory.mktemp("own_head")
    make_checkpoint(
        folder / "model", "llama", vocab=96, hidden_size=32, intermediate_size=48, dtype=torch.float64, num_hidden_layers=1
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, 3 + i % 5).tolist() for i in range(ROWS)]
    pl.DataFrame({"prompt_ids": prompts}).write_parquet(folder / "prompts.parquet")
    assert run.main(words(folder, folder / "plain", "draft=none")) == 0
    return folder


def words(lab: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={lab / 'model'}", f"input.path={lab / 'prompts.parquet'}", f"output.dir={out}", "device=cpu",
        "decode.max_new_tokens=24", "packing.max_num_seqs=8", "output.token_ids=true", "output.shard_rows=8", *more,
    ]


def trained(lab: Path, out: Path, heads: Path, *more: str) -> list[str]:
    own = [f"draft.train.tokens={TOKENS}", "draft.train.minutes=0.02", f"draft.train.store={heads}"]
    return words(lab, out, "draft=trained", *own, *more)


def train_here(
    keys: Any, model: str, stored: StoredHead, head: str, *, minutes: float, say: Callable[[str], None],
    poll: Callable[[], str | None],
) -> None:
    """`process.train` in this process: a new interpreter takes longer than the rest of a test."""
    assert poll() is None
    with (stored.path / store.LOG).open("a") as file:
        file.write("trained\n")
    try:
        cli.main(words_of({**keys, "train.epochs": 1}, model, stored.path / store.ROWS, stored.path / head))
    except BatchspecError as error:
        raise TrainingFailed(str(error)) from None


def quick() -> None:
    """A patch: it pays, however short the job; the store is looked at after every round."""
    put(own_head, "LOOK_S", 0.0)
    forecast.Prospect.pays = property(lambda self: True)  # type: ignore[method-assign,assignment]


def quick_here() -> None:
    quick()
    put(process, "train", train_here)


def quick_here_and_slow_beside_a_training() -> None:
    """As `quick_here`. A run decodes slowly while another one trains, so that rows are left for the head."""
    quick_here()
    look = OwnHead._looks

    def looked(self: OwnHead, *asked: Any) -> bool:
        if (self._stored.path / store.LOG).exists() and self._stored.record() is None:
            time.sleep(0.1)
        return look(self, *asked)

    put(OwnHead, "_looks", looked)


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As `quick_here`, in this process."""
    monkeypatch.setattr(own_head, "LOOK_S", 0.0)
    monkeypatch.setattr(forecast.Prospect, "pays", property(lambda self: True))
    monkeypatch.setattr(process, "train", train_here)
    return monkeypatch


def rows_of(out: Path) -> list[tuple[int, str, tuple[int, ...]]]:
    frame = pl.read_parquet(out / "data").sort("row_index").select("row_index", "status", "token_ids")
    return [(index, status, tuple(ids)) for index, status, ids in frame.iter_rows()]


def check_same(lab: Path, *outs: Path) -> None:
    for out in outs:
        assert rows_of(out) == rows_of(lab / "plain"), out


def drafters(out: Path) -> set[str]:
    return set(pl.read_parquet(out / "data")[PATH].struct.field("drafter").unique())


def record_in(heads: Path) -> HeadRecord:
    (path,) = heads.glob("*/record.json")
    return HeadRecord(**json.loads(path.read_text()))


def log_of(out: Path) -> dict[str, Any]:
    (path,) = (out / "_batchspec" / "logs").glob("run-*[0-9a-f].json")
    found: dict[str, Any] = json.loads(path.read_text())["trained_head"]
    return found


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_the_job_goes_on_with_the_head_that_it_trained(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    out, unload = tmp_path / "out", EngineWithFallback.unload

    def unloaded(self: EngineWithFallback) -> None:
        engine = weakref.ref(self.current)
        unload(self)
        assert engine() is None, "its memory is needed for the training"

    pays.setattr(EngineWithFallback, "unload", unloaded)
    with drawing():
        assert run.main(trained(lab, out, tmp_path / "heads", f"draft.train.kind={kind}")) == 0
    check_same(lab, out)
    assert drafters(out) == {"lookup", kind}
    record = record_in(tmp_path / "heads")
    assert (record.failed, record.drafter, record.draft_len) == ("", "lookup", 3 if kind == "eagle3" else 5)
    assert TOKENS <= record.tokens < TOKENS + 24
    found = log_of(out)
    assert found["before"]["tokens"] >= TOKENS
    assert found["after"]["tokens"] > TOKENS
    assert found["before"]["tokens"] + found["after"]["tokens"] <= sum(len(ids) for *_, ids in rows_of(out))
    assert found["idle_s"] > 0
    assert found["dropped"] == 0
    said = "tok/s with the trained head"
    assert said in capsys.readouterr().err
    assert cli.main(["stats", str(out)]) == 0
    assert said in capsys.readouterr().out
    assert said in (out / "report.html").read_text()


def test_a_later_job_finds_the_head_and_a_job_of_another_model_does_not(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch
) -> None:
    heads = tmp_path / "heads"
    assert run.main(trained(lab, tmp_path / "first", heads)) == 0
    kept = record_in(heads)

    def refused(*_: object, **__: object) -> None:
        raise TrainingFailed("no training")

    pays.setattr(process, "train", refused)
    assert run.main(trained(lab, tmp_path / "later", heads, "output.shard_rows=16")) == 0
    check_same(lab, tmp_path / "first", tmp_path / "later")
    assert drafters(tmp_path / "later") == {"eagle3"}
    other = make_checkpoint(
        tmp_path / "model", "llama", vocab=96, hidden_size=32, intermediate_size=48, dtype=torch.float64, num_hidden_layers=1,
        seed=1,
    )
    assert run.main([*trained(lab, tmp_path / "other", heads), f"model.path={other}"]) == 0
    assert drafters(tmp_path / "other") == {"lookup"}
    records = [json.loads(path.read_text()) for path in heads.glob("*/record.json")]
    assert sorted(record["failed"] for record in records) == ["", "no training"]
    assert kept.head in {record["head"] for record in records if not record["failed"]}


def test_a_training_that_fails_leaves_the_job_as_it_was_and_is_not_tried_again(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: list[str] = []

    def fails(*_: object, **__: object) -> None:
        tries.append("")
        raise TrainingFailed("the card is full")

    pays.setattr(process, "train", fails)
    for name in ("first", "second"):
        assert run.main(trained(lab, tmp_path / name, tmp_path / "heads")) == 0
        said = capsys.readouterr().err
        assert "draft=trained: training a head failed: the card is full; delete " in said
        assert "the job goes on with draft=lookup" in said
    check_same(lab, tmp_path / "first", tmp_path / "second")
    assert drafters(tmp_path / "first") | drafters(tmp_path / "second") == {"lookup"}
    assert len(tries) == 1


@pytest.mark.parametrize("call", ["record", "put_rows", "put_record", "gathered"])
def test_a_store_that_fails_leaves_the_job_as_it_was(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    def fails(*_: object) -> None:
        raise StorageError("the disk is full")

    pays.setattr(StoredHead, call, fails)
    assert run.main(trained(lab, tmp_path / "out", tmp_path / "heads")) == 0
    assert "draft=trained: its store cannot be used: the disk is full; the job goes on with" in capsys.readouterr().err
    check_same(lab, tmp_path / "out")
    assert drafters(tmp_path / "out") == {"lookup"}


def test_a_head_for_which_there_is_no_memory_is_left_out(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise CapacityError("not even one row fits")

    pays.setattr(own_head, "batches_of", fails)
    pays.setattr(planned, "batches_of", fails)
    assert cli.main(["plan", *trained(lab, tmp_path / "out", tmp_path / "heads")]) == 0
    assert "head         there is no memory for it: not even one row fits" in capsys.readouterr().out
    assert run.main(trained(lab, tmp_path / "out", tmp_path / "heads")) == 0
    assert "there is no memory for a head: not even one row fits; the job goes on with" in capsys.readouterr().err
    check_same(lab, tmp_path / "out")


def test_a_job_that_is_too_short_trains_nothing(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_head, "LOOK_S", 0.0)
    assert run.main(trained(lab, tmp_path / "out", tmp_path / "heads")) == 0
    assert "training a head does not pay: decoding the rest takes" in capsys.readouterr().err
    check_same(lab, tmp_path / "out")
    assert drafters(tmp_path / "out") == {"lookup"}
    assert not list((tmp_path / "heads").rglob("*.parquet"))


def test_a_head_that_does_not_pay_is_not_used_now_or_later(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head that was measured is worse than the one that was assumed."""
    pays.setattr(forecast.Prospect, "pays", property(lambda self: self.accepted >= 1.0))
    for name in ("first", "second"):
        assert run.main(trained(lab, tmp_path / name, tmp_path / "heads")) == 0
        assert "does not pay" in capsys.readouterr().err
    assert record_in(tmp_path / "heads").accepted < 1.0
    check_same(lab, tmp_path / "first", tmp_path / "second")
    assert drafters(tmp_path / "first") | drafters(tmp_path / "second") == {"lookup"}


def test_rows_that_are_sampled_try_a_head_whose_acceptance_was_measured_without_their_noise(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch
) -> None:
    sampled = "decode.temperature=1"
    assert run.main(words(lab, tmp_path / "plain", "draft=none", sampled)) == 0
    pays.setattr(forecast.Prospect, "pays", property(lambda self: self.accepted >= 1.0))
    pays.setattr(forecast, "SAMPLED_FACTOR", 1e9)  # this head is poor
    assert run.main(trained(lab, tmp_path / "out", tmp_path / "heads", sampled)) == 0
    assert 0.0 < record_in(tmp_path / "heads").accepted < 1.0
    assert drafters(tmp_path / "out") == {"lookup", "eagle3"}
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "plain")


def test_held_out_answers_say_too_little_of_a_head_for_rows_that_are_sampled(lab: Path, tmp_path: Path) -> None:
    def found(temperature: float, held_out: float, draft_len: int = 3) -> float:
        words = trained(lab, tmp_path / "out", tmp_path / "heads", f"decode.temperature={temperature}")
        return forecast.accepted_by_rounds(open_job(compose(words)), held_out, draft_len)

    assert found(0.0, 0.4) == found(1e-9, 0.4) == 0.4
    assert found(1.0, 0.4) == pytest.approx(1.2)
    assert found(1.0, 0.0) == 0.0, "a head that accepts nothing is not tried"
    assert found(1.0, 1.0) == pytest.approx(forecast.ASSUMED_ACCEPTED, abs=0.01)
    assert found(1.0, 2.5) == 2.5, "what was measured is a lower bound"
    assert found(1.0, 0.5, 1) < 1.0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_head_that_is_damaged_is_not_used(lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, name: str) -> None:
    heads = tmp_path / "heads"
    assert run.main(trained(lab, tmp_path / "first", heads)) == 0
    (path,) = heads.glob(f"*/head-*/{name}")
    path.write_bytes(b"{}")
    assert run.main(trained(lab, tmp_path / "later", heads)) == 0
    check_same(lab, tmp_path / "later")
    assert drafters(tmp_path / "later") == {"lookup"}


@pytest.mark.parametrize("error", [CapacityError, CheckpointError, ConfigError])
def test_a_head_that_cannot_be_loaded_is_left_out_before_the_plain_engine_is_loaded(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[BatchspecError]
) -> None:
    """By the run that trained it and by a later one, whose first load it is. Both models need not fit the memory together."""
    failed: list[weakref.ref[Any]] = []

    def loads(job: Any, *args: Any, **named: Any) -> Any:
        assert not any(target() is not None for target in failed)
        engine = load_engine(job, *args, **named)
        if job.config.draft.name == "eagle3":
            failed.append(weakref.ref(engine.target))
            raise error("no place for it")
        return engine

    pays.setattr("batchspec.job.load.loaded_engine.load_engine", loads)
    for name in ("first", "later"):
        assert run.main(trained(lab, tmp_path / name, tmp_path / "heads")) == 0
        said = capsys.readouterr().err
        assert said.count("its head cannot be used: no place for it; the job goes on with draft=lookup") == 1
        assert drafters(tmp_path / name) == {"lookup"}
    assert len(failed) == 2
    check_same(lab, tmp_path / "first", tmp_path / "later")


def test_a_job_whose_memory_runs_out_again_does_without_its_head(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, call, calls = tmp_path / "heads", Round.run, [0]
    assert run.main(trained(lab, tmp_path / "first", heads)) == 0

    def fails(self: Round, *args: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] in (7, 20):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(self, *args, **named)

    pays.setattr(Round, "run", fails)
    assert run.main(trained(lab, tmp_path / "later", heads)) == 0
    said = capsys.readouterr().err
    assert said.count("going on with a smaller batch") == 1
    assert "its head cannot be used: out of memory with 4 slots" in said
    check_same(lab, tmp_path / "later")
    assert "lookup" in drafters(tmp_path / "later")


def spoil(heads: Path) -> None:
    """The head in the store drafts what its model never says, and its record says that all its drafts are accepted."""
    (weights,) = heads.glob("*/head-*/model.safetensors")
    tensors = load_file(weights)
    rng = torch.Generator().manual_seed(3)
    for name in ("fc.weight", "lm_head.weight"):
        tensors[name] = torch.randn(tensors[name].shape, generator=rng, dtype=tensors[name].dtype)
    save_file(tensors, weights)
    (record,) = heads.glob("*/record.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "accepted": 2.9}))


def test_a_head_whose_drafts_are_no_longer_accepted_is_let_go(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its memory is freed, rows go on where they were, and the speed of both parts is told. The store keeps it for others."""
    heads, out, change = tmp_path / "heads", tmp_path / "out", EngineWithFallback.change
    assert run.main(trained(lab, tmp_path / "first", heads)) == 0
    spoil(heads)
    kept, weights = record_in(heads), list[weakref.ref[Any]]()
    found = OwnHead._prospect

    def prospect(self: OwnHead, *args: Any, **named: Any) -> Any:
        if self.uses_head and not weights:
            drafter: Any = engines_of[-1].current.drafter
            weights.append(weakref.ref(drafter.head))
        return found(self, *args, **named)

    engines_of = list[EngineWithFallback]()
    whole = EngineWithFallback.__init__

    def made(self: EngineWithFallback, *args: Any, **named: Any) -> None:
        whole(self, *args, **named)
        engines_of.append(self)

    def changed(self: EngineWithFallback, *args: Any) -> None:
        assert [head() for head in weights] == [None], "it is freed before the model is loaded again"
        change(self, *args)

    pays.setattr(EngineWithFallback, "__init__", made)
    pays.setattr(EngineWithFallback, "change", changed)
    pays.setattr(OwnHead, "_prospect", prospect)
    pays.setattr(own_head, "RELOAD_S", 1e-6)
    pays.setattr(lost_time, "WINDOW_S", 0.0)
    pays.setattr(lost_time, "WINDOW_ROUNDS", 200)
    capsys.readouterr()
    with drawing():
        assert run.main(trained(lab, out, heads, "output.shard_rows=16")) == 0
    said = capsys.readouterr().err
    assert said.count("draft=trained: its head has lost about") == 1
    assert "drafts were accepted a round, without it 0.80; the job goes on with draft=lookup" in said
    check_same(lab, out)
    assert drafters(out) == {"lookup", "eagle3"}
    told = log_of(out)
    assert told["dropped"] == 1
    assert told["idle_s"] > 0
    assert 200 <= told["after"]["row_rounds"] < 400
    assert told["after"]["drafted"] > 2 * told["after"]["row_rounds"]
    assert told["before"]["tokens"] > told["after"]["tokens"]
    assert record_in(heads) == kept
    assert cli.main(["stats", str(out)]) == 0
    line = "1 run let it go, because it lost time"
    assert line in capsys.readouterr().out
    assert line in (out / "report.html").read_text()


def found_of(without_s: float, with_s: float) -> forecast.Prospect:
    return forecast.Prospect(without_s=without_s, with_s=with_s, before=0.8, accepted=0.1)


@pytest.mark.parametrize("share", [0.98, 0.9, 0.5])
def test_a_head_that_loses_costs_little_more_than_two_loads(share: float) -> None:
    """share: of the time that the drafter before it would take. For four hours it saves a third before, which counts no later."""
    lost, phase, good_s = LostTime(), Phase(), 4 * 3600
    while lost.seconds < forecast.RELOAD_S:
        phase.add(Phase(seconds=1.0, row_rounds=2000))
        assert phase.seconds < 2 * good_s
        if (window := lost.window(phase)) is not None:
            pays = phase.seconds <= good_s
            lost.add(window.seconds, found_of(1.5 if pays else share, 1.0))
            assert not (pays and lost.seconds)
    cost_s = (phase.seconds - good_s) * (1 - share)
    assert cost_s <= forecast.RELOAD_S + lost_time.WINDOW_S


def test_a_head_that_pays_on_the_whole_stays() -> None:
    lost, phase = LostTime(), Phase()
    for minute in range(24 * 60):
        phase.add(Phase(seconds=60.0, row_rounds=10_000))
        window = lost.window(phase)
        assert window == Phase(seconds=60.0, row_rounds=10_000)
        lost.add(window.seconds, found_of(0.9 if minute % 4 else 1.4, 1.0))
        assert lost.seconds < forecast.RELOAD_S


def test_a_window_needs_time_and_rounds() -> None:
    for phase in (Phase(seconds=1e6, row_rounds=4095), Phase(seconds=29.0, row_rounds=10**9)):
        assert LostTime().window(phase) is None


def test_the_acceptance_of_a_head_does_not_depend_on_the_drafts_that_rounds_chose() -> None:
    """Rounds that verify 1 or 2 of 5 drafts, each of which is accepted by half of the rows, and none where none was drafted."""
    rate = sum(0.5**k for k in range(1, 6))
    for accepted, drafted in ((0.5, 1), (0.75, 2), (0.625, 1.5)):
        phase = Phase(row_rounds=10_000, accepted=int(10_000 * accepted), drafted=int(10_000 * drafted))
        assert accepted_of(phase, 5) == pytest.approx(rate, abs=1e-3)
    assert accepted_of(Phase(row_rounds=10_000), 5) == 0.0
    assert accepted_of(Phase(), 5) == 0.0


def test_two_runs_share_one_training(lab: Path, tmp_path: Path) -> None:
    out, heads = tmp_path / "out", tmp_path / "heads"
    command = trained(lab, out, heads, "output.shard_rows=2", "packing.max_num_seqs=2")
    runs = [start_apart(command, tmp_path / f"{name}.log", quick_here_and_slow_beside_a_training) for name in ("a", "b")]
    for each in runs:
        each.join(240)
    assert [each.exitcode for each in runs] == [0, 0], [(tmp_path / f"{name}.log").read_text() for name in ("a", "b")]
    check_same(lab, out)
    (log,) = heads.glob("*/train.log")
    assert log.read_text() == "trained\n"
    assert "eagle3" in drafters(out)


def test_a_run_decodes_on_while_another_one_trains_and_changes_when_the_head_is_there(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch
) -> None:
    heads = tmp_path / "heads"
    assert run.main(trained(lab, tmp_path / "first", heads)) == 0
    (path,) = heads.glob("*/record.json")
    path.rename(path.with_suffix(".later"))
    assert stored_head(open_job(compose(trained(lab, tmp_path / "out", heads)))).claims("f" * 32).take(store.CLAIM)
    looks: list[str] = []
    look = OwnHead._looks

    def looked(self: OwnHead, *asked: Any) -> bool:
        looks.append("")
        if len(looks) == 200:
            assert self._has_enough
            path.with_suffix(".later").rename(path)
        return look(self, *asked)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("another run has the claim")

    pays.setattr(process, "train", refused)
    pays.setattr(OwnHead, "_looks", looked)
    assert run.main(trained(lab, tmp_path / "out", heads)) == 0
    assert len(looks) == 200
    check_same(lab, tmp_path / "out")
    assert drafters(tmp_path / "out") == {"lookup", "eagle3"}


def test_a_run_that_lost_its_claim_leaves_the_training_to_the_other(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def taken(keys: Any, model: str, stored: StoredHead, head: str, *, poll: Callable[[], str | None], **rest: Any) -> None:
        tries.append("")
        if len(tries) > 1:
            return train_here(keys, model, stored, head, poll=poll, **rest)
        (claim,) = (stored.path / claims.FOLDER).iterdir()
        claim.write_text(json.dumps({**json.loads(claim.read_text()), "owner": "f" * 32}))
        try:
            until(lambda: poll())
        finally:
            claim.write_text('{"owner": ""}')

    pays.setattr(claims, "RENEW_S", 0.0)
    pays.setattr(process, "train", taken)
    assert run.main(trained(lab, tmp_path / "out", tmp_path / "heads")) == 0
    assert len(tries) == 2
    check_same(lab, tmp_path / "out")
    assert drafters(tmp_path / "out") == {"lookup", "eagle3"}


def test_workers_of_one_run_share_a_head_too(lab: Path, tmp_path: Path) -> None:
    out, heads = tmp_path / "out", tmp_path / "heads"
    command = trained(lab, out, heads, "output.shard_rows=4", "packing.max_num_seqs=2", "cluster.workers=2")
    process = start_apart(command, tmp_path / "log", quick_here_and_slow_beside_a_training)
    process.join(240)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    check_same(lab, out)
    (log,) = heads.glob("*/train.log")
    assert log.read_text() == "trained\n"
    assert "eagle3" in drafters(out)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_gathering() -> None:
    quick_here()
    finished = OwnHead.finished

    def then(self: OwnHead, completion: Any) -> None:
        finished(self, completion)
        if self._num_tokens > TOKENS // 2:
            killed()

    OwnHead.finished = then  # type: ignore[method-assign]


def killed_before_the_rows() -> None:
    quick_here()
    StoredHead.put_rows = lambda self, *_: killed()  # type: ignore[method-assign]


def killed_while_training() -> None:
    quick()
    put(process, "train", lambda *_, **__: killed())


def killed_before_the_record() -> None:
    quick_here()
    StoredHead.put_record = lambda self, record: killed()  # type: ignore[method-assign]


def killed_after_the_record() -> None:
    quick_here()
    put_record = StoredHead.put_record

    def then(self: StoredHead, record: HeadRecord) -> None:
        put_record(self, record)
        killed()

    StoredHead.put_record = then  # type: ignore[method-assign]


def killed_with_the_head() -> None:
    quick_here()
    measure = OwnHead._measure

    def then(self: OwnHead, totals: Any) -> None:
        measure(self, totals)
        if self._part.after.row_rounds > 100:
            killed()

    OwnHead._measure = then  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("patch", "left"),
    [
        (killed_while_gathering, set()),
        (killed_before_the_rows, set()),
        (killed_while_training, {"rows.parquet"}),
        (killed_before_the_record, {"rows.parquet", "train.log", "head"}),
        (killed_after_the_record, {"rows.parquet", "train.log", "head", "record.json"}),
        (killed_with_the_head, {"train.log", "head", "record.json"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_run_killed_at_any_moment_is_resumed(lab: Path, tmp_path: Path, patch: Callable[[], None], left: set[str]) -> None:
    out, heads = tmp_path / "out", tmp_path / "heads"
    first = start_apart(trained(lab, out, heads), tmp_path / "log", patch)
    first.join(120)
    assert first.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
    names = {re.sub("-.*", "", path.name) for path in heads.glob("*/*") if path.name != "_batchspec"}
    assert names == left
    again = start_apart(trained(lab, out, heads), tmp_path / "log", quick_here)
    again.join(120)
    assert again.exitcode == 0, (tmp_path / "log").read_text()
    check_same(lab, out)
    assert "eagle3" in drafters(out)
    assert record_in(heads).failed == ""
    (log,) = heads.glob("*/train.log")
    assert log.read_text().count("trained\n") == 1 + (patch is killed_before_the_record)


def other_place(lab: Path, folder: Path, patch: Callable[[], None]) -> Path:
    """That of another model, whose job was killed in a process of its own."""
    other = make_checkpoint(
        folder / "model", "llama", vocab=96, hidden_size=32, intermediate_size=48, dtype=torch.float64, num_hidden_layers=1,
        seed=2,
    )
    command = [*trained(lab, folder / "other", folder / "heads"), f"model.path={other}"]
    first = start_apart(command, folder / "log", patch)
    first.join(120)
    assert first.exitcode == -signal.SIGKILL, (folder / "log").read_text()
    return stored_head(open_job(compose(command))).path


def make_old(place: Path, *names: str) -> None:
    """No file of it has changed for a month, but those with these names."""
    for path in place.rglob("*"):
        os.utime(path, (time.time() - (0.0 if path.name in names else abandoned.AGE_S + 60),) * 2)


def left_in(place: Path) -> set[str]:
    return {re.sub("-.*", "", path.name) for path in place.iterdir()} - {"_batchspec", "train.log"}


def test_what_a_killed_job_has_left_is_deleted_when_it_is_old_and_nobody_has_it(lab: Path, tmp_path: Path) -> None:
    """The next training of any model does so. It takes the claim of the run that was killed, here one of another machine."""
    place = other_place(lab, tmp_path, killed_before_the_record)
    own, foreign = tmp_path / "heads" / f"eagle3-{'a' * 24}", tmp_path / "heads" / "eagle3-mine"
    for folder in (own, foreign):
        folder.mkdir()
        (folder / "rows.parquet").write_bytes(b"")
        make_old(folder)
    (claim,) = (place / claims.FOLDER).iterdir()
    claim.write_text(json.dumps({**json.loads(claim.read_text()), "host": "elsewhere"}))

    def left_after(*young: str) -> set[str]:
        make_old(place, *young)
        abandoned.drop_abandoned(own, "f" * 32)
        return left_in(place)

    held = claim.read_bytes()
    assert left_after("checkpoint.pt", "training.json") == {"rows.parquet", "head"}
    assert left_after(claim.name) == {"rows.parquet", "head"}, "its run renews it"
    assert claim.read_bytes() == held
    (place / "record.json").write_text("")
    assert left_after() == {"rows.parquet", "head", "record.json"}, "a head is kept"
    (place / "record.json").unlink()
    assert left_after() == set()
    assert json.loads(claim.read_text()) == {"owner": ""}
    assert left_in(own) == left_in(foreign) == {"rows.parquet"}


def test_a_training_that_begins_while_old_ones_are_deleted_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its claim after its place has been found to be old."""
    stored, is_abandoned = StoredHead(tmp_path, "eagle3", {}), abandoned._is_abandoned
    (stored.path / "head-a").mkdir(parents=True)
    make_old(stored.path)
    os.utime(stored.path / "head-a", (0, 0))
    (tmp_path / "own").mkdir()

    def looked(path: Path) -> bool:
        found = is_abandoned(path)
        if not begun.own:
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr(claims, "this_process", lambda: {**this_process(), "host": "elsewhere"})
                running = stored.claims("a" * 32)
            assert running.take(store.CLAIM)
            begun.own = running.own
        return found

    begun = SimpleNamespace(own=[])
    monkeypatch.setattr(abandoned, "_is_abandoned", looked)
    abandoned.drop_abandoned(tmp_path / "own", "f" * 32)
    assert begun.own == [store.CLAIM]
    assert (stored.path / "head-a").exists()
    assert next(iter(stored.claims("b" * 32).owners({store.CLAIM}).values()))["owner"] == "a" * 32


def test_runs_may_delete_the_same_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that finds it half deleted by another one uses the head."""
    stored, listed = StoredHead(tmp_path, "eagle3", {}), store.heads_in
    for name in ("head-a", "head-b"):
        (stored.path / name).mkdir(parents=True)
    record = HeadRecord(head="head-a", drafter="lookup", before=None, tokens=1, seconds=0.0)

    def then_gone(place: Path) -> list[Path]:
        found = listed(place)
        (stored.path / "head-b").rmdir()
        return found

    monkeypatch.setattr(store, "heads_in", then_gone)
    stored.drop_rest(record)
    assert listed(stored.path) == [stored.path / "head-a"]


def test_a_training_deletes_what_is_old_and_the_job_that_left_it_can_go_on(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch
) -> None:
    place = other_place(lab, tmp_path, killed_before_the_record)
    make_old(place)
    assert run.main(trained(lab, tmp_path / "out", tmp_path / "heads")) == 0
    assert left_in(place) == set()
    assert run.main([*trained(lab, tmp_path / "other", tmp_path / "heads"), f"model.path={tmp_path / 'model'}"]) == 0
    assert left_in(place) == {"head", "record.json"}
    assert "eagle3" in drafters(tmp_path / "other")


def test_a_training_of_other_settings_leaves_nothing_once_a_head_is_there(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch
) -> None:
    heads = tmp_path / "heads"
    command = [word.replace("new_tokens=24", "new_tokens=23") for word in trained(lab, tmp_path / "other", heads)]
    first = start_apart(command, tmp_path / "log", killed_before_the_record)
    first.join(120)
    assert first.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
    (left,) = heads.glob("*/head-*")
    assert run.main(trained(lab, tmp_path / "out", heads)) == 0
    assert {path.name for path in heads.glob("*/head-*")} == {record_in(heads).head}
    assert not left.exists()


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(found: Callable[[], Any], within_s: float = 120.0) -> Any:
    ends_at = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < ends_at, "it never came"
        time.sleep(0.02)
    return value


def long_training() -> None:
    quick()
    put(process, "EPOCHS", 5_000)
    put(process, "BATCH_TOKENS", 2048)


def long_training_of(lab: Path, out: Path, heads: Path) -> list[str]:
    return [word for word in trained(lab, out, heads, "draft.train.minutes=0.3") if word != "draft.train.minutes=0.02"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: signal.Signals(number).name)
def test_the_training_ends_with_its_run_and_goes_on_with_the_next(lab: Path, tmp_path: Path, number: signal.Signals) -> None:
    """In processes as in production: a new interpreter trains. After SIGTERM it goes on from a checkpoint, after SIGKILL it
    begins anew here, because no minute had passed."""
    out, heads, log = tmp_path / "out", tmp_path / "heads", tmp_path / "log"
    command = long_training_of(lab, out, heads)
    first = start_apart(command, log, long_training)
    text = until(lambda: next(heads.glob("*/train.log"), None))
    until(lambda: "held out; a head of" in text.read_text())
    assert first.pid is not None
    (child,) = [pid for pid in children_of(first.pid) if b"batchspec.cli" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    time.sleep(1.0)
    os.kill(first.pid, number)
    first.join(60)
    assert first.exitcode == (75 if number == signal.SIGTERM else -signal.SIGKILL), log.read_text()
    until(lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes())
    assert bool(list(heads.glob("*/head-*/checkpoint.pt"))) == (number == signal.SIGTERM)
    again = start_apart(command, log, long_training)
    again.join(240)
    assert again.exitcode == 0, log.read_text()
    assert ("continuing after" in text.read_text()) == (number == signal.SIGTERM)
    assert "are over after" in text.read_text()
    check_same(lab, out)
    assert drafters(out) == {"lookup", "eagle3"}


def test_what_the_process_of_a_training_says_last_is_why_it_failed(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"^batchspec: input\.path .*rows.parquet: does not exist"):
        process.train(
            {"draft": "eagle3"}, str(tmp_path / "model"), StoredHead(tmp_path, "eagle3", {}), "head", minutes=1.0,
            say=lambda line: None, poll=lambda: None,
        )


def test_a_training_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(process, "LATE_S", 0.2)
    with pytest.raises(TrainingFailed, match="did not end within 0 minutes"):
        process.train(
            {"draft": "eagle3"}, "model", StoredHead(tmp_path, "eagle3", {}), "head", minutes=0.0, say=lambda line: None,
            poll=lambda: None,
        )


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os; os.kill(os.getpid(), 15)", TrainingStopped), ("import os; os.kill(os.getpid(), 9)", TrainingStopped),
        ("raise SystemExit(74)", TrainingStopped), ("raise SystemExit(75)", TrainingStopped),
        ("raise SystemExit(2)", TrainingFailed),
    ],
)
def test_what_may_pass_is_no_failure_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, error: type[Exception]
) -> None:
    monkeypatch.setattr(process, "PROGRAM", program)
    stored = StoredHead(tmp_path, "eagle3", {})

    def train(poll: Callable[[], str | None]) -> None:
        process.train({"draft": "eagle3"}, "model", stored, "head", minutes=1.0, say=lambda line: None, poll=poll)

    with pytest.raises(error):
        train(lambda: None)
    answers = iter([None])
    monkeypatch.setattr(process, "POLL_S", 1.0)  # the training has ended before the second answer
    with pytest.raises(Interrupted, match=r"^SIGTERM: all rows are saved; run"):
        train(lambda: next(answers, "SIGTERM"))


def test_a_training_that_was_stopped_is_tried_again(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise TrainingStopped("exit code -9")

    with pays.context() as patch:
        patch.setattr(process, "train", stopped)
        assert run.main(trained(lab, tmp_path / "first", tmp_path / "heads")) == 0
    assert "the training was stopped" in capsys.readouterr().err
    assert drafters(tmp_path / "first") == {"lookup"}
    assert not list((tmp_path / "heads").glob("*/record.json"))
    assert run.main(trained(lab, tmp_path / "again", tmp_path / "heads", "decode.max_new_tokens=23")) == 0
    assert record_in(tmp_path / "heads").failed == ""
    assert not list((tmp_path / "heads").rglob("rows.parquet"))


def test_no_training_begins_that_the_time_limit_would_end(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[float] = []
    pays.setattr(Deadline, "leaves", lambda self, seconds: asked.append(seconds))
    assert run.main(trained(lab, tmp_path / "out", tmp_path / "heads")) == 0
    assert asked == [forecast.training_s(0.02)]
    assert "the time limit leaves less than the 4 min that training a head takes" in capsys.readouterr().err
    check_same(lab, tmp_path / "out")
    assert not list((tmp_path / "heads").rglob("rows.parquet"))


def test_what_other_runs_have_done_since_is_not_left(lab: Path, tmp_path: Path) -> None:
    """70 of 120 rows were committed by a run that lives when this one begins; then it does 10 more, and one that ended 5."""
    files, facts = open_store(tmp_path / "runs", "_batchspec/tmp"), {"at": time.time(), **this_process()}
    living = HeartbeatFiles(files, "b" * 32)
    living.write({**facts, "completions": 70})
    job = open_job(compose(trained(lab, tmp_path / "out", tmp_path / "heads")))
    with ProgressBar(ROWS, done=70) as progress:
        head = OwnHead(job, survey_first(job), progress, Journaled(), HeartbeatFiles(files, "a" * 32))
        assert head._demand().num_completions == 50
        living.write({**facts, "completions": 80})
        HeartbeatFiles(files, "c" * 32).write({**facts, "completions": 5, "end": "done"})
        assert head._demand().num_completions == 35


def test_a_damaged_store_is_told_or_made_anew(tmp_path: Path) -> None:
    stored = StoredHead(tmp_path, "eagle3", {"weights": "a"})
    assert stored.record() is None
    assert not stored.has_rows("job")
    ids = np.arange(5, dtype=np.int32)
    stored.put_rows([(ids, ids[:3]), (ids[:1], ids)], "job", "lookup", None)
    assert (stored.path / "rows.parquet").stat().st_mode & 0o777 == 0o600
    assert stored.has_rows("job")
    assert not stored.has_rows("another job")
    digest = sha256((stored.path / "rows.parquet").read_bytes()).hexdigest()
    assert stored.gathered() == store.Gathered(rows=2, tokens=8, longest=8, drafter="lookup", before=None, digest=digest)
    record = HeadRecord(head="head-1", accepted=1.5, draft_len=3, drafter="lookup", before=0.25, tokens=8, seconds=1.0)
    stored.put_record(record)
    assert stored.record() == record
    for wrong in ('{"head": 1', json.dumps({**asdict(record), "head": 1}), json.dumps({**asdict(record), "accepted": "1"})):
        (stored.path / "record.json").write_text(wrong)
        assert stored.record() is None
    (stored.path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(StorageError, match=r"rows\.parquet: cannot be read .*; delete "):
        stored.gathered()
    other = StoredHead(tmp_path, "eagle3", {"weights": "b"})
    assert other.path != stored.path
    assert not other.has_rows("job")


def test_the_place_of_a_head_follows_the_model_and_its_format(lab: Path, tmp_path: Path) -> None:
    def place(*more: str) -> Path:
        return stored_head(open_job(compose(trained(lab, tmp_path / "out", tmp_path / "heads", *more)))).path

    same = place()
    assert place("decode.max_new_tokens=8", "draft.train.minutes=3", "model.max_len=64", "model.dtype=float32") == same
    assert place("draft.train.kind=block") != same


def test_a_head_of_other_settings_has_its_own_folder(lab: Path, tmp_path: Path) -> None:
    job = open_job(compose(trained(lab, tmp_path / "out", tmp_path / "heads")))
    keys = settings(job, 1000, 100)
    assert keys["train.max_len"] == 2048
    assert settings(job, 1000, 3000)["train.max_len"] == 3000
    assert keys["train.held_out"] == 64
    assert settings(job, 24, 100)["train.held_out"] == 3
    assert process.folder_of(keys, "a") == process.folder_of(settings(job, 1000, 100), "a")
    assert process.folder_of(keys, "a") != process.folder_of({**keys, "train.minutes": 7.0}, "a")
    assert process.folder_of(keys, "a") != process.folder_of(keys, "b")


def test_what_pays_follows_from_lengths_and_acceptance(lab: Path, tmp_path: Path) -> None:
    job = open_job(compose(trained(lab, tmp_path / "out", tmp_path / "heads", "draft.name=none")))
    demand = replace(own_head_demand(job), num_completions=10**9)
    batches = forecast.batches_of(job, demand, H200)
    good, poor = (
        forecast.prospect(job, batches, demand, H200, accepted=accepted, cost_s=0.0) for accepted in (2.9, 0.0)
    )
    assert good.pays
    assert good.without_s == poor.without_s
    assert not poor.pays
    assert not forecast.prospect(job, batches, replace(demand, num_completions=10), H200, accepted=2.9, cost_s=60.0).pays


def test_the_other_runs_that_live_are_those_that_beat_and_whose_process_is_there(tmp_path: Path) -> None:
    files, now = open_store(tmp_path, "_batchspec/tmp"), time.time()
    names = {name: name * 32 for name in "abcdef"}
    facts = {"at": now, "completions": 7, **this_process()}
    HeartbeatFiles(files, names["b"]).write(facts)
    HeartbeatFiles(files, names["c"]).write({**facts, "end": "done"})
    HeartbeatFiles(files, names["d"]).write({**facts, "at": now - 301.0})
    HeartbeatFiles(files, names["e"]).write({**facts, "started": "1"})
    HeartbeatFiles(files, names["f"]).write({**facts, "host": "elsewhere", "space": "another"})
    own = HeartbeatFiles(files, names["a"])
    own.write(facts)
    assert sorted((run.attempt, run.completions) for run in own.others(now)) == [(names["b"], 7), (names["f"], 7)]


def test_runs_that_share_a_job_have_less_time_to_gain(lab: Path, tmp_path: Path) -> None:
    """One of them trains; what the others decode meanwhile, no head makes quicker."""
    job = open_job(compose(trained(lab, tmp_path / "out", tmp_path / "heads", "draft.name=none")))
    demand = replace(own_head_demand(job), num_completions=10**8)
    batches = forecast.batches_of(job, demand, H200)

    def found(cost_s: float, **more: Any) -> forecast.Prospect:
        return forecast.prospect(job, batches, demand, H200, accepted=2.9, cost_s=cost_s, **more)

    alone = found(0.0)
    cost_s = 0.9 * (alone.without_s - alone.with_s)
    assert found(cost_s).pays
    assert found(cost_s / 4, runs=4).pays
    of_four = found(cost_s, runs=4, others_decode=True)
    assert of_four.without_s == pytest.approx(alone.without_s / 4)
    left = 1 - 3 * cost_s / alone.without_s
    assert of_four.with_s == pytest.approx(cost_s + max(0.0, left) * alone.with_s / 4)
    assert not of_four.pays


def own_head_demand(job: Any) -> Any:
    return survey_first(job).demand(job.source.num_rows, job.admission.max_len, job.admission.task)


def test_plan_tells_what_a_head_would_bring(
    lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = tmp_path / "heads"

    def plan(*more: str) -> str:
        assert cli.main(["plan", *more, *trained(lab, tmp_path / "out", heads)]) == 0
        return capsys.readouterr().out

    said = plan()
    assert "head         eagle3, to be trained; decoding takes" in said
    assert "assumed: 1.50 drafts accepted a round with it, 0.80 without, 1,000 tokens of answers before the training" in said
    assert json.loads(plan("--json"))["head_pays"] is True
    assert not heads.exists()
    assert run.main(trained(lab, tmp_path / "first", heads)) == 0
    capsys.readouterr()
    assert re.search(r"head         \S+/head-\w+, trained before; decoding takes .* it is used; 0\.\d\d drafts", plan())
    (path,) = heads.glob("*/record.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "failed": "no memory"}))
    assert "head         its training failed: no memory; delete " in plan()
    assert json.loads(plan("--json"))["head_pays"] is False


def test_statistics_add_up_what_runs_measured(lab: Path, tmp_path: Path, pays: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert run.main(trained(lab, out, tmp_path / "heads")) == 0
    once = job_stats(out).trained_head
    assert once is not None
    (path,) = (out / "_batchspec" / "logs").glob("run-*[0-9a-f].json")
    path.with_name(f"run-{'0' * 32}.json").write_text(path.read_text())
    (out / "_batchspec" / "logs" / f"run-{'1' * 32}.json").write_text('{"trained_head": {"idle_s": 1}}')
    twice = job_stats(out).trained_head
    assert twice is not None
    assert twice.after.tokens == 2 * once.after.tokens
    assert twice.after.tok_s == pytest.approx(once.after.tok_s)
    assert twice.idle_s == 2 * once.idle_s
