"""What a run reports after each round: to the progress bar, the timeline, its claims, the watchdog and the deadline."""

from __future__ import annotations

from collections.abc import Callable

from batchspec.data.runstate.claims import Claims
from batchspec.engine.loop.totals import EngineTotals
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.report.start_up import LAST
from batchspec.job.report.timeline import Timeline
from batchspec.job.runner.interlude import Interlude
from batchspec.job.supervise.deadline import Deadline
from batchspec.packing.feed import Feed
from batchspec.packing.work_plan import DecodedShard
from batchspec.records import Completion, Request
from batchspec.request_stream import RequestStream, WrappedStream

PRIOR_ROWS = 8
"""The predicted output length weighs as much as this many finished rows."""


class RequestsInTime(WrappedStream):
    """A `RequestStream` that leaves out requests for which the deadline leaves no time. beat: called for each answer."""

    def __init__(self, requests: RequestStream, deadline: Deadline, beat: Callable[[], None]) -> None:
        super().__init__(requests)
        self._has_time, self._beat = deadline.has_time, beat

    def next_ready(self) -> Request | None:
        request = super().next_ready()
        while request is not None and not self._has_time(request):
            request = super().next_ready()
        if request is not None or not self.ended:
            self._beat()
        return request


class RunMonitor:
    """Follows a pass of a run: its requests, its rounds, the rows and the shards that finish.

    The number of tokens still to come is the number of rows still to come times their mean output: the mean over finished rows
    and PRIOR_ROWS assumed rows of the predicted length.
    """

    def __init__(
        self,
        progress: ProgressBar,
        predicted_output: float,
        totals: EngineTotals,
        timeline: Timeline | None = None,
        claims: Claims | None = None,
        beat: Callable[[], None] = lambda: None,
        deadline: Deadline | None = None,
        interlude: Interlude | None = None,
        end_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """
        totals    the engine's totals so far
        beat      called whenever the run makes progress
        deadline  checks every row before it begins
        interlude told about rounds and rows
        end_pass  called when the interlude is due
        """
        self._interlude, self._end_pass = interlude or Interlude(), end_pass
        self.deadline = deadline or Deadline(lambda: None, 0.0, keeps_tokens=True)
        self._progress, self._timeline, self._tokens_at_start = progress, timeline, totals.tokens
        self._before = totals.tokens, totals.accepted, totals.row_rounds
        self._claims, self._beat = claims, beat
        self._rows, self._tokens, self._finished_tokens = PRIOR_ROWS, PRIOR_ROWS * predicted_output, 0
        self._num_unreported = 0
        """Rows that have finished since the last report."""
        self._feed: Feed | None = None
        self._has_looked = False
        """Whether the deadline and the claims were looked after in this step."""

    def requests_in_time(self, feed: Feed) -> RequestsInTime:
        """The feed's requests that the deadline leaves time for. From now on the feed's open shards are reported."""
        self._feed = feed
        return RequestsInTime(feed.requests, self.deadline, self._beat)

    def count_shard(self, done: DecodedShard) -> DecodedShard:
        """Count the shard's rows that the engine did not decode, bad rows and rows carried over; returns the shard."""
        no_engine = sum(completion.stats is None for completion in done.completions) + done.num_carried
        self._progress.update(completions=no_engine + self._take_finished(), open_shards=self._open_shards)
        return done

    def ended(self) -> None:
        """The engine has ended its run: report the rows that finished after its last round."""
        self._progress.update(completions=self._take_finished())

    def _take_finished(self) -> int:
        count, self._num_unreported = self._num_unreported, 0
        return count

    @property
    def _open_shards(self) -> list[tuple[int, int]]:
        return self._feed.open_shards if self._feed is not None else []

    def finished(self, completion: Completion) -> None:
        """A row has finished in the engine. It is reported with the next round, or with its shard if that is first."""
        num_tokens = 0 if completion.token_ids is None else len(completion.token_ids)
        self._rows, self._tokens = self._rows + 1, self._tokens + num_tokens
        self._finished_tokens += num_tokens
        self._num_unreported += 1
        self.deadline.observe(completion)
        self._interlude.finished(completion)

    def after_step(self) -> None:
        """The engine has ended a step. For hours it may read error rows, or end rows as they arrive, without a result."""
        if not self._has_looked:
            self._look()
        self._has_looked = False

    def _look(self) -> None:
        self._has_looked = True
        self._beat()
        self.deadline.check()
        if self._claims is not None:
            self._claims.renew()

    def after_round(self, totals: EngineTotals) -> None:
        """Report how much the engine's running totals have grown since the last round."""
        tokens, accepted, row_rounds = self._before
        if totals.tokens > tokens and not self._progress.start_up.over:
            self._progress.start_up.end(LAST)
        self._progress.update(
            completions=self._take_finished(),
            tokens=totals.tokens - tokens,
            accepted=totals.accepted - accepted,
            rounds=totals.row_rounds - row_rounds,
            live_rows=totals.live_rows,
            open_shards=self._open_shards,
            mean_output=self._tokens / self._rows,
            in_flight_tokens=max(0, totals.tokens - self._tokens_at_start - self._finished_tokens),
        )
        self._look()
        if self._timeline is not None:
            self._timeline.observe(totals, exhausted=self._feed is not None and self._feed.requests.ended)
        self._interlude.after_round(totals, self.deadline.leaves)
        if self._interlude.due:
            self._end_pass()
        self._before = totals.tokens, totals.accepted, totals.row_rounds
