"""A whole job without its model: a tokenizer and an engine that answer at once, and the CPU time and memory of all the rest.

Reading, admission, packing, timeline, claims, journal and commits are the real ones. A row has 512 prompt tokens, as a chat of
about 2 KB of text, and 512 output tokens with as much text; tokens of both and messages are written.

    python -m tests.job_layer [ROWS]     microseconds of CPU time a row, beside 5 % of what an engine of TOK_S takes for one
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.config.compose import compose
from batchspec.config.schema import TEMPLATE_DATE
from batchspec.data.runstate.journal import Journal
from batchspec.data.storage.local_store import LocalStore
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.engine_run import PREFETCHED_PER_ROUND
from batchspec.engine.loop.totals import EngineTotals
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.prepare import Job, open_job
from batchspec.job.report.progress_bar import ProgressBar
from batchspec.job.run_job import decode_missing
from batchspec.job.runner.decode_shards import JOURNAL_S
from batchspec.job.runner.job_run import open_run
from batchspec.model.families.shapes import COMMON, SHAPES
from batchspec.packing.ordered_requests import WINDOW_SHARDS
from batchspec.packing.survey import Survey
from batchspec.process.garbage import older_objects_frozen
from batchspec.process.signals import EndSignals
from batchspec.records import Completion, Request, RowStats, Snapshot
from batchspec.request_stream import ListedRequests, RequestStream, stream_of, take_ready
from batchspec.text.chat_templates import ChatTemplates
from batchspec.text.tokenizer import Tokenizer

TOKENS = 512
"""Tokens of a prompt, and of an output."""
TOK_S = 100_000
"""Output tokens a second of an engine."""
SHARD_ROWS = 512
"""Of every job of more than 131,072 rows."""
SLOTS, K = 256, 4
ROUNDS_A_ROW = 2
"""Rounds of a full batch per row that ends: 512 tokens at 2 per round, 128 rows in the batch."""
POOL = 4096
"""Number of different texts: together longer than the window of a compressor."""
SAMPLE_S = 0.5


class Cost(NamedTuple):
    cpu_us: float
    """CPU time of the process for a row, without the journal's share: a run as fast as this one writes it less often."""
    journal_us: float
    """CPU time that the journal takes for a row in a job whose engine makes TOK_S."""
    held_mb: tuple[float, ...]
    """The median of what malloc and Arrow have handed out, in each quarter of the run: without what allocators keep for later and
    lose between blocks, by which private memory was seen to rise and fall by 40 MB on a machine with other work."""
    peak_mb: tuple[float, ...]
    """The most private memory in each quarter: of a sample within a flush of the journal, more by twice the segment's size."""
    blocks: tuple[float, ...]
    """The median number of blocks that small Python objects take, in each quarter."""


def run_job(folder: Path, num_rows: int) -> Cost:
    """Run a job on `num_rows` chats; its output is in folder/out."""
    texts = some_texts()
    job_run = open_run(_make_job(folder, num_rows, texts))
    engine = StandInEngine(texts)
    with _sampled(lambda: (_resident_mb(), _held_mb(), float(sys.getallocatedblocks()))) as samples:
        began = time.process_time()
        with EndSignals() as signals:
            decode_missing(job_run, signals, load=engine.loaded)
        cpu_s = time.process_time() - began
    quarters = np.array_split(np.array(samples), 4)
    flush_s = _flush_seconds(folder / "journal", engine.last)
    # Rows wait until their shard is committed: a flush finds the rows of one window at most.
    share = min(1.0, WINDOW_SHARDS * SHARD_ROWS / (JOURNAL_S * TOK_S / TOKENS))
    return Cost(
        cpu_us=cpu_s / num_rows * 1e6,
        journal_us=flush_s / len(engine.last) * share * 1e6,
        held_mb=tuple(float(np.median(part[:, 1])) for part in quarters),
        peak_mb=tuple(float(max(part[:, 0])) for part in quarters),
        blocks=tuple(float(np.median(part[:, 2])) for part in quarters),
    )


def some_texts() -> list[str]:
    """Texts of TOKENS words of 3 characters and a space: as long and as compressible as English of as many tokens."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(word) for word in letters[np.minimum(random.geometric(0.12, (2000, 3)) - 1, 25)]]
    return [" ".join(words[i] for i in random.integers(0, len(words), TOKENS)) for _ in range(POOL)]


def _make_job(folder: Path, num_rows: int, texts: Sequence[str]) -> Job:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps({**COMMON, **SHAPES["llama1b"]}))
    _write_input(folder / "input.parquet", num_rows, texts)
    config = compose(
        [
            f"model.path={folder}/model", "model.load_format=dummy", "model.dtype=float32", f"input.path={folder}/input.parquet",
            f"output.dir={folder}/out", "output.token_ids=true", "output.prompt_ids=true", f"output.shard_rows={SHARD_ROWS}",
            "output.dedup=false",  # the texts repeat
            f"decode.max_new_tokens={TOKENS}", "device=cpu", "input.num_workers=0",
        ]
    )
    return open_job(config, tokenizer=cast(Tokenizer, StandInTokenizer(texts)))


def _write_input(path: Path, num_rows: int, texts: Sequence[str]) -> None:
    turns = pa.array([[{"role": "user", "content": text}] for text in texts])
    with pq.ParquetWriter(path, pa.schema({"id": pa.string(), "messages": turns.type}), compression="zstd") as writer:
        for first in range(0, num_rows, POOL):
            rows = range(first, min(first + POOL, num_rows))
            writer.write_table(pa.table({"id": [f"row-{i:08d}" for i in rows], "messages": turns.slice(0, len(rows))}))


class StandInTokenizer:
    """A tokenizer that was given the tokens of every text in advance."""

    eos_ids: tuple[int, ...] = (2,)
    special_ids: Mapping[str, int] = {}
    added_ids: Mapping[str, int] = {}
    fingerprint, has_chat_template = "stand-in", True
    chats = ChatTemplates({}, {}, "a stand-in", date=TEMPLATE_DATE)

    def __init__(self, texts: Sequence[str]) -> None:
        random = np.random.default_rng(1)
        self._ids: dict[str, list[int]] = {text: random.integers(3, 30000, TOKENS).tolist() for text in texts}

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        return self._ids[str(messages[0]["content"])]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        raise AssertionError("the stand-in engine hands out texts")


class StandInEngine:
    """Ends every row at once, in the order in which slots would: a row ends when SLOTS later rows have begun."""

    def __init__(self, texts: Sequence[str], tokens: int = TOKENS) -> None:
        """
        texts   of its answers
        tokens  of an answer, two in a round
        """
        random = np.random.default_rng(2)
        self._tokens, self._rounds = tokens, tokens // 2
        self._answers = [(text, random.integers(3, 30000, tokens).astype(np.int32)) for text in texts]
        self.batch = SimpleNamespace(num_slots=SLOTS, decodes=True)
        self.totals = EngineTotals()
        self.on_round: Callable[[EngineTotals], None] | None = None
        self.last: deque[Completion] = deque(maxlen=1024)
        self._requests: RequestStream = ListedRequests(())
        self._prefetched: deque[Request] = deque()

    def calibration(self) -> dict[int, tuple[int, int, float]]:
        return {}

    def loaded(self, job: Job, survey: Survey, progress: ProgressBar) -> LoadedEngine[Engine]:
        return LoadedEngine(cast(Engine, self), job)

    def stop(self) -> None:
        raise AssertionError("stop() is called at a signal or a time limit, and this job has neither")

    def unfinished(self) -> list[Snapshot]:
        return []

    def steps(self, requests: RequestStream | Iterable[Request]) -> Generator[list[Completion]]:
        self._requests = stream_of(requests)
        with older_objects_frozen():  # as the real engine does
            live: deque[Request] = deque()
            while (request := self._next()) is not None:
                live.append(request)
                if len(live) == SLOTS:
                    yield [self._end(live.popleft(), SLOTS)]
            while live:
                yield [self._end(live.popleft(), len(live))]

    def _next(self) -> Request | None:
        return self._prefetched.popleft() if self._prefetched else self._requests.next_ready()

    def _end(self, request: Request, live_rows: int) -> Completion:
        totals, rounds = self.totals, self._rounds
        totals.tokens, totals.live_rows = totals.tokens + self._tokens, live_rows
        totals.row_rounds, totals.accepted = totals.row_rounds + rounds, totals.accepted + rounds
        for _ in range(ROUNDS_A_ROW):
            totals.rounds += 1
            if self.on_round is not None:
                self.on_round(totals)
            self._prefetched += take_ready(self._requests, min(PREFETCHED_PER_ROUND, SLOTS // 2 - len(self._prefetched)))
        self.last.append(completion := self._completion(request))
        return completion

    def _completion(self, request: Request) -> Completion:
        text, token_ids = self._answers[request.row_index % POOL]
        rounds = self._rounds
        stats = RowStats(
            drafter="lookup", draft_len=K, num_prefills=1, num_rounds=rounds, num_drafted=K * rounds, num_accepted=rounds,
            num_discarded=0, histogram=(0, rounds, 0, 0, 0), drafted_at=(rounds,) * K, accepted_at=(rounds, 0, 0, 0),
            prefill_s=0.1, decode_s=2.5, slot=request.row_index % SLOTS,
        )
        return Completion(
            request_id=request.request_id, row_index=request.row_index, sample_index=request.sample_index, shard=request.shard,
            status="truncated", finish_reason="length", prompt_ids=request.prompt_ids, token_ids=token_ids,
            text=text, seed=request.seed, predicted_tokens=request.predicted_tokens, stats=stats,
        )


def _flush_seconds(folder: Path, completions: Sequence[Completion]) -> float:
    """Seconds of CPU time for a flush of these rows to a journal."""
    journal = Journal(LocalStore(folder, "tmp"), "bench")
    for completion in completions:
        journal.add(completion)
    began = time.process_time()
    journal.flush()
    return time.process_time() - began


def _resident_mb() -> float:
    """Private memory of this process, without the pages of files that it reads and without what malloc keeps for later, which
    was seen to vary by 80 MB in the course of a run."""
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("Linux tells RssAnon")


class _Malloc(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def _held_mb() -> float:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Malloc
    found = libc.mallinfo2()
    return float(found.uordblks + found.hblkhd + pa.total_allocated_bytes()) / 2**20


@contextmanager
def _sampled(read: Callable[[], tuple[float, ...]]) -> Iterator[list[tuple[float, ...]]]:
    """The results of `read`, called every half second while the block runs and once at its end."""
    values: list[tuple[float, ...]] = []
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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        measured = run_job(Path(folder), int(sys.argv[1]) if sys.argv[1:] else 20_000)
    budget_us = 0.05 * TOKENS / TOK_S * 1e6
    print(f"{measured.cpu_us + measured.journal_us:.0f} us of CPU time a row; 5 % of an engine's time: {budget_us:.0f}")
