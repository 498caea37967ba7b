"""decode.score=choices: how likely the model continues each prompt with each of some texts, and the likeliest as the answer."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from batchspec.config.schema import OutputConfig, RunConfig
from batchspec.data.dataset.json_text import BadJson, parse
from batchspec.errors import BadRow, ConfigError
from batchspec.records import Choice, Completion, Ids
from batchspec.request_stream import RequestStream
from batchspec.tasks.base import Cells, Reads, Runs, Task, TaskRows
from batchspec.tasks.choices import steps_with_choices

if TYPE_CHECKING:
    from batchspec.text.thinking import ThinkTokens
    from batchspec.text.tokenizer import Tokenizer


def choice_cell(choices: Any) -> list[str]:
    """The texts of a cell of the column `choice`, a list or JSON text. Raises BadRow."""
    try:
        choices = parse(choices) if isinstance(choices, str) else choices
    except BadJson as error:
        raise BadRow("bad_parameter", f"choice is text, and {error}; give a JSON list, or leave it null") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise BadRow("bad_parameter", "choice must be a list of strings, at least one; correct it or leave it null")
    return choices


def check_choices(choices: Sequence[str]) -> None:
    """Raises ConfigError for an empty text, or two equal ones, whose probabilities say nothing."""
    if "" in choices or len(set(choices)) < len(choices):
        wrong = "an empty text" if "" in choices else "a text twice"
        raise ConfigError(f"decode.choice={list(choices)} holds {wrong}; decode.score=choices compares different texts")


class ChoiceRows(TaskRows):
    """The choices of each row: its own, from the column `choice`, or else the job's.

    Raises ConfigError if neither the key nor a column gives any, and for a model that begins answers with more than their text.
    """

    def __init__(
        self, config: RunConfig, mapped: frozenset[str], tokenizer: Tokenizer | None, think: ThinkTokens | None
    ) -> None:
        if not config.decode.choice and "choice" not in mapped:
            raise ConfigError(
                "decode.score=choices needs the texts to score; give decode.choice=[yes,no], or map a column of lists, "
                "input.columns.choice=COLUMN"
            )
        if tokenizer is None:
            raise ConfigError("decode.score=choices needs a tokenizer, and the model folder has none")
        if think is not None and think.channels is not None:
            raise ConfigError(
                "decode.score=choices is not supported for models with channels (gpt-oss): an answer does not begin right after "
                "the prompt"
            )
        self._tokenizer, self._think, self._norm = tokenizer, think, config.decode.choice_norm
        self._of_job = self._encoded(config.decode.choice) if config.decode.choice else None

    def choices(self, row: Mapping[str, Any]) -> tuple[Choice, ...]:
        if (own := row.get("choice")) is None:
            if self._of_job is None:
                raise BadRow("bad_parameter", "choice is null, and there is no decode.choice; give the row a list")
            return self._of_job
        texts = choice_cell(own)
        try:
            check_choices(texts)
            return self._encoded(texts)
        except ConfigError as error:
            raise BadRow("bad_parameter", str(error).removeprefix("decode.")) from None

    def room(self, choices: tuple[Choice, ...], max_new_tokens: int) -> tuple[int, str]:
        longest = max(len(choice.token_ids) for choice in choices)
        return longest, f"a choice of {longest} tokens"

    def ids(self, prompt_ids: Ids) -> Ids:
        """Raises BadRow for a prompt that ends inside a reasoning block, which a choice would continue."""
        if self._think is not None and self._think.of_row(prompt_ids, None, ()).opened:
            raise BadRow(
                "bad_parameter",
                "the prompt ends inside a reasoning block, and choices are scored as answers; switch reasoning off, e.g. "
                "input.template_kwargs={enable_thinking: false}, or end the block in the prompt",
            )
        return prompt_ids

    def _encoded(self, texts: list[str]) -> tuple[Choice, ...]:
        choices = tuple(self._choice(text, tuple(self._tokenizer.encode_part(text))) for text in texts)
        by_tokens = {choice.token_ids: choice.text for choice in choices}
        if () in by_tokens or len(by_tokens) < len(choices):
            raise ConfigError(f"decode.choice={texts} holds texts with the same tokens, or with none; remove them")
        return choices

    def _choice(self, text: str, token_ids: tuple[int, ...]) -> Choice:
        return Choice(text=text, token_ids=token_ids, length=len(token_ids) if self._norm == "tokens" else 1)


def choice_probs(completion: Completion) -> list[dict[str, Any]] | None:
    """The cell of that column: of each text its share, and its log-probability; None in an error row."""
    if completion.choice_logprobs is None or completion.choice_probs is None:
        return None
    choices = zip(completion.choice_logprobs, completion.choice_probs, strict=True)
    return [{"choice": text, "prob": prob, "logprob": logprob} for (text, logprob), prob in choices]


class Choose(Task):
    """Column choice_probs; the column completion has the likeliest text. The prompt of a row is computed once."""

    name: ClassVar = "choose"
    asked: ClassVar = "decode.score=choices"
    reads: ClassVar = Reads.PROMPT_TOKENS
    reads_images: ClassVar = True
    has_answers: ClassVar = True
    what: ClassVar = "choices are scored"
    written: ClassVar = "scores"
    prompts: ClassVar = "prompts, each with its longest text,"
    tokens: ClassVar = "prompt and text"
    columns: ClassVar = frozenset({"choice_probs"})
    score_column: ClassVar = "choice_probs"
    keys_read: ClassVar = frozenset({"decode.choice", "decode.choice_norm"})
    cells_read: ClassVar = frozenset({"choice"})

    @property
    def cells(self) -> Cells:
        return {"choice_probs": choice_probs}

    def check(self, config: RunConfig) -> None:
        super().check(config)
        check_choices(config.decode.choice)

    def num_top(self, output: OutputConfig) -> int | None:
        return 0

    def rows(
        self, config: RunConfig, mapped: frozenset[str], tokenizer: Tokenizer | None, think: ThinkTokens | None
    ) -> TaskRows:
        return ChoiceRows(config, mapped, tokenizer, think)

    def identity(self, config: RunConfig) -> dict[str, Any]:
        return {"decode.choice": config.decode.choice}

    def steps(self, engine: Runs, requests: RequestStream) -> Generator[list[Completion]]:
        return steps_with_choices(engine, requests)

    def about(self, decode: Mapping[str, Any]) -> str:
        norm = decode.get("choice_norm", "none")
        return super().about(decode) + (f", choice_norm {norm}" if norm != "none" else "")
