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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchspec.draft.formats import HeadSpec
from batchspec.model.rope import rope_angles, rope_frequencies
from batchspec.train.attend import Keys, attend
from batchspec.train.fused import Gate, Turn

Angles = tuple[Tensor, Tensor]
"""cos and sin [L, D], the first half of sin negated"""


@dataclass(frozen=True, slots=True)
class Step:
    """Where a draft step stands."""

    count: int
    """steps there are"""
    rows: int
    angles: Angles
    """of its places"""


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

    def angles(self, places: int, like: Tensor) -> Angles:
        """cos and sin [places, D] of positions 0 and on."""
        assert isinstance(self.freqs, Tensor)
        wide = torch.promote_types(like.dtype, torch.float32)
        cos, sin = rope_angles(torch.arange(places, device=like.device), self.freqs, self._factor, wide)
        return cos.squeeze(1), sin.squeeze(1)

    def forward(self, x: Tensor, step: Step, keys: Keys) -> Tensor:
        """x [B, L, width], or [1, 1, width] of a mask, the same at all places -> [B, L, H]; adds K and V to `keys`."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = step.angles
        q, k, v = (part.expand(-1, len(cos), -1, -1) for part in (q, k, v))
        keys.add(Turn.apply(k, cos, sin), v, step.count)  # type: ignore[no-untyped-call]
        turned: Tensor = Turn.apply(q, cos, sin)  # type: ignore[no-untyped-call]
        result: Tensor = self.o_proj(attend(turned.expand(step.rows, -1, -1, -1).contiguous(), keys).flatten(2))
        return result


class SwiGLU(nn.Module):
    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(Gate.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call]
        return out


class Layer(nn.Module):
    """A Llama's decoder layer."""

    def __init__(self, spec: HeadSpec, width: int | None = None) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (Norm(spec.hidden_size, spec.rms_eps) for _ in range(2))
        self.self_attn, self.mlp = Attention(spec, width or spec.hidden_size), SwiGLU(spec)

    def forward(self, state: Tensor, step: Step, keys: Keys) -> Tensor:
        return self.behind(state, self.input_layernorm(state), step, keys)

    def behind(self, state: Tensor, x: Tensor, step: Step, keys: Keys) -> Tensor:
        """x: what attention reads; the residual stream behind the layer."""
        state = state + self.self_attn(x, step, keys)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class MidLayer(Layer):
    """The first layer, whose attention reads embedding and state side by side."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec, 2 * spec.hidden_size)
        self.hidden_norm = Norm(spec.hidden_size, spec.rms_eps)

    def enter(self, embedded: Tensor, state: Tensor, step: Step, keys: Keys) -> Tensor:
        return self.behind(state, torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1), step, keys)


class HeadNetwork(nn.Module):
    """fc, midlayer.*, layers.1.* .., norm, lm_head: the parameters of a flat checkpoint by their published names. A chain."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.aux_layer_ids) * spec.target_hidden_size, spec.hidden_size, bias=False)
        self.midlayer, self.norm = MidLayer(spec), Norm(spec.hidden_size, spec.rms_eps)
        self.layers = nn.ModuleDict({str(i): Layer(spec) for i in range(1, spec.num_layers)})
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """For each draft step [B, L, H] behind the final norm: what lm_head reads.

        embedded  [B, L, H] at place t the embedding of token t+1
        features  [B, L, W] of the target
        """
        state = self.fc(features)
        all_steps, keys = self._begin(embedded, steps)
        for step in all_steps:
            state = self.pass_(embedded, state, step, keys)
            yield self.norm(state)
            embedded = F.pad(embedded[:, 1:], (0, 0, 0, 1))

    def pass_(self, embedded: Tensor, state: Tensor, step: Step, keys: list[Keys]) -> Tensor:
        """All layers, of one draft step."""
        state = self.midlayer.enter(embedded, state, step, keys[0])
        for layer, own in zip(self.layers.values(), keys[1:], strict=True):
            state = layer(state, step, own)
        return state

    def _begin(self, embedded: Tensor, count: int) -> tuple[list[Step], list[Keys]]:
        """All draft steps over rows like `embedded`, and the keys of each layer, none yet."""
        rows, length = embedded.shape[:2]
        cos, sin = self.midlayer.self_attn.angles(length + count, embedded)
        steps = [Step(count, rows, (cos[at : at + length], sin[at : at + length])) for at in range(count)]
        return steps, [Keys() for _ in range(self.spec.num_layers)]


class ParallelNetwork(HeadNetwork):
    """The same, and mask_hidden, what a place that is not known yet has for a feature: all drafts in one forward."""

    def __init__(self, spec: HeadSpec, mask_embedding: Tensor) -> None:
        """mask_embedding [H] the target's embedding of the mask token, which does not learn."""
        super().__init__(spec)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(spec.aux_layer_ids) * spec.target_hidden_size))
        self.register_buffer("mask_embedding", mask_embedding.detach().clone().view(1, 1, -1), persistent=False)

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """As of HeadNetwork; step k is the draft behind k masks."""
        assert isinstance(self.mask_embedding, Tensor)
        (first, *later), keys = self._begin(embedded, steps)
        yield self.norm(self.pass_(embedded, self.fc(features), first, keys))
        mask, known = self.mask_embedding.to(embedded.dtype), self.fc(self.mask_hidden.to(features.dtype))
        for step in later:
            yield self.norm(self.pass_(mask, known, step, keys))


def network_of(spec: HeadSpec, embedding: Tensor) -> HeadNetwork:
    """The network of a head: one with a mask drafts in parallel. embedding [V, H] of the target."""
    return HeadNetwork(spec) if spec.mask_token_id is None else ParallelNetwork(spec, embedding[spec.mask_token_id])
