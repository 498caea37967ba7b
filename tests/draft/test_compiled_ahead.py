"""What an engine compiles ahead is what its rehearsal and its rounds launch, on a CPU that stands in for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from batchspec.batch.device_batch import SLOT_FIELDS
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.mtp_head import MtpShape, dummy_mtp
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.warm_up import NUM_PROBES, launches, longest_of, move_row, rehearsal_passes
from batchspec.engine.prefill.passes import prefill_chunk
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.step import RoundShape, Segment
from batchspec.kernels.common.dry_run import dry_run, is_dry
from batchspec.kernels.gated_delta import chunk_products, convolve, delta_chunks, delta_steps, gated_norm
from batchspec.kernels.gemm import four_bit_tiles
from batchspec.kernels.latent import verify_latents, write_latents
from batchspec.kernels.mamba2 import gated_group_norm, scan_chunks, scan_steps
from batchspec.kernels.short_conv import short_conv
from batchspec.model.layers.base import NormForm
from batchspec.model.quant import plain
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from tests.helpers.block_heads import tiny_block
from tests.helpers.engines import make_engine, packed
from tests.helpers.int4_layouts import of_gptq
from tests.helpers.latents import latent_spec
from tests.helpers.moe_models import Strong, tiny_spec
from tests.helpers.nvfp4_layouts import MODELOPT
from tests.helpers.recurrent import LoudNoise, mtp_of, recurrent_spec
from tests.helpers.short_convs import conv_spec
from tests.helpers.stand_in_gpu import stand_in_gpu
from tests.helpers.state_spaces import mamba_spec, parallel_spec
from tests.model.test_expert_kernels import CASES, CPU, VOCAB, made

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu_compiled_ahead.py runs on a GPU")
F32, BF16 = torch.float32, torch.bfloat16
INT4: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 96, "quantization_config": of_gptq(32).config}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    **CASES, "int4, llama": ("llama", INT4),
    "nvfp4, qwen3_moe": ("qwen3_moe", {**INT4, "moe_intermediate_size": 96, "quantization_config": MODELOPT}),
}


def kind(value: object) -> object:
    """The properties of an argument for which Triton compiles a kernel anew."""
    match value:
        case Tensor():
            return value.dtype, value.data_ptr() % 16 == 0
        case TensorDescriptor():
            return kind(value.base), value.block_shape
        case bool() | float() | None:
            return value
        case int():
            return "int", value == 1, value % 16 == 0
    return repr(value)


@contextmanager
def recorded() -> Iterator[set[tuple[Any, ...]]]:
    """Collects the variant of each kernel that this block launches; in a dry run it is only noted."""
    launch, found = interpreter.GridExecutor.__call__, set[tuple[Any, ...]]()

    def noted(executor: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(executor.arg_names, args, strict=False)) | kwargs
        constants = executor.constexprs
        found.add((executor.fn.__name__, *sorted((k, repr(v) if k in constants else repr(kind(v))) for k, v in given.items())))
        if not is_dry():
            launch(executor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", noted)
        yield found


def drafter_of(name: str, target: Target) -> Drafter:
    match name:
        case "none":
            return NoDrafter()
        case "lookup":
            return LookupDrafter(3, min_ngram=1, max_ngram=2)
        case "mtp":
            shape = MtpShape.of(target.spec, mtp_of(target.spec, NormForm(offset=1.0, wide=True)))
            return ChainDrafter(dummy_mtp(shape, dtype=target.dtype, device=CPU), target, 3, slots=2)
        case "block" | "dflash2":
            head = tiny_block(target.spec, dtype=target.dtype, device=CPU, dflash2=name == "dflash2")
            return BlockDrafter(head, target, 3, slots=2)
    chain = dummy_head(dummy_spec(target.spec, draft_vocab_size=VOCAB), dtype=target.dtype, device=CPU)
    return ChainDrafter(chain, target, 2, slots=2)


def state(engine: Engine) -> dict[str, Tensor]:
    """Copies of the device state of all rows."""
    executor = engine.executor
    tensors = {name: tensor for name in SLOT_FIELDS for tensor in executor.rows._tensors(name)}
    tensors |= {f"pages {i}": layer.pages for i, layer in enumerate(executor.cache.layers)}
    tensors |= {f"kept {i}": tensor for i, tensor in enumerate(executor.cache.row_tensors)}
    return {name: tensor.clone() for name, tensor in tensors.items()}


GREEDY, SAMPLED = SamplingMode(), SamplingMode(random=True)


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "drafter", "mode"),
    [
        ("bf16, mixtral", "none", GREEDY),
        ("bf16, gpt_oss", "lookup", SAMPLED),
        ("fp8 blocks, qwen3_moe", "mtp", SAMPLED),
        ("int4, llama", "head", GREEDY),
        ("int4, llama", "block", SAMPLED),
        ("bf16, mixtral", "block", GREEDY),
        ("bf16, mixtral", "dflash2", SAMPLED),
        ("nvfp4, qwen3_moe", "head", SAMPLED),
    ],
)
def test_all_variants_of_kernels_are_compiled_ahead_and_nothing_else_happens(
    name: str, drafter: str, mode: SamplingMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has four layers. A dry run runs one layer of each kind, and the last layer."""
    (family, changes), dtype = FORMATS[name], BF16 if name.startswith(("int4", "nvfp4")) else F32
    monkeypatch.setattr(plain, "_can_pack", lambda weight: False)  # a GPU packs no weights for oneDNN
    monkeypatch.setattr(four_bit_tiles, "MOST_TOKENS", 16)  # prefill dequantises
    with stand_in_gpu(dtype):
        target = made(tiny_spec(family, **changes, num_hidden_layers=4).on(CPU, dtype), dtype, Strong)
        batch = packed(2, num_verified=3, prefill_tokens=18, max_len=20)
        options = RoundOptions(row_lengths=True)
        engine = make_engine(target, drafter_of(drafter, target), batch, device=CPU, options=options)
        executor = engine.executor
        longest = executor.drafter.draft_len
        shapes = [RoundShape(num_rows, k, mode) for num_rows in (1, 2) for k in {0, longest}]
        shapes += [RoundShape(2, longest, mode, mean_len=0.5)] if longest else []
        executor.rows.live.zero_()
        executor.rows.provide(mode)
        runs = launches(executor, mode, shapes)
        assert len(runs) > NUM_PROBES
        before = state(engine)
        with recorded() as ahead:
            ended = [dry_run(run, CPU) for run in runs]
        assert ended == [None] * len(runs)
        after = state(engine)
        assert all(torch.equal(after[key], value) for key, value in before.items())
        with recorded() as launched:
            rehearsed = rehearsal_passes(2, max_tokens=18, longest=longest_of(engine.batch))
            move_row(executor)
            for segments in rehearsed:
                prefill_chunk(executor.round, executor.rows, segments, mode)
            for shape in shapes:
                executor.graphs._run(shape)
    assert launched
    assert [variant[0] for variant in launched - ahead] == []
    assert any(not torch.equal(value, state(engine)[key]) for key, value in before.items()), "real runs write"


def kernels_of(*modules: ModuleType) -> dict[str, Sequence[str]]:
    """Their kernels -> the arguments that Triton does not specialise for."""
    named = [(name, kernel) for module in modules for name, kernel in vars(module).items() if name.endswith("_kernel")]
    return {name: kernel.kwargs["do_not_specialize"] or () for name, kernel in named}


KINDS: dict[str, tuple[Callable[[], ModelSpec], dict[str, Sequence[str]]]] = {
    "gated delta": (recurrent_spec, kernels_of(chunk_products, convolve, delta_chunks, delta_steps, gated_norm)),
    "short convolution": (conv_spec, kernels_of(short_conv)),
    "mamba2": (mamba_spec, kernels_of(short_conv, scan_chunks, scan_steps, gated_group_norm)),
    "parallel": (parallel_spec, kernels_of(short_conv, scan_chunks, scan_steps, gated_group_norm)),
    "latent": (latent_spec, kernels_of(verify_latents, write_latents)),
    "latent in e4m3": (lambda: latent_spec().with_fp8_kv(), kernels_of(verify_latents, write_latents)),
}
"""Kinds of layers: a model with such layers, and their kernels."""


def variants_of(kernels: Mapping[str, Sequence[str]], variants: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    own = [(name, given) for name, *given in variants if name in kernels]
    return {(name, *((key, value) for key, value in given if key not in kernels[name])) for name, given in own}


def known_rows(count: int, begin: int, end: int, *, generated: bool = False) -> list[Segment]:
    return [Segment(slot, begin, end, True, generated=generated) for slot in range(count)]


PASSES = {
    "one token": known_rows(1, 0, 1),
    "many rows of one token": known_rows(18, 0, 1),
    "rows longer than the rings": known_rows(6, 0, 20),
    "the end of a long prompt": known_rows(1, 64, 131),
    "one generated token": known_rows(1, 30, 31, generated=True),
    "many rows of one generated token": known_rows(16, 30, 31, generated=True),
    "rows of generated tokens": known_rows(3, 30, 59, generated=True),
}
"""Passes that no rehearsal has, as rows that enter a job or resume after a preemption bring them."""


@pytest.mark.second
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_kind_of_layers_enter_and_resume_without_another_variant_of_a_kernel(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, in steps, and in rounds of each K."""
    spec, kernels = KINDS[kind][0](), KINDS[kind][1]
    monkeypatch.setattr(plain, "_can_pack", lambda weight: False)
    with stand_in_gpu(F32):
        target = Target(spec, LoudNoise(spec, dtype=F32, device=CPU), CPU)
        batch = packed(18, num_verified=3, prefill_tokens=128, max_len=140)
        engine = make_engine(target, drafter_of("lookup", target), batch, device=CPU)
        executor = engine.executor
        shapes = [RoundShape(rows, k, GREEDY) for rows in (1, 16, 18) for k in {0, executor.drafter.draft_len}]
        executor.rows.live.zero_()
        executor.rows.provide(GREEDY)
        before = state(engine)
        with recorded() as ahead:
            ended = [dry_run(launch, CPU) for launch in launches(executor, GREEDY, shapes)]
        assert ended == [None] * len(ended)
        after = state(engine)
        assert all(torch.equal(after[key], value) for key, value in before.items())
        compiled = variants_of(kernels, ahead)
        assert {name for name, *_ in compiled} == kernels.keys()
        for name, segments in PASSES.items():
            with recorded() as launched:
                prefill_chunk(executor.round, executor.rows, segments, GREEDY)
            assert variants_of(kernels, launched), name
            assert variants_of(kernels, launched) <= compiled, name
        with recorded() as launched:
            for shape in shapes:
                executor.graphs._run(shape)
        assert variants_of(kernels, launched) <= compiled
