"""The reference run of a group, and the outcome of a case that is compared with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import polars as pl
import pytest

import batchspec
from batchspec.config.overrides import overrides_of
from batchspec.engine.slots import allocator
from tests.gpu_jobs.cases import Group
from tests.gpu_jobs.compare import Rows, rows_of
from tests.gpu_jobs.rows import Row

_TEXT, _WHOLE, _TEXTS = pl.String(), pl.Int64(), pl.List(pl.String())
TYPES: dict[str, pl.DataType] = {
    "id": _TEXT, "prompt": _TEXT, "prompt_ids": pl.List(pl.Int64()), "stop": _TEXTS, "bad_words": _TEXTS, "choice": _TEXTS,
    "messages": pl.List(pl.Struct({"role": pl.String(), "content": pl.String()})),
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_k", "seed", "n", "thinking_token_budget"), _WHOLE),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), pl.Float64()
    ),
    "images": pl.List(pl.Binary()),
    **dict.fromkeys(("logit_bias", "no_repeat_ngram", "schema", "regex", "grammar", "response_format", "adapter"), _TEXT),
}


class Failed(Exception):
    """A case whose rows cannot be compared, such as a command that hangs."""


@dataclass(kw_only=True)
class Outcome:
    """What a case computed, and which of its rows differ."""

    rows: int = 0
    tokens: int = 0
    accepted: int = 0
    """Draft tokens."""
    preempted: int = 0
    """Rows that were prefilled more than once."""
    resumed: int = 0
    """Jobs that several runs wrote."""
    lines: list[str] = field(default_factory=list)
    """One for each row that differs: its first difference."""
    refused: str = ""

    def add(self, frame: pl.DataFrame) -> None:
        self.rows += frame.height
        self.tokens += int(frame["token_ids"].list.len().sum())
        if frame["spec_decode"].null_count() < frame.height:
            stats = frame["spec_decode"].struct
            self.accepted += int(stats.field("num_accepted_draft_tokens").sum())
            self.preempted += int((stats.field("num_prefills") > 1).sum())


def frame_of(rows: Sequence[Row]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema={name: TYPES[name] for name in rows[0]})


@contextmanager
def no_shared_prefixes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocator, "prefix_hashes", lambda *given, **more: [])
        yield


class Plain:
    """The reference run of a group: a fresh engine, no drafts, enough pages, no page that two rows share."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @cached_property
    def engine(self) -> batchspec.Engine:
        return batchspec.Engine(overrides_of({**self.group.keys, **self.group.plain}))

    @cached_property
    def rows(self) -> Rows:
        with no_shared_prefixes():
            frame = self.engine.generate(frame_of(self.group.rows))
        if self.engine.totals.preempted:
            raise Failed("the reference run has preempted rows; give it more pages")
        return rows_of(frame, self.group.rows[0])

    @cached_property
    def rows_of_other(self) -> Rows:
        """With other weights."""
        keys = {**self.group.keys, **self.group.plain, "model.path": str(self.group.model.other)}
        with no_shared_prefixes(), batchspec.Engine(overrides_of(keys)) as engine:
            return rows_of(engine.generate(frame_of(self.group.rows)), self.group.rows[0])

    def close(self) -> None:
        if "engine" in self.__dict__:
            self.engine.close()
