"""A draft head that ranks compute together drafts what the whole head does, and a job's config says when it is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.pages import KVCache
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import AblationConfig, ModelConfig, RunConfig
from batchspec.distributed.collectives import Collectives
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.head_tensors import expected_shapes
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.shapes import TreeShape
from batchspec.draft.shard import cut, part_of_head
from batchspec.draft.spec import open_drafter
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.engine.rounds.records import RoundOptions
from batchspec.errors import ConfigError
from batchspec.model.families.shapes import shape_spec
from batchspec.model.layers.base import Shard
from batchspec.model.target import Target
from batchspec.records import SamplingParams
from tests.distributed.test_tensor_parallel import Loud
from tests.helpers.engines import DEVICE, decode, make_engine, packed, request, tiny_spec
from tests.helpers.ranks import on_ranks, part_of, whole_of

SAMPLING = {
    "greedy": SamplingParams(),
    "drawn": SamplingParams(temperature=0.9, top_k=12, top_p=0.9, repetition_penalty=1.3),
    "n-grams": SamplingParams(no_repeat_ngram=(1, 5, (3,))),
}
CHANGES: dict[str, dict[str, Any]] = {
    "usual": {},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "fc_bias": True},
    "two layers": {"num_layers": 2, "windows": (None, 6), "qk_norm": True, "norm_before_residual": True},
    "the target's lm_head": {"own_head": False, "mapped": False},
}


def whole_head(target: Target, changes: dict[str, Any], *, parallel: bool = False) -> Head:
    spec = target.spec.whole or target.spec
    usual = dummy_spec(spec, draft_vocab_size=spec.vocab_size if "own_head" in changes else 19, parallel=parallel)
    head = dummy_head(replace(usual, aux_layer_ids=(0, 1, 2), **changes), dtype=torch.float64, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in head.tensors.items():  # loud, so that a wrong part changes drafts
        if "norm" not in name:
            tensor.normal_(0.0, 0.3, generator=generator)
    return head


def head_of(target: Target, changes: dict[str, Any], *, sharded: bool, parallel: bool = False) -> Head:
    head = whole_head(target, changes, parallel=parallel)
    part = part_of_head(head.spec, target.spec.shard, sharded)
    return cut(head, part) if part.whole is not None else head


def drafter(name: str, target: Target, changes: dict[str, Any], *, sharded: bool) -> Drafter:
    head = head_of(target, changes, sharded=sharded, parallel=name == "parallel")
    if name == "tree":
        return TreeDrafter(head, target, TreeShape(topk=2, depth=3, nodes=7), slots=3)
    if name == "parallel":
        return ParallelDrafter(head, target, 4, slots=3)
    return ChainDrafter(head, target, 3, slots=3)


def drafted(target: Target, name: str, changes: dict[str, Any], kind: str, *, sharded: bool = False) -> list[list[int]]:
    """What five rows write, and what was drafted for them: the tokens of each row, then the drafts of each round."""
    made, rounds = drafter(name, target, changes, sharded=sharded), []
    propose = made.propose

    def recorded(rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> Tensor | None:
        found = propose(rows, draft_ids, draft_len, cache)
        rounds.append(draft_ids[rows.live.bool()].flatten().tolist())
        return found

    made.propose = recorded  # type: ignore[method-assign]
    options = RoundOptions()
    engine = make_engine(target, made, packed(3, num_verified=7), device=DEVICE, options=options, decode=decode)
    asked = [request(i, [i, 2, 3, i, 2], cap=16, sampling=SAMPLING[kind], stop_ids=(7,)) for i in range(5)]
    done = sorted(engine.run(iter(asked)), key=lambda one: one.request_id)
    assert all(one.token_ids is not None for one in done)
    return [one.token_ids.tolist() for one in done if one.token_ids is not None] + rounds


@pytest.mark.second
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("name", ["chain", "parallel", "tree"])
def test_a_cut_head_drafts_what_the_whole_one_does(name: str, kind: str, changes: dict[str, Any]) -> None:
    spec = tiny_spec(5)
    expected = drafted(whole_of(spec, Loud), name, changes, kind)
    assert len({token for drafts in expected[5:] for token in drafts}) > 4, "the drafts hardly vary"

    def on_rank(ranks: Collectives) -> list[list[int]]:
        return drafted(part_of(spec, ranks, Loud), name, changes, kind, sharded=True)

    assert all(found == expected for found in on_ranks(2, on_rank))


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parts_of_a_head_have_their_shapes_and_are_all_of_it(ranks: int, changes: dict[str, Any]) -> None:
    usual = dummy_spec(shape_spec("llama1b"), draft_vocab_size=shape_spec("llama1b").vocab_size if "own_head" in changes else 30)
    spec = replace(
        usual, hidden_size=32, target_hidden_size=32, intermediate_size=24, num_heads=8, num_kv_heads=4, head_dim=4, **changes
    )
    head = dummy_head(spec, dtype=torch.float32, device=DEVICE)
    parts = [cut(head, part_of_head(spec, Shard(rank, ranks), True)) for rank in range(ranks)]
    for part in parts:
        tables = {"d2t": (30,)} if spec.mapped else {}
        assert {name: tuple(tensor.shape) for name, tensor in part.tensors.items()} | tables == expected_shapes(part.spec)
    prefix = "layers.0.self_attn"
    joined = torch.cat([part.tensors[f"{prefix}.q_proj.weight"] for part in parts])
    assert torch.equal(joined, head.tensors[f"{prefix}.q_proj.weight"])
    joined = torch.cat([part.tensors[f"{prefix}.o_proj.weight"] for part in parts], 1)
    assert torch.equal(joined, head.tensors[f"{prefix}.o_proj.weight"])
    if spec.o_bias:
        added = torch.stack([part.tensors[f"{prefix}.o_proj.bias"] for part in parts]).sum(0)
        assert torch.equal(added, head.tensors[f"{prefix}.o_proj.bias"])
    if spec.own_head:
        assert torch.equal(torch.cat([part.tensors["lm_head.weight"] for part in parts]), head.tensors["lm_head.weight"])


def config_with(*, sharded: bool | None = None) -> RunConfig:
    draft = DraftConfig(name="eagle3", num_speculative_tokens=3)
    return RunConfig(model=ModelConfig(load_format="dummy"), draft=draft, ablation=AblationConfig(sharded_draft=sharded))


def test_a_job_cuts_a_large_head_and_keeps_a_small_one_whole() -> None:
    def share(shape: str, config: RunConfig, ranks: int = 2) -> float:
        whole = open_drafter(config, shape_spec(shape))
        part = whole.of_rank(Shard(0, ranks))
        sizes = [spec.weight_bytes(dtype=torch.bfloat16, device=DEVICE) for spec in (part, whole)]
        pages = [spec.layer_states(torch.bfloat16, 16)[0].page_bytes for spec in (part, whole)]
        assert (pages[0] < pages[1]) == (sizes[0] < sizes[1])
        return sizes[0] / sizes[1]

    assert share("llama70b", config_with()) == pytest.approx(0.57, abs=0.03)  # fc is whole
    assert share("llama1b", config_with()) == 1  # its exchanges would take longer than the half that is not read
    assert share("llama1b", config_with(), ranks=4) < 1
    assert share("smol135m", config_with()) == 1
    assert share("llama70b", config_with(sharded=False)) == 1
    assert share("llama1b", config_with(sharded=True)) < 1
    assert share("llama70b", config_with(), ranks=1) == 1


def test_a_head_that_is_to_be_cut_and_cannot_be_is_refused() -> None:
    spec = open_drafter(config_with(sharded=True), shape_spec("smol135m"))
    with pytest.raises(ConfigError, match=r"^ablation.sharded_draft=true: of the draft head, num_key_value_heads 3 and 2 ranks"):
        spec.of_rank(Shard(0, 2))
    assert open_drafter(config_with(), shape_spec("smol135m")).of_rank(Shard(0, 2)).checkpoint == spec.checkpoint
