"""bad_words: sequences of tokens that a row never completes. A token is forbidden where it would be the last of one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchspec.batch.logit_rule import LogitRows, LogitRule, asked
from batchspec.batch.slot_field import SlotField
from batchspec.records import MAX_BAD_WORD, MAX_BAD_WORDS, Request

if TYPE_CHECKING:
    from batchspec.batch.device_batch import DeviceBatch

ANY = -1
"""Stands before the first token of a sequence that has fewer than MAX_BAD_WORD."""
STATE = "bad_words"
"""int32 [R, MAX_BAD_WORDS * MAX_BAD_WORD] the rows' sequences, as `line_of`."""


def line_of(request: Request) -> list[int]:
    """The row's sequences one after another, each of MAX_BAD_WORD numbers that end with its tokens."""
    return [number for ids in request.sampling.bad_words for number in (*(ANY,) * (MAX_BAD_WORD - len(ids)), *ids)]


def completed_by(request: Request, tokens: Sequence[int]) -> Iterator[int]:
    """The tokens that would complete one of the row's sequences after its output `tokens`."""
    for *before, last in request.sampling.bad_words:
        if list(tokens[len(tokens) - len(before) :]) == before:
            yield last


def forbid_bad_words(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Tokens that would complete one of the row's sequences get -inf, in place. A sequence lies in the output as a whole."""
    assert map_ids is None, "bad words are the target's alone"
    first_id, newest = 0 if at.tokens is None else at.tokens.start, at.newest_output(rows, MAX_BAD_WORD - 1)
    words = rows.options[STATE][at.row_ids].view(len(newest), -1, MAX_BAD_WORD)  # [T, W, MAX_BAD_WORD]
    before, last = words[..., :-1], words[..., -1].long() - first_id
    matches = ((before == ANY) | (before == newest.unsqueeze(1))).all(2)
    forbidden = matches & (words[..., -1] >= 0) & (last >= 0) & (last < logits.shape[1])
    # Unused entries name column 0: amin keeps its logit there.
    value = torch.where(forbidden, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, torch.where(forbidden, last, 0), value, "amin")


RULE = LogitRule(
    asked("bad_words"), forbid_bad_words, reads_drafts=True, leaves="its bad_words do not forbid",
    forbids=completed_by, name="bad_words",
    state={STATE: SlotField(width=MAX_BAD_WORDS * MAX_BAD_WORD, initial=-1, begin=lambda r, _: line_of(r))},
)
