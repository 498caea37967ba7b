"""Cuts each row's drafts before the first that would complete an n-gram of its output again (`ngram_search.py`).

The target would reject such a draft. A lookup proposes them: it continues n-grams that came before.
Bound by latency: one program per draft, which searches as if the drafts before its own were accepted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.sampling.ngram_search import BLOCK, SIZE, check_rows, completing, forbidden_reference


@triton.jit(do_not_specialize=["max_len", "width"])
def cut_ngrams_kernel(
    draft_ids, draft_len, num_tokens, tokens, prompt_len, settings, token_stride, setting_stride, draft_stride, max_len, width,
    BLOCK: tl.constexpr,
):
    row, drafted = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = settings + row * setting_stride
    size = tl.load(own)  # SIZE
    # Another program of the row may have lowered the length: then this one changes nothing, whatever it finds.
    if (size > 0) & (drafted < tl.load(draft_len + row)):
        first_draft = tl.load(num_tokens + row)
        position = first_draft + drafted
        line, draft_line = tokens + row * token_stride, draft_ids + row * draft_stride
        draft = tl.load(draft_line + drafted)
        begin = tl.maximum(tl.load(prompt_len + row), position - tl.load(own + 1))  # WINDOW
        end = position - size + 1
        for first in range(begin, end, BLOCK):
            last, same = completing(first, end, position, own, first_draft, line, draft_line, max_len, width, BLOCK)
            if tl.max((same & (last == draft)).to(tl.int32), 0) > 0:
                tl.atomic_min(draft_len + row, drafted)


def cut_ngrams(
    draft_ids: Tensor, draft_len: Tensor, num_tokens: Tensor, tokens: Tensor, prompt_len: Tensor, settings: Tensor, *,
    interpret: bool = False,
) -> None:
    """Shorten draft_len, in place.

    draft_ids   int32 [R, K]  rows may be slices of wider ones
    draft_len   int32 [R]     how many of them count, before and after
    num_tokens  int32 [R]     committed tokens
    The others as in `forbid_ngrams`. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, width = draft_ids.shape
    check("cut_ngrams: draft_ids", draft_ids, (num_rows, width), torch.int32, rows=True)
    for name, tensor in (("draft_len", draft_len), ("num_tokens", num_tokens), ("prompt_len", prompt_len)):
        check(f"cut_ngrams: {name}", tensor, (num_rows,), torch.int32)
    check_rows("cut_ngrams", tokens, prompt_len, settings)
    if not (draft_ids.is_cuda or interpret):
        cut_ngrams_reference(draft_ids, draft_len, num_tokens, tokens, prompt_len, settings)
    elif num_rows and width:
        cut_ngrams_kernel[(num_rows, width)](
            draft_ids, draft_len, num_tokens, tokens, prompt_len, settings, tokens.stride(0), settings.stride(0),
            draft_ids.stride(0), tokens.shape[1], width, BLOCK=BLOCK, num_warps=4,
        )


def cut_ngrams_reference(
    draft_ids: Tensor, draft_len: Tensor, num_tokens: Tensor, tokens: Tensor, prompt_len: Tensor, settings: Tensor
) -> None:
    """The same, row by row in plain Python."""
    for row, own in enumerate(settings.tolist()):
        if own[SIZE]:
            output = tokens[row, int(prompt_len[row]) : int(num_tokens[row])].tolist()
            for drafted, draft in enumerate(draft_ids[row, : int(draft_len[row])].tolist()):
                if draft in forbidden_reference(output, own):
                    draft_len[row] = drafted
                    break
                output.append(draft)
