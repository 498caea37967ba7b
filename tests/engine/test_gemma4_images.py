"""Rows with images of Gemma 4, whose tokens attend to each other in layers with a window: the tokens and log-probabilities of
transformers, whatever slots, chunks, pages and drafts are; passes never end inside such an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.batch.images import last_keys
from batchspec.checkpoint.files import LocalFiles, stored_tensors
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop import refills
from batchspec.engine.loop.refills import chunks
from batchspec.engine.slots import expected_pages
from batchspec.model.layers.attention.block import AttentionSpec
from batchspec.model.layers.layer_inputs import LayerInputs
from batchspec.model.target import Target
from batchspec.model.weight_checks import check_tensors
from batchspec.records import Request, SamplingParams
from tests.engine.test_images import tokens
from tests.helpers.engines import ForcedDrafter, packed
from tests.helpers.image_models import (
    GEMMA4_KINDS,
    PAD,
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

A, B, C = picture(30, 50, 1), picture(60, 20, 2), picture(10, 900, 3)
ROWS: tuple[tuple[int | bytes, ...], ...] = ((9,), (A, 7), (5, B, 1, C, A, 3), (40, C, 2), (C,))
"""None, one, three images of 60 to 70 tokens, at the beginning and end of a prompt, one after another. The window is 33, that
of gemma4_unified 90."""
BATCH = packed(slots=3, max_len=320, num_pages=500, prefill_tokens=200)
ONE_SLOT = replace(BATCH, num_slots=1, row_buckets=(1,))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in GEMMA4_KINDS:
        make_image_model(folder / kind, kind, seed=4)  # with 3, transformers in fp32 is 1e-3 from itself in fp64 at one token
    make_image_model(folder / "double", "gemma4", seed=4, dtype=torch.float64)
    return folder


def rows_of(target: Target, cap: int, **more: Any) -> list[Request]:
    return [image_request(i, target.spec, parts, cap=cap, seed=i, **more) for i, parts in enumerate(ROWS)]


@pytest.mark.second
@pytest.mark.parametrize(
    ("kind", "chunk"),
    [
        ("gemma4", 200), ("gemma4", 70), ("gemma4_moe", 75), ("gemma4_small", 200), ("gemma4_small", 23), ("gemma4_unified", 75),
    ],
)  # fmt: skip
def test_sixty_four_greedy_tokens_are_those_of_transformers(kind: str, chunk: int, models: Path) -> None:
    """gemma4_small, whose images are causal, with chunks that end inside them too."""
    target, folder = image_target(models / kind), models / kind
    requests, model = rows_of(target, 64), theirs(folder)
    found = tokens(list(image_engine(target, NoDrafter(), replace(BATCH, prefill_tokens=chunk)).run(requests)))
    for one in requests:
        expected = generated(model, folder, one.prompt_ids.tolist(), [encoded(piece) for piece in one.images], 64)
        assert found[one.request_id][: len(expected)] == expected, one.request_id
        assert len(expected) == 64 or expected[-1] == PAD


def log_probabilities(kind: str, models: Path, chunk: int = 200) -> float:
    """The largest difference to those of transformers, of the likeliest 20 tokens after the prompts and 5 tokens after them."""
    target, model, worst = image_target(models / kind), theirs(models / kind), 0.0
    requests = rows_of(target, 6)
    for done in image_engine(target, NoDrafter(), replace(BATCH, prefill_tokens=chunk), num_top=20).run(requests):
        one = next(one for one in requests if one.request_id == done.request_id)
        assert done.top_logprobs is not None
        assert done.token_ids is not None
        ids, values = done.top_logprobs
        answer = done.token_ids.tolist()
        answer = answer[: answer.index(PAD)] if PAD in answer else answer
        with torch.no_grad():
            inputs = inputs_of(models / kind, [*one.prompt_ids.tolist(), *answer], [encoded(piece) for piece in one.images])
            expected = model(**inputs).logits[0, len(one.prompt_ids) - 1 :].log_softmax(-1)[: len(values)]
        likeliest = torch.from_numpy(ids[: len(expected)]).long()
        difference = (torch.from_numpy(values[: len(expected)]) - expected.gather(1, likeliest)).abs().max()
        worst = max(worst, float(difference))
    return worst


@pytest.mark.second
@pytest.mark.parametrize("kind", GEMMA4_KINDS)
def test_log_probabilities_are_those_of_transformers(kind: str, models: Path) -> None:
    assert log_probabilities(kind, models) < 1e-4
    assert log_probabilities(kind, models, 23 if kind == "gemma4_small" else 75) < 1e-4


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "images are causal": (
        "gemma4", lambda patch: patch.setattr(AttentionSpec, "_seen", lambda _, batch: replace(batch, last_keys=None))
    ),
    "images see ahead in all layers": ("gemma4", lambda patch: patch.setattr(AttentionSpec, "_seen", lambda _, batch: batch)),
    "inputs of layers are those of the placeholder": (
        "gemma4_small", lambda patch: patch.setattr(LayerInputs, "__call__", _without_images(LayerInputs.__call__))
    ),
}


def _without_images(call: Any) -> Any:
    return lambda self, ids, embedded, lora, images: call(self, ids, embedded, lora, None)


@pytest.mark.second
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_tokens_of_images_see_is_found(fault: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, plant = FAULTS[fault]
    plant(monkeypatch)
    assert log_probabilities(kind, models) > 1e-2


@pytest.mark.second
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, repetition_penalty=1.2)])
def test_tokens_do_not_depend_on_drafts_slots_pages_or_chunks(
    sampling: SamplingParams, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64. With few pages rows are preempted: their images are decoded, encoded and placed again."""
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    target = image_target(models / "double", torch.float64)
    requests = rows_of(target, 40, sampling=sampling, predicted=2)
    alone: dict[str, list[int]] = {}
    for one in requests:
        alone |= tokens(list(image_engine(target, NoDrafter(), replace(ONE_SLOT, prefill_tokens=320)).run([one])))
    outputs = {one.seed: alone[one.request_id] for one in requests}
    drafters: tuple[Any, ...] = (
        NoDrafter(), LookupDrafter(4, min_ngram=1, max_ngram=3), ForcedDrafter(3, outputs, right=True, fixed_len=True),
        ForcedDrafter(3, outputs, right=False, fixed_len=False), WindowDrafter(target, 3, slots=6, window=30),
    )
    preempted = 0
    for number, drafter in enumerate(drafters):
        batch = replace(BATCH, num_slots=2 + number, row_buckets=(1, 2 + number), prefill_tokens=70 + 9 * number)
        engine = image_engine(target, drafter, replace(batch, num_pages=500 if number == 3 else 80), kept_images=40 * number)
        assert tokens(list(engine.run(requests))) == alone, drafter.name
        preempted += engine.totals.preempted
    assert preempted


@pytest.mark.second
def test_a_shared_prefix_may_end_inside_an_image(models: Path) -> None:
    """In float64: the cached half of an image has seen the rest of it, and the rest sees the cached half."""
    target = image_target(models / "double", torch.float64)
    rows = [image_request(i, target.spec, (3, A, *end), cap=12) for i, end in enumerate([(9,), (9,), ()])]
    rows[2] = replace(rows[2], prompt_ids=rows[2].prompt_ids[:-1])  # it ends with the last token of the image
    alone = [next(iter(image_engine(target, NoDrafter(), ONE_SLOT, num_top=20).run([one]))) for one in rows]
    done = {one.request_id: one for one in image_engine(target, NoDrafter(), ONE_SLOT, num_top=20).run(rows)}
    image = rows[0].images[0]
    cached = done["r2"].cached_tokens
    assert image.begin < cached < image.begin + image.length - 1
    for one in alone:
        assert one.top_logprobs is not None
        found = done[one.request_id].top_logprobs
        assert found is not None
        np.testing.assert_allclose(found[1], one.top_logprobs[1], atol=1e-9)


@pytest.mark.second
def test_a_tower_of_sounds_is_neither_loaded_nor_counted(tmp_path: Path) -> None:
    """Files of E2B and E4B have one."""
    audio = {
        "model_type": "gemma4_audio", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 24,
        "subsampling_conv_channels": [8, 4],
    }
    folder = make_image_model(tmp_path / "model", "gemma4_small", seed=3, audio_config=audio)
    names = stored_tensors(LocalFiles(folder))
    assert sum("audio" in name for name in names) > 10
    target = image_target(folder)
    assert target.spec.vision is not None
    own = target.spec.vision.own("", names)
    assert not any("audio" in name for name in own)
    check_tensors("", target.spec.vision, own)
    requests = [image_request(0, target.spec, (3, A, 5), cap=6)]
    (found,) = tokens(list(image_engine(target, NoDrafter(), ONE_SLOT).run(requests))).values()
    sources = [encoded(piece) for piece in requests[0].images]
    expected = generated(theirs(folder), folder, requests[0].prompt_ids.tolist(), sources, 6)
    assert found[: len(expected)] == expected
    assert len(expected) == 6 or expected[-1] == PAD


def test_images_that_see_ahead_are_cut_by_no_pass_and_others_are(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Any]] = []

    def recorded(*args: Any, **options: Any) -> Any:
        seen.append(list(chunks(*args, **options)))
        return iter(seen[-1])

    monkeypatch.setattr(refills, "chunks", recorded)
    for kind, is_cut in (("gemma4", False), ("gemma4_small", True)):
        target = image_target(models / kind)
        (one,) = requests = [image_request(0, target.spec, (30, A, 20, B, 9), cap=2)]
        seen.clear()
        tokens(list(image_engine(target, NoDrafter(), replace(ONE_SLOT, prefill_tokens=80)).run(requests)))
        (passes,) = seen
        ends = [segment.end for segments in passes for segment in segments]
        inside = [end for end in ends for own in one.images if own.begin < end < own.begin + own.length]
        assert bool(inside) == is_cut
        assert ends[-1] == len(one.prompt_ids)


@given(st.data())
def test_passes_hold_every_token_once_and_images_whole(data: Any) -> None:
    most = data.draw(st.integers(5, 12))
    spans, whole = list[tuple[int, int, int]](), dict[int, list[range]]()
    for slot in range(data.draw(st.integers(1, 4))):
        at, own = 0, list[range]()
        for gap, length in data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, most)), max_size=4)):
            own.append(range(at + gap, at + gap + length))
            at = own[-1].stop
        end = at + data.draw(st.integers(0 if at else 1, 9))
        spans.append((slot, data.draw(st.integers(0, end - 1)), end))
        whole[slot] = own
    passes = list(chunks(spans, most, whole=whole))
    assert all(1 <= sum(segment.end - segment.begin for segment in segments) <= most for segments in passes)
    for slot, begin, end in spans:
        found = [segment for segments in passes for segment in segments if segment.slot == slot]
        assert [segment.begin for segment in found] == [begin, *(segment.end for segment in found[:-1])]
        assert found[-1].end == end
        assert not any(own.start < segment.end < own.stop for segment in found for own in whole[slot])


def test_an_image_that_no_pass_holds_is_not_cut_in_silence(models: Path) -> None:
    with pytest.raises(AssertionError, match="too short for an image"):
        list(chunks([(0, 0, 12)], 5, whole={0: [range(3, 9)]}))
    target = image_target(models / "gemma4")
    (piece,) = image_request(0, target.spec, (3, A, 2), cap=2).images
    for begin, end in ((0, 40), (10, 40)):
        with pytest.raises(AssertionError, match="ends inside an image"):
            last_keys([piece], begin, end)


def test_the_last_keys_of_a_pass_are_those_of_its_images(models: Path) -> None:
    target = image_target(models / "gemma4")
    first, second = image_request(0, target.spec, (3, A, 2, B, 1), cap=2).images
    stop = second.begin + second.length
    every = list(range(stop + 2))
    for piece in (first, second):
        every[piece.begin : piece.begin + piece.length] = [piece.begin + piece.length - 1] * piece.length
    for begin, end in ((0, stop + 2), (10, stop), (10, stop + 2), (second.begin - 1, stop), (second.begin + 5, stop + 1)):
        found = last_keys([first, second], begin, end)
        assert found is not None
        assert found.tolist() == every[begin:end]
    assert last_keys([first, second], 0, first.begin) is None
    assert last_keys([first, second], stop, stop + 9) is None
