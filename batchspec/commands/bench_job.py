"""`batchspec bench --job-layer DIR`: the cost of a row in a job, without its model.

A whole job runs in DIR with a stand-in for the engine and one for the tokenizer, which answer at once; reading, admission,
packing, time line, claims, journal and commits are the real ones. A row has 512 prompt tokens, as a chat of about 2 KB of text,
and 512 output tokens with as much text; tokens of both and messages are written.

The budget is 5 % of the time that an engine of 100,000 output tokens a second takes for a row: 256 us. It is compared with the
seconds of the run by the clock, start-up left out, and the journal: a run as fast as this one writes it more seldom by the row
than a job would, so that a flush is timed by itself. `--tokenizer FOLDER` says what real tokens of such text cost; that is
apart from the budget.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchspec import terminal
from batchspec.arguments import ArgumentParser
from batchspec.commands.shapes import COMMON, SHAPES
from batchspec.config.compose import compose
from batchspec.engine.engine import Engine
from batchspec.engine.output_processor import EngineTotals
from batchspec.job import check_output, compute
from batchspec.model.tokenizer import Tokenizer
from batchspec.packing.feed import WINDOW_SHARDS
from batchspec.packing.survey import Survey
from batchspec.prepare import Job, open_job
from batchspec.records import Completion, Request, RowStats, Snapshot
from batchspec.report.progress_bar import ProgressBar
from batchspec.runner.decode_shards import JOURNAL_S
from batchspec.runstate.journal import Journal
from batchspec.storage.local_store import LocalStore

TOKENS = 512
"""Of a prompt, and of an output."""
TOK_S, SHARE = 100_000, 0.05
"""Output tokens a second of the engine that the budget is taken from, and the share of its time."""
SLOTS, K = 256, 4
POOL = 4096
"""Different texts: more than a compressor looks back on."""
ROUNDS_A_ROW = 2
"""Rounds of a full batch for each row that ends: 512 tokens at 2 a round, 128 rows side by side."""
SHARD_ROWS = 512
"""Of every job of more than 131,072 rows."""
SAMPLE_S = 0.5


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="batchspec bench --job-layer", description=__doc__.partition("\n")[0])
    parser.add_argument("dir", metavar="DIR", type=Path, help="made anew: input, model/ and the job's output")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--tokenizer", type=Path, help="a model's folder: what its tokenizer takes for such rows, apart")
    args = parser.parse_args(argv)
    facts = measure(args.dir, args.rows)
    if args.tokenizer:
        facts |= tokenizing(Tokenizer(args.tokenizer))
    terminal.show_json(facts)
    return 0


def measure(folder: Path, num_rows: int) -> dict[str, float]:
    """Run the job; times in seconds, or microseconds by the row, memory in MB over the run's course."""
    texts = some_texts()
    job = make_job(folder, num_rows, texts)
    output = check_output(job)
    engine = StandInEngine(texts)
    with sampled(resident_mb) as memory:
        began, cpu = time.perf_counter(), time.process_time()
        compute(job, output, set(), make=engine.made)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    journal_s = journal_seconds(folder / "journal", engine.last)
    written = sum(path.stat().st_size for path in (folder / "out" / "data").iterdir())
    row_us = seconds / num_rows * 1e6
    # Rows wait for their shard to be committed: a flush finds at most those of a window.
    journal_us = journal_s / len(engine.last) * min(1.0, WINDOW_SHARDS * job.shard_rows / (JOURNAL_S * TOK_S / TOKENS)) * 1e6
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
        "budget_us": round(TOKENS / TOK_S * SHARE * 1e6, 1),
        "share": round((row_us + journal_us) / 1e6 / (TOKENS / TOK_S), 4),
        **{f"resident_mb_q{i + 1}": round(float(value), 1) for i, value in enumerate(quarters)},
    }


def some_texts() -> list[str]:
    """Texts of 512 words of 3 characters and a space: as long as 512 tokens of English, and as compressible."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(word) for word in letters[np.minimum(random.geometric(0.12, (2000, 3)) - 1, 25)]]
    return [" ".join(words[i] for i in random.integers(0, len(words), TOKENS)) for _ in range(POOL)]


def make_job(folder: Path, num_rows: int, texts: Sequence[str]) -> Job:
    """A job on `num_rows` chats, checked as any other."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps({**COMMON, **SHAPES["llama8b"]}))
    write_input(folder / "input.parquet", num_rows, texts)
    config = compose(
        [
            f"model.path={folder}/model", "model.load_format=dummy", "model.dtype=float32", f"input.path={folder}/input.parquet",
            f"output.dir={folder}/out", "output.overwrite=true", "output.token_ids=true", "output.prompt_ids=true",
            f"output.shard_rows={SHARD_ROWS}", f"decode.max_new_tokens={TOKENS}", "device=cpu",
        ]
    )  # fmt: skip
    return open_job(config, tokenizer=cast(Tokenizer, StandInTokenizer(texts)))


def write_input(path: Path, num_rows: int, texts: Sequence[str]) -> None:
    turns = pa.array([[{"role": "user", "content": text}] for text in texts])
    with pq.ParquetWriter(path, pa.schema({"id": pa.string(), "messages": turns.type}), compression="zstd") as writer:
        for first in range(0, num_rows, POOL):
            rows = range(first, min(first + POOL, num_rows))
            writer.write_table(pa.table({"id": [f"row-{i:08d}" for i in rows], "messages": turns.slice(0, len(rows))}))


class StandInTokenizer:
    """Knows the tokens of every text beforehand."""

    eos_ids: tuple[int, ...] = (2,)
    special_ids: Mapping[str, int] = {}
    added_ids: Mapping[str, int] = {}
    fingerprint, has_chat_template = "stand-in", True

    def __init__(self, texts: Sequence[str]) -> None:
        random = np.random.default_rng(1)
        self._ids: dict[str, list[int]] = {text: random.integers(3, 30000, TOKENS).tolist() for text in texts}

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        return self._ids[str(messages[0]["content"])]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        raise AssertionError("the stand-in engine hands out texts")


class StandInEngine:
    """Ends every row at once, in the order in which slots would: a row leaves when SLOTS later ones are in."""

    def __init__(self, texts: Sequence[str]) -> None:
        random = np.random.default_rng(2)
        self._answers = [(text, random.integers(3, 30000, TOKENS).astype(np.int32)) for text in texts]
        self.batch = SimpleNamespace(num_slots=SLOTS)
        self.totals = EngineTotals()
        self.on_round: Callable[[EngineTotals], None] | None = None
        self.last: deque[Completion] = deque(maxlen=1024)

    def made(self, job: Job, seen: Survey, progress: ProgressBar) -> Engine:
        return cast(Engine, self)

    def stop(self) -> None:
        raise AssertionError("nobody stops a benchmark")

    def unfinished(self) -> list[Snapshot]:
        return []

    def run(self, requests: Iterator[Request]) -> Generator[Completion]:
        live: deque[Request] = deque()
        for request in requests:
            live.append(request)
            if len(live) == SLOTS:
                yield self._end(live.popleft(), SLOTS)
        while live:
            yield self._end(live.popleft(), len(live))

    def _end(self, request: Request, live_rows: int) -> Completion:
        totals, rounds = self.totals, TOKENS // 2
        totals.tokens, totals.live_rows = totals.tokens + TOKENS, live_rows
        totals.row_rounds, totals.accepted = totals.row_rounds + rounds, totals.accepted + rounds
        for _ in range(ROUNDS_A_ROW):
            totals.rounds += 1
            if self.on_round is not None:
                self.on_round(totals)
        text, token_ids = self._answers[request.row_index % POOL]
        stats = RowStats(
            drafter="lookup", draft_len=K, num_prefills=1, num_rounds=rounds, num_drafted=K * rounds, num_accepted=rounds,
            num_discarded=0, histogram=(0, rounds, 0, 0, 0), drafted_at=(rounds,) * K, accepted_at=(rounds, 0, 0, 0),
            prefill_s=0.1, decode_s=2.5, batch_id=0, slot=request.row_index % SLOTS,
        )  # fmt: skip
        completion = Completion(
            request_id=request.request_id, row_index=request.row_index, sample_index=request.sample_index, shard=request.shard,
            status="truncated", finish_reason="length", prompt_ids=request.prompt_ids, token_ids=token_ids, text=text,
            seed=request.seed, predicted_tokens=request.predicted_tokens, stats=stats,
        )  # fmt: skip
        self.last.append(completion)
        return completion


def journal_seconds(folder: Path, completions: Sequence[Completion]) -> float:
    """Of the processor, for a flush of so many rows."""
    journal = Journal(LocalStore(folder, "tmp"), "bench")
    for completion in completions:
        journal.add(completion)
    began = time.process_time()
    journal.flush()
    return time.process_time() - began


def tokenizing(tokenizer: Tokenizer) -> dict[str, float]:
    """Microseconds of a row's tokens: the chat's to ids, and as many ids to text."""
    texts = some_texts()[:200]
    began = time.perf_counter()
    ids = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    encoded = time.perf_counter()
    for row in ids:
        tokenizer.decode(row)
    decoded = time.perf_counter()
    return {
        "tokens_of_a_chat": round(sum(map(len, ids)) / len(ids), 1),
        "encode_us": round((encoded - began) / len(texts) * 1e6, 1),
        "decode_us": round((decoded - encoded) / len(texts) * 1e6, 1),
    }


def resident_mb() -> float:
    """Memory of this process that is its own: pages of files it reads are not counted."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("Linux tells RssAnon")


@contextmanager
def sampled(read: Callable[[], float]) -> Iterator[list[float]]:
    """What `read` gives, every half second while the block runs and once at its end."""
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
