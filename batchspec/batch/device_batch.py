"""Device state of the rows: everything a round reads and writes, one tensor a field, one line a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchspec.kernels.rounds.move_rows import move_rows
from batchspec.records import MAX_STOP_IDS, PackedBatch, Request

SEEN_PROMPT_OR_OUTPUT = 1
SEEN_OUTPUT = 2


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host numbers (lists or an array) on the device. On a GPU from pinned memory and in stream order: the host does not wait."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@dataclass(slots=True, kw_only=True)
class DeviceBatch:
    """R slots. A live row has num_tokens - 1 tokens in K/V: its newest token is verified together with the drafts."""

    tokens: Tensor
    """int32 [R, max_len] prompt and output"""
    num_tokens: Tensor
    """int32 [R] committed tokens, prompt included"""
    prompt_len: Tensor
    """int32 [R]"""
    limit: Tensor
    """int32 [R] the row ends when num_tokens reaches it"""
    min_tokens: Tensor
    """int32 [R] stop ids are not drawn while num_tokens is below it"""
    live: Tensor
    """int32 [R] 1 while the row decodes"""
    finish: Tensor
    """int32 [R] 0 running, 1 stop id, 2 length"""
    keys: Tensor
    """int64 [R] row key of the noise"""
    temperature: Tensor
    """float32 [R] 0 is greedy"""
    top_k: Tensor
    """int32 [R] 0 is off"""
    top_p: Tensor
    """float32 [R] 1 is off"""
    min_p: Tensor
    """float32 [R] 0 is off"""
    repetition: Tensor
    """float32 [R] repetition penalty, 1 is off"""
    presence: Tensor
    """float32 [R] presence penalty, 0 is off"""
    stop_ids: Tensor
    """int32 [R, MAX_STOP_IDS] -1 where unused"""
    page_tables: tuple[Tensor, ...]
    """By K/V group int32 [R, pages of max_len and of what rounds write beyond it], the scratch page where nothing is granted yet.
    Where a group's window has passed, pages stand that the row has given back: nothing reads them."""
    seen: Tensor
    """uint8 [R, V] bits SEEN_*; [R, 0] in a job without penalties"""

    @classmethod
    def allocate(
        cls,
        batch: PackedBatch,
        *,
        vocab_size: int,
        penalties: bool,
        device: torch.device,
        num_lookahead_slots: int = 0,
        num_groups: int = 1,
    ) -> DeviceBatch:
        """
        num_lookahead_slots  K/V positions after a row's last token that a round may write
        num_groups           K/V groups, each with a page table
        """
        slots, columns = batch.num_slots, -(-(batch.max_len + num_lookahead_slots) // batch.page_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            tokens=zeros(slots, batch.max_len),
            num_tokens=zeros(slots),
            prompt_len=zeros(slots),
            limit=zeros(slots),
            min_tokens=zeros(slots),
            live=zeros(slots),
            finish=zeros(slots),
            keys=zeros(slots, dtype=torch.int64),
            temperature=zeros(slots, dtype=torch.float32),
            top_k=zeros(slots),
            top_p=zeros(slots, dtype=torch.float32),
            min_p=zeros(slots, dtype=torch.float32),
            repetition=zeros(slots, dtype=torch.float32),
            presence=zeros(slots, dtype=torch.float32),
            stop_ids=zeros(slots, MAX_STOP_IDS) - 1,
            page_tables=tuple(zeros(slots, columns) for _ in range(num_groups)),
            seen=zeros(slots, vocab_size if penalties else 0, dtype=torch.uint8),
        )

    def first(self, num_rows: int) -> DeviceBatch:
        """The first slots as views: what a round of a smaller row bucket works on."""
        views = {field.name: getattr(self, field.name)[:num_rows] for field in fields(self) if field.name != "page_tables"}
        return DeviceBatch(**views, page_tables=tuple(table[:num_rows] for table in self.page_tables))

    def begin(self, slots: Sequence[int], requests: Sequence[Request], outputs: Sequence[Sequence[int]]) -> None:
        """Put requests into slots, not live yet; `outputs` are tokens that a row set back had emitted already."""
        device = self.tokens.device
        index = upload(slots, torch.int64, device)
        width = max(len(request.prompt_ids) + len(output) for request, output in zip(requests, outputs, strict=True))
        tokens = np.zeros((len(slots), width), np.int32)
        stop_ids = np.full((len(slots), MAX_STOP_IDS), -1, np.int32)
        num_tokens = []
        for line, (request, output) in enumerate(zip(requests, outputs, strict=True)):
            prompt_len = len(request.prompt_ids)
            tokens[line, :prompt_len] = request.prompt_ids
            tokens[line, prompt_len : prompt_len + len(output)] = output
            num_tokens.append(prompt_len + len(output))
            stop_ids[line, : len(request.stop_ids)] = request.stop_ids

        def put(field: Tensor, values: Sequence[int] | Sequence[float]) -> None:
            field[index] = upload(values, field.dtype, device)

        self.tokens[index, :width] = upload(tokens, torch.int32, device)
        self.stop_ids[index] = upload(stop_ids, torch.int32, device)
        put(self.num_tokens, num_tokens)
        put(self.prompt_len, [len(r.prompt_ids) for r in requests])
        put(self.limit, [len(r.prompt_ids) + r.device_limit for r in requests])
        put(self.min_tokens, [len(r.prompt_ids) + r.min_new_tokens for r in requests])
        put(self.keys, [r.seed for r in requests])
        put(self.temperature, [r.sampling.temperature for r in requests])
        put(self.top_k, [r.sampling.top_k for r in requests])
        put(self.top_p, [r.sampling.top_p for r in requests])
        put(self.min_p, [r.sampling.min_p for r in requests])
        put(self.repetition, [r.sampling.repetition_penalty for r in requests])
        put(self.presence, [r.sampling.presence_penalty for r in requests])
        self.live[index] = 0
        self.finish[index] = 0
        for table in self.page_tables:
            table[index] = 0
        if self.seen.shape[1]:
            self._mark_seen(slots, requests, outputs)

    def _mark_seen(self, slots: Sequence[int], requests: Sequence[Request], outputs: Sequence[Sequence[int]]) -> None:
        for slot, request, output in zip(slots, requests, outputs, strict=True):
            line = self.seen[slot]
            line.zero_()
            line[upload(request.prompt_ids, torch.int64, line.device)] = SEEN_PROMPT_OR_OUTPUT
            line[upload(output, torch.int64, line.device)] = SEEN_PROMPT_OR_OUTPUT | SEEN_OUTPUT

    def grant(self, grants: Sequence[tuple[int, int, Sequence[Sequence[int]]]]) -> None:
        """Write newly granted pages into the tables: slot, first column, and by group the pages from there on."""
        slots = [slot for slot, _, pages in grants for _ in pages[0]]
        columns = [first + i for _, first, pages in grants for i in range(len(pages[0]))]
        ids = [[page for _, _, pages in grants for page in pages[group]] for group in range(len(self.page_tables))]
        at_slot, at_column, *ids_by_group = upload([slots, columns, *ids], torch.int64, self.tokens.device)
        for table, group_ids in zip(self.page_tables, ids_by_group, strict=True):
            table[at_slot, at_column] = group_ids.int()

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        """Everything that a slot has, page tables last."""
        own = (getattr(self, field.name) for field in fields(self) if field.name != "page_tables")
        return *own, *self.page_tables

    def kill(self, slots: Sequence[int]) -> None:
        """The host ends rows (stop string, set back): dead from the next round on."""
        self.live[upload(slots, torch.int64, self.live.device)] = 0

    def move(self, moves: Sequence[tuple[int, int]], more: Sequence[Tensor] = ()) -> None:
        """Compaction: copy rows from slot to slot, (source, destination) each, and leave the sources dead.

        more  other tensors [slots, ...] that move with them: a drafter's state
        """
        sources, destinations = upload(moves, torch.int32, self.live.device).T.contiguous()
        for state in (*self._tensors, *more):
            if state.numel():
                move_rows(state, sources, destinations)
        self.live[sources] = 0
