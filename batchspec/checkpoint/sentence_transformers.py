"""How a model folder says that embeddings are made of its hidden states: the files of sentence-transformers.

modules.json                       a list of modules: Transformer, Pooling, Normalize, in this order, the last one optional
FOLDER/config.json of Pooling      which states are pooled
config_sentence_transformers.json  prompts by name, which are put before a text
sentence_bert_config.json          max_seq_length; tokenizer_config.json: model_max_length

What these files can say and batchspec does not compute is refused by name: another pooling would give other embeddings without a
sign of it. Source: sentence-transformers 5, models/Pooling.py and SentenceTransformer.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from batchspec.checkpoint.config_values import INTEGERS, ConfigReader, has_file, read_json, read_text, shown
from batchspec.console.text import quoted
from batchspec.errors import CheckpointError
from batchspec.tasks.base import EmbeddingFiles

MODULES, PROMPTS, LENGTHS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
OWN = "sentence_transformers."
_LAST, _MEAN = "lasttoken", "mean"
_FLAGS = {"pooling_mode_lasttoken": _LAST, "pooling_mode_mean_tokens": _MEAN}
"""Keys of Pooling's config.json that are true for a pooling that is supported, and its name there in newer files."""


def read_embedding_files(folder: Path, *, asked: bool) -> EmbeddingFiles | None:
    """What the folder says about embeddings; None if it has no modules.json. Raises CheckpointError.

    asked  the user asks for embeddings; otherwise a folder whose modules pool nothing, as a reranker's, says nothing about them
    """
    if not has_file(folder / MODULES):
        return None
    modules = read_modules(folder)
    kinds = [kind for kind, _ in modules]
    if not asked and "Pooling" not in kinds:
        return None
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(
            f"{shown(folder / MODULES)}: modules {', '.join(kinds)} are not supported; supported are Transformer, Pooling and "
            "Normalize of sentence_transformers, in this order"
        )
    prompts, lengths = (_reader(folder / name) for name in (PROMPTS, LENGTHS))
    if lengths.flag("do_lower_case"):
        raise lengths.refusal("do_lower_case=true is not supported; use the tokenizer's own normalizer")
    for key in ("model_args", "config_args"):
        if [*lengths.part(key)]:
            raise lengths.refusal(f"{lengths.shown(key)} changes the model, which is not supported; write it into config.json")
    named = prompts.part("prompts") if "prompts" in prompts.objects() else _reader(folder / PROMPTS, empty=True)
    mean = _pools_mean(_reader(folder / modules[1][1] / "config.json"))
    return EmbeddingFiles(
        mean=mean, normalised="Normalize" in kinds, prompts=tuple((name, named.text(name)) for name in named),
        default_prompt=prompts.text("default_prompt_name") or None,
        max_tokens=lengths.integer("max_seq_length") if lengths.given("max_seq_length") else None,
    )


def text_limit(folder: Path) -> int | None:
    """Number of tokens at which sentence-transformers cuts a text unless `max_seq_length` says another one: the tokenizer's
    model_max_length; None: it has none, which transformers writes as a huge number."""
    value = read_json(folder / "tokenizer_config.json").get("model_max_length")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return int(value) if 1 <= value <= INTEGERS["max_seq_length"][1] else None


def _reader(path: Path, *, empty: bool = False) -> ConfigReader:
    return ConfigReader({} if empty else read_json(path), shown(path))


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Each module's type, without the path of a class of sentence_transformers, and its folder."""
    path = folder / MODULES
    try:
        listed = json.loads(read_text(path))
        named = [(str(one["type"]), str(one.get("path", ""))) for one in listed]
        return [(kind.rpartition(".")[2] if kind.startswith(OWN) else kind, path) for kind, path in named]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise CheckpointError(f"{shown(path)}: not a list of modules ({quoted(said)}); download the file again") from None


def _pools_mean(pooling: ConfigReader) -> bool:
    """Whether the states of all tokens are averaged; False: the last token's is taken. Raises CheckpointError for others."""
    modes = [key for key in pooling if key.startswith("pooling_mode_") and pooling.flag(key)]
    named = pooling.text("pooling_mode") or "+".join(_FLAGS.get(mode, mode) for mode in modes)
    if named not in (_LAST, _MEAN):
        raise pooling.refusal(f"pooling {quoted(named)} is not supported; supported are {_LAST} and {_MEAN}, one of them")
    if named == _MEAN and not pooling.flag("include_prompt", True):
        raise pooling.refusal("include_prompt=false with the mean of all states is not supported: prompts are a part of texts")
    return named == _MEAN
