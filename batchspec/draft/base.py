"""What a drafter is: something that proposes tokens, and may read the target's features to do so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from batchspec.batch.device_batch import DeviceBatch
    from batchspec.batch.flat_batch import FlatBatch
    from batchspec.batch.sampling_mode import SamplingMode
    from batchspec.cache.layout import KVLayout
    from batchspec.cache.pages import KVCache


@dataclass(frozen=True, slots=True)
class DrafterUpdate:
    """What a drafter that learns from finished rows does before a round: decided once for all who execute the round."""

    swap: bool = False
    """Rounds read the table that was uploaded last."""
    upload: bool = False
    """The table that was built last is uploaded."""


class Drafter(Protocol):
    """Proposes up to `max_len` tokens a row and round; the round verifies whatever it proposes, so any proposal is lossless.

    The round calls `propose` first and `catch_up` last, inside the captured graph on a GPU: both work on device tensors,
    write to the buffers they are given and never read back to the host. `prefill` follows every prefill pass, when the
    tokens that the pass drew are committed: the token behind each position stands in rows.tokens.
    """

    name: str
    max_len: int
    """K."""
    fixed_len: bool
    """Every live row gets exactly max_len proposals: the round may take the uniform layout."""
    aux_layer_ids: tuple[int, ...]
    """Boundaries 0..L of the target whose residual stream it reads (0 is the embedding, i is what enters layer i)."""
    num_kv_layers: int
    """K/V layers of its own, kept in the pages of the row behind the target's layers: `cache.layer(L + i)`."""
    mode: SamplingMode | None
    """How the rows of the pass or round in work are sampled, set before its calls, where drafts are to share the noise of the
    target's draws; None: drafts are argmaxes."""
    state: tuple[Tensor, ...]
    """Tensors [slots, ...]: what it carries of each slot's row from round to round; the engine moves lines when it compacts."""

    def kv_layout(self, page_size: int) -> KVLayout | None:
        """How those layers keep K/V; None where there are none."""

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """[num_kv_layers] newest keys that each of them reads; None: all, or the first ones too."""

    def prefill(
        self, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> tuple[Tensor, ...]:
        """Read prefilled positions with the target's features at them; returns what to carry of each row, as `state`.

        slot_ids int64 [R'] the slot of each row of `batch`; taps [T, len(aux_layer_ids) * H]. May run beside rounds of other rows
        on another stream: it writes nothing but K/V of these rows.
        """

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        """Write proposals: draft_ids int32 [R, K], 1 <= K <= max_len, and how many of them count, draft_len int32 [R] in 0..K.

        A round may ask for fewer than max_len. `rows` are the first R slots. K/V written on the way, at positions
        num_tokens - 1 and on, is made of guesses: `catch_up` writes over all of it.
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
        """Read the positions just verified, with the target's true features; accepted_len int32 [R].

        lead  a round that drafts may follow; else nothing but K/V is kept warm and `state` stays as it is

        Called behind the commit: rows.num_tokens counts what the round emitted, rows.live is 0 where a row ended. Row r's
        places are batch.cu_seqlens_q[r] + j, of which j = 0..accepted_len[r] stand; what lies behind them is rejected.
        """

    def learn(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """A row has ended with these tokens. On the host, between rounds."""

    def next_update(self) -> DrafterUpdate:
        """What `refresh` may do before the next round without waiting. Changes nothing."""

    def refresh(self, update: DrafterUpdate) -> None:
        """The next round is about to be launched, on the current stream: renew what captured rounds read. Waits where it must:
        the update may come from another process."""


NO_UPDATE = DrafterUpdate()


class Usual:
    """The part of a drafter that learns nothing while a job runs."""

    mode: SamplingMode | None = None

    def learn(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        return None

    def next_update(self) -> DrafterUpdate:
        return NO_UPDATE

    def refresh(self, update: DrafterUpdate) -> None:
        return None


class NoFeatures(Usual):
    """The part of a drafter that reads nothing of the target and keeps no K/V."""

    aux_layer_ids: tuple[int, ...] = ()
    num_kv_layers: int = 0
    state: tuple[Tensor, ...] = ()

    kv_windows: tuple[int | None, ...] = ()

    def kv_layout(self, page_size: int) -> KVLayout | None:
        return None

    def prefill(
        self, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> tuple[Tensor, ...]:
        return ()

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


class NoDrafter(NoFeatures):
    """Plain decoding: a round verifies the newest token alone."""

    name = "none"
    max_len = 0
    fixed_len = True

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        draft_len.zero_()
