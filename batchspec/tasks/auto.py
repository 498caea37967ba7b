"""task=auto becomes a task once the model is known (`prepare.open_model`): checkpoints have an output matrix, or score labels."""

from __future__ import annotations

from dataclasses import replace

from batchspec.config.schema import RunConfig
from batchspec.errors import ConfigError
from batchspec.tasks.registry import REWARD, task_of


def with_task(config: RunConfig, labels: tuple[str, ...]) -> tuple[RunConfig, str]:
    """The configuration with the task's name and defaults if task=auto took a task that needs the checkpoint's score matrix, and
    why it did; empty if the keys say it, or an answer is decoded.

    labels  of the score matrix; (): the checkpoint has none
    Raises ConfigError for a key that this task excludes, and for a checkpoint without the matrix that the task of the keys needs.
    """
    task, why = task_of(config), ""
    if labels and config.task == "auto" and config.decode.score == "none":
        task = REWARD
        why = f"the checkpoint has a score matrix of {len(labels)} label{'s' * (len(labels) > 1)} in place of an output matrix"
        config = replace(config, task=task.name, output=replace(config.output))
        task.set_defaults(config)
        try:
            task.check(config)
        except ConfigError as error:
            raise ConfigError(f"task=auto is {task.name}, because {why}: {error}") from None
    if task.needs_labels and not labels:
        raise ConfigError(
            f"{task.asked} needs a checkpoint with a score matrix (...ForSequenceClassification), and model.path="
            f"{config.model.path} has an output matrix; choose another, or remove the key"
        )
    if labels and not task.needs_labels:
        asked = f"task={config.task}" if config.decode.score == "none" else task.asked
        raise ConfigError(
            f"{asked} needs an output matrix, and model.path={config.model.path} has a score matrix in its place; remove the key "
            "(task=auto is reward then), or choose another checkpoint"
        )
    return config, why
