"""Random whole jobs that combine features, on a GPU: in bf16 with decode.deterministic their rows are bit for bit those of the
reference run, without drafts in few slots. With two ranks they compute in float64.

`GPU_JOBS=0:200 pytest tests/gpu/test_gpu_jobs.py` runs these cases, `python -m tests.gpu_jobs 0 200` tells more.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from batchspec.distributed import rank_processes
from batchspec.errors import ConfigError
from batchspec.records import Completion
from batchspec.warm import ranks as ranks_module
from tests.gpu_jobs.cases import GROUP, draw_case, draw_group
from tests.gpu_jobs.compare import Rows, differences, rows_of_stream
from tests.gpu_jobs.entry_points import _command as command
from tests.gpu_jobs.entry_points import run_case
from tests.gpu_jobs.plain import Failed, Plain
from tests.gpu_jobs.scoring import MEAN_OF_BF16, score_difference
from tests.gpu_jobs.workers import hunt
from tests.helpers.forked import ServedPopen

pytestmark = pytest.mark.second

USUAL = [group * GROUP + case for group in (0, 1, 3, 4, 5, 7, 27, 28, 32, 39, 56, 57) for case in range(2)]
"""Two cases of each of twelve models that are quickly made."""


def asked() -> list[int]:
    first, _, end = os.environ.get("GPU_JOBS", "").partition(":")
    return list(range(int(first), int(end))) if end else USUAL


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_random_jobs_are_those_of_the_reference_run(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    cases = asked()
    summary = hunt(cases, seconds=300 + 30 * len(cases), workers=6, folder=tmp_path, gpu=True, ranks=ranks)
    assert not summary.failures, "\n".join(summary.failures)
    assert not summary.refused or ranks > 1
    assert summary.cases == len(cases)
    assert min(summary.tokens, summary.accepted) > 0
    assert ranks == 1 or summary.preempted > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks compute on a CPU")
def test_a_rank_that_reads_the_weights_of_another_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("WARM", "1")
    monkeypatch.setattr(rank_processes, "Popen", ServedPopen)
    plain = Plain(draw_group(0, tmp_path, gpu=False, ranks=2))
    case = replace(draw_case(0, plain.group), entry_point="engine", eager=False)
    right = run_case(case, plain)
    assert not right.lines
    assert right.tokens > 0
    monkeypatch.setattr(ranks_module, "PROGRAM", ("-m", "tests.distributed.rank_faults"))
    monkeypatch.setenv("FAULT", "swap 1 0")
    assert any("token_ids" in line for line in run_case(case, plain).lines)


def rows(**changes: object) -> Rows:
    row = {"status": "ok", "token_ids": [5, 6, 7], "logprobs": [-0.5, None, -2.0], "top_logprobs": [[{"id": 5, "logprob": -0.5}]]}
    return {("r0", 0, 0): row | changes, ("r1", 0, 0): row}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": [5, 9, 7]}, "r0/0: token_ids at 1 of 3: 9, plain (of 3) 6"),
        ({"token_ids": [5, 6]}, "r0/0: token_ids at 2 of 2: its end, plain (of 3) 7"),
        ({"status": "error"}, "r0/0: status 'error', plain 'ok'"),
        ({"logprobs": [-0.5, None, -2.0000002]}, "r0/0: logprobs[2] -2.0000002, plain -2.0"),
        ({"logprobs": [-0.5, -1.0, -2.0]}, "r0/0: logprobs[1] -1.0, plain None"),
        ({"logprobs": None}, "r0/0: logprobs 'None', plain '[-0.5, None, -2.0]'"),
    ],
)
def test_a_row_that_differs_is_told_with_its_first_difference(changes: dict[str, object], said: str) -> None:
    assert differences(rows(), rows(), bits=True) == []
    assert differences(rows(**changes), rows(), bits=True) == [said]


def test_other_top_logprobs_missing_rows_and_rows_that_nobody_asked_for_are_told() -> None:
    (line,) = differences(rows(top_logprobs=[[{"id": 4, "logprob": -0.5}]]), rows(), bits=True)
    assert line.startswith("r0/0: top_logprobs[0] [{'id': 4")
    one = {("r2", 1, 3): rows()["r0", 0, 0]}
    assert differences(one, {}, bits=True) == ["r2/1 turn 3: nobody asked for this row"]
    assert differences({}, one, bits=True) == ["r2/1 turn 3: the row is missing"]
    assert differences({}, one, bits=True, whole=False) == []


def test_a_column_that_only_one_of_two_outputs_has_is_told_but_for_a_stream() -> None:
    less = {key: {name: value for name, value in row.items() if name != "logprobs"} for key, row in rows().items()}
    for found, wanted in ((less, rows()), (rows(), less)):
        line = "only one of the two has the columns ['logprobs']"
        assert differences(found, wanted, bits=True) == [f"r0/0: {line}", f"r1/0: {line}"]
        assert differences(found, wanted, bits=True, of_stream=True) == []


def test_a_row_of_a_stream_is_compared_whole_and_may_come_once() -> None:
    done = Completion(
        request_id="r0", row_index=0, sample_index=0, shard=0, status="ok", token_ids=np.array([5, 6], np.int32), text="ab",
        finish_reason="stop", logprobs=np.array([-0.5, np.nan], np.float32),
    )
    plain = rows_of_stream([done])
    assert plain["r0", 0, 0]["logprobs"] == [-0.5, None]
    without = rows_of_stream([done.replace(logprobs=None)])
    assert differences(without, plain, bits=True, of_stream=True) == ["r0/0: logprobs 'None', plain '[-0.5, None]'"]
    with pytest.raises(ValueError, match="came twice"):
        rows_of_stream([done, done])


@pytest.mark.parametrize(
    ("word", "error"),
    [("draft=none max_tokens=5", ConfigError), ("input.path=FOLDER/no.parquet", Failed)],
    ids=["a key", "a file"],
)
def test_a_refused_key_is_no_failure_and_a_refused_file_is_one(word: str, error: type[Exception], tmp_path: Path) -> None:
    given = word.replace("FOLDER", str(tmp_path)).split()
    with pytest.raises(error, match=r"max_tokens|no\.parquet"):
        command(["model.path=m", f"output.dir={tmp_path}/out", "input.path=hf://datasets/a/b", *given], tmp_path, None, 0.0, 0)


def test_in_float64_log_probabilities_may_differ_in_their_last_digits() -> None:
    assert differences(rows(logprobs=[-0.5, None, -2.0000002]), rows(), bits=False) == []
    assert differences(rows(logprobs=[-0.5, None, -2.001]), rows(), bits=False) != []


def test_scores_of_a_prompt_are_compared_one_by_one_in_float64_and_on_average_in_bf16() -> None:
    plain = {"status": "ok", "prompt_ids": [4, 5, 6], "prompt_logprobs": [None, -1.0, -2.0]}
    near, far = ({**plain, "prompt_logprobs": [None, -1.0, last]} for last in (-2.01, -3.0))
    assert score_difference(plain, plain, allowed=None) == score_difference(near, plain, allowed=MEAN_OF_BF16) == ""
    assert score_difference(near, plain, allowed=None).startswith("prompt_logprobs[2] of 3: -2.01, plain -2.0")
    assert score_difference(far, plain, allowed=MEAN_OF_BF16).startswith("prompt_logprobs[2] of 3: -3.0, plain -2.0")
    assert score_difference({**plain, "prompt_logprobs": None}, plain, allowed=MEAN_OF_BF16) == "no prompt_logprobs"
