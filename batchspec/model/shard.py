"""Which part of each tensor of a checkpoint a rank holds (tensor parallelism).

    q, k, v, gate, up      by columns: whole heads, equal numbers of inner values
    o, down                by rows; only rank 0 adds the bias
    experts                each as an MLP, by its inner size
    qkv, gate_up           each of the projections that they hold
    lm_head                by vocabulary
    norms, router, embedding  whole on every rank

A rank has whole heads, as many as every other rank, and whole blocks of weights that share a scale: 32 in MXFP4, 128 x 128 in
FP8 (16 of an MLP's inner size where it has no blocks, as kernels read them), 16 in NVFP4, the groups of INT4, whose act-order
weights have words of 8 columns as blocks and all scales on every rank. If the blocks of an MLP's inner size cannot be divided
equally, the first ranks have one more (`Shard.of`).

If a product is cut by rows, FP8 activations with one scale per token (`token`) are quantised on each rank by the largest value of
its own part: as precise as with the largest value of all, but not the same numbers. With groups of 128 and static scales the
numbers are the same.

The blocks declare how their products are cut (`BlockSpec.shares`), the weight formats what that means for their tensors
(`WeightFormat.shard`). Source of the cuts: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

from batchspec.model.checkpoint_part import CheckpointPart
from batchspec.model.layers.base import Shard, Share, projections
from batchspec.model.quant.base import Slices
from batchspec.model.spec import ModelSpec


def part_of(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The shape of what one rank computes. A run, `plan` and `auto` all decide here whether a model can be cut.

    Raises ConfigError, on every rank, for a model that cannot be cut.
    """
    part = spec.sharded(shard)
    slices_of(part)
    return part


def slices_of(part: CheckpointPart) -> Slices | None:
    """For each tensor of the checkpoint, by name, the part that the rank of `part` holds; None if it is not cut.

    Raises ConfigError for a product that cannot be cut.
    """
    whole = part.complete
    if whole is part:
        return None
    found, formats = part.slices_beside_blocks(), whole.formats
    for prefix, block in whole.blocks():
        shares = block.shares(part.shard, formats.unit_of(block, prefix))
        own: Slices = {}
        for projection in projections(block):
            own |= formats.of(prefix + projection.name).shard(projection, shares[projection.name])
        for grouped in block.grouped:
            name = grouped.of(0).parts[0].name
            own |= formats.of(prefix + name).shard_grouped(grouped, shares[name])
        for vector in block.vectors:
            share = shares.get(vector.name.removesuffix(".weight"))
            own[vector.name] = () if share is None else tuple((cut,) for cut in share.ranges)
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
