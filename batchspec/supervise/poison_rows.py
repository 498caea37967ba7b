"""Shards that a run died with: computed apart from all others, so that a row that kills its process is found and costs itself.

A death is not told from a kill by what is left, so every row in flight is suspect. Of a shard that a run died with, rows are
computed in groups of a batch, each recorded before it is admitted. Who dies with a group leaves its rows struck; a struck row is
tried: computed alone, with its tokens kept as it goes. One that resume.row_attempts runs died with so, none of them further than
another, becomes an error row. A row that was only near comes through alone and is done: no death of another row makes an error of
it.

Nor should kills from outside: between them a row gets further each time, unless they come while one and the same place of it is
computed. So a run stands still for STILL_S before it tries a row again that one died with alone. Kills at random moments, or at a
set time after the start, come then rather than in the short trial, and each takes a death off the row. The limit of what can be
known: runs that are killed in the trial itself, so many times, leave the same behind as a row that kills.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

from batchspec.dataset.columns import request_ids
from batchspec.dataset.reader import InputShard, locate
from batchspec.engine.engine import Engine
from batchspec.engine.output_processor import EngineTotals
from batchspec.errors import BatchspecError, StorageError
from batchspec.packing.work_plan import DecodedShard, WorkPlan
from batchspec.prepare import Job
from batchspec.records import Completion, Request, RowError
from batchspec.runstate.attempts import Attempts
from batchspec.runstate.claims import Claims
from batchspec.runstate.journal import Journal, Journaled

STILL_S = 10.0
"""Much longer than most rows take from one place to the next, and short beside what it takes to start a run anew."""
LOOK_S = 0.1


@contextmanager
def leaving(claims: Claims, attempts: Attempts) -> Iterator[None]:
    """However the run ends, its claims are free at once; where it crashes, the shards that it held are suspect too."""
    try:
        yield
    except (BatchspecError, KeyboardInterrupt):
        with suppress(StorageError):  # the first error is the one to tell
            attempts.clear()
            claims.release()
        raise
    except Exception:
        with suppress(StorageError):
            for shard in claims.own:
                attempts.suspect(shard, claims.attempt)
            claims.release()
        raise
    attempts.clear()
    claims.release()


def taken(
    shards: Iterator[InputShard], claims: Claims, attempts: Attempts, journal: Journal, journaled: Journaled,
    is_done: Callable[[int], bool] = lambda shard: False,
) -> Iterator[tuple[InputShard, bool]]:  # fmt: skip
    """The shards that are this run's now, with what others journaled of them, and whether their last owner died with them.

    is_done  whether another run has committed the shard since the pass began: its claim may be deleted then, and free
    """
    for shard in shards:
        if is_done(shard.index) or not claims.take(shard.index):
            continue
        died = claims.died.pop(shard.index, None)
        if died is not None:
            attempts.suspect(shard.index, died)
        if claims.inherited:
            claims.inherited = False
            journal.refresh(journaled)
        yield shard, died is not None


def decode_suspects(
    job: Job,
    plan: WorkPlan,
    engine: Engine,
    shards: Iterator[InputShard],
    attempts: Attempts,
    journal: Journal,
    journaled: Journaled,
    *,
    finished: Callable[[Completion], None],
) -> Iterator[DecodedShard]:
    """Each shard, as `decode_shards` gives them; nothing more once the engine is asked to stop."""
    for shard in shards:
        strikes = attempts.strikes(shard.index)
        crashed = {row: alone for row, alone in strikes.items() if alone >= job.config.resume.row_attempts}
        done = [error for row, alone in crashed.items() for error in _crashed(job, plan, shard, row, alone, journaled)]
        num_carried = 0
        for group, trial in _groups(shard, strikes, crashed, engine.batch.num_slots):
            if engine.stopping:
                return
            if trial:
                if strikes[group[0]]:
                    attempts.stand_still(shard.index, group[0])
                    _stand_still(engine)
                attempts.enter_trial(shard.index, group[0])
            else:
                attempts.enter(shard.index, group)
            entries = [entry for row in group for entry in _planned(plan, shard, row, journaled)]
            num_carried += entries.count(None)
            requests = [entry for entry in entries if isinstance(entry, Request)]
            done += [entry for entry in entries if isinstance(entry, Completion)]
            with (
                _followed(engine, [entry for entry in entries if entry is not None], attempts, journal)
                if trial
                else nullcontext()
            ):
                for completion in engine.run(iter(requests)):
                    job.admission.observe(completion)
                    finished(completion)
                    journal.add(completion)
                    done.append(completion)
                    if trial:  # a sample that is done need not be done again when the next one kills
                        journal.flush()
            journal.flush()
        if engine.stopping:
            return
        attempts.clear()
        yield DecodedShard(shard=shard, completions=done, num_carried=num_carried)


def _groups(
    shard: InputShard, strikes: Mapping[int, int], crashed: Container[int], slots: int
) -> Iterator[tuple[Sequence[int], bool]]:
    """Rows that nobody died with, a batch at a time; then the others, each a trial, those first that died least often in one."""
    rows = range(shard.first_row, shard.first_row + shard.table.num_rows)
    calm = (row for row in rows if row not in strikes)
    while group := list(itertools.islice(calm, slots)):
        yield group, False
    for row in sorted((row for row in rows if row in strikes and row not in crashed), key=lambda row: (strikes[row], row)):
        yield [row], True


def _stand_still(engine: Engine) -> None:
    """STILL_S seconds, or less where the engine is asked to stop."""
    until = time.monotonic() + STILL_S
    while not engine.stopping and (left_s := until - time.monotonic()) > 0:
        if engine.on_round is not None:
            engine.on_round(engine.totals)  # the run lives: its watchdog, its claims and its deadline must know
        time.sleep(min(LOOK_S, left_s))


@contextmanager
def _followed(engine: Engine, entries: Sequence[Request | Completion], attempts: Attempts, journal: Journal) -> Iterator[None]:
    """Within, the tokens of the row that is tried, all its samples together, are kept at every place that it reaches."""
    before, begun = engine.on_round, engine.totals.tokens
    earlier = sum(map(_num_tokens, entries))
    place = _place(earlier)

    def follow(totals: EngineTotals) -> None:
        nonlocal place
        if before is not None:
            before(totals)
        now = _place(earlier + totals.tokens - begun)
        if now > place:
            place = now
            journal.flush(engine.unfinished())
            attempts.reached(place)

    if place:
        attempts.reached(place)
    engine.on_round = follow
    try:
        yield
    finally:
        engine.on_round = before


def _num_tokens(entry: Request | Completion) -> int:
    """Output tokens that earlier runs made."""
    if isinstance(entry, Request):
        return 0 if entry.resumed is None else len(entry.resumed.tokens)
    return 0 if entry.token_ids is None else len(entry.token_ids)


def _place(tokens: int) -> int:
    """The last of the places 0, 1 ... 32, then each a 16th further, that so many tokens have reached.

    The same in every run: wherever a row kills its process, it is found at one place each time.
    """
    place = 0
    while (after := place + max(1, place // 16)) <= tokens:
        place = after
    return place


def _one(shard: InputShard, row: int) -> InputShard:
    bad = {row: shard.bad[row]} if row in shard.bad else {}
    return InputShard(index=shard.index, first_row=row, table=shard.table.slice(row - shard.first_row, 1), bad=bad)


def _planned(plan: WorkPlan, shard: InputShard, row: int, journaled: Journaled) -> Iterator[Request | Completion | None]:
    """As `WorkPlan.rows` for one row, with what earlier runs did of it."""
    for entry in plan.rows(_one(shard, row)):
        yield None if entry is None else journaled.known(entry)


def _crashed(job: Job, plan: WorkPlan, shard: InputShard, row: int, alone: int, journaled: Journaled) -> Iterator[Completion]:
    """One error row; where some of its samples are journaled, those and an error for each of the others.

    None in a retry: the row stays as it was.
    """
    if plan.carries_over(shard.index):
        return
    file, place = locate(job.source.files, row)
    (request_id,) = request_ids(job.source, job.columns, _one(shard, row))
    message = (
        f"{file} row {place} (id {request_id!r}): {alone} runs died or hung at the same place of this row, computed alone; "
        "look at what they said last, and drop the row, or compute it again with resume=error if they were killed from outside"
    )
    samples = [0]
    if any(key[0] == row for key in journaled.completions):  # to admit it does not kill
        entries = list(_planned(plan, shard, row, journaled))
        yield from (entry for entry in entries if isinstance(entry, Completion))
        samples = [entry.sample_index for entry in entries if isinstance(entry, Request)]
    for sample in samples:
        yield Completion(
            request_id=request_id, row_index=row, sample_index=sample, shard=shard.index, status="error", finish_reason="error",
            error=RowError(code="crash", stage="decode", message=message, retryable=True),
        )  # fmt: skip
