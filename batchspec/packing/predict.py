"""Predicted output lengths. Packing uses them to order requests and to choose the shape of the batch."""

from __future__ import annotations

from batchspec.records import ANSWERED, Completion

SHORT_TOKENS = 64
PRIOR_ROWS = 16


class LengthPredictor:
    """Predicts the output length of a row that may end before its limit (max_new_tokens), from the limit and the finished rows.

    A limit of up to 64 tokens is itself the prediction, because most such rows reach it. For larger limits the prediction is the
    mean output of finished rows with such limits, with 16 assumed rows of half the limit as a prior. Wrong predictions cost time,
    never tokens.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_tokens = 0

    def predict(self, max_new_tokens: int) -> int:
        """Tokens, between 1 and max_new_tokens."""
        if max_new_tokens <= SHORT_TOKENS:
            return max_new_tokens
        mean = (self.num_tokens + PRIOR_ROWS * max_new_tokens / 2) / (self.num_rows + PRIOR_ROWS)
        return min(max_new_tokens, max(SHORT_TOKENS + 1, round(mean)))

    def observe(self, completion: Completion) -> None:
        """Count a finished row; error rows and rows with a short cap do not count."""
        if completion.status in ANSWERED and (completion.predicted_tokens or 0) > SHORT_TOKENS:
            self.num_rows += 1
            self.num_tokens += 0 if completion.token_ids is None else len(completion.token_ids)
