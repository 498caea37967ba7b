"""What crosses module borders: records built complete, never changed. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

MAX_STOP_IDS = 16
"""Stop ids of a row, the model's EOS ids included: the width of a tensor on the device."""


LEAST_TEMPERATURE = 1e-7
"""Noise spreads over 26 units: below this it could only decide between logits 2.6e-6 apart, which is fp32's rounding of a logit
near 20. A logit divided by a denormal temperature would be infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Applied in this order: penalties, temperature, top-k, top-p, min-p."""

    temperature: float = 0.0
    """0 is greedy: the filters below then change nothing. Below LEAST_TEMPERATURE it becomes 0."""
    top_k: int = 0
    """Keep the k likeliest tokens (ties at the k-th kept); 0 is off."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtract from the logits of tokens seen in the output; 0 is off."""

    def __post_init__(self) -> None:
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a row had when its run was stopped: another run goes on from here with the same tokens."""

    row_index: int
    sample_index: int
    shard: int
    tokens: tuple[int, ...]
    """Output so far, at least one token; no stop among them."""
    num_prefills: int
    cached_tokens: int
    accepted: tuple[int, ...]
    """accepted[j] rounds accepted exactly j draft tokens."""
    drafted: tuple[int, ...]
    """drafted[j] rounds drafted exactly j."""
    prefill_s: float
    decode_s: float
    num_discarded: int = 0
    num_forced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How a row's thought is told from its answer, on token ids alone, and what ends a thought that gets too long."""

    begin_id: int | None
    """None: the model begins every answer with a thought and never says so."""
    end_id: int
    opened: bool | None
    """The prompt ends inside a thought; False: behind one; None: it says nothing, and a first end token then ends a thought that
    began with the output."""
    budget: int | None
    """Tokens of all the row's thoughts together; None is no limit."""
    closing: tuple[int, ...]
    """What is put behind a thought that has used the budget; its last token is end_id."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One sample of one input row, admitted: the GPU can take it as it stands."""

    request_id: str
    row_index: int
    """Place of the row in the whole input, counted over its files in order."""
    sample_index: int
    shard: int
    prompt_ids: Ids
    """int32 [prompt_len], at least one token."""
    max_new_tokens: int
    """At least 1; prompt_len + max_new_tokens <= model.max_len."""
    min_new_tokens: int
    """Stop ids are not drawn before this many tokens."""
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    """Tokens that end the row: the model's EOS ids (unless ignored) and the user's."""
    stop: tuple[str, ...]
    """Strings that end the row, looked for in the decoded output on the host."""
    seed: int
    """int64 row key of the noise: with the position it fixes every draw."""
    predicted_tokens: int
    """Expected output length, for packing only."""
    thinking: Thinking | None = None
    """None where the model has no think tokens."""
    resumed: Snapshot | None = None
    """Where an earlier run left this row."""
    synthetic_len: int | None = None
    """Benchmarks only: the row ends after this many tokens, whatever they are; packing and scheduling must not look at it."""

    @property
    def may_end_early(self) -> bool:
        """Something can end the row before max_new_tokens."""
        return bool(self.stop_ids or self.stop) or self.synthetic_len is not None

    @property
    def device_limit(self) -> int:
        """Output tokens behind which the row ends on the device: max_new_tokens, or synthetic_len where that is smaller."""
        return self.max_new_tokens if self.synthetic_len is None else min(self.max_new_tokens, self.synthetic_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """Why a row has no completion. `code` is stable and short, `message` is for people."""

    code: str
    stage: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStats:
    """What speculation did for one completion, and what the completion cost.

    Tokens emitted before trimming at the stop = num_prefills + num_accepted + num_rounds, forced ones not counted;
    sum(histogram) = num_rounds; sum(j * histogram[j]) = num_accepted. Rounds after the one that held the stop are left out.
    """

    drafter: str
    """"none" when nothing drafted."""
    draft_len: int
    """K: draft tokens a round at most, of a tree its levels."""
    num_prefills: int
    num_rounds: int
    num_drafted: int
    """Draft tokens that were verified, of a tree its nodes."""
    num_accepted: int
    """Draft tokens kept by the verification; bonus tokens and trimming at the stop not counted."""
    num_discarded: int
    """Tokens emitted behind the stop and thrown away."""
    histogram: tuple[int, ...]
    """[K+1] rounds that accepted exactly j draft tokens."""
    drafted_at: tuple[int, ...]
    """[K] rounds that drafted at least j+1 tokens."""
    accepted_at: tuple[int, ...]
    """[K] rounds that accepted at least j+1 tokens."""
    prefill_s: float
    """Wall seconds of the prefill passes this row took part in."""
    decode_s: float
    """Wall seconds from the first token to the last."""
    batch_id: int
    slot: int
    num_forced: int = 0
    """Tokens that the thinking budget put there: no prefill and no round emitted them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One output row: what the engine or admission says of one sample of one input row."""

    request_id: str
    row_index: int
    sample_index: int
    shard: int
    status: str
    """ok; truncated (finish_reason length); error; skipped; cancelled."""
    finish_reason: str
    """stop, length or error."""
    stop_reason: str | None = None
    """The stop string, or the stop token's id in decimal; None at the model's own EOS or the limit."""
    prompt_ids: Ids | None = None
    """None where the row never got tokens."""
    token_ids: Ids | None = None
    """int32, ending with the EOS or with the tokens that completed the stop string."""
    text: str | None = None
    """Decoded answer, without the thought, the stop string and special tokens."""
    reasoning: str | None = None
    """The thought; None where there was none."""
    reasoning_truncated: bool | None = None
    """The thought was cut off, by its budget or by max_new_tokens; None where the model has no think tokens."""
    reasoning_tokens: int | None = None
    """Tokens of the thought, those that begin and end it not counted."""
    logprobs: NDArray[np.float32] | None = None
    """[num tokens] log-softmax of the raw logits at each emitted token; NaN at forced ones."""
    top_logprobs: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """ids and logprobs, each [num tokens, N], likeliest first; ids are -1 at forced tokens."""
    seed: int | None = None
    predicted_tokens: int | None = None
    cached_tokens: int = 0
    """Prompt tokens whose K/V came from a shared prefix."""
    stats: RowStats | None = None
    error: RowError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """The static shape that requests stream through: planned once, then fixed."""

    num_slots: int
    """Rows that decode side by side."""
    row_buckets: tuple[int, ...]
    """Ascending row counts that a round may run with; the last equals `slots`."""
    num_pages: int
    """K/V pages of the first K/V group, the scratch page included: the layers that read most keys, of most models all."""
    page_size: int
    """Tokens a page."""
    max_len: int
    """Longest prompt + output of a row, in tokens."""
    draft_len: int
    """K: draft tokens a row and round at most; of a tree its nodes."""
    prefill_tokens: int
    """Tokens of one prefill pass at most."""
    run_ahead: int
    """Rounds that the host launches before it looks at the results of the first."""
    longest_prompt: int | None = None
    """Of the rows that were looked at: what prefill is prepared for; None: any that fits."""
    more_pages: tuple[int, ...] = ()
    """The same of the other K/V groups, layers with narrower windows; (): num_pages each."""

    def group_pages(self, num_groups: int) -> tuple[int, ...]:
        """K/V pages of each group."""
        more = self.more_pages or (self.num_pages,) * (num_groups - 1)
        assert len(more) == num_groups - 1, (self.more_pages, num_groups)
        return (self.num_pages, *more)
