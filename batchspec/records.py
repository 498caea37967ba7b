"""The immutable records that modules exchange. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchspec.automata.lazy_automaton import LazyAutomaton
from batchspec.automata.token_automaton import TokenAutomaton
from batchspec.console.text import error_line
from batchspec.images.pdf_page import PdfPage

Ids = NDArray[np.int32]
TokenText = Callable[[int], tuple[str, list[int]]]
"""The text and the bytes of a token."""

NgramRule = tuple[int, int, tuple[int, ...]]
"""n, the number of newest output tokens that count, and tokens that are never forbidden."""

MAX_STOP_IDS = 16
"""Maximum number of stop ids of a row, including the model's EOS ids: the width of a tensor on the device."""

CONSTRAINT_VIOLATED = "constraint_violated"
"""Error code of rows whose output does not follow their constraint."""
SCHEMA_VIOLATED, SCHEMA_UNCHECKED = "schema_violated", "schema_unchecked"
"""Error codes of rows with status invalid: the answer violates its schema, or could not be checked by it."""
ANSWERED = ("ok", "truncated", "invalid")
"""The statuses of rows with an answer."""
STATUSES = (*ANSWERED, "error", "skipped")
MAX_LOGIT_BIAS = 1024
"""Maximum number of tokens of a row whose logits are biased: the width of two tensors on the device."""

MAX_BAD_WORDS, MAX_BAD_WORD = 64, 8
"""Maximum number of token sequences of a row that are never completed, and of tokens of one: they give a tensor's width."""

MAX_LISTED = 64
"""Maximum number of tokens of a row that may complete n-grams again: they give a tensor's width."""

NO_LOGPROBS = -1
"""In place of a number of likeliest tokens: no log-probabilities are written."""

LEAST_TEMPERATURE = 1e-7
"""Lower temperatures count as 0. The noise spans 26 units, so at this temperature it only decides between logits that differ by
at most 2.6e-6, the rounding error of an fp32 logit near 20. A logit divided by a denormal temperature would be infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a row, applied in this order: logit bias, penalties, temperature, top-k, top-p, min-p."""

    temperature: float = 0.0
    """0 is greedy; top-k, top-p and min-p then have no effect. Values below LEAST_TEMPERATURE become 0."""
    top_k: int = 0
    """Keep the k likeliest tokens, and those as likely as the k-th; 0 is off."""
    top_p: float = 1.0
    """Keep the smallest set of the likeliest tokens whose probability reaches this; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtract from the logits of tokens seen in the output; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtract from the logit of a token, once for each time it is in the output; 0 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias added to its logit), each token once, at most MAX_LOGIT_BIAS."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never completed in the output: at most MAX_BAD_WORDS, each of 1 to MAX_BAD_WORD tokens."""
    no_repeat_ngram: NgramRule | None = None
    """(n, window, tokens): no token but these, at most MAX_LISTED, completes an n-gram of the newest `window` output tokens a
    second time."""

    def __post_init__(self) -> None:
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a row when its run stopped; another run continues from it with the same tokens."""

    row_index: int
    sample_index: int
    shard: int
    tokens: tuple[int, ...]
    """Output tokens so far, at least one; none of them ended the row."""
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
    image_digest: str | None = None
    """As `Request.image_digest`: the tokens are an answer to these images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The special tokens of harmony, the format of gpt-oss, and the words between them that decide what a message is.

    A message is `<|start|>` role `<|channel|>` name `<|constrain|>` type `<|message|>` text, then `<|end|>`, `<|return|>` (end of
    the answer) or `<|call|>` (a tool call). Role, recipient (` to=NAME`, after role or name) and type are ordinary tokens.
    Source: https://cookbook.openai.com/articles/openai-harmony
    """

    start_id: int
    channel_id: int
    message_id: int
    constrain_id: int | None
    end_ids: frozenset[int]
    """Tokens that end a message: end, return, call."""
    role: frozenset[tuple[int, ...]]
    """Every way to write "assistant" in tokens."""
    analysis: frozenset[tuple[int, ...]]
    """Every way to write "analysis": the channel of thoughts."""
    others: frozenset[tuple[int, ...]]
    """Every way to write "final" and "commentary"."""
    recipient: frozenset[int]
    """Tokens with which a recipient begins."""

    def is_call(self, header: Sequence[int]) -> bool:
        """Whether a header names a recipient."""
        return not self.recipient.isdisjoint(header)

    def begins_thought(self, header: Sequence[int]) -> bool:
        """Whether the text after a complete header is a thought."""
        if self.is_call(header) or self.channel_id not in header or header[-1] != self.message_id:
            return False
        name = tuple(header[header.index(self.channel_id) + 1 :])
        return any(name[: len(word)] == word for word in self.analysis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The tokens that separate a row's thought from its answer, and the budget of the thought."""

    begin_id: int | None
    """Token that begins a thought; None: every answer begins inside a thought, without a token. With channels: the token that
    begins the text of any message."""
    end_id: int
    opened: bool | None
    """Whether the prompt ends inside a thought (True) or after one (False). None: it has none; an end token without a begin token
    then ends a thought that began with the output."""
    budget: int | None
    """Maximum number of tokens in all of the row's thoughts together; None: no limit."""
    label: str = ""
    """Text with which each thought begins and that is not part of it."""
    closing: tuple[int, ...]
    """Tokens that are forced after a thought that has used up the budget. They end with end_id; with channels they go on to the
    text of the final channel."""
    channels: Channels | None = None
    """The channels of harmony; None for a pair of think tokens."""
    header: tuple[int, ...] = ()
    """With channels: tokens of the prompt's last message up to where its text begins, because the output continues it. Empty if
    the prompt ends after a message, or has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A text that a prompt may continue with."""

    text: str
    token_ids: tuple[int, ...]
    """Its tokens, at least one."""
    length: int = 1
    """Its log-probability is divided by this before it is compared with those of other choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePiece:
    """An image of a prompt: its tokens, and what the embeddings of its placeholders are made of. Samples of a row share it."""

    begin: int
    length: int
    """Its tokens are begin .. begin+length-1 of prompt_ids."""
    rows: int
    cols: int
    """Its embeddings, row by row, each in the place of a token. The other tokens stay text: after each row as many."""
    advance: int
    """Positions that rotary embedding counts for it."""
    height: int
    width: int
    """Pixels after resizing."""
    encoded_pixels: int = field(compare=False)
    """Pixels before, height times width."""
    digest: bytes
    """16 bytes that determine its pixels."""
    source: bytes | PdfPage = field(repr=False, compare=False)
    """The encoded image, or the page that is rendered."""
    whole: bool = False
    """Whether its tokens attend to each other in prefill (`FlatBatch.last_keys`), so that no pass may end inside it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels."""
        return 3 * self.height * self.width

    @property
    def encoded_bytes(self) -> int:
        """Bytes of the encoded image; 0 for a page."""
        return len(self.source) if isinstance(self.source, bytes) else 0

    def rows_before(self, token: int) -> int:
        """Number of its embeddings before its token of this number, 0 .. length."""
        row, col = divmod(token, self.length // self.rows)
        return row * self.cols + min(col, self.cols)

    def embedded(self, first: int, last: int) -> NDArray[np.int64]:
        """Those of its tokens first .. last-1 that read an embedding."""
        tokens = np.arange(first, last)
        return tokens[tokens % (self.length // self.rows) < self.cols]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One sample of one admitted input row, ready to decode."""

    request_id: str
    row_index: int
    """Index of the row in the whole input, counted over its files in order."""
    sample_index: int
    shard: int
    prompt_ids: Ids
    """int32 [prompt_len], at least one token."""
    images: tuple[ImagePiece, ...] = ()
    """The images of the prompt, in its order."""
    max_new_tokens: int
    """prompt_len + max_new_tokens <= model.max_len. 0: the prompt is scored, as are those of all requests of the engine."""
    min_new_tokens: int
    """Stop ids are not drawn before this many tokens."""
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    """Tokens that end the row: the model's EOS ids (unless ignored) and the user's."""
    stop: tuple[str, ...]
    """Strings that end the row; searched in the decoded output on the host."""
    seed: int
    """int64 key of the row's sampling noise; key and position determine every draw."""
    predicted_tokens: int
    """Expected output length in tokens, used for packing only."""
    thinking: Thinking | None = None
    """None where the model has no think tokens."""
    constraint: tuple[str, str] | None = None
    """What the answer must match, its kind and its text as `packing/constraints.py` makes them; None: anything."""
    automaton: TokenAutomaton | LazyAutomaton | None = None
    """The compiled constraint; None before it is compiled. The engine takes no request whose automaton is missing."""
    automaton_state: int = 0
    """State of the automaton in which the output begins."""
    tools: str | None = None
    """JSON text of the row's tools, if tool calls are to be found in the text of its answer (`tool_calls/`); else None."""
    num_logprobs: int | None = None
    """Of how many of the likeliest tokens log-probabilities are written, or NO_LOGPROBS; None: as many as the engine reads."""
    one_call: bool = False
    """Whether of the answer's tool calls the first alone is kept."""
    adapter: int = 0
    """Number of its LoRA adapter among those that are not merged; 0: none. It is the same in every run of the job."""
    choices: tuple[Choice, ...] = ()
    """The texts to score after the prompt (tasks/choices.py); empty where the prompt is scored or an answer decoded."""
    resumed: Snapshot | None = None
    """The state of this row when an earlier run stopped, if any."""
    repetition: Repetition | None = None
    """The repetition that ends the row; None: it may repeat itself."""
    synthetic_len: int | None = None
    """Benchmarks only: the row ends after this many tokens, whatever they are. Packing and scheduling must not use it."""

    @property
    def may_end_early(self) -> bool:
        """Whether anything can end the row before max_new_tokens."""
        return bool(self.stop_ids or self.stop or self.repetition) or self.synthetic_len is not None

    @property
    def constraint_kind(self) -> str | None:
        """schema, regex, choice, grammar or tool_choice; None without a constraint."""
        if self.constraint is not None:
            return self.constraint[0]
        return self.automaton.kind if isinstance(self.automaton, LazyAutomaton) else None

    def on_device(self) -> Request:
        """The request without what only the host uses, for ranks that execute its steps: `DeviceBatch.begin` reads the rest, and
        `RowCommands` set its automaton."""
        return replace(
            self, request_id="", stop=(), thinking=None, constraint=None, automaton=None, tools=None, choices=(), resumed=None,
            repetition=None, images=tuple(replace(piece, source=b"") for piece in self.images),
        )

    @property
    def prefix_key(self) -> bytes:
        """What K and V of the prompt depend on besides its tokens: rows share pages only if it is the same."""
        return self.adapter.to_bytes(4) if self.adapter else b""

    @property
    def grouping_ids(self) -> Ids:
        """prompt_ids with other numbers in the places of images, which differ where images do: for what compares prompts without
        sharing anything because of it."""
        ids = self.prompt_ids
        if self.images:
            ids = ids.copy()
            for piece in self.images:
                ids[piece.begin : piece.begin + piece.length] = -1 - (int.from_bytes(piece.digest[:4], "little") >> 1)
        return ids

    @property
    def image_digest(self) -> str | None:
        """What determines the pixels of all its images, in hexadecimal; None without images."""
        return b"".join(piece.digest for piece in self.images).hex() or None

    @property
    def device_limit(self) -> int:
        """Number of output tokens after which the row ends on the device: max_new_tokens, or synthetic_len if that is smaller."""
        return self.max_new_tokens if self.synthetic_len is None else min(self.max_new_tokens, self.synthetic_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A row ends when its newest tokens are `min_count` times one pattern of min_pattern_size .. max_pattern_size tokens."""

    min_pattern_size: int
    max_pattern_size: int
    min_count: int
    """At least 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """Why a row has no completion, or an invalid one. `code` is short and stable, `message` one line (`error_line`)."""

    code: str
    stage: str
    message: str
    retryable: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", error_line(self.message))


class _Struct(msgspec.Struct, frozen=True, kw_only=True):
    """A record of which one is made for every row while nothing else is computed, and of which features replace fields: as frozen
    dataclasses a completion and its statistics took 15 us a row, as structs less than one."""

    def replace(self, **changes: Any) -> Self:
        """The record with other values of some fields."""
        return msgspec.structs.replace(self, **changes)


class RowStats(_Struct, frozen=True, kw_only=True):
    """Speculation statistics and cost of one completion.

    Tokens emitted before trimming at the stop = num_prefills + num_accepted + num_rounds, without forced tokens;
    sum(histogram) = num_rounds; sum(j * histogram[j]) = num_accepted. Rounds after the one with the stop are not counted.
    """

    drafter: str
    """"none" without a drafter."""
    draft_len: int
    """K: maximum number of draft tokens in a round; for a tree its number of levels."""
    num_prefills: int
    num_rounds: int
    num_drafted: int
    """Verified draft tokens; for trees all nodes count."""
    num_accepted: int
    """Draft tokens accepted by the verification, before trimming at the stop; bonus tokens not counted."""
    num_discarded: int
    """Tokens emitted after the stop and discarded."""
    histogram: tuple[int, ...]
    """[K+1] number of rounds that accepted exactly j draft tokens."""
    drafted_at: tuple[int, ...]
    """[K] number of rounds that drafted at least j+1 tokens."""
    accepted_at: tuple[int, ...]
    """[K] number of rounds that accepted at least j+1 tokens."""
    prefill_s: float
    """Wall-clock seconds of the prefill passes that included this row."""
    decode_s: float
    """Wall-clock seconds from the first token to the last."""
    slot: int
    num_forced: int = 0
    """Tokens forced by the thinking budget; no prefill and no round emitted them."""


class Completion(_Struct, frozen=True, kw_only=True, eq=False):
    """One output row: the result of the engine or of admission for one sample of one input row."""

    request_id: str
    row_index: int
    sample_index: int
    shard: int
    status: str
    """ok; truncated (finish_reason length); invalid (the answer violates its schema); error; skipped."""
    finish_reason: str
    """stop, length or error."""
    stop_reason: str | None = None
    """The stop string, or the stop token's id in decimal; None at the model's own EOS or the limit."""
    prompt_ids: Ids | None = None
    """None if the row was never tokenised."""
    token_ids: Ids | None = None
    """int32, ending with the EOS or with the tokens that completed the stop string."""
    text: str | None = None
    """Decoded answer, without the thought, the stop string or stop id, and special tokens."""
    num_undecoded: int | None = None
    """Number of its first tokens whose text, without special tokens, `text` will be: the maker of the table decodes and checks
    it. None: `text` is final."""
    constraint: str | None = None
    """Kind of the row's constraint: schema, regex, choice, grammar or tool_choice. `text` then consists of the very bytes of the
    tokens."""
    unchecked: tuple[str, str] | None = None
    """The row's constraint, if its automaton allows more than that: the answer is to be checked by it. None: there is nothing to
    check any more."""
    reasoning: str | None = None
    """The text of the thought; None if there was none."""
    reasoning_truncated: bool | None = None
    """Whether the thought was cut off, by its budget or by max_new_tokens; None if the model has no think tokens."""
    tool_calls: str | None = None
    """JSON text of the list of tool calls, as in OpenAI's chat format; None if there were none."""
    reasoning_tokens: int | None = None
    """Number of tokens of the thought, without the think tokens around it."""
    logprobs: NDArray[np.float32] | None = None
    """[num tokens] log-softmax of the raw logits for each emitted token; NaN for the closing tokens of a thought that used up its
    budget, whether they were forced or drawn."""
    top_logprobs: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """ids and logprobs, each [num tokens, N], likeliest first; ids are -1 for the same closing tokens."""
    prompt_logprobs: NDArray[np.float32] | None = None
    """[prompt tokens] of a scored prompt; NaN for the first token."""
    prompt_top_logprobs: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """ids and logprobs, each [prompt tokens, N], likeliest first; ids are -1 for the first token."""
    choice_logprobs: tuple[tuple[str, float], ...] | None = None
    """The texts of `Request.choices` in their order, and the natural log of each one's probability."""
    choice_probs: tuple[float, ...] | None = None
    """The share of each of these choices, compared by log-probability / `Choice.length`; they sum to 1."""
    state_values: NDArray[np.float32] | None = None
    """What the task made of the hidden state after the prompt (`Reads`), in the order of its columns: of reward, a score of each
    label; of embed, the pooled state."""
    seed: int | None = None
    predicted_tokens: int | None = None
    cached_tokens: int = 0
    """Prompt tokens whose K/V came from a shared prefix."""
    image_digest: str | None = None
    """As `Request.image_digest`."""
    image_tokens: int = 0
    """Prompt tokens that are places of images."""
    num_samples: int = 1
    """Of a row that admission refused: samples that it asked for, all of which this is the error of."""
    stats: RowStats | None = None
    error: RowError | None = None

    @property
    def has_whole_answer(self) -> bool:
        """Whether the answer ended by itself: neither a limit nor a stop string cut it off."""
        if self.status != "ok" or self.finish_reason != "stop" or self.token_ids is None:
            return False
        return self.stop_reason is None or self.stop_reason == str(self.token_ids[-1])  # else it is a stop string

    def failed(self, error: RowError) -> Completion:
        """The error row that replaces this completion of a decoded request. It has neither tokens nor text, because they may be
        wrong or may break the row's constraint. Its statistics count the tokens as discarded."""
        stats = self.stats
        if stats is not None:
            stats = stats.replace(num_discarded=stats.num_prefills + stats.num_accepted + stats.num_rounds)
        return Completion(
            request_id=self.request_id, row_index=self.row_index, sample_index=self.sample_index, shard=self.shard,
            status="error", finish_reason="error", prompt_ids=self.prompt_ids, seed=self.seed,
            predicted_tokens=self.predicted_tokens, cached_tokens=self.cached_tokens, image_digest=self.image_digest,
            image_tokens=self.image_tokens, stats=stats, error=error,
        )
