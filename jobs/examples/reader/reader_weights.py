"""The weights of training: fp32, changed by Muon (matrices) and AdamW (the rest); the model computes with copies in its dtype.

Muon: the momentum of a matrix is replaced by the nearest matrix whose singular values are all about 1, in five steps of Newton
and Schulz. Sources: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); its size beside AdamW's: Liu et al. 2025, arXiv
2502.16982.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from reader_model import Reader
from torch import Tensor

MOMENTUM, DECAY = 0.95, 0.05
STEPS, FACTORS = 5, (3.4445, -4.7750, 2.0315)
OTHERS = ("embed", "guide", "place", "in_proj_a", "in_proj_b", "conv1d")
"""Parts of the names of matrices that AdamW changes."""


def orthogonal(matrices: Tensor) -> Tensor:
    """[n, rows, columns] with singular values of about 1, in the dtype given."""
    wide = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if wide else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=FACTORS[1], alpha=FACTORS[2]), x, beta=FACTORS[0])
    found: Tensor = x.mT if wide else x
    return found


class Muon:
    """Matrices of equal shapes are changed together. Gradients are in `grad`; dimensions after the second are joined to it."""

    def __init__(self, matrices: Iterable[Tensor], dtype: torch.dtype) -> None:
        groups = dict[tuple[int, ...], list[Tensor]]()
        for one in matrices:
            groups.setdefault(one.shape, []).append(one)
        self._groups, self._dtype = list(groups.values()), dtype
        shapes = [(len(group), len(group[0]), group[0][0].numel()) for group in self._groups]
        self.momenta = [torch.zeros(shape, device=group[0].device) for shape, group in zip(shapes, self._groups, strict=True)]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, momentum in zip(self._groups, self.momenta, strict=True):
            gradients = torch.stack([one.grad.flatten(1) for one in group if one.grad is not None])
            momentum.lerp_(gradients, 1 - MOMENTUM)
            ahead = gradients.lerp(momentum, MOMENTUM).to(self._dtype)
            change = orthogonal(ahead).float() * (0.2 * max(momentum.shape[1:]) ** 0.5)
            torch._foreach_mul_(group, 1 - rate * DECAY)
            torch._foreach_add_(group, [one.view_as(group[0]) for one in change.unbind()], alpha=-rate)


class Weights:
    """fp32 weights and what changes them; the model's own are copies in its dtype."""

    def __init__(self, model: Reader, rate: float, dtype: torch.dtype) -> None:
        """rate: of Muon at most; AdamW's is a quarter of it."""
        self.rate, names = rate, [name for name, _ in model.named_parameters()]
        self._main = [own.detach().clone().requires_grad_() for own in model.parameters()]
        self._gradients = [torch.zeros_like(main) for main in self._main]
        for main, gradient in zip(self._main, self._gradients, strict=True):
            main.grad = gradient
        self.named = dict(zip(names, self._main, strict=True))
        model.to(dtype)
        self._own: list[Tensor] = list(model.parameters())
        matrices = [name for name in names if self.named[name].ndim > 1 and not any(part in name for part in OTHERS)]
        matrices += [name for name in names if name.endswith("patch_embed.proj.weight")]
        rest = [own for name, own in self.named.items() if name not in matrices]
        self._muon = Muon([self.named[name] for name in matrices], dtype)
        self._adamw = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=rest[0].is_cuda)

    def step(self, factor: float) -> None:
        """Changes the weights by the gradients of the model's, which are then gone. factor: of the rates."""
        torch._foreach_copy_(self._gradients, [own.grad for own in self._own if own.grad is not None])
        for own in self._own:
            own.grad = None
        torch.nn.utils.clip_grad_norm_(self._main, 1.0)
        self._muon.step(self.rate * factor)
        for group in self._adamw.param_groups:
            group["lr"] = self.rate * factor / 4
        self._adamw.step()
        self.put()

    @torch.no_grad()
    def put(self) -> None:
        """Copies the weights to the model."""
        torch._foreach_copy_(self._own, self._main)

    def state(self) -> dict[str, Any]:
        """What training goes on from."""
        return {"main": self._main, "momenta": self._muon.momenta, "adamw": self._adamw.state_dict()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        torch._foreach_copy_(self._main, state["main"])
        torch._foreach_copy_(self._muon.momenta, state["momenta"])
        self._adamw.load_state_dict(state["adamw"])
        self.put()
