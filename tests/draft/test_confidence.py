"""How sure a drafter says it is of each draft, by which rounds choose what they verify: the probability of its own choice.

Of every draft of whole jobs, whose rows are preempted, move to other slots and take the slots of others. Probabilities are those
of definitions that compute a row by itself, in float64, where bins agree exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.pages import KVCache
from batchspec.distributed.collectives import Collectives
from batchspec.draft.assistant import AssistantDrafter
from batchspec.draft.base import Drafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.mtp import MtpDrafter
from batchspec.draft.output import DraftOutput
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.step import ScheduledStep
from batchspec.kernels.gemm.lm_head import TILE
from batchspec.kernels.sampling.argmax import argmax
from batchspec.kernels.sampling.sample import gumbel_reference
from batchspec.model.output_head import NarrowHead, OutputHead, WideHead
from batchspec.model.quant.ordered import OrderedHead
from batchspec.model.target import Target
from batchspec.records import Request, SamplingParams
from tests.engine.test_lossless import lookup
from tests.helpers import mtp_definition
from tests.helpers.assistants import CLUSTERS, SIZE, load_pair, make_assistant, make_target, reference_logits
from tests.helpers.drafting import written_head
from tests.helpers.eagle_reference import Choose, Design, reference_drafts, reference_parallel_drafts, target_ids
from tests.helpers.engines import DEVICE, VOCAB, full_logits, make_engine, one_pass, packed, request, tiny_spec, tiny_target
from tests.helpers.heads import Tensors, random_tensors, tiny_design
from tests.helpers.mtp_checkpoints import make_mtp_model
from tests.helpers.mtp_drafting import CHUNK, Model, load_model, trusting
from tests.helpers.ranks import on_ranks, whole_of
from tests.helpers.recurrent import LoudNoise

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

SLOTS, K = 4, 4
TARGET = partial(tiny_target, window=5)
HOT = 0.8
MOST_JOBS = 20


@pytest.fixture(autouse=True)
def preempted() -> Iterator[None]:
    with trusting():
        yield


@dataclass(frozen=True, slots=True)
class Proposal:
    """The drafts of a row in a round that may count, and the drafter's confidence in each."""

    key: int
    temperature: float
    prefix: tuple[int, ...]
    drafts: tuple[int, ...]
    bins: tuple[int, ...]


LogitsOf = Callable[[Proposal], tuple[list[Tensor], Sequence[int]]]
"""Plain logits for each draft if those before it were proposed, and the token of each of their columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    target: Target
    drafter: Drafter
    logits_of: LogitsOf


def bin_of(logits: Tensor) -> int:
    """The log odds of the likeliest token against all others, from -3 on in steps of 1/4: see `kernels/sampling/argmax.py`."""
    probs = torch.softmax(logits.double().cpu(), -1)
    best = float(probs.max())
    others = float(probs.sum()) - best
    return 31 if others <= 0 else min(31, max(0, math.floor(4 * (3 + math.log(best / others)))))


def expected_bins(proposal: Proposal, logits_of: LogitsOf) -> tuple[int, ...]:
    """Of greedy rows by plain logits, of sampled ones by those with the noise of the target's draw at each position."""
    found, tokens = [], list[int]()
    plain, columns = logits_of(proposal)
    for place, logits in enumerate(plain):
        changed = logits.cpu()
        if proposal.temperature:
            position = torch.tensor([len(proposal.prefix) + place])
            noise = gumbel_reference(torch.tensor([proposal.key]), position, max(columns) + 1)[0]
            changed = changed / proposal.temperature + noise[list(columns)]
        tokens.append(columns[int(changed.argmax())])
        found.append(bin_of(changed))
    assert tuple(tokens) == proposal.drafts
    return tuple(found)


def requests(job: int, *, sampled: bool) -> list[Request]:
    """More than slots and of very different lengths; greedy ones, or every second one is sampled."""
    rng, samplings = np.random.default_rng(job), (SamplingParams(), SamplingParams(temperature=HOT * sampled))
    return [
        request(i, rng.integers(0, VOCAB, 1 + 3 * (i % 4)).tolist(), cap=5 + 9 * (i % 3), sampling=samplings[i % 2], predicted=2)
        for i in range(9)
    ]


def proposals_of(
    case: Case, *, sampled: bool, enough: Callable[[list[Proposal]], bool] = lambda found: True
) -> list[Proposal]:
    """Of jobs whose rounds draft 0 to K tokens: as many as it takes until rows were preempted and, if some are sampled, moved,
    and `enough` is true of the proposals. A GPU draws other weights than a CPU, so the same job may move a row on one of them
    alone.
    """
    drafter = case.drafter
    batch = packed(
        SLOTS, num_pages=16, max_len=40, num_verified=drafter.draft_len, prefill_tokens=CHUNK, run_ahead=1,
        row_buckets=(1, 2, 3, 4),
    )
    engine = make_engine(case.target, drafter, batch, device=DEVICE, lengths=4)
    found, steps, preempted = note_proposals(engine), list[ScheduledStep](), 0
    execute = engine.executor.execute

    def noted(step: ScheduledStep) -> None:
        steps.append(step)
        execute(step)

    engine.executor.execute = noted  # type: ignore[method-assign]
    for job in range(MOST_JOBS):
        assert len(list(engine.run(iter(requests(job, sampled=sampled))))) == 9
        preempted += engine.totals.preempted
        if (
            preempted
            and (any(step.moves for step in steps) or not sampled)
            and any(refill.tokens for step in steps for refill in step.refills)
            and {len(one.drafts) for one in found} >= set(range(1, drafter.draft_len + 1))
            and enough(found)
        ):
            return found
    raise AssertionError(f"{MOST_JOBS} jobs did not show what the test is about")


def note_proposals(engine: Engine) -> list[Proposal]:
    """Is filled with what the engine's drafter proposes for live rows."""
    drafter, found = engine.drafter, list[Proposal]()
    propose = drafter.propose

    def noted(rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        propose(rows, draft_ids, draft_len, cache)
        confidence = drafter.confidence
        assert confidence is not None
        for slot in rows.live.nonzero().flatten().tolist():
            num, limit = int(rows.num_tokens[slot]), int(rows.limit[slot])
            count = min(int(draft_len[slot]), limit - num - 1)
            if count > 0:
                tokens, drafts, bins = (line[slot].tolist() for line in (rows.tokens, draft_ids, confidence))
                temperature = float(rows.temperature[slot])
                found.append(
                    Proposal(int(rows.keys[slot]), temperature, tuple(tokens[:num]), tuple(drafts[:count]), tuple(bins[:count]))
                )

    drafter.propose = noted  # type: ignore[method-assign]
    return found


# --- drafters, and their probabilities by definition


def following(proposal: Proposal, columns: Sequence[int], seen: list[Tensor]) -> Choose:
    """Chooses what was drafted, and keeps the logits."""
    drafts = iter(proposal.drafts)

    def choose(logits: Tensor, *_: object) -> int:
        seen.append(logits.clone())
        return columns.index(next(drafts))

    return choose


def of_head(reference: Callable[..., list[int]], design: Design, tensors: Tensors) -> LogitsOf:
    def logits_of(proposal: Proposal) -> tuple[list[Tensor], Sequence[int]]:
        seen, columns = list[Tensor](), target_ids(design, tensors)
        choose = following(proposal, columns, seen)
        reference(design, tensors, TARGET(), proposal.prefix, len(proposal.drafts), choose=choose)
        return seen, columns

    return logits_of


def chain(folder: Path, **options: Any) -> Case:
    design = tiny_design(TARGET().spec, layers=2, windows=(None, 4), norm_before_residual=True)
    tensors = random_tensors(design, seed=3)
    drafter = ChainDrafter(written_head(folder, design, tensors), TARGET(), K, slots=SLOTS, **options)
    return Case(TARGET(), drafter, of_head(reference_drafts, design, tensors))


def parallel(folder: Path) -> Case:
    design = tiny_design(TARGET().spec, mask_id=17)
    tensors = random_tensors(design, seed=5)
    drafter = ParallelDrafter(written_head(folder, design, tensors), TARGET(), K, slots=SLOTS)
    return Case(TARGET(), drafter, of_head(reference_parallel_drafts, design, tensors))


def after_each(model: Target) -> LogitsOf:
    """Of a language model that reads its own drafts."""
    return lambda proposal: (
        [full_logits(model, [*proposal.prefix, *proposal.drafts[:k]]) for k in range(len(proposal.drafts))], range(VOCAB)
    )


@cache
def loud(window: int) -> Target:
    """A model whose probabilities differ."""
    return whole_of(tiny_spec(window), LoudNoise)


def pard(_: Path, *, masks: bool) -> Case:
    drafting = PardModel(PardSpec(model=loud(3).spec, mask_token_id=VOCAB - 1), loud(3))
    drafter = PardDrafter(drafting, TARGET().spec, K, slots=SLOTS, parallel=masks)

    def logits_of(proposal: Proposal) -> tuple[list[Tensor], Sequence[int]]:
        """Of one pass in which mask tokens follow the newest token."""
        ids = [*proposal.prefix, *[VOCAB - 1] * (len(proposal.drafts) - 1)]
        hidden, _ = one_pass(drafting.model, ids)
        return list(drafting.model.logits(hidden[len(proposal.prefix) - 1 :])), range(VOCAB)

    return Case(TARGET(), drafter, logits_of if masks else after_each(drafting.model))


def window(_: Path) -> Case:
    """With all keys in its window the target drafts with its own probabilities."""
    return Case(loud(5), WindowDrafter(loud(5), K, slots=SLOTS, window=None), after_each(loud(5)))


def mtp(folder: Path) -> Case:
    make_mtp_model(folder, "dense")
    return mtp_case(load_model(folder))


def mtp_case(model: Model) -> Case:
    def logits_of(proposal: Proposal) -> tuple[list[Tensor], Sequence[int]]:
        seen = list[Tensor]()
        rows = mtp_definition.Rows(model.mtp, model.target, [proposal.prefix])
        choose: Any = following(proposal, range(VOCAB), seen)
        rows.drafts(proposal.prefix, len(proposal.drafts), choose)
        return seen, range(VOCAB)

    return Case(model.target, MtpDrafter(model.weights, model.target, K, slots=SLOTS), logits_of)


def assistant(folder: Path, **config: Any) -> Case:
    """It reads K and V of layers that have a window and of layers that read all keys."""
    target = make_target(folder / "target", "own values")
    own = make_assistant(folder / "assistant", target, **config)
    (model, weights), logits = load_pair(target, own), reference_logits(target, own)
    drafter = AssistantDrafter(weights, model, K, slots=SLOTS)
    return Case(model, drafter, lambda proposal: (logits(proposal.prefix, proposal.drafts), range(SIZE)))


CASES: dict[str, Callable[[Path], Case]] = {
    "chain": chain,
    "chain, general": partial(chain, uniform_slots=False, dead_positions=False, argmax=False),
    "parallel": parallel,
    "pard": partial(pard, masks=True),
    "pard chain": partial(pard, masks=False),
    "window": window,
    "mtp": mtp,
    "assistant": assistant,
    "assistant, clusters": partial(assistant, **CLUSTERS),
}


@torch.inference_mode()
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_confidence_in_a_draft_is_the_bin_of_its_probability(name: str, sampled: bool, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    found = proposals_of(case, sampled=sampled)
    wrong = [one for one in found if one.bins != expected_bins(one, case.logits_of)]
    assert not wrong, f"{len(wrong)} of {len(found)}"
    for is_hot in (False, True) if sampled else (False,):
        assert len({number for one in found if (one.temperature > 0) == is_hot for number in one.bins}) > 5


def test_ranks_have_the_confidence_of_one_process(tmp_path: Path) -> None:
    """Each has a part of the vocabulary, and computes a part of the layer that drafts."""
    make_mtp_model(tmp_path, "dense")

    def found(ranks: Collectives | None = None) -> list[Proposal]:
        model = load_model(tmp_path, ranks=ranks)
        return proposals_of(mtp_case(model), sampled=False)

    expected = found()
    assert on_ranks(2, found) == [expected] * 2


def unmoved(patch: pytest.MonkeyPatch) -> None:
    """The row that moves has the confidence of the slot that it moves to."""
    row_tensors: Any = KVCache.row_tensors
    moved = row_tensors.fget
    patch.setattr(KVCache, "row_tensors", property(lambda self: moved(self)[:-1]))


def of_the_slot(patch: pytest.MonkeyPatch) -> None:
    """A row that enters a slot has the confidence of the row before it."""
    enter = KVCache.enter

    def entered(self: KVCache, slot_ids: Tensor, kv_len: Tensor, values: Sequence[Tensor]) -> None:
        first, hidden, _ = values
        enter(self, slot_ids, kv_len, (first, hidden, self.draft_rows[2][slot_ids]))

    patch.setattr(KVCache, "enter", entered)


@torch.inference_mode()
@pytest.mark.parametrize("fault", [unmoved, of_the_slot])
def test_a_first_draft_with_the_confidence_of_another_row_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = chain(tmp_path)
    fault(monkeypatch)

    def differs(found: list[Proposal]) -> bool:
        return any(one.bins[0] != expected_bins(one, case.logits_of)[0] for one in found)

    found = proposals_of(case, sampled=True, enough=differs)
    assert all(one.bins[1:] == expected_bins(one, case.logits_of)[1:] for one in found)


def matched(prefix: Sequence[int], most: int) -> int:
    """Number of newest tokens that occurred together before, at most so many."""
    for count in range(min(most, len(prefix) - 1), 0, -1):
        newest = list(prefix[len(prefix) - count :])
        if any(list(prefix[at : at + count]) == newest for at in range(len(prefix) - count)):
            return count
    return 0


@torch.inference_mode()
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["chain", "parallel"])
def test_a_hybrid_says_which_of_both_drafted_and_how_sure_that_one_is(name: str, sampled: bool, tmp_path: Path) -> None:
    """Numbers after those of the head are lengths of the lookup's match."""
    case = CASES[name](tmp_path)
    head: Any = case.drafter
    drafter = HybridDrafter(head, lookup(K, 3, 0), slots=SLOTS, device=DEVICE)
    assert drafter.prior_chances == (*head.prior_chances, *drafter.lookup.prior_chances)
    first = len(head.prior_chances)

    def both(found: list[Proposal]) -> bool:
        num_copied = sum(one.bins[0] >= first for one in found)
        return min(num_copied, len(found) - num_copied) > 10

    found = proposals_of(replace(case, drafter=drafter), sampled=sampled, enough=both)
    copied = [one for one in found if one.bins[0] >= first]
    drafted = [one for one in found if one.bins[0] < first]
    for one in copied:
        assert one.bins == (first + matched(one.prefix, 3),) * len(one.drafts)
    wrong = [one for one in drafted if one.bins != expected_bins(one, case.logits_of)]
    assert not wrong, f"{len(wrong)} of {len(drafted)}"


def test_the_confidence_of_a_lookup_is_the_length_of_its_match() -> None:
    """It keeps nothing of a row."""
    engine = make_engine(TARGET(), lookup(K, 3, 0), packed(SLOTS, num_verified=K), device=DEVICE, lengths=4)
    found = note_proposals(engine)
    asked = [request(i, [i, 4, 5, 6] * (1 + i), cap=20, sampling=SamplingParams(temperature=i % 2)) for i in range(6)]
    assert len(list(engine.run(iter(asked)))) == len(asked)
    for one in found:
        assert one.bins == (matched(one.prefix, 3),) * len(one.drafts)
    assert {one.bins[0] for one in found} >= {1, 3}


@pytest.mark.parametrize("kind", ["narrow", "ordered", "wide"])
def test_every_output_head_says_how_sure_its_greedy_choice_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of a wider tensor is written, by the kernel that writes no logits too."""
    monkeypatch.setattr("batchspec.model.output_head.gemm_tile", lambda *_: TILE)
    noise = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 32, generator=noise).to(DEVICE, torch.bfloat16) for n in (9, 77))
    heads: dict[str, Callable[[Tensor], OutputHead]] = {"narrow": NarrowHead, "ordered": OrderedHead, "wide": WideHead}
    ids, wanted_ids, wanted = torch.full((3, 9), -7, dtype=torch.int32, device=DEVICE)
    found = torch.full((9, 3), -7, dtype=torch.int32, device=DEVICE)
    heads[kind](weight).greedy(hidden, out_ids=ids, vocab=70, flag_nonfinite=False, out_confidence=found[:, 1])
    argmax(hidden.float() @ weight[:70].float().t(), out_ids=wanted_ids, out_confidence=wanted)
    assert ids.equal(wanted_ids)
    assert (found[:, 1] - wanted).abs().max() <= 1, "a sum in another order may fall on the other side of a border"
    assert (found[:, 1] == wanted).sum() >= 7
    assert found[:, [0, 2]].eq(-7).all()


@pytest.mark.parametrize("way", ["one kernel", "two kernels", "softmax"])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_head_of_its_own_says_how_sure_each_draft_is_in_every_way(
    way: str, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are target ids, and as sure as the choice among the head's own tokens."""
    monkeypatch.setattr(DraftOutput, "_fused_tile", lambda *_: TILE if way == "one kernel" else None)
    noise = torch.Generator().manual_seed(2)
    hidden, matrix = (torch.randn(n, 32, generator=noise).to(DEVICE, torch.bfloat16) for n in (9, 40))
    map_ids = (3 * torch.arange(40) + 1).int().to(DEVICE) if mapped else None
    output = DraftOutput(
        tiny_target(torch.bfloat16), matrix, map_ids, draft_vocab_size=40, part=slice(0, 40), ranks=None, argmax=way != "softmax"
    )
    drafts, found = torch.full((2, 9, 3), -7, dtype=torch.int32, device=DEVICE).unbind()
    output.choose(hidden, drafts[:, 1], out_confidence=found[:, 1])
    own_ids, wanted = torch.full((2, 9), -7, dtype=torch.int32, device=DEVICE).unbind()
    argmax(hidden.float() @ matrix.float().t(), out_ids=own_ids, out_confidence=wanted)
    assert drafts[:, 1].equal(own_ids if map_ids is None else map_ids[own_ids])
    assert (found[:, 1] - wanted).abs().max() <= 1, "a sum in another order may fall on the other side of a border"
    assert (found[:, 1] == wanted).sum() >= 7
    assert drafts[:, [0, 2]].eq(-7).all()
    assert found[:, [0, 2]].eq(-7).all()
