"""config.json -> ModelSpec: what every family shares. Each family reads its own keys (`batchspec.model.families`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from batchspec.cache.layout import KVLayout
from batchspec.errors import CheckpointError
from batchspec.model.blocks.attention import AttentionSpec
from batchspec.model.blocks.base import BlockSpec, Gemm, TensorSpec, projections
from batchspec.model.blocks.layer import LayerSpec
from batchspec.model.config_values import ConfigReader, Json, read_json, shown
from batchspec.model.families.registry import family_of
from batchspec.model.quant.formats import ALL_PLAIN, Formats
from batchspec.model.quant.registry import read_formats
from batchspec.model.rope_config import RopeSpec, read_rope

EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_GENERATION_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder and what its folder says about ending and sampling."""

    family: str
    """model_type of config.json."""
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    """All have as many query heads, K/V heads and numbers a head."""
    rms_eps: float
    """of the final norm"""
    rope: RopeSpec
    tie: bool
    """The output matrix is the embedding."""
    formats: Formats = ALL_PLAIN
    eos_ids: tuple[int, ...]
    """Of generation_config.json first, then those that only config.json has."""
    max_len: int
    """Longest prompt + output, in tokens."""
    dtype: str
    """The checkpoint's: float32, bfloat16, float64 or float16."""
    generation: Json
    """Sampling defaults of generation_config.json, those that are set."""

    def __post_init__(self) -> None:
        heads = {(a.num_heads, a.num_kv_heads, a.head_dim) for a in self.attentions}
        assert len(heads) == 1, heads  # K/V of all layers lie in one tensor, and their attention shares a plan

    def kv_layout(self, dtype: torch.dtype, page_size: int) -> KVLayout:
        """How each of its layers keeps keys and values, computed in `dtype`."""
        return KVLayout(dtype=dtype, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, page_size=page_size)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """[num_layers]"""
        return tuple(layer.attention for layer in self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """[num_layers] keys that a query of the layer sees at most, itself included; None: all."""
        return tuple(attention.window for attention in self.attentions)

    @property
    def intermediate_size(self) -> int:
        """Numbers between the two products of the first layer's MLP, of one token: a new draft head takes it over."""
        return self.layers[0].mlp.inner_size

    def blocks(self) -> Iterator[tuple[str, BlockSpec]]:
        """Each block with the prefix of its names in the checkpoint, in the order of the forward."""
        for index, layer in enumerate(self.layers):
            for block in layer.blocks:
                yield layer_prefix(index), block

    def gemms(self, tokens: float) -> Iterator[tuple[str, Gemm]]:
        """The products of all layers for so many tokens, with their prefix; the output matrix is not among them."""
        for prefix, block in self.blocks():
            for gemm in block.gemms(tokens):
                yield prefix, gemm

    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor of the checkpoint by its full name; lm_head.weight only where it is not tied."""
        matrix = (self.vocab_size, self.hidden_size)
        yield TensorSpec(EMBEDDING, matrix, "weight")
        yield TensorSpec(FINAL_NORM, (self.hidden_size,), "norm")
        if not self.tie:
            yield TensorSpec(OUTPUT, matrix, "weight")
        for prefix, block in self.blocks():
            yield from block_tensors(block, prefix, self.formats)

    def gemm_bytes(self, prefix: str, gemm: Gemm, dtype: torch.dtype) -> int:
        """Bytes in memory of one weight of this product."""
        weight_format = self.formats.of(prefix + gemm.product.parts[0].name)
        return weight_format.nbytes(gemm.product.rows, gemm.product.k, dtype)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights in memory; norms and biases are too few to count."""
        matrices = (1 if self.tie else 2) * self.vocab_size * self.hidden_size  # output matrix and embedding
        stored = sum(gemm.stored * self.gemm_bytes(prefix, gemm, dtype) for prefix, gemm in self.gemms(1))
        return stored + matrices * dtype.itemsize


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{index}."


def block_tensors(block: BlockSpec, prefix: str, formats: Formats = ALL_PLAIN) -> Iterator[TensorSpec]:
    """Every tensor of a block by its full name: those of its projections, as their formats store them, then its vectors."""
    for part in projections(block):
        for tensor in formats.of(prefix + part.name).tensors(part):
            yield TensorSpec(prefix + tensor.name, tensor.shape, tensor.role, tensor.dtypes)
    for tensor in block.vectors:
        yield TensorSpec(prefix + tensor.name, tensor.shape, tensor.role, tensor.dtypes)


def load_spec(folder: Path) -> ModelSpec:
    """Read config.json and generation_config.json of a Hugging Face model folder.

    Raises CheckpointError, in one line, where the folder has no config.json, a key is missing or malformed, or a key
    changes the computation in a way that is not built; code that the folder names (auto_map) is never run.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{shown(folder)}: no config.json; model.path must be a Hugging Face model folder")
    generation = read_json(folder / "generation_config.json")
    return read_spec(read_json(path), shown(path), generation, shown(folder / "generation_config.json"))


def read_spec(values: Json, where: str, generation: Json | None = None, generation_where: str = "") -> ModelSpec:
    """The shape of a model from the content of its two files, `where` for messages. Raises CheckpointError as `load_spec`."""
    config = ConfigReader(values, where)
    family = family_of(config)
    config = config.filled(family.defaults).ranged(family.integers)
    formats = read_formats(config)
    not_built = ["quantization_config"] if formats is None else []
    family.check(config, not_built)
    assert formats is not None
    max_len = config.integer("max_position_embeddings")
    ends = ConfigReader(generation or {}, generation_where).integer_or_integers("eos_token_id")
    return ModelSpec(
        family=family.name,
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        layers=family.layers(config),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, max_len),
        tie=config.flag("tie_word_embeddings"),
        formats=formats,
        eos_ids=tuple(dict.fromkeys(ends + config.integer_or_integers("eos_token_id"))),
        max_len=max_len,
        dtype=_dtype(config),
        generation={key: value for key in _GENERATION_KEYS if (value := (generation or {}).get(key)) is not None},
    )


def _dtype(config: ConfigReader) -> str:
    name = (config.text("dtype") or config.text("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float64", "float16"):
        raise config.refusal(f"dtype {name[:60]!r} is not supported; use a float32 or bfloat16 checkpoint")
    return name
