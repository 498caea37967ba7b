"""Rows with images of models whose language model is quantised, beside a vision encoder that is not: the tokens of transformers
with the dequantised weights, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchspec.draft.none import NoDrafter
from batchspec.model.kv_calibration import calibrate
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.quant.fp8_at_load import Fp8AtLoad
from batchspec.model.quant.plain import PLAIN
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from batchspec.model.vision.registry import load_vision
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion
from tests.engine.test_images import ROWS, tokens
from tests.helpers.engines import packed
from tests.helpers.four_bit_models import FOUR_BITS
from tests.helpers.image_models import (
    PAD,
    encoded,
    generated,
    image_engine,
    image_request,
    image_target,
    make_image_model,
    quantised,
    theirs,
)
from tests.helpers.nvfp4_layouts import Packer, compressed, fp8, group
from tests.model.test_fp8_block import by_definition

pytestmark = pytest.mark.second
BATCH = packed(slots=3, max_len=384, num_pages=600, prefill_tokens=75)
PLAIN_MODULES = [
    "visual", "vision_tower", "multi_modal_projector", "embed_vision", "lm_head", "per_layer_input_gate", "per_layer_projection",
    "per_layer_model_projection",
]
"""Which tools leave unquantised: vision encoders, and what computes the inputs of Gemma 4's layers."""


def _by_blocks(weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    values, scales = by_definition(weight)
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": values, "weight_scale_inv": scales}, (values.float() * wide).double()


FP8_BLOCKS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": PLAIN_MODULES,
}
ROWWISE = compressed(group("float-quantized", "Linear"), ignore=[f"re:.*{name}.*" for name in PLAIN_MODULES])
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], Packer]]] = {
    **{name: ({**form.config}, form.packer) for name, form in FOUR_BITS.items()},
    "fp8_blocks": (FP8_BLOCKS, lambda name: _by_blocks), "fp8_rows": (ROWWISE, lambda name: fp8(scalar=False)),
}
CASES = [("qwen3_vl", form) for form in FORMS] + [
    ("qwen3_5", "gptq"), ("qwen2_5_vl", "awq"), ("mistral3", "fp8_blocks"), ("gemma4", "nvfp4_ct"), ("gemma4_small", "fp8_rows"),
]


def completions(target: Target, batch: PackedBatch = BATCH) -> dict[str, Completion]:
    rows = [image_request(i, target.spec, parts, cap=12, seed=i) for i, parts in enumerate(ROWS)]
    return {one.request_id: one for one in image_engine(target, NoDrafter(), batch, num_top=20).run(rows)}


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_tokens_are_those_of_transformers_with_the_dequantised_weights(kind: str, form: str, tmp_path: Path) -> None:
    """In float64, with the log-probabilities of the plain model bit for bit."""
    plain = make_image_model(tmp_path / "plain", kind, seed=3)
    folder = quantised(plain, tmp_path / form, *FORMS[form])
    target, model = image_target(folder, torch.float64), theirs(plain, torch.float64)
    assert any(own is not PLAIN for own in target.spec.formats.all)
    found, expected = completions(target), completions(image_target(plain, torch.float64))
    assert tokens([*found.values()]) == tokens([*expected.values()])
    for name, one in found.items():
        assert one.top_logprobs is not None
        others = expected[name].top_logprobs
        assert others is not None
        np.testing.assert_array_equal(one.top_logprobs[1], others[1])
    answers = tokens([*found.values()])
    for i, parts in enumerate(ROWS):
        row = image_request(i, target.spec, parts, cap=12, seed=i)
        own = answers[row.request_id]
        right = generated(model, plain, row.prompt_ids.tolist(), [encoded(piece) for piece in row.images], 12)
        assert own[: len(right)] == right
        assert len(right) == 12 or right[-1] == PAD


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma4_small"])
def test_weights_that_become_fp8_when_they_are_loaded_are_those_of_text_alone(kind: str, tmp_path: Path) -> None:
    """The encoder has the bits of the files."""
    folder = make_image_model(tmp_path / "model", kind, seed=3)
    spec = replace(load_spec(folder).quantised("fp8"), vision=load_vision(folder))
    target = Target.load(folder, spec, dtype=torch.float32, device=torch.device("cpu"))
    plain = image_target(folder)
    assert any(isinstance(own, Fp8AtLoad) for own in spec.formats.all)
    for own, other in zip(weights_of(target), weights_of(plain), strict=True):
        assert torch.equal(own, other)
    prompts, others = completions(target), completions(plain)
    assert tokens([*prompts.values()]) != tokens([*others.values()])
    form = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": PLAIN_MODULES}
    same = quantised(folder, tmp_path / "fp8", form, lambda name: _by_blocks)
    assert tokens([*completions(image_target(same)).values()]) == tokens([*prompts.values()])


@pytest.mark.parametrize("kind", ["qwen3_vl", "mistral3", "gemma4", "gemma4_small"])
def test_an_e4m3_cache_holds_the_rounded_keys_and_values_of_images_too(kind: str, tmp_path: Path) -> None:
    """In float64, with scales of 1: a plain cache, whose K and V are rounded before they are written, gives the same
    log-probabilities, however prompts are cut; images of gemma4 see ahead."""
    folder = make_image_model(tmp_path / "model", kind, seed=4, dtype=torch.float64)
    plain = image_target(folder, torch.float64)
    spec = plain.spec.with_fp8_kv()
    target = Target.load(folder, spec, dtype=torch.float64, device=torch.device("cpu"))
    target.use_kv_scales(torch.ones_like(calibrate(plain, [[1, 2, 3]]).values))
    exact, write = completions(plain), LayerKV.write

    def rounded(self: LayerKV, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        k, v = (own.clamp(-448, 448).to(torch.float8_e4m3fn).to(own.dtype) for own in (k, v))
        write(self, k, v, slot_mapping)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerKV, "write", rounded)
        expected = completions(plain)
    for chunk in (75, 200):
        found = completions(target, replace(BATCH, prefill_tokens=chunk))
        assert tokens([*found.values()]) == tokens([*expected.values()])
        assert distance(found, expected) < 1e-5
    assert distance(expected, exact) > 1e-2


def distance(some: dict[str, Completion], others: dict[str, Completion]) -> float:
    """The largest difference between log-probabilities of the likeliest tokens after prompts."""
    worst = 0.0
    for name, one in some.items():
        assert one.top_logprobs is not None
        other = others[name].top_logprobs
        assert other is not None
        worst = max(worst, float(np.abs(one.top_logprobs[1][0] - other[1][0]).max()))
    return worst


def weights_of(target: Target) -> list[Tensor]:
    encoder: Any = target.image_encoder
    return [*encoder._weights.values()]
