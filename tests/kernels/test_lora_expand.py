"""B of each token's own adapter, scaled, is added to its row of the base product; other rows and parts keep their bits."""

from __future__ import annotations

import pytest
import torch

from batchspec.kernels.lora.lora_expand import lora_expand
from batchspec.kernels.lora.lora_shrink import lora_shrink
from batchspec.kernels.lora.lora_tokens import lora_tokens
from tests.kernels.lora_cases import SPREADS, adapters_of
from tests.kernels.moe_cases import assert_near, noise

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("spread", "part_rows", "rank", "splits", "block"),
    [
        ("mixed", (200, 72, 40), 16, 4, 16),
        ("mixed", (130, 130), 32, 2, 64),
        ("one adapter", (300,), 64, 1, 64),
        ("none has one", (64, 16, 16), 16, 1, 16),
    ],
)
def test_the_pair_adds_the_product_of_each_tokens_adapter(
    spread: str, part_rows: tuple[int, ...], rank: int, splits: int, block: int, dtype: torch.dtype, interpret: bool,
    device: torch.device,
) -> None:
    num_tokens, num_adapters, k, rows = 37, 3, 300, sum(part_rows)
    adapters = adapters_of(num_tokens, num_adapters, spread, device)
    tokens = lora_tokens(adapters, num_adapters, block)
    x = noise(num_tokens, k, dtype=dtype, device=device)
    a = noise(num_adapters, len(part_rows), rank, k, dtype=dtype, device=device, scale=k**-0.5)
    b = noise(num_adapters, rows, rank, dtype=dtype, device=device, scale=rank**-0.5)
    scales = torch.tensor([[2.0, 0.5, 1.25], [1.0, 1.0, 1.0], [0.0, 3.0, 1.0]], device=device)[:, : len(part_rows)].contiguous()
    base = noise(num_tokens, rows + 8, dtype=dtype, device=device)
    wide = base.clone()
    out = wide[:, 8:]
    h = lora_shrink(x, a, scales, tokens, splits=splits, interpret=interpret)
    lora_expand(h, b, scales, tokens, part_rows=part_rows, out=out, interpret=interpret)
    assert torch.equal(wide[:, :8], base[:, :8])
    for token in range(num_tokens):
        adapter, begin = int(adapters[token]), 8
        for part, own in enumerate(part_rows):
            found, before = wide[token, begin : begin + own], base[token, begin : begin + own]
            if adapter and float(scales[adapter - 1, part]):
                inner = (a[adapter - 1, part].double() @ x[token].double()).to(dtype).double()
                added = b[adapter - 1, begin - 8 : begin - 8 + own].double() @ inner * float(scales[adapter - 1, part])
                assert_near(found, before.double() + added, tolerance=TOLERANCE[dtype])
                assert not torch.equal(found, before)
            else:
                assert torch.equal(found, before)
            begin += own


def test_what_padding_and_tokens_without_an_adapter_left_undefined_reaches_no_row(interpret: bool, device: torch.device) -> None:
    adapters = adapters_of(21, 3, SPREADS[0], device)
    tokens = lora_tokens(adapters, 3, 16)
    h = torch.full((2, 21, 2, 16), torch.nan, device=device)
    with_adapter = [place for place, token in enumerate(tokens.order.tolist()) if int(adapters[token])]
    h[:, with_adapter] = 1.0
    out, b = torch.zeros(21, 60, device=device), torch.ones(3, 60, 16, device=device)
    lora_expand(h, b, torch.ones(3, 2, device=device), tokens, part_rows=(36, 24), out=out, interpret=interpret)
    assert torch.equal(out, torch.where(adapters[:, None] > 0, 32.0, 0.0).expand(21, 60))


def test_a_damaged_adapter_reaches_its_own_tokens_alone(interpret: bool, device: torch.device) -> None:
    adapters = adapters_of(21, 3, SPREADS[0], device)
    tokens = lora_tokens(adapters, 3, 16)
    x, a = noise(21, 64, dtype=torch.float32, device=device), noise(3, 1, 16, 64, dtype=torch.float32, device=device)
    b, out, scales = torch.ones(3, 24, 16, device=device), torch.zeros(21, 24, device=device), torch.ones(3, 1, device=device)
    a[2, 0, 5, 7] = torch.nan
    h = lora_shrink(x, a, scales, tokens, interpret=interpret)
    lora_expand(h, b, scales, tokens, part_rows=(24,), out=out, interpret=interpret)
    assert torch.equal(out.isnan().any(1), adapters == 3)


def test_no_tokens_is_no_work(interpret: bool, device: torch.device) -> None:
    tokens = lora_tokens(torch.zeros(0, dtype=torch.int32, device=device), 2)
    h, b, out = (torch.zeros(shape, device=device) for shape in ((1, 0, 1, 16), (2, 8, 16), (0, 8)))
    lora_expand(h, b, torch.ones(2, 1, device=device), tokens, part_rows=(8,), out=out, interpret=interpret)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    tokens = lora_tokens(torch.ones(4, dtype=torch.int32, device=device), 2)
    h, b, out = (torch.zeros(shape, device=device) for shape in ((1, 4, 1, 16), (2, 8, 16), (4, 8)))
    scales = torch.ones(2, 1, device=device)
    with pytest.raises(ValueError, match=r"1 parts of \[7\] rows, b of 8"):
        lora_expand(h, b, scales, tokens, part_rows=(7,), out=out, interpret=True)
    with pytest.raises(ValueError, match="lora_expand: b is float32"):
        lora_expand(h, b, scales, tokens, part_rows=(8,), out=out.bfloat16(), interpret=True)
    with pytest.raises(ValueError, match="lora_expand: h is float64"):
        lora_expand(h.double(), b, scales, tokens, part_rows=(8,), out=out, interpret=True)
