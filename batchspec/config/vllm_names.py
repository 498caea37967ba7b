"""The names that vLLM, OpenAI and distilabel use for keys of batchspec: messages about such a name give batchspec's key."""

from __future__ import annotations

NAMES: dict[str, str] = {
    "max_tokens": "decode.max_new_tokens",
    "max_completion_tokens": "decode.max_new_tokens",
    "min_tokens": "decode.min_new_tokens",
    "stop_token_ids": "decode.stop_ids",
    "best_of": "decode.n",
    "num_generations": "decode.n",
    "guided_json": "decode.schema",
    "guided_regex": "decode.regex",
    "guided_choice": "decode.choice",
    "guided_grammar": "decode.grammar",
    "max_model_len": "model.max_len",
    "lora_modules": "model.adapters",
    "speculative_config": "draft.name",
    "kv_cache_dtype": "cache.dtype",
    "gpu_memory_utilization": "packing.memory_gb",
    "input_batch_size": "packing.max_num_seqs",
    "tensor_parallel_size": "cluster.tensor_parallel",
    "data_parallel_size": "cluster.workers",
}
"""Their name, without a group -> batchspec's key."""
