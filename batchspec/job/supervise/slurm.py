"""A task of a Slurm job: its identity, how much time it has left, and how it requeues itself. Not used outside of Slurm.

Observed on Slurm 22.05: the last task of an array has the array's own id as SLURM_JOB_ID, and `scontrol requeue` of that id
requeues all tasks. Slurm does not requeue a job that ran out of time or that ends by itself after a signal. For the process
`scancel` looks like any other signal, and a cancelled job that requeues itself would run again.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from batchspec.process.first_signals import in_batch_task

TIMEOUT_S = 10.0
"""Limit for Slurm's commands, which hang if the controller does not answer."""


@dataclass(frozen=True, slots=True)
class Task:
    """This batch job, or this task of an array."""

    job: str
    """`17`, or `17_3` in an array."""
    restarts: int
    """Number of times that it was requeued, by Slurm or by itself."""
    step_tasks: int
    """Number of tasks of the `srun` that this process belongs to; 1 without `srun`."""
    ends_at: float | None
    """End of the job in seconds since 1970; None without SLURM_JOB_END_TIME."""


def this_task(env: Mapping[str, str] | None = None) -> Task | None:
    """The batch job that this process runs in; None outside Slurm and in an interactive allocation."""
    env = os.environ if env is None else env
    if not in_batch_task(env):
        return None
    array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    end = env.get("SLURM_JOB_END_TIME", "")
    return Task(
        job=f"{array}_{index}" if array and index else env["SLURM_JOB_ID"],
        restarts=int(env.get("SLURM_RESTART_COUNT") or 0),
        step_tasks=int(env.get("SLURM_STEP_NUM_TASKS") or 1),
        ends_at=float(end) if end.isdigit() else None,
    )


def time_left_s(task: Task) -> float | None:
    """Seconds until the job's time limit, according to the controller now; infinite without a limit, None if unknown."""
    code, said = _ask("squeue", "-h", "-j", task.job, "-o", "%L")
    if code == 0 and (left := parse_time(said)) is not None:
        return left
    return None if task.ends_at is None else task.ends_at - time.time()


def parse_time(text: str) -> float | None:
    """Seconds of Slurm's [[days-]hours:]minutes:seconds; infinite for UNLIMITED, None for others, such as INVALID (job is
    over)."""
    if text.strip() == "UNLIMITED":
        return math.inf
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def requeue(task: Task, max_restarts: int, tell: Callable[[bool], None] = lambda requeued: None) -> str:
    """Requeue the task unless it was cancelled or has no restarts left; returns one line that says what was done.

    tell  called with True before the task is requeued, which ends this process, and with False if it could not be
    """
    if task.step_tasks > 1:
        return f"job {task.job}: {task.step_tasks} tasks of one srun; the batch script has to run `scontrol requeue {task.job}`"
    code, said = _ask("scontrol", "show", "job", "-o", task.job)
    if code != 0:
        return f"job {task.job} is not requeued: scontrol says nothing of it ({said}); submit the same command again"
    now = dict(word.partition("=")[::2] for word in said.split())
    if int(now.get("Restarts", 0)) > task.restarts:
        tell(True)
        return f"job {task.job} is requeued by Slurm"
    if now.get("JobState") in ("COMPLETING", "CANCELLED") and now.get("Reason") != "TimeLimit":
        return f"job {task.job} was cancelled and is not requeued; submit the same command again to go on"
    if task.restarts >= max_restarts:
        return (
            f"job {task.job} is out of restarts: {task.restarts} of cluster.max_restarts={max_restarts} are used; everything is "
            "saved, submit the same command again to go on"
        )
    tell(True)
    code, said = _ask("scontrol", "requeue", task.job)
    if code != 0:
        tell(False)
        return f"job {task.job} is not requeued ({said}); submit the same command again to go on"
    return f"job {task.job} is requeued, restart {task.restarts + 1} of {max_restarts}"


def _ask(*command: str) -> tuple[int, str]:
    """Exit code and output of a command, errors in one line."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, f"{command[0]}: {error.strerror if isinstance(error, OSError) else f'no answer in {TIMEOUT_S:g} s'}"
    return done.returncode, done.stdout.strip() if done.returncode == 0 else " ".join(done.stderr.split())
