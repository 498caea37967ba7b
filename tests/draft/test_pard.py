"""A small model drafts for another one: what it proposes is what transformers computes for a whole row with masks at its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from batchspec import run as job_run
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import ModelConfig, RunConfig
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec, load_pard, read_pard
from batchspec.draft.spec import open_drafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.rounds.round import Round
from batchspec.engine.slots import expected_pages
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.layers.latent.block import LatentSpec
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.records import Request, SamplingParams
from tests.helpers.drafting import Recording
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, plain_rows, request, tiny_target
from tests.helpers.latents import latent_spec
from tests.helpers.models import make_checkpoint
from tests.helpers.moe_models import tiny_config
from tests.model.test_expert_kernels import MXFP4, kernels
from tests.model.test_fp8 import TOKEN, compressed

MASK = 30
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "qwen3": {"num_hidden_layers": 1, "head_dim": 6},
    "mistral": {"num_hidden_layers": 3, "sliding_window": 5},
}


def write(
    folder: Path, family: str = "llama", *, vocab: int = VOCAB, seed: int = 3, mask: int | None = MASK, **config: Any
) -> Path:
    """A random checkpoint with a mask token, as PARD's name it."""
    sizes = {"hidden_size": 24, "intermediate_size": 32, **FAMILIES[family], **config}
    make_checkpoint(folder, family, vocab=vocab, seed=seed, **sizes)
    if mask is not None:
        stored = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**stored, "pard_token": mask, "spd_type": "pard"}))
    return folder


def load(folder: Path) -> PardModel:
    return load_pard(folder, read_pard(folder, tiny_target().spec), dtype=torch.float64, device=DEVICE)


class Recorded(Recording, PardDrafter):
    pass


def drafter_of(folder: Path, draft_len: int, *, slots: int, parallel: bool = True) -> Recorded:
    return Recorded(load(folder), tiny_target().spec, draft_len, slots=slots, parallel=parallel)


@cache
def reference_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_drafts(folder: Path, tokens: list[int], count: int, *, parallel: bool) -> list[int]:
    """By transformers, a whole row and no cache: all drafts of one pass over masks, or a pass each."""
    model = reference_model(folder)
    if parallel:
        logits = model(torch.tensor([tokens + [MASK] * (count - 1)])).logits[0, len(tokens) - 1 :, :VOCAB]
        return [int(row.argmax()) for row in logits]
    ids = list(tokens)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1, :VOCAB].argmax()))
    return ids[len(tokens) :]


def check_drafts(folder: Path, drafter: Recorded, *, parallel: bool = True) -> None:
    assert len(drafter.seen) > 5
    for tokens, drafts in drafter.seen:
        if drafts:
            assert drafts == reference_drafts(folder, list(tokens), len(drafts), parallel=parallel)


def run(
    requests: list[Request],
    batch: PackedBatch,
    drafter: PardDrafter,
    *,
    short_cap: int = 512,
    options: RoundOptions | None = None,
    lengths: int | None = None,
    target: Target | None = None,
) -> tuple[dict[str, list[int]], Engine]:
    engine = make_engine(target or tiny_target(), drafter, batch, device=DEVICE, options=options, lengths=lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_pages, "SHORT_CAP_TOKENS", short_cap)
        done = {c.request_id: c.token_ids.tolist() for c in engine.run(iter(requests)) if c.token_ids is not None}
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)  # every page came back
    return done, engine


def mixed_requests(count: int = 5, **options: Any) -> list[Request]:
    beginning = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    rng = torch.Generator().manual_seed(0)
    prompts = [(beginning if i % 2 else []) + torch.randint(0, VOCAB, (1 + 3 * i,), generator=rng).tolist() for i in range(count)]
    return [request(i, prompt, cap=16 - i, predicted=2, **options) for i, prompt in enumerate(prompts)]


def expected_tokens(
    requests: list[Request], guesses: dict[str, list[int]], target: Target | None = None
) -> dict[str, list[int]]:
    return plain_rows(target or tiny_target(), requests, guesses)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(("family", "vocab"), [("llama", VOCAB), ("qwen3", VOCAB + 40), ("mistral", VOCAB)])
def test_drafts_are_those_of_a_plain_forward(family: str, vocab: int, parallel: bool, tmp_path: Path) -> None:
    """About half of the drafts are accepted, so rounds accept 0 .. K of them. Of a wider vocabulary the target's part counts."""
    folder = write(tmp_path / "m", family, vocab=vocab)
    drafter = drafter_of(folder, 4, slots=3, parallel=parallel)
    options = RoundOptions(synthetic=(tuple(0.8 ** (j + 1) for j in range(4)),))
    batch = packed(3, num_verified=4, prefill_tokens=7, num_pages=60, max_len=40)
    _, engine = run(mixed_requests(), batch, drafter, options=options)
    assert 5 < engine.totals.accepted < engine.totals.drafted
    check_drafts(folder, drafter, parallel=parallel)


@pytest.mark.second
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, top_k=9)])
def test_tokens_are_those_of_plain_decoding_with_preempted_rows_and_run_ahead(sampling: SamplingParams, tmp_path: Path) -> None:
    """The target drafts for itself, with masks: the first draft of a round, which follows none, is often right."""
    folder = write(tmp_path / "m", "qwen3")
    requests = [request(i, [i, 5, 7], cap=60, predicted=4, sampling=sampling) for i in range(4)]
    target = Target.load(folder, load_spec(folder), dtype=torch.float64, device=DEVICE)
    drafter = drafter_of(folder, 3, slots=4)
    batch = packed(4, num_pages=32, max_len=63, num_verified=3, run_ahead=2)
    tokens, engine = run(
        requests, batch, drafter, short_cap=2, options=RoundOptions(coupled=False), lengths=3, target=target
    )
    assert engine.totals.preempted > 0
    assert engine.totals.accepted > 20
    assert tokens == expected_tokens(requests, tokens, target)
    check_drafts(folder, drafter)


def test_the_target_as_its_own_drafter_is_always_right(tmp_path: Path) -> None:
    """A chain of the same weights is accepted whole, and the first of parallel drafts, which follows no mask, always."""
    folder = write(tmp_path / "m", max_position_embeddings=96)
    target = Target.load(folder, load_spec(folder), dtype=torch.float64, device=DEVICE)
    for parallel in (False, True):
        drafter = PardDrafter(load(folder), target.spec, 3, slots=2, parallel=parallel)
        engine = make_engine(target, drafter, packed(2, num_verified=3), device=DEVICE)
        for completion in engine.run(iter([request(i, [i, 2, 3], cap=17) for i in range(3)])):
            assert completion.stats is not None
            if not parallel:
                assert completion.stats.num_rounds == 4  # 16 tokens after the prefill's
            assert completion.stats.accepted_at[0] == completion.stats.drafted_at[0] > 3


def test_rounds_of_any_draft_length_keep_its_keys_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine chooses K of each round on a GPU: with none at all nothing is proposed, and the next drafts are right."""
    folder = write(tmp_path / "m", "mistral")
    drafter = drafter_of(folder, 4, slots=3)
    run_round = Round.run

    def lengths() -> Iterator[int]:
        while True:
            yield from (4, 0, 0, 2, 1, 0, 3)

    turns = lengths()
    monkeypatch.setattr(Round, "run", lambda self, rows, mode, *_: run_round(self, rows, mode, next(turns)))
    requests = mixed_requests()
    tokens, _ = run(requests, packed(3, num_verified=4, max_len=60), drafter)
    assert tokens == expected_tokens(requests, tokens)
    assert {len(drafts) for _, drafts in drafter.seen} >= {1, 2, 3, 4}
    check_drafts(folder, drafter)


@pytest.mark.parametrize(("family", "quantised"), [("mixtral", compressed("channel", TOKEN)), ("gpt_oss", MXFP4)])
def test_a_quantised_drafter_keeps_its_weights_where_there_are_kernels_for_them(
    family: str, quantised: dict[str, Any], tmp_path: Path
) -> None:
    """The plan counts what is kept."""
    folder, dtype = tmp_path, torch.bfloat16
    sizes = {"hidden_size": 96, "intermediate_size": 64, "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(tiny_config(family, **sizes, pard_token=MASK)))
    draft = DraftConfig(name="pard", path=str(folder), num_speculative_tokens=5)
    config = RunConfig(draft=draft, model=ModelConfig(load_format="dummy"))
    whole = load_spec(folder)
    drafter = open_drafter(config, tiny_target().spec)
    assert drafter.load(dtype=dtype, device=DEVICE).model.spec == whole
    assert drafter.weight_bytes(dtype=dtype, device=DEVICE) == whole.weight_bytes(dtype)
    with kernels(dtype):
        kept = whole.on(DEVICE, dtype)
        assert drafter.load(dtype=dtype, device=DEVICE).model.spec == kept != whole
        assert drafter.weight_bytes(dtype=dtype, device=DEVICE) == kept.weight_bytes(dtype) < whole.weight_bytes(dtype)


def test_drafts_near_the_length_limit_write_nothing_but_scratch(tmp_path: Path) -> None:
    """More drafts than the longest row has places: those past it go to the scratch page, and no token changes."""
    folder = write(tmp_path / "m")
    requests = [request(i, [1 + i, 2], cap=5) for i in range(3)]
    tokens, _ = run(requests, packed(2, page_size=2, max_len=7, num_pages=9, num_verified=9), drafter_of(folder, 9, slots=2))
    assert tokens == expected_tokens(requests, tokens)


def test_a_job_drafts_in_parallel_by_default_if_the_model_can(tmp_path: Path) -> None:
    target, masked, plain = tiny_target(), write(tmp_path / "masked"), write(tmp_path / "plain", mask=None)
    for folder, parallel, chain in ((masked, "auto", False), (masked, True, False), (masked, False, True), (plain, "auto", True)):
        config = RunConfig(draft=DraftConfig(name="pard", path=str(folder), parallel=parallel, num_speculative_tokens=3))
        spec = open_drafter(config, target.spec)
        layers = spec.layer_states(torch.float32, 4)
        assert [(layer.page_bytes, layer.window, layer.row_bytes) for layer in layers] == [(4 * 2 * 2 * 6 * 4, None, 0)] * 2
        drafter = spec.build(load(folder), target, slots=2)
        assert isinstance(drafter, PardDrafter)
        assert drafter.shape == spec.shape
        assert drafter.layer_states(4) == spec.layer_states(target.dtype, 4)
        assert (drafter._chain is not None) == chain
    config.draft.parallel = True
    with pytest.raises(ConfigError, match=r"draft.parallel=true, but .*plain names no mask token"):
        open_drafter(config, target.spec)
    with pytest.raises(ValueError, match="the model has no mask token"):
        PardDrafter(load(plain), target.spec, 3, slots=1, parallel=True)


def test_a_model_that_cannot_draft_is_refused_in_one_line(tmp_path: Path) -> None:
    target = tiny_target().spec
    folder = write(tmp_path / "m", mask=VOCAB)
    with pytest.raises(CheckpointError, match=rf"pard_token={VOCAB} must be one token id in 0 .. {VOCAB - 1}; correct it"):
        read_pard(folder, target)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, "pard_token": 3, "mask_token_id": 4}))
    with pytest.raises(CheckpointError, match="mask_token_id=4, pard_token=3 must be one token id"):
        read_pard(folder, target)
    with pytest.raises(CheckpointError, match="vocab_size 12, the target has 31: another tokenizer"):
        read_pard(write(tmp_path / "small", vocab=12, mask=3), target)


def test_a_drafter_without_gpu_kernels_is_refused_on_a_gpu_with_advice_about_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentSpec, "refuses", lambda spec, use: "has no kernels" if use == "gpu" else None)
    spec = PardSpec(model=latent_spec(), mask_token_id=None)
    assert spec.on(torch.device("cpu"), torch.bfloat16).model.layers == spec.model.layers
    said = "^draft=pard: llama has no kernels; use another draft.path or another dr"
    with pytest.raises(ConfigError, match=said):
        spec.on(torch.device("cuda"), torch.bfloat16)


@pytest.mark.second
def test_a_whole_job_drafts_with_it_and_gives_the_tokens_of_one_without(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama", vocab=97, hidden_size=32, intermediate_size=48)
    folder = write(tmp_path / "drafter", "qwen3", vocab=97, mask=96)
    pl.DataFrame({"prompt_ids": [[3 + i, 5, 8] for i in range(6)]}).write_parquet(tmp_path / "p.parquet")
    words = [
        "+job=reasoning_8k", f"model.path={tmp_path}/model", "model.max_len=64", f"input.path={tmp_path}/p.parquet",
        "decode.max_new_tokens=20", "device=cpu",
    ]
    found = []
    for name, draft in (("none", ["draft=none"]), ("pard", ["draft=pard", f"draft.path={folder}", "draft.parallel=auto"])):
        assert job_run.main([*words, *draft, f"output.dir={tmp_path}/{name}"]) == 0
        found.append(pl.read_parquet(tmp_path / name / "data" / "*.parquet").sort("row_index"))
    assert found[0]["token_ids"].equals(found[1]["token_ids"])
    assert found[1]["spec_decode"].struct.field("num_draft_tokens").sum() > 20
