"""Models with INT4 weights are those of their dequantised weights: to the bit in fp64, on one rank and several, with adapters."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchspec.checkpoint.files import LocalFiles
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.layers.base import Shard
from batchspec.model.lora import open_adapter
from batchspec.model.lora_products import AdapterSet, DummyAdapters
from batchspec.model.quant import dequantised
from batchspec.model.quant.four_bit import FourBitLinear
from batchspec.model.quant.int4_format import Int4
from batchspec.model.quant.plain import PLAIN
from batchspec.model.shard import part_of
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weights import Checkpoint, judge_model
from tests.distributed.test_tensor_parallel import outputs
from tests.helpers.int4_layouts import LAYOUTS, Layout, make, of_awq, of_compressed_tensors, of_gptq
from tests.helpers.moe_models import tiny_spec
from tests.helpers.ranks import on_ranks
from tests.model.test_lora import make_adapter
from tests.model.test_target import Runner, prompts

CPU = torch.device("cpu")
EXPERTS: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
ROWS = [[3, 9, 1, 22, 7, 7, 30], [5], [8, 2, 19, 4]]


def load(folder: Path, dtype: torch.dtype = torch.float64) -> Target:
    spec = judge_model(LocalFiles(folder))
    return Target.load(folder, spec, dtype=dtype, device=CPU)


def logits(target: Target) -> Tensor:
    return torch.cat(Runner.start(target, 2).feed(prompts([13, 5], 320))[0])


def quantised_projections(target: Target) -> int:
    return sum(isinstance(product, FourBitLinear) for product in products(target))


def products(target: Target) -> list[Any]:
    found = []
    for layer in target._layers:
        for block in (layer.mixer, *layer._mlps):
            found += [value for name, value in vars(block).items() if name in ("_qkv", "_out", "_gate_up", "_down")]
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_the_model_of_its_dequantised_weights(name: str, tmp_path: Path) -> None:
    """One projection is not quantised, and others have biases."""
    folder, plain = make(tmp_path, LAYOUTS[name], attention_bias=True)
    target = load(folder)
    assert quantised_projections(target) == 7
    assert torch.equal(logits(target), logits(load(plain)))
    near, exact = logits(load(folder, torch.float32)), logits(load(plain, torch.float32))
    torch.testing.assert_close(near, exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_too(name: str, tmp_path: Path) -> None:
    """Each projection of each expert in act order has groups of its own."""
    folder, plain = make(tmp_path, LAYOUTS[name], "qwen3_moe", **EXPERTS)
    assert torch.equal(logits(load(folder)), logits(load(plain)))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("glm4", {"head_dim": 48}),
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"], "head_dim": 48, "linear_num_value_heads": 8,
                          "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}),
    ],
)
@pytest.mark.parametrize("layout", [of_compressed_tensors(32), of_gptq(32, sym=False), of_awq(32)], ids=["ct", "gptq", "awq"])
def test_fused_projections_and_recurrent_layers_too(family: str, config: dict[str, Any], layout: Layout, tmp_path: Path) -> None:
    folder, plain = make(tmp_path, layout, family, **config)
    assert torch.equal(logits(load(folder)), logits(load(plain)))


def test_large_matrices_are_dequantised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 16 rows divide projections that are multiplied as one matrix, and their biases."""
    folder, plain = make(tmp_path, LAYOUTS["gptq, act order"], attention_bias=True)
    monkeypatch.setattr(dequantised, "PIECE", 192 * 16)
    torch.testing.assert_close(logits(load(folder)), logits(load(plain)), atol=1e-9, rtol=1e-9)


def test_weights_stay_packed(tmp_path: Path) -> None:
    """Four bits a number, two bytes a group; `plan` counts these bytes, and says what they are."""
    folder, _ = make(tmp_path, of_compressed_tensors(32, ignore=["lm_head"]))
    spec = judge_model(LocalFiles(folder))
    held = [product.weights for product in products(load(folder)) if isinstance(product, FourBitLinear)]
    nbytes = sum(weight.words.nbytes + weight.scales.nbytes for weights in held for weight in weights)
    unquantised = 192 * 320 * 2
    assert spec.block_bytes(torch.bfloat16) == nbytes + unquantised
    assert spec.formats.kept == "INT4 weights"


# --- what quantization_config does not say


def test_modules_that_the_file_holds_unquantised_are_plain_whatever_the_config_says(tmp_path: Path) -> None:
    """As GPTQModel leaves the gates of recurrent layers, and other tools the first layers."""
    folder, plain = make(tmp_path, of_gptq(32), plain=lambda name: "self_attn" in name)
    spec = judge_model(LocalFiles(folder))
    assert spec.formats.of("model.layers.1.self_attn.q_proj") is PLAIN
    assert isinstance(spec.formats.of("model.layers.1.mlp.up_proj"), Int4)
    assert torch.equal(logits(load(folder)), logits(load(plain)))


def test_so_are_experts(tmp_path: Path) -> None:
    folder, plain = make(tmp_path, of_awq(32), "qwen3_moe", plain=lambda name: "layers.0.mlp.experts" in name, **EXPERTS)
    spec = judge_model(LocalFiles(folder))
    assert spec.formats.of("model.layers.0.mlp.experts.2.up_proj") is PLAIN
    assert isinstance(spec.formats.of("model.layers.1.mlp.experts.2.up_proj"), Int4)
    assert torch.equal(logits(load(folder)), logits(load(plain)))


def test_biases_of_zeros_that_gptq_tools_write_are_not_used_and_others_are_refused(tmp_path: Path) -> None:
    folder, plain = make(tmp_path, of_gptq(32))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(load(folder)), logits(load(plain)))
    tensors["model.layers.0.mlp.up_proj.bias"][5] = 0.5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.bias is not zero, and by config\.json the model has no such bias"):
        load(folder)


# --- several ranks


def on_two_ranks(folder: Path, spec: ModelSpec, count: int = 2) -> list[dict[str, Tensor]]:
    def one(ranks: Any) -> dict[str, Tensor]:
        part = part_of(spec, Shard(ranks.rank, ranks.ranks))
        return outputs(Target.load(folder, part, dtype=torch.float64, device=CPU, ranks=ranks), ROWS)

    return on_ranks(count, one)


def check_two_ranks(folder: Path) -> None:
    """Two ranks compute what one process does."""
    spec = judge_model(LocalFiles(folder))
    alone = outputs(Target.load(folder, spec, dtype=torch.float64, device=CPU), ROWS)
    for own in on_two_ranks(folder, spec):
        for key, expected in alone.items():
            torch.testing.assert_close(own[key], expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_compute_what_one_process_does(name: str, family: str, tmp_path: Path) -> None:
    """In act order a rank has columns of all groups."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 1}
    experts = {**EXPERTS, "moe_intermediate_size": 384 if "128" in name or "short" in name else 192}
    folder, _ = make(tmp_path, LAYOUTS[name], family, **{**sizes, **(experts if family == "qwen3_moe" else {})})
    check_two_ranks(folder)


@pytest.mark.parametrize("layout", [of_gptq(128), of_awq(128), of_compressed_tensors(128)], ids=["gptq", "awq", "ct"])
def test_groups_are_not_divided(layout: Layout, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 96, "num_hidden_layers": 1}
    folder, _ = make(tmp_path, layout, **sizes)
    with pytest.raises(ConfigError, match=r"self_attn\.o_proj: a part of 192 of 384 divides a block of 128; lower cluster"):
        part_of(judge_model(LocalFiles(folder)), Shard(0, 2))


# --- adapters


def check_adapter(tmp_path: Path, folder: Path, plain: Path) -> None:
    """An adapter is added to the products of a quantised model, all but one, as it is merged with its dequantised weights."""
    adapter = make_adapter(tmp_path / "adapter", plain, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
    found = []
    for own, kept in ((folder, 10 - 1), (plain, 0)):
        spec = judge_model(LocalFiles(own))
        opened = open_adapter(str(adapter), spec)
        assert len(opened.kept) == kept  # the unquantised projection is merged
        adapters = AdapterSet((opened,)) if kept else None
        shaped = spec.with_lora(None if adapters is None else adapters.shape)
        target = Target.load(own, shaped, dtype=torch.float64, device=CPU, adapter=opened, adapters=adapters)
        found.append(torch.cat(Runner.start(target, 2).feed(prompts([13, 5], 320), adapters=[1, 1] if kept else None)[0]))
    torch.testing.assert_close(found[0], found[1], atol=1e-9, rtol=1e-9)
    assert (found[0] - logits(load(folder))).abs().max() > 1e-3


def check_adapters_of_rows(folder: Path, plain: Path) -> None:
    """Rows have adapters of their own in a quantised model, as in that of its dequantised weights."""
    found = []
    for own in (folder, plain):
        spec = judge_model(LocalFiles(own))
        adapters = DummyAdapters.of(spec, 2, 3)
        target = Target.load(own, spec.with_lora(adapters.shape), dtype=torch.float64, device=CPU, adapters=adapters)
        found.append(torch.cat(Runner.start(target, 2).feed(prompts([13, 5], 320), adapters=[2, 0])[0]))
    assert torch.equal(*found)


@pytest.mark.parametrize("layout", [of_compressed_tensors(32), of_gptq(32, desc_act=True), of_awq(32)], ids=["ct", "gptq", "awq"])
def test_an_adapter_is_added_to_the_products_of_int4_weights(layout: Layout, tmp_path: Path) -> None:
    folder, plain = make(tmp_path, layout)
    check_adapter(tmp_path, folder, plain)


def test_rows_have_adapters_of_their_own(tmp_path: Path) -> None:
    folder, plain = make(tmp_path, of_awq(32))
    check_adapters_of_rows(folder, plain)


# --- what is refused


Change = Callable[[dict[str, Tensor]], None]
UP = "model.layers.0.mlp.up_proj"
GPTQ, GROUPED, ROWS_OF_8 = of_gptq(32), of_compressed_tensors(32), of_compressed_tensors(32, symmetric=False)
CT_ORDER, GPTQ_ORDER = of_compressed_tensors(32, actorder="group"), of_gptq(32, desc_act=True)


def changed(folder: Path, change: Change) -> str:
    """The refusal of the checkpoint after this change of its tensors: when its headers are checked, or at load."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put(name: str, value: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = value(tensors[name]).contiguous()

    return change


def without(name: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        (GPTQ, put(f"{UP}.qweight", lambda x: x[:-1]), f"{UP}.qweight is [23, 320], config.json says [24, 320]"),
        (GPTQ, put(f"{UP}.qweight", lambda x: x.long()), f"{UP}.qweight is I64, it must be I32"),
        (GPTQ, put(f"{UP}.scales", lambda x: x.byte()), f"{UP}.scales is U8: F64, F32, F16, BF16 are supported"),
        (GPTQ, without(f"{UP}.g_idx"), f"1 missing tensors: {UP}.g_idx"),
        (GPTQ, put(f"{UP}.scales", lambda x: x[:2]), f"{UP}.scales is [2, 320], config.json says [6, 320]"),
        (GPTQ, put(f"{UP}.g_idx", lambda x: x.flip(0)), f"{UP}.g_idx does not divide the columns in order"),
        (GPTQ, put(f"{UP}.g_idx", lambda x: x + 1), f"{UP}.g_idx does not divide the columns in order"),
        (GPTQ, put(f"{UP}.scales", lambda x: x.index_fill(0, torch.tensor([0]), float("nan"))), f"{UP}: a scale is not finite"),
        (GPTQ_ORDER, put(f"{UP}.g_idx", lambda x: x + 1), f"{UP}.g_idx names groups 1 .. 6, and there are 6"),
        (CT_ORDER, put(f"{UP}.weight_g_idx", lambda x: x - 1), f"{UP}.weight_g_idx names groups -1 .. 4"),
        (GROUPED, put(f"{UP}.weight_packed", lambda x: x[:, :-1]), f"{UP}.weight_packed is [320, 23], config.json says"),
        (GROUPED, put(f"{UP}.weight_scale", lambda x: x[:, 0]), f"{UP}.weight_scale is [320], config.json says [320, 6]"),
        (ROWS_OF_8, without(f"{UP}.weight_zero_point"), f"1 missing tensors: {UP}.weight_zero_point"),
        (of_awq(32), put(f"{UP}.qzeros", lambda x: x[:, :-1]), f"{UP}.qzeros is [6, 39], config.json says [6, 40]"),
        (of_awq(32, zero_point=False), put(f"{UP}.qzeros", lambda x: x + 1), f"{UP}.qzeros has zero points besides 8"),
        (GPTQ, put(f"{UP}.qzeros", lambda x: x - 1), f"{UP}.qzeros has zero points besides 8"),
        (of_gptq(32, v1=False), put(f"{UP}.qzeros", lambda x: x - 0x22222222), f"{UP}.qzeros has zero points besides 8"),
        (
            GPTQ, lambda tensors: tensors.update({"lm_head.qweight": torch.zeros(24, 320, dtype=torch.int32)}),
            "lm_head.qweight: a quantised output matrix is not supported",
        ),
    ],
)
def test_malformed_files_are_refused_in_one_line_by_the_name_of_the_tensor(
    layout: Layout, change: Change, said: str, tmp_path: Path
) -> None:
    folder, _ = make(tmp_path, layout)
    assert said in changed(folder, change)


@pytest.mark.parametrize(
    ("layout", "sizes", "said"),
    [
        (GPTQ, {"intermediate_size": 100}, "mlp.gate_proj: 100 outputs are no multiple of 8"),
        (of_awq(32), {"intermediate_size": 100}, "mlp.gate_proj: 100 outputs are no multiple of 8"),
        (ROWS_OF_8, {"intermediate_size": 100}, "mlp.gate_proj: 100 outputs are no multiple of 8"),
        (of_compressed_tensors(-1), {"intermediate_size": 100}, "mlp.down_proj: 100 inputs are no multiple of 8"),
        (GROUPED, {"intermediate_size": 80}, "mlp.down_proj: 80 inputs are no multiple of 32"),
        (of_awq(32), {"intermediate_size": 80}, "mlp.down_proj: 80 inputs are no multiple of 32"),
        (GPTQ, {"hidden_size": 68}, "self_attn.q_proj: 68 inputs are no multiple of 8"),
    ],
)
def test_sizes_that_a_layout_cannot_hold_are_refused(layout: Layout, sizes: dict[str, int], said: str) -> None:
    usual = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    spec = tiny_spec("llama", **{**usual, **sizes}, quantization_config=layout.config)
    with pytest.raises(CheckpointError) as caught:
        list(spec.tensors())
    assert str(caught.value).startswith(f"{said}, so that it cannot be in INT4 as quantization_config says; use a checkpoint")


@pytest.mark.parametrize("symmetric", [True, False])
def test_all_experts_of_a_layer_may_be_in_one_tensor_if_they_are_symmetric(symmetric: bool, tmp_path: Path) -> None:
    """As files of Gemma 4 26B-A4B in INT4 have them."""
    folder, _ = make(tmp_path, of_compressed_tensors(32, symmetric=symmetric), "qwen3_moe", **EXPERTS)
    one_by_one, tensors = logits(load(folder)), load_file(folder / "model.safetensors")
    for layer, ending in product((0, 1), ("packed", "scale")):
        at = f"model.layers.{layer}.mlp.experts."
        each = [[tensors[f"{at}{i}.{part}_proj.weight_{ending}"] for part in ("gate", "up", "down")] for i in range(3)]
        tensors[f"{at}gate_up_proj_{ending}"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        tensors[f"{at}down_proj_{ending}"] = torch.stack([down for _, _, down in each])
    tensors = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.\d", name)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if symmetric:
        assert logits(load(folder)).equal(one_by_one)
        check_two_ranks(folder)
    else:
        with pytest.raises(CheckpointError, match=r"missing tensors: .*weight_zero_point"):
            load(folder)


@pytest.mark.parametrize(
    ("layout", "said"), [(of_gptq(32, desc_act=True), "in act order"), (of_compressed_tensors(48), "in groups of 48")]
)
def test_sums_in_one_order_are_refused_where_no_kernel_computes_them(layout: Layout, said: str) -> None:
    spec = tiny_spec("llama", hidden_size=96, intermediate_size=96, quantization_config=layout.config)
    with pytest.raises(ConfigError, match=rf"deterministic=true with INT4 weights {said} is supported in float64 only"):
        spec.in_one_order()


def test_a_part_of_a_checkpoint_is_read_by_its_rank(tmp_path: Path) -> None:
    """Fused projections have several ranges of columns, which lie one after another in the columns of a transposed tensor."""
    folder, _ = make(tmp_path, of_gptq(32, sym=False), "phi3", num_key_value_heads=4, pad_token_id=0)
    spec = judge_model(LocalFiles(folder))
    name = "model.layers.0.self_attn.qkv_proj.qweight"
    whole = load_file(folder / "model.safetensors")[name]
    with Checkpoint(folder, part_of(spec, Shard(1, 2)), dtype=torch.float64, device=CPU) as weights:
        assert torch.equal(weights.stored(name), torch.cat([whole[:, at + 96 : at + 192] for at in (0, 192, 384)], 1))
