"""Text <-> token ids with a checkpoint's tokenizer.json, and chats through its Jinja template. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import tokenizers

from batchspec.errors import CheckpointError
from batchspec.model.config_values import Json, read_json, read_text, shown
from batchspec.model.template_process import Limit
from batchspec.model.templates import Templates
from batchspec.model.text_bytes import LongText, text_bound

END_CHARS = 1 << 20
"""A text with more of them is tokenised from its end where only its end is wanted."""
_SPARE_TOKENS = 64
"""Tokens beyond the wanted ones: a cut changes the few right after it."""
_WRITES_ARGUMENTS = re.compile(r"\barguments\s*\|\s*(tojson|items|dictsort)|\barguments\.(items|keys)\b")
_MARK = "BATCHSPECTHEANSWERGOESONHERE"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of a Hugging Face model folder.

    Raises CheckpointError where there is no tokenizer.json, where it cannot be read, or where a template is not valid Jinja.
    """

    eos_ids: tuple[int, ...]
    """The id of tokenizer_config.json's eos_token; may be empty."""
    special_ids: dict[str, int]
    """Id of every special token: control tokens, which text never gives by chance and `decode` can leave out."""
    added_ids: dict[str, int]
    """Id of every token that was added to the vocabulary, special or not: text is cut at them first."""
    fingerprint: str
    """sha256 of everything that decides ids: tokenizer.json, special tokens, templates."""

    def __init__(self, folder: Path, chat_template: Path | None = None) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{shown(folder)}: no tokenizer.json; save the tokenizer in the fast format")
        text = read_text(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{shown(path)}: tokenizers {tokenizers.__version__} cannot read it ({error})") from None
        self._bound = text_bound(json.loads(text))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
        self._variables = _special_tokens(config)
        sources = _template_sources(folder, config, chat_template)
        self._templates = Templates(sources, shown(folder))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: index for index, token in added.items() if token.special}
        self.added_ids = {token.content: index for index, token in added.items()}
        eos = self._tokenizer.token_to_id(self._variables.get("eos_token", ""))
        self.eos_ids = () if eos is None else (eos,)
        self.fingerprint = sha256(json.dumps([text, self._variables, sources], sort_keys=True).encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Raises CheckpointError where there is one that does not compile."""
        if self._templates:
            self._templates.check()
        return bool(self._templates)

    def encode(self, text: str, *, room: int | None = None, keep_end: bool = False) -> list[int]:
        """Ids of a text, with the BOS or other tokens that the checkpoint's post-processor adds.

        room      raise LongText for a text that so many tokens cannot hold, as far as that is told without tokenising it
        keep_end  only the last `room` ids are wanted of a longer text, and its beginning need not be tokenised
        """
        return self._ids(text, True, room, keep_end)

    def encode_part(self, text: str) -> list[int]:
        """Ids of a text that other tokens stand around: nothing is added to it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
        room: int | None = None,
        keep_end: bool = False,
    ) -> list[int]:
        """Ids of a chat up to where the assistant's answer begins; `room` and `keep_end` as in `encode`.

        The template writes the special tokens, so none are added to its text. Of several templates `tool_use` is taken for a
        chat with tools, `default` otherwise. Raises ValueError with the template's own message where it refuses the chat.
        """
        self._check_tools(messages, tools)
        limit = self._limit(room, keep_end)
        text = self.render_chat(
            messages, tools=tools, template_kwargs=template_kwargs, continue_final=continue_final, limit=limit
        )
        return self._ids(text, False, room, keep_end)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
        limit: Limit | None = None,
    ) -> str:
        """The text that `encode_chat` encodes.

        continue_final  the answer goes on with the text of the last message: nothing is written after it
        limit           what is wanted of a long text
        """
        name = self._template_for(tools)
        if name not in self._templates:
            raise ValueError("the model has no chat template; set model.chat_template to a Jinja file, or give a plain prompt")
        if continue_final:
            final = messages[-1]
            messages = [*messages[:-1], {**final, "content": f"{final['content']}{_MARK}"}]
        if self._takes_objects(name):
            messages = [_with_objects(message) for message in messages]
        fixed = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": not continue_final}
        variables = {**self._variables, **fixed, **(template_kwargs or {})}
        text = self._templates.render(name, variables, limit)
        if not continue_final:
            return text
        before, found, _ = text.rpartition(_MARK)
        if not found:
            raise ValueError("it leaves out the last message, which the answer is to go on with")
        return before

    def _template_for(self, tools: Any) -> str:
        return "tool_use" if tools is not None and "tool_use" in self._templates else "default"

    def _takes_objects(self, name: str) -> bool:
        """Whether the template writes the arguments of a tool call as JSON itself: OpenAI's text would be encoded twice."""
        source = self._templates.source(name) if name in self._templates else ""
        return bool(_WRITES_ARGUMENTS.search(source)) and "is string" not in source

    def _check_tools(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        """Raise ValueError where the template would leave tools or tool calls out without a word."""
        name = self._template_for(tools)
        source = self._templates.source(name) if name in self._templates else "tojson"
        if "tojson" in source:  # of a whole message, or of all of them
            return
        if tools and name != "tool_use" and "tools" not in source:
            raise ValueError("it has no place for tools; leave them out, or set model.chat_template to one that has")
        if "tool_calls" not in source and any(message.get("tool_calls") for message in messages):
            raise ValueError("it has no place for tool_calls; leave the row out, or set model.chat_template to one that has")

    def _limit(self, room: int | None, keep_end: bool) -> Limit | None:
        """What a text may have for `room` tokens; None where nothing bounds it."""
        if room is None:
            return None
        if keep_end:  # in steps of 4, as `_ids` asks for more: enough but for text of which hardly any gives a token
            return Limit(keep_chars=max(4 * END_CHARS, 64 * room))
        bound = self._bound
        return None if bound is None else Limit(max_bytes=room * bound.bytes_a_token + len(_MARK), left_out=bound.left_out)

    def _ids(self, text: str, special: bool, room: int | None, keep_end: bool) -> list[int]:
        limit = self._limit(room, keep_end)
        if room is None or limit is None:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        if (size := limit.excess(text)) is not None:
            raise LongText(limit.said(size))
        chars = max(END_CHARS, 8 * room)
        while keep_end and chars < len(text):
            ids = list(self._tokenizer.encode(text[-chars:], add_special_tokens=special).ids)
            if len(ids) >= room + _SPARE_TOKENS:
                return ids[-room:]
            chars *= 4
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that are not (yet) valid UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with arguments of tool calls that are JSON text of an object as that object."""
    calls = message.get("tool_calls")
    return message if not calls else {**message, "tool_calls": [_opened(call) for call in calls]}


def _opened(call: Mapping[str, Any]) -> dict[str, Any]:
    opened = dict(call)
    if isinstance(call.get("function"), dict):
        opened["function"] = _opened(call["function"])
    if isinstance(text := call.get("arguments"), str):
        with suppress(ValueError, RecursionError):  # what is no JSON stays text
            found = json.loads(text)
            opened["arguments"] = found if isinstance(found, dict) else text
    return opened


def _special_tokens(config: Json) -> dict[str, Any]:
    """bos_token, eos_token and the like, as templates see them: plain strings."""
    found: dict[str, Any] = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    if isinstance(more, list) and more:
        found["additional_special_tokens"] = [_content(token) for token in more]
    if isinstance(more, dict):  # named ones, such as image_token
        found |= {name: _content(token) for name, token in more.items()}
    return found


def _content(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token)


def _template_sources(folder: Path, config: Json, chat_template: Path | None) -> dict[str, str]:
    """Name -> Jinja source: the user's file, else chat_template.jinja and its siblings, else tokenizer_config.json's."""
    if chat_template is not None:
        if not chat_template.is_file():
            raise CheckpointError(f"model.chat_template={chat_template}: no such file; give the path of a Jinja file")
        return {"default": read_text(chat_template)}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: read_text(path) for name, path in files.items()}
    inside = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(inside, list):
        if not all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in inside):
            raise CheckpointError(f"{shown(folder)}: chat_template is a list of items without name or template; correct it")
        return {str(item["name"]): str(item["template"]) for item in inside}
    return {"default": str(inside)} if inside else {}
