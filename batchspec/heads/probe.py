"""Which hidden states a head was trained with, by the acceptance of its drafts.

Published configs leave open which boundaries of the residual stream their layer ids mean, and where norms apply. So the head
drafts for the same prompts, greedily, under each reading of its config; it was trained with the reading whose first drafts are
accepted far more often. Then the same prompts are put after longer and longer contexts, made of other prompts and their answers:
a head that was trained on short rows may draft badly there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from batchspec.config.decode_schema import DecodeConfig
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import InputConfig, ModelConfig, RunConfig
from batchspec.config.typed import shipped_prompts
from batchspec.draft.base import Drafter
from batchspec.draft.eagle3 import build_chain
from batchspec.draft.formats import HeadSpec
from batchspec.draft.head import Head
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import load_head, read_head_spec
from batchspec.errors import CheckpointError, InputError
from batchspec.job.load.build import build_engine
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.prepare import Job, open_job
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request, SamplingParams

DRAFT_LEN = 3
SLOTS, PAGE_SIZE, PREFILL_TOKENS = 16, 16, 8192
CONTEXTS = (1024, 4096)
"""Context lengths in tokens, on a GPU; a CPU would take minutes for them."""
CLEAR, LOW, COLLAPSED = 0.03, 0.2, 2 / 3
"""Acceptance by which a reading must be better, besides two standard deviations; acceptance below which no reading is right;
share of the acceptance in short contexts below which it counts as collapsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Acceptance under one reading of the head: of drafts 1 .. K, each given the acceptance of those before it."""

    spec: HeadSpec
    accepted: tuple[float, ...]
    rounds: int

    @property
    def margin(self) -> float:
        """The acceptance by which another reading must be better: two standard deviations of the difference, and CLEAR."""
        return CLEAR + 2 * math.sqrt(0.5 / max(1, self.rounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class InContext:
    """Acceptance of first drafts after contexts of one length."""

    tokens: int
    """Mean length of the prompts, context included."""
    accepted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The measurements."""

    ways: tuple[Found, ...]
    """Readings by boundaries and residual stream; the first is the one of config.json."""
    fed: Found | None
    """The best of them with the other state fed back, which only changes drafts from the second on; None for a parallel head."""
    readings: dict[tuple[int, ...], str]
    """Boundaries -> the value of draft.aux_layers with which config.json is read so."""
    contexts: tuple[InContext, ...]
    num_rows: int

    @property
    def best(self) -> Found:
        base = best_of(self.ways)
        return self.fed if self.fed is not None and sum(self.fed.accepted) > sum(base.accepted) + base.margin else base


def best_of(ways: Sequence[Found]) -> Found:
    """The reading whose first drafts are accepted most; the first one unless another is clearly better."""
    top = max(ways, key=lambda way: way.accepted[0])
    return top if top.accepted[0] > ways[0].accepted[0] + ways[0].margin else ways[0]


def probe(
    model: str, folders: tuple[Path, Path], prompts: str, *, num_rows: int, num_tokens: int, contexts: Sequence[int]
) -> Probe:
    """Run the measurements. folders: those of model and head. Raises ConfigError, InputError, CheckpointError as a job does."""
    job = _job(model, prompts, num_rows, num_tokens)
    requests = _requests(job, num_rows)
    target = Target.load(folders[0], job.spec, dtype=job.dtype, device=job.device)
    stored = load_head(folders[1], job.spec, dtype=job.dtype, device=job.device)
    answers = _decode(target, None, requests)
    ways = tuple(_measure(target, stored, spec, requests) for spec in _ways(stored.spec, job.spec))
    best, fed = best_of(ways).spec, None
    if best.mask_token_id is None:  # a chain feeds its own states back
        fed = _measure(target, stored, replace(best, feed_normed=not best.feed_normed), requests)
    readings = _readings(folders[1], job.spec)
    found = Probe(ways=ways, fed=fed, readings=readings, contexts=(), num_rows=len(requests))
    head = replace(stored, spec=found.best.spec)
    measured = _contexts(target, head, requests, answers, found.best, contexts, job.admission.max_len)
    return replace(found, contexts=measured)


def _job(model: str, prompts: str, num_rows: int, num_tokens: int) -> Job:
    config = RunConfig(
        model=ModelConfig(path=model),
        input=InputConfig(path=shipped_prompts(prompts), limit=num_rows),
        decode=DecodeConfig(max_new_tokens=num_tokens),
        draft=DraftConfig(name="none"),
    )
    return open_job(config)


def _requests(job: Job, num_rows: int) -> list[Request]:
    """Admitted rows, greedy and without stop strings."""
    shards = job.source.shards(num_rows)
    admitted = [item for shard in shards for item in job.admission.admit_compiled(shard) if isinstance(item, Request)]
    if not admitted:
        raise InputError("PROMPTS: no row of the prompts can be run; batchspec plan shows why")
    return [
        replace(item, request_id=str(i), sampling=SamplingParams(), stop=(), sample_index=0, row_index=i)
        for i, item in enumerate(admitted)
    ]


def _ways(stored: HeadSpec, target: ModelSpec) -> list[HeadSpec]:
    """The stored reading first, then boundaries one higher and one lower, each with both residual streams."""
    ways = []
    for shift in (0,) if stored.final_hidden else (0, 1, -1):
        aux_layer_ids = tuple(tap + shift for tap in stored.aux_layer_ids)
        if all(0 <= tap <= target.num_layers for tap in aux_layer_ids):
            residuals = (stored.norm_before_residual, not stored.norm_before_residual)
            ways += [replace(stored, aux_layer_ids=aux_layer_ids, norm_before_residual=residual) for residual in residuals]
    return ways


def _readings(folder: Path, target: ModelSpec) -> dict[tuple[int, ...], str]:
    found: dict[tuple[int, ...], str] = {}
    for name in ("auto", "input", "output"):
        try:
            found.setdefault(read_head_spec(folder, target, aux_layers=name).aux_layer_ids, name)
        except CheckpointError:
            continue  # boundaries that the target does not have
    return found


def _measure(target: Target, head: Head, spec: HeadSpec, requests: Sequence[Request]) -> Found:
    done = _decode(target, replace(head, spec=spec), requests)
    drafted, accepted = (
        np.sum([getattr(c.stats, name) for c in done if c.stats is not None], axis=0) for name in ("drafted_at", "accepted_at")
    )
    before = (int(drafted[0]), *accepted[:-1].tolist())
    shares = tuple(a / max(b, 1) for a, b in zip(accepted.tolist(), before, strict=True))
    return Found(spec=spec, accepted=shares, rounds=int(drafted[0]))


def _decode(target: Target, head: Head | None, requests: Sequence[Request]) -> list[Completion]:
    """Completions of the requests, in their order, by a new engine."""
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    slots = min(SLOTS, len(requests))
    batch = PackedBatch(
        num_slots=slots,
        row_buckets=(slots,),
        num_pages=1 + slots * -(-(longest + DRAFT_LEN + 1) // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_len=longest,
        num_verified=DRAFT_LEN,
        prefill_tokens=PREFILL_TOKENS,
        run_ahead=0,
    )
    config = RunConfig(draft=DraftConfig(adaptive=False))
    drafter: Drafter = NoDrafter() if head is None else build_chain(config, head, target, DRAFT_LEN, slots=slots)
    loaded = LoadedEngine(build_engine(config, target, drafter, batch))
    return sorted(loaded.run(requests), key=lambda c: c.row_index)


def _contexts(
    target: Target,
    head: Head,
    requests: list[Request],
    answers: list[Completion],
    near: Found,
    contexts: Sequence[int],
    max_len: int,
) -> tuple[InContext, ...]:
    """Acceptance after the prompts alone, and after contexts of tokens of other rows before them, up to the model's limit."""
    own = round(sum(len(r.prompt_ids) for r in requests) / len(requests))
    found = [InContext(tokens=own, accepted=near.accepted[0])]
    rows = [np.concatenate((r.prompt_ids, _tokens(c))) for r, c in zip(requests, answers, strict=True)]
    for length in contexts:
        longer = [_after_context(r, rows, length) for r in requests]
        if length <= own or max(len(r.prompt_ids) + r.max_new_tokens for r in longer) > max_len:
            continue
        found.append(InContext(tokens=length, accepted=_measure(target, head, head.spec, longer).accepted[0]))
    return tuple(found)


def _tokens(completion: Completion) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    ids = completion.token_ids
    return np.zeros(0, np.int32) if ids is None else np.asarray(ids, np.int32)


def _after_context(request: Request, rows: list[np.ndarray[tuple[int], np.dtype[np.int32]]], length: int) -> Request:
    """The request with earlier rows put before its prompt, cut at the front so that the prompt has `length` tokens."""
    place, front = request.row_index, np.zeros(0, np.int32)
    needed = max(0, length - len(request.prompt_ids))
    while len(front) < needed:
        place -= 1
        front = np.concatenate((rows[place % len(rows)], front))
    return replace(request, prompt_ids=np.concatenate((front[len(front) - needed :], request.prompt_ids)).astype(np.int32))


def lines_of(found: Probe) -> list[str]:
    """The measurements, the verdict, and a warning if acceptance collapses in long contexts."""
    stored, best = found.ways[0], found.best
    tried = [*found.ways, *([] if found.fed is None else [found.fed])]
    lines = [f"probe     {found.num_rows} prompts, greedy; accepted of drafts 1 .. {DRAFT_LEN}, each given those before it"]
    lines += [f"          {' '.join(f'{x:.2f}' for x in way.accepted)}  {_way(way.spec)}" for way in tried]
    if best.accepted[0] < LOW:
        lines.append(
            f"verdict   none of them: {best.accepted[0]:.0%} of the first drafts at most; is the head made for this model?"
        )
    elif best is stored:
        lines.append(f"verdict   as config.json is read: {_way(stored.spec)}")
    else:
        lines.append(f"verdict   the head was trained with {_way(best.spec)}; {_advice(stored.spec, best.spec, found.readings)}")
    lines.append("context   " + ", ".join(f"{c.accepted:.2f} after {c.tokens:,} tokens" for c in found.contexts))
    last = found.contexts[-1]
    if last.accepted < COLLAPSED * found.contexts[0].accepted:
        lines.append(
            "warning   first drafts collapse in long contexts: draft.window=512 draft.sink_tokens=4 limits the head to the "
            "context lengths that it knows"
        )
    return lines


def _way(spec: HeadSpec) -> str:
    stream = "the normed feature" if spec.norm_before_residual else "the feature without a norm"
    fed = "" if spec.mask_token_id is not None else f", fed back {'after' if spec.feed_normed else 'before'} the final norm"
    read = "the final hidden state" if spec.final_hidden else f"boundaries {', '.join(map(str, spec.aux_layer_ids))}"
    return f"{read}, residual from {stream}{fed}"


def _advice(stored: HeadSpec, best: HeadSpec, readings: dict[tuple[int, ...], str]) -> str:
    changes = []
    if best.aux_layer_ids != stored.aux_layer_ids:
        name = readings.get(best.aux_layer_ids)
        ids = f"eagle_aux_hidden_state_layer_ids {list(best.aux_layer_ids)} in config.json and draft.aux_layers=input"
        changes.append(f"draft.aux_layers={name}" if name else ids)
    if best.norm_before_residual != stored.norm_before_residual:
        changes.append(f"norm_before_residual {str(best.norm_before_residual).lower()} in config.json")
    if best.feed_normed != stored.feed_normed:
        changes.append(f"norm_output {str(best.feed_normed).lower()} in config.json")
    return "set " + " and ".join(changes)
