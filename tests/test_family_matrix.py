"""Families with all that a job may combine: drafters, weight formats, adapters, constraints, two ranks. No token changes.

In float64, with FP8 activations quantised as the checkpoint says. Each family meets every value of each of these; every pair of a
drafter and a weight format meets in some family.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.batch.automata import AutomataCapacity
from batchspec.distributed.collectives import Collectives
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.model.target import Target
from batchspec.records import Request, SamplingParams
from tests.automata import EOS, VOCABULARY, automaton
from tests.engines import DEVICE, VOCAB, packed, plain_tokens, request
from tests.gemma4_models import LAYER_INPUTS
from tests.int4_layouts import of_compressed_tensors
from tests.models import needed
from tests.moe_models import Strong
from tests.mtp_drafting import run
from tests.ranks import part_of, start_ranks, whole_of
from tests.test_dense_families import OWN
from tests.test_fp8 import TOKEN, compressed
from tests.test_lora_lossless import NUM_ADAPTERS, RANK, StrongAdapters
from tests.test_tensor_parallel import Loud

pytestmark = pytest.mark.second

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 256, "rope_theta": 100.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    **{
        name: OWN[name]
        for name in ("olmo3", "exaone4", "seed_oss", "smollm3", "granite", "granitemoehybrid", "ministral3")
    },
    "glm4_moe": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 3, "topk_group": 2,
        "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_bias": True},
    "lfm2_moe": {
        "layer_types": ["full_attention", "conv"], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "num_dense_layers": 1, "routed_scaling_factor": 1.7,
    },
    "gemma4_text": {
        **LAYER_INPUTS, "global_head_dim": 32, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB,
        "sliding_window": 4,
    },
}
IGNORED = ["lm_head", "re:.*mlp.gate$"]
WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {}, "FP8": {"quantization_config": compressed("channel", TOKEN, ignore=IGNORED)},
    "INT4": {"quantization_config": of_compressed_tensors(32, ignore=IGNORED).config},
}
ROWS = ("plain", "adapters", "constrained")
SLOTS, K = 3, 3


def spec_of(family: str, weights: str) -> ModelSpec:
    keys = {**SIZES, **needed(family, 2), **FAMILIES[family], **WEIGHTS[weights]}
    keys |= {key: SIZES[key] for key in ("head_dim", "intermediate_size")}
    spec = read_spec({"model_type": family, **keys, "shared_intermediate_size": 64}, "config.json")
    return spec.with_fp8_activations() if weights == "FP8" else spec


@cache
def target_of(family: str, weights: str, adapters: bool = False) -> Target:
    spec = spec_of(family, weights)
    noise = Strong(spec, dtype=torch.float64, device=DEVICE)
    if not adapters:
        return Target(spec, noise, DEVICE)
    own = StrongAdapters.of(spec, NUM_ADAPTERS, RANK)
    return Target(spec.with_lora(own.shape), noise, DEVICE, lora=own.load(spec, dtype=torch.float64, device=DEVICE))


def requests_of(rows: str) -> list[Request]:
    """Longer than the windows and the lengths of pretraining; greedy, drawn, and with penalties."""
    samplings = (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, repetition_penalty=1.2))
    found = [request(i, [6, i, 2, 7, i, 2, 7, i, 9, 2], cap=12 + i, sampling=samplings[i % 3]) for i in range(5)]
    if rows == "adapters":
        return [replace(one, adapter=i % (NUM_ADAPTERS + 1)) for i, one in enumerate(found)]
    if rows == "constrained":
        made = [automaton(("[a-d]*", "(ab|c)*d", "(abc|dab){2,3}")[i % 3]) for i in range(5)]
        return [
            replace(one, stop_ids=(EOS,), automaton=own, automaton_state=own.answer)
            for one, own in zip(found, made, strict=True)
        ]
    return found


def drafter_of(kind: str, target: Target) -> Drafter:
    if kind == "eagle3":
        spec = dummy_spec(target.spec.complete, draft_vocab_size=19)
        return ChainDrafter(dummy_head(spec, dtype=torch.float64, device=DEVICE), target, K, slots=SLOTS)
    return NoDrafter() if kind == "none" else LookupDrafter(K, min_ngram=1, max_ngram=2)


def tokens(target: Target, requests: list[Request], drafter: Drafter, slots: int) -> dict[str, list[int]]:
    room = AutomataCapacity(num_tokens=VOCAB, table_words=1 << 17, masks_bytes=1 << 14)
    batch = packed(slots, num_verified=drafter.draft_len)
    return run(target, requests, batch, drafter, vocabulary=VOCABULARY, automata_capacity=room).tokens


@cache
def expected_of(family: str, weights: str, rows: str) -> dict[str, list[int]]:
    """Each row by itself without drafts; a plain row by the definition."""
    target = target_of(family, weights, rows == "adapters")
    if rows == "plain":
        return {one.request_id: plain_tokens(target, one) for one in requests_of(rows)}
    return tokens(target, requests_of(rows), NoDrafter(), 1)


DRAFTERS = ("none", "lookup", "eagle3")
CELLS = [
    (family, drafter, list(WEIGHTS)[(i + f) % 3], ROWS[(2 * i + f // 3 + 1) % 3])
    for f, family in enumerate(FAMILIES)
    for i, drafter in enumerate(DRAFTERS)
]


@pytest.mark.parametrize(("family", "drafter", "weights", "rows"), CELLS)
def test_tokens_are_those_of_each_row_alone(family: str, drafter: str, weights: str, rows: str) -> None:
    target = target_of(family, weights, rows == "adapters")
    expected = expected_of(family, weights, rows)
    assert len({token for row in expected.values() for token in row}) > 5, "too few different tokens"
    assert tokens(target, requests_of(rows), drafter_of(drafter, target), SLOTS) == expected


def test_every_value_meets_every_family_and_every_drafter_every_weight() -> None:
    for place, values in ((1, DRAFTERS), (2, tuple(WEIGHTS)), (3, ROWS)):
        assert {(cell[0], cell[place]) for cell in CELLS} == {(family, value) for family in FAMILIES for value in values}
    assert {cell[1:3] for cell in CELLS} == {(drafter, weights) for drafter in DRAFTERS for weights in WEIGHTS}


def test_rows_with_adapters_write_other_tokens() -> None:
    for family in FAMILIES:
        changed = tokens(target_of(family, "bf16", True), requests_of("adapters"), NoDrafter(), SLOTS)
        plain = expected_of(family, "bf16", "plain")
        assert changed["r0"] == plain["r0"]
        assert sum(changed[row] != plain[row] for row in plain) >= 2, family


OF_RANKS = {family: (("bf16", "INT4")[i % 2], DRAFTERS[1 + i // 2 % 2]) for i, family in enumerate(FAMILIES)}
"""Weight format and drafter of each family's rows on two ranks."""


def on_rank(ranks: Collectives, folder: Path) -> None:
    found = {}
    for family, (weights, drafter) in OF_RANKS.items():
        target = part_of(spec_of(family, weights), ranks, Loud)
        found[family] = tokens(target, requests_of("plain")[:3], drafter_of(drafter, target), SLOTS)
    torch.save(found, folder / str(ranks.rank))


def test_two_processes_over_gloo_write_what_one_does(tmp_path: Path) -> None:
    start_ranks(2, on_rank, tmp_path)
    for family, (weights, _) in OF_RANKS.items():
        alone = tokens(whole_of(spec_of(family, weights), Loud), requests_of("plain")[:3], NoDrafter(), 1)
        assert len({token for row in alone.values() for token in row}) > 5, "too few different tokens"
        for rank in range(2):
            assert torch.load(tmp_path / str(rank))[family] == alone, family
