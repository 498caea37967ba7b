"""The launch settings that kernels choose by the properties of a card: those of Hopper as measured, those of others fit.

`tiles_of_hopper.json` holds what measurements on an H200 chose, for shapes of
Llama-8B, Qwen3-30B-A3B, MiniMax-M2, gpt-oss, Qwen3.5, Qwen3-Next and SmolLM2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.kernels.attention.settings import config_of
from batchspec.kernels.common.card import Card, assumed, card_of
from batchspec.kernels.moe.router import router_tile
from batchspec.kernels.moe.tiles import fits
from batchspec.kernels.moe.units import max_units
from batchspec.tuning import policy
from batchspec.tuning.cards import known_card, known_cards

PINNED: dict[str, list[list[Any]]] = json.loads(Path(__file__).with_name("tiles_of_hopper.json").read_text())
HOPPER = ("H200", "H100-80GB")
"""Both have as many SMs, and as much shared memory."""
GPU, BF16 = torch.device("cuda"), torch.bfloat16
DTYPES = {"bf16": BF16, "fp8": torch.float8_e4m3fn, "mxfp4": torch.uint8, "int4": torch.int32}
CARDS = [known.card for known in known_cards() if known.card.computes_bf16]


@pytest.mark.parametrize("name", HOPPER)
def test_fp8_products_are_divided_as_measured(name: str) -> None:
    with assumed(known_card(name).card):
        for tokens, rows, k, library, expected in PINNED["fp8"]:
            tile = policy.fp8_tile(tokens, rows, k, GPU, library=library)
            assert (tile and list(tile)) == expected, (tokens, rows, k, library)


@pytest.mark.parametrize("name", HOPPER)
def test_products_of_experts_are_divided_as_measured(name: str) -> None:
    with assumed(known_card(name).card):
        for form, tokens, top_k, experts, gated, expected in PINNED["experts"]:
            pairs = policy.expert_unit_pairs(tokens, top_k, experts, DTYPES[form])
            units = max_units(tokens, top_k, experts, pairs)
            tile = policy.expert_tile(pairs, units, GPU, gated=gated, dtype=DTYPES[form])
            assert list(tile) == expected, (form, tokens, top_k, experts, gated)


@pytest.mark.parametrize("name", HOPPER)
def test_attention_is_divided_as_measured(name: str) -> None:
    card = known_card(name).card
    with assumed(card):
        for heads, kv_heads, dim, fp8, rows, max_q, max_kv, window, work, launch in PINNED["attention"]:
            shape = policy.attention_shape(
                num_rows=rows, max_q=max_q, max_kv=max_kv, num_heads=heads, kv_heads=kv_heads, head_dim=dim, page_size=16,
                dtype=BF16, fp8=fp8, device=GPU, window=window, sink=0,
            )
            found = [shape.tile, shape.block, shape.programs, shape.group_tile, shape.group_block, shape.group_programs]
            assert found == work, (heads, kv_heads, dim, fp8, rows, max_q)
            row, group = (config_of(dim, tile, BF16, card, fp8=fp8) for tile in (shape.tile, shape.group_tile))
            assert [row.num_warps, row.num_stages, group.num_warps, group.num_stages] == launch


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_tiles_of_every_card_fit_and_load_as_it_can(card: Card) -> None:
    with assumed(card):
        for form, tokens, top_k, experts, gated, _ in PINNED["experts"]:
            dtype = DTYPES[form]
            pairs = policy.expert_unit_pairs(tokens, top_k, experts, dtype)
            tile = policy.expert_tile(pairs, 1000, GPU, gated=gated, dtype=dtype)
            assert tile.stages >= 2
            assert fits(tile, card, gated=gated, dtype=dtype), tile
            assert tile.tma == card.has_tma
        for tokens, rows, k, *_ in PINNED["fp8"]:
            own = policy.fp8_tile(tokens, rows, k, GPU, library=False)
            assert own is not None
            assert own.stages >= 2
            assert own.tma == card.has_tma


def test_less_shared_memory_means_fewer_programs_of_attention_at_once() -> None:
    large, small = (config_of(128, 16, BF16, known_card(name).card) for name in ("H200", "RTX-4090"))
    assert (large.per_sm, small.per_sm) == (3, 1)
    assert small.num_stages == large.num_stages


def test_a_card_in_place_of_all_devices_ends_with_the_block() -> None:
    before = card_of(torch.device("cpu"))
    with assumed(known_card("L40S").card):
        assert card_of(GPU).num_sms == 142
        assert not policy.has_same_bits_in_all_tiles(GPU)
    assert card_of(torch.device("cpu")) == before


@pytest.mark.parametrize(
    ("name", "fp8", "descriptors", "same_bits"),
    [
        ("A100-80GB", False, False, False), ("RTX-3090", False, False, False), ("L40S", True, False, False),
        ("H100-80GB", True, True, True), ("B200", True, True, False), ("RTX-5090", True, True, False),
    ],
)
def test_what_a_card_can_do_follows_from_its_compute_capability(
    name: str, fp8: bool, descriptors: bool, same_bits: bool
) -> None:
    with assumed(known_card(name).card):
        assert policy.has_fast_experts(GPU, BF16)
        assert policy.has_fast_fp8(GPU, BF16) == fp8
        assert card_of(GPU).has_tma == card_of(GPU).overlaps_launches == descriptors
        assert policy.has_same_bits_in_all_tiles(GPU) == same_bits


@pytest.mark.parametrize("wide", [False, True])
def test_passes_of_powers_of_two_take_every_kernel_of_routers(wide: bool) -> None:
    for experts in (*range(1, 130), 256, 257, 512, 513, 1024):  # with one more row, the gate of a shared expert
        tiles = {router_tile(1 << power, experts, wide=wide) for power in range(15)}
        assert {router_tile(tokens, experts, wide=wide) for tokens in range(1, 1 << 14, 16)} <= tiles, experts


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.parametrize(("top_k", "experts"), [(4, 32), (4, 128), (8, 128), (8, 256), (2, 8), (4, 24)])
def test_passes_of_powers_of_two_and_of_these_sizes_take_every_kernel_of_experts(
    card: Card, form: str, top_k: int, experts: int
) -> None:
    """A kernel that no rehearsed pass takes is compiled in the middle of a job."""
    dtype, most = DTYPES[form], 4096

    def kernels(tokens: int) -> tuple[object, ...]:
        pairs = policy.expert_unit_pairs(tokens, top_k, experts, dtype)
        units = max_units(tokens, top_k, experts, pairs)
        tiles = [policy.expert_tile(pairs, units, GPU, gated=gated, dtype=dtype) for gated in (True, False)]
        gathers = [policy.gathers_rows(pairs, dtype, gated=gated) for gated in (True, False)]
        return pairs, *tiles, policy.largest_units_first(pairs, dtype), *gathers

    with assumed(card):
        sizes = {1 << power for power in range(13)} | set(policy.expert_pass_sizes(top_k, experts, dtype, most))
        assert {kernels(tokens) for tokens in range(1, most + 1)} == {kernels(tokens) for tokens in sizes}
