"""The memory kept for partial results of attention holds what the kernels' work lists ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.kernels.attention.settings import ordered_work_shape, work_shape
from batchspec.kernels.attention.split_kv_schedule import _bounds as bounds
from batchspec.kernels.attention.work_list import WorkShape
from batchspec.kernels.common.card import Card
from batchspec.kernels.latent.settings import latent_shape
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.latent.block import LatentSpec
from batchspec.tuning.cards import known_cards
from tests.helpers.latents import latent_spec
from tests.helpers.stand_ins import small_spec

CARDS = [known.card for known in known_cards() if known.card.computes_bf16]
HEADS = [(32, 8, 128), (64, 8, 64), (16, 2, 256), (16, 16, 256), (32, 4, 512), (9, 3, 64), (64, 1, 128)]
NUM_KEYS = (1, 100, 2_048, 2_049, 40_960, 262_144)


def attention(heads: int, kv_heads: int, head_dim: int) -> AttentionSpec:
    spec = small_spec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, windows=(None,), dtype="bfloat16")
    (_, mixer), = spec.mixers
    assert isinstance(mixer, AttentionSpec)
    return mixer


def line_bytes(shape: WorkShape, rows: int, head_dim: int, *, shares: bool) -> int:
    """Bytes of the lines of partial results that `split_kv_schedule` allocates: values and one fp32 number of each K/V head."""
    target, group_target = (max(1, programs // shape.kv_heads) for programs in (shape.programs, shape.group_programs))
    *_, lines = bounds(shape, rows, rows * shape.max_q, target, group_target, rows if shares else 0)
    return 4 * lines * shape.kv_heads * (head_dim + 1)


@pytest.mark.parametrize("ordered", [False, True])
@given(
    card=st.sampled_from(CARDS), heads=st.sampled_from(HEADS), rows=st.integers(1, 1024), draft_len=st.integers(0, 15),
    num_keys=st.sampled_from(NUM_KEYS), shares=st.booleans(),
)
def test_it_is_at_least_what_a_round_allocates(
    ordered: bool, card: Card, heads: tuple[int, int, int], rows: int, draft_len: int, num_keys: int, shares: bool
) -> None:
    num_heads, kv_heads, head_dim = heads
    size: dict[str, Any] = {
        "num_rows": rows, "max_q": draft_len + 1, "max_kv": num_keys, "num_heads": num_heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "page_size": 16,
    }
    if ordered:
        shape = ordered_work_shape(**size, num_sms=card.num_sms)
    else:
        shape = work_shape(**size, dtype=torch.bfloat16, card=card)
    run = replace(small_spec(dtype="bfloat16").computing(torch.bfloat16, draft_len=draft_len), ordered=ordered)
    kept = attention(*heads).partial_bytes(run, rows, num_keys, shares=shares)
    assert kept >= line_bytes(shape, rows, head_dim, shares=shares)


@given(
    card=st.sampled_from(CARDS), heads=st.sampled_from([(20, 512), (32, 256), (128, 512), (5, 32)]), rows=st.integers(1, 1024),
    fp8=st.booleans(), draft_len=st.integers(0, 15), num_keys=st.sampled_from(NUM_KEYS),
)
def test_it_is_at_least_what_a_round_of_latent_attention_allocates(
    card: Card, heads: tuple[int, int], rows: int, fp8: bool, draft_len: int, num_keys: int
) -> None:
    num_heads, latent_dim = heads
    shape = latent_shape(
        num_rows=rows, max_q=draft_len + 1, max_kv=num_keys, num_heads=num_heads, latent_dim=latent_dim, page_size=16,
        dtype=torch.bfloat16, fp8=fp8, card=card,
    )
    spec = latent_spec()
    (_, mixer), *_ = spec.mixers
    assert isinstance(mixer, LatentSpec)
    mixer = replace(mixer, num_heads=num_heads, sizes=replace(mixer.sizes, latent_dim=latent_dim))
    kept = mixer.partial_bytes(spec.computing(torch.bfloat16, draft_len=draft_len), rows, num_keys, shares=False)
    assert kept >= line_bytes(shape, rows, latent_dim, shares=False)
