"""model.quantize=fp8: weights become FP8 when they are loaded, as if the checkpoint had been in FP8 before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import batchspec
from batchspec import run
from batchspec.config.compose import compose, composed
from batchspec.config.train_schema import TrainRun
from batchspec.draft.mtp import MtpDrafterSpec
from batchspec.draft.spec import open_drafter
from batchspec.errors import CheckpointError, ConfigError
from batchspec.heads import training
from batchspec.model.families.shapes import config_json, shape_spec
from batchspec.model.layers.base import GroupedSpec, Projection, Share, projections
from batchspec.model.lora import open_adapter
from batchspec.model.quant import fp8_at_load
from batchspec.model.quant.fp8_at_load import FP8_AT_LOAD, Fp8AtLoad, quantised_weight
from batchspec.model.quant.fp8_block import FP8_BLOCK
from batchspec.model.quant.fp8_products import BLOCK, Fp8Experts, Fp8Linear, Fp8Weight
from batchspec.model.quant.grouped import GroupedLinear
from batchspec.model.quant.plain import PLAIN as PLAIN_FORMAT
from batchspec.model.spec import ModelSpec, load_spec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import make_prompts
from tests.model.test_fp8_block import MOE, ODD, RECURRENT, SHARED, by_definition
from tests.model.test_lora import make_adapter
from tests.model.test_target import Runner, prompts

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3_moe": MOE, "qwen3_5_moe_text": {**RECURRENT, **SHARED}, "qwen3_next": {**RECURRENT, **SHARED},
}
PLAIN = ["lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "shared_expert_gate"]
"""What tools that write FP8 checkpoints leave plain."""


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor


@given(
    rows=st.integers(1, 300), k=st.integers(1, 300), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    exponent=st.integers(-20, 6), zeros=st.booleans(), seed=st.integers(0, 9),
)
def test_weights_and_scales_are_those_of_the_definition(
    rows: int, k: int, dtype: torch.dtype, exponent: int, zeros: bool, seed: int
) -> None:
    weight = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).mul_(2.0**exponent).to(dtype)
    if zeros:
        weight[:BLOCK, :BLOCK] = 0
    found, (values, scales) = quantised_weight(weight), by_definition(weight)
    assert torch.equal(bits(found.values), bits(values))
    assert torch.equal(found.scale, scales)


def test_float16_is_quantised_in_fp32_because_its_smallest_scales_lose_bits() -> None:
    weight = (torch.randn(64, 64) * 1e-4).half()
    assert torch.equal(quantised_weight(weight).scale, by_definition(weight.float())[1])
    assert not torch.equal(quantised_weight(weight).scale, by_definition(weight)[1])


def make_both(folder: Path, family: str) -> tuple[Path, Path]:
    """A plain checkpoint, and one of the same weights in FP8."""
    plain, fp8 = make_checkpoint(folder / "plain", family, **ODD | FAMILIES[family]), folder / "fp8"
    stored = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = tensor
        module = name.removesuffix(".weight")
        if tensor.dim() == 2 and "embed" not in name and not any(module.endswith(own) for own in PLAIN):
            stored[name], stored[f"{name}_scale_inv"] = by_definition(tensor)
    fp8.mkdir()
    save_file(stored, fp8 / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    quantisation = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": PLAIN,
    }
    (fp8 / "config.json").write_text(json.dumps({**values, "quantization_config": quantisation}))
    return plain, fp8


def logits(folder: Path, spec: ModelSpec, activations: str) -> Tensor:
    target = Target.load(folder, spec.on(CPU, torch.float32, activations), dtype=torch.float32, device=CPU)
    return torch.cat(Runner.start(target, 2).feed(prompts([13, 5], 320))[0])


@pytest.mark.parametrize("activations", ["dtype", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_model_is_that_of_the_fp8_checkpoint_bit_for_bit(family: str, activations: str, tmp_path: Path) -> None:
    plain, fp8 = make_both(tmp_path, family)
    before, here = load_spec(plain), load_spec(plain).quantised("fp8")
    assert torch.equal(logits(plain, here, activations), logits(fp8, load_spec(fp8), activations))
    assert not torch.equal(logits(plain, here, activations), logits(plain, before, "auto"))
    quantises = here.on(CPU, torch.float32, activations).weight_bytes(torch.bfloat16)
    assert quantises == load_spec(fp8).on(CPU, torch.float32, activations).weight_bytes(torch.bfloat16)


def test_gates_stay_and_all_other_products_do_not() -> None:
    spec = read_spec({**recurrent_config(), "model_type": "qwen3_5_moe_text"}, "config.json").quantised("fp8")
    modules = [prefix + part.name for prefix, block in spec.blocks() for part in projections(block)]
    stay = {name for name in modules if not isinstance(spec.formats.of(name), Fp8AtLoad)}
    assert {name.rpartition(".")[2] for name in stay} == {"in_proj_a", "in_proj_b"}
    experts = [prefix + own.of(0).parts[0].name for prefix, block in spec.blocks() for own in block.grouped]
    assert experts
    assert all(isinstance(spec.formats.of(name), Fp8AtLoad) for name in experts)


def recurrent_config() -> dict[str, Any]:
    return {
        **ODD, **RECURRENT, **SHARED, "vocab_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4, "architectures": ["Qwen3_5MoeForCausalLM"],
    }


@pytest.mark.parametrize("quantises", [True, False])
@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_experts_that_a_file_stacks_are_quantised_one_by_one(part: str, quantises: bool) -> None:
    """As gpt-oss in bfloat16 holds them: transposed, gate and up interleaved. Gate and up are two projections."""
    gated = part == "gate_up_proj"
    grouped = GroupedSpec(
        name="experts", parts=(part,), num_experts=3, part_rows=300, k=140, bias=True, stacked=True, interleaved=gated
    )
    torch.manual_seed(0)
    files = {f"experts.{part}": torch.randn(3, 140, 300), f"experts.{part}_bias": torch.randn(3, 300)}
    form = FP8_AT_LOAD.with_activations() if quantises else FP8_AT_LOAD
    product = form.load_grouped(Files(files), grouped)
    x = torch.randn(5, 140)
    for expert, (matrix, bias) in enumerate(zip(files[f"experts.{part}"].mT, files[f"experts.{part}_bias"], strict=True)):
        parts = [matrix[0::2], matrix[1::2]] if gated else [matrix]
        made = [by_definition(own) for own in parts]
        own_bias = torch.cat((bias[0::2], bias[1::2])) if gated else bias
        if quantises:
            assert isinstance(product, Fp8Experts)
            assert product._bias is not None
            assert torch.equal(product._bias[expert], own_bias)
            assert torch.equal(bits(product.weight.values[expert]), bits(torch.cat([values for values, _ in made])))
            assert torch.equal(product.weight.scales[expert], torch.cat([scales for _, scales in made]))
        else:
            assert isinstance(product, GroupedLinear)
            weight = torch.cat([Fp8Weight(values, scales).matrix(torch.float32) for values, scales in made])
            assert torch.equal(product.product(expert, x), torch.nn.functional.linear(x, weight, own_bias))


class Files:
    """The tensors of a checkpoint in memory."""

    dtype, device = torch.float32, CPU

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self.stored(name)

    def stored(self, name: str) -> Tensor:
        return self._tensors[name]

    def entry(self, name: str, index: int) -> Tensor:
        return self._tensors[name][index]


def test_an_adapter_is_merged_before_weights_are_quantised(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", num_hidden_layers=1)
    spec, folder = load_spec(base).quantised("fp8"), make_adapter(tmp_path / "adapter", base, ["q_proj"], r=4, lora_alpha=4)
    adapter = open_adapter(str(folder), spec)
    assert not adapter.kept
    tensors = load_file(base / "model.safetensors")
    low = load_file(folder / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (low[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    tensors[f"{name}.weight"] += b @ a
    merged = tmp_path / "merged"
    merged.mkdir()
    save_file(tensors, merged / "model.safetensors")
    (merged / "config.json").write_text((base / "config.json").read_text())
    found = Target.load(base, spec, dtype=torch.float32, device=CPU, adapter=adapter)
    wanted = Target.load(merged, spec, dtype=torch.float32, device=CPU)
    runs = [torch.cat(Runner.start(target, 1).feed(prompts([9], 320))[0]) for target in (found, wanted)]
    assert torch.equal(*runs)


def test_quantised_dummy_weights_take_the_memory_that_is_planned() -> None:
    spec = read_spec({**recurrent_config(), "model_type": "qwen3_5_moe_text"}, "config.json")
    spec = spec.quantised("fp8").with_fp8_activations()
    weights = DummyWeights(spec, dtype=torch.bfloat16, device=CPU)
    part = Projection("model.layers.1.self_attn.o_proj", 136, 136)
    product = spec.formats.of(part.name).load(weights, [part.name], bias=False)
    assert isinstance(product, Fp8Linear)
    planned = spec.formats.of(part.name).nbytes(part.rows, part.k, torch.bfloat16)
    assert planned == product._values.nbytes + product._scales.nbytes


def test_ranks_hold_whole_blocks_so_that_each_has_the_scale_of_one_gpu() -> None:
    part, columns = Projection("p", 300, 512), slice(256, 512)
    assert FP8_AT_LOAD.shard(part, Share("rows", (columns,))) == {"p.weight": ((slice(0, 300), columns),)}
    with pytest.raises(ConfigError, match=r"^p: a part of 64 of .* divides a block of 128;"):
        FP8_AT_LOAD.shard(part, Share("rows", (slice(0, 64),)))
    weight = torch.randn(300, 512)
    whole, own = quantised_weight(weight), quantised_weight(weight[:, columns])
    assert torch.equal(bits(own.values), bits(whole.values[:, columns]))
    assert torch.equal(own.scale, whole.scale[:, 2:])
    assert FP8_AT_LOAD.block == FP8_BLOCK.block
    stacked = GroupedSpec(name="experts", parts=("down_proj",), num_experts=2, part_rows=300, k=512, stacked=True)
    with pytest.raises(ConfigError, match=r"^experts\.down_proj: a part of 64 of .* divides a block of 128;"):
        FP8_AT_LOAD.shard_grouped(stacked, Share("rows", (slice(0, 64),)))


@pytest.mark.parametrize("shape", ["llama8b-fp8", "llama8b-int4", "llama8b-nvfp4", "gpt-oss-20b", "qwen3-30b-a3b-fp8"])
def test_a_checkpoint_that_is_quantised_already_refuses_the_key(shape: str) -> None:
    """That of gpt-oss is in MXFP4, whose attention is plain."""
    with pytest.raises(ConfigError, match=r"^model\.quantize=fp8 is for checkpoints whose weights are .*remove the key$"):
        shape_spec(shape).quantised("fp8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_besides_weight_and_result_a_stripe_is_in_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor that is made on the way has more numbers than the result but for the stripe's."""
    stripe = 1024 * 256
    monkeypatch.setattr(fp8_at_load, "STRIPE", stripe)
    made = list[int]()

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **kwargs or {})
            made.extend(own.numel() * own.element_size() for own in (out,) if isinstance(out, Tensor) and own._base is None)
            return out

    weight = torch.randn(4096, 256).to(dtype)
    with Noted():  # type: ignore[no-untyped-call]
        found = quantised_weight(weight)
    assert max(made) <= max(found.values.nbytes, 4 * stripe)


def test_per_layer_inputs_stay_and_sums_in_one_order_go_on() -> None:
    spec = shape_spec("gemma4-e2b").quantised("fp8")
    modules = [prefix + part.name for prefix, block in spec.blocks() for part in projections(block)]
    stay = {name.rpartition(".")[2] for name in modules if not isinstance(spec.formats.of(name), Fp8AtLoad)}
    assert stay == {"per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"}
    assert spec.with_fp8_activations().in_one_order().formats.quantised == replace(FP8_AT_LOAD, quantises=True, ordered=True)


def test_weights_given_to_a_warm_engine_get_scales_of_their_own(tmp_path: Path) -> None:
    """Nine times the weights; the model that is expected holds them rounded to e4m3 by the definition, as plain weights."""
    model = make_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    words = ["draft=none", "device=cpu", "packing.max_num_seqs=2", "decode.max_new_tokens=6"]
    prompt = [{"prompt_ids": [5, 6, 7]}, {"prompt_ids": [8, 9]}]
    larger = {name: 9 * own if own.dim() == 2 else own for name, own in load_file(model / "model.safetensors").items()}
    rounded = {}
    for name, own in larger.items():
        stays = own.dim() == 1 or "embed" in name or "lm_head" in name
        rounded[name] = own if stays else Fp8Weight(*by_definition(own)).matrix(torch.bfloat16)
    (tmp_path / "rounded").mkdir()
    save_file(rounded, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "rounded" / "config.json").write_text((model / "config.json").read_text())
    with batchspec.Engine([f"model.path={model}", "model.quantize=fp8", *words]) as engine:
        before = engine.generate(prompt)["token_ids"].to_list()
        with pytest.raises(CheckpointError):
            engine.load_weights({})
        engine.load_weights(larger)
        swapped = engine.generate(prompt)["token_ids"].to_list()
    expected = batchspec.generate(prompt, overrides=[f"model.path={tmp_path / 'rounded'}", *words])["token_ids"].to_list()
    assert swapped == expected
    assert before != swapped


def test_a_job_writes_what_it_would_write_of_the_fp8_checkpoint_and_says_so(tmp_path: Path) -> None:
    plain, fp8 = make_both(tmp_path, "qwen3_moe")
    for folder in (plain, fp8):
        make_tokenizer(folder)
    rows = make_prompts(tmp_path / "in.parquet", 5)
    shared = [f"input.path={rows}", "draft=lookup", "device=cpu", "decode.max_new_tokens=6", "packing.max_num_seqs=2"]
    runs = {"here": [f"model.path={plain}", "model.quantize=fp8"], "before": [f"model.path={fp8}"]}
    for name, words in runs.items():
        assert run.main([*words, *shared, f"output.dir={tmp_path / name}"]) == 0
    answers = [pl.read_parquet(tmp_path / name / "data").sort("request_id")["token_ids"].to_list() for name in runs]
    assert answers[0] == answers[1]
    assert "weights rounded to FP8 at load, the rest in float32" in (tmp_path / "here" / "README.md").read_text()


def test_a_job_is_not_continued_with_weights_that_are_quantised_otherwise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_tokenizer(make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1))
    words = [f"model.path={model}", f"input.path={make_prompts(tmp_path / 'in.parquet', 2)}", f"output.dir={tmp_path}/out"]
    words += ["draft=none", "device=cpu", "decode.max_new_tokens=2"]
    assert run.main([*words, "model.quantize=fp8"]) == 0
    capfd.readouterr()
    assert run.main(words) == 2
    assert "model.quantize: " in capfd.readouterr().err


def test_the_mtp_layer_of_a_quantised_model_stays_as_it_is(tmp_path: Path) -> None:
    target = shape_spec("qwen3.5-35b-a3b").quantised("fp8")
    assert isinstance(target.formats.of("model.layers.3.self_attn.q_proj"), Fp8AtLoad)
    (tmp_path / "config.json").write_bytes(config_json("qwen3.5-35b-a3b"))
    config = compose([f"model.path={tmp_path}", "model.load_format=dummy", "draft=mtp", "device=cpu", "input.path=in.parquet"])
    drafter = open_drafter(config, target)
    assert isinstance(drafter, MtpDrafterSpec)
    mtp = drafter.checkpoint.mtp
    assert {mtp.formats.of(prefix + part.name) for prefix, block in mtp.blocks() for part in projections(block)} == {PLAIN_FORMAT}


def test_a_head_is_trained_for_the_quantised_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a training that was begun with other weights is another one."""
    model = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2)
    table = pa.table({"prompt_ids": [[5, 6, i] for i in range(9)], "token_ids": [[8, 9, 10, 11]] * 9})
    pq.write_table(table, tmp_path / "rows.parquet")
    seen = list[ModelSpec]()

    def load(folder: Path, spec: ModelSpec, **_: Any) -> Target:
        seen.append(spec)
        raise CheckpointError("far enough")

    monkeypatch.setattr(Target, "load", load)
    words = [f"model.path={model}", f"input.path={tmp_path}/rows.parquet", f"output.dir={tmp_path}/head", "device=cpu"]
    words.append("train.held_out=1")
    with pytest.raises(CheckpointError, match="far enough"):
        training.train(composed("train", [*words, "model.quantize=fp8"], schema=TrainRun))
    assert isinstance(seen[0].formats.quantised, Fp8AtLoad)
