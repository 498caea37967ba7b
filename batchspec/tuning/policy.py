"""Every choice of how a kernel runs that can change the last bits of a result: tiles, cuts along K, splits of attention.

Model, drafters and cache get these choices only here. Most are made for speed: products as measured on this GPU
(`batchspec.tuning.table`), dense FP8 products and attention by shape (`batchspec.kernels.gemm.fp8_tiles`,
`batchspec.kernels.attention.settings`). They depend on the number of tokens and rows of a batch, so the bits of a row may depend
on its neighbours. Functions named `ordered_...` are for decode.deterministic: where their choice depends on the batch, it changes
no bit.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

from batchspec.kernels.attention.settings import ordered_work_shape, work_shape
from batchspec.kernels.attention.work_list import WorkShape
from batchspec.kernels.common.card import card_of
from batchspec.kernels.gemm import four_bit_tiles, fp8_tiles, lm_head, ordered_tiles, scaled_mm
from batchspec.kernels.gemm.fp8_tiles import Fp8Tile
from batchspec.kernels.gemm.ordered import MIN_BLOCK_M
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.latent.settings import latent_shape
from batchspec.kernels.moe import tiles
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.tuning.table import is_measured, measured_tile


def gemm_tile(op: str, tokens: int, rows: int, k: int, device: torch.device) -> Tile | None:
    """The tile of `op` with a bf16 weight [rows, k] for this many tokens; None: the library's product, and no fused norm or sum.

    Raises ConfigError if a table of tuned products is invalid. Does not synchronise.
    """
    return measured_tile(op, tokens, rows, k, device)


def ordered_segments(rows: int, k: int) -> int:
    """Number of parts of K that `ordered_linear` sums separately for a weight [rows, k], whatever it is multiplied with."""
    return ordered_tiles.segments_of(rows, k)


def ordered_tile(
    tokens: int, rows: int, k: int, segments: int, device: torch.device, *, gated: bool = False
) -> Tile:
    """Tile of `ordered_linear`, or of `ordered_swiglu` if gated, for a weight [rows, k] and this many tokens; changes no bit.

    The tile that measured fastest for the unordered product, if this kernel can use it; otherwise an estimate.
    """
    tile = measured_tile("swiglu" if gated else "linear", tokens, rows, k, device) if segments == 1 else None
    if tile is None or tile.split > 1 or tile.per_sm or tile.block_m < MIN_BLOCK_M:
        return ordered_tiles.ordered_tile(tokens, rows // 2 if gated else rows, k, segments, gated=gated)
    return tile


def ordered_head_tile(tokens: int, rows: int, k: int, device: torch.device) -> Tile:
    """Tile of `lm_head` whose logits must have the bits of `ordered_linear`: any of at least MIN_BLOCK_M tokens.

    How sure a choice is (`out_confidence`), which decides only what is drafted, may differ by a bin between tiles.
    """
    tile = measured_tile("lm_head", tokens, rows, k, device)
    if tile is None or tile.block_m < MIN_BLOCK_M:
        return lm_head.TILE if tokens > MIN_BLOCK_M else lm_head.TILE._replace(block_m=MIN_BLOCK_M)
    return tile


FAST_DTYPES = (torch.bfloat16,)


def has_fast_experts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of experts of a model in `dtype` run as kernels: in bf16 on every GPU, with FP8 weights `has_fast_fp8`.

    Elsewhere they are plain torch. On a CPU callers interpret the kernels; only tests make this true there.
    """
    return dtype in FAST_DTYPES and has_kernels(device)


def has_fast_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FP8 products of a model in `dtype` run as kernels: in bf16 on a GPU that multiplies e4m3."""
    return has_fast_experts(device, dtype) and card_of(device).has_e4m3


def has_kernels(device: torch.device) -> bool:
    """Whether kernels run on the device."""
    return device.type == "cuda"


@cache
def has_scaled_mm(device: torch.device, dtype: torch.dtype, *, blocked: bool) -> bool:
    """Whether the library's products of FP8 rows and weights with these scales work here and give a model's dtype: bf16.

    The first call computes a small product and synchronises.
    """
    return dtype is torch.bfloat16 and device.type == "cuda" and scaled_mm.is_right(device, blocked=blocked)


def fp8_tile(tokens: int, rows: int, k: int, device: torch.device, *, library: bool) -> Fp8Tile | None:
    """The tile of a dense product with an FP8 weight [rows, k]; None: the library, which must support it, computes it."""
    return fp8_tiles.fp8_tile(tokens, rows, k, card_of(device), library=library)


def ordered_fp8_tile(tokens: int) -> Fp8Tile:
    """The tile of a dense FP8 product whose bits depend on a token's row and the weight alone, for this many tokens."""
    return fp8_tiles.ordered_fp8_tile(tokens)


def four_bit_tile(tokens: int, rows: int, k: int, group: int, device: torch.device, *, gated: bool) -> Tile | None:
    """The tile of a dense product with a weight [rows, k] in groups of so many columns (0: one of a row; 16: NVFP4, others INT4),
    gated of its SwiGLU; None: dequantise the weight, and multiply by the library.

    The choice that measured fastest for this product, if it was measured on this GPU; otherwise an estimate.
    """
    op = four_bit_tiles.op_of(group, gated=gated)
    if is_measured(op, rows, k, device):
        return measured_tile(op, tokens, rows, k, device)
    return four_bit_tiles.four_bit_tile(tokens, rows, k, group, card_of(device), gated=gated)


def ordered_four_bit_tile(tokens: int, *, gated: bool = False) -> Tile:
    """The tile of a dense product with a weight of four bits, for this many tokens, if a token's bits must depend on its row and
    the weight alone."""
    return four_bit_tiles.ordered_four_bit_tile(tokens, gated=gated)


def expert_unit_pairs(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype | None = None) -> int:
    """Number of pairs in a unit of the grouped products of this many tokens."""
    return tiles.unit_pairs_of(tokens, top_k, num_experts, dtype)


@cache
def expert_pass_sizes(top_k: int, num_experts: int, dtype: torch.dtype, most: int) -> tuple[int, ...]:
    """The numbers of tokens, up to `most`, from which on units have another size, and grouped products other kernels."""
    pairs = (expert_unit_pairs(tokens, top_k, num_experts, dtype) for tokens in range(1, most + 1))
    return tuple(tokens for tokens, (before, own) in enumerate(pairwise(pairs), 2) if own != before)


def expert_tile(unit_pairs: int, num_units: int, device: torch.device, *, gated: bool, dtype: torch.dtype) -> ExpertTile:
    """The tile of a grouped product of at most `num_units` units, with weights of this dtype (uint8: MXFP4, int32: INT4, NVFP4).

    No choice changes the bits of a token.
    """
    return tiles.expert_tile(unit_pairs, num_units, card_of(device), gated=gated, dtype=dtype)


def largest_units_first(unit_pairs: int, dtype: torch.dtype) -> bool:
    """Whether experts with the largest units come first in the work list of grouped products. Changes no bit.

    dtype  of the weights
    """
    return tiles.largest_first(unit_pairs, dtype)


def gathers_rows(unit_pairs: int, dtype: torch.dtype, *, gated: bool) -> bool:
    """Whether the first product of experts gathers its rows by token instead of reading them sorted by expert. Changes no bit.

    dtype  of the weights
    """
    return tiles.gathers(unit_pairs, dtype, gated=gated)


def attention_shape(
    *, num_rows: int, max_q: int, max_kv: int, num_heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype,
    fp8: bool, device: torch.device, window: int | None, sink: int,
) -> WorkShape:
    """Tiles of verify attention and how its keys are split, for rows of at most max_q queries and max_kv keys."""
    return work_shape(
        num_rows=num_rows, max_q=max_q, max_kv=max_kv, num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim,
        page_size=page_size, dtype=dtype, fp8=fp8, card=card_of(device), window=window or 0, sink=sink,
    )


def latent_attention_shape(
    *, num_rows: int, max_q: int, max_kv: int, num_heads: int, latent_dim: int, page_size: int, dtype: torch.dtype,
    fp8: bool, device: torch.device, window: int | None, sink: int,
) -> WorkShape:
    """The same for latent attention in the absorbed form."""
    return latent_shape(
        num_rows=num_rows, max_q=max_q, max_kv=max_kv, num_heads=num_heads, latent_dim=latent_dim, page_size=page_size,
        dtype=dtype, fp8=fp8, card=card_of(device), window=window or 0, sink=sink,
    )


def ordered_attention_shape(
    *, num_rows: int, max_q: int, max_kv: int, num_heads: int, kv_heads: int, head_dim: int, page_size: int,
    device: torch.device, window: int | None,
) -> WorkShape:
    """Tiles of `ordered_attention`; its keys are split at the same positions in every batch."""
    return ordered_work_shape(
        num_rows=num_rows, max_q=max_q, max_kv=max_kv, num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim,
        page_size=page_size, num_sms=card_of(device).num_sms, window=window or 0,
    )


def has_same_bits_in_all_tiles(device: torch.device) -> bool:
    """See `Card`; False on a CPU."""
    return device.type == "cuda" and card_of(device).has_same_bits_in_all_tiles
