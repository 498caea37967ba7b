"""What vLLM and SGLang are given by `peers.py`: their arguments, their environment, and dummy weights that spread tokens."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from peer_shapes import Row, drafter_of

RATES = (0.6, 0.28, 0.12)
CHUNK = 16384  # tokens of a prefill step in vLLM and SGLang
SPREAD = "PEERS_SPREAD"  # tells the processes that an engine starts whose dummy weights to change
GRAPH_STEP = 8  # rows
BLOCK = {"method": "dspark", "dspark_draft_topk": 16, "enable_adaptive_verification": True}
METHODS: dict[str, dict[str, Any]] = {"eagle3": {"method": "eagle3"}, "block": BLOCK}
"""How vLLM is told of a drafter that is not `mtp`. A block: 16 candidates a draft, as many as batchspec's heads have; and vLLM
chooses by the head's confidence how many drafts of a row it verifies."""


def spread_routing(engine: str) -> None:
    """From now on the dummy weights of vLLM or SGLang have no biases, in this process."""
    vllm = engine == "vllm"
    module = "vllm.model_executor.model_loader.dummy_loader" if vllm else "sglang.srt.model_loader.loader"
    name = "initialize_single_dummy_weight" if vllm else "initialize_dummy_weights"
    fill: Callable[..., None] = getattr(loader := importlib.import_module(module), name)

    def without_biases(made: Any, *args: Any, **more: Any) -> None:
        fill(made, *args, **more)
        for tensor, value in [(more.get("name", ""), made)] if vllm else made.state_dict().items():
            if tensor.endswith("bias"):
                value.data.zero_()

    setattr(loader, name, without_biases)


def environment(engine: str, routing: str, rates: Sequence[float]) -> dict[str, str]:
    """Variables of an engine with dummy weights: how tokens choose experts; in SGLang the mean length of a round.

    vLLM's compiling of all FP8 products that might occur is left to the first turn, which does not count.
    """
    found = {SPREAD: engine} if routing == "spread" else {}
    if engine == "vllm":
        found["VLLM_DEEP_GEMM_WARMUP"] = "skip"
    if routing == "uniform_random":
        found |= {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": routing, "SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}
    if rates:  # the drafted tokens are kept: otherwise all rows would go on with one token, and with its experts
        found |= {"SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token", "SGLANG_SIMULATE_ACC_LEN": f"{1 + sum(rates):.2f}"}
    return found


def graph_sizes(batch: int, k: int) -> list[int]:
    """Tokens of vLLM's CUDA graphs: a round of 1, 2, 4 rows and of every eighth number up to all of them.

    vLLM's own list has the same steps without drafts, but goes on to twice as many, which no round has; and it ends at 512 tokens
    (gpt-oss: 1,024), fewer than 256 rows with drafts have. With drafts its steps are shorter: here a round is padded by up to 7
    rows, which read no K/V, and only while rows come in or end.
    """
    rows = {1, 2, 4, *range(GRAPH_STEP, batch, GRAPH_STEP), batch}
    return sorted((k + 1) * one for one in rows if one <= batch)


def vllm_options(
    rows: Sequence[Row], rates: Sequence[float], target: str, drafter: str | None = None, kv_gib: float | None = None, *,
    kind: str = "",
) -> dict[str, Any]:
    """Arguments of vllm.LLM, which drafts as many tokens as there are rates.

    kind: what drafts, if not that of `drafter_of`.
    kv_gib: memory for K/V and states. vLLM then neither asks how much memory is free nor measures how much it uses: both would
    go wrong while others start on the card.
    """
    shape, k = rows[0].shape, len(rates)
    dummy, batch = bool(shape), max(row.batch for row in rows)
    found: dict[str, Any] = {
        "model": target, "load_format": "dummy" if dummy else "auto", "skip_tokenizer_init": dummy, "dtype": "bfloat16",
        "max_model_len": max(row.prompt + row.gen for row in rows) + 64, "max_num_seqs": batch,
        "max_num_batched_tokens": CHUNK, "gpu_memory_utilization": 0.92, "enable_prefix_caching": False, "seed": 0,
        "compilation_config": {"cudagraph_capture_sizes": graph_sizes(batch, k)},
    }
    if kv_gib is not None:
        found |= {"kv_cache_memory_bytes": int(kv_gib * 2**30), "gpu_memory_utilization": 0.01}
    if k:
        method = METHODS.get(kind or drafter_of(shape), {"method": "mtp"}) | {"num_speculative_tokens": k}
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)} if dummy else {}
        found["speculative_config"] = method | synthetic | ({"model": drafter} if drafter else {})
    return found


def with_options(found: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with those of --options, which replace them; of a dictionary only the keys that are given."""
    inner = [key for key in given if isinstance(given[key], dict) and isinstance(found.get(key), dict)]
    return found | given | {key: found[key] | given[key] for key in inner}


def sglang_options(rows: Sequence[Row], k: int, target: str, head: str | None = None) -> dict[str, Any]:
    """Arguments of sglang.Engine."""
    batch, load = max(row.batch for row in rows), "dummy" if rows[0].shape else "auto"
    found: dict[str, Any] = {
        "model_path": target, "load_format": load, "skip_tokenizer_init": True, "dtype": "bfloat16", "random_seed": 0,
        "context_length": max(row.prompt + row.gen for row in rows) + 64, "max_running_requests": batch,
        "chunked_prefill_size": CHUNK, "max_prefill_tokens": CHUNK, "cuda_graph_max_bs_decode": batch,
        "cuda_graph_backend_prefill": "disabled", "sampling_backend": "pytorch", "grammar_backend": "none",
        "disable_radix_cache": True, "log_level": "warning",
    }
    return found if not k else found | {
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head, "speculative_draft_load_format": load,
        "speculative_num_steps": k, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": k + 1,
    }
