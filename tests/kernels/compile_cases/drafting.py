"""The variants in which the engine launches the kernels of `kernels/drafting`."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("drafting")
case = CASES.add

for _k in (1, 2, 5):
    case(f"prepare_chain_draft_inputs_kernel K={_k}", "prepare_chain_draft_inputs", 1, first_ids=PI32, num_tokens=PI32, WIDTH=_k,
         PAGE_SIZE=16, LANES=4 if _k == 5 else 1)
for _match in (None, PI32):
    case(f"ngram_lookup_kernel match {_match}", "ngram_lookup", 8, num_tokens=PI32, match_len=_match, MIN_NGRAM=2, MAX_NGRAM=6,
         LANES=4, BLOCK=2048)
case("corpus_lookup_kernel", "corpus_lookup", 1, num_tokens=PI32, which=PI32, table=PI64, corpus=PI32, corpus_len=I32,
     LENGTHS=0b1010100, MAX_NGRAM=6, PAST_LANES=8, LANES=8)
for _confidence in (None, PI32):
    case(f"select_drafts_kernel confidence {_confidence}", "select_drafts", 1, head_ids=PI32, lookup_ids=PI32, lookup_len=PI32,
         head_counts=PF32, lookup_counts=PF32, picked=PI32, head_confidence=_confidence, confidence=_confidence, HEAD_BINS=32,
         LOOKUP_BINS=32, LANES=8)
case("update_acceptance_kernel", "select_drafts", 4, num_tokens=PI32, head_ids=PI32, lookup_ids=PI32, lookup_len=PI32,
     picked=PI32, head_prior=PF32, lookup_prior=PF32, head_counts=PF32, lookup_counts=PF32, totals=PI64, memory="fp32", LANES=8,
     MATCH_LENS=16, BLOCK=64)
for _width in (1, 5, 16):
    case(f"prepare_block_draft_inputs_kernel S={_width}", "prepare_block_draft_inputs", 1, num_tokens=PI32, out_start=PI32,
         out_seen=PI64, draft_len=I32, WIDTH=_width, LANES={1: 1, 5: 8, 16: 16}[_width], PAGE_SIZE=16)
for _dtype, _map_ids, _heat, _state, _token, _sure, _gate in (
    ("bf16", None, None, None, None, None, None), ("bf16", PI32, PF32, PF32, PF32, PI32, None),
    ("fp32", PI32, None, PF32, None, PI32, None), ("bf16", None, PF32, None, None, PI32, None),
    ("bf16", None, PF32, None, None, PI32, "*bf16"), ("fp32", None, None, None, None, None, PF32),
):
    case(f"walk_candidates_kernel {_dtype} map {_map_ids}, temperature {_heat}, sure {_state} {_token} {_sure}, gate {_gate}",
         "walk_candidates", 4, scores=PF32, ids=PI64, prev=PI32, w1=f"*{_dtype}", w2=f"*{_dtype}", gate=_gate, map_ids=_map_ids,
         temperature=_heat, sure_of_state=_state, sure_of_token=_token, out_confidence=_sure, RANK=256, LANES=256, COUNT=16,
         CANDIDATES=16)
for _dtype in ("bf16", "fp32", "fp64"):
    case(f"keep_states_kernel {_dtype}", "keep_states", 4, states=f"*{_dtype}", row_ids=PI32, positions=PI64, slot_mapping=PI64,
         out_states=f"*{_dtype}", out_positions=PI64, states_stride=I32, WIDTH=20480, PLACES=8, BLOCK=1024)
for _dtype, _channels, _taps in (("bf16", 5120, 2), ("bf16", 4096, 3), ("fp32", 96, 2), ("fp64", 96, 1)):
    case(f"block_conv_kernel {_dtype}, {_channels} channels, {_taps} taps", "block_conv", 4, x=f"*{_dtype}", delta=f"*{_dtype}",
         base=f"*{_dtype}", out=f"*{_dtype}", num_tokens=I32, block=I32, delta_stride=I32, CHANNELS=_channels, GROUP=16,
         TAPS=_taps, TOKENS=4, LANES=512, ACC="fp64" if _dtype == "fp64" else "fp32")
for _dtype in ("fp32", "bf16", "fp16", "fp64"):
    _acc, _values = "fp64" if _dtype == "fp64" else "fp32", f"*{_dtype}"
    for _positions in (None, PI64):
        case(f"eagle_head_input_kernel {_dtype}, positions {_positions}", "eagle_head_input", 2, token_ids=PI32,
             row_ids=None if _positions is None else PI32, positions=_positions, hidden=_values, embedding=_values,
             embedding_norm=_values, hidden_norm=_values, out=_values, EPS=1e-5, WIDTH=576, BLOCK=1024, ACC=_acc)
    case(f"gather_last_accepted_kernel {_dtype}, no residual", "gather_last_accepted", 4, q=_values, residual=None,
         slot_mapping=None, num_tokens=PI32, out_q=_values, out_residual=None, out_slots=None, Q_WIDTH=576, WIDTH=0, BLOCK=1024)
    case(f"prepare_parallel_draft_inputs_kernel {_dtype}", "prepare_parallel_draft_inputs", 2, num_tokens=PI32, hidden=_values,
         mask_hidden=_values, out_hidden=_values, K=5, WIDTH=576, BLOCK=1024, PAGE_SIZE=16)
    case(f"gather_last_accepted_kernel {_dtype}", "gather_last_accepted", 4, q=_values, residual=_values, num_tokens=PI32,
         out_q=_values, out_residual=_values, out_slots=PI64, Q_WIDTH=1536, WIDTH=576, BLOCK=2048)
