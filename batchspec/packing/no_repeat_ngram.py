"""The n-grams that do not come twice in a row's output, by `no_repeat_ngram` of a row or of the job."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from batchspec.config.decode_schema import NoRepeatNgramConfig
from batchspec.config.schema import KEYS
from batchspec.data.dataset.json_text import BadJson, called, parse
from batchspec.errors import BadRow
from batchspec.packing.cells import number_cell
from batchspec.records import MAX_LISTED, NgramRule

if TYPE_CHECKING:
    from batchspec.text.tokenizer import Tokenizer

NAME = "no_repeat_ngram"
USUAL = asdict(NoRepeatNgramConfig())
"""The values of keys that a row leaves out: vLLM's."""


def read_no_repeat_ngram(given: Any, tokenizer: Tokenizer | None, vocab_size: int) -> NgramRule | None:
    """The rule of a row's cell, an integer or a map, or of the job's group; None if it is off. Raises BadRow."""
    values = USUAL | (asdict(given) if isinstance(given, NoRepeatNgramConfig) else _of_cell(given))
    size, window = (_number(name, values[name]) for name in ("ngram_size", "window_size"))
    listed = _listed(values["whitelist_token_ids"], vocab_size)
    if not size:
        return None
    if window < size:
        raise BadRow("bad_parameter", f"{NAME}.window_size={window} is below ngram_size={size}, so that no n-gram fits; raise it")
    return size, window, listed


def _of_cell(given: Any) -> dict[str, Any]:
    """The keys of a cell that are not null."""
    try:
        value = parse(given) if isinstance(given, str) else given
    except BadJson as error:
        raise BadRow("bad_parameter", f"{NAME} is text, and {error}; correct it or leave it null") from error
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"ngram_size": value}
    if not isinstance(value, dict):
        said = f"{NAME} must be an integer or an object, not {called(value)}; write 20, or {{\"ngram_size\": 20}}"
        raise BadRow("bad_parameter", said)
    names = [field.name for field in fields(NoRepeatNgramConfig)]
    if unknown := [name for name in value if name not in names]:
        raise BadRow("bad_parameter", f"{NAME} has {unknown[0]!r}, which is none of {', '.join(names)}; take it out")
    found = {name: item for name, item in value.items() if item is not None}
    if "ngram_size" not in found:
        raise BadRow("bad_parameter", f"{NAME} has no ngram_size, without which it forbids nothing; give it, 0 is off")
    return found


def _number(name: str, value: Any) -> int:
    number = int(number_cell(f"{NAME}.{name}", value, whole=True))
    if problem := KEYS[f"decode.{NAME}.{name}"].violation(f"{NAME}.{name}", number):
        raise BadRow("bad_parameter", problem)
    return number


def _listed(value: Any, vocab_size: int) -> tuple[int, ...]:
    """The tokens that may complete an n-gram again."""
    name = f"{NAME}.whitelist_token_ids"
    if not isinstance(value, list):
        raise BadRow("bad_parameter", f"{name} must be a list of token ids, not {called(value)}; correct it or leave it out")
    found = sorted({int(number_cell(name, item, whole=True)) for item in value})
    if found and not 0 <= found[0] <= found[-1] < vocab_size:
        wrong = found[0] if found[0] < 0 else found[-1]
        raise BadRow("bad_parameter", f"{name} names token {wrong}, outside the vocabulary 0 .. {vocab_size - 1}; remove it")
    if len(found) > MAX_LISTED:
        raise BadRow("bad_parameter", f"{name} has {len(found)} tokens, at most {MAX_LISTED} are supported; shorten the list")
    return tuple(found)
