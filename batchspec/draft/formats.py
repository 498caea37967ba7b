"""Reads the config of a published EAGLE-3 or P-EAGLE head into a HeadSpec: both conventions of layer ids, and optional parts
whose tensors exist.

Source: that of `layouts.py`; the keys of the mask: https://github.com/vllm-project/vllm/pull/32887.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.draft.layouts import MASK_KEYS, SPECFORGE, HeadConfig, family_of, read_config
from batchspec.model.families.base import read_heads, read_windows
from batchspec.model.families.registry import has_window_switch
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rope
from batchspec.model.layers.base import WHOLE, Shard
from batchspec.model.spec import ModelSpec, tokens_of

OTHER_TARGET = "a head of another target; give one made for this model"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The shape of an EAGLE-3 head and how it computes (Li et al. 2025, arXiv 2503.01840)."""

    layout: str
    """flat or speculators."""
    hidden_size: int
    target_hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    """Number of tokens that it can draft; vocab_size means all."""
    aux_layer_ids: tuple[int, ...]
    """Boundaries 0..L of the target's residual stream that it reads, in the order in which they are concatenated."""
    rms_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    """[num_layers] maximum number of keys that a query of the layer attends to, itself included; None: all."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    fc_bias: bool
    qk_norm: bool
    norm_before_residual: bool
    """Whether the residual stream starts from the normed feature."""
    input_norm: bool
    """One norm over all aux hidden states before fc (norm_before_fc)."""
    fc_norm: bool
    """A norm for each aux hidden state before fc."""
    feed_normed: bool
    """Whether the next draft step reads the state after the final norm, not before it (EAGLE-3.1)."""
    own_embedding: bool
    """Whether it has its own embedding; False: it uses the target's."""
    own_head: bool
    """Whether it has its own lm_head; False: it uses the target's, over the target's vocabulary."""
    mapped: bool
    """Whether it has d2t, so that draft ids differ from target ids."""
    final_hidden: bool = False
    """Whether it reads the target's last hidden state, after the target's final norm, in place of fc of aux hidden states."""
    mask_token_id: int | None = None
    """The token in place of one that is not known yet, with which the head can draft in parallel. None: chains only."""
    shard: Shard = WHOLE
    """The rank's part that this describes: numbers of heads and intermediate_size are the rank's, all other fields the head's."""
    whole: HeadSpec | None = None
    """The complete head if this is one rank's part of it; None: this is the complete head."""

    @property
    def draft_part(self) -> slice:
        """The draft ids whose logits are computed: all, unless this is a part of a head with its own lm_head."""
        return tokens_of(self.shard if self.own_head else WHOLE, self.draft_vocab_size)


def read_head(folder: Path, tensors: Collection[str], target: ModelSpec, *, aux_layers: str = "auto") -> HeadSpec:
    """Read config.json of a head's folder, for this target.

    tensors     names in the head's files, normalised (`weights.normalised`): they tell which optional parts the head has
    aux_layers  meaning of the config's layer ids. input: the input of layer i; output: the output of layer i; auto: input in the
                speculators layout; in the flat layout output if the first id is 1, else input
    Raises CheckpointError for a folder without an EAGLE-3 head, a head of another target, and unsupported keys.
    """
    source = read_config(folder)
    head = _head_spec(source, tensors, target, aux_layers)
    _check_target(head, target, source.whole)
    return head


def _head_spec(source: HeadConfig, tensors: Collection[str], target: ModelSpec, aux_layers: str) -> HeadSpec:
    config, shape, eagle = source.whole, source.shape, source.eagle
    family = family_of(shape)
    num_layers, vocab_size = shape.integer("num_hidden_layers"), shape.integer("vocab_size")
    num_kv_heads, head_dim = read_heads(shape)
    draft_vocab = _draft_vocab_size(config, vocab_size)
    own_head = "lm_head.weight" in tensors or draft_vocab != vocab_size
    final_hidden = eagle.given("use_aux_hidden_state") and not eagle.flag("use_aux_hidden_state")
    # In SpecForge's older configs norm_output says that lm_head reads the normed state, which it always does. In all others it
    # says what the next step reads (https://github.com/sgl-project/SpecForge/pull/879). `batchspec probe` tries both.
    specforge = config.texts("architectures") == (SPECFORGE,)

    def has(part: str) -> bool:
        return any(name.startswith(part) or f".{part}" in name for name in tensors)

    def flag(key: str, part: str) -> bool:
        return next((held.flag(key) for held in (config, eagle) if held.given(key)), has(part))

    if flag("norm_before_fc", "input_norm.") and flag("fc_norm", "fc_norm."):
        raise config.refusal("norm_before_fc and fc_norm exclude each other; set one of them false")
    if final_hidden and (flag("norm_before_fc", "input_norm.") or flag("fc_norm", "fc_norm.")):
        raise config.refusal("use_aux_hidden_state false leaves norm_before_fc and fc_norm nothing to norm; set them false")
    return HeadSpec(
        layout=source.layout,
        hidden_size=shape.integer("hidden_size"),
        target_hidden_size=config.integer("target_hidden_size", target.hidden_size),
        num_layers=num_layers,
        num_heads=shape.integer("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=shape.integer("intermediate_size"),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab,
        aux_layer_ids=(target.num_layers,) if final_hidden else _aux_layer_ids(source, target, aux_layers),
        rms_eps=shape.filled({"rms_norm_eps": 1e-6}).number("rms_norm_eps"),
        rope=read_rope(shape, shape.integer("max_position_embeddings") if shape.given("max_position_embeddings") else None),
        windows=layer_windows(shape, family, num_layers),
        qkv_bias=shape.flag("attention_bias") or has("self_attn.q_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        mlp_bias=shape.flag("mlp_bias") or has("mlp.gate_proj.bias"),
        fc_bias=has("fc.bias") and not final_hidden,
        qk_norm=has("self_attn.q_norm."),
        norm_before_residual=config.flag("norm_before_residual"),
        input_norm=flag("norm_before_fc", "input_norm."),
        fc_norm=flag("fc_norm", "fc_norm."),
        feed_normed=config.flag("norm_output") and not specforge,
        own_embedding="embed_tokens.weight" in tensors,
        own_head=own_head,
        mapped=own_head and ("d2t" in tensors or draft_vocab != vocab_size),  # the target's matrix is over the target's ids
        final_hidden=final_hidden,
        mask_token_id=_mask_token_id(config, tensors, vocab_size),
    )


def _draft_vocab_size(config: ConfigReader, vocab_size: int) -> int:
    """The draft vocabulary's size under either of its names; all tokens if the config has none."""
    given = {key: config.integer(key) for key in ("draft_vocab_size", "truncated_vocab_size") if config.given(key)}
    if len(set(given.values())) > 1:
        raise config.refusal(f"{', '.join(map(config.shown, given))} must be equal; correct one of them")
    return next(iter(given.values()), vocab_size)


def _mask_token_id(config: ConfigReader, tensors: Collection[str], vocab_size: int) -> int | None:
    """The mask token; None if nothing says that the head was trained with masks."""
    given = [key for key in MASK_KEYS if config.given(key)]
    if not given:
        says = ["parallel_drafting"] if config.flag("parallel_drafting") else []
        says += ["mask_hidden"] if "mask_hidden" in tensors else []
        if config.text("speculators_model_type") == "peagle" or says:
            raise config.refusal(
                f"{', '.join(says) or 'peagle'} without the id of the mask token; add one of {', '.join(MASK_KEYS)}"
            )
        return None
    return read_mask_token(config, vocab_size)


def read_mask_token(config: ConfigReader, vocab_size: int) -> int | None:
    """The token in place of those not known yet, under any of its names; None if the config has none."""
    given = {key: config.integer(key) for key in MASK_KEYS if config.given(key)}
    if len(set(given.values())) > 1 or not all(token < vocab_size for token in given.values()):
        said = ", ".join(map(config.shown, given))
        raise config.refusal(f"{said} must be one token id in 0 .. {vocab_size - 1}; correct it")
    return next(iter(given.values()), None)


def _aux_layer_ids(source: HeadConfig, target: ModelSpec, aux_layers: str) -> tuple[int, ...]:
    """Boundary indices: 0 is the embedding, i is the input of layer i, which is the output of layer i-1.

    speculators checks its ids against 0 .. num_layers and passes them on as they are (speculators 0.9.0, models/utils.py,
    resolve_target_layer_ids): boundaries. Only flat checkpoints come in both conventions.
    Source: https://github.com/sgl-project/sglang/pull/25454 (a first id of 1 says output of a layer).
    """
    config, keys = source.whole, ("eagle_aux_hidden_state_layer_ids", "layer_ids")
    named = next(((part, key) for part in (config, source.eagle) for key in keys if part.given(key)), None)
    ids = None if named is None else named[0].integers(named[1]) or None  # NVIDIA's are empty for the default layers
    last = target.num_layers
    if ids is None:
        aux_layer_ids = [2, last // 2, last - 3]
    else:
        after = aux_layers == "output" or (aux_layers == "auto" and source.layout == "flat" and ids[:1] == (1,))
        aux_layer_ids = [i + 1 for i in ids] if after else list(ids)
    if not aux_layer_ids or len(set(aux_layer_ids)) != len(aux_layer_ids) or not all(0 <= tap <= last for tap in aux_layer_ids):
        raise config.refusal(
            f"reads the target's layers {aux_layer_ids} (ids {None if ids is None else list(ids)}, "
            f"draft.aux_layers={aux_layers}); they must differ and lie in 0 .. {last}"
        )
    count = config.integer("num_aux_hidden_states", len(aux_layer_ids))
    if count != len(aux_layer_ids):
        raise config.refusal(
            f"num_aux_hidden_states {count} but {len(aux_layer_ids)} layer ids {aux_layer_ids}; correct one of them"
        )
    return tuple(aux_layer_ids)


def layer_windows(shape: ConfigReader, family: str, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer. layer_types may be the target's, for more layers than the head has: accepted if all are of one kind."""
    types = shape.texts("layer_types")
    if types and len(types) > num_layers and len(set(types)) == 1:
        types = types[:num_layers]
    switch = has_window_switch(family)
    if not types:
        return read_windows(shape.replaced(layer_types=None), num_layers, switch=switch)
    # If layers are named sliding, the switch of the Qwen configs (use_sliding_window) adds nothing.
    return read_windows(shape.replaced(layer_types=list(types), use_sliding_window=True), num_layers, switch=switch)


def _check_target(head: HeadSpec, target: ModelSpec, config: ConfigReader) -> None:
    if head.vocab_size != target.vocab_size:
        raise config.refusal(f"vocab_size {head.vocab_size}, the target's {target.vocab_size}: {OTHER_TARGET}")
    if head.target_hidden_size != target.hidden_size:
        raise config.refusal(f"target_hidden_size {head.target_hidden_size}, the target's {target.hidden_size}: {OTHER_TARGET}")
    if head.hidden_size != target.hidden_size and head.final_hidden:
        raise config.refusal(
            f"use_aux_hidden_state false with hidden_size {head.hidden_size} needs a target of that width, not of "
            f"{target.hidden_size}: {OTHER_TARGET}"
        )
    if head.hidden_size != target.hidden_size:
        shared = [name for name, own in (("embed_tokens", head.own_embedding), ("lm_head", head.own_head)) if not own]
        if shared:
            raise config.refusal(
                f"hidden_size {head.hidden_size} differs from the target's {target.hidden_size}, so the target's "
                f"{' and '.join(shared)} cannot be used; the checkpoint needs its own"
            )
    if head.draft_vocab_size > head.vocab_size:
        raise config.refusal(f"draft_vocab_size {head.draft_vocab_size} exceeds vocab_size {head.vocab_size}; lower it")
