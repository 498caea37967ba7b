"""The architectures for which tests compile kernels, a card of each, and what a compiled kernel takes of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from batchspec.kernels.common.card import Card
from batchspec.tuning.cards import known_card

CARDS = {80: "A100-80GB", 86: "RTX-3090", 89: "L40S", 90: "H200", 100: "B200", 120: "RTX-5090"}
"""Architecture -> the card whose tiles are compiled."""
MEASURED = 90
"""The architecture on which everything is measured: tests compile for it, and for all with `-m cards`."""


def card_for(architecture: int) -> Card:
    return known_card(CARDS[architecture]).card


@dataclass(frozen=True, slots=True)
class Usage:
    """What a compiled kernel takes."""

    kernel: str
    shared_bytes: int
    """Of a block."""
    registers: int
    """Of a thread."""
    threads: int
    spilled_bytes: int
    """Of a thread's stack: arrays, and registers that did not fit."""

    def misfit(self, card: Card) -> str:
        """Why it cannot be launched on the card; empty if it can."""
        if self.shared_bytes > card.block_shared_bytes:
            return f"{self.kernel}: {self.shared_bytes} bytes of shared memory, {card.name} has {card.block_shared_bytes} a block"
        if self.registers * self.threads > card.sm_registers:
            return f"{self.kernel}: {self.threads} threads of {self.registers} registers, an SM has {card.sm_registers}"
        return ""


def usage_of(metadata: dict[str, Any], cubin: Path) -> Usage:
    """Registers and stack by `cuobjdump`, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr)
    assert found is not None, told.stdout + told.stderr
    return Usage(metadata["name"], metadata["shared"], int(found[1]), 32 * metadata["num_warps"], int(found[2]))


def usage_of_bytes(metadata: dict[str, Any], cubin: bytes) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return usage_of(metadata, Path(file.name))
