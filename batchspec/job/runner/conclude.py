"""What follows the last row of a job: its card, its report, the push to a hub, and the lines that tell what is in it."""

from __future__ import annotations

import json
import shlex
from functools import partial
from glob import has_magic
from pathlib import Path

from batchspec.config.schema import OutputConfig
from batchspec.console import terminal
from batchspec.console.text import counted, for_shell
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage.hub_push import Pushed
from batchspec.errors import Interrupted, StorageError
from batchspec.job.prepare import Job
from batchspec.job.report.answers import NO_TOKEN_IDS, write_answers
from batchspec.job.report.card import dataset_card
from batchspec.job.report.error_rows import first_errors
from batchspec.job.report.page import NEEDS_EXTRA, can_draw, write_report
from batchspec.job.report.push import push_command, push_output
from batchspec.job.report.stats import JobStats, job_stats
from batchspec.job.runner.job_run import check_errors
from batchspec.job.thumbnails import thumbnails_of
from batchspec.process.signals import EndSignals


def conclude(job: Job, output: OutputFolder, signals: EndSignals, *, again: bool) -> None:
    """Write the card and the report of a complete job (see `finish`), push it, and tell what is in it.

    A signal ends this at once: the rows are committed, and the same command goes on with the rest. A retry is marked as concluded
    at the end: until then the same command begins no other one.
    Raises Interrupted after a signal if the job is not pushed that is to be pushed; TooManyErrors; and as `push_output`.
    """
    stats, repo, answers = None, job.config.output.push_to_hub, job.config.output.openai
    try:
        signals.interrupt()
        stats = job_stats(output.path)
        finish(job, output, stats, again=again)
        write_answers_of(job, output, again=again or not output.is_concluded())
        answers = None
        if repo is not None:
            terminal.say(_pushed(output, repo, job.config.output).line())
        output.mark_concluded()
    except KeyboardInterrupt:
        signals.ignore()
        left = [*unwritten(output, answers), *([] if repo is None else [f"the dataset {repo} of the hub"])]
        rest = f"; run the same command again for {' and '.join(left)}" if left else ""
        line = f"{output.path}: {signals.name or 'SIGINT'}: all rows are committed{rest}"
        if repo is not None:
            raise Interrupted(line) from None
        terminal.say(line)
        if stats is not None:
            check_all_errors(job, output, stats)
        return
    errors = stats.by_status.get("error", 0)
    if errors:
        codes = ", ".join(f"{count} {code}" for code, count in stats.by_error.items())
        terminal.say(f"{output.path}: {counted(errors, 'error row')} ({codes}); the column `error` says why")
    if skipped := stats.by_status.get("skipped", 0):
        terminal.say(f"{output.path}: {counted(skipped, 'skipped row')}, whose prompts are too long (input.on_overlong=skip)")
    if invalid := stats.by_status.get("invalid", 0):
        terminal.say(f"{output.path}: {counted(invalid, 'invalid completion')}; the column `error` says what violates the schema")
    if truncated := stats.by_status.get("truncated", 0):
        advice = "; resume=length and a larger decode.max_new_tokens continue those that it cut off"
        cut = stats.by_finish_reason.get("length", 0)
        terminal.say(f"{output.path}: {counted(truncated, 'truncated completion')}{advice if cut else ''}")
    check_all_errors(job, output, stats)
    terminal.say(f"inspect it:  batchspec stats {for_shell(output.path)}")
    exactly = ", glob=False" if has_magic(output.path) else ""
    code = f"import polars; print(polars.read_parquet({json.dumps(f'{output.path}/data')}{exactly}))"
    terminal.say(f"             python -c {shlex.quote(code)}")


def _pushed(output: OutputFolder, repo: str, keys: OutputConfig) -> Pushed:
    try:
        return push_output(output, repo, private=keys.push_private, overwrite=keys.push_overwrite)
    except StorageError as error:
        alone = push_command("OUTPUT_DIR", repo, *["--overwrite"] * keys.push_overwrite, private=keys.push_private)
        raise StorageError(f"all rows are committed but not pushed: {error}, or: {alone}") from error


def check_all_errors(job: Job, output: OutputFolder, stats: JobStats) -> None:
    """Raises TooManyErrors for a complete job with too many error rows. stats: of its rows."""
    failed = None
    if 0 < stats.completions == stats.by_status.get("error", 0):
        _, failed = min((rows[0].row_index, rows[0].message) for rows in first_errors(output).values())
    check_errors(job, stats.error_rows, failed=failed)


def finish(job: Job, output: OutputFolder, stats: JobStats, *, again: bool) -> None:
    """Write the card and the report of a complete job if they are missing, or if `again`. stats: of its rows."""
    output.tidy()  # also if this run wrote nothing: the run that committed the last shard may have died before this
    if again or not output.has_card():
        output.finish(dataset_card(output.manifest, stats))
        if not can_draw():
            terminal.say(NEEDS_EXTRA.format(out=for_shell(output.path)))
    if can_draw() and not output.has_report():
        write_report(output, partial(thumbnails_of, output, job=job), stats)
        terminal.say(f"{output.path}/report.html: the job in pictures")


def write_answers_of(job: Job, output: OutputFolder, *, again: bool) -> None:
    """Write the file of output.openai, if there is to be one and it is missing, or if `again`."""
    name = job.config.output.openai
    if name is None or (Path(name).exists() and not again):
        return
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    has_logprobs = job.config.output.logprobs is not None and job.tokenizer is not None
    if has_logprobs and not job.config.output.token_ids:
        terminal.say(f"{name}: logprobs are left out: {NO_TOKEN_IDS}")
    count = write_answers(output, Path(name), token_text=job.admission.token_texts if has_logprobs else None)
    terminal.say(f"{name}: {counted(count, 'answer')} as OpenAI's response lines")


def unwritten(output: OutputFolder, answers: str | None = None) -> list[str]:
    """Files about the job that `finish` would write, and the file of output.openai. Those of the rows before a retry or an
    extension count as unwritten.
    """
    card = output.has_card()
    there = {"README.md": card, "report.html": (card and output.has_report()) or not can_draw()}
    there |= {} if answers is None else {answers: Path(answers).exists() and output.is_concluded()}
    return [name for name, written in there.items() if not written]
