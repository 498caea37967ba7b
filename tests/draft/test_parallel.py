"""Parallel drafting through the engine against its definition (tests/helpers/eagle_reference.py), in fp64, where both
agree exactly."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.pages import KVCache
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import RunConfig
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.spec import open_drafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.rounds.round import Round
from batchspec.errors import ConfigError
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
from tests.helpers.eagle_reference import Design, reference_parallel_drafts
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, plain_tokens, request
from tests.helpers.heads import Tensors, parallel_tensors, random_tensors, tiny_design, write_head
from tests.helpers.row_lengths import LENGTHS

MASK = 17


class Recorded(Recording, ParallelDrafter):
    pass


def make_drafter(
    folder: Path, design: Design, tensors: Tensors, draft_len: int, *, slots: int, layout: str = "flat", **options: Any
) -> Recorded:
    return Recorded(written_head(folder, design, tensors, layout=layout), TARGET(), draft_len, slots=slots, **options)


def check_drafts(drafter: Recorded, design: Design, tensors: Tensors, *, window: int | None = None, sink: int = 0) -> None:
    check_proposals(drafter.seen, reference_parallel_drafts, design, tensors, window=window, sink=sink)


DESIGNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all target tokens": {"draft_vocab": None, "head_dim": 4},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True, "fc_bias": True},
    "a norm for each tap": {"fc_norm": True},
    "two layers": {"layers": 2, "windows": (None, None)},
    "four layers, a window, normed": {"layers": 4, "windows": (None, 4, None, None), "norm_before_residual": True},
    "q and k norms": {"qk_norm": True, "layers": 2, "windows": (None, None)},
    "biases": {"attention_bias": True, "o_bias": True, "mlp_bias": True, "fc_bias": True},
    "own embedding": {"own_embedding": True},
    "narrower than the target": {"hidden": 12, "own_embedding": True, "heads": 3, "kv_heads": 1, "head_dim": 4},
    "sliding window": {"windows": (3,)},
}


@pytest.mark.parametrize("dead_positions", [True, False])
@pytest.mark.parametrize("name", DESIGNS)
def test_drafts_are_those_of_the_definition(name: str, dead_positions: bool, tmp_path: Path) -> None:
    design = tiny_design(TARGET().spec, mask_id=MASK, **DESIGNS[name])
    tensors = random_tensors(design, seed=7)
    draft_len = 3 + len(name) % 4
    layout = ("flat", "speculators", "additional")[len(name) % 3]
    drafter = make_drafter(
        tmp_path, design, tensors, draft_len, slots=3, layout=layout, dead_positions=dead_positions, argmax=dead_positions
    )
    batch = packed(3, num_verified=draft_len, prefill_tokens=7, num_pages=60, max_len=40)
    _, done, _ = run(mixed_requests(), batch, drafter, options=synthetic(draft_len))
    assert sum(c.stats.num_accepted for c in done.values() if c.stats) > 5
    check_drafts(drafter, design, tensors)


@pytest.mark.parametrize(("window", "sink"), [(1, 0), (4, 2), (100, 3)])
def test_a_window_and_a_sink_narrow_what_the_head_reads(window: int, sink: int, tmp_path: Path) -> None:
    design, tensors = design_and_tensors("random")
    drafter = make_drafter(tmp_path, design, tensors, 3, slots=2, window=window, sink=sink)
    run(mixed_requests(), packed(2, num_verified=3, max_len=40), drafter, options=synthetic(3))
    check_drafts(drafter, design, tensors, window=window, sink=sink)


@cache
def design_and_tensors(kind: str) -> tuple[Design, Tensors]:
    if kind == "random":
        design = tiny_design(TARGET().spec, mask_id=MASK, norm_before_residual=True, layers=2, windows=(None, None))
        return design, random_tensors(design, seed=3)
    design = tiny_design(TARGET().spec, mask_id=MASK, draft_vocab=VOCAB - 1)
    rows = [r.prompt_ids.tolist() + plain_tokens(TARGET(), r) for r in known_requests()]
    return design, parallel_tensors(TARGET(), design, rows)


def check_any_packing(data: st.DataObject, folder: Path) -> None:
    design, tensors = design_and_tensors(data.draw(st.sampled_from(["random", "trained"]), label="head"))
    draft_len, slots = data.draw(st.integers(1, 6), label="K"), data.draw(st.sampled_from([1, 2, 4]), label="slots")
    flags: dict[str, Any] = {name: data.draw(st.booleans(), label=name) for name in ("dead_positions", "argmax")}
    drafter = make_drafter(folder, design, tensors, draft_len, slots=slots, **flags)
    requests = mixed_requests(4, cap=data.draw(st.integers(5, 20), label="cap")) + known_requests()[:2]
    batch = drawn_batch(data, requests, slots, draft_len=draft_len)
    options = RoundOptions(uniform_slots=data.draw(st.booleans(), label="uniform layout"))
    lengths = data.draw(LENGTHS, label="lengths")
    tokens, _, _ = run(requests, batch, drafter, short_cap=data.draw(st.sampled_from([2, 512])), options=options, lengths=lengths)
    assert tokens == expected_tokens(requests, tokens)
    check_drafts(drafter, design, tensors)


@pytest.mark.second
@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_packing_gives_the_drafts_of_the_definition_and_the_tokens_of_plain_decoding(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_any_packing(data, tmp_path_factory.mktemp("head"))


@pytest.mark.slow
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_packing_in_more_examples(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_any_packing(data, tmp_path_factory.mktemp("head"))


def test_acceptance_is_that_of_a_loop_over_one_request_after_another(tmp_path: Path) -> None:
    """The review's check of the whole: counts of the batched run against drafts and comparison by hand."""
    design, tensors = design_and_tensors("trained")
    requests = known_requests() + mixed_requests(3)
    drafter = make_drafter(tmp_path, design, tensors, 4, slots=3)
    tokens, done, _ = run(requests, packed(3, num_verified=4), drafter)
    for req in requests:
        prompt, output = req.prompt_ids.tolist(), tokens[req.request_id]
        kept: list[int] = []
        count = 1  # prefill emits the first token
        while count < len(output):
            drafts = reference_parallel_drafts(design, tensors, TARGET(), prompt + output[:count], 4)
            allowed = min(4, len(output) - count - 1)
            right = [draft == token for draft, token in zip(drafts[:allowed], output[count:], strict=False)]
            kept.append(right.index(False) if False in right else allowed)
            count += kept[-1] + 1
        stats = done[req.request_id].stats
        assert stats is not None
        assert (stats.num_rounds, stats.num_accepted) == (len(kept), sum(kept))
        assert list(stats.histogram) == [kept.count(j) for j in range(5)]


def test_a_trained_head_is_accepted(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("trained")
    requests = known_requests()
    tokens, done, _ = run(requests, packed(4, num_verified=3), make_drafter(tmp_path, design, tensors, 3, slots=4))
    assert tokens == expected_tokens(requests, tokens)
    stats = [c.stats for c in done.values() if c.stats]
    assert 1 + sum(s.num_accepted for s in stats) / sum(s.num_rounds for s in stats) > 2


def test_rejected_places_are_never_read_nor_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K/V after each row's last committed place is poisoned before every draft: it changes neither drafts nor counts."""
    design, tensors = design_and_tensors("random")
    results, propose = [], Recorded.propose
    for poisons in (False, True):
        drafter = make_drafter(tmp_path, design, tensors, 4, slots=3)

        def poisoned(self: Any, rows: DeviceBatch, ids: Tensor, lengths: Tensor, cache: KVCache, poisons: bool = poisons) -> None:
            for slot in rows.live.nonzero().flatten().tolist() if poisons else ():
                for position in range(int(rows.num_tokens[slot]) - 1, rows.tokens.shape[1]):
                    page = int(rows.page_tables[0][slot, position // cache.page_size])
                    for layer in range(self.head.spec.num_layers):
                        cache.layers[TARGET().spec.num_layers + layer].pages[:, page, position % cache.page_size] = 1e3
            propose(self, rows, ids, lengths, cache)

        monkeypatch.setattr(Recorded, "propose", poisoned)
        tokens, done, _ = run(mixed_requests(), packed(3, num_verified=4, max_len=40), drafter, options=synthetic(4))
        results.append((tokens, drafter.seen, [list(c.stats.histogram) for c in done.values() if c.stats]))
    assert results[0] == results[1]


def test_drafts_near_the_length_limit_are_capped_and_write_nothing_but_scratch(tmp_path: Path) -> None:
    """Rows end with the last page of their tables; masks after it keep their positions and go to the scratch page."""
    design, tensors = design_and_tensors("random")
    drafter = make_drafter(tmp_path, design, tensors, 6, slots=2)
    requests = [request(i, [i, 2, 3], cap=13) for i in range(2)]
    tokens, done, _ = run(requests, packed(2, num_verified=6, max_len=16, num_pages=9), drafter, options=synthetic(6))
    assert all(len(output) == 13 for output in tokens.values())
    assert all(c.stats.num_accepted + c.stats.num_rounds + 1 == 13 for c in done.values() if c.stats)
    check_drafts(drafter, design, tensors)


def test_no_place_wraps_to_position_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a row's first position, and of its neighbour's, are the same before and after the drafts at its end."""
    design, tensors = design_and_tensors("random")
    drafter = make_drafter(tmp_path, design, tensors, 6, slots=2)
    propose, rounds = Recorded.propose, []

    def guarded(self: Any, rows: DeviceBatch, ids: Tensor, lengths: Tensor, cache: KVCache) -> None:
        draft_layer = cache.layers[TARGET().spec.num_layers].pages
        first = rows.page_tables[0][rows.live != 0, 0].long()
        before = draft_layer[:, first].clone()
        propose(self, rows, ids, lengths, cache)
        rounds.append(int((self._positions[: ids.numel()] >= rows.tokens.shape[1]).sum()))
        ends = rows.num_tokens[rows.live != 0] - 2 >= cache.page_size
        assert torch.equal(draft_layer[:, first][:, ends], before[:, ends])

    monkeypatch.setattr(Recorded, "propose", guarded)
    run([request(i, [i, 2, 3], cap=13) for i in range(2)], packed(2, num_verified=6, max_len=16, num_pages=9), drafter)
    assert max(rounds) > 0, "some masks came after the end of the longest row"


def test_buffers_hold_every_place_of_all_slots(tmp_path: Path) -> None:
    """rows * K, not rows + K: with every slot live and the largest K no view is short, for every smaller K neither."""
    design, tensors = design_and_tensors("random")
    drafter = make_drafter(tmp_path, design, tensors, 7, slots=5)
    assert len(drafter._ids) == len(drafter._positions) == len(drafter._slots) == len(drafter._fed) == 35
    for k in range(1, 8):
        assert drafter._layout._row_ids[k].tolist() == [slot for slot in range(5) for _ in range(k)]
        assert drafter._layout._cu_seqlens_q[k].tolist()[: 5 + 1] == [slot * k for slot in range(6)]
    requests = [request(i, [i, 2], cap=12) for i in range(9)]
    tokens, _, _ = run(requests, packed(5, row_buckets=(1, 2, 5), num_verified=7), drafter, options=synthetic(7))
    assert len(tokens) == 9
    check_drafts(drafter, design, tensors)


def test_host_and_device_count_the_same_tokens(tmp_path: Path) -> None:
    """What the host knows of a row's length, from the log alone, is what the device has committed."""
    design, tensors = design_and_tensors("trained")
    drafter = make_drafter(tmp_path, design, tensors, 4, slots=3)
    engine = make_engine(TARGET(), drafter, packed(3, num_verified=4), device=DEVICE)
    checked = []

    def compare(_: object) -> None:
        for row in engine.slots.live if not engine.scheduler.unread else ():
            checked.append(int(engine.slots.num_tokens[row.slot]))
            assert checked[-1] == int(engine.executor.rows.num_tokens[row.slot])

    engine.on_round = compare
    done = list(engine.run(iter(known_requests() + mixed_requests(3))))
    assert len(checked) > 10
    assert engine.totals.tokens == sum(len(c.token_ids) for c in done if c.token_ids is not None)
    assert engine.totals.accepted == sum(c.stats.num_accepted for c in done if c.stats)


@pytest.mark.parametrize("kind", ["random", "trained"])
def test_rounds_of_any_draft_length_use_the_first_places(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft lengths change from round to round, 0 among them, and a round that no drafts follow prepares none."""
    design, tensors = design_and_tensors(kind)
    drafter = make_drafter(tmp_path, design, tensors, 4, slots=3)
    pattern = (4, 0, 1, 0, 0, 3, 2)
    turns, run_round = cycle(zip(pattern, pattern[1:] + pattern[:1], strict=True)), Round.run

    def run_next(self: Round, rows: DeviceBatch, mode: Any, *_: Any) -> Any:
        now, following = next(turns)
        before = [tensor.clone() for tensor in self.cache.draft_rows]
        result = run_round(self, rows, mode, now, prepare_next=following > 0)
        assert following > 0 or all(torch.equal(*pair) for pair in zip(self.cache.draft_rows, before, strict=True))
        return result

    monkeypatch.setattr(Round, "run", run_next)
    requests = mixed_requests(cap=24)
    tokens, _, _ = run(requests, packed(3, num_verified=4, max_len=60), drafter)
    assert tokens == expected_tokens(requests, tokens)
    assert {len(drafts) for _, drafts in drafter.seen} >= {1, 2, 3, 4}
    check_drafts(drafter, design, tensors)


@pytest.mark.second
def test_preempted_rows_keep_their_drafts(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("random")
    requests = [request(i, [i, 5, 7], cap=60, predicted=4) for i in range(4)]
    drafter = make_drafter(tmp_path, design, tensors, 3, slots=4)
    tokens, _, engine = run(requests, packed(4, num_pages=32, max_len=63, num_verified=3), drafter, short_cap=2)
    assert engine.totals.preempted > 0
    assert tokens == expected_tokens(requests, tokens)
    check_drafts(drafter, design, tensors)


@pytest.mark.second
@pytest.mark.parametrize("kind", ["random", "trained"])
def test_a_head_changes_no_sampled_token(kind: str, tmp_path: Path) -> None:
    design, tensors = design_and_tensors(kind)
    sampling = SamplingParams(temperature=0.9, top_k=9)
    requests = [request(i, [i, 3], cap=20, sampling=sampling) for i in range(5)]
    tokens, _, _ = run(requests, packed(2, num_verified=4), make_drafter(tmp_path, design, tensors, 4, slots=2))
    assert tokens == expected_tokens(requests, tokens)


@pytest.mark.second
def test_a_mask_feature_that_was_projected_before_it_was_saved_drafts_the_same(tmp_path: Path) -> None:
    """Some exporters push mask_hidden through fc themselves: it is then as wide as the head, not as its taps."""
    design = tiny_design(TARGET().spec, mask_id=MASK)
    tensors = random_tensors(design, seed=5)
    projected = tensors["mask_hidden"].view(1, -1) @ tensors["fc.weight"].T
    found = []
    for number, mask in enumerate((tensors["mask_hidden"], tensors["mask_hidden"][0, 0], projected[None], projected)):
        drafter = make_drafter(tmp_path / str(number), design, {**tensors, "mask_hidden": mask}, 3, slots=2)
        run(mixed_requests(3), packed(2, num_verified=3), drafter)
        found.append(drafter.seen)
    assert found[0] == found[1] == found[2] == found[3]


def test_a_head_without_a_mask_is_refused() -> None:
    target = TARGET()
    head = dummy_head(dummy_spec(target.spec), dtype=target.dtype, device=DEVICE)
    with pytest.raises(ValueError, match="the head has no mask token"):
        ParallelDrafter(head, target, 3, slots=1)


def test_a_job_drafts_in_parallel_by_default_if_the_head_can(tmp_path: Path) -> None:
    target = TARGET()
    for name, mask, parallel, kind in (
        ("peagle", MASK, "auto", ParallelDrafter),
        ("peagle", MASK, True, ParallelDrafter),
        ("peagle", MASK, False, ChainDrafter),
        ("chain", None, "auto", ChainDrafter),
    ):
        design = tiny_design(target.spec, mask_id=mask)
        folder = write_head(tmp_path / name, design, random_tensors(design))
        config = RunConfig(
            draft=DraftConfig(name="eagle3", path=str(folder), parallel=parallel, num_speculative_tokens=5, aux_layers="input")
        )
        spec = open_drafter(config, target.spec)
        drafter = spec.build(spec.load(dtype=target.dtype, device=DEVICE), target, slots=2)
        assert type(drafter) is kind
        assert drafter.shape == spec.shape
        assert drafter.layer_states(4) == spec.layer_states(target.dtype, 4)
        config.draft.cache_dtype = "fp8"
        narrow = spec.build(spec.load(dtype=target.dtype, device=DEVICE), target, slots=2)
        assert narrow.layer_states(4) == spec.layer_states(target.dtype, 4)
        (wide,), (fp8,) = drafter.layer_states(4), narrow.layer_states(4)
        assert fp8.page_bytes * target.dtype.itemsize == wide.page_bytes
    config.draft.parallel = True
    with pytest.raises(ConfigError, match=r"draft.parallel=true, but the head .*chain has no mask token: it drafts a chain"):
        open_drafter(config, target.spec)


def test_more_drafts_than_the_longest_row_has_tokens_change_none(tmp_path: Path) -> None:
    """A round then asks for as many places as its row has keys, though its first place is not the row's first."""
    design, tensors = design_and_tensors("random")
    requests = [request(i, [i, 2, 3], cap=15) for i in range(2)]
    drafter = make_drafter(tmp_path, design, tensors, 17, slots=2)
    tokens, _, _ = run(requests, packed(2, num_verified=17, max_len=18), drafter)
    assert tokens == expected_tokens(requests, tokens)
    check_drafts(drafter, design, tensors)
