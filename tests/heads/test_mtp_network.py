"""The MTP layer in training: draft steps, loss and gradients by their definitions; what is read and written."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from batchspec.heads import objective
from batchspec.heads.data import Row
from batchspec.heads.mtp_network import MtpNetwork
from batchspec.heads.mtp_weights import plain, read_weights, save_mtp, stored_tensors
from batchspec.heads.optimise import Optimiser
from batchspec.heads.step_network import draft_loss
from batchspec.heads.teacher import Teacher
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.fp8_block import FP8_BLOCK
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weights import Checkpoint, DummyWeights
from tests.heads.mtp_models import MODELS, SHAPE, mtp_model, mtp_target
from tests.helpers.engines import DEVICE, VOCAB, full_logits
from tests.helpers.heads import check_gradients_of_bf16_products
from tests.helpers.mtp_definition import Mtp, forced_steps, target_hidden

CPU = torch.device("cpu")
STEPS = 4


def rows_of(*lengths: tuple[int, int]) -> list[Row]:
    rng = np.random.default_rng(3)
    return [Row(ids=rng.integers(0, VOCAB, n).astype(np.int32), prompt_len=p) for n, p in lengths]


def made(name: str) -> tuple[ModelSpec, Target, MtpNetwork, Teacher]:
    """A layer in fp64 with noise in all of its weights."""
    spec = mtp_model(name)
    target = mtp_target(spec)
    assert spec.mtp is not None
    matrix = target.all_logits(torch.eye(spec.hidden_size, dtype=target.dtype, device=DEVICE)).t().clone()
    network = MtpNetwork(spec.mtp, matrix).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            noise = 0.3 * torch.randn(weight.shape, dtype=torch.float64, generator=generator)
            weight.copy_(1 + noise if weight.dim() == 1 else noise)
    return spec, target, network.to(DEVICE), Teacher(target, (), None, torch.float64)


def reference(
    name: str, target: Target, tensors: dict[str, Tensor], row: Row, place: int, count: int = STEPS
) -> list[Tensor]:
    rope = {"rope_theta": SHAPE["rope_theta"], "partial_rotary_factor": SHAPE["partial_rotary_factor"]}
    config = {**SHAPE, **MODELS[name], "rms_norm_eps": target.spec.rms_eps, "rope_parameters": rope}
    own, embedding = {key.removeprefix("mtp."): tensor for key, tensor in tensors.items()}, target.embedding.cpu().clone()
    mtp, ids = Mtp(own, embedding, embedding, config), row.ids.tolist()
    return forced_steps(mtp, torch.tensor(ids), target_hidden(target, ids), place, count)


@pytest.mark.parametrize("name", MODELS)
def test_draft_steps_of_a_padded_batch_are_those_of_the_definition(name: str) -> None:
    """Whose target has recurrent layers, with a state for each row of the batch."""
    _, target, network, teacher = made(name)
    rows, tensors = rows_of((19, 4), (9, 1), (70, 12)), stored_tensors(network, torch.float64)
    data = teacher.training_batch(rows)
    with torch.no_grad():
        found = [step.cpu() for step in network(data.embedded, data.features, STEPS)]
    for r, row in enumerate(rows):
        assert torch.allclose(data.features[r, : len(row.ids)].cpu(), target_hidden(target, row.ids.tolist()), atol=1e-9)
        for place in range(0, len(row.ids) - STEPS - 1, 7):
            for step, expected in enumerate(reference(name, target, tensors, row, place)):
                assert torch.allclose(found[step][r, place], expected, atol=1e-8), (r, place, step)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_all_weights_are_those_of_the_definition(name: str) -> None:
    spec, target, network, teacher = made(name)
    (row,), prefix = rows_of((11, 3)), "mtp."
    tensors = {key: tensor.requires_grad_() for key, tensor in stored_tensors(network, torch.float64).items()}
    data, places = teacher.training_batch([row]), range(0, 6)
    weights = torch.randn(len(places), STEPS, spec.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = [torch.stack(reference(name, target, tensors, row, place)) for place in places]
    (torch.stack(expected) * weights).sum().backward()
    found = torch.stack([step[0, places.start : places.stop] for step in network(data.embedded, data.features, STEPS)], 1)
    (found * weights.to(DEVICE)).sum().backward()
    for key, weight in network.named_parameters():
        assert weight.grad is not None, key
        torch.testing.assert_close(weight.grad.cpu(), tensors[prefix + key].grad, rtol=1e-6, atol=1e-9, msg=key)


@pytest.mark.parametrize(("name", "temperature"), [("dense", 1.0), ("moe", 0.5)])
def test_the_loss_is_the_cross_entropy_with_the_targets_distributions_over_all_tokens(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose logits are in memory for five positions at a time."""
    monkeypatch.setattr(objective, "_LOGITS", 5 * VOCAB)
    _, target, network, _ = made(name)
    teacher = Teacher(target, (), None, torch.float64, temperature=temperature)
    rows, tensors = rows_of((9, 3), (7, 1)), stored_tensors(network, torch.float64)
    loss, matches = draft_loss(network, teacher.training_batch(rows), ahead=2, decay=0.7)
    expected, matrix = torch.zeros((), dtype=torch.float64), network.output_matrix.cpu()
    for step in range(2):
        nats, hits = [], []
        for row in rows:
            for place in range(max(row.prompt_len - 1, step + 1), len(row.ids) - 1):
                choice = full_logits(target, row.ids[: place + 1].tolist()).double()
                drafted = reference(name, target, tensors, row, place - 1 - step, step + 1)[-1] @ matrix.T
                nats.append(cross_entropy(drafted[None], (choice / temperature).softmax(-1)[None]))
                hits.append(float(drafted.argmax() == choice.argmax()))
        expected = expected + 0.7**step * torch.stack(nats).mean()
        assert float(matches[step]) == pytest.approx(np.mean(hits))
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-7)


@pytest.mark.second
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_learns_a_few_rows_by_heart_and_its_target_stays_as_it_is(name: str) -> None:
    _, target, network, teacher = made(name)
    data, frozen = teacher.training_batch(rows_of((24, 4), (30, 2))), [network.output_matrix.clone(), target.embedding.clone()]
    least = -(data.probs[:] * data.probs[:].log()).sum(-1).mean() * (1 + 0.8 + 0.8**2)
    optimiser, above = Optimiser(network, lr=3e-2, muon=True, fused=False), []
    for _ in range(60):
        loss, matches = draft_loss(network, data, ahead=3, decay=0.8)
        optimiser.step(loss, 3e-2, clip=1.0)
        above.append(float((loss - least).detach()))
    assert 0 < above[-1] < 0.1 * above[0]
    assert float(matches.min()) > 0.7
    assert all(torch.equal(a, b) for a, b in zip(frozen, (network.output_matrix, target.embedding), strict=True))


def test_muon_turns_the_projections_of_the_layer_but_neither_routers_nor_experts() -> None:
    _, _, network, _ = made("moe")
    turned, named = network.matrices(), dict(network.named_parameters())
    kept = {name for name, weight in named.items() if weight.dim() == 2} - turned.keys()
    assert all(turned[name] is named[name] for name in turned)
    assert "fc.weight" in turned
    assert {"layers.0.mlp.shared_expert.up_proj.weight", "layers.0.self_attn.q_proj.weight"} <= turned.keys()
    routers = {"layers.0.mlp.gate.weight", "layers.0.mlp.shared_expert_gate.weight"}
    assert kept - routers == {name for name in named if ".experts." in name}
    assert routers <= kept


def test_an_expert_without_tokens_gets_no_gradient() -> None:
    _, _, network, teacher = made("moe")
    with torch.no_grad():
        network.get_parameter("layers.0.mlp.gate.weight").zero_()  # equal scores: the first experts are chosen
    draft_loss(network, teacher.training_batch(rows_of((9, 3))), ahead=2, decay=1.0)[0].backward()
    for expert in range(5):
        gradient = network.get_parameter(f"layers.0.mlp.experts.{expert}.up_proj.weight").grad
        assert (gradient is None) == (expert >= 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_has_the_tensors_of_a_checkpoint_and_loads_to_the_same_weights(name: str, dtype: Any, tmp_path: Path) -> None:
    spec, _, network, _ = made(name)
    network.to(CPU, torch.float32)
    save_mtp(tmp_path, network, spec, dtype=dtype, target_name="a/b", draft_len=3)
    assert spec.mtp is not None
    stored = load_file(tmp_path / "model.safetensors")
    assert {key: tuple(tensor.shape) for key, tensor in stored.items()} == {own.name: own.shape for own in spec.mtp.tensors()}
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    norm = network.get_parameter("layers.0.self_attn.q_norm.weight").detach()
    assert torch.equal(stored["mtp.layers.0.self_attn.q_norm.weight"], (norm - 1).to(dtype))
    again = MtpNetwork(spec.mtp, network.output_matrix)
    with Checkpoint(tmp_path, plain(spec.mtp), dtype=torch.float32, device=CPU) as weights:
        read_weights(again, plain(spec.mtp), weights)
        assert torch.equal(weights.tensor("mtp.norm.weight"), again.get_parameter("norm.weight"))
    for key, weight in network.named_parameters():
        found = again.get_parameter(key).detach()
        if dtype is torch.float32:
            torch.testing.assert_close(found, weight.detach(), rtol=1e-7, atol=1e-7, msg=key)
        else:
            torch.testing.assert_close(found, weight.detach(), rtol=0, atol=2**-8, msg=key)


def test_quantised_weights_are_read_as_the_numbers_that_they_stand_for() -> None:
    spec = mtp_model("moe").mtp
    assert spec is not None
    quantised = replace(spec, formats=Formats(FP8_BLOCK, ("mtp.fc",)))
    weights = DummyWeights(quantised, dtype=torch.float32, device=CPU)
    values = {own.name: weights.tensor(own.name) for own in quantised.tensors()}

    class Same:
        dtype, device = torch.float32, CPU

        def tensor(self, name: str) -> Tensor:
            return values[name]

        stored = tensor

        def entry(self, name: str, index: int) -> Tensor:
            raise NotImplementedError

    network = MtpNetwork(spec, torch.zeros(VOCAB, 20))
    read_weights(network, quantised, Same())
    assert torch.equal(network.get_parameter("fc.weight").detach(), values["mtp.fc.weight"])
    name = "layers.0.mlp.experts.3.up_proj.weight"
    stored, scale = values[f"mtp.{name}"], values[f"mtp.{name}_scale_inv"]
    assert (stored.dtype, scale.shape) == (torch.float8_e4m3fn, (1, 1))
    assert torch.equal(network.get_parameter(name).detach(), stored.float() * scale)


@pytest.mark.parametrize("name", MODELS)
def test_by_bf16_products_a_layer_learns_nearly_the_same(name: str) -> None:
    """What a GPU does with a bf16 model: weights and routing stay fp32, states come and all else is multiplied in bf16."""
    _, target, network, _ = made(name)
    network.to(CPU, torch.float32)
    with torch.no_grad():
        for key, weight in network.named_parameters():
            weight.mul_(1 if "norm" in key else 0.5)
    data = Teacher(target, (), None, torch.float32).training_batch(rows_of((30, 2), (24, 4)))
    wide = replace(data, **{own.name: moved(getattr(data, own.name)) for own in fields(data)})
    check_gradients_of_bf16_products(network, wide, ahead=3, share=0.1)


def moved(value: Any) -> Any:
    """A field of a batch on the CPU, numbers in fp32."""
    found = value[:].cpu() if not isinstance(value, Tensor) else value.cpu()
    return found.float() if found.is_floating_point() else found
