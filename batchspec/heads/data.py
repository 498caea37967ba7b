"""Completions of a job as training rows: read, split by prompt, packed into batches of similar length. Host side, numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from batchspec.data.dataset.reader import Source
from batchspec.data.dataset.schema import DIGEST
from batchspec.draft.frequent_tokens import most_frequent
from batchspec.errors import InputError
from batchspec.records import ANSWERED, Ids

Numbers = npt.NDArray[np.int64]

_NEIGHBOURS = 64
"""Rows of this many batches are sorted by length together. More would save padding, but make batches less random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A prompt and its completion."""

    ids: Ids
    """int32 [tokens]"""
    prompt_len: int


def read_rows(source: Source, *, vocab_size: int, max_len: int) -> list[Row]:
    """The usable rows: status ok or truncated, cut to max_len, with at least two completion tokens.

    Raises InputError for a data set without prompt_ids or token_ids, with images, with token ids outside the vocabulary, or
    without usable rows.
    """
    for name in ("prompt_ids", "token_ids"):
        kind = str(source.schema.field(name).type) if name in source.schema.names else "not there"
        if not (kind.startswith(("list<", "large_list<")) and "int" in kind):
            raise InputError(
                f"input.path: column {name} is {kind}; train reads the output of a job with output=training "
                "(output.prompt_ids=true output.token_ids=true)"
            )
    prompts, outputs = list(_lists(source, "prompt_ids")), list(_lists(source, "token_ids"))
    status = [str(x) for piece in source.column("status") for x in piece.to_pylist()] if "status" in source.schema.names else []
    rows = []
    digests = [x for piece in source.column(DIGEST) for x in piece.to_pylist()] if DIGEST in source.schema.names else []
    if count := sum(digest is not None for digest in digests):
        raise InputError(
            f"input.path: {count} rows had images (column {DIGEST}), which train does not read; give the output of a job without"
        )
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if status and status[i] not in ANSWERED:
            continue
        ids = np.concatenate((prompt, output))[:max_len].astype(np.int32)
        if len(prompt) and len(ids) >= len(prompt) + 2:
            rows.append(Row(ids=ids, prompt_len=len(prompt)))
    if not rows:
        raise InputError(
            f"input.path: none of {len(prompts)} rows has a prompt and two completion tokens in train.max_len={max_len}; raise it"
        )
    wrong = [int(x) for row in rows for x in (row.ids.min(), row.ids.max()) if not 0 <= x < vocab_size]
    if wrong:
        raise InputError(
            f"input.path: token id {wrong[0]} is outside the target's vocabulary of {vocab_size}: another model's output"
        )
    return rows


def _lists(source: Source, name: str) -> Iterator[Ids]:
    for piece in source.column(name):
        lengths = piece.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        yield from np.split(piece.flatten().to_numpy(zero_copy_only=False), np.cumsum(lengths)[:-1])


def split_rows(rows: list[Row], held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
    """(rows to train on, held-out rows). At least `held_out` rows are held out, drawn by `seed`, each with all rows of its
    prompt.

    Rows of a prompt with more than `held_out` completions are drawn one by one: such a prompt holds no question, only the opening
    of a turn. Raises InputError if no rows are left to train on.
    """
    by_prompt: dict[bytes, list[Row]] = {}
    for row in rows:
        key = blake2b(row.ids[: row.prompt_len].tobytes(), digest_size=16).digest()
        by_prompt.setdefault(key, []).append(row)
    held: list[Row] = []
    trained: list[Row] = []
    groups = [
        group for rows in by_prompt.values() for group in ([rows] if len(rows) <= max(1, held_out) else [[row] for row in rows])
    ]
    for i in np.random.default_rng((seed, 1)).permutation(len(groups)):
        (held if len(held) < held_out else trained).extend(groups[i])
    if not trained:
        what = f"{len(rows)} completions of {len(by_prompt)} prompts"
        raise InputError(f"input.path: {what}, all held out by train.held_out={held_out}; lower it")
    return trained, held


def frequent_ids(rows: list[Row], *, vocab_size: int, count: int, keep: tuple[int, ...]) -> Numbers:
    """[min(count, vocab_size)] target ids in ascending order: `keep`, and the most frequent ones of the completions; a tie gives
    the lower id."""
    counts = np.bincount(np.concatenate([row.ids[row.prompt_len :] for row in rows]), minlength=vocab_size).astype(np.float64)
    counts[[i for i in keep if i < vocab_size]] = np.inf
    return most_frequent(counts, count)


def unused_id(rows: list[Row], vocab_size: int) -> int:
    """The highest token id that occurs in no row, or else the least frequent id: usable as a mask token."""
    counts = np.bincount(np.concatenate([row.ids for row in rows]), minlength=vocab_size)
    return int(vocab_size - 1 - np.argmin(counts[::-1]))


def epoch_batches(lengths: Numbers, *, batch_tokens: int, seed: int, epoch: int) -> list[Numbers]:
    """Row indices of each batch of an epoch, every row once. Number of rows * longest row is at most batch_tokens.

    Deterministic: a resumed training continues with the same batches.
    """
    rng = np.random.default_rng((seed, 2, epoch))
    order = rng.permutation(len(lengths))
    mean = max(1.0, float(lengths.mean()))
    block = max(1, int(_NEIGHBOURS * batch_tokens / mean))
    batches: list[Numbers] = []
    for first in range(0, len(order), block):
        rows = order[first : first + block]
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        begin = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or lengths[rows[end]] * (end + 1 - begin) > batch_tokens:
                batches.append(rows[begin:end])
                begin = end
    return [batches[i] for i in rng.permutation(len(batches))]


def course(lengths: Numbers, *, batch_tokens: int, seed: int, epochs: int, steps: int | None) -> list[Numbers]:
    """The batches of the whole training, in order: those of `epochs` epochs, or as many as `steps`."""
    batches: list[Numbers] = []
    epoch = 0
    while epoch < epochs if steps is None else len(batches) < steps:
        batches += epoch_batches(lengths, batch_tokens=batch_tokens, seed=seed, epoch=epoch)
        epoch += 1
    return batches[:steps]
