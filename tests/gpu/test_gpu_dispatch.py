"""Whole models with experts as a GPU computes them: all kernels of the engine interpreted, against plain torch.

Kernels are tested one by one elsewhere. Here they are where a GPU has them: behind the product before, in the order of rows that
the next one reads, with the units, tiles and scales that the number of tokens asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.kernels.moe import router, tiles
from batchspec.model.layers.base import Gating
from batchspec.model.quant.fp8_products import Fp8Experts
from batchspec.model.quant.grouped import PlainExperts
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.helpers.engines import make_engine, packed, request
from tests.helpers.moe_models import Strong, ids_of, tiny_spec
from tests.helpers.stand_in_gpu import stand_in_gpu
from tests.model.test_expert_kernels import CASES, CPU, FP8_BLOCKS, VOCAB, WIDE, made
from tests.model.test_target import Runner, prompts

pytestmark = [
    pytest.mark.second,
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu_engine.py runs on a GPU"),
]
FP8, F32, BF16 = "fp8 blocks, qwen3_moe", torch.float32, torch.bfloat16
FP8_UNITS = {1: 16, 16: 16, 17: 16, 40: 32, 64: 64, 129: 128}
"""Tokens of a pass -> pairs of a unit, with seven experts, three of a token, and units of 128 from a mean of 48 pairs on."""


FAMILIES = CASES | {"fp8 blocks, minimax_m2": ("minimax_m2", {**WIDE, "quantization_config": FP8_BLOCKS})}


def spec_of(name: str) -> ModelSpec:
    family, changes = FAMILIES[name]
    return tiny_spec(family, **changes, num_hidden_layers=2)


@contextmanager
def small_thresholds() -> Iterator[None]:
    """Those that take hundreds of tokens are lower here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MANY_FP8_PAIRS", 48)
        patch.setattr(router, "ONE_WAVE", 1)
        patch.setattr(router, "FEW_TILES", 4)
        yield


@contextmanager
def inner_in_bf16(*, kernels: bool) -> Iterator[None]:
    """What lies between an expert's products is made bf16, which the kernel that quantises it does in every dtype.

    Triton's interpreter truncates where a GPU rounds.
    """
    plain_up = PlainExperts.plain_up

    def truncated(self: PlainExperts, x: Tensor, routing: Any, gating: Gating) -> Tensor:
        return (plain_up(self, x, routing, gating).view(torch.int32) & -65536).view(torch.float32)

    with pytest.MonkeyPatch.context() as patch:
        if kernels:
            patch.setattr(Fp8Experts, "reads_groups", property(lambda experts: experts._fast))
        else:
            patch.setattr(PlainExperts, "plain_up", truncated)
        yield


def logits(target: Target, num_tokens: int) -> Tensor:
    """[T, V], in fp64."""
    return torch.cat(Runner.start(target, 1, max_len=192).feed(prompts([num_tokens], VOCAB))[0]).double()


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """Of each token, by the norm of the difference; NaN stays NaN."""
    share: Tensor = (found - expected).norm(dim=1) / expected.norm(dim=1)
    return share


@pytest.mark.parametrize("num_tokens", FP8_UNITS)
def test_every_token_is_that_of_plain_torch_whatever_units_its_pass_has(num_tokens: int) -> None:
    """fp32: what differs is the order of sums."""
    expected = logits(made(spec_of(FP8).on(CPU, F32, "fp8"), F32, Strong), num_tokens)
    with small_thresholds(), stand_in_gpu(F32) as launches:
        assert tiles.unit_pairs_of(num_tokens, 3, 7, torch.float8_e4m3fn) == FP8_UNITS[num_tokens]
        found = logits(made(spec_of(FP8).on(CPU, F32), F32, Strong), num_tokens)
    assert errors(found, expected).max() < 1e-4
    assert (launches["route_few_kernel"], launches["list_kernel"]) == ((2, 0) if num_tokens <= 16 else (0, 2))
    assert launches["experts_fp8_kernel"] == 4
    assert launches["combine_fp8_kernel"] == launches["combine_kernel"] == 1, "the next layer quantises, the last norm does not"


@pytest.mark.parametrize("name", [name for name in FAMILIES if "mxfp4" not in name])
def test_each_family_and_format_is_that_of_plain_torch(name: str) -> None:
    spec = spec_of(name)
    expected = logits(made(spec.on(CPU, F32, "fp8" if "fp8" in name else "dtype"), F32, Strong), 17)
    with stand_in_gpu(F32):
        found = logits(made(spec.on(CPU, F32), F32, Strong), 17)
    assert errors(found, expected).max() < 2e-3


class InBf16(Strong):
    """The numbers of bf16 weights in every dtype."""

    def tensor(self, name: str) -> Tensor:
        own, self.dtype = self.dtype, BF16
        try:
            found = super().tensor(name)
        finally:
            self.dtype = own
        return found.to(own) if found.dtype is BF16 else found


@pytest.mark.parametrize("num_tokens", [17, 64])
@pytest.mark.parametrize("name", [FP8, "mxfp4, gpt_oss"])
def test_in_bf16_tokens_are_as_near_to_those_of_fp32_as_plain_torch_comes(name: str, num_tokens: int) -> None:
    """What is rounded to bf16 may choose another expert, or be another number of FP8. Other tokens are off by more than 1."""
    how: Literal["fp8", "dtype"] = "fp8" if name == FP8 else "dtype"
    exact = logits(made(spec_of(name).on(CPU, F32, how), F32, InBf16), num_tokens)
    plain = errors(logits(made(spec_of(name).on(CPU, BF16, how), BF16, InBf16), num_tokens), exact)
    with stand_in_gpu(BF16):
        own = errors(logits(made(spec_of(name).on(CPU, BF16), BF16, InBf16), num_tokens), exact)
    assert own.median() < 1.5 * plain.median()
    assert own.max() < 0.5


@pytest.mark.parametrize("num_tokens", [1, 17, 40])
def test_rows_that_the_first_product_quantises_are_those_that_the_second_one_reads(num_tokens: int) -> None:
    """As in bf16, of units of up to 32 pairs."""
    with inner_in_bf16(kernels=False):
        expected = logits(made(spec_of(FP8).on(CPU, F32, "fp8"), F32, Strong), num_tokens)
    with inner_in_bf16(kernels=True), stand_in_gpu(F32) as launches:
        found = logits(made(spec_of(FP8).on(CPU, F32), F32, Strong), num_tokens)
    assert errors(found, expected).median() < 1e-5
    assert errors(found, expected).max() < 2e-2, "at most a number that the order of a sum rounds to another one of FP8"
    assert launches["quantise_kernel"] == 2, "one a layer, of x"


def decoded(target: Target, drafter: Drafter) -> dict[str, tuple[list[int], int]]:
    """Tokens and number of accepted drafts of each row. More rows than slots: some wait, some rounds have dead rows."""
    engine = make_engine(target, drafter, packed(2, num_verified=max(1, drafter.draft_len), prefill_tokens=24), device=CPU)
    asked = [request(i, [(7 * i + 3 * j) % VOCAB for j in range(4 + 7 * i)], cap=3 + i) for i in range(3)]
    done = list(engine.run(iter(asked)))
    return {one.request_id: (ids_of(one), one.stats.num_accepted if one.stats else 0) for one in done}


def drafter_of(target: Target) -> ChainDrafter:
    head = dummy_head(dummy_spec(target.spec, draft_vocab_size=VOCAB), dtype=target.dtype, device=CPU)
    return ChainDrafter(head, target, 2, slots=2)


SELDOM = ("bf16, mixtral", "bf16, gpt_oss", "fp8 blocks, minimax_m2", "fp8 tensors, calibrated, mixtral")


@pytest.mark.parametrize("name", [FP8, *(pytest.param(name, marks=pytest.mark.slow) for name in SELDOM)])
def test_rounds_emit_the_tokens_of_plain_torch_with_and_without_a_head(name: str) -> None:
    spec = spec_of(name)
    plain = made(spec.on(CPU, F32, "fp8" if "fp8" in name else "dtype"), F32, Strong)
    expected = decoded(plain, NoDrafter()), decoded(plain, drafter_of(plain))
    with stand_in_gpu(F32) as launches:
        target = made(spec.on(CPU, F32), F32, Strong)
        assert (decoded(target, NoDrafter()), decoded(target, drafter_of(target))) == expected
    assert kinds(launches) >= {"verify_kernel", "accept_kernel", "eagle_head_input_kernel", "gather_last_accepted_kernel"}
    assert {row: tokens for row, (tokens, _) in expected[0].items()} == {row: tokens for row, (tokens, _) in expected[1].items()}


def kinds(launches: Counter[str]) -> set[str]:
    return {name for name, count in launches.items() if count}
