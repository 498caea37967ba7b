"""Times vLLM, SGLang or batchspec, the first that this Python has, on the rows of README.md and PERFORMANCE.md.

    python jobs/peers.py out.jsonl 8b-64x8192 --k 0                 # no drafts; --k 2: EAGLE-3 with two; batchspec: --k auto
    python jobs/peers.py out.jsonl 20b-256x1024 20b-64x8192 --k 2   # rows of one shape share an engine: one start
    python jobs/peers.py out.jsonl gsm8k --k 3 --model DIR --head DIR --input gsm8k_test.parquet    # real weights and prompts

vLLM and SGLang get dummy weights and random prompts, greedy, without a prefix cache, with CUDA graphs for all rows. Drafts 1, 2
and 3 are accepted with probability .6, .28 and .12; SGLang gives all rows of a round one length, with that mean. A turn times one
token of each row (prefill_s), then whole requests (whole_s: first prompt to last token). Each turn is a JSON line, printed and
appended to OUT; the last counts: kernels compile in the first. decode_tok_s = (tokens - rows) / (whole_s - prefill_s).

--routing: vLLM and SGLang draw all dummy tensors, biases too, from -.001 to .001. gpt-oss's router then follows its biases: all
tokens have the same 4 experts. spread, the default, sets biases to zero, so that tokens choose evenly, at no cost.
uniform_random is vLLM's simulation: random numbers in each layer, with Qwen3 a top-k besides; SGLang's does nothing for gpt-oss.
none: weights as they are. batchspec's own dummy weights have an even router.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the Python of another engine has no batchspec
from batchspec.model.shapes import COMMON, DRAFT_VOCAB, config_json, shape_spec

ENGINES = ("vllm", "sglang", "batchspec")
RATES = (0.6, 0.28, 0.12)
CHUNK = 16384  # tokens of a prefill step in vLLM and SGLang
SPREAD = "PEERS_SPREAD"  # tells the processes that an engine starts whose dummy weights to change


class Row(NamedTuple):
    """shape: a name of batchspec.model.shapes; "": real weights, `batch` prompts at a time, up to the model's own ends."""

    shape: str
    batch: int
    prompt: int
    gen: int = 512


ROWS = {
    f"{short}-{batch}x{prompt}": Row(shape, batch, prompt)
    for short, shape, sizes in (
        ("8b", "llama8b", [(64, 8192), (256, 1024)]), ("8b-fp8", "llama8b-fp8", [(64, 8192), (256, 1024)]),
        ("1b", "llama1b", [(256, 1024)]), ("135m", "smol135m", [(256, 512)]),
        ("20b", "gpt-oss-20b", [(256, 1024), (64, 8192), (128, 4096)]), ("120b", "gpt-oss-120b", [(256, 1024), (64, 8192)]),
        ("30b", "qwen3-30b-a3b-fp8", [(256, 1024), (64, 8192), (32, 16384)]),
    )
    for batch, prompt in sizes
} | {"gsm8k": Row("", 256, 1024, 256)}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", help="JSON lines file, appended to")
    add("rows", nargs="+", metavar="ROW", choices=list(ROWS), help=", ".join(ROWS))
    add("--k", default="0", choices=["0", "1", "2", "3", "auto"], help="draft tokens a round of an EAGLE-3 head; 0: no drafts")
    add("--turns", type=int, default=2)
    add("--routing", default="spread", choices=["spread", "uniform_random", "none"])
    add("--options", type=json.loads, default={}, metavar="JSON", help="arguments of the other engine, over the script's")
    add("--model", help="gsm8k: a folder of real weights")
    add("--head", help="gsm8k: an EAGLE-3 head for them")
    add("--input", help="gsm8k: Parquet with a user's turn per row in the column `prompt`")
    args = parser.parse_args(argv)
    if len({ROWS[name].shape for name in args.rows}) > 1:
        parser.error("rows of different shapes need a command each")
    if "gsm8k" in args.rows and not (args.model and args.input and (args.head or args.k == "0")):
        parser.error("gsm8k needs --model and --input, and with drafts --head")
    args.engine = next(name for name in ENGINES if getattr(importlib.util.find_spec(name), "origin", None))  # no mere folder
    if args.k == "auto" and args.engine != "batchspec":
        parser.error("--k auto is batchspec's; time every K of the others and take the best")
    return args


def line(args: argparse.Namespace, name: str, turn: int, prefill_s: float | None, whole_s: float, tokens: int) -> dict[str, Any]:
    """What a turn of a row gives. prefill_s: None for real prompts, which have only tok_s, of whole requests."""
    row = ROWS[name]
    decode = None if prefill_s is None else round((tokens - row.batch) / (whole_s - prefill_s), 1)
    return {
        "engine": args.engine, "version": importlib.import_module(args.engine).__version__, "row": name, "k": args.k,
        "decode_tok_s": decode, "prefill_s": prefill_s and round(prefill_s, 3), "whole_s": round(whole_s, 3),
        "tok_s": round(tokens / whole_s, 1), "tokens": tokens, "turn": turn, "counts": turn == args.turns, **row._asdict(),
        "routing": None if args.engine == "batchspec" else args.routing, "options": args.options,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def model_config(shape: str) -> dict[str, Any]:
    """config.json of the shape as the other engines read it: FP8 models name the router of each layer in full."""
    config: dict[str, Any] = json.loads(config_json(shape))
    quantization, layers = config.get("quantization_config", {}), range(config["num_hidden_layers"])
    if quantization.get("quant_method") == "fp8":
        routers = [f"model.layers.{i}.mlp.gate" for i in layers if "num_experts" in config]
        config["quantization_config"] = quantization | {"modules_to_not_convert": ["lm_head", *routers]}
    if config["model_type"] == "gpt_oss":
        config["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    return config


def head_config(shape: str) -> dict[str, Any]:
    """An EAGLE-3 head as large as the one of `batchspec bench`."""
    own = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rope_theta")
    return COMMON | {key: model_config(shape)[key] for key in own} | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB.get(shape, 32000),
        "intermediate_size": shape_spec(shape).intermediate_size,
    }


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


def environment(engine: str, routing: str, k: int) -> dict[str, str]:
    """Variables of an engine with dummy weights: how tokens choose experts; in SGLang the mean length of a round."""
    found = {SPREAD: engine} if routing == "spread" else {}
    if routing == "uniform_random":
        found |= {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": routing, "SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}
    if k:  # the drafted tokens are kept: otherwise all rows would go on with one token, and with its experts
        found |= {"SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token", "SGLANG_SIMULATE_ACC_LEN": f"{1 + sum(RATES[:k]):.2f}"}
    return found


def vllm_options(rows: Sequence[Row], k: int, target: str, head: str) -> dict[str, Any]:
    """Arguments of vllm.LLM. Its CUDA graphs end at 512 tokens (gpt-oss: 1,024), fewer than 256 rows with drafts have."""
    dummy, graph = bool(rows[0].shape), max(row.batch for row in rows) * (k + 1)
    found: dict[str, Any] = {
        "model": target, "load_format": "dummy" if dummy else "auto", "skip_tokenizer_init": dummy, "dtype": "bfloat16",
        "max_model_len": max(row.prompt + row.gen for row in rows) + 64, "max_num_seqs": max(row.batch for row in rows),
        "max_num_batched_tokens": CHUNK, "gpu_memory_utilization": 0.92, "enable_prefix_caching": False, "seed": 0,
    }
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(RATES[:k])} if dummy else {}
    if k:
        found["speculative_config"] = {"method": "eagle3", "num_speculative_tokens": k, "model": head, **synthetic}
    return found if graph <= 512 else found | {"compilation_config": {"max_cudagraph_capture_size": graph}}


def sglang_options(rows: Sequence[Row], k: int, target: str, head: str) -> dict[str, Any]:
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


def start(args: argparse.Namespace, folder: Path) -> Callable[[list[list[int]], int], int]:
    """Starts vLLM or SGLang. What it returns answers prompts with at most so many tokens each and counts the tokens."""
    rows, paths, dummy = [ROWS[name] for name in args.rows], [args.model, args.head], bool(ROWS[args.rows[0]].shape)
    for at, config in enumerate([model_config, head_config] if dummy else []):
        paths[at] = str(folder / config.__name__)
        Path(paths[at]).mkdir()
        Path(paths[at], "config.json").write_text(json.dumps(config(rows[0].shape)))
    package = importlib.import_module(args.engine)
    if args.engine == "sglang":
        engine = package.Engine(**sglang_options(rows, int(args.k), *paths) | args.options)
    else:
        engine = package.LLM(**vllm_options(rows, int(args.k), *paths) | args.options)

    def run(prompts: list[list[int]], gen: int) -> int:
        common = {"temperature": 0.0, "ignore_eos": dummy}
        if args.engine == "sglang":
            found = engine.generate(input_ids=prompts, sampling_params=[{"max_new_tokens": gen, **common}] * len(prompts))
            return sum(min(gen, len(one["output_ids"])) for one in found)  # the last round can go past the limit
        sampling = package.SamplingParams(max_tokens=gen, detokenize=False, **common)
        found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found)

    return run


def prompts_of(args: argparse.Namespace, row: Row) -> list[list[int]]:
    """Random tokens, or the chats of --input in the model's template."""
    if row.shape:
        chance = random.Random(0)
        return [chance.choices(range(10, 30000), k=row.prompt) for _ in range(row.batch)]
    texts = importlib.import_module("pyarrow.parquet").read_table(args.input).column("prompt").to_pylist()
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(args.model)
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats]


def peer_turns(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    run, clock = start(args, folder), time.perf_counter
    for name in args.rows:
        row, prompts = ROWS[name], prompts_of(args, ROWS[name])
        for turn in range(1, args.turns + 1):
            begun, _ = clock(), run(prompts, 1) if row.shape else None
            middle, tokens = clock(), run(prompts, row.gen)
            yield line(args, name, turn, middle - begun if row.shape else None, clock() - middle, tokens)


def own_turns(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Turns that `batchspec bench` times; each has the prefill of the first."""
    for name, out in ((name, folder / name) for name in args.rows):
        bench = [sys.executable, "-m", "batchspec.cli", "bench", str(out), name]
        subprocess.run([*bench, *bench_arguments(args, ROWS[name])], check=True)
        found = json.loads(out.read_text())
        for turn, whole_s in enumerate(found["seconds"], 1):
            yield line(args, name, turn, found.get("prefill_s"), whole_s, found["tokens"])


def bench_arguments(args: argparse.Namespace, row: Row) -> list[str]:
    draft = "none" if args.k == "0" else f"eagle3 --k {args.k}"
    found = f"--batch {row.batch} --gen {row.gen} --runs {args.turns} --draft {draft}"
    if row.shape:
        return f"{found} --shape {row.shape} --prompt {row.prompt} --accept {','.join(map(str, RATES))}".split()
    head = [] if args.k == "0" else ["--draft-path", args.head]
    return [*found.split(), "--model", args.model, "--input", args.input, "--chat", "--eos", *head]


def main() -> None:
    args = parse()
    if args.engine != "batchspec" and "gsm8k" not in args.rows:
        os.environ |= environment(args.engine, args.routing, int(args.k))
        if args.routing == "spread":
            spread_routing(args.engine)
    turns = own_turns if args.engine == "batchspec" else peer_turns
    with tempfile.TemporaryDirectory() as folder, open(args.out, "a", encoding="utf-8", buffering=1) as file:
        for found in turns(args, Path(folder)):
            print(json.dumps(found), flush=True)
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
elif SPREAD in os.environ and __name__ == "__mp_main__":  # a process that the engine started
    spread_routing(os.environ[SPREAD])
