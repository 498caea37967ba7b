"""`LoadedEngine`: the one way from the requests of a job's rows to their completions.

A run of a job, `batchspec.generate`, each call of a warm engine and `batchspec verify` decode rows by it. What only measures an
engine (bench/, heads/probe.py) chooses drafter and batch itself: it builds an engine of these parts by `build.build_engine`, and
calls `Engine.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from batchspec.engine.features.choices import Runs, run_with_choices
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.load.build import load_engine
from batchspec.packed_batch import PackedBatch
from batchspec.packing.survey import Survey
from batchspec.prepare import Job
from batchspec.records import Completion, Request
from batchspec.report.progress_bar import ProgressBar
from batchspec.request_stream import RequestStream, stream_of

OnRound = Callable[[EngineTotals], None]
"""Called with the engine's running totals after each result that was read."""


class Decoder(Runs, Protocol):
    """An engine, in this process or of several ranks (`warm/ranks.py`)."""

    batch: PackedBatch
    on_round: OnRound | None


E = TypeVar("E", bound=Decoder)


@dataclass(frozen=True, slots=True)
class LoadedEngine(Generic[E]):
    """A job, and an engine in memory for its rows. Each call of a warm engine is a job of its own."""

    job: Job
    engine: E

    @staticmethod
    def load(job: Job, survey: Survey, progress: ProgressBar) -> LoadedEngine[Engine]:
        """Load the engine of a surveyed job, see `load_engine`. It does not decode texts: what makes the tables does that."""
        demand = survey.demand(job.source.num_rows, job.admission.max_len)
        engine = load_engine(job, demand, progress, survey, defers_text=True, most_rounds=most_last_rounds(job))
        return LoadedEngine(job, engine)

    def run(self, requests: RequestStream | Iterable[Request], on_round: OnRound | None = None) -> Generator[Completion]:
        """Decode requests of the job's rows, and score their choices; completions come in the order in which rows end.

        The job learns from each how long outputs are, and predicts those of later rows by it.

        on_round  called while this run lasts
        """
        admission = self.job.admission
        stream = stream_of(requests)
        running = self.engine.run(stream) if admission.choices is None else run_with_choices(self.engine, stream)
        self.engine.on_round = on_round
        try:
            with closing(running) as completions:
                for completion in completions:
                    admission.observe(completion)
                    yield completion
        finally:
            self.engine.on_round = None  # it may know this engine: the last reference would not free it


def most_last_rounds(job: Job) -> int | None:
    """Upper bound of the number of rounds after the job's last row has begun (a round emits at least one token of a row); None:
    unknown.

    It is unknown if rows have their own limits, or may wait for their automata while few others decode.
    """
    unknown = job.columns.get("max_new_tokens") is not None or job.admission.constraints is not None
    return None if unknown else job.config.decode.output_limit
