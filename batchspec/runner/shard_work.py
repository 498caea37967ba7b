"""What is done with the rows of a shard besides decoding: admission before, the output table after. Neither needs torch.

An object of `ShardWork` is all that a worker process gets (`shard_workers.py`), so that it can be pickled and does the same in
every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from batchspec.config.schema import InputConfig, OutputConfig
from batchspec.dataset.columns import ColumnMap
from batchspec.dataset.reader import InputShard
from batchspec.dataset.writer import build_table
from batchspec.packing.admit import Admission
from batchspec.packing.work_plan import AdmittedShard, AdmittedShards
from batchspec.records import Completion

if TYPE_CHECKING:
    from batchspec.prepare import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWork:
    """Admission and output tables of one run."""

    admission: Admission
    columns: ColumnMap
    input: InputConfig
    output: OutputConfig
    attempt: str
    """Name of the run in the column `perf`."""

    @classmethod
    def of(cls, job: Job, attempt: str) -> ShardWork:
        config = job.config
        return cls(
            admission=job.admission, columns=job.columns, input=config.input, output=config.output, attempt=attempt
        )  # fmt: skip

    def admitted(self, shards: Iterator[InputShard]) -> AdmittedShards:
        """The shards, in order, with what admission makes of their rows."""
        return AdmittedShards(AdmittedShard(shard, self.admission.admit(shard)) for shard in shards)

    def begin_table(self, shard: InputShard, completions: Sequence[Completion]) -> Callable[[], pa.Table]:
        """What gives the table. Workers begin with it at once; here it is made when it is asked for."""
        return lambda: self.table(shard, completions)

    def table(self, shard: InputShard, completions: Sequence[Completion]) -> pa.Table:
        """The completions as output rows, with the texts that the engine left to it."""
        think = self.admission.settings.think
        return build_table(
            shard,
            [self._with_text(completion) for completion in completions],
            columns=self.columns,
            input=self.input,
            output=self.output,
            attempt=self.attempt,
            think_tokens=None if self.admission.has_channels else (think.begin, think.end) if think else ("", ""),
        )

    def _with_text(self, completion: Completion) -> Completion:
        if not completion.text_due:
            return completion
        assert self.admission.tokenizer is not None
        assert completion.token_ids is not None
        return replace(completion, text=self.admission.tokenizer.decode(completion.token_ids.tolist()), text_due=False)

    def settle(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""
