"""The planner: one static shape for the whole job, and what it is predicted to cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from batchspec.cache.layer_state import LayerState
from batchspec.config.schema import PackingConfig
from batchspec.console.text import counted
from batchspec.errors import CapacityError
from batchspec.model.spec import ModelSpec
from batchspec.packed_batch import MOST_ROUNDS_BEFORE_REFILL, PREFIX_STATES, PackedBatch
from batchspec.packing.cost import kv_read_bytes, moved_state_bytes, prefill_seconds, read_bytes, round_seconds
from batchspec.packing.device_memory import CPU_SHARE
from batchspec.packing.expected_drafts import ExpectedDrafts
from batchspec.packing.job_time import RoundSeconds, best_round, choose_slots, decode_seconds
from batchspec.packing.kv_memory import KVMemory
from batchspec.packing.memory import graph_tokens, pass_key_bytes, reserve_bytes
from batchspec.packing.rates import Rates

PAGE_SIZE = 16
CPU_SLOTS = 16
GPU_SLOTS = 1024
CPU_PREFILL = 1024
GPU_PREFILL = 16384
GPU_RUN_AHEAD = 2
"""Number of rounds, or of passes where nothing is decoded, that are launched before the results of the first are read."""
PREFILL_SLOTS = 4096
"""Maximum number of slots where nothing is decoded."""
MORE_WAVES = 4
"""Numbers of waves that are tried for rows of equal outputs, from the fewest that are possible."""
MORE_ROWS = 0.05
"""Maximum pages that the rows of all slots may need beyond those that there are, as a share of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The size of a job, as far as it is known when its shape is chosen."""

    num_completions: int
    prompt_tokens: float
    """Mean length of a prompt."""
    output_tokens: float
    """Mean length of an output, predicted."""
    equal_outputs: bool = False
    """All outputs are predicted to have this length."""
    max_tokens: int
    """Longest prompt + max_new_tokens if all rows were surveyed, else the maximum that the job allows."""
    longest_prompt: int | None = None
    """Longest prompt of the surveyed rows."""
    longest_row: int | None = None
    """Longest prompt + max_new_tokens of the surveyed rows."""
    shares_prefix: bool = False
    """Rows share prefixes of many pages, or may, where none was surveyed; samples of a row share its prompt."""
    scores: bool = False
    """The logits of all tokens of prompts are computed, and nothing is decoded (`Reads.all_logits`)."""

    @property
    def shared_tokens(self) -> int:
        """Tokens of the longest prefix that rows may share, 0: they share none."""
        return (self.longest_prompt or self.max_tokens) if self.shares_prefix else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predicted cost of a job with a shape."""

    rounds: int
    num_drafts: int
    """Drafts of each row that a full round verifies: those with which it makes the most tokens/s."""
    accepted: float
    """How many of them it is expected to accept."""
    round_s: float
    """Seconds of one full round at mean context."""
    weights_read_bytes: float
    """Bytes of weights that the target reads in such a round; of experts, the expected number that tokens choose."""
    kv_read_bytes: float
    """Bytes of K/V that it reads."""
    state_bytes: int
    """Bytes of states that it reads and writes, counted twice."""
    prefill_s: float
    decode_s: float


def most_uncommitted(run_ahead: int, num_verified: int) -> int:
    """Maximum number of uncommitted tokens of a row: those of all rounds that may be launched before the host reads one."""
    return (run_ahead + MOST_ROUNDS_BEFORE_REFILL + 1) * (num_verified + 1)


def choose_batch(
    packing: PackingConfig,
    spec: ModelSpec,
    rates: Rates,
    demand: Demand,
    *,
    device: torch.device,
    dtype: torch.dtype,
    drafts: ExpectedDrafts,
    num_lookahead_slots: int = 0,
    draft_layers: Sequence[LayerState] = (),
    free_bytes: int,
    decodes: bool = True,
) -> PackedBatch:
    """The shape with the highest predicted tokens/s that fits the memory; what `packing` sets explicitly is kept.

    num_lookahead_slots  K/V positions after a row's last token that a round may write
    draft_layers         the drafter's layers, with pages of PAGE_SIZE tokens
    free_bytes           memory that is free after the weights are loaded
    decodes              as in `PackedBatch`
    Raises CapacityError if not even one row of demand.max_tokens fits.
    """
    on_cpu, num_verified = device.type == "cpu", drafts.counts[-1]
    if packing.max_num_batched_tokens is not None:  # also where memory is held back for a pass
        packing = replace(packing, max_num_batched_tokens=max(packing.max_num_batched_tokens, spec.least_pass))
    run_ahead = packing.run_ahead if packing.run_ahead is not None else (0 if on_cpu else GPU_RUN_AHEAD)
    most_slots = CPU_SLOTS if on_cpu else GPU_SLOTS
    if not decodes:
        most_slots = _rows_of_passes(packing, spec, demand, run_ahead, on_cpu=on_cpu)
    held = replace(
        demand, prompt_tokens=demand.prompt_tokens + num_lookahead_slots, max_tokens=demand.max_tokens + num_lookahead_slots
    )
    limit = packing.max_num_seqs or min(most_slots, max(1, demand.num_completions))
    memory = KVMemory.of(
        spec, dtype, draft_layers, page_size=PAGE_SIZE, max_len=demand.max_tokens, max_tokens=held.max_tokens,
        lookahead=most_uncommitted(run_ahead, num_verified),
        pass_tokens=packing.max_num_batched_tokens or CPU_PREFILL, num_verified=num_verified,
    )
    if on_cpu:
        pass_tokens = packing.max_num_batched_tokens or CPU_PREFILL
        made = pass_key_bytes(spec, dtype, held.max_tokens)
        budget, source = int(max(0, free_bytes - made) * CPU_SHARE), f"{CPU_SHARE:.0%} of the free {free_bytes / 1e9:.2f} GB"
        source += f" less {made / 1e9:.2f} GB for the keys of a pass" if made else ""
    else:
        most = min(limit, max(1, free_bytes // memory.row_bytes(_expected_tokens(held))))
        pass_tokens, reserve = _held_back(
            packing, spec, demand, dtype=dtype, slots=most, num_verified=num_verified, free_bytes=free_bytes, decodes=decodes
        )
        budget, memory = max(0, free_bytes - reserve), replace(memory, pass_tokens=pass_tokens)
        source = f"the GPU's free {free_bytes / 1e9:.2f} GB less {reserve / 1e9:.2f} GB for passes, rounds and graphs"
    if packing.pages is not None:  # the key sets the pages alone
        left = budget - packing.pages * sum(memory.page_bytes) - memory.prefix_bytes
        limit = packing.max_num_seqs or min(limit, max(1, left // memory.slot_bytes) if memory.slot_bytes else limit)
        memory = replace(memory, slot_bytes=0, prefix_bytes=0)
    budget, tokens = _kv_budget(packing, memory, budget, source), _expected_tokens(held)
    most = min(limit, memory.rows(budget, tokens))
    slots = packing.max_num_seqs or (most if not decodes else _choose_slots(
        spec, rates, held, drafts, limit=limit, dtype=dtype, most=most,
        fullest=min(limit, memory.slots(most, tokens, MORE_ROWS)), correlation=packing.expert_correlation,
    ))
    pages, *more_pages = memory.num_pages(budget, slots)
    prefill_tokens = packing.max_num_batched_tokens or min(pass_tokens, max(PAGE_SIZE, slots * demand.max_tokens))
    prefill_tokens = max(prefill_tokens, spec.least_pass)
    return PackedBatch(
        num_slots=slots,
        row_buckets=row_buckets(slots),
        num_pages=packing.pages or pages,
        more_pages=tuple(more_pages),
        page_size=PAGE_SIZE,
        max_len=demand.max_tokens,
        num_verified=num_verified,
        prefill_tokens=prefill_tokens,
        run_ahead=run_ahead,
        longest_prompt=demand.longest_prompt,
        longest_row=demand.longest_row,
        graph_tokens=graph_tokens(spec, prefill_tokens),
        decodes=decodes,
    )


def forecast(
    batch: PackedBatch, spec: ModelSpec, rates: Rates, demand: Demand, drafts: ExpectedDrafts, *, dtype: torch.dtype,
    correlation: float = 1.0,
) -> Forecast:
    """Rounds and seconds of the whole job, if every round verifies as many drafts as make the most tokens/s (`job_time.py`)."""
    rows, output = min(batch.num_slots, demand.num_completions), 0.0 if demand.scores else demand.output_tokens
    context = demand.prompt_tokens + output / 2
    seconds = _round_seconds(spec, rates, dtype, drafts, context_tokens=context, correlation=correlation)
    full = best_round(rows, drafts, seconds)
    waves = -(-demand.num_completions // rows) if demand.equal_outputs else demand.num_completions / rows + 0.5
    rounds = waves * output / (1 + full.accepted)
    places = full.num_drafts + 1
    prefill_s = prefill_seconds(
        spec, rates, dtype=dtype, prompt_tokens=demand.prompt_tokens, pass_tokens=batch.prefill_tokens, scores=demand.scores
    )
    return Forecast(
        rounds=round(rounds), num_drafts=full.num_drafts, accepted=full.accepted, round_s=full.seconds,
        weights_read_bytes=read_bytes(spec, dtype, rows * places, correlation=correlation),
        kv_read_bytes=kv_read_bytes(spec, dtype=dtype, rows=rows, context_tokens=context, tokens_per_row=places),
        state_bytes=moved_state_bytes(spec, dtype=dtype, rows=rows), prefill_s=demand.num_completions * prefill_s,
        decode_s=decode_seconds(rows, demand.num_completions, output, drafts, seconds, equal=demand.equal_outputs),
    )


def held_back_bytes(batch: PackedBatch, spec: ModelSpec, dtype: torch.dtype, demand: Demand) -> int:
    """Bytes of GPU memory that passes, rounds and graphs of this batch need. demand: the one it was chosen for."""
    return reserve_bytes(
        spec, dtype=dtype, slots=batch.num_slots, num_buckets=len(batch.row_buckets), num_verified=batch.num_verified,
        prefill_tokens=min(batch.prefill_tokens, batch.num_slots * batch.max_len), max_len=batch.max_len,
        longest_row=batch.longest_row, shared_tokens=demand.shared_tokens, decodes=batch.decodes,
    )


def row_buckets(slots: int) -> tuple[int, ...]:
    """Powers of two below `slots`, from 8 on also the midpoints between them, then `slots`."""
    powers = [1 << power for power in range((slots - 1).bit_length())]
    halves = [3 * power // 2 for power in powers if power >= 8]
    return (*sorted(bucket for bucket in (*powers, *halves) if bucket < slots), slots)


def _held_back(
    packing: PackingConfig, spec: ModelSpec, demand: Demand, *, dtype: torch.dtype, slots: int, num_verified: int,
    free_bytes: int, decodes: bool,
) -> tuple[int, int]:
    """Tokens of a prefill pass, and bytes that must stay free besides the pages. On a small GPU prefill passes are shortened
    first, unless they take little of its memory: what the rounds of long rows need does not become less by it."""

    def reserve_of(tokens: int) -> int:
        return reserve_bytes(
            spec,
            dtype=dtype,
            slots=slots,
            num_buckets=len(row_buckets(slots)),
            num_verified=num_verified,
            prefill_tokens=min(tokens, slots * demand.max_tokens),
            max_len=demand.max_tokens,
            longest_row=demand.longest_row,
            shared_tokens=demand.shared_tokens,
            decodes=decodes,
        )

    tokens, rounds = packing.max_num_batched_tokens or GPU_PREFILL, reserve_of(0)
    while True:
        reserve = reserve_of(tokens)
        fits = reserve <= free_bytes // 4 or reserve - rounds <= free_bytes // 16
        if packing.max_num_batched_tokens or tokens <= max(CPU_PREFILL, spec.least_pass) or fits:
            return tokens, reserve
        tokens = max(tokens // 2, spec.least_pass)


def _rows_of_passes(packing: PackingConfig, spec: ModelSpec, demand: Demand, run_ahead: int, *, on_cpu: bool) -> int:
    """Number of slots where nothing is decoded, at most PREFILL_SLOTS: for the rows of the passes that are launched, of one whose
    result is read and of one that is prepared. Twice as many, because rows may be short or share prefixes, so that many fit into
    a pass; four times if the survey found shared prefixes. Not if layers keep row tensors, which are large."""
    pass_tokens = packing.max_num_batched_tokens or (CPU_PREFILL if on_cpu else GPU_PREFILL)
    rows = (run_ahead + 2) * math.ceil(pass_tokens / max(1.0, demand.prompt_tokens))
    spare = 1 if spec.prefill_multiple is not None else 4 if demand.shares_prefix else 2
    return min(PREFILL_SLOTS, spare * rows)


def _expected_tokens(demand: Demand) -> float:
    """Tokens of a row of expected length at its end: a request gets a slot only if pages for as many are free."""
    return min(demand.max_tokens, max(1.0, demand.prompt_tokens + demand.output_tokens))


def _kv_budget(packing: PackingConfig, memory: KVMemory, budget: int, source: str) -> int:
    """Bytes of all K/V pages, and of what slots keep besides. Raises CapacityError if the longest row does not fit."""
    size_bytes, slots = sum(memory.page_bytes), packing.max_num_seqs or 1
    kept = slots * memory.slot_bytes + memory.prefix_bytes
    if packing.pages is not None:
        budget, source = packing.pages * size_bytes, f"packing.pages={packing.pages}"
    elif packing.memory_gb is not None:
        budget, source = int(packing.memory_gb * 1e9), f"packing.memory_gb={packing.memory_gb}"
    needed = memory.row_pages + 1
    enough_gb = math.ceil((needed * size_bytes + kept) / 1e7) / 100
    if budget // size_bytes < needed:
        key = f"packing.memory_gb to {enough_gb:.2f}" if packing.pages is None else f"packing.pages to {needed}"
        raise CapacityError(
            f"{source} gives {budget // size_bytes} K/V pages of {size_bytes / 1e6:.2f} MB; one row of {memory.max_tokens} "
            f"tokens needs {needed}; raise {key} or more, or lower model.max_len"
        )
    if budget < needed * size_bytes + kept:
        snapshots = f" and {counted(PREFIX_STATES, 'snapshot')} of prefixes" if memory.prefix_bytes else ""
        raise CapacityError(
            f"{source} gives {budget / 1e9:.2f} GB; {counted(slots, 'slot')}{snapshots} need {kept / 1e9:.2f} GB, and the pages "
            f"of a row of {memory.max_tokens} tokens {needed * size_bytes / 1e9:.2f} GB; raise packing.memory_gb to "
            f"{enough_gb:.2f} or more, or lower packing.max_num_seqs or model.max_len"
        )
    return budget


def _choose_slots(
    spec: ModelSpec, rates: Rates, demand: Demand, drafts: ExpectedDrafts, *, limit: int, dtype: torch.dtype, most: int,
    fullest: int, correlation: float,
) -> int:
    """The best number of slots up to `fullest`: one of the row buckets of `limit` slots, or about `most`, the number of rows that
    the pages hold."""
    context = demand.prompt_tokens + demand.output_tokens / 2
    sizes = {size for size in row_buckets(limit) if size < most} | {most - most % 8 if most > 64 else most}
    for count in drafts.counts:
        # A partly filled tile takes as long as a full one. Rows need all their pages only at their end, so a few more rows fit.
        step = max(1, rates.tile // (count + 1))
        sizes |= {fullest // step * step} - {0} if most > 64 else set()
    num_rows = max(1, demand.num_completions)
    if demand.equal_outputs:  # rows that begin and end together: as many in the last slots as before
        sizes |= {-(-num_rows // waves) for waves in range(-(-num_rows // fullest), -(-num_rows // fullest) + MORE_WAVES)}
    seconds = _round_seconds(spec, rates, dtype, drafts, context_tokens=context, correlation=correlation, most=most)
    return choose_slots(sorted(sizes), num_rows, drafts, seconds, equal=demand.equal_outputs)


def _round_seconds(
    spec: ModelSpec, rates: Rates, dtype: torch.dtype, drafts: ExpectedDrafts, *, context_tokens: float, correlation: float,
    most: int | None = None,
) -> RoundSeconds:
    """Seconds to draft and to verify. most: number of rows that the pages hold; of more slots, so many are live at a time.
    None: all."""

    @cache
    def seconds(slots: int, num_drafts: int) -> float:
        rows = slots if most is None else min(slots, most)
        verify_s = round_seconds(
            spec, rates, dtype=dtype, rows=rows, context_tokens=context_tokens, tokens_per_row=(num_drafts + 1) * slots / rows,
            correlation=correlation,
        )
        return slots / rows * (verify_s + drafts.bytes_of(num_drafts) / rates.weight_bytes_s(dtype))

    return seconds
