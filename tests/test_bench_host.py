"""The benchmark of the engine's host: a real engine whose device answers at once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from batchspec.commands import bench
from batchspec.commands.bench_host import measure, some_requests
from batchspec.commands.stand_in_device import ACCEPTANCE, TOKEN, K, StandInEngine


def test_it_prints_what_a_round_and_a_row_take_and_their_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--host", "--rows", "60", "--slots", "16", "--tokens", "20", "--turns", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows"] == 60
    assert facts["rounds"] > 60 * 20 / (K + 1) / 16
    assert 60 / 16 <= facts["refills"] <= 60
    of_refills = (facts["schedule_row_us"] + facts["launch_row_us"]) * facts["rows"]
    assert facts["refill_us"] * facts["refills"] == pytest.approx(of_refills, rel=0.02)
    assert facts["take_row_us"] > 0
    for each in ("round", "row"):
        parts = [value for name, value in facts.items() if name.endswith(f"_{each}_us")]
        assert facts[f"{each}_us"] == pytest.approx(sum(parts), abs=0.3)
        assert facts[f"{each}_us"] > 5


def test_its_engine_decodes_every_row_to_its_length_and_accepts_drafts_as_often_as_told() -> None:
    requests = list(some_requests(200, 60))
    engine = StandInEngine(32, 24 + 120 + 512)
    done = {completion.row_index: completion for completion in engine.run(iter(requests))}
    for request in requests:
        token_ids = done[request.row_index].token_ids
        assert token_ids is not None
        assert token_ids.tolist() == [TOKEN] * (request.synthetic_len or 0)
    accepted = sum(ACCEPTANCE**k for k in range(1, K + 1))
    assert engine.totals.accepted / engine.totals.row_rounds == pytest.approx(accepted, rel=0.1)


def test_its_figures_exclude_the_stand_in_target() -> None:
    engine = StandInEngine(8, 24 + 40 + 512)
    facts = measure(engine, list(some_requests(30, 20)))
    in_parts = facts["round_us"] * facts["rounds"] + facts["row_us"] * facts["rows"]
    assert in_parts <= 1e6 * facts["seconds"] + 2_000
    assert engine.watch.seconds["stand-in"] > 0
    assert np.isclose(sum(engine.watch.seconds.values()) - engine.watch.seconds["stand-in"], facts["seconds"], atol=1e-3)
