"""The keys of decoding, `decode.*`: see `schema.py` for how their documentation is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchspec.config.key import ABOVE_0, ANSWERS, INT64, Column, key


@dataclass(slots=True, kw_only=True)
class RepetitionConfig:
    max_pattern_size: int = key(0, low=0, high=1024, advice="0 is off; 64 finds most loops", applies_to=ANSWERS)
    """Maximum number of tokens of a pattern whose repetition ends a completion. 0 is off: a completion may repeat itself."""
    min_pattern_size: int = key(1, low=1, high=1024, advice="1 takes single tokens too")
    """Minimum number of tokens of such a pattern. Tables and drawings repeat single tokens: a few tokens spare these."""
    min_count: int = key(10, low=2, high=1_000_000, advice="10 works well")
    """How many times in a row the pattern must occur. The completion ends with the token that completes the last of them, with
    status truncated and finish_reason repetition. resume=repetition, not resume=length, continues it."""


@dataclass(slots=True, kw_only=True)
class NoRepeatNgramConfig:
    ngram_size: int = key(
        0, low=0, high=1024, advice="0 is off; 20 to 30 suits OCR", applies_to=ANSWERS,
        column=Column("ngrams", name="no_repeat_ngram"), remarks={
            "no_repeat_ngram_size": "decode.no_repeat_ngram.ngram_size does nearly that: it counts the newest window_size tokens "
            "of the output, and not the prompt"
        },
    )
    """Number of tokens of an n-gram that does not come twice. A token that would complete an n-gram of the newest window_size
    output tokens a second time cannot be chosen. The prompt does not count. 1 forbids every token of the window, 0 is off. A row
    with a constraint that allows nothing else becomes an error row. The column no_repeat_ngram replaces this whole group for its
    row: an integer, ngram_size, or a map of these keys."""
    window_size: int = key(100, low=1, high=1_000_000, advice="100 suits OCR", applies_to=ANSWERS)
    """Number of newest output tokens in which a whole n-gram must lie to count; at least ngram_size."""
    whitelist_token_ids: list[int] = key([], example="[128821,128822]", applies_to=ANSWERS)
    """Token ids that may complete an n-gram again, such as those of the cells of a table."""


@dataclass(slots=True, kw_only=True)
class DecodeConfig:
    """Sampling and the end of a completion. A column of the input overrides some of these keys for its row."""

    max_new_tokens: int = key(
        1024, low=1, advice="give the maximum number of output tokens; decode.score=prompts decodes none", applies_to=ANSWERS,
        column=Column("integer"), requests=("max_tokens", "max_completion_tokens"), names=("max_output_tokens", "max_gen_toks"),
    )
    """Maximum number of output tokens of a completion."""
    min_new_tokens: int = key(
        0, low=0, advice="0 is off", applies_to=ANSWERS, column=Column("integer"), requests=("min_tokens",),
        names=("min_length",),
    )
    """Minimum number of output tokens, those of reasoning included. Until then no stop id is drawn, a stop string that is
    complete is part of the text, and repetition ends no completion."""
    temperature: float = key(
        0.0, low=0.0, high=100.0, advice="0 is greedy, 1 the model's own distribution", column=Column("number"),
        requests=("temperature",),
    )
    """Sampling temperature. 0 is greedy."""
    top_k: int = key(0, low=0, advice="0 is off", column=Column("integer"), requests=("top_k",))
    """Sample from the k most likely tokens only. 0 is off."""
    top_p: float = key(1.0, low=ABOVE_0, high=1.0, advice="1 is off", column=Column("number"), requests=("top_p",))
    """Sample from the smallest set of most likely tokens whose probabilities sum to this. 1 is off."""
    min_p: float = key(0.0, low=0.0, high=1.0, advice="0 is off", column=Column("number"), requests=("min_p",))
    """Sample from tokens at least this likely relative to the most likely one. 0 is off."""
    repetition_penalty: float = key(
        1.0, low=0.01, high=100.0, advice="1 is off", column=Column("number"), requests=("repetition_penalty",)
    )
    """Factor by which logits of tokens in the prompt or output are lowered: positive ones divided, negative ones multiplied. 1
    is off."""
    presence_penalty: float = key(
        0.0, low=-100.0, high=100.0, advice="0 is off", column=Column("number"), requests=("presence_penalty",)
    )
    """Amount subtracted from the logits of tokens in the output. 0 is off."""
    frequency_penalty: float = key(
        0.0, low=-100.0, high=100.0, advice="0 is off", column=Column("number"), requests=("frequency_penalty",)
    )
    """Amount subtracted from the logit of a token for each time that it is in the output (OpenAI's definition). 0 is off. Unlike
    repetition_penalty, this and presence_penalty do not count the prompt's tokens."""
    logit_bias: Any = key(
        None, form="map of token ids to numbers -100 .. 100, or null", example="{1734: -100}", column=Column("biases")
    )
    """What is added to the logits of tokens, by token id, from -100 to 100, e.g. {1734: -100, 99: 2.5}: -100 bans a token, 100
    forces it. The column logit_bias, JSON text or a map, replaces this map for its row. null is none."""
    bad_words: list[str] = key(
        [], applies_to=ANSWERS, column=Column("texts"), remarks={"bad_words_ids": "decode.bad_words takes the texts"}
    )
    """Texts that an output never completes, token by token: of each the tokens that it has at the beginning of a text and after a
    space. Other tokens may still make the same text. A row with a constraint that allows nothing else becomes an error row. The
    column bad_words replaces this list for its row."""
    seed: int = key(0, low=INT64[0], high=INT64[1], advice="give a 64-bit integer", column=Column("integer"), requests=("seed",))
    """Seed of the job, from which each row's sampling noise is derived."""
    n: int = key(
        1, low=1, high=4096, advice="1 is one completion a row", applies_to=ANSWERS, column=Column("integer"), requests=("n",),
        names=("best_of", "num_generations", "num_return_sequences"),
    )
    """Number of completions per input row. More than 1 needs a temperature above 0, from decode.temperature or from a column
    temperature, because all greedy completions of a row are equal."""
    stop: list[str] = key([], applies_to=ANSWERS, column=Column("texts"), names=("stop_sequences", "stop_strings"))
    """Strings that end a completion, and are not part of its text. They are searched for in the text of the answer, which has no
    special tokens: not in reasoning, and not in tool calls that gpt-oss makes in its commentary channel, whose arguments would be
    cut in two."""
    stop_ids: list[int] = key([], example="[2,151645]", names=("stop_token_ids", "eos_token_id"))
    """Token ids that end a completion, in addition to the model's EOS ids. Their text is not part of its text."""
    repetition_detection: RepetitionConfig = field(default_factory=RepetitionConfig)
    no_repeat_ngram: NoRepeatNgramConfig = field(default_factory=NoRepeatNgramConfig)
    schema: Any = key(
        None, form="map, JSON text, path, or null", example="{type: object}", applies_to=ANSWERS,
        column=Column("json", must_be_mapped=True), names=("guided_json", "json_schema"),
    )
    """JSON Schema that every answer must be valid by: a map, JSON text, or the path of a JSON file. The columns schema, regex,
    choice, grammar and response_format (OpenAI's) override it for their rows."""
    schema_unsupported: str = key("error", choices=("error", "check"), applies_to=ANSWERS)
    """What is done with a valid schema that has keywords which no automaton obeys, such as uniqueItems of free values. error:
    refuse it. check: ignore these keywords while decoding, and check the finished answer by the whole schema; a row whose answer
    violates it has status invalid. It holds for forced tool calls too."""
    regex: str | None = key(None, applies_to=ANSWERS, column=Column("text", must_be_mapped=True), names=("guided_regex",))
    """Regular expression, in Python's syntax, that every answer must match as a whole."""
    choice: list[str] = key(
        [], example="[positive,negative]", applies_to=ANSWERS, names=("guided_choice",),
        column=Column("texts", words="list of strings", must_be_mapped=True),
    )
    """The allowed answers: every answer is one of these texts. With decode.score=choices: the texts that are scored."""
    grammar: str | None = key(None, applies_to=ANSWERS, column=Column("text", must_be_mapped=True), names=("guided_grammar",))
    """Context-free grammar that every answer must be a text of, in Lark's syntax or in GBNF: its text, or the path of a file of
    it. The host computes the states of a recursive one when rows reach them (jobs/pages/structured.md, "Lazy automata")."""
    score: str = key("none", choices=("none", "prompts", "choices"))
    """What is scored instead of decoding an answer. prompts: the tokens of each prompt (`output.prompt_logprobs`). choices: how
    likely the model continues a prompt with each text of decode.choice, or of the column choice (the column `choice_probs`)."""
    choice_norm: str = key("none", choices=("none", "tokens"))
    """How texts of different lengths are compared with decode.score=choices. none: by their log-probabilities, which favour short
    texts. tokens: by their log-probabilities divided by their numbers of tokens (length normalisation)."""
    thinking_token_budget: int | None = key(
        None, low=0, advice="null means no limit", applies_to=ANSWERS, column=Column("integer"),
        requests=("thinking_token_budget",), names=("thinking_budget", "max_thinking_tokens"),
    )
    """Maximum number of tokens of a reasoning block, after which its end token is forced. null means no limit but
    max_new_tokens."""
    thinking_closing: str = ""
    """Text inserted before a forced end of a reasoning block, e.g. '\\nTime is up, so I answer now.\\n'."""
    deterministic: bool = False
    """Give each row the same tokens in bfloat16 too, bit for bit, in every batch and with every drafter. All sums then have an
    order that depends on the row alone, not on K, slots, preemption or restarts. It needs a GPU of the Hopper generation and
    may lower its speed; in float64 it changes nothing. Refused with draft=tree, several GPUs per model, LoRA adapters that are
    not merged, scoring, and images whose tokens attend to each other (Gemma 4, but for E2B and E4B)."""
    ignore_eos: bool = key(False, advanced=True)
    """Go on after the model's EOS ids. The stop ids and stop strings of the user still end a completion."""
