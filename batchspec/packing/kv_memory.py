"""Divides the K/V memory: the number of pages of each K/V group for a number of slots.

Each group has its own page pool (`cache.groups`), sized once. In a group that reads all keys, a row needs all of its pages. In a
group with a window it needs those that the window covers, and all of them while it is prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchspec.cache.groups import KVGroups
from batchspec.cache.layer_state import LayerState, windows_of
from batchspec.model.spec import ModelSpec
from batchspec.packed_batch import PREFIX_STATES, PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """The K/V memory that rows need in each group."""

    groups: KVGroups
    page_bytes: tuple[int, ...]
    """Bytes of a page in each group, over all of its layers."""
    slot_bytes: int
    """Bytes of a slot besides its row's pages, over all layers, with what rounds need besides of each row of the drafter."""
    prefix_bytes: int = 0
    """Bytes of the row tensors that are kept of prefixes."""
    page_size: int
    max_tokens: int
    """Tokens of the longest row, including those that rounds write after its end."""
    lookahead: int
    """Maximum number of uncommitted tokens of a row: drafts of all rounds in flight."""
    pass_tokens: int
    """Maximum number of tokens in a prefill pass."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        dtype: torch.dtype,
        draft_layers: Sequence[LayerState],
        *,
        page_size: int,
        max_len: int,
        max_tokens: int,
        lookahead: int,
        pass_tokens: int,
        num_verified: int,
    ) -> KVMemory:
        """The memory of a target and its drafter.

        max_len       maximum prompt + output length of a row, in tokens
        num_verified  maximum number of drafts of a row that a round verifies
        """
        groups, size_bytes = _groups(spec, dtype, draft_layers, page_size, max_len)
        kept = _slot_bytes(spec, dtype, draft_layers, page_size, num_verified)
        return cls(
            groups=groups, page_bytes=size_bytes, slot_bytes=kept + sum(layer.temporary_bytes for layer in draft_layers),
            prefix_bytes=_prefix_bytes(spec, dtype, page_size, num_verified),
            page_size=page_size, max_tokens=max_tokens, lookahead=lookahead, pass_tokens=pass_tokens,
        )

    @property
    def row_pages(self) -> int:
        """Pages that the longest row needs in every group while it is prefilled."""
        return -(-self.max_tokens // self.page_size)

    def row_bytes(self, num_tokens: float) -> int:
        """Bytes of a decoding row: its pages and its slot."""
        return self.slot_bytes + sum(size * self._held(group, num_tokens) for group, size in enumerate(self.page_bytes))

    def rows(self, budget: int, num_tokens: float) -> int:
        """Number of decoding rows of `num_tokens` tokens that fit into `budget` bytes, next to the scratch pages and one prefill
        pass."""
        reserved = self.prefix_bytes + sum(size * (1 + self._prefilling(group)) for group, size in enumerate(self.page_bytes))
        return max(1, (budget - reserved) // self.row_bytes(num_tokens))

    def slots(self, rows: int, num_tokens: float, spare: float) -> int:
        """Number of slots, more than the `rows` rows of `num_tokens` tokens that there is memory for, whose rows need `1 + spare`
        times the pages that there are beside these slots."""
        return int(rows * (1 + spare) * (self.row_bytes(num_tokens) / (self.row_bytes(num_tokens) + spare * self.slot_bytes)))

    def num_pages(self, budget: int, slots: int) -> tuple[int, ...]:
        """Number of pages of each group, its scratch page included: as many as `slots` rows of maximum length need, or as fit
        into `budget` bytes.

        If memory is short, each group gets the pages that one row needs, and an equal share of what it needs in addition. Pages
        that no layer keeps take no memory.
        """
        least = self.row_pages + 1
        wanted = [
            max(least, 1 + min(slots * self.row_pages, slots * self._held(group, self.max_tokens) + self._prefilling(group)))
            for group in range(self.groups.num_groups)
        ]
        extra = sum(size * (count - least) for size, count in zip(self.page_bytes, wanted, strict=True))
        spare = max(0, min(extra, budget - slots * self.slot_bytes - self.prefix_bytes - least * sum(self.page_bytes)))
        return tuple(least + ((count - least) * spare // extra if extra else count - least) for count in wanted)

    def _held(self, group: int, num_tokens: float) -> int:
        return self.groups.max_columns(group, int(-(-num_tokens // 1)), self.page_size, self.lookahead)

    def _prefilling(self, group: int) -> int:
        """Pages of a group that the rows of a prefill pass give back after it."""
        most = -(-max(self.max_tokens, self.pass_tokens) // self.page_size)
        return 0 if self.groups.windows[group] is None else max(0, most - self._held(group, self.max_tokens))


def kv_bytes(batch: PackedBatch, spec: ModelSpec, dtype: torch.dtype, draft_layers: Sequence[LayerState] = ()) -> int:
    """Bytes of all K/V pages of a batch."""
    groups, size_bytes = _groups(spec, dtype, draft_layers, batch.page_size, batch.max_len)
    return sum(count * size for count, size in zip(batch.group_pages(groups.num_groups), size_bytes, strict=True))


def row_tensor_bytes(batch: PackedBatch, spec: ModelSpec, dtype: torch.dtype, draft_layers: Sequence[LayerState] = ()) -> int:
    """Bytes of what layers keep of the rows in all slots of a batch besides their pages, and of prefixes."""
    slots = batch.num_slots * _slot_bytes(spec, dtype, draft_layers, batch.page_size, batch.num_verified)
    return slots + _prefix_bytes(spec, dtype, batch.page_size, batch.num_verified)


def _prefix_bytes(spec: ModelSpec, dtype: torch.dtype, page_size: int, num_verified: int) -> int:
    return PREFIX_STATES * sum(layer.row_bytes for layer in spec.layer_states(dtype, page_size, draft_len=num_verified))


def _slot_bytes(
    spec: ModelSpec, dtype: torch.dtype, draft_layers: Sequence[LayerState], page_size: int, num_verified: int
) -> int:
    layers = spec.layer_states(dtype, page_size, draft_len=num_verified)
    return sum(layer.row_bytes for layer in (*layers, *draft_layers))


def _groups(
    spec: ModelSpec, dtype: torch.dtype, draft_layers: Sequence[LayerState], page_size: int, max_len: int
) -> tuple[KVGroups, tuple[int, ...]]:
    """The K/V groups, and bytes of a page of each over its layers."""
    layers = [layer for layer in spec.layer_states(dtype, page_size, draft_len=0) if layer.pages is not None]
    groups = KVGroups.of(windows_of(layers), windows_of(draft_layers), max_len)
    size_bytes = [0] * groups.num_groups
    for group, layer in zip(groups.target_layers, layers, strict=True):
        size_bytes[group] += layer.page_bytes
    size_bytes[groups.draft_group] += sum(layer.page_bytes for layer in draft_layers)
    return groups, tuple(size_bytes)
