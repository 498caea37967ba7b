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

The lists are made without atomics: pairs are counted per expert, then each pair is written after the earlier pairs of its expert.
For few tokens one launch does everything (`route_few.py`). For more, a second launch has one program per expert, which counts the
pairs of all experts and writes those of its own; if there can be dead tokens, one more program writes theirs. From MANY_PAIRS on,
where each of these programs would read too many pairs, two launches have one program per block of pairs (`list_many.py`).
Bound by launch latency; at prefill sizes by reading the P expert ids from the L2 cache.
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
from batchspec.kernels.moe.list_many import launch_many
from batchspec.kernels.moe.route_few import is_few, launch_few
from batchspec.kernels.moe.units import FIELDS, SIZE_STEP, Routing, max_units, write_units

Scoring = Literal["softmax", "sigmoid"]
MAX_EXPERTS, MAX_TOP_K = 512, 32
TOKENS = 4  # per program, one per warp
BLOCK = 2048  # pairs per iteration
MANY_PAIRS = 1 << 14  # not measured: an estimate of where eight iterations take as long as one more launch


@triton.jit
def count_pairs(expert_ids, num_pairs, NUM_EXPERTS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The number of pairs of each expert [LANES]; those of dead tokens are not counted."""
    counts = tl.zeros([LANES], tl.int32)
    for base in range(0, num_pairs, BLOCK):
        pair = base + tl.arange(0, BLOCK)
        expert = tl.load(expert_ids + pair, mask=pair < num_pairs, other=NUM_EXPERTS)
        counts += tl.histogram(expert, LANES, mask=expert < NUM_EXPERTS)
    return counts


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits, bias, factors, live, out_ids, out_weights, num_tokens, stride, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, NORM: tl.constexpr, SUM_EPS: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):
    """Chooses experts; `list_kernel` makes the lists afterwards."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    await_earlier(PDL)
    ids, weights, slots = choose(
        logits, bias, factors, live, tokens, num_tokens, stride, NUM_EXPERTS, TOP_K, SIGMOID, NORM, SUM_EPS, SCALE, GROUPS,
        TOP_GROUPS, LANES, SLOTS
    )
    pairs = tokens.to(tl.int64)[:, None] * TOP_K + slots
    used = (tokens < num_tokens)[:, None] & (tl.arange(0, SLOTS) < TOP_K)[None, :]
    tl.store(out_ids + pairs, ids, mask=used)
    tl.store(out_weights + pairs, weights, mask=used)


@triton.jit(do_not_specialize=["num_pairs", "num_units"])
def list_kernel(
    expert_ids, out_pairs, out_places, out_offsets, out_units, out_num_read, num_pairs, num_units,
    NUM_EXPERTS: tl.constexpr, UNIT_PAIRS: tl.constexpr, LARGEST_FIRST: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program e writes the pairs of expert e, program E those of dead tokens; program 0 also writes offsets and units."""
    own = tl.program_id(0)
    await_earlier(PDL)
    counts = count_pairs(expert_ids, num_pairs, NUM_EXPERTS, LANES, BLOCK)
    place = tl.sum(tl.where(tl.arange(0, LANES) < own, counts, 0), 0)
    for base in range(0, num_pairs, BLOCK):
        pair = base + tl.arange(0, BLOCK)
        mine = (tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1) == own).to(tl.int32)
        at = place + tl.cumsum(mine, 0) - 1
        tl.store(out_pairs + at, pair, mask=mine != 0)
        tl.store(out_places + pair, at, mask=mine != 0)
        place += tl.sum(mine, 0)
    if own == 0:
        write_units(counts, out_offsets, out_units, out_num_read, num_units, NUM_EXPERTS, UNIT_PAIRS, LARGEST_FIRST, LANES)


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
    sizes = {"NUM_EXPERTS": num_experts, "LANES": max(16, triton.next_power_of_2(num_experts))}
    route_kernel[(triton.cdiv(num_tokens, TOKENS),)](
        logits, bias, factors, live, routing.expert_ids, routing.weights, num_tokens, logits.stride(0),
        TOP_K=top_k, SIGMOID=scoring == "sigmoid", NORM=norm_topk, SUM_EPS=sum_eps, SCALE=scale, GROUPS=groups[0],
        TOP_GROUPS=groups[1], TOKENS=TOKENS, SLOTS=triton.next_power_of_2(top_k), num_warps=TOKENS, **sizes,
        **launch_args(logits),
    )
    if num_pairs >= MANY_PAIRS:
        launch_many(routing, num_experts, out_num_read, largest_first=largest_first)
        return routing
    list_kernel[(num_experts if live is None else num_experts + 1,)](
        routing.expert_ids, routing.pairs, routing.places, routing.offsets, routing.units, out_num_read, num_pairs, num_units,
        UNIT_PAIRS=unit_pairs, LARGEST_FIRST=largest_first, BLOCK=BLOCK, num_warps=8, **sizes, **launch_args(logits),
    )
    return routing


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
    first = offsets[expert] + (index - ends[rank] + own_units[rank]) * unit_pairs
    count = (offsets[expert + 1] - first).clamp(max=unit_pairs)
    units = torch.stack((expert, first, count, torch.zeros_like(index)), 1) * (index < ends[-1])[:, None]
    pairs = by_expert.indices
    return Routing(expert_ids.int(), weights, pairs.int(), pairs.argsort().int(), offsets, units.int(), unit_pairs)


def num_read(routing: Routing) -> Tensor:
    """int64 []: the number of experts that have tokens. Does not synchronise."""
    return (routing.offsets.diff() > 0).sum()
