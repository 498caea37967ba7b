"""An MTP layer by its definition: one row, no cache, no batch, everything anew at each draft step; plain torch in fp64.

Tensors have the names and values of a checkpoint. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; transformers,
models/qwen3_next (Qwen3NextAttention, Qwen3NextSparseMoeBlock).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.model.blocks.moe import MoeSpec
from batchspec.model.spec import ModelSpec

LAYER = "mtp.layers.0."


def mtp_steps(
    spec: ModelSpec, tensors: Mapping[str, Tensor], embedding: Tensor, ids: Tensor, hidden: Tensor, place: int, count: int
) -> Iterator[Tensor]:
    """[H] of each of `count` draft steps after a place, behind the layer's own norm.

    embedding [V, H]; ids int64 [n] the row, which goes on for `count` tokens after the place; hidden [n, H] the target's hidden
    states after its final norm
    """
    seen = hidden[: place + 1]
    for k in range(count):
        found = mtp_layer(spec, tensors, embedding[ids[1 : place + 2 + k]], seen)
        seen = torch.cat((seen, found[-1:]))
        yield found[-1]


def mtp_layer(spec: ModelSpec, tensors: Mapping[str, Tensor], embedded: Tensor, hidden: Tensor) -> Tensor:
    """[n, H] at positions 0 .. n-1, from the embedding of the token after each and the hidden state at each."""

    def normed(name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.rms_eps).sqrt() * (1 + tensors[f"{name}.weight"])

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T

    joined = torch.cat((normed("mtp.pre_fc_norm_embedding", embedded), normed("mtp.pre_fc_norm_hidden", hidden)), -1)
    stream = linear("mtp.fc", joined)
    x, at, size = normed(f"{LAYER}input_layernorm", stream), f"{LAYER}self_attn.", spec.head_dim
    q, gate = linear(f"{at}q_proj", x).view(len(x), spec.num_heads, 2 * size).split(size, -1)
    k, v = (linear(f"{at}{name}_proj", x).view(len(x), -1, size) for name in "kv")
    q, k = rotated(spec, normed(f"{at}q_norm", q)), rotated(spec, normed(f"{at}k_norm", k))
    k, v = (part.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    stream = stream + linear(f"{at}o_proj", (attended * gate.sigmoid()).flatten(1))
    x = normed(f"{LAYER}post_attention_layernorm", stream)

    def mlp(name: str, x: Tensor) -> Tensor:
        return linear(f"{name}.down_proj", F.silu(linear(f"{name}.gate_proj", x)) * linear(f"{name}.up_proj", x))

    own = spec.mtp and spec.mtp.layer.mlp
    if not isinstance(own, MoeSpec):
        return normed("mtp.norm", stream + mlp(f"{LAYER}mlp", x))
    outputs = []
    for token, logits in zip(x, linear(f"{LAYER}mlp.gate", x), strict=True):
        probs, chosen = logits.softmax(-1).topk(own.router.top_k)
        weights = probs / probs.sum() if own.router.norm_topk else probs
        terms = [w * mlp(f"{LAYER}mlp.experts.{int(e)}", token) for w, e in zip(weights, chosen, strict=True)]
        shared = linear(f"{LAYER}mlp.shared_expert_gate", token).sigmoid() * mlp(f"{LAYER}mlp.shared_expert", token)
        outputs.append(sum(terms, shared))
    return normed("mtp.norm", stream + torch.stack(outputs))


def rotated(spec: ModelSpec, x: Tensor) -> Tensor:
    """x [n, heads, D] at positions 0, 1, ...: of each head the first numbers, in pairs of their halves. Angles are fp32."""
    width = spec.rope.rotary_dim or spec.head_dim
    half = width // 2
    angle = torch.arange(len(x)).float()[:, None, None] * (1 / spec.rope.theta ** (torch.arange(half).float() / half))
    low, high, rest = x.split((half, half, x.shape[-1] - width), -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)
