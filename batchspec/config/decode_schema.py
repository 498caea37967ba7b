"""The keys of decoding, `decode.*`: see `schema.py` for how their documentation is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class RepetitionConfig:
    max_pattern_size: int = 0
    """Maximum number of tokens of a pattern whose repetition ends a completion. 0 is off: a completion may repeat itself."""
    min_pattern_size: int = 1
    """Minimum number of tokens of such a pattern. Tables and drawings repeat single tokens: a few tokens spare these."""
    min_count: int = 10
    """How many times in a row the pattern must occur. The completion ends with the token that completes the last of them, with
    status truncated and finish_reason repetition. resume=repetition, not resume=length, continues it."""


@dataclass(slots=True, kw_only=True)
class DecodeConfig:
    """Sampling and the end of a completion. A column of the input overrides some of these keys for its row."""

    max_new_tokens: int = 1024
    """Maximum number of output tokens of a completion."""
    min_new_tokens: int = 0
    """Minimum number of output tokens, those of reasoning included. Until then no stop id is drawn, a stop string that is
    complete is part of the text, and repetition ends no completion."""
    temperature: float = 0.0
    """Sampling temperature. 0 is greedy."""
    top_k: int = 0
    """Sample from the k most likely tokens only. 0 is off."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities sum to this. 1 is off."""
    min_p: float = 0.0
    """Sample from tokens at least this likely relative to the most likely one. 0 is off."""
    repetition_penalty: float = 1.0
    """Factor by which logits of tokens in the prompt or output are lowered: positive ones divided, negative ones multiplied. 1
    is off."""
    presence_penalty: float = 0.0
    """Amount subtracted from the logits of tokens in the output. 0 is off."""
    frequency_penalty: float = 0.0
    """Amount subtracted from the logit of a token for each time that it is in the output (OpenAI's definition). 0 is off. Unlike
    repetition_penalty, this and presence_penalty do not count the prompt's tokens."""
    logit_bias: Any = None
    """What is added to the logits of tokens, by token id, from -100 to 100, e.g. {1734: -100, 99: 2.5}: -100 bans a token, 100
    forces it. The column logit_bias, JSON text or a map, replaces this map for its row. null is none."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that an output never completes, token by token: of each the tokens that it has at the beginning of a text and after a
    space. Other tokens may still make the same text. A row with a constraint that allows nothing else becomes an error row. The
    column bad_words replaces this list for its row."""
    seed: int = 0
    """Seed of the job, from which each row's sampling noise is derived."""
    n: int = 1
    """Number of completions per input row. More than 1 needs a temperature above 0, from decode.temperature or from a column
    temperature, because all greedy completions of a row are equal."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a completion, and are not part of its text. They are searched for in the text of the answer, which has no
    special tokens: not in reasoning, and not in tool calls that gpt-oss makes in its commentary channel, whose arguments would be
    cut in two."""
    stop_ids: list[int] = field(default_factory=list)
    """Token ids that end a completion, in addition to the model's EOS ids. Their text is not part of its text."""
    repetition_detection: RepetitionConfig = field(default_factory=RepetitionConfig)
    schema: Any = None
    """JSON Schema that every answer must be valid by: a map, JSON text, or the path of a JSON file. The columns schema, regex,
    choice, grammar and response_format (OpenAI's) override it for their rows."""
    schema_unsupported: str = "error"
    """What is done with a valid schema that has keywords which no automaton obeys, such as uniqueItems of free values. error:
    refuse it. check: ignore these keywords while decoding, and check the finished answer by the whole schema; a row whose answer
    violates it has status invalid. It holds for forced tool calls too."""
    regex: str | None = None
    """Regular expression, in Python's syntax, that every answer must match as a whole."""
    choice: list[str] = field(default_factory=list)
    """The allowed answers: every answer is one of these texts. With decode.score=choices: the texts that are scored."""
    grammar: str | None = None
    """Context-free grammar that every answer must be a text of, in Lark's syntax or in GBNF: its text, or the path of a file of
    it. The host computes the states of a recursive one when rows reach them (jobs/pages/structured.md, "Lazy automata")."""
    score: str = "none"
    """What is scored instead of decoding an answer. prompts: the tokens of each prompt (`output.prompt_logprobs`). choices: how
    likely the model continues a prompt with each text of decode.choice, or of the column choice (the column `choice_probs`)."""
    choice_norm: str = "none"
    """How texts of different lengths are compared with decode.score=choices. none: by their log-probabilities, which favour short
    texts. tokens: by their log-probabilities divided by their numbers of tokens (length normalisation)."""
    thinking_token_budget: int | None = None
    """Maximum number of tokens of a reasoning block, after which its end token is forced. null means no limit but
    max_new_tokens."""
    thinking_closing: str = ""
    """Text inserted before a forced end of a reasoning block, e.g. '\\nTime is up, so I answer now.\\n'."""
    deterministic: bool = False
    """Give each row the same tokens in bfloat16 too, bit for bit, in every batch and with every drafter. All sums then have an
    order that depends on the row alone, not on K, slots, preemption or restarts. It needs a GPU of the Hopper generation and
    may lower its speed; in float64 it changes nothing. Refused with draft=tree, several GPUs per model, LoRA adapters that are
    not merged, and scoring."""
    ignore_eos: bool = False
    """Go on after the model's EOS ids. The stop ids and stop strings of the user still end a completion."""

    @property
    def output_limit(self) -> int:
        """Maximum number of output tokens of a completion; 0 where nothing is decoded (`score`)."""
        return self.max_new_tokens if self.score == "none" else 0
