"""Cards by name, for `--card NAME`: the table `conf/tuned/cards.json`, of the vendors' data sheets.

Rates are dense, with fp32 sums. Memory is what torch reports as total. A card may have the rates of the cost model as measured
(`packing.cost.Rates`); those of others are computed from bandwidth and arithmetic.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from batchspec.errors import ConfigError
from batchspec.kernels.common.card import Card


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCard:
    """An entry of the table."""

    card: Card
    gpus: tuple[str, ...]
    """What torch calls it."""
    rates: dict[str, Any] | None
    """The measured rates, as arguments of `Rates` but its name; None: not measured."""


def known_card(name: str) -> KnownCard:
    """The card of this name, in any case. Raises ConfigError, which lists the names."""
    for known in known_cards():
        if known.card.name.lower() == name.lower():
            return known
    names = ", ".join(known.card.name for known in known_cards())
    raise ConfigError(f"--card {name} is not a card that batchspec knows; choose one of {names}")


def check_card(card: Card) -> None:
    """Raises ConfigError for a card without bf16."""
    if not card.computes_bf16:
        major, minor = card.capability
        raise ConfigError(
            f"{card.name} has compute capability {major}.{minor}, so no tensor cores for bf16 and no support by Triton; jobs "
            "compute in bf16 on a GPU, and float16 is not supported; use a GPU of compute capability 8.0 (A100) or newer, or "
            "device=cpu"
        )


def entry_of(gpu: str) -> KnownCard | None:
    """The entry of a card by what torch calls it, or by its name in the table; None: it has none."""
    return next((known for known in known_cards() if gpu in (known.card.name, *known.gpus)), None)


@cache
def known_cards() -> tuple[KnownCard, ...]:
    """All cards of the table, by compute capability."""
    text = files("batchspec.conf").joinpath("tuned", "cards.json").read_text(encoding="utf-8")
    return tuple(_known(entry) for entry in json.loads(text)["cards"])


def _known(entry: dict[str, Any]) -> KnownCard:
    major, minor = entry["capability"]
    card = Card(
        name=entry["name"], capability=(major, minor), num_sms=entry["num_sms"],
        sm_shared_bytes=entry["sm_shared_kib"] << 10, l2_bytes=entry["l2_mib"] << 20,
        memory_bytes=round(entry["memory_gb"] * 1e9),
        bytes_s=entry["tb_s"] * 1e12, flop_s=entry["tflop_s"] * 1e12, fp8_flop_s=entry["fp8_tflop_s"] * 1e12,
    )
    return KnownCard(card=card, gpus=tuple(entry["gpus"]), rates=entry.get("rates"))
