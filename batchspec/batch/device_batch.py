"""Device state of the slots: everything a round reads and writes, declared in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchspec.batch.automata import Automata, ConstraintOffsets
from batchspec.batch.bad_words import line_of
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.batch.slot_field import SlotField, declared, known_tokens
from batchspec.batch.upload import upload, upload_all
from batchspec.kernels.rounds.move_rows import move_rows
from batchspec.packed_batch import PackedBatch
from batchspec.records import MAX_BAD_WORD, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_IDS, Request

SEEN = 1
"""Bit that is set for a token that is in prompt or output."""
ONCE_IN_OUTPUT = 2
"""Added for each occurrence of the token in the output."""


@dataclass(slots=True, kw_only=True)
class DeviceBatch:
    """Device state of R slots, one tensor per field, one row per slot. New state that sampling needs of each row is one more
    field.

    A live row has num_tokens - 1 tokens in K/V: its newest token is verified together with the drafts.
    """

    tokens: Tensor = field(metadata=declared(width="max_len", begin=known_tokens, long=True))
    """int32 [R, max_len] prompt and output"""
    num_tokens: Tensor = field(metadata=declared(begin=lambda r, output: len(r.prompt_ids) + len(output)))
    """int32 [R] committed tokens, prompt included"""
    prompt_len: Tensor = field(metadata=declared(begin=lambda r, _: len(r.prompt_ids)))
    """int32 [R]"""
    limit: Tensor = field(metadata=declared(begin=lambda r, _: len(r.prompt_ids) + r.device_limit))
    """int32 [R] the row ends when num_tokens reaches it"""
    min_tokens: Tensor = field(metadata=declared(begin=lambda r, _: len(r.prompt_ids) + r.min_new_tokens))
    """int32 [R] stop ids cannot be drawn while num_tokens is below this"""
    live: Tensor = field(metadata=declared())
    """int32 [R] 1 while the row decodes"""
    finish: Tensor = field(metadata=declared())
    """int32 [R] 0 running, 1 stop id, 2 length, 3 failed"""
    keys: Tensor = field(metadata=declared(dtype=torch.int64, begin=lambda r, _: r.seed))
    """int64 [R] row key of the noise"""
    temperature: Tensor = field(metadata=declared(dtype=torch.float32, begin=lambda r, _: r.sampling.temperature))
    """float32 [R] 0 is greedy"""
    top_k: Tensor = field(metadata=declared(begin=lambda r, _: r.sampling.top_k))
    """int32 [R] 0 is off"""
    top_p: Tensor = field(metadata=declared(dtype=torch.float32, begin=lambda r, _: r.sampling.top_p))
    """float32 [R] 1 is off"""
    min_p: Tensor = field(metadata=declared(dtype=torch.float32, begin=lambda r, _: r.sampling.min_p))
    """float32 [R] 0 is off"""
    repetition: Tensor = field(metadata=declared(dtype=torch.float32, begin=lambda r, _: r.sampling.repetition_penalty))
    """float32 [R] repetition penalty, 1 is off"""
    presence: Tensor = field(metadata=declared(dtype=torch.float32, begin=lambda r, _: r.sampling.presence_penalty))
    """float32 [R] presence penalty, 0 is off"""
    frequency: Tensor = field(metadata=declared(dtype=torch.float32, begin=lambda r, _: r.sampling.frequency_penalty))
    """float32 [R] frequency penalty, 0 is off"""
    bias_ids: Tensor = field(
        metadata=declared(width="biases", initial=-1, begin=lambda r, _: [token for token, _ in r.sampling.logit_bias])
    )
    """int32 [R, MAX_LOGIT_BIAS] tokens whose logits are biased, -1 where unused; [R, 0] before a row has any"""
    bias: Tensor = field(
        metadata=declared(dtype=torch.float32, width="biases", begin=lambda r, _: [bias for _, bias in r.sampling.logit_bias])
    )
    """float32 [R, MAX_LOGIT_BIAS] the bias of each of these tokens' logits"""
    bad_words: Tensor = field(metadata=declared(width="bad_words", initial=-1, begin=lambda r, _: line_of(r)))
    """int32 [R, MAX_BAD_WORDS * MAX_BAD_WORD] see `bad_words.py`; [R, 0] before a row has any"""
    stop_ids: Tensor = field(metadata=declared(width="stop_ids", initial=-1, begin=lambda r, _: r.stop_ids))
    """int32 [R, MAX_STOP_IDS] -1 where unused"""
    page_tables: tuple[Tensor, ...] = field(metadata=declared(width="pages", per_group=True))
    """For each K/V group int32 [R, pages of max_len and of the lookahead slots], the scratch page where no page is granted yet.
    Entries that a group's window has passed name pages that the row has given back; they are not read."""
    adapter: Tensor = field(metadata=declared(begin=lambda r, _: r.adapter))
    """int32 [R] number of the row's LoRA adapter, 0 is none"""
    seen: Tensor = field(metadata=declared(width="seen"))
    """int32 [R, V] ONCE_IN_OUTPUT for each time that the token is in the output, and SEEN if it is in prompt or output; [R, 0]
    before a row has penalties"""
    automaton_classes: Tensor = field(metadata=declared())
    """int32 [R] word number, in the tables of `automata`, of the class map of the row's automaton"""
    automaton_state: Tensor = field(metadata=declared())
    """int32 [R] word number of the state after the committed tokens; 0: the row has no constraint, or has ended"""
    automata: Automata | None = None
    """The tables of all automata; None in a job without constraints."""
    vocab_size: int = 0
    max_kv: int = 0
    """Limit on the tokens of a row, drafts of a round included, that the host knows; attention plans for as many keys."""

    @classmethod
    def allocate(
        cls,
        batch: PackedBatch,
        *,
        vocab_size: int,
        device: torch.device,
        num_lookahead_slots: int = 0,
        num_groups: int = 1,
    ) -> DeviceBatch:
        """
        num_lookahead_slots  K/V positions after a row's last token that a round may write
        num_groups           K/V groups, each with a page table
        """
        widths = {
            "max_len": batch.max_len,
            "stop_ids": MAX_STOP_IDS,
            "pages": -(-(batch.max_len + num_lookahead_slots) // batch.page_size),
            "seen": 0,
            "biases": 0,
            "bad_words": 0,
        }
        made: dict[str, Any] = {}
        for name, spec in SLOT_FIELDS.items():
            shape = (batch.num_slots, widths[spec.width]) if spec.width else (batch.num_slots,)
            tensors = tuple(
                torch.full(shape, spec.initial, dtype=spec.dtype, device=device)
                for _ in range(num_groups if spec.per_group else 1)
            )
            made[name] = tensors if spec.per_group else tensors[0]
        return cls(**made, vocab_size=vocab_size, max_kv=batch.max_len)

    def provide(self, mode: SamplingMode) -> None:
        """Allocate the state that `mode` needs and that few jobs have. Call it before a graph of such a mode is captured."""
        wanted = [("seen", self.vocab_size)] if mode.penalties else []
        wanted += [("bias_ids", MAX_LOGIT_BIAS), ("bias", MAX_LOGIT_BIAS)] if mode.biased else []
        wanted += [("bad_words", MAX_BAD_WORDS * MAX_BAD_WORD)] if mode.bad_words else []
        for name, width in wanted:
            spec, tensor = SLOT_FIELDS[name], getattr(self, name)
            if tensor.shape[1] != width:
                setattr(self, name, torch.full((len(tensor), width), spec.initial, dtype=spec.dtype, device=tensor.device))

    def _tensors(self, name: str) -> tuple[Tensor, ...]:
        """The tensors of a field."""
        value: Tensor | tuple[Tensor, ...] = getattr(self, name)
        return value if isinstance(value, tuple) else (value,)

    def first(self, num_rows: int, max_kv: int | None = None) -> DeviceBatch:
        """Views of the first slots, on which a round of a smaller row bucket works. max_kv: a lower limit on their tokens."""
        views: dict[str, Any] = {}
        for name, spec in SLOT_FIELDS.items():
            first = tuple(tensor[:num_rows] for tensor in self._tensors(name))
            views[name] = first if spec.per_group else first[0]
        return DeviceBatch(**views, automata=self.automata, vocab_size=self.vocab_size, max_kv=max_kv or self.max_kv)

    def begin(self, slots: Sequence[int], requests: Sequence[Request], outputs: Sequence[Sequence[int]]) -> None:
        """Put requests into slots, not live yet; `outputs` are the tokens that each has emitted already.

        A request with an automaton can emit nothing until `constrain` has set the place of its automaton.
        """
        samplings = {id(request.sampling): request.sampling for request in requests}.values()
        self.provide(SamplingMode.union(SamplingMode.of(one, 0) for one in samplings))
        given = {name: spec for name, spec in SLOT_FIELDS.items() if spec.begin is not None and getattr(self, name).numel()}
        arrays = [
            spec.array(
                [spec.begin(request, output) for request, output in zip(requests, outputs, strict=True)],  # type: ignore[misc]
                getattr(self, name).shape[-1],
            )
            for name, spec in given.items()
        ]
        index, *sent = upload_all([np.array(slots, np.int64), *arrays], self.tokens.device)
        for (name, spec), values in zip(given.items(), sent, strict=True):
            tensor = getattr(self, name)
            if spec.long:
                tensor[index, : values.shape[1]] = values
            else:
                tensor[index] = values
        for name, spec in SLOT_FIELDS.items():
            for tensor in self._tensors(name):
                if name not in given and tensor.numel():
                    tensor[index] = spec.initial
        if self.seen.shape[1]:
            self._mark_seen(slots, requests, outputs)
        if constrained := [slot for slot, request in zip(slots, requests, strict=True) if request.automaton is not None]:
            assert self.automata is not None, "the engine was made for requests without automata"
            self.constrain([(slot, self.automata.none_allowed) for slot in constrained])

    def constrain(self, constraints: Sequence[tuple[int, ConstraintOffsets]]) -> None:
        """Set the automata of rows that have just begun: slot, and the places of class map and state."""
        lines = [(slot, constraint.classes, constraint.state) for slot, constraint in constraints]
        slots, classes, states = upload(lines, torch.int64, self.tokens.device).T
        self.automaton_classes[slots], self.automaton_state[slots] = classes.int(), states.int()

    def constrain_drafts(self, draft_ids: Tensor, draft_len: Tensor) -> None:
        """Cut drafts that were not chosen from masked logits where an automaton forbids them, and append the tokens that it
        forces.

        draft_ids int32 [R, K], draft_len int32 [R]: both are changed
        """
        assert self.automata is not None
        self.automata.constrain_drafts(draft_ids, draft_len, self.automaton_state, self.automaton_classes)

    def advance_automata(self, log: Tensor, live: Tensor) -> None:
        """Walk the rows' automata over the tokens just committed. A row whose tokens its automaton does not allow ends FAILED.

        log int32 [R, L] as `accept` writes it, live int32 [R] 0 for rows that ended with these tokens: both are changed
        """
        assert self.automata is not None
        self.automata.advance(self.automaton_state, self.automaton_classes, log, live)

    def hold_undecided(self, live: Tensor, log: Tensor) -> None:
        """Hold rows whose lazy automaton is in a state without a mask: live int32 [R] becomes 0, and `finish` in the log HELD."""
        assert self.automata is not None
        self.automata.hold_undecided(self.automaton_state, live, log)

    def resume(self, slots: Sequence[int]) -> None:
        """Rows that were held decode again."""
        self.live[upload(slots, torch.int64, self.live.device)] = 1

    def _mark_seen(self, slots: Sequence[int], requests: Sequence[Request], outputs: Sequence[Sequence[int]]) -> None:
        for slot, request, output in zip(slots, requests, outputs, strict=True):
            line = self.seen[slot]
            line[upload(request.prompt_ids, torch.int64, line.device)] = SEEN
            tokens, counts = np.unique(np.array(output, np.int64), return_counts=True)
            line[upload(tokens, torch.int64, line.device)] = upload(ONCE_IN_OUTPUT * counts + SEEN, line.dtype, line.device)

    def grant(self, grants: Sequence[tuple[int, int, Sequence[Sequence[int]]]]) -> None:
        """Write newly granted pages into the tables: slot, first column, and for each group the pages from there on."""
        counts = [len(pages[0]) for _, _, pages in grants]
        slots = np.repeat([slot for slot, _, _ in grants], counts)
        columns = np.concatenate([np.arange(first, first + count) for (_, first, _), count in zip(grants, counts, strict=True)])
        ids = [
            np.fromiter(chain.from_iterable([pages[group] for _, _, pages in grants]), np.int32, len(slots))
            for group in range(len(self.page_tables))
        ]
        at_slot, at_column, *ids_by_group = upload_all([slots, columns, *ids], self.tokens.device)
        for table, group_ids in zip(self.page_tables, ids_by_group, strict=True):
            table[at_slot, at_column] = group_ids

    def kill(self, slots: Sequence[int]) -> None:
        """The host ends or holds rows (stop string, preemption): dead from the next round on."""
        self._end(upload(slots, torch.int64, self.live.device))

    def move(self, moves: Sequence[tuple[int, int]], more: Sequence[Tensor] = ()) -> None:
        """Compaction: copy rows from slot to slot, (source, destination) each, and leave the sources dead.

        more  other tensors [slots, ...] that are moved with them: a drafter's state
        """
        sources, destinations = upload(moves, torch.int32, self.live.device).T.contiguous()
        for state in (*(tensor for name in SLOT_FIELDS for tensor in self._tensors(name)), *more):
            if state.numel():
                move_rows(state, sources, destinations)
        self._end(sources)

    def _end(self, slots: Tensor) -> None:
        """Detach the slots' automata: they may be evicted from now on."""
        self.live[slots] = 0
        self.automaton_state[slots] = 0

    def clear(self) -> None:
        """End all rows."""
        self.live.zero_()
        self.automaton_state.zero_()


SLOT_FIELDS: dict[str, SlotField] = {
    one.name: one.metadata["slot_field"] for one in fields(DeviceBatch) if "slot_field" in one.metadata
}
