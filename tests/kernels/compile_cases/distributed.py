"""The variants in which the engine launches the kernels of `kernels/distributed`."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("distributed")
case = CASES.add

_PEERS = {"addresses": PI64, "epochs": PI64, "failed": PI64, "report": PI64, "rank": I32, "spins": I32}
# (ranks, columns of a rank in two shots, residual and norm, copy of the sum)
for _ranks, _share, _norm, _copy in ((2, 0, True, True), (4, 2048, True, False), (8, 1024, False, False), (4, 0, False, False)):
    _sums = {**_PEERS, "num_rows": I32, "out_rows": I32, "num_bytes": I32, "partial_stride": I32, "residual_stride": I32,
             "out_stride": I32, "aux_stride": I32, "EPS": 1e-5, "WIDTH": 8192, "BLOCK": 8192, "RANKS": _ranks, "SHARE": _share,
             "SHARE_BLOCK": max(16, _share), "ACC": "fp32"}
    _aux = "*bf16" if _copy else None
    _given = "*bf16" if _norm else None
    case(f"reduce_norm_kernel bf16, {_ranks} ranks, share {_share}, norm {_norm}", "reduce_norm", 16, partial="*bf16",
         residual=_given, weight=_given, out="*bf16", out_scales=None, out_aux=_aux, given=None, **_sums, WHOLE=False, GROUP=128,
         INTERPRETED=False)
    for _one, _scale in ((False, None), (True, "fp32")) if _norm else ():
        case(f"reduce_norm_kernel bf16, {_ranks} ranks, share {_share}, FP8 whole {_one}", "reduce_norm", 16, partial="*bf16",
             residual="*bf16", weight="*bf16", out="*fp8e4nv", out_scales=PF32, out_aux=_aux, given=_scale, **_sums, WHOLE=_one,
             GROUP=128, INTERPRETED=False)
for _ranks, _add, _dtype in ((2, True, "fp32"), (4, False, "i32"), (8, False, "i64"), (2, False, "u8")):
    case(f"exchange_kernel {_dtype}, {_ranks} ranks, sum {_add}", "exchange", 4, x=f"*{_dtype}", out=f"*{_dtype}", **_PEERS,
         RANKS=_ranks, SUM=_add, ACC="fp32", BLOCK=1024)
for _ranks, _flag in ((2, True), (4, False)):
    case(f"best_of_ranks_kernel fp32, {_ranks} ranks", "exchange", 4, scores=PF32, ids=PI32, **_PEERS, RANKS=_ranks, FLAG=_flag,
         BLOCK=64)
for _ranks, _weight in ((2, "*bf16"), (4, PF32)):
    case(f"head_norms_kernel bf16, {_ranks} ranks, {_weight}", "head_norms", 8, qkv="*bf16", q_norm=_weight, k_norm=_weight,
         **_PEERS, EPS=1e-5, Q=3072, K=512, BLOCK_Q=4096, BLOCK_K=512, RANKS=_ranks, ACC="fp32")

CASES.seldom |= {
    "reduce_norm_kernel bf16, 2 ranks, share 0, FP8 whole True",
    "reduce_norm_kernel bf16, 4 ranks, share 2048, FP8 whole False",
}
