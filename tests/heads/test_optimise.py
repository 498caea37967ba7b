"""Who moves which weights of a head that is trained, and how far."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchspec.heads.head import new_network, new_spec
from batchspec.heads.network import HeadNetwork
from batchspec.heads.optimise import Optimiser
from tests.helpers.engines import tiny_target

LR = 1e-3


def moved(network: HeadNetwork, *, muon: bool) -> dict[str, Tensor]:
    """By how much each weight moves in a first step down noise."""
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    loss = torch.stack([(weight * torch.randn(weight.shape, generator=generator)).sum() for weight in network.parameters()]).sum()
    Optimiser(network, lr=1.0, muon=muon, fused=False).step(loss, LR, clip=1e9)
    return {name: weight.detach() - before[name] for name, weight in network.named_parameters()}


@pytest.fixture
def network() -> HeadNetwork:
    target = tiny_target()
    spec = new_spec(target.spec, draft_vocab=12, aux_layer_ids=None, layers=2, mask_id=1)
    return new_network(spec, target, torch.arange(12), seed=1).cpu().float()


def test_muon_turns_matrices_of_the_layers_and_adamw_the_rest(network: HeadNetwork) -> None:
    steps = moved(network, muon=True)
    turned = {name for name, step in steps.items() if not torch.allclose(step.abs(), torch.full_like(step, LR), rtol=1e-3)}
    assert turned == {name for name, weight in network.named_parameters() if weight.dim() == 2} - {"lm_head.weight"}
    for name in turned:
        # Orthogonalised: all singular values are about the same, and the step is as long as AdamW's usual one.
        values = torch.linalg.svdvals(steps[name])
        assert values.min() > 0.4 * values.max(), name
        assert steps[name].square().mean().sqrt() == pytest.approx(0.2 * LR, rel=0.3), name


def test_without_it_adamw_moves_all(network: HeadNetwork) -> None:
    for name, step in moved(network, muon=False).items():
        torch.testing.assert_close(step.abs(), torch.full_like(step, LR), rtol=1e-3, atol=0, msg=name)
