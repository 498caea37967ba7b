"""`batchspec train draft=eagle3|parallel|block|mtp ...`: a draft head for a model, or its own MTP layer tuned, from completions
that batchspec itself generated with it.

The same command again goes on with a training that was stopped or killed. Keys are Hydra overrides, as for `run`.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.config.compose import composed
from batchspec.config.train_schema import TrainRun, check_training
from batchspec.data.dataset.input_paths import check_exist


def main(argv: Sequence[str]) -> int:
    """Hydra overrides; returns the exit code. Raises BatchspecError in one line for whatever is wrong, or Interrupted."""
    run = composed("train", argv, schema=TrainRun)
    check_training(run)
    check_exist(run.input.path)
    from batchspec.heads.training import train  # imports torch, so only after these checks

    train(run)
    return 0
