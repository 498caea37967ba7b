"""Searches the output of a row for n-grams that would come twice: shared by the kernels that forbid their last tokens and that
cut drafts before these.

    v is forbidden  if the row's newest n-1 tokens and then v are an n-gram of its newest `window` output tokens

Output tokens are the committed ones after the prompt, then the drafts before the position. Tokens that the row lists are never
forbidden. n, the window and the list are the row's own, in `settings`. Few places of a window have the newest token, and fewer
the ones before it, so a program compares backwards and stops when no place is left: usually after two or three reads of the
window, from L2.
Source: vLLM's NoRepeatNGramLogitsProcessor, which runs on the host
(https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/deepseek_ocr.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check

BLOCK = 1024
SIZE, WINDOW, COUNT, LISTED = 0, 1, 2, 3
"""Columns of a row's settings: n, 0 for a row without a rule; the window; how many tokens are listed; the first of them."""


@triton.jit
def token_at(place, first_draft, line, draft_line, max_len, width, mask):
    """The token at a place of prompt, output and drafts; -1 outside of them."""
    token = tl.load(line + place, mask=mask & (place >= 0) & (place < first_draft) & (place < max_len), other=-1)
    if draft_line is not None:
        ahead = place - first_draft
        drafted = tl.load(draft_line + ahead, mask=mask & (ahead >= 0) & (ahead < width), other=-1)
        token = tl.where(ahead >= 0, drafted, token)
    return token


@triton.jit
def completing(first, end, position, own, first_draft, line, draft_line, max_len, width, BLOCK: tl.constexpr):
    """Of the n-grams that begin at `first` and the places after it, before `end`: their last tokens int32 [BLOCK], and which of
    these would complete an n-gram at `position` again. own: the row's settings."""
    size, num_listed = tl.load(own), tl.load(own + 2)  # SIZE, COUNT
    place = first + tl.arange(0, BLOCK)
    same = place < end
    back = size - 2
    left = tl.max(same.to(tl.int32), 0)
    while (back >= 0) & (left > 0):
        newest = token_at(position - size + 1 + back, first_draft, line, draft_line, max_len, width, position > 0)
        same = same & (token_at(place + back, first_draft, line, draft_line, max_len, width, same) == newest)
        left = tl.max(same.to(tl.int32), 0)
        back -= 1
    last = token_at(place + size - 1, first_draft, line, draft_line, max_len, width, same)
    if left > 0:
        for i in range(0, num_listed):
            same = same & (last != tl.load(own + 3 + i))  # LISTED
    return last, same


def check_rows(kernel: str, tokens: Tensor, prompt_len: Tensor, settings: Tensor) -> None:
    """Raises ValueError unless they are as in `forbid_ngrams`."""
    batch = prompt_len.numel()
    check(f"{kernel}: tokens", tokens, (batch, tokens.shape[1]), torch.int32, rows=True)
    check(f"{kernel}: prompt_len", prompt_len, (batch,), torch.int32)
    check(f"{kernel}: settings", settings, (batch, max(LISTED, settings.shape[1])), torch.int32, rows=True)


def forbidden_reference(output: Sequence[int], settings: Sequence[int]) -> set[int]:
    """The tokens that may not follow these output tokens, by a row's settings."""
    size, window, count = settings[SIZE], settings[WINDOW], settings[COUNT]
    if not 0 < size <= len(output):
        return set()
    newest, places = output[len(output) - size + 1 :], range(max(0, len(output) - window), len(output) - size + 1)
    found = {output[i + size - 1] for i in places if output[i : i + size - 1] == newest}
    return found - {*settings[LISTED : LISTED + count]}
