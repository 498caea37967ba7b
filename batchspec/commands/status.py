"""`batchspec status OUT`: progress of a job over all its runs. Reads progress files, claims and shard names, but no rows."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.console.text import MESSAGE_CHARS, counted, for_shell, one_line
from batchspec.data.runstate.heartbeats import BEAT_S
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import OutputError
from batchspec.job.report.status import JobStatus, RunStatus, StatusReader

MAX_LIVING = 40
MAX_ENDED = 8
WATCH_S = 10.0
NOT_BEGUN = "{out}: no job there; a run makes its output folder after its checks: wait for that, or correct the path"
HEADER = ("run", "state", "shards", "claims", "completions", "tok/s", "acceptance", "rows", "heartbeat")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the status; with --watch until the job is complete. Raises StorageError, and OutputError if there is no job; with
    --watch the folder may be missing, because a run may be about to create it.
    """
    parser = ArgumentParser(prog="batchspec status", description="How far a job is, over all of its runs.")
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    parser.add_argument("--watch", metavar="SECONDS", type=float, nargs="?", const=WATCH_S, help="repeat until it is complete")
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch one line each time")
    args = parser.parse_args(argv)
    if args.watch is not None and not args.watch >= 1:
        parser.error(f"--watch {args.watch:g}: must be at least 1 second")
    if Path(args.out).is_file():
        raise OutputError(f"{args.out} is a file; give the output.dir of a run")
    reader = StatusReader(OutputFolder(args.out))
    screen = args.watch is not None and not args.json and sys.stdout.isatty()
    try:
        while True:
            status = reader.read()
            if args.watch is None and status.state == "not begun" and not status.runs:
                raise OutputError(NOT_BEGUN.format(out=status.path))
            if screen:
                terminal.clear_screen()
            if args.json:
                terminal.show_json(status.to_dict(), indent=None if args.watch else 1)
            else:
                terminal.show(render(status))
            if args.watch is None or status.state == "complete":
                return 0
            time.sleep(args.watch)
    except KeyboardInterrupt:
        return 0


def render(status: JobStatus) -> str:
    """The status as plain text."""
    if status.state == "not begun" and not status.runs:
        return NOT_BEGUN.format(out=one_line(status.path))
    lines = [f"{one_line(status.path)}: {status.state}", *_facts(status)]
    living = [each for each in status.runs if each.lives]
    ended = [each for each in status.runs if not each.lives]
    if living:
        lines += ["", *terminal.table([HEADER, *map(_line, living[:MAX_LIVING])], left=2)]
        if len(living) > MAX_LIVING:
            lines.append(f"... and {len(living) - MAX_LIVING} more runs (--json shows all)")
    if ended:
        counts = ", ".join(f"{count} {state}" for state, count in Counter(each.state for each in ended).most_common())
        lines += ["", f"ended: {counts}", *map(_end, ended[:MAX_ENDED])]
        if len(ended) > MAX_ENDED:
            lines.append(f"  ... and {len(ended) - MAX_ENDED} earlier ones (--json shows all)")
    return "\n".join(lines)


def _facts(status: JobStatus) -> Iterator[str]:
    living = [each for each in status.runs if each.lives]
    if status.shards_total:
        rows = f"{status.rows:,} of {status.rows_total:,} rows"
        yield f"  {status.share:.1%} done, {status.shards:,} of {status.shards_total:,} shards committed ({rows})"
    for each in living:
        if each.state == "loading":
            since = f"since {_time(each.run.began_at)} ({_ago(each.old_s)})"
            yield f"  loading: {one_line(each.run.name)}, {since}; it has no batch yet"
    length = status.mean_acceptance_length
    if status.state == "running":
        left = "unknown" if status.left_s is None else tqdm.format_interval(status.left_s)
        if status.left_s is not None and status.left_s < BEAT_S:  # the runs' reports may be as old as that
            left = f"under {BEAT_S:.0f} s"
        yield f"  {status.tok_s:,.0f} tok/s in the last minute by {counted(len(living), 'run')}, time left {left}"
    if status.shards_total:
        yield f"  {status.tokens:,} tokens" + ("" if length is None else f", mean acceptance length {length:.2f}")
    if status.errors:
        yield f"  {counted(status.errors, 'error row')}; batchspec stats {one_line(for_shell(status.path))} counts them by code"
    if status.skipped:
        yield f"  {counted(status.skipped, 'skipped row')} (input.on_overlong=skip)"
    slow = [each for each in living if each.straggler]
    if slow:
        yield f"  stragglers, less than half the speed of the others: {', '.join(one_line(each.run.name) for each in slow)}"
    for each in living:
        if each.state == "stuck":
            yield f"  stuck: {one_line(each.run.name)} has had no result for {_ago(each.run.quiet_s)}; check its log"
    if status.stale_claims:
        shards = ", ".join(map(str, list(status.stale_claims)[:10])) + (", ..." if len(status.stale_claims) > 10 else "")
        todo = "another run will take them over" if living else "the next run will take them over"
        yield f"  stale claims of runs that have ended, on shards {shards}: {todo}"
    if status.unreadable:
        yield f"  {counted(status.unreadable, 'progress file')} not readable, ignored"
    for each in status.runs:
        if each.state == "requeued":
            yield f"  requeued: {one_line(each.run.name)}, {_ago(each.age_s)} ago; the batch system starts it again"
    if status.state in ("stopped", "not begun"):
        yield "  no run is working on it; run the same command again to continue"


def _line(each: RunStatus) -> tuple[str, ...]:
    run = each.run
    length = f"{1 + run.accepted / run.rounds:.2f}" if run.rounds else "-"
    state = "straggler" if each.straggler else each.state
    rows = f"{run.live_rows} of {run.slots}" if run.slots else "-"
    counts = (f"{run.shards:,}", f"{len(each.shards):,}", f"{run.completions:,}", f"{run.tok_s:,.0f}")
    return (run.name, state, *counts, length, rows, f"{_ago(each.age_s)} ago")


def _end(each: RunStatus) -> str:
    run = each.run
    reason = {
        "gone": "killed or crashed: its process has ended",
        "silent": "no heartbeat: killed, crashed, or disconnected",
    }.get(each.state, run.said)
    made = f"{counted(run.shards, 'shard')}, {counted(run.completions, 'completion')}"
    line = f"  {one_line(each.run.name)}  {each.state} {_ago(each.age_s)} ago, {made}"
    return line + (f": {one_line(' '.join(reason.split()), MESSAGE_CHARS)}" if reason else "")


def _time(seconds: float) -> str:
    """A time since 1970 by this machine's clock and time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else tqdm.format_interval(seconds)
