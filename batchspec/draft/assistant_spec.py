"""A small decoder made to draft for one model: it has no K and V of its own, and reads the model's.

    x = W1 cat(embed(token), h)      embed: the model's; h [H]: the model's state after its final norm, or that of the last draft
    y = norm(layers(x))              a layer attends to K and V of the model's last layer of its kind, which has a window or none
    logits = E y,   next h = W2 y    E [V, h']: its own embedding

It may choose among clusters of tokens: W3 y scores them, and tokens outside the best clusters are not drafted.
Source: transformers, models/gemma4_assistant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from batchspec.checkpoint.config_values import ConfigReader, read_json, shown
from batchspec.model.checkpoint_part import CheckpointPart, Item, block_tensors
from batchspec.model.families.registry import ASSISTANTS, assistant_text
from batchspec.model.layers.attention.of_model import keepers_of
from batchspec.model.layers.base import (
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
from batchspec.model.spec import EMBEDDING, FINAL_NORM, OUTPUT, ModelSpec, layer_prefix, layers_of, read_spec, tokens_of

ORDER = "masked_embedding.token_ordering"
"""int64 [V] the tokens of the first cluster, then those of the second, and so on; all clusters have equally many."""
_DEFAULTS = {"backbone_hidden_size": 1536, "num_centroids": 2048, "centroid_intermediate_top_k": 32}
_ANOTHER = "it is the assistant of another model; draft.path must be the one made for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsSpec(WholeBlockSpec):
    """The products before and after the layers, and the one that scores clusters. Every rank has all of them."""

    hidden_size: int
    """h'"""
    target_size: int
    """H, of the model that it drafts for"""
    num_clusters: int = 0
    """0: it drafts any token."""
    num_chosen: int = 0
    """Number of the best clusters whose tokens may be drafted."""

    @property
    def before(self) -> ProductSpec:
        return ProductSpec((Projection("pre_projection", self.hidden_size, 2 * self.target_size),))

    @property
    def after(self) -> ProductSpec:
        return ProductSpec((Projection("post_projection", self.target_size, self.hidden_size),))

    @property
    def centroids(self) -> ProductSpec:
        return ProductSpec((Projection("masked_embedding.centroids", self.num_clusters, self.hidden_size),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.before, self.after, *([self.centroids] if self.num_clusters else [])

    @property
    def inner_size(self) -> int:
        return 2 * self.target_size

    @property
    def activation_size(self) -> int:
        return 4 * self.target_size + 2 * self.hidden_size + self.num_clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantSpec(CheckpointPart):
    """Its shape, for one target; `AttentionSpec.kv_of` of its layers are layers of the target."""

    ends: EndsSpec
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    eps: float
    norms: NormForm
    formats: Formats = ALL_PLAIN
    shard: Shard = WHOLE
    whole: AssistantSpec | None = None
    """The complete one if this is one rank's part of it; None: this is the complete one."""

    @property
    def complete(self) -> AssistantSpec:
        return self.whole or self

    @property
    def vocab_part(self) -> slice:
        """The tokens whose logits this rank computes."""
        return tokens_of(self.shard, self.vocab_size)

    @property
    def num_logits(self) -> int:
        return len(range(self.vocab_size)[self.vocab_part])

    def blocks(self) -> Iterator[tuple[str, BlockSpec]]:
        yield "", self.ends
        for index, layer in enumerate(self.layers):
            for block in layer.blocks:
                yield layer_prefix(index), block

    def tensors(self) -> Iterator[TensorSpec]:
        yield TensorSpec(EMBEDDING, (self.vocab_size, self.ends.hidden_size), "weight")
        for prefix, block in self.blocks():
            yield from block_tensors(block, prefix, self.formats)
        yield self.norms.tensor(FINAL_NORM.removesuffix(".weight"), self.ends.hidden_size)
        if self.ends.num_clusters:
            yield TensorSpec(ORDER, (self.vocab_size,), "index", ("I64",))

    def copies(self) -> dict[str, str]:
        return {OUTPUT: EMBEDDING}

    def slices_beside_blocks(self) -> Slices:
        return {EMBEDDING: ((self.vocab_part, slice(0, self.ends.hidden_size)),), FINAL_NORM: (), ORDER: ()}

    def own(self, where: str, items: Mapping[str, Item]) -> dict[str, Item]:
        return dict(items)

    def sharded(self, shard: Shard) -> AssistantSpec:
        """The shape of what one rank computes, over the K/V heads that it holds of the target."""
        assert self.whole is None, self.shard
        if shard.ranks == 1:
            return self
        return replace(self, layers=layers_of(shard, self.layers, self.formats), shard=shard, whole=self)


def is_assistant(folder: Path) -> bool:
    """Whether the config.json of a folder is that of an assistant."""
    return read_json(folder / "config.json").get("model_type") in ASSISTANTS


def read_assistant(folder: Path, target: ModelSpec) -> AssistantSpec:
    """The shape of the assistant in a folder. Raises CheckpointError for one that is not supported, or of another target."""
    path = folder / "config.json"
    values = read_json(path)
    config = ConfigReader(values, shown(path)).filled(_DEFAULTS).ranged(dict.fromkeys(_DEFAULTS, (1, 2**26)))
    text = read_spec(assistant_text(values, shown(path)), shown(path))
    for name, own, wanted in (
        ("backbone_hidden_size", config.integer("backbone_hidden_size"), target.hidden_size),
        ("vocab_size", text.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            raise config.refusal(f"{name} is {own}, that of the model is {wanted}; {_ANOTHER}")
    if text.layer_inputs is not None or not config.flag("tie_word_embeddings", True):
        raise config.refusal("an assistant with inputs of layers, or with an output matrix of its own, is not supported")
    return AssistantSpec(
        ends=_ends(config, text, target),
        layers=tuple(_reading(config, target, index, layer) for index, layer in enumerate(text.layers)),
        vocab_size=text.vocab_size,
        eps=text.rms_eps,
        norms=text.norms,
        formats=text.formats,
    )


def _ends(config: ConfigReader, text: ModelSpec, target: ModelSpec) -> EndsSpec:
    sizes = EndsSpec(hidden_size=text.hidden_size, target_size=target.hidden_size)
    if not config.flag("use_ordered_embeddings"):
        return sizes
    count, chosen = config.integer("num_centroids"), config.integer("centroid_intermediate_top_k")
    if not 0 < chosen <= count or text.vocab_size % count:
        raise config.refusal(
            f"num_centroids {count} and centroid_intermediate_top_k {chosen}: vocab_size {text.vocab_size} must be a multiple of "
            "the former, which must not be below the latter; correct them"
        )
    return replace(sizes, num_clusters=count, num_chosen=chosen)


def _reading(config: ConfigReader, target: ModelSpec, index: int, layer: LayerSpec) -> LayerSpec:
    """The layer without its own K and V, reading those of the target's last layer of its kind."""
    own = layer.attention
    keepers = keepers_of(target)
    alike = [i for i, other in keepers.items() if (other.window is None) == (own.window is None)]
    if not alike:
        kind = "reads all keys" if own.window is None else "has a window"
        raise config.refusal(f"layer {index} {kind}, and no layer of the model that keeps K and V does; {_ANOTHER}")
    kept = keepers[alike[-1]]
    if (own.num_kv_heads, own.head_dim) != (kept.num_kv_heads, kept.head_dim):
        raise config.refusal(
            f"layer {index} reads {own.num_kv_heads} K/V heads of {own.head_dim}, layer {alike[-1]} of the model has "
            f"{kept.num_kv_heads} of {kept.head_dim}; {_ANOTHER}"
        )
    window = None if own.window is None or kept.window is None else min(own.window, kept.window)
    return replace(layer, mixer=replace(own, kv_of=alike[-1], window=window, v_norm=False, shared_v=False))
