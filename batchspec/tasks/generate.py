"""The usual task: an answer to each prompt, decoded token by token."""

from __future__ import annotations

from typing import ClassVar

from batchspec.config.schema import OutputConfig, RunConfig
from batchspec.tasks.base import Reads, Task


class Generate(Task):
    """Answers of at most decode.max_new_tokens tokens; `decode`, `draft` and the constraints say how."""

    name: ClassVar = "generate"
    asked: ClassVar = "decode.score=none"
    decodes: ClassVar = True
    reads: ClassVar = Reads.NEXT_TOKENS
    reads_images: ClassVar = True
    has_answers: ClassVar = True
    counts: ClassVar = "completion tokens"
    tokens: ClassVar = "output"

    def set_defaults(self, config: RunConfig) -> None:
        """Those of the schema are its own."""

    def num_top(self, output: OutputConfig) -> int | None:
        return output.logprobs
