"""What the host knows of one request: tokens read so far, statistics, pages, and the completion made of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.page_tables import RowPages
from batchspec.engine.stop_strings import Decode, StopFinder
from batchspec.engine.thinking import Kind, Parts, ThinkingBudget, ThoughtTracker, split_thoughts
from batchspec.kernels.rounds.accept import FAILED, STOPPED
from batchspec.records import Completion, Request, RowError, RowStats, Snapshot

NON_FINITE = "non_finite_logits"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from its arrival to its completion.

    Preemption takes `slot`, `pages` and `num_shared_pages` away; everything else is kept, and the request is prefilled again over
    its prompt and all its tokens. While it has a slot, tokens and counts that the host read in bulk are in the `SlotTable`; they
    come here when the slot is flushed.
    """

    request: Request
    draft_len: int
    """K: the length of the statistics by draft position."""
    finder: StopFinder | None
    """None where the request has no stop strings."""
    num_top: int | None = None
    """How many top logprobs each token has; None: no logprobs are asked for."""
    mode: SamplingMode = field(init=False)
    slot: int = -1
    """-1 without a slot."""
    pages: RowPages = field(default_factory=RowPages)
    num_shared_pages: int = 0
    """Pages at the front whose K/V another request had prefilled."""
    order: int = 0
    """Counts refills: the highest is the youngest request."""
    prefix_hashes: list[bytes] | None = None
    """Of the prompt's whole pages; None until they were asked for."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens that are flushed here."""
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    num_prefills: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_discarded: int = 0
    num_forced: int = 0
    histogram: list[int] = field(init=False)
    drafted_at: list[int] = field(init=False)
    accepted_at: list[int] = field(init=False)
    cached_tokens: int = 0
    prefill_s: float = 0.0
    first_token_at: float = 0.0
    earlier_s: float = 0.0
    """Seconds of decoding in earlier runs."""
    finish_reason: str | None = None
    stop_string: str | None = None
    stop_id: int | None = None
    budget: ThinkingBudget | None = field(init=False)
    _thought: ThoughtTracker | None = field(init=False)
    """At the last of `tokens`; for stop strings only."""

    def __post_init__(self) -> None:
        self.mode = SamplingMode.of(self.request.sampling, self.request.min_new_tokens)
        thinking = self.request.thinking
        self.budget = None if thinking is None else ThinkingBudget(thinking, self.request.stop_ids)
        self._restart()
        self.histogram = [0] * (self.draft_len + 1)
        self.drafted_at = [0] * self.draft_len
        self.accepted_at = [0] * self.draft_len

    @classmethod
    def of(cls, request: Request, draft_len: int, finder: StopFinder | None, *, num_top: int | None = None) -> RequestState:
        """A request at its start, or where an earlier run left it; that run may have had a larger K."""
        resumed = request.resumed
        longest = draft_len if resumed is None else max(draft_len, len(resumed.accepted) - 1)
        state = cls(request=request, draft_len=longest, finder=finder, num_top=num_top)
        if resumed is not None:
            state.num_prefills, state.cached_tokens = resumed.num_prefills, resumed.cached_tokens
            state.num_discarded, state.num_forced = resumed.num_discarded, resumed.num_forced
            state.prefill_s, state.earlier_s = resumed.prefill_s, resumed.decode_s
            state.add_counts(resumed.accepted, resumed.drafted)
            state._emit(resumed.tokens)
        state.hold_to_budget()
        return state

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and `tokens`; a request in a slot may have more: see `SlotTable.num_tokens`."""
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """Prompt and output tokens at most."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    def snapshot(self, now: float) -> Snapshot:
        """What another run needs to go on; `now` is the host's clock in seconds. Logprobs are not kept."""
        request = self.request
        return Snapshot(
            row_index=request.row_index,
            sample_index=request.sample_index,
            shard=request.shard,
            tokens=tuple(self.tokens),
            num_prefills=self.num_prefills,
            cached_tokens=self.cached_tokens,
            accepted=tuple(self.histogram),
            drafted=self._drafted_exactly(),
            prefill_s=self.prefill_s,
            decode_s=self._decode_s(now),
            num_discarded=self.num_discarded,
            num_forced=self.num_forced,
        )

    def _drafted_exactly(self) -> tuple[int, ...]:
        at_least = [self.num_rounds, *self.drafted_at, 0]
        return tuple(more - fewer for more, fewer in itertools.pairwise(at_least))

    def _decode_s(self, now: float) -> float:
        return self.earlier_s + (now - self.first_token_at if self.first_token_at else 0.0)

    def add_prefill(self, tokens: Sequence[int]) -> None:
        """The one token that a prefill emitted, none where it failed."""
        self.num_prefills += 1
        self._emit(tokens)

    def note_prefill(self, seconds: float, now: float) -> None:
        """How long the passes took, and the host's clock when their token was there."""
        self.prefill_s += seconds
        self.first_token_at = self.first_token_at or now

    def add_round(self, accepted: int, drafted: int, num_emitted: int, tokens: Sequence[int]) -> None:
        """One round: `tokens` were kept on the device, of `num_emitted` = accepted + 1 (a stop id cuts the rest off)."""
        rounds_accepted, rounds_drafted = [0] * (self.draft_len + 1), [0] * (self.draft_len + 1)
        rounds_accepted[accepted] = rounds_drafted[drafted] = 1
        self.add_counts(rounds_accepted, rounds_drafted)
        self.num_discarded += num_emitted - len(tokens)
        self._emit(tokens)

    def add_counts(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """accepted[j] rounds accepted exactly j draft tokens, drafted[j] rounds drafted exactly j."""
        for j, (num_accepted, num_drafted) in enumerate(zip(accepted, drafted, strict=True)):
            self.num_rounds += num_accepted
            self.histogram[j] += num_accepted
            self.num_accepted += j * num_accepted
            self.num_drafted += j * num_drafted
            for i in range(j):
                self.accepted_at[i] += num_accepted
                self.drafted_at[i] += num_drafted

    def end(self, finish: int) -> None:
        """The device ended the row: at a stop id, at its limit, or where its logits were not finite."""
        if finish == STOPPED:
            self.finish_reason, self.stop_id = "stop", self.tokens[-1]
        else:
            self.finish_reason = "error" if finish == FAILED else "length"

    def thinking_left(self) -> int | None:
        """Tokens until the thinking budget can be used up; None where only the beginning of a thought can change that."""
        return None if self.budget is None else self.budget.left

    def hold_to_budget(self) -> bool:
        """Close a thought that has used its budget: drop the tokens after that place and append the closing tokens.

        False where the tokens keep to the budget. The closing tokens may end the request.
        """
        forced = None if self.budget is None else self.budget.forced(self.tokens)
        if forced is None:
            return False
        num_kept, closing = forced
        tokens = [*self.tokens[:num_kept], *closing][: self.request.device_limit]
        self.num_discarded += len(self.tokens) - num_kept
        self.num_forced += len(tokens) - num_kept
        self._lose_logprobs(num_kept, len(tokens))
        self._restart()
        self._emit(tokens)
        return True

    def _restart(self) -> None:
        thinking = self.request.thinking
        self.tokens, self.finish_reason, self.stop_string, self.stop_id = [], None, None, None
        self._thought = None if thinking is None else ThoughtTracker(thinking)
        if self.finder is not None:
            self.finder.restart()

    def _lose_logprobs(self, num_kept: int, count: int) -> None:
        """The model did not choose the forced tokens, num_kept .. count-1: they have no logprobs."""
        if self.num_top is None:
            return
        self.logprobs[num_kept:] = [float("nan")] * (count - num_kept)
        if self.num_top:
            forced = np.full(self.num_top, -1, np.int32), np.full(self.num_top, np.nan, np.float32)
            self.top[num_kept:] = [forced] * (count - num_kept)

    def _emit(self, tokens: Sequence[int]) -> None:
        request = self.request
        for place, token in enumerate(tokens):
            self.tokens.append(token)
            stop = self._find_stop(token) if self.finder else None
            if stop is not None:
                self.finish_reason, self.stop_string = "stop", stop
                self.num_discarded += len(tokens) - place - 1
                return
            if token in request.stop_ids:
                self.finish_reason, self.stop_id = "stop", token
                return
        if len(self.tokens) >= request.device_limit:
            self.finish_reason = "length"

    def _find_stop(self, token: int) -> str | None:
        """The stop string that is complete with this token. Stop strings are searched for in the answer, not in thoughts."""
        assert self.finder is not None
        kind = Kind.ANSWER if self._thought is None else self._thought.push(token)
        if kind is Kind.END_OF_OUTPUT_SO_FAR:
            self.finder.restart()
        return self.finder.push(token) if kind is Kind.ANSWER else None

    def completion(
        self,
        *,
        decode: Decode | None,
        drafter: str,
        eos_ids: frozenset[int],
        slot: int,
        now: float,
        nodes: int | None = None,
    ) -> Completion:
        """The finished row; `now` is the host's clock in seconds, `nodes` those of each round's tree where trees were drafted."""
        request = self.request
        assert self.finish_reason is not None
        if self.finish_reason == "error":
            return self._failure(self._stats(drafter, slot, now, nodes))
        count = len(self.tokens)
        assert self.num_top is None or len(self.logprobs) >= count, (len(self.logprobs), count)
        text, reasoning, parts = self._texts(decode)
        stop_id = None if self.stop_id is None or self.stop_id in eos_ids else str(self.stop_id)
        top = None
        if self.top:
            top = (np.stack([ids for ids, _ in self.top[:count]]), np.stack([values for _, values in self.top[:count]]))
        return Completion(
            request_id=request.request_id,
            row_index=request.row_index,
            sample_index=request.sample_index,
            shard=request.shard,
            status="truncated" if self.finish_reason == "length" else "ok",
            finish_reason=self.finish_reason,
            stop_reason=stop_id if self.stop_string is None else self.stop_string,
            prompt_ids=request.prompt_ids,
            token_ids=np.array(self.tokens, np.int32),
            text=text,
            reasoning=reasoning,
            reasoning_truncated=None if parts is None else self._cut_off(parts),
            reasoning_tokens=None if parts is None else parts.num_reasoning,
            logprobs=np.array(self.logprobs[:count], np.float32) if self.logprobs else None,
            top_logprobs=top,
            seed=request.seed,
            predicted_tokens=request.predicted_tokens,
            cached_tokens=self.cached_tokens,
            stats=self._stats(drafter, slot, now, nodes),
        )

    def _failure(self, stats: RowStats) -> Completion:
        """The row ended where nothing could be chosen. Its tokens are dropped: what led to such numbers is not to be trusted."""
        emitted_in_all = stats.num_prefills + stats.num_accepted + stats.num_rounds
        request, emitted = self.request, len(self.tokens)
        return Completion(
            request_id=request.request_id,
            row_index=request.row_index,
            sample_index=request.sample_index,
            shard=request.shard,
            status="error",
            finish_reason="error",
            prompt_ids=request.prompt_ids,
            seed=request.seed,
            predicted_tokens=request.predicted_tokens,
            cached_tokens=self.cached_tokens,
            stats=replace(stats, num_discarded=emitted_in_all),
            error=RowError(
                code=NON_FINITE,
                stage="decode",
                message=(
                    f"the model's logits at position {len(request.prompt_ids) + emitted} (output token {emitted}) hold NaN or "
                    "+inf, or no finite value; check the weights and model.dtype, or drop the row"
                ),
                retryable=True,
            ),
        )

    def _stats(self, drafter: str, slot: int, now: float, nodes: int | None) -> RowStats:
        return RowStats(
            drafter=drafter,
            draft_len=self.draft_len,
            num_prefills=self.num_prefills,
            num_rounds=self.num_rounds,
            num_drafted=self.num_drafted if nodes is None else nodes * sum(self.drafted_at[:1]),
            num_accepted=self.num_accepted,
            num_discarded=self.num_discarded,
            histogram=tuple(self.histogram),
            drafted_at=tuple(self.drafted_at),
            accepted_at=tuple(self.accepted_at),
            prefill_s=self.prefill_s,
            decode_s=self._decode_s(now),
            batch_id=0,
            slot=slot,
            num_forced=self.num_forced,
        )

    def _texts(self, decode: Decode | None) -> tuple[str | None, str | None, Parts | None]:
        """Answer, thought (None where there was none), and their tokens (None where the model has no think tokens).

        White space at the border of the two is dropped: chat templates put their own there.
        """
        thinking = self.request.thinking
        found = self.finder.text if self.finder is not None and self.stop_string is not None else None
        if thinking is None:
            return (None if decode is None else decode(self.tokens) if found is None else found), None, None
        parts = split_thoughts(self.tokens[:-1] if self.stop_id is not None else self.tokens, thinking)
        if decode is None:
            return None, None, parts
        text = decode(parts.answer) if found is None else found
        if not parts.thoughts:
            return text, None, parts
        thoughts = (decode(thought).strip() for thought in parts.thoughts)
        return text.lstrip(), "\n\n".join(thought for thought in thoughts if thought), parts

    def _cut_off(self, parts: Parts) -> bool:
        """Whether a thought ended by its budget, or by the cap in its middle."""
        assert self.budget is not None
        self.budget.forced(self.tokens)
        return self.budget.closed_a_thought or (parts.inside and self.finish_reason == "length")
