"""constrain_logits and advance_states: walks over tokens, and masks, as the automata of `tests/helpers/automata.py` have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchspec.automata.token_automaton import DEAD, FORCED, TokenAutomaton
from batchspec.batch.automata import Automata, AutomataCapacity, AutomatonUpload, place_of
from batchspec.kernels.rounds.accept import FAILED, FULL, STOPPED
from batchspec.kernels.sampling.advance_states import advance_states
from batchspec.kernels.sampling.constrain import BLOCK, BLOCKS, constrain_drafts, constrain_logits, mask_rows
from tests.helpers.automata import EOS, VOCABULARY, automaton
from tests.helpers.engines import VOCAB

PLACES = (3, 5000)
MASK_ROWS = 400
OUTPUTS: tuple[list[int], ...] = ([], [3, 4], [5], [3, 4, 5], [6, EOS])
"""Committed tokens of five rows; the last one has ended."""


def both() -> tuple[TokenAutomaton, TokenAutomaton]:
    return automaton("(ab|c)*d"), automaton("[a-c]*")


def uploaded(device: torch.device) -> Automata:
    """Both automata, at PLACES, with mask rows that are not in order; everything else is poisoned."""
    made = Automata(VOCABULARY, AutomataCapacity(num_tokens=VOCAB, table_words=20_000, masks_bytes=4 * MASK_ROWS), device)
    made.tables.fill_(1 << 30)
    made.masks.fill_(0x5A5A5A5A)
    rows = np.random.default_rng(0).permutation(MASK_ROWS).astype(np.int32)
    for automaton_, place in zip(both(), PLACES, strict=True):
        taken, rows = rows[: len(automaton_.masks)], rows[len(automaton_.masks) :]
        made.upload([AutomatonUpload.of(automaton_, place, taken)])
    return made


def states_of(device: torch.device) -> tuple[Tensor, Tensor, list[tuple[TokenAutomaton | None, int]]]:
    """Places of states and class maps of the five rows under the first automaton, one under the second, and one without any."""
    first, second = both()
    rows: list[tuple[TokenAutomaton | None, int]] = [(first, first.walk(first.answer, out)) for out in OUTPUTS]
    rows += [(second, second.answer), (None, DEAD)]
    places = [0 if one is None else PLACES[one is second] for one, _ in rows]
    states = [0 if one is None or not s else place_of(one, s, p) for (one, s), p in zip(rows, places, strict=True)]
    return (
        torch.tensor(states, dtype=torch.int32, device=device), torch.tensor(places, dtype=torch.int32, device=device), rows
    )


def tables(made: Automata) -> dict[str, Any]:
    return {"tables": made.tables, "symbols": made.symbols, "starts": made.starts}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("by_line", [False, True])
def test_logits_are_masked_after_the_drafts_before(
    dtype: torch.dtype, by_line: bool, interpret: bool, device: torch.device
) -> None:
    made, (states, classes, rows) = uploaded(device), states_of(device)
    drafts = torch.tensor(
        [[3, 4, 5, 6], [4, 3, 3, 3], [5, 5, 5, EOS], [31, 3, 3, 3], [3, 3, 3, 3], [5, 9, -1, 3], [3, 4, 5, 6]],
        dtype=torch.int32, device=device,
    )
    wide = torch.cat((drafts, drafts), 1)[:, :4]  # rows of wider ones
    row_ids = torch.arange(7, device=device).repeat_interleave(5).int()
    num_drafted = torch.arange(5, device=device).repeat(7)
    num_drafted[row_ids == 4] = torch.tensor([-7, 99, 2**40, 0, 1], device=device)  # of an ended row: any number
    whole = torch.randn(35, VOCAB + 3, generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype)
    logits, before = whole[:, 1:-2], whole.clone()
    order = torch.randperm(35, generator=torch.Generator().manual_seed(2)).to(device)
    lines = wide.repeat_interleave(5, 0)[order] if by_line else wide
    constrain_logits(
        logits, row_ids[order] if by_line else row_ids, states, classes, masks=made.masks, drafts=lines,
        num_drafted=num_drafted[order] if by_line else num_drafted,
        draft_rows=torch.arange(35, device=device) if by_line else None, interpret=interpret, **tables(made),
    )
    masked = 0
    found = torch.full((35,), 99, dtype=torch.int32, device=device)
    mask_rows(
        row_ids[order] if by_line else row_ids, states, classes, drafts=lines, out_rows=found,
        num_drafted=num_drafted[order] if by_line else num_drafted,
        draft_rows=torch.arange(35, device=device) if by_line else None, interpret=interpret, **tables(made),
    )
    for t in range(35):
        words = made.masks[found[t]] if found[t] >= 0 else torch.full_like(made.masks[0], -1)
        bits = np.unpackbits(words.cpu().numpy().view(np.uint8), bitorder="little")[:VOCAB]
        assert torch.equal(logits[t].isneginf().cpu(), torch.from_numpy(bits == 0))
    for t in range(35):
        source = int(order[t]) if by_line else t
        one, state = rows[int(row_ids[source])]
        expected = before[t, 1:-2].clone()
        if one is not None:
            for token in drafts[int(row_ids[source])][: max(0, int(num_drafted[source]))].tolist():
                state = one.walk(state, [token]) if 0 <= token < VOCAB and state else DEAD
            if state:
                expected[~torch.from_numpy(one.allowed(state)).to(device)] = -torch.inf
                masked += 1
        assert torch.equal(logits[t], expected), t
    assert masked > 12
    assert torch.equal(whole[:, [0, -2, -1]], before[:, [0, -2, -1]])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_a_draft_vocabulary_is_masked_by_its_tokens(kind: torch.dtype, interpret: bool, device: torch.device) -> None:
    made, (states, classes, rows) = uploaded(device), states_of(device)
    map_ids = torch.tensor([30, 3, 0, 6, 11, 4], dtype=kind, device=device)
    logits, row_ids = torch.zeros(7, 6, device=device), torch.arange(7, dtype=torch.int32, device=device)
    constrain_logits(logits, row_ids, states, classes, masks=made.masks, map_ids=map_ids, interpret=interpret, **tables(made))
    for line, (one, state) in zip(logits.isneginf().tolist(), rows, strict=True):
        assert line == [one is not None and state != DEAD and not one.allowed(state)[int(token)] for token in map_ids]


def test_a_rank_masks_its_part_of_the_vocabulary(interpret: bool, device: torch.device) -> None:
    made, (states, classes, _) = uploaded(device), states_of(device)
    row_ids = torch.arange(7, dtype=torch.int32, device=device)
    whole = torch.zeros(7, VOCAB, device=device)
    constrain_logits(whole, row_ids, states, classes, masks=made.masks, interpret=interpret, **tables(made))
    for part in (slice(0, 11), slice(11, VOCAB), slice(7, 9)):
        logits = torch.zeros(7, part.stop - part.start, device=device)
        constrain_logits(
            logits, row_ids, states, classes, masks=made.masks, first_id=part.start, interpret=interpret, **tables(made)
        )
        assert torch.equal(logits, whole[:, part])
    with pytest.raises(ValueError, match="columns from token 3 on"):
        constrain_logits(whole, row_ids, states, classes, masks=made.masks, first_id=3, interpret=interpret, **tables(made))


@pytest.mark.parametrize("first", [0, 4])
def test_stop_ids_are_masked_before_the_minimum_unless_the_text_can_only_end(
    first: int, interpret: bool, device: torch.device
) -> None:
    made, (states, classes, rows) = uploaded(device), states_of(device)
    one = both()[0]
    rows[1] = one, one.walk(one.answer, [5, 6])  # after the `d` nothing but the end can come
    states[1] = place_of(one, rows[1][1], PLACES[0])
    row_ids = torch.arange(7, dtype=torch.int32, device=device).repeat(2)
    positions = torch.tensor([9] * 7 + [10] * 7, device=device)
    min_tokens = torch.full((7,), 10, dtype=torch.int32, device=device)
    stop_ids = torch.tensor([[-1, EOS, 30]] * 7, dtype=torch.int32, device=device)
    logits = torch.zeros(14, VOCAB - first, device=device)
    constrain_logits(
        logits, row_ids, states, classes, masks=made.masks, first_id=first, positions=positions, min_tokens=min_tokens,
        stop_ids=stop_ids, interpret=interpret, **tables(made),
    )
    only_end = 0
    for t in range(14):
        own, state = rows[t % 7]
        if own is None or state == DEAD:
            assert not logits[t].any()
            continue
        allowed = set(np.flatnonzero(own.allowed(state)).tolist())
        if t < 7 and allowed - {EOS, 30}:
            allowed -= {EOS, 30}
        elif t < 7:
            only_end += 1
        assert (~logits[t].isneginf()).nonzero().flatten().tolist() == sorted(i - first for i in allowed if i >= first), t
    assert only_end == 1


def test_a_vocabulary_of_several_blocks_and_programs(interpret: bool, device: torch.device) -> None:
    """One state that allows every token; its mask has bits of all kinds, the sign bit of a word included."""
    vocab = BLOCK * BLOCKS + BLOCK + 77
    table = torch.tensor([0, *[0] * 9, 0, -1, 10], dtype=torch.int32, device=device)
    starts = torch.arange(vocab + 1, dtype=torch.int32, device=device)
    symbols = torch.zeros(vocab, dtype=torch.int32, device=device)
    allowed = torch.rand(-(-vocab // 32) * 32, generator=torch.Generator().manual_seed(3)) < 0.5
    words = np.packbits(allowed.numpy(), bitorder="little").view(np.int32)
    logits, ones = torch.zeros(2, vocab, device=device), torch.ones(1, dtype=torch.int32, device=device)
    rows = torch.zeros(2, dtype=torch.int32, device=device)
    drafts, num_drafted = torch.full((1, 1), vocab - 1, dtype=torch.int32, device=device), torch.tensor([0, 1], device=device)
    constrain_logits(
        logits, rows, 10 * ones, ones, tables=table, masks=torch.from_numpy(words.copy()).to(device)[None], symbols=symbols,
        starts=starts, drafts=drafts, num_drafted=num_drafted, interpret=interpret,
    )
    assert torch.equal(logits.isneginf().cpu(), ~allowed[:vocab].expand(2, -1))


def committed(rows: list[tuple[list[int], int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """log and live as `accept` leaves them: for each row its tokens, how many of them are kept, and its finish."""
    lines = [[len(tokens) - 1, 3, kept, finish, *tokens, *[-1] * (4 - len(tokens))] for tokens, kept, finish in rows]
    live = [int(finish == 0) for _, _, finish in rows]
    return tuple(torch.tensor(one, dtype=torch.int32, device=device) for one in (lines, live))  # type: ignore[return-value]


def test_states_follow_the_committed_tokens(interpret: bool, device: torch.device) -> None:
    made, (states, classes, rows) = uploaded(device), states_of(device)
    given = [([3, 4], 2, 0), ([3, 3, 3], 0, 0), ([5, 6, EOS], 3, STOPPED), ([6], 1, FULL), ([3, 3, 3], 0, 0), ([5], 1, 0),
             ([5, 5, 5], 3, 0)]
    log, live = committed(given, device)
    before, logged, lived = states.tolist(), log.tolist(), live.tolist()
    advance_states(states, classes, log, live, masks=made.masks, interpret=interpret, **tables(made))
    assert (log.tolist(), live.tolist()) == (logged, lived)
    for row, ((one, state), (tokens, kept, finish)) in enumerate(zip(rows, given, strict=True)):
        if one is None or not kept:
            assert states[row] == before[row]
        elif finish:
            assert states[row] == 0
        else:
            assert states[row] == place_of(one, one.walk(state, tokens[:kept]), int(classes[row]))


def test_a_row_that_has_lost_its_state_fails(interpret: bool, device: torch.device) -> None:
    made = uploaded(device)
    log, live = committed([([6], 1, 0), ([EOS], 1, STOPPED), ([6], 1, FULL), ([6], 0, 0)], device)
    states, classes = torch.zeros_like(live), torch.full_like(live, PLACES[0])
    advance_states(states, classes, log, live, masks=made.masks, interpret=interpret, **tables(made))
    assert log[:, 3].tolist() == [FAILED, FAILED, FAILED, 0]
    assert live.tolist() == [0, 0, 0, 1]


STRAYS: tuple[tuple[list[int], int, int], ...] = (
    ([3, 3], 2, 0),  # (ab|c)*d: no a after a
    ([3, 3], 2, FULL),
    ([3, EOS], 2, STOPPED),  # no end after a, though the stop id is not walked over
    ([EOS], 1, STOPPED),
    ([6, 3, EOS], 3, STOPPED),  # nothing after d
    ([-1], 1, 0),
    ([VOCAB], 1, STOPPED),
)
FOLLOW: tuple[tuple[list[int], int, int], ...] = (
    ([6, EOS], 2, STOPPED), ([7, 5], 2, 0), ([3, 3], 1, FULL), ([3, 3], 0, FAILED), ([7], 1, FAILED),
)


def test_a_row_whose_committed_tokens_are_not_allowed_fails(interpret: bool, device: torch.device) -> None:
    """Whatever committed them: a wrong mask, table or kernel. It neither decodes without a constraint nor ends as a match."""
    made, (one, _) = uploaded(device), both()
    given = (*STRAYS, *FOLLOW, *STRAYS)
    log, live = committed(list(given), device)
    states = torch.full((len(given),), place_of(one, one.answer, PLACES[0]), dtype=torch.int32, device=device)
    classes = torch.full_like(states, PLACES[0])
    states[-len(STRAYS) :] = classes[-len(STRAYS) :] = 0  # rows without a constraint may commit anything
    logged, lived = log.tolist(), live.tolist()
    advance_states(states, classes, log, live, masks=made.masks, interpret=interpret, **tables(made))
    for row, (tokens, kept, finish) in enumerate(given):
        strays = row < len(STRAYS)
        assert log[row].tolist() == [*logged[row][:3], FAILED if strays else finish, *logged[row][4:]]
        assert live[row] == (0 if strays else lived[row])
        if strays or (finish and kept):
            assert states[row] == 0
        elif row < len(STRAYS) + len(FOLLOW):
            assert states[row] == place_of(one, one.walk(one.answer, tokens[:kept]), PLACES[0])


@pytest.mark.parametrize("sent_bytes", [1, 3000, 1 << 20])
def test_automata_that_are_placed_together_have_the_addresses_of_placing_them_one_by_one(
    sent_bytes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = AutomataCapacity(num_tokens=VOCAB, table_words=20_000, masks_bytes=4 * MASK_ROWS)
    new, place, mask_ids = list[AutomatonUpload](), 3, np.random.default_rng(0).permutation(MASK_ROWS).astype(np.int32)
    for pattern in ("(ab|c)*d", "[a-c]*", "(abcab|cd)d", "d|dd|ddd"):
        one = automaton(pattern)
        taken, mask_ids = mask_ids[: len(one.masks)], mask_ids[len(one.masks) :]
        new.append(AutomatonUpload.of(one, place, taken))
        place += one.num_words + 5
    alone, together = Automata(VOCABULARY, room, device), Automata(VOCABULARY, room, device)
    for upload in new:
        alone.upload([upload])
    monkeypatch.setattr("batchspec.batch.automata.SENT_BYTES", sent_bytes)
    together.upload(new)
    assert torch.equal(alone.tables, together.tables)
    assert torch.equal(alone.masks, together.masks)
    for upload in new:
        assert together.tables[upload.place : upload.place + len(upload.words)].tolist() == upload.words.tolist()
        assert together.masks[torch.from_numpy(upload.mask_ids).to(device).long()].tolist() == upload.masks.tolist()
    together.upload([])
    assert torch.equal(alone.tables, together.tables)


def drafts_of(one: TokenAutomaton, state: int, drafts: list[int], width: int) -> list[int]:
    """What is drafted from a state, by the definition."""
    found, intact = list[int](), True
    for j in range(width):
        intact = intact and j < len(drafts) and 0 <= drafts[j] < VOCAB and bool(one.allowed(state)[drafts[j]])
        token = drafts[j] if intact else int(one.table[state, FORCED])
        if token < 0:
            break
        found.append(token)
        state = one.walk(state, [token])
        if state == DEAD:
            break
    return found


def test_drafts_are_cut_and_continued_with_the_tokens_that_the_automaton_forces(interpret: bool, device: torch.device) -> None:
    first, second = automaton("(abcab|cd)d"), automaton("[ab]*cd")
    made = Automata(VOCABULARY, AutomataCapacity(num_tokens=VOCAB, table_words=20_000, masks_bytes=4 * MASK_ROWS), device)
    rows = []
    for one, place, base in ((first, 3, 5), (second, 7000, 200)):
        made.upload([AutomatonUpload.of(one, place, base + np.arange(len(one.masks), dtype=np.int32))])
        for drafts in ([], [3, 4, 5, 3, 3], [5], [9, 9], [4, 4], [5, 6, EOS, 3, 3], [-1, 3], [40], [3, 3, 5, 3], [10, 5, 3]):
            rows.append((one, one.answer, place, drafts))
    width, count = 5, len(rows)
    draft_ids = torch.zeros(count + 1, width + 2, dtype=torch.int32, device=device)[:, 1:-1]
    for line, (_, _, _, drafts) in zip(draft_ids, rows, strict=False):
        line[: len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
    draft_len = torch.tensor([*(len(drafts) for *_, drafts in rows), 2], dtype=torch.int32, device=device)
    states = torch.tensor([*(place_of(one, state, at) for one, state, at, _ in rows), 0], dtype=torch.int32, device=device)
    classes = torch.tensor([*(at for _, _, at, _ in rows), 1], dtype=torch.int32, device=device)
    constrain_drafts(draft_ids, draft_len, states, classes, masks=made.masks, interpret=interpret, **tables(made))
    wanted = [drafts_of(one, state, drafts, width) for one, state, _, drafts in rows]
    assert [line[:n].tolist() for line, n in zip(draft_ids[:-1], draft_len[:-1].tolist(), strict=True)] == wanted
    assert draft_len[-1] == 2
    assert draft_ids[-1].tolist() == [0] * width
    assert sum(len(one) > len(drafts) for one, (*_, drafts) in zip(wanted, rows, strict=True)) >= 2  # some are forced


def test_wrong_arguments_are_refused() -> None:
    made, (states, classes, _) = uploaded(torch.device("cpu")), states_of(torch.device("cpu"))
    row_ids, logits = torch.arange(7, dtype=torch.int32), torch.zeros(7, VOCAB)
    good: dict[str, Any] = {
        "logits": logits, "row_ids": row_ids, "states": states, "classes": classes, "masks": made.masks, **tables(made),
        "drafts": torch.zeros(7, 2, dtype=torch.int32), "num_drafted": torch.zeros(7, dtype=torch.int64),
    }
    constrain_logits(**good)
    for name in good:
        with pytest.raises(ValueError, match=f"constrain_logits: {name} is"):
            constrain_logits(**{**good, name: good[name].to(torch.int16)})
    with pytest.raises(ValueError, match="drafts and num_drafted come together"):
        constrain_logits(**{**good, "drafts": None})
    with pytest.raises(ValueError, match="logits have 32 columns"):
        constrain_logits(**{**good, "logits": torch.zeros(7, VOCAB + 1)})
    kept = torch.zeros(7, dtype=torch.int32)
    log = torch.zeros(7, 6, dtype=torch.int32)
    rest: dict[str, Any] = {
        "states": states, "classes": classes, "log": log, "live": kept, "masks": made.masks, **tables(made)
    }
    advance_states(**rest)
    for name in rest:
        with pytest.raises(ValueError, match=f"advance_states: {name} is"):
            advance_states(**{**rest, name: rest[name].to(torch.int16)})
    more: dict[str, Any] = {
        "draft_ids": kept[:, None],
        "draft_len": kept,
        "states": states,
        "classes": classes,
        "masks": made.masks,
    }
    more |= tables(made)
    constrain_drafts(**more)
    for name in more:
        with pytest.raises(ValueError, match=f"constrain_drafts: {name} is"):
            constrain_drafts(**{**more, name: more[name].to(torch.int16)})
