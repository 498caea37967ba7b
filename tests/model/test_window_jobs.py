"""Whole jobs over checkpoints with sliding windows, and of families with blocks of their own, give what transformers computes, in
fp32.

Few pages, so that rows are preempted; prompts begin alike, so that pages are shared; drafts of several kinds. The reference reads
each whole row in one pass without a cache: a token that is its choice after all tokens before it, for every token of the output,
is its greedy output.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from batchspec import run
from batchspec.cache.groups import KVGroups
from batchspec.engine.slots import expected_pages
from batchspec.job.load import memory
from batchspec.model.spec import load_spec
from batchspec.packing import planner
from batchspec.packing.predict import LengthPredictor
from tests.helpers.gemma4_models import DENSE
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.model.test_target import oracle

OUTPUT, LONGEST, VOCAB, TOP, PAGE_SIZE = 64, 130, 320, 5, 4
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A tiny checkpoint of three layers, as transformers saves it."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    added: dict[str, Any] = field(default_factory=dict)
    """Keys that are written into config.json afterwards."""
    windows: tuple[int | None, ...]
    """Of its K/V groups in a job without a drafter."""


EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
MODELS = {
    "mistral, 11": Model(family="mistral", config={"sliding_window": 11}, windows=(11,)),
    "mistral, 40": Model(family="mistral", config={"sliding_window": 40}, windows=(40,)),
    "mistral, 1": Model(family="mistral", config={"sliding_window": 1}, windows=(1,)),
    "mistral, longer than rows": Model(family="mistral", config={"sliding_window": 200}, windows=(None,)),
    "mistral, layer types": Model(
        family="mistral", config={"sliding_window": 21}, added={"layer_types": MIXED}, windows=(None, 21),
    ),
    "qwen2, later layers": Model(
        family="qwen2", config={"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}, windows=(None, 21),
    ),
    "qwen3, layer types": Model(
        family="qwen3", config={"use_sliding_window": True, "sliding_window": 33, "layer_types": MIXED, "head_dim": 16},
        windows=(None, 33),
    ),
    "gemma3, two rotations": Model(
        family="gemma3_text",
        config={"sliding_window": 21, "sliding_window_pattern": 3, "head_dim": 18, "query_pre_attn_scalar": 20},
        windows=(None, 21),
    ),
    "gemma4": Model(
        family="gemma4_text",
        config={
            **DENSE, "sliding_window": 21, "num_hidden_layers": 3, "layer_types": MIXED[:2] + MIXED[1:2],
            "final_logit_softcapping": 8.0,
        },
        windows=(None, 21),
    ),
    "phi3, 21": Model(family="phi3", config={"sliding_window": 21, "partial_rotary_factor": 0.75}, windows=(21,)),
    "olmo2": Model(family="olmo2", windows=(None,)),
    "glm4": Model(family="glm4", config={"head_dim": 20}, windows=(None,)),
    "gpt-oss": Model(family="gpt_oss", config={"sliding_window": 21, "head_dim": 16, **EXPERTS}, windows=(None, 21)),
    "minimax": Model(family="minimax_m2", config={"head_dim": 16, "rotary_dim": 8, **EXPERTS}, windows=(None,)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> Path:
        model = MODELS[name]
        path = make_checkpoint(tmp_path_factory.mktemp("model"), model.family, vocab=VOCAB, **model.config)
        config = path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | model.added))
        return make_tokenizer(path)

    return made


def prompts() -> list[list[int]]:
    """Shorter and longer than the windows; most begin alike."""
    rng = np.random.default_rng(2)
    beginning = rng.integers(3, VOCAB, 70).tolist()
    lengths = [3, 75, 100, LONGEST, 20]
    return [(beginning if count > 70 else []) + rng.integers(3, VOCAB, count - 70 * (count > 70)).tolist() for count in lengths]


def reference(model: Any, row: list[int], prompt_len: int) -> Tensor:
    """Log-probabilities [output, V] before each token of the output."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([row]), use_cache=False).logits[0]
    return logits[prompt_len - 1 : -1].log_softmax(-1)


def write_drafter(folder: Path, model: Path) -> Path:
    spec = load_spec(model)
    design = tiny_design(spec, draft_vocab=VOCAB, heads=4, kv_heads=2, head_dim=16)
    return write_head(folder, design, random_tensors(design))


DRAFTERS: dict[str, list[str]] = {
    "lookup": ["draft=lookup", "draft.prompt_lookup_min=1"],
    "always right": ["draft=window", "draft.window=200", "draft.num_speculative_tokens=3"],
    "head": ["draft=eagle3", "draft.num_speculative_tokens=3"],
    "narrow head": ["draft=eagle3", "draft.num_speculative_tokens=3", "draft.window=7", "draft.sink_tokens=0"],
    "head in e4m3": ["draft=eagle3", "draft.num_speculative_tokens=3", "draft.cache_dtype=fp8"],
    "tree in e4m3": [
        "draft=eagle3",
        "draft.tree.topk=3",
        "draft.tree.depth=3",
        "draft.tree.nodes=9",
        "draft.cache_dtype=fp8",
        "draft.window=9",
    ],
    "tree": ["draft=eagle3", "draft.tree.topk=3", "draft.tree.depth=3", "draft.tree.nodes=9"],
}
JOBS = [
    ("mistral, 11", "lookup", 62),
    ("mistral, 11", "tree", 62),
    ("mistral, 40", "always right", 56),
    ("mistral, 40", "head in e4m3", 56),
    ("phi3, 21", "tree in e4m3", 62),
    ("mistral, 1", "narrow head", 56),
    ("mistral, longer than rows", "lookup", 62),
    ("mistral, layer types", "head", 62),
    ("qwen2, later layers", "always right", 62),
    ("qwen3, layer types", "lookup", 62),
    ("gemma3, two rotations", "head", 62),
    ("gemma4", "head", 62),
    ("gemma4", "always right", 62),
    ("gemma4", "tree in e4m3", 62),
    ("phi3, 21", "lookup", 62),
    ("olmo2", "lookup", 62),
    ("glm4", "always right", 62),
    ("gpt-oss", "head", 62),
    ("minimax", "lookup", 62),
]
"""Model, drafter, and a number of pages with which rows preempt each other."""
QUICK = [
    ("mistral, 40", "head in e4m3"),
    ("mistral, 11", "tree"),
    ("mistral, layer types", "head"),
    ("qwen2, later layers", "always right"),
]
"""Jobs of one window, of two groups, of a windowed model that drafts and of a head in e4m3; the others run with -m slow."""


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "drafter", "pages"),
    [pytest.param(*job, marks=() if job[:2] in QUICK else pytest.mark.slow, id=f"{job[0]}, {job[1]}") for job in JOBS],
)
def test_tokens_and_probabilities_of_a_job_equal_those_of_transformers(
    name: str, drafter: str, pages: int, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = MODELS[name], folder(name)
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 0)  # slots are given out by predicted lengths, far too short
    monkeypatch.setattr(LengthPredictor, "predict", lambda self, most: 1)
    monkeypatch.setattr(planner, "PAGE_SIZE", PAGE_SIZE)
    monkeypatch.setattr(memory, "PAGE_SIZE", PAGE_SIZE)
    groups: list[KVGroups] = []
    of = KVGroups.of

    def kept(*args: Any) -> KVGroups:
        groups.append(of(*args))
        return groups[-1]

    monkeypatch.setattr(KVGroups, "of", kept)
    pl.DataFrame({"prompt_ids": prompts()}).write_parquet(tmp_path / "in.parquet")
    own = [f"draft.path={write_drafter(tmp_path / 'head', path)}"] if "eagle3" in DRAFTERS[drafter][0] else []
    assert run.main([
        f"model.path={path}", "model.dtype=float32", f"input.path={tmp_path / 'in.parquet'}", f"output.dir={tmp_path / 'out'}",
        f"decode.max_new_tokens={OUTPUT}", "decode.ignore_eos=true", "decode.stop=[never said]", f"output.logprobs={TOP}",
        "packing.max_num_seqs=4", f"packing.pages={pages}", "packing.max_num_batched_tokens=90", "packing.run_ahead=1",
        *DRAFTERS[drafter], *own,
    ]) == 0

    frame = pl.read_parquet(tmp_path / "out/data")
    transformers = oracle(path)
    for prompt, (ids, top) in zip(prompts(), frame.select("token_ids", "top_logprobs").iter_rows(), strict=True):
        assert len(ids) == OUTPUT
        expected = reference(transformers, prompt + ids, len(prompt))
        assert expected.argmax(1).tolist() == ids
        found = torch.tensor([[one["logprob"] for one in place] for place in top])
        places = torch.tensor([[one["id"] for one in place] for place in top])
        torch.testing.assert_close(found, expected.gather(1, places), atol=1e-4, rtol=0)
    (log,) = (tmp_path / "out/_batchspec/logs").glob("run-*.json")
    facts = json.loads(log.read_text())
    assert facts["preempted"] > 0
    assert frame["usage"].struct.field("cached_tokens").sum() > 0
    assert set(model.windows) <= set(groups[-1].windows)
    assert facts["mean_acceptance_length"] > (2 if drafter == "always right" else 0)


@pytest.mark.parametrize(
    "name", ["mistral, 11", "qwen2, later layers", pytest.param("qwen3, layer types", marks=pytest.mark.slow)]
)
def test_a_window_of_one_key_more_or_less_would_show(name: str, folder: Any) -> None:
    """transformers' own rule is what the jobs are compared with: the window counts the query itself."""
    path, row = folder(name), prompts()[3]
    window = MODELS[name].config["sliding_window"]
    same, *others = (reference(oracle(path, sliding_window=size), row, 1) for size in (window, window - 1, window + 1))
    assert torch.equal(same, reference(oracle(path), row, 1))
    for other in others:
        assert torch.equal(other[: window - 2], same[: window - 2])
        assert (other - same).abs().max() > 0.01
