"""The network of an EAGLE-3 head: features in, layers, draft tokens out. T places, R rows, H hidden, NH / KVH heads, D."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.cache.attention import AttentionPlan
from batchspec.draft.weights import Head
from batchspec.kernels.argmax import argmax
from batchspec.kernels.head_input import head_input
from batchspec.kernels.lm_head import lm_head
from batchspec.kernels.tiles import Tile
from batchspec.model.fused import add_norm, rms_norm, rope_write, silu_and_mul
from batchspec.model.layers import Linear
from batchspec.model.rope import Rope
from batchspec.model.target import Target
from batchspec.model.tuning import best


@dataclass(frozen=True, slots=True)
class Place:
    """Where places stand: the rotation of their positions, and their cache locations int64 [T]."""

    rope: Rope
    slots: Tensor


class _Layer:
    def __init__(self, head: Head, index: int) -> None:
        tensors, spec, prefix = head.tensors, head.spec, f"layers.{index}."

        def linear(names: list[str]) -> Linear:
            biases = [tensors[f"{prefix}{name}.bias"] for name in names if f"{prefix}{name}.bias" in tensors]
            return Linear(torch.cat([tensors[f"{prefix}{name}.weight"] for name in names]), torch.cat(biases) if biases else None)

        self.qkv = linear([f"self_attn.{x}_proj" for x in "qkv"])
        self.out = linear(["self_attn.o_proj"])
        self.gate_up = linear(["mlp.gate_proj", "mlp.up_proj"])
        self.down = linear(["mlp.down_proj"])
        self.input_norm = tensors[f"{prefix}input_layernorm.weight"]
        self.mlp_norm = tensors[f"{prefix}post_attention_layernorm.weight"]
        self.q_norm = tensors[f"{prefix}self_attn.q_norm.weight"] if spec.qk_norm else None
        self.k_norm = tensors[f"{prefix}self_attn.k_norm.weight"] if spec.qk_norm else None

    def mlp(self, hidden: Tensor) -> Tensor:
        return self.down(silu_and_mul(self.gate_up(hidden)))


class EagleHead:
    """Weights of a head bound to a target: its embedding and lm_head serve where the checkpoint has none of its own."""

    def __init__(self, head: Head, target: Target, *, argmax: bool = True) -> None:
        spec, tensors = head.spec, head.tensors
        self.spec, self._argmax, self._hot = spec, argmax, head.hot
        self._fc = Linear(tensors["fc.weight"], tensors.get("fc.bias"))
        self._input_norm = tensors.get("input_norm.weight")
        self._tap_norms = None
        if spec.fc_norm:
            self._tap_norms = torch.stack([tensors[f"fc_norm.{i}.weight"] for i in range(len(spec.tap_layers))])
        self._hidden_norm = tensors["layers.0.hidden_norm.weight"]
        self._norm = tensors["norm.weight"]
        self._layers = [_Layer(head, i) for i in range(spec.num_layers)]
        own = tensors.get("embed_tokens.weight")
        same = own is not None and own.shape == target.embedding.shape and torch.equal(own, target.embedding)
        self._embedding = target.embedding if own is None or same else own
        self._lm_head = tensors.get("lm_head.weight")
        self._target = target
        # As the target's: reduced and kept in fp32, so that rounding makes no ties. A GPU multiplies bf16 into fp32 itself.
        self._fp32_out = self._lm_head is not None and self._lm_head.is_cuda and self._lm_head.dtype is torch.bfloat16
        self._logits_dtype = torch.float64 if target.dtype is torch.float64 else torch.float32
        self._scores = None
        if self._lm_head is not None and not self._fp32_out:
            self._scores = Linear(self._lm_head.to(self._logits_dtype))
        self._unit = torch.ones(spec.target_hidden_size, dtype=target.dtype, device=target.device)

    def features(self, taps: Tensor) -> Tensor:
        """taps [T, W] of the target's residual stream -> [T, H]."""
        eps = self.spec.rms_eps
        if self._input_norm is not None:
            taps = rms_norm(taps, self._input_norm, eps)
        elif self._tap_norms is not None:
            chunks = rms_norm(taps.view(-1, self.spec.target_hidden_size), self._unit, eps)
            taps = chunks.view(-1, *self._tap_norms.shape).mul_(self._tap_norms).flatten(1)
        return self._fc(taps)

    def enter(
        self, tokens: Tensor, hidden: Tensor, *, row_ids: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """tokens int32 [T] and hidden [T, H] -> the input of layer 0 [T, 2H], the embedding first, and the residual stream.

        row_ids, positions  [T]: tokens is [lines, M], and each place takes the token behind its position in its line
        The residual stream lies in `hidden` or in the input: the layers change it, and nobody reads the input behind layer 0.
        """
        size = self.spec.hidden_size
        normed = hidden.new_empty(hidden.shape[0], 2 * size)
        head_input(
            tokens, hidden, self._embedding, self._layers[0].input_norm, self._hidden_norm, self.spec.rms_eps,
            out=normed, row_ids=row_ids, positions=positions,
        )  # fmt: skip
        return normed, normed[:, size:] if self.spec.norm_before_residual else hidden

    def layer(
        self, index: int, normed: Tensor, residual: Tensor, at: Place, kv: Tensor, plan: AttentionPlan, live: Tensor | None = None
    ) -> Tensor:
        """Layer `index` on normed [T, 2H] (layer 0) or [T, H]; writes K/V of all T places, adds to the residual in place.

        residual  [T, H]
        live      int [R]: only these places go on behind K/V, with one query a row in `plan`; residual is [R, H], picked already
        Returns the residual stream behind the next layer's norm, the last layer's behind the final norm.
        """
        layer, eps = self._layers[index], self.spec.rms_eps
        q = rope_write(layer.qkv(normed), at.rope, kv, at.slots, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps)
        if live is not None:
            q = q.index_select(0, live)
        hidden = layer.out(plan.attend(q, kv, self.spec.head_dim**-0.5).flatten(1))
        hidden = layer.mlp(add_norm(hidden, residual, layer.mlp_norm, eps))
        following = self._layers[index + 1].input_norm if index + 1 < len(self._layers) else self._norm
        return add_norm(hidden, residual, following, eps)

    def choose(self, normed: Tensor, out_ids: Tensor) -> None:
        """normed [R, H] behind the final norm -> the target id of each row's likeliest draft token, int32 [R]."""
        tile = self._fused_tile(normed) if self._argmax else None
        if tile is not None and self._lm_head is not None:
            lm_head(normed, self._lm_head, out_ids=out_ids, map_ids=self._hot, tile=tile)
            return
        logits = self.logits(normed)
        if self._argmax:
            argmax(logits, out_ids=out_ids, map_ids=self._hot)
        else:
            ids = torch.softmax(logits, -1).topk(1, dim=-1).indices.squeeze(1)
            out_ids.copy_(ids if self._hot is None else self._hot[ids])

    def _fused_tile(self, normed: Tensor) -> Tile | None:
        """How lm_head and argmax are one kernel where that was measured to be faster than two."""
        if self._lm_head is None or not self._fp32_out:
            return None
        vocab, size = self._lm_head.shape
        return best("lm_head", normed.shape[0], vocab, size, normed.device)

    def logits(self, normed: Tensor) -> Tensor:
        """fp32 [R, draft vocabulary] (fp64 for an fp64 model)."""
        if self._lm_head is None:
            return self._target.logits(normed)
        if self._scores is None:
            return torch.mm(normed, self._lm_head.t(), out_dtype=torch.float32)
        return self._scores(normed.to(self._logits_dtype))
