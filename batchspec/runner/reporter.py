"""What a run tells while it goes on: to the progress bar, the time line, the claims, the watchdog and the deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from batchspec.dataset.reader import InputShard
from batchspec.engine.output_processor import EngineTotals
from batchspec.packing.feed import Feed
from batchspec.records import Completion, Request
from batchspec.report.progress import Progress
from batchspec.report.timeline import Timeline
from batchspec.runstate.claims import Claims
from batchspec.supervise.deadline import Deadline


class Reporter:
    """Hands the engine's running totals to the time line, and to the progress bar as what happened since the last call.

    The tokens still to come are the rows still to come at their mean output: at first the predicted one, which weighs as
    much as 8 finished rows.
    """

    def __init__(
        self,
        progress: Progress,
        predicted_output: float,
        totals: EngineTotals,
        timeline: Timeline | None = None,
        claims: Claims | None = None,
        beat: Callable[[], None] = lambda: None,
        deadline: Deadline | None = None,
    ) -> None:
        """`totals` are the engine's so far; `beat` is called whenever the run goes on; `deadline` is asked before every row."""
        self.deadline = deadline or Deadline(lambda: None, 0.0, keeps_tokens=True)
        self._progress, self._timeline, self._begun = progress, timeline, totals.tokens
        self._before = totals.tokens, totals.accepted, totals.row_rounds
        self._claims, self._beat = claims, beat
        self._rows, self._tokens, self._finished = 8, 8 * predicted_output, 0
        self._feed: Feed | None = None
        self.exhausted = False

    def watch(self, feed: Feed) -> Iterator[Request]:
        """The feed's requests; `exhausted` once there are no more."""
        self._feed = feed
        for request in self.deadline.requests(feed.requests()):
            self._beat()
            yield request
        self.exhausted = True

    def admitted(self, done: tuple[InputShard, list[Completion]]) -> tuple[InputShard, list[Completion]]:
        """The same shard; its bad rows, which no engine saw, are done."""
        bad = sum(completion.stats is None for completion in done[1])
        self._progress.update(completions=bad, open_shards=self._open_shards)
        return done

    @property
    def _open_shards(self) -> list[tuple[int, int]]:
        return self._feed.open_shards if self._feed is not None else []

    def finished(self, completion: Completion) -> None:
        count = 0 if completion.token_ids is None else len(completion.token_ids)
        self._rows, self._tokens, self._finished = self._rows + 1, self._tokens + count, self._finished + count
        self._progress.update(completions=1)
        self.deadline.observe(completion)

    def __call__(self, totals: EngineTotals) -> None:
        tokens, accepted, row_rounds = self._before
        self._progress.update(
            tokens=totals.tokens - tokens,
            accepted=totals.accepted - accepted,
            rounds=totals.row_rounds - row_rounds,
            live_rows=totals.live_rows,
            open_shards=self._open_shards,
            mean_output=self._tokens / self._rows,
            in_flight_tokens=max(0, totals.tokens - self._begun - self._finished),
        )
        self._beat()
        self.deadline.check()
        if self._claims is not None:
            self._claims.beat()
        if self._timeline is not None:
            self._timeline.observe(totals, exhausted=self.exhausted)
        self._before = totals.tokens, totals.accepted, totals.row_rounds
