"""The tool that makes a recurrent model which writes English, on a tiny Llama."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from batchspec.model.layers.gated_delta.block import GatedDeltaSpec
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from tests.heads.english_checks import forced_drafts, replayed
from tests.heads.recurrent_conversion import converted, convolution, delta_rule, measured, recurrent_config
from tests.heads.recurrent_distillation import Distillation, Plan, batches, padded
from tests.heads.upcycle import write_model
from tests.helpers.models import make_checkpoint
from tests.helpers.mtp_checkpoints import make_mtp_model
from tests.helpers.mtp_definition import read_mtp, reference_drafts, target_hidden

LAYERS = 4
CPU = torch.device("cpu")


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


def texts(count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 320, 20 + 7 * i % 60) for i in range(count)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `llama` and `recurrent`."""
    folder = tmp_path_factory.mktemp("made")
    source = make_checkpoint(folder / "llama", "llama", num_hidden_layers=LAYERS, initializer_range=0.1, tie_word_embeddings=True)
    config = recurrent_config(json.loads((source / "config.json").read_text()))
    tensors = converted(load_file(source / "model.safetensors"), config, measured(model_of(source), *padded(texts(8), CPU)))
    write_model(source, folder / "recurrent", tensors, config)
    return folder


def test_batchspec_and_transformers_compute_the_same_with_a_converted_model(made: Path) -> None:
    model, folder = model_of(made / "recurrent"), made / "recurrent"
    spec = load_spec(folder)
    assert [isinstance(layer.mixer, GatedDeltaSpec) for layer in spec.layers] == [True, True, False, True]
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, 320, 150))
    target = Target.load(folder, spec, dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        hidden = target_hidden(target, ids.tolist())
        torch.testing.assert_close(target.all_logits(hidden), model(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_layers_begin_near_those_of_the_llama(made: Path) -> None:
    """Attention has other norms; its values, gates and sizes are the old ones."""
    llama, recurrent = model_of(made / "llama"), model_of(made / "recurrent")
    x = torch.randn(1, 1, 64)
    old, new = llama.model.layers[2].self_attn, recurrent.model.layers[2].self_attn
    rotations = llama.model.rotary_emb(x, torch.zeros(1, 1, dtype=torch.int64))
    with torch.no_grad():  # a single token attends to itself alone, whatever q and k are
        wanted = old(x, position_embeddings=rotations, attention_mask=None)[0]
        torch.testing.assert_close(new(x, position_embeddings=rotations, attention_mask=None)[0], wanted)


def test_the_quick_delta_rule_and_its_gradients_are_those_of_transformers() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    torch.manual_seed(0)
    given = [torch.randn(2, 150, 3, 16).requires_grad_() for _ in range(3)]
    gates = [(-torch.rand(2, 150, 3)).requires_grad_(), torch.rand(2, 150, 3).requires_grad_()]
    outs = [
        rule(given[0], given[1], given[2], g=gates[0], beta=gates[1], use_qk_l2norm_in_kernel=True)[0]
        for rule in (torch_chunk_gated_delta_rule, delta_rule)
    ]
    torch.testing.assert_close(outs[1], outs[0])
    weight = torch.randn_like(outs[0])
    wanted, found = (torch.autograd.grad((out * weight).sum(), [*given, *gates]) for out in outs)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_the_quick_convolution_is_that_of_transformers() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

    x, weight = torch.randn(2, 10, 33), torch.randn(10, 4)
    torch.testing.assert_close(convolution(x, weight), causal_conv1d_fn(x, weight, None, activation="silu"))


@pytest.mark.second
def test_a_recurrent_model_comes_nearer_to_the_llama(made: Path) -> None:
    teacher, student = model_of(made / "llama"), model_of(made / "recurrent")
    plan = Plan(steps=10, tokens=512, lr=1e-2, held_out=2)
    found = Distillation(teacher, student, plan, texts(16), texts(2)).run()
    first, *_, last = found["curve"]
    assert last["kl"] < 0.85 * first["kl"]
    assert found["skipped"] == 0


def test_batches_hold_every_text_once_a_round() -> None:
    rows = texts(50)
    found, seen = batches(rows, 256, np.random.default_rng(0)), 0
    while seen < len(rows):
        batch = next(found)
        assert padded(batch, CPU)[0].numel() <= 256
        seen += len(batch)
    assert seen == len(rows)


def test_forced_drafts_are_those_of_the_definition(tmp_path: Path) -> None:
    mtp = read_mtp(make_mtp_model(tmp_path / "mtp", "dense"))
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, len(mtp.output), 30))
    hidden = torch.randn(30, mtp.output.shape[1], dtype=torch.float64)
    found = forced_drafts(mtp, ids, hidden, 3)
    for place in range(4, 26):
        row = ids[: place + 2].tolist()
        for step in range(3):  # the drafts before are the row's own tokens
            own = iter(ids[place + 2 : place + 2 + step].tolist())

            def choose(logits: Tensor, _: Any, own: Iterator[int] = own) -> int:
                return next(own, int(logits.argmax()))

            drafts = reference_drafts(mtp, row, hidden[: place + 1], step + 1, choose)
            assert drafts[-1] == int(found[place, step])


def test_rounds_are_replayed() -> None:
    ids = [9, 1, 2, 3, 4, 5, 6, 7]
    drafts = [[0, 0]] * 8
    drafts[0] = [2, 3]  # after the prompt [9] and its first token both drafts are right, and the target writes 4
    drafts[3] = [5, 0]  # then one of two is right
    assert replayed(ids, 1, drafts, 2) == ([2, 2], [2, 1])
