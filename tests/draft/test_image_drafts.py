"""Heads and MTP layers that draft for rows with images: what they draft is what their definition drafts, with the embeddings of
images in the places of the next tokens and with positions along three axes; tokens are those without drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.batch import images
from batchspec.batch.image_inputs import AxisPositions
from batchspec.batch.images import rope_positions
from batchspec.cache.page_tables import RowPages
from batchspec.checkpoint.files import LocalFiles
from batchspec.draft.block import BlockDrafter
from batchspec.draft.block_head import BlockWeights, load_block, open_block
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.head import Head
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.mtp import MtpDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, load_pard, read_pard
from batchspec.draft.reader import HeadReader
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import load_head
from batchspec.engine.prefill.passes import flat_batch
from batchspec.engine.slots import expected_pages
from batchspec.engine.step import RoundWidth, Segment
from batchspec.images.decode import decode
from batchspec.images.processor import Fit
from batchspec.model.target import Target
from batchspec.records import Completion, Request, SamplingParams
from tests.draft import test_block, test_pard, test_tree
from tests.helpers import block_heads, eagle_reference, mtp_definition
from tests.helpers.block_heads import BlockDesign, random_block, reference_block, write_block
from tests.helpers.drafting import Proposals, Recording, synthetic
from tests.helpers.eagle_reference import Design, reference_tree
from tests.helpers.engines import DEVICE, packed
from tests.helpers.heads import Tensors, random_tensors, tiny_design, write_head
from tests.helpers.image_models import (
    ImagesInOrder,
    image_engine,
    image_request,
    image_target,
    make_image_model,
    picture,
)
from tests.helpers.mtp_drafting import drafter_spec
from tests.helpers.row_lengths import set_widths

A, B, C = picture(30, 50, 1), picture(60, 20, 2), picture(50, 70, 3)
ROWS: tuple[tuple[int | bytes, ...], ...] = ((9,), (A, 7), (5, B, 1, C, 3), (3, picture(100, 20, 5)), (70, C, 2), (C,))
BATCH = packed(slots=3, max_len=256, num_pages=400, prefill_tokens=64, num_verified=3)
ORDERS: tuple[dict[int, int], ...] = ({}, {1: 5, 3: 1, 5: 2}, {1: 9, 2: 9, 4: 1, 5: 5}, {2: 3, 3: 12})
"""Of `ImagesInOrder`."""
MASK = 17
TREE = {"topk": 2, "depth": 3, "nodes": 6}
DOUBLE = torch.float64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_image_model(folder / "qwen3_5", "qwen3_5", seed=3, dtype=DOUBLE, mtp=True)
    make_image_model(folder / "glm_ocr", "glm_ocr", seed=3, dtype=DOUBLE, mtp=True)
    make_image_model(folder / "qwen3_vl", "qwen3_vl", seed=3, dtype=DOUBLE)
    return folder


def rows_of(target: Target, cap: int, **more: Any) -> list[Request]:
    return [image_request(i, target.spec, parts, cap=cap, seed=i, **more) for i, parts in enumerate(ROWS)]


def tokens(done: Sequence[Completion]) -> dict[str, list[int]]:
    assert [one.error for one in done] == [None] * len(done)
    return {one.request_id: one.token_ids.tolist() for one in done if one.token_ids is not None}


def head_of(folder: Path, target: Target, design: Design, tensors: Tensors) -> Head:
    write_head(folder, design, tensors)
    return load_head(folder, target.spec, dtype=target.dtype, device=DEVICE, aux_layers="input")


class RecordedMtp(Recording, MtpDrafter):
    pass


class RecordedChain(Recording, ChainDrafter):
    pass


class RecordedParallel(Recording, ParallelDrafter):
    pass


def mtp_drafter(folder: Path, target: Target, slots: int) -> RecordedMtp:
    weights = drafter_spec(folder, target.spec).load(dtype=DOUBLE, device=DEVICE)
    return RecordedMtp(weights, target, 3, slots=slots)


def hidden_states(target: Target, one: Request, output: Sequence[int], taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Of the target in one pass over a row: after its final norm [T, H], and at boundaries [T, len(taps) * H]."""
    engine = image_engine(target, NoDrafter(), replace(BATCH, num_slots=1, row_buckets=(1,)))
    rows, count = engine.executor.rows, len(one.prompt_ids) + len(output)
    pages = RowPages(engine.pools.groups.num_groups)
    engine.pools.grow(pages, -(-count // BATCH.page_size))
    rows.begin([0], [one], [list(output)])
    assert rows.images is not None
    rows.images.place(0, tuple(decode(piece.source, Fit(piece.height, piece.width)) for piece in one.images))
    rows.grant([(0, 0, pages.columns())])
    batch, _ = flat_batch(rows, [Segment(0, 0, count, True)], BATCH.page_size)
    return target.forward(batch, engine.executor.cache, taps)


def image_rows(target: Target, one: Request) -> Tensor:
    """[tokens of images, H] what they read in place of embeddings."""
    assert target.image_encoder is not None
    pixels = [decode(piece.source, Fit(piece.height, piece.width)) for piece in one.images]
    return torch.cat([rows[:, 0] for rows in target.image_encoder.encode(pixels)]) if pixels else target.embedding[:0]


def with_own_ids(one: Request, prefix: Sequence[int], first: int) -> list[int]:
    """The tokens of a row; those of images have numbers of their own, from `first` on."""
    ids = list(prefix)
    for piece in one.images:
        for place in range(piece.begin, piece.begin + piece.length):
            ids[place], first = first, first + 1
    return ids


def rotated(x: Tensor, positions: Tensor, frequency: Tensor, axes: Sequence[int]) -> Tensor:
    """Rotate the first numbers of each head of x [..., n, heads, D]; positions [3, more]."""
    angle = (positions[axes[: len(frequency)], : x.shape[-3]].T.to(frequency.dtype) * frequency)[:, None]
    cos, sin, half = angle.cos().to(x.dtype), angle.sin().to(x.dtype), len(frequency)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


@dataclass(frozen=True)
class ImageMtp(mtp_definition.Mtp):
    """An MTP layer for one row with images."""

    positions: Tensor | None = None
    axes: tuple[int, ...] = ()

    def _rotated(self, x: Tensor) -> Tensor:
        assert self.positions is not None
        rope = self.config["rope_parameters"]
        size = int(self.config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        frequency = 1 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        return rotated(self.halves(x), self.positions, frequency, self.axes)


class Reference:
    """What is drafted after beginnings of rows, by definition."""

    def __init__(self, target: Target, requests: Sequence[Request]) -> None:
        self.target, self._requests = target, requests
        self._kept: dict[str, tuple[list[int], Tensor, Tensor | None]] = {}

    def row(self, prefix: tuple[int, ...]) -> Request:
        (found,) = (one for one in self._requests if tuple(one.prompt_ids.tolist()) == prefix[: len(one.prompt_ids)])
        return found

    def positions(self, one: Request) -> Tensor:
        return torch.from_numpy(rope_positions(one.images, 0, 256))

    @property
    def axes(self) -> tuple[int, ...]:
        assert self.target.image_encoder is not None
        return self.target.image_encoder.axes

    def states(self, one: Request, prefix: Sequence[int], taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Of all tokens of a beginning but the last."""
        return hidden_states(self.target, one, list(prefix)[len(one.prompt_ids) : -1], taps)

    def mtp(self, folder: Path, prefix: tuple[int, ...], count: int) -> list[int]:
        one, layer = self.row(prefix), mtp_definition.read_mtp(folder)
        embedding = torch.cat((layer.embedding, image_rows(self.target, one)))
        own = ImageMtp(
            layer.tensors, embedding, layer.output, layer.config, positions=self.positions(one), axes=self.axes
        )
        hidden, _ = self.states(one, prefix, ())
        return mtp_definition.reference_drafts(own, with_own_ids(one, prefix, len(layer.embedding)), hidden, count)

    def block(self, design: BlockDesign, tensors: Tensors, prefix: tuple[int, ...], count: int) -> list[int]:
        one = self.row(prefix)
        _, taps = self.states(one, prefix, design.taps)
        assert taps is not None
        frequency = design.theta ** (-torch.arange(design.head_dim // 2, dtype=DOUBLE) / (design.head_dim // 2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_heads, "target_taps", lambda *_: torch.cat((taps, taps[:1])))
            patch.setattr(
                block_heads, "rope_at",
                lambda x, places, _: rotated(x, self.positions(one)[:, places], frequency, self.axes),
            )
            return reference_block(design, tensors, self.target, prefix, count)[0]

    def head(self, draft: Callable[..., list[int]], design: Design, tensors: Tensors, prefix: tuple[int, ...], count: int) -> Any:
        one = self.row(prefix)
        _, taps = self.states(one, prefix, design.taps)
        table = SimpleNamespace(embedding=torch.cat((self.target.embedding, image_rows(self.target, one))))
        frequency = design.theta ** (-torch.arange(design.head_dim // 2, dtype=DOUBLE) / (design.head_dim // 2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(eagle_reference, "target_taps", lambda *_: taps)
            patch.setattr(
                eagle_reference, "rope", lambda x, theta: rotated(x, self.positions(one), frequency, self.axes)
            )
            return draft(design, tensors, table, with_own_ids(one, prefix, len(self.target.embedding)), count)


def check(seen: Proposals, expected: Callable[[tuple[int, ...], int], list[int]], *, least: int = 40) -> None:
    """Every proposal, each once; more than `least` drafts in all."""
    distinct = {(prefix, tuple(drafts)) for prefix, drafts in seen if drafts}
    assert sum(len(drafts) for _, drafts in distinct) > least
    wrong = [
        (len(prefix), list(drafts), wanted)
        for prefix, drafts in distinct if list(drafts) != (wanted := expected(prefix, len(drafts)))
    ]
    assert wrong == []


def drafted(
    target: Target, drafter: Any, chunk: int, *, kept_images: int = 64, lengths: Sequence[int] | None = None
) -> Proposals:
    """What was proposed for all rows, about half of which is accepted, whatever the order in which their images are made.

    lengths  K of rounds, in turn; None: the most of all
    """
    batch = replace(BATCH, prefill_tokens=max(chunk, target.spec.prefill_multiple or 1))
    for steps in ORDERS:
        prepared = ImagesInOrder(steps)
        engine = image_engine(target, drafter, batch, kept_images=kept_images, options=synthetic(3), prepared=prepared)
        if lengths is not None:
            set_widths(engine, partial(next, map(RoundWidth, cycle(lengths))))
        tokens(list(engine.run(rows_of(target, 14))))
    found: Proposals = getattr(drafter, "seen", [])
    return found


@pytest.mark.second
@pytest.mark.parametrize("chunk", [23, 64])
@pytest.mark.parametrize("kind", ["qwen3_5", "glm_ocr"])
def test_an_mtp_layer_drafts_by_its_definition(kind: str, chunk: int, models: Path) -> None:
    target = image_target(models / kind, DOUBLE)
    drafter = mtp_drafter(models / kind, target, 3)
    reference = Reference(target, rows_of(target, 14))
    check(drafted(target, drafter, chunk), lambda prefix, count: reference.mtp(models / kind, prefix, count))


@pytest.mark.second
@pytest.mark.parametrize(("chunk", "options"), [(23, {}), (64, {"dead_positions": False}), (7, {"uniform_slots": False})])
def test_a_chain_drafts_by_its_definition(chunk: int, options: Any, models: Path, tmp_path: Path) -> None:
    """In chunks that end in images and before them; with few embeddings kept an image is encoded for the token before it, and
    again."""
    target = image_target(models / "qwen3_vl", DOUBLE)
    design = tiny_design(target.spec, qk_norm=chunk == 23)
    tensors = random_tensors(design, seed=2)
    drafter = RecordedChain(head_of(tmp_path, target, design, tensors), target, 3, slots=3, **options)
    reference, draft = Reference(target, rows_of(target, 14)), eagle_reference.reference_drafts
    check(drafted(target, drafter, chunk, kept_images=8), lambda *asked: reference.head(draft, design, tensors, *asked))


@pytest.mark.second
def test_a_parallel_head_drafts_by_its_definition(models: Path, tmp_path: Path) -> None:
    """Also the first draft after a prompt that ends with an image, whose query is turned as a token of the image."""
    target = image_target(models / "qwen3_vl", DOUBLE)
    design = tiny_design(target.spec, mask_id=MASK)
    tensors = random_tensors(design, seed=2)
    drafter = RecordedParallel(head_of(tmp_path, target, design, tensors), target, 3, slots=3)
    reference, draft = Reference(target, rows_of(target, 14)), eagle_reference.reference_parallel_drafts
    seen = drafted(target, drafter, 23)
    assert any(_follows_an_image(reference, prefix) for prefix, drafts in seen if drafts)
    check(seen, lambda *asked: reference.head(draft, design, tensors, *asked))


ENDS = tuple((3 + i, *first, picture(*size, i)) for i, (first, size) in enumerate([
    ((), (100, 20)), ((), (20, 100)), ((A, 2), (90, 30)), ((B,), (30, 90)), ((), (70, 70)), ((C, 1, A), (16, 110)),
]))
"""Rows that end with an image, of which some have others before it."""


@pytest.mark.second
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_the_first_drafts_after_an_image_are_those_of_the_definition(
    seed: int, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROWS", ENDS)
    target = image_target(models / "qwen3_vl", DOUBLE)
    design = tiny_design(target.spec, mask_id=MASK)
    tensors = random_tensors(design, seed=seed)
    drafter = RecordedParallel(head_of(tmp_path, target, design, tensors), target, 3, slots=3)
    reference, draft = Reference(target, rows_of(target, 14)), eagle_reference.reference_parallel_drafts
    first = [(prefix, drafts) for prefix, drafts in drafted(target, drafter, 23) if _follows_an_image(reference, prefix)]
    check(first, lambda *asked: reference.head(draft, design, tensors, *asked), least=12)



def _follows_an_image(reference: Reference, prefix: tuple[int, ...]) -> bool:
    """Whether the newest token is the first one after a prompt that ends with an image."""
    one = reference.row(prefix)
    return any(piece.begin + piece.length == len(prefix) - 1 for piece in one.images)


@pytest.mark.second
def test_a_tree_is_that_of_the_definition(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_tree, "seen", [])
    target = image_target(models / "qwen3_vl", DOUBLE)
    design = tiny_design(target.spec)
    tensors, shape = random_tensors(design, seed=5), TreeShape(**TREE)
    drafter = test_tree.Recorded(head_of(tmp_path, target, design, tensors), target, shape, slots=3)
    drafted(target, drafter, 23)
    reference, draft = Reference(target, rows_of(target, 14)), partial(_tree_of, reference_tree)
    check(test_tree.seen, lambda *asked: reference.head(draft, design, tensors, *asked))  # type: ignore[arg-type]


def _tree_of(grow: Any, *asked: Any) -> Any:
    return grow(*asked[:-1], **TREE)


@pytest.mark.second
@pytest.mark.parametrize("lengths", [None, (0, 0, 3, 0, 0, 0, 1)])
def test_a_block_is_that_of_the_definition(lengths: Sequence[int] | None, models: Path, tmp_path: Path) -> None:
    """Also where rounds without drafts have put positions off."""
    target = image_target(models / "qwen3_vl", DOUBLE)
    design, requests = block_design(target), rows_of(target, 14)
    tensors = random_block(design, seed=2)
    drafter = test_block.Recorded(block_of(tmp_path, target, design, tensors), target, 3, slots=3)
    drafted(target, drafter, 23, lengths=lengths)
    seen, reference = [(prefix, drafts) for prefix, room, drafts, _ in drafter.seen if room >= 3], Reference(target, requests)
    check(seen, lambda prefix, count: reference.block(design, tensors, prefix, count), least=20 if lengths is None else 10)


@pytest.mark.second
@pytest.mark.parametrize("parallel", [True, False])
def test_a_small_language_model_drafts_after_the_placeholders_as_text(
    parallel: bool, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = image_target(models / "qwen3_vl", DOUBLE)
    monkeypatch.setattr(test_pard, "VOCAB", target.spec.vocab_size)
    folder = test_pard.write(tmp_path, vocab=target.spec.vocab_size)
    drafter = test_pard.Recorded(pard_of(folder, target), target.spec, 3, slots=3, parallel=parallel)
    reference = partial(test_pard.reference_drafts, folder, parallel=parallel)
    check(drafted(target, drafter, 23), lambda prefix, count: reference(list(prefix), count))


def block_design(target: Target) -> BlockDesign:
    return BlockDesign(
        hidden=target.spec.hidden_size, vocab=target.spec.vocab_size, taps=(0, 2), mask_id=MASK, draft_vocab=40, windows=(8, None)
    )


def block_of(folder: Path, target: Target, design: BlockDesign, tensors: Tensors) -> BlockWeights:
    write_block(folder, design, tensors)
    return load_block(folder, open_block(LocalFiles(folder), target.spec), dtype=target.dtype, device=DEVICE)


def pard_of(folder: Path, target: Target) -> PardModel:
    return load_pard(folder, read_pard(folder, target.spec), dtype=target.dtype, device=DEVICE)


@pytest.mark.second
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, repetition_penalty=1.2)])
@pytest.mark.parametrize("name", ["mtp", "mtp of GLM-OCR", "eagle3", "hybrid", "parallel", "tree", "block", "pard"])
def test_tokens_are_those_without_drafts(
    name: str, sampling: SamplingParams, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, 64 tokens a row, or 24 that are sampled. Rows enter in a known order, so with few pages some are always
    preempted."""
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    kind = {"mtp": "qwen3_5", "mtp of GLM-OCR": "glm_ocr"}.get(name, "qwen3_vl")
    target = image_target(models / kind, DOUBLE)
    requests = rows_of(target, 24 if sampling.temperature else 64, sampling=sampling, predicted=2)
    expected = tokens(list(image_engine(target, NoDrafter(), BATCH).run(requests)))
    for pages in (400, 48 if sampling.temperature else 50):
        drafter = drafter_named(name, models, target, tmp_path / str(pages))
        batch = replace(BATCH, num_pages=pages, prefill_tokens=target.spec.prefill_multiple or 23)
        engine = image_engine(target, drafter, batch, kept_images=8, prepared=ImagesInOrder())
        done = list(engine.run(requests))
        assert tokens(done) == expected
        assert sum(0 if one.stats is None else one.stats.num_drafted for one in done) > 100
        assert (engine.totals.preempted > 0) == (pages < 400)


def drafter_named(name: str, models: Path, target: Target, folder: Path) -> Any:
    if name.startswith("mtp"):
        return mtp_drafter(models / ("qwen3_5" if name == "mtp" else "glm_ocr"), target, 3)
    if name == "pard":
        folder = test_pard.write(folder, vocab=target.spec.vocab_size)
        return PardDrafter(pard_of(folder, target), target.spec, 3, slots=3, parallel=True)
    if name == "block":
        of_block = block_design(target)
        return BlockDrafter(block_of(folder, target, of_block, random_block(of_block)), target, 3, slots=3)
    design = tiny_design(target.spec, mask_id=MASK if name == "parallel" else None)
    head = head_of(folder, target, design, random_tensors(design))
    if name == "parallel":
        return ParallelDrafter(head, target, 3, slots=3)
    if name == "tree":
        return TreeDrafter(head, target, TreeShape(**TREE), slots=3)
    chain = ChainDrafter(head, target, 3, slots=3)
    lookup = LookupDrafter(3, min_ngram=1, max_ngram=3)
    return chain if name == "eagle3" else HybridDrafter(chain, lookup, slots=3, device=DEVICE)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "embeddings of the placeholder": lambda patch: patch.setattr(
        "batchspec.draft.mtp_head.put_images", lambda *_: None
    ),
    "positions of rounds that do not follow those of prefill": lambda patch: patch.setattr(
        HeadReader, "_rope", _farther(HeadReader._rope)
    ),
    "embeddings of the image before": lambda patch: patch.setattr(
        images.ImagesOnDevice, "_found", _not_shifted(images.ImagesOnDevice._found)
    ),
}


def _farther(rope: Any) -> Any:
    return lambda self, positions: rope(self, positions if isinstance(positions, AxisPositions) else positions + 7)


def _not_shifted(found: Any) -> Any:
    def wrong(self: Any, segments: Any) -> Any:
        shift = min(begin for _, begin, _ in segments) % 2  # passes begin at even positions
        return found(self, [(slot, begin - shift, end - shift) for slot, begin, end in segments])

    return wrong


@pytest.mark.second
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_the_layer_reads_of_images_is_found(
    fault: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = image_target(models / "qwen3_5", DOUBLE)
    drafter, reference = mtp_drafter(models / "qwen3_5", target, 3), Reference(target, rows_of(target, 14))
    with monkeypatch.context() as patch:
        FAULTS[fault](patch)
        seen = drafted(target, drafter, 64)
    with pytest.raises(AssertionError, match=r"assert \[\(\d+"):
        check(seen, lambda prefix, count: reference.mtp(models / "qwen3_5", prefix, count))
