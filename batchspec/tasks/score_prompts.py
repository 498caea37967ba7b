"""decode.score=prompts: the log-probability of every token of each prompt, and of the likeliest tokens at its place."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from batchspec.config.schema import OutputConfig, RunConfig
from batchspec.records import Completion
from batchspec.tasks.base import Cells, Reads, Task


def logprob_sum(completion: Completion) -> float | None:
    """Natural log of the probability of a scored prompt after its first token, added in fp64; None if it was not scored."""
    values = completion.prompt_logprobs
    return None if values is None else float(values[1:].sum(dtype=np.float64))


class ScorePrompts(Task):
    """Columns prompt_logprobs, prompt_logprob_sum and, of output.prompt_logprobs=N likeliest tokens, prompt_top_logprobs."""

    name: ClassVar = "score_prompts"
    asked: ClassVar = "decode.score=prompts"
    reads: ClassVar = Reads.PROMPT_TOKENS
    what: ClassVar = "prompts are scored"
    written: ClassVar = "scores"
    columns: ClassVar = frozenset({"prompt_logprob_sum", "prompt_logprobs", "prompt_top_logprobs"})
    score_column: ClassVar = "prompt_logprob_sum"
    keys_read: ClassVar = frozenset({"output.prompt_logprobs"})

    @property
    def cells(self) -> Cells:
        return {"prompt_logprob_sum": logprob_sum}

    def set_defaults(self, config: RunConfig) -> None:
        super().set_defaults(config)
        config.output.prompt_logprobs = config.output.prompt_logprobs or 0

    def writes(self, output: OutputConfig) -> frozenset[str]:
        return self.columns if output.prompt_logprobs else self.columns - {"prompt_top_logprobs"}

    def num_top(self, output: OutputConfig) -> int | None:
        return output.prompt_logprobs or 0
