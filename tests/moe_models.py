"""Tiny float64 models with experts, and what holds for each: drafts change no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.engine.engine import Engine
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from batchspec.records import Completion, SamplingParams
from tests.engines import DEVICE, packed, request

_SHAPE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 31, "max_position_embeddings": 256, "num_local_experts": 5,
    "num_experts_per_tok": 2, "rope_theta": 100.0,
}  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "moe_intermediate_size": 10},
    "mixtral": {"sliding_window": 9},
    "minimax_m2": {"rotary_dim": 2},
    "gpt_oss": {"sliding_window": 7, "rope_theta": 1e4, "hidden_size": 20},
}


def tiny_moe(family: str, **changes: Any) -> Target:
    """Two layers of noise, five experts, two of a token."""
    spec = tiny_spec(family, **changes)
    return Target(spec, Noise(spec, dtype=torch.float64, device=DEVICE), DEVICE)


def tiny_spec(family: str, **changes: Any) -> ModelSpec:
    """The shape of `tiny_moe`."""
    return read_spec(tiny_config(family, **changes), "config.json")


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of `tiny_moe`."""
    return {**_SHAPE, "model_type": family, **_CHANGES[family], **changes}


class Noise(DummyWeights):
    """With biases and sinks that count."""

    def tensor(self, name: str) -> Tensor:
        found = super().tensor(name)
        return found.mul_(50) if name.endswith(("bias", "sinks")) else found


def assert_drafts_change_no_token(target: Target, temperature: float) -> None:
    """No drafter, a lookup and a head of noise give the same tokens."""
    head_spec = replace(dummy_spec(target.spec, draft_vocab_size=19), aux_layer_ids=(0, 1, 2))
    head = dummy_head(head_spec, dtype=torch.float64, device=DEVICE)
    drafters: list[Drafter] = [
        NoDrafter(), LookupDrafter(4, min_ngram=1, max_ngram=2), ChainDrafter(head, target, 3, slots=3),
    ]  # fmt: skip
    found = []
    for drafter in drafters:
        engine = Engine(target, drafter, packed(3, draft_len=4), device=DEVICE)
        asked = [request(i, [i, 2, 3, i, 2], cap=24, sampling=SamplingParams(temperature=temperature)) for i in range(5)]
        found.append({done.request_id: ids_of(done) for done in engine.run(iter(asked))})
    assert found[0] == found[1] == found[2]
    assert all(len(tokens) == 24 for tokens in found[0].values())


def ids_of(done: Completion) -> list[int]:
    assert done.token_ids is not None
    return [int(token) for token in done.token_ids]
