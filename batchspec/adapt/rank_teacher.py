"""The teacher if several ranks compute the target: the leader trains the head, and every rank takes part in the forward pass.

Only the leader trains the head; followers get its weights when it starts to draft with them (`HeadOfRanks`). A backward pass on a
GPU adds up in any order, so heads that were trained on every rank would diverge.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchspec.engine.lockstep import Lead
from batchspec.engine.messages import TeacherPass
from batchspec.errors import CapacityError
from batchspec.model.target import Target
from batchspec.train.data import Row
from batchspec.train.teacher import Teacher, TrainingBatch


class TeacherOfRanks(Teacher):
    """The leader's teacher: it sends each forward pass to the other ranks."""

    def __init__(
        self, lead: Lead, target: Target, aux_layer_ids: tuple[int, ...], draft_vocab_ids: torch.Tensor, dtype: torch.dtype
    ) -> None:
        super().__init__(target, aux_layer_ids, draft_vocab_ids, dtype)
        self._lead = lead

    def training_batch(self, rows: Sequence[Row], *, probs: bool = True) -> TrainingBatch:
        """As `Teacher`. Raises RankLost, and CapacityError if memory runs out, because the ranks could not continue together."""
        ids, prompt_lens = [row.ids for row in rows], [row.prompt_len for row in rows]
        self._lead.send(TeacherPass(ids, prompt_lens, self.aux_layer_ids, probs))
        try:
            return super().training_batch(rows, probs=probs)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"draft.adapt: out of memory while several ranks computed a training batch ({str(error).splitlines()[0]}); set "
                "packing.memory_gb lower or remove draft.adapt.every_shards, and run the same command again: finished rows stay"
            ) from None


def take_part(target: Target, message: TeacherPass) -> None:
    """A follower's part of the forward pass: the same exchanges as the leader's. Only the leader uses the result."""
    rows = [Row(ids=ids, prompt_len=length) for ids, length in zip(message.rows, message.prompt_lens, strict=True)]
    teacher = Teacher(target, message.aux_layer_ids, torch.zeros(1, dtype=torch.int64), target.dtype)
    teacher.training_batch(rows, probs=message.probs)
