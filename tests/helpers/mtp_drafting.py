"""What the tests of the MTP drafter share: models with their references, runs through the engine, and what is wrong in drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchspec.checkpoint.files import LocalFiles
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import ModelConfig, RunConfig
from batchspec.distributed.collectives import Collectives
from batchspec.draft.frequent_tokens import FrequentTokens
from batchspec.draft.mtp import MtpDrafter, MtpDrafterSpec
from batchspec.draft.mtp_head import Mtp
from batchspec.draft.spec import open_drafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.slots.expected_pages import ExpectedPages
from batchspec.model.layers.base import Shard
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request, SamplingParams
from tests.gpu_jobs.entry_points import nothing, of_prompt
from tests.helpers import mtp_definition
from tests.helpers.drafting import Proposals, Recording
from tests.helpers.engines import DEVICE, VOCAB, decode, make_engine, packed, request

CHUNK = 64
"""Tokens of a chunk of the recurrence: prompts are cut and shared at multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    target: Target
    weights: Mtp
    """What the drafter computes with."""
    mtp: mtp_definition.Mtp


def drafter_spec(folder: Path, spec: ModelSpec, **draft: Any) -> MtpDrafterSpec:
    """What a job with draft=mtp opens; draft: other keys of DraftConfig."""
    config = RunConfig(
        model=ModelConfig(path=str(folder)), draft=DraftConfig(**{"name": "mtp", "num_speculative_tokens": 3, **draft})
    )
    found = open_drafter(config, spec)
    assert isinstance(found, MtpDrafterSpec)
    return found


def load_model(folder: Path, dtype: torch.dtype = torch.float64, *, ranks: Collectives | None = None, **draft: Any) -> Model:
    """The model and its MTP layer, read as a job does; or what one of the ranks holds of both."""
    spec = judge_model(LocalFiles(folder))
    own = drafter_spec(folder, spec, **draft)
    if ranks is not None:
        shard = Shard(ranks.rank, ranks.ranks)
        spec, own = spec.sharded(shard), own.of_rank(shard)
    return Model(
        target=Target.load(folder, spec, dtype=dtype, device=DEVICE, ranks=ranks), weights=own.load(dtype=dtype, device=DEVICE),
        mtp=mtp_definition.read_mtp(folder),
    )


class Recorded(Recording, MtpDrafter):
    """Keeps what it proposed."""


def drafter_of(
    model: Model, draft_len: int, *, slots: int, vocabulary: FrequentTokens | None = None, **options: Any
) -> Recorded:
    return Recorded(replace(model.weights, vocabulary=vocabulary), model.target, draft_len, slots=slots, **options)


@contextmanager
def trusting() -> Iterator[None]:
    """Rows enter slots as soon as there are pages for their prompts, so that pages run out and rows are preempted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpectedPages, "of_waiting", of_prompt)
        patch.setattr(ExpectedPages, "promised", nothing)
        yield


@dataclass(frozen=True, slots=True)
class Ran:
    done: dict[str, Completion]
    engine: Engine

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: one.token_ids.tolist() for name, one in self.done.items() if one.token_ids is not None}


def run(target: Target, requests: Sequence[Request], batch: PackedBatch, drafter: Any, **options: Any) -> Ran:
    """All rows through an engine, whose pages all come back; options are those of `make_engine`."""
    engine = make_engine(target, drafter, batch, device=DEVICE, **{"decode": decode, **options})
    done = {one.request_id: one for one in engine.run(iter(requests))}
    assert len(done) == len(requests)
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)
    return Ran(done, engine)


def wide_batch(slots: int, draft_len: int, **changes: Any) -> PackedBatch:
    """Prompts of more than a chunk in several passes, and pages for all rows."""
    usual: dict[str, Any] = {"page_size": 4, "num_pages": 400, "max_len": 240, "prefill_tokens": CHUNK, "num_verified": draft_len}
    return packed(slots, **{**usual, **changes})


def mixed_requests(count: int = 6, cap: int = 20, sampling: SamplingParams | None = None) -> list[Request]:
    """Prompts from one token to more than two chunks; the longer ones of odd number have a chunk in common."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(0, VOCAB, CHUNK + 3).tolist()
    lengths = [1, 9, 40, 67, 130, 3, 12, 90]
    prompts = [rng.integers(0, VOCAB, lengths[i % len(lengths)]).tolist() for i in range(count)]
    prompts = [beginning + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]
    return [request(i, prompt, cap=cap - i % 5, sampling=sampling, predicted=2) for i, prompt in enumerate(prompts)]


ChooseOf = Callable[[tuple[int, ...]], mtp_definition.Choose]
"""The committed tokens of a row -> how its drafts are chosen."""


def greedily(beginning: tuple[int, ...]) -> mtp_definition.Choose:
    return mtp_definition.most_probable


def wrong_drafts(model: Model, seen: Proposals, choose_of: ChooseOf = greedily) -> list[tuple[int, list[int], list[int]]]:
    """Of each proposal that is not the reference's: number of tokens before it, what was drafted, what had to be."""
    assert seen, "nothing was drafted"
    rows, found = mtp_definition.Rows(model.mtp, model.target, [prefix for prefix, _ in seen]), []
    for prefix, drafts in seen:
        wanted = rows.drafts(prefix, len(drafts), choose_of(prefix))
        if drafts != wanted:
            found.append((len(prefix), drafts, wanted))
    return found


def num_drafted(seen: Proposals) -> int:
    return sum(len(drafts) for _, drafts in seen)
