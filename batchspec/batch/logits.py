"""All rules that mask or bias logits before a choice: one list for the target and, if a rule says so, for drafters.

A new rule is one `LogitRule` in RULES, a flag of `SamplingMode` that asks for it, and the state that it needs in `DeviceBatch`.
Rounds name no rule: they call the functions below, which apply what the rows' mode asks for. Legend: T rows of logits, R batch
rows, V vocabulary, K draft_len.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.batch.bad_words import PROMPT, forbid_completions
from batchspec.batch.device_batch import ONCE_IN_OUTPUT, SEEN, DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.records import MAX_BAD_WORD


@dataclass(frozen=True, slots=True, eq=False)
class LogitRows:
    """Which batch row and position each of T rows of logits belongs to.

    row_ids      int32 [T]
    positions    int64 [T] position of the token being drawn
    drafts       int32 [., K] draft tokens; None if nothing was drafted before the position, or no rule needs them
    num_drafted  int64 [T] how many of `drafts` come before the position; arbitrary for dead rows and padding
    draft_rows   int32 or int64 [T] row of `drafts`, for a tree one per node; None: that of `row_ids`
    tokens       the tokens whose logits these are, on a rank that has a part of the vocabulary; None: all tokens

    Tokens before the drafts are committed: rules find them, and values computed from them, in `DeviceBatch`.
    """

    row_ids: Tensor
    positions: Tensor
    drafts: Tensor | None = None
    num_drafted: Tensor | None = None
    draft_rows: Tensor | None = None
    tokens: slice | None = None

    def drafts_before(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Draft by draft, in order: its token for each of T rows, int64 [T], and whether it precedes the position, bool [T]."""
        if self.drafts is None or self.num_drafted is None:
            return
        draft_rows = self.row_ids if self.draft_rows is None else self.draft_rows
        for j in range(self.drafts.shape[1]):
            yield self.drafts[:, j][draft_rows].long(), self.num_drafted > j


@dataclass(frozen=True, slots=True)
class LogitRule:
    """One way to change logits [T, V] in place, and what else keeps to it in a round."""

    wanted: Callable[[SamplingMode], bool]
    """Whether some row of the pass needs it; otherwise nothing is launched."""
    apply: Callable[[Tensor, LogitRows, DeviceBatch, Tensor | None], None]
    """Arguments: logits, their rows, the batch, and the token of each column int [V], None for the target: the column's index."""
    reads_drafts: bool = False
    """Whether it needs `LogitRows.drafts`, because tokens drafted before the position count. A draft may be a forbidden token."""
    of_drafters: bool = False
    """Whether drafters with logits follow it too: they propose no token that it forbids, as long as they have another one."""
    masks: Callable[[LogitRows, DeviceBatch], tuple[Tensor, Tensor]] | None = None
    """All masks, and the row int32 [T] of each position's mask: for a rule that does nothing but mask."""
    check_drafts: Callable[[DeviceBatch, Tensor, Tensor], None] | None = None
    """Changes draft_ids int32 [R, K] and draft_len int32 [R] of a drafter without logits to what the rule allows."""
    commit: Callable[[DeviceBatch, Tensor, Tensor], None] | None = None
    """Brings the rows' state up to date with the tokens of a log int32 [R, L], as of `accept`; live int32 [R] is 0 for rows
    that ended with them. It may fail a row: it changes both."""
    mark_undecided: Callable[[Tensor, LogitRows, DeviceBatch], None] | None = None
    """Replaces choices int32 [T] by UNDECIDED where the device lacks what the rule needs for them (`SamplingMode.may_hold`)."""
    hold_undecided: Callable[[DeviceBatch, Tensor, Tensor], None] | None = None
    """Holds rows that lack it after their newest token: live int32 [R] becomes 0, and `finish` in the log HELD."""
    leaves: str = ""
    """Which tokens it leaves, as the end of "a token that ...": for the error of a row without any. Empty: it leaves some."""


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


def add_bias(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Add the row's bias to the logits of its biased tokens, in place."""
    ids, bias = rows.bias_ids[at.row_ids].long(), rows.bias[at.row_ids].to(logits.dtype)
    biased = logits if map_ids is None else logits.new_zeros((len(ids), rows.vocab_size))
    if at.tokens is not None:
        ids = ids - at.tokens.start
    inside = (ids >= 0) & (ids < biased.shape[1])
    # Unused entries add 0, each to a different token: hundreds of atomic additions to one address would run one after another.
    spread = torch.arange(ids.shape[1], device=ids.device) % biased.shape[1]
    biased.scatter_add_(1, torch.where(inside, ids, spread), torch.where(inside, bias, 0))
    if map_ids is not None:
        logits.add_(biased[:, map_ids.long()])


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


def forbid_bad_words(logits: Tensor, at: LogitRows, rows: DeviceBatch, map_ids: Tensor | None = None) -> None:
    """Tokens that would complete one of the row's bad words get -inf, in place."""
    assert map_ids is None, "bad words are the target's alone"
    first_id = 0 if at.tokens is None else at.tokens.start
    forbid_completions(logits, rows.bad_words[at.row_ids], newest_output(at, rows, MAX_BAD_WORD - 1), first_id)


def newest_output(at: LogitRows, rows: DeviceBatch, count: int) -> Tensor:
    """int32 [T, count] output tokens and drafts before each position, the newest last; PROMPT for those of the prompt or before
    it."""
    back = torch.arange(count, 0, -1, device=at.positions.device)
    places = at.positions.unsqueeze(1) - back
    row_ids = at.row_ids.long().unsqueeze(1)
    found = rows.tokens[row_ids, places.clamp(0, rows.tokens.shape[1] - 1)]
    if at.drafts is not None and at.num_drafted is not None and at.drafts.shape[1]:
        drafted = at.num_drafted.unsqueeze(1) - back  # the place among the drafts; negative: committed
        draft_rows = row_ids if at.draft_rows is None else at.draft_rows.long().unsqueeze(1)
        found = torch.where(drafted >= 0, at.drafts[draft_rows, drafted.clamp(0, at.drafts.shape[1] - 1)], found)
    return torch.where(places >= rows.prompt_len.long()[row_ids], found, PROMPT)


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
    LogitRule(lambda mode: mode.biased, add_bias, of_drafters=True),
    LogitRule(
        lambda mode: mode.penalties,
        apply_penalties,
        reads_drafts=True,
        commit=lambda rows, log, live: mark_output(rows, log[:, 4:], log[:, 2]),
    ),
    LogitRule(lambda mode: mode.min_tokens, forbid_stop_ids),
    LogitRule(lambda mode: mode.bad_words, forbid_bad_words, reads_drafts=True, leaves="its bad_words do not forbid"),
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
