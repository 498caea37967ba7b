"""The keys of OpenAI's batch requests, and of vLLM's, and what each is in a batchspec input."""

from __future__ import annotations

from batchspec.config.row_options import ROW_OPTIONS
from batchspec.data.dataset.columns import TYPES

URLS = ("/v1/chat/completions", "/chat/completions")
LINE_KEYS = ("custom_id", "method", "url", "body")
COLUMNS = {name: kind.written for name, kind in TYPES.items()}
"""Columns of a batchspec input that a request line may fill, and the types in which a file has them."""
NUMBERS = {name: column for column, option in ROW_OPTIONS.items() for name in option.declared.requests}
"""Key of a body with a number -> column."""
TURN_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that chat templates read."""
PREFIX = ("prefix", "partial")
"""Keys of a last message with which the answer continues it."""
TEMPLATE_KWARGS = "chat_template_kwargs"
OF_TEMPLATE = ("reasoning_effort",)
"""Keys of a body that are arguments of the chat template."""
GOES_ON, ADDS_ANSWER = "continue_final_message", "add_generation_prompt"
"""vLLM's keys of a body: the answer continues the last message; the template begins a new answer (true)."""
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older keys, and the key of `structured_outputs` that replaced each."""
WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Keys of a body that do not affect tokens."""
NEUTRAL = {"stream": False, "tool_choice": "auto", "parallel_tool_calls": True}
"""Keys of a body, and the value with which they ask for nothing."""
JOB_KEYS = {"stop_token_ids": "decode.stop_ids", "ignore_eos": "decode.ignore_eos"}
"""Keys of a body without a column, and the keys that ask for the same in all rows of a job."""
OTHER_ENDPOINTS = {
    "completions": "write its prompt as the column `prompt` of an input, which is used as it is",
    "responses": "write its input as body.messages of a chat completion",
    "embeddings": "write its input as the column `prompt` of a job with task=embed",
    "moderations": "batchspec has no moderation: leave the line out",
    "images/generations": "batchspec makes no images: leave the line out",
    "audio/transcriptions": "batchspec reads no audio: leave the line out",
    "score": "write its texts as the columns `query` and `document` of a job with task=rerank",
    "rerank": "write its query, and each of its documents, as the columns `query` and `document` of a job with task=rerank",
}
"""Other endpoints of OpenAI's and vLLM's batches, and what to do about them."""
