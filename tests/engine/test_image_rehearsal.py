"""Before the first row: the kernels of images are compiled with those of text, and the first pass with an image finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.checkpoint.files import LocalFiles
from batchspec.distributed.collectives import Collectives
from batchspec.draft.none import NoDrafter
from batchspec.engine.loop import warm_up
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.warm_up import NUM_PROBES, launches, rehearse
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.step import Segment
from batchspec.images.decode import Rgb, decode
from batchspec.images.processor import Fit
from batchspec.kernels.common.dry_run import dry_run
from batchspec.model.quant import plain
from batchspec.model.target import Target
from batchspec.model.vision import spec as vision_spec
from batchspec.model.vision.encoder import PatchEncoder, Patches
from batchspec.model.vision.of_ranks import EncoderOfRanks, owners_of
from batchspec.model.vision.registry import load_vision
from batchspec.model.vision.spec import VisionSpec
from batchspec.model.weights import judge_model
from batchspec.records import Request
from tests.draft.test_compiled_ahead import recorded
from tests.helpers.engines import packed
from tests.helpers.image_models import (
    ImagesInOrder,
    encoded,
    image_engine,
    image_request,
    image_target,
    make_image_model,
    picture,
)
from tests.helpers.stand_in_gpu import stand_in_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
KINDS = ("qwen3_5", "qwen3_vl", "qwen2_5_vl", "mistral3", "lighton_ocr", "glm_ocr", "gemma4", "gemma4_small", "gemma4_unified")
BATCH = packed(slots=2, max_len=140, num_pages=200, prefill_tokens=128)
GEMMA = ("gemma4", "gemma4_small", "gemma4_unified")
"""Their images have about as many tokens as there may be, whatever their sizes."""
OF_LIBRARY = {"verify_kernel", "split_kv_schedule_kernel"}
"""Of the attention that stands in for the one of a GPU's library, which a dry run leaves out."""
CPU, MODE = torch.device("cpu"), SamplingMode()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        make_image_model(folder / kind, kind, seed=3)
    return folder


def made(folder: Path, *, ordered: bool = False) -> Engine:
    spec = judge_model(LocalFiles(folder))
    spec = replace(spec.in_one_order() if ordered else spec, vision=replace(load_vision(folder), ordered=ordered))
    target = Target.load(folder, spec, dtype=torch.bfloat16, device=CPU)
    return image_engine(target, NoDrafter(), BATCH, prepared=ImagesInOrder())


def prefill(engine: Engine, one: Request) -> None:
    """The pass of a row with images, as it enters slot 0."""
    images = engine.executor.rows.images
    assert images is not None
    images.begin([0], [one])
    images.place(0, tuple(decode(encoded(piece), Fit(piece.height, piece.width)) for piece in one.images))
    engine.executor.prefill_pass([Segment(0, 0, len(one.prompt_ids), True)], MODE)


@pytest.mark.second
@pytest.mark.parametrize(("kind", "ordered"), [*((kind, False) for kind in KINDS), ("qwen3_vl", True)])
def test_rows_with_images_launch_no_kernel_that_was_not_compiled_ahead(
    kind: str, ordered: bool, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "_can_pack", lambda weight: False)  # a GPU packs no weights for oneDNN
    with stand_in_gpu(torch.bfloat16):
        engine = made(models / kind, ordered=ordered)
        executor = engine.executor
        executor.rows.live.zero_()
        executor.rows.provide(MODE)
        runs = launches(executor, MODE, [])
        with recorded() as ahead:
            assert [dry_run(run, CPU) for run in runs] == [None] * len(runs)
        with recorded() as probed:
            for run in runs[:NUM_PROBES]:
                assert dry_run(run, CPU) is None
        images = executor.rows.images
        assert images is not None
        assert [*images._rows, *images._images, *images._pixels] == []
        for number, own in enumerate((picture(30, 50, 1), picture(8, 8, 2))):
            with recorded() as launched:
                prefill(engine, image_request(number, engine.target.spec, (9, own, 4), cap=4))
            assert sorted({name for name, *_ in launched - ahead} - OF_LIBRARY) == []
    if kind != "gemma4_unified":  # it has no layers
        assert all("bidirectional_kernel" in {name for name, *_ in found} for found in (probed, launched))


def test_a_rehearsal_launches_a_pass_with_an_image_and_leaves_nothing_of_it(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, encoded_sizes = image_target(models / "qwen3_vl"), list[list[tuple[int, ...]]]()
    assert target.image_encoder is not None
    encode = target.image_encoder.encode

    def noted(images: Sequence[Rgb]) -> list[torch.Tensor]:
        encoded_sizes.append([image.shape for image in images])
        return encode(images)

    one = image_request(0, target.spec, (9, picture(30, 50, 1), 4), cap=6)
    (expected,) = image_engine(target, NoDrafter(), BATCH, prepared=ImagesInOrder()).run([one])
    monkeypatch.setattr(target.image_encoder, "encode", noted)
    engine = image_engine(target, NoDrafter(), BATCH, prepared=ImagesInOrder())
    monkeypatch.setattr(engine.executor.graphs, "captures", True)
    monkeypatch.setattr(warm_up, "time_passes", lambda *_: PrefillCost(least=1.0, token=1.0))
    assert rehearse(engine.executor, MODE) is not None
    monkeypatch.setattr(engine.executor.graphs, "captures", False)
    images = engine.executor.rows.images
    assert images is not None
    assert encoded_sizes == [[(64, 64, 3)]], "the largest, 64 tokens of 8 x 8 pixels"
    assert [*images._rows, *images._images, *images._pixels] == []
    (found,) = engine.run([one])
    assert found.token_ids is not None
    assert expected.token_ids is not None
    assert found.token_ids.tolist() == expected.token_ids.tolist()


class Sized(PatchEncoder):
    """Of an encoder only the spec."""

    def __init__(self, spec: VisionSpec) -> None:
        self.spec, self._patch = spec, torch.empty(0)

    def rows_of(self, patches: Patches) -> torch.Tensor:
        raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [0, 3, 40, 100])
def test_examples_have_at_most_so_many_tokens_and_each_rank_encodes_one(kind: str, most: int, models: Path) -> None:
    vision = load_vision(models / kind)
    for ordered in (False, True):
        encoder = Sized(replace(vision, ordered=ordered))
        alone = [list(row) for row in encoder.examples(most)]
        assert [len(row) for row in alone] == [1] * len(alone)
        assert ordered or len(alone) <= 1
        lengths = [row[0].length for row in alone]
        assert lengths == sorted(lengths, reverse=True)
        assert all(length <= most for length in lengths)
        assert all(row[0].whole == (vision.processor.most_whole > 0) for row in alone)
        if 2 * vision.processor.min_pixels < most * vision.processor.most_token_pixels and kind not in GEMMA:
            assert lengths
        of_two = EncoderOfRanks(encoder, vision, cast(Collectives, SimpleNamespace(ranks=2, rank=1)), torch.float32, CPU)
        for row in of_two.examples(most):
            assert sorted(owners_of([piece.height * piece.width for piece in row], 2)) == [0, 1]
            assert len({piece.digest for piece in row}) == 2
            assert [piece.begin for piece in row] == [0, row[0].length]
            assert 2 * row[0].length <= most


def test_an_example_is_no_larger_than_a_pass_of_the_encoder(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the job of a model that reads images of 65,536 patches it would take seconds."""
    vision = load_vision(models / "qwen3_vl")
    monkeypatch.setattr(vision_spec, "MOST_PATCHES", 64)
    (row,) = Sized(vision).examples(100)
    assert [piece.length for piece in row] == [16]
