"""The status of a job over all of its runs, from the names of its shards, its claims and heartbeats. It reads no rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from batchspec.data.runstate.claims import owner_is_gone, this_process
from batchspec.data.runstate.heartbeats import HeartbeatFiles, RunHeartbeat
from batchspec.data.runstate.output_folder import OutputFolder

STUCK_S = 120.0
"""A run that has rows but no result (`RunHeartbeat.quiet_s`) for this time is stuck."""
SLOW = 0.5
"""A straggler is slower than this share of the median tokens a second, taken over at least MIN_RUNS runs."""
MIN_RUNS = 3
SAVED = ("interrupted", "requeued")
"""States of ended runs that saved the tokens of their unfinished rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run: its heartbeat, and what follows from it and from its claims."""

    run: RunHeartbeat
    state: str
    """running
    loading  it imports, checks, reads the input or loads the model: it has no batch yet
    waiting  it has no shard, because other runs work on the last ones
    stuck    it has rows, and no result for STUCK_S
    silent   no heartbeat for as long as a claim lasts, by this machine's clock
    gone     it was killed or crashed: its process does not exist any more, or its batch task was started again
    requeued it was interrupted, and the batch system has not started its task again yet
    done, interrupted, failed, crashed: as the run itself reported at its end
    """
    shards: tuple[int, ...]
    """Shards that it has claimed and not committed."""
    straggler: bool
    age_s: float
    """Seconds since its last heartbeat; 0 if the clocks of two machines disagree."""

    @property
    def old_s(self) -> float:
        """Seconds since it began."""
        return self.run.at - self.run.began_at + self.age_s

    @property
    def lives(self) -> bool:
        return self.state in ("running", "loading", "waiting", "stuck")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    path: str
    state: str
    """not begun   no run has loaded a model for it, and none is loading one
    loading     runs were started, and none has a batch yet
    running     a run has a batch
    requeued    no run is left, and the batch system starts a task again
    stopped     shards are missing, and no run works on them
    complete
    """
    rows: int
    rows_total: int
    """Input rows; `rows` are those of committed shards."""
    shards: int
    shards_total: int
    completions: int
    completions_total: int
    """Completions, including those of uncommitted shards in the journal or a running process; estimated if a row may have
    several."""
    share: float
    """Share of the job that is done, 0 to 1, tokens of unfinished rows included. 1 only if complete."""
    errors: int
    """Error rows in committed shards, of runs with a heartbeat file."""
    skipped: int
    """Rows that input.on_overlong=skip left undecoded, likewise."""
    tok_s: float
    """Tokens a second of all living runs together, over the last minute."""
    tokens: int
    """Tokens of all runs since the job began, including those that were computed twice."""
    mean_acceptance_length: float | None
    left_s: float | None
    """Seconds left at the present speed; None if nothing runs, or the running rows have become longer than was expected."""
    runs: tuple[RunStatus, ...]
    """Living ones first, then by when they ended, the latest first."""
    stale_claims: dict[int, str]
    """Shard -> the run that claimed it and does not run any more; another run will take the shard over."""
    unreadable: int
    """Heartbeat files that are damaged or not batchspec's."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class StatusReader:
    """Reads the status of a job repeatedly; heartbeats of ended runs are cached."""

    def __init__(self, output: OutputFolder, clock: Callable[[], float] = time.time) -> None:
        self._output, self._clock = output, clock
        self._files: HeartbeatFiles | None = None

    def read(self) -> JobStatus:
        """The status now. Raises OutputError for a folder that holds something else than a job; StorageError."""
        output = self._output
        self._files = self._files or output.heartbeats()
        if output.is_untouched():
            runs, unreadable = self._files.read()
            return _not_begun(output.path, _run_statuses(runs, {}, self._clock(), output.claims().stale_s), unreadable)
        output.latest_changes()
        runs, unreadable = self._files.read()  # before the claims: a run that ends in between releases them
        missing = output.missing()
        claims = output.claims()
        owners = {shard: str(claim.get("owner")) for shard, claim in claims.owners(missing).items()}
        statuses = _run_statuses(runs, owners, self._clock(), claims.stale_s)
        lives = [status for status in statuses if status.lives]
        done, total, share, left_s = _left(statuses, runs, missing, output)
        rounds = sum(run.rounds for run in runs)
        return JobStatus(
            path=output.path,
            state="complete" if not missing else _state_of_job(statuses, idle="stopped"),
            rows=output.manifest.num_rows - output.manifest.layout.num_rows_of(missing),
            rows_total=output.manifest.num_rows,
            shards=output.num_shards - len(missing),
            shards_total=output.num_shards,
            completions=round(done),
            completions_total=round(total),
            share=min(share, 0.999) if missing else 1.0,
            errors=max(0, sum(run.errors - run.replaced_errors for run in runs)),
            skipped=sum(run.skipped for run in runs),
            tok_s=sum(status.run.tok_s for status in lives),
            tokens=sum(run.tokens for run in runs),
            mean_acceptance_length=1 + sum(run.accepted for run in runs) / rounds if rounds else None,
            left_s=left_s if missing else None,
            runs=_sorted(statuses),
            stale_claims=_stale(owners, statuses),
            unreadable=unreadable,
        )


def _not_begun(path: str, statuses: Sequence[RunStatus], unreadable: int) -> JobStatus:
    return JobStatus(
        path=path, state=_state_of_job(statuses, idle="not begun"), rows=0, rows_total=0, shards=0, shards_total=0,
        completions=0, completions_total=0, share=0.0, errors=0, skipped=0, tok_s=0, tokens=0,
        mean_acceptance_length=None, left_s=None,
        runs=_sorted(statuses), stale_claims={}, unreadable=unreadable,
    )


def _state_of_job(statuses: Sequence[RunStatus], *, idle: str) -> str:
    """The state of a job that is not complete. idle: its name if no run lives."""
    if lives := [status for status in statuses if status.lives]:
        return "loading" if all(status.state == "loading" for status in lives) else "running"
    return "requeued" if any(status.state == "requeued" for status in statuses) else idle


def _sorted(statuses: Sequence[RunStatus]) -> tuple[RunStatus, ...]:
    return tuple(sorted(statuses, key=lambda status: (not status.lives, not status.straggler, -status.run.at)))


def _run_statuses(runs: Sequence[RunHeartbeat], owners: dict[int, str], now: float, stale_s: float) -> list[RunStatus]:
    """The status of every run; `owners` are the claims on shards that are not committed."""
    starts: dict[str, int] = {}
    for run in runs:
        starts[run.task] = max(run.restart, starts.get(run.task, 0))
    held = {run.attempt: tuple(sorted(n for n, owner in owners.items() if owner == run.attempt)) for run in runs}
    who = this_process()
    states = {run.attempt: _state(run, held[run.attempt], starts[run.task], who, now, stale_s) for run in runs}
    settled = [run for run in runs if states[run.attempt] == "running" and run.at - run.began_at >= 60]
    usual = median(run.tok_s for run in settled) if len(settled) >= MIN_RUNS else 0.0
    return [
        RunStatus(
            run=run,
            state=states[run.attempt],
            shards=held[run.attempt],
            straggler=run in settled and run.tok_s < SLOW * usual,
            age_s=round(max(0.0, now - run.at), 1),
        )
        for run in runs
    ]


def _state(run: RunHeartbeat, held: tuple[int, ...], last_start: int, who: dict[str, Any], now: float, stale_s: float) -> str:
    if run.end == "requeued" and run.restart < last_start:
        return "interrupted"
    if run.end:
        return run.end
    if owner_is_gone(asdict(run), who) or (run.task and run.restart < last_start):
        return "gone"
    if now - run.at >= stale_s:
        return "silent"
    if not run.slots:
        return "loading"
    if held:
        return "stuck" if run.quiet_s >= STUCK_S else "running"
    return "waiting" if run.quiet_s >= 5 else "running"


def _left(
    statuses: Sequence[RunStatus], runs: Sequence[RunHeartbeat], missing: set[int], output: OutputFolder
) -> tuple[float, float, float, float | None]:
    """(completions done, completions in all, share of the job that is done, seconds left)."""
    lives = [status for status in statuses if status.lives]
    # The most that a run expects: one that began before an extension of the job does not know the added rows.
    layout = output.manifest.layout
    total = float(max([layout.num_rows, *(run.expected for run in runs)]))
    committed = total * (1 - layout.num_rows_of(missing) / layout.num_rows)
    done = min(total, committed + _open(lives if output.generation is not None else statuses, missing))
    tok_s = sum(status.run.tok_s for status in lives)
    weights = [(8 + status.run.completions, status.run.mean_output) for status in statuses if status.run.mean_output]
    mean_output = sum(weight * mean for weight, mean in weights) / (sum(weight for weight, _ in weights) or 1)
    in_flight = _in_flight(statuses)
    share = (done + (in_flight / mean_output if mean_output else 0.0)) / (total or 1.0)
    if not tok_s:
        return done, total, share, None
    seconds = ((total - done) * mean_output - in_flight) / tok_s
    return done, total, share, seconds if math.isfinite(seconds) and seconds > 0 else None


def _open(statuses: Sequence[RunStatus], missing: set[int]) -> int:
    """Completions of shards that are not committed. Runs may report the same completions of a shard, because a run also counts
    those that it found in the journal: the largest count is taken.

    A heartbeat may be older than the newest commits: shards committed since are ignored here, and counted as committed.
    """
    counts: dict[int, int] = {}
    for status in statuses:
        for shard, count in status.run.open_shards:
            if shard in missing and status.state != "done":
                counts[shard] = max(count, counts.get(shard, 0))
    return sum(counts.values())


def _in_flight(statuses: Sequence[RunStatus]) -> int:
    """Tokens of unfinished rows: of living runs, and of interrupted runs that saved them if no run has saved its own since."""
    saving = [status.run for status in statuses if status.run.slots and status.state not in ("gone", "crashed")]
    latest = max((run.began_at for run in saving), default=0.0)  # without those that only loaded, and those that were killed
    counted = (status.run for status in statuses if status.lives or (status.state in SAVED and status.run.at >= latest))
    return sum(run.in_flight_tokens for run in counted)


def _stale(owners: dict[int, str], statuses: Sequence[RunStatus]) -> dict[int, str]:
    known = {status.run.attempt: status for status in statuses}
    return {shard: owner for shard, owner in sorted(owners.items()) if owner in known and not known[owner].lives}
