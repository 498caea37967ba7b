"""All rules that mask or bias logits before a choice: one list for the target and, if a rule says so, for drafters.

A new rule is one `LogitRule` in RULES. That of a row's option is a file of its own, as `bad_words.py`: it says what asks for the
rule, which state of the slots it needs, and what it does.
Rounds name no rule: they call the functions below, which apply what the rows' mode asks for. Legend: T rows of logits, R batch
rows, V vocabulary, K draft_len.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchspec.batch import bad_words, logit_bias, no_repeat_ngram
from batchspec.batch.logit_rule import LogitRows, LogitRule
from batchspec.batch.sampling_mode import SamplingMode

if TYPE_CHECKING:
    from batchspec.batch.device_batch import DeviceBatch

SEEN = 1
"""Bit that is set for a token that is in prompt or output."""
ONCE_IN_OUTPUT = 2
"""Added for each occurrence of the token in the output."""


def adjust_logits(logits: Tensor, at: LogitRows, rows: DeviceBatch, mode: SamplingMode) -> None:
    """Apply to the target's logits [T, V], in place and in order, every rule that `mode` asks for. Does not synchronise."""
    for rule in RULES:
        if rule.wanted(mode):
            rule.apply(logits, at, rows, None)


def adjust_draft_logits(
    logits: Tensor, at: LogitRows, rows: DeviceBatch, mode: SamplingMode, map_ids: Tensor | None = None
) -> None:
    """The same for a drafter's logits, with the rules that drafters follow; map_ids [V] the token of each column."""
    for rule in RULES:
        if rule.of_drafters and rule.wanted(mode):
            rule.apply(logits, at, rows, map_ids)


def adjusts(mode: SamplingMode) -> bool:
    """Whether any rule changes the target's logits."""
    return any(rule.wanted(mode) for rule in RULES)


def reads_drafts(mode: SamplingMode) -> bool:
    """Whether a rule that `mode` asks for needs the tokens drafted before a position."""
    return any(rule.reads_drafts and rule.wanted(mode) for rule in RULES)


def adjusts_drafts(mode: SamplingMode) -> bool:
    """Whether drafters follow any rule that `mode` asks for."""
    return any(rule.of_drafters and rule.wanted(mode) for rule in RULES)


def drafters_read_drafts(mode: SamplingMode) -> bool:
    """Whether drafters follow a rule that `mode` asks for and that needs their own drafts before a position."""
    return any(rule.of_drafters and rule.reads_drafts and rule.wanted(mode) for rule in RULES)


def masks_alone(mode: SamplingMode) -> LogitRule | None:
    """The rule that turns greedy choices of the target into choices among the tokens of its masks; None: logits must be
    changed."""
    wanted = [rule for rule in RULES if rule.wanted(mode)]
    if len(wanted) != 1 or wanted[0].masks is None or mode.random or mode.may_hold:
        return None
    return wanted[0]


def check_drafts(rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, mode: SamplingMode) -> None:
    """Make drafts that were not chosen from logits follow the rules of drafters. draft_ids int32 [R, K] and
    draft_len int32 [R] are changed."""
    for rule in RULES:
        if rule.check_drafts is not None and rule.wanted(mode):
            rule.check_drafts(rows, draft_ids, draft_len)


def commit_rules(rows: DeviceBatch, log: Tensor, live: Tensor, mode: SamplingMode) -> None:
    """Bring the state of every rule up to date with the tokens just committed: log int32 [R, L] as `accept` writes it,
    live int32 [R] 0 for rows that ended with them; both may be changed."""
    for rule in RULES:
        if rule.commit is not None and rule.wanted(mode):
            rule.commit(rows, log, live)


def mark_undecided(target_ids: Tensor, at: LogitRows, rows: DeviceBatch, mode: SamplingMode) -> None:
    """Replace choices int32 [T] that cannot be made yet by UNDECIDED."""
    for rule in RULES if mode.may_hold else ():
        if rule.mark_undecided is not None and rule.wanted(mode):
            rule.mark_undecided(target_ids, at, rows)


def hold_undecided(rows: DeviceBatch, live: Tensor, log: Tensor, mode: SamplingMode) -> None:
    """Hold the rows that cannot go on yet: live int32 [R] becomes 0, and `finish` in log int32 [R, L] HELD."""
    for rule in RULES if mode.may_hold else ():
        if rule.hold_undecided is not None and rule.wanted(mode):
            rule.hold_undecided(rows, live, log)


def tokens_left(mode: SamplingMode) -> str:
    """For the error of a row that may draw no token: " of a token that" the rules of its mode leave; empty if none can be why."""
    found = " and ".join(rule.leaves for rule in RULES if rule.leaves and rule.wanted(mode))
    return found and f" of a token that {found}"


def apply_penalties(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Repetition penalty, then frequency and presence penalty, in place.

        repetition  l / r if l > 0 else l * r     of tokens in prompt or output (CTRL, arXiv 1909.05858)
        others      l - f * count - p * (count > 0)    count of the token in the output, the prompt left out
        (https://platform.openai.com/docs/guides/text-generation, "Frequency and presence penalties")

    Draft tokens before the position count as output: the penalty of a token is the same whether it was committed in this round
    or long ago.
    """
    assert map_ids is None, "penalties are the target's alone"
    seen = rows.seen[at.row_ids]
    for tokens, before in at.drafts_before():
        ids = tokens.unsqueeze(1)
        mark = seen.gather(1, ids)
        seen.scatter_(1, ids, torch.where(before.unsqueeze(1), (mark | SEEN) + ONCE_IN_OUTPUT, mark))
    if at.tokens is not None:
        seen = seen[:, at.tokens]
    repetition, presence, frequency = (
        value[at.row_ids].unsqueeze(1).to(logits.dtype) for value in (rows.repetition, rows.presence, rows.frequency)
    )
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    torch.where(seen > 0, penalised, logits, out=logits)
    count = seen // ONCE_IN_OUTPUT
    logits.sub_(frequency * count).sub_(presence * (count > 0))


def forbid_stop_ids(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Stop ids get -inf at positions before the row's min_tokens, in place; for a row with an automaton `follow_automata` does
    this, because its text may have to end before."""
    assert map_ids is None, "min_tokens is the target's alone"
    stop_ids = rows.stop_ids[at.row_ids].long()
    early = (at.positions < rows.min_tokens[at.row_ids]) & (rows.automaton_state[at.row_ids] == 0)
    early = early.unsqueeze(1) & (stop_ids >= 0)
    if at.tokens is not None:
        stop_ids = stop_ids - at.tokens.start
        early &= (stop_ids >= 0) & (stop_ids < logits.shape[1])
        stop_ids = stop_ids.clamp(max=logits.shape[1] - 1)
    ids = stop_ids.clamp(min=0)
    # Unused entries name id 0: amin keeps its logit there.
    value = torch.where(early, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, ids, value, "amin")


def follow_automata(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Tokens that the row's automaton does not allow after its tokens and the drafts before the position get -inf, in place; so
    do stop ids at positions before the row's min_tokens, unless its text can only end."""
    assert rows.automata is not None
    rows.automata.constrain(
        logits, at.row_ids, rows.automaton_state, rows.automaton_classes, drafts=at.drafts,
        num_drafted=at.num_drafted, draft_rows=at.draft_rows, map_ids=map_ids,
        first_id=0 if at.tokens is None else at.tokens.start, positions=at.positions, min_tokens=rows.min_tokens,
        stop_ids=rows.stop_ids,
    )


def allowed_by_automata(at: LogitRows, rows: DeviceBatch) -> tuple[Tensor, Tensor]:
    """The masks that `follow_automata` would apply, for a product that applies them itself: all masks, and the row int32 [T] of
    each position's mask. They do not forbid stop ids before min_tokens."""
    assert rows.automata is not None
    return rows.automata.allowed(
        at.row_ids, rows.automaton_state, rows.automaton_classes, drafts=at.drafts, num_drafted=at.num_drafted,
        draft_rows=at.draft_rows,
    )


def undecided_by_automata(target_ids: Tensor, at: LogitRows, rows: DeviceBatch) -> None:
    """Replace choices [T] by UNDECIDED where the device lacks the mask of a lazy automaton's state: they were made without it."""
    assert rows.automata is not None
    rows.automata.mark_undecided(
        target_ids, at.row_ids, rows.automaton_state, rows.automaton_classes, drafts=at.drafts,
        num_drafted=at.num_drafted, draft_rows=at.draft_rows,
    )


def mark_output(rows: DeviceBatch, tokens: Tensor, kept: Tensor) -> None:
    """Count committed tokens, for the penalties: the first kept[r] of tokens[r]. tokens int32 [R, S], kept int32 [R]."""
    for j in range(tokens.shape[1]):
        ids = tokens[:, j].clamp(min=0).long().unsqueeze(1)
        mark = rows.seen.gather(1, ids)
        rows.seen.scatter_(1, ids, torch.where((kept > j).unsqueeze(1), (mark | SEEN) + ONCE_IN_OUTPUT, mark))


RULES: list[LogitRule] = [
    logit_bias.RULE,
    LogitRule(
        lambda mode: mode.penalties,
        apply_penalties,
        reads_drafts=True,
        commit=lambda rows, log, live: mark_output(rows, log[:, 4:], log[:, 2]),
    ),
    LogitRule(lambda mode: mode.min_tokens, forbid_stop_ids),
    bad_words.RULE,
    no_repeat_ngram.RULE,
    LogitRule(
        lambda mode: mode.constrained,
        follow_automata,
        reads_drafts=True,
        of_drafters=True,
        masks=allowed_by_automata,
        check_drafts=lambda rows, draft_ids, draft_len: rows.constrain_drafts(draft_ids, draft_len),
        commit=lambda rows, log, live: rows.advance_automata(log, live),
        mark_undecided=undecided_by_automata,
        hold_undecided=lambda rows, live, log: rows.hold_undecided(live, log),
        leaves="its schema, regex, choice or grammar allows (or another token was drawn)",
    ),
]
"""In the order in which they are applied."""
