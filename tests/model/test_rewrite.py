"""New weights for a model in use: every tensor in its place, in every format that the loader knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchspec.checkpoint.files import LocalFiles
from batchspec.errors import CheckpointError
from batchspec.model.given import GivenWeights
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from tests.helpers.engines import DEVICE, full_logits
from tests.helpers.models import make_checkpoint
from tests.helpers.moe_models import Strong, tiny_config
from tests.test_grid import TARGETS

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama whose output matrix is the embedding": ("llama", {"tie_word_embeddings": True}),
}


def spec_of(name: str) -> ModelSpec:
    family, changes = (TARGETS | MORE)[name]
    spec = read_spec(tiny_config(family, **changes), "config.json")
    return spec.with_fp8_activations() if "FP8" in name else spec


class Seeded(Strong):
    """Norms differ from seed to seed too."""

    def __init__(self, spec: ModelSpec, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(spec, dtype=dtype, device=DEVICE)
        self._generator.manual_seed(seed)
        self._seed = seed

    def tensor(self, name: str) -> torch.Tensor:
        found = super().tensor(name)
        return found * (1 + 0.1 * self._seed) if name.endswith("norm.weight") else found


def addresses(target: Target) -> list[int]:
    """Where the tensors are that captured graphs read."""
    found: list[int] = []

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value.data_ptr())
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif type(value).__module__.startswith("batchspec."):
            for name in (*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())):
                look(getattr(value, name))

    look(target)
    return found


@pytest.mark.parametrize("name", [*MORE, *TARGETS])
def test_a_rewritten_model_is_the_one_of_the_new_weights_at_the_old_addresses(name: str) -> None:
    spec = spec_of(name)
    target, other = (Target(spec, Seeded(spec, seed), DEVICE) for seed in (1, 2))
    before, places = full_logits(target, IDS), addresses(target)
    target.rewrite(Seeded(spec, 2))
    after = full_logits(target, IDS)
    assert not torch.allclose(before, after)
    assert torch.equal(after, full_logits(other, IDS))
    assert len(places) > 10
    assert addresses(target) == places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_a_layout_of_the_cpu_are_replaced_too(dtype: torch.dtype) -> None:
    spec = spec_of("llama")
    target, other = (Target(spec, Seeded(spec, seed, dtype), DEVICE) for seed in (1, 2))
    target.rewrite(Seeded(spec, 2, dtype))
    assert torch.equal(full_logits(target, IDS), full_logits(other, IDS))


def test_a_static_scale_that_graphs_hold_as_a_number_cannot_change() -> None:
    spec = spec_of("mixtral in FP8 per tensor")

    class Louder(Strong):
        def tensor(self, name: str) -> torch.Tensor:
            found = super().tensor(name)
            return found * 3 if name.endswith("q_proj.input_scale") else found

    target = Target(spec, Seeded(spec, 1), DEVICE)
    said = r"^model\.layers\.0\.self_attn\.q_proj, k_proj, v_proj has .* now and would.*make one from the new weights$"
    with pytest.raises(CheckpointError, match=said):
        target.rewrite(Louder(spec, dtype=torch.float64, device=DEVICE))


def test_tensors_in_memory_are_those_of_the_file_whatever_their_dtype(tmp_path: Any) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    spec, tensors = judge_model(LocalFiles(folder)), load_file(folder / "model.safetensors")
    given = GivenWeights(tensors, spec, dtype=torch.float64, device=DEVICE)
    loaded = Target.load(folder, spec, dtype=torch.float64, device=DEVICE)
    assert torch.equal(full_logits(Target(spec, given, DEVICE), IDS), full_logits(loaded, IDS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "1 missing tensors: model.norm.weight"),
        ({"model.norm.bias": torch.zeros(4)}, "1 unexpected tensors: model.norm.bias"),
        ({"model.norm.weight": torch.zeros(4)}, r"model.norm.weight is \[4\], config.json says"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, "model.norm.weight is I8"),
        ({"model.norm.weight": [1.0]}, "'model.norm.weight' is list, not a tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Any], message: str, tmp_path: Any) -> None:
    folder = make_checkpoint(tmp_path, "llama", hidden_size=32)
    tensors = {**load_file(folder / "model.safetensors"), **change}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        GivenWeights(tensors, judge_model(LocalFiles(folder)), dtype=torch.float32, device=DEVICE)
