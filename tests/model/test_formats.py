"""Head checkpoints: the same head in every layout, and every way in which one does not fit, refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from batchspec.draft.formats import HeadSpec, read_head
from batchspec.draft.head_tensors import expected_shapes, head_bytes, normalised
from batchspec.draft.layouts import LAYER_DEFAULTS
from batchspec.draft.weights import dummy_head, dummy_spec, load_head, read_head_spec
from batchspec.errors import CheckpointError
from batchspec.model.layers.attention.rope import rope_frequencies
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from tests.helpers.eagle_reference import target_taps
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.helpers.models import make_checkpoint
from tests.helpers.stand_ins import LLAMA_8B, small_spec

CPU = torch.device("cpu")
TARGET = small_spec(vocab_size=40)
DEEP = small_spec(vocab_size=40, windows=(None,) * 36)


def written(folder: Path, layout: str = "flat", *, prefix: str = "", **changes: Any) -> Path:
    design = tiny_design(TARGET, **changes)
    return write_head(folder, design, random_tensors(design), layout=layout, prefix=prefix)


def configure(folder: Path, part: str | None = None, **changes: Any) -> Path:
    """Set keys of config.json (of `part` of it); None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    inner = config[part] if part else config
    inner.update(changes)
    for key, value in changes.items():
        if value is None:
            del inner[key]
    path.write_text(json.dumps(config))
    return folder


def change(folder: Path, **changes: Tensor | None) -> Path:
    """Replace, add or (None) remove tensors; `__` stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def spec_of(folder: Path, target: Any = TARGET, aux_layers: str = "auto") -> HeadSpec:
    return read_head_spec(folder, target, aux_layers=aux_layers)


def refusal(folder: Path, target: Any = TARGET, aux_layers: str = "auto") -> str:
    with pytest.raises(CheckpointError) as caught:
        load_head(folder, target, dtype=torch.float32, device=CPU, aux_layers=aux_layers)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": 3, "windows": (None, 5, None)},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "fc_bias": True, "attention_bias": True, "o_bias": True, "mlp_bias": True},
        {"qk_norm": True, "own_embedding": True, "draft_vocab": None},
    ],
)
def test_one_head_is_the_same_in_every_layout(changes: dict[str, Any], tmp_path: Path) -> None:
    design = tiny_design(TARGET, **changes)
    tensors = random_tensors(design)
    for number, (layout, prefix) in enumerate([("flat", ""), ("flat", "model."), ("additional", ""), ("speculators", "")]):
        folder = write_head(tmp_path / str(number), design, tensors, layout=layout, prefix=prefix)
        head = load_head(folder, TARGET, dtype=torch.float64, device=CPU, aux_layers="input")
        spec = head.spec
        assert spec.layout == ("speculators" if layout == "speculators" else "flat")
        assert spec.aux_layer_ids == design.taps
        assert spec.windows == design.windows
        assert (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size) == (32, 4, 2, 6, 20)
        assert (spec.rms_eps, spec.rope.theta, spec.num_layers) == (design.eps, design.theta, design.layers)
        flags = (spec.norm_before_residual, spec.input_norm, spec.fc_norm, spec.feed_normed, spec.qk_norm)
        assert flags == (
            design.norm_before_residual, design.norm_before_fc, design.fc_norm, design.norm_output, design.qk_norm
        )
        biases = (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.fc_bias)
        assert biases == (design.attention_bias, design.o_bias, design.mlp_bias, design.fc_bias)
        assert head.tensors.keys() == tensors.keys() - {"d2t", "t2d"}
        assert all(torch.equal(head.tensors[name], tensors[name]) for name in head.tensors)
        if design.draft_vocab is None:
            assert (head.map_ids, spec.own_head, spec.draft_vocab_size) == (None, False, 40)
        else:
            assert head.map_ids is not None
            assert head.map_ids.dtype == torch.int32
            assert head.map_ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()  # an OFFSET: target id = draft id + d2t


def test_tensor_names_have_one_spelling() -> None:
    assert normalised("model.midlayer.self_attn.q_proj.weight") == "layers.0.self_attn.q_proj.weight"
    assert normalised("additional_layers.0.mlp.up_proj.weight") == "layers.1.mlp.up_proj.weight"
    assert normalised("layers.2.mlp.up_proj.weight") == "layers.2.mlp.up_proj.weight"
    assert normalised("d2t") == "d2t"


@pytest.mark.parametrize(
    ("ids", "aux_layers", "taps"),
    [
        (None, "auto", (2, 18, 33)),
        (None, "output", (2, 18, 33)),
        ([2, 18, 33], "auto", (2, 18, 33)),
        ([1, 17, 32], "auto", (2, 18, 33)),
        ([1, 17, 32], "input", (1, 17, 32)),
        ([2, 18, 33], "output", (3, 19, 34)),
        ([24, 30, 36], "auto", (24, 30, 36)),  # the last boundary, after the last layer
    ],
)
@pytest.mark.parametrize("key", ["eagle_aux_hidden_state_layer_ids", "eagle_config"])
def test_layer_ids_of_both_conventions_become_boundaries(
    ids: list[int] | None, aux_layers: str, taps: tuple[int, ...], key: str, tmp_path: Path
) -> None:
    folder = configure(written(tmp_path / "head"), eagle_aux_hidden_state_layer_ids=None)
    changes: dict[str, Any] = {key: {"layer_ids": ids, "use_aux_hidden_state": True} if key == "eagle_config" else ids}
    if ids is not None:
        configure(folder, **changes)
    assert spec_of(folder, DEEP, aux_layers).aux_layer_ids == taps


@pytest.mark.parametrize("ids", [[1, 17, 32], [1, 2, 3], [2, 18, 33], [0, 1, 36], [5, 1, 9]])
@pytest.mark.parametrize("mask_id", [None, 7])
def test_ids_of_the_speculators_layout_are_boundaries_whatever_the_first_one_is(
    ids: list[int], mask_id: int | None, tmp_path: Path
) -> None:
    folder = configure(written(tmp_path / "head", "speculators", mask_id=mask_id), eagle_aux_hidden_state_layer_ids=ids)
    assert spec_of(folder, DEEP).aux_layer_ids == tuple(ids)
    assert spec_of(folder, DEEP, "input").aux_layer_ids == tuple(ids)
    if 36 not in ids:
        assert spec_of(folder, DEEP, "output").aux_layer_ids == tuple(i + 1 for i in ids)


@pytest.mark.parametrize(
    ("layout", "ids", "entered"),
    [
        ("speculators", [1, 2, 3], [1, 2, 3]),
        ("speculators", [0, 3, 1], [0, 3, 1]),
        ("flat", [0, 2, 3], [0, 2, 3]),
        ("flat", [1, 0, 2], [2, 1, 3]),
    ],
)
def test_the_features_of_layer_ids_are_transformers_hidden_states(
    layout: str, ids: list[int], entered: list[int], tmp_path: Path
) -> None:
    """hidden_states[i] of transformers is what enters layer i, 0 the embedding."""
    from transformers import AutoModelForCausalLM

    model = make_checkpoint(tmp_path / "model", "llama", vocab=40, num_hidden_layers=4, hidden_size=32)
    target = Target.load(model, load_spec(model), dtype=torch.float32, device=CPU)
    folder = configure(written(tmp_path / "head", layout), eagle_aux_hidden_state_layer_ids=ids)
    taps = spec_of(folder, target.spec).aux_layer_ids
    tokens = [3, 9, 1, 22, 17]
    auto: Any = AutoModelForCausalLM
    states = auto.from_pretrained(model)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[i][0] for i in entered], -1)
    torch.testing.assert_close(target_taps(target, tokens, taps), wanted, atol=1e-4, rtol=1e-4)


def test_norm_output_means_the_norm_before_lm_head_to_specforge_and_what_is_fed_back_to_others(tmp_path: Path) -> None:
    folder = written(tmp_path / "head", norm_output=True)
    assert spec_of(folder).feed_normed
    configure(folder, architectures=["LlamaForCausalLMEagle3"])
    assert not spec_of(folder).feed_normed
    configure(folder, norm_output=False)  # of its newer configs: an EAGLE-3 head
    assert not spec_of(folder).feed_normed


def test_the_defaults_that_speculators_leaves_out_are_those_of_its_model_type(tmp_path: Path) -> None:
    folder = configure(written(tmp_path / "head", "speculators"), "transformer_layer_config", rms_norm_eps=None, rope_theta=None)
    assert (spec_of(folder).rms_eps, spec_of(folder).rope.theta) == (1e-6, 10_000.0)
    configure(folder, "transformer_layer_config", num_hidden_layers=None)
    assert "missing tensors: layers.1." in refusal(folder)  # transformers' llama has 32


@pytest.mark.parametrize("family", [*LAYER_DEFAULTS])
def test_values_that_a_config_leaves_out_are_those_of_transformers(family: str) -> None:
    known = AutoConfig.for_model(family)
    assert {key: getattr(known, key) for key in LAYER_DEFAULTS[family]} == LAYER_DEFAULTS[family]


def test_windows_are_read_whatever_the_switch_of_the_family_says(tmp_path: Path) -> None:
    folder = written(tmp_path / "head", "speculators", qk_norm=True)
    part = "transformer_layer_config"
    configure(folder, part, sliding_window=9, layer_types=["sliding_attention"] * 36, use_sliding_window=False)
    assert spec_of(folder).windows == (9,)
    configure(folder, part, layer_types=["sliding_attention", "full_attention"])
    assert "layer_types: 2 for 1 layers" in refusal(folder)
    configure(folder, part, layer_types=None)
    assert spec_of(folder).windows == (None,)


def test_rotation_is_scaled_only_as_the_head_says(tmp_path: Path) -> None:
    folder = written(tmp_path / "head")
    assert spec_of(folder, replace(TARGET, max_len=100_000)).rope.type == "default"
    configure(folder, rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert spec_of(folder).rope.factor == 4.0


def test_a_scaled_rotation_reads_the_heads_own_context_and_needs_it_where_the_scaling_names_none(tmp_path: Path) -> None:
    """max_position_embeddings is the original context of a scaling without one, and YaRN's factor is its multiple of that."""
    folder = written(tmp_path / "head")
    assert spec_of(configure(folder, max_position_embeddings=None)).rope.type == "default"  # which reads no context
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    for missing, scaling in (("original_max_position_embeddings", llama3), ("factor", yarn)):
        assert missing in refusal(configure(folder, rope_scaling=scaling))
    configure(folder, max_position_embeddings=4096)
    assert spec_of(folder).rope.factor == 4.0
    scaled = spec_of(configure(folder, rope_scaling=llama3)).rope
    assert (scaled.original_max_len, scaled.factor) == (4096, 8.0)
    named = {**llama3, "original_max_position_embeddings": 1024}
    assert spec_of(configure(folder, rope_scaling=named)).rope.original_max_len == 1024


@pytest.mark.parametrize("layout", ["flat", "speculators"])
def test_an_unknown_key_is_refused_by_name_and_a_harmless_one_is_not(layout: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"torch_dtype": "bfloat16", "some_new_switch": None, "is_neox_style": True}
    folder = configure(written(tmp_path / "head", layout), use_cache=True, **keys)
    assert spec_of(folder).num_layers == 1
    configure(folder, residual_multiplier=0.5, quantization_config={"bits": 4})
    message = refusal(folder)
    assert "not known to draft=eagle3: residual_multiplier=0.5, quantization_config=" in message
    assert "remove a key from config.json if it changes no computation" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ptd_token_id": 7}, "1 missing tensors: mask_hidden"),
        ({"parallel_drafting": True}, "parallel_drafting without the id of the mask token; add one of mask_token_id, pard_token"),
        ({"ptd_token_id": 40}, "ptd_token_id=40 must be one token id in 0 .. 39; correct it"),
        ({"pard_token": "7"}, 'pard_token is "7"; it must be an integer in 0 ..'),
        ({"mask_token_id": 3, "ptd_token_id": 4}, "mask_token_id=3, ptd_token_id=4 must be one token id in 0 .. 39"),
        ({"dflash_config": {"mask_token_id": 3}}, "not known to draft=eagle3: dflash_config="),
        ({"is_neox_style": False}, "not known to draft=eagle3: is_neox_style=false"),
        ({"dspark_noise_token_id": 3}, "not known to draft=eagle3: dspark_noise_token_id=3"),
        ({"speculators_model_type": "dflash"}, "'dflash' is not supported"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": 3}, "transformer_layer_config is 3; it must be an"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "architectures 'Eagle3DeepseekV2ForCausalLM' is not supported"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' of the head is not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu"'),
        ({"hidden_size": "wide"}, 'hidden_size is "wide"; it must be an integer in 1 ..'),
        ({"vocab_size": 41}, "vocab_size 41, the target's 40: a head of another target"),
        ({"target_hidden_size": 64}, "target_hidden_size 64, the target's 32: a head of another target"),
        ({"draft_vocab_size": 50}, "draft_vocab_size 50 exceeds vocab_size 40"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 is not a multiple of num_key_value_heads 2"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
        ({"num_aux_hidden_states": 5}, "num_aux_hidden_states 5 but 3 layer ids [0, 1, 2]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "reads the target's layers [0, 1, 9]"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 1]}, "they must differ and lie in 0 .. 2"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "reads the target's layers [2, 1, -1] (ids None"),
        ({"eagle_aux_hidden_state_layer_ids": [0, "1"]}, 'layer_ids is [0, "1"]; it must be a list of integers in 0 .. 4096'),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "not supported: eagle_config.use_mtp_layernorm=true"),
        ({"eagle_config": 4}, "eagle_config is 4; it must be an object"),
        ({"norm_before_fc": True}, "1 missing tensors: input_norm.weight"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(configure(written(tmp_path / "head"), **changes))


ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 10**400, 1.5, 1e300, float("nan"), float("inf"), "", "64", [], [1], [None], [[[]]], ["a", 1], {},
    {"a": {"b": []}}, {"rope_type": []}, {"rope_type": "yarn", "factor": 0}, {"layer_ids": [1.5]},
]


@pytest.mark.second
@pytest.mark.parametrize("layout", ["flat", "speculators"])
def test_any_value_of_any_key_is_read_or_refused_in_one_line(layout: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "head", layout, mask_id=7, windows=(5,))
    path, names = folder / "config.json", set(load_file(folder / "model.safetensors"))
    config = json.loads(path.read_text())
    part = config["transformer_layer_config"] if layout == "speculators" else config
    tensors = {normalised(name) for name in names}
    for inner, key in [(config, key) for key in config] + [(part, key) for key in (*part, "rope_parameters", "rope_scaling")]:
        before, missing = inner.get(key), key not in inner
        for value in ODD_VALUES:
            inner[key] = value
            path.write_text(json.dumps(config))
            try:
                spec = read_head(folder, tensors, TARGET)
            except CheckpointError as error:
                assert str(error).startswith(str(path)) and "\n" not in str(error)  # noqa: PT017, PT018
            else:
                assert len(spec.aux_layer_ids) == len(set(spec.aux_layer_ids)) > 0
                assert rope_frequencies(spec.rope, spec.head_dim).isfinite().all()
        inner[key] = before
        if missing:
            del inner[key]


def test_a_narrower_head_needs_an_embedding_and_an_lm_head_of_its_own(tmp_path: Path) -> None:
    narrow: dict[str, Any] = {"hidden": 12, "heads": 3, "kv_heads": 1, "head_dim": 4}
    assert spec_of(written(tmp_path / "own", own_embedding=True, **narrow)).hidden_size == 12
    assert "so the target's embed_tokens cannot be used" in refusal(written(tmp_path / "a", **narrow))
    assert "embed_tokens and lm_head cannot be used" in refusal(written(tmp_path / "b", draft_vocab=None, **narrow))


def test_all_tensors_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    folder = written(tmp_path / "head")
    change(folder, norm__weight=None, midlayer__mlp__up_proj__weight=torch.zeros(3, 4), fc2__weight=torch.zeros(1), d2t=None)
    message = refusal(folder)
    for said in ("2 missing tensors: d2t, norm.weight", "1 unexpected tensors: fc2.weight", "up_proj.weight is [3, 4], config"):
        assert said in message
    ignored = {"midlayer__self_attn__rotary_emb__inv_freq": torch.zeros(3), "verifier_norm__weight": torch.zeros(2)}
    assert spec_of(change(written(tmp_path / "other"), **ignored)).mapped


@pytest.mark.parametrize("layers", [1, 3])
def test_a_parallel_head_is_the_same_in_every_layout(layers: int, tmp_path: Path) -> None:
    design = tiny_design(TARGET, mask_id=7, layers=layers, windows=(None,) * layers)
    tensors = random_tensors(design)
    for layout in ("flat", "additional", "speculators"):
        folder = write_head(tmp_path / layout, design, tensors, layout=layout)
        head = load_head(folder, TARGET, dtype=torch.float64, device=CPU, aux_layers="input")
        assert (head.spec.mask_token_id, head.spec.num_layers) == (7, layers)
        assert torch.equal(head.tensors["mask_hidden"], tensors["mask_hidden"].view(1, -1))
        assert head.tensors.keys() == tensors.keys() - {"d2t", "t2d"}
    assert spec_of(written(tmp_path / "chain")).mask_token_id is None


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_the_mask_token_goes_by_any_of_its_names(key: str, tmp_path: Path) -> None:
    folder = configure(written(tmp_path / "head", mask_id=7), ptd_token_id=None, parallel_drafting=None)
    assert "mask_hidden without the id of the mask token" in refusal(folder)
    named: dict[str, Any] = {key: 9}
    assert spec_of(configure(folder, **named)).mask_token_id == 9


def test_the_kind_of_a_parallel_head_asks_for_a_mask_and_a_mask_has_the_width_of_taps_or_head(tmp_path: Path) -> None:
    folder = configure(written(tmp_path / "head", "speculators", mask_id=7), mask_token_id=None)
    assert "mask_hidden without the id of the mask token; add one of mask_token_id" in refusal(folder)
    configure(folder, mask_token_id=7, architectures=["Eagle3DraftModel"])
    assert "a speculators head has PEagleSpeculator, PEagleDraftModel" in refusal(folder)
    configure(folder, architectures=["PEagleSpeculator"])
    assert spec_of(folder).mask_token_id == 7
    for mask in (torch.zeros(96), torch.zeros(1, 96), torch.zeros(1, 1, 32)):
        loaded = load_head(change(folder, mask_hidden=mask), TARGET, dtype=torch.float32, device=CPU)
        assert loaded.tensors["mask_hidden"].shape == (1, mask.shape[-1])
    assert "mask_hidden is [1, 95], config.json says [1, 96]" in refusal(change(folder, mask_hidden=torch.zeros(1, 95)))


@pytest.mark.parametrize("layers", range(1, 9))
def test_a_dummy_head_of_a_shallow_target_reads_different_boundaries(layers: int) -> None:
    taps = dummy_spec(small_spec(vocab_size=40, windows=(None,) * layers)).aux_layer_ids
    assert len(set(taps)) == len(taps)
    assert set(taps) <= set(range(layers + 1))


def test_a_dummy_head_can_have_a_mask() -> None:
    spec = dummy_spec(LLAMA_8B, parallel=True)
    assert spec.mask_token_id == LLAMA_8B.vocab_size - 1
    assert expected_shapes(spec)["mask_hidden"] == (1, 12288)
    small = dummy_head(dummy_spec(DEEP, draft_vocab_size=7, parallel=True), dtype=torch.float32, device=CPU)
    assert 0.01 < float(small.tensors["mask_hidden"].std()) < 0.03


def test_the_draft_vocabulary_must_lie_in_the_targets(tmp_path: Path) -> None:
    folder = written(tmp_path / "head")
    offsets = load_file(folder / "model.safetensors")["d2t"]
    outside = offsets.clone()
    outside[4] = 36
    assert "d2t leads 1 draft ids out of the vocabulary of 40: draft id 4 to 40" in refusal(change(folder, d2t=outside))
    outside[4] = -5
    assert "draft id 4 to -1" in refusal(change(folder, d2t=outside))
    assert "d2t is F32, it must be I64 or I32" in refusal(change(folder, d2t=offsets.float()))
    known = torch.zeros(40, dtype=torch.bool)
    assert "d2t and t2d disagree on 19 draft ids" in refusal(change(folder, d2t=offsets, t2d=known))
    assert "t2d is [39], config.json says [40]" in refusal(change(folder, t2d=known[1:]))
    assert load_head(change(folder, t2d=None), TARGET, dtype=torch.float32, device=CPU).map_ids is not None


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    assert "no such folder; give the folder of an EAGLE-3 head" in refusal(tmp_path / "nothing")
    folder = written(tmp_path / "head")
    (folder / "config.json").unlink()
    assert "no config.json; draft.path must be the folder of an EAGLE-3 head" in refusal(folder)
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    assert "cannot be read as safetensors" in refusal(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "safetensors only" in refusal(folder)


def test_a_dummy_head_has_the_shapes_of_the_usual_one() -> None:
    spec = dummy_spec(LLAMA_8B)
    assert spec.aux_layer_ids == (2, 16, 29)
    assert expected_shapes(spec)["fc.weight"] == (4096, 12288)
    assert expected_shapes(spec)["layers.0.self_attn.q_proj.weight"] == (4096, 8192)
    assert head_bytes(spec, torch.bfloat16) == pytest.approx(0.85e9, rel=0.02)
    small = dummy_spec(DEEP, draft_vocab_size=7)
    one, other = (dummy_head(small, dtype=torch.float32, device=CPU) for _ in range(2))
    assert one.map_ids is not None
    assert one.map_ids.tolist() == [0, 5, 11, 17, 22, 28, 34]
    assert {name: tuple(t.shape) for name, t in one.tensors.items()} | {"d2t": (7,)} == expected_shapes(small)
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert one.tensors["layers.0.hidden_norm.weight"].eq(1).all()
    assert 0.01 < float(one.tensors["fc.weight"].std()) < 0.03
