"""task=embed: a vector of each text, from the hidden states of its tokens (`...Model`, and models with an output matrix too).

The state of the last token, or the mean of all states, is cut to its first output.embedding_dim values (Matryoshka embeddings).
If the checkpoint's modules end with Normalize (checkpoint/sentence_transformers.py), it is divided by its length, and so are the
first values alone: as SentenceTransformer.encode gives them with truncate_dim and normalize_embeddings=True. Without the latter
it cuts vectors of length 1 and leaves them shorter, so that products of two are no cosines; the direction is the same.
Sources: Kusupati et al. 2022, arXiv 2205.13147; sentence-transformers 6.2, sentence_transformer/model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from batchspec.config.key import value_of
from batchspec.config.schema import OutputConfig, RunConfig
from batchspec.errors import BadRow, ConfigError
from batchspec.records import Completion
from batchspec.tasks.base import OF_EMBED, Cells, ModelFacts, Needs, Reads, Task, TaskRows, check_text_end, is_text

if TYPE_CHECKING:
    from batchspec.text.thinking import ThinkTokens
    from batchspec.text.tokenizer import Tokenizer

MEAN = "mean"
"""Value of output.embedding_pooling; `auto` is replaced when the model is known (`auto.py`)."""


class TextRows(TaskRows):
    """Texts with the checkpoint's prompt before them, cut at their end if they are too long."""

    cuts_end = True

    def __init__(self, prompt: str, asked: str | None, max_tokens: int | None) -> None:
        """asked: input.prompt_name, if the prompt is not the checkpoint's default; max_tokens: of the tokenizer"""
        self._prompt, self._asked = prompt, asked
        if max_tokens is not None:
            self.limit = max_tokens, "model_max_length of tokenizer_config.json"

    def prompt(self, cell: Any, row: Mapping[str, Any]) -> Any:
        """Text after the prompt, without the blanks at both ends, which sentence-transformers drops too; chats and ids, which
        have no prompt, as they are. Raises BadRow for these if one was asked for."""
        if isinstance(cell, str):
            return f"{self._prompt}{cell}".strip()
        if self._asked is not None:
            said = f"input.prompt_name={self._asked} is for prompts that are text, and this one is not; remove the key"
            raise BadRow("bad_parameter", said)
        return cell


@dataclass(frozen=True)
class Embed(Task):
    """Column embedding: float32 or float16, as many for each row as the model or output.embedding_dim says."""

    name: ClassVar = "embed"
    asked: ClassVar = "task=embed"
    reads: ClassVar = Reads.LAST_STATES
    needs: ClassVar = Needs.STATES
    what: ClassVar = "texts are embedded"
    written: ClassVar = "embeddings"
    whole_chats: ClassVar = True
    columns: ClassVar = frozenset({"embedding"})
    keys_read: ClassVar = frozenset(OF_EMBED)

    model: ModelFacts | None = None
    """None: the model is not known yet."""
    output: OutputConfig | None = None

    @property
    def cells(self) -> Cells:
        return {"embedding": self._embedding}

    @property
    def dim(self) -> int:
        if self.model is None or self.output is None:
            return 0
        return self.output.embedding_dim or self.model.hidden_size

    def check(self, config: RunConfig) -> None:
        super().check(config)
        why = f"keeps the end of a prompt, and {self.asked} cuts what is too long at its end; choose skip or remove the key"
        if config.input.on_overlong == "truncate":
            raise ConfigError(f"input.on_overlong=truncate {why}")

    def of_model(self, config: RunConfig, model: ModelFacts) -> Task:
        if (dim := config.output.embedding_dim) is not None and dim > model.hidden_size:
            raise ConfigError(f"output.embedding_dim={dim} exceeds the model's {model.hidden_size}; lower it or remove the key")
        if config.output.embedding_dtype == "float16" and not model.embedding.normalised:
            raise ConfigError(
                "output.embedding_dtype=float16 is for normalised embeddings, and those of this checkpoint are not: large values "
                "would be infinite; remove the key"
            )
        return Embed(model, config.output)

    def reads_of(self, output: OutputConfig) -> Reads:
        return Reads.MEAN_STATES if output.embedding_pooling == MEAN else Reads.LAST_STATES

    def rows(
        self, config: RunConfig, mapped: frozenset[str], tokenizer: Tokenizer | None, think: ThinkTokens | None
    ) -> TaskRows:
        assert self.model is not None
        check_text_end(config, mapped, tokenizer, self.asked)
        prompts, asked = dict(self.model.embedding.prompts), config.input.prompt_name
        name = (self.model.embedding.default_prompt if asked is None else asked) or None
        if name is not None and name not in prompts:
            known = f"it has {', '.join(prompts)}" if prompts else "it has none"
            raise ConfigError(
                f"input.prompt_name={name} is no prompt of the checkpoint (config_sentence_transformers.json): {known}; correct "
                "or remove the key"
            )
        # Given ids and chats are computed whole: the tokenizer cuts neither.
        max_tokens = self.model.embedding.text_tokens if config.model.max_len is None and is_text(config, mapped) else None
        return TextRows("" if name is None else prompts[name], asked or None, max_tokens)

    def identity(self, config: RunConfig) -> dict[str, Any]:
        assert self.model is not None
        keys = {key: value_of(config, key) for key in OF_EMBED}
        facts = asdict(self.model.embedding)
        del facts["text_tokens"]  # a part of the job's model.max_len, where it counts
        return {"task": self.name, "model.embedding": facts, **keys}

    def note(self) -> str:
        assert self.model is not None
        assert self.output is not None
        of = "the mean of all states" if self.output.embedding_pooling == MEAN else "the last token's state"
        return f"the column embedding has {self.dim:,} values of {of}{', normalised' * self.model.embedding.normalised}"

    def _embedding(self, completion: Completion) -> NDArray[np.floating[Any]] | None:
        """The vector, computed in fp32."""
        values = completion.state_values
        if values is None:
            return None
        assert self.model is not None
        assert self.output is not None
        values = values[: self.dim]
        if self.model.embedding.normalised:
            values = values / max(float(np.linalg.norm(values)), 1e-12)  # the least length is that of torch's normalize
        return values.astype(self.output.embedding_dtype)
