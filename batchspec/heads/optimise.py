"""The optimiser of a head: AdamW, or Muon for the matrices of its layers and AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchspec.heads.draft_network import DraftNetwork

BETAS = (0.9, 0.95)


class Optimiser:
    """One learning rate for all weights; no weight decay.

    muon   Muon for the `matrices` of the network: orthogonalised momentum (Jordan et al. 2024), scaled to AdamW's typical step
           size (Liu et al. 2025, arXiv 2502.16982). All else uses AdamW
    fused  AdamW in one launch (GPU only)
    """

    def __init__(self, network: DraftNetwork, *, lr: float, muon: bool, fused: bool) -> None:
        turned = network.matrices() if muon else {}
        matrices, rest = list(turned.values()), [weight for name, weight in network.named_parameters() if name not in turned]
        self._parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=lr, betas=BETAS, weight_decay=0.0, fused=fused)]
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))

    def step(self, loss: Tensor, lr: float, clip: float) -> None:
        """A step on the gradient of `loss`, clipped to the norm `clip`."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)
        loss.backward()
        groups = [group for part in self._parts for group in part.param_groups]
        torch.nn.utils.clip_grad_norm_([weight for group in groups for weight in group["params"]], clip)
        for group in groups:
            group["lr"] = lr
        for part in self._parts:
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for part, own in zip(self._parts, state, strict=True):
            part.load_state_dict(own)
