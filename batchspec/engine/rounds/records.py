"""What rounds are given and what they give: options, drafts, the target's choices, results.

R rows, K drafts, S = K + 1, T flat positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.logit_rule import LogitRows
from batchspec.engine.rounds.vocabulary import Vocabulary


class LogitReader(Protocol):
    """Reads the target's logits before any rule changes them, for a feature of rows that writes what it reads."""

    def read(self, raw: Tensor, ids: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, ...]:
        """Tensors [T, ...] about raw logits [T, V] and the tokens ids int [T] that were chosen by them, or come next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """Options of the rounds, the same for a whole job."""

    reader: LogitReader | None = None
    """Reads the logits of every emitted token."""
    coupled: bool = True
    """Whether drafts of sampled rows are drawn with the noise of the target's draws."""
    synthetic: tuple[tuple[float, ...], ...] | None = None
    """Unconditional acceptance rates per position, of each kind of row; for benchmarks."""
    argmax: bool = True
    """Greedy tokens by an argmax; False: by softmax and top-k (`ablation.argmax`)."""
    row_lengths: bool = False
    """Rounds learn how likely drafts are accepted, and may verify more drafts of one row than of another."""
    uniform_slots: bool = True
    """Rows of equal draft length have a layout without a prefix sum; False: a ragged one (`ablation.uniform_slots`)."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The results of a round that the host reads, as tensors on the device or their copies on the host.

    log           int32 [R, 5+K] accepted_len (-1: dead row), draft_len, kept, finish, then the emitted tokens, -1 after them
    read          what the options' reader read of each emitted token, [R, S, ...]; a pass without choices: of each of its T
                  tokens; empty if nothing was emitted
    experts_read  int32 [layers with experts] number of experts that had tokens; only of rounds whose experts are counted
    levels        int32 [K, LEVELS] drafts by position and level of survival, those that were not verified too; only of rounds
                  with drafts whose chances are known
    """

    log: Tensor
    read: tuple[Tensor, ...] = ()
    experts_read: Tensor | None = None
    levels: Tensor | None = None

    def to_host(self) -> RoundResult:
        """Copies in pinned host memory, in stream order: complete only once an event recorded after this call has passed."""
        return RoundResult(
            _to_host(self.log), tuple(_to_host(tensor) for tensor in self.read),
            None if self.experts_read is None else _to_host(self.experts_read),
            None if self.levels is None else _to_host(self.levels),
        )


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True)


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts that a round verifies: ids int32 [R, K], length int32 [R], rates float32 [N, K] of simulated
    acceptance or None. Of a tree ids are those of the accepted path, once it is found; parents int32 [R, N+1] of its nodes."""

    ids: Tensor
    length: Tensor
    rates: Tensor | None = None
    parents: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's choices after the positions that a round verifies; of a tree, along the accepted path.

    batch              the positions, as chains
    target_ids         int32 [T]
    aux_hidden_states  [T, ...] of the layers that the drafter reads; None: it reads none
    logit_rows         None if all rows are greedy and no logits are read
    raw                float [T, V] raw logits if they are read
    levels             as in `RoundResult`
    nodes              the positions of a tree; None for chains
    """

    batch: FlatBatch
    target_ids: Tensor
    aux_hidden_states: Tensor | None
    logit_rows: LogitRows | None
    raw: Tensor | None
    levels: Tensor | None = None
    nodes: FlatBatch | None = None
