"""The cost model agrees with what was measured, and grows with what it should grow with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.packing import rates
from batchspec.packing.cost import kv_read_bytes, num_multiplied, prefill_seconds, round_seconds
from batchspec.packing.rates import calibrate, device_rates
from tests.helpers.stand_ins import H200, LLAMA_8B

BF16 = torch.bfloat16


def round_s(rows: int, context: float, tokens: int) -> float:
    return round_seconds(LLAMA_8B, H200, dtype=BF16, rows=rows, context_tokens=context, tokens_per_row=tokens)


def test_sizes_are_those_of_the_published_shape() -> None:
    assert num_multiplied(LLAMA_8B) == pytest.approx(7.5e9, rel=0.01)
    assert LLAMA_8B.weight_bytes(BF16) == pytest.approx(16.06e9, rel=0.001)
    assert kv_read_bytes(LLAMA_8B, dtype=BF16, rows=1, context_tokens=16, tokens_per_row=4) == 16 * 131_072


@pytest.mark.parametrize(
    ("rows", "context", "tokens", "measured_s"),
    [
        (64, 8448, 1, 0.00481 + 32 * 0.000513),  # matrix products + 32 layers of attention, as measured
        (64, 8448, 4, 0.00751 + 32 * 0.000519),
        (256, 1024, 1, 0.00751 + 32 * 256 * 1024 * 4096 / 3.88e12),
    ],
)
def test_a_round_takes_what_its_parts_were_measured_at(rows: int, context: float, tokens: int, measured_s: float) -> None:
    assert round_s(rows, context, tokens) == pytest.approx(measured_s, rel=0.1)


@pytest.mark.second
@given(st.integers(1, 512), st.integers(1, 16384), st.integers(1, 9))
def test_more_rows_context_or_drafts_never_cost_less(rows: int, context: int, tokens: int) -> None:
    base = round_s(rows, context, tokens)
    assert base <= round_s(rows + 1, context, tokens) * (1 + 1e-9)
    assert base <= round_s(rows, context + 1, tokens)
    assert base <= round_s(rows, context, tokens + 1) * (1 + 1e-9)


def test_few_rows_cost_one_reading_of_the_weights() -> None:
    assert round_s(1, 1, 1) == pytest.approx(round_s(16, 1, 1), rel=0.01)
    assert round_s(4, 1, 1) >= 2 * num_multiplied(LLAMA_8B) / 4.3e12


def test_a_prompt_costs_its_share_of_full_passes() -> None:
    one = prefill_seconds(LLAMA_8B, H200, dtype=BF16, prompt_tokens=1024, pass_tokens=8192)
    long = prefill_seconds(LLAMA_8B, H200, dtype=BF16, prompt_tokens=8192, pass_tokens=8192)
    assert 8 * one < long < 10 * one
    assert 0.1 < long < 0.3
    flop = 4 * 32 * 128 * 32 * 8192 * 8192 / 2  # each token reads those before it: half of the prompt
    assert long - 8 * one == pytest.approx(flop * (1 - 1 / 8) / H200.flop_s(8192), rel=0.01)


def test_prefill_computes_logits_once_a_prompt() -> None:
    """The output matrix is multiplied with the last token of each prompt, in passes of eight prompts or of an eighth of one."""
    head = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    layers_s = 2 * (num_multiplied(LLAMA_8B) - head) / H200.flop_s(8192)
    for prompt_tokens, passes in ((1024, 1 / 8), (65536, 8)):
        found = prefill_seconds(LLAMA_8B, H200, dtype=BF16, prompt_tokens=prompt_tokens, pass_tokens=8192)
        attention_s = 4 * 32 * 128 * 32 * prompt_tokens * prompt_tokens / 2 / H200.flop_s(8192)
        head_s = min(1, passes) * 2 * head / 3.125e12
        assert found - attention_s == pytest.approx(prompt_tokens * layers_s + head_s + passes * H200.overhead_s, rel=1e-3)


def test_an_unknown_device_is_measured() -> None:
    measured = device_rates(torch.device("cpu"), torch.float32)
    assert 1e8 < measured.bytes_s < 1e13
    assert 1e8 < measured.flop_s(256) < 1e15
    assert 0 < measured.overhead_s < 0.5


def test_a_machine_that_is_busy_while_it_is_measured_still_gains_by_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of 128 and 256 tokens seem ten times as slow as those of fewer: somebody else had the core."""
    seconds = iter((8e-4, 1e-3, 4e-2, 8e-2, 5e-3, 3e-6))
    monkeypatch.setattr(rates, "_seconds", lambda call, device: next(seconds))
    measured = calibrate(torch.device("cpu"), torch.float32)
    assert measured.flop_s(8) < measured.flop_s(32) == measured.flop_s(256)
    rows = [round_seconds(LLAMA_8B, measured, dtype=BF16, rows=n, context_tokens=64, tokens_per_row=1) / n for n in (1, 4, 16)]
    assert rows == sorted(rows, reverse=True)
