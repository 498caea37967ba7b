"""Attention with an output gate, as Qwen3-Next and Qwen3.5 have it: logits of transformers, ranks, adapters and FP8 weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchspec.model.layers.base import NormForm, Shard
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.lora import open_adapter
from batchspec.model.lora_products import AdapterSet
from batchspec.model.shard import slices_of
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import expected_shapes
from tests.distributed.test_shard import FP8_BLOCK, size_of
from tests.distributed.test_tensor_parallel import IDS, LONG, Loud, assert_like_one
from tests.helpers.attentions import attentions
from tests.helpers.engines import DEVICE
from tests.helpers.models import make_checkpoint
from tests.model.test_lora import make_adapter, products
from tests.model.test_target import Runner, oracle, prompts

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 20, "vocab_size": 320, "max_position_embeddings": 256, "rope_theta": 1e4,
}
ZERO_CENTRED = NormForm(offset=1.0, wide=True)


def gated(**changes: Any) -> ModelSpec:
    """A Qwen3 with gates, norms of 1 + weight, and 10 of the 20 values of a head rotated."""
    spec = read_spec({**SHAPE, **changes}, "config.json")
    rope = replace(spec.rope, rotary_dim=attentions(spec)[0].head_dim // 2)
    layers = tuple(
        LayerSpec(replace(layer.attention, gated=True, norms=ZERO_CENTRED, rope=rope), (replace(layer.mlp, norms=ZERO_CENTRED),))  # type: ignore[type-var]
        for layer in spec.layers
    )
    return replace(spec, layers=layers, norms=ZERO_CENTRED, rope=rope)


def checkpoint(folder: Path, **config: Any) -> Path:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "head_dim": 20, "rope_parameters": rope, **config}
    return make_checkpoint(folder, "qwen3_5_text", **config)


@pytest.mark.parametrize(
    "config", [{}, {"attention_bias": True, "num_key_value_heads": 1}, {"num_attention_heads": 6, "num_key_value_heads": 3}]
)
def test_logits_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    """In one pass, in passes of a few tokens, and of the last token alone."""
    folder, (ids,) = checkpoint(tmp_path, **config), prompts([60])
    spec = gated(**config)
    assert expected_shapes(spec) == {name: tuple(own.shape) for name, own in load_file(folder / "model.safetensors").items()}
    with torch.inference_mode():
        expected = oracle(folder)(torch.tensor([ids])).logits[0]
    target = Target.load(folder, spec, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(Runner.start(target, 1).feed([ids])[0][0], expected, atol=1e-4, rtol=0)
    runner = Runner.start(target, 1)
    found = [runner.feed([ids[i : i + 7]])[0][0] for i in range(0, 49, 7)]
    torch.testing.assert_close(torch.cat(found), expected[:49], atol=1e-4, rtol=0)
    (last,), _ = runner.feed([ids[49:]], ends_only=True)
    torch.testing.assert_close(last, expected[-1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}])
def test_ranks_have_whole_heads_with_their_gates_and_compute_what_one_process_does(ranks: int, changes: dict[str, Any]) -> None:
    spec = gated(vocab_size=31, **changes)
    assert_like_one(spec, ranks, IDS, Loud)
    assert_like_one(spec, ranks, LONG, Loud, ends_only=True)


@pytest.mark.parametrize("quantises", [False, True])
def test_fp8_blocks_of_queries_and_gates_stay_whole(quantises: bool) -> None:
    spec = gated(vocab_size=31, hidden_size=256, intermediate_size=512, head_dim=128, quantization_config=FP8_BLOCK)
    part = spec.sharded(Shard(1, 2))
    slices = slices_of(part)
    assert slices is not None
    q = "model.layers.0.self_attn.q_proj"
    assert slices[f"{q}.weight"] == ((slice(512, 1024), slice(0, 256)),)
    assert slices[f"{q}.weight_scale_inv"] == ((slice(4, 8), slice(0, 2)),)
    shapes, own = expected_shapes(spec), expected_shapes(part)
    assert {name: size_of(shapes[name], slices[name]) for name in own if "layers" in name} == {
        name: shape for name, shape in own.items() if "layers" in name
    }
    if quantises:
        target = Target.load(Path(), spec.with_fp8_activations(), dtype=torch.float64, device=DEVICE, dummy=True)
        assert Runner.start(target, 1).feed([IDS[0]])[0][0].isfinite().all()
    else:
        assert_like_one(spec, 2, IDS)


def test_an_adapter_of_q_proj_changes_queries_and_gates_as_transformers_does(tmp_path: Path) -> None:
    """Merged into the weights, and added to the products of its rows."""
    folder, (ids,) = checkpoint(tmp_path / "base"), prompts([40])
    adapter = make_adapter(tmp_path / "adapter", folder, ["q_proj", "o_proj"])
    model, spec = oracle(folder), gated()
    with torch.inference_mode():
        for name, added in products(adapter, {"q_proj": 2.0, "o_proj": 2.0}).items():
            model.get_submodule(name).weight.add_(added)
        expected = model(torch.tensor([ids])).logits[0]
    merged = open_adapter(str(adapter), spec)
    target = Target.load(folder, spec, dtype=torch.float32, device=CPU, adapter=merged)
    torch.testing.assert_close(Runner.start(target, 1).feed([ids])[0][0], expected, atol=1e-4, rtol=0)
    of_rows = AdapterSet((open_adapter(str(adapter), spec, per_row=True),), ("own",))
    target = Target.load(folder, spec.with_lora(of_rows.shape), dtype=torch.float32, device=CPU, adapters=of_rows)
    base, own = Runner.start(target, 2).feed([ids, ids], adapters=[0, 1])[0]
    torch.testing.assert_close(own, expected, atol=1e-4, rtol=0)
    assert not torch.allclose(base, own, atol=1e-2)
