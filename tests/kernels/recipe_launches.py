"""A program that compiles what jobs launch on a card, without the card: `recipe_launches.py CARD [--no-compile] RECIPE ...`.

The engine of a model in its true sizes, but of few layers and with a small vocabulary, is dry-run (`kernels/common/dry_run.py`)
with tensors of the CPU that say that they lie on a GPU, and with a driver that only tells the architecture. Launches are compiled
with the arguments, tiles and specialisations of a job. Weights are zeros, which take no memory until they are written.
Prints a JSON line a launch that ended early, {"ended": why}, and at the end {"launches": how many, "compiled": how many kernels}.
The kernels are in TRITON_CACHE_DIR. With --no-compile launches are checked only, which takes a tenth of the time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.mtp import MtpDrafter
from batchspec.draft.mtp_head import MtpShape, dummy_mtp
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.warm_up import launches
from batchspec.engine.rounds.graphs import Graphs
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.rounds.round_widths import partial_widths
from batchspec.engine.step import RoundShape
from batchspec.kernels.common import pdl
from batchspec.kernels.common.card import Card, assumed
from batchspec.kernels.common.dry_run import dry_run
from batchspec.kernels.moe.mxfp4 import Mxfp4Weight, mxfp4_shapes
from batchspec.model import weights
from batchspec.model.families.shapes import COMMON, SHAPES
from batchspec.model.layers.attention.padded import TorchPlan
from batchspec.model.layers.base import TensorSpec
from batchspec.model.quant import fp8_products, mxfp4, plain
from batchspec.model.spec import read_spec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from batchspec.tuning import policy
from batchspec.tuning.cards import known_card
from tests.helpers.attentions import attentions
from tests.helpers.engines import make_engine, packed

NO_COMPILE = "--no-compile"
CPU, BF16 = torch.device("cpu"), torch.bfloat16
NUM_DRAFTS, ROWS, PASS_TOKENS = 3, (1, 8, 64), 4096
STORED = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32}


@dataclass(frozen=True, slots=True)
class Recipe:
    shape: str
    """Of model/families/shapes.py."""
    drafter: str
    """head, mtp or lookup."""
    fp8_kv: bool = False
    random: bool = False
    """Rows are sampled, not greedy."""
    layers: int = 2
    """Number of layers, all kinds of layers among them."""


RECIPES = {
    "llama8b": Recipe("llama8b", "head"),
    "llama8b-fp8": Recipe("llama8b-fp8", "head", random=True),
    "llama8b-fp8-kv": Recipe("llama8b-fp8", "lookup", fp8_kv=True),
    "qwen3-30b-a3b": Recipe("qwen3-30b-a3b", "head"),
    "qwen3-30b-a3b-fp8": Recipe("qwen3-30b-a3b-fp8", "lookup"),
    "llama8b-int4": Recipe("llama8b-int4", "head"),
    "qwen3-30b-a3b-int4": Recipe("qwen3-30b-a3b-int4", "lookup"),
    "qwen3-30b-a3b-nvfp4": Recipe("qwen3-30b-a3b-nvfp4", "head"),
    "gpt-oss-20b": Recipe("gpt-oss-20b", "head"),
    "qwen3.5-35b-a3b": Recipe("qwen3.5-35b-a3b", "mtp", random=True, layers=4),
    "gemma4-26b-a4b": Recipe("gemma4-26b-a4b", "lookup", layers=6),
    "smol135m": Recipe("smol135m", "head"),
}
"""What the pages and jobs/ recommend: model and drafter."""


def runs_on(name: str, card: Card) -> bool:
    """FP8 K/V is refused on cards without e4m3."""
    return card.has_e4m3 or not RECIPES[name].fp8_kv


def zeros(made: DummyWeights, tensor: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    """A tensor of zeros whose memory is never touched; an index gets valid numbers, and a scale of one number is 1."""
    if tensor.role == "index":
        return made._integers(tensor, shape)
    stored = STORED.get(tensor.dtypes[0]) if len(tensor.dtypes) == 1 else None
    dtype = stored or weights._dtype_of(tensor, made.dtype)
    return torch.ones(shape, dtype=dtype) if tensor.role == "scale" and shape == (1,) else torch.zeros(shape, dtype=dtype)


@contextmanager
def standing_for(card: Card, *, compiles: bool) -> Iterator[None]:
    """CPU tensors pass for tensors of the card; nothing is launched. Without `compiles`, no kernel is compiled either."""
    major, minor = card.capability
    driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32), get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    ))

    def product(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype) if out is None else out

    def shuffled(blocks: Tensor, scales: Tensor, *, gated: bool) -> Mxfp4Weight:
        rows, k = scales.shape[0], 32 * scales.shape[1]
        words, exponents = (torch.empty(shape, dtype=torch.uint8) for shape in mxfp4_shapes(rows, k))
        return Mxfp4Weight(words, exponents, rows, k, gated)

    with pytest.MonkeyPatch.context() as patch, assumed(card):
        if not compiles:
            patch.setattr(JITFunction, "run", lambda kernel, *args, **options: None)
        patch.setattr(policy, "has_kernels", lambda device: True)
        patch.setattr(fp8_products, "has_scaled_mm", lambda *args, **kwargs: False)
        patch.setattr(pdl, "supported", lambda device: card.overlaps_launches)
        patch.setattr(plain, "_can_pack", lambda weight: False)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        patch.setattr(torch, "mm", product)
        patch.setattr(TorchPlan, "attend", lambda plan, q, *args, **kwargs: torch.empty_like(q))
        patch.setattr(Graphs, "run", Graphs._run)
        patch.setattr(mxfp4, "shuffle_mxfp4", shuffled)
        patch.setattr(DummyWeights, "_noise", zeros)
        yield


def engine_of(recipe: Recipe) -> tuple[Engine, int]:
    """An engine for many rows, and the number of drafts of a round."""
    small: dict[str, Any] = {"num_hidden_layers": recipe.layers, "vocab_size": 32768}
    spec = read_spec(COMMON | SHAPES[recipe.shape] | small, recipe.shape).on(CPU, BF16, "auto")
    spec = spec.with_fp8_kv() if recipe.fp8_kv else spec
    target = Target(spec, DummyWeights(spec, dtype=BF16, device=CPU), CPU)
    if recipe.fp8_kv:
        target.kv_scales = tuple(torch.ones(2, attentions(spec)[0].num_kv_heads) for _ in range(spec.num_layers))
    batch = packed(
        max(ROWS), num_pages=600, page_size=16, max_len=1536, num_verified=NUM_DRAFTS, prefill_tokens=PASS_TOKENS,
        row_buckets=ROWS,
    )
    drafter: Drafter
    match recipe.drafter:
        case "head":
            head = dummy_head(dummy_spec(spec, draft_vocab_size=16384), dtype=BF16, device=CPU)
            drafter = ChainDrafter(head, target, NUM_DRAFTS, slots=max(ROWS))
        case "mtp":
            assert spec.mtp is not None
            shape = MtpShape.of(spec, replace(spec.mtp, formats=spec.formats))
            drafter = MtpDrafter(dummy_mtp(shape, dtype=BF16, device=CPU), target, NUM_DRAFTS, slots=max(ROWS))
        case _:
            drafter = LookupDrafter(NUM_DRAFTS, min_ngram=1, max_ngram=2)
    return make_engine(target, drafter, batch, device=CPU, options=RoundOptions(row_lengths=True)), NUM_DRAFTS


def dry_runs(recipe: Recipe) -> list[str | None]:
    """Dry-run all launches that prepare an engine of the recipe. Returns for each why it ended early, or None."""
    with torch.inference_mode():
        engine, most = engine_of(recipe)
        executor, mode = engine.executor, SamplingMode(random=recipe.random)
        executor.rows.live.zero_()
        executor.rows.provide(mode)
        shapes = [RoundShape(rows, drafts, mode) for rows in ROWS for drafts in (0, most)]
        shapes += [RoundShape(max(ROWS), most, mode, mean_len=mean_len) for _, mean_len in partial_widths((0, most))]
        return [dry_run(launch, CPU) for launch in launches(executor, mode, shapes)]


def main() -> None:
    num_launches = compiled = 0

    def listener(**event: Any) -> None:
        nonlocal compiled
        compiled += not event["cache_hit"]

    card, *names = sys.argv[1:]
    triton.knobs.compilation.listener = listener
    with standing_for(known_card(card).card, compiles=NO_COMPILE not in names):
        for name in [name for name in names if name != NO_COMPILE]:
            for ended in dry_runs(RECIPES[name]):
                num_launches += 1
                if ended:
                    print(json.dumps({"ended": f"{name}: {ended}"}), flush=True)
    print(json.dumps({"launches": num_launches, "compiled": compiled}), flush=True)


if __name__ == "__main__":
    main()
