"""How K/V memory is shared out: pages of each K/V group for a number of slots.

Groups have pools of their own (`cache.groups`), sized once. A row needs all of its pages in a group that reads every key. In a
group with a window it needs those that the window reaches, and all of them while it is prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchspec.cache.groups import KVGroups
from batchspec.cache.layout import KVLayout
from batchspec.model.spec import ModelSpec
from batchspec.records import PackedBatch

DraftLayers = Sequence[tuple[KVLayout, int | None]]
"""Layout and window of each of a drafter's layers: newest keys that it reads, None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """What rows need of each group."""

    groups: KVGroups
    page_bytes: tuple[int, ...]
    """Of each group, over its layers."""
    page_size: int
    max_tokens: int
    """Tokens of the longest row, with what rounds write after its end."""
    lookahead: int
    """Tokens of a row that are not committed yet: drafts of all rounds in flight."""
    pass_tokens: int
    """Tokens of a prefill pass."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        dtype: torch.dtype,
        draft_layers: DraftLayers,
        *,
        page_size: int,
        max_len: int,
        max_tokens: int,
        lookahead: int,
        pass_tokens: int,
    ) -> KVMemory:
        """Of a target and its drafter; max_len: prompt and output of a row at most."""
        groups, size_bytes = _groups(spec, dtype, draft_layers, page_size, max_len)
        return cls(
            groups=groups, page_bytes=size_bytes,
            page_size=page_size, max_tokens=max_tokens, lookahead=lookahead, pass_tokens=pass_tokens,
        )  # fmt: skip

    @property
    def row_pages(self) -> int:
        """Pages that the longest row needs in every group while it is prefilled."""
        return -(-self.max_tokens // self.page_size)

    def row_bytes(self, num_tokens: float) -> int:
        """Bytes of the pages of a decoding row."""
        return sum(size * self._held(group, num_tokens) for group, size in enumerate(self.page_bytes))

    def rows(self, budget: int, num_tokens: float) -> int:
        """Decoding rows of so many tokens that `budget` bytes hold, beside the scratch pages and one pass of prefill."""
        beside = sum(size * (1 + self._prefilling(group)) for group, size in enumerate(self.page_bytes))
        return max(1, (budget - beside) // self.row_bytes(num_tokens))

    def num_pages(self, budget: int, slots: int) -> tuple[int, ...]:
        """Pages of each group, its scratch page included: what `slots` of the longest rows need, or all that `budget` bytes hold.

        Each group gets what one row needs, and the same share of what more it could use.
        """
        least = self.row_pages + 1
        wanted = [
            max(least, 1 + min(slots * self.row_pages, slots * self._held(group, self.max_tokens) + self._prefilling(group)))
            for group in range(self.groups.num_groups)
        ]
        extra = sum(size * (count - least) for size, count in zip(self.page_bytes, wanted, strict=True))
        spare = min(extra, budget - least * sum(self.page_bytes))
        return tuple(least + ((count - least) * spare // extra if extra else 0) for count in wanted)

    def _held(self, group: int, num_tokens: float) -> int:
        return self.groups.max_columns(group, int(-(-num_tokens // 1)), self.page_size, self.lookahead)

    def _prefilling(self, group: int) -> int:
        """Pages that the rows of a pass hold in a group beyond those that they keep."""
        most = -(-max(self.max_tokens, self.pass_tokens) // self.page_size)
        return 0 if self.groups.windows[group] is None else max(0, most - self._held(group, self.max_tokens))


def kv_bytes(batch: PackedBatch, spec: ModelSpec, dtype: torch.dtype, draft_layers: DraftLayers = ()) -> int:
    """Bytes of all K/V pages of a batch."""
    groups, size_bytes = _groups(spec, dtype, draft_layers, batch.page_size, batch.max_len)
    return sum(count * size for count, size in zip(batch.group_pages(groups.num_groups), size_bytes, strict=True))


def _groups(
    spec: ModelSpec, dtype: torch.dtype, draft_layers: DraftLayers, page_size: int, max_len: int
) -> tuple[KVGroups, tuple[int, ...]]:
    """The K/V groups, and bytes of a page of each over its layers."""
    groups, layout = KVGroups.of(spec.windows, [window for _, window in draft_layers], max_len), spec.kv_layout(dtype, page_size)
    size_bytes = [groups.num_target_layers(group) * layout.page_bytes for group in range(groups.num_groups)]
    size_bytes[groups.draft_group] += sum(draft.page_bytes for draft, _ in draft_layers)
    return groups, tuple(size_bytes)
