"""The variants in which the engine launches the kernels of `kernels/sampling`."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("sampling")
case = CASES.add

for _dtype in ("fp32", "bf16", "fp16", "fp64"):
    _acc = "fp64" if _dtype == "fp64" else "fp32"
    for _map in (None, PI32, PI64):
        case(f"argmax_kernel {_dtype}, map {_map}", "argmax", 32, logits=f"*{_dtype}", map_ids=_map, out_ids=PI32,
             out_top=f"*{_dtype}" if _map is None else None, out_total=f"*{_acc}" if _map is None else None,
             out_confidence=None if _map is None else PI32, stride_row=I32,
             out_stride=I32, confidence_stride=I32, vocab=I32, FLAG=_map is None,
             ACC=_acc, BLOCK=4096)
    case(f"sample_kernel {_dtype}", "sample", 16, logits=f"*{_dtype}", row_ids=PI32, positions=PI64, keys=PI64,
         temperature=PF32, cutoff=f"*{_acc}", out_ids=PI32, out_scores=None, out_tops=None, stride_row=I32, vocab=I32,
         first_id=I32, ACC=_acc, BLOCK=4096)
    case(f"add_gumbel_noise_kernel {_dtype}", "add_gumbel_noise", 4, logits=f"*{_dtype}", row_ids=PI32, positions=PI64,
         keys=PI64, temperature=PF32, cutoff=f"*{_acc}", map_ids=None if _dtype == "bf16" else PI64, stride_row=I32, vocab=I32,
         ACC=_acc,
         BLOCK=1024)
    for _drafts, _map in ((PI32, None), (None, PI64)):
        case(f"constrain_logits_kernel {_dtype}, map {_map}", "constrain", 8, logits=f"*{_dtype}", row_ids=PI32, states=PI32,
             classes=PI32, drafts=_drafts, num_drafted=None if _drafts is None else PI64, draft_rows=None, map_ids=_map,
             positions=_drafts and PI64, min_tokens=_drafts and PI32, stop_ids=_drafts and PI32,
             tables=PI32, masks=PI32, symbols=PI32, starts=PI32, stride_row=I32, draft_stride=I32, mask_stride=I32, vocab=I32,
             first_id=I32, num_tokens=I32, width=I32, num_stop_ids=I32, BLOCK=2048, BLOCKS=8)
    for _drafts, _map in ((PI32, None), (None, PI32)):
        case(f"forbid_ngrams_kernel {_dtype}, columns {_map}", "forbid_ngrams", 4, logits=f"*{_dtype}", mask_rows=None,
             row_ids=PI32, positions=PI64, tokens=PI32, prompt_len=PI32, settings=PI32, drafts=_drafts,
             num_drafted=_drafts and PI64, draft_rows=None, columns=_map, stride_row=I32, token_stride=I32, setting_stride=I32,
             draft_stride=I32, vocab=I32, first_id=I32, num_columns=I32, max_len=I32, width=I32, BLOCK=1024)
case("group_maxima_kernel", "top_candidates", 4, logits=PF32, out=PF32, stride_row=I32, vocab=I32, num_groups=I32, GROUP=128,
     GROUPS=32)
for _groups in (256, 2048):
    case(f"top_candidates_kernel {_groups} groups", "top_candidates", 4, logits=PF32, maxima=PF32, out_values=PF32,
         out_ids=PI64, stride_row=I32, vocab=I32, num_groups=I32, COUNT=16, LANES=16, GROUP=128, GROUPS=_groups)
case("forbid_ngrams_kernel masks", "forbid_ngrams", 4, logits=PI32, mask_rows=PI32, row_ids=PI32, positions=PI64, tokens=PI32,
     prompt_len=PI32, settings=PI32, drafts=PI32, num_drafted=PI64, draft_rows=None, columns=None, stride_row=I32,
     token_stride=I32, setting_stride=I32, draft_stride=I32, vocab=I32, first_id=I32, num_columns=I32, max_len=I32, width=I32,
     BLOCK=1024)
case("cut_ngrams_kernel", "cut_ngrams", 4, draft_ids=PI32, draft_len=PI32, num_tokens=PI32, tokens=PI32, prompt_len=PI32,
     settings=PI32, token_stride=I32, setting_stride=I32, draft_stride=I32, max_len=I32, width=I32, BLOCK=1024)
case("mask_rows_kernel", "constrain", 1, row_ids=PI32, states=PI32, classes=PI32, drafts=PI32, num_drafted=PI64, draft_rows=None,
     tables=PI32, symbols=PI32, starts=PI32, out_rows=PI32, draft_stride=I32, num_tokens=I32, width=I32)
case("constrain_drafts_kernel", "constrain", 1, draft_ids=PI32, draft_len=PI32, states=PI32, classes=PI32, tables=PI32,
     masks=PI32, symbols=PI32, starts=PI32, draft_stride=I32, mask_stride=I32, num_tokens=I32, width=I32)
case("advance_states_kernel", "advance_states", 1, states=PI32, classes=PI32, log=PI32, live=PI32, tables=PI32, masks=PI32,
     symbols=PI32, starts=PI32, mask_stride=I32, num_tokens=I32, width=I32, STOPPED=1, FAILED=3)
for _drafts in (None, PI32):
    case(f"mark_undecided_kernel drafts {_drafts}", "undecided", 1, target_ids=PI32, row_ids=PI32, states=PI32, classes=PI32,
         drafts=_drafts, num_drafted=_drafts and PI64, draft_rows=None, tables=PI32, symbols=PI32, starts=PI32,
         draft_stride=I32, num_tokens=I32, width=I32, UNDECIDED=-2, NOT_EXPANDED=-3)
case("hold_undecided_kernel", "undecided", 4, states=PI32, tables=PI32, live=PI32, log=PI32, log_stride=I32, LANES=128,
     num_rows=I32, HELD=4, AFTER_DRAFT=5, NOT_EXPANDED=-3)
for _stages in (1, 4):
    case(f"cutoff_kernel {_stages} stages", "cutoff", 32, logits=PF32, row_ids=PI32, temperature=PF32, top_k=PI32, top_p=PF32,
         min_p=PF32, listed=PF32, out_cutoff=PF32, stride_row=I32, vocab=I32, MAX_PASSES=10, STAGES=_stages, DEPTH=8,
         BLOCK=4096)
case("softcap_kernel", "softcap", 8, logits=PF32, count=I32, CAP=30.0, BLOCK=4096)
case("log_normaliser_kernel", "log_normaliser", 16, logits=PF32, out=PF32, stride_row=I32, vocab=I32, BLOCK=4096)
case("sample_kernel fp32, a part", "sample", 16, logits=PF32, row_ids=PI32, positions=PI64, keys=PI64, temperature=PF32,
     cutoff=PF32, out_ids=PI32, out_scores=PF32, out_tops=PF32, stride_row=I32, vocab=I32, first_id=I32, ACC="fp32",
     BLOCK=4096)
for _mass in (False, True):
    _given = PF32 if _mass else None
    case(f"threshold_masses_kernel mass {_mass}", "threshold_masses", 8, logits=PF32, low=PI32, top=_given, temperature=_given,
         out=PF32, stride_row=I32, vocab=I32, shift=I32, MASS=_mass, BLOCK=1024)

CASES.seldom |= {
    "argmax_kernel bf16, map *i32",
    "cutoff_kernel 1 stages",
}
