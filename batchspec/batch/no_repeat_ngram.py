"""no_repeat_ngram: n-grams of a row's output that do not come twice. A token is forbidden where it would complete one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchspec.batch.logit_rule import LogitRows, LogitRule, asked
from batchspec.batch.slot_field import SlotField
from batchspec.kernels.sampling.cut_ngrams import cut_ngrams
from batchspec.kernels.sampling.forbid_ngrams import forbid_ngrams, ngram_masks
from batchspec.kernels.sampling.ngram_search import LISTED, forbidden_reference
from batchspec.records import MAX_LISTED, Request

if TYPE_CHECKING:
    from batchspec.batch.device_batch import DeviceBatch

STATE = "no_repeat_ngram"
"""int32 [R, LISTED + MAX_LISTED] the rows' settings, as `line_of`; 0 for rows without them."""


def line_of(request: Request) -> list[int]:
    """The row's settings as the kernel reads them: n, the window, how many tokens are never forbidden, and these."""
    if (rule := request.sampling.no_repeat_ngram) is None:
        return []
    size, window, listed = rule
    return [size, window, len(listed), *listed]


def completed_by(request: Request, tokens: Sequence[int]) -> Iterable[int]:
    """The tokens that would complete an n-gram of the output `tokens` again."""
    line = line_of(request)
    return forbidden_reference(list(tokens), line) if line else ()


def forbid_repeated(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Tokens that would complete an n-gram of the row's window again get -inf, in place."""
    columns = None
    if map_ids is not None:
        columns = torch.full((rows.vocab_size,), -1, dtype=torch.int32, device=logits.device)
        columns[map_ids.long()] = torch.arange(len(map_ids), dtype=torch.int32, device=logits.device)
    forbid_ngrams(
        logits, at.row_ids, at.positions, rows.tokens, rows.prompt_len, rows.options[STATE], drafts=at.drafts,
        num_drafted=at.num_drafted, draft_rows=at.draft_rows, columns=columns,
        first_id=0 if at.tokens is None else at.tokens.start,
    )


def masks_of(at: LogitRows, rows: DeviceBatch) -> tuple[Tensor, Tensor]:
    """The masks of the same tokens, for a product that applies them itself."""
    return ngram_masks(
        rows.vocab_size, at.row_ids, at.positions, rows.tokens, rows.prompt_len, rows.options[STATE], drafts=at.drafts,
        num_drafted=at.num_drafted, draft_rows=at.draft_rows,
    )


def cut_drafts(rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor) -> None:
    """Drafts that were not chosen from logits end before the first that the rule forbids: it would be rejected. The n-grams that
    a lookup finds are those that must not come twice."""
    cut_ngrams(draft_ids, draft_len, rows.num_tokens, rows.tokens, rows.prompt_len, rows.options[STATE])


RULE = LogitRule(
    asked("no_repeat_ngram"), forbid_repeated, reads_drafts=True, of_drafters=True, masks=masks_of,
    check_drafts=cut_drafts, leaves="its no_repeat_ngram does not forbid", forbids=completed_by,
    name="the n-grams of no_repeat_ngram",
    state={STATE: SlotField(width=LISTED + MAX_LISTED, begin=lambda r, _: line_of(r))},
)
