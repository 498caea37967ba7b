"""The layer with which a checkpoint predicts one token further (multi-token prediction, MTP): a draft head of the model's own.

    position p of a row  e = embed(token[p+1]),  h = the target's hidden state at p, after its final norm
    input of the layer   x = fc(cat(norm(e), norm(h)))
    layer                a decoder layer that attends, on x, with K/V or a latent of its own at position p
    output               norm(x);  the target's output matrix times it gives the logits of token p+2

Source: DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437), section 2.2; transformers, modeling_layers.MtpLayer; names of
Qwen3-Next and Qwen3.5: vLLM, model_executor/models/qwen3_next_mtp.py and qwen3_5_mtp.py; of GLM-4.5: glm4_moe_mtp.py; of
DeepSeek-V3: deepseek_mtp.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from batchspec.checkpoint.wrapped import plain_name
from batchspec.model.checkpoint_part import CheckpointPart, Item, block_tensors
from batchspec.model.layers.base import (
    PLAIN_NORM,
    WHOLE,
    BlockSpec,
    NormForm,
    ProductSpec,
    Projection,
    Shard,
    TensorSpec,
    WholeBlockSpec,
)
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.quant.base import Slices
from batchspec.model.quant.formats import ALL_PLAIN, Formats


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSpec(WholeBlockSpec):
    """The block before the layer, which joins embedding and hidden state, and the norm after the layer. Every rank has all of
    it."""

    hidden_size: int
    eps: float
    norms: NormForm = PLAIN_NORM
    fc: str = "fc"
    embedding_norm: str = "pre_fc_norm_embedding"
    hidden_norm: str = "pre_fc_norm_hidden"
    out_norm: str = "norm"

    @property
    def product(self) -> ProductSpec:
        """The normed embedding and the normed hidden state, one after the other -> the input of the layer."""
        return ProductSpec((Projection(self.fc, self.hidden_size, 2 * self.hidden_size),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return (self.product,)

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        names = (self.embedding_norm, self.hidden_norm, self.out_norm)
        return tuple(self.norms.tensor(name, self.hidden_size) for name in names)

    @property
    def inner_size(self) -> int:
        return 2 * self.hidden_size

    @property
    def activation_size(self) -> int:
        return 3 * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec(CheckpointPart):
    """The shape of an MTP layer and of what joins its inputs."""

    join: JoinSpec
    layer: LayerSpec
    prefix: str = "mtp."
    """What the plain names of all of its tensors in the file begin with."""
    layer_prefix: str = "mtp.layers.0."
    copies_of_model: tuple[str, ...] = ()
    """Modules under `prefix` that are copies of the model's embedding and output matrix. They are not read."""
    formats: Formats = ALL_PLAIN
    shard: Shard = WHOLE
    whole: MtpSpec | None = None
    """The complete layer if this is one rank's part of it; None: this is the complete layer."""

    @property
    def complete(self) -> MtpSpec:
        return self.whole or self

    def blocks(self) -> Iterator[tuple[str, BlockSpec]]:
        yield self.prefix, self.join
        for block in self.layer.blocks:
            yield self.layer_prefix, block

    def tensors(self) -> Iterator[TensorSpec]:
        for prefix, block in self.blocks():
            yield from block_tensors(block, prefix, self.formats)

    def slices_beside_blocks(self) -> Slices:
        return {}

    def own(self, where: str, items: Mapping[str, Item]) -> dict[str, Item]:
        copies = tuple(f"{self.prefix}{module}." for module in self.copies_of_model)
        plain = {plain_name(name): item for name, item in items.items()}
        return {name: item for name, item in plain.items() if self.has(name) and not name.startswith(copies)}

    def has(self, name: str) -> bool:
        """Whether a tensor of this plain name belongs to the layer, or to `copies_of_model`."""
        return name.startswith(self.prefix)

    def sharded(self, shard: Shard) -> MtpSpec:
        """The shape of what one rank computes. Raises ConfigError for sizes that cannot be cut."""
        assert self.whole is None, self.shard
        if shard.ranks == 1:
            return self
        units = (self.formats.unit_of(block, self.layer_prefix) for block in self.layer.blocks)
        return replace(self, layer=self.layer.sharded(shard, units), shard=shard, whole=self)
