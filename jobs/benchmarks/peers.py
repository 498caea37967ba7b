"""Times vLLM, SGLang or batchspec, the first that this Python has, on the rows of README.md and PERFORMANCE.md.

    python jobs/benchmarks/peers.py out.jsonl 8b-64x8192 --k 0  # no drafts; --k 2: EAGLE-3 with two; batchspec: --k auto
    python jobs/benchmarks/peers.py out.jsonl 20b-256x1024 20b-64x8192 --k 2  # rows of one shape share an engine: one start
    python jobs/benchmarks/peers.py out.jsonl qwen3.5-27b-64x4096 --k 3 --accept .85,.7,.55  # the model's own MTP layer
    python jobs/benchmarks/peers.py out.jsonl glm-4.7-flash-256x1024 --gen 256  # 256 new tokens a row in place of 512
    python jobs/benchmarks/peers.py out.jsonl 70b-64x4096 --k 2 --tensor-parallel 2  # one engine on two cards
    python jobs/benchmarks/peers.py out.jsonl qwen3-8b-256x1024 --k 3 --draft block  # a DSpark head; without --draft EAGLE-3
    python jobs/benchmarks/peers.py out.jsonl gsm8k --k 3 --model DIR --head DIR --input gsm8k_test.parquet  # real weights

vLLM and SGLang get dummy weights and random prompts, greedy, without a prefix cache, with CUDA graphs for all rows. Drafts 1, 2
and 3 are accepted with the probabilities of --accept; SGLang gives all rows of a round one length, with that mean. A turn times
one token of each row (prefill_s), then whole requests (whole_s: first prompt to last token). Each turn is a JSON line, printed
and appended to OUT; the last counts: kernels compile in the first. decode_tok_s = (tokens - rows) / (whole_s - prefill_s). With
--warm N a pass over some rows (two full steps of prefill, N tokens each) compiles them before, so that --turns 1 is enough.

--options: JSON over vLLM's or SGLang's arguments; of speculative_config and compilation_config only the given keys change. vLLM
verifies by a DSpark head's confidence, which is about .5 for dummy weights: to verify all its drafts give '{"speculative_config":
{"enable_adaptive_verification": false}}'. nano: '{"use_replayssm": true, "mamba_backend": "flashinfer"}' replays its states.

--together DIR SIZE: SIZE such commands start at the same time and measure one after another. --kv-gib gives vLLM its share.

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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the Python of another engine has no batchspec
from peer_gang import Gang
from peer_options import CHUNK, RATES, SPREAD, environment, sglang_options, spread_routing, vllm_options, with_options
from peer_shapes import (
    ROWS,
    Row,
    drafter_config,
    drafter_of,
    model_config,
    write_assistant,
    write_config,
)

ENGINES = ("vllm", "sglang", "batchspec")
PARALLEL = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}


def rates_of(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", help="JSON lines file, appended to")
    add("rows", nargs="+", metavar="ROW", choices=list(ROWS), help=", ".join(ROWS))
    add("--k", default="0", choices=["0", "1", "2", "3", "auto"], help="draft tokens per round; 0: no drafts")
    add("--accept", type=rates_of, default=RATES, metavar="A,B,C", help="acceptance of drafts 1, 2, 3, unconditional: .6,.28,.12")
    add("--draft", choices=["eagle3", "block"], help="the head of a model that has no drafter of its own; without it eagle3")
    add("--gen", type=int, help="new tokens a row; without it 512, of gsm8k up to 256")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="N cards compute the model together")
    add("--turns", type=int, default=2)
    add("--warm", type=int, default=0, metavar="N", help="N tokens of some rows before the first turn; batchspec: no effect")
    add("--together", nargs=2, metavar=("DIR", "SIZE"), help="an empty folder, and how many commands share it")
    add("--kv-gib", type=float, help="vLLM's memory for K/V; without it all that 92 %% of the card leave")
    add("--routing", default="spread", choices=["spread", "uniform_random", "none"])
    add("--options", type=json.loads, default={}, metavar="JSON", help="arguments of the other engine, over those of the script")
    add("--model", help="gsm8k: a folder of real weights")
    add("--head", help="gsm8k: an EAGLE-3 head for them")
    add("--input", help="gsm8k: Parquet with a user's turn per row in the column `prompt`")
    args = parser.parse_args(argv)
    if len({ROWS[name].shape for name in args.rows}) > 1:
        parser.error("rows of different shapes need a command each")
    usual = drafter_of(ROWS[args.rows[0]].shape)
    if args.draft and (usual != "eagle3" or "gsm8k" in args.rows):
        parser.error(f"--draft {args.draft} is for dummy models without a drafter of their own")
    args.drafter = "none" if args.k == "0" else args.draft or usual
    if args.k != "0" and usual == "none":
        parser.error(f"{args.rows[0]} is timed without drafts: give --k 0")
    if "gsm8k" in args.rows and not (args.model and args.input and (args.head or args.k == "0")):
        parser.error("gsm8k needs --model and --input, and with drafts --head")
    args.engine = next(name for name in ENGINES if getattr(importlib.util.find_spec(name), "origin", None))  # no mere folder
    if args.k == "auto" and args.engine != "batchspec":
        parser.error("--k auto is batchspec's; time every K of the others and take the best")
    args.rates = args.accept if args.k == "auto" else args.accept[: int(args.k)]
    if args.k != "auto" and len(args.rates) < int(args.k):
        parser.error(f"--k {args.k} needs as many rates in --accept")
    if args.engine == "sglang" and args.rates and args.drafter != "eagle3":
        parser.error("SGLang is timed with EAGLE-3 heads alone")
    return args


def row_of(args: argparse.Namespace, name: str) -> Row:
    return ROWS[name]._replace(gen=args.gen or ROWS[name].gen)


def line(args: argparse.Namespace, name: str, turn: int, prefill_s: float | None, whole_s: float, tokens: int) -> dict[str, Any]:
    """What a turn of a row gives. prefill_s: None for real prompts, which have only tok_s, of whole requests."""
    row = row_of(args, name)
    decode = None if prefill_s is None else round((tokens - row.batch) / (whole_s - prefill_s), 1)
    return {
        "engine": args.engine, "version": importlib.import_module(args.engine).__version__, "row": name, "k": args.k,
        "accept": args.rates, "draft": args.drafter, "tensor_parallel": args.tensor_parallel,
        "decode_tok_s": decode, "prefill_s": prefill_s and round(prefill_s, 3), "whole_s": round(whole_s, 3),
        "tok_s": round(tokens / whole_s, 1), "tokens": tokens, "turn": turn, "counts": turn == args.turns, **row._asdict(),
        "routing": None if args.engine == "batchspec" else args.routing, "options": args.options,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def start(args: argparse.Namespace, folder: Path) -> Callable[[list[list[int]], int], int]:
    """Starts vLLM or SGLang. What it returns answers prompts with at most so many tokens each and counts the tokens."""
    rows, dummy = [row_of(args, name) for name in args.rows], bool(ROWS[args.rows[0]].shape)
    target, drafter = args.model, args.head
    if dummy:
        target = write_config(folder / "model", model_config(rows[0].shape))
        own = args.drafter in ("none", "mtp")
        drafter = None if own else write_config(folder / "drafter", drafter_config(rows[0].shape, args.drafter))
    package = importlib.import_module(args.engine)
    given = {PARALLEL[args.engine]: args.tensor_parallel} | args.options
    if args.engine == "sglang":
        engine = package.Engine(**with_options(sglang_options(rows, len(args.rates), target, drafter), given))
    else:
        options = vllm_options(rows, args.rates, target, drafter, args.kv_gib, kind=args.drafter)
        engine = package.LLM(**with_options(options, given))

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
    gang, clock = Gang(Path(args.together[0]), int(args.together[1])) if args.together else None, time.perf_counter
    with gang.starting() if gang else nullcontext():
        run = start(args, folder)
    if gang:
        gang.take_turn()
    for name in args.rows:
        row, prompts = row_of(args, name), prompts_of(args, ROWS[name])
        if args.warm:
            run(prompts[: 1 + 2 * CHUNK // row.prompt], args.warm)
        for turn in range(1, args.turns + 1):
            begun, _ = clock(), run(prompts, 1) if row.shape else None
            middle, tokens = clock(), run(prompts, row.gen)
            yield line(args, name, turn, middle - begun if row.shape else None, clock() - middle, tokens)


def own_turns(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Turns that `batchspec bench` times; each has the prefill of the first."""
    for name, out in ((name, folder / name) for name in args.rows):
        bench = [sys.executable, "-m", "batchspec.cli", "bench", str(out), name, *bench_arguments(args, row_of(args, name))]
        if args.drafter == "assistant":
            path = folder / "assistant"
            bench += ["--draft-path", str(path) if path.exists() else write_assistant(path, ROWS[name].shape)]
        subprocess.run(bench, check=True)
        found = json.loads(out.read_text())
        for turn, whole_s in enumerate(found["seconds"], 1):
            yield line(args, name, turn, found.get("prefill_s"), whole_s, found["tokens"])


def bench_arguments(args: argparse.Namespace, row: Row) -> list[str]:
    drafter = args.drafter.replace("assistant", "mtp")
    draft = "none" if drafter == "none" else f"{drafter} --k {args.k}"
    found = f"--batch {row.batch} --gen {row.gen} --runs {args.turns} --tensor-parallel {args.tensor_parallel} --draft {draft}"
    if row.shape:
        return f"{found} --shape {row.shape} --prompt {row.prompt} --accept {','.join(map(str, args.accept))}".split()
    head = [] if args.k == "0" else ["--draft-path", args.head]
    return [*found.split(), "--model", args.model, "--input", args.input, "--chat", "--eos", *head]


def main() -> None:
    args = parse()
    if args.engine != "batchspec" and "gsm8k" not in args.rows:
        os.environ |= environment(args.engine, args.routing, args.rates)
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
