"""The features of jobs that decode nothing, by what their task reads of the model."""

from __future__ import annotations

from collections.abc import Callable

from batchspec.engine.features.scoring import PromptFeatures
from batchspec.engine.features.states import MeanFeatures, StateFeatures, last_states
from batchspec.engine.slots.row_feature import Features
from batchspec.model.target import Target
from batchspec.tasks.base import Reads

FEATURES: dict[Reads, Callable[[int], Features]] = {
    Reads.PROMPT_TOKENS: PromptFeatures,
    Reads.LABEL_SCORES: lambda num_top: StateFeatures(Target.label_scores),
    Reads.LAST_STATES: lambda num_top: StateFeatures(last_states),
    Reads.MEAN_STATES: lambda num_top: MeanFeatures(),
}
"""The features, given of how many of the likeliest tokens log-probabilities are read."""
