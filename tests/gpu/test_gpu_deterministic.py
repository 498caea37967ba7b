"""decode.deterministic on a GPU: a row's bits are its own, from each product to K/V, logits and tokens.

`tests/model/test_deterministic.py` runs on a GPU too: engines with every drafter. Here are real sizes.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchspec.batch.flat_batch import FlatBatch, HostLayout
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.groups import KVGroups
from batchspec.cache.pages import KVCache
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.engine.slots import expected_pages
from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.ordered_attention import ordered_attention
from batchspec.kernels.attention.ordered_prefill import ordered_prefill
from batchspec.kernels.attention.settings import ordered_work_shape
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.benchmarks.products import BLOCKS, GATED_BLOCKS
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.gemm.lm_head import lm_head
from batchspec.kernels.gemm.ordered import ordered_kernel, ordered_linear, ordered_swiglu
from batchspec.kernels.gemm.ordered_tiles import PLAIN
from batchspec.kernels.gemm.split_k import MAX_TILES
from batchspec.kernels.gemm.tiles import HEAD, Tile
from batchspec.kernels.moe.route import Scoring, route
from batchspec.kernels.moe.route_few import is_few
from batchspec.kernels.norm_rope.norm import add_norm, rms_norm
from batchspec.kernels.sampling.argmax import argmax
from batchspec.model.fused import silu_and_mul
from batchspec.model.target import Target
from batchspec.records import SamplingParams
from batchspec.tuning.policy import ordered_segments, ordered_tile
from tests.helpers.engines import make_engine, packed, request, tiny_spec
from tests.helpers.moe_models import Strong
from tests.helpers.moe_models import tiny_spec as moe_spec
from tests.model.test_expert_kernels import FP8_BLOCKS, MXFP4

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COUNTS = (1, 7, 16, 64, 129, 300, 1024, 4096)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32)


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


@pytest.mark.parametrize(("n", "k"), [(576, 1536), (960, 576), (6144, 4096)])
@pytest.mark.parametrize("segments", [1, 2])
def test_no_tile_and_no_number_of_tokens_changes_the_bits_of_a_product(n: int, k: int, segments: int) -> None:
    if segments > 1 and k % 256:
        pytest.skip("its K has no such segments")
    x, w = noise(max(COUNTS), k), noise(n, k, scale=k**-0.5)
    wanted: Tensor | None = None
    for block in BLOCKS:
        for tma in (False, True):
            for split in {1, segments}:
                tile = Tile(*block, tma, split)
                for tokens in COUNTS:
                    if split > 1 and -(-tokens // block[0]) * -(-n // block[1]) > MAX_TILES:
                        continue
                    out = ordered_linear(x[:tokens], w, segments=segments, tile=tile, out=torch.empty(tokens, n, device="cuda"))
                    if wanted is None:
                        wanted = ordered_linear(x, w, segments=segments, tile=tile, out=torch.empty(len(x), n, device="cuda"))
                        torch.testing.assert_close(wanted, F.linear(x.float(), w.float()), atol=1e-3, rtol=1e-3)
                    assert torch.equal(bits(out), bits(wanted[:tokens])), (tile, tokens)


@pytest.mark.parametrize("tile", [tile for tile, *_ in PLAIN if tile.warps == 8])
@pytest.mark.parametrize("split", [False, True])
def test_no_instruction_of_the_tensor_cores_waits_for_the_one_before_it(tile: Tile, split: bool) -> None:
    """ptxas serialises them in some forms of the loop, which costs a third of the speed."""
    types = {
        "x": f"tensordesc<bf16[{tile.block_m}, {tile.block_k}]>", "w": f"tensordesc<bf16[{tile.block_n}, {tile.block_k}]>",
        "out": "*bf16", **dict.fromkeys(("num_tokens", "n", "k", "segment_blocks", "stride_x", "stride_w", "stride_out"), "i32"),
        **({"partials": "*fp32", "arrived": "*i32"} if split else {}),
    }
    constants = {
        "bias": None, "partials": None, "arrived": None, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k, "SEGMENTS": 2 if split else 1, "SPLIT": split, "GROUP": 16, "TMA": True, "EVEN_K": True,
        "GATED": False, "INTERPRETED": False, "PDL": True,
    }
    signature = {name: types.get(name, "constexpr") for name in ordered_kernel.arg_names}
    known = {name: constants[name] for name, kind in signature.items() if kind == "constexpr"}
    even = ("out", "n", "k", "stride_x", "stride_w", "stride_out", "partials", "arrived")  # multiples of 16, as in a model
    hints = {(ordered_kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even if name in types}
    source = ASTSource(fn=ordered_kernel, signature=signature, constexprs=known, attrs=hints)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "wgmma" in ptx
    arguments = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "-", "-o", "/dev/null"]
    found = subprocess.run(arguments, input=ptx, capture_output=True, text=True, check=True)
    assert "serialized" not in found.stdout + found.stderr


def test_the_fused_activation_has_the_bits_of_two_kernels_at_every_number_of_tokens() -> None:
    x, w = noise(max(COUNTS), 1024), noise(1536, 1024, scale=1 / 32)
    wanted = silu_and_mul(ordered_linear(x, w, segments=1, tile=Tile(64, 64, 64, 4, 4, True)))
    for block in GATED_BLOCKS:
        for tokens in COUNTS:
            found = ordered_swiglu(x[:tokens], w, segments=1, tile=Tile(*block, True))
            assert torch.equal(bits(found), bits(wanted[:tokens])), (block, tokens)


def test_the_tiles_that_are_chosen_give_the_same_bits_at_every_number_of_tokens() -> None:
    for n, k, gated in ((6144, 4096, False), (4096, 14336, False), (28672, 4096, True), (576, 1536, False), (3072, 576, True)):
        x, w, segments = noise(max(COUNTS), k), noise(n, k, scale=k**-0.5), ordered_segments(n, k)
        multiply = ordered_swiglu if gated else ordered_linear
        wanted = multiply(x, w, segments=segments, tile=ordered_tile(len(x), n, k, segments, x.device, gated=gated))
        for tokens in range(1, 2048, 97):
            tile = ordered_tile(tokens, n, k, segments, x.device, gated=gated)
            found = multiply(x[-tokens:], w, segments=segments, tile=tile)
            assert torch.equal(bits(found), bits(wanted[-tokens:])), (n, k, tokens)


def test_a_greedy_token_is_that_of_the_logits_whatever_computes_them() -> None:
    x, w = noise(1024, 576), noise(49152, 576, scale=0.05)
    logits = ordered_linear(
        x, w, segments=1, tile=ordered_tile(1024, 49152, 576, 1, x.device), out=torch.empty(1024, 49152, device="cuda")
    )
    wanted = torch.empty(1024, dtype=torch.int32, device="cuda")
    argmax(logits, out_ids=wanted)
    for block in HEAD:
        for tokens in (1, 64, 300, 1024):
            found = torch.empty(tokens, dtype=torch.int32, device="cuda")
            lm_head(x[:tokens], w, out_ids=found, tile=Tile(*block, True))
            assert torch.equal(found, wanted[:tokens]), (block, tokens)


def test_norms_and_activations_have_the_bits_of_the_row_alone() -> None:
    x, residual, weight = noise(4096, 576), noise(4096, 576), noise(576)
    normed, sums = torch.empty_like(x), residual.clone()
    add_norm(x, sums, weight, 1e-5, out=normed)
    apart = torch.empty_like(x)
    rms_norm(residual + x, weight, 1e-5, out=apart)
    assert torch.equal(bits(apart), bits(normed))
    for tokens in COUNTS:
        own, out = residual[:tokens].clone(), torch.empty(tokens, 576, dtype=x.dtype, device="cuda")
        add_norm(x[:tokens], own, weight, 1e-5, out=out)
        assert torch.equal(bits(out), bits(normed[:tokens]))
        assert torch.equal(bits(own), bits(sums[:tokens]))
        assert torch.equal(bits(silu_and_mul(x[:tokens])), bits(silu_and_mul(x)[:tokens]))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (64, 8, 64), (16, 2, 256)])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_query_has_the_same_bits_in_prefill_and_in_any_round(
    heads: int, kv_heads: int, dim: int, window: int, with_sinks: bool, fp8: bool
) -> None:
    length, page_size = 4200, 16
    pages = -(-length // page_size)
    kv, q = noise(2, pages + 1, page_size, kv_heads, dim), noise(length, heads, dim)
    scales = torch.linspace(0.01, 0.03, 2 * kv_heads, device="cuda").view(2, kv_heads) if fp8 else None
    kv = (kv * 50).to(E4M3) if fp8 else kv
    sinks = torch.linspace(-2, 2, heads, device="cuda") if with_sinks else None
    table = (torch.randperm(pages, device="cuda") + 1).int().view(1, pages)
    positions = torch.arange(length, device="cuda")

    def prefilled(begin: int, end: int) -> Tensor:
        out = torch.full((end - begin, heads, dim), torch.nan, dtype=q.dtype, device="cuda")
        bounds, kv_len = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0, end - begin], [end]))
        ordered_prefill(
            q[begin:end], kv, table, positions[begin:end], bounds, kv_len, scale=dim**-0.5, max_q=end - begin, max_kv=end,
            out=out, window=window, sink_logits=sinks, scales=scales,
        )
        return out

    def in_round(begins: list[int], num_q: int, max_kv: int) -> Tensor:
        """Rows of this one prompt, each with num_q queries from begins[row] on."""
        rows = len(begins)
        shape = ordered_work_shape(
            num_rows=rows, max_q=num_q, max_kv=max_kv, num_heads=heads, kv_heads=kv_heads, head_dim=dim, page_size=page_size,
            num_sms=132, window=window,
        )
        own = torch.cat([positions[begin : begin + num_q] for begin in begins])
        starts = torch.arange(0, rows * num_q + 1, num_q, dtype=torch.int32, device="cuda")
        lengths = torch.tensor([begin + num_q for begin in begins], dtype=torch.int32, device="cuda")
        work = split_kv_schedule(starts, lengths, own, shape=shape)
        out = torch.full((rows * num_q, heads, dim), torch.nan, dtype=q.dtype, device="cuda")
        ordered_attention(
            q[own], kv, table.repeat(rows, 1), own, work, partials_of(work, dim), scale=dim**-0.5, out=out, sink_logits=sinks,
            scales=scales,
        )
        return out

    whole = prefilled(0, length)
    assert whole.isfinite().all()
    for begin, end in ((0, 100), (0, 2048), (100, 2300), (1000, 3100), (3100, 4200)):
        assert torch.equal(bits(prefilled(begin, end)), bits(whole[begin:end])), (begin, end)
    begins = [0, 5, 700, 1024, 2040, 2044, 2047, 2048, 4000, 4190]
    for num_q in (1, 2, 4, 8, 10):
        for own in (begins, begins[-1:], begins[:3] * 30):
            found = in_round(own, num_q, length).view(len(own), num_q, heads, dim)
            for row, begin in enumerate(own):
                assert torch.equal(bits(found[row]), bits(whole[begin : begin + num_q])), (num_q, begin)


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts in bf16": ("qwen3_moe", {"moe_intermediate_size": 256, "norm_topk_prob": True}),
    "FP8 weights that are converted": (
        "qwen3_moe",
        {"moe_intermediate_size": 256, "norm_topk_prob": True, "quantization_config": FP8_BLOCKS},
    ),
    "experts in MXFP4, windows, sinks": (
        "gpt_oss",
        {"intermediate_size": 256, "sliding_window": 128, "quantization_config": MXFP4},
    ),
}


@cache
def target(kind: str = "dense") -> Target:
    if kind != "dense":
        family, changes = FORMATS[kind]
        sizes = {
            "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 5000,
            "max_position_embeddings": 4096, "num_local_experts": 16, "num_experts_per_tok": 4,
        }
        device = torch.device("cuda")
        own = moe_spec(family, **{**changes, **sizes}).on(device, torch.bfloat16, "dtype").in_one_order()
        return Target(own, Strong(own, dtype=torch.bfloat16, device=device), device)
    spec = tiny_spec(
        None, hidden_size=1024, num_heads=16, num_kv_heads=4, head_dim=64, intermediate_size=2048, vocab_size=5000,
        max_len=4096, dtype="bfloat16",
    )
    device = torch.device("cuda")
    return Target.load(Path(), spec.in_one_order(), dtype=torch.bfloat16, device=device, dummy=True)


@pytest.mark.parametrize("kind", ["dense", *FORMATS])
def test_keys_values_and_logits_are_those_of_a_prompt_in_one_pass_however_it_is_cut(kind: str) -> None:
    own, length = target(kind), 2500
    ids = torch.randint(0, 5000, (length,), dtype=torch.int32, device="cuda")

    def computed(cuts: list[int]) -> tuple[Tensor, Tensor]:
        """K/V of all positions, and the logits, the tokens going through the model in passes that end at `cuts`."""
        cache = KVCache.allocate(
            own.spec.layer_states(own.dtype, 16, draft_len=0), groups=KVGroups.single(own.spec.num_layers), page_size=16,
            num_pages=(length // 16 + 2,), device=own.device,
        )
        table = torch.arange(1, length // 16 + 2, dtype=torch.int32, device="cuda").view(1, -1)
        found = []
        for begin, end in zip([0, *cuts], cuts, strict=False):
            positions = torch.arange(begin, end, device="cuda")
            batch = FlatBatch(
                token_ids=ids[begin:end], row_ids=torch.zeros(end - begin, dtype=torch.int32, device="cuda"),
                positions=positions, slot_mapping=positions + 16,
                cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
                kv_len=torch.tensor([end], dtype=torch.int32, device="cuda"), page_table=table, max_q=end - begin, max_kv=end,
                host=HostLayout([end - begin], [end]),
            )
            found.append(own.logits(own.forward(batch, cache)[0]))
        pages = torch.stack([cache.layers[i].pages for i in range(own.spec.num_layers)])
        return pages.flatten(2, 3)[:, :, 16 : length + 16], torch.cat(found)

    kv, logits = computed([length])
    assert logits.isfinite().all()
    ends = [*range(2401, length + 1)]
    for cuts in ([700, length], [64, 65, 2047, 2048, 2049, length], [2400, *ends], [1, 2, 10, 2040, 2044, 2052, length]):
        other_kv, other_logits = computed(cuts)
        assert torch.equal(bits(other_kv), bits(kv)), cuts[:3]
        assert torch.equal(bits(other_logits), bits(logits)), cuts[:3]


def test_no_drafter_number_of_slots_or_preemption_changes_a_token_or_a_logprob() -> None:
    own = target()
    samplings = (SamplingParams(), SamplingParams(temperature=0.8), SamplingParams(temperature=0.7, top_p=0.9, top_k=40))
    generator = torch.Generator().manual_seed(1)
    asked = [
        request(
            i,
            torch.randint(0, 5000, (int(length),), generator=generator).tolist(),
            cap=150,
            sampling=samplings[i % 3],
            predicted=5,
        )
        for i, length in enumerate(torch.randint(1, 1400, (40,), generator=generator))
    ]
    head = dummy_head(
        replace(dummy_spec(own.spec, draft_vocab_size=3000, parallel=False), aux_layer_ids=(0, 1, 2)), dtype=torch.bfloat16,
        device=own.device,
    )

    def run(slots: int, pages: int, draft_len: int, name: str, prefill_tokens: int) -> dict[str, Any]:
        drafter: Drafter = NoDrafter()
        if name == "lookup":
            drafter = LookupDrafter(draft_len, min_ngram=1, max_ngram=3)
        elif name == "chain":
            drafter = ChainDrafter(head, own, draft_len, slots=slots)
        batch = packed(
            slots, page_size=16, max_len=1600, num_pages=pages, num_verified=draft_len, prefill_tokens=prefill_tokens,
            row_buckets=(1, slots) if slots > 1 else (1,),
        )
        engine = make_engine(own, drafter, batch, device=own.device, logprobs=0)
        engine.prepare(SamplingMode(random=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(expected_pages, "SHORT_CAP_TOKENS", 4)
            done = list(engine.run(iter(asked)))
        if pages < 1000:
            assert sum(one.stats.num_prefills for one in done if one.stats is not None) > len(asked), "no row was preempted"
        return {
            one.request_id: (one.token_ids.tolist(), one.logprobs.tolist())
            for one in done
            if one.token_ids is not None and one.logprobs is not None
        }

    wanted = run(1, 2000, 0, "none", 4096)
    assert len(wanted) == len(asked)
    for slots, pages, draft_len, name, prefill_tokens in (
        (40, 5000, 0, "none", 4096), (40, 5000, 3, "chain", 1000), (16, 5000, 7, "lookup", 300), (13, 300, 2, "chain", 4096),
    ):
        assert run(slots, pages, draft_len, name, prefill_tokens) == wanted, (slots, name)


@pytest.mark.parametrize(("top_k", "experts"), [(3, 8), (4, 32), (8, 128)])
@pytest.mark.parametrize(("scoring", "norm_topk"), [("softmax", True), ("softmax", False), ("sigmoid", True)])
def test_the_weights_of_a_token_have_the_same_bits_for_few_tokens_and_for_many(
    scoring: Scoring, norm_topk: bool, top_k: int, experts: int
) -> None:
    """Few tokens are routed in one launch, many in two."""
    logits = 2 * torch.randn(150, experts, device="cuda")
    call: dict[str, Any] = {"scoring": scoring, "norm_topk": norm_topk, "scale": 1.5, "unit_pairs": 16}
    call["bias"] = torch.rand(experts, device="cuda") / 8 if scoring == "sigmoid" else None
    many = route(logits, top_k, **call)
    assert not is_few(150, top_k)
    for size in (1, 2, 8):
        assert is_few(size, top_k)
        few = [route(part, top_k, **call) for part in logits.split(size)]
        assert torch.equal(torch.cat([own.weights for own in few]), many.weights)
        assert torch.equal(torch.cat([own.expert_ids for own in few]), many.expert_ids)
