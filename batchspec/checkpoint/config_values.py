"""Reads config.json and similar files; every value is checked for its type and range, or refused in one line that names it.

Other modules get a `ConfigReader` instead of the JSON, so that no key can be read unchecked: a number needs an entry with its
range, in the tables below or in its family's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchspec.console.text import as_json
from batchspec.errors import CheckpointError
from batchspec.process.local_files import fault_of, is_folder, is_given, open_regular

Json = Mapping[str, Any]
Ranges = Mapping[str, tuple[int, int]]
"""key -> lowest and highest value. Of a list of integers: of each."""
MAX_BYTES = 100_000_000
"""Maximum size of a JSON file of a checkpoint; the largest known ones, tokenizers with their vocabulary, have a third of that."""

INTEGERS: Ranges = {
    "num_hidden_layers": (1, 4096),
    "hidden_size": (1, 2**20),
    "target_hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**24),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (1, 2**16),
    "rotary_dim": (2, 2**16),
    "vocab_size": (1, 2**26),
    "draft_vocab_size": (1, 2**26),
    "truncated_vocab_size": (1, 2**26),
    "max_position_embeddings": (1, 2**31 - 1),
    "original_max_position_embeddings": (1, 2**31 - 1),
    "sliding_window": (1, 2**31 - 1),
    "max_window_layers": (0, 2**31 - 1),
    "num_aux_hidden_states": (1, 4096),
    "eagle_aux_hidden_state_layer_ids": (0, 4096),
    "layer_ids": (0, 4096),
    "eos_token_id": (0, 2**31 - 1),
    "mask_token_id": (0, 2**31 - 1),
    "num_labels": (1, 2**16),
    "max_seq_length": (1, 2**31 - 1),
    "pad_token_id": (-1, 2**31 - 1),
    "pard_token": (0, 2**31 - 1),
    "ptd_token_id": (0, 2**31 - 1),
}
"""key -> lowest and highest value; in a list of integers, of each element. A family adds keys of its own
(`ConfigReader.ranged`)."""

NUMBERS: dict[str, tuple[float, float]] = {
    "rms_norm_eps": (1e-20, 1.0),
    "rope_theta": (1.01, 1e15),
    "factor": (0.01, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "attn_factor": (1e-3, 1e3),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
    "swiglu_alpha": (1e-3, 1e3),
    "swiglu_limit": (1e-3, 1e6),
    "partial_rotary_factor": (0.0, 1.0),
    "short_factor": (1e-3, 1e6),
    "rope_local_base_freq": (1.01, 1e15),
    "query_pre_attn_scalar": (1e-3, 1e9),
    "final_logit_softcapping": (1e-3, 1e6),
    "lora_alpha": (0.0, 1e6),
    "routed_scaling_factor": (1e-3, 1e3),
    "embedding_multiplier": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "attention_multiplier": (1e-6, 1e6),
    "logits_scaling": (1e-6, 1e6),
    "llama_4_scaling_beta": (0.0, 1e3),
    "block_ffn_dim_multiplier": (1e-3, 1e3),
    **dict.fromkeys(
        (
            "lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier",
            "ssm_out_multiplier", "ssm_multipliers", "mlp_multipliers",
        ),
        (1e-6, 1e6),
    ),
}
"""key -> lowest and highest value, in a list of each; all values are finite."""


class ConfigReader:
    """One JSON object of a checkpoint. A key that is null counts as missing.

    Every method raises CheckpointError, in one line, with the file, the key, its value and what is allowed. A reader and
    those made from it share a record of the keys that were read, for `unread`.
    """

    def __init__(
        self, values: Json, where: str, *, prefix: str = "", integers: Ranges = INTEGERS, asked: set[str] | None = None,
        also: tuple[str, ...] = (), names: Mapping[str, str] | None = None,
    ) -> None:
        """where   the file, for messages; prefix  of its keys, where the object is a part of another one
        integers   the ranges of integers, where a family adds some to INTEGERS
        asked      the keys that were read so far, with prefix; it grows
        also       the prefixes of the objects whose values `over` has added
        names      keys that this file has under another name -> that name
        """
        self._values, self.where, self._prefix, self._integers = values, where, prefix, integers
        self._asked: set[str] = set() if asked is None else asked
        self._also, self._names = also, names or {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: str) -> bool:
        self._get(key)
        return self._names.get(key, key) in self._values

    def given(self, key: str) -> bool:
        return self._get(key) is not None

    def unread(self) -> list[tuple[str, Any]]:
        """The names and values of keys that nothing has read.

        A nested object is one entry if none of its keys was read; otherwise each of its unread keys is named `object.key`.
        """
        found: list[tuple[str, Any]] = []
        for key, value in self._values.items():
            name = f"{self._prefix}{key}"
            if name not in self._asked:
                found.append((name, value))
            elif isinstance(value, Mapping) and any(asked.startswith(f"{name}.") for asked in self._asked):
                found += self.part(key).unread()
        return found

    def replaced(self, **values: Any) -> ConfigReader:
        """The same with other values of some keys."""
        names = {key: name for key, name in self._names.items() if key not in values}
        return self._with({**self._values, **values}, names=names)

    def filled(self, defaults: Json) -> ConfigReader:
        """The same with these values for keys that are not there; one that is there and null stays null."""
        return self._with({**defaults, **self._values})

    def over(self, other: ConfigReader) -> ConfigReader:
        """The same with the values of another object for keys that are not there."""
        return self._with({**other._values, **self._values}, also=(*self._also, other._prefix))

    def under(self, outer: ConfigReader, keys: Iterable[str]) -> ConfigReader:
        """The same with the values of the object that this one is a part of for those of `keys` that it gives."""
        return self.replaced(**{key: outer._values[key] for key in keys if outer.given(key)})

    def ranged(self, integers: Ranges) -> ConfigReader:
        """The same with the ranges of further keys."""
        return self._with(self._values, integers={**self._integers, **integers})

    def renamed(self, names: Mapping[str, str]) -> ConfigReader:
        """The same, with keys read under other names where the file has these. names: key -> the other name."""
        return self._with(self._values, names={key: name for key, name in names.items() if name in self._values})

    def _with(self, values: Json, **changes: Any) -> ConfigReader:
        own = {
            "prefix": self._prefix, "integers": self._integers, "asked": self._asked, "also": self._also, "names": self._names,
        }
        return ConfigReader(values, self.where, **{**own, **changes})

    def _get(self, key: str) -> Any:
        name = self._names.get(key, key)
        self._asked.update(f"{prefix}{name}" for prefix in (self._prefix, *self._also))
        return self._values.get(name)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; refused if it is missing and has no default."""
        value = self._get(key)
        return default if value is None and default is not None else self._integer(key, value)

    def number(self, key: str, default: float | None = None) -> float:
        """A number; refused if it is missing and has no default."""
        value, (low, high) = self._get(key), NUMBERS[key]
        if value is None and default is not None:
            return default
        if not _is_number(value, low, high):
            raise self._wrong(key, value, f"a number in {low:g} .. {high:g}")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of so many numbers; refused if it is missing."""
        value, (low, high) = self._get(key), NUMBERS[key]
        if not (isinstance(value, list) and len(value) == count and all(_is_number(item, low, high) for item in value)):
            raise self._wrong(key, value, f"a list of {count} numbers in {low:g} .. {high:g}")
        return tuple(float(item) for item in value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key)
        if not isinstance(value, bool | None):
            raise self._wrong(key, value, "true or false")
        return default if value is None else value

    def text(self, key: str, default: str = "") -> str:
        value = self._get(key)
        if not isinstance(value, str | None):
            raise self._wrong(key, value, "a string")
        return default if value is None else value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings; None if it is missing."""
        value = self._get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self._wrong(key, value, "a list of strings")
        return None if value is None else tuple(value)

    def nested_texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or of lists of strings, which are joined; None if it is missing."""
        value = self._get(key)
        lists = value if isinstance(value, list) and all(isinstance(item, list) for item in value) else [value]
        if value is not None and not all(isinstance(own, list) and all(isinstance(x, str) for x in own) for own in lists):
            raise self._wrong(key, value, "a list of strings, or of lists of strings")
        return None if value is None else tuple(text for own in lists for text in own)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers; None where it is missing."""
        value, (low, high) = self._get(key), self._integers[key]
        if value is not None and not (isinstance(value, list) and all(_is_integer(item, low, high) for item in value)):
            raise self._wrong(key, value, f"a list of integers in {low} .. {high}")
        return None if value is None else tuple(value)

    def integer_or_integers(self, key: str) -> tuple[int, ...]:
        """One integer or a list of them; empty if it is missing."""
        if self.given(key) and not isinstance(self._get(key), list):
            return (self.integer(key),)
        return self.integers(key) or ()

    def part(self, key: str) -> ConfigReader:
        """A nested object; an empty one if it is missing."""
        value = self._get(key)
        if not isinstance(value, Mapping | None):
            raise self._wrong(key, value, "an object")
        return ConfigReader(value or {}, self.where, prefix=f"{self._prefix}{key}.", asked=self._asked)

    def unchecked(self, part: str, key: str) -> Any:
        """The unchecked value of a key of a nested object that is not used, for a comparison; None if it is missing."""
        found = self._values.get(part)
        return found.get(key) if isinstance(found, Mapping) else None

    def objects(self) -> list[str]:
        """Keys whose values are objects."""
        return [key for key, value in self._values.items() if isinstance(value, Mapping)]

    def differs(self, key: str, *neutral: Any) -> bool:
        """Whether the value of an unsupported key is none of `neutral`, the values that need no support."""
        return self._get(key) not in neutral

    def shown(self, key: str, *, prefix: bool = True) -> str:
        """key=value, for messages; with the name of the object that it is in, unless prefix is False."""
        name = self._names.get(key, key)
        return f"{self._prefix if prefix else ''}{name}={as_json(self._values.get(name))}"

    def refusal(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {problem}")

    def _integer(self, key: str, value: Any) -> int:
        low, high = self._integers[key]
        if not _is_integer(value, low, high):
            raise self._wrong(key, value, f"an integer in {low} .. {high}")
        return int(value)

    def _wrong(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return self.refusal(f"{self._prefix}{self._names.get(key, key)} is {as_json(value)}; it must be {wanted}")


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high  # NaN is in no range


def _is_integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is no such file. Raises CheckpointError, in one line, if it is unreadable or not an object."""
    if not has_file(path):
        return {}
    where, text = shown(path), read_text(path)
    try:
        value = json.loads(text)
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply; download the file again") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a {type(value).__name__}, not an object; download the file again")
    return value


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within this block, raise an OSError of a checkpoint's file in one line: StorageError if the disk failed, else
    CheckpointError."""
    try:
        yield
    except OSError as error:
        where, why = shown(path), error.strerror or error
        refusal = CheckpointError(f"{where}: cannot be read ({why}); correct its permissions or path, or download it again")
        raise fault_of(error, where, refusal) from None


def has_file(path: Path) -> bool:
    """Whether a checkpoint has this file. Raises as `readable` if the name is there and leads to no file."""
    with readable(path):
        return is_given(path)


def has_folder(path: Path, key: str) -> bool:
    """Whether there is a folder of this name, which the configuration key gave. Raises as `has_file` if it leads to no folder."""
    try:
        return is_folder(path)
    except OSError as error:
        where = f"{key}={path}"
        raise fault_of(error, where, CheckpointError(f"{where}: {error.strerror or error}; give a folder")) from None


def read_text(path: Path) -> str:
    """A text file of a checkpoint. Raises as `readable`, and CheckpointError if it is too large or not UTF-8."""
    where = shown(path)
    try:
        with readable(path), open_regular(path) as file:
            if (size := path.stat().st_size) > MAX_BYTES:
                raise CheckpointError(f"{where}: {size:,} bytes, more than the maximum of {MAX_BYTES:,}; download it again")
            return file.read(MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}; download the file again") from None


def no_tokenizer(folder: Path) -> CheckpointError:
    """The refusal of a model folder without tokenizer.json."""
    advice = "tekken.json is not read; add a tokenizer.json made from it, as converted copies of the model have"
    if not has_file(folder / "tekken.json"):
        advice = "save the tokenizer in the fast format"
    return CheckpointError(f"{shown(folder)}: no tokenizer.json; {advice}")


def shown(path: Path) -> str:
    """A path for messages: `owner/name/config.json` for a file in the hub's cache, any other path unchanged."""
    parts = path.parts
    for i, part in enumerate(parts[:-2]):
        if part.startswith("models--") and parts[i + 1] == "snapshots":
            return "/".join([*part.split("--")[1:], *parts[i + 3 :]])
    return str(path)
