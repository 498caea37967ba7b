"""Drafts, preempted rows and an FP8 K/V cache change no token, whatever the family and the weight format.

As in test_lossless.py the reference decodes each request by itself, one token at a time, without cache or batch. Models are
float64: what differs is an error, not a rounding. FP8 weights stay e4m3 and activations are quantised as the checkpoint says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch

from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.round_clock import RoundClock
from batchspec.engine.rounds.draft_lengths import LEAST_ROWS, DraftLengths
from batchspec.engine.rounds.records import RoundOptions, RoundResult
from batchspec.engine.slots import expected_pages
from batchspec.engine.step import RoundShape, RoundWidth
from batchspec.model.spec import read_spec
from batchspec.model.target import Target
from batchspec.records import Request, SamplingParams
from tests import nvfp4_layouts
from tests.engines import DEVICE, ForcedDrafter, in_e4m3, make_engine, packed, plain_tokens, request
from tests.int4_layouts import of_awq, of_compressed_tensors, of_gptq
from tests.kernels.covering import covering
from tests.moe_models import Strong, ids_of, tiny_config
from tests.test_fp8 import MODELOPT, TOKEN, compressed

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "gate"]}
ROWS = compressed("channel", TOKEN, ignore=["lm_head", "re:.*gate$"])
STATIC = compressed("tensor", {**TOKEN, "dynamic": False, "strategy": "tensor"}, ignore=["lm_head", "re:.*gate$"])
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router"]}
WIDE = {"hidden_size": 136, "intermediate_size": 140}
"""More than one block, and a part of one."""
INT4 = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
    "minimax_m2": ("minimax_m2", {}),
    "mixtral": ("mixtral", {"sliding_window": 15}),
    "gpt_oss in MXFP4": ("gpt_oss", {"hidden_size": 40, "intermediate_size": 36, "quantization_config": MXFP4}),
    "gpt_oss with attention in FP8 per channel": ("gpt_oss", {"quantization_config": ROWS}),
    "qwen3_moe in FP8 blocks": ("qwen3_moe", {**WIDE, "moe_intermediate_size": 132, "quantization_config": BLOCKS}),
    "llama in FP8 blocks": ("llama", {**WIDE, "quantization_config": BLOCKS}),
    "qwen3_moe in FP8 per channel": ("qwen3_moe", {"quantization_config": ROWS}),
    "llama in FP8 per channel": ("llama", {"quantization_config": ROWS}),
    "mixtral in FP8 per tensor": ("mixtral", {"sliding_window": 15, "quantization_config": STATIC}),
    "llama in FP8 per tensor": ("llama", {"quantization_config": MODELOPT}),
    "llama in INT4, GPTQ in act order": ("llama", {**INT4, "quantization_config": of_gptq(32, sym=False, desc_act=True).config}),
    "qwen3_moe in INT4, AWQ": ("qwen3_moe", {**INT4, "moe_intermediate_size": 96, "quantization_config": of_awq(32).config}),
    "minimax_m2 in INT4, pack-quantized": ("minimax_m2", {**INT4, "quantization_config": of_compressed_tensors(32).config}),
    "mixtral in NVFP4": ("mixtral", {**INT4, "sliding_window": 15, "quantization_config": nvfp4_layouts.MODELOPT}),
    "qwen3_moe with attention in FP8 and experts in NVFP4": (
        "qwen3_moe", {**INT4, "moe_intermediate_size": 48, "quantization_config": nvfp4_layouts.FP8_AND_NVFP4}
    ),
}
DRAFTERS = ("none", "eagle3", "parallel", "tree", "window", "lookup", "right")
SLOTS, PAGE_SIZE, K = 4, 1, 4


@dataclass(frozen=True, slots=True)
class Setting:
    fp8_kv: bool
    auto_k: bool
    scarce_pages: bool

    def __str__(self) -> str:
        return f"{'FP8' if self.fp8_kv else 'plain'} K/V, K {'auto' if self.auto_k else 'fixed'}, preempted={self.scarce_pages}"


SETTINGS = (Setting(False, False, False), Setting(False, True, True), Setting(True, False, True), Setting(True, True, False))
"""Each pair of values of two fields."""


@cache
def target_of(name: str, fp8_kv: bool = False) -> Target:
    if fp8_kv:
        return in_e4m3(target_of(name))
    family, changes = TARGETS[name]
    spec = read_spec(tiny_config(family, **changes), "config.json")
    spec = spec.with_fp8_activations() if "FP8" in name else spec
    return Target(spec, Strong(spec, dtype=torch.float64, device=DEVICE), DEVICE)


@cache
def head_of(name: str) -> Head:
    spec = dummy_spec(target_of(name).spec, draft_vocab_size=19, parallel=True)
    return dummy_head(replace(spec, aux_layer_ids=(0, 1, 2)), dtype=torch.float64, device=DEVICE)


def requests_of_a_job() -> list[Request]:
    """Longer than the windows, two with a common beginning; greedy, drawn, and with penalties."""
    samplings = (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=5, repetition_penalty=1.2),
    )
    beginning = [3, 1, 4, 1, 5, 9]
    return [
        request(i, [*(beginning if i % 2 else []), 6, i, 2, 6, i], cap=10 + i, sampling=sampling, predicted=3)
        for i, sampling in enumerate(samplings)
    ]


@cache
def expected_of(name: str, fp8_kv: bool) -> dict[str, list[int]]:
    return {one.request_id: plain_tokens(target_of(name, fp8_kv), one) for one in requests_of_a_job()}


def drafter_of(kind: str, name: str, target: Target, outputs: dict[str, list[int]]) -> Drafter:
    """Of drafts of random heads few are accepted; those of "right" are the outputs."""
    by_key = {one.seed: outputs[one.request_id] for one in requests_of_a_job()}
    made: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "eagle3": lambda: ChainDrafter(head_of(name), target, K, slots=SLOTS),
        "parallel": lambda: ParallelDrafter(head_of(name), target, K, slots=SLOTS),
        "tree": lambda: TreeDrafter(head_of(name), target, TreeShape(topk=3, depth=3, nodes=8), slots=SLOTS),
        "window": lambda: WindowDrafter(target, K, slots=SLOTS, window=4, sink=1),
        "lookup": lambda: LookupDrafter(K, min_ngram=1, max_ngram=2),
        "right": lambda: ForcedDrafter(K, by_key, right=True, fixed_len=True),
    }
    return made[kind]()


@pytest.mark.parametrize(("name", "kind", "setting"), covering(tuple(TARGETS), DRAFTERS, SETTINGS, one_in=4), ids=str)
def test_tokens_are_those_of_plain_decoding(name: str, kind: str, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    target, requests = target_of(name, setting.fp8_kv), requests_of_a_job()
    expected = expected_of(name, setting.fp8_kv)
    drafter = drafter_of(kind, name, target, expected)
    longest = max(len(one.prompt_ids) + one.max_new_tokens for one in requests)
    ahead = drafter.shape.kv_per_round if isinstance(drafter, TreeDrafter) else 0
    batch = packed(
        SLOTS, max_len=longest, page_size=PAGE_SIZE, num_verified=drafter.draft_len, prefill_tokens=16, run_ahead=1,
        num_pages=1 + longest + 2 * ahead if setting.scarce_pages else 400,
    )
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    engine = make_engine(target, drafter, batch, device=DEVICE, options=RoundOptions(row_lengths=setting.auto_k))
    if setting.auto_k:
        choose_any_width(engine, monkeypatch)
    widths = widths_of(engine, monkeypatch)
    assert {done.request_id: ids_of(done) for done in engine.run(iter(requests))} == expected
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)
    assert (engine.totals.preempted > 0) == setting.scarce_pages
    assert engine.totals.accepted > 20 or kind != "right"
    assert kind == "none" or (len(widths) > 1 and RoundWidth(0) in widths) == setting.auto_k
    assert any(width.mean_len is not None for width in widths) == (setting.auto_k and kind not in ("none", "tree"))


def choose_any_width(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The width of each round, which measured times decide on a GPU, is any that has a graph there; of four rows, too."""
    if not engine.drafter.draft_len:
        return
    round_, clock = engine.executor.round, random.Random(1)
    turns = cycle(clock.sample(round_.draft_lens, len(round_.draft_lens)))
    lengths = DraftLengths(engine.drafter.draft_len, round_.draft_lens, row_lengths=round_.chances is not None)
    widths = lengths.widths(LEAST_ROWS)
    for num_rows in engine.batch.row_buckets:
        for width in widths:
            for prepare_next in (True, False):
                lengths.times.set_base(num_rows, width, 1.0, prepare_next=prepare_next)

    def pick(*_: Any) -> RoundWidth:
        draft_len = next(turns)
        return clock.choice([width for width in widths if width.draft_len == draft_len])

    monkeypatch.setattr(lengths, "_pick", pick)
    monkeypatch.setattr(RoundClock, "add", lambda *_: None)
    monkeypatch.setattr(engine.planner, "_lengths", lengths)


def widths_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> set[RoundWidth]:
    """Is filled with the widths of the rounds that run."""
    run_graph, found = engine.executor.graphs.run, set[RoundWidth]()

    def noted(shape: RoundShape) -> RoundResult:
        found.add(shape.width)
        return run_graph(shape)

    monkeypatch.setattr(engine.executor.graphs, "run", noted)
    return found
