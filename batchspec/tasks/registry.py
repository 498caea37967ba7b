"""Every task, one line each, and which one a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchspec.config.schema import RunConfig
from batchspec.tasks.base import Task
from batchspec.tasks.choose import Choose
from batchspec.tasks.embed import Embed
from batchspec.tasks.generate import Generate
from batchspec.tasks.rerank import Rerank
from batchspec.tasks.reward import Reward
from batchspec.tasks.score_prompts import ScorePrompts

GENERATE, REWARD, EMBED = Generate(), Reward(), Embed()
TASKS: dict[str, Task] = {task.name: task for task in (GENERATE, ScorePrompts(), Choose(), REWARD, Rerank(), EMBED)}
"""By name."""
BY_SCORE = {"none": "generate", "prompts": "score_prompts", "choices": "choose"}
"""Value of decode.score -> name of the task."""


def task_of(config: RunConfig) -> Task:
    """The task of a job; of task=auto the one without a score matrix, until the model is known (`auto.py`). Values that are none
    of the choices of decode.score and task, which `check_values` refuses, count as none and auto."""
    return _task(config.task, config.decode.score)


def saved_task(values: Mapping[str, Any]) -> Task:
    """The task of the job with this configuration, as a manifest has it: older ones lack keys."""
    return _task(str(values.get("task", "auto")), str(values.get("decode", {}).get("score", "none")))


def _task(task: str, score: str) -> Task:
    return TASKS[BY_SCORE.get(score, "generate")] if score != "none" else TASKS.get(task, GENERATE)
