"""The keys of config.json of a DFlash, DFlash2 or DSpark head: which are read, change nothing, or have one supported value."""

from __future__ import annotations

from typing import Any

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.draft.layouts import HARMLESS, MASK_KEYS, SHAPE_KEYS
from batchspec.kernels.sampling.top_candidates import MOST as MOST_CANDIDATES

MOST_QUERIES = 64
"""Most queries of a block: masks of attention have 64 bits."""
MOST_RANK = 1024
"""Highest rank of Markov matrices and of a selector; published heads have 256."""
RANGES = {
    "block_size": (2, MOST_QUERIES), "target_layer_ids": (-1, 4096), "aux_hidden_state_layer_ids": (0, 4096),
    "num_target_layers": (1, 4096), "markov_rank": (0, MOST_RANK), "num_anchors": (1, 2**31 - 1),
    "conv_kernel_size": (0, 2**16), "conv_group_size": (0, 2**20), "selector_rank": (0, 2**16),
    "selector_top_k": (1, MOST_CANDIDATES),
}
_NESTED = ("dflash_config", "dspark_config")
_OF_BLOCKS = frozenset((
    *RANGES, *_NESTED, *MASK_KEYS, "architectures", "sample_from_anchor", "sliding_window_non_causal", "is_causal", "causal",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "draft_vocab_size",
    "target_hidden_size", "speculators_model_type", "transformer_layer_config",
))
_OF_TRAINING = frozenset(("max_anchors", "confidence_head_alpha"))
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (1.0,), "output_multiplier": (1.0,), "final_logit_softcapping": (0,), "is_neox_style": (True,),
    "hidden_act": ("silu", "swish"), "markov_head_type": ("vanilla",), "projector_type": ("dflash", "dspark", "dflash2"),
    "attention_mode": ("gqa",),
}
"""Keys, and the only values of them that are supported."""
_OFF = frozenset((
    "is_encoder_decoder", "use_mrope", "output_scores", "return_dict_in_generate", "remove_invalid_values", "do_sample",
    "early_stopping", "parallel_drafting", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
))
"""Keys that are not supported, but change nothing if they are false. No other key's false is taken for its default."""


def own_keys(config: ConfigReader) -> ConfigReader:
    """The config with the values of its dflash_config and dspark_config in place of its own.

    Raises CheckpointError if the two say different things of a key.
    """
    parts = [config.part(key) for key in _NESTED if config.given(key)]
    own = config
    for part in parts:
        own = own.under(part, part)
    for part in parts:
        for key in part:
            if part.given(key) and part.shown(key, prefix=False) != own.shown(key, prefix=False):
                raise config.refusal(f"{part.shown(key)} and {parts[-1].shown(key)} must be equal; correct one of them")
    return own


def refuse_keys(config: ConfigReader, shape: ConfigReader) -> None:
    """Raise CheckpointError for keys that are not read and may change what the head computes. shape: the part with the layers'
    shape, or the config itself."""
    of_head, of_layers = _OF_BLOCKS | _OF_TRAINING | HARMLESS, SHAPE_KEYS | HARMLESS
    nested = [config.part(key) for key in _NESTED if config.given(key)]
    flat = shape is config
    parts = [(config, of_head | of_layers if flat else of_head), *([] if flat else [(shape, of_layers)])]
    parts += [(part, of_head) for part in nested]
    found = [part.shown(key) for part, known in parts for key in part if not _is_supported(part, key, known)]
    if found:
        raise config.refusal(
            f"not known to draft=block: {', '.join(found)}; remove a key from config.json if it changes no computation"
        )


def _is_supported(part: ConfigReader, key: str, known: frozenset[str]) -> bool:
    if key in _SUPPORTED:
        return not part.differs(key, None, *_SUPPORTED[key])
    return key in known or not part.differs(key, None, [], {}, *([False] if key in _OFF else []))
