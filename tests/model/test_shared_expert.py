"""A shared expert with its gate, as Qwen3-Next and Qwen3.5 have it; experts that a file holds in one tensor, or one by one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec.checkpoint.files import LocalFiles
from batchspec.errors import CheckpointError
from batchspec.model.given import GivenWeights
from batchspec.model.layers.base import NormForm, Shard
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.mlp.moe import MoeSpec, SharedExpert
from batchspec.model.shard import slices_of
from batchspec.model.spec import ModelSpec, load_spec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import Checkpoint, expected_shapes, judge_model, taken
from batchspec.packing.cost import num_multiplied
from tests.distributed.test_shard import FP8_BLOCK
from tests.distributed.test_tensor_parallel import IDS, LONG, Loud, assert_like_one, outputs
from tests.helpers.attentions import attentions
from tests.helpers.engines import DEVICE
from tests.helpers.models import make_checkpoint
from tests.helpers.ranks import on_ranks, part_of, whole_of
from tests.model.test_target import Runner, oracle, prompts

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 20, "vocab_size": 320, "max_position_embeddings": 256, "rope_theta": 1e4, "num_experts": 7,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True, "intermediate_size": 96,
}
ZERO_CENTRED = NormForm(offset=1.0, wide=True)


def shared(size: int = 40, **changes: Any) -> ModelSpec:
    """A Qwen3-MoE with a shared expert of this size, the attention of Qwen3.5 and its norms."""
    spec = read_spec({**SHAPE, **changes}, "config.json")
    mlp = GatedMlpSpec(hidden_size=spec.hidden_size, inner_size=size, eps=1e-6, name="mlp.shared_expert", norm=None)
    rope, layers = replace(spec.rope, rotary_dim=attentions(spec)[0].head_dim // 2), []
    for layer in spec.layers:
        assert isinstance(layer.mlp, MoeSpec)
        own = replace(layer.mlp, shared=SharedExpert(mlp=mlp, gate="mlp.shared_expert_gate"), norms=ZERO_CENTRED)
        layers.append(LayerSpec(replace(layer.attention, gated=True, norms=ZERO_CENTRED, rope=rope), (own,)))
    return replace(spec, layers=tuple(layers), norms=ZERO_CENTRED, rope=rope)


def checkpoint(folder: Path, **config: Any) -> Path:
    own = {key: value for key, value in SHAPE.items() if key not in ("model_type", "rope_theta", "norm_topk_prob", "vocab_size")}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    own |= {"layer_types": ["full_attention"] * 2, "rope_parameters": rope, "shared_expert_intermediate_size": 40}
    return make_checkpoint(folder, "qwen3_5_moe_text", **{**own, **config})


def fuse(folder: Path, experts: int = 7) -> None:
    """Replace the tensors of the experts of each layer by one of gate and up and one of down."""
    tensors = load_file(folder / "model.safetensors")
    for prefix in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        for ending in ("", "_scale_inv"):
            names = [f"{prefix}.experts.{i}.{{}}_proj.weight{ending}" for i in range(experts)]
            if names[0].format("up") in tensors:
                down = [tensors.pop(name.format("down")) for name in names]
                both = [torch.cat([tensors.pop(name.format(part)) for part in ("gate", "up")]) for name in names]
                tensors[f"{prefix}.experts.gate_up_proj{ending}"] = torch.stack(both)
                tensors[f"{prefix}.experts.down_proj{ending}"] = torch.stack(down)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "config", [{}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 7, "shared_expert_intermediate_size": 9}]
)
def test_logits_are_those_of_transformers_in_either_form_of_the_file(config: dict[str, Any], tmp_path: Path) -> None:
    folder, (ids,) = checkpoint(tmp_path, **config), prompts([50])
    spec = shared(config.get("shared_expert_intermediate_size", 40), **{k: v for k, v in config.items() if k in SHAPE})
    assert expected_shapes(spec) == {name: tuple(own.shape) for name, own in load_file(folder / "model.safetensors").items()}
    with torch.inference_mode():
        expected = oracle(folder, experts_implementation="eager")(torch.tensor([ids])).logits[0]
    found = []
    for fused in (False, True):
        if fused:
            fuse(folder)
        target = Target.load(folder, spec, dtype=torch.float32, device=CPU)
        runner = Runner.start(target, 1)
        found.append(torch.cat([runner.feed([ids[:33]])[0][0], runner.feed([ids[33:]])[0][0]]))
        torch.testing.assert_close(found[-1], expected, atol=1e-4, rtol=0)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_parts_of_the_shared_expert_and_compute_what_one_process_does(ranks: int) -> None:
    spec = shared(vocab_size=31)
    assert_like_one(spec, ranks, IDS, Loud)
    assert_like_one(spec, ranks, LONG, Loud, ends_only=True)


def test_dead_tokens_and_fp8_weights_with_quantised_activations_go_through_it_too() -> None:
    config = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 256, "quantization_config": FP8_BLOCK}
    spec = shared(256, vocab_size=31, **config).with_fp8_activations()
    alone = outputs(whole_of(spec, Loud), IDS)
    found = on_ranks(2, lambda ranks: outputs(part_of(spec, ranks, Loud), IDS))
    torch.testing.assert_close(found[0]["logits"], alone["logits"], rtol=1e-6, atol=1e-6 * float(alone["logits"].abs().max()))
    runner = Runner.start(Target.load(Path(), spec, dtype=torch.float64, device=DEVICE, dummy=True), 2)
    both, one = runner.feed([IDS[0], IDS[2]])[0], runner.feed([[], [3]])[0]
    assert all(own.isfinite().all() for own in (*both, *one))


def test_costs_count_the_shared_expert_once_a_token() -> None:
    plain, spec = read_spec(SHAPE, "config.json"), shared()
    own = 2 * 3 * 40 * 64  # of two layers: gate, up and down
    assert spec.weight_bytes(torch.float32) == plain.weight_bytes(torch.float32) + 4 * (own + 2 * 4 * 20 * 64)
    assert num_multiplied(spec) == num_multiplied(plain) + own + 2 * 4 * 20 * 64
    assert spec.experts == plain.experts == (7, 3)


# --- experts in one tensor


def tensors(folder: Path, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], Any]:
    with Checkpoint(folder, spec, dtype=dtype, device=CPU, summed=True) as source:
        return {own.name: source.stored(own.name).clone() for own in (spec.whole or spec).tensors()}, source.sums()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe fp8"])
def test_both_forms_of_a_file_have_the_same_tensors_sums_and_parts_of_ranks(family: str, tmp_path: Path) -> None:
    fp8 = family.endswith("fp8")
    sizes: dict[str, Any] = {"moe_intermediate_size": 24}
    if fp8:
        sizes = {"moe_intermediate_size": 256, "hidden_size": 128, "head_dim": 128}
    folder = make_checkpoint(tmp_path, "qwen3_moe", vocab=64, num_experts=3, num_experts_per_tok=2, **sizes)
    if fp8:
        quantised(folder)
    spec = judge_model(LocalFiles(folder))
    part = spec.sharded(Shard(1, 2))
    before, ours = tensors(folder, spec), tensors(folder, part)
    fuse(folder, 3)
    assert judge_model(LocalFiles(folder)) == spec
    for own, old in ((tensors(folder, spec), before), (tensors(folder, part), ours)):
        assert own[1] == old[1]
        assert all(torch.equal(own[0][name].float(), old[0][name].float()) for name in old[0])
    slices = slices_of(part)
    assert slices is not None
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert torch.equal(ours[0][name].float(), taken(before[0][name], slices[name]).float())


def quantised(folder: Path) -> None:
    """Weights as random e4m3 with scales of blocks."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": FP8_BLOCK}))
    stored, made, noise = load_file(folder / "model.safetensors"), {}, torch.Generator().manual_seed(3)
    for own in load_spec(folder).tensors():
        if own.dtypes == ("F8_E4M3",):
            made[own.name] = (torch.randn(own.shape, generator=noise) * 50).to(torch.float8_e4m3fn)
        else:
            made[own.name] = torch.rand(own.shape, generator=noise) if own.role == "scale" else stored[own.name]
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def test_tensors_in_memory_may_hold_all_experts(tmp_path: Path) -> None:
    """As the state_dict() of transformers' module does."""
    folder = checkpoint(tmp_path)
    fuse(folder)
    stored, spec = load_file(folder / "model.safetensors"), shared()
    given = GivenWeights(stored, spec, dtype=torch.float32, device=CPU)
    up = given.tensor("model.layers.1.mlp.experts.5.up_proj.weight")
    assert torch.equal(up, stored["model.layers.1.mlp.experts.gate_up_proj"][5, 24:])


STACKED = r"tensors: the file has a layer's experts in one tensor, .*_up_proj(_scale_inv)?; .* only experts one by one"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda own: own[:6], STACKED),
        (lambda own: own[:, :-2], r"experts\.\d\.gate_proj\.weight is \[23, 64\], config.json says \[24, 64\]"),
        (lambda own: own.transpose(1, 2).contiguous(), r"gate_proj\.weight is \[32, 48\], config.json says \[24, 64\]"),
        (lambda own: own[0], STACKED),
    ],
)
def test_experts_of_another_shape_are_refused_by_name(change: Any, said: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    fuse(folder)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({**stored, name: change(stored[name]).clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as refused:
        Target.load(folder, shared(), dtype=torch.float32, device=CPU)
    assert re.search(said, str(refused.value)), refused.value


def test_scales_of_a_block_that_gate_and_up_share_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", vocab=64, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=127)
    quantised(folder)
    fuse(folder, 3)
    with pytest.raises(CheckpointError, match=STACKED):
        judge_model(LocalFiles(folder))
