"""`LoadedEngine`: an engine in memory, and the one way from requests to completions.

Whatever decodes rows does it by this object: a run of a job, `batchspec.generate`, a warm engine and the leader of its ranks,
`batchspec verify`, `bench` and `probe`. The last two choose drafter and batch themselves, and hold an engine that
`build.build_engine` made of these, as `load` does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Generic, Protocol, TypeVar

from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.job.load.build import build_beside, load_engine
from batchspec.job.prepare import Job
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.packing.planner import Demand
from batchspec.packing.survey import Survey
from batchspec.records import Completion, Request
from batchspec.request_stream import RequestStream, stream_of
from batchspec.tasks.base import Runs

OnRound = Callable[[EngineTotals], None]
"""Called with the engine's running totals after each result that was read."""


class Decoder(Runs, Protocol):
    """An engine, in this process or of several ranks (`warm/ranks.py`)."""

    batch: PackedBatch
    totals: EngineTotals
    on_round: OnRound | None


E_co = TypeVar("E_co", bound=Decoder, covariant=True)


class LoadedEngine(Generic[E_co]):
    """An engine in memory, and the job that it was loaded for."""

    def __init__(self, engine: E_co, job: Job | None = None) -> None:
        """
        job  of a warm engine the one without rows: each call is a job of its own. None: no job has admitted the rows (bench),
             or that of another process has, which does the rest (the leader of ranks)
        """
        self.engine, self._job = engine, job

    @staticmethod
    def load(job: Job, survey: Survey, progress: ProgressBar) -> LoadedEngine[Engine]:
        """Load the engine of a surveyed job, see `load_engine`. It does not decode texts: what makes the tables does that."""
        demand = survey.demand(job.source.num_rows, job.admission.max_len, job.admission.task)
        engine = load_engine(job, demand, progress, survey, defers_text=True, most_rounds=most_last_rounds(job))
        return LoadedEngine(engine, job)

    @staticmethod
    def load_warm(job: Job, demand: Demand, *, target: Target | None = None) -> LoadedEngine[Engine]:
        """Load an engine that stays for one call after another: prefixes are found by later calls, and completions have texts.

        job     without rows
        target  of another engine, whose weights a job without drafts reads too; None: they are loaded
        """
        survey, progress = Survey(shares_prefix=job.config.decode.n > 1), ProgressBar(0)
        if target is None:
            engine = load_engine(job, demand, progress, survey)
        else:
            engine = build_beside(job, target, demand, progress, survey)
        engine.keeps_prefixes = True
        return LoadedEngine(engine, job)

    @property
    def job(self) -> Job:
        assert self._job is not None
        return self._job

    @property
    def batch(self) -> PackedBatch:
        """The static batch: slots, pages, the longest row."""
        return self.engine.batch

    @property
    def totals(self) -> EngineTotals:
        """Rounds and tokens of all runs, added up while they last."""
        return self.engine.totals

    def run(self, requests: RequestStream | Iterable[Request], on_round: OnRound | None = None) -> Generator[Completion]:
        """The completions of `steps`, in the order in which rows end."""
        with closing(self.steps(requests, on_round)) as steps:
            for step in steps:
                yield from step

    def steps(
        self, requests: RequestStream | Iterable[Request], on_round: OnRound | None = None
    ) -> Generator[list[Completion]]:
        """Compute requests as the job's task says; yields the completions of each step, often none: see `Runs.steps`.

        The job learns from each how long outputs are, and predicts those of later rows by it.

        on_round  called while this run lasts
        """
        admission = None if self._job is None else self._job.admission
        stream = stream_of(requests)
        running = self.engine.steps(stream) if admission is None else admission.task.steps(self.engine, stream)
        with self._reports_to(on_round), closing(running) as steps:
            for step in steps:
                if admission is not None:
                    for completion in step:
                        admission.observe(completion)
                yield step

    @contextmanager
    def _reports_to(self, on_round: OnRound | None) -> Iterator[None]:
        self.engine.on_round = on_round
        try:
            yield
        finally:
            self.engine.on_round = None  # it may know this engine: the last reference would not free it


def most_last_rounds(job: Job) -> int | None:
    """Upper bound of the number of rounds after the job's last row has begun (a round emits at least one token of a row); None:
    unknown.

    It is unknown if rows have their own limits, or may wait for their automata while few others decode.
    """
    unknown = job.columns.get("max_new_tokens") is not None or job.admission.constraints is not None
    return None if unknown else job.admission.task.output_limit(job.config.decode)
