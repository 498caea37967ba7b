"""Shards whose rows were admitted and are not all finished. A shard is given back, complete, when its last row is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.journal import Journaled
from batchspec.packing.work_plan import AdmittedShard, DecodedShard, PlanRows
from batchspec.records import Completion, Request


@dataclass(slots=True)
class _OpenShard:
    shard: InputShard
    num_outputs: int = 0
    num_carried: int = 0
    completions: list[Completion] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        return len(self.completions) + self.num_carried

    @property
    def is_done(self) -> bool:
        return self.num_done == self.num_outputs


class OpenShards:
    """Opens admitted shards, and tracks their unfinished rows.

    rows       decides what is done with each output row of a shard
    predicted  returns a request with its present predicted output length
    journaled  saved work of earlier runs: finished rows are not decoded again, others continue from their saved tokens
    """

    def __init__(self, rows: PlanRows, predicted: Callable[[Request], Request], journaled: Journaled) -> None:
        self._rows, self._predicted, self._journaled = rows, predicted, journaled
        self._open: dict[int, _OpenShard] = {}
        self._done: list[int] = []
        """Open shards whose rows are all finished."""
        self.num_unfinished = 0
        """Number of requests without a completion."""

    def planned(self, admitted: AdmittedShard) -> Iterator[list[Request]]:
        """Yield for each planned row of a shard a list of none or one request. The shard is open once all were taken."""
        opened = _OpenShard(admitted.shard)
        for planned in self._rows(admitted.shard, self._journaled.with_finished(admitted.entries)):
            known = None if planned is None else self._journaled.known(planned)
            opened.num_outputs += 1
            opened.num_carried += known is None
            if isinstance(known, Completion):
                opened.completions.append(known)
            self.num_unfinished += isinstance(known, Request)
            yield [self._predicted(known)] if isinstance(known, Request) else []
        self._open[admitted.shard.index] = opened
        if opened.is_done:
            self._done.append(admitted.shard.index)

    def add(self, completion: Completion) -> None:
        """Add the completion of a request of an open shard."""
        opened = self._open[completion.shard]
        opened.completions.append(completion)
        self.num_unfinished -= 1
        if opened.is_done:
            self._done.append(completion.shard)

    def progress(self) -> list[tuple[int, int]]:
        """The open shards, each with the number of its output rows that are done."""
        return [(index, opened.num_done) for index, opened in self._open.items()]

    def complete(self) -> Iterator[DecodedShard]:
        """Yield each shard once, when all its rows are finished."""
        while self._done:
            done = self._open.pop(self._done.pop(0))
            yield DecodedShard(shard=done.shard, completions=done.completions, num_carried=done.num_carried)
