"""Rotary embedding of a part of each head and of interleaved pairs, and q and k normed over all heads at once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.errors import CheckpointError
from batchspec.kernels.norm_rope.rope_write import rope_write as kernel
from batchspec.model.fused import rms_norm
from batchspec.model.layers.attention.kv_layout import KVLayout, LayerKV
from batchspec.model.layers.attention.rope import rope_frequencies, rope_of
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rope
from batchspec.model.layers.attention.rope_write import rope_write
from batchspec.model.spec import read_spec
from tests.checkpoint.test_config_values import LLAMA, rotary
from tests.helpers.attentions import attentions

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 10, 5
PLAIN = RopeSpec(type="default", theta=100.0)


def pages(dtype: torch.dtype) -> LayerKV:
    layout = KVLayout(dtype=dtype, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, page_size=4)
    return LayerKV(layout.allocate(1, 3, CPU)[0], layout)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(TOKENS, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, generator=generator).to(dtype)
    return qkv, torch.tensor([0, 1, 2, 70, 9000]), torch.tensor([9, 2, 4, 5, 8])


@pytest.mark.parametrize("rotary_dim", [None, 6, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_torch_path_rotates_as_the_kernel_s_reference(rotary_dim: int | None, interleaved: bool) -> None:
    (qkv, positions, slots), rope = inputs(torch.float64), replace(PLAIN, rotary_dim=rotary_dim, interleaved=interleaved)
    freqs = rope_frequencies(rope, HEAD_DIM)
    assert len(freqs) == (rotary_dim or HEAD_DIM) // 2
    ours, expected = pages(torch.float64), pages(torch.float64)
    q = rope_write(qkv, rope_of(positions, freqs, rope, torch.float64), ours, slots, q_norm=None, k_norm=None, eps=0.0)
    out_q = torch.empty_like(q)
    kernel(qkv, positions, freqs, expected.pages, slots, attention_factor=1.0, out_q=out_q, interleaved=interleaved)
    torch.testing.assert_close(q, out_q, atol=1e-12, rtol=0)
    torch.testing.assert_close(ours.pages, expected.pages, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms_of_whole_rows_come_before_the_rotation(dtype: torch.dtype) -> None:
    qkv, positions, slots = inputs(dtype)
    q_size, k_size = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    q_norm, k_norm = torch.rand(q_size).to(dtype), torch.rand(k_size).to(dtype)
    q, k, v = qkv.split((q_size, k_size, k_size), 1)
    normed = torch.cat((rms_norm(q, q_norm, 1e-5), rms_norm(k, k_norm, 1e-5), v), 1)
    at = rope_of(positions, rope_frequencies(PLAIN, HEAD_DIM), PLAIN, dtype)
    ours, expected = pages(dtype), pages(dtype)
    expected_q = rope_write(normed, at, expected, slots, q_norm=None, k_norm=None, eps=0.0)
    found_q = rope_write(qkv.clone(), at, ours, slots, q_norm=q_norm, k_norm=k_norm, eps=1e-5)
    assert torch.equal(found_q, expected_q)
    assert torch.equal(ours.pages, expected.pages)


@pytest.mark.parametrize(
    ("config", "rotary_dim"),
    [
        ({}, None),
        ({"partial_rotary_factor": 0.5}, 32),
        ({"partial_rotary_factor": 0.5, "rope_scaling": {"partial_rotary_factor": 1.0}}, None),
        ({"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.26}}, 16),
    ],
)
def test_the_rope_s_own_factor_counts_before_that_of_the_config(config: dict[str, Any], rotary_dim: int | None) -> None:
    assert read_rope(ConfigReader(config, "config.json"), 4096, head_dim=64).rotary_dim == rotary_dim


YARN_OF_DEEPSEEK = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, "attn_factor": 0.8782488562869419,
}


def yarn_factor(**keys: Any) -> float:
    rope = {key: value for key, value in {**YARN_OF_DEEPSEEK, **keys}.items() if value is not None}
    return read_rope(ConfigReader({"rope_scaling": rope}, "config.json"), 131_072).attention_factor


def test_deepseek_s_attn_factor_cancels_that_of_yarn() -> None:
    """DeepSeek-R1-0528-Qwen3-8B. transformers ignores the key and multiplies cos and sin by 1.14; vLLM and SGLang read it."""
    assert yarn_factor() == pytest.approx(1.0, abs=1e-12)
    assert yarn_factor(attn_factor=None) == pytest.approx(0.1 * math.log(4) + 1, abs=1e-12)
    assert yarn_factor(factor=1.0, attn_factor=0.5) == 0.5
    assert yarn_factor(mscale=0.7, mscale_all_dim=0.7, attn_factor=0.5) == pytest.approx(0.5)
    assert yarn_factor(extrapolation_factor=1, apply_yarn_scaling=True) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"extrapolation_factor": 0.5}, "rope_scaling.extrapolation_factor=0.5"),
        ({"apply_yarn_scaling": False}, "rope_scaling.apply_yarn_scaling=false"),
        ({"attention_factor": 1.2}, "rope_scaling.attn_factor=0.8782488562869419 and rope_scaling.attention_factor=1.2 together"),
    ],
)
def test_keys_of_yarn_that_are_not_built_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"not supported: {named}"):
        yarn_factor(**keys)


@pytest.mark.parametrize(
    ("kind", "factor", "max_len", "longest"),
    [
        ("yarn", 4.0, 40_960, 131_072),  # Qwen3 with the rope_scaling of its model card and no other change
        ("yarn", 4.0, 131_072, 131_072),
        ("yarn", 1e6, 40_960, 2**31 - 1),
        ("linear", 4.0, 16_384, 16_384),  # max_position_embeddings is the extended length
    ],
)
def test_yarn_extends_the_length_even_if_max_position_embeddings_was_not_changed(
    kind: str, factor: float, max_len: int, longest: int
) -> None:
    rope = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 32_768}
    assert read_rope(ConfigReader({"rope_scaling": rope}, "config.json"), max_len).longest(max_len) == longest


@pytest.mark.parametrize("factor", [4.0, 1.0])
def test_yarn_without_the_original_length_has_the_frequencies_of_transformers_and_extends_nothing(factor: float) -> None:
    """max_position_embeddings may be the length after the extension: rows of 4 times that length would be nonsense."""
    rope = {"rope_type": "yarn", "factor": factor, "rope_theta": 1e4}
    spec = read_spec({**LLAMA, "max_position_embeddings": 4096, "rope_parameters": rope}, "config.json")
    assert spec.max_len == 4096
    assert ("max_position_embeddings=4096 is the length before or after its factor 4;" in spec.rope.limit_note) == (factor > 1)
    made = rotary({**LLAMA, "max_position_embeddings": 4096, "rope_parameters": rope})
    assert made is not None
    torch.testing.assert_close(rope_frequencies(spec.rope, attentions(spec)[0].head_dim), made[1].inv_freq, rtol=1e-6, atol=0)
    assert spec.rope.attention_factor == pytest.approx(made[1].attention_scaling)
    given = {**LLAMA, "max_position_embeddings": 4096, "rope_parameters": rope | {"original_max_position_embeddings": 4096}}
    assert read_spec(given, "config.json").max_len == 4096 * factor
    assert read_spec({**given, "rope_parameters": rope, "original_max_position_embeddings": 4096}, "config.json").max_len == (
        4096 * factor
    )


@pytest.mark.parametrize(("original", "theta"), [(6, 1e4), (600, 10.0)])
def test_yarn_s_ramp_between_dimensions_at_an_end_of_the_head_is_that_of_transformers(original: int, theta: float) -> None:
    """Both ends of the ramp at dimension 0, where its width is not 0; and its second end beyond the last dimension."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original, "rope_theta": theta}
    made = rotary({**LLAMA, "rope_parameters": rope})
    assert made is not None
    found = rope_frequencies(read_rope(ConfigReader({"rope_parameters": rope}, "config.json"), 4096), 16)
    torch.testing.assert_close(found, made[1].inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("factor", [0.0, 0.01, 0.05])
def test_a_part_without_pairs_is_refused(factor: float) -> None:
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor=0\.\d+ rotates \d of the 64 numbers of a head"):
        read_rope(ConfigReader({"partial_rotary_factor": factor}, "config.json"), 4096, head_dim=64)


def test_a_family_without_partial_rotation_refuses_it() -> None:
    with pytest.raises(CheckpointError, match=r"not supported: rope_scaling\.partial_rotary_factor=0\.5"):
        read_rope(ConfigReader({"rope_scaling": {"partial_rotary_factor": 0.5}}, "config.json"), 4096)
