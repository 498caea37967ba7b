"""DSpark heads in training: blocks, loss, gradients and drafts by their definitions (tests/helpers/block_heads.py), in fp64."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.config.train_schema import TrainConfig, TrainRun
from batchspec.draft.block_head import BlockWeights
from batchspec.draft.block_parts import MARKOV, MARKOV_OUT
from batchspec.heads.block import new_block_network, new_block_spec, usual_boundaries
from batchspec.heads.block_network import BlockNetwork, drawn_anchors
from batchspec.heads.data import Row
from batchspec.heads.evaluate import acceptance
from batchspec.heads.teacher import Teacher, TrainingBatch
from batchspec.model.target import Target
from tests.draft.test_block import Recorded
from tests.helpers.block_heads import BlockDesign, Tensors, block_states, reference_block
from tests.helpers.drafting import TARGET, mixed_requests, run, synthetic
from tests.helpers.eagle_reference import target_taps
from tests.helpers.engines import VOCAB, packed
from tests.helpers.heads import accepted_drafts, fill_with_drafts

MASK = 17
HOT = torch.arange(12) * 2 + 3


def tiny(
    *, causal: bool = False, size: int = 4, noise: float = 0.3, **keys: Any
) -> tuple[Target, Teacher, BlockNetwork, list[Row]]:
    """A head over 12 of 31 tokens with weights of every kind, and three rows; one has a prompt of one token."""
    target, run_ = TARGET(), TrainRun()
    run_.train = TrainConfig(draft_vocab=len(HOT), ahead=size, layers=2, inner=20, **keys)
    spec = replace(new_block_spec(run_, target.spec, MASK), causal=(causal,) * 2, markov_rank=5)
    network = new_block_network(spec, target, HOT, seed=1)
    with torch.no_grad():
        for tensor in network.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())).to(tensor) * noise)
    rng = np.random.default_rng(3)
    rows = [Row(ids=rng.integers(0, VOCAB, n).astype(np.int32), prompt_len=p) for n, p in ((19, 4), (9, 1), (30, 12))]
    return target, Teacher(target, spec.aux_layer_ids, HOT, target.dtype), network, rows


def definition_of(network: BlockNetwork) -> tuple[BlockDesign, Tensors]:
    spec = network.spec
    design = BlockDesign(
        hidden=spec.hidden_size, vocab=VOCAB, taps=spec.aux_layer_ids, mask_id=MASK, draft_vocab=len(HOT), layers=spec.num_layers,
        heads=spec.num_heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, inner=spec.intermediate_size, eps=spec.rms_eps,
        theta=spec.rope.theta, causal=spec.causal[0], rank=spec.markov_rank, confidence="markov",
    )
    tensors = {name: tensor.detach().cpu().double() for name, tensor in network.state_dict().items()}
    return design, tensors | {"d2t": HOT - torch.arange(len(HOT))}


def every_anchor(data: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Rows and positions of all trained positions."""
    return data.rows, data.positions


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 4])
def test_the_states_of_all_blocks_are_those_of_the_definition(size: int, causal: bool) -> None:
    """Also where the context is empty, and where a block reaches beyond the end of its row."""
    target, teacher, network, rows = tiny(causal=causal, size=size)
    design, tensors = definition_of(network)
    data = teacher.training_batch(rows)
    with torch.no_grad():
        states, w1 = (x.cpu() for x in network(data, *every_anchor(data), size))
    assert min(data.positions.tolist()) == 0
    for state, before, r, p in zip(states, w1, data.rows.tolist(), data.positions.tolist(), strict=True):
        ids = rows[r].ids.tolist()
        taps = target_taps(target, ids, design.taps).double()[:p]
        expected = block_states(design, tensors, target.embedding.cpu().double(), taps, ids[p], size)
        assert torch.allclose(state, expected, rtol=1e-5, atol=1e-5), (r, p)  # angles are fp32
        for k in range(min(size, len(ids) - p)):
            assert torch.equal(before[k], tensors["markov_head.markov_w1.weight"][ids[p + k]])


def test_no_block_reads_what_follows_its_anchor() -> None:
    """Neither tokens, nor the target's states at the anchor and after it."""
    _, teacher, network, rows = tiny()
    data = teacher.training_batch(rows)
    later = [Row(ids=row.ids.copy(), prompt_len=row.prompt_len) for row in rows]
    for row in later:
        row.ids[14:] = (row.ids[14:] + 5) % VOCAB
    changed = teacher.training_batch(later)
    (states, _), (others, _) = (network(x, *every_anchor(x), 4) for x in (data, changed))
    before = data.positions < 14
    assert torch.equal(states[before], others[before])
    assert not torch.isclose(states[~before], others[~before]).all(-1).any()

    features = data.features.clone().requires_grad_()
    for at in (0, 5, len(data.rows) - 1):
        where = slice(at, at + 1)
        state, _ = network(replace(data, features=features), data.rows[where], data.positions[where], 4)
        (gradient,) = torch.autograd.grad(state.sum(), features)
        owner, position = int(data.rows[at]), int(data.positions[at])
        read = gradient.abs().sum(-1) > 0
        assert read[owner, :position].all()
        assert int(read.sum()) == position


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_the_loss_and_its_gradients_are_those_of_the_definition(share: float) -> None:
    _, teacher, network, rows = tiny(anchors=share, decay=0.7, seed=5)
    data, config = teacher.training_batch(rows), TrainConfig(ahead=4, anchors=share, decay=0.7, seed=5)
    loss, matches = network.loss(data, config, step=3)
    at = torch.from_numpy(drawn_anchors(len(data.rows), share, seed=5, step=3))
    states, w1 = network(data, data.rows[at], data.positions[at], 4)
    logits = states @ network.lm_head.weight.t() + w1 @ network.get_parameter("markov_head.markov_w2.weight").t()
    proj = network.get_submodule("confidence_head.proj")
    top, below, sure, all_weights = (torch.zeros((), dtype=torch.float64) for _ in range(4))
    right, tried = torch.zeros(4), torch.zeros(4)
    trained = {(int(r), int(p)): i for i, (r, p) in enumerate(zip(data.rows, data.positions, strict=True))}
    for m, first in enumerate(at.tolist()):
        r, p = int(data.rows[first]), int(data.positions[first])
        for k in range(4):
            if (i := trained.get((r, p + k))) is None:
                continue
            target_p, weight, known = data.probs[slice(i, i + 1)][0].double(), 0.7**k, float(data.known[i])
            distance = (logits[m, k].softmax(-1) - target_p).abs().sum()
            entropy = -(target_p * logits[m, k].log_softmax(-1)).sum()
            top = top + weight * known * (0.1 * entropy + 0.9 * distance)
            below = below + weight * known
            odds = proj(torch.cat((states[m, k], w1[m, k])))[0]
            accepted = (known * (1 - distance / 2)).detach()
            sure = sure + weight * F.binary_cross_entropy_with_logits(odds, accepted)
            all_weights = all_weights + weight
            right[k] += known * float(logits[m, k].argmax() == data.best_ids[i])
            tried[k] += known
    expected = top / below + sure / all_weights
    assert torch.allclose(loss.double(), expected, atol=1e-5)
    assert torch.allclose(matches, right / tried.clamp_min(1))
    assert 0 < float(data.known.mean()) < 1
    found, plain = (torch.autograd.grad(x, [*network.parameters()]) for x in (loss, expected))
    for (name, _), one, other in zip(network.named_parameters(), found, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-5), name
        assert one.abs().sum() > 0, name


def test_anchors_are_drawn_anew_for_each_batch_and_the_same_for_one_step() -> None:
    draws = [drawn_anchors(100, 0.25, seed=seed, step=step).tolist() for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert draws[0] == draws[3]
    assert draws[0] not in draws[1:3]
    for draw in draws:
        assert len({*draw}) == 25
        assert draw == sorted(draw)
        assert 0 <= draw[0] <= draw[-1] < 100
    assert drawn_anchors(2, 0.1, seed=0, step=0).shape == (1,)


def test_a_job_drafts_what_training_computes_for_the_same_anchor() -> None:
    """Token by token: what the engine proposed is given to the network as the row's own tokens."""
    target, teacher, network, _ = tiny()
    tensors = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    head = BlockWeights(network.spec, tensors, HOT.int().to(target.device))
    for draft_len in (4, 2):
        drafter = Recorded(head, target, draft_len, slots=3)
        batch = packed(3, num_verified=draft_len, prefill_tokens=7, num_pages=60, max_len=40)
        run(mixed_requests(), batch, drafter, options=synthetic(draft_len))
        compared = 0
        for prefix, room, drafts, _ in drafter.seen:
            if room < draft_len or len(prefix) < 2:  # a row that ends soon has a shorter block
                continue
            row = Row(ids=np.array([*prefix, *drafts, 0], np.int32), prompt_len=len(prefix) - 1)
            found = network.drafts(teacher.training_batch([row], probs=False), draft_len)[0, len(prefix) - 2]
            assert HOT[found.cpu()].tolist() == drafts
            compared += 1
        assert compared > 5


def test_the_replay_is_a_walk_with_the_drafts_of_the_definition() -> None:
    target, teacher, network, rows = tiny()
    design, tensors = definition_of(network)

    def drafts(ids: list[int], most: int) -> list[int]:
        return reference_block(design, tensors, target, ids, 3)[0][:most]

    fill_with_drafts(rows, drafts, VOCAB)
    rounds, kept = accepted_drafts(rows, drafts)
    found = acceptance(network, teacher, rows, draft_len=3, batch_tokens=40, cast=nullcontext())
    assert found.rounds == rounds
    assert found.accepted == kept
    assert kept[2] > 0


def test_of_equal_logits_the_first_are_drafted_as_in_jobs() -> None:
    """More tokens than candidates, and all logits are equal; then w2 favours one that is no candidate, and one that is."""
    target, run_ = TARGET(), TrainRun()
    run_.train = TrainConfig(draft_vocab=30, ahead=2, layers=1)
    network = new_block_network(new_block_spec(run_, target.spec, MASK), target, torch.arange(30), seed=1)
    teacher = Teacher(target, network.spec.aux_layer_ids, torch.arange(30), target.dtype)
    data = teacher.training_batch([Row(ids=np.arange(9, dtype=np.int32), prompt_len=2)])
    w1, w2 = (network.get_parameter(name) for name in (MARKOV, MARKOV_OUT))
    with torch.no_grad():
        network.lm_head.weight.zero_()
        assert not network.drafts(data, 2).any()
        w1.fill_(1.0)
        w2[[12, 20]] = torch.tensor([[1.0], [2.0]]).to(w2)
        drafts = network.drafts(data, 2)
    assert set(drafts[data.rows, data.positions].flatten().tolist()) == {12}


def test_in_bf16_products_a_head_learns_nearly_the_same() -> None:
    """What a GPU does with a bf16 model: weights stay fp32, features come and products are made in bf16."""
    _, teacher, network, rows = tiny(noise=0.02)
    network, data, config = network.to("cpu", torch.float32), teacher.training_batch(rows), TrainConfig(ahead=4, anchors=1.0)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            network.loss(replace(data, features=data.features.to(dtype)), config, step=0)[0].backward()
        gradients.append({name: weight.grad for name, weight in network.named_parameters()})
    for name, exact in gradients[0].items():
        found = gradients[1][name]
        assert exact is not None
        assert found is not None
        assert float((found - exact).norm()) < 0.1 * float(exact.norm()), name


@pytest.mark.parametrize(
    ("layers", "expected"), [(36, (2, 10, 18, 26, 34)), (30, (2, 8, 15, 22, 28)), (4, (2,)), (3, (1, 2)), (2, (1,)), (1, (0,))]
)
def test_a_new_head_reads_evenly_spaced_states(layers: int, expected: tuple[int, ...]) -> None:
    assert usual_boundaries(layers) == expected
    target = TARGET().spec
    target = replace(target, layers=target.layers[:1] * layers)
    assert new_block_spec(TrainRun(), target, MASK).aux_layer_ids == expected
