"""Online adaptation: a head learns from the job that it drafts for, and no output token depends on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batchspec.adapt import adapter as adapter_module
from batchspec.adapt.adapter import FEWEST, FEWEST_STEPS, WAITING, Adapter, kept_out, row_of
from batchspec.adapt.budget import LEAST, SAVED_S, Budget
from batchspec.adapt.learner import WARM_STEPS, Comparison, Learner
from batchspec.cache.pages import PagePool
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import Head, head_bytes, load_head, normalised
from batchspec.engine.engine import Engine
from batchspec.model.target import Target
from batchspec.packing.memory import learning_bytes
from batchspec.records import Completion
from batchspec.train.data import Row
from batchspec.train.evaluate import Acceptance
from batchspec.train.head import new_network, new_spec
from batchspec.train.objective import draft_loss
from batchspec.train.optimise import Optimiser
from batchspec.train.settings import TrainConfig
from batchspec.train.teacher import Teacher
from tests.drafting import TARGET, mixed_requests
from tests.drafting import run as run_engine
from tests.engines import DEVICE, packed, request, tiny_spec, tiny_target
from tests.heads import random_tensors, tiny_design, write_head

CPU = torch.device("cpu")
DESIGNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers, q and k norms": {"layers": 2, "windows": (None, None), "qk_norm": True},
    "biases and a norm for each tap": {
        "attention_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "fc_bias": True,
        "fc_norm": True,
    },
    "all target tokens, norm before fc": {"draft_vocab": None, "norm_before_fc": True},
    "own embedding, lm_head": {"own_embedding": True},
    "with a mask": {"mask_id": 17},
    "with a mask, as a chain": {"mask_id": 17},
    "as a tree": {},
}


def heads(folder: Path, name: str, dtype: torch.dtype) -> list[Head]:
    """Two of one design, with other weights and the same draft vocabulary."""
    target = tiny_target(dtype, window=5)
    found: list[Head] = []
    for seed in (3, 4):
        design = tiny_design(target.spec, **DESIGNS[name])
        tensors = random_tensors(design, seed=seed)
        if found and found[0].map_ids is not None:
            tensors["d2t"] = found[0].map_ids.cpu().long() - torch.arange(len(found[0].map_ids))
            tensors["t2d"] = torch.zeros(design.vocab, dtype=torch.bool).index_fill_(0, found[0].map_ids.cpu().long(), True)
        if found and design.own_embedding:
            tensors["embed_tokens.weight"] = found[0].tensors["embed_tokens.weight"].cpu().double()
        write_head(folder / f"head{seed}", design, tensors, layout="speculators")
        found.append(load_head(folder / f"head{seed}", target.spec, dtype=dtype, device=DEVICE, aux_layers="input"))
    return found


def drafter_of(name: str, head: Head) -> ChainDrafter | ParallelDrafter:
    target = TARGET()
    if name == "as a tree":
        return TreeDrafter(head, target, TreeShape(topk=3, depth=3, nodes=12, rank="logprob"), slots=3)
    return (ParallelDrafter if name == "with a mask" else ChainDrafter)(head, target, 3, slots=3)


def proposed(drafter: Drafter) -> list[tuple[int, ...]]:
    """What rounds accepted and drafted, row by row: with drafts of random heads a fingerprint of all of them."""
    width = 12 if isinstance(drafter, TreeDrafter) else 3
    _, done, _ = run_engine(mixed_requests(), packed(3, draft_len=width, prefill_tokens=7, num_pages=90, max_len=60), drafter)
    return [c.stats.accepted_at for _, c in sorted(done.items()) if c.stats]


@pytest.mark.parametrize("name", DESIGNS)
def test_a_drafter_with_other_weights_drafts_as_one_that_was_made_with_them(name: str, tmp_path: Path) -> None:
    first, second = heads(tmp_path, name, torch.float64)
    changed, made = drafter_of(name, first), drafter_of(name, second)
    places = {id(tensor): tensor.data_ptr() for tensor in first.tensors.values()}
    changed.rewrite(second.tensors)
    assert {id(tensor): tensor.data_ptr() for tensor in first.tensors.values()} == places
    batch: list[list[torch.Tensor]] = []
    for drafter in (changed, made):
        rng = torch.Generator().manual_seed(0)
        taps = torch.randn(5, len(drafter.aux_layer_ids) * 16, dtype=torch.float64, generator=rng).to(DEVICE)
        hidden = drafter.head.features(taps.clone())
        entered, residual = drafter.head.enter(torch.arange(5, dtype=torch.int32, device=DEVICE), hidden.clone())
        products = [p(entered) for p in (drafter.head._layers[0].products[0][0], drafter.head._layers[0].kv)]
        inner = drafter.head._layers[-1].products[2][0](hidden)
        batch.append([hidden, entered, residual, *products, inner, drafter.head.logits(hidden)])
    for one, other in zip(*batch, strict=True):
        assert torch.equal(one, other)
    assert proposed(changed) == proposed(made)


def test_weights_that_a_cpu_keeps_reordered_change_too(tmp_path: Path) -> None:
    first, second = heads(tmp_path, "plain", torch.float32)
    target = tiny_target(torch.float32, window=5)
    changed, made = (ChainDrafter(head, target, 3, slots=2) for head in (first, second))
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    before = changed.head.logits(hidden)
    changed.rewrite(second.tensors)
    assert torch.equal(changed.head.logits(hidden), made.head.logits(hidden))
    assert not torch.equal(changed.head.logits(hidden), before)
    assert torch.equal(*(head._layers[0].products[3][0](hidden.repeat(1, 2)[:, :20]) for head in (changed.head, made.head)))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_learning_takes_its_share_of_the_time_and_no_more() -> None:
    clock, spent = Clock(), 0.0
    budget = Budget(0.1, clock)
    for _ in range(10_000):
        clock.now += 0.01
        if budget.allows(0.03):
            clock.now += 0.03
            spent += 0.03
            budget.spend(0.03)
    assert 0.099 * clock.now < spent <= 0.1 * clock.now


def test_a_little_time_is_saved_up_and_a_longer_slice_still_runs() -> None:
    clock = Clock()
    budget = Budget(0.5, clock)
    clock.now = 1000.0
    assert budget.allows(SAVED_S)
    assert not budget.allows(SAVED_S + 1)
    clock.now += 2.5
    assert budget.allows(SAVED_S + 1)
    budget.spend(SAVED_S + 1)
    assert not budget.allows(1.0)


def test_what_brings_nothing_gets_less_time_until_something_does() -> None:
    clock = Clock()
    budget = Budget(0.4, clock)
    budget.cut()
    assert budget.share == 0.2
    for _ in range(9):
        budget.cut()
    assert budget.share == pytest.approx(0.4 * LEAST)
    clock.now = 10.0
    assert budget.allows(0.25)
    assert not budget.allows(0.26)
    budget.restore()
    assert budget.share == 0.4
    assert Budget(1.0, clock).allows(1e9)


class StandIn:
    """A learner whose measurements are given: tokens a round of the head that drafts, and of the copy."""

    lr = 1.0

    def __init__(self, found: Sequence[tuple[float, float]]) -> None:
        self.found = list(found)
        self.learnt: list[int] = []
        self.measured: list[set[int]] = []
        self.calls: list[str] = []
        self.slices: list[str] = []

    def learn(self, rows: Sequence[Row]) -> None:
        self.slices.append("learn")
        self.learnt += [int(row.ids[0]) for row in rows]

    def compare(self, rows: Sequence[Row]) -> Comparison:
        self.slices.append("measure")
        self.measured.append({int(row.ids[0]) for row in rows})
        before, after = self.found.pop(0)

        def found(mean: float) -> Acceptance:
            return Acceptance(rounds=1000, tokens=round(1000 * mean), accepted=(1,), drafted=(1,))

        return Comparison(found(before), found(after))

    def adopt(self) -> None:
        self.calls.append("adopt")

    def begin_again(self) -> None:
        self.calls.append("begin again")


def shard_of(index: int, rows: int = 16, length: int = 10, **changes: Any) -> list[Completion]:
    """Completions of a shard; the first prompt token of each is its row."""
    found = []
    for row in range(index * rows, (index + 1) * rows):
        values: dict[str, Any] = {
            "request_id": str(row), "row_index": row, "sample_index": 0, "shard": index, "status": "ok", "finish_reason": "stop",
            "prompt_ids": np.array([row, 1], np.int32), "token_ids": np.full(length - 2, 5, np.int32),
        }  # fmt: skip
        found.append(Completion(**(values | changes)))
    return found


def adapter(stand_in: Any, **changes: Any) -> tuple[Adapter, list[str]]:
    said: list[str] = []
    values: dict[str, Any] = {"device": CPU, "every_shards": 4, "batch_tokens": 20, "budget": Budget(1.0), "say": said.append}
    return Adapter(stand_in, **(values | {"changing": nullcontext} | changes)), said


def work(one: Adapter) -> int:
    turns = 0
    while one.turn():
        turns += 1
    return turns


def test_nothing_is_learnt_before_the_shards_are_committed_and_kept_out_rows_never_are() -> None:
    stand_in = StandIn([(2.0, 2.0)] * 99)
    one, _ = adapter(stand_in)
    for index in range(3):
        one.learn(shard_of(index))
        assert not one.turn()
    one.learn(shard_of(3))
    assert work(one) > 0
    everyone = set(range(64))
    out = {row for row in everyone if kept_out(row)}
    assert 3 <= len(out) <= 16
    assert sorted(stand_in.learnt) == sorted(everyone - out)
    for index in range(4, 16):
        one.learn(shard_of(index))
    work(one)
    assert stand_in.measured
    measured = set.union(*stand_in.measured)
    assert len(measured) >= FEWEST
    assert not measured & set(stand_in.learnt)
    assert all(kept_out(row) for row in measured)


@pytest.mark.parametrize(
    ("found", "calls"),
    [
        ((2.0, 2.2), ["adopt"]),
        ((2.0, 2.005), []),
        ((2.0, 2.0), []),
        ((2.0, 1.9), ["begin again"]),
        ((2.0, float("0")), ["begin again"]),
    ],
)
def test_the_head_changes_only_where_the_copy_measures_better(found: tuple[float, float], calls: list[str]) -> None:
    """Steps for one measurement: how many more there would be goes by the clock."""
    stand_in, budget = StandIn([found] * 4), Budget(1.0)
    changes: list[list[str]] = []

    @contextmanager
    def changing() -> Iterator[None]:
        before = len(stand_in.calls)
        yield
        changes.append(stand_in.calls[before:])

    one, said = adapter(stand_in, budget=budget, batch_tokens=80, changing=changing, every_shards=8)
    for index in range(8):
        one.learn(shard_of(index))
    work(one)
    assert FEWEST_STEPS <= stand_in.slices.count("learn") < 2 * FEWEST_STEPS
    assert stand_in.calls == calls
    assert changes == [["adopt"]] * calls.count("adopt")  # nothing else reads the head's weights meanwhile
    assert len(said) == one.num_swaps == calls.count("adopt")
    assert budget.share == (1.0 if calls == ["adopt"] else 0.5)


def test_rows_with_nothing_to_learn_are_left_out() -> None:
    stand_in = StandIn([])
    one, _ = adapter(stand_in, every_shards=1)
    one.learn(shard_of(0, status="error", prompt_ids=None, token_ids=None))
    one.learn(shard_of(1, token_ids=np.array([3], np.int32)))
    one.learn(shard_of(2, length=21))  # longer than a slice
    assert not one.turn()
    one.learn(shard_of(3, status="truncated", length=20))
    assert work(one) == len(stand_in.learnt) == sum(not kept_out(row) for row in range(48, 64))


def test_measuring_waits_until_learning_has_taken_its_time() -> None:
    stand_in = StandIn([(2.0, 2.0)] * 500)
    one, _ = adapter(stand_in, every_shards=1, batch_tokens=10)
    one._costs["measure"] = 1e6
    for index in range(16):
        one.learn(shard_of(index))
        work(one)
    assert len(stand_in.learnt) > FEWEST_STEPS
    assert not stand_in.measured
    one._costs["measure"] = 0.0
    one.learn(shard_of(16))
    work(one)
    assert stand_in.measured


def test_a_measurement_comes_after_every_few_steps_and_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is a slice here: a step, or one of the fewest that are measured on."""
    monkeypatch.setattr(adapter_module, "MEASURE_SHARE", np.inf)
    stand_in = StandIn([(2.0, 2.0)] * 99)
    one, _ = adapter(stand_in, every_shards=16, batch_tokens=10)
    for index in range(16):
        one.learn(shard_of(index))
    work(one)
    found = [(kind, len(list(run))) for kind, run in itertools.groupby(stand_in.slices)]
    assert found == [("learn", FEWEST_STEPS), ("measure", FEWEST)] * (WAITING // FEWEST_STEPS)


def test_the_memory_of_learning_is_what_the_formula_says() -> None:
    target = tiny_target(torch.float32)
    spec = new_spec(target.spec, draft_vocab=19, aux_layer_ids=[0, 1, 2])
    map_ids = torch.arange(19)
    network = new_network(spec, target, map_ids, seed=0)
    drafter = SimpleNamespace()
    learner = Learner(network, map_ids.numpy(), target, drafter, lr=1e-3, steps=3, batch_tokens=64)
    learner._loss([Row(ids=np.arange(20, dtype=np.int32), prompt_len=2)]).backward()
    gradients = sum(p.grad.nbytes for p in network.parameters() if p.grad is not None)
    learner.learn([Row(ids=np.arange(20, dtype=np.int32), prompt_len=2)])
    states = [part["state"] for part in learner._optimiser.state_dict()]
    moments = sum(t.nbytes for state in states for of_one in state.values() for t in of_one.values() if t.dim())
    held = sum(p.nbytes for p in network.parameters()) + gradients + moments + sum(t.nbytes for t in learner.drafting.values())
    parameters = sum(p.numel() for p in network.parameters())
    assert parameters == head_bytes(spec, torch.uint8)
    values: dict[str, Any] = {"dtype": torch.float32, "draft_vocab": 19, "feature_width": 48, "steps": 3}
    flat = learning_bytes(target.spec, parameters=0, tokens=64, **values)
    # Two moments are counted; Muon keeps one of the matrices, and makes them orthogonal in a copy.
    assert held <= learning_bytes(target.spec, parameters=parameters, tokens=64, **values) - flat <= 1.45 * held
    assert learning_bytes(target.spec, parameters=0, tokens=128, **values) > 1.5 * flat


def test_a_step_on_the_job_is_one_of_training_at_a_rate_that_rises() -> None:
    target, map_ids, usual = tiny_target(torch.float32), torch.arange(19), TrainConfig()
    spec = new_spec(target.spec, draft_vocab=19, aux_layer_ids=[0, 1, 2])
    network, other = (new_network(spec, target, map_ids, seed=0) for _ in range(2))
    learner = Learner(network, map_ids.numpy(), target, SimpleNamespace(), lr=1e-2, steps=3, batch_tokens=64)
    optimiser = Optimiser(other, lr=1e-2, muon=usual.muon, fused=False)
    teacher = Teacher(target, spec.aux_layer_ids, map_ids, torch.float32)
    rows = [Row(ids=np.arange(20, dtype=np.int32), prompt_len=2)]
    for done in range(1, WARM_STEPS + 3):
        learner.learn(rows)
        loss, _ = draft_loss(other, teacher.training_batch(rows), ahead=3, decay=usual.decay)
        optimiser.step(loss, 1e-2 * min(done, WARM_STEPS) / WARM_STEPS, usual.clip)
    wanted = other.state_dict()
    assert all(torch.allclose(tensor, wanted[name], atol=1e-4) for name, tensor in network.state_dict().items())
    learner.begin_again()
    learner.learn(rows)
    first = new_network(spec, target, map_ids, seed=0)
    Learner(first, map_ids.numpy(), target, SimpleNamespace(), lr=5e-3, steps=3, batch_tokens=64).learn(rows)
    wanted = first.state_dict()
    assert all(torch.allclose(tensor, wanted[name], atol=1e-4) for name, tensor in network.state_dict().items())


def test_a_rehearsal_teaches_nothing() -> None:
    target = tiny_target(torch.float32)
    network = new_network(new_spec(target.spec, draft_vocab=19, aux_layer_ids=[0, 1, 2]), target, torch.arange(19), seed=0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    learner = Learner(network, np.arange(19), target, SimpleNamespace(), lr=1e-3, steps=3, batch_tokens=64)
    learner.rehearse()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    learner.learn([Row(ids=np.arange(20, dtype=np.int32), prompt_len=2)])
    assert not torch.equal(network.fc.weight, before["fc.weight"])
    learner.begin_again()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert learner.lr == 5e-4


@pytest.mark.parametrize(
    "kind", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU"))]
)
def test_a_copy_that_has_learnt_measures_better_until_it_drafts(kind: str) -> None:
    """On a GPU in bf16: products of fp32 copies of bf16 weights, and weights that change where they lie."""
    device, dtype = torch.device(kind), torch.bfloat16 if kind == "cuda" else torch.float32
    hidden, head_dim = (128, 64) if kind == "cuda" else (32, 16)
    shape: dict[str, Any] = {"hidden_size": hidden, "head_dim": head_dim, "intermediate_size": 128, "windows": (None, None)}
    target = Target.load(Path(), tiny_spec(**shape), dtype=dtype, device=device, dummy=True)
    engine = Engine(target, NoDrafter(), packed(4, page_size=16, num_pages=40), device=device)
    done = list(engine.run(request(i, [i, 2 * i, 3], cap=24) for i in range(12)))
    rows = [row for one in done if (row := row_of(one)) is not None]
    spec, map_ids = new_spec(target.spec, draft_vocab=31, aux_layer_ids=[0, 1, 2]), torch.arange(31)
    network = new_network(spec, target, map_ids, seed=0)
    first = {normalised(name): tensor.detach().to(dtype, copy=True) for name, tensor in network.state_dict().items()}
    drafter = ChainDrafter(Head(spec, first, None), target, 3, slots=2)
    learner = Learner(network, map_ids.numpy(), target, drafter, lr=5e-3, steps=3, batch_tokens=512)
    learner.rehearse()
    same = learner.compare(rows)
    assert same.drafts == same.learns
    assert same.learns.mean_length < 2
    for _ in range(40):
        learner.learn(rows)
    learnt = learner.compare(rows)
    assert learnt.drafts == same.drafts
    assert learnt.learns.mean_length > same.drafts.mean_length + 0.3
    place = first["lm_head.weight"].data_ptr()
    learner.adopt()
    assert learner.compare(rows).drafts.mean_length == pytest.approx(learnt.learns.mean_length, abs=0.05)
    assert drafter.head._lm_head is not None
    assert drafter.head._lm_head.data_ptr() == place
    assert torch.equal(drafter.head._lm_head, network.lm_head.weight.detach().to(dtype))


def test_a_beginning_that_rows_share_is_forgotten_and_its_pages_stay_with_their_owners() -> None:
    pool = PagePool(6)
    owned, idle = pool.take(1), pool.take(2)
    for page, key in zip([*owned, *idle], (b"a", b"b", b"c"), strict=True):
        pool.cache_prefix([page], [key])
    pool.release(idle)
    assert pool.match([b"a", b"b", b"c"]) == [*owned, *idle]
    pool.forget()
    assert pool.match([b"a"]) == []
    assert pool.num_free == 4
    pool.cache_prefix(owned[:1], [b"d"])
    assert pool.match([b"d"]) == owned
    pool.release(owned)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
