"""Reads config.json of a published DFlash, DFlash2 or DSpark head into a BlockSpec. Tensors say which parts a head has
(`block_parts`); the name of its architecture, which programs use for different networks, says nothing.

flat          z-lab's DFlash and DFlash2 (dflash_config), DeepSpec's DSpark and DFlash (keys at the top), dspark_config
speculators   vLLM's speculators: the decoder's shape under `transformer_layer_config`
Source: z-lab/dflash model.py, deepseek-ai/DeepSpec modeling/dspark, speculators models/dflash, models/dspark, models/dflash2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from batchspec.checkpoint.config_values import ConfigReader, has_file, read_json, shown
from batchspec.checkpoint.files import StoredTensor
from batchspec.console.text import quoted
from batchspec.draft.block_keys import RANGES, own_keys, refuse_keys
from batchspec.draft.block_parts import BlockParts, read_parts, refuse_tensors
from batchspec.draft.formats import OTHER_TARGET, layer_windows, read_mask_token
from batchspec.draft.layouts import FAMILIES, LAYER_DEFAULTS, MASK_KEYS
from batchspec.errors import CheckpointError
from batchspec.model.families.base import read_heads
from batchspec.model.layers.attention.rope_config import RopeSpec, read_rope
from batchspec.model.spec import ModelSpec

_ANOTHER = "draft.path must be a DFlash, DFlash2 or DSpark head"
_KINDS = ("dflash", "dspark", "dflash2")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec(BlockParts):
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
    candidates: int = 16
    """Number of the best tokens of each draft among which the token before it chooses, by Markov matrices or a selector."""
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
    refuse_tensors(config, stored)
    own = own_keys(config)
    speculators = config.given("transformer_layer_config")
    shape = config.part("transformer_layer_config") if speculators else config
    family = shape.text("model_type", "qwen3")
    if family not in FAMILIES:
        raise config.refusal(f"model_type {quoted(family)} of the head is not supported; supported are {', '.join(FAMILIES)}")
    if speculators:
        shape = shape.filled(LAYER_DEFAULTS.get(family, {}))
    refuse_keys(config, shape)
    parts = read_parts(config, own, stored, shape.integer("hidden_size"))
    spec = _spec_of(own, shape, stored, target, parts, family=family, speculators=speculators, aux_layers=aux_layers)
    _check(spec, own, target)
    return spec


def _spec_of(
    own: ConfigReader, shape: ConfigReader, stored: Mapping[str, StoredTensor], target: ModelSpec, parts: BlockParts, *,
    family: str, speculators: bool, aux_layers: str,
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
        from_anchor=own.flag("sample_from_anchor", _usually_from_anchor(own, parts)),
        assumed=not (parts.of_dflash2 or any(own.given(key) for key in ("sample_from_anchor", "speculators_model_type"))),
        mask_token_id=mask,
        **asdict(parts),
        candidates=own.integer("selector_top_k", 16),
        qkv_bias=has("self_attn.q_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.gate_proj.bias"),
        fc_bias="fc.bias" in stored,
        qk_norm=has("self_attn.q_norm.weight"),
        own_embedding="embed_tokens.weight" in stored,
        own_head=own_head,
        mapped=own_head and ("d2t" in stored or draft_vocab != vocab_size),
    )


def _usually_from_anchor(own: ConfigReader, parts: BlockParts) -> bool:
    """The default of sample_from_anchor: by algorithm in speculators; in flat files DeepSpec's heads draft from the anchor."""
    kind = own.text("speculators_model_type")
    if kind not in ("", *_KINDS):
        kinds = ", ".join(map(repr, _KINDS))
        raise own.refusal(f"speculators_model_type {quoted(kind)} is not supported; draft=block needs one of {kinds}")
    return kind == "dspark" if kind else parts.markov_rank > 0 or own.given("num_anchors")


def _causal(own: ConfigReader, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Layers with a window are causal and others are not, unless a key says otherwise, or the algorithm of speculators."""
    said = [own.flag(key) for key in ("is_causal", "causal") if own.given(key)]
    narrow = own.flag("sliding_window_non_causal", own.text("speculators_model_type") == "dflash2")
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
    if head.from_anchor and head.of_dflash2:
        raise own.refusal(
            "sample_from_anchor true, with convolutions or a candidate selector (DFlash2), is not supported; use a head whose "
            "masks are at its drafts"
        )
    if head.selector_rank and head.draft_vocab_size != head.vocab_size:
        raise own.refusal(
            f"draft_vocab_size {head.draft_vocab_size} with a candidate selector, which is over the target's {head.vocab_size} "
            "tokens, is not supported"
        )
