"""decode.deterministic with images: in bf16 tokens and logprobs are bit for bit those of the row alone, whatever other rows,
images, chunks, preemptions and drafts are.

On a CPU the kernels are interpreted, as in tests/model/test_deterministic.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.checkpoint.files import LocalFiles
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.mtp import MtpDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.slots import expected_pages
from batchspec.images.decode import Rgb, decode
from batchspec.kernels.attention import ordered_prefill
from batchspec.kernels.attention import settings as attention
from batchspec.model.decoder import ResidualStream
from batchspec.model.target import Target
from batchspec.model.vision.encoder import PatchEncoder
from batchspec.model.vision.registry import load_vision
from batchspec.model.weights import judge_model
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request, SamplingParams
from tests.helpers.engines import DEVICE, packed
from tests.helpers.image_models import (
    SHAPES,
    ImagesInOrder,
    fitted,
    image_engine,
    image_request,
    image_target,
    make_image_model,
    picture,
)
from tests.helpers.interpreter import dots_of_one_order
from tests.helpers.mtp_drafting import drafter_spec

pytestmark = pytest.mark.second

PART = 64
A, B, C = picture(30, 50, 1), picture(20, 30, 2), picture(40, 50, 3)
ROWS: tuple[tuple[int | bytes, ...], ...] = ((9,), (20, A, 4), (20, A, 4, B), (C,))
"""Rows 1 and 2 begin with the same pages, which end inside an image."""
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.9, top_k=12))
KINDS = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen2_5_vl", "mistral3", "glm_ocr")
Bits = dict[str, tuple[list[int], list[list[float]]]]


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of 64 keys; products in one order, which a GPU has by itself."""
    monkeypatch.setattr(ordered_prefill, "PART", PART)
    monkeypatch.setattr(attention, "PART", PART)
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    with nullcontext() if DEVICE.type == "cuda" else dots_of_one_order():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        for kind in KINDS:
            patch.setitem(SHAPES, kind, SHAPES[kind] | {"num_hidden_layers": 2})
            make_image_model(folder / kind, kind, seed=3, dtype=torch.bfloat16, mtp=kind == "qwen3_5")
    return folder


@cache
def target(folder: Path) -> Target:
    spec = judge_model(LocalFiles(folder)).in_one_order()
    spec = replace(spec, vision=replace(load_vision(folder), ordered=True))
    return Target.load(folder, spec, dtype=torch.bfloat16, device=DEVICE)


def requests(own: Target, cap: int = 3) -> list[Request]:
    return [
        image_request(i, own.spec, parts, cap=cap, seed=1 if i == 2 else i, sampling=SAMPLINGS[i % 2], predicted=1)
        for i, parts in enumerate(ROWS)
    ]


def shape(slots: int, **changes: int) -> PackedBatch:
    return packed(slots, max_len=128, **({"page_size": 16, "num_pages": 60, "prefill_tokens": 128} | changes))


def run(
    own: Target, asked: Sequence[Request], batch: PackedBatch, drafter: Drafter | None = None, *, kept_images: int = 64,
    steps: dict[int, int] | None = None,
) -> tuple[Bits, list[Completion]]:
    """Tokens, and the bits of their logprobs. steps: of `ImagesInOrder`."""
    made = ImagesInOrder(steps)
    engine = image_engine(own, drafter or NoDrafter(), batch, kept_images=kept_images, prepared=made, num_top=3)
    done, found = list(engine.run(iter(asked))), Bits()
    for one in done:
        assert one.error is None
        assert one.token_ids is not None
        assert one.top_logprobs is not None
        found[one.request_id] = one.token_ids.tolist(), one.top_logprobs[1].tolist()
    return found, done


@cache
def alone(folder: Path, cap: int = 3) -> Bits:
    """Each request in an engine of its own, without drafts, its prompt in one pass."""
    own = target(folder)
    return {name: bits for one in requests(own, cap) for name, bits in run(own, [one], shape(1))[0].items()}


def chunk(own: Target) -> int:
    """Tokens of a pass: chunks end inside images, if the model lets them."""
    return own.spec.prefill_multiple or 23


@pytest.mark.parametrize("kind", [*KINDS[:3], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[3:])])
def test_tokens_and_logprobs_are_those_of_the_row_alone(kind: str, models: Path) -> None:
    """Whatever rows enter together, also if an image is encoded again for each chunk, beside others."""
    own, folder = target(models / kind), models / kind
    found, done = run(own, requests(own), shape(4, prefill_tokens=chunk(own)), kept_images=0)
    assert found == alone(folder)
    shares = own.spec.prefill_multiple is None  # states are shared at multiples of 64 tokens alone
    assert (max(one.cached_tokens for one in done) > 0) == shares


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:3])
def test_rows_that_enter_later_change_no_bit(kind: str, models: Path) -> None:
    own = target(models / kind)
    assert run(own, requests(own)[::-1], shape(3), steps={1: 2, 3: 1})[0] == alone(models / kind)


@pytest.mark.parametrize(
    ("name", "kind"), [("mtp", "qwen3_5"), ("eagle3", "qwen3_vl"), pytest.param("lookup", "qwen3_vl", marks=pytest.mark.slow)]
)
def test_drafts_change_no_bit(name: str, kind: str, models: Path) -> None:
    own, folder = target(models / kind), models / kind
    match name:
        case "mtp":
            weights = drafter_spec(folder, own.spec).load(dtype=own.dtype, device=DEVICE)
            drafter: Drafter = MtpDrafter(weights, own, 2, slots=3)
        case "eagle3":
            head = dummy_head(replace(dummy_spec(own.spec), aux_layer_ids=(0, 1, 2)), dtype=own.dtype, device=DEVICE)
            drafter = ChainDrafter(head, own, 2, slots=3)
        case _:
            drafter = LookupDrafter(2, min_ngram=1, max_ngram=3)
    assert run(own, requests(own), shape(3, num_verified=2), drafter)[0] == alone(folder)


@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_preemption_changes_no_bit(kind: str, models: Path) -> None:
    """Answers are prefilled again then: prefill and rounds agree, which count positions along three axes and along one."""
    own = target(models / kind)
    asked = [replace(one, max_new_tokens=24) for one in requests(own)[1::2]]
    found, done = run(own, asked, shape(2, page_size=4, num_pages=30))
    assert sum(one.stats.num_prefills for one in done if one.stats is not None) > len(done), "no row was preempted"
    assert found == run(own, asked, shape(2))[0]


def test_a_run_that_is_stopped_resumes_with_the_same_tokens(models: Path) -> None:
    own = target(models / "qwen3_vl")
    left, found = {one.row_index: one for one in requests(own)}, dict[str, list[int]]()
    engine = image_engine(own, NoDrafter(), shape(4), prepared=ImagesInOrder())

    def stop(totals: EngineTotals, engine: Engine = engine) -> None:
        if totals.rounds >= 1:
            engine.stop()

    engine.on_round = stop
    for one in engine.run(iter(left.values())):
        assert one.token_ids is not None
        found[one.request_id] = one.token_ids.tolist()
        del left[one.row_index]
    unfinished = engine.unfinished()
    assert any(left[saved.row_index].images for saved in unfinished), "no row with an image was stopped"
    resumed = [replace(left[saved.row_index], resumed=saved) for saved in unfinished]
    found |= {name: tokens for name, (tokens, _) in run(own, resumed, shape(2))[0].items()}
    assert found == {name: tokens for name, (tokens, _) in alone(models / "qwen3_vl").items()}


@pytest.mark.parametrize("kind", ["qwen3_vl", *(pytest.param(own, marks=pytest.mark.slow) for own in KINDS if own != "qwen3_vl")])
def test_images_are_encoded_one_by_one_as_without_the_key(kind: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits that they have alone, by products that are not the library's; up to rounding with the same numbers."""
    spec, encoder, plain = target(models / kind).spec.vision, target(models / kind).image_encoder, image_target(models / kind)
    assert spec is not None
    assert encoder is not None
    assert plain.image_encoder is not None
    images = [decode(one, fitted(spec.processor, one)) for one in (A, C, A, B)]
    counts, encode = list[int](), PatchEncoder._pass

    def counted(self: PatchEncoder, images: Sequence[Rgb]) -> list[Tensor]:
        counts.append(len(images))
        return encode(self, images)

    wanted, right = [encoder.encode([one])[0] for one in images], plain.image_encoder.encode(images)

    def library(*_: Tensor) -> Tensor:
        raise AssertionError("the library multiplies")

    monkeypatch.setattr(F, "linear", library)
    monkeypatch.setattr(PatchEncoder, "_pass", counted)
    found = encoder.encode(images)
    assert counts == [1, 1, 1, 1]
    for own, alone_, exact in zip(found, wanted, right, strict=True):
        assert torch.equal(own, alone_)
        assert (own.float().cpu() - exact).abs().mean() < 0.05 * exact.abs().mean()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="rounds are replayed there")
def test_passes_without_images_sum_the_stream_where_others_add_to_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deepstack of Qwen3-VL is added to a sum that is rounded; a norm that adds in its kernel might round it otherwise."""
    own, seen, plain = target(models / "qwen3_vl"), list[int](), ResidualStream._summed

    def summed(self: ResidualStream, out_aux: Tensor | None) -> Tensor:
        seen.append(self.layer)
        return plain(self, out_aux)

    monkeypatch.setattr(ResidualStream, "_summed", summed)
    assert own.spec.vision is not None
    added = [*range(len(own.spec.vision.deepstack))]
    for one in requests(own, cap=2)[:2]:
        run(own, [one], shape(1))
        assert seen == 2 * added, "in prefill and in the round after it"
        seen.clear()
