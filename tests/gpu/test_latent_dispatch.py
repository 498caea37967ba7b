"""A model with latent attention as a GPU computes it: kernels interpreted, torch's operator for prefill; against plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, HostLayout
from batchspec.draft.base import Drafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.mtp_head import MtpShape, dummy_mtp
from batchspec.draft.none import NoDrafter
from batchspec.draft.window import WindowDrafter
from batchspec.model.layers.attention import flash
from batchspec.model.layers.attention.kv_layout import KVLayout
from batchspec.model.layers.latent import prefill
from batchspec.model.layers.latent.attend import HeadSizes, Matrices
from batchspec.model.layers.latent.block import LatentSpec
from batchspec.model.layers.latent.pages import LatentLayout
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.mtp import JoinSpec, MtpSpec
from batchspec.model.target import Target
from tests.helpers.drafting import Proposals
from tests.helpers.engines import make_engine, packed, request
from tests.helpers.latents import CPU, latent_spec
from tests.helpers.moe_models import ids_of
from tests.helpers.mtp_drafting import Recorded
from tests.helpers.recurrent import LoudNoise
from tests.helpers.stand_in_gpu import stand_in_gpu
from tests.model.test_attention import PAGE_SIZE, flash_by_hand, make_batch
from tests.model.test_target import Runner, prompts

pytestmark = [
    pytest.mark.second,
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu_recurrent.py runs on a GPU"),
]
F32 = torch.float32
SIZES = {
    "values as wide as keys": HeadSizes(key_dim=5, rope_dim=4, value_dim=9, latent_dim=7),
    "narrower values": HeadSizes(key_dim=12, rope_dim=6, value_dim=8, latent_dim=24),
}
VOCAB = 31


def target_of(sizes: HeadSizes, *, fp8: bool = False) -> Target:
    spec = latent_spec()
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, LatentSpec)
        layers.append(LayerSpec(replace(layer.mixer, sizes=sizes), layer.mlps))
    spec = replace(spec, layers=tuple(layers))
    spec = spec.with_fp8_kv() if fp8 else spec
    return Target(spec, LoudNoise(spec, dtype=F32, device=CPU), CPU)


@contextmanager
def prefill_kernels(keys: int = prefill.KEYS, expanded_bytes: int = prefill.EXPANDED_BYTES) -> Iterator[list[tuple[int, int]]]:
    """Those of bf16 are there for fp32 as well. Gives the number of keys and of heads of each launch."""
    launches = list[tuple[int, int]]()

    def attended(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        launches.append((k.shape[0], k.shape[1]))
        assert q.shape[1:] == k.shape[1:] == v.shape[1:]
        return flash_by_hand(q, k, v, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, "_flash_attention_forward", attended)
        patch.setattr(KVLayout, "has_prefill_kernels", True)
        patch.setattr(prefill, "KEYS", keys)
        patch.setattr(prefill, "EXPANDED_BYTES", expanded_bytes)
        yield launches


LENGTHS = [(66, 1), (2, 65), (0, 3)]
"""Tokens of each row in two passes, the second one over earlier latents."""


def logits(target: Target) -> list[Tensor]:
    runner, found = Runner.start(target, len(LENGTHS), max_len=192), list[Tensor]()
    for number in (0, 1):
        found += runner.feed(prompts([own[number] for own in LENGTHS], VOCAB), (1,))[0]
    return found


@pytest.mark.parametrize(("name", "fp8"), [*((name, False) for name in SIZES), ("narrower values", True)])
@pytest.mark.parametrize(
    ("keys", "expanded_bytes", "parts"),
    [
        pytest.param(1 << 15, 1 << 29, [(68, 4), (137, 4)], id="whole"),
        pytest.param(68, 1, [*[(68, 1)] * 4, *[(67, 1)] * 8, *[(3, 1)] * 4], id="by rows and heads"),
    ],
)
def test_a_prefill_is_that_of_plain_torch_whatever_its_parts(
    name: str, fp8: bool, keys: int, expanded_bytes: int, parts: list[tuple[int, int]]
) -> None:
    """Of rows longer than 64 tokens; a second pass expands earlier latents again."""
    expected = logits(target_of(SIZES[name], fp8=fp8))
    with stand_in_gpu(F32) as launches, prefill_kernels(keys, expanded_bytes) as attended:
        found = logits(target_of(SIZES[name], fp8=fp8))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
    assert sorted(attended) == sorted(3 * parts), "each of three layers"
    assert launches["write_latents_kernel"] == 6
    assert launches["verify_latents_kernel"] == 0


def test_a_part_has_as_many_rows_and_heads_as_fit() -> None:
    assert list(prefill.row_groups(HostLayout([1, 1, 1, 1], [30000, 2768, 1, 100000]))) == [range(2), range(2, 3), range(3, 4)]
    assert [prefill.heads_at_once(20, keys, 1408) for keys in (1, 16384, 32768, 10**5, 10**7)] == [20, 20, 10, 2, 1]
    sizes = HeadSizes(key_dim=192, rope_dim=64, value_dim=256, latent_dim=512)
    assert prefill.key_bytes(sizes, torch.bfloat16) == 1408
    assert prefill.key_bytes(replace(sizes, value_dim=128), torch.bfloat16) == 1408 - 256 + 512


@pytest.mark.parametrize("num_rows", [flash.RING // 2, flash.RING // 2 + 1])
def test_a_pass_of_more_parts_than_plans_may_be_in_flight_uses_torch_alone(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper of FlashInfer has one plan at a time, and each part is computed in all layers."""
    made = list[int]()

    def planned(batch: FlatBatch, kv: flash.KeysAndValues, *, num_heads: int, window: int | None) -> flash.VarlenPlan:
        made.append(num_heads)
        return flash.VarlenPlan(batch, kv, window=window)

    monkeypatch.setattr(prefill, "KEYS", 1)
    monkeypatch.setattr(prefill, "plan_flash", planned)
    batch = make_batch([(66, 70)] * num_rows, torch.Generator().manual_seed(0))
    batch.host = HostLayout([66] * num_rows, [70] * num_rows)
    layout = LatentLayout(dtype=F32, size=11, rope_dim=4, page_size=PAGE_SIZE)
    pages = layout.open(layout.allocate(1, 2, CPU)[0], None)
    prefill.LatentPrefillPlan(batch, pages, 4, SIZES["values as wide as keys"], window=None)
    assert made == ([4] * num_rows if num_rows <= flash.RING // 2 else [])


def decoded(target: Target, drafter: Drafter) -> dict[str, list[int]]:
    """More rows than slots: some wait, some rounds have dead rows, some are preempted."""
    batch = packed(2, num_verified=max(1, drafter.draft_len), prefill_tokens=90, page_size=8, num_pages=16, max_len=90)
    engine = make_engine(target, drafter, batch, device=CPU)
    asked = [request(i, [(7 * i + 3 * j) % 5 for j in range(4 + 33 * i)], cap=5 + i) for i in range(3)]
    return {one.request_id: ids_of(one) for one in engine.run(iter(asked))}


def drafter_of(name: str, target: Target) -> Drafter:
    match name:
        case "lookup":
            return LookupDrafter(3, min_ngram=1, max_ngram=3)
        case "window":
            return WindowDrafter(target, 3, slots=2, window=9, sink=2)
    return NoDrafter()


@pytest.mark.parametrize(("name", "fp8"), [("none", False), ("lookup", False), ("window", False), ("lookup", True)])
def test_rounds_emit_the_tokens_of_plain_torch(name: str, fp8: bool) -> None:
    plain = target_of(SIZES["narrower values"], fp8=fp8)
    expected = decoded(plain, NoDrafter())
    with stand_in_gpu(F32) as launches, prefill_kernels():
        target = target_of(SIZES["narrower values"], fp8=fp8)
        assert decoded(target, drafter_of(name, target)) == expected
    assert launches["verify_latents_kernel"] >= 9


def drafts_of(target: Target, *, fp8: bool) -> Proposals:
    """What an MTP layer of the model's kind drafts, by the tokens before it."""
    spec = target.spec
    layer = MtpSpec(join=JoinSpec(hidden_size=spec.hidden_size, eps=spec.rms_eps), layer=spec.layers[0], formats=spec.formats)
    mtp = dummy_mtp(MtpShape.of(spec, layer), dtype=F32, device=CPU)
    drafter = Recorded(mtp, target, 3, slots=2, fp8_kv=fp8)
    decoded(target, drafter)
    return sorted(drafter.seen)


@pytest.mark.parametrize("fp8", [False, True])
def test_an_mtp_layer_drafts_what_it_drafts_in_plain_torch(fp8: bool) -> None:
    """Also at the later steps of a chain, whose queries have later positions than the plan's."""
    expected = drafts_of(target_of(SIZES["narrower values"]), fp8=fp8)
    with stand_in_gpu(F32) as launches, prefill_kernels():
        found = drafts_of(target_of(SIZES["narrower values"]), fp8=fp8)
    assert found == expected
    assert len({draft for _, drafts in expected for draft in drafts}) > 5
    assert launches["verify_latents_kernel"] > 50


def test_a_fault_in_the_kernels_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are those of the next head."""
    of_heads = Matrices.of_heads

    def other(matrices: Matrices, heads: slice) -> Matrices:
        own = of_heads(matrices, heads)
        return Matrices(own.keys, own.values.roll(1, 0))

    expected = logits(target_of(SIZES["narrower values"]))
    monkeypatch.setattr(Matrices, "of_heads", other)
    with stand_in_gpu(F32), prefill_kernels():
        found = logits(target_of(SIZES["narrower values"]))
    assert 0.1 < float((torch.cat(found) - torch.cat(expected)).abs().max()) < math.inf
