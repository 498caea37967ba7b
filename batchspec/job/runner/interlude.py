"""What a run does between two passes over its shards, with no engine in memory. Most runs do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchspec.engine.loop.totals import EngineTotals
from batchspec.job.prepare import Job
from batchspec.job.runner.oom_fallback import EngineWithFallback
from batchspec.records import Completion


class Interlude:
    """Nothing. A subclass becomes `due` after a round."""

    due = False
    """Whether the present pass ends for it at the engine's next step: finished rows and the tokens of unfinished ones are saved,
    and the claims of the run released."""
    idle_s = 0.0
    """Seconds that it has taken, in which nothing was decoded."""

    def as_now(self, job: Job) -> Job:
        """The job with the drafter that it has now."""
        return job

    def without(self, job: Job, why: str) -> Job | None:
        """The job without its head, which cannot be used; None: it has none that it can do without."""
        return None

    def finished(self, completion: Completion) -> None:
        """A row has finished in the engine."""

    def after_round(self, totals: EngineTotals, has_time: Callable[[float], bool]) -> None:
        """A round has ended; `totals` of the run. has_time: whether the batch system leaves the run so many seconds."""

    def run(self, engines: EngineWithFallback, asked: Callable[[], str | None]) -> None:
        """Do it, and leave an engine in memory. Called if it is due.

        asked  the name of the signal that asks the run to end, or of its time limit; None: nothing does
        Raises Interrupted after a signal, and what loading an engine raises.
        """

    def facts(self) -> dict[str, Any]:
        """What the run's log says of it."""
        return {}

    def line(self) -> str:
        """What the run says of it at its end; empty: nothing."""
        return ""
