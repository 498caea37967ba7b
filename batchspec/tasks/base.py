"""The protocol of tasks. The base has the answers of a task that decodes nothing, reads no cells besides the prompt and writes no
columns of its own; each task overrides what is different."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from batchspec.config.decode_schema import DecodeConfig
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.key import ANSWERS
from batchspec.config.no_effect import refuse_given
from batchspec.config.schema import COMPLETE, KEYS, InputConfig, OutputConfig, RunConfig
from batchspec.errors import ConfigError
from batchspec.records import Choice, Completion, Ids
from batchspec.request_stream import RequestStream

if TYPE_CHECKING:
    from batchspec.text.thinking import ThinkTokens
    from batchspec.text.tokenizer import Tokenizer

Cells = Mapping[str, Callable[[Completion], Any]]
"""Column of the output -> its cell in the row of a completion."""


OF_EMBED = ("output.embedding_dim", "output.embedding_dtype", "output.embedding_pooling", "input.prompt_name")
"""Keys that one task reads. With task=auto they are refused once the model is known."""


class Reads(Enum):
    """What the engine reads of the model for each row; `engine/features/` has a reader for each."""

    NEXT_TOKENS = auto()
    """The token after the prompt, and more in rounds."""
    PROMPT_TOKENS = auto()
    """The log-probability of every token of the prompt, and nothing after it."""
    LABEL_SCORES = auto()
    """The scores of the model's labels, from the hidden state after the last token of the prompt."""
    TOKEN_LOGITS = auto()
    """The logits of a few tokens, the same in all rows, after the last token of the prompt."""
    LAST_STATES = auto()
    """The hidden state after the last token of the prompt."""
    MEAN_STATES = auto()
    """The mean of the hidden states after all tokens. Rows share no prefixes, whose states would not be computed again."""

    @property
    def all_logits(self) -> bool:
        """Whether logits are computed after every token of a prompt, which costs time and memory."""
        return self is Reads.PROMPT_TOKENS


class Needs(Enum):
    """What a task needs of a checkpoint after its last layer."""

    OUTPUT = "an output matrix"
    LABELS = "a score matrix (...ForSequenceClassification)"
    STATES = "hidden states"
    """Whatever follows is neither needed nor read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFiles:
    """What a checkpoint's files say about embeddings (checkpoint/sentence_transformers.py)."""

    mean: bool = False
    """Whether the mean of a text's states is its embedding; otherwise the state of the last token is."""
    normalised: bool = True
    """Whether an embedding is divided by its length."""
    prompts: tuple[tuple[str, str], ...] = ()
    """Names, and the texts that are put before a text."""
    default_prompt: str | None = None
    max_tokens: int | None = None
    """A longer prompt is cut; None: at the model's own limit."""
    text_tokens: int | None = None
    """Where they do not say `max_tokens`: at how many tokens the tokenizer cuts a text; None: it cuts none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTexts:
    """Text columns from which a task makes a row's prompt. They replace a column of prompts."""

    main: str
    """The one that may be cut, and whose absence is that of the prompt."""
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.needed, self.main, *self.optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A prompt whose text is tokenised between given tokens. If it is too long, it loses the end of the text
    (input.on_overlong=truncate)."""

    before: tuple[int, ...]
    head: str
    """The beginning of the text, which is never cut."""
    rest: str
    after: tuple[int, ...]
    called: tuple[str, str]
    """What the user calls the beginning, in the plural, and the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What tasks know of a model."""

    hidden_size: int
    labels: tuple[str, ...] = ()
    """Names of what its score matrix scores; (): it has none."""
    pad_ids: tuple[int, ...] = ()
    """Its padding token, if config.json names one."""
    embedding: EmbeddingFiles = EmbeddingFiles()
    token_ids: tuple[int, ...] = ()
    """The tokens whose logits are read (`Reads.TOKEN_LOGITS`)."""


class Runs(Protocol):
    """An engine, in this process or of several ranks."""

    def steps(self, requests: RequestStream) -> Generator[list[Completion]]:
        """Compute every request; yields what has ended in each step. That is often nothing, also in a step that found no request
        to compute: the caller then has what else became of the rows that were read, such as error rows. The last step comes after
        the end of the requests."""


class TaskRows:
    """What a task reads of each row of one job, besides the prompt. It can be pickled, as `Admission` is."""

    cuts_end: ClassVar[bool] = False
    """Whether a prompt that is too long is cut at its end, without a word; otherwise input.on_overlong says what is done."""
    limit: tuple[int, str] | None = None
    """Most tokens of a row, if the model allows more, and who says so, for the user; None: the model does."""

    def choices(self, row: Mapping[str, Any]) -> tuple[Choice, ...]:
        """The texts that are to be scored after the row's prompt. Raises BadRow."""
        return ()

    def prompt(self, cell: Any, row: Mapping[str, Any]) -> Any:
        """The prompt that is encoded, made of the row's own, `cell`, and its other cells. Raises BadRow."""
        return cell

    def room(self, choices: tuple[Choice, ...], max_new_tokens: int) -> tuple[int, str]:
        """Number of tokens that a row of model.max_len must have left after its prompt, and what they are, for messages."""
        return max_new_tokens, f"max_new_tokens={max_new_tokens}"

    def ids(self, prompt_ids: Ids) -> Ids:
        """The tokens of an encoded prompt that are computed. Raises BadRow for a prompt that the task cannot use."""
        return prompt_ids


def is_text(config: RunConfig, mapped: frozenset[str]) -> bool:
    """Whether prompts are text, and neither chats nor ids. mapped: as in `Task.rows`"""
    return ("prompt" in mapped or config.input.prompt is not None) and not config.input.chat and "messages" not in mapped


def check_text_end(config: RunConfig, mapped: frozenset[str], tokenizer: Tokenizer | None, asked: str) -> None:
    """Raises ConfigError if prompts are text whose end may have other tokens than tokenizer.json gives it. asked: of the task"""
    if is_text(config, mapped) and tokenizer is not None and (problem := tokenizer.end_problem):
        raise ConfigError(
            f"{asked} reads the end of texts, and {problem}; have tokenizer.json give the same ids and remove that key, or "
            "give prompt_ids"
        )


class Task:
    """What a job does to each row: one object for all jobs, but for what it knows of a model (`of_model`). What it knows of a
    job's rows is in `TaskRows`."""

    name: ClassVar[str]
    asked: ClassVar[str]
    """The key that asks for it, as the user writes it, for messages."""
    decodes: ClassVar[bool] = False
    """Whether rows have output tokens, from rounds. If not, a row ends with its prefill and needs no pages for more."""
    reads: ClassVar[Reads]
    reads_images: ClassVar[bool] = False
    """Whether prompts may have images."""
    has_answers: ClassVar[bool] = False
    """Whether the column `completion` has a text, which later jobs and exports can use."""
    what: ClassVar[str] = ""
    """What is done instead of decoding, as a sentence without its full stop."""
    written: ClassVar[str] = ""
    """What a row has in place of output tokens, for messages."""
    counts: ClassVar[str] = "prefill tokens"
    """The tokens by which the speed of a run is told."""
    prompts: ClassVar[str] = "prompts     "
    """The prompts, in the line of `plan` about their lengths."""
    tokens: ClassVar[str] = "prompt"
    """The kind of `counts`, in the line of `plan` about times."""
    needs: ClassVar[Needs] = Needs.OUTPUT
    whole_chats: ClassVar[bool] = False
    """Whether a chat is read as it is, to the end of its last turn, unless the user asked for something else."""
    columns: ClassVar[frozenset[str]] = frozenset()
    """Columns of the output that only this task writes."""
    score_column: ClassVar[str] = ""
    """The one of them by which answers can be compared; empty: none."""
    tallies: ClassVar[bool] = False
    """Whether statistics show the mean and the spread of this column: numbers, or lists of labels with numbers."""
    tokens_compared: ClassVar[tuple[str, ...]] = ()
    """The tokens whose logits it reads (`Reads.TOKEN_LOGITS`)."""
    keys_read: ClassVar[frozenset[str]] = frozenset()
    """Keys of answers that it reads, although it may decode none."""
    texts: ClassVar[PromptTexts | None] = None
    """The columns that are the prompt of a row; None: one column is, or input.prompt makes it."""
    cells_read: ClassVar[frozenset[str]] = frozenset()
    """Options of rows that it reads, although they are for answers; columns of lists of strings."""

    @property
    def cells(self) -> Cells:
        """How the cells of its columns are made, unless they are the completion's field of that name."""
        return {}

    def of_model(self, config: RunConfig, model: ModelFacts) -> Task:
        """The task of a job with this model. Raises ConfigError for a key that does not fit the model."""
        return self

    def reads_of(self, output: OutputConfig) -> Reads:
        """What it reads in a job with these keys."""
        return self.reads

    def set_defaults(self, config: RunConfig) -> None:
        """Change keys of a composed configuration that the user left as they are. If any key of the drafter was set, the user
        asked for a drafter: it stays, and `check` refuses it."""
        if config.draft == RunConfig().draft:
            config.draft = DraftConfig(name="none")

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError for keys that the task leaves without effect, or that it does not support."""
        if config.task != "auto" and config.decode.score != "none":
            raise ConfigError(
                f"task={config.task} beside decode.score={config.decode.score}: each says what is done to a row; remove one"
            )
        self._refuse_keys_of_others(config)
        if self.decodes:
            why = "is for jobs that decode no answer; choose continue or drop, or remove the key"
            if config.input.final_assistant == COMPLETE:
                raise ConfigError(f"input.final_assistant={COMPLETE} {why}")
            return
        why = f"with {self.asked} has no effect: no token is decoded"
        refuse_given(config, ["decode.deterministic"], f"with {self.asked} is not supported; remove one")
        refuse_given(config, ["output.logprobs"], f"{why}; prompts have output.prompt_logprobs; remove it")
        of_answers = [name for name, declared in KEYS.items() if ANSWERS in declared.applies_to]
        refuse_given(config, [name for name in of_answers if name not in self.keys_read], f"{why}; remove it")
        if config.draft.name != "none":
            raise ConfigError(f"draft={config.draft.name} with {self.asked} drafts nothing; remove the keys of draft")

    def check_embedding(self, config: RunConfig) -> None:
        """Raises ConfigError for a key of embeddings that it does not read. With task=auto it is called once the model is
        known."""
        asked = f"task={self.name}" if config.decode.score == "none" else self.asked
        keys = [name for name in OF_EMBED if name not in self.keys_read]
        refuse_given(config, keys, f"with {asked} has no effect: task=embed alone reads it; remove the key")

    def check_room(self, config: RunConfig) -> None:
        """Raises ConfigError if model.max_len leaves no room for a prompt. Called as `check_embedding`."""
        limit, max_len = self.output_limit(config.decode), config.model.max_len
        if max_len is not None and limit >= max_len:
            said = f"decode.max_new_tokens={limit} leaves no room for a prompt in model.max_len={max_len}"
            raise ConfigError(f"{said}; lower it or raise model.max_len")

    def _refuse_keys_of_others(self, config: RunConfig) -> None:
        if "output.prompt_logprobs" not in self.keys_read:
            refuse_given(
                config, ["output.prompt_logprobs"],
                f"with {self.asked} is not supported: prompts are scored by a job of their own; set decode.score=prompts or "
                "remove it",
            )
        if config.task != "auto" or config.decode.score != "none":
            self.check_embedding(config)
        if "decode.choice_norm" not in self.keys_read:
            refuse_given(
                config, ["decode.choice_norm"],
                f"with {self.asked} has no effect: no choices are scored; set decode.score=choices or remove it",
            )

    def with_chats(self, input: InputConfig) -> InputConfig:
        """The keys of `input`, with what the task does with chats that end with an assistant turn."""
        if not self.whole_chats or input.final_assistant != InputConfig().final_assistant:
            return input
        return replace(input, final_assistant=COMPLETE)

    def output_limit(self, decode: DecodeConfig) -> int:
        """Maximum number of output tokens of a completion; 0 where nothing is decoded."""
        return decode.max_new_tokens if self.decodes else 0

    def num_top(self, output: OutputConfig) -> int | None:
        """Number of likeliest tokens whose log-probabilities are read besides each token's own; None: no log-probability is
        read."""
        return None

    def writes(self, output: OutputConfig) -> frozenset[str]:
        """Those of its columns that a job with these keys writes."""
        return self.columns

    def rows(
        self, config: RunConfig, mapped: frozenset[str], tokenizer: Tokenizer | None, think: ThinkTokens | None
    ) -> TaskRows:
        """What it reads of the rows of a job. mapped: the options for which the input has a column. Raises ConfigError."""
        return TaskRows()

    def identity(self, config: RunConfig) -> dict[str, Any]:
        """What decides its results, besides what decides those of all tasks: keys, and content of files."""
        return {}

    def steps(self, engine: Runs, requests: RequestStream) -> Generator[list[Completion]]:
        """Compute the requests of a job, which an engine may be given in another form. As `Runs.steps`."""
        return engine.steps(requests)

    @property
    def dim(self) -> int:
        """Number of values of an embedding that a row gets; 0: none, or the model is not known yet."""
        return 0

    def note(self) -> str:
        """What a job that took it by task=auto writes, for the user."""
        return ""

    def about(self, decode: Mapping[str, Any]) -> str:
        """What reports say of it in place of how tokens are drawn. decode: the keys of a job's manifest."""
        return f"none: {self.what}"
