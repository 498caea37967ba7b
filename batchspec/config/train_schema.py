"""The keys of `batchspec train` with their units, and the checks that are made before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchspec.config.draft_schema import MOST_AHEAD, DraftConfig
from batchspec.config.drafters import DRAFTERS
from batchspec.config.key import ABOVE_0, Key, declared_keys, key
from batchspec.config.no_effect import refuse_given
from batchspec.config.schema import ModelConfig
from batchspec.config.values import check_credentials, check_given, check_saved, check_values
from batchspec.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class CompletionsConfig:
    """The completions that the head learns from."""

    path: Any = key(None, form="string or list of strings", path=True)
    """Output folder of a job, or a glob or list of them: Parquet with prompt_ids and token_ids (required)."""
    limit: int | None = key(None, low=1, advice="null takes every completion")
    """Maximum number of completions, from the first on. null is all of them."""


@dataclass(slots=True, kw_only=True)
class HeadOutputConfig:
    """Where the head, or the tuned MTP layer, is written."""

    dir: str | None = key(None, path=True)
    """Folder of the head or layer, on this machine (required)."""
    layout: str = key("flat", choices=("flat", "speculators"))
    """Layout of a head's files: flat (SafeAILab, SpecForge, SGLang, vLLM) or speculators (vLLM). An MTP layer has the names of
    its checkpoint."""
    overwrite: bool = False
    """Delete what an earlier training left in output.dir and start anew."""


@dataclass(slots=True, kw_only=True)
class TrainConfig:
    """The training itself."""

    draft_vocab: int = key(32000, low=2, advice="32000 is usual")
    """Maximum number of tokens that a head can draft: the most frequent ones of the completions. An MTP layer drafts all."""
    aux_layer_ids: list[int] | None = None
    """Layers of the target whose input hidden states the head reads. null is layer 2, the middle one and the last but two; for
    draft=block five, evenly spaced from layer 2 to the last but one."""
    layers: int | None = key(None, low=1, high=5, advice="1 is usual, 2 for a small target, 4 for draft=parallel")
    """Number of layers of the head. More layers draft better, but a chain runs them for each draft token. null is 1, 3 for
    draft=block, or the number that draft.path has; a larger number adds layers to that head."""
    inner: int | None = key(None, low=8, advice="null takes the target's")
    """Intermediate size of the MLPs of the head. null is the target's."""
    mask_token: int | None = key(None, low=0, advice="null chooses one")
    """Id of the mask token of a head that drafts all tokens in one pass. null is the highest id that occurs in no completion."""
    prompts: bool = False
    """Train on the tokens of the prompts too, not of the completions alone."""
    ahead: int = key(6, low=1, high=MOST_AHEAD, advice="6 is usual")
    """Number of draft steps that are trained. It should be at least the K that jobs will draft with. A chain, of a head or of an
    MTP layer, trains each step on its own hidden states of the step before (test-time training), a parallel head trains each
    after one more mask. For draft=block it is the size of a block, and jobs cannot draft more."""
    anchors: float = key(0.25, low=ABOVE_0, high=1.0, advice="0.25 is usual")
    """Share of the trained positions of a batch at which a block begins, drawn anew for each batch. Only draft=block has it."""
    decay: float = key(0.8, low=ABOVE_0, high=1.0, advice="1 gives all draft steps the same weight")
    """Weight of each draft step relative to the step before."""
    missed: float = key(1.0, low=0.0, high=1.0, advice="1 gives all positions the same weight")
    """Weight of positions after a wrong draft of an earlier step, which a decode round would discard. 0 leaves them out."""
    temperature: float = key(1.0, low=0.01, high=100.0, advice="1 is the target's own distribution")
    """Temperature of the target's distributions that the head learns. Below 1 the most likely token counts more, as in greedy
    jobs."""
    lr: float | None = key(None, low=ABOVE_0, high=1.0, advice="3e-3 is usual, 1e-4 for draft=mtp")
    """Highest learning rate. It is reached after 2 % of the steps and then falls linearly to zero. null is 3e-3, and 1e-4 for an
    MTP layer that goes on from trained weights."""
    muon: bool = True
    """Train the matrices of the layers with Muon and the rest, experts and routers too, with AdamW. false trains all with
    AdamW."""
    clip: float = key(0.5, low=ABOVE_0, advice="0.5 is usual")
    """Norm to which gradients are clipped."""
    epochs: int = key(4, low=1, advice="4 is usual")
    """Number of passes over the completions."""
    steps: int | None = key(None, low=1, advice="null uses train.epochs")
    """Number of batches in total, instead of epochs."""
    minutes: float | None = key(None, low=ABOVE_0, advice="null has no limit")
    """Most minutes of training, over all runs; loading, and measuring at the end, come on top. The learning rate then falls with
    the time. null trains all batches."""
    batch_tokens: int = key(32768, low=8, advice="32768 is usual")
    """Maximum number of tokens of a batch, padding included. Completions of similar length form a batch."""
    max_len: int = key(2048, low=8, advice="2048 is usual")
    """Maximum number of tokens of a sequence, prompt included; longer ones are cut at the end."""
    held_out: int = key(64, low=0, advice="0 measures no acceptance")
    """Number of completions kept out of the training, together with all others of their prompts. Acceptance is measured on
    them."""
    eval_steps: int = key(500, low=0, advice="0 measures at the end only")
    """Number of batches between two measurements of acceptance. 0 measures at the end only."""
    save_s: float = key(60.0, low=0.0, advice="60 is usual")
    """Seconds between two checkpoints, which is what a kill can cost."""
    seed: int = key(0, low=0, high=2**63 - 1, advice="give a whole number")
    """Seed of the initial weights, the choice of held-out completions and the order of the batches."""


@dataclass(slots=True, kw_only=True)
class TrainRun:
    model: ModelConfig = field(default_factory=ModelConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    input: CompletionsConfig = field(default_factory=CompletionsConfig)
    output: HeadOutputConfig = field(default_factory=HeadOutputConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    device: str = key("auto", choices=("auto", "cpu", "cuda"))
    """Device that the models run on. auto is a GPU if there is one."""


DESCRIPTIONS: dict[str, str] = {
    "draft.name": "The kind of drafter that is trained. draft=eagle3 is a head that drafts a chain, draft=parallel one that "
    "drafts all tokens in one forward pass, draft=block a DSpark head, and draft=mtp the MTP layer of the model's checkpoint.",
    "draft.num_speculative_tokens": "K of the acceptance curves, and the default K in the head's config (layout speculators).",
    "draft.path": "Folder or hub id of a head, or tuned MTP layer, whose training goes on. null trains a new head, or the MTP "
    "layer of the checkpoint; that layer is random if the checkpoint has none or with model.load_format=dummy.",
    "draft.parallel": "true trains the head to draft all tokens in one forward pass (draft=parallel).",
}
"""Descriptions of keys that have another meaning here than in a job."""
REQUIRED: dict[str, str] = {
    "model.path": "the folder or hub id of the target",
    "input.path": "the output folder of a job that this target ran, or a list of them",
    "output.dir": "the folder that the head or layer goes to",
}
READ = ("draft.name", "draft.path", "draft.aux_layers", "draft.num_speculative_tokens", "draft.parallel")
"""Keys of `draft` that train reads."""
_OF_NEW_HEADS = ("train.aux_layer_ids", "train.inner")
_NOT_OF_BLOCKS = ("draft.path", "draft.aux_layers", "draft.parallel", "train.missed")
"""Keys that draft=block does not read."""
_OF_HEADS = (
    *(f"train.{key}" for key in ("draft_vocab", "aux_layer_ids", "layers", "inner", "mask_token")), "output.layout",
    "draft.aux_layers", "draft.parallel",
)
"""Keys that draft=mtp does not read."""
UNREAD = ("model.adapter", "model.adapters", "model.chat_template", "model.think_tokens", "model.vision")
"""Keys of `model` that train does not read."""
KEYS = {
    name: declared
    for name, declared in declared_keys(TrainRun).items()
    if name in READ or (name not in UNREAD and not name.startswith("draft."))
} | {"draft.name": Key(), "draft.num_speculative_tokens": Key(low=1, high=64, advice="it is the K of the acceptance curves")}
"""The keys that train reads, and what is declared of them here."""


def check_training(run: TrainRun) -> None:
    """Raises ConfigError naming key, value, limit and what to do."""
    check_given(run, REQUIRED)
    check_credentials(run, ("model.path", "draft.path", "output.dir"))
    check_saved(run)
    check_values(run, KEYS)
    _drafter(run)
    if "://" in (run.output.dir or ""):
        raise ConfigError(f"output.dir={run.output.dir}: what is trained must go to a local folder; copy it afterwards")
    if run.train.max_len > run.train.batch_tokens:
        raise ConfigError(
            f"train.max_len={run.train.max_len} exceeds train.batch_tokens={run.train.batch_tokens}: "
            "a row must fit a batch; lower it"
        )


def _drafter(run: TrainRun) -> None:
    entry = DRAFTERS.get(run.draft.name)
    if entry is None or not entry.trained:
        raise ConfigError(f"draft={run.draft.name} cannot be trained; use draft=eagle3, draft=parallel, draft=block or draft=mtp")
    check_given(run, {"draft.num_speculative_tokens": "the K of the acceptance curves"})
    if run.draft.name == "mtp":
        refuse_given(
            run, _OF_HEADS, "is not used by draft=mtp, whose layer has the shape and the tokens of the model; remove the key"
        )
    if run.draft.name == "block":
        refuse_given(run, _NOT_OF_BLOCKS, "is not used by draft=block, which trains a new head; remove the key")
        if run.train.ahead < 2:
            raise ConfigError("train.ahead=1: a block has at least 2 queries, as every reader of such heads requires; raise it")
        if run.draft.draft_len > run.train.ahead:
            raise ConfigError(
                f"draft.num_speculative_tokens={run.draft.draft_len} exceeds train.ahead={run.train.ahead}, the size of a block; "
                "lower it or raise train.ahead"
            )
    else:
        refuse_given(run, ["train.anchors"], "applies only to draft=block; remove the key")
    if run.draft.parallel not in ("auto", True, False):
        raise ConfigError(f"draft.parallel={run.draft.parallel} must be one of auto, true, false")
    if run.draft.parallel is not True and run.draft.name != "block":
        refuse_given(run, ["train.mask_token"], "applies only to draft=parallel and draft=block; remove it or use one of these")
    if run.draft.path is None:
        refuse_given(
            run, ["draft.aux_layers"], "says how the head draft.path is read, and draft.path is not set; remove the key"
        )
    else:
        refuse_given(run, _OF_NEW_HEADS, "and draft.path: that head has its own; remove one of them")
    refuse_given(run, [name for name in declared_keys(TrainRun) if name not in KEYS], "is not used by train; remove the key")
