"""From masks of lines to pictures: turned, blurred, coloured, with noise. On the device of the masks, a batch at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pictures(masks: Tensor, room: Tensor, strength: float, generator: torch.Generator | None = None) -> Tensor:
    """uint8 [B, H, W, 3] of masks uint8 [B, H, W].

    room      fp32 [B] radians by which each line may turn
    strength  0 to 1: how much they are turned, blurred, coloured and disturbed by noise; at 0 they are black on white
    Does not synchronise.
    """
    size, device = len(masks), masks.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(size, *shape, device=device, generator=generator) * (high - low) + low

    ink = _warped(masks[:, None].float() / 255, uniform(-1, 1) * room * strength, 1 - 0.1 * strength * uniform(0, 1))
    blurred = F.avg_pool2d(F.pad(ink, (1, 1, 1, 1), mode="replicate"), 3, 1)
    ink = torch.lerp(ink, blurred, 0.7 * strength * uniform(0, 1, 1, 1, 1))
    light, dark = 255 - 75 * strength * uniform(0, 1, 1, 1, 1), 75 * strength * uniform(0, 1, 1, 1, 1)
    light, dark = (own + 25 * strength * uniform(-1, 1, 3, 1, 1) for own in (light, dark))
    swap = uniform(0, 1, 1, 1, 1) < 0.3 * strength
    paper, pen = torch.where(swap, dark, light), torch.where(swap, light, dark)
    x = torch.linspace(-1, 1, masks.shape[2], device=device)
    shade = 20 * strength * uniform(-1, 1, 1, 1, 1) * x
    noise = torch.randn(ink.shape, device=device, generator=generator) * (16 * strength * uniform(0, 1, 1, 1, 1))
    values = torch.lerp(paper, pen, ink) + shade + noise
    return values.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def _warped(image: Tensor, angle: Tensor, scale: Tensor) -> Tensor:
    """[B, 1, H, W] turned by angle [B] and scaled by scale [B] about the middle."""
    height, width = image.shape[2:]
    cos, sin, zero = angle.cos() / scale, angle.sin() / scale, torch.zeros_like(angle)
    rows = (torch.stack((cos, sin * height / width, zero), 1), torch.stack((-sin * width / height, cos, zero), 1))
    grid = F.affine_grid(torch.stack(rows, 1), list(image.shape), align_corners=False)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
