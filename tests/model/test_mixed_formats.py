"""Models of several weight formats: which module has which by ModelOpt's map or groups of compressed-tensors; their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.checkpoint.files import LocalFiles
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.quant.base import WeightFormat
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.quant.fp8_block import FP8_BLOCK
from batchspec.model.quant.nvfp4_format import COMPRESSED, MODELOPT
from batchspec.model.quant.pack_quantized import PackQuantized
from batchspec.model.quant.plain import PLAIN
from batchspec.model.spec import load_spec, read_spec
from batchspec.model.weights import judge_model
from batchspec.tuning import policy
from tests.helpers import int4_layouts
from tests.helpers.moe_models import tiny_config
from tests.helpers.nvfp4_layouts import Packer, compressed, fp8, group, int4, make, nvfp4
from tests.model.test_fp8 import TOKEN
from tests.model.test_int4_models import EXPERTS, check_two_ranks, load, logits

CPU = torch.device("cpu")
STATIC, ROWS_OF_FP8 = Fp8("tensor", "static"), Fp8("row", "token")
Q, UP, DOWN = (f"model.layers.1.{name}" for name in ("self_attn.q_proj", "mlp.experts.2.up_proj", "mlp.down_proj"))


def formats(quantisation: dict[str, Any], family: str = "qwen3_moe") -> Formats:
    return read_spec(tiny_config(family, quantization_config=quantisation), "config.json").formats


def each(found: Formats, *names: str) -> list[Any]:
    """The formats of these modules."""
    return [found.of(name) for name in names]


def modelopt(layers: dict[str, str | dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A map of formats as ModelOpt writes it into config.json."""
    entries = {name: {"quant_algo": own} if isinstance(own, str) else own for name, own in layers.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": entries, "ignore": [], **changes}


FP8, INT4, NVFP4 = "float-quantized", "pack-quantized", "nvfp4-pack-quantized"
INT4_OF_32 = PackQuantized(32, True)


# --- which module has which format


def test_the_map_names_projections_experts_and_modules_of_several_projections() -> None:
    """What it does not name is plain; of two names of which one is in the other the inner decides."""
    found = formats(modelopt({
        "model.layers.0.self_attn.q_proj": "FP8",
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1": "FP8_BLOCK_SCALES",
        "model.layers.1.mlp.experts.2.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.1.self_attn": "FP8_PER_CHANNEL_PER_TOKEN",
        "model.layers.11.mlp": "W4A8_NVFP4_FP8",
    }))
    names: dict[str, WeightFormat] = {
        "model.layers.0.self_attn.q_proj": STATIC, "model.layers.0.self_attn.k_proj": PLAIN,
        "model.layers.0.self_attn.q_proj_2": PLAIN, "model.layers.0.mlp.experts.1.down_proj": MODELOPT,
        "model.layers.0.mlp.gate": PLAIN, Q: ROWS_OF_FP8, UP: MODELOPT, "model.layers.1.mlp.experts.1.up_proj": FP8_BLOCK,
        "model.layers.11.mlp.up_proj": MODELOPT, "model.layers.111.mlp.up_proj": PLAIN,
    }
    assert {name: found.of(name) for name in names} == names


def test_excluded_modules_are_plain_whatever_the_map_says() -> None:
    layers: dict[str, str | dict[str, Any]] = {"model.layers.0": "NVFP4", "model.layers.1": "NVFP4"}
    found = formats(modelopt(layers, ignore=["*.self_attn*"], exclude_modules=["model.layers.0.mlp.gate"]))
    assert each(found, Q, "model.layers.0.mlp.gate", UP) == [PLAIN, PLAIN, MODELOPT]


def test_the_map_of_a_model_around_the_language_model_has_longer_names() -> None:
    """Names of what encodes images, in formats that are not supported too, and of the MTP layer are no matter."""
    found = formats(modelopt({
        "model.language_model.layers.1.mlp.experts": "NVFP4", "model.visual.blocks.0.attn.qkv": "W8A8_SQ_PER_CHANNEL",
        "mtp.layers.0.mlp.experts": "MXFP8", "mtp.fc": "FP8",
    }))
    assert found.of(UP) is MODELOPT
    assert found.of("mtp.fc") == STATIC
    assert found.of("mtp.layers.0.mlp.experts.0.up_proj") is PLAIN


def test_an_older_export_has_the_map_in_a_file_beside_config_json(tmp_path: Path) -> None:
    own = modelopt({"model.layers.1.self_attn.q_proj": "FP8", "model.layers.1.mlp": "NVFP4"}, exclude_modules=["lm_head"])
    del own["quant_method"], own["ignore"]
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    beside = {"producer": {"name": "modelopt"}, "quantization": {**own, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found = load_spec(tmp_path).formats
    assert each(found, Q, DOWN, "model.layers.0.mlp.down_proj") == [STATIC, MODELOPT, PLAIN]


def test_groups_target_expressions_names_and_all_other_linear_layers() -> None:
    """A name comes before an expression, an expression before Linear, whatever group they are in; `ignore` before all."""
    found = formats(compressed(
        group(INT4, "Linear"), group(FP8, "re:.*self_attn.*"), group(NVFP4, "re:.*experts.*", "model.layers.0.self_attn.o_proj"),
        ignore=["re:.*layers\\.0\\.self_attn\\.v.*"],
    ))
    names: dict[str, WeightFormat] = {
        Q: ROWS_OF_FP8, "model.layers.0.self_attn.o_proj": COMPRESSED, "model.layers.0.self_attn.v_proj": PLAIN,
        UP: COMPRESSED, DOWN: INT4_OF_32,
    }
    assert {name: found.of(name) for name in names} == names


def test_of_two_expressions_that_match_a_module_the_first_group_decides() -> None:
    """As in a published checkpoint of Qwen3.8, whose last layers' MLPs are in FP8; modules of no group are plain."""
    found = formats(compressed(
        group(FP8, "re:.*self_attn\\.(q|k|v|o)_proj$", "re:.*layers\\.(5|6)\\.mlp\\.(gate|up|down)_proj$"),
        group(NVFP4, "re:.*mlp\\.(gate|up|down)_proj$"),
    ), "llama")
    names = ("model.layers.5.mlp.up_proj", "model.layers.4.mlp.up_proj", "model.layers.4.linear_attn.out_proj")
    assert each(found, *names) == [ROWS_OF_FP8, COMPRESSED, PLAIN]


@pytest.mark.parametrize(
    ("quantisation", "said"),
    [
        (modelopt({"model.layers.0.mlp": "W4A16_AWQ"}), 'modelopt with quantization_config.quantized_layers.model.layers.0.mlp'),
        (modelopt({"model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 32}}), "group_size=32 of model.layers.0.mlp"),
        (modelopt({"model.layers.0.mlp": {}}), "quant_algo=null of model.layers.0.mlp"),
        (modelopt({}), 'quant_algo="MIXED_PRECISION" and no quantized_layers'),
        (modelopt({"model.visual.blocks.0": "W8A16"}), 'quant_algo="MIXED_PRECISION" and no quantized_layers'),
        (modelopt({}, quantized_layers=["model.layers.0.mlp"]), "quantized_layers is ["),
        (modelopt({}, quantized_layers={"model.layers.0.mlp": "FP8"}), 'model.layers.0.mlp is "FP8"; it must be an object'),
        (compressed(group(FP8, "re:.*attn.*"), group(INT4, "Linear", "Qwen3Attention")), "Qwen3Attention"),
        (compressed(group(FP8, "Linear"), group(INT4, "Linear")), 'group_1.targets=["Linear"]'),
        (compressed(group(FP8, "re:.*a"), group(INT4, "re:.*a")), 'group_1.targets=["re:.*a"]'),
        (compressed(group(FP8, "Linear"), group(INT4)), "group_1.targets=[]"),
        (compressed(group(FP8, "re:(")), "'(' is not a regular expression"),
        (compressed(group(FP8, "Linear"), group(INT4, "re:.*mlp", format="int-quantized")), 'format="int-quantized"'),
        (compressed(group(FP8, "Linear"), group(INT4, "re:.*mlp", format=None)), 'format="mixed-precision"'),
        (compressed(group(INT4, "re:.*mlp", input_activations=TOKEN)), "compressed-tensors pack-quantized with "),
    ],
)
def test_what_is_not_supported_or_malformed_is_named_in_one_line(quantisation: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        formats(quantisation)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# --- models


def packer_of(*rules: tuple[str, Packer]) -> Any:
    """The packer of the first text that is in a projection's name; none: it is not quantised."""
    return lambda name: next((packer for text, packer in rules if text in name), None)


DIVIDED, MULTIPLIED = nvfp4(divides=True), nvfp4(divides=False)
SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, **EXPERTS}
LAYERS: dict[str, str | dict[str, Any]] = {
    **{f"model.layers.{i}.self_attn.{part}_proj": "FP8" for i in range(2) for part in "qkvo"},
    **{f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(2)},
}
MIXES: dict[str, tuple[dict[str, Any], Any]] = {
    "modelopt, FP8 and NVFP4": (modelopt(LAYERS), packer_of(("self_attn", fp8(scalar=True)), ("experts", MULTIPLIED))),
    "modelopt, plain and NVFP4": (
        modelopt({name: own for name, own in LAYERS.items() if "experts" in name}), packer_of(("experts", MULTIPLIED))
    ),
    "compressed-tensors, FP8 and NVFP4": (
        compressed(group(FP8, "re:.*self_attn.*"), group(NVFP4, "re:.*experts.*")),
        packer_of(("self_attn", fp8(scalar=False)), ("experts", DIVIDED)),
    ),
    "compressed-tensors, NVFP4, FP8 and INT4": (
        compressed(group(INT4, "Linear"), group(NVFP4, "re:.*qkv?_proj|.*v_proj", "re:.*[qk]_proj"), group(FP8, "re:.*o_proj")),
        packer_of(("q_proj", DIVIDED), ("k_proj", DIVIDED), ("v_proj", DIVIDED), ("o_proj", fp8(scalar=False)),
                  ("experts", int4(int4_layouts.of_compressed_tensors(32)))),
    ),
}


def make_mix(folder: Path, name: str) -> tuple[Path, Path]:
    return make(folder, *MIXES[name], "qwen3_moe", **SIZES)


@pytest.mark.parametrize("name", MIXES)
def test_each_part_of_a_model_is_that_of_its_dequantised_weights(name: str, tmp_path: Path) -> None:
    """In fp64; FP8 weights are converted, so the bits are the same."""
    folder, plain = make_mix(tmp_path, name)
    found, expected = logits(load(folder)), logits(load(plain))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    if "FP8" not in name:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", MIXES)
def test_two_ranks_compute_what_one_process_does(name: str, tmp_path: Path) -> None:
    folder, _ = make_mix(tmp_path, name)
    check_two_ranks(folder)


def test_bytes_and_what_is_kept_are_those_of_each_format(tmp_path: Path) -> None:
    folder, _ = make_mix(tmp_path, "modelopt, FP8 and NVFP4")
    spec = judge_model(LocalFiles(folder)).with_fp8_activations()
    attention = 2 * (192 * 96 * 2 + 192 * 192 * 2)
    experts = 2 * 3 * 3 * 64 * 192
    of_rows = 2 * 4 * (192 + 96 + 96 + 192) + 4 * 2 * 3 * (64 + 64 + 192)
    routers = 2 * 2 * 3 * 192
    assert spec.block_bytes(torch.bfloat16) == attention + experts * 9 // 16 + of_rows + routers
    assert spec.formats.kept == "FP8 weights and activations, NVFP4 weights"
    assert spec.formats.quantises


def test_activations_are_quantised_where_the_checkpoint_says_how_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Ada and newer; elsewhere FP8 weights are converted unless model.activations=fp8."""
    weight_only = group(FP8, "re:.*gate$", input_activations=None)
    own = formats(compressed(group(FP8, "re:.*self_attn.*"), group(NVFP4, "re:.*experts.*"), weight_only, ignore=[]))
    monkeypatch.setattr(policy, "has_kernels", lambda device: True)
    for found, nvfp4_format in (
        (own.on(CPU, torch.bfloat16, "auto"), COMPRESSED.for_kernels()), (own.on(CPU, torch.float32, "fp8"), COMPRESSED)
    ):
        asked = {name: found.quantises_input_of(name) for name in (Q, UP, "model.layers.0.mlp.gate")}
        assert asked == {Q: True, UP: False, "model.layers.0.mlp.gate": False}
        assert found.of(UP) == nvfp4_format
        assert found.quantises
    for found in (own.on(CPU, torch.float32, "auto"), own.on(CPU, torch.bfloat16, "dtype")):
        assert not found.quantises
    with pytest.raises(ConfigError, match="needs a checkpoint with FP8 weights"):
        formats(compressed(group(NVFP4, "Linear"))).on(CPU, torch.bfloat16, "fp8")
    with pytest.raises(ConfigError, match="does not say how to quantise activations"):
        formats(compressed(group(FP8, "Linear", input_activations=None))).on(CPU, torch.bfloat16, "fp8")


# --- what the files say


def reconfigure(quantisation: dict[str, Any], folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))


@pytest.mark.parametrize(
    ("quantisation", "said"),
    [
        (modelopt({**LAYERS, "model.layers.2.mlp.experts": "W4A16_NVFP4", "model.layer.9": "FP8_BLOCK_SCALES"}), "model.layer.9"),
        (compressed(group(FP8, "re:.*self_attn.*"), group(NVFP4, "re:.*block_sparse_moe.*")), ".*block_sparse_moe.*"),
        (compressed(group(FP8, "re:.*self_attn.*"), group(NVFP4, "model.layers.0.mlp.expert.1.up_proj")), "mlp.expert.1.up_proj"),
    ],
)
def test_a_format_of_modules_that_are_not_in_the_files_is_refused_by_their_names(
    quantisation: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder, _ = make_mix(tmp_path, "modelopt, FP8 and NVFP4")
    reconfigure(quantisation, folder)
    with pytest.raises(CheckpointError, match=r"gives a format of its own to .*, and the files have no such module") as caught:
        judge_model(LocalFiles(folder))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["self_attn.k_proj", "mlp.experts.1.up_proj", "mlp.experts.1.gate_proj", "mlp.experts.2.down_proj"]
)
def test_projections_of_one_product_must_have_one_format(name: str, tmp_path: Path) -> None:
    """q, k and v; gate and up of all experts; down of all experts. `plan` says so, before weights are downloaded."""
    quantisation, packer = MIXES["modelopt, FP8 and NVFP4"]
    layers = {**LAYERS, f"model.layers.1.{name}": "FP8_PER_CHANNEL_PER_TOKEN"}
    by_row = fp8(scalar=False)
    folder, _ = make(
        tmp_path, {**quantisation, **modelopt(layers)}, lambda own: by_row if own.endswith(f"1.{name}") else packer(own),
        "qwen3_moe", **SIZES,
    )
    with pytest.raises(CheckpointError, match="must have one weight format; correct quantization_config") as caught:
        judge_model(LocalFiles(folder))
    assert "\n" not in str(caught.value)


def test_a_format_of_an_mtp_layer_that_the_files_do_not_have_is_no_matter(tmp_path: Path) -> None:
    """As in files that transformers saved again."""
    folder, _ = make_mix(tmp_path, "modelopt, FP8 and NVFP4")
    reconfigure(modelopt({**LAYERS, "mtp.layers.0.mlp.experts": "FP8_BLOCK_SCALES"}), folder)
    assert judge_model(LocalFiles(folder)).formats.of(UP) is MODELOPT


def test_a_module_in_another_format_than_the_map_says_is_refused(tmp_path: Path) -> None:
    folder, _ = make_mix(tmp_path, "modelopt, FP8 and NVFP4")
    reconfigure(modelopt({**LAYERS, "model.layers.0.mlp.experts": "FP8"}), folder)
    with pytest.raises(CheckpointError, match=r"the weights do not fit config\.json: .*weight_scale_2") as caught:
        judge_model(LocalFiles(folder))
    assert "\n" not in str(caught.value)


def test_a_plain_weight_in_place_of_fp8_is_an_error_and_in_place_of_nvfp4_none(tmp_path: Path) -> None:
    folder, _ = make_mix(tmp_path, "modelopt, plain and NVFP4")
    reconfigure(modelopt(LAYERS), folder)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight is F32, it must be F8_E4M3"):
        judge_model(LocalFiles(folder))
    reconfigure(modelopt(dict.fromkeys(LAYERS, "NVFP4")), folder)
    spec = judge_model(LocalFiles(folder))
    assert spec.formats.of(Q) is PLAIN
    assert spec.formats.of(UP) is MODELOPT
