"""Programmatic launches: off unless asked for, never on a CPU, and on a GPU the same bits with them as without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from batchspec.kernels import pdl
from batchspec.kernels.norm import add_norm, rms_norm


@pytest.fixture
def switched_on() -> Iterator[None]:
    before = pdl.switch(True)
    yield
    pdl.switch(before)


def test_nothing_overlaps_unless_asked_for(device: torch.device) -> None:
    assert pdl.launch_args(torch.empty(1, device=device)) == {"PDL": False}


def test_the_switch_says_what_held_before() -> None:
    before = pdl.switch(True)
    assert pdl.switch(before) is True
    assert pdl.switch(before) is before


def test_a_cpu_never_overlaps_launches(switched_on: None) -> None:
    assert pdl.launch_args(torch.empty(1)) == {"PDL": False}
    assert not pdl.supported(torch.device("cpu"))


def test_a_chain_of_kernels_gives_the_same_bits(device: torch.device) -> None:
    x, weight = torch.randn(300, 576, device=device), torch.randn(576, device=device)
    results = []
    for on in (False, True):
        before = pdl.switch(on)
        residual, out = torch.zeros_like(x), x.clone()
        for _ in range(50):
            add_norm(out, residual, weight, 1e-5, out=out, interpret=True)
            rms_norm(residual, weight, 1e-5, out=out, interpret=True)
        results.append(torch.cat((residual, out)))
        pdl.switch(before)
    assert torch.equal(*results)
