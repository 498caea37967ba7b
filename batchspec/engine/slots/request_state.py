"""The host's state of one request: tokens read so far, statistics, pages. `open_requests.py` makes its completion."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.page_tables import RowPages
from batchspec.engine.slots.prefix_plan import PrefixPlan
from batchspec.kernels.rounds.accept import FAILED, STOPPED
from batchspec.records import Request, RowError, Snapshot

NEVER = 1 << 62
"""More tokens than a row can have."""
NO_TOKEN = -2
"""Matches no token of a log, which holds ids, and -1 for no token."""


@dataclass(frozen=True, slots=True)
class Watch:
    """A feature examines a row next once it has `num_tokens` output tokens, as soon as `token` is among its new ones, and when it
    ends."""

    num_tokens: int = NEVER
    token: int = NO_TOKEN

    @classmethod
    def first(cls, watches: Iterable[Watch]) -> Watch | None:
        """The watch that is due as soon as one of these is; None if there are none."""
        watches = list(watches)
        if len(watches) < 2:
            return watches[0] if watches else None
        tokens = {watch.token for watch in watches} - {NO_TOKEN}
        if len(tokens) > 1:  # a slot has room for one: examine the row after every result
            return cls(num_tokens=0)
        return cls(min(watch.num_tokens for watch in watches), tokens.pop() if tokens else NO_TOKEN)


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
    mode: SamplingMode = field(init=False)
    continues: bool = True
    """Whether another run may continue it from its tokens: as all of its features say."""
    slot: int = -1
    """-1 without a slot."""
    pages: RowPages = field(default_factory=RowPages)
    num_shared_pages: int = 0
    """Number of its first pages whose K/V another request prefilled."""
    prefix_plan: PrefixPlan | None = None
    """What its prefill does with the states of prefixes; None if no layer keeps row tensors."""
    order: int = 0
    """Number that it got when it entered its slot: the highest is the youngest request."""
    prefix_hashes: list[bytes] | None = None
    """Hashes of the prompt's pages that may be shared with other rows; None until they are needed."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens, up to the latest flush of the slot."""
    forced: list[range] = field(default_factory=list)
    """Places in the output whose tokens the model did not choose, or would have had no choice."""
    watch: Watch | None = None
    """When its features examine it next; None: never."""
    num_prefills: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_discarded: int = 0
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
    truncated: bool = False
    """It was ended before the model's answer was complete."""
    stop_reason: str | None = None
    """The text that ended it."""
    stop_id: int | None = None
    """The token that ended it."""
    replaced: bool = False
    """A feature has replaced tokens that K/V are computed of: unless it has ended, the request must be prefilled again."""
    _forced_at: list[range] = field(default_factory=list)
    """Places in the output of the tokens that features forced in this run, ascending."""
    _num_forced_before: int = 0
    """Number of its tokens that features forced in earlier runs."""

    def __post_init__(self) -> None:
        self.mode = SamplingMode.of(self.request.sampling, self.request.min_new_tokens)
        self.histogram = [0] * (self.draft_len + 1)
        self.drafted_at = [0] * self.draft_len
        self.accepted_at = [0] * self.draft_len

    @classmethod
    def of(cls, request: Request, draft_len: int) -> RequestState:
        """The state of a request without tokens; it may have been begun in an earlier run with a larger K."""
        longest = draft_len if request.resumed is None else max(draft_len, len(request.resumed.accepted) - 1)
        return cls(request=request, draft_len=longest)

    def resume(self, tokens: Sequence[int]) -> None:
        """Go on from the earlier run of the request with these of its tokens, the first ones: those after them were forced."""
        resumed = self.request.resumed
        assert resumed is not None
        self.num_prefills, self.cached_tokens = resumed.num_prefills, resumed.cached_tokens
        self.num_discarded = resumed.num_discarded
        self._num_forced_before = resumed.num_forced - (len(resumed.tokens) - len(tokens))
        self.prefill_s, self.earlier_s = resumed.prefill_s, resumed.decode_s
        self.add_counts(resumed.accepted, resumed.drafted)
        self._add(tokens)

    @property
    def num_forced(self) -> int:
        """Number of its tokens that features forced."""
        return self._num_forced_before + sum(map(len, self._forced_at))

    @property
    def text_tokens(self) -> list[int]:
        """The tokens that all texts of the ended request are made of: without the stop id, which is never part of a text."""
        return self.tokens if self.stop_id is None else self.tokens[:-1]

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and of `tokens`; a request in a slot may have more: see `SlotTable.num_tokens`."""
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """Maximum number of prompt and output tokens."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    def snapshot(self, now: float) -> Snapshot:
        """The state from which another run can continue; `now` is the host's clock in seconds."""
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
            image_digest=request.image_digest,
        )

    def _drafted_exactly(self) -> tuple[int, ...]:
        at_least = [self.num_rounds, *self.drafted_at, 0]
        return tuple(more - fewer for more, fewer in itertools.pairwise(at_least))

    def decode_s(self, now: float) -> float:
        """Seconds since the first token, those of earlier runs included; `now` is the host's clock in seconds."""
        return self.earlier_s + (now - self.first_token_at if self.first_token_at else 0.0)

    def note_prefill(self, seconds: float, now: float) -> None:
        """Add the seconds of the prefill passes; `now` is the host's clock when their token was read."""
        self.prefill_s += seconds
        self.first_token_at = self.first_token_at or now

    def add_counts(self, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """Add rounds: accepted[j] of them accepted exactly j draft tokens, drafted[j] drafted exactly j."""
        for j, (num_accepted, num_drafted) in enumerate(zip(accepted, drafted, strict=True)):
            if not (num_accepted or num_drafted):
                continue
            self.num_rounds += num_accepted
            self.histogram[j] += num_accepted
            self.num_accepted += j * num_accepted
            self.num_drafted += j * num_drafted
            for i in range(j):
                self.accepted_at[i] += num_accepted
                self.drafted_at[i] += num_drafted

    def set_finish_reason(self, finish: int) -> None:
        """The device has ended the row: at a stop id, at its limit, or because its logits were not finite."""
        if finish == STOPPED:
            self.finish_reason, self.stop_id = "stop", self.tokens[-1]
        elif finish == FAILED:
            self.finish_reason = "error"
        else:
            self.finish_reason, self.truncated = "length", True

    def fail(self, error: RowError | None) -> None:
        """The host ends the request without a completion. error: None for the message about logits that are not finite."""
        self.finish_reason, self.error = "error", error

    def cut(self, num_kept: int, finish_reason: str, stop_reason: str | None = None, *, truncated: bool = False) -> None:
        """A feature ends the request after its first `num_kept` tokens."""
        self.replace(num_kept)
        self.finish_reason, self.truncated, self.stop_reason, self.stop_id = finish_reason, truncated, stop_reason, None

    def replace(self, num_kept: int, forced: Sequence[int] = ()) -> None:
        """A feature replaces all tokens after the first `num_kept` by `forced`, which may end the request. If some of those had
        been forced, they did not happen."""
        num_before = self.num_forced
        self._forced_at = [range(one.start, min(one.stop, num_kept)) for one in self._forced_at if one.start < num_kept]
        self.num_discarded += len(self.tokens) - num_kept - (num_before - self.num_forced)
        self.finish_reason, self.truncated, self.stop_reason, self.stop_id = None, False, None, None
        self.replaced = True
        del self.tokens[num_kept:]
        self._add(forced)
        if forced:
            self._forced_at.append(range(num_kept, len(self.tokens)))

    def _add(self, tokens: Sequence[int]) -> None:
        """Add tokens that are known already, up to the first that ends the request."""
        for token in tokens:
            self.tokens.append(token)
            if token in self.request.stop_ids:
                self.finish_reason, self.stop_id = "stop", token
                return
        if len(self.tokens) >= self.request.device_limit > 0:
            self.finish_reason, self.truncated = "length", True
