"""Every check of the configuration: what cannot run is refused in one line - key, value, limit, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from batchspec.config.draft_checks import check_draft
from batchspec.config.no_effect import refuse_without_effect
from batchspec.config.schema import KEYS, RunConfig
from batchspec.config.values import (
    check_credentials,
    check_given,
    check_saved,
    check_values,
    logit_bias,
    written,
)
from batchspec.errors import ConfigError
from batchspec.records import STATUSES
from batchspec.tasks.registry import task_of

URLS = tuple(name for name, key in KEYS.items() if key.path or name == "model.revision")
"""Keys that may be given a URL."""
MAX_ADAPTERS = 256
"""Of model.adapters."""
MAX_WORKERS = 128
"""Of cluster.workers: more processes than any machine has GPUs."""
TENSOR_PARALLEL, AUTO = (1, 2, 4, 8), "auto"
"""Values of cluster.tensor_parallel."""

REQUIRED: dict[str, str] = {
    "model.path": "a Hugging Face folder, a hub id or smollm2-135m; `+job=demo` is a job that has everything",
    "input.path": "a Parquet or JSON-lines file, folder, glob or a list of them; or input.from_job=OUT",
    "output.dir": "the folder that the output goes to",
}


def check(config: RunConfig, *, require: Iterable[str] = ()) -> None:
    """Refuse what cannot run, before any work. `require` names the keys that the caller cannot do without.

    Raises ConfigError naming key, value, limit and what to do.
    """
    check_credentials(config, URLS)
    check_saved(config)
    given = {"input.path"} if config.input.from_job is not None else set()
    check_given(config, {key: REQUIRED[key] for key in require if key not in given})
    check_values(config, KEYS)
    check_draft(config)
    refuse_without_effect(config)
    task_of(config).check(config)
    _cache(config)
    _adapters(config)
    _ranks(config)
    _decode(config)
    _thinking(config)
    _date(config)
    _names(config)
    _from_job(config)
    _pages(config)
    if config.resume.retry != "none" and config.output.overwrite:
        raise ConfigError("output.overwrite=true leaves resume.retry nothing to retry; remove one of them")
    if config.resume.extend and config.output.overwrite:
        raise ConfigError("output.overwrite=true leaves resume.extend=true no job to extend; remove one of them")
    if config.resume.extend and config.resume.retry != "none":
        raise ConfigError(
            f"resume.extend=true adds rows and resume.retry={config.resume.retry} computes old ones again; run resume=extend to "
            "its end first, then the retry"
        )


def _cache(config: RunConfig) -> None:
    if config.cache.scales == "checkpoint" and config.model.load_format == "dummy":
        raise ConfigError("cache.scales=checkpoint: model.load_format=dummy reads no checkpoint; use auto")


def _adapters(config: RunConfig) -> None:
    one, several = config.model.adapter, config.model.adapters
    if one is None and not several:
        return
    for name, folder in several.items():
        if not isinstance(name, str) or not isinstance(folder, str) or not name or not folder:
            given = f"model.adapters={{{name}: {folder}}}"
            raise ConfigError(f"{given} must be a name and a folder; write {written('model.adapters')}")
    given = f"model.adapter={one}" if one is not None else f"model.adapters={{{','.join(several)}}}"
    if one is not None and several:
        raise ConfigError(
            f"{given} is for all rows, and model.adapters={{{','.join(several)}}} for rows that name one; remove one"
        )
    if config.cache.dtype == "fp8" and config.cache.scales != "calibrate":
        raise ConfigError(
            f"{given} with cache.dtype=fp8 needs cache.scales=calibrate: K/V scales of a "
            "checkpoint are those of the model without the adapter"
        )
    if config.model.load_format == "dummy":
        raise ConfigError(f"{given}: model.load_format=dummy has no weights to merge it into; remove one")
    if len(several) > MAX_ADAPTERS:
        raise ConfigError(f"model.adapters has {len(several)} adapters, at most {MAX_ADAPTERS} are supported; divide the job")


def _ranks(config: RunConfig) -> None:
    count = config.cluster.tensor_parallel
    if count not in (*TENSOR_PARALLEL, AUTO) or isinstance(count, bool):
        raise ConfigError(f"cluster.tensor_parallel={count} must be auto, 1, 2, 4 or 8; 1 is one GPU per copy of the model")
    if count != AUTO:
        check_ranks(config, count)


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Raises ConfigError for settings that are not supported if this many ranks compute the model, whatever the model is."""
    if ranks > 1 and config.decode.deterministic:
        raise ConfigError(f"decode.deterministic=true with cluster.tensor_parallel={ranks} is not supported; set it to 1")


def _decode(config: RunConfig) -> None:
    decode = config.decode
    if decode.min_new_tokens > decode.max_new_tokens:
        raise ConfigError(
            f"decode.min_new_tokens={decode.min_new_tokens} exceeds decode.max_new_tokens={decode.max_new_tokens}; lower it"
        )
    if config.task != "auto" or decode.max_new_tokens != RunConfig().decode.max_new_tokens:  # else once the model is known
        task_of(config).check_room(config)
    given = [key for key in ("schema", "regex", "choice", "grammar") if getattr(decode, key) not in (None, [])]
    if len(given) > 1:
        raise ConfigError(f"decode.{given[0]} and decode.{given[1]} are both given, and an answer follows one; remove one")
    for key in ("schema", "regex", "grammar"):
        if getattr(decode, key) == "":
            raise ConfigError(f"decode.{key}= is empty; give a {key} or remove the key")
    if decode.choice and not any(decode.choice):
        raise ConfigError(f"decode.choice={decode.choice} allows empty answers alone; give other texts or remove the key")
    if len({*decode.choice}) == 1 and task_of(config).decodes:
        raise ConfigError(
            f"decode.choice={decode.choice} allows one answer alone; list all allowed ones, {written('decode.choice')}, or "
            "remove the key"
        )
    if decode.deterministic and config.draft.tree.topk > 1:
        raise ConfigError(
            f"decode.deterministic=true with draft.tree.topk={config.draft.tree.topk} is not supported: a tree's keys lie in "
            "another order; use draft=eagle3"
        )
    repetition = decode.repetition_detection
    if 0 < repetition.max_pattern_size < repetition.min_pattern_size:
        raise ConfigError(
            f"decode.repetition_detection.min_pattern_size={repetition.min_pattern_size} exceeds "
            f"max_pattern_size={repetition.max_pattern_size}; lower it"
        )
    if "" in decode.stop:
        raise ConfigError(f"decode.stop={decode.stop} holds an empty string, which ends every output at once; remove it")
    try:
        logit_bias(decode.logit_bias, written("decode.logit_bias"))
    except ValueError as error:
        raise ConfigError(f"decode.logit_bias {error}") from None
    if any(token < 0 for token in decode.stop_ids):
        raise ConfigError(f"decode.stop_ids={decode.stop_ids} must be token ids, at least 0; remove the negative ones")


def _thinking(config: RunConfig) -> None:
    tokens = config.model.think_tokens
    listed = (
        isinstance(tokens, list) and len(tokens) in (1, 2) and all(isinstance(item, str | int) and item != "" for item in tokens)
    )
    if not listed and tokens not in ("auto", "none"):
        raise ConfigError(
            f"model.think_tokens={tokens!r} must be auto, none, [begin,end] or [end]; write {written('model.think_tokens')}"
        )


def _date(config: RunConfig) -> None:
    try:
        datetime.fromisoformat(config.input.template_date)
    except ValueError:
        raise ConfigError(
            f"input.template_date={config.input.template_date!r} must be a date, or a date and a time; write 2025-08-05"
        ) from None


def _names(config: RunConfig) -> None:
    path, copied = config.input.path, config.output.passthrough
    if path is not None and not (path and (isinstance(path, str) or _is_names(path))):
        raise ConfigError(f"input.path={path!r} must be a path or a list of paths; write {written('input.path')}")
    workers = config.cluster.workers
    if workers != "auto" and not (type(workers) is int and 0 < workers <= MAX_WORKERS):
        raise ConfigError(f"cluster.workers={workers} must be auto or in 1 .. {MAX_WORKERS}; auto is one a GPU, and one on a CPU")
    if copied not in ("all", "none") and not _is_names(copied):
        raise ConfigError(
            f"output.passthrough={copied!r} must be all, none or a list of columns; write {written('output.passthrough')}"
        )


def check_statuses(given: Sequence[str]) -> None:
    """Raises ConfigError unless these are statuses of rows, at least one."""
    if isinstance(given, str) or not given or not {*given} <= {*STATUSES}:
        example = written("input.from_status")
        raise ConfigError(f"input.from_status={given} must be some of {', '.join(STATUSES)}; write {example}")


def _from_job(config: RunConfig) -> None:
    own = config.input
    check_statuses(own.from_status)
    if own.from_job == "":
        raise ConfigError("input.from_job= is empty; give the output folder of a finished job, or remove the key")
    if own.from_job is not None and own.columns.get("id", "request_id") != "request_id":
        raise ConfigError(
            f"input.columns.id={own.columns['id']} beside input.from_job={own.from_job}: ids are those of that job; remove one"
        )


def _pages(config: RunConfig) -> None:
    packing = config.packing
    if packing.pages is not None and packing.memory_gb is not None:
        raise ConfigError(
            f"packing.pages={packing.pages} and packing.memory_gb={packing.memory_gb} both set the number of K/V pages; "
            "set one of them to null"
        )


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
