"""Small chat templates that write tool calls as the families' own do, and what a model with such a template would write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from batchspec.text.template_process import environment

END = "<|im_end|>"
_CHAT = (
    "{%% if tools %%}Tools: {%% for tool in tools %%}{{ tool | tojson }}{%% endfor %%}%(says)s" + END + "{%% endif %%}"
    "{%% for message in messages %%}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%% if message.tool_calls %%}%(calls)s{%% endif %%}" + END + "\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
_EACH = "{% for call in message.tool_calls %}{% set f = call.function %}"
_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'


def chat_template(calls: str, says: str = "") -> str:
    return _CHAT % {"calls": calls, "says": says}


_VALUE = "{{ v | tojson if v is not string else v }}"
TEMPLATES = {
    "hermes": chat_template(_EACH + "\n<tool_call>\n" + _JSON + "\n</tool_call>{% endfor %}"),
    "qwen3_coder": chat_template(
        _EACH + "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
        f"<parameter={{{{ k }}}}>\n{_VALUE}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>{{% endfor %}}"
    ),
    "llama3_json": chat_template(
        _EACH + '{{ "; " if not loop.first }}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}'
    ),
    "mistral": chat_template(f"[TOOL_CALLS] [{_EACH}{{{{ ', ' if not loop.first }}}}{_JSON}{{% endfor %}}]"),
    "mistral, newer": chat_template(_EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"),
    "mistral, with ids": chat_template(
        _EACH + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"
    ),
    "glm": chat_template(
        _EACH + "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}"
        f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n{{% endfor %}}</tool_call>{{% endfor %}}"
    ),
    "minimax_m2": chat_template(
        "\n<minimax:tool_call>\n" + _EACH + '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
        f'<parameter name="{{{{ k }}}}">{_VALUE}</parameter>\n{{% endfor %}}</invoke>\n{{% endfor %}}</minimax:tool_call>'
    ),
    "deepseek": chat_template(
        "<｜tool▁calls▁begin｜>" + _EACH + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
        "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "deepseek, older": chat_template(
        "<｜tool▁calls▁begin｜>" + _EACH + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
        "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>{{ '\n' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "gemma4": chat_template(
        "{% macro write(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is boolean %}{{ 'true' if v else 'false' }}"
        "{% elif v is none %}null{% elif v is mapping %}{{ '{' }}{% for k, w in v.items() %}{{ ',' if not loop.first }}{{ k }}:"
        "{{ write(w) }}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for w in v %}{{ ',' if not loop.first }}{{ write(w) }}"
        "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
        + _EACH + "<|tool_call>call:{{ f.name }}{{ write(f.arguments) }}<tool_call|>{% endfor %}"
    ),
    "seed_oss": chat_template(
        _EACH + "\n<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
        f"<parameter={{{{ k }}}}>{_VALUE}</parameter>\n{{% endfor %}}</function>\n</seed:tool_call>{{% endfor %}}"
    ),
    "granite": chat_template(f"<|tool_call|>[{_EACH}{{{{ ', ' if not loop.first }}}}{_JSON}{{% endfor %}}]"),
    "phi4": chat_template(f"<|tool_call|>[{_EACH}{{{{ ', ' if not loop.first }}}}{_JSON}{{% endfor %}}]<|/tool_call|>"),
    "nemotron_json": chat_template(f"<TOOLCALL>[{_EACH}{{{{ ', ' if not loop.first }}}}{_JSON}{{% endfor %}}]</TOOLCALL>"),
    "glm4": chat_template("{% set f = message.tool_calls[0].function %}{{ f.name }}\n{{ f.arguments | tojson }}"),
    "pythonic, by line": chat_template(
        "<function_calls>" + _EACH + "{{ '\n' if not loop.first }}{{ f.name }}({% for k, v in f.arguments.items() %}"
        "{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}</function_calls>"
    ),
    "pythonic": chat_template(
        f"[{_EACH}{{{{ ', ' if not loop.first }}}}{{{{ f.name }}}}({{% for k, v in f.arguments.items() %}}"
        "{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}{% endfor %}){% endfor %}]"
    ),
}
"""Each name begins with that of the form."""


def tool(name: str, /, **types: Any) -> dict[str, Any]:
    """A tool whose parameters have these types, or schemas."""
    properties = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def written(name: str, calls: Sequence[tuple[str, dict[str, Any]]], content: str = "") -> str:
    """What a model writes as its turn, up to the token that ends it."""
    if name == "pythonic":
        return "[" + ", ".join(f"{f}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for f, arguments in calls) + "]"
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant", "content": content,
            "tool_calls": [
                {"id": f"abcdefgh{place}", "type": "function", "function": {"name": f, "arguments": arguments}}
                for place, (f, arguments) in enumerate(calls)
            ],
        },
    ]
    text = environment("2025-01-01").from_string(TEMPLATES[name]).render(messages=messages, tools=None)
    return text.partition("<|im_start|>assistant\n")[2].removesuffix("\n").removesuffix(END)


def tools_text(*tools: dict[str, Any]) -> str:
    return json.dumps(tools)
