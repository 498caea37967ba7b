"""Device state of the slots: everything a round reads and writes, declared in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.automata import Automata, ConstraintOffsets
from batchspec.batch.image_inputs import AxisPositions
from batchspec.batch.images import ImagesOnDevice, rope_positions
from batchspec.batch.logits import ONCE_IN_OUTPUT, RULES, SEEN
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.batch.slot_field import SlotField, declared, known_tokens
from batchspec.batch.upload import upload, upload_all
from batchspec.kernels.rounds.move_rows import move_rows
from batchspec.packed_batch import PackedBatch
from batchspec.records import MAX_STOP_IDS, Request


def end_of_prompt(request: Request, _output: Sequence[int]) -> Sequence[int] | NDArray[np.int64]:
    """[3] RoPE positions of the prompt's last token; of a row without images they are not read."""
    count = len(request.prompt_ids)
    return rope_positions(request.images, count - 1, count)[:, 0] if request.images else (count - 1,) * 3


@dataclass(slots=True, kw_only=True)
class DeviceBatch:
    """Device state of R slots, one tensor per field, one row per slot.

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
    stop_ids: Tensor = field(metadata=declared(width=MAX_STOP_IDS, initial=-1, begin=lambda r, _: r.stop_ids))
    """int32 [R, MAX_STOP_IDS] -1 where unused"""
    page_tables: tuple[Tensor, ...] = field(metadata=declared(width="pages", per_group=True))
    """For each K/V group int32 [R, pages of max_len and of the lookahead slots], the scratch page where no page is granted yet.
    Entries that a group's window has passed name pages that the row has given back; they are not read."""
    adapter: Tensor = field(metadata=declared(begin=lambda r, _: r.adapter))
    """int32 [R] number of the row's LoRA adapter, 0 is none"""
    rope_delta: Tensor = field(metadata=declared(begin=lambda r, _: sum(one.advance - one.length for one in r.images)))
    """int32 [R] what is added to positions after the prompt: an image takes fewer positions than it has tokens"""
    rope_end: Tensor = field(metadata=declared(width=3, begin=end_of_prompt))
    """int32 [R, 3] RoPE positions (time, height, width) of the prompt's last token, which may be one of an image"""
    seen: Tensor = field(metadata=declared(width="vocab", wanted=lambda mode: mode.penalties))
    """int32 [R, V] ONCE_IN_OUTPUT for each time that the token is in the output, and SEEN if it is in prompt or output; [R, 0]
    before a row has penalties"""
    automaton_classes: Tensor = field(metadata=declared())
    """int32 [R] word number, in the tables of `automata`, of the class map of the row's automaton"""
    automaton_state: Tensor = field(metadata=declared())
    """int32 [R] word number of the state after the committed tokens; 0: the row has no constraint, or has ended"""
    options: dict[str, Tensor]
    """State of the rules of rows' options, each declared by its rule (`LogitRule.state`)."""
    automata: Automata | None = None
    """The tables of all automata; None in a job without constraints."""
    images: ImagesOnDevice | None = None
    """What passes read of rows' images; None in a job without."""
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
            "pages": -(-(batch.max_len + num_lookahead_slots) // batch.page_size),
            "vocab": vocab_size,
        }
        made: dict[str, tuple[Tensor, ...]] = {}
        for name, spec in SLOT_FIELDS.items():
            width = 0 if spec.wanted is not None else spec.columns(widths)
            shape = (batch.num_slots,) if width is None else (batch.num_slots, width)
            made[name] = tuple(
                torch.full(shape, spec.initial, dtype=spec.dtype, device=device)
                for _ in range(num_groups if spec.per_group else 1)
            )
        return cls._of(made, vocab_size=vocab_size, max_kv=batch.max_len)

    @classmethod
    def _of(cls, made: Mapping[str, tuple[Tensor, ...]], **more: Any) -> DeviceBatch:
        """The batch with these tensors of each field."""
        values: dict[str, Any] = {name: made[name] if SLOT_FIELDS[name].per_group else made[name][0] for name in SLOT_FIELDS}
        return cls(options={name: values.pop(name) for name in OPTION_FIELDS}, **values, **more)

    def rope_positions(self, positions: Tensor, slots: Tensor) -> Tensor:
        """RoPE positions int64 [T] of tokens after the prompts; positions int64 [T], slots [T]: those of their rows."""
        return positions if self.images is None else positions + self.rope_delta[slots]

    def rope_positions_from_prompt(self, positions: Tensor, slots: Tensor) -> Tensor | AxisPositions:
        """As `rope_positions`, for tokens from the last one of each prompt on: where images have axes, so has this token."""
        found = self.rope_positions(positions, slots)
        if self.images is None or self.images.axes is None:
            return found
        is_end = positions == self.prompt_len[slots] - 1
        ends = self.rope_end[slots].T.contiguous()  # torch.where would keep the strides of the transpose
        return AxisPositions(torch.where(is_end, ends, found), self.images.axes)

    def provide(self, mode: SamplingMode) -> None:
        """Allocate the state that `mode` needs and that few jobs have. Call it before a graph of such a mode is captured."""
        for name, spec in SLOT_FIELDS.items():
            (tensor, *_) = self._tensors(name)
            if spec.wanted is not None and spec.wanted(mode) and not tensor.shape[1]:
                width = spec.columns({"vocab": self.vocab_size})
                assert width is not None
                made = torch.full((len(tensor), width), spec.initial, dtype=spec.dtype, device=tensor.device)
                if name in OPTION_FIELDS:
                    self.options[name] = made
                else:
                    setattr(self, name, made)

    def _tensors(self, name: str) -> tuple[Tensor, ...]:
        """The tensors of a field."""
        value: Tensor | tuple[Tensor, ...] = self.options[name] if name in OPTION_FIELDS else getattr(self, name)
        return value if isinstance(value, tuple) else (value,)

    def first(self, num_rows: int, max_kv: int | None = None) -> DeviceBatch:
        """Views of the first slots, on which a round of a smaller row bucket works. max_kv: a lower limit on their tokens."""
        views = {name: tuple(tensor[:num_rows] for tensor in self._tensors(name)) for name in SLOT_FIELDS}
        return DeviceBatch._of(
            views, automata=self.automata, images=self.images, vocab_size=self.vocab_size, max_kv=max_kv or self.max_kv,
        )

    def begin(self, slots: Sequence[int], requests: Sequence[Request], outputs: Sequence[Sequence[int]]) -> None:
        """Put requests into slots, not live yet; `outputs` are the tokens that each has emitted already.

        A request with an automaton can emit nothing until `constrain` has set the place of its automaton.
        """
        samplings = {id(request.sampling): request.sampling for request in requests}.values()
        self.provide(SamplingMode.union(SamplingMode.of(one, 0) for one in samplings))
        given = [
            (spec, spec.begin, tensor)
            for name, spec in SLOT_FIELDS.items()
            for tensor in self._tensors(name)
            if spec.begin is not None and tensor.numel()
        ]
        arrays = [
            spec.array([begin(request, output) for request, output in zip(requests, outputs, strict=True)], tensor.shape[-1])
            for spec, begin, tensor in given
        ]
        index, *sent = upload_all([np.array(slots, np.int64), *arrays], self.tokens.device)
        for (spec, _, tensor), values in zip(given, sent, strict=True):
            if spec.long:
                tensor[index, : values.shape[1]] = values
            else:
                tensor[index] = values
        for name, spec in SLOT_FIELDS.items():
            for tensor in self._tensors(name):
                if spec.begin is None and tensor.numel():
                    tensor[index] = spec.initial
        assert self.images is not None or not any(one.images for one in requests), "the engine reads no images"
        if self.images is not None:
            self.images.begin(slots, requests)
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


OPTION_FIELDS: dict[str, SlotField] = {
    name: replace(spec, wanted=rule.wanted) for rule in RULES for name, spec in rule.state.items()
}
"""Those of `DeviceBatch.options`."""
SLOT_FIELDS: dict[str, SlotField] = {
    one.name: one.metadata["slot_field"] for one in fields(DeviceBatch) if "slot_field" in one.metadata
} | OPTION_FIELDS
