"""The variants in which the engine launches the kernels of `kernels/moe`."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I32, PF32, PI32, Cases

CASES = Cases("moe")
case = CASES.add

for _wide, _few, _t, _e, _warps in (
    (False, True, 16, 16, 8), (False, False, 32, 32, 2), (False, False, 32, 64, 4), (True, False, 32, 64, 4)
):
    case(f"router_kernel fp32 {_wide}, {_t} x {_e}", "router", _warps, x="*bf16", w=PF32 if _wide else "*bf16", bias=None,
         out=PF32, rounds=I32, NUM_EXPERTS=120, K=1536, BLOCK_T=_t, BLOCK_E=_e, PARTS=8, PART_K=32 if _wide else 64, FEW=_few,
         WIDE=_wide, AHEAD=_few, INTERPRETED=False)
for _groups, _best, _factor in ((1, 1, 1.0), (8, 4, 2.5)):
    case(f"route_kernel {_groups} groups", "route", 1, logits=PF32, bias=PF32, factors=None, live=None, out_weights=PF32,
         NUM_EXPERTS=120, TOP_K=6, SIGMOID=True, NORM=True, SUM_EPS=0.0 if _groups > 1 else 1e-6, SCALE=_factor, GROUPS=_groups,
         TOP_GROUPS=_best, LANES=128, SLOTS=8)
for _tokens, _rows, _sigmoid in ((1, True, False), (8, False, True)):
    _kind = "*bf16" if _rows else None
    case(f"route_few_kernel {_tokens} tokens, rows {_rows}", "route_few", _tokens, logits=PF32, bias=PF32 if _sigmoid else None,
         factors=None if _sigmoid else PF32, live="*u8" if _rows else None, x=_kind, out_weights=PF32, out_rows=_kind,
         out_num_read=PI32 if _rows else None, NUM_EXPERTS=120, TOP_K=6, SIGMOID=_sigmoid, NORM=True,
         SUM_EPS=1e-6 if _sigmoid else 0.0, SCALE=2.5 if _sigmoid else 1.0, GROUPS=8 if _sigmoid else 1,
         TOP_GROUPS=4 if _sigmoid else 1, UNIT_PAIRS=16, TOKENS=_tokens, LANES=128, SLOTS=8, BLOCK=4096)
case("route_kernel with factors", "route", 1, logits=PF32, bias=None, factors=PF32, live="*u8", out_weights=PF32, NUM_EXPERTS=128,
     TOP_K=8, SIGMOID=False, NORM=True, SUM_EPS=0.0, SCALE=1.0, GROUPS=1, TOP_GROUPS=1, LANES=128, SLOTS=8)
case("route_kernel of 22 of 512 experts", "route", 1, logits=PF32, bias=PF32, factors=None, live="*u8", out_weights=PF32,
     NUM_EXPERTS=512, TOP_K=22, SIGMOID=True, NORM=True, SUM_EPS=0.0, SCALE=5.0, GROUPS=1, TOP_GROUPS=1, LANES=512,
     SLOTS=32)
for _pairs, _largest in ((16, False), (48, True)):
    case(f"list_kernel {_pairs} pairs", "list_pairs", 8, out_num_read=PI32, NUM_EXPERTS=120, UNIT_PAIRS=_pairs,
         LARGEST_FIRST=_largest, LANES=128, BLOCK=2048)
case("count_kernel", "list_many", 4, LANES=128, PAIRS=512)
for _largest in (False, True):
    case(f"place_kernel largest first {_largest}", "list_many", 4, counts=PI32, out_num_read=PI32, NUM_EXPERTS=120,
         UNIT_PAIRS=128, LARGEST_FIRST=_largest, LANES=128, PAIRS=512, CHUNK=128, ROWS=16)
for _residual, _gain in ((None, None), ("*bf16", "*bf16"), ("*bf16", PF32)):
    case(f"combine_kernel residual {_residual}, norm {_gain}", "combine", 8, y="*bf16", weights=PF32, residual=_residual,
         norm=_gain, out="*bf16", out_aux=_residual, EPS=1e-5, TOP_K=6, WIDTH=1536, BLOCK=2048, ACC="fp32")
for _one, _scale, _gain in ((False, None, "*bf16"), (True, "fp32", "*bf16"), (True, None, PF32)):
    case(f"combine_fp8_kernel whole {_one}, given {_scale}, {_gain}", "combine_fp8", 8, y="*bf16", weights=PF32, residual="*bf16",
         norm=_gain, out="*fp8e4nv", out_scales=PF32, out_aux=None if _one else "*bf16", given=_scale, EPS=1e-5, TOP_K=6,
         WIDTH=4000, BLOCK=4096, WHOLE=_one, GROUP=128, INTERPRETED=False)


def _tokens_of(dtype: str, low: int, block_t: int, block_k: int, tma: bool, joined: bool = False) -> dict[str, object]:
    """Types of x16 to x256."""
    kinds: dict[str, object] = {}
    for height in (16, 32, 64, 128, 256):
        kind = f"tensordesc<{dtype}[{height}, {block_k}]>" if tma else f"*{dtype}"
        kinds[f"x{height}"] = kind if low <= height <= block_t or (joined and height < 64) else None
    return kinds


def _gathered(dtype: str, low: int, block_t: int) -> dict[str, object]:
    """The same where programs gather rows of tokens."""
    return {f"x{height}": f"*{dtype}" if low <= height <= block_t else None for height in (16, 32, 64, 128, 256)}


# (dtype, gated, limit, lowest tile, pairs of a unit, rows of W, K block, warps, rows gathered)
for _dtype, _gated, _limit, _low, _t, _n, _k, _warps, _by_token in (
    ("bf16", True, 7.0, 16, 32, 64, 64, 4, True), ("bf16", True, None, 32, 128, 128, 64, 8, False),
    ("bf16", False, None, 32, 128, 128, 64, 4, False), ("fp32", True, None, 16, 32, 64, 32, 4, False),
):
    _ptr, _tma = f"*{_dtype}", _dtype == "bf16"
    case(f"experts_plain_kernel {_dtype}, gated {_gated}, {_low} to {_t} pairs", "experts_plain", _warps,
         **_gathered(_dtype, _low, _t) if _by_token else _tokens_of(_dtype, _low, _t, _k, _tma),
         w=f"tensordesc<bf16[{_n}, {_k}]>" if _tma else _ptr, bias=_ptr if _gated else None, out=_ptr, n=I32, k=I32,
         SCATTER=not _gated, GATED=_gated, LIMIT=_limit, ALPHA=(0.0 if _low == 32 else 1.702) if _gated else None, LOW=_low,
         BLOCK_T=_t, BLOCK_N=_n, BLOCK_K=_k, TMA=_tma, EVEN_K=_tma, TOP_K=8 * _by_token, INTERPRETED=False)
case("sort_rows_kernel", "sort_rows", 8, x="*bf16", places=PI32, out="*bf16", k=I32, SLOTS=4, BLOCK=4096)
for _one, _scale in ((False, None), (True, None), (True, "fp32")):
    case(f"quantise_kernel whole {_one}, given {_scale}", "quantise", 8, x="*bf16", places=None if _one else PI32, out="*fp8e4nv",
         out_scales=PF32, given=_scale, k=I32, SLOTS=1 if _one else 8, WHOLE=_one, GROUP=128, GROUPS=16, INTERPRETED=False)
# (blocked, gated, quantised, lowest tile, pairs, rows of W, warps, TMA, turned, rows gathered)
for _blocked, _gated, _quantised, _low, _t, _n, _warps, _tma, _turned, _by_token in (
    (True, True, True, 16, 32, 128, 4, True, False, True), (True, False, False, 16, 64, 128, 4, True, True, False),
    (True, True, False, 16, 64, 64, 4, True, True, True), (True, True, False, 128, 128, 64, 8, True, True, False),
    (False, True, False, 16, 16, 128, 4, False, False, False),
):
    _half = _n // 2 if _turned and not _gated else _n
    case(f"experts_fp8_kernel blocked {_blocked}, gated {_gated}, quantised {_quantised}, {_t} pairs", "experts_fp8", _warps,
         **_gathered("fp8e4nv", _low, _t) if _by_token else _tokens_of("fp8e4nv", _low, _t, 128, _tma), x_scales=PF32,
         w=f"tensordesc<fp8e4nv[{_half}, 128]>" if _tma else "*fp8e4nv", w_scales=PF32, bias=None if _blocked else "*bf16",
         out="*fp8e4nv" if _quantised else "*bf16", out_scales=PF32 if _quantised else None, x_rows=I32, n=I32, k=I32,
         SCATTER=not _gated, GATED=_gated, LIMIT=None, ALPHA=1.702 if _gated else None, BLOCKED=_blocked, TURNED=_turned,
         LOW=_low, BLOCK_T=_t, BLOCK_N=_n, TMA=_tma, TOP_K=8 * _by_token, EVEN_K=_tma, STAGES=3, INTERPRETED=False)
# (gated, lowest tile, pairs, warps, TMA)
for _gated, _low, _t, _warps, _tma in (
    (True, 16, 64, 4, True), (False, 32, 96, 8, True), (True, 32, 96, 8, True), (True, 32, 128, 4, True),
    (False, 32, 128, 4, True), (False, 16, 32, 4, False), (True, 16, 16, 4, False), (True, 16, 16, 4, True),
    (False, 16, 48, 4, True),
):
    _joined = _t > 32
    case(f"experts_mxfp4_kernel gated {_gated}, {_low} to {_t} pairs, TMA {_tma}", "experts_mxfp4", _warps,
         **_tokens_of("bf16", _low, _t, 128, _tma, _joined), w=PI32, w_scales=PI32, bias="*bf16", out="*bf16", n=I32, k=I32,
         SCATTER=not _gated, GATED=_gated, LIMIT=7.0 if _gated else None, ALPHA=1.702, LOW=_low, BLOCK_T=_t, JOINED=_joined,
         THREADS=32 * _warps, FETCHED=3 if _t == 16 else 0, TMA=_tma, INTERPRETED=False)
# (gated, lowest tile, pairs, rows of W, warps, TMA, group, zero points); the first four are those of the rule for Qwen3-30B-A3B.
# Groups of 16: NVFP4.
for _gated, _low, _t, _n, _warps, _tma, _group, _zeros in (
    (True, 16, 16, 64, 4, True, 128, False), (False, 16, 32, 128, 4, True, 128, False), (True, 32, 96, 64, 4, True, 128, False),
    (False, 128, 128, 128, 8, True, 128, False), (True, 16, 32, 64, 4, False, 32, True), (False, 16, 64, 128, 4, True, 64, True),
    (False, 16, 16, 64, 4, True, 0, False), (True, 16, 16, 64, 4, True, 16, False), (False, 16, 32, 128, 4, True, 16, False),
    (True, 32, 96, 64, 4, True, 16, False), (False, 128, 128, 128, 8, True, 16, False), (False, 16, 64, 128, 4, False, 16, False),
):
    _joined = _low < 64 < _t
    case(f"experts_four_bit_kernel gated {_gated}, {_low} to {_t} pairs, {_n} rows, TMA {_tma}, groups of {_group}",
         "experts_four_bit", _warps, **_tokens_of("bf16", _low, _t, 128, _tma, _joined),
         w=f"tensordesc<i16[{'2, ' if _gated else ''}{_n}, 32]>" if _tma else "*i16", scales=PI32,
         shifts=PI32 if _zeros else None, row_scales=PF32 if _group == 16 else None, bias="*bf16" if _zeros else None,
         out="*bf16", n=I32, k=I32, SCATTER=not _gated, GATED=_gated, LIMIT=7.0 if _gated and _zeros else None,
         ALPHA=1.702 if _gated else None, GROUP=_group, TWO=_n >= (16 if _gated else 32) * _warps, LOW=_low, BLOCK_T=_t,
         JOINED=_joined, BLOCK_N=_n, TMA=_tma, EVEN_K=_tma, INTERPRETED=False)

# Experts without gates: the first product is stored in the order of the list, and relu(x)^2 of it.
for _kernel in ("experts_plain_kernel bf16", "experts_fp8_kernel", "experts_four_bit_kernel"):
    _name = next(name for name in CASES if name.startswith(_kernel) and not CASES[name].arguments["GATED"])
    _own = CASES[_name]
    CASES[f"{_name}, without gates"] = _own._replace(arguments={**_own.arguments, "SCATTER": False, "ALPHA": 1.702})

CASES.seldom |= {
    "experts_four_bit_kernel gated True, 16 to 16 pairs, 64 rows, TMA True, groups of 128",
    "experts_mxfp4_kernel gated True, 32 to 128 pairs, TMA True",
}
