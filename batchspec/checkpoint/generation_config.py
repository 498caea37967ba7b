"""generation_config.json: the sampling that a model's authors recommend. Jobs do not follow it (`packing/model_notes.py`)."""

from __future__ import annotations

from typing import Any

from batchspec.checkpoint.config_values import Json

SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Keys that are options of `decode` too, and do_sample."""
_NOTHING: tuple[Any, ...] = (None, False, [], {})  # 0 equals False
NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "suppress_tokens": (), "begin_suppress_tokens": (), "bad_words_ids": (), "sequence_bias": (), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "min_length": (), "min_new_tokens": (), "no_repeat_ngram_size": (), "typical_p": (1,),
    "epsilon_cutoff": (), "eta_cutoff": (), "exponential_decay_length_penalty": (), "stop_strings": (), "guidance_scale": (1,),
    "num_beams": (1,), "penalty_alpha": (), "watermarking_config": (),
}
"""Further keys that change tokens in transformers -> their neutral values, besides null, 0 and empty ones."""
NEARLY = {"no_repeat_ngram_size": "it counts the prompt too; decode.no_repeat_ngram.ngram_size counts the output alone"}
"""Keys of NOT_FOLLOWED that jobs have something like -> what that is."""


def read_generation(values: Json) -> Json:
    """The keys of SAMPLING that are not null, and those of NOT_FOLLOWED that change tokens."""
    found = {key: values[key] for key in SAMPLING if values.get(key) is not None}
    return found | {key: values[key] for key, more in NOT_FOLLOWED.items() if values.get(key) not in (*_NOTHING, *more)}
