"""draft=auto becomes a drafter, and K its usual number, once the model is known (`prepare.open_model`); a short job does
without it (`job/load/short_jobs.py`).

Each rank of those that compute one model together chooses for itself. All ranks read the same files, which
`job/runner/follower.py` checks, and so choose the same drafter.
"""

from __future__ import annotations

from dataclasses import replace

from batchspec.config.draft_checks import check_draft
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.drafters import DRAFTERS
from batchspec.config.reference import option_values
from batchspec.config.schema import RunConfig
from batchspec.errors import ConfigError

AUTO = "auto"
KEPT = ("coupled", "window", "sink_tokens", "cache_dtype")
"""Keys that mean the same for a head and for the drafter before it."""


def with_drafter(config: RunConfig, *, has_mtp: bool) -> tuple[RunConfig, str]:
    """The configuration with the drafter's own name and all its keys, and why draft=auto took it; empty if it was named.

    has_mtp  whether the model's checkpoint has an MTP layer
    Keys of `draft` that are null get the values of conf/draft/NAME.yaml. Raises ConfigError for a key that the drafter that
    draft=auto took does not read.
    """
    draft, why = config.draft, ""
    if draft.name == AUTO:
        name, why = ("mtp", "the checkpoint has an MTP layer") if has_mtp else ("lookup", "the checkpoint has no MTP layer")
        draft = replace(draft, name=name)
    draft = _with_usual_keys(draft)
    if draft == config.draft:
        return config, why
    config = replace(config, draft=draft)
    try:
        check_draft(config)
    except ConfigError as error:
        raise ConfigError(f"draft=auto took {draft.name}, because {why}: {error}" if why else str(error)) from None
    return config, why


def without_drafts(config: RunConfig) -> RunConfig | None:
    """The configuration with draft=none in place of the drafter that draft=auto took; None if the user set a key of `draft`. Keys
    of draft.train stay.

    config  as `with_drafter` returns it
    """
    own = config.draft.train
    if config.draft != _with_usual_keys(DraftConfig(name=config.draft.name, train=own)):
        return None
    return replace(config, draft=_with_usual_keys(DraftConfig(name="none", train=own)))


def with_head(config: RunConfig, path: str | None) -> RunConfig:
    """The configuration that drafts with a head of draft.train.kind, in place of the drafter that it has before.

    config  as `with_drafter` returns it
    path    folder of the head; None: there is none yet, for a forecast
    """
    draft = config.draft
    assert draft.train.kind is not None
    usual = _with_usual_keys(DraftConfig(name=draft.name)).num_speculative_tokens
    reads = DRAFTERS[draft.train.kind].reads
    kept = {name: getattr(draft, name) for name in KEPT if f"draft.{name}" in reads}
    return replace(config, draft=_with_usual_keys(DraftConfig(
        name=draft.train.kind, path=path, adaptive=draft.adaptive, lengths=draft.lengths, **kept,
        num_speculative_tokens=None if draft.num_speculative_tokens == usual else draft.num_speculative_tokens,
    )))


def _with_usual_keys(draft: DraftConfig) -> DraftConfig:
    """With the values of conf/draft/NAME.yaml for keys that are null."""
    usual = option_values("draft", draft.name)
    return replace(draft, **{key: value for key, value in usual.items() if getattr(draft, key) is None})
