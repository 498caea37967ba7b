"""Layers with a sliding window read no more keys than the window and the drafts: what cost model, plan and K = auto count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchspec.commands.plan_text import Plan
from batchspec.commands.planning import plan
from batchspec.config.schema import RunConfig
from batchspec.engine.loop import warm_up
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.step import RoundWidth
from batchspec.packing.cost import kv_read_bytes, prefill_seconds, round_seconds
from tests.engine.test_round_planner import MODE, chosen, planner
from tests.helpers.engines import packed
from tests.helpers.models import write_weights
from tests.helpers.stand_ins import H200, ByteTokenizer, small_spec

BF16 = torch.bfloat16
TOKEN_BYTES = 2 * 2 * 8 * 2
"""K and V of a token in one layer of `small_spec`, in bf16."""
MISTRAL = {
    "model_type": "mistral", "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 4096, "eos_token_id": 257, "tie_word_embeddings": True,
}


def read(windows: tuple[int | None, ...], context: int, tokens_per_row: int) -> float:
    spec = small_spec(windows=windows)
    return kv_read_bytes(spec, dtype=BF16, rows=3, context_tokens=context, tokens_per_row=tokens_per_row)


@pytest.mark.parametrize(("tokens_per_row", "most"), [(1, 100), (4, 103)])
def test_a_round_reads_the_window_of_its_first_query_and_one_key_more_for_each_draft(tokens_per_row: int, most: int) -> None:
    for context in (1, 99, 100, 101, 103, 104, 5000):
        keys = min(context, most)
        assert read((100, 100), context, tokens_per_row) == 3 * 2 * keys * TOKEN_BYTES
        assert read((None, 100, 100), context, tokens_per_row) == 3 * (context + 2 * keys) * TOKEN_BYTES
        assert read((None, None), context, tokens_per_row) == 3 * 2 * context * TOKEN_BYTES


@pytest.mark.parametrize("rows", [64, 512])  # few rows wait for memory, many drafts for arithmetic
def test_a_round_takes_as_long_as_one_whose_context_is_the_window(rows: int) -> None:
    def seconds(window: int | None, context: int) -> float:
        spec = small_spec(windows=(window, window))
        return round_seconds(spec, H200, dtype=BF16, rows=rows, context_tokens=context, tokens_per_row=8)

    assert seconds(4096, 100_000) == seconds(None, 4096 + 7)
    assert seconds(4096, 1000) == seconds(None, 1000)


def test_a_prompt_s_queries_read_half_of_it_or_what_is_within_the_window() -> None:
    """Of 1,000 tokens under a window of 100 the first 100 read 50 keys on average, the others 100."""

    def seconds(window: int | None) -> float:
        spec = small_spec(windows=(window, window))
        return prefill_seconds(spec, H200, dtype=BF16, prompt_tokens=1000, pass_tokens=1000)

    key_s = 4 * 2 * 32 * 1000 / H200.flop_s(1000)  # one key of every query in both layers
    assert seconds(None) - seconds(100) == pytest.approx(key_s * (500 - (0.1 * 50 + 0.9 * 100)), rel=1e-6)
    assert seconds(2000) == seconds(1000) == seconds(None)


@pytest.fixture
def job(tmp_path: Path) -> RunConfig:
    """20 prompts of 100 tokens with 40 output tokens each, in two slots, eight drafts a round."""
    (tmp_path / "model").mkdir()
    config = RunConfig(device="cpu")
    config.model.path, config.input.path = str(tmp_path / "model"), str(tmp_path / "in.parquet")
    config.decode.max_new_tokens, config.packing.max_num_seqs, config.draft.num_speculative_tokens = 40, 2, 8
    pq.write_table(pa.table({"prompt": ["x" * 100] * 20}), config.input.path)
    return config


def planned(job: RunConfig, **settings: Any) -> Plan:
    folder = Path(str(job.model.path))
    (folder / "config.json").write_text(json.dumps(MISTRAL | settings))
    write_weights(folder)
    return plan(job, tokenizer=cast(Any, ByteTokenizer()), full=True)


def test_the_plan_of_a_windowed_model_reads_less_by_the_keys_that_its_windows_have_passed(job: RunConfig) -> None:
    """At mean context a row has 120 tokens: 100 of the prompt and half of the output."""
    token_bytes = 2 * 2 * 8 * 4
    mixed = ["full_attention", "sliding_attention", "sliding_attention"]
    full, sliding, some, wide = (
        planned(job, **settings)
        for settings in (
            {"sliding_window": None},
            {"sliding_window": 16},
            {"sliding_window": 16, "layer_types": mixed},
            {"sliding_window": 112},
        )
    )
    ahead = [made.forecast for made in (full, sliding, some, wide)]
    assert [one.kv_read_bytes for one in ahead if one is not None] == [
        2 * 3 * 120 * token_bytes, 2 * 3 * (16 + 8) * token_bytes, 2 * (120 + 2 * (16 + 8)) * token_bytes,
        2 * 3 * 120 * token_bytes,
    ]
    assert " and 92.2 kB of K/V" in full.text()
    assert " and 18.4 kB of K/V" in sliding.text()


@pytest.mark.parametrize(
    ("kv_windows", "expected"),
    [
        (((None, None), ()), 30 + 900),
        (((None, None), (None,)), 30 + 900),
        (((100, 100), ()), 30 + 100 + 4),
        (((None, 100), ()), (2 * 30 + 900 + 104) // 2),
        (((100, 100), (None,)), (3 * 30 + 2 * 104 + 900) // 3),
        (((1000, 1000), ()), 30 + 900),
    ],
)
def test_k_is_chosen_by_the_keys_that_the_layers_read(
    kv_windows: tuple[tuple[int | None, ...], tuple[int | None, ...]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of 30 and 900 tokens, the third slot is free; four drafts a round at most."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    one = planner(packed(3, num_verified=4), 1, kv_windows=kv_windows)
    one.prepare(MODE)
    assert one._lengths is not None
    asked: list[int] = []

    def choose(num_rows: int, context_tokens: int, **_: Any) -> tuple[RoundWidth, bool]:
        asked.append(context_tokens)
        return RoundWidth(1), True

    monkeypatch.setattr(one._lengths, "choose", choose)
    launch = chosen(one, 3, np.array([0, -1, 2]), np.array([30, 5000, 900]))
    assert asked == [launch.context_tokens] == [expected]
