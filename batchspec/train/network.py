"""An EAGLE-3 head that can learn: the tensors of a published checkpoint, and draft steps on its own states (test-time training).

B rows, L places (padded at the right), H hidden, NH / KVH heads, D head_dim, W = taps * H. Place t reads the embedding of token
t+1 and the target's features of place t, and speaks of token t+2. Draft step k reads the state that step k-1 left at the same
place, the embedding of token t+1+k, at position t+k; it sees the keys of step 0 at places 0..t, and of the later steps its own
place's alone: what a chain drafted behind place t sees in a job. Source: Li et al. 2025, arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchspec.draft.formats import HeadSpec
from batchspec.model.rope import rope_angles, rope_frequencies

Keys = list[tuple[Tensor, Tensor]]
"""K and V [B, KVH, L, D] of the draft steps so far."""


class Norm(nn.Module):
    """Root mean square norm, in fp32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(2 * spec.hidden_size, heads * spec.head_dim, bias=False)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=False)
        self._factor = spec.rope.attention_factor
        self.register_buffer("freqs", rope_frequencies(spec.rope, spec.head_dim), persistent=False)

    def forward(self, x: Tensor, step: int, keys: Keys) -> Tensor:
        """x [B, L, 2H] -> [B, L, H]; appends this step's K and V to `keys`."""
        count, length, _ = x.shape
        positions = torch.arange(step, step + length, device=x.device)
        assert isinstance(self.freqs, Tensor)
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (a.squeeze(1) for a in rope_angles(positions, self.freqs, self._factor, wide))
        q, k, v = (p(x).view(count, length, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = ((t * cos + t.roll(self.head_dim // 2, -1) * sin).to(v.dtype) for t in (q, k))
        keys.append((k, v))
        if step == 0:
            repeats = self.heads // self.kv_heads
            k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # scores of all pairs are made again on the way back: kept, those of all steps would fill the memory
            flat = [t for pair in keys for t in pair]
            out = checkpoint(_attend, q, *flat, use_reentrant=False)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


def _attend(q: Tensor, *keys: Tensor) -> Tensor:
    """q [B, NH, L, D] over the keys of step 0 up to its place, and of each later step at its place -> [B, NH, L, D]."""
    count, heads, length, size = q.shape
    kv_heads = keys[0].shape[1]
    q = q.view(count, kv_heads, heads // kv_heads, length, size)
    scores = q @ keys[0].unsqueeze(2).transpose(-1, -2)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    own = [(q * k.unsqueeze(2)).sum(-1, keepdim=True) for k in keys[2::2]]
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.cat([scores.masked_fill(later, -torch.inf), *own], -1).to(wide).mul(size**-0.5).softmax(-1).to(q.dtype)
    out = weights[..., :length] @ keys[1].unsqueeze(2)
    for i, v in enumerate(keys[3::2]):
        out = out + weights[..., length + i, None] * v.unsqueeze(2)
    return out.view(count, heads, length, size)


class SwiGLU(nn.Module):
    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The decoder layer, which reads embedding and state side by side."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            Norm(spec.hidden_size, spec.rms_eps) for _ in range(3)
        )
        self.self_attn, self.mlp = Attention(spec), SwiGLU(spec)

    def forward(self, embedded: Tensor, state: Tensor, step: int, keys: Keys) -> Tensor:
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1)
        state = state + self.self_attn(x, step, keys)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class HeadNetwork(nn.Module):
    """fc, midlayer.*, norm, lm_head: the parameters of a flat checkpoint by their published names."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.tap_layers) * spec.target_hidden_size, spec.hidden_size, bias=False)
        self.midlayer, self.norm = MidLayer(spec), Norm(spec.hidden_size, spec.rms_eps)
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """For each draft step [B, L, H] behind the final norm: what lm_head reads.

        embedded  [B, L, H] at place t the embedding of token t+1
        features  [B, L, W] of the target
        """
        state = self.fc(features)
        keys: Keys = []
        for step in range(steps):
            state = self.midlayer(embedded, state, step, keys)
            yield self.norm(state)
            embedded = F.pad(embedded[:, 1:], (0, 0, 0, 1))
