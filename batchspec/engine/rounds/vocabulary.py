"""The target's choice of tokens after its hidden states, over the whole vocabulary. Ranks with a part of it each override what
they exchange (`vocabulary_of_ranks.py`).

One reduction, fp32 logits (fp64 for a fp64 model). Logits that hold NaN or +inf, or no finite value, give NO_TOKEN; -inf is
legitimate. A draw depends on the logits, the row's key and the position alone, never on the batch around it. Order: the rules of
`batch/logits.py`, temperature, top-k, top-p (on the distribution that top-k left), min-p (relative to the likeliest token), then
the Gumbel-argmax over the kept set. Legend: T rows of hidden states or logits, R rows of the batch, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.logits import adjust_logits, adjusts, mark_undecided, masks_alone
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.kernels.rounds.accept import UNDECIDED
from batchspec.kernels.sampling.argmax import NO_TOKEN, argmax
from batchspec.kernels.sampling.cutoff import cutoff
from batchspec.kernels.sampling.log_normaliser import log_normaliser
from batchspec.kernels.sampling.sample import sample
from batchspec.model.target import Target

DIVERGED = min(NO_TOKEN, UNDECIDED) - 1
"""In place of a token, also in a log, if ranks have different hidden states: as with NO_TOKEN, nothing is emitted and the row
ends. The leader that reads it ends the run with DivergedError."""


class Vocabulary:
    """Chooses tokens int32 [T], NO_TOKEN where there is none and UNDECIDED where a choice cannot be made yet."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def choose(
        self, hidden: Tensor, logit_rows: LogitRows | None, rows: DeviceBatch, mode: SamplingMode, *, keeps_raw: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The choice after each row of `hidden` [T, H], and the raw logits [T, V] if they are to be kept.

        logit_rows  row and position of each; None only if all rows are greedy and raw logits are not kept
        """
        if logit_rows is None:
            return self.greedy(hidden), None
        rule = None if keeps_raw else masks_alone(mode)
        if rule is not None and rule.masks is not None and self.masks_in_product(hidden):
            return self.target.greedy_sample(hidden, flag_nonfinite=True, allowed=rule.masks(logit_rows, rows)), None
        logits = self.target.logits(hidden)
        raw = None
        if keeps_raw:
            raw = logits.clone() if adjusts(mode) else logits
        return self.choose_by_logits(logits, logit_rows, rows, mode), raw

    def choose_by_logits(self, logits: Tensor, logit_rows: LogitRows, rows: DeviceBatch, mode: SamplingMode) -> Tensor:
        """The choice of each row of logits [T, V], which are changed: see the function."""
        return choose_by_logits(logits, logit_rows, rows, mode, greedy=self.greedy_by_logits)

    def greedy(self, hidden: Tensor) -> Tensor:
        """The greedy choice after each row of `hidden` [T, H]."""
        return self.target.greedy_sample(hidden, flag_nonfinite=True)

    def masks_in_product(self, hidden: Tensor) -> bool:
        """Whether a greedy choice among the tokens of masks can be made without storing logits."""
        return self.target.masks_in_product(hidden)

    def greedy_by_logits(self, logits: Tensor) -> Tensor:
        """The greedy choice of each row of logits [T, V]."""
        return greedy_sample(logits)

    def log_normaliser(self, raw: Tensor) -> Tensor:
        """The logarithm of the sum of exponentials of each row of raw logits, [T]."""
        found = torch.empty(raw.shape[0], dtype=raw.dtype, device=raw.device)
        log_normaliser(raw, out=found)
        return found

    def logit_of(self, raw: Tensor, ids: Tensor) -> Tensor:
        """The raw logit of ids int [T], [T]; NO_TOKEN counts as token 0."""
        return raw.gather(1, ids.clamp(min=0).long().unsqueeze(1)).squeeze(1)

    def largest(self, raw: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """The `num` likeliest tokens of each row of raw logits, int32 [T, num], and their logits."""
        best = raw.topk(num, dim=1)
        return best.indices.int(), best.values

    def diverged(self, hidden: Tensor) -> Tensor | None:
        """bool [T] where several ranks have different rows of `hidden` [T, H]; None: one process computes alone. `choose` asks by
        itself, and writes DIVERGED there."""
        return None


Greedy = Callable[[Tensor], Tensor]


def choose_by_logits(
    logits: Tensor, at: LogitRows, rows: DeviceBatch, mode: SamplingMode, *, greedy: Greedy | None = None
) -> Tensor:
    """The target's choice of each row of logits, int32 [T], NO_TOKEN where there is none, UNDECIDED where it cannot be made yet.

    Changes `logits` [T, V] where a rule of `batch/logits.py` asks for it. Does not synchronise on a GPU.

    greedy  chooses tokens in rounds that draw none; None: `greedy_sample`
    """
    adjust_logits(logits, at, rows, mode)
    if mode.random:
        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        low = cutoffs(logits, at.row_ids, rows) if mode.filters else torch.full_like(logits[:, 0], -torch.inf)
        sample(logits, at.row_ids, at.positions, rows.keys, rows.temperature, low, out_ids=out)
    else:
        out = (greedy or greedy_sample)(logits)
    mark_undecided(out, at, rows, mode)
    return out


def greedy_sample(logits: Tensor) -> Tensor:
    """The greedy choice of each row of logits, int32 [T], NO_TOKEN where there is none."""
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    argmax(logits, out_ids=out, flag_nonfinite=True)
    return out


def cutoffs(logits: Tensor, row_ids: Tensor, rows: DeviceBatch) -> Tensor:
    """Smallest logit of each kept set, [T], in the scale of `logits`: the kept set is every token at or above it.

    Every filter keeps the likeliest tokens, so one cutoff describes what they leave, ties included, independently of how a sort
    orders equal values.
    """
    out = torch.empty(logits.shape[0], dtype=logits.dtype, device=logits.device)
    cutoff(logits, row_ids, rows.temperature, rows.top_k, rows.top_p, rows.min_p, out_cutoff=out)
    return out
