"""The features of jobs that decode nothing, by what their task reads of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from batchspec.engine.features.scoring import PromptFeatures
from batchspec.engine.features.states import MeanFeatures, StateFeatures, last_states, token_logits
from batchspec.engine.slots.row_feature import Features
from batchspec.model.target import Target
from batchspec.tasks.base import Reads

FEATURES: dict[Reads, Callable[[int, tuple[int, ...]], Features]] = {
    Reads.PROMPT_TOKENS: lambda num_top, token_ids: PromptFeatures(num_top),
    Reads.LABEL_SCORES: lambda num_top, token_ids: StateFeatures(Target.label_scores),
    Reads.TOKEN_LOGITS: lambda num_top, token_ids: StateFeatures(partial(token_logits, token_ids)),
    Reads.LAST_STATES: lambda num_top, token_ids: StateFeatures(last_states),
    Reads.MEAN_STATES: lambda num_top, token_ids: MeanFeatures(),
}
"""The features, given of how many of the likeliest tokens log-probabilities are read, and the tokens whose logits are."""
