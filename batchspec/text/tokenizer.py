"""Converts between text and token ids with a checkpoint's tokenizer.json, and renders chats with its Jinja template.

This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import tokenizers

from batchspec.automata.token_automaton import TokenSymbols
from batchspec.checkpoint.config_values import has_file, no_tokenizer, read_text, shown
from batchspec.config.schema import TEMPLATE_DATE
from batchspec.console.text import quoted
from batchspec.errors import CheckpointError, TokenizerFails
from batchspec.process.refusals import is_panic
from batchspec.text.chat_templates import CONTINUED, ChatTemplates, template_sources
from batchspec.text.special_tokens import add_declared, has_code, special_tokens, tokenizer_config
from batchspec.text.template_process import Limit
from batchspec.text.text_bytes import LongText, text_bound
from batchspec.text.text_growth import added_problem, growth_problem
from batchspec.text.token_bytes import token_symbols

END_CHARS = 1 << 20
"""If only the end of a text is wanted, a text with more characters is tokenised only from its end."""
_SPARE_TOKENS = 64
"""Tokens required beyond the wanted ones, because cutting the text changes the few tokens right after the cut."""


class Tokenizer:
    """The tokenizer of a Hugging Face model folder.

    All methods that encode or decode raise TokenizerFails.

    Raises CheckpointError if there is no tokenizer.json, it cannot be read, or a template is not valid Jinja.
    """

    eos_ids: tuple[int, ...]
    """The id of tokenizer_config.json's eos_token, or empty."""
    special_ids: dict[str, int]
    """Special token -> id: control tokens, which ordinary text never produces and `decode` can omit."""
    added_ids: dict[str, int]
    """Added token -> id, special or not: text is split at these tokens first."""
    chats: ChatTemplates
    """Its chat templates."""
    fingerprint: str
    """sha256 of everything that determines the ids: tokenizer.json, special tokens, templates."""

    def __init__(self, folder: Path, chat_template: Path | None = None, *, date: str = TEMPLATE_DATE) -> None:
        """`date` is what the templates take for today, in ISO format: input.template_date."""
        path = folder / "tokenizer.json"
        if not has_file(path):
            raise no_tokenizer(folder)
        text = read_text(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise CheckpointError(f"{shown(path)}: tokenizers {tokenizers.__version__} cannot read it ({error})") from None
        facts = json.loads(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = tokenizer_config(folder)
        self._variables, self._adds_eos, self._has_code = special_tokens(config), config.get("add_eos_token"), has_code(config)
        added_later = add_declared(self._tokenizer, folder, config, self._variables)
        self._bound = text_bound(json.loads(self._tokenizer.to_str()) if added_later else facts)
        sources = template_sources(folder, config, chat_template)
        described = config.get("response_template")
        self.chats = ChatTemplates(sources, self._variables, shown(folder), date=date, described=described)
        added = self._tokenizer.get_added_tokens_decoder()
        num_added = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if problem := growth_problem(facts) or added_problem([token.content for token in added.values()], num_added):
            raise CheckpointError(f"{shown(folder)}: the tokenizer is refused: {problem}; use another one")
        self.special_ids = {token.content: index for index, token in added.items() if token.special}
        self.added_ids = {token.content: index for index, token in added.items()}
        eos = self._tokenizer.token_to_id(self._variables.get("eos_token", ""))
        self.eos_ids = () if eos is None else (eos,)
        defined = [text, self._variables, sources, *added_later]  # of files, so that it outlives a version of tokenizers
        self.fingerprint = sha256(json.dumps(defined, sort_keys=True).encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template. Raises CheckpointError if one does not compile."""
        self.chats.check()
        return bool(self.chats)

    def encode(self, text: str, *, max_tokens: int | None = None, keep_end: bool = False) -> list[int]:
        """Ids of a text, including BOS or other tokens that the checkpoint's post-processor adds.

        max_tokens  maximum number of tokens: raise LongText if the text is provably longer, which is found without tokenising it
        keep_end    of a longer text only the last `max_tokens` ids are wanted, so its beginning need not be tokenised
        """
        return self._ids(text, True, max_tokens, keep_end)

    def encode_beginning(self, text: str, max_tokens: int) -> list[int]:
        """As `encode`, of a text whose first `max_tokens` ids are enough: what comes much later need not be tokenised. The result
        may be longer."""
        chars = max(END_CHARS, 8 * max_tokens)
        while chars < len(text):
            ids = self._encoded(text[:chars], special=True)
            if len(ids) >= max_tokens + _SPARE_TOKENS:
                return ids
            chars *= 4
        return self._encoded(text, special=True)

    @cached_property
    def added_at_end(self) -> list[int]:
        """Ids that the checkpoint's post-processor adds after a text, such as an EOS."""
        own, whole = self._encoded("a", special=False), self._encoded("a", special=True)
        begin = next(i for i in range(len(whole) - len(own) + 1) if whole[i : i + len(own)] == own)
        return whole[begin + len(own) :]

    @property
    def end_problem(self) -> str:
        """Why transformers may end a text with other ids than `encode`; empty if nothing speaks for it."""
        if self._has_code:
            return "tokenizer_config.json names code of the folder for its tokenizer (auto_map), which batchspec never runs"
        if self._adds_eos and not self.added_at_end:
            return "tokenizer_config.json has add_eos_token=true, and tokenizer.json adds no EOS"
        return ""

    def encode_part(self, text: str) -> list[int]:
        """Ids of a part of a text, without added BOS or other special tokens."""
        return self._encoded(text, special=False)

    def spellings(self, text: str) -> frozenset[tuple[int, ...]]:
        """Every sequence of the vocabulary's tokens that is this short text, whichever of them the tokenizer itself gives."""
        found: dict[tuple[int, ...], int] = {(): 0}  # ids -> number of characters
        complete = {tuple(self.encode_part(text))}
        pieces = {piece: self._tokenizer.token_to_id(piece.replace(" ", "\u0120")) for piece in _substrings(text)}
        while found:
            ids, begin = found.popitem()
            if begin == len(text):
                complete.add(ids)
            for end in range(begin + 1, len(text) + 1):
                token = pieces[text[begin:end]]
                if token is not None and self.decode([token], skip_special=False) == text[begin:end]:
                    found[*ids, token] = end
        return frozenset(complete)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
        max_tokens: int | None = None,
        keep_end: bool = False,
    ) -> list[int]:
        """Ids of a chat up to the beginning of the assistant's answer; `max_tokens` and `keep_end` as in `encode`.

        The template writes the special tokens, so none are added. Of several templates, `tool_use` is used for a chat with
        tools, otherwise `default`. Raises ValueError with the template's own message if it refuses the chat, and if it leaves
        out a text, a tool call or a tool of the chat.
        """
        if problem := self.problem_of(template_kwargs or {}):
            raise ValueError(problem)
        limit = self._limit(max_tokens, keep_end)
        text = self.render_chat(
            messages, tools=tools, template_kwargs=template_kwargs, continue_final=continue_final, limit=limit, whole=True
        )
        return self._ids(text, False, max_tokens, keep_end)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
        limit: Limit | None = None,
        whole: bool = False,
    ) -> str:
        """The text that `encode_chat` encodes.

        continue_final  the answer continues the text of the last message: the text ends there
        limit           how long the text may be, or how much of its end is wanted
        whole           refuse a chat of which the template leaves out a text, a tool call or a tool
        Raises ValueError without a template, or with the template's own message if it refuses the chat.
        """
        return self.chats.render(
            messages, tools=tools, template_kwargs=template_kwargs or {}, continue_final=continue_final, limit=limit,
            whole=whole,
        )

    def problem_of(self, template_kwargs: Mapping[str, Any]) -> str | None:
        """What is wrong with these variables: that no template reads one, or that one replaces the chat; None if nothing is."""
        return self.chats.problem_of(template_kwargs)

    def reads(self, variable: str) -> bool:
        """Whether a chat template of the model reads this variable."""
        return self.chats.reads(variable)

    def _limit(self, max_tokens: int | None, keep_end: bool) -> Limit | None:
        """The limit on a text of `max_tokens` tokens; None if there is no bound."""
        if max_tokens is None:
            return None
        if keep_end:  # much more than `_ids` asks for, except if nearly all of the text gives no tokens
            return Limit(keep_chars=max(4 * END_CHARS, 64 * max_tokens))
        bound = self._bound
        if bound is None:
            return None
        return Limit(max_bytes=max_tokens * bound.bytes_a_token + len(CONTINUED), left_out=bound.left_out)

    def _ids(self, text: str, special: bool, max_tokens: int | None, keep_end: bool) -> list[int]:
        limit = self._limit(max_tokens, keep_end)
        if max_tokens is None or limit is None:
            return self._encoded(text, special=special)
        if (size := limit.excess(text)) is not None:
            raise LongText(limit.message(size))
        chars = max(END_CHARS, 8 * max_tokens)
        while keep_end and chars < len(text):
            ids = self._encoded(text[-chars:], special=special)
            if len(ids) >= max_tokens + _SPARE_TOKENS:
                return ids[-max_tokens:]
            chars *= 4
        return self._encoded(text, special=special)

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise TokenizerFails(f"the tokenizer fails on the text {quoted(text)} ({error}); correct the text") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, those of added tokens included; the model may have more."""
        return max(self._tokenizer.get_vocab_size(), max(self.added_ids.values(), default=-1) + 1)

    def symbols(self, vocab_size: int, marks: Mapping[int, int], call_marks: Sequence[str] = ()) -> TokenSymbols:
        """The bytes of each of the model's tokens: see `token_bytes.token_symbols`."""
        return token_symbols(self._tokenizer, vocab_size, marks, call_marks)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids; bytes that are not (yet) valid UTF-8 become U+FFFD."""
        try:
            return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))
        except BaseException as error:
            if not is_panic(error):
                raise
            said = f"the tokenizer fails to make text of {len(ids):,} tokens ({error}); correct the decoder in its tokenizer.json"
            raise TokenizerFails(said) from error


def _is_of_library(error: BaseException) -> bool:
    """Whether the package tokenizers raised it: an `Exception`, or a panic of its Rust code, which is none."""
    return isinstance(error, Exception) or is_panic(error)


def _substrings(text: str) -> set[str]:
    return {text[begin:end] for begin in range(len(text)) for end in range(begin + 1, len(text) + 1)}
