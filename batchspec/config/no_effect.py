"""Keys that another key leaves without effect are refused by name.

The user set the key for a reason, and the output would not show that it changed nothing. `packing/unused.py` refuses those that
an input or a model leaves without effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchspec.config.drafters import DRAFTERS, readers
from batchspec.config.key import value_of
from batchspec.config.schema import RunConfig
from batchspec.errors import ConfigError

READ_BY = readers()
"""Keys that not every drafter reads -> the drafters that do."""


def refuse_given(config: Any, keys: Iterable[str], why: str) -> None:
    """Raise ConfigError for the first of these keys that has another value than its default.

    why  the rest of the message after KEY=VALUE: the reason, and what to do
    """
    usual = type(config)()
    for key in keys:
        if (value := value_of(config, key)) != value_of(usual, key):
            raise ConfigError(f"{key}={str(value).lower() if isinstance(value, bool) else value} {why}")


def refuse_unread_by_drafter(config: RunConfig) -> None:
    """Raise ConfigError for a key that the drafter does not read."""
    draft, chooses = config.draft, DRAFTERS[config.draft.name].chooses
    if chooses:
        named = ", ".join(f"draft={name}" for name in READ_BY["draft.path"])
        refuse_given(
            config, ["draft.path"], f"with draft={draft.name}: name the drafter that these weights are for, one of {named}"
        )
    for key, names in READ_BY.items():
        if {*names}.isdisjoint({draft.name, *chooses}):
            who = " or ".join(f"draft={name}" for name in names)
            refuse_given(config, [key], f"is not used by draft={draft.name}, only by {who}; remove the key")
    if draft.name == "none":
        keys = ["draft.num_speculative_tokens", "draft.adaptive", "draft.synthetic"]
        refuse_given(config, keys, "is not used by draft=none; remove the key, or choose draft=lookup")
        refuse_given(config, ["draft.lengths"], "is not used with draft=none; remove the key")
    if draft.adaptive is False:
        refuse_given(config, ["draft.lengths"], "is not used with draft.adaptive=false; remove the key")
    if draft.tree.topk > 1:
        refuse_given(config, ["draft.lengths"], f"is not used with draft.tree.topk={draft.tree.topk}, a tree; remove the key")
    else:
        keys = ["draft.tree.depth", "draft.tree.nodes"]
        refuse_given(config, keys, "is not used with draft.tree.topk=1, a chain; set topk or remove the key")
    if draft.window is None and draft.sink_tokens:
        refuse_given(
            config, ["draft.sink_tokens"], "without draft.window: all keys are read anyway; give a window or remove it"
        )


def refuse_without_effect(config: RunConfig) -> None:
    """Raise ConfigError for a key that other keys leave without effect, whatever drafter and task are."""
    output, from_job = config.output, config.input.from_job
    if config.cache.dtype != "fp8":
        refuse_given(
            config, ["cache.scales"], f"is not used by cache.dtype={config.cache.dtype}; set fp8 or remove the key"
        )
    if not config.decode.no_repeat_ngram.ngram_size:
        refuse_given(
            config, ["decode.no_repeat_ngram.window_size", "decode.no_repeat_ngram.whitelist_token_ids"],
            "has no effect with ngram_size=0, and cells of a column no_repeat_ngram have their own; set ngram_size or remove it",
        )
    if config.draft.synthetic is not None:
        why = "has no effect with draft.synthetic, which makes up the accepted tokens; remove one"
        refuse_given(config, ["decode.thinking_token_budget"], why)
    if from_job is None:
        keys = ["input.from_status", "input.from_where"]
        refuse_given(config, keys, "has no effect without input.from_job; give that or remove the key")
    elif from_job:
        keys = ["input.path", "input.config_name", "input.split", "input.drop"]
        refuse_given(config, keys, f"beside input.from_job={from_job}, which is the whole input; remove one")
    if output.push_to_hub is None:
        keys = ["output.push_private", "output.push_overwrite"]
        refuse_given(config, keys, "has no effect without output.push_to_hub; set output.push_to_hub or remove the key")
    if not (output.logprobs or output.prompt_logprobs):
        refuse_given(
            config, ["output.logprob_tokens"],
            "has no effect: no likeliest tokens are written; set output.logprobs=N (of scored prompts output.prompt_logprobs=N), "
            "at least 1, or remove it",
        )
