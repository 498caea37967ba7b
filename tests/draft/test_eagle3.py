"""The EAGLE-3 drafter through the engine against the definition (tests/helpers/eagle_reference.py), in fp64, where both
agree exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.pages import KVCache, prefix_hashes
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head_tensors import head_bytes
from batchspec.draft.weights import load_head
from batchspec.engine.rounds.records import RoundOptions, RoundResult
from batchspec.engine.rounds.round import Round
from batchspec.errors import CheckpointError
from batchspec.records import SamplingParams
from tests.helpers.drafting import (
    TARGET,
    Recording,
    check_proposals,
    drawn_batch,
    expected_tokens,
    known_requests,
    mixed_requests,
    run,
    synthetic,
    written_head,
)
from tests.helpers.eagle_reference import Design, reference_drafts
from tests.helpers.engines import VOCAB, packed, plain_tokens, request
from tests.helpers.heads import Tensors, distilled_tensors, random_tensors, tiny_design, write_head
from tests.helpers.row_lengths import LENGTHS

pytestmark = pytest.mark.second

CPU, FP64 = torch.device("cpu"), torch.float64


class Recorded(Recording, ChainDrafter):
    """Keeps the hidden states that each proposal began with, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.carried: list[Tensor] = []

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        self.carried += cache.draft_rows[1][: len(draft_len)][rows.live != 0].clone()
        super().propose(rows, draft_ids, draft_len, cache)


def make_drafter(
    folder: Path, design: Design, tensors: Tensors, draft_len: int, *, slots: int, layout: str = "flat", **options: Any
) -> Recorded:
    return Recorded(written_head(folder, design, tensors, layout=layout), TARGET(), draft_len, slots=slots, **options)


def check_drafts(drafter: Recorded, design: Design, tensors: Tensors, *, window: int | None = None, sink: int = 0) -> None:
    check_proposals(drafter.seen, reference_drafts, design, tensors, window=window, sink=sink)


DESIGNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all target tokens": {"draft_vocab": None, "head_dim": 4},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True, "fc_bias": True},
    "a norm for each tap": {"fc_norm": True},
    "normed state fed back": {"norm_output": True},
    "normed state fed back, norm before residual": {"norm_output": True, "norm_before_residual": True, "fc_norm": True},
    "two layers": {"layers": 2, "windows": (None, None)},
    "three layers, normed": {"layers": 3, "windows": (None, 4, None), "norm_before_residual": True},
    "q and k norms": {"qk_norm": True, "layers": 2, "windows": (None, None)},
    "biases": {"attention_bias": True, "o_bias": True, "mlp_bias": True, "fc_bias": True},
    "own embedding": {"own_embedding": True},
    "narrower than the target": {"hidden": 12, "own_embedding": True, "heads": 3, "kv_heads": 1, "head_dim": 4},
    "sliding window": {"windows": (3,)},
    "two taps, the last boundary first": {"taps": (2, 1)},
}


@pytest.mark.parametrize("general", [False, True], ids=["fast", "general"])
@pytest.mark.parametrize("name", DESIGNS)
def test_drafts_are_those_of_the_definition(name: str, general: bool, tmp_path: Path) -> None:
    design = tiny_design(TARGET().spec, **DESIGNS[name])
    tensors = random_tensors(design, seed=7)
    draft_len = 3 + len(name) % 3
    layout = ("flat", "speculators", "additional")[len(name) % 3]
    slow = {"dead_positions": False, "uniform_slots": False, "argmax": False} if general else {}
    drafter = make_drafter(tmp_path, design, tensors, draft_len, slots=3, layout=layout, **slow)
    batch = packed(3, num_verified=draft_len, prefill_tokens=7, num_pages=60, max_len=40)
    _, done, _ = run(mixed_requests(), batch, drafter, options=synthetic(draft_len))
    assert sum(c.stats.num_accepted for c in done.values() if c.stats) > 5
    check_drafts(drafter, design, tensors)


@pytest.mark.parametrize("layout", ["flat", "speculators"])
@pytest.mark.parametrize(("changes", "tables"), [
    ({"draft_vocab_size": VOCAB}, ()), ({"draft_vocab_size": None, "truncated_vocab_size": VOCAB}, ()),
    ({"draft_vocab_size": VOCAB, "tie_word_embeddings": True}, ("d2t", "t2d")), ({}, ("d2t",)),
])
def test_a_head_without_an_output_matrix_uses_the_target_s_whatever_form_says_that_it_drafts_all_tokens(
    changes: dict[str, Any], tables: tuple[str, ...], layout: str, tmp_path: Path
) -> None:
    design = tiny_design(TARGET().spec, draft_vocab=None, own_embedding=True)
    tensors = random_tensors(design)
    plain = load_head(write_head(tmp_path / "plain", design, tensors, layout=layout), TARGET().spec, dtype=FP64, device=CPU)
    of_all = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    folder = write_head(tmp_path / "other", design, tensors | {name: of_all[name] for name in tables}, layout=layout)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    head = load_head(folder, TARGET().spec, dtype=FP64, device=CPU)
    assert head.spec == plain.spec
    assert head_bytes(head.spec, FP64) == sum(tensor.nbytes for tensor in head.tensors.values())
    assert "lm_head.weight" not in head.tensors
    assert head.map_ids is None
    normed = torch.randn(5, design.hidden, dtype=FP64)
    assert torch.equal(head.bind(TARGET()).output.logits(normed), TARGET().all_logits(normed))


def test_a_head_of_some_tokens_without_an_output_matrix_is_refused(tmp_path: Path) -> None:
    design = tiny_design(TARGET().spec)
    tensors = {name: tensor for name, tensor in random_tensors(design).items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match=r"1 missing tensors: lm_head\.weight"):
        load_head(write_head(tmp_path / "head", design, tensors), TARGET().spec, dtype=FP64, device=CPU)


@pytest.mark.parametrize(("window", "sink"), [(1, 0), (4, 0), (4, 2), (6, 5), (100, 3)])
def test_a_window_and_a_sink_narrow_what_the_head_reads(window: int, sink: int, tmp_path: Path) -> None:
    design = tiny_design(TARGET().spec)
    tensors = random_tensors(design, seed=1)
    drafter = make_drafter(tmp_path, design, tensors, 3, slots=2, window=window, sink=sink)
    run(mixed_requests(), packed(2, num_verified=3, max_len=40), drafter, options=synthetic(3))
    check_drafts(drafter, design, tensors, window=window, sink=sink)


@cache
def design_and_tensors(kind: str) -> tuple[Design, Tensors]:
    if kind == "random":
        design = tiny_design(TARGET().spec, norm_before_residual=True, layers=2, windows=(None, None))
        return design, random_tensors(design, seed=3)
    design = tiny_design(TARGET().spec, draft_vocab=VOCAB - 1)
    rows = [r.prompt_ids.tolist() + plain_tokens(TARGET(), r) for r in known_requests()]
    return design, distilled_tensors(TARGET(), design, rows)


def check_any_packing(data: st.DataObject, folder: Path) -> None:
    design, tensors = design_and_tensors(data.draw(st.sampled_from(["random", "distilled"]), label="head"))
    draft_len, slots = data.draw(st.integers(1, 5), label="K"), data.draw(st.sampled_from([1, 2, 4]), label="slots")
    flags: dict[str, Any] = {name: data.draw(st.booleans(), label=name) for name in ("dead_positions", "uniform_slots", "argmax")}
    drafter = make_drafter(folder, design, tensors, draft_len, slots=slots, **flags)
    requests = mixed_requests(4, cap=data.draw(st.integers(5, 20), label="cap")) + known_requests()[:2]
    batch = drawn_batch(data, requests, slots, draft_len=draft_len)
    options = RoundOptions(uniform_slots=data.draw(st.booleans(), label="uniform layout"))
    lengths = data.draw(LENGTHS, label="lengths")
    tokens, _, _ = run(requests, batch, drafter, short_cap=data.draw(st.sampled_from([2, 512])), options=options, lengths=lengths)
    assert tokens == expected_tokens(requests, tokens)
    check_drafts(drafter, design, tensors)


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_packing_gives_the_drafts_of_the_definition_and_the_tokens_of_plain_decoding(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_any_packing(data, tmp_path_factory.mktemp("head"))


@pytest.mark.slow
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_packing_in_more_examples(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_any_packing(data, tmp_path_factory.mktemp("head"))


def test_preempted_rows_keep_their_drafts(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("random")
    requests = [request(i, [i, 5, 7], cap=60, predicted=4) for i in range(4)]
    drafter = make_drafter(tmp_path, design, tensors, 3, slots=4)
    tokens, _, engine = run(requests, packed(4, num_pages=32, max_len=63, num_verified=3), drafter, short_cap=2)
    assert engine.totals.preempted > 0
    assert tokens == expected_tokens(requests, tokens)
    check_drafts(drafter, design, tensors)


def test_rounds_of_any_draft_length_leave_the_next_one_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft lengths change from round to round; one of 0 asks for no proposals and keeps K/V and state warm."""
    design, tensors = design_and_tensors("random")
    drafter = make_drafter(tmp_path, design, tensors, 3, slots=3)
    lengths, run_round = cycle((3, 0, 1, 0, 0, 2)), Round.run
    monkeypatch.setattr(Round, "run", lambda self, rows, mode, _, *more: run_round(self, rows, mode, next(lengths), *more))
    requests = mixed_requests()
    tokens, _, _ = run(requests, packed(3, num_verified=3), drafter)
    assert tokens == expected_tokens(requests, tokens)
    assert {len(drafts) for _, drafts in drafter.seen} >= {1, 2, 3}
    check_drafts(drafter, design, tensors)


def in_turn(pattern: tuple[int, ...], leads: list[bool], *, always: bool) -> Callable[..., RoundResult]:
    """Round.run with these draft lengths in turn; `leads` notes whether each round was told that drafts may follow."""
    run_round, turns = Round.run, cycle(zip(pattern, pattern[1:] + pattern[:1], strict=True))

    def run_next(self: Round, rows: DeviceBatch, mode: SamplingMode, *_: Any) -> RoundResult:
        now, following = next(turns)
        leads.append(always or now > 0 or following > 0)
        before = [tensor.clone() for tensor in self.cache.draft_rows]
        result = run_round(self, rows, mode, now, prepare_next=leads[-1])
        assert leads[-1] or all(torch.equal(*pair) for pair in zip(self.cache.draft_rows, before, strict=True))
        return result

    return run_next


@pytest.mark.parametrize("dead_positions", [True, False])
@pytest.mark.parametrize("name", ["plain", "biases", "three layers, normed", "q and k norms", "normed state fed back"])
def test_rounds_that_only_keep_kv_warm_leave_the_later_ones_their_drafts(
    name: str, dead_positions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round without drafts prepares none where none follow: what later rounds draft is what they would have drafted."""
    design = tiny_design(TARGET().spec, **DESIGNS[name])
    tensors, found = random_tensors(design), []
    for always in (True, False):
        drafter = make_drafter(tmp_path, design, tensors, 3, slots=3, dead_positions=dead_positions)
        leads: list[bool] = []
        with monkeypatch.context() as patch:
            patch.setattr(Round, "run", in_turn((3, 0, 0, 0, 2, 0, 1, 0, 0), leads, always=always))
            tokens, _, _ = run(mixed_requests(cap=24), packed(3, num_verified=3, max_len=60), drafter, options=synthetic(3))
        assert set(leads) == ({True} if always else {True, False})
        check_drafts(drafter, design, tensors)
        found.append((tokens, drafter.seen, torch.stack(drafter.carried)))
    assert found[0][:2] == found[1][:2]
    assert {len(drafts) for _, drafts in found[0][1]} >= {1, 2, 3}
    torch.testing.assert_close(found[0][2], found[1][2], atol=1e-11, rtol=1e-11)


def test_a_random_head_changes_no_sampled_token(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("random")
    sampling = SamplingParams(temperature=0.9, top_k=9)
    requests = [request(i, [i, 3], cap=20, sampling=sampling) for i in range(5)]
    tokens, _, _ = run(requests, packed(2, num_verified=4), make_drafter(tmp_path, design, tensors, 4, slots=2))
    assert tokens == expected_tokens(requests, tokens)


def test_a_distilled_head_is_accepted(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("distilled")
    requests = known_requests()
    tokens, done, _ = run(requests, packed(4, num_verified=3), make_drafter(tmp_path, design, tensors, 3, slots=4))
    assert tokens == expected_tokens(requests, tokens)
    stats = [c.stats for c in done.values() if c.stats]
    assert 1 + sum(s.num_accepted for s in stats) / sum(s.num_rounds for s in stats) > 2.5


@pytest.mark.parametrize("name", ["plain", "three layers, normed", "q and k norms", "normed state fed back"])
def test_pruned_and_whole_catch_up_carry_the_same_state(name: str, tmp_path: Path) -> None:
    design = tiny_design(TARGET().spec, **DESIGNS[name])
    tensors, states = random_tensors(design), []
    for dead_positions in (True, False):
        drafter = make_drafter(tmp_path, design, tensors, 3, slots=3, dead_positions=dead_positions)
        run(mixed_requests(), packed(3, num_verified=3, prefill_tokens=9), drafter, options=synthetic(3))
        states.append((drafter.seen, torch.stack(drafter.carried)))
    assert states[0][0] == states[1][0]
    torch.testing.assert_close(states[0][1], states[1][1], atol=1e-11, rtol=1e-11)


def test_drafts_near_the_end_of_the_page_table_write_nothing_but_scratch(tmp_path: Path) -> None:
    """A row that ends with the last page of its table drafts past it: those places go to the scratch page."""
    design, tensors = design_and_tensors("random")
    drafter = make_drafter(tmp_path, design, tensors, 5, slots=2)
    requests = [request(i, [i, 2, 3], cap=13) for i in range(2)]
    tokens, _, _ = run(requests, packed(2, num_verified=5, max_len=16, num_pages=9), drafter, options=synthetic(5))
    assert all(len(output) == 13 for output in tokens.values())
    check_drafts(drafter, design, tensors)


def test_a_head_trained_on_short_contexts_drafts_at_later_positions(tmp_path: Path) -> None:
    """max_position_embeddings of the head is 8 in every test here: later positions are computed like any other."""
    design, tensors = design_and_tensors("random")
    drafter = make_drafter(tmp_path, design, tensors, 2, slots=1)
    run([request(0, list(range(20)), cap=30)], packed(1, num_verified=2), drafter)
    assert max(len(prefix) for prefix, _ in drafter.seen) > 40
    check_drafts(drafter, design, tensors)


def test_page_keys_of_a_drafter_with_kv_cover_the_token_after_the_page() -> None:
    ids = np.arange(9, dtype=np.int32)
    other = ids.copy()
    other[4] = 77
    assert len(prefix_hashes(ids, 4)) == 2
    assert len(prefix_hashes(ids[:8], 4)) == 1  # the token after the second page is not known
    assert prefix_hashes(ids, 4)[0] != prefix_hashes(other, 4)[0]
