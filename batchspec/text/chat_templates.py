"""Renders chats with a checkpoint's chat templates, in the form that each wants. What a template leaves out is an error."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from batchspec.checkpoint.config_values import Json, has_file, read_json, read_text, shown
from batchspec.checkpoint.files import LocalFiles
from batchspec.data.dataset.messages import text_of
from batchspec.errors import CheckpointError
from batchspec.text.dropped_parts import DroppedParts
from batchspec.text.template_form import USER, Message, TemplateForm, assistant, find_form
from batchspec.text.template_process import Limit
from batchspec.text.templates import Templates
from batchspec.tool_calls.probe import FUNCTION, TOOLS, AnswerSamples, probe_call

_OPENED = re.compile(r"(<[^<>\s/]*think[^<>\s]*>|\[THINK\])\s*$", re.IGNORECASE)
"""The end of a prompt that begins a thought."""
_LAST_MARK = re.compile(r"[<\[][^<>\[\]]*[>\]][^<>\[\]]*\Z")
CONTINUED = "BATCHSPECTHEANSWERGOESONHERE"
"""Put at the end of a last message that the answer continues: the text before it is the prompt."""
_NAMED = 3
"""Number of dropped parts that a message names."""


class ChatTemplates:
    """The chat templates of a checkpoint: `default`, `tool_use` for chats with tools, and others that are never used.

    variables  special tokens by name, which templates read
    described  response_template of tokenizer_config.json: how the model's answers are read
    Raises CheckpointError if one is not valid Jinja.
    """

    def __init__(
        self, sources: Mapping[str, str], variables: Mapping[str, Any], where: str, *, date: str, described: Any = None
    ) -> None:
        self.sources = dict(sources)
        self._variables, self._described = variables, described
        self._templates = Templates(sources, where, date=date)
        self._forms: dict[str, TemplateForm] = {}
        self._dropped: dict[str, DroppedParts] = {}
        self.dropped_keys = set[str]()
        """Fields of messages that chats had so far and that their template left out, other than text, tools and tool calls;
        `reasoning` for all names of an assistant's thought."""

    def __bool__(self) -> bool:
        return bool(self.sources)

    def check(self) -> None:
        """Compile all templates. Raises CheckpointError if one does not compile, and CapacityError if the process is killed."""
        if self.sources:
            self._templates.check()

    def reads(self, variable: str) -> bool:
        """Whether a template reads this variable."""
        return variable in self._templates.variables

    def problem_of(self, template_kwargs: Mapping[str, Any]) -> str | None:
        """What is wrong with these variables: that no template reads one, or that one replaces the chat; None if nothing is."""
        for name in (name for name, value in template_kwargs.items() if value is not None):
            if name in ("messages", "tools"):
                return f"template_kwargs.{name} would replace the {name} of the row"
            if not self.reads(name):
                return f"it reads no variable {name!r}, which template_kwargs sets"
        return None

    def form(self, name: str = "default") -> TemplateForm:
        """The form that a template wants."""
        if name not in self._forms:
            self._forms[name] = find_form(lambda chat, variables: self._rendered_probe(name, chat, **variables))
        return self._forms[name]

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any],
        continue_final: bool, limit: Limit | None, whole: bool,
    ) -> str:
        """The text of a chat up to the beginning of the assistant's answer; see `Tokenizer.render_chat`."""
        tools = tools or None
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ValueError("the model has no chat template; set model.chat_template to a Jinja file, or give a plain prompt")
        form = self.form(name)
        if continue_final:
            messages = [*messages[:-1], {**messages[-1], "content": f"{text_of(messages[-1]['content'])}{CONTINUED}"}]
        chat = form.adapted(messages)

        def rendered(chat: Sequence[Message], tools: Any, limit: Limit | None = None) -> str:
            given = {"documents": None, "add_generation_prompt": not continue_final, "tools": None, form.tools_variable: tools}
            return self._templates.render(name, {**self._variables, **given, **template_kwargs, "messages": chat}, limit)

        text = rendered(chat, tools, limit)
        if continue_final:
            text, found, _ = text.rpartition(CONTINUED)
            if not found:
                raise ValueError("it leaves out the last message, which the answer should continue")
        if not whole:
            return text
        known = self._dropped.setdefault(name, DroppedParts())
        dropped = known.of(chat, tools, {**template_kwargs, "continued": continue_final}, lambda *chat: _tried(rendered, *chat))
        self.dropped_keys.update(dropped.keys)
        if dropped.parts:
            raise ValueError(_said(dropped.parts))
        return text

    @cached_property
    def answer_samples(self) -> AnswerSamples:
        """Texts that say in which form the model writes tool calls."""
        name = "tool_use" if "tool_use" in self.sources else "default"
        text = json.dumps(self._described) if self._described else ""
        if name not in self.sources:
            return AnswerSamples(text)
        form = self.form(name)
        calls = form.adapted([assistant("", tool_calls=[probe_call()])])
        prompt = self._rendered_probe(name, [USER], **{form.tools_variable: TOOLS}) or ""
        turn = self._rendered_probe(name, [USER, *calls], add_generation_prompt=False) or ""
        return AnswerSamples(text, turn.rpartition(USER["content"])[2], prompt if FUNCTION in prompt else "")

    def example_of_reasoning(self, template_kwargs: Mapping[str, Any]) -> str:
        """How the template writes reasoning, as in `<think> ... </think>`, or the mark with which a prompt begins it; empty if
        the template writes neither."""
        if not self.sources:
            return ""
        field = self.form().thought_field
        if field is not None:
            answer = assistant("zqanswer", **{field: "zqthought"})
            for chat in ([USER, answer], [USER, answer, USER]):
                text = self._rendered_probe("default", chat, add_generation_prompt=False) or ""
                before, found, after = text.partition("zqthought")
                if found:
                    begin = _LAST_MARK.search(before.rstrip())
                    return f"{begin[0] if begin else ''} ... {after.partition('zqanswer')[0].strip()}"
        end = (self._rendered_probe("default", [USER], **template_kwargs) or "").rpartition(USER["content"])[2]
        opened = _OPENED.search(end)
        return "" if opened is None else opened[1]

    def _rendered_probe(self, name: str, chat: Sequence[Message], **variables: Any) -> str | None:
        given = {"documents": None, "add_generation_prompt": True, "tools": None, **variables, "messages": chat}
        return _tried(self._templates.render, name, {**self._variables, **given})


def _tried(render: Any, *arguments: Any) -> str | None:
    """What `render` returns; None if the template refuses the chat."""
    try:
        return str(render(*arguments))
    except ValueError:
        return None


def _said(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - _NAMED} other parts" if len(parts) > _NAMED else ""
    advice = "take them out of the row, or set model.chat_template to a template that writes them"
    return f"it leaves out {', '.join(parts[:_NAMED])}{more}; {advice}"


def template_sources(folder: Path, config: Json, chat_template: Path | None) -> dict[str, str]:
    """Name -> Jinja source: from the user's file, else chat_template.jinja and additional_chat_templates, else the JSON files."""
    if chat_template is not None:
        if not has_file(chat_template):
            raise CheckpointError(f"model.chat_template={chat_template}: no such file; give the path of a Jinja file")
        return {"default": read_text(chat_template)}
    more = folder / "additional_chat_templates"
    names = LocalFiles(more).names() if os.path.lexists(more) else ()
    files = {Path(name).stem: more / name for name in sorted(names) if name.endswith(".jinja")}
    if has_file(folder / "chat_template.jinja"):
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: read_text(path) for name, path in files.items()}
    return _embedded(folder, config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template"))


def _embedded(folder: Path, value: Any) -> dict[str, str]:
    """The templates that a JSON file has: text, an object {name: text}, or a list of {"name", "template"}."""
    if isinstance(value, list) and all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in value):
        value = {str(item["name"]): item["template"] for item in value}
    if value is None or value in ("", [], {}):
        return {}
    found = {"default": value} if isinstance(value, str) else value
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise CheckpointError(
            f"{shown(folder)}: chat_template must be text, an object of texts by name, or a list of objects with a name and a "
            "template; correct it, or set model.chat_template to a Jinja file"
        )
    return found
