"""Draft heads of targets with experts: published ones by imitations of their config.json and tensors, and trained ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchspec import cli, run
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.weights import dummy_head, dummy_spec, load_head, read_head_spec
from batchspec.errors import CheckpointError
from batchspec.model.fused import rms_norm
from batchspec.model.target import Target
from batchspec.records import SamplingParams
from tests.commands.test_probe import distilled, probed
from tests.helpers import drafting
from tests.helpers.drafting import Recording, check_proposals
from tests.helpers.eagle_reference import reference_drafts
from tests.helpers.engines import DEVICE, make_engine, packed, request
from tests.helpers.heads import config_of, random_tensors, tiny_design, write_head
from tests.helpers.models import make_checkpoint
from tests.helpers.moe_models import ids_of, tiny_moe

pytestmark = pytest.mark.second

LAYERS = 12
MODELOPT = {
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "next_layer_regular": True, "parallel_draft_step": 1, "has_lm_head": True,
}
"""What NVIDIA's exporter writes besides the layers (Model-Optimizer, export/plugins/hf_spec_export.py)."""
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SPECULATORS = {
    "algorithm": "eagle3", "default_proposal_method": "greedy",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
    "verifier": {"name_or_path": "openai/gpt-oss-20b", "architectures": ["GptOssForCausalLM"]},
}


def gpt_oss() -> Target:
    return tiny_moe("gpt_oss", num_hidden_layers=LAYERS)


def imitation(folder: Path, *, layout: str = "flat", design: dict[str, Any], changes: dict[str, Any]) -> Path:
    """A head of the design, its config.json changed; None takes a key out."""
    made = tiny_design(gpt_oss().spec, **design)
    write_head(folder, made, random_tensors(made), layout=layout)
    config = config_of(made, layout) | changes
    for key in ("norm_before_fc", "fc_norm", "norm_before_residual", "eagle_aux_hidden_state_layer_ids"):
        config = config if key in changes or layout == "speculators" else {k: v for k, v in config.items() if k != key}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def without(folder: Path, *names: str) -> Path:
    """The same folder without these tensors."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in names}, folder / "model.safetensors")
    return folder


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # nvidia/gpt-oss-120b-Eagle3-long-context: no layer ids, so the usual ones
    "nvidia long-context": (
        {
            "design": {"taps": (2, 6, 9)},
            "changes": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True, **MODELOPT}},
        },
        {"aux_layer_ids": (2, 6, 9), "input_norm": False, "final_hidden": False},
    ),
    # nvidia/gpt-oss-120b-Eagle3-v3: boundaries 24, 30 and 36 of 36 layers, a norm before fc, a window
    "nvidia v3": (
        {
            "design": {"taps": (8, 10, 12), "norm_before_fc": True, "windows": (128,)},
            "changes": {
                "eagle_aux_hidden_state_layer_ids": [8, 10, 12], "norm_before_fc": True, "target_layer_count": LAYERS,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [8, 10, 12], "use_aux_hidden_state": True, **MODELOPT},
                "rope_scaling": YARN, "max_position_embeddings": 131072,
            },
        },
        {"aux_layer_ids": (8, 10, 12), "input_norm": True, "windows": (128,)},
    ),
    # RedHatAI/gpt-oss-20b-speculator.eagle3: speculators, a norm before fc, the residual stream from the normed feature
    "Red Hat": (
        {
            "layout": "speculators", "design": {"taps": (2, 6, 9), "norm_before_fc": True, "norm_before_residual": True},
            "changes": {
                "eagle_aux_hidden_state_layer_ids": None, "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "norm_output": None,
                "fc_norm": None, "speculators_version": "0.3.0", "speculators_config": SPECULATORS, "target_hidden_size": None,
                "embed_requires_grad": False, "tie_word_embeddings": False,
            },
        },
        {"aux_layer_ids": (2, 6, 9), "input_norm": True, "norm_before_residual": True, "layout": "speculators"},
    ),
    # amazon/GPT-OSS-20B-P-EAGLE: four layers, a mask, all of the target's tokens under a d2t of zeros, an embedding of its own
    "Amazon P-EAGLE": (
        {
            "design": {
                "taps": (2, 6, 9), "layers": 4, "windows": (None,) * 4, "mask_id": 30, "draft_vocab": 31, "own_embedding": True
            },
            "changes": {
                "rope_scaling": LLAMA3, "ptd_token_id": 30, "parallel_drafting": True, "architectures": ["LlamaForCausalLM"]
            },
        },
        {"aux_layer_ids": (2, 6, 9), "num_layers": 4, "mask_token_id": 30, "own_embedding": True, "draft_vocab_size": 31},
    ),
    # configs/gpt-oss-20B-eagle3-dense.json of SpecForge: the target's family and experts named, outputs of layers 1, 11, 21
    "SpecForge dense": (
        {
            "design": {"taps": (2, 6, 9)},
            "changes": {
                "model_type": "gpt_oss", "num_local_experts": 16, "experts_per_token": 4, "pad_token_id": 0, "rope_theta": None,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]},
            },
        },
        {"aux_layer_ids": (2, 6, 9)},
    ),
    # nebius/EAGLE3-gpt-oss-20b: another name of the draft vocabulary, yarn
    "nebius": (
        {
            "design": {"taps": (2, 6, 9)},
            "changes": {
                "architectures": ["LlamaForCausalLM"], "truncated_vocab_size": 19, "draft_vocab_size": None, "rope_scaling": YARN
            },
        },
        {"aux_layer_ids": (2, 6, 9), "draft_vocab_size": 19, "own_head": True},
    ),
    # Dogacel/specdrift-gpt-oss-20b-eagle3: EAGLE-3.1, a norm for each of more aux hidden states, the normed state fed back
    "specdrift": (
        {
            "design": {"taps": (2, 5, 8, 11), "fc_norm": True, "norm_output": True},
            "changes": {
                "architectures": ["Eagle3LlamaForCausalLM"], "fc_norm": True, "eagle_aux_hidden_state_layer_ids": [2, 5, 8, 11],
                "num_aux_hidden_states": 4,
            },
        },
        {"aux_layer_ids": (2, 5, 8, 11), "fc_norm": True, "feed_normed": True},
    ),
}
"""Name -> the imitation, and what it is read as."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_heads_of_gpt_oss_are_read_and_draft(name: str, tmp_path: Path) -> None:
    """And no token depends on them: the target's own are found without one."""
    made, facts = PUBLISHED[name]
    target = gpt_oss()
    head = load_head(imitation(tmp_path / "head", **made), target.spec, dtype=torch.float64, device=DEVICE)
    assert {key: getattr(head.spec, key) for key in facts} == facts
    assert_drafts_change_nothing(target, head)


def assert_drafts_change_nothing(target: Target, head: Head) -> None:
    kind = ChainDrafter if head.spec.mask_token_id is None else ParallelDrafter
    found = []
    for drafter in (NoDrafter(), kind(head, target, 3, slots=2)):
        engine = make_engine(target, drafter, packed(2, num_verified=3), device=DEVICE)
        asked = [request(i, [i, 2, 3, i], cap=8, sampling=SamplingParams(temperature=i % 2)) for i in range(3)]
        found.append({done.request_id: ids_of(done) for done in engine.run(iter(asked))})
    assert found[0] == found[1]


def final_hidden_head(folder: Path) -> Path:
    """nvidia/gpt-oss-120b-Eagle3-short-context: no aux hidden states, no fc."""
    eagle = {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": False, **MODELOPT}
    design = {"taps": (LAYERS,), "windows": (None,)}
    return without(imitation(folder, design=design, changes={"eagle_config": eagle}), "fc.weight")


@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_a_head_of_the_final_hidden_state_is_one_with_the_target_s_norm_and_no_fc(kind: str, tmp_path: Path) -> None:
    """Its drafts are those of a head that reads the last boundary through the same norm and an fc that changes nothing."""
    target = gpt_oss()
    head = load_head(final_hidden_head(tmp_path / "head"), target.spec, dtype=torch.float64, device=DEVICE)
    assert (head.spec.final_hidden, head.spec.aux_layer_ids) == (True, (LAYERS,))
    unit = torch.eye(target.spec.hidden_size, dtype=torch.float64)
    same = {"fc.weight": unit, "input_norm.weight": target.final_norm.clone()}
    spec = replace(head.spec, rms_eps=target.spec.rms_eps)
    heads = [replace(head, spec=spec)]
    heads.append(Head(replace(spec, final_hidden=False, input_norm=True), head.tensors | same, head.map_ids))
    if kind == "parallel":  # the other head norms its mask, so it has the one whose norm is this one's
        mask = torch.randn(1, target.spec.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        masks = [rms_norm(mask.clone(), target.final_norm, spec.rms_eps), mask]
        heads = [
            replace(one, spec=replace(one.spec, mask_token_id=5), tensors=one.tensors | {"mask_hidden": own})
            for one, own in zip(heads, masks, strict=True)
        ]
    seen = []
    for one in heads:
        made = recorded(ChainDrafter if kind == "chain" else ParallelDrafter)(one, target, 3, slots=2)
        run_once(target, made)
        seen.append(made.seen)
    assert seen[0] == seen[1]
    assert_drafts_change_nothing(target, heads[0])


def recorded(kind: Callable[..., Any]) -> Any:
    return type("Recorded", (Recording, kind), {})  # type: ignore[arg-type]


def run_once(target: Target, drafter: Any) -> None:
    engine = make_engine(target, drafter, packed(2, num_verified=3), device=DEVICE)
    assert len(list(engine.run(iter([request(i, [i, 2, 3, i, 2], cap=10) for i in range(3)])))) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GptOssForCausalLMEagle3"], "model_type": "gpt_oss"}, "of the head is not supported"),  # experts
        ({"model_type": "gpt_oss", "architectures": ["LlamaForCausalLM"]}, "model_type 'gpt_oss' of the head is not supported"),
        ({"truncated_vocab_size": 20}, "draft_vocab_size=19, truncated_vocab_size=20 must be equal"),
        ({"num_local_experts": 4}, "num_local_experts=4"),
        ({"eagle_config": {"use_aux_hidden_state": False}, "norm_before_fc": True}, "nothing to norm"),
        ({"eagle_config": {"parallel_draft_step": 3}}, "not supported: eagle_config.parallel_draft_step=3"),  # Medusa heads
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_head_spec(imitation(tmp_path / "head", design={"taps": (2, 6, 9)}, changes=changes), gpt_oss().spec)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen3_moe", "minimax_m2"])
def test_aux_hidden_states_of_experts_give_the_drafts_of_the_definition(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_moe(family)
    design = tiny_design(target.spec, norm_before_fc=True)
    tensors = random_tensors(design, seed=3)
    head = head_of(target, design.taps, tensors)
    made = recorded(ChainDrafter)(head, target, 3, slots=2)
    run_once(target, made)
    monkeypatch.setattr(drafting, "TARGET", lambda: target)
    check_proposals(made.seen, reference_drafts, design, tensors)


def head_of(target: Target, taps: tuple[int, ...], tensors: dict[str, Tensor]) -> Head:
    design = tiny_design(target.spec)
    spec = replace(
        dummy_spec(target.spec, draft_vocab_size=19), aux_layer_ids=taps, input_norm=True, num_heads=design.heads,
        num_kv_heads=design.kv_heads, head_dim=design.head_dim, intermediate_size=design.inner, rms_eps=design.eps,
        rope=replace(dummy_spec(target.spec).rope, type="default", theta=design.theta, factor=1.0, attention_factor=1.0),
    )
    made = dummy_head(spec, dtype=torch.float64, device=DEVICE)
    hot = (tensors["d2t"] + torch.arange(19)).int()
    return Head(spec, {name: tensors[name] for name in made.tensors}, hot)


SMALL: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module", params=SMALL)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model with experts, prompts, and what a job without a drafter made of them."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder / "model", request.param, vocab=96, hidden_size=32, intermediate_size=32, **SMALL[request.param])
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, 3 + i % 5).tolist() for i in range(12)]
    pl.DataFrame({"prompt_ids": prompts}).write_parquet(folder / "prompts.parquet")
    assert run.main(words(folder, "out", "draft=none")) == 0
    return folder


def words(folder: Path, out: str, *overrides: str) -> list[str]:
    return [
        f"model.path={folder / 'model'}", f"input.path={folder / 'prompts.parquet'}", f"output.dir={folder / out}", "device=cpu",
        "decode.max_new_tokens=20", "packing.max_num_seqs=6", "output.token_ids=true", *overrides,
    ]


def test_a_head_trained_for_experts_drafts_and_changes_no_token(made: Path) -> None:
    train = ["train.steps=150", "train.held_out=2", "train.batch_tokens=700", "train.max_len=64", "train.ahead=3", "device=cpu"]
    model, rows, head = f"model.path={made / 'model'}", f"input.path={made / 'out'}", f"output.dir={made / 'head'}"
    assert cli.main(["train", model, rows, head, "draft=eagle3", *train]) == 0
    assert run.main(words(made, "drafted", "draft=eagle3", f"draft.path={made / 'head'}", "draft.num_speculative_tokens=3")) == 0
    plain, drafted = (pl.read_parquet(made / out / "data") for out in ("out", "drafted"))
    alike = ["request_id", "token_ids", "finish_reason"]
    assert plain.select(alike).equals(drafted.select(alike))
    counts = drafted["spec_decode"].struct.unnest()
    assert float(counts["num_accepted_draft_tokens"].sum()) > 0.5 * float(
        counts["num_spec_steps"].sum()
    )  # of what it knows by heart


def test_the_probe_finds_the_boundaries_of_a_head_of_gpt_oss(tmp_path: Path, capsys: Any) -> None:
    """Ids in the other convention under experts; and what the head of the final hidden state reads is said."""
    folder = tmp_path / "model"
    shape: dict[str, Any] = {**SMALL["gpt_oss"], "initializer_range": 0.5}
    make_checkpoint(folder, "gpt_oss", vocab=48, hidden_size=16, intermediate_size=32, num_hidden_layers=5, **shape)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 48, 3 + i).tolist() for i in range(5)]
    pl.DataFrame({"prompt_ids": prompts}).write_parquet(tmp_path / "prompts.parquet")
    design, tensors = distilled(folder, taps=(3, 4, 5))
    head = write_head(tmp_path / "head", design, tensors)
    config = json.loads((head / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    (head / "config.json").write_text(json.dumps(config))
    verdict = probed(folder, head, capsys)[-2]
    assert verdict.startswith("verdict   the head was trained with boundaries 3, 4, 5, ")
    assert verdict.endswith("; set draft.aux_layers=output")
    config |= {"eagle_config": {"use_aux_hidden_state": False}}
    (head / "config.json").write_text(json.dumps(config))
    lines = probed(folder, head, capsys)
    assert any("the final hidden state, residual from" in line for line in lines)
    assert not any("boundaries" in line for line in lines)
