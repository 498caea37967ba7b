"""Before the first row: compile the kernels of prefill and of rounds, and time prefill. No row may be live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.refills import chunks
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.prefill.passes import FEW, seconds_of
from batchspec.engine.step import RoundShape, Segment
from batchspec.kernels.common.compile_ahead import compile_ahead
from batchspec.packed_batch import ExampleRow, PackedBatch
from batchspec.process.child_process import python_command

NUM_PROBES = 4
"""Number of launches that `compile_kernels` tries first. If Triton's cache on disk has all their kernels, it tries no others."""


def compile_kernels(executor: Executor, mode: SamplingMode, shapes: Sequence[RoundShape]) -> bool:
    """Compile the kernels of `rehearse` and of these rounds, several at a time, in processes; no kernel is launched.

    Returns whether none had to be: if the first NUM_PROBES launches find their kernels in Triton's cache on disk, or if rounds
    are not CUDA graphs.
    """
    if not executor.graphs.captures:
        return True
    executor.rows.provide(mode)
    command = python_command("-m", "batchspec.kernels.common.compile_process")
    device = executor.rows.live.device
    return compile_ahead(launches(executor, mode, shapes), device, num_probes=NUM_PROBES, command=command)


def launches(executor: Executor, mode: SamplingMode, shapes: Sequence[RoundShape]) -> list[Callable[[], object]]:
    """Functions that launch each pass of `rehearse`, and each of these rounds kernel by kernel.

    The first NUM_PROBES are the largest and a short pass, and, if there are any, a row that brings more than text and a round.
    """
    examples = examples_of(executor, mode)
    prefills = [partial(executor.prefill_pass, segments, mode) for segments in reversed(_passes_of(executor))]
    rounds = executor.graphs.launches(shapes)
    moves = [partial(move_row, executor)] if executor.batch.num_slots > 1 else []
    return [*prefills[:2], *examples[:1], *rounds[:1], *moves, *examples[1:], *prefills[2:], *rounds[1:]]


def examples_of(executor: Executor, mode: SamplingMode) -> list[Callable[[], object]]:
    """Functions that each launch the prefill of a row that brings more than text (`Features.examples`)."""

    def launch(row: ExampleRow) -> None:
        with row.in_slot_0():
            executor.prefill_pass([Segment(0, 0, row.num_tokens, True)], mode)

    most = min(executor.batch.prefill_tokens, longest_of(executor.batch))
    return [partial(launch, row) for row in executor.examples(most)]


def rehearse(executor: Executor, mode: SamplingMode, *, found: bool = False) -> PrefillCost | None:
    """Compile prefill and time it. Returns None, and times nothing, if rounds are not CUDA graphs.

    found  `compile_kernels` had to compile none. Kernels on disk are loaded at their first launch, which is soon done, so only
           passes that are timed are launched here; one that no probe needed may still be compiled in the run. Ranks launch all
           passes, because disks may differ
    """
    executor.rows.live.zero_()
    if not executor.graphs.captures:
        return None
    executor.rows.provide(mode)
    if executor.batch.num_slots > 1:
        move_row(executor)
    passes = _passes_of(executor)
    launched = passes[-2:] if found and executor.target.ranks is None else passes
    cost = time_passes(executor.prefill_pass, executor.rows, launched, mode)
    for launch in examples_of(executor, mode):  # after the timed passes, which have set all pages to one that no row reads
        launch()
    cost, graphs = replace(cost, adds_launches=not executor.batch.decodes), executor.prefill_graphs
    return cost if graphs is None else graphs.learn(cost, mode, longest=longest_of(executor.batch))


def move_row(executor: Executor) -> None:
    """Launch the kernels of a compaction."""
    executor.rows.move([(1, 0)], executor.cache.row_tensors)


def longest_of(batch: PackedBatch) -> int:
    """Maximum number of tokens of a row in a prefill pass."""
    return min(batch.longest_prompt or batch.max_len, batch.max_len - 1)


def _passes_of(executor: Executor) -> list[list[Segment]]:
    batch, most = executor.batch, executor.batch.prefill_tokens
    return rehearsal_passes(
        batch.num_slots, max_tokens=most, longest=longest_of(batch), multiple=executor.prefill_multiple,
        sizes=executor.target.pass_sizes(most),
    )


def rehearsal_passes(
    num_slots: int, *, max_tokens: int, longest: int, multiple: int | None = None, sizes: Sequence[int] = ()
) -> list[list[Segment]]:
    """The passes of a rehearsal, which launch every variant of prefill's kernels; the last two are a short one and the largest.
    But for `sizes`, kernels are specialised at most once per doubling of the number of tokens or rows: powers of two take all.

    longest   tokens of a row of the largest pass: long rows use another attention kernel, which compiles for a minute at its
              first use
    multiple  `ModelSpec.prefill_multiple`: a pass of fewer tokens is a short prompt, and one more pass has generated tokens,
              which go through other kernels. None: passes may be cut anywhere
    sizes     numbers of tokens besides powers of two (`Target.pass_sizes`)
    """
    longest = min(max_tokens, longest)
    few = min(FEW, longest)
    spans = [(slot, 0, longest) for slot in range(min(num_slots, -(-max_tokens // longest)))]
    largest = min(max_tokens, len(spans) * longest)
    counts = {1 << power for power in range((largest - 1).bit_length())} | {size for size in sizes if size <= largest}
    unit = multiple or 1
    passes = [next(chunks(spans, n, multiple=unit)) if n >= unit else [Segment(0, 0, n, True)] for n in sorted(counts)]
    if multiple is not None:
        passes.append([Segment(0, 0, few, True, generated=True)])
    num_rows = 2
    while num_rows <= num_slots and num_rows * few < largest:
        passes.append([Segment(slot, 0, few, True) for slot in range(num_rows)])
        num_rows *= 2
    return [*passes, [Segment(0, 0, few, True)], next(chunks(spans, max(largest, unit), multiple=unit))]


def time_passes(
    launch: Callable[[Sequence[Segment], SamplingMode], object], rows: DeviceBatch, passes: Sequence[list[Segment]],
    mode: SamplingMode,
) -> PrefillCost:
    """Seconds of the largest pass and of a short one, over free slots; K/V go to page 0, which no row reads. GPU only; no row may
    be live.

    launch  launches a pass
    passes  of `rehearsal_passes`

    The minimum of several times is used: a short pass is mostly launches, and one stall of the host, such as a garbage
    collection, may take longer than all of them. The rehearsal also compiles the kernels and allocates the memory of the largest
    pass.
    """
    for table in rows.page_tables:
        table.zero_()
    *others, short, largest = (partial(launch, segments, mode) for segments in passes)
    for other in others:
        other()
    full_s = min(seconds_of(largest) for _ in range(3))  # the first compiles
    short_s = min(seconds_of(short) for _ in range(6))
    return PrefillCost(least=short_s, token=full_s / sum(s.end - s.begin for s in passes[-1]))
