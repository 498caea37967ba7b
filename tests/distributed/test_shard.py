"""How a model is cut over ranks: the parts of every tensor make up the whole, and have the shapes that a rank computes with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.errors import ConfigError
from batchspec.model.families.shapes import shape_spec
from batchspec.model.layers.base import WHOLE, Shard
from batchspec.model.layers.mamba2.block import Mamba2Spec
from batchspec.model.layers.mlp.moe import MoeSpec
from batchspec.model.quant.base import Pieces, Slices
from batchspec.model.shard import slices_of
from batchspec.model.spec import EMBEDDING, OUTPUT, ModelSpec, load_spec, read_spec
from batchspec.model.weights import Checkpoint, DummyWeights, expected_shapes, taken
from tests.helpers import nvfp4_layouts
from tests.helpers.attentions import attentions
from tests.helpers.engines import tiny_spec
from tests.helpers.gemma4_models import DENSE, EXPERTS, LAYER_INPUTS
from tests.helpers.int4_layouts import of_awq, of_compressed_tensors, of_gptq
from tests.helpers.models import make_checkpoint, needed
from tests.helpers.moe_models import tiny_config
from tests.helpers.nvfp4_layouts import FP8_AND_NVFP4
from tests.helpers.short_convs import conv_spec
from tests.model.test_dense_families import OWN, TINY

FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WIDE = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 512}
WIDE_PHI = {**WIDE, "hidden_size": 512, "num_key_value_heads": 4, "partial_rotary_factor": 0.5}
WIDE_QWEN = {**WIDE, "moe_intermediate_size": 512}

INT4 = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
RECURRENT_INT4 = {
    **INT4, "linear_num_key_heads": 4, "linear_num_value_heads": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32
}


GEMMA4 = {"gemma4": DENSE, "gemma4 experts": EXPERTS, "gemma4 layer inputs": LAYER_INPUTS}


def spec_of(family: str, **changes: Any) -> ModelSpec:
    if family in GEMMA4:
        own = {**TINY, **GEMMA4[family], "head_dim": 4, "global_head_dim": 6, **changes, "model_type": "gemma4_text"}
        return read_spec(own, "config.json")
    if family in ("qwen3", "nemotron_h", "falcon_h1", *OWN):
        return read_spec({**TINY, "model_type": family, **OWN.get(family, {}), **changes}, "config.json")
    separate = family in ("qwen3_moe", "glm4_moe")
    sizes = {"intermediate_size": 16, "moe_intermediate_size": 16} if separate else {"intermediate_size": 16}
    return read_spec(tiny_config(family, **{**sizes, **changes}), "config.json")


def with_other_names(spec: ModelSpec) -> ModelSpec:
    """The same model, whose files name the norms of q and k, the last projection of attention and the final norm otherwise."""
    mixers = [replace(own, out_name="out_proj", qk_norm_names=("q_layernorm", "k_layernorm")) for own in attentions(spec)]
    layers = tuple(replace(layer, mixer=mixer) for layer, mixer in zip(spec.layers, mixers, strict=True))
    return replace(spec, layers=layers, final_norm="model.embedding_norm.weight")


SPECS: dict[str, ModelSpec] = {
    "llama": tiny_spec(),
    "norms of all heads, other names": with_other_names(spec_of("olmo2")),
    "biases": tiny_spec(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tie=True),
    **{family: spec_of(family) for family in ("gemma3_text", "olmo2", "qwen3_moe", "mixtral", "minimax_m2", "gpt_oss")},
    **{family: spec_of(family) for family in ("qwen3_5_text", "qwen3_next", "glm4_moe", *GEMMA4)},
    **{family: spec_of(family) for family in ("olmo3", "exaone4", "granitemoehybrid", "ministral3")},
    "short convolutions": conv_spec(channels=8),
    "nemotron_h": spec_of(
        "nemotron_h", **{**needed("nemotron_h", 4), "n_groups": 4, "mamba_num_heads": 8, "use_bias": True, "mlp_bias": True,
        "num_hidden_layers": 4, "intermediate_size": 16},
    ),
    "nemotron_h, narrow experts": spec_of(
        "nemotron_h",
        **{**needed("nemotron_h", 4), "n_groups": 4, "num_hidden_layers": 4, "intermediate_size": 16, "moe_latent_size": 8},
    ),
    "nemotron_h fp8 of calibrated scales, narrow experts": spec_of(
        "nemotron_h",
        **{**needed("nemotron_h", 4), "n_groups": 4, "num_hidden_layers": 4, "intermediate_size": 64, "moe_latent_size": 32,
           "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64},
        quantization_config={"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "mixer.gate"]},
    ),
    "nemotron_h fp8 at load": spec_of(
        "nemotron_h",
        **{**needed("nemotron_h", 4), "n_groups": 4, "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 64,
           "ssm_state_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 512,
           "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512},
    ).quantised("fp8"),
    "falcon_h1": spec_of(
        "falcon_h1",
        **{**needed("falcon_h1", 2), "num_hidden_layers": 2, "mamba_n_groups": 4, "mamba_n_heads": 8, "intermediate_size": 16,
           "mamba_rms_norm": True, "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 2.0], "attention_out_multiplier": 0.6,
           "mlp_multipliers": [1.5, 0.7]},
    ),
    "gpt_oss mxfp4": spec_of("gpt_oss", intermediate_size=128, quantization_config={"quant_method": "mxfp4"}),
    "minimax_m2 fp8": spec_of("minimax_m2", **WIDE, quantization_config=FP8_BLOCK),
    "glm4_moe fp8": spec_of("glm4_moe", **WIDE_QWEN, quantization_config=FP8_BLOCK),
    "qwen3_moe fp8": spec_of("qwen3_moe", **WIDE_QWEN, quantization_config=FP8_BLOCK),
    "phi3": spec_of("phi3", num_key_value_heads=2),
    "glm4": spec_of("glm4", num_key_value_heads=2, attention_bias=True),
    "llama int4": spec_of("llama", **INT4, quantization_config=of_compressed_tensors(32, symmetric=False).config),
    "qwen3_moe awq": spec_of("qwen3_moe", **INT4, moe_intermediate_size=128, quantization_config=of_awq(32).config),
    "phi3 gptq": spec_of("phi3", **{**INT4, "num_key_value_heads": 4}, quantization_config=of_gptq(32).config),
    "qwen3_5_text gptq": spec_of("qwen3_5_text", **RECURRENT_INT4, quantization_config=of_gptq(32, sym=False).config),
    "llama nvfp4": spec_of("llama", **INT4, quantization_config=nvfp4_layouts.of_compressed_tensors()),
    "qwen3_moe nvfp4 experts": spec_of("qwen3_moe", **INT4, moe_intermediate_size=128, quantization_config=FP8_AND_NVFP4),
    "phi3 nvfp4": spec_of("phi3", **{**INT4, "num_key_value_heads": 4}, quantization_config=nvfp4_layouts.MODELOPT),
    "gemma4 layer inputs awq": spec_of(
        "gemma4 layer inputs", **INT4, global_head_dim=64, hidden_size_per_layer_input=32, quantization_config=of_awq(32).config,
    ),
    "gemma4 nvfp4": spec_of("gemma4", **INT4, global_head_dim=64, quantization_config=nvfp4_layouts.of_compressed_tensors()),
    # Blocks that ranks cannot have equal numbers of.
    "gpt_oss mxfp4 uneven": spec_of("gpt_oss", intermediate_size=160, quantization_config={"quant_method": "mxfp4"}),
    "qwen3_moe fp8 uneven": spec_of("qwen3_moe", **WIDE | {"moe_intermediate_size": 640}, quantization_config=FP8_BLOCK),
    "qwen3_moe gptq uneven": spec_of("qwen3_moe", **INT4, moe_intermediate_size=160, quantization_config=of_gptq(32).config),
    "qwen3_moe nvfp4 uneven": spec_of("qwen3_moe", **INT4, moe_intermediate_size=80, quantization_config=nvfp4_layouts.MODELOPT),
    "qwen3 gptq, short group": spec_of("qwen3", **{**INT4, "intermediate_size": 272}, quantization_config=of_gptq(32).config),
    "qwen3 fp8 uneven": spec_of("qwen3", **{**WIDE, "intermediate_size": 700}, quantization_config=FP8_BLOCK),
    "phi3 fp8 uneven": spec_of("phi3", **{**WIDE_PHI, "intermediate_size": 640}, quantization_config=FP8_BLOCK),
}
"""Models that 2 and 4 ranks can compute."""


def test_a_bias_of_outputs_that_are_added_up_is_added_by_the_first_rank_alone() -> None:
    """In attention, in an MLP and in experts."""
    for name, ends in (("biases", ("o_proj.bias", "mlp.down_proj.bias")), ("gpt_oss", ("o_proj.bias", "experts.down_proj_bias"))):
        first, second = (slices_of(SPECS[name].sharded(Shard(rank, 2))) for rank in range(2))
        assert first is not None
        assert second is not None
        assert sorted(first.keys() - second.keys()) == sorted(key for key in first if key.endswith(ends))
        assert len(first.keys() - second.keys()) == 2 * SPECS[name].num_layers


def size_of(shape: tuple[int, ...], own: Pieces) -> tuple[int, ...]:
    return tuple(taken(torch.empty(shape, device="meta"), own).shape) if own else shape


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_a_part_has_the_shape_that_a_rank_computes_with(name: str, ranks: int) -> None:
    """What blocks and formats say of a part as a model of its own is what they cut from the whole model's tensors."""
    spec = SPECS[name]
    shapes = expected_shapes(spec)
    for rank in range(ranks):
        part = spec.sharded(Shard(rank, ranks))
        slices = slices_of(part)
        assert slices is not None
        assert slices.keys() <= shapes.keys()
        assert all(name.endswith("bias") and rank > 0 for name in shapes.keys() - slices.keys())
        local = expected_shapes(replace(part, vocab_size=part.num_logits))
        for tensor, own in slices.items():
            if tensor == EMBEDDING:
                assert own == ()
            else:
                assert size_of(shapes[tensor], own) == local[tensor], tensor


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_the_parts_of_all_ranks_cover_every_number_once(name: str, ranks: int) -> None:
    """Once, or as often in every place: K/V heads and dt of Mamba2 that several ranks hold, and what all ranks hold."""
    spec = SPECS[name]
    cuts = [slices_of(spec.sharded(Shard(rank, ranks))) for rank in range(ranks)]
    for tensor, shape in expected_shapes(spec).items():
        count = torch.zeros(shape, dtype=torch.int32)
        for own in cuts:
            assert own is not None
            if tensor in own:
                for piece in own[tensor] or (...,):
                    count[piece] += 1
        q, kv = attentions(spec)[0].inner_size, attentions(spec)[0].kv_size
        parts = count.split([q, kv, kv]) if tensor.endswith("qkv_proj.weight") else (count,)
        if tensor.endswith((".in_proj.weight", ".in_proj.bias")) and "short" not in name:
            mixer = spec.layers[0].mixer
            assert mixer is not None
            (mamba,) = (part for part in mixer.parts if isinstance(part, Mamba2Spec))
            parts = count.tensor_split([len(count) - mamba.num_heads])
            assert int(parts[1].flatten()[0]) == ranks
        for part in parts:
            assert len(part.unique()) == 1, tensor
            assert int(part.flatten()[0]) in (1, ranks // 2, ranks), tensor


def test_a_rank_with_fewer_key_heads_than_ranks_has_the_one_that_its_queries_read() -> None:
    spec = tiny_spec(num_heads=8, num_kv_heads=2, head_dim=4)
    for rank in range(4):
        part = spec.sharded(Shard(rank, 4))
        own = attentions(part)[0]
        assert (own.num_heads, own.num_kv_heads) == (2, 1)
        assert part.page_formats(torch.float32, 16)[0].token_bytes == 2 * own.head_dim * 4
        slices = slices_of(part)
        assert slices is not None
        queries, keys = (slices[f"model.layers.0.self_attn.{x}_proj.weight"][0][0] for x in "qk")
        assert queries == slice(8 * rank, 8 * rank + 8)
        assert keys == slice(4 * (rank // 2), 4 * (rank // 2) + 4)
        assert queries.start // (8 // 2 * 4) == keys.start // 4  # four query heads read one key head


@pytest.mark.parametrize("name", ["nemotron3-nano-30b-a3b", "nemotron3-super-120b-a12b", "nemotron-nano-9b"])
def test_published_sizes_of_mamba2_layers_are_cut_when_they_are_quantised_at_load(name: str) -> None:
    """dt of all heads is on every rank, its rows a block of their own."""
    spec = shape_spec(name).quantised("fp8")
    part = spec.sharded(Shard(1, 2))
    slices = slices_of(part)
    assert slices is not None
    mamba = spec.layers[0].mixer
    assert isinstance(mamba, Mamba2Spec)
    rows, columns = slices["model.layers.0.mixer.in_proj.weight"][-1]
    assert (rows, columns) == (slice(mamba.into.rows - mamba.num_heads, mamba.into.rows), slice(0, spec.hidden_size))
    assert rows.start % 128 == 0


def test_ranks_have_parts_of_fp8_experts_that_kernels_read() -> None:
    """1856 / 8 = 232 is no multiple of 16. The scales of these weights are of a whole matrix, which any cut would leave whole."""
    spec = shape_spec("nemotron3-nano-30b-a3b-fp8")
    sizes = []
    for rank in range(8):
        part = spec.sharded(Shard(rank, 8))
        slices = slices_of(part)
        assert slices is not None
        ((_, own),) = slices["model.layers.1.mixer.experts.5.down_proj.weight"]
        moe = part.layers[1].mlp
        assert isinstance(moe, MoeSpec)
        assert own.stop - own.start == moe.experts.down.k
        sizes.append(moe.experts.down.k)
    assert sizes == [240] * 4 + [224] * 4


def test_a_process_alone_has_the_model_itself() -> None:
    spec = tiny_spec()
    assert spec.sharded(WHOLE) is spec
    assert slices_of(spec) is None
    assert (spec.vocab_part, spec.num_logits) == (slice(0, spec.vocab_size), spec.vocab_size)


@given(st.integers(1, 300), st.sampled_from([2, 4, 8]))
def test_every_token_has_its_logit_on_one_rank(vocab: int, ranks: int) -> None:
    parts = [tiny_spec(vocab_size=vocab, num_heads=8, num_kv_heads=8).sharded(Shard(rank, ranks)) for rank in range(ranks)]
    assert [token for part in parts for token in range(vocab)[part.vocab_part]] == list(range(vocab))
    assert parts[0].num_logits == max(part.num_logits for part in parts) <= min(part.num_logits for part in parts) + 1


@pytest.mark.parametrize(
    ("spec", "ranks", "said"),
    [
        (tiny_spec(), 8, "num_attention_heads 4 cannot be cut into 8 equal parts; lower cluster.tensor_parallel"),
        (tiny_spec(num_heads=12, num_kv_heads=3), 2, "num_key_value_heads 3 and 2 ranks: one must be a multiple of the other"),
        (tiny_spec(intermediate_size=26), 4, "intermediate_size 26 cannot be cut into 4 equal parts"),
        (spec_of("mixtral", intermediate_size=10), 4, "the size of an expert 10 cannot be cut into 4 equal parts"),
        (SPECS["qwen3_moe fp8"], 8, "num_attention_heads 4 cannot be cut"),
        (
            spec_of("qwen3_moe", **{**WIDE_QWEN, "moe_intermediate_size": 384}, quantization_config=FP8_BLOCK), 4,
            "the size of an expert 384 cannot be cut into 4 parts in blocks of 128; lower cluster.tensor_parallel",
        ),
        (
            spec_of("gpt_oss", intermediate_size=96, quantization_config={"quant_method": "mxfp4"}), 4,
            "96 cannot be cut into 4 parts in blocks of 32",
        ),
        (
            spec_of("qwen3", **{**WIDE, "head_dim": 64}, quantization_config=FP8_BLOCK), 4,
            "self_attn.q_proj: a part of 64 of 256 divides a block of 128; lower cluster.tensor_parallel",
        ),
        (
            spec_of("phi3", **{**WIDE_PHI, "intermediate_size": 320}, quantization_config=FP8_BLOCK), 2,
            "mlp.gate_up_proj: a part of 256 of 640 divides a block of 128; lower cluster.tensor_parallel",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(spec: ModelSpec, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        slices_of(spec.sharded(Shard(0, ranks)))
    assert said in str(refused.value)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_checkpoint_gives_each_rank_its_parts(family: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {"num_local_experts": 4}
    folder = make_checkpoint(tmp_path, family, **config)
    spec = load_spec(folder)
    how: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
    with Checkpoint(folder, spec, **how) as whole:
        for rank in range(2):
            part = spec.sharded(Shard(rank, 2))
            slices = slices_of(part)
            assert slices is not None
            with Checkpoint(folder, part, **how) as own:
                for tensor in expected_shapes(spec):
                    expected = part_of(whole.tensor(tensor), slices, tensor)
                    assert torch.equal(own.tensor(tensor), expected), tensor
                    if "experts" in tensor and tensor in slices:
                        assert torch.equal(own.entry(tensor, 3).double(), expected[3]), tensor
                assert slices[OUTPUT][0][0] == slice(160 * rank, 160 * rank + 160)


def part_of(tensor: torch.Tensor, slices: Slices, name: str) -> torch.Tensor:
    """Zeros where another rank adds the bias."""
    if name not in slices:
        return torch.zeros_like(tensor)
    return taken(tensor, slices[name]) if slices[name] else tensor


@pytest.mark.parametrize("name", ["gpt_oss mxfp4", "gpt_oss mxfp4 uneven", "phi3"])
def test_ranks_of_a_dummy_model_have_parts_of_one_noise(name: str) -> None:
    spec = SPECS[name]
    names = list(expected_shapes(spec))
    whole = DummyWeights(spec, dtype=torch.bfloat16, device=torch.device("cpu"))
    found = {name: whole.tensor(name) for name in names}
    for rank in range(2):
        part = spec.sharded(Shard(rank, 2))
        own, slices = DummyWeights(part, dtype=torch.bfloat16, device=torch.device("cpu")), slices_of(part)
        assert slices is not None
        for name in names:
            assert torch.equal(own.tensor(name), part_of(found[name], slices, name)), name
