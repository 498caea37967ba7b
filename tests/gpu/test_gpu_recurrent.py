"""Targets whose layers keep row tensors on a GPU, in graphs, against rows alone on the CPU; and the bits of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from batchspec.draft.base import Drafter
from batchspec.draft.frequent_tokens import FrequentTokens
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.mtp import MtpDrafter
from batchspec.draft.mtp_head import MtpShape, dummy_mtp
from batchspec.draft.none import NoDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec
from batchspec.draft.window import WindowDrafter
from batchspec.kernels.gated_delta.delta_steps import delta_steps
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState
from batchspec.kernels.mamba2.layout import SsmState, SsmWeights
from batchspec.kernels.mamba2.scan_steps import scan_steps
from batchspec.kernels.short_conv.short_conv import ConvRows
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.gated_delta.block import GatedDeltaSpec
from batchspec.model.layers.latent.attend import HeadSizes
from batchspec.model.layers.latent.block import LatentSpec
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mamba2.block import Mamba2Spec
from batchspec.model.layers.parallel.block import ParallelSpec
from batchspec.model.layers.short_conv.block import ShortConvSpec
from batchspec.model.target import Target
from batchspec.records import Request
from tests.gpu.test_gpu_engine import VOCAB, _Noise, alone, eagle, lookup, requests, run, shape, tokens, windowed_target
from tests.helpers.engines import make_engine, request
from tests.helpers.recurrent import mtp_of

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@cache
def recurrent_target(kind: str) -> Target:
    """Three layers, the last one recurrent with the columns of Qwen3-Next."""
    plain = windowed_target(kind, (None,)).spec
    attends = plain.layers[0]
    first = GatedDeltaSpec(
        hidden_size=plain.hidden_size, eps=plain.rms_eps, num_key_heads=2, num_value_heads=4, key_dim=32, value_dim=16,
        conv_width=4,
    )
    last = replace(first, num_value_heads=2, value_dim=32, interleaved=True)
    spec = replace(plain, layers=(LayerSpec(first, attends.mlps), attends, LayerSpec(last, attends.mlps)))
    device = torch.device(kind)
    return Target(spec, _Noise(spec, device, torch.float32), device)


@cache
def conv_target(kind: str) -> Target:
    """Three layers, the first and the last one short convolutions."""
    plain = windowed_target(kind, (None,)).spec
    attends, size = plain.layers[0], plain.hidden_size
    first = ShortConvSpec(hidden_size=size, inner_size=size, eps=plain.rms_eps, width=3)
    last = replace(first, width=4, bias=True)
    spec = replace(plain, layers=(LayerSpec(first, attends.mlps), attends, LayerSpec(last, attends.mlps)))
    device = torch.device(kind)
    return Target(spec, _Noise(spec, device, torch.float32), device)


@cache
def mamba_target(kind: str) -> Target:
    """Three layers, the first and the last one Mamba2 layers; the first is a layer of one block."""
    plain = windowed_target(kind, (None,)).spec
    attends = plain.layers[0]
    first = Mamba2Spec(
        hidden_size=plain.hidden_size, eps=plain.rms_eps, num_heads=4, head_dim=32, num_groups=2, state_size=16, conv_width=4,
        norm="input_layernorm",
    )
    last = replace(first, num_heads=6, head_dim=16, num_groups=1, state_size=32, conv_bias=False, bias=True)
    spec = replace(plain, layers=(LayerSpec(first, ()), attends, LayerSpec(last, attends.mlps)))
    device = torch.device(kind)
    return Target(spec, _Noise(spec, device, torch.float32), device)


@cache
def parallel_target(kind: str) -> Target:
    """The same, with attention beside each Mamba2 layer, with factors and without a norm in the first."""
    plain = mamba_target(kind).spec
    attends, layers = replace(plain.layers[1].attention, norm=None, out_scale=0.6), list(plain.layers)
    for i in (0, 2):
        mamba = layers[i].mixer
        assert isinstance(mamba, Mamba2Spec)
        factors = (1.5, 0.75, 1.25, 2.0, 0.5) if i == 0 else (1.0,) * 5
        mamba = replace(mamba, norm=None, out_norm=i > 0, scales=factors)
        both = ParallelSpec(hidden_size=plain.hidden_size, eps=plain.rms_eps, attention=attends, mamba=mamba)
        layers[i] = LayerSpec(both, layers[i].mlps)
    spec, device = replace(plain, layers=tuple(layers)), torch.device(kind)
    return Target(spec, _Noise(spec, device, torch.float32), device)


@cache
def latent_target(kind: str) -> Target:
    """Three layers, the first two with latent attention."""
    plain = windowed_target(kind, (None,)).spec
    attends = plain.layers[0]
    first = LatentSpec(
        hidden_size=plain.hidden_size, eps=plain.rms_eps, inner_eps=1e-6, num_heads=5, query_rank=24, scale=0.2,
        sizes=HeadSizes(key_dim=16, rope_dim=8, value_dim=12, latent_dim=32),
        rope=RopeSpec(type="default", theta=100.0, interleaved=True),
    )
    last = replace(first, query_rank=None, rope=RopeSpec(type="default", theta=50.0), bias=True)
    spec = replace(plain, layers=(LayerSpec(first, attends.mlps), LayerSpec(last, attends.mlps), attends))
    device = torch.device(kind)
    return Target(spec, _Noise(spec, device, torch.float32), device)


def trusted() -> list[Request]:
    """Admission expects one token of each, so that it takes in too many where pages are scarce."""
    return [replace(one, predicted_tokens=1) for one in requests(40, longest=150)]


def pard(draft_len: int, slots: int) -> Drafter:
    model = windowed_target("cuda", (9, None))
    drafter = PardModel(PardSpec(model=model.spec, mask_token_id=VOCAB - 1), model)
    return PardDrafter(drafter, recurrent_target("cuda").spec, draft_len, slots=slots, parallel=True)


def mtp(draft_len: int, slots: int, vocabulary: FrequentTokens | None = None) -> Drafter:
    target = recurrent_target("cuda")
    weights = dummy_mtp(MtpShape.of(target.spec, mtp_of(target.spec)), dtype=torch.float32, device=GPU)
    return MtpDrafter(replace(weights, vocabulary=vocabulary), target, draft_len, slots=slots)


@pytest.mark.parametrize("pages", [400, 20], ids=["enough pages", "preempted"])
@pytest.mark.parametrize("name", ["none", "lookup", "lookup with a corpus", "eagle3", "mtp", "mtp, few tokens", "pard"])
def test_graphs_give_the_tokens_of_one_row_at_a_time_on_the_cpu(name: str, pages: int, tmp_path: Path) -> None:
    asked, slots = trusted(), 8
    drafters: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "lookup": partial(LookupDrafter, 4, min_ngram=1, max_ngram=3),
        "lookup with a corpus": partial(lookup, 4),
        "eagle3": partial(eagle, tmp_path, "cuda", 3, slots, own=recurrent_target("cuda"), num_layers=3),
        "mtp": partial(mtp, 3, slots),
        "mtp, few tokens": partial(mtp, 3, slots, FrequentTokens(16, [range(VOCAB)])),
        "pard": partial(pard, 4, slots),
    }
    engine, done = run(recurrent_target("cuda"), drafters[name](), shape(slots, num_pages=pages), asked)
    assert engine.executor.graphs.num_captured > 0
    assert (engine.totals.preempted > 0) == (pages < 400)
    assert tokens(done) == alone(asked, recurrent_target("cpu"))


@pytest.mark.parametrize("pages", [400, 20], ids=["enough pages", "preempted"])
@pytest.mark.parametrize(
    ("name", "target_of"),
    [*((name, conv_target) for name in ("none", "lookup", "eagle3", "window")),
     *((name, target) for target in (mamba_target, parallel_target) for name in ("none", "lookup", "eagle3")),
     *((name, latent_target) for name in ("none", "lookup", "eagle3", "window"))],
)
def test_graphs_with_other_kinds_of_layers_give_the_tokens_of_one_row_at_a_time_on_the_cpu(
    name: str, target_of: Callable[[str], Target], pages: int, tmp_path: Path
) -> None:
    asked, slots, target = trusted(), 8, target_of("cuda")
    drafters: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "lookup": partial(LookupDrafter, 4, min_ngram=1, max_ngram=3),
        "eagle3": partial(eagle, tmp_path, "cuda", 3, slots, own=target, num_layers=3),
        "window": partial(WindowDrafter, target, 4, slots=slots, window=9, sink=1),
    }
    engine, done = run(target, drafters[name](), shape(slots, num_pages=pages), asked)
    assert engine.executor.graphs.num_captured > 0
    assert (engine.totals.preempted > 0) == (pages < 400)
    assert tokens(done) == alone(asked, target_of("cpu"))


@pytest.mark.parametrize(
    "target", [recurrent_target, conv_target, mamba_target, parallel_target, latent_target],
    ids=["gated delta", "short convolutions", "mamba2", "parallel", "latent"],
)
def test_rows_with_a_common_prefix_take_over_its_state(target: Callable[[str], Target]) -> None:
    rng = np.random.default_rng(5)
    beginnings = [rng.integers(0, VOCAB, 132).tolist() for _ in range(3)]
    asked = [
        request(i, beginnings[i % 3] + rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(), cap=int(rng.integers(1, 50)))
        for i in range(40)
    ]
    drafter = LookupDrafter(3, min_ngram=1, max_ngram=3)
    engine = make_engine(target("cuda"), drafter, shape(8), device=GPU)
    assert tokens(list(engine.run(iter(asked)))) == alone(asked, target("cpu"))
    assert engine.totals.cached_tokens > 20 * 128


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_k_or_on_what_was_accepted(state_dtype: torch.dtype) -> None:
    """Real sizes: rounds of other K and other accepted tokens, over the same 90 tokens of 5 rows, against one pass."""
    rows, count, key_heads, value_heads, dim, ring = 5, 90, 4, 8, 128, 16
    generator = torch.Generator(GPU).manual_seed(1)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, device=GPU, generator=generator).bfloat16()

    q, k, v = noise(rows, count, key_heads, dim), noise(rows, count, key_heads, dim), noise(rows, count, value_heads, dim)
    decay = -torch.rand(rows, count, value_heads, device=GPU, generator=generator)
    gates = torch.stack((decay, torch.rand(rows, count, value_heads, device=GPU, generator=generator)), -1).contiguous()

    def state() -> DeltaState:
        return DeltaState(
            state=torch.full((rows, value_heads, dim, dim), torch.nan, device=GPU, dtype=state_dtype),
            conv_inputs=torch.zeros(rows, ring, (2 * key_heads + value_heads) * dim, device=GPU, dtype=torch.bfloat16),
            keys=torch.zeros(rows, ring, key_heads, dim, device=GPU, dtype=torch.bfloat16),
            values=torch.zeros(rows, ring, value_heads, dim, device=GPU, dtype=torch.bfloat16),
            gates=torch.zeros(rows, ring, value_heads, 2, device=GPU), folded=torch.zeros(rows, dtype=torch.int32, device=GPU),
        )

    def launch(own: DeltaState, begin: int, end: int, *, commits: bool) -> torch.Tensor:
        size, places = end - begin, torch.arange(begin, end, device=GPU)
        taken = [part[:, begin:end].flatten(0, 1).contiguous() for part in (q, k, v, gates)]
        for ring_of, part in ((own.keys, k), (own.values, v), (own.gates, gates)):
            if not commits:
                ring_of[:, places % ring] = part[:, begin:end]
        batch = DeltaBatch(
            cu_seqlens=torch.arange(0, rows * size + 1, size, dtype=torch.int32, device=GPU), positions=places.repeat(rows),
            row_ids=torch.arange(rows, dtype=torch.int32, device=GPU).repeat_interleave(size),
            slots=torch.arange(rows, dtype=torch.int32, device=GPU), max_tokens=size,
        )
        out = torch.empty(rows * size, value_heads, dim, device=GPU, dtype=torch.bfloat16)
        delta_steps(DeltaInputs(q=taken[0], k=taken[1], v=taken[2], gates=taken[3]), own, batch, out, commits=commits)
        own.folded.fill_(end if commits else begin)
        return out.view(rows, size, value_heads, dim)

    whole = launch(state(), 0, count, commits=True)
    for draft_len in (0, 1, 3, 6):
        own, begin, rng = state(), 0, np.random.default_rng(draft_len)
        while begin + draft_len + 1 <= count:
            found = launch(own, begin, begin + draft_len + 1, commits=False)
            assert torch.equal(found, whole[:, begin : begin + draft_len + 1]), (draft_len, begin)
            begin += int(rng.integers(1, draft_len + 2))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_mamba2_depends_on_k_or_on_what_was_accepted(state_dtype: torch.dtype) -> None:
    """Real sizes, as above."""
    rows, count, heads, dim, groups, size, ring = 5, 90, 16, 64, 2, 128, 16
    generator, kept = torch.Generator(GPU).manual_seed(1), heads * dim + groups * size

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=GPU, generator=generator)

    xbc, dt = noise(rows, count, kept + groups * size).bfloat16(), (noise(rows, count, heads) - 1).bfloat16()
    weights = SsmWeights(a_log=noise(heads) / 2, dt_bias=noise(heads), d=noise(heads))

    def state() -> SsmState:
        return SsmState(
            state=torch.full((rows, heads, dim, size), torch.nan, device=GPU, dtype=state_dtype),
            inputs=torch.zeros(rows, ring, kept, device=GPU, dtype=torch.bfloat16),
            steps=torch.zeros(rows, ring, heads, device=GPU, dtype=torch.bfloat16),
            folded=torch.zeros(rows, dtype=torch.int32, device=GPU),
        )

    def launch(own: SsmState, begin: int, end: int, *, commits: bool) -> torch.Tensor:
        tokens_each, ints = end - begin, torch.arange(rows, dtype=torch.int32, device=GPU)
        batch = ConvRows(
            cu_seqlens=torch.arange(0, rows * tokens_each + 1, tokens_each, dtype=torch.int32, device=GPU),
            positions=torch.arange(begin, end, device=GPU).repeat(rows), slots=ints, live=torch.ones_like(ints),
            max_tokens=tokens_each,
        )
        out = torch.empty(rows * tokens_each, heads * dim, device=GPU, dtype=torch.bfloat16)
        own_xbc, own_dt = (part[:, begin:end].flatten(0, 1).contiguous() for part in (xbc, dt))
        scan_steps(own_xbc, own_dt, weights, own, batch, out, commits=commits)
        own.folded.fill_(end if commits else begin)
        return out.view(rows, tokens_each, heads * dim)

    whole = launch(state(), 0, count, commits=True)
    for draft_len in (0, 1, 3, 6):
        own, begin, rng = state(), 0, np.random.default_rng(draft_len)
        while begin + draft_len + 1 <= count:
            found = launch(own, begin, begin + draft_len + 1, commits=False)
            assert torch.equal(found, whole[:, begin : begin + draft_len + 1]), (draft_len, begin)
            begin += int(rng.integers(1, draft_len + 2))
