"""Lessons of a target that several ranks compute: the leader's head learns, and every rank takes part in the forward pass.

Only the leader trains the head; followers get its weights when it starts to draft with them (`HeadOfRanks`). A backward pass on a
GPU adds up in any order, so heads that were trained on every rank would come to differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchspec.engine.lockstep import Lead
from batchspec.engine.messages import Lesson as LessonMessage
from batchspec.errors import CapacityError
from batchspec.model.target import Target
from batchspec.train.data import Row
from batchspec.train.teacher import Lesson, Teacher


class TeacherOfRanks(Teacher):
    """The leader's teacher: it tells the other ranks of each lesson."""

    def __init__(
        self, lead: Lead, target: Target, aux_layer_ids: tuple[int, ...], draft_vocab_ids: torch.Tensor, dtype: torch.dtype
    ) -> None:
        super().__init__(target, aux_layer_ids, draft_vocab_ids, dtype)
        self._lead = lead

    def lesson(self, rows: Sequence[Row], *, probs: bool = True) -> Lesson:
        """As of `Teacher`. Raises RankLost, and CapacityError where memory runs out: the ranks could not go on together."""
        ids, prompt_lens = [row.ids for row in rows], [row.prompt_len for row in rows]
        self._lead.send(LessonMessage(ids, prompt_lens, self.aux_layer_ids, probs))
        try:
            return super().lesson(rows, probs=probs)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"draft.adapt: out of memory while several ranks computed a lesson ({str(error).splitlines()[0]}); set "
                "packing.memory_gb lower or remove draft.adapt.every_shards, and run the same command again: finished rows stay"
            ) from None


def take_part(target: Target, lesson: LessonMessage) -> None:
    """A follower's part of a lesson: the same exchanges as the leader's, whose result alone is used."""
    rows = [Row(ids=ids, prompt_len=length) for ids, length in zip(lesson.rows, lesson.prompt_lens, strict=True)]
    teacher = Teacher(target, lesson.aux_layer_ids, torch.zeros(1, dtype=torch.int64), target.dtype)
    teacher.lesson(rows, probs=lesson.probs)
