"""From the router's logits: the k experts of each token, their weights, and the work list of the grouped products.

    softmax   experts: the k largest logits. Weights: softmax over all E experts; with norm_topk over the k chosen ones, which
              equals the softmax over all divided by the sum of the k
    sigmoid   s = 1 / (1 + exp(-logit)). Experts: the k largest s + bias. Weights: s; with norm_topk divided by their sum, to
              which some models add sum_eps
    groups    with sigmoid: experts are chosen from the best of G groups of E / G neighbours; the score of a group is the sum of
              its two largest s + bias, and of groups with equal scores the first is better
    scale     a factor of all weights

With factors, one for each expert, the weights are multiplied by them in the end.

Of experts with equal scores the lowest id is chosen. A token's slots are sorted by weight before its factor, largest first; equal
weights by id, lowest first. NaN counts as -inf, so every token gets k different experts. Dead tokens get no expert. `choose.py`
chooses.

For few tokens one launch does everything (`route_few.py`). For more, a launch has a program of one warp per token, and
`list_pairs.py` makes the lists. Bound by launch latency; at prefill sizes by instructions.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.choose import choose
from batchspec.kernels.moe.list_pairs import launch_lists
from batchspec.kernels.moe.route_few import is_few, launch_few
from batchspec.kernels.moe.units import FIELDS, SIZE_STEP, Routing, max_units

Scoring = Literal["softmax", "sigmoid"]
MAX_EXPERTS, MAX_TOP_K = 512, 32


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits, bias, factors, live, out_ids, out_weights, num_tokens, stride, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, NORM: tl.constexpr, SUM_EPS: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):
    """Program t chooses the experts of token t."""
    tokens = tl.program_id(0) + tl.arange(0, 1)
    await_earlier(PDL)
    ids, weights, slots = choose(
        logits, bias, factors, live, tokens, num_tokens, stride, NUM_EXPERTS, TOP_K, SIGMOID, NORM, SUM_EPS, SCALE, GROUPS,
        TOP_GROUPS, LANES, SLOTS
    )
    pairs = tokens.to(tl.int64)[:, None] * TOP_K + slots
    used = (tokens < num_tokens)[:, None] & (tl.arange(0, SLOTS) < TOP_K)[None, :]
    tl.store(out_ids + pairs, ids, mask=used)
    tl.store(out_weights + pairs, weights, mask=used)


def route(
    logits: Tensor, top_k: int, *, scoring: Scoring = "softmax", norm_topk: bool, sum_eps: float = 0.0, scale: float = 1.0,
    groups: tuple[int, int] = (1, 1), bias: Tensor | None = None, factors: Tensor | None = None, unit_pairs: int,
    largest_first: bool = False, live: Tensor | None = None, out_num_read: Tensor | None = None,
    rows_of: Tensor | None = None, interpret: bool = False,
) -> Routing:
    """Experts, weights and the work list of T tokens; see the module's docstring.

    logits        fp32 or bf16 [T, E], E up to 512 (on a CPU also fp64)  rows may be slices of wider rows
    top_k         number of experts per token, up to 32
    norm_topk     the weights of a token are made to sum to 1
    sum_eps       added to the sum by which norm_topk divides them; with softmax 0
    scale         factor of the weights
    groups        number of groups of experts, and of the best ones, from which a token's experts are chosen; with softmax (1, 1)
    bias          fp32 [E], added to the sigmoid scores to choose experts, not to the weights; None with softmax
    factors       fp32 [E] or None: the weights of each expert are multiplied by its factor
    unit_pairs    maximum number of pairs of a unit: the tile over pairs (block_t) of the grouped products
    largest_first True: in `Routing.units`, experts are sorted by the number of pairs of their first unit, in steps of SIZE_STEP,
                  largest first, then by id. False: by id. No result of a product depends on it
    live          bool [T] False for dead tokens, whose results are not used: they go through no expert; None: no token is dead
    out_num_read  int32 [1] that gets the number of experts that have tokens, or None
    rows_of       any float dtype [T, H], or None. For few tokens on a GPU, `Routing.rows` gets what `sort_rows` would return
                  for it, from the same launch; else it is None. Rows may be slices of wider rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, num_experts = logits.shape
    check("route: logits", logits, (num_tokens, num_experts), torch.float32, torch.bfloat16, torch.float64, rows=True)
    if not (1 <= top_k <= min(num_experts, MAX_TOP_K) and num_experts <= MAX_EXPERTS):
        raise ValueError(
            f"route: top_k is {top_k} of {num_experts} experts; must be 1 to {MAX_TOP_K} and at most the number of experts, "
            f"which is at most {MAX_EXPERTS}"
        )
    _check_groups(groups, num_experts, top_k, scoring)
    if scoring == "softmax" and (bias is not None or sum_eps):
        raise ValueError("route: a bias and sum_eps are for sigmoid scores; softmax takes none")
    if bias is not None:
        check("route: bias", bias, (num_experts,), torch.float32)
    if factors is not None:
        check("route: factors", factors, (num_experts,), torch.float32)
    if live is not None:
        check("route: live", live, (num_tokens,), torch.bool)
    if out_num_read is not None:
        check("route: out_num_read", out_num_read, (1,), torch.int32)
    if rows_of is not None:
        check("route: rows_of", rows_of, (num_tokens, rows_of.shape[1]), *FLOATS, rows=True)
    if not (logits.is_cuda or interpret):
        found = route_reference(
            logits, top_k, scoring=scoring, norm_topk=norm_topk, sum_eps=sum_eps, scale=scale, groups=groups, bias=bias,
            factors=factors, unit_pairs=unit_pairs, largest_first=largest_first, live=live,
        )
        if out_num_read is not None:
            out_num_read.copy_(num_read(found))
        return found
    num_pairs, num_units = num_tokens * top_k, max_units(num_tokens, top_k, num_experts, unit_pairs)
    few = is_few(num_tokens, top_k)
    routing = Routing(
        expert_ids=logits.new_empty(num_tokens, top_k, dtype=torch.int32),
        weights=logits.new_empty(num_tokens, top_k, dtype=torch.float32),
        pairs=logits.new_empty(num_pairs, dtype=torch.int32),
        places=logits.new_empty(num_pairs, dtype=torch.int32),
        offsets=logits.new_empty(num_experts + 1, dtype=torch.int32),
        units=logits.new_empty(num_units, FIELDS, dtype=torch.int32),
        unit_pairs=unit_pairs,
        rows=rows_of.new_empty(num_pairs, rows_of.shape[1]) if few and rows_of is not None else None,
    )
    live = None if live is None else live.view(torch.uint8)
    if few:  # an expert has at most FEW_TOKENS pairs, one SIZE_STEP: largest first is by id too
        launch_few(
            logits, rows_of, bias, factors, live, routing, out_num_read, sigmoid=scoring == "sigmoid", norm_topk=norm_topk,
            sum_eps=sum_eps, scale=scale, groups=groups,
        )
        return routing
    launch_choice(
        logits, bias, factors, live, routing, sigmoid=scoring == "sigmoid", norm_topk=norm_topk, sum_eps=sum_eps, scale=scale,
        groups=groups,
    )
    launch_lists(routing, num_experts, out_num_read, largest_first=largest_first, dead=live is not None)
    return routing


def launch_choice(
    logits: Tensor, bias: Tensor | None, factors: Tensor | None, live: Tensor | None, routing: Routing, *, sigmoid: bool,
    norm_topk: bool, sum_eps: float, scale: float, groups: tuple[int, int],
) -> None:
    """Start the kernel that fills experts and weights of `routing`, with the arguments of `route`, which has checked them."""
    (num_tokens, num_experts), top_k = logits.shape, routing.expert_ids.shape[1]
    route_kernel[(num_tokens,)](
        logits, bias, factors, live, routing.expert_ids, routing.weights, num_tokens, logits.stride(0), NUM_EXPERTS=num_experts,
        TOP_K=top_k, SIGMOID=sigmoid, NORM=norm_topk, SUM_EPS=sum_eps, SCALE=scale, GROUPS=groups[0], TOP_GROUPS=groups[1],
        LANES=max(16, triton.next_power_of_2(num_experts)), SLOTS=triton.next_power_of_2(top_k),
        num_warps=1, **launch_args(logits),  # a warp needs no barriers between the reductions of its token
    )


def route_reference(
    logits: Tensor, top_k: int, *, scoring: Scoring = "softmax", norm_topk: bool, sum_eps: float = 0.0, scale: float = 1.0,
    groups: tuple[int, int] = (1, 1), bias: Tensor | None = None, factors: Tensor | None = None, unit_pairs: int,
    largest_first: bool = False, live: Tensor | None = None,
) -> Routing:
    """`route` in plain torch, without limits on E and k; computed in fp32, or in fp64 if the logits are fp64."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide = wide.masked_fill(wide.isnan(), float("-inf"))
    scores = wide.sigmoid() if scoring == "sigmoid" else wide
    choices = _in_best_groups(scores if bias is None else scores + bias, *groups)
    ids = torch.sort(choices, dim=-1, descending=True, stable=True).indices[:, :top_k]
    if bias is not None:
        ids = ids.sort(-1).values
        ids = ids.gather(1, torch.sort(scores.gather(1, ids), dim=-1, descending=True, stable=True).indices)
    if scoring == "softmax":
        scores = (wide - wide.max(-1, keepdim=True).values).exp()
    weights = scores.gather(1, ids)
    if norm_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + sum_eps)
    elif scoring == "softmax":
        weights = weights / scores.sum(-1, keepdim=True)
    weights = weights * scale
    if factors is not None:
        weights = weights * factors[ids]
    if live is not None:
        dead = ~live[:, None]
        ids, weights = ids.masked_fill(dead, logits.shape[1]), weights.masked_fill(dead, 0.0)
    return lists_reference(ids, weights, logits.shape[1], unit_pairs, largest_first=largest_first)


def _check_groups(groups: tuple[int, int], num_experts: int, top_k: int, scoring: Scoring) -> None:
    count, best = groups
    if groups == (1, 1):
        return
    size = num_experts // max(count, 1)
    if scoring != "sigmoid" or not 1 <= best <= count or num_experts % count or size < 2 or top_k > best * size:
        raise ValueError(
            f"route: the best {best} of {count} groups of {num_experts} experts, for {top_k} experts per token with {scoring}; "
            "groups need sigmoid, equal sizes of two or more, and enough experts in the best ones"
        )


def _in_best_groups(choices: Tensor, count: int, best: int) -> Tensor:
    """choices [T, E], with -inf for experts outside the best groups."""
    if count == 1:
        return choices
    by_group = choices.unflatten(1, (count, -1))
    order = torch.sort(by_group.topk(2, -1).values.sum(-1), dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :best], True)
    found: Tensor = by_group.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
    return found


def lists_reference(
    expert_ids: Tensor, weights: Tensor, num_experts: int, unit_pairs: int, *, largest_first: bool = False
) -> Routing:
    """A Routing from experts and weights [T, k] that were already chosen, in plain torch. Does not synchronise.

    expert_ids  num_experts in every slot of a dead token
    """
    (num_tokens, top_k), device = expert_ids.shape, expert_ids.device
    by_expert = torch.sort(expert_ids.flatten().int(), stable=True)
    offsets = torch.searchsorted(by_expert.values, torch.arange(num_experts + 1, dtype=torch.int32, device=device)).int()
    counts, order = offsets.diff(), torch.arange(num_experts, device=device)
    if largest_first:
        sizes = (counts.clamp(max=unit_pairs) + SIZE_STEP.value - 1) // SIZE_STEP.value
        order = torch.sort(sizes, descending=True, stable=True).indices
    own_units = ((counts + unit_pairs - 1) // unit_pairs)[order]
    ends = own_units.cumsum(0)
    index = torch.arange(max_units(num_tokens, top_k, num_experts, unit_pairs), device=device)
    rank = torch.searchsorted(ends, index, right=True).clamp(max=num_experts - 1)
    expert = order[rank]
    of_expert = index - ends[rank] + own_units[rank]
    units = torch.stack((expert, offsets[expert], counts[expert], of_expert), 1) * (index < ends[-1])[:, None]
    pairs = by_expert.indices
    return Routing(expert_ids.int(), weights, pairs.int(), pairs.argsort().int(), offsets, units.int(), unit_pairs)


def num_read(routing: Routing) -> Tensor:
    """int64 []: the number of experts that have tokens. Does not synchronise."""
    return (routing.offsets.diff() > 0).sum()
