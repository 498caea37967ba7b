"""Times vLLM over a folder of `task_jobs.py` or `image_jobs.py`, in vLLM's Python. Prints JSON lines; the last one counts.

    python jobs/benchmarks/peer_jobs.py DIR embed             # rows/s from Parquet to Parquet
    python jobs/benchmarks/peer_jobs.py DIR classify          # of reward; of rerank with --model peer_model --input ids.parquet
    python jobs/benchmarks/peer_jobs.py DIR chat --gen 512    # rows of an image each; its preparation of images counts

Dummy weights in bf16, greedy. `embed` and `classify` run the pooling runner, with its prefix cache for --cache. `chat` is
LLM.chat with the settings that vLLM 0.33 documents for offline rows whose images differ: no cache of processed images, no prefix
cache, one image and no video a prompt. start_s: seconds until the engine is ready; --threads: of torch.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WARM_ROWS = {"embed": 512, "classify": 512, "chat": 8}
Job = Callable[[int | None], dict[str, Any]]
"""Runs the first rows, or all of them, and returns figures."""


def pooling(given: argparse.Namespace) -> Job:
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=str(given.folder / given.model), runner="pooling", convert=given.what, load_format="dummy", dtype="bfloat16",
        max_model_len=4096, max_num_seqs=given.slots, max_num_batched_tokens=given.tokens, enable_prefix_caching=given.cache,
        seed=0,
    )
    compute = llm.embed if given.what == "embed" else llm.classify

    def job(count: int | None) -> dict[str, Any]:
        table = pq.read_table(given.folder / given.input).slice(0, count)
        prompts = [{"prompt_token_ids": ids} for ids in table["prompt_ids"].to_pylist()]
        done = compute(prompts, use_tqdm=False)
        values = [out.outputs.embedding if given.what == "embed" else out.outputs.probs for out in done]
        numbers = np.array(values, np.float32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), numbers.shape[1])
        pq.write_table(pa.table({"id": table["id"], "value": column}), given.folder / "peer.parquet", compression="zstd")
        return {"rows": len(done), "prompt_tokens": sum(len(out.prompt_token_ids) for out in done)}

    return job


def chat(given: argparse.Namespace) -> Job:
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    import torch
    from PIL import Image

    vllm: Any = importlib.import_module("vllm")
    torch.set_num_threads(given.threads)
    llm = vllm.LLM(
        model=str(given.folder / given.model), load_format="dummy", dtype="bfloat16", max_model_len=given.max_len,
        max_num_seqs=given.slots, max_num_batched_tokens=given.tokens, enable_prefix_caching=False, mm_processor_cache_gb=0,
        limit_mm_per_prompt={"image": 1, "video": 0}, seed=0,
        additional_config={"gdn_prefill_backend": "triton"},  # for Qwen3.5; FlashInfer's is not everywhere
    )

    def message(prompt: str, image: bytes) -> list[dict[str, Any]]:
        parts = [{"type": "image_pil", "image_pil": Image.open(io.BytesIO(image))}, {"type": "text", "text": prompt}]
        return [{"role": "user", "content": parts}]

    def job(count: int | None) -> dict[str, Any]:
        table = pq.read_table(given.folder / given.input).slice(0, count)
        chats = [message(row["prompt"], row["image"]) for row in table.to_pylist()]
        sampling = vllm.SamplingParams(max_tokens=given.gen, ignore_eos=True, temperature=0.0)
        done = llm.chat(chats, sampling, use_tqdm=False, chat_template_content_format="openai")
        tokens = sum(len(out.outputs[0].token_ids) for out in done)
        return {"rows": len(done), "prompt_tokens": sum(len(out.prompt_token_ids) for out in done), "tokens": tokens}

    return job


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=WARM_ROWS)
    parser.add_argument("--model", default="model", help="folder below DIR")
    parser.add_argument("--input", default="in.parquet", help="file below DIR")
    parser.add_argument("--rows", type=int, help="the first rows only")
    parser.add_argument("--slots", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a step")
    parser.add_argument("--cache", action="store_true")
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=14)
    given = parser.parse_args(arguments)
    before = time.perf_counter()
    job = (chat if given.what == "chat" else pooling)(given)
    ready = time.perf_counter() - before
    for count in (WARM_ROWS[given.what], given.rows):
        before = time.perf_counter()
        figures = job(count)
        seconds = time.perf_counter() - before
        rates = {"seconds": round(seconds, 2), "rows_s": round(figures["rows"] / seconds, 2)}
        print(json.dumps({"what": given.what, "start_s": round(ready, 1), **figures, **rates}), flush=True)


if __name__ == "__main__":
    main()
