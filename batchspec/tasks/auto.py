"""task=auto becomes a task once the model is known (`prepare.open_model`): checkpoints have an output matrix, or score labels."""

from __future__ import annotations

from dataclasses import replace

from batchspec.config.schema import RunConfig
from batchspec.errors import ConfigError
from batchspec.tasks.base import EmbeddingFiles, Needs, Task
from batchspec.tasks.registry import EMBED, GENERATE, REWARD, task_of


def may_embed(config: RunConfig, labels: tuple[str, ...]) -> bool:
    """Whether what the checkpoint's files say about embeddings decides something. labels: as in `with_task`"""
    return config.task == EMBED.name or (config.task == "auto" and config.decode.score == "none" and not labels)


def with_task(
    config: RunConfig, labels: tuple[str, ...], embedding: EmbeddingFiles | None, *, has_output: bool, most_tokens: int,
) -> tuple[RunConfig, str]:
    """The configuration with the task's name, defaults and pooling if the task is another one than to decode or to score, and why
    task=auto took it; empty if the keys say it, or an answer is decoded.

    labels      of the score matrix; (): the checkpoint has none
    embedding   what its files say about embeddings; None: nothing
    has_output  whether its class has an output matrix
    most_tokens  of a row of the model
    Raises ConfigError for a key that this task excludes, and for a checkpoint without the matrix that the task of the keys needs.
    """
    task, why = task_of(config), ""
    if config.task == "auto" and config.decode.score == "none":
        task, why = _auto(labels, embedding, has_output=has_output)
    if task is not GENERATE:
        config = replace(config, task=config.task if config.decode.score != "none" else task.name, output=replace(config.output))
    if why:
        task.set_defaults(config)
    try:
        task.check(config)
    except ConfigError as error:
        raise ConfigError(f"task=auto is {task.name}, because {why}: {error}" if why else str(error)) from None
    task.check_embedding(config)
    task.check_room(config)
    _check_matrix(config, task, labels, has_output=has_output)
    if task is EMBED:
        files = embedding or EmbeddingFiles()
        if config.output.embedding_pooling == "auto":
            config.output.embedding_pooling = "mean" if files.mean else "last"
        if config.model.max_len is None and files.max_tokens is not None:
            config = replace(config, model=replace(config.model, max_len=min(files.max_tokens, most_tokens)))
    return config, why


def _auto(labels: tuple[str, ...], embedding: EmbeddingFiles | None, *, has_output: bool) -> tuple[Task, str]:
    """The task of task=auto, and why; empty for the usual one."""
    if labels:
        count = f"{len(labels)} label{'s' * (len(labels) > 1)}"
        return REWARD, f"the checkpoint has a score matrix of {count} in place of an output matrix"
    if embedding is not None:
        return EMBED, "its folder has modules.json, which says how embeddings are made"
    return (GENERATE, "") if has_output else (EMBED, "its class has no output matrix")


def _check_matrix(config: RunConfig, task: Task, labels: tuple[str, ...], *, has_output: bool) -> None:
    """Raises ConfigError if the checkpoint lacks what the task needs."""
    has = Needs.LABELS if labels else Needs.OUTPUT if has_output else Needs.STATES
    if task.needs in (has, Needs.STATES):
        return
    asked = f"task={config.task}" if config.decode.score == "none" else task.asked
    raise ConfigError(
        f"{asked} needs {task.needs.value}, and model.path={config.model.path} has {has.value} in its place; choose another, or "
        "remove the key: then the checkpoint decides"
    )
