"""task=reward: the score of each label of a model whose last matrix scores labels (`...ForSequenceClassification`).

Rewards, classes and judges are such models: a decoder, and a score matrix [labels, H] in place of the output matrix, which is
multiplied with the hidden state after the row's last token. What it gives is written as it is: neither a softmax nor a sigmoid.
Source: transformers, modeling_layers.py, GenericForSequenceClassification, which reads the last token that is not padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from batchspec.config.schema import InputConfig, RunConfig
from batchspec.console.text import quoted
from batchspec.records import Completion
from batchspec.tasks.base import COMPLETE, Cells, ModelFacts, Needs, Reads, Task


@dataclass(frozen=True)
class Reward(Task):
    """Column scores: of each label, in the order of the checkpoint's, its name (id2label) and its score."""

    name: ClassVar = "reward"
    asked: ClassVar = "task=reward"
    reads: ClassVar = Reads.LABEL_SCORES
    needs: ClassVar = Needs.LABELS
    what: ClassVar = "labels are scored after each row's last token"
    written: ClassVar = "scores"
    columns: ClassVar = frozenset({"scores"})

    labels: tuple[str, ...] = ()
    """Their names; (): the model is not known yet."""

    @property
    def cells(self) -> Cells:
        return {"scores": self._scores}

    def of_model(self, config: RunConfig, model: ModelFacts) -> Task:
        return Reward(model.labels)

    def with_chats(self, input: InputConfig) -> InputConfig:
        """A chat is read as it is, to the end of the assistant's turn, unless the user asked for something else."""
        usual = InputConfig().final_assistant
        return replace(input, final_assistant=COMPLETE) if input.final_assistant == usual else input

    def identity(self, config: RunConfig) -> dict[str, Any]:
        return {"task": self.name}

    def note(self) -> str:
        more = f" and {len(self.labels) - 6:,} more" * (len(self.labels) > 6)
        return f"the column scores has {', '.join(map(quoted, self.labels[:6]))}{more}"

    def _scores(self, completion: Completion) -> list[dict[str, Any]] | None:
        values = completion.state_values
        if values is None:
            return None
        return [{"label": label, "score": score} for label, score in zip(self.labels, values.tolist(), strict=True)]
