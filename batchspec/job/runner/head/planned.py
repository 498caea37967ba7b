"""What `batchspec plan` says of the head that a job would train, or that an earlier one has trained."""

from __future__ import annotations

from dataclasses import dataclass

from batchspec.console.text import duration
from batchspec.errors import CapacityError, CheckpointError, ConfigError, StorageError
from batchspec.job.prepare import Job
from batchspec.job.runner.head.forecast import RELOAD_S, Prospect, batches_of, prospect, with_own_head, with_training
from batchspec.job.runner.head.store import HeadRecord, StoredHead, stored_head
from batchspec.packing.planner import Demand
from batchspec.packing.rates import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHead:
    """The head of a job, before the job runs."""

    prospect: Prospect | None
    """None: there is no head, and none is trained."""
    line: str


def planned_head(job: Job, first: Demand, demand: Demand, rates: Rates) -> PlannedHead | None:
    """None without draft.train.kind.

    job     as it drafts before it has a head
    first   what a run chooses its batch by; demand: of the whole job
    """
    if job.config.draft.train.kind is None:
        return None
    try:
        batches = batches_of(job, first, rates)
    except CapacityError as error:
        return PlannedHead(prospect=None, line=f"there is no memory for it: {error}")
    found = _found(job)
    if found is None:
        made = with_training(job, batches, demand, rates)
        return PlannedHead(prospect=made, line=_of_training(job, made))
    stored, record = found
    path = stored.path / record.head
    if record.failed:
        return PlannedHead(prospect=None, line=f"its training failed: {record.failed}; delete {stored.path} to try again")
    try:
        with_own_head(job, str(path))
    except (CheckpointError, ConfigError) as error:
        return PlannedHead(prospect=None, line=f"that in {path} cannot be used: {error}")
    before = record.before if record.drafter == job.config.draft.name else None
    made = prospect(job, batches, demand, rates, before=before, accepted=record.accepted, cost_s=0.0)
    verdict = "it is used" if made.pays else "it does not pay and is not used"
    line = f"{path}, trained before; decoding takes {_times(made)}, {verdict}; {_drafts(made)}"
    return PlannedHead(prospect=made, line=line)


def _found(job: Job) -> tuple[StoredHead, HeadRecord] | None:
    try:
        stored = stored_head(job)
        record = stored.record()
    except (CheckpointError, StorageError):  # the weights are not on this machine yet, say
        return None
    return None if record is None else (stored, record)


def _of_training(job: Job, made: Prospect) -> str:
    own = job.config.draft.train
    verdict = "training one pays" if made.pays else "training one does not pay, unless what the job measures says otherwise"
    return (
        f"{own.kind}, to be trained; decoding takes {_times(made)}, {verdict}; assumed: {_drafts(made)}, {own.tokens:,} tokens "
        f"of answers before the training, {own.minutes:g} min for it, {duration(2 * RELOAD_S)} to load twice"
    )


def _times(made: Prospect) -> str:
    return f"{duration(made.with_s)} with it, {duration(made.without_s)} without"


def _drafts(made: Prospect) -> str:
    return f"{made.accepted:.2f} drafts accepted a round with it, {made.before:.2f} without"
