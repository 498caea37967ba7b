"""Linear maps and the decoder layer, on flat tokens. T tokens, NH heads, KVH key/value heads, D head_dim, H hidden."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.cache.attention import AttentionPlan
from batchspec.kernels.linear import linear
from batchspec.model.fused import rope_write, silu_and_mul
from batchspec.model.rope import Rope
from batchspec.model.spec import ModelSpec
from batchspec.model.tuning import best
from batchspec.model.weights import Weights


class Linear:
    """x [T, in] -> x @ weight.T + bias [T, out].

    On a CPU the weight is kept in oneDNN's blocked layout: 1.3x (40 tokens) to 2.5x (8 tokens, fp32) faster than F.linear,
    which reorders it in every call. A GPU and other dtypes keep the plain weight; there, bf16 products of few tokens are cut as
    measured (`batchspec.model.tuning`). Captured in a CUDA graph, it must have run once with as many tokens before.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight)
        # The layout does not depend on the batch beyond "more than one row".
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        if x.is_cuda and x.dtype is torch.bfloat16:
            tile = best("linear", x.shape[0], self._weight.shape[0], self._weight.shape[1], x.device)
            if tile is not None:
                return linear(x, self._weight, self._bias, tile=tile)
        return F.linear(x, self._weight, self._bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class Attention:
    """Self-attention over paged K/V, with one product for q, k and v."""

    def __init__(self, spec: ModelSpec, weights: Weights, prefix: str) -> None:
        self._eps, self._scale = spec.rms_eps, spec.head_dim**-0.5
        self._qkv = _fused(weights, [f"{prefix}{x}_proj" for x in "qkv"], spec.qkv_bias)
        self._out = _fused(weights, [f"{prefix}o_proj"], spec.o_bias)
        self._q_norm = weights.tensor(f"{prefix}q_norm.weight") if spec.qk_norm else None
        self._k_norm = weights.tensor(f"{prefix}k_norm.weight") if spec.qk_norm else None

    def __call__(self, hidden: Tensor, rope: Rope, kv: Tensor, slots: Tensor, plan: AttentionPlan) -> Tensor:
        """hidden [T, H] -> [T, H]; writes the tokens' K/V to `slots` of kv [2, P, page_size, KVH, D] first."""
        q = rope_write(self._qkv(hidden), rope, kv, slots, q_norm=self._q_norm, k_norm=self._k_norm, eps=self._eps)
        return self._out(plan.attend(q, kv, self._scale).flatten(1))


class Mlp:
    """down(silu(gate(x)) * up(x)), with one product for gate and up."""

    def __init__(self, spec: ModelSpec, weights: Weights, prefix: str) -> None:
        self._gate_up = _fused(weights, [f"{prefix}gate_proj", f"{prefix}up_proj"], spec.mlp_bias)
        self._down = _fused(weights, [f"{prefix}down_proj"], spec.mlp_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._down(silu_and_mul(self._gate_up(hidden)))


class DecoderLayer:
    """The weights of one layer; `Target.forward` runs them, since the norms also carry the residual stream."""

    def __init__(self, spec: ModelSpec, weights: Weights, index: int) -> None:
        prefix = f"model.layers.{index}."
        self.window = spec.windows[index]
        self.attention_norm = weights.tensor(f"{prefix}input_layernorm.weight")
        self.attention = Attention(spec, weights, f"{prefix}self_attn.")
        self.mlp_norm = weights.tensor(f"{prefix}post_attention_layernorm.weight")
        self.mlp = Mlp(spec, weights, f"{prefix}mlp.")


def _fused(weights: Weights, names: list[str], bias: bool) -> Linear:
    """One Linear whose outputs are those of `names`, end to end."""
    weight = torch.cat([weights.tensor(f"{name}.weight") for name in names])
    return Linear(weight, torch.cat([weights.tensor(f"{name}.bias") for name in names]) if bias else None)
