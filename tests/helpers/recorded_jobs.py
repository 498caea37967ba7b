"""The jobs of `python -m tests.recording`: tiny models in float64, all requests given before the first step, no clock, no thread.

K is fixed in all of them: an adaptive engine chooses it by measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from batchspec.automata.lazy_automaton import Answer, Ask
from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.mtp import MtpDrafter
from batchspec.draft.mtp_head import MtpShape, dummy_mtp
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.model.target import Target
from batchspec.records import Request, SamplingParams
from tests.engine.test_lossless import block_head, hybrid, lookup, parallel_head, pard_model
from tests.engine.test_lossless_combined import ROOMS
from tests.helpers.automata import EOS, VOCABULARY, automaton
from tests.helpers.engines import DEVICE, VOCAB, decode, make_engine, packed, request, tiny_target
from tests.helpers.grammars import GRAMMARS, ExpandLate, lazy
from tests.helpers.int4_layouts import of_gptq
from tests.helpers.latents import latent_target
from tests.helpers.moe_models import Strong, tiny_moe, tiny_spec
from tests.helpers.recurrent import LoudNoise, mtp_of, recurrent_spec, recurrent_target
from tests.helpers.short_convs import conv_target
from tests.helpers.state_spaces import mamba_target
from tests.model.test_fp8 import TOKEN, compressed
from tests.model.test_lora_lossless import NUM_ADAPTERS, adapted_target

SLOTS = 4
HOT = SamplingParams(temperature=1.0, top_k=9, repetition_penalty=1.2)


def rows(*, sampling: SamplingParams | None = None, prefix: int = 0, cap: int = 12, longest: int = 10) -> list[Request]:
    """Six rows, more than there are slots. prefix: so many tokens begin the prompts of half of them."""
    random = np.random.default_rng(0)
    common = random.integers(0, VOCAB, prefix).tolist()
    prompts = [random.integers(0, VOCAB, 1 + i * longest // 6).tolist() for i in range(6)]
    return [
        request(
            i, [*common, *prompt] if i % 2 else prompt, cap=cap + i, sampling=sampling, predicted=4,
            stop_ids=(3,) if i < 2 else (),
        )
        for i, prompt in enumerate(prompts)
    ]


def both() -> list[Request]:
    """Greedy and sampled rows, a stop string, and a prefix of some pages."""
    mixed = [replace(row, sampling=HOT) if i % 3 == 1 else row for i, row in enumerate(rows(prefix=19))]
    return [*mixed[:5], replace(mixed[5], stop=("A", "Z"))]


def constrained(*, late: bool = False) -> list[Request]:
    """Rows that follow regular expressions, or whose automata are computed while they wait; every third one is free."""
    found = []
    for i, row in enumerate(rows(cap=8)):
        row = replace(row, stop_ids=(EOS,))
        if i % 3 < 2:
            made = lazy(GRAMMARS[i % len(GRAMMARS)]) if late else automaton(("(ab|c)*d", "[a-d]{3,9}")[i % 2])
            row = replace(row, automaton=made, automaton_state=made.answer)
        found.append(row)
    return found


def scored() -> list[Request]:
    return [replace(row, max_new_tokens=0, predicted_tokens=0, stop_ids=()) for row in rows(prefix=17)]


def quantised(config: Mapping[str, Any]) -> Target:
    """A Llama of two layers with weights in this format."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    spec = tiny_spec("llama", **shape, quantization_config=dict(config))
    return Target(spec, Strong(spec, dtype=torch.float64, device=DEVICE), DEVICE)


@cache
def target_of_mtp() -> Target:
    plain = recurrent_spec()
    spec = replace(plain, mtp=mtp_of(plain))
    return Target(spec, LoudNoise(spec, dtype=torch.float64, device=DEVICE), DEVICE)


def mtp(target: Target) -> Drafter:
    assert target.spec.mtp is not None
    weights = dummy_mtp(MtpShape.of(target.spec, target.spec.mtp), dtype=torch.float64, device=DEVICE)
    return MtpDrafter(weights, target, 3, slots=SLOTS)


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "none": lambda _: NoDrafter(),
    "lookup": lambda _: lookup(4, 3, 100),
    "window": lambda target: WindowDrafter(target, 3, slots=SLOTS, window=4, sink=1),
    "eagle3": lambda target: ChainDrafter(parallel_head(), target, 3, slots=SLOTS),
    "parallel": lambda target: ParallelDrafter(parallel_head(), target, 3, slots=SLOTS),
    "block": lambda target: BlockDrafter(block_head(), target, 3, slots=SLOTS),
    "pard": lambda target: PardDrafter(pard_model(), target.spec, 3, slots=SLOTS, parallel=True),
    "tree": lambda target: TreeDrafter(parallel_head(), target, TreeShape(topk=2, depth=3, nodes=7), slots=SLOTS),
    "hybrid": lambda _: hybrid(4, 2, SLOTS, chain=True, corpus_tokens=50),
    "mtp": mtp,
}


class AskedOnly(ExpandLate):
    """Which states are read ahead depends on the time that they take."""

    def submit(self, ask: Ask) -> Future[Answer]:
        return super().submit(replace(ask, reads_ahead=False))


def windowed() -> Target:
    return tiny_target(window=5)


@dataclass(frozen=True, kw_only=True)
class Job:
    drafter: str = "none"
    target: Callable[[], Target] = windowed
    rows: Callable[[], list[Request]] = both
    short_cap: int = 512
    """As SHORT_CAP_TOKENS of the engine: below the rows' caps pages run out, and rows are preempted."""
    batch: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `make_engine`."""
    late: int | None = None
    """Seed with which the states of lazy automata come late."""

    def engine(self) -> Engine:
        target = self.target()
        batch = packed(SLOTS, **{"num_pages": 90, "run_ahead": 1, **self.batch})
        expanding = None if self.late is None else AskedOnly(self.late)
        return make_engine(
            target, DRAFTERS[self.drafter](target), batch, device=DEVICE, decode=decode, expanding=expanding, **self.options
        )


FEW_PAGES: dict[str, Any] = {
    "rows": partial(rows, cap=24), "short_cap": 0, "batch": {"num_pages": 16, "max_len": 60, "prefill_tokens": 7},
}
"""Rows are preempted."""
AUTOMATA: dict[str, Any] = {"vocabulary": VOCABULARY, "automata_capacity": ROOMS[0]}
JOBS: dict[str, Job] = {
    "greedy rows": Job(rows=rows),
    "sampled rows": Job(rows=partial(rows, sampling=HOT)),
    "lookup": Job(drafter="lookup"),
    "window drafter": Job(drafter="window"),
    "eagle3": Job(drafter="eagle3"),
    "eagle3, a part verified": Job(drafter="eagle3", options={"lengths": 1}),
    "parallel": Job(drafter="parallel"),
    "block": Job(drafter="block"),
    "pard": Job(drafter="pard"),
    "tree": Job(drafter="tree"),
    "hybrid": Job(drafter="hybrid"),
    "mtp, recurrent layers": Job(drafter="mtp", target=target_of_mtp),
    "few pages, short passes": Job(drafter="lookup", **FEW_PAGES),
    "few pages, eagle3": Job(drafter="eagle3", **FEW_PAGES),
    "FP8 weights": Job(target=lambda: quantised(compressed("channel", TOKEN))),
    "INT4 weights": Job(target=lambda: quantised(of_gptq(32, sym=False).config)),
    "e4m3 K/V": Job(drafter="lookup", target=partial(tiny_target, window=5, fp8_kv=True)),
    "experts": Job(drafter="lookup", target=cache(lambda: tiny_moe("qwen3_moe"))),
    "recurrent layers": Job(
        drafter="lookup", target=recurrent_target, rows=partial(rows, prefix=70), batch={"max_len": 120, "prefill_tokens": 64}
    ),
    "latent attention": Job(drafter="lookup", target=latent_target),
    "short convolutions": Job(drafter="lookup", target=conv_target),
    "mamba2": Job(
        drafter="lookup", target=mamba_target, rows=partial(rows, prefix=70), batch={"max_len": 120, "prefill_tokens": 64}
    ),
    "adapters": Job(
        drafter="eagle3", target=adapted_target,
        rows=lambda: [replace(row, adapter=i % (NUM_ADAPTERS + 1)) for i, row in enumerate(both())],
    ),
    "structured output": Job(drafter="lookup", rows=constrained, options=AUTOMATA),
    "lazy automata": Job(drafter="lookup", rows=partial(constrained, late=True), late=1, options=AUTOMATA),
    "logprobs": Job(drafter="eagle3", options={"logprobs": 2}),
    "scoring": Job(rows=scored, batch={"num_verified": 0, "prefill_tokens": 16}, options={"logprobs": 2, "scores": True}),
}
