"""Automata on the device: tables and masks at fixed addresses, which captured rounds read while automata are added and
removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchspec.automata.token_automaton import DEAD, FORCED, MASK, NEXT, NUM_SYMBOLS, TokenAutomaton, TokenSymbols
from batchspec.kernels.sampling.advance_states import advance_states
from batchspec.kernels.sampling.constrain import constrain_drafts, constrain_logits, mask_rows
from batchspec.kernels.sampling.undecided import hold_undecided, mark_undecided
from batchspec.records import Ids

TABLE_WORDS = 16 << 20
"""int32 words for the tables of all automata that are on the device: 64 MiB."""
MASKS_BYTES = 256 << 20
"""Bytes for the masks of these automata."""
LAZY_WORDS = 2 << 20
"""int32 words for the states of lazy automata, which follow in the same tables: 8 MiB."""
LAZY_MASKS_BYTES = 64 << 20
"""Bytes for the masks of these states."""
SENT_BYTES = 8 << 20
"""Automata are uploaded in parts of at most this many bytes, from pinned memory that is reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomataCapacity:
    """Capacity of the device's tables, for a vocabulary of `num_tokens`. The largest automaton that admission accepts fits."""

    num_tokens: int
    table_words: int = TABLE_WORDS
    masks_bytes: int = MASKS_BYTES
    lazy_words: int = LAZY_WORDS
    lazy_masks_bytes: int = LAZY_MASKS_BYTES

    @property
    def mask_words(self) -> int:
        return -(-self.num_tokens // 32)

    @property
    def num_masks(self) -> int:
        return self.masks_bytes // (4 * self.mask_words)

    @property
    def num_lazy_masks(self) -> int:
        return self.lazy_masks_bytes // (4 * self.mask_words)

    @property
    def nbytes(self) -> int:
        return 4 * (self.table_words + self.lazy_words) + self.masks_bytes + self.lazy_masks_bytes

    @property
    def none_allowed(self) -> ConstraintOffsets:
        """A state after all others that allows no token. A row with an automaton has it until `constrain` sets its own state."""
        classes = self.table_words + self.lazy_words
        return ConstraintOffsets(classes, classes + NUM_SYMBOLS)


@dataclass(frozen=True, slots=True)
class ConstraintOffsets:
    """Where the automaton and the state of a row are in the tables, when the row enters a slot or is woken."""

    classes: int
    """Word number of the automaton's class map."""
    state: int
    """Word number of the state after the row's output tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class AutomatonUpload:
    """An automaton to upload: words [N] go to `place` of the tables, masks [M, W] to rows mask_ids [M].

    If another rank sent it, the masks are one-dimensional.
    """

    place: int
    words: Ids
    mask_ids: Ids
    masks: Ids

    @classmethod
    def of(cls, automaton: TokenAutomaton, place: int, mask_ids: Ids) -> AutomatonUpload:
        """The upload of an automaton, with the numbers of states and masks replaced by their places."""
        table = automaton.table
        rows = table.copy()
        rows[:, MASK] = mask_ids[table[:, MASK]]
        following = table[:, NEXT:]
        rows[:, NEXT:] = np.where(following == DEAD, 0, place_of(automaton, 0, place) + table.shape[1] * following)
        words = np.concatenate((automaton.classes, rows.ravel())).astype(np.int32)
        return cls(place, words, mask_ids, automaton.masks)


def place_of(automaton: TokenAutomaton, state: int, place: int) -> int:
    """The word number of a state's row if the automaton is at `place`."""
    return place + NUM_SYMBOLS + state * int(automaton.table.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class StatesUpload:
    """States of a lazy automaton to upload: new ones, or ones that have been computed since.

    Words [N] go to places `at` [N] of the tables, masks [M, W] (one-dimensional if another rank sent them) to rows mask_ids [M].
    """

    at: Ids
    words: Ids
    mask_ids: Ids
    masks: Ids


class Automata:
    """The tables of all automata that rows in slots follow, and the symbols of the vocabulary's tokens."""

    def __init__(self, vocabulary: TokenSymbols, capacity: AutomataCapacity, device: torch.device) -> None:
        self.none_allowed, num_masks = capacity.none_allowed, capacity.num_masks + capacity.num_lazy_masks
        self.tables = torch.zeros(self.none_allowed.state + NEXT + 1, dtype=torch.int32, device=device)
        self.masks = torch.zeros(num_masks + 1, capacity.mask_words, dtype=torch.int32, device=device)
        self.tables[self.none_allowed.state + MASK] = num_masks
        self.tables[self.none_allowed.state + FORCED] = -1  # its next state is 0
        self.symbols, self.starts = (torch.from_numpy(x.copy()).to(device) for x in (vocabulary.symbols, vocabulary.starts))

    def upload(self, new: Sequence[AutomatonUpload]) -> None:
        """Upload in stream order: no round that is launched later reads what was there before."""
        for part in _parts(new):
            columns = ([one.words for one in part], [one.mask_ids for one in part], [one.masks for one in part])
            words, mask_ids, masks = sent(columns, self.tables.device)
            for one, own in zip(part, words.split([one.words.size for one in part]), strict=True):
                self.tables[one.place : one.place + len(own)] = own
            self._write_masks(mask_ids, masks)

    def upload_states(self, new: StatesUpload) -> None:
        """Upload in stream order. Words that live rows may read keep their values."""
        at, words, mask_ids, masks = sent(([new.at], [new.words], [new.mask_ids], [new.masks]), self.tables.device)
        self.tables[at.long()] = words
        self._write_masks(mask_ids, masks)

    def _write_masks(self, mask_ids: Tensor, masks: Tensor) -> None:
        if len(mask_ids):
            self.masks[mask_ids.long()] = masks.view(len(mask_ids), -1)

    def mark_undecided(
        self, target_ids: Tensor, row_ids: Tensor, states: Tensor, classes: Tensor, *, drafts: Tensor | None,
        num_drafted: Tensor | None, draft_rows: Tensor | None,
    ) -> None:
        """See `mark_undecided`."""
        mark_undecided(
            target_ids, row_ids, states, classes, self.tables, self.symbols, self.starts, drafts=drafts, num_drafted=num_drafted,
            draft_rows=draft_rows,
        )

    def hold_undecided(self, states: Tensor, live: Tensor, log: Tensor) -> None:
        """See `hold_undecided`."""
        hold_undecided(states, self.tables, live=live, log=log)

    def constrain(
        self, logits: Tensor, row_ids: Tensor, states: Tensor, classes: Tensor, *, drafts: Tensor | None,
        num_drafted: Tensor | None, draft_rows: Tensor | None, map_ids: Tensor | None, first_id: int, positions: Tensor,
        min_tokens: Tensor, stop_ids: Tensor,
    ) -> None:
        """See `constrain_logits`."""
        constrain_logits(
            logits, row_ids, states, classes, self.tables, self.masks, self.symbols, self.starts, drafts=drafts,
            num_drafted=num_drafted, draft_rows=draft_rows, map_ids=map_ids, first_id=first_id, positions=positions,
            min_tokens=min_tokens, stop_ids=stop_ids,
        )

    def allowed(
        self, row_ids: Tensor, states: Tensor, classes: Tensor, *, drafts: Tensor | None, num_drafted: Tensor | None,
        draft_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The masks of all automata, and for each position the row of its mask, int32 [T]: see `mask_rows`."""
        found = torch.empty_like(row_ids)
        mask_rows(
            row_ids, states, classes, self.tables, self.symbols, self.starts, out_rows=found, drafts=drafts,
            num_drafted=num_drafted, draft_rows=draft_rows,
        )
        return self.masks, found

    def constrain_drafts(self, draft_ids: Tensor, draft_len: Tensor, states: Tensor, classes: Tensor) -> None:
        """See `constrain_drafts`."""
        constrain_drafts(draft_ids, draft_len, states, classes, self.tables, self.masks, self.symbols, self.starts)

    def advance(self, states: Tensor, classes: Tensor, log: Tensor, live: Tensor) -> None:
        """See `advance_states`."""
        advance_states(states, classes, log, live, self.tables, self.masks, self.symbols, self.starts)


def _parts(new: Sequence[AutomatonUpload]) -> Iterator[Sequence[AutomatonUpload]]:
    """Uploads, in their order, in groups that are sent together: at most SENT_BYTES, or a single one."""
    first = num_bytes = 0
    for at, one in enumerate(new):
        own = one.words.nbytes + one.mask_ids.nbytes + one.masks.nbytes
        if first < at and num_bytes + own > SENT_BYTES:
            yield new[first:at]
            first, num_bytes = at, 0
        num_bytes += own
    if new:
        yield new[first:]


def sent(columns: Sequence[Sequence[Ids]], device: torch.device) -> tuple[Tensor, ...]:
    """The arrays of each column concatenated, int32, on the device, by one transfer. The host does not wait for a GPU.

    numpy copies them in this thread. `Tensor.pin_memory`, which copies more than 32,768 numbers with all of torch's threads, took
    3 to 8 ms each time while rounds ran: 100 automata of 0.7 MB took 0.5 to 1.6 s instead of 0.01 s (H200, 16 cores).
    """
    sizes = [sum(array.size for array in column) for column in columns]
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate([array.ravel() for column in columns for array in column], out=host.numpy())
    found: tuple[Tensor, ...] = host.to(device, non_blocking=True).split(sizes)
    return found
