"""A retry of rows: which ones, from which tokens they go on, and their shard with all other rows as they were.

resume=error   rows whose error may pass: a crash, not a bad prompt
resume=length  rows that decode.max_new_tokens cut off, where it is larger now: they go on from their stored tokens, which a run
               with the larger cap would have begun with too; without stored tokens they are computed anew
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from batchspec.dataset.reader import InputShard
from batchspec.errors import OutputError
from batchspec.packing.admit import Admission
from batchspec.prepare import Job, job_fingerprint
from batchspec.records import Completion, Request, Snapshot
from batchspec.runstate.generations import Generation
from batchspec.runstate.shards import OutputFolder
from batchspec.storage.store import scanning

CAP = "decode.max_new_tokens"
MAY_DIFFER = {"length": (CAP,), "error": (), "none": ()}
TRUNCATED = pl.col("status") == "truncated"
CARRIED = "carried"
"""Status of a stand-in: the output has the row, and it stays."""
Row = Mapping[str, Any]


def new_retry(job: Job, output: OutputFolder) -> Generation | None:
    """The retry that the job's command asks for; None where there is nothing to begin: it was begun before, or no row needs it.

    Raises OutputError where there is no job, where it, or the retry before this one, is not complete, and where the cap is not
    larger.
    """
    kind = job.config.resume.retry
    if kind == "none":
        return None
    if not output.is_job():
        raise OutputError(f"{output.path}: no job was run there that resume={kind} could retry; check output.dir")
    manifest, past = output.manifest, output.retries()
    config = asdict(job.config)
    config["resume"]["retry"], config["resume"]["retry_id"] = "none", 1
    fingerprint = dict(manifest.fingerprint) | {CAP: job_fingerprint(job)[CAP]}
    wanted = Generation(
        number=len(past) + 1, retry=kind, again=job.config.resume.retry_id, fingerprint=fingerprint, config=config, shards=()
    )
    if any(begun.identity == wanted.identity for begun in past):
        if fingerprint != manifest.fingerprint:
            raise OutputError(
                f"{output.path}: the retry with {wanted} was done, and the one with {past[-1]} came after it; "
                f"run the command with {CAP}={manifest.fingerprint[CAP]}"
            )
        return None
    old, new = (json.loads(known[CAP]) for known in (manifest.fingerprint, fingerprint))
    if missing := output.missing():
        before = f"with {past[-1]}" if past else f"with {CAP}={old} and without resume={kind}"
        raise OutputError(f"{output.path}: {len(missing)} shards are not done; run the command {before} to its end, then retry")
    if kind == "length" and (new < old or (new == old and _has_rows_cut_off_at(output, old))):
        raise OutputError(
            f"{output.path}: resume=length {CAP}={new} gives no row more tokens: rows were cut off at {old}; "
            f"run the command with a larger {CAP}"
        )
    shards = _shards_with(output, kind) if kind == "error" or new > old else ()
    return replace(wanted, shards=shards) if shards else None


def _shards_with(output: OutputFolder, kind: str) -> tuple[int, ...]:
    """Shards that may hold a row to retry."""
    failed = (pl.col("status") == "error") & pl.col("error").struct.field("retryable")
    rows = output.scan().filter(failed if kind == "error" else TRUNCATED).select("row_index")
    with scanning(output.path):
        found = rows.collect()["row_index"] // output.manifest.shard_rows
    return tuple(sorted(found.unique().to_list()))


def _has_rows_cut_off_at(output: OutputFolder, cap: int) -> bool:
    """Rows with a smaller cap of their own aside."""
    rows = output.scan().filter(TRUNCATED & (pl.col("usage").struct.field("completion_tokens") == cap)).select("row_index")
    with scanning(output.path):
        return not rows.head(1).collect().is_empty()


class Rebuild(Admission):
    """Admission to a retry: rows that need none come out as stand-ins, the others as requests, with the tokens they had."""

    def __init__(self, job: Job, output: OutputFolder, generation: Generation) -> None:
        super().__init__(job.config, source=job.source, columns=job.columns, spec=job.spec, tokenizer=job.tokenizer)
        self._output, self._kind = output, generation.retry
        self._there = output.committed()
        self._open: dict[int, tuple[pa.Table, str]] = {}

    def has(self, index: int) -> bool:
        """Whether the shard's old rows are there; False where somebody took its file away."""
        return index in self._there

    def _old(self, index: int) -> tuple[pa.Table, str]:
        if index not in self._open:
            self._open[index] = self._output.written(index)
        return self._open[index]

    def admit(self, shard: InputShard) -> Iterator[Request | Completion]:
        if not self.has(shard.index):
            yield from super().admit(shard)
            return
        first, last = shard.first_row, shard.first_row + shard.table.num_rows - 1
        table = self._old(shard.index)[0]
        place = table["row_index"]
        here = table.filter(pc.and_(pc.greater_equal(place, first), pc.less_equal(place, last)))
        names = (
            "row_index",
            "sample_index",
            "status",
            "error",
            "usage",
            "token_ids",
            "prompt_ids",
            "logprobs",
            "spec_decode",
            "perf",
        )
        rows = here.select([name for name in names if name in here.column_names]).to_pylist()
        old = {(row["row_index"], row["sample_index"]): row for row in rows}
        for entry in super().admit(shard):
            yield self._with(entry, old.get((entry.row_index, entry.sample_index)))

    def _with(self, entry: Request | Completion, row: Row | None) -> Request | Completion:
        if row is None:  # an error row stands for all samples of a prompt
            return entry
        if self._kind == "error":
            again = row["status"] == "error" and bool(row["error"]["retryable"])
        else:  # a prompt that the larger cap leaves no room for keeps what it has
            again = isinstance(entry, Request) and row["status"] == "truncated" and entry.device_limit > _num_tokens(row)
        if not again:
            return _stand_in(entry)
        return replace(entry, resumed=_snapshot(entry, row)) if isinstance(entry, Request) else entry

    def commit(self, shard: InputShard, completions: Sequence[Completion], fresh: pa.Table | None) -> bool:
        """Put the shard's file in the place of the old one: the rows of `fresh` and, of all others, the old ones.

        completions  those that are not `carried`; `fresh` is made of them, None if there are none
        """
        if not self.has(shard.index):
            assert fresh is not None
            return self._output.commit(shard.index, fresh)
        table, version = self._old(shard.index)
        del self._open[shard.index]
        if fresh is not None:
            done = {(done.row_index, done.sample_index) for done in completions}
            places = zip(table["row_index"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
            kept = table.filter(pa.array([place not in done for place in places], pa.bool_()))
            table = pa.concat_tables([kept, fresh.replace_schema_metadata(None)])
            order = pc.sort_indices(table, [("row_index", "ascending"), ("sample_index", "ascending")])
            table = table.take(order)
        return self._output.recommit(shard.index, None if fresh is None else table, version)


def carried(completion: Completion) -> bool:
    """Whether it is a stand-in for a row that stays as it is."""
    return completion.status == CARRIED


def _stand_in(entry: Request | Completion) -> Completion:
    return Completion(
        request_id=entry.request_id, row_index=entry.row_index, sample_index=entry.sample_index, shard=entry.shard,
        status=CARRIED, finish_reason=CARRIED,
    )  # fmt: skip


def _num_tokens(row: Row) -> int:
    return int(row["usage"]["completion_tokens"])


def _snapshot(request: Request, row: Row) -> Snapshot | None:
    """Where the output left the row; None where it does not tell, or tells of another prompt (input.on_overlong=truncate)."""
    tokens, prompt, usage = row.get("token_ids"), row.get("prompt_ids"), row["usage"]
    if not tokens or row.get("logprobs") is not None or usage["prompt_tokens"] != len(request.prompt_ids):
        return None
    if prompt is not None and prompt != request.prompt_ids.tolist():
        return None
    spec, perf = row["spec_decode"], row["perf"]
    if spec is None:  # nothing drafted: every token has a prefill or a round of its own
        rounds = min(perf["rounds"] or 0, len(tokens) - 1)
        counts: dict[str, Any] = {"num_prefills": len(tokens) - rounds, "accepted": (rounds,), "drafted": (rounds,)}
    else:
        at_least = [spec["num_spec_steps"], *spec["drafted_per_position"], 0]
        counts = {
            "num_prefills": spec["num_prefills"],
            "accepted": tuple(spec["acceptance_histogram"]),
            "drafted": tuple(more - fewer for more, fewer in itertools.pairwise(at_least)),
            "num_discarded": spec["num_discarded_tokens"],
            "num_forced": spec["num_forced_tokens"],
        }
    return Snapshot(
        row_index=request.row_index,
        sample_index=request.sample_index,
        shard=request.shard,
        tokens=tuple(tokens),
        cached_tokens=usage["cached_tokens"],
        prefill_s=perf["prefill_s"] or 0.0,
        decode_s=perf["decode_s"] or 0.0,
        **counts,
    )
