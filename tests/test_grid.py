"""The grid: model x weight format x drafter x mode x what rows ask for. No cell changes a token.

Each cell is one run of a whole job through the engine in float64, where what differs is an error and not a rounding. The
reference decodes each request by itself; FP8 weights stay e4m3, and activations are quantised as the checkpoint says. Cells are
chosen in turn, so that these pairs all meet:

    model and format      with two drafters and two modes; models with sinks, windows and groups of layers with each drafter
    drafter               with each mode and with rows of each kind
    family with a part of its own (norms, factors, groups of experts, convolutions)     with each weight format or kind of rows

A drafter meets the weights of the model through `Target.forward` alone, so not every format meets every drafter.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
import torch

from batchspec.batch.automata import AutomataCapacity
from batchspec.distributed.collectives import Collectives
from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.block_head import BlockWeights
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
from batchspec.engine.loop.run_times import RoundClock
from batchspec.engine.rounds.draft_lengths import LEAST_ROWS, DraftLengths
from batchspec.engine.rounds.records import RoundOptions, RoundResult
from batchspec.engine.slots import expected_pages
from batchspec.engine.step import RoundShape, RoundWidth
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.model.target import Target
from batchspec.records import Request, SamplingParams
from tests.distributed.test_tensor_parallel import Loud
from tests.helpers import nvfp4_layouts
from tests.helpers.automata import EOS, VOCABULARY, automaton
from tests.helpers.block_heads import tiny_block
from tests.helpers.engines import DEVICE, VOCAB, ForcedDrafter, in_e4m3, make_engine, packed, plain_rows, request
from tests.helpers.gemma4_models import LAYER_INPUTS
from tests.helpers.int4_layouts import of_awq, of_compressed_tensors, of_gptq
from tests.helpers.models import needed
from tests.helpers.moe_models import Strong, ids_of, tiny_config
from tests.helpers.ranks import on_ranks, part_of, whole_of
from tests.model.test_dense_families import OWN
from tests.model.test_fp8 import MODELOPT, TOKEN, compressed
from tests.model.test_lora_lossless import NUM_ADAPTERS, RANK, StrongAdapters

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

# --- models and weight formats

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
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 256, "rope_theta": 100.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    **{
        name: OWN[name]
        for name in ("olmo3", "exaone4", "seed_oss", "smollm3", "granite", "granitemoehybrid", "ministral3")
    },
    "glm4_moe": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 3, "topk_group": 2,
        "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_bias": True},
    "lfm2_moe": {
        "layer_types": ["full_attention", "conv"], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "num_dense_layers": 1, "routed_scaling_factor": 1.7,
    },
    "nemotron_h": {
        **needed("nemotron_h", 4), "num_hidden_layers": 4, "mamba_head_dim": 16, "ssm_state_size": 32, "n_routed_experts": 6,
        "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 1.7,
        "moe_latent_size": 32,
    },
    "gemma4_text": {
        **LAYER_INPUTS, "global_head_dim": 32, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB,
        "sliding_window": 4, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 64,
    },
    "falcon_h1": {
        **needed("falcon_h1", 2), "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 32,
        "attention_in_multiplier": 1.5, "ssm_multipliers": [0.5, 1.0, 0.75, 1.25, 2.0], "mlp_multipliers": [1.5, 0.7],
    },
    "phi3": {**OWN["phi3"], "partial_rotary_factor": 0.75}, "glm4": OWN["glm4"], "gemma3_text": OWN["gemma3_text"],
}
IGNORED = ["lm_head", "re:.*mlp.gate$"]
WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {}, "FP8": {"quantization_config": compressed("channel", TOKEN, ignore=IGNORED)},
    "INT4": {"quantization_config": of_compressed_tensors(32, ignore=IGNORED).config},
}


def spec_of(family: str, weights: str) -> ModelSpec:
    keys = {**SIZES, **needed(family, 2), **FAMILIES[family], **WEIGHTS[weights]}
    keys |= {key: SIZES[key] for key in ("head_dim", "intermediate_size")}
    return read_spec({"model_type": family, **keys, "shared_intermediate_size": 64}, "config.json")


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    """Of TARGETS, or a family of FAMILIES."""
    weights: str = ""
    """Of WEIGHTS, of a family."""

    def __str__(self) -> str:
        return f"{self.name} in {self.weights}" if self.weights else self.name

    @property
    def spec(self) -> ModelSpec:
        if self.weights:
            spec = spec_of(self.name, self.weights)
        else:
            family, changes = TARGETS[self.name]
            spec = read_spec(tiny_config(family, **changes), "config.json")
        return spec.with_fp8_activations() if "FP8" in str(self) else spec


@cache
def target_of(model: Model, *, fp8_kv: bool = False, adapters: bool = False) -> Target:
    if fp8_kv:
        return in_e4m3(target_of(model, adapters=adapters))
    spec = model.spec
    noise = Strong(spec, dtype=torch.float64, device=DEVICE)
    if not adapters:
        return Target(spec, noise, DEVICE)
    own = StrongAdapters.of(spec, NUM_ADAPTERS, RANK)
    return Target(spec.with_lora(own.shape), noise, DEVICE, lora=own.load(spec, dtype=torch.float64, device=DEVICE))


# --- modes, rows, drafters

@dataclass(frozen=True, slots=True)
class Mode:
    fp8_kv: bool
    auto_k: bool
    scarce_pages: bool

    def __str__(self) -> str:
        return f"{'FP8' if self.fp8_kv else 'plain'} K/V, K {'auto' if self.auto_k else 'fixed'}, preempted={self.scarce_pages}"


MODES = (Mode(False, False, False), Mode(False, True, True), Mode(True, False, True), Mode(True, True, False))
"""Each pair of values of two fields."""


SLOTS, PAGE_SIZE, K = 4, 1, 4
ROW_KINDS = ("plain", "adapters", "constrained")


def requests_of(rows: str) -> list[Request]:
    """Longer than the windows and the lengths of pretraining, two with a common beginning; greedy, drawn, and with penalties."""
    samplings = (
        SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(),
        SamplingParams(temperature=0.8, top_k=5, repetition_penalty=1.2),
    )
    beginning = [3, 1, 4, 1, 5, 9]
    found = [
        request(i, [*(beginning if i % 2 else []), 6, i, 2, 6, i], cap=10 + i, sampling=sampling, predicted=3)
        for i, sampling in enumerate(samplings)
    ]
    if rows == "adapters":
        return [replace(one, adapter=i % (NUM_ADAPTERS + 1)) for i, one in enumerate(found)]
    if rows == "constrained":
        made = [automaton(pattern) for pattern in ("[a-d]*", "(ab|c)*d", "(abc|dab){2,3}", "[a-d]*")]
        return [
            replace(one, stop_ids=(EOS,), automaton=own, automaton_state=own.answer) for one, own in zip(found, made, strict=True)
        ]
    return found


DRAFTERS = ("none", "eagle3", "parallel", "tree", "window", "lookup", "right", "block")


@cache
def head_of(model: Model) -> Head:
    spec = dummy_spec(target_of(model).spec, draft_vocab_size=19, parallel=True)
    return dummy_head(replace(spec, aux_layer_ids=tuple(range(3))), dtype=torch.float64, device=DEVICE)


@cache
def block_of(model: Model) -> BlockWeights:
    spec, form = target_of(model).spec, len(model.name) % 3
    return tiny_block(spec, dflash2=True) if form == 2 else tiny_block(spec, from_anchor=form == 0)


def drafter_of(kind: str, model: Model, target: Target, outputs: dict[int, list[int]]) -> Drafter:
    """Of drafts of random heads few are accepted; those of "right" are the outputs."""
    made: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "eagle3": lambda: ChainDrafter(head_of(model), target, K, slots=SLOTS),
        "parallel": lambda: ParallelDrafter(head_of(model), target, K, slots=SLOTS),
        "block": lambda: BlockDrafter(block_of(model), target, K, slots=SLOTS),
        "tree": lambda: TreeDrafter(head_of(model), target, TreeShape(topk=3, depth=3, nodes=8), slots=SLOTS),
        "window": lambda: WindowDrafter(target, K, slots=SLOTS, window=4, sink=1),
        "lookup": lambda: LookupDrafter(K, min_ngram=1, max_ngram=2),
        "right": lambda: ForcedDrafter(K, outputs, right=True, fixed_len=True),
    }
    return made[kind]()


# --- cells

@dataclass(frozen=True, slots=True)
class Cell:
    model: Model
    drafter: str
    mode: Mode
    rows: str

    def __str__(self) -> str:
        return f"{self.model}, {self.drafter}, {self.mode}, {self.rows}"


EVERY_DRAFTER = ("gpt_oss", "mixtral")
"""Models with sinks and windows, and with windows alone, which drafters that attend must know of."""


def cells_of_targets() -> list[Cell]:
    """Each drafter takes the modes in turn; once it has met all, its rows are constrained."""
    found, met = list[Cell](), Counter[str]()
    for turn, name in enumerate(TARGETS):
        for kind in DRAFTERS if name in EVERY_DRAFTER else (DRAFTERS[turn % 8], DRAFTERS[(turn + 3) % 8]):
            found.append(Cell(Model(name), kind, MODES[met[kind] % 4], "constrained" if met[kind] > 3 else "plain"))
            met[kind] += 1
    return found


def cells_of_families() -> list[Cell]:
    """Two of the weight formats and two kinds of rows for each."""
    return [
        Cell(
            Model(family, tuple(WEIGHTS)[(i + f) % 3]), ("lookup", ("eagle3", "right", "none", "parallel")[f % 4])[i],
            MODES[0] if (i + f // 2) % 2 else Mode(False, True, False), ROW_KINDS[(2 * i + f // 3 + 1) % 3],
        )
        for f, family in enumerate(FAMILIES)
        for i in range(2)
    ]


CELLS = [*cells_of_targets(), *cells_of_families()]


def test_the_pairs_of_the_grid_meet() -> None:
    own = cells_of_targets()
    assert {cell.model.name for cell in own} == set(TARGETS)
    assert {(cell.drafter, cell.mode) for cell in own} == set(product(DRAFTERS, MODES))
    assert {(cell.drafter, cell.rows) for cell in own} == set(product(DRAFTERS, ("plain", "constrained")))
    for family in FAMILIES:
        cells = [cell for cell in cells_of_families() if cell.model.name == family]
        assert len({cell.rows for cell in cells}) == len({cell.model.weights for cell in cells}) == 2


ROOM = AutomataCapacity(num_tokens=VOCAB, table_words=1 << 17, masks_bytes=1 << 14)


def run(
    target: Target, requests: Sequence[Request], drafter: Drafter, slots: int, monkeypatch: pytest.MonkeyPatch, *,
    auto_k: bool = False, **shape: Any,
) -> tuple[dict[str, list[int]], Engine, set[RoundWidth]]:
    """The tokens, the engine, and the widths of its rounds."""
    batch = packed(slots, num_verified=drafter.draft_len, **shape)
    engine = make_engine(
        target, drafter, batch, device=DEVICE, options=RoundOptions(row_lengths=auto_k), vocabulary=VOCABULARY,
        automata_capacity=ROOM,
    )
    if auto_k:
        choose_any_width(engine, monkeypatch)
    widths = widths_of(engine, monkeypatch)
    found = {done.request_id: ids_of(done) for done in engine.run(iter(requests))}
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)
    return found, engine, widths


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_tokens_are_those_of_each_row_alone(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, requests = cell.mode, requests_of(cell.rows)
    target = target_of(cell.model, fp8_kv=mode.fp8_kv, adapters=cell.rows == "adapters")
    expected = expected_of(cell.model, mode.fp8_kv, cell.rows)
    drafter = drafter_of(cell.drafter, cell.model, target, {one.seed: expected[one.request_id] for one in requests})
    longest = max(len(one.prompt_ids) + one.max_new_tokens for one in requests)
    ahead = drafter.shape.kv_per_round if isinstance(drafter, TreeDrafter) else 0
    shape: dict[str, Any] = {"max_len": longest, "run_ahead": 1}
    if not cell.model.weights:
        pages = 1 + longest + 2 * ahead if mode.scarce_pages else 400
        shape |= {"page_size": PAGE_SIZE, "prefill_tokens": 16, "num_pages": pages}
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    found, engine, widths = run(target, requests, drafter, SLOTS, monkeypatch, auto_k=mode.auto_k, **shape)
    assert found == expected
    if cell.rows == "constrained":
        return
    assert len({token for row in expected.values() for token in row}) > 5, "too few different tokens"
    assert (engine.totals.preempted > 0) == mode.scarce_pages
    assert engine.totals.accepted > 20 or cell.drafter != "right"
    assert cell.drafter == "none" or (len(widths) > 1 and RoundWidth(0) in widths) == mode.auto_k
    assert any(width.mean_len is not None for width in widths) == (mode.auto_k and cell.drafter not in ("none", "tree"))


@cache
def expected_of(model: Model, fp8_kv: bool, rows: str) -> dict[str, list[int]]:
    """Each row by itself without drafts; a plain row by the definition."""
    target, requests = target_of(model, fp8_kv=fp8_kv, adapters=rows == "adapters"), requests_of(rows)
    if rows == "plain":
        return plain_rows(target, requests)
    with pytest.MonkeyPatch.context() as patch:
        return run(target, requests, NoDrafter(), 1, patch)[0]


def test_rows_with_adapters_write_other_tokens() -> None:
    for family in FAMILIES:
        model = Model(family, "bf16")
        changed, plain = expected_of(model, False, "adapters"), expected_of(model, False, "plain")
        assert changed["r0"] == plain["r0"]
        assert sum(changed[row] != plain[row] for row in plain) >= 2, family


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_write_what_one_process_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = list(FAMILIES).index(family)
    model, requests = Model(family, ("bf16", "INT4")[place % 2]), requests_of("plain")[:3]
    head, alone = head_of(model), run(whole_of(model.spec, Loud), requests, NoDrafter(), 1, monkeypatch)[0]
    assert len({token for row in alone.values() for token in row}) > 5, "too few different tokens"

    def on_rank(ranks: Collectives) -> dict[str, list[int]]:
        target = part_of(model.spec, ranks, Loud)
        drafters: tuple[Callable[[], Drafter], ...] = (
            lambda: LookupDrafter(K, min_ngram=1, max_ngram=2), lambda: ChainDrafter(head, target, K, slots=SLOTS),
            lambda: BlockDrafter(block_of(model), target, K, slots=SLOTS),
        )
        drafter = drafters[place // 2 % 3]()
        batch = packed(SLOTS, num_verified=K)
        return {one.request_id: ids_of(one) for one in make_engine(target, drafter, batch, device=DEVICE).run(iter(requests))}

    assert on_ranks(2, on_rank) == [alone] * 2


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
