"""Accept and commit, one launch a round: accepted draft tokens, emitted tokens, and whether the row ends.

y_j is the target's own choice after the last committed token and j draft tokens, j = 0..draft_len:

    a = length of the longest prefix with draft_ids[j] == y_j     emitted = y_0 .. y_a     kept = emitted up to its first stop id

A choice of NO_TOKEN (logits that are not finite) accepts no draft token and is never kept: the row ends there, FAILED, with the
tokens before it. A choice of UNDECIDED (its mask is not known yet) ends the round for the row: the last accepted draft token
counts as the token after the others, and a row without one takes no part in the round. The log says so (HELD_AFTER_DRAFT), for
those who count right drafts.

Lossless if y is a draw from the target's distribution that depends only on prefix and position, whatever the drafter (Leviathan
et al. 2023, arXiv 2211.17192; coupled noise instead of rejection). With `rates`, acceptance is simulated for benchmarks: draft
token j is accepted with probability rates[keys[r] mod N, j] if those before it were, and the row emits the accepted draft tokens.
Bound by launch latency: a few hundred bytes a row, one program each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.sampling.counter_rng import position_words, uniform, uniform_reference

MAX_DRAFT_LEN = 64
STOPPED, FULL, FAILED = 1, 2, 3
"""How a row ends: with a stop id, at its limit, or because the target's logits are not finite."""
HELD = 4
"""The row has not ended; it is held until the host resumes it (`sampling/undecided.py`)."""
HELD_AFTER_DRAFT = 5
"""The same, and its newest token is a draft that the target chose too: one more than `accepted_len` says were right."""
UNDECIDED = -2
"""The token id of a choice that cannot be made yet."""


@triton.jit
def accept_kernel(
    draft_ids, draft_len, target_ids, cu_seqlens_q, stop_ids, limit, rates, keys,
    tokens, num_tokens, live, finish, out_accepted_len, out_log, draft_stride, token_stride, max_tokens,
    num_kinds, K: tl.constexpr, NUM_STOPS: tl.constexpr, LANES: tl.constexpr, STOP_LANES: tl.constexpr, UNDECIDED: tl.constexpr,
    AFTER_DRAFT: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    await_earlier(PDL)
    alive = tl.load(live + row) != 0
    length = tl.load(draft_len + row, mask=alive, other=0)
    num = tl.load(num_tokens + row)
    drafts = tl.load(draft_ids + row * draft_stride + lane, mask=lane < length, other=-1)
    has_choice = lane <= tl.where(alive, length, -1)
    emitted = tl.load(target_ids + tl.load(cu_seqlens_q + row) + lane, mask=has_choice, other=-1)
    fails = has_choice & (emitted < 0)
    if rates is not None:
        key = tl.load(keys + row)
        kind = (key % num_kinds + num_kinds) % num_kinds
        word0, word1 = position_words(key, (num + lane).to(tl.int64))
        agrees = uniform(word0, word1) < tl.load(rates + kind * K + lane, mask=lane < length, other=0.0)
    else:
        agrees = (drafts == emitted) & (emitted >= 0)
    accepted = tl.min(tl.where(agrees & (lane < length), LANES, lane), 0)
    undecided = tl.max(((lane == accepted) & has_choice & (emitted == UNDECIDED)).to(tl.int32), 0)
    accepted -= undecided
    if rates is not None:
        emitted = tl.where(lane < accepted, drafts, emitted)

    stop_lane = tl.arange(0, STOP_LANES)
    stops = tl.load(stop_ids + row * NUM_STOPS + stop_lane, mask=stop_lane < NUM_STOPS, other=-1)
    hits = tl.max(((emitted[:, None] == stops[None, :]) & (stops[None, :] >= 0)).to(tl.int32), 1)
    first_stop = tl.min(tl.where((hits > 0) & (lane <= accepted), lane, LANES), 0)
    kept = tl.minimum(first_stop, accepted) + 1
    first_failure = tl.min(tl.where(fails & (lane <= accepted), lane, LANES), 0)
    failed = first_failure < kept
    kept = tl.minimum(kept, first_failure)
    place = num + lane
    committed = (lane < tl.where(alive, kept, 0)) & (place < max_tokens)
    tl.store(tokens + row * token_stride + place, emitted, mask=committed)

    full = tl.where(num + kept >= tl.load(limit + row), 2, 0)
    ending = tl.where(first_stop <= accepted, 1, full)
    ending = tl.where(failed, 3, ending)
    tl.store(num_tokens + row, num + kept, mask=alive)
    tl.store(finish + row, ending, mask=alive)
    tl.store(live + row, 0, mask=alive & (ending > 0))

    tl.store(out_accepted_len + row, tl.where(alive, tl.maximum(accepted, 0), 0))
    log = out_log + row * (K + 5)
    logged = tl.where(alive, accepted, -1)
    tl.store(log, logged)
    tl.store(log + 1, length)
    tl.store(log + 2, tl.where(alive, kept, 0))
    tl.store(log + 3, tl.where(alive, tl.where((undecided > 0) & (kept > 0) & (ending == 0), AFTER_DRAFT, ending), 0))
    tl.store(log + 4 + lane, tl.where(lane <= logged, emitted, -1), mask=lane <= K)


def accept(
    draft_ids: Tensor,
    draft_len: Tensor,
    target_ids: Tensor,
    cu_seqlens_q: Tensor,
    stop_ids: Tensor,
    limit: Tensor,
    rates: Tensor | None,
    keys: Tensor,
    *,
    tokens: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    finish: Tensor,
    out_accepted_len: Tensor,
    out_log: Tensor,
    interpret: bool = False,
) -> None:
    """Verify a round's draft tokens and commit the accepted ones. Of dead rows only out_accepted_len and out_log are written.

    draft_ids         int32 [R, K]     proposals, K <= 64; rows may be slices of wider ones
    draft_len         int32 [R]        how many of them count, 0..K
    target_ids        int32 [T]        y: those of row r are target_ids[cu_seqlens_q[r] + j], j = 0..draft_len[r]; NO_TOKEN: none,
                                       UNDECIDED: not yet
    cu_seqlens_q      int32 [R+1]
    stop_ids          int32 [R, N]     -1: unused
    limit             int32 [R]        a row with this many tokens ends; draft lengths are capped so that it is not exceeded
    rates             fp32 [N, K] | None  simulated acceptance of each draft token if those before it were accepted, by kind
    keys              int64 [R]        noise key of each row, read with `rates` only
    tokens            int32 [R, L]     in/out: kept tokens are appended; rows may be slices of wider ones
    num_tokens        int32 [R]        in/out: committed tokens
    live              int32 [R]        in/out: 0 once a row is finished
    finish            int32 [R]        out, live rows only: 0 running, 1 a stop id was kept, 2 limit reached, 3 no choice
    out_accepted_len  int32 [R]        a; 0 for dead rows
    out_log           int32 [R, K+5]   a, draft_len, kept, finish, the emitted tokens, then -1; dead rows: -1, 0, 0, 0, -1 ...;
                                       the same for live rows that take no part, except draft_len. Here finish is
                                       HELD_AFTER_DRAFT if the round ended before an UNDECIDED and the row did not end

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, width = draft_ids.shape
    num_stops = stop_ids.shape[1]
    if width > MAX_DRAFT_LEN:
        raise ValueError(f"accept: draft_ids has {width} columns; at most {MAX_DRAFT_LEN} draft tokens a row are supported")
    for name, vector in (
        ("draft_len", draft_len),
        ("limit", limit),
        ("num_tokens", num_tokens),
        ("live", live),
        ("finish", finish),
        ("out_accepted_len", out_accepted_len),
    ):
        check(f"accept: {name}", vector, (num_rows,), torch.int32)
    check("accept: draft_ids", draft_ids, (num_rows, width), torch.int32, rows=True)
    check("accept: target_ids", target_ids, (target_ids.numel(),), torch.int32)
    check("accept: cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), torch.int32)
    check("accept: stop_ids", stop_ids, (num_rows, num_stops), torch.int32)
    check("accept: keys", keys, (num_rows,), torch.int64)
    check("accept: tokens", tokens, (num_rows, tokens.shape[1]), torch.int32, rows=True)
    check("accept: out_log", out_log, (num_rows, width + 5), torch.int32)
    if rates is not None:
        check("accept: rates", rates, (rates.shape[0], width), torch.float32)
    if not (draft_ids.is_cuda or interpret):
        accept_reference(
            draft_ids, draft_len, target_ids, cu_seqlens_q, stop_ids, limit, rates, keys, tokens=tokens, num_tokens=num_tokens,
            live=live, finish=finish, out_accepted_len=out_accepted_len, out_log=out_log,
        )
    elif num_rows:
        accept_kernel[(num_rows,)](
            draft_ids, draft_len, target_ids, cu_seqlens_q, stop_ids, limit, rates, keys,
            tokens, num_tokens, live, finish, out_accepted_len, out_log,
            draft_ids.stride(0), tokens.stride(0), tokens.shape[1], 1 if rates is None else rates.shape[0],
            K=width, NUM_STOPS=num_stops, LANES=max(2, triton.next_power_of_2(width + 1)),
            STOP_LANES=max(2, triton.next_power_of_2(num_stops)), UNDECIDED=UNDECIDED, AFTER_DRAFT=HELD_AFTER_DRAFT, num_warps=1,
            **launch_args(draft_ids),
        )


def accept_reference(
    draft_ids: Tensor,
    draft_len: Tensor,
    target_ids: Tensor,
    cu_seqlens_q: Tensor,
    stop_ids: Tensor,
    limit: Tensor,
    rates: Tensor | None,
    keys: Tensor,
    *,
    tokens: Tensor,
    num_tokens: Tensor,
    live: Tensor,
    finish: Tensor,
    out_accepted_len: Tensor,
    out_log: Tensor,
) -> None:
    """The same in plain torch."""
    width = draft_ids.shape[1]
    lane = torch.arange(width + 1, device=draft_ids.device)
    alive = live != 0
    places = (cu_seqlens_q[:-1, None] + torch.minimum(lane, draft_len[:, None])).clamp_(max=len(target_ids) - 1)
    emitted = target_ids[places]
    fails = (emitted < 0) & (lane <= draft_len[:, None])
    if rates is None:
        agrees = (draft_ids == emitted[:, :width]) & (draft_ids >= 0)
    else:
        agrees = uniform_reference(keys[:, None], num_tokens[:, None] + lane[:width]) < rates[keys % rates.shape[0]]
    accepted = (agrees & (lane[:width] < draft_len[:, None])).cumprod(1).sum(1)
    undecided = emitted.gather(1, accepted[:, None])[:, 0] == UNDECIDED
    accepted -= undecided.long()
    if rates is not None:
        emitted[:, :width] = torch.where(lane[:width] < accepted[:, None], draft_ids, emitted[:, :width])

    is_stop = ((emitted[:, :, None] == stop_ids[:, None, :]) & (stop_ids >= 0)[:, None, :]).any(2)
    first_stop = torch.where(is_stop & (lane <= accepted[:, None]), lane, width + 1).amin(1)
    kept = torch.minimum(first_stop, accepted) + 1
    first_failure = torch.where(fails & (lane <= accepted[:, None]), lane, width + 1).amin(1)
    failed = first_failure < kept
    kept = torch.minimum(kept, first_failure)
    committed = num_tokens[:, None] + lane
    fits = alive[:, None] & (lane < kept[:, None]) & (committed < tokens.shape[1])
    rows, lanes = fits.nonzero(as_tuple=True)
    tokens[rows, committed[rows, lanes]] = emitted[rows, lanes]

    num_tokens += torch.where(alive, kept, 0).to(torch.int32)
    ending = torch.where(first_stop <= accepted, STOPPED, torch.where(num_tokens >= limit, FULL, 0))
    ending = torch.where(failed, FAILED, ending)
    finish.copy_(torch.where(alive, ending, finish))
    live *= ending == 0

    out_accepted_len.copy_(torch.where(alive, accepted.clamp(min=0), 0))
    out_log[:, 0] = torch.where(alive, accepted, -1)
    out_log[:, 1] = torch.where(alive, draft_len, 0)
    out_log[:, 2] = torch.where(alive, kept, 0)
    out_log[:, 3] = torch.where(alive, torch.where(undecided & (kept > 0) & (ending == 0), HELD_AFTER_DRAFT, ending), 0)
    out_log[:, 4:] = torch.where(alive[:, None] & (lane <= accepted[:, None]), emitted, -1)
