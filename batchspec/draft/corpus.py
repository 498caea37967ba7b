"""An index over a job's finished rows: which token followed an n-gram in other rows' prompts and outputs.

    learn    a row has ended: its tokens, prompt first, become a document of the corpus; the oldest documents are dropped
    build    in a background thread, once enough of the corpus is new: the table is built anew
    refresh  between rounds: a new table is copied to the buffer that no round reads; then the next round switches to it

The table maps the hash of every n-gram, for a few n, to its most frequent next token: the latest position of that token, and the
trust alike / (count + 1), where `alike` of the n-gram's `count` occurrences have it next. On a hash collision the entry with the
larger `alike` is kept. A table depends only on its documents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.draft.base import DrafterUpdate
from batchspec.kernels.drafting.corpus_lookup import SEED, next_hash, pack_entries

Tokens = NDArray[np.int32]
ENTRIES_A_TOKEN = 4
"""Number of table entries per token: three n-gram lengths, and room to make collisions rare."""
GROWTH = 4
"""A table is built anew when a quarter of its corpus is new."""
FEWEST = 256
"""Minimum number of new tokens for which a table is built."""
ROOM = 64
"""Number of positions after the last document that a draft may read."""


def default_lengths(min_ngram: int, max_ngram: int) -> tuple[int, ...]:
    """The n-gram lengths of the table: the shortest, the longest and one between."""
    return tuple(sorted({min_ngram, (min_ngram + max_ngram) // 2, max_ngram}))


def table_entries(num_tokens: int) -> int:
    """Number of entries E of a table: a power of two, at least ENTRIES_A_TOKEN per token."""
    return 1 << max(4, (ENTRIES_A_TOKEN * num_tokens - 1).bit_length())


def corpus_bytes(num_tokens: int) -> int:
    """Bytes on the device of both buffers; 0 without a corpus."""
    return 2 * (8 * table_entries(num_tokens) + 4 * (num_tokens + ROOM)) if num_tokens else 0


def build_table(corpus: Tensor, lengths: Sequence[int], num_entries: int) -> Tensor:
    """The table int64 [E] for corpus int32 [C], in which a negative token separates documents. An n-gram that ends a document is
    left out."""
    table = torch.zeros(num_entries, dtype=torch.int64)
    places, following = torch.arange(len(corpus) - 1), corpus[1:]
    hashes, whole, older = torch.full_like(following, SEED), following >= 0, corpus[:-1]
    for n in range(1, lengths[-1] + 1):
        hashes, whole = next_hash(hashes, older), whole & (older >= 0)
        if n in lengths:
            _add_ngrams(table, hashes[whole], following[whole], places[whole])
        older = torch.cat((older.new_full((1,), -1), older[:-1]))
    return table


def _add_ngrams(table: Tensor, hashes: Tensor, following: Tensor, places: Tensor) -> None:
    """Add the n-grams of one length: hashes and next tokens int32 [M], places int64 [M] of their last tokens, ascending."""
    if not len(hashes):
        return
    wide = hashes.long()
    kinds, order = (wide * (1 << 31) + following.long()).sort(stable=True)
    kinds, alike = kinds.unique_consecutive(return_counts=True)
    latest = places[order][alike.cumsum(0) - 1]
    runs, group = (kinds >> 31).unique_consecutive(return_inverse=True)
    count = torch.zeros_like(runs).scatter_add_(0, group, alike)
    best = torch.zeros_like(runs).scatter_reduce_(0, group, (alike << 32) | latest, "amax")
    alike, latest = best >> 32, best & 0xFFFFFFFF
    entries = pack_entries(alike, latest, (255 * alike // (count + 1)).clamp_(min=1))
    table.scatter_reduce_(0, runs & (len(table) - 1), entries, "amax")


@dataclass(frozen=True, slots=True)
class _Built:
    table: Tensor
    corpus: Tensor


class Corpus:
    """Both table buffers on the device, and the code that fills them. All but `build` runs in the engine's thread."""

    def __init__(
        self, num_tokens: int, *, lengths: Sequence[int], device: torch.device, background: bool = True
    ) -> None:
        """
        num_tokens  maximum number of tokens in the corpus
        lengths     lengths of the n-grams in the table, ascending
        background  False: `refresh` waits for building and upload
        """
        self.num_tokens, self.lengths = num_tokens, tuple(lengths)
        self.which = torch.zeros(1, dtype=torch.int32, device=device)
        """int32 [1] index of the buffer that rounds read."""
        self.table = torch.zeros(2, table_entries(num_tokens), dtype=torch.int64, device=device)
        self.tokens = torch.full((2, num_tokens + ROOM), -1, dtype=torch.int32, device=device)
        self._documents: deque[Tokens] = deque()
        self._size = self._new = self._in_use = 0
        self._before: Tokens = np.empty(0, np.int32)
        self._background, self._worker = background, ThreadPoolExecutor(1, "corpus")
        self._building: Future[_Built] | None = None
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arriving: tuple[_Built, Any] | None = None
        self._swapped: Any = None

    def learn(self, prompt_ids: Tokens, token_ids: Tokens) -> None:
        """Add an ended row. A prefix that it shares with the row before is in the corpus already and is not added again."""
        document = np.concatenate((prompt_ids, token_ids)).astype(np.int32, copy=False)
        shortest = min(len(document), len(self._before))
        differs = np.flatnonzero(document[:shortest] != self._before[:shortest])
        common = int(differs[0]) if len(differs) else shortest
        self._before = document
        # The separator between documents counts as a token.
        document = document[max(0, common - self.lengths[-1], len(document) - (self.num_tokens - 1)) :]
        if len(document) <= self.lengths[0]:
            return
        self._documents.append(document)
        self._size += len(document) + 1
        self._new += len(document) + 1
        while self._size > self.num_tokens:
            self._size -= len(self._documents.popleft()) + 1

    def next_update(self) -> DrafterUpdate:
        """What is ready now: the only decision of `refresh` that depends on a clock. Changes nothing."""
        arriving, building = self._arriving, self._building
        swap = arriving is not None and (arriving[1] is None or not self._background or arriving[1].query())
        upload = building is not None and (arriving is None or swap) and (building.done() or not self._background)
        return DrafterUpdate(swap=swap, upload=upload)

    def refresh(self, update: DrafterUpdate) -> None:
        """Advance the update by one step, between two rounds and on their stream. Waits only for what `update` says is ready."""
        if update.swap:
            self._swap()
        if update.upload:
            assert self._building is not None
            self._upload(self._building.result())
            self._building = None
        if self._building is None and self._new >= max(FEWEST, self._size // GROWTH):
            self._new = 0
            self._building = self._worker.submit(self._build, list(self._documents))
        if not self._background and (self._building is not None or self._arriving is not None):
            self.refresh(self.next_update())

    def _build(self, documents: Sequence[Tokens]) -> _Built:
        host = torch.full((self.tokens.shape[1],), -1, dtype=torch.int32)
        border = np.full(1, -1, np.int32)
        joined = np.concatenate([part for document in documents for part in (document, border)])
        host[: len(joined)] = torch.from_numpy(joined)
        built = _Built(build_table(host[: len(joined)], self.lengths, self.table.shape[1]), host)
        return built if self._stream is None else _Built(built.table.pin_memory(), built.corpus.pin_memory())

    def _upload(self, built: _Built) -> None:
        """Copy to the buffer that no round reads: rounds launched before the last swap have ended when the copy begins."""
        spare = 1 - self._in_use
        if self._stream is None:
            self.table[spare].copy_(built.table)
            self.tokens[spare].copy_(built.corpus)
            self._arriving = (built, None)
            return
        if self._swapped is not None:
            self._stream.wait_event(self._swapped)
        with torch.cuda.stream(self._stream):
            self.table[spare].copy_(built.table, non_blocking=True)
            self.tokens[spare].copy_(built.corpus, non_blocking=True)
        self._arriving = (built, self._stream.record_event())

    def _swap(self) -> None:
        assert self._arriving is not None
        self._in_use = 1 - self._in_use
        if self._arriving[1] is not None:
            torch.cuda.current_stream().wait_event(self._arriving[1])
        self.which.fill_(self._in_use)
        if self._stream is not None:
            self._swapped = torch.cuda.current_stream().record_event()
        self._arriving = None
