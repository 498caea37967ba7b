"""Online adaptation: the head of a running job learns from the job's own completions.

The output of a job never depends on it: every draft is verified.

when      Between two rounds, one slice at a time: a training step over a few thousand tokens, or part of a measurement. Slices
          take `draft.adapt.time_share` of the run's time (`budget.py`), on a GPU by CUDA events. A measurement without progress
          halves that share, down to a sixteenth; one with progress restores it.
data      The completions of committed shards, read after every `draft.adapt.every_shards` shards, each once. If time is short
          the newest come first. One row in eight is held out, with all its samples.
better    Tokens a round in an exact replay (`train/evaluate.py`) of the newest held-out rows, of the drafting head and of the
          copy that learns. A copy that is half a percent better is written into the drafter; one that is that much worse
          starts again from the drafter's weights, at half the learning rate.
swap      Weights are overwritten in place, between two rounds and not during a prefill, so captured graphs stay valid; the
          concatenated and reordered copies that the drafter keeps change with them. K/V from the old weights stay: they can
          only make drafts worse. Shared prefixes are prefilled again. Measured acceptance by K is discarded, measured times are
          kept.
memory    The copy in fp32, its gradients and optimiser, the drafting weights once more, and a slice: reserved before the job
          begins (`packing/memory.py`). If memory runs out all the same, learning ends and the job goes on.
saved     The head that drafts, at commits, at most once a minute, and when a run ends: `stored.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from hashlib import blake2b

import numpy as np
import torch

from batchspec.adapt.budget import Budget
from batchspec.adapt.learner import Comparison, Learner
from batchspec.engine.results import Moment, now_on
from batchspec.records import Completion
from batchspec.train.data import Row, epoch_batches

KEPT_OUT = 8
"""One row in so many is held out."""
FEWEST, MOST = 8, 64
"""Number of newest held-out completions that a measurement uses: between these, and no more than fit this many slices."""
MOST_SLICES = 4
BETTER = 1.005
"""Smallest ratio of tokens a round for a swap; smaller gains may be chance."""
FEWEST_STEPS = 8
"""Minimum number of steps between two measurements: a new optimiser makes a head worse at first."""
MEASURE_SHARE = 0.25
"""Maximum time of measurements, as a share of the time of training steps."""
WAITING = 64
"""Maximum number of batches in the queue; the oldest are dropped."""
_USABLE = ("ok", "truncated")


class Adapter:
    """Trains the copy in slices: call `learn` with every committed shard, and `turn` between rounds."""

    def __init__(
        self,
        learner: Learner,
        *,
        device: torch.device,
        every_shards: int,
        batch_tokens: int,
        budget: Budget,
        say: Callable[[str], None],
        changing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """
        batch_tokens  tokens of a slice, padding included; longer rows are left out
        changing      context in which new weights are written into the drafter
        """
        self.learner, self.num_swaps, self.num_learnt = learner, 0, 0
        self._device, self._every, self._batch_tokens = device, every_shards, batch_tokens
        self._budget, self._say, self._changing = budget, say, changing
        self._shards, self._periods, self._num_fresh = 0, 0, 0
        self._new: list[Row] = []
        self._to_measure: list[list[Row]] = []
        self._compared: list[Comparison] = []
        self._batches: deque[list[Row]] = deque(maxlen=WAITING)
        self._kept_out: deque[Row] = deque(maxlen=MOST)
        self._costs = {"learn": 0.0, "measure": 0.0}
        self._learnt_s = 0.0
        self._running: tuple[str, Moment, Moment] | None = None

    def learn(self, completions: Iterable[Completion]) -> None:
        """Take the completions of a committed shard."""
        for done in completions:
            row = row_of(done)
            if row is None or len(row.ids) > self._batch_tokens:
                continue
            (self._kept_out if kept_out(done.row_index) else self._new).append(row)
        self._shards += 1
        if self._shards >= self._every and self._new:
            self._cut()

    def _cut(self) -> None:
        """Pack rows into batches; rows of a batch that would be less than half full wait for more."""
        rows, self._new = self._new, []
        lengths = np.array([len(row.ids) for row in rows])
        for row_ids in epoch_batches(lengths, batch_tokens=self._batch_tokens, seed=0, epoch=self._periods):
            batch = [rows[i] for i in row_ids]
            if 2 * padded(batch) < self._batch_tokens:
                self._new += batch
            else:
                self._batches.append(batch)
        self._shards, self._periods = 0, self._periods + 1

    def turn(self) -> bool:
        """Run a slice if there is work and time for it; returns whether the device got work."""
        if self._running is not None and not self._settle():
            return False
        kind = self._next()
        if kind is None or not self._budget.allows(self._costs[kind]):
            return False
        began = now_on(self._device)
        with torch.inference_mode(False):
            if kind == "learn":
                self._learn()
            else:
                self._compared.append(self.learner.compare(self._to_measure.pop()))
        if self._compared and not self._to_measure:
            self._judge(self._compared)
            self._compared = []
        self._running = kind, began, now_on(self._device)
        return True

    def _settle(self) -> bool:
        """Account for the last slice's time; False while the device still works on it."""
        assert self._running is not None
        kind, began, ended = self._running
        if isinstance(began, torch.cuda.Event):
            assert isinstance(ended, torch.cuda.Event)
            if not ended.query():
                return False
            seconds = began.elapsed_time(ended) / 1e3
        else:
            assert not isinstance(ended, torch.cuda.Event)
            seconds = ended - began
        self._running, self._costs[kind] = None, seconds
        self._learnt_s += seconds if kind == "learn" else 0.0
        self._budget.spend(seconds)
        return True

    def _next(self) -> str | None:
        """What to do now: learn, measure, or nothing. A measurement that has begun is finished before more is learnt."""
        if not self._to_measure and self._num_fresh >= FEWEST_STEPS and len(self._kept_out) >= FEWEST:
            slices = self._slices()
            if len(slices) * self._costs["measure"] <= MEASURE_SHARE * self._learnt_s:
                self._to_measure, self._learnt_s = slices, 0.0
        if self._to_measure:
            return "measure"
        return "learn" if self._batches else None

    def _slices(self) -> list[list[Row]]:
        """The newest held-out rows, cut into slices."""
        slices: list[list[Row]] = [[]]
        for count, row in enumerate(reversed(self._kept_out)):
            if padded([*slices[-1], row]) > self._batch_tokens:
                if len(slices) >= MOST_SLICES and count >= FEWEST:
                    break
                slices.append([])
            slices[-1].append(row)
        return slices

    def _learn(self) -> None:
        rows = self._batches.pop()
        self.learner.learn(rows)
        self.num_learnt += len(rows)
        self._num_fresh += 1

    def _judge(self, compared: list[Comparison]) -> None:
        before, after = (
            sum(one.tokens for one in found) / sum(one.rounds for one in found)
            for found in ([one.drafts for one in compared], [one.learns for one in compared])
        )
        self._num_fresh = 0
        if after >= BETTER * before:
            with self._changing():
                self.learner.adopt()
            self.num_swaps += 1
            self._budget.restore()
            self._say(
                f"head: {after:.2f} tokens a round instead of {before:.2f} on held-out completions, trained on "
                f"{self.num_learnt:,} completions; the job drafts with it from now on"
            )
            return
        self._budget.cut()
        if BETTER * after <= before:
            self.learner.begin_again()


def padded(rows: list[Row]) -> int:
    """Tokens of a batch, padding included."""
    return len(rows) * max(len(row.ids) for row in rows)


def row_of(done: Completion) -> Row | None:
    """Prompt and completion as a training row; None: nothing can be learnt from it."""
    if done.status not in _USABLE or done.prompt_ids is None or done.token_ids is None or len(done.token_ids) < 2:
        return None
    if not len(done.prompt_ids):
        return None
    return Row(ids=np.concatenate((done.prompt_ids, done.token_ids)).astype(np.int32), prompt_len=len(done.prompt_ids))


def kept_out(row_index: int) -> bool:
    """Whether a row is held out: by a hash, because inputs often repeat kinds of prompts in a fixed order."""
    return blake2b(str(row_index).encode(), digest_size=1).digest()[0] % KEPT_OUT == 0
