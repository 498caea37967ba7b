"""Every kernel compiles for sm_90 on a machine without a GPU, in the variants that the wrappers launch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# case: module, kernel, types of the arguments in order (a value, not a type, is a constant), warps
I32, I64, PI32, PI64, PF32 = "i32", "i64", "*i32", "*i64", "*fp32"
CASES: dict[str, tuple[str, str, dict[str, object], int]] = {}


def _case(name: str, module: str, warps: int, **arguments: object) -> None:
    CASES[name] = (module, name.split(" ")[0], arguments, warps)


for _dtype in ("fp32", "bf16", "fp16", "fp64"):
    _acc = "fp64" if _dtype == "fp64" else "fp32"
    for _map in (None, PI32, PI64):
        _case(f"argmax_kernel {_dtype}, map {_map}", "argmax", 32, logits=f"*{_dtype}", map_ids=_map, out_ids=PI32,
              out_top=f"*{_dtype}" if _map is None else None, stride_row=I32, out_stride=I32, vocab=I32, FLAG=_map is None,
              ACC=_acc, BLOCK=4096)  # fmt: skip
    _case(f"soft_cross_entropy_kernel {_dtype}", "soft_cross_entropy", 8, logits=f"*{_dtype}", probs=f"*{_acc}",
          weights=f"*{_acc}", best_ids=PI64, out_loss=f"*{_acc}", out_hits=f"*{_acc}", vocab=I32, ACC=_acc,
          BLOCK=4096)  # fmt: skip
    _case(
        f"rope_train_kernel {_dtype}",
        "rope_train",
        4,
        x=f"*{_dtype}",
        cos=f"*{_acc}",
        sin=f"*{_acc}",
        out=f"*{_dtype}",
        num_heads=I32,
        length=I32,
        HEADS=9,
        D=64,
        HALF=32,
        ACC=_acc,
        ROWS=32,
    )
    _case(
        f"swiglu_train_kernel {_dtype}",
        "swiglu_train",
        8,
        gate=f"*{_dtype}",
        up=f"*{_dtype}",
        out=f"*{_dtype}",
        count=I32,
        ACC=_acc,
        BLOCK=2048,
    )
    _case(f"swiglu_train_backward_kernel {_dtype}", "swiglu_train", 8, gate=f"*{_dtype}", up=f"*{_dtype}", grad=f"*{_dtype}",
          out_gate=f"*{_dtype}", out_up=f"*{_dtype}", count=I32, ACC=_acc, BLOCK=2048)  # fmt: skip
    _case(f"sample_kernel {_dtype}", "sample", 16, logits=f"*{_dtype}", row_ids=PI32, positions=PI64, keys=PI64,
          temperature=PF32, cutoff=f"*{_acc}", out_ids=PI32, out_scores=None, out_tops=None, stride_row=I32, vocab=I32,
          first_id=I32, ACC=_acc, BLOCK=4096)  # fmt: skip
    _case(f"add_gumbel_noise_kernel {_dtype}", "add_gumbel_noise", 4, logits=f"*{_dtype}", row_ids=PI32, positions=PI64,
          keys=PI64, temperature=PF32, cutoff=f"*{_acc}", map_ids=None if _dtype == "bf16" else PI64, stride_row=I32, vocab=I32,
          ACC=_acc,
          BLOCK=1024)  # fmt: skip
    for _drafts, _map in ((PI32, None), (None, PI64)):
        _case(f"constrain_logits_kernel {_dtype}, map {_map}", "constrain", 8, logits=f"*{_dtype}", row_ids=PI32, states=PI32,
              classes=PI32, drafts=_drafts, num_drafted=None if _drafts is None else PI64, draft_rows=None, map_ids=_map,
              positions=_drafts and PI64, min_tokens=_drafts and PI32, stop_ids=_drafts and PI32,
              tables=PI32, masks=PI32, symbols=PI32, starts=PI32, stride_row=I32, draft_stride=I32, mask_stride=I32, vocab=I32,
              first_id=I32, num_tokens=I32, width=I32, num_stop_ids=I32, BLOCK=2048, BLOCKS=8)  # fmt: skip
    _case(f"kv_write_kernel {_dtype}", "kv_write", 4, k=f"*{_dtype}", v=f"*{_dtype}", kv=f"*{_dtype}", scales=None,
          slot_mapping=PI64, k_stride_t=I32, k_stride_h=I32, v_stride_t=I32, v_stride_h=I32, kv_stride_part=I64,
          kv_stride_slot=I32, NUM_HEADS=3, HEAD_DIM=64, HEADS=4, DIM=64, INTERPRETED=False)  # fmt: skip
_STEP_SIZES = {"num_tokens": I32, "length": I32, "step_stride": I32, "scale": "fp32", "HEADS": 9, "KEY_HEADS": 3, "D": 64,
        "LANES": 64,
        "TOKENS": 16}  # fmt: skip
for _dtype in ("bf16", "fp16"):
    _values = f"*{_dtype}"
    _case(
        f"draft_step_attention_kernel {_dtype}",
        "draft_step_attention",
        4,
        q=_values,
        causal=_values,
        causal_lse=PF32,
        step_k=_values,
        step_v=_values,
        out=_values,
        out_lse=PF32,
        steps=I32,
        **_STEP_SIZES,
    )
    _case(
        f"draft_step_queries_backward_kernel {_dtype}",
        "draft_step_attention",
        4,
        q=_values,
        grad=_values,
        out=_values,
        lse=PF32,
        step_k=_values,
        step_v=_values,
        grad_q=_values,
        steps=I32,
        **_STEP_SIZES,
    )
    _case(
        f"draft_step_keys_backward_kernel {_dtype}",
        "draft_step_attention",
        4,
        q=_values,
        grad=_values,
        out=_values,
        lse=PF32,
        step_k=_values,
        step_v=_values,
        out_k=_values,
        out_v=_values,
        **_STEP_SIZES,
    )
_case("mask_rows_kernel", "constrain", 1, row_ids=PI32, states=PI32, classes=PI32, drafts=PI32, num_drafted=PI64, draft_rows=None,
      tables=PI32, symbols=PI32, starts=PI32, out_rows=PI32, draft_stride=I32, num_tokens=I32, width=I32)  # fmt: skip
_case("constrain_drafts_kernel", "constrain", 1, draft_ids=PI32, draft_len=PI32, states=PI32, classes=PI32, tables=PI32,
      masks=PI32, symbols=PI32, starts=PI32, draft_stride=I32, mask_stride=I32, num_tokens=I32, width=I32)  # fmt: skip
_case("advance_states_kernel", "constrain", 1, states=PI32, classes=PI32, tokens=PI32, kept=PI32, live=PI32, tables=PI32,
      symbols=PI32, starts=PI32, stride_row=I32, num_tokens=I32, width=I32)  # fmt: skip
for _drafts in (None, PI32):
    _case(f"mark_waiting_kernel drafts {_drafts}", "waiting", 1, target_ids=PI32, row_ids=PI32, states=PI32, classes=PI32,
          drafts=_drafts, num_drafted=_drafts and PI64, draft_rows=None, tables=PI32, symbols=PI32, starts=PI32,
          draft_stride=I32, num_tokens=I32, width=I32, WAIT=-2, NOT_EXPANDED=-3)  # fmt: skip
_case("park_waiting_kernel", "waiting", 4, states=PI32, tables=PI32, live=PI32, log=PI32, log_stride=I32, LANES=128,
      num_rows=I32, WAITING=4, NOT_EXPANDED=-3)  # fmt: skip
for _tokens in (1, 5):
    _case(
        f"prepare_verify_inputs_kernel S={_tokens}",
        "prepare_verify_inputs",
        1,
        tokens=PI32,
        num_tokens=PI32,
        limit=PI32,
        live=PI32,
        page_table=PI32,
        out_ids=PI32,
        out_draft_len=PI32,
        out_positions=PI64,
        out_slot_mapping=PI64,
        out_kv_len=PI32,
        token_stride=I32,
        max_tokens=I32,
        max_pages=I32,
        WIDTH=_tokens,
        PAGE_SIZE=16,
        LANES=1 if _tokens == 1 else 8,
    )
for _k in (1, 2, 5):
    _case(
        f"prepare_chain_draft_inputs_kernel K={_k}",
        "prepare_chain_draft_inputs",
        1,
        first_ids=PI32,
        num_tokens=PI32,
        live=PI32,
        page_table=PI32,
        out_ids=PI32,
        out_draft_len=PI32,
        out_positions=PI64,
        out_slot_mapping=PI64,
        out_kv_len=PI32,
        num_rows=I32,
        ids_stride=I32,
        max_tokens=I32,
        max_pages=I32,
        WIDTH=_k,
        PAGE_SIZE=16,
        LANES=4 if _k == 5 else 1,
    )
for _rows in (2, 256):
    _case(
        f"compute_slot_mapping_kernel R={_rows}",
        "slot_mapping",
        4,
        start=PI32,
        q_len=PI32,
        page_table=PI32,
        out_cu_seqlens_q=PI32,
        out_row_ids=PI32,
        out_positions=PI64,
        out_slot_mapping=PI64,
        num_rows=I32,
        num_flat_tokens=I32,
        max_pages=I32,
        PAGE_SIZE=16,
        ROWS=_rows,
        BLOCK=128,
    )
_case("group_slot_mapping_kernel", "group_slot_mapping", 1, cu_seqlens_q=PI32, kv_len=PI32, positions=PI64, page_table=PI32,
      out_slot_mapping=PI64, num_rows=I32, num_tokens=I32, max_pages=I32, PAGE_SIZE=16, BLOCK=128, PDL=True)  # fmt: skip
for _match in (None, PI32):
    _case(f"ngram_lookup_kernel match {_match}", "ngram_lookup", 8, tokens=PI32, num_tokens=PI32, live=PI32, draft_ids=PI32,
          draft_len=PI32, match_len=_match, stride_row=I32, draft_stride=I32, max_draft_len=I32, growth=I32, width=I32,
          MIN_NGRAM=2, MAX_NGRAM=6,
          LANES=4, BLOCK=2048)  # fmt: skip
_case("corpus_lookup_kernel", "corpus_lookup", 1, tokens=PI32, num_tokens=PI32, live=PI32, which=PI32, table=PI64, corpus=PI32,
      draft_ids=PI32, draft_len=PI32, match_len=PI32, stride_row=I32, draft_stride=I32, max_draft_len=I32, growth=I32, width=I32,
      num_entries=I32, corpus_len=I32, LENGTHS=0b1010100, MAX_NGRAM=6, PAST_LANES=8, LANES=8)  # fmt: skip
_case("select_drafts_kernel", "select_drafts", 1, head_ids=PI32, lookup_ids=PI32, lookup_len=PI32, match_len=PI32,
      head_counts=PF32, lookup_counts=PF32, live=PI32, draft_ids=PI32, draft_len=PI32, picked=PI32, head_stride=I32,
      lookup_stride=I32, draft_stride=I32, head_width=I32, width=I32, LANES=8)  # fmt: skip
_case("update_acceptance_kernel", "select_drafts", 4, tokens=PI32, num_tokens=PI32, live=PI32, accepted_len=PI32, head_ids=PI32,
      lookup_ids=PI32, lookup_len=PI32, match_len=PI32, picked=PI32, head_prior=PF32, lookup_prior=PF32, head_counts=PF32,
      lookup_counts=PF32, totals=PI64, num_rows=I32, token_stride=I32, head_stride=I32, lookup_stride=I32, head_width=I32,
      width=I32, num_match_lens=I32, memory="fp32", LANES=8, MATCH_LENS=16, BLOCK=64)  # fmt: skip
for _rates in (None, PF32):
    for _k in (0, 4, 64):
        _case(f"accept_kernel K={_k}, rates {_rates}", "accept", 1, draft_ids=PI32, draft_len=PI32, target_ids=PI32,
              cu_seqlens_q=PI32, stop_ids=PI32, limit=PI32, rates=_rates, keys=PI64, tokens=PI32, num_tokens=PI32, live=PI32,
              finish=PI32, out_accepted_len=PI32, out_log=PI32, draft_stride=I32, token_stride=I32, max_tokens=I32,
              K=_k, NUM_STOPS=3, LANES=max(2, 2 * _k), STOP_LANES=4, WAIT_ID=-2)  # fmt: skip
for _nodes, _depth, _lanes, _levels in ((61, 6, 64, 8), (3, 1, 4, 2)):
    _case(f"prepare_tree_inputs_kernel S={_nodes}", "prepare_tree_inputs", 2, parents=PI32, num_tokens=PI32, live=PI32,
          page_table=PI32, out_positions=PI64, out_slot_mapping=PI64, out_ancestors=PI64, out_kv_len=PI32, parents_stride=I32,
          max_pages=I32,
          NODES=_nodes, DEPTH=_depth, PAGE_SIZE=16, LANES=_lanes)  # fmt: skip
    for _deepest in (False, True):
        _case(f"find_accepted_path_kernel S={_nodes}, deepest {_deepest}", "find_accepted_path", 1, ids=PI32, parents=PI32,
              target_ids=PI32, draft_len=PI32, out_path=PI32, out_flat_ids=PI64, out_draft_ids=PI32, ids_stride=I32,
              parents_stride=I32,
              draft_stride=I32, NODES=_nodes, DEPTH=_depth, TAKE_DEEPEST=_deepest, LANES=_lanes, LEVELS=_levels)  # fmt: skip
for _dtype in ("fp32", "fp64"):
    _values = f"*{_dtype}"
    for _parents, _map, _more in ((1, PI64, True), (10, PI64, True), (10, None, False)):
        _next = (_values, PI32, PI64, PI32, PI64) if _more else (None,) * 5
        _case(f"expand_tree_kernel {_dtype}, {_parents} parents, more {_more}", "expand_tree", 4 if _parents == 10 else 1,
              best=_values, norm=_values, ids=PI64, map_ids=_map, scores=_values, node_ids=PI32, ancestors=PI64,
              all_scores=_values, all_ids=PI32, all_parents=PI32, out_scores=_next[0], out_node_ids=_next[1],
              out_ancestors=_next[2], out_token_ids=_next[3], out_parent_index=_next[4], num_nodes=I32, first_node_id=I32,
              first_bit=I32, PARENTS=_parents, BRANCHES=10, LOG_SCORES=_dtype == "fp32",
              LANES=128 if _parents == 10 else 16)  # fmt: skip
    _case(f"rerank_tree_kernel {_dtype}", "rerank_tree", 8, scores=_values, ids=PI32, parents=PI32, out_ids=PI32,
          out_parents=PI32, scratch=PI32, ids_stride=I32, parents_stride=I32, NUM_NODES=510, NUM_KEPT=60, LANES=512,
          OTHERS=16)  # fmt: skip
for _word, _width in (("i8", 1024), ("i16", 1024), ("i32", 192), ("i64", 8)):
    _case(f"kv_move_kernel {_word}", "kv_move", 4, kv=f"*{_word}", tree_slots=PI64, path=PI32, chain_slots=PI64,
          accepted_len=PI32, stride_part=I64, NODES=61, DEPTH=6, WIDTH=_width, LEVELS=8, BLOCK=256)  # fmt: skip
for _dtype in ("bf16", "fp32"):
    _case(f"kv_gather_kernel {_dtype}", "kv_gather", 8, kv="*fp8e4nv", scales=PF32, slots=PI64, out_k=f"*{_dtype}",
          out_v=f"*{_dtype}", num_rows=I32, kv_stride_part=I64, NUM_HEADS=8, HEAD_DIM=128, ROWS=8, BLOCK=1024,
          INTERPRETED=False)  # fmt: skip
for _word in ("i8", "i16", "i32", "i64"):
    _case(f"move_rows_kernel {_word}", "move_rows", 4, state=f"*{_word}", src_ids=PI32, dst_ids=PI32, stride_row=I32, width=I32,
          BLOCK=1024)  # fmt: skip
for _dtype in ("fp32", "bf16", "fp16", "fp64"):
    _acc, _values = "fp64" if _dtype == "fp64" else "fp32", f"*{_dtype}"
    for _residual, _aux in ((None, None), (_values, None), (_values, _values)):
        _case(f"norm_kernel {_dtype}, residual {_residual}, aux {_aux}", "norm", 2, hidden=_values, residual=_residual,
              weight=_values, out=_values, out_aux=_aux, hidden_stride=I32, residual_stride=I32, out_stride=I32, aux_stride=I32,
              EPS=1e-5, WIDTH=576, BLOCK=1024, ACC=_acc)  # fmt: skip
    _case(f"norm_kernel {_dtype}, weight in fp32", "norm", 2, hidden=_values, residual=_values,
              weight=PF32, out=_values, out_aux=None, hidden_stride=I32, residual_stride=I32, out_stride=I32, aux_stride=I32,
              EPS=1e-5, WIDTH=576, BLOCK=1024, ACC=_acc)  # fmt: skip
    for _positions in (None, PI64):
        _case(f"eagle_head_input_kernel {_dtype}, positions {_positions}", "eagle_head_input", 2, token_ids=PI32,
              row_ids=None if _positions is None else PI32, positions=_positions, hidden=_values, embedding=_values,
              embedding_norm=_values, hidden_norm=_values, out=_values, token_stride=I32, hidden_stride=I32, out_stride=I32,
              max_len=I32, num_ids=I32, EPS=1e-5, WIDTH=576, BLOCK=1024, ACC=_acc)  # fmt: skip
    _case(
        f"gather_last_accepted_kernel {_dtype}, no residual",
        "gather_last_accepted",
        4,
        q=_values,
        residual=None,
        cu_seqlens_q=PI32,
        accepted_len=PI32,
        positions=PI64,
        num_tokens=PI32,
        live=PI32,
        out_q=_values,
        out_residual=None,
        out_positions=PI64,
        out_kv_len=PI32,
        num_flat_tokens=I32,
        q_stride=I32,
        residual_stride=I32,
        out_q_stride=I32,
        out_residual_stride=I32,
        Q_WIDTH=576,
        WIDTH=0,
        BLOCK=1024,
    )
    _case(
        f"prepare_parallel_draft_inputs_kernel {_dtype}",
        "prepare_parallel_draft_inputs",
        2,
        tokens=PI32,
        num_tokens=PI32,
        live=PI32,
        page_table=PI32,
        hidden=_values,
        mask_hidden=_values,
        out_ids=PI32,
        out_hidden=_values,
        out_positions=PI64,
        out_slot_mapping=PI64,
        out_kv_len=PI32,
        out_draft_len=PI32,
        mask_id=I32,
        token_stride=I32,
        max_tokens=I32,
        max_pages=I32,
        K=5,
        WIDTH=576,
        BLOCK=1024,
        PAGE_SIZE=16,
    )
    _case(f"gather_last_accepted_kernel {_dtype}", "gather_last_accepted", 4, q=_values, residual=_values, cu_seqlens_q=PI32,
          accepted_len=PI32, positions=PI64, num_tokens=PI32, live=PI32, out_q=_values, out_residual=_values,
          out_positions=PI64, out_kv_len=PI32,
          num_flat_tokens=I32, q_stride=I32, residual_stride=I32, out_q_stride=I32, out_residual_stride=I32, Q_WIDTH=1536,
          WIDTH=576,
          BLOCK=2048)  # fmt: skip
    _case(f"rope_write_kernel {_dtype}, no queries", "rope_write", 2, qkv=_values, positions=PI64, freqs=PF32, q_norm=_values,
          k_norm=_values, out_q=_values, kv=_values, scales=None, slot_mapping=PI64, qkv_stride=I32, kv_stride_part=I64, EPS=1e-6,
          FACTOR=1.0, NUM_HEADS=0, NUM_KV_HEADS=8, HALF=64, ROTARY_HALF=64,
          INTERLEAVED=False, HEADS=8, BLOCKS_PER_PROGRAM=2, LANES=64, ACC=_acc, INTERPRETED=False)  # fmt: skip
    for _gelu in (0.0, 1.6):
        _case(f"silu_and_mul_kernel {_dtype}, gelu {_gelu}", "activation", 8, gate_up=_values, out=_values, stride=I32,
              WIDTH=14336, BLOCK=2048, GELU=_gelu, ACC=_acc)  # fmt: skip
    for _gains, _blocks in ((None, 1), (_values, 1), (None, 6)):
        _case(
            f"rope_write_kernel {_dtype}, norms {_gains}, {_blocks} blocks",
            "rope_write",
            2,
            qkv=_values,
            positions=PI64,
            freqs=PF32,
            q_norm=_gains,
            k_norm=_gains,
            out_q=_values,
            kv=_values,
            scales=None,
            slot_mapping=PI64,
            qkv_stride=I32,
            kv_stride_part=I64,
            EPS=1e-6,
            FACTOR=1.0,
            NUM_HEADS=32,
            NUM_KV_HEADS=8,
            HALF=64,
            ROTARY_HALF=64,
            INTERLEAVED=False,
            HEADS=8,
            BLOCKS_PER_PROGRAM=_blocks,
            LANES=64,
            ACC=_acc,
            INTERPRETED=False,
        )
    for _rotary_half, _interleaved in ((32, False), (32, True), (64, True)):
        _case(f"rope_write_kernel {_dtype}, {_rotary_half} pairs, interleaved {_interleaved}", "rope_write", 2, qkv=_values,
              positions=PI64, freqs=PF32, q_norm=_values, k_norm=_values, out_q=_values, kv=_values, scales=None,
              slot_mapping=PI64, qkv_stride=I32, kv_stride_part=I64, EPS=1e-6, FACTOR=1.0, NUM_HEADS=32, NUM_KV_HEADS=8, HALF=64,
              ROTARY_HALF=_rotary_half, INTERLEAVED=_interleaved, HEADS=8, BLOCKS_PER_PROGRAM=1, LANES=64,
              ACC=_acc, INTERPRETED=False)  # fmt: skip
for _dtype, _gains, _blocks in (("bf16", "*bf16", 1), ("bf16", None, 6), ("fp64", None, 1)):
    _acc, _values = "fp64" if _dtype == "fp64" else "fp32", f"*{_dtype}"
    _case(f"rope_write_kernel {_dtype} to e4m3, norms {_gains}, {_blocks} blocks", "rope_write", 2, qkv=_values, positions=PI64,
          freqs=PF32, q_norm=_gains, k_norm=_gains, out_q=_values, kv="*u8", scales=PF32, slot_mapping=PI64, qkv_stride=I32,
          kv_stride_part=I64, EPS=1e-6, FACTOR=1.0, NUM_HEADS=32, NUM_KV_HEADS=8, HALF=64, ROTARY_HALF=64, INTERLEAVED=False,
          HEADS=8, BLOCKS_PER_PROGRAM=_blocks, LANES=64, ACC=_acc, INTERPRETED=False)  # fmt: skip
    if _blocks == 1:
        _case(f"kv_write_kernel {_dtype} to e4m3", "kv_write", 4, k=_values, v=_values, kv="*u8", scales=PF32, slot_mapping=PI64,
              k_stride_t=I32, k_stride_h=I32, v_stride_t=I32, v_stride_h=I32, kv_stride_part=I64, kv_stride_slot=I32,
              NUM_HEADS=3, HEAD_DIM=64, HEADS=4, DIM=64, INTERPRETED=False)  # fmt: skip
for _op, _dtype, _tma, _m, _n, _warps, _split, _even in (
    ("linear", "bf16", True, 128, 256, 8, False, True), ("linear", "bf16", True, 128, 256, 8, True, True),
    ("linear", "bf16", False, 64, 128, 4, True, False), ("linear", "fp32", False, 32, 64, 4, True, True),
    ("swiglu", "bf16", True, 128, 128, 8, True, True), ("swiglu", "bf16", False, 64, 64, 4, False, True),
    ("norm_linear", "bf16", True, 64, 64, 4, False, True), ("norm_swiglu", "bf16", False, 64, 64, 4, False, False),
):  # fmt: skip
    _ptr, _norm, _gated = f"*{_dtype}", _op.startswith("norm"), _op.endswith("swiglu")
    _x, _w = (f"tensordesc<{_dtype}[{rows}, 64]>" if _tma else _ptr for rows in (_m, _n))
    _case(f"linear_kernel {_op} {_dtype}, TMA {_tma}, split {_split}", "linear", _warps, x=_x, w=_w,
          bias=_ptr, norm=_ptr if _norm else None,
          residual=_ptr if _op == "linear" else None, out=_ptr, partials=PF32 if _split else None,
          arrived=PI32 if _split else None, num_tokens=I32, n=I32, k=I32, units_per_program=I32, stride_x=I32, stride_w=I32,
          stride_out=I32, eps="fp32", BLOCK_M=_m, BLOCK_N=_n, BLOCK_K=64, TMA=_tma, EVEN_K=_even, GATED=_gated, SPLIT=_split,
          INTERPRETED=False)  # fmt: skip
for _out, _tma, _m, _n, _warps, _segments, _split, _gated in (
    ("bf16", True, 64, 64, 4, 2, True, False), ("fp32", False, 256, 128, 8, 1, False, False),
    ("bf16", False, 128, 128, 8, 2, False, False), ("bf16", True, 128, 128, 8, 1, False, True),
):  # fmt: skip
    _x, _w = (f"tensordesc<bf16[{rows}, 64]>" if _tma else "*bf16" for rows in (_m, _n))
    _case(f"ordered_kernel bf16, out {_out}, {_segments} segments, split {_split}, gated {_gated}", "ordered", _warps, x=_x, w=_w,
          bias=None if _gated else "*bf16", out=f"*{_out}", partials=PF32 if _split else None,
          arrived=PI32 if _split else None, num_tokens=I32, n=I32, k=I32, segment_blocks=I32, stride_x=I32, stride_w=I32,
          stride_out=I32, BLOCK_M=_m, BLOCK_N=_n, BLOCK_K=64, SEGMENTS=_segments, SPLIT=_split, GROUP=16, TMA=_tma, EVEN_K=True,
          GATED=_gated, INTERPRETED=False)  # fmt: skip
for _dtype, _tma in (("bf16", True), ("bf16", False), ("fp32", False)):
    _x = f"tensordesc<{_dtype}[64, 64]>" if _tma else f"*{_dtype}"
    for _masks in (None, PI32):
        _case(f"lm_head_kernel {_dtype}, TMA {_tma}, masks {_masks}", "lm_head", 4, x=_x, w=_x, masks=_masks, mask_rows=_masks,
              top=PF32, top_ids=PI32, num_tokens=I32, width=I32, vocab=I32, num_parts=I32, k=I32, stride_x=I32, stride_w=I32,
              mask_stride=I32, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, TMA=_tma, EVEN_K=True, FLAG=True,
              INTERPRETED=False)  # fmt: skip
for _map in (None, PI32, PI64):
    _case(f"first_top_kernel map {_map}", "lm_head", 4, top=PF32, top_ids=PI32, map_ids=_map, out_ids=PI32, out_stride=I32,
          num_parts=I32, FLAG=_map is None, BLOCK=1024)  # fmt: skip
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
):  # fmt: skip
    _fp8 = _stored.startswith("e4m3")
    _dtype = {"e4m3": "bf16", "e4m3 fp32": "fp32"}.get(_stored, _stored)
    _case(
        f"verify_kernel {_stored} D={_dim}, tile {_tile}, window {_window}, grouped {_grouped}, tree {_tree}, early {_early}, "
        f"sinks {_sinks}",
        "verify_attention",
        _warps,
        q=f"*{_dtype}",
        kv="*fp8e4nv" if _fp8 else f"*{_dtype}",
        scales=PF32 if _fp8 else None,
        page_table=PI32,
        positions=PI64,
        cu_seqlens_q=PI32,
        kv_len=PI32,
        row_order=PI32,
        items=PI32,
        num_items=PI32,
        row_parts=PI32,
        ancestors=PI64 if _tree else None,
        tail_start=PI32 if _tree else None,
        sink_logits=PF32 if _sinks else None,
        out=f"*{_dtype}",
        part_out=PF32,
        part_lse=PF32,
        scale="fp32",
        max_pages=I32,
        max_q=I32,
        q_stride_t=I32,
        q_stride_h=I32,
        kv_stride_part=I64,
        kv_stride_page=I32,
        KV_HEADS=8,
        HEADS=4,
        HEAD_DIM=_dim,
        DIM=128 if _dim == 96 else _dim,
        PAGE_SIZE=16,
        WINDOW=_window,
        SINK=4 if _window else 0,
        TILE=_tile,
        BLOCK=_block,
        GROUPED=_grouped,
        WIDE=False,
        INTERPRETED=False,
        EARLY=_early,
    )
for _groups, _part in ((0, 0), (64, 0), (0, 1024), (64, 1024)):
    _case(
        f"split_kv_schedule_kernel groups {_groups}, part {_part}",
        "split_kv_schedule",
        4,
        cu_seqlens_q=PI32,
        kv_len=PI32,
        positions=PI64,
        row_group=PI32,
        group_start=PI32,
        shared_len=PI32,
        out_items=PI32,
        out_group_items=PI32,
        out_counts=PI32,
        out_row_parts=PI32,
        num_rows=I32,
        num_groups=I32,
        num_flat_tokens=I32,
        target=I32,
        group_target=I32,
        chunk=I32,
        min_chunk=I32,
        HEADS=4,
        MAX_Q=4,
        WINDOW=0 if _groups else 512,
        SINK=0 if _groups else 4,
        PAGE_SIZE=16,
        TILE=16,
        BLOCK=64,
        GROUP_TILE=64,
        GROUP_BLOCK=64,
        WAVES=5,
        PART=_part,
        ROWS=128,
        GROUPS=_groups,
        LANES=64,
    )
for _sink_logits in (None, PF32):  # without them one part after another, as where the order is fixed
    _case(
        f"merge_states_kernel sinks {_sink_logits}",
        "merge_states",
        1,
        part_out=PF32,
        part_lse=PF32,
        row_parts=PI32,
        cu_seqlens_q=PI32,
        sink_logits=_sink_logits,
        out="*bf16",
        KV_HEADS=8,
        HEADS=4,
        HEAD_DIM=96,
        DIM=128,
        TILES=4,
        LINES=4,
        PARTS=8 if _sink_logits else 1,
        AHEAD=1 if _sink_logits else 4,
    )
for _stages in (1, 4):
    _case(f"cutoff_kernel {_stages} stages", "cutoff", 32, logits=PF32, row_ids=PI32, temperature=PF32, top_k=PI32, top_p=PF32,
          min_p=PF32, listed=PF32, out_cutoff=PF32, stride_row=I32, vocab=I32, MAX_PASSES=10, STAGES=_stages, DEPTH=8,
          BLOCK=4096)  # fmt: skip
for _wide, _t, _e, _warps in ((False, 16, 16, 8), (True, 32, 64, 4)):
    _case(f"router_kernel fp32 {_wide}", "router", _warps, x="*bf16", w=PF32 if _wide else "*bf16", bias=None, out=PF32,
          num_tokens=I32, rounds=I32, stride_x=I32, NUM_EXPERTS=120, K=1536, BLOCK_T=_t, BLOCK_E=_e, PARTS=8,
          PART_K=32 if _wide else 64, FEW=not _wide, WIDE=_wide, AHEAD=not _wide, INTERPRETED=False)  # fmt: skip
_case("route_kernel", "route", 4, logits=PF32, bias=PF32, live=None, out_ids=PI32, out_weights=PF32, num_tokens=I32, stride=I32,
      NUM_EXPERTS=120, TOP_K=6, SIGMOID=True, NORM=True, TOKENS=4, LANES=128, SLOTS=8)  # fmt: skip
for _tokens, _rows, _sigmoid in ((1, True, False), (8, False, True)):
    _kind = "*bf16" if _rows else None
    _case(f"route_few_kernel {_tokens} tokens, rows {_rows}", "route_few", _tokens, logits=PF32, bias=PF32 if _sigmoid else None,
          live="*u8" if _rows else None, x=_kind, out_ids=PI32, out_weights=PF32, out_pairs=PI32, out_places=PI32,
          out_offsets=PI32, out_units=PI32, out_rows=_kind, out_num_read=PI32 if _rows else None, num_tokens=I32,
          num_units=I32, stride=I32, stride_x=I32, width=I32, NUM_EXPERTS=120, TOP_K=6, SIGMOID=_sigmoid, NORM=True,
          UNIT_PAIRS=16, TOKENS=_tokens, LANES=128, SLOTS=8, BLOCK=4096)  # fmt: skip
_case("list_kernel", "route", 8, expert_ids=PI32, out_pairs=PI32, out_places=PI32, out_offsets=PI32, out_units=PI32,
      out_num_read=PI32, num_pairs=I32, num_units=I32,
      NUM_EXPERTS=120, UNIT_PAIRS=16, LANES=128, BLOCK=2048)  # fmt: skip
for _residual, _gain in ((None, None), ("*bf16", "*bf16"), ("*bf16", PF32)):
    _case(f"combine_kernel residual {_residual}, norm {_gain}", "combine", 8, y="*bf16", weights=PF32, residual=_residual,
          norm=_gain, out="*bf16", out_aux=_residual, residual_stride=I32, out_stride=I32, aux_stride=I32, EPS=1e-5, TOP_K=6,
          WIDTH=1536, BLOCK=2048, ACC="fp32")  # fmt: skip


def _tokens_of(dtype: str, low: int, block_t: int, block_k: int, tma: bool, joined: bool = False) -> dict[str, object]:
    """Types of x16 to x256."""
    kinds: dict[str, object] = {}
    for height in (16, 32, 64, 128, 256):
        kind = f"tensordesc<{dtype}[{height}, {block_k}]>" if tma else f"*{dtype}"
        kinds[f"x{height}"] = kind if low <= height <= block_t or (joined and height < 64) else None
    return kinds


# (dtype, gated, limit, lowest tile, pairs of a unit, rows of W, K block, warps)
for _dtype, _gated, _limit, _low, _t, _n, _k, _warps in (
    ("bf16", True, 7.0, 16, 32, 64, 64, 4), ("bf16", True, None, 32, 128, 128, 64, 8), ("bf16", False, None, 32, 128, 128, 64, 4),
    ("fp32", True, None, 16, 32, 64, 32, 4),
):  # fmt: skip
    _ptr, _tma = f"*{_dtype}", _dtype == "bf16"
    _case(f"experts_plain_kernel {_dtype}, gated {_gated}, {_low} to {_t} pairs", "experts_plain", _warps,
          **_tokens_of(_dtype, _low, _t, _k, _tma), w=f"tensordesc<bf16[{_n}, {_k}]>" if _tma else _ptr,
          bias=_ptr if _gated else None, pairs=PI32, units=PI32, out=_ptr, num_units=I32, num_rows=I32, n=I32, k=I32,
          SCATTER=not _gated, GATED=_gated, LIMIT=_limit, ALPHA=1.702, LOW=_low, BLOCK_T=_t, BLOCK_N=_n, BLOCK_K=_k, GROUP=8,
          TMA=_tma, EVEN_K=_tma, INTERPRETED=False)  # fmt: skip
for _dtype, _parts, _rank, _block, _k in (("bf16", 3, 16, 16, 128), ("bf16", 1, 64, 64, 128), ("fp32", 2, 32, 64, 64)):
    _case(f"lora_shrink_kernel {_dtype}, {_parts} parts, rank {_rank}", "lora_shrink", 4, x=f"*{_dtype}", a=f"*{_dtype}",
          scales=PF32, order=PI32, tiles=PI32, out=PF32, num_places=I32, steps=I32, k=I32, x_stride=I32, PARTS=_parts, RANK=_rank,
          BLOCK_T=_block, BLOCK_K=_k, EVEN=_parts == 3, INTERPRETED=False)  # fmt: skip
    _case(f"lora_expand_kernel {_dtype}, {_parts} parts, rank {_rank}", "lora_expand", 4, h=PF32, b=f"*{_dtype}", scales=PF32,
          order=PI32, tiles=PI32, out=f"*{_dtype}", num_places=I32, splits=I32, out_stride=I32, rows_0=I32, rows_1=I32,
          rows_2=I32, PARTS=_parts, RANK=_rank, BLOCK_T=_block, BLOCK_N=128, INTERPRETED=False)  # fmt: skip
_case("sort_rows_kernel", "sort_rows", 8, x="*bf16", places=PI32, out="*bf16", stride_x=I32, k=I32, SLOTS=4,
      BLOCK=4096)  # fmt: skip
for _one, _scale in ((False, None), (True, None), (True, "fp32")):
    _case(f"quantise_kernel whole {_one}, given {_scale}", "quantise", 8, x="*bf16",
          places=None if _one else PI32, out="*fp8e4nv", out_scales=PF32, given=_scale, num_rows=I32,
          stride=I32, k=I32, SLOTS=1 if _one else 8, WHOLE=_one, GROUP=128, GROUPS=16, INTERPRETED=False)  # fmt: skip
for _gated, _one, _scale in ((False, False, None), (True, True, None), (False, True, "fp32")):
    _case(f"quantise_tokens_kernel gated {_gated}, whole {_one}, given {_scale}", "fp8_tokens", 8, x="*bf16", out="*fp8e4nv",
          out_scales=PF32, given=_scale, num_rows=I32, stride=I32, k=I32, GATED=_gated, GELU=0.0, WHOLE=_one, GROUP=128,
          GROUPS=16, INTERPRETED=False)  # fmt: skip
for _residual, _one, _scale in ((None, False, None), ("*bf16", False, None), ("*bf16", True, None), (None, True, "fp32")):
    _case(f"norm_fp8_kernel residual {_residual}, whole {_one}, given {_scale}", "norm_fp8", 8, hidden="*bf16",
          residual=_residual, weight="*bf16" if _scale is None else PF32, out="*fp8e4nv", out_scales=PF32, out_aux=_residual,
          given=_scale, num_rows=I32, hidden_stride=I32, residual_stride=I32, aux_stride=I32, EPS=1e-5, WIDTH=4000, BLOCK=4096,
          WHOLE=_one, GROUP=128, INTERPRETED=False)  # fmt: skip
# (blocked, gated, quantised, pairs, rows of W, warps, TMA)
for _blocked, _gated, _quantised, _t, _n, _warps, _tma in (
    (True, True, True, 32, 128, 4, True), (True, False, False, 64, 128, 4, True), (True, True, False, 64, 64, 4, True),
    (False, True, False, 16, 128, 4, False),
):  # fmt: skip
    _case(f"experts_fp8_kernel blocked {_blocked}, gated {_gated}, quantised {_quantised}, {_t} pairs", "experts_fp8", _warps,
          **_tokens_of("fp8e4nv", 16, _t, 128, _tma), x_scales=PF32,
          w=f"tensordesc<fp8e4nv[{_n}, 128]>" if _tma else "*fp8e4nv", w_scales=PF32,
          bias=None if _blocked else "*bf16", pairs=PI32, units=PI32, out="*fp8e4nv" if _quantised else "*bf16",
          out_scales=PF32 if _quantised else None, num_units=I32, num_rows=I32, n=I32, k=I32, scale_stride=I32,
          SCATTER=not _gated, GATED=_gated, LIMIT=None, ALPHA=1.702, BLOCKED=_blocked, LOW=16, BLOCK_T=_t,
          BLOCK_N=_n, GROUP=8, TMA=_tma, EVEN_K=_tma, STAGES=4, INTERPRETED=False)  # fmt: skip
# (blocked, split, tokens, rows of W, warps, TMA)
for _blocked, _split, _t, _n, _warps, _tma in (
    (True, True, 64, 64, 4, True), (True, False, 16, 128, 4, True), (False, True, 32, 64, 4, True),
    (True, False, 128, 64, 4, True), (False, False, 64, 128, 4, False), (True, True, 64, 128, 8, True),
):  # fmt: skip
    _case(f"fp8_linear_kernel blocked {_blocked}, split {_split}, {_t} tokens x {_n}, {_warps} warps", "fp8_linear", _warps,
          x=f"tensordesc<fp8e4nv[{_t}, 128]>" if _tma else "*fp8e4nv", x_scales=PF32,
          w=f"tensordesc<fp8e4nv[{_n}, 128]>" if _tma else "*fp8e4nv", w_scales=PF32, bias=None if _blocked else "*bf16",
          out="*bf16", partials=PF32 if _split else None, arrived=PI32 if _split else None, num_tokens=I32, num_rows=I32, n=I32,
          k=I32, split=I32, scale_stride=I32, BLOCKED=_blocked, SPLIT=_split, BLOCK_T=_t, BLOCK_N=_n, GROUP=8, TMA=_tma,
          EVEN_K=_tma, STAGES=4, INTERPRETED=False)  # fmt: skip
# (gated, lowest tile, pairs, rows of W, warps, TMA)
for _gated, _low, _t, _n, _warps, _tma in (
    (True, 16, 64, 64, 4, True), (False, 16, 96, 128, 4, True), (True, 32, 128, 64, 4, True),
    (False, 128, 128, 128, 8, True), (False, 16, 32, 128, 4, False), (True, 16, 16, 64, 4, False), (True, 16, 16, 32, 4, True),
):  # fmt: skip
    _joined = _low < 64 <= _t
    _case(f"experts_mxfp4_kernel gated {_gated}, {_low} to {_t} pairs, {_n} rows, TMA {_tma}", "experts_mxfp4", _warps,
          **_tokens_of("bf16", _low, _t, 128, _tma, _joined),
          w=f"tensordesc<i16[{'2, ' if _gated else ''}{_n}, 32]>" if _tma else "*i16", w_scales=PI32, bias="*bf16", pairs=PI32,
          units=PI32, out="*bf16", num_units=I32, num_rows=I32, n=I32, k=I32, SCATTER=not _gated, GATED=_gated,
          LIMIT=7.0 if _gated else None, ALPHA=1.702, TWO=_n >= (64 if _gated else 32 * _warps), LOW=_low, BLOCK_T=_t,
          JOINED=_joined, BLOCK_N=_n, GROUP=8, TMA=_tma, INTERPRETED=False)  # fmt: skip

for _dim, _tile, _window, _grouped, _warps in ((128, 16, 0, False, 4), (64, 32, 128, False, 4), (128, 64, 0, True, 4)):
    _case(f"ordered_attention_kernel D={_dim}, tile {_tile}, window {_window}, grouped {_grouped}", "ordered_attention", _warps,
          q="*bf16", kv="*bf16", page_table=PI32, positions=PI64, cu_seqlens_q=PI32, kv_len=PI32, row_order=PI32, items=PI32,
          num_items=PI32, row_parts=PI32, sink_logits=PF32 if _window else None, out="*bf16", part_out=PF32, part_lse=PF32,
          scale="fp32", max_pages=I32, max_q=I32, stride=I32, q_stride_t=I32, q_stride_h=I32, kv_stride_part=I64,
          kv_stride_page=I32, KV_HEADS=8, HEADS=4, HEAD_DIM=_dim, DIM=_dim, PAGE_SIZE=16, WINDOW=_window, TILE=_tile, BLOCK=64,
          GROUPED=_grouped, WIDE=False, STRIDED=_window > 0, EARLY=not _window)  # fmt: skip
for _dim, _window, _parted in ((128, 0, True), (64, 128, True), (96, 0, False)):
    _case(f"ordered_prefill_kernel D={_dim}, window {_window}, parted {_parted}", "ordered_prefill", 8, q="*bf16", kv="*bf16",
          page_table=PI32, positions=PI64, cu_seqlens_q=PI32, kv_len=PI32, sink_logits=PF32 if _window else None, out="*bf16",
          scale="fp32", max_pages=I32, num_tiles=I32, q_stride_t=I32, q_stride_h=I32, kv_stride_part=I64, kv_stride_page=I32,
          KV_HEADS=8, HEADS=4, HEAD_DIM=_dim, DIM=128 if _dim > 64 else 64, PAGE_SIZE=16, WINDOW=_window, TILE=128, BLOCK=64,
          PART=1024, PARTED=_parted, WIDE=False)  # fmt: skip

_case("log_normaliser_kernel", "log_normaliser", 16, logits=PF32, out=PF32, stride_row=I32, vocab=I32, BLOCK=4096)
_case("sample_kernel fp32, a part", "sample", 16, logits=PF32, row_ids=PI32, positions=PI64, keys=PI64, temperature=PF32,
      cutoff=PF32, out_ids=PI32, out_scores=PF32, out_tops=PF32, stride_row=I32, vocab=I32, first_id=I32, ACC="fp32",
      BLOCK=4096)  # fmt: skip
for _mass in (False, True):
    _given = PF32 if _mass else None
    _case(f"threshold_masses_kernel mass {_mass}", "threshold_masses", 8, logits=PF32, low=PI32, top=_given, temperature=_given,
          out=PF32, stride_row=I32, vocab=I32, shift=I32, MASS=_mass, BLOCK=1024)  # fmt: skip
_PEERS = {"addresses": PI64, "epochs": PI64, "failed": PI64, "report": PI64, "rank": I32, "spins": I32}
# (ranks, columns of a rank in two shots, residual and norm, copy of the sum)
for _ranks, _share, _norm, _copy in ((2, 0, True, True), (4, 2048, True, False), (8, 1024, False, False), (4, 0, False, False)):
    _sums = {**_PEERS, "num_rows": I32, "out_rows": I32, "num_bytes": I32, "partial_stride": I32, "residual_stride": I32,
             "out_stride": I32, "aux_stride": I32, "EPS": 1e-5, "WIDTH": 8192, "BLOCK": 8192, "RANKS": _ranks, "SHARE": _share,
             "SHARE_BLOCK": max(16, _share), "ACC": "fp32"}  # fmt: skip
    _aux = "*bf16" if _copy else None
    _given = "*bf16" if _norm else None
    _case(f"reduce_norm_kernel bf16, {_ranks} ranks, share {_share}, norm {_norm}", "reduce_norm", 16, partial="*bf16",
          residual=_given, weight=_given, out="*bf16", out_scales=None, out_aux=_aux, given=None, **_sums, WHOLE=False, GROUP=128,
          INTERPRETED=False)  # fmt: skip
    for _one, _scale in ((False, None), (True, "fp32")) if _norm else ():
        _case(f"reduce_norm_kernel bf16, {_ranks} ranks, share {_share}, FP8 whole {_one}", "reduce_norm", 16, partial="*bf16",
              residual="*bf16", weight="*bf16", out="*fp8e4nv", out_scales=PF32, out_aux=_aux, given=_scale, **_sums, WHOLE=_one,
              GROUP=128, INTERPRETED=False)  # fmt: skip
for _ranks, _add, _dtype in ((2, True, "fp32"), (4, False, "i32"), (8, False, "i64"), (2, False, "u8")):
    _case(f"exchange_kernel {_dtype}, {_ranks} ranks, sum {_add}", "exchange", 4, x=f"*{_dtype}", out=f"*{_dtype}", **_PEERS,
          num_values=I32, num_bytes=I32, RANKS=_ranks, SUM=_add, ACC="fp32", BLOCK=1024)  # fmt: skip
for _ranks, _flag in ((2, True), (4, False)):
    _case(f"best_of_ranks_kernel fp32, {_ranks} ranks", "exchange", 4, scores=PF32, ids=PI32, out_ids=PI32, **_PEERS,
          num_rows=I32, num_bytes=I32, RANKS=_ranks, FLAG=_flag, BLOCK=64)  # fmt: skip


def waits_first(name: str, ptx: str) -> None:
    """A program that starts early neither writes nor ends before it has waited for earlier launches."""
    paths = re.findall(r"griddepcontrol\.wait|st\.global|red\.global|atom\.global|\bret;", ptx)
    assert paths[0].startswith("griddepcontrol"), f"{name}: {paths[0]} comes before the wait for earlier launches"


def compile_cases(names: list[str]) -> dict[str, int]:
    """Bytes of the cubin of each."""
    from importlib import import_module

    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rooms = {path.stem: path.parent.name for path in (ROOT / "kernels").glob("*/*.py")}
    sizes = {}
    for name in names:
        module, kernel, arguments, warps = CASES[name]
        function = getattr(import_module(f"batchspec.kernels.{rooms[module]}.{module}"), kernel)
        arguments |= {"PDL": True} if "PDL" in function.arg_names else {}
        signature, constants = {}, {}
        for argument, kind in arguments.items():
            is_type = isinstance(kind, str) and argument != "ACC"
            signature[argument] = kind if is_type else "constexpr"
            if not is_type:
                constants[argument] = {"fp32": tl.float32, "fp64": tl.float64}.get(str(kind), kind)
        assert list(signature) == function.arg_names, f"{name}: the kernel's arguments are {function.arg_names}"
        source = ASTSource(fn=function, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        if "PDL" in arguments and not arguments.get("EARLY"):
            waits_first(name, compiled.asm["ptx"])
        sizes[name] = len(compiled.asm["cubin"])
    return sizes


@pytest.fixture(scope="module")
def cubin_bytes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """One process without the interpreter, and with an empty cache so that each case is really compiled."""
    mine = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params["name"] for item in mine if isinstance(item, pytest.Function)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__, json.dumps(asked)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes: dict[str, int] = json.loads(done.stdout)
    return sizes


def with_dtype(name: str, dtype: str) -> str:
    return re.sub(r"\b(fp32|bf16|fp16|fp64)\b", dtype, name)


def seldom(name: str) -> bool:
    """Compiled with -m slow alone: fp16 and fp32 where bf16 takes the same branches, fp64, which is interpreted, and `SELDOM`."""
    if re.search(r"\b(fp16|fp64)\b", name) or name in SELDOM:
        return True
    alike = with_dtype(name, "bf16")
    return alike != name and alike in CASES and constants_of(alike) == constants_of(name)


def constants_of(name: str) -> dict[str, object]:
    """What a kernel branches on, up to the type of its values."""
    _, _, arguments, _ = CASES[name]
    return {key: with_dtype(kind, "bf16") if isinstance(kind, str) else kind for key, kind in arguments.items()}


SELDOM = frozenset({
    "argmax_kernel bf16, map *i32", "first_top_kernel map *i32", "move_rows_kernel i16", "move_rows_kernel i32",
    "kv_move_kernel i16", "cutoff_kernel 1 stages",
    "accept_kernel K=0, rates *fp32", "accept_kernel K=4, rates *fp32", "accept_kernel K=64, rates None",
    "rope_write_kernel bf16 to e4m3, norms None, 6 blocks",
    "rope_write_kernel bf16, norms None, 1 blocks", "rope_write_kernel bf16, norms *bf16, 1 blocks",
    "rope_write_kernel bf16, 32 pairs, interleaved False", "rope_write_kernel bf16, 64 pairs, interleaved True",
    "linear_kernel linear bf16, TMA True, split False", "linear_kernel linear bf16, TMA True, split True",
    "linear_kernel linear bf16, TMA False, split True", "linear_kernel swiglu bf16, TMA False, split False",
    "verify_kernel bf16 D=128, tile 16, window 0, grouped False, tree False, early False, sinks False",
    "verify_kernel bf16 D=128, tile 64, window 0, grouped True, tree False, early True, sinks False",
    "verify_kernel bf16 D=96, tile 64, window 0, grouped True, tree False, early False, sinks False",
    "verify_kernel bf16 D=64, tile 16, window 0, grouped False, tree False, early True, sinks False",
    "verify_kernel fp32 D=64, tile 16, window 512, grouped False, tree False, early False, sinks False",
    "verify_kernel bf16 D=64, tile 64, window 128, grouped False, tree False, early True, sinks True",
    "verify_kernel e4m3 D=128, tile 64, window 0, grouped True, tree False, early True, sinks False",
    "verify_kernel e4m3 D=128, tile 16, window 0, grouped False, tree False, early True, sinks False",
    "experts_mxfp4_kernel gated True, 32 to 128 pairs, 64 rows, TMA True",
    "experts_mxfp4_kernel gated False, 128 to 128 pairs, 128 rows, TMA True",
    "fp8_linear_kernel blocked True, split False, 128 tokens x 64, 4 warps",
    "fp8_linear_kernel blocked True, split True, 64 tokens x 128, 8 warps",
    "reduce_norm_kernel bf16, 2 ranks, share 0, FP8 whole True", "reduce_norm_kernel bf16, 4 ranks, share 2048, FP8 whole False",
    "norm_fp8_kernel residual None, whole False, given None", "norm_fp8_kernel residual *bf16, whole True, given None",
})  # fmt: skip
"""Variants whose branches other variants reach: each value of each constant that a kernel branches on is compiled every time."""
assert CASES.keys() >= SELDOM
assert {CASES[name][1] for name in CASES if not seldom(name)} == {kernel for _, kernel, _, _ in CASES.values()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if seldom(name) else ()) for name in CASES])
def test_kernel_compiles_for_hopper(name: str, cubin_bytes: dict[str, int]) -> None:
    assert cubin_bytes[name] > 1000


if __name__ == "__main__":
    print(json.dumps(compile_cases(json.loads(sys.argv[1]))))
