"""The command line of `batchspec bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from batchspec.bench import rounds
from batchspec.bench.acceptance import read_accept
from batchspec.bench.engines import DRAFTS, OPTIONS, TREE, parse_options
from batchspec.config.checks import MAX_ADAPTERS
from batchspec.config.schema import KEYS
from batchspec.console.arguments import ArgumentParser
from batchspec.errors import ConfigError
from batchspec.job.prepare import choose_device
from batchspec.model.families.shapes import SHAPES
from batchspec.model.lora_shape import MAX_RANK


def parse(argv: list[str], description: str | None = None) -> argparse.Namespace:
    """Raises ConfigError for arguments that cannot be combined."""
    parser = ArgumentParser(prog="batchspec bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", nargs="?", help="JSON lines file, appended to")
    add("name", nargs="?", help="written into each line")
    add("--make-job", metavar="DIR", type=Path, help="write model/, known.parquet and hidden.parquet there, and stop")
    add("--shape", default="smol135m", help=f"{', '.join(SHAPES)}, or a config.json")
    add("--model", help="folder, hub id or smollm2-135m: real weights instead of a shape")
    add("--input", default="pkg://demo", help="with --model: prompts, as input.path")
    add("--chat", action="store_true", help="with --model: the column `prompt` is a user's turn, as input.chat=true")
    add("--eos", action="store_true", help="with --model: rows end where the model ends them; without it, at --gen tokens")
    add("--kind", default="", help="with --model: comma-separated values of the prompts' `kind` column")
    add("--batch", type=int, default=8, help="slots")
    add("--prompt", type=int, default=512, help="tokens of a random prompt")
    add("--gen", type=int, default=128, help="output tokens a request (with --requests and --make-job: the cap)")
    add(
        "--rounds",
        type=int,
        help="time so many rounds over rows with a past of --prompt noise tokens, and no prefill; --k 0 keeps K/V warm",
    )
    add("--requests", type=int, default=0, help="this many requests; with --shape their output is lognormal, as in a job")
    add("--equal", action="store_true", help="with --shape and --requests: output of --gen tokens each, not lognormal")
    add("--samples", type=int, default=1, help="with --shape: requests that have one prompt in common")
    add("--draft", nargs="+", default=["none"], choices=DRAFTS)
    add("--draft-vocab", type=int, help="draft.vocab_size of mtp: so many tokens can be drafted, the most frequent ones")
    add("--draft-path", help="folder or hub id of the head, or of pard's model; without it a head is noise of the shape's size")
    add("--k", nargs="+", default=[8], type=_draft_len, help="draft tokens per round; auto: the engine chooses, 0 included")
    add("--topk", type=int, default=10, help="branches of a draft tree, whose levels are --k")
    add("--nodes", type=int, help="nodes of a draft tree that are verified; 60, or all that grow")
    add("--temperature", nargs="+", default=[0.0], type=float, help="of the draws; 0 is greedy")
    add(
        "--schemas", nargs="+", default=[0], type=int,
        help="rows follow so many distinct schemas, one each; 0: none. A variant for each number: --schemas 0 100",
    )
    add(
        "--ngrams", nargs="+", default=[0], type=int,
        help="decode.no_repeat_ngram.ngram_size of all rows, 0: off. A variant for each size: --ngrams 0 20",
    )
    add("--ngram-window", type=int, default=1000, help="its window_size; with --rounds so many tokens of the past are output")
    add("--accept", default="", help=(
        "synthetic acceptance by position, unconditional: .6,.28,.12; cut to each --k. Of rows of two kinds: .9,.8,.7;.3,.1,.03. "
        "Of each row of a finished job with drafts: its output.dir, or one of its Parquet files"
    ))
    add("--window", type=int, help="newest keys that the head reads (all without it), or the drafting model")
    add("--corpus-tokens", type=int, default=0, help="lookup, hybrid: newest tokens of ended rows that drafts are copied from")
    add("--sink", type=int, default=0, help="number of first keys that it reads besides its window")
    add("--draft-kv", default="auto", choices=["auto", "fp8"], help="draft.cache_dtype: fp8 stores a head's K and V as e4m3")
    add("--opt", nargs="+", default=[], help=f"variants with NAME=false,...: {', '.join(OPTIONS)}")
    add("--prefill-tokens", type=int, default=0, help="tokens of a prefill pass; 0: as a job")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    add("--kv", default="auto", choices=["auto", "fp8"], help="cache.dtype: fp8 stores K and V as e4m3, scales calibrated")
    add("--quantize", choices=["fp8"], help="model.quantize: fp8 quantises bf16 weights when they are loaded")
    add("--states", default="auto", choices=["auto", "bfloat16"], help="cache.state_dtype, of recurrent layers")
    add("--deterministic", action="store_true", help="decode.deterministic: sums of one order; compare with a run without it")
    add("--adapters", type=int, default=0, help="LoRA adapters of noise, of all projections: rows have them in turn")
    add("--adapter-rank", type=int, default=16, help=f"their rank, at most {MAX_RANK}")
    add("--device", default="auto", choices=["auto", "cpu"])
    add(
        "--tensor-parallel",
        type=int,
        default=1,
        choices=[1, 2, 4, 8],
        metavar="N",
        help="1, 2, 4 or 8 processes compute the model together, one a GPU (with --device cpu over gloo)",
    )
    add("--runs", type=int, default=1, help="turns; ratios are medians over them")
    add("--profile", metavar="FILE", help="append a table of the kernels of some rounds of each variant (needs a GPU; of rank 0)")
    args = parser.parse_args(argv)
    args.accept_given, args.accept = args.accept, read_accept(args.accept) if args.accept else None
    args.opt = [parse_options(text) for text in args.opt]
    _check(args)
    return args


def device_of(args: argparse.Namespace) -> torch.device:
    return choose_device("cpu" if args.device == "cpu" else "auto")


def _draft_len(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _check(args: argparse.Namespace) -> None:
    if not args.make_job and args.name is None:
        raise ConfigError("bench needs OUT.jsonl and NAME, or --make-job DIR")
    if "window" in args.draft and args.window is None:
        raise ConfigError("--draft window needs --window: how many newest keys the model drafts with")
    if "pard" in args.draft and args.draft_path is None:
        raise ConfigError("--draft pard needs --draft-path: a small model with the target's tokenizer")
    if args.topk < 2 and TREE in args.draft:
        raise ConfigError(f"--topk {args.topk} must be at least 2 for a tree; --draft eagle3 is a chain")
    if any(k is not None and k < (0 if args.rounds else 1) for k in args.k):
        raise ConfigError("--k counts from 1, with --rounds from 0; --draft none is the variant without drafts")
    if any(KEYS["decode.temperature"].violation("temperature", heat) for heat in args.temperature):
        raise ConfigError(f"--temperature {args.temperature} must be in 0 .. 100; 0 is greedy")
    if any(number < 0 for number in args.schemas):
        raise ConfigError(f"--schemas {args.schemas} are numbers of distinct schemas; 0 is the variant without them")
    if any(size < 0 or size > args.ngram_window for size in args.ngrams):
        raise ConfigError(f"--ngrams {args.ngrams} must be in 0 .. {args.ngram_window}, which is --ngram-window")
    if not 0 <= args.adapters <= MAX_ADAPTERS or not 1 <= args.adapter_rank <= MAX_RANK:
        given = f"--adapters {args.adapters} --adapter-rank {args.adapter_rank}"
        raise ConfigError(f"{given}: there may be up to {MAX_ADAPTERS} adapters, of rank 1 to {MAX_RANK}")
    if args.adapters and args.deterministic:
        raise ConfigError(f"--adapters {args.adapters} with --deterministic is not supported: their sums depend on the batch")
    if args.adapters and args.make_job:
        raise ConfigError(f"--adapters {args.adapters} with --make-job: give the job adapters of its own, model.adapters")
    if (args.chat or args.eos) and not args.model:
        raise ConfigError(
            "--chat and --eos need --model: random prompts are not chats, and a model with dummy weights does not end its outputs"
        )
    if args.eos and any(args.schemas):
        raise ConfigError(f"--eos with --schemas {args.schemas}: rows with schemas would end at other lengths; leave one out")
    if args.accept is not None and any(args.schemas):
        raise ConfigError(f"--accept with --schemas {args.schemas}: drafts accepted by chance follow no schema; leave one out")
    if args.deterministic and (args.tensor_parallel > 1 or TREE in args.draft):
        raise ConfigError("--deterministic is not supported with --tensor-parallel above 1 or a tree; leave one out")
    if args.rounds is not None:
        rounds.check(args)
        args.gen = rounds.tokens_needed(args)
    if args.equal and (args.model or not args.requests or args.make_job):
        raise ConfigError("--equal needs --shape and --requests: without them every output has --gen tokens, or ends by itself")
    if args.samples > 1 and args.model:
        raise ConfigError("--samples needs --shape; with --model repeat the prompts with --requests")
    if args.samples == 1 and any("sharing" in options for options in args.opt):
        raise ConfigError("--opt sharing=... needs --samples above 1: nothing is shared otherwise")
    if args.tensor_parallel > 1:
        _check_ranks(args)
    if args.profile and not torch.cuda.is_available():
        raise ConfigError("--profile needs a GPU: it lists kernels; leave it out")


def _check_ranks(args: argparse.Namespace) -> None:
    asked = f"--tensor-parallel {args.tensor_parallel}"
    if args.make_job:
        raise ConfigError(f"{asked} with --make-job: nothing is measured; give cluster.tensor_parallel to the job")
    gpus = torch.cuda.device_count() if device_of(args).type == "cuda" else args.tensor_parallel
    if gpus < args.tensor_parallel:
        raise ConfigError(f"{asked}: this machine shows {gpus} GPUs, and each process needs one of its own; lower it")
