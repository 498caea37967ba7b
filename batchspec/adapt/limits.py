"""Requirements of online adaptation: a trainable head, memory, and slices short enough to fit between rounds."""

from __future__ import annotations

import torch

from batchspec.config.draft_schema import DraftConfig
from batchspec.draft.formats import HeadSpec
from batchspec.draft.weights import Head, head_bytes
from batchspec.errors import ConfigError
from batchspec.model.spec import ModelSpec
from batchspec.packing.memory import learning_bytes
from batchspec.train.head import why_not_trainable, why_weights_not_trainable

SLICE_TOKENS, MOST_SLICE_TOKENS, CPU_SLICE_TOKENS = 8192, 16384, 256
"""Tokens of a slice: on a GPU; on a GPU for jobs with longer rows, at most; on a CPU."""
MOST_STEPS = 6
"""Maximum number of draft steps to train: each costs the same, and few rounds accept more drafts."""


def slice_tokens(device: torch.device, max_len: int) -> int:
    """Maximum number of tokens of a slice in a job with rows of up to `max_len` tokens. Rows longer than a slice are not used."""
    usual, most = (SLICE_TOKENS, MOST_SLICE_TOKENS) if device.type == "cuda" else (CPU_SLICE_TOKENS, SLICE_TOKENS)
    return min(most, max(usual, max_len))


def steps_learnt(draft: DraftConfig) -> int:
    """Number of draft steps to train: as many as the job drafts, up to MOST_STEPS."""
    return min(MOST_STEPS, draft.tree.depth or min(draft.head_len or draft.num_speculative_tokens, draft.num_speculative_tokens))


def check_head(draft: DraftConfig, head: HeadSpec | None, target: ModelSpec) -> None:
    """Raises ConfigError if draft.adapt is set and the head cannot be trained."""
    if not draft.adapt.every_shards:
        return
    assert head is not None, "a drafter that reads draft.adapt has a head"
    problem = why_not_trainable(head, target)
    if head.mask_token_id is not None and (draft.parallel is False or draft.tree.topk > 1):
        problem = "it would be trained to draft in parallel, but this job drafts a chain or a tree with it"
    if problem:
        raise _refusal(draft, problem)


def check_weights(draft: DraftConfig, head: Head | None) -> None:
    """As `check_head`, for what only the tensors show."""
    if not draft.adapt.every_shards:
        return
    assert head is not None, "a drafter that reads draft.adapt has a head"
    if problem := why_weights_not_trainable(head):
        raise _refusal(draft, problem)


def _refusal(draft: DraftConfig, problem: str) -> ConfigError:
    adapt = f"draft.adapt.every_shards={draft.adapt.every_shards}"
    return ConfigError(f"{adapt}: the head {draft.path} cannot be trained: {problem}; remove the key")


def memory_bytes(
    draft: DraftConfig, head: HeadSpec | None, target: ModelSpec, *, device: torch.device, dtype: torch.dtype, max_len: int
) -> int:
    """Bytes that learning needs in addition to weights, pages and rounds; 0 without draft.adapt.

    max_len  maximum length of a row, in tokens
    """
    if not draft.adapt.every_shards:
        return 0
    assert head is not None, "a drafter that reads draft.adapt has a head"
    return learning_bytes(
        target,
        dtype=dtype,
        parameters=head_bytes(head, torch.uint8),
        draft_vocab=head.draft_vocab_size,
        feature_width=len(head.aux_layer_ids) * head.target_hidden_size,
        steps=steps_learnt(draft),
        tokens=slice_tokens(device, max_len),
    )
