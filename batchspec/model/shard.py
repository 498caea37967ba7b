"""Which part of each tensor of a checkpoint a rank holds (tensor parallelism).

    q, k, v, gate, up      by columns: whole heads, equal numbers of inner values
    o, down                by rows; rank 0 alone adds the bias
    experts                each of them as an MLP, by its inner size, in whole blocks of its weight format
    lm_head                by vocabulary
    norms, router, embedding  whole

FP8 activations with one scale per token (`token`) are quantised on each rank by the largest value of its own part, where a
product is cut by rows: as precise as with the largest of all, but not the same numbers. With groups of 128 and static scales they
are the same.

The blocks say how their products are cut (`BlockSpec.shares`), the weight formats what that means for their tensors
(`WeightFormat.shard`). Source of the cuts: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

from batchspec.model.blocks.base import projections
from batchspec.model.quant.base import Slices
from batchspec.model.spec import EMBEDDING, FINAL_NORM, OUTPUT, ModelSpec


def slices_of(spec: ModelSpec) -> Slices | None:
    """By the name of each tensor of the checkpoint, what the rank of `spec` holds; None for a whole model.

    Raises ConfigError for a product that cannot be cut.
    """
    whole = spec.whole
    if whole is None:
        return None
    found: Slices = {EMBEDDING: (), FINAL_NORM: ()}
    if not spec.tie:
        found[OUTPUT] = (spec.vocab_part, slice(0, spec.hidden_size))
    for prefix, block in whole.blocks():
        shares, formats = block.shares(spec.shard), whole.formats
        for part in projections(block):
            cut, shard = shares[part.name]
            own = formats.of(prefix + part.name).shard(part, cut, shard.rank, shard.ranks)
            found |= {prefix + name: slices for name, slices in own.items()}
        for grouped in block.grouped:
            name = grouped.of(0).parts[0].name
            cut, shard = shares[name]
            own = formats.of(prefix + name).shard_grouped(grouped, cut, shard.rank, shard.ranks)
            found |= {prefix + name: slices for name, slices in own.items()}
        for vector in block.vectors:
            found[prefix + vector.name] = ()
            if (share := shares.get(vector.name.removesuffix(".weight"))) is not None:
                size = share.shard.of(vector.name, vector.shape[0])
                found[prefix + vector.name] = (slice(share.shard.rank * size, (share.shard.rank + 1) * size),)
    return found
