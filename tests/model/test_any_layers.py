"""Models of any layers: none need attend, keep pages or have an MLP."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from batchspec.cache.groups import KVGroups
from batchspec.draft.base import Drafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import default_aux_layers, dummy_spec
from batchspec.errors import ConfigError
from batchspec.model.layers.gated_delta.block import GatedDeltaSpec
from batchspec.model.layers.kind import Use
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.lora_shape import LoraShape
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.packing.kv_memory import KVMemory
from batchspec.records import SamplingParams
from tests.helpers.engines import DEVICE, VOCAB, decode, make_engine, packed, plain_tokens, request, tiny_spec
from tests.helpers.recurrent import LoudNoise, recurrent_spec


def pageless_spec() -> ModelSpec:
    """The recurrent layers of `recurrent_spec` alone: nothing attends, and nothing is kept in pages."""
    spec = recurrent_spec()
    return replace(spec, layers=tuple(layer for layer in spec.layers if isinstance(layer.mixer, GatedDeltaSpec)))


@cache
def pageless_target() -> Target:
    spec = pageless_spec()
    return Target(spec, LoudNoise(spec, dtype=torch.float64, device=DEVICE), DEVICE)


@pytest.mark.parametrize("drafter", [NoDrafter(), LookupDrafter(3, min_ngram=1, max_ngram=3)], ids=["none", "lookup"])
def test_a_model_that_keeps_no_pages_decodes_each_row_as_by_itself(drafter: Drafter) -> None:
    """More rows than slots; the last ones begin as the first one does, with two chunks."""
    long, hot = [(3 * i * i + i) % VOCAB for i in range(130)], SamplingParams(temperature=1.0)
    rows = [request(i, [i, 4, 9, 4, 9][: i + 1], cap=8) for i in range(3)]
    rows += [request(3 + i, [*long, i], cap=5, sampling=hot) for i in range(3)]
    target, batch = pageless_target(), packed(2, page_size=4, max_len=160, num_verified=drafter.draft_len)
    engine = make_engine(target, drafter, batch, device=DEVICE, decode=decode)
    done = {one.request_id: one.token_ids for one in engine.run(iter(rows))}
    assert {name: None if ids is None else ids.tolist() for name, ids in done.items()} == {
        one.request_id: plain_tokens(target, one) for one in rows
    }
    assert engine.totals.cached_tokens > 0


def test_rows_without_pages_have_page_tables_that_take_no_memory() -> None:
    groups = KVGroups.of([], [7], 100)
    assert (groups.windows, groups.target_layers, groups.draft_group) == ((None,), (), 0)
    memory = KVMemory.of(
        pageless_spec(), torch.bfloat16, (), page_size=4, max_len=100, max_tokens=100, lookahead=0, pass_tokens=64,
        num_verified=0,
    )
    assert (memory.page_bytes, memory.num_pages(0, 8)) == ((0,), (1 + 8 * 25,))
    assert memory.rows(memory.prefix_bytes + 5 * memory.slot_bytes, 100) == 5


def test_a_new_draft_head_is_like_the_first_attention_and_the_first_mlp() -> None:
    spec = recurrent_spec()
    apart = tuple(part for layer in spec.layers for part in (LayerSpec(layer.mixer, ()), LayerSpec(None, layer.mlps)))
    assert dummy_spec(replace(spec, layers=apart)) == replace(dummy_spec(spec), aux_layer_ids=default_aux_layers(6))
    with pytest.raises(ConfigError, match=r"draft heads: llama has no layer of attention with K/V heads, .*; use a head that"):
        dummy_spec(pageless_spec())


def test_k_and_v_are_stored_in_e4m3_only_if_layers_keep_nothing_else_in_pages() -> None:
    assert recurrent_spec().with_fp8_kv().with_fp8_kv().fp8_kv
    with pytest.raises(ConfigError, match="FP8 K/V: layers of llama keep no K and V in pages; use cache"):
        pageless_spec().with_fp8_kv()


def test_what_one_kind_of_layer_refuses_the_model_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: dict[Use, str] = {"gpu": "has no kernels", "adapters": "has no products"}
    monkeypatch.setattr(GatedDeltaSpec, "refuses", lambda spec, use: refused.get(use))
    spec, adapters = recurrent_spec(), LoraShape(1, ())
    assert spec.on(torch.device("cpu"), torch.float32) == spec.with_lora(None) == spec
    with pytest.raises(ConfigError, match="llama has no kernels; set device"):
        spec.on(torch.device("cuda"), torch.float32)
    with pytest.raises(ConfigError, match="LoRA adapters that are not merged: llama has no products; use"):
        spec.with_lora(adapters)
    assert tiny_spec().with_lora(adapters).lora == adapters
