"""config.json -> ModelSpec: what every family shares. Each family reads its own keys (`batchspec.model.families`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from batchspec.cache.layer_state import LayerState
from batchspec.cache.page_format import PageFormat
from batchspec.cache.sharing_cost import NOTHING_SHARED, SharingCost
from batchspec.checkpoint.config_values import ConfigReader, Json, has_file, read_json, shown
from batchspec.checkpoint.generation_config import read_generation
from batchspec.checkpoint.unread_keys import unread_keys
from batchspec.checkpoint.wrapped import of_text
from batchspec.console.text import quoted
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.checkpoint_part import CheckpointPart, Item, block_tensors
from batchspec.model.families.registry import class_has_output, family_of, labels_of
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.layers.base import PLAIN_NORM, WHOLE, BlockSpec, NormForm, Shard, TensorSpec
from batchspec.model.layers.kind import About, Computing, MixerSpec, Use
from batchspec.model.layers.layer import LayerSpec
from batchspec.model.layers.layer_inputs import LayerInputsSpec
from batchspec.model.lora_shape import LoraShape
from batchspec.model.mtp import MtpSpec
from batchspec.model.quant.base import Slices
from batchspec.model.quant.formats import ALL_PLAIN, Formats
from batchspec.model.quant.modelopt import CONFIG_FILE, of_file
from batchspec.model.quant.registry import read_formats
from batchspec.model.vision.spec import VisionSpec

MODEL_PREFIX = "model."
EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LABEL_SCORES = "score.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(CheckpointPart):
    """The shape of a decoder, and what its folder says about stop tokens and sampling."""

    family: str
    """model_type of config.json; of its text_config where the model reads images too."""
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    """The layers; those that attend may differ in the numbers of heads and of values per head."""
    rms_eps: float
    """epsilon of the final norm"""
    rope: RopeSpec
    """The rotary embedding of its layers that read all keys, unless they have none; a new draft head has the same."""
    norms: NormForm = PLAIN_NORM
    """form of the final norm"""
    final_norm: str = FINAL_NORM
    """Name of its weight."""
    embedding_scale: float | None = None
    """Factor of the embeddings, rounded to the model's dtype; None: 1."""
    logits_scaling: float | None = None
    """Divisor of the logits; None: 1."""
    layer_inputs: LayerInputsSpec | None = None
    """What computes the inputs that layers have besides the stream; None: they have none."""
    logit_cap: float | None = None
    """Logits are cap * tanh(logit / cap); None: they are not capped."""
    tie: bool
    """Whether the output matrix is the embedding, or there is none (`has_output`)."""
    has_output: bool = True
    """Whether it has an output matrix, and can decode; otherwise its last states, or its labels' scores, can be read."""
    labels: tuple[str, ...] = ()
    """Names of the labels that its last matrix, score.weight [labels, H], scores after a row's last token; (): it has no such
    matrix."""
    pad_ids: tuple[int, ...] = ()
    """The padding token of a model with labels, if config.json names one: labels are scored after the last other token."""
    formats: Formats = ALL_PLAIN
    fp8_kv: bool = False
    """Whether K and V, or latents, are stored as e4m3: the job's choice, not the checkpoint's."""
    state_dtype: torch.dtype = torch.float32
    """Of the states that layers keep in row tensors, in a model that does not compute in fp64: the job's choice."""
    lora: LoraShape | None = None
    """Adapters that are added to its products, each row with its own: also the job's choice. None: there are none."""
    eos_ids: tuple[int, ...]
    """EOS ids: those of generation_config.json first, then those only in config.json, unless a family excludes these
    (`config_ends`)."""
    max_len: int
    """Longest prompt + output, in tokens."""
    dtype: str
    """The checkpoint's dtype: float32, bfloat16, float64 or float16."""
    generation: Json = field(hash=False)
    """The keys of generation_config.json that change tokens (`read_generation`)."""
    unread: tuple[str, ...] = field(default=(), compare=False)
    """`key=value` for each key of config.json that nothing reads and that may change what the model computes, for the user."""
    shard: Shard = WHOLE
    """The part that this describes: `layers` are those of one rank, all other fields the model's."""
    whole: ModelSpec | None = None
    """The complete model if this is one rank's part of it; None: this is the complete model."""
    num_mtp_layers: int = 0
    """Number of layers that files may have after the last one; they are read only as `mtp`."""
    vision: VisionSpec | None = None
    """The part that encodes images; None in a job without images, whatever the checkpoint has."""
    mtp: MtpSpec | None = None
    """The layer of the checkpoint that predicts one token further, complete even if this is a part; None: it has none that
    drafts can come from."""

    def computing(self, dtype: torch.dtype, page_size: int = 1, *, draft_len: int) -> Computing:
        """How a job computes it in `dtype`. draft_len: K, the maximum number of drafts that a round verifies."""
        return Computing(
            dtype=dtype, state_dtype=self.state_dtype, fp8_kv=self.fp8_kv, ordered=self.ordered, page_size=page_size,
            draft_len=draft_len,
        )

    @property
    def mixers(self) -> tuple[tuple[int, MixerSpec], ...]:
        """The index of each layer that has a mixer, and the mixer."""
        return tuple((i, layer.mixer) for i, layer in enumerate(self.layers) if layer.mixer is not None)

    def layer_states(self, dtype: torch.dtype, page_size: int, *, draft_len: int) -> tuple[LayerState, ...]:
        """What each of its layers keeps of a row. draft_len: K, the maximum number of drafts that a round verifies."""
        run = self.computing(dtype, page_size, draft_len=draft_len)
        return tuple(layer.kept(run) for layer in self.layers)

    def page_formats(self, dtype: torch.dtype, page_size: int) -> tuple[PageFormat, ...]:
        """[num_paged_layers]"""
        return tuple(state.pages for state in self.layer_states(dtype, page_size, draft_len=0) if state.pages is not None)

    @property
    def _states(self) -> tuple[LayerState, ...]:
        """As `layer_states`, for what does not depend on dtypes and sizes."""
        return self.layer_states(torch.float32, 1, draft_len=0)

    @property
    def prefill_multiple(self) -> int | None:
        """Passes cut prompts at multiples of so many tokens; None: anywhere, and no layer keeps row tensors."""
        chunks = [state.chunk or 1 for state in self._states if state.row or state.chunk is not None]
        return math.lcm(*chunks) if chunks else None

    @property
    def least_pass(self) -> int:
        """Tokens that a prefill pass must have room for: a unit of `prefill_multiple`, an image that no pass may cut."""
        return max(self.prefill_multiple or 1, 0 if self.vision is None else self.vision.processor.most_whole)

    def sharing_cost(self, dtype: torch.dtype, *, page_size: int, max_q: int) -> SharingCost:
        """What it saves and costs in rounds of `max_q` queries a row to read prefixes that rows share once."""
        run = self.computing(dtype, page_size, draft_len=max_q - 1)
        costs = [cost for _, mixer in self.mixers if (cost := mixer.sharing_cost(run, max_q)) is not None]
        return next((cost for cost in costs if cost.reads_all), costs[0] if costs else NOTHING_SHARED)

    def refuses(self, use: Use) -> str | None:
        """Why it cannot be used so: of the first layer that refuses it; None: it can."""
        return next((why for _, mixer in self.mixers if (why := mixer.refuses(use)) is not None), None)

    def about(self, run: Computing) -> list[About]:
        """What `plan` says of each kind of its layers."""
        kinds: dict[type[MixerSpec], list[MixerSpec]] = {}
        for _, mixer in self.mixers:
            kinds.setdefault(type(mixer), []).append(mixer)
        return [kind.about(layers, run) for kind, layers in kinds.items()]

    @property
    def ordered(self) -> bool:
        """Whether sums have one order, whatever batch a row is in: see `in_one_order`."""
        return self.formats.ordered

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_paged_layers(self) -> int:
        """Number of layers that keep pages of their own."""
        return sum(state.pages is not None for state in self._states)

    @property
    def last_kept(self) -> int:
        """Index of the last layer that keeps something of a row: of later ones a prefill computes the last tokens alone."""
        return max(i for i, state in enumerate(self._states) if state.pages is not None or state.row)

    @property
    def intermediate_size(self) -> int:
        """Number of values between the two products of the first MLP; a new draft head has as many."""
        return next(layer.mlp.inner_size for layer in self.layers if layer.mlps)

    def on(self, device: torch.device, dtype: torch.dtype, activations: str = "auto") -> ModelSpec:
        """The spec for computing in `dtype` on this device: see `Formats.on`. Raises ConfigError if a layer refuses it."""
        if device.type == "cuda" and (why := self.refuses("gpu")) is not None:
            raise ConfigError(f"{self.family} {why}; set device=cpu")
        return replace(self, formats=self.formats.on(device, dtype, activations))

    def quantised(self, form: str | None) -> ModelSpec:
        """The spec with the value of model.quantize: "fp8" quantises weights when they are read, all products of layers but
        gates and routers; None: they stay. Raises ConfigError for weights that are quantised already."""
        if form is None:
            return self
        products = ((prefix, gemm.product) for prefix, gemm in self.gemms(1))
        stay = [prefix + part.name for prefix, product in products if not product.quantisable for part in product.parts]
        return replace(self, formats=self.formats.quantised_at_load(stay))

    def sharded(self, shard: Shard) -> ModelSpec:
        """The shape of what one rank computes. Raises ConfigError for sizes that cannot be cut; see `part_of`."""
        assert self.whole is None, self.shard
        if shard.ranks == 1:
            return self
        return replace(self, layers=layers_of(shard, self.layers, self.formats), shard=shard, whole=self)

    @property
    def vocab_part(self) -> slice:
        """The tokens whose logits are computed: all of them in a whole model."""
        return tokens_of(self.shard, self.vocab_size)

    @property
    def num_logits(self) -> int:
        """The number of these tokens; 0 without an output matrix."""
        own: range = range(self.vocab_size)[self.vocab_part]
        return len(own) * self.has_output

    def with_fp8_activations(self) -> ModelSpec:
        """The spec with activations quantised as the checkpoint says (W8A8). Raises ConfigError if it has no FP8 weights."""
        return replace(self, formats=self.formats.with_fp8_activations())

    @property
    def has_kv_scales(self) -> bool:
        """Whether K and V are stored as e4m3, which needs a scale for each head: see `Target.kv_scales`. Latents have scales of
        their own."""
        formats = self.page_formats(torch.bfloat16, 1) if self.fp8_kv else ()
        return any(own.unit_scales(torch.device("cpu")) is not None for own in formats)

    def with_fp8_kv(self) -> ModelSpec:
        """The spec with K and V, or latents, stored as e4m3. Raises ConfigError if layers keep something else in pages."""
        found = replace(self, fp8_kv=True, whole=None if self.whole is None else self.whole.with_fp8_kv())
        before, after = (spec.page_formats(torch.bfloat16, 1) for spec in (replace(self, fp8_kv=False), found))
        if not after or any(own == other for own, other in zip(before, after, strict=True)):
            raise ConfigError(
                f"FP8 K/V: layers of {self.family} keep {'something else than' if after else 'no'} K and V in pages; use "
                "cache.dtype=auto"
            )
        return found

    def with_state_dtype(self, dtype: torch.dtype) -> ModelSpec:
        """The spec with the states of rows stored in `dtype`."""
        return replace(self, state_dtype=dtype, whole=None if self.whole is None else self.whole.with_state_dtype(dtype))

    def in_one_order(self) -> ModelSpec:
        """The spec with every product and attention summed in an order that depends on the row alone (decode.deterministic), in
        bf16. Raises ConfigError for weight formats that have no such kernels."""
        return replace(self, formats=self.formats.in_one_order())

    def with_lora(self, shape: LoraShape | None) -> ModelSpec:
        """The spec with adapters of this shape, which are not merged; None: unchanged. Raises ConfigError if a layer cannot have
        them."""
        if shape is not None and (why := self.refuses("adapters")) is not None:
            raise ConfigError(f"LoRA adapters that are not merged: {self.family} {why}; use model.adapter with weights in bf16")
        return replace(self, lora=shape, whole=None if self.whole is None else self.whole.with_lora(shape))

    def without_output(self) -> ModelSpec:
        """The spec of a job that reads hidden states alone: neither an output matrix nor a score matrix nor an MTP layer is
        loaded."""
        return replace(self, tie=True, has_output=False, labels=(), mtp=None)

    def check_output(self, where: str) -> None:
        """Raises CheckpointError if it has no output matrix. where: what needs one"""
        if not self.has_output:
            raise CheckpointError(f"{where} needs a model with an output matrix, and its class has none; choose another")

    @property
    def complete(self) -> ModelSpec:
        return self.whole or self

    def own(self, where: str, items: Mapping[str, Item]) -> dict[str, Item]:
        found = of_text(where, items)
        return found if self.mtp is None else {name: item for name, item in found.items() if not self.mtp.has(name)}

    def copies(self) -> dict[str, str]:
        return {OUTPUT: EMBEDDING} if self.tie and self.has_output else {}

    def ignores(self, name: str) -> bool:
        """A file may hold more layers than the model has, and more of some than they have: see `MixerSpec.spare`."""
        if not self.has_output and (name == OUTPUT or (name == LABEL_SCORES and not self.labels)):
            return True
        layer, _, tensor = name.removeprefix(f"{MODEL_PREFIX}layers.").partition(".")
        if not layer.isdecimal() or int(layer) >= self.num_layers + self.num_mtp_layers:
            return False
        if int(layer) >= self.num_layers:
            return True
        mixer = self.layers[int(layer)].mixer
        return mixer is not None and tensor.startswith(mixer.spare)

    def slices_beside_blocks(self) -> Slices:
        found: Slices = {EMBEDDING: (), self.final_norm: ()}
        if self.labels:
            found[LABEL_SCORES] = ()
        return found if self.tie else found | {OUTPUT: ((self.vocab_part, slice(0, self.hidden_size)),)}

    def blocks(self) -> Iterator[tuple[str, BlockSpec]]:
        if self.layer_inputs is not None:
            yield MODEL_PREFIX, self.layer_inputs
        for index, layer in enumerate(self.layers):
            for block in layer.blocks:
                yield layer_prefix(index), block

    @property
    def experts(self) -> tuple[int, int] | None:
        """Number of experts in a layer, and per token; None without experts. All layers with experts have the same numbers."""
        return next(((gemm.stored, gemm.active) for _, gemm in self.gemms(1) if gemm.grouped), None)

    def tensors(self) -> Iterator[TensorSpec]:
        """As in `CheckpointPart`; lm_head.weight only if it is not tied."""
        matrix = (self.vocab_size, self.hidden_size)
        yield TensorSpec(EMBEDDING, matrix, "weight")
        yield self.norms.tensor(self.final_norm.removesuffix(".weight"), self.hidden_size)
        if not self.tie:
            yield TensorSpec(OUTPUT, matrix, "weight")
        if self.labels:
            yield TensorSpec(LABEL_SCORES, (len(self.labels), self.hidden_size), "weight")
        for prefix, block in self.blocks():
            yield from block_tensors(block, prefix, self.formats)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights in memory, adapters included; norms and biases are too few to count."""
        rows = self.vocab_size + (0 if self.tie else self.num_logits)  # embedding and output matrix
        table = 0 if self.layer_inputs is None else self.layer_inputs.table_size
        vision = 0 if self.vision is None else self.vision.weight_bytes(dtype)
        return self.block_bytes(dtype) + (rows * self.hidden_size + table) * dtype.itemsize + self.lora_bytes(dtype) + vision

    def lora_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the adapters that are not merged."""
        if self.lora is None:
            return 0
        return sum(self.lora.product_bytes(prefix, own, dtype) for prefix, block in self.blocks() for own in block.products)


def tokens_of(shard: Shard, vocab_size: int) -> slice:
    """The tokens whose logits a rank computes; a rank may have one fewer than rank 0."""
    return slice(*(-(-rank * vocab_size // shard.ranks) for rank in (shard.rank, shard.rank + 1)))


def layers_of(shard: Shard, layers: Sequence[LayerSpec], formats: Formats) -> tuple[LayerSpec, ...]:
    """What a rank holds of these layers. Raises ConfigError for sizes that cannot be cut."""
    units = ([formats.unit_of(block, layer_prefix(i)) for block in layer.blocks] for i, layer in enumerate(layers))
    return tuple(layer.sharded(shard, own) for layer, own in zip(layers, units, strict=True))


def layer_prefix(index: int) -> str:
    """The prefix of the names of a layer's tensors."""
    return f"model.layers.{index}."


def load_spec(folder: Path) -> ModelSpec:
    """Read config.json and generation_config.json of a Hugging Face model folder.

    Raises CheckpointError if the folder has no config.json, a key is missing or malformed, or a key changes the computation in
    an unsupported way. Code that the folder names (auto_map) is never run.
    """
    path = folder / "config.json"
    if not has_file(path):
        raise CheckpointError(f"{shown(folder)}: no config.json; model.path must be a Hugging Face model folder")
    generation = read_json(folder / "generation_config.json")
    config = read_json(path)
    if config.get("quantization_config") is None and (from_file := of_file(read_json(folder / CONFIG_FILE))) is not None:
        config["quantization_config"] = from_file
    return read_spec(config, shown(path), generation, shown(folder / "generation_config.json"))


def read_spec(values: Json, where: str, generation: Json | None = None, generation_where: str = "") -> ModelSpec:
    """The shape of a model from the content of its two files; `where` is for messages. Raises CheckpointError as `load_spec`."""
    own = ConfigReader(values, where)
    family, config = family_of(own)
    config = config.filled({"rms_norm_eps": 1e-6, **family.defaults}).ranged(family.integers).renamed(family.renames)
    formats = read_formats(config)
    family.check(config)
    ends = ConfigReader(generation or {}, generation_where).integer_or_integers("eos_token_id")
    if family.config_ends or not ends:
        ends += config.integer_or_integers("eos_token_id")
    layers = family.layers(config)
    labels, has_output = labels_of(own), class_has_output(own)
    mtp = family.mtp(config, layers) if has_output else None
    formats = formats.with_experts(
        spec for layer in (*layers, *([] if mtp is None else [mtp.layer])) for block in layer.blocks for spec in block.grouped
    )
    rope, layers, mtp = family.with_ropes(config, layers, mtp)
    return ModelSpec(
        family=family.name,
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        layers=layers,
        rms_eps=config.number("rms_norm_eps"),
        rope=rope,
        norms=family.norms,
        final_norm=family.final_norm,
        embedding_scale=family.embedding_scale(config),
        layer_inputs=family.layer_inputs(config),
        logit_cap=family.logit_cap(config),
        logits_scaling=family.logits_scaling(config),
        tie=config.flag("tie_word_embeddings") or not has_output,
        has_output=has_output,
        labels=labels,
        pad_ids=config.integer_or_integers("pad_token_id") if labels else (),
        formats=formats,
        num_mtp_layers=family.num_mtp_layers(config),
        mtp=None if mtp is None else replace(mtp, formats=formats),
        eos_ids=tuple(dict.fromkeys(ends)),
        max_len=rope.longest(config.integer("max_position_embeddings")),
        dtype=_dtype(config),
        generation=read_generation(generation or {}),
        unread=unread_keys(own),  # last: by now every other key has been read
    )


def _dtype(config: ConfigReader) -> str:
    name = (config.text("dtype") or config.text("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float64", "float16"):
        raise config.refusal(f"dtype {quoted(name)} is not supported; use a float32 or bfloat16 checkpoint")
    return name
