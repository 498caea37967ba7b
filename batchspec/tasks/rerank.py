"""task=rerank: how well a document answers a query, as Qwen3-Reranker judges it.

The model reads instruction, query and document in a template, and the score is P(yes) / (P(yes) + P(no)) for the token after the
prompt: softmax over these two logits. The parts of the template are tokenised by themselves. Any language model whose tokenizer
has the template's tokens can be given to this task; task=rerank is the user's word that the model was trained for it.
Source: the model card of Qwen/Qwen3-Reranker-0.6B, section Transformers Usage (format_instruction, process_inputs,
compute_logits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from batchspec.config.key import CHATS
from batchspec.config.no_effect import refuse_given
from batchspec.config.schema import KEYS, RunConfig
from batchspec.errors import BadRow, ConfigError
from batchspec.records import Completion
from batchspec.tasks.base import Cells, ModelFacts, Parts, PromptTexts, Reads, Task, TaskRows

if TYPE_CHECKING:
    from batchspec.text.thinking import ThinkTokens
    from batchspec.text.tokenizer import Tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Tokens of the template."""
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Of rows without one."""
HEAD = "<Instruct>: {}\n<Query>: {}\n<Document>: "


class PairRows(TaskRows):
    """Query and document in the template, whose tokens are made once.

    Raises ConfigError for a tokenizer that splits the template's marks, or adds tokens to a text: the template has no place for
    them.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise ConfigError("task=rerank needs a tokenizer, and the model folder has none")
        if split := [mark for mark in MARKS if mark not in tokenizer.added_ids]:
            raise ConfigError(f"task=rerank writes Qwen3-Reranker's template, and {split[0]} is no token of this tokenizer")
        if tokenizer.encode("a") != tokenizer.encode_part("a"):
            raise ConfigError("task=rerank is not supported with this tokenizer, which adds tokens of its own to each text")
        self._before, self._after = (tuple(tokenizer.encode_part(text)) for text in (BEFORE, AFTER))

    def prompt(self, cell: Any, row: Mapping[str, Any]) -> Parts:
        query, instruction = row.get("query"), row.get("instruction")
        if not query:
            raise BadRow("null_prompt" if query is None else "empty_prompt", "the query is null or empty; drop the row")
        head = HEAD.format(INSTRUCTION if instruction is None else instruction, query)
        called = ("the instruction and the query", "the document")
        return Parts(before=self._before, head=head, rest=cell, after=self._after, called=called)


@dataclass(frozen=True)
class Rerank(Task):
    """Column score: float32, from 0 to 1. Rows with one instruction and query share the pages of these."""

    name: ClassVar = "rerank"
    asked: ClassVar = "task=rerank"
    reads: ClassVar = Reads.TOKEN_LOGITS
    what: ClassVar = "documents are scored"
    written: ClassVar = "scores"
    columns: ClassVar = frozenset({"score"})
    score_column: ClassVar = "score"
    tallies: ClassVar = True
    tokens_compared: ClassVar = ("no", "yes")
    texts: ClassVar = PromptTexts(main="document", needed=("query",), optional=("instruction",))

    token_ids: tuple[int, ...] = ()
    """As in `ModelFacts`: those of `no` and `yes`."""

    @property
    def cells(self) -> Cells:
        return {"score": _score}

    def check(self, config: RunConfig) -> None:
        super().check(config)
        of_chats = [name for name, declared in KEYS.items() if CHATS in declared.applies_to]
        why = f"with {self.asked} has no effect: the template of the query and the document is the task's own; remove it"
        refuse_given(config, ["input.prompt", "input.chat", *of_chats], why)

    def of_model(self, config: RunConfig, model: ModelFacts) -> Task:
        return Rerank(model.token_ids)

    def rows(
        self, config: RunConfig, mapped: frozenset[str], tokenizer: Tokenizer | None, think: ThinkTokens | None
    ) -> TaskRows:
        return PairRows(tokenizer)

    def identity(self, config: RunConfig) -> dict[str, Any]:
        return {"task": self.name, "template": [BEFORE, HEAD, AFTER, INSTRUCTION], "token_ids": list(self.token_ids)}


def _score(completion: Completion) -> float | None:
    """P(yes) / (P(yes) + P(no))."""
    values = completion.state_values
    if values is None:
        return None
    no, yes = values.astype(np.float64)
    return float(1 / (1 + np.exp(np.clip(no - yes, -700, 700))))
