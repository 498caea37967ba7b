"""logit_bias: what a row adds to the logits of single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchspec.batch.logit_rule import LogitRows, LogitRule, asked
from batchspec.batch.slot_field import SlotField
from batchspec.records import MAX_LOGIT_BIAS

if TYPE_CHECKING:
    from batchspec.batch.device_batch import DeviceBatch

IDS, BIAS = "bias_ids", "bias"
"""int32 [R, MAX_LOGIT_BIAS] tokens whose logits are biased, -1 where unused; float32 [R, MAX_LOGIT_BIAS] the bias of each."""


def add_bias(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Add the row's bias to the logits of its biased tokens, in place."""
    ids, bias = rows.options[IDS][at.row_ids].long(), rows.options[BIAS][at.row_ids].to(logits.dtype)
    biased = logits if map_ids is None else logits.new_zeros((len(ids), rows.vocab_size))
    if at.tokens is not None:
        ids = ids - at.tokens.start
    inside = (ids >= 0) & (ids < biased.shape[1])
    # Unused entries add 0, each to a different token: hundreds of atomic additions to one address would run one after another.
    spread = torch.arange(ids.shape[1], device=ids.device) % biased.shape[1]
    biased.scatter_add_(1, torch.where(inside, ids, spread), torch.where(inside, bias, 0))
    if map_ids is not None:
        logits.add_(biased[:, map_ids.long()])


RULE = LogitRule(
    asked("logit_bias"), add_bias, of_drafters=True,
    state={
        IDS: SlotField(width=MAX_LOGIT_BIAS, initial=-1, begin=lambda r, _: [token for token, _ in r.sampling.logit_bias]),
        BIAS: SlotField(
            width=MAX_LOGIT_BIAS, dtype=torch.float32, begin=lambda r, _: [bias for _, bias in r.sampling.logit_bias]
        ),
    },
)
