"""learn_acceptance: what a draft of each position and confidence is worth, from the drafts that were verified."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.rounds.accept import FAILED, HELD, HELD_AFTER_DRAFT, STOPPED
from batchspec.kernels.rounds.allocate_drafts import PER_HALF
from batchspec.kernels.rounds.learn_acceptance import learn_acceptance

BINS = 8


def learnt(
    confidence: list[list[int]], log: Sequence[tuple[int, ...]], device: torch.device, interpret: bool, *, rounds: int = 1,
    half_life: float = 1e9,
) -> dict[str, Tensor]:
    """Tables after rounds whose rows accepted and verified these numbers of drafts; then the numbers of
    tokens kept and how the rows ended, if they do not just go on."""
    width = len(confidence[0])
    lines = torch.zeros(len(log), width + 5, dtype=torch.int32, device=device)
    lines[:, :4] = torch.tensor([line if len(line) == 4 else (*line, line[0] + 1, 0) for line in log])
    table = {name: torch.zeros(width + 1, BINS, device=device) for name in ("tried", "accepted")}
    table["costs"] = torch.full((width + 1, BINS), 2 * PER_HALF, dtype=torch.int32, device=device)
    table["totals"] = torch.zeros(3, width + 1, BINS, dtype=torch.float64, device=device)
    for _ in range(rounds):
        learn_acceptance(
            torch.tensor(confidence, dtype=torch.int32, device=device), lines, torch.full((BINS,), 0.5, device=device),
            **table, weight=2.0, half_life=half_life, interpret=interpret,
        )
    return {name: tensor.cpu() for name, tensor in table.items()}


def test_a_draft_counts_if_those_before_it_were_accepted(device: torch.device, interpret: bool) -> None:
    found = learnt([[1, 2], [1, 3], [1, 2], [4, 4]], [(2, 2), (0, 2), (1, 1), (-1, 0)], device, interpret)
    tried, accepted = torch.zeros(3, BINS), torch.zeros(3, BINS)
    tried[0, 1], accepted[0, 1] = 3, 2
    tried[1, 2], accepted[1, 2] = 1, 1  # of row 1 the first was rejected, row 2 verified one, row 3 took no part
    assert torch.equal(found["tried"], tried)
    assert torch.equal(found["accepted"], accepted)


def test_the_last_draft_before_a_row_waits_was_accepted(device: torch.device, interpret: bool) -> None:
    """Its token is the round's last one; the draft after it met no choice of the target."""
    found = learnt([[1, 2, 3], [1, 2, 3]], [(1, 3, 2, HELD_AFTER_DRAFT), (1, 3, 2, HELD)], device, interpret)
    tried, accepted = torch.zeros(4, BINS), torch.zeros(4, BINS)
    tried[0, 1], accepted[0, 1] = 2, 2
    tried[1, 2], accepted[1, 2] = 2, 1
    assert torch.equal(found["tried"], tried)
    assert torch.equal(found["accepted"], accepted)


def test_drafts_after_the_end_of_a_row_say_nothing(device: torch.device, interpret: bool) -> None:
    """A stop id as the first draft; a position where the target had no choice."""
    found = learnt([[1, 2], [1, 2]], [(2, 2, 1, STOPPED), (1, 2, 1, FAILED)], device, interpret)
    for name in ("tried", "accepted"):
        assert found[name][0, 1] == 2
        assert found[name].sum() == 2


def test_costs_are_the_measured_chances_and_before_that_the_prior(device: torch.device, interpret: bool) -> None:
    found = learnt([[1]] * 4, [(1, 1), (1, 1), (1, 1), (0, 1)], device, interpret)
    assert found["costs"][0, 0] == PER_HALF, "nothing was counted: one half"
    chance = (3 + 2 * 0.5) / (4 + 2)
    assert found["costs"][0, 1] == round(-PER_HALF * torch.tensor(chance).log2().item())
    assert (found["costs"][1] == 2 * PER_HALF).all(), "no draft at this position in the round"


def test_old_counts_fade(device: torch.device, interpret: bool) -> None:
    found = learnt([[1]] * 4, [(1, 1)] * 4, device, interpret, rounds=30, half_life=4.0)
    assert found["tried"][0, 1] == pytest.approx(8.0), "4 new ones a round, and half of those before"


def test_totals_say_what_was_expected_of_the_drafts_and_what_came(device: torch.device, interpret: bool) -> None:
    """They do not fade. The costs before the first round are chances of 1/4, in the second what the first one taught."""
    totals = learnt([[1]] * 4, [(1, 1), (1, 1), (1, 1), (0, 1)], device, interpret, rounds=2, half_life=1.0)["totals"]
    taught = 2 ** (-round(-PER_HALF * torch.tensor((3 + 1) / (4 + 2)).log2().item()) / PER_HALF)
    assert totals[:, 0, 1].tolist() == pytest.approx([8, 6, 4 * 0.25 + 4 * taught], rel=1e-5)
    assert totals.sum() == totals[:, 0, 1].sum()


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 300), st.integers(1, 5), st.integers(0, 2**31))
def test_kernel_and_reference_learn_the_same(device: torch.device, interpret: bool, num_rows: int, width: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    length = torch.randint(0, width + 1, (num_rows,), generator=noise)
    right = torch.minimum(torch.randint(-1, width + 1, (num_rows,), generator=noise), length)
    confidence = torch.randint(0, BINS, (num_rows, width), generator=noise)
    log = list(zip(right.tolist(), length.tolist(), strict=True))
    one = learnt(confidence.tolist(), log, device, interpret, rounds=2, half_life=100.0)
    other = learnt(confidence.tolist(), log, torch.device("cpu"), False, rounds=2, half_life=100.0)
    torch.testing.assert_close(one["tried"], other["tried"])
    torch.testing.assert_close(one["accepted"], other["accepted"])
    torch.testing.assert_close(one["totals"], other["totals"], rtol=1e-2, atol=0.1)  # costs may differ by one
    assert (one["costs"] - other["costs"]).abs().max() <= 1
