"""Training batches, draft steps, loss and gradients of a head by their definitions; the rows that batches are made of."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from batchspec.draft.weights import default_aux_layers
from batchspec.heads.attend import Keys, attend, attend_reference
from batchspec.heads.data import Row, course, epoch_batches, frequent_ids, split_rows, unused_id
from batchspec.heads.evaluate import acceptance
from batchspec.heads.head import new_network, new_spec
from batchspec.heads.loop import learning_rate
from batchspec.heads.objective import SoftCrossEntropy
from batchspec.heads.step_network import draft_loss
from batchspec.heads.teacher import Teacher
from batchspec.model.target import Target
from tests.helpers.eagle_reference import Design, reference_drafts, run_head, target_taps
from tests.helpers.engines import VOCAB, full_logits, tiny_target
from tests.helpers.heads import accepted_drafts, check_gradients_of_bf16_products, fill_with_drafts

CPU = torch.device("cpu")
GPU_OR_CPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tiny() -> tuple[Target, Teacher, Any, list[Row]]:
    """A head in fp64 over 12 of 31 tokens of a target of two layers, and three rows."""
    target = tiny_target()
    hot = torch.arange(12) * 2 + 3
    spec = new_spec(target.spec, draft_vocab=12, aux_layer_ids=None)
    network = new_network(spec, target, hot, seed=1)
    rng = np.random.default_rng(3)
    rows = [Row(ids=rng.integers(0, VOCAB, n).astype(np.int32), prompt_len=p) for n, p in ((19, 4), (9, 1), (30, 12))]
    return target, Teacher(target, spec.aux_layer_ids, hot, torch.float64), network, rows


def reference_of(network: Any, target: Target) -> tuple[Design, dict[str, Tensor]]:
    spec = network.spec
    design = Design(
        hidden=spec.hidden_size, target_hidden=spec.target_hidden_size, vocab=VOCAB, draft_vocab=12, taps=spec.aux_layer_ids,
        layers=spec.num_layers, windows=spec.windows, heads=spec.num_heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        inner=spec.intermediate_size, eps=spec.rms_eps, theta=spec.rope.theta,
    )
    tensors = {name.replace("midlayer.", "layers.0."): tensor.detach().cpu() for name, tensor in network.state_dict().items()}
    return design, tensors


def reference_logits(network: Any, target: Target, row: Row, place: int, step: int) -> Tensor:
    """Of draft step `step` after `place`, by definition: true features up to the place, own states after it."""
    design, tensors = reference_of(network, target)
    taps = target_taps(target, row.ids.tolist(), design.taps)[: place + 1].double()
    ids, fed = torch.from_numpy(row.ids).long(), torch.empty(0, design.hidden, dtype=torch.float64)
    for k in range(step + 1):
        tokens = ids[1 : place + 2 + k]
        out, logits = run_head(design, tensors, target.embedding.cpu().double(), tokens, taps, fed)
        fed = torch.cat((fed, out[-1:]))
    return logits[-1]


def test_draft_steps_of_a_padded_batch_are_those_of_the_definition() -> None:
    target, teacher, network, rows = tiny()
    data = teacher.training_batch(rows)
    with torch.no_grad():
        logits = [network.lm_head(hidden) for hidden in network(data.embedded, data.features, 4)]
    for r, row in enumerate(rows):
        for place in range(0, len(row.ids) - 5, 3):
            for step in range(4):
                expected = reference_logits(network, target, row, place, step)
                assert torch.allclose(logits[step][r, place].cpu(), expected, atol=1e-6), (r, place, step)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_parallel_head_learns_the_drafts_after_masks_of_all_places_together(layers: int) -> None:
    target, teacher, chain, rows = tiny()
    mask_id = 30
    spec = replace(chain.spec, mask_token_id=mask_id, num_layers=layers, windows=(None,) * layers)
    network = new_network(spec, target, teacher.draft_vocab_ids, seed=2)
    with torch.no_grad():
        for tensor in network.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor) * 0.2)
    data = teacher.training_batch(rows)
    design, tensors = reference_of(network, target)
    masked = tensors.pop("mask_hidden").view(1, -1)
    with torch.no_grad():
        logits = [network.lm_head(hidden) for hidden in network(data.embedded, data.features, 4)]
    for r, row in enumerate(rows):
        ids, taps = torch.from_numpy(row.ids).long(), target_taps(target, row.ids.tolist(), design.taps).double()
        for place in range(0, len(row.ids) - 1, 3):
            tokens = torch.cat((ids[1 : place + 2], ids.new_full((3,), mask_id)))
            features = torch.cat((taps[: place + 1], masked.expand(3, -1)))
            _, expected = run_head(design, tensors, target.embedding.cpu().double(), tokens, features)
            found = torch.stack([step[r, place].cpu() for step in logits])
            assert torch.allclose(found, expected[place:], atol=1e-6), (r, place)
    draft_loss(network, data, ahead=4, decay=0.8)[0].backward()
    gradient = network.get_parameter("mask_hidden").grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_of_draft_steps_and_its_gradients_are_those_of_all_pairs(dtype: torch.dtype, steps: int, alike: bool) -> None:
    """alike: later steps have the same keys in all rows, as masks do."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    shape, keys_of = (2, 37, 6, 8), [(2, 37, 2, 8), *[(1 if alike else 2, 37, 2, 8)] * (steps - 1)]
    shapes = [shape, *(s for s in keys_of for _ in "kv")]
    inputs = [torch.randn(s, dtype=dtype, device=GPU_OR_CPU, requires_grad=True) for s in shapes]
    weights = torch.randn(shape, dtype=dtype, device=GPU_OR_CPU)
    keys = Keys()
    for k, v in zip(inputs[1::2], inputs[2::2], strict=True):
        keys.add(k, v, steps)
    found, expected = attend(inputs[0], keys), attend_reference(inputs[0], *(part.expand(2, -1, -1, -1) for part in inputs[1:]))
    assert torch.allclose(found, expected, atol=tolerance)
    for one, other in zip(
        torch.autograd.grad(found, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True
    ):
        assert torch.allclose(one, other, atol=tolerance)


@pytest.mark.parametrize("parallel", [False, True])
def test_in_bf16_products_a_head_learns_nearly_the_same(parallel: bool) -> None:
    """What a GPU does with a bf16 model: weights stay fp32, features come and products are made in bf16."""
    target, teacher, chain, rows = tiny()
    spec = replace(chain.spec, mask_token_id=30) if parallel else chain.spec
    network = new_network(spec, target, teacher.draft_vocab_ids, seed=2).to(CPU, torch.float32)
    data = Teacher(target, teacher.aux_layer_ids, teacher.draft_vocab_ids, torch.float32).training_batch(rows)
    values = {item.name: getattr(data, item.name).to(CPU) for item in fields(data)}
    wide = replace(data, **{name: x.float() if x.is_floating_point() else x for name, x in values.items()})
    check_gradients_of_bf16_products(network, wide, ahead=4, share=0.05)


def test_prompt_positions_are_trained_on_if_that_is_requested() -> None:
    target, teacher, _, rows = tiny()
    whole = Teacher(target, teacher.aux_layer_ids, teacher.draft_vocab_ids, torch.float64, prompts=True)
    found = [
        sorted(zip(x.rows.tolist(), x.positions.tolist(), strict=True))
        for x in (teacher.training_batch(rows), whole.training_batch(rows))
    ]
    assert found[0] == [(r, t) for r, row in enumerate(rows) for t in range(row.prompt_len - 1, len(row.ids) - 1)]
    assert found[1] == [(r, t) for r, row in enumerate(rows) for t in range(len(row.ids) - 1)]


@pytest.mark.parametrize(("missed", "temperature"), [(1.0, 1.0), (0.25, 0.5), (0.0, 1.0)])
def test_the_loss_is_the_weighted_cross_entropy_with_the_targets_own_distributions(missed: float, temperature: float) -> None:
    target, plain, network, rows = tiny()
    teacher = Teacher(target, plain.aux_layer_ids, plain.draft_vocab_ids, torch.float64, temperature=temperature)
    data, ahead, decay = teacher.training_batch(rows), 3, 0.7
    with torch.no_grad():  # so that the head is right at one place at least
        learnt = int(torch.nonzero(data.known * (data.positions > 0))[0])
        hidden = next(network(data.embedded, data.features, 1))[data.rows[learnt], data.positions[learnt] - 1]
        network.lm_head.weight[data.best_ids[learnt]] = 9 * hidden
    loss, matches = draft_loss(network, data, ahead=ahead, decay=decay, missed=missed)
    expected = torch.zeros((), dtype=torch.float64)
    hot = teacher.draft_vocab_ids.cpu()
    wrong: set[tuple[int, int]] = set()
    for step in range(ahead):
        nats, hits = [], []
        for r, row in enumerate(rows):
            for place in range(row.prompt_len - 1, len(row.ids) - 1):
                at = place - 1 - step
                choice = full_logits(target, row.ids[: place + 1].tolist()).double()
                if at >= 0 and int(choice.argmax()) not in hot.tolist():
                    wrong.add((r, at))
                elif at >= 0:
                    said = reference_logits(network, target, row, at, step)
                    nats.append(cross_entropy(said[None], (choice[hot] / temperature).softmax(-1)[None]))
                    nats[-1] = nats[-1] * (missed if (r, at) in wrong else 1)
                    right = bool(hot[said.argmax()] == choice.argmax())
                    hits.append(float(right and (missed == 1 or (r, at) not in wrong)))
                    wrong |= set() if right else {(r, at)}
        assert len(nats) > 3
        expected = expected + decay**step * torch.stack(nats).mean()
        assert float(matches[step]) == pytest.approx(np.mean(hits))
    assert wrong
    assert float(matches[0]) > 0
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-6)


def test_the_gradient_of_the_chunked_cross_entropy_is_that_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchspec.heads import objective

    monkeypatch.setattr(objective, "_CHUNK", 4)
    rng = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 5, dtype=torch.float64, generator=rng, requires_grad=True) for n in (10, 7))
    probs = torch.randn(10, 7, dtype=torch.float64, generator=rng).softmax(-1)
    weights = torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1, 0, 1], dtype=torch.float64)
    apply: Any = SoftCrossEntropy.apply
    found = torch.autograd.grad(apply(hidden, head, probs, probs.argmax(-1), weights)[0] * 3, (hidden, head))
    agrees = apply(hidden, head, probs, probs.argmax(-1), weights)[1]
    assert torch.equal(agrees, weights * ((hidden @ head.t()).argmax(-1) == probs.argmax(-1)))
    plain = -((probs * (hidden @ head.t()).log_softmax(-1)).sum(-1) * weights).sum() * 3
    for one, other in zip(found, torch.autograd.grad(plain, (hidden, head)), strict=True):
        assert torch.allclose(one, other)


def test_the_replay_is_a_walk_with_the_drafts_of_the_definition() -> None:
    target, teacher, network, rows = tiny()
    design, tensors = reference_of(network, target)
    tensors["d2t"] = teacher.draft_vocab_ids.cpu() - torch.arange(12)

    def drafts(ids: list[int], most: int) -> list[int]:
        return reference_drafts(design, tensors, target, ids, min(3, most))

    fill_with_drafts(rows, drafts, VOCAB)
    rounds, kept = accepted_drafts(rows, drafts)
    found = acceptance(network, teacher, rows, draft_len=3, batch_tokens=40, cast=nullcontext())
    assert found.rounds == rounds
    assert found.accepted == kept
    assert kept[2] > 0
    assert found.tokens == sum(len(row.ids) - row.prompt_len - 1 for row in rows)


def test_an_epoch_has_every_row_once_in_batches_that_fit_and_are_of_like_length() -> None:
    lengths = np.random.default_rng(0).integers(3, 200, 700)
    batches = epoch_batches(lengths, batch_tokens=1000, seed=5, epoch=1)
    assert sorted(np.concatenate(batches).tolist()) == list(range(700))
    assert all(lengths[batch].max() * len(batch) <= 1000 for batch in batches)
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    assert padded < 1.1 * lengths.sum()
    again, other = (epoch_batches(lengths, batch_tokens=1000, seed=5, epoch=epoch) for epoch in (1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(batches, other, strict=False))
    assert len(course(lengths, batch_tokens=1000, seed=5, epochs=9, steps=3)) == 3
    two = course(lengths, batch_tokens=1000, seed=5, epochs=2, steps=None)
    assert np.bincount(np.concatenate(two)).tolist() == [2] * 700


def test_completions_of_one_prompt_are_on_one_side_of_the_split() -> None:
    rows = [Row(ids=np.array([i // 3, 7, i], np.int32), prompt_len=2) for i in range(30)]
    trained, held = split_rows(rows, 7, seed=0)
    assert len(held) == 9  # whole prompts
    assert len(trained) + len(held) == 30
    assert not {int(row.ids[0]) for row in trained} & {int(row.ids[0]) for row in held}


def test_completions_of_a_bare_opening_are_held_out_one_by_one() -> None:
    """It is the prompt of more rows than are held out: as one it would leave few to train on, or none to measure with."""
    rows = [Row(ids=np.array([5, 7, i], np.int32), prompt_len=2) for i in range(30)]
    for questions in ([], [Row(ids=np.array([i, 8, 9], np.int32), prompt_len=2) for i in range(10)]):
        trained, held = split_rows([*rows, *questions], 4, seed=1)
        assert len(held) == 4
        assert len(trained) == 26 + len(questions)


def test_the_draft_vocabulary_is_what_completions_use_most() -> None:
    rows = [Row(ids=np.array([9, 9, 9, 4, 4, 6, 5], np.int32), prompt_len=3)]
    assert frequent_ids(rows, vocab_size=10, count=3, keep=(2,)).tolist() == [2, 4, 5]  # of 5 and 6 the lower; 9 is prompt
    assert frequent_ids(rows, vocab_size=10, count=99, keep=()).tolist() == list(range(10))


def test_the_mask_is_the_highest_token_that_no_row_holds() -> None:
    rows = [Row(ids=np.array(ids, np.int32), prompt_len=1) for ids in ([0, 4, 5], [5, 2])]
    assert unused_id(rows, 8) == 7
    assert unused_id(rows, 6) == 3
    assert unused_id([Row(ids=np.array([1, 0, 1, 0, 2], np.int32), prompt_len=1)], 3) == 2  # of all that are used the rarest


@pytest.mark.parametrize(("layers", "taps"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (3, (2, 1, 0)), (4, (2, 3, 4)), (1, (0, 1))])
def test_the_usual_aux_layers(layers: int, taps: tuple[int, ...]) -> None:
    assert default_aux_layers(layers) == taps


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    rates = [learning_rate(step, 1000, 2e-3) for step in range(1000)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == pytest.approx(2e-3, rel=1e-2)
    assert rates.index(max(rates)) == 19
    assert rates[19:] == sorted(rates[19:], reverse=True)
    assert rates[-1] == pytest.approx(2e-3 / 980)
    assert rates[510] == pytest.approx(1e-3)


def test_the_learning_rate_follows_the_time_where_that_is_ahead() -> None:
    assert learning_rate(0, 1000, 1.0, 0.02) == pytest.approx(1.0)
    assert learning_rate(100, 1000, 1.0, 0.51) == pytest.approx(0.5)
    assert learning_rate(900, 1000, 1.0, 0.1) == learning_rate(900, 1000, 1.0)
    assert learning_rate(100, 1000, 1.0, 1.0) == 0.0
    assert learning_rate(100, 1000, 1.0, 1.5) == 0.0
