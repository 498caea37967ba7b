"""bad_words: sequences of tokens that a row never completes. A token is forbidden where it would be the last of one of them."""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.records import MAX_BAD_WORD, Request

ANY = -1
"""Stands before the first token of a sequence that has fewer than MAX_BAD_WORD."""
PROMPT = -2
"""Stands for every token of the prompt: a sequence lies in the output as a whole."""


def line_of(request: Request) -> list[int]:
    """The row's sequences one after another, each of MAX_BAD_WORD numbers that end with its tokens."""
    return [number for ids in request.sampling.bad_words for number in (*(ANY,) * (MAX_BAD_WORD - len(ids)), *ids)]


def forbid_completions(logits: Tensor, words: Tensor, newest: Tensor, first_id: int = 0) -> None:
    """Tokens that would complete a sequence get -inf, in place.

    logits    [T, V] of the tokens from `first_id` on
    words     int32 [T, MAX_BAD_WORDS * MAX_BAD_WORD] the lines of their rows
    newest    int32 [T, MAX_BAD_WORD - 1] tokens of the output, drafts included, before each position, the newest last; PROMPT for
              those of the prompt or before it
    """
    words = words.view(len(words), -1, MAX_BAD_WORD)  # [T, W, MAX_BAD_WORD]
    before, last = words[..., :-1], words[..., -1].long() - first_id
    matches = ((before == ANY) | (before == newest.unsqueeze(1))).all(2)
    forbidden = matches & (words[..., -1] >= 0) & (last >= 0) & (last < logits.shape[1])
    # Unused entries name column 0: amin keeps its logit there.
    value = torch.where(forbidden, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, torch.where(forbidden, last, 0), value, "amin")
