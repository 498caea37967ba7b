"""The two tokens whose logits say how well a document answers a query, of a checkpoint like Qwen3-Reranker.

Such a checkpoint is a usual language model: its config.json does not tell it from one that writes answers. What its folder says
besides must fit: its tokenizer has `yes` and `no`, and if it has modules.json of sentence-transformers, this names a LogitScore
of these two tokens. Source: sentence-transformers 6.2, cross_encoder/modules/logit_score.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchspec.checkpoint.config_values import ConfigReader, has_file, read_json, shown
from batchspec.checkpoint.sentence_transformers import MODULES, read_modules
from batchspec.console.text import quoted
from batchspec.errors import CheckpointError

_IDS = ("false_token_id", "true_token_id")


def compared_ids(folder: Path, vocab_size: int, tokens: tuple[str, ...]) -> tuple[int, ...]:
    """The ids of the tokens that a task compares, `no` and `yes`; (): it compares none. Raises CheckpointError if the folder has
    no such tokens, or says that it scores otherwise."""
    if not tokens:
        return ()
    path = folder / "tokenizer.json"
    if not has_file(path):
        raise CheckpointError(f"{shown(folder)}: task=rerank needs a tokenizer, and there is no tokenizer.json")
    found = _tokens(read_json(path))
    ids = tuple(_known(found, token, vocab_size, path) for token in tokens)
    _check_modules(folder, tokens, ids)
    return ids


def _tokens(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Token -> id, as tokenizer.json has them: nothing is checked."""
    model, added = facts.get("model"), facts.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return {**(vocab if isinstance(vocab, dict) else {}), **{str(one.get("content")): one.get("id") for one in found}}


def _known(tokens: Mapping[str, Any], token: str, vocab_size: int, path: Path) -> int:
    found = tokens.get(token)
    if not isinstance(found, int) or not 0 <= found < vocab_size:
        raise CheckpointError(
            f"{shown(path)}: {quoted(token)} is not one token of this tokenizer, and task=rerank compares the logits of two "
            "tokens; use a reranker like Qwen3-Reranker"
        )
    return found


def _check_modules(folder: Path, tokens: tuple[str, ...], ids: tuple[int, ...]) -> None:
    """Raises CheckpointError if modules.json says that the model is no reranker, or compares other tokens."""
    if not has_file(folder / MODULES):
        return
    modules = read_modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds != ["Transformer", "LogitScore"]:
        raise CheckpointError(
            f"{shown(folder / MODULES)}: modules {', '.join(kinds)} are no reranker of task=rerank, which has Transformer and "
            "LogitScore; choose another task or checkpoint"
        )
    path = folder / modules[1][1] / "config.json"
    reader = ConfigReader(read_json(path), shown(path)).ranged(dict.fromkeys(_IDS, (0, 2**31 - 1)))
    if (named := tuple(reader.integer(key) for key in _IDS)) != ids:
        own = f"{' and '.join(tokens)}, {ids}"
        raise reader.refusal(f"the tokens {named} are compared, and task=rerank compares {own}; not supported")
