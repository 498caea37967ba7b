"""Dense families: logits, tokens, tensors and config keys of transformers.

Gemma 3 text, Phi-3/4, OLMo 2 and 3, GLM-4, EXAONE 4, Seed-OSS, SmolLM3, Granite 3 and 4, Ministral 3.
"""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.config.schema import RunConfig
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.fused import rms_norm
from batchspec.model.layers.attention.rope import rope_frequencies
from batchspec.model.layers.attention.rope_config import read_rope
from batchspec.model.products import products
from batchspec.model.spec import ModelSpec, load_spec, read_spec
from batchspec.model.weights import expected_shapes
from batchspec.packing.admit import job_max_len
from batchspec.packing.model_notes import model_notes
from tests.checkpoint.test_config_values import ODD_NUMBERS, ODD_VALUES, ours
from tests.helpers.attentions import attentions, windows
from tests.helpers.engines import VOCAB
from tests.helpers.models import make_checkpoint, needed
from tests.model.test_target import assert_like_transformers

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 4.0, 5.5], "long_factor": [4.0] * 7}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, "sliding_attention": {"rope_theta": 100.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
"""With an original length that the rows of tests are longer than."""
GRANITE = {
    "hidden_size": 72, "embedding_multiplier": 5.3, "residual_multiplier": 0.22, "attention_multiplier": 0.13,
    "logits_scaling": 3.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "hidden_size": 60, "head_dim": 18, "sliding_window": 7, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20,
            "rope_parameters": TWO_ROPES,
        },
    ),
    "phi3 window": ("phi3", {"hidden_size": 72, "num_key_value_heads": 4, "sliding_window": 9}),
    "phi3 longrope": (
        "phi3",
        {
            "hidden_size": 72, "partial_rotary_factor": 0.8, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("olmo2", {"hidden_size": 72, "attention_bias": True}),
    "glm4": ("glm4", {"hidden_size": 52, "head_dim": 20}),
    "olmo3": (
        "olmo3",
        {
            "hidden_size": 72, "sliding_window": 7, "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.3, "rope_theta": 700.0},
                "sliding_attention": {"rope_theta": 900.0},
            },
        },
    ),
    "exaone4": ("exaone4", {"hidden_size": 72, "sliding_window": 7, "sliding_window_pattern": 2}),
    "exaone4 without windows": (
        "exaone4", {"sliding_window": None, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "head_dim": 20},
    ),
    "seed_oss": ("seed_oss", {"hidden_size": 52, "head_dim": 20, "num_hidden_layers": 2}),
    "smollm3": ("smollm3", {"hidden_size": 72, "no_rope_layer_interval": 2}),
    "granite": ("granite", {**GRANITE, "num_hidden_layers": 2}),
    "granite 4": (
        "granitemoehybrid",
        {
            **GRANITE, "num_hidden_layers": 2, "num_local_experts": 0, "shared_intermediate_size": 44, "mamba_n_heads": 4,
            "position_embedding_type": "rope", "layer_types": ["full_attention"] * 2,
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "hidden_size": 52, "head_dim": 20, "num_hidden_layers": 2,
            "rope_parameters": {**YARN, "rope_theta": 1e3, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
}
TINY: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCAB, "max_position_embeddings": 256, "rope_theta": 100.0,
}
OWN: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "head_dim": 6, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 3, "rope_local_base_freq": 50.0,
    },
    "phi3": {"partial_rotary_factor": 0.7, "sliding_window": 5},
    "olmo2": {},
    "glm4": {"head_dim": 8},
    "olmo3": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},
    "seed_oss": {"head_dim": 6},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    "granitemoehybrid": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 3.0,
        "num_local_experts": 0, "shared_intermediate_size": 28, "position_embedding_type": "rope",
        "layer_types": ["attention", "attention"], "mamba_n_heads": 4,
    },
    "ministral3": {
        "head_dim": 6,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 100.0,
            "llama_4_scaling_beta": 0.4,
        },
    },
}


@pytest.mark.second
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_64_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    assert_like_transformers(make_checkpoint(tmp_path, family, **config))


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_those_that_transformers_saves(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    folder = make_checkpoint(tmp_path, family, vocab=64, **config)
    saved = {key: tuple(tensor.shape) for key, tensor in load_file(folder / "model.safetensors").items()}
    assert expected_shapes(load_spec(folder)) == saved


@pytest.mark.parametrize("family", ["gemma3", "olmo2"])
def test_norms_in_bf16_are_rounded_once_as_those_of_transformers(family: str) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    theirs: Any = {"gemma3": Gemma3RMSNorm, "olmo2": Olmo2RMSNorm}[family](90, eps=1e-6).bfloat16()
    torch.nn.init.normal_(theirs.weight)
    x = torch.randn(200, 90).bfloat16()
    weight = theirs.weight.detach().float() + (1 if family == "gemma3" else 0)
    ours, expected = rms_norm(x, weight, 1e-6), theirs(x)
    assert (ours != expected).float().mean() < 0.001  # a sum of squares in another order
    assert (rms_norm(x, weight.bfloat16(), 1e-6) != expected).float().mean() > 0.01


# --- config keys


def made_by_transformers(family: str, values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **json.loads(json.dumps(values)))


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rms_norm_eps": 1e-3, "tie_word_embeddings": True},
        {"tie_word_embeddings": False, "attention_bias": True},
        {"num_key_value_heads": 4, "max_position_embeddings": 8192},
    ],
)
def test_usual_keys_and_defaults_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    values = {key: value for key, value in {**TINY, **OWN[family], **changes}.items() if key != "rope_theta"}
    spec, made = read_spec({"model_type": family, **values}, "config.json"), made_by_transformers(family, values)
    assert (spec.rms_eps, spec.tie, spec.max_len) == (made.rms_norm_eps, made.tie_word_embeddings, made.max_position_embeddings)
    own = attentions(spec)[0]
    assert (own.num_kv_heads, own.num_heads) == (made.num_key_value_heads, made.num_attention_heads)
    assert attentions(spec)[0].head_dim == (getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads)
    attention = spec.layers[0].attention
    bias = getattr(made, "attention_bias", False) and family != "phi3"
    of_output = getattr(made, "attention_out_bias", bias and family != "glm4")
    takes_bias = family not in ("exaone4", "ministral3")  # which ignore the key
    assert (attention.qkv_bias, attention.o_bias) == (bias and takes_bias, of_output and takes_bias)


@pytest.mark.parametrize("family", OWN)
def test_a_file_that_names_least_is_read_with_transformers_defaults(family: str) -> None:
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    values = {key: TINY[key] for key in kept} | {"hidden_size": 128, "num_attention_heads": 32, "max_position_embeddings": 4096}
    values |= needed(family, TINY["num_hidden_layers"])
    spec, made = read_spec({"model_type": family, **values}, "config.json"), made_by_transformers(family, values)
    assert (spec.rms_eps, spec.tie) == (made.rms_norm_eps, made.tie_word_embeddings)
    assert attentions(spec)[0].num_kv_heads == made.num_key_value_heads
    assert attentions(spec)[0].head_dim == (getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads)
    assert_ropes_of_transformers(spec, made)


FACTORS = {"short_factor": [1, 2.0, 3.5], "long_factor": [9, 9, 9]}
ROPES: list[tuple[str, dict[str, Any]]] = [
    ("gemma3_text", {"rope_local_base_freq": 50.0}),
    ("gemma3_text", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}),
    ("gemma3_text", {"rope_parameters": TWO_ROPES, "rope_local_base_freq": 70.0}),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 300.0}}, "rope_local_base_freq": 70.0}),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("gemma3_text", {"sliding_window_pattern": 1, "sliding_window": None}),
    ("phi3", {"partial_rotary_factor": 0.7, "rope_theta": 500.0}),
    ("phi3", {"partial_rotary_factor": 0.7, "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 70.0}}),
    ("phi3", {"rope_scaling": {"type": "longrope", **FACTORS}}),
    ("phi3", {"rope_scaling": {"type": "longrope", **FACTORS, "attention_factor": 2.0}}),
    ("phi3", {"original_max_position_embeddings": 300, "rope_scaling": {"type": "yarn", **FACTORS}}),
    ("phi3", {"original_max_position_embeddings": 1, "rope_scaling": {"type": "longrope", **FACTORS, "factor": 1.0}}),
    ("olmo2", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("glm4", {}),
    ("glm4", {"partial_rotary_factor": 1.0}),
    ("glm4", {"partial_rotary_factor": None}),
    ("glm4", {"head_dim": 8, "rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 300.0, "rope_type": "default"}}),
    ("olmo3", {}),
    ("olmo3", {"rope_theta": 7e5, "rope_scaling": {**YARN, "attention_factor": 1.2}, "num_hidden_layers": 5}),
    ("olmo3", {"rope_parameters": TWO_ROPES}),
    ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}, "sliding_window": 5}),
    ("exaone4", {"sliding_window_pattern": 3, "num_hidden_layers": 4}),
    ("exaone4", {"layer_types": ["full_attention", "sliding_attention"], "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("smollm3", {"no_rope_layers": [0, 1]}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
    ("smollm3", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "no_rope_layers": [1, 0, 1]}),
    ("granitemoehybrid", OWN["granitemoehybrid"]),
    ("granitemoehybrid", {**OWN["granitemoehybrid"], "position_embedding_type": None}),
    ("granitemoehybrid", {**OWN["granitemoehybrid"], "position_embedding_type": "nope", "layer_types": ["full_attention"] * 2}),
    ("ministral3", {"rope_parameters": None, "rope_theta": 100.0}),
    ("ministral3", {"rope_parameters": None, "rope_scaling": {**YARN, "llama_4_scaling_beta": 0}}),
    ("ministral3", {"sliding_window": 5}),
]


@pytest.mark.parametrize(("family", "changes"), ROPES)
def test_rotations_and_windows_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    values = {**TINY, **changes, "max_position_embeddings": 9000}
    assert_ropes_of_transformers(read_spec({"model_type": family, **values}, "config.json"), made_by_transformers(family, values))


def assert_ropes_of_transformers(spec: ModelSpec, made: Any) -> None:
    name = spec.family.removesuffix("_text")
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    (kind_of_rope,) = (kind for title, kind in vars(module).items() if title.endswith("RotaryEmbedding"))
    found, by_kind = kind_of_rope(made), spec.family in ("gemma3_text", "olmo3")
    kinds = getattr(made, "layer_types", None) if by_kind or spec.family in ("exaone4", "smollm3") else None
    window = getattr(made, "sliding_window", None)
    kinds = kinds or ["full_attention" if window is None else "sliding_attention"] * spec.num_layers
    assert windows(spec) == tuple(window if kind == "sliding_attention" else None for kind in kinds)
    rotated = [bool(turns) for turns in getattr(made, "no_rope_layers", [1] * spec.num_layers)]
    if spec.family == "exaone4" and window is not None:
        rotated = [kind == "sliding_attention" for kind in kinds]
    if spec.family == "granitemoehybrid":
        rotated = [made.position_embedding_type == "rope"] * spec.num_layers
    beta = getattr(made, "rope_parameters", {}).get("llama_4_scaling_beta", 0.0)
    for own, kind, turns in zip(attentions(spec), kinds, rotated, strict=False):
        rope = own.rotation
        prefix = f"{kind}_" if by_kind else ""
        freqs, factor = getattr(found, f"{prefix}inv_freq"), getattr(found, f"{prefix}attention_scaling")
        torch.testing.assert_close(
            rope_frequencies(rope, own.head_dim), freqs if turns else freqs * 0, rtol=1e-6, atol=0
        )
        assert rope.attention_factor == pytest.approx(factor if turns else 1.0, rel=1e-12)
        assert rope.interleaved == (spec.family == "glm4")
        assert rope.query_growth == beta
        assert not beta or rope.original_max_len == made.rope_parameters["original_max_position_embeddings"]


def test_longrope_ends_where_its_second_set_of_frequencies_begins() -> None:
    config = {"model_type": "phi3", **TINY, "max_position_embeddings": 131_072}
    spec, old = (read_spec({**config, "rope_scaling": {"type": kind, **FACTORS}}, "config.json") for kind in ("longrope", "su"))
    assert spec.max_len == 4096
    assert old == spec
    assert read_rope(ConfigReader({"rope_theta": spec.rope.of_heads.theta}, "head"), None) == spec.rope.of_heads


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (
            {"model_type": "phi3", "max_position_embeddings": 131_072, "rope_scaling": {"type": "longrope", **FACTORS}},
            "longrope has other frequencies for rows of more than original_max_position_embeddings=4096 tokens, and only "
            "those of shorter rows are supported",
        ),
        (
            {"model_type": "llama", "max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "yarn without original_max_position_embeddings does not say whether max_position_embeddings=4096 is the length "
            "before or after its factor 4; add that key to config.json",
        ),
        ({"model_type": "llama", "max_position_embeddings": 4096}, ""),
    ],
)
def test_a_length_that_the_rope_limits_is_refused_with_the_reason_and_noted(values: dict[str, Any], why: str) -> None:
    spec, config = read_spec({**TINY, **values}, "config.json"), RunConfig()
    assert job_max_len(config, spec) == 4096
    notes = dict(model_notes(config.decode, spec, {1}))
    assert notes.get("length", "") == (f"rows have at most 4096 tokens: {why}" if why else "")
    config.model.max_len = 8192
    with pytest.raises(ConfigError) as refused:
        job_max_len(config, spec)
    reason = f" ({why})" if why else ""
    assert str(refused.value) == f"model.max_len=8192 exceeds the model's own limit of 4096 tokens{reason}; lower it"


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3_text", {"hidden_activation": "silu"}, 'hidden_activation="silu"'),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; it must be an integer in 1 .. 4096"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 'rope_parameters.rope_type="linear"'),
        ("gemma3_text", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 'rope_scaling.rope_type="yarn"'),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear' in a phi3"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor is [1.0]; it must be a list of 3"),
        (
            "phi3",
            {"original_max_position_embeddings": 1, "rope_scaling": {"type": "longrope", **FACTORS, "factor": 2.0}},
            "original_max_position_embeddings=1 is too short for longrope; correct it",
        ),
        ("phi3", {"partial_rotary_factor": 0.9}, "rotates 5 of the 6 numbers of a head"),
        ("phi3", {"layer_types": ["full_attention"] * 2}, "layer_types="),
        ("olmo2", {"sliding_window": 5}, "sliding_window=5 in a olmo2"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("glm4", {"head_dim": 6}, "rotates 3 of the 6 numbers of a head"),
        ("olmo3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 'rope_parameters.rope_type="linear"'),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types: 1 for 2 layers; full_attention and sliding_attention are"),
        (
            "olmo3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None},
            "layer_types has sliding_attention, and there is no sliding_window",
        ),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, 'sliding_window_pattern is "LLLG"; it must be an integer in 1 .. 4096'),
        ("seed_oss", {"sliding_window": 5}, "sliding_window=5 in a seed_oss"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 numbers for 2 layers; correct it"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers is [1, 2]; it must be a list of integers in 0 .. 1"),
        ("granite", {"layer_types": ["full_attention"] * 2}, "layer_types="),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0; it must be a number in 1e-06 .. 1e+06"),
        ("granitemoehybrid", {"layer_types": ["attention"] * 2, "num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8"),
        ("granitemoehybrid", {"layer_types": ["attention"] * 2, "num_experts_per_tok": 0}, "num_experts_per_tok=0 of 8 experts"),
        ("granitemoehybrid", {"num_local_experts": 0}, "no layer of the 2 has attention, which is not supported; correct"),
        (
            "granitemoehybrid", {"num_local_experts": 0, "layer_types": ["mamba", "attention"], "mamba_n_heads": 7},
            "mamba_n_heads 7, mamba_d_head ",
        ),
        ("granitemoehybrid", {"num_local_experts": 0, "layer_types": ["attention"]}, "layer_types: 1 for 2 layers; mamba and"),
        ("ministral3", {"layer_types": ["full_attention"] * 2}, "layer_types="),
        (
            "ministral3", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "rope_parameters.original_max_position_embeddings is null; it must be an integer",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar=64"),
        ("gemma3", {}, 'model_type="gemma3" needs text_config with the keys of its language model'),
        ("phi4mm", {}, 'model_type="phi4mm" is not supported; supported are llama, '),
        ("kimi_k2", {}, 'model_type="kimi_k2" is not supported: it needs multi-head latent attention (MLA), which is'),
        ("nemotron_h", {}, "hybrid_override_pattern: missing; a letter of M*-E for each layer is needed"),
        ("jamba", {}, 'model_type="jamba" is not supported: it needs Mamba layers of the first kind'),
        ("zamba2", {}, 'model_type="zamba2" is not supported: it needs a class of its own, whose Mamba2 layers'),
        ("mamba2", {}, 'model_type="mamba2" is not supported: it needs a plan of memory without K/V pages, because no layer'),
        ("muse_glimmer", {}, 'model_type="muse_glimmer" is not supported: it needs normed embeddings, norms of q and k without'),
    ],
)
def test_what_is_not_built_is_refused_by_name(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec({"model_type": family, **TINY, **changes}, "config.json")
    assert named in str(caught.value)


HOSTILE = (
    *TINY, "head_dim", "sliding_window", "sliding_window_pattern", "query_pre_attn_scalar", "rope_local_base_freq", "layer_types",
    "partial_rotary_factor", "original_max_position_embeddings", "rope_scaling", "rope_parameters", "hidden_activation",
    "attention_bias", "use_bidirectional_attention", "rms_norm_eps", "attention_out_bias", "no_rope_layers",
    "no_rope_layer_interval", "use_sliding_window", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
    "logits_scaling", "num_local_experts", "shared_intermediate_size", "position_embedding_type",
)


@pytest.mark.parametrize("family", OWN)
def test_any_value_of_a_key_is_read_or_refused_in_one_line(family: str) -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 3, "factor": 2.0}
    odd = [{key: value} for key in HOSTILE for value in ODD_VALUES]
    odd += [{"rope_scaling": {**rope, key: value}} for key in (*rope, "attention_factor", "rope_theta") for value in ODD_NUMBERS]
    odd += [{"rope_parameters": {"full_attention": value}} for value in ODD_VALUES]
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}
    odd += [{"rope_parameters": {**yarn, key: value}} for key in yarn for value in ODD_NUMBERS]
    for changes in odd:
        spec = ours({"model_type": family, **TINY, **OWN[family], **changes})
        assert spec is None or all(rope_frequencies(own.rotation, own.head_dim).isfinite().all() for own in attentions(spec))
        assert spec is None or all(math.isfinite(own.rotation.attention_factor) for own in attentions(spec))


def test_the_tuner_times_no_kernel_that_a_family_does_not_use() -> None:
    specs = {family: read_spec({"model_type": family, **TINY, **own}, "config.json") for family, own in OWN.items()}
    ops = {family: {op for op, _, _ in products(spec)} for family, spec in specs.items()}
    assert ops["gemma3_text"] == ops["olmo2"] - {"swiglu"} == {"linear", "lm_head"}
    assert ops["olmo3"] == ops["exaone4"] == ops["olmo2"]
    assert ops["glm4"] == {"linear", "norm_linear", "swiglu", "norm_swiglu", "lm_head"}
    assert ops["granite"] == ops["granitemoehybrid"] == ops["glm4"]
    assert ops["phi3"] == ops["seed_oss"] == ops["smollm3"] == ops["ministral3"] == ops["glm4"] | {"linear_add"}
