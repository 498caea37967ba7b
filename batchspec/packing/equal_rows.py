"""Computes equal greedy rows once: those with the same prompt tokens and the same options have the same answer.

The first of them is decoded. A copy of its completion is the completion of each other one, which has no statistics of rounds and
takes no time. In bfloat16 rounding may depend on the other rows of a batch: then the copies are equal where decoding each row by
itself might have given two close answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from batchspec.records import Completion, Request
from batchspec.request_stream import MOST_LEFT_OUT, RequestStream, WrappedStream

MOST_BYTES, BYTES_OF_ANSWER = 32 << 20, 1 << 10
"""Bytes of the newest answers that are kept for rows to come, and what each takes besides its arrays and texts."""
_OF_ROW = frozenset(
    ("request_id", "row_index", "sample_index", "shard", "prompt_ids", "seed", "predicted_tokens", "automaton", "resumed")
)
"""Fields of a request on which no token of a greedy row depends, or that have their own place in the key."""
_options_of: Callable[[Request], tuple[Any, ...]] = attrgetter(
    *(field.name for field in fields(Request) if field.name not in _OF_ROW)
)


class EqualRows(WrappedStream):
    """A `RequestStream` that leaves out requests whose answer is that of another request. Call `copies` with each completion.

    answered  called with the completion of a request whose answer is known already
    """

    def __init__(self, requests: RequestStream, answered: Callable[[Completion], None]) -> None:
        super().__init__(requests)
        self._answered = answered
        self._decoding: dict[bytes, list[Request]] = {}
        """Key of each request that is being decoded -> those that wait for its answer."""
        self._keys: dict[tuple[int, int], bytes] = {}
        """(row, sample) of each request that is being decoded -> its key."""
        self._answers: OrderedDict[bytes, tuple[Completion, int]] = OrderedDict()
        """Answers and their bytes, the newest last."""
        self._num_bytes = 0

    def next_ready(self) -> Request | None:
        for _ in range(MOST_LEFT_OUT):
            if (request := super().next_ready()) is None:
                break
            key = answer_key(request)
            if key is None:
                return request
            if key in self._answers:
                self._answers.move_to_end(key)
                self._answered(copy_for(request, self._answers[key][0]))
            elif key in self._decoding:
                self._decoding[key].append(request)
            else:
                self._decoding[key] = []
                self._keys[request.row_index, request.sample_index] = key
                return request
        return None

    def copies(self, completion: Completion) -> list[Completion]:
        """The completions of the requests that have waited for this one."""
        key = self._keys.pop((completion.row_index, completion.sample_index), None)
        if key is None:
            return []
        if completion.error is None:
            self._keep(key, completion)
        return [copy_for(request, completion) for request in self._decoding.pop(key)]

    def _keep(self, key: bytes, completion: Completion) -> None:
        num_bytes = _num_bytes(completion)
        self._answers[key] = completion.replace(stats=None), num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > MOST_BYTES:
            _, (_, freed) = self._answers.popitem(last=False)
            self._num_bytes -= freed


def answer_key(request: Request) -> bytes | None:
    """Equal for requests with the same answer; None for one whose answer is not determined by its prompt and options: it is
    sampled, continues an earlier run's tokens, or has an automaton already."""
    if request.sampling.temperature > 0 or request.resumed is not None or request.automaton is not None:
        return None
    written = _written if request.images else _usual  # images are different in each row, and large
    return blake2b(request.prompt_ids.tobytes() + written(_options_of(request)), digest_size=16).digest()


def _written(options: tuple[Any, ...]) -> bytes:
    return repr(options).encode("utf-8", "surrogatepass")


_usual = lru_cache(64)(_written)
"""Most rows of a job have the same options, and writing them takes longer than comparing them."""


def copy_for(request: Request, completion: Completion) -> Completion:
    return completion.replace(
        request_id=request.request_id, row_index=request.row_index, sample_index=request.sample_index, shard=request.shard,
        seed=request.seed, predicted_tokens=request.predicted_tokens, stats=None, cached_tokens=len(request.prompt_ids),
    )


def _num_bytes(completion: Completion) -> int:
    done = completion
    tops = (array for pair in (done.top_logprobs, done.prompt_top_logprobs) if pair is not None for array in pair)
    arrays = (done.prompt_ids, done.token_ids, done.logprobs, done.prompt_logprobs, done.state_values, *tops)
    texts = (done.text, done.reasoning, done.tool_calls)
    return BYTES_OF_ANSWER + sum(one.nbytes for one in arrays if one is not None) + sum(len(one) for one in texts if one)
