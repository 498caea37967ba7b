"""The decoder layer, written once: what products are given, and when a block leaves its sum to the next norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.layers.forward import Product
from batchspec.model.lora_products import DummyAdapters, LoraStacks
from batchspec.model.lora_shape import LoraShape
from batchspec.model.quant.plain import Linear, Plain
from batchspec.model.target import Target
from tests.distributed.test_tensor_parallel import batch_of
from tests.helpers.engines import VOCAB, tiny_target
from tests.kernels.lora_cases import list_of
from tests.model.test_target import Runner, prompts


class Watched(Linear):
    """A plain product that records each adapter's tokens, and norms its input and adds to the stream itself if it is asked to."""

    seen: list[list[tuple[int, list[int]]]]
    fused: list[str]
    fuses = False

    def __call__(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        if lora is not None:
            assert lora.order.shape == x.shape[:1]
            self.seen.append(list_of(lora))
        return super().__call__(x, lora)

    def swiglu(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        return Product.swiglu(self, x, lora)

    def norms_input(self, x: Tensor, *, gated: bool) -> bool:
        return self.fuses

    def of_norm(self, x: Tensor, norm: Tensor, eps: float, lora: LoraTokens | None = None) -> Any:
        self.fused.append("of_norm")
        return Product.of_norm(self, x, norm, eps, lora)

    def swiglu_of_norm(self, x: Tensor, norm: Tensor, eps: float, lora: LoraTokens | None = None) -> Tensor:
        self.fused.append("swiglu_of_norm")
        return Product.swiglu_of_norm(self, x, norm, eps, lora)

    def add_to(self, residual: Tensor, x: Tensor, lora: LoraTokens | None = None) -> Tensor | None:
        self.fused.append("add_to")
        residual.add_(self(x, lora))
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


def adapted_target() -> Target:
    """With three adapters, large enough to show."""
    spec = tiny_target().spec
    adapters = DummyAdapters.of(spec, 3, 4)
    target = Target.load(
        Path(), spec.with_lora(adapters.shape), dtype=torch.float64, device=torch.device("cpu"), dummy=True, adapters=adapters
    )
    assert target._lora is not None
    for weights in target._lora._weights.values():
        weights.b.mul_(20)
    return target


@pytest.mark.parametrize("ends_only", [False, True])
def test_every_product_is_given_the_adapter_of_each_token(ends_only: bool, watched: type[Watched]) -> None:
    """Of all tokens, or after the last layer's K and V of the last token of each row."""
    Runner.start(adapted_target(), 4).feed(prompts([4, 1, 2, 1], VOCAB), ends_only=ends_only, adapters=[3, 1, 0, 3])
    every, ends = [(0, [4]), (2, [0, 1, 2, 3, 7])], [(0, [1]), (2, [0, 3])]
    assert watched.seen == [*([every] * 4), every, *([ends if ends_only else every] * 3)]  # q k v, output, gate up, down


def test_an_adapter_is_added_to_the_stream_where_its_base_product_was(watched: type[Watched]) -> None:
    """And no product that norms its input, or gates its output, leaves the adapter out."""
    ids, own = prompts([4, 1, 2], VOCAB), [3, 0, 1]
    expected, _ = Runner.start(adapted_target(), 3).feed(ids, adapters=own)
    without, _ = Runner.start(adapted_target(), 3).feed(ids, adapters=[0, 0, 0])
    assert float((expected[0] - without[0]).abs().max()) > 1e-3
    watched.fused.clear()
    watched.fuses = True
    found, _ = Runner.start(adapted_target(), 3).feed(ids, adapters=own)
    for row, other in zip(found, expected, strict=True):
        torch.testing.assert_close(row, other, atol=1e-12, rtol=0)
    product = adapted_target()._layers[0].attention._out
    x, residual = torch.randn(3, 16, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
    tokens = LoraStacks(LoraShape(3, ()), {}).tokens(torch.tensor([2, 0, 3], dtype=torch.int32))
    added = residual.clone()
    assert product.add_to(added, x, tokens) is None
    torch.testing.assert_close(added, residual + product(x, tokens), atol=1e-12, rtol=0)


def test_tokens_of_dead_rows_go_through_no_adapter_unless_their_rounds_are_timed() -> None:
    target, batch = adapted_target(), batch_of([[3, 9, 1], [5], [8, 2]], 40)
    batch.row_adapters = torch.tensor([2, 3, 1], dtype=torch.int32)
    batch.slot_mapping[:3] = 0
    found = target._lora_tokens(batch)
    assert found is not None
    assert list_of(found) == [(0, [4, 5]), (2, [3])]
    with target.dead_tokens_routed():
        timed = target._lora_tokens(batch)
    assert timed is not None
    assert list_of(timed) == [(0, [4, 5]), (1, [0, 1, 2]), (2, [3])]


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
