"""The checks of the keys of `draft`: what the drafter reads and needs, and which keys exclude each other."""

from __future__ import annotations

from batchspec.config.draft_schema import MAX_TREE_NODES, MAX_TREE_PLACES, MOST_AHEAD, DraftConfig
from batchspec.config.drafters import DRAFTERS
from batchspec.config.key import value_of
from batchspec.config.no_effect import refuse_given, refuse_unread_by_drafter
from batchspec.config.schema import RunConfig
from batchspec.errors import ConfigError

WITH_HEADS = ("eagle3", "block", "hybrid")


def check_draft(config: RunConfig) -> None:
    """Raises ConfigError. The drafter's name must be one of its choices. What depends on K is checked only if K is set."""
    draft, entry = config.draft, DRAFTERS[config.draft.name]
    refuse_unread_by_drafter(config)
    for name, value in (("coupled", draft.coupled), ("parallel", draft.parallel)):
        if value != "auto" and not isinstance(value, bool):
            raise ConfigError(f"draft.{name}={value} must be one of auto, true, false")
    for key, what in entry.needs.items():
        made_up = key == "draft.path" and entry.dummy and config.model.load_format == "dummy"
        if value_of(config, key) is None and not made_up:
            raise ConfigError(f"draft={draft.name} needs {key}: {what}")
    if draft.prompt_lookup_min > draft.prompt_lookup_max:
        raise ConfigError(
            f"draft.prompt_lookup_min={draft.prompt_lookup_min} exceeds "
            f"draft.prompt_lookup_max={draft.prompt_lookup_max}; swap them"
        )
    _tree(config)
    _train(config)
    if draft.synthetic is not None:
        _synthetic(draft, draft.synthetic)


def _train(config: RunConfig) -> None:
    """The keys of a head that the job trains for itself. What depends on the model is checked once that is known."""
    draft, own = config.draft, config.draft.train
    if own.kind is None:
        keys = [f"draft.train.{name}" for name in ("minutes", "tokens", "store")]
        refuse_given(config, keys, "has no effect without draft.train.kind; choose draft=trained or remove the key")
        return
    said = f"draft.train.kind={own.kind}"
    if draft.name in WITH_HEADS:
        raise ConfigError(f"{said} with draft={draft.name}, which has a head already; choose draft=trained or remove the key")
    if config.model.load_format == "dummy":
        raise ConfigError(f"{said} with model.load_format=dummy: random weights are not trained for; remove one")
    if config.model.adapter is not None or config.model.adapters:
        raise ConfigError(
            f"{said} with LoRA adapters is not supported: a training reads the model without them; merge the adapter into the "
            "checkpoint, or choose another drafter"
        )
    if config.cluster.tensor_parallel != 1:
        raise ConfigError(
            f"{said} with cluster.tensor_parallel={config.cluster.tensor_parallel} is not supported: a head is trained on one "
            "GPU; choose another drafter"
        )
    if draft.synthetic is not None:
        raise ConfigError(f"{said} with draft.synthetic: accepted tokens are made up, whatever the head; remove one")
    if own.kind == "block" and (draft.num_speculative_tokens or 0) > MOST_AHEAD:
        raise ConfigError(
            f"{said} with draft.num_speculative_tokens={draft.num_speculative_tokens}: a block has at most {MOST_AHEAD} tokens; "
            "lower it"
        )
    if "://" in (own.store or ""):
        raise ConfigError(f"draft.train.store={own.store}: heads are kept in a local folder; name one")


def _synthetic(draft: DraftConfig, rates: list[float]) -> None:
    key, depth = (
        ("draft.tree.depth", draft.tree.depth)
        if draft.tree.depth
        else ("draft.num_speculative_tokens", draft.num_speculative_tokens)
    )
    if depth is None:
        depth = len(rates)
    if not rates or len(rates) % depth:
        raise ConfigError(f"draft.synthetic={rates} has {len(rates)} rates; {key}={depth} needs as many, for each kind of row")
    falling = all(rates[i] >= rates[i + 1] for i in range(len(rates) - 1) if (i + 1) % depth)
    if not falling or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigError(
            f"draft.synthetic={rates} must be in 0 .. 1 and non-increasing: a draft token is accepted only after accepted ones"
        )


def _tree(config: RunConfig) -> None:
    draft, tree = config.draft, config.draft.tree
    if tree.topk == 1:
        return
    if draft.parallel is True:
        raise ConfigError(
            f"draft.tree.topk={tree.topk} grows a tree level by level, draft.parallel=true drafts all at once; remove one of them"
        )
    depth = tree.depth or draft.num_speculative_tokens
    if depth is None:
        return
    places, grown = (depth - 1) * tree.topk, tree.topk + (depth - 1) * tree.topk**2
    if places > MAX_TREE_PLACES:
        raise ConfigError(
            f"draft.tree.topk={tree.topk} at {depth} levels takes {places} places to grow, more than {MAX_TREE_PLACES}; "
            "lower it or draft.tree.depth"
        )
    if tree.nodes is not None and grown < tree.nodes <= MAX_TREE_NODES:
        raise ConfigError(
            f"draft.tree.nodes={tree.nodes} exceeds the {grown} nodes that draft.tree.topk={tree.topk} grows at {depth} levels; "
            "lower it or remove the key"
        )
