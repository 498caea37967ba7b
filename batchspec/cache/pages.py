"""Pages: the tensors that hold them, and the reference counts of a page pool."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.upload import upload
from batchspec.cache.groups import KVGroups
from batchspec.cache.kept import Kept, kept_of
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.cache.page_format import LayerPages
from batchspec.errors import CapacityError
from batchspec.kernels.kv_cache.kv_move import kv_move
from batchspec.kernels.rounds.move_rows import move_rows
from batchspec.kernels.rounds.write_rows import write_rows
from batchspec.records import Ids, ImagePiece

ALIGNED = 64
"""The numbers that a layer keeps of a row begin at a multiple of so many."""
SCRATCH_PAGE = 0
"""Dead rows and padding write to this page, and page tables hold it for columns without a page. Its content never affects a
result."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVCache:
    """What all layers keep of the rows: pages, and row tensors. The layers of a group, the drafter's included, share page
    ids."""

    layers: tuple[LayerPages, ...]
    """The pages of the target's layers that keep some, then the drafter's."""
    groups: KVGroups
    target_pages: tuple[tuple[int, Tensor], ...]
    """Of the target's layers with one format in one group, the group and their pages [layers, parts, P, page_size, ...]. `layers`
    are views of them."""
    page_size: int
    """Tokens."""
    table_ids: tuple[int, ...]
    """For each group, the index of its table in `DeviceBatch.page_tables`."""
    kept: tuple[Kept, ...]
    """Of each of the target's layers, for its passes."""
    draft_kept: tuple[Kept, ...] = ()
    """Of each of the drafter's layers, whose pages are all in one group."""
    draft_rows: tuple[Tensor, ...] = ()
    """The row tensors [slots, ...] of the drafter's layers, in their order."""
    num_folded: Tensor | None = None
    """int32 [slots] number of the row's first tokens that the states of the target's layers hold; None: no layer lags."""
    states: tuple[Tensor, ...] = ()
    """All row tensors of the target and `num_folded` as few tensors [slots, n]. After the entries of the slots come those of
    prefixes."""

    @classmethod
    def allocate(
        cls,
        layers: Sequence[LayerState],
        draft_layers: Sequence[LayerState] = (),
        *,
        groups: KVGroups,
        page_size: int,
        num_pages: Sequence[int],
        num_slots: int = 1,
        num_states: int = 0,
        device: torch.device,
        scales: Sequence[Tensor] | None = None,
    ) -> KVCache:
        """Zeroed pages and row tensors.

        layers, draft_layers  of the target and of the drafter, whose scales are 1
        page_size  of all layers, in tokens
        num_pages  of each group
        num_states  entries of the target's row tensors beyond those of the slots, for states of prefixes
        scales     of each of the target's layers that keep pages, if their formats have scales
        """
        formats = [layer.pages for layer in layers if layer.pages is not None]
        draft_formats = [layer.pages for layer in draft_layers if layer.pages is not None]
        # A row has as many pages in all layers.
        assert all(own.page_size == page_size for own in (*formats, *draft_formats)), page_size
        kinds = list(zip(groups.target_layers, formats, strict=True))
        memory = {kind: kind[1].allocate(count, num_pages[kind[0]], device) for kind, count in Counter(kinds).items()}
        pages = {kind: iter(own) for kind, own in memory.items()}
        of_layers: Sequence[Tensor | None] = [None] * len(kinds) if scales is None else scales
        target_layers = [kind[1].open(next(pages[kind]), own) for kind, own in zip(kinds, of_layers, strict=True)]
        num_draft_pages = num_pages[groups.draft_group]
        # No output token depends on drafts: rounding with a scale of 1 can only cost acceptance.
        draft_pages = [
            own.open(own.allocate(1, num_draft_pages, device)[0], own.unit_scales(device)) for own in draft_formats
        ]
        rows = tuple(
            torch.zeros((num_slots, *one.shape), dtype=one.dtype, device=device) for layer in draft_layers for one in layer.row
        )
        target_rows, states = _target_rows(layers, num_slots + num_states, device)
        num_folded: Tensor | None = None
        if any(layer.lags for layer in layers):
            num_folded = torch.zeros(num_slots + num_states, dtype=torch.int32, device=device)
            states = (*states, num_folded.unsqueeze(1))
        return cls(
            layers=(*target_layers, *draft_pages),
            groups=groups,
            target_pages=tuple((group, own) for (group, _), own in memory.items()),
            page_size=page_size,
            table_ids=tuple(range(groups.num_groups)),
            kept=kept_of(layers, target_layers, groups.target_layers, rows=target_rows, num_folded=num_folded),
            draft_kept=kept_of(draft_layers, draft_pages, [0] * len(draft_pages)),
            draft_rows=rows,
            num_folded=num_folded,
            states=states,
        )

    def page_tables(self, rows: DeviceBatch) -> tuple[Tensor, ...]:
        """The page tables of the groups, in their order, int32 [R, pages] each."""
        return tuple(rows.page_tables[table] for table in self.table_ids)

    def draft_table(self, rows: DeviceBatch) -> Tensor:
        """int32 [R, max pages a row] the page table of the drafter's layers."""
        return rows.page_tables[self.table_ids[self.groups.draft_group]]

    def drafter_part(self) -> KVCache:
        """The cache of the drafter's layers alone, numbered from 0, for a drafter that is a whole model. All are in one group."""
        layers = self.layers[len(self.groups.target_layers) :]
        return KVCache(
            layers=layers, groups=KVGroups.single(len(layers)), target_pages=(), page_size=self.page_size,
            table_ids=(self.groups.draft_group,), kept=self.draft_kept,
        )

    @property
    def row_tensors(self) -> tuple[Tensor, ...]:
        """Everything that compaction moves with a row: views [slots, n]."""
        return (*(tensor.view(len(tensor), -1) for tensor in self.draft_rows), *self.states)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy what the target's layers keep of a row: (from, to) of each. No entry is written twice, or read and written."""
        if copies:
            sources, destinations = upload(list(zip(*copies, strict=True)), torch.int32, self.states[0].device)
            for tensor in self.states:
                move_rows(tensor, sources, destinations)

    def fold(self, batch: FlatBatch) -> None:
        """Note which tokens the states of the target's layers hold, after a pass or a round has gone through all of them."""
        if self.num_folded is None:
            return
        begins = batch.cu_seqlens_q[:-1].clamp(max=len(batch.positions) - 1)  # a dead row may begin where the tokens end
        folded = batch.kv_len if batch.commits else batch.positions.index_select(0, begins).int()
        before = self.num_folded[: len(folded)] if batch.slots is None else self.num_folded.index_select(0, batch.slots)
        folded = torch.where(batch.kv_len > 0, folded, before)
        if batch.slots is None:
            before.copy_(folded)
        else:
            self.num_folded.index_copy_(0, batch.slots, folded)

    def enter(self, slot_ids: Tensor, kv_len: Tensor, values: Sequence[Tensor]) -> None:
        """Write the drafter's row tensors of the rows of a prefill pass.

        slot_ids  int64 [R] the slot of each
        kv_len    int32 [R] 0 for a dead row, whose slot keeps its entries
        values    for each of `draft_rows`, [R, ...]
        """
        for tensor, value in zip(self.draft_rows, values, strict=True):
            write_rows(tensor, slot_ids, kv_len, value)

    def move_accepted(self, nodes: FlatBatch, path: Tensor, chain: FlatBatch, accepted_len: Tensor) -> None:
        """Move what the target keeps of accepted tree nodes to the slots that a chain would use, one launch for each of
        `target_pages`: see `kv_move`.

        path          int32 [R, D+1] node of each level
        accepted_len  int32 [R]
        """
        for group, pages in self.target_pages:
            kv_move(pages, nodes.of_group(group).slot_mapping, path, chain.of_group(group).slot_mapping, accepted_len)


def _target_rows(
    layers: Sequence[LayerState], num_entries: int, device: torch.device
) -> tuple[tuple[tuple[Tensor, ...], ...], tuple[Tensor, ...]]:
    """The row tensors of each layer, [entries, *shape], and the tensors [entries, n] of which they are parts: one for each dtype,
    so that few launches copy all that is kept of a row."""
    widths: dict[torch.dtype, int] = {}

    def place(one: RowTensor) -> tuple[RowTensor, int]:
        begin = widths.get(one.dtype, 0)
        widths[one.dtype] = begin + -(-prod(one.shape) // ALIGNED) * ALIGNED
        return one, begin

    places = [[place(one) for one in layer.row] for layer in layers]
    whole = {dtype: torch.zeros(num_entries, width, dtype=dtype, device=device) for dtype, width in widths.items()}

    def part(one: RowTensor, begin: int) -> Tensor:
        own = whole[one.dtype][:, begin : begin + prod(one.shape)]
        return own.view(num_entries, *one.shape)

    return tuple(tuple(part(*one) for one in own) for own in places), tuple(whole.values())


def prefix_hashes(ids: Ids, page_size: int, *, key: bytes = b"", images: Sequence[ImagePiece] = ()) -> list[bytes]:
    """A hash for each full page of `ids` that is followed by a token, over all tokens up to that one: equal hashes mean equal
    K/V, and that all else is equal which is kept of the page's tokens. What is kept of a token may depend on the next one: K/V
    of a draft head do, and the log-probability of the next token does.

    key     as `Request.prefix_key`
    images  of the prompt: the same placeholder ids may stand for different images, or for different parts of one, so the
            digest of each image that a page or the token after it belongs to counts, and where in the image the page begins
    """
    hashes, parent = [], key
    data, token_bytes = ids.tobytes(), ids.itemsize
    page_bytes = page_size * token_bytes
    for end in range(page_bytes, len(data) - token_bytes + 1, page_bytes):
        seen = b"".join([_of_page(piece, end // token_bytes, page_size) for piece in images]) if images else b""
        parent = blake2b(parent + data[end - page_bytes : end + token_bytes] + seen, digest_size=16).digest()
        hashes.append(parent)
    return hashes


def _of_page(piece: ImagePiece, end: int, page_size: int) -> bytes:
    """What tokens end - page_size .. end depend on besides their ids, if one of them is of this image; else empty."""
    begin = end - page_size
    if piece.begin > end or piece.begin + piece.length <= begin:
        return b""
    return piece.digest + (begin - piece.begin).to_bytes(8, "little", signed=True)


class PagePool:
    """Reference-counted page ids of a fixed pool; page 0 is scratch and never handed out.

    Pages that hold a cached prefix can be found by hash, also after their last owner released them, until they are taken for
    other content (least recently released first).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise CapacityError(
                f"packing.pages={num_pages}: at least 2 are needed, one of them scratch; raise packing.pages or memory_gb"
            )
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))  # a stack: what was released last is taken first
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # unowned pages that can be found by hash, oldest first

    @property
    def num_free(self) -> int:
        """Pages that `take` could hand out now."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """`count` pages for one owner; at most `num_free`."""
        assert count <= self.num_free, (count, self.num_free)
        free, refs = self._free, self._refs
        while len(free) < count:
            page, _none = self._idle.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
            free.append(page)
        pages = free[: -count - 1 : -1]
        del free[len(free) - count :]
        for page in pages:
            refs[page] = 1
        return pages

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages that hold the longest cached prefix of `hashes`. Owners do not change."""
        pages = []
        for page_hash in hashes:
            page = self.find(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def find(self, page_hash: bytes) -> int | None:
        """The page with this content, or None. Owners do not change."""
        return self._page_of.get(page_hash)

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of `pages` no row owns: sharing them uses up free pages."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each page."""
        for page in pages:
            self._idle.pop(page, None)
            self._refs[page] += 1

    def cache_prefix(self, pages: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Let `find` return a page for each hash. The content of the pages is (or, in stream order, will be) what was hashed.

        A page whose content another page has already, and pages after the last hash, are left out.
        """
        page_of, hash_of = self._page_of, self._hash_of
        for page, page_hash in zip(pages, hashes, strict=False):
            if page_hash not in page_of:
                page_of[page_hash] = page
                hash_of[page] = page_hash

    def forget(self) -> None:
        """Drop all cached prefixes; owners keep their pages."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._hash_of.clear()
        self._page_of.clear()

    def forget_prefix(self, hashes: Iterable[bytes]) -> None:
        """Drop these hashes, so that `find` no longer returns their pages; owners keep their pages."""
        for page_hash in hashes:
            page = self._page_of.pop(page_hash, None)
            if page is None:
                continue
            del self._hash_of[page]
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def release(self, pages: Iterable[int]) -> None:
        """Remove an owner from each page."""
        refs, hash_of = self._refs, self._hash_of
        for page in pages:
            refs[page] = left = refs[page] - 1
            assert left >= 0, page
            if not left:
                if page in hash_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)
