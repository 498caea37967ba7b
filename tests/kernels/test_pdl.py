"""Programmatic dependent launch: on if the GPU supports it, never on a CPU, and on a GPU bit for bit the same results."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.common import pdl
from batchspec.kernels.norm_rope.norm import add_norm, rms_norm


def test_launches_overlap_if_the_gpu_supports_it(device: torch.device) -> None:
    expected = {"PDL": True, "launch_pdl": True} if pdl.supported(device) else {"PDL": False}
    assert pdl.launch_args(torch.empty(1, device=device)) == expected


def test_set_enabled_returns_the_setting_before(device: torch.device) -> None:
    assert pdl.set_enabled(False) is True
    try:
        assert pdl.launch_args(torch.empty(1, device=device)) == {"PDL": False}
    finally:
        assert pdl.set_enabled(True) is False


def test_a_cpu_never_overlaps_launches() -> None:
    assert pdl.launch_args(torch.empty(1)) == {"PDL": False}
    assert not pdl.supported(torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU no launches overlap")
def test_a_chain_of_kernels_gives_the_same_bits(device: torch.device) -> None:
    x, weight = torch.randn(300, 576, device=device), torch.randn(576, device=device)
    results = []
    for on in (False, True):
        before = pdl.set_enabled(on)
        residual, out = torch.zeros_like(x), x.clone()
        for _ in range(50):
            add_norm(out, residual, weight, 1e-5, out=out, interpret=True)
            rms_norm(residual, weight, 1e-5, out=out, interpret=True)
        results.append(torch.cat((residual, out)))
        pdl.set_enabled(before)
    assert torch.equal(*results)
