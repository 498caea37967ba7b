"""Checks of single values: required keys, choices, ranges, no credentials.

A bad value is refused in one line: key, value, limit, what to do.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from batchspec.config.drafters import DRAFTERS
from batchspec.console.text import quoted
from batchspec.errors import ConfigError
from batchspec.records import MAX_LOGIT_BIAS

PATHS = (
    "input.path",
    "input.from_job",
    "output.dir",
    "output.openai",
    "model.path",
    "model.adapter",
    "model.adapters",
    "model.chat_template",
    "draft.path",
    "cluster.log",
)
"""Keys of a job that name files and folders."""
INT64 = (-(2**63), 2**63 - 1)
BIASES = (-100.0, 100.0)
"""Range of the values of decode.logit_bias, as OpenAI's."""
SHIPPED = "pkg://"
"""Prefix of paths of files that the package contains."""
MAX_TREE_NODES, MAX_TREE_PLACES = 63, 64
"""Maximum number of tree nodes that a round verifies per request besides the newest token, and of positions while a tree is
grown: attention masks of trees have 64 bits."""

# key -> (lowest, highest, advice). Per-row columns of the same name are checked against the same ranges.
RANGES: dict[str, tuple[float, float, str]] = {
    "model.max_len": (2, math.inf, "give prompt + output tokens, or null for the model's own limit"),
    "draft.num_speculative_tokens": (1, 64, "give the draft tokens per round, or draft=none for no speculation"),
    "draft.prompt_lookup_min": (1, 16, "1 or 2 works well"),
    "draft.prompt_lookup_max": (1, 16, "3 to 8 works well"),
    "draft.corpus_tokens": (0, 2**28, "0 is off; 1000000 take 72 MB"),
    "draft.vocab_size": (64, 2**31 - 1, "null is the whole vocabulary; 32768 works well for large ones"),
    "draft.tree.topk": (1, 64, "1 drafts a chain; 4 to 10 works well for a tree"),
    "draft.tree.depth": (1, 64, "4 to 6 works well"),
    "draft.tree.nodes": (1, MAX_TREE_NODES, "a round verifies the newest token and at most 63 nodes of a row"),
    "draft.window": (1, math.inf, "null reads all keys"),
    "draft.sink_tokens": (0, math.inf, "4 works well with a window"),
    "decode.max_new_tokens": (1, math.inf, "give the maximum number of output tokens; decode.score=prompts decodes none"),
    "decode.min_new_tokens": (0, math.inf, "0 is off"),
    "decode.thinking_token_budget": (0, math.inf, "null means no limit"),
    "decode.temperature": (0.0, 100.0, "0 is greedy, 1 the model's own distribution"),
    "decode.top_k": (0, math.inf, "0 is off"),
    "decode.top_p": (math.ulp(0.0), 1.0, "1 is off"),
    "decode.min_p": (0.0, 1.0, "0 is off"),
    "decode.repetition_penalty": (0.01, 100.0, "1 is off"),
    "decode.presence_penalty": (-100.0, 100.0, "0 is off"),
    "decode.frequency_penalty": (-100.0, 100.0, "0 is off"),
    "decode.repetition_detection.max_pattern_size": (0, 1024, "0 is off; 64 finds most loops"),
    "decode.repetition_detection.min_pattern_size": (1, 1024, "1 takes single tokens too"),
    "decode.repetition_detection.min_count": (2, 1_000_000, "10 works well"),
    "decode.seed": (*INT64, "give a 64-bit integer"),
    "decode.n": (1, 4096, "1 is one completion a row"),
    "packing.max_num_seqs": (1, 4096, "null lets the planner choose"),
    "packing.pages": (2, 2**31 - 1, "null lets the planner choose"),
    "packing.memory_gb": (math.ulp(0.0), math.inf, "null lets the planner choose"),
    "packing.max_num_batched_tokens": (1, math.inf, "null lets the planner choose"),
    "packing.run_ahead": (0, 64, "null lets the planner choose"),
    "packing.expert_correlation": (math.ulp(0.0), 1.0, "1 is tokens that choose independently"),
    "input.limit": (1, math.inf, "null takes every row"),
    "input.num_workers": (0, 64, "null lets batchspec choose"),
    "input.max_error_fraction": (0.0, 1.0, "1 ends a job of nothing but error rows alone"),
    "output.shard_rows": (1, 10_000_000, "null lets batchspec choose"),
    "output.logprobs": (0, 100, "null writes none"),
    "output.prompt_logprobs": (0, 100, "0 writes those of the prompt's own tokens alone"),
    "cluster.tensor_parallel": (1, 8, "1, 2, 4 or 8 GPUs for each copy of the model"),
    "cluster.max_restarts": (0, math.inf, "0 is never"),
    "cluster.signal_s": (1, 65535, "120 is enough to save and to requeue"),
    "cluster.tasks": (1, math.inf, "give the tasks of the array"),
    "cluster.gpus": (0, math.inf, "0 is a task on a CPU"),
    "cluster.cpus": (1, math.inf, "null leaves it to the cluster"),
    "cluster.memory_gb": (math.ulp(0.0), math.inf, "null leaves it to the cluster"),
    "cluster.time_h": (math.ulp(0.0), math.inf, "null leaves it to the partition"),
    "cluster.watchdog_s": (0, math.inf, "0 is never"),
    "resume.row_attempts": (1, math.inf, "3 spares a row that was only in flight when machines failed"),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("auto", "float32", "bfloat16", "float64"),
    "model.activations": ("auto", "dtype", "fp8"),
    "model.load_format": ("auto", "dummy"),
    "model.tool_calls": (
        "auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "glm", "glm4", "minimax_m2", "pythonic", "deepseek",
        "gemma4", "seed_oss", "granite", "phi4",
    ),
    "cache.dtype": ("auto", "fp8"),
    "cache.scales": ("auto", "checkpoint", "calibrate"),
    "cache.state_dtype": ("auto", "bfloat16"),
    "draft.cache_dtype": ("auto", "fp8"),
    "draft.aux_layers": ("auto", "input", "output"),
    "input.on_overlong": ("error", "truncate", "skip"),
    "input.final_assistant": ("error", "continue", "drop"),
    "output.messages": ("full", "prompt", "none"),
    "decode.schema_unsupported": ("error", "check"),
    "decode.score": ("none", "prompts", "choices"),
    "decode.choice_norm": ("none", "tokens"),
    "resume.retry": ("none", "error", "length", "repetition"),
    "device": ("auto", "cpu", "cuda"),
    "draft.name": tuple(DRAFTERS),
    "draft.lengths": ("auto", "fixed"),
}

ADVANCED = frozenset({
    "model.activations", "model.load_format",
    "draft.prompt_lookup_min", "draft.prompt_lookup_max", "draft.coupled", "draft.synthetic", "draft.vocab_size",
    "draft.aux_layers", "draft.adaptive", "draft.lengths", "draft.parallel", "draft.tree.topk", "draft.tree.depth",
    "draft.tree.nodes", "draft.window", "draft.sink_tokens", "draft.cache_dtype",
    "decode.ignore_eos",
    "packing.pages", "packing.max_num_batched_tokens", "packing.run_ahead", "packing.expert_correlation",
    "cache.scales",
    "input.template_date", "input.num_workers", "input.drop",
    "resume.row_attempts",
    "cluster.max_restarts", "cluster.signal_s", "cluster.watchdog_s", "cluster.log",
    "ablation.dead_rows", "ablation.argmax", "ablation.uniform_slots", "ablation.dead_positions", "ablation.prefill_graphs",
    "ablation.sharded_draft",
})
"""Keys that few jobs set; the help and conf/README.md list them last."""

EXAMPLES = {
    "model.adapters": "{NAME: FOLDER}",
    "model.think_tokens": "[<think>,</think>]",
    "input.path": "[a.parquet,b.parquet]",
    "input.columns": "{prompt: COLUMN}",
    "input.from_status": "[ok,truncated]",
    "input.template_kwargs": "{NAME: VALUE}",
    "output.passthrough": "[COLUMN,COLUMN]",
    "decode.choice": "[positive,negative]",
    "decode.stop_ids": "[2,151645]",
    "decode.logit_bias": "{1734: -100}",
    "decode.schema": "{type: object}",
    "draft.synthetic": "[0.8,0.6]",
}
"""An example of the value of keys that take a list or a map, for messages."""

CREDENTIALS = re.compile(r"://[^/]*@|[?&](\w*key|\w*token|\w*secret|\w*password|\w*signature|sig|x-amz-[\w-]+)=", re.IGNORECASE)
"""Matches a URL that contains a password, a key or a signature."""

_ENVIRONMENT = re.compile(r"\$\{\s*(oc\.)?env\s*:")
"""An interpolation that reads a variable of the environment, as omegaconf writes it."""
_SECRET = re.compile(r"(?<![A-Z])(SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|APIKEY|KEY)(?![A-Z])", re.IGNORECASE)
"""Matches names of environment variables that hold a secret: AWS_SECRET_ACCESS_KEY, HF_TOKEN."""
_SECRET_LEN = 8
"""Minimum length of a secret in characters, so that TOKENIZER_KEY=yes does not count as one."""


def violation(key: str, value: float, ranges: Mapping[str, tuple[float, float, str]] = RANGES) -> str | None:
    """What is wrong with a number, in one line; None if it is in the range of its key."""
    low, high, advice = ranges[key]
    if low <= value <= high:  # false for NaN too
        return None
    least, most = (f"{bound:.0f}" if 1e6 <= bound < 1e15 else f"{bound:g}" for bound in (low, high))
    if high == math.inf:
        limit = f"at least {least}" if low > 1e-300 or low == 0 else "above 0"
    elif (low, high) == INT64:
        limit = "in -2^63 .. 2^63-1"
    else:
        limit = f"in {least} .. {most}" if low > 1e-300 or low <= 0 else f"above 0 and at most {most}"
    return f"{key}={value} must be {limit}; {advice}"


def written(key: str) -> str:
    """A key that takes a list or a map, with an example of its value: one word of a shell's command, for a message."""
    return f"'{key}={EXAMPLES.get(key, '[TEXT,TEXT]')}'"


def logit_bias(value: Any, example: str = "{1734: -100}") -> dict[int, float]:
    """Token id -> bias of its logit, from a map whose ids may be text; empty for None.

    example  of a right value, for messages
    Raises ValueError for anything else; its message is a sentence without its subject.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a map of token ids to numbers, not {quoted(value)}; write {example}")
    low, high = BIASES
    found: dict[int, float] = {}
    for token, bias in value.items():
        if not re.fullmatch(r"\d{1,10}", str(token)):
            raise ValueError(f"names {quoted(token)}, which is not a token id; write {example}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not low <= bias <= high:
            raise ValueError(f"adds {str(bias)[:40]} to token {token}, which must be in {low:g} .. {high:g}; correct it")
        found[int(token)] = float(bias)
    if len(found) > MAX_LOGIT_BIAS:
        raise ValueError(f"names {len(found):,} tokens, and at most {MAX_LOGIT_BIAS:,} fit; shorten it")
    return found


def check_given(config: Any, keys: Mapping[str, str]) -> None:
    """`keys` (key -> advice) must not be null or empty. Raises ConfigError, like all checks here."""
    for key, advice in keys.items():
        if value_of(config, key) in (None, ""):
            raise ConfigError(f"{key} is required; give {key}=..., {advice}")


CONTAINER = re.compile(r"^(abfss?|az|azure)://[a-z0-9$][a-z0-9-]{1,62}@[a-z0-9][\w.-]*(?=/|$)")
"""Matches Azure's URLs, in which the name before the @ is a container, not a key."""
GIVE_THEM = {
    "s3": "set AWS_PROFILE or the AWS_... variables",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set the AZURE_STORAGE_... variables",
    "azure": "set the AZURE_STORAGE_... variables",
    "abfs": "set the AZURE_STORAGE_... variables",
    "abfss": "set the AZURE_STORAGE_... variables",
    "hf": "set HF_TOKEN",
}


def check_credentials(config: Any, keys: Iterable[str]) -> None:
    """Raise ConfigError for credentials in URLs, because the configuration is written to the manifest and the card. The message
    does not show them."""
    for key in keys:
        value = value_of(config, key)
        for url in value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]:
            if isinstance(url, str) and CREDENTIALS.search(CONTAINER.sub("", url)):
                how = GIVE_THEM.get(url.partition("://")[0], "give them as its tools do, by environment or profile")
                raise ConfigError(f"{key} holds credentials in a URL; take them out and {how}")


def check_saved(config: Any) -> None:
    """Raise ConfigError for strings that read the environment, contain one of its secrets, or are not valid Unicode.

    The configuration is written to the manifest and to the dataset card, which people publish and run again on other machines.
    """
    named = [(name, value) for name, value in os.environ.items() if len(value) >= _SECRET_LEN and _SECRET.search(name)]
    secrets = [(name, value) for name, value in named if not os.path.exists(value)]  # SSH_KEY=/home/me/.ssh/id is a path
    for key, text in _strings(asdict(config)):
        if found := _ENVIRONMENT.search(text):
            raise ConfigError(
                f"{key} holds {found[0]}...}} as plain text, and whatever reads the saved configuration could put a variable of "
                "its own environment there; remove it"
            )
        for name, value in secrets:
            if value in text:
                raise ConfigError(
                    f"{key} holds the value of the environment variable {name}, and the configuration is written to the manifest "
                    "and the dataset card; take it out"
                )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{key}={text!a} is not valid Unicode; rename what it names, in UTF-8")


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, string) for every string inside, including keys of free-form dictionaries."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _strings(str(name), key)
            yield from _strings(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, key)


def literal(value: Any) -> Any:
    """The value with its strings escaped for omegaconf, so that no `${...}` in them is an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value)
    if isinstance(value, Mapping):
        return {name: literal(item) for name, item in value.items()}
    return [literal(item) for item in value] if isinstance(value, list | tuple) else value


def expand_home(config: Any, keys: Iterable[str]) -> None:
    """Replace a leading `~` by the user's home in these paths, if the configuration has them."""
    for key in keys:
        group, _, name = key.rpartition(".")
        holder = getattr(config, group, None)
        value = getattr(holder, name, None)
        if isinstance(value, list):
            setattr(holder, name, [_at_home(item) for item in value])
        elif isinstance(value, dict):
            setattr(holder, name, {key: _at_home(item) for key, item in value.items()})
        elif isinstance(value, str):
            setattr(holder, name, _at_home(value))


def _at_home(path: Any) -> Any:
    return os.path.expanduser(path) if isinstance(path, str) else path


def check_choices(config: Any, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ConfigError unless each key's value is one of its choices."""
    for key, allowed in choices.items():
        value = value_of(config, key)
        if value not in allowed:
            raise ConfigError(f"{key}={value} must be one of {', '.join(allowed)}")


def check_ranges(config: Any, ranges: Mapping[str, tuple[float, float, str]]) -> None:
    """Raise ConfigError unless each number is in its range; null always is."""
    for key in ranges:
        value = value_of(config, key)
        if isinstance(value, list | dict):
            raise ConfigError(f"{key}={value} must be one value; {ranges[key][2]}")
        problem = None if value is None or isinstance(value, str) else violation(key, value, ranges)
        if problem:
            raise ConfigError(problem)


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def shipped(kind: str, suffix: str = "") -> dict[str, Path]:
    """Name -> path of all files and folders of `kind`, a folder of conf, in the package: the names that `pkg://` takes."""
    places = sorted((Path(str(files("batchspec.conf"))) / kind).iterdir())
    return {place.name.removesuffix(suffix): place for place in places if place.name.endswith(suffix)}
