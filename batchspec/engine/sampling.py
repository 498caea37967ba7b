"""From logits to the target's own choice at each flat position. One reduction, fp32 logits (fp64 for a fp64 model).

Logits that hold NaN or +inf, or no finite value, give NO_TOKEN; -inf is legitimate.
A draw depends on the logits, the row's key and the position alone, never on the batch around it. Order: penalties,
temperature, top-k, top-p (on the distribution that top-k left), min-p (relative to the likeliest token), then the
Gumbel-argmax over the kept set. Legend: T flat positions, R rows, V vocabulary, K draft_len.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.batch.device_batch import SEEN_OUTPUT, SEEN_PROMPT_OR_OUTPUT, DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.kernels.sampling.argmax import NO_TOKEN, argmax
from batchspec.kernels.sampling.cutoff import cutoff
from batchspec.kernels.sampling.sample import sample


@dataclass(frozen=True, slots=True)
class Places:
    """Which row and position each of T logit rows belongs to.

    row_ids    int32 [T]
    positions  int64 [T] position of the token being drawn
    drafts     int32 [R, K] and place int32 [T]: the row's draft tokens before the place count as seen; None in prefill
    lines      int64 [T] line of `drafts` that holds the place's own: of a tree's nodes; None: that of its row
    """

    row_ids: Tensor
    positions: Tensor
    drafts: Tensor | None = None
    place: Tensor | None = None
    lines: Tensor | None = None


def choose(logits: Tensor, places: Places, rows: DeviceBatch, mode: SamplingMode, *, fast_argmax: bool = True) -> Tensor:
    """The target's choice at each place, int32 [T], NO_TOKEN where there is none.

    Changes `logits` [T, V] where penalties ask for it. On a GPU nothing synchronises. `fast_argmax=False` takes the general
    greedy path (softmax, then top-k) for comparison.
    """
    if mode.penalties:
        apply_penalties(logits, places, rows)
    if mode.min_tokens:
        forbid_stop_ids(logits, places, rows)
    if mode.random:
        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        low = cutoffs(logits, places.row_ids, rows) if mode.filters else torch.full_like(logits[:, 0], -torch.inf)
        sample(logits, places.row_ids, places.positions, rows.keys, rows.temperature, low, out_ids=out)
        return out
    return greedy_sample(logits, fast=fast_argmax)


def greedy_sample(logits: Tensor, *, fast: bool = True) -> Tensor:
    """The greedy choice at each place, int32 [T], NO_TOKEN where there is none.

    `fast=False` takes it by softmax and top-k, for comparison.
    """
    if not fast:
        ids = torch.softmax(logits, -1).topk(1, dim=-1).indices.flatten()
        return torch.where(logits.amax(-1).isfinite(), ids, NO_TOKEN).int()
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    argmax(logits, out_ids=out, flag_nonfinite=True)
    return out


def apply_penalties(logits: Tensor, places: Places, rows: DeviceBatch) -> None:
    """Repetition penalty (CTRL, arXiv 1909.05858: tokens of prompt and output) and presence penalty (of the output), in place.

    At a place behind drafts the drafts before it count as output: the penalty of a token is the same whether it was
    committed in this round or long ago.
    """
    seen = rows.seen[places.row_ids]
    if places.drafts is not None and places.place is not None:
        lines = places.row_ids if places.lines is None else places.lines
        for j in range(places.drafts.shape[1]):
            ids = places.drafts[:, j][lines].long().unsqueeze(1)
            before = (places.place > j).unsqueeze(1)
            mark = seen.gather(1, ids)
            seen.scatter_(1, ids, torch.where(before, mark | (SEEN_PROMPT_OR_OUTPUT | SEEN_OUTPUT), mark))
    repetition = rows.repetition[places.row_ids].unsqueeze(1).to(logits.dtype)
    presence = rows.presence[places.row_ids].unsqueeze(1).to(logits.dtype)
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    torch.where((seen & SEEN_PROMPT_OR_OUTPUT) > 0, penalised, logits, out=logits)
    logits.sub_(presence * ((seen & SEEN_OUTPUT) > 0))


def forbid_stop_ids(logits: Tensor, places: Places, rows: DeviceBatch) -> None:
    """Stop ids get -inf at places that come before the row's min_tokens, in place."""
    stop_ids = rows.stop_ids[places.row_ids].long()
    early = (places.positions < rows.min_tokens[places.row_ids]).unsqueeze(1) & (stop_ids >= 0)
    ids = stop_ids.clamp(min=0)
    # Unused entries point at id 0: amin keeps its own logit there.
    value = torch.where(early, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, ids, value, "amin")


def cutoffs(logits: Tensor, row_ids: Tensor, rows: DeviceBatch) -> Tensor:
    """Smallest logit of each kept set, [T], in the scale of `logits`: the kept set is every token at or above it.

    All filters keep likeliest tokens, so one number describes what they leave, ties included, whatever a sort does
    with equal values.
    """
    out = torch.empty(logits.shape[0], dtype=logits.dtype, device=logits.device)
    cutoff(logits, row_ids, rows.temperature, rows.top_k, rows.top_p, rows.min_p, out_cutoff=out)
    return out


def mark_output(rows: DeviceBatch, tokens: Tensor, kept: Tensor) -> None:
    """Note committed tokens as seen: tokens int32 [R, S] of which the first `kept` int32 [R] of each row count."""
    for j in range(tokens.shape[1]):
        ids = tokens[:, j].clamp(min=0).long().unsqueeze(1)
        mark = rows.seen.gather(1, ids)
        counts = (kept > j).unsqueeze(1)
        rows.seen.scatter_(1, ids, torch.where(counts, mark | (SEEN_PROMPT_OR_OUTPUT | SEEN_OUTPUT), mark))
