"""The forms of tool calls by name, and which one a model writes.

The chat template writes a call of a probe, as in the history of a chat, and the form that reads it back is the model's. What a
template says of calls counts only if it writes none: in the prompt that it renders with tools.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress

from batchspec.errors import ConfigError
from batchspec.tool_calls import deepseek
from batchspec.tool_calls.deepseek import DEEPSEEK
from batchspec.tool_calls.form import ToolForm, Tools
from batchspec.tool_calls.gemma4 import GEMMA4
from batchspec.tool_calls.glm4 import GLM4
from batchspec.tool_calls.llama_json import LLAMA3_JSON
from batchspec.tool_calls.marked_json import GRANITE, HERMES, MISTRAL, NEMOTRON_JSON, PHI4
from batchspec.tool_calls.probe import ARGUMENTS, FUNCTION, TOOLS, AnswerSamples
from batchspec.tool_calls.pythonic import PYTHONIC
from batchspec.tool_calls.tagged import GLM, MINIMAX_M2, QWEN3_CODER, SEED_OSS

FORMS: dict[str, ToolForm] = {
    form.name: form
    for form in (
        HERMES, QWEN3_CODER, LLAMA3_JSON, MISTRAL, GLM, GLM4, MINIMAX_M2, PYTHONIC, DEEPSEEK, GEMMA4, SEED_OSS, GRANITE, PHI4,
        NEMOTRON_JSON,
    )
}
SIGNS: tuple[tuple[str, ToolForm], ...] = (
    (deepseek.MARK, DEEPSEEK),
    (r"<seed:tool_call>", SEED_OSS),
    (r"<function=[\s\S]*<parameter=", QWEN3_CODER),
    (r"<arg_key>", GLM),
    (r"<minimax:tool_call>", MINIMAX_M2),
    (r"\[TOOL_CALLS\]", MISTRAL),
    (r"<\|tool_call>call:", GEMMA4),
    (r"<\|tool_call_start\|>|<\|tool_list_start\|>|\[func_name1?\(|<function_calls>", PYTHONIC),
    (r"<tool_call>", HERMES),
    (r"<\|/tool\|>|<\|/tool_call\|>", PHI4),
    (r"<\|tool_call\|>", GRANITE),
    (r"<TOOLCALL>", NEMOTRON_JSON),
    (r"<\|python_tag\|>|\{\"name\": function name, \"parameters\"", LLAMA3_JSON),
)
"""Regular expressions by which the text of a prompt, or of a response template, shows the form that it asks for. The more special
ones come first, because several forms have <tool_call>."""
_MARKED = (SEED_OSS, GLM, MINIMAX_M2, MISTRAL, DEEPSEEK, GEMMA4, PYTHONIC, HERMES, PHI4, GRANITE, NEMOTRON_JSON, QWEN3_CODER)
"""Forms that find their marks anywhere in a text. A form whose marks are also parts of another's comes after that one."""
_BARE = ((LLAMA3_JSON, "{", "}"), (PYTHONIC, "[", "]"), (GLM4, FUNCTION, "}"))
"""Forms without marks, and the texts with which a call begins and ends: it must be the whole answer, without the turn's marks."""


def form_that_reads(call: str) -> ToolForm | None:
    """The form that finds the probe's call, whole, in a turn that a chat template wrote; None if none does."""
    answers: list[tuple[ToolForm, str]] = [(form, call) for form in _MARKED]
    answers += [(form, call[call.find(begin) : call.rfind(end) + 1]) for form, begin, end in _BARE]
    return next((form for form, answer in answers if _reads(form, answer)), None)


def _reads(form: ToolForm, answer: str) -> bool:
    found = form.find(answer, Tools(json.dumps(TOOLS)))
    return len(found) == 1 and found[0].name == FUNCTION and _has_values(found[0].arguments)


def _has_values(arguments: str) -> bool:
    """Whether these are the probe's arguments. A template may write an object within as text."""
    with suppress(ValueError):
        found = json.loads(arguments)
        return bool(found.keys() == ARGUMENTS.keys() and found["zqkey"] == ARGUMENTS["zqkey"])
    return False


def form_asked_for(text: str) -> ToolForm | None:
    """The form that a prompt or a response template asks for; None if it is unknown."""
    return next((form for sign, form in SIGNS if re.search(sign, text)), None)


def choose_form(setting: str, samples: AnswerSamples, *, channels: bool) -> ToolForm | None:
    """The form of model.tool_calls; None: calls stay text, because the key is `none` or no form is known.

    samples   `Tokenizer.answer_samples`
    channels  the model's outputs have channels (harmony), in which calls are messages of their own
    Raises ConfigError for a key that has no effect.
    """
    if channels:
        if setting != "auto":
            raise ConfigError(
                f"model.tool_calls={setting} has no effect: this model's tool calls are messages of their own channel (harmony), "
                "which are always told apart; remove the key"
            )
        return None
    if setting != "auto":
        return FORMS.get(setting)
    if (form := form_asked_for(samples.described)) is not None:
        return form
    return form_that_reads(samples.call) if samples.writes_calls else form_asked_for(samples.prompt)
