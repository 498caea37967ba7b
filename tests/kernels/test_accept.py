"""accept: the drafts that the target confirms, the tokens a row emits, where it ends, and the log for the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.rounds.accept import FAILED, HELD_AFTER_DRAFT, MAX_DRAFT_LEN, UNDECIDED, accept
from batchspec.kernels.sampling.argmax import NO_TOKEN
from batchspec.kernels.sampling.counter_rng import uniform_reference

POISON = -7
L = 40


@dataclass
class Row:
    """One row before a round, or after it."""

    drafts: list[int]
    """Draft tokens that count."""
    targets: list[int]
    """The target's choice after the last committed token and after each draft token."""
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    stop_ids: tuple[int, ...] = ()
    limit: int = 1000
    live: int = 1
    finish: int = 0
    key: int = 0


def run(
    rows: list[Row], interpret: bool, device: torch.device, *,
    width: int = 4, rates: list[float] | None = None, kinds: list[list[float]] | None = None, num_stops: int = 2,
    uniform_layout: bool = False,
) -> tuple[list[list[int]], list[Row], list[int]]:
    """Logs, rows afterwards and accepted lengths. What must not be touched is poisoned and checked here."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}

    def padded(lists: list[list[int]], length: int, fill: int) -> Tensor:
        return torch.tensor([values + [fill] * (length - len(values)) for values in lists], **ints).view(len(lists), length)

    def vector(values: list[int]) -> Tensor:
        return torch.tensor(values, **ints)

    counts = [width + 1 if uniform_layout else len(row.targets) for row in rows]
    targets = [row.targets + [POISON] * (count - len(row.targets)) for row, count in zip(rows, counts, strict=True)]
    state = {
        "tokens": padded([row.tokens for row in rows], L, POISON),
        "num_tokens": vector([len(row.tokens) for row in rows]),
        "live": vector([row.live for row in rows]),
        "finish": vector([row.finish for row in rows]),
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    log = torch.full((len(rows), width + 5), POISON, **ints)
    accepted_len = torch.full((len(rows),), POISON, **ints)
    accept(
        padded([row.drafts for row in rows], width, POISON),
        vector([len(row.drafts) for row in rows]),
        vector([token for row in targets for token in row] + [POISON] * 3),
        vector([0, *torch.tensor(counts).cumsum(0).tolist()]),
        padded([list(row.stop_ids) for row in rows], num_stops, -1),
        vector([row.limit for row in rows]),
        None if rates is None else torch.tensor([rates] if kinds is None else kinds, device=device),
        torch.tensor([row.key for row in rows], device=device),
        out_accepted_len=accepted_len,
        out_log=log,
        interpret=interpret,
        **state,
    )
    after = []
    for r, row in enumerate(rows):
        num = int(state["num_tokens"][r])
        assert bool((state["tokens"][r, num:] == POISON).all())
        if not row.live:
            assert all(torch.equal(state[name][r], before[name][r]) for name in state)
        after.append(Row(row.drafts, row.targets, state["tokens"][r, :num].tolist(), row.stop_ids, row.limit,
                         int(state["live"][r]), int(state["finish"][r]), row.key))
    return log.tolist(), after, accepted_len.tolist()


def one(row: Row, interpret: bool, device: torch.device, **options: Any) -> tuple[list[int], Row]:
    logs, after, accepted = run([row], interpret, device, **options)
    assert accepted == [logs[0][0]]
    return logs[0], after[0]


def by_hand(row: Row, width: int, rates: list[float] | None = None) -> tuple[list[int], Row]:
    if not row.live:
        return [-1, 0, 0, 0] + [-1] * (width + 1), row
    emitted, accepted = [], 0
    for j, draft in enumerate(row.drafts):
        chance = float(uniform_reference(torch.tensor([row.key]), torch.tensor([len(row.tokens) + j])))
        if (draft != row.targets[j]) if rates is None else (chance >= torch.tensor(rates[j])):
            break
        emitted.append(draft)
        accepted += 1
    undecided = row.targets[accepted] == UNDECIDED
    if undecided:  # the last draft is the round's last token
        accepted -= 1
        if accepted < 0:
            return [-1, len(row.drafts), 0, 0] + [-1] * (width + 1), row
        emitted.pop()
    emitted.append(row.targets[accepted])
    failures = (j for j, target in enumerate(row.targets[: accepted + 1]) if target == NO_TOKEN)
    stops = (j + 1 for j, token in enumerate(emitted) if token in row.stop_ids)
    kept = min(next(stops, len(emitted)), failed := next(failures, len(emitted)))
    tokens = row.tokens + emitted[:kept]
    stopped = kept and emitted[kept - 1] in row.stop_ids
    finish = 1 if stopped else 3 if kept == failed < len(emitted) else 2 if len(tokens) >= row.limit else 0
    noted = HELD_AFTER_DRAFT if undecided and kept and not finish else finish
    log = [accepted, len(row.drafts), kept, noted, *emitted] + [-1] * (width + 1 - len(emitted))
    return log, Row(row.drafts, row.targets, tokens, row.stop_ids, row.limit, int(finish == 0), finish, row.key)


def test_the_prefix_that_the_target_confirms_and_one_token_more(interpret: bool, device: torch.device) -> None:
    log, after = one(Row([10, 11, 12, 13], [10, 11, 99, 13, 14]), interpret, device)
    assert log == [2, 4, 3, 0, 10, 11, 99, -1, -1]
    assert after.tokens == [1, 2, 3, 10, 11, 99]
    assert (after.live, after.finish) == (1, 0)


def test_nothing_confirmed_still_emits_the_target_s_token(interpret: bool, device: torch.device) -> None:
    log, after = one(Row([10, 11], [50, 11, 12]), interpret, device)
    assert log == [0, 2, 1, 0, 50, -1, -1, -1, -1]
    assert after.tokens == [1, 2, 3, 50]


def test_everything_confirmed_emits_a_bonus_token(interpret: bool, device: torch.device) -> None:
    log, after = one(Row([10, 11, 12, 13], [10, 11, 12, 13, 14]), interpret, device)
    assert log == [4, 4, 5, 0, 10, 11, 12, 13, 14]
    assert after.tokens == [1, 2, 3, 10, 11, 12, 13, 14]


def test_a_round_without_drafts_emits_one_token(interpret: bool, device: torch.device) -> None:
    for width in (0, 3):
        log, after = one(Row([], [42]), interpret, device, width=width)
        assert log == [0, 0, 1, 0, 42, *[-1] * width]
        assert after.tokens == [1, 2, 3, 42]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_row_ends_where_the_target_has_no_choice_with_the_tokens_before(at: int, interpret: bool, device: torch.device) -> None:
    targets = [10, 11, 12]
    targets[at] = NO_TOKEN
    rows = [Row([10, 11], targets), Row([10, 11], [10, 11, 12])]
    logs, after, _ = run(rows, interpret, device)
    assert logs[0] == [at, 2, at, FAILED, *[10, 11][:at], *[-1] * (5 - at)]
    assert (after[0].tokens, after[0].live, after[0].finish) == ([1, 2, 3, *[10, 11][:at]], 0, FAILED)
    assert (after[1].tokens, after[1].live) == ([1, 2, 3, 10, 11, 12], 1)


def test_a_draft_that_was_not_confirmed_or_comes_after_a_stop_may_fail_as_it_likes(interpret: bool, device: torch.device) -> None:
    log, after = one(Row([10, 11], [50, NO_TOKEN, NO_TOKEN]), interpret, device)
    assert (log[:4], after.live) == ([0, 2, 1, 0], 1)
    log, after = one(Row([10, 11], [10, 11, NO_TOKEN], stop_ids=(11,)), interpret, device)
    assert (log[2:4], after.tokens) == ([2, 1], [1, 2, 3, 10, 11])


def test_made_up_acceptance_fails_where_the_target_has_no_choice_before_a_stop(interpret: bool, device: torch.device) -> None:
    row = Row([10, 11], [NO_TOKEN, 5, 6], stop_ids=(11,))
    log, after = one(row, interpret, device, rates=[1.0, 1.0, 1.0, 1.0])
    assert (log[2], log[3], after.tokens, after.live) == (0, FAILED, [1, 2, 3], 0)


def test_a_choice_that_must_wait_leaves_the_draft_before_as_the_last_token(interpret: bool, device: torch.device) -> None:
    log, after = one(Row([10, 11, 12], [10, 11, UNDECIDED, 12]), interpret, device)
    assert log == [1, 3, 2, HELD_AFTER_DRAFT, 10, 11, -1, -1, -1]
    assert (after.tokens, after.live, after.finish) == ([1, 2, 3, 10, 11], 1, 0)
    log, after = one(Row([10], [10, UNDECIDED]), interpret, device)
    assert log[:5] == [0, 1, 1, HELD_AFTER_DRAFT, 10]
    log, after = one(Row([10, 11], [50, UNDECIDED, UNDECIDED]), interpret, device)
    assert log[:5] == [0, 2, 1, 0, 50]
    logs, (after,), accepted = run([Row([10], [UNDECIDED, 11])], interpret, device)
    assert (logs[0], accepted) == ([-1, 1, 0, 0, -1, -1, -1, -1, -1], [0])
    assert (after.tokens, after.live, after.finish) == ([1, 2, 3], 1, 0)


def test_no_draft_confirms_a_choice_that_is_none(interpret: bool, device: torch.device) -> None:
    log, after = one(Row([10, NO_TOKEN, 12], [10, NO_TOKEN, 12, 13]), interpret, device)
    assert log[:4] == [1, 3, 1, FAILED]
    assert after.tokens == [1, 2, 3, 10]


def test_drafts_after_draft_len_do_not_count(interpret: bool, device: torch.device) -> None:
    log, _ = one(Row([10], [10, 55]), interpret, device)  # after it draft and target would agree
    assert log == [1, 1, 2, 0, 10, 55, -1, -1, -1]


def test_a_stop_id_inside_the_accepted_prefix_ends_the_row_there(interpret: bool, device: torch.device) -> None:
    log, after = one(Row([10, 11, 12], [10, 11, 12, 13], stop_ids=(12, 11)), interpret, device)
    assert log == [3, 3, 2, 1, 10, 11, 12, 13, -1]
    assert after.tokens == [1, 2, 3, 10, 11]
    assert (after.live, after.finish) == (0, 1)


def test_a_stop_id_as_the_bonus_token_is_kept(interpret: bool, device: torch.device) -> None:
    log, after = one(Row([10], [10, 2], stop_ids=(2,)), interpret, device)
    assert log[:3] == [1, 1, 2]
    assert (after.tokens[3:], after.live, after.finish) == ([10, 2], 0, 1)


def test_a_stop_id_among_rejected_drafts_does_not_count(interpret: bool, device: torch.device) -> None:
    log, after = one(Row([10, 2], [11, 2, 5], stop_ids=(2,)), interpret, device)
    assert log[:5] == [0, 2, 1, 0, 11]
    assert (after.live, after.finish) == (1, 0)


def test_rows_without_stop_ids_run_on(interpret: bool, device: torch.device) -> None:
    _, after = one(Row([0], [0, 0]), interpret, device, num_stops=0)
    assert (after.tokens[3:], after.live) == ([0, 0], 1)
    _, after = one(Row([0], [0, 0]), interpret, device, num_stops=3)  # all unused
    assert (after.tokens[3:], after.live) == ([0, 0], 1)


@pytest.mark.parametrize(("limit", "finish"), [(6, 0), (5, 2), (4, 2)])
def test_the_limit_ends_a_row(limit: int, finish: int, interpret: bool, device: torch.device) -> None:
    _, after = one(Row([10], [10, 11], limit=limit), interpret, device)
    assert (after.tokens[3:], after.live, after.finish) == ([10, 11], int(finish == 0), finish)


def test_a_stop_id_at_the_limit_counts_as_stop(interpret: bool, device: torch.device) -> None:
    _, after = one(Row([], [2], stop_ids=(2,), limit=4), interpret, device)
    assert (after.live, after.finish) == (0, 1)


def test_dead_rows_are_left_alone(interpret: bool, device: torch.device) -> None:
    rows = [Row([10], [10, 11], live=0, finish=2), Row([10], [10, 11]), Row([], [], live=0, finish=1, tokens=[])]
    logs, after, accepted = run(rows, interpret, device)
    assert logs == [[-1, 0, 0, 0, -1, -1, -1, -1, -1], [1, 1, 2, 0, 10, 11, -1, -1, -1], [-1, 0, 0, 0, -1, -1, -1, -1, -1]]
    assert accepted == [0, 1, 0]
    assert [row.finish for row in after] == [2, 0, 1]


def test_tokens_that_the_buffer_cannot_hold_are_not_written(interpret: bool, device: torch.device) -> None:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    wide = torch.full((2, 8), POISON, **ints)
    tokens = wide[:, 1:6]  # a slice of wider rows, five tokens long
    vectors = {name: torch.zeros(2, **ints) for name in ("finish", "out_accepted_len")}
    accept(
        torch.full((2, 3), 9, **ints), torch.tensor([3, 3], **ints), torch.full((8,), 9, **ints), torch.tensor([0, 4, 8], **ints),
        torch.full((2, 1), -1, **ints), torch.tensor([5, 99], **ints), None, torch.zeros(2, dtype=torch.int64, device=device),
        tokens=tokens, num_tokens=torch.tensor([3, 0], **ints), live=torch.ones(2, **ints), **vectors,
        out_log=torch.empty(2, 8, **ints), interpret=interpret,
    )
    assert wide.tolist() == [[POISON] * 4 + [9, 9] + [POISON] * 2, [POISON] + [9] * 4 + [POISON] * 3]


def test_rate_one_accepts_everything_and_rate_zero_nothing(interpret: bool, device: torch.device) -> None:
    rows = [Row([10, 11, 12, 13], [20, 21, 22, 23, 24], key=key * 7919) for key in range(12)]
    logs, after, _ = run(rows, interpret, device, rates=[1.0, 1.0, 1.0, 1.0])
    assert logs == [[4, 4, 5, 0, 10, 11, 12, 13, 24]] * 12
    assert all(row.tokens[3:] == [10, 11, 12, 13, 24] for row in after)
    logs, _, _ = run(rows, interpret, device, rates=[0.0, 1.0, 1.0, 1.0])
    assert logs == [[0, 4, 1, 0, 20, -1, -1, -1, -1]] * 12


def test_a_row_has_the_rates_of_its_kind(interpret: bool, device: torch.device) -> None:
    """Which is the remainder of its key, of a negative one too."""
    rows = [Row([10, 11], [20, 21, 22], key=key) for key in (-7, -2, -1, 0, 1, 2, 3, 2**62)]
    kinds = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    _, _, accepted = run(rows, interpret, device, width=2, rates=[], kinds=kinds)
    assert accepted == [row.key % 3 for row in rows]


@pytest.mark.parametrize("interpreted", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_rates_are_conditional_on_what_was_accepted_before(interpreted: int, interpret: bool, device: torch.device) -> None:
    num_rows = interpreted if interpret and device.type == "cpu" else 2000
    rows = [Row([10, 11, 12], [20, 21, 22, 23], key=key) for key in range(num_rows)]
    logs, _, accepted = run(rows, interpret, device, width=3, rates=[0.6, 0.5, 0.25])
    at_least = [sum(length > j for length in accepted) / num_rows for j in range(3)]
    spread = 4 * 0.5 / num_rows**0.5
    assert at_least == pytest.approx([0.6, 0.3, 0.075], abs=spread)
    assert logs[:50] == [by_hand(row, 3, [0.6, 0.5, 0.25])[0] for row in rows[:50]]


@st.composite
def random_rows(draw: st.DrawFn, width: int, *, may_wait: bool = False) -> list[Row]:
    rows, rare = [], [3, NO_TOKEN, *[UNDECIDED] * may_wait]
    for key in range(draw(st.integers(1, 4))):
        drafts = draw(st.lists(st.integers(0, 3), max_size=width))
        targets = [draw(st.sampled_from([token] * 6 + rare)) for token in drafts] + [draw(st.sampled_from([0, 1, 2, *rare]))]
        stop_ids = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
        tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        limit = len(tokens) + draw(st.integers(1, 8))
        rows.append(Row(drafts, targets, tokens, stop_ids, limit, live=draw(st.sampled_from([1, 1, 1, 0])), key=key))
    return rows


ROUNDS = given(data=st.data(), width=st.sampled_from([0, 1, 2, 3, 5, 8]), uniform_layout=st.booleans(), synthetic=st.booleans())


@pytest.mark.parametrize("examples", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_equals_a_plain_loop(examples: int, interpret: bool, device: torch.device) -> None:
    settings(max_examples=examples)(ROUNDS(equals_a_plain_loop))(interpret=interpret, device=device)


def equals_a_plain_loop(
    data: st.DataObject, width: int, uniform_layout: bool, synthetic: bool, interpret: bool, device: torch.device
) -> None:
    rows = data.draw(random_rows(width, may_wait=not synthetic))
    rates = data.draw(st.lists(st.sampled_from([0.0, 0.3, 0.9, 1.0]), min_size=width, max_size=width)) if synthetic else None
    logs, after, accepted = run(rows, interpret, device, width=width, rates=rates, uniform_layout=uniform_layout)
    expected = [by_hand(row, width, rates) for row in rows]
    assert logs == [log for log, _ in expected]
    assert after == [row for _, row in expected]
    assert accepted == [max(log[0], 0) for log in logs]


def test_the_longest_draft(interpret: bool, device: torch.device) -> None:
    drafts = [7] * MAX_DRAFT_LEN
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    tokens, log = torch.zeros(1, 100, **ints), torch.full((1, MAX_DRAFT_LEN + 5), POISON, **ints)
    state = {name: torch.tensor([value], **ints) for name, value in
             (("num_tokens", 5), ("live", 1), ("finish", POISON), ("out_accepted_len", POISON))}
    accept(
        torch.tensor([drafts], **ints), torch.tensor([MAX_DRAFT_LEN], **ints), torch.tensor([*drafts, 8], **ints),
        torch.tensor([0, MAX_DRAFT_LEN + 1], **ints), torch.full((1, 16), -1, **ints), torch.tensor([100], **ints), None,
        torch.zeros(1, dtype=torch.int64, device=device), tokens=tokens, out_log=log, interpret=interpret, **state,
    )
    assert log.tolist() == [[MAX_DRAFT_LEN, MAX_DRAFT_LEN, MAX_DRAFT_LEN + 1, 0, *drafts, 8]]
    assert {name: int(value) for name, value in state.items()} == {
        "num_tokens": 70, "live": 1, "finish": 0, "out_accepted_len": MAX_DRAFT_LEN
    }
    assert tokens[0].tolist() == [0] * 5 + drafts + [8] + [0] * 30


def test_wrong_arguments_are_refused() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    good: dict[str, Any] = {
        "draft_ids": torch.zeros(2, 3, dtype=torch.int32), "draft_len": ints, "target_ids": torch.zeros(8, dtype=torch.int32),
        "cu_seqlens_q": torch.zeros(3, dtype=torch.int32), "stop_ids": torch.zeros(2, 1, dtype=torch.int32), "limit": ints,
        "rates": torch.zeros(2, 3), "keys": ints.long(), "tokens": torch.zeros(2, 9, dtype=torch.int32),
        "num_tokens": ints.clone(), "live": ints.clone(), "finish": ints.clone(), "out_accepted_len": ints.clone(),
        "out_log": torch.zeros(2, 8, dtype=torch.int32),
    }
    accept(**good)
    for name, tensor in good.items():
        with pytest.raises(ValueError, match=f"accept: {name} is float64"):
            accept(**{**good, name: tensor.double()})
    with pytest.raises(ValueError, match=r"accept: out_log is int32 \[2, 6\].* must be int32 \[2, 8\]"):
        accept(**{**good, "out_log": torch.zeros(2, 6, dtype=torch.int32)})
    with pytest.raises(ValueError, match="accept: draft_ids has 65 columns; at most 64"):
        accept(**{**good, "draft_ids": torch.zeros(2, 65, dtype=torch.int32)})
