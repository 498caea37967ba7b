"""The special and the added tokens that a tokenizer's folder declares in files other than tokenizer.json.

transformers adds those that tokenizer.json lacks, or has with other flags, and splits text at them. A tokenizer that reads
tokenizer.json alone would split them like any other text.
Source: transformers, tokenization_utils_base.py (_from_pretrained), tokenization_utils_tokenizers.py (TokenizersBackend).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from batchspec.checkpoint.config_values import Json, read_json, shown
from batchspec.console.text import as_json
from batchspec.errors import CheckpointError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_DECLARED = "added_tokens_decoder"


def tokenizer_config(folder: Path) -> Json:
    """tokenizer_config.json. Values of the older special_tokens_map.json replace its own, unless it declares added tokens."""
    config = read_json(folder / "tokenizer_config.json")
    return config if _DECLARED in config else config | read_json(folder / "special_tokens_map.json")


def has_code(config: Json) -> bool:
    """Whether it names a tokenizer class of the folder's own code."""
    named = config.get("auto_map")
    return isinstance(named, dict) and bool(named.get("AutoTokenizer"))


def special_tokens(config: Json) -> dict[str, Any]:
    """bos_token, eos_token and so on as plain strings, which templates can use."""
    found: dict[str, Any] = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
    additional = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    if isinstance(additional, list) and additional:
        found["additional_special_tokens"] = [_content(token) for token in additional]
    if isinstance(additional, dict):  # named ones, such as image_token
        found = {name: _content(token) for name, token in additional.items() if name != "additional_special_tokens"} | found
    return found


def add_declared(tokenizer: tokenizers.Tokenizer, folder: Path, config: Json, special: Json) -> list[Any]:
    """Add the tokens that are declared and missing, and mark those as special that have a name, such as eos_token.

    Returns (content, flags) of the changed tokens, empty if tokenizer.json has all.

    special  the result of `special_tokens`: tokens without declared ids
    Raises CheckpointError for malformed declarations, and for a missing token that does not get its declared id.
    """
    names = [name for key, name in special.items() if key != "additional_special_tokens"]
    names += special.get("additional_special_tokens", [])
    present = {_facts(token) for token in tokenizer.get_added_tokens_decoder().values()}
    declared = _declared(folder, config, names, {content for content, *_ in present})
    missing = {index: token for index, token in sorted(declared.items()) if _facts(token) not in present}
    known = {content for content, *_ in present} | {token.content for token in missing.values()}
    others = [name for name in dict.fromkeys(names) if name and name not in known]
    try:
        added = [*missing.values(), *(AddedToken(name, special=True, normalized=False) for name in others)]
    except UnicodeEncodeError:
        raise CheckpointError(f"{shown(folder)}: a special token in tokenizer_config.json is no valid text; correct it") from None
    if added:
        tokenizer.add_tokens(added)
    for index, token in missing.items():
        if (found := tokenizer.token_to_id(token.content)) != index:
            raise CheckpointError(
                f"{shown(folder)}: the token {as_json(token.content)} is declared with id {index}, but with tokenizer.json it "
                f"has {found}; save the tokenizer again with transformers"
            )
    named = {special[key] for key in _NAMED if key in special}
    plain = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content in named and not token.special]
    if plain:
        tokenizer.add_special_tokens([_token(**{**_flags(token), "special": True}) for token in plain])
    return [_facts(token) for token in (*added, *plain)]


def _declared(folder: Path, config: Json, names: Collection[str], present: Collection[str]) -> dict[int, AddedToken]:
    """Id -> token of added_tokens_decoder, or else of the older added_tokens.json, which has no flags."""
    try:
        if config.get(_DECLARED) is not None:
            return {int(index): _token(**value) for index, value in config[_DECLARED].items()}
        older = {name: index for name, index in read_json(folder / "added_tokens.json").items() if name not in present}
        return {int(index): _token(name, normalized=name not in names, special=name in names) for name, index in older.items()}
    except (TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{shown(folder)}: {_DECLARED} or added_tokens.json is malformed; download it again") from None


def _token(content: str, **flags: Any) -> AddedToken:
    return AddedToken(content, **{key: bool(value) for key, value in flags.items() if key in _FLAGS})


def _flags(token: AddedToken) -> dict[str, Any]:
    return {name: getattr(token, name) for name in ("content", *_FLAGS)}


def _facts(token: AddedToken) -> tuple[Any, ...]:
    return tuple(_flags(token).values())


def _content(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
