"""Drafts of a block through the engine against their definition (tests/helpers/block_heads.py), in fp64, where both agree
exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

from batchspec import run as job_run
from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.pages import KVCache
from batchspec.checkpoint.files import LocalFiles
from batchspec.draft.block import BlockDrafter
from batchspec.draft.block_head import BlockWeights, load_block, open_block
from batchspec.kernels.sampling.sample import gumbel_reference
from batchspec.records import SamplingParams
from tests.helpers.block_heads import LAYOUTS, BlockDesign, Tensors, random_block, reference_block, write_block
from tests.helpers.drafting import TARGET, expected_tokens, mixed_requests, run, synthetic
from tests.helpers.engines import DEVICE, VOCAB, packed
from tests.helpers.models import make_checkpoint
from tests.helpers.ngrams import forbidden

MASK = 17
Seen = list[tuple[tuple[int, ...], int, list[int], list[int]]]
"""A row's tokens, its room (limit - num_tokens), its drafts, and the confidence in each."""


def design_of(**changes: Any) -> BlockDesign:
    usual: dict[str, Any] = {"hidden": TARGET().spec.hidden_size, "vocab": VOCAB, "taps": (0, 1), "mask_id": MASK}
    return BlockDesign(**usual | changes)


class Recorded(BlockDrafter):
    """Keeps what it proposed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: Seen = []

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        super().propose(rows, draft_ids, draft_len, cache)
        width = draft_ids.shape[1]
        assert draft_len.tolist() == [width if alive else 0 for alive in rows.live.tolist()]
        for slot in rows.live.nonzero().flatten().tolist():
            count = int(rows.num_tokens[slot])
            sure = [0] * width if self.confidence is None else self.confidence[slot, :width].tolist()
            room = int(rows.limit[slot]) - count
            self.seen.append((tuple(rows.tokens[slot, :count].tolist()), room, draft_ids[slot].tolist(), sure))


def loaded(folder: Path, design: BlockDesign, tensors: Tensors, **written: Any) -> BlockWeights:
    write_block(folder, design, tensors, **written)
    target = TARGET()
    spec = open_block(LocalFiles(folder), target.spec)
    return load_block(folder, spec, dtype=target.dtype, device=DEVICE)


def drafted(
    head: BlockWeights, draft_len: int, *, slots: int = 3, kind: type[Recorded] = Recorded, **options: Any
) -> Seen:
    """What the head proposes in a job with scarce pages whose drafts are accepted by chance."""
    drafter = kind(head, TARGET(), draft_len, slots=slots, **options)
    batch = packed(slots, num_verified=draft_len, prefill_tokens=7, num_pages=60, max_len=40)
    _, done, _ = run(mixed_requests(), batch, drafter, options=synthetic(draft_len))
    assert sum(c.stats.num_accepted for c in done.values() if c.stats) > 5
    assert len(drafter.seen) > 5
    return drafter.seen


def check(seen: Seen, design: BlockDesign, tensors: Tensors, **options: Any) -> None:
    for prefix, room, drafts, _ in seen:
        expected, _ = reference_block(design, tensors, TARGET(), prefix, len(drafts), room, **options)
        assert drafts[: room - 1] == expected[: room - 1]


DFLASH2: dict[str, Any] = {
    "from_anchor": False, "selector": 5, "top_k": 6, "taps_of_conv": 2, "windows": (9, 9), "causal": False
}
DESIGNS: dict[str, dict[str, Any]] = {
    "one layer": {"layers": 1, "windows": (None,)},
    "masks at the drafts": {"from_anchor": False},
    "masks at the drafts, Markov": {"from_anchor": False, "rank": 3},
    "Markov": {"rank": 5},
    "Markov, fewer words": {"rank": 5, "draft_vocab": 23},
    "fewer words than candidates": {"rank": 4, "draft_vocab": 9},
    "fewer words": {"draft_vocab": 12, "from_anchor": False},
    "causal": {"causal": True},
    "a causal window": {"windows": (8, None)},
    "a window that is not causal": {"windows": (None, 9), "causal": False, "rank": 3},
    "biases": {"attention_bias": True, "mlp_bias": True, "rank": 2},
    "own embedding": {"own_embedding": True},
    "the state after the last layer": {"taps": (1, 2)},
    "one state": {"taps": (1,), "heads": 2, "kv_heads": 1, "head_dim": 4},
    "DFlash2": DFLASH2,
    "DFlash2, three taps": {"from_anchor": False, "selector": 3, "top_k": 1, "taps_of_conv": 3, "conv_group": 1},
    "convolutions alone": {"from_anchor": False, "taps_of_conv": 2, "conv_group": 16, "causal": False},
    "a selector alone": {"from_anchor": False, "selector": 4, "top_k": 32, "causal": False},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DESIGNS)
def test_drafts_are_those_of_the_definition(name: str, layout: str, tmp_path: Path) -> None:
    if DESIGNS[name].get("causal") and layout == "speculators":
        pytest.skip("its layers without a window are never causal")
    if name == "the state after the last layer" and layout != "speculators":
        pytest.skip("refused: such files do not say whether it is before the norm")
    design = design_of(layout=layout, **DESIGNS[name])
    tensors = random_block(design, seed=7)
    draft_len = 2 + len(name) % 5
    seen = drafted(loaded(tmp_path, design, tensors), draft_len)
    check(seen, design, tensors)


def test_a_whole_output_matrix_of_its_own_is_used_and_not_the_targets(tmp_path: Path) -> None:
    """A head without d2t whose lm_head is over all tokens."""
    design = design_of(draft_vocab=VOCAB, rank=3)
    tensors = random_block(design, seed=7)
    head = loaded(tmp_path, design, {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")})
    assert (head.spec.own_head, head.spec.mapped) == (True, False)
    check(drafted(head, 4), design, tensors)
    shared = {name: tensor for name, tensor in head.tensors.items() if name != "lm_head.weight"}
    seen = drafted(BlockWeights(replace(head.spec, own_head=False), shared, None), 4)
    with pytest.raises(AssertionError):
        check(seen, design, tensors)


@pytest.mark.parametrize("from_anchor", [True, False])
def test_the_wrong_block_layout_drafts_other_tokens(from_anchor: bool, tmp_path: Path) -> None:
    """The same weights run with either: what tells them apart must be read."""
    design = design_of(from_anchor=not from_anchor, rank=3)
    tensors = random_block(design, seed=7)
    head = loaded(tmp_path, design, tensors)
    wrong = BlockWeights(replace(head.spec, from_anchor=from_anchor), head.tensors, head.map_ids)
    seen = drafted(wrong, 4)
    with pytest.raises(AssertionError):
        check(seen, design, tensors)


@pytest.mark.parametrize(("window", "sink"), [(1, 0), (4, 2), (100, 3)])
def test_a_window_and_a_sink_narrow_what_the_head_reads(window: int, sink: int, tmp_path: Path) -> None:
    design = design_of(rank=3)
    tensors = random_block(design, seed=7)
    seen = drafted(loaded(tmp_path, design, tensors), 3, window=window, sink=sink)
    check(seen, design, tensors, window=window, sink=sink)


class Shorter(Recorded):
    """Proposes two drafts for each row before every round, besides its own."""

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        super().propose(rows, draft_ids[:, :2].contiguous(), draft_len.clone(), cache)
        super().propose(rows, draft_ids, draft_len, cache)


@pytest.mark.parametrize("changes", [{"rank": 3}, {"rank": 3, "from_anchor": False}, DFLASH2])
def test_a_round_may_ask_for_a_shorter_block(changes: dict[str, Any], tmp_path: Path) -> None:
    design = design_of(**changes)
    tensors = random_block(design, seed=7)
    seen = drafted(loaded(tmp_path, design, tensors), 5, kind=Shorter)
    assert {len(drafts) for _, _, drafts, _ in seen} == {2, 5}
    check(seen, design, tensors)


@pytest.mark.parametrize("confidence", ["hidden", "markov"])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_confidence_head_says_how_sure_each_draft_is(confidence: str, rank: int, tmp_path: Path) -> None:
    if confidence == "markov" and not rank:
        pytest.skip("it reads the Markov matrix")
    design = design_of(rank=rank, confidence=confidence)
    tensors = random_block(design, seed=7)
    drafter = Recorded(loaded(tmp_path, design, tensors), TARGET(), 4, slots=3)
    drafter.confidence = torch.zeros(3, 4, dtype=torch.int32, device=DEVICE)
    batch = packed(3, num_verified=4, num_pages=60, max_len=40)
    run(mixed_requests(), batch, drafter)
    assert len({sure for *_, each in drafter.seen for sure in each}) > 5
    for prefix, room, drafts, sure in drafter.seen:
        expected, odds = reference_block(design, tensors, TARGET(), prefix, 4, room)
        assert drafts[: room - 1] == expected[: room - 1]
        bins = [min(31, max(0, math.floor(4 * (x + 3)))) for x in odds]
        assert sure[: room - 1] == bins[: room - 1]


Limit = Callable[[Tensor, Sequence[int]], Tensor]


def check_sampled(
    design: BlockDesign, sampling: SamplingParams, folder: Path, *, draft_len: int = 4,
    limit_of: Callable[[Sequence[int]], Limit] | None = None,
) -> Seen:
    """Drafts of rows with this sampling are those of the definition, and tokens those without drafts.

    limit_of  a row's output so far -> `limit` of `reference_block`
    """
    tensors = random_block(design, seed=7)
    requests = mixed_requests(sampling=sampling)
    drafter = Recorded(loaded(folder, design, tensors), TARGET(), draft_len, slots=3)
    tokens, _, _ = run(requests, packed(3, num_verified=draft_len, num_pages=60, max_len=40), drafter)
    assert tokens == expected_tokens(requests)
    rows = {tuple(one.prompt_ids.tolist()): one.seed for one in requests}
    assert len(drafter.seen) > 5
    for prefix, room, drafts, _ in drafter.seen:
        prompt, seed = next((own, seed) for own, seed in rows.items() if prefix[: len(own)] == own)

        def noise(position: int, seed: int = seed) -> Tensor:
            return gumbel_reference(torch.tensor([seed]), torch.tensor([position]), VOCAB)[0].double()

        expected, _ = reference_block(
            design, tensors, TARGET(), prefix, draft_len, room, temperature=sampling.temperature or 1.0,
            noise=noise if sampling.temperature else None, limit=limit_of and limit_of(prefix[len(prompt) :]),
        )
        assert drafts[: room - 1] == expected[: room - 1]
    return drafter.seen


@pytest.mark.parametrize(
    "changes",
    [*({"rank": rank, "draft_vocab": 23, "from_anchor": anchor} for rank in (0, 3) for anchor in (True, False)), DFLASH2],
)
def test_sampled_rows_draft_with_the_noise_of_the_targets_draws(changes: dict[str, Any], tmp_path: Path) -> None:
    """What the token before adds is divided by the temperature too, which the noise is not."""
    check_sampled(design_of(**changes), SamplingParams(temperature=0.7), tmp_path)


@pytest.mark.parametrize("draft_len", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"from_anchor": False}, {"rank": 3}, DFLASH2])
def test_drafts_of_sampled_rows_with_filters(changes: dict[str, Any], draft_len: int, tmp_path: Path) -> None:
    def kept(logits: Tensor, before: Sequence[int]) -> Tensor:
        """The 3 best tokens, and of these the fewest that have 0.8 of their probability."""
        best = logits.topk(3)
        odds = best.values.softmax(0)
        inside = best.indices[odds.cumsum(0) - odds < 0.8]
        return torch.full_like(logits, -torch.inf).index_copy_(0, inside, logits[inside])

    sampling = SamplingParams(temperature=3.0, top_k=3, top_p=0.8)
    check_sampled(design_of(**changes), sampling, tmp_path, draft_len=draft_len, limit_of=lambda output: kept)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("changes", [{"rank": 3, "draft_vocab": 23}, {"rank": 3, "from_anchor": False}, {}, DFLASH2])
def test_a_rule_that_reads_drafts_sees_those_before_in_the_block(
    changes: dict[str, Any], temperature: float, tmp_path: Path
) -> None:
    """Drafts are chosen in turns: none is a token of the six before it, drafts included."""
    design, rule = design_of(**changes), (1, 6, ())
    tensors = random_block(design, seed=7)
    drafted = torch.arange(VOCAB if design.draft_vocab is None else design.draft_vocab)
    drafted = drafted if design.draft_vocab is None else drafted + tensors["d2t"]

    def limit_of(output: Sequence[int]) -> Limit:
        def limit(logits: Tensor, before: Sequence[int]) -> Tensor:
            barred = torch.tensor(sorted(forbidden([*output, *before], rule)), dtype=torch.int64)
            return logits.masked_fill(torch.isin(drafted, barred), -torch.inf)

        return limit

    sampling = SamplingParams(temperature=temperature, no_repeat_ngram=rule)
    seen = check_sampled(design, sampling, tmp_path, limit_of=limit_of)
    assert all(len(set(drafts[: room - 1])) == len(drafts[: room - 1]) for _, room, drafts, _ in seen)


@pytest.mark.second
def test_a_whole_job_drafts_blocks_and_gives_the_tokens_of_one_without(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Heads with and without Markov matrices, and a DFlash2 head, in three layouts, sampled rows too."""
    make_checkpoint(tmp_path / "model", "llama", vocab=97, hidden_size=32, intermediate_size=48)
    pl.DataFrame({"id": [f"{i}" for i in range(6)], "prompt_ids": [[3 + i, 5, 8] for i in range(6)]}).write_parquet(
        tmp_path / "p.parquet"
    )
    design = BlockDesign(hidden=32, vocab=97, taps=(0, 2), mask_id=96, rank=4, confidence="markov", draft_vocab=60)
    write_block(tmp_path / "heads" / "markov", design, random_block(design))
    plain = replace(design, rank=0, confidence="", draft_vocab=None, from_anchor=False, layout="speculators", windows=(9, None))
    write_block(tmp_path / "heads" / "plain", plain, random_block(plain))
    second = replace(plain, layout="z-lab", windows=(9, 9), causal=False, taps=(0, 1), selector=4, taps_of_conv=2, conv_group=8)
    write_block(tmp_path / "heads" / "second", second, random_block(second))
    words = [
        "+job=reasoning_8k", f"model.path={tmp_path}/model", "model.max_len=64", f"input.path={tmp_path}/p.parquet",
        "decode.max_new_tokens=20", "decode.seed=3", "device=cpu",
    ]
    found = []
    for name, draft in (
        ("none", ["draft=none"]), ("markov", ["draft=block", f"draft.path={tmp_path}/heads/markov"]),
        (
            "plain",
            ["draft=block", f"draft.path={tmp_path}/heads/plain", "draft.num_speculative_tokens=7", "draft.cache_dtype=fp8"],
        ),
        ("second", ["draft=block", f"draft.path={tmp_path}/heads/second"]),
    ):
        assert job_run.main([*words, *draft, f"output.dir={tmp_path}/{name}"]) == 0
        found.append(pl.read_parquet(tmp_path / name / "data" / "*.parquet").sort("row_index"))
        assert found[0]["token_ids"].equals(found[-1]["token_ids"])
    assert "heads/markov: no sample_from_anchor in config.json; true is assumed" in capfd.readouterr().err
    for one in found[1:]:
        assert one["spec_decode"].struct.field("drafter").unique().to_list() == ["block"]
        assert one["spec_decode"].struct.field("num_draft_tokens").sum() > 20


def test_a_head_of_another_model_is_refused_before_the_job_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "model", "llama", vocab=97, hidden_size=32, intermediate_size=48)
    pl.DataFrame({"prompt_ids": [[3, 5, 8]]}).write_parquet(tmp_path / "p.parquet")
    design = BlockDesign(hidden=32, vocab=90, taps=(0, 2), mask_id=89)
    write_block(tmp_path / "head", design, random_block(design))
    words = ["+job=reasoning_8k", f"model.path={tmp_path}/model", f"input.path={tmp_path}/p.parquet", "draft=block"]
    assert job_run.main([*words, f"draft.path={tmp_path}/head", f"output.dir={tmp_path}/out", "device=cpu"]) == 2
    assert "vocab_size 90, the target's 97: a head of another target" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
