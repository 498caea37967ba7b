"""What a planner prepares before the first round, and what it makes of the rounds' times; on a GPU's behalf, without one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.sharing_cost import SharingCost
from batchspec.draft.none import NoDrafter
from batchspec.draft.shapes import candidates
from batchspec.engine.loop import warm_up
from batchspec.engine.loop.round_planner import RoundPlanner
from batchspec.engine.loop.warm_up import rehearsal_passes, time_passes
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.rounds.graphs import GRAPH_DTYPES
from batchspec.engine.rounds.part_trial import FEWEST, PHASE_ROUNDS, WARM_UP, Turn
from batchspec.engine.rounds.prefix_tables import PrefixGroupTables
from batchspec.engine.rounds.records import PendingResult, RoundLog, RoundOptions, RoundResult
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.step import RoundShape, RoundWidth, Segment
from batchspec.kernels.attention.settings import work_shape
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.packed_batch import ExpectedRows, PackedBatch
from batchspec.packing.memory import GRAPH_BYTES, MOST_LENGTHS, MOST_PARTIAL_BUCKETS, MOST_PARTS, reserve_bytes
from batchspec.packing.planner import Demand, row_buckets
from batchspec.tuning.cards import known_card
from tests.helpers.engines import DEVICE, VOCAB, ForcedDrafter, make_engine, packed, plain_tokens, request, tiny_target
from tests.helpers.stand_ins import small_spec

BASE = {(0, False): 1.0, (0, True): 1.25, (1, True): 1.5}
"""Seconds of a round over all slots, dead rows, by draft length and whether it prepares a draft for the next one."""
ATTENTION = 0.5
MODE = SamplingMode(random=True)


class StandInGraphs:
    """Notes which graphs are captured."""

    warm_up_s, each_s = 0.25, 0.07

    def __init__(self, batch: PackedBatch, base: Any, *, captures: bool) -> None:
        self._batch, self._base, self.captures = batch, base, captures
        self.prepared: list[RoundShape] = []
        """Those that there are."""
        self.num_ever = 0

    def launches(self, shapes: Sequence[RoundShape]) -> list[Any]:
        return []

    def prepare(self, shapes: Iterable[RoundShape]) -> None:
        for shape in shapes:
            if shape not in self.prepared:
                self.prepared.append(shape)
                self.num_ever += 1

    def forget(self, shapes: Iterable[RoundShape]) -> None:
        for shape in shapes:
            self.prepared.remove(shape)

    @property
    def num_captured(self) -> int:
        return len(self.prepared)

    @property
    def capture_s(self) -> float:
        return self.each_s * self.num_ever

    def seconds(self, shape: RoundShape) -> float:
        assert shape in self.prepared
        base = self._base
        taken: float = base(shape) if callable(base) else base[shape.draft_len, shape.prepare_next]
        return taken * shape.num_rows / self._batch.num_slots


def planner(
    batch: PackedBatch,
    draft_len: int,
    *,
    draft_lens: tuple[int, ...] = (0, 1),
    adaptive: bool = True,
    base: Any = BASE,
    dtype: torch.dtype = torch.float32,
    kv_windows: tuple[tuple[int | None, ...], tuple[int | None, ...]] = ((None, None), ()),
    pass_bytes: int = 0,
    row_lengths: bool = False,
    ranks: object = None,
    most_unprepared: int | None = None,
) -> RoundPlanner:
    """Of rounds that take what `base` says, in proportion to their rows. An earlier run has left rows alive.

    base        by draft length and whether the next draft is prepared, or a function of the shape
    kv_windows  of the layers of target and drafter
    pass_bytes  of `SharingCost`, whose pages have one byte here
    row_lengths  rounds may verify a part of their drafts
    """
    layers, draft_layers = ([SimpleNamespace(pages=True, window=window) for window in own] for own in kv_windows)
    drafter = SimpleNamespace(
        draft_len=draft_len, layer_states=lambda page_size: draft_layers, most_unprepared=most_unprepared
    )
    spec = SimpleNamespace(layer_states=lambda dtype, page_size, draft_len: layers, experts=None)
    executor: Any = SimpleNamespace(
        prefill_pass=lambda *_: None,
        cache=SimpleNamespace(row_tensors=()),
        target=SimpleNamespace(spec=spec, dtype=dtype, ranks=ranks, pass_sizes=lambda most: ()),
        drafter=drafter,
        round=SimpleNamespace(
            drafter=drafter, draft_lens=draft_lens, num_nodes=None, chances=object() if row_lengths else None
        ),
        rows=SimpleNamespace(live=torch.ones(batch.num_slots, dtype=torch.int32), move=lambda *_: None, provide=lambda *_: None),
        batch=batch,
        sharing=SharingCost(page_bytes=1, row_bytes=0, pass_bytes=pass_bytes),
        prefill_graphs=None,
        prefill_multiple=None, examples=lambda most: (),
    )
    executor.round.verify_all = lambda: setattr(executor.round, "chances", None)
    executor.graphs = StandInGraphs(batch, base, captures=dtype in GRAPH_DTYPES)
    return RoundPlanner(executor, batch, adaptive=adaptive)


def chosen(planner: RoundPlanner, num_rows: int, owners: Any, num_tokens: Any) -> UnreadLaunch:
    """The next round, of rows that these slots have."""
    return planner.choose(num_rows, num_tokens, owners)


def arrived(at: float) -> PendingResult:
    event: Any = at
    return PendingResult(RoundResult(torch.empty((0, 5), dtype=torch.int32)), arrived=event)


def accepting(num_rows: int, accepted: int) -> RoundLog:
    """The log of live rows that accept so many drafts each."""
    log = np.full((num_rows, accepted + 5), 7, np.int32)
    log[:, :4] = accepted, accepted, accepted + 1, 0
    return RoundLog.of(log)


@pytest.mark.parametrize("accepted", [0, 1])
def test_every_kind_of_round_is_charged_with_what_such_rounds_take(accepted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If drafts pay, only probes have no drafts, and they prepare the next draft; if not, most rounds prepare none."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    monkeypatch.setattr(PendingResult, "seconds_since", lambda result, began: result.arrived - began)
    one = planner(packed(4), 1)
    assert not one.ready
    one.prepare(MODE)
    assert one.ready
    now, seen = 0.0, set[tuple[int, bool]]()
    for _ in range(100):
        launch = chosen(one, 4, np.array([0, 1, -1, 3]), np.array([300, 300, 5000, 400]))
        now += BASE[launch.width.draft_len, launch.prepare_next] + ATTENTION
        one.learn(launch, arrived(now), accepting(3, min(accepted, launch.width.draft_len)))
        seen.add((launch.width.draft_len, launch.prepare_next))
    assert seen == (set(BASE) if accepted == 0 else {(0, True), (1, True)})
    assert one._lengths is not None
    scores = one._lengths.scores(4, 1000)
    assert scores[0] == pytest.approx(1 / (1.0 + ATTENTION))
    assert (scores[1] > scores[0]) == bool(accepted)


def test_rows_of_a_round_count_by_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that took part; a round without drafts, or that verified a part of them, is not counted."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    monkeypatch.setattr(PendingResult, "seconds_since", lambda result, began: result.arrived - began)
    one, seen = planner(packed(4), 1), list[list[float]]()
    one.prepare(MODE)
    assert one._lengths is not None
    monkeypatch.setattr(one._lengths, "observe", lambda k, accepted, after, weights: seen.append(weights.tolist()))
    launch = replace(chosen(one, 4, np.array([0, 1, -1, 3]), np.array([300, 300, 5000, 400])), width=RoundWidth(1))
    assert one.counts_acceptance(launch)
    log = accepting(3, 1)
    log.num_kept[1] = 0  # it waits: nothing of the round was kept
    one.learn(launch, arrived(1.0), log, np.array([0.5, 1.0, 1.5]))
    assert seen == [[0.5, 1.5]]
    for width in (RoundWidth(0), RoundWidth(1, mean_len=0.5)):
        assert not one.counts_acceptance(replace(launch, width=width))


def test_phases_of_fewer_live_rows_favour_neither_kind_of_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds take as long, and every row gets two tokens from each; the later of two phases that are compared has a quarter
    fewer rows."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    monkeypatch.setattr(PendingResult, "seconds_since", lambda result, began: result.arrived - began)
    batch = packed(16, row_buckets=row_buckets(16), num_verified=3)
    one: Any = planner(batch, 3, draft_lens=candidates(3), base=lambda shape: 10.0 + 4.0 * shape.width.verified, row_lengths=True)
    one.prepare(MODE)
    now = 0.0
    for number in range(WARM_UP + 2 * PHASE_ROUNDS * FEWEST):
        count = 12 if (number - WARM_UP) // PHASE_ROUNDS % 2 else 16
        now += 20.0
        launch = chosen(one, 16, np.where(np.arange(16) < count, np.arange(16), -1), np.full(16, 300))
        one.learn(launch, arrived(now), accepting(count, 1))
    assert one._lengths._trial._gains == pytest.approx([0.0] * (FEWEST - 1))


@pytest.mark.parametrize("most", [None, 3])
def test_rounds_without_drafts_prepare_as_often_as_the_drafter_needs(most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many in a row leave the drafter what it must do later; a round that drafts, or precedes one, counts anew."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    one = planner(packed(4), 1, most_unprepared=most)
    one.prepare(MODE)
    lengths = [1, 0, 0, 0, 0, 0, 1, *[0] * 9]
    following, next_drafts = iter(lengths), iter([*(k > 0 for k in lengths[1:]), False])
    monkeypatch.setattr(one._lengths, "choose", lambda *_, **__: (RoundWidth(next(following)), next(next_drafts)))
    launches = [chosen(one, 4, np.arange(4), np.full(4, 300)) for _ in lengths]
    assert [launch.width.draft_len for launch in launches] == lengths
    prepared = [i for i, launch in enumerate(launches) if launch.prepare_next]
    assert prepared == ([0, 5, 6] if most is None else [0, 4, 5, 6, 10, 14])


def test_what_measured_rounds_made_decides_whether_they_may_verify_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per row, by the weights of the rows, and by the time until the result arrived; not of a round after a prefill. A row that
    waits does not count."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    monkeypatch.setattr(PendingResult, "seconds_since", lambda result, began: result.arrived - began)
    batch = packed(12, row_buckets=row_buckets(12), num_verified=3)
    one: Any = planner(batch, 3, draft_lens=candidates(3), base=lambda shape: 10.0 + 4.0 * shape.width.verified, row_lengths=True)
    one.prepare(MODE)
    seen = list[tuple[int, int, float, float]]()
    monkeypatch.setattr(one._lengths, "made", lambda *made: seen.append(made))
    owners, num_tokens, now, launches = np.arange(12), np.full(12, 300), 0.0, list[UnreadLaunch]()
    for number in range(WARM_UP + PHASE_ROUNDS):
        launches.append(chosen(one, 12, owners, num_tokens))
        now += 20.0
        if number == WARM_UP + 2:
            one.learn(UnreadLaunch(owners=owners, is_prefill=True, num_prefilled=9), arrived(now), accepting(12, 0), None)
        weights = None if number % 2 else np.linspace(0.5, 1.5, 12)
        log = accepting(12, 1)
        log.num_kept[0], log.num_kept[6] = 6, 0
        one.learn(launches[-1], arrived(now), log, weights)
    assert {launch.trial_phase for launch in launches[:WARM_UP]} == {None}
    assert len({launch.trial_phase for launch in launches[WARM_UP:]}) == 1
    assert len(seen) == PHASE_ROUNDS - 1
    assert {made[:2] for made in seen} == {(launches[-1].trial_phase, 12)}
    left_out = np.linspace(0.5, 1.5, 12)[6]
    assert {round(made[2], 9) for made in seen} == {round(26 / 11, 9), round((26 - 2 * left_out) / (12 - left_out), 9)}
    assert {made[3] for made in seen} == {20.0}
    assert all(launch.counts_drafts for launch in launches)
    monkeypatch.setattr(one._lengths, "turn", Turn(False, False, None))
    monkeypatch.setattr(one._lengths, "choose", lambda *_, **__: (RoundWidth(3), True))
    assert not chosen(one, 12, owners, num_tokens).counts_drafts


def test_counts_of_drafts_come_to_the_host_only_if_it_asks_for_them() -> None:
    """The tokens do not depend on it."""
    jobs, found = [request(i, [i, 7], cap=12) for i in range(2)], []
    for counts in (True, False):
        drafter = ForcedDrafter(3, {job.seed: plain_tokens(tiny_target(), job) for job in jobs}, right=True, fixed_len=True)
        engine = make_engine(
            tiny_target(), drafter, packed(2, num_verified=3), device=DEVICE, options=RoundOptions(row_lengths=True)
        )
        choose, learn, levels = engine.planner.choose, engine.planner.learn, list[bool]()

        def launched(*args: Any, choose: Any = choose, counts: bool = counts) -> UnreadLaunch:
            launch: UnreadLaunch = replace(choose(*args), counts_drafts=counts)
            return launch

        def learnt(launch: UnreadLaunch, result: PendingResult, *args: Any, learn: Any = learn, levels: Any = levels) -> None:
            levels += [] if launch.is_prefill else [result.result.levels is not None]
            learn(launch, result, *args)

        engine.planner.choose, engine.planner.learn = launched, learnt  # type: ignore[method-assign,assignment]
        done = {one.request_id: one.token_ids for one in engine.run(iter(jobs))}
        assert set(levels) == {counts}
        found.append([np.asarray(done[job.request_id]).tolist() for job in jobs])
    assert found[0] == found[1]


def test_an_engine_gives_the_weights_of_the_rows_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row accepts all drafts, the other none: its tokens weigh more with every round."""
    jobs = [request(i, [i, 7], cap=24) for i in range(2)]
    outputs = {job.seed: plain_tokens(tiny_target(), job) for job in jobs}
    outputs[jobs[1].seed] = [(token + 1) % VOCAB for token in outputs[jobs[1].seed]]
    drafter = ForcedDrafter(3, outputs, right=True, fixed_len=True)
    engine, seen = make_engine(tiny_target(), drafter, packed(2, num_verified=3), device=DEVICE), list[list[float]]()
    monkeypatch.setattr(engine.planner, "counts_acceptance", lambda launch: not launch.is_prefill)
    monkeypatch.setattr(
        engine.planner, "learn", lambda launch, result, log, weights: seen.append([] if weights is None else weights.tolist())
    )
    list(engine.run(iter(jobs)))
    both = [weights for weights in seen if len(weights) == 2]
    assert len(both) > 3
    assert all(sum(weights) == pytest.approx(2) for weights in both)
    ratios = [slow / fast for fast, slow in both]
    assert ratios[0] == 1
    assert ratios == sorted(ratios)
    assert ratios[-1] > 1.3


@pytest.mark.parametrize(("longest", "rehearsed"), [(40, 40), (None, 127), (128, 127)])
def test_prefill_is_rehearsed_with_rows_as_long_as_the_job_has_seen(
    longest: int | None, rehearsed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of max_len leaves room for one token."""
    found: dict[str, Any] = {}

    def listed(*_: Any, **values: Any) -> list[list[Segment]]:
        found.update(values)
        return []

    def recorded(_: Any, rows: Any, *others: Any) -> PrefillCost:
        assert not rows.live.any()
        return PrefillCost(least=3.0, token=0.5)

    def learn(cost: PrefillCost, mode: SamplingMode, *, longest: int) -> PrefillCost:
        assert (mode, longest) == (MODE, rehearsed)
        return replace(cost, replay=1.0)

    monkeypatch.setattr(warm_up, "time_passes", recorded)
    monkeypatch.setattr(warm_up, "rehearsal_passes", listed)
    one, graphs = planner(packed(4, longest_prompt=longest, max_len=128, prefill_tokens=400), 1), SimpleNamespace(learn=learn)
    executor: Any = one._executor
    executor.prefill_graphs = graphs
    cost = one.prepare(MODE)
    assert (found["longest"], found["max_tokens"]) == (rehearsed, 400)
    assert cost == PrefillCost(least=3.0, token=0.5, replay=1.0)


@pytest.mark.parametrize(("found", "ranks", "launched"), [(False, None, 11), (True, None, 2), (True, object(), 11)])
def test_where_kernels_are_on_disk_only_passes_that_are_timed_are_launched(
    found: bool, ranks: object, launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others compile. Every rank launches all, as other ranks may have to compile."""
    passes: list[list[Segment]] = []

    def recorded(launch: Any, rows: Any, given: Sequence[list[Segment]], mode: SamplingMode) -> PrefillCost:
        passes.extend(given)
        return PrefillCost(least=0.0, token=0.0)

    monkeypatch.setattr(warm_up, "time_passes", recorded)
    monkeypatch.setattr(warm_up, "compile_ahead", lambda *_, **__: found)
    one = planner(packed(4, longest_prompt=40, prefill_tokens=100), 1, ranks=ranks)
    one.prepare(MODE)
    assert len(passes) == launched
    assert [sum(s.end - s.begin for s in segments) for segments in passes[-2:]] == [17, 100]
    assert ("compiling kernels" in one.seconds) == (not found)


def some_rows() -> ExpectedRows:
    return ExpectedRows(prompt_lens=np.ones(4, np.int32), common_tokens=0, output_tokens=1.0, num_rows=4)


@pytest.mark.parametrize("asked", [False, True])
def test_prefill_passes_are_captured_last_and_count_as_graphs(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are captured after rounds were timed, because the time of a round determines how many rows a refill has."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    one, rows = planner(packed(4), 1), some_rows()
    executor: Any = one._executor
    executor.prepare_passes = lambda expected, mode, *, round_s: 3 if (expected, mode, round_s) == (rows, MODE, 1.5) else 0
    one.prepare(MODE, expected=rows if asked else None)
    assert f"capture of {one._executor.graphs.num_captured + 3 * asked} graphs" in one.seconds


def test_ranks_prepare_no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of captures depends on a clock, and the launches must be the same on every rank."""
    given: list[Any] = []
    engine = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE)
    monkeypatch.setattr(
        engine.planner, "prepare", lambda mode, **options: given.append((options["expected"], options["most_rounds"]))
    )
    rows = some_rows()
    engine.prepare(MODE, most_rounds=5, expected=rows)
    lead: Any = SimpleNamespace(send=lambda message: None)
    engine.lead = lead
    engine.prepare(MODE, most_rounds=5, expected=rows)
    assert given == [(rows, 5), (None, None)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("adaptive", "draft_len", "kinds"),
    [
        (True, 3, {(0, False), (0, True), (3, True)}),
        (False, 3, {(3, True)}),
        (False, 0, {(0, True)}),
    ],
)
def test_just_the_graphs_that_the_job_may_launch_are_prepared(
    adaptive: bool, draft_len: int, kinds: set[tuple[int, bool]], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree is verified as a whole or not at all."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    base = dict.fromkeys(kinds, 1.0)
    one: Any = planner(packed(4), draft_len, draft_lens=(0, draft_len), adaptive=adaptive, base=base)
    one.prepare(MODE, shared=shared)
    wanted = [
        RoundShape(num_rows, k, MODE, common, prepare_next)
        for num_rows in (1, 2, 4)
        for k, prepare_next in kinds
        for common in ((False, True) if shared else (False,))
    ]
    assert len(one._executor.graphs.prepared) == len(wanted)
    assert set(one._executor.graphs.prepared) == set(wanted)


@pytest.mark.parametrize(("longest", "prepared"), [(80, False), (96, True), (None, True)])
def test_graphs_that_read_prefixes_once_are_prepared_if_the_longest_prompt_could_make_them_pay(
    longest: int | None, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four rows save at most half of the pages of the longest prompt; of an unknown one, of the longest row."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    one: Any = planner(packed(4, page_size=16, longest_prompt=longest, max_len=128), 1, pass_bytes=5)
    one.prepare(MODE, shared=True)
    assert any(shape.shared for shape in one._executor.graphs.prepared) == prepared


@pytest.mark.parametrize(
    ("longest_row", "max_len", "usual"), [(96, 8192, 128), (96, 128, None), (110, 8192, 256), (None, 8192, None)]
)
def test_rounds_are_prepared_for_rows_a_little_longer_than_those_surveyed(
    longest_row: int | None, max_len: int, usual: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter longer, drafts included: attention over rows that might have 8,192 tokens splits them all."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    one: Any = planner(packed(4, longest_row=longest_row, max_len=max_len, num_verified=1), 1)
    one.prepare(MODE)
    assert {shape.max_kv for shape in one._executor.graphs.prepared} == {usual}


def test_a_round_with_one_longer_row_plans_for_all_that_the_job_allows() -> None:
    """Drafts reach beyond a row's limit: with K = 1 by four keys at most, masks of a parallel head included."""
    one = planner(packed(4, longest_row=96, max_len=8192, num_verified=1), 1)
    assert [one.max_kv(longest) for longest in (1, 124, 125, 8192)] == [128, 128, None, None]
    assert planner(packed(4, longest_row=None, max_len=8192), 1).max_kv(1) is None


@given(
    slots=st.integers(1, 40),
    draft_len=st.integers(0, 63),
    max_len=st.integers(2, 3000),
    longest_row=st.none() | st.integers(1, 3000),
    longest_prompt=st.none() | st.integers(1, 3000),
    shared=st.booleans(),
)
@example(slots=40, draft_len=3, max_len=3000, longest_row=None, longest_prompt=None, shared=True)
@example(slots=40, draft_len=3, max_len=3000, longest_row=2000, longest_prompt=1500, shared=True)
def test_memory_is_kept_for_all_graphs_of_usual_rows_and_for_those_that_longer_rows_ask_for(
    slots: int, draft_len: int, max_len: int, longest_row: int | None, longest_prompt: int | None, shared: bool
) -> None:
    """The latter are captured in the middle of the run, when a row that is longer than those surveyed comes. Of rows that share
    prefixes there are as many graphs again, where it pays to read a prefix once."""
    longest_row = None if longest_row is None else min(longest_row, max_len)
    longest_prompt = None if longest_prompt is None else min(longest_prompt, max_len)
    spec = small_spec(hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128)
    batch = packed(
        slots, row_buckets=row_buckets(slots), max_len=max_len, longest_row=longest_row, num_verified=draft_len, page_size=16,
        longest_prompt=longest_prompt,
    )
    one: Any = planner(
        batch, draft_len, draft_lens=candidates(draft_len), base=lambda shape: 1 + shape.width.verified, row_lengths=True
    )
    one._executor.sharing = spec.sharing_cost(torch.bfloat16, page_size=16, max_q=draft_len + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
        one.prepare(MODE, shared=shared)
    usual = set(one._executor.graphs.prepared)
    longer = {replace(shape, max_kv=one.max_kv(max_len)) for shape in usual}
    demand = Demand(
        num_completions=1, prompt_tokens=1.0, output_tokens=1.0, max_tokens=max_len, longest_prompt=longest_prompt,
        shares_prefix=shared,
    )
    common: dict[str, Any] = {
        "dtype": torch.bfloat16, "slots": slots, "num_verified": draft_len, "prefill_tokens": 8, "max_len": max_len,
        "longest_row": longest_row, "shared_tokens": demand.shared_tokens,
    }
    held, without = (reserve_bytes(spec, num_buckets=count, **common) for count in (len(batch.row_buckets), 0))
    assert held - without >= GRAPH_BYTES * len(usual | longer)
    once = GRAPH_BYTES * (len(batch.row_buckets) * (MOST_LENGTHS + 1) + MOST_PARTIAL_BUCKETS * MOST_PARTS)
    if longest_row in (None, max_len):  # all rows are as prepared: not twice as much
        assert held - without <= once * (2 if shared else 1)
        assert longer == usual
    if not shared:
        assert held - without <= 2 * once


@pytest.mark.second
@given(
    slots=st.integers(2, 256),
    draft_len=st.integers(0, 63),
    max_len=st.integers(300, 9000),
    heads=st.sampled_from([(32, 8), (9, 3)]),
)
@example(slots=242, draft_len=52, max_len=1895, heads=(32, 8))  # 171 MB, the most of some thousand draws
def test_memory_is_kept_for_the_partial_results_of_prefixes_that_are_read_once(
    slots: int, draft_len: int, max_len: int, heads: tuple[int, int]
) -> None:
    """Beside those of rounds that read them by row. What long rows and prefixes are cut into fills an H200 once, whatever the
    batch: up to 200 MB, a tenth of what is kept for all workspaces."""
    num_heads, kv_heads = heads
    spec = small_spec(hidden_size=128 * num_heads, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=128)
    if not spec.sharing_cost(torch.bfloat16, page_size=1, max_q=draft_len + 1).may_pay(slots, max_len):
        return
    shape = work_shape(
        num_rows=slots, max_q=draft_len + 1, max_kv=max_len, num_heads=num_heads, kv_heads=kv_heads, head_dim=128, page_size=16,
        dtype=torch.bfloat16, card=known_card("H200").card,
    )
    tables, rows = PrefixGroupTables(slots, 16, torch.device("cpu")), torch.zeros(slots + 1, dtype=torch.int32)
    batch = rows, rows[1:], torch.zeros(slots * (draft_len + 1), dtype=torch.int64)
    lines = [split_kv_schedule(*batch, shape=shape, shared=shared).num_lines for shared in (None, tables.first(slots))]
    by_row, once = (4 * (128 + 1) * kv_heads * count for count in lines)
    held = [
        reserve_bytes(
            spec, dtype=torch.bfloat16, slots=slots, num_buckets=0, num_verified=draft_len, prefill_tokens=8, max_len=max_len,
            shared_tokens=tokens,
        )
        for tokens in (0, max_len)
    ]
    assert held[1] - held[0] + 200e6 >= once - by_row


@pytest.mark.parametrize(("most_rounds", "buckets"), [(None, (1, 2, 4)), (2, (1, 2, 4)), (1, (4,))])
def test_rounds_of_few_rows_are_left_out_where_the_last_rows_end_before_they_would_pay(
    most_rounds: int | None, buckets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three graphs are captured in 0.9 s and take 1 s a round at least: the six of one and two rows would take 1.8 s, so that
    they could pay after two rounds, and never after one."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    one: Any = planner(packed(4), 1)
    one._executor.graphs.each_s = 0.15
    one.prepare(MODE, most_rounds=most_rounds)
    assert one.row_buckets == buckets
    prepared = [(shape.num_rows, shape.draft_len, shape.prepare_next) for shape in one._executor.graphs.prepared]
    assert sorted(prepared) == sorted((rows, *kind) for rows in buckets for kind in BASE)
    assert one.ready


def test_rounds_that_are_no_graphs_may_have_any_row_bucket() -> None:
    engine = make_engine(tiny_target(), NoDrafter(), packed(4), device=DEVICE)
    engine.prepare(MODE, most_rounds=1)
    assert engine.batch.row_buckets == packed(4).row_buckets


def test_a_result_speaks_of_the_round_that_it_came_from_however_many_were_launched_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rounds over two of four slots, every other one without drafts, are launched before the first result is there."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    monkeypatch.setattr(PendingResult, "seconds_since", lambda result, began: result.arrived - began)
    one = planner(packed(4), 1)
    one.prepare(MODE)
    assert one._lengths is not None
    lens = [0, 1, 0, 1, 0]
    following = iter(lens)
    monkeypatch.setattr(one._lengths, "choose", lambda *_, **__: (RoundWidth(next(following)), True))
    launched = [chosen(one, 2, np.array([0, 1, -1, -1]), np.full(4, 500)) for _ in lens]
    now = 0.0
    for k, launch in zip(lens, launched, strict=True):
        now += BASE[k, True] / 2 + ATTENTION * (1 + k)
        one.learn(launch, arrived(now), accepting(16, k))
    tokens, seconds = np.array([1.0, 1 + (0.7 * 32 + 32) / (32 + 32)]), np.array([1.0 / 2 + ATTENTION, 1.5 / 2 + 2 * ATTENTION])
    assert one._lengths.scores(2, 1000) == pytest.approx(tokens / seconds, rel=0.002)


@pytest.mark.parametrize(("num_rows", "draft_len"), [(2, 1), (4, 0)])
def test_drafts_that_pay_among_few_rows_are_not_made_among_many(
    num_rows: int, draft_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    one: Any = planner(packed(4), 1)
    one._executor.graphs.seconds = lambda shape: 2.0 if shape.draft_len and shape.num_rows == 4 else 1.0
    one.prepare(MODE)
    assert chosen(one, num_rows, np.arange(4), np.full(4, 300)).width.draft_len == draft_len


def test_of_another_head_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    one = planner(packed(4), 1)
    one.prepare(MODE)
    assert one._lengths is not None
    before = one._lengths.scores(4, 0)
    one._lengths.observe(1, np.zeros(1000, np.int32))
    one.forget()
    assert one._lengths.scores(4, 0) == pytest.approx(before)


@pytest.mark.parametrize("draft_len", [0, 1])
def test_free_slots_wait_by_what_rounds_of_the_present_draft_length_take(draft_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    one = planner(packed(4), 1)
    assert one.round_s == 1.0
    one.prepare(MODE)
    assert one.round_s == BASE[1, True]
    monkeypatch.setattr(one._lengths, "choose", lambda *_, **__: (RoundWidth(draft_len), False))
    chosen(one, 4, np.arange(4), np.full(4, 300))
    assert one.round_s == BASE[draft_len, True]


def test_the_first_round_of_a_run_has_the_draft_length_of_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft lengths are chosen one round ahead. The run before ended with one row, whose drafts cost next to nothing."""
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))
    base = {(0, False): 1.0, (0, True): 1.0, (1, True): 4.0}
    one = planner(packed(4), 1, base=base)
    one.prepare(MODE)
    assert one._lengths is not None
    one._lengths.set_base(1, 1, 0.25)
    assert [chosen(one, 1, np.array([7, -1, -1, -1]), np.full(4, 9)).width.draft_len for _ in range(3)] == [1] * 3
    one.restart()
    assert [chosen(one, 4, np.arange(4), np.full(4, 9)).width.draft_len for _ in range(2)] == [0] * 2


def test_the_time_between_two_runs_is_not_the_time_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.03, token=1e-6, replay=1e-3))
    monkeypatch.setattr(PendingResult, "seconds_since", lambda result, began: result.arrived - began)
    one = planner(packed(4), 1)
    one.prepare(MODE)
    assert one._lengths is not None
    assert one._refills is not None
    timed = list[float]()
    monkeypatch.setattr(one._lengths, "timed", lambda rows, draft_len, context, seconds, **_: timed.append(seconds))
    log = accepting(4, 0)
    for at, restarts in ((1.0, False), (3.0, False), (10.0, True), (14.0, False)):
        if restarts:
            one.restart()
        one.learn(chosen(one, 4, np.arange(4), np.full(4, 9)), arrived(at), log)
    assert timed == [2.0, 4.0]
    assert set(one._refills.round_s.values()) <= {2.0, 4.0}


def test_where_rounds_are_no_graphs_nothing_is_timed_and_nothing_chosen() -> None:
    """Free slots then wait by the usual cost of a pass; a round of no time would have them wait for ever."""
    one = planner(packed(4), 1, dtype=torch.float64)
    assert one.prepare(MODE) is None
    assert one.round_s == 1.0
    assert chosen(one, 4, np.arange(4), np.full(4, 300)).width.draft_len == 1


@pytest.mark.parametrize(("round_s", "rounds"), [(0.01, 5), (1.0, 4)])
def test_the_engine_refills_by_what_rounds_take(round_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots, rows of 2 and 5 tokens, then two of 2: where rounds are short, a pass of half a second waits for both slots."""
    monkeypatch.setattr(RoundPlanner, "round_s", round_s)
    engine = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE)
    engine._prefill_cost = PrefillCost(least=0.5, token=0.0)
    done = list(engine.run(request(i, [1, 2], cap=cap) for i, cap in enumerate((2, 5, 2, 2))))
    assert len(done) == 4
    assert engine.totals.rounds == rounds


@pytest.mark.parametrize(
    ("max_tokens", "longest", "ends", "short", "between"),
    [
        (100, 40, [40, 40, 20], 17, [[1], [2], [4], [8], [16], [32], [40, 24], [17] * 2, [17] * 4]),
        (400, 40, [40] * 4, 17, [[1], [2], [4], [8], [16], [32], [40, 24], [40, 40, 40, 8], [17] * 2, [17] * 4]),
        (10, 40, [10], 10, [[1], [2], [4], [8]]),
        (600, 300, [300, 300], 17, [*([1 << power] for power in range(9)), [300, 212], [17] * 2, [17] * 4]),
    ],
)
def test_a_rehearsal_is_the_largest_pass_that_there_can_be_and_a_short_one(
    max_tokens: int, longest: int, ends: list[int], short: int, between: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than once each: the first time compiles. All powers of two of tokens and of rows below it only compile."""
    passes: list[list[int]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows: Any = SimpleNamespace(page_tables=(torch.ones(4, 8),), live=torch.zeros(4))

    def launch(segments: Sequence[Segment], _: SamplingMode) -> None:
        passes.append([s.end for s in segments])

    time_passes(launch, rows, rehearsal_passes(4, max_tokens=max_tokens, longest=longest), MODE)
    assert passes == between + [ends] * 3 + [[short]] * 6
    assert not rows.page_tables[0].any()


def test_a_rehearsal_of_recurrent_layers_has_short_prompts_and_generated_tokens() -> None:
    """Prompts are cut at multiples of 64 alone, so passes of fewer tokens are whole prompts."""
    passes = rehearsal_passes(4, max_tokens=200, longest=150, multiple=64)
    assert [[s.end - s.begin for s in segments] for segments in passes] == [
        [1], [2], [4], [8], [16], [32], [64], [128], [17], [17] * 2, [17] * 4, [17], [150],
    ]
    assert [[s.generated for s in segments] for segments in passes].index([True]) == 8
    assert sum(s.generated for segments in passes for s in segments) == 1
    assert all(s.last or s.end % 64 == 0 for segments in passes for s in segments)
    plain = rehearsal_passes(4, max_tokens=200, longest=150)
    assert not any(s.generated for segments in plain for s in segments)
    assert [s.end - s.begin for s in plain[-1]] == [150, 50]


def test_a_rehearsal_has_passes_of_the_sizes_that_take_other_kernels() -> None:
    passes = rehearsal_passes(4, max_tokens=200, longest=150, sizes=(48, 64, 300))
    counts = [sum(s.end - s.begin for s in segments) for segments in passes]
    assert counts[:9] == [1, 2, 4, 8, 16, 32, 48, 64, 128]


@pytest.mark.parametrize("stalled", [1, 3, 5, 8])
def test_a_stall_of_the_host_does_not_make_a_pass_dear(stalled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pass of 100 tokens takes 0.25 s and a short one 0.0625 s; one of them, or the one that compiles, takes 8 s more."""
    clock, taken = [0.0], iter([9.0] * 9 + [0.25] * 3 + [0.0625] * 6)  # the first nine only compile
    stalls = iter([place <= 9 or place == 9 + stalled for place in range(18)])

    def timed_pass(*_: Any) -> None:
        clock[0] += next(taken) + 8.0 * next(stalls)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("batchspec.engine.prefill.passes.time.perf_counter", lambda: clock[0])
    rows: Any = SimpleNamespace(page_tables=(), live=torch.zeros(4))
    cost = time_passes(timed_pass, rows, rehearsal_passes(4, max_tokens=100, longest=40), MODE)
    assert cost.least == 0.0625
    assert cost.token == 0.0025


@pytest.mark.parametrize(("fixed_len", "lengths"), [(True, None), (False, None), (True, 4)])
def test_the_positions_of_rounds_are_those_that_the_target_computes_for_live_rows(
    fixed_len: bool, lengths: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row all K drafts; up to its limit, in a ragged layout; or the drafts of all rows that are chosen."""
    drafter = ForcedDrafter(3, defaultdict(list), right=False, fixed_len=fixed_len)
    target = tiny_target()
    engine = make_engine(target, drafter, packed(3, num_verified=3), device=DEVICE, lengths=lengths)
    round_, batches, learn, told = engine.executor.round, list[FlatBatch](), RoundPlanner.learn, list[int]()
    forward, run_round, verified, full = target.forward, round_.run, 0, 0

    def noted(batch: FlatBatch, *others: Any, **options: Any) -> Any:
        batches.append(batch)
        return forward(batch, *others, **options)

    def counted(rows: DeviceBatch, mode: SamplingMode, draft_len: int, *others: Any) -> RoundResult:
        nonlocal verified, full
        live = rows.live != 0
        result = run_round(rows, mode, draft_len, *others)
        verified += int(batches[-1].cu_seqlens_q.diff()[live].sum())
        full += int(live.sum()) * (draft_len + 1)
        return result

    def learned(self: RoundPlanner, launch: UnreadLaunch, result: PendingResult, *others: Any) -> None:
        if not launch.is_prefill:
            told.append(self.positions(launch, result))
        learn(self, launch, result, *others)

    monkeypatch.setattr(target, "forward", noted)
    monkeypatch.setattr(round_, "run", counted)
    monkeypatch.setattr(RoundPlanner, "learn", learned)
    assert len(list(engine.run(request(i, [i, 5], cap=4 + 3 * i) for i in range(6)))) == 6
    assert sum(told) == verified
    assert (verified < full) == (not fixed_len or lengths is not None)
    assert engine.totals.row_rounds < verified
