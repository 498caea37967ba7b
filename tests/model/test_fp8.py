"""FP8 of compressed-tensors and modelopt: the model of the dequantised weights; activations quantised as the definition says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchspec.checkpoint.files import LocalFiles
from batchspec.config.compose import compose
from batchspec.errors import CheckpointError, ConfigError
from batchspec.job.prepare import Job, open_job
from batchspec.job.runner.identity import job_fingerprint
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens
from batchspec.model.decoder import LayerWeights
from batchspec.model.layers.base import ProductSpec, Projection, Shard
from batchspec.model.layers.latent.block import LatentAttention
from batchspec.model.quant import fp8_products
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.fp8 import Fp8
from batchspec.model.quant.fp8_products import Activations, Fp8Linear, Fp8Weight, pieces, quantised
from batchspec.model.quant.plain import PLAIN
from batchspec.model.shard import part_of, slices_of
from batchspec.model.spec import load_spec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from tests.helpers.gemma4_models import DENSE, LAYER_INPUTS
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.moe_models import Strong, tiny_spec
from tests.helpers.runs import make_prompts
from tests.model.test_target import Runner, prompts

CPU = torch.device("cpu")
ODD: dict[str, Any] = {"hidden_size": 136, "intermediate_size": 200, "num_hidden_layers": 2}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}
TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}


def compressed(strategy: str, inputs: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    weights = {**WEIGHTS, "strategy": strategy, **({"block_structure": [128, 128]} if strategy == "block" else {})}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.down.*"], "kv_cache_scheme": {"num_bits": 8}, **changes,
    }


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head", "*.1.mlp.down*"]}
MINISTRAL = {
    "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
    "modules_to_not_convert": ["lm_head", "model.vision_tower", "layers.1.mlp.down_proj"],
}
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "row, token": (compressed("channel", TOKEN), "row"),
    "tensor, token": (compressed("tensor", TOKEN), "tensor"),
    "tensor, static": (compressed("tensor", {**TOKEN, "dynamic": False, "strategy": "tensor"}), "tensor"),
    "row, plain": (compressed("channel", None), "row"),
    "block, group": (compressed("block", {**TOKEN, "strategy": "group", "group_size": 128}), "block"),
    "modelopt": (MODELOPT, "tensor"),
    "as of Ministral 3": (MINISTRAL, "tensor"),
}

QUANTISED = ("_proj.weight", "_projection.weight", "_gate.weight", "_with_mqa.weight")
"""Ends of the names of weights that are quantised."""
LATENT: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 14, "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 22,
    "n_shared_experts": 1, "mlp_layer_types": ["dense", "dense"],
}


def stored_as(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    """e4m3 and the scales of the file; the largest number of each is 448, one row is zero."""
    if scales == "block":
        blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 128, 0, -weight.shape[0] % 128))
        scale = blocks.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax((1, 3)) / 448
    else:
        largest = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) if scales == "row" else weight.abs().max().view(1)
        scale = (largest / 448).bfloat16()  # as llm-compressor writes it
    return (weight / spread(scale, weight)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def spread(scale: Tensor, weight: Tensor) -> Tensor:
    scale = scale.float()
    if scale.dim() == 2 and scale.shape[0] < weight.shape[0]:
        scale = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
    return scale


def make(
    folder: Path, layout: str, *, family: str = "llama", scalars: tuple[int, ...] = (1,), **config: Any
) -> tuple[Path, Path]:
    """A checkpoint in this layout, and the plain one of its dequantised weights."""
    quantisation, scales = LAYOUTS[layout]
    plain, fp8 = make_checkpoint(folder / "plain", family, **{**ODD, **config}), folder / "fp8"
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        stored[name] = tensor
        if name.endswith(QUANTISED) and "layers.1.mlp.down" not in name:
            tensor[3] = 0.0
            weight, scale = stored_as(tensor, scales)
            tensors[name] = weight.float() * spread(scale, tensor)
            ministral = layout == "as of Ministral 3"
            of_weight, of_input = ("_scale_inv", "activation_scale") if ministral else ("_scale", "input_scale")
            stored |= {name: weight, f"{name}{of_weight}": scale.reshape(scalars) if scales == "tensor" else scale}
            if layout in ("modelopt", "tensor, static") or ministral:
                stored[name.replace("weight", of_input)] = torch.full(scalars, 0.03)
        if name.endswith("k_proj.weight"):
            stored[name.replace("k_proj.weight", "k_scale")] = torch.tensor(0.5)
            stored[name.replace("weight", "k_scale")] = torch.tensor(0.5)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    fp8.mkdir()
    save_file(stored, fp8 / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**values, "quantization_config": quantisation}))
    return fp8, plain


def logits(folder: Path, *, fp8: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    spec = load_spec(folder)
    target = Target.load(folder, spec.with_fp8_activations() if fp8 else spec, dtype=dtype, device=CPU)
    return torch.cat(Runner.start(target, 2).feed(prompts([13, 5], 320))[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scalars", [(1,), ()])
def test_a_checkpoint_is_the_model_of_its_dequantised_weights(layout: str, scalars: tuple[int, ...], tmp_path: Path) -> None:
    fp8, plain = make(tmp_path, layout, scalars=scalars, attention_bias=True)
    judge_model(LocalFiles(fp8))
    assert torch.equal(logits(fp8), logits(plain))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("glm4", {"head_dim": 36}), ("gemma3_text", {"head_dim": 34}), ("gemma4_text", DENSE),
        ("gemma4_text", LAYER_INPUTS),
    ],
)
def test_fused_projections_and_norms_of_other_families_too(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    fp8, plain = make(tmp_path, "row, token", family=family, **config)
    assert torch.equal(logits(fp8), logits(plain))


@pytest.mark.parametrize("layout", ["row, token", "tensor, static", "block, group"])
def test_keys_and_values_of_latent_attention_are_expanded_by_dequantised_weights(layout: str, tmp_path: Path) -> None:
    """However activations are quantised: the matrix is no input of a product."""
    fp8, plain = make(tmp_path, layout, family="glm4_moe_lite", num_hidden_layers=2, **LATENT)

    def matrices(folder: Path, *, quantised: bool) -> list[Tensor]:
        spec = load_spec(folder)
        target = Target.load(folder, spec.with_fp8_activations() if quantised else spec, dtype=torch.float32, device=CPU)
        made = [cast(LatentAttention, layer.mixer)._matrices for layer in target._layers]
        return [own for one in made for own in (one.keys, one.values)]

    expected = matrices(plain, quantised=False)
    assert len(expected) == 4
    assert all(map(torch.equal, matrices(fp8, quantised=True), expected))


def test_experts_of_a_mixture_too(tmp_path: Path) -> None:
    experts: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 30, "norm_topk_prob": True}
    fp8, plain = make(tmp_path, "row, token", family="qwen3_moe", **experts)
    assert torch.equal(logits(fp8), logits(plain))
    error = (logits(fp8, fp8=True) - logits(plain)).norm() / logits(plain).norm()
    assert 1e-3 < error < 0.1


@pytest.mark.parametrize("layout", ["row, token", "block, group", "tensor, static"])
def test_stacked_experts_stay_plain_because_quantisers_convert_modules_alone(layout: str, tmp_path: Path) -> None:
    """gpt-oss with FP8 attention; `ignore` does not name the experts."""
    experts: dict[str, Any] = {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 34}
    fp8, plain = make(tmp_path, layout, family="gpt_oss", num_hidden_layers=1, initializer_range=0.05, **experts)
    judge_model(LocalFiles(fp8))
    spec = load_spec(fp8)
    assert isinstance(spec.formats.of("model.layers.0.self_attn.q_proj"), Fp8)
    assert spec.formats.of("model.layers.0.mlp.experts.gate_up_proj") is PLAIN
    assert spec.weight_bytes(torch.bfloat16) > spec.with_fp8_activations().weight_bytes(torch.bfloat16) > 0
    assert torch.equal(logits(fp8), logits(plain))
    error = (logits(fp8, fp8=True) - logits(plain)).norm() / logits(plain).norm()
    assert 1e-3 < error < 0.1


def test_ranks_share_fp8_attention_and_plain_stacked_experts(tmp_path: Path) -> None:
    values: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 6}
    config = {"model_type": "gpt_oss", **ODD, **values, **experts, "vocab_size": 64, "max_position_embeddings": 64}
    spec = read_spec({**config, "quantization_config": LAYOUTS["block, group"][0]}, "config.json")
    own = slices_of(part_of(spec, Shard(1, 2)))
    assert own is not None
    assert own["model.layers.0.self_attn.q_proj.weight_scale"] == ((slice(2, 4), slice(0, 2)),)
    assert own["model.layers.0.mlp.experts.gate_up_proj"] == ((slice(0, 3), slice(0, 256), slice(6, 12)),)


def test_a_config_beside_the_model_s_is_read(tmp_path: Path) -> None:
    fp8, _ = make(tmp_path, "modelopt")
    config = json.loads((fp8 / "config.json").read_text())
    expected, quantisation = load_spec(fp8), config.pop("quantization_config")
    (fp8 / "config.json").write_text(json.dumps(config))
    del quantisation["quant_method"]
    quantisation["exclude_modules"] = quantisation.pop("ignore")
    beside = {"producer": {"name": "modelopt"}, "quantization": quantisation}
    (fp8 / "hf_quant_config.json").write_text(json.dumps(beside))
    assert load_spec(fp8) == expected


# --- quantised activations


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "plain" not in name])
def test_quantised_activations_are_near_and_not_the_same(layout: str, tmp_path: Path) -> None:
    fp8, plain = make(tmp_path, layout, num_hidden_layers=1, initializer_range=0.05)
    found, expected = logits(fp8, fp8=True), logits(plain)
    error = (found - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.1
    wide = logits(fp8, fp8=True, dtype=torch.float64)
    torch.testing.assert_close(found.double(), wide, rtol=0, atol=2e-2 * float(wide.abs().max()))


def by_hand(x: Tensor, weight: Fp8Weight, size: int, static: float | None) -> Tensor:
    """Each number of the product by itself, in Python's floats."""
    scales = [
        [static or max(float(row[at : at + size].abs().max()), 1e-10) / 448 for at in range(0, x.shape[1], size)] for row in x
    ]
    out = torch.zeros(x.shape[0], weight.values.shape[0], dtype=torch.float64)
    numbers = weight.values.double() * weight.spread.double()
    for t, row in enumerate(x):
        each = torch.tensor([scales[t][j // size] for j in range(len(row))], dtype=torch.float64)
        out[t] = numbers @ ((row.double() / each).clamp(-448, 448).to(torch.float8_e4m3fn).double() * each)
    return out


@pytest.mark.parametrize(("blocked", "static"), [(False, None), (False, 0.01), (True, None)])
def test_the_product_is_that_of_the_definition(blocked: bool, static: float | None) -> None:
    x, weight = torch.randn(5, 300, dtype=torch.float64) * 2, torch.randn(200, 300)
    x[1], x[2, 7], x[3, :128] = 0.0, 1e5, 1e-14
    values, scale = stored_as(weight, "block" if blocked else "row")
    part = Fp8Weight(values, scale.float() if blocked else scale.float()[:, 0], static)
    bias = torch.randn(200, dtype=torch.float64)
    kind: Activations = "group" if blocked else "static" if static else "token"
    found = Fp8Linear([part], bias, kind)(x)
    torch.testing.assert_close(found, by_hand(x, part, 128 if blocked else 300, static) + bias, rtol=1e-12, atol=1e-12)
    narrow = Fp8Linear([part], None, kind)(x.bfloat16())
    assert narrow.dtype is torch.bfloat16


def test_quantisation_rounds_to_the_nearest_even_number_and_saturates() -> None:
    x = torch.tensor([[448.0, 17.0, 19.0, -1e-12, 0.0]])
    values, scale = quantised(x, "token")
    assert scale.tolist() == [[1.0]]
    assert values.float().tolist() == [[448.0, 16.0, 20.0, 0.0, 0.0]]
    values, _ = quantised(torch.tensor([[900.0, -900.0, 1.0]]), "static", 1.0)
    assert values.float().tolist() == [[448.0, -448.0, 1.0]]
    values, scale = quantised(torch.zeros(2, 300), "group")
    assert (scale > 0).all()
    assert not values.float().any()
    assert scale.shape == (3, 2)


def test_parts_are_joined_where_every_number_keeps_its_scale() -> None:
    def part(rows: int, *, blocked: bool, static: float | None = None) -> Fp8Weight:
        shape = (-(-rows // 128), 2) if blocked else (rows,)
        return Fp8Weight(torch.randn(rows, 200).to(torch.float8_e4m3fn), torch.rand(shape), static)

    for parts, count in (
        ([part(256, blocked=True), part(40, blocked=True)], 1),
        ([part(40, blocked=True), part(256, blocked=True)], 2),
        ([part(40, blocked=False), part(3, blocked=False)], 1),
        ([part(40, blocked=False, static=0.5), part(3, blocked=False, static=0.25)], 2),
    ):
        values, scale = torch.cat([weight.values for weight in parts]), torch.cat([weight.scale for weight in parts])
        found = [Fp8Weight(values[piece.rows], scale[piece.scales], piece.input_scale) for piece in pieces(parts)]
        assert len(found) == count
        spread_out = [weight.values.float() * weight.spread for weight in found]
        assert torch.equal(torch.cat(spread_out), torch.cat([weight.values.float() * weight.spread for weight in parts]))


@pytest.mark.parametrize(("scales", "times"), [((None, None), 1), ((0.5, 0.5), 1), ((0.5, 0.25), 2)])
def test_activations_are_quantised_once_for_all_parts_with_one_scale(
    scales: tuple[float | None, float | None], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Fp8Weight(torch.randn(40, 200).to(torch.float8_e4m3fn), torch.rand(1, 2), scale) for scale in scales]
    if scales[0] is not None:
        parts = [replace(part, scale=torch.rand(40)) for part in parts]
    product = Fp8Linear(parts, None, "group" if scales[0] is None else "static")
    calls: list[Fp8Form] = []
    quantise = fp8_products._quantise_plainly

    def counted(x: Tensor, form: Fp8Form) -> Fp8Tokens:
        calls.append(form)
        return quantise(x, form)

    monkeypatch.setattr(fp8_products, "_quantise_plainly", counted)
    assert product(torch.randn(3, 200)).shape == (3, 80)
    assert len(calls) == times


def test_an_input_that_was_not_calibrated_is_refused(tmp_path: Path) -> None:
    fp8, _ = make(tmp_path, "modelopt", num_hidden_layers=1)
    tensors = load_file(fp8 / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.input_scale"].zero_()
    save_file(tensors, fp8 / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.input_scale is 0; it must be positive"):
        logits(fp8, fp8=True)


class Calibrated(Strong):
    """With a scale of the inputs for each projection."""

    input_scale: Callable[[str], float]

    def tensor(self, name: str) -> Tensor:
        found = super().tensor(name)
        return found.fill_(self.input_scale(name)) if name.endswith("input_scale") else found


def test_experts_of_a_layer_use_the_largest_of_their_input_scales() -> None:
    static = {**TOKEN, "dynamic": False, "strategy": "tensor"}
    spec = tiny_spec("qwen3_moe", quantization_config=compressed("tensor", static)).with_fp8_activations()

    def found(input_scale: Callable[[str], float]) -> Tensor:
        weights = Calibrated(spec, dtype=torch.float64, device=CPU)
        weights.input_scale = input_scale
        return torch.cat(Runner.start(Target(spec, weights, CPU), 2).feed(prompts([9, 5], 31))[0])

    largest = found(lambda name: 0.05 if ".experts." in name else 0.02)
    assert torch.equal(found(lambda name: 0.05 if ".experts.3." in name else 0.02), largest)
    assert not torch.equal(found(lambda name: 0.02), largest)


def test_activations_of_a_checkpoint_that_does_not_quantise_them_stay_plain() -> None:
    spec = tiny_spec("llama", quantization_config=compressed("tensor", None))
    with pytest.raises(ConfigError, match="the checkpoint does not say how to quantise activations; use dtype"):
        spec.with_fp8_activations()


def test_parts_of_one_product_in_two_formats_are_refused(tmp_path: Path) -> None:
    formats = Formats(Fp8("row", "token"), ("up_proj",))
    product = ProductSpec((Projection("mlp.gate_proj", 4, 4), Projection("mlp.up_proj", 4, 4)))
    weights: Any = None
    with pytest.raises(CheckpointError, match="must have one weight format; correct quantization_config"):
        LayerWeights(weights, formats, "model.layers.0.").product(product)
    three = ProductSpec(tuple(Projection(f"self_attn.{x}_proj", 4, 4) for x in "qkv"))
    with pytest.raises(CheckpointError, match="must have one weight format; correct quantization_config"):
        LayerWeights(weights, Formats(Fp8("row", "token"), ("v_proj",)), "model.layers.0.").product(three)


@pytest.mark.parametrize(("scales", "shape"), [("block", (2, 3)), ("row", (200, 1)), ("tensor", (1,))])
def test_the_bytes_that_are_planned_for_a_weight_are_those_of_its_values_and_scales(scales: Any, shape: tuple[int, ...]) -> None:
    class Held:
        dtype = torch.bfloat16

        def stored(self, name: str) -> Tensor:
            return torch.zeros(200, 300).to(torch.float8_e4m3fn) if name == "p.weight" else torch.ones(shape)

    weights: Any = Held()
    fp8 = Fp8(scales, "group" if scales == "block" else "token", quantises=True)
    product = fp8.load(weights, ["p"], bias=False)
    assert isinstance(product, Fp8Linear)
    assert fp8.nbytes(200, 300, torch.bfloat16) == product._values.nbytes + product._scales.nbytes


# --- the key of a job


def test_the_key_is_a_part_of_what_a_job_is_and_needs_fp8_weights(tmp_path: Path) -> None:
    fp8, plain = make(tmp_path, "row, token", num_hidden_layers=1)
    for folder in (fp8, plain):
        make_tokenizer(folder)
    words = [f"input.path={make_prompts(tmp_path / 'in.parquet', 2)}", f"output.dir={tmp_path}/out", "draft=none", "device=cpu"]
    words.append("decode.max_new_tokens=4")

    def opened(folder: Path, activations: str) -> Job:
        return open_job(compose([f"model.path={folder}", f"model.activations={activations}", *words]))

    usual, asked = opened(fp8, "dtype"), opened(fp8, "fp8")
    assert asked.spec == usual.spec.with_fp8_activations() != usual.spec
    assert job_fingerprint(asked) == {**job_fingerprint(usual), "model.activations": '"fp8"'}
    with pytest.raises(ConfigError, match=r"model\.activations=fp8 needs a checkpoint with FP8 weights; use dtype"):
        opened(plain, "fp8")
