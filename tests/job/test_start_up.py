"""The table of where the seconds go between the command and the first token."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from batchspec import run
from batchspec.job.report.start_up import StartUp, process_age_s
from batchspec.packing.survey import PREFIX_TOKENS, Survey
from batchspec.records import Request, SamplingParams
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import make_prompts


def test_phases_add_up_to_the_time_of_the_first_token_and_parts_are_taken_out_of_their_phase() -> None:
    ages = iter([2.0, 5.0, 5.5, 9.0])
    start_up = StartUp(lambda: next(ages))
    start_up.done("imports")
    start_up.done("engine", {"kernels": 1.0, "graphs": 1.5})
    start_up.end("first rows")
    start_up.done("a second engine, after memory ran out")
    assert start_up.over
    assert start_up.facts() == {"imports": 2.0, "engine": 0.5, "kernels": 1.0, "graphs": 1.5, "first rows": 0.5}
    assert start_up.line() == (
        "the first token came 5.5 s after the command: imports 2.0, engine 0.5, kernels 1.0, graphs 1.5, first rows 0.5"
    )


def test_the_age_of_a_process_is_that_of_its_clock() -> None:
    """To the hundredth that the system gives."""
    began = time.monotonic(), process_age_s(), time.monotonic()
    time.sleep(0.05)
    ended = time.monotonic(), process_age_s(), time.monotonic()
    assert ended[0] - began[2] - 0.02 <= ended[1] - began[1] <= ended[2] - began[0] + 0.02


@pytest.mark.second
def test_a_run_prints_and_stores_its_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tokenizer(make_checkpoint(tmp_path / "model", "llama", dtype=torch.float64))
    make_prompts(tmp_path / "prompts.parquet", 3)
    arguments = [f"model.path={model}", f"input.path={tmp_path}/prompts.parquet", f"output.dir={tmp_path}/out"]
    assert run.main([*arguments, "decode.max_new_tokens=4"]) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("the first token came ")]
    (log,) = (tmp_path / "out/_batchspec/logs").glob("run-*[0-9a-f].json")
    run_log = json.loads(log.read_text())
    phases = run_log["start_up"]
    assert [*phases] == ["imports and configuration", "checks", "survey", "earlier runs", "weights", "engine", "first rows"]
    named = [part.rpartition(" ")[0] for part in said.partition(": ")[2].removesuffix(", ...").split(", ")]
    assert named == [phase for phase in phases if phase in named]
    assert {phase for phase, seconds in phases.items() if seconds > 0.06 * sum(phases.values())} <= set(named)
    assert min(phases, key=phases.__getitem__) not in named
    making = sum(phases[name] for name in ("earlier runs", "weights", "engine"))
    assert run_log["start_up_s"] == pytest.approx(making, abs=0.02), "of the survey and of the first rows nothing"


def requests(*prompts: list[int], same_row: bool = False) -> list[Request]:
    return [
        Request(
            request_id=f"q{i}", row_index=0 if same_row else i, sample_index=i, shard=0, prompt_ids=np.array(ids, np.int32),
            max_new_tokens=4, min_new_tokens=0, sampling=SamplingParams(), stop_ids=(), stop=(), seed=0, predicted_tokens=4,
        )
        for i, ids in enumerate(prompts)
    ]


def test_the_survey_finds_a_prefix_that_rows_share() -> None:
    long = [*range(PREFIX_TOKENS)]

    def shares(found: list[Request]) -> bool:
        survey = Survey()
        survey.add(len(found), found)
        return survey.shares_prefix

    assert shares(requests([*long, 1], [*long, 2]))
    assert not shares(requests([*long, 1], [9, *long]))
    assert not shares(requests(long[:-1], long[:-1]))
    assert shares(requests(long, long, same_row=True)), "samples of one row"
    assert not shares(requests(long[:-1], long[:-1], same_row=True))
