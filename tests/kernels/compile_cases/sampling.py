"""The variants in which the engine launches the kernels of `kernels/sampling`."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("sampling")
case = CASES.add

for _dtype in ("fp32", "bf16", "fp16", "fp64"):
    _acc = "fp64" if _dtype == "fp64" else "fp32"
    for _map in (None, PI32, PI64):
        case(f"argmax_kernel {_dtype}, map {_map}", "argmax", 32, logits=f"*{_dtype}", map_ids=_map,
             out_top=f"*{_dtype}" if _map is None else None, out_total=f"*{_acc}" if _map is None else None,
             out_confidence=None if _map is None else PI32, FLAG=_map is None, ACC=_acc, BLOCK=4096)
    case(f"sample_kernel {_dtype}", "sample", 16, logits=f"*{_dtype}", temperature=PF32, cutoff=f"*{_acc}", out_scores=None,
         out_tops=None, ACC=_acc, BLOCK=4096)
    case(f"add_gumbel_noise_kernel {_dtype}", "add_gumbel_noise", 4, logits=f"*{_dtype}", temperature=PF32, cutoff=f"*{_acc}",
         map_ids=None if _dtype == "bf16" else PI64, ACC=_acc, BLOCK=1024)
    for _drafts, _map in ((PI32, None), (None, PI64)):
        case(f"constrain_logits_kernel {_dtype}, map {_map}", "constrain", 8, logits=f"*{_dtype}", drafts=_drafts,
             num_drafted=None if _drafts is None else PI64, draft_rows=None, map_ids=_map, positions=_drafts and PI64,
             min_tokens=_drafts and PI32, stop_ids=_drafts and PI32, masks=PI32, BLOCK=2048, BLOCKS=8)
    for _drafts, _map in ((PI32, None), (None, PI32)):
        case(f"forbid_ngrams_kernel {_dtype}, columns {_map}", "forbid_ngrams", 4, logits=f"*{_dtype}", mask_rows=None,
             drafts=_drafts, num_drafted=_drafts and PI64, draft_rows=None, columns=_map, BLOCK=1024)
case("group_maxima_kernel", "top_candidates", 4, logits=PF32, out=PF32, GROUP=128, GROUPS=32)
for _groups in (256, 2048):
    case(f"top_candidates_kernel {_groups} groups", "top_candidates", 4, logits=PF32, maxima=PF32, out_values=PF32, out_ids=PI64,
         COUNT=16, LANES=16, GROUP=128, GROUPS=_groups)
case("forbid_ngrams_kernel masks", "forbid_ngrams", 4, logits=PI32, mask_rows=PI32, drafts=PI32, num_drafted=PI64,
     draft_rows=None, columns=None, BLOCK=1024)
case("cut_ngrams_kernel", "cut_ngrams", 4, num_tokens=PI32, BLOCK=1024)
case("mask_rows_kernel", "constrain", 1, drafts=PI32, num_drafted=PI64, draft_rows=None, out_rows=PI32)
case("constrain_drafts_kernel", "constrain", 1, masks=PI32)
case("advance_states_kernel", "advance_states", 1, masks=PI32, STOPPED=1, FAILED=3)
for _drafts in (None, PI32):
    case(f"mark_undecided_kernel drafts {_drafts}", "undecided", 1, drafts=_drafts, num_drafted=_drafts and PI64, draft_rows=None,
         UNDECIDED=-2, NOT_EXPANDED=-3)
case("hold_undecided_kernel", "undecided", 4, LANES=128, HELD=4, AFTER_DRAFT=5, NOT_EXPANDED=-3)
for _stages in (1, 4):
    case(f"cutoff_kernel {_stages} stages", "cutoff", 32, logits=PF32, temperature=PF32, top_k=PI32, top_p=PF32, min_p=PF32,
         listed=PF32, out_cutoff=PF32, MAX_PASSES=10, STAGES=_stages, DEPTH=8, BLOCK=4096)
case("softcap_kernel", "softcap", 8, logits=PF32, CAP=30.0, BLOCK=4096)
case("log_normaliser_kernel", "log_normaliser", 16, logits=PF32, out=PF32, BLOCK=4096)
case("sample_kernel fp32, a part", "sample", 16, logits=PF32, temperature=PF32, cutoff=PF32, out_scores=PF32, out_tops=PF32,
     ACC="fp32", BLOCK=4096)
for _mass in (False, True):
    _given = PF32 if _mass else None
    case(f"threshold_masses_kernel mass {_mass}", "threshold_masses", 8, logits=PF32, low=PI32, top=_given, temperature=_given,
         out=PF32, shift=I32, MASS=_mass, BLOCK=1024)

CASES.seldom |= {
    "argmax_kernel bf16, map *i32",
    "cutoff_kernel 1 stages",
}
