"""Runs a case through an entry point and compares its rows with those of the reference run."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import polars as pl
import pytest
import torch

import batchspec
from batchspec import run
from batchspec.cache.page_tables import Counts, PagePools
from batchspec.config.compose import compose
from batchspec.config.overrides import overrides_of
from batchspec.engine.slots.expected_pages import ExpectedPages
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.errors import BatchspecError, CapacityError, ConfigError, TooManyErrors
from batchspec.warm.conversations import Turn
from tests.gpu_jobs.cases import Case, Keys
from tests.gpu_jobs.compare import Rows, differences, rows_of, rows_of_stream
from tests.gpu_jobs.plain import Failed, Outcome, Plain, frame_of, no_shared_prefixes
from tests.gpu_jobs.rows import Row
from tests.gpu_jobs.scoring import keys_of_scoring, plain_scores, prompts_of, scores_that_differ, shape_of_scoring

ROOT = Path(__file__).parents[2]
COMMAND_S = 200
"""A command that takes longer hangs."""
AGAIN = ("And then?", "Why? Answer in one word.", "Say that again, but shorter.")
Result = TypeVar("Result")


def of_prompt(self: ExpectedPages, state: RequestState) -> int:
    """Pages for the tokens that there are, and few more."""
    tokens = min(state.max_tokens, len(state.request.prompt_ids) + len(state.tokens) + 1)
    return -(-(tokens + self._num_lookahead_slots) // self._page_size)


def nothing(self: ExpectedPages, slots: SlotTable, pools: PagePools) -> Counts:
    return np.zeros_like(_promised(self, slots, pools))


_promised = ExpectedPages.promised


def run_case(case: Case, plain: Plain) -> Outcome:
    """Raises what batchspec raises, but for keys that it refuses."""
    outcome, rng = Outcome(), Random(case.seed)
    entry_points: dict[str, Callable[[Case, Plain, Random, Outcome], None]]
    entry_points = {"engine": _engine, "job": _job, "generate": _generate, "killed": _killed, "scored": _scored}
    wanted = plain.rows
    assert wanted
    try:
        with pytest.MonkeyPatch.context() as patch:
            if case.eager:
                patch.setattr(ExpectedPages, "of_waiting", of_prompt)
                patch.setattr(ExpectedPages, "promised", nothing)
            entry_points[case.entry_point](case, plain, rng, outcome)
    except ConfigError as error:
        outcome.refused = str(error)
    finally:
        gc.collect()
        if case.group.gpu:
            torch.cuda.empty_cache()
    return outcome


def with_pages(keys: Keys, use: Callable[[list[str]], Result]) -> Result:
    """`use` of the overrides; with 2 pages, of those with as few pages as the longest row needs."""
    try:
        return use(overrides_of(keys))
    except CapacityError as error:
        fewest = re.search(r"raise packing\.pages to (\d+)", str(error))
        if fewest is None or keys.get("packing.pages") != 2:
            raise
    return use(overrides_of({**keys, "packing.pages": int(fewest[1])}))


def _engine(case: Case, plain: Plain, rng: Random, outcome: Outcome) -> None:
    group = case.group
    engine = with_pages({**group.keys, **case.runs[0]}, batchspec.Engine)
    with engine:
        for number in range(rng.choice([1, 2, 2, 3])):
            ways = ["generate"] * 6 + ["stream", "left", "other"]
            ways += ["converse"] * (group.kind == "messages" and not group.model.reads_images)
            way = rng.choice(ways)
            part = rng.sample(group.rows, rng.randint(-(-len(group.rows) // 3), len(group.rows)))
            found = _CALLS[way](engine, part, plain, rng, outcome)
            outcome.lines += [f"call {number} ({way}, {len(part)} rows) {line}" for line in found]


def _wanted(rows: Rows, part: Sequence[Row]) -> Rows:
    ids = {row["id"] for row in part}
    return {key: row for key, row in rows.items() if key[0] in ids}


def _call_generate(engine: batchspec.Engine, part: list[Row], plain: Plain, rng: Random, outcome: Outcome) -> list[str]:
    frame = engine.generate(frame_of(part))
    outcome.add(frame)
    return differences(rows_of(frame, part[0]), _wanted(plain.rows, part), bits=plain.group.bits)


def _call_stream(engine: batchspec.Engine, part: list[Row], plain: Plain, rng: Random, outcome: Outcome) -> list[str]:
    found = rows_of_stream(engine.stream(frame_of(part)))
    outcome.rows += len(found)
    return differences(found, _wanted(plain.rows, part), bits=plain.group.bits, of_stream=True)


def _call_left(engine: batchspec.Engine, part: list[Row], plain: Plain, rng: Random, outcome: Outcome) -> list[str]:
    """A stream that is left early, then all rows."""
    with engine.stream(frame_of(part)) as stream:
        found = rows_of_stream(next(stream) for _ in range(rng.randint(1, min(4, len(part)))))
    outcome.rows += len(found)
    lines = differences(found, _wanted(plain.rows, part), bits=plain.group.bits, whole=False, of_stream=True)
    return lines + _call_generate(engine, part, plain, rng, outcome)


def _call_other(engine: batchspec.Engine, part: list[Row], plain: Plain, rng: Random, outcome: Outcome) -> list[str]:
    """Other weights and back."""
    group = plain.group
    if group.setting.model == "dummy" or group.model.reads_images:  # load_weights is refused
        return _call_generate(engine, part, plain, rng, outcome)
    wanted = _wanted(plain.rows_of_other, part)
    engine.load_weights(group.model.other)
    frame = engine.generate(frame_of(part))
    outcome.add(frame)
    lines = [f"with other weights: {line}" for line in differences(rows_of(frame, part[0]), wanted, bits=group.bits)]
    engine.load_weights(group.model.folder)
    return lines + _call_generate(engine, part, plain, rng, outcome)


def next_turn(turn: Turn) -> list[dict[str, Any]] | None:
    if turn.number >= 2 or turn.completion.error is not None or turn.completion.token_ids is None:
        return None
    return [*turn.messages, {"role": "user", "content": AGAIN[len(turn.completion.token_ids) % len(AGAIN)]}]


def _call_converse(engine: batchspec.Engine, part: list[Row], plain: Plain, rng: Random, outcome: Outcome) -> list[str]:
    part = part[:12]
    with no_shared_prefixes():
        wanted = rows_of(plain.engine.converse(frame_of(part), next_turn), part[0])
    frame = engine.converse(frame_of(part), next_turn, threads=rng.choice([1, 3]))
    outcome.add(frame)
    return differences(rows_of(frame, part[0]), wanted, bits=plain.group.bits)


_CALLS = {
    "generate": _call_generate, "stream": _call_stream, "left": _call_left, "other": _call_other, "converse": _call_converse,
}


def _generate(case: Case, plain: Plain, rng: Random, outcome: Outcome) -> None:
    part = rng.sample(case.group.rows, rng.randint(1, len(case.group.rows)))
    keys, wanted = {**case.group.keys, **case.runs[0]}, _wanted(plain.rows, part)
    if all(row["status"] == "error" for row in wanted.values()):
        with pytest.raises(TooManyErrors, match="every completion of "):
            with_pages(keys, lambda words: batchspec.generate(frame_of(part), overrides=words))
        return
    frame = with_pages(keys, lambda words: batchspec.generate(frame_of(part), overrides=words))
    outcome.add(frame)
    outcome.lines += differences(rows_of(frame, part[0]), wanted, bits=case.group.bits)


def _scored(case: Case, plain: Plain, rng: Random, outcome: Outcome) -> None:
    """A warm engine that scores the prompts, twice, so that it meets its own prefixes."""
    top, prompts = rng.choice([0, 3]), frame_of(prompts_of(case.group))
    with no_shared_prefixes():
        wanted = plain_scores(case.group, prompts, top)
    engine = with_pages({**keys_of_scoring(case.group, top), **shape_of_scoring(case.runs[0])}, batchspec.Engine)
    with engine:
        for number in range(2):
            frame = engine.generate(prompts.sample(fraction=1, shuffle=True, seed=number))
            outcome.rows += frame.height
            outcome.lines += [f"call {number} {line}" for line in scores_that_differ(case, frame, wanted)]


@contextmanager
def _folder_of_job(case: Case, part: Sequence[Row]) -> Iterator[tuple[Path, Keys]]:
    with tempfile.TemporaryDirectory(prefix="gpu-jobs-") as name:
        frame_of(part).write_parquet(f"{name}/rows.parquet")
        yield Path(name), {**case.group.keys, "input.path": f"{name}/rows.parquet", "output.dir": f"{name}/out"}


def _written(folder: Path, part: Sequence[Row], plain: Plain, outcome: Outcome) -> None:
    frame = pl.read_parquet(folder / "out/data/*.parquet")
    outcome.add(frame)
    outcome.resumed += frame["perf"].struct.field("attempt").n_unique() > 1
    outcome.lines += differences(rows_of(frame, part[0]), _wanted(plain.rows, part), bits=plain.group.bits)


def _job(case: Case, plain: Plain, rng: Random, outcome: Outcome) -> None:
    part = rng.sample(case.group.rows, rng.randint(-(-len(case.group.rows) // 2), len(case.group.rows)))
    with _folder_of_job(case, part) as (folder, keys):

        def use(words: list[str]) -> None:
            if case.group.ranks > 1:  # they say in the log what one process raises
                _command(words, folder, None, 0.0, 0)
            elif code := run.run(compose(words, require=("model.path", "input.path", "output.dir"))):
                raise Failed(f"exit code {code}")

        with_pages({**keys, **case.runs[0]}, use)
        _written(folder, part, plain, outcome)


def _killed(case: Case, plain: Plain, rng: Random, outcome: Outcome) -> None:
    """Commands in processes of their own: each but the last gets a signal, at once or after some commits."""
    with _folder_of_job(case, case.group.rows) as (folder, keys):
        for number, shape in enumerate(case.runs):
            number_of_signal = rng.choice([signal.SIGTERM, signal.SIGKILL]) if number < len(case.runs) - 1 else None
            commits = rng.choice([0, 1, 1, 3])
            delay = rng.random() * (rng.choice([0.1, 0.1, 1]) if commits else 12)  # it may also hit the start of a run

            def use(
                words: list[str], sent: signal.Signals | None = number_of_signal, delay: float = delay, commits: int = commits
            ) -> None:
                _command(words, folder, sent, delay, commits)

            with_pages({**keys, **shape}, use)
        _written(folder, case.group.rows, plain, outcome)


def _command(words: list[str], folder: Path, sent: signal.Signals | None, delay: float, commits: int) -> None:
    """Runs a command; `sent` comes `delay` seconds after that many commits. Raises Failed, CapacityError or ConfigError."""
    log, started = folder / "log", time.monotonic()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "batchspec.run", *words], env=env, stdout=file, stderr=file)
    try:
        due = None
        while process.poll() is None:
            now = time.monotonic()
            if sent is not None and due is None and len(list(folder.glob("out/data/part-*"))) >= commits:
                due = now + delay
            if sent is not None and due is not None and now >= due:
                process.send_signal(sent)
                sent = None if sent is signal.SIGKILL else sent
                due = float("inf")
            if now - started > COMMAND_S:
                raise Failed(f"the command hangs: {log.read_text()[-1500:]}")
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    said = log.read_text(errors="replace")[-3000:]
    if process.returncode == 2:
        line = next(line for line in reversed(said.splitlines()) if not line.endswith("its group ends"))
        if str(folder) in line:
            raise Failed(f"not a key but the job's own files are refused: {line}")
        raise (CapacityError if "raise packing.pages to" in said else ConfigError)(line)
    fine = (0, 75, -signal.SIGKILL, -signal.SIGTERM) if due is not None else (0,)
    if process.returncode not in fine:
        raise Failed(f"exit code {process.returncode}: {said}")


def is_fatal(error: BaseException) -> bool:
    """Whether the process cannot go on, as after an illegal access on the GPU."""
    return not isinstance(error, BatchspecError) and bool(
        re.search(r"CUDA error|cudaError|CUDA driver|Triton Error", repr(error))
    )
