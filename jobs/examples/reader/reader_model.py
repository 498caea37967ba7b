"""A small Qwen3.5 with vision and an MTP layer, to be trained: parameters have the names of a checkpoint, and all pictures of a
batch have one size. batchspec and transformers compute the same (tests/job/test_reader.py).

B pictures, V image tokens of each, T text tokens, L = V + T, D of a head.
Sources: transformers, models/qwen3_5; MTP: batchspec/model/mtp.py; chunks of the delta rule: Yang et al. 2024, arXiv 2412.06464.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from reader_vision import EPS, Shape, Vision, linear, turned
from torch import Tensor, nn

CHUNK = 64


class Norm(nn.Module):
    """RMS norm by 1 + weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, 1 + self.weight, EPS)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, wide, narrow = shape.size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.heads, self.groups = shape.heads, shape.heads // shape.kv_heads
        self.q_proj, self.o_proj = linear(size, 2 * wide), linear(wide, size)
        self.k_proj, self.v_proj = linear(size, narrow), linear(size, narrow)
        self.q_norm, self.k_norm = Norm(shape.head_dim), Norm(shape.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        k, v = (own(x).unflatten(-1, (self.heads // self.groups, -1)) for own in (self.k_proj, self.v_proj))
        q, k = (turned(own.transpose(1, 2), cos, sin) for own in (self.q_norm(q), self.k_norm(k)))
        k, v = (own.repeat_interleave(self.groups, 1) for own in (k, v.transpose(1, 2)))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return cast(Tensor, self.o_proj((found * gate.sigmoid()).flatten(2)))


class GatedDelta(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        keys, values = shape.key_heads * shape.key_dim, shape.key_heads * shape.value_dim
        self.heads, self.split = shape.key_heads, (keys, keys, values)
        self.in_proj_qkv, self.in_proj_z = linear(shape.size, 2 * keys + values), linear(shape.size, values)
        self.in_proj_b, self.in_proj_a = linear(shape.size, self.heads), linear(shape.size, self.heads)
        self.conv1d = nn.Conv1d(sum(self.split), sum(self.split), shape.kernel, groups=sum(self.split), bias=False)
        self.dt_bias = nn.Parameter(torch.linspace(-4, -1, self.heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(shape.value_dim))
        self.out_proj = linear(values, shape.size)

    def forward(self, x: Tensor) -> Tensor:
        taps = self.conv1d.weight.float()[:, 0].unbind(1)
        mixed = F.pad(self.in_proj_qkv(x).float(), (0, 0, len(taps) - 1, 0))
        total = mixed[:, : x.shape[1]] * taps[0]
        for i, tap in enumerate(taps[1:], 1):  # F.conv1d over single channels has a slow backward
            total = total + mixed[:, i : i + x.shape[1]] * tap
        mixed = F.silu(total)
        q, k, v = (own.unflatten(-1, (self.heads, -1)).transpose(1, 2) for own in mixed.split(self.split, -1))
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        decay = (-self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())).transpose(1, 2)
        found = delta_rule(_unit(q) * q.shape[-1] ** -0.5, _unit(k), v, decay, beta).transpose(1, 2).to(x.dtype)
        gate = F.silu(self.in_proj_z(x).unflatten(-1, (self.heads, -1)))
        weight = cast(Tensor, self.norm.weight)
        return cast(Tensor, self.out_proj((F.rms_norm(found, weight.shape, weight, EPS) * gate).flatten(2)))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """o_t = q_t S_t, where S_t = exp(decay_t) S_(t-1) + k_t (beta_t (v_t - k_t exp(decay_t) S_(t-1))), from S = 0, in chunks.

    q, k fp32 [B, heads, L, K], v [B, heads, L, D], decay, beta [B, heads, L] -> [B, heads, L, D].
    """
    length = q.shape[2]
    more = -length % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, more)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    decay, beta = (F.pad(x, (0, more)).unflatten(2, (-1, CHUNK)) for x in (decay, beta))
    total = decay.cumsum(-1)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    system = (k * beta[..., None]) @ k.transpose(-1, -2) * between  # its diagonal is not read
    right = torch.cat((v, k * total.exp()[..., None]), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    inside = q @ k.transpose(-1, -2) * between
    q, k = q * total.exp()[..., None], k * (total[..., -1:] - total).exp()[..., None]
    state, found = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for i in range(q.shape[2]):
        new = values[:, :, i] - keys[:, :, i] @ state
        found.append(q[:, :, i] @ state + inside[:, :, i] @ new)
        state = state * total[:, :, i, -1].exp()[..., None, None] + k[:, :, i].transpose(-1, -2) @ new
    return torch.cat(found, 2)[:, :, :length]


class TextLayer(nn.Module):
    def __init__(self, shape: Shape, attends: bool) -> None:
        super().__init__()
        if attends:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDelta(shape)
        self.input_layernorm, self.post_attention_layernorm = Norm(shape.size), Norm(shape.size)
        self.mlp = nn.ModuleDict({name: linear(shape.size, shape.inner) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = linear(shape.inner, shape.size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        x = x + (self.self_attn(y, cos, sin) if hasattr(self, "self_attn") else self.linear_attn(y))
        y = self.post_attention_layernorm(x)
        return cast(Tensor, x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y)))


@cache
def text_angles(
    shape: Shape, before: int, grid: tuple[int, int], after: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [L, d] of `before` text tokens, an image of grid tokens, and `after` text tokens: mRoPE, interleaved."""
    rows, cols = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    image = torch.stack((torch.zeros_like(rows), rows, cols)).flatten(1) + before
    text = [torch.arange(n) + start for n, start in ((before, 0), (after, before + max(grid)))]
    places = torch.cat((text[0].expand(3, -1), image, text[1].expand(3, -1)), 1).float()
    half = sum(shape.sections)
    axis = torch.tensor([i % 3 if i < 3 * shape.sections[i % 3] else 0 for i in range(half)])
    angles = places[axis].T * shape.theta ** (-torch.arange(half) / half)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


class TextModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.size)
        self.layers = nn.ModuleList([TextLayer(shape, i % 2 == 1) for i in range(shape.layers)])
        self.norm = Norm(shape.size)


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.visual, self.language_model = Vision(shape), TextModel(shape)


class Mtp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc, self.layers = linear(2 * shape.size, shape.size), nn.ModuleList([TextLayer(shape, True)])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(shape.size), Norm(shape.size)
        self.norm = Norm(shape.size)

    def forward(self, following: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """following, hidden [B, n, size]: what the target reads after each position, and its hidden states there."""
        joined = torch.cat((self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(hidden)), -1)
        return cast(Tensor, self.norm(self.layers[0](self.fc(joined), cos, sin)))


class Reader(nn.Module):
    """The model. `guide` and `place` are no part of a checkpoint: two outputs that training asks for more than the text."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.model, self.mtp = shape, Model(shape), Mtp(shape)
        self.guide, self.place = linear(shape.size, 2 * 128, True), linear(shape.size, 96, True)
        self.apply(self._first)

    def _first(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv3d):
            is_table = isinstance(module, nn.Embedding)
            nn.init.normal_(module.weight, std=0.02 if is_table else 0.6 * module.weight[0].numel() ** -0.5)
        if isinstance(module, nn.Linear | nn.Conv3d) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, images: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Outputs at the text tokens after the picture.

        images uint8 [B, H, W, 3]; before, after int64 [B, n], [B, T] the tokens on both sides of the picture's
        Returns logits [B, T, vocab] of the next tokens; logits [B, T - 1, vocab] of MTP, of the tokens after those; where the
        next character stands, in 8 pixels, [B, T, 96]; the character at the middle of each 8 pixels, [B, W / 8, 128].
        """
        shape, text = self.shape, self.model.language_model
        seen, embed = self.model.visual(images), text.embed_tokens
        embedded = torch.cat((embed(before), seen, embed(after)), 1)
        grid, head = (images.shape[1] // shape.token, images.shape[2] // shape.token), before.shape[1] + seen.shape[1]
        x = embedded
        cos, sin = text_angles(shape, before.shape[1], grid, after.shape[1], x.device, x.dtype)
        for layer in text.layers:
            x = layer(x, cos, sin)
        x = text.norm(x)
        ahead = self.mtp(embedded[:, 1:], x[:, :-1], cos[:-1], sin[:-1])[:, head:]
        guided = self.guide(seen.unflatten(1, grid).mean(1)).unflatten(-1, (2, 128)).flatten(1, 2)
        x = x[:, head:]
        return F.linear(x, embed.weight), F.linear(ahead, embed.weight), self.place(x), guided
