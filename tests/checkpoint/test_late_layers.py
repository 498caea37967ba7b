"""Layers that read the K and V of earlier layers: what they compute of a prompt, what files hold of them, what they cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec.checkpoint.files import LocalFiles
from batchspec.errors import CheckpointError
from batchspec.heads.data import Row
from batchspec.heads.teacher import Teacher
from batchspec.model.layers.layer_inputs import LayerInput
from batchspec.model.spec import ModelSpec, read_spec
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from batchspec.packing.cost import kv_read_bytes, prefill_seconds
from batchspec.packing.kv_memory import KVMemory
from tests.helpers.attentions import attentions
from tests.helpers.engines import VOCAB
from tests.helpers.gemma4_models import MIXED
from tests.helpers.models import write_weights
from tests.helpers.stand_ins import H200
from tests.model.test_gemma4 import OWN, TINY
from tests.model.test_target import Runner
from tests.model.test_target import run as logits_of

BF16, CPU = torch.bfloat16, torch.device("cpu")
CONFIG: dict[str, Any] = {
    **TINY, **OWN, "hidden_size_per_layer_input": 3, "vocab_size_per_layer_input": VOCAB + 2, "num_hidden_layers": 5,
    "layer_types": [MIXED[0], *MIXED], "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
}
"""Five layers, of which the last two keep nothing."""


def tiny_spec() -> ModelSpec:
    return read_spec(CONFIG, "config.json")


@pytest.mark.parametrize(
    ("aux", "tokens"), [((), [12, 12, 3, 3, 3]), ((1, 3), [12, 12, 12, 3, 3]), ((4,), [12] * 4 + [3]), ((5,), [12] * 5)]
)
def test_they_compute_the_end_of_a_prompt_alone(aux: tuple[int, ...], tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a drafter reads what they compute."""
    target = Target.load(Path(), tiny_spec(), dtype=torch.float64, device=CPU, dummy=True)
    rows = [[3, 9, 1, 4, 11, 6, 2, 8], [5], [7, 7, 2]]
    assert target.spec.last_kept == 2
    expected, expected_aux = Runner.start(target, 3).feed(rows, aux)
    counts: list[int] = []
    compute = LayerInput.__call__

    def counted(self: LayerInput, stream: Any, lora: Any, *, add_in_product: bool) -> None:
        counts.append(len(stream.layer_input))
        compute(self, stream, lora, add_in_product=add_in_product)

    monkeypatch.setattr(LayerInput, "__call__", counted)
    runner = Runner.start(target, 3)
    found, found_aux = runner.feed(rows, aux, ends_only=True)
    assert counts == tokens
    torch.testing.assert_close(found, [own[-1:] for own in expected])
    torch.testing.assert_close(found_aux, expected_aux)
    following, _ = runner.feed([[4], [4], [4]])
    torch.testing.assert_close(following, [logits_of(target, [*row, 4])[0][-1:] for row in rows])


def test_a_file_may_hold_weights_of_theirs_that_would_compute_k_and_v(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    stored = load_file(write_weights(tmp_path) / "model.safetensors")
    unread = {f"model.layers.3.self_attn.{name}": torch.ones(3) for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight")}
    save_file(stored | unread, tmp_path / "model.safetensors")
    assert judge_model(LocalFiles(tmp_path)).unread == ()
    for name in ("model.layers.1.self_attn.k_proj.bias", "model.layers.3.self_attn.q_proj.bias", "model.layers.9.k_proj"):
        save_file(stored | {name: torch.ones(3)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"the weights do not fit config.json: .*{name}"):
            judge_model(LocalFiles(tmp_path))


def test_k_and_v_are_kept_once_and_read_in_each_layer() -> None:
    spec = tiny_spec()
    own = [2 * BF16.itemsize * layer.num_kv_heads * layer.head_dim for layer in attentions(spec)]
    memory = KVMemory.of(spec, BF16, (), page_size=1, max_len=64, max_tokens=64, lookahead=1, pass_tokens=1, num_verified=0)
    assert memory.page_bytes == (own[2], own[0] + own[1])
    assert kv_read_bytes(spec, dtype=BF16, rows=3, context_tokens=2, tokens_per_row=1) == 3 * 2 * sum(own)


def test_the_planner_counts_their_work_in_prefill_once_a_prompt() -> None:
    spec = tiny_spec()
    first = replace(spec, layers=spec.layers[:3])

    def seconds(one: ModelSpec, **options: bool) -> float:
        rates = replace(H200, layer_s=0.0, overhead_s=0.0)
        return prefill_seconds(one, rates, dtype=BF16, prompt_tokens=8192, pass_tokens=8192, **options)

    assert seconds(spec) == pytest.approx(seconds(first), rel=0.01)
    assert seconds(spec, scores=True) > 1.1 * seconds(first, scores=True)


def test_training_reads_the_states_that_decoding_has() -> None:
    """A batch for training keeps K and V of one layer at a time, but for those that later layers read."""
    target = Target.load(Path(), tiny_spec(), dtype=torch.float64, device=CPU, dummy=True)
    rows = [Row(ids=np.array(ids, dtype=np.int32), prompt_len=2) for ids in ([3, 9, 1, 4, 11, 6, 2, 8, 1], [7, 7, 2])]
    data = Teacher(target, (2, 4, 5), torch.arange(9), torch.float64).training_batch(rows)
    for row, found in zip(rows, data.features, strict=True):
        taps = logits_of(target, row.ids.tolist(), (2, 4, 5))[1]
        torch.testing.assert_close(found[: len(taps)], taps)
