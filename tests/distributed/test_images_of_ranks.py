"""Images of a model that several ranks compute: each encodes a part of them, all get the rows of all, and tokens are those of one
process. In float64, where sums over ranks differ from one product by rounding alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.row_commands import RowCommands
from batchspec.distributed.channel import Channel, make_memory
from batchspec.distributed.collectives import Collectives
from batchspec.draft.base import Drafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.follower import follow
from batchspec.engine.ranks.lead import Lead
from batchspec.engine.ranks.messages import End, Step, decode, encode
from batchspec.engine.slots import expected_pages
from batchspec.engine.step import Refill, ScheduledStep
from batchspec.model.layers.base import Shard
from batchspec.model.target import Target
from batchspec.model.vision import of_ranks
from batchspec.model.vision.of_ranks import EncoderOfRanks, encoding_bytes, owners_of
from batchspec.records import Request, SamplingParams
from tests.engine.test_images import tokens
from tests.helpers.engines import DEVICE, packed
from tests.helpers.image_models import (
    ImagesInOrder,
    image_engine,
    image_request,
    image_target,
    make_image_model,
    picture,
)
from tests.helpers.ranks import bits, on_ranks
from tests.helpers.replaying import state_digest

DOUBLE = torch.float64
KINDS = ("qwen3_5", "qwen3_vl", "qwen2_5_vl", "mistral3", "glm_ocr", "gemma4", "gemma4_small", "gemma4_unified")
A, B, C = picture(30, 50, 1), picture(60, 20, 2), picture(50, 70, 3)
ROWS: tuple[tuple[int | bytes, ...], ...] = ((9,), (A, 7), (5, B, 1, C, A, 3), (4, A, 2, A), (30, C, 2), (C,))
"""None, one, three images; equal ones within a row and in several rows."""
BATCH = packed(slots=3, max_len=320, num_pages=500, prefill_tokens=75, num_verified=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        make_image_model(folder / kind, kind, seed=4, dtype=DOUBLE)
    return folder


def part_of(folder: Path, ranks: Collectives) -> Target:
    """What a rank holds of the model of a folder."""
    spec = image_target(folder, DOUBLE).spec.sharded(Shard(ranks.rank, ranks.ranks))
    return Target.load(folder, spec, dtype=DOUBLE, device=DEVICE, ranks=ranks)


def pixels_of(target: Target, sizes: Sequence[tuple[int, int]]) -> list[NDArray[np.uint8]]:
    """Noise of the sizes to which images of these sizes are resized."""
    assert target.spec.vision is not None
    rng, fit = np.random.default_rng(5), target.spec.vision.processor.fit
    return [rng.integers(0, 256, (*fit(*size), 3), dtype=np.uint8) for size in sizes]


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 8))
def test_no_rank_has_more_than_its_share_and_an_image(sizes: list[int], ranks: int) -> None:
    found = owners_of(sizes, ranks)
    pixels = [sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(pixels) == sum(sizes)
    assert max(pixels) <= sum(sizes) / ranks + max(sizes, default=0)
    assert len({*found}) == min(ranks, len(sizes))


def test_the_largest_images_are_divided_first() -> None:
    assert owners_of([3, 9, 4, 4], 2) == [1, 0, 1, 1]
    assert owners_of([5, 5, 5], 4) == [0, 1, 2]


@dataclass
class Encoded:
    """What a rank gets, and what it encodes."""

    rows: list[Tensor]
    own: list[tuple[int, ...]]


def encoded_by(ranks: Collectives, folder: Path, sizes: Sequence[tuple[int, int]]) -> Encoded:
    target, own = part_of(folder, ranks), list[tuple[int, ...]]()
    encoder = target.image_encoder
    assert isinstance(encoder, EncoderOfRanks)
    encode_own = encoder._own.encode

    def counted(images: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        own.extend(image.shape for image in images)
        return encode_own(images)

    encoder._own.encode = counted  # type: ignore[method-assign]
    return Encoded(encoder.encode(pixels_of(target, sizes)), own)


SIZES = [(30, 50), (60, 20), (50, 70), (30, 50), (10, 10)]


@pytest.mark.parametrize("exchanged", [1024, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_get_the_rows_of_all_images_and_each_encodes_a_part(
    kind: str, exchanged: int, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanged whole, and 5 rows at a time, which cuts images."""
    monkeypatch.setattr(of_ranks, "EXCHANGED", exchanged)
    whole = image_target(models / kind, DOUBLE)
    images = pixels_of(whole, SIZES)
    assert whole.image_encoder is not None
    expected = whole.image_encoder.encode(images)
    found = on_ranks(2, lambda ranks: encoded_by(ranks, models / kind, SIZES))
    owners = owners_of([image.size for image in images], 2)
    for rank, one in enumerate(found):
        assert one.own == [image.shape for image, owner in zip(images, owners, strict=True) if owner == rank]
        for own, right, first in zip(one.rows, expected, found[0].rows, strict=True):
            torch.testing.assert_close(own, right, rtol=1e-12, atol=1e-12)
            assert bits(own) == bits(first)
    assert {*owners} == {0, 1}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_images_than_ranks(count: int, models: Path) -> None:
    expected = image_target(models / "qwen3_vl", DOUBLE)
    assert expected.image_encoder is not None
    right = expected.image_encoder.encode(pixels_of(expected, SIZES[:count]))
    found = on_ranks(4, lambda ranks: encoded_by(ranks, models / "qwen3_vl", SIZES[:count]))
    assert [len(one.own) for one in found] == [1] * count + [0] * (4 - count)
    for one in found:
        for own, row in zip(one.rows, right, strict=True):
            torch.testing.assert_close(own, row, rtol=1e-12, atol=1e-12)


def test_memory_of_encoding_counts_what_ranks_exchange(models: Path) -> None:
    vision = image_target(models / "qwen3_vl", DOUBLE).spec.vision
    assert vision is not None
    alone = vision.activation_bytes(DOUBLE)
    assert encoding_bytes(vision, DOUBLE, 1, 1 << 30) == alone
    assert encoding_bytes(vision, DOUBLE, 2, 10) == alone
    assert encoding_bytes(vision, DOUBLE, 8, 1 << 30) == vision.row_bytes(DOUBLE) * ((2 << 30) + 9 * 1024)


def test_a_rank_gets_pixels_and_places_of_images_without_the_encoded_ones(models: Path) -> None:
    spec = image_target(models / "qwen3_vl", DOUBLE).spec
    one = image_request(0, spec, (5, B, 1, C), cap=3)
    pixels = tuple(np.full((piece.height, piece.width, 3), i, np.uint8) for i, piece in enumerate(one.images))
    refill = Refill(slot=1, request=one, tokens=(), pages=((1,),), num_cached=0)
    sent = encode(Step(ScheduledStep(refills=(refill,), commands=RowCommands(images=((1, pixels),))), 1))
    assert B not in sent
    assert C not in sent
    back = decode(sent)
    assert isinstance(back, Step)
    assert back.step.refills[0].request.images == one.images
    ((slot, found),) = back.step.commands.images
    assert slot == 1
    for own, right in zip(found, pixels, strict=True):
        assert own.dtype == right.dtype
        assert np.array_equal(own, right)


@pytest.fixture
def handle() -> Iterator[int]:
    made = make_memory()
    yield made
    os.close(made)


def rows_of(target: Target, cap: int, **more: Any) -> list[Request]:
    return [image_request(i, target.spec, parts, cap=cap, seed=i, **more) for i, parts in enumerate(ROWS)]


def drafter_of(name: str, target: Target, slots: int) -> Drafter:
    if name == "window":
        return WindowDrafter(target, 3, slots=slots, window=40)
    return NoDrafter() if name == "none" else LookupDrafter(4, min_ngram=1, max_ngram=3)


@pytest.mark.second
@pytest.mark.parametrize(("kind", "drafts"), [
    ("qwen3_5", "lookup"), ("qwen3_vl", "window"), ("gemma4", "window"), ("gemma4_small", "none"), ("mistral3", "lookup"),
])
def test_ranks_have_the_tokens_of_one_process(
    kind: str, drafts: str, handle: int, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few pages rows are preempted and placed again; with few embeddings kept, images are encoded again."""
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    whole = image_target(models / kind, DOUBLE)
    requests = rows_of(whole, 30, sampling=SamplingParams(temperature=1.0, repetition_penalty=1.2), predicted=2)
    alone: dict[str, list[int]] = {}
    one_slot = replace(BATCH, num_slots=1, row_buckets=(1,), prefill_tokens=320)
    for request in requests:
        alone |= tokens(list(image_engine(whole, NoDrafter(), one_slot).run([request])))
    pages = 72 if kind.startswith("gemma4") else 44
    batch = replace(BATCH, num_pages=pages, prefill_tokens=max(BATCH.prefill_tokens, whole.spec.prefill_multiple or 1))

    def one(ranks: Collectives) -> tuple[dict[str, list[int]], int, bytes]:
        target, end = part_of(models / kind, ranks), Channel(handle, ranks.rank, 2)
        leading = Lead(end) if ranks.rank == 0 else None
        engine = image_engine(
            target, drafter_of(drafts, target, batch.num_slots), batch, kept_images=30, prepared=ImagesInOrder({2: 4, 4: 1}),
            lead=leading,
        )
        if leading is None:
            follow(end, engine)
            return {}, 0, state_digest(engine.executor)
        found: dict[str, list[int]] = {}
        try:
            assert tokens(list(engine.run(requests))) == alone
            found = tokens(list(engine.run(requests)))  # finds encoded images of the first run
        except BaseException:
            end.lose(0)
            raise
        leading.send(End())
        return found, engine.totals.preempted, state_digest(engine.executor)

    (found, preempted, own), (_, _, other) = on_ranks(2, one)
    assert found == alone
    assert preempted
    assert own == other
