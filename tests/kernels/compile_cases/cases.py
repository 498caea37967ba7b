"""What a kernel is compiled with: its cases, and the names of the types of arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from batchspec.kernels.common.card import Card

I32, I64, PI32, PI64, PF32 = "i32", "i64", "*i32", "*i64", "*fp32"


class Case(NamedTuple):
    """A kernel with one set of constants and types."""

    package: str
    module: str
    kernel: str
    warps: int
    arguments: dict[str, object]
    """In the kernel's order: the type of each, or the value of a constant."""
    stages: int = 3
    """Of the pipelines of its loops."""
    aligned: bool = False
    """Whether pointers and strides are multiples of 16, as in launches: only such loads are pipelined, and take shared memory."""
    registers: int | None = None
    """The most of a thread, if the launch limits them."""

    def on(self, card: Card) -> Case | None:
        """The case as it is launched on a card: where it has no loads by descriptor, by pointers. None: not launched there."""
        e4m3 = "fp8e4nv" in str(self.arguments) or "*u8" in (self.arguments.get(name) for name in ("kv", "latents"))
        e4m3 |= self.kernel == "write_latents_kernel" and self.arguments["scales"] is not None
        ordered, direct = self.module in ORDERED, self.module == "four_bit_direct"
        if (e4m3 and not card.has_e4m3) or (ordered and not card.has_same_bits_in_all_tiles) or (direct and not card.has_wgmma):
            return None
        own = dict(self.arguments)
        if not card.has_tma:
            own = {name: pointer(kind) if isinstance(kind, str) else kind for name, kind in own.items()}
            own |= {"TMA": False} if "TMA" in own else {}
        own |= {"EARLY": own["EARLY"] and card.overlaps_launches} if "EARLY" in own else {}
        return self._replace(arguments=own)


class Cases(dict[str, Case]):
    """The cases of a package of `kernels/`, by name."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self.package = package
        self.seldom: set[str] = set()
        """Those whose branches other cases reach: they are compiled with -m slow alone."""

    def add(
        self, name: str, module: str, warps: int, *, stages: Any = None, registers: Any = None, **arguments: object
    ) -> None:
        """A case of the kernel that `name` begins with, in kernels/PACKAGE/`module`.py."""
        assert name not in self, name
        self[name] = Case(self.package, module, name.split(" ")[0], warps, arguments, stages or 3, stages is not None, registers)


ORDERED = ("ordered", "ordered_attention", "ordered_prefill")
"""Modules of decode.deterministic, which needs the same bits in all tiles."""


def pointer(kind: str) -> str:
    """tensordesc<bf16[64, 128]> -> *bf16"""
    return f"*{kind.partition('<')[2].partition('[')[0]}" if kind.startswith("tensordesc<") else kind
