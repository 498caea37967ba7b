"""Rows with images in the engine: the tokens of transformers, whatever slots, chunks, pages, drafts and other rows are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchspec.config.schema import RunConfig
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.window import WindowDrafter
from batchspec.engine.features import RowFeatures, images
from batchspec.engine.loop.executor import Executor
from batchspec.engine.slots import expected_pages
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import Features
from batchspec.engine.step import ScheduledStep
from batchspec.images import prepared_images as module
from batchspec.images.prepared_images import PreparedImages
from batchspec.job.load import build
from batchspec.job.load.build import prepared_images
from batchspec.model.target import Target
from batchspec.packing.equal_rows import answer_key
from batchspec.packing.order import order_requests
from batchspec.records import Completion, Request, SamplingParams, Thinking
from tests.helpers.engines import ForcedDrafter, packed
from tests.helpers.image_models import (
    PAD,
    ImagesInOrder,
    encoded,
    generated,
    image_engine,
    image_request,
    image_target,
    inputs_of,
    make_image_model,
    picture,
    theirs,
)
from tests.images.test_prepared_images import killing, slow_piece

KINDS = ("qwen3_5", "qwen3_vl", "qwen2_5_vl", "mistral3", "lighton_ocr", "glm_ocr")
MOE = "qwen3_5_moe"
A, B, C = picture(30, 50, 1), picture(60, 20, 2), picture(50, 70, 3)
ROWS: tuple[tuple[int | bytes, ...], ...] = (
    (9,), (A, 7), (5, B, 1, C, 3, picture(10, 10, 4)), (3, picture(100, 20, 5)), (70, C, 2), (C,),
)
"""None, one, three images, at the very beginning and end of a prompt."""
BATCH = packed(slots=3, max_len=256, num_pages=400, prefill_tokens=64)
ONE_SLOT = replace(BATCH, num_slots=1, row_buckets=(1,))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_image_model(folder / MOE, MOE, seed=3)
    for kind in KINDS:
        make_image_model(folder / kind, kind, seed=3)
        make_image_model(folder / f"{kind}-64", kind, seed=3, dtype=torch.float64)
    return folder


def rows_of(target: Target, cap: int, **more: Any) -> list[Request]:
    return [image_request(i, target.spec, parts, cap=cap, seed=i, **more) for i, parts in enumerate(ROWS)]


def tokens(done: Sequence[Completion]) -> dict[str, list[int]]:
    assert [one.error for one in done] == [None] * len(done)
    return {one.request_id: one.token_ids.tolist() for one in done if one.token_ids is not None}


@pytest.mark.second
@pytest.mark.parametrize("chunk", [64, 23])
@pytest.mark.parametrize("kind", KINDS)
def test_sixty_four_greedy_tokens_are_those_of_transformers(kind: str, chunk: int, models: Path) -> None:
    """With 23 tokens a pass, chunks end inside images, if the model lets chunks end there."""
    target, folder = image_target(models / kind), models / kind
    requests = rows_of(target, 64)
    batch = replace(BATCH, prefill_tokens=max(chunk, target.spec.prefill_multiple or 1))
    found = tokens(list(image_engine(target, NoDrafter(), batch).run(requests)))
    model = theirs(folder)
    for one in requests:
        expected = generated(model, folder, one.prompt_ids.tolist(), [encoded(piece) for piece in one.images], 64)
        assert found[one.request_id][: len(expected)] == expected, one.request_id
        assert len(expected) == 64 or expected[-1] == PAD


@pytest.mark.second
@pytest.mark.parametrize("kind", [*KINDS, MOE])
def test_log_probabilities_are_those_of_transformers(kind: str, models: Path) -> None:
    """Of the likeliest 20 tokens after the prompt and after each token of the answer."""
    target, model = image_target(models / kind), theirs(models / kind)
    requests = rows_of(target, 6)
    for done in image_engine(target, NoDrafter(), BATCH, num_top=20).run(requests):
        one = next(one for one in requests if one.request_id == done.request_id)
        assert done.top_logprobs is not None
        assert done.token_ids is not None
        ids, values = done.top_logprobs
        answer = done.token_ids.tolist()
        answer = answer[: answer.index(PAD)] if PAD in answer else answer  # transformers would look for another image
        with torch.no_grad():
            inputs = inputs_of(models / kind, [*one.prompt_ids.tolist(), *answer], [encoded(piece) for piece in one.images])
            expected = model(**inputs).logits[0, len(one.prompt_ids) - 1 :].log_softmax(-1)[: len(values)]
        likeliest = torch.from_numpy(ids[: len(expected)]).long()
        torch.testing.assert_close(torch.from_numpy(values[: len(expected)]), expected.gather(1, likeliest), atol=1e-4, rtol=0)


@pytest.mark.second
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, repetition_penalty=1.2)])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_drafts_slots_pages_or_chunks(
    kind: str, sampling: SamplingParams, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64. With few pages rows are preempted: their images are decoded, encoded and placed again."""
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    target = image_target(models / f"{kind}-64", torch.float64)
    requests = rows_of(target, 40, sampling=sampling, predicted=2)
    alone: dict[str, list[int]] = {}
    for one in requests:
        alone |= tokens(list(image_engine(target, NoDrafter(), replace(ONE_SLOT, prefill_tokens=256)).run([one])))
    least = target.spec.prefill_multiple or 7
    outputs = {one.seed: alone[one.request_id] for one in requests}
    drafters: tuple[Any, ...] = (
        NoDrafter(), LookupDrafter(4, min_ngram=1, max_ngram=3), ForcedDrafter(3, outputs, right=True, fixed_len=True),
        ForcedDrafter(3, outputs, right=False, fixed_len=False),
    )
    preempted = 0
    for number, drafter in enumerate(drafters):
        slots = replace(BATCH, num_slots=2 + number, row_buckets=(1, 2 + number))
        batch = replace(slots, prefill_tokens=least * (1 + number), run_ahead=number % 2)
        for pages in (400, 48):
            engine = image_engine(
                target, drafter, replace(batch, num_pages=pages), kept_images=8 * number, prepared=ImagesInOrder()
            )
            done = list(engine.run(requests))
            assert tokens(done) == alone, (drafter.name, pages)
            preempted += engine.totals.preempted
    assert preempted


@pytest.mark.second
@pytest.mark.parametrize("window", [250, 9])
def test_the_model_drafts_for_itself_with_the_positions_that_it_verifies_with(window: int, models: Path) -> None:
    """In float64: with a window over the whole row every draft is accepted, with a smaller one some are not."""
    target = image_target(models / "qwen3_vl-64", torch.float64)
    requests = rows_of(target, 20)
    expected = tokens(list(image_engine(target, NoDrafter(), BATCH).run(requests)))
    drafter = WindowDrafter(target, 3, slots=BATCH.num_slots, window=window)
    done = list(image_engine(target, drafter, BATCH).run(requests))
    assert tokens(done) == expected
    drafted, accepted = (sum(getattr(one.stats, name) for one in done) for name in ("num_drafted", "num_accepted"))
    assert (drafted == accepted) == (window == 250)
    assert accepted > 0


@pytest.mark.second
def test_log_probabilities_do_not_depend_on_where_chunks_cut_a_prompt_with_three_images(models: Path) -> None:
    """In float64, with the deepstack of Qwen3-VL; with few embeddings kept, an image is encoded again for its second chunk."""
    target = image_target(models / "qwen3_vl-64", torch.float64)
    one = image_request(0, target.spec, ROWS[2], cap=3)
    found = []
    for chunk in range(1, len(one.prompt_ids) + 1, 3):
        batch = replace(ONE_SLOT, prefill_tokens=chunk)
        (done,) = image_engine(target, NoDrafter(), batch, kept_images=chunk % 2 * 64, num_top=20).run([one])
        assert done.top_logprobs is not None
        found.append(done.top_logprobs)
    for ids, values in found[1:]:
        assert (ids == found[0][0]).all()
        np.testing.assert_allclose(values, found[0][1], atol=1e-6)


def test_rows_that_bring_more_pixels_than_fit_together_enter_one_after_another(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = image_target(models / "qwen3_vl")
    requests = rows_of(target, 5)
    expected = tokens(list(image_engine(target, NoDrafter(), BATCH).run(requests)))
    groups = list[int]()
    take = images.RowImages.take_commands

    def counted(self: images.RowImages) -> Any:
        found = take(self)
        groups.append(len(found.images))
        return found

    monkeypatch.setattr(images.RowImages, "take_commands", counted)
    monkeypatch.setattr(images, "MOST_BYTES", 1)
    assert tokens(list(image_engine(target, NoDrafter(), BATCH).run(requests))) == expected
    assert sum(groups) == 5
    assert max(groups) == 1


def test_between_rows_that_do_not_enter_together_the_device_gets_a_round(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pixels are there. The device has a prefill and a round to compute while the host takes the pixels of the next row."""
    target, launched = image_target(models / "qwen3_vl"), list[str]()
    requests = [image_request(i, target.spec, (3 + i, picture(30, 50, i)), cap=4) for i in range(3)]
    engine = image_engine(target, NoDrafter(), BATCH, prepared=ImagesInOrder())
    expected = tokens(list(engine.run(requests)))
    execute = Executor.execute

    def noted(self: Executor, step: ScheduledStep) -> None:
        launched.extend(f"row {refill.request.row_index}" for refill in step.refills)
        launched.extend(["round"] if step.round is not None else [])
        execute(self, step)

    monkeypatch.setattr(Executor, "execute", noted)
    monkeypatch.setattr(images, "MOST_BYTES", 1)
    assert tokens(list(engine.run(requests))) == expected
    assert launched[:5] == ["row 0", "round", "row 1", "round", "row 2"]


def test_a_job_that_decodes_nothing_expects_images_too(models: Path) -> None:
    target, prepared = image_target(models / "qwen3_vl"), ImagesInOrder()
    assert target.image_encoder is not None
    one = image_request(0, target.spec, (A, 7), cap=1)
    images.WithImages(Features(), target.image_encoder, 64, prepared).expect([one])
    (found,) = prepared.take(one) or ()
    assert found.shape == (one.images[0].height, one.images[0].width, 3)


def test_rows_that_differ_in_an_image_alone_share_no_page_of_it_and_samples_share_all(models: Path) -> None:
    target = image_target(models / "qwen3_vl")
    pictures = [picture(30, 50, seed) for seed in (1, 2, 1)]
    requests = [image_request(i, target.spec, (9, one, 12), cap=8) for i, one in enumerate(pictures)]
    assert len({one.prompt_ids.tobytes() for one in requests}) == 1
    done = {one.request_id: one for one in image_engine(target, NoDrafter(), ONE_SLOT).run(requests)}
    assert [done[f"r{i}"].cached_tokens for i in range(3)] == [0, 8, 44]  # pages of 4 tokens; the image begins at 9
    found = tokens(list(done.values()))
    assert found["r0"] == found["r2"]
    assert found["r0"] != found["r1"]
    assert len({answer_key(one) for one in requests}) == 2
    assert [one.row_index for one in order_requests(requests, page_size=16)] == [0, 2, 1]


def test_an_image_is_encoded_once_for_all_rows_that_have_it(models: Path) -> None:
    target, calls = image_target(models / "qwen3_vl"), list[int]()
    assert target.image_encoder is not None
    encode = target.image_encoder.encode

    def counted(images: Sequence[Any]) -> list[torch.Tensor]:
        calls.append(len(images))
        return encode(images)

    target.image_encoder.encode = counted  # type: ignore[method-assign]
    requests = [image_request(i, target.spec, (2 + i, C, 3), cap=4) for i in range(5)]
    tokens(list(image_engine(target, NoDrafter(), BATCH, kept_images=200).run(requests)))
    assert calls == [1]


def test_a_cut_image_fails_its_row_and_no_other(models: Path) -> None:
    target = image_target(models / "qwen3_vl")
    requests = rows_of(target, 4)
    cut = replace(requests[1].images[0], source=A[: len(A) // 2])
    requests[1] = replace(requests[1], images=(cut,))
    done = {one.request_id: one for one in image_engine(target, NoDrafter(), BATCH).run(requests)}
    error = done["r1"].error
    assert error is not None
    assert (error.code, error.retryable) == ("bad_image", False)
    assert error.message.startswith("row 1 (id 'r1'): image 1 of 1: Pillow cannot read it")
    assert sum(one.error is None for one in done.values()) == len(requests) - 1


def cut_in_half(one: Request) -> Request:
    """The row with the first half of its only image."""
    (piece,) = one.images
    return replace(one, images=(replace(piece, source=encoded(piece)[: len(encoded(piece)) // 2]),))


@pytest.mark.parametrize("pattern", ["1", "01", "11", "10", "011", "110"])
@pytest.mark.parametrize("slots", [1, 3])
def test_rows_with_a_cut_image_complete_wherever_they_stand(slots: int, pattern: str, models: Path) -> None:
    """1: a row with a cut image. No row may be in a slot when the last rows that wait turn out bad."""
    target = image_target(models / "qwen3_vl")
    rows = [image_request(i, target.spec, (3, picture(30, 50, i)), cap=3) for i in range(len(pattern))]
    requests = [cut_in_half(one) if bad == "1" else one for one, bad in zip(rows, pattern, strict=True)]
    found = list(image_engine(target, NoDrafter(), replace(BATCH, num_slots=slots, row_buckets=(slots,))).run(requests))
    codes = {one.row_index: "" if one.error is None else one.error.code for one in found}
    assert codes == {i: "bad_image" if bad == "1" else "" for i, bad in enumerate(pattern)}
    assert len(found) == len(pattern)


def test_pixels_are_kept_of_one_row_that_cannot_enter_yet(models: Path) -> None:
    """A row that waits for something else has none, and a row whose pixels are made still enters within the limit."""
    target = image_target(models / "qwen3_vl")
    requests = [image_request(i, target.spec, (3, picture(30, 50, i)), cap=2) for i in range(4)]
    prepared = prepared_images(target.spec, 64)
    assert prepared is not None
    own = images.RowImages(prepared)
    rows = [RequestState.of(one, 0) for one in requests]

    def comes(state: RequestState) -> bool:
        """Whether it is ready once its pixels are made."""
        assert own.arrive(state)
        wait(own.pending())
        return own.ready(state)

    assert all(map(comes, rows[:3]))
    assert own._made is not None
    assert own._made[0] is rows[2]
    rows[2].slot = 0
    own.enter(rows[2])
    assert comes(rows[1])
    rows[3].slot = 1
    own.enter(rows[3])  # it goes on in its slot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "MOST_BYTES", 1)
        assert not own.ready(rows[1])
    assert [slot for slot, _ in own.take_commands().images] == [0]
    assert own.ready(rows[1])
    engine = image_engine(target, NoDrafter(), BATCH, num_top=1)
    *_, last = engine.features.begin(engine._current.slots, engine.pools)
    assert isinstance(last, images.RowImages)


@pytest.mark.second
def test_tokens_stay_the_same_while_the_processes_that_make_pixels_are_killed(models: Path) -> None:
    target = image_target(models / "qwen3_vl")
    requests = [image_request(i, target.spec, (3, encoded(slow_piece(i))), cap=3) for i in range(4)]
    expected = tokens(list(image_engine(target, NoDrafter(), BATCH).run(requests)))
    engine = image_engine(target, NoDrafter(), BATCH)
    assert isinstance(engine.features, RowFeatures)
    assert engine.features.prepared is not None
    with killing(engine.features.prepared, most=3) as killed:
        assert tokens(list(engine.run(requests))) == expected
    assert len(killed) == 3


@pytest.mark.second
@pytest.mark.parametrize("kind", KINDS)
def test_a_thought_beside_images_is_closed_and_the_answer_follows_from_both(kind: str, models: Path) -> None:
    """The row is prefilled again with the closing tokens that were not the model's, and with its images."""
    target, folder = image_target(models / kind), models / kind
    one = image_request(0, target.spec, (5, B, 1, C, 3), cap=24)
    thinking = Thinking(begin_id=None, end_id=4, opened=True, budget=6, closing=(11, 4))
    (free,) = tokens(list(image_engine(target, NoDrafter(), ONE_SLOT).run([one]))).values()
    (done,) = image_engine(target, NoDrafter(), ONE_SLOT).run([replace(one, thinking=thinking)])
    assert done.token_ids is not None
    assert done.reasoning_truncated
    found = done.token_ids.tolist()
    assert found[:8] == [*free[:6], 11, 4]
    ids = [*one.prompt_ids.tolist(), *found[:8]]
    assert found[8:] == generated(theirs(folder), folder, ids, [encoded(piece) for piece in one.images], 16)
    assert found[8:] != free[8:]


def test_a_slot_that_had_an_image_has_the_positions_of_its_next_row(models: Path) -> None:
    """In one slot, rows with and without images in turn."""
    target = image_target(models / "qwen3_vl")
    requests = [image_request(i, target.spec, (C, 3) if i % 2 else (7,), cap=6, seed=i) for i in range(6)]
    alone = [tokens(list(image_engine(target, NoDrafter(), ONE_SLOT).run([one]))) for one in requests]
    found = tokens(list(image_engine(target, NoDrafter(), ONE_SLOT).run(requests)))
    assert found == {name: own for one in alone for name, own in one.items()}


def test_the_workers_of_a_run_share_the_cpus(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked, made = image_target(models / "qwen3_vl"), list[int](), PreparedImages

    def make(*, num: int, **more: Any) -> PreparedImages:
        asked.append(num)
        return made(num=num, **more)

    monkeypatch.setattr(module, "num_cpus", lambda: 40)
    monkeypatch.setattr(build, "PreparedImages", make)
    for workers in ("auto", 4):
        config = RunConfig()
        config.cluster.workers = workers
        build.build_engine(config, target, NoDrafter(), BATCH)
    assert asked == [30, 8]
