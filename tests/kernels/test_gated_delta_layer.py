"""The kernels of the gated delta rule against transformers: each against its function, and all together against whole layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.gated_delta.convolve import convolve
from batchspec.kernels.gated_delta.delta_chunks import delta_chunks
from batchspec.kernels.gated_delta.delta_steps import delta_steps
from batchspec.kernels.gated_delta.gated_norm import gated_norm
from batchspec.kernels.gated_delta.layout import DeltaWeights, interleaved_columns, split_columns
from tests.kernels.gated_delta_cases import NAN, SMALL, Row, batch_of, poisoned_state, random_inputs

EPS = 1e-6


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return modeling_qwen3_5


@pytest.mark.second
@pytest.mark.parametrize("rule", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("begin", [0, 64])
def test_the_recurrence_is_theirs(theirs: Any, rule: str, begin: int, interpret: bool, device: torch.device) -> None:
    """Two rows at once, for their batch of two."""
    count = 66
    inputs, state = random_inputs(2 * count, SMALL, device), poisoned_state(2, SMALL, device)
    if begin:
        state.state.normal_()
    q, k, v, gates = (x.unflatten(0, (2, count)) for x in (inputs.q, inputs.k, inputs.v, inputs.gates))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))  # transformers 5.17 leaves that to its layer
    wanted, after = getattr(theirs, rule)(  # which divides queries by sqrt(DK)
        q * SMALL.key_dim**0.5, k, v, g=gates[..., 0], beta=gates[..., 1], initial_state=state.state.mT if begin else None,
        output_final_state=True,
    )
    before, batch = state.state.clone(), batch_of([Row(0, begin, count), Row(1, begin, count)], device)
    for chunks in (True, False):
        state.state.copy_(before)
        out = torch.full_like(inputs.v, NAN)
        if chunks:
            delta_chunks(inputs, state, batch, out, interpret=interpret)
        else:
            delta_steps(inputs, state, batch, out, commits=True, interpret=interpret)
        torch.testing.assert_close(out, wanted.flatten(0, 1), rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(state.state, after.mT, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_convolution_is_theirs(theirs: Any, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    columns, value_heads = split_columns(*SMALL.four), SMALL.value_heads
    x = torch.randn(30, SMALL.channels + value_heads * SMALL.value_dim, dtype=dtype, device=device)
    ba = torch.randn(30, 2 * value_heads, dtype=dtype, device=device)
    weights = DeltaWeights(
        conv=torch.randn(SMALL.channels, SMALL.taps, dtype=dtype, device=device), a_log=ba[0, :value_heads].clone(),
        dt_bias=ba[1, :value_heads].clone(),
    )
    state, batch = poisoned_state(1, SMALL, device, dtype=dtype), batch_of([Row(0, 0, 30)], device)
    found = convolve(x, ba, weights, columns, state, batch, keeps_inputs=False, interpret=interpret)
    wanted = theirs.causal_conv1d_fn(x[None, :, : SMALL.channels].mT, weights.conv, activation="silu")[0].mT
    q, k, v = wanted.split([SMALL.key_heads * SMALL.key_dim] * 2 + [value_heads * SMALL.value_dim], 1)
    q, k = (theirs.l2norm(part.unflatten(1, (SMALL.key_heads, SMALL.key_dim))).flatten(1) for part in (q, k))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for made, part in ((found.q * SMALL.key_dim**0.5, q), (found.k, k), (found.v, v)):
        torch.testing.assert_close(made.flatten(1), part, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_theirs(theirs: Any, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    """Without the kernel bit for bit."""
    columns, width = split_columns(*SMALL.four), SMALL.value_heads * SMALL.value_dim
    norm = theirs.Qwen3_5RMSNormGated(SMALL.value_dim, eps=EPS).to(device, dtype)
    torch.nn.init.normal_(norm.weight)
    o = torch.randn(50, SMALL.value_heads, SMALL.value_dim, device=device).to(dtype)
    x = torch.randn(50, SMALL.channels + width, device=device).to(dtype)
    wanted = norm(o, x[:, SMALL.channels :].reshape(o.shape).contiguous()).flatten(1).detach()
    found = gated_norm(o, x, columns, norm.weight.detach(), EPS, interpret=interpret)
    if not interpret and not found.is_cuda:
        assert torch.equal(found, wanted)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-5  # the interpreter cuts bf16 off instead of rounding it
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=1e-6)


def layer_of_transformers(family: str) -> tuple[Any, Any]:
    """A layer with random weights, and how its products hold q, k, v and z."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    key_heads, value_heads, key_dim, value_dim = SMALL.four
    sizes: dict[str, Any] = {
        "hidden_size": 48, "num_hidden_layers": 4, "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim, "linear_conv_kernel_dim": SMALL.taps,
    }
    layer: Any
    if family == "qwen3_next":
        layer, columns = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**sizes), 0), interleaved_columns(*SMALL.four)
    else:
        config: Any = Qwen3_5TextConfig(**sizes)
        layer, columns = Qwen3_5GatedDeltaNet(config, 0), split_columns(*SMALL.four)
    for weight in (layer.norm.weight, layer.dt_bias):
        torch.nn.init.normal_(weight)
    return layer.requires_grad_(False), columns


def products_of(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    if hasattr(layer, "in_proj_qkvz"):
        return layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden)
    return (
        torch.cat((layer.in_proj_qkv(hidden), layer.in_proj_z(hidden)), 1),
        torch.cat((layer.in_proj_b(hidden), layer.in_proj_a(hidden)), 1),
    )


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_prefill_and_rounds_give_the_outputs_of_a_layer(family: str, interpret: bool, device: torch.device) -> None:
    """A prompt in two segments, the second of which begins in a chunk; then rounds of four positions that accept 2, 0 and 3
    drafts, after each of which another token stands in the place of the rejected ones."""
    layer, columns = layer_of_transformers(family)
    layer = layer.to(device)
    hidden = torch.randn(90, 48, device=device)
    wanted = layer(hidden[None])[0]
    weights = DeltaWeights(conv=layer.conv1d.weight[:, 0].contiguous(), a_log=layer.A_log, dt_bias=layer.dt_bias)
    state = poisoned_state(2, SMALL, device)
    outs = []

    def run(tokens: Tensor, begin: int, *, rounds: bool) -> Tensor:
        x, ba = products_of(layer, tokens)
        batch = batch_of([Row(1, begin, len(tokens))], device)
        inputs = convolve(x, ba, weights, columns, state, batch, keeps_inputs=rounds, interpret=interpret)
        o = torch.full_like(inputs.v, NAN)
        if rounds:
            delta_steps(inputs, state, batch, o, commits=False, interpret=interpret)
        else:
            delta_chunks(inputs, state, batch, o, interpret=interpret)
        state.folded[1] = begin if rounds else begin + len(tokens)
        normed = gated_norm(o, x, columns, layer.norm.weight, layer.layer_norm_epsilon, interpret=interpret)
        return torch.nn.functional.linear(normed, layer.out_proj.weight)

    for begin, end in ((0, 30), (30, 75)):
        outs.append(run(hidden[begin:end], begin, rounds=False))
    begin = 75
    for accepted in (2, 0, 3):
        tokens = torch.randn(4, 48, device=device)
        tokens[: accepted + 1] = hidden[begin : begin + accepted + 1]
        outs.append(run(tokens, begin, rounds=True)[: accepted + 1])
        begin += accepted + 1
    torch.testing.assert_close(torch.cat(outs), wanted[:begin], rtol=1e-4, atol=1e-5)
