"""The keys of `batchspec train` with their units, and what is refused before anything is read."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from batchspec.config.schema import DraftConfig, ModelConfig
from batchspec.config.values import check_choices, check_credentials, check_given, check_ranges, check_saved, value_of
from batchspec.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class CompletionsConfig:
    path: Any = None
    """Output folder of a job, a glob, or a list of them: Parquet with prompt_ids and token_ids. Required."""
    limit: int | None = None
    """Take the first N completions only."""


@dataclass(slots=True, kw_only=True)
class HeadOutputConfig:
    dir: str | None = None
    """Folder of the head, on this machine. Required."""
    layout: str = "flat"
    """flat (SafeAILab, SpecForge, SGLang, vLLM) or speculators (vLLM)."""
    overwrite: bool = False
    """Delete the head that an earlier training has left there and start anew."""


@dataclass(slots=True, kw_only=True)
class TrainConfig:
    draft_vocab: int = 32000
    """Tokens that the head can draft: the most frequent ones of the completions, at most the target's vocabulary."""
    aux_layer_ids: list[int] | None = None
    """Boundaries of the target's residual stream that it reads, i is what enters layer i; null: 2, the middle, last but 2."""
    layers: int | None = None
    """Layers of the head: more draft better, and a chain pays for them at each draft token; null: 1, or those of draft.path,
    which gets the ones that it lacks."""
    inner: int | None = None
    """Width inside the MLP of its layers; null: the target's."""
    mask_token: int | None = None
    """draft=parallel: id of the token that stands for those not known yet; null: the highest one that no row holds."""
    prompts: bool = False
    """Learn the tokens of the prompts too, not of the completions alone."""
    ahead: int = 6
    """Draft steps that are trained: of a chain each on the head's own states of the one before (test-time training), of a
    parallel head each behind one mask more. At least the K that jobs will draft with."""
    decay: float = 0.8
    """Weight of each draft step relative to the one before."""
    missed: float = 1.0
    """What a place counts behind a wrong draft of an earlier step, which a round would throw away; 0 leaves it out."""
    temperature: float = 1.0
    """Of the target's distributions that are learnt; below 1 the likeliest token counts for more, as in greedy jobs."""
    lr: float = 3e-3
    """Highest learning rate: reached after 2 % of the steps, then a straight line down to nothing."""
    muon: bool = True
    """The matrices of the layers learn by Muon, what is left by AdamW; false: all by AdamW."""
    clip: float = 0.5
    """Norm that gradients are clipped to."""
    epochs: int = 4
    """Passes over the completions."""
    steps: int | None = None
    """Batches altogether, instead of epochs."""
    batch_tokens: int = 32768
    """Tokens of a batch at most, padding included; rows of like length make a batch."""
    max_len: int = 2048
    """Tokens of a row, prompt included; what is longer is cut at its end."""
    held_out: int = 64
    """Completions kept out of the training, with all others of their prompts: the acceptance curves are theirs."""
    eval_steps: int = 500
    """Batches between two points of the acceptance curves; 0: at the end alone."""
    save_s: float = 60.0
    """Seconds between checkpoints: what a kill can cost."""
    seed: int = 0
    """Of the first weights, the rows held out and the order of the batches."""


@dataclass(slots=True, kw_only=True)
class TrainRun:
    model: ModelConfig = field(default_factory=ModelConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    """name; parallel: the head learns to draft in parallel; max_len: K of the acceptance curves; path, aux_layers: a head to go
    on from."""
    input: CompletionsConfig = field(default_factory=CompletionsConfig)
    output: HeadOutputConfig = field(default_factory=HeadOutputConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda."""


RANGES: dict[str, tuple[float, float, str]] = {
    "draft.num_speculative_tokens": (1, 64, "it is the K of the acceptance curves"),
    "input.limit": (1, math.inf, "null takes every completion"),
    "train.draft_vocab": (2, math.inf, "32000 is usual"),
    "train.layers": (1, 4, "1 is usual, 2 for a small target, 4 for draft=parallel"),
    "train.inner": (8, math.inf, "null takes the target's"),
    "train.mask_token": (0, math.inf, "null chooses one"),
    "train.ahead": (1, 16, "6 is usual"),
    "train.decay": (math.ulp(0.0), 1.0, "1 weighs all draft steps alike"),
    "train.missed": (0.0, 1.0, "1 weighs all places alike"),
    "train.temperature": (0.01, 100.0, "1 is the target's own distribution"),
    "train.lr": (math.ulp(0.0), 1.0, "3e-3 is usual"),
    "train.clip": (math.ulp(0.0), math.inf, "0.5 is usual"),
    "train.epochs": (1, math.inf, "4 is usual"),
    "train.steps": (1, math.inf, "null goes by train.epochs"),
    "train.batch_tokens": (8, math.inf, "32768 is usual"),
    "train.max_len": (8, math.inf, "2048 is usual"),
    "train.held_out": (0, math.inf, "0 measures no acceptance"),
    "train.eval_steps": (0, math.inf, "0 measures at the end alone"),
    "train.save_s": (0.0, math.inf, "60 is usual"),
    "train.seed": (0, 2**63 - 1, "give a whole number"),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("auto", "float32", "bfloat16", "float64"),
    "model.load_format": ("auto", "dummy"),
    "draft.aux_layers": ("auto", "input", "output"),
    "output.layout": ("flat", "speculators"),
    "device": ("auto", "cpu", "cuda"),
}
REQUIRED: dict[str, str] = {
    "model.path": "the folder or hub id of the target",
    "input.path": "the output folder of a job that this target ran, or a list of them",
    "output.dir": "the folder that the head goes to",
}
_READ = ("draft.name", "draft.path", "draft.aux_layers", "draft.num_speculative_tokens", "draft.parallel")
_OF_NEW_HEADS = ("aux_layer_ids", "inner")
_UNREAD = ("model.chat_template", "model.think_tokens")


def check_training(run: TrainRun) -> None:
    """Raises ConfigError naming key, value, limit and what to do."""
    check_given(run, REQUIRED)
    check_credentials(run, ("model.path", "draft.path", "output.dir"))
    check_saved(run)
    check_choices(run, CHOICES)
    check_ranges(run, RANGES)
    _drafter(run)
    if "://" in (run.output.dir or ""):
        raise ConfigError(f"output.dir={run.output.dir}: a head is trained into a folder of this machine; copy it afterwards")
    if run.train.max_len > run.train.batch_tokens:
        raise ConfigError(
            f"train.max_len={run.train.max_len} exceeds train.batch_tokens={run.train.batch_tokens}: "
            "a row must fit a batch; lower it"
        )


def _drafter(run: TrainRun) -> None:
    if run.draft.name != "eagle3":
        raise ConfigError(f"draft={run.draft.name} is nothing that train makes; use draft=eagle3 or draft=parallel")
    if run.draft.parallel not in ("auto", True, False):
        raise ConfigError(f"draft.parallel={run.draft.parallel} must be one of auto, true, false")
    if run.train.mask_token is not None and run.draft.parallel is not True:
        raise ConfigError(f"train.mask_token={run.train.mask_token} is of draft=parallel; remove one of them")
    usual = TrainRun()
    for key in (*(f"draft.{name}" for name in asdict(run.draft)), *_UNREAD):
        if key not in _READ and value_of(run, key) != value_of(usual, key):
            raise ConfigError(f"{key}={value_of(run, key)} is not used by train; remove the key")
    for name in _OF_NEW_HEADS if run.draft.path is not None else ():
        if (value := getattr(run.train, name)) != getattr(usual.train, name):
            raise ConfigError(f"train.{name}={value} and draft.path: that head has its own; remove one of them")
