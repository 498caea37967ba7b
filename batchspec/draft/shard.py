"""Tensor parallelism of an EAGLE-3 head: which part of it each rank holds.

Layers are cut as the target's are (`batchspec.model.shard`), and the head's own lm_head, if it has one, by its draft vocabulary.
fc, norms, embedding and vocabulary table are whole on every rank. K/V pages hold the K/V heads of the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from batchspec.draft.formats import HeadSpec
from batchspec.draft.head import Head
from batchspec.draft.head_tensors import head_layers, head_prefix
from batchspec.errors import ConfigError
from batchspec.model.layers.base import Shard, projections
from batchspec.model.quant.base import Slices
from batchspec.model.quant.plain import PLAIN
from batchspec.model.weights import taken

EXCHANGE_WEIGHTS = 25_000_000
"""Number of 2-byte weights that a GPU reads, at 4.3 TB/s, in the 12 us of one exchange (of 2 MB on two H200, 512 KB on four:
table of `tuning/exchange.py`)."""


def part_of_head(spec: HeadSpec, shard: Shard, asked: bool | None = None) -> HeadSpec:
    """The part of a head that the rank of `shard` computes; the whole head if every rank computes all of it.

    asked  ablation.sharded_draft: cut it or not; None: cut it if a draft step saves more time on weights than its exchanges take
    Raises ConfigError for a head that is to be cut but cannot be.
    """
    if shard.ranks == 1 or asked is False or (asked is None and not _pays(spec, shard)):
        return spec
    try:
        layers = [layer.attention.sharded(shard, 1) for layer in head_layers(spec)]
        inner = head_layers(spec)[0].mlp.sharded(shard, 1).inner_size
    except ConfigError as error:
        if asked is None:
            return spec
        raise ConfigError(f"ablation.sharded_draft=true: of the draft head, {error}") from None
    first = layers[0]
    return replace(
        spec, num_heads=first.num_heads, num_kv_heads=first.num_kv_heads, intermediate_size=inner, shard=shard, whole=spec
    )


def _pays(spec: HeadSpec, shard: Shard) -> bool:
    layers = sum(product.rows * product.k for layer in head_layers(spec) for block in layer.blocks for product in block.products)
    output = spec.draft_vocab_size * spec.hidden_size if spec.own_head else 0
    exchanges = 2 * spec.num_layers + (1 if spec.own_head else 0)
    return (layers + output) * (shard.ranks - 1) / shard.ranks > exchanges * EXCHANGE_WEIGHTS


def cut(head: Head, part: HeadSpec) -> Head:
    """The tensors of one rank (`part`), copied from those of a whole head."""
    assert part.whole == head.spec, part
    tensors = dict(head.tensors)
    for name, pieces in _slices(part):
        tensors[name] = taken(head.tensors[name], pieces).clone() if pieces else torch.zeros_like(head.tensors[name])
    return Head(part, tensors, head.map_ids)


def _slices(part: HeadSpec) -> Iterator[tuple[str, tuple[tuple[slice, ...], ...]]]:
    """The name and the slices of each tensor that is cut; no slices: a bias that another rank adds, 0 on this one."""
    assert part.whole is not None
    for index, layer in enumerate(head_layers(part.whole)):
        for block in layer.blocks:
            shares = block.shares(part.shard, 1)
            for projection in projections(block):
                own: Slices = PLAIN.shard(projection, shares[projection.name])
                names = [f"{projection.name}.weight", *([f"{projection.name}.bias"] if projection.bias else [])]
                yield from ((head_prefix(index) + name, own.get(name, ())) for name in names)
    if part.own_head:
        yield "lm_head.weight", ((part.draft_part,),)
