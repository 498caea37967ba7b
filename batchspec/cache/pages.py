"""K/V pages: the tensor that holds them, and the host's account of who owns which page."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from batchspec.errors import CapacityError
from batchspec.records import Ids

SCRATCH_PAGE = 0
"""Dead rows and padding write here; no row ever reads it."""


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """K/V of all layers in pages; a drafter's layers stand behind the target's and share their page ids.

    kv        [layers, 2 (K, V), P, page_size, num_kv_heads, head_dim]
    draft_kv  the same of the drafter's layers, whose heads may differ
    """

    kv: Tensor
    draft_kv: Tensor
    page_size: int

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_draft_layers: int = 0,
        draft_shape: tuple[int, int] | None = None,
    ) -> KVCache:
        """All pages zero, so that masked reads of unwritten places are finite. `draft_shape`: (num_kv_heads, head_dim)."""

        def zeros(layers: int, heads: tuple[int, int]) -> Tensor:
            return torch.zeros(layers, 2, num_pages, page_size, *heads, dtype=dtype, device=device)

        heads = (num_kv_heads, head_dim)
        return cls(zeros(num_layers, heads), zeros(num_draft_layers, draft_shape or heads), page_size)

    def layer(self, index: int) -> Tensor:
        """[2, P, page_size, num_kv_heads, head_dim]; the target's layers first, then the drafter's."""
        return self.kv[index] if index < len(self.kv) else self.draft_kv[index - len(self.kv)]


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
