"""A head that learns while several ranks compute the target: the leader's copy learns, all draft with the same weights."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from batchspec.adapt.learner import Learner
from batchspec.adapt.rank_teacher import TeacherOfRanks, take_part
from batchspec.distributed.channel import Channel, make_memory
from batchspec.distributed.collectives import Collectives
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.weights import Head, load_head
from batchspec.engine.engine import Engine
from batchspec.engine.lockstep import Lead, follow
from batchspec.engine.messages import End, NewHead, TeacherPass, decode, encode
from batchspec.errors import CapacityError
from batchspec.model.target import Target
from batchspec.train import teacher as teacher_module
from batchspec.train.data import Row
from batchspec.train.head import published_network
from batchspec.train.teacher import Teacher
from tests.engines import DEVICE, packed, plain_tokens, request, tiny_spec
from tests.heads import random_tensors, tiny_design, write_head
from tests.ranks import bits, on_ranks, part_of, whole_of
from tests.runs import run_apart
from tests.test_adapt_job import CAP, LEARNS, made
from tests.test_tensor_parallel import Loud
from tests.test_vocabulary import expected_ids

__all__ = ["made"]

SPEC = tiny_spec(5)
BATCH = packed(3, num_pages=40, max_len=48, draft_len=3)


@pytest.fixture
def handle() -> Iterator[int]:
    found = make_memory()
    yield found
    os.close(found)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    design = tiny_design(SPEC)
    return write_head(tmp_path_factory.mktemp("learns") / "head", design, random_tensors(design))


def rows(count: int = 5) -> list[Row]:
    chance = np.random.default_rng(3)
    return [Row(ids=chance.integers(1, SPEC.vocab_size, 9 + i, dtype=np.int32), prompt_len=2 + i) for i in range(count)]


def group(handle: int, count: int, head: Path, lead: Callable[[Engine, Lead, Learner], object]) -> tuple[object, list[list[int]]]:
    """What `lead` returns on the leader, and the weights with which each rank drafts at the end. Threads are ranks."""

    def one(ranks: Collectives) -> tuple[object, list[int]]:
        end, target = Channel(handle, ranks.rank, count), part_of(SPEC, ranks, Loud)
        drafter = ChainDrafter(drafting(head, target), target, 3, slots=BATCH.num_slots)
        leading = Lead(end) if ranks.rank == 0 else None
        engine = Engine(target, drafter, BATCH, device=DEVICE, lead=leading)
        if leading is None:
            follow(end, engine, teacher_pass=partial(take_part, target))
            return None, weights_of(drafter)
        try:
            found = lead(engine, leading, learner_of(head, engine, leading))
        except BaseException:
            end.lose(0)
            raise
        leading.send(End())
        return found, weights_of(drafter)

    found = on_ranks(count, one)
    return found[0][0], [weights for _, weights in found]


def drafting(head: Path, target: Target) -> Head:
    return load_head(head, target.spec, dtype=torch.float64, device=DEVICE, aux_layers="input")


def learner_of(head: Path, engine: Engine, lead: Lead | None) -> Learner:
    network, ids = published_network(head, engine.target, aux_layers="input", mask_id=None, seed=0)
    rewritable = engine.rewritable_head
    assert rewritable is not None
    return Learner(network, ids, engine.target, rewritable, lr=1e-2, steps=3, batch_tokens=200, lead=lead)


def weights_of(drafter: ChainDrafter) -> list[int]:
    """Bits that depend on all weights of the head."""
    chance = torch.Generator().manual_seed(0)
    features = drafter.head.features(torch.randn(4, 3 * 16, dtype=torch.float64, generator=chance))
    entered, residual = drafter.head.enter(torch.arange(4, dtype=torch.int32), features.clone())
    layer = drafter.head._layers[0]
    inner = [linear(residual.repeat(1, 4)[:, : product.k]) for linear, product in layer.products[1:]]
    return [bits(one) for one in (features, entered, layer.products[0][0](entered), *inner, drafter.head.logits(residual))]


@pytest.mark.parametrize("count", [2, 4])
def test_a_training_step_of_ranks_is_that_of_one_process(
    count: int, head: Path, handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features, embeddings and distributions, also where the positions are more than are exchanged at once."""
    monkeypatch.setattr(teacher_module, "_CHUNK", 4 * 7)
    draft_ids = torch.tensor([0, 3, 5, 11, 30])

    def training_batch(engine: Engine, lead: Lead, _: Learner) -> list[Tensor]:
        teacher = TeacherOfRanks(lead, engine.target, (0, 1, 2), draft_ids, torch.float64)
        found = teacher.training_batch(rows())
        assert teacher.training_batch(rows(2), probs=False).probs.numel() == 0
        return [found.embedded, found.features, found.probs, found.best_ids, found.known]

    own = Teacher(whole_of(SPEC, Loud), (0, 1, 2), draft_ids, torch.float64).training_batch(rows())
    found, _ = group(handle, count, head, training_batch)
    assert isinstance(found, list)
    assert len(own.rows) > 7
    for one, other in zip(found, [own.embedded, own.features, own.probs, own.best_ids, own.known], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_what_was_learnt_drafts_on_every_rank_and_changes_no_token(head: Path, handle: int) -> None:
    asked = [request(i, [i, 3], cap=12) for i in range(7)]

    def learn(engine: Engine, lead: Lead, learner: Learner) -> list[list[int]]:
        before, turns = weights_of(engine.drafter), [0]  # type: ignore[arg-type]

        def turn() -> bool:
            turns[0] += 1
            with torch.inference_mode(False):
                learner.learn(rows())
            if turns[0] in (3, 7):
                learner.compare(rows(3))
                with engine.changing_drafter():
                    learner.adopt()
            return True

        engine.hook.call = turn
        done = [list(engine.run(iter(asked))) for _ in range(2)]
        assert turns[0] > 7
        assert weights_of(engine.drafter) != before  # type: ignore[arg-type]
        return [expected_ids(one) for run in done for one in sorted(run, key=lambda one: one.row_index)]

    found, weights = group(handle, 2, head, learn)
    assert weights[0] == weights[1]
    assert found == [plain_tokens(whole_of(SPEC, Loud), one) for one in asked] * 2


def test_a_step_that_drafts_with_weights_that_a_rank_does_not_have_is_not_executed(head: Path, handle: int) -> None:
    def forgets(engine: Engine, _: Lead, __: Learner) -> None:
        def turn() -> bool:
            with engine.changing_drafter():
                return True

        engine.hook.call = turn
        list(engine.run(iter([request(0, [1, 3], cap=9)])))

    with pytest.raises(AssertionError, match="the leader drafts with other weights"):
        group(handle, 2, head, forgets)


def test_running_out_of_memory_in_a_training_step_ends_the_group(
    head: Path, handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks could not continue together. In the backward pass, which only the leader runs, only the training would end."""
    logits = Target.all_logits

    def full(self: Target, hidden: Tensor) -> Tensor:
        if self.ranks is not None and self.ranks.rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        return logits(self, hidden)

    monkeypatch.setattr(Target, "all_logits", full)
    with pytest.raises(
        CapacityError, match=r"draft.adapt: out of memory while several ranks .* \(CUDA out of memory.*GiB\); set"
    ):
        group(handle, 2, head, lambda engine, lead, learner: learner.learn(rows()))


def test_messages_about_training_are_decoded_as_they_were_encoded() -> None:
    given = rows(3)
    sent = TeacherPass([row.ids for row in given], [row.prompt_len for row in given], (0, 2), True)
    back = decode(encode(sent))
    assert isinstance(back, TeacherPass)
    assert [ids.tolist() for ids in back.rows] == [row.ids.tolist() for row in given]
    assert all(ids.dtype == np.int32 for ids in back.rows)
    assert (back.prompt_lens, back.aux_layer_ids, back.probs) == (sent.prompt_lens, sent.aux_layer_ids, True)
    head = NewHead([("fc.weight", [4, 12]), ("norm.weight", [4])])
    assert decode(encode(head)) == head


def test_a_job_of_two_ranks_learns_and_its_tokens_stay(made: Path, tmp_path: Path) -> None:
    """`draft.adapt` with `cluster.tensor_parallel`, and a head that was learnt is taken up by one process."""
    out = tmp_path / "out"
    words = [
        f"model.path={made / 'model'}", f"input.path={made / 'prompts.parquet'}", f"output.dir={out}", "device=cpu",
        f"decode.max_new_tokens={CAP}", "packing.max_num_seqs=32", "output.shard_rows=8", "output.messages=none", "draft=eagle3",
        f"draft.path={made / 'eagle3'}", "draft.num_speculative_tokens=3", "input.limit=256", *LEARNS,
    ]  # fmt: skip
    code, said = run_apart([*words, "cluster.tensor_parallel=2"], tmp_path / "log")
    assert code == 0, said
    assert re.search(
        r"draft.adapt: learnt from \d{2,} completions, changed the head [1-9]\d* times; it is in _batchspec/heads/", said
    )
    plain = pl.read_parquet(made / "plain/data").sort("row_index")["token_ids"].to_list()
    assert pl.read_parquet(out / "data").sort("row_index")["token_ids"].to_list() == plain * 16
    (out / "data/part-00000.parquet").unlink()
    code, said = run_apart(words, tmp_path / "log")
    assert code == 0, said
    assert "draft.adapt: going on from _batchspec/heads/" in said
