"""Every range check of the configuration: what cannot run is refused in one line - key, value, limit, what to do."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from batchspec.config import RunConfig
from batchspec.errors import ConfigError

INT64 = (-(2**63), 2**63 - 1)
MAX_TREE_NODES, MAX_TREE_PLACES = 63, 64
"""Nodes that are verified beside a row's newest token, and places that grow a tree: who sees whom is 64 bits."""

# key -> (lowest, highest, what to do). The per-row columns of the same name obey them too.
RANGES: dict[str, tuple[float, float, str]] = {
    "model.max_len": (2, math.inf, "give prompt + output tokens, or null for the model's own limit"),
    "draft.max_len": (1, 64, "give the draft tokens a round, or draft=none for no speculation"),
    "draft.min_ngram": (1, 16, "1 or 2 works well"),
    "draft.max_ngram": (1, 16, "3 to 8 works well"),
    "draft.growth": (1, 64, "2 works well; draft.max_len and more is no limit"),
    "draft.head_len": (1, 64, "null is draft.max_len; 3 works well"),
    "draft.corpus_tokens": (0, 2**28, "0 is off; 1000000 take 72 MB"),
    "draft.table_entries": (16, 2**30, "null is four for each of draft.corpus_tokens"),
    "draft.tree.topk": (1, 64, "1 drafts a chain; 4 to 10 works well for a tree"),
    "draft.tree.depth": (1, 64, "4 to 6 works well"),
    "draft.tree.nodes": (1, MAX_TREE_NODES, "a round verifies the newest token and at most 63 nodes of a row"),
    "draft.window": (1, math.inf, "null reads all keys"),
    "draft.sink": (0, math.inf, "4 works well with a window"),
    "draft.adapt.every_shards": (0, math.inf, "0 leaves the head as it is"),
    "draft.adapt.time_share": (math.ulp(0.0), 1.0, "0.1 is usual, 1 is no limit"),
    "draft.adapt.lr": (math.ulp(0.0), 1.0, "5e-4 is usual"),
    "decode.max_new_tokens": (1, math.inf, "give the output tokens a completion at most"),
    "decode.min_new_tokens": (0, math.inf, "0 is off"),
    "decode.thinking_token_budget": (0, math.inf, "null is no limit"),
    "decode.temperature": (0.0, 100.0, "0 is greedy, 1 the model's own distribution"),
    "decode.top_k": (0, math.inf, "0 is off"),
    "decode.top_p": (math.ulp(0.0), 1.0, "1 is off"),
    "decode.min_p": (0.0, 1.0, "0 is off"),
    "decode.repetition_penalty": (0.01, 100.0, "1 is off"),
    "decode.presence_penalty": (-100.0, 100.0, "0 is off"),
    "decode.seed": (*INT64, "give a 64-bit integer"),
    "decode.n": (1, 4096, "1 is one completion a row"),
    "packing.slots": (1, 4096, "null lets the planner choose"),
    "packing.pages": (2, 2**31 - 1, "null lets the planner choose"),
    "packing.memory_gb": (math.ulp(0.0), math.inf, "null lets the planner choose"),
    "packing.prefill_tokens": (1, math.inf, "null lets the planner choose"),
    "packing.run_ahead": (0, 64, "null lets the planner choose"),
    "input.limit": (1, math.inf, "null takes every row"),
    "input.max_error_fraction": (0.0, 1.0, "1 never ends the job"),
    "output.shard_rows": (1, 10_000_000, "null lets batchspec choose"),
    "output.logprobs": (0, 100, "null writes none"),
    "cluster.max_restarts": (0, math.inf, "0 is never"),
    "cluster.signal_s": (1, 65535, "120 is enough to save and to requeue"),
    "cluster.tasks": (1, math.inf, "give the tasks of the array"),
    "cluster.gpus": (0, math.inf, "0 is a task on a CPU"),
    "cluster.cpus": (1, math.inf, "null leaves it to the cluster"),
    "cluster.memory_gb": (math.ulp(0.0), math.inf, "null leaves it to the cluster"),
    "cluster.time_h": (math.ulp(0.0), math.inf, "null leaves it to the partition"),
    "cluster.watchdog_s": (0, math.inf, "0 is never"),
    "resume.again": (1, math.inf, "1 is the first time"),
    "resume.row_attempts": (1, math.inf, "3 spares a row that was only near when machines failed"),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("auto", "float32", "bfloat16", "float64"),
    "model.load": ("auto", "dummy"),
    "draft.aux_layers": ("auto", "input", "output"),
    "draft.tree.rank": ("sums", "products"),
    "input.overlong": ("error", "truncate", "skip"),
    "output.messages": ("full", "prompt", "none"),
    "resume.retry": ("none", "error", "length"),
    "device": ("auto", "cpu", "cuda"),
}

DRAFTERS = ("none", "lookup", "eagle3", "hybrid", "pard", "window")

# Keys that not every drafter reads -> who does.
READ_BY: dict[str, tuple[str, ...]] = {
    "draft.min_ngram": ("lookup", "hybrid"),
    "draft.max_ngram": ("lookup", "hybrid"),
    "draft.growth": ("lookup", "hybrid"),
    "draft.corpus_tokens": ("lookup", "hybrid"),
    "draft.table_entries": ("lookup", "hybrid"),
    "draft.head_len": ("hybrid",),
    "draft.path": ("eagle3", "hybrid", "pard"),
    "draft.aux_layers": ("eagle3", "hybrid"),
    "draft.window": ("eagle3", "hybrid", "window"),
    "draft.sink": ("eagle3", "hybrid", "window"),
    "draft.parallel": ("eagle3", "hybrid", "pard"),
    "draft.coupled": ("eagle3", "hybrid", "pard", "window"),
    "draft.tree.topk": ("eagle3",),
    "draft.tree.depth": ("eagle3",),
    "draft.tree.nodes": ("eagle3",),
    "draft.tree.rank": ("eagle3",),
    "draft.adapt.every_shards": ("eagle3", "hybrid"),
    "draft.adapt.time_share": ("eagle3", "hybrid"),
    "draft.adapt.lr": ("eagle3", "hybrid"),
    "decode.opt.dead_positions": ("eagle3", "hybrid"),
}

REQUIRED: dict[str, str] = {
    "model.path": "a Hugging Face folder, a hub id or smollm2-135m; `+job=demo` is a job that has everything",
    "input.path": "a Parquet or JSON-lines file, folder, glob or a list of them",
    "output.dir": "the folder that the output goes to",
}


CREDENTIALS = re.compile(r"://[^/]*@|[?&](\w*key|\w*token|\w*secret|\w*password|\w*signature|sig|x-amz-[\w-]+)=", re.IGNORECASE)
"""What a URL that carries a password, a key or a signature looks like."""


def violation(key: str, value: float, ranges: Mapping[str, tuple[float, float, str]] | None = None) -> str | None:
    """What is wrong with a number under `key`, in one line; None where it lies in the range of `ranges`, by default RANGES."""
    low, high, advice = (RANGES if ranges is None else ranges)[key]
    if low <= value <= high:  # false for NaN too
        return None
    if high == math.inf:
        limit = f"at least {low:g}" if low > 1e-300 or low == 0 else "above 0"
    elif (low, high) == INT64:
        limit = "in -2^63 .. 2^63-1"
    else:
        limit = f"in {low:g} .. {high:g}" if low > 1e-300 or low <= 0 else f"above 0 and at most {high:g}"
    return f"{key}={value} must be {limit}; {advice}"


def check(config: RunConfig, *, require: Iterable[str] = ()) -> None:
    """Refuse what cannot run, before any work. `require` names the keys that the caller cannot do without.

    Raises ConfigError naming key, value, limit and what to do.
    """
    _secrets(config)
    for key in require:
        if _get(config, key) is None:
            raise ConfigError(f"{key} is required; give {key}=..., {REQUIRED[key]}")
    for key, choices in CHOICES.items():
        _choice(key, _get(config, key), choices)
    _drafter(config)
    for key in RANGES:
        value = _get(config, key)
        problem = None if value is None else violation(key, value)
        if problem:
            raise ConfigError(problem)
    _decode(config)
    _thinking(config)
    _names(config)
    if config.resume.retry != "none" and config.output.overwrite:
        raise ConfigError("output.overwrite=true leaves resume.retry nothing to retry; remove one of them")


def _secrets(config: RunConfig) -> None:
    """The configuration is kept in the manifest and on the card: credentials must not get into it, nor into this error."""
    for key in ("input.path", "output.dir", "model.path", "model.revision", "model.chat_template", "draft.path"):
        value = _get(config, key)
        for url in value if isinstance(value, list) else [value]:
            if isinstance(url, str) and CREDENTIALS.search(url):
                raise ConfigError(f"{key} holds credentials in a URL; take them out and set AWS_PROFILE or the AWS_... variables")


def _drafter(config: RunConfig) -> None:
    draft = config.draft
    _choice("draft.name", draft.name, DRAFTERS)
    defaults = RunConfig()
    for key, readers in READ_BY.items():
        value = _get(config, key)
        if draft.name not in readers and value != _get(defaults, key):
            who = " and ".join(f"draft={name}" for name in readers)
            raise ConfigError(f"{key}={value} is not used by draft={draft.name}, only by {who}; remove the key")
    if draft.coupled != "auto" and not isinstance(draft.coupled, bool):
        raise ConfigError(f"draft.coupled={draft.coupled} must be one of auto, true, false")
    if draft.parallel != "auto" and not isinstance(draft.parallel, bool):
        raise ConfigError(f"draft.parallel={draft.parallel} must be one of auto, true, false")
    if draft.name in ("eagle3", "hybrid") and draft.path is None and config.model.load != "dummy":
        raise ConfigError(f"draft={draft.name} needs draft.path: the folder or hub id of an EAGLE-3 head made for the model")
    if draft.name == "pard" and draft.path is None:
        raise ConfigError("draft=pard needs draft.path: the folder or hub id of a small model with the target's tokenizer")
    if draft.name == "window" and draft.window is None:
        raise ConfigError(
            "draft=window needs draft.window: how many of its newest keys the model drafts with; 512 to 2048 works well"
        )
    if draft.sink and draft.window is None:
        raise ConfigError(f"draft.sink={draft.sink} without draft.window: all keys are read anyway; give a window or remove it")
    if draft.min_ngram > draft.max_ngram:
        raise ConfigError(f"draft.min_ngram={draft.min_ngram} exceeds draft.max_ngram={draft.max_ngram}; swap them")
    if draft.table_entries is not None and not draft.corpus_tokens:
        raise ConfigError(
            f"draft.table_entries={draft.table_entries} without draft.corpus_tokens: there is no corpus to index; give both or "
            "remove it"
        )
    _tree(config)
    _adapt(config)
    rates = draft.synthetic
    if rates is None:
        return
    if draft.name == "none":
        raise ConfigError(f"draft.synthetic={rates} is not used by draft=none; remove the key or choose draft=lookup")
    key, depth = ("draft.tree.depth", draft.tree.depth) if draft.tree.depth else ("draft.max_len", draft.max_len)
    if len(rates) != depth:
        raise ConfigError(f"draft.synthetic={rates} has {len(rates)} rates; {key}={depth} needs as many")
    falling = all(earlier >= later for earlier, later in itertools.pairwise(rates))
    if not falling or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigError(f"draft.synthetic={rates} must be in 0 .. 1 and non-increasing: a draft counts only behind kept ones")


def _tree(config: RunConfig) -> None:
    draft, tree = config.draft, config.draft.tree
    if tree.topk == 1:
        for name, value, unused in (("depth", tree.depth, None), ("nodes", tree.nodes, None), ("rank", tree.rank, "sums")):
            if value != unused:
                raise ConfigError(
                    f"draft.tree.{name}={value} is not used with draft.tree.topk=1, a chain; set topk or remove the key"
                )
        return
    if draft.parallel is True:
        raise ConfigError(
            f"draft.tree.topk={tree.topk} grows a tree level by level, draft.parallel=true drafts all at once; remove one of them"
        )
    depth = tree.depth or draft.max_len
    places, grown = (depth - 1) * tree.topk, tree.topk + (depth - 1) * tree.topk**2
    if places > MAX_TREE_PLACES:
        raise ConfigError(
            f"draft.tree.topk={tree.topk} at {depth} levels takes {places} places to grow, more than {MAX_TREE_PLACES}; "
            "lower it or draft.tree.depth"
        )
    if tree.nodes is not None and grown < tree.nodes <= MAX_TREE_NODES:
        raise ConfigError(
            f"draft.tree.nodes={tree.nodes} exceeds the {grown} nodes that draft.tree.topk={tree.topk} grows at {depth} levels; "
            "lower it or remove the key"
        )


def _adapt(config: RunConfig) -> None:
    draft, usual = config.draft, RunConfig().draft.adapt
    if not draft.adapt.every_shards:
        for name in ("time_share", "lr"):
            if (value := getattr(draft.adapt, name)) != getattr(usual, name):
                raise ConfigError(
                    f"draft.adapt.{name}={value} without draft.adapt.every_shards: nothing learns; set it, 4 is usual"
                )
        return
    asked = f"draft.adapt.every_shards={draft.adapt.every_shards}"
    if draft.path is None:
        raise ConfigError(f"{asked} needs draft.path: the head that learns; noise of model.load=dummy has nothing to learn")
    if draft.synthetic is not None:
        raise ConfigError(f"{asked} and draft.synthetic, which makes up what is accepted: nothing would come of it; remove one")
    if config.decode.opt.overlap:
        raise ConfigError(f"{asked} and decode.opt.overlap=true: learning and prefill would share a workspace; remove one")


def _decode(config: RunConfig) -> None:
    decode, max_len = config.decode, config.model.max_len
    if decode.min_new_tokens > decode.max_new_tokens:
        raise ConfigError(
            f"decode.min_new_tokens={decode.min_new_tokens} exceeds decode.max_new_tokens={decode.max_new_tokens}; lower it"
        )
    if max_len is not None and decode.max_new_tokens >= max_len:
        raise ConfigError(
            f"decode.max_new_tokens={decode.max_new_tokens} leaves no room for a prompt in model.max_len={max_len}; "
            "lower it or raise model.max_len"
        )
    if "" in decode.stop:
        raise ConfigError(f"decode.stop={decode.stop} holds an empty string, which ends every output at once; remove it")
    if any(token < 0 for token in decode.stop_ids):
        raise ConfigError(f"decode.stop_ids={decode.stop_ids} must be token ids, at least 0; remove the negative ones")


def _thinking(config: RunConfig) -> None:
    decode, tokens = config.decode, config.model.think_tokens
    listed = (
        isinstance(tokens, list) and len(tokens) in (1, 2) and all(isinstance(item, str | int) and item != "" for item in tokens)
    )
    if not listed and tokens not in ("auto", "none"):
        raise ConfigError(f"model.think_tokens={tokens!r} must be auto, none, [begin,end] or [end]; write [<think>,</think>]")
    if decode.thinking_closing and decode.thinking_token_budget is None:
        raise ConfigError(
            "decode.thinking_closing without decode.thinking_token_budget is never written; set it or remove the key"
        )
    if decode.thinking_token_budget is not None and config.draft.synthetic is not None:
        raise ConfigError("decode.thinking_token_budget says nothing where draft.synthetic makes up what is accepted; remove one")


def _names(config: RunConfig) -> None:
    path, copied = config.input.path, config.output.passthrough
    if path is not None and not (path and (isinstance(path, str) or _is_names(path))):
        raise ConfigError(f"input.path={path!r} must be a path or a list of paths; write input.path=[a.parquet,b.parquet]")
    workers = config.cluster.workers
    if workers != "auto" and not (type(workers) is int and workers > 0):
        raise ConfigError(f"cluster.workers={workers} must be auto or at least 1; auto is one a GPU, and one on a CPU")
    if copied not in ("all", "none") and not _is_names(copied):
        raise ConfigError(f"output.passthrough={copied!r} must be all, none or a list of columns; write [a,b]")


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value} must be one of {', '.join(choices)}")


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config
