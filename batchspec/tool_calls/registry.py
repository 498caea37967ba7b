"""The forms of tool calls by name, and which one a checkpoint's chat template writes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from batchspec.errors import ConfigError
from batchspec.tool_calls import deepseek
from batchspec.tool_calls.deepseek import DEEPSEEK
from batchspec.tool_calls.form import ToolForm
from batchspec.tool_calls.llama_json import LLAMA3_JSON
from batchspec.tool_calls.marked_json import HERMES, MISTRAL
from batchspec.tool_calls.pythonic import PYTHONIC
from batchspec.tool_calls.tagged import GLM, MINIMAX_M2, QWEN3_CODER

FORMS: dict[str, ToolForm] = {
    form.name: form for form in (HERMES, QWEN3_CODER, LLAMA3_JSON, MISTRAL, GLM, MINIMAX_M2, PYTHONIC, DEEPSEEK)
}
SIGNS: tuple[tuple[str, ToolForm], ...] = (
    (deepseek.MARK, DEEPSEEK),
    (r"<function=[\s\S]*<parameter=", QWEN3_CODER),
    (r"<arg_key>", GLM),
    (r"<minimax:tool_call>", MINIMAX_M2),
    (r"\[TOOL_CALLS\]", MISTRAL),
    (r"<\|tool_call_start\|>|<\|tool_list_start\|>|\[func_name1?\(", PYTHONIC),
    (r"<tool_call>", HERMES),
    (r"<\|python_tag\|>|\{\"name\": [\s\S]*\"parameters\": ", LLAMA3_JSON),
)
"""What a template that writes a form has in its text, the more special sign first: several forms have <tool_call>."""


def form_written_by(sources: Collection[str]) -> ToolForm | None:
    """The form that one of these texts writes; None if it is unknown."""
    return next((form for sign, form in SIGNS if any(re.search(sign, source) for source in sources)), None)


def choose_form(setting: str, answer_templates: Iterable[Collection[str]], *, channels: bool) -> ToolForm | None:
    """The form of model.tool_calls; None: calls stay text, because the key is `none` or no form is known.

    answer_templates  `Tokenizer.answer_templates`
    channels          the model's outputs have channels (harmony), in which calls are messages of their own
    Raises ConfigError for a key that has no effect.
    """
    if channels:
        if setting != "auto":
            raise ConfigError(
                f"model.tool_calls={setting} has no effect: this model's tool calls are messages of their own channel (harmony), "
                "which are always told apart; remove the key"
            )
        return None
    if setting == "auto":
        return next(filter(None, map(form_written_by, answer_templates)), None)
    return FORMS.get(setting)
