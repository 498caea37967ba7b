"""Whether the rules of a row with a constraint leave any token: if not, the row has failed for good, whatever the model says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchspec.batch.logits import RULES
from batchspec.records import Ids, Request, RowError

NO_TOKEN_LEFT = "no_token_left"


def no_token_left(request: Request, tokens: Sequence[int], mask: Ids, *, only_ends: bool) -> RowError | None:
    """The error of a request that may write no token after its output `tokens`; None if it may write one.

    mask       int32 [W], as in `TokenAutomaton`: the tokens that its automaton allows there
    only_ends  whether its text can only end there: stop ids then come before min_new_tokens too
    """
    left, kind = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool), request.constraint_kind or "constraint"
    num_allowed = int(left.sum())
    early = len(tokens) < request.min_new_tokens and not only_ends
    if early:
        left[list(request.stop_ids)] = False
    num_not_yet = num_allowed - int(left.sum())
    reasons = []
    for rule in RULES:
        num_before = int(left.sum())
        for token in () if rule.forbids is None else rule.forbids(request, tokens):
            left[token] = False
        if num_forbidden := num_before - int(left.sum()):
            reasons.append(f"{rule.name} forbid {num_forbidden:,}")
    if left.any():
        return None
    reasons += [f"{num_not_yet:,} would end the row before min_new_tokens={request.min_new_tokens}"] if num_not_yet else []
    message = (
        f"{kind}: no token is left for output token {len(tokens) + 1}: of {num_allowed:,} that the {kind} allows there "
        f"{' and '.join(reasons) or 'the vocabulary has none'}; change one of these, or drop the row"
    )
    return RowError(code=NO_TOKEN_LEFT, stage="decode", message=message, retryable=False)
