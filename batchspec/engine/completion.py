"""Makes the completion of a request from its state when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from batchspec.constrained_text import checked_text
from batchspec.engine.channel_calls import tool_calls
from batchspec.engine.request_state import RequestState
from batchspec.engine.stop_strings import UNFINISHED, Decode, decode_of_answer
from batchspec.engine.thinking import Parts, split_thoughts
from batchspec.error_rows import error_row
from batchspec.records import Completion, Ids, RowError, RowStats
from batchspec.token_automaton import BREAKS_AFTER_THOUGHT, DEAD, TokenAutomaton, TokenSymbols
from batchspec.tool_calls.split import CallParser

NON_FINITE = "non_finite_logits"
_OF_ALLOWED = " of a token that its schema, regex, choice or grammar allows; or a token was drawn that it does not allow"


def completion_of(
    state: RequestState,
    *,
    decode: Decode | None,
    defers_text: bool = False,
    drafter: str,
    eos_ids: frozenset[int],
    slot: int,
    now: float,
    nodes: int | None = None,
    vocabulary: TokenSymbols | None = None,
    call_parser: CallParser | None = None,
) -> Completion:
    """The completion of a finished request.

    decode   token ids -> text; None without a tokenizer
    defers_text  leave the decoding of text that is simply that of all tokens to the caller (`Completion.text_due`)
    eos_ids  the model's EOS ids, which are not reported as stop_reason
    slot     the slot in which the request ended
    now      the host's clock in seconds
    nodes    number of nodes in each round's tree; None for chains
    vocabulary  the bytes of the tokens, of which the answer of a request with a constraint consists
    call_parser  finds the tool calls in answers; None: calls stay text
    """
    assert state.finish_reason is not None
    stats = _stats(state, drafter, slot, now, nodes)
    if state.prompt_logprobs is not None:
        return _scored(state, state.prompt_logprobs, stats)
    if state.finish_reason == "error":
        return _failure(state, stats)
    assert state.request.automaton is None or state.constraint_checked, (
        f"{state.request.request_id!r}: its constraint was not checked"
    )
    count = len(state.tokens)
    assert state.num_top is None or len(state.logprobs) >= count, (len(state.logprobs), count)
    whole = state.request.thinking is None and state.stop_string is None and state.request.tools is None
    text_due = defers_text and decode is not None and whole
    texts = _Texts() if text_due else _texts(state, decode, vocabulary)
    parts = texts.parts
    stop_id = None if state.stop_id is None or state.stop_id in eos_ids else str(state.stop_id)
    top = None
    if state.top:
        top = (np.stack([ids for ids, _ in state.top[:count]]), np.stack([values for _, values in state.top[:count]]))
    done = Completion(
        **_of_request(state),
        status="truncated" if state.finish_reason == "length" else "ok",
        finish_reason=state.finish_reason,
        stop_reason=stop_id if state.stop_string is None else state.stop_string,
        token_ids=np.array(state.tokens, np.int32),
        text=texts.answer,
        text_due=text_due,
        constraint=None if state.request.automaton is None else state.request.constraint_kind,
        reasoning=texts.reasoning,
        tool_calls=texts.tool_calls,
        reasoning_truncated=None if parts is None else _cut_off(state, parts),
        reasoning_tokens=None if parts is None else parts.num_reasoning,
        logprobs=np.array(state.logprobs[:count], np.float32) if state.logprobs else None,
        top_logprobs=top,
        stats=stats,
    )
    if text_due:
        return done
    done = checked_text(done)
    if call_parser is None:
        return done
    text_of = None if state.request.automaton is None or vocabulary is None else vocabulary.text
    return call_parser.parsed(done, state.request, _answer_tokens(state), text_of=text_of, stop=state.stop_string)


class _OfRequest(TypedDict):
    request_id: str
    row_index: int
    sample_index: int
    shard: int
    prompt_ids: Ids
    seed: int
    predicted_tokens: int
    cached_tokens: int


def _of_request(state: RequestState) -> _OfRequest:
    """The fields that every completion copies from its request, however it ended."""
    request = state.request
    return {
        "request_id": request.request_id,
        "row_index": request.row_index,
        "sample_index": request.sample_index,
        "shard": request.shard,
        "prompt_ids": request.prompt_ids,
        "seed": request.seed,
        "predicted_tokens": request.predicted_tokens,
        "cached_tokens": state.cached_tokens,
    }


def _scored(state: RequestState, logprobs: NDArray[np.float32], stats: RowStats) -> Completion:
    """The completion of a scored prompt: no output tokens, and the log-probabilities of the prompt's tokens."""
    bad = np.flatnonzero(~np.isfinite(logprobs[1:]))
    if len(bad):
        return _failure(state, stats, f"position {bad[0] + 1} (prompt token {bad[0] + 1})")
    return Completion(
        **_of_request(state),
        status="ok",
        finish_reason="length",
        token_ids=np.array([], np.int32),
        prompt_logprobs=logprobs,
        prompt_top_logprobs=state.prompt_top,
        stats=stats,
    )


def _failure(state: RequestState, stats: RowStats, where: str | None = None) -> Completion:
    """The error row of a request that the host ended, or whose logits were not finite. where: the position of the failure; None:
    the newest token."""
    count = len(state.tokens)
    of_allowed = "" if state.request.automaton is None else _OF_ALLOWED
    where = where or f"position {len(state.request.prompt_ids) + count} (output token {count})"
    message = (
        f"the model's logits at {where} hold NaN or +inf, or no finite value{of_allowed}; check the weights and model.dtype, or "
        "drop the row"
    )
    failed = Completion(**_of_request(state), status="error", finish_reason="error", stats=stats)
    return error_row(failed, state.error or RowError(code=NON_FINITE, stage="decode", message=message, retryable=True))


def _stats(state: RequestState, drafter: str, slot: int, now: float, nodes: int | None) -> RowStats:
    return RowStats(
        drafter=drafter,
        draft_len=state.draft_len,
        num_prefills=state.num_prefills,
        num_rounds=state.num_rounds,
        num_drafted=state.num_drafted if nodes is None else nodes * sum(state.drafted_at[:1]),
        num_accepted=state.num_accepted,
        num_discarded=state.num_discarded,
        histogram=tuple(state.histogram),
        drafted_at=tuple(state.drafted_at),
        accepted_at=tuple(state.accepted_at),
        prefill_s=state.prefill_s,
        decode_s=state.decode_s(now),
        batch_id=0,
        slot=slot,
        num_forced=state.num_forced,
    )


@dataclass(frozen=True, slots=True)
class _Texts:
    answer: str | None = None
    reasoning: str | None = None
    tool_calls: str | None = None
    parts: Parts | None = None
    """Tokens of all thoughts; None if the model has no think tokens."""


def _texts(state: RequestState, decode: Decode | None, vocabulary: TokenSymbols | None) -> _Texts:
    """The answer, the thought (None if there was none) and the tool calls.

    White space between thought and answer is dropped (`_after_thought`). An empty line separates the messages of an answer.
    """
    thinking = state.request.thinking
    of_answer = decode_of_answer(state.request, decode, vocabulary)
    found = state.finder.text if state.finder is not None and state.stop_string is not None else None
    without_stop = state.tokens[:-1] if state.stop_id is not None else state.tokens
    if thinking is None:
        tokens = state.tokens if state.request.automaton is None else without_stop
        return _Texts(None if of_answer is None else of_answer(tokens) if found is None else found)
    parts = split_thoughts(without_stop, thinking)
    if decode is None or of_answer is None:
        return _Texts(parts=parts)
    messages = [of_answer(message) for message in parts.answers()]
    if found is not None:
        messages[-1] = found
    calls, more = tool_calls(parts.calls, state.request, decode)
    messages += more
    text = "\n\n".join([message for message in messages if message.strip()]) if len(messages) > 1 else messages[0]
    if not parts.thoughts:
        return _Texts(text, None, calls, parts)
    thoughts = (decode(thought).strip() for thought in parts.thoughts)
    return _Texts(_after_thought(text, state), "\n\n".join(thought for thought in thoughts if thought), calls, parts)


def _answer_tokens(state: RequestState) -> list[int]:
    """The tokens of the answer: all but those of thoughts and the stop id."""
    tokens = state.tokens[:-1] if state.stop_id is not None else state.tokens
    return tokens if state.request.thinking is None else split_thoughts(tokens, state.request.thinking).answer


def _after_thought(text: str, state: RequestState) -> str:
    """An answer without the white space that separates it from the thought: chat templates add their own.

    If the answer follows a constraint, only leading line breaks are removed, and only if it matches without them.
    """
    automaton, thinking = state.request.automaton, state.request.thinking
    if automaton is None:
        return text.lstrip()
    if thinking is None or thinking.channels is not None:
        return text
    leading = len(text) - len(text.lstrip("\n"))
    if not isinstance(automaton, TokenAutomaton):
        return text[min(leading, state.num_breaks) :]
    counts = range(min(leading, BREAKS_AFTER_THOUGHT), 0, -1)
    return text[next((count for count in counts if _matches(text[count:], state, automaton)), 0) :]


def _matches(text: str, state: RequestState, automaton: TokenAutomaton) -> bool:
    """Whether a text, from which leading line breaks were removed, matches. True if no answer may begin with a line break."""
    if automaton.read(automaton.answer, b"\n") == DEAD:
        return True
    after = automaton.read(automaton.answer, text.rstrip(UNFINISHED).encode())
    return after != DEAD and (state.stop_id is None or automaton.allows(after, state.stop_id))


def _cut_off(state: RequestState, parts: Parts) -> bool:
    """Whether a thought was cut off, by its budget or by max_new_tokens."""
    assert state.budget is not None
    state.budget.forced(state.tokens)
    return bool(state.budget.closings) or (parts.inside and state.finish_reason == "length")
