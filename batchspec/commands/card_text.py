"""Lines about a card that this machine need not have (`--card NAME`): what it is, and what runs on it by which path."""

from __future__ import annotations

from batchspec.kernels.common.card import Card
from batchspec.tuning.cards import KnownCard
from batchspec.tuning.table import tuned_of


def about(known: KnownCard) -> str:
    """The card's sizes, and how far it is known."""
    card = known.card
    (major, minor), fp8 = card.capability, f", {card.fp8_flop_s / 1e12:,.0f} in FP8" if card.fp8_flop_s else ""
    checked = "measured" if known.rates is not None else "kernels compiled and checked for it, nothing measured"
    return (
        f"{card.name}, compute capability {major}.{minor}, {card.memory_bytes / 1e9:,.1f} GB, {card.num_sms} SMs with "
        f"{card.block_shared_bytes >> 10} KB of shared memory per block; by its data sheet {card.bytes_s / 1e12:.2f} TB/s, "
        f"{card.flop_s / 1e12:,.0f} TFLOP/s in bf16{fp8}; {checked}"
    )


def paths(known: KnownCard) -> list[tuple[str, str]]:
    """(label, line) of each thing that runs in different ways on different cards."""
    card = known.card
    num_tuned = max(len(tuned_of(gpu)) for gpu in known.gpus)
    products = f"{num_tuned} tuned for this card, the others by cuBLAS" if num_tuned else "by cuBLAS, none tuned for this card"
    loads = "by descriptor (TMA)" if card.has_tma else "by pointers (no TMA)"
    return [
        ("products", products),
        ("FP8", fp8_weights(card)),
        ("experts", f"by kernels in bf16{', FP8' * card.has_e4m3}, MXFP4, INT4 and NVFP4; blocks are loaded {loads}"),
        ("FP8 K/V", "supported" if card.has_e4m3 else "refused: it needs compute capability 8.9; use cache.dtype=auto"),
        ("launches", launches(card)),
        ("same bits", same_bits(card)),
    ]


def fp8_weights(card: Card) -> str:
    if card.has_e4m3:
        return "weights stay FP8, activations are quantised (W8A8)"
    return "weights are converted to bf16 at load, which takes twice the memory: tensor cores multiply no FP8 below 8.9"


def launches(card: Card) -> str:
    if card.overlaps_launches:
        return "a kernel begins before the one before it has ended"
    return "one after another, which slows small models: overlap needs Hopper or newer"


def same_bits(card: Card) -> str:
    if card.has_same_bits_in_all_tiles:
        return "decode.deterministic=true is supported"
    return "decode.deterministic=true is refused: it is supported on Hopper"
