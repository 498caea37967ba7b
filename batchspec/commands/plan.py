"""`batchspec plan +job=demo`: what a run would do, without running it. It reads only the headers of the weights.

`--card NAME` plans for another card than this machine has, which may have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from batchspec.config.compose import launch
from batchspec.config.schema import RunConfig
from batchspec.console import terminal
from batchspec.errors import BatchspecError, ConfigError


def main(argv: Sequence[str]) -> int:
    """Hydra overrides as for `run`, `--full` to tokenise every row, `--card NAME`, `--json`; returns the exit code of the run.

    Raises ConfigError for `--card` without a name.
    """
    card, words = taken(argv)
    full, as_json = "--full" in words, "--json" in words
    overrides = [item for item in words if item not in ("--full", "--json")]

    def show(config: RunConfig) -> int:
        from batchspec.data.dataset.input_paths import check_exist  # imports pyarrow: a wrong key is refused without it

        check_exist(config.input.path)
        from batchspec.commands.planning import plan, plan_for  # imports torch: a missing input is refused without it

        made = plan(config, full=full) if card is None else plan_for(card, config, full=full)
        if as_json:
            from batchspec.commands.plan_json import facts

            terminal.show_json(facts(made), indent=1)
        else:
            terminal.show(made.text())
        return made.exit_code

    return launch(show, overrides, require=("model.path", "input.path"), report=report_json if as_json else None)


def report_json(error: BatchspecError) -> int:
    """Print the error as JSON too; returns its exit code."""
    terminal.fail_json(error)
    return error.exit_code


def taken(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of `--card NAME` or `--card=NAME`, or None; and the other words. Raises ConfigError without a name.

    Words of a name that the shell has parted, --card RTX 4090, are put together: what follows is a key=value or an option.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--card=") else (word,))]
    if "--card" not in words:
        return None, words
    place = words.index("--card")
    name = list(takewhile(lambda word: "=" not in word and not word.startswith(("-", "+", "~")), words[place + 1 :]))
    if not "".join(name).strip():
        raise ConfigError("--card needs the name of a card, as in --card A100-80GB; a wrong name lists all")
    return " ".join(name), words[:place] + words[place + 1 + len(name) :]
