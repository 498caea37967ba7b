"""Weight formats: what a file holds, how a projection is cut over ranks, which projection has which format."""

from __future__ import annotations

import pytest
import torch

from batchspec.errors import ConfigError
from batchspec.model.blocks.base import Projection
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.plain import PLAIN

PART = Projection("self_attn.q_proj", 12, 8, bias=True)


def test_a_plain_projection_is_a_weight_and_perhaps_a_bias() -> None:
    assert [(tensor.name, tensor.shape, tensor.role) for tensor in PLAIN.tensors(PART)] == [
        ("self_attn.q_proj.weight", (12, 8), "weight"),
        ("self_attn.q_proj.bias", (12,), "bias"),
    ]
    assert [tensor.name for tensor in PLAIN.tensors(Projection("mlp.down_proj", 4, 4))] == ["mlp.down_proj.weight"]
    assert PLAIN.nbytes(12, 8, torch.bfloat16) == 192


def test_ranks_hold_equal_parts_that_make_the_whole() -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(12, 8), torch.randn(12)
    tensors = {"self_attn.q_proj.weight": weight, "self_attn.q_proj.bias": bias}
    columns, rows = [], []
    for rank in range(4):
        own = {name: tensors[name][cut] for name, cut in PLAIN.shard(PART, "columns", rank, 4).items()}
        columns.append(x @ own["self_attn.q_proj.weight"].T + own["self_attn.q_proj.bias"])
        own = {name: tensors[name][cut] for name, cut in PLAIN.shard(PART, "rows", rank, 4).items()}
        rows.append(x[:, 2 * rank : 2 * rank + 2] @ own["self_attn.q_proj.weight"].T + own.get("self_attn.q_proj.bias", 0))
    whole = x @ weight.T + bias
    torch.testing.assert_close(torch.cat(columns, 1), whole)
    torch.testing.assert_close(sum(rows[1:], rows[0]), whole)


def test_a_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"self_attn\.q_proj: 12 cannot be cut into 5 equal parts; use fewer GPUs a model"):
        PLAIN.shard(PART, "columns", 0, 5)
    with pytest.raises(ConfigError, match=r"8 cannot be cut into 3 equal parts"):
        PLAIN.shard(PART, "rows", 0, 3)


def test_modules_that_are_stored_plain_are_found_by_whole_names() -> None:
    other = type("Other", (), {})()
    formats = Formats(other, ("lm_head", "model.layers.1.mlp", "k_proj"))
    assert formats.of("model.layers.0.self_attn.q_proj") is other
    assert formats.of("model.layers.1.mlp.up_proj") is PLAIN
    assert formats.of("model.layers.11.mlp.up_proj") is other
    assert formats.of("model.layers.0.self_attn.k_proj") is PLAIN
    assert Formats().of("model.layers.0.self_attn.q_proj") is PLAIN
