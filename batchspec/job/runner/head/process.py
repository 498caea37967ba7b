"""`batchspec train` in a process of its own, on the same device: whatever happens to it, the job goes on.

It ends with this process: nothing else must train the same head, or take the memory, when the job is resumed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from batchspec.config.draft_schema import MOST_AHEAD
from batchspec.config.overrides import overrides_of
from batchspec.errors import Interrupted, OneLine, StorageError
from batchspec.job.prepare import Job
from batchspec.job.runner.head.forecast import with_own_head
from batchspec.job.runner.head.store import HEADS, ROWS, STATE, StoredHead
from batchspec.model.dtype import dtype_name
from batchspec.process import load_progress
from batchspec.process.child_process import python_command

PROGRAM = """
import os
from batchspec.process.child_process import act_when_parent_ends
act_when_parent_ends(lambda: os._exit(75))
from batchspec.cli import console
console()
"""
"""Its standard input closes when this process ends."""
EPOCHS, BATCH_TOKENS, AHEAD, ANCHORS = 8, 16384, 6, 0.75
"""More steps than jobs/examples/train_head.sh makes of as many tokens, because these are fewer; draft.train.minutes may end them
earlier."""
LONGEST = 8192
"""The most tokens of a row that are trained on, its prompt included. A row must fit a batch."""
HELD_OUT = 64
"""The most answers that acceptance is measured on; of few answers an eighth."""
POLL_S, SAY_S = 0.2, 60.0
LATE_S = 1800.0
"""Seconds besides the training's minutes after which it is ended: it loads the model, compiles, and measures acceptance."""
SAVE_S = 45.0
"""Seconds in which it writes its checkpoint after a signal: a run that is asked to end is killed after 90."""
PASSING = (StorageError.exit_code, Interrupted.exit_code)


class TrainingFailed(OneLine):
    """There is no head; the message says why, in one line."""


class TrainingStopped(OneLine):
    """The training did not end, for a reason that may have passed: another run may train the head."""


class TakenOver(OneLine):
    """Another run trains the head now: this one was suspended, or could not renew its claim."""


def settings(job: Job, num_rows: int, longest: int) -> dict[str, Any]:
    """The keys of `batchspec train` for the head of a job, without paths.

    num_rows  answers to train on; longest: tokens of the longest one, its prompt included
    """
    own, model, draft_len = job.config.draft.train, job.config.model, with_own_head(job, None).config.draft.draft_len
    asked = {"quantize": model.quantize, "activations": model.activations, "max_len": model.max_len, "revision": model.revision}
    return {
        "draft": own.kind,
        "draft.num_speculative_tokens": draft_len,
        "train.ahead": min(MOST_AHEAD, max(AHEAD, draft_len)),
        "train.minutes": own.minutes,
        "train.epochs": EPOCHS,
        "train.batch_tokens": BATCH_TOKENS,
        "train.max_len": max(2048, longest),
        **({"train.anchors": ANCHORS} if own.kind == "block" else {}),
        "train.held_out": max(1, min(HELD_OUT, num_rows // 8)),
        "train.eval_steps": 0,
        "model.dtype": dtype_name(job.dtype),
        "device": job.device.type,
        **{f"model.{key}": value for key, value in asked.items() if value not in (None, "auto")},
    }


def folder_of(keys: Mapping[str, Any], rows: str) -> str:
    """The name of the folder of a head with these settings, and answers with this digest: a training of others is not
    continued."""
    return f"{HEADS}{sha256(json.dumps([keys, rows], sort_keys=True).encode()).hexdigest()[:12]}"


def words_of(keys: Mapping[str, Any], model: str, rows: Path, head: Path) -> list[str]:
    """The command line of the training."""
    return ["train", *overrides_of({**keys, "model.path": model, "input.path": str(rows), "output.dir": str(head)})]


def train(
    keys: Mapping[str, Any], model: str, stored: StoredHead, head: str, *, minutes: float, say: Callable[[str], None],
    poll: Callable[[], str | None],
) -> None:
    """Train until the head is complete, from the last checkpoint of an earlier training on.

    keys    `settings`
    stored  has the answers; the head goes to its folder `head`
    say     told the last line now and then
    poll    called all the time; returns the name of the signal that asks to end, or None
    Raises TrainingFailed for what the training itself refuses; Interrupted after a signal to this run, and then the training has
    SAVE_S to write a checkpoint; and TrainingStopped for any other end: a signal to the training, a disk or memory that is full.
    """
    ends_at, said_at = time.monotonic() + 60.0 * minutes + LATE_S, time.monotonic()
    with stored.new_log() as out:
        try:
            process = subprocess.Popen(
                [*python_command("-c", PROGRAM), *words_of(keys, model, stored.path / ROWS, stored.path / head)],
                stdin=subprocess.PIPE, stdout=out, stderr=out,
                start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            )
        except OSError as error:
            raise TrainingStopped(f"its process could not be started: {error}") from None
        asked = None
        try:
            while process.poll() is None:
                asked = poll()
                if asked is not None:
                    _end(process)
                    break
                if time.monotonic() >= ends_at:
                    raise TrainingFailed(f"it did not end within {minutes:g} minutes and {LATE_S:.0f} s more")
                load_progress.count_step()  # this loop has a limit of its own
                if time.monotonic() - said_at >= SAY_S:
                    said_at = time.monotonic()
                    say(stored.last_line())
                time.sleep(POLL_S)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
    asked = asked or poll()  # a signal to both processes may have ended the training first
    if asked is not None:
        raise Interrupted(f"{asked}: all rows are saved{_kept(stored.path / head)}; run the same command again to go on")
    if process.returncode < 0 or process.returncode in PASSING:
        raise TrainingStopped(f"exit code {process.returncode}: {stored.last_line()}")
    if process.returncode:
        raise TrainingFailed(stored.last_line() or f"exit code {process.returncode}")


def _kept(head: Path) -> str:
    return f", and the training in {head} up to its last checkpoint" if (head / STATE).is_file() else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to write its checkpoint, and wait."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(SAVE_S)
