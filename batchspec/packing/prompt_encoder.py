"""The token ids of a prompt: chat template, tokenizer, checks and truncation. Bad prompts raise BadRow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from batchspec.config.schema import COMPLETE, TEMPLATE_DATE, InputConfig
from batchspec.console.text import quoted
from batchspec.data.dataset.columns import IMAGES, ColumnMap
from batchspec.data.dataset.messages import FINAL, USUAL_SYSTEM, BadChat, Message, read_chat
from batchspec.data.dataset.openai_keys import OF_TEMPLATE, TEMPLATE_KWARGS
from batchspec.errors import BadRow, CapacityError, ConfigError, RendererKilled, TokenizerFails
from batchspec.images.pdf_page import PdfPage
from batchspec.packing.cells import NOT_WHOLE, json_cell
from batchspec.packing.prompt_images import Prompt, PromptImages
from batchspec.process.refusals import refusal
from batchspec.records import Ids
from batchspec.tasks.base import Parts
from batchspec.text.text_bytes import LongText

if TYPE_CHECKING:
    from batchspec.text.tokenizer import Tokenizer

_OF_CHATS = "system, tools, template_kwargs and final_assistant need a chat; set input.chat=true or leave them null"
GENERATION_PROMPT = "add_generation_prompt"
"""Variable of chat templates: whether they begin the assistant's answer after the last turn."""


class PromptEncoder:
    """Encodes prompt cells of the kind `columns.prompt_kind`: prompt, messages or prompt_ids.

    tokenizer  may be None for prompt_ids
    cuts_end   a prompt that is too long loses its end, unless it is to be skipped
    images     reads images of prompts; None: a prompt with an image is refused
    Raises ConfigError if prompts are chats, and the model has no chat template, or one that does not read what a key gives it.
    """

    def __init__(
        self, input: InputConfig, columns: ColumnMap, tokenizer: Tokenizer | None, *, vocab_size: int, max_len: int,
        cuts_end: bool = False, images: PromptImages | None = None,
    ) -> None:
        self._cuts_end = cuts_end and input.on_overlong != "skip"
        self.input, self.columns, self.tokenizer = input, columns, tokenizer
        self.vocab_size, self.max_len, self.images = vocab_size, max_len, images
        self.is_chat = columns.prompt_kind == "messages" or (columns.prompt_kind == "prompt" and input.chat)
        if self.is_chat and tokenizer is not None:
            _check_template(input, tokenizer)

    def encode(self, prompt: Any, row: Mapping[str, Any], max_prompt_tokens: int) -> Prompt:
        """A row's prompt: its token ids, int32 [prompt_len], are at least one and at most `max_prompt_tokens`.

        prompt  the prompt cell
        row     all cells; system, USUAL_SYSTEM, tools, template_kwargs, final_assistant and images are read
        max_prompt_tokens  tokens that max_new_tokens leaves for the prompt in max_len
        Raises BadRow for a prompt that cannot be encoded, or is too long and not to be truncated.
        """
        if isinstance(prompt, Parts):
            return Prompt(self._of_parts(prompt, max_prompt_tokens))
        images: list[bytes | PdfPage] = []
        if self.images is None and row.get(IMAGES) is not None:
            said = "the row has images, and the model's vision encoder is not loaded; set model.vision=true, or drop the row"
            raise BadRow("no_vision", said)
        ids = self._ids(prompt, row, max_prompt_tokens, images)
        found = Prompt(ids) if self.images is None else self.images.expanded(ids, images, row)
        if len(found.ids) <= max_prompt_tokens:
            return found
        if found.images:
            raise self._too_long_with_images(found, max_prompt_tokens)
        if self._cuts_end:
            return Prompt(self._beginning(ids, max_prompt_tokens))
        if self.input.on_overlong == "truncate":
            return Prompt(ids[-max_prompt_tokens:])
        raise self._too_long(f"{len(ids)} prompt tokens", max_prompt_tokens, ids)

    def _ids(self, prompt: Any, row: Mapping[str, Any], max_prompt_tokens: int, images: list[bytes | PdfPage]) -> Ids:
        """The token ids, of each image one. images: those of the row are appended, encoded."""
        if self.columns.prompt_kind == "prompt_ids":
            return self._checked_ids(prompt)
        chat = self.is_chat
        tools, final = json_cell(row, "tools", list), row.get("final_assistant")
        kwargs = json_cell(row, "template_kwargs", dict) or {}
        if not chat and (tools or kwargs or (row.get("system"), final) != (None, None)):
            raise BadRow("bad_parameter", _OF_CHATS)
        if final not in (None, *FINAL):
            said = f"final_assistant={quoted(final)} must be one of {', '.join(FINAL)}; correct it or leave it null"
            raise BadRow("bad_parameter", said)
        final = final or self.input.final_assistant
        turns = self._turns(prompt, row, final, images) if chat else []
        with _refused_as("chat template" if chat else "tokenizer"):
            ids = (
                self._encode_chat(turns, tools, kwargs, max_prompt_tokens, complete=final == COMPLETE)
                if chat
                else self._encode_text(prompt, max_prompt_tokens)
            )
        if not ids:
            raise BadRow("empty_prompt", "the prompt has no tokens; drop the row")
        return self._known(np.asarray(ids, dtype=np.int64), "the prompt's text")

    def _of_parts(self, parts: Parts, most: int) -> Ids:
        """The ids of a prompt of parts. Its text is tokenised by itself, and cut so that what comes after it stays."""
        assert self.tokenizer is not None
        cuts, text, (head, rest) = self.input.on_overlong == "truncate", f"{parts.head}{parts.rest}", parts.called
        room = max(1, most - len(parts.before) - len(parts.after))
        advice = f"shorten {rest}, raise model.max_len or set input.on_overlong=truncate"
        with _refused_as("tokenizer"):
            try:
                ids = self.tokenizer.encode_beginning(text, room) if cuts else self.tokenizer.encode(text, max_tokens=room)
            except LongText as error:
                raise self._overlong(f"{error}, more than model.max_len={self.max_len} leaves for it; {advice}") from None
            if len(ids) > room and cuts and len(self.tokenizer.encode_part(parts.head)) >= room:
                said = f"{head} leave no room for {rest} in model.max_len={self.max_len}; shorten them or raise model.max_len"
                raise BadRow("too_long", said)
        whole = np.array([*parts.before, *(ids[:room] if cuts else ids), *parts.after], np.int64)
        found = self._known(whole, "the prompt's text")
        if len(found) > most:
            raise self._overlong(f"{len(found)} prompt tokens exceed model.max_len={self.max_len}; {advice}", found)
        return found

    def _beginning(self, ids: Ids, most: int) -> Ids:
        """The first tokens, and after them those that the tokenizer itself adds at the end of a text, which a cut text keeps."""
        added = [] if self.tokenizer is None or self.columns.prompt_kind == "prompt_ids" else self.tokenizer.added_at_end
        if self.is_chat or not added or len(added) >= most:
            return ids[:most]
        return np.concatenate((ids[: most - len(added)], np.asarray(added, np.int32)))

    def _encode_text(self, prompt: str, max_prompt_tokens: int) -> list[int]:
        assert self.tokenizer is not None
        if self._cuts_end:
            return self.tokenizer.encode_beginning(prompt, max_prompt_tokens)
        try:
            return self.tokenizer.encode(prompt, max_tokens=max_prompt_tokens, keep_end=self.input.on_overlong == "truncate")
        except LongText as error:
            raise self._too_long(str(error), max_prompt_tokens) from None

    def _turns(self, prompt: Any, row: Mapping[str, Any], final: str, images: list[bytes | PdfPage]) -> list[Message]:
        """The row's chat. images: as in `_ids`."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        given: list[Any] | None = None if self.images is None else []
        with _refused_as("chat template"):
            try:
                turns = read_chat(messages, row.get("system"), final, row.get(USUAL_SYSTEM, self.input.system), given)
            except BadChat as error:
                raise BadRow(error.code, str(error)) from None
        if self.images is None or given is None:
            return turns
        turns, found = self.images.placed(turns, given, row.get(IMAGES), adds=isinstance(prompt, str))
        images += found
        return turns

    def _encode_chat(
        self, turns: Sequence[Message], tools: Any, kwargs: dict[str, Any], max_prompt_tokens: int, *, complete: bool
    ) -> list[int]:
        assert self.tokenizer is not None
        self._check_variables(kwargs)
        ends = {GENERATION_PROMPT: False} if complete and self.tokenizer.reads(GENERATION_PROMPT) else {}
        try:
            return self.tokenizer.encode_chat(
                turns, tools=tools, template_kwargs={**self.input.template_kwargs, **kwargs, **ends},
                continue_final=turns[-1]["role"] == "assistant" and not complete,
                max_tokens=None if self._cuts_end else max_prompt_tokens,
                keep_end=self.input.on_overlong == "truncate",
            )
        except LongText as error:
            raise self._too_long(str(error), max_prompt_tokens) from None

    def _check_variables(self, kwargs: Mapping[str, Any]) -> None:
        """Raises BadRow for a variable of the row's own that no template reads."""
        assert self.tokenizer is not None
        for name, value in kwargs.items():
            if problem := self.tokenizer.problem_of({name: value}):
                key = name if name in OF_TEMPLATE else TEMPLATE_KWARGS
                raise BadRow(
                    "template_error",
                    f"the chat template refuses the prompt ({problem}); leave it out, or, of OpenAI's requests, ignore it: "
                    f"input.drop=[{key}]",
                )

    def _checked_ids(self, prompt: pa.Array) -> Ids:
        if prompt.null_count:
            raise BadRow("bad_ids", "prompt_ids holds a null; correct it")
        ids = prompt.to_numpy()
        if ids.dtype.kind == "f" and not np.array_equal(ids, np.floor(ids)):
            raise BadRow("bad_ids", NOT_WHOLE)
        return self._known(ids, "prompt_ids")

    def _known(self, ids: np.ndarray[Any, Any], where: str) -> Ids:
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            outside = ids[(ids < 0) | (ids >= self.vocab_size)]
            limit = f"the vocabulary 0 .. {self.vocab_size - 1}"
            raise BadRow("bad_ids", f"{where} holds {outside[0]}, outside {limit}; correct it")
        return np.asarray(ids, dtype=np.int32)

    def _too_long(self, prompt: str, max_prompt_tokens: int, prompt_ids: Ids | None = None) -> BadRow:
        return self._overlong(
            f"{prompt} + {self.max_len - max_prompt_tokens} new tokens exceed model.max_len={self.max_len}; "
            "shorten the prompt, lower max_new_tokens or set input.on_overlong=truncate",
            prompt_ids,
        )

    def _too_long_with_images(self, prompt: Prompt, max_prompt_tokens: int) -> BadRow:
        of_images = sum(piece.length for piece in prompt.images)
        return self._overlong(
            f"{len(prompt.ids) - of_images} tokens of text and {of_images} of images + {self.max_len - max_prompt_tokens} new "
            f"tokens exceed model.max_len={self.max_len}, and no image is cut; take fewer images, or lower "
            "input.max_pixels or max_new_tokens",
            prompt.ids,
        )

    def _overlong(self, message: str, prompt_ids: Ids | None = None) -> BadRow:
        status = "skipped" if self.input.on_overlong == "skip" else "error"
        return BadRow("too_long", message, prompt_ids=prompt_ids, status=status)


def _check_template(input: InputConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError without a chat template, and for a key of `input` that it does not read."""
    if not tokenizer.has_chat_template:
        raise ConfigError("a chat needs a template, and the model has none; set model.chat_template, or give plain prompts")
    if input.template_kwargs and (problem := tokenizer.problem_of(input.template_kwargs)):
        raise ConfigError(f"input.template_kwargs does not fit the chat template: {problem}; correct or remove the key")
    if input.template_date != TEMPLATE_DATE and not tokenizer.reads("strftime_now"):
        raise ConfigError(
            f"input.template_date={input.template_date} has no effect: the chat template writes no date (strftime_now); "
            "remove the key"
        )


@contextmanager
def _refused_as(who: str) -> Iterator[None]:
    """Within this block any exception of the chat template or the tokenizer becomes a BadRow, except TokenizerFails, which
    `Admission` expects, and those that the machine causes: no memory, or no process for the template."""
    try:
        yield
    except (BadRow, CapacityError, MemoryError, OSError, TokenizerFails):
        raise
    except RendererKilled as error:
        raise BadRow("template_error", f"the chat was not rendered ({error}); try resume=error", retryable=True) from error
    except UnicodeError as error:
        raise BadRow("bad_text", f"the prompt is not valid Unicode ({error}); correct it") from error
    except Exception as error:  # a template may raise anything
        if refusal(error) is not None:
            raise
        code = "template_error" if who == "chat template" else "bad_text"
        said = " ".join(str(error).split()) or type(error).__name__
        raise BadRow(code, f"the {who} refuses the prompt ({said}); correct it") from error
