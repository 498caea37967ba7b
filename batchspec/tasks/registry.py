"""Every task, one line each, and which one a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchspec.config.schema import RunConfig
from batchspec.tasks.base import Task
from batchspec.tasks.choose import Choose
from batchspec.tasks.generate import Generate
from batchspec.tasks.score_prompts import ScorePrompts

GENERATE = Generate()
TASKS: dict[str, Task] = {task.name: task for task in (GENERATE, ScorePrompts(), Choose())}
"""By name."""
BY_SCORE = {"none": "generate", "prompts": "score_prompts", "choices": "choose"}
"""Value of decode.score -> name of the task."""


def task_of(config: RunConfig) -> Task:
    """The task of a job. A value of decode.score that is none of its choices, which `check_values` refuses, counts as none."""
    return _task(config.decode.score)


def saved_task(values: Mapping[str, Any]) -> Task:
    """The task of the job with this configuration, as a manifest has it: older ones lack keys."""
    return _task(str(values.get("decode", {}).get("score", "none")))


def _task(score: str) -> Task:
    return TASKS[BY_SCORE.get(score, "generate")]
