"""What a run does about the head that its job trains for itself. Killed at any moment, the next run finds out anew where it is:

the store has a record      drafts with the head, or goes on without it, from the start
it has rows, no record      trains on them, from the last checkpoint on, unless another run holds the claim
it has nothing              gathers answers, takes the claim and trains; another run has it: decodes on, and looks again

Tokens do not depend on any of this. A training or a head that does not pay, or fails, leaves the job as it is. A head in use is
judged again and again by what the job's rounds accept with it, and let go once it has lost as much time as that costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any

from batchspec.console.text import duration
from batchspec.data.runstate.heartbeats import HeartbeatFiles
from batchspec.data.runstate.journal import Journaled
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import CapacityError, CheckpointError, ConfigError, StorageError
from batchspec.job.prepare import Job
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.report.trained_head import Phase, TrainedHead
from batchspec.job.runner.head import process
from batchspec.job.runner.head.abandoned import drop_abandoned
from batchspec.job.runner.head.forecast import (
    RELOAD_S,
    Prospect,
    accepted_by_rounds,
    batches_of,
    prospect,
    training_s,
    with_own_head,
)
from batchspec.job.runner.head.lost_time import LostTime, accepted_of
from batchspec.job.runner.head.process import LONGEST, TakenOver, TrainingFailed, TrainingStopped, folder_of, settings
from batchspec.job.runner.head.store import CLAIM, LOG, HeadRecord, stored_head
from batchspec.job.runner.identity import job_fingerprint
from batchspec.job.runner.interlude import Interlude
from batchspec.job.runner.oom_fallback import EngineWithFallback
from batchspec.packing.planner import Demand
from batchspec.packing.rates import device_rates
from batchspec.packing.survey import Survey
from batchspec.records import ANSWERED, Completion, Ids

LOOK_S = 10.0
"""Seconds between two reads of the store."""
FEWEST_ROWS = 16
"""Answers that a training needs besides their tokens: an eighth are held out."""
MEASURED_ROUNDS = 4096
"""Rounds of rows after which their acceptance counts as measured."""


class OwnHead(Interlude):
    """One run's part in the head of its job.

    job  as it is to be loaded: with the head, once there is one that pays
    """

    def __init__(self, job: Job, survey: Survey, progress: ProgressBar, saved: Journaled, runs: HeartbeatFiles) -> None:
        """
        saved  rows of earlier runs, which count as gathered
        runs   of the job
        Raises ConfigError.
        """
        self.job, self._plain, self._survey, self._progress = job, job, survey, progress
        self._own, self._stored = job.config.draft.train, stored_head(job)
        self._fingerprint = sha256(json.dumps(job_fingerprint(job), sort_keys=True).encode()).hexdigest()
        self._claims, self._runs = self._stored.claims(runs.attempt), runs
        self._by_others = runs.finished_by_others()
        self._rates = device_rates(job.device, job.dtype, fp8=job.spec.formats.quantises)
        self._rows: list[tuple[Ids, Ids]] = []
        self._num_tokens, self._look_at, self._is_open = 0, 0.0, True
        self._part = TrainedHead()
        self._phase = self._part.before
        self._last: Phase | None = None
        self._lost, self._before = LostTime(), self._measured()
        for completion in saved.completions.values():
            self.finished(completion)
        try:
            self._batches = batches_of(job, self._demand(), self._rates)
            if (record := self._stored.record()) is not None:
                self._stored.drop_rest(record)  # of a run that was killed before it did
                self._judge(record, cost_s=0.0)
            elif (mean := self._demand().prompt_tokens) > LONGEST:
                self._give_up(f"a training reads {LONGEST:,} tokens of a row, and prompts have {mean:,.0f} on average")
        except CapacityError as error:
            self._give_up(f"there is no memory for a head: {error}")
        except StorageError as error:
            self._give_up(f"its store cannot be used: {error}")
        self._set_phase()

    def _set_phase(self) -> None:
        """An engine was made, or will be: what its rounds are counted as."""
        self._phase, self._last = self._part.after if self.uses_head else self._part.before, None

    @property
    def uses_head(self) -> bool:
        return self.job is not self._plain

    def finished(self, completion: Completion) -> None:
        prompt, output = completion.prompt_ids, completion.token_ids
        if not self._is_open or self._has_enough or completion.status not in ANSWERED or prompt is None or output is None:
            return
        output = output[: max(0, LONGEST - len(prompt))]  # training reads no more
        if len(prompt) and len(output) > 1 and completion.image_digest is None:
            self._rows.append((prompt, output))
            self._num_tokens += len(output)

    @property
    def _has_enough(self) -> bool:
        return self._num_tokens >= self._own.tokens and len(self._rows) >= FEWEST_ROWS

    def after_round(self, totals: EngineTotals, has_time: Callable[[float], bool]) -> None:
        self._measure(totals)
        if self.uses_head:
            self._watch()
        elif self._is_open and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            try:
                self.due = self._looks(has_time)
            except StorageError as error:
                self._give_up(f"its store cannot be used: {error}")

    def _measure(self, totals: EngineTotals) -> None:
        now = Phase(
            seconds=time.monotonic(), tokens=totals.tokens, row_rounds=totals.row_rounds, drafted=totals.drafted,
            accepted=totals.accepted,
        )
        if self._last is not None:
            self._phase.add(now.since(self._last))
        self._last = now

    def _watch(self) -> None:
        """Let the head go if it has lost as much time as that takes, and would lose more."""
        window = self._lost.window(self._part.after)
        if window is None:
            return
        most = self.job.drafter.shape.num_verified
        found = self._prospect(self._before, accepted_of(window, most), cost_s=0.0)
        self._lost.add(window.seconds, found)
        if self._lost.seconds >= RELOAD_S and found.without_s + RELOAD_S < found.with_s:
            self._part.dropped, self.due = 1, True
            self._give_up(
                f"its head has lost about {duration(self._lost.seconds)}: lately {found.accepted:.2f} drafts were accepted a "
                f"round, without it {found.before:.2f}"
            )

    def _looks(self, has_time: Callable[[float], bool]) -> bool:
        """Whether the pass is to end: to train, or to draft with the head that the store has."""
        record = self._stored.record()
        if record is None and (self._has_enough or self._stored.has_rows(self._fingerprint)) and self._claims.take(CLAIM):
            record = self._stored.record()  # the run that had the claim may have ended its training since
            if record is None and self._would_pay(has_time):
                self._is_open = False
                return True
            self._claims.release()
        return record is not None and self._judge(record, cost_s=RELOAD_S)

    def _would_pay(self, has_time: Callable[[float], bool]) -> bool:
        needs_s = training_s(self._own.minutes)
        if not has_time(needs_s):
            self._give_up(f"the time limit leaves less than the {duration(needs_s)} that training a head takes")
            return False
        found = self._prospect(self._measured(), cost_s=needs_s, others_decode=True)
        if not found.pays:
            self._give_up(
                f"training a head does not pay: decoding the rest takes {duration(found.without_s)} without one, "
                f"{duration(found.with_s)} with it"
            )
        return found.pays

    def _measured(self) -> float | None:
        """Drafts that a round accepts with the drafter before the head; None: too few rounds were measured."""
        return self._part.before.mean_accepted if self._part.before.row_rounds >= MEASURED_ROUNDS else None

    def _demand(self) -> Demand:
        """What is left of the job: the bar's total counts what was done when this run began."""
        demand = self._survey.demand(self.job.source.num_rows, self.job.admission.max_len, self.job.admission.task)
        left = self._progress.total - self._progress.done - (self._runs.finished_by_others() - self._by_others)
        return replace(demand, num_completions=max(1, left))

    def _prospect(
        self, before: float | None, accepted: float | None = None, *, cost_s: float, others_decode: bool = False
    ) -> Prospect:
        others = self._runs.others(time.time())
        return prospect(
            self._plain, self._batches, self._demand(), self._rates, before=before, accepted=accepted, cost_s=cost_s,
            runs=1 + len(others), others_decode=others_decode,
        )

    def _judge(self, record: HeadRecord, *, cost_s: float) -> bool:
        """Draft with the head of this record from now on, if it pays. Returns whether it does.

        cost_s  seconds until it drafts
        """
        path = self._stored.path / record.head
        if record.failed:
            self._give_up(f"training a head failed: {record.failed}; delete {self._stored.path} to try again")
            return False
        before = self._measured()
        if before is None and record.drafter == self._plain.config.draft.name:
            before = record.before
        self._before = before
        try:
            found = self._prospect(before, accepted_by_rounds(self._plain, record.accepted, record.draft_len), cost_s=cost_s)
            job = with_own_head(self._plain, str(path))
        except (ConfigError, CheckpointError) as error:
            self._give_up(f"the head in {path} cannot be used: {error}")
            return False
        if not found.pays:
            self._give_up(
                f"the head in {path} does not pay: {found.accepted:.2f} drafts accepted a round, {found.before:.2f} without it; "
                f"decoding the rest takes {duration(found.with_s)} with it, {duration(found.without_s)} without"
            )
            return False
        self._is_open, self._rows, self.job = False, [], job
        self._progress.phase(
            f"draft=trained: going on with the head in {path}, which accepted {record.accepted:.2f} of {record.draft_len} drafts "
            "of answers that were held out"
        )
        return True

    def _give_up(self, why: str) -> None:
        self._is_open, self._rows, self.job = False, [], self._plain
        self._progress.phase(f"draft=trained: {why}; the job goes on with draft={self._plain.config.draft.name}")

    def run(self, engines: EngineWithFallback, asked: Callable[[], str | None]) -> None:
        self.due, began = False, time.monotonic()
        engines.unload()
        try:
            if CLAIM in self._claims.own:
                self._train(asked)
        except TakenOver:
            self._is_open = True
        except TrainingStopped as error:
            self._give_up(f"the training was stopped, and the next run of the job goes on with it: {error}")
        except StorageError as error:
            self._give_up(f"its store cannot be used: {error}")
        engines.change(self.as_now)
        self._part.idle_s += time.monotonic() - began
        self._set_phase()

    def as_now(self, job: Job) -> Job:
        config = replace(job.config, draft=self.job.config.draft)
        return replace(job, config=config, drafter=self.job.drafter, why_drafter=self.job.why_drafter)

    def without(self, job: Job, why: str) -> Job | None:
        if not self.uses_head:
            return None
        self._give_up(f"its head cannot be used: {why}")
        self._set_phase()
        return self.as_now(job)

    def _train(self, asked: Callable[[], str | None]) -> None:
        """Train, and judge the head. Raises Interrupted after a signal."""
        stored, began, path = self._stored, time.monotonic(), self._plain.config.model.path
        assert path is not None

        def poll() -> str | None:
            with suppress(StorageError):  # of one renewal; the next one may succeed
                self._claims.renew()
            if CLAIM not in self._claims.own:
                raise TakenOver
            return asked()

        drop_abandoned(stored.path, self._runs.attempt)
        try:
            if not stored.has_rows(self._fingerprint):
                if not self._has_enough:
                    raise TakenOver  # the file was deleted since the last look: gather on
                stored.put_rows(self._rows, self._fingerprint, self._plain.config.draft.name, self._measured())
            gathered = stored.gathered()
            keys = settings(self._plain, gathered.rows, gathered.longest)
            head = folder_of(keys, gathered.digest)
            record = HeadRecord(
                head=head, drafter=gathered.drafter, before=gathered.before, tokens=gathered.tokens, seconds=0.0
            )
            self._progress.phase(
                f"draft=trained: training a head on {gathered.tokens:,} tokens of answers for at most {self._own.minutes:g} "
                f"minutes; {stored.path / LOG} has what it prints"
            )
            try:
                process.train(
                    keys, path, stored, head, minutes=self._own.minutes, say=self._progress.phase, poll=poll
                )
                if (found := stored.trained(head)) is None:
                    raise TrainingFailed(f"{stored.path / head} does not tell how many drafts are accepted")
                record = replace(record, accepted=found[0], draft_len=found[1])
            except TrainingFailed as error:
                record = replace(record, failed=str(error))
            stored.put_record(replace(record, seconds=round(time.monotonic() - began, 1)))
            stored.drop_rest(record)
        finally:
            with suppress(StorageError):  # of another error that is the one to report; the claim becomes stale by itself
                self._claims.release()
        self._judge(record, cost_s=0.0)

    def facts(self) -> dict[str, Any]:
        return self._part.facts()

    def line(self) -> str:
        return self._part.line()


def interlude_of(job: Job, survey: Survey, progress: ProgressBar, saved: Journaled, runs: HeartbeatFiles) -> Interlude:
    """What a run does between its passes. Raises as `OwnHead`."""
    return Interlude() if job.config.draft.train.kind is None else OwnHead(job, survey, progress, saved, runs)
