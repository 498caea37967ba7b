"""Draft heads that can learn: the tensors of a published checkpoint, and all draft steps of all places at once.

B rows, L places (padded at the right), H hidden, NH / KVH heads, D head_dim, W = taps * H. Place t reads the embedding of token
t+1 and the target's features of place t, and speaks of token t+2: draft step 0. Draft step k stands at position t+k; it sees the
keys of step 0 at places 0..t, and of the later steps its own place's alone: what is drafted behind place t sees in a job.

    chain      step k reads the state that step k-1 left and the embedding of token t+1+k (test-time training)
    parallel   step k reads the mask's feature and embedding, whatever k is
Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840); P-EAGLE (2026, arXiv 2602.01469).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchspec.draft.formats import HeadSpec
from batchspec.model.rope import rope_angles, rope_frequencies
from batchspec.train.attend import attend

Keys = list[tuple[Tensor, Tensor]]
"""K and V [B or 1, NH, L or 1, D] of the draft steps so far, in one layer."""


class Norm(nn.Module):
    """Root mean square norm, in fp32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, spec: HeadSpec, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, heads * spec.head_dim, bias=False)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=False)
        self._factor = spec.rope.attention_factor
        self.register_buffer("freqs", rope_frequencies(spec.rope, spec.head_dim), persistent=False)

    def forward(self, x: Tensor, step: int, keys: Keys) -> Tensor:
        """x [B, L, width], or [1, 1, width] of a mask, the same at all places -> [B, L, H]; appends K and V to `keys`."""
        count, length = x.shape[:2] if step == 0 else (keys[0][0].shape[0], keys[0][0].shape[2])
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        repeats = self.heads // self.kv_heads
        k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
        cos, sin = self._angles(step, length, q)
        q, k = ((t * cos + t.roll(self.head_dim // 2, -1) * sin).to(v.dtype) for t in (q, k))
        keys.append((k, v))
        if step == 0:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            shape = (count, self.heads, length, self.head_dim)
            own_k, own_v = (torch.stack([pair[i].expand(shape) for pair in keys[1:]]) for i in range(2))
            out = attend(q.expand(shape), *keys[0], own_k, own_v)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _angles(self, step: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [L, D] of the places' positions."""
        assert isinstance(self.freqs, Tensor)
        positions = torch.arange(step, step + length, device=like.device)
        cos, sin = rope_angles(positions, self.freqs, self._factor, torch.promote_types(like.dtype, torch.float32))
        return cos.squeeze(1), sin.squeeze(1)


class SwiGLU(nn.Module):
    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A Llama's decoder layer."""

    def __init__(self, spec: HeadSpec, width: int | None = None) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(spec.hidden_size, spec.rms_eps) for _ in range(2))
        self.self_attn, self.mlp = Attention(spec, width or spec.hidden_size), SwiGLU(spec)

    def forward(self, state: Tensor, step: int, keys: Keys) -> Tensor:
        return self.behind(state, self.input_layernorm(state), step, keys)

    def behind(self, state: Tensor, x: Tensor, step: int, keys: Keys) -> Tensor:
        """x: what attention reads; the residual stream behind the layer."""
        state = state + self.self_attn(x, step, keys)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class MidLayer(Layer):
    """The first layer, whose attention reads embedding and state side by side."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec, 2 * spec.hidden_size)
        self.hidden_norm = Norm(spec.hidden_size, spec.rms_eps)

    def enter(self, embedded: Tensor, state: Tensor, step: int, keys: Keys) -> Tensor:
        return self.behind(state, torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1), step, keys)


class HeadNetwork(nn.Module):
    """fc, midlayer.*, layers.1.* .., norm, lm_head: the parameters of a flat checkpoint by their published names. A chain."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.tap_layers) * spec.target_hidden_size, spec.hidden_size, bias=False)
        self.midlayer, self.norm = MidLayer(spec), Norm(spec.hidden_size, spec.rms_eps)
        self.layers = nn.ModuleDict({str(i): Layer(spec) for i in range(1, spec.num_layers)})
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """For each draft step [B, L, H] behind the final norm: what lm_head reads.

        embedded  [B, L, H] at place t the embedding of token t+1
        features  [B, L, W] of the target
        """
        state = self.fc(features)
        keys = self._keys()
        for step in range(steps):
            state = self.pass_(embedded, state, step, keys)
            yield self.norm(state)
            embedded = F.pad(embedded[:, 1:], (0, 0, 0, 1))

    def pass_(self, embedded: Tensor, state: Tensor, step: int, keys: list[Keys]) -> Tensor:
        """All layers, of one draft step."""
        state = self.midlayer.enter(embedded, state, step, keys[0])
        for layer, own in zip(self.layers.values(), keys[1:], strict=True):
            state = layer(state, step, own)
        return state

    def _keys(self) -> list[Keys]:
        return [[] for _ in range(self.spec.num_layers)]


class ParallelNetwork(HeadNetwork):
    """The same, and mask_hidden, what a place that is not known yet has for a feature: all drafts in one forward."""

    def __init__(self, spec: HeadSpec, mask_embedding: Tensor) -> None:
        """mask_embedding [H] the target's embedding of the mask token, which does not learn."""
        super().__init__(spec)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(spec.tap_layers) * spec.target_hidden_size))
        self.register_buffer("mask_embedding", mask_embedding.detach().clone().view(1, 1, -1), persistent=False)

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """As of HeadNetwork; step k is the draft behind k masks."""
        assert isinstance(self.mask_embedding, Tensor)
        keys = self._keys()
        yield self.norm(self.pass_(embedded, self.fc(features), 0, keys))
        mask, known = self.mask_embedding.to(embedded.dtype), self.fc(self.mask_hidden.to(features.dtype))
        for step in range(1, steps):
            yield self.norm(self.pass_(mask, known, step, keys))


def network_of(spec: HeadSpec, embedding: Tensor) -> HeadNetwork:
    """The network of a head: one with a mask drafts in parallel. embedding [V, H] of the target."""
    return HeadNetwork(spec) if spec.mask_token_id is None else ParallelNetwork(spec, embedding[spec.mask_token_id])
