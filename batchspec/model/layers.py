"""Linear maps and the decoder layer, on flat tokens. T tokens, NH heads, KVH key/value heads, D head_dim, H hidden."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.cache.attention import AttentionPlan
from batchspec.cache.layout import LayerKV
from batchspec.kernels.gemm import linear as kernels
from batchspec.kernels.gemm.tiles import Tile
from batchspec.model.blocks.gated_mlp import GatedMlpSpec
from batchspec.model.fused import add_norm, rms_norm, rope_write, silu_and_mul
from batchspec.model.quant.base import Weights
from batchspec.model.rope import Rope
from batchspec.model.spec import ModelSpec
from batchspec.model.tuning import best


class Linear:
    """x [T, in] -> x @ weight.T + bias [T, out].

    On a CPU the weight is kept in oneDNN's blocked layout: 1.3x (40 tokens) to 2.5x (8 tokens, fp32) faster than F.linear,
    which reorders it in every call. A GPU and other dtypes keep the plain weight; there, bf16 products of few tokens are cut as
    measured (`batchspec.model.tuning`). Captured in a CUDA graph, it must have run once with as many tokens before.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight)
        self._weight = _packed(weight) if self._packed else weight

    def rewrite(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take other numbers of the same shapes: on a GPU where these lie, so that captured graphs read them."""
        if self._packed:
            self._weight = _packed(weight)
        else:
            self._weight.copy_(weight)
        if self._bias is not None:
            assert bias is not None
            self._bias.copy_(bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        tile = self.tile("linear", x)
        return F.linear(x, self._weight, self._bias) if tile is None else kernels.linear(x, self._weight, self._bias, tile=tile)

    def tile(self, op: str, x: Tensor) -> Tile | None:
        """How `op` (`batchspec.model.tuning`) on x is cut where it measured faster than the library's product, else None."""
        if not (x.is_cuda and x.dtype is torch.bfloat16):
            return None
        return best(op, x.shape[0], self._weight.shape[0], self._weight.shape[1], x.device)

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of self(x), in one kernel where that is faster."""
        tile = self.tile("swiglu", x)
        return silu_and_mul(self(x)) if tile is None else kernels.swiglu(x, self._weight, self._bias, tile=tile)

    def of_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """self(rms_norm(x)), in one kernel where that is faster."""
        tile = self.tile("norm_linear", x)
        if tile is None:
            return self(rms_norm(x, norm, eps))
        return kernels.norm_linear(x, norm, self._weight, self._bias, eps=eps, tile=tile)

    def swiglu_of_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """self.swiglu(rms_norm(x)), in one kernel where that is faster."""
        tile = self.tile("norm_swiglu", x)
        if tile is None:
            return self.swiglu(rms_norm(x, norm, eps))
        return kernels.norm_swiglu(x, norm, self._weight, self._bias, eps=eps, tile=tile)

    def add_to(self, residual: Tensor, x: Tensor, *, when: bool) -> Tensor | None:
        """residual += self(x) in one kernel, and None, where that is fast and `when` is true; else self(x), to be added."""
        tile = self.tile("linear_add", x) if when else None
        if tile is None:
            return self(x)
        kernels.linear_add(x, self._weight, self._bias, residual=residual, tile=tile)
        return None


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _packed(weight: Tensor) -> Tensor:
    # The layout does not depend on the batch beyond "more than one row".
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
    return packed


class DecoderLayer:
    """Attention over paged K/V and a SwiGLU, each entered through a norm of the residual stream.

    What a half adds to the stream is handed on (`hidden`), since adding it and the next norm are one kernel; where products that
    norm their input and add to the stream themselves are faster (small models on a GPU), nothing is left to hand on: None.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, index: int) -> None:
        prefix = f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        own, mlp = spec.layers[index].attention, spec.layers[index].mlp
        assert isinstance(mlp, GatedMlpSpec)
        self.window = own.window
        self._eps, self._scale = own.eps, own.head_dim**-0.5
        self._attention_norm = weights.tensor(f"{prefix}input_layernorm.weight")
        self._qkv = fused_linear(weights, [f"{attention}{x}_proj" for x in "qkv"], own.qkv_bias)
        self._q_norm = weights.tensor(f"{attention}q_norm.weight") if own.qk_norm else None
        self._k_norm = weights.tensor(f"{attention}k_norm.weight") if own.qk_norm else None
        self._out = fused_linear(weights, [f"{attention}o_proj"], own.o_bias)
        self._mlp_norm = weights.tensor(f"{prefix}post_attention_layernorm.weight")
        self._gate_up = fused_linear(weights, [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], mlp.bias)
        self._down = fused_linear(weights, [f"{prefix}mlp.down_proj"], mlp.bias)

    def queries(
        self, hidden: Tensor | None, residual: Tensor, rope: Rope, kv: LayerKV, slot_mapping: Tensor, out_aux: Tensor | None
    ) -> Tensor:
        """The first half, up to q [T, NH, D]; residual [T, H] in place; K/V go to the slots int64 [T] of kv.

        hidden   [T, H] what the layer before left to add, or None
        out_tap  [T, H] gets the stream that enters the layer, or None
        """
        if hidden is None:
            if out_aux is not None:
                out_aux.copy_(residual)
            qkv = self._qkv.of_norm(residual, self._attention_norm, self._eps)
        else:
            qkv = self._qkv(add_norm(hidden, residual, self._attention_norm, self._eps, out_aux))
        return rope_write(qkv, rope, kv, slot_mapping, q_norm=self._q_norm, k_norm=self._k_norm, eps=self._eps)

    def finish(self, q: Tensor, residual: Tensor, kv: LayerKV, plan: AttentionPlan) -> Tensor | None:
        """The rest, residual [T, H] in place; returns what is left to add to it, or None."""
        attended = plan.attend(q, kv, self._scale).flatten(1)
        hidden = self._out.add_to(residual, attended, when=self._gate_up.tile("norm_swiglu", residual) is not None)
        if hidden is None:
            inner = self._gate_up.swiglu_of_norm(residual, self._mlp_norm, self._eps)
        else:
            inner = self._gate_up.swiglu(add_norm(hidden, residual, self._mlp_norm, self._eps))
        # The next layer's product of q, k and v has this one's shape.
        return self._down.add_to(residual, inner, when=self._qkv.tile("norm_linear", residual) is not None)


def fused_linear(weights: Weights, names: list[str], bias: bool) -> Linear:
    """One Linear whose outputs are those of `names`, end to end."""
    weight = torch.cat([weights.tensor(f"{name}.weight") for name in names])
    return Linear(weight, torch.cat([weights.tensor(f"{name}.bias") for name in names]) if bias else None)
