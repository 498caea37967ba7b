"""`batchspec bench --job-layer DIR`: the cost of a row in a job, without its model.

A whole job runs in DIR with stand-ins for the engine and the tokenizer, which answer at once; reading, admission, packing,
timeline, claims, journal and commits are the real ones. A row has 512 prompt tokens, as a chat of about 2 KB of text, and 512
output tokens with as much text; tokens of both and messages are written.

The budget is 5 % of the time that an engine of 100,000 output tokens a second takes for a row: 256 us. It is compared with the
wall time of the run, without start-up and journal. The journal is timed separately, because a run as fast as this one writes it
less often per row than a job would.

For an engine only the part of a row's cost on the thread that launches its rounds matters. `engine_thread_us` is the CPU time of
that thread per row, without start-up and the stand-in's own: `feed_us` of it in the stream of requests, `round_us` in reports
after each round, `finish_us` for finished rows and shards. `other_threads_us` is the CPU time of the process's other threads,
which can hold Python's global lock; `workers_us` that of processes that ended meanwhile.

A pause is one call into the job's work on that thread, during which it launches nothing. `pause_999_us` is the 99.9th percentile
of pauses in CPU time, `pause_max_us` the longest. A pause longer than the launched rounds leaves the GPU idle.

With `--rows-s N` the stand-in finishes at most N rows a second. If the workers admit more, rows are admitted ahead, as in a job.

`--tokenizer FOLDER` uses a model's tokenizer and chat template in place of the stand-in, and rows leave the engine without their
text, as from the real one; `--tokens 140` makes rows as short as GSM8K's; `input.num_workers` is `--workers`, and
`output.shard_rows` is `--shard-rows`: 149 in a job of 38,251 rows that does not set it.
"""

from __future__ import annotations

import ctypes
import json
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.bench.job_layer_stand_ins import POOL, StandInEngine, StandInTokenizer, some_texts, vocabulary_words
from batchspec.config.compose import compose
from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.job import compute
from batchspec.model.shapes import COMMON, SHAPES
from batchspec.model.tokenizer import Tokenizer
from batchspec.packing.ordered_requests import WINDOW_SHARDS
from batchspec.prepare import Job, open_job
from batchspec.records import Completion
from batchspec.runner.decode_shards import JOURNAL_S
from batchspec.runner.opened_output import open_output
from batchspec.runstate.journal import Journal
from batchspec.storage.local_store import LocalStore
from batchspec.supervise.signals import EndSignals

TOKENS = 512
"""Tokens of a prompt, and of an output."""
TOK_S, SHARE = 100_000, 0.05
"""Output tokens a second of the engine for which the budget is computed, and the share of its time."""
SHARD_ROWS = 512
"""Of every job of more than 131,072 rows."""
SAMPLE_S = 0.5


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="batchspec bench --job-layer", description=__doc__.partition("\n")[0])
    parser.add_argument("dir", metavar="DIR", type=Path, help="made anew: input, model/ and the job's output")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=0, help="input.num_workers")
    parser.add_argument("--rows-s", type=float, default=0.0, help="maximum number of rows that finish in a second; 0: no limit")
    parser.add_argument("--shard-rows", type=int, default=SHARD_ROWS, help="output.shard_rows")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a prompt, and of an output")
    parser.add_argument("--tokenizer", type=Path, help="a model's folder: use its tokenizer and chat template")
    args = parser.parse_args(argv)
    tokenizer = Tokenizer(args.tokenizer) if args.tokenizer else None
    terminal.show_json(measure(args.dir, args.rows, args.tokens, tokenizer, args.workers, args.shard_rows, args.rows_s))
    return 0


def measure(
    folder: Path, num_rows: int, num_tokens: int = TOKENS, tokenizer: Tokenizer | None = None, num_workers: int = 0,
    shard_rows: int = SHARD_ROWS, rows_s: float = 0.0,
) -> dict[str, float]:
    """Run the job; times in seconds or microseconds per row, memory in MB over the course of the run."""
    texts = some_texts(num_tokens, None if tokenizer is None else vocabulary_words(tokenizer))
    job = make_job(folder, num_rows, num_tokens, texts, tokenizer, num_workers, shard_rows)
    output = open_output(job)
    engine = StandInEngine(texts, num_tokens, tokenizer, rows_s)
    with sampled(resident_mb) as memory:
        began, cpu, workers = time.perf_counter(), time.process_time(), children_s()
        with EndSignals() as signals:
            compute(output, signals, load=engine.loaded)
        seconds, cpu_s, workers_s = time.perf_counter() - began, time.process_time() - cpu, children_s() - workers
        thread_s = time.thread_time() - engine.made_at[0]
        threads_s = time.process_time() - engine.made_at[1] - thread_s
    own_s = thread_s - engine.own_s
    by_thread = {
        "engine_thread_us": own_s,
        "feed_us": engine.feed_s,
        "round_us": engine.round_s,
        "finish_us": own_s - engine.feed_s - engine.round_s,
        "other_threads_us": threads_s,
        "workers_us": workers_s,
    }
    journal_s = journal_seconds(folder / "journal", engine.last)
    written = sum(path.stat().st_size for path in (folder / "out" / "data").iterdir())
    row_us = seconds / num_rows * 1e6
    # Rows wait until their shard is committed: a flush finds the rows of one window at most.
    journal_us = journal_s / len(engine.last) * min(1.0, WINDOW_SHARDS * shard_rows / (JOURNAL_S * TOK_S / num_tokens)) * 1e6
    pauses_us = np.repeat(*np.array(sorted(engine.pauses_us.items())).T)
    quarters = [max(part) for part in np.array_split(np.array(memory), 4)] if len(memory) >= 4 else [max(memory)] * 4
    return {
        "rows": num_rows,
        "seconds": round(seconds, 2),
        "rows_s": round(num_rows / seconds, 1),
        "read_mb_s": round((folder / "input.parquet").stat().st_size / seconds / 1e6, 1),
        "written_mb_s": round(written / seconds / 1e6, 1),
        "row_us": round(row_us, 1),
        "cpu_us": round(cpu_s / num_rows * 1e6, 1),
        "journal_us": round(journal_us, 1),
        "budget_us": round(num_tokens / TOK_S * SHARE * 1e6, 1),
        "share": round((row_us + journal_us) / 1e6 / (num_tokens / TOK_S), 4),
        **{name: round(value / num_rows * 1e6, 1) for name, value in by_thread.items()},
        "pause_999_us": round(float(np.quantile(pauses_us, 0.999)), 1),
        "pause_max_us": float(pauses_us[-1]),
        **{f"resident_mb_q{i + 1}": round(float(value), 1) for i, value in enumerate(quarters)},
    }


def make_job(
    folder: Path, num_rows: int, num_tokens: int, texts: Sequence[str], tokenizer: Tokenizer | None = None,
    num_workers: int = 0, shard_rows: int = SHARD_ROWS,
) -> Job:
    """A job on `num_rows` chats, checked as any other."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps({**COMMON, **SHAPES["llama8b"]}))
    write_input(folder / "input.parquet", num_rows, texts)
    config = compose(
        [
            f"model.path={folder}/model", "model.load_format=dummy", "model.dtype=float32", f"input.path={folder}/input.parquet",
            f"output.dir={folder}/out", "output.overwrite=true", "output.token_ids=true", "output.prompt_ids=true",
            f"output.shard_rows={shard_rows}", f"decode.max_new_tokens={num_tokens}", "device=cpu",
            f"input.num_workers={num_workers}",
        ]
    )
    return open_job(config, tokenizer=tokenizer or cast(Tokenizer, StandInTokenizer(texts, num_tokens)))


def write_input(path: Path, num_rows: int, texts: Sequence[str]) -> None:
    turns = pa.array([[{"role": "user", "content": text}] for text in texts])
    with pq.ParquetWriter(path, pa.schema({"id": pa.string(), "messages": turns.type}), compression="zstd") as writer:
        for first in range(0, num_rows, POOL):
            rows = range(first, min(first + POOL, num_rows))
            writer.write_table(pa.table({"id": [f"row-{i:08d}" for i in rows], "messages": turns.slice(0, len(rows))}))


def journal_seconds(folder: Path, completions: Sequence[Completion]) -> float:
    """Seconds of CPU time for a flush of these rows."""
    journal = Journal(LocalStore(folder, "tmp"), "bench")
    for completion in completions:
        journal.add(completion)
    began = time.process_time()
    journal.flush()
    return time.process_time() - began


def children_s() -> float:
    """CPU time of child processes that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def resident_mb() -> float:
    """Private memory of this process, without the pages of files that it reads and without what malloc keeps for later, which
    was seen to vary by 80 MB in the course of a run."""
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("Linux tells RssAnon")


@contextmanager
def sampled(read: Callable[[], float]) -> Iterator[list[float]]:
    """The results of `read`, called every half second while the block runs and once at its end."""
    values: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            values.append(read())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield values
    finally:
        ended.set()
        thread.join()
        values.append(read())
