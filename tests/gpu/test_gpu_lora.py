"""LoRA adapters of rows on a GPU: captured rounds have the tokens of the CPU in fp32; the kernels at the shapes of 8B."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from batchspec.draft.base import Drafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.window import WindowDrafter
from batchspec.kernels.benchmarks.case import noise, relative_error
from batchspec.kernels.lora.lora_expand import lora_expand, lora_expand_reference
from batchspec.kernels.lora.lora_shrink import lora_shrink, lora_shrink_reference
from batchspec.kernels.lora.lora_tokens import BLOCKS, lora_tokens
from batchspec.model.lora_products import DummyAdapters, LoraStacks, LoraWeights
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.gpu.test_gpu_engine import MAX_LEN, _Noise, requests, run, windowed_target
from tests.helpers.engines import packed
from tests.kernels.lora_cases import PRODUCTS, SPREADS, adapters_of, list_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NUM_ADAPTERS = 3


@dataclass(frozen=True, slots=True)
class SameEverywhere(DummyAdapters):
    """The same numbers on every device, large enough to change tokens."""

    def load(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> LoraStacks:
        made = DummyAdapters.load(self, spec, dtype=dtype, device=torch.device("cpu"))
        moved = {
            name: LoraWeights(own.a.to(device), (own.b * 20).to(device), own.scales.to(device), own.part_rows)
            for name, own in made._weights.items()
        }
        return LoraStacks(self.shape, moved)


@cache
def target(kind: str) -> Target:
    device = torch.device(kind)
    spec = windowed_target(kind, (None, None)).spec
    adapters = SameEverywhere.of(spec, NUM_ADAPTERS, 5)
    spec = spec.with_lora(adapters.shape)
    return Target(spec, _Noise(spec, device, torch.float32), device, lora=adapters.load(spec, dtype=torch.float32, device=device))


@pytest.mark.parametrize("kind", ["none", "lookup", "window"])
def test_captured_rounds_of_mixed_adapters_have_the_tokens_of_the_cpu(kind: str) -> None:
    asked = [replace(own, adapter=i % (NUM_ADAPTERS + 1)) for i, own in enumerate(requests(13))]

    def drafter(own: Target, slots: int) -> Drafter:
        if kind == "lookup":
            return LookupDrafter(4, min_ngram=1, max_ngram=3)
        return WindowDrafter(own, 3, slots=slots, window=20, sink=2) if kind == "window" else NoDrafter()

    own, cpu = target("cuda"), target("cpu")
    batch = packed(8, row_buckets=(1, 2, 4, 8), num_pages=300, page_size=16, max_len=MAX_LEN, prefill_tokens=128, run_ahead=2)
    made = drafter(own, 8)
    engine, done = run(own, made, replace(batch, num_verified=made.draft_len), asked)
    assert engine.executor.graphs.num_captured
    alone = replace(batch, num_slots=1, row_buckets=(1,), run_ahead=0, num_verified=0)
    _, expected = run(cpu, NoDrafter(), alone, asked)
    tokens = {c.request_id: c.token_ids.tolist() for c in done if c.token_ids is not None}
    assert tokens == {c.request_id: c.token_ids.tolist() for c in expected if c.token_ids is not None}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_pair_equals_its_reference_in_bf16(name: str, rank: int, spread: str) -> None:
    device, (part_rows, k) = torch.device("cuda"), PRODUCTS[name]
    for num_tokens in (1, 200, 1024):
        ids = adapters_of(num_tokens, 16, spread, device)
        if not bool(ids.any()):
            ids[0] = 1
        with device:
            x, base = noise(num_tokens, k), noise(num_tokens, sum(part_rows))
            a, b = noise(16, len(part_rows), rank, k, scale=k**-0.5), noise(16, sum(part_rows), rank, scale=rank**-0.5)
            scales = torch.ones(16, len(part_rows))
        for block in BLOCKS:
            tokens, out, expected = lora_tokens(ids, 16, block), base.clone(), base.clone()
            h = lora_shrink(x, a, scales, tokens)
            lora_expand(h, b, scales, tokens, part_rows=part_rows, out=out)
            h = lora_shrink_reference(x, a, scales, tokens)
            lora_expand_reference(h, b, scales, tokens, part_rows=part_rows, out=expected)
            assert relative_error(out.double() - base.double(), expected.double() - base.double()) < 1e-2


def test_a_captured_list_follows_the_adapters_of_the_rows() -> None:
    """The graph is captured once; between replays rows change their adapters."""
    ids = adapters_of(300, 5, SPREADS[0], torch.device("cuda"))
    lora_tokens(ids, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = lora_tokens(ids, 5)
    for seed in range(3):
        ids.copy_(torch.randint(0, 6, (300,), generator=torch.Generator().manual_seed(seed)).int())
        graph.replay()
        assert list_of(tokens) == list_of(lora_tokens(ids.cpu(), 5))
