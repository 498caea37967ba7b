"""Reads config.json of a published DFlash or DSpark head into a BlockSpec. Tensors say which parts a head has; the name of its
architecture, which programs use for different networks, says nothing.

flat          z-lab's DFlash (dflash_config), DeepSpec's DSpark and DFlash (keys at the top), dspark_config
speculators   vLLM's speculators: the decoder's shape under `transformer_layer_config`
Source: z-lab/dflash model.py, deepseek-ai/DeepSpec modeling/dspark, speculators 0.9.0 models/dflash and models/dspark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchspec.checkpoint.config_values import ConfigReader, has_file, read_json, shown
from batchspec.checkpoint.files import StoredTensor
from batchspec.console.text import quoted
from batchspec.draft.block_keys import MOST_RANK, RANGES, own_keys, refuse_keys
from batchspec.draft.formats import OTHER_TARGET, layer_windows, read_mask_token
from batchspec.draft.layouts import FAMILIES, LAYER_DEFAULTS, MASK_KEYS
from batchspec.errors import CheckpointError
from batchspec.model.families.base import read_heads
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rope
from batchspec.model.spec import ModelSpec

MARKOV, MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"

_UNSUPPORTED = {
    "markov_head.gate_proj.": "a gated Markov head", "markov_head.joint_proj.": "a Markov head with a recurrent state",
    "attention_conv.": "convolutions within the block (DFlash2)", "mlp_conv.": "convolutions within the block (DFlash2)",
    "candidate_selector.": "a candidate selector (DFlash2)", "selector.": "a candidate selector (DFlash2)",
    "hc_": "DeepSeek-V4's layers",
}
"""Parts of tensors' names -> what they are."""
_ANOTHER = "draft.path must be a DFlash or DSpark head"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """The shape of a head that drafts a block, and how it computes; a `HeadShape`."""

    hidden_size: int
    """That of the target too."""
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
    causal: tuple[bool, ...]
    """[num_layers] whether a query of the layer attends to no later query of the block."""
    windows_at_anchor: bool
    """Whether all queries of a block read the keys that are in the window of the first one, which `windows` then is of."""
    block_size: int
    """Number of queries of a block in training."""
    from_anchor: bool
    """Whether each query drafts the token after its position, the first that after the newest token, the anchor. False: each mask
    drafts the token at its own position, so 1 + N queries draft N."""
    assumed: bool = False
    """Whether from_anchor is a guess: nothing in the config gives it."""
    mask_token_id: int
    markov_rank: int = 0
    """Rank of the bias that the token before a draft adds to its logits; 0: none."""
    confidence: Literal["none", "hidden", "markov"] = "none"
    """What its estimate of being accepted reads: the state, or also the token before."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = True
    own_embedding: bool = False
    own_head: bool = False
    """Whether it has its own embedding and lm_head; False: it uses the target's."""
    mapped: bool = False
    """Whether it has d2t, so that draft ids differ from target ids."""

    @property
    def feed_normed(self) -> bool:
        return False

    @property
    def most_drafts(self) -> int:
        """The largest K that it was trained for."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def queries(self, draft_len: int) -> int:
        """Number of queries of a block that drafts so many tokens."""
        return draft_len if self.from_anchor else draft_len + 1


def read_block(folder: Path, stored: Mapping[str, StoredTensor], target: ModelSpec, *, aux_layers: str = "auto") -> BlockSpec:
    """Read config.json of a head's folder, for this target.

    stored      the head's tensors by normalised name (`block_head.normalised`)
    aux_layers  meaning of the config's layer ids. input: the input of layer i; output: the output of layer i; auto: the latter
                for target_layer_ids, the former for aux_hidden_state_layer_ids
    Raises CheckpointError for a folder without such a head, a head of another target, and what is not supported.
    """
    path = folder / "config.json"
    if not has_file(path):
        raise CheckpointError(f"{shown(folder)}: no config.json; {_ANOTHER}")
    config = ConfigReader(read_json(path), shown(path)).ranged(RANGES)
    _refuse_tensors(config, stored)
    own = own_keys(config)
    speculators = config.given("transformer_layer_config")
    shape = config.part("transformer_layer_config") if speculators else config
    family = shape.text("model_type", "qwen3")
    if family not in FAMILIES:
        raise config.refusal(f"model_type {quoted(family)} of the head is not supported; supported are {', '.join(FAMILIES)}")
    if speculators:
        shape = shape.filled(LAYER_DEFAULTS.get(family, {}))
    refuse_keys(config, shape)
    spec = _spec_of(own, shape, stored, target, family=family, speculators=speculators, aux_layers=aux_layers)
    _check(spec, own, target)
    return spec


def _refuse_tensors(config: ConfigReader, stored: Mapping[str, StoredTensor]) -> None:
    for part, what in _UNSUPPORTED.items():
        if found := next((name for name in stored if name.startswith(part) or f".{part}" in name), None):
            raise config.refusal(
                f"{found}: {what}, which is not supported; use a DFlash head, or a DSpark head with a plain Markov head"
            )
    for name in (MARKOV, MARKOV_OUT, CONFIDENCE):
        if name in stored and len(stored[name].shape) != 2:
            raise config.refusal(f"{name} is {list(stored[name].shape)}; it must have two dimensions: export the head again")
    if "hidden_norm.weight" not in stored or "fc.weight" not in stored:
        raise config.refusal(f"the weights have no fc and hidden_norm; {_ANOTHER} (draft=eagle3 is for EAGLE-3 heads)")


def _spec_of(
    own: ConfigReader, shape: ConfigReader, stored: Mapping[str, StoredTensor], target: ModelSpec, *, family: str,
    speculators: bool, aux_layers: str,
) -> BlockSpec:
    num_layers, vocab_size = shape.integer("num_hidden_layers"), shape.integer("vocab_size")
    num_kv_heads, head_dim = read_heads(shape)
    draft_vocab = own.integer("draft_vocab_size", vocab_size)
    hidden_size, mask = shape.integer("hidden_size"), read_mask_token(own, vocab_size)
    if mask is None:
        raise own.refusal(f"no id of the mask token; add one of {', '.join(MASK_KEYS)}")
    own_head = "lm_head.weight" in stored or draft_vocab != vocab_size
    # Without layer_types no layer has a window, whatever the family's rule for models is.
    windows = layer_windows(shape, family, num_layers) if shape.texts("layer_types") else (None,) * num_layers
    rank = stored[MARKOV].shape[1] if MARKOV in stored else 0

    def has(part: str) -> bool:
        return any(name.endswith(part) for name in stored)

    return BlockSpec(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=shape.integer("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=shape.integer("intermediate_size"),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab,
        aux_layer_ids=_boundaries(own, target, aux_layers),
        rms_eps=shape.filled({"rms_norm_eps": 1e-6}).number("rms_norm_eps"),
        rope=read_rope(
            shape, shape.integer("max_position_embeddings") if shape.given("max_position_embeddings") else None, sections=True
        ),
        # Masks of speculators let all queries of a block read the `sliding_window` keys before it (models/dflash/attention.py).
        windows=tuple(window if window is None or not speculators else window + 1 for window in windows),
        causal=_causal(own, windows),
        windows_at_anchor=speculators,
        block_size=own.integer("block_size", 8 if speculators else 16),
        from_anchor=own.flag("sample_from_anchor", _usually_from_anchor(own, rank)),
        assumed=not any(own.given(key) for key in ("sample_from_anchor", "speculators_model_type")),
        mask_token_id=mask,
        markov_rank=rank,
        confidence=_confidence(stored, hidden_size),
        qkv_bias=has("self_attn.q_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.gate_proj.bias"),
        fc_bias="fc.bias" in stored,
        qk_norm=has("self_attn.q_norm.weight"),
        own_embedding="embed_tokens.weight" in stored,
        own_head=own_head,
        mapped=own_head and ("d2t" in stored or draft_vocab != vocab_size),
    )


def _usually_from_anchor(own: ConfigReader, rank: int) -> bool:
    """The default of sample_from_anchor: by algorithm in speculators; in flat files DeepSpec's heads draft from the anchor."""
    kind = own.text("speculators_model_type")
    if kind not in ("", "dflash", "dspark"):
        raise own.refusal(f"speculators_model_type {quoted(kind)} is not supported; draft=block needs 'dflash' or 'dspark'")
    return kind == "dspark" if kind else rank > 0 or own.given("num_anchors")


def _confidence(stored: Mapping[str, StoredTensor], hidden_size: int) -> Literal["none", "hidden", "markov"]:
    if CONFIDENCE not in stored:
        return "none"
    return "hidden" if stored[CONFIDENCE].shape[-1] == hidden_size or MARKOV not in stored else "markov"


def _causal(own: ConfigReader, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Layers with a window are causal and others are not, unless a key says otherwise."""
    said, narrow = [own.flag(key) for key in ("is_causal", "causal") if own.given(key)], own.flag("sliding_window_non_causal")
    return tuple(said[0] if said else window is not None and not narrow for window in windows)


def _boundaries(own: ConfigReader, target: ModelSpec, aux_layers: str) -> tuple[int, ...]:
    """z-lab and DeepSpec count layers whose output is read, and -1 is the embedding; speculators count boundaries.

    The output of the last layer, as far as target_layer_ids alone names it, is refused: z-lab reads transformers' hidden_states,
    whose last one is that after the final norm; hooks of DeepSpec, and vLLM for speculators, take it before.
    """
    keys = [key for key in ("target_layer_ids", "aux_hidden_state_layer_ids") if own.given(key)]
    if not keys:
        raise own.refusal("neither target_layer_ids nor aux_hidden_state_layer_ids says which states it reads; add one of them")
    after = [aux_layers == "output" or (aux_layers == "auto" and key == "target_layer_ids") for key in keys]
    read = [tuple(i + later for i in own.integers(key) or ()) for key, later in zip(keys, after, strict=True)]
    if len(set(read)) > 1:
        said = " and ".join(f"{own.shown(key)} (boundaries {list(ids)})" for key, ids in zip(keys, read, strict=True))
        raise own.refusal(f"{said} say different states (draft.aux_layers={aux_layers}); remove one of them")
    found = read[0]
    if not found or len(set(found)) != len(found) or not all(0 <= tap <= target.num_layers for tap in found):
        raise own.refusal(
            f"reads the target's layers {list(found)} ({own.shown(keys[0])}, draft.aux_layers={aux_layers}); they must differ "
            f"and lie in 0 .. {target.num_layers}"
        )
    if keys == ["target_layer_ids"] and target.num_layers in found:
        same = [boundary - (aux_layers == "output") for boundary in found]
        raise own.refusal(
            f"{own.shown('target_layer_ids')}: z-lab's heads read the last layer's output after the final norm, DeepSpec's "
            f"before it; add aux_hidden_state_layer_ids {same} if before, or use a head of earlier layers"
        )
    return found


def _check(head: BlockSpec, own: ConfigReader, target: ModelSpec) -> None:
    layers = own.integer("num_target_layers", target.num_layers)
    for name, value, wanted in (
        ("vocab_size", head.vocab_size, target.vocab_size), ("hidden_size", head.hidden_size, target.hidden_size),
        ("target_hidden_size", own.integer("target_hidden_size", head.hidden_size), target.hidden_size),
        ("num_target_layers", layers, target.num_layers),
    ):
        if value != wanted:
            raise own.refusal(f"{name} {value}, the target's {wanted}: {OTHER_TARGET}")
    if head.draft_vocab_size > head.vocab_size:
        raise own.refusal(f"draft_vocab_size {head.draft_vocab_size} exceeds vocab_size {head.vocab_size}; lower it")
    narrowest = min((window for window in head.windows if window is not None), default=head.block_size)
    if narrowest < head.block_size:
        raise own.refusal(f"sliding_window below block_size {head.block_size} is not supported")
    if head.markov_rank > MOST_RANK:
        raise own.refusal(f"the Markov matrices have rank {head.markov_rank}; supported is at most {MOST_RANK:,}")
    if own.integer("markov_rank", head.markov_rank) != head.markov_rank:
        raise own.refusal(f"{own.shown('markov_rank')}, but the Markov matrices have rank {head.markov_rank}; correct it")
    if own.flag("enable_confidence_head") and head.confidence == "none":
        raise own.refusal("enable_confidence_head true, but the weights have no confidence_head; set it false")
