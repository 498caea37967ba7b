"""The Drafter protocol: something that proposes tokens, and may read the target's hidden states to do so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.layer_state import LayerState
from batchspec.cache.pages import KVCache
from batchspec.draft.shapes import ChainShape, TreeShape
from batchspec.kernels.sampling.argmax import CONFIDENCE_BINS


@dataclass(frozen=True, slots=True)
class DrafterUpdate:
    """What a drafter that learns from finished rows does before a round; decided once for all ranks that execute the round."""

    swap: bool = False
    """Rounds use the newest uploaded table from now on."""
    upload: bool = False
    """Upload the newest table that was built."""


class Drafter(Protocol):
    """Proposes up to `draft_len` tokens a row and round; the round verifies whatever it proposes, so any proposal is lossless.

    A round calls `propose` first and `catch_up` last, inside the captured graph on a GPU: both work on device tensors, write to
    the buffers they are given and never read back to the host. `prefill` runs after every prefill pass, when the tokens that the
    pass drew are committed: rows.tokens holds the token after each position. R rows, T flat positions, K draft_len, H hidden.
    """

    name: str
    draft_len: int
    """K: the longest path that it drafts; for a tree its depth."""
    fixed_len: bool
    """Whether every live row always gets draft_len proposals, so that a round may use the uniform layout."""
    aux_layer_ids: tuple[int, ...]
    """Boundaries 0..L of the target whose residual stream it reads (0 is the embedding, i is what enters layer i)."""
    mode: SamplingMode | None
    """How the rows of the current pass or round are sampled, set before its calls, if drafts are to use the noise of the
    target's draws; None: drafts are argmaxes."""
    confidence: Tensor | None
    """int32 [slots, draft_len] where `propose` writes how sure it is of each draft of a chain, as an index of `prior_chances`.
    How often drafts of each index are accepted is measured, by position in the round. None: the confidence is not used."""
    prior_chances: tuple[float, ...]
    """Chance that a draft of each confidence is accepted, as long as nothing was measured. Their number is a power of two."""

    most_unprepared: int | None
    """Most rounds in a row that are called with prepare_next=False. None: any number."""

    @property
    def shape(self) -> ChainShape | TreeShape:
        """What a round verifies of a row: a chain or a tree."""

    @property
    def prefill_by_bounds(self) -> bool:
        """Whether `prefill` needs neither `FlatBatch.host` nor a number from the device, so that a CUDA graph can hold it."""

    def layer_states(self, page_size: int) -> tuple[LayerState, ...]:
        """What each of its own layers keeps of a row: K/V in the row's pages, after the target's layers (`cache.draft_kept`),
        and row tensors (`cache.draft_rows`). The same as its `DrafterSpec` says."""

    def prefill(
        self, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> None:
        """Read prefilled positions with the target's hidden states there.

        slot_ids           int64 [R] the slot of each row of `batch`
        aux_hidden_states  [T, len(aux_layer_ids) * H]; None for a drafter that reads none
        It writes only what its layers keep of these rows, and nothing of dead ones.
        """

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> Tensor | None:
        """Write proposals for the first R slots, which are `rows`; a round may ask for fewer than `self.draft_len`.

        draft_ids  out int32 [R, K], 1 <= K <= self.draft_len; of a tree [R, N], nodes 1..N of a row, parents first
        draft_len  out int32 [R] number of proposed tokens of a chain, 0..K; for a tree the longest path
        Returns the parents of a tree, int32 [R, N+1]: the node above each, -1 for the root, node 0; None for a chain.

        It may write K/V at positions num_tokens - 1 and later. These belong to draft tokens: `catch_up` overwrites all of them.
        It may change row tensors too, which `catch_up` writes anew.
        """

    def catch_up(
        self,
        batch: FlatBatch,
        aux_hidden_states: Tensor | None,
        accepted_len: Tensor,
        rows: DeviceBatch,
        cache: KVCache,
        *,
        prepare_next: bool,
    ) -> None:
        """The drafter's pass over the positions that the target has just verified, with the target's hidden states.

        accepted_len  int32 [R] draft tokens accepted
        prepare_next  the next round may draft; False: it does not, and only what a later call needs is kept

        Called after the commit: rows.num_tokens counts what the round emitted, rows.live is 0 for a row that ended. Row r's
        positions are batch.cu_seqlens_q[r] + j; j = 0..accepted_len[r] are accepted, later ones rejected.
        """

    def learn(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """Learn from a row that has ended with these tokens. Called on the host, between rounds."""

    def next_update(self) -> DrafterUpdate:
        """What `refresh` may do before the next round without waiting. Changes nothing."""

    def refresh(self, update: DrafterUpdate) -> None:
        """Update what captured rounds read; the next round is about to be launched on the current stream. It waits if the update,
        which another process may have decided, is not ready here."""


NO_UPDATE = DrafterUpdate()


class DrafterBase:
    """Defaults: drafts chains, learns nothing while a job runs."""

    mode: SamplingMode | None = None
    most_unprepared: int | None = None
    confidence: Tensor | None = None
    prior_chances: tuple[float, ...] = (0.7,) * CONFIDENCE_BINS
    draft_len: int

    @property
    def shape(self) -> ChainShape | TreeShape:
        return ChainShape(self.draft_len)

    @property
    def prefill_by_bounds(self) -> bool:
        return False

    def learn(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        return None

    def next_update(self) -> DrafterUpdate:
        return NO_UPDATE

    def refresh(self, update: DrafterUpdate) -> None:
        return None


class NoFeatures(DrafterBase):
    """A drafter that reads no hidden states of the target and keeps no K/V."""

    aux_layer_ids: tuple[int, ...] = ()

    @property
    def prefill_by_bounds(self) -> bool:
        return True

    def layer_states(self, page_size: int) -> tuple[LayerState, ...]:
        return ()

    def prefill(
        self, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> None:
        return None

    def catch_up(
        self,
        batch: FlatBatch,
        aux_hidden_states: Tensor | None,
        accepted_len: Tensor,
        rows: DeviceBatch,
        cache: KVCache,
        *,
        prepare_next: bool,
    ) -> None:
        return None
