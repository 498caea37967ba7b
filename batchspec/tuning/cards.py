"""Cards by name, for `--card NAME`: the table `conf/tuned/cards.json`, of the vendors' data sheets.

Rates are dense, with fp32 sums. Memory is what torch reports as total. A card may have the rates of the cost model as measured
(`packing.cost.Rates`); those of others are computed from bandwidth and arithmetic.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from batchspec.errors import ConfigError
from batchspec.kernels.common.card import Card

MAKER = ("nvidia", "geforce", "tesla", "gpu", "generation")
"""Words that a card's name may have or not."""
ALIKE = 0.5
"""Share of characters in common, from which on a card is suggested for an unknown name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCard:
    """An entry of the table."""

    card: Card
    gpus: tuple[str, ...]
    """What torch calls it."""
    rates: dict[str, Any] | None
    """The measured rates, as arguments of `Rates` but its name; None: not measured."""
    also: tuple[str, ...] = ()
    """What else people call it."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.card.name, *self.gpus, *self.also)


def known_card(name: str) -> KnownCard:
    """The card of this name, as people or NVIDIA write it: rtx4090, H100 PCIe, NVIDIA A100-SXM4-80GB.

    Raises ConfigError for a name that several cards share, with these, and for one that none has, with the nearest and all.
    """
    if (known := entry_of(name)) is not None:
        return known
    words = _words(name)
    named = [known for known in known_cards() if any({*words} <= {*_words(each)} for each in known.names)] if words else []
    if len(named) == 1:
        return named[0]
    if named:
        which = " or ".join(f"{known.card.name} ({known.card.memory_bytes / 1e9:.0f} GB)" for known in named)
        raise ConfigError(f"--card {name} may be {which}; write the one that you mean, as in --card {named[0].card.name}")
    raise ConfigError(
        f"--card {name} is not known;{_nearest(words)} all: "
        + ", ".join(known.card.name for known in known_cards())
    )


def _nearest(words: Iterable[str]) -> str:
    """The card of the table whose name is most like these words, for a message; empty if none is."""
    joined = "".join(words)
    like = {
        known.card.name: max(difflib.SequenceMatcher(None, joined, "".join(_words(each))).ratio() for each in known.names)
        for known in known_cards()
    }
    nearest = max(like, key=like.__getitem__)
    return f" nearest is {nearest};" if like[nearest] >= ALIKE else ""


def _words(name: str) -> list[str]:
    """The words of a card's name in lower case that tell it from other cards: RTX 4090 and rtx4090 have the same."""
    spaced = re.sub(r"(rtx|\bpro(?=\d))", r"\1 ", name.lower())
    together = re.sub(r"(\d)[\s_-]*gb?\b", r"\1gb", spaced)
    return [word for word in re.split(r"[^a-z0-9]+", together) if word and word not in MAKER]


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
    """The entry of a card by its full name, as torch or the table has it; None: it has none."""
    joined = "".join(_words(gpu))
    return next((known for known in known_cards() if any(joined == "".join(_words(each)) for each in known.names)), None)


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
    return KnownCard(card=card, gpus=tuple(entry["gpus"]), also=tuple(entry.get("also", ())), rates=entry.get("rates"))
