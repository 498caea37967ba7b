"""Keys of config.json that nothing reads: the user is told about unknown ones; all keys of published files are known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchspec.checkpoint.unread_keys import unread_note
from batchspec.model.families.registry import FAMILIES
from batchspec.model.spec import read_spec
from tests.helpers.models import needed

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 100, "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def unread(**keys: Any) -> tuple[str, ...]:
    return read_spec({**LLAMA, **keys}, "config.json").unread


def test_a_key_that_nothing_reads_is_named_with_its_value() -> None:
    assert unread() == ()
    assert unread(attn_gate_scale=0.5, tags=["a"]) == ("attn_gate_scale=0.5", 'tags=["a"]')


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_an_empty_value_means_that_there_is_nothing_to_read(value: Any) -> None:
    assert unread(attn_gate_scale=value) == ()


def test_keys_of_a_part_are_named_with_it() -> None:
    assert unread(rope_scaling=YARN) == ()
    assert unread(rope_scaling={**YARN, "short_mscale": 1.2}) == ("rope_scaling.short_mscale=1.2",)
    assert unread(rope_scaling={"rope_type": "linear", "factor": 2.0, "beta_fast": 32.0}) == ("rope_scaling.beta_fast=32.0",)


def test_an_object_that_another_one_hides_is_named_as_a_whole() -> None:
    hidden = {"rope_type": "default", "rope_theta": 5e5}
    assert unread(rope_scaling=YARN, rope_parameters=hidden, rope_theta=5e5) == (f"rope_parameters={json.dumps(hidden)}",)


def test_every_key_of_both_ropes_of_gemma_is_read_or_named() -> None:
    gemma = {"model_type": "gemma3_text", "head_dim": 16, "num_key_value_heads": 2}
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert unread(**gemma, rope_parameters=ropes) == ()
    ropes["sliding_attention"]["beta_fast"] = 3.0
    assert unread(**gemma, rope_parameters=ropes) == ("rope_parameters.sliding_attention.beta_fast=3.0",)


PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2": {
        "is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "initializer_range": 0.041666666666666664,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "torch_dtype": "bfloat16",
    },
    "Phi-4-mini": {
        "model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "resid_pdrop": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 1024,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    },
    "Gemma 3": {
        "model_type": "gemma3_text", "_sliding_window_pattern": 6, "layer_types": ["sliding_attention", "full_attention"],
        "cache_implementation": "hybrid", "num_key_value_heads": 2, "sliding_window": 64,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_files_are_known(name: str) -> None:
    assert unread(**PUBLISHED[name]) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_all_keys_that_transformers_saves_are_known(family: str) -> None:
    from transformers import AutoConfig

    more = needed(family, LLAMA["num_hidden_layers"])
    own = {key: value for key, value in LLAMA.items() if key != "model_type"} | more
    values = AutoConfig.for_model(family, **own).to_dict()
    windows = ("gpt_oss", "gemma3_text", "olmo3", "exaone4", "gemma4_text", "gemma4_unified_text")
    values |= {
        "num_key_value_heads": more.get("num_key_value_heads", 2), "sliding_window": 64 if family in windows else None,
    }
    if "linear_num_key_heads" in values:
        values["layer_types"] = ["linear_attention", "full_attention"]
    assert read_spec(values, "config.json").unread == ()


def test_a_note_is_one_line_of_the_first_keys() -> None:
    assert unread_note(()) == ""
    note = unread_note(unread(**{f"key{i}": i for i in range(1, 9)}, **{"a\nb" * 99: "\ud800"}))
    assert note.startswith("config.json: nothing reads key1=1, key2=2, key3=3, key4=4 and 5 more; ")
    assert unread_note(unread(**{"a\nb": 1})).isprintable()
