"""A tokenizer and an engine that answer at once, in place of a job's own: `bench --job-layer` then times the rest of the job."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.engine_run import PREFETCHED_PER_ROUND
from batchspec.engine.loop.totals import EngineTotals
from batchspec.load.loaded_engine import LoadedEngine
from batchspec.model.tokenizer import Tokenizer
from batchspec.packing.survey import Survey
from batchspec.prepare import Job
from batchspec.process.garbage import older_objects_frozen
from batchspec.records import Completion, Request, RowStats, Snapshot
from batchspec.report.progress_bar import ProgressBar
from batchspec.request_stream import ListedRequests, RequestStream, stream_of, take_ready

SLOTS, K = 256, 4
POOL = 4096
"""Number of different texts: together longer than the window of a compressor."""
ROUNDS_A_ROW = 2
"""Rounds of a full batch per row that ends: 512 tokens at 2 per round, 128 rows in the batch."""


def some_texts(num_tokens: int, words: Sequence[str] | None = None) -> list[str]:
    """Texts of `num_tokens` words; by default of 3 characters and a space: as long and as compressible as English of as many
    tokens."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = words or ["".join(word) for word in letters[np.minimum(random.geometric(0.12, (2000, 3)) - 1, 25)]]
    return [" ".join(words[i] for i in random.integers(0, len(words), num_tokens)) for _ in range(POOL)]


def vocabulary_words(tokenizer: Tokenizer) -> list[str]:
    """2,000 words that are one token each after a space."""
    texts = (tokenizer.decode([token]) for token in range(300, 20_000))
    words = [text[1:] for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()]
    return words[:2000]


class StandInTokenizer:
    """A tokenizer that was given the tokens of every text in advance."""

    eos_ids: tuple[int, ...] = (2,)
    special_ids: Mapping[str, int] = {}
    added_ids: Mapping[str, int] = {}
    fingerprint, has_chat_template, answer_templates = "stand-in", True, ()

    def __init__(self, texts: Sequence[str], num_tokens: int) -> None:
        random = np.random.default_rng(1)
        self._ids: dict[str, list[int]] = {text: random.integers(3, 30000, num_tokens).tolist() for text in texts}

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        return self._ids[str(messages[0]["content"])]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        raise AssertionError("the stand-in engine hands out texts")


class StandInEngine:
    """Ends every row at once, in the order in which slots would: a row ends when SLOTS later rows have begun.

    rows_s     maximum number of rows that finish in a second; 0: no limit
    tokenizer  of the job, which decodes the texts; None: texts are known
    made_at  CPU time of this thread, and of the process, when the start-up was over
    own_s, feed_s, round_s  CPU time of this thread in the stand-in itself, in the stream of requests, and after rounds
    pauses_us  how many calls into the job's work, during which this thread could launch nothing, took so many microseconds of CPU
              time: to take a request, after a round, or with a finished row
    """

    def __init__(self, texts: Sequence[str], num_tokens: int, tokenizer: Tokenizer | None = None, rows_s: float = 0.0) -> None:
        random = np.random.default_rng(2)
        self._row_s, self._next_at = 1 / rows_s if rows_s else 0.0, 0.0
        self._num_tokens, self._tokenizer = num_tokens, tokenizer
        ids = (random.integers(3, 30000, num_tokens) if tokenizer is None else tokenizer.encode_part(text) for text in texts)
        self._answers = [(text, np.array(tokens[:num_tokens], np.int32)) for text, tokens in zip(texts, ids, strict=True)]
        self.batch = SimpleNamespace(num_slots=SLOTS)
        self.totals = EngineTotals()
        self.on_round: Callable[[EngineTotals], None] | None = None
        self.last: deque[Completion] = deque(maxlen=1024)
        self.own_s = self.feed_s = self.round_s = 0.0
        self.pauses_us = Counter[int]()
        self.made_at = 0.0, 0.0
        self._requests: RequestStream = ListedRequests(())
        self._prefetched: deque[Request] = deque()

    def loaded(self, job: Job, survey: Survey, progress: ProgressBar) -> LoadedEngine[Engine]:
        self.made_at = time.thread_time(), time.process_time()
        return LoadedEngine(job, cast(Engine, self))

    def stop(self) -> None:
        raise AssertionError("stop() is called at a signal or a time limit, and this benchmark has neither")

    def unfinished(self) -> list[Snapshot]:
        return []

    def run(self, requests: RequestStream | Iterable[Request]) -> Generator[Completion]:
        self._requests = stream_of(requests)
        with older_objects_frozen():  # as the real engine does
            yield from self._run()

    def _run(self) -> Generator[Completion]:
        live: deque[Request] = deque()
        while (request := self._next()) is not None:
            live.append(request)
            if len(live) == SLOTS:
                yield from self._handed_out(self._end(live.popleft(), SLOTS))
        while live:
            yield from self._handed_out(self._end(live.popleft(), len(live)))

    def _handed_out(self, completion: Completion) -> Iterator[Completion]:
        began = time.thread_time()
        yield completion
        self._paused(began)

    def _next(self) -> Request | None:
        began = time.thread_time()
        request = self._prefetched.popleft() if self._prefetched else self._requests.next_ready()
        self.feed_s += self._paused(began)
        return request

    def _paused(self, began: float) -> float:
        """Count a pause since this CPU time of the thread; returns its seconds."""
        seconds = time.thread_time() - began
        self.pauses_us[round(seconds * 1e6)] += 1
        return seconds

    def _end(self, request: Request, live_rows: int) -> Completion:
        waited = time.thread_time()
        self._wait()
        began = time.thread_time()
        self.own_s += began - waited
        totals, rounds = self.totals, self._num_tokens // 2
        totals.tokens, totals.live_rows = totals.tokens + self._num_tokens, live_rows
        totals.row_rounds, totals.accepted = totals.row_rounds + rounds, totals.accepted + rounds
        reported = began
        for _ in range(ROUNDS_A_ROW):
            totals.rounds += 1
            if self.on_round is not None:
                self.on_round(totals)
            self._prefetched += take_ready(self._requests, min(PREFETCHED_PER_ROUND, SLOTS // 2 - len(self._prefetched)))
            reported += self._paused(reported)
        self.round_s += reported - began
        completion = self._completion(request, rounds)
        self.last.append(completion)
        self.own_s += time.thread_time() - reported
        return completion

    def _wait(self) -> None:
        """Wait until the next row may end."""
        now = time.monotonic()
        self._next_at = max(self._next_at, now - 256 * self._row_s) + self._row_s  # after a slow call, at most 256 rows catch up
        if self._next_at > now:
            time.sleep(self._next_at - now)

    def _completion(self, request: Request, rounds: int) -> Completion:
        text, token_ids = self._answers[request.row_index % POOL]
        stats = RowStats(
            drafter="lookup", draft_len=K, num_prefills=1, num_rounds=rounds, num_drafted=K * rounds, num_accepted=rounds,
            num_discarded=0, histogram=(0, rounds, 0, 0, 0), drafted_at=(rounds,) * K, accepted_at=(rounds, 0, 0, 0),
            prefill_s=0.1, decode_s=2.5, slot=request.row_index % SLOTS,
        )
        return Completion(
            request_id=request.request_id, row_index=request.row_index, sample_index=request.sample_index, shard=request.shard,
            status="truncated", finish_reason="length", prompt_ids=request.prompt_ids, token_ids=token_ids,
            text=text if self._tokenizer is None else None, text_due=self._tokenizer is not None, seed=request.seed,
            predicted_tokens=request.predicted_tokens, stats=stats,
        )
