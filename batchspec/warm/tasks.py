"""The task of a call: what a warm engine does to the rows of one call besides what it was made for, with the same weights.

Nothing is loaded a second time. The other task has a batch of its own, planned from the memory that is left, with K/V pages of
its own; the engine keeps it for the next call with the same keys. A task that decodes is none: drafter, graphs and the memory of
rounds are made with the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from batchspec.config.checks import check
from batchspec.config.compose import compose
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.key import ANSWERS, CHATS, value_of
from batchspec.config.overrides import Options, overrides_of
from batchspec.config.row_options import ROW_OPTIONS
from batchspec.config.schema import KEYS, RunConfig
from batchspec.data.dataset.columns import PROMPTS
from batchspec.engine.loop.engine import Engine as BatchEngine
from batchspec.errors import CapacityError, ConfigError
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.prepare import Job, JobModel, open_model
from batchspec.process.out_of_memory import OutOfMemoryGuard
from batchspec.tasks.base import OF_EMBED, Needs
from batchspec.tasks.registry import task_of
from batchspec.warm.loading import expected_demand, job_without_rows
from batchspec.warm.ranks import EngineOfRanks

OF_TASKS = (
    "task", "decode.score", "decode.choice", "decode.choice_norm", "output.prompt_logprobs", *OF_EMBED, "input.on_overlong",
    "input.final_assistant",
)
"""Keys that a call may give with its task. Those of answers, which the engine has, have no effect on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a call needs of an engine, for one task."""

    model: JobModel
    opened: Job
    """Without rows."""
    loaded: LoadedEngine[BatchEngine | EngineOfRanks]


def task_config(own: RunConfig, task: str | Options) -> RunConfig:
    """The configuration of a call with another task: the engine's, with the defaults of keys that only answers or tasks have, and
    what the call gives.

    task  its name, or keys of OF_TASKS
    Raises ConfigError for other keys, and as `check` does.
    """
    words = overrides_of({"task": task} if isinstance(task, str) else task)
    named = [word.partition("=")[0] for word in words]
    if other := [name for name in named if name not in OF_TASKS]:
        raise ConfigError(
            f"{other[0]} is no key of a call's task, whose keys are {', '.join(OF_TASKS)}; make an engine with it"
        )
    config, given, usual = deepcopy(own), compose(words, checked=False), RunConfig()
    of_answers = [name for name, declared in KEYS.items() if ANSWERS in declared.applies_to]
    _set(config, usual, [*of_answers, *OF_TASKS])
    config.draft = DraftConfig(name="none")
    if task_of(given).texts is not None:  # it makes prompts of its own, whatever the engine's are
        keys_of_chats = [name for name, declared in KEYS.items() if CHATS in declared.applies_to]
        _set(config, usual, ["input.prompt", "input.chat", *keys_of_chats])
        of_chats = [name for name, option in ROW_OPTIONS.items() if CHATS in option.declared.applies_to]
        columns = {name: column for name, column in config.input.columns.items() if name not in (*PROMPTS, *of_chats)}
        config.input.columns = columns
    _set(config, given, named)
    task_of(config).set_defaults(config)
    check(config, require=("model.path",))
    return config


def open_part(engine: Part, task: str | Options) -> Part:
    """The engine of another task, with the weights of `engine`. Raises ConfigError, CheckpointError and CapacityError."""
    loaded = engine.loaded.engine
    config = task_config(engine.model.config, task)
    asked = task_of(config)
    if task_of(engine.model.config) is asked and asked.decodes:
        return engine
    if isinstance(loaded, EngineOfRanks):
        raise ConfigError("a task of a call is not supported with cluster.tensor_parallel; make an engine with these keys")
    model = open_model(config)
    found, target = task_of(model.config), loaded.target.spec
    if found.decodes:
        raise ConfigError(
            f"{found.asked} of a call is not supported: rounds are prepared when an engine is made; make it for answers, and "
            "give calls the other tasks"
        )
    if (found.needs is Needs.OUTPUT and not target.has_output) or (found.needs is Needs.LABELS and not target.labels):
        raise ConfigError(
            f"{found.asked} needs {found.needs.value}, which the engine did not load, because "
            f"{task_of(engine.model.config).asked} does not read it; make the engine for a task that needs it"
        )
    opened = job_without_rows(model)
    with OutOfMemoryGuard() as guard:
        try:
            second = LoadedEngine.load_warm(opened, expected_demand(opened), target=loaded.target)
            return Part(model=model, opened=opened, loaded=second)
        except CapacityError as error:
            raise CapacityError(f"{found.asked} beside the engine's own batch: {error}") from None
    raise CapacityError(
        f"out of memory while the batch of {found.asked} was made ({guard.message}); make the engine with a lower "
        "packing.memory_gb, which is then that of each"
    )


def _set(config: RunConfig, values: RunConfig, names: Iterable[str]) -> None:
    """Give these keys of the configuration the values of another one."""
    for name in names:
        group, _, last = name.rpartition(".")
        holder: Any = value_of(config, group) if group else config
        setattr(holder, last, deepcopy(value_of(values, name)))
