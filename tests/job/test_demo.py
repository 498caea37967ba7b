"""The demo job with its real model: SmolLM2-135M-Instruct over the shipped prompts, in fp32, as the README starts it.

The first 10 of its 74 rows, of 32 tokens at most; with -m slow all of them as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest
import torch

from batchspec.checkpoint.hub import resolve_model
from batchspec.errors import CheckpointError
from tests.helpers.forked import run_python

pytestmark = pytest.mark.second

REPOSITORY = Path(__file__).parents[2]
SHORT = "decode.max_new_tokens=32"


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return resolve_model("smollm2-135m", None)
    except CheckpointError as error:
        pytest.skip(f"the demo's model is not to be had here: {error}")


def run_demo(folder: Path, *overrides: str) -> tuple[pl.DataFrame, str]:
    """Output rows and what the run said, started in the folder that will hold the output."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "batchspec.run", "+job=demo", *overrides]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return pl.read_parquet(folder / "out/demo/data"), done.stderr


@pytest.fixture(scope="module", params=[10, pytest.param(None, marks=pytest.mark.slow)], ids=["10 rows", "all rows"])
def limit(request: pytest.FixtureRequest) -> int | None:
    return cast("int | None", request.param)


@pytest.fixture(scope="module")
def demo(model: Path, limit: int | None, tmp_path_factory: pytest.TempPathFactory) -> tuple[pl.DataFrame, str]:
    return run_demo(tmp_path_factory.mktemp("demo"), *(() if limit is None else (f"input.limit={limit}", SHORT)))


def test_it_ends_with_the_path_of_the_output_and_the_command_to_inspect_it(
    demo: tuple[pl.DataFrame, str], limit: int | None
) -> None:
    *_, done, report, errors, truncated, look, python = demo[1].splitlines()
    assert done.startswith(f"out/demo: done, {limit or 74} rows")
    assert "report.html" in report
    codes = demo[0].filter(pl.col("status") == "error")["error"].struct.field("code")
    assert f"{len(codes)} error row{'s' if len(codes) > 1 else ''} (" in errors
    assert all(f"1 {code}" in errors for code in codes)
    assert "; the column `error` says why" in errors
    count = (demo[0]["status"] == "truncated").sum()
    assert truncated.startswith(f"out/demo: {count} truncated completion")
    assert look.endswith("batchspec stats out/demo")
    assert 'polars.read_parquet("out/demo/data")' in python


def test_good_rows_have_answers_and_bad_rows_have_errors(demo: tuple[pl.DataFrame, str], limit: int | None) -> None:
    frame = demo[0]
    bad = frame.filter(pl.col("status") == "error")
    assert bad.height >= (3 if limit is None else 1)
    assert bad["error"].struct.field("message").str.len_chars().min() > 20  # type: ignore[operator]
    good = frame.filter(pl.col("status") != "error")
    assert good["request_id"].n_unique() >= (64 if limit is None else 9)
    assert set(good["status"]) == {"ok", "truncated"}
    assert good["completion"].str.len_chars().median() > 40  # type: ignore[operator]


def test_drafts_of_the_shipped_head_are_accepted(demo: tuple[pl.DataFrame, str]) -> None:
    spec = demo[0].filter(pl.col("status") != "error")["spec_decode"].struct.unnest()
    assert set(spec["drafter"]) == {"eagle3"}
    assert 1 + int(spec["num_accepted_draft_tokens"].sum()) / int(spec["num_spec_steps"].sum()) > 1.6


def test_statistics_identities_hold_on_every_row(demo: tuple[pl.DataFrame, str]) -> None:
    good = demo[0].filter(pl.col("status") != "error")
    for row in good.iter_rows(named=True):
        check_identities(row)
    assert demo[0].filter(pl.col("status") == "error")["spec_decode"].is_null().all()


def check_identities(row: dict[str, Any]) -> None:
    spec, usage = row["spec_decode"], row["usage"]
    histogram, steps = spec["acceptance_histogram"], spec["num_spec_steps"]
    accepted, drafted = spec["num_accepted_draft_tokens"], spec["num_draft_tokens"]
    assert len(histogram) == spec["num_spec_tokens"] + 1
    assert sum(histogram) == steps
    assert sum(j * count for j, count in enumerate(histogram)) == accepted
    emitted = spec["num_prefills"] + accepted + steps
    assert usage["completion_tokens"] == emitted - spec["num_discarded_tokens"] == len(row["token_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == len(row["prompt_ids"])
    assert 0 <= usage["cached_tokens"] < usage["prompt_tokens"]
    assert spec["mean_acceptance_length"] == (pytest.approx(1 + accepted / steps) if steps else None)
    assert spec["draft_acceptance_rate"] == (pytest.approx(accepted / drafted) if drafted else None)
    rates, counts = spec["acceptance_per_position"], spec["drafted_per_position"]
    assert sum(counts) == drafted
    assert sum(round(rate * count) for rate, count in zip(rates, counts, strict=True) if rate is not None) == accepted
    assert [rate is None for rate in rates] == [count == 0 for count in counts]
    assert (row["finish_reason"] == "length") == (row["status"] == "truncated")


def test_drafting_changes_no_row(demo: tuple[pl.DataFrame, str], limit: int | None, tmp_path: Path) -> None:
    """Of the first 8 input rows, or 4: without drafts they take longer."""
    count = 4 if limit else 8
    words = ["-m", "batchspec.run", "+job=demo", "draft=none", f"input.limit={count}", *(() if limit is None else (SHORT,))]
    done = run_python(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plain = pl.read_parquet(tmp_path / "out/demo/data")
    same = demo[0].filter(pl.col("row_index") < count)
    key = ["request_id", "sample_index", "token_ids", "completion", "status"]
    assert same.select(key).rows() == plain.select(key).rows()
    assert plain["spec_decode"].is_null().all()
    assert (same["spec_decode"].struct.field("num_accepted_draft_tokens").sum() or 0) > 9 * count


def test_greedy_text_is_that_of_transformers(demo: tuple[pl.DataFrame, str], model: Path, limit: int | None) -> None:
    """Each token is transformers' likeliest one after the tokens before it, so that its greedy text is the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain = pl.col("temperature").is_null() & pl.col("stop").is_null() & (pl.col("status") != "error")
    count = 3 if limit else 20
    rows = demo[0].filter(plain).head(count)
    assert rows.height == count
    auto: Any = AutoModelForCausalLM
    network = auto.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in rows.iter_rows(named=True):
        count = len(row["prompt_ids"])
        with torch.inference_mode():
            logits = network(torch.tensor([row["prompt_ids"] + row["token_ids"]])).logits[0]
        greedy_sample = logits[count - 1 : -1].argmax(-1).tolist()
        assert greedy_sample == row["token_ids"], row["request_id"]
        assert tokenizer.decode(greedy_sample, skip_special_tokens=True) == row["completion"]
