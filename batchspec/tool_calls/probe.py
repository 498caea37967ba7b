"""A tool and a call of it that are rendered by chat templates, to see in which form a model writes calls.

Their words are ones that no template writes by itself. This module does not import torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

FUNCTION = "zqfunction"
ARGUMENTS = {"zqkey": "zqvalue", "zqnested": {"zqflag": True}}
CALL_ID = "zqcall001"
"""Nine letters and digits, as Mistral's templates want them."""
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": FUNCTION,
            "description": "zqdescription",
            "parameters": {
                "type": "object",
                "properties": {
                    "zqkey": {"type": "string", "description": "zqtext"},
                    "zqnested": {"type": "object", "description": "zqobject"},
                },
                "required": ["zqkey"],
            },
        },
    },
)


def probe_call(*, as_text: bool = False) -> dict[str, Any]:
    """The call, in OpenAI's form. as_text: its arguments are JSON text."""
    arguments = json.dumps(ARGUMENTS) if as_text else ARGUMENTS
    return {"id": CALL_ID, "type": "function", "function": {"name": FUNCTION, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class AnswerSamples:
    """Texts that say in which form a model writes tool calls."""

    described: str = ""
    """The response template of tokenizer_config.json, which transformers reads, as JSON text."""
    call: str = ""
    """What the chat template writes for an assistant's turn with `probe_call` alone, the marks of the turn included."""
    prompt: str = ""
    """A prompt with the tools TOOLS; empty if the template leaves them out."""

    @property
    def writes_calls(self) -> bool:
        """Whether the chat template writes calls of earlier turns."""
        return FUNCTION in self.call
