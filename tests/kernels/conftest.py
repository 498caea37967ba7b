from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", params=[True, False], ids=["kernel", "reference"])
def interpret(request: pytest.FixtureRequest, device: torch.device) -> bool:
    """Each test runs with the Triton kernel and with the torch reference, which the CPU uses instead."""
    if device.type == "cuda" and not request.param:
        pytest.skip("on a GPU the wrapper always runs the kernel")
    return bool(request.param)
