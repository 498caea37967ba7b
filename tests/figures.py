"""What cost model and planner compute of every shape that has a name, one line a figure: compare two commits by

    python -m tests.figures >before.txt

Figures are written by `repr`, so that a change of the order of sums, or of the type of a number, shows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product

import torch

from batchspec.errors import BatchspecError
from batchspec.model.families.shapes import SHAPES, shape_spec
from batchspec.model.layers.base import Shard
from batchspec.model.spec import ModelSpec
from batchspec.packing.cost import prefill_seconds, read_bytes, round_seconds
from batchspec.packing.exchange import exchange_seconds
from batchspec.packing.kv_memory import KVMemory
from batchspec.packing.rates import Rates, card_rates
from batchspec.tuning.cards import known_card

DTYPE = torch.bfloat16
CARDS = ("H200", "L40S")
LENGTHS = (100, 1000, 30000)


def variants(name: str) -> Iterator[tuple[str, ModelSpec]]:
    """The model as it is, and as jobs change it."""
    spec = shape_spec(name)
    yield name, spec
    changes: dict[str, Callable[[], ModelSpec]] = {
        "e4m3 K/V": spec.with_fp8_kv, "bf16 states": lambda: spec.with_state_dtype(DTYPE),
        "rank 1 of 2": lambda: spec.sharded(Shard(1, 2)),
    }
    for change, changed in changes.items():
        try:
            yield f"{name}, {change}", changed()
        except BatchspecError as error:
            print(f"{name}, {change}: {error}")


def memory(spec: ModelSpec) -> Iterator[tuple[str, object]]:
    for max_len, draft_len in product(LENGTHS, (0, 4)):
        kept = KVMemory.of(
            spec, DTYPE, (), page_size=16, max_len=max_len, max_tokens=max_len, lookahead=2 * draft_len + 2, pass_tokens=8192,
            num_verified=draft_len,
        )
        where = f"memory of {max_len} tokens, K = {draft_len}"
        yield from ((f"{where}: {field.name}", getattr(kept, field.name)) for field in fields(kept))
        yield f"{where}: rows", kept.rows(20 << 30, max_len)
        yield f"{where}: pages", kept.num_pages(20 << 30, 64)
    for max_q in (1, 5):
        cost = spec.sharing_cost(DTYPE, page_size=16, max_q=max_q)
        yield f"sharing of {max_q} queries", (cost.page_bytes, cost.row_bytes, cost.reads_all, cost.may_pay(64, 32))


def times(spec: ModelSpec, rates: Rates) -> Iterator[tuple[str, object]]:
    for rows, context, tokens in product((1, 64, 500), LENGTHS, (1, 5)):
        seconds = round_seconds(spec, rates, dtype=DTYPE, rows=rows, context_tokens=context, tokens_per_row=tokens)
        yield f"round of {rows} rows, {context} tokens, {tokens} each", seconds
    for prompt, scores in product(LENGTHS, (False, True)):
        seconds = prefill_seconds(spec, rates, dtype=DTYPE, prompt_tokens=prompt, pass_tokens=8192, scores=scores)
        yield f"prefill of {prompt} tokens, scores {scores}", seconds
    for tokens in (1, 64, 8192):
        yield f"bytes read by {tokens} tokens", read_bytes(spec, DTYPE, tokens)
        yield f"exchanges of {tokens} tokens", exchange_seconds(spec, DTYPE, tokens)


def main() -> None:
    for name in SHAPES:
        for variant, spec in variants(name):
            for what, value in memory(spec):
                print(f"{variant}: {what}: {value!r}")
            for card in CARDS:
                for what, value in times(spec, card_rates(known_card(card))):
                    print(f"{variant}, {card}: {what}: {value!r}")


if __name__ == "__main__":
    main()
