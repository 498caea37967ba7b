"""Trees of drafts through the engine against their definition (tests/helpers/eagle_reference.py), in fp64, where both
agree exactly."""

from __future__ import annotations

import json
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec import run as job_run
from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.bench.workloads import make_job
from batchspec.cache.groups import KVGroups
from batchspec.cache.pages import SCRATCH_PAGE, KVCache
from batchspec.commands import plan
from batchspec.config.draft_schema import DraftConfig, TreeConfig
from batchspec.config.schema import RunConfig
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.none import NoDrafter
from batchspec.draft.shapes import ChainShape, TreeShape
from batchspec.draft.spec import open_drafter
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import load_head
from batchspec.engine.rounds.records import RoundOptions, RoundResult
from batchspec.engine.rounds.tree_round import TreeRound
from batchspec.errors import CapacityError, ConfigError
from batchspec.model.families.shapes import COMMON
from batchspec.records import SamplingParams
from tests.helpers import drafting
from tests.helpers.drafting import TARGET, drawn_batch, expected_tokens, known_requests, mixed_requests, synthetic
from tests.helpers.eagle_reference import Design, reference_tree
from tests.helpers.engines import DEVICE, VOCAB, decode, full_logits, make_engine, packed, plain_tokens, request, tiny_target
from tests.helpers.heads import Tensors, distilled_tensors, random_tensors, tiny_design, write_head

pytestmark = pytest.mark.second

SAMPLED = SamplingParams(temperature=0.9, top_k=9)
Tree = list[tuple[int, int]]


class Recorded(TreeDrafter):
    """Keeps the tree of every live row: the committed tokens, then (token, number of the node above) of each node."""

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> Tensor:
        parents = super().propose(rows, draft_ids, draft_len, cache)
        assert draft_len.tolist() == [self.shape.depth * alive for alive in rows.live.tolist()]
        for slot in rows.live.nonzero().flatten().tolist():
            prefix = tuple(rows.tokens[slot, : int(rows.num_tokens[slot])].tolist())
            above = parents[slot].tolist()
            assert above[0] == -1
            seen.append((prefix, list(zip(draft_ids[slot].tolist(), above[1:], strict=True))))
        return parents


seen: list[tuple[tuple[int, ...], Tree]] = []
"""What the drafters of the running test proposed."""


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


def shape_of(topk: int, depth: int, nodes: int | None = None) -> TreeShape:
    most = min(63, topk + (depth - 1) * topk**2)
    return TreeShape(topk=topk, depth=depth, nodes=most if nodes is None else nodes)


def make_head(folder: Path, design: Design, tensors: Tensors, *, dtype: torch.dtype = torch.float64) -> Head:
    write_head(folder, design, tensors)
    return load_head(folder, TARGET().spec, dtype=dtype, device=DEVICE, aux_layers="input")


def make_drafter(folder: Path, design: Design, tensors: Tensors, shape: TreeShape, *, slots: int, **options: Any) -> Recorded:
    return Recorded(make_head(folder, design, tensors), TARGET(), shape, slots=slots, **options)


run = partial(drafting.run, decode=decode)


def check_trees(design: Design, tensors: Tensors, shape: TreeShape, *, window: int | None = None, sink: int = 0) -> None:
    """Every tree, token by token and parent by parent, is what a row computed by itself, without cache or batch, grows."""
    assert len(seen) > 5
    for prefix, tree in seen:
        assert tree == reference_tree(
            design, tensors, TARGET(), prefix, topk=shape.topk, depth=shape.depth, nodes=shape.nodes,
            window=window, sink=sink,
        )


@cache
def design_and_tensors(kind: str) -> tuple[Design, Tensors]:
    if kind == "random":
        design = tiny_design(TARGET().spec, norm_before_residual=True, layers=2, windows=(None, None))
        return design, random_tensors(design, seed=3)
    design = tiny_design(TARGET().spec, draft_vocab=VOCAB - 1)
    rows = [r.prompt_ids.tolist() + plain_tokens(TARGET(), r) for r in known_requests()]
    return design, distilled_tensors(TARGET(), design, rows, steps=60)


DESIGNS: dict[str, tuple[dict[str, Any], TreeShape, int]] = {
    "one level": ({}, shape_of(3, 1), 3),
    "more rows than branches": ({}, shape_of(2, 4), 5),
    "fewer rows than branches": ({"norm_before_residual": True}, shape_of(5, 3, 30), 2),
    "as many": ({"draft_vocab": None, "head_dim": 4}, shape_of(3, 3, 11), 3),
    "fewer nodes than levels": ({"fc_norm": True}, shape_of(2, 6, 3), 3),
    "biased fc": ({"norm_before_fc": True, "fc_bias": True}, shape_of(4, 4, 25), 3),
    "normed state fed back": ({"norm_output": True}, shape_of(3, 4, 20), 3),
    "three layers": ({"layers": 3, "windows": (None, 4, None)}, shape_of(3, 5, 20), 3),
    "the largest": ({"own_embedding": True, "qk_norm": True}, shape_of(10, 7, 63), 4),
    "a sliding window": ({"windows": (2,)}, shape_of(3, 5, 20), 3),
}


@pytest.mark.parametrize("name", DESIGNS)
def test_trees_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    changes, shape, slots = DESIGNS[name]
    design = tiny_design(TARGET().spec, **changes)
    tensors = random_tensors(design, seed=7)
    drafter = make_drafter(tmp_path, design, tensors, shape, slots=slots, dead_positions=len(name) % 2 == 0)
    batch = packed(slots, row_buckets=(slots,), prefill_tokens=7, num_pages=120, max_len=40)
    _, done, _ = run(mixed_requests(6), batch, drafter, options=synthetic(shape.depth))
    assert sum(c.stats.num_accepted for c in done.values() if c.stats) > 5
    check_trees(design, tensors, shape)


@pytest.mark.parametrize(("window", "sink"), [(1, 0), (3, 2), (100, 3)])
def test_a_window_and_a_sink_narrow_what_the_head_reads(window: int, sink: int, tmp_path: Path) -> None:
    design, tensors = design_and_tensors("random")
    shape = shape_of(3, 4, 20)
    drafter = make_drafter(tmp_path, design, tensors, shape, slots=2, window=window, sink=sink)
    run(mixed_requests(), packed(2, max_len=40), drafter, options=synthetic(shape.depth))
    check_trees(design, tensors, shape, window=window, sink=sink)


@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_packing_gives_the_trees_of_the_definition_and_the_tokens_of_plain_decoding(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seen.clear()
    design, tensors = design_and_tensors(data.draw(st.sampled_from(["random", "distilled"]), label="head"))
    topk, depth = data.draw(st.integers(2, 5), label="topk"), data.draw(st.integers(1, 5), label="depth")
    most = min(63, topk + (depth - 1) * topk**2)
    shape = shape_of(topk, depth, data.draw(st.integers(1, most), label="nodes"))
    slots = data.draw(st.sampled_from([1, 2, 4]), label="slots")
    drafter = make_drafter(
        tmp_path_factory.mktemp("head"), design, tensors, shape, slots=slots, dead_positions=data.draw(st.booleans())
    )
    sampling = data.draw(st.sampled_from([None, SAMPLED, SamplingParams(temperature=0.8, repetition_penalty=1.3)]))
    requests = mixed_requests(4, cap=data.draw(st.integers(5, 16), label="cap"), sampling=sampling) + known_requests()[:2]
    batch = drawn_batch(data, requests, slots, draft_len=4, num_lookahead_slots=shape.kv_per_round)
    # The definition here is that of a head alone: without the noise of draws.
    options = RoundOptions(uniform_slots=data.draw(st.booleans(), label="uniform layout"), coupled=False)
    tokens, _, _ = run(requests, batch, drafter, short_cap=data.draw(st.sampled_from([2, 512])), options=options)
    assert tokens == expected_tokens(requests, tokens)
    check_trees(design, tensors, shape)


def test_a_tree_accepts_at_least_what_a_chain_of_its_depth_does(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("distilled")
    head = make_head(tmp_path, design, tensors)
    requests, lengths = known_requests() + mixed_requests(3), []
    for drafter in (
        ChainDrafter(head, TARGET(), 4, slots=3),
        TreeDrafter(head, TARGET(), shape_of(3, 4, 20), slots=3),
    ):
        tokens, _, engine = run(requests, packed(3), drafter)
        assert tokens == expected_tokens(requests, tokens)
        totals = engine.totals
        lengths.append(1 + totals.accepted / totals.row_rounds)
        assert engine.executor.round.row_positions(4) == 1 + drafter.shape.num_verified
    assert lengths[1] > lengths[0] > 1.5


def test_every_tree_gives_the_tokens_of_no_drafts_in_fp32(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("distilled")
    target, head = tiny_target(torch.float32, window=5), make_head(tmp_path, design, tensors, dtype=torch.float32)
    requests = mixed_requests(3) + mixed_requests(3, sampling=SAMPLED, first=3)
    shapes = [shape_of(2, 1), shape_of(2, 5), shape_of(4, 3, 7), shape_of(4, 4, 40), shape_of(8, 8, 63)]
    drafters: list[Drafter] = [NoDrafter(), *(TreeDrafter(head, target, shape, slots=3) for shape in shapes)]
    found = []
    for drafter in drafters:
        engine = make_engine(target, drafter, packed(3), device=DEVICE)
        found.append({c.request_id: c.token_ids.tolist() for c in engine.run(iter(requests)) if c.token_ids is not None})
    assert sorted(found[0]) == [f"r{index}" for index in range(6)]
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_kv_of_what_is_committed_is_that_of_a_forward_from_the_start(
    sampling: SamplingParams | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every round, in all layers of the target: the accepted path has the places of a chain's."""
    design, tensors = design_and_tensors("distilled")
    shape, run_tree, moved = shape_of(3, 4, 20), TreeRound.run, []
    drafter = make_drafter(tmp_path, design, tensors, shape, slots=2)
    kept: dict[tuple[int, ...], list[tuple[list[int], Tensor, Tensor]]] = {}

    def checked(self: Any, rows: DeviceBatch, *args: Any, **options: Any) -> RoundResult:
        result = run_tree(self, rows, *args, **options)
        for slot in rows.live.nonzero().flatten().tolist():
            count = int(rows.num_tokens[slot]) - 1
            ids = tuple(rows.tokens[slot, :count].tolist())
            places = torch.arange(count)
            kept[ids] = []
            for group, kv in self.cache.target_pages:
                layers = [i for i, own in enumerate(self.cache.groups.target_layers) if own == group]
                pages = rows.page_tables[group][slot, places // self.cache.page_size].long()
                held = pages != SCRATCH_PAGE  # a page that the window has passed is given back
                kept[ids].append((layers, held, kv[:, :, pages, places % self.cache.page_size].clone()))
            moved.append(int(result.log[slot, 0]))
        return result

    monkeypatch.setattr(TreeRound, "run", checked)
    requests = known_requests() if sampling is None else mixed_requests(3, sampling=sampling)
    tokens, _, _ = run(requests, packed(2), drafter)
    assert tokens == expected_tokens(requests, tokens)
    assert max(moved) > 0
    for ids, groups in kept.items():
        whole = kv_from_the_start(ids)
        assert sorted(layer for layers, _, _ in groups for layer in layers) == list(range(len(whole)))
        for layers, held, found in groups:
            assert held[-1]
            torch.testing.assert_close(found[:, :, held], whole[layers][:, :, held], atol=1e-11, rtol=1e-11)


def kv_from_the_start(ids: tuple[int, ...]) -> Tensor:
    """K/V [layers, 2, len(ids), heads, D] of the target over these tokens, in one pass."""
    spec, count = TARGET().spec, len(ids)
    groups = KVGroups.single(spec.num_layers)
    layers = spec.layer_states(torch.float64, count, draft_len=0)
    cache = KVCache.allocate(layers, groups=groups, page_size=count, num_pages=(2,), device=DEVICE)
    positions = torch.arange(count, device=DEVICE)

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    batch = FlatBatch(
        token_ids=ints(ids),
        row_ids=ints([0] * count),
        positions=positions,
        slot_mapping=positions + count,
        cu_seqlens_q=ints([0, count]),
        kv_len=ints([count]),
        page_table=ints([[1]]),
        max_q=count,
        max_kv=count,
    )
    TARGET().forward(batch, cache)
    ((_, kv),) = cache.target_pages
    return kv[:, :, 1]


def test_a_round_emits_the_path_that_the_target_draws(tmp_path: Path) -> None:
    """Per-request loop: what each round accepts, counted by hand from the reference's trees and the output itself."""
    design, tensors = design_and_tensors("distilled")
    requests = known_requests() + mixed_requests(3, sampling=SAMPLED)
    shape = shape_of(3, 3, 14)
    drafter, options = make_drafter(tmp_path, design, tensors, shape, slots=3), RoundOptions(coupled=False)
    tokens, done, _ = run(requests, packed(3), drafter, options=options)
    for req in requests:
        prompt, output = req.prompt_ids.tolist(), tokens[req.request_id]
        kept: list[int] = []
        count = 1  # prefill emits the first token
        while count < len(output):
            tree = reference_tree(design, tensors, TARGET(), prompt + output[:count], topk=3, depth=3, nodes=14)
            node, accepted = 0, 0
            for token in output[count:-1]:
                below = [number for number, (own, above) in enumerate(tree, 1) if above == node and own == token]
                if not below:
                    break
                node, accepted = below[0], accepted + 1
            kept.append(accepted)
            count += accepted + 1
        stats = done[req.request_id].stats
        assert stats is not None
        assert list(stats.histogram) == [kept.count(j) for j in range(4)]
        assert list(stats.accepted_at) == [sum(a > j for a in kept) for j in range(3)]


def test_rows_end_where_they_should_with_whole_trees_to_the_end(tmp_path: Path) -> None:
    """A tree needs places past the row's limit: they have pages, and rows of a full page table still reach their limit."""
    design, tensors = design_and_tensors("random")
    shape = shape_of(3, 6, 40)
    drafter = make_drafter(tmp_path, design, tensors, shape, slots=2)
    requests = [request(i, [i, 2, 3], cap=13) for i in range(3)]
    tokens, done, engine = run(requests, packed(2, max_len=16, num_pages=31), drafter, options=synthetic(6))
    assert engine.executor.rows.page_tables[0].shape[1] * 4 >= 16 - 2 + shape.kv_per_round
    assert all(len(output) == 13 for output in tokens.values())
    assert all(c.stats.num_accepted + c.stats.num_rounds + 1 == 13 for c in done.values() if c.stats)
    check_trees(design, tensors, shape)
    with pytest.raises(CapacityError, match=r"prompt and output of 16 tokens need 14 pages, the pool has 9"):
        run(requests, packed(2, max_len=16, num_pages=10), drafter)


def test_preempted_rows_keep_their_trees(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("random")
    shape = shape_of(2, 3)
    requests = [request(i, [i, 5, 7], cap=36, predicted=4) for i in range(4)]
    drafter = make_drafter(tmp_path, design, tensors, shape, slots=4)
    tokens, _, engine = run(requests, packed(4, num_pages=24, max_len=39), drafter, short_cap=2)
    assert engine.totals.preempted > 0
    assert tokens == expected_tokens(requests, tokens)
    check_trees(design, tensors, shape)


def test_rounds_without_drafts_leave_the_next_tree_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    design, tensors = design_and_tensors("random")
    shape = shape_of(3, 3, 14)
    drafter = make_drafter(tmp_path, design, tensors, shape, slots=3)
    turns, run_round = cycle([(3, True), (0, False), (0, True), (3, False), (0, False), (0, True)]), TreeRound.run

    def run_next(self: TreeRound, rows: DeviceBatch, mode: Any, *_: Any) -> RoundResult:
        now, prepare_next = next(turns)
        return run_round(self, rows, mode, now, prepare_next=prepare_next)

    monkeypatch.setattr(TreeRound, "run", run_next)
    requests = mixed_requests(cap=24)
    tokens, _, _ = run(requests, packed(3, max_len=60), drafter)
    assert tokens == expected_tokens(requests, tokens)
    check_trees(design, tensors, shape)


def test_logprobs_are_those_of_the_raw_logits(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("distilled")
    drafter = make_drafter(tmp_path, design, tensors, shape_of(3, 3), slots=2)
    sampling = SamplingParams(temperature=0.5, repetition_penalty=1.1)
    requests = [*known_requests()[:1], request(1, [1, 2, 3, 1, 2], cap=12, sampling=sampling)]
    _, done, engine = run(requests, packed(2), drafter, logprobs=4)
    assert engine.totals.accepted > 3
    for req in requests:
        completion = done[req.request_id]
        assert completion.token_ids is not None
        assert completion.logprobs is not None
        assert completion.top_logprobs is not None
        ids = [*req.prompt_ids.tolist(), *completion.token_ids.tolist()]
        for place, token in enumerate(completion.token_ids.tolist()):
            logprobs = torch.log_softmax(full_logits(TARGET(), ids[: len(req.prompt_ids) + place]), -1)
            assert abs(float(logprobs[token]) - float(completion.logprobs[place])) < 1e-5
            assert completion.top_logprobs[0][place].tolist() == logprobs.topk(4).indices.tolist()


def test_tokens_above_a_node_are_those_from_the_root_on() -> None:
    """Token 0 too: it is no sign that a path is shorter."""
    round_ = cast(TreeRound, SimpleNamespace(drafter=SimpleNamespace(draft_len=2)))
    ids, parents = torch.tensor([[9, 0, 7, 0]]).int(), torch.tensor([[-1, 0, 1, 2]]).int()
    found = TreeRound._above(round_, ids, parents).tolist()
    assert (found[1][:1], found[2]) == ([0], [0, 7])


def test_penalties_count_the_tokens_above_a_node(tmp_path: Path) -> None:
    """With a penalty that forbids every repetition, a node's choice depends on the accepted nodes above it."""
    design, tensors = design_and_tensors("distilled")
    drafter = make_drafter(tmp_path, design, tensors, shape_of(4, 4, 40), slots=3)
    sampling = SamplingParams(temperature=0.0, presence_penalty=3.0)
    requests = [request(i, [i, i + 1, 3], cap=16, sampling=sampling) for i in range(6)]
    tokens, _, engine = run(requests, packed(3), drafter)
    assert engine.totals.accepted > 10
    assert tokens == expected_tokens(requests, tokens)


def test_made_up_acceptance_keeps_the_rates_by_depth(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("random")
    drafter = make_drafter(tmp_path, design, tensors, shape_of(2, 3), slots=16)
    requests = [request(i, [i, 2], cap=120) for i in range(16)]
    batch = packed(16, row_buckets=(16,), num_pages=2000, max_len=122)
    _, done, _ = run(requests, batch, drafter, options=RoundOptions(synthetic=((0.6, 0.28, 0.12),)))
    stats = [c.stats for c in done.values() if c.stats]
    rounds = sum(s.num_rounds for s in stats)
    assert [sum(s.accepted_at[j] for s in stats) / rounds for j in range(3)] == pytest.approx([0.6, 0.28, 0.12], abs=0.04)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"topk": 1, "depth": 3, "nodes": 3}, "a tree has at least 2 branches and 1 level"),
        ({"topk": 10, "depth": 8, "nodes": 60}, "topk=10 at 7 levels are 70 places; at most 64"),
        ({"topk": 2, "depth": 3, "nodes": 11}, r"nodes=11 must be in 1 .. 10: topk=2 and depth=3 grow 10"),
        ({"topk": 8, "depth": 4, "nodes": 64}, r"nodes=64 must be in 1 .. 63: .* at most 63 are verified"),
    ],
)
def test_trees_that_cannot_be_verified_are_refused(shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape(**shape)


def test_more_branches_than_draft_tokens_are_refused(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("random")
    with pytest.raises(ValueError, match="topk=20 exceeds the head's 19 draft tokens"):
        make_drafter(tmp_path, design, tensors, shape_of(20, 3), slots=1)
    draft = DraftConfig(name="eagle3", path=str(tmp_path), tree=TreeConfig(topk=20, depth=3), aux_layers="input")
    with pytest.raises(ConfigError, match=r"draft.tree.topk=20 exceeds the 19 draft tokens of the head .*; lower it"):
        open_drafter(RunConfig(draft=draft), TARGET().spec)


def test_one_branch_is_a_chain_and_more_are_a_tree_of_the_nodes_asked_for(tmp_path: Path) -> None:
    design, tensors = design_and_tensors("random")
    head = make_head(tmp_path, design, tensors)
    shapes = []
    for tree in (TreeConfig(), TreeConfig(topk=3), TreeConfig(topk=10, depth=6), TreeConfig(topk=4, nodes=7)):
        config = RunConfig(draft=DraftConfig(name="eagle3", path=str(tmp_path), num_speculative_tokens=4, tree=tree))
        spec = open_drafter(config, TARGET().spec)
        drafter = spec.build(head, TARGET(), slots=2)
        assert type(drafter) is (ChainDrafter if tree.topk == 1 else TreeDrafter)
        assert drafter.shape == spec.shape
        shapes.append((drafter.draft_len, spec.shape.num_verified, spec.shape))
    assert shapes[0] == (4, 4, ChainShape(4))
    assert shapes[1] == (4, 30, TreeShape(topk=3, depth=4, nodes=30))
    assert shapes[2] == (6, 60, TreeShape(topk=10, depth=6, nodes=60))
    assert shapes[3] == (4, 7, TreeShape(topk=4, depth=4, nodes=7))


@pytest.mark.second
def test_whole_jobs_with_trees_or_parallel_drafts_write_what_one_without_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = tmp_path / "config.json"
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 512,
    }
    shape.write_text(json.dumps({**COMMON, **sizes}))
    make_job(tmp_path / "job", shape=str(shape), num_requests=3, prompt_len=20, cap=24)
    words = [
        f"model.path={tmp_path}/job/model", "model.load_format=dummy", "model.max_len=44", "model.dtype=float32",
        "decode.ignore_eos=true", "decode.max_new_tokens=24", f"input.path={tmp_path}/job/known.parquet", "device=cpu",
    ]
    tree, found = ["draft=tree", "draft.tree.nodes=20"], []
    parallel = ["draft=eagle3", "draft.parallel=true", "draft.num_speculative_tokens=5"]
    for name, draft in (("none", ["draft=none"]), ("tree", tree), ("parallel", parallel)):
        assert job_run.main([*words, *draft, f"output.dir={tmp_path}/{name}"]) == 0
        found.append(pl.read_parquet(tmp_path / name / "data").sort("id"))
        assert found[0]["token_ids"].to_list() == found[-1]["token_ids"].to_list()
    for spec in found[1]["spec_decode"].to_list():
        assert (spec["drafter"], spec["num_spec_tokens"], len(spec["acceptance_histogram"])) == ("tree", 6, 7)
        # Nodes are counted, in every round but one that could emit no more than one token.
        assert spec["num_draft_tokens"] in (20 * spec["num_spec_steps"], 20 * (spec["num_spec_steps"] - 1))
    assert plan.main([*words, *tree, f"output.dir={tmp_path}/planned"]) == 0
    assert "drafter eagle3 (trees of 20 nodes, 6 levels)" in capsys.readouterr().out
