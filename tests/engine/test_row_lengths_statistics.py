"""What is counted of rounds whose rows verify different numbers of drafts: by row, by position, and of a round as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.batch.uniform_layout import UniformLayout
from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.records import PendingResult, RoundLog, RoundResult
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request, SamplingParams
from tests.engine.test_lossless import block_head, check_statistics, hybrid, lookup, parallel_head, pard_model
from tests.helpers.engines import DEVICE, ForcedDrafter, make_engine, packed, plain_tokens, request, tiny_target
from tests.helpers.mtp_drafting import trusting

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

SLOTS, K = 4, 5


@cache
def requests() -> tuple[Request, ...]:
    """More than slots, of very different lengths: slots are filled again, and the last rows move into smaller buckets."""
    samplings = (SamplingParams(), SamplingParams(temperature=0.7, top_k=5), SamplingParams(temperature=1.0))
    return tuple(
        request(i, [i, 5, 7, i][: 1 + i % 4], cap=6 + 5 * (i % 5), sampling=samplings[i % 3], predicted=3) for i in range(11)
    )


@cache
def outputs() -> dict[int, list[int]]:
    return {one.seed: plain_tokens(tiny_target(window=5), one) for one in requests()}


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "right": lambda: ForcedDrafter(K, outputs(), right=True, fixed_len=True),
    "wrong": lambda: ForcedDrafter(K, outputs(), right=False, fixed_len=False),
    "lookup": lambda: lookup(K, 2, 0),
    "chain": lambda: ChainDrafter(parallel_head(), tiny_target(window=5), K, slots=SLOTS),
    "parallel": lambda: ParallelDrafter(parallel_head(), tiny_target(window=5), K, slots=SLOTS),
    "block": lambda: BlockDrafter(block_head(), tiny_target(window=5), K, slots=SLOTS),
    "window": lambda: WindowDrafter(tiny_target(window=5), K, slots=SLOTS, window=3, sink=1),
    "pard": lambda: PardDrafter(pard_model(), tiny_target().spec, K, slots=SLOTS, parallel=True),
    "pard chain": lambda: PardDrafter(pard_model(), tiny_target().spec, K, slots=SLOTS, parallel=False),
    "hybrid": lambda: hybrid(K, 3, SLOTS, chain=True),
    "hybrid, corpus": lambda: hybrid(K, K, SLOTS, chain=False, corpus_tokens=50),
    "corpus": lambda: lookup(K, 2, 50),
}
Counts = dict[str, list[tuple[int, int]]]


@dataclass
class Rounds:
    """Every round of a run."""

    launches: list[tuple[UnreadLaunch, RoundLog, int]] = field(default_factory=list)
    """With the lines of the rows that took part, and how many drafts these had before their limits, if none ran ahead."""
    by_row: Counts = field(default_factory=lambda: defaultdict(list))
    """(verified, accepted) of each round of a request."""

    def note(self, engine: Engine) -> None:
        """Note each round of this engine from now on."""
        learn = engine.planner.learn

        def noted(launch: UnreadLaunch, result: PendingResult, log: RoundLog, *weights: Any) -> None:
            if not launch.is_prefill:
                lines, table = result.result.log.numpy(), engine.slots
                slots, own = result.rows_of(launch.owners, table.owner)
                left = (table.max_tokens - table.num_tokens - 1)[slots]
                offered = int(left.clip(0, launch.width.draft_len).sum())
                self.launches.append((launch, RoundLog.of(lines[lines[:, 0] >= 0]), offered))
                for slot, verified, accepted in zip(slots, own.draft_len.tolist(), own.accepted_len.tolist(), strict=True):
                    state = table.requests[slot]
                    assert state is not None
                    self.by_row[state.request.request_id].append((verified, accepted))
            learn(launch, result, log, *weights)

        engine.planner.learn = noted  # type: ignore[method-assign,assignment]


def run(name: str, *, lengths: int, batch: PackedBatch) -> tuple[dict[str, Completion], Rounds, Engine]:
    engine = make_engine(tiny_target(window=5), DRAFTERS[name](), batch, device=DEVICE, lengths=lengths)
    rounds = Rounds()
    rounds.note(engine)
    with trusting():
        done = {one.request_id: one for one in engine.run(iter(requests()))}
    assert {one.seed: ids_of(one) for one in done.values()} == outputs()
    assert max(one.stats.num_prefills for one in done.values() if one.stats) > 1, "no row was preempted"
    assert len({launch.num_rows for launch, *_ in rounds.launches}) > 1, "no row moved"
    return done, rounds, engine


def ids_of(done: Completion) -> list[int]:
    assert done.token_ids is not None
    found: list[int] = done.token_ids.tolist()
    return found


@pytest.mark.parametrize(("name", "lengths"), zip(DRAFTERS, cycle([4, 5]), strict=False))
def test_statistics_of_rows_are_those_of_the_drafts_that_were_verified(name: str, lengths: int) -> None:
    batch = packed(SLOTS, num_pages=20, max_len=40, num_verified=K, run_ahead=lengths - 3)
    done, rounds, _ = run(name, lengths=lengths, batch=batch)
    for completion in done.values():
        check_statistics(completion, name, scarce_pages=True)
        stats, own = completion.stats, np.array(rounds.by_row[completion.request_id], int).reshape(-1, 2)
        assert stats is not None
        verified, accepted = own.T
        assert (accepted <= verified).all()
        assert stats.num_rounds == len(own)
        assert (stats.num_drafted, stats.num_accepted) == (verified.sum(), accepted.sum())
        assert stats.histogram == tuple(np.bincount(accepted, minlength=K + 1).tolist())
        assert stats.drafted_at == tuple(int((verified > j).sum()) for j in range(K))
        assert stats.accepted_at == tuple(int((accepted > j).sum()) for j in range(K))


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_drafts_of_a_round_fit_into_its_positions(name: str) -> None:
    """One position of each live row is that of its newest token."""
    _, rounds, _ = run(name, lengths=2, batch=packed(SLOTS, num_pages=20, max_len=40, num_verified=K, run_ahead=1))
    parted, uneven = 0, 0
    for launch, log, _ in rounds.launches:
        verified, width = log.draft_len, launch.width
        assert verified.max(initial=0) <= width.draft_len
        num_positions = width.num_positions(launch.num_rows)
        if num_positions is not None:
            assert verified.sum() <= num_positions - len(verified)
            parted += 1
            uneven += len(set(verified.tolist())) > 1
    assert parted > 5
    assert uneven > 2


def test_all_positions_of_a_round_are_used_if_there_are_so_many_drafts() -> None:
    _, rounds, _ = run("parallel", lengths=4, batch=packed(SLOTS, num_pages=20, max_len=40, num_verified=K))
    num_full, num_cut = 0, 0
    for launch, log, offered in rounds.launches:
        num_positions = launch.width.num_positions(launch.num_rows) or launch.num_rows * (launch.width.draft_len + 1)
        places = num_positions - len(log.draft_len)
        assert log.draft_len.sum() == min(offered, places)
        num_full += 0 < offered <= places
        num_cut += offered > places
    assert min(num_full, num_cut) > 5


@pytest.mark.parametrize(("name", "lengths"), zip(DRAFTERS, cycle([4, 5]), strict=False))
def test_the_sums_of_an_engine_are_those_of_its_rows_and_rounds(name: str, lengths: int) -> None:
    """Nothing runs ahead, so no row is in a round whose result does not count. A draft counts in the calibration if those before
    it were accepted."""
    done, rounds, engine = run(name, lengths=lengths, batch=packed(SLOTS, num_pages=20, max_len=40, num_verified=K))
    stats, totals = [one.stats for one in done.values() if one.stats], engine.totals
    assert len(stats) == len(done)
    assert totals.row_rounds == sum(one.num_rounds for one in stats)
    assert (totals.drafted, totals.accepted) == (sum(one.num_drafted for one in stats), sum(one.num_accepted for one in stats))
    assert totals.tokens == sum(len(ids_of(one)) for one in done.values()) + sum(one.num_discarded for one in stats)
    assert totals.rounds == len(rounds.launches)
    tried = sum(int(np.minimum(log.accepted_len + 1, log.draft_len).sum()) for _, log, _ in rounds.launches)
    found = engine.calibration()
    assert set(found) <= set(range(len(engine.drafter.prior_chances)))
    assert sum(one.drafts for one in found.values()) == tried
    assert sum(one.accepted for one in found.values()) == totals.accepted
    assert all(0 <= one.accepted <= one.drafts and 0 < one.expected <= one.drafts for one in found.values())


def drafting(drafter: Drafter) -> list[int]:
    """From now on the positions of each pass in which this drafter drafts."""
    found = list[int]()
    own: Any = getattr(drafter, "_chain", None) or drafter
    if isinstance(own, ChainDrafter):
        draft = own._draft

        def drafted(rows: DeviceBatch, draft_ids: Tensor, *others: Any) -> Tensor:
            found.append(len(draft_ids))
            return draft(rows, draft_ids, *others)

        own._draft = drafted  # type: ignore[method-assign,assignment]
        return found
    layout: UniformLayout = own._layout
    batch = layout.batch

    def noted(ids: Tensor, *others: Any) -> FlatBatch:
        found.append(ids.numel())
        return batch(ids, *others)

    layout.batch = noted  # type: ignore[method-assign,assignment]
    return found


@pytest.mark.parametrize("name", ["chain", "parallel", "block", "window", "pard", "pard chain"])
def test_drafters_draft_no_more_than_a_round_verifies(name: str) -> None:
    """A chain makes one pass for each draft of the round; a head's first pass was made at the end of the round before. A head
    that drafts in one pass computes one position of each row for each draft."""
    drafter = DRAFTERS[name]()
    engine = make_engine(tiny_target(window=5), drafter, packed(SLOTS, num_verified=K), device=DEVICE, lengths=4)
    passes, run_round, widths = drafting(drafter), engine.executor.round.run, set[int]()

    def checked(rows: DeviceBatch, mode: SamplingMode, draft_len: int, *others: Any) -> RoundResult:
        passes.clear()
        result, num_rows = run_round(rows, mode, draft_len, *others), len(rows.live)
        if name in ("parallel", "block", "pard"):
            assert passes == [num_rows * draft_len] * (draft_len > 0)
        else:
            assert passes == [num_rows] * max(0, draft_len - (name == "chain"))
        widths.add(draft_len)
        return result

    engine.executor.round.run = checked  # type: ignore[method-assign,assignment]
    assert len(list(engine.run(iter(requests())))) == len(requests())
    assert widths == set(range(K + 1))
