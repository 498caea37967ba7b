"""The language model of checkpoints that read images too: logits of transformers' own classes, names, keys, formats, adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec.checkpoint.files import LocalFiles
from batchspec.checkpoint.wrapped import model_tensors, names_in_files, plain_name
from batchspec.errors import CheckpointError
from batchspec.model.given import GivenWeights
from batchspec.model.lora import open_adapter
from batchspec.model.quant.formats import ALL_PLAIN
from batchspec.model.quant.fp8_block import FP8_BLOCK, FP8_STATIC
from batchspec.model.spec import ModelSpec, load_spec, read_spec
from batchspec.model.target import Target
from batchspec.model.weight_checks import check_tensors
from batchspec.model.weights import Checkpoint, judge_model
from tests.helpers.attentions import attentions, windows
from tests.helpers.models import make_wrapped
from tests.model.test_lora import make_adapter
from tests.model.test_target import prompts
from tests.model.test_target import run as logits_of

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {"head_dim": 18, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral3": {"head_dim": 12, "sliding_window": None, "num_key_value_heads": 1},
    "lighton_ocr": {"head_dim": 12, "num_key_value_heads": 1},
    "glm_ocr": {"head_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [3, 5, 2]}},
    "qwen3_5": {
        "head_dim": 24, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 10,
        "linear_value_head_dim": 14, "full_attention_interval": 2,
    },
}
MINISTRAL: dict[str, Any] = {
    "model_type": "ministral3", "head_dim": 12, "num_key_value_heads": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    },
}
Q = "model.layers.1.self_attn.q_proj"


def theirs(folder: Path, row: list[int]) -> torch.Tensor:
    """fp32 logits of the whole model, which transformers loads from the folder."""
    from transformers import AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([row])).logits[0]
    return logits


def renamed(folder: Path, change: dict[str, str]) -> None:
    """The same weights under names whose beginnings are others."""
    tensors = load_file(folder / "model.safetensors")
    for old, new in change.items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_keys(folder: Path, **keys: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("kind", "text"), [*KINDS.items(), ("mistral3", MINISTRAL)])
def test_logits_are_those_of_the_whole_model_on_text(kind: str, text: dict[str, Any], tie: bool, tmp_path: Path) -> None:
    folder, (row,) = make_wrapped(tmp_path, kind, text, tie_word_embeddings=tie), prompts([40])
    spec = judge_model(LocalFiles(folder))
    assert (spec.tie, spec.unread) == (tie, ())
    target = Target.load(folder, spec, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(logits_of(target, row)[0], theirs(folder, row), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"language_model.model.": "model.language_model.", "vision_tower": "model.vision_tower"},
        {"language_model.model.": "model.", "vision_tower": "model.visual"},
    ],
)
def test_the_names_of_newer_files_and_those_of_text_alone_give_the_same_weights_and_sums(
    change: dict[str, str], tmp_path: Path
) -> None:
    folder = make_wrapped(tmp_path, "mistral3", KINDS["mistral3"], tie_word_embeddings=False)
    spec, old = load_spec(folder), loaded(folder)
    renamed(folder, {**change, "language_model.lm_head": "lm_head", "multi_modal_projector": "mtp"})
    new = loaded(folder)
    assert new[1] == old[1]
    assert all(torch.equal(new[0][name], old[0][name]) for name in old[0])
    assert len(old[0]) == len(list(spec.tensors()))


def loaded(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    spec = load_spec(folder)
    with Checkpoint(folder, spec, dtype=torch.float32, device=CPU, summed=True) as source:
        return {tensor.name: source.tensor(tensor.name) for tensor in spec.tensors()}, source.sums()


def test_parts_that_text_does_not_go_through_are_neither_read_nor_summed(tmp_path: Path) -> None:
    folder = make_wrapped(tmp_path, "gemma3", KINDS["gemma3"])
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"mtp.fc.weight": torch.zeros(3), "model.visual.patch_embed.weight": torch.zeros(3)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    names = set(model_tensors(LocalFiles(folder)))
    assert names == {tensor.name for tensor in judge_model(LocalFiles(folder)).tensors()} == set(loaded(folder)[1].tensors)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = make_wrapped(tmp_path, "gemma3", KINDS["gemma3"])
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["language_model.model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is there twice"):
        judge_model(LocalFiles(folder))


def test_tensors_in_memory_may_have_the_names_of_the_whole_model(tmp_path: Path) -> None:
    folder = make_wrapped(tmp_path, "mistral3", KINDS["mistral3"], tie_word_embeddings=False)
    spec, tensors = load_spec(folder), load_file(folder / "model.safetensors")
    given = GivenWeights(tensors, spec, dtype=torch.float32, device=CPU)
    assert torch.equal(given.tensor(f"{Q}.weight"), tensors[f"language_model.{Q}.weight"])
    del tensors[f"language_model.{Q}.weight"]
    with pytest.raises(CheckpointError, match=f"1 missing tensors: {Q}.weight"):
        GivenWeights(tensors, spec, dtype=torch.float32, device=CPU)


# --- config.json

TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "max_position_embeddings": 4096, "head_dim": 16,
}
NOTHING: dict[str, Any] = {}


def wrapped(kind: str, text: Mapping[str, Any] = NOTHING, **outer: Any) -> ModelSpec:
    config = {"model_type": kind, "text_config": {**TEXT, **text}, "vision_config": {"depth": 2}, **outer}
    return read_spec(config, "config.json")


@pytest.mark.parametrize(("kind", "family"), [("gemma3", "gemma3_text"), ("mistral3", "mistral")])
def test_the_language_model_is_that_of_text_config(kind: str, family: str) -> None:
    plain = read_spec({"model_type": family, **TEXT}, "config.json")
    assert wrapped(kind) == wrapped(kind, {"model_type": family}) == plain
    outer: dict[str, Any] = {"image_token_index": 7, "vision_feature_layer": -1, "mm_tokens_per_image": 256}
    assert wrapped(kind, **outer).unread == ()


@pytest.mark.parametrize(
    ("kind", "name"), [("mistral3", "Mistral3ForConditionalGeneration"), ("gemma3", "Gemma3ForConditionalGeneration")]
)
def test_text_config_may_repeat_the_class_of_the_whole_model(kind: str, name: str) -> None:
    """transformers from 4.52 on writes it."""
    assert wrapped(kind, {"architectures": [name]}, architectures=[name]) == wrapped(kind)
    with pytest.raises(CheckpointError, match=r"architectures=.* is not supported"):
        wrapped(kind, {"architectures": ["Qwen2_5_VLForConditionalGeneration"]})


def test_a_file_that_leaves_most_to_the_defaults_of_transformers_is_read() -> None:
    """The config.json of Gemma 3 4B."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999, "eoi_token_index": 256_000,
        "eos_token_id": [1, 106], "image_token_index": 262_144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    }
    spec = read_spec({**outer, "text_config": text}, "config.json")
    assert spec.unread == ()
    own = attentions(spec)[0]
    assert (own.num_heads, own.num_kv_heads, own.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert (spec.eos_ids, spec.dtype, spec.tie, spec.max_len) == ((1, 106), "bfloat16", True, 131_072)
    assert spec.weight_bytes(torch.bfloat16) == pytest.approx(2 * 3.88e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "outer", "expected"),
    [
        ({}, {}, (False, (), "float32")),
        ({"tie_word_embeddings": True, "eos_token_id": 5, "dtype": "bfloat16"}, {}, (True, (5,), "bfloat16")),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, (True, (), "float32")),
        ({"eos_token_id": 5}, {"eos_token_id": [6, 7], "torch_dtype": "bfloat16"}, (False, (6, 7), "bfloat16")),
    ],
)
def test_keys_beside_text_config_come_before_those_in_it(text: Any, outer: Any, expected: Any) -> None:
    spec = wrapped("mistral3", text, **outer)
    assert (spec.tie, spec.eos_ids, spec.dtype) == expected


def test_files_of_ministral_and_devstral_are_read() -> None:
    """With the format of their FP8 weights, and the names of parts that text does not go through."""
    fp8 = {
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    outer: dict[str, Any] = {
        "architectures": ["Mistral3ForConditionalGeneration"], "quantization_config": fp8, "tie_word_embeddings": False,
        "image_token_index": 10, "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "vision_feature_layer": -1, "dtype": "bfloat16",
    }
    spec = wrapped("mistral3", MINISTRAL, **outer)
    assert (spec.family, spec.unread, spec.rope.query_growth, spec.formats.of(Q)) == ("ministral3", (), 0.3, FP8_STATIC)
    older = wrapped("mistral3", {"sliding_window": None, "rope_theta": 1e9}, **{**outer, "quantization_config": None})
    assert (older.family, older.unread, windows(older)) == ("mistral", (), (None, None))


def test_keys_that_nothing_reads_are_named_inside_and_outside() -> None:
    assert wrapped("gemma3", {"attn_gain": 2}, tower=[1]).unread == ("text_config.attn_gain=2", "tower=[1]")
    rope = {"rope_theta": 1e4, "rope_type": "default", "gain": 3}
    assert wrapped("mistral3", {"rope_parameters": rope}).unread == ("text_config.rope_parameters.gain=3",)


@pytest.mark.parametrize(
    ("kind", "text", "outer", "said"),
    [
        ("mistral3", {"model_type": "kimi_k2"}, {}, 'text_config.model_type="kimi_k2" is not supported: it needs multi-head'),
        ("gemma3", {}, {"architectures": ["Gemma3ForTokenClassification"]}, "gemma3 needs Gemma3ForConditionalGeneration"),
        ("gemma3", {"head_dim": "x"}, {}, 'text_config.head_dim is "x"; it must be an integer'),
        ("gemma3", {"final_logit_softcapping": 30.0}, {}, "not supported: text_config.final_logit_softcapping=30.0"),
        ("llama", {}, {**TEXT}, "not supported: vision_config="),
        ("gemma3", {}, {"text_config": None}, 'model_type="gemma3" needs text_config'),
        ("gemma3", {}, {"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "has code of its own, which batchspec never runs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(kind: str, text: Any, outer: Any, said: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        wrapped(kind, text, **outer)
    assert said in str(refused.value)


# --- weight formats and adapters

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ROWS = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
    },
}


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {**FP8, "modules_to_not_convert": ["model.visual.blocks.1", f"model.language_model.{Q[6:]}", "lm_head"]},
        {**FP8, "modules_to_not_convert": [f"language_model.{Q}"]},
        {**ROWS, "ignore": ["re:vision_tower.*", f"model.language_model.{Q[6:]}"]},
        {**ROWS, "ignore": [r"re:^model\.language_model\.layers\.1\.self_attn\.q_proj$"]},
        {**ROWS, "ignore": [r"re:.*language_model.*q_proj", "re:.*visual.*"]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["vision_tower*", "language_model.*.1.self_attn.q*"]},
    ],
)
def test_lists_of_plain_modules_have_the_names_of_the_whole_model(config: dict[str, Any], inner: bool) -> None:
    key = {"quantization_config": config}
    spec = wrapped("mistral3", key) if inner else wrapped("mistral3", NOTHING, **key)
    assert spec.formats.of(Q) is ALL_PLAIN.of(Q)
    assert spec.formats.of(Q.replace("q_proj", "k_proj")) is not ALL_PLAIN.of(Q)


def test_fp8_weights_of_a_language_model_are_found_under_its_names(tmp_path: Path) -> None:
    spec = wrapped("mistral3", quantization_config=FP8)
    assert spec.formats.of(Q) == FP8_BLOCK
    made = {f"language_model.{tensor.name}": tensor for tensor in spec.tensors()}
    tensors = {
        name: torch.zeros(tensor.shape, dtype=torch.float8_e4m3fn if tensor.dtypes == ("F8_E4M3",) else torch.float32)
        for name, tensor in made.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    files = LocalFiles(tmp_path)
    check_tensors(files.where, spec, model_tensors(files))


def test_an_adapter_of_the_whole_model_changes_its_language_model(tmp_path: Path) -> None:
    base = make_wrapped(tmp_path / "base", "mistral3", KINDS["mistral3"], tie_word_embeddings=False)
    adapter = make_adapter(tmp_path / "adapter", base, ["q_proj", "down_proj"])
    own = open_adapter(str(adapter), load_spec(base))
    assert {name for name in own.deltas if "q_proj" in name} == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)}
    source = load_file(adapter / "adapter_model.safetensors")
    delta = own.deltas[f"{Q}.weight"]
    assert delta.a == f"base_model.model.language_model.{Q}.lora_A.weight"
    assert delta.a in source
    only = make_adapter(tmp_path / "vision", base, ["gate_proj"], seed=1)
    tensors = {name: value for name, value in load_file(only / "adapter_model.safetensors").items() if "vision_tower" in name}
    assert tensors
    save_file(tensors, only / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="no module is one of the language model's"):
        open_adapter(str(only), load_spec(base))


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_each_name_that_a_file_may_have_is_that_of_one_plain_name(name: str) -> None:
    assert {plain_name(own) for own in names_in_files(name)} == {name}
    assert len(names_in_files(name)) == {"lm_head.weight": 2, "model.embed_tokens.weight": 6}.get(name, 4)
