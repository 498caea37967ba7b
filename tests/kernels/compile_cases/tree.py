"""The variants in which the engine launches the kernels of `kernels/tree`."""

from __future__ import annotations

from tests.kernels.compile_cases.cases import I32, PI32, PI64, Cases

CASES = Cases("tree")
case = CASES.add

for _nodes, _depth, _lanes, _levels in ((61, 6, 64, 8), (3, 1, 4, 2)):
    case(f"prepare_tree_inputs_kernel S={_nodes}", "prepare_tree_inputs", 2, num_tokens=PI32, out_ancestors=PI64, NODES=_nodes,
         DEPTH=_depth, PAGE_SIZE=16, LANES=_lanes)
    for _deepest in (False, True):
        case(f"find_accepted_path_kernel S={_nodes}, deepest {_deepest}", "find_accepted_path", 1, ids=PI32, out_path=PI32,
             out_flat_ids=PI64, out_draft_ids=PI32, NODES=_nodes, DEPTH=_depth, TAKE_DEEPEST=_deepest, LANES=_lanes,
             LEVELS=_levels)
for _dtype in ("fp32", "fp64"):
    _values = f"*{_dtype}"
    for _parents, _map, _more in ((1, PI64, True), (10, PI64, True), (10, None, False)):
        _next = (_values, PI32, PI64, PI32, PI64) if _more else (None,) * 5
        case(f"expand_tree_kernel {_dtype}, {_parents} parents, more {_more}", "expand_tree", 4 if _parents == 10 else 1,
             best=_values, norm=_values, ids=PI64, map_ids=_map, scores=_values, node_ids=PI32, ancestors=PI64,
             all_scores=_values, all_ids=PI32, all_parents=PI32, out_scores=_next[0], out_node_ids=_next[1],
             out_ancestors=_next[2], out_token_ids=_next[3], out_parent_index=_next[4], first_node_id=I32, first_bit=I32,
             PARENTS=_parents, BRANCHES=10, LANES=128 if _parents == 10 else 16)
    case(f"rerank_tree_kernel {_dtype}", "rerank_tree", 8, scores=_values, ids=PI32, out_parents=PI32, scratch=PI32,
         NUM_NODES=510, NUM_KEPT=60, LANES=512, OTHERS=16)
