"""task=reward: the score of each label of a model whose last matrix scores labels (`...ForSequenceClassification`).

Rewards, classes and judges are such models: a decoder, and a score matrix [labels, H] in place of the output matrix, which is
multiplied with the hidden state after the row's last token. What it gives is written as it is: neither a softmax nor a sigmoid.
As in transformers, padding tokens at the end of a row are not a part of it. Nothing here adds any, but a chat template may end
with the token that config.json names so.
Source: transformers, modeling_layers.py, GenericForSequenceClassification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from batchspec.config.schema import RunConfig
from batchspec.console.text import quoted
from batchspec.records import Completion, Ids
from batchspec.tasks.base import Cells, ModelFacts, Needs, Reads, Task, TaskRows, check_text_end

if TYPE_CHECKING:
    from batchspec.text.thinking import ThinkTokens
    from batchspec.text.tokenizer import Tokenizer


class UnpaddedRows(TaskRows):
    """Rows without the padding tokens at their end; of a row of nothing else the first stays."""

    def __init__(self, pad_ids: tuple[int, ...]) -> None:
        self._pad_ids = pad_ids

    def ids(self, prompt_ids: Ids) -> Ids:
        others = np.flatnonzero(~np.isin(prompt_ids, self._pad_ids))
        return prompt_ids[: 1 + int(others.max(initial=0))]


@dataclass(frozen=True)
class Reward(Task):
    """Column scores: of each label, in the order of the checkpoint's, its name (id2label) and its score."""

    name: ClassVar = "reward"
    asked: ClassVar = "task=reward"
    reads: ClassVar = Reads.LABEL_SCORES
    needs: ClassVar = Needs.LABELS
    what: ClassVar = "labels are scored after each row's last token"
    written: ClassVar = "scores"
    whole_chats: ClassVar = True
    columns: ClassVar = frozenset({"scores"})
    score_column: ClassVar = "scores"
    tallies: ClassVar = True

    labels: tuple[str, ...] = ()
    """Their names; (): the model is not known yet."""
    pad_ids: tuple[int, ...] = ()
    """As in `ModelFacts`."""

    @property
    def cells(self) -> Cells:
        return {"scores": self._scores}

    def of_model(self, config: RunConfig, model: ModelFacts) -> Task:
        return Reward(model.labels, model.pad_ids)

    def rows(
        self, config: RunConfig, mapped: frozenset[str], tokenizer: Tokenizer | None, think: ThinkTokens | None
    ) -> TaskRows:
        check_text_end(config, mapped, tokenizer, self.asked)
        return UnpaddedRows(self.pad_ids)

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
