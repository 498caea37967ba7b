"""The table of slots: a round of many rows is added by arrays, as if row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.engine.rounds.records import RoundLog
from batchspec.engine.slots.launch import UnreadLaunch, UnreadLaunches
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.slot_table import SlotTable
from tests.helpers.engines import request

SLOTS, K, MAX_LEN = 4, 3, 40


def log_lines(data: st.DataObject, rows: list[RequestState], width: int) -> np.ndarray:
    """Lines as `accept` writes them: a row keeps what it emits up to a stop id, and at least nothing."""
    lines = np.full((len(rows), 4 + width), -1, np.int32)
    for line in lines:
        drafted = data.draw(st.integers(0, width - 1))
        accepted = data.draw(st.integers(0, drafted))
        kept = data.draw(st.integers(0, accepted + 1))
        line[:4] = accepted, drafted, kept, 0
        line[4 : 4 + kept] = data.draw(st.lists(st.integers(0, 99), min_size=kept, max_size=kept))
        if kept <= accepted:  # what an unkept token leaves in the log counts for nothing
            line[4 + kept] = data.draw(st.integers(-1, 99))
    return lines


def add_round(state: RequestState, accepted: int, drafted: int, tokens: list[int]) -> None:
    """The definition."""
    counts = np.eye(K + 1, dtype=int)
    state.add_counts(counts[accepted].tolist(), counts[drafted].tolist())
    state.num_discarded += accepted + 1 - len(tokens)
    state.tokens += tokens


@pytest.mark.second
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_rounds_added_by_arrays_are_those_added_row_by_row(data: st.DataObject) -> None:
    """Adaptive rounds of any width, of some of the rows, with flushes and compactions between them."""
    table = SlotTable(SLOTS, MAX_LEN, K)
    rows, twins = ([RequestState.of(request(i, [1], cap=MAX_LEN - 1), K) for i in range(SLOTS - 1)] for _ in range(2))
    for slot, row in enumerate(rows):
        table.fill([row], [slot], order=slot)
    num_rounds = [0] * len(rows)
    for _ in range(data.draw(st.integers(1, 9))):
        width = data.draw(st.integers(1, K + 1))
        there = [row for row in rows if data.draw(st.booleans())]
        lines = log_lines(data, there, width)
        table.add_round(np.array([row.slot for row in there], np.intp), RoundLog.of(lines))
        for row in there:
            num_rounds[row.request.row_index] += 1
        for row, (accepted, drafted, kept, _, *tokens) in zip(there, lines.tolist(), strict=True):
            add_round(twins[row.request.row_index], accepted, drafted, tokens[:kept])
        if data.draw(st.booleans()):
            table.flush(rows[data.draw(st.integers(0, len(rows) - 1))])
        free = table.free()
        if data.draw(st.booleans()):
            table.move([(rows[0].slot, free[0])])
    assert [table.num_rounds[row.slot] for row in rows] == num_rounds
    for row, twin in zip(rows, twins, strict=True):
        table.clear(row)
        assert row.tokens == twin.tokens
        assert (row.num_rounds, row.num_accepted, row.num_drafted) == (twin.num_rounds, twin.num_accepted, twin.num_drafted)
        assert (row.histogram, row.accepted_at, row.drafted_at) == (twin.histogram, twin.accepted_at, twin.drafted_at)
        assert row.num_discarded == twin.num_discarded


@given(st.lists(st.tuples(st.booleans(), st.integers(0, SLOTS - 1)), max_size=20))
def test_the_number_of_live_rows_is_that_of_requests_in_slots(turns: list[tuple[bool, int]]) -> None:
    table = SlotTable(SLOTS, MAX_LEN, K)
    for order, (enters, slot) in enumerate(turns):
        if enters and slot in table.free():
            table.fill([RequestState.of(request(order, [1], cap=4), K)], [slot], order)
        elif not enters and table.requests[slot] is not None:
            table.clear(table.at(slot))
        assert table.num_live == len(table.live) == SLOTS - len(table.free())


def test_a_row_that_fills_its_slot_to_the_last_token_keeps_them_all() -> None:
    """The round writes what the log holds after the kept tokens too: there is room for it after the longest row."""
    table = SlotTable(1, 8, K)
    row = RequestState.of(request(0, [], cap=8), K)
    table.fill([row], [0], 0)
    for emitted in ([1, 2, 3, 4], [5, 6, 7], [8]):
        kept = len(emitted)
        line = np.array([[3, 3, kept, 0, *emitted, *[-1] * (K + 1 - kept)]], np.int32)
        table.add_round(np.array([0]), RoundLog.of(line))
    table.flush(row)
    assert row.tokens == [1, 2, 3, 4, 5, 6, 7, 8]


def test_results_are_counted_from_zero_in_the_order_of_launches() -> None:
    table = SlotTable(1, 8, K)
    unread = UnreadLaunches(table)
    assert (unread.num_launched, unread.num_read) == (0, 0)
    for _ in range(3):
        unread.add(UnreadLaunch(owners=table.owner.copy()))
    assert (unread.num_launched, unread.num_read) == (3, 0)
    unread.take_oldest()
    assert (unread.num_launched, unread.num_read) == (3, 1)


def test_a_token_of_a_row_that_takes_many_rounds_is_worth_more() -> None:
    """Three rows of a prompt of one token, after ten rounds, and one that has just entered, which is taken for an average one."""
    table = SlotTable(SLOTS, MAX_LEN, K)
    for slot in range(SLOTS):
        table.fill([RequestState.of(request(slot, [1], cap=MAX_LEN - 1), K)], [slot], order=slot)
    assert table.token_weights(np.arange(SLOTS)).tolist() == [1.0] * SLOTS
    table.num_tokens[:], table.num_rounds[:] = [2 + 10, 2 + 20, 2 + 30, 2], [10, 10, 10, 0]
    weights = table.token_weights(np.arange(SLOTS))
    mean_speed = 68 / 38
    expected = np.array([18 / (emitted + 8 * mean_speed) for emitted in (10, 20, 30)] + [1 / mean_speed])
    assert weights.tolist() == (expected / expected.mean()).tolist()
    assert weights.argsort().tolist() == [2, 1, 3, 0]
    assert table.token_weights(np.arange(0)).tolist() == []
    table.clear(table.at(0))
    table.fill([RequestState.of(request(9, [1, 2], cap=9), K)], [0], order=9)
    assert table.num_rounds[0] == 0
