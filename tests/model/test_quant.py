"""Weight formats: what a file holds, how a projection is cut over ranks, which projection has which format."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.checkpoint.wrapped import names_in_files
from batchspec.errors import ConfigError
from batchspec.kernels.moe.route import lists_reference
from batchspec.model.layers.base import GroupedSpec, Projection, Shard, Share
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.module_names import begins_with, is_in
from batchspec.model.quant.plain import PLAIN
from batchspec.model.weights import taken

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
        share = Share("columns", (slice(3 * rank, 3 * rank + 3),))
        own = {name: taken(tensors[name], cut) for name, cut in PLAIN.shard(PART, share).items()}
        columns.append(x @ own["self_attn.q_proj.weight"].T + own["self_attn.q_proj.bias"])
        share = Share("rows", (slice(2 * rank, 2 * rank + 2),), adds_bias=rank == 0)
        own = {name: taken(tensors[name], cut) for name, cut in PLAIN.shard(PART, share).items()}
        rows.append(x[:, 2 * rank : 2 * rank + 2] @ own["self_attn.q_proj.weight"].T + own.get("self_attn.q_proj.bias", 0))
    whole = x @ weight.T + bias
    torch.testing.assert_close(torch.cat(columns, 1), whole)
    torch.testing.assert_close(sum(rows[1:], rows[0]), whole)


@given(st.integers(1, 400), st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 4, 32, 128]))
def test_parts_are_whole_units_that_make_the_whole_and_the_first_are_the_largest(size: int, ranks: int, unit: int) -> None:
    """Or the size is refused, on every rank."""
    try:
        parts = [Shard(rank, ranks).of("size", size, unit) for rank in range(ranks)]
    except ConfigError:
        for rank in range(ranks):
            with pytest.raises(ConfigError, match=rf"^size {size} cannot be cut into {ranks} (equal )?parts"):
                Shard(rank, ranks).of("size", size, unit)
        assert -(-size // unit) < ranks or (unit == 1 and size % ranks)
        return
    assert [i for part in parts for i in range(size)[part]] == list(range(size))
    assert all(part.start % unit == 0 for part in parts)
    lengths = [part.stop - part.start for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    units = [-(-length // unit) for length in lengths]
    assert 0 < units[-1] >= units[0] - 1


def test_modules_that_are_stored_plain_are_found_by_whole_names() -> None:
    other = type("Other", (), {})()
    formats = Formats(other, ("lm_head", "model.layers.1.mlp", "k_proj"))
    assert formats.of("model.layers.0.self_attn.q_proj") is other
    assert formats.of("model.layers.1.mlp.up_proj") is PLAIN
    assert formats.of("model.layers.11.mlp.up_proj") is other
    assert formats.of("model.layers.0.self_attn.k_proj") is PLAIN
    assert Formats().of("model.layers.0.self_attn.q_proj") is PLAIN


PARTS = ("model", "layers", "0", "1", "11", "mlp", "gate", "gate_proj", "experts", "language_model")
MODULES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(".".join)
EXPRESSIONS = st.sampled_from([
    r"model\.layers", r".*gate$", r".*\.(gate|mlp)$", r"(?i)MODEL", r"(?P<a>model).*", r"(?P<a>gate)", r"a|gate",
    r"(?s:.*mlp)\Z", r"model\.language_model\.layers\.1\.", "", r"(?!.*gate)",
])


@given(st.lists(MODULES, max_size=4), st.lists(EXPRESSIONS, max_size=6, unique=True), MODULES)
def test_many_names_and_expressions_are_tried_as_one_by_one(modules: list[str], patterns: list[str], name: str) -> None:
    assert is_in(tuple(modules), name) == any(f".{module}." in f".{name}." for module in modules)
    expected = any(re.match(pattern, other) for pattern in patterns for other in (
        names_in_files(name) if "language" in pattern else [name]
    ))
    assert begins_with(tuple(patterns), name) == expected


def test_the_experts_of_a_file_that_names_each_lie_in_one_allocation_and_are_cut_as_projections() -> None:
    spec = GroupedSpec(name="experts", parts=("w1", "w3"), num_experts=3, part_rows=4, k=6)
    stored = {tensor.name: torch.randn(tensor.shape) for tensor in PLAIN.grouped_tensors(spec)}
    assert list(stored)[:3] == ["experts.0.w1.weight", "experts.0.w3.weight", "experts.1.w1.weight"]
    loaded = PLAIN.load_grouped(Stored(stored), spec)
    x, ids = torch.randn(5, 6), torch.tensor([[2, 0], [0, 1], [1, 0], [0, 2], [2, 1]])
    routing = lists_reference(ids, torch.ones(5, 2), 3, 16)
    found = loaded.up(x, routing, "silu", quantise=False)
    assert isinstance(found, torch.Tensor)
    gate, up = (torch.stack([stored[f"experts.{e}.{part}.weight"] for e in range(3)]) for part in ("w1", "w3"))
    rows = x.repeat_interleave(2, 0).unsqueeze(2)
    expected = torch.nn.functional.silu(gate[ids.flatten()] @ rows) * (up[ids.flatten()] @ rows)
    torch.testing.assert_close(found, expected.squeeze(2)[routing.pairs.long()])
    cuts = PLAIN.shard_grouped(spec, Share("columns", (slice(2, 4),)))
    assert cuts.keys() == stored.keys()
    assert cuts["experts.2.w3.weight"] == ((slice(2, 4), slice(0, 6)),)


class Stored:
    """Tensors by name."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self.dtype)

    def stored(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def entry(self, name: str, index: int) -> torch.Tensor:
        return self._tensors[name][index]
