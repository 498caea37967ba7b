"""Which part of each tensor of a checkpoint a rank holds (tensor parallelism).

    q, k, v, gate, up      by columns: whole heads, equal numbers of inner values
    o, down                by rows; only rank 0 adds the bias
    experts                each as an MLP, by its inner size
    qkv, gate_up           each of the projections that they hold
    lm_head                by vocabulary
    norms, router, embedding  whole on every rank

A rank has whole heads, as many as every other rank, and whole blocks of weights that share a scale (32 in MXFP4, 128 x 128 in
FP8). If the blocks of an MLP's inner size cannot be divided equally, the first ranks have one more (`Shard.of`).

If a product is cut by rows, FP8 activations with one scale per token (`token`) are quantised on each rank by the largest value of
its own part: as precise as with the largest value of all, but not the same numbers. With groups of 128 and static scales the
numbers are the same.

The blocks declare how their products are cut (`BlockSpec.shares`), the weight formats what that means for their tensors
(`WeightFormat.shard`). Source of the cuts: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

from batchspec.model.blocks.base import Shard, Share, projections
from batchspec.model.quant.base import Slices
from batchspec.model.spec import EMBEDDING, FINAL_NORM, OUTPUT, ModelSpec


def part_of(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The shape of what one rank computes. A run, `plan` and `auto` all decide here whether a model can be cut.

    Raises ConfigError, on every rank, for a model that cannot be cut.
    """
    part = spec.sharded(shard)
    slices_of(part)
    return part


def slices_of(spec: ModelSpec) -> Slices | None:
    """For each tensor of the checkpoint, by name, the part that the rank of `spec` holds; None for a whole model.

    Raises ConfigError for a product that cannot be cut.
    """
    whole = spec.whole
    if whole is None:
        return None
    found: Slices = {EMBEDDING: (), FINAL_NORM: ()}
    if not spec.tie:
        found[OUTPUT] = ((spec.vocab_part, slice(0, spec.hidden_size)),)
    for prefix, block in whole.blocks():
        formats = whole.formats
        shares = block.shares(spec.shard, formats.unit_of(block, prefix))
        own: Slices = {}
        for part in projections(block):
            own |= formats.of(prefix + part.name).shard(part, shares[part.name])
        for grouped in block.grouped:
            name = grouped.of(0).parts[0].name
            own |= formats.of(prefix + name).shard_grouped(grouped, shares[name])
        for vector in block.vectors:
            share = shares.get(vector.name.removesuffix(".weight"))
            own[vector.name] = () if share is None else tuple((part,) for part in share.ranges)
        found |= {prefix + name: pieces for name, pieces in own.items()}
    return found


def share_of(spec: ModelSpec, block: int, name: str) -> Share | None:
    """The part of one projection that the rank of `spec` holds; None for a whole model.

    block  index of its block in the model; name: relative to its layer
    """
    if spec.whole is None:
        return None
    prefix, own = list(spec.whole.blocks())[block]
    return own.shares(spec.shard, spec.whole.formats.unit_of(own, prefix))[name]
