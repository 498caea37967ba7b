"""Small models in every format that decode.deterministic supports, and what they compute for a prompt cut into passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, HostLayout
from batchspec.cache.groups import KVGroups
from batchspec.cache.pages import KVCache
from batchspec.model.target import Target
from tests.helpers.attentions import attentions
from tests.helpers.int4_layouts import of_compressed_tensors, of_gptq
from tests.helpers.moe_models import Strong, tiny_spec
from tests.helpers.nvfp4_layouts import FP8_AND_NVFP4
from tests.helpers.nvfp4_layouts import MODELOPT as NVFP4
from tests.model.test_expert_kernels import FP8_BLOCKS, MXFP4, STATIC
from tests.model.test_fp8 import TOKEN, compressed

FORMATS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "bf16, K/V in FP8": ("llama", {}, True),
    "FP8 by blocks": ("llama", {"quantization_config": FP8_BLOCKS}, False),
    "FP8 by channels, K/V in FP8": ("llama", {"quantization_config": compressed("channel", TOKEN)}, True),
    "FP8 by tensors, calibrated": ("llama", {"quantization_config": compressed("tensor", STATIC)}, False),
    "experts in FP8 by blocks": ("qwen3_moe", {"norm_topk_prob": True, "quantization_config": FP8_BLOCKS}, False),
    "experts in FP8 by channels": ("minimax_m2", {"quantization_config": compressed("channel", TOKEN)}, False),
    "INT4 in groups of 32": ("llama", {"quantization_config": of_gptq(32, sym=False).config}, False),
    "INT4 by channels, K/V in FP8": ("llama", {"quantization_config": of_compressed_tensors(-1).config}, True),
    "experts in INT4": ("qwen3_moe", {"norm_topk_prob": True, "quantization_config": of_gptq(64).config}, False),
    "NVFP4, K/V in FP8": ("llama", {"quantization_config": NVFP4}, True),
    "experts in NVFP4": ("qwen3_moe", {"norm_topk_prob": True, "quantization_config": FP8_AND_NVFP4}, False),
    "experts in MXFP4, windows, sinks, K/V in FP8": ("gpt_oss", {"quantization_config": MXFP4}, True),
}
"""Family, changes of its config, and whether K and V are e4m3."""


def made(name: str, device: torch.device, **sizes: Any) -> Target:
    family, changes, fp8_kv = FORMATS[name]
    sizes = sizes if family == "qwen3_moe" else {key: size for key, size in sizes.items() if key != "moe_intermediate_size"}
    spec = tiny_spec(family, **{**changes, **sizes}).on(device, torch.bfloat16, "auto")
    spec = (spec.with_fp8_kv() if fp8_kv else spec).in_one_order()
    target = Target(spec, Strong(spec, dtype=torch.bfloat16, device=device), device)
    if fp8_kv:
        heads = torch.linspace(0.01, 0.03, spec.num_layers * 2 * attentions(spec)[0].num_kv_heads, device=device)
        target.use_kv_scales(heads.view(spec.num_layers, 2, attentions(spec)[0].num_kv_heads))
    return target


def computed(target: Target, ids: Tensor, cuts: list[int], *, others: int = 0) -> tuple[Tensor, Tensor]:
    """The bytes of K/V of all positions, and the logits, if the prompt `ids` goes through the model in passes that end at `cuts`.

    others  rows with the first tokens of the prompt in other orders, that go through the model in the same passes
    """
    length, rows, device = len(ids), 1 + others, target.device
    pages = -(-length // 16)
    cache = KVCache.allocate(
        target.spec.layer_states(target.dtype, 16, draft_len=0), groups=KVGroups.single(target.spec.num_layers), page_size=16,
        num_pages=(rows * pages + 1,), device=device, scales=target.kv_scales,
    )
    table = torch.arange(1, rows * pages + 1, dtype=torch.int32, device=device).view(rows, pages)
    tokens = torch.stack([ids.roll(row * 7) for row in range(rows)])
    found = []
    for begin, end in zip([0, *cuts], cuts, strict=False):
        num = end - begin
        positions = torch.arange(begin, end, device=device).repeat(rows)
        row_ids = torch.arange(rows, dtype=torch.int32, device=device).repeat_interleave(num)
        slots = (row_ids.long() * pages + 1) * 16 + positions
        batch = FlatBatch(
            token_ids=tokens[:, begin:end].flatten(), row_ids=row_ids, positions=positions, slot_mapping=slots,
            cu_seqlens_q=torch.arange(0, rows * num + 1, num, dtype=torch.int32, device=device),
            kv_len=torch.full((rows,), end, dtype=torch.int32, device=device), page_table=table, max_q=num, max_kv=end,
            host=HostLayout([num] * rows, [end] * rows),
        )
        found.append(target.logits(target.forward(batch, cache)[0])[:num])
    kv = torch.stack([cache.layers[i].pages.contiguous().view(torch.uint8) for i in range(target.spec.num_layers)])
    return kv.flatten(2, 3)[:, :, 16 : length + 16], torch.cat(found)
