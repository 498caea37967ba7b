"""Steps of whole runs, and their replay by an executor alone: this module imports no scheduler, no page pool and no clock.

python -m tests.helpers.replaying STEPS   replays a file of recorded steps; exits with 1 if the device's state differs after one
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.corpus import Corpus
from batchspec.draft.head import Head
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.executor import Executor
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.step import ScheduledStep
from batchspec.packed_batch import PackedBatch
from tests.helpers.engines import DEVICE, packed, tiny_target

SLOTS = 4


def head() -> Head:
    spec = dummy_spec(tiny_target(window=5).spec, draft_vocab_size=19, parallel=True)
    return dummy_head(replace(spec, aux_layer_ids=(0, 1, 2)), dtype=torch.float64, device=DEVICE)


def lookup() -> LookupDrafter:
    """With a corpus that a thread builds: when a table is swapped in depends on the clock."""
    corpus = Corpus(200, lengths=(1, 2, 3), device=DEVICE)
    return LookupDrafter(4, min_ngram=1, max_ngram=3, corpus=corpus)


def chain(draft_len: int = 3) -> ChainDrafter:
    return ChainDrafter(head(), tiny_target(window=5), draft_len, slots=SLOTS)


def tree() -> TreeDrafter:
    return TreeDrafter(head(), tiny_target(window=5), TreeShape(topk=2, depth=3, nodes=7), slots=SLOTS)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "lookup": lookup,
    "window": lambda: WindowDrafter(tiny_target(), 3, slots=SLOTS, window=4, sink=1),
    "eagle3": chain,
    "tree": tree,
    "hybrid": lambda: HybridDrafter(chain(2), lookup(), slots=SLOTS, device=DEVICE),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """What both processes must agree on before the first step."""

    drafter: str
    batch: PackedBatch

    @property
    def name(self) -> str:
        return f"{self.drafter}, run_ahead {self.batch.run_ahead}"

    def parts(self) -> dict[str, Any]:
        """Arguments that an engine and an executor share."""
        options = RoundOptions(row_lengths=True)
        return {"drafter": DRAFTERS[self.drafter](), "batch": self.batch, "device": DEVICE, "options": options}

    def executor(self) -> Executor:
        return Executor(tiny_target(window=5), **self.parts())


def scenario(drafter: str, run_ahead: int) -> Scenario:
    num_verified = DRAFTERS[drafter]().shape.num_verified
    batch = packed(SLOTS, num_pages=26, max_len=72, num_verified=num_verified, prefill_tokens=24, run_ahead=run_ahead)
    return Scenario(drafter, batch)


def state_digest(executor: Executor) -> bytes:
    """Of the tokens and page tables, of who lives, and of what was learnt of drafts."""
    rows, chances = executor.rows, executor.round.chances
    learnt = () if chances is None else (chances.tried, chances.accepted)
    found = blake2b(digest_size=16)
    for field in (rows.tokens, rows.num_tokens, *rows.page_tables, rows.live, rows.finish, *learnt):
        found.update(field.cpu().numpy().tobytes())
    return found.digest()


@torch.inference_mode()
def replay(recorded: list[tuple[Scenario, list[tuple[bytes, bytes]]]]) -> list[str]:
    """Scenarios whose state differs after some step, with the step's number."""
    wrong = []
    for one, steps in recorded:
        executor = one.executor()
        for number, (pickled, digest) in enumerate(steps):
            step: ScheduledStep = pickle.loads(pickled)
            executor.execute(step)
            for _ in range(step.num_reads):
                executor.read()
            if state_digest(executor) != digest:
                wrong.append(f"{one.name}: step {number} of {len(steps)}")
                break
    return wrong


if __name__ == "__main__":
    differs = replay(pickle.loads(Path(sys.argv[1]).read_bytes()))
    deciders = {"batchspec.engine.loop.scheduler", "batchspec.engine.slots.allocator", "batchspec.engine.loop.round_planner"}
    print("\n".join([*differs, *(f"{name} was imported" for name in deciders & set(sys.modules))]))
    sys.exit(bool(differs) or bool(deciders & set(sys.modules)))
