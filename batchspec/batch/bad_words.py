"""bad_words: sequences of tokens that a row never completes. A token is forbidden where it would be the last of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchspec.records import MAX_BAD_WORD, Request

if TYPE_CHECKING:
    from batchspec.batch.device_batch import DeviceBatch
    from batchspec.batch.logits import LogitRows

ANY = -1
"""Stands before the first token of a sequence that has fewer than MAX_BAD_WORD."""
PROMPT = -2
"""Stands for every token of the prompt: a sequence lies in the output as a whole."""


def line_of(request: Request) -> list[int]:
    """The row's sequences one after another, each of MAX_BAD_WORD numbers that end with its tokens."""
    return [number for ids in request.sampling.bad_words for number in (*(ANY,) * (MAX_BAD_WORD - len(ids)), *ids)]


def forbid_bad_words(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Tokens that would complete a sequence after the row's output and the drafts before the position get -inf, in place."""
    assert map_ids is None, "bad words are the target's alone"
    words = rows.bad_words.view(len(rows.bad_words), -1, MAX_BAD_WORD)[at.row_ids]  # [T, W, MAX_BAD_WORD]
    before, last = words[..., :-1], words[..., -1].long()
    matches = ((before == ANY) | (before == _newest(at, rows, MAX_BAD_WORD - 1).unsqueeze(1))).all(2)
    if at.tokens is not None:
        last = last - at.tokens.start
    forbidden = matches & (words[..., -1] >= 0) & (last >= 0) & (last < logits.shape[1])
    # Unused entries name column 0: amin keeps its logit there.
    value = torch.where(forbidden, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, torch.where(forbidden, last, 0), value, "amin")


def _newest(at: LogitRows, rows: DeviceBatch, count: int) -> Tensor:
    """int32 [T, count] the tokens before each position, the newest last; PROMPT for those of the prompt or before it."""
    back = torch.arange(count, 0, -1, device=at.positions.device)
    places = at.positions.unsqueeze(1) - back
    row_ids = at.row_ids.long().unsqueeze(1)
    found = rows.tokens[row_ids, places.clamp(0, rows.tokens.shape[1] - 1)]
    if at.drafts is not None and at.num_drafted is not None and at.drafts.shape[1]:
        drafted = at.num_drafted.unsqueeze(1) - back  # the place among the drafts; negative: committed
        draft_rows = row_ids if at.draft_rows is None else at.draft_rows.long().unsqueeze(1)
        found = torch.where(drafted >= 0, at.drafts[draft_rows, drafted.clamp(0, at.drafts.shape[1] - 1)], found)
    return torch.where(places >= rows.prompt_len.long()[row_ids], found, PROMPT)
