"""From logits to the target's choice at each flat position. One reduction, fp32 logits (fp64 for a fp64 model).

Logits that hold NaN or +inf, or no finite value, give NO_TOKEN; -inf is legitimate.
A draw depends on the logits, the row's key and the position alone, never on the batch around it. Order: the rules of
`batch/logits.py`, temperature, top-k, top-p (on the distribution that top-k left), min-p (relative to the likeliest token), then
the Gumbel-argmax over the kept set. Legend: T flat positions, R rows, V vocabulary, K draft_len.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.logits import adjust_logits, mark_undecided
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.kernels.sampling.argmax import argmax
from batchspec.kernels.sampling.cutoff import cutoff
from batchspec.kernels.sampling.sample import sample

Greedy = Callable[[Tensor], Tensor]


def choose(logits: Tensor, at: LogitRows, rows: DeviceBatch, mode: SamplingMode, *, greedy: Greedy | None = None) -> Tensor:
    """The target's choice of each row of logits, int32 [T], NO_TOKEN where there is none, UNDECIDED where it cannot be made yet.

    Changes `logits` [T, V] where a rule of `batch/logits.py` asks for it. Does not synchronise on a GPU.

    greedy  chooses tokens in rounds that draw none; None: `greedy_sample`
    """
    adjust_logits(logits, at, rows, mode)
    if mode.random:
        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        low = cutoffs(logits, at.row_ids, rows) if mode.filters else torch.full_like(logits[:, 0], -torch.inf)
        sample(logits, at.row_ids, at.positions, rows.keys, rows.temperature, low, out_ids=out)
    else:
        out = (greedy or greedy_sample)(logits)
    mark_undecided(out, at, rows, mode)
    return out


def greedy_sample(logits: Tensor) -> Tensor:
    """The greedy choice of each row of logits, int32 [T], NO_TOKEN where there is none."""
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    argmax(logits, out_ids=out, flag_nonfinite=True)
    return out


def cutoffs(logits: Tensor, row_ids: Tensor, rows: DeviceBatch) -> Tensor:
    """Smallest logit of each kept set, [T], in the scale of `logits`: the kept set is every token at or above it.

    Every filter keeps the likeliest tokens, so one cutoff describes what they leave, ties included, independently of how a sort
    orders equal values.
    """
    out = torch.empty(logits.shape[0], dtype=logits.dtype, device=logits.device)
    cutoff(logits, row_ids, rows.temperature, rows.top_k, rows.top_p, rows.min_p, out_cutoff=out)
    return out
