"""The decoder layer, written once: what products are given, and when a block leaves its sum to the next norm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.draft import head as head_module
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.model.blocks.forward import Product
from batchspec.model.quant.plain import Linear, Plain
from batchspec.model.target import Target
from tests.drafting import TARGET, mixed_requests, run
from tests.engines import VOCAB, packed, tiny_target
from tests.replaying import head
from tests.test_target import Runner, prompts


class Watched(Linear):
    """A plain product that notes each token's row, and norms its input and adds to the stream itself where it is told to."""

    seen: list[Tensor]
    fused: list[str]
    fuses = False

    def __call__(self, x: Tensor, row_ids: Tensor | None = None) -> Tensor:
        if row_ids is not None:
            assert row_ids.shape == x.shape[:1]
            self.seen.append(row_ids.clone())
        return super().__call__(x, row_ids)

    def swiglu(self, x: Tensor, row_ids: Tensor | None = None) -> Tensor:
        return Product.swiglu(self, x, row_ids)

    def norms_input(self, x: Tensor, *, gated: bool) -> bool:
        return self.fuses

    def of_norm(self, x: Tensor, norm: Tensor, eps: float, row_ids: Tensor | None = None) -> Any:
        self.fused.append("of_norm")
        return Product.of_norm(self, x, norm, eps, row_ids)

    def swiglu_of_norm(self, x: Tensor, norm: Tensor, eps: float, row_ids: Tensor | None = None) -> Tensor:
        self.fused.append("swiglu_of_norm")
        return Product.swiglu_of_norm(self, x, norm, eps, row_ids)

    def add_to(self, residual: Tensor, x: Tensor, row_ids: Tensor | None = None) -> Tensor | None:
        self.fused.append("add_to")
        residual.add_(self(x, row_ids))
        return None


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    Watched.seen, Watched.fused = [], []
    monkeypatch.setattr(Watched, "fuses", False)

    def load(self: Plain, weights: Any, names: list[str], *, bias: bool) -> Product:
        parts = {kind: torch.cat([weights.tensor(f"{name}.{kind}") for name in names]) for kind in ("weight", "bias")[: 1 + bias]}
        return Watched(parts["weight"], parts.get("bias"))

    monkeypatch.setattr(Plain, "load", load)
    return Watched


def fresh_target() -> Target:
    made = tiny_target()
    return Target.load(Path(), made.spec, dtype=made.dtype, device=made.device, dummy=True)


@pytest.mark.parametrize("ends_only", [False, True])
def test_every_product_is_given_each_tokens_row(ends_only: bool, watched: type[Watched]) -> None:
    target = fresh_target()
    Runner.start(target, 3).feed(prompts([4, 1, 2], VOCAB), ends_only=ends_only)
    rows, ends = [0, 0, 0, 0, 1, 2, 2], [0, 1, 2]
    last = [rows, *([ends if ends_only else rows] * 3)]
    assert [seen.tolist() for seen in watched.seen] == [*([rows] * 4), *last]  # q k v, output, gate up, down of two layers


HEADS: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: ChainDrafter(head(), TARGET(), 3, slots=4),
    "chain, nothing pruned": lambda: ChainDrafter(head(), TARGET(), 3, slots=4, uniform_slots=False, dead_positions=False),
    "parallel": lambda: ParallelDrafter(head(), TARGET(), 3, slots=4),
    "tree": lambda: TreeDrafter(head(), TARGET(), TreeShape(topk=2, depth=3, nodes=7), slots=4),
}


@pytest.mark.parametrize("name", HEADS)
def test_every_product_of_a_draft_head_is_given_each_tokens_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all positions, or of the one position a row that goes on; only the output matrix is given none, as the target's."""
    expected: list[list[int]] = []  # none while the head is built: the features of a mask are of no row
    made, called = list[Linear](), set[Linear]()

    class Noting(Linear):
        def __init__(self, *weights: Any) -> None:
            super().__init__(*weights)
            made.append(self)

        def __call__(self, x: Tensor, row_ids: Tensor | None = None) -> Tensor:
            called.add(self)
            if expected and self is not drafter.head._scores:  # type: ignore[attr-defined]
                assert row_ids is not None
                assert row_ids.dtype == torch.int32
                assert row_ids.tolist() in expected
            return super().__call__(x, row_ids)

        def swiglu(self, x: Tensor, row_ids: Tensor | None = None) -> Tensor:
            return Product.swiglu(self, x, row_ids)

    def during(name: str, rows_of: Callable[..., list[list[int]]]) -> None:
        call = getattr(drafter, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            expected[:] = rows_of(*args)
            return call(*args, **options)

        monkeypatch.setattr(drafter, name, wrapped)

    monkeypatch.setattr(head_module, "Linear", Noting)
    drafter = HEADS[name]()
    during("prefill", lambda batch, slot_ids, *_: [batch.row_ids.tolist(), [*range(len(slot_ids))]])
    during("catch_up", lambda batch, _, accepted_len, *rest: [batch.row_ids.tolist(), [*range(len(accepted_len))]])
    a_row = {"tree": 2, "parallel": 3}.get(name, 1)
    during("propose", lambda rows, *_: [[row for row in range(len(rows.live)) for _ in range(a_row)]])
    run(mixed_requests(), packed(4, draft_len=drafter.max_len), drafter)
    unused = [drafter.head._layers[0].kv] if name == "chain, nothing pruned" else []  # type: ignore[attr-defined]
    assert [product for product in made if product not in called] == unused


def test_a_block_adds_in_its_product_only_where_the_next_one_norms_the_stream_itself(watched: type[Watched]) -> None:
    ids = prompts([4, 1, 2], VOCAB)
    plain, _ = Runner.start(fresh_target(), 3).feed(ids, (0, 1, 2))
    assert watched.fused == ["of_norm"]  # nothing is left to be added before the first norm
    watched.fused.clear()
    watched.fuses = True
    fused, _ = Runner.start(fresh_target(), 3).feed(ids, (0, 1, 2))
    assert watched.fused == ["of_norm", "add_to", "swiglu_of_norm", "add_to"] * 2
    for row, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(row, expected, atol=1e-12, rtol=0)
