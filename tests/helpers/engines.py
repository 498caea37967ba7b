"""Parts shared by the engine tests: a tiny float64 target, a plain decoder as reference, drafters that force acceptance."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchspec.automata.lazy_automaton import Expanding
from batchspec.automata.token_automaton import TokenSymbols
from batchspec.batch.automata import AutomataCapacity
from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.groups import KVGroups
from batchspec.cache.pages import KVCache
from batchspec.cache.sharing_cost import SharingCost
from batchspec.draft.base import Drafter, NoFeatures
from batchspec.kernels.sampling.sample import gumbel_reference
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.records import Repetition, Request, SamplingParams
from tests.helpers.attentions import attentions
from tests.helpers.ngrams import forbidden
from tests.helpers.stand_ins import dense_spec

if TYPE_CHECKING:
    from batchspec.engine.features.lazy_constraints import LazyConstraints
    from batchspec.engine.features.stop_strings import Decode
    from batchspec.engine.loop.engine import Engine

VOCAB = 31
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the engine tests run: on a GPU machine they test the same code on the card."""


def tiny_spec(window: int | None = None, **changes: Any) -> ModelSpec:
    """Two layers of 16 numbers, fields as of `dense_spec`."""
    shape: dict[str, Any] = {
        "family": "llama", "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "intermediate_size": 24,
        "vocab_size": VOCAB, "rms_eps": 1e-6, "rope": RopeSpec(type="default", theta=100.0), "windows": (window, None),
        "tie": False, "eos_ids": (), "max_len": 256, "dtype": "float64", "generation": {},
    }
    return dense_spec(**(shape | changes))


@cache
def tiny_target(dtype: torch.dtype = torch.float64, window: int | None = None, fp8_kv: bool = False) -> Target:
    """Two layers of noise, scaled up so that the distribution is not flat and greedy output neither loops at once nor never."""
    target = Target.load(Path(), tiny_spec(window), dtype=dtype, device=DEVICE, dummy=True)
    return in_e4m3(target) if fp8_kv else target


def share_always(patch: pytest.MonkeyPatch) -> None:
    """Rounds read every shared prefix once, however little that saves: a test's rows are short."""
    patch.setattr(SharingCost, "pays", lambda cost, groups: bool(groups))


def in_e4m3(target: Target) -> Target:
    """The same target with an e4m3 cache: other scales in each head, and some numbers that saturate."""
    spec = target.spec
    twin = copy(target)
    twin.spec = spec.with_fp8_kv()
    shape = (spec.num_layers, 2, attentions(spec)[0].num_kv_heads)
    count = torch.arange(spec.num_layers * 2 * attentions(spec)[0].num_kv_heads, device=DEVICE)
    twin.kv_scales = None  # not those of `target`
    twin.use_kv_scales((1.5e-4 * (1 + 0.17 * count)).view(shape))
    return twin


@cache
def uneven_target(window: int, fp8_kv: bool = False) -> Target:
    """Of four layers two read all keys, and have one K/V head of 6 numbers; the others have a window, and two heads of 4."""
    spec = tiny_spec(windows=(window, None, window, None))
    wide = [replace(layer, mixer=replace(layer.attention, num_kv_heads=1, head_dim=6)) for layer in spec.layers]
    layers = tuple(own if layer.attention.window is None else layer for layer, own in zip(spec.layers, wide, strict=True))
    target = Target.load(Path(), replace(spec, layers=layers), dtype=torch.float64, device=DEVICE, dummy=True)
    return in_e4m3(target) if fp8_kv else target


def request(
    index: int,
    prompt: Sequence[int],
    *,
    cap: int,
    sampling: SamplingParams | None = None,
    stop_ids: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    min_new_tokens: int = 0,
    predicted: int | None = None,
) -> Request:
    return Request(
        request_id=f"r{index}",
        row_index=index,
        sample_index=0,
        shard=0,
        prompt_ids=np.array(prompt, np.int32),
        max_new_tokens=cap,
        min_new_tokens=min_new_tokens,
        sampling=sampling or SamplingParams(),
        stop_ids=stop_ids,
        stop=stop,
        seed=1000 + index,
        predicted_tokens=predicted or cap,
    )


def packed(slots: int = 4, **changes: object) -> PackedBatch:
    batch = PackedBatch(
        num_slots=slots,
        row_buckets=tuple(sorted({1, 2, slots})) if slots > 1 else (1,),
        num_pages=400,
        page_size=4,
        max_len=96,
        num_verified=4,
        prefill_tokens=64,
        run_ahead=0,
    )
    return replace(batch, **changes)  # type: ignore[arg-type]


def decode(ids: Sequence[int]) -> str:
    """Token ids as letters: A is 0."""
    return "".join(chr(65 + i) for i in ids)


def one_pass(target: Target, ids: Sequence[int], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
    """Hidden states [len(ids), H] after the final norm, and at the boundaries `taps` [len(ids), len(taps) * H] or None: computed
    from the first token in one pass, with a cache of its own."""
    count, spec, device = len(ids), target.spec, target.device
    cache = KVCache.allocate(
        spec.layer_states(target.dtype, count, draft_len=0), groups=KVGroups.single(spec.num_paged_layers), page_size=count,
        num_pages=(2,), device=device, scales=target.kv_scales,
    )

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = torch.arange(count, device=device)
    batch = FlatBatch(
        token_ids=ints(list(ids)), row_ids=ints([0] * count), positions=positions, slot_mapping=positions + count,
        cu_seqlens_q=ints([0, count]), kv_len=ints([count]), page_table=ints([[1]]), max_q=count, max_kv=count,
    )
    return target.forward(batch, cache, taps)


def full_logits(target: Target, ids: Sequence[int]) -> Tensor:
    """Logits [V] after `ids`."""
    return logits_along(target, ids, len(ids))[0]


def logits_along(target: Target, ids: Sequence[int], begin: int) -> Tensor:
    """Logits [len(ids) - begin + 1, V] after the first `begin` of the ids, after the first `begin` + 1, ..., and after all."""
    hidden, _ = one_pass(target, ids)
    return target.logits(hidden[begin - 1 :]).cpu()


class LogitsAfter:
    """The logits after a prompt and any output, without cache or batch: one pass computes those along a guess of the output."""

    def __init__(self, target: Target, prompt: list[int], guess: Sequence[int]) -> None:
        self._target, self._prompt, self._guess = target, prompt, list(guess)
        self._along: Tensor | None = None

    def __call__(self, out: list[int]) -> Tensor:
        """[V], a copy."""
        if len(out) >= len(self._guess) or out != self._guess[: len(out)]:
            return full_logits(self._target, self._prompt + out).clone()
        if self._along is None:
            self._along = logits_along(self._target, self._prompt + self._guess[:-1], len(self._prompt))
        return self._along[len(out)].clone()


_PLAIN: dict[tuple[Hashable, ...], list[int]] = {}
"""What `plain_tokens` found for a target and a request, as far as any cap asked for it: many tests ask for the same rows."""


@torch.inference_mode()
def plain_tokens(target: Target, req: Request, guess: Sequence[int] = ()) -> list[int]:
    """The definition of a request's output: one token at a time, filters by a sort, noise by the row key, no cache, no batch.

    guess  what the output may be: a pass for each token is then needed after its first wrong token only
    """
    ends = (req.stop_ids, req.stop, req.min_new_tokens)
    logits_after = LogitsAfter(target, req.prompt_ids.tolist(), guess)
    found = _PLAIN.setdefault((target, req.prompt_ids.tobytes(), req.sampling, req.seed, *ends), [])
    out: list[int] = []
    while True:
        if len(out) == len(found):
            found.append(_next_token(logits_after(out), req, out))
        out.append(found[len(out)])
        ended = out[-1] in req.stop_ids or stops(req, decode(out), decode(out[: req.min_new_tokens]))
        ended |= len(out) == req.max_new_tokens
        if ended or (req.repetition is not None and len(out) >= req.min_new_tokens and repeats(out, req.repetition)):
            return out


def plain_rows(
    target: Target, requests: Iterable[Request], guesses: Mapping[str, Sequence[int]] | None = None
) -> dict[str, list[int]]:
    """`plain_tokens` of each by its ID; guesses: what an engine wrote for them, which saves nearly all passes if it is right."""
    known = guesses or {}
    return {one.request_id: plain_tokens(target, one, known.get(one.request_id, ())) for one in requests}


def stops(req: Request, text: str, early: str) -> bool:
    """The definition: a stop string ends in the text after `early`, the text of the first `min_new_tokens` tokens."""
    return any(text.find(stop, max(0, len(early) - len(stop) + 1)) >= 0 for stop in req.stop)


def repeats(out: Sequence[int], repetition: Repetition) -> bool:
    """The definition: the newest tokens are `min_count` times one pattern."""
    sizes, count = range(repetition.min_pattern_size, repetition.max_pattern_size + 1), repetition.min_count
    return any(list(out[-count * size :]) == list(out[-size:]) * count for size in sizes)


def first_repetition(out: Sequence[int], repetition: Repetition) -> int | None:
    """The number of tokens with which an output first repeats itself."""
    return next((end for end in range(1, len(out) + 1) if repeats(out[:end], repetition)), None)


def _next_token(logits: Tensor, req: Request, out: Sequence[int]) -> int:
    """The token after the prompt and `out`, of these logits, which change."""
    prompt, params = req.prompt_ids.tolist(), req.sampling
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {*prompt, *out}:
        value = logits[token]
        logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(out):
        logits[token] -= params.presence_penalty + params.frequency_penalty * out.count(token)
    for *before, last in params.bad_words:
        if len(before) <= len(out) and list(out[len(out) - len(before) :]) == before:
            logits[last] = -torch.inf
    logits[sorted(forbidden(out, params.no_repeat_ngram))] = -torch.inf
    if len(out) < req.min_new_tokens:
        logits[list(req.stop_ids)] = -torch.inf
    return _draw(logits, params, req.seed, len(prompt) + len(out))


def _draw(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = logits / float(np.float32(params.temperature))
    order = scaled.argsort(descending=True).tolist()
    if params.top_k:
        order = order[: params.top_k]
    probs = torch.softmax(scaled[order], 0).tolist()
    kept: list[int] = []
    mass = 0.0
    for token, prob in zip(order, probs, strict=True):
        if mass < float(np.float32(params.top_p)) and prob >= float(np.float32(params.min_p)) * probs[0]:
            kept.append(token)
        mass += prob
    noise = gumbel_reference(torch.tensor([seed]), torch.tensor([position]), len(logits))[0]
    scores = [float(scaled[token] + noise[token]) for token in kept]
    return kept[scores.index(max(scores))]


class ForcedDrafter(NoFeatures):
    """Knows every row's output: proposes it (acceptance 1) or something else at every place (acceptance 0)."""

    name = "forced"

    def __init__(self, draft_len: int, outputs: dict[int, list[int]], *, right: bool, fixed_len: bool) -> None:
        self.draft_len, self.outputs, self.right, self.fixed_len = draft_len, outputs, right, fixed_len

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        width = draft_ids.shape[1]
        draft_ids.zero_()
        draft_len.fill_(width)
        for slot in range(len(draft_len)):
            if rows.live[slot]:
                emitted = int(rows.num_tokens[slot] - rows.prompt_len[slot])
                ahead = self.outputs[int(rows.keys[slot])][emitted : emitted + width]
                ids = ahead + [0] * (width - len(ahead))
                draft_ids[slot] = torch.tensor(ids if self.right else [(i + 1) % VOCAB for i in ids], dtype=torch.int32)


def make_engine(
    target: Target, drafter: Drafter, batch: PackedBatch, *, device: torch.device, decode: Decode | None = None,
    defers_text: bool = False, logprobs: int | None = None, scores: bool = False, vocabulary: TokenSymbols | None = None,
    automata_capacity: AutomataCapacity | None = None, expanding: Expanding | None = None, lengths: int | None = None,
    **more: Any,
) -> Engine:
    """An `Engine` with these `RowFeatures`, for a batch with room for all drafts of its rounds.

    lengths  seed with which each round draws how many drafts it verifies (`row_lengths.py`); None: all drafts of all rows
    more     other arguments of `Engine`
    """
    # Imported here: the process that only replays steps (`replaying.py`) imports no scheduler.
    from batchspec.engine.features import RowFeatures
    from batchspec.engine.features.scoring import PromptFeatures
    from batchspec.engine.loop.engine import Engine
    from batchspec.engine.rounds.records import RoundOptions
    from tests.helpers.row_lengths import draw_lengths

    features = PromptFeatures(logprobs or 0) if scores else RowFeatures(
        decode=decode, defers_text=defers_text, num_top=logprobs, symbols=vocabulary, capacity=automata_capacity,
        expanding=expanding,
    )
    batch = replace(batch, decodes=not scores, num_verified=max(batch.num_verified, drafter.shape.num_verified))
    if lengths is None:
        return Engine(target, drafter, batch, device=device, features=features, **more)
    options = replace(more.pop("options", None) or RoundOptions(), row_lengths=True)
    engine = Engine(target, drafter, batch, device=device, features=features, options=options, **more)
    draw_lengths(engine, lengths)
    return engine


def lazy_of(engine: Engine) -> LazyConstraints:
    """Rows of the engine's present run that follow lazy automata."""
    from batchspec.engine.features import RowFeatures

    assert isinstance(engine.features, RowFeatures)
    assert engine.features.lazy is not None
    return engine.features.lazy
