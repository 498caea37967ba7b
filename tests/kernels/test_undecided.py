"""mark_undecided and hold_undecided: positions and rows whose automaton stands where the device has no mask yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchspec.automata.lazy_automaton import NOT_EXPANDED
from batchspec.automata.token_automaton import FORCED, NEXT, NUM_SYMBOLS
from batchspec.kernels.rounds.accept import HELD, HELD_AFTER_DRAFT, UNDECIDED
from batchspec.kernels.sampling import undecided as undecided_module
from batchspec.kernels.sampling.undecided import hold_undecided, mark_undecided
from tests.helpers.automata import VOCABULARY
from tests.helpers.engines import VOCAB

CLASSES, FIRST = 5, 300
WIDTH = NEXT + 2
"""Of a state's row: every symbol is of class 0, but the letter b, which is of class 1."""


def place(state: int) -> int:
    return FIRST + WIDTH * state


def tables(device: torch.device) -> dict[str, Any]:
    """States 0, 1, 2 in a row by a; b goes back to 0. 1 is expanded, 0 and 2 are not. All else is poisoned."""
    words = torch.full((1000,), 1 << 30, dtype=torch.int32)
    words[CLASSES : CLASSES + NUM_SYMBOLS] = 0
    words[CLASSES + ord("b")] = 1
    for state, forced in enumerate((NOT_EXPANDED, -1, NOT_EXPANDED)):
        words[place(state) : place(state) + WIDTH] = torch.tensor([7, forced, place(min(state + 1, 2)), place(0)])
    symbols, starts = (torch.from_numpy(x.copy()) for x in (VOCABULARY.symbols, VOCABULARY.starts))
    return {"tables": words.to(device), "symbols": symbols.to(device), "starts": starts.to(device)}


def ints(values: Any, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def test_the_kernels_and_the_host_agree_on_what_is_not_expanded() -> None:
    assert undecided_module.NOT_EXPANDED == NOT_EXPANDED
    assert FORCED == 1


@pytest.mark.parametrize("by_line", [False, True])
def test_choices_wait_after_drafts_that_lead_to_a_state_without_a_mask(
    by_line: bool, interpret: bool, device: torch.device
) -> None:
    states = ints([place(1), place(0), 0], device)
    drafts = ints([[3, 4], [3, 3], [3, 3]], device)  # ab, aa, aa
    row_ids = ints([0, 0, 0, 1, 1, 1, 2], device)
    num_drafted = ints([0, 1, 2, 0, 1, 2, 1], device, torch.int64)
    target_ids = ints([10, 11, 12, 13, 14, 15, 16], device)
    lines: dict[str, Any] = {}
    if by_line:
        drafts, lines["draft_rows"] = drafts[row_ids], torch.arange(7, device=device)
    mark_undecided(
        target_ids, row_ids, states, ints([CLASSES] * 3, device), **tables(device), drafts=drafts, num_drafted=num_drafted,
        interpret=interpret, **lines,
    )
    assert target_ids.tolist() == [10, UNDECIDED, UNDECIDED, UNDECIDED, 14, UNDECIDED, 16]


def test_choices_without_drafts(interpret: bool, device: torch.device) -> None:
    target_ids = ints([10, 11, 12], device)
    states = ints([place(1), place(2), 0], device)
    classes = ints([CLASSES] * 3, device)
    mark_undecided(target_ids, ints([2, 1, 0], device), states, classes, **tables(device), interpret=interpret)
    assert target_ids.tolist() == [10, UNDECIDED, 12]


def test_rows_that_end_where_there_is_no_mask_are_parked(interpret: bool, device: torch.device) -> None:
    states = ints([place(0), place(1), 0, place(2), place(2)] * 40, device)
    live, log = ints([1, 1, 1, 0, 1] * 40, device), torch.zeros(200, 7, dtype=torch.int32, device=device)
    log[:, 3] = 9
    hold_undecided(states, tables(device)["tables"], live=live, log=log, interpret=interpret)
    assert live.tolist() == [0, 1, 1, 0, 0] * 40
    assert log[:, 3].tolist() == [HELD, 9, 9, 9, HELD] * 40
    assert not log[:, [0, 1, 2, 4, 5, 6]].any()


def test_a_row_that_is_parked_after_a_right_draft_stays_marked(interpret: bool, device: torch.device) -> None:
    log = ints([[0, 2, 1, HELD_AFTER_DRAFT, 7], [0, 2, 1, 0, 7]], device)
    hold_undecided(
        ints([place(0), place(0)], device), tables(device)["tables"], live=ints([1, 1], device), log=log, interpret=interpret
    )
    assert log[:, 3].tolist() == [HELD_AFTER_DRAFT, HELD]


def test_the_host_learns_of_a_row_that_is_parked_before_it_took_part(interpret: bool, device: torch.device) -> None:
    """Its state was written over while the row was live. A dead row's line stays one that the host does not read."""
    states, live = ints([place(0), place(1), place(0)], device), ints([1, 1, 0], device)
    log = ints([[-1, 2, 0, 0, -1], [-1, 2, 0, 0, -1], [-1, 0, 0, 0, -1]], device)
    hold_undecided(states, tables(device)["tables"], live=live, log=log, interpret=interpret)
    assert log.tolist() == [[0, 2, 0, HELD, -1], [-1, 2, 0, 0, -1], [-1, 0, 0, 0, -1]]
    assert live.tolist() == [0, 1, 0]


def test_wrong_arguments_are_refused() -> None:
    cpu = torch.device("cpu")
    one, most = ints([1], cpu), tables(cpu)
    with pytest.raises(ValueError, match="num_drafted come together"):
        mark_undecided(one, one, one, one, **most, drafts=ints([[1]], cpu))
    with pytest.raises(ValueError, match="mark_undecided: row_ids"):
        mark_undecided(one, ints([1, 2], cpu), one, one, **most)
    with pytest.raises(ValueError, match="hold_undecided: live"):
        hold_undecided(one, most["tables"], live=ints([1, 1], cpu), log=ints([[0] * 5], cpu))
    assert VOCABULARY.num_tokens == VOCAB
