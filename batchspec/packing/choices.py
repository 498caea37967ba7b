"""decode.score=choices: the texts that are scored after a row's prompt, and their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchspec.config.checks import check_choices_to_score
from batchspec.config.schema import RunConfig
from batchspec.data.dataset.columns import ColumnMap
from batchspec.errors import ConfigError
from batchspec.packing.cells import BadRow
from batchspec.packing.constraints import choice_cell
from batchspec.records import Choice, Ids
from batchspec.text.thinking import ThinkTokens

if TYPE_CHECKING:
    from batchspec.text.tokenizer import Tokenizer


class Choices:
    """The choices of each row: its own, from the column `choice`, or else the job's.

    Raises ConfigError if neither the key nor a column gives any, and for a model that begins answers with more than their text.
    """

    def __init__(
        self, config: RunConfig, columns: ColumnMap, tokenizer: Tokenizer | None, think: ThinkTokens | None
    ) -> None:
        if not config.decode.choice and columns.get("choice") is None:
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

    def of_row(self, own: Any) -> tuple[Choice, ...]:
        """own: the row's cell. Raises BadRow."""
        if own is None:
            if self._of_job is None:
                raise BadRow("bad_parameter", "choice is null, and there is no decode.choice; give the row a list")
            return self._of_job
        texts = choice_cell(own)
        try:
            check_choices_to_score(texts)
            return self._encoded(texts)
        except ConfigError as error:
            raise BadRow("bad_parameter", str(error).removeprefix("decode.")) from None

    def check_prompt(self, prompt_ids: Ids) -> None:
        """Raises BadRow for a prompt that ends inside a reasoning block, which a choice would continue."""
        if self._think is not None and self._think.of_row(prompt_ids, None, ()).opened:
            raise BadRow(
                "bad_parameter",
                "the prompt ends inside a reasoning block, and choices are scored as answers; switch reasoning off, e.g. "
                "input.template_kwargs={enable_thinking: false}, or end the block in the prompt",
            )

    def _encoded(self, texts: list[str]) -> tuple[Choice, ...]:
        choices = tuple(self._choice(text, tuple(self._tokenizer.encode_part(text))) for text in texts)
        by_tokens = {choice.token_ids: choice.text for choice in choices}
        if () in by_tokens or len(by_tokens) < len(choices):
            raise ConfigError(f"decode.choice={texts} holds texts with the same tokens, or with none; remove them")
        return choices

    def _choice(self, text: str, token_ids: tuple[int, ...]) -> Choice:
        return Choice(text=text, token_ids=token_ids, length=len(token_ids) if self._norm == "tokens" else 1)
