"""decode.deterministic on a GPU with quantised weights and K/V: other tokens change no bit, from products to logits."""

from __future__ import annotations

import re

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.gemm.fp8_linear import fp8_linear, fp8_linear_kernel, fp8_linear_reference
from batchspec.kernels.gemm.fp8_tiles import Fp8Tile, ordered_fp8_tile
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, quantise_activation, quantise_tokens
from batchspec.kernels.moe.combine import combine_norm
from batchspec.kernels.moe.combine_fp8 import combine_fp8
from batchspec.kernels.norm_rope.norm import add_norm
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8
from batchspec.model.fused import silu_and_mul
from tests.helpers.ordered_formats import FORMATS, computed, made

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
COUNTS = (1, 7, 16, 64, 65, 129, 300, 1024, 2048)
FORMS = {"block": Fp8Form(whole=False), "row": Fp8Form(whole=True), "tensor": Fp8Form(whole=True, scale=0.02)}
SIZES = {
    "hidden_size": 512, "intermediate_size": 768, "moe_intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 5000, "max_position_embeddings": 4096,
}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.parametrize(("n", "k"), [(576, 1536), (960, 576), (6144, 4096), (100, 208)])
@pytest.mark.parametrize("scales_of", FORMS)
def test_no_tile_and_no_number_of_tokens_changes_the_bits_of_an_fp8_product(n: int, k: int, scales_of: str) -> None:
    """In tiles whose sums over K one program makes, with 16 to 128 tokens as the side N of the tensor cores."""
    blocks = (-(-n // 128), -(-k // 128))
    weight = (torch.randn(n, k, device="cuda") * 50).to(E4M3)
    scales = (torch.rand({"block": blocks, "row": (n,), "tensor": ()}[scales_of], device="cuda") + 0.1) / 500
    x, bias, form = noise(max(COUNTS), k), noise(n), FORMS[scales_of]
    tiles = [Fp8Tile(*sizes, tma=tma) for tma in (True, False) for sizes in ((16, 64, 4, 4), (32, 64, 4, 4), (64, 128, 4, 4))]

    def product(rows: Tensor, tile: Fp8Tile) -> Tensor:
        return fp8_linear(quantise_tokens(rows, form), weight, scales, bias, tile=tile, dtype=torch.float32)

    whole = product(x, ordered_fp8_tile(len(x)))
    torch.testing.assert_close(whole, fp8_linear_reference(quantise_tokens(x, form), weight, scales, bias), atol=0.05, rtol=0.01)
    for tokens in COUNTS:
        for tile in {ordered_fp8_tile(1), ordered_fp8_tile(2048), *tiles}:
            assert torch.equal(product(x[-tokens:], tile), whole[-tokens:]), (tile, tokens)
    order = torch.randperm(len(x), device="cuda")[:333]
    assert torch.equal(product(x[order], ordered_fp8_tile(333)), whole[order])


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("tokens", [64, 128])
def test_every_128_of_k_are_summed_by_wgmma_from_zero_and_added_in_registers(tokens: int, blocked: bool) -> None:
    """In both tiles an instruction has 64 rows of W and 32 columns of K, and the compiler fuses no multiplication by itself."""
    tile, pointers = ordered_fp8_tile(tokens), {"x_scales": "*fp32", "w_scales": "*fp32", "out": "*bf16"}
    assert tile.block_t == tokens
    numbers = dict.fromkeys(("num_tokens", "num_rows", "n", "k", "split", "scale_stride"), "i32")
    blocks = {"x": f"tensordesc<fp8e4nv[{tokens}, 128]>", "w": f"tensordesc<fp8e4nv[{tile.block_n}, 128]>"}
    constants = {
        "bias": None, "partials": None, "arrived": None, "BLOCKED": blocked, "SPLIT": False, "BLOCK_T": tokens,
        "BLOCK_N": tile.block_n, "GROUP": tile.group, "TMA": True, "EVEN_K": True, "STAGES": tile.stages, "INTERPRETED": False,
        "PDL": True,
    }
    types = pointers | numbers | blocks
    signature = {name: types.get(name, "constexpr") for name in fp8_linear_kernel.arg_names}
    known = {name: constants[name] for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(fn=fp8_linear_kernel, signature=signature, constexprs=known)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert re.findall(r"wgmma\.mma_async\S*?(m64n\d+k32)", ptx) == [f"m64n{tokens}k32"] * 4
    assert "mma.sync" not in ptx
    sums = tokens * tile.block_n // (32 * tile.warps)
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == (sums if blocked else 0)
    assert len(re.findall(r"add(?:\.rn)?\.f32", ptx)) == (0 if blocked else sums)


@pytest.mark.parametrize("scales_of", FORMS)
def test_a_fused_quantisation_has_the_bits_of_the_one_that_follows(scales_of: str) -> None:
    form, width = FORMS[scales_of], 576
    gain, x, residual, gate_up = noise(width), noise(2048, width), noise(2048, width), noise(2048, 2 * width)
    y, weights = noise(4 * 2048, width), torch.rand(2048, 4, device="cuda")
    for tokens in COUNTS:
        sums, out = residual[:tokens].clone(), torch.empty(tokens, width, dtype=x.dtype, device="cuda")
        add_norm(x[:tokens], sums, gain, 1e-5, out=out)
        combined, mixed = residual[:tokens].clone(), torch.empty_like(out)
        combine_norm(y[: 4 * tokens], weights[:tokens], combined, gain, 1e-5, out=mixed)
        pairs = (
            (norm_fp8(x[:tokens], residual[:tokens].clone(), gain, 1e-5, form), quantise_tokens(out, form)),
            (norm_fp8(sums, None, gain, 1e-5, form), quantise_tokens(out, form)),
            (quantise_activation(gate_up[:tokens], form, gelu=False), quantise_tokens(silu_and_mul(gate_up[:tokens]), form)),
            (
                combine_fp8(y[: 4 * tokens], weights[:tokens], residual[:tokens].clone(), gain, 1e-5, form),
                quantise_tokens(mixed, form),
            ),
        )
        for case, (found, wanted) in enumerate(pairs):
            same = [part.rows.values[:tokens].view(torch.uint8) for part in (found, wanted)]
            assert torch.equal(*same), (case, tokens)
            assert torch.equal(found.rows.scales[:, :tokens], wanted.rows.scales[:, :tokens]), (case, tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_keys_values_and_logits_are_those_of_a_prompt_in_one_pass_however_it_is_cut(name: str) -> None:
    own, length = made(name, torch.device("cuda"), **SIZES), 2200
    ids = torch.randint(0, 5000, (length,), dtype=torch.int32, device="cuda")
    kv, logits = computed(own, ids, [length])
    assert logits.isfinite().all()
    ends = [*range(2161, length + 1)]
    for cuts, others in (
        ([700, length], 0),
        ([64, 65, 2047, 2049, length], 1),
        ([2160, *ends], 0),
        ([2, 10, 2040, 2052, length], 3),
    ):
        other_kv, other_logits = computed(own, ids, cuts, others=others)
        assert torch.equal(other_kv, kv), cuts[:3]
        assert torch.equal(other_logits, logits), cuts[:3]
