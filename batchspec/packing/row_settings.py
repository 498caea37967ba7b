"""Settings of a row besides its prompt: its own values, or else the job's. All methods raise BadRow for bad values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchspec.config.schema import KEYS, RunConfig
from batchspec.data.dataset.columns import ColumnMap
from batchspec.errors import ConfigError
from batchspec.packing.cells import BadRow, bias_cell, checked_biases, number_cell
from batchspec.records import MAX_BAD_WORD, MAX_BAD_WORDS, MAX_STOP_IDS, Ids, Repetition, SamplingParams, Thinking
from batchspec.text.thinking import find_think_tokens

if TYPE_CHECKING:
    from batchspec.model.spec import ModelSpec
    from batchspec.text.tokenizer import Tokenizer

SAMPLING = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "n",
)
"""Numbers of `decode` that a row may replace by its own."""


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
        try:
            self.logit_bias = checked_biases(self.decode.logit_bias, self.vocab_size)
        except BadRow as error:
            raise ConfigError(f"decode.{error}") from None
        try:
            self.bad_words = self._bad_words(list(self.decode.bad_words))
        except BadRow as error:
            raise ConfigError(f"decode.{error}") from None
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

    def values(self, row: dict[str, Any]) -> dict[str, float]:
        """The sampling values of a row: its own, or else the job's."""
        values: dict[str, float] = {}
        for name in SAMPLING:
            own, usual = row.get(name), getattr(self.decode, name)
            if own is None:
                values[name] = usual
                continue
            values[name] = number_cell(name, own, whole=isinstance(usual, int))
            if problem := KEYS[f"decode.{name}"].violation(name, values[name]):
                raise BadRow("bad_parameter", problem)
        if values["min_new_tokens"] > values["max_new_tokens"] and row.get("min_new_tokens") is not None:
            said = f"min_new_tokens={values['min_new_tokens']} exceeds max_new_tokens={values['max_new_tokens']}; lower it"
            raise BadRow("bad_parameter", said)
        return values

    def sampling(self, values: Mapping[str, float], row: Mapping[str, Any]) -> SamplingParams:
        """How the row's tokens are chosen. Raises BadRow.

        values  the row's numbers, as `values` returns them
        """
        return SamplingParams(
            temperature=values["temperature"], top_k=min(int(values["top_k"]), self.vocab_size),
            top_p=values["top_p"], min_p=values["min_p"],
            repetition_penalty=values["repetition_penalty"], presence_penalty=values["presence_penalty"],
            frequency_penalty=values["frequency_penalty"],
            logit_bias=bias_cell(row, self.logit_bias, self.vocab_size),
            bad_words=self.bad_words if (own := row.get("bad_words")) is None else self._bad_words(own),
        )

    def _bad_words(self, words: Any) -> tuple[tuple[int, ...], ...]:
        """The token sequences of these texts: each as at the beginning of a text, and as after a space."""
        texts = [words] if isinstance(words, str) else words
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise BadRow("bad_parameter", f"bad_words={words!r} must be texts that are not empty; correct it or leave it out")
        if texts and self.tokenizer is None:
            raise BadRow("bad_parameter", f"bad_words={words!r} needs a tokenizer, and the model folder has none; leave it out")
        found: dict[tuple[int, ...], None] = {}
        for text in texts:
            assert self.tokenizer is not None
            both = [tuple(self.tokenizer.encode_part(f"{space}{text.lstrip()}")) for space in ("", " ")]
            if max(map(len, both)) > MAX_BAD_WORD:
                said = f"bad_words: {text!r} has {max(map(len, both))} tokens, at most {MAX_BAD_WORD} are supported; shorten it"
                raise BadRow("bad_parameter", said)
            found |= dict.fromkeys(ids for ids in both if ids and max(ids) < self.vocab_size)
        if len(found) > MAX_BAD_WORDS:
            said = f"bad_words has {len(found)} token sequences, at most {MAX_BAD_WORDS} are supported; shorten the list"
            raise BadRow("bad_parameter", said)
        return tuple(found)

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

    def num_logprobs(self, own: Any) -> int | None:
        """Of how many of the likeliest tokens the row's log-probabilities are written; None: none are.

        own  the row's cell of num_logprobs; None: the job's
        """
        if own is None:
            return self.usual_logprobs
        asked, most = int(number_cell("num_logprobs", own, whole=True)), self.most_logprobs
        if problem := KEYS["output.logprobs"].violation("num_logprobs", asked):
            raise BadRow("bad_parameter", problem)
        if most is None or asked > most:
            said = "null" if most is None else most
            raise BadRow("bad_parameter", f"num_logprobs={asked} exceeds output.logprobs={said}; set output.logprobs={asked}")
        return asked

    def thinking(self, prompt_ids: Ids, own: Any) -> Thinking | None:
        """The row's reasoning and its budget; None if the model has no think tokens.

        own  the row's cell of thinking_token_budget; None: the job's
        """
        think, budget = self.think, self.decode.thinking_token_budget
        if own is not None:
            budget = int(number_cell("thinking_token_budget", own, whole=True))
            problem = KEYS["decode.thinking_token_budget"].violation("thinking_token_budget", budget)
            if problem or think is None:
                said = f"thinking_token_budget={budget} needs think tokens, and the tokenizer has none; leave it null"
                raise BadRow("bad_parameter", problem or said)
        if think is None:
            return None
        return think.of_row(prompt_ids, budget, self.closing)
