"""Whole runs in processes of their own, which may die. A server that has torch imported forks them: they start at once."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from batchspec import run
from batchspec.batch.automata import AutomataCapacity
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.distributed import rank_processes
from batchspec.job.report.page import can_draw
from batchspec.job.runner import commit_shards, conclude
from batchspec.job.supervise import poison_rows
from batchspec.packing import rates
from batchspec.text import chat_templates, templates
from batchspec.text.templates import Templates
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.programs import ForkedPopen
from tests.helpers.stand_ins import H200

Patch = Callable[[], None]


def make_model(folder: Path) -> Path:
    """A tiny fp64 model with its tokenizer: tokens do not depend on how it is run."""
    return make_tokenizer(make_checkpoint(folder, "llama", dtype=torch.float64))


def make_prompts(path: Path, count: int) -> Path:
    """Rows q0, q1, ... of a few words each."""
    pl.DataFrame([{"id": f"q{i}", "prompt": f"Say word{i} again"} for i in range(count)]).write_parquet(path)
    return path


def put(module: Any, name: str, value: Any) -> None:
    """Change what a module has where it is read; one that has moved must not pass for changed."""
    assert hasattr(module, name), f"{module.__name__} has no {name}"
    setattr(module, name, value)


def make_jobs_quick(patch: pytest.MonkeyPatch) -> None:
    """Leave out what takes longer than a tiny model's rows: the report, another measurement of the machine, another process for
    the same templates, Hydra's composing of the same options again, be it in another job or once more to find its own mode, and
    room for millions of masks of a tiny vocabulary.
    """
    get_mode = Hydra.get_mode

    def mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        return get_mode(self, config_name, overrides) if any("hydra.mode" in word for word in overrides) else None

    patch.setattr(conclude, "can_draw", lambda: False)
    patch.setattr(rates, "calibrate", cache(rates.calibrate))
    patch.setattr(Hydra, "get_mode", mode)
    patch.setattr(chat_templates, "Templates", templates_of_a_folder)
    room = AutomataCapacity.__init__.__kwdefaults__
    assert room is not None
    for name in ("masks_bytes", "lazy_masks_bytes"):
        patch.setitem(room, name, 8 << 20)
    compose_options_once(patch)


def templates_of_a_folder(sources: Mapping[str, str], where: str, *, date: str) -> Templates:
    """Jobs share the process that renders the same templates: to start one takes half as long as a job."""
    return _templates(tuple(sources.items()), where, date, templates.CPU_S, templates.MEMORY_BYTES)


@lru_cache(maxsize=4)
def _templates(sources: tuple[tuple[str, str], ...], where: str, date: str, *_limits: int) -> Templates:
    return Templates(dict(sources), where, date=date)


def compose_options_once(patch: pytest.MonkeyPatch) -> None:
    """Hydra composes a choice of options once; the values of keys are put into a copy. Options that may change, in folders
    outside the package, are composed as ever. The store of schemas, one for the process, is not copied for each.
    """
    create, merge = defaults_list.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
    lists: dict[Any, DefaultsList] = {}
    merged: dict[int, DictConfig] = {}

    def create_once(
        repo: IConfigRepository, config_name: str | None, overrides_list: list[Override], prepend_hydra: bool, skip_missing: bool
    ) -> DefaultsList:
        sources = [(source.scheme(), source.path) for source in repo.get_sources()]
        if any(scheme not in ("pkg", "structured") for scheme, _ in sources):
            return create(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        given = [each for each in overrides_list if not each.is_sweep_override()]
        values = [each for each in given if isinstance(each.value(), dict) or not repo.group_exists(each.key_or_group)]
        options = [each for each in given if all(each is not value for value in values)]
        key = (*sources, config_name, prepend_hydra, skip_missing, *(each.input_line for each in options))
        if key not in lists:
            lists[key] = create(repo, config_name, options, prepend_hydra, skip_missing)
        return replace(lists[key], config_overrides=values)

    def merge_once(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        if not any(known.defaults is defaults for known in lists.values()):
            return merge(self, defaults, repo)
        if id(defaults) not in merged:
            merged[id(defaults)] = merge(self, defaults, repo)
        return copy.deepcopy(merged[id(defaults)])

    patch.setattr(ConfigStore, "__deepcopy__", lambda store, _: store, raising=False)
    patch.setattr(config_loader_impl, "create_defaults_list", create_once)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once)


@contextmanager
def drawing() -> Iterator[None]:
    """Jobs in this process draw their reports, which the tests leave out otherwise (conftest.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conclude, "can_draw", can_draw)
        yield


def nothing() -> None:
    """No patch."""


def new_interpreters() -> None:
    """A patch: the workers of the run are started as in production, each by its own interpreter."""
    put(rank_processes, "Popen", subprocess.Popen)


def signalled_after_commits(count: int, number: signal.Signals) -> None:
    """A patch: the process sends itself a real signal as soon as this many shards are committed. Decoding waits for commits as it
    does with large shards, so that rows are left."""
    commit = OutputFolder.publish
    put(commit_shards, "MOST_WAITING", commit_shards.WAITING)

    def then_signalled(self: OutputFolder, *rest: Any) -> bool:
        won = commit(self, *rest)
        if len(self.committed()) == count:
            os.kill(os.getpid(), number)
        return won

    OutputFolder.publish = then_signalled  # type: ignore[method-assign,assignment]


def _child(arguments: list[str], log: Path, patch: Patch, environ: dict[str, str]) -> None:
    os.environ.clear()  # of the server, which may have begun before a test changed it
    os.environ.update(environ)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    poison_rows.COOLDOWN_S = 0.1  # ten seconds in earnest
    make_jobs_quick(pytest.MonkeyPatch())
    put(rates, "calibrate", lambda *_, **__: H200)
    put(rank_processes, "Popen", ForkedPopen)
    patch()
    code = run.main(arguments)
    sys.stderr.flush()
    os._exit(code)


def fork_context() -> ForkServerContext:
    """Its processes are forked from a server that has imported what a run needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.runs", "batchspec.job.run_job"])
    return context


def start_apart(arguments: list[str], log: Path, patch: Patch = nothing) -> ForkServerProcess:
    """The run's process; what it says goes to `log`. `patch`, of a test module, is called there first. Its workers are forked,
    unless the patch is `new_interpreters`.
    """
    process = fork_context().Process(target=_child, args=(arguments, log, patch, dict(os.environ)))
    process.start()
    return process


def run_apart(arguments: list[str], log: Path, patch: Patch = nothing, timeout_s: float = 120) -> tuple[int, str]:
    """Exit code, negative for a signal, and what it said."""
    process = start_apart(arguments, log, patch)
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the run hangs: {log.read_text()}")
    return process.exitcode, log.read_text(errors="replace")
