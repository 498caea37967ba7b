"""The marks of forms of tool calls that tokenizers have as tokens of their own: `structured/forced_calls.py` writes them."""

from __future__ import annotations

CALL_MARKS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "deepseek": tuple(
        f"<\uff5ctool\u2581{name}\uff5c>"
        for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "sep", "call\u2581end")
    ),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "granite": ("<|tool_call|>",),
    "phi4": ("<|tool_call|>", "<|/tool_call|>"),
    "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
}
"""By the name of the form: at most as many as there are bytes in `token_automaton.MARKS`."""
HARMONY = "harmony"
"""The name for the calls of models with channels."""
