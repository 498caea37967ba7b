"""forbid_ngrams, ngram_masks and cut_ngrams against a definition in plain Python, of lists of output tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchspec.kernels.sampling.cut_ngrams import cut_ngrams
from batchspec.kernels.sampling.forbid_ngrams import forbid_ngrams, ngram_masks
from batchspec.kernels.sampling.ngram_search import LISTED
from tests.helpers.ngrams import forbidden

VOCAB, MAX_LEN, WIDTH, MOST_LISTED = 6, 40, 4, 3
ANY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
Rule = tuple[int, int, list[int]]


Row = tuple[list[int], list[int], list[int], Rule]


def lists(most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, VOCAB - 1), max_size=most)


rules: st.SearchStrategy[Rule] = st.just((0, 100, [])) | st.tuples(st.integers(1, 5), st.integers(1, 25), lists(MOST_LISTED))
batches: st.SearchStrategy[list[Row]] = st.lists(st.tuples(lists(12), lists(24), lists(WIDTH), rules), min_size=1, max_size=5)
"""Prompt, committed output, drafts and rule of each row."""


def state(batch: list[Row], device: torch.device) -> dict[str, Any]:
    """What both kernels read, in slices of wider tensors; all else is poisoned with a token of the vocabulary."""
    tokens = torch.full((len(batch), MAX_LEN + 3), 1, dtype=torch.int32)
    lines = torch.full((len(batch), LISTED + MOST_LISTED), 2, dtype=torch.int32)
    for row, (prompt, output, _, (size, window, listed)) in enumerate(batch):
        line = [size, window, len(listed), *listed]
        tokens[row, : len(prompt) + len(output)] = torch.tensor(prompt + output, dtype=torch.int32)
        lines[row, : len(line)] = torch.tensor(line, dtype=torch.int32)
    prompt_len = torch.tensor([len(row[0]) for row in batch], dtype=torch.int32)
    return {"tokens": tokens.to(device)[:, :MAX_LEN], "prompt_len": prompt_len.to(device), "settings": lines.to(device)}


def drafts_of(batch: list[Row], device: torch.device) -> torch.Tensor:
    drafts = torch.full((len(batch), WIDTH + 1), 1, dtype=torch.int32)
    for row, (_, _, ids, _) in enumerate(batch):
        drafts[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return drafts.to(device)[:, :WIDTH]


def found_in(logits: torch.Tensor) -> list[set[int]]:
    """The columns that are -inf; all others are as they were."""
    assert ((logits == 7) | (logits == -torch.inf)).all()
    return [{*line.nonzero().flatten().tolist()} for line in logits == -torch.inf]


@pytest.mark.parametrize("by_line", [False, True])
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(batch=batches, part=st.sampled_from([None, (0, 3), (3, 3)]))
def test_tokens_that_complete_an_ngram_again_are_forbidden_after_every_draft(
    by_line: bool, interpret: bool, device: torch.device, batch: list[Row], part: tuple[int, int] | None
) -> None:
    """Also by a part of the vocabulary. by_line: the drafts of each position lie in a row of their own, as paths of a tree."""
    places = [(row, count) for row, one in enumerate(batch) for count in range(len(one[2]) + 1)]
    row_ids = torch.tensor([row for row, _ in places], dtype=torch.int32, device=device)
    num_drafted = torch.tensor([count for _, count in places], device=device)
    positions = torch.tensor([len(batch[row][0]) + len(batch[row][1]) + count for row, count in places], device=device)
    drafts, more = drafts_of(batch, device), dict[str, Any]()
    if by_line:
        drafts, more["draft_rows"] = drafts[row_ids.long()], torch.arange(len(places), device=device)
    first, width = part or (0, VOCAB)
    logits = torch.full((len(places), width + 2), 7.0, device=device)
    forbid_ngrams(
        logits[:, :width], row_ids, positions, **state(batch, device), drafts=drafts, num_drafted=num_drafted, first_id=first,
        interpret=interpret, **more,
    )
    wanted = [forbidden(batch[row][1] + batch[row][2][:count], batch[row][3]) for row, count in places]
    assert found_in(logits) == [{token - first for token in one if first <= token < first + width} for one in wanted]
    masks, mask_rows = ngram_masks(
        40, row_ids, positions, **state(batch, device), drafts=drafts, num_drafted=num_drafted, interpret=interpret, **more
    )
    assert mask_rows.tolist() == [t if one else -1 for t, one in enumerate(wanted)]
    bits = (masks.unsqueeze(2) >> torch.arange(32, device=device)) & 1
    assert [{*line.flatten().nonzero().flatten().tolist()} for line in bits == 0] == wanted


@ANY_DTYPE
def test_without_drafts_in_every_dtype(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    """The window is longer than a block of the kernel; its first n-gram lies inside the window or begins one token before it."""
    output = [5, 4, 3, *(i % 3 for i in range(1100)), 5, 4]
    for window, wanted in ((len(output), {3}), (len(output) - 1, set()), (100, set())):
        given_state: dict[str, Any] = {
            "tokens": torch.tensor([[3, 3, *output, 0]], dtype=torch.int32, device=device),
            "prompt_len": torch.tensor([2], dtype=torch.int32, device=device),
            "settings": torch.tensor([[3, window, 0]], dtype=torch.int32, device=device),
        }
        logits = torch.full((1, VOCAB), 7, dtype=dtype, device=device)
        row_ids, positions = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([2 + len(output)], device=device)
        forbid_ngrams(logits, row_ids, positions, **given_state, interpret=interpret)
        assert found_in(logits) == [wanted]


def test_an_ngram_that_began_in_the_prompt_is_free(interpret: bool, device: torch.device) -> None:
    """1 2 of the prompt, and 2 1 across its end, may come again; the output's own 1 3 may not."""
    batch: list[Row] = [([1, 2], output, [], (2, 100, [])) for output in ([1], [1, 3, 2], [1, 3, 1])]
    logits = torch.full((3, VOCAB), 7.0, device=device)
    row_ids = torch.arange(3, dtype=torch.int32, device=device)
    positions = torch.tensor([3, 5, 5], device=device)
    forbid_ngrams(logits, row_ids, positions, **state(batch, device), interpret=interpret)
    assert found_in(logits) == [set(), set(), {3}]


def test_columns_of_a_drafter_s_own_vocabulary(interpret: bool, device: torch.device) -> None:
    """Token 2 has column 1; token 4 has none; unused rows of other positions stay."""
    batch: list[Row] = [([1], output, [], (1, 100, [])) for output in ([2], [4], [])]
    columns = torch.tensor([0, -1, 1, 2, -1, -1], dtype=torch.int32, device=device)
    logits = torch.full((3, 3), 7.0, device=device)
    row_ids, positions = torch.arange(3, dtype=torch.int32, device=device), torch.tensor([2, 2, 1], device=device)
    forbid_ngrams(logits, row_ids, positions, **state(batch, device), columns=columns, interpret=interpret)
    assert found_in(logits) == [{1}, set(), set()]


def test_arbitrary_numbers_of_dead_rows_end_a_search(interpret: bool, device: torch.device) -> None:
    """Whatever it finds is not read; the row that is alive has its tokens."""
    batch: list[Row] = [([1] * 5, [2] * 20, [2] * WIDTH, (2, 100, []))] * 5
    logits = torch.full((5, VOCAB), 7.0, device=device)
    positions, num_drafted = ([25, 0, 1, 1 << 20, 43], [0, 7, -3, 1 << 20, -9])
    forbid_ngrams(
        logits, torch.arange(5, dtype=torch.int32, device=device), torch.tensor(positions, device=device),
        **state(batch, device), drafts=drafts_of(batch, device), num_drafted=torch.tensor(num_drafted, device=device),
        interpret=interpret,
    )
    assert found_in(logits)[0] == {2}


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(batch=batches)
def test_drafts_end_before_the_first_that_is_forbidden(interpret: bool, device: torch.device, batch: list[Row]) -> None:
    wanted = []
    for _, output, drafts, rule in batch:
        wanted.append(next((i for i, x in enumerate(drafts) if x in forbidden(output + drafts[:i], rule)), len(drafts)))
    draft_ids, lengths = drafts_of(batch, device), [len(row[2]) for row in batch]
    before, draft_len = draft_ids.clone(), torch.tensor(lengths, dtype=torch.int32, device=device)
    num_tokens = torch.tensor([len(row[0]) + len(row[1]) for row in batch], dtype=torch.int32, device=device)
    cut_ngrams(draft_ids, draft_len, num_tokens, **state(batch, device), interpret=interpret)
    assert draft_len.tolist() == wanted
    assert torch.equal(draft_ids, before)
