"""The host's state of one request: tokens read so far, statistics, pages. `completion.py` makes its completion."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.page_tables import RowPages
from batchspec.engine.stop_strings import StopFinder
from batchspec.engine.thinking import ThinkingBudget, tracker_of
from batchspec.engine.token_kinds import Kind, Tracker
from batchspec.kernels.rounds.accept import FAILED, STOPPED
from batchspec.lazy_automaton import LazyAutomaton
from batchspec.records import Request, RowError, Snapshot
from batchspec.token_automaton import TokenAutomaton


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from its arrival to its completion.

    Preemption takes `slot`, `pages` and `num_shared_pages` away. Everything else is kept, and later the request is prefilled
    again with its prompt and all its tokens. While it has a slot, the host collects its tokens and counts in the `SlotTable`;
    `flush` moves them here.
    """

    request: Request
    draft_len: int
    """K: the length of the per-position statistics."""
    finder: StopFinder | None
    """None without stop strings."""
    num_top: int | None = None
    """Number of top logprobs of each token; None: no logprobs."""
    mode: SamplingMode = field(init=False)
    slot: int = -1
    """-1 without a slot."""
    pages: RowPages = field(default_factory=RowPages)
    num_shared_pages: int = 0
    """Number of its first pages whose K/V another request prefilled."""
    order: int = 0
    """Number of the refill that gave it its slot: the highest is the youngest request."""
    prefix_hashes: list[bytes] | None = None
    """Hashes of the prompt's full pages; None until they are needed."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens, up to the latest flush of the slot."""
    prompt_logprobs: NDArray[np.float32] | None = None
    """Of a scored prompt: log-probabilities of its tokens, and of the likeliest tokens, as in `Completion`."""
    prompt_top: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
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
    error: RowError | None = None
    """Why the host ended the request without a completion."""
    stop_string: str | None = None
    stop_id: int | None = None
    constraint_checked: bool = False
    """Its tokens were walked through its automaton once more, which allows them (`last_check.py`)."""
    num_breaks: int = 0
    """With a lazy automaton: number of line breaks after the thought that are not part of the answer: it matches without them."""
    budget: ThinkingBudget | None = field(init=False)
    _thought: Tracker | None = field(init=False)
    """The state after the last of `tokens`; used for stop strings only."""

    def __post_init__(self) -> None:
        self.mode = SamplingMode.of(
            self.request.sampling, self.request.min_new_tokens, constrained=self.request.automaton is not None,
            waits=isinstance(self.request.automaton, LazyAutomaton),
        )  # fmt: skip
        thinking = self.request.thinking
        self.budget = None if thinking is None else ThinkingBudget(thinking, self.request.stop_ids, self.request.device_limit)
        self._restart()
        self.histogram = [0] * (self.draft_len + 1)
        self.drafted_at = [0] * self.draft_len
        self.accepted_at = [0] * self.draft_len

    @classmethod
    def of(cls, request: Request, draft_len: int, finder: StopFinder | None, *, num_top: int | None = None) -> RequestState:
        """The state of a new request, or of one that continues from an earlier run, which may have had a larger K."""
        assert request.constraint is None or request.automaton is not None, f"{request.request_id!r}: nothing was compiled"
        resumed = request.resumed
        if resumed is not None and not _follows(request, resumed.tokens):
            resumed = None  # an automaton of another version allowed these tokens: decode anew
        longest = draft_len if resumed is None else max(draft_len, len(resumed.accepted) - 1)
        state = cls(request=request, draft_len=longest, finder=finder, num_top=num_top)
        if resumed is not None:
            state.num_prefills, state.cached_tokens = resumed.num_prefills, resumed.cached_tokens
            state.num_discarded, state.num_forced = resumed.num_discarded, resumed.num_forced
            state.prefill_s, state.earlier_s = resumed.prefill_s, resumed.decode_s
            state.add_counts(resumed.accepted, resumed.drafted)
            state._emit(state._without_cut_closing(resumed.tokens))
        state.enforce_budget()
        return state

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and of `tokens`; a request in a slot may have more: see `SlotTable.num_tokens`."""
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """Maximum number of prompt and output tokens."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    def snapshot(self, now: float) -> Snapshot:
        """The state from which another run can continue; `now` is the host's clock in seconds. Logprobs are not kept."""
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
            decode_s=self.decode_s(now),
            num_discarded=self.num_discarded,
            num_forced=self.num_forced,
        )

    def _drafted_exactly(self) -> tuple[int, ...]:
        at_least = [self.num_rounds, *self.drafted_at, 0]
        return tuple(more - fewer for more, fewer in itertools.pairwise(at_least))

    def decode_s(self, now: float) -> float:
        """Seconds since the first token, those of earlier runs included; `now` is the host's clock in seconds."""
        return self.earlier_s + (now - self.first_token_at if self.first_token_at else 0.0)

    def add_prefill(self, tokens: Sequence[int]) -> None:
        """Add the token that a prefill emitted, or no token if the prefill failed."""
        self.num_prefills += 1
        self._emit(tokens)

    def note_prefill(self, seconds: float, now: float) -> None:
        """Add the seconds of the prefill passes; `now` is the host's clock when their token was read."""
        self.prefill_s += seconds
        self.first_token_at = self.first_token_at or now

    def add_round(self, accepted: int, drafted: int, num_emitted: int, tokens: Sequence[int]) -> None:
        """Add a round that emitted `num_emitted` = accepted + 1 tokens. The device kept `tokens`, those up to a stop id."""
        rounds_accepted, rounds_drafted = [0] * (self.draft_len + 1), [0] * (self.draft_len + 1)
        rounds_accepted[accepted] = rounds_drafted[drafted] = 1
        self.add_counts(rounds_accepted, rounds_drafted)
        self.num_discarded += num_emitted - len(tokens)
        self._emit(tokens)

    def add_counts(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """Add rounds: accepted[j] of them accepted exactly j draft tokens, drafted[j] drafted exactly j."""
        for j, (num_accepted, num_drafted) in enumerate(zip(accepted, drafted, strict=True)):
            self.num_rounds += num_accepted
            self.histogram[j] += num_accepted
            self.num_accepted += j * num_accepted
            self.num_drafted += j * num_drafted
            for i in range(j):
                self.accepted_at[i] += num_accepted
                self.drafted_at[i] += num_drafted

    def end(self, finish: int) -> None:
        """The device has ended the row: at a stop id, at its limit, or because its logits were not finite."""
        if finish == STOPPED:
            self.finish_reason, self.stop_id = "stop", self.tokens[-1]
        else:
            self.finish_reason = "error" if finish == FAILED else "length"

    def fail(self, error: RowError) -> None:
        """The host ends the request without a completion."""
        self.finish_reason, self.error = "error", error

    def thinking_left(self) -> int | None:
        """Minimum number of further tokens that can use up the thinking budget; None outside of a thought or without a budget."""
        return None if self.budget is None else self.budget.left

    def enforce_budget(self) -> bool:
        """Close a thought that has used up its budget: drop the tokens after that position and append the closing tokens.

        Returns False if the budget is not used up, or if the model wrote the closing tokens there itself. The closing tokens may
        end the request.
        """
        forced = None if self.budget is None else self.budget.forced(self.tokens)
        if forced is None:
            self._lose_logprobs_of_closings()
            return False
        num_kept, closing = forced
        tokens = [*self.tokens[:num_kept], *closing]
        self.num_discarded += len(self.tokens) - num_kept
        self.num_forced += len(closing)
        self._replace_logprobs(slice(num_kept, None), len(closing))
        self._lose_logprobs_of_closings()
        self._restart()
        self._emit(tokens)
        return True

    def _without_cut_closing(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens of an earlier run. If its smaller limit cut off some of the last closing tokens, the others are removed
        too: all of them are forced again, and counted once."""
        forced = None if self.budget is None else self.budget.forced(tokens)
        if forced is None:
            return tokens
        num_kept, _ = forced
        self.num_forced -= len(tokens) - num_kept
        return tokens[:num_kept]

    def _lose_logprobs_of_closings(self) -> None:
        """Set the logprobs of closing tokens to NaN, even of those that the model wrote itself: how many it writes before the
        host forces the rest depends on the drafts of the round."""
        for places in () if self.budget is None else self.budget.closings:
            self._replace_logprobs(slice(places.start, places.stop), len(places))

    def _restart(self) -> None:
        thinking = self.request.thinking
        self.tokens, self.finish_reason, self.stop_string, self.stop_id = [], None, None, None
        self._thought = None if thinking is None else tracker_of(thinking)
        if self.finder is not None:
            self.finder.restart()

    def _replace_logprobs(self, places: slice, count: int) -> None:
        """Put NaN for `count` tokens in the place of these logprobs: the model did not choose them."""
        if self.num_top is None:
            return
        self.logprobs[places] = [float("nan")] * count
        if self.num_top:
            forced = np.full(self.num_top, -1, np.int32), np.full(self.num_top, np.nan, np.float32)
            self.top[places] = [forced] * count

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
        """The stop string that this token completes, if any. Stop strings are searched for in the answer, not in thoughts."""
        assert self.finder is not None
        kind = Kind.ANSWER if self._thought is None else self._thought.push(token)
        if kind in (Kind.END_OF_OUTPUT_SO_FAR, Kind.HEADER):
            self.finder.restart()
        return self.finder.push(token) if kind is Kind.ANSWER else None


def _follows(request: Request, tokens: Sequence[int]) -> bool:
    """Whether the request's automaton, if it has one, allows these output tokens; for a lazy one see `LazyStates.follows`."""
    automaton = request.automaton
    return not isinstance(automaton, TokenAutomaton) or automaton.num_allowed(request.automaton_state, tokens) == len(tokens)
