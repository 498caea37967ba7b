"""The step is real: a second process, without scheduler, page pool and clock, executes recorded steps with the same result."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.run_times import RoundClock, RoundTime
from batchspec.engine.rounds import draft_lengths
from batchspec.engine.rounds.draft_lengths import DraftLengths
from batchspec.engine.slots import expected_pages
from batchspec.engine.step import ScheduledStep
from batchspec.records import Request, SamplingParams, Thinking
from tests.helpers.engines import VOCAB, decode, make_engine, plain_tokens, request, tiny_target
from tests.helpers.replaying import Scenario, scenario, state_digest

pytestmark = pytest.mark.second

ROOT = Path(__file__).parents[2]
SCENARIOS = [scenario(drafter, run_ahead) for run_ahead, drafter in enumerate(["lookup", "eagle3", "tree"])]
SCENARIOS += [scenario("hybrid", 0), scenario("window", 1)]


def requests_of_every_kind() -> list[Request]:
    """Long shared prefixes, penalties, n-grams, stop strings, thinking budgets, stop ids; more tokens than pages, a long tail."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, VOCAB, 34).tolist()
    hot = SamplingParams(temperature=1.0, top_k=9)
    found = [request(i, [*prefix, i], cap=14, predicted=4, sampling=hot if i % 2 else None) for i in range(5)]
    found += [request(5 + i, [i, 7], cap=40, predicted=4, sampling=hot, stop=("A", "Z")) for i in range(2)]
    found.append(request(7, [4, 5], cap=12, predicted=4, sampling=SamplingParams(temperature=0.8, repetition_penalty=1.3)))
    found.append(request(8, [6, 1], cap=30, predicted=4, stop_ids=(3, 9), min_new_tokens=5))
    thinking = Thinking(begin_id=3, end_id=4, opened=True, budget=6, closing=(11, 4))
    found += [replace(request(9 + i, [8, i], cap=26, predicted=4, sampling=hot), thinking=thinking) for i in range(2)]
    ngrams = SamplingParams(no_repeat_ngram=(2, 30, (5,)))
    return [*found, request(11, [2], cap=60, predicted=8, sampling=ngrams), request(12, [9], cap=60, predicted=8)]


def recorded(one: Scenario, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, list[int]], list[tuple[bytes, bytes]], Engine]:
    """Tokens of a run in which the clock says anything: the width of rounds changes at random."""
    engine = make_engine(tiny_target(window=5), decode=decode, **one.parts())
    executor = engine.executor
    clock = random.Random(1)
    if engine.drafter.draft_len:
        monkeypatch.setattr(draft_lengths, "LEAST_ROWS", 1)
        engine.planner._lengths = any_times(engine, clock)
        monkeypatch.setattr(RoundClock, "add", lambda *_: RoundTime(clock.uniform(0.1, 20.0), 0))
    execute, steps = executor.execute, list[tuple[bytes, bytes]]()

    def record(step: ScheduledStep) -> None:
        execute(step)
        steps.append((pickle.dumps(step), state_digest(executor)))

    monkeypatch.setattr(executor, "execute", record)
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    done = {c.request_id: c.token_ids.tolist() for c in engine.run(iter(requests_of_every_kind())) if c.token_ids is not None}
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)
    return done, steps, engine


def any_times(engine: Engine, clock: random.Random) -> DraftLengths:
    """What chooses the widths of rounds by times that `clock` makes up, those that verify a part being quicker."""
    round_ = engine.executor.round
    lengths = DraftLengths(engine.drafter.draft_len, choices=round_.draft_lens, row_lengths=round_.chances is not None)
    for num_rows in engine.batch.row_buckets:
        for width in lengths.widths(num_rows):
            for prepare_next in (False, True):
                seconds = clock.uniform(0.5, 2.0) * (1.0 if width.mean_len is None else 0.8)
                lengths.times.set_base(num_rows, width, seconds, prepare_next=prepare_next)
    return lengths


def test_a_second_process_that_executes_the_steps_has_the_same_tokens_and_page_tables(tmp_path: Path) -> None:
    """And has learnt the same of drafts, by which the drafts that are verified are chosen."""
    found, tokens, seen = [], [], set[str]()
    for one in SCENARIOS:
        with pytest.MonkeyPatch.context() as patch:
            done, steps, engine = recorded(one, patch)
        tokens.append(done)
        found.append((one, steps))
        seen |= what_happened(one, [pickle.loads(step) for step, _ in steps], engine)
    assert seen == {
        "no draft prepared", "preempted", "killed", "moved", "granted", "prefilled again", "cached", "grouped", "swapped",
        "a part verified",
    }
    assert all(done == tokens[0] for done in tokens)
    for req in requests_of_every_kind():
        if req.thinking is None:
            assert tokens[0][req.request_id] == plain_tokens(tiny_target(window=5), req)
    (tmp_path / "steps").write_bytes(pickle.dumps(found))
    replayed = subprocess.run(
        [sys.executable, "-m", "tests.helpers.replaying", str(tmp_path / "steps")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def what_happened(one: Scenario, steps: list[ScheduledStep], engine: Engine) -> set[str]:
    """Kinds of decisions among the steps; every run has several modes and draft lengths."""
    rounds = [step.round for step in steps if step.round is not None]
    refills = [refill for step in steps for refill in step.refills]
    assert len({round_.shape.mode for round_ in rounds}) > 1
    assert one.drafter == "none" or len({round_.shape.draft_len for round_ in rounds}) > 1
    kinds = {
        "no draft prepared": any(not round_.shape.prepare_next for round_ in rounds),
        "preempted": engine.totals.preempted,
        "killed": any(step.killed for step in steps),
        "moved": any(step.moves for step in steps),
        "granted": any(step.grants for step in steps),
        "prefilled again": any(refill.tokens for refill in refills),
        "cached": any(refill.num_cached for refill in refills),
        "grouped": any(round_.new_prefix_groups for round_ in rounds),
        "swapped": any(round_.drafter_update.swap for round_ in rounds),
        "a part verified": any(round_.shape.mean_len is not None for round_ in rounds),
    }
    return {kind for kind, happened in kinds.items() if happened}


def test_a_step_holds_plain_host_data_only() -> None:
    """Nothing of it is a tensor: it can be sent to another process as it is."""
    with pytest.MonkeyPatch.context() as patch:
        _, steps, _ = recorded(scenario("lookup", 1), patch)
    assert not any(b"torch" in pickled for pickled, _ in steps)
