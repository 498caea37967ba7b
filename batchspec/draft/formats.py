"""A published EAGLE-3 or P-EAGLE head -> HeadSpec: both layouts read, both conventions of layer ids, all unknown refused by name.

flat          SafeAILab, SpecForge, SGLang: `midlayer.*`, with or without `model.` in front, more layers as `layers.1..` or
              `additional_layers.0..`
speculators   vLLM's speculators: `layers.0.*`, the decoder's shape under `transformer_layer_config`
A head that can draft in parallel has a tensor mask_hidden and a mask token id more, in either layout (`peagle` in the second).
Source: SafeAILab/EAGLE cnets.py, sgl-project/SpecForge to_sglang.py, vllm-project/speculators models/eagle3 (config.py, core.py)
and models/peagle/config.py, the keys of the mask https://github.com/vllm-project/vllm/pull/32887.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchspec.errors import CheckpointError
from batchspec.model.spec import Json, ModelSpec, RopeSpec, read_integer, read_json, read_rope, read_windows, short_json


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
    """Tokens that it can draft; as many as vocab_size: all."""
    tap_layers: tuple[int, ...]
    """Boundaries 0..L of the target's residual stream that it reads, in the order in which they are concatenated."""
    rms_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    """[num_layers] keys that a query of the layer sees at most, itself included; None: all."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    fc_bias: bool
    qk_norm: bool
    norm_before_residual: bool
    """The residual stream starts from the normed feature."""
    input_norm: bool
    """One norm over all taps before fc (norm_before_fc)."""
    fc_norm: bool
    """A norm for each tap before fc."""
    feed_normed: bool
    """What the next draft step is fed is behind the final norm, not before it (EAGLE-3.1)."""
    own_embedding: bool
    """False: the target's."""
    own_head: bool
    """False: the target's lm_head, over the target's vocabulary."""
    mapped: bool
    """It has d2t: draft ids are not target ids."""
    mask_token_id: int | None = None
    """What stands for a token that is not known yet: it can draft in parallel. None: chains only."""


# What a missing key of transformer_layer_config means: it is saved as the difference to these (transformers 5).
_LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
              "vocab_size": 32000, "max_position_embeddings": 2048},
    "qwen3": {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
              "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768},
}  # fmt: skip
_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_PEAGLE = ("PEagleSpeculator", "PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM")
_FLAT = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", *_PEAGLE)
_SPECULATORS = {"eagle3": ("Eagle3Speculator", "Eagle3DraftModel"), "peagle": _PEAGLE}

_SHAPE = frozenset((
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "max_position_embeddings", "original_max_position_embeddings", "vocab_size", "hidden_act", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "attention_bias", "mlp_bias",
))  # fmt: skip
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_EAGLE = frozenset((
    "architectures", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "bias", "fc_norm", "norm_before_fc",
    "norm_before_residual", "norm_output", "eagle_aux_hidden_state_layer_ids", "eagle_config", "layer_ids",
    "speculators_model_type", "transformer_layer_config", "parallel_drafting", *MASK_KEYS,
))  # fmt: skip
# Nothing of these changes what a loaded head computes. tie_word_embeddings: a head without lm_head uses the target's anyway.
_HARMLESS = frozenset((
    "attention_dropout", "hidden_dropout", "dropout", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "sep_token_id", "decoder_start_token_id", "initializer_range", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "pretraining_tp", "model_max_length", "embed_requires_grad", "enable_sp_ulysses", "auto_map", "_name_or_path",
    "name_or_path", "tie_word_embeddings", "speculators_version", "speculators_config", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "return_dict", "output_hidden_states", "output_attentions",
    "torchscript", "is_decoder", "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "tokenizer_class", "prefix",
    "finetuning_task", "task_specific_params", "tie_encoder_decoder", "add_cross_attention", "use_bfloat16", "tf_legacy_loss",
    "pruned_heads", "ttt_length", "_experts_implementation",
))  # fmt: skip
# Keys of eagle_config, with the only value that is built where there is one (NVIDIA ModelOpt exports them).
_EAGLE_CONFIG: dict[str, Any] = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "has_lm_head": True, "next_layer_regular": True, "parallel_draft_step": 1,
}  # fmt: skip
_EAGLE_CONFIG_READ = ("eagle_aux_hidden_state_layer_ids", "layer_ids", "norm_before_fc")


def read_head(folder: Path, tensors: Collection[str], target: ModelSpec, *, aux_layers: str = "auto") -> HeadSpec:
    """config.json of a head's folder, for this target.

    tensors     names in the head's files, normalised (`weights.normalised`): optional parts are there where they are
    aux_layers  what the layer ids of the config mean. input: what enters layer i; output: what leaves it;
                auto: output where the first id is 1, else input
    Raises CheckpointError, in one line, for a folder that is no EAGLE-3 head, one of another target, keys that are not built.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json; draft.path must be the folder of an EAGLE-3 head")
    config = read_json(path)
    layout, shape = _layout(config, path)
    eagle = _eagle_config(config, path)
    _refuse(config, shape, layout, path)
    head = _head_spec(layout, config, shape, eagle, tensors, target, aux_layers, path)
    _check_target(head, target, path)
    return head


def _layout(config: Json, path: Path) -> tuple[str, Json]:
    """The layout's name, and the part of the config that holds the decoder layer's shape, defaults filled in."""
    kind = config.get("speculators_model_type")
    if kind not in (None, *_SPECULATORS):
        raise CheckpointError(
            f"{path}: speculators_model_type {kind!r} is not supported; draft=eagle3 needs 'eagle3' or 'peagle'"
        )
    shape, layout = (config, "flat") if kind is None else (config.get("transformer_layer_config"), "speculators")
    if not isinstance(shape, Mapping):
        raise CheckpointError(f"{path}: transformer_layer_config is {short_json(shape)}; it must be an object")
    family = shape.get("model_type", "llama")
    if family not in _FAMILIES:
        raise CheckpointError(f"{path}: model_type {family!r} of the head is not supported; supported are {', '.join(_FAMILIES)}")
    known = _FLAT if kind is None else _SPECULATORS[kind]
    for name in config.get("architectures") or ():
        if name not in known:
            raise CheckpointError(f"{path}: architectures {name!r} is not supported; a {layout} head has {', '.join(known)}")
    return layout, shape if layout == "flat" else {**_LAYER_DEFAULTS.get(family, {}), **shape}


def _eagle_config(config: Json, path: Path) -> Json:
    eagle = config.get("eagle_config") or {}
    if not isinstance(eagle, Mapping):
        raise CheckpointError(f"{path}: eagle_config is {short_json(eagle)}; it must be an object")
    wrong = [
        f"eagle_config.{key}={short_json(value)}"
        for key, value in eagle.items()
        if key not in _EAGLE_CONFIG_READ and value is not None and (key not in _EAGLE_CONFIG or value != _EAGLE_CONFIG[key])
    ]
    if wrong:
        raise CheckpointError(f"{path}: not supported: {', '.join(wrong)}; use an EAGLE-3 head without them")
    return eagle


def _refuse(config: Json, shape: Json, layout: str, path: Path) -> None:
    parts = [config] if layout == "flat" else [config, shape]
    allowed = [_SHAPE | _EAGLE | _HARMLESS] if layout == "flat" else [_EAGLE | _HARMLESS, _SHAPE | _HARMLESS]
    found = [
        f"{key}={short_json(value)}"
        for part, known in zip(parts, allowed, strict=True)
        for key, value in part.items()
        if key not in known and value not in (None, False, [], {})
    ]
    if (act := shape.get("hidden_act", "silu")) not in ("silu", "swish"):
        found.append(f"hidden_act={act!r}")
    if layout == "flat" and config.get("architectures") == ["LlamaForCausalLMEagle3"] and config.get("norm_output") is False:
        found.append("norm_output=false (in this layout: no norm before lm_head)")
    if found:
        raise CheckpointError(
            f"{path}: not known to draft=eagle3: {', '.join(found)}; remove a key from config.json if it changes no computation"
        )


def _head_spec(
    layout: str, config: Json, shape: Json, eagle: Json, tensors: Collection[str], target: ModelSpec, aux_layers: str, path: Path
) -> HeadSpec:
    family = str(shape.get("model_type", "llama"))
    num_layers, num_heads = read_integer(shape, "num_hidden_layers", path), read_integer(shape, "num_attention_heads", path)
    hidden_size, vocab_size = read_integer(shape, "hidden_size", path), read_integer(shape, "vocab_size", path)
    given = {key: read_integer(shape, key, path) for key in ("num_key_value_heads", "head_dim") if shape.get(key) is not None}
    target_hidden = config.get("target_hidden_size")
    draft_vocab = config.get("draft_vocab_size")
    # SpecForge's norm_output says that lm_head reads the normed state, which it always does; others say with it what is fed back.
    specforge = config.get("architectures") == ["LlamaForCausalLMEagle3"]

    def has(part: str) -> bool:
        return any(name.startswith(part) or f".{part}" in name for name in tensors)

    def flag(key: str, part: str) -> bool:
        values = [source[key] for source in (config, eagle) if source.get(key) is not None]
        return bool(values[0]) if values else has(part)

    if flag("norm_before_fc", "input_norm.") and flag("fc_norm", "fc_norm."):
        raise CheckpointError(f"{path}: norm_before_fc and fc_norm exclude each other; set one of them false")
    return HeadSpec(
        layout=layout,
        hidden_size=hidden_size,
        target_hidden_size=target.hidden_size if target_hidden is None else read_integer(config, "target_hidden_size", path),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=given.get("num_key_value_heads", num_heads),
        head_dim=given.get("head_dim", hidden_size // num_heads),
        intermediate_size=read_integer(shape, "intermediate_size", path),
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if draft_vocab is None else read_integer(config, "draft_vocab_size", path),
        tap_layers=_tap_layers(config, eagle, target, aux_layers, path),
        rms_eps=float(shape.get("rms_norm_eps", 1e-6)),
        rope=read_rope(shape, int(shape.get("max_position_embeddings") or 0), path),
        windows=_windows(shape, family, num_layers, path),
        qkv_bias=bool(shape.get("attention_bias")) or has("self_attn.q_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        mlp_bias=bool(shape.get("mlp_bias")) or has("mlp.gate_proj.bias"),
        fc_bias=has("fc.bias"),
        qk_norm=has("self_attn.q_norm."),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        input_norm=flag("norm_before_fc", "input_norm."),
        fc_norm=flag("fc_norm", "fc_norm."),
        feed_normed=bool(config.get("norm_output", False)) and not specforge,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors or draft_vocab is not None,
        mapped="d2t" in tensors or (draft_vocab is not None and draft_vocab != vocab_size),
        mask_token_id=_mask_token_id(config, tensors, vocab_size, path),
    )


def _mask_token_id(config: Json, tensors: Collection[str], vocab_size: int, path: Path) -> int | None:
    """None where nothing says that the head knows masks."""
    given = {key: config[key] for key in MASK_KEYS if config.get(key) is not None}
    if not given:
        says = [key for key in ("parallel_drafting",) if config.get(key)] + [name for name in ("mask_hidden",) if name in tensors]
        if config.get("speculators_model_type") == "peagle" or says:
            raise CheckpointError(
                f"{path}: {', '.join(says) or 'peagle'} without the id of the mask token; add one of {', '.join(MASK_KEYS)}"
            )
        return None
    first = next(iter(given.values()))
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first < vocab_size or set(given.values()) != {first}:
        said = ", ".join(f"{key}={short_json(value)}" for key, value in given.items())
        raise CheckpointError(f"{path}: {said} must be one token id in 0 .. {vocab_size - 1}; correct it")
    return first


def _tap_layers(config: Json, eagle: Json, target: ModelSpec, aux_layers: str, path: Path) -> tuple[int, ...]:
    """Boundary indices: 0 is the embedding, i is what enters layer i, which is what leaves layer i-1."""
    keys = ("eagle_aux_hidden_state_layer_ids", "layer_ids")
    ids = next((part[key] for part in (config, eagle) for key in keys if part.get(key) is not None), None)
    last = target.num_layers
    if ids is None:
        taps = [2, last // 2, last - 3]
    elif isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        after = aux_layers == "output" or (aux_layers == "auto" and ids[0] == 1)
        taps = [i + 1 for i in ids] if after else list(ids)
    else:
        raise CheckpointError(f"{path}: layer ids {short_json(ids)} must be a list of integers")
    if len(set(taps)) != len(taps) or not all(0 <= tap <= last for tap in taps):
        raise CheckpointError(
            f"{path}: reads the target's layers {taps} (ids {short_json(ids)}, draft.aux_layers={aux_layers}); "
            f"they must differ and lie in 0 .. {last}"
        )
    count = config.get("num_aux_hidden_states")
    if count is not None and count != len(taps):
        raise CheckpointError(f"{path}: num_aux_hidden_states {count} but {len(taps)} layer ids {taps}; correct one of them")
    return tuple(taps)


def _windows(shape: Json, family: str, num_layers: int, path: Path) -> tuple[int | None, ...]:
    """layer_types may be the target's, for more layers than the head has: fine where all are of one kind."""
    types = shape.get("layer_types")
    if types and len(types) > num_layers and len(set(types)) == 1:
        types = types[:num_layers]
    # Where layers are named sliding the switch of the Qwen configs says nothing more.
    changes = {"layer_types": types, "use_sliding_window": True} if types else {}
    return read_windows({**shape, **changes}, family, num_layers, path)


def _check_target(head: HeadSpec, target: ModelSpec, path: Path) -> None:
    if head.vocab_size != target.vocab_size:
        raise CheckpointError(f"{path}: vocab_size {head.vocab_size}, the target's {target.vocab_size}: a head of another target")
    if head.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{path}: target_hidden_size {head.target_hidden_size}, the target's {target.hidden_size}: a head of another target"
        )
    if head.hidden_size != target.hidden_size:
        shared = [name for name, own in (("embed_tokens", head.own_embedding), ("lm_head", head.own_head)) if not own]
        if shared:
            raise CheckpointError(
                f"{path}: hidden_size {head.hidden_size} differs from the target's {target.hidden_size}, so the target's "
                f"{' and '.join(shared)} cannot be used; the checkpoint needs its own"
            )
    if head.draft_vocab_size > head.vocab_size:
        raise CheckpointError(f"{path}: draft_vocab_size {head.draft_vocab_size} exceeds vocab_size {head.vocab_size}; lower it")
    if head.num_heads % head.num_kv_heads or head.head_dim % 2:
        raise CheckpointError(
            f"{path}: {head.num_heads} heads, {head.num_kv_heads} key/value heads of {head.head_dim}; "
            "heads must be a multiple of key/value heads, their size even"
        )
