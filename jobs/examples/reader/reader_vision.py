"""The vision encoder of the reader, for pictures of one size. B pictures, N patches of each in merge order, D numbers of a head.

Source: transformers, models/qwen3_5 (Qwen3_5VisionModel).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchspec.model.vision.blocks import axial_angles, grid_positions, merge_order

EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model. Its layers alternate: gated delta rule, attention."""

    vocab: int = 264
    patch: int = 8
    merge: int = 2
    vision_depth: int = 4
    vision_size: int = 192
    vision_heads: int = 6
    vision_inner: int = 640
    positions: int = 256
    """Rows of the learned grid, a square."""
    layers: int = 4
    size: int = 256
    inner: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    key_heads: int = 4
    key_dim: int = 32
    value_dim: int = 64
    kernel: int = 4
    sections: tuple[int, int, int] = (6, 5, 5)
    """mrope_section: half of each head is rotated."""
    theta: float = 10_000.0

    @property
    def token(self) -> int:
        """Side of an image token in pixels."""
        return self.patch * self.merge


def linear(size: int, out: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(size, out, bias=bias)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, n, D]: its first 2 * d numbers rotated in pairs (i, i + d); cos, sin [n, d]."""
    half = cos.shape[-1]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)


class VisionLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.vision_size
        self.heads = shape.vision_heads
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=EPS), nn.LayerNorm(size, eps=EPS)
        self.attn = nn.ModuleDict({"qkv": linear(size, 3 * size, True), "proj": linear(size, size, True)})
        inner = shape.vision_inner
        self.mlp = nn.ModuleDict({"linear_fc1": linear(size, inner, True), "linear_fc2": linear(inner, size, True)})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v)
        x = x + self.attn["proj"](found.transpose(1, 2).flatten(2))
        inner = F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh")
        return cast(Tensor, x + self.mlp["linear_fc2"](inner))


@cache
def vision_places(shape: Shape, grid: tuple[int, int], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of patches [2, N], cos and sin [N, D / 2]. Kept, as the copy to the device synchronises."""
    coords = merge_order(grid, shape.merge)
    cos, sin = axial_angles(coords, shape.vision_size // shape.vision_heads, 10_000.0)
    return coords.to(device), cos.to(device, dtype), sin.to(device, dtype)


class Vision(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, wide = shape.vision_size, shape.vision_size * shape.merge**2
        self.shape = shape
        proj = nn.Conv3d(3, size, (2, shape.patch, shape.patch))
        self.patch_embed = nn.ModuleDict({"proj": proj})
        self.pos_embed = nn.Embedding(shape.positions, size)
        self.blocks = nn.ModuleList([VisionLayer(shape) for _ in range(shape.vision_depth)])
        products = {"linear_fc1": linear(wide, wide, True), "linear_fc2": linear(wide, shape.size, True)}
        self.merger = nn.ModuleDict({"norm": nn.LayerNorm(size, eps=EPS), **products})

    def forward(self, images: Tensor) -> Tensor:
        """images uint8 [B, H, W, 3] -> [B, V, size]."""
        shape, proj = self.shape, cast(nn.Conv3d, self.patch_embed["proj"])
        grid = (images.shape[1] // shape.patch, images.shape[2] // shape.patch)
        cells = images.unflatten(2, (-1, shape.merge, shape.patch)).unflatten(1, (-1, shape.merge, shape.patch))
        patches = cells.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(len(images), grid[0] * grid[1], -1)
        x = F.linear((patches / 127.5 - 1).to(proj.weight.dtype), proj.weight.sum(2).flatten(1), proj.bias)
        coords, cos, sin = vision_places(shape, grid, x.device, x.dtype)
        x = x + grid_positions(self.pos_embed.weight, coords, grid).to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.merger["norm"](x).unflatten(1, (-1, shape.merge**2)).flatten(2)
        return cast(Tensor, self.merger["linear_fc2"](F.gelu(self.merger["linear_fc1"](x))))
