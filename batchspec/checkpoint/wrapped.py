"""The language model of a checkpoint that reads images too (`...ForConditionalGeneration`): its names, without the other parts.

A name in the file has a prefix before that of the same tensor in a checkpoint of text alone: `model.language_model.` in place of
`model.`, in older files `language_model.`; a class without an output matrix (`...Model`) leaves `model.` out. What
encodes images is neither read nor counted; the layer that predicts one token further (`mtp.`) is a part of its own (`mtp.py`).
Source: transformers 5, conversion_mapping.py (llava, qwen3_5_text) and _keys_to_ignore_on_load_unexpected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from batchspec.checkpoint.files import ModelFiles, StoredTensor, stored_tensors
from batchspec.errors import CheckpointError

_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head": "lm_head"}
_BARE = {"embed_tokens.": "model.embed_tokens.", "layers.": "model.layers.", "norm.": "model.norm."}
"""Beginnings of names in a file that a class without an output matrix saved."""
_BACKBONE = {"backbone.embeddings.": "model.embed_tokens.", "model.embeddings.": "model.embed_tokens.", "backbone.": "model."}
"""Beginnings of names in files of Nemotron-H, as published and as transformers has them in memory."""
_OTHER_PARTS = re.compile(
    r"(model\.)?(visual|vision_tower|vision_encoder|vision_projection|vision_embedder|embed_vision|audio_tower|embed_audio|"
    r"multi_modal_projector|mtp)\."
)

Item = TypeVar("Item")


def plain_name(name: str) -> str:
    """The name of a tensor or module in a checkpoint of text alone."""
    prefixes = (*_PREFIXES.items(), *_BACKBONE.items(), *_BARE.items())
    return next((plain + name.removeprefix(prefix) for prefix, plain in prefixes if name.startswith(prefix)), name)


def names_in_files(name: str) -> list[str]:
    """The names that a file may have for what a checkpoint of text alone calls `name`, this one first."""
    prefixes = (*_PREFIXES.items(), *_BACKBONE.items())
    return [name, *(prefix + name.removeprefix(plain) for prefix, plain in prefixes if name.startswith(plain))]


def is_of_text(name: str) -> bool:
    """Whether a tensor or module of this name in a file is one of the language model's."""
    return _OTHER_PARTS.match(name) is None


def of_text(where: str, items: Mapping[str, Item]) -> dict[str, Item]:
    """What belongs to the language model, by its plain name. items: by the names of tensors in a file.

    Raises CheckpointError for two of one name.
    """
    found: dict[str, Item] = {}
    for name, item in items.items():
        if is_of_text(name):
            if (plain := plain_name(name)) in found:
                raise CheckpointError(f"{where}: {plain} is there twice, also as {name}; save the model again")
            found[plain] = item
    return found


def model_tensors(files: ModelFiles) -> dict[str, StoredTensor]:
    """The tensors of a model by their plain names, from the headers of its files. Raises CheckpointError as `stored_tensors`."""
    return of_text(files.where, stored_tensors(files))
