"""Error rows that replace the completions of decoded requests. This module does not import torch."""

from __future__ import annotations

from dataclasses import replace

from batchspec.records import Completion, RowError


def error_row(done: Completion, error: RowError) -> Completion:
    """The error row that replaces a completion. It has neither tokens nor text, because they may be wrong or may break the row's
    constraint. Its statistics count the tokens as discarded."""
    stats = done.stats
    if stats is not None:
        stats = replace(stats, num_discarded=stats.num_prefills + stats.num_accepted + stats.num_rounds)
    return Completion(
        request_id=done.request_id, row_index=done.row_index, sample_index=done.sample_index, shard=done.shard, status="error",
        finish_reason="error", prompt_ids=done.prompt_ids, seed=done.seed, predicted_tokens=done.predicted_tokens,
        cached_tokens=done.cached_tokens, stats=stats, error=error,
    )  # fmt: skip
