"""The variants in which the engine launches the kernels of `kernels/rounds`."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import PF32, PI32, PI64, Cases

CASES = Cases("rounds")
case = CASES.add

for _tokens in (1, 5):
    case(f"prepare_verify_inputs_kernel S={_tokens}", "prepare_verify_inputs", 1, num_tokens=PI32, WIDTH=_tokens, PAGE_SIZE=16,
         LANES=1 if _tokens == 1 else 8)
for _rates in (None, PF32):
    for _k in (0, 4, 64):
        case(f"accept_kernel K={_k}, rates {_rates}", "accept", 1, stop_ids=PI32, rates=_rates, num_tokens=PI32, finish=PI32,
             out_accepted_len=PI32, out_log=PI32, K=_k, NUM_STOPS=3, LANES=max(2, 2 * _k), STOP_LANES=4, UNDECIDED=-2,
             AFTER_DRAFT=5)
for _rows in (64, 512):
    case(f"prepare_ragged_inputs_kernel {_rows} rows", "prepare_ragged_inputs", 4, num_tokens=PI32, PAGE_SIZE=16, ROWS=_rows,
         BLOCK=128)
for _k, _rows, _bins, _cut in ((4, 256, 32, True), (4, 256, 32, False), (64, 1024, 64, True)):
    case(f"allocate_drafts_kernel K={_k}, {_rows} rows, cut {_cut}", "allocate_drafts", min(16, _rows // 64), confidence=PI32,
         costs=PI32, CUT=_cut, K=_k, BINS=_bins, ROWS=_rows, LEVELS=256)
for _bins in (32, 64):
    case(f"learn_acceptance_kernel {_bins} bins", "learn_acceptance", 4, confidence=PI32, prior=PF32, tried=PF32, accepted=PF32,
         costs=PI32, totals="*fp64", weight="fp32", decay="fp32", BINS=_bins, ROWS=128, LEVELS=256, PER_HALF=32, AFTER_DRAFT=5)
for _word in ("i8", "i16", "i32", "i64"):
    case(f"move_rows_kernel {_word}", "move_rows", 4, state=f"*{_word}", src_ids=PI32, dst_ids=PI32, BLOCK=1024)
    case(f"write_rows_kernel {_word}", "write_rows", 4, state=f"*{_word}", slot_ids=PI64, mask=PI32, values=f"*{_word}",
         BLOCK=1024)

CASES.seldom |= {
    "write_rows_kernel i8",
    "write_rows_kernel i64",
    "move_rows_kernel i16",
    "move_rows_kernel i32",
    "accept_kernel K=0, rates *fp32",
    "accept_kernel K=4, rates *fp32",
    "accept_kernel K=64, rates None",
}
