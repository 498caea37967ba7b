"""The variants in which the engine launches the kernels of `kernels/attention`."""

from __future__ import annotations

from batchspec.kernels.attention.ordered_step import block_of
from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("attention")
case = CASES.add

# (dtype, D, tile, block, warps, window, grouped, tree, early, sinks), "e4m3": of K and V, with bf16 queries
for _stored, _dim, _tile, _block, _warps, _window, _grouped, _tree, _early, _sinks in (
    ("bf16", 128, 16, 64, 4, 0, False, False, False, False), ("bf16", 96, 64, 64, 4, 0, True, False, False, False),
    ("bf16", 64, 16, 64, 4, 0, False, False, True, False), ("bf16", 128, 64, 64, 4, 0, True, False, True, False),
    ("fp32", 64, 16, 32, 8, 512, False, False, False, False), ("fp16", 256, 32, 32, 4, 0, False, True, False, False),
    ("bf16", 64, 64, 64, 4, 128, False, False, True, True),
    ("bf16", 96, 16, 64, 4, 0, True, False, True, False), ("bf16", 64, 16, 32, 4, 512, False, True, False, True),
    ("e4m3", 128, 16, 64, 4, 0, False, False, True, False), ("e4m3", 64, 16, 64, 4, 128, False, False, False, True),
    ("e4m3", 128, 64, 64, 4, 0, True, False, True, False), ("e4m3", 64, 128, 64, 8, 0, True, False, False, False),
    ("e4m3", 128, 32, 64, 4, 0, False, True, False, False), ("e4m3 fp32", 64, 16, 32, 8, 0, False, False, False, False),
    # Gemma 4: heads of 256 with a window, heads of 512 that read all keys
    ("bf16", 256, 16, 32, 4, 1024, False, False, True, False), ("bf16", 512, 32, 16, 4, 0, False, False, True, False),
    ("bf16", 512, 32, 16, 4, 0, True, True, False, False), ("e4m3", 512, 16, 32, 4, 0, False, False, True, False),
    ("e4m3", 512, 32, 32, 8, 0, True, False, True, False), ("fp32", 512, 16, 16, 8, 0, False, False, False, False),
    ("e4m3", 256, 16, 32, 4, 1024, False, False, True, False),
):
    _fp8 = _stored.startswith("e4m3")
    _dtype = {"e4m3": "bf16", "e4m3 fp32": "fp32"}.get(_stored, _stored)
    case(f"verify_kernel {_stored} D={_dim}, tile {_tile}, window {_window}, grouped {_grouped}, tree {_tree}, early {_early}, "
         f"sinks {_sinks}", "verify_attention", _warps,
         stages=(2 if _warps == 8 else 3) if _dim >= 256 and _stored != "fp16" else None, q=f"*{_dtype}",
         kv="*fp8e4nv" if _fp8 else f"*{_dtype}", scales=PF32 if _fp8 else None, row_order=PI32, items=PI32,
         num_items=PI32, ancestors=PI64 if _tree else None, tail_start=PI32 if _tree else None,
         sink_logits=PF32 if _sinks else None, out=f"*{_dtype}", part_out=PF32, part_lse=PF32, scale="fp32", KV_HEADS=8, HEADS=4,
         HEAD_DIM=_dim, DIM=128 if _dim == 96 else _dim, PAGE_SIZE=16, WINDOW=_window, SINK=4 if _window else 0, TILE=_tile,
         BLOCK=_block, GROUPED=_grouped, WIDE=False, INTERPRETED=False, EARLY=_early)
for _groups, _part in ((0, 0), (64, 0), (0, 1024), (64, 1024)):
    case(f"split_kv_schedule_kernel groups {_groups}, part {_part}", "split_kv_schedule", 4, row_group=PI32, group_start=PI32,
         shared_len=PI32, out_items=PI32, out_group_items=PI32, out_row_parts=PI32, target=I32, group_target=I32, chunk=I32,
         min_chunk=I32, HEADS=4, MAX_Q=4, WINDOW=0 if _groups else 512, SINK=0 if _groups else 4, PAGE_SIZE=16, TILE=16, BLOCK=64,
         GROUP_TILE=64, GROUP_BLOCK=64, WAVES=5, PART=_part, ROWS=128, GROUPS=_groups, LANES=64)
for _sink_logits in (None, PF32):  # without them one part after another, as where the order is fixed
    case(f"merge_states_kernel sinks {_sink_logits}", "merge_states", 1, part_out=PF32, part_lse=PF32, sink_logits=_sink_logits,
         out="*bf16", KV_HEADS=8, HEADS=4, HEAD_DIM=96, DIM=128, TILES=4, LINES=4, PARTS=8 if _sink_logits else 1,
         AHEAD=1 if _sink_logits else 4)
for _kv, _dim, _tile, _window, _grouped, _warps in (
    ("bf16", 128, 16, 0, False, 4), ("bf16", 64, 32, 128, False, 4), ("bf16", 128, 64, 0, True, 4),
    ("fp8e4nv", 128, 16, 0, False, 4), ("fp8e4nv", 64, 32, 128, False, 4), ("fp8e4nv", 128, 64, 0, True, 4),
    ("bf16", 512, 32, 0, False, 4),
):
    case(f"ordered_attention_kernel {_kv} D={_dim}, tile {_tile}, window {_window}, grouped {_grouped}", "ordered_attention",
         _warps, stages=3 if _dim == 512 else None, q="*bf16", kv=f"*{_kv}", scales=None if _kv == "bf16" else PF32,
         row_order=PI32, items=PI32, num_items=PI32, sink_logits=PF32 if _window else None, out="*bf16", part_out=PF32,
         part_lse=PF32, scale="fp32", KV_HEADS=8, HEADS=4, HEAD_DIM=_dim, DIM=_dim, PAGE_SIZE=16, WINDOW=_window, TILE=_tile,
         BLOCK=block_of(_dim), GROUPED=_grouped, WIDE=False, STRIDED=_window > 0, EARLY=not _window)
for _kv, _dim, _window, _parted in (
    ("bf16", 128, 0, True), ("bf16", 64, 128, True), ("bf16", 96, 0, False), ("fp8e4nv", 128, 0, True),
    ("fp8e4nv", 64, 128, False), ("bf16", 512, 0, True),
):
    case(f"ordered_prefill_kernel {_kv} D={_dim}, window {_window}, parted {_parted}", "ordered_prefill", 8,
         stages=2 if _dim == 512 else None, q="*bf16", kv=f"*{_kv}", scales=None if _kv == "bf16" else PF32,
         sink_logits=PF32 if _window else None, out="*bf16", scale="fp32", KV_HEADS=8, HEADS=4, HEAD_DIM=_dim,
         DIM=128 if 64 < _dim <= 128 else _dim, PAGE_SIZE=16, WINDOW=_window, TILE=128 if _dim <= 256 else 32,
         BLOCK=block_of(_dim), PART=1024, PARTED=_parted, WIDE=False)

for _window, _given, _last, _dim, _tile, _parts in (
    (0, None, None, 512, 32, 2), (16, PF32, None, 64, 64, 1), (1024, None, PI32, 256, 128, 2),
):
    case(f"ragged_prefill_kernel D={_dim}, window {_window}", "ragged_prefill", 8, stages=2, q="*bf16", k="*bf16", v="*bf16",
         cu_seqlens_k=PI32, sink_logits=_given, last_keys=_last, out="*bf16", scale="fp32", KV_HEADS=4, HEADS=8, HEAD_DIM=_dim,
         DIM=_dim,
         WINDOW=_window, TILE=_tile, BLOCK=32, V_PARTS=_parts, WIDE=False)

for _dim, _held in ((72, (64, 16)), (64, (64, 0)), (128, (128, 0))):
    case(f"bidirectional_kernel D={_dim}", "bidirectional", 8, stages=3, q="*bf16", k="*bf16", v="*bf16", out="*bf16",
         scale="fp32", HEADS=16, HEAD_DIM=_dim, DIM=_held[0], REST=_held[1], TILE=128, BLOCK=64, WIDE=False)

CASES.seldom |= {
    "verify_kernel bf16 D=256, tile 16, window 1024, grouped False, tree False, early True, sinks False",
    "verify_kernel bf16 D=512, tile 32, window 0, grouped True, tree True, early False, sinks False",
    "verify_kernel e4m3 D=512, tile 16, window 0, grouped False, tree False, early True, sinks False",
    "verify_kernel e4m3 D=512, tile 32, window 0, grouped True, tree False, early True, sinks False",
    "verify_kernel fp32 D=512, tile 16, window 0, grouped False, tree False, early False, sinks False",
    "verify_kernel e4m3 D=256, tile 16, window 1024, grouped False, tree False, early True, sinks False",
    "ordered_attention_kernel bf16 D=512, tile 32, window 0, grouped False",
    "ordered_prefill_kernel bf16 D=512, window 0, parted True",
    "verify_kernel bf16 D=128, tile 16, window 0, grouped False, tree False, early False, sinks False",
    "verify_kernel bf16 D=128, tile 64, window 0, grouped True, tree False, early True, sinks False",
    "verify_kernel bf16 D=96, tile 64, window 0, grouped True, tree False, early False, sinks False",
    "verify_kernel bf16 D=64, tile 16, window 0, grouped False, tree False, early True, sinks False",
    "verify_kernel fp32 D=64, tile 16, window 512, grouped False, tree False, early False, sinks False",
    "verify_kernel bf16 D=64, tile 64, window 128, grouped False, tree False, early True, sinks True",
    "verify_kernel e4m3 D=128, tile 64, window 0, grouped True, tree False, early True, sinks False",
    "verify_kernel e4m3 D=128, tile 16, window 0, grouped False, tree False, early True, sinks False",
    "verify_kernel e4m3 D=64, tile 128, window 0, grouped True, tree False, early False, sinks False",
    "ordered_attention_kernel bf16 D=128, tile 64, window 0, grouped True",
    "ordered_attention_kernel fp8e4nv D=128, tile 16, window 0, grouped False",
    "ordered_prefill_kernel bf16 D=128, window 0, parted True",
}
for _dtype in ("bf16", "fp16"):
    case(f"apply_sinks_kernel {_dtype}", "apply_sinks", 4, out=f"*{_dtype}", lse=PF32, sink_logits=PF32, unit="fp32",
         NUM_HEADS=64, HEAD_DIM=64, DIM=64, LINES=64)
