"""The keys of OpenAI's batch requests, and of vLLM's, and what each is in a batchspec input."""

from __future__ import annotations

import pyarrow as pa

URLS = ("/v1/chat/completions", "/chat/completions")
LINE_KEYS = ("custom_id", "method", "url", "body")
COLUMNS = {
    "id": pa.string(),
    "messages": pa.list_(pa.struct([("role", pa.string()), ("content", pa.large_string())])),
    "max_new_tokens": pa.int64(),
    "min_new_tokens": pa.int64(),
    "temperature": pa.float64(),
    "top_p": pa.float64(),
    "top_k": pa.int64(),
    "min_p": pa.float64(),
    "seed": pa.int64(),
    "n": pa.int64(),
    "thinking_token_budget": pa.int64(),
    "num_logprobs": pa.int64(),
    "repetition_penalty": pa.float64(),
    "presence_penalty": pa.float64(),
    "frequency_penalty": pa.float64(),
    "logit_bias": pa.string(),
    "stop": pa.list_(pa.string()),
    "tools": pa.string(),
    "tool_choice": pa.string(),
    "parallel_tool_calls": pa.bool_(),
    "template_kwargs": pa.string(),
    "response_format": pa.string(),
    "final_assistant": pa.string(),
}
"""Columns of a batchspec input that a request line may fill."""
NUMBERS = {
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens",
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed", "n": "n",
    "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "thinking_token_budget": "thinking_token_budget",
}
"""Key of a body -> column."""
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
    "embeddings": "batchspec computes no embeddings: leave the line out",
    "moderations": "batchspec has no moderation: leave the line out",
    "images/generations": "batchspec makes no images: leave the line out",
    "audio/transcriptions": "batchspec reads no audio: leave the line out",
    "score": "batchspec has no scoring models: leave the line out",
    "rerank": "batchspec has no scoring models: leave the line out",
}
"""Other endpoints of OpenAI's and vLLM's batches, and what to do about them."""
