"""Settings of a row besides its prompt: its own values, or else the job's. All methods raise BadRow for bad values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from batchspec.config.key import value_of
from batchspec.config.row_options import ROW_OPTIONS
from batchspec.config.schema import RunConfig
from batchspec.data.dataset.columns import ColumnMap
from batchspec.errors import BadRow, ConfigError
from batchspec.packing.bad_words import read_bad_words
from batchspec.packing.cells import number_option, read_biases
from batchspec.packing.no_repeat_ngram import read_no_repeat_ngram
from batchspec.records import MAX_STOP_IDS, Ids, Repetition, SamplingParams, Thinking
from batchspec.text.thinking import find_think_tokens

if TYPE_CHECKING:
    from batchspec.model.spec import ModelSpec
    from batchspec.text.tokenizer import Tokenizer

NUMBERS = {name: option for name, option in ROW_OPTIONS.items() if option.key.startswith("decode.") and option.is_number}
"""Numbers of `decode` that a row may replace by its own."""
READERS: Mapping[str, Callable[[Any, Tokenizer | None, int], Any]] = {
    "logit_bias": read_biases, "bad_words": read_bad_words, "no_repeat_ngram": read_no_repeat_ngram,
}
"""Options that are more than a number: what makes their value in `SamplingParams` of a row's cell, or of the key or group of that
name in `decode`, for this tokenizer and number of tokens. It raises BadRow."""
SAMPLING = tuple(field.name for field in fields(SamplingParams))
"""The options that choose tokens: each is one of NUMBERS or of READERS."""


class RowSettings:
    """Limits, sampling, stops, thinking budget, log-probabilities and adapter of each row.

    logprobs_of_all  whether output.logprobs is of all rows; else of those that ask for log-probabilities
    Raises ConfigError if the job's own values do not fit the model or the tokenizer.
    """

    def __init__(
        self, config: RunConfig, columns: ColumnMap, spec: ModelSpec, tokenizer: Tokenizer | None, *, logprobs_of_all: bool = True
    ) -> None:
        self.decode, self.tokenizer, self.vocab_size = config.decode, tokenizer, spec.vocab_size
        special_ids = tokenizer.special_ids if tokenizer else {}
        self.special_ids: Mapping[str, int] = {text: token for text, token in special_ids.items() if token < self.vocab_size}
        self.think = find_think_tokens(config.model.think_tokens, tokenizer, spec.vocab_size)
        if self.think is not None:  # these are not in the answer's text, so such a stop string must become a stop id
            self.special_ids |= self.think.tokens()
        of_answer = self.think.stop_ids if self.think is not None else ()
        eos = set() if self.decode.ignore_eos else {*spec.eos_ids, *(tokenizer.eos_ids if tokenizer else ()), *of_answer}
        outside = [token for token in self.decode.stop_ids if token >= self.vocab_size]
        if outside:
            raise ConfigError(f"decode.stop_ids={outside} exceed the vocabulary of {self.vocab_size} tokens; remove them")
        # A tokenizer may have more tokens than the model; these are never drawn.
        self.end_ids = {token for token in eos if token < self.vocab_size} | set(self.decode.stop_ids)
        if len(self.end_ids) > MAX_STOP_IDS:
            raise ConfigError(
                f"decode.stop_ids={self.decode.stop_ids} and the model's {len(eos)} EOS ids are {len(self.end_ids)} stop ids, "
                f"at most {MAX_STOP_IDS} fit; remove some or use decode.stop"
            )
        self.numbers = {name: value_of(config, option.key) for name, option in NUMBERS.items()}
        """The job's own values of NUMBERS."""
        self.read = {name: self._of_job(name, getattr(self.decode, name)) for name in READERS}
        """The job's own values of the options of READERS."""
        self.most_logprobs = config.output.logprobs
        """Of how many of the likeliest tokens the job computes log-probabilities; None: of none."""
        self.usual_logprobs = self.most_logprobs if logprobs_of_all else None
        detection = self.decode.repetition_detection
        self.repetition = Repetition(**asdict(detection)) if detection.max_pattern_size else None
        self.adapters = {name: number for number, name in enumerate(config.model.adapters, 1)}
        self.usual_adapter = 1 if spec.lora is not None and spec.lora.of_all_rows else 0
        if (column := columns.get("adapter")) is not None and not self.adapters:
            raise ConfigError(
                f"column {column!r} names LoRA adapters, and model.adapters has none; give them, model.adapters={{NAME:FOLDER}}, "
                "or hide the column: input.columns.adapter=null"
            )
        self.closing = self._closing()

    def _closing(self) -> tuple[int, ...]:
        """The tokens that are forced when a thought has used up its budget, before those that end the thought."""
        text, budget = self.decode.thinking_closing, self.decode.thinking_token_budget
        if self.think is None:
            if budget is not None:
                raise ConfigError(
                    f"decode.thinking_token_budget={budget} needs think tokens, and the tokenizer has no known ones; "
                    "name them, model.think_tokens=[<think>,</think>], or remove the key"
                )
            return ()
        if text and self.tokenizer is None:
            raise ConfigError("decode.thinking_closing needs a tokenizer, and the model folder has none; remove the key")
        ids = self.tokenizer.encode_part(text) if text and self.tokenizer is not None else []
        if {self.think.begin_id, self.think.end_id, *self.think.tokens().values(), *self.end_ids} & set(ids):
            raise ConfigError(f"decode.thinking_closing={text!r} holds a think token or one that ends the output; take it out")
        return tuple(ids)

    def _of_job(self, name: str, value: Any) -> Any:
        try:
            return self._read(name, value)
        except BadRow as error:
            raise ConfigError(f"decode.{error}") from None

    def _read(self, name: str, value: Any) -> Any:
        return READERS[name](value, self.tokenizer, self.vocab_size)

    def values(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers of a row: its own, or else the job's."""
        values = dict(self.numbers)
        for name in NUMBERS:
            if (own := number_option(name, row)) is not None:
                values[name] = own
        if values["min_new_tokens"] > values["max_new_tokens"] and row.get("min_new_tokens") is not None:
            said = f"min_new_tokens={values['min_new_tokens']} exceeds max_new_tokens={values['max_new_tokens']}; lower it"
            raise BadRow("bad_parameter", said)
        return values

    def sampling(self, values: Mapping[str, Any], row: Mapping[str, Any]) -> SamplingParams:
        """How the row's tokens are chosen. Raises BadRow.

        values  the row's numbers, as `values` returns them
        """
        read = {name: usual if row.get(name) is None else self._read(name, row[name]) for name, usual in self.read.items()}
        options = {**values, **read, "top_k": min(values["top_k"], self.vocab_size)}
        return SamplingParams(**{name: options[name] for name in SAMPLING})

    def stops(self, own: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Stop strings to search for in the text, and stop ids. A stop string that is a special token becomes a stop id.

        own  the row's cell; None: the job's decode.stop
        """
        strings: list[Any] = list(self.decode.stop)
        if own is not None:
            strings = [own] if isinstance(own, str) else own if isinstance(own, list) else [None]
            if not all(isinstance(item, str) and item for item in strings):
                raise BadRow("bad_parameter", f"stop={own!r} must hold non-empty strings; correct it or leave it null")
            if strings and self.tokenizer is None:
                raise BadRow("bad_parameter", f"stop={own!r} needs a tokenizer, and the model folder has none; leave it null")
        ids = self.end_ids | {self.special_ids[item] for item in strings if item in self.special_ids}
        if len(ids) > MAX_STOP_IDS:
            raise BadRow("bad_parameter", f"stop={own!r} makes {len(ids)} stop ids, at most {MAX_STOP_IDS} fit; shorten the list")
        return tuple(item for item in strings if item not in self.special_ids), tuple(sorted(ids))

    def adapter(self, own: Any) -> int:
        """The number of the row's LoRA adapter; 0: none."""
        if own is None:
            return self.usual_adapter
        number = self.adapters.get(own) if isinstance(own, str) else None
        if number is None:
            known = ", ".join(list(self.adapters)[:20])
            raise BadRow("bad_parameter", f"adapter={own!r} is none of model.adapters ({known}); correct it or leave it null")
        return number

    def num_logprobs(self, row: Mapping[str, Any]) -> int | None:
        """Of how many of the likeliest tokens the row's log-probabilities are written; None: none are."""
        asked, most = number_option("num_logprobs", row), self.most_logprobs
        if asked is None:
            return self.usual_logprobs
        if most is None or asked > most:
            said = "null" if most is None else most
            raise BadRow("bad_parameter", f"num_logprobs={asked} exceeds output.logprobs={said}; set output.logprobs={asked}")
        return int(asked)

    def thinking(self, prompt_ids: Ids, values: Mapping[str, Any], row: Mapping[str, Any]) -> Thinking | None:
        """The row's reasoning and its budget; None if the model has no think tokens.

        values  the row's numbers, as `values` returns them
        """
        budget = values["thinking_token_budget"]
        if self.think is None and row.get("thinking_token_budget") is not None:
            said = f"thinking_token_budget={budget} needs think tokens, and the tokenizer has none; leave it null"
            raise BadRow("bad_parameter", said)
        return None if self.think is None else self.think.of_row(prompt_ids, budget, self.closing)
