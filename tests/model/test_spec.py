"""config.json: both spellings, defaults, windows, end tokens; what is not supported is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.errors import CheckpointError
from batchspec.model.layers.attention.rope import rope_angles, rope_frequencies
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.spec import ModelSpec, load_spec
from tests.helpers.attentions import attentions, windows
from tests.helpers.models import make_checkpoint

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def spec_of(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_spec(folder)


def refusal(folder: Path, config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        spec_of(folder, config)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


# --- shapes


def flags(spec: ModelSpec) -> dict[str, bool]:
    """What the blocks of all layers have in common."""
    (attention,), (mlp,) = set(attentions(spec)), {layer.mlp for layer in spec.layers}
    assert isinstance(mlp, GatedMlpSpec)
    names = ("qkv_bias", "o_bias", "qk_norm")
    return {name: getattr(attention, name) for name in names} | {"mlp_bias": mlp.bias}


def test_a_plain_llama(folder: Path) -> None:
    spec = spec_of(folder, {**LLAMA, "torch_dtype": "bfloat16", "tie_word_embeddings": True})
    assert (spec.family, spec.num_layers, attentions(spec)[0].head_dim, attentions(spec)[0].num_kv_heads) == ("llama", 4, 16, 2)
    assert (spec.dtype, spec.tie, spec.max_len, spec.rms_eps) == ("bfloat16", True, 4096, 1e-5)
    assert windows(spec) == (None,) * 4
    assert flags(spec) == {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}


def test_families_differ_in_biases_and_norms(folder: Path) -> None:
    llama = spec_of(folder, {**LLAMA, "attention_bias": True, "mlp_bias": True})
    qwen2, qwen3 = spec_of(folder, QWEN2), spec_of(folder, QWEN3)
    assert flags(llama) == {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": False}
    assert flags(qwen2) == {"qkv_bias": True, "o_bias": False, "mlp_bias": False, "qk_norm": False}
    assert flags(qwen3) == {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": True}
    assert attentions(qwen3)[0].head_dim == 128


def test_missing_keys_mean_what_transformers_means_by_them(folder: Path) -> None:
    optional = ("num_key_value_heads", "rms_norm_eps", "hidden_act", "architectures")
    spec = spec_of(folder, {key: value for key, value in LLAMA.items() if key not in optional})
    assert attentions(spec)[0].num_kv_heads == 4
    assert (spec.rms_eps, spec.rope.theta, spec.dtype, spec.tie) == (1e-6, 10_000.0, "float32", False)


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_both_spellings_of_the_dtype(spelling: str, folder: Path) -> None:
    assert spec_of(folder, {**LLAMA, spelling: "float16"}).dtype == "float16"


# --- end tokens


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 6], None, (5, 6)),
        (2, {"eos_token_id": [7, 2, 9]}, (7, 2, 9)),
        ([2, 3], {"eos_token_id": 3}, (3, 2)),
        (None, {"eos_token_id": 4}, (4,)),
        (None, {}, ()),
        (0, {"eos_token_id": None}, (0,)),
    ],
)
def test_end_tokens_are_those_of_both_files(config: Any, generation: Any, expected: tuple[int, ...], folder: Path) -> None:
    assert spec_of(folder, {**LLAMA, "eos_token_id": config}, generation).eos_ids == expected


def test_generation_defaults_that_are_set(folder: Path) -> None:
    spec = spec_of(folder, LLAMA, {"temperature": 0.6, "top_p": 0.9, "top_k": None, "do_sample": True, "use_cache": True})
    assert spec.generation == {"temperature": 0.6, "top_p": 0.9, "do_sample": True}


# --- windows


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**MISTRAL, "sliding_window": 32}, (32,) * 4),
        ({**MISTRAL, "sliding_window": None}, (None,) * 4),
        (MISTRAL, (4096,) * 4),
        ({**QWEN2, "sliding_window": 32, "max_window_layers": 3}, (None,) * 4),
        ({**QWEN2, "sliding_window": 32, "max_window_layers": 3, "use_sliding_window": True}, (None, None, None, 32)),
        ({**QWEN3, "sliding_window": 32, "use_sliding_window": True, "layer_types": [FULL, SLIDING] * 2}, (None, 32) * 2),
        ({**QWEN3, "sliding_window": 32, "use_sliding_window": False, "layer_types": [FULL] * 4}, (None,) * 4),
        ({**MISTRAL, "sliding_window": 32, "layer_types": [SLIDING, FULL] * 2}, (32, None) * 2),
    ],
)
def test_which_layers_have_a_window(config: dict[str, Any], expected: tuple[int | None, ...], folder: Path) -> None:
    assert windows(spec_of(folder, config)) == expected


@pytest.mark.parametrize("types", [[FULL] * 3, ["chunked_attention"] * 4, ["linear_attention", FULL, FULL, FULL], [SLIDING] * 4])
def test_other_layer_types_and_a_window_without_a_size_are_refused(types: list[str], folder: Path) -> None:
    assert "layer_types" in refusal(folder, {**QWEN3, "layer_types": types})


# --- rotary embedding

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, own attention factor": {**YARN, "attention_factor": 1.5},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, betas": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    "yarn, no factor": {"factor": None, "original_max_position_embeddings": 2048},
}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name: str, folder: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": name.split(",")[0], "rope_theta": 50_000.0, **ROPES[name]}
    config = {**LLAMA, "head_dim": 64, "rope_parameters": rope}
    spec = spec_of(folder, config)
    positions = torch.tensor([0, 1, 100, 4095])
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**config))(torch.zeros(1), positions[None])
    ours = rope_angles(positions, rope_frequencies(spec.rope, 64), spec.rope.attention_factor, torch.float32)
    negated = torch.cat((-sin[0, :, :32], sin[0, :, 32:]), 1)
    torch.testing.assert_close(ours[0].squeeze(1), cos[0], atol=2e-3, rtol=0)  # angles of thousands, in fp32
    torch.testing.assert_close(ours[1].squeeze(1), negated, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ROPES)
def test_both_spellings_of_the_rope_give_the_same_spec(name: str, folder: Path) -> None:
    kind = name.split(",")[0]
    new = spec_of(folder, {**LLAMA, "rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **ROPES[name]}})
    old = spec_of(folder, {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": kind, **ROPES[name]}})
    oldest = spec_of(folder, {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": kind, **ROPES[name]}})
    assert new.rope == old.rope == oldest.rope
    assert new.rope.theta == 5e5


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"type": "longrope", "factor": 2.0}, "longrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_parameters.low_freq_factor is null; it must be a number in 0.001"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
    ],
)
def test_other_ropes_are_refused_by_name(rope: dict[str, Any], named: str, folder: Path) -> None:
    assert named in refusal(folder, {**LLAMA, "rope_parameters": rope})


# --- refusals


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, 'model_type="gpt2" is not supported'),
        ({"model_type": None}, "model_type=null is not supported"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8 with quantization_config.weight_block_size=null;"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu"'),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"logit_scale": 0.1}, "logit_scale=0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"sliding_window": 128}, "sliding_window=128"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"hidden_size": "64"}, 'hidden_size is "64"'),
        ({"num_hidden_layers": None}, "num_hidden_layers is null"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], named: str, folder: Path) -> None:
    assert named in refusal(folder, {**LLAMA, **changes})


def test_every_refused_key_is_named_at_once(folder: Path) -> None:
    message = refusal(folder, {**LLAMA, "num_local_experts": 8, "final_logit_softcapping": 30.0, "hidden_act": "relu"})
    assert 'num_local_experts=8, final_logit_softcapping=30.0, hidden_act="relu"' in message


def test_neutral_values_of_those_keys_are_fine(folder: Path) -> None:
    neutral = {"quantization_config": None, "logit_scale": 1.0, "use_mrope": False, "partial_rotary_factor": 1.0}
    assert spec_of(folder, {**LLAMA, **neutral}) == spec_of(folder, LLAMA)


def test_code_that_the_folder_names_is_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'executed')!r}, 'w')")
    named = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.LlamaForCausalLM"}
    assert spec_of(folder, {**LLAMA, "auto_map": named}) == spec_of(folder, LLAMA)
    assert not (folder / "executed").exists()


def test_a_model_with_code_of_another_class_is_refused(folder: Path) -> None:
    """Phi-3 names code of Phi3ForCausalLM, which is the family's computation; other classes compute what nothing here knows."""
    message = refusal(folder, {**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_mine.MyLlamaForCausalLM"}})
    assert 'auto_map.AutoModelForCausalLM="modeling_mine.MyLlamaForCausalLM"' in message


def test_a_folder_without_a_config(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json; model\.path must be"):
        load_spec(folder)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_config_that_is_no_object(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: .*download the file again"):
        load_spec(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_what_transformers_saves_is_read(family: str, folder: Path) -> None:
    spec = load_spec(make_checkpoint(folder, family, vocab=64, num_hidden_layers=1))
    assert (spec.family, spec.vocab_size, spec.num_layers, spec.eos_ids) == (family, 64, 1, (2,))
