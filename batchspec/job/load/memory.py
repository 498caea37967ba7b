"""Memory of a job on its device: what the weights and other buffers take, what is free, and the shape of the batch that fits."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from batchspec.batch.automata import AutomataCapacity
from batchspec.console import terminal
from batchspec.distributed.group import Group
from batchspec.engine.rounds.graphs import GRAPH_DTYPES
from batchspec.errors import CapacityError
from batchspec.job.prepare import Job, JobModel
from batchspec.model.vision.of_ranks import encoding_bytes
from batchspec.packed_batch import PackedBatch
from batchspec.packing.device_memory import free_memory, total_memory
from batchspec.packing.expected_drafts import ExpectedDrafts, accepted_of_few
from batchspec.packing.memory import graph_tokens, prefill_graph_bytes
from batchspec.packing.planner import GPU_PREFILL, PAGE_SIZE, Demand, Forecast, choose_batch, forecast
from batchspec.packing.rates import Rates
from batchspec.tasks.registry import task_of

EVEN = 0.9
"""Least free memory of a rank, as a share of the most of another one, that passes for equal: contexts and libraries differ."""


def check_memory(job: JobModel) -> None:
    """Raises CapacityError for weights that exceed the device's whole memory."""
    weights = weight_bytes(job)
    on_gpu, memory = job.device.type == "cuda", total_memory(job.device)
    if weights > memory:
        raise CapacityError(
            f"model.path={job.config.model.path}: the weights take {weights / 1e9:,.1f} GB as {job.dtype}, "
            f"and this {'GPU' if on_gpu else 'machine'} has {memory / 1e9:,.1f} GB of memory; "
            "use a smaller model, another model.dtype or more GPUs for it (cluster.tensor_parallel)"
        )


def rank_out_of_memory(rank: int, message: str) -> CapacityError:
    """The error that ends a run when a rank is out of memory. Other ranks wait for it, so the group cannot try a smaller batch.

    message  of `OutOfMemoryGuard`
    """
    return CapacityError(
        f"rank {rank}: out of memory ({message}); free memory or lower packing.memory_gb, max_num_seqs or "
        "max_num_batched_tokens, and run the same command again"
    )


def weight_bytes(job: JobModel) -> int:
    """Bytes of the weights of target and drafter in the device's memory."""
    return job.spec.weight_bytes(job.dtype) + job.drafter.weight_bytes(dtype=job.dtype, device=job.device)


def automata_bytes(job: Job) -> int:
    """Bytes of the device's tables and masks of automata; 0 in a job without structured output."""
    return 0 if job.admission.constraints is None else AutomataCapacity(num_tokens=job.spec.vocab_size).nbytes


def image_bytes(job: JobModel) -> int:
    """Bytes that encoding images takes on a rank, and their embeddings that stay on its device; 0 in a job without images."""
    vision, most = job.spec.vision, job.config.packing.max_num_batched_tokens or GPU_PREFILL
    if vision is None:
        return 0
    encoding = encoding_bytes(vision, job.dtype, job.spec.shard.ranks, most)
    return encoding + vision.row_bytes(job.dtype) * kept_images(most, job.spec.max_len)


def kept_images(prefill_tokens: int, max_len: int) -> int:
    """Embeddings of images that stay on the device: of two passes, or of the longest row."""
    return max(2 * prefill_tokens, max_len)


def padded_prefill_bytes(job: JobModel) -> int:
    """Bytes of the CUDA graphs of prefill passes (ablation.prefill_graphs); 0 in a job without them."""
    ablation, spec = job.config.ablation, job.spec
    graphed = ablation.prefill_graphs and not spec.ordered and spec.whole is None
    if job.device.type != "cuda" or not graphed or task_of(job.config).reads_of(job.config.output).all_logits:
        return 0
    tokens = job.config.packing.max_num_batched_tokens or GPU_PREFILL
    return prefill_graph_bytes(job.spec, dtype=job.dtype, tokens=graph_tokens(job.spec, tokens))


def free_bytes(job: JobModel, *, loaded: bool = False) -> int:
    """Bytes of memory for K/V pages and everything else except the weights; in a group those of the rank with the least.

    loaded  the weights, including the drafter's, are in memory already
    """
    if loaded:
        return min(free_after_loading(job.device, job.group))
    own = free_memory(job.device, weights=weight_bytes(job))
    return own if job.group is None else job.group.least(own)


def free_after_loading(device: torch.device, group: Group | None) -> list[int]:
    """Bytes of memory that are free now, of each rank of a group."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that loading used and released counts as free
    own = free_memory(device)
    return [own] if group is None else group.numbers(own)


def taken_by_others(free: Sequence[int]) -> str:
    """A message about a GPU with much less free memory than another one of its group; empty if there is none.

    free  bytes of each rank, whose parts of the model are about as large
    """
    least, most = min(free), max(free)
    if least >= EVEN * most:
        return ""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = [f"rank {rank} (GPU {gpus[rank % len(gpus)] or rank})" for rank in (free.index(least), free.index(most))]
    return (
        f"{named[0]} has {least / 1e9:.1f} GB of free memory, {named[1]} {most / 1e9:.1f} GB, and all ranks use as little; end "
        "the program that holds the rest or choose other GPUs by CUDA_VISIBLE_DEVICES"
    )


def expected_drafts(job: JobModel) -> ExpectedDrafts:
    """What the job's rounds verify and accept. They choose by times, and only rounds in CUDA graphs are timed."""
    shape, timed = job.drafter.shape, job.device.type == "cuda" and job.dtype in GRAPH_DTYPES
    chosen = timed and job.config.draft.adaptive is not False
    counts, lens = (shape.verified_counts, shape.draft_lens) if chosen else ((shape.num_verified,), (shape.draft_len,))
    read = tuple(job.drafter.draft_bytes(draft_len, dtype=job.dtype, device=job.device) for draft_len in lens)
    made_up = job.config.draft.synthetic  # of several kinds of rows one after another
    if made_up is not None:
        accepted = sum(made_up) * shape.draft_len / len(made_up)
    else:
        accepted = accepted_of_few(job.drafter.assumed_accepted, counts[-1])
    return ExpectedDrafts(counts, accepted, read)


def forecast_of(job: Job, batch: PackedBatch, demand: Demand, rates: Rates) -> Forecast:
    """The time that the job takes with this batch, and what it is made of."""
    correlation = job.config.packing.expert_correlation
    return forecast(batch, job.spec, rates, demand, expected_drafts(job), dtype=job.dtype, correlation=correlation)


def plan_batch(job: Job, demand: Demand, rates: Rates, *, loaded: bool = False) -> PackedBatch:
    """The shape of the batch on this machine; says so if the free memory of one GPU of a group limits it.

    loaded  the weights, including the drafter's, are in memory already
    Raises CapacityError if not even one row fits.
    """
    free = free_after_loading(job.device, job.group) if loaded else [free_bytes(job)]
    packing = job.config.packing
    planned = job.device.type == "cuda" and packing.memory_gb is None and packing.pages is None
    others = taken_by_others(free) if planned else ""
    try:
        batch = _batch_within(min(free), job, demand, rates)
    except CapacityError as error:
        if not others:
            raise
        raise CapacityError(f"{others} ({str(error).partition(';')[0]})") from None
    if others:
        terminal.notice(others)
    return batch


def _batch_within(free: int, job: Job, demand: Demand, rates: Rates) -> PackedBatch:
    """The shape of the batch with `free` bytes, the least of all ranks, for pages and all else that is not loaded yet."""
    shape, taken = job.drafter.shape, job.drafter.corpus_bytes() + automata_bytes(job) + padded_prefill_bytes(job)
    taken += image_bytes(job)
    return choose_batch(
        job.config.packing,
        job.spec,
        rates,
        demand,
        device=job.device,
        dtype=job.dtype,
        drafts=expected_drafts(job),
        num_lookahead_slots=shape.num_lookahead_slots,
        draft_layers=job.drafter.layer_states(job.dtype, PAGE_SIZE),
        free_bytes=max(0, free - taken),
        decodes=job.admission.task.decodes,
    )
