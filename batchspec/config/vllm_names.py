"""The names that vLLM, transformers, SGLang, OpenAI and distilabel use: and what batchspec has for each.

A name of one key is declared beside that key (`Key.names`); here are those that several keys, or none, answer."""

from __future__ import annotations

from collections.abc import Collection

from batchspec.config.schema import KEYS

NAMES: dict[str, str] = {
    name: key for key, its in KEYS.items() for name in (*its.requests, *its.names) if name != key.rpartition(".")[2]
}
"""Their name, without a group -> batchspec's key."""

_SHARE = "packing.memory_gb is the memory for K/V in GB, not a share of the GPU; without it K/V gets what is free"
_CONSTRAINT = "choose decode.schema, decode.regex, decode.choice or decode.grammar, or fill the column response_format"
_STORED = "config.json says how weights are stored (FP8, FP4, INT4); model.quantize=fp8 makes FP8 of bf16 weights at load"
_TOKENIZER = "the tokenizer is that of model.path; for another one put its files into a copy of that folder"
_DOWNLOADS = "the environment variable HF_HOME names the folder of downloads from the hub"
_TOKEN = "the environment variable HF_TOKEN holds the token of the hub"
_TEMPLATE = "a variable of the chat template is input.template_kwargs={{{name}: VALUE}}"
_SPECIAL = "`completion` holds no special tokens; output.token_ids=true writes all tokens"
_BEAMS = "beam search is not supported; decode.n samples several completions"
_CUTOFFS = "decode.top_k, decode.top_p and decode.min_p cut off unlikely tokens"
_KERNELS = "batchspec chooses its kernels itself; remove it"
_ADAPTERS = "LoRA needs no switch: model.adapter=FOLDER is for all rows, model.adapters={NAME: FOLDER} for rows that name one"
_BANNED = "decode.logit_bias={ID: -100} bans a token"
_ANSWERS = "input.final_assistant=continue continues a chat that ends with an assistant turn"

OF_REQUESTS: dict[str, str] = {name: said for key in KEYS.values() for name, said in key.remarks.items()} | {
    "do_sample": "decode.temperature=0 is greedy, and a higher one samples; decode=sampled sets temperature and top-p",
    "num_beams": _BEAMS,
    "use_beam_search": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "typical_p": _CUTOFFS,
    "epsilon_cutoff": _CUTOFFS,
    "eta_cutoff": _CUTOFFS,
    "allowed_token_ids": f"{_BANNED}; decode.regex and decode.choice allow certain texts alone",
    "logits_processors": "code of the user does not change logits; decode.logit_bias and the constraints of decode do",
    "include_stop_str_in_output": "`completion` never holds the stop string, which the column stop_reason names",
    "skip_special_tokens": _SPECIAL,
    "truncate_prompt_tokens": "input.on_overlong=truncate keeps the end of a prompt that is too long for model.max_len",
    "spaces_between_special_tokens": _SPECIAL,
    "detokenize": _SPECIAL,
    "truncation": "input.on_overlong=truncate keeps the end of a prompt that is too long for model.max_len",
    "sampling_params": "its parameters are keys under `decode`",
    "guided_decoding": _CONSTRAINT,
    "guided_decoding_backend": _CONSTRAINT,
    "structured_outputs": _CONSTRAINT,
    "response_format": _CONSTRAINT,
    "lora_request": _ADAPTERS,
    "enable_thinking": _TEMPLATE.format(name="enable_thinking"),
    "reasoning_effort": _TEMPLATE.format(name="reasoning_effort"),
    "add_generation_prompt": _ANSWERS,
    "continue_final_message": _ANSWERS,
    "echo": "decode.score=prompts scores prompts",
}
"""What other programs take with each request, without a group, and is not the value of one key -> what to do instead."""

REMARKS = OF_REQUESTS | {
    "pad_token_id": "a batch needs no padding tokens; remove it",
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "trust_remote_code": "code of a model folder is never run; remove it",
    "quantization": _STORED,
    "quantization_config": _STORED,
    "load_in_4bit": _STORED,
    "load_in_8bit": _STORED,
    "download_dir": _DOWNLOADS,
    "cache_dir": _DOWNLOADS,
    "hf_token": _TOKEN,
    "token": _TOKEN,
    "pipeline_parallel_size": "layers are not divided over GPUs; cluster.tensor_parallel cuts each of them",
    "gpu_memory_utilization": _SHARE,
    "mem_fraction_static": _SHARE,
    "swap_space": "K/V is not swapped: a preempted row is prefilled again; remove it",
    "cpu_offload_gb": "weights are not offloaded; cluster.tensor_parallel cuts a model over several GPUs",
    "enforce_eager": "a GPU always replays CUDA graphs; remove it",
    "block_size": "a page holds 16 tokens; packing.pages is the number of pages",
    "enable_prefix_caching": "prefixes that prompts share are always computed once; remove it",
    "use_cache": "K/V is always cached; remove it",
    "enable_chunked_prefill": "prefill is always chunked; packing.max_num_batched_tokens is the size of a pass",
    "enable_lora": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "attn_implementation": _KERNELS,
    "attention_backend": _KERNELS,
    "tool_call_parser": "tool calls are found in the form that the chat template writes; model.tool_calls names another one",
    "enable_auto_tool_choice": "tool calls of rows with the column `tools` are always found; remove it",
    "reasoning_parser": "reasoning is found by its tokens; model.think_tokens names others",
    "tools": "the column `tools` has the tools of its row",
    "stream": "a job writes files; in Python Engine.stream yields completions as they end",
    "use_tqdm": "the progress line is written to a terminal alone; remove it",
}
"""The same, and what they take for all requests."""


def remark(name: str, known: Collection[str]) -> str:
    """What batchspec has for a name of another program; empty for any other name, and if it is none of the `known` keys."""
    if (key := NAMES.get(name)) is not None:
        return f"batchspec calls it {key}" if key in known else ""
    return REMARKS.get(name, "")
