"""`batchspec plan +job=demo`: what a run would do, without running it. It reads only the headers of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.config.compose import launch
from batchspec.config.schema import RunConfig
from batchspec.console import terminal


def main(argv: Sequence[str]) -> int:
    """Hydra overrides as for `run`, and `--full` to tokenise every row; returns the exit code."""
    full = "--full" in argv
    overrides = [item for item in argv if item != "--full"]

    def show(config: RunConfig) -> None:
        from batchspec.commands.planning import plan  # imports torch, so only after the checks of `launch`

        terminal.show(plan(config, full=full).text())

    return launch(show, overrides, require=("model.path", "input.path"))
