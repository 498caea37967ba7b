"""Rules that mask and bias logits: one reaches the target and every drafter, trees included, and changes no other row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.batch import logits as logits_module
from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.logits import LogitRows, LogitRule
from batchspec.engine.engine import Engine
from batchspec.records import SamplingParams
from tests.engines import DEVICE, VOCAB, packed, request, tiny_target
from tests.replaying import DRAFTERS, SLOTS

FEW = 12
"""Tokens at and above this are forbidden by the rule of these tests."""


def forbid_most(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Forbids tokens in rows that have min_new_tokens."""
    assert at.row_ids.shape == at.positions.shape == logits.shape[:1]
    ids = torch.arange(VOCAB, device=logits.device) if map_ids is None else map_ids
    asked = (rows.min_tokens > rows.prompt_len)[at.row_ids].unsqueeze(1)
    logits.masked_fill_(asked & (ids >= FEW)[: logits.shape[1]], -torch.inf)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_k=9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["none", "eagle3", "tree", "window", "lookup"])
def test_a_rule_holds_for_targets_and_drafters(name: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that ask for it emit and draft allowed tokens only, the others as ever, whatever drafts."""
    rule = LogitRule(lambda mode: mode.min_tokens, forbid_most, of_drafters=True)
    monkeypatch.setattr(logits_module, "RULES", [*logits_module.RULES, rule])
    requests = [request(i, [i, 5, 30], cap=20, sampling=sampling) for i in range(4)]
    requests[1:3] = [replace(one, min_new_tokens=1) for one in requests[1:3]]
    tokens, drafted = {}, list[int]()
    for kind in ("none", name):
        drafter = DRAFTERS[kind]()
        propose = drafter.propose

        def noted(rows: DeviceBatch, draft_ids: Tensor, *rest: Any, propose=propose) -> Any:  # type: ignore[no-untyped-def]
            parents = propose(rows, draft_ids, *rest)
            asked = (rows.min_tokens > rows.prompt_len) & (rows.live != 0)
            drafted.extend(draft_ids[asked].flatten().tolist())
            return parents

        monkeypatch.setattr(drafter, "propose", noted)
        engine = Engine(tiny_target(window=5), drafter, packed(SLOTS, draft_len=drafter.max_len), device=DEVICE)
        tokens[kind] = {c.row_index: c.token_ids.tolist() for c in engine.run(iter(requests)) if c.token_ids is not None}
    assert tokens[name] == tokens["none"]
    assert all(token < FEW for row in (1, 2) for token in tokens[name][row])
    assert any(token >= FEW for row in (0, 3) for token in tokens[name][row])
    if name in ("eagle3", "tree", "window"):
        assert drafted
        assert max(drafted) < FEW


def test_drafters_follow_no_rule_of_today() -> None:
    """Penalties and min_tokens are the target's alone: drafts of greedy rows stay plain argmaxes."""
    assert not any(rule.of_drafters for rule in logits_module.RULES)
