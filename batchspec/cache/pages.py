"""K/V pages: the tensor that holds them, and the host's account of who owns which page."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from batchspec.cache.layout import KVLayout, LayerKV
from batchspec.errors import CapacityError
from batchspec.kernels.kv_cache.kv_move import kv_move
from batchspec.records import Ids

SCRATCH_PAGE = 0
"""Dead rows and padding write here; no row ever reads it."""


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """K/V of all layers in pages: the target's layers first, then the drafter's. A page id names a page of every layer.

    kv        [layers, 2 (K, V), P, page_size, num_kv_heads, head_dim] in `layout`
    draft_kv  the same of the drafter's layers, in `draft_layout`
    """

    kv: Tensor
    layout: KVLayout
    draft_kv: Tensor
    draft_layout: KVLayout

    @classmethod
    def allocate(
        cls,
        layout: KVLayout,
        *,
        num_layers: int,
        num_pages: int,
        device: torch.device,
        num_draft_layers: int = 0,
        draft_layout: KVLayout | None = None,
    ) -> KVCache:
        """Zeroed pages. draft_layout: of the drafter's layers; None: the target's."""
        draft_layout = draft_layout or layout
        assert draft_layout.page_size == layout.page_size, (layout, draft_layout)  # they share page ids
        kv, draft_kv = layout.allocate(num_layers, num_pages, device), draft_layout.allocate(num_draft_layers, num_pages, device)
        return cls(kv, layout, draft_kv, draft_layout)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.layout.page_size

    def layer(self, index: int) -> LayerKV:
        """The target's layers are 0 .. L-1, the drafter's follow."""
        if index < len(self.kv):
            return LayerKV(self.kv[index], self.layout)
        return LayerKV(self.draft_kv[index - len(self.kv)], self.draft_layout)

    def drafter_part(self) -> KVCache:
        """The drafter's layers as 0 .. : what a drafter that is a whole model reads and writes."""
        return KVCache(self.draft_kv, self.draft_layout, self.draft_kv[:0], self.draft_layout)

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """Keys and values that mean nothing, for a benchmark of rounds without a prefill."""
        for kv in (self.kv, self.draft_kv):
            kv.normal_(generator=generator)

    def move(self, tree_slots: Tensor, path: Tensor, chain_slots: Tensor, accepted_len: Tensor) -> None:
        """Move the K/V of accepted tree nodes to where a chain's would be, in the target's layers: see the kernel `kv_move`."""
        kv_move(self.kv, tree_slots, path, chain_slots, accepted_len)


def prefix_hashes(ids: Ids, page_size: int, lookahead: int = 0) -> list[bytes]:
    """One key for each whole page of `ids`, made of all tokens up to the page's end: equal keys, equal K/V.

    lookahead  tokens behind a page that its K/V depends on too, 1 for an EAGLE head's: the key covers them, and a page without
               them in `ids` gets none
    """
    keys, parent = [], b""
    for end in range(page_size, len(ids) - lookahead + 1, page_size):
        parent = blake2b(parent + ids[end - page_size : end + lookahead].tobytes(), digest_size=16).digest()
        keys.append(parent)
    return keys


class PagePool:
    """Reference-counted page ids of a fixed pool; page 0 is scratch and never handed out.

    Pages whose content is a known prefix stay findable by key, after their last owner too, until they are taken
    for something else (least recently released first).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise CapacityError(
                f"packing.pages={num_pages}: at least 2 are needed, one of them scratch; raise packing.pages or memory_gb"
            )
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._free = deque(range(SCRATCH_PAGE + 1, num_pages))
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # unowned pages that a key still finds, oldest first

    @property
    def num_free(self) -> int:
        """Pages that `take` could hand out now."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """`count` pages for one owner. The caller has looked at `num_free`."""
        assert count <= self.num_free, (count, self.num_free)
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            else:
                page, _none = self._idle.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._refs[page] = 1
            pages.append(page)
        return pages

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages that hold the longest known beginning of `keys`; nothing changes hands."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of `pages` no row owns: sharing them uses up free pages."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each page."""
        for page in pages:
            self._idle.pop(page, None)
            self._refs[page] += 1

    def publish(self, page: int, key: bytes) -> None:
        """Let `match` find this page, whose content is (or, in stream order, will be) what `key` says."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self) -> None:
        """`match` finds nothing of what was published so far; owners keep their pages."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._page_of.clear()

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each page."""
        for page in pages:
            self._refs[page] -= 1
            assert self._refs[page] >= 0, page
            if self._refs[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)
