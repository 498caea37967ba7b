"""Short facts about a job for its report and dataset card: sampling, paths, times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from tqdm import tqdm

from batchspec.data.runstate.manifest import Manifest
from batchspec.job.report.status import RunStatus
from batchspec.job.report.timeline import Course
from batchspec.tasks.registry import saved_task

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "max_new_tokens",
)


def sampling(config: Mapping[str, Any]) -> str:
    """The keys of `decode` that decide which tokens are drawn, or how texts are scored."""
    decode = config.get("decode", {})
    if not (task := saved_task(config)).decodes:
        return task.about(decode)
    return ", ".join(f"{name} {decode[name]}" for name in SAMPLING if name in decode)


def is_local(path: Any) -> bool:
    """Whether this is an absolute path of this machine, or a list or map with one. Hub ids, pkg:// and s3:// are the same on all
    machines."""
    if isinstance(path, list | tuple | dict):
        return any(map(is_local, path.values() if isinstance(path, dict) else path))
    return isinstance(path, str) and (path.startswith(("~", "file:", "\\")) or PurePath(path).is_absolute())


def last_part(path: Any) -> str:
    """The last part of a local path; anything else unchanged."""
    return PurePath(str(path)).name if is_local(path) else str(path)


def when(runs: Sequence[RunStatus], course: Course | None) -> dict[str, str]:
    """When the job's runs began and ended (UTC) and how long they took, as far as the runs recorded it."""
    facts = {}
    if runs:
        began, ended = min(each.run.began_at for each in runs), max(each.run.at for each in runs)
        facts["Began"] = _moment(began)
        facts["Last heartbeat" if any(each.lives for each in runs) else "Ended"] = _moment(ended)
    if course is not None:
        count = len(course.starts_s)
        facts["Wall time"] = duration(float(course.edges_s[-1])) + (f" in {count:,} runs, pauses left out" if count > 1 else "")
    return facts


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else tqdm.format_interval(seconds)


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def input_rows(manifest: Manifest) -> str:
    """The number of input rows that the job covers: all rows of its files, or the first ones (input.limit)."""
    in_files = sum(file.num_rows for file in manifest.files)
    return f"the first {manifest.num_rows:,} of {in_files:,} rows" if in_files > manifest.num_rows else f"{manifest.num_rows:,}"
