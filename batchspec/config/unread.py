"""Keys of a job that a call from Python does not read: a value that the caller sets is refused, one that a recipe sets is not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from batchspec.config.compose import compose
from batchspec.config.key import value_of
from batchspec.config.schema import RunConfig
from batchspec.config.typed import keys
from batchspec.errors import ConfigError

AS_DONE = {"input.num_workers": 0, "cluster.workers": 1}
"""Values that say what is done in any case."""


def refuse_unread(
    config: RunConfig, recipe: Sequence[str], unread: Mapping[str, str], call: str, taken: Collection[str] = ()
) -> list[str]:
    """The keys that `call` does not read. Raises ConfigError for one whose value is neither the default nor the recipe's.

    recipe  the overrides that name a recipe, and where Hydra finds it; empty: none
    unread  keys, or groups of keys, and why `call` does not read them
    taken   keys of these groups that `call` does read
    """
    usual = RunConfig()
    before = compose(recipe, checked=False) if recipe else usual
    found = []
    for key in keys():
        why = next((why for name, why in unread.items() if key == name or key.startswith(f"{name}.")), None)
        if why is None or key in taken:
            continue
        value = value_of(config, key)
        if value not in (value_of(usual, key), value_of(before, key), AS_DONE.get(key, value_of(usual, key))):
            raise ConfigError(f"{key}={value} is not for {call}: {why}; remove the key, or use `batchspec run`")
        found.append(key)
    return found
