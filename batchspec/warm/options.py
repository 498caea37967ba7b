"""The options of a warm engine: those of a job, without the keys about its input and output folders and its processes."""

from __future__ import annotations

import os

from batchspec.config.checks import AUTO
from batchspec.config.compose import compose
from batchspec.config.key import value_of
from batchspec.config.overrides import Options, overrides_of, recipe_overrides
from batchspec.config.schema import RunConfig
from batchspec.config.unread import refuse_unread
from batchspec.errors import ConfigError

NOT_HERE = {
    "input.path": "each call brings its own rows",
    "input.from_job": "each call brings its own rows",
    "input.from_status": "each call brings its own rows",
    "input.from_where": "each call brings its own rows",
    "input.config_name": "each call brings its own rows",
    "input.split": "each call brings its own rows",
    "input.limit": "each call brings its own rows",
    "input.num_workers": "it prepares rows in its own process",
    "input.max_error_fraction": "error rows come back as rows",
    "output.dir": "each call returns its rows and writes nothing",
    "output.shard_rows": "each call returns its rows and writes nothing",
    "output.dedup": "it computes every row of a call",
    "output.overwrite": "each call returns its rows and writes nothing",
    "output.push_to_hub": "each call returns its rows and writes nothing",
    "output.push_private": "each call returns its rows and writes nothing",
    "output.push_overwrite": "each call returns its rows and writes nothing",
    "output.license": "each call returns its rows and writes nothing",
    "draft.train": "it trains no head; give one, draft=eagle3 draft.path=HEAD",
    "resume": "nothing is stored that could be resumed",
    "cluster": "it computes with one copy of the model",
}
"""Keys, or groups of them, that a warm engine does not take, and why."""
TAKEN, OF_RANKS = ("cluster.tensor_parallel",), ("cluster.watchdog_s",)
"""Keys of those groups that it takes: always; if several processes compute the model."""


def warm_config(
    options: Options, job: str | None = None, config_dir: str | os.PathLike[str] | None = None
) -> RunConfig:
    """The configuration that these options give, checked.

    options     a list of overrides, or a map of keys to Python values, nested or dotted
    job         name of a recipe; what it says of the keys in NOT_HERE is not read
    config_dir  folder of recipes and groups besides those of batchspec
    Raises ConfigError, in one line, for what `run` would refuse and for keys in NOT_HERE.
    """
    recipe, given = recipe_overrides(job, config_dir), overrides_of(options)
    config = compose([*recipe, *given], require=("model.path",))
    if config.cluster.tensor_parallel == AUTO:
        raise ConfigError(f"cluster.tensor_parallel={AUTO} compares what rows would take, and there are none; give 1, 2, 4 or 8")
    recipe += [word for word in given if word.startswith("hydra.")]
    taken = TAKEN if config.cluster.tensor_parallel == 1 else (*TAKEN, *OF_RANKS)
    for key in refuse_unread(config, recipe, NOT_HERE, "batchspec.Engine", taken):
        group, _, name = key.rpartition(".")
        setattr(value_of(config, group), name, value_of(RunConfig(), key))
    return config
