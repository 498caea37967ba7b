"""Token choice with tensor parallelism: each rank has the logits of its part of the vocabulary, and all choose the same token.

What ranks exchange per flat position: for a greedy token one logit and one id; for a draw its score, its id and the largest
logit; for top-k, top-p and min-p as many of the largest logits as determine the cutoff, and a log-sum-exp; for a `LogitReader` a
log-sum-exp, the chosen token's logit and the candidates for the likeliest ones. No rank gathers the logits of all tokens, unless
a cutoff needs nearly all. On a GPU a cutoff is searched for by sums over the ranks (`cutoff_of_ranks.py`); in float64, which on
GPUs only tests use, all logits are exchanged. Noise is keyed by the token's id: ranks draw the token that one process draws.

Ranks also compare a checksum of each position's last hidden state, which every rank has in full: because they exchange their
choices, they would agree on tokens even if their states had diverged, and the tokens would be wrong.

T flat positions, V the tokens of all ranks, v those of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.logits import adjust_logits, mark_undecided
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.distributed.collectives import Collectives
from batchspec.engine.rounds.cutoff_of_ranks import searched_cutoffs
from batchspec.engine.rounds.vocabulary import DIVERGED, Greedy, Vocabulary
from batchspec.kernels.sampling.argmax import NO_TOKEN
from batchspec.kernels.sampling.cutoff import QUICK_TOP, cutoff_of_largest
from batchspec.kernels.sampling.sample import sample_part
from batchspec.model.vocabulary import best_of_ranks, greedy_of_ranks

MORE = 8
"""If the exchanged largest logits do not determine a cutoff, this many times as many are exchanged."""


class SharedVocabulary(Vocabulary):
    """The vocabulary of a target that several ranks compute. Equally likely tokens may come in another order in `largest`."""

    def choose(
        self, hidden: Tensor, logit_rows: LogitRows | None, rows: DeviceBatch, mode: SamplingMode, *, keeps_raw: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        ids, raw = super().choose(hidden, logit_rows, rows, mode, keeps_raw=keeps_raw)
        return torch.where(self.diverged(hidden) & (ids >= 0), DIVERGED, ids), raw

    def choose_by_logits(self, logits: Tensor, logit_rows: LogitRows, rows: DeviceBatch, mode: SamplingMode) -> Tensor:
        spec = self.target.spec
        target_ids = choose_of_ranks(
            logits, logit_rows, rows, mode, spec.vocab_part, spec.vocab_size, self._ranks, greedy=self.greedy_by_logits
        )
        mark_undecided(target_ids, logit_rows, rows, mode)
        return target_ids

    def greedy_by_logits(self, logits: Tensor) -> Tensor:
        return greedy_of_ranks(logits, self._first, self._ranks, flag_nonfinite=True)

    def log_normaliser(self, raw: Tensor) -> Tensor:
        return torch.logsumexp(self._ranks.gather(torch.logsumexp(raw, 1)), 0)

    def logit_of(self, raw: Tensor, ids: Tensor) -> Tensor:
        index = ids.clamp(min=0).long() - self._first
        own = (index >= 0) & (index < raw.shape[1])
        logit = raw.gather(1, index.clamp(0, raw.shape[1] - 1).unsqueeze(1)).squeeze(1)
        # One rank has the token; the numbers of the other ranks are not read.
        owner = self._ranks.gather(own.int()).argmax(0, keepdim=True)
        return self._ranks.gather(logit).gather(0, owner).squeeze(0)

    def largest(self, raw: Tensor, num: int) -> tuple[Tensor, Tensor]:
        most = min(num, -(-self.target.spec.vocab_size // self._ranks.ranks))
        best = raw.topk(min(most, raw.shape[1]), dim=1)
        values = F.pad(best.values, (0, most - best.values.shape[1]), value=-torch.inf)
        ids = F.pad(best.indices.int() + self._first, (0, most - best.values.shape[1]))
        values, ids = (self._ranks.gather(part).transpose(0, 1).flatten(1) for part in (values, ids))
        found = values.topk(num, dim=1)
        return ids.gather(1, found.indices), found.values

    def diverged(self, hidden: Tensor) -> Tensor:
        sums = self._ranks.gather(checksums(hidden))
        return (sums != sums[0]).any(0)

    @property
    def _ranks(self) -> Collectives:
        assert self.target.ranks is not None
        return self.target.ranks

    @property
    def _first(self) -> int:
        """The first token of this rank."""
        return int(self.target.spec.vocab_part.start)


def checksums(hidden: Tensor) -> Tensor:
    """int64 [T] of the bits of each row of hidden [T, H]. Rows that differ in one number have different ones."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[hidden.element_size()]
    weights = torch.arange(1, 2 * hidden.shape[1], 2, device=hidden.device)  # odd: a product with one loses no bit
    return (hidden.contiguous().view(bits).long() * weights).sum(1)


def choose_of_ranks(
    logits: Tensor, at: LogitRows, rows: DeviceBatch, mode: SamplingMode, tokens: slice, vocab: int, ranks: Collectives, *,
    greedy: Greedy,
) -> Tensor:
    """As `vocabulary.choose_by_logits`, int32 [T], for logits [T, v] of `tokens`, which are changed.

    greedy  chooses from such logits
    """
    at = LogitRows(at.row_ids, at.positions, at.drafts, at.num_drafted, at.draft_rows, tokens)
    adjust_logits(logits, at, rows, mode)
    if not mode.random:
        return greedy(logits)
    low = torch.full_like(logits[:, 0], -torch.inf)
    if mode.filters:
        low = cutoffs_of_ranks(logits, at.row_ids, rows, vocab, ranks)
    scores, tops = torch.empty_like(low), torch.empty_like(low)
    ids = torch.empty(len(low), dtype=torch.int32, device=low.device)
    sample_part(
        logits, at.row_ids, at.positions, rows.keys, rows.temperature, low, tokens.start,
        out_ids=ids, out_scores=scores, out_tops=tops,
    )
    chosen = best_of_ranks(scores, ids, ranks)
    return torch.where(ranks.gather(tops).amax(0).isfinite(), chosen, NO_TOKEN)


def cutoffs_of_ranks(logits: Tensor, row_ids: Tensor, rows: DeviceBatch, vocab: int, ranks: Collectives) -> Tensor:
    """As `sampling.cutoffs`, [T]: the smallest logit of each kept set, over the tokens of all ranks."""
    if logits.is_cuda and logits.dtype == torch.float32:  # what follows synchronises
        return searched_cutoffs(logits, row_ids, rows, vocab, ranks)
    finite = logits.nan_to_num(-torch.inf, -torch.inf, -torch.inf)  # rows that are not finite draw nothing

    def largest(num: int) -> Tensor:
        own = finite.topk(min(num, finite.shape[1]), dim=1).values
        found = ranks.gather(F.pad(own, (0, min(num, -(-vocab // ranks.ranks)) - own.shape[1]), value=-torch.inf))
        return found.transpose(0, 1).flatten(1).topk(num, dim=1).values

    def total(temperature: Tensor) -> Tensor:
        return torch.logsumexp(ranks.gather(torch.logsumexp(finite / temperature, 1)), 0)

    # In float64 on a GPU all logits are exchanged at once, because the host reads nothing back.
    few = vocab if logits.is_cuda else min(QUICK_TOP, vocab)
    return cutoff_of_largest(
        largest, total, row_ids, rows.temperature, rows.top_k, rows.top_p, rows.min_p,
        nums=(few, min(MORE * few, vocab), vocab), dtype=logits.dtype,
    )
