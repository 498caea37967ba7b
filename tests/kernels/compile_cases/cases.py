"""What a kernel is compiled with: its cases, and the names of the types of arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from batchspec.kernels.common.card import Card

KERNELS = Path(__file__).parents[3] / "kernels"
I32, I64, PI32, PI64, PF32 = "i32", "i64", "*i32", "*i64", "*fp32"
USUAL = {"kv_stride_part": I64} | dict.fromkeys(("keys", "out_positions", "out_slot_mapping", "positions", "slot_mapping"), PI64)
USUAL |= dict.fromkeys(
    ("count", "first_id", "growth", "head_width", "length", "mask_id", "split", "vocab", "w_rows", "width"), I32
)
USUAL |= dict.fromkeys(
    (
        "accepted_len", "classes", "cu_seqlens_q", "draft_ids", "draft_len", "expert_ids", "kv_len", "limit", "live", "log",
        "match_len", "order", "out_counts", "out_cu_seqlens_q", "out_draft_len", "out_ids", "out_kv_len", "out_offsets",
        "out_pairs", "out_places", "out_row_ids", "out_units", "page_table", "pairs", "parents", "prompt_len", "row_ids",
        "row_parts", "settings", "starts", "states", "symbols", "tables", "target_ids", "tiles", "tokens", "top_ids", "units",
    ),
    PI32,
)
"""Types of arguments that a case does not give; strides, and numbers and maxima of things, are int32."""


@cache
def _arguments(package: str, module: str) -> dict[str, list[str]]:
    """The arguments of each function of a file of kernels/, read without importing it."""
    tree = ast.parse((KERNELS / package / f"{module}.py").read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {function.name: [own.arg for own in function.args.args + function.args.kwonlyargs] for function in functions}


def _usual(argument: str) -> str:
    if argument not in USUAL and not re.search("stride|^num_|^max_", argument):
        raise ValueError(f"{argument} has no usual type: a case must give it")
    return USUAL.get(argument, I32)


OfCard = Callable[[Card], tuple[dict[str, object], int]]


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
    of_card: OfCard | None = None
    """Those of the constants, and the stages, that depend on the card."""

    def on(self, card: Card) -> Case | None:
        """The case as it is launched on a card: where it has no loads by descriptor, by pointers. None: not launched there."""
        e4m3 = "fp8e4nv" in str(self.arguments) or "*u8" in (self.arguments.get(name) for name in ("kv", "latents"))
        e4m3 |= self.kernel == "write_latents_kernel" and self.arguments["scales"] is not None
        ordered, direct = self.module in ORDERED, self.module == "four_bit_direct"
        if (e4m3 and not card.has_e4m3) or (ordered and not card.has_same_bits_in_all_tiles) or (direct and not card.has_wgmma):
            return None
        own, stages = dict(self.arguments), self.stages
        if self.of_card is not None:
            constants, stages = self.of_card(card)
            own |= constants
        if not card.has_tma:
            own = {name: pointer(kind) if isinstance(kind, str) else kind for name, kind in own.items()}
            own |= {"TMA": False} if "TMA" in own else {}
        own |= {"EARLY": own["EARLY"] and card.overlaps_launches} if "EARLY" in own else {}
        return self._replace(arguments=own, stages=stages)


class Cases(dict[str, Case]):
    """The cases of a package of `kernels/`, by name."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self.package = package
        self.seldom: set[str] = set()
        """Those whose branches other cases reach: they are compiled with -m slow alone."""

    def add(
        self, name: str, module: str, warps: int, *, stages: Any = None, registers: Any = None, of_card: Any = None,
        **arguments: object,
    ) -> None:
        """A case of the kernel that `name` begins with, in kernels/PACKAGE/`module`.py. Arguments that are not given have their
        usual types; whether it overlaps launches (PDL) depends on the card."""
        assert name not in self, name
        kernel = name.split(" ")[0]
        own = [each for each in _arguments(self.package, module)[kernel] if each in arguments or each != "PDL"]
        assert arguments.keys() <= set(own), f"{name} has no {arguments.keys() - set(own)}"
        in_order = {each: arguments[each] if each in arguments else _usual(each) for each in own}
        self[name] = Case(self.package, module, kernel, warps, in_order, stages or 3, stages is not None, registers, of_card)


ORDERED = ("ordered", "ordered_attention", "ordered_prefill")
"""Modules of decode.deterministic, which needs the same bits in all tiles."""


def pointer(kind: str) -> str:
    """tensordesc<bf16[64, 128]> -> *bf16"""
    return f"*{kind.partition('<')[2].partition('[')[0]}" if kind.startswith("tensordesc<") else kind
